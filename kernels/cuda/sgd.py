"""Stochastic gradient descent with momentum over ranges of a flat shard; a range is a launch."""

from typing import Any

from shardrt.kernels.cuda._launch import TYPES, accumulator, blocks_for, launch, vectors

Array = Any


def step(
    param: Array,
    grad: Array,
    momentum_buffer: Array | None,
    starts: Array,
    stops: Array,
    lrs: Array,
    decays: Array,
    momentum: float,
    dampening: float,
    nesterov: bool,
    first: bool,
) -> None:
    """Update param and momentum_buffer, 1-D, in the ranges [starts, stops); see optim.SGD for the rule.

    Range k has learning rate lrs[k] and weight decay decays[k], added to the gradient. `first`: the buffer
    holds nothing yet and becomes the gradient. The ranges are NumPy's; grad and momentum_buffer may be of
    other types than param.
    """
    real = accumulator(param.dtype)
    aligned = vectors(param, grad, momentum_buffer)
    types = {"GRADIENT": TYPES[grad.dtype.name]}
    if momentum_buffer is None:
        function, arrays, rest = "descend", (param, grad), (aligned,)
    else:
        function, arrays = "descend_with_momentum", (param, grad, momentum_buffer)
        kept, added = (0, 1) if first else (momentum, 1 - dampening)
        rest = (real(momentum), real(kept), real(added), bool(nesterov), bool(first), aligned)
        types["STATE"] = TYPES[momentum_buffer.dtype.name]
    for start, stop, lr, decay in zip(starts, stops, lrs, decays, strict=True):
        args = (*arrays, int(start), int(stop), real(lr), real(decay), *rest)
        launch("sgd", function, param.dtype, blocks_for(int(stop - start), 4), args, **types)


def bytes_moved(count: int, itemsize: int = 4) -> int:
    """Bytes of a step with momentum: three arrays read, two written."""
    return 5 * count * itemsize


def flops(count: int) -> int:
    """Operations of a step, about."""
    return 6 * count
