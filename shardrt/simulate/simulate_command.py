"""`python -m shardrt simulate --ranks N --machine M -- SCRIPT ...`: a step on ranks that are not there."""

import argparse
import json
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardrt.untrusted import printable, say

DATA = 65  # no such script or machine, or no step in it


def add_to(commands: Any) -> None:
    """Add `simulate` to argparse's subparsers."""
    told = "say what a step of a script would take on a machine, without it"
    parser = commands.add_parser("simulate", help=told, description=told)
    parser.add_argument("--ranks", type=_positive, default=1, metavar="N", help="in all (1)")
    parser.add_argument(
        "--machine", default="h100-8", metavar="NAME", help="a machine's name, or its TOML file (h100-8)"
    )
    parser.add_argument(
        "--steps", type=_positive, default=2, metavar="N", help="optimizer steps to run; the last is told (2)"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the last step for Perfetto")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--norm", choices=("large", "small"), default="large", help="of gradients: clipped or not (large)"
    )
    parser.add_argument("--overflow", action="store_true", help="GradScaler finds one")
    parser.add_argument(
        "--record",
        type=int,
        nargs="+",
        default=[0],
        metavar="R",
        help="ranks, one of each pipeline stage (0)",
    )
    parser.add_argument("script", nargs="+", metavar="SCRIPT", help="or a module, and its options, after --")
    parser.set_defaults(run=simulate)


def simulate(options: argparse.Namespace) -> int:
    """Record, price, print; gives the exit code."""
    from shardrt.simulate.machine import Machine

    try:
        machine = Machine.load(options.machine)
        found, timing, spans = _simulated(options, machine)
    except (FileNotFoundError, ValueError) as error:
        say(f"error: {error}", file=sys.stderr)
        return DATA
    if options.trace:
        _write_trace(timing, spans, found, options.trace)
    if options.json:
        print(json.dumps(asdict(found) | {"tokens_per_s": found.tokens_per_s}, indent=1))
    else:
        say(printable(str(found), lines=True), lines=True)
    return 0


def _simulated(options: argparse.Namespace, machine: Any) -> tuple[Any, Any, Any]:
    """(the report, the timing, spans by places of items); what they need is imported where it is used."""
    from shardrt import device
    from shardrt.device import timeline
    from shardrt.device.cpu import CPUDevice
    from shardrt.device.cuda import CUDADevice
    from shardrt.simulate.clock import price
    from shardrt.simulate.report import report
    from shardrt.simulate.script import record
    from shardrt.simulate.values import Values

    def place() -> float:
        return float(len(device.current().program.items))

    like = CPUDevice if machine.host_link is None else CUDADevice
    values = Values(clips=options.norm == "large", overflow=options.overflow)
    how = {"steps": options.steps, "like": like, "values": values, "local_size": machine.ranks_per_node}
    stands_for = _stands_for(options.record, options.ranks)
    with timeline.record_all(place) as kept:
        programs = record(options.script, options.ranks, stands_for=stands_for, **how)
    spans = kept.spans if len(programs) == 1 else []  # of several ranks nobody says whose they are
    timing = price(programs, machine)
    counts = [len(ranks) for ranks in stands_for.values()]
    return report(programs, machine, spans, counts, timing), timing, spans


def _stands_for(record: list[int], ranks: int) -> dict[int, range]:
    """Each recorded rank speaks for itself and those up to the next. ValueError for one out of the world."""
    firsts = sorted(set(record))
    if firsts[0] != 0 or firsts[-1] >= ranks:
        raise ValueError(f"--record: ranks from 0 up to {ranks - 1}, and 0 among them, not {record}")
    return {rank: range(rank, stop) for rank, stop in pairwise([*firsts, ranks])}


def _write_trace(timing: Any, spans: Any, found: Any, path: Path) -> None:
    """The last step, as one of a run that is traced."""
    from shardrt.simulate.phases import traced
    from shardrt.train.trace import events_of, names_of, write

    events = events_of(traced(timing, spans), found.rank, timing.window(0)[0])
    named = names_of(found.rank, f"{found.machine}, simulated", events)
    write([*named, *events], {"ranks": found.ranks, "steps": [found.step, found.step]}, path)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number
