"""Simulated steps beside measured ones, on this machine, which is calibrated and measured by turns.

    python -m bench.predicted --size small,gpt2,llama-100m -o predicted.json
    python -m bench.predicted --size small --machine cpu-2     # a file's figures instead of today's

Each round calibrates (bench.machine, whose models are others), then runs each strategy (bench.step), and
simulates it on what the round's calibration found: a machine that drifts moves both. A step's time is told by
the median of rounds; its exposed communication is what compute waited for and did itself of it, by the traces
of both (bench/parts.py).
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from bench import ranks
from bench import workload as w
from bench.command_line import Parser, check_known, words
from bench.environment import facts, write_result
from bench.parts import EXPOSED, parts
from bench.quiet import announce, watched
from bench.step import mesh_shape
from bench.training import Stamps, Training
from shardrt.comm import init_device_mesh
from shardrt.device.cpu import CPUDevice
from shardrt.fsdp import ShardingStrategy
from shardrt.simulate.clock import Timing, price
from shardrt.simulate.machine import Machine
from shardrt.simulate.script import record_of

RECOMPUTED = "FULL_SHARD, recomputed"
STRATEGIES = (*(strategy.name for strategy in ShardingStrategy), RECOMPUTED)
APART = 0.03  # strategies that differ by less may come in any order


@dataclass(frozen=True)
class Step:
    """Seconds of a rank's step, and of its exposed communication."""

    seconds: float
    exposed: float


