"""The command line, that of nccl-tests, and what of it makes no sense: one line, before MPI starts."""

import argparse
from collections.abc import Callable, Collection, Iterator
from itertools import product
from pathlib import Path

from shardrt.comm.backends import CARRIERS

from ..harness.command_line import check_known, check_least, nbytes, words
from ..harness.communicators import under_mpi
from ..harness.sizes import multiplied
from . import offers
from .ops import DTYPES, NOBODY, NONE, OPS, PLACES, REDUCTIONS, Case, Op, itemsize, rounded
from .traffic import Traffic, traffic

_LEAST, _MOST, _FACTOR = 1 << 10, 32 << 20, 4  # what is swept when nothing is said
_MOST_SIZES = 100_000
_DTYPES = {theirs: ours for ours, theirs in DTYPES.items()} | {name: name for name in DTYPES}
_OPS = {"alltoall": "all_to_all"}
# nccl-tests' options of which only the value that changes nothing is taken: short, long, value, why
_FIXED = (
    ("-m", "--agg_iters", 1, "calls of ours and of MPI are not grouped; -n times calls in a row"),
    ("-G", "--cudagraph", 0, "a collective of ours is called by the host and not captured into a graph"),
    ("-C", "--report_cputime", 0, "the time of a call is until its result is there"),
    ("-T", "--timeout", 0, "put `timeout SECONDS` before the command"),
    ("-M", "--memory", 0, "bench.step measures memory"),
    ("-R", "--local_register", 0, "buffers are not registered with NCCL"),
    ("-D", "--device_implementation", 0, "there are no collectives inside of kernels"),
    ("-V", "--device_cta_count", 16, "there is no -D"),
    ("-x", "--cta_policy", 0, "it is not handed to NCCL"),
    ("-y", "--stream_null", 0, "collectives run in a stream of their own"),
    ("-u", "--unalign", 0, "buffers are where a communicator puts them"),
)
Group = tuple[Case, ...]  # a line of the table: a case in each place


def add_options(add: Callable) -> None:
    """What nccl-tests has besides -t, -g, -n, -w and -c; several types and reductions at once are ours."""
    add("ops", nargs="*", metavar="OP", help=f"{', '.join(OPS)} (all)")
    add("-b", "--minbytes", type=nbytes, metavar="SIZE", help="smallest size (1K)")
    add("-e", "--maxbytes", type=nbytes, metavar="SIZE", help="largest size (32M)")
    add("-f", "--stepfactor", type=int, metavar="N", help=f"between sizes ({_FACTOR})")
    add("-i", "--stepbytes", type=nbytes, metavar="SIZE", help="added between sizes, in place of -f")
    add("-o", "--op", dest="reductions", type=words, default=["sum"], metavar="A,B", help=_list(REDUCTIONS))
    add("-d", "--datatype", dest="dtypes", type=words, default=["float"], metavar="A,B", help=_list(_DTYPES))
    add("-r", "--root", default="0", metavar="RANK", help="of what has a root, or all (0)")
    add("-N", "--run_cycles", type=int, default=1, metavar="N", help="sweeps; 0: until interrupted (1)")
    ranks = "time over ranks: of rank 0, average, least, largest (1)"
    add("-a", "--average", type=int, default=1, choices=range(4), help=ranks)
    blocking = "after a call: go on; wait for it and all ranks; for it; as 1, ranks' wait not counted (0)"
    add("-z", "--blocking", type=int, default=0, choices=range(4), help=blocking)
    each = "time each call, too: least, largest, p99 and variation (0)"
    add("-I", "--per_iter_timing", type=int, default=0, choices=range(2), help=each)
    skipped = "calls at the start that the figures of -I leave out (0)"
    add("-K", "--per_iter_skip", type=int, default=0, metavar="N", help=skipped)
    stamps = "print the time of day in each line (0)"
    add("-S", "--report_timestamps", type=int, default=0, choices=range(2), help=stamps)
    add("-J", "--output_file", type=Path, metavar="FILE.json", help="write nccl-tests' JSON there, too")
    add("--replay", type=Path, metavar="DIR", help="replay a job's traces: bench.replay has its options")
    parallel = "accepted: ranks always start at once"
    add("-p", "--parallel_init", type=int, default=0, choices=range(2), help=parallel)
    add("--place", dest="places", type=words, default=["all"], metavar="A,B", help="out, in, all (all)")
    for short, long, value, why in _FIXED:
        add(short, long, type=int, default=value, metavar=str(value), help=f"nothing else: {why}")


def _list(names: Collection[str]) -> str:
    return f"{', '.join(names)}, all"


def groups(options: argparse.Namespace, ranks: int) -> list[Group]:
    """All that was asked for and that ours or the raw library offers, for groups of so many ranks.

    Raises ValueError if that is nothing. An op that was named must offer something; of all ops those that
    offer nothing are left out.
    """
    _check(options)
    reasons = _reasons(options)
    found: list[Group] = []
    for op in (OPS[name] for name in options.ops):
        asked = list(_groups(op, options, ranks))
        offered = [tuple(case for case in group if _offered(case, reasons)) for group in asked]
        offered = [group for group in offered if group]
        if not offered and options.named:
            raise ValueError(f"{op.name}: {_why_not(op, options, asked, reasons)}")
        found += offered
    if not any(case.nbytes for group in found for case in group):
        raise ValueError(
            f"-b, -e: {options.maxbytes} bytes are less than one element for each of {ranks} ranks"
        )
    return [group for group in found if group[0].nbytes]


