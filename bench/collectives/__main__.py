"""Times collectives in the manner of nccl-tests, ours beside the raw calls of MPI or NCCL.

    mpirun -n 2 python -m bench.collectives all_gather reduce_scatter -k mpi,shm -b 1K -e 256M
    python -m bench.collectives -t 4 -d all -e 1M       # ranks as threads
    mpirun -n 4 python -m bench.collectives all_reduce -b 8 -e 128M -f 2      # nccl-tests' flags

Exit code 1 where an element was wrong, 2 for options that make no sense. docs/howto/benchmarks.md has the
columns.
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import sys
from collections.abc import Callable, Iterator

from shardrt import device as devices
from shardrt.comm import Communicator, create, mpi_world, thread
from shardrt.comm import world as worlds
from shardrt.comm.backends import CARRIERS, for_device
from shardrt.train.errors import USAGE, launched_rank, one_line

from ..harness import environment
from ..harness.table import Output
from . import report
from .contestants import Contestant, Ours, RawMPI, RawNCCL
from .measure import Effort, line
from .ops import Case
from .options import cases, parse

Wrap = Callable[[Communicator], Communicator]


def main(arguments: list[str] | None = None, wrap: Wrap = lambda communicator: communicator) -> int:
    """The exit code. `wrap` is put around the communicators that are timed."""
    with one_line(USAGE):
        options = parse(arguments)
        launched = mpi_world.launch()
        threads = options.nthreads if options.nthreads > 1 else 0
        ranks = threads or (launched.size if launched else 1)
        todo = cases(options, ranks)
        if options.output is not None and launched_rank() == 0:
            options.output.touch()  # now, not after the measurement
    if threads:
        return max(thread.run(threads, run, options, todo, wrap))
    return run(options, todo, wrap)


def run(options: argparse.Namespace, todo: list[Case], wrap: Wrap) -> int:
    """This rank's part: every line, printed by rank 0 as it is measured."""
    control = create("auto")
    facts = environment.facts(options.given) | {"ranks": control.size}
    output = Output(options, facts, report.HEAD, speaks=control.rank == 0)
    for found in measured(options, todo, control, wrap):
        output.add(found, report.text(found))
    fits, verdict = report.fits(output.lines), report.verdict(output.lines)
    output.say(*map(report.fit_text, fits), verdict)
    output.close(fits=fits, verdict=verdict.strip("# "))
    return int(any(found["wrong"] or found["raw_wrong"] for found in output.lines))


def measured(
    options: argparse.Namespace, todo: list[Case], control: Communicator, wrap: Wrap
) -> Iterator[dict]:
    """A line for each communicator and case. Collective."""
    times = options.warmup_iters, options.iters, options.rounds, options.check
    effort = Effort(*times, options.blocking, options.average)
    nbytes = max(case.nbytes for case in todo)
    for kind in options.kinds:
        ours, raw = _contestants(kind, nbytes, wrap)
        for case in options.run_cycles * todo:
            if ours.offers(case) or (raw is not None and raw.offers(case)):
                yield line(kind, case, ours, raw, control, effort)


def _contestants(kind: str, nbytes: int, wrap: Wrap) -> tuple[Contestant, Contestant | None]:
    """Ours and, where there is one of the same work, the raw library. Collective."""
    if kind in CARRIERS:
        device = devices.get(f"cuda:{worlds.current().local_rank % devices.KINDS['cuda'].count()}")
        devices.set_current(device)
        communicator = for_device(create("auto"), device, kind, "gather")
        raw = RawNCCL(communicator, nbytes) if kind == "nccl" else None
        return Ours(wrap(communicator), device, nbytes), raw
    device = devices.get("cpu")
    devices.set_current(device)
    communicator = create(kind)
    raw = RawMPI(device, nbytes) if worlds.current().kind == "mpi" else None
    return Ours(wrap(communicator), device, nbytes), raw


if __name__ == "__main__":
    sys.exit(main())
