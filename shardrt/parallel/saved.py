"""Gathered again: an activation that was gathered for an op is not kept for its backward.

What an op has saved is looked through for the array, as activation_offload.py does, and the rank's own part
of it takes its place. Backward gathers it once more: on every rank, since ranks run the same nodes in the
same order.
"""

from collections.abc import Iterator
from typing import Any

from shardrt import autograd
from shardrt.comm.protocol import Communicator
from shardrt.functional.collective import gathered, named
from shardrt.tensor import Tensor

Array = Any


class GatheredAgain:
    """In place of a saved tuple: unpacks like it, with what was gathered gathered again, once."""

    __slots__ = ("_saved", "_whole", "_own", "_communicator", "_axis", "_tag")

    def __init__(
        self, saved: tuple, whole: Array, own: Array, communicator: Communicator, axis: int, tag: str
    ) -> None:
        self._saved = tuple(None if item is whole else item for item in saved)
        self._whole = tuple(item is whole for item in saved)
        self._own, self._communicator, self._axis, self._tag = own, communicator, axis, tag

    def __iter__(self) -> Iterator:
        if any(self._whole):
            whole = gathered(self._own, self._communicator, self._axis, self._tag)
            self._saved = tuple(
                whole if there else item for item, there in zip(self._saved, self._whole, strict=True)
            )
            self._whole = (False,) * len(self._saved)
        return iter(self._saved)


def gather_again(y: Tensor, whole: Tensor, own: Tensor, communicator: Communicator, axis: int) -> None:
    """Let what made `y` from `whole`, which was gathered from `own`, keep `own` alone."""
    if y.node is None or whole.node is None:
        return
    array, tag = whole.data, named("gather_again", y.node.module)
    for node in autograd.reachable({y.node}, whole.node.sequence):
        if isinstance(node.saved, tuple) and any(item is array for item in node.saved):
            node.saved = GatheredAgain(node.saved, array, own.data, communicator, axis % array.ndim, tag)
