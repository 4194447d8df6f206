"""activation_offload.py: what is saved travels to the host and back, beside compute, and arrives in time."""

import gc
import threading
import weakref
from contextlib import suppress

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, autograd, device, nn, no_grad
from shardrt import functional as F
from shardrt.activation_offload import ALIGNMENT, HostPool, Marker, _streams, offload_activations
from shardrt.autograd import Function
from shardrt.comm import init_device_mesh
from shardrt.device import StreamError
from shardrt.device.cpu import CPUDevice, finish_streams
from shardrt.device.program import Work
from shardrt.simulate.races import races
from shardrt.simulate.script import record_of
from tests import lab
from tests.gradcheck import leaf, normal, sliced
from tests.test_recompute import TOKENS, Layer, gpt, gradients, offload_blocks, peak_of_step, step


def test_two_graphs_may_be_alive_at_once():
    plain, offloaded = gpt(dropout=0.0), gpt(dropout=0.0)
    offload_blocks(offloaded)
    results = []
    for model in (plain, offloaded):
        first = F.cross_entropy(model(TOKENS), TOKENS)
        second = F.cross_entropy(model(TOKENS[:2]), TOKENS[:2])
        first.backward()
        second.backward()
        results.append(gradients(model))
    lab.assert_equal(*results)


class Saves(Function):
    """x + 1; saves whatever it is told, and notes in backward what it finds."""

    __slots__ = ()

    def forward(self, x, *saved):
        self.saved = saved
        return x + 1

    def backward(self, dy):
        FOUND.append(tuple(self.saved))
        return dy, *[None] * (len(self.edges) - 1)


FOUND = []


def through_the_host(*saved):
    """What an op finds in backward that has saved this, and the bytes that travelled."""
    FOUND.clear()
    layer = offload_activations(Layer(lambda x, weight: Saves.apply(x, *saved)))
    x = leaf(normal(3))
    y = layer(x)
    assert isinstance(y.node, Marker)
    nbytes = _streams().pool.lent_bytes
    offload_activations(Layer(lambda x, weight: x * x))(x)  # departs next: the other is on the host alone now
    assert y.node.saved_tensors.state.name == "AWAY"
    y.sum().backward()
    return FOUND[0], nbytes


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x.transpose(1, 2, 0),
        lambda x: x[:, 1],
        lambda x: x[1:, ::2],
        lambda x: x[::-1],
        lambda x: np.broadcast_to(x[:, :1], (3, 7, 5)),
        lambda x: np.broadcast_to(x[0], (6, 4, 5)).transpose(2, 0, 1),
        lambda x: x[:0],
        lambda x: x[1, 1, 1:2].reshape(()),
        lambda x: sliced(x),
    ],
)
def test_any_view_comes_back_with_its_values_and_the_order_of_its_axes(view):
    array = view(normal(3, 4, 5).astype(np.float32))
    (found,), _ = through_the_host(array)
    np.testing.assert_array_equal(found, array, strict=True)
    assert not np.shares_memory(found, array)
    if 0 not in array.shape and array.ndim > 1 and min(array.strides) > 0:
        assert np.argsort(found.strides).tolist() == np.argsort(array.strides).tolist()


def test_views_of_the_same_memory_travel_once():
    array = normal(8, 16)
    views = (array, array.reshape(4, 32), array.T, np.broadcast_to(array, (5, 8, 16)), array[:])
    found, nbytes = through_the_host(*views)
    assert nbytes == array.nbytes
    for expected, view in zip(views, found, strict=True):
        np.testing.assert_array_equal(view, expected)
        assert np.shares_memory(view, found[0])


def test_what_is_no_array_stays_what_it_is():
    saved = (3, 2.5, "text", None, (4, (5, normal(3) > 0)), slice(1, 2))
    found, nbytes = through_the_host(*saved)
    assert found[:4] == saved[:4] and found[5] == saved[5] and found[4][0] == 4 and found[4][1][0] == 5
    np.testing.assert_array_equal(found[4][1][1], saved[4][1][1], strict=True)
    assert nbytes == ALIGNMENT


