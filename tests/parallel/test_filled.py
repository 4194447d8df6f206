"""Sums of gradients along tp that are under way while products for weights run: the same bits, in that order.

That is so where a collective does not keep the thread that calls it, as on a GPU (also
tests/softgpu/test_training.py). Here the communicators say so, and are slow.
"""

import sys
import threading
import time

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, device, nn
from shardrt import functional as F
from shardrt.autograd import Function
from shardrt.comm import CollectiveDelay, create
from shardrt.deferred_gradients import DeferredGradients
from shardrt.device import StreamError
from shardrt.fsdp import fully_shard, memory_plan
from shardrt.functional import collective, vocabulary
from shardrt.nn.lora import add_lora
from shardrt.parallel import ColwiseParallel, parallelize_module
from shardrt.recompute import checkpoint
from tests import lab
from tests.parallel.nets import batch_of, build, data_of, make, mesh_of, plan_of
from tests.ranks import run_ranks

linear = sys.modules[F.linear.__module__]  # of which the function has the name
here = threading.local()  # told: what this rank has begun, in order


class Apart(CollectiveDelay):
    """Sums are slow, and do not keep whoever asks for them."""

    def __init__(self, communicator, delay=0.003, wait=time.sleep):
        super().__init__(communicator, delay, wait)
        communicator.keeps_host = False

    def intercept(self, call, run):
        here.message.append((call.name, call.stream.name))
        return super().intercept(call, run) if call.stream.name == "tensor" else run


def gradients(
    apart, kind, sequence=False, shards=1, sharded=True, backwards=1, late=False, lora=False, **how
):
    """Of this rank, after some backwards, and what it has begun during them."""
    here.message = []
    mesh = mesh_of(shards=shards, tp=2, wrap=Apart if apart else None)
    if lora:
        model = add_lora(make(kind), 2)
        parallelize_module(model, mesh["tp"], plan_of(model, sequence_parallel=sequence))
        for parameter in model.parameters():
            if parameter.name.endswith("lora_b"):
                parameter.storage.array()[...] = 0.1
    else:
        model = build(kind, mesh, sequence, sharded=sharded, **how)
    shardrt.manual_seed(3, step=1)
    for number in range(backwards):
        loss, put_off = model(*batch_of(number, mesh)), DeferredGradients() if late else None
        here.message.append("backward")
        loss.backward(deferred=put_off)
        if late:
            here.message.append("late")
            put_off.flush()
    return {
        name: np.array(p.grad) for name, p in model.named_parameters() if p.grad is not None
    }, here.message


@pytest.fixture
def message(monkeypatch):
    """Products for weights tell when they begin."""

    def telling(before):
        return lambda *args: here.message.append("product") or before(*args)

    for module, name in ((linear, "_add_gradients"), (vocabulary, "_add_weight_gradient")):
        monkeypatch.setattr(module, name, telling(getattr(module, name)))


CASES = {
    "gpt, the head in parts": {"kind": "gpt", "changes": {"loss_chunk": 5}, "sums": 4},
    "gpt, sequence": {"kind": "gpt", "sequence": True},
    "gpt, not sharded": {"kind": "gpt", "sharded": False},
    "llama, three backwards": {"kind": "llama", "backwards": 3, "sums": 3 * 5},
    "llama, sequence, sharded": {"kind": "llama", "sequence": True, "shards": 2},
    "recomputed": {"kind": "gpt", "sequence": True, "before": checkpoint},
    "recomputed but products": {"kind": "gpt", "before": lambda block: checkpoint(block, "matmul")},
    "adapters": {"kind": "gpt", "lora": True, "sums": 3},  # before the first there is nothing to train
    "in two halves": {"kind": "gpt", "late": True, "sums": 0},  # products wait for the other half
}


