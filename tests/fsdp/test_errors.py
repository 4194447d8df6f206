"""What fully_shard refuses, and what it says."""

from contextlib import nullcontext, suppress
from operator import attrgetter

import numpy as np
import pytest

import shardrt
from shardrt import autograd, nn, optim
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
from shardrt.kernels import onednn
from tests.fsdp.nets import Net, batches, gradients, loss_of, shard


def sharded():
    model = Net()
    shard(model, init_device_mesh("auto"))
    return model


def read_while_sharded():
    model = sharded()
    optim.AdamW(model.parameters())
    _ = model.blocks[1].up.weight.data


def write_while_sharded():
    model = sharded()
    with shardrt.no_grad():
        model.blocks[1].up.weight.data = np.zeros((13, 7))


def add_while_sharded():
    model = sharded()
    with shardrt.no_grad():
        model.blocks[1].up.weight += 1


@pytest.mark.parametrize("touch", [read_while_sharded, write_while_sharded, add_while_sharded])
def test_a_parameter_touched_while_sharded_is_named(touch):
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.up\.weight' is sharded"):
        thread.run(2, touch)


def test_an_unknown_strategy_lists_the_known():
    with pytest.raises(ValueError, match="'FULL'; known: NO_SHARD, SHARD_OPT, SHARD_GRAD_OP, FULL_SHARD"):
        fully_shard(Net(), strategy="FULL")


def test_sharding_twice_is_refused():
    model = fully_shard(Net())
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard(model)


def test_only_modules_are_sharded():
    for wrong, given in ((1, "int"), ((block for block in Net().blocks), "generator")):
        with pytest.raises(TypeError, match=f"must be a shardrt.nn.Module, or a list .* got {given}"):
            fully_shard(wrong)


def test_a_sharded_model_has_no_state_dict_and_no_gradient_to_set():
    model = sharded()
    with pytest.raises(RuntimeError, match=r"full_state_dict\(model\)"):
        model.state_dict()
    with pytest.raises(RuntimeError, match=r"forgotten together: use optimizer\.zero_grad"):
        model.embed.weight.grad = None


def different_seeds():
    shardrt.manual_seed(shardrt.comm.init_device_mesh("auto").rank)
    optim.AdamW(sharded().parameters())


def test_ranks_with_different_seeds_are_told():
    with pytest.raises(ValueError, match=r"ranks \[1\] have another model, seed or sharding"):
        thread.run(2, different_seeds)


def in_bfloat16():
    model = Net()
    mesh = init_device_mesh("auto")
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy("bfloat16"))
    units(model)


def test_ranks_that_multiply_by_other_types_are_told(monkeypatch):
    monkeypatch.setattr(onednn, "computes_bf16", lambda: world.current().rank == 1)
    with pytest.raises(ValueError, match=r"ranks \[1\] gather .* bfloat16 as .*extra bf16"):
        thread.run(2, in_bfloat16)


