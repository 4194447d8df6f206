"""Arithmetic of two tensors, with NumPy's broadcasting; a gradient is summed back to its input's shape.

Two float dtypes do not mix. Numbers, Python's, NumPy's or arrays without dimensions, take the tensor's dtype;
so do a float tensor without dimensions next to one that has some, and integers next to floats. Where an input
is saved for backward, it is only if the other's gradient is wanted. For ops of one tensor see unary.py.
"""

from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt.autograd import Function, Variable
from shardrt.device import on_host
from shardrt.functional._arrays import (
    asarray,
    chosen,
    compute,
    empty,
    flat,
    floating,
    kernels,
    sum_to,
    tensor,
)
from shardrt.functional._types import Array, Tensor
from shardrt.functional.cast import cast
from shardrt.functional.words import also

Operand = Any  # Tensor, array, or number


class Add(Function):
    strided = True

    def forward(self, x: Array, y: Array) -> Array:
        self.saved = (np.shape(x), np.shape(y))
        numbers = isinstance(x, int | float | np.generic) or isinstance(y, int | float | np.generic)
        if not numbers and x.shape == y.shape and x.flags.c_contiguous and y.flags.c_contiguous:
            z = empty(x.shape, np.result_type(x, y))
            kernels().elementwise.add(flat(x), flat(y), flat(z))
            return z
        return compute(np.add, x, y)

    def backward(self, dz: Array) -> tuple:
        x_shape, y_shape = self.saved
        return sum_to(dz, x_shape) if self.needs[0] else None, sum_to(dz, y_shape) if self.needs[1] else None


def add(x: Operand, y: Operand) -> "Tensor":
    """Return x + y.

    Raises:
        TypeError: for float32 with float64.
        ValueError: for shapes that don't broadcast.
    """
    return Add.apply(*_operands("add", x, y))


class Sub(Function):
    strided = True

    def forward(self, x: Array, y: Array) -> Array:
        self.saved = (np.shape(x), np.shape(y))
        return compute(np.subtract, x, y)

    def backward(self, dz: Array) -> tuple:
        x_shape, y_shape = self.saved
        dx = sum_to(dz, x_shape) if self.needs[0] else None
        dy = sum_to(compute(np.negative, dz), y_shape) if self.needs[1] else None
        return dx, dy


def sub(x: Operand, y: Operand) -> "Tensor":
    """Return x - y. Errors as `add`."""
    return Sub.apply(*_operands("sub", x, y))


class Mul(Function):
    strided = True

    def forward(self, x: Array, y: Array) -> Array:
        self.saved = (x if self.needs[1] else None, y if self.needs[0] else None, np.shape(x), np.shape(y))
        return compute(np.multiply, x, y)

    def backward(self, dz: Array) -> tuple:
        x, y, x_shape, y_shape = self.saved
        dx = sum_to(compute(np.multiply, dz, y), x_shape) if self.needs[0] else None
        dy = sum_to(compute(np.multiply, dz, x), y_shape) if self.needs[1] else None
        return dx, dy


def mul(x: Operand, y: Operand) -> "Tensor":
    """Return x * y. Errors as `add`."""
    return Mul.apply(*_operands("mul", x, y))


class Div(Function):
    strided = True

    def forward(self, x: Array, y: Array) -> Array:
        self.saved = (x if self.needs[1] else None, y, np.shape(x), np.shape(y))
        return compute(np.divide, x, y)

    def backward(self, dz: Array) -> tuple:
        x, y, x_shape, y_shape = self.saved
        dx = compute(np.divide, dz, y)
        if not self.needs[1]:
            return sum_to(dx, x_shape), None
        dy = compute(np.multiply, dx, x / -y)
        return sum_to(dx, x_shape) if self.needs[0] else None, sum_to(dy, y_shape)


def div(x: Operand, y: Operand) -> "Tensor":
    """Return x / y; integers become float32. Errors as `add`."""
    return Div.apply(*_operands("div", x, y, np.float32))


