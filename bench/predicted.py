"""Simulated steps beside measured ones, on this machine, which is calibrated and measured by turns.

    mpirun -n 2 python -m bench.predicted --size gpt2 -o predicted.json
    mpirun -n 2 python -m bench.predicted --machine cpu-2         # a file's figures in place of today's

A turn is one step of each model of bench.machine, which calibrate, and one of each strategy: a machine that
drifts moves both. The models of bench.machine are others than those of --size, and none of them is sharded. A
step takes as long as on its slowest rank. Its exposed communication is what compute waited for and did of it
itself, by the traces of both (bench/parts.py): of the rank that waited least, since the others wait for that
one as well. Medians over the turns in which no other process used more than a tenth of a core, if there are
any; the same goes for the steps that calibrate. Of five turns two may be slow for what a virtual machine does
not see; with fewer than three the median leaves nothing out.
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from bench import machine as calibration
from bench import workload as w
from bench.command_line import Parser, check_known, words
from bench.environment import facts, write_result
from bench.machine import Models, meet, told
from bench.parts import EXPOSED, parts
from bench.quiet import DISTURBED, busy_seconds
from bench.step import mesh_shape
from bench.training import Stamps, Training
from shardrt.comm import DeviceMesh, init_device_mesh, world
from shardrt.device import timeline
from shardrt.device.cpu import CPUDevice
from shardrt.fsdp import ShardingStrategy
from shardrt.simulate.clock import price
from shardrt.simulate.machine import Machine
from shardrt.simulate.script import record_of
from shardrt.simulate.timing import Timing
from shardrt.train.errors import USAGE, one_line

AGAIN = "+recomputed"  # each block's activations
STRATEGIES = (*(strategy.name for strategy in ShardingStrategy), f"FULL_SHARD{AGAIN}")
APART = 0.03  # strategies that differ by less may come in any order


@dataclass(frozen=True)
class Step:
    """Seconds of a step, and of its exposed communication; cores that other processes used meanwhile.

    processor: seconds of processor time, all threads of the rank that used most.
    """

    seconds: float
    exposed: float
    others: float = 0.0
    processor: float = 0.0


@dataclass(frozen=True)
class Row:
    """A model and a strategy: measured turn by turn, and simulated."""

    size: str
    strategy: str
    measured: list[Step]
    simulated: Step

    @property
    def quiet(self) -> list[Step]:
        """The steps that nobody disturbed; all, if there are none."""
        return [step for step in self.measured if step.others <= DISTURBED] or self.measured

    @property
    def seconds(self) -> tuple[float, float]:
        """(measured, simulated)."""
        return statistics.median(step.seconds for step in self.quiet), self.simulated.seconds

    @property
    def exposed(self) -> tuple[float, float]:
        """The same of exposed communication."""
        return statistics.median(step.exposed for step in self.quiet), self.simulated.exposed

    @property
    def error(self) -> float:
        """Of the step: simulated over measured, less 1."""
        here, there = self.seconds
        return there / here - 1

    @property
    def exposed_error(self) -> float:
        """Simulated less measured exposed communication, over the measured step."""
        here, there = self.exposed
        return (there - here) / self.seconds[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, simulate, print; gives the exit code."""
    with one_line(USAGE):
        options = parse(arguments)
        mesh = init_device_mesh("cpu", mesh_shape("", world.current().size))
    rows = compare(mesh, options)
    if mesh.rank == 0:
        print("\n".join(lines(rows)))
        given = " ".join(sys.argv[1:] if arguments is None else arguments)
        command = f"mpirun -n {mesh.size} python -m bench.predicted {given}".rstrip()
        if options.output:
            write_result(options.output, facts(command) | result_of(rows, mesh.size, options))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options. Raises ValueError."""
    parser = Parser(prog="python -m bench.predicted", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--size", type=words, default=["small"], metavar="A,B", help=f"of {', '.join(w.SIZES)} (small)")
    add("--strategy", type=words, default=["all"], metavar="A,B", help=f"of {', '.join(STRATEGIES)} (all)")
    add("--turns", type=w.positive, default=5, metavar="N", help="timed steps of each (5)")
    add("--together", type=w.positive, default=4, metavar="N", help="strategies in memory at a time (4)")
    add("--machine", metavar="NAME", help="a machine's name or TOML file: this one is not calibrated then")
    add("--tiny", action="store_true", help="models of nothing, for a try: the figures mean nothing")
    add("--keep", type=Path, metavar="FILE", help="write what was calibrated, a machine's TOML")
    add("-o", "--output", type=Path, metavar="FILE", help="write JSON")
    options = parser.parse_args(arguments)
    check_known("--size", options.size, tuple(w.SIZES))
    if options.strategy == ["all"]:
        even = world.current().size % 2 == 0
        options.strategy = [name for name in STRATEGIES if even or not name.startswith("HYBRID")]
    check_known("--strategy", options.strategy, STRATEGIES)
    if options.output and options.output.exists():
        raise ValueError(f"--output: {options.output} exists")
    return options


# -- both


def compare(mesh: DeviceMesh, options: argparse.Namespace) -> list[Row]:
    """All rows, on rank 0. Collective."""
    models = None
    if not options.machine:
        models = Models(calibration.TINY if options.tiny else calibration.MODELS, mesh)
        models.turn()
    rows, given = [], options.strategy
    groups = [given[start : start + options.together] for start in range(0, len(given), options.together)]
    for size in options.size:
        workload = workload_of(size, options.tiny)
        steps: dict[str, list[Step]] = {}
        for group in groups:
            steps |= measured(workload, group, mesh, models, options.turns)
            gc.collect()
        machine = Machine.load(options.machine) if models is None else calibrated(mesh, models, options)
        if mesh.rank == 0:
            rows += [
                Row(size, name, steps[name], simulated(workload, name, machine, mesh.size)) for name in given
            ]
    return rows


def workload_of(size: str, tiny: bool) -> w.Job:
    """The size's; or one as cheap as can be."""
    return w.Workload(layers=2, dim=32, heads=2, seq=16, batch=2, vocab=64) if tiny else w.SIZES[size]


