"""Lion over ranges of a flat shard with its moment in 8 bits: one launch, a thread for each block."""

from shardrt.kernels.cuda._launch import Array, launch, tiles_for, type_name, vectors


def step(param: Array, grad: Array, m: Array, m_scales: Array, ranges: Array) -> None:
    """As lion.step on float32: see the CPU's. ranges: in GPU memory, as AdamW's."""
    args = (param, grad, m, m_scales, ranges, len(ranges), vectors(param, grad, m))
    types = {"GRADIENT": type_name(grad.dtype)}
    launch("lion8bit", "lion8bit", param.dtype, tiles_for(param.size, len(ranges)), args, **types)
