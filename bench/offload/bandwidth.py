"""Matrices of copy rates between hosts' NUMA nodes and GPUs, with the tests and options of nvbandwidth.

    python -m bench.offload bandwidth -t host_to_device_memcpy_ce device_to_host_memcpy_ce
    python -m bench.offload bandwidth -b 64              # all tests that this machine can do

Differences: a row of a host is a NUMA node, whose cores start the copies and whose memory is used.
nvbandwidth has one row, of the node next to the GPU. Arrows point where the bytes go. The host takes the
time, over --loopCount copies in a row. host_to_host_memcpy is our own. The tests of GPUs never ran on a GPU.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from shardrt import device as devices
from shardrt.comm import Communicator
from shardrt.device import Array, Device, Stream, cuda

from ..harness import benchmark
from ..harness.command_line import check_known, check_least, check_memory
from ..harness.values import count_wrong, fill, poison, values
from . import numa

_SM = "copies by kernels are not here; tests that end in _ce copy by the copy engine"
# nvbandwidth's options that are not here: short, long, why
_REFUSED = (("-s", "--skipVerification", "every copy is verified, after its time is taken"),)


Nodes = dict[int, set[int] | None]  # cores of a NUMA node; None: any


@dataclass(frozen=True)
class Copy:
    """One copy of a test. device: whose stream it is in; the current one while it is submitted."""

    device: Device
    stream: Stream | None  # None: the calling thread copies
    target: Array
    source: Array
    owner: Device  # of the source
    reader: Device  # of the target

    def submit(self) -> None:
        """Start it."""
        if self.stream is None:
            self.device.copy(self.target, self.source)
            return
        with devices.use(self.device):
            self.stream.submit(self._start)

    def _start(self) -> None:
        if isinstance(self.target, np.ndarray) or isinstance(self.source, np.ndarray):
            self.device.copy(self.target, self.source)
        else:  # CuPy lets the GPUs reach each other's memory before it copies
            self.target.data.copy_from_device_async(self.source.data, self.target.nbytes, self.stream.handle)

    def wait(self) -> None:
        """Return when it is done."""
        if self.stream is not None:
            self.stream.synchronize()

    def wrong(self) -> int:
        """Elements that do not arrive, of one more copy of other values."""
        given = partial(values, 1, round_=1, dtype="uint8")
        with devices.use(self.owner):
            fill(self.owner, self.source, lambda indices: given(indices))
            self.owner.current_stream.synchronize()
        with devices.use(self.reader):
            poison(self.target)
            self.reader.current_stream.synchronize()
        self.submit()
        self.wait()
        with devices.use(self.reader):
            return count_wrong(
                self.reader, self.target, lambda start, stop: given(np.arange(start, stop, dtype=np.uint64))
            )


Make = Callable[[int, int, int, Nodes], list[Copy]]


@dataclass(frozen=True)
class Test:
    """A matrix. gpus: how many it needs. rows, columns: "CPU" or "GPU". make: copies of a cell.

    The first copy is measured. `total`: all are, until the last is done; else the others disturb it.
    """

    title: str
    gpus: int
    rows: str
    columns: str
    make: Make
    total: bool = False


def _gpu(index: int) -> Device:
    return devices.get(f"cuda:{index}")


def _on_gpu(index: int, nbytes: int) -> Array:
    with devices.use(_gpu(index)):
        return _gpu(index).buffer(nbytes, np.uint8)


def _host_device(gpu: int, nbytes: int, up: bool) -> Copy:
    """A copy between new pinned memory of this thread's node and a GPU, in a stream of its own."""
    device = _gpu(gpu)
    with devices.use(device):
        host, there = device.pinned(nbytes, np.uint8), device.buffer(nbytes, np.uint8)
        target, source = (there, host) if up else (host, there)
        return Copy(device, device.new_stream("copy"), target, source, device, device)


def _between(source: int, target: int, by: int, nbytes: int) -> Copy:
    """A copy from a GPU to a GPU, in a stream of GPU `by`."""
    with devices.use(_gpu(by)):
        stream = _gpu(by).new_stream("copy")
    there, here = _on_gpu(target, nbytes), _on_gpu(source, nbytes)
    return Copy(_gpu(by), stream, there, here, _gpu(source), _gpu(target))


def _nodes(row: int, column: int, nbytes: int, nodes: Nodes) -> list[Copy]:
    """A copy from memory of one node to memory of another, by a core of the first."""
    cpu = devices.get("cpu")
    arrays = []
    for node in (column, row):
        with numa.on(nodes[node]):
            array = np.empty(nbytes, np.uint8)
            array.fill(1)  # the first touch
        arrays.append(array)
    return [Copy(cpu, None, *arrays, cpu, cpu)]


def _host_gpu(up: bool, disturbed: bool) -> Make:
    def make(row: int, column: int, nbytes: int, nodes: Nodes) -> list[Copy]:
        copies = [_host_device(column, nbytes, up)]
        return [*copies, _host_device(column, 2 * nbytes, not up)] if disturbed else copies

    return make


