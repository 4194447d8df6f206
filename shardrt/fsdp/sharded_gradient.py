"""ShardedGradient: this rank's shard of a group's summed gradient, and how each reduction adds to it.

The reductions of one step add up in one array on the device. Options replace the class:
options/fixed_tree.py adds by a tree whose shape does not depend on the number of ranks, and
options/offload.py keeps the sum on the host.
"""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from shardrt.device import Device, Event
from shardrt.device.arena import Arena, Slot
from shardrt.fsdp.streams import Streams

Array = Any
# send(out, accumulate): issues in the reduce stream: out = (out if accumulate) + the slots' sum over ranks.
Send = Callable[[Array, bool], None]


class ShardedGradient:
    """The sharded gradient of one group, and its state since the last zero_grad.

    arrays: the gradient first, 1-D; then `partial_sums` more arrays of the same length, for subclasses.
    """

    fixed_tree = False  # the order of all additions is the same for every number of ranks
    partial_sums = 0

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.slots: list[Slot] = []  # `arrays` as slots, if a full gradient is as long as its shard
        self.uses: Array | None = None  # number of ranks that used each parameter, if ranks exchange that
        self.ready: Event | None = None  # recorded when the last issued reduction is in place
        self.label = ""  # the group's label, for traces and messages
        self.forget()

    def like_new(self) -> "ShardedGradient":
        """A new object of the same class, without memory."""
        return type(self)()

    def forget(self) -> None:
        """Reset the state, for zero_grad."""
        self.reductions = 0
        self.covered: set[int] = set()  # positions of the parameters that some reduction included
        self.known_written = False  # this rank knows that a rank has written a gradient
        self.ask_others: Callable[[], bool] | None = None  # waits for the answer of the other ranks
        self._uses_read: Array | None = None

    def release(self) -> None:
        """Free the memory: no parameter of the group is trained any more."""
        self.arrays, self.slots = [], []
        self.forget_uses()

    def forget_uses(self) -> None:
        """Free the counts of uses: ranks no longer exchange which parameters they use."""
        self.uses = self._uses_read = None

    @property
    def complete(self) -> bool:
        """Whether all reductions of a step have been issued, if the class knows their number."""
        return True

    def refuse_incomplete(self) -> None:
        """Raise RuntimeError if reductions of a step are missing."""

    @property
    def slot(self) -> Slot | None:
        """The slot into which backward can write the full gradient as the sum itself, else None.

        That needs a slot (see `slots`) and nothing in it to add to.
        """
        index, accumulate = self._goes_to()
        return self.slots[index] if self.slots and not accumulate else None

    def receive(
        self,
        slot: Slot,
        streams: Streams,
        send: Send,
        part: tuple[int, int] | None = None,
        staging: Arena | None = None,
    ) -> None:
        """Have `send` add one reduction, in the reduce stream.

        slot: the full gradients. `slot.free` is recorded when they have been read, `ready` when the sum is in
        place.
        part: the slot has elements [start, stop) of each shard; None: whole shards.
        staging: slots through which a sum that lives on the host passes.
        """
        index, accumulate = self._goes_to()
        out = self.arrays[index] if part is None else self.arrays[index][slice(*part)]
        if index == 0 and not accumulate and (part is None or part[0] == 0):
            # zero_grad may have lent the array's pages. Take all of them back, not only those of `part`: its
            # first and last page also hold elements of the neighbouring parts.
            streams.device.take_pages(self.arrays[0])
        send(out, accumulate)
        streams.reduce.record(slot.free)  # the full gradients have been read
        self._carry(streams)
        streams.reduce.record(self.ready)  # the sum is in place

    def _goes_to(self) -> tuple[int, bool]:
        """(index into `arrays` of the next reduction's target, whether it adds to the target)."""
        return 0, self.reductions > 0

    def _carry(self, streams: Streams) -> None:
        """Add up partial sums that are complete, in the reduce stream."""

    def issued(self, trained: Collection[int]) -> None:
        """Count one more reduction, which includes the parameters at these positions."""
        self.reductions += 1
        self.covered.update(trained)
        self._uses_read = None

    def wait_whether_written(self) -> bool:
        """Whether any rank has written a gradient; the same on every rank.

        Waits for the other ranks' answer only if this rank does not know of a written gradient.
        """
        if not self.known_written and self.ask_others is not None:
            self.known_written = self.ask_others()
        return self.known_written

    def has(self, position: int, device: Device) -> bool:
        """Whether a parameter has a gradient. With `uses`, the host waits for the last reduction's counts."""
        if position not in self.covered or not self.wait_whether_written():
            return False
        if self.uses is None:
            return True
        if self._uses_read is None:
            self.ready.synchronize()
            self._uses_read = np.array(device.to_numpy(self.uses))
        return bool(self._uses_read[position] > 0)
