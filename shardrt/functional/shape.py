"""Shapes: views where NumPy gives views, so most of these cost nothing. Their backwards are views too.

A view shares memory with its base, as in NumPy.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from shardrt import device
from shardrt.autograd import Function, Variable
from shardrt.functional._arrays import asarray, broadcast, empty, sum_to, tensor
from shardrt.functional._types import Array, Tensor
from shardrt.functional.words import also, torch_words


class Reshape(Function):
    strided = True

    def forward(self, x: Array, shape: tuple[int, ...]) -> Array:
        self.saved = (x.shape,)
        return x.reshape(shape)

    def backward(self, dy: Array) -> tuple:
        (shape,) = self.saved
        return dy.reshape(shape), None


def reshape(x: "Tensor", shape: int | Sequence[int]) -> "Tensor":
    """The elements in C order in another shape, of which one size may be -1. ValueError if they don't fit."""
    return Reshape.apply(tensor(x), (shape,) if isinstance(shape, int) else tuple(shape))


@torch_words
def squeeze(x: "Tensor", axis: int | Sequence[int] | None = None) -> "Tensor":
    """Without the axes of size 1, or without those named. ValueError if a named one is larger."""
    x = tensor(x)
    if axis is None:
        return reshape(x, [n for n in x.shape if n != 1])
    axes = np.lib.array_utils.normalize_axis_tuple(axis, x.ndim)
    for i in axes:
        if x.shape[i] != 1:
            raise ValueError(f"squeeze: axis {i} must have size 1, got {x.shape[i]}")
    return reshape(x, [n for i, n in enumerate(x.shape) if i not in axes])


@torch_words
def unsqueeze(x: "Tensor", axis: int) -> "Tensor":
    """With an axis of size 1 put in at `axis`."""
    x = tensor(x)
    (axis,) = np.lib.array_utils.normalize_axis_tuple(axis, x.ndim + 1)
    return reshape(x, (*x.shape[:axis], 1, *x.shape[axis:]))


@also(start_dim="first", end_dim="last")
def flatten(x: "Tensor", first: int = 0, last: int = -1) -> "Tensor":
    """With the axes from `first` to `last` as one."""
    x = tensor(x)
    if x.ndim == 0:
        return reshape(x, 1)
    first, last = np.lib.array_utils.normalize_axis_tuple((first, last), x.ndim, allow_duplicate=True)
    if first > last:
        raise ValueError(f"flatten: the first axis must not come after the last, got {first} and {last}")
    return reshape(x, (*x.shape[:first], prod(x.shape[first : last + 1]), *x.shape[last + 1 :]))


class Permute(Function):
    strided = True

    def forward(self, x: Array, axes: tuple[int, ...]) -> Array:
        self.saved = (axes,)
        return x.transpose(axes)

    def backward(self, dy: Array) -> tuple:
        (axes,) = self.saved
        return dy.transpose(sorted(range(len(axes)), key=axes.__getitem__)), None


@also(dims="axes")
def permute(x: "Tensor", axes: Sequence[int]) -> "Tensor":
    """Axes in another order: axis i of the result is axis axes[i] of x. ValueError if one is missing."""
    x = tensor(x)
    axes = np.lib.array_utils.normalize_axis_tuple(axes, x.ndim, "axes")
    if len(axes) != x.ndim:
        raise ValueError(f"permute: axes must name all {x.ndim} axes, got {axes}")
    return Permute.apply(x, axes)


@also(dim0="axis0", dim1="axis1")
def transpose(x: "Tensor", axis0: int, axis1: int) -> "Tensor":
    """Two axes exchanged."""
    x = tensor(x)
    axes = list(range(x.ndim))
    axes[axis0], axes[axis1] = axes[axis1], axes[axis0]
    return permute(x, axes)


class Expand(Function):
    strided = True

    def forward(self, x: Array, shape: tuple[int, ...]) -> Array:
        self.saved = (x.shape,)
        return broadcast(x, shape)

    def backward(self, dy: Array) -> tuple:
        (shape,) = self.saved
        return sum_to(dy, shape), None


def expand(x: "Tensor", shape: Sequence[int]) -> "Tensor":
    """Broadcast to `shape`, where -1 keeps a size; a read-only view. ValueError if it doesn't fit."""
    x = tensor(x)
    shape, added = tuple(shape), len(shape) - x.ndim
    if added < 0 or -1 in shape[:added]:
        raise ValueError(
            f"expand: x {x.shape} can't be expanded to {shape}; only axes of size 1 and new first axes can "
            "grow"
        )
    kept = (x.shape[i - added] if n == -1 else n for i, n in enumerate(shape))
    return Expand.apply(x, tuple(kept))


