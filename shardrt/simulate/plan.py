"""The fastest ways to train on a machine, within its memory: simulates and compares candidates.

    found = search(candidates, lambda candidate: simulated(...), {"device": 76e9})
    found.best[0].report.ms

Each candidate is the real program, recorded and priced. Those are left out, unrecorded, of which others say
enough (space.py): that need no less memory than one that had too little; and that can't be much faster than
the last of the best, because one whose ranks compute no more, or that saves less memory at the cost of time,
takes too long already.
"""

from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from math import inf
from time import monotonic

from shardrt.device.program import Collective
from shardrt.simulate.phases import AGAIN
from shardrt.simulate.report import Report, memory_of
from shardrt.simulate.script import NoScript
from shardrt.simulate.space import Candidate
from shardrt.simulate.step import Simulated
from shardrt.simulate.timing import label_of

__all__ = ["COMMUNICATION", "COMPUTING", "Found", "HOST", "MEMORY", "Plan", "search"]

_MARGIN = 1.01  # so much too large is a plan of which others are held to be, too: padding differs
_CHANCE = 0.99  # what saves memory may be faster by so much, as other things run at the same time
_STATES = "sharded parameters", "sharded gradients", "optimizer state"
_ALIKE = 3  # refusals in the same words, after which the others of a mesh are not tried

COMPUTING, COMMUNICATION, HOST, MEMORY = "computing", "communication", "host", "memory"


@dataclass(frozen=True)
class Plan:
    """A candidate that was simulated.

    Attributes:
        rank: the recorded one that takes most on the device.
        memory: of that rank, place -> category -> bytes when that place has most.
        least: ms of the step that are neither the update nor waiting for what shards are gathered and reduced
            by: no other strategy has less.
    """

    candidate: Candidate
    report: Report
    rank: int
    memory: Mapping[str, Mapping[str, int]]
    least: float

    def bytes(self, place: str = "device") -> int:
        """Of its memory in a place."""
        return sum(self.memory.get(place, {}).values())

    @property
    def cost(self) -> float:
        """What plans are compared by: ms for each token, or for each step where no tokens were seen."""
        return self.report.ms / (self.report.tokens or 1)

    def alike(self, other: "Plan") -> bool:
        """Whether it has the time and the bytes of another one."""
        places = "device", "host"
        return self.cost == other.cost and all(self.bytes(each) == other.bytes(each) for each in places)

    @cached_property
    def shares(self) -> dict[str, float]:
        """The parts of the step that go to each: they add up to 1.

        computing: kernels, without recomputed ones. communication: waits that collectives explain, and
        collectives in the compute stream. memory: what saving memory takes, which is recomputing and
        waiting for copies. host: waiting for what it had not issued.
        """
        split, whole = self.report.split, self.report.ms or 1.0
        idle = split.get("waiting for streams", 0.0) + split.get("collectives in compute", 0.0)
        exposed = min(idle, self.report.exposed[""])
        host, memory = split.get("waiting for the host", 0.0), split.get(AGAIN, 0.0) + idle - exposed
        parts = {COMMUNICATION: exposed, HOST: host, MEMORY: memory}
        parts = {COMPUTING: self.report.ms - sum(parts.values())} | parts
        return {name: ms / whole for name, ms in parts.items()}

    @property
    def binds(self) -> str:
        """The largest of these shares."""
        return max(self.shares, key=self.shares.__getitem__)


@dataclass
class Refused:
    """Candidates that ended with the same line: the first, how many, and how many were not tried for it."""

    line: str
    first: Candidate
    times: int = 1
    skipped: int = 0


@dataclass
class Found:
    """What a search found.

    Attributes:
        best: ascending in cost, all that were simulated and have enough memory.
        over: those that have not, likewise.
        same: those with time and bytes of one of the best.
        too_large: dropped, for one of `over`.
        slower: dropped, as they can't be among the best.
        left: how many remain of a search that was ended.
        late: by the time it took.
    """

    best: list[Plan] = field(default_factory=list)
    over: list[Plan] = field(default_factory=list)
    refused: dict[str, Refused] = field(default_factory=dict)
    same: list[Plan] = field(default_factory=list)
    too_large: list[Candidate] = field(default_factory=list)
    slower: list[Candidate] = field(default_factory=list)
    left: int = 0
    late: bool = False

    @property
    def tried(self) -> int:
        """How many candidates were recorded, or refused while they were."""
        plans = len(self.best) + len(self.over) + len(self.same)
        return plans + sum(each.times for each in self.refused.values())


