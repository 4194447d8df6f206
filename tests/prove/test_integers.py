"""What a step computes on real ranks, in integers, and what `shardrt prove` says of the same program."""

import numpy as np
import pytest

from shardrt.fsdp import collectives
from shardrt.fsdp.transfer import Transfer
from tests.prove.integers import Setting, integers, truth_of
from tests.prove.settings import proof_of, setting

SPREAD = (18, 20, 22, 36, 54, 60, 68, 70, 96, 126, 154, 160)


def check(seed):
    given = setting(seed)
    truth, proof = truth_of(given), proof_of(given)
    assert truth.differences() == []
    assert truth.updated
    assert truth.reads
    assert {runs for runs, _ in truth.uses().values()} == {given.backwards}
    assert (proof.findings, proof.order, proof.raised) == ([], [], "")
    assert proof.updates > 0
    assert proof.weights == {1 / given.divided_by}


@pytest.mark.parametrize("seed", SPREAD)
def test_real_ranks_compute_what_is_proved(seed):
    check(seed)


@pytest.mark.rest
@pytest.mark.parametrize("seed", [seed for seed in range(200) if seed not in SPREAD])
def test_all_settings_compute_what_is_proved(seed):
    check(seed)


SMALL = Setting((("dp_shard", 2),), {"strategy": ["FULL_SHARD"], "micro_batches": [("no_sync",)]})


def test_each_micro_batch_counts_once():
    truth = truth_of(SMALL)
    uses = truth.uses()
    assert {runs for runs, _ in uses.values()} == {2}
    tied = {writes for (*_, name), (_, writes) in uses.items() if name == "embed.weight"}
    assert tied == {4}  # the head uses it, too
    assert {writes for (*_, name), (_, writes) in uses.items() if name != "embed.weight"} == {2}


def test_a_sum_over_one_rank_is_seen(monkeypatch):
    reduce = collectives.reduce_scatter

    def alone(group, slot, full, out, accumulate, streams):
        own = full[slice(*group.layout.shard_range(group.ranks.rank))]
        if group.label == "blocks.2":
            streams.reduce.submit(streams.device.kernels.reduce.sum_into, out, [own], 0.5, accumulate)
        else:
            reduce(group, slot, full, out, accumulate, streams)

    monkeypatch.setattr(collectives, "reduce_scatter", alone)
    wrong = truth_of(SMALL).differences()
    assert wrong
    assert all("blocks.2" in each for each in wrong)


def test_a_shard_that_is_not_filled_in_is_seen(monkeypatch):
    fill = Transfer.fill
    moved = lambda self, slot, output, streams: fill(self, slot, slot.array[: output.size], streams)  # noqa: E731
    monkeypatch.setattr(Transfer, "fill", moved)
    assert any("is read" in each for each in truth_of(SMALL).differences())


def test_integers_depend_on_their_source():
    assert np.array_equal(integers(50, 16, 0, 1, "a"), integers(50, 16, 0, 1, "a"))
    assert not np.array_equal(integers(50, 16, 0, 1, "a"), integers(50, 16, 1, 0, "a"))
    assert {int(each) for each in integers(999, 16, 0)} == set(range(1, 17))
