"""Trains a small Llama with FSDP2 and tensor parallelism, and saves and loads distributed checkpoints.

    python -m tests.exchange.dcp_run JOBS.json

JOBS.json is a list of jobs, each done by 4 processes of this machine on a mesh of 2 by 2:

    {"train": {"layout": "flat" or "nested", "load": folder or "save": folder, "truth": an .npz}}
    {"mesh": folder}         saves tensors that are cut along two dimensions
    {"shardrt": [words]}     a command of shardrt, by one process
    {"read": {"load": folder, "truth": an .npz}}    all that is in nested tables, by one process

"truth" gets the weights, the optimizer's state and the settings of its groups, as they are saved or loaded.
The fixture of tests/exchange/fixtures/dcp was made by {"mesh": folder}.
"""

import json
import multiprocessing
import sys
import tempfile
import warnings

import numpy as np
import torch
import torch._dynamo  # noqa: F401  each process would import it on its own
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from shardrt.__main__ import main as shardrt_main

WORLD = 4
SHAPES = {"a.weight": (7, 5), "b.weight": (4, 6, 3), "c.weight": (1,), "d.weight": (9,)}


def values(name):
    """Of a tensor of the two-dimensional mesh."""
    shape = SHAPES[name]
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * ord(name[0])


def linear(rows, columns):
    return torch.nn.Linear(columns, rows, bias=False)


class Attention(torch.nn.Module):
    """Of one query for each position: enough for gradients of all weights."""

    def __init__(self):
        super().__init__()
        self.qkv_linear = torch.nn.ModuleDict(
            {"wq": linear(32, 32), "wk": linear(16, 32), "wv": linear(16, 32)}
        )
        self.wo = linear(32, 32)

    def forward(self, x):
        q, k, v = (self.qkv_linear[name](x) for name in ("wq", "wk", "wv"))
        return self.wo(q * torch.cat((k, v), -1))


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
    """Names and shapes of torchtitan's Llama."""

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


def trainer(lr, decay):
    """A model on the mesh, some matrices of its blocks cut twice, and its optimizer with two groups."""
    torch.manual_seed(5)
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), Titan()
    cuts = {"w1": ColwiseParallel, "w2": RowwiseParallel, "w3": ColwiseParallel}
    for block in model.layers.values():
        plan = {f"feed_forward.{name}": cut() for name, cut in cuts.items()}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    named = list(model.named_parameters())
    groups = [
        {"params": [one for name, one in named if "norm" not in name], "weight_decay": decay},
        {"params": [one for name, one in named if "norm" in name], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-7, foreach=False)


def step(model, optimizer, number):
    rows = (torch.arange(34).reshape(2, 17) * (7 + number) + dist.get_rank() // 2) % 64
    F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def tables(model, optimizer, layout):
    """What is saved or loaded."""
    flat = StateDictOptions(flatten_optimizer_state_dict=layout == "flat")
    state = get_optimizer_state_dict(model, optimizer, options=flat)
    if layout == "flat":
        counts = {"train_state": {"step": 2, "ntokens_seen": 64}, "lr_scheduler": {"last_epoch": 2}}
        return {**model.state_dict(), "optimizer": state, **counts}
    return {"model": model.state_dict(), "optim": state}


def load(model, optimizer, layout, folder):
    held = tables(model, optimizer, layout)
    dcp.load(held, checkpoint_id=folder)
    flat = layout == "flat"
    weights = {name: held[name] for name in model.state_dict()} if flat else held["model"]
    model.load_state_dict(weights)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(model, optimizer, held["optimizer" if flat else "optim"], options=options)


def whole(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().numpy().copy()


def train(job):
    if "load" in job:
        model, optimizer = trainer(0.5, 0.5)
        step(model, optimizer, 9)  # makes the optimizer's state, which is loaded into
        load(model, optimizer, job["layout"], job["load"])
    else:
        model, optimizer = trainer(1e-3, 0.1)
        for number in range(2):
            step(model, optimizer, number)
        dcp.save(tables(model, optimizer, job["layout"]), checkpoint_id=job["save"])
    settings = ("lr", "eps", "weight_decay")
    truth = {"groups": np.array([[group[key] for key in settings] for group in optimizer.param_groups])}
    for name, parameter in model.named_parameters():
        truth[f"parameter/{name}"] = whole(parameter)
        truth |= {f"{kind}/{name}": whole(one) for kind, one in optimizer.state[parameter].items()}
    if dist.get_rank() == 0:
        np.savez(job["truth"], **truth)


def two_dimensional(folder):
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
    dcp.save({"model": held, "step": 3}, checkpoint_id=folder)


def run(rank, job, file):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
    two_dimensional(job["mesh"]) if "mesh" in job else train(job["train"])
    dist.barrier()
    dist.destroy_process_group()


def read(job):
    """Load all by PyTorch's own loader, which makes the tensors from the metadata alone."""
    held = state_dict_loader._load_state_dict_from_keys(checkpoint_id=job["load"])
    truth = {"step": np.array(held["step"])}
    truth |= {f"parameter/{name}": whole(value) for name, value in held["model"].items()}
    for name, table in held["optim"]["state"].items():
        truth |= {f"{kind}/{name}": whole(value) for kind, value in table.items()}
    for group in held["optim"]["param_groups"]:
        truth |= {f"decay/{name}": np.array(group["weight_decay"]) for name in group["params"]}
    np.savez(job["truth"], **truth)


def shardrt(words):
    sys.exit(shardrt_main(words))


def main(jobs):
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        for number, job in enumerate(jobs):
            if "shardrt" in job:
                made = [fork.Process(target=shardrt, args=(job["shardrt"],))]
            elif "read" in job:
                made = [fork.Process(target=read, args=(job["read"],))]
            else:
                file = f"{folder}/{number}"
                made = [fork.Process(target=run, args=(rank, job, file)) for rank in range(WORLD)]
            for process in made:
                process.start()
            for process in made:
                process.join()
            if any(process.exitcode for process in made):
                sys.exit(1)


if __name__ == "__main__":
    with open(sys.argv[1]) as text:
        main(json.load(text))