def _gpu_gpu(reads: bool, both: bool) -> Make:
    """The row's GPU starts copies: it reads from the column's GPU, or writes to it."""

    def make(row: int, column: int, nbytes: int, nodes: Nodes) -> list[Copy]:
        if row == column:
            return []
        pairs = [(column, row), (row, column)] if reads else [(row, column), (column, row)]
        return [_between(*pair, row, nbytes) for pair in pairs[: 1 + both]]

    return make


def _local(row: int, column: int, nbytes: int, nodes: Nodes) -> list[Copy]:
    return [_between(column, column, column, nbytes)]


_CE = "memcpy CE"
TESTS = {
    "host_to_host_memcpy": Test("memcpy CPU(row) -> CPU(column)", 0, "CPU", "CPU", _nodes),
    "host_to_device_memcpy_ce": Test(
        f"{_CE} CPU(row) -> GPU(column)", 1, "CPU", "GPU", _host_gpu(True, False)
    ),
    "device_to_host_memcpy_ce": Test(
        f"{_CE} CPU(row) <- GPU(column)", 1, "CPU", "GPU", _host_gpu(False, False)
    ),
    "host_to_device_bidirectional_memcpy_ce": Test(
        f"{_CE} CPU(row) <-> GPU(column)", 1, "CPU", "GPU", _host_gpu(True, True)
    ),
    "device_to_host_bidirectional_memcpy_ce": Test(
        f"{_CE} CPU(row) <-> GPU(column)", 1, "CPU", "GPU", _host_gpu(False, True)
    ),
    "device_to_device_memcpy_read_ce": Test(
        f"{_CE} GPU(row) <- GPU(column)", 2, "GPU", "GPU", _gpu_gpu(True, False)
    ),
    "device_to_device_memcpy_write_ce": Test(
        f"{_CE} GPU(row) -> GPU(column)", 2, "GPU", "GPU", _gpu_gpu(False, False)
    ),
    "device_to_device_bidirectional_memcpy_read_ce": Test(
        f"{_CE} GPU(row) <-> GPU(column) Total", 2, "GPU", "GPU", _gpu_gpu(True, True), True
    ),
    "device_to_device_bidirectional_memcpy_write_ce": Test(
        f"{_CE} GPU(row) <-> GPU(column) Total", 2, "GPU", "GPU", _gpu_gpu(False, True), True
    ),
    "device_local_copy": Test("memcpy local GPU(column)", 1, "", "GPU", _local),
}


class Bandwidth(benchmark.Benchmark):
    """Times copies between NUMA nodes and GPUs."""

    name = "offload bandwidth"
    communicates = False

    def __init__(self) -> None:
        self._cells: list[dict] = []  # of the matrix that is under way
        self._size = 0  # cells of that matrix
        self._options = argparse.Namespace()

    def add_options(self, add: Callable) -> None:
        """Those of nvbandwidth."""
        names = "tests (all that this machine can do)"
        add("-t", "--testcase", dest="tests", nargs="+", default=[], metavar="TEST", help=names)
        add("-p", "--testcasePrefixes", dest="prefixes", nargs="+", default=[], metavar="P", help="of tests")
        add("-l", "--list", action="store_true", help="list the tests")
        add("-b", "--bufferSize", type=int, default=512, metavar="MIB", help="of a copy (512)")
        add("-i", "--testSamples", dest="samples", type=int, default=3, metavar="N", help="samples (3)")
        add("--loopCount", dest="loops", type=int, default=16, metavar="N", help="copies of a sample (16)")
        add("-m", "--useMean", dest="mean", action="store_true", help="of samples (the median)")
        add("-d", "--disableAffinity", dest="anywhere", action="store_true", help="one row, any core")
        add("-v", "--verbose", action="store_true", help="print samples")
        add("-j", dest="json", action="store_true", help="as --json")
        for short, long, why in _REFUSED:
            add(short, long, dest=f"refused{short}", action="store_true", help=f"not here: {why}")

    def cases(self, options: argparse.Namespace, ranks: int) -> list[str]:
        """Names of tests."""
        self._options = options
        if options.list:
            print(
                "\n".join(
                    f"{place}, {name}: {test.title}" for place, (name, test) in enumerate(TESTS.items())
                )
            )
            sys.exit(0)
        for short, _, why in _REFUSED:
            if getattr(options, f"refused{short}"):
                raise ValueError(f"{short}: not taken here: {why}")
        if ranks > 1:
            raise ValueError("bandwidth: one process copies between all pairs; start it without mpirun")
        counts = {"-b": options.bufferSize, "-i": options.samples, "--loopCount": options.loops}
        check_least({name: (value, 1) for name, value in counts.items()})
        check_memory("-b", 2 * options.bufferSize << 20)
        return _chosen(options)

    def head(self, options: argparse.Namespace, control: Communicator) -> str:
        """Where nodes and GPUs are."""
        lines = [f"# NUMA node {node}: {len(cores)} cores" for node, cores in numa.nodes().items()]
        if count := cuda.count():
            from ..gpu.affinity import numa_node

            lines += [f"# GPU {index}: next to NUMA node {numa_node(index)}" for index in range(count)]
        return "\n".join(lines)

    def lines(
        self, options: argparse.Namespace, cases: Sequence[str], control: Communicator
    ) -> Iterator[dict]:
        """A line for each cell, row by row."""
        nodes: Nodes = {0: None} if options.anywhere else {**numa.nodes()}
        for name in cases:
            test = TESTS[name]
            of = {"CPU": list(nodes), "GPU": list(range(cuda.count())), "": [0]}
            places = list(product(of[test.rows], of[test.columns]))
            self._size = len(places)
            for row, column in places:
                yield {"test": name, "row": row, "column": column, **_cell(test, row, column, nodes, options)}

    def text(self, line: dict) -> str | None:
        """The matrix, at its last cell."""
        self._cells.append(line)
        if len(self._cells) < self._size:
            return None
        cells, self._cells = self._cells, []
        return _matrix(line["test"], cells, self._options.verbose)


