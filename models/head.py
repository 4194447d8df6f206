"""The end of a language model: logits, or the loss that they would give."""

from typing import Any

from shardrt import Tensor
from shardrt import functional as F


def head(x: Tensor, weight: Tensor, targets: Any, reduction: str, chunk: int) -> Tensor:
    """Logits (..., vocab) of x (..., width); with targets (...) the loss, `chunk` rows at a time (0: all).

    Without chunks, the gradient takes the memory of the logits, which nothing else uses. With them, at most
    `chunk` rows of logits exist at a time, and backward makes them again: one more product of the head.
    """
    if targets is None:
        return F.linear(x, weight) if weight.words is None else weight.words.logits(x, weight)
    return F.linear_cross_entropy(x, weight, targets, reduction=reduction, chunk=chunk)
