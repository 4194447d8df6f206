"""Exact counts: collectives, their order, slots in use, bytes held."""

import numpy as np
import pytest

import shardrt
from shardrt.comm.interceptors import Interceptor
from shardrt.fsdp import units
from shardrt.fsdp.layout import ALIGNMENT
from tests import lab


@pytest.mark.parametrize(
    ("make", "settings", "gathers", "reductions"),
    [
        (lab.Net, {}, 2 * 3 + 1, 4),  # the root is gathered once
        (lab.Net, {"reshard_after_forward": True}, 2 * 4, 4),
        (lab.Net, {"strategy": "SHARD_GRAD_OP"}, 4, 4),
        (lab.CalledTwice, {}, 2 * 3 + 1 + 1, 4),  # one more in forward, none more in backward
        (lab.NeverCalled, {}, 2 * 2 + 1, 3),  # what is not called costs nothing
    ],
)
def test_units_are_gathered_for_forward_and_backward_and_reduced_once(make, settings, gathers, reductions):
    assert lab.calls_of_a_step(make, **settings) == ([gathers, reductions], 4)


class Ordered(Interceptor):
    """Notes the number of elements of each gather, by which the units of this model can be told apart."""

    def __init__(self, communicator, log):
        super().__init__(communicator)
        self.log = log

    def intercept(self, call, run):
        if call.name == "all_gather" and call.array.dtype == np.float32:
            self.log.append(call.array.size)
        return run


class Distinct(lab.Net):
    """Blocks of different sizes."""

    def __init__(self):
        super().__init__(blocks=4)
        for index, block in enumerate(self.blocks):
            block.up = shardrt.nn.Linear(7, 50 * (index + 1))
            block.down = shardrt.nn.Linear(50 * (index + 1), 7)


@lab.on_ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathers_follow_the_order_of_use_in_forward_and_backward(prefetch):
    log = []
    model, _ = lab.build(Distinct, wrap=lambda inner: Ordered(inner, log), prefetch=prefetch)
    names = {unit.groups[0].layout.total: unit.label for unit in units(model)}
    assert len(names) == 5
    for _ in range(2):
        log.clear()
        lab.backward(model)
    blocks = [f"blocks.{index}" for index in range(4)]
    # The last blocks that forward prefetched or used are gathered again in backward: all four, in reverse.
    assert [names[size] for size in log] == ["(root)", *blocks, *reversed(blocks)]
    assert units(model)[0].schedule.plan.deviations == 0


@lab.on_ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_at_most_prefetch_plus_one_units_are_gathered_and_all_of_them_are(prefetch):
    model, _ = lab.build(lambda: lab.Net(blocks=5), prefetch=prefetch)
    seen = []

    def watch(block):
        forward = block.forward

        def watched(x):
            seen.append([unit.state.name for unit in units(model)[1:]])
            return forward(x)

        block.forward = watched

    for block in model.blocks:
        watch(block)
    for _ in range(2):
        seen.clear()
        lab.backward(model)
    arena = units(model)[1].groups[0].arenas["gathered"]
    assert arena.peak_in_use == len(arena.slots) == prefetch + 1
    for index, states in enumerate(seen):
        assert states[index] == "IN_USE"
        expected = set(range(index + 1, min(index + 1 + prefetch, 5)))
        assert {i for i, state in enumerate(states) if state == "GATHERING"} == expected


@lab.on_ranks(1, 2, 3, 8)
def test_bytes_of_sharded_state_are_the_formula(ranks):
    def up(count):
        return -(-count // ALIGNMENT) * ALIGNMENT

    model, _ = lab.build()
    optimizer = lab.adamw(model.parameters())
    elements = [sum(up(int(np.prod(p.shape))) for p in unit.parameters) for unit in units(model)]
    held = sum(
        g.shard.nbytes + sum(s.nbytes for s in g.sharded_gradient.arrays) for g in lab.groups_of(model)
    )
    held += sum(array.nbytes for piece in optimizer.slices for array in piece.state.values())
    assert held == sum(16 * up(-(-n // ranks)) for n in elements)  # parameter, gradient, two moments
