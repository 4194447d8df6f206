"""Losses that are a few other ops, and similarities. Cross entropy, which is worth its own, is in loss.py.

reduction: "mean" over all elements, "sum", or "none" for a loss per element.
"""

from typing import TYPE_CHECKING, Any

from shardrt.functional._arrays import asarray, chosen, floating, indices, tensor
from shardrt.functional.activation import softplus
from shardrt.functional.elementwise import clamp, div, maximum, mul, sub, where
from shardrt.functional.index import gather
from shardrt.functional.reduce import mean, norm, sum
from shardrt.functional.shape import squeeze
from shardrt.functional.unary import abs, exp, log, square
from shardrt.functional.words import also, torch_words

if TYPE_CHECKING:
    from shardrt.tensor import Tensor


def mse_loss(x: "Tensor", target: Any, reduction: str = "mean") -> "Tensor":
    """The squared difference. Raises ValueError for shapes that differ or another reduction."""
    x, target = _alike("mse_loss", x, target)
    return _reduced("mse_loss", square(sub(x, target)), reduction)


def l1_loss(x: "Tensor", target: Any, reduction: str = "mean") -> "Tensor":
    """The absolute difference. Errors as `mse_loss`."""
    x, target = _alike("l1_loss", x, target)
    return _reduced("l1_loss", abs(sub(x, target)), reduction)


def huber_loss(x: "Tensor", target: Any, reduction: str = "mean", delta: float = 1.0) -> "Tensor":
    """Half the squared difference d, from |d| = delta on the line that goes on from there."""
    x, target = _alike("huber_loss", x, target)
    distance = abs(sub(x, target))
    near = square(distance) * 0.5
    far = (distance - 0.5 * delta) * delta
    return _reduced("huber_loss", where(distance < delta, near, far), reduction)


def smooth_l1_loss(x: "Tensor", target: Any, reduction: str = "mean", beta: float = 1.0) -> "Tensor":
    """huber_loss with delta = beta, over beta; for beta 0 l1_loss."""
    if beta == 0:
        return l1_loss(x, target, reduction)
    return huber_loss(x, target, reduction, beta) * (1 / beta)


def binary_cross_entropy_with_logits(
    x: "Tensor", target: Any, weight: Any = None, reduction: str = "mean", pos_weight: Any = None
) -> "Tensor":
    """Minus the logarithm of what sigmoid(x) gives to the target, a number in [0, 1].

    weight: a factor of each loss; pos_weight: of what the target 1 contributes. Both broadcast.
    """
    name = "binary_cross_entropy_with_logits"
    x, target = _alike(name, x, target)
    loss = mul(softplus(-x), target if pos_weight is None else mul(target, pos_weight))
    loss = loss + mul(softplus(x), 1 - target)
    return _reduced(name, loss if weight is None else mul(loss, weight), reduction)


def binary_cross_entropy(x: "Tensor", target: Any, weight: Any = None, reduction: str = "mean") -> "Tensor":
    """Minus the logarithm of what probabilities x give to the target; a logarithm is -100 at the least."""
    x, target = _alike("binary_cross_entropy", x, target)
    loss = -(mul(_bounded_log(x), target) + mul(_bounded_log(1 - x), 1 - target))
    loss = loss if weight is None else mul(loss, weight)
    return _reduced("binary_cross_entropy", loss, reduction)


def kl_div(x: "Tensor", target: Any, reduction: str = "mean", log_target: bool = False) -> "Tensor":
    """target * (log(target) - x) for log-probabilities x; of targets, too, if log_target.

    reduction: "batchmean" as well: the sum over the size of the first axis.
    """
    x, target = _alike("kl_div", x, target)
    if log_target:
        loss = mul(exp(target), target - x)
    else:
        loss = where(target > 0, mul(target, log(where(target > 0, target, 1.0)) - x), 0.0)
    if reduction == "batchmean":
        return div(sum(loss), x.shape[0])
    return _reduced("kl_div", loss, reduction)


def nll_loss(x: "Tensor", targets: Any, ignore_index: int = -100, reduction: str = "mean") -> "Tensor":
    """Minus the log-probability x (..., classes) at the target (...), 0 where that is ignore_index.

    The mean is over the targets that are not ignored. Raises ValueError for shapes that don't fit, a target
    out of range or another reduction.
    """
    x = floating(x)
    if x.ndim == 0:
        raise ValueError("nll_loss: x needs an axis, the classes")
    index = indices("nll_loss", "targets", targets, x.shape[-1], ignore_index)
    if index.shape != x.shape[:-1]:
        raise ValueError(f"nll_loss: x (..., classes) needs targets (...), got {x.shape} and {index.shape}")
    counted = index != ignore_index
    places = chosen(counted, index, 0, index.shape, index.dtype)
    picked = squeeze(gather(x, -1, places[..., None]), -1)
    loss = where(counted, -picked, 0.0)
    if reduction == "mean":
        return div(sum(loss), tensor(asarray(counted.sum())))
    return _reduced("nll_loss", loss, reduction)


@also({"p": (2, "only the Euclidean norm is: x / norms for another")}, dim="axis")
def normalize(x: "Tensor", axis: int = -1, eps: float = 1e-12) -> "Tensor":
    """x over its Euclidean norm along an axis, which is eps at the least."""
    x = floating(x)
    return div(x, maximum(norm(x, axis, keepdims=True), eps))


@torch_words
def cosine_similarity(x: "Tensor", y: Any, axis: int = -1, eps: float = 1e-8) -> "Tensor":
    """The cosine of the angle between x and y along an axis; each norm is eps at the least."""
    x, y = floating(x), floating(y)
    dot = sum(mul(x, y), axis)
    return div(dot, mul(maximum(norm(x, axis), eps), maximum(norm(y, axis), eps)))


def _alike(op: str, x: Any, target: Any) -> tuple["Tensor", "Tensor"]:
    x, target = floating(x), tensor(target)
    if x.shape != target.shape:
        raise ValueError(f"{op}: x and target must have one shape, got {x.shape} and {target.shape}")
    return x, target


def _bounded_log(x: "Tensor") -> "Tensor":
    return clamp(log(x), -100.0)


def _reduced(op: str, loss: "Tensor", reduction: str) -> "Tensor":
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    return {"mean": mean, "sum": sum, "none": lambda loss: loss}[reduction](loss)
