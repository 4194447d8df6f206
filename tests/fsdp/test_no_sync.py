"""Accumulation: however a batch is cut into ranks and micro-batches, its gradient is the same."""

from contextlib import nullcontext

import numpy as np
import pytest

from shardrt import functional as F
from shardrt.comm import thread
from shardrt.fsdp import no_sync, set_gradient_divide_factor, units
from tests import lab

IGNORED = -100
TOKENS, TARGETS = lab.batches(1, size=8, time=6)[0]
for row, length in enumerate((6, 1, 4, 0, 3, 6, 2, 5)):  # uneven: one row has no target at all
    TARGETS[row, length:] = IGNORED
COUNT = int((TARGETS != IGNORED).sum())


def backward(model, tokens=TOKENS, targets=TARGETS):
    loss = F.cross_entropy(model(tokens), targets, ignore_index=IGNORED, reduction="sum")
    (loss * (1 / COUNT)).backward()


def accumulated(micro_batches, delayed):
    """Gradients of the whole batch, from this rank's rows in `micro_batches` pieces, by token count."""
    model, mesh = lab.build(lab.CalledTwice)
    set_gradient_divide_factor(model, 1)
    pieces = zip(*(np.split(part, micro_batches) for part in lab.rows(mesh, TOKENS, TARGETS)), strict=True)
    for number, piece in enumerate(pieces, start=1):
        with no_sync(model) if delayed and number < micro_batches else nullcontext():
            backward(model, *piece)
    return lab.gradients(model)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 8), (2, 4), (4, 1), (8, 1)])
def test_uneven_batches_give_the_gradient_of_the_whole(ranks, micro_batches, delayed):
    plain = lab.seeded(lab.CalledTwice)
    backward(plain)
    for found in thread.run(ranks, accumulated, micro_batches, delayed):
        lab.assert_close(found, lab.gradients(plain), of_largest=2e-6)


@lab.on_ranks(2)
@pytest.mark.parametrize("delayed", [False, True])
def test_no_sync_reduces_once_for_all_micro_batches_and_refuses_an_update_before(delayed):
    counts = lab.Counts()
    model, _ = lab.build(wrap=counts)
    optimizer = lab.adamw(model.parameters())
    for number, batch in enumerate(lab.batches(3, size=4)):
        with no_sync(model) if delayed and number < 2 else nullcontext():
            lab.backward(model, None, batch)
        if delayed and number < 2:
            with pytest.raises(RuntimeError, match="accumulated under no_sync and not reduced yet"):
                optimizer.step()
    assert counts.calls("reduce_scatter") == [4 if delayed else 3 * 4]


@lab.on_ranks(2)
def test_zero_grad_forgets_what_was_accumulated_and_gives_its_slots_back():
    model, _ = lab.build()
    with no_sync(model):
        lab.backward(model)
    model.zero_grad()
    lab.backward(model)
    found = lab.gradients(model)
    model.zero_grad()
    lab.backward(model)
    lab.assert_equal(found, lab.gradients(model))
    assert lab.in_use(model, "gradients") == 0


@lab.on_ranks(1)
def test_no_sync_inside_no_sync_ends_nothing():
    model, _ = lab.build()
    with no_sync(model):
        with no_sync(model.blocks[0]):
            pass
        assert [unit.choices.reduces for unit in units(model)] == [False] * 4
