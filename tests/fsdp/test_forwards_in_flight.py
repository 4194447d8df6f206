"""Several forwards before a backward, and old losses that somebody keeps: right, in the memory of one."""

from itertools import pairwise

import numpy as np
import pytest

import shardrt
from shardrt import nn, optim
from shardrt.comm import CountedCommunicator, init_device_mesh, thread
from shardrt.fsdp import MixedPrecisionPolicy, no_sync, set_world_invariant, units
from shardrt.recompute import checkpoint
from tests.fsdp.nets import Block, CalledTwice, Nested, Net, batches, gradients, loss_of, shard

FIRST, SECOND = batches(2)


def sharded(make=Net, recomputed=None, **settings):
    shardrt.manual_seed(3)
    model, made = make(), []
    mesh = init_device_mesh(
        "auto", settings.pop("shape", None), wrap=lambda c: made.append(CountedCommunicator(c)) or made[-1]
    )
    for module in model.modules():
        if recomputed is not None and isinstance(module, recomputed):
            checkpoint(module)
    shard(model, mesh, **settings)
    return model, mesh, made


def rows(mesh, batch):
    return tuple(array[mesh.rank :: mesh.size] for array in batch)


def one_backward(model, batches):
    losses = [loss_of(model, *batch) for batch in batches]
    (losses[0] * 2.0 - losses[1]).backward()


def newest_first(model, batches):
    losses = [loss_of(model, *batch) for batch in batches]
    (losses[1] * -1.0).backward()
    (losses[0] * 2.0).backward()


def oldest_first(model, batches):
    losses = [loss_of(model, *batch) for batch in batches]
    (losses[0] * 2.0).backward()
    (losses[1] * -1.0).backward()


def one_after_the_other(model, batches):
    (loss_of(model, *batches[0]) * 2.0).backward()
    (loss_of(model, *batches[1]) * -1.0).backward()


def an_old_loss_is_kept(model, batches):
    model.kept = loss_of(model, *batches[1])
    one_after_the_other(model, batches)


def not_reduced_at_first(model, batches):
    losses = [loss_of(model, *batch) for batch in batches]
    with no_sync(model):
        (losses[1] * -1.0).backward()
    (losses[0] * 2.0).backward()


