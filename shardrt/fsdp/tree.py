"""The sharded gradient of a group: what a step's reductions add up to, in any number or by a fixed tree.

The tree adds the gradients of a step's micro-batches in the same way at every number of ranks.

With M micro-batches on W ranks, both powers of two, rank r has micro-batches r, W + r, 2 W + r and so on. A
reduction adds W of them as neighbours (kernels/cpu/reduce.py); reductions are added as a binary counter
counts, with a buffer for each of its bits that is 1. Together that is one tree of M leaves, whatever W is.
The buffers after each of four: 0; 01; 01, 2; 0123.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardrt.device import Device, Event
from shardrt.device.arena import Slot
from shardrt.fsdp.policy import Choices

Array = Any


@dataclass(frozen=True)
class Place:
    """Where a reduction's sum goes: written or added to `buffer`, then `merges` times to the one before."""

    buffer: int
    accumulate: bool
    merges: int


def place(number: int) -> Place:
    """The place of reduction `number` of a step, counted from 0."""
    set_bits = number.bit_count()
    if number % 2 == 0:
        return Place(set_bits, False, 0)
    trailing = (number ^ (number + 1)).bit_length() - 1  # ones at the end of `number`: so far the carry goes
    return Place(set_bits - 1, True, trailing - 1)


def buffers(reductions: int) -> int:
    """How many buffers it takes to add up so many `reductions`, a power of two."""
    return max(1, reductions.bit_length() - 1)


class GradientSum:
    """The sharded gradient of one group, and what is known of it since the last zero_grad.

    `touched`: whether any rank has put more than zeros into it; only `is_touched` waits for the others' word.
    """

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self.buffers: list[Array] = []  # the gradient, then the partial sums of a tree
        self.slots: list[Slot] = []  # they as slots, where a full gradient is as long as its sum
        self.uses: Array | None = None  # how many ranks have used each parameter, if they tell each other
        self.ready: Event  # the last reduction that was issued is in its place
        self.forget()

    def forget(self) -> None:
        """zero_grad."""
        self.reductions = 0
        self.covered: set[int] = set()  # positions of the parameters of which something is in the sum
        self.touched = False  # as far as this rank knows
        self.told_touched: Callable[[], bool] | None = None  # waits for what the other ranks know
        self.uses_read: Array | None = None

    @property
    def exact(self) -> bool:
        """Whether a step has a given number of reductions, which are added by the tree."""
        return self._choices.micro_batches is not None

    @property
    def complete(self) -> bool:
        """Whether all reductions of a step are in it, as far as their number is known."""
        return self._choices.micro_batches in (None, self.reductions)

    @property
    def place(self) -> Place:
        """Where the next reduction goes among `buffers`."""
        return place(self.reductions) if self.exact else Place(0, self.reductions > 0, 0)

    @property
    def slot(self) -> Slot | None:
        """Where the full gradient can be written as its own sum: if there is nothing to add it to."""
        goes = self.place
        return self.slots[goes.buffer] if self.slots and not goes.accumulate else None

    def issued(self, trained: Collection[int]) -> None:
        """One more reduction, of the parameters at these positions, will go into it."""
        self.reductions += 1
        self.covered.update(trained)
        self.uses_read = None

    def is_touched(self) -> bool:
        """Whether there is a gradient, the same on every rank."""
        if not self.touched and self.told_touched is not None:
            self.touched = self.told_touched()
        return self.touched

    def has(self, position: int, device: Device) -> bool:
        """Whether a parameter has a gradient; with `uses`, waits for the reduction that told them last."""
        if position not in self.covered or not self.is_touched():
            return False
        if self.uses is None:
            return True
        if self.uses_read is None:
            self.ready.synchronize()
            self.uses_read = np.array(device.to_numpy(self.uses))
        return bool(self.uses_read[position] > 0)
