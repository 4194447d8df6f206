"""The command line, and what of it makes no sense: a ValueError of one line, before MPI starts."""

import argparse
import sys
from collections.abc import Collection
from itertools import product

from bench.collectives.ops import DTYPES, OPS, PLACES, Case
from bench.command_line import Parser, add_forms, check_known, nbytes, words
from shardrt.comm import world as worlds
from shardrt.comm.backends import DEVICE_KINDS, KINDS
from shardrt.device import cuda


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options as nccl-tests calls them. Raises ValueError."""
    parser = Parser(prog="python -m bench.collectives", description="Times collectives.", allow_abbrev=False)
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help=f"{', '.join(OPS)} (all)")
    add("-b", "--minbytes", type=nbytes, default="1K", metavar="SIZE", help="smallest size (1K)")
    add("-e", "--maxbytes", type=nbytes, default="1G", metavar="SIZE", help="largest size (1G)")
    add("-f", "--stepfactor", type=int, default=4, metavar="N", help="between sizes (4)")
    add("-w", "--warmup_iters", type=int, default=5, metavar="N", help="untimed calls (5)")
    add("-n", "--iters", type=int, default=20, metavar="N", help="timed calls in a row (20)")
    add("-r", "--rounds", type=int, default=5, metavar="N", help="of -n calls, ours and raw by turns (5)")
    add("-c", "--check", type=int, default=1, metavar="N", help="rounds of checking, 0 for none (1)")
    add("-d", "--dtypes", type=words, default=["float32"], metavar="A,B", help=f"{', '.join(DTYPES)}, all")
    add("-p", "--places", type=words, default=["all"], metavar="A,B", help="out, in, all (all)")
    add(
        "-k",
        "--communicators",
        type=words,
        default=["auto"],
        metavar="A,B",
        help=f"{', '.join(KINDS)}, or all that fit this run (auto)",
    )
    add("-t", "--threads", type=int, metavar="N", help="ranks as threads of this process, without mpirun")
    add_forms(parser)
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    options.given = " ".join(["python -m bench.collectives", *given])
    _check(options)
    return options


def cases(options: argparse.Namespace, ranks: int) -> list[Case]:
    """All that was asked for and is offered. Raises ValueError if that is nothing, or sizes don't divide."""
    sizes = _sizes(options)
    found: list[Case] = []
    for op in (OPS[name] for name in options.ops):
        offered = [
            Case(op, dtype, place, size, ranks)
            for dtype, place, size in product(options.dtypes, options.places, sizes)
            if _offered(op.name, dtype, place)
        ]
        if not offered:
            raise ValueError(
                f"{op.name}: not offered for -d {','.join(options.dtypes)} -p {','.join(options.places)}; "
                f"it takes {', '.join(op.dtypes)}, in place: {'yes' if 'in' in op.places else 'no'}"
            )
        found += offered
    for case in found:
        _ = case.count  # raises where the size does not divide
    return found


def _offered(name: str, dtype: str, place: str) -> bool:
    """Sums of bfloat16 are float32 and do not fit where the bits were."""
    op = OPS[name]
    return (
        dtype in op.dtypes and place in op.places and not (op.sums and dtype == "bfloat16" and place == "in")
    )


def _sizes(options: argparse.Namespace) -> list[int]:
    sizes = [options.minbytes]
    while sizes[-1] * options.stepfactor <= options.maxbytes:
        sizes.append(sizes[-1] * options.stepfactor)
    return sizes


def _check(options: argparse.Namespace) -> None:
    options.ops = _known("op", options.ops or ["all"], OPS)
    options.dtypes = _known("-d", options.dtypes, DTYPES)
    options.places = _known("-p", options.places, PLACES)
    options.kinds = _kinds(options)
    least = {"-b": (options.minbytes, 1), "-f": (options.stepfactor, 2), "-w": (options.warmup_iters, 0)}
    least |= {"-n": (options.iters, 1), "-r": (options.rounds, 1), "-c": (options.check, 0)}
    for name, (value, lowest) in least.items():
        if value < lowest:
            raise ValueError(f"{name}: must be at least {lowest}, got {value}")
    if options.maxbytes < options.minbytes:
        raise ValueError(f"-e: {options.maxbytes} bytes is less than -b, {options.minbytes}")


def _known(what: str, given: list[str], known: Collection[str]) -> list[str]:
    if given == ["all"]:
        return list(known)
    check_known(what, given, known)
    return given


def _kinds(options: argparse.Namespace) -> list[str]:
    """The communicators to time; all of them fit this run."""
    launched = worlds.launch()
    if options.threads is not None:
        if launched is not None and launched.size > 1:
            raise ValueError("-t: ranks are threads or processes, not both; leave out mpirun or -t")
        if options.threads < 2:
            raise ValueError(f"-t: must be at least 2, got {options.threads}")
    size = options.threads or (launched.size if launched else 1)
    fitting = _fitting(options.threads is not None, launched)
    if options.communicators == ["all"]:
        return list(fitting)
    for kind in options.communicators:
        if kind not in KINDS:
            raise ValueError(f"-k: {kind!r} is unknown; known are {', '.join(KINDS)}, all")
        if kind in DEVICE_KINDS and cuda.count() == 0:
            raise ValueError(f"-k: {kind!r} is for arrays of a GPU, and there is none here")
        if kind not in fitting and kind != "auto":
            raise ValueError(f"-k: {kind!r} {_why(kind, size, options.threads is not None)}")
    alone = fitting[0] if len(fitting) == 1 else "auto"  # what "auto" is there
    return [alone if kind == "auto" else kind for kind in options.communicators]


def _fitting(threads: bool, launched: worlds.Launch | None) -> list[str]:
    if threads:
        return ["thread"]
    if launched is None or launched.size == 1:
        return ["single"]
    fitting = ["mpi"]
    one_node = launched.local_size == launched.size
    if one_node:
        fitting.append("shm")
    gpus = cuda.count()
    if gpus:
        fitting += ["staged", "ipc"] if one_node else ["staged"]
        if gpus >= launched.local_size:
            fitting.append("nccl")
    return fitting


def _why(kind: str, size: int, threads: bool) -> str:
    if threads:
        return "does not fit ranks that are threads (-t); 'thread' does"
    if kind == "thread":
        return "needs ranks that are threads: -t N, without mpirun"
    if size == 1:
        return "has no peer to talk to: this run is of one rank; start it with mpirun -n 2"
    if kind == "single":
        return f"is of one rank, and this run is of {size}"
    if kind == "nccl":
        return "needs a GPU for each rank"
    return "needs all ranks on one node"
