"""Measurements: one training step (`bench.step`), and the same beside PyTorch (`bench.compare`)."""
