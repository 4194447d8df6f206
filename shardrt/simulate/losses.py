"""Losses: with what weight each loss enters a gradient, and along which ranks its positions are cut.

A backward run begins with a number, 1. Multiplications give that number a factor, until a kernel makes an
array of it: this is the kernel of a loss. From there on, what a kernel of backward writes has the losses of
what it reads. Collectives of backward cut positions among ranks and put them together again, as sequence
parallelism does.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from shardrt.device.addresses import block_of
from shardrt.device.shapes import Shaped
from shardrt.simulate.ranks import Ranks

__all__ = ["Loss", "Losses", "Message"]

Array = Any
_COPIES = ("copy", "numpy.copy")
_KEEP_COUNTS = ("numpy.maximum", "numpy.astype", "copy", "numpy.copy", "numpy.copyto")


@dataclass(frozen=True)
class Message:
    """What one rank sends another: the call `number` of a group between two world ranks."""

    group: str
    ends: tuple[int, int]
    number: int


@dataclass(frozen=True)
class Loss:
    """A loss in an array of backward.

    source: the site of the kernel that made an array of it; "" while it is a number; or a message.
    run: the number of the backward run that it began.
    cut: groups of ranks among which its positions are cut.
    exchanged: those of them that an all-to-all has brought together, until another one.
    """

    source: str | Message
    weight: float = 1.0
    run: int = 0
    cut: frozenset[Ranks] = frozenset()
    exchanged: frozenset[Ranks] = frozenset()


class Losses:
    """The losses in the arrays of a rank, and in what it has sent."""

    def __init__(self) -> None:
        self.sent: dict[Message, frozenset[Loss]] = {}
        self._of: WeakKeyDictionary = WeakKeyDictionary()  # by block of memory
        self._in: WeakKeyDictionary = WeakKeyDictionary()  # the run that wrote it, by block
        self._now: int | None = None  # the run that goes on
        self._counts: WeakKeyDictionary = WeakKeyDictionary()  # numbers of positions, by block
        self._runs: dict[int, tuple[int, Any]] = {}  # by id; kept, so no other has it
        self._made: Counter[tuple[int, str]] = Counter()  # arrays made of numbers, by run and site

    def of(self, arrays: Sequence[Any]) -> frozenset[Loss]:
        """Those of all arrays."""
        found: frozenset[Loss] = frozenset()
        for block in map(block_of, arrays):
            found |= self._of.get(block, frozenset()) if block is not None else frozenset()
        return found

    def number(self, run: Any) -> int:
        """Of the backward run that contains this one, in the order in which they began."""
        run = run.outermost
        number, _ = self._runs.setdefault(id(run), (len(self._runs), run))
        return number

    def work(
        self, name: str, reads: Sequence[Array], writes: Sequence[Array], args: tuple, site: str, run: Any
    ) -> None:
        """A kernel or a function of NumPy. run: the backward run that it is in, or None."""
        if not writes:
            return
        if name == "numpy.fill" and writes[0].size == 1:  # the 1, or what a user has in its place
            self._of[block_of(writes[0])] = frozenset([Loss("", float(args[0]))])
            return
        self._count(name, reads, writes)
        self._now = self.number(run) if run is not None else None
        if run is None and not name.startswith(_COPIES):
            return
        losses = self.of(reads)
        numbers = {loss for loss in losses if loss.source == ""}
        number = self._now or 0
        if numbers and any(array.size > 1 for array in writes if isinstance(array, Shaped)):
            self._made[number, site] += 1
            times = self._made[number, site]
            site += f", {times}" if times > 1 else ""
        for array in writes:
            if not isinstance(array, Shaped):
                continue
            found = losses
            if numbers and array.size > 1:
                found = (losses - numbers) | {replace(loss, source=site, run=number) for loss in numbers}
            elif numbers:
                found = frozenset(self._scaled(loss, name, args) for loss in numbers)
            self._put(array, found)

    def collective(self, call: str, ranks: Ranks, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        """A collective of activations' gradients."""
        losses = self.of(reads)
        if not losses:
            return
        group = frozenset([ranks])
        if call == "all_gather":  # into the buffer that the own part lies in
            whole = frozenset(replace(loss, cut=loss.cut - group) for loss in losses)
            self._of.update((block_of(array), whole) for array in writes if block_of(array) is not None)
            return
        if call == "reduce_scatter":
            losses = frozenset(replace(loss, cut=loss.cut | group) for loss in losses)
        elif call == "all_to_all":
            losses = frozenset(_exchanged(loss, ranks) for loss in losses)
        for array in writes:
            self._put(array, losses)

    def send(self, message: Message, array: Array) -> None:
        """An array is sent."""
        self.sent[message] = self.of([array])

    def receive(self, message: Message, array: Array) -> None:
        """An array is received."""
        if block_of(array) is not None:  # a slot, which has nothing of its last message
            self._of[block_of(array)] = frozenset([Loss(message)])

    def _put(self, array: Array, losses: frozenset[Loss]) -> None:
        block = block_of(array)
        if block is None:
            return
        if array.nbytes < block.nbytes and self._in.get(block) == self._now:  # the rest has what it had
            losses |= self._of.get(block, frozenset())
        self._of[block], self._in[block] = losses, self._now

    def _count(self, name: str, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        """The number of targets that are not ignored: of all targets, since a recording has no values."""
        if not reads or len(writes) != 1 or writes[0].size > 1:
            return
        if name == "numpy.add.reduce" and reads[0].dtype == bool:
            self._counts[block_of(writes[0])] = reads[0].size
        elif name in _KEEP_COUNTS and block_of(reads[0]) in self._counts:
            self._counts[block_of(writes[0])] = self._counts[block_of(reads[0])]

    def _scaled(self, loss: Loss, name: str, args: tuple) -> Loss:
        """A number behind a multiplication or division by one of the host, or by a number of positions."""
        numbers = [float(arg) for arg in args if isinstance(arg, int | float | np.number)]
        if name == "numpy.multiply" and numbers:
            return replace(loss, weight=loss.weight * numbers[0])
        if name == "numpy.divide" and isinstance(args[0], Shaped):
            divisor = numbers[0] if numbers else self._counts.get(block_of(args[1]), 1.0)
            return replace(loss, weight=loss.weight / divisor)
        return loss


def _exchanged(loss: Loss, ranks: Ranks) -> Loss:
    """Behind an all-to-all of experts: a rank has its experts' positions of all ranks, or its own again."""
    inside, back = (
        frozenset(group for group in groups if all(rank in ranks for rank in group))
        for groups in (loss.cut, loss.exchanged)
    )
    return replace(loss, cut=loss.cut - inside | back, exchanged=loss.exchanged - back | inside)