WAYS = [one_backward, newest_first, oldest_first, an_old_loss_is_kept, not_reduced_at_first]
SETTINGS = {
    "FULL_SHARD": {},
    "prefetch 2": {"prefetch": 2},
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "SHARD_OPT": {"strategy": "SHARD_OPT"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD", "shape": (2, 2)},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy("bfloat16", "float32")},
    "a unit called twice": {"make": CalledTwice},
    "recomputed units": {"recomputed": Block},
    "recomputed stages of units": {"make": Nested, "recomputed": nn.Sequential},
}


def of(way, **settings):
    """Gradients after `way`, on this rank's part of two batches; slots of both kinds, and the most in use."""
    model, mesh, _ = sharded(**settings)
    way(model, [rows(mesh, FIRST), rows(mesh, SECOND)])
    groups = [group for unit in units(model) for group in unit.groups]
    slots = {}
    for role in ("gathered", "gradients"):
        arenas = {id(group.arenas[role]): group.arenas[role] for group in groups}.values()
        slots[role] = [(len(arena.slots), arena.peak_in_use) for arena in arenas]
    return gradients(model), slots


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_two_forwards_give_the_gradients_and_take_the_slots_of_one(settings):
    ranks = 4 if "shape" in settings else 2
    expected, plan = thread.run(ranks, of, one_after_the_other, **settings)[0]
    for way in WAYS:
        found, slots = thread.run(ranks, of, way, **settings)[0]
        if way is not not_reduced_at_first:  # which takes full gradients of all units
            assert slots == plan, way
        for name, gradient in expected.items():
            scale = np.abs(gradient).max()
            np.testing.assert_allclose(
                found[name], gradient, rtol=0, atol=1e-5 * scale, err_msg=f"{way} {name}"
            )


def calls_of(forwards, **settings):
    """Gathers and reductions of the second step."""
    model, mesh, made = sharded(**settings)
    for _ in range(2):
        before = [sum(c.calls[op] for c in made) for op in ("all_gather", "reduce_scatter")]
        losses = [loss_of(model, *rows(mesh, FIRST)) for _ in range(forwards)]
        sum(losses[1:], start=losses[0]).backward()
        after = [sum(c.calls[op] for c in made) for op in ("all_gather", "reduce_scatter")]
    return np.subtract(after, before).tolist()


@pytest.mark.parametrize("recomputed", [None, Block])
def test_each_forward_gathers_and_reduces_once_more(recomputed):
    one, two, three = (thread.run(2, calls_of, n, recomputed=recomputed)[0] for n in (1, 2, 3))
    # The outermost unit is gathered for the first forward only, and again for backward of all but the newest.
    assert [np.subtract(b, a).tolist() for a, b in pairwise((one, two, three))] == [[7, 4]] * 2


def updated(way, in_backward, **settings):
    model, mesh, _ = sharded(**settings)
    optimizer = optim.SGD(model.parameters(), lr=0.1, in_backward=in_backward)
    for _ in range(2):
        way(model, [rows(mesh, FIRST), rows(mesh, SECOND)])
        optimizer.step()
        optimizer.zero_grad()
    return [np.array(parameter.shard) for parameter in model.parameters()]


@pytest.mark.parametrize(
    "settings", [{}, {"strategy": "SHARD_OPT"}, {"make": Nested, "recomputed": nn.Sequential}]
)
def test_an_update_in_backward_waits_for_the_last_forward(settings):
    expected, found = (thread.run(2, updated, one_backward, when, **settings) for when in (False, True))
    for ours, theirs in zip(found, expected, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def one_backward_raises(model, batches):
    """The newer of two forwards fails in the middle of its backward; the other one goes on."""

    def fail(gradient):
        raise ZeroDivisionError

    kept = loss_of(model, *batches[0])
    plain, block = model.blocks[1].forward, model.blocks[1]

    def failing(x):
        y = plain(x)
        y.register_hook(fail)
        return y

    block.forward = failing
    with pytest.raises(ZeroDivisionError):
        loss_of(model, *batches[1]).backward()
    block.forward = plain
    model.zero_grad()
    (kept * 2.0).backward()


def only_the_first(model, batches):
    (loss_of(model, *batches[0]) * 2.0).backward()


@pytest.mark.parametrize("settings", [{}, {"strategy": "SHARD_OPT"}, {"recomputed": Block}], ids=str)
def test_after_a_backward_that_raised_another_forward_has_its_own_whole(settings):
    expected, _ = thread.run(2, of, only_the_first, **settings)[0]
    found, _ = thread.run(2, of, one_backward_raises, **settings)[0]
    for name, gradient in expected.items():
        np.testing.assert_array_equal(found[name], gradient, err_msg=name)


def invariant(recomputed):
    """Gradients of four micro-batches, in each of which the model runs twice."""
    shardrt.manual_seed(3)
    model, mesh = Net(), init_device_mesh("auto")
    for block in model.blocks if recomputed else ():
        checkpoint(block)
    shard(model, mesh)
    set_world_invariant(model, 4)
    for turn in range(4 // mesh.size):
        mine = slice(3 * (turn * mesh.size + mesh.rank), 3 * (turn * mesh.size + mesh.rank) + 3)
        losses = [loss_of(model, *(array[mine] for array in batch)) for batch in (FIRST, SECOND)]
        ((losses[0] * 2.0 - losses[1]) * 0.25).backward()
    return gradients(model)


@pytest.mark.parametrize("recomputed", [False, True])
def test_two_forwards_of_a_micro_batch_are_one_turn_at_every_number_of_ranks(recomputed):
    expected = thread.run(1, invariant, recomputed)[0]
    for ranks in (2, 4):
        found = thread.run(ranks, invariant, recomputed)[0]
        assert all(np.array_equal(found[name], gradient) for name, gradient in expected.items())
