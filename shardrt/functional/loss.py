"""Cross entropy: from logits, or from the inputs of a head, all at once or some rows at a time."""

from typing import Any

import numpy as np

from shardrt import autograd, dtypes
from shardrt.autograd import Function, Variable, contiguous
from shardrt.functional._arrays import (
    check_floats,
    computed,
    empty,
    empty_exact,
    empty_like,
    empty_rows,
    flat,
    for_product,
    kernels,
    operands,
    put_weight_gradient,
    rows,
    tensor,
)
from shardrt.functional._losses import checked, chunks, counted, reduced, scale_of
from shardrt.functional._types import Array, Tensor
from shardrt.functional.elementwise import where
from shardrt.functional.reduce import mean, sum
from shardrt.functional.simple_loss import deprecated, nll_loss
from shardrt.functional.softmax import log_softmax
from shardrt.functional.words import also

_SOME = 128  # rows of logits in float32 at a time, on their way to their gradient in bfloat16


class CrossEntropy(Function):
    def forward(
        self, logits: Array, targets: Array, ignore_index: int, reduction: str, inplace: bool
    ) -> Array:
        logits2 = rows(logits)  # (tokens, vocab)
        losses, lse = empty_exact((len(logits2),), logits), empty_exact((len(logits2),), logits)
        kernels().cross_entropy.forward(logits2, flat(targets), losses, lse, ignore_index)
        count = counted(targets, ignore_index, reduction)
        self.saved = (logits, targets, 0, lse, ignore_index, reduction, count, inplace)
        return reduced(losses, targets, reduction, count)

    def backward(self, dy: Array) -> tuple:
        logits, targets, first, lse, ignore_index, reduction, count, inplace = self.saved
        dlogits = logits if inplace else empty_like(logits)
        scale = scale_of(dy, reduction, count)
        arrays = rows(logits), flat(targets), lse, rows(dlogits), scale
        kernels().cross_entropy.backward(*arrays, ignore_index, first)
        if reduction == "none":
            dlogits *= dy[..., None]
        if inplace:
            self.saved = None  # the logits are gone: a second backward is an error
        return dlogits, None, None, None, None


@also(input="logits", target="targets")
def cross_entropy(
    logits: "Tensor",
    targets: Any,
    weight: Any = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    inplace: bool = False,
) -> "Tensor":
    """Minus the logarithm of softmax(logits) at the target, as in PyTorch.

    Args:
        logits: (..., vocab), float32 or float64.
        targets: integers (...), an array or a tensor; where they are ignore_index the loss and its gradient
            are 0.
        reduction: "mean" over the targets that are not ignored (not a number if all are), "sum", or "none"
            for a loss per target.
        weight: (vocab,), as in nll_loss.
        label_smoothing: how much of each target is spread evenly over the vocabulary. With a weight or
            smoothing the loss is made of other ops, which save the log-probabilities.
        size_average, reduce: None.
        inplace: backward writes the gradient over the logits and so saves an array of their size. Nothing
            else may use the logits then, nor may the op that made them have saved them; backward runs once.

    Raises:
        ValueError: for shapes that don't fit, a target out of range (it names the first; a target that is on
            a GPU is not looked at, and the loss is nan), another reduction, or inplace on a leaf.
        TypeError: for other dtypes.

    Example:
        >>> from shardrt import Tensor, functional as F
        >>> logits = Tensor([[0.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
        >>> round(float(F.cross_entropy(logits, [1, 0], reduction="sum").numpy()), 3)
        1.387
    """
    logits = tensor(logits)
    check_floats("cross_entropy", logits=logits)
    targets = checked("cross_entropy", "logits", logits, logits.shape[-1:], targets, ignore_index, reduction)
    if inplace and logits.requires_grad and logits.is_leaf:
        raise ValueError(
            "cross_entropy: inplace=True would overwrite a leaf tensor with its gradient; pass inplace=False"
        )
    deprecated("cross_entropy", size_average, reduce)
    if weight is not None or label_smoothing:
        return _smoothed(logits, targets, weight, ignore_index, reduction, label_smoothing)
    return CrossEntropy.apply(logits, targets, ignore_index, reduction, inplace)


