"""The end of a language model: logits, or the loss that they would give."""

from functools import partial
from typing import Any

from shardrt import Tensor, nn
from shardrt import functional as F
from shardrt.nn.lora import is_adapted


def head(x: Tensor, layer: nn.Module, targets: Any, reduction: str, chunk: int) -> Tensor:
    """Logits (..., vocab) of x (..., width); with targets (...) the loss, `chunk` rows at a time (0: all).

    layer: that of the head, or of the embedding where the two are tied. Without chunks, the gradient takes
    the memory of the logits, which nothing else uses. With them, at most `chunk` rows of logits exist at a
    time, and backward makes them again: one more product of the head. One with an adapter makes all logits.
    The Linear of a head is entered, so that it may be a unit of its own.
    """
    entered = isinstance(layer, nn.Linear)
    made = layer.entered_around(partial(_made, layer)) if entered else partial(_made, layer)
    return made(x, targets, reduction, chunk)


def _made(layer: nn.Module, x: Tensor, targets: Any, reduction: str, chunk: int) -> Tensor:
    if is_adapted(layer):
        logits = layer(x)
        return logits if targets is None else F.cross_entropy(logits, targets, reduction=reduction)
    weight = layer.weight
    if targets is None:
        return F.linear(x, weight) if weight.words is None else weight.words.logits(x, weight)
    return F.linear_cross_entropy(x, weight, targets, reduction=reduction, chunk=chunk)
