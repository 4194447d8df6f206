"""Backwards in two halves, several of them in flight: the bits, collectives and memory of usual ones."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from models.gpt import GPT, GPTConfig
from shardrt import device, optim
from shardrt.comm import thread
from shardrt.deferred_gradients import DeferredGradients
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    memory_plan,
    no_sync,
    reshard,
    set_find_unused_parameters,
    units,
    unshard,
)
from shardrt.recompute import checkpoint
from tests import lab
from tests.deferred import all_inputs_first, as_a_pipeline, each_at_its_end, reducing_last, usual

BATCHES = lab.batches(3)
COUNTED = ("all_gather", "reduce_scatter", "all_reduce")
ORDERS = [each_at_its_end, as_a_pipeline, all_inputs_first]


def losses_of(model, mesh):
    """Number -> the loss of this micro-batch."""
    return lambda number: lab.loss_of(model, *lab.rows(mesh, *BATCHES[number]))


def started(**settings):
    model, mesh = lab.build(**settings)
    return model, losses_of(model, mesh)


def trained(way, held=False, find_unused=False, in_backward=False, **settings):
    """Two steps of three micro-batches: gradients, weights, calls of the second, slots in use at the end."""
    counts = lab.Counts()
    model, mesh = lab.build(wrap=counts, **settings)
    set_find_unused_parameters(model, find_unused)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, in_backward=in_backward)
    found = []
    for _ in range(2):
        counts.reset()
        if held:
            unshard(model)
        way(losses_of(model, mesh), reducing_last(model))
        if held:
            reshard(model)
        calls = counts.calls(*COUNTED)
        found.append(lab.gradients(model))
        lab.update(optimizer)
    return found, [np.array(p.shard) for p in model.parameters()], calls, 0 if held else lab.in_use(model)


# Other features meet one of these orders in test_pairs.py ("late").
SETTINGS = {
    "FULL_SHARD": {},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD"},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy("bfloat16")},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "recomputed": {"attach": checkpoint},
    "a unit called twice": {"make": lab.CalledTwice},
    "a unit not called": {"make": lab.NeverCalled},
    "a unit partly used": {"make": lab.PartlyUsed, "find_unused": True},
    "tied": {"make": lab.TiedInside},
    "units in units": {"make": lab.Nested},
    "used by other ops": {"make": lab.Viewed},
    "updated in backward": {"in_backward": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_order_gives_the_bits_and_collectives_of_accumulation(settings):
    ranks = 4 if settings.get("strategy", "").startswith("HYBRID") else 2
    expected = thread.run(ranks, trained, usual, **settings)
    for way in ORDERS:
        lab.assert_equal(thread.run(ranks, trained, way, **settings), expected, way.__name__)


def test_on_one_rank():
    lab.assert_equal(lab.first(1, trained, as_a_pipeline), lab.first(1, trained, usual))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_units_that_are_held_are_gathered_once_a_step_and_reduced_once(strategy):
    expected = lab.first(2, trained, usual, strategy=strategy)
    for way in (usual, *ORDERS):
        found = lab.first(2, trained, way, held=True, strategy=strategy)
        assert found[2][:2] == [4, 4]  # NO_SHARD gathers sums of gradients
        lab.assert_equal(found[:2], expected[:2], way.__name__)


# -- between the halves


@lab.on_ranks(2)
def test_between_the_halves_units_are_released_and_gradients_not_there():
    model, losses = started()
    loss, late = losses(0), DeferredGradients()
    loss.backward(deferred=late)
    assert [unit.state.name for unit in units(model)] == ["SHARDED"] * 4
    assert [len(unit.pending) for unit in units(model)] == [1] * 4
    for weight in (model.blocks[0].up.weight, model.norm.weight):  # whose gradient is late, and is not
        with pytest.raises(RuntimeError, match="call deferred.flush"):
            _ = weight.grad
    assert [group.sharded_gradient.reductions for group in lab.groups_of(model)] == [0] * 4
    late.flush()
    assert [len(unit.pending) for unit in units(model)] == [0] * 4


@pytest.mark.parametrize("in_backward", [False, True])
def test_two_forwards_in_one_backward_are_updated_once(in_backward):
    """Two forwards in each of two backwards; the first is not reduced."""

    def weights(deferred, in_backward):
        model, losses = started()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, in_backward=in_backward)
        lates = [DeferredGradients(), DeferredGradients()] if deferred else [None, None]
        both = [losses(0) - losses(1) * 2.0, losses(1) + losses(2)]
        for number, (loss, late) in enumerate(zip(both, lates, strict=True)):
            with no_sync(model) if number == 0 and not deferred else nullcontext():
                loss.backward(deferred=late)
        if deferred:
            with no_sync(model):
                lates[0].flush()
            lates[1].flush()
        optimizer.step()
        return [np.array(p.shard) for p in model.parameters()]

    lab.assert_equal(lab.first(2, weights, True, in_backward), lab.first(2, weights, False, False))


@lab.on_ranks(2)
def test_without_no_sync_each_late_half_reduces_what_is_there():
    found = {}
    for way in (usual, each_at_its_end, all_inputs_first):
        model, losses = started()
        way(losses)
        found[way] = lab.gradients(model)
        assert max(group.sharded_gradient.reductions for group in lab.groups_of(model)) == 3
    lab.assert_equal(found[each_at_its_end], found[usual])
    # Those of the norm come with the first reduction, all three.
    lab.assert_close(found[all_inputs_first], found[usual], of_largest=1e-6)


def fails(*args):
    raise ZeroDivisionError


def the_first_half_raises(model, losses, optimizer):
    """Of one backward, while another one is between its halves."""
    kept, late = DeferredGradients(), DeferredGradients()
    losses(0).backward(deferred=kept)
    with lab.backward_raises(model.blocks[1]):
        losses(1).backward(deferred=late)
    losses(2)
    with pytest.raises(RuntimeError, match="discarded the gradients of this one"):
        kept.flush()


def the_late_half_raises(model, losses, optimizer):
    late, weight = DeferredGradients(), model.blocks[1].up.weight
    losses(0).backward(deferred=late)
    group = weight.storage
    target, group.gradient_target = group.gradient_target, fails
    with pytest.raises(ZeroDivisionError):
        late.flush()
    group.gradient_target = target


def it_is_dropped(model, losses, optimizer):
    losses(0).backward(deferred=DeferredGradients())
    with pytest.raises(RuntimeError, match="flush"):
        optimizer.step()


@lab.on_ranks(2)
@pytest.mark.parametrize("trouble", [the_first_half_raises, the_late_half_raises, it_is_dropped])
def test_a_step_after_trouble_is_as_if_there_had_been_none(trouble):
    found = []
    for before in (trouble, lambda *args: None):
        model, losses = started()
        optimizer = optim.SGD(model.parameters(), lr=0.0)
        before(model, losses, optimizer)
        optimizer.zero_grad()
        usual(losses, reducing_last(model))
        found.append((lab.gradients(model), [u.state.name for u in units(model)], lab.in_use(model)))
    lab.assert_equal(*found)


@lab.on_ranks(2)
def test_what_is_frozen_between_the_halves_has_its_gradient_still():
    found = []
    for freezes in (True, False):
        model, losses = started()
        late = DeferredGradients()
        losses(0).backward(deferred=late)
        if freezes:
            model.blocks[1].requires_grad_(False)
            losses(1)
        late.flush()
        found.append(lab.gradients(model))
    lab.assert_equal(*found)


# -- what a plan says of it


def as_a_pipeline_held(model, losses):
    unshard(model)
    as_a_pipeline(losses, reducing_last(model))
    reshard(model)


PLANNED = {
    "as a pipeline": lambda model, losses: as_a_pipeline(losses, reducing_last(model)),
    "held": as_a_pipeline_held,
}


@lab.on_ranks(2)
@pytest.mark.parametrize("way", PLANNED)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_the_plan_has_the_full_gradients_of_all_units(strategy, way):
    model, losses = started(strategy=strategy)
    step = partial(PLANNED[way], model, losses)
    planned = lab.bytes_planned(model, step=step)
    for _ in range(2):
        step()
    assert planned == lab.bytes_held(model)


def test_the_plan_of_activations_is_the_most_that_a_late_step_holds():
    tokens = np.zeros((8, 64), np.int64)
    here = device.current()
    found = []
    for way in (usual, as_a_pipeline):
        model = lab.seeded(lambda: GPT(GPTConfig(4, 2, 64, 64, 64)), 1)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

        def step(model=model, way=way):
            way(lambda number: model(tokens, tokens), reducing_last(model))

        plan = memory_plan(model, step=step).device["activations"]
        step()
        here.reset_peak()
        before = here.peak_bytes()
        step()
        assert here.peak_bytes() - before == plan
        found.append(plan)
    assert found[0] < found[1]