def tile(x: "Tensor", counts: int | Sequence[int]) -> "Tensor":
    """Copies side by side: counts[i] of them along axis i, the last ones of both shapes together."""
    x = tensor(x)
    counts = (counts,) if isinstance(counts, int) else tuple(counts)
    shape = (1,) * (len(counts) - x.ndim) + x.shape
    counts = (1,) * (len(shape) - len(counts)) + counts
    x = reshape(x, [n for size in shape for n in (1, size)])
    x = expand(x, [n for pair in zip(counts, shape, strict=True) for n in pair])
    return reshape(x, [count * size for count, size in zip(counts, shape, strict=True)])


@also(dim="axis", repeats="counts")
def repeat_interleave(x: "Tensor", counts: int | Sequence[int], axis: int | None = None) -> "Tensor":
    """Each element `counts` times, one copy after the other, along an axis; or as often as counts[i] says.

    Args:
        axis: None for the elements of all axes in a row.

    Raises:
        ValueError: if there are not as many counts as elements.
    """
    x = tensor(x)
    x, axis = (reshape(x, -1), 0) if axis is None else (x, axis)
    (axis,) = np.lib.array_utils.normalize_axis_tuple(axis, x.ndim)
    size = x.shape[axis]
    if isinstance(counts, int):
        x = unsqueeze(x, axis + 1)
        x = expand(x, (*x.shape[: axis + 1], counts, *x.shape[axis + 2 :]))
        return reshape(x, (*x.shape[:axis], size * counts, *x.shape[axis + 2 :]))
    if len(counts) != size:
        raise ValueError(
            f"repeat_interleave: counts must have {size} counts, one for each element of axis {axis}, got "
            f"{len(counts)}"
        )
    counts = counts.data if isinstance(counts, Variable) else np.asarray(counts)
    rows = np.repeat(np.arange(size), device.of(counts).to_numpy(counts))
    return getitem(x, (slice(None),) * axis + (asarray(rows),))


class Split(Function):
    strided = True

    def forward(self, x: Array, sizes: tuple[int, ...], axis: int) -> tuple:
        self.saved = (x.shape, x.dtype, sizes, axis)
        return _pieces(x, sizes, axis)

    def backward(self, *dy: Array) -> tuple:
        shape, dtype, sizes, axis = self.saved
        dx = empty(shape, dtype)
        for piece, gradient in zip(_pieces(dx, sizes, axis), dy, strict=True):
            piece[...] = 0 if gradient is None else gradient  # None: nothing used this piece
        return dx, None, None


@also(dim="axis", split_size_or_sections="sizes", split_size="sizes")
def split(x: "Tensor", sizes: int | Sequence[int], axis: int = 0) -> tuple:
    """Pieces along an axis: of the given sizes, or of one size, the last perhaps smaller.

    Raises:
        ValueError: if the sizes don't add up to the size of the axis.
    """
    x = tensor(x)
    (axis,) = np.lib.array_utils.normalize_axis_tuple(axis, x.ndim)
    total = x.shape[axis]
    if isinstance(sizes, int):
        if sizes < 1:
            raise ValueError(f"split: sizes must be at least 1, got {sizes}")
        sizes = [min(sizes, total - start) for start in range(0, total, sizes)]
    if sum(sizes) != total or min(sizes, default=0) < 0:
        raise ValueError(f"split: sizes {tuple(sizes)} do not add up to {total}, the size of axis {axis}")
    return Split.apply(x, tuple(sizes), axis)


