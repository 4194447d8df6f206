"""The command line, that of nccl-tests, and what of it makes no sense: one line, before MPI starts."""

import argparse
import sys
from collections.abc import Collection
from itertools import product

from shardrt.comm import backends, mpi_world
from shardrt.device import cuda

from ..harness.command_line import Parser, add_forms, check_known, nbytes, words
from . import offers
from .ops import DTYPES, NOBODY, NONE, OPS, PLACES, REDUCTIONS, Case, Op, rounded

_LEAST, _MOST, _FACTOR = 1 << 10, 32 << 20, 4  # what is swept when nothing is said
_DTYPES = {theirs: ours for ours, theirs in DTYPES.items()} | {name: name for name in DTYPES}
_OPS = {"alltoall": "all_to_all"}
# nccl-tests' options of which only the value that changes nothing is taken: short, long, value, why
_FIXED = (
    ("-g", "--ngpus", 1, "a rank has one GPU: start mpirun -n N in its place"),
    ("-m", "--agg_iters", 1, "calls of ours and of MPI are not grouped; -n times calls in a row"),
    ("-G", "--cudagraph", 0, "a collective of ours is called by the host and not captured into a graph"),
    ("-C", "--report_cputime", 0, "the time of a call is until its result is there"),
    ("-S", "--report_timestamps", 0, "the head has the date"),
    ("-T", "--timeout", 0, "put `timeout SECONDS` before the command"),
    ("-M", "--memory", 0, "bench.step measures memory"),
    ("-I", "--per_iter_timing", 0, "-n calls are timed together; -n 1 --rounds N times each"),
    ("-K", "--per_iter_skip", 0, "there is no -I; -w says how many calls are not timed"),
    ("-R", "--local_register", 0, "buffers are not registered with NCCL"),
    ("-D", "--device_implementation", 0, "there are no collectives inside of kernels"),
    ("-V", "--device_cta_count", 16, "there is no -D"),
    ("-x", "--cta_policy", 0, "it is not handed to NCCL"),
    ("-y", "--stream_null", 0, "collectives run in a stream of their own"),
    ("-u", "--unalign", 0, "buffers are where a communicator puts them"),
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options as nccl-tests calls them. Raises ValueError."""
    parser = Parser(prog="python -m bench.collectives", description="Times collectives.", allow_abbrev=False)
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help=f"{', '.join(OPS)} (all)")
    _add_theirs(parser)
    add("--rounds", type=int, default=3, metavar="N", help="of -n calls, ours and raw alternating (3)")
    add("--place", dest="places", type=words, default=["all"], metavar="A,B", help="out, in, all (all)")
    known = f"{', '.join(backends.kinds())}, or all that fit this run (auto)"
    add("-k", "--communicators", type=words, default=["auto"], metavar="A,B", help=known)
    add_forms(parser, "-J", "--output_file")
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    options.given = " ".join(["python -m bench.collectives", *given])
    _check(options)
    return options


def _add_theirs(parser: argparse.ArgumentParser) -> None:
    """What nccl-tests has; several types and reductions at once are ours."""
    add = parser.add_argument
    add("-t", "--nthreads", type=int, default=1, metavar="N", help="ranks as threads, without mpirun (1)")
    add("-b", "--minbytes", type=nbytes, metavar="SIZE", help="smallest size (1K)")
    add("-e", "--maxbytes", type=nbytes, metavar="SIZE", help="largest size (32M)")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("-f", "--stepfactor", type=int, metavar="N", help=f"between sizes ({_FACTOR})")
    steps.add_argument("-i", "--stepbytes", type=nbytes, metavar="SIZE", help="added between sizes")
    add("-o", "--op", dest="reductions", type=words, default=["sum"], metavar="A,B", help=_list(REDUCTIONS))
    add("-d", "--datatype", dest="dtypes", type=words, default=["float"], metavar="A,B", help=_list(_DTYPES))
    add("-r", "--root", default="0", metavar="RANK", help="of what has a root, or all (0)")
    add("-n", "--iters", type=int, default=20, metavar="N", help="timed calls in a row (20)")
    add("-w", "--warmup_iters", type=int, default=1, metavar="N", help="untimed calls (1)")
    add("-N", "--run_cycles", type=int, default=1, metavar="N", help="sweeps over all sizes (1)")
    add("-c", "--check", type=int, default=1, metavar="N", help="rounds of checking, 0 for none (1)")
    ranks = "time over ranks: of rank 0, average, least, largest (1)"
    add("-a", "--average", type=int, default=1, choices=range(4), help=ranks)
    blocking = "after a call: go on; wait for it and all ranks; for it; as 1, ranks' wait not counted (0)"
    add("-z", "--blocking", type=int, default=0, choices=range(4), help=blocking)
    parallel = "accepted: ranks always start at once"
    add("-p", "--parallel_init", type=int, default=0, choices=range(2), help=parallel)
    for short, long, value, why in _FIXED:
        add(short, long, type=int, default=value, metavar=str(value), help=f"nothing else: {why}")


def _list(names: Collection[str]) -> str:
    return f"{', '.join(names)}, all"


def cases(options: argparse.Namespace, ranks: int) -> list[Case]:
    """All that was asked for and that ours or the raw library offers. Raises ValueError if that is nothing.

    An op that was named must offer something; of all ops those that offer nothing are left out.
    """
    launched = mpi_world.launch()
    under_mpi = launched is not None and launched.size > 1
    who = [offers.raw_of(kind, under_mpi) for kind in options.kinds]
    asked = [offers.ours, *(raw for raw in who if raw is not None)]
    found: list[Case] = []
    for op in (OPS[name] for name in options.ops):
        combinations = list(_cases(op, options, ranks))
        offered = [case for case in combinations if any(offer(case) for offer in asked)]
        if not offered and options.named:
            raise ValueError(f"{op.name}: {_why_not(op, options, combinations, asked)}")
        found += offered
    if not any(case.nbytes for case in found):
        raise ValueError(
            f"-b, -e: {options.maxbytes} bytes are less than one element for each of {ranks} ranks"
        )
    return [case for case in found if case.nbytes]


def _cases(op: Op, options: argparse.Namespace, ranks: int) -> list[Case]:
    reductions = options.reductions if op.reduces else [NONE]
    roots = _roots(options.root, ranks) if op.rooted else [NOBODY]
    places = [place for place in options.places if place in op.places]
    return [
        Case(op, dtype, place, rounded(op, dtype, size, ranks), ranks, reduction, root)
        for dtype, reduction, root, place, size in product(
            options.dtypes, reductions, roots, places, _sizes(options)
        )
    ]


def _why_not(op: Op, options: argparse.Namespace, combinations: list[Case], asked: list) -> str:
    if not combinations:
        return "not offered in place"
    what = f"not offered for -d {','.join(options.dtypes)}"
    if op.reduces:
        what += f" -o {','.join(options.reductions)}"
    what += f" --place {','.join(options.places)}"
    return what + (" by shardrt, and no raw library runs here" if len(asked) == 1 else "")


def _roots(text: str, ranks: int) -> list[int]:
    if text in ("all", "-1"):
        return list(range(ranks))
    if not text.isdigit() or int(text) >= ranks:
        raise ValueError(f"-r: must be a rank of {ranks} (0 to {ranks - 1}) or all, got {text!r}")
    return [int(text)]


def _sizes(options: argparse.Namespace) -> list[int]:
    if options.stepbytes:
        return list(range(options.minbytes, options.maxbytes + 1, options.stepbytes))
    sizes = [options.minbytes]
    while sizes[-1] * options.stepfactor <= options.maxbytes:
        sizes.append(sizes[-1] * options.stepfactor)
    return sizes


def _check(options: argparse.Namespace) -> None:
    for short, long, value, why in _FIXED:
        if getattr(options, long[2:]) != value:
            raise ValueError(f"{short}, {long}: only {value} is taken here: {why}")
    options.named = bool(options.ops)
    named = [_OPS.get(name.removesuffix("_perf"), name.removesuffix("_perf")) for name in options.ops]
    options.ops = _known("op", named or ["all"], OPS)
    options.reductions = _known("-o", options.reductions, REDUCTIONS)
    known = list(DTYPES) if options.dtypes == ["all"] else _known("-d", options.dtypes, _DTYPES)
    options.dtypes = list(dict.fromkeys(_DTYPES[name] for name in known))
    options.places = _known("--place", options.places, PLACES)
    options.kinds = _kinds(options)
    options.stepfactor = _FACTOR if options.stepfactor is None else options.stepfactor
    lowest = {"-f": (options.stepfactor, 2), "-w": (options.warmup_iters, 0), "-n": (options.iters, 1)}
    lowest |= {"--rounds": (options.rounds, 1), "-c": (options.check, 0), "-N": (options.run_cycles, 1)}
    lowest |= {"-i": (1 if options.stepbytes is None else options.stepbytes, 1)}
    lowest |= {"-b": (1 if options.minbytes is None else options.minbytes, 1)}
    for name, (value, least) in lowest.items():
        if value < least:
            raise ValueError(f"{name}: must be at least {least}, got {value}")
    if options.minbytes is None:
        options.minbytes = min(_LEAST, options.maxbytes or _LEAST)
    if options.maxbytes is None:
        options.maxbytes = max(_MOST, options.minbytes)
    if options.maxbytes < options.minbytes:
        raise ValueError(f"-e: {options.maxbytes} bytes is less than -b, {options.minbytes}")


def _known(what: str, given: list[str], known: Collection[str]) -> list[str]:
    if given == ["all"]:
        return list(known)
    check_known(what, given, known)
    return given


def _kinds(options: argparse.Namespace) -> list[str]:
    """The communicators to time; all of them fit this run."""
    launched = mpi_world.launch()
    if options.nthreads < 1:
        raise ValueError(f"-t: must be at least 1, got {options.nthreads}")
    threads = options.nthreads > 1
    if threads and launched is not None and launched.size > 1:
        raise ValueError("-t: ranks are threads or processes, not both; leave out mpirun or -t")
    unfit = {kind: _unfit(kind, threads, launched) for kind in backends.kinds() if kind != "auto"}
    fitting = [kind for kind, why in unfit.items() if not why]
    if options.communicators == ["all"]:
        return fitting
    for kind in options.communicators:
        if kind not in backends.kinds():
            raise ValueError(f"-k: {kind!r} is unknown; known are {', '.join(backends.kinds())}, all")
        if why := unfit.get(kind):
            raise ValueError(f"-k: {kind!r} {why}")
    alone = fitting[0] if len(fitting) == 1 else "auto"  # what "auto" is there
    return [alone if kind == "auto" else kind for kind in options.communicators]


def _unfit(kind: str, threads: bool, launched: mpi_world.Launch | None) -> str:
    """Why a communicator can't carry the ranks of this run; "" where it can."""
    if kind in backends.CARRIERS and not cuda.count():
        return "is for arrays of a GPU, and there is none here"
    if threads:
        return "" if kind == "thread" else "does not fit ranks that are threads (-t); 'thread' does"
    if kind == "thread":
        return "needs ranks that are threads: -t N, without mpirun"
    if launched is None or launched.size == 1:
        why = "has no peer to talk to: this run is of one rank; start it with mpirun -n 2"
        return "" if kind == "single" else why
    if kind == "single":
        return f"is of one rank, and this run is of {launched.size}"
    if kind in ("shm", "ipc") and launched.local_size != launched.size:
        return "needs all ranks on one node"
    if kind == "nccl" and cuda.count() < launched.local_size:
        return "needs a GPU for each rank"
    return ""
