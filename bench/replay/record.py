"""Writes a training step of bench.step as it ran here, as Chakra traces: what a replay is compared with.

    mpirun -n 2 python -m bench.replay.record DIR --size small
    mpirun -n 2 python -m bench.collectives --replay DIR
    mpirun -n 2 python -m bench.replay.record DIR --compare     # each step and its replays, alternating

Of the timed steps it writes the one whose communication took the median time. Durations of collectives have
the wait for other ranks in them, as those of bench.step; computing is what the rank's thread did between its
waits.
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardrt import device
from shardrt.comm import CollectiveCounter, Communicator, create, init_device_mesh, mpi_world
from shardrt.comm import world as worlds
from shardrt.comm.objects import all_gather_object
from shardrt.device import timeline
from shardrt.device.cpu import finish_streams
from shardrt.device.timeline import Recording
from shardrt.train.errors import USAGE, one_line

from .. import workload as w
from ..harness.command_line import Parser
from ..step import STRATEGIES, mesh_shape
from ..training import Training
from . import writer
from .__main__ import planned
from .plan import Key, Plan, plan
from .run import ALONE, FILLED, GAPS, Player
from .trace import COLLECTIVES, COMPUTE, Node, Trace, in_order

NAME = "step"


@dataclass
class Issued:
    """A collective: when the host issued it, and when it ran."""

    node: Node
    at: float
    began: float = 0.0
    ended: float = 0.0


class Calls:
    """All collectives of a mesh's communicators; give it to init_device_mesh as `wrap`."""

    def __init__(self) -> None:
        self.issued: list[Issued] = []
        self.groups: dict[str, tuple[int, ...]] = {}

    def __call__(self, communicator: Communicator) -> None:
        """Note its calls from now on. Collective over its ranks."""
        ranks = communicator.all_gather_bytes(json.dumps(worlds.current().rank).encode())
        members = tuple(map(int, ranks))
        name = ",".join(map(str, members))
        self.groups[name] = members
        _Noted(communicator, self, name)


class _Noted(CollectiveCounter):
    def __init__(self, communicator: Communicator, calls: Calls, group: str) -> None:
        super().__init__(communicator)
        self._calls, self._group = calls, group

    def intercept(self, call: Any, run: Callable[..., Any]) -> Callable[..., Any]:
        if call.name not in COLLECTIVES or len(self._calls.groups[self._group]) == 1:
            return run
        how = call.args[2] if call.name == "reduce_scatter" else None
        root = self._calls.groups[self._group][call.args[1]] if call.name == "broadcast" else -1
        node = Node(
            id=0,
            name=f"{call.name} {call.tag}".strip(),
            call=call.name,
            stream=call.stream.name,
            nbytes=0 if call.array is None else call.array.nbytes,
            dtype=(how and how.kind) or ("" if call.array is None else call.array.dtype.name),
            group=self._group,
            root=root,
        )
        issued = Issued(node, timeline.now())
        self._calls.issued.append(issued)

        def timed(*args: Any) -> None:
            issued.began = time.perf_counter()
            run(*args)
            issued.ended = time.perf_counter()

        return timed


