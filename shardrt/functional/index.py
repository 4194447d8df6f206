"""Elements by position: gathered, scattered, sorted, one-hot. Positions have no gradient and are arrays."""

from typing import Any

import numpy as np

from shardrt import device
from shardrt.autograd import Function
from shardrt.functional._arrays import asarray, empty, indices, tensor
from shardrt.functional._types import Array, Tensor
from shardrt.functional.elementwise import where
from shardrt.functional.shape import flatten, getitem, reshape
from shardrt.functional.words import also, torch_words


@torch_words
def gather(x: "Tensor", axis: int, index: Any) -> "Tensor":
    """`y[i][j][k] = x[i][index[i][j][k]][k]` for axis 1, and so on: one element of x for each of `index`.

    Errors name what doesn't fit.

    Args:
        index: integers with as many axes as x, no longer than x but along `axis`.
    """
    x, place = _placed("gather", x, axis, index)
    return getitem(x, place)


@torch_words
def index_select(x: "Tensor", axis: int, index: Any) -> "Tensor":
    """The slices of x along an axis that `index`, a row of integers, names."""
    x = tensor(x)
    (axis,) = np.lib.array_utils.normalize_axis_tuple(axis, x.ndim)
    return getitem(x, (slice(None),) * axis + (indices("index_select", "index", index, x.shape[axis]),))


class Scatter(Function):
    strided = True

    def forward(self, x: Array, source: Array, place: tuple, add: bool) -> Array:
        self.saved = (place, add)
        y = empty(x.shape, x.dtype)
        y[...] = x
        if add:
            device.of(y).add_at(y, place, source)  # a place may be named more than once
        else:
            y[place] = source
        return y

    def backward(self, dy: Array) -> tuple:
        place, add = self.saved
        dx = dy
        if not add and self.needs[0]:
            dx = empty(dy.shape, dy.dtype)
            dx[...] = dy
            dx[place] = 0
        return dx, asarray(dy[place]) if self.needs[1] else None, None, None


@also(dim="axis", src="source")
def scatter(x: "Tensor", axis: int, index: Any, source: Any) -> "Tensor":
    """Return x with the elements that `gather` would take replaced by `source`, a number or an array.

    A place that is named twice gets one of the two.
    """
    return _scattered("scatter", x, axis, index, source, False)


@also(dim="axis", src="source")
def scatter_add(x: "Tensor", axis: int, index: Any, source: "Tensor") -> "Tensor":
    """Return x with `source` added to the elements that `gather` would take."""
    return _scattered("scatter_add", x, axis, index, source, True)


@torch_words
def index_add(x: "Tensor", axis: int, index: Any, source: "Tensor") -> "Tensor":
    """Return x with the slices of `source` along an axis added to those of x that `index` names."""
    x, source = tensor(x), tensor(source)
    (axis,) = np.lib.array_utils.normalize_axis_tuple(axis, x.ndim)
    index = indices("index_add", "index", index, x.shape[axis])
    expected = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    _check_source("index_add", x, source, expected)
    return Scatter.apply(x, source, (slice(None),) * axis + (index,), True)


def masked_scatter(x: "Tensor", mask: Any, source: "Tensor") -> "Tensor":
    """Return x with the elements where the mask holds replaced by those of `source`, in order.

    Args:
        mask: booleans that broadcast to x.

    Raises:
        ValueError: if `source` has fewer elements than places.
    """
    x, source, mask = tensor(x), flatten(source), tensor(mask).data
    mask = np.broadcast_to(mask, x.shape)
    count = int(mask.sum())
    if source.size < count:
        raise ValueError(
            f"masked_scatter: source must have {count} elements, one for each True of mask, got {source.size}"
        )
    if count == 0:
        return x
    order = np.cumsum(mask.reshape(-1)) - 1
    taken = getitem(source, np.maximum(order, 0))
    return where(mask, reshape(taken, x.shape), x)


def tril(x: "Tensor", diagonal: int = 0) -> "Tensor":
    """The lower triangles of matrices (..., rows, columns), zeros above the diagonal."""
    x = tensor(x)
    return where(asarray(np.tri(*x.shape[-2:], diagonal, dtype=np.bool_)), x, 0)


def triu(x: "Tensor", diagonal: int = 0) -> "Tensor":
    """The upper triangles of matrices (..., rows, columns), zeros below the diagonal."""
    x = tensor(x)
    return where(asarray(~np.tri(*x.shape[-2:], diagonal - 1, dtype=np.bool_)), x, 0)


