"""Arrays without elements: NumPy's shapes, strides and views over addresses without memory.

The array's device records each computation: ufuncs, the NumPy functions named here, and methods. Other NumPy
functions raise a TypeError that names them. Code that bypasses these, such as the buffer protocol or
np.asarray, accesses memory that does not exist: the process ends with a segmentation fault, and faulthandler
prints the place.

Each device has its own class of arrays, `kind_for(device)`. Views have the same class.
"""

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from shardrt.device.protocol import Array

__all__ = ["Shaped", "kind_for"]


def kind_for(device: Any) -> type["Shaped"]:
    """The class of the arrays of a simulated device."""
    return type("Shaped", (Shaped,), {"shardrt_device": device})


class Shaped(np.ndarray):
    """An array without elements. Only its device makes one; the class's `shardrt_device` records its work."""

    shardrt_device: Any = None

    # -- NumPy's protocols

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, out: tuple = (), **options: Any
    ) -> Any:
        if any(_foreign(operand) for operand in (*inputs, *out)):
            return NotImplemented  # a tensor's turn
        name = f"{ufunc.__name__}" if method == "__call__" else f"{ufunc.__name__}.{method}"
        computed = _METHODS.get(method)
        if computed is None or ufunc.signature is not None:
            raise _unknown(f"numpy.{name}")
        return computed(self, ufunc, name, inputs, out, **options)

    def __array_function__(self, function: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        if function in _FUNCTIONS:
            return _FUNCTIONS[function](*args, **kwargs)
        if function in _MADE_OF_METHODS:
            return function._implementation(*args, **kwargs)
        raise _unknown(f"{function.__module__}.{function.__name__}")

    # -- elements by position

    def __getitem__(self, index: Any) -> Array:
        parts = index if type(index) is tuple else (index,)
        if _is_basic(parts):
            whole = any(part is Ellipsis for part in parts)
            return super().__getitem__(parts if whole else (*parts, ...))  # never a number
        parts, shape = _placed(self.shape, parts)
        y = _result(self, shape, self.dtype)
        _work("getitem", (self, *parts), (y,), nbytes=2 * y.nbytes)
        return y

    def __setitem__(self, index: Any, value: Any) -> None:
        _check_writeable(self)
        parts = index if type(index) is tuple else (index,)
        if _is_basic(parts):
            target = self[index]
            if not _same(target, value):  # x[i] += y has already written to this view
                _assign(target, value)
            return
        parts, shape = _placed(self.shape, parts)
        np.broadcast_shapes(shape, np.shape(value))
        nbytes = 2 * prod(shape) * self.itemsize
        _work("setitem", (value, *parts), (self,), nbytes=nbytes)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    # -- methods that compute

    def fill(self, value: Any) -> None:
        _check_writeable(self)
        _work("fill", (), (self,), args=(value,))

    def copy(self, order: str = "C") -> Array:
        y = _result(self, self.shape, self.dtype)
        _work("copy", (self,), (y,))
        return y

    def __copy__(self) -> Array:
        return self.copy()

    def __deepcopy__(self, memo: dict) -> Array:
        return self.copy()

    def astype(
        self, dtype: Any, order: str = "K", casting: str = "unsafe", copy: bool = True, **_: Any
    ) -> Array:
        if not copy and self.dtype == dtype:
            return self
        y = _result(self, self.shape, np.dtype(dtype))
        _work("astype", (self,), (y,))
        return y

    def reshape(self, *shape: Any, **options: Any) -> Array:
        try:
            return super().reshape(*shape, **options, copy=False)
        except ValueError:  # not a view, or no such shape
            return np.ndarray.reshape(self.copy(), *shape, copy=False)

    def ravel(self, order: str = "C") -> Array:
        return self.reshape(-1)

    def flatten(self, order: str = "C") -> Array:
        return self.copy().reshape(-1)

    def cumsum(self, axis: int | None = None, dtype: Any = None, out: Any = None) -> Array:
        return np.add.accumulate(self if axis is not None else self.ravel(), axis or 0, dtype, out)

    def argmax(self, axis: int | None = None, out: Any = None, **options: Any) -> Array:
        return _found(self, "argmax", axis, **options)

    def argmin(self, axis: int | None = None, out: Any = None, **options: Any) -> Array:
        return _found(self, "argmin", axis, **options)

    def argsort(self, axis: int = -1, kind: Any = None, order: Any = None, **options: Any) -> Array:
        y = _result(self, self.shape, np.dtype(np.intp))
        _work("argsort", (self,), (y,))
        return y

    def take(self, indices: Any, axis: int | None = None, out: Any = None, mode: str = "raise") -> Array:
        return self.ravel()[indices] if axis is None else self[(slice(None),) * axis + (indices,)]

    # -- what the host reads

    def _reported(self) -> np.ndarray:
        return self.shardrt_device.to_numpy(self)

    def item(self, *place: int) -> Any:
        if not place and self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return (self[place] if place else self)._reported().item()

    def tolist(self) -> Any:
        return self._reported().tolist()

    def tobytes(self, order: str = "C") -> bytes:
        return self._reported().tobytes()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iub":
            raise TypeError("only integer scalar arrays can be converted to a scalar index")
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self._reported())

    def __repr__(self) -> str:
        return f"Shaped({self.shape}, {self.dtype.name}, {self.shardrt_device.name!r})"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else repr(self)

    def __reduce__(self) -> Any:
        raise TypeError("an array without elements can't be pickled")


