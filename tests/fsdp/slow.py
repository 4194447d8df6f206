"""Nets whose blocks take a known time, to see what runs beside them, and streams that do not wait."""

import time

import numpy as np

import shardrt
from shardrt import nn
from shardrt.fsdp import fully_shard
from tests.lab import Block

COMPUTE = 0.02  # seconds that a block computes, forward and again backward
X = np.ones((4, 7), np.float32)


class Slow(shardrt.autograd.Function):
    """The identity, COMPUTE seconds long in either direction. Sleeping leaves the core to other ranks.

    log: (phase, name) -> [(start, stop)].
    """

    def forward(self, x, name="", log=None):
        self.saved = (name, log)
        self._work("forward", name, log)
        return x

    def backward(self, dy):
        self._work("backward", *self.saved)
        return (dy, None, None)[: 1 if self.saved[1] is None else 3]

    def _work(self, phase, name, log):
        start = time.perf_counter()
        time.sleep(COMPUTE)
        if log is not None:
            log.setdefault((phase, name), []).append((start, time.perf_counter()))


class SlowBlock(Block):
    log = None

    def forward(self, x):
        y = super().forward(x)
        return Slow.apply(y) if self.log is None else Slow.apply(y, self.name, self.log)


class SlowNet(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(SlowBlock() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def sharded(blocks, mesh, **settings):
    """A SlowNet whose blocks are units."""
    model = SlowNet(blocks)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def step(model):
    """Seconds of a forward and a backward."""
    start = time.perf_counter()
    model(shardrt.Tensor(X)).sum().backward()
    return time.perf_counter() - start


class Hasty:
    """A stream that waits for nothing."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def wait(self, event):
        pass
