"""Measurements: one training step (`bench.step`), next to PyTorch (`bench.compare`), and of its parts."""
