"""What pooling costs."""

from shardrt.kernels.shape._cost import Array, Cost, cost

Pair = tuple[int, int]


def max_forward(x: Array, y: Array, index: Array, window: Pair, stride: Pair, padding: Pair) -> Cost:
    return _pool((x,), (y, index), y, window, y)


def max_backward(dy: Array, index: Array, dx: Array, window: Pair, stride: Pair, padding: Pair) -> Cost:
    return _pool((dy, index), (dx,), dy, window, dx)


def mean_forward(x: Array, y: Array, window: Pair, stride: Pair, padding: Pair) -> Cost:
    return _pool((x,), (y,), y, window, y)


def mean_backward(dy: Array, dx: Array, window: Pair, stride: Pair, padding: Pair) -> Cost:
    return _pool((dy,), (dx,), dy, window, dx)


def _pool(reads: tuple, writes: tuple, outputs: Array, window: Pair, launched: Array) -> Cost:
    flops = outputs.size * window[0] * window[1]
    return cost(reads, writes, flops, launches=min(launched.size, 1), sizes=(*outputs.shape, *window))
