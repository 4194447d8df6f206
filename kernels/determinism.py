"""Whether kernels may use the fastest algorithm, or must be bitwise deterministic; for all threads."""

_wanted = False


def use_deterministic_algorithms(mode: bool) -> None:
    """Allow only algorithms with bitwise identical results each time, in this process from now on; or not.

    As in PyTorch, but nothing is ever refused: there is such an algorithm for everything. On the CPU all are.
    On a GPU a matrix product is then computed by what cublasLt proposes first, not by what was the fastest
    when it was measured. Products of experts in 16 bits are not left to one call of cuBLAS, in which an
    expert's bits may depend on the rows of others. And cuDNN's backward of attention adds in a fixed order,
    which takes memory that grows with the square of the sequence's length on some GPUs.
    `fsdp.set_world_invariant` switches it on. Call it on every rank, before the model is used.
    """
    global _wanted
    _wanted = bool(mode)


def are_deterministic_algorithms_enabled() -> bool:
    """What use_deterministic_algorithms was last told; False at first."""
    return _wanted
