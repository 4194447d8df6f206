"""ScheduleObserver watches a schedule. StepTrace is an observer that every schedule has.

An observer does not influence the schedule. Append it to `Schedule.observers`. An observer that must see the
first forward is made by a function in `Unit.observers`, which gets the schedule.
"""

import os
import sys

from shardrt.comm.mesh import DeviceMesh
from shardrt.device import timeline
from shardrt.fsdp.unit import Unit


class ScheduleObserver:
    """Override the events to watch. The rank's own thread makes the calls, in the order of the program."""

    def forward_begins(self, root: Unit) -> None:
        """A forward of the outermost unit begins."""

    def recording_begins(self) -> None:
        """A forward of any unit begins, and backward may follow."""

    def backward_begins(self) -> None:
        """A backward, or the deferred half of one, begins."""

    def backward_ends(self) -> None:
        """A backward has ended, or was discarded after it raised."""

    def enter(self, unit: Unit) -> None:
        """A call of a module of the unit begins."""

    def leave(self, unit: Unit) -> None:
        """A call of a module of the unit ends."""

    def raised(self, unit: Unit) -> None:
        """A call of a module of the unit has raised."""

    def before_backward(self, unit: Unit) -> None:
        """The backward of a call of the unit begins."""

    def after_backward(self, unit: Unit) -> None:
        """Backward has used the parameters of the unit for the last time."""

    def gather(self, unit: Unit) -> None:
        """The gather of the unit was issued."""

    def release(self, unit: Unit) -> None:
        """The unit's gathered parameters were released."""

    def reduce(self, unit: Unit) -> None:
        """The reduction of a group of the unit was issued."""


class StepTrace(ScheduleObserver):
    """Records spans of units for traces, sets the watchdog's phase, prints events with SHARDRT_DEBUG=1."""

    def __init__(self, mesh: DeviceMesh, stream: str) -> None:
        self._mesh = mesh
        self._stream = stream
        self._started: dict[Unit, float] = {}
        self._phases: dict[Unit, str] = {}  # phases that have begun and not ended, the innermost last

    def forward_begins(self, root: Unit) -> None:
        self._mesh.part("forward")
        self._debug("forward", root)

    def backward_begins(self) -> None:
        self._mesh.part("backward")

    def enter(self, unit: Unit) -> None:
        self._begin("forward", unit)
        self._started[unit] = timeline.now()

    def leave(self, unit: Unit) -> None:
        self._end(unit)
        self._add_span("forward", unit)

    def raised(self, unit: Unit) -> None:
        self._end(unit)
        self._started.pop(unit, None)

    def before_backward(self, unit: Unit) -> None:
        self._begin("backward", unit)
        self._started.setdefault(unit, timeline.now())

    def after_backward(self, unit: Unit) -> None:
        self._end(unit)
        self._add_span("backward", unit)

    def gather(self, unit: Unit) -> None:
        self._debug("gather", unit)

    def release(self, unit: Unit) -> None:
        self._debug("release", unit)

    def reduce(self, unit: Unit) -> None:
        self._debug("reduce", unit)

    def _begin(self, direction: str, unit: Unit) -> None:
        self._phases.pop(unit, None)
        self._phases[unit] = f"{direction} {unit.label}"
        self._show_phase()

    def _end(self, unit: Unit) -> None:
        self._phases.pop(unit, None)
        self._show_phase()

    def _show_phase(self) -> None:
        """Set the device's phase: the part of the step that ops belong to now."""
        self._mesh.device.set_phase(next(reversed(self._phases.values()), ""))

    def _add_span(self, direction: str, unit: Unit) -> None:
        started = self._started.pop(unit, None)
        if started is not None and timeline.recording():
            timeline.add(self._stream, f"{direction} {unit.label}", started, timeline.now())

    def _debug(self, event: str, unit: Unit) -> None:
        if _DEBUG:  # one write for the whole line: ranks may be threads
            sys.stderr.write(f"[rank {self._mesh.rank}] {event:8} {unit.label}\n")


_DEBUG = os.environ.get("SHARDRT_DEBUG", "0") not in ("", "0")