def _reasons(options: argparse.Namespace) -> list[offers.Why]:
    """Who could be asked for a case, and says why not."""
    raw = [offers.raw_of(kind, under_mpi()) for kind in options.communicators]
    on_gpu = all(kind in CARRIERS for kind in options.communicators)
    return [lambda case: offers.why_not_ours(case, on_gpu), *(why for why in raw if why is not None)]


def _offered(case: Case, reasons: list[offers.Why]) -> bool:
    return not all(why(case) for why in reasons)


def _groups(op: Op, options: argparse.Namespace, ranks: int) -> Iterator[Group]:
    reductions = options.reductions if op.reduces else [NONE]
    roots = _roots(options.root, ranks) if op.rooted else [NOBODY]
    places = [place for place in options.places if place in op.places]
    uneven = traffic(ranks) if op.name == "alltoallv" else None
    sizes = _sizes(options)
    if uneven and not uneven(options.maxbytes).per_pair:
        sizes = sizes[-1:]  # a matrix says all sizes itself
    for dtype, reduction, root, size in product(options.dtypes, reductions, roots, sizes):
        moved = uneven(size) if uneven else None
        nbytes = _whole(moved, dtype) if moved else rounded(op, dtype, size, ranks)
        if moved and not moved.per_pair and nbytes > options.maxbytes:
            raise ValueError(f"-e: a rank of the matrix has {nbytes} bytes, more than {options.maxbytes}")
        yield tuple(Case(op, dtype, place, nbytes, ranks, reduction, root, moved) for place in places)


def _whole(moved: Traffic, dtype: str) -> int:
    """Bytes of the rank that has most; each pair's are whole elements (of at most 16 bytes)."""
    return moved.largest // itemsize(dtype) * itemsize(dtype)


def _why_not(op: Op, options: argparse.Namespace, asked: list[Group], reasons: list[offers.Why]) -> str:
    cases = [case for group in asked for case in group]
    if not cases:
        return "not offered in place"
    what = f"not offered for -d {','.join(options.dtypes)}"
    if op.reduces:
        what += f" -o {','.join(options.reductions)}"
    return (
        f"{what} --place {','.join(options.places)}: {'; '.join(dict.fromkeys(w(cases[0]) for w in reasons))}"
    )


def _roots(text: str, ranks: int) -> list[int]:
    if text in ("all", "-1"):
        return list(range(ranks))
    if not text.isdecimal() or int(text) >= ranks:
        raise ValueError(f"-r: must be a rank of {ranks} (0 to {ranks - 1}) or all, got {text!r}")
    return [int(text)]


def _sizes(options: argparse.Namespace) -> list[int]:
    if options.stepbytes:
        return list(range(options.minbytes, options.maxbytes + 1, options.stepbytes))
    return multiplied(options.minbytes, options.maxbytes, options.stepfactor)


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
    _check_files_and_iterations(options)
    _check_sizes(options)


def _check_files_and_iterations(options: argparse.Namespace) -> None:
    check_least({"-N": (options.run_cycles, 0)})
    if not options.run_cycles and len(options.communicators) > 1:
        raise ValueError("-N: 0 never ends, so it takes one communicator (-k)")
    calls = options.iters * options.rounds
    if not 0 <= options.per_iter_skip < calls:
        raise ValueError(f"-K: must be from 0 to {calls - 1} of {calls} calls, got {options.per_iter_skip}")
    if options.per_iter_skip and not options.per_iter_timing:
        raise ValueError("-K: leaves calls out of the figures of -I, and there is no -I 1")
    if options.output_file is not None and options.output_file.suffix != ".json":
        raise ValueError(f"-J: the name must end in .json, got {options.output_file}")


def _check_sizes(options: argparse.Namespace) -> None:
    if options.stepfactor is not None and options.stepbytes is not None:
        raise ValueError("-i: not allowed with argument -f")
    options.stepfactor = _FACTOR if options.stepfactor is None else options.stepfactor
    lowest = {"-f": (options.stepfactor, 2)}
    lowest |= {"-i": (1 if options.stepbytes is None else options.stepbytes, 1)}
    lowest |= {"-b": (1 if options.minbytes is None else options.minbytes, 1)}
    check_least(lowest)
    if options.minbytes is None:
        options.minbytes = min(_LEAST, options.maxbytes or _LEAST)
    if options.maxbytes is None:
        options.maxbytes = max(_MOST, options.minbytes)
    if options.maxbytes < options.minbytes:
        raise ValueError(f"-e: {options.maxbytes} bytes is less than -b, {options.minbytes}")
    if options.stepbytes and (options.maxbytes - options.minbytes) // options.stepbytes >= _MOST_SIZES:
        raise ValueError(f"-i: must make at most {_MOST_SIZES} sizes, got {options.stepbytes}")


def _known(what: str, given: list[str], known: Collection[str]) -> list[str]:
    if given == ["all"]:
        return list(known)
    check_known(what, given, known)
    return given
