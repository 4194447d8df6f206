"""Losses that are a few other ops, and similarities. Cross entropy, which is worth its own, is in loss.py.

reduction: "mean" over all elements, "sum", or "none" for a loss per element. size_average and reduce, which
PyTorch has from before that, must be None.
"""

from typing import Any

from shardrt.functional._arrays import asarray, chosen, floating, indices, tensor
from shardrt.functional._types import Tensor
from shardrt.functional.activation import softplus
from shardrt.functional.elementwise import clamp, div, maximum, mul, sub, where
from shardrt.functional.index import gather
from shardrt.functional.reduce import mean, norm, sum
from shardrt.functional.shape import getitem, squeeze
from shardrt.functional.unary import abs, exp, log, square
from shardrt.functional.words import also, only, torch_words


def mse_loss(
    x: "Tensor",
    target: Any,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    weight: Any = None,
) -> "Tensor":
    """The squared difference.

    Args:
        weight: a factor of each loss, and the mean is then over the sum of factors.

    Raises:
        ValueError: for shapes that differ or another reduction.
    """
    deprecated("mse_loss", size_average, reduce)
    x, target = _alike("mse_loss", x, target)
    return _weighted_mean("mse_loss", square(sub(x, target)), reduction, weight)


def l1_loss(
    x: "Tensor",
    target: Any,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    weight: Any = None,
) -> "Tensor":
    """The absolute difference. weight and errors as `mse_loss`."""
    deprecated("l1_loss", size_average, reduce)
    x, target = _alike("l1_loss", x, target)
    return _weighted_mean("l1_loss", abs(sub(x, target)), reduction, weight)


def huber_loss(
    x: "Tensor", target: Any, reduction: str = "mean", delta: float = 1.0, weight: Any = None
) -> "Tensor":
    """Half the squared difference d, from |d| = delta on the line that goes on from there.

    Args:
        weight: a factor of each loss, of the shape of x.
    """
    x, target = _alike("huber_loss", x, target)
    distance = abs(sub(x, target))
    near = square(distance) * 0.5
    far = (distance - 0.5 * delta) * delta
    return _reduced("huber_loss", where(distance < delta, near, far), reduction, weight)


