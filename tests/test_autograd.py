"""autograd.py: the order of the tape, what is recorded, where gradients go, and when graphs are freed."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardrt import Tensor, autograd, enable_grad, is_grad_enabled, no_grad
from shardrt import functional as F
from shardrt.autograd import Function
from tests import lab
from tests.gradcheck import leaf, normal


class Noted(Function):
    """The identity; notes in `log` when its backward runs."""

    __slots__ = ()

    def forward(self, x, name, log):
        self.saved = (name, log)
        return x.copy()

    def backward(self, dy):
        name, log = self.saved
        log.append(name)
        return dy, None, None


# -- order


def test_backward_runs_newest_first_whatever_the_shape_of_the_graph():
    log = []
    x = leaf([1.0])
    a = Noted.apply(x, "a", log)
    b = Noted.apply(a, "b", log)
    c = Noted.apply(x, "c", log)
    d = Noted.apply(a, "d", log)
    (c + (d + b)).backward()
    assert log == ["d", "c", "b", "a"]
    assert x.grad.tolist() == [3]


def test_a_node_runs_once_after_all_that_used_its_output():
    log = []
    x = leaf([2.0])
    y = Noted.apply(x, "y", log)
    z = y
    for _ in range(10):
        z = z + z * y
    z.backward()
    assert log == ["y"]
    expected = 3.0**10 + 2 * 10 * 3.0**9  # z = y (1 + y)^10
    assert x.grad[0] == pytest.approx(expected, rel=1e-12)


# -- what is recorded


def test_nothing_is_recorded_without_an_input_that_requires_a_gradient():
    y = Tensor([1.0]) * 2 + 1
    assert y.node is None and not y.requires_grad
    with pytest.raises(RuntimeError, match="nothing that requires a gradient"):
        y.backward()


def test_no_grad_and_enable_grad_nest():
    x = leaf([1.0])
    with no_grad():
        assert not is_grad_enabled() and (x * 2).node is None
        with enable_grad():
            assert (x * 2).node is not None
        assert not is_grad_enabled()
    assert is_grad_enabled()
    with pytest.raises(KeyError), no_grad():
        raise KeyError
    assert is_grad_enabled()


def test_no_grad_decorates():
    @no_grad()
    def double(x):
        return x * 2

    x = leaf([1.0])
    assert double(x).node is None and double(x).node is None
    assert is_grad_enabled()


def test_an_op_that_is_not_recorded_saves_nothing():
    seen = []

    class Look(Noted):
        __slots__ = ()

        def wrap(self, result, recorded):
            y = super().wrap(result, recorded)
            seen.append(self.saved)
            return y

    Look.apply(Tensor([1.0]), "x", [])
    assert seen == [()]


# -- where gradients go


def test_a_gradient_of_a_leaf_is_its_own_array():
    """Add hands one array to both of its inputs."""
    x, y = leaf([1.0]), leaf([2.0])
    dy = np.ones(1)
    (x + y).backward(dy)
    assert not np.shares_memory(x.grad, y.grad) and not np.shares_memory(x.grad, dy)


def test_results_of_ops_keep_no_gradient():
    x = leaf([1.0])
    y = x * 2
    (y * 3).backward()
    assert y.grad is None and x.grad.tolist() == [6]


def test_a_leaf_may_be_the_root():
    x = leaf([1.0, 2.0])
    x.backward([3.0, 4.0])
    assert x.grad.tolist() == [3, 4]


def test_outputs_that_nothing_used_have_no_gradient_in_backward():
    received = []

    class Two(Function):
        __slots__ = ()

        def forward(self, x):
            return x * 1, x * 2

        def backward(self, *dy):
            received.append([None if d is None else d.tolist() for d in dy])
            return sum(d for d in dy if d is not None)

    x = leaf([1.0])
    Two.apply(x)[1].backward()
    one, two = Two.apply(x)
    (one + two).backward()
    assert received == [[None, [1.0]], [[1.0], [1.0]]]


def test_a_gradient_that_is_none_stops_there():
    log = []

    class Stop(Function):
        __slots__ = ()

        def forward(self, x):
            return x.copy()

        def backward(self, dy):
            return None

    x = leaf([1.0])
    (Stop.apply(Noted.apply(x, "before", log)) + Noted.apply(x, "beside", log)).backward()
    assert log == ["beside"] and x.grad.tolist() == [1]


def test_arrays_are_contiguous_for_an_op_that_is_not_strided():
    seen = []

    class Look(Function):
        __slots__ = ()

        def forward(self, x):
            seen.append(x.flags.c_contiguous)
            return x.copy()

        def backward(self, dy):
            seen.append(dy.flags.c_contiguous)
            return dy

    F.permute(Look.apply(leaf(normal(2, 3)).T), (1, 0)).backward(normal(2, 3))
    assert seen == [True, True]


# -- errors


def pair():
    return leaf([1.0, 2.0]) * 2


test_a_gradient_has_the_shape_of_the_tensor = lab.refusals(
    (lambda: pair().backward(), r"shape \(2,\) is no scalar; pass a gradient"),
    (lambda: pair().backward(np.ones(3)), r"gradient must be \(2,\), got \(3,\)"),
)


def test_a_backward_that_forgets_an_input_is_an_error_that_names_the_op():
    class Wrong(Function):
        __slots__ = ()

        def forward(self, x, y):
            return x + y

        def backward(self, dy):
            return dy

    with pytest.raises(RuntimeError, match="Wrong.backward gave 1 gradients for 2 inputs"):
        Wrong.apply(leaf([1.0]), leaf([1.0])).backward()


def test_a_forward_that_goes_on_in_another_thread_has_all_its_gradients():
    x = leaf([2.0])
    middle = x * 3.0 * 5.0
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: middle * 7.0).result()
    (result * 1.0).backward()
    assert x.grad.tolist() == [105.0]


class Raises(Function):
    """The identity; its backward registers functions, then raises `error`, or nothing if that is None."""

    __slots__ = ()

    def forward(self, x, calls, error):
        self.saved = (calls, error)
        return x.copy()

    def backward(self, dy):
        calls, error = self.saved
        run = autograd.running()
        run.in_any_case(lambda: calls.append("in any case"))
        run.at_end(lambda: calls.append("at end"))
        if error is not None:
            raise error
        return dy, None, None


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_what_must_be_done_in_any_case_is_done_after_an_interrupt(error):
    calls = []
    with pytest.raises(error):
        Raises.apply(leaf((2,)), calls, error()).sum().backward()
    assert calls == ["in any case"] and autograd.running() is None


def test_what_must_be_done_in_any_case_is_done_once_if_a_hook_raises():
    def fail():
        raise ArithmeticError

    class Hooked(Raises):
        __slots__ = ()

        def backward(self, dy):
            autograd.running().at_end(fail, hook=True)
            return super().backward(dy)

    calls = []
    with pytest.raises(ArithmeticError):
        Hooked.apply(leaf((2,)), calls, None).sum().backward()
    assert calls == ["at end", "in any case"]


# -- when saved arrays and graphs are freed, and whose tape it is


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
def test_a_chain_of_five_thousand_ops_runs_and_is_freed(without_gc, run_backward):
    x = leaf([1.0])
    y = x
    for _ in range(5_000):
        y = F.neg(y)
    node = weakref.ref(y.node)
    if run_backward:
        y.backward()
        assert x.grad.tolist() == [1]
    del y
    assert node() is None


def test_each_thread_has_its_own_tape():
    def other():
        x = leaf([1.0])
        F.neg(x).backward()
        return is_grad_enabled(), x.grad.tolist()

    for _ in range(3):
        F.neg(leaf([1.0]))
    with no_grad(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(other).result() == (True, [-1])


def test_backwards_in_several_threads_do_not_disturb_one_another():
    start = threading.Barrier(4)

    def work(_):
        start.wait()
        x = leaf([1.0])
        for _ in range(20):
            y = x
            for _ in range(50):
                y = y * 1.01 + x
            y.backward()
        return x.grad[0]

    with ThreadPoolExecutor(4) as pool:
        (gradient,) = set(pool.map(work, range(4)))
    assert gradient > 0