class _Clock:
    """The timeline's clock, which also notes how long this thread has had a core by then."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._times: list[float] = []
        self._used: list[float] = []

    def __call__(self) -> float:
        now = time.perf_counter()
        if threading.get_ident() == self._thread:
            self._times.append(now)
            self._used.append(time.thread_time())
        return now

    def core(self, began: float, ended: float) -> float:
        """Seconds of a core between two times."""
        first, last = np.interp([began, ended], self._times, self._used)
        return min(float(last - first), ended - began)


class _Nodes:
    """Makes nodes of what happened, in the order of time.

    What the compute stream does between its waits, collectives, records and the issues of collectives is a
    node that computes. `zero` is the time from which starts count.
    """

    def __init__(self, calls: Calls, recorded: Recording, clock: _Clock, begin: float, zero: float) -> None:
        self._calls, self._recorded, self._clock, self._zero = calls, recorded, clock, zero
        self._cursor = begin  # until then the compute stream has its nodes
        self._nodes: list[Node] = []
        self._after: dict[str, list[int]] = {}  # by stream, what its next node depends on
        self._marks: dict[int, list[int]] = {}
        self._issue: dict[int, list[int]] = {}

    def of(self, end: float, rank: int, world: int) -> Trace:
        events: list[tuple[float, int, Callable[[], None]]] = []
        waits = {span.stop: span.start for span in self._recorded.spans if span.label == "wait"}
        stops = sorted(waits)
        for point in self._recorded.passed:
            start = point.time
            if point.waited and point.stream == COMPUTE:
                stop = next((each for each in stops if each >= point.time), point.time)
                start = waits.get(stop, start)
            events.append((point.time, 1, lambda point=point, start=start: self._point(point, start)))
        for number, issued in enumerate(self._calls.issued):
            if issued.node.stream != COMPUTE:
                events.append((issued.at, 0, lambda number=number: self._issued(number)))
            events.append((issued.began, 2, lambda number=number: self._collective(number)))
        for _, _, do in sorted(events, key=lambda event: event[:2]):
            do()
        self._compute(end)
        return in_order(Trace("step", "shardrt's", rank, world, self._nodes, self._calls.groups, [rank]))

    def _add(self, stream: str, node: Node, deps: list[int], began: float, ended: float) -> int:
        number = len(self._nodes) + 1
        times = {"start": began - self._zero, "seconds": ended - began}
        self._nodes.append(replace(node, id=number, deps=tuple(dict.fromkeys(deps)), **times))
        self._after[stream] = [number]
        return number

    def _compute(self, until: float) -> None:
        if until > self._cursor:
            core = self._clock.core(self._cursor, until)
            node = Node(0, "compute", COMPUTE, COMPUTE, core=core)
            self._add(COMPUTE, node, self._after.get(COMPUTE, []), self._cursor, until)
            self._cursor = until

    def _point(self, point: Any, start: float) -> None:
        if point.stream == COMPUTE:
            self._compute(start)
            self._cursor = max(self._cursor, point.time)
        if point.waited:
            known = self._after.setdefault(point.stream, [])
            known += self._marks.get(point.mark, [])
        else:
            self._marks[point.mark] = list(self._after.get(point.stream, []))

    def _issued(self, number: int) -> None:
        self._compute(self._calls.issued[number].at)
        self._issue[number] = list(self._after.get(COMPUTE, []))

    def _collective(self, number: int) -> None:
        issued = self._calls.issued[number]
        stream = issued.node.stream
        if stream == COMPUTE:
            self._compute(issued.began)
            self._cursor = issued.ended
        deps = self._after.get(stream, []) + self._issue.get(number, [])
        self._add(stream, issued.node, deps, issued.began, issued.ended)


def main() -> int:
    """Train, and write a step. The exit code."""
    with one_line(USAGE):
        parser = Parser(prog="python -m bench.replay.record", description="Writes a step.")
        parser.add_argument("folder", type=Path, metavar="DIR", help="for the traces")
        w.add_arguments(parser)
        parser.add_argument("--strategy", choices=STRATEGIES, default="FULL_SHARD")
        parser.add_argument("--prefetch", type=w.natural, default=1, metavar="N", help="units ahead (1)")
        parser.add_argument("--communicator", default="auto", metavar="NAME", help="shm, mpi, ... (auto)")
        compare = "replay each step when it has run, and other traces of the same step"
        parser.add_argument("--compare", nargs="*", type=Path, metavar="DIR", help=compare)
        options = parser.parse_args()
        workload = w.workload_of(options)
        launched = mpi_world.launch()
        if launched is None or launched.size < 2:
            raise ValueError("one rank has no communication: start it with mpirun -n 2")
        if options.folder.exists() and any(options.folder.iterdir()):
            raise ValueError(f"{options.folder}: is not empty")
        calls = Calls()
        shape = mesh_shape(options.strategy, worlds.current().size)
        mesh = init_device_mesh("cpu", shape, communicator=options.communicator, wrap=calls)
        training = Training(workload, mesh, options.strategy, prefetch=options.prefetch)
    for number in range(options.warmup):
        training.step(*training.batch(number))
    control, traces, ratios = mesh.communicator("control"), [], []
    others = {folder.name: _player(*planned(folder, control), control) for folder in options.compare or ()}
    for number in range(options.steps):
        traces.append(_recorded(training, calls, number))
        if options.compare is not None:
            ratios.append(_compared(traces[-1], others, control))
    if ratios and mesh.rank == 0:
        for name in ratios[0]:
            low, middle, high = np.quantile([each[name] for each in ratios], (0.25, 0.5, 0.75))
            print(f"replay over step, {name}: {middle:.3f} (quartiles {low:.3f} to {high:.3f})")
    own = [sum(each.ended - each.began for each in issued) for _, issued in traces]
    totals = [sum(each) for each in zip(*all_gather_object(control, own), strict=True)]
    order = sorted(range(len(totals)), key=totals.__getitem__)
    chosen = order[len(order) // 2]
    writer.write(options.folder, NAME, [traces[chosen][0]])
    if mesh.rank == 0:
        per_rank = [f"{1e3 * total / mesh.size:.3f}" for total in sorted(totals)]
        print(f"communication of a rank in each step, ms: {', '.join(per_rank)}")
        print(f"wrote step {chosen + 1} of {len(totals)}, with {1e3 * totals[chosen] / mesh.size:.3f} ms")
    return 0


def _compared(
    step: tuple[Trace, list[Issued]], others: dict[str, Player], control: Communicator
) -> dict[str, float]:
    """Communication of replays over that of the step, both of all ranks. Collective.

    others: replays of other traces of such a step.
    """
    trace, issued = step
    made = plan(trace, control.rank, control.size)
    keys = all_gather_object(control, [item.key for _, item in made.communication])
    keys = sorted({Key(tuple(members), stream) for each in keys for members, stream in each})
    player = _player(made, keys, control)
    found = {"step": sum(each.ended - each.began for each in issued)}
    for name, each in {"": player, **others}.items():
        for mode, work in ((GAPS, False), (FILLED, False), (FILLED, True)):
            played = each.play(mode, work)
            places = [place for place, _ in each.plan.communication]
            label = f"{name} {mode} {'by work' if work else ''}".strip()
            found[label] = float(np.nansum((played.ended - played.began)[places]))
    player.close()
    everyone = all_gather_object(control, found)
    totals = {name: sum(each[name] for each in everyone) for name in found}
    if control.rank == 0:
        each = (f"{name} {1e3 * total / control.size:.3f}" for name, total in totals.items())
        print(f"communication of a rank, ms: {', '.join(each)}")
    return {name: total / totals["step"] for name, total in totals.items() if name != "step"}


def _player(made: Plan, keys: Sequence[Key], control: Communicator) -> Player:
    """A player that has played once. Collective."""
    player = Player(made, keys, create("auto"), control, device.current())
    player.zero()
    player.play(ALONE)
    return player


def _recorded(training: Training, calls: Calls, number: int) -> tuple[Trace, list[Issued]]:
    """A step of this rank, and its collectives."""
    mesh = training.mesh
    control = mesh.communicator("control")
    batch = training.batch(number)
    zero = min(all_gather_object(control, time.perf_counter()))
    calls.issued.clear()
    clock = _Clock()
    with timeline.record_all(clock) as recorded:
        stamps = training.step(*batch)
        finish_streams()
    issued = list(calls.issued)
    trace = _Nodes(calls, recorded, clock, stamps.begin, zero).of(stamps.end, mesh.rank, mesh.size)
    return trace, issued


if __name__ == "__main__":
    sys.exit(main())
