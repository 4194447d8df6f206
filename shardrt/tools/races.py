"""`python -m shardrt races -- script.py`: whether waits order every two conflicting uses of memory.

Exit code 0 where there is no race, 1 where there is one, 2 where there is no script, 65 where it fails or
does nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from shardrt.device.program import Program, Step
from shardrt.simulate.proof import prove
from shardrt.tools.scripts import FAILED, add_recording, recording
from shardrt.untrusted import say

RACES = 1


def add_to(commands: Any) -> None:
    """Add `races` to argparse's subparsers."""
    message = "prove of a script's steps, without running them, that waits put all uses of memory in order"
    parser = commands.add_parser("races", help=message, description=message)
    add_recording(parser)
    parser.set_defaults(run=check)


def check(options: argparse.Namespace) -> int:
    """Record the script and print the proof; returns the exit code."""
    code, programs = recording(options)
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
