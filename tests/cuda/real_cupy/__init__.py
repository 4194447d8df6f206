"""The installed CuPy over a stand-in for the CUDA runtime and driver: what runs above them is CuPy's own.

Current streams, pools, events, captures, what is refused and when: as CuPy does it, not as we believe it
does. Memory is the host's and kernels do nothing, so numbers mean nothing; cuda.py has the rules of CUDA.
"""
