"""Measurements: one training step (`bench.step`), beside PyTorch (`bench.compare`), on more ranks, and more."""
