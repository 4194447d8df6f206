"""What backward of a norm over rows costs: a pass over rows, and one over its partial sums."""

from shardrt.kernels.shape._cost import Array, Cost, cost, real, upto

_BLOCKS = 512  # of sums over rows, about, with at least 8 and at most 64 rows each


def backward(
    reads: tuple, dx: Array | None, gradients: tuple[Array | None, ...], accumulate: bool, each: int
) -> Cost:
    """gradients: of parameters, added up in a launch of their own; in one each if their types differ."""
    rows, width = reads[1].shape
    wanted = [x for x in gradients if x is not None]
    sums = len({x.dtype.itemsize for x in wanted}) if width else 0
    blocks = upto(rows, min(64, max(8, upto(rows, _BLOCKS))))
    return cost(
        (*reads, *(wanted if accumulate else ())),
        (dx, *wanted),
        each * rows * width,
        launches=min(rows, 1) + sums,
        sizes=(rows, width),
        scratch=len(wanted) * blocks * width * real(reads[1]),
    )
