"""Stages of a pipeline: what a rank has of a model that lies on several, and all that is done with it."""

import copy
from itertools import combinations, pairwise

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from models.regnet import SIZES as REGNETS
from models.regnet import RegNet
from models.vit import SIZES as VITS
from models.vit import ViT
from shardrt import nn, optim
from shardrt.checkpoint import CheckpointManager, full_state_dict, get_optimizer_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import (
    CPUOffloadPolicy,
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
    set_world_invariant,
    units,
    unshard,
    wrap,
)
from shardrt.fsdp.wrap import by_class
from shardrt.nn.utils import clip_grad_norm_
from shardrt.parallel import parallelize_module, pipeline_stages, sum_tied
from shardrt.parallel.cut import balanced
from shardrt.parallel.schedules import schedule
from shardrt.parallel.times import piece_times
from tests.parallel import pipes
from tests.ranks import run_ranks

VOCAB, ROWS, TIME = 13, 2, 8
SMALL = {"n_head": 4, "n_embd": 16, "block_size": TIME, "vocab_size": VOCAB, "init_std": 0.1}


def gpt(layers=4, dropout=0.2):
    return GPT(GPTConfig(n_layer=layers, dropout=dropout, **SMALL))


def llama(layers=4, tied=False):
    return Llama(LlamaConfig(n_layer=layers, n_kv_head=2, n_hidden=24, tied=tied, **SMALL))


def text(parts, part, step=0, each=2):
    """The micro-batches of one of `parts` parts of a step's batch."""
    tokens = np.random.default_rng(step).integers(0, VOCAB, (each, parts, ROWS, TIME + 1))[:, part]
    shared = {"reduction": "sum"}
    return [{"tokens": rows[:, :-1], "targets": rows[:, 1:], **shared} for rows in tokens]


def images():
    return {"images": shardrt.Tensor(np.random.default_rng(0).random((ROWS, 1, 8, 8), np.float32))}


