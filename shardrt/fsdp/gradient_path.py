"""GradientPath: what happens to the full gradients of a group, from backward's first write to the reduction.

setup.py chooses the path of a group when the group gets its memory, and again if the trained parameters or
accumulation change. WholeGradient is FSDP's usual path: one slot holds the full gradients in the order of the
flat buffer, and a reduce-scatter sums them into the sharded gradient. Options add other paths to `PATHS`
(options/packed_rows.py, options/chunks.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardrt.autograd import Fill
from shardrt.device import Device
from shardrt.device.arena import Slot
from shardrt.fsdp.layout import Layout
from shardrt.fsdp.sharded_gradient import Send
from shardrt.fsdp.streams import Streams

Array = Any


class GradientPath(ABC):
    """The full gradients of one group. Backward's first write opens it; `reduce` or `discard` closes it.

    group: the ParameterGroup (untyped: group.py imports this file).
    written: positions of the parameters whose gradients this rank has written since `open`.
    full: elements of a slot for the full gradients.
    sent: elements of the buffer that the reduce-scatter sends.
    kept: elements that each rank receives.
    packs: gradients are copied to another buffer before they are sent.
    uses: count of flags sent along, one for each parameter: whether this rank has used it.
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
        """This path for `group` if it fits, else None. slot: elements of the group's slot, if known."""
        return None

    @classmethod
    def fits_in(cls, group: Any, layout: Layout, slot: int, device: Device, own_slots: bool) -> bool:
        """Whether this path can use a slot of `slot` elements that was made for other groups."""
        return False

    @property
    def streams(self) -> Streams:
        """The streams of the schedule."""
        return self.group.runtime.streams

    def open(self) -> None:
        """Take memory before backward's first write."""
        self.is_open, self.written = True, set()

    def target(self, position: int) -> tuple[Array, bool]:
        """(array for the gradient of one parameter, whether to add to it)."""
        raise NotImplementedError

    def put_rows(self, position: int, fill: Fill) -> None:
        """Have `fill` write or add all rows of a parameter's gradient, now or at the latest in `reduce`."""
        target, accumulate = self.target(position)
        fill(0, len(target), target, accumulate)

    @abstractmethod
    def reduce(self) -> None:
        """Hand the full gradients to the reduce stream, which adds their sum to the sharded gradient."""

    @abstractmethod
    def discard(self) -> None:
        """Drop the gradients and give the memory back."""

    @abstractmethod
    def move(self, target: Callable[[int], tuple[Array, bool]]) -> None:
        """Copy the gradients to target(position) of another path, in the compute stream. Ends this path."""

    def acquire(self) -> Slot:
        """A slot that later work in the compute stream may overwrite."""
        compute, arena = self.streams.compute, self.group.arenas["gradients"]
        slot = arena.acquire()
        if slot is None:  # more units are in backward at once than was planned
            arena.grow()
            slot = arena.acquire()
        compute.wait(slot.free)  # the reduction of the group that had the slot has read it
        return slot

    def send_from(self, slot: Slot, send: Send, part: tuple[int, int] | None = None) -> None:
        """Have the reduce stream send the slot. part: the slot has elements [start, stop) of each shard."""
        streams = self.streams
        streams.compute.record(slot.ready)
        streams.reduce.wait(slot.ready)  # compute has written the gradients
        staging = self.group.arenas.get("download")
        self.group.sharded_gradient.receive(slot, streams, send, part, staging)

    @contextmanager
    def handing_over(self, slot: Slot) -> Iterator[None]:
        """Give the slot back at the end of a with block that issues its reads, also if the block raises."""
        try:
            yield
        except BaseException:
            self.streams.reduce.record(slot.free)  # reads issued before the error may still run
            raise
        finally:
            slot.give_back()


PATHS: list[type[GradientPath]] = []  # of options; the first that accepts a group in `choose` takes it
