"""What the runtime's own elementwise passes cost."""

from shardrt.kernels.shape._cost import Answer, Array, Cost, cost, flat


def add(first: Array, second: Array, out: Array) -> Cost:
    return flat((first, second), (out,), 1)


def scale_(x: Array, factor: float) -> Cost:
    return flat((x,), (x,), 1)


def scale_by_(x: Array, factor: Array) -> Cost:
    return flat((x, factor), (x,), 1)


def unscale_(x: Array, factor: float) -> Cost:
    launches = 1 + min(x.size, 1)  # the answer is set to 0 first
    return cost((x,), (x,), 2 * x.size, launches=launches, sizes=(x.size,), value=Answer("finite", True))


def clamp_(x: Array, limit: float) -> Cost:
    return flat((x,), (x,), 2)
