"""Small models on pipelines, and in one piece with the same calls."""

from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import numpy as np

import shardrt
from models.gpt import GPT, GPTConfig
from models.llama import Llama, LlamaConfig
from models.plans import plan_of
from models.vit import ViT, ViTConfig
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard, no_sync, set_gradient_divide_factor
from shardrt.fsdp.setup import units_below
from shardrt.nn.utils import clip_grad_norm_
from shardrt.parallel import Pipeline, parallelize_module
from tests.ranks import run_ranks

VOCAB, TIME, MICRO_BATCHES, ROWS = 11, 4, 4, 16
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": TIME, "vocab_size": VOCAB, "init_std": 0.3}
NAMES = ("pp", "dp_replicate", "dp_shard", "tp")


def llama(**changes):
    return Llama(LlamaConfig(n_kv_head=1, n_hidden=12, tied=False, **SMALL | changes))


def gpt(**changes):
    return GPT(GPTConfig(**{"dropout": 0.2} | SMALL | changes))


def vit():
    sizes = {"image_size": 4, "patch_size": 2, "channels": 1, "classes": 5, "init_std": 0.3}
    return ViT(ViTConfig(n_layer=2, n_head=2, n_embd=8, n_hidden=12, dropout=0.2, **sizes))


def long_llama():
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 64, "vocab_size": VOCAB}
    return Llama(LlamaConfig(n_kv_head=1, n_hidden=64, tied=False, **sizes))


class InPieces(nn.Module):
    """Its forward is that of its pieces, one after the other."""

    def forward(self, tokens):
        x = None
        for piece in self.pieces():
            x = piece.run(x, {"tokens": tokens})
        return x


