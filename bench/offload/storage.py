"""Reads and writes of files by threads of all ranks, with the options and the figures of NVIDIA's gdsio.

    mpirun -n 2 python -m bench.offload storage -D /data -s 1G -i 64K,1M -w 4 --queue-depth 2
    python -m bench.offload storage -f /data/new -s 4G -i 1M -I 2 -M 70 -T 10      # 70 % of them reads

A file is written in full before it is measured, so figures of writes are of overwriting. Every block that a
run has read or written is compared.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardrt import device as devices
from shardrt.comm import Communicator, mpi_world
from shardrt.device import Device, cuda
from shardrt.train.errors import USAGE, one_line

from ..harness import benchmark
from ..harness.command_line import check_least, nbytes, words
from ..harness.ranks import Ranks
from ..harness.stats import stats
from . import numa
from .io import SECTOR, File, GPUSlot, Pattern, Run, Slot, Worker, run
from .ranks import check_room

FAILED = 1  # exit code of a run whose reads or writes failed
_GIB = 1 << 30
_MOST_SIZES = 100_000
_LONGEST = 1_000_000  # seconds of a line
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TYPES = {"0": (False, 100), "1": (False, 0), "2": (True, 100), "3": (True, 0)}
_XFER = {1: "CPUONLY", 2: "CPU_GPU"}
_NO_CUFILE = "it needs cuFile, and nothing here calls cuFile"
_NOT_HERE = {0: _NO_CUFILE, 3: "a request waits for its copy", 4: "-O 1 reads through the page cache"}
# gdsio's options that are not here: short, whether it takes a value, why
_REFUSED = (
    ("-m", True, "-x says what memory it is"),
    ("-p", False, "nothing is copied between GPUs"),
    ("-b", False, "buffers are not registered with cuFile"),
    ("-B", True, "there are no batches; --queue-depth says how many requests are in flight"),
    ("-U", False, "offsets are multiples of the I/O size, so that each block is used once and checked"),
    ("-a", True, "offsets are multiples of the I/O size"),
    ("-P", True, "files are local paths"),
    ("-J", False, "lines are over all ranks; --json has the slowest"),
)


@dataclass(frozen=True)
class Case:
    """A line: its pattern and the bytes of a request."""

    pattern: Pattern
    size: int


class Storage(benchmark.Benchmark):
    """Times reads and writes of files."""

    name = "offload storage"
    communicates = False
    columns = {  # noqa: RUF012 (the harness declares it)
        "IoType": "<9",
        "XferType": "<8",
        "Threads": "7d",
        "depth": "5d",
        "open": "<8",
        "moved_KiB": "10d",
        "DataSetSize_KiB": "15d",
        "IOSize_KiB": "10.1f",
        "Throughput_GiB_s": "16.3f",
        "Avg_Latency_us": "14.1f",
        "p50_us": "9.1f",
        "p99_us": "9.1f",
        "ops": "8d",
        "total_time_s": "12.4f",
        "wrong": "5d",
    }

    def add_options(self, add: Callable) -> None:
        """Those of gdsio, and --queue-depth and --no-verify."""
        add("-D", "--directory", type=Path, metavar="DIR", help="a new file for each worker is there")
        add("-f", "--file", type=Path, metavar="FILE", help="a new file for the workers of a rank")
        add("-s", "--size", type=nbytes, default="256M", metavar="SIZE", help="of a file (256M)")
        sizes = "of a request: several with commas, or least:most:step (1M)"
        add("-i", "--io-size", dest="sizes", type=_sizes, default="1M", metavar="SIZE", help=sizes)
        add("-w", "--workers", type=int, default=1, metavar="N", help="threads of a rank (1)")
        depth = "requests in flight of a worker, each in a thread (1)"
        add("--queue-depth", type=int, default=1, metavar="N", help=depth)
        types = "0 read, 1 write, 2 random read, 3 random write; several with commas (0,1,2,3)"
        add("-I", "--io-type", dest="types", type=words, metavar="A,B", help=types)
        mixed = "reads among the requests, with -I 0 or 1 in order of offsets, with 2 or 3 random (2)"
        add("-M", "--mixed", type=int, metavar="PERCENT", help=mixed)
        xfer = "1 storage to CPU, 2 storage to CPU to GPU, and back (1)"
        add("-x", "--xfer-type", dest="xfer", type=int, default=1, metavar="N", help=xfer)
        add("-T", "--duration", type=float, default=0.0, metavar="S", help="seconds a line (one pass)")
        add("-k", "--seed", type=int, default=0, metavar="N", help="of random orders (0)")
        add("-d", "--gpu", type=int, metavar="N", help="of -x 2 (that of the rank)")
        add("-n", "--numa-node", dest="node", type=int, metavar="N", help="where threads and buffers are")
        add("-O", "--buffered", type=int, default=0, choices=(0, 1), help="1: without O_DIRECT (0)")
        huge = "buffers of -x 1 are in huge pages, as fio's iomem=mmaphuge has them"
        add("--huge-pages", dest="huge", action="store_true", help=huge)
        add("-V", "--verify", action="store_true", help="accepted: every block is verified")
        add("-R", "-F", dest="random", action="store_true", help="accepted: blocks look random")
        add("--no-verify", action="store_true", help="check first and last sectors only")
        for short, valued, why in _REFUSED:
            form = {"metavar": "X"} if valued else {"action": "store_const", "const": ""}
            add(short, dest=f"refused{short}", help=f"not here: {why}", **form)

    def cases(self, options: argparse.Namespace, ranks: int) -> list[Case]:
        """Each I/O size with each pattern."""
        _check(options, ranks)
        if options.mixed is None:
            types = [_TYPES[name] for name in options.types or _TYPES]
        else:
            types = [(_TYPES[name][0], options.mixed) for name in options.types or "2"]
        patterns = list(dict.fromkeys(Pattern(*each) for each in types))
        return [Case(pattern, size) for size in options.sizes for pattern in patterns]

    def lines(
        self, options: argparse.Namespace, cases: Sequence[Case], control: Communicator
    ) -> Iterator[dict]:
        """Lay files out, run, verify."""
        ranks, device = Ranks(control), _device(options)
        with ExitStack() as stack:
            with one_line(USAGE, ranks):
                files = _files(options, ranks.rank, stack)
                _check_granularity(files, options.sizes)
            workers, size = [], None
            for case in cases:
                if case.size != size:  # blocks are laid out for their size
                    size, rounds = case.size, max([0, *(int(each.rounds.max()) for each in workers)])
                    with one_line(FAILED, ranks):
                        workers = _workers(options, files, size, ranks.rank, device)
                        for worker in workers:
                            worker.rounds[:] = rounds
                        run(workers, Pattern(False, 0), device=device)
                ranks.start()
                with one_line(FAILED, ranks):
                    found = run(workers, case.pattern, options.duration, device)
                    wrong = _wrong(workers, options.no_verify)
                yield _line(options, case, ranks, files[0].direct, found, wrong)

    def tail(self, lines: Sequence[dict]) -> tuple[list[str], dict]:
        """Wrong blocks, and what a reader must know of the figures."""
        text, more = super().tail(lines)
        buffered = sum(line["open"] == "buffered" for line in lines)
        note = "# buffered: without O_DIRECT; reads begin without the page cache, writes end with fdatasync"
        return [*([note] if buffered else []), *text], more


def main(arguments: Sequence[str]) -> int:
    """The exit code of `bench.offload storage` with these options."""
    return benchmark.main(Storage(), arguments)


def _sizes(text: str) -> list[int]:
    """An argparse type: 4K,1M or 4K:64K:4K."""
    least, *more = text.split(":")
    if not more:
        return [nbytes(word) for word in words(text)]
    if len(more) != 2:
        raise argparse.ArgumentTypeError(f"a range has three parts, least:most:step, got {text!r}")
    first, most, step = (nbytes(word) for word in (least, *more))
    if step < 1 or most < first:
        raise argparse.ArgumentTypeError(f"least:most:step has no size in {text!r}")
    if (most - first) // step >= _MOST_SIZES:
        raise argparse.ArgumentTypeError(f"least:most:step has more than {_MOST_SIZES} sizes in {text!r}")
    return list(range(first, most + 1, step))


def _check(options: argparse.Namespace, ranks: int) -> None:
    for short, _, why in _REFUSED:
        if getattr(options, f"refused{short}") is not None:
            raise ValueError(f"{short}: not taken here: {why}")
    _check_sizes(options)
    _check_path(options, ranks)
    for name in options.types or ():
        if name not in _TYPES:
            raise ValueError(f"-I: must be of 0, 1, 2, 3, got {name!r}")
    if options.mixed is not None and not 0 <= options.mixed <= 100:
        raise ValueError(f"-M: must be a percentage of 0 to 100, got {options.mixed}")
    if not 0 <= options.duration <= _LONGEST:
        raise ValueError(f"-T: must be seconds, from 0 to {_LONGEST}, got {options.duration:g}")
    check_least({"-k": (options.seed, 0)})
    if options.node is not None and options.node not in numa.nodes():
        raise ValueError(f"-n: no NUMA node {options.node}; known: {', '.join(map(str, numa.nodes()))}")
    _check_gpu(options)


def _check_path(options: argparse.Namespace, ranks: int) -> None:
    """Of the paths that are given, and the room that is there."""
    if options.file is not None and options.directory is not None:
        raise ValueError("-f, -D: give a file or a directory, not both")
    if options.file is None:
        options.directory = options.directory or Path(tempfile.gettempdir())
    files = options.workers if options.file is None else 1
    folder, option = (options.directory, "-D") if options.file is None else (options.file.parent, "-f")
    check_room(option, folder, files * options.size)
    if options.file is not None:
        for rank in range(ranks):
            path = _path(options.file, rank, ranks)
            if path.exists():
                raise ValueError(f"-f: {path} exists; name a new file, which is removed at the end")


def _path(file: Path, rank: int, ranks: int) -> Path:
    """The file of a rank."""
    return file if ranks == 1 else file.with_name(f"{file.name}.{rank}")


def _check_sizes(options: argparse.Namespace) -> None:
    counts = {"-w": options.workers, "--queue-depth": options.queue_depth, "-s": options.size}
    check_least({name: (value, 1) for name, value in counts.items()})
    sharing = options.workers if options.file is not None else 1
    among = f" for each of {sharing} workers" if sharing > 1 else ""
    for size in options.sizes:
        if size < SECTOR or size % SECTOR:
            raise ValueError(f"-i: must be a multiple of {SECTOR} bytes, got {size}")
        if options.size % (sharing * size):
            raise ValueError(f"-s: {options.size} bytes are no multiple of -i, {size} bytes{among}")
        blocks = options.size // sharing // size
        if blocks < options.queue_depth:
            raise ValueError(
                f"--queue-depth: {options.queue_depth} requests in flight need as many blocks of {size} "
                f"bytes for each worker, got {blocks}; make -s larger"
            )


def _check_gpu(options: argparse.Namespace) -> None:
    if options.xfer in _NOT_HERE or options.xfer in (5, 6, 7):
        raise ValueError(f"-x: {options.xfer} is not taken: {_NOT_HERE.get(options.xfer, _NO_CUFILE)}")
    if options.xfer not in _XFER:
        raise ValueError(f"-x: must be 1 or 2, got {options.xfer}")
    if options.xfer == 2 and not cuda.count():
        raise ValueError("-x: 2 copies to and from a GPU, and there is none here")
    if options.huge and options.xfer == 2:
        raise ValueError("--huge-pages: buffers of -x 2 are pinned memory, which the driver makes")
    if options.huge and "[never]" in _HUGE_PAGES.read_text():
        raise ValueError(f"--huge-pages: this kernel gives none: {_HUGE_PAGES} says never")
    if options.gpu is not None and not (options.xfer == 2 and 0 <= options.gpu < cuda.count()):
        why = f"must be below {cuda.count()}" if options.xfer == 2 else "names a GPU, and only -x 2 uses one"
        raise ValueError(f"-d: {why}, got {options.gpu}")


def _device(options: argparse.Namespace) -> Device | None:
    """The GPU of -x 2, as the current device of this thread."""
    if options.xfer != 2:
        return None
    launched = mpi_world.launch()
    index = (launched.local_rank if launched else 0) % cuda.count() if options.gpu is None else options.gpu
    device = devices.get(f"cuda:{index}")
    devices.set_current(device)
    return device


def _files(options: argparse.Namespace, rank: int, stack: ExitStack) -> list[File]:
    """The new files of a rank, numbered over all ranks; closed with `stack`."""
    direct = not options.buffered
    if options.file is not None:
        launched = mpi_world.launch()
        path = _path(options.file, rank, launched.size if launched else 1)
        files = [File(path, options.size, direct, rank)]
        stack.callback(files[0].close)
        return files
    files = []
    with tempfile.TemporaryDirectory(prefix="shardrt-storage-", dir=options.directory) as folder:
        for number in range(options.workers * rank, options.workers * (rank + 1)):
            files.append(File(Path(folder) / f"gdsio.{number}", options.size, direct, number))
            stack.callback(files[-1].close)
    return files


def _check_granularity(files: Sequence[File], sizes: Sequence[int]) -> None:
    """Raise ValueError for a size that O_DIRECT does not take."""
    for size in sizes:
        if size % files[0].granularity:
            raise ValueError(
                f"-i: must be a multiple of {files[0].granularity} bytes, which O_DIRECT takes here, got "
                f"{size}; -O 1 is without O_DIRECT"
            )


def _workers(
    options: argparse.Namespace, files: Sequence[File], size: int, rank: int, device: Device | None
) -> list[Worker]:
    """The threads of a rank, each with its blocks."""
    cores = None if options.node is None else numa.nodes()[options.node]
    blocks = len(files) * options.size // options.workers // size
    found = []
    with numa.on(cores):
        for number in range(options.workers):
            file = files[number % len(files)]
            first = 0 if len(files) == options.workers else number * blocks * size
            slots = [_slot(options, size, file.number, device) for _ in range(options.queue_depth)]
            seed = (options.seed, rank, number)
            found.append(Worker(file, first, blocks, size, slots, seed, cores))
    return found


def _slot(options: argparse.Namespace, size: int, number: int, device: Device | None) -> Slot:
    return Slot(size, number, options.huge) if device is None else GPUSlot(size, number, device)


def _wrong(workers: Sequence[Worker], stamps_only: bool) -> int:
    """Blocks: of those that were read while time was taken, and of all that are on the disk afterwards."""
    wrong = sum(worker.wrong_stamps() for worker in workers)
    if stamps_only:
        return wrong
    for worker in workers:
        if not worker.file.direct:
            worker.file.forget()
    return wrong + sum(worker.wrong_blocks() for worker in workers)


def _line(
    options: argparse.Namespace, case: Case, ranks: Ranks, direct: bool, found: Run, wrong: int
) -> dict[str, Any]:
    """Figures over all ranks; None where a block is wrong. Collective."""
    own = {"seconds": found.seconds, "moved": found.moved, "read": found.read, "wrong": wrong}
    each = ranks.gathered({**own, "direct": direct})
    latencies = np.concatenate(
        [np.frombuffer(data, np.float64) for data in ranks.gathered_bytes(found.latencies.tobytes())]
    )
    seconds = max(one["seconds"] for one in each)
    moved = sum(one["moved"] for one in each)
    wrong = sum(one["wrong"] for one in each)
    taken = stats(latencies)
    figures = {
        "Throughput_GiB_s": moved / seconds / _GIB,
        "Avg_Latency_us": taken.avg,
        "p50_us": taken.p50,
        "p99_us": taken.p99,
        "max_us": taken.max,
        "ops": latencies.size,
        "iops": latencies.size / seconds,
        "total_time_s": seconds,
        "slowest_rank_GiB_s": min(one["moved"] / one["seconds"] for one in each) / _GIB,
        "read_bytes": sum(one["read"] for one in each),
        "written_bytes": moved - sum(one["read"] for one in each),
    }
    files = 1 if options.file is not None else options.workers
    return {
        "IoType": case.pattern.name,
        "reads_percent": case.pattern.reads,
        "XferType": _XFER[options.xfer],
        "ranks": ranks.size,
        "Threads": ranks.size * options.workers,
        "depth": options.queue_depth,
        "open": "O_DIRECT" if all(one["direct"] for one in each) else "buffered",
        "moved_KiB": moved // 1024,
        "DataSetSize_KiB": ranks.size * files * options.size // 1024,
        "IOSize_KiB": case.size / 1024,
        **{name: None if wrong else value for name, value in figures.items()},
        "wrong": wrong,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
