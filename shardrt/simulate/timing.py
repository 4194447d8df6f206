"""When the items of programs ran, and what follows from it: steps, busy streams, exposed communication."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice, pairwise

from shardrt.device.program import (
    HOST,
    Collective,
    Free,
    HostWait,
    Item,
    Program,
    Record,
    Step,
    Take,
    Wait,
    Work,
)
from shardrt.device.timeline import Passed, Recording, Span
from shardrt.simulate.links import copies


@dataclass
class Timing:
    """What ran when, in seconds from the start; each list lies as the programs.

    Attributes:
        ended: by item, when it was done; where nothing runs (a Take, a Step), when the host passed it.
    """

    programs: Sequence[Program]
    began: list[list[float]] = field(default_factory=list)
    ended: list[list[float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """When the last of all ranks has ended."""
        return max((max(ended, default=0.0) for ended in self.ended), default=0.0)

    @cached_property
    def copies(self) -> list[dict[int, tuple[str, int]]]:
        """Of each program, the copies between host and device memory by item: see `links.copies`."""
        return [copies(program) for program in self.programs]

    @cached_property
    def recordings(self) -> list[Recording]:
        """As a run's that is traced, so that traces and their pictures are made of them alike."""
        return [self._recording(number) for number in range(len(self.programs))]

    def _recording(self, number: int) -> Recording:
        spans, passed = [], []
        program, began, ended = self.programs[number], self.began[number], self.ended[number]
        for item, start, stop in zip(program.items, began, ended, strict=True):
            if isinstance(item, Take | Free | Step):
                continue
            stream = getattr(item, "stream", HOST) or HOST
            waited = isinstance(item, Wait | HostWait)
            if waited or isinstance(item, Record):
                passed.append(Passed(stream, item.mark, stop, waited))
            if stop > start and not isinstance(item, Record):
                spans.append(Span(stream, "wait" if waited else label_of(item), start, stop))
        passed.sort(key=lambda each: each.time)
        spans.sort(key=lambda each: each.stop)
        ends = accumulate(self.steps[number], initial=0.0)
        numbers = [item.number for item in program.items if isinstance(item, Step)]
        for step, (begin, end) in zip(numbers, pairwise(ends), strict=True):
            spans.append(Span("compute", f"step {step}", begin, end))
        return Recording(spans, passed)

    @cached_property
    def steps(self) -> list[list[float]]:
        """Of each program, the seconds of each of its optimizer steps, to the end of all that it issued."""
        found = []
        for ended, program in zip(self.ended, self.programs, strict=True):
            ends = [0.0] + [max(ended[:end], default=0.0) for _, end in _steps(program)]
            found.append([after - before for before, after in pairwise(ends)])
        return found

    def split(self, number: int, step: int = -1) -> dict[str, float]:
        """Seconds for which each stream of a program was busy with what a step issued; "host" with waits."""
        found: dict[str, float] = defaultdict(float)
        for index, item in self.items_of(number, step):
            if not isinstance(item, Wait | Record):
                found[getattr(item, "stream", HOST) or HOST] += (
                    self.ended[number][index] - self.began[number][index]
                )
        return dict(found)

    def exposed(self, number: int) -> dict[str, float]:
        """Seconds of the last step's collectives and messages, by label, in which no kernel of the rank ran.

        "" is that of all together. Where several run at a time each has its part of it: labels add up to all.
        """
        working, moving = [], defaultdict(list)
        for index, item in self.items_of(number):
            span = self.began[number][index], self.ended[number][index]
            if isinstance(item, Work):
                working.append(span)
            elif isinstance(item, Collective):
                moving[label_of(item)].append(span)
        hidden = _joined(working)
        ends = []  # of what is exposed: (when, label, whether it begins)
        for label, spans in moving.items():
            for start, stop in _outside(_joined(spans), hidden):
                ends += [(start, label, True), (stop, label, False)]
        found, running, before = {"": 0.0} | dict.fromkeys(moving, 0.0), set(), 0.0
        for time, label, begins in sorted(ends):
            for each in running:
                found[each] += (time - before) / len(running)
            found[""] += time - before if running else 0.0
            (running.add if begins else running.remove)(label)
            before = time
        return found

    def window(self, number: int, step: int = -1) -> tuple[float, float]:
        """When a step of a program begins and ends, as `steps` counts it."""
        ends = [0.0, *accumulate(self.steps[number])]
        return tuple(list(pairwise(ends))[step])

    def items_of(self, number: int, step: int = -1) -> list[tuple[int, Item]]:
        """The items of a step with their places; all, where no step ended."""
        program = self.programs[number]
        begin, end = (_steps(program) or [(0, len(program.items))])[step]
        return list(enumerate(islice(program.items, begin, end), begin))


def _steps(program: Program) -> list[tuple[int, int]]:
    """The items of each step: the first, and the one after the last."""
    ends = [index for index, item in enumerate(program.items) if isinstance(item, Step)]
    return list(zip([0, *(end + 1 for end in ends)], ends, strict=False))


def label_of(item: Item) -> str:
    """As in a trace."""
    name = getattr(item, "call", "") or getattr(item, "name", "") or "host"
    label = getattr(item, "label", "")
    if isinstance(item, Collective) and not label.startswith(name):
        return f"{name} {label}".strip()
    return label or name


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times in ascending order, without overlap."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _outside(
    spans: list[tuple[float, float]], others: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """What of the first lies outside of the others; all ascending and without overlap."""
    found, place = [], 0
    for start, stop in spans:
        while place < len(others) and others[place][1] <= start:
            place += 1
        for begin, end in islice(others, place, None):
            if begin >= stop:
                break
            if begin > start:
                found.append((start, begin))
            start = max(start, end)
        if start < stop:
            found.append((start, stop))
    return found
