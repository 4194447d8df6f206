"""What must hold where optimizers read gradients, where gradients are sent, and where parameters are read."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import isclose, isnan
from typing import Any

from shardrt.comm.mesh_layout import size_of, union, without
from shardrt.device.addresses import block_of
from shardrt.device.program import Collective, Step, Work
from shardrt.device.simulated import SimulatedDevice
from shardrt.fsdp.group import ParameterGroup
from shardrt.simulate.losses import Loss
from shardrt.simulate.ranks import Ranks
from shardrt.simulate.terms import (
    Gradient,
    Memory,
    Parameters,
    Piece,
    Received,
    Term,
    Unknown,
    Value,
    overlaid,
)

__all__ = ["ANY", "Finding", "Updates", "Weights", "range_of", "share"]

Array = Any
ANY = -1  # of Gradient.use


@dataclass(frozen=True)
class Finding:
    """The first operation of a rank at which a sum is not what it should be, or is not known.

    Attributes:
        known: False if an operation without a rule came before.
        place: of the operation in the rank's program.
    """

    rank: int
    operation: str
    unit: str
    stream: str
    site: str
    what: str
    known: bool = True
    place: int = -1

    def __str__(self) -> str:
        return (
            f"{self.what}\n  first   {self.operation} at {self.site} in stream {self.stream} of rank "
            f"{self.rank}{f', unit {self.unit}' if self.unit else ''}"
        )


@dataclass
class Write:
    """A kernel of backward run `run` has added to elements [first, last) of a group's gradient.

    Attributes:
        step: the optimizer step that it is for, from 0.
        place: of the kernel in the program.
        block: the memory that has it.
        unsent: the elements that only the full gradient has yet.
    """

    run: int
    use: int
    first: int
    last: int
    step: int
    losses: frozenset[Loss]
    place: int
    block: Any
    unsent: list[tuple[int, int]]


@dataclass(frozen=True)
class Use:
    """An update has read elements [start, stop) of a group's gradient. place: of the item in the program."""

    step: int
    place: int
    group: ParameterGroup
    start: int
    stop: int
    terms: tuple[Term, ...]
    writes: tuple[Write, ...]


@dataclass(frozen=True)
class Entry:
    """A loss is in a gradient of a step. scale: of the gradient, where an update reads it."""

    step: int
    loss: Loss
    scale: float
    name: str
    place: int


@dataclass
class Weights:
    """The weight of each loss of each backward run and step, and the first gradient that had it."""

    first: dict[tuple, tuple[float, str, int]] = field(default_factory=dict)

    def differing(self, entry: Entry, loss: Loss, rank: int) -> str:
        """What it says where a loss has another weight elsewhere; "" for the same."""
        step, name, weight = entry.step, entry.name, loss.weight * entry.scale
        if isnan(weight):  # of made-up values
            return ""
        known, where, other = self.first.setdefault((step, loss.source, loss.run), (weight, name, rank))
        if isclose(weight, known, rel_tol=1e-6):
            return ""
        return (
            f"a position of the loss at {loss.source} has the weight {share(weight)} in the gradient of "
            f"{name} of rank {rank}, and {share(known)} in that of {where} of rank {other}"
        )


