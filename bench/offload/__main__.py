"""Times what offload is made of: copies to and from the device, updates streamed through it, spill to disk.

    python -m bench.offload
    mpirun -n 2 python -m bench.offload copies disk --megabytes 1024 --blocks 1M,16M
    python -m bench.offload storage -D /data -s 1G -w 4         # as gdsio: storage.py
    python -m bench.offload bandwidth -t host_to_device_memcpy_ce      # as nvbandwidth: bandwidth.py

Each figure stands next to a ceiling measured in the same run. A machine without a GPU has the CPU device
only. Exit code 1 where a check failed, 2 for options that make no sense.
docs/howto/benchmarks.md has the columns.
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shardrt import device as devices
from shardrt.comm import Communicator, mpi_world
from shardrt.device import Device, cuda

from ..harness import benchmark
from ..harness.command_line import check_known, check_least, check_memory, nbytes, words
from ..harness.ranks import Ranks
from . import bandwidth, copies, disk, lines, optimizer, storage
from .ranks import check_room

_MOST_ROUNDS = 1_000_000
SECTIONS = ("copies", "optimizer", "disk")
COMMANDS = {"storage": storage.main, "bandwidth": bandwidth.main}  # sections with options of their own


class Offload(benchmark.Benchmark):
    """Times what offload is made of."""

    name = "offload"
    communicates = False
    columns = lines.COLUMNS

    def add_options(self, add: Callable) -> None:
        """What is measured, and how much of it."""
        alone = ", ".join(f"{name} -h" for name in COMMANDS)
        add("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} (all); or {alone}")
        add("--device", default="auto", help="cpu or cuda (auto)")
        add("--megabytes", type=int, default=256, metavar="N", help="MiB that a rank copies or writes (256)")
        add("--blocks", type=words, default="64K,1M,4M,16M,64M", metavar="A,B", help="(64K,1M,4M,16M,64M)")
        add("--parameters", type=nbytes, default="16M", metavar="N", help="of the optimizer's model (16M)")
        add("--rounds", type=int, default=5, metavar="N", help="timed turns of each (5)")
        add("--directory", type=Path, metavar="DIR", help="on the disk to measure (that of temporary files)")

    def cases(self, options: argparse.Namespace, ranks: int) -> list[str]:
        """The sections."""
        _check(options, ranks)
        return options.sections

    def lines(
        self, options: argparse.Namespace, cases: Sequence[str], control: Communicator
    ) -> Iterator[dict]:
        """A line each; ceilings come first."""
        device = _device(options)
        devices.set_current(device)
        ranks = Ranks(control)
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            yield from _measured(options, device, Path(directory), ranks)


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] and given[0] in COMMANDS:
        return COMMANDS[given[0]](given[1:])
    return benchmark.main(Offload(), given)


def _measured(options: argparse.Namespace, device: Device, directory: Path, ranks: Ranks) -> Iterator[dict]:
    size, blocks, rounds = options.nbytes, options.blocks, options.rounds
    spilled: list[dict] = []
    wanted = set(options.sections)
    if "optimizer" in wanted or "copies" in wanted:
        found, links = copies.rows(device, size, blocks, rounds, ranks)
        yield from found if "copies" in wanted else []
    if "optimizer" in wanted or "disk" in wanted:
        found, rate = disk.rows(directory, size, blocks, rounds, ranks)
        spilled = found if "disk" in wanted else []
    if "optimizer" in wanted:
        yield from optimizer.rows(device, options.parameters, directory, rounds, links, rate)
    yield from spilled


def _device(options: argparse.Namespace) -> Device:
    """This rank's."""
    if options.device == "cpu":
        return devices.get("cpu")
    launched = mpi_world.launch()
    return devices.get(f"cuda:{(launched.local_rank if launched else 0) % cuda.count()}")


def _check(options: argparse.Namespace, ranks: int) -> None:
    """Raise ValueError for what makes no sense; put in what follows from what was given."""
    for name in options.sections:
        if name in COMMANDS:
            raise ValueError(f"section: {name!r} has options of its own: `bench.offload {name}` starts it")
    check_known("section", options.sections, (*SECTIONS, *COMMANDS))
    if ranks > 1 and "optimizer" in options.sections:
        raise ValueError("section: 'optimizer' measures one process; start it without mpirun")
    options.sections = options.sections or [name for name in SECTIONS if ranks == 1 or name != "optimizer"]
    check_least({f"--{name}": (getattr(options, name), 1) for name in ("megabytes", "parameters", "rounds")})
    check_least({"--parameters": (options.parameters, optimizer.LAYERS)})
    if options.rounds > _MOST_ROUNDS:
        raise ValueError(f"--rounds: must be at most {_MOST_ROUNDS}, got {options.rounds}")
    options.nbytes = options.megabytes << 20
    if "optimizer" in options.sections:
        check_memory("--parameters", 16 * options.parameters)
    try:
        options.blocks = [nbytes(word) for word in options.blocks]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--blocks: {error}") from None
    for block in options.blocks:
        if block < 1 or options.nbytes % block:
            raise ValueError(
                f"--blocks: {copies.shown(options.nbytes)} is no multiple of {copies.shown(block)}"
            )
    folder = options.directory or Path(tempfile.gettempdir())
    on_disk = {"disk": options.nbytes, "optimizer": 2 * optimizer.FILES * options.parameters}
    check_room("--directory", folder, max([0, *(on_disk.get(name, 0) for name in options.sections)]))
    launched = mpi_world.launch()
    check_memory("--megabytes", 2 * options.nbytes, launched.local_size if launched else 1)
    check_known("--device", [options.device], ("auto", "cpu", "cuda"))
    if options.device == "cuda" and not cuda.count():
        raise ValueError("--device: 'cuda' needs a GPU, and there is none here")
    if options.device == "auto":
        options.device = "cuda" if cuda.count() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