@torch_words
def argmax(x: "Tensor", axis: int | None = None, keepdims: bool = False) -> Array:
    """Where the largest element along an axis is, the first of equal ones; an array of integers."""
    return asarray(np.argmax(tensor(x).data, axis, keepdims=keepdims))


@torch_words
def argmin(x: "Tensor", axis: int | None = None, keepdims: bool = False) -> Array:
    """Where the smallest element along an axis is, the first of equal ones; an array of integers."""
    return asarray(np.argmin(tensor(x).data, axis, keepdims=keepdims))


@torch_words
def argsort(x: "Tensor", axis: int = -1, descending: bool = False) -> Array:
    """The order that sorts x along an axis, an array of integers; equal elements stay in their order."""
    values = tensor(x).data
    return np.argsort(-values if descending else values, axis, kind="stable")


@torch_words
def sort(x: "Tensor", axis: int = -1, descending: bool = False) -> tuple["Tensor", Array]:
    """(x sorted along an axis, where each element was: an array)."""
    order = argsort(x, axis, descending)
    return gather(x, axis, order), order


@torch_words
def topk(
    x: "Tensor", k: int, axis: int = -1, largest: bool = True, sorted: bool = True
) -> tuple["Tensor", Array]:
    """(the k largest elements along an axis, the largest first; where they were: an array).

    Or the smallest; in their order also where `sorted` is False.

    Raises:
        ValueError: if there are not as many.

    Example:
        >>> from shardrt import Tensor, functional as F
        >>> values, indices = F.topk(Tensor([3.0, 1.0, 2.0]), 2)
        >>> values.numpy(), indices
        (array([3., 2.], dtype=float32), array([0, 2]))
    """
    x = tensor(x)
    (axis,) = np.lib.array_utils.normalize_axis_tuple(axis, x.ndim)
    if not 0 <= k <= x.shape[axis]:
        raise ValueError(f"topk: k must be 0 to {x.shape[axis]}, the size of axis {axis}, got {k}")
    order = argsort(x, axis, largest)[(slice(None),) * axis + (slice(k),)]
    return gather(x, axis, order), order


def one_hot(values: Any, num_classes: int = -1) -> Array:
    """Integers (...) -> integers (..., num_classes), an array: 1 at the place that the integer names, else 0.

    Args:
        num_classes: one more than the largest if -1.

    Raises:
        ValueError: for an integer outside [0, num_classes).
    """
    if num_classes == -1:
        num_classes = int(tensor(values).data.max()) + 1
    index = indices("one_hot", "values", values, num_classes)
    return (index[..., None] == asarray(np.arange(num_classes))).astype(np.int64)


def _placed(op: str, x: Any, axis: int, index: Any) -> tuple["Tensor", tuple]:
    """(x, the index by which NumPy finds the elements of x that gather takes)."""
    x = tensor(x)
    (axis,) = np.lib.array_utils.normalize_axis_tuple(axis, x.ndim)
    index = indices(op, "index", index, x.shape[axis])
    fits = index.ndim == x.ndim and all(
        n <= size for i, (n, size) in enumerate(zip(index.shape, x.shape, strict=True)) if i != axis
    )
    if not fits:
        raise ValueError(f"{op}: index {index.shape} does not fit x {x.shape} along axis {axis}")
    here = device.current()
    rest = [
        here.asarray(np.arange(n)).reshape([n if j == i else 1 for j in range(x.ndim)])
        for i, n in enumerate(index.shape)
    ]
    return x, (*rest[:axis], index, *rest[axis + 1 :])


def _scattered(op: str, x: Any, axis: int, index: Any, source: Any, add: bool) -> "Tensor":
    x, place = _placed(op, x, axis, index)
    shape = np.broadcast_shapes(*(part.shape for part in place))
    source = tensor(np.full(shape, source, x.dtype) if isinstance(source, int | float) else source)
    _check_source(op, x, source, shape)
    return Scatter.apply(x, source, place, add)


def _check_source(op: str, x: "Tensor", source: "Tensor", shape: tuple[int, ...]) -> None:
    if source.shape != shape:
        raise ValueError(f"{op}: source must be {shape} for this index, got {source.shape}")
    if source.value_dtype != x.value_dtype:
        raise TypeError(
            f"{op}: x and source must have one dtype, got {x.value_dtype.name} and {source.value_dtype.name}"
        )
