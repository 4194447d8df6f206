"""Trace: some steps of a run on all ranks, in the Trace Event Format of Perfetto and chrome://tracing.

A process per rank, a thread per stream, spans with the names of units, the slots of the arenas in use, and an
arrow from the record of an event to the stream that waited for it: the device keeps what was waited for
(shardrt.device.timeline), nothing is guessed from names. docs/howto/watch.md shows how to read one.
"""

import json
import socket
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

from shardrt import device
from shardrt.comm.mesh import DeviceMesh
from shardrt.comm.objects import all_gather_object
from shardrt.device import timeline
from shardrt.device.cpu import finish_streams
from shardrt.device.timeline import Passed, Recording, Span

__all__ = ["TRACE", "events_of", "names_of", "write"]

TRACE = "trace.json"
STREAMS = ("compute", "gather", "reduce")  # come first, in this order
_INSIDE = 1e-8  # seconds before the end of its span at which an arrow leaves, so as to belong to that span


class Trace:
    """Records the steps `steps`, if any; rank 0 writes them to `directory` at the end of the last one."""

    def __init__(self, mesh: DeviceMesh, directory: Path | None, steps: range) -> None:
        self._mesh = mesh
        self._directory = directory
        self._steps = steps
        self._zero: float | None = None
        self._events: list[dict[str, Any]] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Step `number` runs inside a with block. Collective for the first and the last that is traced."""
        if number not in self._steps:
            yield
            return
        if self._zero is None:
            self._zero = common_zero(self._mesh)
        with timeline.record_all(self._mesh.device.clock) as recorded:
            with timeline.span("compute", f"step {number}"):
                yield
            finish_streams()  # running work belongs to the step
        self._events += events_of(recorded, self._mesh.rank, self._zero)
        if number == self._steps[-1]:
            self._write()

    def _write(self) -> None:
        everyone = all_gather_object(self._mesh.communicator("control"), [socket.gethostname(), self._events])
        self._events = []
        if self._directory is None:
            return
        events = [
            event for rank, (host, own) in enumerate(everyone) for event in (*names_of(rank, host, own), *own)
        ]
        about = {"ranks": self._mesh.size, "steps": [self._steps[0], self._steps[-1]]}
        write(events, about, self._directory / TRACE)


def check_timed(steps: range) -> None:
    """Raise ValueError if steps are to be traced on a device that can't report its streams' work."""
    if steps and not device.current().timed:
        message = f"what streams of {device.current().name!r} do is not recorded"
        raise ValueError(f"report.trace: {message}; Nsight Systems shows it")


def common_zero(mesh: DeviceMesh) -> float:
    """Where traces of all ranks begin, by the clock of this process's device. Collective.

    The processes of one host have a clock in common. Between hosts, zero is when each left a collective: the
    latency of that is the error of what stands side by side.
    """
    clock = mesh.device.clock
    clocks = all_gather_object(mesh.communicator("control"), [socket.gethostname(), clock()])
    one_host = len({host for host, _ in clocks}) == 1
    return max(at for _, at in clocks) if one_host else clock()


def write(events: list[dict[str, Any]], about: dict[str, Any], path: Path) -> None:
    """The JSON object format: metadata first, then by time."""
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(whole, separators=(",", ":")), encoding="utf-8")
    temporary.replace(path)


def events_of(recorded: Recording, rank: int, zero: float) -> list[dict[str, Any]]:
    """What one rank has recorded: X for spans, C for slots, s and f for arrows. Times count from `zero`."""
    by_stream: dict[str, list[Span]] = {}
    for span in recorded.spans:
        by_stream.setdefault(span.stream, []).append(span)
    by_stream = {stream: nested(spans) for stream, spans in by_stream.items()}

    def at(seconds: float) -> float:
        return round(1e6 * (seconds - zero), 3)

    events = []
    for stream, spans in by_stream.items():
        for span in spans:
            phase, _, unit = span.label.partition(" ")
            start, stop = at(span.start), at(span.stop)
            event = {"name": span.label, "cat": stream, "ph": "X", "pid": rank, "tid": stream}
            events.append(event | {"ts": start, "dur": round(stop - start, 3), "args": _unit(phase, unit)})
    for what, seconds, slots in _in_use(recorded):
        args = {"slots": slots}
        events.append({"name": what, "ph": "C", "pid": rank, "ts": at(seconds), "args": args})
    for number, arrow in enumerate(arrows(recorded.passed, by_stream)):
        name, identity = f"after {arrow.source.label}", f"{rank}.{arrow.mark}.{number}"
        shared = {"name": name, "cat": "event", "id": identity, "pid": rank}
        events.append(shared | {"ph": "s", "tid": arrow.source.stream, "ts": at(arrow.leaves)})
        events.append(shared | {"ph": "f", "bp": "e", "tid": arrow.target.stream, "ts": at(arrow.arrives)})
    return events


def names_of(rank: int, host: str, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metadata that names a rank's process and threads; puts numbers in place of streams in `events`."""
    found = {event["tid"] for event in events if "tid" in event}
    streams = [*STREAMS, *sorted(found - {*STREAMS})]
    numbers = {stream: number for number, stream in enumerate(streams, start=1)}
    for event in events:
        event["tid"] = numbers[event["tid"]] if "tid" in event else 0
    named = [
        {"name": "process_name", "tid": 0, "args": {"name": f"rank {rank} on {host}"}},
        {"name": "process_sort_index", "tid": 0, "args": {"sort_index": rank}},
    ]
    for stream in sorted(found, key=numbers.get):
        tid = numbers[stream]
        named.append({"name": "thread_name", "tid": tid, "args": {"name": stream}})
        named.append({"name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}})
    return [{"ph": "M", "pid": rank} | event for event in named]


def nested(spans: list[Span]) -> list[Span]:
    """The same by start, each inside another or apart from it, as a viewer wants them.

    A unit that is used twice, with another between, may end in the other's span: it is drawn from where that
    one ends.
    """
    kept: list[Span] = []
    around: list[Span] = []
    waiting = [(span.start, -span.stop, number, span) for number, span in enumerate(spans)]
    heapify(waiting)
    while waiting:
        _, _, number, span = heappop(waiting)
        while around and around[-1].stop <= span.start:
            around.pop()
        if around and around[-1].stop < span.stop:
            rest = replace(span, start=around[-1].stop)
            heappush(waiting, (rest.start, -rest.stop, number, rest))
            continue
        kept.append(span)
        around.append(span)
    return kept


@dataclass(frozen=True)
class Arrow:
    """From the span `source`, which it leaves at the time `leaves`, to `target` at the time `arrives`."""

    mark: int
    source: Span
    leaves: float
    target: Span
    arrives: float


def arrows(passed: list[Passed], by_stream: dict[str, list[Span]]) -> Iterator[Arrow]:
    """An arrow for each time that a stream waited for another.

    From the work that one stream had done when it recorded the event, to the next work of the other.
    """
    recorded = {point.mark: point for point in passed if not point.waited}
    lanes = {stream: _Lane(spans) for stream, spans in by_stream.items()}
    for wait in passed:
        record = recorded.get(wait.mark)
        if not wait.waited or record is None or not {record.stream, wait.stream} <= lanes.keys():
            continue
        source, target = lanes[record.stream].before(record.time), lanes[wait.stream].after(wait.time)
        if record.stream != wait.stream and source is not None and target is not None:
            leaves = max(source.start, min(source.stop - _INSIDE, record.time))
            arrives = max(leaves, target.start, min(wait.time, target.stop))
            yield Arrow(wait.mark, source, leaves, target, arrives)


class _Lane:
    """The spans of one stream, without its waits, to be found by time. They are nested."""

    def __init__(self, spans: list[Span]) -> None:
        self._by_start = [span for span in spans if span.label != "wait"]
        self._by_stop = sorted(self._by_start, key=lambda span: span.stop)

    def before(self, time: float) -> Span | None:
        """The span that ended last, or the one that is going on if that began later."""
        begun = bisect_right(self._by_start, time, key=lambda span: span.start)
        ended = bisect_right(self._by_stop, time, key=lambda span: span.stop)
        latest = self._by_start[begun - 1] if begun else None
        last = self._by_stop[ended - 1] if ended else None
        if latest is not None and latest.stop > time and (last is None or latest.start >= last.stop):
            return latest
        return last

    def after(self, time: float) -> Span | None:
        """The span that begins next, or the one that is going on if that ends before."""
        begun = bisect_left(self._by_start, time, key=lambda span: span.start)
        ended = bisect_right(self._by_stop, time, key=lambda span: span.stop)
        following = self._by_start[begun] if begun < len(self._by_start) else None
        ending = self._by_stop[ended] if ended < len(self._by_stop) else None
        if ending is not None and ending.start < time and (not following or following.start >= ending.stop):
            return ending
        return following


def _in_use(recorded: Recording) -> Iterator[tuple[str, float, int]]:
    """(what, time, slots) at each change of the lent slots of a kind, over all arenas of that kind."""
    now: dict[str, dict[int, int]] = {}
    for count in recorded.counts:
        arenas = now.setdefault(count.name, {})
        arenas[count.owner] = count.value
        yield count.name, count.time, sum(arenas.values())


def _unit(phase: str, unit: str) -> dict[str, str]:
    return {"unit": unit} if unit and phase != "step" else {}
