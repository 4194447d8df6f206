"""Times what offload is made of: copies to and from the device, updates streamed through it, spill to disk.

    python -m bench.offload
    python -m bench.offload copies disk --megabytes 1024 --blocks 1M,16M

Each figure stands beside a ceiling measured in the same run. A machine without a GPU has the CPU device only.
Exit code 1 where a check failed, 2 for options that make no sense. docs/howto/benchmarks.md has the columns.
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import json
import sys
import tempfile
from pathlib import Path

from shardrt import device as devices
from shardrt.comm import mpi_world
from shardrt.device import Device, cuda
from shardrt.train.errors import USAGE, one_line

from ..gpu.report import Row, table
from ..harness import environment
from ..harness.command_line import Parser, check_known, nbytes, words
from . import copies, disk, optimizer, storage

SECTIONS = ("copies", "optimizer", "disk")


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["storage"]:
        return storage.main(arguments[1:])
    with one_line(USAGE):
        options = parse(arguments)
    device = devices.get(options.device)
    devices.set_current(device)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        rows = measured(options, device, Path(directory))
    given = sys.argv[1:] if arguments is None else arguments
    facts = environment.facts(" ".join(["python -m bench.offload", *given]))
    result = {**facts, "device": options.device, "rows": [row.as_json() for row in rows]}
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"# {name}: {value}" for name, value in facts.items()))
        print(table(rows))
    if options.output is not None:
        environment.write_result(options.output, result)
    return int(any(row.check[:6] in ("DIFFER", "OTHER ") for row in rows))


def measured(options: argparse.Namespace, device: Device, directory: Path) -> list[Row]:
    """The rows of the sections that were asked for; their ceilings come first."""
    size, blocks, rounds = options.nbytes, options.blocks, options.rounds
    found: list[Row] = []
    wanted = set(options.sections)
    if "optimizer" in wanted or "copies" in wanted:
        rows, links = copies.rows(device, size, blocks, rounds)
        found += rows if "copies" in wanted else []
    if "optimizer" in wanted or "disk" in wanted:
        rows, rate = disk.rows(directory, size, blocks, rounds)
        spilled = rows if "disk" in wanted else []
    if "optimizer" in wanted:
        found += optimizer.rows(device, options.parameters, directory, rounds, links, rate)
    return found + spilled if "disk" in wanted else found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options. Raises ValueError for what makes no sense."""
    parser = Parser(prog="python -m bench.offload", description="Times what offload is made of.")
    add = parser.add_argument
    add("sections", nargs="*", metavar="SECTION", help=f"{', '.join(SECTIONS)} (all)")
    add("--device", default="auto", help="cpu or cuda (auto)")
    add("--megabytes", type=int, default=256, metavar="N", help="MiB that are copied or written (256)")
    add("--blocks", type=words, default="64K,1M,4M,16M,64M", metavar="A,B", help="sizes (64K,1M,4M,16M,64M)")
    add("--parameters", type=nbytes, default="16M", metavar="N", help="of the optimizer's model (16M)")
    add("--rounds", type=int, default=5, metavar="N", help="timed turns of each (5)")
    add("--directory", type=Path, metavar="DIR", help="on the disk to measure (that of temporary files)")
    add("--json", action="store_true", help="print one JSON object")
    add("-o", "--output", type=Path, metavar="FILE", help="write it there, too")
    options = parser.parse_args(arguments)
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    options.sections = options.sections or list(SECTIONS)
    check_known("section", options.sections, SECTIONS)
    for name in ("megabytes", "parameters", "rounds"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: must be at least 1, got {getattr(options, name)}")
    options.nbytes = options.megabytes << 20
    try:
        options.blocks = [nbytes(word) for word in options.blocks]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--blocks: {error}") from None
    for block in options.blocks:
        if block < 1 or options.nbytes % block:
            raise ValueError(
                f"--blocks: {copies.shown(options.nbytes)} is no multiple of {copies.shown(block)}"
            )
    if options.directory is not None and not options.directory.is_dir():
        raise ValueError(f"--directory: {options.directory} is no directory")
    check_known("--device", [options.device], ("auto", "cpu", "cuda"))
    if options.device == "cuda" and not cuda.count():
        raise ValueError("--device: 'cuda' needs a GPU, and there is none here")
    if options.device == "auto":
        options.device = "cuda" if cuda.count() else "cpu"
    launched = mpi_world.launch()
    if launched is not None and launched.size > 1:
        raise ValueError("bench.offload measures one process; start it without mpirun")


if __name__ == "__main__":
    sys.exit(main())
