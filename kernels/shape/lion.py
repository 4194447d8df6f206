"""What a step of Lion costs; see adamw.py."""

from shardrt.kernels.shape._cost import Array, Cost, cost


def step(param: Array, grad: Array, m: Array, ranges: Array) -> Cost:
    launches = int(param.size > 0 and len(ranges) > 0)
    return cost((param, grad, m, ranges), (param, m), 9 * param.size, launches=launches, sizes=(param.size,))
