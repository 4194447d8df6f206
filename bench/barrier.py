"""Times a barrier of each communicator next to MPI's, as osu_barrier does: the shortest of our benchmarks.

mpirun -n 2 shardrt bench barrier -n 1000
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from shardrt.comm import Communicator
from shardrt.comm import world as worlds
from shardrt.comm.objects import all_gather_object

from .harness import benchmark, communicators
from .harness.stats import slowest, stats
from .harness.timing import Contestant, measured


class Barrier(benchmark.Benchmark):
    """Times a barrier of each communicator next to MPI's."""

    name = "barrier"
    columns = {"communicator": "<12", "how": "<6"}
    columns |= {"p50_us": "10.2f", "p99_us": "10.2f", "max_us": "10.2f", "wrong": "5d"}

    def add_options(self, add: Callable) -> None:
        """None of its own."""

    def cases(self, options: argparse.Namespace, ranks: int) -> list[str]:
        """The communicators."""
        return options.communicators

    def lines(
        self, options: argparse.Namespace, cases: Sequence[str], control: Communicator
    ) -> Iterator[dict]:
        """A line for ours and one for MPI's, of single calls on the slowest rank."""
        for kind in cases:
            with communicators.opened(kind, self.wrap) as (communicator, device):
                calls = {"ours": partial(communicator.barrier, stream=device.current_stream)}
                if communicators.under_mpi():
                    calls["mpi4py"] = mpi_barrier()
                rivals = {how: Contestant(call, checked(call, control)) for how, call in calls.items()}
                found = measured(rivals, device, control, replace(options.effort, each=True))
            for how, each in found.items():
                of = stats(1e6 * slowest(each.each))
                figures = {"p50_us": of.p50, "p99_us": of.p99, "max_us": of.max}
                figures = dict.fromkeys(figures) if each.wrong else figures
                yield {"communicator": kind, "how": how, **figures, "wrong": each.wrong}


def mpi_barrier() -> Callable:
    """MPI's own, over all ranks. Collective."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup().Barrier


def checked(barrier: Callable, control: Communicator) -> Callable[[int], int] | None:
    """The check of a barrier; None on several nodes, which have no clock in common."""
    world = worlds.current()
    return partial(early, barrier, control) if world.local_size == world.size else None


def early(barrier: Callable, control: Communicator, round_: int) -> int:
    """Whether this rank left a barrier before the last rank came."""
    time.sleep(0.002 if round_ % control.size == control.rank else 0)
    came = time.monotonic()
    barrier()
    left = time.monotonic()
    return int(left < max(all_gather_object(control, came)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    return benchmark.main(Barrier(), arguments)


if __name__ == "__main__":
    sys.exit(main())
