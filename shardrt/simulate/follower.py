"""Follower: what the operations of a recorded rank do to the terms in its memory (terms.py)."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isclose, nan, prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from shardrt import autograd
from shardrt.device.addresses import block_of
from shardrt.device.program import Collective, Take, Work
from shardrt.device.shapes import Shaped
from shardrt.device.simulated import SimulatedDevice
from shardrt.fsdp.group import ParameterGroup
from shardrt.simulate.losses import Losses, Message
from shardrt.simulate.ranks import Ranks
from shardrt.simulate.terms import (
    Gradient,
    Memory,
    Packed,
    Parameters,
    Piece,
    Received,
    Term,
    Unknown,
    Value,
    joined,
    overlaid,
)
from shardrt.simulate.updates import ANY, Updates, range_of

__all__ = ["Follower"]

Array = Any
SHARD, GATHERED, FULL, REDUCED = (
    "sharded parameters",
    "gathered parameters",
    "full gradients",
    "sharded gradients",
)
_OWNED = SHARD, GATHERED, FULL, REDUCED
FRESH = Gradient("", 0, 0)  # what a kernel of backward has added to memory that is no slot
_SUMS_KEPT = 8  # more than one unit reduces before it gathers sums
_MOST_LINES = 4096  # of an array that is not dense
_COPIES = ("copy", "numpy.copy", "numpy.copyto", "numpy.astype", "numpy.positive")
_CASTS = ("cast.pack", "cast.unpack", "cast.round_to")  # x, out
_SUMS = ("reduce.sum_into", "reduce.sum_packed")  # out, parts, scale, accumulate
_ADDS = ("numpy.add", "elementwise.add")  # of one gradient to another
_SCALES = ("elementwise.scale_", "elementwise.unscale_", "elementwise.scale_by_")  # x, factor
_UPDATES = ("adamw.step", "adamw8bit.step", "sgd.step", "lion.step", "lion8bit.step")  # param, grad
_UPDATES += ("stochastic.adamw", "stochastic.lion")


@dataclass(frozen=True)
class _Sum:
    """A reduce-scatter.

    Attributes:
        whole: this rank's terms of the buffer, from 0 on.
        own: the sum of its part, element by element, without `scale`.
        where: the range of bytes that has it.
    """

    ranks: Ranks
    whole: list[Piece]
    own: list[Piece]
    where: tuple[int, int]
    scale: float


class Follower:
    """Follows one recorded rank.

    Attributes:
        checks: what it has found.
        losses: the losses in its arrays.
        given: (name of a group, number of a call) -> what this rank gives to ranks with other roles.
        gathered: likewise, the parameters that it gives, moved to the first rank's place, and where.
    """

    def __init__(self, here: SimulatedDevice) -> None:
        self._device, self._memory = here, Memory()
        self.checks, self.losses = Updates(here, self._memory), Losses()
        self.given: dict[tuple[str, int], list[Piece]] = {}
        self.gathered: dict[tuple[str, int], tuple[list[Piece], int]] = {}
        self._sums: deque[_Sum] = deque(maxlen=_SUMS_KEPT)
        self._by_node: dict[tuple, Any] = {}  # what nodes have added to gradients -> their run, which is kept
        self._blocks: dict[int, Any] = {}  # of the arrays of the operation that is followed, by id
        self._taken: dict[int, int] = {}  # address of a block -> place in the program where it was taken
        self._writers: WeakKeyDictionary = WeakKeyDictionary()  # block -> the last group with a slot in it
        self._groups: dict[int, tuple[Any, Ranks, int, list[int]]] = {}  # by id of ranks, likewise
        self.alike = Ranks.of(here.program.alike or [here.program.rank])
        here.on_work, here.on_collective = self.work, self.collective

    @property
    def rank(self) -> int:
        """The recorded rank."""
        return self.checks.program.rank

    # -- operations

    def work(self, name: str, reads: Sequence[Array], writes: Sequence[Array], args: tuple) -> None:
        """A kernel, a copy, or a function of NumPy was issued."""
        self.checks.meet()
        self._clear(reads, writes)
        values, results, run = self._activations(reads), self._activations(writes), autograd.running()
        losses = self.losses.of(values) if run is not None else frozenset()
        self.losses.work(name, values, results, args, self._site(), run)
        others = len(values) + len(results) < len(reads) + len(writes)
        if not others and not any(self._memory.has(*_bounds(array)) for array in (*values, *results)):
            return  # activations alone
        if name == "memset" or (name == "numpy.fill" and args[0] == 0):
            for array in writes:
                self._set(array, ())
        elif name in _CASTS:
            self._check_reads(args[:1])
            self._begin_gather(args[0], args[1])
            self._send(args[0])
            self._move(args[0], args[1], losses)
        elif name in _COPIES and len(writes) == 1:
            source = reads[0] if len(reads) == 1 else None
            self._check_reads(reads)
            self._begin_gather(source, writes[0])
            self._send(source, writes[0])
            self._move(source, writes[0], losses)
        elif name in _SUMS:
            self._sum_into(*args[:4], losses)
        elif name in _ADDS and len(reads) == 2 and all(map(self._has_gradients, reads)):
            self._sum(writes[0], reads, [1.0, 1.0], losses)
        elif name in _SCALES:
            self._scale(args[0], args[1])
        elif name == "elementwise.clamp_":
            self._scale(args[0], "clamp")
        elif name in _UPDATES:
            self._use(args[1], args[0])
            self.checks.renew(args[0])
            for array in writes:
                if isinstance(array, Shaped) and self._category(array) == GATHERED:
                    self._move(args[0], array)  # the copy in 16 bits
        elif name == "muon.direction":  # grad, m, out; the update may come behind the end of the step
            self.checks.late = True
            self._use(args[0], None)
        elif name == "muon.apply" and self.checks.group_at(args[0]):  # one of Newton-Schulz's passes, too
            self.checks.renew(args[0])
        elif name == "quantise.pack":
            self._begin_gather(args[0])
            self._send(args[0])
            self._pack(args[0], args[1])
        elif name == "quantise.sum_rows":
            self._unpack(*args)
        elif name == "quantise.unpack":  # one row after the other
            for row, out in zip(args[0], args[1].reshape(len(args[0]), -1), strict=True):
                self._unpack(row[None], out, *args[2:])
        elif name == "quantise.subtract":  # packed, x: what was packed leaves x
            self._subtract(args[0], args[1])
        else:
            self._check_reads(reads)
            for array in writes:
                self._compute(array, reads, losses)

    def collective(
        self, call: str, ranks: Sequence[int], reads: Sequence[Array], writes: Sequence[Array], how: Any
    ) -> None:
        """A collective was issued. how: the Reduction, if it has one."""
        if not any(isinstance(array, Shaped) for array in (*reads, *writes)):
            return
        self.checks.meet()
        self._clear(reads, writes)
        item = self._item()
        if item.peer >= 0:
            self._message(call, ranks[item.peer], item, (*reads, *writes)[0])
            return
        for array in reads:
            self._send(array)
        group, place, others = self._group(ranks)
        if autograd.running() is not None:
            self.losses.collective(call, group, self._activations(reads), self._activations(writes))
        if call == "all_gather" and self.checks.group_at(reads[0]):
            self.checks.finish()
        if call == "all_gather":
            self._gather(group, ranks, place, others, reads[0])
        elif call == "all_to_all" and reads[0].nbytes == writes[0].nbytes:
            self._exchange(ranks, place, others, reads[0], writes[0])
        elif call in ("reduce_scatter", "all_reduce") and (how is None or how.op == "sum"):
            first = place * writes[0].size if call == "reduce_scatter" else 0
            self._reduce(group, others, reads[0].reshape(-1), first, writes[0], how)
        else:
            for array in writes:
                self._lose(array, reads)

    def _message(self, call: str, peer: int, item: Any, array: Array) -> None:
        ends = (self.rank, peer) if call == "send" else (peer, self.rank)
        message = Message(item.group, ends, item.number)
        if call == "send":
            self.losses.send(message, array)
        else:
            self.losses.receive(message, array)
            self._lose(array)

    def _group(self, ranks: Sequence[int]) -> tuple[Ranks, int, list[int]]:
        """(the ranks of a group that do what this one does, this one's place in it, the others)."""
        if id(ranks) not in self._groups:
            others = [rank for rank in ranks if rank not in self.alike]
            alike = Ranks.of(ranks) if not others else Ranks.of(set(ranks).difference(others))
            self._groups[id(ranks)] = ranks, alike, list(ranks).index(self.rank), others
        return self._groups[id(ranks)][1:]

    # -- what they do to terms

    def _clear(self, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        """Memory that has been taken since it was last used has nothing of its last owner."""
        self._blocks = {id(array): block_of(array) for array in (*reads, *writes)}
        for block in self._blocks.values():
            if block is None or self._taken.get(block.start) == block.item:
                continue
            self._taken[block.start] = block.item
            if self._category(block) != SHARD:  # that its group has filled
                self._memory.write(block.start, block.start + block.nbytes, [])

    def _pieces(self, array: Array) -> list[Piece]:
        return self._memory.read(*range_of(array), array.itemsize)

    def _elements(self, array: Array) -> list[Piece]:
        return self._memory.elements(*range_of(array), array.itemsize)

    def _dense(self, array: Array) -> list[Piece] | None:
        """The pieces of an array's elements, one after the other from 0; None for too many places."""
        lines = _lines(array)
        if lines is None:
            return None
        found, at = [], 0
        for start, stop in lines:
            pieces = self._memory.read(start, stop, array.itemsize)
            found += [piece.at(start, at, array.itemsize) for piece in pieces]
            at += stop - start
        return found

    def _set(self, array: Array, value: Value) -> None:
        if isinstance(array, Shaped):
            start, stop = range_of(array)
            self._memory.write(start, stop, [Piece(start, stop, array.itemsize, value)])

    def _lose(self, array: Array, reads: Sequence[Array] = ()) -> None:
        """An operation without a rule writes an array: nothing is known of it, if it matters."""
        matters = isinstance(array, Shaped) and (
            self._category(array) in _OWNED or any(map(self._has_gradients, reads))
        )
        item = self._item()
        name = getattr(item, "name", getattr(item, "call", "an operation"))
        self._set(array, Unknown(f"{name} at {item.site}") if matters else None)

    def _move(self, source: Array | None, target: Array, losses: frozenset = frozenset()) -> None:
        if not isinstance(source, Shaped) or not isinstance(target, Shaped):
            self._set(target, None)
            self._given(target, losses)
            return
        if self._category(target) not in _OWNED and not any(
            self._memory.has(*_bounds(array)) for array in (source, target)
        ):
            return  # activations
        pieces, lines = self._dense(source), _lines(target)
        if pieces is None or lines is None or source.size != target.size:
            self._lose(target, [source])
            return
        pieces = [piece.at(0, 0, target.itemsize) for piece in pieces]
        fresh = any(_is_fresh(piece.value) for piece in pieces)
        at = 0
        for start, stop in lines:
            end = at + stop - start
            here = [
                p.part(max(p.start, at), min(p.stop, end)) for p in pieces if p.start < end and at < p.stop
            ]
            self._memory.write(start, stop, [p.at(at, start, target.itemsize) for p in here])
            at = end
        if fresh or all(piece.value is None for piece in pieces):
            self._given(target, losses, adds=fresh)
        elif (group := self.checks.shard_at(target)) is not None:
            self.checks.written_back(group, target)

    def _given(self, target: Array, losses: frozenset = frozenset(), adds: bool = False) -> None:
        """Values that are not followed are copied: a shard that is loaded, or a gradient in backward."""
        category = self._category(target) if isinstance(target, Shaped) else ""
        if category == SHARD:
            self.checks.renew(target, given=True)
        elif category in (FULL, REDUCED) and autograd.running() is not None:
            self._compute(target, [target] if adds else [], losses)

    def _scale(self, x: Array, factor: Any) -> None:
        """All elements by one number of the host or the device; "clamp": each by its own, at most 1."""
        if isinstance(factor, Shaped):
            factor = range_of(factor)[0]
        elif factor != factor:  # nan, of made-up values
            factor = "nan"
        pieces = [
            replace(p, value=tuple(replace(t, factors=(*t.factors, factor)) for t in p.value))
            if isinstance(p.value, tuple)
            else p
            for p in self._pieces(x)
        ]
        self._memory.write(*range_of(x), pieces)

    def _pack(self, x: Array, out: Array) -> None:
        parts = self._elements(x)
        followed = any(part.value is not None for part in parts)
        self._set(out, Packed(x.size, tuple(parts)) if followed else None)

    def _unpack(
        self, packed: Array, out: Array, bits: int, block: int, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        """Out = (out if `accumulate`) + scale * the sum of the rows of packed numbers."""
        rows = [self._memory.read(*range_of(row), 1)[0].value for row in packed]
        if not all(isinstance(row, Packed) for row in rows):
            self._lose(out)
            return
        lists, scales = [list(row.parts) for row in rows], [float(scale)] * len(rows)
        if accumulate:
            lists.append(self._elements(out))
            scales.append(1.0)
        self._put(out, overlaid(lists), scales)

    def _subtract(self, packed: Array, x: Array) -> None:
        row = self._memory.read(*range_of(packed), 1)[0].value
        if not isinstance(row, Packed):
            self._lose(x, [x])
            return
        self._put(x, overlaid([self._elements(x), list(row.parts)]), [1.0, -1.0])

    def _put(
        self, out: Array, parts: Sequence[tuple[int, int, list[Value]]], scales: Sequence[float]
    ) -> None:
        """Write the sums of `parts`, which overlaid gives in elements of `out`."""
        origin, item = range_of(out)[0], out.itemsize
        sums = [
            Piece(origin + first * item, origin + last * item, item, self._added(values, scales))
            for first, last, values in parts
        ]
        self._memory.write(*range_of(out), sums)
        if all(piece.value is None for piece in sums):
            self._given(out)

    def _sum_into(
        self, out: Array, parts: Sequence[Array], scale: float, accumulate: bool, losses: frozenset
    ) -> None:
        """Out = (out if `accumulate`) + scale * the sum of the parts."""
        for part in parts:
            self._send(part, out)
        at, scales = _start(parts[0]), [float(scale)] * len(parts)
        found = next((each for each in reversed(self._sums) if each.where[0] <= at < each.where[1]), None)
        if found is not None and not accumulate:
            self._sums.append(replace(found, where=range_of(out), scale=found.scale * float(scale)))
        if accumulate:
            parts, scales = [*parts, out], [*scales, 1.0]
        self._sum(out, parts, scales, losses)

    def _sum(self, out: Array, parts: Sequence[Array], scales: Sequence[float], losses: frozenset) -> None:
        """Out = the sum of scale * part."""
        lists = [self._elements(part) for part in parts]
        made = [all(piece.value is None for piece in pieces) for pieces in lists]
        if autograd.running() is not None and any(made) and not all(made):  # a kernel has made this summand
            followed = [n for n, each in enumerate(made) if not each]
            self._put(out, overlaid([lists[n] for n in followed]), [scales[n] for n in followed])
            self._compute(out, [out], losses)
            return
        self._put(out, overlaid(lists), scales)

    def _added(self, values: Sequence[Value], scales: Sequence[float]) -> Value:
        if all(value is None for value in values):
            return None
        for value in values:
            if not isinstance(value, tuple):
                unknown = Unknown(f"a sum with memory that is not followed at {self._site()}")
                return value if isinstance(value, Unknown) else unknown
        scaled = zip(values, scales, strict=True)
        return self._joined([term.scaled(scale) for value, scale in scaled for term in value])

    def _joined(self, terms: Sequence[Term]) -> tuple[Term, ...]:
        """The sum of terms. Keeps the place where one was added twice."""
        seen = set()
        for term in terms:
            key = term.source, term.ranks, term.factors
            if key in seen and term.scale > 0:
                self._doubled(term)
            seen.add(key)
        return joined(terms)

    def _doubled(self, term: Term) -> None:
        self.checks.doubled.setdefault(term.source, self.checks.last())

    def _of_rank(self, value: Value, rank: int, moved: int) -> Value:
        """What another rank has in place of this rank's terms: `moved` elements further, or packed rows."""
        if isinstance(value, Packed):
            far = moved * value.count
            parts = (replace(part, value=self._of_rank(part.value, rank, far)) for part in value.parts)
            return replace(value, parts=tuple(parts))
        if not isinstance(value, tuple):
            return value
        theirs = []
        for term in value:
            ranks = term.ranks
            if ranks is not None and rank not in ranks:
                ranks = ranks.moved(rank - self.rank)
            source = (
                replace(term.source, use=ANY) if moved and isinstance(term.source, Gradient) else term.source
            )
            theirs.append(replace(term, source=source, base=term.base + moved, ranks=ranks))
        return tuple(dict.fromkeys(theirs))

    def _from_0(self, array: Array) -> list[Piece]:
        return [piece.at(_start(array), 0, array.itemsize) for piece in self._pieces(array)]

    def _give(self, array: Array, others: list[int]) -> list[Piece]:
        """The pieces of an array from 0 on, which ranks with other roles may get."""
        pieces = self._from_0(array)
        if others:
            item = self._item()
            self.given[item.group, item.number] = pieces
        return pieces

    def _received(self, rank: int, size: int, item: int, base: int = 0) -> Piece:
        """What a rank with another role gives, from 0 on."""
        call = self._item()
        source = Received(call.group, call.number, rank)
        return Piece(0, size, item, (Term(source, base, Ranks((self.rank,))),))

    def _gather(self, group: Ranks, ranks: Sequence[int], place: int, others: list[int], own: Array) -> None:
        """An all-gather into the buffer around this rank's part."""
        pieces, size = self._pieces(own), own.nbytes
        of_parameters = all(piece.value is None or _is_of_parameters(piece.value) for piece in pieces)
        if others and not of_parameters:
            self._give(own, others)
            for other, rank in enumerate(ranks):
                if other != place:
                    received = self._received(rank, size, own.itemsize)
                    self._write(_start(own) + (other - place) * size, received)
            return
        if others:  # taken to be alike; Follow compares them
            call, first = self._item(), -place * own.size
            moved = [piece.moved(first) for piece in self._from_0(own)]
            self.gathered[call.group, call.number] = moved, self.checks.last()
        if self._gather_sums(group, place, own):
            return
        if len(pieces) == 1 and _is_of_parameters(pieces[0].value):
            origin = _start(own) - place * size
            value = pieces[0].moved(-place * own.size).value
            self._write(origin, Piece(0, len(ranks) * size, own.itemsize, value))
            return
        for other, rank in enumerate(ranks):
            if other != place:
                self._write_moved(pieces, rank, (other - place) * size)

    def _write_moved(self, pieces: list[Piece], rank: int, far: int) -> None:
        """What another rank has in place of these pieces, `far` bytes further."""
        found = []
        for piece in pieces:
            each = piece.stop - piece.start if isinstance(piece.value, Packed) else piece.item
            value = self._of_rank(piece.value, rank, far // each)
            found.append(Piece(piece.start + far, piece.stop + far, piece.item, value))
        self._memory.write(pieces[0].start + far, pieces[-1].stop + far, found)

    def _gather_sums(self, group: Ranks, place: int, own: Array) -> bool:
        """Whether it gathers what a reduce-scatter has summed: of each what this has of its part."""
        start, stop = range_of(own)
        elements = self._elements(own)
        for summed in reversed(self._sums):
            scale = _times(elements, summed.own) if summed.ranks == group else None
            if scale is nan:
                scale = summed.scale if summed.where == (start, stop) else None
            if scale is None:
                continue
            for piece in summed.whole:
                value = self._summed(group, [], piece.value, None)
                if isinstance(value, tuple):
                    value = tuple(term.scaled(scale) for term in value)
                new = replace(piece, value=value).at(0, start - place * own.nbytes, own.itemsize)
                for one in _around(new, start, stop):
                    self._memory.write(one.start, one.stop, [one])
            return True
        return False

    def _write(self, start: int, piece: Piece) -> None:
        """A piece that begins at 0, in another place."""
        piece = piece.at(0, start, piece.item)
        self._memory.write(piece.start, piece.stop, [piece])

    def _exchange(
        self, ranks: Sequence[int], place: int, others: list[int], sent: Array, received: Array
    ) -> None:
        """An all-to-all of equal parts: from each rank what this one would send itself."""
        size = sent.nbytes // len(ranks)
        start, origin = range_of(sent)[0] + place * size, range_of(received)[0]
        own = self._memory.read(start, start + size, sent.itemsize)
        if all(piece.value is None for piece in own):
            self._set(received, None)
            return
        whole = self._give(sent, others)
        if not others and _has_terms(whole):  # the parts may be added up next
            part = [piece.at(start, 0, sent.itemsize) for piece in own]
            self._keep_sum(Ranks.of(ranks), whole, part, range_of(received), 1.0)
        found = []
        for other, rank in enumerate(ranks):
            if rank in others and not isinstance(own[0].value, Packed):
                count = size // sent.itemsize
                theirs = self._received(rank, size, sent.itemsize, place * count)
                found.append(theirs.at(0, origin + other * size, sent.itemsize))
                continue
            for piece in own:
                moved = replace(piece, value=self._of_rank(piece.value, rank, 0))
                found.append(moved.at(start, origin + other * size, piece.item))
        self._memory.write(*range_of(received), found)

    def _reduce(
        self, group: Ranks, others: list[int], buffer: Array, first: int, out: Array, how: Any
    ) -> None:
        """Out = the sum over ranks of the buffer from element `first` on."""
        whole, before, item = self._give(buffer, others), self._pieces(out), buffer.itemsize
        start = _start(buffer) + first * item
        own = self._memory.read(start, start + out.size * item, item)
        own = [piece.at(start, 0, item) for piece in own]
        summed = [
            replace(p, value=self._summed(group, others, p.value, how, first + p.start // item)) for p in own
        ]
        self._add(out, [piece.at(0, _start(out), out.itemsize) for piece in summed], before, how)
        if len(buffer) > len(out) and not others and _has_terms(whole):
            self._keep_sum(group, whole, own, range_of(out), how.scale if how else 1.0)

    def _keep_sum(
        self, group: Ranks, whole: list[Piece], own: list[Piece], where: tuple[int, int], scale: float
    ) -> None:
        """A gather may follow, of what each rank has summed. own: this rank's part of `whole`, from 0 on."""
        summed = [replace(piece, value=self._summed(group, [], piece.value, None)) for piece in own]
        self._sums.append(_Sum(group, whole, [piece.at(0, 0, 1) for piece in summed], where, scale))

    def _add(self, out: Array, summed: list[Piece], before: list[Piece], how: Any) -> None:
        """Write sums, or add them to what was there."""
        if how is not None and how.accumulate:
            summed = [
                Piece(first, last, out.itemsize, self._added(values, (1.0, 1.0)))
                for first, last, values in overlaid([before, summed])
            ]
        self._memory.write(*range_of(out), summed)

    def _summed(self, group: Ranks, others: list[int], value: Value, how: Any, base: int = 0) -> Value:
        """The sum of what the ranks of a group have in one place.

        others: ranks with other roles that are in it, too. base: the place in what they give.
        """
        if not isinstance(value, tuple):
            return value
        scale = how.scale if how is not None else 1.0
        terms = []
        for term in value:
            if term.ranks is None:
                terms.append(term.scaled(group.size * scale))
                continue
            ranks, times = term.ranks.spread(group, self.rank)
            if times > 1:
                self._doubled(term)
            terms.append(replace(term, ranks=ranks).scaled(times * scale))
        item = self._item()
        me = Ranks((self.rank,))
        terms += [Term(Received(item.group, item.number, rank), base, me, scale) for rank in others]
        return tuple(terms)

    # -- gradients

    def _use(self, gradient: Array, param: Array | None) -> None:
        self._send(gradient)
        self.checks.use(gradient, param)

    def _send(self, array: Any, target: Any = None) -> None:
        """An operation takes gradients out of a slot where backward has written them.

        target: where it copies them to, which may be another slot.
        """
        if not isinstance(array, Shaped) or self._category(array) not in (FULL, REDUCED):
            return
        group, origin = self._writers.get(block_of(array), (None, 0))
        in_backward = target is not None and self._item().stream == self._device.current_stream.name
        if group is None or not array.flags.c_contiguous:
            return
        if self._category(target) == FULL:
            self.checks.moved(group, block_of(array), block_of(target))
        elif not in_backward:  # which copies a gradient to add to it elsewhere
            self.checks.sent(group, array, origin)

    def _begin_gather(self, source: Any, target: Any = None) -> None:
        """A shard is copied to where it will be gathered, or packed: all its updates have been issued."""
        if self._category(source) == SHARD and (target is None or self._category(target) == GATHERED):
            self.checks.finish()

    def _check_reads(self, reads: Sequence[Array]) -> None:
        """Gathered parameters that a kernel reads must be the newest."""
        for array in reads:
            if isinstance(array, Shaped) and self._category(array) == GATHERED:
                group = self._having(array, lambda group: group.slot)
                if group is not None:
                    self.checks.check_read(array, group)

    def _has_gradients(self, array: Array) -> bool:
        values = [piece.value for piece in self._pieces(array)] if isinstance(array, Shaped) else []
        return any(
            isinstance(value, Unknown | Packed)
            or (isinstance(value, tuple) and any(isinstance(term.source, Gradient) for term in value))
            for value in values
        )

    def _compute(self, array: Array, reads: Sequence[Array], losses: frozenset) -> None:
        """A kernel that is not linear writes: if into full gradients, in backward, it makes gradients.

        Where it reads what was there, it adds to that.
        """
        if not isinstance(array, Shaped):
            return
        run, category = autograd.running(), self._category(array)
        group = self._having(array, _open_slot) if category in (FULL, REDUCED) and run is not None else None
        adds = any(_same(array, read) for read in reads)
        lines = _lines(array) if group is not None else None
        if group is None or lines is None:
            if run is not None and adds and self._has_gradients(array):
                self._put_on(array, Term(FRESH, 0))
            else:
                self._lose(array, [read for read in reads if self._category(read) not in (FULL, REDUCED)])
            return
        number = self.losses.number(run)
        origin, me, item = range_of(_open_slot(group).array)[0], Ranks((self.rank,)), array.itemsize
        self._writers[block_of(array)] = group, origin
        for start, stop in lines:
            first = (start - origin) // item
            last, block = first + (stop - start) // item, block_of(array)
            source = self.checks.write(group, block, first, last, number, losses)
            self._check_place(run, group, first, last)
            read = tuple(range_of(each) for each in self._activations(reads) if isinstance(each, Shaped))
            self._check_once(run, (id(group), first, read), source)
            pieces = self._memory.read(start, stop, item) if adds else [Piece(start, stop, item, ())]
            for n, piece in enumerate(pieces):
                new = Term(source, (piece.start - origin) // item, me)
                if isinstance(piece.value, tuple):
                    old = tuple(term for term in piece.value if term.source != FRESH)
                    pieces[n] = replace(piece, value=(*old, new))
            self._memory.write(start, stop, pieces)

    def _check_place(self, run: Any, group: ParameterGroup, first: int, last: int) -> None:
        """A node writes the gradients of parameters that it has read."""
        edges = run.node.edges if run.position < len(run.nodes) else ()
        own = [edge.leaf for edge in edges if edge is not None and edge.leaf is not None]
        places = [group.position[id(each)] for each in own if id(each) in group.position]
        entries = [group.layout.entries[place] for place in places]
        if entries and not any(each.offset <= first and last <= each.stop for each in entries):
            names = ", ".join(group.parameters[place].name for place in places)
            self.checks.find(
                f"the gradient of {names} is written at elements {first} to {last} of {group.label}"
            )

    def _check_once(self, run: Any, key: tuple, source: Gradient) -> None:
        """A node adds to the gradient of one array once."""
        key = id(run), run.position, *key
        if key in self._by_node:
            self.checks.find(f"{source} is added twice by one node of backward")
        self._by_node[key] = run

    def _put_on(self, array: Array, term: Term) -> None:
        """A kernel adds to memory that is no slot, and that has gradients."""
        pieces = [
            replace(piece, value=(*piece.value, term)) if isinstance(piece.value, tuple) else piece
            for piece in self._pieces(array)
        ]
        self._memory.write(*range_of(array), pieces)

    def _having(self, array: Array, slot_of: Callable[[ParameterGroup], Any]) -> ParameterGroup | None:
        """The group that has the slot in which an array lies."""
        block = block_of(array)
        for group in self.checks.groups.values():
            slot = slot_of(group)
            if slot is not None and block_of(slot.array) is block:
                return group
        return None

    def _activations(self, arrays: Sequence[Array]) -> list[Array]:
        """The arrays that are neither parameters nor gradients of them."""
        return [array for array in arrays if self._category(array) not in _OWNED]

    def _category(self, array: Any) -> str:
        block = self._blocks[id(array)] if id(array) in self._blocks else block_of(array)
        items = self._device.program.items
        taken = items[block.item] if block is not None and 0 <= block.item < len(items) else None
        return taken.category if isinstance(taken, Take) else ""

    def _site(self) -> str:
        return self._item().site

    def _item(self) -> Work | Collective:
        """The operation that was issued last."""
        return self.checks.program.items[self.checks.last()]


def _open_slot(group: ParameterGroup) -> Any:
    """Where backward writes the group's gradients now."""
    return getattr(group.gradient_path, "slot", None)


def _start(array: Array) -> int:
    return range_of(array)[0]


def _bounds(array: Array) -> tuple[int, int]:
    """The bytes from its first to its last element."""
    start = _start(array)
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    return start, start + (last + array.itemsize if array.size else 0)


def _lines(array: Array) -> list[tuple[int, int]] | None:
    """The ranges of bytes of an array's elements, in their order; None for too many."""
    start = range_of(array)[0]
    if array.flags.c_contiguous:
        return [(start, start + array.nbytes)]
    dense, inner = array.itemsize, array.ndim  # bytes of a line; axes outside of it
    while inner and (array.strides[inner - 1] == dense or array.shape[inner - 1] == 1):
        inner -= 1
        dense *= array.shape[inner]
    if prod(array.shape[:inner]) > _MOST_LINES:
        return None
    places = [
        start + sum(i * stride for i, stride in zip(index, array.strides, strict=False))
        for index in np.ndindex(*array.shape[:inner])
    ]
    return [(place, place + dense) for place in places]


def _times(pieces: list[Piece], summed: list[Piece]) -> float | None:
    """By what pieces have been scaled since they were summed; None if they have become something else.

    nan: it can't be said, as they are zeros.
    """
    found = None
    for now, then in zip(pieces, summed, strict=False):
        if (now.start, now.stop) != (then.start, then.stop) or not (
            isinstance(now.value, tuple)
            and isinstance(then.value, tuple)
            and len(now.value) == len(then.value)
        ):
            if now != then:
                return None
            continue
        for one, other in zip(now.value, then.value, strict=True):
            if (one.source, one.base, one.ranks) != (other.source, other.base, other.ranks):
                return None
            ratio = one.scale / other.scale
            if one.factors != other.factors or (found is not None and not isclose(ratio, found)):
                return None
            found = ratio
    return (nan if found is None else found) if len(pieces) == len(summed) else None


def _around(piece: Piece, start: int, stop: int) -> list[Piece]:
    """What of a piece lies outside of a range."""
    parts = (piece.start, min(piece.stop, start)), (max(piece.start, stop), piece.stop)
    return [piece.part(first, last) for first, last in parts if first < last]


def _is_of_parameters(value: Value) -> bool:
    return isinstance(value, tuple) and any(isinstance(term.source, Parameters) for term in value)


def _has_terms(pieces: list[Piece]) -> bool:
    return any(isinstance(piece.value, tuple) and piece.value for piece in pieces)


def _is_fresh(value: Value) -> bool:
    return isinstance(value, tuple) and any(term.source == FRESH for term in value)


def _same(one: Any, other: Any) -> bool:
    shaped = isinstance(one, Shaped) and isinstance(other, Shaped)
    return shaped and range_of(one) == range_of(other)
