"""Figures of two hosts whose link has a rate and a latency: `python -m tests.hosts [RATE] [MILLISECONDS]`.

What sums and gathers take beside MPI's own, and steps by strategy, as JSON lines.
"""

import argparse
import sys

from tests.hosts.hosts import Hosts
from tests.ranks import mpirun


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts", description=__doc__)
    parser.add_argument("rate", nargs="?", default="1gbit", help="of each cable, as tc has it (1gbit)")
    parser.add_argument("milliseconds", nargs="?", type=float, default=1.0, help="from host to host (1)")
    given = parser.parse_args(arguments)
    with Hosts(rate=given.rate, latency=given.milliseconds / 2e3) as hosts, hosts.launching():
        for command in (["crossing", "16", "7"], ["steps", "1024", "8", "7", "FULL_SHARD", "HYBRID_SHARD"]):
            done = mpirun(4, ["-m", f"tests.hosts.{command[0]}", *command[1:]])
            print(done.stdout, done.stderr, sep="", flush=True)
            assert done.returncode == 0


if __name__ == "__main__":
    main(sys.argv[1:])
