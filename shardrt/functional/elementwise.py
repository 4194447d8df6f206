"""Arithmetic, element by element, with NumPy's broadcasting; a gradient is summed back to its input's shape.

Two float dtypes do not mix. Python and NumPy scalars take the tensor's dtype, integer arrays beside a float
tensor its dtype too. Where an input is saved for backward, it is only if the other's gradient is wanted.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from shardrt import dtypes
from shardrt.autograd import Function, Variable
from shardrt.functional._arrays import empty, flat, floating, kernels, sum_to, tensor

if TYPE_CHECKING:
    from shardrt.tensor import Tensor

Array = Any
Operand = Any  # Tensor, array, or number


class Add(Function):
    __slots__ = ()
    strided = True

    def forward(self, x: Array, y: Array) -> Array:
        self.saved = (np.shape(x), np.shape(y))
        if self.saved[0] == self.saved[1] and x.flags.c_contiguous and y.flags.c_contiguous:
            z = empty(x.shape, np.result_type(x, y))
            kernels().elementwise.add(flat(x), flat(y), flat(z))
            return z
        return _compute(np.add, x, y)

    def backward(self, dz: Array) -> tuple:
        x_shape, y_shape = self.saved
        return sum_to(dz, x_shape) if self.needs[0] else None, sum_to(dz, y_shape) if self.needs[1] else None


def add(x: Operand, y: Operand) -> "Tensor":
    """x + y. Raises TypeError for float32 with float64, ValueError for shapes that don't broadcast."""
    return Add.apply(*_operands("add", x, y))


class Sub(Function):
    __slots__ = ()
    strided = True

    def forward(self, x: Array, y: Array) -> Array:
        self.saved = (np.shape(x), np.shape(y))
        return _compute(np.subtract, x, y)

    def backward(self, dz: Array) -> tuple:
        x_shape, y_shape = self.saved
        dx = sum_to(dz, x_shape) if self.needs[0] else None
        dy = sum_to(_compute(np.negative, dz), y_shape) if self.needs[1] else None
        return dx, dy


def sub(x: Operand, y: Operand) -> "Tensor":
    """x - y. Errors as `add`."""
    return Sub.apply(*_operands("sub", x, y))


class Mul(Function):
    __slots__ = ()
    strided = True

    def forward(self, x: Array, y: Array) -> Array:
        self.saved = (x if self.needs[1] else None, y if self.needs[0] else None, np.shape(x), np.shape(y))
        return _compute(np.multiply, x, y)

    def backward(self, dz: Array) -> tuple:
        x, y, x_shape, y_shape = self.saved
        dx = sum_to(_compute(np.multiply, dz, y), x_shape) if self.needs[0] else None
        dy = sum_to(_compute(np.multiply, dz, x), y_shape) if self.needs[1] else None
        return dx, dy


def mul(x: Operand, y: Operand) -> "Tensor":
    """x * y. Errors as `add`."""
    return Mul.apply(*_operands("mul", x, y))


class Div(Function):
    __slots__ = ()
    strided = True

    def forward(self, x: Array, y: Array) -> Array:
        self.saved = (x if self.needs[1] else None, y, np.shape(x), np.shape(y))
        return _compute(np.divide, x, y)

    def backward(self, dz: Array) -> tuple:
        x, y, x_shape, y_shape = self.saved
        dx = _compute(np.divide, dz, y)
        if not self.needs[1]:
            return sum_to(dx, x_shape), None
        dy = _compute(np.multiply, dx, x / -y)
        return sum_to(dx, x_shape) if self.needs[0] else None, sum_to(dy, y_shape)


def div(x: Operand, y: Operand) -> "Tensor":
    """x / y; integers become float32. Errors as `add`."""
    return Div.apply(*_operands("div", x, y, np.float32))


class Maximum(Function):
    __slots__ = ()
    strided = True

    def forward(self, x: Array, y: Array) -> Array:
        self.saved = (x, y)
        return _compute(np.maximum, x, y)

    def backward(self, dz: Array) -> tuple:
        x, y = self.saved
        half = (x == y) * dz.dtype.type(0.5)  # equal inputs share the gradient
        dx = sum_to(_compute(np.multiply, dz, (x > y) + half), np.shape(x)) if self.needs[0] else None
        dy = sum_to(_compute(np.multiply, dz, (y > x) + half), np.shape(y)) if self.needs[1] else None
        return dx, dy


def maximum(x: Operand, y: Operand) -> "Tensor":
    """The larger of x and y. Errors as `add`."""
    return Maximum.apply(*_operands("maximum", x, y))


class Neg(Function):
    __slots__ = ()
    strided = True

    def forward(self, x: Array) -> Array:
        return _compute(np.negative, x)

    def backward(self, dy: Array) -> Array:
        return _compute(np.negative, dy)