class Maximum(Function):
    strided = True
    pick, wins = np.maximum, np.greater

    def forward(self, x: Array, y: Array) -> Array:
        self.saved = (x, y)
        return compute(self.pick, x, y)

    def backward(self, dz: Array) -> tuple:
        x, y = self.saved
        half = (x == y) * dz.dtype.type(0.5)  # equal inputs share the gradient
        wins = self.wins
        dx = sum_to(compute(np.multiply, dz, wins(x, y) + half), np.shape(x)) if self.needs[0] else None
        dy = sum_to(compute(np.multiply, dz, wins(y, x) + half), np.shape(y)) if self.needs[1] else None
        return dx, dy


def maximum(x: Operand, y: Operand) -> "Tensor":
    """The larger of x and y; equal ones share the gradient. Errors as `add`."""
    return Maximum.apply(*_operands("maximum", x, y))


class Minimum(Maximum):
    pick, wins = np.minimum, np.less


def minimum(x: Operand, y: Operand) -> "Tensor":
    """The smaller of x and y; equal ones share the gradient. Errors as `add`."""
    return Minimum.apply(*_operands("minimum", x, y))


class Clamp(Function):
    strided = True

    def forward(self, x: Array, low: float | None, high: float | None) -> Array:
        self.saved = (x, low, high)
        y = x
        for pick, bound in ((np.maximum, low), (np.minimum, high)):
            y = y if bound is None else compute(pick, y, bound)
        return y

    def backward(self, dy: Array) -> tuple:
        x, low, high = self.saved
        within = True if low is None else x >= low
        within = within if high is None else within & (x <= high)
        return chosen(within, dy, 0, dy.shape, dy.dtype), None, None


@also(min="low", max="high")
def clamp(x: Operand, low: Operand | None = None, high: Operand | None = None) -> "Tensor":
    """x, or the bound that it is beyond: there it has no gradient.

    The bounds: numbers, tensors or None.

    Raises:
        ValueError: without a bound; errors as `add`.
    """
    if low is None and high is None:
        raise ValueError("clamp: pass low, high or both")
    if any(isinstance(_operand(bound), Variable) for bound in (low, high) if bound is not None):
        x = x if low is None else maximum(x, low)
        return x if high is None else minimum(x, high)
    x = tensor(x)
    if not dtypes.floating(x.value_dtype) and any(isinstance(_operand(b), float) for b in (low, high)):
        x = floating(x)
    bounds = (b if b is None else _converted(_operand(b), x.value_dtype) for b in (low, high))
    return Clamp.apply(x, *bounds)


class Where(Function):
    strided = True

    def forward(self, condition: Array, x: Array, y: Array) -> Array:
        self.saved = (condition, np.shape(x), np.shape(y))
        shape = np.broadcast_shapes(condition.shape, np.shape(x), np.shape(y))
        return chosen(condition, x, y, shape, np.result_type(x, y))

    def backward(self, dz: Array) -> tuple:
        condition, x_shape, y_shape = self.saved
        dx = sum_to(chosen(condition, dz, 0, dz.shape, dz.dtype), x_shape) if self.needs[1] else None
        dy = sum_to(chosen(condition, 0, dz, dz.shape, dz.dtype), y_shape) if self.needs[2] else None
        return None, dx, dy


def where(condition: Any, x: Operand, y: Operand) -> "Tensor":
    """Return x where the condition holds, y elsewhere; elements not taken have gradient 0, even nan.

    Args:
        condition: booleans, an array or a tensor.

    Raises:
        TypeError: for another condition; else as `add`.

    Example:
        >>> from shardrt import Tensor, functional as F
        >>> x = Tensor([-1.0, 2.0])
        >>> F.where(x > 0, x, 0.0).numpy()
        array([0., 2.], dtype=float32)
    """
    condition = tensor(condition)
    if condition.dtype != np.bool_:
        raise TypeError(f"where: condition must be boolean, such as x > 0, got {condition.dtype}")
    return Where.apply(condition.data, *_operands("where", x, y))


def masked_fill(x: Operand, mask: Any, value: Operand) -> "Tensor":
    """Return x with `value` where the mask holds. Errors as `where`."""
    return where(mask, value, x)


