"""What a rank has of a model in stages, and what is done with it: norms, copies, adapters, plans, units."""

import numpy as np
import pytest

from models.plans import plan_of
from models.regnet import SIZES as REGNETS
from models.regnet import RegNet
from shardrt import nn, optim
from shardrt.checkpoint import CheckpointManager, full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import (
    ReplicasDiffer,
    check_replicas,
    explain,
    full_gradients,
    full_parameters,
    fully_shard,
    memory_plan,
    no_sync,
    reshard,
    set_gradient_divide_factor,
    units,
    unshard,
    wrap,
)
from shardrt.fsdp.wrap import by_class
from shardrt.nn.utils import clip_grad_norm_
from shardrt.parallel import parallelize_module, pipeline_stages
from tests import lab
from tests.parallel import pipes
from tests.parallel.staged import NAMES, gpt, images, llama, mesh_of, on_two, own_of, text, two_stages
from tests.ranks import run_ranks

NO_VALUES = ", so it has no values here; use full_state_dict"


def test_what_other_ranks_have_is_absent_and_says_where_it_is():
    def touched(model, mesh, stages):
        absent = [p for p in model.parameters() if p.absent]
        here = [p for stage in stages for p in stage.parameters()]
        assert {id(p) for p in (*absent, *here)} == {id(p) for p in model.parameters()}
        assert all(p.name == name for stage in stages for name, p in stage.named_parameters())
        assert all(p.shard.size == 0 and p.grad is None and p.extents == () for p in absent)
        optimizer = optim.AdamW(model.parameters())
        assert sum(state.size for piece in optimizer.slices for state in piece.state.values()) < 3 * sum(
            p.shard.size for p in here
        )
        found = []
        for touch in (
            lambda p: p.data,
            lambda p: p.lent(),
            lambda p: setattr(p, "data", np.zeros(p.shape, np.float32)),
            lambda p: p + 1.0,
            lambda p: np.asarray(p),
        ):
            with pytest.raises(RuntimeError) as raised:
                touch(absent[-1])
            found.append(str(raised.value))
        return found

    first, last = on_two(touched)
    assert set(first) == {f"parameter 'head.weight' is on stage 1, rank 1{NO_VALUES}"}
    assert set(last) == {f"parameter 'blocks.1.mlp.down.weight' is on stage 0, rank 0{NO_VALUES}"}


@lab.on_ranks(2)
def test_a_norm_that_is_no_number_on_one_stage_is_none_on_any():
    model, mesh, stages = two_stages()
    pipes.run(stages, mesh["pp"], text())
    if mesh.rank == 1:
        model.head.weight.grad[...] = np.nan
    assert np.isnan([clip_grad_norm_(model.parameters(), 1.0, kind) for kind in (2.0, np.inf)]).all()


def unequal_copies():
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate")), lab.seeded(llama)
    pipes.sharded(pipeline_stages(model, mesh["pp"]), mesh["dp_replicate"])
    check_replicas(model)
    if mesh.rank == 3:
        with model.norm.weight.writing() as shard:
            shard += 1
    check_replicas(model)


test_unequal_copies_are_found_on_one_stage_and_named_on_all = lab.refusals(
    (unequal_copies, ReplicasDiffer, "^copies of parameter 'norm.weight' differ"), ranks=4, everywhere=True
)


@lab.on_ranks(2)
def test_copies_of_tied_weights_that_differ_are_reported():
    model, mesh, stages = two_stages(gpt)
    assert len(stages) == 1
    check_replicas(model)
    if mesh.rank == 1:
        with model.wte.weight.writing() as shard:
            shard += 1
    with pytest.raises(ReplicasDiffer, match="'wte.weight'.*differs between stages 0 and 1"):
        check_replicas(model)


def test_statistics_of_batch_norm_are_those_of_the_stages_that_have_them(tmp_path):
    """In state dicts, and in a checkpoint that a model in one piece takes up."""

    def body(pp, saves):
        model, mesh = lab.seeded(lambda: RegNet(REGNETS["regnety-digits"])), mesh_of(pp)
        stages = pipeline_stages(model, mesh["pp"])
        checkpoints = CheckpointManager(tmp_path, model, optim.SGD(model.parameters(), lr=1.0), mesh)
        if saves:
            pipes.run(stages, mesh["pp"], [images(), images()], loss=lambda y: y.sum())
            checkpoints.save(1)
        else:
            checkpoints.restore()
        return full_state_dict(model)

    expected = lab.first(1, body, 1, saves=True)
    for pp, saves in ((2, True), (1, False), (2, False)):
        lab.assert_equal(lab.first(pp, body, pp, saves), expected)


