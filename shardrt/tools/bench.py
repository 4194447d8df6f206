"""`shardrt bench NAME ...`: a benchmark on the ranks that mpirun starts, from a wheel as from a checkout."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from shardrt.untrusted import say

__all__ = ["main"]

USAGE = 2
# Those that need nothing of a checkout: name, module in shardrt.bench, help. A benchmark more is a line here.
BENCHMARKS = (
    ("collectives", "collectives.__main__", "collectives as nccl-tests times them, next to MPI's or NCCL's"),
    ("p2p", "p2p.__main__", "messages between ranks as OSU times them, and the matrix of all pairs"),
    ("overlap", "overlap", "a collective while matmuls run, next to both alone"),
    ("replay", "replay.__main__", "the communication of a recorded job, with its gaps and with compute"),
    ("barrier", "barrier", "a barrier of each communicator, next to MPI's"),
    ("offload", "offload.__main__", "copies, storage, and updates streamed from the host or from files"),
    ("kernels", "kernels.__main__", "kernels next to PyTorch's and the roofline"),
)
PAGE = """usage: shardrt bench NAME ...

Times what training is made of, and checks every result.

{}

Examples:
  mpirun -n 2 shardrt bench collectives all_reduce -b 8 -e 128M -f 2
  shardrt bench offload copies

`shardrt bench NAME --help` lists the options of a benchmark."""


def page() -> str:
    """What `shardrt bench --help` prints."""
    return PAGE.format("\n".join(f"  {name:12} {summary}" for name, _, summary in BENCHMARKS))


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark; gives its exit code."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        with suppress(BrokenPipeError):  # `| head` has seen enough
            say(page(), lines=True)
        return 0
    modules = {known: module for known, module, _ in BENCHMARKS}
    if name not in modules:
        say(f"error: shardrt bench: no benchmark {name!r}; known: {', '.join(modules)}", file=sys.stderr)
        return USAGE
    return import_module(f"shardrt.bench.{modules[name]}").main(arguments[1:])
