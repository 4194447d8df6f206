"""A GPU in software: the installed CuPy, whole, over a CUDA runtime and driver of our own.

CuPy's pools, current streams, captures, checks of launches and its own kernels run as they are; what they
call below is in this folder. Kernels, ours and CuPy's, are the same sources, compiled for the processor.
Work in streams is late: nothing runs before something must, and then in any order that CUDA allows.

`start()` before cupy is imported, in a process of its own.
"""
