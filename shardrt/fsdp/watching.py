"""What watches a schedule. It is told of these points, with the unit, and decides nothing of what they do:

forward, backward               a forward of the outermost unit begins; a backward
recording, backward over        a forward begins that backward may follow; that has ended, or is given up
enter, leave, raised            a call of a unit begins, ends, or has raised
before backward, after backward its part of backward begins, ends
gather, release, reduce         was issued
"""

import os
import sys

from shardrt import random
from shardrt.comm.mesh import DeviceMesh
from shardrt.device import timeline
from shardrt.fsdp.unit import Unit

_BEGINS, _ENDS = {"enter", "before backward"}, {"leave", "raised", "after backward"}


class Showing:
    """For people: spans of units in traces, the watchdog's word for the part of a step, SHARDRT_DEBUG=1."""

    def __init__(self, mesh: DeviceMesh, stream: str) -> None:
        self._mesh = mesh
        self._stream = stream
        self._started: dict[Unit, float] = {}
        self._parts: dict[Unit, str] = {}  # of the step: those that have begun, the innermost last

    def __call__(self, point: str, unit: Unit | None) -> None:
        if point in _BEGINS | _ENDS:
            self._tell_device(point, unit)
        if point in ("forward", "backward"):
            self._mesh.part(point)
        elif point == "enter" or (point == "before backward" and unit not in self._started):
            self._started[unit] = timeline.now()
        elif point == "raised":
            self._started.pop(unit, None)
        elif point in ("leave", "after backward") and unit in self._started:
            started = self._started.pop(unit)
            if timeline.recording():
                label = f"{'forward' if point == 'leave' else 'backward'} {unit.label}"
                timeline.add(self._stream, label, started, timeline.now())
        if _DEBUG and point in ("forward", "gather", "release", "reduce"):
            # Each line in one piece: ranks may be threads.
            sys.stderr.write(f"[rank {self._mesh.rank}] {point:8} {unit.label}\n")

    def _tell_device(self, point: str, unit: Unit) -> None:
        """Which part of the step ops are of now."""
        self._parts.pop(unit, None)
        if point in _BEGINS:
            self._parts[unit] = f"{'forward' if point == 'enter' else 'backward'} {unit.label}"
        self._mesh.device.doing(next(reversed(self._parts.values()), ""))


class MicroBatches:
    """With set_world_invariant: dropout masks depend on which micro-batch of the step it is, not on ranks."""

    def __init__(self, mesh: DeviceMesh, units: list[Unit]) -> None:
        self._mesh = mesh
        self._units = units
        self._begun = False  # one whose backward has not ended
        self._before = 0  # those that were complete when this step of a pipeline began
        self._calls = 0  # uses of random numbers before the first of the step

    def __call__(self, point: str, unit: Unit | None) -> None:
        if point == "recording" and (not self._begun or random.turn() is not None):
            self._begin()
            self._begun = True
        elif point == "backward over" and self._begun:
            self._begun = False
            random.end_micro_batch()

    def _begin(self) -> None:
        groups = [group for unit in self._units for group in unit.groups if group.trainable]
        done = {group.sum.reductions for group in groups} or {0}
        done_before, each = max(done), self._units[0].choices.micro_batches
        block = self._units[0].modules[0].batch_block
        size, own = self._mesh.size, self._mesh.rank
        if block is not None:  # ranks that have parts of the time have the same micro-batch
            size, own = size // block.together, block.part
        if random.turn() is not None:  # of a pipeline: backwards lag behind
            self._before = done_before if random.turn() == 0 else self._before
            done_before = self._before + random.turn()
        if len(done) > 1 or done_before >= each:
            more = f"this would be one more than {each}" if len(done) == 1 else "it was called for some only"
            raise RuntimeError(
                f"set_world_invariant: a step has {each} backwards of {size} micro-batches, then "
                f"zero_grad of all parameters; {more}"
            )
        if done_before == 0:
            self._calls = random.calls()
        random.begin_micro_batch(done_before * size + own, self._calls)


_DEBUG = os.environ.get("SHARDRT_DEBUG", "0") not in ("", "0")