def test_parameters_do_not_travel_however_they_were_saved():
    layer = offload_activations(Layer(lambda x, weight: F.exp(x) * weight @ weight.T))
    x = leaf(normal(4, 4))
    y = layer(x)
    # x, exp(x), and exp(x) * weight, each of 128 bytes; weight and weight.T not
    assert _streams().pool.lent_bytes == 2 * 128
    y.sum().backward()
    assert np.isfinite(layer.weight.grad).all()


# -- memory


def test_memory_on_the_device_falls_to_two_blocks():
    plain, plain_peak = peak_of_step(lambda model: None)
    offloaded, peak = peak_of_step(offload_blocks)
    block = (plain - offloaded) / 5  # after forward, the last of six has not left yet
    assert offloaded < 2 * block
    assert peak < 3.25 * block < plain_peak / 2  # two, and what backward of a block makes besides


def test_with_recomputation_only_the_inputs_travel():
    streams = _streams()
    model = gpt(width=64)
    offload_blocks(model, "full")
    loss = F.cross_entropy(model(TOKENS), TOKENS)
    assert streams.pool.lent_bytes == 3 * TOKENS.size * 64 * 4
    loss.backward()
    assert streams.pool.lent_bytes == 0


def test_host_buffers_are_used_again_in_the_next_step():
    model = gpt()
    offload_blocks(model)
    pool = _streams().pool
    step(model)
    held, buffers = pool.held_bytes, {id(buffer) for buffer in pool._free}
    for _ in range(3):
        step(model)
    assert pool.held_bytes == held and {id(buffer) for buffer in pool._free} == buffers


def test_host_buffers_never_hold_more_than_was_lent_at_once():
    pool = HostPool(device.get("cpu"))
    for size in range(100, 200):  # another size each time
        loans = [pool.lend(size), pool.lend(size)]
        assert pool.lent_bytes == 2 * size
        del loans
    assert pool.lent_bytes == 0 and pool.held_bytes <= 2 * 199


def test_a_graph_that_is_dropped_gives_its_buffers_back_without_the_garbage_collector():
    model = gpt()
    offload_blocks(model)
    gc.collect()
    gc.disable()
    try:
        logits = model(TOKENS)
        saved_tensors = weakref.ref(
            next(n for n in autograd.reachable([logits.node]) if isinstance(n, Marker)).saved_tensors
        )
        assert saved_tensors() is not None and _streams().pool.lent_bytes > 0
        del logits
        assert saved_tensors() is None and _streams().pool.lent_bytes == 0
    finally:
        gc.enable()


# -- when


class Square(Function):
    """x * x; its copies to the host and back are told apart by `index`."""

    __slots__ = ()

    def forward(self, x, index):
        self.saved = (x, index)
        return x * x

    def backward(self, dy):
        x, _ = self.saved
        return 2 * x * dy, None


class Link(nn.Module):
    """A square, one of a chain."""

    def __init__(self, index):
        super().__init__()
        self.index = index

    def forward(self, x):
        return Square.apply(x, self.index)


def squared(x, times):
    """x squared so often, by offloaded modules."""
    for index in range(times):
        x = offload_activations(Link(index))(x)
    return x


class Meetings:
    """Pairs that must run at the same time: each waits, once begun, until the other has begun too."""

    def __init__(self):
        self._begun = {}
        self.alone = []  # those whose partner did not begin while they waited

    def meet(self, name, partner):
        self._event(name).set()
        if not self._event(partner).wait(timeout=20):
            self.alone.append(name)

    def _event(self, name):
        return self._begun.setdefault(name, threading.Event())


