"""Times pipelines of one model by turns, and says what each rank is idle beside what its table says.

Of each step: what every action computed, on every rank, and when. Right behind it, on all ranks at once, the
same stages alone: F, B, I and W of as many micro-batches, with no other rank to wait for. The table is
replayed with their medians. What a rank is idle more than in the replay, the program lost: by messages, by
streams that take cores, and by stages that are slower in a step than alone.

On one rank nothing waits, and schedules differ in this: "1F1B" has usual backwards, "ZB-H1" puts weight
gradients off. So the ratio is what late gradients cost.

    python -m bench.pipeline --ranks 2 --schedules 1F1B,ZB-H1
    python -m bench.pipeline --ranks 1 --schedules 1F1B,ZB-H1
    python -m bench.pipeline --ranks 2 --schedules 1F1B --costs parameters,time
"""

import shardrt  # noqa: F401  isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import re
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from bench import figures as f
from bench import ranks
from bench import workload as w
from bench.command_line import Parser, check_known, words
from bench.training import SCHEDULES, Training, batches_of, gathered, loss_from, named
from shardrt import Tensor, autograd, random
from shardrt.comm import DeviceMesh, init_device_mesh, world
from shardrt.device import timeline
from shardrt.late import Late
from shardrt.parallel.stage import Stage
from shardrt.parallel.table import Replay, Table
from shardrt.train.errors import USAGE, one_line

COSTS = ("parameters", "time")
PARTS = "FBIW"
_ACTION = re.compile(r"([FBIW])\d+ of stage (\d+)")


def arguments() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.pipeline", description="Times pipelines, and what ranks are idle.")
    w.add_arguments(parser)
    parser.add_argument("--device", type=w.cpu, default="cpu", help="cpu")
    parser.add_argument("--ranks", type=w.positive, metavar="N", help="start so many (1)")
    parser.add_argument(
        "--schedules", type=words, default=["1F1B", "ZB-H1"], metavar="NAME,...", help=", ".join(SCHEDULES)
    )
    parser.add_argument(
        "--costs", type=words, default=["parameters"], metavar="KIND,...", help="parameters, time"
    )
    return parser


@dataclass
class Contestant:
    """A pipeline, and what this rank measured of it in each round, in seconds."""

    schedule: str
    costs: str
    training: Training
    begins: list[float] = field(default_factory=list)  # of the clock that all ranks share
    ends: list[float] = field(default_factory=list)  # of the last action
    seconds: list[float] = field(default_factory=list)  # of the whole step, optimizer and all
    processor: list[float] = field(default_factory=list)  # of the whole step, all threads
    computed: list[float] = field(default_factory=list)
    in_step: list[np.ndarray] = field(default_factory=list)  # medians, (stages, PARTS); 0: of other ranks
    alone: list[np.ndarray] = field(default_factory=list)

    @property
    def table(self) -> Table:
        return self.training.pipeline.table


def main() -> None:
    with one_line(USAGE):
        options = arguments().parse_args()
        workload = w.workload_of(options)
        launched = world.launch()
        check(options, launched and launched.size)
    if launched is None:  # one rank, too: with one thread
        with one_line(USAGE, kinds=(RuntimeError,)):
            print(ranks.mpirun(["-m", "bench.pipeline", *sys.argv[1:]], options.ranks or 1), end="")
        return
    with one_line(USAGE):
        mesh = init_device_mesh("cpu")
        contestants = [
            Contestant(schedule, costs, training_of(workload, mesh, schedule, costs, options))
            for schedule in options.schedules
            for costs in options.costs
        ]
    race(contestants, mesh, options.warmup, options.steps)
    entries = [entry(each, contestants[0], mesh) for each in contestants]
    settings = {"micro_batches": options.micro_batches, "warmup": options.warmup, "clip": options.clip}
    result = {
        "pipelines": entries,
        "workload": workload.facts(),
        "world_size": mesh.size,
        "settings": settings,
        "losses_differ": any(each["losses"] != entries[0]["losses"] for each in entries),
    }
    if mesh.rank == 0:
        f.show(result, lines(result, workload), options)
    if result["losses_differ"]:
        raise SystemExit(1)