def main(arguments: Sequence[str]) -> int:
    """The exit code of `bench.offload bandwidth` with these options."""
    return benchmark.main(Bandwidth(), arguments)


def _chosen(options: argparse.Namespace) -> list[str]:
    """Tests by name, number and prefix; of all those that this machine can do."""
    count = cuda.count()
    names = list(TESTS)
    given = [
        names[int(name)] if name.isdecimal() and int(name) < len(names) else name for name in options.tests
    ]
    for name in given:
        if name.endswith("_sm"):
            raise ValueError(f"-t: {name!r} is not here: {_SM}")
    check_known("-t", given, names)
    for prefix in options.prefixes:
        found = [name for name in names if name.startswith(prefix)]
        if not found:
            raise ValueError(f"-p: no test begins with {prefix!r}; -l lists them")
        given += found
    for name in given:
        if TESTS[name].gpus > count:
            here = f"{count} is here" if count else "there is none here"
            needed = "a GPU" if TESTS[name].gpus == 1 else f"{TESTS[name].gpus} GPUs"
            raise ValueError(f"-t: {name!r} needs {needed}, and {here}")
    return list(dict.fromkeys(given)) or [name for name in names if TESTS[name].gpus <= count]


def _cell(test: Test, row: int, column: int, nodes: Nodes, options: argparse.Namespace) -> dict[str, Any]:
    """Measure and verify; nothing for a GPU and itself."""
    with numa.on(nodes[row] if test.rows == "CPU" else None):
        copies = test.make(row, column, options.bufferSize << 20, nodes)
        if not copies:
            return {"GB_s": None, "samples_GB_s": [], "wrong": 0}
        _sample(copies, 1, test.total)  # addresses, streams and peers are set up
        samples = [_sample(copies, options.loops, test.total) for _ in range(options.samples)]
        wrong = sum(copy.wrong() for copy in copies)
    figure = statistics.mean(samples) if options.mean else statistics.median(samples)
    return {"GB_s": None if wrong else figure, "samples_GB_s": [] if wrong else samples, "wrong": wrong}


def _sample(copies: Sequence[Copy], loops: int, total: bool) -> float:
    """GB/s of the first copy, or of all."""
    start = time.perf_counter()
    for _ in range(loops):
        for copy in copies:
            copy.submit()
    copies[0].wait()
    seconds = time.perf_counter() - start
    for copy in copies[1:]:
        copy.wait()
    if total:
        seconds = time.perf_counter() - start
    nbytes = sum(copy.target.nbytes for copy in (copies if total else copies[:1]))
    return loops * nbytes / seconds / 1e9


def _matrix(name: str, cells: Sequence[dict], verbose: bool) -> str:
    """As nvbandwidth prints it."""
    rows, columns = (list(dict.fromkeys(cell[axis] for cell in cells)) for axis in ("row", "column"))
    lines = [f"Running {name}."]
    if verbose:
        for cell in cells:
            for number, sample in enumerate(cell["samples_GB_s"]):
                lines.append(f"\tSample {number}: {cell['row']}, {cell['column']}: {sample:.2f} GB/s")
    lines += [f"{TESTS[name].title} bandwidth (GB/s)", "  " + "".join(f"{column:10}" for column in columns)]
    for row in rows:
        figures = [_figure(cell) for cell in cells if cell["row"] == row]
        lines.append(f"{row:2}" + "".join(f"{figure:>10}" for figure in figures))
    lines += ["", f"SUM {name} {sum(cell['GB_s'] or 0.0 for cell in cells):.2f}", ""]
    return "\n".join(lines)


def _figure(cell: dict) -> str:
    if cell["wrong"]:
        return "WRONG"
    return "N/A" if cell["GB_s"] is None else f"{cell['GB_s']:.2f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
