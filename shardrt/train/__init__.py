"""A training script's needs beside the library: settings, data, the loop, metrics and progress lines."""
