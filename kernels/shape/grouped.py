"""What the layers of experts cost: a product for each group that has rows.

In 16 bits all are one call, behind the upload of addresses; elsewhere those of groups with few rows are one
launch, behind the upload of a table.
"""

from collections.abc import Sequence

from shardrt.kernels import determinism
from shardrt.kernels.shape._cost import Array, Cost, cost

FEW = 1 << 28  # operations of a group that has no product of its own, as in the CUDA twin


def forward(x: Array, weight: Array, counts: Sequence[int], y: Array) -> Cost:
    return _groups(x, weight, counts, y, *weight.shape[1:])


def backward_input(dy: Array, weight: Array, counts: Sequence[int], dx: Array) -> Cost:
    return _groups(dy, weight, counts, dx, *weight.shape[:0:-1])


def backward_weight(x: Array, dy: Array, counts: Sequence[int], dweight: Array, accumulate: bool) -> Cost:
    rows, (_, outputs, inputs) = sum(counts), dweight.shape
    full = sum(count > 0 for count in counts)
    if _in_one_call(x, dweight, outputs, inputs, full):
        launches = 2 + 2 * (full < len(counts) and not accumulate)  # those without rows are set to 0
    else:
        launches = _launches(counts, outputs, inputs, least=1 if accumulate else 0)
    reads = x[:rows], dy[:rows], dweight if accumulate else None
    how = {"launches": launches, "sizes": (outputs, inputs, rows, full)}
    return cost(reads, (dweight,), 2 * rows * outputs * inputs, **how)


def _groups(x: Array, weight: Array, counts: Sequence[int], y: Array, outputs: int, inputs: int) -> Cost:
    rows, full = sum(counts), sum(count > 0 for count in counts)
    one = _in_one_call(x, y, outputs, inputs, full)
    launches = 2 if one else _launches(counts, outputs, inputs, least=1)
    launches += rows < len(y)  # rows behind the last group are set to 0
    how = {"launches": launches, "sizes": (rows, outputs, inputs, full)}
    found = cost((x[:rows], weight), (y,), 2 * rows * outputs * inputs, **how)
    idle = (len(counts) - full) * outputs * inputs * weight.dtype.itemsize
    return found._replace(nbytes=found.nbytes - idle)


def _in_one_call(x: Array, out: Array, outputs: int, inputs: int, full: int) -> bool:
    """As the CUDA twin, where all arrays are aligned and the library has such products."""
    fits = x.dtype.itemsize == 2 and x.dtype == out.dtype and not (outputs % 8 or inputs % 8)
    wanted = fits and min(full, outputs, inputs) > 0
    return wanted and not determinism.are_deterministic_algorithms_enabled()


def _launches(counts: Sequence[int], outputs: int, inputs: int, least: int) -> int:
    """Of the groups of `least` rows or more."""
    large = sum(2 * count * outputs * inputs > FEW for count in counts)
    small = any(least <= count and 2 * count * outputs * inputs <= FEW for count in counts)
    return large + 2 * small