def training_of(workload: w.Job, strategy: str, device: str, count: int) -> Training:
    """On a mesh of its own."""
    name = strategy.removesuffix(AGAIN)
    mesh = init_device_mesh(device, mesh_shape(name, count))
    return Training(workload, mesh, name, recompute=strategy.endswith(AGAIN))


def measured(
    workload: w.Job, strategies: Sequence[str], mesh: DeviceMesh, models: Models | None, turns: int
) -> dict[str, list[Step]]:
    """Steps by strategy, after one that is not timed. Collective."""
    trainings = {name: training_of(workload, name, "cpu", mesh.size) for name in strategies}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in strategies}
    for turn in range(1 + turns):
        if models is not None and turn:
            models.turn()
        first = turn % len(strategies)  # none is always the one that comes behind the models
        for name in (*strategies[first:], *strategies[:first]):
            training = trainings[name]
            batch = training.batch(turn)
            meet(mesh)
            busy, own = busy_seconds(), time.process_time()
            with timeline.record_all() as recorded:
                stamps = training.step(*batch)
            busy, own = busy_seconds() - busy, time.process_time() - own
            split = parts(stamps, recorded)
            if turn:
                found[name].append((stamps.seconds, sum(split[part] for part in EXPOSED), busy, own))
    every = told(mesh.communicator("control"), found)
    return {
        name: [_step(step) for step in zip(*(each[name] for each in every), strict=True)]
        for name in strategies
    }


def _step(each: Sequence[Sequence[float]]) -> Step:
    """Of what the ranks measured: seconds, exposed, processor time of the whole machine, and their own."""
    seconds, exposed, busy, own = zip(*each, strict=True)
    return Step(max(seconds), min(exposed), max(0.0, (max(busy) - sum(own)) / max(seconds)), max(own))


def calibrated(mesh: DeviceMesh, models: Models, options: argparse.Namespace) -> Machine:
    """What the models' turns, and bench.machine's other measurements, have found. Collective."""
    found = calibration.measured(mesh, models, tiny=options.tiny)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "today.toml"
        text = calibration.text_of(found, "today", facts("python -m bench.predicted"), mesh.size)
        path.write_text(text)
        if options.keep and mesh.rank == 0:
            options.keep.write_text(text)
        return Machine.load(path)


def simulated(workload: w.Job, strategy: str, machine: Machine, count: int) -> Step:
    """The same step on a machine."""

    def train() -> None:
        training = training_of(workload, strategy, "auto", count)
        for step in range(2):
            training.step(*training.batch(step))

    how = {"like": CPUDevice, "local_size": count, "shared": True, "stands_for": {0: range(count)}}
    timing = price(record_of(train, count, steps=2, **how), machine)
    return Step(timing.steps[0][-1], exposed(timing))


