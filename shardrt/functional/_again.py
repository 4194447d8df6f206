"""Inputs that an op does not save, since the op that made them can compute them again from its saved arrays.

The result of a norm or a GELU is one pass over memory away from that op's input. The input stays until the
op's own backward, which is later than the backward of an op that used the result. Attention in bfloat16
saves the bits of its result itself. No op.
"""

from typing import Any

from shardrt.autograd import Function, describe
from shardrt.functional._arrays import kernels
from shardrt.functional._types import Array


class Repeatable(Function):
    """An op that can compute results again from its saved arrays, bitwise identical.

    Attributes:
        again_cheap: indices of these results (0 for a single result).
        again_low: the same, for ops that take the result in 16 bits.
        again_whole: indices of results that another op computes again rather than keep, whatever it costs.
    """

    again_cheap: tuple[int, ...] = ()
    again_low: tuple[int, ...] = ()
    again_whole: tuple[int, ...] = ()

    def again(self, index: int) -> Array:
        """Compute result `index` again."""
        raise NotImplementedError(f"{type(self).__name__} must define again")

    def again_for_product(self, index: int) -> Array:
        """As `again`, for a matmul that takes 16 bits: gives 16 bits if that is cheaper than packing."""
        return self.again(index)


class Again:
    """Takes the place of an array in `saved`: result `index` of `maker`.

    Args:
        dtype: the one the matmul takes.
    """

    __slots__ = ("maker", "index", "dtype", "_low")

    def __init__(self, maker: Repeatable, index: int, dtype: Any, low: bool) -> None:
        self.maker = maker
        self.index = index
        self.dtype = dtype
        self._low = low

    def array(self) -> Array:
        """Raises RuntimeError if an earlier backward has freed the arrays that it is computed from."""
        if self.maker.saved is None:
            raise RuntimeError(
                f"backward: the saved arrays of {describe(self.maker)} were freed by an earlier backward; "
                "call that one with retain_graph=True"
            )
        return (self.maker.again_for_product if self._low else self.maker.again)(self.index)


SavedTensor = Array | Again


def unpack(saved: SavedTensor) -> Array:
    """The array that `to_save` stands for."""
    return saved.array() if isinstance(saved, Again) else saved


def to_save(node: Function, position: int, x: Array, low: Array, cheap: bool = True) -> SavedTensor:
    """What `node` saves of its argument x at `position`: `low`, unless that can be computed again.

    Backward of `node` must bring a gradient to the op that made x: then that op still has its saved arrays.

    Args:
        node: the op.
        position: the position of x among its arguments.
        x: the array that it got.
        low: x as its matmul takes it.
        cheap: whether results of `again_cheap` and `again_low` are computed again, too.
    """
    edge = node.edges[position] if node.needs[position] else None
    maker = None if edge is None else edge.node
    if not isinstance(maker, Repeatable):
        return low
    there = low is x and edge.index in maker.again_whole
    if cheap and kernels().linear.INPUT_AGAIN:
        there |= edge.index in maker.again_cheap or (low is not x and edge.index in maker.again_low)
    return Again(maker, edge.index, low.dtype, low is not x) if there else low
