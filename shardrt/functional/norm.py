"""Layer norm and RMS norm over the last dimensions, also of a sum; a row's mean and deviation are saved."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt.autograd import Variable, contiguous
from shardrt.functional import in_time
from shardrt.functional._again import Repeatable
from shardrt.functional._arrays import check_floats, empty, empty_exact, empty_like, kernels, rows, tensor
from shardrt.functional._types import Array, Tensor
from shardrt.functional.cast import cast
from shardrt.functional.elementwise import add, mul, sub
from shardrt.functional.reduce import mean
from shardrt.functional.shape import reshape
from shardrt.functional.unary import rsqrt, square


class LayerNorm(Repeatable):
    again_cheap = (0,)
    handles = (1, 2)

    def forward(self, x: Array, weight: Variable, bias: Variable | None, eps: float) -> Array:
        y = empty_like(x)
        x2 = rows(x)
        mean, rstd = empty_exact((len(x2),), x), empty_exact((len(x2),), x)
        bias_data = None if bias is None else contiguous(bias.lent())
        kernels().layer_norm.forward(x2, contiguous(weight.lent()), bias_data, rows(y), mean, rstd, eps)
        self.saved = (x, weight, bias, mean, rstd, eps)
        return y

    def again(self, index: int) -> Array:
        x, weight, bias, mean, rstd, eps = self.saved
        y, shift = empty_like(x), None if bias is None else contiguous(bias.lent())
        found = (empty_like(mean), empty_like(rstd), eps)  # the same as were found then
        kernels().layer_norm.forward(rows(x), contiguous(weight.lent()), shift, rows(y), *found)
        return y

    def backward(self, dy: Array) -> tuple:
        return *_layer_norm_backward(self.saved, dy, self.needs[:3]), None


class AddLayerNorm(LayerNorm):
    """x + added, and the layer norm of that: one pass less in each direction than two ops."""

    again_cheap = (1,)
    handles = (2, 3)

    def forward(self, x: Array, added: Array, weight: Variable, bias: Variable | None, eps: float) -> tuple:
        total, y = empty_like(x), empty_like(x)
        x2 = rows(x)
        mean, rstd = empty_exact((len(x2),), x), empty_exact((len(x2),), x)
        bias_data = None if bias is None else contiguous(bias.lent())
        statistics = (mean, rstd, eps)
        kernels().layer_norm.forward(
            x2, contiguous(weight.lent()), bias_data, rows(y), *statistics, rows(added), rows(total)
        )
        self.saved = (total, weight, bias, mean, rstd, eps)
        return total, y

    def backward(self, dtotal: Array | None, dy: Array | None) -> tuple:
        if dy is None:
            return dtotal, dtotal, None, None, None
        needs = (self.needs[0] or self.needs[1], *self.needs[2:4])
        dx, weight_token, bias_token = _layer_norm_backward(self.saved, dy, needs, dtotal)
        return dx, dx, weight_token, bias_token, None


def _layer_norm_backward(saved: tuple, dy: Array, needs: tuple, dtotal: Array | None = None) -> tuple:
    """(dx, the weight's token, the bias's), as far as `needs` says; dtotal is added to dx."""
    x, weight, bias, mean, rstd, _ = saved
    dx = empty_like(x) if needs[0] else None
    how = getattr(weight, "in_parts", None)
    if how is not None and any(needs[1:]):
        matrix = contiguous(weight.lent())

        def backward(dy: Array, x: Array, dtotal: Array | None, found: list, dx: Array, out: Array) -> None:
            kernels().layer_norm.backward(dy, x, matrix, *found, dx, *out, False, dtotal)

        sums = in_time.norm_gradients(how, (dy, x, dtotal), (mean, rstd), dx, backward, 2)
        handles = (weight if needs[1] else None, bias if needs[2] else None)
        return dx, *map(in_time.put, handles, sums)
    dweight, add_weight, weight_token = _target(weight, needs[1])
    dbias, add_bias, bias_token = _target(bias, needs[2])
    if dweight is not None and dbias is not None and add_weight != add_bias:
        (dbias if add_weight else dweight).fill(0)  # the kernel adds to both or to none
    dx2, dtotal2 = (None if array is None else rows(array) for array in (dx, dtotal))
    into = (dx2, dweight, dbias, add_weight or add_bias, dtotal2)
    kernels().layer_norm.backward(rows(dy), rows(x), contiguous(weight.lent()), mean, rstd, *into)
    return dx, weight_token, bias_token


def layer_norm(
    x: "Tensor",
    normalized_shape: int | Sequence[int],
    weight: "Tensor | None" = None,
    bias: "Tensor | None" = None,
    eps: float = 1e-5,
) -> "Tensor":
    """Each row minus its mean, over its deviation, times weight plus bias (Ba et al., 2016).

    All arrays are float32, or all float64, or x has 16 bits and the parameters are float32: then the result
    is computed in float32 and rounded.

    Args:
        x: (..., *normalized_shape); a row is all the elements of its last axes.
        weight: of normalized_shape; 1 if None.
        bias: of normalized_shape; 0 if None.
        eps: added to the variance.

    Raises:
        ValueError: for wrong sizes.
        TypeError: for other dtypes.

    Example:
        >>> from shardrt import Tensor, functional as F
        >>> F.layer_norm(Tensor([[1.0, 3.0]]), (2,)).numpy().round(3)
        array([[-1.,  1.]], dtype=float32)
    """
    x, weight, bias, shape = _by_rows("layer_norm", x, normalized_shape, weight, bias)
    if _more_exact(x, weight):
        y = cast(LayerNorm.apply(cast(x, weight.value_dtype.name), weight, bias, eps), x.dtype.name)
    else:
        check_floats("layer_norm", x=x, weight=weight, bias=bias)
        y = LayerNorm.apply(x, weight, bias, eps)
    return y if shape is None else reshape(y, shape)


def add_layer_norm(
    x: "Tensor", added: "Tensor", weight: "Tensor", bias: "Tensor | None" = None, eps: float = 1e-5
) -> tuple["Tensor", "Tensor"]:
    """(x + added, layer_norm(x + added, weight.shape, weight, bias, eps)), in fewer passes over memory.

    Args:
        x, added: (..., width), of one dtype.
        weight, bias: (width,). Other arguments and errors are layer_norm's.
    """
    x, added = _addends("add_layer_norm", x, added)
    weight, bias = tensor(weight), None if bias is None else tensor(bias)
    if _more_exact(x, weight):
        total = x + added
        return total, layer_norm(total, weight.shape, weight, bias, eps)
    _check("add_layer_norm", x, weight=weight, bias=bias)
    return AddLayerNorm.apply(x, added, weight, bias, eps)


def group_norm(
    x: "Tensor",
    num_groups: int,
    weight: "Tensor | None" = None,
    bias: "Tensor | None" = None,
    eps: float = 1e-5,
) -> "Tensor":
    """Each group of channels minus its mean, over its deviation, times weight plus bias (Wu, He, 2018).

    Made of other ops.

    Args:
        x: (batch, channels, ...).
        weight, bias: (channels,) or None.

    Raises:
        ValueError: for sizes that don't fit.
        TypeError: for other dtypes.
    """
    x = tensor(x)
    check_floats("group_norm", x=x)
    if x.ndim < 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(
            f"group_norm: x must be (batch, channels, ...), got {x.shape} in {num_groups} groups"
        )
    y = reshape(x, (x.shape[0], num_groups, -1))
    y = sub(y, mean(y, -1, keepdims=True))
    y = mul(y, rsqrt(add(mean(square(y), -1, keepdims=True), eps)))
    y = reshape(y, x.shape)
    per_channel = (x.shape[1], *[1] * (x.ndim - 2))
    y = y if weight is None else mul(y, reshape(weight, per_channel))
    return y if bias is None else add(y, reshape(bias, per_channel))


class RMSNorm(Repeatable):
    again_cheap = (0,)
    handles = (1,)

    def forward(self, x: Array, weight: Variable, eps: float) -> Array:
        y = empty_like(x)
        x2 = rows(x)
        rstd = empty_exact((len(x2),), x)
        kernels().rms_norm.forward(x2, contiguous(weight.lent()), rows(y), rstd, eps)
        self.saved = (x, weight, rstd, eps)
        return y

    def again(self, index: int) -> Array:
        x, weight, rstd, eps = self.saved
        y = empty_like(x)
        kernels().rms_norm.forward(rows(x), contiguous(weight.lent()), rows(y), empty_like(rstd), eps)
        return y

    def backward(self, dy: Array) -> tuple:
        return *_rms_norm_backward(self.saved, dy, self.needs[:2]), None


class AddRMSNorm(RMSNorm):
    """x + added, and the RMS norm of that: one pass less in each direction than two ops."""

    again_cheap = (1,)
    handles = (2,)

    def forward(self, x: Array, added: Array, weight: Variable, eps: float) -> tuple:
        total, y = empty_like(x), empty_like(x)
        x2 = rows(x)
        rstd = empty_exact((len(x2),), x)
        kernels().rms_norm.forward(
            x2, contiguous(weight.lent()), rows(y), rstd, eps, rows(added), rows(total)
        )
        self.saved = (total, weight, rstd, eps)
        return total, y

    def backward(self, dtotal: Array | None, dy: Array | None) -> tuple:
        if dy is None:
            return dtotal, dtotal, None, None
        needs = (self.needs[0] or self.needs[1], self.needs[2])
        dx, token = _rms_norm_backward(self.saved, dy, needs, dtotal)
        return dx, dx, token, None


def _rms_norm_backward(saved: tuple, dy: Array, needs: tuple, dtotal: Array | None = None) -> tuple:
    """(dx, the weight's token), as far as `needs` says; dtotal is added to dx."""
    x, weight, rstd, _ = saved
    dx = empty_like(x) if needs[0] else None
    how = getattr(weight, "in_parts", None)
    if how is not None and needs[1]:
        matrix = contiguous(weight.lent())

        def backward(dy: Array, x: Array, dtotal: Array | None, found: list, dx: Array, out: Array) -> None:
            kernels().rms_norm.backward(dy, x, matrix, *found, dx, out[0], False, dtotal)

        (sums,) = in_time.norm_gradients(how, (dy, x, dtotal), (rstd,), dx, backward, 1)
        return dx, in_time.put(weight, sums)
    dweight, accumulate, token = _target(weight, needs[1])
    dx2, dtotal2 = (None if array is None else rows(array) for array in (dx, dtotal))
    into = (dx2, dweight, accumulate, dtotal2)
    kernels().rms_norm.backward(rows(dy), rows(x), contiguous(weight.lent()), rstd, *into)
    return dx, token


def rms_norm(
    x: "Tensor",
    normalized_shape: int | Sequence[int],
    weight: "Tensor | None" = None,
    eps: float | None = None,
) -> "Tensor":
    """Each row over its root mean square, times weight (Zhang, Sennrich: RMS Layer Normalization, 2019).

    Args:
        x: (..., *normalized_shape); a row is all the elements of its last axes.
        weight: of normalized_shape, 1 if None. Both float32 or both float64, or x in 16 bits with a float32
            weight. eps is added to the mean square; None is the distance from 1 to the next number of the
            type that computes.

    Raises:
        ValueError: for sizes that don't fit.
        TypeError: for other dtypes.

    Example:
        >>> from shardrt import Tensor, functional as F
        >>> F.rms_norm(Tensor([[3.0, 4.0]]), (2,)).numpy().round(3)
        array([[0.849, 1.131]], dtype=float32)
    """
    x, weight, _, shape = _by_rows("rms_norm", x, normalized_shape, weight, None)
    if eps is None:
        eps = float(np.finfo(dtypes.exact(weight.value_dtype)).eps)
    if _more_exact(x, weight):
        y = cast(RMSNorm.apply(cast(x, weight.value_dtype.name), weight, eps), x.dtype.name)
    else:
        check_floats("rms_norm", x=x, weight=weight)
        y = RMSNorm.apply(x, weight, eps)
    return y if shape is None else reshape(y, shape)


def add_rms_norm(
    x: "Tensor", added: "Tensor", weight: "Tensor", eps: float = 1e-6
) -> tuple["Tensor", "Tensor"]:
    """(x + added, rms_norm(x + added, weight.shape, weight, eps)), in fewer passes over memory.

    Args:
        x, added: (..., width), of one dtype.
        weight: (width,). Other arguments and errors are those of rms_norm.
    """
    x, added = _addends("add_rms_norm", x, added)
    weight = tensor(weight)
    if _more_exact(x, weight):
        total = x + added
        return total, rms_norm(total, weight.shape, weight, eps)
    _check("add_rms_norm", x, weight=weight)
    return AddRMSNorm.apply(x, added, weight, eps)


def _by_rows(op: str, x: Any, normalized_shape: Any, weight: Any, bias: Any) -> tuple:
    """(x with rows along its last axis, weight and bias of one axis, the shape to go back to or None)."""
    x, bias = tensor(x), None if bias is None else tensor(bias)
    own = (normalized_shape,) if isinstance(normalized_shape, int | np.integer) else normalized_shape
    if not isinstance(own, Sequence) or not own or tuple(own) != x.shape[x.ndim - len(own) :]:
        given = (
            f"got {tuple(own)} for x {x.shape}" if isinstance(own, Sequence) else f"got {type(own).__name__}"
        )
        raise ValueError(f"{op}: normalized_shape must be the last sizes of x, {given}")
    own = tuple(own)
    if weight is None:
        weight = empty(own, dtypes.exact(x.value_dtype))
        weight.fill(1)
    weight = tensor(weight)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != own:
            raise ValueError(f"{op}: {name} must be {own} for x {x.shape}, got {parameter.shape}")
    if len(own) == 1:
        return x, weight, bias, None
    width, shape = prod(own), x.shape
    weight, bias = reshape(weight, width), None if bias is None else reshape(bias, width)
    return reshape(x, (*shape[: -len(own)], width)), weight, bias, shape


def _addends(op: str, x: "Tensor", added: "Tensor") -> tuple["Tensor", "Tensor"]:
    x, added = tensor(x), tensor(added)
    if x.shape != added.shape:
        raise ValueError(f"{op}: x and added must have one shape, got {x.shape} and {added.shape}")
    check_floats(op, x=x, added=added)
    return x, added


def _target(handle: Variable | None, needed: bool) -> tuple[Array, bool, Any]:
    """As gradient_target; nothing where the gradient is not wanted."""
    return handle.gradient_target() if needed else (None, False, None)


def _more_exact(x: "Tensor", weight: "Tensor") -> bool:
    """Whether x has 16 bits and the weight, by a policy's exception for norms, has 32."""
    return dtypes.low(x.dtype) and not dtypes.low(weight.value_dtype)


def _check(op: str, x: "Tensor", **parameters: "Tensor | None") -> None:
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one dimension")
    for name, parameter in parameters.items():
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(f"{op}: {name} must be {x.shape[-1:]} for x {x.shape}, got {parameter.shape}")
    check_floats(op, x=x, **parameters)
