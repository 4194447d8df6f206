"""Stages of a pipeline: what a rank has of a model whose pieces lie on several, and all that is done with it."""

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
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.nn.utils import clip_grad_norm_
from shardrt.parallel import parallelize_module, pipeline_stages, sum_tied
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


NAMES = ("pp", "dp_replicate", "dp_shard", "tp")


def trained(make, pp=1, copies=1, shards=1, tp=1, steps=2, **how):
    """(losses of the steps, norms, weights) of this rank; without a pipeline where pp is 0."""
    mesh = init_device_mesh("cpu", (max(pp, 1), copies, shards, tp), mesh_dim_names=NAMES)
    shardrt.manual_seed(3)
    model = make()
    if tp > 1:
        parallelize_module(model, mesh["tp"], plan_of(model))
    data = mesh["dp_replicate", "dp_shard"] if copies > 1 else mesh["dp_shard"]
    if pp:
        stages = pipes.sharded(pipeline_stages(model, mesh["pp"], **how), data)
    else:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=data)
    begun = full_state_dict(model)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses, norms = [], []
    for step in range(steps):
        shardrt.manual_seed(3, step)
        batches = text(copies * shards, data.rank, step)
        if pp:
            losses += pipes.run(stages, mesh["pp"], batches)
            sum_tied(model)
        else:
            for batch in batches:
                losses.append(model(**batch))
                losses[-1].backward()
        norms.append(clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, begun, full_state_dict(model)


AXES = {"pp 2": {}, "pp 2, dp 2": {"shards": 2}, "pp 2, tp 2": {"tp": 2}, "hybrid": {"copies": 2, "shards": 2}}


@pytest.mark.parametrize("axes", AXES)
def test_a_pipeline_trains_to_the_bits_of_the_model_in_one_piece(axes):
    expected = run_ranks(1, lambda: 0)
    sizes = AXES[axes]
    ranks = int(np.prod([*sizes.values()], initial=1, dtype=int))
    expected = run_ranks(ranks, trained, llama, 0, **sizes)
    found = run_ranks(2 * ranks, trained, llama, 2, **sizes)
    assert [rank[1] for rank in found] == [expected[0][1]] * (2 * ranks)  # norms
    assert [loss for rank in found[ranks:] for loss in rank[0]] == [
        loss.item() for rank in expected for loss in rank[0]
    ]
    same(found[0][2], expected[0][2])
    same(found[0][3], expected[0][3])
    assert not any(rank[2] or rank[3] for rank in found[1:])
