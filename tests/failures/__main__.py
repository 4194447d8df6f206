"""Every failure in every phase at 2, 3 and 4 ranks, and a JSON line of how long each kind took to end.

`--hosts`: on two hosts, made of namespaces by root (tests/hosts), with half of the ranks each.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.harness.environment import facts
from shardrt.faults.reports import LISTENING
from tests.clock import soon
from tests.failures.matrix import LIMIT, Case, cases, check, prepare
from tests.hosts.hosts import Hosts
from tests.ranks import add_launcher, mpirun_path

PROMISED = 2.0  # seconds, or as many after the limit of the watchdog: docs/explanation/failures.md


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.failures", description=__doc__)
    parser.add_argument("sizes", type=numbers, nargs="?", default="2,3,4", help="of jobs: 2,3,4 if left out")
    add_launcher(parser)
    parser.add_argument("--hosts", action="store_true", help="on two hosts, made here (MPICH)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="of names such as kill-save-4-tp2")
    parser.add_argument("--victim", type=int, default=0, metavar="RANK", help="1, 2, ...; or by failure")
    given = parser.parse_args(arguments)
    if not 0 <= given.victim < min(given.sizes):
        parser.error("--victim must be a rank of every size, and not rank 0")
    if given.hosts and given.mpirun:
        parser.error("--hosts has its own mpirun")
    launcher, python = given.mpirun, given.python
    began, seconds, wrong = time.monotonic(), {}, []
    chosen = [case for case in cases(given.sizes) if re.search(given.only, str(case))]
    chosen = [replace(case, rank=given.victim) for case in chosen]
    with tempfile.TemporaryDirectory() as name:
        folder = prepare(Path(name))
        for case in chosen:
            try:
                with placed(case, folder, given.hosts) as grace:
                    took = check(case, folder, launcher, python, grace)
                seconds.setdefault(case.failure, []).append(took)
            except AssertionError as error:
                wrong.append(str(case))
                print(error, file=sys.stderr, flush=True)
    version = subprocess.run([launcher or mpirun_path(), "--version"], capture_output=True, text=True)
    result = {
        "mpirun": next((" ".join(line.split()) for line in version.stdout.split("\n") if "." in line), ""),
        "sizes": ",".join(map(str, given.sizes)),
        "hosts": 2 if given.hosts else 1,
        "victim": given.victim,
        "commit": facts("")["commit"],
        "load": round(os.getloadavg()[0], 1),
        "only": given.only,
        "cases": len(chosen),
        "wrong": wrong,
        "limit_s": LIMIT,
        "seconds_to_the_end": {
            failure: {"median": round(sorted(took)[len(took) // 2], 2), "max": round(max(took), 2)}
            for failure, took in seconds.items()
        },
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result))
    return bool(wrong)


@contextmanager
def placed(case: Case, folder: Path, on_hosts: bool) -> Iterator[Callable[[float], float]]:
    """Where its job runs; gives its grace, which on hosts is what the suite allows under any load."""
    if not on_hosts:
        yield lambda started: PROMISED
        return
    with Hosts(2, -(-case.size // 2), shared=[folder]) as made, made.launching():
        yield lambda started: LISTENING + 1 + soon(case.size, started / 2)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