def search(
    candidates: Sequence[Candidate],
    simulate: Callable[[Candidate], Simulated],
    limits: Mapping[str, float],
    *,
    best: int = 10,
    worth: float = 0.02,
    tries: int | None = None,
    seconds: float = inf,
    on_found: Callable[[Found], None] = lambda found: None,
) -> Found:
    """Simulate the candidates that may be among the `best`.

    An interruption ends the search with what was found. Raises NoScript.

    Args:
        simulate: raises SystemExit, or another exception, for one that can't be: what it writes to stderr is
            kept from there.
        limits: bytes of each place ("device", "host") that a rank has.
        worth: a candidate that can't take less than the last of the best by this part of its time is left
            out.
        tries: how many are simulated at most.
        seconds: after which nothing more is simulated.
        on_found: is called after each.
    """
    one = _Search(candidates, simulate, limits, best, worth)
    end = monotonic() + seconds
    try:
        while one.queue and (tries is None or one.found.tried < tries) and monotonic() < end:
            one.next()
            on_found(one.found)
    except KeyboardInterrupt:
        pass
    one.leave()
    one.found.late = one.found.left > 0 and monotonic() >= end
    return one.found


class _Search:
    def __init__(
        self,
        candidates: Sequence[Candidate],
        simulate: Callable[[Candidate], Simulated],
        limits: Mapping[str, float],
        best: int,
        worth: float,
    ) -> None:
        self.found, self.simulate, self.limits = Found(), simulate, limits
        self.best, self.worth = best, worth
        # What saves no memory first: it is fastest if it fits.
        self.ordered = iter(sorted(candidates, key=lambda each: -sum(each.saves)))
        self.queue = set(candidates)
        self.leanest: dict[Hashable, Candidate] = {}
        for each in candidates:
            least = self.leanest.setdefault(each.kind, each)
            if sum(each.needs) < sum(least.needs):
                self.leanest[each.kind] = each
        self.all_beside: dict[Hashable, list[Candidate]] = defaultdict(list)
        for each in candidates:
            self.all_beside[each.beside].append(each)
        self.first: deque[Candidate] = deque()  # to be tried before the others
        self.too_large: dict[Hashable, list[tuple[int, ...]]] = defaultdict(list)
        self.too_much: set[Hashable] = set()  # states that are too large by themselves
        self.costs: dict[Hashable, list[tuple[tuple[int, ...], float]]] = defaultdict(list)
        self.least: dict[Hashable, dict[tuple[int, ...], float]] = defaultdict(dict)
        self.meshes: dict[Hashable, Counter[str]] = defaultdict(Counter)

    def next(self) -> None:
        """Simulate one candidate, or leave it out."""
        candidate = self.first.popleft() if self.first else next(self.ordered)
        if candidate not in self.queue:
            return
        self.queue.discard(candidate)
        if not self._left_out(candidate):
            self._try(candidate)

    def leave(self) -> None:
        """Simulate nothing more: of what is left, some is known to be out."""
        rest = (candidate for candidate in self.ordered if candidate in self.queue)
        self.found.left = sum(not self._left_out(candidate) for candidate in rest)

    def _left_out(self, candidate: Candidate) -> bool:
        """Whether others say enough of it; it is put down why."""
        found, least = self.found, self._cost(candidate)
        needed = self.too_large[candidate.kind]
        if candidate.states in self.too_much or any(_no_lower(candidate.needs, needs) for needs in needed):
            found.too_large.append(candidate)
        elif len(found.best) >= self.best and least >= (1 - self.worth) * found.best[self.best - 1].cost:
            found.slower.append(candidate)
            self.costs[candidate.beside].append((candidate.saves, least))
        elif line := self._hopeless(candidate):
            found.refused[line].skipped += 1
        else:
            return False
        return True

    def _cost(self, candidate: Candidate) -> float:
        """A lower bound of the candidate's cost."""
        less = [cost for saves, cost in self.costs[candidate.beside] if _no_lower(saves, candidate.saves)]
        if candidate.computes is not None:
            known = self.least[candidate.computes].items()
            less += [cost for keeps, cost in known if _no_lower(keeps, candidate.keeps)]
        return _CHANCE * max(less, default=0.0)

    def _hopeless(self, candidate: Candidate) -> str:
        """What was refused of its mesh again and again, where nothing else came of it."""
        seen = self.meshes[candidate.mesh] if candidate.mesh is not None else Counter()
        (line, times), *others = seen.most_common(2) or [("", 0)]
        return line if times >= _ALIKE and not others else ""

    def _try(self, candidate: Candidate) -> None:
        said = StringIO()
        try:
            with redirect_stderr(said):
                done = self.simulate(candidate)
        except NoScript:
            raise
        except (Exception, SystemExit) as error:
            return self._refuse(candidate, _line(error, said.getvalue()))
        plan = planned(candidate, done)
        self.meshes[candidate.mesh][""] += 1
        if candidate.computes is not None:
            self.least[candidate.computes][candidate.keeps] = plan.least / (plan.report.tokens or 1)
        over = max(plan.bytes(place) / limit for place, limit in self.limits.items())
        if over > 1:
            insort(self.found.over, plan, key=lambda each: each.cost)
        elif any(each.alike(plan) for each in self.found.best):
            self.found.same.append(plan)  # options that make no difference here
        else:
            insort(self.found.best, plan, key=lambda each: each.cost)
        self.costs[candidate.beside].append((candidate.saves, plan.cost))
        held = sum(plan.memory.get("device", {}).get(each, 0) for each in _STATES)
        if candidate.states is not None and held > self.limits.get("device", inf):
            self.too_much.add(candidate.states)
        if over > _MARGIN:
            self.too_large[candidate.kind].append(candidate.needs)
            if len(self.found.best) < self.best:  # later what takes less is mostly known to be slower
                self.first.append(self.leanest[candidate.kind])  # too large: so are all
                self.first.extend(self._saving_more(candidate))
        return None

    def _saving_more(self, candidate: Candidate) -> list[Candidate]:
        """What saves more memory and nothing needlessly: after none recomputed, all but matmuls."""
        own, beside = candidate.saves, self.all_beside[candidate.beside]
        lower = [each for each in beside if each.saves != own and _no_lower(own, each.saves)]
        between = [each.saves for each in lower]
        return [
            each
            for each in lower
            if not any(saves != each.saves and _no_lower(saves, each.saves) for saves in between)
        ]

    def _refuse(self, candidate: Candidate, line: str) -> None:
        self.meshes[candidate.mesh][line] += 1
        if line in self.found.refused:
            self.found.refused[line].times += 1
        else:
            self.found.refused[line] = Refused(line, candidate)


