"""`python -m shardrt races -- script.py`: whether waits order every two conflicting uses of memory.

Exit code 0 where there is no race, 1 where there is one, 2 where there is no script, 65 where it fails or
does nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from shardrt.device.cpu import CPUDevice
from shardrt.device.cuda import CUDADevice
from shardrt.device.program import Program, Step
from shardrt.simulate.proof import prove
from shardrt.simulate.script import record
from shardrt.tools.scripts import FAILED, USAGE, add_script, of_script, positive
from shardrt.untrusted import say

RACES = 1
DEVICES = {"cuda": CUDADevice, "cpu": CPUDevice}


def add_to(commands: Any) -> None:
    """Add `races` to argparse's subparsers."""
    message = "prove of a script's steps, without running them, that waits put all uses of memory in order"
    parser = commands.add_parser("races", help=message, description=message)
    parser.add_argument("--ranks", type=positive, default=2, metavar="N", help="how many there are (2)")
    parser.add_argument("--steps", type=positive, default=2, metavar="N", help="optimizer steps (2)")
    parser.add_argument("--device", choices=DEVICES, help="what it would run on (cuda; with --shared cpu)")
    parser.add_argument("--each", action="store_true", help="record every rank, not one of each role")
    parser.add_argument(
        "--shared", action="store_true", help="ranks are CPUs of a node, which share memory; as --each"
    )
    add_script(parser)
    parser.set_defaults(run=check)


def check(options: argparse.Namespace) -> int:
    """Record the script and print the proof; returns the exit code."""
    if options.shared and options.device == "cuda":
        say("error: --shared: only CPUs share memory, not --device cuda", file=sys.stderr)
        return USAGE
    each = {rank: [rank] for rank in range(options.ranks)} if options.each or options.shared else None
    code, programs = of_script(
        options,
        lambda command: record(
            command,
            options.ranks,
            steps=options.steps,
            like=DEVICES[options.device or ("cpu" if options.shared else "cuda")],
            stands_for=each,
            local_size=options.ranks if options.shared else 8,
            shared=options.shared,
        ),
    )
    if programs is None:
        return code
    if not all(program.items for program in programs):
        say("error: the script did nothing on a device, so nothing was proved", file=sys.stderr)
        return FAILED
    proof = prove(programs)
    say(f"{_reported(programs)}\n\n{proof}", lines=True)
    return RACES if proof.races or proof.hidden else 0


def _reported(programs: Sequence[Program]) -> str:
    """The subject of the proof."""
    which = ", ".join(str(program.rank) for program in programs)
    steps = min(sum(isinstance(item, Step) for item in program.items) for program in programs)
    items = sum(len(program.items) for program in programs)
    ranks = f"rank{'s' if len(programs) > 1 else ''} {which} of {programs[0].world_size}"
    return f"{ranks}: {steps} optimizer step{'s' if steps != 1 else ''}, {items} items"