@torch_words
def chunk(x: "Tensor", chunks: int, axis: int = 0) -> tuple:
    """At most `chunks` pieces along an axis, of one size but the last. ValueError for fewer than one."""
    if chunks < 1:
        raise ValueError(f"chunk: chunks must be at least 1, got {chunks}")
    x = tensor(x)
    return split(x, max(1, -(-x.shape[axis] // chunks)), axis)


@torch_words
def unbind(x: "Tensor", axis: int = 0) -> tuple:
    """The pieces of size 1 along an axis, without it."""
    x = tensor(x)
    return tuple(squeeze(piece, axis) for piece in split(x, 1, axis))


class Concatenate(Function):
    strided = True

    def forward(self, axis: int, *arrays: Array) -> Array:
        sizes = tuple(x.shape[axis] for x in arrays)
        self.saved = (axis, sizes)
        shape = list(arrays[0].shape)
        shape[axis] = sum(sizes)
        y = empty(tuple(shape), arrays[0].dtype)
        # Piece by piece: of many arrays CuPy's concatenate uploads a table, which a CUDA graph can't capture.
        for piece, x in zip(_pieces(y, sizes, axis), arrays, strict=True):
            piece[...] = x
        return y

    def backward(self, dy: Array) -> tuple:
        axis, sizes = self.saved
        return None, *_pieces(dy, sizes, axis)


@torch_words
def concatenate(tensors: Sequence["Tensor"], axis: int = 0) -> "Tensor":
    """Tensors one after the other along an axis; equal in dtype and in every other size.

    Raises:
        ValueError: for none, or for shapes that don't fit.
        TypeError: for dtypes that differ.

    Example:
        >>> from shardrt import Tensor, functional as F
        >>> F.concatenate([Tensor([1.0]), Tensor([2.0, 3.0])]).numpy()
        array([1., 2., 3.], dtype=float32)
    """
    tensors = [tensor(x) for x in tensors]
    if not tensors:
        raise ValueError("concatenate: pass at least one tensor")
    if len({x.dtype for x in tensors}) > 1:
        raise TypeError(
            f"concatenate: all tensors must have one dtype, got {[str(x.dtype) for x in tensors]}"
        )
    (axis,) = np.lib.array_utils.normalize_axis_tuple(axis, tensors[0].ndim)
    others = {x.shape[:axis] + (-1,) + x.shape[axis + 1 :] for x in tensors}
    if len(others) > 1:
        raise ValueError(
            f"concatenate: shapes must be equal except along axis {axis}, got {[x.shape for x in tensors]}"
        )
    return Concatenate.apply(axis, *tensors)


@torch_words
def stack(tensors: Sequence["Tensor"], axis: int = 0) -> "Tensor":
    """Tensors of one shape along a new axis. Errors as `concatenate`."""
    return concatenate([unsqueeze(x, axis) for x in tensors], axis)


@also(dims="axis")
def flip(x: "Tensor", axis: int | Sequence[int]) -> "Tensor":
    """In reverse order along one axis or several; a view."""
    x = tensor(x)
    axes = np.lib.array_utils.normalize_axis_tuple(axis, x.ndim)
    return getitem(x, tuple(slice(None, None, -1 if i in axes else 1) for i in range(x.ndim)))


@also(dims="axis", shifts="shift")
def roll(x: "Tensor", shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> "Tensor":
    """Moved by `shift` along an axis; elements that leave at one end enter at the other.

    Or by shift[i] along axis[i].

    Args:
        axis: None for the elements of all axes in a row.

    Raises:
        ValueError: for other numbers of shifts than of axes.
    """
    x = tensor(x)
    if axis is None:
        return reshape(roll(reshape(x, -1), shift, 0), x.shape)
    shifts, axes = ((n,) if isinstance(n, int | np.integer) else tuple(n) for n in (shift, axis))
    if len(shifts) != len(axes):
        raise ValueError(f"roll: pass one shift for each axis, got {len(shifts)} shifts and {len(axes)} axes")
    for shift, axis in zip(shifts, axes, strict=True):
        (axis,) = np.lib.array_utils.normalize_axis_tuple(axis, x.ndim)
        shift %= x.shape[axis] or 1
        x = concatenate(split(x, [x.shape[axis] - shift, shift], axis)[::-1], axis)
    return x


class GetItem(Function):
    strided = True

    def forward(self, x: Array, index: Any) -> Array:
        self.saved = (x.shape, x.dtype, index)
        return asarray(x[index])

    def backward(self, dy: Array) -> tuple:
        shape, dtype, index = self.saved
        dx = empty(shape, dtype)
        dx.fill(0)
        if _is_basic(index):
            dx[index] = dy
        else:
            device.of(dx).add_at(dx, index, dy)  # an element may be taken more than once
        return dx, None


def getitem(x: "Tensor", index: Any) -> "Tensor":
    """x[index] as in NumPy: a view for integers, slices, None and ...; a copy for arrays and lists."""
    x = tensor(x)
    return GetItem.apply(x, _raw_index(index, device.of(x.data)))


def _raw_index(index: Any, here: device.Device) -> Any:
    if isinstance(index, tuple):
        return tuple(_raw_index(part, here) for part in index)
    if isinstance(index, list):
        index = np.asarray(index, None if index else np.intp)
    if isinstance(index, np.ndarray):
        return here.asarray(index)  # once, for forward and backward; and CuPy's add.at takes no list
    return index.data if isinstance(index, Variable) else index


def _is_basic(index: Any) -> bool:
    """Whether NumPy takes the index as a view: no lists, arrays or booleans."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None or part is Ellipsis or type(part) is int or isinstance(part, slice | np.integer)
        for part in parts
    )


def _pieces(x: Array, sizes: Sequence[int], axis: int) -> tuple:
    """Views of x of these sizes along an axis."""
    stops = np.cumsum(sizes).tolist()
    before = (slice(None),) * axis
    return tuple(x[(*before, slice(stop - size, stop))] for size, stop in zip(sizes, stops, strict=True))
