"""Rotary position embedding: pairs of a head's elements, turned by angles that grow with the position."""

from shardrt.autograd import Function
from shardrt.functional._arrays import check_floats, empty_like, kernels, rows, tensor
from shardrt.functional._types import Array, Tensor


class Rotary(Function):
    def forward(self, x: Array, cos: Array, sin: Array, heads: int) -> Array:
        self.saved = (cos, sin, heads)
        y = empty_like(x)
        kernels().rotary.forward(rows(x), cos, sin, rows(y), heads)
        return y

    def backward(self, dy: Array) -> tuple:
        cos, sin, heads = self.saved
        dx = empty_like(dy)
        kernels().rotary.backward(rows(dy), cos, sin, rows(dx), heads)
        return dx, None, None, None


def rotary(x: "Tensor", cos: Array, sin: Array, heads: int) -> "Tensor":
    """The first `heads` heads of x turned by the angles of their positions (Su et al., RoFormer, 2021).

    Element i of a head is paired with i + half, as in Llama's weights.

    Args:
        x: (batch, time, width): heads of 2 * half elements side by side, then the unrotated rest: queries and
            keys, then values, as one linear layer makes them.
        cos, sin: (time, half) arrays of the current device, float32 (float64 for float64).

    Raises:
        ValueError: for sizes that don't fit.
        TypeError: for other dtypes.
    """
    x = tensor(x)
    check_floats("rotary", x=x)
    if x.ndim != 3 or cos.ndim != 2 or cos.shape != sin.shape or cos.shape[0] != x.shape[1]:
        raise ValueError(
            f"rotary: x (batch, time, width) needs cos and sin (time, half), got {x.shape}, {cos.shape} "
            f"and {sin.shape}"
        )
    if heads < 0 or heads * 2 * cos.shape[1] > x.shape[2]:
        raise ValueError(f"rotary: x {x.shape} is too narrow for {heads} heads of width {2 * cos.shape[1]}")
    return Rotary.apply(x, cos, sin, heads)