def planned(candidate: Candidate, done: Simulated) -> Plan:
    """What was simulated of a candidate, with the memory of the recorded rank that takes most."""
    taken = done.report.device_bytes
    rank = max(taken, key=taken.__getitem__)
    number = list(taken).index(rank)
    return Plan(candidate, done.report, rank, memory_of(done.timing, number), _least(done))


def _least(done: Simulated) -> float:
    """Milliseconds in which the compute stream ran forward and backward, or messages were waited for.

    Kernels are as slow as what ran beside them made them.
    """
    split, exposed = done.report.split, done.report.exposed
    parts = "optimizer", "waiting for streams", "waiting for the host"
    messages = {
        label_of(item)
        for _, item in done.timing.items_of(0)
        if isinstance(item, Collective) and item.peer >= 0
    }
    kept = done.report.ms - sum(split.get(part, 0.0) for part in parts)
    return kept + min(split.get(parts[1], 0.0), sum(exposed.get(label, 0.0) for label in messages))


def _no_lower(these: Sequence[int], others: Sequence[int]) -> bool:
    return all(one >= other for one, other in zip(these, others, strict=True))


def _line(error: BaseException, said: str) -> str:
    """Why a script ended: the error that it printed, or the exception."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            return error.code
        on_found = [line for line in lines if "error: " in line] or lines or [f"exit code {error.code}"]
        return on_found[-1].removeprefix("error: ")
    return f"{type(error).__name__}: {error}"
