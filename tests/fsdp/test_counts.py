"""Exact counts: collectives, their order, slots in use, bytes held."""

import numpy as np
import pytest

import shardrt
from shardrt import optim
from shardrt.comm import CountedCommunicator, init_device_mesh, thread
from shardrt.comm.interceptors import Interceptor
from shardrt.fsdp import units
from shardrt.fsdp.layout import ALIGNMENT
from tests.fsdp.nets import CalledTwice, Net, NeverCalled, batches, loss_of, shard


def counts_of_one_step(make, **settings):
    """(gathers, reductions, units) of the second step, read from the communicators."""
    made = []

    def counted(communicator):
        made.append(CountedCommunicator(communicator))
        return made[-1]

    shardrt.manual_seed(3)
    model = make()
    mesh = init_device_mesh("auto", wrap=counted)
    shard(model, mesh, **settings)
    optimizer = optim.AdamW(model.parameters())
    before = None
    for tokens, targets in batches(2, size=4):
        before = [calls(made, "all_gather"), calls(made, "reduce_scatter")]
        loss_of(model, tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = [calls(made, "all_gather"), calls(made, "reduce_scatter")]
    return after[0] - before[0], after[1] - before[1], len(units(model))


def calls(communicators, op):
    return sum(communicator.calls[op] for communicator in communicators)


def on_two_ranks(make, **settings):
    results = thread.run(2, counts_of_one_step, make, **settings)
    assert results[0] == results[1]
    return results[0]


def test_each_unit_is_gathered_twice_and_reduced_once_and_the_root_gathered_once():
    gathers, reductions, count = on_two_ranks(Net)
    assert count == 4
    assert gathers == 2 * (count - 1) + 1
    assert reductions == count


def test_the_root_is_gathered_twice_if_told():
    gathers, _, count = on_two_ranks(Net, reshard_after_forward=True)
    assert gathers == 2 * count


def test_nothing_is_gathered_again_where_parameters_are_kept():
    gathers, reductions, count = on_two_ranks(Net, strategy="SHARD_GRAD_OP")
    assert gathers == count and reductions == count


def test_a_unit_called_twice_is_gathered_once_in_backward_and_reduced_once():
    gathers, reductions, count = on_two_ranks(CalledTwice)
    assert gathers == 2 * (count - 1) + 1 + 1  # one more in forward, none more in backward
    assert reductions == count


def test_a_unit_that_is_not_called_costs_nothing():
    gathers, reductions, count = on_two_ranks(NeverCalled)
    assert gathers == 2 * (count - 2) + 1
    assert reductions == count - 1


class Ordered(Interceptor):
    """Notes the number of elements of each gather, by which the units of this model can be told apart."""

    def __init__(self, communicator, log):
        super().__init__(communicator)
        self.log = log

    def intercept(self, call, run):
        if call.name == "all_gather" and call.array.dtype == np.float32:
            self.log.append(call.array.size)
        return run


class Distinct(Net):
    """Blocks of different sizes."""

    def __init__(self):
        super().__init__(blocks=4)
        for index, block in enumerate(self.blocks):
            block.up = shardrt.nn.Linear(7, 50 * (index + 1))
            block.down = shardrt.nn.Linear(50 * (index + 1), 7)


def gather_order(prefetch):
    log = []
    shardrt.manual_seed(3)
    model = Distinct()
    mesh = init_device_mesh("auto", wrap=lambda communicator: Ordered(communicator, log))
    shard(model, mesh, prefetch=prefetch)
    names = {unit.groups[0].layout.total: unit.label for unit in units(model)}
    assert len(names) == 5
    log.clear()
    for tokens, targets in batches(2, size=4):
        log.clear()
        loss_of(model, tokens, targets).backward()
    order = [names[size] for size in log]
    return order, units(model)[0].schedule.plan.deviations


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_gathers_follow_the_order_of_use_in_forward_and_backward(prefetch):
    blocks = [f"blocks.{index}" for index in range(4)]
    order, drifts = thread.run(2, gather_order, prefetch)[0]
    assert drifts == 0
    # The last blocks that forward prefetched or used are gathered anew in backward: all four, in reverse.
    assert order == ["(root)", *blocks, *reversed(blocks)]


def issued_at_entry(prefetch):
    """For each block of the second forward: the set of units gathered or on the way when it computes."""
    shardrt.manual_seed(3)
    model = Net(blocks=5)
    shard(model, init_device_mesh("auto"), prefetch=prefetch)
    ahead = []

    def watch(block):
        forward = block.forward

        def watched(x):
            states = [unit.state.name for unit in units(model)[1:]]
            ahead.append(states)
            return forward(x)

        block.forward = watched

    for block in model.blocks:
        watch(block)
    for tokens, targets in batches(2, size=4):
        ahead.clear()
        loss_of(model, tokens, targets).backward()
    schedule = units(model)[0].schedule
    arena = units(model)[1].groups[0].arenas["gathered"]
    return ahead, arena.peak_in_use, len(arena.slots), schedule.plan.deviations


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_at_most_prefetch_plus_one_units_are_gathered_and_all_of_them_are(prefetch):
    ahead, peak, slots, _ = thread.run(2, issued_at_entry, prefetch)[0]
    assert peak == slots == prefetch + 1
    for index, states in enumerate(ahead):
        assert states[index] == "IN_USE"
        expected = set(range(index + 1, min(index + 1 + prefetch, 5)))
        assert {i for i, state in enumerate(states) if state == "GATHERING"} == expected


def state_bytes():
    shardrt.manual_seed(3)
    model = Net()
    mesh = init_device_mesh("auto")
    shard(model, mesh)
    optimizer = optim.AdamW(model.parameters())
    expected = 0
    for unit in units(model):
        up = lambda n: -(-n // ALIGNMENT) * ALIGNMENT  # noqa: E731
        elements = sum(up(int(np.prod(p.shape))) for p in unit.parameters)
        expected += 16 * up(-(-elements // mesh.size))  # parameter, gradient, two moments
    held = sum(
        g.shard.nbytes + sum(s.nbytes for s in g.sum.buffers) for unit in units(model) for g in unit.groups
    )
    held += sum(array.nbytes for piece in optimizer.slices for array in piece.state.values())
    return held, expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_bytes_of_sharded_state_are_the_formula(ranks):
    for held, expected in thread.run(ranks, state_bytes):
        assert held == expected
