"""Lion over ranges of a flat shard: one launch that reads and writes everything once."""

from shardrt.kernels.cuda._launch import Array, launch, tiles_for, type_name, vectors


def step(param: Array, grad: Array, m: Array, ranges: Array) -> None:
    """Update param and m, 1-D and equally long, in ranges of them: see the CPU's.

    ranges: in GPU memory, as AdamW's. grad and m may be of other types than param.
    """
    types = {"GRADIENT": type_name(grad.dtype), "STATE": type_name(m.dtype)}
    args = (param, grad, m, ranges, len(ranges), vectors(param, grad, m))
    launch("lion", "lion", param.dtype, tiles_for(param.size, len(ranges)), args, **types)
