"""The programs of the exhibits. Numbers don't matter: they are recorded, not computed."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from models.gpt import GPT, GPTConfig
from models.plans import plan_of
from shardrt import device, nn, optim
from shardrt import functional as F
from shardrt.activation_offload import offload_activations
from shardrt.comm import init_device_mesh
from shardrt.fsdp import (
    MixedPrecisionPolicy,
    full_parameters,
    fully_shard,
    no_sync,
    set_gradient_divide_factor,
)
from shardrt.nn.module import stages_of
from shardrt.parallel import ExpertParallel, Pipeline, parallelize_module

__all__ = [
    "Net",
    "Skipping",
    "Twice",
    "count_of",
    "load_between",
    "offloaded",
    "train",
    "train_experts",
    "train_stages",
    "train_on_unequal_counts",
    "train_tensor_parallel",
]

TOKENS = np.zeros((2, 8), np.int64)


class Block(nn.Module):
    """Two linear layers and a sum, or experts and a sum."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        if experts:
            self.moe = nn.MoE(nn.TopKRouter(8, 4, 2), nn.Experts(4, 8, 16))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        if hasattr(self, "moe"):
            x = x + self.moe(x)[0]
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """An embedding, four blocks that are alike, and a head."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(experts) for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for number in self.route():
            x = self.blocks[number](x)
        return self.head(x)

    def route(self) -> list[int]:
        """The blocks that this forward calls."""
        return [0, 1, 2, 3]


class Twice(Net):
    """Calls its second block twice."""

    def route(self) -> list[int]:
        return [0, 1, 1, 2, 3]


class Skipping(Net):
    """From the second forward on, rank 1 leaves the second block out."""

    forwards = 0

    def route(self) -> list[int]:
        self.forwards += 1
        skips = self.forwards > 1 and device.current().program.rank == 1
        return [0, 2, 3] if skips else [0, 1, 2, 3]


def offloaded() -> Net:
    """The net, with activations that go to the host."""
    net = Net()
    for block in net.blocks:
        offload_activations(block)
    return net


def loss_of(net: Any) -> Any:
    return F.cross_entropy(net(TOKENS), TOKENS)


def steps_of(
    net: Any, steps: int = 2, batches: int = 1, sync: bool = True, in_backward: bool = False
) -> None:
    """Optimizer steps of `batches` backwards each; without `sync`, the last one alone reduces."""
    optimizer = optim.AdamW(net.parameters(), lr=1e-3, in_backward=in_backward)
    for _ in range(steps):
        for number in range(batches):
            with nullcontext() if sync or number == batches - 1 else no_sync(net):
                loss_of(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(
    shape: tuple[int, ...] | None = None,
    make: Callable[[], Any] = Net,
    batches: int = 1,
    in_backward: bool = False,
    **settings: Any,
) -> None:
    """Train with fully_shard's `settings`; the four blocks and the rest are units."""
    mesh, net = init_device_mesh("auto", shape), make()
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh, **settings)
    steps_of(net, batches=batches, in_backward=in_backward)


def count_of(counts: list[int], rank: int) -> int:
    """By how many tokens a rank divides the sum of its losses."""
    return sum(counts)


def train_on_unequal_counts() -> None:
    """Rank 0 has one row of tokens, rank 1 two. The loss is the mean over the tokens of both."""
    mesh, net, counts = init_device_mesh("auto"), Net(), [8, 16]
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh)
    set_gradient_divide_factor(net, 1)
    optimizer = optim.AdamW(net.parameters(), lr=1e-3)
    tokens = TOKENS[: mesh.rank + 1]
    mean = F.cross_entropy(net(tokens), tokens)
    (mean * (tokens.size / count_of(counts, mesh.rank))).backward()
    optimizer.step()


def load_between() -> None:
    """Two steps in bfloat16, with other parameters written in between."""
    mesh, net = init_device_mesh("auto"), Net()
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh, strategy="SHARD_OPT", mp_policy=MixedPrecisionPolicy("bfloat16"))
    for _ in range(2):
        steps_of(net, steps=1)
        with full_parameters(net, writeback=True):
            for parameter in net.parameters():
                parameter.data[:] = 0


def train_experts() -> None:
    """Four ranks: two hold each expert, all share the rest."""
    data = init_device_mesh("auto", (4,), ("dp_shard",))
    fold, net = data.fold("ep", 2), Net(experts=True)
    parallelize_module(net, fold["ep"], {"blocks.*.moe.experts": ExpertParallel()})
    nn.balance_over(net, data)
    for block in net.blocks:
        fully_shard(block.moe.experts, mesh=fold["efsdp"])
        fully_shard(block, mesh=data)
    steps_of(fully_shard(net, mesh=data))


def train_tensor_parallel(sequence: bool = False) -> None:
    """Two ranks of data by two of tensor parallelism, whose norms may be cut along the sequence."""
    mesh = init_device_mesh("auto", (2, 2), ("dp_shard", "tp"))
    net = GPT(GPTConfig(2, 2, 16, 16, 16))
    parallelize_module(net, mesh["tp"], plan_of(net, sequence_parallel=sequence))
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh["dp_shard"])
    steps_of(net)


def train_stages(micro_batches: int = 4) -> None:
    """One step of a pipeline of two stages."""
    mesh, net = init_device_mesh("auto", (2, 1), ("pp", "dp_shard")), GPT(GPTConfig(2, 2, 16, 16, 16))
    pipeline = Pipeline(net, mesh["pp"], schedule="1F1B", micro_batches=micro_batches)
    for stage in stages_of(net):
        for module in (*stage.blocks, stage):
            fully_shard(module, mesh=mesh["dp_shard"])
    optimizer = optim.AdamW(net.parameters(), lr=1e-3)
    pipeline.step(F.cross_entropy, [TOKENS] * micro_batches, inputs=lambda batch: (batch,))
    optimizer.step()
