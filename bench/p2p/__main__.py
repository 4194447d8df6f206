"""Times messages between pairs of ranks in the manner of OSU's micro-benchmarks, and the matrix of all pairs.

    mpirun -n 2 shardrt bench p2p                # latency, bandwidth, bibw, message_rate, matrix
    mpirun -n 4 shardrt bench p2p matrix -e 4M --picture matrix.png
    shardrt bench p2p latency -t 2 -e 64K        # ranks as threads

Exit code 1 where a byte was wrong, 2 for options that make no sense.
"""

import shardrt  # noqa: F401  # isort: skip  before NumPy: it sets the threads of BLAS

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from shardrt.comm import Communicator
from shardrt.device import Device

from ..harness import benchmark, communicators, picture
from ..harness.sizes import add_sizes
from ..harness.stats import stats
from ..harness.timing import Call, Contestant, Effort, Measured, in_order, measured
from ..harness.values import count_wrong, fill, poison, values
from .cases import ANSWER, TESTS, Case, cases_of
from .matrix import FIGURES, draw, matrices
from .ways import RAW, Way, ways_of

Array = Any


class PointToPoint(benchmark.Benchmark):
    """Time messages between pairs of ranks: OSU's micro-benchmarks, and the matrix of all pairs."""

    name = "p2p"
    iters = 100
    columns: Mapping[str, str] = {
        **{"test": "<12", "communicator": "<12", "how": "<8", "pair": ">7", "bytes": ">8", "window": ">6"},
        **{"iterations": ">10", "avg_us": "9.2f", "p50_us": "9.2f", "p99_us": "9.2f", "gb_s": "7.3f"},
        **{"messages_s": "10.0f", "wrong": ">5", "ours_raw": "8.3f"},
    }

    def add_options(self, add: Callable) -> None:
        """Tests, sizes, pairs."""
        add("tests", nargs="*", metavar="TEST", help=f"{', '.join(TESTS)} (all)")
        add_sizes(add, "1", "1M", 16)
        add("-W", "--window", type=int, default=64, metavar="N", help="messages before an answer (64)")
        add("--pair", metavar="A,B", help="ranks of latency, bandwidth and bibw (0 and the last)")
        picture.add_option(add, "the matrix")

    def cases(self, options: argparse.Namespace, ranks: int) -> Sequence[Case]:
        """Test after test, from small to large."""
        return cases_of(options, ranks)

    def lines(
        self, options: argparse.Namespace, cases: Sequence[Case], control: Communicator
    ) -> Iterator[dict]:
        """A line for each way, communicator after communicator."""
        most = max(ANSWER, *(case.window * case.nbytes for case in cases))
        for kind in options.communicators:
            with communicators.opened(kind, self.wrap) as (communicator, device):
                ways = ways_of(kind, communicator, device)
                own, theirs = (device.buffer(most, np.uint8) for _ in range(2))
                for case in cases:
                    contestants = {
                        way.name: _contestant(way, case, control.rank, device, own, theirs)
                        for way in ways
                        if case.does in way.tests
                    }
                    found = _measured(case, contestants, device, control, options.effort)
                    yield from _lines(kind, case, found)

    def text(self, line: dict) -> str | None:
        """Pairs of a matrix wait until all are there."""
        return None if line["test"] in FIGURES else super().text(line)

    def tail(self, lines: Sequence[dict]) -> tuple[list[str], dict]:
        """Matrices, and the verdict."""
        found = matrices(lines)
        text, more = super().tail(lines)
        more = {"matrices": [asdict(each) for each in found], **more}
        return [*(each.text() for each in found), *text], more

    def close(self, options: argparse.Namespace, lines: Sequence[dict]) -> None:
        """Draw the picture."""
        if options.picture is not None:
            draw(matrices(lines), options.picture)


def _contestant(way: Way, case: Case, rank: int, device: Device, own: Array, theirs: Array) -> Contestant:
    """What a rank does in one iteration: nothing where it is in no pair."""
    peer, stream = case.peer(rank), device.current_stream
    if peer is None:
        return Contestant(lambda: None, lambda round_: 0)
    call, whole = _iteration(way, case, rank, own, theirs), case.window * case.nbytes
    sent, got = (whole, case.answer) if rank in case.firsts else (case.answer, whole)

    def check(round_: int) -> int:
        poison(theirs[:got])
        fill(device, own[:sent], lambda indices: values(rank, indices, round_, "uint8"))
        stream.synchronize()
        call()
        stream.synchronize()
        return count_wrong(device, theirs[:got], lambda *part: _expected(peer, *part, round_))

    return Contestant(call, check)


def _iteration(way: Way, case: Case, rank: int, own: Array, theirs: Array) -> Call:
    """Messages lie one after the other in `own` and `theirs`: each has its own memory, and its own values."""
    places = [slice(i * case.nbytes, (i + 1) * case.nbytes) for i in range(case.window)]
    sent, received, peer = (
        [own[place] for place in places],
        [theirs[place] for place in places],
        case.peer(rank),
    )
    if case.does == "bibw":
        return way.swap(received, sent, peer)
    if rank in case.firsts:
        return in_order(way.send(sent, peer), way.receive([theirs[: case.answer]], peer))
    return in_order(way.receive(received, peer), way.send([own[: case.answer]], peer))


def _expected(sender: int, start: int, stop: int, round_: int) -> np.ndarray:
    return values(sender, np.arange(start, stop, dtype=np.uint64), round_, "uint8")


def _measured(
    case: Case, contestants: Mapping[str, Contestant], device: Device, control: Communicator, effort: Effort
) -> dict[str, Measured]:
    """Without the first iteration of a round, for which ranks leave a barrier one after the other."""
    calls = case.iterations(effort.calls)
    found = measured(contestants, device, control, replace(effort, each=True, calls=calls + 1))
    for how, each in found.items():
        rounds = each.each.reshape(control.size, effort.rounds, calls + 1)[:, :, 1:]
        found[how] = replace(each, each=rounds.reshape(control.size, -1))
    return found


def _lines(kind: str, case: Case, found: Mapping[str, Measured]) -> list[dict]:
    """A line for each way; what is wrong has no figures."""
    pair = "-".join(map(str, case.pairs[0])) if len(case.pairs) == 1 else f"{len(case.pairs)} pairs"
    lines = []
    for how, each in found.items():
        what = {"test": case.test, "communicator": kind, "how": how, "pair": pair, "bytes": case.nbytes}
        what |= {"window": case.window, "iterations": each.each.shape[1]}
        figures = _figures(case, each)
        if each.wrong:
            figures = dict.fromkeys(figures)
        lines.append({**what, **figures, "wrong": each.wrong, "ours_raw": None})
    raw = next((line["p50_us"] for line in lines if line["how"] in RAW), None)
    for line in lines:
        if raw and line["p50_us"] and line["how"] not in RAW:
            line["ours_raw"] = line["p50_us"] / raw
    return lines


def _figures(case: Case, found: Measured) -> dict[str, float]:
    """Times of iterations (latency: of half of one) on the ranks that send first; rates by their average."""
    seconds = found.each[case.firsts].ravel() / (2 if case.does == "latency" else 1)
    us = stats(1e6 * seconds)
    rates = {"gb_s": case.messages * case.nbytes / us.avg / 1e3, "messages_s": 1e6 * case.messages / us.avg}
    return {"avg_us": us.avg, "p50_us": us.p50, "p99_us": us.p99, **rates}


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    return benchmark.main(PointToPoint(), arguments)


if __name__ == "__main__":
    sys.exit(main())
