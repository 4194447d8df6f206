"""Measurements: one training step (`bench.step`), beside PyTorch (`bench.compare`), and of its parts."""