def _smoothed(
    logits: "Tensor", targets: Array, weight: Any, ignore_index: int, reduction: str, smoothing: float
) -> "Tensor":
    """(1 - smoothing) of the loss at the target, smoothing of the mean over the vocabulary."""
    if not 0 <= smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing must be in [0, 1], got {smoothing}")
    logs = log_softmax(logits)
    how = {"weight": weight, "ignore_index": ignore_index}
    loss = nll_loss(logs, targets, reduction=reduction, **how)
    if not smoothing:
        return loss
    spread = -mean(logs if weight is None else logs * weight, -1)
    spread = where(targets != ignore_index, spread, 0.0)
    if reduction == "mean":  # over the divisor of the loss at the target
        ones = nll_loss(logs.detach() * 0 - 1, targets, reduction="sum", **how)
        spread = sum(spread) / ones
    elif reduction == "sum":
        spread = sum(spread)
    return loss * (1 - smoothing) + spread * smoothing


class LinearCrossEntropy(Function):
    """No other op has the logits: the kernels overwrite them with their gradient as early as they can.

    Where matmuls take bits of bfloat16, only _SOME rows of logits exist at a time; their gradient is bits.
    """

    handles = (1,)

    def forward(self, x: Array, weight: Variable, targets: Array, ignore_index: int, reduction: str) -> Array:
        losses, lse = (empty_exact((len(rows(x)),), x) for _ in range(2))
        x, matrix = operands(x, weight)
        x2 = rows(x)
        in_bits = x.dtype == np.uint16 and any(self.needs)  # then only some rows ever exist in float32
        logits = memory = empty_rows(_SOME if in_bits else len(x2), len(matrix), computed(x))
        if in_bits:
            logits = empty((len(x2), len(matrix)), x.dtype)
        entropy = kernels().cross_entropy
        forward = entropy.forward_in_place if any(self.needs) else entropy.forward
        for part, some in chunks(memory, len(x2)):
            kernels().linear.forward(x2[part], matrix, None, some)
            forward(some, flat(targets)[part], losses[part], lse[part], ignore_index)
            if in_bits:
                kernels().cast.pack(flat(some), flat(logits[part]), dtypes.bfloat16)
        count = counted(targets, ignore_index, reduction)
        self.saved = (x, weight, logits, targets, lse, ignore_index, reduction, count)
        return reduced(losses, targets, reduction, count)

    def backward(self, dy: Array) -> tuple:
        x, weight, logits, targets, lse, ignore_index, reduction, count = self.saved
        scale = flat(dy).astype(np.float64) if reduction == "none" else scale_of(dy, reduction, count)
        entropy = kernels().cross_entropy
        entropy.backward_in_place(logits, flat(targets), lse, scale, ignore_index)
        left = scale if entropy.LEAVES_SCALE else None
        dx, dlogits = None, logits
        self.saved = None  # the logits are gone: a second backward is an error
        if self.needs[0]:
            dx = empty(x.shape, computed(x))
            kernels().linear.backward_input(*operands(dlogits, weight), rows(dx))
            if left is not None:
                entropy.scale_rows(rows(dx), left, rows(dx))
        into = (weight if self.needs[1] else None,)
        (token,) = autograd.call_or_defer(_add_weight_gradient, x, dlogits, left, into=into)
        return dx, token, None, None, None


def _add_weight_gradient(x: Array, dlogits: Array, left: Array | None, weight: Variable) -> tuple:
    """Of what made the logits. left: a factor for each row that dlogits lack."""
    x2 = rows(x)
    if left is not None:
        x2, unscaled = empty_like(x2), x2
        kernels().cross_entropy.scale_rows(unscaled, left, x2)
    return (put_weight_gradient(weight, x2, dlogits),)


