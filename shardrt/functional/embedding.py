"""Rows of a table by index: token and position embeddings."""

from typing import Any

from shardrt import autograd, dtypes
from shardrt.autograd import Function, Variable, contiguous
from shardrt.functional import in_time
from shardrt.functional._arrays import check_floats, computed, empty, flat, kernels, rows, tensor
from shardrt.functional._arrays import indices as checked
from shardrt.functional._types import Array, Tensor
from shardrt.functional.elementwise import where
from shardrt.functional.words import only


class Embedding(Function):
    handles = (1,)

    def forward(self, indices: Array, weight: Variable) -> Array:
        self.saved = (indices, weight)
        table = contiguous(weight.lent_bits())
        y = empty((*indices.shape, weight.shape[1]), computed(table))
        kernels().embedding.forward(flat(indices), table, rows(y))
        return y

    def backward(self, dy: Array) -> tuple:
        indices, weight = self.saved
        return None, *autograd.call_or_defer(_add_rows, indices, dy, into=(weight,))


def _add_rows(indices: Array, dy: Array, weight: Variable) -> tuple:
    how = getattr(weight, "in_parts", None)
    if how is not None:  # each row is of one rank's part of the time
        table = empty(weight.shape, dtypes.exact(dy.dtype))
        table.fill(0)
        kernels().embedding.backward(flat(indices), rows(dy), table)
        return (in_time.put(weight, how.joined(table)),)

    def fill(first: int, stop: int, out: Array, accumulate: bool) -> None:
        if not accumulate:
            out.fill(0)  # the kernel adds: most rows have no gradient
        kernels().embedding.backward(flat(indices), rows(dy), out, first)

    return (weight.put_rows(fill),)


def embedding(
    indices: Any,
    weight: "Tensor",
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> "Tensor":
    """The rows of weight that indices name: integers (...), or a range, and (rows, width) -> (..., width).

    The other arguments must have their defaults.

    Indices that are on a GPU already are not looked at: the rows of those outside are nan.

    Args:
        padding_idx: a row that gets no gradient from here.

    Raises:
        ValueError: that names the first index outside [0, rows).
        TypeError: if they are no integers.

    Example:
        >>> from shardrt import Tensor, functional as F
        >>> weight = Tensor([[0.0, 0.0], [1.0, 2.0], [3.0, 4.0]])
        >>> F.embedding([2, 1], weight).numpy()
        array([[3., 4.],
               [1., 2.]], dtype=float32)
    """
    weight = tensor(weight)
    if weight.ndim != 2:
        raise ValueError(f"embedding: weight must be (rows, width), got {weight.shape}")
    check_floats("embedding", weight=weight)
    only("embedding", "scale the weight before", max_norm=(max_norm, None), norm_type=(norm_type, 2.0))
    only("embedding", "scale the gradient in a hook", scale_grad_by_freq=(scale_grad_by_freq, False))
    only("embedding", "gradients are dense", sparse=(sparse, False))
    found = checked("embedding", "indices", indices, weight.shape[0])
    y = Embedding.apply(found, weight)
    if padding_idx is None:
        return y
    if not -weight.shape[0] <= padding_idx < weight.shape[0]:
        raise ValueError(f"embedding: padding_idx must be a row of weight {weight.shape}, got {padding_idx}")
    return where((found != padding_idx % weight.shape[0])[..., None], y, y.detach())
