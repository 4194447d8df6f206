"""Wrappers of split modules: they convert inputs and outputs."""

from collections.abc import Callable
from typing import Any

import numpy as np

from shardrt import functional as F
from shardrt.comm.protocol import Communicator
from shardrt.functional.collective import gather, gather_same
from shardrt.functional.in_time import add_bias
from shardrt.nn.module import Module, WrapperOrder
from shardrt.parallel.axis import TIME, Axis
from shardrt.tensor import Tensor


def check_whole(module: Module) -> None:
    """Raise RuntimeError where the model that was split is not the whole any more."""
    if module.parent is not None:
        raise RuntimeError(
            f"parallelize_module: it was called on {module.name!r} before that became part of another "
            "module; put the whole together first, and call it on the outermost module"
        )


class Converting:
    """Around the forward of a module that is split."""

    layer, every_entry = WrapperOrder.CONVERSION, False

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __deepcopy__(self, memo: dict) -> "Converting":
        raise TypeError(f"copy.deepcopy: the model is split along {self.axis.mesh!r} and can't be copied")


class Column(Converting):
    """Each rank computes some of the outputs: x I or V -> R, y its own.

    Args:
        parts: for each part of y, how many elements this rank computes, and over what ranks it is gathered
            where several compute a head together (None: its elements are needed here alone).
    """

    def __init__(self, axis: Axis, parts: list[tuple[int, Communicator | None]]) -> None:
        super().__init__(axis)
        self._parts = parts if any(others for _, others in parts) else []

    def run(self, module: Module, forward: Callable, /, x: Tensor) -> Tensor:
        y = forward(self.axis.enter(x, again=True))
        return self._with_shared_heads(y) if self._parts else y

    def _with_shared_heads(self, y: Tensor) -> Tensor:
        pieces, stop = [], 0
        for width, others in self._parts:
            start, stop = stop, stop + width
            piece = y[..., start:stop]
            pieces.append(piece if others is None else gather(piece, others, -1))
        return F.concatenate(pieces, axis=-1)


class Row(Converting):
    """Each rank computes with some of the inputs: x its own, y P -> I or V; then the bias, once."""

    def run(self, module: Module, forward: Callable, /, x: Tensor) -> Tensor:
        state, bias = module.__dict__, module.bias
        state["bias"] = None  # the bias is added to the sum, not to each summand
        try:
            y = F.cast(self.axis.leave(forward(x)), x.value_dtype.name)  # float32 so far, if it is in parts
        finally:
            state["bias"] = bias
        return y if bias is None else add_bias(y, bias)


class OwnTime(Converting):
    """An embedding of positions or of words: each rank looks up its slice of the time."""

    def run(self, module: Module, forward: Callable, /, indices: Any) -> Tensor:
        if not self.axis.in_parts:
            return forward(indices)
        indices = indices if hasattr(indices, "shape") else np.asarray(indices)
        return forward(indices[..., self.axis.part_of_time(indices.shape[-1])])


class WholeTime(Converting):
    """Gathers the module's output, so that all ranks go on with the same tensor."""

    def run(self, module: Module, forward: Callable, /, x: Tensor) -> Tensor:
        y = forward(x)
        return gather_same(y, self.axis.communicator, TIME) if self.axis.in_parts else y


class Deciding(Converting):
    """Around the whole model: its modules agree whether activations are split along time.

    Raises:
        RuntimeError: where it is not the whole any more: dropout outside would differ between the ranks.
    """

    layer = WrapperOrder.MODEL

    def run(self, module: Module, forward: Callable, /, *args: Any, **kwargs: Any) -> Any:
        check_whole(module)
        with self.axis.decided():
            return forward(*args, **kwargs)