MODELS = {
    "gpt": (gpt, lambda: text(1, 0)[0]),
    "llama": (llama, lambda: text(1, 0)[0]),
    "tied llama": (lambda: llama(tied=True), lambda: text(1, 0)[0]),
    "vit": (lambda: ViT(VITS["vit-digits"]), images),
    "regnet": (lambda: RegNet(REGNETS["regnety-digits"]), images),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_pieces_one_after_the_other_are_the_model_to_the_bit(name):
    make, batch_of = MODELS[name]
    found = []
    for in_pieces in (False, True):
        shardrt.manual_seed(3)
        model, batch = make(), batch_of()
        if in_pieces:
            (stage,) = pipeline_stages(model, init_device_mesh("cpu"))
            y = stage(None, batch)
        else:
            y = model(**batch)
        y.sum().backward()
        found.append((y.numpy(), {key: p.grad for key, p in model.named_parameters()}))
    np.testing.assert_array_equal(*(y for y, _ in found))
    same(*(gradients for _, gradients in found))


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def close(found, expected, rtol=1e-6):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.linalg.norm(found[name] - values) <= rtol * np.linalg.norm(values) + 1e-9, name


STEPS = 2
NAMES = ("pp", "dp_replicate", "dp_shard", "tp")


def trained(
    make,
    pp=1,
    copies=1,
    shards=1,
    tp=1,
    sequence=False,
    rank_of=None,
    sharding=None,
    invariant=0,
    **how,
):
    """(losses of the steps, norms, weights) of this rank; without a pipeline where pp is 0."""
    mesh = init_device_mesh("cpu", (max(pp, 1), copies, shards, tp), mesh_dim_names=NAMES)
    shardrt.manual_seed(3)
    model = make()
    if tp > 1:
        parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=sequence))
    data = mesh["dp_replicate", "dp_shard"] if copies > 1 else mesh["dp_shard"]
    if pp:
        stages = pipes.sharded(pipeline_stages(model, mesh["pp"], **how), data, **(sharding or {}))
    else:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=data)
    if invariant:
        set_world_invariant(model, invariant)
    begun = full_state_dict(model)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses, norms = [], []
    for step in range(STEPS):
        shardrt.manual_seed(3, step)
        batches = text(data.size, data.rank, step, invariant // data.size or 2)
        if pp:
            losses += pipes.run(stages, mesh["pp"], batches, rank_of)
            sum_tied(model)
        else:
            for batch in batches:
                loss = model(**batch)
                loss.backward()
                losses.append(loss.item())
        norms.append(clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, begun, full_state_dict(model)


AXES = {
    "pp 2": {},
    "pp 2, dp 2": {"shards": 2},
    "pp 2, tp 2": {"tp": 2},
    "hybrid": {"copies": 2, "shards": 2},
}


@pytest.mark.parametrize("axes", AXES)
def test_a_pipeline_trains_to_the_bits_of_the_model_in_one_piece(axes):
    sizes = AXES[axes]
    ranks = int(np.prod([*sizes.values()], initial=1, dtype=int))
    expected = run_ranks(ranks, trained, llama, 0, **sizes)
    found = run_ranks(2 * ranks, trained, llama, 2, **sizes)
    assert [rank[1] for rank in found] == [expected[0][1]] * (2 * ranks)  # norms
    assert [rank[0] for rank in found[ranks:]] == [rank[0] for rank in expected]
    same(found[0][2], expected[0][2])
    same(found[0][3], expected[0][3])
    assert not any(rank[2] or rank[3] for rank in found[1:])


def test_a_rank_may_have_several_stages_in_any_order():
    expected = run_ranks(1, trained, llama, 0)[0]
    table = schedule("ZBVZeroBubble", 2, 4)
    for placement, rank_of in (
        ("loop", [0, 1, 0, 1]),
        ("V", [0, 1, 1, 0]),
        (table, [table.rank_of(stage) for stage in range(table.stages)]),
        ({0: 1, 1: 1, 2: 0}, [1, 1, 0]),
    ):
        how = {"stages": len(rank_of), "placement": placement, "rank_of": rank_of}
        found = run_ranks(2, trained, llama, 2, **how)
        assert found[0][1] == found[1][1] == expected[1]
        same(found[0][3], expected[3])


BESIDE = {"alone": {}, "tp 2": {"tp": 2}, "sp 2": {"tp": 2, "sequence": True}, "dp 2": {"shards": 2}}


@pytest.mark.parametrize("axes", BESIDE)
def test_tied_weights_learn_on_two_stages_what_they_learn_on_one(axes):
    """And on both of them the same, to the bit, however it is placed, and if both are on one rank."""
    sizes = BESIDE[axes]
    ranks = max([1, *sizes.values()])
    expected = run_ranks(ranks, trained, gpt, 0, **sizes)[0]
    two = run_ranks(2 * ranks, trained, gpt, 2, **sizes)
    same(two[0][2], expected[2])
    close(two[0][3], expected[3])
    assert two[0][1] == pytest.approx(expected[1], rel=1e-6)
    offloaded = {"offload_policy": CPUOffloadPolicy()}
    for pp, rank_of, sharding in (
        (3, [0, 1, 2], {}),
        (2, [0, 1, 1, 0], {}),
        (2, [0, 1, 1, 0], offloaded),
        (1, [0, 0], {}),
    ):
        how = {"stages": len(rank_of), "placement": rank_of, "rank_of": rank_of, "sharding": sharding}
        found = run_ranks(pp * ranks, trained, gpt, pp, **sizes, **how)
        assert found[0][1] == two[0][1]
        same(found[0][3], two[0][3])


def test_with_exact_sums_stages_have_the_bits_of_one_rank():
    expected = run_ranks(1, trained, llama, 0, invariant=4)[0]
    found = run_ranks(4, trained, llama, 2, shards=2, invariant=4)
    assert [rank[1] for rank in found] == [expected[1]] * 4
    same(found[0][3], expected[3])


def own_of(model, mesh, **how):
    return pipes.sharded(pipeline_stages(model, mesh["pp"], **how), mesh["dp_shard"])


def mesh_of(pp, shards=1):
    return init_device_mesh("cpu", (pp, shards), mesh_dim_names=("pp", "dp_shard"))


def on_two(function):
    """Results by rank of function(model, mesh, stages), of a Llama on two stages."""

    def body():
        shardrt.manual_seed(3)
        model, mesh = llama(), mesh_of(2)
        return function(model, mesh, own_of(model, mesh))

    return run_ranks(2, body)


def test_what_other_ranks_have_is_absent_and_says_where_it_is():
    def touched(model, mesh, stages):
        absent = [p for p in model.parameters() if p.absent]
        here = [p for stage in stages for p in stage.parameters()]
        assert {id(p) for p in (*absent, *here)} == {id(p) for p in model.parameters()}
        assert all(p.name == name for stage in stages for name, p in stage.named_parameters())
        assert all(p.shard.size == 0 and p.grad is None and p.part == () for p in absent)
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
    assert set(first) == {"parameter 'head.weight' is on stage 1, rank 1"}
    assert set(last) == {"parameter 'blocks.1.mlp.down.weight' is on stage 0, rank 0"}


def test_a_step_is_left_out_on_all_stages_where_one_has_overflowed():
    def scaled(model, mesh, stages):
        optimizer, scaler = optim.AdamW(model.parameters(), lr=0.1), optim.GradScaler(init_scale=2.0)
        before = full_state_dict(model)
        scaler.scale(shardrt.Tensor(1.0))
        pipes.run(stages, mesh["pp"], text(1, 0))
        if mesh.rank == 1:
            model.head.weight.grad[...] = np.inf
        scaler.step(optimizer)
        scaler.update()
        return before, full_state_dict(model), scaler.get_scale()

    (before, after, scale), (_, _, other) = on_two(scaled)
    assert scale == other == 1.0
    same(after, before)


def test_a_norm_that_is_no_number_on_one_stage_is_none_on_any():
    def clipped(model, mesh, stages):
        pipes.run(stages, mesh["pp"], text(1, 0))
        if mesh.rank == 1:
            model.head.weight.grad[...] = np.nan
        return [clip_grad_norm_(model.parameters(), 1.0, norm_type) for norm_type in (2.0, np.inf)]

    assert np.isnan(on_two(clipped)).all()


def test_unequal_copies_are_found_on_one_stage_and_told_on_all():
    def body():
        shardrt.manual_seed(3)
        model, mesh = llama(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate"))
        stages = pipes.sharded(pipeline_stages(model, mesh["pp"]), mesh["dp_replicate"])
        check_replicas(model)
        if mesh.rank == 3:
            with model.norm.weight.writing() as shard:
                shard += 1
        with pytest.raises(ReplicasDiffer) as raised:
            check_replicas(model)
        return str(raised.value) if stages else None

    told = run_ranks(4, body)
    assert len(set(told)) == 1 and told[0].startswith("copies of parameter 'norm.weight' differ")


def test_copies_of_tied_weights_that_differ_are_told():
    def body():
        shardrt.manual_seed(3)
        model, mesh = gpt(), mesh_of(2)
        stages = own_of(model, mesh)
        check_replicas(model)
        if mesh.rank == 1:
            with model.wte.weight.writing() as shard:
                shard += 1
        with pytest.raises(ReplicasDiffer, match="'wte.weight'.*differ between stages 0 and 1"):
            check_replicas(model)
        return len(stages)

    assert run_ranks(2, body) == [1, 1]


def test_a_stage_that_is_frozen_counts_in_no_norm_and_has_no_state():
    def frozen(model, mesh, stages):
        for block in model.blocks[:2]:
            block.requires_grad_(False)
        model.embedding.requires_grad_(False)
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        before = full_state_dict(model)
        pipes.run(stages, mesh["pp"], text(1, 0))
        norm = clip_grad_norm_(model.parameters(), np.inf)
        optimizer.step()
        return norm, len(optimizer.slices), before, full_state_dict(model)

    (norm, slices, before, after), (other, more, *_) = on_two(frozen)
    assert norm == other > 0 and slices == 0 < more
    unchanged = {name for name in before if np.array_equal(before[name], after[name])}
    assert unchanged == {n for n in before if n.startswith(("embedding", "blocks.0", "blocks.1"))}


def test_statistics_of_batch_norm_are_those_of_the_stages_that_have_them(tmp_path):
    """In state dicts, and in a checkpoint that a model in one piece takes up."""

    def body(pp, saves):
        shardrt.manual_seed(3)
        model, mesh = RegNet(REGNETS["regnety-digits"]), mesh_of(pp)
        stages = pipeline_stages(model, mesh["pp"])
        checkpoints = CheckpointManager(tmp_path, model, optim.SGD(model.parameters(), lr=1.0), mesh)
        if saves:
            pipes.run(stages, mesh["pp"], [images(), images()], loss=lambda y: y.sum())
            checkpoints.save(1)
        else:
            checkpoints.restore()
        return full_state_dict(model)

    (expected,) = run_ranks(1, body, 1, saves=True)
    for pp, saves in ((2, True), (1, False), (2, False)):
        same(run_ranks(pp, body, pp, saves)[0], expected)


def test_adapters_are_trained_in_stages_and_merged_where_they_are():
    def body(pp):
        shardrt.manual_seed(3)
        model, mesh = nn.add_lora(llama(), 2), mesh_of(pp)
        stages = pipeline_stages(model, mesh["pp"])
        optimizer = optim.AdamW(nn.lora_parameters(model), lr=0.1)
        pipes.run(stages, mesh["pp"], text(1, 0))
        norm = clip_grad_norm_(nn.lora_parameters(model), 1.0)
        optimizer.step()
        nn.merge_lora(model)
        return norm, full_state_dict(model)

    (expected,), (found, other) = run_ranks(1, body, 1), run_ranks(2, body, 2)
    assert found[0] == other[0] == expected[0]
    same(found[1], expected[1])


def test_a_plan_of_memory_counts_the_parameters_of_the_stages_of_a_rank():
    def planned(model, mesh, stages):
        return memory_plan(model).device, explain(stages[0]), memory_plan(stages[0]).device

    (first, table, again), (last, _, _) = on_two(planned)
    assert first == again and "stage 0" in table and "blocks.1" in table and "blocks.2" not in table
    (whole,) = run_ranks(1, lambda: memory_plan(fully_shard(llama(), mesh=mesh_of(1)["dp_shard"])).device)
    both = first["optimizer state"] + last["optimizer state"]
    assert whole["optimizer state"] <= both <= 1.1 * whole["optimizer state"]


def test_what_is_said_of_units_of_the_model_holds_for_those_of_its_stages():
    def told(model, mesh, stages):
        set_gradient_divide_factor(model, 2.0)
        unshard(model)
        shapes = [model.get_parameter(name).data.shape for name, _ in stages[0].named_parameters()]
        reshard(model)
        with no_sync(model):
            pipes.run(stages, mesh["pp"], text(1, 0))
        pipes.run(stages, mesh["pp"], text(1, 0))
        names = {name for name, gradient in full_gradients(model) if gradient is not None}
        with full_parameters(model, writeback=True):
            for p in stages[0].parameters():
                p.data[...] = 3.0
        factors = {unit.choices.divide_factor for unit in units(model)}
        return len(shapes), names, factors, full_state_dict(model)

    found = on_two(told)
    weights = found[0][3]
    assert all((values == 3).all() for values in weights.values())
    assert found[0][1] | found[1][1] == weights.keys() and not found[0][1] & found[1][1]
    assert all(count == len(names) and factors == {2.0} for count, names, factors, _ in found)


def test_a_plan_has_the_optimizers_state_once_of_what_two_stages_of_a_rank_use():
    def body():
        model, mesh = gpt(), mesh_of(1)
        stages = own_of(model, mesh, stages=2)
        plans = [memory_plan(stage).device for stage in stages]
        optimizer = optim.AdamW([p for stage in stages for p in stage.parameters()])
        kept = sum(state.nbytes for piece in optimizer.slices for state in piece.state.values())
        assert kept == sum(plan["optimizer state"] for plan in plans)
        return [len(stage.twins) for stage in stages]

    assert run_ranks(1, body) == [[0, 1]]


def test_a_plan_of_a_model_is_that_of_all_stages_of_the_rank():
    def body():
        model, mesh = llama(), mesh_of(2)
        stages = own_of(model, mesh, stages=4)
        with pytest.raises(ValueError, match="this rank has 2 stages; give it one of them"):
            explain(model)
        each, whole = [memory_plan(stage).device for stage in stages], memory_plan(model).device
        assert all(plan["optimizer state"] for plan in each)
        # Scratch of communicators is taken once.
        names = whole.keys() - {"scratch of communicators"}
        return all(whole[name] == sum(plan.get(name, 0) for plan in each) for name in names)

    assert run_ranks(2, body) == [True, True]


def test_ranks_of_other_stages_need_not_come_when_units_are_made():
    """Ranks of the second stage begin with theirs when those of the first have made all that they need."""

    def body():
        mesh = init_device_mesh("cpu", (2, 2, 1, 2), mesh_dim_names=NAMES)
        shardrt.manual_seed(3)
        model, pipe = llama(), mesh["pp"]
        parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=True))
        stages = pipeline_stages(model, pipe)
        if pipe.rank == 1:
            pipes.moved(pipe, 0, 1, None)
        made = units(pipes.sharded(stages, mesh["dp_replicate", "dp_shard"])[0])
        if pipe.rank == 0:
            pipes.moved(pipe, 0, 1, np.zeros(1, np.float32))
        return [unit.schedule.mesh.size for unit in made]

    assert run_ranks(8, body) == [[4, 4, 4]] * 8


def test_units_of_a_stage_can_be_picked():
    def body():
        shardrt.manual_seed(3)
        model, mesh = llama(), mesh_of(2)
        (stage,) = pipeline_stages(model, mesh["pp"])
        wrap(stage, by_class(type(model.blocks[0])), mesh=mesh["dp_shard"])
        return [unit.label for unit in units(stage)], [unit.label for unit in units(model)]

    first, last = run_ranks(2, body)
    assert first == (["stage 0", "blocks.0", "blocks.1"],) * 2
    assert last == (["stage 1", "blocks.2", "blocks.3"],) * 2


def brute(costs, parts):
    """(largest, sum of squares) of the best of all cuts."""
    cuts = combinations(range(1, len(costs)), parts - 1)
    sums = ([sum(costs[a:b]) for a, b in pairwise((0, *cut, len(costs)))] for cut in cuts)
    return min((max(found), sum(each * each for each in found)) for found in sums)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
def test_the_largest_stage_is_as_small_as_can_be(parts):
    generator = np.random.default_rng(parts)
    for _ in range(20):
        costs = generator.integers(0, 9, 8).tolist()
        begins = balanced(costs, parts)
        found = [sum(costs[a:b]) for a, b in pairwise((*begins, len(costs)))]
        assert (max(found), sum(each * each for each in found)) == brute(costs, parts)
        assert len(begins) == parts and begins == sorted(set(begins)) and begins[0] == 0


def test_stages_are_cut_by_what_they_cost():
    def names(**how):
        shardrt.manual_seed(3)
        mesh = mesh_of(2)
        stages = pipeline_stages(llama(2), mesh["pp"], **how)
        return [piece.name for stage in stages for piece in stage.pieces], [s.number for s in stages]

    told = run_ranks(2, names, costs=[0, 1, 1, 9])
    assert told == [(["embedding", "blocks.0", "blocks.1"], [0]), (["head"], [1])]
    assert run_ranks(2, names, stages=["blocks.0"]) == run_ranks(2, names, stages=[1])
    timed = run_ranks(2, names, costs="time", batch=text(1, 0)[0])
    assert sum((rank[0] for rank in timed), []) == ["embedding", "blocks.0", "blocks.1", "head"]


def test_measuring_costs_leaves_the_model_as_it_was():
    shardrt.manual_seed(3)
    model = RegNet(REGNETS["regnety-digits"])
    expected = {name: np.array(array) for name, array in model.named_buffers()}
    assert min(piece_times(model, images())) > 0
    same(dict(model.named_buffers()), expected)
    assert not any(p.storage.materialised for p in model.parameters())


class Own(nn.Module):
    """Two layers, whose pieces are as a test says."""

    def __init__(self, pieces):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.given = pieces

    def pieces(self):
        return [nn.Piece(name, lambda x, batch: x, *uses) for name, *uses in self.given(self)]


def tied(model):
    model.b.weight = model.a.weight
    return [("a", (model.a,)), ("b", (model.b,))]


def thrice(model):
    return [("a", (model.a, model.b)), ("b", (), (model.a,)), ("c", (), (model.a,))]


REFUSED = {
    "more stages": (llama, {"stages": 7}, "7 stages can't be made of 6 pieces"),
    "no stage": (llama, {"stages": 0}, "0 stages can't be made of 6 pieces"),
    "empty": (llama, {"stages": ["blocks.1", "blocks.1"]}, "stage 1 would have no piece"),
    "empty first": (llama, {"stages": [0]}, "stage 0 would have no piece"),
    "no piece": (llama, {"stages": ["blocks.9"]}, "'blocks.9' is none of the 6 pieces embedding, blocks.0"),
    "costs": (llama, {"costs": [1.0] * 5}, "there are 5 costs for 6 pieces"),
    "negative": (llama, {"costs": [1.0] * 5 + [-1.0]}, "must be numbers that are not negative"),
    "no number": (llama, {"costs": [1.0] * 5 + [np.nan]}, "must be numbers that are not negative"),
    "no cost": (llama, {"costs": "bytes"}, "'parameters', 'time' or numbers, got 'bytes'"),
    "no batch": (llama, {"costs": "time"}, "measured with a micro-batch"),
    "placement": (llama, {"placement": "W"}, "placement 'W' is unknown; known are 'loop', 'V'"),
    "short": (llama, {"placement": [0]}, "must give the rank of each of 2 stages"),
    "far": (llama, {"placement": [0, 2]}, "names rank 2, and the axis has 2"),
    "idle": (llama, {"placement": [0, 0]}, "rank 1 of the axis has none of the 2 stages"),
    "no pieces": (lambda: nn.Linear(2, 2), {}, "Linear has no method pieces()"),
    "not said": (
        lambda: Own(tied),
        {},
        "'a.weight' is used on stages 0 and 1, and piece 'b' does not name it",
    ),
    "thrice": (lambda: Own(thrice), {"stages": 3}, "'a.weight' is tied between stages 0, 1, 2"),
    "left out": (lambda: Own(lambda m: [("a", (m.a,)), ("c", ())]), {}, "'b.weight' is in no piece of Own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_one_line_on_every_rank(name):
    make, how, expected = REFUSED[name]

    def body():
        with pytest.raises((ValueError, TypeError)) as raised:
            pipeline_stages(make(), mesh_of(2)["pp"], **how)
        return str(raised.value)

    told = set(run_ranks(2, body))
    assert len(told) == 1 and expected in (line := told.pop()) and "\n" not in line
    assert line.startswith("pipeline_stages: ")


LATE = {
    "sharded": (
        lambda m, mesh: fully_shard(m, mesh=mesh["dp_shard"]),
        "'embedding.weight' is sharded already",
    ),
    "owned": (
        lambda m, mesh: m.__dict__.update(o=optim.SGD(m.parameters(), lr=1.0)),
        "has an optimizer already",
    ),
    "twice": (lambda m, mesh: m.__dict__.update(s=pipeline_stages(m, mesh["pp"])), "has stages already"),
}


@pytest.mark.parametrize("name", LATE)
def test_stages_are_made_first(name):
    before, expected = LATE[name]

    def body():
        model, mesh = llama(), mesh_of(2)
        before(model, mesh)
        with pytest.raises(RuntimeError, match=expected):
            pipeline_stages(model, mesh["pp"])

    run_ranks(2, body)


def test_what_does_not_know_of_stages_says_so():
    def refused(model, mesh, stages):
        for attempt, expected in (
            (lambda: fully_shard(model, mesh=mesh["dp_shard"]), "the model has stages; call it on each"),
            (lambda: fully_shard(model.blocks, mesh=mesh["dp_shard"]), "the modules of this rank's stages"),
            (lambda: parallelize_module(model, mesh["dp_shard"], {}), "call it before pipeline_stages"),
            (lambda: nn.add_lora(model, 2), "call add_lora before pipeline_stages"),
            (lambda: full_state_dict(stages[0]), "give the model, not one of its stages"),
            (lambda: copy.deepcopy(model), "can't be copied"),
            (lambda: model(**text(1, 0)[0]), f"Llama has stages, of which this rank runs {mesh.rank}:"),
        ):
            with pytest.raises((ValueError, RuntimeError, TypeError), match=expected):
                attempt()

    on_two(refused)


def test_an_optimizer_of_the_stages_alone_has_no_whole_state():
    def refused(model, mesh, stages):
        optimizer = optim.SGD(stages[0].parameters(), lr=1.0)
        with pytest.raises(ValueError, match="of this rank's stages alone; make it with model.parameters"):
            get_optimizer_state_dict(model, optimizer)

    on_two(refused)


def test_ranks_with_other_seeds_or_cuts_are_told():
    def body(other):
        mesh = mesh_of(2)
        shardrt.manual_seed(mesh.rank if other == "seed" else 0)
        model = llama()
        with pytest.raises(ValueError, match="ranks .1. have another model, seed or cut than rank 0"):
            pipeline_stages(model, mesh["pp"], stages=[1 + (other == "cut" and mesh.rank)])

    run_ranks(2, body, "seed")
    run_ranks(2, body, "cut")


def test_the_same_bits_at_every_number_of_ranks_are_refused_for_tied_stages():
    def body(make):
        mesh, model = mesh_of(2), make()
        stages = own_of(model, mesh)
        for part in (model, *stages):
            if make is gpt:
                with pytest.raises(ValueError, match="'wte.weight' is on two stages"):
                    set_world_invariant(part, 2)
            else:
                set_world_invariant(part, 2)

    run_ranks(2, body, gpt)
    run_ranks(2, body, llama)


def test_a_model_may_have_names_of_its_own_for_what_a_pipeline_has():
    """No name that a module of a user's may well have is taken."""
    model = nn.Sequential(nn.Linear(2, 2))
    for name in ("stages", "stage", "place", "pieces", "blocks", "label", "number", "model", "first", "last"):
        setattr(model, name, nn.Linear(2, 2))
    assert len(list(model.parameters())) == 22
