"""Parts of a training script next to the library: settings, data, the loop, metrics and progress lines."""
