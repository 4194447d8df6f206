"""Stages of a pipeline compute and learn what the model in one piece does, to the bit."""

from functools import partial

import pytest

import shardrt
from models.plans import plan_of
from models.regnet import SIZES as REGNETS
from models.regnet import RegNet
from models.vit import SIZES as VITS
from models.vit import ViT
from shardrt import optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import CPUOffloadPolicy, fully_shard
from shardrt.parallel import parallelize_module, pipeline_stages, sum_tied
from shardrt.parallel.schedules import schedule
from tests import lab
from tests.parallel import pipes
from tests.parallel.staged import NAMES, gpt, images, llama, text
from tests.ranks import run_ranks

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
    lab.assert_equal(*found)


def trained(
    make,
    pp=1,
    shards=1,
    tp=1,
    sequence=False,
    rank_of=None,
    sharding=None,
    **how,
):
    """(losses of the steps, norms, weights) of this rank; without a pipeline where pp is 0."""
    mesh = init_device_mesh("cpu", (max(pp, 1), 1, shards, tp), mesh_dim_names=NAMES)
    model = lab.seeded(make)
    if tp > 1:
        parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=sequence))
    data = mesh["dp_shard"]
    if pp:
        stages = pipes.sharded(pipeline_stages(model, mesh["pp"], **how), data, **(sharding or {}))
    else:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=data)

    def step(number):
        batches = text(data.size, data.rank, number)
        if pp:
            losses = pipes.run(stages, mesh["pp"], batches, rank_of)
            sum_tied(model)
            return losses
        losses = []
        for batch in batches:
            losses.append(model(**batch))
            losses[-1].backward()
        return [loss.item() for loss in losses]

    found = lab.learn(model, step, optimizer=partial(optim.AdamW, lr=1e-2, eps=1e-3), whole=None)
    return found["losses"], found["norms"], found["initial"], found["final"]


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
        lab.assert_equal(found[0][3], expected[3])


BESIDE = {"alone": {}, "tp 2": {"tp": 2}, "sp 2": {"tp": 2, "sequence": True}, "dp 2": {"shards": 2}}


@pytest.mark.parametrize("axes", BESIDE)
def test_tied_weights_learn_on_two_stages_what_they_learn_on_one(axes):
    """And on both of them the same, to the bit, however it is placed, and if both are on one rank."""
    sizes = BESIDE[axes]
    ranks = max([1, *sizes.values()])
    expected = run_ranks(ranks, trained, gpt, 0, **sizes)[0]
    two = run_ranks(2 * ranks, trained, gpt, 2, **sizes)
    lab.assert_equal(two[0][2], expected[2])
    lab.assert_near(two[0][3], expected[3], rtol=1e-6, atol=1e-9)
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
        lab.assert_equal(found[0][3], two[0][3])
