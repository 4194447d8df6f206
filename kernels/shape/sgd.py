"""What a step of stochastic gradient descent costs; see adamw.py."""

from shardrt.kernels.shape._cost import Array, Cost, cost


def step(
    param: Array,
    grad: Array,
    momentum_buffer: Array | None,
    ranges: Array,
    momentum: float,
    nesterov: bool,
) -> Cost:
    launches, each = int(param.size > 0 and len(ranges) > 0), 4 if momentum_buffer is None else 8
    how = {"launches": launches, "sizes": (param.size,)}
    return cost((param, grad, momentum_buffer, ranges), (param, momentum_buffer), each * param.size, **how)
