"""`python -m shardrt plan --ranks N --machine M --memory GB -- train ...`: the fastest ways to train.

Exit code 0; 1 where no plan fits in memory, 2 where there is no such script, machine or option, 65 where the
script fails in all settings.
"""

import argparse
import importlib
import json
import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

from shardrt.simulate.machine import Machine
from shardrt.simulate.plan import COMMUNICATION, COMPUTING, HOST, MEMORY, Found, Plan, search
from shardrt.simulate.rounding import suggested
from shardrt.simulate.script import expanded
from shardrt.simulate.space import Candidate, candidates, combinations, words_for, words_of
from shardrt.simulate.step import Simulated, simulated
from shardrt.tools.scripts import FAILED, USAGE, add_machine, add_script, of_script, positive
from shardrt.train.config import read_toml
from shardrt.train.errors import describe_error
from shardrt.train.options import last_of
from shardrt.untrusted import say

NONE_FITS = 1
TRAINING = ("models.train", "shardrt.models.train")  # whose options are known
_PARTS = (COMPUTING, COMMUNICATION, HOST, MEMORY)
_SHOWN = 5  # lines of refusals in the text output
_BEST = 10
_MINUTES = 5


def add_to(commands: Any) -> None:
    """Add `plan` to argparse's subparsers."""
    what = "find the fastest way to train on a machine within its memory, by simulating many"
    parser = commands.add_parser("plan", help=what, description=what)
    add_machine(parser)
    parser.add_argument(
        "--memory", type=_above_zero, required=True, metavar="GB", help="of 10^9 bytes on each rank's device"
    )
    parser.add_argument(
        "--host-memory", type=_above_zero, default=inf, metavar="GB", help="of each rank's host (no limit)"
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="OPTION=A,B",
        help="an option of the script, and what to try for it; may be repeated",
    )
    parser.add_argument("--only", action="store_true", help="vary nothing but what --vary names")
    parser.add_argument("--tries", type=positive, metavar="N", help="simulate so many at most (no limit)")
    parser.add_argument(
        "--minutes", type=_above_zero, default=_MINUTES, metavar="N", help=f"end after so long ({_MINUTES})"
    )
    parser.add_argument("--steps", type=positive, default=2, metavar="N", help="as in simulate (2)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_script(parser)
    parser.set_defaults(run=plan)


def plan(options: argparse.Namespace) -> int:
    """Search and print; returns the exit code."""
    command = options.command[options.command[:1] == ["--"] :]
    try:
        machine = Machine.load(options.machine)
        vary = _varied(options.vary)
        space = _space(options, command, machine, vary)
    except (OSError, ValueError) as error:
        say(f"error: {describe_error(error)}", file=sys.stderr)
        return USAGE

    def simulate(candidate: Candidate) -> Simulated:  # as the command that is printed for it
        return simulated(space.script(candidate), options.ranks, machine, steps=options.steps)

    limits = {"device": options.memory * 1e9, "host": options.host_memory * 1e9}

    def found_of(words: Sequence[str]) -> tuple[Found, list[Plan]]:
        found = search(
            space.candidates,
            simulate,
            limits,
            best=_BEST,
            tries=options.tries,
            seconds=60 * options.minutes,
            on_found=lambda found: _progress(found, len(space.candidates)),
        )
        if options.only:
            return found, []
        hosts = -(-options.ranks // machine.ranks_per_node)
        return found, suggested(found, space.words, simulate, limits, given=space.given, hosts=hosts)

    code, both = of_script(options, found_of)
    if both is None:
        return code
    found, rounding = both
    if options.json:
        rows = [_row(each, space) for each in rounding]
        say(json.dumps(_table(found, space, machine) | {"rounding": rows}, indent=1), lines=True)
    else:
        say("\n".join(_lines(found, rounding, space, machine)), lines=True)
    return 0 if found.best else NONE_FITS if found.over or not found.refused else FAILED


@dataclass(frozen=True)
class _Space:
    """The settings to try, and the words for a candidate.

    words: of the command's own settings. given: options that stay as they are, or that --vary names.
    """

    options: argparse.Namespace
    command: Sequence[str]
    candidates: Sequence[Candidate]
    words: Mapping[str, str]
    given: Collection[str] = ()

    def changed(self, candidate: Candidate) -> list[str]:
        """The words appended to the command for a candidate."""
        options = candidate.options
        return words_for({name: word for name, word in options.items() if self.words.get(name) != word})

    def script(self, candidate: Candidate) -> list[str]:
        """The script with its options."""
        return [*self.command, *self.changed(candidate)]

    def simulate(self, candidate: Candidate) -> str:
        """The command that simulates a candidate, for a shell."""
        chosen = self.options
        words = ["--ranks", str(chosen.ranks), "--machine", chosen.machine]
        words += ["--steps", str(chosen.steps)] if chosen.steps != 2 else []
        return shlex.join(["python", "-m", "shardrt", "simulate", *words, "--", *self.script(candidate)])


def _space(
    options: argparse.Namespace, command: Sequence[str], machine: Machine, vary: Mapping[str, Sequence[str]]
) -> _Space:
    """The search space. Raises ValueError or OSError for invalid settings."""
    words = expanded(command)
    name, *arguments = words[words[:1] == ["-m"] :] or [""]
    if name not in TRAINING:
        if not vary:
            raise ValueError("--vary: name the options of your script to try; those of `train` are known")
        return _Space(options, command, combinations(vary), {})
    recipe, given = _module(name).parse(arguments), _given(arguments)
    found = candidates(
        recipe,
        given=given,
        ranks=options.ranks,
        node=machine.ranks_per_node,
        vary=vary,
        only=options.only,
        offload=machine.host_link is not None,
    )
    return _Space(options, command, found, words_of(recipe), given | vary.keys())


def _module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for a module that is run
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ValueError(f"{name}: no such script or module") from None


def _given(arguments: Sequence[str]) -> set[str]:
    """The options that the command line names, or the file that it names."""
    found = {word[2:].partition("=")[0].replace("-", "_") for word in arguments if word.startswith("--")}
    file = last_of(arguments, "--config")
    for name, value in read_toml(Path(file)).items() if file else ():
        found |= {f"{name}.{key}" for key in value} if isinstance(value, dict) else {name}
    return found


def _varied(given: Sequence[str]) -> dict[str, list[str]]:
    found = {}
    for each in given:
        name, equals, words = each.partition("=")
        if not equals or not name or not all(words.split(",")):
            raise ValueError(f"--vary {each}: must be OPTION=A,B, as fsdp.prefetch=1,2,3")
        found[name.removeprefix("--").replace("-", "_")] = words.split(",")
    return found


def _above_zero(text: str) -> float:
    """For argparse: a positive number."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def _progress(found: Found, all_of: int) -> None:
    """On a terminal, update a progress line."""
    if sys.stderr.isatty():
        left_out = (
            len(found.too_large) + len(found.slower) + sum(each.skipped for each in found.refused.values())
        )
        shown = f"; best {found.best[0].report.ms:,.1f} ms" if found.best else ""
        end = "\r" if found.tried + left_out < all_of else "\n"
        print(f"tried {found.tried}, left out {left_out} of {all_of}{shown}", end=end, file=sys.stderr)


# -- for programs


def _table(found: Found, space: _Space, machine: Machine) -> dict[str, Any]:
    return {
        "machine": machine.name,
        "measured": machine.measured,
        "ranks": space.options.ranks,
        "candidates": len(space.candidates),
        "tried": found.tried,
        "dropped": {"too large": len(found.too_large), "no faster": len(found.slower)},
        "same": len(found.same),
        "left": found.left,
        "late": found.late,
        "plans": [_row(each, space) for each in found.best[:_BEST]],
        "over": [_row(each, space) for each in found.over[:_BEST]],
        "refused": [
            {
                "line": each.line,
                "times": each.times,
                "skipped": each.skipped,
                "simulate": space.simulate(each.first),
            }
            for each in found.refused.values()
        ],
    }


def _row(each: Plan, space: _Space) -> dict[str, Any]:
    report = each.report
    return {
        "ms": report.ms,
        "tokens": report.tokens,
        "tokens_per_s": report.tokens_per_s,
        "mfu": report.mfu,
        "hfu": report.hfu,
        "rank": each.rank,
        "device_bytes": each.bytes(),
        "host_bytes": each.bytes("host"),
        "memory": each.memory,
        "shares": each.shares,
        "binds": each.binds,
        "options": dict(each.candidate.options),
        "script": space.script(each.candidate),
        "simulate": space.simulate(each.candidate),
    }


# -- for people


def _lines(found: Found, rounding: Sequence[Plan], space: _Space, machine: Machine) -> list[str]:
    chosen, lines = space.options, []
    limit = f"{chosen.memory:g} GB on each device"
    if found.best:
        tokens = found.best[0].report.tokens
        each = f", {tokens:,} tokens a step" if tokens else ""
        lines.append(f"{chosen.ranks:,} ranks on {machine.name}{each}, within {limit}: the best of")
    else:
        lines.append(f"{chosen.ranks:,} ranks on {machine.name}: no plan fits within {limit}, of")
    lines += [_counts(found, space), ""]
    if found.best:
        lines.append(
            f"{'':3}{'ms':>10}{'tokens/s':>13}{'MFU %':>7}{'GB':>7}{'host GB':>9}"
            f"{'computing %':>13}{'communication %':>17}{'host %':>8}{'memory %':>10}  options"
        )
    for number, each in enumerate(found.best[:_BEST], start=1):
        lines.append(f"{number:2} {_figures(each)}  {' '.join(space.changed(each.candidate)) or '-'}")
    lines += [""] * bool(found.best)
    for number, each in enumerate(found.best[:_BEST], start=1):
        lines.append(f"{number:2} {space.simulate(each.candidate)}")
    lines += [""] * bool(found.best) + _failures(found, space)
    if rounding:
        lines.append("faster, if training may round more:")
    for each in rounding:
        lines += [f"   {_figures(each)}  {' '.join(space.changed(each.candidate))}"]
        lines += [f"   {space.simulate(each.candidate)}"]
    if not machine.measured:
        lines.append(f"measured = false: {machine.name} was not measured, so these figures are estimates")
    return lines


def _counts(found: Found, space: _Space) -> str:
    refused = sum(each.times for each in found.refused.values())
    skipped = sum(each.skipped for each in found.refused.values())
    too_large, slower, same = len(found.too_large), len(found.slower), len(found.same)
    text = (
        f"{len(space.candidates):,} candidates: {found.tried:,} tried, of which {len(found.best) + same:,} "
        f"fit ({same:,} bitwise identical to another), {len(found.over):,} did not fit and {refused:,} were "
        f"refused; pruned {too_large:,} that need at least as much memory as one that did not fit, "
        f"{slower:,} that can't be among the best"
    )
    if skipped:
        text += f", {skipped:,} like refused ones"
    if found.left:
        text += f"; {found.left:,} left"
        if found.late:
            text += f" when {space.options.minutes:g} minutes were over (--minutes)"
    return text


def _figures(each: Plan) -> str:
    report, shares = each.report, each.shares
    widths = zip(_PARTS, (13, 17, 8, 10), strict=True)
    return (
        f"{report.ms:10,.1f}{report.tokens_per_s:13,.0f}{100 * report.mfu:7.1f}{each.bytes() / 1e9:7.1f}"
        f"{each.bytes('host') / 1e9:9.1f}" + "".join(f"{100 * shares[part]:{n}.1f}" for part, n in widths)
    )


def _failures(found: Found, space: _Space) -> list[str]:
    """Why the best failed candidates failed."""
    lines = []
    if found.over:
        each = found.over[0]
        lines.append(
            f"the fastest that does not fit: {each.report.ms:,.1f} ms with {each.bytes() / 1e9:.1f} GB on "
            f"the device of rank {each.rank}, {each.bytes('host') / 1e9:.1f} GB on its host"
        )
        for place, parts in each.memory.items():
            shown = (f"{category or 'other'} {nbytes / 1e9:.1f}" for category, nbytes in parts.items())
            if parts:
                lines.append(f"   {place}, GB: {', '.join(shown)}")
        lines.append(f"   {space.simulate(each.candidate)}")
    most = sorted(found.refused.values(), key=lambda each: each.times + each.skipped, reverse=True)
    for refused in most[:_SHOWN]:
        lines.append(f"refused {refused.times}, not tried {refused.skipped}: {refused.line}")
        lines.append(f"   {space.simulate(refused.first)}")
    if len(most) > _SHOWN:
        lines.append(f"and {len(most) - _SHOWN} other refusals")
    return lines
