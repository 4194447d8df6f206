"""What a step of AdamW costs. The ranges, whose numbers are not looked at, count as all of the shard."""

from shardrt.kernels.shape._cost import Array, Cost, cost


def step(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    ranges: Array,
    rounded: Array | None = None,
    kind: str = "",
) -> Cost:
    launches = int(param.size > 0 and len(ranges) > 0)
    how = {"launches": launches, "sizes": (param.size,)}
    return cost((param, grad, m, v, ranges), (param, m, v, rounded), 14 * param.size, **how)
