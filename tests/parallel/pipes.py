"""A pipeline without a table: each micro-batch goes through all stages and back before the next begins.

It shows what stages are, in whatever order they are run.
"""

import numpy as np

from shardrt import Tensor, device
from shardrt.fsdp import fully_shard


def sharded(stages, data, **how):
    """Each stage a unit, and each block in it."""
    for stage in stages:
        for module in (*stage.blocks, stage):
            fully_shard(module, mesh=data, **how)
    return stages


def run(stages, pipe, batches, rank_of=None, loss=lambda y: y):
    """Forward and backward of micro-batches: their losses where the last stage is, else [].

    rank_of: of each stage; in a loop if None. loss: of what the last stage gives.
    """
    own = {stage.number: stage for stage in stages}
    count = stages[0].count
    rank_of = rank_of or [number % pipe.size for number in range(count)]
    losses = []
    for number, batch in enumerate(batches):
        x, kept = None, {}
        for at in range(count):
            x = moved(pipe, rank_of[at - 1], rank_of[at], x) if at else None
            if at in own:
                entered = Tensor(x, requires_grad=True) if at else None
                y = own[at](entered, batch, number=number)
                kept[at] = entered, y if at < count - 1 else loss(y)
                x = y.data
        losses += [kept[count - 1][1].item()] if count - 1 in own else []
        dy = None
        for at in reversed(range(count)):
            if at in own:
                entered, y = kept.pop(at)
                if y.requires_grad:
                    y.backward(dy)
                dy = entered.grad if at else None
            dy = moved(pipe, rank_of[at], rank_of[at - 1], dy) if at else None
    return losses


def moved(pipe, source, target, array):
    """An array from one rank of the axis on another; None elsewhere."""
    if source == target:
        return array
    control, here = pipe.communicator("control"), device.current()
    if pipe.rank == source:
        control.send(np.array([*array.shape, *[0] * (4 - array.ndim)], np.int64), **to(target))
        control.send(np.ascontiguousarray(here.to_numpy(array)).reshape(-1), **to(target))
        here.wait_here()
    if pipe.rank != target:
        return None
    shape = np.zeros(4, np.int64)
    control.recv(shape, **to(source))
    here.wait_here()
    found = np.empty([size for size in shape.tolist() if size], np.float32)
    control.recv(found.reshape(-1), **to(source))
    here.wait_here()
    return here.asarray(found)


def to(peer):
    return {"peer": peer, "stream": device.current().current_stream}
