"""Several forwards before a backward, and old losses that somebody keeps: right, in the memory of one."""

from itertools import pairwise

import numpy as np
import pytest

from shardrt import nn, optim
from shardrt.comm import thread
from shardrt.fsdp import MixedPrecisionPolicy, no_sync, set_world_invariant
from shardrt.recompute import checkpoint
from tests import lab

FIRST, SECOND = lab.batches(2)


def one_backward(model, batches):
    losses = [lab.loss_of(model, *batch) for batch in batches]
    (losses[0] * 2.0 - losses[1]).backward()


def newest_first(model, batches):
    losses = [lab.loss_of(model, *batch) for batch in batches]
    (losses[1] * -1.0).backward()
    (losses[0] * 2.0).backward()


def oldest_first(model, batches):
    losses = [lab.loss_of(model, *batch) for batch in batches]
    (losses[0] * 2.0).backward()
    (losses[1] * -1.0).backward()


def one_after_the_other(model, batches):
    lab.backward(model, None, batches[0], scale=2.0)
    lab.backward(model, None, batches[1], scale=-1.0)


def an_old_loss_is_kept(model, batches):
    model.kept = lab.loss_of(model, *batches[1])
    one_after_the_other(model, batches)


def not_reduced_at_first(model, batches):
    losses = [lab.loss_of(model, *batch) for batch in batches]
    with no_sync(model):
        (losses[1] * -1.0).backward()
    (losses[0] * 2.0).backward()


WAYS = [one_backward, newest_first, oldest_first, an_old_loss_is_kept, not_reduced_at_first]
SETTINGS = {
    "FULL_SHARD": {},
    "prefetch 2": {"prefetch": 2},
    "SHARD_OPT": {"strategy": "SHARD_OPT"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD"},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy("bfloat16", "float32")},
    "a unit called twice": {"make": lab.CalledTwice},
    "recomputed units": {"attach": checkpoint},
    "recomputed stages of units": {"make": lab.Nested, "attach": checkpoint, "kinds": nn.Sequential},
}


def run(way, **settings):
    """Gradients after `way`, on this rank's part of two batches; slots of both kinds, and the most in use."""
    model, mesh = lab.build(**settings)
    way(model, [lab.rows(mesh, *FIRST), lab.rows(mesh, *SECOND)])
    return lab.gradients(model), [lab.slots(model, role) for role in ("gathered", "gradients")]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_two_forwards_give_the_gradients_and_take_the_slots_of_one(settings):
    ranks = 4 if settings.get("strategy") == "HYBRID_SHARD" else 2
    expected, plan = lab.first(ranks, run, one_after_the_other, **settings)
    for way in WAYS:
        found, slots = lab.first(ranks, run, way, **settings)
        if way is not not_reduced_at_first:  # which takes full gradients of all units
            assert slots == plan, way
        lab.assert_close(found, expected, way, of_largest=1e-5)


def calls_of(forwards, **settings):
    """Gathers and reductions of the second step."""
    counts = lab.Counts()
    model, mesh = lab.build(wrap=counts, **settings)
    for _ in range(2):
        counts.reset()
        losses = [lab.loss_of(model, *lab.rows(mesh, *FIRST)) for _ in range(forwards)]
        sum(losses[1:], start=losses[0]).backward()
    return counts.calls("all_gather", "reduce_scatter")


@pytest.mark.parametrize("attach", [None, checkpoint])
def test_each_forward_gathers_and_reduces_once_more(attach):
    one, two, three = (lab.first(2, calls_of, n, attach=attach) for n in (1, 2, 3))
    # The outermost unit is gathered for the first forward only, and again for backward of all but the newest.
    assert [np.subtract(b, a).tolist() for a, b in pairwise((one, two, three))] == [[7, 4]] * 2


def updated(in_backward, **settings):
    model, mesh = lab.build(**settings)
    optimizer = optim.SGD(model.parameters(), lr=0.1, in_backward=in_backward)
    for _ in range(2):
        one_backward(model, [lab.rows(mesh, *FIRST), lab.rows(mesh, *SECOND)])
        lab.update(optimizer)
    return [np.array(parameter.shard) for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_OPT", "recomputed stages of units"])
def test_an_update_in_backward_waits_for_the_last_forward(name):
    expected, found = (thread.run(2, updated, when, **SETTINGS[name]) for when in (False, True))
    lab.assert_equal(found, expected)


def one_backward_raises(model, batches):
    """The newer of two forwards fails in the middle of its backward; the other one goes on."""
    kept = lab.loss_of(model, *batches[0])
    with lab.backward_raises(model.blocks[1]):
        lab.backward(model, None, batches[1])
    model.zero_grad()
    (kept * 2.0).backward()


def only_the_first(model, batches):
    lab.backward(model, None, batches[0], scale=2.0)


@pytest.mark.parametrize("name", ["FULL_SHARD", "SHARD_OPT", "recomputed units"])
def test_after_a_backward_that_raised_another_forward_has_its_own_whole(name):
    expected, _ = lab.first(2, run, only_the_first, **SETTINGS[name])
    found, _ = lab.first(2, run, one_backward_raises, **SETTINGS[name])
    lab.assert_equal(found, expected)


def invariant(attach):
    """Gradients of four micro-batches, in each of which the model runs twice."""
    model, mesh = lab.build(attach=attach)
    set_world_invariant(model, 4)
    for turn in range(4 // mesh.size):
        mine = slice(3 * (turn * mesh.size + mesh.rank), 3 * (turn * mesh.size + mesh.rank) + 3)
        losses = [lab.loss_of(model, *(array[mine] for array in batch)) for batch in (FIRST, SECOND)]
        ((losses[0] * 2.0 - losses[1]) * 0.25).backward()
    return lab.gradients(model)


@pytest.mark.parametrize("attach", [None, checkpoint])
def test_two_forwards_of_a_micro_batch_are_one_turn_at_every_number_of_ranks(attach):
    expected = lab.first(1, invariant, attach)
    for ranks in (2, 4):
        lab.assert_equal(lab.first(ranks, invariant, attach), expected, ranks)
