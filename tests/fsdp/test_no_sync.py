"""Accumulation: however a batch is cut into ranks and micro-batches, its gradient is the same."""

from contextlib import nullcontext

import numpy as np
import pytest

import shardrt
from shardrt import functional as F
from shardrt import optim
from shardrt.comm import CountedCommunicator, init_device_mesh, thread
from shardrt.fsdp import no_sync, set_gradient_divide_factor, units
from tests.fsdp.nets import CalledTwice, Net, batches, gradients, loss_of, shard

IGNORED = -100
TOKENS, TARGETS = batches(1, size=8, time=6)[0]
TARGETS = TARGETS.copy()
for row, length in enumerate((6, 1, 4, 0, 3, 6, 2, 5)):  # uneven: one row has no target at all
    TARGETS[row, length:] = IGNORED
COUNT = int((TARGETS != IGNORED).sum())


def accumulated(micro_batches, delayed, make=Net, strategy="FULL_SHARD"):
    """Gradients of the whole batch, from this rank's rows in `micro_batches` pieces, by token count."""
    shardrt.manual_seed(3)
    model = make()
    mesh = init_device_mesh("auto")
    shard(model, mesh, strategy=strategy)
    set_gradient_divide_factor(model, 1)
    rows = len(TOKENS) // mesh.size
    mine = slice(mesh.rank * rows, (mesh.rank + 1) * rows)
    pieces = list(
        zip(np.split(TOKENS[mine], micro_batches), np.split(TARGETS[mine], micro_batches), strict=True)
    )
    for index, (tokens, targets) in enumerate(pieces):
        last = index == len(pieces) - 1
        with no_sync(model) if delayed and not last else nullcontext():
            loss = F.cross_entropy(model(tokens), targets, ignore_index=IGNORED, reduction="sum")
            (loss * (1 / COUNT)).backward()
    return gradients(model)


def whole(make=Net):
    shardrt.manual_seed(3)
    model = make()
    (F.cross_entropy(model(TOKENS), TARGETS, ignore_index=IGNORED, reduction="sum") * (1 / COUNT)).backward()
    return gradients(model)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 8), (2, 4), (4, 2), (8, 1), (2, 1), (4, 1)])
@pytest.mark.parametrize("make", [Net, CalledTwice])
def test_uneven_batches_give_the_gradient_of_the_whole(ranks, micro_batches, delayed, make):
    expected = whole(make)
    for found in thread.run(ranks, accumulated, micro_batches, delayed, make):
        for name, gradient in expected.items():
            np.testing.assert_allclose(
                found[name], gradient, rtol=0, atol=2e-6 * np.abs(gradient).max(), err_msg=name
            )


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_OPT", "SHARD_GRAD_OP"])
def test_strategies_accumulate_to_the_same_bits(strategy):
    expected = thread.run(2, accumulated, 4, True)[0]
    found = thread.run(2, accumulated, 4, True, Net, strategy)[0]
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def reductions(delayed):
    made = []

    def counted(communicator):
        made.append(CountedCommunicator(communicator))
        return made[-1]

    model = Net()
    shard(model, init_device_mesh("auto", wrap=counted))
    for index, (tokens, targets) in enumerate(batches(3, size=4)):
        with no_sync(model) if delayed and index < 2 else nullcontext():
            loss_of(model, tokens, targets).backward()
    return sum(c.calls["reduce_scatter"] for c in made)


def test_no_sync_reduces_once_for_all_micro_batches():
    assert thread.run(2, reductions, False)[0] == 3 * 4
    assert thread.run(2, reductions, True)[0] == 4


def updated_too_early():
    model = Net()
    shard(model, init_device_mesh("auto"))
    optimizer = optim.AdamW(model.parameters())
    with no_sync(model):
        loss_of(model, *batches(1, size=4)[0]).backward()
    optimizer.step()


def test_an_update_with_unreduced_gradients_is_refused():
    with pytest.raises(RuntimeError, match="accumulated under no_sync and not reduced yet"):
        thread.run(2, updated_too_early)


def discarded():
    model = Net()
    shard(model, init_device_mesh("auto"))
    tokens, targets = batches(1, size=4)[0]
    with no_sync(model):
        loss_of(model, tokens, targets).backward()
    model.zero_grad()
    loss_of(model, tokens, targets).backward()
    found = gradients(model)
    model.zero_grad()
    loss_of(model, tokens, targets).backward()
    arenas = {group.arenas["gradients"] for unit in units(model) for group in unit.groups}
    return found, gradients(model), sum(arena.in_use for arena in arenas)


def test_zero_grad_forgets_what_was_accumulated_and_gives_its_slots_back():
    found, expected, taken = thread.run(2, discarded)[0]
    assert taken == 0
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def nested():
    model = Net()
    shard(model, init_device_mesh("auto"))
    with no_sync(model):
        with no_sync(model.blocks[0]):
            pass
        return [unit.choices.reduces for unit in units(model)]


def test_no_sync_inside_no_sync_ends_nothing():
    assert nested() == [False] * 4