class Neg(Function):
    strided = True

    def forward(self, x: Array) -> Array:
        return compute(np.negative, x)

    def backward(self, dy: Array) -> Array:
        return compute(np.negative, dy)


def neg(x: Operand) -> "Tensor":
    """-x."""
    return Neg.apply(tensor(x))


class Pow(Function):
    strided = True

    def forward(self, x: Array, exponent: float) -> Array:
        self.saved = (x, exponent)
        return compute(np.power, x, exponent)

    def backward(self, dy: Array) -> tuple:
        x, exponent = self.saved
        if exponent == 0:  # where 0 * x**-1 would not be a number at x = 0
            return np.zeros_like(x), None
        dx = compute(np.power, x, exponent - 1)
        dx *= exponent
        dx *= dy
        return dx, None


class PowTensor(Function):
    strided = True

    def forward(self, x: Array, y: Array) -> Array:
        z = compute(np.power, x, y)
        self.saved = (x, y, z)
        return z

    def backward(self, dz: Array) -> tuple:
        x, y, z = self.saved
        dx = dy = None
        if self.needs[0]:
            with np.errstate(divide="ignore"):  # 0 to the power -1, where y is 0
                slope = y * chosen(y == 0, 1, compute(np.power, x, y - 1), z.shape, z.dtype)
            dx = sum_to(compute(np.multiply, dz, slope), np.shape(x))
        if self.needs[1]:
            slope = z * np.log(chosen(x == 0, 1, x, x.shape, z.dtype))  # 0 stays 0, whatever the power
            dy = sum_to(compute(np.multiply, dz, slope), np.shape(y))
        return dx, dy


def pow(x: Operand, exponent: Operand) -> "Tensor":
    """Return x to a power, of which one may be a number; integers become float32. Errors as `add`."""
    if isinstance(_operand(exponent), Variable):
        x, exponent = _operands("pow", x, exponent, np.float32)
        return PowTensor.apply(x if isinstance(x, Variable) else tensor(asarray(x, exponent.dtype)), exponent)
    return Pow.apply(floating(x), float(_operand(exponent)))


def _operands(op: str, x: Operand, y: Operand, integers_as: Any = None) -> list:
    """Both as tensors of one dtype or Python numbers; no conversion if both are integers, unless asked."""
    operands = [_operand(x), _operand(y)]
    if not any(isinstance(operand, Variable) for operand in operands):
        operands[0] = tensor(x)
    tensors = [operand for operand in operands if isinstance(operand, Variable)]
    floats = [t for t in tensors if dtypes.floating(t.value_dtype)]
    # As in PyTorch, tensors without dimensions don't decide the type next to others.
    kinds = {t.value_dtype for t in floats if t.ndim} or {t.value_dtype for t in floats}
    if len(kinds) > 1:
        given = " with ".join(str(t.value_dtype) for t in tensors)
        raise TypeError(f"{op}: {given}; two float dtypes do not mix, convert one of them")
    if not kinds and any(isinstance(operand, float) for operand in operands):
        integers_as = np.float32
    dtype = kinds.pop() if kinds else integers_as
    if dtype is None:
        return operands
    return [_converted(operand, dtype) for operand in operands]


def _converted(operand: Any, dtype: np.dtype) -> Any:
    if not isinstance(operand, Variable):  # a Python number, which NumPy fits to the types that it knows
        return np.dtype(dtype).type(operand) if np.dtype(dtype).name == dtypes.bfloat16 else operand
    if operand.value_dtype == dtype:
        return operand
    if dtypes.floating(operand.value_dtype):
        return cast(operand, dtype)
    return Variable.result_type(operand.data.astype(dtype))


def _operand(x: Operand) -> Any:
    if isinstance(x, np.generic) or (isinstance(x, np.ndarray) and x.ndim == 0 and on_host(x)):
        x = x.item()  # weak, as Python's numbers are: it does not change the tensor's dtype
    return x if isinstance(x, Variable | int | float) else tensor(x)
