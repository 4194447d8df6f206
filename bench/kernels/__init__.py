"""Kernels, each pass next to PyTorch and the roofline of this machine."""