@pytest.mark.parametrize("case", CASES)
def test_products_run_meanwhile_and_gradients_have_the_same_bits(message, case):
    how = dict(CASES[case])
    expected_sums = how.pop("sums", 5)  # of two blocks two each, and of the head
    ranks = 2 * how.get("shards", 1)
    expected, found = (run_ranks(ranks, gradients, apart, **how) for apart in (False, True))
    for (ours, began), (theirs, _) in zip(found, expected, strict=True):
        lab.assert_equal(ours, theirs)
        sums = [place for place, each in enumerate(began) if each[1] == "tensor"]
        assert {began[place + 1] for place in sums} <= {"product"}
        assert len(sums) == expected_sums


# -- one sum


def ops(comm, hook=None):
    """The backward of a linear layer behind copy_to, whose sum has a stream; the gradients."""
    here.message = []
    stream, weight = device.current().new_stream("tensor"), nn.Parameter((6, 6), nn.init.Normal(0.0, 0.5))
    x = Tensor(np.ones((4, 6), np.float32), requires_grad=True)
    whole = collective.copy_to(x, comm, stream)
    if hook is not None:
        whole.register_hook(lambda gradient: hook(weight))
    F.linear(whole, weight).sum().backward()
    return x.grad, weight.grad


def test_who_looks_in_between_sees_the_products_gradient(message):
    def rank():
        seen = []
        ops(Apart(create()).communicator, lambda weight: seen.append(weight.grad is not None))
        return seen, here.message

    for seen, began in run_ranks(2, rank):
        assert seen == [True] and began == ["product", ("all_reduce", "compute")]


@lab.on_ranks(2)
def test_a_sum_that_fails_is_told_where_it_is_waited_for():
    def fail(delay):
        raise ZeroDivisionError("the sum")

    with pytest.raises(StreamError, match="the sum"):
        ops(Apart(create(), wait=fail).communicator)


def test_when_a_product_raises_nothing_is_under_way_any_more(monkeypatch):
    """Memory of the sum goes to others then."""

    def fail(*args):
        raise ZeroDivisionError("the product")

    monkeypatch.setattr(linear, "_add_gradients", fail)

    def rank():
        slept = []
        with pytest.raises(ZeroDivisionError):
            apart = Apart(create(), delay=0.05, wait=lambda delay: slept.append(time.sleep(delay)))
            ops(apart.communicator)
        return slept

    assert run_ranks(2, rank) == [[None], [None]]


class Nothing(Function):
    """Has no gradient for what it reads."""

    __slots__ = ()

    def forward(self, x, y):
        return y.copy()

    def backward(self, dy):
        return None, dy


def test_what_is_left_to_a_node_that_is_passed_over_runs_too(message):
    def rank():
        here.message = []
        comm, weight = Apart(create()).communicator, nn.Parameter((6, 6), nn.init.Normal(0.0, 0.5))
        x = Tensor(np.ones((4, 6), np.float32), requires_grad=True)
        unread = collective.copy_to(x, comm, device.current().new_stream("tensor"))
        y = F.linear(Tensor(np.ones((4, 6), np.float32)), weight)
        Nothing.apply(unread, y).sum().backward()
        return weight.grad is not None, here.message

    assert run_ranks(2, rank) == [(True, ["product"])] * 2


def test_the_plan_counts_that_the_sum_and_what_the_product_reads_are_there_at_once():
    def rank(apart):
        here.message = []
        mesh = mesh_of(tp=2, wrap=Apart if apart else None)
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        parallelize_module(model, mesh["tp"], {"1": ColwiseParallel()})
        fully_shard(model, mesh=data_of(mesh))
        x = Tensor(np.zeros((128, 256), np.float32))
        return memory_plan(model, step=lambda: F.exp(model(x)).sum().backward()).device["activations"]

    usual, apart = (run_ranks(2, rank, way)[0] for way in (False, True))
    x, dy, dx, total = (128 * width * 4 for width in (256, 128, 256, 256))
    assert (usual, apart) == (x + dy + dx, x + dy + dx + total)
