"""Inputs that an op does not save, since the op that made them makes them again from what it saves itself.

The result of a norm or a GELU is one pass over memory away from that op's input, which stays until the op's
own backward, later than that of whoever used the result. Of attention in bfloat16 its backward has the bits
of the result itself. No op.
"""

from typing import Any

from shardrt.autograd import Function, describe
from shardrt.functional._arrays import kernels

Array = Any


class Again:
    """In place of an array in `saved`: the result `index` of `maker`. bits: for a product in bfloat16."""

    __slots__ = ("maker", "index", "bits")

    def __init__(self, maker: Function, index: int, bits: bool) -> None:
        self.maker = maker
        self.index = index
        self.bits = bits

    def array(self) -> Array:
        """Raises RuntimeError where an earlier backward has freed what it is made of."""
        if self.maker.saved is None:
            raise RuntimeError(
                f"backward: the saved arrays of {describe(self.maker)} were freed by an earlier backward; "
                "call that one with retain_graph=True"
            )
        return (self.maker.again_for_product if self.bits else self.maker.again)(self.index)


def to_save(node: Function, position: int, x: Array, low: Array) -> "Array | Again":
    """What `node` saves of its argument x at `position`: `low`, unless that can be made again.

    low: x as the product of `node` takes it. Backward of `node` must bring a gradient to whoever made x: then
    that op still has what it has saved.
    """
    edge = node.edges[position] if node.needs[position] else None
    maker = None if edge is None else edge.node
    if maker is None or not kernels().linear.INPUT_AGAIN:
        return low
    there = edge.index in maker.again_cheap or (low is not x and edge.index in maker.again_low)
    return Again(maker, edge.index, low is not x) if there else low
