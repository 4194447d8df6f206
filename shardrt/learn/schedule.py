"""Exercise: predict the schedule of a step, for any prefetch."""

from functools import cache
from types import ModuleType

import numpy as np

from shardrt import nn
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import units
from shardrt.learn.checking import function, need, shard

TITLE = "Predict the schedule"
LEVEL = "medium"
TEACHES = "what prefetch does, read from a trace"
TAKEAWAY = (
    "With prefetch 0 each gather begins when its unit is due, so computing waits for it. Prefetch 1 issues "
    "the next gather before the unit computes, which hides the gather and costs one more buffer."
)

_CASES = ((2, 1), (4, 0), (4, 1), (4, 2), (3, 5))  # units, prefetch
_SHOWN = "gather", "release", "reduce"


class _Trace:
    """An observer of a schedule: notes what is issued."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __getattr__(self, name: str):
        return lambda unit=None: self._note(name, unit)

    def _note(self, name, unit) -> None:
        if name in _SHOWN:
            label = unit.label.strip("()")
            self.lines.append(f"{name} {label if label == 'root' else 'abcdef'[int(label)]}")


def _traced(count: int, prefetch: int) -> list[str]:
    mesh, model = init_device_mesh("cpu"), nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count)))
    shard(model, model, mesh, prefetch=prefetch)
    trace = _Trace()
    units(model)[0].schedule.observers.append(trace)
    for _ in range(2):  # the first forward records the order of units
        trace.lines.clear()
        model(np.ones((2, 4), np.float32)).sum().backward()
    return trace.lines


@cache
def prepare() -> list[list[str]]:
    """The lines of each case."""
    return [thread.run(2, _traced, *case)[0] for case in _CASES]


def check(answer: ModuleType) -> str:
    """Compare the predicted lines with the traces."""
    for (count, prefetch), expected in zip(_CASES, prepare(), strict=True):
        found = function(answer, "events")(list("abcdef"[:count]), prefetch)
        lines = isinstance(found, list) and all(isinstance(line, str) for line in found)
        need(lines, 'events must return a list of lines, such as "gather a".')
        wrong = _wrong(found, expected, count, prefetch) if found != expected else ""
        need(not wrong, f"With {count} units and prefetch {prefetch}: {wrong}")
    return "your lines equal the traces of five schedules: 2 to 4 units, prefetch 0, 1, 2 and 5."


def _wrong(found: list[str], expected: list[str], count: int, prefetch: int) -> str:
    gathers = [line for line in found if line.startswith("gather")]
    if not any(line.startswith("reduce") for line in found):
        return "backward reduces the gradient of each unit, right after the unit is released."
    if len(gathers) == count + 1 == len(set(gathers)):
        return "FULL_SHARD releases each unit after forward, so backward gathers it again."
    if len(gathers) > 2 * count + 1:
        return f"you have {len(gathers)} gathers. No unit is gathered twice in one direction."
    if len(gathers) == 2 * count:
        return (
            "the last unit too is released after forward, and gathered again. Only the root stays gathered."
        )
    if gathers[count + 1 : count + 2] == ["gather a"]:
        return "backward goes through the units in the reverse order, and prefetches in that order."
    place = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return f"the trace has {len(expected)} lines, and you have {len(found)}."
    ours, real = found[place], expected[place]
    if real.startswith("gather"):
        why = (
            f"Before a unit computes, the next {prefetch} are gathered. It is released after it has computed."
        )
    elif ours.startswith("gather"):
        why = f"At most {prefetch} units are gathered ahead of the unit that is due."
    else:
        why = "A unit is released first, and its gradient is reduced after that. The root comes last."
    return f'line {place + 1} is "{real}" in the trace, and "{ours}" in yours. {why}'
