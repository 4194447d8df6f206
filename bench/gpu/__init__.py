"""Benchmarks on NVIDIA GPUs, each figure next to a ceiling or a peer of the same run.

`python -m bench.gpu` (docs/explanation/gpu.md). Every section is a process of its own, so that none can take
another down with it.
"""
