"""AdamW over ranges of a flat shard with moments in 8 bits: one launch, a thread for each block."""

from shardrt.kernels.cuda._launch import TYPES, Array, launch, tiles_for, type_name, vectors


def step(
    param: Array,
    grad: Array,
    m: Array,
    m_scales: Array,
    v: Array,
    v_scales: Array,
    ranges: Array,
    rounded: Array | None = None,
    kind: str = "",
) -> None:
    """As adamw.step on float32: see the CPU's. ranges: in GPU memory, as AdamW's."""
    types = {"GRADIENT": type_name(grad.dtype)}
    if kind:
        types["ROUNDED"] = TYPES[kind]
    states = m, m_scales, v, v_scales
    args = (param, grad, *states, rounded, ranges, len(ranges), vectors(param, grad, m, v, rounded))
    launch("adamw8bit", "adamw8bit", param.dtype, tiles_for(param.size, len(ranges)), args, **types)
