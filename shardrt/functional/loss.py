"""Cross entropy from logits; reads them once, and keeps one number per row beside them for backward."""

from typing import TYPE_CHECKING, Any

import numpy as np

from shardrt.autograd import Function
from shardrt.functional._arrays import (
    asarray,
    check_floats,
    empty_exact,
    empty_like,
    flat,
    indices,
    kernels,
    rows,
    tensor,
)

if TYPE_CHECKING:
    from shardrt.tensor import Tensor

Array = Any


class CrossEntropy(Function):
    __slots__ = ()

    def forward(
        self, logits: Array, targets: Array, ignore_index: int, reduction: str, inplace: bool
    ) -> Array:
        logits2 = rows(logits)  # (tokens, vocab)
        losses, lse = empty_exact((len(logits2),), logits), empty_exact((len(logits2),), logits)
        kernels().cross_entropy.forward(logits2, flat(targets), losses, lse, ignore_index)
        count = (targets != ignore_index).sum() if reduction == "mean" else None  # stays on the device
        self.saved = (logits, targets, lse, ignore_index, reduction, count, inplace)
        if reduction == "none":
            return losses.reshape(targets.shape)
        total = losses.sum(dtype=np.float64)
        if count is not None:
            with np.errstate(invalid="ignore"):  # 0 / 0: nan
                total = total / count
        return asarray(total, losses.dtype)

    def backward(self, dy: Array) -> tuple:
        logits, targets, lse, ignore_index, reduction, count, inplace = self.saved
        dlogits = logits if inplace else empty_like(logits)
        scale = None if reduction == "none" else dy.astype(np.float64)
        if count is not None:
            scale = scale / np.maximum(count, 1)
        kernels().cross_entropy.backward(rows(logits), flat(targets), lse, rows(dlogits), scale, ignore_index)
        if reduction == "none":
            dlogits *= dy[..., None]
        if inplace:
            self.saved = None  # the logits are gone: a second backward is an error
        return dlogits, None, None, None, None


def cross_entropy(
    logits: "Tensor",
    targets: Any,
    ignore_index: int = -100,
    reduction: str = "mean",
    inplace: bool = False,
) -> "Tensor":
    """Minus the logarithm of softmax(logits) at the target, as in PyTorch.

    logits: (..., vocab), float32 or float64. targets: integers (...), an array or a tensor; where they are
    ignore_index the loss and its gradient are 0. reduction: "mean" over the targets that are not ignored
    (not a number if all are), "sum", or "none" for a loss per target.

    inplace: backward writes the gradient over the logits and so saves an array of their size. Nothing else
    may use the logits then, nor may the op that made them have saved them; backward runs once.

    Raises ValueError for shapes that don't fit, a target out of range (it names the first; a target that is
    on a GPU is not looked at, and the loss is nan), another reduction, or inplace on a leaf; TypeError for
    other dtypes.
    """
    logits = tensor(logits)
    check_floats("cross_entropy", logits=logits)
    if logits.ndim == 0:
        raise ValueError("cross_entropy: logits need an axis, the vocabulary; got a single number")
    targets = indices("cross_entropy", "targets", targets, logits.shape[-1], ignore_index)
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: logits (..., vocab) need targets (...), got {logits.shape} and {targets.shape}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"cross_entropy: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if inplace and logits.requires_grad and logits.is_leaf:
        raise ValueError("cross_entropy: inplace would write the gradient over a leaf's values")
    return CrossEntropy.apply(logits, targets, ignore_index, reduction, inplace)