def neg(x: Operand) -> "Tensor":
    """-x."""
    return Neg.apply(tensor(x))


class Pow(Function):
    __slots__ = ()
    strided = True

    def forward(self, x: Array, exponent: float) -> Array:
        self.saved = (x, exponent)
        return _compute(np.power, x, exponent)

    def backward(self, dy: Array) -> tuple:
        x, exponent = self.saved
        if exponent == 0:  # where 0 * x**-1 would not be a number at x = 0
            return np.zeros_like(x), None
        dx = _compute(np.power, x, exponent - 1)
        dx *= exponent
        dx *= dy
        return dx, None


def pow(x: Operand, exponent: float) -> "Tensor":
    """x to the power of a number; integers become float32. Raises TypeError if `exponent` is no number."""
    if not isinstance(exponent, int | float | np.number):
        raise TypeError(f"pow: exponent must be a number, got {type(exponent).__name__}")
    return Pow.apply(floating(x), float(exponent))


class Exp(Function):
    __slots__ = ()
    strided = True

    def forward(self, x: Array) -> Array:
        y = _compute(np.exp, x)
        self.saved = (y,)
        return y

    def backward(self, dy: Array) -> Array:
        (y,) = self.saved
        return _compute(np.multiply, dy, y)


def exp(x: Operand) -> "Tensor":
    """e to the power of x; integers become float32."""
    return Exp.apply(floating(x))


class Log(Function):
    __slots__ = ()
    strided = True

    def forward(self, x: Array) -> Array:
        self.saved = (x,)
        return _compute(np.log, x)

    def backward(self, dy: Array) -> Array:
        (x,) = self.saved
        return _compute(np.divide, dy, x)


def log(x: Operand) -> "Tensor":
    """The natural logarithm; integers become float32."""
    return Log.apply(floating(x))


class Sqrt(Function):
    __slots__ = ()
    strided = True

    def forward(self, x: Array) -> Array:
        y = _compute(np.sqrt, x)
        self.saved = (y,)
        return y

    def backward(self, dy: Array) -> Array:
        (y,) = self.saved
        dx = _compute(np.divide, dy, y)
        dx *= 0.5
        return dx


def sqrt(x: Operand) -> "Tensor":
    """The square root; integers become float32."""
    return Sqrt.apply(floating(x))


class Tanh(Function):
    __slots__ = ()
    strided = True

    def forward(self, x: Array) -> Array:
        y = _compute(np.tanh, x)
        self.saved = (y,)
        return y

    def backward(self, dy: Array) -> Array:
        (y,) = self.saved
        dx = _compute(np.multiply, y, y)
        np.subtract(1, dx, out=dx)
        dx *= dy
        return dx


def tanh(x: Operand) -> "Tensor":
    """The hyperbolic tangent; integers become float32."""
    return Tanh.apply(floating(x))


def _compute(ufunc: Any, *operands: Operand) -> Array:
    """A NumPy ufunc with its result in memory of the current device."""
    shapes = {np.shape(operand) for operand in operands}
    shape = shapes.pop() if len(shapes) == 1 else np.broadcast_shapes(*shapes)
    return ufunc(*operands, out=empty(shape, np.result_type(*operands)))


def _operands(op: str, x: Operand, y: Operand, integers_as: Any = None) -> list:
    """Both as tensors of one dtype or Python numbers; no conversion if both are integers, unless asked."""
    operands = [_operand(x), _operand(y)]
    tensors = [operand for operand in operands if isinstance(operand, Variable)]
    floats = {t.value_dtype for t in tensors if dtypes.floating(t.value_dtype)}
    if len(floats) > 1:
        given = " with ".join(str(t.value_dtype) for t in tensors)
        raise TypeError(f"{op}: {given}; two float dtypes do not mix, convert one of them")
    if not floats and any(isinstance(operand, float) for operand in operands):
        integers_as = np.float32
    dtype = floats.pop() if floats else integers_as
    if dtype is None:
        return operands
    return [_converted(operand, dtype) for operand in operands]


def _converted(operand: Any, dtype: np.dtype) -> Any:
    if not isinstance(operand, Variable):  # a Python number, which NumPy fits to the types that it knows
        return np.dtype(dtype).type(operand) if np.dtype(dtype).name == dtypes.bfloat16 else operand
    return operand if operand.value_dtype == dtype else Variable.result_type(operand.data.astype(dtype))


def _operand(x: Operand) -> Any:
    if isinstance(x, np.generic):
        return x.item()  # weak, as Python's numbers are: it does not change the tensor's dtype
    return x if isinstance(x, Variable | int | float) else tensor(x)
