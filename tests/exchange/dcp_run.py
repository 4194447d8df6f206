"""Trains a small Llama with FSDP2 on processes of this machine, and saves and loads distributed checkpoints.

    python tests/exchange/dcp_run.py JOBS.json

JOBS.json is a list of tables: "world"; "kind" ("hub": transformers' Llama, "titan": one with torchtitan's
names); "layout" ("app", "nested" or "flat"); "load", "save": folders; "steps"; "truth": an .npz that gets the
weights, and the optimizer's state at first, then the weights and losses after the steps.
"mesh": saves tensors that are cut along two dimensions instead.

The fixture of tests/exchange/fixtures/dcp was made by the job {"world": 4, "mesh": true, "save": ...}.
"""

import json
import multiprocessing
import sys
import tempfile
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

SHAPES = {"a.weight": (7, 5), "b.weight": (4, 6, 3), "c.weight": (1,), "d.weight": (9,)}


def tokens(step):
    """Two rows of 17 tokens, without a random generator."""
    row, column = np.indices((2, 17))
    return (11 * step + 7 * row + 3 * column * column + column * step) % 64


def values(name):
    """Of a tensor of the two-dimensional mesh."""
    shape = SHAPES[name]
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * ord(name[0])


def linear(rows, columns):
    return torch.nn.Linear(columns, rows, bias=False)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_linear = torch.nn.ModuleDict(
            {"wq": linear(32, 32), "wk": linear(16, 32), "wv": linear(16, 32)}
        )
        self.wo = linear(32, 32)

    def forward(self, x):
        size, time = x.shape[:2]
        q, k, v = (self.qkv_linear[name](x).view(size, time, -1, 8) for name in ("wq", "wk", "wv"))
        angles = torch.outer(torch.arange(time), 1 / 500000.0 ** (torch.arange(0, 8, 2) / 8))
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(one.reshape(*one.shape[:-1], 4, 2)) * turn).flatten(3)
            for one in (q, k)
        )
        k, v = (one.repeat_interleave(2, 2) for one in (k, v))
        out = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)), is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(size, time, 32))


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = linear(48, 32), linear(32, 48), linear(48, 32)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), MLP()
        self.attention_norm, self.ffn_norm = torch.nn.RMSNorm(32, 1e-5), torch.nn.RMSNorm(32, 1e-5)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Titan(torch.nn.Module):
    """Names and rotary embeddings of torchtitan's Llama."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = torch.nn.Embedding(64, 32)
        self.layers = torch.nn.ModuleDict({str(number): Block() for number in range(2)})
        self.norm, self.lm_head = torch.nn.RMSNorm(32, 1e-5), linear(64, 32)

    def forward(self, x):
        x = self.tok_embeddings(x)
        for block in self.layers.values():
            x = block(x)
        return self.lm_head(self.norm(x))


def model_of(kind):
    torch.manual_seed(5)
    if kind == "titan":
        model = Titan()
        for block in model.layers.values():
            fully_shard(block)
        return fully_shard(model), model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=16, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    return model, lambda x: model(x).logits


def tables(model, optimizer, layout):
    """What is saved or loaded."""
    flat = StateDictOptions(flatten_optimizer_state_dict=layout == "flat")
    state = get_optimizer_state_dict(model, optimizer, options=flat)
    if layout == "flat":
        counts = {"train_state": {"step": 0, "ntokens_seen": 0}, "lr_scheduler": {"last_epoch": 0}}
        return {**model.state_dict(), "optimizer": state, **counts}
    own = {"model": model.state_dict(), "optim": state}
    return {"app": own} if layout == "app" else own


def load(model, optimizer, job):
    layout = job["layout"]
    held = tables(model, optimizer, layout)
    dcp.load(held, checkpoint_id=job["load"])
    own = held.get("app", held)
    weights = {name: held[name] for name in model.state_dict()} if layout == "flat" else own["model"]
    model.load_state_dict(weights)
    options = StateDictOptions(flatten_optimizer_state_dict=layout == "flat")
    set_optimizer_state_dict(
        model, optimizer, own["optimizer" if layout == "flat" else "optim"], options=options
    )
    return held["train_state"]["step"] if layout == "flat" else None


def whole(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().numpy().copy()


def train(job, rank):
    model, forward = model_of(job["kind"])
    named = list(model.named_parameters())
    groups = [
        {"params": [one for name, one in named if "norm" not in name], "weight_decay": 0.1},
        {"params": [one for name, one in named if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    truth, losses, first = {}, [], job.get("first", 0)

    def step(number):
        rows = torch.tensor(tokens(number))[rank :: job["world"]]
        loss = F.cross_entropy(forward(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / job["world"]

    if "load" in job:
        step(99)  # makes the optimizer's state; what it has changed is overwritten
        counted = load(model, optimizer, job)
        assert counted in (None, first), counted
    else:
        for number in range(first):
            step(number)
    for name, parameter in model.named_parameters():
        truth[f"parameter/{name}"] = whole(parameter)
        truth |= {f"{kind}/{name}": whole(one) for kind, one in optimizer.state[parameter].items()}
    if "save" in job:
        held = tables(model, optimizer, job["layout"])
        held |= (
            {"train_state": {"step": first, "ntokens_seen": first * 32}} if job["layout"] == "flat" else {}
        )
        dcp.save(held, checkpoint_id=job["save"])
    losses = [step(first + number) for number in range(job["steps"])]
    truth |= {f"after/{name}": whole(parameter) for name, parameter in model.named_parameters()}
    truth["losses"] = np.array(losses)
    if rank == 0:
        np.savez(job["truth"], **truth)


def two_dimensional(job):
    mesh = init_device_mesh("cpu", (2, 2))
    cuts = {
        "a.weight": (Shard(0), Shard(1)),
        "b.weight": (Shard(2), Shard(1)),
        "c.weight": (Shard(0), Replicate()),
    }
    held = {
        name: distribute_tensor(torch.tensor(values(name)), mesh, cuts.get(name, (Replicate(), Shard(0))))
        for name in SHAPES
    }
    dcp.save({"model": held, "step": 3}, checkpoint_id=job["save"])


def run(rank, job, file):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=job["world"])
    two_dimensional(job) if job.get("mesh") else train(job, rank)
    dist.barrier()
    dist.destroy_process_group()


def main(jobs):
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        for number, job in enumerate(jobs):
            made = [
                fork.Process(target=run, args=(rank, job, f"{folder}/{number}"))
                for rank in range(job["world"])
            ]
            for process in made:
                process.start()
            for process in made:
                process.join()
            if any(process.exitcode for process in made):
                sys.exit(1)


if __name__ == "__main__":
    with open(sys.argv[1]) as text:
        main(json.load(text))
