"""What a training script needs beside the library: settings, text, metrics and progress lines."""
