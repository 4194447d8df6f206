"""Kernels, each pass beside PyTorch and the roofline of this machine."""
