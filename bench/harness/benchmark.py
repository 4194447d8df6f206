"""What a benchmark is, and how one runs: options, ranks, lines as they come, exit code.

A benchmark is a subclass of Benchmark in a file of its own; bench/barrier.py is a short one. `main` runs it
on the ranks of mpirun, or on threads (-t).
"""

import argparse
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from shardrt.comm import Communicator, create, thread
from shardrt.train.errors import USAGE, launched_rank, one_line

from . import communicators, environment
from .command_line import Parser, add_forms, check_files, check_least, program
from .ranks import Ranks
from .table import Output
from .timing import Effort

_MOST = 10_000_000  # calls whose times are kept
FAILED = 1  # a check, or a file that could not be written after all


class Refused(ValueError):
    """What all ranks find alike, once MPI has started: one line, exit code 2."""


class Benchmark(ABC):
    """A table of cases, each measured and checked.

    Attributes:
        name: of the command: `shardrt bench NAME`, or `python -m bench.NAME` in a checkout.
        columns: of the table: the name of a figure in a line, and the format of its column.
        iters: -n where it is not given.
        communicates: whether it has -k, -t, -g, -n, -w, -c and --rounds: it times calls of communicators.
        short_output: whether -o is --output.
        wrap: put around the communicators that are timed.
    """

    name = ""
    iters = 20
    columns: Mapping[str, str] = {}
    communicates = True
    short_output = True
    wrap: communicators.Wrap = staticmethod(lambda communicator: communicator)

    @abstractmethod
    def add_options(self, add: Callable) -> None:
        """Add this benchmark's own options; `add` is argparse's add_argument."""

    @abstractmethod
    def cases(self, options: argparse.Namespace, ranks: int) -> Sequence[Any]:
        """All that is to be measured. Raises ValueError for options that make no sense."""

    @abstractmethod
    def lines(
        self, options: argparse.Namespace, cases: Sequence[Any], control: Communicator
    ) -> Iterator[dict]:
        """Measure; a line each, by the names of figures. "wrong" is more than 0 where a check failed.

        Collective. `control` is a communicator over all ranks for all that is not timed.
        """

    def head(self, options: argparse.Namespace, control: Communicator) -> str:
        """What stands above the lines. Collective."""
        return "# " + " ".join(f"{name:{_width(form)}}" for name, form in self.columns.items())

    def text(self, line: dict) -> str | None:
        """A line for a reader; None: it is kept for a later one."""
        return "  " + " ".join(_cell(line[name], form) for name, form in self.columns.items())

    def tail(self, lines: Sequence[dict]) -> tuple[list[str], dict]:
        """What follows the table: for a reader, and in the JSON object."""
        checked = [line["wrong"] for line in lines if line["wrong"] is not None]
        if not checked:
            return ["# wrong: not checked"], {"wrong": None}
        wrong = sum(checked)
        return [f"# wrong: {wrong}{'' if wrong else ' OK'}"], {"wrong": wrong}

    def failed(self, lines: Sequence[dict]) -> bool:
        """Whether the exit code is 1: something is wrong."""
        return any(line["wrong"] or line.get("raw_wrong") for line in lines)

    def close(self, options: argparse.Namespace, lines: Sequence[dict]) -> None:  # noqa: B027
        """Write what else the options ask for. Rank 0 calls it, when all is measured."""


def parser_of(benchmark: Benchmark) -> Parser:
    """Its own options, and those of all benchmarks."""
    parser = Parser(prog=program(benchmark.name), description=benchmark.__doc__, allow_abbrev=False)
    benchmark.add_options(parser.add_argument)
    if benchmark.communicates:
        communicators.add_options(parser.add_argument)
        add_effort(parser.add_argument, benchmark.iters)
    add_forms(parser, short=benchmark.short_output)
    return parser


def add_effort(add: Callable, iters: int = 20) -> None:
    """Add -n, -w, -c and --rounds: how often each case is measured and checked."""
    add("-n", "--iters", type=int, default=iters, metavar="N", help=f"timed calls in a row ({iters})")
    add("-w", "--warmup_iters", type=int, default=1, metavar="N", help="untimed calls (1)")
    add("-c", "--check", type=int, default=1, metavar="N", help="rounds of checking, 0 for none (1)")
    add("--rounds", type=int, default=3, metavar="N", help="of -n calls, contestants alternating (3)")


def effort_of(options: argparse.Namespace, **more: Any) -> Effort:
    """How often, as the options say. Raises ValueError."""
    least = {"-w": (options.warmup_iters, 0), "-n": (options.iters, 1), "-c": (options.check, 0)}
    check_least(least | {"--rounds": (options.rounds, 1)})
    if options.iters * options.rounds > _MOST:
        raise ValueError(f"-n: {options.rounds} rounds of {options.iters} calls are more than {_MOST} in all")
    return Effort(options.warmup_iters, options.iters, options.rounds, options.check, **more)


def main(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    """Run it; gives the exit code: 1 where a check failed. Options that make no sense exit with 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with one_line(USAGE):
        options = parser_of(benchmark).parse_args(given)
        options.given = " ".join([program(benchmark.name), *given])
        ranks, threads = communicators.launched_ranks(), 0
        if benchmark.communicates:
            communicators.check(options)
            options.effort = effort_of(options)
            ranks, threads = communicators.ranks_of(options)
        cases = benchmark.cases(options, ranks)
    return start(benchmark, options, cases, threads)


def start(benchmark: Benchmark, options: argparse.Namespace, cases: Sequence[Any], threads: int = 0) -> int:
    """Run it on this process, or on threads of it; gives the exit code.

    Without MPI, Ctrl-C and a closed pipe (`| head`) end it silently, with the exit codes of the two signals.
    """
    quiet = not communicators.under_mpi()  # else all ranks must end: shardrt.faults sees to it
    try:
        with one_line(USAGE, None if threads else Ranks()):
            if launched_rank() == 0:
                check_files(options)  # now, not after the measurement
        with one_line(USAGE, kinds=(Refused,)):
            if threads:
                return max(thread.run(threads, run, benchmark, options, cases))
            return run(benchmark, options, cases)
    except (BrokenPipeError, KeyboardInterrupt) as error:
        if not quiet:
            raise
        if isinstance(error, KeyboardInterrupt) and threads:
            os._exit(128 + signal.SIGINT)  # Python would end while the ranks' threads print, and abort
        if isinstance(error, KeyboardInterrupt):
            return 128 + signal.SIGINT
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in its buffer
        return 128 + signal.SIGPIPE


def run(benchmark: Benchmark, options: argparse.Namespace, cases: Sequence[Any]) -> int:
    """This rank's part: every line, printed by rank 0 as it is measured."""
    benchmark = copy(benchmark)  # ranks may be threads
    control = create("auto")
    facts = environment.facts(options.given) | {"ranks": control.size}
    output = Output(options, facts, benchmark.head(options, control), speaks=control.rank == 0)
    for line in benchmark.lines(options, cases, control):
        output.add(line, benchmark.text(line))
    text, more = benchmark.tail(output.lines)
    output.say(*text)
    output.close(**more)
    if control.rank == 0:
        with one_line(FAILED):
            benchmark.close(options, output.lines)
    return int(benchmark.failed(output.lines))


def _width(form: str) -> str:
    """Of a column: "<14" of "<14", ">10" of "10.2f"."""
    digits = form.rstrip("fd").partition(".")[0]
    return digits if digits[0] in "<>" else f">{digits}"


def _cell(value: Any, form: str) -> str:
    """A value, or "-" where there is none."""
    return format("-", _width(form)) if value is None else format(value, form)
