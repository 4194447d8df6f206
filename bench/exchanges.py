"""Times an all_to_all with counts per peer, by turns with PyTorch's all_to_all_single with splits on gloo.

Both in one run and in the same processes, from the same arrays, which the counts are known of. "balanced": a
rank sends as much to each. "skewed": each sends 90 % to the last rank, as tokens to an expert that many like.
Memory is "ordinary", as activations have it, or "allocated" by our communicator, whose ranks then read it
where it lies; PyTorch's is ordinary. Every element is checked before anything is timed.

    python -m bench.exchanges --ranks 2
"""

import shardrt  # noqa: F401  isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from bench.beside_gloo import joined, over_ranks
from bench.command_line import Parser, add_forms, check_known, nbytes, words
from bench.environment import write_result
from bench.quiet import DISTURBED
from bench.table import as_csv
from shardrt import device
from shardrt.comm import Communicator, create
from shardrt.train.errors import USAGE, one_line

PATTERNS = ("balanced", "skewed")
MEMORY = ("ordinary", "allocated")
_SKEW = 0.9  # of what a rank sends, to the last one
_AT_ONCE = 8 << 20  # bytes that the calls of a round move together, if they are no more than _CALLS
_CALLS = 50
_STREAM = device.get("cpu").current_stream


class Case(NamedTuple):
    """So many bytes that each rank sends, to itself too."""

    pattern: str
    memory: str
    nbytes: int

    def counts(self, size: int) -> np.ndarray:
        """[s, r]: elements that rank s sends to rank r."""
        count = self.nbytes // 4
        row = np.full(size, count // size)
        if self.pattern == "skewed":
            row[:] = round(count * (1 - _SKEW) / max(1, size - 1))
        row[-1] = count - row[:-1].sum()
        return np.tile(row, (size, 1))


def arguments() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bench.exchanges", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="start so many (2)")
    parser.add_argument("--patterns", type=words, default=[*PATTERNS], metavar="NAME,...")
    parser.add_argument("--memory", type=words, default=[*MEMORY], metavar="NAME,...")
    parser.add_argument(
        "-b", "--least", type=nbytes, default=64 << 10, metavar="SIZE", help="of a rank (64K)"
    )
    parser.add_argument("-e", "--most", type=nbytes, default=64 << 20, metavar="SIZE", help="(64M)")
    parser.add_argument("-f", "--factor", type=int, default=4, metavar="N", help="between sizes (4)")
    parser.add_argument("--rounds", type=int, default=21, metavar="N", help="of each, by turns (21)")
    parser.add_argument(
        "--patience", type=float, default=60, metavar="SECONDS", help="for an idle machine (60)"
    )
    add_forms(parser)
    return parser


def main() -> None:
    with one_line(USAGE):
        options = arguments().parse_args()
        check_known("--patterns", options.patterns, PATTERNS)
        check_known("--memory", options.memory, MEMORY)
        if min(options.ranks, options.rounds, options.least // 4) < 1 or options.factor < 2:
            raise ValueError("--ranks, --rounds and sizes must be positive, --factor at least 2")
    result = over_ranks("bench.exchanges", options, lambda: list(measured(options)))
    if result is not None:
        show(result, options)


def measured(options: argparse.Namespace) -> Iterator[dict]:
    """The figures of each case on rank 0, nothing elsewhere. Collective."""
    own = create("auto")
    theirs = joined(own)
    sizes = [options.least]
    while sizes[-1] * options.factor <= options.most:
        sizes.append(sizes[-1] * options.factor)
    for case in (Case(*each) for each in product(options, sizes)):
        both = ours_of(own, case), theirs_of(theirs, own, case)
        calls = max(1, min(_CALLS, _AT_ONCE // case.nbytes))
        seconds = [[timed(call, calls, own) for call in both] for _ in range(options.rounds + 1)][1:]
        ours, gloo = np.array(seconds).T
        if own.rank == 0:
            us = [round(1e6 * statistics.median(each), 1) for each in (ours, gloo)]
            quarter, ratio, most = np.percentile(ours / gloo, (25, 50, 75)).round(3).tolist()
            yield {
                **case._asdict(),
                "us": us[0],
                "pytorch_us": us[1],
                "ratio": ratio,
                "quartiles": [quarter, most],
            }
    theirs.destroy_process_group()


def product(options: argparse.Namespace, sizes: list[int]) -> Iterator[tuple[str, str, int]]:
    for pattern in options.patterns:
        for memory in options.memory:
            for size in sizes:
                yield pattern, memory, size


def ours_of(own: Communicator, case: Case) -> Callable[[], None]:
    """A call of ours, which was right."""
    table = case.counts(own.size)
    sent, received = table[own.rank].tolist(), table[:, own.rank].tolist()
    if case.memory == "allocated":
        buffer = own.allocate(sum(sent), np.float32, shared=False)
    else:
        buffer = np.empty(sum(sent), np.float32)
    buffer[:], output = given(case, own.rank), np.full(sum(received), np.nan, np.float32)

    def call() -> None:
        own.all_to_all(output, buffer, received=received, sent=sent, stream=_STREAM, what="rows")

    call()
    check("ours", output, case, own)
    return call


def theirs_of(theirs: object, own: Communicator, case: Case) -> Callable[[], None]:
    """A call of PyTorch's, which was right."""
    import torch

    table = case.counts(own.size)
    sent, received = table[own.rank].tolist(), table[:, own.rank].tolist()
    buffer, output = torch.from_numpy(given(case, own.rank)), torch.full((sum(received),), np.nan)

    def call() -> None:
        theirs.all_to_all_single(output, buffer, received, sent)

    call()
    check("PyTorch's", output.numpy(), case, own)
    return call


def given(case: Case, rank: int) -> np.ndarray:
    """What a rank sends: other numbers from each, in another order than their places."""
    return (np.arange(case.nbytes // 4, dtype=np.int64) * 7919 % 1_000_003 + 2_000_000 * rank).astype("f4")


def check(whose: str, output: np.ndarray, case: Case, own: Communicator) -> None:
    """Raise RuntimeError where an element is wrong."""
    table = case.counts(own.size)
    starts = table[:, : own.rank].sum(axis=1)
    parts = [given(case, s)[starts[s] :][: table[s, own.rank]] for s in range(own.size)]
    if not np.array_equal(output, np.concatenate(parts)):
        raise RuntimeError(f"{whose} {case} is wrong on rank {own.rank}")


def timed(call: Callable[[], None], calls: int, own: Communicator) -> float:
    """Seconds of a call, from a start that all ranks share until the last has done it. Collective."""
    own.barrier(stream=_STREAM)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = np.array([(time.perf_counter() - start) / calls])
    own.all_reduce(seconds, op="max", stream=_STREAM)
    return float(seconds[0])


def show(result: dict, options: argparse.Namespace) -> None:
    rows = result["rows"]
    if options.json:
        print(json.dumps(result))
    elif options.csv:
        print(as_csv([*rows[0]], rows))
    else:
        print(f"{'':<20}{'KiB':>8}{'us':>12}{'PyTorch':>12}{'ratio':>8}")
        for row in rows:
            name = f"{row['pattern']}, {row['memory']}"
            print(
                f"{name:<20}{row['nbytes'] >> 10:>8}{row['us']:>12}{row['pytorch_us']:>12}{row['ratio']:>8}"
            )
        if result["other_load"] > DISTURBED:
            print(f"others used {result['other_load']:.1f} cores meanwhile")
    if options.output is not None:
        write_result(options.output, result)


if __name__ == "__main__":
    main()
