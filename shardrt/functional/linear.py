"""The matmul of a linear layer, also with a GELU behind it, in one pass over memory less than two ops take.

The matmul that computes the gradient of a weight adds it in its place.
"""

from typing import Any

from shardrt import autograd
from shardrt.autograd import WRITTEN, Edge, Function, Variable, contiguous
from shardrt.functional._again import Repeatable, SavedTensor, to_save, unpack
from shardrt.functional._arrays import (
    check_floats,
    computed,
    empty,
    empty_like,
    flat,
    for_product,
    kernels,
    operands,
    put_weight_gradient,
    rows,
    tensor,
)
from shardrt.functional._types import Array, Tensor
from shardrt.functional.activation import gelu
from shardrt.functional.float8 import Float8Linear, takes
from shardrt.functional.in_parts import Columns, InParts, Rows
from shardrt.functional.in_time import add_bias


class Linear(Function):
    handles = (1, 2)
    expensive = True

    def forward(self, x: Array, weight: Variable, bias: Variable | None) -> Array:
        y = empty((*x.shape[:-1], weight.shape[0]), x.dtype)
        low, matrix = operands(x, weight)
        self.saved = (self._input(x, low), weight, bias)
        bias_data = None if bias is None else contiguous(bias.lent())
        kernels().linear.forward(rows(low), matrix, bias_data, rows(y))
        return y

    def resume(self, kept: tuple, x: Array, weight: Variable, bias: Variable | None) -> Array:
        self.saved = (self._input(x, operands(x, weight)[0]), weight, bias)
        return kept[0]

    def _input(self, x: Array, low: Array) -> SavedTensor | None:
        """Return x as backward's matmuls need it. low: x as the matmul takes it."""
        return to_save(self, 0, x, low) if self.needs[1] else None

    def backward(self, dy: Array) -> tuple:
        return self._gradients(*self.saved, dy)

    def _gradients(self, x: SavedTensor | None, weight: Variable, bias: Variable | None, dy: Array) -> tuple:
        """What backward returns, of dy of x weight^T + bias. bias: None if its own gradient is not wanted."""
        dx, factor = None, dy if x is None else for_product(dy, x)
        if self.needs[0]:
            factor, matrix = operands(factor, weight)
            dx = self._input_gradient(matrix, factor)
        into = (weight if self.needs[1] else None, bias if self.needs[2] else None)
        whole = None if into[1] is None else dy  # the bias sums the gradient before rounding
        if x is not None:
            x = for_product(unpack(x), factor)
        return dx, *autograd.call_or_defer(_add_gradients, x, factor, whole, into=into)

    def _input_gradient(self, matrix: Array, dy: Array) -> Any:
        """The gradient of x.

        If a GELU made x, and one kernel can compute the gradient of the GELU's input, that one is delivered
        to the GELU, and the edge to x carries order alone.
        """
        dx = empty((*dy.shape[:-1], matrix.shape[1]), computed(dy))
        matrices, gelu = (rows(dy), matrix), self._gelu_before()
        if gelu is not None:
            *_, inner = gelu.saved
            if kernels().linear.backward_input_gelu(*matrices, rows(inner), rows(dx)):
                autograd.running().deliver(gelu.inner_edge, dx)
                return WRITTEN
        kernels().linear.backward_input(*matrices, rows(dx))
        return dx

    def _gelu_before(self) -> "LinearGELU | None":
        """The op that made x, if this op alone gives it a gradient, which no hook of a user looks at."""
        node, run = self.edges[0].node, autograd.running()
        if type(node) is not LinearGELU or node.hooks or node.saved is None or run is None:
            return None
        once = sum(edge is not None and edge.node is node for edge in self.edges) == 1
        return node if once and run.following is node and node not in run.gradients else None


def _add_gradients(
    x: Array | None, factor: Array, dy: Array | None, weight: Variable | None, bias: Variable | None
) -> tuple:
    """Of the handles given; their tokens. factor: dy as products take it; dy itself is for the bias."""
    linear, of_weight = kernels().linear, None
    if bias is None:
        return put_weight_gradient(weight, rows(x), rows(factor)), None
    if weight is not None:
        *of_weight, weight_token = weight.gradient_target()
    *of_bias, bias_token = bias.gradient_target()
    if of_weight and factor is dy:
        linear.backward_parameters(rows(x), rows(dy), *of_weight, *of_bias)
        return weight_token, bias_token
    if of_weight:
        linear.backward_weight(rows(x), rows(factor), *of_weight)
    linear.backward_bias(rows(dy), *of_bias)
    return weight_token if of_weight else None, bias_token


