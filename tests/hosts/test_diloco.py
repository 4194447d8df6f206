"""What hosts that train apart send: by the cables' counters, less than a hundredth of a synchronous run."""

import sys
from concurrent.futures import ThreadPoolExecutor

from tests.hosts.hosts import Hosts
from tests.hosts.test_crossing import HEADERS
from tests.ranks import ROOT

WIDTH, ROUNDS = 512, 4


def test_an_outer_step_in_4_bits_sends_less_than_a_hundredth_of_50_steps():
    with Hosts(2, 1, rate="10mbit") as made, ThreadPoolExecutor(2) as threads:

        def run(host):
            words = ["tests.hosts.apart", "10.77.0.1:29400", str(host), str(WIDTH), str(ROUNDS)]
            return made.run(host, ["sh", "-c", f"cd {ROOT} && exec {sys.executable} -m {' '.join(words)}"])

        before = [made.received(host) for host in range(2)]
        printed, _ = (done.stdout.splitlines() for done in threads.map(run, range(2)))
        wires = [made.received(host) - was for host, was in enumerate(before)]
    (found,) = (line for line in printed if not line.startswith("hub: "))
    elements, message = map(int, found.split())
    for wire in wires:  # a host's message, or that of the other host
        assert ROUNDS * message <= wire < (1 + HEADERS) * ROUNDS * message
        # In each of 50 steps FULL_SHARD gathers half of the parameters twice, and reduces their gradients.
        assert 100 * wire < ROUNDS * 50 * 3 * elements * 4 / 2
