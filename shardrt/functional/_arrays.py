"""Helpers of several ops: arguments as tensors, arrays for results, gradients summed to a shape. No op."""

from math import prod
from typing import Any

import numpy as np

from shardrt import device, dtypes
from shardrt.autograd import Variable, contiguous
from shardrt.functional._types import Array, Tensor


def kernels() -> Any:
    """The kernels of the current device."""
    return device.current().kernels


def tensor(x: Any) -> "Tensor":
    """`x` itself if it is a tensor, else a tensor of it."""
    return x if isinstance(x, Variable) else Variable.result_type(x)


def floating(x: Any) -> "Tensor":
    """As `tensor`; integers and booleans become float32."""
    x = tensor(x)
    return x if dtypes.floating(x.dtype) else Variable.result_type(x.data.astype(np.float32))


def indices(op: str, name: str, values: Any, size: int, ignore: int | None = None) -> Array:
    """Numbers from 0 to size - 1, or `ignore`, as a C-contiguous int64 array on the device.

    An array that is on a GPU already is not checked, because the host would have to wait for it.

    Args:
        values: an array, a tensor, nested lists, or a range, which unlike an array can be in a captured
            graph.

    Raises:
        TypeError: for other than integers.
        ValueError: that names the first one outside.
    """
    here = device.current()
    if isinstance(values, range):
        array = np.arange(values.start, values.stop, values.step, dtype=np.int64)
        _check_range(op, name, array, size, ignore)
        return here.numbers(lambda: array)
    array = values.data if isinstance(values, Variable) else values
    if not hasattr(array, "dtype") or isinstance(array, np.generic):
        array = _array_of(op, name, array)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{op}: {name} must be integers, got {array.dtype}")
    if device.on_host(array):
        _check_range(op, name, array, size, ignore)
    return contiguous(here.asarray(array, np.int64))


def _array_of(op: str, name: str, values: Any) -> np.ndarray:
    """Of a number or nested lists."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # lists of several lengths
        raise ValueError(f"{op}: {name} must be an array, or nested lists of equal lengths") from error
    return array if array.size else array.astype(np.int64)  # an empty list has no element type


def check_floats(op: str, **tensors: "Tensor | None") -> None:
    """Raise TypeError unless all of them, None left out, are float32 or all are float64.

    Or of one 16-bit type, if the device computes in it.
    """
    kinds = {t.value_dtype for t in tensors.values() if t is not None}
    if len(kinds) != 1 or not _computed_in(*kinds):
        given = {name: t.value_dtype for name, t in tensors.items() if t is not None}
        text = ", ".join(f"{name} {dtype.name}" for name, dtype in given.items())
        raise TypeError(f"{op}: all arguments must be float32 or all float64, got {text}")


def _computed_in(dtype: np.dtype) -> bool:
    if dtypes.low(dtype):
        return device.current().compute_dtype(dtype.name) == dtype
    return dtype.kind == "f" and dtype.itemsize >= 4


def _check_range(op: str, name: str, array: np.ndarray, size: int, ignore: int | None) -> None:
    wrong = (array < 0) | (array >= size)
    if ignore is not None:
        wrong &= array != ignore
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        where = ", ".join(map(str, place))
        raise ValueError(f"{op}: {name}[{where}] must be in [0, {size}), got {int(array[place])}")


def pair(op: str, name: str, value: Any, least: int) -> tuple[int, int]:
    """One number, or one for each of (vertical, horizontal), as two.

    Raises:
        ValueError: below `least`.
    """
    two = (value, value) if isinstance(value, int) else tuple(value)
    if len(two) != 2 or not all(isinstance(n, int) and n >= least for n in two):
        raise ValueError(f"{op}: {name} must be one or two integers of at least {least}, got {value!r}")
    return two


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised array on the current device."""
    return device.current().empty(shape, dtype)


def asarray(values: Any, dtype: Any = None) -> Array:
    """A result as an array of the current device: where CuPy has arrays without axes, NumPy has numbers."""
    return device.current().asarray(values, dtype)


