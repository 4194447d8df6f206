"""The figures of one run, memory among them, as every contestant gives them. Knows neither of them."""

import argparse
import json
import platform
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .harness.environment import facts, write_result
from .workload import Job

_PAUSE = 0.01  # seconds between samples of memory


@dataclass(frozen=True)
class RankFigures:
    """What one rank measured.

    Of the timed steps the seconds of each and a processor's seconds for one, on average; the losses of all;
    memory in 10^6 bytes.
    """

    seconds: Sequence[float]
    processor: float
    losses: Sequence[float]
    peak_rss_mb: float
    peak_pss_mb: float


def figures(
    workload: Job,
    ranks: Sequence[RankFigures],
    *,
    contestant: str,
    parameters: int,
    settings: dict,
    versions: dict,
) -> dict:
    """The JSON object of a run.

    Each rank times its steps without a barrier; what counts is the median of the slowest rank, and the
    largest rank's memory. `processor_ms`, of all threads of a rank, says more than the clock where others
    use the cores. `losses` are the mean over ranks, of the warm-up steps too. Memory is told twice:
    resident set size (RSS) counts a page that ranks share once for each of them, proportional set size (PSS)
    once in all; so PSS added over ranks (`job_pss_mb`) is what the job takes of the machine.
    """
    slowest = max((rank.seconds for rank in ranks), key=statistics.median)
    median = statistics.median(slowest)
    losses = [statistics.fmean(step) for step in zip(*(rank.losses for rank in ranks), strict=True)]
    return {
        "contestant": contestant,
        "step_ms_median": round(1e3 * median, 3),
        "processor_ms": round(1e3 * statistics.fmean(rank.processor for rank in ranks), 3),
        f"{workload.UNIT}_per_s": round(len(ranks) * workload.count / median, 1),
        "gflops_per_rank": float(f"{workload.flops / median / 1e9:.4g}"),
        "peak_rss_mb": round(max(rank.peak_rss_mb for rank in ranks), 1),
        "peak_pss_mb": round(max(rank.peak_pss_mb for rank in ranks), 1),
        "job_pss_mb": round(sum(rank.peak_pss_mb for rank in ranks), 1),
        "world_size": len(ranks),
        "parameters": parameters,
        "loss": losses[-1],
        "losses": losses,
        "step_ms": [round(1e3 * seconds, 3) for seconds in slowest],
        "workload": workload.facts(),
        "settings": settings,
        "versions": {"python": platform.python_version(), "numpy": np.__version__, **versions},
    }


def show(result: dict, lines: Sequence[str], options: argparse.Namespace) -> None:
    """Print the lines `told` for a reader, unless --json, and then, as the last line, the JSON object.

    With --output it goes to a file as well, with what it belongs to.
    """
    if not options.json:
        print("\n".join(lines))
    print(json.dumps(result), flush=True)
    if options.output is not None:
        module = sys.modules["__main__"].__spec__.name
        lines = facts(" ".join(["python -m", module, *sys.argv[1:]]))
        write_result(options.output, lines | result)


def process_peak_mb() -> float:
    """Peak resident memory of this process so far, in 10^6 bytes, pages shared with other ranks included.

    From /proc: getrusage's figure survives exec and can be the parent's.
    """
    return _kilobytes("/proc/self/status", "VmHWM:") * 1024 / 1e6


def proportional_mb() -> float:
    """This process's memory now in 10^6 bytes, each page divided by the number of processes that share it."""
    return _kilobytes("/proc/self/smaps_rollup", "Pss:") * 1024 / 1e6


def _kilobytes(path: str, field: str) -> int:
    with open(path, encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))


@contextmanager
def sampled(read: Callable[[], Any]) -> Iterator[list[Any]]:
    """Fills a list with what `read` gives, again and again while a with block runs: of what has no peak.

    Walking the pages of a process takes milliseconds, so no step inside is to be timed.
    """
    seen, ended = [read()], threading.Event()

    def sample() -> None:
        while not ended.wait(_PAUSE):
            seen.append(read())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield seen
    finally:
        ended.set()
        sampler.join()