@dataclass
class Row:
    """A model and a strategy: measured and simulated, round by round."""

    size: str
    strategy: str
    measured: list[Step]
    simulated: list[Step]

    @property
    def seconds(self) -> tuple[float, float]:
        """(measured, simulated): medians."""
        return tuple(statistics.median(s.seconds for s in each) for each in (self.measured, self.simulated))

    @property
    def exposed(self) -> tuple[float, float]:
        """The same of exposed communication."""
        return tuple(statistics.median(s.exposed for s in each) for each in (self.measured, self.simulated))

    @property
    def error(self) -> float:
        """Of the step: simulated over measured, less 1; the median over rounds."""
        pairs = zip(self.measured, self.simulated, strict=True)
        return statistics.median(there.seconds / here.seconds - 1 for here, there in pairs)

    @property
    def exposed_error(self) -> float:
        """Simulated less measured exposed communication, over the measured step."""
        here, there = self.exposed
        return (there - here) / self.seconds[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, simulate, print; gives the exit code."""
    with ranks.refusal():
        options = parse(arguments)
        rows = compare(options)
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    result = facts(f"python -m bench.predicted {given}".rstrip()) | result_of(rows, options)
    print("\n".join(lines(rows)))
    if options.output:
        write_result(options.output, result)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options. Raises ValueError."""
    parser = Parser(prog="python -m bench.predicted", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--size", type=words, default=["small"], metavar="A,B", help=f"of {', '.join(w.SIZES)} (small)")
    add("--strategy", type=words, default=["all"], metavar="A,B", help=f"of {'; '.join(STRATEGIES)} (all)")
    add("--ranks", type=w.positive, default=2, metavar="N", help="of one thread (2)")
    add("--rounds", type=w.positive, default=1, metavar="R", help="(1)")
    add("--steps", type=w.positive, default=3, metavar="N", help="timed steps per run (3)")
    add("--machine", metavar="NAME", help="a machine's name or TOML file: this one is not calibrated then")
    add("--tiny", action="store_true", help="models of nothing, for a try: the figures mean nothing")
    add("--patience", type=float, default=0, metavar="SECONDS", help="per run, for an idle machine (0)")
    add("-o", "--output", type=Path, metavar="FILE", help="write JSON")
    options = parser.parse_args(arguments)
    check_known("--size", options.size, tuple(w.SIZES))
    if options.strategy == ["all"]:
        even = options.ranks % 2 == 0
        options.strategy = [name for name in STRATEGIES if even or not name.startswith("HYBRID")]
    options.strategy = [RECOMPUTED if name == "recomputed" else name for name in options.strategy]
    check_known("--strategy", options.strategy, STRATEGIES)
    if options.output and options.output.exists():
        raise ValueError(f"--output: {options.output} exists")
    return options


# -- both


def compare(options: argparse.Namespace) -> list[Row]:
    """All rows; each round of a size is a turn of calibrating and of all strategies."""
    rows = []
    announce(options.rounds * len(options.size) * (1 + len(options.strategy)), options.patience)
    for size in options.size:
        workload = workload_of(size, options.tiny)
        own = [Row(size, strategy, [], []) for strategy in options.strategy]
        for number in range(options.rounds):
            machine = Machine.load(options.machine) if options.machine else calibrated(options)
            for row in own:
                row.measured.append(measured(workload, row.strategy, options))
                row.simulated.append(simulated(workload, row.strategy, machine, options.ranks))
                told = f"{row.measured[-1].seconds * 1e3:.1f} ms, {row.simulated[-1].seconds * 1e3:.1f}"
                print(f"round {number + 1}, {size}, {row.strategy}: {told} simulated", file=sys.stderr)
        rows += own
    return rows


def workload_of(size: str, tiny: bool) -> w.Job:
    """The size's; or one as cheap as can be."""
    return w.Workload(layers=2, dim=32, heads=2, seq=16, batch=2, vocab=64) if tiny else w.SIZES[size]


def calibrated(options: argparse.Namespace) -> Machine:
    """What bench.machine finds now."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out = Path(folder) / "today.toml"
        ranks.mpirun(["-m", "bench.machine", "--out", str(out), *(["--tiny"] * options.tiny)], options.ranks)
        return Machine.load(out)


def measured(workload: w.Job, strategy: str, options: argparse.Namespace) -> Step:
    """By bench.step, of its slowest rank."""
    words = [*workload.arguments(), "--strategy", strategy.partition(",")[0]]
    words += ["--steps", str(options.steps), "--warmup", "1"]
    words += ["--recompute"] * (strategy == RECOMPUTED)
    found = watched(lambda: ranks.step(words, options.ranks), options.patience)
    return Step(found["step_ms_median"] / 1e3, found["exposed_ms"] / 1e3)


def simulated(workload: w.Job, strategy: str, machine: Machine, count: int) -> Step:
    """The same step on a machine."""
    name = strategy.partition(",")[0]

    def train() -> None:
        mesh = init_device_mesh("auto", mesh_shape(name, count))
        training = Training(workload, mesh, name, recompute=strategy == RECOMPUTED)
        for step in range(2):
            training.step(*training.batch(step))

    (program,) = record_of(train, count, steps=2, like=CPUDevice, local_size=count, shared=True)
    timing = price([program], machine)
    return Step(timing.steps[0][-1], exposed(timing))


def exposed(timing: Timing) -> float:
    """As bench.step has it of a real step: what compute waited for streams, and collectives of its own."""
    begin, end = timing.window(0)
    kept = timing.recordings[0]
    own = type(kept)([span for span in kept.spans if begin <= span.start < end], kept.passed)
    found = parts(Stamps(begin, end, end, end, end), own)
    return sum(found[part] for part in EXPOSED)


# -- what comes of it


def result_of(rows: list[Row], options: argparse.Namespace) -> dict:
    """For a file: all rows, and what they are held against."""
    return {
        "ranks": options.ranks,
        "rounds": options.rounds,
        "machine": options.machine or "calibrated in each round",
        **figures(rows),
        "load_average": list(os.getloadavg()),
        "rows": [
            {
                "size": row.size,
                "strategy": row.strategy,
                "measured_ms": [round(1e3 * step.seconds, 3) for step in row.measured],
                "simulated_ms": [round(1e3 * step.seconds, 3) for step in row.simulated],
                "error": round(row.error, 4),
                "exposed_ms": [round(1e3 * step.exposed, 3) for step in row.measured],
                "simulated_exposed_ms": [round(1e3 * step.exposed, 3) for step in row.simulated],
                "exposed_error": round(row.exposed_error, 4),
            }
            for row in rows
        ],
    }


def figures(rows: list[Row]) -> dict[str, float | list[str]]:
    """Median and worst error, worst of exposed communication, over all rows; and how strategies are ordered.

    wrong_order: pairs of a model's strategies that differ by APART and come in another order when simulated.
    best: how much longer than the fastest measured the one takes that is fastest when simulated, at worst.
    """
    errors = [abs(row.error) for row in rows]
    wrong, best = [], 0.0
    for size in dict.fromkeys(row.size for row in rows):
        own = [row for row in rows if row.size == size]
        for a, b in combinations(sorted(own, key=lambda row: row.seconds[0]), 2):
            apart = b.seconds[0] / a.seconds[0] - 1 >= APART
            if apart and b.seconds[1] <= a.seconds[1]:
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
    return told


if __name__ == "__main__":
    sys.exit(main())