def empty_rows(count: int, columns: int, dtype: Any) -> Array:
    """An uninitialised (count, columns) for matmuls, on the current device: rows may be padded."""
    return device.current().empty_rows(count, columns, dtype)


def empty_exact(shape: tuple[int, ...], like: Array) -> Array:
    """An uninitialised array for statistics of elements of `like`: float32 where they have 16 bits."""
    return device.current().empty(shape, dtypes.exact(like.dtype))


def empty_like(x: Array) -> Array:
    """An uninitialised C-contiguous array of the shape and dtype of `x`."""
    return device.current().empty(x.shape, x.dtype)


def for_product(x: Array, other: Array) -> Array:
    """Return x as a matmul with `other` takes it: bits of bfloat16, if `other` is bits of bfloat16."""
    return x if product_dtype(x, other) == x.dtype else packed(x)


def packed(x: Array) -> Array:
    """The bits of a C-contiguous float32 array in bfloat16."""
    bits = empty(x.shape, np.uint16)
    kernels().cast.pack(flat(x), flat(bits), dtypes.bfloat16)
    return bits


def unpacked(bits: Array) -> Array:
    """The float32 of a C-contiguous array of bits of bfloat16."""
    x = empty(bits.shape, np.float32)
    kernels().cast.unpack(flat(bits), flat(x), dtypes.bfloat16)
    return x


def operands(x: Array, weight: Variable) -> tuple[Array, Array]:
    """The operands of their matmul: both as bits of bfloat16, where the weight was gathered in bfloat16."""
    matrix = contiguous(weight.lent_bits())
    return for_product(x, matrix), matrix


def product_dtype(x: Array, other: Array) -> np.dtype:
    """The type in which a matmul with `other` takes x."""
    return other.dtype if other.dtype == np.uint16 else x.dtype


def computed(x: Array) -> np.dtype:
    """The result type of a matmul of `x`: float32 if it is bits."""
    return np.dtype(np.float32) if x.dtype == np.uint16 else x.dtype


def rows(x: Array) -> Array:
    """A C-contiguous array as (rows, last dimension); no copy."""
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def flat(x: Array) -> Array:
    """A C-contiguous array in one dimension; no copy."""
    return x.reshape(-1)


def broadcast(x: Array, shape: tuple[int, ...]) -> Array:
    """A view of x in a larger shape.

    NumPy makes it read-only even where it repeats nothing and is contiguous; kernels compiled for ordinary
    arrays would have to be compiled again for that.
    """
    view = np.broadcast_to(x, shape)
    return x.reshape(shape) if view.size == x.size else view


def compute(ufunc: Any, *operands: Any) -> Array:
    """A NumPy ufunc with its result in memory of the current device."""
    shapes = {np.shape(operand) for operand in operands}
    shape = shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)
    return ufunc(*operands, out=empty(shape, np.result_type(*operands)))


def chosen(condition: Array, x: Any, y: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """A new array: x where the condition holds, y elsewhere, arrays or numbers."""
    z = empty(shape, dtype)
    np.copyto(z, y)
    np.copyto(z, x, where=condition)
    return z


def put_weight_gradient(weight: Variable, x: Array, dy: Array) -> Any:
    """Put it where it belongs, by rows if these have the bits of the whole; gives the token.

    x (rows, inputs), dy (rows, outputs) of the product with the weight.
    """
    linear = kernels().linear

    def fill(first: int, stop: int, out: Array, accumulate: bool) -> None:
        linear.backward_weight(x, dy, out, accumulate, first)

    if dy.shape[1] > linear.BLOCK:
        return weight.put_rows(fill)
    target, accumulate, token = weight.gradient_target()
    linear.backward_weight(x, dy, target, accumulate)
    return token


def sum_to(gradient: Array, shape: tuple[int, ...]) -> Array:
    """The adjoint of broadcasting from `shape`: sums over the dimensions that were added or stretched."""
    if gradient.shape == shape:
        return gradient
    added = gradient.ndim - len(shape)
    stretched = (added + i for i, n in enumerate(shape) if n == 1)
    return gradient.sum(axis=(*range(added), *stretched)).reshape(shape)
