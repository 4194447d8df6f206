"""The GPU emulator: the installed CuPy, whole, over a CUDA runtime and driver of our own.

CuPy's pools, current streams, captures, checks of launches and its own kernels run as they are; what they
call below is in this folder. Kernels, ours and CuPy's, are the same sources, compiled for the processor.
Work in streams is late: nothing runs before something must, and then in any order that CUDA allows.

the simulator            scheduler, streams with graph, memory, kernels; cuda puts them together
libraries below CuPy     compiler (NVRTC), nccl with ring and rooms, products (cuBLAS), sorting
to put it there          plug, start (a process), fixtures (single tests), plugin (tests/gpu), run (programs)
tools                    mutations with programs, pairs
jobs of tests            processes
"""
