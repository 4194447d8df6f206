"""Dropout whose mask is not stored: element i of a mask is a function of (seed, step, which call, i).

The elements are counted over the global batch, of which each rank has an equal part in rank order, or that of
the micro-batch that it computes; so a run drops the same elements at every world size.
"""

from typing import TYPE_CHECKING, Any

from shardrt import random
from shardrt.autograd import Function
from shardrt.comm import world
from shardrt.functional._arrays import check_floats, empty_like, flat, kernels, tensor

if TYPE_CHECKING:
    from shardrt.tensor import Tensor

Array = Any


class Dropout(Function):
    __slots__ = ()

    def forward(self, x: Array, p: float, seed: int, call: int, offset: int) -> Array:
        self.saved = (p, seed, call, offset)
        y = empty_like(x)
        kernels().dropout.forward(flat(x), flat(y), p, seed, call, offset)
        return y

    def backward(self, dy: Array) -> tuple:
        p, seed, call, offset = self.saved
        dx = empty_like(dy)
        kernels().dropout.backward(flat(dy), flat(dx), p, seed, call, offset)
        return dx, None, None, None, None


def dropout(x: "Tensor", p: float = 0.5, training: bool = True) -> "Tensor":
    """Each element 0 with probability p, else divided by 1 - p (Srivastava et al., Dropout, 2014).

    x: any shape, float32 or float64; x itself where not training or p is 0. Raises ValueError for p outside
    [0, 1), TypeError for other dtypes.
    """
    x = tensor(x)
    check_floats("dropout", x=x)
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p must be in [0, 1), got {p}")
    if not training or p == 0:
        return x
    seed, call = random.next_call()
    part = random.micro_batch()
    return Dropout.apply(x, p, seed, call, (world.current().rank if part is None else part) * x.size)
