"""Records one step and draws which unit has which slot: a picture of docs/explanation/schedule.md.

python docs/figures/slots.py docs/figures/slots.svg

Two ranks, as threads, run four units under FULL_SHARD. Time is the order in which the program issues work.
"""

import numpy as np
from drawing import DARK, EMPTY, GREY, RANKS, Drawing, write

from shardrt import nn
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import fully_shard, units
from shardrt.fsdp.observers import ScheduleObserver

BLOCKS = 4
Lent = dict[tuple[str, int], str]  # (role, number of the slot) -> the unit that has it


class Watch(ScheduleObserver):
    """Notes after each event which unit has which slot."""

    def __init__(self, schedule) -> None:
        self.units = [(unit, group) for unit in schedule.units for group in unit.groups]
        self.events: list[tuple[str, Lent]] = []

    def lent(self) -> Lent:
        """The slots that units have now."""
        found = {}
        for unit, group in self.units:
            for role, slot in (("gathered", group.slot), ("gradients", group.gradient_path.slot)):
                if slot is not None:
                    found[role, group.arenas[role].slots.index(slot)] = unit.label
        return found

    def _note(self, text: str) -> None:
        self.events.append((text, self.lent()))

    def gather(self, unit) -> None:
        if unit.groups:
            self._note(f"gather {unit.label}")

    def enter(self, unit) -> None:
        if unit.groups:
            self._note(f"forward {unit.label}")

    def after_backward(self, unit) -> None:
        if unit.groups:
            self._note(f"backward {unit.label}")

    def reduce(self, unit) -> None:
        if unit.groups:
            self._note(f"reduce {unit.label}")

    def release(self, unit) -> None:
        if unit.groups:
            self._note(f"release {unit.label}")


def recorded() -> list[tuple[str, Lent]]:
    """The events of one step, each with the slots after it."""
    mesh = init_device_mesh("cpu")
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(BLOCKS)))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    schedule = units(model)[0].schedule
    watch = Watch(schedule)
    schedule.observers.append(watch)
    model(np.ones((2, 8), np.float32)).sum().backward()
    return watch.events


def picture() -> Drawing:
    """A row for each slot, a column for each event."""
    events = thread.run(2, recorded)[0]
    rows = [("gathered", 0), ("gathered", 1), ("gradients", 0), ("gradients", 1)]
    left, top, height, width = 112, 44, 30, 640 / len(events)
    drawing = Drawing(764, 300, "Four units take turns in two slots for parameters and two for gradients")
    drawing.text(12, 24, "Which unit has which slot, event by event", bold=True)
    for number, (role, index) in enumerate(rows):
        y = top + number * (height + 6)
        drawing.text(12, y + 20, f"{role} {index}", GREY)
        drawing.box(left, y, width * len(events), height, EMPTY)
        start = 0
        while start < len(events):
            unit = events[start][1].get((role, index))
            stop = start + 1
            while stop < len(events) and events[stop][1].get((role, index)) == unit:
                stop += 1
            if unit is not None:
                drawing.box(left + start * width, y, (stop - start) * width, height, RANKS[int(unit)], unit)
            start = stop
    bottom = top + len(rows) * (height + 6)
    for number, (text, _) in enumerate(events):
        x = left + (number + 0.5) * width + 4
        drawing.parts.append(
            f'<text x="{x:g}" y="{bottom + 6}" fill="{DARK}" font-size="10.5" text-anchor="end" '
            f'transform="rotate(-90 {x:g} {bottom + 6})">{text}</text>'
        )
    half = next(number for number, (text, _) in enumerate(events) if text.startswith("backward"))
    begin = left + (half - 2) * width
    drawing.path(f"M{begin:g} {top - 14}V{bottom + 66}", GREY, dashed=True)
    drawing.text(begin - 6, top - 6, "forward", GREY, "end")
    drawing.text(begin + 6, top - 6, "backward", GREY)
    drawing.key(left, 286, [(RANKS[unit], f"unit {unit}") for unit in range(BLOCKS)] + [(EMPTY, "free")])
    return drawing


if __name__ == "__main__":
    write(picture)
