"""Blocks of experts with attention left out, and one function that trains them on efsdp x ep ranks.

mpirun -n 2 python -m tests.parallel.routed says what memory of activations is planned and taken.
"""

import shardrt  # isort: skip  before NumPy: it sets the threads of BLAS

import json
from functools import partial

import numpy as np

from shardrt import Tensor, device, nn, optim
from shardrt import functional as F
from shardrt.comm import init_device_mesh, objects
from shardrt.fsdp import fully_shard, memory_plan
from shardrt.parallel import ExpertParallel, TokenParallel, expert_plan, most_rows, parallelize_module
from tests import lab

WIDTH, COUNT, K, TOKENS = 6, 4, 2, 10
PLAN = {"blocks.*.moe.experts": ExpertParallel()}


class Block(nn.Module):
    """A residual step of experts, with what is the same for every token beside them."""

    def __init__(self, **router):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.moe = nn.MoE(nn.TopKRouter(WIDTH, COUNT, K, **router), nn.Experts(COUNT, WIDTH, 5))

    def forward(self, x):
        y, balance = self.moe(self.norm(x))
        return x + y, balance


class Model(nn.Module):
    """Two blocks; the loss is a mean over this rank's tokens, as cross-entropy is."""

    def __init__(self, **router):
        super().__init__()
        self.blocks = nn.ModuleList(Block(**router) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        balance = 0.0
        for block in self.blocks:
            x, loss = block(x)
            balance = loss + balance
        y = self.head(x)
        return F.cast((y * y).mean(), "float32") + 0.1 * balance


def make(**router):
    shardrt.manual_seed(4)
    return Model(**router)


def tokens_of(ranks, rank=None, number=0):
    """Those of one rank, or of all in order of rank."""
    x = np.random.default_rng(number).normal(size=(ranks, TOKENS, WIDTH)).astype(np.float32)
    return x.reshape(-1, WIDTH) if rank is None else x[rank]


def spread(shards, ep, plan=PLAN, before=None, over=True, model=None, name="cpu", **settings):
    """(model, data mesh): experts along ep and then efsdp, the rest over all. before: of each block."""
    data = init_device_mesh(name, (shards * ep,), ("dp_shard",))
    fold, model = data.fold("ep", ep), make() if model is None else model
    parallelize_module(model, fold["ep"], plan)
    if over:
        nn.balance_over(model, data)
    for block in model.blocks:
        if before is not None:
            before(block)
        fully_shard(block.moe.experts, mesh=fold["efsdp"], **settings)
        fully_shard(block, mesh=data, **settings)
    return fully_shard(model, mesh=data, **settings), data


def trained(shards, ep, steps=3, **how):
    """(losses, norms, gradients of the first step, state) of this rank."""
    return learn(*spread(shards, ep, **how), steps)


def learn(model, data, steps):
    """As `trained`, of a model that is spread."""

    def step(number):
        loss = model(Tensor(tokens_of(data.size, data.rank, number)))
        loss.backward()
        return loss.item()

    adamw = partial(optim.AdamW, lr=1e-2)
    found = lab.learn(model, step, steps=steps, optimizer=adamw, clip=0.5)
    return found["losses"], found["norms"], found["gradients"], found["final"]


def planned_and_taken(skewed, capacity, along):
    """(bytes of activations in the plan, in a step; the most rows) of this rank.

    along: "ep", where ranks have tokens of their own, or "tp", where they have the same.
    """
    shardrt.manual_seed(1)
    router = nn.TopKRouter(64, COUNT, K, capacity_factor=capacity)
    layer, mesh = (
        nn.MoE(router, nn.Experts(COUNT, 64, 128)),
        init_device_mesh("cpu", (1, 2), ("efsdp", along)),
    )
    data = mesh.flat() if along == "ep" else mesh["efsdp"]
    if along == "tp":
        layer = nn.Sequential(layer)
        parallelize_module(layer, mesh["tp"], {"0": TokenParallel()})
    parallelize_module(layer, mesh[along], expert_plan(layer))
    nn.balance_over(layer, data)
    if skewed:
        router.weight.data[:2] += 3
    experts = next(module for module in layer.modules() if isinstance(module, nn.Experts))
    fully_shard(experts, mesh=mesh["efsdp"])
    fully_shard(layer, mesh=data)
    x = np.random.default_rng(mesh.rank * (along == "ep")).normal(size=(1024 * (1 + (along == "tp")), 64))
    x = Tensor(np.abs(x).astype(np.float32))

    def step():
        y, balance = layer(x)
        ((y * y).sum() + balance).backward()

    planned = memory_plan(layer, step=step).device["activations"]
    assert [*most_rows(layer).values()] == [0.0], "a dry run has counted"
    step()
    layer.zero_grad()
    here = device.current()
    here.reset_peak()
    before = here.peak_bytes()
    step()
    taken = here.peak_bytes() - before
    (most,) = most_rows(layer).values()
    return mesh, (mesh.rank, skewed, capacity, along, planned, taken, most)


def main():
    """One line for each rank and case, from rank 0: lines of several would be mixed up."""
    cases = [(skewed, capacity, "ep") for skewed in (False, True) for capacity in (None, 1.25)]
    for case in (*cases, (False, None, "tp"), (True, 1.25, "tp")):
        mesh, message = planned_and_taken(*case)
        everyone = objects.all_gather_object(mesh.communicator("control"), message)
        if mesh.rank == 0:
            print("\n".join(map(json.dumps, everyone)))


if __name__ == "__main__":
    main()
