"""Runs in threads that show what a recording does not: each says whether what its wait is for is so."""

import threading
from collections import Counter

import numpy as np
import pytest

from shardrt import Tensor, nn
from shardrt.comm import CollectiveMismatch, init_device_mesh, thread
from shardrt.device import StreamError
from shardrt.fsdp import fully_shard, no_sync, setup, units
from tests.fsdp.test_trained import apart

LATE = 0.2  # seconds by which a stream is late; what does not wait takes a few ms


class Two(nn.Module):
    def __init__(self, both=True):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.both = both

    def forward(self, x):
        x = self.blocks[0](x)
        return self.blocks[1](x) if self.both else x


def sharded(mesh, both=True):
    model = Two(both)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def backward(model):
    model(Tensor(np.ones((2, 4), np.float32))).sum().backward()


def late(stream):
    """Have a stream stand still for a moment; gives what is set when it goes on."""
    gate = threading.Event()
    stream.submit(gate.wait, 60)
    threading.Timer(LATE, gate.set).start()
    return gate


def other_ranks_are_heard():
    """A rank that has not used a block asks for its gradient while the hosts' stream is late."""

    def one():
        mesh = init_device_mesh("cpu")
        model = sharded(mesh, both=mesh.rank == 0)
        late(mesh.stream("used"))
        backward(model)
        return model.blocks[1].weight.grad is not None

    return all(thread.run(2, one))


def nobody_uses_slots_that_go():
    """Slots are made anew, for a backward that does not reduce, while the reduce stream is late."""
    mesh = init_device_mesh("cpu")
    model = sharded(mesh)
    backward(model)
    gradients = units(model)[0].built().gradients
    make, seen = gradients._make_slots, []
    gate = late(mesh.stream("reduce"))

    def made(*args):
        seen.append(gate.is_set())
        make(*args)

    gradients._make_slots = made
    with no_sync(model):
        backward(model)
    return seen == [True]


def ranks_agree_before_memory_is_made():
    """One has frozen a parameter, the other has not: no rank comes to make its memory anew."""
    made, make = Counter(), setup.make_gradient_slots

    def counted(*args):
        made[threading.get_ident()] += 1
        make(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "make_gradient_slots", counted)
        with pytest.raises((CollectiveMismatch, StreamError)):
            thread.run(2, apart, "NO_SHARD", ())
    return sorted(made.values()) == [1, 1]


_GRADIENTS = "fsdp/gradients.py"
RUNS = {
    f"{_GRADIENTS} Gradients._ask: stream.record(answered)": other_ranks_are_heard,
    f"{_GRADIENTS} _answer: answered.synchronize()": other_ranks_are_heard,
    f"{_GRADIENTS} Gradients.have_slots: self._streams.reduce.synchronize()": nobody_uses_slots_that_go,
    "fsdp/options/trained.py FollowsRequiresGrad.agree: communicator.barrier(stream=streams.reduce, "
    "tag=self.groups[0].tag)": ranks_agree_before_memory_is_made,
}
