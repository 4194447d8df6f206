"""autograd.py: when saved arrays and graphs are freed, and whose tape it is."""

import gc
import threading
import weakref

import pytest

from shardrt import Tensor, is_grad_enabled, no_grad
from shardrt import functional as F
from tests.gradcheck import leaf, normal


def test_a_second_backward_is_an_error_that_names_the_op():
    y = F.exp(leaf([1.0]))
    y.backward()
    with pytest.raises(RuntimeError, match="saved arrays of Exp were freed.*retain_graph=True"):
        y.backward()


def test_backward_frees_saved_arrays_as_it_goes():
    x = leaf(normal(3))
    y = F.exp(x)
    array = weakref.ref(y.data)
    z = y * 2
    del y
    assert array() is not None
    z.sum().backward()
    assert array() is None


@pytest.fixture
def without_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("run_backward", [False, True])
def test_a_graph_is_freed_without_the_garbage_collector(without_gc, run_backward):
    weight, bias = leaf(normal(4, 4)), leaf(normal(4))
    x = Tensor(normal(3, 4))
    y = F.layer_norm(F.gelu(F.linear(x, weight, bias)), bias.shape, bias * 2, bias)
    first, *_ = F.split(F.softmax(y @ weight) + x, 2, axis=1)
    loss = F.cross_entropy(first, [0, 1, 0]) + F.concatenate([y, first], axis=1)[1:].mean()
    alive = [weakref.ref(t) for t in (y, first, loss)] + [weakref.ref(t.node) for t in (y, first, loss)]
    alive += [weakref.ref(t.data) for t in (y, loss)]
    if run_backward:
        loss.backward()
    del y, first, loss, _
    assert [a() for a in alive] == [None] * len(alive)


@pytest.mark.parametrize("run_backward", [False, True])
def test_a_chain_of_twenty_thousand_ops_runs_and_is_freed(without_gc, run_backward):
    x = leaf([1.0])
    y = x
    for _ in range(20_000):
        y = F.neg(y)
    node = weakref.ref(y.node)
    if run_backward:
        y.backward()
        assert x.grad.tolist() == [1]
    del y
    assert node() is None


def test_each_thread_has_its_own_tape():
    results = {}

    def other():
        results["enabled"] = is_grad_enabled()
        x = leaf([1.0])
        y = F.neg(x)
        y.backward()
        results["gradient"] = x.grad.tolist()

    for _ in range(3):
        F.neg(leaf([1.0]))
    with no_grad():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert results == {"enabled": True, "gradient": [-1]}


def test_backwards_in_several_threads_do_not_disturb_one_another():
    start = threading.Barrier(4)
    gradients = [None] * 4

    def work(rank):
        start.wait()
        x = leaf([1.0])
        for _ in range(20):
            y = x
            for _ in range(50):
                y = y * 1.01 + x
            y.backward()
        gradients[rank] = x.grad[0]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(gradients)) == 1 and gradients[0] > 0
