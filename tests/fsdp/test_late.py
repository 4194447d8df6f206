"""Backwards in two halves, several of them in flight: the bits, collectives and memory of usual ones."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from shardrt import device, optim
from shardrt.activation_offload import offload_activations
from shardrt.comm import CountedCommunicator, init_device_mesh, thread
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    memory_plan,
    no_sync,
    reshard,
    set_find_unused_parameters,
    set_world_invariant,
    units,
    unshard,
)
from shardrt.late import Late
from shardrt.recompute import checkpoint
from tests.fsdp.nets import (
    Block,
    CalledTwice,
    Frozen,
    Nested,
    Net,
    NeverCalled,
    PartlyUsed,
    TiedInside,
    Viewed,
    batches,
    bytes_held,
    gradients,
    loss_of,
    shard,
)
from tests.late import all_inputs_first, as_a_pipeline, each_at_its_end, reducing_last, usual

BATCHES = batches(3)
COUNTED = ("all_gather", "reduce_scatter", "all_reduce")


ORDERS = [each_at_its_end, as_a_pipeline, all_inputs_first]


def trained(way, make=Net, held=False, prepare=None, after=None, shape=None, in_backward=False, **settings):
    """Two steps of three micro-batches: gradients, calls of the second, weights, slots in use."""
    shardrt.manual_seed(3)
    model, made = make(), []
    mesh = init_device_mesh("auto", shape, wrap=lambda c: made.append(CountedCommunicator(c)) or made[-1])
    for block in (module for module in model.modules() if isinstance(module, Block)):
        if prepare is not None:
            prepare(block)
    shard(model, mesh, **settings)
    if after is not None:
        after(model)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, in_backward=in_backward)
    found = []

    def losses(number):
        return loss_of(model, *(array[mesh.rank :: mesh.size] for array in BATCHES[number]))

    for _ in range(2):
        before = [sum(c.calls[op] for c in made) for op in COUNTED]
        if held:
            unshard(model)
        way(losses, reducing_last(model))
        if held:
            reshard(model)
        calls = [sum(c.calls[op] for c in made) - n for op, n in zip(COUNTED, before, strict=True)]
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    arenas = {id(a): a for unit in units(model) for group in unit.groups for a in group.arenas.values()}
    in_use = sum(a.in_use for a in arenas.values()) if not held else 0
    return found, calls, [np.array(p.shard) for p in model.parameters()], in_use


SETTINGS = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "SHARD_OPT": {"strategy": "SHARD_OPT"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "HYBRID_SHARD": {"strategy": "HYBRID_SHARD", "shape": (2, 2)},
    "HYBRID_SHARD_GRAD_OP": {"strategy": "HYBRID_SHARD_GRAD_OP", "shape": (2, 2)},
    "prefetch 2": {"prefetch": 2},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy("bfloat16", "float32")},
    "bfloat16, also sent": {"mp_policy": MixedPrecisionPolicy("bfloat16")},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "offload, updated on the host": {"offload_policy": CPUOffloadPolicy(step="host")},
    "recomputed": {"prepare": checkpoint},
    "recomputed but for products": {"prepare": partial(checkpoint, policy="matmul")},
    "activations on the host": {"prepare": offload_activations},
    "a unit called twice": {"make": CalledTwice},
    "a unit not called": {"make": NeverCalled},
    "a unit partly used": {"make": PartlyUsed, "after": set_find_unused_parameters},
    "tied": {"make": TiedInside},
    "units in units": {"make": Nested},
    "frozen in part": {"make": Frozen},
    "used by other ops": {"make": Viewed},
    "updated in backward": {"in_backward": True},
}


def assert_same(found, expected, case):
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            np.testing.assert_array_equal(ours[name], gradient, err_msg=f"{case}: {name}")
    assert found[1] == expected[1], case
    assert all(map(np.array_equal, found[2], expected[2])), case
    assert found[3] == expected[3], case


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_every_order_gives_the_bits_and_collectives_of_accumulation(settings):
    ranks = 4 if "shape" in settings else 2
    expected = thread.run(ranks, trained, usual, **settings)
    for way in ORDERS:
        found = thread.run(ranks, trained, way, **settings)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs, way.__name__)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_on_one_rank_and_on_four(ranks, strategy):
    expected = thread.run(ranks, trained, usual, strategy=strategy)[0]
    assert_same(thread.run(ranks, trained, as_a_pipeline, strategy=strategy)[0], expected, ranks)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_units_that_are_held_are_gathered_once_a_step_and_reduced_once(strategy):
    expected = thread.run(2, trained, usual, strategy=strategy)[0]
    for way in (usual, *ORDERS):
        found = thread.run(2, trained, way, held=True, strategy=strategy)[0]
        assert found[1][:2] == [4, 4]  # NO_SHARD gathers sums of gradients
        assert_same((found[0], expected[1], found[2], 0), (*expected[:3], 0), way.__name__)


# -- between the halves


def started(make=Net, micro_batches=None, **settings):
    shardrt.manual_seed(3)
    model = make()
    mesh = init_device_mesh("auto")
    shard(model, mesh, **settings)
    if micro_batches is not None:
        set_world_invariant(model, micro_batches)
    return model, lambda number: loss_of(model, *(array[mesh.rank :: mesh.size] for array in BATCHES[number]))


def halves():
    model, losses = started()
    loss, late = losses(0), Late()
    loss.backward(late=late)
    states = [unit.state.name for unit in units(model)]
    waiting = [len(unit.pending) for unit in units(model)]
    messages = []
    for what in (model.blocks[0].up.weight, model.norm.weight):  # whose gradient is late, and is not
        with pytest.raises(RuntimeError) as raised:
            _ = what.grad
        messages.append(str(raised.value))
    reductions = [group.sharded_gradient.reductions for unit in units(model) for group in unit.groups]
    late.run()
    return states, waiting, messages, reductions, [len(unit.pending) for unit in units(model)]


def test_between_the_halves_units_are_released_and_gradients_not_there():
    states, waiting, messages, reductions, after = thread.run(2, halves)[0]
    assert states == ["SHARDED"] * 4 and waiting == [1] * 4 and reductions == [0] * 4
    assert after == [0] * 4
    for message in messages:
        assert "call late.run" in message


def two_forwards(put_off, in_backward):
    """Two forwards in each of two backwards; the first is not reduced."""
    model, losses = started()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, in_backward=in_backward)
    lates = [Late(), Late()] if put_off else [None, None]
    both = [losses(0) - losses(1) * 2.0, losses(1) + losses(2)]
    for number, (loss, late) in enumerate(zip(both, lates, strict=True)):
        with no_sync(model) if number == 0 and not put_off else nullcontext():
            loss.backward(late=late)
    if put_off:
        with no_sync(model):
            lates[0].run()
        lates[1].run()
    optimizer.step()
    return [np.array(p.shard) for p in model.parameters()]


@pytest.mark.parametrize("in_backward", [False, True])
def test_two_forwards_in_one_backward_are_updated_once(in_backward):
    expected = thread.run(2, two_forwards, False, False)[0]
    assert all(map(np.array_equal, thread.run(2, two_forwards, True, in_backward)[0], expected))


def reduced_each_time(way):
    model, losses = started()
    if way == "usual":
        for number in range(3):
            losses(number).backward()
        return gradients(model), 0
    lates = [Late() for _ in range(3)]
    for number, late in enumerate(lates):
        losses(number).backward(late=late)
        if way == "each at its end":
            late.run()
    if way == "all inputs first":
        for late in lates:
            late.run()
    return gradients(model), max(
        group.sharded_gradient.reductions for unit in units(model) for group in unit.groups
    )


def test_without_no_sync_each_late_half_reduces_what_is_there():
    expected = thread.run(2, reduced_each_time, "usual")[0][0]
    found, reductions = thread.run(2, reduced_each_time, "each at its end")[0]
    assert reductions == 3 and all(np.array_equal(found[name], expected[name]) for name in expected)
    found, reductions = thread.run(2, reduced_each_time, "all inputs first")[0]
    assert reductions == 3
    for name, gradient in expected.items():  # those of the norm come with the first reduction, all three
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-6 * np.abs(gradient).max())


def after_trouble(trouble):
    """The gradients of a step that follows it."""
    model, losses = started()
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    if trouble is not None:
        trouble(model, losses, optimizer)
        optimizer.zero_grad()
    usual(losses, reducing_last(model))
    taken = {
        id(g.arenas[role]): g.arenas[role].in_use for u in units(model) for g in u.groups for role in g.arenas
    }
    return gradients(model), taken and [u.state.name for u in units(model)]


def fails(*args):
    raise ZeroDivisionError


def the_first_half_raises(model, losses, optimizer):
    """Of one backward, while another one is between its halves."""
    kept, late = Late(), Late()
    losses(0).backward(late=kept)
    forward, block = model.blocks[1].forward, model.blocks[1]

    def failing(x):
        y = forward(x)
        y.register_hook(fails)
        return y

    block.forward = failing
    with pytest.raises(ZeroDivisionError):
        losses(1).backward(late=late)
    block.forward = forward
    losses(2)
    with pytest.raises(RuntimeError, match="discarded the gradients of this one"):
        kept.run()


def the_late_half_raises(model, losses, optimizer):
    late, weight = Late(), model.blocks[1].up.weight
    losses(0).backward(late=late)
    group = weight.storage
    target, group.gradient_target = group.gradient_target, fails
    with pytest.raises(ZeroDivisionError):
        late.run()
    group.gradient_target = target


def it_is_dropped(model, losses, optimizer):
    losses(0).backward(late=Late())
    with pytest.raises(RuntimeError, match="late.run"):
        optimizer.step()


@pytest.mark.parametrize("trouble", [the_first_half_raises, the_late_half_raises, it_is_dropped])
def test_a_step_after_trouble_is_as_if_there_had_been_none(trouble):
    expected = thread.run(2, after_trouble, None)[0]
    found = thread.run(2, after_trouble, trouble)[0]
    assert found[1:] == expected[1:]
    for name, gradient in expected[0].items():
        np.testing.assert_array_equal(found[0][name], gradient, err_msg=name)


def frozen_between():
    """A block is frozen after the first half: what was recorded has its gradients still."""
    model, losses = started()
    late = Late()
    losses(0).backward(late=late)
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad = False
    losses(1)
    late.run()
    return gradients(model)


def test_what_is_frozen_between_the_halves_has_its_gradient_still():
    found = thread.run(2, frozen_between)[0]

    def first():
        model, losses = started()
        losses(0).backward()
        return gradients(model)

    expected = thread.run(2, first)[0]
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def invariant():
    model, losses = started(micro_batches=2)
    with pytest.raises(RuntimeError, match="set_world_invariant .* leave late out"):
        losses(0).backward(late=Late())
    usual_after = losses(0)
    usual_after.backward()
    return True


def test_a_world_invariant_model_refuses_it():
    assert thread.run(2, invariant) == [True] * 2


def planned(strategy):
    """The bytes of the units by the plan of a step as a pipeline, and after such steps."""
    model, losses = started(strategy=strategy)
    step = partial(as_a_pipeline, losses, reducing_last(model))
    plan = memory_plan(model, step=step, optimizer_states=0).device
    for _ in range(2):
        step()
    return sum(plan.values()) - plan.get("activations", 0), bytes_held(model)


def planned_and_held(strategy):
    """The same with all units gathered for each step."""
    model, losses = started(strategy=strategy)

    def step():
        unshard(model)
        as_a_pipeline(losses, reducing_last(model))
        reshard(model)

    plan = memory_plan(model, step=step, optimizer_states=0).device
    for _ in range(2):
        step()
    return sum(plan.values()) - plan.get("activations", 0), bytes_held(model)


def planned_alone(strategy):
    """The same of one backward in halves, which reduces."""
    model, losses = started(strategy=strategy)

    def step():
        late = Late()
        losses(0).backward(late=late)
        late.run()

    plan = memory_plan(model, step=step, optimizer_states=0).device
    for _ in range(2):
        step()
    return sum(plan.values()) - plan.get("activations", 0), bytes_held(model)


@pytest.mark.parametrize("of", [planned, planned_and_held, planned_alone])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_the_plan_has_the_full_gradients_of_all_units(strategy, of):
    for plan, held in thread.run(2, of, strategy):
        assert plan == held


def test_the_plan_of_activations_is_the_most_that_a_late_step_holds():
    tokens = np.zeros((8, 64), np.int64)
    here = device.current()
    found = []
    for way in (usual, as_a_pipeline):
        shardrt.manual_seed(1)
        model = GPT(GPTConfig(4, 2, 64, 64, 64))
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