def _unknown(name: str) -> TypeError:
    return TypeError(f"{name}: not known for arrays without elements; see shardrt/device/shapes.py")


def _refused(name: str) -> Callable:
    def refuse(self: Shaped, *args: Any, **kwargs: Any) -> Any:
        raise _unknown(f"numpy.ndarray.{name}")

    return refuse


for _name in (
    "byteswap choose compress diagonal dot dump dumps getfield nonzero partition argpartition put repeat "
    "resize searchsorted setfield sort tofile trace cumprod round __complex__ __contains__"
).split():
    setattr(Shaped, _name, _refused(_name))


def _work(
    name: str, reads: tuple, writes: tuple, flops: int = 0, nbytes: int | None = None, args: tuple = ()
) -> None:
    """Record work on the device of the written arrays. Only copies may mix arrays of device and host."""
    kind = type(writes[0])
    if not issubclass(kind, Shaped):
        raise TypeError(
            f"numpy.{name}: the result has shapes only, so `out` must be an array of the simulated device"
        )
    if any(isinstance(array, Shaped) and type(array) is not kind for array in reads):
        raise TypeError(
            f"numpy.{name}: arrays of device {kind.shardrt_device.name!r} and of another device can't be "
            "mixed"
        )
    kind.shardrt_device.work(f"numpy.{name}", reads, writes, flops=flops, nbytes=nbytes, args=args)