class Leaky(Net):
    """The head is tied to a weight inside a block."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(7, 13)
        self.head.weight = self.blocks[0].up.weight


def leaky():
    model = Leaky()
    shard(model, init_device_mesh("auto"))
    optim.AdamW(model.parameters())


def test_a_parameter_tied_across_units_is_named_with_both_places():
    with pytest.raises(
        ValueError, match=r"'blocks\.0\.up\.weight' of unit blocks\.0 is tied to 'head\.weight'"
    ):
        thread.run(2, leaky)


def late_root():
    model = Net()
    mesh = init_device_mesh("auto")
    fully_shard(model.blocks[0], mesh=mesh)
    model.blocks[0](shardrt.Tensor(np.ones((2, 7), np.float32)))
    fully_shard(model, mesh=mesh)
    optim.AdamW(model.parameters())


def test_sharding_the_whole_after_a_part_was_used_is_refused():
    with pytest.raises(RuntimeError, match="unit blocks.0 was used before the model around it"):
        thread.run(2, late_root)


class Raises(Net):
    def run_blocks(self, x):
        x = self.blocks[0](x)
        if self.failing:
            raise ArithmeticError("a user's error")
        return self.blocks[1](x)


def fail_once():
    """A forward that raises, is caught, and is followed by a good step; the loss of that."""
    model = Raises()
    shard(model, init_device_mesh("auto"))
    (tokens, targets), *_ = batches(1, size=4)
    losses = []
    for model.failing in (False, True, False):
        try:
            loss = loss_of(model, tokens, targets)
            loss.backward()
            losses.append(float(loss.item()))
        except ArithmeticError:
            losses.append(None)
    return losses


def test_a_forward_that_raised_leaves_the_model_usable():
    losses = thread.run(2, fail_once)[0]
    assert losses[1] is None
    assert losses[0] == losses[2]


def accumulate_around_an_error(failing):
    """Gradients of two micro-batches, between which a forward raises."""
    shardrt.manual_seed(3)
    model = Raises()
    shard(model, init_device_mesh("auto"))
    tokens, targets = batches(1, size=4)[0]
    model.failing = False
    with no_sync(model):
        loss_of(model, tokens, targets).backward()
    model.failing = failing
    with pytest.raises(ArithmeticError) if failing else nullcontext():
        loss_of(model, tokens, targets)
    model.failing = False
    loss_of(model, tokens, targets).backward()
    return gradients(model)


def test_a_forward_that_raised_loses_no_accumulated_gradient():
    found, expected = (thread.run(2, accumulate_around_an_error, failing)[0] for failing in (True, False))
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


class Catches(Net):
    """Goes on without a block that fails."""

    def run_blocks(self, x):
        x = self.blocks[0](x)
        with suppress(ValueError):
            x = self.blocks[1](x[:, :, :3] if self.failing else x)
        return self.blocks[2](x)


def caught_inside():
    shardrt.manual_seed(3)
    model = Catches()
    shard(model, init_device_mesh("auto"))
    tokens, targets = batches(1, size=4)[0]
    for model.failing in (False, True, False):
        loss_of(model, tokens, targets).backward()
    return gradients(model)


def test_a_module_may_catch_the_error_of_one_inside_it():
    found = thread.run(2, caught_inside)[0]
    assert all(np.isfinite(gradient).all() for gradient in found.values())


def interrupted(at, strategy):
    """Losses of three steps, with an interrupt at one place of the schedule before the second."""
    shardrt.manual_seed(3)
    model = Net()
    shard(model, init_device_mesh("auto"), strategy=strategy, mp_policy=MixedPrecisionPolicy("bfloat16"))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    schedule, losses = units(model)[0].schedule, []
    for step, (tokens, targets) in enumerate(batches(3)):
        if step == 1 and at is not None:
            place, calls = at
            *above, name = place.split(".")
            part, left = attrgetter(*above)(schedule) if above else schedule, iter(range(calls))
            original = getattr(part, name)

            def interrupt(*args, original=original, left=left, **kwargs):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return original(*args, **kwargs)

            with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
                patch.setattr(part, name, interrupt)
                loss_of(model, tokens, targets)
        assert schedule.forward.depth == 0 and not autograd.modules()
        loss = loss_of(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_OPT"])
def test_after_an_interrupt_in_forward_training_goes_on_as_if_there_had_been_none(strategy):
    expected = interrupted(None, strategy)
    places = [
        *("_begin_forward", "enter", "gathers.ensure", "gathers.prefetch", "gathers.finish"),
        *(
            "forward.begin",
            "forward.enter",
            "forward.leave",
            "forward._what_backward_needs",
            "forward._finish",
        ),
    ]
    once = ("_begin_forward", "begin", "_what_backward_needs")
    for place in places:
        for calls in (0, 1, 3) if place.split(".")[-1] not in once else (0,):
            assert interrupted((place, calls), strategy) == expected, (place, calls)


def other_values():
    model, mesh = Net(), init_device_mesh("auto")
    model.blocks[1].up.bias.data = np.full(13, float(mesh.rank), np.float32)
    shard(model, mesh)
    optim.AdamW(model.parameters())


def test_values_that_differ_between_ranks_are_told():
    with pytest.raises(ValueError, match=r"'blocks\.1\.up\.bias' has other values on rank 1 than on rank 0"):
        thread.run(2, other_values)


def read_on_one_rank():
    model, mesh = Net(), init_device_mesh("auto")
    if mesh.rank == 0:
        model.blocks[1].up.weight.data  # noqa: B018  made on one rank only, and the same as anywhere
    shard(model, mesh)
    optim.AdamW(model.parameters())


def test_values_may_be_made_early_on_some_ranks():
    thread.run(2, read_on_one_rank)


@pytest.mark.parametrize("prepare", [lambda model: None, lambda model: model[3].weight.data])
def test_ranks_that_were_given_the_same_tell_each_other_nothing_of_each_parameter(monkeypatch, prepare):
    """With N ranks each would have N messages, as long as the model has parameters."""
    told, talk = [], Communicator.talk
    monkeypatch.setattr(
        Communicator, "talk", lambda self, data: [told.append(len(data)), talk(self, data)][1]
    )

    def build():
        model = nn.Sequential(*(nn.LayerNorm(3) for _ in range(20)))
        prepare(model)
        fully_shard(model, mesh=init_device_mesh("auto"))
        optim.AdamW(model.parameters())

    thread.run(2, build)
    assert told and max(told) < 40


def other_settings(of_rank):
    mesh = init_device_mesh("auto")
    shard(Net(), mesh, **of_rank[mesh.rank]).parameters().__next__().shard  # noqa: B018


@pytest.mark.parametrize(
    "of_rank",
    [[{"reshard_after_forward": True}, {"reshard_after_forward": False}], [{"prefetch": 1}, {"prefetch": 2}]],
)
def test_settings_that_differ_between_ranks_are_told(of_rank):
    with pytest.raises(ValueError, match=r"ranks \[1\] have another model, seed or sharding than rank 0"):
        thread.run(2, other_settings, of_rank)


def other_divide_factors():
    mesh = init_device_mesh("auto")
    model = shard(Net(), mesh)
    optim.SGD(model.parameters(), lr=0.1)
    set_gradient_divide_factor(model, 2)
    set_gradient_divide_factor(model, 1 + mesh.rank)


def test_divide_factors_that_differ_between_ranks_are_told():
    with pytest.raises(ValueError, match=r"ranks \[1\] give another factor than rank 0 \(rank .: ."):
        thread.run(2, other_divide_factors)


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_OPT"])
def test_releasing_what_a_strategy_keeps_is_refused(strategy):
    with pytest.raises(ValueError, match=f"reshard_after_forward=True does not fit {strategy}"):
        fully_shard(Net(), strategy=strategy, reshard_after_forward=True)


def two_prefetches():
    model = Net()
    fully_shard(model.blocks[0], prefetch=3)
    fully_shard(model)
    optim.AdamW(model.parameters())


def test_prefetch_is_one_number():
    with pytest.raises(ValueError, match="unit blocks.0 has prefetch=3, the outermost unit has 1"):
        thread.run(2, two_prefetches)


@pytest.mark.parametrize("call", [memory_plan, explain])
def test_a_plan_needs_a_unit_around_all(call):
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    with pytest.raises(
        ValueError, match="unit blocks.1 is not inside blocks.0; call fully_shard on the module"
    ):
        call(model)


def test_the_plan_of_a_part_is_that_of_the_whole():
    model = Net()
    shard(model, init_device_mesh("auto"))
    before = memory_plan(model.blocks[0])
    optim.AdamW(model.parameters())
    assert memory_plan(model.blocks[0]).device == before.device == memory_plan(model).device


def two_optimizers(together):
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    for layer in model if not together else ():
        fully_shard(layer)
    fully_shard(model)
    return [optim.SGD(list(layer.parameters()), lr=0.1) for layer in model]


def test_two_optimizers_share_no_unit():
    two_optimizers(together=False)
    with pytest.raises(ValueError, match="parameter '1.weight' is in one unit with parameters that another"):
        two_optimizers(together=True)


def test_an_optimizer_is_made_after_sharding():
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        RuntimeError, match="parameter 'norm.weight' already belongs to an optimizer; make the"
    ):
        fully_shard(model.norm)
    del optimizer
    fully_shard(model)


def partly_sharded(ignored=(), replaced=False):
    model, mesh = Net(), init_device_mesh("auto")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    if replaced:
        fully_shard(model, mesh=mesh)
        model.norm = nn.LayerNorm(7)
    else:
        fully_shard(
            nn.ModuleList([model.norm]), mesh=mesh, ignored=[getattr(model, name) for name in ignored]
        )
    return optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("replaced, name", [(False, "embed.weight"), (True, "norm.weight")])
def test_a_trained_parameter_is_in_a_unit_or_ignored(replaced, name):
    with pytest.raises(
        ValueError, match=rf"parameter '{name}' is in no unit, .* call fully_shard\(model\) last"
    ):
        thread.run(2, partly_sharded, replaced=replaced)
    assert thread.run(2, partly_sharded, ignored=["embed"])
    assert partly_sharded()  # one rank needs nobody


def test_an_optimizer_may_take_the_place_of_another():
    model = fully_shard(Net())
    first = optim.SGD(model.parameters(), lr=0.1)
    assert optim.AdamW(model.parameters(), lr=0.1).slices and first.slices


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"reshard_after_forward": 2}, "reshard_after_forward must be True, False or None, got 2"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward must be True, False or None, got 'no'"),
        ({"mesh": 3}, "mesh must be a DeviceMesh, got int"),
    ],
)
def test_what_is_no_mesh_and_no_choice_is_refused(wrong, told):
    with pytest.raises(TypeError, match=told):
        fully_shard(Net(), **wrong)


@pytest.mark.parametrize("on_host", [False, True])
def test_reductions_that_raise_give_their_memory_back(on_host, monkeypatch):
    def fail(*args, **kwargs):
        raise ArithmeticError

    model, ((tokens, targets),) = Net(), batches(1, size=4)
    offload = CPUOffloadPolicy(parameters=False, optimizer_state=False) if on_host else None
    shard(model, init_device_mesh("auto"), offload_policy=offload, mp_policy=MixedPrecisionPolicy("bfloat16"))
    for _ in range(4):
        loss = loss_of(model, tokens, targets)
        with monkeypatch.context() as patch, pytest.raises(ArithmeticError):
            patch.setattr(Communicator, "reduce_scatter", fail)
            loss.backward()
    loss_of(model, tokens, targets).backward()
    arenas = {arena for unit in units(model) for group in unit.groups for arena in group.arenas.values()}
    assert all(arena.in_use == 0 for arena in arenas if arena.name not in ("wire", "reduce_wire"))
    assert all(len(arena.slots) <= 2 for arena in arenas)
