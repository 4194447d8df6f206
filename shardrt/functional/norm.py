"""Layer norm and RMS norm over the last dimension; mean and 1 / deviation of each row are saved."""

from typing import TYPE_CHECKING, Any

from shardrt import dtypes
from shardrt.autograd import Function, Variable, contiguous
from shardrt.functional._arrays import check_floats, empty_exact, empty_like, kernels, rows, tensor
from shardrt.functional.cast import cast

if TYPE_CHECKING:
    from shardrt.tensor import Tensor

Array = Any


class LayerNorm(Function):
    __slots__ = ()
    handles = (1, 2)

    def forward(self, x: Array, weight: Variable, bias: Variable | None, eps: float) -> Array:
        y = empty_like(x)
        x2 = rows(x)
        mean, rstd = empty_exact((len(x2),), x), empty_exact((len(x2),), x)
        bias_data = None if bias is None else contiguous(bias.data)
        kernels().layer_norm.forward(x2, contiguous(weight.data), bias_data, rows(y), mean, rstd, eps)
        self.saved = (x, weight, bias, mean, rstd)
        return y

    def backward(self, dy: Array) -> tuple:
        x, weight, bias, mean, rstd = self.saved
        dx = empty_like(x) if self.needs[0] else None
        dweight, add_weight, weight_token = _target(weight, self.needs[1])
        dbias, add_bias, bias_token = _target(bias, self.needs[2])
        if dweight is not None and dbias is not None and add_weight != add_bias:
            (dbias if add_weight else dweight).fill(0)  # the kernel adds to both or to none
        accumulate = add_weight or add_bias
        dx2 = None if dx is None else rows(dx)
        weight_data = contiguous(weight.data)
        kernels().layer_norm.backward(
            rows(dy), rows(x), weight_data, mean, rstd, dx2, dweight, dbias, accumulate
        )
        return dx, weight_token, bias_token, None


def layer_norm(x: "Tensor", weight: "Tensor", bias: "Tensor | None" = None, eps: float = 1e-5) -> "Tensor":
    """Each row minus its mean, over its deviation, times weight plus bias (Ba et al., 2016).

    x: (..., width). weight: (width,). bias: (width,) or None. All float32 or all float64, or x in 16 bits
    with float32 parameters: then computed in float32 and rounded. eps is added to the variance. Raises
    ValueError for sizes that don't fit, TypeError for other dtypes.
    """
    x, weight, bias = tensor(x), tensor(weight), None if bias is None else tensor(bias)
    if _more_exact(x, weight):
        return cast(layer_norm(cast(x, weight.value_dtype.name), weight, bias, eps), x.dtype.name)
    _check("layer_norm", x, weight=weight, bias=bias)
    return LayerNorm.apply(x, weight, bias, eps)


class RMSNorm(Function):
    __slots__ = ()
    handles = (1,)

    def forward(self, x: Array, weight: Variable, eps: float) -> Array:
        y = empty_like(x)
        x2 = rows(x)
        rstd = empty_exact((len(x2),), x)
        kernels().rms_norm.forward(x2, contiguous(weight.data), rows(y), rstd, eps)
        self.saved = (x, weight, rstd)
        return y

    def backward(self, dy: Array) -> tuple:
        x, weight, rstd = self.saved
        dx = empty_like(x) if self.needs[0] else None
        dweight, accumulate, token = _target(weight, self.needs[1])
        dx2 = None if dx is None else rows(dx)
        kernels().rms_norm.backward(
            rows(dy), rows(x), contiguous(weight.data), rstd, dx2, dweight, accumulate
        )
        return dx, token, None


def rms_norm(x: "Tensor", weight: "Tensor", eps: float = 1e-6) -> "Tensor":
    """Each row over its root mean square, times weight (Zhang, Sennrich: RMS Layer Normalization, 2019).

    x: (..., width). weight: (width,). Both float32 or both float64. eps is added to the mean square.
    Raises ValueError for sizes that don't fit, TypeError for other dtypes.
    """
    x, weight = tensor(x), tensor(weight)
    if _more_exact(x, weight):
        return cast(rms_norm(cast(x, weight.value_dtype.name), weight, eps), x.dtype.name)
    _check("rms_norm", x, weight=weight)
    return RMSNorm.apply(x, weight, eps)


def _target(handle: Variable | None, needed: bool) -> tuple[Array, bool, Any]:
    """As gradient_target; nothing where the gradient is not wanted."""
    return handle.gradient_target() if needed else (None, False, None)


def _more_exact(x: "Tensor", weight: "Tensor") -> bool:
    """Whether x has 16 bits and the weight, by a policy's exception for norms, has 32."""
    return x.dtype.name in dtypes.LOW and weight.value_dtype.name not in dtypes.LOW


def _check(op: str, x: "Tensor", **parameters: "Tensor | None") -> None:
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one dimension")
    for name, parameter in parameters.items():
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(f"{op}: {name} must be {x.shape[-1:]} for x {x.shape}, got {parameter.shape}")
    check_floats(op, x=x, **parameters)
