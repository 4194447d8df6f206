"""ShardedGradient: this rank's part of a group's summed gradient, and how each reduction enters it.

Reductions of one step add up in one array on the device. Options replace the class: options/fixed_tree.py
adds by a tree whose shape does not depend on the number of ranks, options/offload.py keeps the sum on the
host.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardrt.device import Device, Event, Stream
from shardrt.device.arena import Arena, Slot

Array = Any
# send(out, accumulate): issues, in the reduce stream, the sum over ranks of what a slot holds, into `out`.
Send = Callable[[Array, bool], None]


@dataclass
class Streams:
    """The streams of one schedule. upload and download copy between host and device."""

    device: Device
    compute: Stream
    gather: Stream
    reduce: Stream
    upload: Stream
    download: Stream


class ShardedGradient:
    """The sharded gradient of one group, and what is known of it since the last zero_grad.

    arrays: the gradient first; a subclass may need `partial_sums` more, equally long.
    """

    fixed_tree = False  # the order of all additions is the same for every number of ranks
    partial_sums = 0

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.slots: list[Slot] = []  # `arrays` as slots, where a full gradient is as long as its sum
        self.uses: Array | None = None  # how many ranks have used each parameter, if ranks exchange that
        self.ready: Event | None = None  # the last reduction that was issued is in its place
        self.label = ""  # of its group, for traces and messages
        self.forget()

    def like_new(self) -> "ShardedGradient":
        """Another of this kind, without memory."""
        return type(self)()

    def forget(self) -> None:
        """zero_grad."""
        self.reductions = 0
        self.covered: set[int] = set()  # positions of the parameters of which something is in the sum
        self.wrote_gradient = False  # some rank has put more than zeros into it, as far as this rank knows
        self.others_wrote: Callable[[], bool] | None = None  # waits for the other ranks' answer
        self._uses_read: Array | None = None

    def release(self) -> None:
        """Nothing of the group is trained any more: free the memory."""
        self.arrays, self.slots = [], []
        self.forget_uses()

    def forget_uses(self) -> None:
        """Ranks do not exchange any more which parameters they use."""
        self.uses = self._uses_read = None

    @property
    def complete(self) -> bool:
        """Whether all reductions of a step are in it, as far as their number is known."""
        return True

    def refuse_incomplete(self) -> None:
        """Raise RuntimeError if reductions of a step are missing."""

    @property
    def slot(self) -> Slot | None:
        """Where the full gradient can be written as its own sum: if there is nothing to add it to."""
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
        """Have `send` put one reduction into its place.

        slot: what is sent. `slot.free` is recorded when it has been read, `ready` when the sum is in place.
        part: (start, stop) of what the slot has of each shard; None for all. staging: slots through which the
        sum goes to the host, if it does.
        """
        index, accumulate = self._goes_to()
        out = self.arrays[index] if part is None else self.arrays[index][slice(*part)]
        if index == 0 and not accumulate and (part is None or part[0] == 0):
            # zero_grad has lent its pages. All return: at the ends of a part are pages of its neighbours.
            streams.device.take_pages(self.arrays[0])
        send(out, accumulate)
        streams.reduce.record(slot.free)
        self._carry(streams)
        streams.reduce.record(self.ready)

    def _goes_to(self) -> tuple[int, bool]:
        """(which of `arrays` the next reduction goes to, whether it is added to what is there)."""
        return 0, self.reductions > 0

    def _carry(self, streams: Streams) -> None:
        """Add partial sums that are complete, in the reduce stream."""

    def issued(self, trained: Collection[int]) -> None:
        """One more reduction, of the parameters at these positions, will go into it."""
        self.reductions += 1
        self.covered.update(trained)
        self._uses_read = None

    def any_rank_wrote_gradient(self) -> bool:
        """Whether there is a gradient: the same on every rank. Waits for the others only if it must."""
        if not self.wrote_gradient and self.others_wrote is not None:
            self.wrote_gradient = self.others_wrote()
        return self.wrote_gradient

    def has(self, position: int, device: Device) -> bool:
        """Whether a parameter has a gradient; with `uses`, waits for the reduction that brought them last."""
        if position not in self.covered or not self.any_rank_wrote_gradient():
            return False
        if self.uses is None:
            return True
        if self._uses_read is None:
            self.ready.synchronize()
            self._uses_read = np.array(device.to_numpy(self.uses))
        return bool(self._uses_read[position] > 0)
