"""Times collectives in the manner of nccl-tests, ours next to the raw calls of MPI or NCCL.

    mpirun -n 2 shardrt bench collectives all_gather reduce_scatter -k mpi,shm -b 1K -e 256M
    shardrt bench collectives -t 4 -d all -e 1M         # ranks as threads
    mpirun -n 4 shardrt bench collectives all_reduce_perf -b 8 -e 128M -f 2      # nccl-tests' flags

Exit code 1 where an element was wrong, 2 for options that make no sense. docs/howto/benchmarks.md has the
columns.
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import psutil

from shardrt.comm import Communicator
from shardrt.comm.backends import CARRIERS
from shardrt.comm.objects import all_gather_object
from shardrt.device import Device

from ..harness import benchmark, communicators, picture
from ..harness.timing import measured
from ..replay import __main__ as replay
from . import options as command_line
from . import report, schema, splits
from .contestants import Contestant, Ours, RawMPI, RawNCCL
from .ops import ALIGNED, OPS
from .options import Group
from .picture import draw

_BUFFERS = 7  # of the largest size, that ours and the raw library have together
_FREE = 0.9  # the part of the free memory that may be taken


class Collectives(benchmark.Benchmark):
    """Times collectives as nccl-tests does, next to MPI's or NCCL's own calls.

    Names of ops such as all_reduce_perf work, too. NCCL_TESTS_SPLIT="MOD 2" runs groups of ranks at once.
    """

    name = "collectives"
    short_output = False  # -o is nccl-tests' --op

    def __init__(self) -> None:
        self._row: tuple[dict, ...] = ()  # the places of a line that is not complete
        self._left = 0  # places that are still to come
        self._raw = False  # whether there is a raw library
        self._section = ("", "")  # the communicator and op of the last line
        self._started = time.time()
        self._each = self._stamps = False

    def add_options(self, add: Callable) -> None:
        """nccl-tests' options, and --picture."""
        command_line.add_options(add)
        picture.add_option(add, "bandwidth over size, and percentiles with -I")

    def cases(self, options: argparse.Namespace, ranks: int) -> list[Group]:
        """Lines of the table, each a case in each place."""
        picture.check(options)
        self._least = report.least_bandwidth()
        self._colors = splits.colors(ranks)
        found = command_line.groups(options, self._colors.count(self._colors[0]))
        effort = {"each": bool(options.per_iter_timing), "blocking": options.blocking}
        options.effort = replace(options.effort, **effort, over_ranks=options.average)
        self._each, self._stamps = bool(options.per_iter_timing), bool(options.report_timestamps)
        self._file = None if options.output_file is None else schema.free(options.output_file)
        return found

    def head(self, options: argparse.Namespace, control: Communicator) -> str:
        """Which rank is where, as nccl-tests says it."""
        self._room = _room(options, control)
        on_gpu = any(kind in CARRIERS for kind in options.communicators)
        self._devices = schema.devices(control, self._colors[control.rank], on_gpu)
        found = [] if self._file is None else [f"# Writing JSON output to {self._file}"]
        if self._room < options.maxbytes:
            found.append(f"# Reducing maxBytes to {self._room} due to memory limitation")
        return "\n".join([*found, "#", "# Using devices", *map(schema.device_text, self._devices)])

    def lines(
        self, options: argparse.Namespace, cases: Sequence[Group], control: Communicator
    ) -> Iterator[dict]:
        """A record for each place, communicator after communicator."""
        cases = [group for group in cases if group[0].nbytes <= self._room]
        largest = -(-max(case.nbytes for group in cases for case in group) // ALIGNED) * ALIGNED
        color = self._colors[control.rank]
        among = control if len(set(self._colors)) == 1 else control.split(color, control.rank)
        grouped = color if among is not control else None
        for kind in options.communicators:
            with communicators.opened(kind, color=grouped) as (communicator, device):
                rivals = self._rivals(kind, communicator, device, largest, color)
                self._raw = "raw" in rivals
                for _ in range(options.run_cycles) if options.run_cycles else itertools.count():
                    for group in cases:
                        yield from self._records(kind, group, rivals, control, among, options)

    def _records(
        self,
        kind: str,
        group: Group,
        rivals: dict[str, Contestant],
        control: Communicator,
        among: Communicator,
        options: argparse.Namespace,
    ) -> Iterator[dict]:
        """The records of a line of the table."""
        offered = [case for case in group if any(rival.offers(case) for rival in rivals.values())]
        for place, case in enumerate(offered):
            bound = {who: each.bind(case, among) for who, each in rivals.items() if each.offers(case)}
            found = measured(bound, rivals["ours"].device, control, options.effort)
            self._left = len(offered) - place - 1
            yield report.record(kind, case, found, options.effort.one, options.per_iter_skip)

    def _rivals(
        self, kind: str, communicator: Communicator, device: Device, nbytes: int, color: int
    ) -> dict[str, Contestant]:
        """Ours and, where there is one of the same work, the raw library. Collective."""
        found: dict[str, Contestant] = {"ours": Ours(self.wrap(communicator), device, nbytes)}
        if kind == "nccl":
            found["raw"] = RawNCCL(communicator, nbytes)
        elif kind not in CARRIERS and communicators.under_mpi():
            found["raw"] = RawMPI(device, nbytes, color)
        return found

    def text(self, line: dict) -> str | None:
        """A line of the table when its places are complete, under its head where another op begins."""
        row = self._row = (*self._row, line)
        if self._left:
            return None
        self._row = ()
        columns = report.Columns(self._each, self._raw, self._stamps)
        text = report.text(row, columns)
        section = line["communicator"], line["op"]
        if section == self._section:
            return text
        self._section = section
        title = f"#\n# {line['communicator']}: {OPS[line['op']].title}"
        return "\n".join([title, report.head(columns), text])

    def tail(self, lines: Sequence[dict]) -> tuple[list[str], dict]:
        """Fits, single calls, the verdict; and nccl-tests' file."""
        fits, verdict = report.fits(lines), report.verdict(lines, self._least)
        text = [*map(report.fit_text, fits), *report.each_texts(lines), *verdict]
        return text, {"fits": fits, "verdict": [line.strip("# ") for line in verdict]}

    def failed(self, lines: Sequence[dict]) -> bool:
        """Whether elements are wrong, or a bandwidth is below NCCL_TESTS_MIN_BW."""
        slow = self._least is not None and min(report.bandwidths(lines).values()) < self._least
        return slow or super().failed(lines)

    def close(self, options: argparse.Namespace, lines: Sequence[dict]) -> None:
        """Write nccl-tests' file and the picture."""
        if options.picture is not None:
            draw(lines, options.picture)
        if self._file is not None:
            schema.write(self._file, schema.document(options, self._devices, lines, self._started))


def _room(options: argparse.Namespace, control: Communicator) -> int:
    """The largest size for which each rank has memory. Collective."""
    own = int(_FREE * psutil.virtual_memory().available / _BUFFERS / communicators.ranks_here(options))
    room = min(all_gather_object(control, own))
    if room < options.minbytes:
        least = f"-b: {options.minbytes} bytes are more than {room}, for which there is memory"
        raise benchmark.Refused(least)
    return room


def main(arguments: Sequence[str] | None = None, wrap: communicators.Wrap | None = None) -> int:
    """The exit code. `wrap` is put around the communicators that are timed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if any(word.partition("=")[0] == "--replay" for word in given):
        return replay.main(given)
    made = Collectives()
    if wrap is not None:
        made.wrap = wrap
    return benchmark.main(made, given)


if __name__ == "__main__":
    sys.exit(main())
