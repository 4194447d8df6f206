"""AdamW and Lion with moments in bfloat16, rounded up or down at random: see the CPU's. One launch each."""

from shardrt.kernels.cuda._launch import TYPES, Array, launch, tiles_for, type_name


def adamw(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    ranges: Array,
    rounded: Array | None = None,
    kind: str = "",
) -> None:
    """As adamw.step on float32; m and v are uint16, bits of bfloat16. ranges: in GPU memory."""
    types = {"GRADIENT": type_name(grad.dtype)}
    if kind:
        types["ROUNDED"] = TYPES[kind]
    args = (param, grad, m, v, rounded, ranges, len(ranges))
    launch("stochastic", "adamw_stochastic", param.dtype, tiles_for(param.size, len(ranges)), args, **types)


def lion(param: Array, grad: Array, m: Array, ranges: Array) -> None:
    """As lion.step on float32; m is uint16, bits of bfloat16. ranges: in GPU memory."""
    types = {"GRADIENT": type_name(grad.dtype)}
    args = (param, grad, m, ranges, len(ranges))
    launch("stochastic", "lion_stochastic", param.dtype, tiles_for(param.size, len(ranges)), args, **types)
