"""`shardrt prove -- script.py`: whether each step of a script computes the sums that it says, on any machine.

Exit code 0 where all is proved, 1 where something is wrong or not known, 2 where there is no script, 65 where
it fails or does nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from shardrt.device.program import Collective, Program, Step
from shardrt.simulate.calls import mismatches, unordered
from shardrt.simulate.deadlocks import deadlock
from shardrt.simulate.memory import peaks
from shardrt.simulate.provenance import Follow, followed
from shardrt.simulate.races import races_both_ways
from shardrt.simulate.updates import share
from shardrt.tools.scripts import FAILED, add_recording, positive, recording
from shardrt.untrusted import say

CHECKS = ("order", "races", "gradients", "memory")
WRONG = 1


def add_to(commands: Any) -> None:
    """Add `prove` to argparse's subparsers."""
    message = (
        "prove of a script's steps, without running them, that gradients arrive once and waits order memory"
    )
    parser = commands.add_parser("prove", help=message, description=message)
    parser.add_argument("--order", action="store_true", help="only: no deadlock, calls match")
    parser.add_argument("--races", action="store_true", help="only: waits order all uses of memory")
    parser.add_argument("--gradients", action="store_true", help="only: each gradient is updated with once")
    parser.add_argument("--memory", action="store_true", help="only: the most memory of each rank")
    parser.add_argument(
        "--at-most", type=positive, metavar="BYTES", help="that a rank may take on the device"
    )
    add_recording(parser)
    parser.set_defaults(run=check)


def check(options: argparse.Namespace) -> int:
    """Record the script and print what is proved; returns the exit code."""
    chosen = [name for name in CHECKS if getattr(options, name)] or list(CHECKS)
    if options.shared and options.device != "cuda" and "gradients" in chosen:
        say("gradients: left out, since ranks share memory; prove them without --shared", file=sys.stderr)
        chosen.remove("gradients")
    with followed() as follow:
        code, programs = recording(options, follow if "gradients" in chosen else None)
    if programs is None:
        return code
    if not all(any(isinstance(item, Step) for item in program.items) for program in programs):
        say("error: the script made no optimizer step, so nothing was proved", file=sys.stderr)
        return FAILED
    found = {
        "order": lambda: _order(programs),
        "races": lambda: _races(programs),
        "gradients": lambda: _gradients(follow),
        "memory": lambda: _memory(programs, options.at_most),
    }
    right = True
    for name in chosen:
        wrong, lines = found[name]()
        right &= not wrong
        say(
            "\n".join([f"{name}: {'NOT PROVED' if wrong else 'proved'}", *(f"  {line}" for line in lines)]),
            lines=True,
        )
    return 0 if right else WRONG


def _order(programs: Sequence[Program]) -> tuple[bool, list[str]]:
    wrong = mismatches(programs) + [str(waiting) for waiting in deadlock(programs)]
    try:
        wrong += unordered(programs)
    except ValueError as error:  # said already, where it is a deadlock
        wrong = wrong or [str(error)]
    calls = sum(isinstance(item, Collective) for program in programs for item in program.items)
    said = f"{calls} collectives of {len(programs)} recorded rank{'s' * (len(programs) > 1)} match"
    return bool(wrong), wrong or [said, "no rank waits for ever, though sends wait for receives"]


def _races(programs: Sequence[Program]) -> tuple[bool, list[str]]:
    try:
        known, hidden = races_both_ways(programs)
    except ValueError as error:
        return True, [str(error)]
    lines = [line for race in (*known, *hidden)[:4] for line in str(race).splitlines()]
    return bool(known or hidden), lines or ["no race, at any speed of host, streams and links"]


def _gradients(follow: Follow) -> tuple[bool, list[str]]:
    findings = follow.findings
    if findings:
        return True, [line for finding in findings[:4] for line in str(finding).splitlines()]
    checks = [follower.checks for follower in follow.followers]
    updates, reads, outside, lossless = (
        sum(getattr(each, name) for each in checks) for name in ("updates", "reads", "outside", "lossless")
    )
    if not updates:
        return True, ["no update of a sharded unit"]
    scales = sorted({scale for each in checks for scale, _ in each.weights.values()})
    losses = sorted(set().union(*(each.of_losses for each in checks)))
    return False, [
        f"{updates} updates use each rank's gradient once, as the mesh says, with weight {_some(scales)}",
        *([f"each position of a loss has weight {_some(losses)} in them"] if losses else []),
        f"{reads} reads of gathered parameters find the newest",
        *([f"{lossless} gradients are of no loss that is followed"] if lossless else []),
        *([f"{outside} updates of parameters in no unit are not followed"] if outside else []),
    ]


def _some(numbers: Sequence[float]) -> str:
    said = list(dict.fromkeys(map(share, numbers)))
    return ", ".join(said[:4]) + (", ..." if len(said) > 4 else "")


def _memory(programs: Sequence[Program], at_most: int | None) -> tuple[bool, list[str]]:
    most = {
        program.rank: sum(peaks(program, 0, len(program.items) - 1).get("device", {}).values())
        for program in programs
    }
    over = at_most is not None and max(most.values()) > at_most
    return over, [f"rank {rank}: {nbytes:,} bytes at most" for rank, nbytes in most.items()]
