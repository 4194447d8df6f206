"""What rotary position embedding costs."""

from shardrt.kernels.shape._cost import Array, Cost, cost


def forward(x: Array, cos: Array, sin: Array, y: Array, heads: int) -> Cost:
    flops = 3 * len(x) * heads * 2 * cos.shape[1]
    return cost((x, cos, sin), (y,), flops, launches=min(len(x), 1), sizes=x.shape)


def backward(dy: Array, cos: Array, sin: Array, dx: Array, heads: int) -> Cost:
    return forward(dy, cos, sin, dx, heads)
