"""Small models in stages, on the meshes that tests of stages have, and what they are compared by."""

import numpy as np

import shardrt
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from shardrt.comm import init_device_mesh
from shardrt.parallel import pipeline_stages
from tests import lab
from tests.parallel import pipes
from tests.ranks import run_ranks

VOCAB, ROWS, TIME = 13, 2, 8
SMALL = {"n_head": 4, "n_embd": 16, "block_size": TIME, "vocab_size": VOCAB, "init_std": 0.1}


def gpt(layers=4, dropout=0.2):
    return GPT(GPTConfig(n_layer=layers, dropout=dropout, **SMALL))


def llama(layers=4, tied=False):
    return Llama(LlamaConfig(n_layer=layers, n_kv_head=2, n_hidden=24, tied=tied, **SMALL))


def text():
    """The micro-batches of a step."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, ROWS, TIME + 1))
    return [{"tokens": rows[:, :-1], "targets": rows[:, 1:], "reduction": "sum"} for rows in tokens]


def images():
    return {"images": shardrt.Tensor(np.random.default_rng(0).random((ROWS, 1, 8, 8), np.float32))}


NAMES = ("pp", "dp_replicate", "dp_shard", "tp")


def own_of(model, mesh, **how):
    return pipes.sharded(pipeline_stages(model, mesh["pp"], **how), mesh["dp_shard"])


def mesh_of(pp, shards=1):
    return init_device_mesh("cpu", (pp, shards), mesh_dim_names=("pp", "dp_shard"))


def two_stages(make=llama, **how):
    """(model, mesh, this rank's stages) on two ranks."""
    model, mesh = lab.seeded(make), mesh_of(2)
    return model, mesh, own_of(model, mesh, **how)


def on_two(function):
    """Results by rank of function(model, mesh, stages), of a Llama on two stages."""
    return run_ranks(2, lambda: function(*two_stages()))
