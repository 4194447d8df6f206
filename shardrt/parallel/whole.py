"""A model with stages, called as a whole: `model(...)` without gradients goes through all of them.

For evaluation and generation, which know no pipeline.
"""

from collections.abc import Callable
from typing import Any

from shardrt import autograd
from shardrt.nn.module import Module, WrapperOrder

__all__ = ["pipeline_of"]


class Piped:
    """Around the forward of a model with stages, in place of it.

    Collective over the ranks of all stages.

    Raises:
        RuntimeError: where gradients are recorded.
    """

    layer, every_entry = WrapperOrder.PIPELINE, False

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def __deepcopy__(self, memo: dict) -> "Piped":
        raise TypeError("copy.deepcopy: the model has stages on several ranks and can't be copied")

    def run(self, module: Module, forward: Callable, /, *args: Any, **kwargs: Any) -> Any:
        if autograd.is_grad_enabled():
            raise RuntimeError(
                "the model has stages on several ranks: train it with Pipeline.step, or call it inside "
                "`with no_grad()`"
            )
        return self.pipeline(*args, **kwargs)


def pipeline_of(model: Module) -> Any:
    """The Pipeline through which `model` is called; None for a model without stages."""
    piped = model.around(Piped)
    return None if piped is None else piped.pipeline
