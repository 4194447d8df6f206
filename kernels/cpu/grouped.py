"""One matmul per group of rows, each with a separate weight: the layers of experts.

counts: int, how many rows each group has, one group behind the other. Rows behind the last group are 0 in
results. A group's product is that of linear.py, call by call: the same bits as a layer of its own, and of
operands in bits of bfloat16 as well.
"""

from collections.abc import Iterator, Sequence
from math import prod

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu import linear


@cost(
    "x weight -> y",
    flops=lambda weight, counts: 2 * prod(_sizes(weight, counts)[:3]),
    sizes=lambda weight, counts: _sizes(weight, counts),
    part={"x": lambda x, counts: x[: sum(counts)]},
    more=lambda weight, counts: -_idle(weight, counts),
)
def forward(x: Array, weight: Array, counts: Sequence[int], y: Array) -> None:
    """Compute y (rows, outputs) from x (rows, inputs), weight (groups, outputs, inputs)."""
    for group, rows in _groups(counts, y):
        linear.forward(x[rows], weight[group], None, y[rows])


@cost(
    "dy weight -> dx",
    flops=lambda weight, counts: 2 * prod(_sizes(weight, counts)[:3]),
    sizes=lambda weight, counts: _sizes(weight, counts, back=True),
    part={"dy": lambda dy, counts: dy[: sum(counts)]},
    more=lambda weight, counts: -_idle(weight, counts),
)
def backward_input(dy: Array, weight: Array, counts: Sequence[int], dx: Array) -> None:
    """Compute dx (rows, inputs) from dy (rows, outputs), weight (groups, outputs, inputs)."""
    for group, rows in _groups(counts, dx):
        linear.backward_input(dy[rows], weight[group], dx[rows])


@cost(
    "x dy dweight?accumulate -> dweight",
    flops=lambda dweight, counts: 2 * prod(_sizes(dweight, counts)[:3]),
    sizes=lambda dweight, counts: (*dweight.shape[1:], sum(counts), sum(map(bool, counts))),
    part={"x": lambda x, counts: x[: sum(counts)], "dy": lambda dy, counts: dy[: sum(counts)]},
)
def backward_weight(x: Array, dy: Array, counts: Sequence[int], dweight: Array, accumulate: bool) -> None:
    """Write or add dweight (groups, outputs, inputs) from x (rows, inputs) and dy (rows, outputs)."""
    start = 0
    for group, count in enumerate(counts):
        rows = slice(start, start + count)
        if count:
            linear.backward_weight(x[rows], dy[rows], dweight[group], accumulate)
        elif not accumulate:
            dweight[group].fill(0)
        start += count


def _groups(counts: Sequence[int], result: Array) -> Iterator[tuple[int, slice]]:
    """(group, its rows) of those that have rows; what is behind them becomes 0."""
    start = 0
    for group, count in enumerate(counts):
        if count:
            yield group, slice(start, start + count)
        start += count
    result[start:] = 0


def _sizes(weight: Array, counts: Sequence[int], back: bool = False) -> tuple[int, int, int, int]:
    """Rows, outputs, inputs (or inputs, outputs), and how many groups have rows."""
    outputs, inputs = weight.shape[:0:-1] if back else weight.shape[1:]
    return sum(counts), outputs, inputs, sum(map(bool, counts))


def _idle(weight: Array, counts: Sequence[int]) -> int:
    """Bytes of the weights of groups without rows."""
    return (len(counts) - sum(map(bool, counts))) * prod(weight.shape[1:]) * weight.dtype.itemsize
