"""Figures of two hosts whose link has a rate and a latency: `python -m tests.hosts [RATE] [MILLISECONDS]`.

What sums and gathers take beside MPI's own, and steps by strategy beside simulated ones, as JSON lines. The
simulation has the link's latency, the rate that gathers have reached, and of the machine cpu-2 what cores do.
"""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from bench.harness.environment import facts, write_result
from shardrt.simulate.machine import Link
from tests import lab
from tests.hosts.hosts import Hosts
from tests.hosts.steps import simulated

WIDTH = 1024
STRATEGIES = ("FULL_SHARD", "HYBRID_SHARD")


def measured(
    hosts: Hosts, latency: float, *, megabytes: int = 16, layers: int = 8, rounds: int = 7
) -> tuple[list[dict], list[dict]]:
    """(sums and gathers, steps); latency: seconds from host to host. Raises AssertionError."""

    def rows(*command: str) -> list[dict]:
        with hosts.launching():
            return [json.loads(line) for line in lab.printed(4, "-m", *command)]

    calls = rows("tests.hosts.crossing", str(megabytes), str(rounds))
    steps = rows("tests.hosts.steps", str(WIDTH), str(layers), str(rounds), *STRATEGIES)
    (gather,) = (row for row in calls if (row["call"], row["way"]) == ("all_gather", "ours"))
    network = Link(latency, gather["across"] / (gather["ms"] / 1e3 - latency))
    for row in steps:
        seconds = simulated(row["strategy"], WIDTH, layers, network, len(hosts.names), hosts.slots)
        row |= {"simulated_ms": round(1e3 * seconds, 2), "error": round(1e3 * seconds / row["ms"] - 1, 4)}
    return calls, steps


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("rate", nargs="?", default="1gbit", help="of each cable, as tc has it (1gbit)")
    parser.add_argument("milliseconds", nargs="?", type=float, default=1.0, help="from host to host (1)")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write JSON")
    given = parser.parse_args(arguments)
    with Hosts(rate=given.rate, latency=given.milliseconds / 2e3) as hosts:
        calls, steps = measured(hosts, given.milliseconds / 1e3)
    full, hybrid = steps
    ratio = {name: round(full[name] / hybrid[name], 3) for name in ("ms", "simulated_ms", "expected", "wire")}
    print(*map(json.dumps, [*calls, *steps, {"FULL_SHARD over HYBRID_SHARD": ratio}]), sep="\n")
    if given.output:
        message = facts(shlex.join(["python", "-m", "tests.hosts", *arguments]))
        message |= {"load_average": list(os.getloadavg()), "calls": calls, "steps": steps, "ratio": ratio}
        write_result(given.output, message)


if __name__ == "__main__":
    main(sys.argv[1:])