class Updates:
    """Checks of one recorded rank.

    Attributes:
        findings: what is wrong or unknown, in the order of the program; each message once.
        weights: (scale, factors) that gradients had in the updates of each step.
        updates, reads: how many updates and reads of gathered parameters were checked.
        outside: how many parts of updates are of parameters that are in no unit.
        losses: the losses of gradients that updates have read.
        of_losses: the weights that losses have in gradients.
        lossless: how many gradients are of no loss that is followed.
    """

    def __init__(self, here: SimulatedDevice, memory: Memory) -> None:
        self.findings: list[Finding] = []
        self.weights: dict[int, tuple[float, tuple[float | str, ...]]] = {}
        self.losses: list[Entry] = []
        self.lossless = 0
        self.of_losses: set[float] = set()
        self.updates = self.reads = self.outside = 0
        self.units: list[Any] = []  # without memory yet
        self.groups: dict[str, ParameterGroup] = {}
        self.program = here.program
        # Whether a rank has written a gradient: ranks of a role all have.
        self.has_written: Callable[[int, Gradient], bool] = lambda rank, source: True
        self.doubled: dict[Any, int] = {}  # source -> place of the operation that first added it twice
        self.late = False  # whether updates go on behind the end of a step
        self._ever_used: set[str] = set()
        self._memory = memory
        self._steps = self._seen = 0  # steps that have ended; items of the program
        self._names: dict[int, str] = {}  # of groups, by id
        self._used: dict[str, list[tuple[int, int]]] = {}  # group -> elements that updates of this step used
        self._versions: dict[str, int] = {}
        self._before_given: dict[str, int] = {}  # group -> version before values were copied into its shard
        self._written: dict[str, list[Write]] = {}
        self._tied_runs: dict[str, list[int]] = {}  # of parameters on two stages: runs
        self._shards: dict[int, ParameterGroup] = {}  # by address
        self._factors: dict[tuple[int, str], tuple[float | str, ...]] = {}  # by step and group
        self._kept: dict[str, Ranks] = {}  # of groups, see _expected
        self._later: list[Use] = []  # until the other roles are recorded
        self._history: set[tuple[str, int]] = set()  # (group, run) of all gradients
        self._ranges: set[tuple[str, int, int, int]] = set()  # group, step and elements of all gradients
        self.without: list[Use] = []  # of what this rank has not written

    def meet(self) -> None:
        """Take in steps that have ended, and groups that have got their memory since the last operation."""
        items = self.program.items
        self._steps += sum(isinstance(items[index], Step) for index in range(self._seen, len(items)))
        self._seen = len(items)
        for unit in [unit for unit in self.units if all(isinstance(g, ParameterGroup) for g in unit.groups)]:
            self.units.remove(unit)
            for group in unit.groups:
                self._take(group)
                self._shards[block_of(group.shard).start] = group
                self._begin(group, self._steps)

    def _take(self, group: ParameterGroup) -> None:
        """Follow a group. Groups of two models may have one label."""
        name, number = name_of(group), 2
        while name in self.groups:
            name, number = f"{name_of(group)} of model {number}", number + 1
        self.groups[name], self._names[id(group)] = group, name

    def name(self, group: ParameterGroup) -> str:
        """The same on all ranks, and of one group alone."""
        return self._names[id(group)]

    def source(self, group: ParameterGroup) -> str:
        """The name of its gradient, which copies of a parameter on two stages have in common."""
        return group.key.tied or self.name(group)

    # -- parameters

    def shard_at(self, array: Array) -> ParameterGroup | None:
        """The group whose shard an array lies in."""
        return self._shards.get(getattr(block_of(array), "start", -1))

    def renew(self, param: Array, given: bool = False) -> None:
        """A shard, a part or a copy of it, is in the version of the next step.

        given: values are copied into it, which may be those of some of its parameters.
        """
        start, stop = range_of(param)
        group = self.shard_at(param)
        if group is not None:  # also where it was not followed
            name = self.name(group)
            if given:
                self._before_given[name] = min(self._versions[name], self._before_given.get(name, 1 << 62))
                start, stop = 0, 1 << 62
            self._begin(group, self._steps + 1, start, stop)
            return
        renewed = []
        for piece in self._memory.read(start, stop, param.itemsize):
            value = piece.value
            if isinstance(value, tuple):
                value = tuple(replace(t, source=replace(t.source, version=self._steps + 1)) for t in value)
                self._versions |= {term.source.group: self._steps + 1 for term in value}
            renewed.append(replace(piece, value=value))
        self._memory.write(start, stop, renewed)

    def written_back(self, group: ParameterGroup, target: Array) -> None:
        """Parameters are copied into a shard: unchanged ones, next to others that are given."""
        before = self._before_given.get(self.name(group))
        values = [piece.value for piece in self._memory.read(*range_of(target), target.itemsize)]
        versions = {term.source.version for value in values if isinstance(value, tuple) for term in value}
        if before is not None and versions and min(versions) >= before:
            self._begin(group, self._versions[self.name(group)], *range_of(target))

    def _begin(self, group: ParameterGroup, version: int, start: int = 0, stop: int = 1 << 62) -> None:
        """The part of a shard at [start, stop) has its own elements in this version."""
        name, (first, _), shard = self.name(group), group.layout.shard_range(group.ranks.rank), group.shard
        self._versions[name] = version
        origin, end = range_of(shard)
        whole = Piece(origin, end, shard.itemsize, (Term(Parameters(name, version), first),))
        start, stop = max(start, origin), min(stop, end)
        self._memory.write(start, stop, [whole.part(start, stop)])

    def group_at(self, param: Array) -> str:
        """The group whose parameters an array has; "" for none."""
        for piece in self._memory.read(*range_of(param), param.itemsize):
            for term in piece.value if isinstance(piece.value, tuple) else ():
                if isinstance(term.source, Parameters):
                    return term.source.group
        return ""

    def check_read(self, array: Array, group: ParameterGroup) -> None:
        """Gathered parameters that a kernel reads must be the newest."""
        self.reads += 1
        name, origin = self.name(group), range_of(group.slot.array)[0]
        newest = Parameters(name, self._versions[name])
        for piece in self._memory.read(*range_of(_whole(array)), array.itemsize):
            first, last = ((edge - origin) // piece.item for edge in (piece.start, piece.stop))
            padding = not any(each.offset < last and first < each.stop for each in group.layout.entries)
            if not padding and not self._is(piece.value, newest, first):
                break

    def _is(self, value: Value, newest: Parameters, place: int) -> bool:
        """Whether memory has element `place` and on of parameters; says so if it has not."""
        if isinstance(value, Unknown):
            self.find(f"{newest}: not known behind {value.operation}", known=False)
        elif not value:
            self.find(f"a kernel needs element {place} of {newest}, and no gather has filled it")
        elif value != (Term(newest, place),):
            (term, *_) = value
            self.find(
                f"a kernel needs element {place} of {newest}, and reads element {term.base} of {term.source}"
            )
        else:
            return True
        return False

    # -- gradients

    def write(
        self, group: ParameterGroup, block: Any, first: int, last: int, run: int, losses: frozenset[Loss]
    ) -> Gradient:
        """A kernel of a backward run adds to elements [first, last) in a slot; gives the source."""
        self.finish()
        name = self.source(group)
        writes = self._written.setdefault(name, [])
        if group.key.tied:  # two stages number their runs each in its own order
            runs = self._tied_runs.setdefault(name, [])
            runs += [] if run in runs else [run]
            run = runs.index(run)
        here = [w for w in writes if w.run == run and w.first < last and first < w.last]
        source, place = Gradient(name, run, len(here)), self.last()
        if any(w.place == place for w in here):
            self.find(f"elements {first} to {last} of {source} are written twice by one kernel")
        self._history.add((name, run))
        self._ranges.add((name, self._steps, first, last))
        if not any(each.offset <= first and last <= each.stop for each in group.layout.entries):
            self.find(f"elements {first} to {last} of {source} are of no one parameter")
        writes.append(Write(run, source.use, first, last, self._steps, losses, place, block, [(first, last)]))
        return source

    def moved(self, group: ParameterGroup, before: Any, after: Any) -> None:
        """Gradients are copied from one slot to another."""
        for write in self._written.get(self.source(group), ()):
            write.block = after if write.block is before else write.block

    def sent(self, group: ParameterGroup, array: Array, origin: int) -> None:
        """An operation takes full gradients out of the slot at `origin`: all that was written is there."""
        name = self.source(group)
        block = block_of(array)
        waiting = [write for write in self._written.get(name, ()) if write.unsent and write.block is block]
        if not waiting:
            return
        for piece in self._memory.read(*range_of(array), array.itemsize):
            first = (piece.start - origin) // piece.item
            last = first + (piece.stop - piece.start) // piece.item
            self._check_sent(group, piece.value, first, waiting)
            for write in waiting:
                here = [(a, b) for a, b in write.unsent if a < last and first < b]
                if not here:
                    continue
                write.unsent = _without(write.unsent, first, last)
                terms = piece.value if isinstance(piece.value, tuple) else ()
                there = any(
                    t.source == Gradient(name, write.run, write.use) and t.base == first for t in terms
                )
                if isinstance(piece.value, Unknown):
                    self._not_known(name, piece.value)
                elif not there:
                    source = Gradient(name, write.run, write.use)
                    at = _parameter_at(group, max(first, here[0][0]))
                    self.find(f"{source} is lost at {at}: it was written, and is not there")

    def _check_sent(self, group: ParameterGroup, value: Value, first: int, waiting: Sequence[Write]) -> None:
        """Elements that are sent have what waits to be sent, and nothing else."""
        name, new = self.source(group), {(write.run, write.use) for write in waiting}
        for term in value if isinstance(value, tuple) and group.ranks.size > 1 else ():
            source = term.source
            if not isinstance(source, Gradient) or (source.group, term.base) != (name, first):
                self.find(f"element {first} of the gradient of {name} has element {term.base} of {source}")
            elif (source.run, source.use) not in new and term.ranks.size == 1:  # it is no sum that goes on
                self.find(f"element {first} of {source} is sent again")

    def use(self, gradient: Array, param: Array | None) -> None:
        """An optimizer reads a gradient: each run's must be there once, of each rank, beside its element.

        param: the elements that it updates; None: another kernel does.
        """
        both = gradient, gradient if param is None else param
        lists = [self._memory.elements(*range_of(each), each.itemsize) for each in both]
        followed = any(isinstance(piece.value, tuple) for piece in lists[0])
        if param is not None and not followed and not self.group_at(param):
            self.outside += 1
            return
        self.updates += 1
        for start, stop, (value, beside) in overlaid(lists):
            if not isinstance(value, tuple):
                self._not_known(self.group_at(param) if param is not None else "a matrix", value)
                continue
            if param is None:
                sources = [term for term in value if isinstance(term.source, Gradient)][:1]
                beside = tuple(
                    Term(Parameters(self._named(term.source.group), 0), term.base) for term in sources
                )
            if not isinstance(beside, tuple) or len(beside) > 1:
                self.find("the parameters that are updated are not known", known=False)
            for term in beside if isinstance(beside, tuple) else ():
                self._use(term.source.group, term.base, term.base + stop - start, value)

    def _use(self, name: str, start: int, stop: int, terms: tuple[Term, ...]) -> None:
        group = self.groups[name]
        used = self._used.setdefault(name, [])
        self._ever_used.add(name)
        if any(first < stop and start < last for first, last in used):
            self.find(f"elements from {start} on of the gradient of {name} are used by two updates of a step")
        used.append((start, stop))
        written = self._written.get(self.source(group), ())
        writes = tuple(write for write in written if write.first < stop and start < write.last)
        use = Use(self._steps, self.last(), group, start, stop, terms, writes)
        if any(isinstance(term.source, Received) for term in terms):
            self._later.append(use)
        else:
            self._check(use, terms)

    def wrote(self, source: Gradient) -> bool:
        """Whether this rank has written it, or another use of it."""
        return (source.group, source.run) in self._history

    def wrote_in(self, name: str, step: int, start: int, stop: int) -> bool:
        """Whether this rank has written a gradient of these elements in a step."""
        return any(n == name and s == step and a < stop and start < b for n, s, a, b in self._ranges)

    def finish(self, last: bool = False) -> None:
        """What updates have not used of the gradients of groups that they updated is lost.

        Called when parameters are read again, and in the end: Muon updates behind the end of a step, too.

        last: no more updates come.
        """
        self.meet()
        if not self._steps:
            return
        names = set(self._used)
        if last and self.updates:
            left = (n for n, writes in self._written.items() if any(w.step < self._steps for w in writes))
            names |= {name for name in map(self._named, left) if not self._may_come(name)}
        for name in names:
            group = self.groups[name]
            if name in self._used:
                self._begin(group, self._versions[name])
            own = group.layout.shard_range(group.ranks.rank)
            for write in self._written.pop(self.source(group), []):
                source = Gradient(self.source(group), write.run, write.use)
                if write.unsent and group.ranks.size > 1:
                    self.find(f"{source} is sent to no rank at {_parameter_at(group, write.unsent[0][0])}")
                    continue
                start, stop = max(write.first, own[0]), min(write.last, own[1])
                for first, end in sorted(self._used.get(name, ())):
                    start = max(start, end) if first <= start else start
                if start < stop:
                    self.find(f"{source} is used by no update at {_parameter_at(group, start)}")
        self._used.clear()

    def _may_come(self, name: str) -> bool:
        """Whether a group's update may come behind the end of the recording, as Muon's do."""
        return self.late and (name in self._ever_used or self._steps < 2)

    def _named(self, source: str) -> str:
        """The name of the group that has a gradient."""
        found = (name for name, group in self.groups.items() if self.source(group) == source)
        return min(found, key=lambda name: (name not in self._used, name))

    def settle(self, resolved: Callable[[Sequence[Term], int], list[tuple[int, Value]]]) -> None:
        """Check the updates that had to wait. resolved: see Follow."""
        for use in self._later:
            count = use.stop - use.start
            parts = resolved(use.terms, count)
            ends = [first for first, _ in parts[1:]] + [count]
            for (first, value), end in zip(parts, ends, strict=True):
                if not isinstance(value, tuple):
                    self._not_known(self.source(use.group), value, use.place)
                    break
                self._check(replace(use, start=use.start + first, stop=use.start + end), value)
        self._later.clear()

    def _check(self, use: Use, terms: tuple[Term, ...]) -> None:
        group, start, place = use.group, use.start, use.place
        name, (ranks, divisor) = self.source(group), self._expected(group)
        missing = {(w.run, w.use): w for w in use.writes if w.first < use.stop and start < w.last}
        if not missing and not any(e.offset < use.stop and start < e.stop for e in group.layout.entries):
            return  # padding
        if not missing and not terms:
            self.without.append(use)
        seen = set()
        for term in terms:
            source = term.source
            if not isinstance(source, Gradient) or (source.group, term.base) != (name, start):
                self.find(f"element {start} of {name} is updated by element {term.base} of {source}", place)
                return
            mine = [key for key in missing if key[0] == source.run and source.use in (key[1], ANY)]
            if not mine and source.use != ANY and (source in seen or self.wrote(source)):
                self.find(f"{source} has been used already", place)
                return
            seen.add(source)
            writes = [missing.pop(key) for key in mine]
            if wrong := self._wrong(term, ranks, divisor, writes):
                self.find(wrong, self.doubled.get(source, place))
                return
            for write in writes:
                self.lossless += not write.losses
                self.losses += [Entry(write.step, loss, term.scale, name, place) for loss in write.losses]
        if missing:
            lost = Gradient(name, *min(missing))
            self.find(f"{lost} is lost at {_parameter_at(group, start)}", place)

    def _wrong(self, term: Term, ranks: Ranks, divisor: float, writes: list[Write]) -> str:
        """What is wrong with the ranks or the weight of a gradient; "" if nothing is."""
        source = term.source
        if term.ranks != ranks and any(
            self.has_written(rank, source) for rank in ranks if rank not in (term.ranks or ())
        ):
            return f"{source} is the sum over ranks {_few(term.ranks)}, not over {_few(ranks)}"
        for cut in {cut for write in writes for loss in write.losses for cut in loss.cut}:
            if not all(rank in ranks for rank in cut):
                return (
                    f"{source} is of positions that are cut among ranks {_few(cut)}, but it is summed over "
                    f"ranks {_few(ranks)}"
                )
        times = term.scale * divisor
        if not isclose(times, 1, rel_tol=1e-6) and not isnan(times):
            if source in self.doubled and times > 1 and isclose(times, round(times)):
                return f"{source} of ranks {_few(ranks)} is added twice"
            return f"{source} has the weight {share(term.scale)}, not {share(1 / divisor)}"
        step = writes[0].step if writes else self._steps
        self.weights.setdefault(step, (term.scale, term.factors))
        if self._factors.setdefault((step, source.group), term.factors) != term.factors:
            return f"{source} is scaled by other numbers than others of this unit and step"
        return ""

    def _expected(self, group: ParameterGroup) -> tuple[Ranks, float]:
        """The ranks that have a part of a group's gradient, and what its sum is divided by."""
        name = self.name(group)
        if name not in self._kept:
            me = self.program.rank
            ranks = Ranks.of(group.settings.mesh.ranks.ravel().tolist())
            for stride, end in group.key.partial:
                axis = Ranks((me - me % end // stride * stride,), ((stride, end // stride),))
                ranks, _ = ranks.spread(axis, me)
            if group.key.tied and group.parameters[0].pipeline.copies is not None:
                copies = _ranks(group.parameters[0].pipeline.copies.communicator("control"))
                ranks, _ = ranks.spread(Ranks.of(copies), me)
            self._kept[name] = ranks
        return self._kept[name], _divisor(group)

    def last(self) -> int:
        """The place of the operation that was issued last."""
        items = self.program.items
        return next(n for n in range(len(items) - 1, -1, -1) if isinstance(items[n], Work | Collective))

    def ranks_of(self, group: ParameterGroup) -> Ranks:
        """The ranks that have a part of a group's gradient."""
        return self._expected(group)[0]

    def lost(self, use: Use) -> None:
        """Other ranks have written what an update has nothing of."""
        name = self.source(use.group)
        at = _parameter_at(use.group, use.start)
        what = f"the gradient of {name} that other ranks have is lost at {at}"
        self.find(what, use.place)

    def _not_known(self, name: str, value: Value, place: int = -1) -> None:
        behind = f" behind {value.operation}" if isinstance(value, Unknown) else ""
        self.find(f"the gradient of {name} is not known{behind}", place, known=False)

    def find(self, what: str, place: int = -1, known: bool = True) -> None:
        """Report what is wrong at an item of the program; the last, if `place` is not given."""
        place = place if place >= 0 else self.last()
        item = self.program.items[place]
        name = getattr(item, "name", getattr(item, "call", ""))
        where = getattr(item, "label", ""), getattr(item, "stream", ""), getattr(item, "site", "")
        if all(found.what != what for found in self.findings):
            self.findings.append(Finding(self.program.rank, name, *where, what, known, place))


def name_of(group: ParameterGroup) -> str:
    """The same on all ranks, and of one group of a model alone."""
    alike = [each for each in group.unit.groups if each.label == group.label]
    name = group.label or "the outermost unit"
    return name if alike[0] is group else f"{name}, {alike.index(group) + 1}"


def range_of(array: Array) -> tuple[int, int]:
    """The bytes from its first element on."""
    start = array.__array_interface__["data"][0]
    return start, start + array.nbytes


def share(number: float) -> str:
    """As 1/n, where it is that."""
    parts = round(1 / number) if number else 0
    return f"1/{parts:,}" if parts > 1 and isclose(number * parts, 1) else f"{number:g}"


def _parameter_at(group: ParameterGroup, element: int) -> str:
    """An element of a flat buffer, with the parameter that has it."""
    entries = zip(group.layout.entries, group.parameters, strict=True)
    names = [parameter.name for entry, parameter in entries if entry.offset <= element < entry.stop]
    return f"{names[0]} (element {element})" if names else f"element {element}"


def _divisor(group: ParameterGroup) -> float:
    """What the script has set, or the number of ranks with different losses."""
    unit, chosen, mesh = group.unit, group.choices.divide_factor, group.settings.mesh
    if chosen != unit.data_ranks:
        return chosen
    placements = [p.placement for p in group.parameters if p.placement is not None]
    if not placements:
        return mesh.size
    axes = [without(union(mesh.axes, p.axes) if p.own_data else mesh.axes, p.one_loss) for p in placements]
    return size_of(union(*axes))


def _ranks(communicator: Any) -> Sequence[int]:
    return communicator.channel.ranks if hasattr(communicator, "channel") else _ranks(communicator._host)


def _without(ranges: Iterable[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    left = [part for a, b in ranges for part in ((a, min(b, first)), (max(a, last), b))]
    return [(a, b) for a, b in left if a < b]


def _whole(array: Array) -> Array:
    """A view as it lies in memory: a transposed one turned back."""
    return array if array.flags.c_contiguous else array.T


def _few(ranks: Ranks | None) -> str:
    if ranks is None:
        return "none"
    some = sorted(rank for rank, _ in zip(ranks, range(4), strict=False))
    return ", ".join(map(str, some)) + (f" and {ranks.size - 4} more" if ranks.size > 4 else "")
