"""The net of the exhibits, and its training loop."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

import shardrt
from models.gpt import GPT, GPTConfig
from shardrt import functional as F
from shardrt import nn, optim
from shardrt.comm import init_device_mesh
from shardrt.fsdp import fully_shard, no_sync
from shardrt.parallel import Pipeline

__all__ = ["Block", "Net", "loss_of", "train"]

TOKENS = np.zeros((2, 8), np.int64)


class Block(nn.Module):
    """Two linear layers and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """An embedding, four blocks that are alike, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: Any) -> Any:
    """The loss of a batch; numbers don't matter here."""
    return F.cross_entropy(model(TOKENS), TOKENS)


def train(
    shape: tuple[int, ...] | None = None,
    steps: int = 2,
    batches: int = 1,
    sync: bool = True,
    model: Callable[[], Any] = Net,
    loss: Callable[[Any], Any] = loss_of,
    in_backward: bool = False,
    **settings: Any,
) -> None:
    """Steps of `batches` backwards each, of which the last alone reduces if not `sync`."""
    mesh = init_device_mesh("auto", shape)
    shardrt.manual_seed(0)
    net = model()
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh, **settings)
    optimizer = optim.AdamW(net.parameters(), lr=1e-3, in_backward=in_backward)
    for _ in range(steps):
        for number in range(batches):
            with nullcontext() if sync or number == batches - 1 else no_sync(net):
                loss(net).backward()
        optimizer.step()
        optimizer.zero_grad()


def piped(schedule: str = "1F1B", micro_batches: int = 4, steps: int = 2) -> None:
    """Steps of a pipeline over all ranks."""
    model = GPT(GPTConfig(4, 2, 16, 16, 16))
    pipeline = Pipeline(model, init_device_mesh("auto"), schedule=schedule, micro_batches=micro_batches)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        pipeline.step(F.cross_entropy, [TOKENS] * micro_batches, inputs=lambda batch: (batch,))
        optimizer.step()
        optimizer.zero_grad()
