"""The command line, and what of it makes no sense: a ValueError of one line, before anything is measured."""

import argparse
import sys
from importlib.util import find_spec

from shardrt.comm import mpi_world
from shardrt.device import cuda

from ..harness.command_line import Parser, add_forms, check_known, nbytes, program, words
from .case import Sizes
from .ops import OPS

DTYPES = ("float32", "float64", "bfloat16", "float16")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options; `sizes` among them. Raises ValueError."""
    parser = Parser(prog=program("kernels"), description="Times kernels.", allow_abbrev=False)
    add, default = parser.add_argument, Sizes()
    add("--op", type=words, default=["all"], metavar="A,B", help=f"{', '.join(OPS)}, all (all)")
    add("--device", default="cpu", help="cpu or cuda (cpu)")
    add("--dtype", default="float32", help=f"{', '.join(DTYPES)}; the CPU computes in the first two")
    add("--rounds", type=int, default=9, metavar="N", help="timed turns of each contestant (9)")
    for name, message in _SIZES.items():
        add(f"--{name}", type=nbytes, default=getattr(default, name), metavar="N", help=message)
    add_forms(parser)
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    options.given = " ".join([program("kernels"), *given])
    _check(options)
    options.sizes = Sizes(**{name: getattr(options, name) for name in _SIZES})
    return options


_SIZES = {
    "tokens": "rows of what is done row by row (8192)",
    "width": "of a row (768); inside of an MLP four times that",
    "heads": "of rotary (12)",
    "time": "tokens of a sequence, and width of softmax (1024)",
    "vocab": "of embedding and losses (50304)",
    "multiplied": "rows of matmuls (2048)",
    "classified": "rows of the losses (512)",
    "elements": "of a flat shard (16M)",
    "side": "height and width of images of batch norm and pooling (56)",
}


def _check(options: argparse.Namespace) -> None:
    if options.op == ["all"]:
        options.op = list(OPS)
    check_known("--op", options.op, (*OPS, "all"))
    check_known("--dtype", [options.dtype], DTYPES)
    check_known("--device", [options.device], ("cpu", "cuda"))
    for name in ("rounds", *_SIZES):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name}: must be at least 1, got {getattr(options, name)}")
    if options.width % (2 * options.heads):
        raise ValueError(f"--width: {options.width} is no multiple of 2 * {options.heads} heads")
    if options.tokens % options.time:
        raise ValueError(f"--tokens: {options.tokens} is no multiple of --time, {options.time}")
    if options.elements < 4:
        raise ValueError(f"--elements: must be at least 4, got {options.elements}")
    if options.device == "cpu" and options.dtype not in DTYPES[:2]:
        raise ValueError(f"--dtype: the CPU computes {options.dtype} in float32; take that, or --op cast")
    if find_spec("torch") is None:
        raise ValueError(
            "PyTorch is not installed, against which kernels are checked and timed: pip install torch"
        )
    if options.device == "cuda" and not cuda.count():
        raise ValueError("--device: 'cuda' needs a GPU, and there is none here")
    launched = mpi_world.launch()
    if launched is not None and launched.size > 1:
        raise ValueError("bench.kernels measures one process; start it without mpirun")
