"""Stochastic gradient descent with momentum over ranges of a flat shard, in one launch."""

from shardrt.kernels.cuda._launch import Array, accumulator, launch, tiles_for, type_name, vectors


def step(
    param: Array,
    grad: Array,
    momentum_buffer: Array | None,
    ranges: Array,
    momentum: float,
    nesterov: bool,
) -> None:
    """Update param and momentum_buffer, 1-D, in ranges of them: see the CPU's.

    ranges: in GPU memory, as AdamW's. grad and momentum_buffer may be of other types than param.
    """
    types, aligned = {"GRADIENT": type_name(grad.dtype)}, vectors(param, grad, momentum_buffer)
    if momentum_buffer is None:
        function, args = "descend", (param, grad, ranges, len(ranges), aligned)
    else:
        function, types["STATE"] = "descend_with_momentum", type_name(momentum_buffer.dtype)
        settings = accumulator(param.dtype)(momentum), bool(nesterov)
        args = (param, grad, momentum_buffer, ranges, len(ranges), *settings, aligned)
    launch("sgd", function, param.dtype, tiles_for(param.size, len(ranges)), args, **types)