def check(options: argparse.Namespace, launched: int | None) -> None:
    """Raise ValueError for options that don't fit together. launched: ranks of mpirun, None without it."""
    check_known("--schedules", options.schedules, SCHEDULES)
    check_known("--costs", options.costs, COSTS)
    if launched is not None and options.ranks not in (None, launched):
        raise ValueError(f"--ranks {options.ranks}, but mpirun has started {launched}")
    if options.output is not None and options.output.is_file():
        raise ValueError(f"--output: {options.output} exists")
    if options.weights:
        raise ValueError("--weights: pipelines begin with the seed's weights")


def training_of(
    workload: w.Job, mesh: DeviceMesh, schedule: str, costs: str, options: argparse.Namespace
) -> Training:
    how = {"clip": options.clip, "micro_batches": options.micro_batches, "costs": costs}
    return Training(workload, mesh, f"PP_{schedule}", **how)


def race(contestants: list[Contestant], mesh: DeviceMesh, warmup: int, rounds: int) -> None:
    """Steps of all contestants by turns, and their stages alone. Collective."""
    for number in range(warmup + rounds):
        for each in contestants:
            batch = each.training.batch(number)
            gathered([0.0], mesh)  # all ranks begin together
            with timeline.record_all() as recorded:
                used = time.process_time()
                stamps = each.training.step(*batch)
                used = time.process_time() - used
            gathered([0.0], mesh)
            apart = alone(each.training, *batch)
            if number < warmup:
                continue
            done = list(actions(recorded.spans))
            each.begins.append(stamps.begin)
            each.ends.append(max(stop for *_, stop in done))
            each.seconds.append(stamps.seconds)
            each.processor.append(used)
            each.computed.append(sum(busy for *_, busy, _ in done))
            each.in_step.append(medians(each.table, ((stage, kind, busy) for stage, kind, busy, _ in done)))
            each.alone.append(medians(each.table, apart))


def actions(spans: list[timeline.Span]) -> Iterator[tuple[int, str, float, float]]:
    """Of each action of a step: its stage, kind, seconds that it computed, and its end."""
    compute = sorted((span for span in spans if span.stream == "compute"), key=lambda span: span.start)
    waits = [span for span in compute if span.label == "wait"]
    for span in compute:
        found = _ACTION.fullmatch(span.label)
        if found:
            inside = (wait.stop - wait.start for wait in waits if span.start <= wait.start < span.stop)
            yield int(found[2]), found[1], span.stop - span.start - sum(inside), span.stop


def alone(training: Training, inputs: np.ndarray, targets: np.ndarray) -> list[tuple[int, str, float]]:
    """(stage, kind, seconds) of this rank's stages, run without the others. Gradients are dropped."""
    found = []
    batches = [*enumerate(batches_of(inputs, targets, training.pipeline.table.micro_batches))]
    with random.at(random.state()):
        for stage, late in product(training.pipeline.stages, (True, False)):
            for number, batch in batches:
                times = once(training, stage, *batch, number, late)
                found += [(stage.number, kind, seconds) for kind, seconds in times.items()]
    training.optimizer.zero_grad()
    return found


