"""Times a collective while matmuls run, next to both alone, as PARAM's commsComputeBench and OSU's osu_i* do.

    mpirun -n 2 python -m bench.overlap all_gather reduce_scatter -b 64K -e 16M
    mpirun -n 2 python -m bench.overlap --test-calls 10 --picture overlap.png
    python -m bench.overlap -t 2 --side 128 --matmuls 8     # ranks as threads, no MPI

Never run on a GPU. docs/howto/benchmarks.md has the columns.
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from shardrt import device as devices
from shardrt.comm import Communicator
from shardrt.comm import world as worlds
from shardrt.comm.objects import all_gather_object
from shardrt.device import Device

from .collectives.ops import NONE, OPS, Case, rounded
from .collectives.started import InStream, NonBlocking
from .harness import benchmark, picture
from .harness.command_line import check_known, check_least, check_memory
from .harness.communicators import opened, ranks_here, under_mpi
from .harness.picture import Curve
from .harness.sizes import add_sizes, sizes_of
from .harness.timing import Contestant, Effort, Measured, measured
from .harness.values import count_wrong, poison

PLACES = {"all_gather": "in", "reduce_scatter": "out", "all_reduce": "in", "all_to_all": "out"}  # as in FSDP
WAYS = ("alone", "compute", "serial", "together")


class Overlap(benchmark.Benchmark):
    """Times a collective while matmuls run, next to both alone."""

    name = "overlap"
    columns = {
        **{"communicator": "<12", "op": "<14", "by": "<6", "bytes": "10d", "matmuls": "7d"},
        **{f"{way}_us": "11.2f" for way in WAYS},
        **{"overlap_pct": "11.1f", "min_pct": "8.1f", "max_pct": "8.1f"},
        **{"bus_gb_s": "8.2f", "bus_together_gb_s": "17.2f"},
        **{"gflop_s": "8.2f", "gflop_together_s": "16.2f", "wrong": "5d"},
    }

    def add_options(self, add: Callable) -> None:
        add("ops", nargs="*", default=list(PLACES), metavar="OP", help=f"{', '.join(PLACES)} (all)")
        add_sizes(add, "64K", "16M", 16)
        add("--side", type=int, default=256, metavar="N", help="rows of the square float32 matrices (256)")
        many = "matmuls per collective (as many as take about as long as the collective)"
        add("--matmuls", type=int, metavar="N", help=many)
        tests = "calls of Test() between the matmuls, for mpi4py's collectives (0)"
        add("--test-calls", type=int, default=0, metavar="N", help=tests)
        picture.add_option(add, "times and overlap over size")

    def cases(self, options: argparse.Namespace, ranks: int) -> list[Case]:
        check_known("OP", options.ops, PLACES)
        fixed = 1 if options.matmuls is None else options.matmuls
        least = {"--side": (options.side, 1), "--matmuls": (fixed, 1)}
        check_least(least | {"--test-calls": (options.test_calls, 0)})
        picture.check(options)
        check_memory("-e", 4 * options.maxbytes, ranks_here(options))
        check_memory("--side", 12 * options.side**2, ranks_here(options))
        sizes = sizes_of(options)
        found = [case_of(name, size, ranks) for name in dict.fromkeys(options.ops) for size in sizes]
        if not all(case.nbytes for case in found):
            raise ValueError(f"-b: {options.minbytes} bytes are less than one float32 for each rank")
        return found

    def head(self, options: argparse.Namespace, control: Communicator) -> str:
        ranks, threads = worlds.current().local_size, devices.get("cpu").kernels.threads()
        cores = len(set().union(*all_gather_object(control, list(os.sched_getaffinity(0)))))
        room = "" if cores >= ranks * (threads + 1) else ", too few for both at once"
        self.threads = f"{threads} for matmuls + 1 for collectives, on each of {ranks} ranks of a node"
        self.threads += f"; {cores} cores{room}"
        return f"# threads: {self.threads}\n{super().head(options, control)}"

    def tail(self, lines: Sequence[dict]) -> tuple[list[str], dict]:
        text, more = super().tail(lines)
        return text, more | {"threads": self.threads}

    def lines(
        self, options: argparse.Namespace, cases: Sequence[Case], control: Communicator
    ) -> Iterator[dict]:
        most = max(case.nbytes for case in cases)
        for kind in options.communicators:
            with opened(kind) as (communicator, device):
                libraries = {"ours": InStream(self.wrap(communicator), device, most)}
                if under_mpi() and device.in_host_memory:
                    libraries["mpi4py"] = NonBlocking(device, most, options.test_calls)
                matmuls = Matmuls(device, options.side)
                for case in cases:
                    pairs = {by: Pair(case, each, matmuls, control) for by, each in libraries.items()}
                    for by, figures in _measured(pairs, options.matmuls, options.effort).items():
                        yield {"communicator": kind, "op": case.op.name, "by": by, **figures}

    def close(self, options: argparse.Namespace, lines: Sequence[dict]) -> None:
        if options.picture is not None:
            draw(lines, options.picture)


class Matmuls:
    """Square float32 matmuls of the device's own kernels. bits: of the latest result; right: of any."""

    def __init__(self, device: Device, side: int) -> None:
        self.device, self.flops = device, 2 * side**3
        operands = np.random.default_rng(0).standard_normal((2, side, side), np.float32)
        out = device.empty((side, side), np.float32)
        self._one = partial(device.kernels.matmul.matmul, *map(device.asarray, operands), out)
        self.bits = out.reshape(-1).view(np.int32)
        self.run(2)  # the first may try several libraries
        self.right = device.to_numpy(self.bits).copy()

    def run(self, count: int, test: Callable = lambda: None, tests: int = 0) -> None:
        """Run so many; `test` is called `tests` times, spread over them."""
        for done in range(count):
            self._one()
            for _ in range(tests * (done + 1) // count - tests * done // count):
                test()


class Pair:
    """A collective and `count` matmuls: each alone, one after the other, and both at once."""

    def __init__(
        self, case: Case, library: InStream | NonBlocking, matmuls: Matmuls, control: Communicator
    ) -> None:
        self.case, self.matmuls, self.control, self.count = case, matmuls, control, 1
        self._library, self._arrays = library, library.arrays(case)
        for array in self._arrays:
            array.fill(0)  # sums of what was summed before would run out of their type
        self._start = partial(library.start, getattr(library, case.op.name)(*self._arrays, case))

    def alone(self) -> None:
        self._start()
        self._library.finish()

    def compute(self) -> None:
        self.matmuls.run(self.count)

    def serial(self) -> None:
        self.alone()
        self.compute()

    def together(self) -> None:
        self._start()
        self.matmuls.run(self.count, self._library.test, self._library.tests)
        self._library.finish()

    def calibrate(self) -> None:
        """Take as many matmuls as take about as long as the collective, the same number on all ranks."""
        both = {"alone": Contestant(self.alone), "compute": Contestant(self.compute)}
        effort = Effort(calls=4, rounds=3, checks=0, each=True)
        found = measured(both, self.matmuls.device, self.control, effort)
        alone, one = (found[way].each.mean(axis=0).min() for way in both)  # the call disturbed least
        self.count = max(1, round(alone / one))

    def check(self, number: int) -> int:
        """Run both at once with the values of a round; the wrong elements of the two results."""
        bits, right = self.matmuls.bits, self.matmuls.right
        poison(bits)
        wrong = self._library.wrong(*self._arrays, self.together, self.case, self.control, number)
        return wrong + count_wrong(self.matmuls.device, bits, lambda start, stop: right[start:stop])


def case_of(name: str, nbytes: int, ranks: int) -> Case:
    """A sum of float32, or what is no sum, of about so many bytes."""
    op = OPS[name]
    size = rounded(op, "float32", nbytes, ranks)
    return Case(op, "float32", PLACES[name], size, ranks, "sum" if op.reduces else NONE)


def _measured(pairs: dict[str, Pair], count: int | None, effort: Effort) -> dict[str, dict]:
    """Figures by whose collective it is. All ways of all pairs alternate."""
    contestants = {}
    for by, pair in pairs.items():
        if count is None:
            pair.calibrate()
        else:
            pair.count = count
        contestants |= {(by, way): Contestant(getattr(pair, way)) for way in WAYS}
        contestants[by, "together"] = Contestant(pair.together, pair.check)
    found = measured(contestants, pair.matmuls.device, pair.control, effort)
    return {by: _figures(pair, {way: found[by, way] for way in WAYS}, effort) for by, pair in pairs.items()}


def _figures(pair: Pair, found: dict[str, Measured], effort: Effort) -> dict:
    """Medians over rounds, and the least and largest overlap of a round; None where something is wrong.

    overlap_pct: how much of the shorter is hidden: 100 where both take as long as the longer alone, 0 where
    they take as long as the sum, less where they slow each other down, or ranks wait for each other longer.
    Rates together are over the time until both are done, as PARAM's.
    """
    seconds = {way: effort.one(found[way].seconds) for way in WAYS}
    alone, compute, _, together = seconds.values()
    hidden = 100 * (alone + compute - together) / np.minimum(alone, compute)
    moved = pair.case.nbytes * pair.case.op.bus(pair.case.ranks) / 1e9
    flops = pair.count * pair.matmuls.flops / 1e9
    figures = {f"{way}_us": 1e6 * each for way, each in seconds.items()}
    figures |= {"overlap_pct": hidden, "min_pct": hidden.min(), "max_pct": hidden.max()}
    figures |= {"bus_gb_s": moved / alone, "bus_together_gb_s": moved / together}
    figures |= {"gflop_s": flops / compute, "gflop_together_s": flops / together}
    wrong = found["together"].wrong
    right = {name: None if wrong else round(float(np.median(each)), 3) for name, each in figures.items()}
    return {"bytes": pair.case.nbytes, "matmuls": pair.count, **right, "wrong": wrong}


def draw(lines: Sequence[dict], path: Path) -> None:
    """Draw times and overlap over size, a row for each communicator and collective; mpi4py's are dashed."""
    rows = list(dict.fromkeys((line["communicator"], line["op"]) for line in lines))
    made, axes = picture.figure(2, len(rows))
    for place, row in enumerate(rows):
        times, overlaps = {}, {}
        for by, name in (("ours", ""), ("mpi4py", ", raw")):
            own = [line for line in lines if (line["communicator"], line["op"], line["by"]) == (*row, by)]
            own = [line for line in own if not line["wrong"]]
            curve = partial(Curve, [line["bytes"] for line in own], dashed=by != "ours")
            if own:
                overlaps["overlap" + name] = curve([line["overlap_pct"] for line in own])
                for way in ("alone", "compute", "together"):
                    times[way + name] = curve([line[f"{way}_us"] for line in own])
        picture.curves(axes[2 * place], times, f"{' '.join(row)}, us", log=True)
        picture.curves(axes[2 * place + 1], overlaps, f"{' '.join(row)}, overlap in %")
    picture.save(made, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it on this rank; gives the exit code."""
    return benchmark.main(Overlap(), arguments)


if __name__ == "__main__":
    sys.exit(main())