def test_adapters_are_trained_in_stages_and_merged_where_they_are():
    def body(pp):
        model, mesh = nn.add_lora(lab.seeded(llama), 2), mesh_of(pp)
        stages = pipeline_stages(model, mesh["pp"])
        optimizer = optim.AdamW(nn.lora_parameters(model), lr=0.1)
        pipes.run(stages, mesh["pp"], text())
        norm = clip_grad_norm_(nn.lora_parameters(model), 1.0)
        optimizer.step()
        nn.merge_lora(model)
        return norm, full_state_dict(model)

    (expected,), (found, other) = run_ranks(1, body, 1), run_ranks(2, body, 2)
    lab.assert_equal(found, expected)
    assert other[0] == expected[0]


def test_a_plan_of_memory_counts_the_parameters_of_the_stages_of_a_rank():
    def planned(model, mesh, stages):
        return memory_plan(model).device, explain(stages[0]), memory_plan(stages[0]).device

    (first, table, again), (last, _, _) = on_two(planned)
    assert first == again and "stage 0" in table and "blocks.1" in table and "blocks.2" not in table
    (whole,) = run_ranks(1, lambda: memory_plan(fully_shard(llama(), mesh=mesh_of(1)["dp_shard"])).device)
    both = first["optimizer state"] + last["optimizer state"]
    assert whole["optimizer state"] <= both <= 1.1 * whole["optimizer state"]


def test_what_is_said_of_units_of_the_model_holds_for_those_of_its_stages():
    def message(model, mesh, stages):
        set_gradient_divide_factor(model, 2.0)
        unshard(model)
        shapes = [model.get_parameter(name).data.shape for name, _ in stages[0].named_parameters()]
        reshard(model)
        with no_sync(model):
            pipes.run(stages, mesh["pp"], text())
        pipes.run(stages, mesh["pp"], text())
        names = {name for name, gradient in full_gradients(model) if gradient is not None}
        with full_parameters(model, writeback=True):
            for p in stages[0].parameters():
                p.data[...] = 3.0
        factors = {unit.choices.divide_factor for unit in units(model)}
        return len(shapes), names, factors, full_state_dict(model)

    found = on_two(message)
    weights = found[0][3]
    assert all((values == 3).all() for values in weights.values())
    assert found[0][1] | found[1][1] == weights.keys() and not found[0][1] & found[1][1]
    assert all(count == len(names) and factors == {2.0} for count, names, factors, _ in found)


@lab.on_ranks(1)
def test_a_plan_has_the_optimizers_state_once_of_what_two_stages_of_a_rank_use():
    stages = own_of(gpt(), mesh_of(1), stages=2)
    plans = [memory_plan(stage).device for stage in stages]
    optimizer = optim.AdamW([p for stage in stages for p in stage.parameters()])
    kept = sum(state.nbytes for piece in optimizer.slices for state in piece.state.values())
    assert kept == sum(plan["optimizer state"] for plan in plans)
    assert [len(stage.tied_replicas) for stage in stages] == [0, 1]


@lab.on_ranks(2)
def test_a_plan_of_a_model_is_that_of_all_stages_of_the_rank():
    model, _, stages = two_stages(stages=4)
    with pytest.raises(ValueError, match="this rank has 2 pipeline stages; pass one of them"):
        explain(model)
    each, whole = [memory_plan(stage).device for stage in stages], memory_plan(model).device
    assert all(plan["optimizer state"] for plan in each)
    for name in whole.keys() - {"scratch of communicators"}:  # which is taken once
        assert whole[name] == sum(plan.get(name, 0) for plan in each)


@lab.on_ranks(8)
def test_ranks_of_other_stages_need_not_come_when_units_are_made():
    """Ranks of the second stage begin with theirs when those of the first have made all that they need."""
    mesh, model = init_device_mesh("cpu", (2, 2, 1, 2), mesh_dim_names=NAMES), lab.seeded(llama)
    pipe = mesh["pp"]
    parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=True))
    stages = pipeline_stages(model, pipe)
    if pipe.rank == 1:
        pipes.moved(pipe, 0, 1, None)
    made = units(pipes.sharded(stages, mesh["dp_replicate", "dp_shard"])[0])
    if pipe.rank == 0:
        pipes.moved(pipe, 0, 1, np.zeros(1, np.float32))
    assert [unit.schedule.mesh.size for unit in made] == [4, 4, 4]


def test_units_of_a_stage_can_be_picked():
    def body():
        model, mesh = lab.seeded(llama), mesh_of(2)
        (stage,) = pipeline_stages(model, mesh["pp"])
        wrap(stage, by_class(type(model.blocks[0])), mesh=mesh["dp_shard"])
        return [unit.label for unit in units(stage)], [unit.label for unit in units(model)]

    first, last = run_ranks(2, body)
    assert first == (["stage 0", "blocks.0", "blocks.1"],) * 2
    assert last == (["stage 1", "blocks.2", "blocks.3"],) * 2
