"""shardrt beside PyTorch on the CPU: the same weights and batches, the same numbers."""
