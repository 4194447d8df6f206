"""Kernels, each pass beside plain NumPy, PyTorch and the roofline of this machine."""
