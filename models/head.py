"""What a language model ends with: logits, or the loss that they would give."""

from typing import Any

from shardrt import Tensor
from shardrt import functional as F


def head(x: Tensor, weight: Tensor, targets: Any, reduction: str, chunk: int) -> Tensor:
    """Logits (..., vocab) of x (..., width); with targets (...) the loss, `chunk` rows at a time (0: all).

    At once, backward writes the gradient over the logits, which nobody else has. In chunks, there are never
    more logits than that, and backward makes them again: one more product of the head.
    """
    if targets is None:
        return F.linear(x, weight)
    if chunk:
        return F.linear_cross_entropy(x, weight, targets, reduction=reduction, chunk=chunk)
    return F.cross_entropy(F.linear(x, weight), targets, reduction=reduction, inplace=True)