def once(
    training: Training, stage: Stage, inputs: np.ndarray, targets: np.ndarray, number: int, late: bool
) -> dict[str, float]:
    """Seconds of F, and of B or of I and W, of one stage for one micro-batch."""
    shape = (len(inputs), training.workload.stream // training.workload.batch, training.workload.dim)
    values = np.random.default_rng(number).standard_normal(shape, np.float32)
    x = None if stage.first else Tensor(values, requires_grad=True)
    marks = [time.perf_counter()]
    y = stage(x, named(training.model, inputs, targets), number=number)
    if stage.last:
        y = loss_from(training.model, y, targets) * (1 / training.pipeline.table.micro_batches)
    marks.append(time.perf_counter())
    weights = Late() if late else None
    autograd.backward([y], None if stage.last else [values], late=weights)
    marks.append(time.perf_counter())
    if weights is not None:
        weights.run()
        marks.append(time.perf_counter())
    return dict(zip("FIW" if late else "FB", np.diff(marks).tolist(), strict=True))


def medians(table: Table, times: Iterable[tuple[int, str, float]]) -> np.ndarray:
    """(stages, PARTS): the median of each; 0 where there is none."""
    by: dict[tuple[int, str], list[float]] = {}
    for stage, kind, seconds in times:
        by.setdefault((stage, kind), []).append(seconds)
    return np.array(
        [[statistics.median(by.get((stage, kind), [0.0])) for kind in PARTS] for stage in range(table.stages)]
    )


def entry(own: Contestant, first: Contestant, mesh: DeviceMesh) -> dict:
    """One contestant's figures, of all ranks. Collective."""
    table, size = own.table, mesh.size
    begins, ends = gathered(own.begins, mesh).min(0), gathered(own.ends, mesh).max(0)
    seconds, firsts = gathered(own.seconds, mesh).max(0), gathered(first.seconds, mesh).max(0)
    used, useds = gathered(own.processor, mesh).sum(0), gathered(first.processor, mesh).sum(0)
    computed = gathered(own.computed, mesh)  # (ranks, rounds)
    idle = ends - begins - computed
    losses = gathered(own.training.losses, mesh).sum(0).tolist()  # 0 where the last stage is not
    pieces = np.zeros(table.stages)
    pieces[[stage.number for stage in own.training.pipeline.stages]] = [
        len(stage.pieces) for stage in own.training.pipeline.stages
    ]
    told = {
        "pipeline": f"{own.schedule}, by {own.costs}",
        "pieces": gathered(pieces, mesh).sum(0).astype(int).tolist(),
        "step_ms_median": ms(statistics.median(seconds)),
        "step_ms": ms(seconds),
        "ratio": round(statistics.median(seconds / firsts), 4),
        "ratios": (seconds / firsts).round(4).tolist(),
        "processor_ms": ms(statistics.median(used) / mesh.size),
        "processor_ratio": round(statistics.median(used / useds), 4),
        "table_ms": ms(statistics.median(ends - begins)),
        "computed_ms": ms(np.median(computed, axis=1)),
        "idle_ms": ms(np.median(idle, axis=1)),
    }
    for name, measured in (("alone", own.alone), ("in_step", own.in_step)):
        shape = (size, len(measured), table.stages, len(PARTS))
        costs = gathered(np.ravel(measured), mesh).reshape(shape).sum(0)  # (rounds, stages, PARTS)
        replays = [replayed(table, each) for each in costs]
        rest = np.array([replay.idle for replay in replays]).T
        told[name] = {
            "table_ms": ms(statistics.median(replay.makespan for replay in replays)),
            "idle_ms": ms(np.median(rest, axis=1)),
            "idle_ratio": np.median(idle / rest, axis=1).round(4).tolist() if size > 1 else None,
            "actions_ms": {
                f"{stage}{kind}": ms(np.median(costs[:, stage, place]))
                for stage in range(table.stages)
                for place, kind in enumerate(PARTS)
                if costs[:, stage, place].any()
            },
        }
    return told | {"losses": losses}


def replayed(table: Table, costs: np.ndarray) -> Replay:
    """The table with these costs, (stages, PARTS)."""
    forward, backward, inputs, weights = costs.T.tolist()
    return table.replay(forward, backward, inputs, weights)


def ms(seconds: float | np.ndarray) -> float | list[float]:
    return np.round(1e3 * np.asarray(seconds), 3).tolist()


def lines(result: dict, workload: w.Job) -> list[str]:
    """For a reader."""
    first = result["pipelines"][0]["pipeline"]
    told = [
        f"{workload}; {result['world_size']} ranks, {result['settings']['micro_batches']} micro-batches",
        f"{'ms':<22}{'step':>9}{'table':>9}{'replay':>9}  idle by rank; over the replay's with F, I, W "
        f"alone, in the step; step over {first}'s, processors' likewise",
    ]
    for each in result["pipelines"]:
        where = each["alone"], each["in_step"]
        over = "; ".join(" ".join(f"{ratio:.2f}" for ratio in at["idle_ratio"] or ()) for at in where)
        idle = " ".join(f"{value:.1f}" for value in each["idle_ms"])
        told.append(
            f"{each['pipeline']:<22}{each['step_ms_median']:9.1f}{each['table_ms']:9.1f}"
            f"{each['alone']['table_ms']:9.1f}  {idle}; {over}; {each['ratio']:.3f} "
            f"({min(each['ratios']):.3f} to {max(each['ratios']):.3f}), {each['processor_ratio']:.3f}"
        )
        for name in ("alone", "in_step"):
            times = ", ".join(f"{action} {value:.2f}" for action, value in each[name]["actions_ms"].items())
            told.append(f"  {name.replace('_', ' ')}: {times}")
    if result["losses_differ"]:
        told.append("LOSSES DIFFER")
    return told


if __name__ == "__main__":
    main()
