"""StepTrace: the observer that every schedule has, for traces, the watchdog and SHARDRT_DEBUG=1."""

import os
import sys

from shardrt.comm import recording
from shardrt.device import timeline
from shardrt.fsdp.observers import ScheduleObserver
from shardrt.fsdp.schedule import Schedule
from shardrt.fsdp.unit import Unit


class StepTrace(ScheduleObserver):
    """Records spans of units for traces, sets the watchdog's phase, prints events with SHARDRT_DEBUG=1."""

    def __init__(self, schedule: Schedule) -> None:
        self._mesh = schedule.mesh
        self._stream = schedule.streams.compute.name
        self._started: dict[Unit, float] = {}
        self._phases: dict[Unit, str] = {}  # phases that have begun and not ended, the innermost last

    def forward_begins(self, root: Unit) -> None:
        recording.part(self._mesh, "forward")
        self._debug("forward", root)

    def backward_begins(self) -> None:
        recording.part(self._mesh, "backward")

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
