"""What crosses is what the formulas say: by the cables' own counters, and by the communicator's."""

import json

import pytest

from tests import lab
from tests.hosts.__main__ import STRATEGIES, measured
from tests.hosts.hosts import Hosts

pytestmark = pytest.mark.mpi
HEADERS = 0.08  # of what is sent: Ethernet, IP and TCP, what acknowledges, and what ranks tell each other


def test_sums_and_gathers_send_once_per_host_what_flat_ones_send_once_per_rank(hosts):
    rows = [json.loads(line) for line in lab.printed(4, "-m", "tests.hosts.crossing", "4", "3")]
    found = {(row["call"], row["way"]): row for row in rows}
    nbytes, ranks, slots, count = rows[0]["buffer"], 4, 2, 2
    each = nbytes / ranks
    into_a_host = {  # bytes that its two ranks receive
        ("reduce_scatter", "ours"): slots * (count - 1) * each,
        ("all_gather", "ours"): slots * (count - 1) * each,
        ("reduce_scatter", "flat"): slots * (ranks - slots) * each,
    }
    for key, expected in into_a_host.items():
        assert expected <= found[key]["wire"] < (1 + HEADERS) * expected, (key, found[key], expected)
    for call in ("reduce_scatter", "all_gather"):
        assert found[call, "ours"]["across"] == (count - 1) * each


@pytest.mark.parametrize("kind", ["", pytest.param("-bfloat16", marks=pytest.mark.hosts)])
def test_a_step_sends_between_hosts_what_its_strategy_says(hosts, kind):
    strategies = [f"{name}{kind}" for name in STRATEGIES]
    rows = lab.printed(4, "-m", "tests.hosts.steps", "512", "4", "3", *strategies)
    assert len(rows) == len(strategies)
    for row in map(json.loads, rows):
        assert row["expected"] <= row["wire"] < (1 + HEADERS) * row["expected"], row


def test_quantised_collectives_send_between_hosts_what_the_formula_says(hosts):
    kinds = "FULL_SHARD-bits", "FULL_SHARD-secondary", "HYBRID_SHARD-bits"
    rows = lab.printed(4, "-m", "tests.hosts.steps", "512", "4", "3", *kinds)
    assert len(rows) == len(kinds)
    for row in map(json.loads, rows):
        print(
            f"{row['strategy']}: {row['wire']:.0f} bytes on the cable, {row['expected']:.0f} by the formula"
        )
        assert row["expected"] <= row["wire"] < (1 + HEADERS) * row["expected"], row


@pytest.mark.hosts
def test_a_quantised_step_is_faster_than_one_in_bfloat16_by_more_than_twice_where_cables_take_the_time():
    with Hosts(rate="10mbit") as made, made.launching():
        kinds = "FULL_SHARD-bfloat16", "FULL_SHARD-bits", "FULL_SHARD-secondary"
        rows = lab.printed(4, "-m", "tests.hosts.steps", "512", "3", "2", *kinds)
    sixteen, bits, secondary = (json.loads(row)["ms"] for row in rows)
    assert sixteen / bits > 2.5, rows
    assert sixteen / secondary > 3, rows


@pytest.mark.hosts
def test_a_hybrid_step_is_as_much_faster_than_a_full_one_as_is_simulated():
    with Hosts(rate="50mbit", latency=5e-4) as made:  # so slow that it takes the time, not the cores
        _, (full, hybrid) = measured(made, 1e-3, megabytes=4, layers=2, rounds=3)
    ratio, simulated = full["ms"] / hybrid["ms"], full["simulated_ms"] / hybrid["simulated_ms"]
    assert 0.85 < ratio / simulated < 1.15, f"{ratio:.3f}, {simulated:.3f} simulated: {full}, {hybrid}"
