"""What the parts of batch norm cost."""

from shardrt.kernels.shape._cost import Array, Cost, cost


def statistics(x: Array, mean: Array, squares: Array) -> Cost:
    return _planes((x,), (mean, squares), x, 4, x.shape[1])


def forward(x: Array, mean: Array, rstd: Array, weight: Array, bias: Array, y: Array) -> Cost:
    return _planes((x, mean, rstd, weight, bias), (y,), x, 2, x.size)


def backward_sums(dy: Array, x: Array, mean: Array, rstd: Array, dweight: Array, dbias: Array) -> Cost:
    return _planes((dy, x, mean, rstd), (dweight, dbias), x, 4, x.shape[1])


def backward_input(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array,
    along: Array,
    level: Array,
    dx: Array,
) -> Cost:
    return _planes((dy, x, mean, rstd, weight, along, level), (dx,), x, 5, x.size)


def _planes(reads: tuple, writes: tuple, x: Array, each: int, blocks: int) -> Cost:
    return cost(reads, writes, each * x.size, launches=min(blocks, 1), sizes=x.shape)