def _result(like: Shaped, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    return like.shardrt_device.result(shape, dtype)


def _check_writeable(array: Array) -> None:
    if not array.flags.writeable:
        raise ValueError("assignment destination is read-only")


def _foreign(operand: Any) -> bool:
    """Whether the operand is neither array nor number, but handles ufuncs: a tensor."""
    return hasattr(operand, "__array_ufunc__") and not isinstance(operand, np.ndarray | np.generic)


def _same(target: Array, value: Any) -> bool:
    if not isinstance(value, Shaped) or (value.shape, value.strides) != (target.shape, target.strides):
        return False
    return value.__array_interface__["data"] == target.__array_interface__["data"]


def _assign(target: Array, value: Any, where: Any = True) -> None:
    _check_writeable(target)
    shape = np.broadcast_shapes(np.shape(value), np.shape(where))
    if np.broadcast_shapes(target.shape, shape) != target.shape and shape != (1,) * len(shape):
        raise ValueError(f"could not broadcast input array from shape {shape} into shape {target.shape}")
    if target.size:
        _work("copyto", (value, where), (target,))


# -- ufuncs


def _call(
    like: Shaped,
    ufunc: np.ufunc,
    name: str,
    inputs: tuple,
    out: tuple,
    where: Any = True,
    dtype: Any = None,
    casting: str = "same_kind",
    subok: bool = True,
) -> Any:
    inputs = tuple(np.asarray(x) if isinstance(x, list | tuple) else x for x in inputs)
    shape = np.broadcast_shapes(*map(np.shape, inputs), np.shape(where))
    kinds = _dtypes_of(ufunc, "__call__", tuple(map(_kind, inputs)), dtype)
    out = tuple(out) or (None,) * len(kinds)
    results = tuple(_result(like, shape, k) if y is None else y for y, k in zip(out, kinds, strict=True))
    for y, kind in zip(results, kinds, strict=True):
        _check_out(name, y, shape, kind, casting)
    _work(name, (*inputs, where), results, flops=prod(shape), args=inputs)
    return results[0] if len(results) == 1 else results


def _check_out(name: str, y: Array, shape: tuple[int, ...], dtype: np.dtype, casting: str) -> None:
    _check_writeable(y)
    if y.shape != shape and np.broadcast_shapes(y.shape, shape) != y.shape:
        raise ValueError(f"numpy.{name}: out must have shape {shape}, got {y.shape}")
    if not np.can_cast(dtype, y.dtype, casting):
        raise TypeError(
            f"numpy.{name}: out is {y.dtype}, the result {dtype}, which {casting!r} does not cast"
        )


def _reduce(
    like: Shaped,
    ufunc: np.ufunc,
    name: str,
    inputs: tuple,
    out: tuple,
    axis: Any = 0,
    dtype: Any = None,
    keepdims: bool = False,
    **_: Any,
) -> Array:
    (x,) = inputs
    axes = range(x.ndim) if axis is None else np.lib.array_utils.normalize_axis_tuple(axis, x.ndim)
    kept = ((1,) if i in axes else (n,) for i, n in enumerate(x.shape) if keepdims or i not in axes)
    (kind,) = _dtypes_of(ufunc, "reduce", (x.dtype,), dtype)
    y = _result(like, tuple(n for size in kept for n in size), kind) if not out or out[0] is None else out[0]
    _work(name, (x,), (y,), flops=x.size)
    return y


def _accumulate(
    like: Shaped, ufunc: np.ufunc, name: str, inputs: tuple, out: tuple, axis: int = 0, dtype: Any = None
) -> Array:
    (x,) = inputs
    (kind,) = _dtypes_of(ufunc, "accumulate", (x.dtype,), dtype)
    y = _result(like, x.shape, kind) if not out or out[0] is None else out[0]
    _work(name, (x,), (y,), flops=x.size)
    return y


def _at(like: Shaped, ufunc: np.ufunc, name: str, inputs: tuple, out: tuple) -> None:
    target, index, *values = inputs
    parts, shape = _placed(target.shape, index if type(index) is tuple else (index,))
    _work(name, (target, *parts, *values), (target,), prod(shape), 3 * prod(shape) * target.itemsize)


_METHODS = {"__call__": _call, "reduce": _reduce, "accumulate": _accumulate, "at": _at}


def _kind(operand: Any) -> Any:
    """The dtype of an array, or the type of a Python number: it determines the dtype of a result."""
    return operand.dtype if hasattr(operand, "dtype") else type(operand)


@lru_cache(1 << 10)
def _dtypes_of(ufunc: np.ufunc, method: str, kinds: tuple, dtype: Any) -> tuple[np.dtype, ...]:
    """The dtypes of the results: NumPy computes with operands of one element."""
    operands = [np.ones(1, kind) if isinstance(kind, np.dtype) else kind(1) for kind in kinds]
    with np.errstate(all="ignore"):
        found = getattr(ufunc, method)(*operands, **({} if dtype is None else {"dtype": dtype}))
    return tuple(y.dtype for y in (found if isinstance(found, tuple) else (found,)))


# -- elements by position


def _is_basic(parts: tuple) -> bool:
    """Whether an index gives a view in NumPy."""
    return all(
        part is None or part is Ellipsis or type(part) is int or isinstance(part, slice | np.integer)
        for part in parts
    )


def _placed(shape: tuple[int, ...], parts: tuple) -> tuple[tuple, tuple[int, ...]]:
    """(index arrays, shape of the result) of an index with arrays. See NumPy's advanced indexing."""
    parts = tuple(np.asarray(part) if isinstance(part, list) else part for part in parts)
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    if any(part.dtype == np.bool_ for part in arrays):
        raise _unknown("an index of booleans, whose shape depends on values,")
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    if not any(part is Ellipsis for part in parts):
        parts = (*parts, ...)
    everything = (slice(None),) * (len(shape) - taken)
    at = next(i for i, part in enumerate(parts) if part is Ellipsis)
    full = (*parts[:at], *everything, *parts[at + 1 :])
    sizes, fancy, result = iter(shape), [], []
    for place, part in enumerate(full):
        if part is None:
            result.append(1)
        elif isinstance(part, slice):
            result.append(len(range(*part.indices(next(sizes)))))
        else:
            next(sizes)
            fancy.append((place, len(result)))
    together = np.broadcast_shapes(*(np.shape(full[place]) for place, _ in fancy))
    neighbours = fancy[-1][0] - fancy[0][0] == len(fancy) - 1
    first = fancy[0][1] if neighbours else 0
    return tuple(arrays), (*result[:first], *together, *result[first:])


def _found(x: Shaped, name: str, axis: int | None, keepdims: bool = False) -> Array:
    gone = range(x.ndim) if axis is None else (axis % x.ndim,)
    shape = ((1,) if i in gone else (n,) for i, n in enumerate(x.shape) if keepdims or i not in gone)
    y = _result(x, tuple(n for size in shape for n in size), np.dtype(np.intp))
    _work(name, (x,), (y,), flops=x.size)
    return y


# -- functions


def _like(
    x: Array, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, **_: Any
) -> Array:
    shape = x.shape if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
    return _result(x, shape, x.dtype if dtype is None else np.dtype(dtype))


def _full_like(x: Array, value: Any, *args: Any, **options: Any) -> Array:
    y = _like(x, *args, **options)
    y.fill(value)
    return y


def _zeros_like(x: Array, *args: Any, **options: Any) -> Array:
    return _full_like(x, 0, *args, **options)


def _ones_like(x: Array, *args: Any, **options: Any) -> Array:
    return _full_like(x, 1, *args, **options)


def _copyto(target: Array, source: Any, casting: str = "same_kind", where: Any = True) -> None:
    if not isinstance(target, Shaped):
        raise _unknown("numpy.copyto, into memory of the host,")
    _assign(target, source, where)


def _where(condition: Any, *values: Any) -> Array:
    if len(values) != 2:
        raise _unknown("numpy.where of a condition alone, whose shape depends on values,")
    like = next(x for x in (condition, *values) if isinstance(x, Shaped))
    shape = np.broadcast_shapes(*map(np.shape, (condition, *values)))
    y = _result(like, shape, np.result_type(*values))
    _work("where", (condition, *values), (y,))
    return y


def _concatenate(arrays: Any, axis: int | None = 0, out: Any = None, **_: Any) -> Array:
    like = next(x for x in arrays if isinstance(x, Shaped))
    arrays = [x.reshape(-1) for x in arrays] if axis is None else list(arrays)
    shape = list(arrays[0].shape)
    shape[axis or 0] = sum(x.shape[axis or 0] for x in arrays)
    y = _result(like, tuple(shape), np.result_type(*arrays)) if out is None else out
    _work("concatenate", tuple(arrays), (y,))
    return y


def _broadcast_to(x: Array, shape: Any, subok: bool = False) -> Array:
    return np.broadcast_to._implementation(x, shape, subok=True)


def _array_equal(x: Any, y: Any, equal_nan: bool = False) -> bool:
    return np.shape(x) == np.shape(y) and bool((x == y).all())


_FUNCTIONS: dict[Callable, Callable] = {
    np.empty_like: _like,
    np.zeros_like: _zeros_like,
    np.ones_like: _ones_like,
    np.full_like: _full_like,
    np.copyto: _copyto,
    np.where: _where,
    np.concatenate: _concatenate,
    np.broadcast_to: _broadcast_to,
    np.array_equal: _array_equal,
}
# Those that NumPy makes of shapes, views, methods and ufuncs alone.
_MADE_OF_METHODS = {
    *(np.shape, np.ndim, np.size, np.result_type, np.can_cast, np.min_scalar_type, np.may_share_memory),
    *(np.shares_memory, np.iscomplexobj, np.isrealobj, np.common_type),
    *(np.reshape, np.ravel, np.transpose, np.swapaxes, np.moveaxis, np.rollaxis, np.squeeze, np.expand_dims),
    *(np.flip, np.fliplr, np.flipud, np.rot90, np.split, np.array_split, np.atleast_1d, np.atleast_2d),
    *(np.sum, np.prod, np.max, np.min, np.amax, np.amin, np.mean, np.any, np.all, np.clip, np.cumsum),
    *(np.argmax, np.argmin, np.argsort, np.take, np.copy, np.stack, np.tril, np.triu),
    *(np.real, np.imag, np.diff, np.ptp),
}