def exposed(timing: Timing) -> float:
    """As of a real step: what compute waited for streams, and collectives of its own."""
    begin, end = timing.window(0)
    kept = timing.recordings[0]
    own = timeline.Recording([span for span in kept.spans if begin <= span.start < end], kept.passed)
    found = parts(Stamps(begin, end, end, end, end), own)
    return sum(found[part] for part in EXPOSED)


# -- what comes of it


def result_of(rows: list[Row], count: int, options: argparse.Namespace) -> dict:
    """For a file: all rows, and what they are held against."""
    return {
        "ranks": count,
        "machine": options.machine or "calibrated by turns",
        **figures(rows),
        "rows": [
            {
                "size": row.size,
                "strategy": row.strategy,
                "measured_ms": [round(1e3 * step.seconds, 3) for step in row.measured],
                "simulated_ms": round(1e3 * row.simulated.seconds, 3),
                "error": round(row.error, 4),
                "processor_ms": [round(1e3 * step.processor, 3) for step in row.measured],
                "other_load": [round(step.others, 2) for step in row.measured],
                "exposed_ms": [round(1e3 * step.exposed, 3) for step in row.measured],
                "simulated_exposed_ms": round(1e3 * row.simulated.exposed, 3),
                "exposed_error": round(row.exposed_error, 4),
            }
            for row in rows
        ],
    }


def figures(rows: list[Row]) -> dict[str, float | list[str]]:
    """Median and worst error, worst of exposed communication, over all rows; and how strategies are ordered.

    wrong_order: pairs of a model's strategies that differ by APART and come in another order when simulated.
    (Two that are one program on these ranks, as hybrids of two nodes of one, are level there.)
    best: how much longer than the fastest measured the one takes that is fastest when simulated, at worst.
    """
    errors = [abs(row.error) for row in rows]
    wrong, best = [], 0.0
    for size in dict.fromkeys(row.size for row in rows):
        own = [row for row in rows if row.size == size]
        for a, b in combinations(sorted(own, key=lambda row: row.seconds[0]), 2):
            apart = b.seconds[0] / a.seconds[0] - 1 >= APART
            if apart and b.seconds[1] < a.seconds[1]:
                wrong.append(f"{size}: {a.strategy} before {b.strategy}")
        chosen = min(own, key=lambda row: row.seconds[1])
        best = max(best, chosen.seconds[0] / min(row.seconds[0] for row in own) - 1)
    return {
        "median_error": round(statistics.median(errors), 4),
        "worst_error": round(max(errors), 4),
        "worst_exposed_error": round(max(abs(row.exposed_error) for row in rows), 4),
        "wrong_order": wrong,
        "best": round(best, 4),
    }


def lines(rows: list[Row]) -> list[str]:
    """For people."""
    told = [
        f"{'ms':<36}{'measured':>10}{'simulated':>10}{'error':>8}{'exposed':>9}{'simulated':>10}{'error':>8}"
    ]
    for row in rows:
        step, waited = ([1e3 * each for each in pair] for pair in (row.seconds, row.exposed))
        text = f"{row.size + ', ' + row.strategy:<36}{step[0]:10.1f}{step[1]:10.1f}{100 * row.error:+7.1f}%"
        told.append(f"{text}{waited[0]:10.1f}{waited[1]:10.1f}{100 * row.exposed_error:+7.1f}%")
    found = figures(rows)
    told.append(
        f"{len(rows)} rows: median error {100 * found['median_error']:.1f} %, worst "
        f"{100 * found['worst_error']:.1f} %; exposed communication within "
        f"{100 * found['worst_exposed_error']:.1f} % of the step"
    )
    told.append(
        f"order of those {100 * APART:.0f} % apart: {'; '.join(found['wrong_order']) or 'right'}; the best "
        f"simulated takes {100 * found['best']:.1f} % more than the best measured, at most"
    )
    others = [step.others for row in rows for step in row.measured]
    told.append(
        f"{sum(each > DISTURBED for each in others)} of {len(others)} steps were disturbed: other processes "
        f"used more than {DISTURBED:.1f} cores meanwhile, {statistics.fmean(others):.2f} on average"
    )
    return told


if __name__ == "__main__":
    sys.exit(main())
