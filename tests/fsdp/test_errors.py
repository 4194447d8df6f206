"""What fully_shard refuses, what it says, and that a model goes on after an error."""

from contextlib import nullcontext, suppress
from operator import attrgetter

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, autograd, nn, optim
from shardrt.comm import Communicator, init_device_mesh, thread, world
from shardrt.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    explain,
    fully_shard,
    memory_plan,
    no_sync,
    set_gradient_divide_factor,
    units,
)
from shardrt.fsdp.gradient_path import GradientPath
from shardrt.fsdp.options import low_precision
from shardrt.fsdp.policy import Precision
from shardrt.kernels import onednn
from tests import lab
from tests.lab import Net

BF16 = MixedPrecisionPolicy("bfloat16")


def on_one_rank(call):
    """Calls with a sharded model of one rank."""
    return lambda: call(lab.build()[0])


def without_a_root(call):
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    call(model)


def two_optimizers(apart):
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    for layer in model if apart else ():
        fully_shard(layer)
    fully_shard(model)
    return [optim.SGD(list(layer.parameters()), lr=0.1) for layer in model]


def an_optimizer_first():
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    assert optimizer and fully_shard(model.norm)


NO_CHOICE = "reshard_after_forward must be True, False or None, got"
NO_MODULE = r"must be a shardrt.nn.Module, or a list .* got"
NO_ROOT = "unit blocks.1 is not inside unit blocks.0; call fully_shard on the module"
test_calls_that_are_refused = lab.refusals(
    (lambda: fully_shard(Net(), strategy="FULL"), ValueError, "'FULL'; known: NO_SHARD, SHARD_OPT, SHARD_GR"),
    (lambda: fully_shard(fully_shard(Net())), ValueError, "sharded already"),
    (lambda: fully_shard(1), TypeError, f"{NO_MODULE} int"),
    (lambda: fully_shard("blocks"), TypeError, f"{NO_MODULE} str"),
    (lambda: fully_shard([Net(), 3]), TypeError, "got int"),
    (lambda: fully_shard(block for block in Net().blocks), TypeError, f"{NO_MODULE} generator"),
    (lambda: fully_shard([]), ValueError, "the list of modules is empty"),
    (lambda: fully_shard([Net()] * 2), ValueError, "the list names one module twice"),
    (lambda: fully_shard(Net(), reshard_after_forward=2), TypeError, f"{NO_CHOICE} 2"),
    (lambda: fully_shard(Net(), reshard_after_forward="no"), TypeError, f"{NO_CHOICE} 'no'"),
    (lambda: fully_shard(Net(), mesh=3), TypeError, "mesh must be a DeviceMesh, got int"),
    (lambda: fully_shard(Net(), mp_policy="bfloat16"), TypeError, "mp_policy must be .* Precision, got str"),
    (lambda: fully_shard(Net(), offload_policy=True), TypeError, "must be .* OffloadPolicy, got bool"),
    (
        lambda: fully_shard(Net(), strategy="HYBRID_SHARD"),
        ValueError,
        "HYBRID_SHARD needs a mesh with two",
    ),
    (lambda: without_a_root(memory_plan), ValueError, NO_ROOT),
    (lambda: without_a_root(explain), ValueError, NO_ROOT),
    (lambda: two_optimizers(False), ValueError, "'1.weight' is in one unit with parameters that another"),
    (an_optimizer_first, RuntimeError, "'norm.weight' already belongs to an optimizer; make the"),
    (on_one_rank(lambda model: model.state_dict()), RuntimeError, r"full_state_dict\(model\)"),
    (
        on_one_rank(lambda model: setattr(model.embed.weight, "grad", None)),
        RuntimeError,
        r"cleared together: use optimizer\.zero_grad",
    ),
)


def optimized(model):
    """What makes the units."""
    return optim.AdamW(model.parameters())


def read(model):
    optimized(model)
    return model.blocks[1].up.weight.data


def written(model, value):
    with shardrt.no_grad():
        model.blocks[1].up.weight.data = value


def added_to(model):
    with shardrt.no_grad():
        model.blocks[1].up.weight += 1


