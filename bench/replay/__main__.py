"""Replays the communication of a recorded job on the ranks that run, with its gaps, alone and with compute.

    mpirun -n 2 python -m bench.collectives --replay DIR
    python -m bench.replay DIR -t 2 --modes alone --json

DIR has a Chakra trace NAME.RANK.et for each recorded rank (`shardrt simulate --chakra DIR` writes them), or
PARAM's basic traces or PyTorch's execution traces as RANK.json. Exit code 1 where an element was wrong, 2 for
traces that can't be replayed. docs/howto/benchmarks.md has the columns.
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from shardrt import device as devices
from shardrt.comm import Communicator, create, thread
from shardrt.comm.backends import CARRIERS
from shardrt.comm.objects import all_gather_object
from shardrt.train.errors import USAGE, launched_rank, one_line
from shardrt.untrusted import printable

from ..harness import communicators, environment
from ..harness.command_line import Parser, add_forms, check_known, check_least, program, words
from ..harness.table import Output
from . import chakra, param, report
from .check import wrong_elements
from .plan import Key, Plan, plan
from .proof import prove, shown
from .run import FILLED, MODES, Player, refuse_without_memory
from .trace import in_order


class Unfit(ValueError):
    """The traces can't be replayed on these ranks; raised on all of them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    with one_line(USAGE):
        options = parse(arguments)
        _, threads = communicators.ranks_of(options)
        if options.output is not None and launched_rank() == 0:
            options.output.touch()  # now, not after the measurement
    with one_line(USAGE, kinds=(Unfit,)):
        if threads:
            return max(thread.run(threads, run, options))
        return run(options)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Raises ValueError."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = Parser(prog=program("replay"), description="Replays a job's communication.", allow_abbrev=False)
    add = parser.add_argument
    add(
        "folder", nargs="?", type=Path, metavar="DIR", help="traces: Chakra's NAME.RANK.et, PARAM's RANK.json"
    )
    add("--replay", type=Path, metavar="DIR", help="the same, as bench.collectives has it")
    add("--modes", type=words, default=list(MODES), metavar="A,B", help=f"{', '.join(MODES)} (all)")
    fill = "compute as long as the trace does, or as much as a core does in that time (time)"
    add("--fill", choices=("time", "work"), default="time", help=fill)
    communicators.add_options(add)
    add("-n", "--iters", type=int, default=5, metavar="N", help="timed replays of each mode, alternating (5)")
    add("-w", "--warmup_iters", type=int, default=1, metavar="N", help="untimed replays of each mode (1)")
    add_forms(parser)
    options = parser.parse_args(given)
    if options.replay and options.folder:
        raise ValueError(f"--replay: takes no more than its folder, got {str(options.folder)!r}")
    options.folder = options.replay or options.folder
    options.given = " ".join([program("replay"), *given])
    communicators.check(options)
    check_known("--modes", options.modes, MODES)
    check_least({"-n": (options.iters, 1), "-w": (options.warmup_iters, 0)})
    if not options.modes or len(options.communicators) != 1:
        raise ValueError("--modes, -k: name at least one mode and one communicator")
    if options.communicators[0] in CARRIERS:
        raise ValueError(f"-k: {options.communicators[0]} is for arrays of a GPU; a replay is of the CPU's")
    if options.folder is None or not options.folder.is_dir():
        raise ValueError(f"{options.folder or 'DIR'}: no such folder of traces")
    if communicators.ranks_of(options)[0] < 2:
        raise ValueError("replay: needs 2 ranks, and this run has one; start it with mpirun -n 2, or -t 2")
    return options


