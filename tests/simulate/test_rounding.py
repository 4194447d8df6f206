"""simulate/rounding.py: what rounds more is suggested where it makes a plan fit, or faster."""

import json
from dataclasses import replace

import pytest

from models import train
from shardrt.__main__ import main as shell
from shardrt.simulate.machine import Link, Machine
from shardrt.simulate.plan import search
from shardrt.simulate.rounding import suggested
from shardrt.simulate.space import candidates, words_of
from shardrt.simulate.step import simulated

SMALL = [
    *("--architecture", "llama", "--batch-size", "16"),  # without the default recipe, which has Muon
    *("--model.n-layer", "2", "--model.block-size", "32", "--model.vocab-size", "4000"),
    *("--data", "text.txt", "--steps", "2", "--sample.length", "0", "--fsdp.strategy", "FULL_SHARD"),
]
SLOW = replace(Machine.load("h100-8"), ranks_per_node=2, network=Link(1e-5, 1e7))
pytestmark = pytest.mark.usefixtures("text")


def planned(capsys, gb, *more):
    arguments = "--ranks", "16", "--machine", "h100-8", "--memory", str(gb), "--tries", "1", "--json"
    shell(["plan", *arguments, *more, "--", "models.train", *SMALL])
    return json.loads(capsys.readouterr().out)


def test_a_state_in_8_bits_is_suggested_where_the_plan_fits_only_so(capsys):
    (over,) = planned(capsys, 1e-3)["over"]
    most, state = over["device_bytes"], over["memory"]["device"]["optimizer state"]
    assert planned(capsys, (most - state / 2) / 1e9, "--vary", "optimizer.name=adamw")["rounding"] == []
    found = planned(capsys, (most - state / 2) / 1e9)
    (row,) = found["rounding"]
    assert found["plans"] == [] and row["script"][-2:] == ["--optimizer.name", "adamw8bit"]
    assert row["device_bytes"] < most - state / 2 and "adamw8bit" in row["simulate"]


def test_collectives_in_8_bits_are_suggested_where_links_between_hosts_bind():
    recipe = train.parse(SMALL)

    def simulate(candidate):
        return simulated(["models.train", *SMALL, *candidate.words], 4, SLOW)

    limits = {"device": 1e9}
    (one,) = candidates(recipe, given=set(), ranks=4, node=2, only=True)
    found = search([one], simulate, limits)
    how = {"simulate": simulate, "limits": limits}
    (plan,) = suggested(found, words_of(recipe), **how, hosts=2)
    assert plan.candidate.options["precision.quantized_gradients"] == "8"
    assert plan.report.ms < 0.5 * found.best[0].report.ms
    assert suggested(found, words_of(recipe), **how, hosts=1) == []
    assert suggested(found, words_of(recipe), **how, hosts=2, given={"precision.quantized_weights"}) == []