class LinearGELU(Linear, Repeatable):
    """GELU(x weight^T + bias). The input of the GELU is kept for backward, in the type of the matmul.

    It is the second output of the node, which no variable has: the op behind may deliver its gradient.
    """

    again_cheap = (0,)

    def wrap(self, result: Array, recorded: bool) -> Any:
        y = super().wrap(result, recorded)
        self.outputs = 2
        return y

    @property
    def inner_edge(self) -> Edge:
        """Leads to the gradient of the input of the GELU."""
        return Edge(self, 1, None)

    def forward(self, x: Array, weight: Variable, bias: Variable | None) -> Array:
        y = empty((*x.shape[:-1], weight.shape[0]), x.dtype)
        bias_data = None if bias is None else contiguous(bias.lent())
        low, matrix = operands(x, weight)
        inner = empty(y.shape, low.dtype)
        kernels().linear.forward_gelu(rows(low), matrix, bias_data, rows(inner), rows(y))
        self.saved = (self._input(x, low), weight, bias, inner)
        return y

    def keep(self, result: Array) -> tuple[Array]:
        return (self.saved[3],)

    def resume(self, kept: tuple, x: Array, weight: Variable, bias: Variable | None) -> Array:
        (inner,) = kept
        self.saved = (self._input(x, operands(x, weight)[0]), weight, bias, inner)
        return self.again(0)

    def again(self, index: int) -> Array:
        *_, inner = self.saved
        y = empty(inner.shape, computed(inner))
        kernels().activation.gelu_tanh_forward(flat(inner), flat(y))
        return y

    def again_for_product(self, index: int) -> Array:
        *_, inner = self.saved
        y = empty_like(inner)
        kernels().activation.gelu_tanh_forward(flat(inner), flat(y))
        return y

    def backward(self, dy: Array | None, dinner: Array | None = None) -> tuple:
        x, weight, bias, inner = self.saved
        if dinner is not None:
            return self._gradients(x, weight, bias, dinner)
        dinner = empty_like(inner)
        dbias = accumulate = bias_token = None
        if self.needs[2]:
            dbias, accumulate, bias_token = bias.gradient_target()
        kernels().linear.backward_gelu(rows(dy), rows(inner), rows(dinner), dbias, bool(accumulate))
        return *self._gradients(x, weight, None, dinner)[:2], bias_token


def linear(x: "Tensor", weight: "Tensor", bias: "Tensor | None" = None) -> "Tensor":
    """Return x times the transpose of weight, plus bias: (..., inputs) -> (..., outputs).

    x is saved for backward only if the weight's gradient is wanted, and not where a norm or an activation can
    make it again.

    Args:
        x: (..., inputs); all arrays are float32, or all float64.
        weight: (outputs, inputs).
        bias: (outputs,) or None.

    Raises:
        ValueError: for sizes that don't fit.
        TypeError: for other dtypes.

    Example:
        >>> from shardrt import Tensor, functional as F
        >>> x, weight = Tensor([[1.0, 2.0]]), Tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> F.linear(x, weight).numpy()
        array([[1., 2., 3.]], dtype=float32)
    """
    x, weight, bias = _checked("linear", x, weight, bias)
    other = _otherwise(x, weight, bias)
    return Linear.apply(x, weight, bias) if other is None else other


def linear_gelu(x: "Tensor", weight: "Tensor", bias: "Tensor | None" = None) -> "Tensor":
    """gelu(linear(x, weight, bias), approximate="tanh"), in fewer passes over memory.

    Arguments and errors are those of linear.
    """
    x, weight, bias = _checked("linear_gelu", x, weight, bias)
    other = _otherwise(x, weight, bias)
    return LinearGELU.apply(x, weight, bias) if other is None else gelu(other, approximate="tanh")


def _otherwise(x: "Tensor", weight: "Tensor", bias: "Tensor | None") -> "Tensor | None":
    """The rule that a parameter sets for matmuls with it; None if it sets none."""
    how = getattr(weight, "in_parts", None)
    if how is not None:
        return _in_parts(x, weight, bias, how)
    if getattr(weight, "float8", False) and takes(x, weight):
        return Float8Linear.apply(x, weight, bias)
    return None


def _in_parts(x: "Tensor", weight: "Tensor", bias: "Tensor | None", how: InParts) -> "Tensor":
    """Where `how` goes on, inputs in parts have no bias: it is added to the sum over the ranks."""
    if how.axis == 0:
        return Columns.apply(x, weight, bias, how)
    y = Rows.apply(x, weight, how)
    return y if bias is None else add_bias(y, bias)


def _checked(op: str, x: "Tensor", weight: "Tensor", bias: "Tensor | None") -> tuple:
    x, weight, bias = tensor(x), tensor(weight), None if bias is None else tensor(bias)
    if weight.ndim != 2:
        raise ValueError(f"{op}: weight must be (outputs, inputs), got {weight.shape}")
    outputs, inputs = weight.shape
    if x.ndim == 0 or x.shape[-1] != inputs:
        raise ValueError(f"{op}: x must be (..., {inputs}) for weight {weight.shape}, got {x.shape}")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"{op}: bias must be ({outputs},) for weight {weight.shape}, got {bias.shape}")
    check_floats(op, x=x, weight=weight, bias=bias)
    return x, weight, bias