def run(options: argparse.Namespace) -> int:
    """This rank's part. Rank 0 prints."""
    device = devices.get("cpu")
    devices.set_current(device)
    control = create("auto")
    made, keys = planned(options.folder, control)
    base = create(options.communicators[0])
    counted = Counter()
    for each in all_gather_object(control, dict(made.counted)):
        counted.update(each)
    facts = (
        environment.facts(options.given) | {"ranks": control.size} | described(made, counted, control.size)
    )
    output = Output(options, facts, report.HEAD, speaks=control.rank == 0)
    player = Player(made, keys, base, control, device)
    measured = report.Measured(made, {}, wrong_elements(player))
    player.zero()
    rounds = {mode: [] for mode in options.modes}
    for number in range(options.warmup_iters + options.iters):
        for mode in options.modes:
            played = player.play(mode, options.fill == "work")
            if number >= options.warmup_iters:
                rounds[mode].append(played)
    measured = report.Measured(made, rounds, measured.wrong)
    own = [report.of_rank(measured, names) for names in (False, True)]
    everyone = all_gather_object(control, [*own, report.of_all(measured, player.rate)])
    player.close()
    rows, named = (report.together([each[which] for each in everyone]) for which in (0, 1))
    for row in rows:
        output.add(row, report.text(row))
    wrong = sum(row["wrong"] for row in rows)
    names = report.exposed_names(named) if FILLED in options.modes else []
    total = report.totals(rows, [each[2] for each in everyone])
    if wrong:
        total = {name: value if name == "trace_ms" else None for name, value in total.items()}
    verdict = f"# wrong elements: {wrong}{'' if wrong else ' OK'}"
    exposed = report.exposed_text(names, total["compute_gflop_s"] is not None)
    output.say(*exposed, verdict, *report.last_lines(total))
    output.close(names=named, exposed=names, total=total, wrong=wrong)
    return int(wrong > 0)


def planned(folder: Path, control: Communicator) -> tuple[Plan, list[Key]]:
    """This rank's plan, and the communicators of all ranks' plans. Collective.

    Raises:
        Unfit: on all ranks, with the text of the first rank that found a fault.
    """
    made, fault = None, None
    try:
        made = _own(folder, control.rank, control.size)
    except (ValueError, OSError) as error:
        fault = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
    _agree(control, fault)
    everyone = all_gather_object(control, shown(made))
    keys = sorted({Key(tuple(item[2][0]), item[2][1]) for items in everyone for item in items if item[2]})
    try:
        prove(everyone)
        fault = None
    except ValueError as error:
        fault = str(error)
    if not keys:
        fault = fault or f"{folder}: has no communication between the {control.size} ranks that run here"
    _agree(control, fault)
    try:
        refuse_without_memory(made, control, psutil.virtual_memory().available)
    except ValueError as error:
        fault = str(error)
    _agree(control, fault)
    return made, keys


def _own(folder: Path, rank: int, ranks: int) -> Plan:
    """This rank's plan. Raises ValueError, OSError."""
    reader = chakra if any(path.suffix == ".et" for path in folder.iterdir()) else param
    files = reader.files(folder)
    if not files:
        raise ValueError(f"{folder}: has no traces: neither NAME.RANK.et nor RANK.json")
    last = max(files) + 1
    recorded = rank if rank in files else max((each for each in files if each < rank), default=min(files))
    lone = reader is param and len(files) == 1  # of all ranks
    trace = reader.read(files[recorded], rank if lone else recorded, ranks if lone else last)
    if rank != trace.rank and rank not in trace.alike:
        raise ValueError(f"{folder}: no trace of rank {rank}, and none that stands for it")
    return plan(in_order(trace), rank, ranks)


def _agree(control: Communicator, fault: str | None) -> None:
    """Raise Unfit on all ranks if one has a fault. Collective."""
    faults = all_gather_object(control, fault)
    for found in faults:
        if found is not None:
            raise Unfit(printable(found))


def described(made: Plan, counted: Counter[str], ranks: int) -> dict[str, str]:
    """What is replayed, and what is not as it was, for the head."""
    trace = made.trace
    changes = [f"{count} {what}" for what, count in sorted(counted.items())]
    if ranks < trace.world:
        changes.insert(0, f"{ranks} of {trace.world} ranks")
        changes.append(
            "a rank's slice keeps its bytes, a sum and a broadcast their size; figures are of this machine "
            "at this number of ranks"
        )
    facts = {
        "trace": f"{trace.kind} of {trace.world} ranks, {len(trace.nodes)} nodes of rank {trace.rank}",
        "mapped": "; ".join(changes) or "every rank does what it did in the trace",
        **({"notes": "; ".join(trace.notes)} if trace.notes else {}),
    }
    return {name: printable(text) for name, text in facts.items()}


if __name__ == "__main__":
    sys.exit(main())
