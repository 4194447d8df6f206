"""`python -m shardrt simulate --ranks N --machine M -- SCRIPT ...`: a step on simulated ranks.

Exit code 0; 2 where there is no such script, machine or rank, or a file can't be written; 65 where the script
fails or makes no step.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardrt.simulate import chakra
from shardrt.simulate.machine import Machine
from shardrt.simulate.phases import traced
from shardrt.simulate.step import Simulated, simulated
from shardrt.simulate.values import Values
from shardrt.tools.scripts import (
    USAGE,
    add_machine,
    add_mesh,
    add_script,
    name_of,
    of_script,
    positive,
    seconds,
    wrong_mesh,
)
from shardrt.train.trace import events_of, names_of, write
from shardrt.untrusted import say


def add_to(commands: Any) -> None:
    """Add `simulate` to argparse's subparsers."""
    message = "say what a step of a script would take on a machine, without it"
    parser = commands.add_parser("simulate", help=message, description=message)
    add_machine(parser)
    parser.add_argument(
        "--steps",
        type=positive,
        default=2,
        metavar="N",
        help="optimizer steps to run; the report is of the last (2)",
    )
    add_mesh(parser)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the last step for Perfetto")
    parser.add_argument(
        "--chakra",
        type=Path,
        metavar="DIR",
        help="write a Chakra trace of the last step of each recorded rank",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--norm", choices=("large", "small"), default="large", help="of gradients: clipped or not (large)"
    )
    parser.add_argument("--overflow", action="store_true", help="GradScaler finds one")
    parser.add_argument(
        "--record", metavar="R,R", help="ranks, each for itself and those up to the next (one of each role)"
    )
    parser.add_argument(
        "--check-roles", type=positive, default=0, metavar="N", help="compare N more ranks of each role"
    )
    parser.add_argument(
        "--jitter",
        type=seconds,
        default=0.0,
        metavar="S",
        help="standard deviation of ranks' arrivals, s (0)",
    )
    add_script(parser)
    parser.set_defaults(run=simulate)


def simulate(options: argparse.Namespace) -> int:
    """Record, price and print; returns the exit code."""
    try:
        machine = Machine.load(options.machine)
        if wrong := wrong_mesh(options):
            raise ValueError(wrong)
        stands_for = _stands_for(options.record, options.ranks) if options.record else None
        if options.chakra:
            _check_chakra(options.chakra)
    except (ImportError, OSError, ValueError) as error:
        say(f"error: {error}", file=sys.stderr)
        return USAGE

    def message(command: Sequence[str]) -> Simulated:
        return simulated(
            command,
            options.ranks,
            machine,
            steps=options.steps,
            stands_for=stands_for,
            shape=options.mesh,
            values=Values(clips=options.norm == "large", overflow=options.overflow),
            check=options.check_roles,
            jitter=options.jitter,
        )

    code, done = of_script(options, message)
    if done is None:
        return code
    found = done.report
    if options.trace:
        _write_trace(done, options.trace)
    if options.chakra:
        try:
            chakra.write(done.timing, machine, options.chakra, name_of(options.command))
        except OSError as error:
            say(f"error: --chakra: {error}", file=sys.stderr)
            return USAGE
    if options.json:
        say(json.dumps(asdict(found) | {"tokens_per_s": found.tokens_per_s}, indent=1), lines=True)
    else:
        say(str(found), lines=True)
    return 0


def _stands_for(record: str, ranks: int) -> dict[int, range]:
    """Each recorded rank stands for itself and the ranks up to the next recorded rank."""
    firsts = sorted({int(rank) if rank.isdecimal() else -1 for rank in record.split(",")})
    if firsts[0] != 0 or firsts[-1] >= ranks:
        raise ValueError(f"--record: must be ranks from 0 to {ranks - 1}, with 0 among them, got {record}")
    return {rank: range(rank, stop) for rank, stop in pairwise([*firsts, ranks])}


def _check_chakra(folder: Path) -> None:
    """Raises ImportError without mlc-chakra, and OSError if traces can't be written: before the recording."""
    try:
        chakra.schema()
    except ImportError as error:
        raise ImportError(f"--chakra: {error}; pip install 'shardrt[chakra]'") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"--chakra: can't write to {folder}: {error.strerror}") from None


def _write_trace(done: Simulated, path: Path) -> None:
    """Write the last step like the trace of a real run."""
    found = done.report
    events = events_of(traced(done.timing, done.spans), found.rank, done.timing.window(0)[0])
    named = names_of(found.rank, f"{found.machine}, simulated", events)
    write([*named, *events], {"ranks": found.ranks, "steps": [found.step, found.step]}, path)
