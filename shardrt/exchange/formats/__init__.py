"""One module for each format of checkpoints."""