def test_copies_run_beside_the_module_that_computes(monkeypatch):
    """Offload i beside forward i + 1, and fetch i beside backward i + 1."""
    _streams().offload.synchronize()  # what an earlier test left under way is not counted below
    last, meetings = 4, Meetings()
    copy, forward, backward = CPUDevice.copy, Square.forward, Square.backward
    coming = {"offload": iter(range(last)), "fetch": iter(range(last - 1, -1, -1))}  # the last never leaves

    def meeting_copy(self, target, source):
        lane = threading.current_thread().name
        index = next(coming[lane], None)
        if index is not None:
            beside = "forward" if lane == "offload" else "backward"
            meetings.meet(f"{lane} {index}", f"{beside} {index + 1}")
        copy(self, target, source)

    def meeting_forward(self, x, index):
        if index > 0:
            meetings.meet(f"forward {index}", f"offload {index - 1}")
        return forward(self, x, index)

    def meeting_backward(self, dy):
        _, index = self.saved
        if index > 0:
            meetings.meet(f"backward {index}", f"fetch {index - 1}")
        return backward(self, dy)

    monkeypatch.setattr(CPUDevice, "copy", meeting_copy)
    monkeypatch.setattr(Square, "forward", meeting_forward)
    monkeypatch.setattr(Square, "backward", meeting_backward)
    squared(leaf([1.01]), last + 1).backward()
    assert meetings.alone == []
    assert all(next(left, None) is None for left in coming.values())  # all of them have met


@pytest.mark.parametrize("way", ["no backward", "forward raises", "backward raises", "backward"])
def test_memory_of_a_call_that_no_backward_comes_to_is_lent_again_behind_its_copies(way):
    """On CUDA, whose pool lends what compute took to compute again, at once."""

    def fail(*args):
        raise KeyError(way)

    def once(x):
        for number, layer in enumerate(layers):
            x = layer(x)
            if number == 2 and way == "backward raises":
                x.register_hook(fail)
            if number == 2 and way == "forward raises":
                fail()
        if way.startswith("backward"):
            x.sum().backward()

    def both():
        with suppress(KeyError):
            once(Tensor(device.current().zeros((4, 8), np.float32), requires_grad=True))
        for layer in layers:  # in whose memory nobody may have left anything
            layer(Tensor(device.current().zeros((4, 8), np.float32)))

    def step():
        init_device_mesh("auto")
        layers.extend(offload_activations(nn.Sequential(nn.Linear(8, 8), nn.GELU())) for _ in range(4))
        both()

    layers = []
    (program,) = record_of(step)
    copies = {item.stream for item in program.items if isinstance(item, Work)}
    assert copies >= {"compute", "offload"} | ({"fetch"} if way.startswith("backward") else set())
    assert not [str(race) for race in races([program])]


def test_a_copy_that_fails_is_an_error_where_it_is_waited_for(monkeypatch):
    raised = []

    def fail(self, target, source):
        raise MemoryError("no more")

    def work():
        monkeypatch.setattr(CPUDevice, "copy", fail)
        try:
            squared(leaf([1.01]), 3)
        except StreamError as error:
            raised.append(error)

    thread = threading.Thread(target=work)  # a stream that failed stays so: not that of the other tests
    thread.start()
    thread.join()
    assert "no more" in str(raised[0])


# -- uses


def test_a_tensor_that_escapes_from_the_module_has_its_gradient():
    results = []
    for offloaded in (False, True):
        layer = Layer(lambda x, weight: x @ weight)

        def function(x, weight, layer=layer):
            layer.aside = F.exp(x)
            return layer.aside @ weight

        layer.function = function
        shardrt.manual_seed(5)
        layer.weight.data = normal(4, 4)
        if offloaded:
            offload_activations(layer)
        x = leaf(normal(4, 4))
        y = layer(x)
        aside = layer.aside
        layer(x)
        (aside * aside).sum().backward(retain_graph=True)  # does not come through the module's output
        y.sum().backward()
        results.append((x.grad, layer.weight.grad))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_without_a_tape_nothing_travels():
    finish_streams()  # a stream lets go of what it copied last a moment after it said so
    gc.collect()
    model = gpt()
    offload_blocks(model)
    with no_grad():
        model(TOKENS)
    x = Tensor(np.ones(3))
    assert offload_activations(Layer(lambda x, weight: x))(x) is x
    assert _streams().pool.lent_bytes == 0
