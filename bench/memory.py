"""What holds the memory of a training step: what was planned, and what the system counts, by kind.

Each way to train has processes of its own. `memory_plan` says what shardrt allocates; the system's figures
(/proc/self/smaps) hold besides the interpreter, libraries, and the other ranks' parts of what ranks share:
RSS counts these pages for each rank, PSS once in all. --turns says instead what each way costs in time: a
step of each by turns, in the same processes.

    python -m bench.memory --ranks 2 --size gpt2
    python -m bench.memory --ranks 2 --size gpt2 --turns 16
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench import figures as f
from bench import ranks
from bench import workload as w
from bench.command_line import Parser, check_known, words
from bench.training import Training, gathered
from shardrt.comm import init_device_mesh, world
from shardrt.device import cpu
from shardrt.fsdp import buffers, memory_plan
from shardrt.kernels.cpu import linear
from shardrt.train.errors import USAGE, one_line

# Name -> (rows of logits at a time, whole gradients of long units, inputs kept that could be made again,
# gradients that keep their memory when nobody reads them).
WAYS = {
    "default": (0, False, False, False),
    "inputs kept": (0, False, True, False),
    "whole gradients": (0, True, False, False),
    "pages kept": (0, False, False, True),
    "all of these": (0, True, True, True),
    "logits in chunks": (128, False, False, False),
}
KINDS = {"of ranks together": "memfd:", "libraries": "/", "heap and arrays": ""}


def arguments() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.memory", description="What holds the memory of a training step.")
    w.add_shape(parser)
    parser.add_argument("--strategy", default="FULL_SHARD", metavar="NAME", help="(FULL_SHARD)")
    parser.add_argument("--ranks", type=w.positive, default=2, metavar="N", help="(2)")
    parser.add_argument("--ways", type=words, default=list(WAYS), help=f"of {', '.join(WAYS)} (all)")
    parser.add_argument("--turns", type=w.natural, default=0, metavar="R", help="rounds of steps by turns")
    parser.add_argument("--json", action="store_true", help="print only the last line, one JSON object")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the JSON object there, too")
    return parser


def main() -> None:
    with one_line(USAGE):
        options = arguments().parse_args()
        check_known("--ways", options.ways, WAYS)
        workload = w.workload_of(options)
    if world.launch() is None:
        with one_line(USAGE, kinds=(RuntimeError,)):
            start(options, workload)
    elif options.turns:
        by_turns(options, workload)
    else:
        measure(options, workload)


def start(options: argparse.Namespace, workload: w.Job) -> None:
    """Ranks for each way, or for all of them by turns; prints the table."""
    common = [*workload.arguments(), "--strategy", options.strategy, "--turns", str(options.turns)]
    groups = [options.ways] if options.turns else [[way] for way in options.ways]
    rows = []
    for ways in groups:
        told = ranks.mpirun(["-m", "bench.memory", *common, "--ways", ",".join(ways)], options.ranks)
        rows += json.loads(told.splitlines()[-1])
    told = [f"{workload}, {options.strategy} on {options.ranks} ranks"]
    told += times(rows) if options.turns else table(rows)
    f.show({"workload": workload.facts(), "ranks": options.ranks, "ways": rows}, told, options)


def training(way: str, workload: w.Job, mesh: object, strategy: str) -> Training:
    """One that trains as `way` says, if its steps run under `set_to` that."""
    return Training(workload, mesh, strategy, loss_chunk=WAYS[way][0])


@contextmanager
def set_to(way: str) -> Iterator[None]:
    """Inside a with block what is chosen when slots are made, and when a layer runs, is as `way` says."""
    before = buffers.IN_PIECES, linear.INPUT_AGAIN, cpu.LENDS
    _, whole, kept, pages_kept = WAYS[way]
    buffers.IN_PIECES = sys.maxsize if whole else before[0]
    linear.INPUT_AGAIN = before[1] and not kept
    cpu.LENDS = before[2] and not pages_kept
    try:
        yield
    finally:
        buffers.IN_PIECES, linear.INPUT_AGAIN, cpu.LENDS = before


def measure(options: argparse.Namespace, workload: w.Job) -> None:
    """Two steps; rank 0 prints the figures of the largest rank."""
    (way,) = options.ways
    mesh = init_device_mesh("cpu")
    with set_to(way):
        trained = training(way, workload, mesh, options.strategy)
        batch = trained.batch(0)
        plan = memory_plan(trained.model, step=lambda: trained.model(*batch).backward()).device
        for number in range(2):
            trained.step(*trained.batch(number))
        peak = f.process_peak_mb()  # before the pages are read, which takes memory itself
        with f.sampled(pages) as seen:
            trained.step(*trained.batch(2))
    kinds = max(seen, key=lambda kinds: sum(rss for rss, _ in kinds.values()))
    own = [peak, *(value for kind in KINDS for value in kinds[kind])]
    everyones = gathered(own, mesh)
    if mesh.rank == 0:
        peak, *largest = everyones[everyones[:, 0].argmax()].round(1).tolist()
        pairs = dict(zip(KINDS, zip(largest[::2], largest[1::2], strict=True), strict=True))
        planned = {name: round(nbytes / 1e6, 1) for name, nbytes in plan.items()}
        row = {"way": way, "peak_rss_mb": peak, "pss_mb": round(sum(largest[1::2]), 1)}
        row |= {"job_pss_mb": round(float(everyones[:, 2::2].sum()), 1), "planned_mb": planned}
        row |= {"rss_and_pss_mb": pairs, "loss": trained.losses[-1]}
        print(json.dumps([row]), flush=True)


def pages() -> dict[str, tuple[float, float]]:
    """`by_kind` of this process now."""
    with open("/proc/self/smaps", encoding="utf-8") as file:
        return by_kind(file)


def by_kind(smaps: Iterable[str]) -> dict[str, tuple[float, float]]:
    """(RSS, PSS) in 10^6 bytes of each of KINDS, from the lines of /proc/self/smaps."""
    found, kind = {kind: [0.0, 0.0] for kind in KINDS}, ""
    for line in smaps:
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            path = (line.split(None, 5) + [""])[5]
            kind = next(kind for kind, mark in KINDS.items() if mark in path)
        elif line.startswith(("Rss:", "Pss:")):
            found[kind][line.startswith("Pss:")] += int(line.split()[1]) * 1024 / 1e6
    return {kind: tuple(values) for kind, values in found.items()}


def by_turns(options: argparse.Namespace, workload: w.Job) -> None:
    """A step of each way by turns; rank 0 prints the ratios of its times to those of the first way."""
    mesh = init_device_mesh("cpu")
    made = {way: training(way, workload, mesh, options.strategy) for way in options.ways}
    seconds = {way: [] for way in made}
    for number in range(options.turns + 2):
        for way in list(made)[:: 1 if number % 2 else -1]:
            with set_to(way):
                stamps = made[way].step(*made[way].batch(number))
            seconds[way].append(stamps.seconds)
    everyones = gathered([second for way in made for second in seconds[way][2:]], mesh)
    if mesh.rank == 0:
        slowest = everyones.reshape(mesh.size, len(made), options.turns).max(0)
        rows = []
        for way, own in zip(made, slowest, strict=True):
            ratios = own / slowest[0]
            low, middle, high = np.percentile(ratios, [25, 50, 75]).round(4).tolist()
            row = {"way": way, "step_ms": round(1e3 * statistics.median(own), 1)}
            row |= {"of_the_first": middle, "quartiles": [low, high], "loss": made[way].losses[-1]}
            rows.append(row)
        print(json.dumps(rows), flush=True)


def table(rows: list[dict]) -> list[str]:
    """The memory of each way for a reader, in MB."""
    names = list(dict.fromkeys(name for row in rows for name in row["planned_mb"]))
    lines = [[""] + [row["way"] for row in rows]]
    lines += [[f"planned: {n}", *(f"{row['planned_mb'].get(n, 0):.0f}" for row in rows)] for n in names]
    lines += [["planned together", *(f"{sum(row['planned_mb'].values()):.0f}" for row in rows)]]
    for kind in KINDS:
        pairs = [row["rss_and_pss_mb"][kind] for row in rows]
        lines.append([f"RSS (PSS): {kind}", *(f"{rss:.0f} ({pss:.0f})" for rss, pss in pairs)])
    lines += [["peak RSS of the largest rank", *(f"{row['peak_rss_mb']:.0f}" for row in rows)]]
    lines += [["PSS of the same", *(f"{row['pss_mb']:.0f}" for row in rows)]]
    lines += [["PSS of all ranks", *(f"{row['job_pss_mb']:.0f}" for row in rows)]]
    return ["".join(f"{cell:<30}" if i == 0 else f"{cell:>18}" for i, cell in enumerate(x)) for x in lines]


def times(rows: list[dict]) -> list[str]:
    """The times of each way for a reader."""
    return [
        f"{row['way']:<20}{row['step_ms']:10.1f} ms   {row['of_the_first']:.3f} "
        f"({row['quartiles'][0]:.3f} to {row['quartiles'][1]:.3f}) of the first"
        for row in rows
    ]


if __name__ == "__main__":
    main()
