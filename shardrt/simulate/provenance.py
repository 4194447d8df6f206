"""Provenance: every gradient enters its optimizer once, and every kernel reads the newest parameters.

    with followed() as follow:
        programs = record(["train.py"], ranks=4096, follow=follow)
    print(follow.findings)

Each recorded rank is followed while its host issues work, in that order: where there is no race, any order
that streams allow has the same values. Copies, casts, sums and collectives move and add terms (terms.py).
Kernels of backward make gradients, which kernels of optimizers use up:

- what a backward run wrote as a gradient reaches the optimizer once from each rank, all in one weight
- a kernel that reads gathered parameters reads their newest version, each element in its place

Other ranks are taken to have what this rank has, shifted to their places: ranks of a role do the same. What
an operation without a rule makes of gradients or parameters is unknown, and the report says so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isnan
from typing import Any

from shardrt import autograd, device
from shardrt.device.addresses import block_of
from shardrt.device.program import Step, Take
from shardrt.device.shapes import Shaped
from shardrt.device.simulated import SimulatedDevice
from shardrt.fsdp.group import ParameterGroup
from shardrt.fsdp.options.schedules import each_schedule
from shardrt.simulate.terms import (
    Gradient,
    Memory,
    Packed,
    Parameters,
    Piece,
    Term,
    Unknown,
    Value,
    overlaid,
)

__all__ = ["Finding", "Follow", "Follower", "followed"]

Array = Any
SHARD, GATHERED, FULL, REDUCED = (
    "sharded parameters",
    "gathered parameters",
    "full gradients",
    "sharded gradients",
)
ANY = -1  # of Gradient.use
_COPIES = ("copy", "numpy.copy", "numpy.copyto", "numpy.astype", "numpy.positive")
_CASTS = ("cast.pack", "cast.unpack", "cast.round_to")  # x, out
_SUMS = ("reduce.sum_into", "reduce.sum_packed")  # out, parts, scale, accumulate
_SCALES = ("elementwise.scale_", "elementwise.unscale_", "elementwise.scale_by_")  # x, factor
_UPDATES = ("adamw.step", "adamw8bit.step", "sgd.step", "lion.step", "lion8bit.step")  # param, grad
_UPDATES += ("stochastic.adamw", "stochastic.lion")


@dataclass(frozen=True)
class Finding:
    """The first operation of a rank at which a sum is not what it should be, or is not known.

    Attributes:
        known: False if an operation without a rule came before.
    """

    rank: int
    operation: str
    unit: str
    stream: str
    site: str
    what: str
    known: bool = True

    def __str__(self) -> str:
        return (
            f"{self.what}\n  first   {self.operation} at {self.site} in stream {self.stream} of rank "
            f"{self.rank}{f', unit {self.unit}' if self.unit else ''}"
        )


class Follower:
    """Follows one recorded rank.

    Attributes:
        findings: what is wrong or unknown, in the order of the program; each message once.
        weights: (scale, addresses of factors) that gradients had in the updates of each step.
        updates, reads: how many updates and reads of gathered parameters were checked.
        outside: how many parts of updates are of parameters that are in no unit.
    """

    def __init__(self, here: SimulatedDevice) -> None:
        self.findings: list[Finding] = []
        self.weights: dict[int, tuple[float, tuple[int, ...]]] = {}
        self.updates = self.reads = self.outside = 0
        self.units: list[Any] = []  # without memory yet
        self.groups: list[ParameterGroup] = []
        self._device, self._memory = here, Memory()
        # Where the last reduce-scatters wrote: their ranks, and this rank's terms of each rank's part.
        self._sums: dict[tuple[int, int], tuple[tuple[int, ...], list[list[Piece]]]] = {}
        self._steps = self._seen = 0  # steps that have ended; items of the program
        self._used: dict[str, list[tuple[int, int]]] = {}  # group -> elements that updates of this step used
        self._versions: dict[str, int] = {}
        self._runs: dict[int, tuple[int, Any]] = {}  # by id; kept, so no other has it
        self._written: dict[str, dict[int, list[tuple[int, int, int]]]] = {}  # group -> run -> elements, use
        self._shards: dict[int, ParameterGroup] = {}  # by address
        here.on_work, here.on_collective = self.work, self.collective

    def _meet(self) -> None:
        """Take in steps that have ended, and groups that have got their memory since the last operation."""
        items = self._device.program.items
        self._steps += sum(isinstance(items[index], Step) for index in range(self._seen, len(items)))
        self._seen = len(items)
        for unit in [unit for unit in self.units if all(isinstance(g, ParameterGroup) for g in unit.groups)]:
            self.units.remove(unit)
            for group in unit.groups:
                self.groups.append(group)
                self._shards[block_of(group.shard).start] = group
                self._begin(group, self._steps)

    # -- operations

    def work(self, name: str, reads: Sequence[Array], writes: Sequence[Array], args: tuple) -> None:
        """A kernel, a copy, or a function of NumPy was issued."""
        self._meet()
        if name in ("memset", "numpy.fill"):
            for array in writes:
                self._set(array, ())
        elif name in _CASTS:
            self._move(args[0], args[1])
        elif name in _COPIES and len(writes) == 1:
            self._move(reads[0] if len(reads) == 1 else None, writes[0])
        elif name in _SUMS:
            out, parts, scale, accumulate = args[:4]
            scales = [float(scale)] * len(parts)
            self._sum(out, [*parts, out] if accumulate else parts, [*scales, 1.0] if accumulate else scales)
        elif name in _SCALES:
            self._scale(args[0], args[1])
        elif name == "elementwise.clamp_":
            self._scale_by(args[0], 0)
        elif name in _UPDATES:
            self._use(args[1], args[0])
            self._renew(args[0])
            for array in writes:
                if isinstance(array, Shaped) and self._category(array) == GATHERED:
                    self._move(args[0], array)  # the copy in 16 bits
        elif name == "muon.direction":  # grad, m, out
            self._use(args[0], None)
        elif name == "muon.apply" and self._group_at(args[0]):  # it is one of Newton-Schulz's passes, too
            self._renew(args[0])
        elif name == "quantise.pack":
            self._pack(args[0], args[1])
        elif name == "quantise.sum_rows":
            self._unpack(*args)
        elif name == "quantise.unpack":  # one row after the other
            for row, out in zip(args[0], args[1].reshape(len(args[0]), -1), strict=True):
                self._unpack(row[None], out, *args[2:])
        else:
            self._check_reads(reads)
            for array in writes:
                self._compute(array, reads)

    def collective(
        self, call: str, ranks: Sequence[int], reads: Sequence[Array], writes: Sequence[Array], how: Any
    ) -> None:
        """A collective was issued. how: the Reduction, if it has one."""
        if not any(isinstance(array, Shaped) for array in (*reads, *writes)):
            return
        self._meet()
        if call == "all_gather" and self._group_at(reads[0]):
            self.finish()
        place = list(ranks).index(self._device.program.rank)
        if call == "all_gather":
            self._gather(ranks, place, reads[0])
        elif call == "all_to_all" and reads[0].nbytes == writes[0].nbytes:
            self._exchange(ranks, place, reads[0], writes[0])
        elif call in ("reduce_scatter", "all_reduce") and (how is None or how.op == "sum"):
            buffer, out = reads[0].reshape(-1), writes[0]
            if call == "all_reduce":
                self._reduce(ranks, buffer, out, how)
                return
            parts = buffer.reshape(len(ranks), -1)
            lists = [self._pieces(part) for part in parts]  # `out` may be one of them
            self._reduce(ranks, parts[place], out, how)
            if how is None or not how.accumulate:
                self._sums[_range(out)] = tuple(ranks), lists
        else:
            for array in writes:
                self._lose(array, reads)

    # -- what they do to terms

    def _pieces(self, array: Array) -> list[Piece]:
        return self._memory.read(*_range(array), array.itemsize)

    def _set(self, array: Array, value: Value) -> None:
        if isinstance(array, Shaped):
            start, stop = _range(array)
            self._memory.write(start, stop, [Piece(start, stop, array.itemsize, value)])

    def _lose(self, array: Array, reads: Sequence[Array] = ()) -> None:
        """An operation without a rule writes an array: nothing is known of it, if it matters."""
        followed = isinstance(array, Shaped) and (
            self._category(array) in (SHARD, GATHERED, FULL, REDUCED) or any(map(self._has_gradients, reads))
        )
        item = self._device.program.items[-1]
        name = getattr(item, "name", getattr(item, "call", "an operation"))
        self._set(array, Unknown(f"{name} at {item.site}") if followed else None)

    def _move(self, source: Array | None, target: Array) -> None:
        if source is None or not isinstance(source, Shaped) or not isinstance(target, Shaped):
            self._set(target, None)
            self._given(target)
        elif not (source.flags.c_contiguous and target.flags.c_contiguous and source.size == target.size):
            self._lose(target)
        else:
            start, origin = _range(source)[0], _range(target)[0]
            moved = [piece.at(start, origin, target.itemsize) for piece in self._pieces(source)]
            self._memory.write(*_range(target), moved)
            if all(piece.value is None for piece in moved):
                self._given(target)

    def _given(self, target: Array) -> None:
        """Values that are not followed are copied: a shard that is loaded, or a gradient in backward."""
        category = self._category(target) if isinstance(target, Shaped) else ""
        if category == SHARD:
            self._renew(target)
        elif category in (FULL, REDUCED) and autograd.running() is not None:
            self._compute(target, [])

    def _scale(self, x: Array, factor: Any) -> None:
        if isinstance(factor, Shaped):
            self._scale_by(x, _range(factor)[0])
        else:
            self._sum(x, [x], [float(factor)])

    def _scale_by(self, x: Array, address: int) -> None:
        """By a number on the device; 0: each element by its own, at most 1."""
        pieces = [
            replace(p, value=tuple(replace(t, factors=(*t.factors, address)) for t in p.value))
            if isinstance(p.value, tuple)
            else p
            for p in self._pieces(x)
        ]
        self._memory.write(*_range(x), pieces)

    def _pack(self, x: Array, out: Array) -> None:
        start, item = _range(x)[0], x.itemsize
        parts = [((p.start - start) // item, (p.stop - start) // item, p.value) for p in self._pieces(x)]
        followed = any(value is not None for *_, value in parts)
        self._set(out, Packed(x.size, tuple(parts)) if followed else None)

    def _unpack(
        self, packed: Array, out: Array, bits: int, block: int, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        """Out = (out if `accumulate`) + scale * the sum of the rows of packed numbers."""
        rows = [self._memory.read(*_range(row), 1)[0].value for row in packed]
        if not all(isinstance(row, Packed) for row in rows):
            self._lose(out)
            return
        lists = [[Piece(first, last, 1, value) for first, last, value in row.parts] for row in rows]
        scales, origin = [float(scale)] * len(lists), _range(out)[0]
        if accumulate:
            lists.append([piece.at(origin, 0, 1) for piece in self._pieces(out)])
            scales.append(1.0)
        self._put(out, overlaid(lists), scales)

    def _put(
        self, out: Array, parts: Sequence[tuple[int, int, list[Value]]], scales: Sequence[float]
    ) -> None:
        """Write the sums of `parts`, which overlaid gives in elements of `out`."""
        origin, item = _range(out)[0], out.itemsize
        sums = [
            Piece(origin + first * item, origin + last * item, item, self._added(values, scales))
            for first, last, values in parts
        ]
        self._memory.write(*_range(out), sums)
        if all(piece.value is None for piece in sums):
            self._given(out)

    def _sum(self, out: Array, parts: Sequence[Array], scales: Sequence[float]) -> None:
        """Out = the sum of scale * part."""
        lists = [[p.at(_range(part)[0], 0, 1) for p in self._pieces(part)] for part in parts]
        self._put(out, overlaid(lists), scales)

    def _added(self, values: Sequence[Value], scales: Sequence[float]) -> Value:
        if all(value is None for value in values):
            return None
        for value in values:
            if not isinstance(value, tuple):
                unknown = Unknown(f"a sum with memory that is not followed at {self._site()}")
                return value if isinstance(value, Unknown) else unknown
        scaled = zip(values, scales, strict=True)
        return self._joined([replace(t, scale=t.scale * scale) for value, scale in scaled for t in value])

    def _joined(self, terms: Sequence[Term]) -> tuple[Term, ...]:
        """Terms that differ in their ranks alone are one term. Says what is added twice."""
        found: dict[tuple, Term] = {}
        for term in terms:
            key = term.source, term.base, term.scale, term.factors
            known = found.get(key)
            if known is not None and known.ranks & term.ranks:
                self._find(f"{term.source} of ranks {_few(known.ranks & term.ranks)} is added twice")
            found[key] = term if known is None else replace(known, ranks=known.ranks | term.ranks)
        return tuple(found.values())

    def _of_rank(self, value: Value, rank: int, moved: int) -> Value:
        """What another rank has in place of this rank's terms: `moved` elements further, or packed rows."""
        if isinstance(value, Packed):
            far = moved * value.count
            parts = [(first, last, self._of_rank(each, rank, far)) for first, last, each in value.parts]
            return replace(value, parts=tuple(parts))
        if not isinstance(value, tuple):
            return value
        by = rank - self._device.program.rank
        theirs = []
        for term in value:
            ranks = term.ranks if rank in term.ranks else frozenset(each + by for each in term.ranks)
            source = _moved(term.source) if moved else term.source
            theirs.append(replace(term, source=source, base=term.base + moved, ranks=ranks))
        return tuple(dict.fromkeys(theirs))

    def _gather(self, ranks: Sequence[int], place: int, own: Array) -> None:
        start, stop = _range(own)
        pieces = self._pieces(own)
        summed, lists = self._sums.pop((start, stop), ((), []))
        scale = _scale_of(pieces) / _scale_of(lists[place]) if summed == tuple(ranks) else 1.0
        for other, rank in enumerate(ranks):
            if other == place:
                continue
            far, found = (other - place) * (stop - start), []
            if summed == tuple(ranks):  # what this rank has summed of its part, that one has of another
                first = lists[other][0].start
                for piece in lists[other]:
                    new = replace(piece, value=self._summed(ranks, piece.value, scale))
                    found.append(new.at(first, start + far, own.itemsize))
            else:
                for piece in pieces:
                    each = piece.stop - piece.start if isinstance(piece.value, Packed) else piece.item
                    value = self._of_rank(piece.value, rank, far // each)
                    found.append(Piece(piece.start + far, piece.stop + far, piece.item, value))
            self._memory.write(start + far, stop + far, found)

    def _exchange(self, ranks: Sequence[int], place: int, sent: Array, received: Array) -> None:
        """An all-to-all of equal parts: from each rank what this one would send itself."""
        size = sent.nbytes // len(ranks)
        start, origin = _range(sent)[0] + place * size, _range(received)[0]
        own = self._memory.read(start, start + size, sent.itemsize)
        found = []
        for other, rank in enumerate(ranks):
            for piece in own:
                moved = replace(piece, value=self._of_rank(piece.value, rank, 0))
                found.append(moved.at(start, origin + other * size, piece.item))
        self._memory.write(*_range(received), found)

    def _reduce(self, ranks: Sequence[int], part: Array, out: Array, how: Any) -> None:
        start, origin = _range(part)[0], _range(out)[0]
        scale = how.scale if how is not None else 1.0
        summed = [
            replace(piece, value=self._summed(ranks, piece.value, scale)).at(start, origin, out.itemsize)
            for piece in self._pieces(part)
        ]
        if how is not None and how.accumulate:
            both = overlaid([self._pieces(out), summed])
            summed = [
                Piece(first, last, out.itemsize, self._added(values, (1.0, 1.0)))
                for first, last, values in both
            ]
        self._memory.write(*_range(out), summed)

    def _summed(self, ranks: Sequence[int], value: Value, scale: float) -> Value:
        """The sum of what these ranks have in one place."""
        if not isinstance(value, tuple):
            return value
        if self._is_of_others(ranks, value):
            return Unknown(f"a second sum with ranks that do something else at {self._site()}")
        terms = self._joined([term for rank in ranks for term in self._of_rank(value, rank, 0)])
        return tuple(replace(term, scale=term.scale * scale) for term in terms)

    def _is_of_others(self, ranks: Sequence[int], terms: tuple[Term, ...]) -> bool:
        """Whether terms have, of ranks with another role, what these may keep or not: it can't be known."""
        others = set(ranks).difference(self._device.program.alike)
        return any(others & term.ranks for term in terms)

    # -- parameters and gradients

    def _renew(self, param: Array) -> None:
        """A shard, a part or a copy of it, is in the version of the next step."""
        start, stop = _range(param)
        group = self._shards.get(getattr(block_of(param), "start", -1))
        if group is not None:  # also where it was not followed
            self._begin(group, self._steps + 1, start, stop)
            return
        renewed = []
        for piece in self._pieces(param):
            value = piece.value
            if isinstance(value, tuple):
                value = tuple(replace(t, source=replace(t.source, version=self._steps + 1)) for t in value)
                self._versions |= {term.source.group: self._steps + 1 for term in value}
            renewed.append(replace(piece, value=value))
        self._memory.write(start, stop, renewed)

    def _begin(self, group: ParameterGroup, version: int, start: int = 0, stop: int = 1 << 62) -> None:
        """The part of a shard at [start, stop) has its own elements in this version."""
        name, (first, _), shard = name_of(group), group.layout.shard_range(group.ranks.rank), group.shard
        self._versions[name] = version
        origin, end = _range(shard)
        whole = Piece(origin, end, shard.itemsize, (Term(Parameters(name, version), first),))
        start, stop = max(start, origin), min(stop, end)
        self._memory.write(start, stop, [whole.part(start, stop)])

    def _group_at(self, param: Array) -> str:
        """The group whose parameters an array has; "" for none."""
        for piece in self._pieces(param):
            for term in piece.value if isinstance(piece.value, tuple) else ():
                if isinstance(term.source, Parameters):
                    return term.source.group
        return ""

    def _check_reads(self, reads: Sequence[Array]) -> None:
        """Gathered parameters that a kernel reads must be the newest."""
        for array in reads:
            if not isinstance(array, Shaped) or self._category(array) != GATHERED:
                continue
            group = self._having(array, lambda group: group.slot)
            if group is None:
                continue
            self.reads += 1
            name, origin = name_of(group), _range(group.slot.array)[0]
            newest = Parameters(name, self._versions[name])
            for piece in self._memory.read(*_range(_whole(array)), array.itemsize):
                if not self._is(piece.value, newest, (piece.start - origin) // piece.item):
                    break

    def _is(self, value: Value, newest: Parameters, place: int) -> bool:
        """Whether memory has element `place` and on of parameters; says so if it has not."""
        if isinstance(value, Unknown):
            self._find(f"{newest}: not known behind {value.operation}", known=False)
        elif not value:
            self._find(f"element {place} of {newest} is read, but no gather has filled it")
        elif value != (Term(newest, place),):
            (term, *_) = value
            self._find(f"element {place} of {newest} is read, but it is element {term.base} of {term.source}")
        else:
            return True
        return False

    def _has_gradients(self, array: Array) -> bool:
        values = [piece.value for piece in self._pieces(array)] if isinstance(array, Shaped) else []
        return any(
            isinstance(value, Unknown | Packed)
            or (isinstance(value, tuple) and any(isinstance(term.source, Gradient) for term in value))
            for value in values
        )

    def _compute(self, array: Array, reads: Sequence[Array]) -> None:
        """A kernel that is not linear writes: if into full gradients, in backward, it makes gradients.

        Where it reads what was there, it adds to that.
        """
        if not isinstance(array, Shaped):
            return
        run, category = autograd.running(), self._category(array)
        group = self._having(array, _open_slot) if category in (FULL, REDUCED) and run is not None else None
        if group is None or not array.flags.c_contiguous:
            self._lose(array, reads)
            return
        adds = any(_same(array, read) for read in reads)
        number, _ = self._runs.setdefault(id(run), (len(self._runs), run))
        self.finish()
        name, me = name_of(group), frozenset([self._device.program.rank])
        start, stop = _range(array)
        origin = _range(_open_slot(group).array)[0]
        first = (start - origin) // array.itemsize
        last = first + array.size
        written = self._written.setdefault(name, {}).setdefault(number, [])
        source = Gradient(name, number, sum(a < last and first < b for a, b, _ in written))
        if not any(each.offset <= first and last <= each.stop for each in group.layout.entries):
            self._find(f"elements {first} to {last} of {source} are of no one parameter")
        written.append((first, last, source.use))
        pieces = self._pieces(array) if adds else [Piece(start, stop, array.itemsize, ())]
        for n, piece in enumerate(pieces):
            new = Term(source, (piece.start - origin) // piece.item, me)
            if isinstance(piece.value, tuple):
                pieces[n] = replace(piece, value=(*piece.value, new))
        self._memory.write(start, stop, pieces)

    def _use(self, gradient: Array, param: Array | None) -> None:
        """An optimizer reads a gradient: each run's must be there once, of each rank, beside its element.

        param: the elements that it updates; None: another kernel does.
        """
        self.updates += 1
        both = gradient, gradient if param is None else param
        lists = [[p.at(_range(each)[0], 0, 1) for p in self._pieces(each)] for each in both]
        for start, stop, (value, beside) in overlaid(lists):
            if param is not None and not isinstance(value, tuple) and not self._group_at(param):
                self.outside += 1
                continue
            if not isinstance(value, tuple):
                behind = f" behind {value.operation}" if isinstance(value, Unknown) else ""
                name = self._group_at(param) if param is not None else "a matrix"
                self._find(f"the gradient of {name} is not known{behind}", known=False)
                continue
            if param is None:
                beside = tuple(Term(Parameters(t.source.group, 0), t.base) for t in value[:1])
            if not isinstance(beside, tuple) or len(beside) > 1:
                self._find("the parameters that are updated are not known", known=False)
            for term in beside if isinstance(beside, tuple) else ():
                group = next(group for group in self.groups if name_of(group) == term.source.group)
                self._used.setdefault(term.source.group, []).append((term.base, term.base + stop - start))
                self._check_terms(group, term.base, term.base + stop - start, value)

    def finish(self) -> None:
        """What updates have not used of the gradients of groups that they updated is lost.

        Called when parameters are read again, and in the end: Muon updates behind the end of a step, too.
        """
        self._meet()
        if not self._steps or not self._used:
            return
        for name, used in self._used.items():
            group = next(group for group in self.groups if name_of(group) == name)
            self._begin(group, self._versions[name])
            own = group.layout.shard_range(group.ranks.rank)
            for run, parts in self._written.pop(name, {}).items():
                for start, stop, use in parts:
                    start, stop = max(start, own[0]), min(stop, own[1])
                    for first, last in sorted(used):
                        start = max(start, last) if first <= start else start
                    if start < stop:
                        self._find(f"element {start} of {Gradient(name, run, use)} is used by no update")
        self._used.clear()

    def _check_terms(self, group: ParameterGroup, start: int, stop: int, terms: tuple[Term, ...]) -> None:
        name, ranks = name_of(group), _summed_over(group, self._device.program.rank)
        missing = {
            (run, use)
            for run, parts in self._written.get(name, {}).items()
            for first, last, use in parts
            if first < stop and start < last
        }
        if not missing:
            return  # padding
        for term in terms:
            source = term.source
            if not isinstance(source, Gradient) or (source.group, term.base) != (name, start):
                self._find(f"element {start} of {name} is updated by element {term.base} of {source}")
                return
            found = {(run, use) for run, use in missing if run == source.run and source.use in (use, ANY)}
            if not found and source.use != ANY:
                self._find(f"{source} has been used already")
                return
            missing -= found
            weight = term.scale, term.factors
            if term.ranks != ranks:
                self._find(f"{source} is the sum over ranks {_few(term.ranks)}, not over {_few(ranks)}")
                return
            self.weights.setdefault(self._steps, weight)
            if self.weights[self._steps] != weight and not isnan(term.scale):  # of made-up values
                other, _ = self.weights[self._steps]
                self._find(f"{source} has the weight {term.scale:g}, others of this step {other:g}")
                return
        if missing:
            self._find(f"{Gradient(name, *min(missing))} is missing from element {start} on")

    def _having(self, array: Array, slot_of: Callable[[ParameterGroup], Any]) -> ParameterGroup | None:
        """The group that has the slot in which an array lies."""
        block = block_of(array)
        for group in self.groups:
            slot = slot_of(group)
            if slot is not None and block_of(slot.array) is block:
                return group
        return None

    def _category(self, array: Array) -> str:
        block, items = block_of(array), self._device.program.items
        taken = items[block.item] if block is not None and 0 <= block.item < len(items) else None
        return taken.category if isinstance(taken, Take) else ""

    def _site(self) -> str:
        return getattr(self._device.program.items[-1], "site", "")

    def _find(self, what: str, known: bool = True) -> None:
        item = self._device.program.items[-1]
        name = getattr(item, "name", getattr(item, "call", ""))
        where = getattr(item, "label", ""), getattr(item, "stream", ""), getattr(item, "site", "")
        if all(found.what != what for found in self.findings):
            self.findings.append(Finding(self._device.program.rank, name, *where, what, known))


class Follow:
    """The followers of a recording's ranks, and what they found."""

    def __init__(self) -> None:
        self.followers: list[Follower] = []

    def __call__(self, here: SimulatedDevice) -> None:
        """Follow what a device records from now on."""
        here.follower = Follower(here)
        self.followers.append(here.follower)

    @property
    def findings(self) -> list[Finding]:
        """Of all ranks, now that the recording has ended."""
        for follower in self.followers:
            follower.finish()
        return [finding for follower in self.followers for finding in follower.findings]


@contextmanager
def followed() -> Iterator[Follow]:
    """Inside, schedules tell the followers their units."""

    def tell(schedule: Any) -> None:
        follower = getattr(device.current(), "follower", None)
        if follower is not None:
            follower.units += schedule.units

    with each_schedule(tell):
        yield Follow()


def name_of(group: ParameterGroup) -> str:
    """The same on all ranks."""
    return group.label or "the outermost unit"


def _open_slot(group: ParameterGroup) -> Any:
    """Where backward writes the group's gradients now."""
    return getattr(group.gradient_path, "slot", None)


def _summed_over(group: ParameterGroup, me: int) -> frozenset[int]:
    """The ranks whose gradients an update needs: of the data, and of axes along which each has a term."""
    found = set(group.settings.mesh.ranks.ravel().tolist())
    for stride, end in group.key.partial:
        found = {
            rank - rank % end // stride * stride + step for rank in found for step in range(0, end, stride)
        }
    if group.key.tied:
        own = _ranks(group.parameters[0].pipeline.copies.communicator("control"))
        found = {rank + other - me for rank in found for other in own}
    return frozenset(found)


def _ranks(communicator: Any) -> Sequence[int]:
    return communicator.channel.ranks if hasattr(communicator, "channel") else _ranks(communicator._host)


def _moved(source: Parameters | Gradient) -> Parameters | Gradient:
    """Elsewhere another number of kernels may have added to a gradient."""
    return replace(source, use=ANY) if isinstance(source, Gradient) else source


def _scale_of(pieces: Sequence[Piece]) -> float:
    """That of the first term, or 1."""
    terms = (term for piece in pieces if isinstance(piece.value, tuple) for term in piece.value)
    return next((term.scale for term in terms), 1.0)


def _range(array: Array) -> tuple[int, int]:
    start = array.__array_interface__["data"][0]
    return start, start + array.nbytes


def _whole(array: Array) -> Array:
    """A view as it lies in memory: a transposed one turned back."""
    return array if array.flags.c_contiguous else array.T


def _same(one: Any, other: Any) -> bool:
    shaped = isinstance(one, Shaped) and isinstance(other, Shaped)
    return shaped and _range(one) == _range(other)


def _few(ranks: frozenset[int]) -> str:
    some = sorted(ranks)
    return ", ".join(map(str, some[:4])) + (f" and {len(some) - 4} more" if len(some) > 4 else "")