class Leaky(Net):
    """The head is tied to a weight inside a block."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(7, 13)
        self.head.weight = self.blocks[0].up.weight


def used_before_the_whole():
    model, mesh = Net(), init_device_mesh("auto")
    fully_shard(model.blocks[0], mesh=mesh)
    model.blocks[0](Tensor(np.ones((2, 7), np.float32)))
    optimized(fully_shard(model, mesh=mesh))


def other_values():
    model, mesh = Net(), init_device_mesh("auto")
    model.blocks[1].up.bias.data = np.full(13, float(mesh.rank), np.float32)
    optimized(lab.shard(model, mesh))


def rank():
    return init_device_mesh("auto").rank


def other_divide_factors():
    model, mesh = lab.build()
    optimized(model)
    set_gradient_divide_factor(model, 2)
    set_gradient_divide_factor(model, 1 + mesh.rank)


def partly_sharded(ignored=(), replaced=False):
    model, mesh = Net(), init_device_mesh("auto")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    if replaced:
        fully_shard(model, mesh=mesh)
        model.norm = nn.LayerNorm(7)
    else:
        kept = [getattr(model, name) for name in ignored]
        fully_shard(nn.ModuleList([model.norm]), mesh=mesh, ignored=kept)
    return optim.SGD(model.parameters(), lr=0.1)


SHARDED = r"'blocks\.1\.up\.weight' is sharded"
OTHER = r"ranks \[1\] have another model, seed or sharding than rank 0"
IN_NO_UNIT = r"is in no unit, .* call fully_shard\(model\) last"
test_what_ranks_are_refused_and_that_ranks_that_differ_are_named = lab.refusals(
    (lambda: read(lab.build()[0]), RuntimeError, SHARDED),
    (lambda: written(lab.build()[0], np.zeros((13, 7))), RuntimeError, SHARDED),
    (lambda: added_to(lab.build()[0]), RuntimeError, SHARDED),
    (
        lambda: optimized(lab.build(Leaky)[0]),
        ValueError,
        r"'blocks\.0\.up\.weight' of unit blocks\.0 is tied to 'head\.weight'",
    ),
    (used_before_the_whole, RuntimeError, "unit blocks.0 was used before the model around it"),
    (lambda: optimized(lab.build(seed=rank())[0]), ValueError, OTHER),
    (lambda: optimized(lab.build(prefetch=1 + rank())[0]), ValueError, OTHER),
    (lambda: optimized(lab.build(reshard_after_forward=rank() == 0)[0]), ValueError, OTHER),
    (other_values, ValueError, r"'blocks\.1\.up\.bias' has other values on rank 1 than on rank 0"),
    (other_divide_factors, ValueError, r"ranks \[1\] passed another factor than rank 0 \(rank .: ."),
    (partly_sharded, ValueError, f"parameter 'embed.weight' {IN_NO_UNIT}"),
    (lambda: partly_sharded(replaced=True), ValueError, f"parameter 'norm.weight' {IN_NO_UNIT}"),
    ranks=2,
)


def test_what_is_refused_only_where_it_does_harm():
    assert thread.run(2, partly_sharded, ignored=["embed"])
    assert partly_sharded()  # one rank has all parameters
    two_optimizers(apart=True)
    model = fully_shard(Net())
    first = optim.SGD(model.parameters(), lr=0.1)
    assert optim.AdamW(model.parameters(), lr=0.1).slices and first.slices  # it takes the place of the first


def test_ranks_that_multiply_by_other_types_are_named(monkeypatch):
    monkeypatch.setattr(onednn, "computes_bf16", lambda: world.current().rank == 1)
    with pytest.raises(ValueError, match=r"ranks \[1\] gather .* bfloat16 as .*extra bf16"):
        thread.run(2, lambda: units(lab.build(mp_policy=BF16)[0]))


@lab.on_ranks(2)
def test_values_may_be_made_early_on_some_ranks():
    model, mesh = Net(), init_device_mesh("auto")
    if mesh.rank == 0:
        model.blocks[1].up.weight.data  # noqa: B018  made on one rank only, and the same as anywhere
    optimized(lab.shard(model, mesh))


@pytest.mark.parametrize("prepare", [lambda model: None, lambda model: model[3].weight.data])
def test_ranks_that_were_given_the_same_send_no_message_for_each_parameter(monkeypatch, prepare):
    """With N ranks each would have N messages, as long as the model has parameters."""
    sent, talk = [], Communicator.all_gather_bytes
    monkeypatch.setattr(
        Communicator, "all_gather_bytes", lambda self, data: [sent.append(len(data)), talk(self, data)][1]
    )

    def build():
        model = nn.Sequential(*(nn.LayerNorm(3) for _ in range(20)))
        prepare(model)
        optimized(fully_shard(model, mesh=init_device_mesh("auto")))

    thread.run(2, build)
    assert sent and max(sent) < 40


@lab.on_ranks(1)
def test_the_plan_of_a_part_is_that_of_the_whole():
    model, _ = lab.build()
    before = memory_plan(model.blocks[0])
    optimized(model)
    assert memory_plan(model.blocks[0]).device == before.device == memory_plan(model).device


# -- training goes on


class Raises(Net):
    failing = False

    def run_blocks(self, x):
        x = self.blocks[0](x)
        if self.failing:
            raise ArithmeticError("a user's error")
        return self.blocks[1](x)


@lab.on_ranks(2)
def test_a_forward_that_raised_leaves_the_model_usable_and_gradients_as_they_were():
    found = {}
    for failing in (False, True):
        model, _ = lab.build(Raises)
        with no_sync(model):
            first = lab.backward(model)
        model.failing = failing
        with pytest.raises(ArithmeticError) if failing else nullcontext():
            lab.backward(model)
        model.failing = False
        if failing:
            assert lab.backward(model) == first
        found[failing] = lab.gradients(model)
    lab.assert_equal(found[True], found[False])


class Catches(Net):
    """Goes on without a block that fails."""

    def run_blocks(self, x):
        x = self.blocks[0](x)
        with suppress(ValueError):
            x = self.blocks[1](x[:, :, :3] if self.failing else x)
        return self.blocks[2](x)


@lab.on_ranks(2)
def test_a_module_may_catch_the_error_of_one_inside_it():
    model, _ = lab.build(Catches)
    for model.failing in (False, True, False):
        lab.backward(model)
    assert all(np.isfinite(gradient).all() for gradient in lab.gradients(model).values())


PLACES = [
    *("_begin_forward", "enter", "gathers.ensure", "gathers.prefetch", "gathers.finish", "forward.begin"),
    *("forward.enter", "forward.leave", "forward._what_backward_needs", "forward._finish"),
]
ONCE = ("_begin_forward", "begin", "_what_backward_needs")
INTERRUPTS = [(place, n) for place in PLACES for n in (0, 1, 3) if n == 0 or place.split(".")[-1] not in ONCE]


def interrupted(strategy, place=None, calls=0):
    """Losses of three steps, with an interrupt at one place of the schedule before the second."""
    model, _ = lab.build(strategy=strategy, mp_policy=BF16)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    schedule, losses = units(model)[0].schedule, []
    for step, batch in enumerate(lab.batches(3)):
        if step == 1 and place is not None:
            *above, name = place.split(".")
            part, left = attrgetter(*above)(schedule) if above else schedule, iter(range(calls))
            original = getattr(part, name)

            def interrupt(*args, original=original, left=left, **kwargs):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return original(*args, **kwargs)

            with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
                patch.setattr(part, name, interrupt)
                lab.loss_of(model, *batch)
        assert schedule.forward.depth == 0 and not autograd.modules()
        losses.append(lab.backward(model, None, batch))
        lab.update(optimizer)
    return losses


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_OPT"])
def test_after_an_interrupt_in_forward_training_goes_on_as_if_there_had_been_none(strategy):
    expected = interrupted(strategy)
    for place, calls in INTERRUPTS:
        assert interrupted(strategy, place, calls) == expected, (place, calls)


@pytest.mark.parametrize("on_host", [False, True])
def test_reductions_that_raise_give_their_memory_back(on_host, monkeypatch):
    def fail(*args, **kwargs):
        raise ArithmeticError

    offload = CPUOffloadPolicy(parameters=False, optimizer_state=False) if on_host else None
    model, _ = lab.build(offload_policy=offload, mp_policy=BF16)
    for _ in range(4):
        with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
            patch.setattr(Communicator, "reduce_scatter", fail)
            lab.backward(model)
    lab.backward(model)
    arenas = lab.arenas_of(model)
    assert all(arena.in_use == 0 for arena in arenas if arena.name not in ("wire", "reduce_wire"))
    assert all(len(arena.slots) <= 2 for arena in arenas)


def test_the_base_of_precision_policies_keeps_all_types():
    model, _ = lab.build(mp_policy=Precision())
    expected, _ = lab.build()
    assert lab.backward(model) == lab.backward(expected)


def test_a_gradient_that_gets_no_memory_leaves_the_model_usable(monkeypatch):
    def fail(path):
        raise MemoryError

    model, _ = lab.build()
    expected = lab.backward(model)  # the next gradient is added to this one, so it needs a slot
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(GradientPath, "acquire", fail)
        lab.backward(model)
    assert lab.backward(model) == expected


def test_a_cast_that_raises_is_made_again(monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    model, _ = lab.build(strategy="NO_SHARD", mp_policy=BF16)
    expected = lab.backward(model)
    for unit in units(model):
        for group in unit.groups:
            group.modified()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(low_precision, "_cast", fail)
        lab.backward(model)
    assert not any(group.transfer.is_fresh for group in units(model)[0].groups)
    assert lab.backward(model) == expected