class ChunkedCrossEntropy(Function):
    """Backward makes the logits again, chunk by chunk: the gradient of the loss is known only then."""

    handles = (1,)

    def forward(
        self, x: Array, weight: Variable, targets: Array, ignore_index: int, reduction: str, chunk: int
    ) -> Array:
        losses, lse = (empty_exact((len(rows(x)),), x) for _ in range(2))
        x, matrix = operands(x, weight)
        x2 = rows(x)
        memory = empty_rows(min(chunk, len(x2)), len(matrix), computed(x))
        for part, logits in chunks(memory, len(x2)):
            kernels().linear.forward(x2[part], matrix, None, logits)
            kernels().cross_entropy.forward(
                logits, flat(targets)[part], losses[part], lse[part], ignore_index
            )
        count = counted(targets, ignore_index, reduction)
        self.saved = (x, weight, targets, lse, ignore_index, reduction, count, chunk)
        return reduced(losses, targets, reduction, count)

    def backward(self, dy: Array) -> tuple:
        x, weight, targets, lse, ignore_index, reduction, count, chunk = self.saved
        linear, x2, matrix = kernels().linear, rows(x), contiguous(weight.lent_bits())
        scale = scale_of(dy, reduction, count)
        dx = empty(x.shape, computed(x)) if self.needs[0] else None
        dweight, accumulate, token = weight.gradient_target() if self.needs[1] else (None, False, None)
        memory = empty_rows(min(chunk, len(x2)), len(matrix), computed(x))
        for part, logits in chunks(memory, len(x2)):
            linear.forward(x2[part], matrix, None, logits)
            kernels().cross_entropy.backward(
                logits, flat(targets)[part], lse[part], logits, scale, ignore_index
            )
            if reduction == "none":
                logits *= flat(dy)[part][:, None]
            dlogits = for_product(logits, matrix)
            if dx is not None:
                linear.backward_input(dlogits, matrix, rows(dx)[part])
            if dweight is not None:
                linear.backward_weight(x2[part], dlogits, dweight, accumulate)
                accumulate = True
        if dweight is not None and not accumulate:
            dweight.fill(0)  # there were no rows
        return dx, token, None, None, None, None


def linear_cross_entropy(
    x: "Tensor",
    weight: "Tensor",
    targets: Any,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk: int = 128,
) -> "Tensor":
    """As cross_entropy(linear(x, weight), targets), with never more than `chunk` rows of logits in memory.

    The weight's gradient is added where it belongs, chunk by chunk. The gradient of the logits then takes
    their memory as soon as they have been read, and backward runs once. In bfloat16 on a CPU it has 2 bytes
    for each, and of the logits 128 rows are there at a time.

    Args:
        x: (..., inputs).
        weight: (vocab, inputs).
        targets: integers (...).
        chunk: costs chunk * vocab elements in forward and in backward, where plain logits cost rows * vocab
            from the one to the other, and a matmul more: the logits are made a second time. 0: all rows at
            once, and no matmul more.

    Raises:
        ValueError: for sizes that don't fit, a target out of range, another reduction or a chunk below 0.
        TypeError: for other dtypes.
    """
    op = "linear_cross_entropy"
    x, weight = tensor(x), tensor(weight)
    words = getattr(weight, "words", None)
    if words is not None:  # a parameter that says how: its rows are cut over ranks
        how = {"ignore_index": ignore_index, "reduction": reduction, "chunk": chunk}
        return words.linear_cross_entropy(x, weight, targets, **how)
    check_floats(op, x=x, weight=weight)
    if weight.ndim != 2 or x.ndim == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op}: x must be (..., inputs) and weight (vocab, inputs), got {x.shape} and {weight.shape}"
        )
    targets = checked(op, "x", x, weight.shape[:1], targets, ignore_index, reduction)
    if chunk < 0:
        raise ValueError(f"{op}: chunk must be at least 0, got {chunk}")
    if chunk == 0:
        return LinearCrossEntropy.apply(x, weight, targets, ignore_index, reduction)
    return ChunkedCrossEntropy.apply(x, weight, targets, ignore_index, reduction, chunk)