def smooth_l1_loss(
    x: "Tensor",
    target: Any,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> "Tensor":
    """huber_loss with delta = beta, over beta; for beta 0 l1_loss."""
    deprecated("smooth_l1_loss", size_average, reduce)
    if beta == 0:
        return l1_loss(x, target, reduction=reduction)
    return huber_loss(x, target, reduction, beta) * (1 / beta)


def binary_cross_entropy_with_logits(
    x: "Tensor",
    target: Any,
    weight: Any = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> "Tensor":
    """Minus the logarithm of the probability that sigmoid(x) gives to the target, a number in [0, 1].

    Args:
        weight: a factor of each loss.
        pos_weight: a factor of the term of target 1. Both broadcast.
    """
    name = "binary_cross_entropy_with_logits"
    deprecated(name, size_average, reduce)
    x, target = _alike(name, x, target)
    loss = mul(softplus(-x), target if pos_weight is None else mul(target, pos_weight))
    loss = loss + mul(softplus(x), 1 - target)
    return _reduced(name, loss, reduction, weight)


def binary_cross_entropy(
    x: "Tensor",
    target: Any,
    weight: Any = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
) -> "Tensor":
    """Minus the logarithm of the probability x of the target; a logarithm is -100 at the least."""
    deprecated("binary_cross_entropy", size_average, reduce)
    x, target = _alike("binary_cross_entropy", x, target)
    loss = -(mul(_bounded_log(x), target) + mul(_bounded_log(1 - x), 1 - target))
    return _reduced("binary_cross_entropy", loss, reduction, weight)


def kl_div(
    x: "Tensor",
    target: Any,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> "Tensor":
    """Return target * (log(target) - x) for log-probabilities x; of targets, too, if log_target.

    Args:
        reduction: also "batchmean": the sum over the size of the first axis.
    """
    deprecated("kl_div", size_average, reduce)
    x, target = _alike("kl_div", x, target)
    if log_target:
        loss = mul(exp(target), target - x)
    else:
        loss = where(target > 0, mul(target, log(where(target > 0, target, 1.0)) - x), 0.0)
    if reduction == "batchmean":
        return div(sum(loss), x.shape[0])
    return _reduced("kl_div", loss, reduction)


@also(target="targets")
def nll_loss(
    x: "Tensor",
    targets: Any,
    weight: Any = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
) -> "Tensor":
    """Minus the log-probability x (..., classes) at the target (...), 0 where that is ignore_index.

    The mean is over the targets that are not ignored: their losses over the sum of their weights.

    Args:
        weight: (classes,), a factor of each loss by its target.

    Raises:
        ValueError: for shapes that don't fit, a target out of range or another reduction.
    """
    deprecated("nll_loss", size_average, reduce)
    x = floating(x)
    if x.ndim == 0:
        raise ValueError("nll_loss: x must have at least one dimension, got a scalar")
    index = indices("nll_loss", "targets", targets, x.shape[-1], ignore_index)
    if index.shape != x.shape[:-1]:
        raise ValueError(f"nll_loss: targets must be {x.shape[:-1]} for x {x.shape}, got {index.shape}")
    counted = index != ignore_index
    places = chosen(counted, index, 0, index.shape, index.dtype)
    picked = squeeze(gather(x, -1, places[..., None]), -1)
    if weight is not None:
        weight = tensor(weight)
        if weight.shape != x.shape[-1:]:
            raise ValueError(
                f"nll_loss: weight must be {x.shape[-1:]}, one for each class, got {weight.shape}"
            )
        weight = where(counted, getitem(weight, places), 0.0)
    loss = where(counted, -picked, 0.0)
    if reduction == "mean" and weight is None:
        return div(sum(loss), tensor(asarray(counted.sum())))
    return _weighted_mean("nll_loss", loss, reduction, weight)


@torch_words
def normalize(x: "Tensor", p: float = 2.0, axis: int = 1, eps: float = 1e-12) -> "Tensor":
    """Return x over its norm of order p along an axis, which is eps at the least.

    Args:
        p: as `norm` takes it.
    """
    x = floating(x)
    return div(x, maximum(norm(x, p, axis, keepdims=True), eps))


@also(dim="axis", x1="x", x2="y")
def cosine_similarity(x: "Tensor", y: Any, axis: int = 1, eps: float = 1e-8) -> "Tensor":
    """The cosine of the angle between x and y along an axis; each norm is eps at the least."""
    x, y = floating(x), floating(y)
    dot = sum(mul(x, y), axis)
    return div(dot, mul(maximum(norm(x, 2, axis), eps), maximum(norm(y, 2, axis), eps)))


def deprecated(op: str, size_average: None, reduce: None) -> None:
    """Raise ValueError for the arguments that PyTorch keeps at their places from before `reduction`."""
    only(
        op, "use reduction='mean', 'sum' or 'none'", size_average=(size_average, None), reduce=(reduce, None)
    )


def _alike(op: str, x: Any, target: Any) -> tuple["Tensor", "Tensor"]:
    x, target = floating(x), tensor(target)
    if x.shape != target.shape:
        raise ValueError(f"{op}: x and target must have one shape, got {x.shape} and {target.shape}")
    return x, target


def _bounded_log(x: "Tensor") -> "Tensor":
    return clamp(log(x), -100.0)


def _weighted_mean(op: str, loss: "Tensor", reduction: str, weight: Any) -> "Tensor":
    """As `_reduced`; the mean is over the sum of the weights."""
    if weight is None or reduction != "mean":
        return _reduced(op, loss, reduction, weight)
    return div(_reduced(op, loss, "sum", weight), sum(tensor(weight)))


def _reduced(op: str, loss: "Tensor", reduction: str, weight: Any = None) -> "Tensor":
    loss = loss if weight is None else mul(loss, weight)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    return {"mean": mean, "sum": sum, "none": lambda loss: loss}[reduction](loss)
