"""A linear layer's product with its weight, whose gradient the product itself adds where it belongs."""

from typing import TYPE_CHECKING, Any

from shardrt.autograd import Function, Variable, contiguous
from shardrt.functional._arrays import check_floats, empty, kernels, rows, tensor

if TYPE_CHECKING:
    from shardrt.tensor import Tensor

Array = Any


class Linear(Function):
    __slots__ = ()
    handles = (1, 2)
    expensive = True

    def forward(self, x: Array, weight: Variable, bias: Variable | None) -> Array:
        self.saved = (x if self.needs[1] else None, weight, bias)
        y = empty((*x.shape[:-1], weight.shape[0]), x.dtype)
        bias_data = None if bias is None else contiguous(bias.data)
        kernels().linear.forward(rows(x), contiguous(weight.data), bias_data, rows(y))
        return y

    def resume(self, kept: tuple, x: Array, weight: Variable, bias: Variable | None) -> Array:
        self.saved = (x if self.needs[1] else None, weight, bias)
        return kept[0]

    def backward(self, dy: Array) -> tuple:
        x, weight, bias = self.saved
        linear = kernels().linear
        dx = weight_token = bias_token = None
        if self.needs[0]:
            dx = empty((*dy.shape[:-1], weight.shape[1]), dy.dtype)
            linear.backward_input(rows(dy), contiguous(weight.data), rows(dx))
        if self.needs[1]:
            dweight, accumulate, weight_token = weight.gradient_target()
            linear.backward_weight(rows(x), rows(dy), dweight, accumulate)
        if self.needs[2]:
            dbias, accumulate, bias_token = bias.gradient_target()
            linear.backward_bias(rows(dy), dbias, accumulate)
        return dx, weight_token, bias_token


def linear(x: "Tensor", weight: "Tensor", bias: "Tensor | None" = None) -> "Tensor":
    """x times the transpose of weight, plus bias: (..., inputs) -> (..., outputs).

    weight: (outputs, inputs). bias: (outputs,) or None. All float32 or all float64. x is saved for backward
    only if the weight's gradient is wanted.

    Raises ValueError for sizes that don't fit, TypeError for other dtypes.
    """
    x, weight, bias = tensor(x), tensor(weight), None if bias is None else tensor(bias)
    if weight.ndim != 2:
        raise ValueError(f"linear: weight must be (outputs, inputs), got {weight.shape}")
    outputs, inputs = weight.shape
    if x.ndim == 0 or x.shape[-1] != inputs:
        raise ValueError(f"linear: x must be (..., {inputs}) for weight {weight.shape}, got {x.shape}")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"linear: bias must be ({outputs},) for weight {weight.shape}, got {bias.shape}")
    check_floats("linear", x=x, weight=weight, bias=bias)
    return Linear.apply(x, weight, bias)
