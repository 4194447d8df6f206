"""GradientPath: what happens to the full gradients of a group, from backward's first write to the reduction.

A group gets its path when it gets its memory, and another one if what is trained or accumulated changes.
FSDP's own is whole_gradient.py: one slot holds the full gradients as the flat buffer has them, and a
reduce-scatter sums them into the shard. Options enter other paths in `PATHS` (options/packed_rows.py,
options/chunks.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardrt.autograd import Fill
from shardrt.device import Device
from shardrt.device.arena import Slot
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.sharded_gradient import Send, Streams

Array = Any


class GradientPath(ABC):
    """Opened by the first gradient that backward writes; closed by `reduce` or `discard`.

    group: the ParameterGroup.
    written: positions of the parameters whose gradients this rank has written since `open`.
    full, sent, kept: elements of a slot for its full gradients, of what is sent, of what each rank receives.
    packs: what is sent is never the slot itself.
    uses: how many numbers are sent besides: for each parameter, whether this rank has used it.
    """

    full: int
    sent: int
    kept: int
    packs = False
    uses = 0

    def __init__(self, group: Any, layout: Layout) -> None:
        self.group = group
        self.layout = layout
        self.is_open = False
        self.written: set[int] = set()

    @classmethod
    def choose(cls, group: Any, layout: Layout, slot: int | None) -> "GradientPath | None":
        """This path for `group`, where it fits. slot: elements of its slot for full gradients, if known."""
        return None

    @classmethod
    def fits_in(cls, group: Any, layout: Layout, slot: int, device: Device, accumulates: bool) -> bool:
        """Whether a slot of so many elements, made for other groups, is enough for this path."""
        return False

    @property
    def streams(self) -> Streams:
        """Of the schedule."""
        return self.group.runtime.streams

    def open(self) -> None:
        """Backward is about to write: take memory."""
        self.is_open, self.written = True, set()

    def target(self, position: int) -> tuple[Array, bool]:
        """(array for the gradient of one parameter, whether to add to it)."""
        raise NotImplementedError

    def put_rows(self, position: int, fill: Fill) -> None:
        """Have all rows of a parameter's gradient written, or added, now or before the reduction."""
        target, accumulate = self.target(position)
        fill(0, len(target), target, accumulate)

    @abstractmethod
    def reduce(self) -> None:
        """Hand the full gradients to the reduce stream, which adds their sum to the sharded gradient."""

    @abstractmethod
    def discard(self) -> None:
        """Give the memory back: the gradients are not wanted any more."""

    @abstractmethod
    def move(self, target: Callable[[int], tuple[Array, bool]]) -> None:
        """Write what is there where `target` says, in the compute stream; this object is then done with."""

    def acquire(self) -> Slot:
        """A slot that nothing reads any more, as compute sees it."""
        compute, arena = self.streams.compute, self.group.arenas["gradients"]
        slot = arena.acquire()
        if slot is None:  # more units are in backward at once than was planned
            arena.grow()
            slot = arena.acquire()
        compute.wait(slot.free)  # the reduction of the group that had the slot has read it
        return slot

    def send_from(self, slot: Slot, send: Send, part: tuple[int, int] | None = None) -> None:
        """Have the reduce stream take over the slot. part: (start, stop) of what it has of each shard."""
        streams = self.streams
        streams.compute.record(slot.ready)
        streams.reduce.wait(slot.ready)  # compute has written the gradients
        staging = self.group.arenas.get("download")
        self.group.sharded_gradient.receive(slot, streams, send, part, staging)

    @contextmanager
    def handing_over(self, slot: Slot) -> Iterator[None]:
        """Give the slot back behind what is issued in a with block, also if that raises."""
        try:
            yield
        except BaseException:
            self.streams.reduce.record(slot.free)  # what was issued so far may still read it
            raise
        finally:
            slot.give_back()


PATHS: list[type[GradientPath]] = []  # of options; the first that chooses a group gets it
