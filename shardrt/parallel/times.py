"""How long the pieces of a model take, measured before it has values."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from shardrt import autograd, device, random
from shardrt.nn.module import Module
from shardrt.nn.parameter import Parameter
from shardrt.nn.pieces import Piece
from shardrt.pytree import replaced, tensors
from shardrt.tensor import Tensor


def piece_times(model: Module, batch: Mapping[str, Any], repeats: int = 3) -> list[float]:
    """Seconds of forward and backward of each piece of `model`, the least of some, on this rank.

    Parameters are 0 meanwhile, those of one piece at a time; model and random numbers are left as they were.
    """
    found, x = [], None
    with random.at(random.state()), _buffers_as_they_are(model), autograd.enable_grad():
        for piece in model.pieces():
            with ExitStack() as stack:
                for parameter in piece.parameters():
                    stack.enter_context(_zero(parameter))
                taken = []
                for _ in range(1 + repeats):  # the first compiles
                    seconds, y = _once(piece, x, batch)
                    taken.append(seconds)
            found.append(min(taken[1:]))
            x = replaced(y, lambda tensor: Tensor(tensor.data))
    return found


@contextmanager
def _buffers_as_they_are(model: Module) -> Iterator[None]:
    """Undo what a with block writes to the model's buffers, such as running statistics."""
    before = [(array, array.copy()) for _, array in model.named_buffers()]
    try:
        yield
    finally:
        for array, values in before:
            array[...] = values


def _once(piece: Piece, x: Any, batch: Mapping[str, Any]) -> tuple[float, Any]:
    here = device.current()
    x = replaced(x, lambda tensor: Tensor(tensor.data, requires_grad=True))
    here.wait_here()
    started = here.clock()
    y = piece.run(x, batch)
    for tensor in tensors(y):
        if tensor.requires_grad:
            tensor.backward(np.ones_like(tensor.data), retain_graph=True)
    here.current_stream.synchronize()
    return here.clock() - started, y


@contextmanager
def _zero(parameter: Parameter) -> Iterator[None]:
    before, array = parameter.storage, device.current().zeros(parameter.shape, parameter.dtype)
    parameter.storage = parameter.new_storage(array)
    try:
        yield
    finally:
        parameter.storage = before
