"""A net whose blocks take a known time, to see what runs beside them."""

import time

import shardrt
from shardrt import nn
from tests.fsdp.nets import Block

COMPUTE = 0.02  # seconds that a block computes, forward and again backward


class Slow(shardrt.autograd.Function):
    """The identity, COMPUTE seconds long in either direction. Sleeping leaves the core to other ranks."""

    def forward(self, x):
        time.sleep(COMPUTE)
        return x

    def backward(self, dy):
        time.sleep(COMPUTE)
        return dy


class SlowBlock(Block):
    def forward(self, x):
        return Slow.apply(super().forward(x))


class SlowNet(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(SlowBlock() for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