class Nests(InPieces):
    """Its pieces pass on nests of tensors: for the next one, for nobody, for one far behind; and integers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, VOCAB)

    def pieces(self):
        def first(x, batch):
            x, tokens = self.embedding(batch["tokens"]), shardrt.Tensor(batch["tokens"])
            others = [x * 2, shardrt.Tensor(np.ones(3, bool)), None]
            return {"x": x.transpose(1, 2), "others": (others, x.mean()), "tokens": tokens}

        def second(x, batch):
            (_, _, nothing), beside = x["others"]
            assert nothing is None
            return F.relu(self.blocks[0](x["x"].transpose(1, 2))), x["tokens"], beside

        def third(x, batch):
            x, tokens, beside = x
            return self.blocks[1](x * (tokens.numpy()[..., None] > 2)), beside

        uses = (self.embedding, *self.blocks, self.head)
        runs = (first, second, third, lambda x, batch: self.head(x[0]) + x[1])
        return [nn.Piece(str(n), run, (use,)) for n, (run, use) in enumerate(zip(runs, uses, strict=True))]


class Batch(NamedTuple):
    tokens: Any
    targets: Any


def pictures():
    random = np.random.default_rng(0)
    return random.random((8, 1, 4, 4), np.float32), random.integers(0, 5, 8)


def picture_batches():
    return list(zip(*(np.split(array, MICRO_BATCHES) for array in pictures()), strict=True))


def picture_inputs(batch):
    return {"images": shardrt.Tensor(batch[0])}


def picture_loss(logits, batch):
    return F.cross_entropy(logits, batch[1], reduction="sum") * (1 / 8)


def token_inputs(batch):
    return {"tokens": batch["tokens"]}


def token_loss(logits, batch):
    return F.cross_entropy(logits, batch["targets"])


def batches_of(step, data):
    rows = np.random.default_rng(step).integers(0, VOCAB, (ROWS, TIME + 1))
    parts = np.split(np.split(rows, data.size)[data.rank], MICRO_BATCHES)
    return [{"tokens": part[:, :-1], "targets": part[:, 1:], "reduction": "sum"} for part in parts]


def loss_of(loss, batch):
    """Of what a model gives that is called with the micro-batch, targets too: the sum."""
    return loss * (1 / (ROWS * TIME))


class Whole:
    """In one piece, with the calls of a Pipeline: gradients are accumulated, and reduced with the last."""

    def __init__(self, model):
        self.model, self.stages = model, [model]

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def step(self, loss, batches, inputs=None):
        sharded = bool(units_below(self.model))
        for number, batch in enumerate(batches, start=1):
            with no_sync(self.model) if sharded and number < len(batches) else nullcontext():
                given = batch if inputs is None else inputs(batch)
                output = self.model(**given) if isinstance(given, dict) else self.model(*given)
                loss(output, batch).backward()


def build(
    axes,
    schedule,
    make=llama,
    first=None,
    before=None,
    cuts=None,
    micro_batches=MICRO_BATCHES,
    sharded=True,
    sequence=False,
    **how,
):
    """(pipeline, mesh of the data), on axes pp, dp_replicate, dp_shard and, if there are four, tp.

    In one piece where schedule is None. first: called with the model before it is cut, before: with each
    block. sequence: whether time is cut along tp.
    """
    mesh = init_device_mesh("cpu", axes, NAMES[: len(axes)])
    data = mesh["dp_replicate", "dp_shard"] if axes[1] > 1 else mesh["dp_shard"]
    shardrt.manual_seed(3)
    model = make()
    if first is not None:
        first(model)
    for block in model.blocks if before is not None else ():
        before(block)
    if "tp" in mesh.mesh_dim_names:
        parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=sequence))
    pipeline = Whole(model)
    if schedule is not None:
        each = 2 if "Interleaved" in str(schedule) else None
        pipeline = Pipeline(
            model,
            mesh["pp"],
            schedule=schedule,
            micro_batches=micro_batches,
            stages_per_rank=each,
            cuts=cuts,
        )
    for stage in pipeline.stages if sharded else ():
        for module in (*stage.blocks, stage):
            fully_shard(module, mesh=data, **how)
        set_gradient_divide_factor(stage, 1.0)
    return pipeline, data


def update(model, optimizer, scaler):
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return norm


def train(axes, schedule, steps=2, update=update, optimizer=optim.AdamW, lr=1e-2, scale=None, **how):
    """{"losses", "norms", "scale", "final"} of this rank."""
    pipeline, data = build(axes, schedule, **how)
    model = pipeline.model
    optimizer = optimizer(model.parameters(), lr=lr)
    scaler = optim.GradScaler(init_scale=scale or 1.0, enabled=scale is not None)
    message = {"losses": [], "norms": []}

    def loss(output, batch):
        found = loss_of(output, batch)
        message["losses"].append(found.item())
        return scaler.scale(found)

    for step in range(steps):
        shardrt.manual_seed(3, step=step)
        pipeline.step(loss, batches_of(step, data))
        message["norms"].append(update(model, optimizer, scaler))
        optimizer.zero_grad()
    return message | {"scale": scaler.get_scale(), "final": full_state_dict(model)}


@cache
def trained(axes, schedule, **how):
    ranks = run_ranks(int(np.prod(axes)), train, axes, schedule, **how)
    for what in ("norms", "scale"):
        assert [message[what] for message in ranks] == [ranks[0][what]] * len(ranks)
    assert not any(message["final"] for message in ranks[1:])
    return ranks[0] | {"losses": [message["losses"] for message in ranks if message["losses"]]}


def run(axes, schedule, function, **how):
    """What function(pipeline, mesh of the data) gives, by rank."""
    return run_ranks(int(np.prod(axes)), lambda: function(*build(axes, schedule, **how)))


def like_one_piece(function, *schedules, axes=(2, 1, 1), how=None, **others):
    """What all ranks of pipelines give is what the model in one piece gives."""
    how = how or {}
    expected = run((1, *axes[1:]), None, function, **how)[0]
    for schedule in schedules:
        for found in run(axes, schedule, function, **how):
            np.testing.assert_equal(found, expected)
    return expected
