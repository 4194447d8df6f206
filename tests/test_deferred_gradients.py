"""Deferred gradients, and the halves of a backward: equal bits in every order, nothing held without need."""

import gc
import importlib
import pkgutil
import weakref
from functools import partial

import numpy as np
import pytest

import shardrt
from shardrt import Tensor, autograd, device, functional, nn
from shardrt import functional as F
from shardrt.activation_offload import offload_activations
from shardrt.autograd import Function
from shardrt.comm import single
from shardrt.deferred_gradients import DeferredGradients, Work
from shardrt.device.simulated import SimulatedDevice
from shardrt.functional import vocabulary
from shardrt.functional.float8 import Float8Linear
from shardrt.functional.vocabulary import VocabularyPart
from shardrt.nn.lora import add_lora
from shardrt.parallel import ColwiseParallel, RowwiseParallel, VocabParallel, set_tensor_invariant
from shardrt.recompute import checkpoint
from tests import lab
from tests.deferred import all_inputs_first, as_a_pipeline, each_at_its_end, usual
from tests.gradcheck import normal

BATCHES = [normal(3, 4, 6, seed=seed).astype(np.float32) for seed in range(3)]
WORDS = [np.random.default_rng(seed).integers(0, 11, (3, 4)) for seed in range(3)]


class Uses(nn.Module):
    """`forward(self, batch, words)` gives a tensor; the loss is a fixed function of it."""

    def __init__(self, forward, **parameters):
        super().__init__()
        self._compute = forward
        for name, made in parameters.items():
            setattr(self, name, made)

    def forward(self, batch, words):
        return self._compute(self, batch, words)


def uses(forward, **shapes):
    """Makes such a module, with parameters of these names and shapes."""

    def make():
        made = {name: nn.Parameter(shape, nn.init.Normal(0.0, 0.5)) for name, shape in shapes.items()}
        return Uses(forward, **made)

    return make


PART = VocabularyPart(single.SingleCommunicator(), 11)


def image(batch):
    return F.reshape(batch, (3, 2, 3, 4))


def mixed(m, x, words):
    """One bias of a linear layer, which is late, and of a norm, which is not: the norm's is in between."""
    x = F.linear(x, m.weight, m.bias)
    x = F.layer_norm(x, m.scale.shape, m.scale, m.bias)
    return F.linear(x, m.weight, m.bias)


def experts(m, x, words):
    return F.grouped_linear(F.grouped_linear(F.reshape(x, (-1, 6)), m.w, (5, 0, 6)), m.w, (1, 10, 1))


def head(m, x, words, **how):
    return F.linear_cross_entropy(F.embedding(words, m.w) + x, m.w, words, **how)


def head_of_a_part(m, x, words, chunk):
    x = vocabulary.embedding(words, m.w, PART) + x
    return vocabulary.linear_cross_entropy(x, m.w, words, PART, chunk=chunk)


def batch_norm(m, x, words):
    return F.batch_norm(image(x), *np.ones((2, 2), np.float32), m.w, m.b, True)


def layer_norm(m, x, words):
    return F.add_layer_norm(F.layer_norm(x, (6,), m.w, m.b), x, m.w, m.b)[1]


def frozen(m, x, words):
    m.w.requires_grad = False
    return F.linear(x, m.w, m.b)


CASES = {
    "linear": uses(lambda m, x, _: F.linear(F.linear(x, m.w, m.b), m.w), w=(6, 6), b=(6,)),
    "linear, bias alone": uses(frozen, w=(6, 6), b=(6,)),
    "linear_gelu": uses(
        lambda m, x, _: F.linear(F.linear_gelu(x, m.w, m.b), m.v), w=(7, 6), b=(7,), v=(6, 7)
    ),
    "a weight that an op has made": uses(lambda m, x, _: F.linear(x, m.w * 2.0, m.b), w=(6, 6), b=(6,)),
    "embedding and head, tied": uses(lambda m, x, w: F.linear(F.embedding(w, m.w) + x, m.w), w=(11, 6)),
    "conv2d": uses(
        lambda m, x, _: F.conv2d(F.conv2d(image(x), m.w, m.b, padding=1), m.w, m.b), w=(2, 2, 2, 2), b=(2,)
    ),
    "matmul": uses(lambda m, x, _: (x @ m.w) @ m.w * m.b, w=(6, 6), b=(6,)),
    "experts": uses(experts, w=(3, 6, 6)),
    "linear_cross_entropy": uses(partial(head, chunk=0), w=(11, 6)),
    "linear_cross_entropy in chunks": uses(partial(head, chunk=5), w=(11, 6)),
    "linear_cross_entropy, each": uses(
        lambda m, x, words: F.linear_cross_entropy(x, m.w, words, chunk=0, reduction="none"), w=(11, 6)
    ),
    "words of a part": uses(partial(head_of_a_part, chunk=0), w=(11, 6)),
    "words of a part, in chunks": uses(partial(head_of_a_part, chunk=5), w=(11, 6)),
    "layer_norm": uses(layer_norm, w=(6,), b=(6,)),
    "rms_norm": uses(lambda m, x, _: F.add_rms_norm(F.rms_norm(x, (6,), m.w), x, m.w)[1], w=(6,)),
    "batch_norm": uses(batch_norm, w=(2,), b=(2,)),
    "transposed": uses(lambda m, x, _: F.conv_transpose2d(image(x), m.w, m.b), w=(2, 3, 1, 1), b=(3,)),
    "late and at once": uses(mixed, weight=(6, 6), bias=(6,), scale=(6,)),
    "late and by an array": uses(lambda m, x, _: F.linear(F.linear(x, m.w) * m.w[0] @ m.w, m.w), w=(6, 6)),
    "late, and decay in the loss": uses(
        lambda m, x, _: F.linear(x, m.w).mean() + (m.w * m.w).sum(), w=(6, 6)
    ),
    "in parts": lambda: in_parts(
        nn.Sequential(nn.Linear(6, 8, gelu=True), nn.Linear(8, 6)),
        {"0": ColwiseParallel(), "1": RowwiseParallel()},
    ),
    "words in parts": lambda: in_parts(
        Uses(
            lambda m, x, words: F.linear_cross_entropy(x, m.e.weight, words, chunk=0), e=nn.Embedding(11, 6)
        ),
        {"e": VocabParallel()},
    ),
    "adapters": lambda: add_lora(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), 2, dropout=0.5),
}


def in_parts(model, plan):
    set_tensor_invariant(model, 2, plan=plan)
    return model


def loss_of(model, number):
    batch, words = Tensor(BATCHES[number]), WORDS[number]
    y = model(batch) if isinstance(model, nn.Sequential) else model(batch, words)
    return (y * y * (1.0 + number)).sum()


def one_as_usual(losses):
    """F0 I0 F1 B1 F2 I2 W2 W0."""
    lates = [DeferredGradients(), DeferredGradients()]
    losses(0).backward(deferred=lates[0])
    losses(1).backward()
    losses(2).backward(deferred=lates[1])
    lates[1].flush()
    lates[0].flush()


ORDERS = [each_at_its_end, all_inputs_first, as_a_pipeline, one_as_usual]


def gradients_of(make, way, prepare=None):
    shardrt.manual_seed(5)
    model = make()
    if prepare is not None:
        prepare(model)
    way(lambda number: loss_of(model, number))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_every_order_gives_the_bits_of_usual_backwards(make):
    expected = gradients_of(make, usual)
    for way in ORDERS:
        lab.assert_equal(gradients_of(make, way), expected)


def test_the_cases_have_every_op_that_takes_handles():
    for module in pkgutil.iter_modules(functional.__path__, functional.__name__ + "."):
        importlib.import_module(module.name)
    every, stack = set(), [Function]
    while stack:
        below = stack.pop().__subclasses__()
        stack += below
        every |= {op for op in below if op.handles and op.__module__.startswith(functional.__name__)}
    used = set()
    for make in CASES.values():
        used |= {type(node) for node in autograd.reachable([loss_of(make(), 0).node])}
    assert every - used == {Float8Linear}, "which needs a GPU: tests/softgpu/test_float8.py"


def recompute(policy):
    return lambda model: checkpoint(model, policy)


@pytest.mark.parametrize("prepare", [recompute("full"), recompute("matmul"), offload_activations])
@pytest.mark.parametrize("case", ["embedding and head, tied", "late and at once", "experts"])
def test_recomputed_and_offloaded_modules_too(case, prepare):
    expected = gradients_of(CASES[case], usual)
    for way in (as_a_pipeline, one_as_usual):
        lab.assert_equal(gradients_of(CASES[case], way, prepare), expected)


# -- what waits


def layers(count=3, width=6):
    shardrt.manual_seed(5)
    return nn.Sequential(*(nn.Linear(width, width, gelu=index < count - 1) for index in range(count)))


def test_weights_wait_and_inputs_do_not():
    model, late = layers(), DeferredGradients()
    x = Tensor(BATCHES[0], requires_grad=True)
    y = model(x)
    autograd.backward(y, np.ones(y.shape, np.float32), deferred=late)
    assert x.grad is not None and not late.done
    for layer in model:
        with pytest.raises(RuntimeError, match="has deferred a call that adds to it; call deferred.flush"):
            _ = layer.weight.grad
    late.flush()
    assert late.done and all(layer.weight.grad is not None for layer in model)


def test_between_the_halves_there_is_what_the_products_need_and_no_more(monkeypatch):
    """Of each layer its input and the gradient of its output; in the end nothing."""
    here = SimulatedDevice()
    with device.use(here):
        model, width, rows = layers(width=128), 128, 256
        for layer in model:
            layer.weight.storage.array(), layer.bias.storage.array()
            layer.weight.gradient_target(), layer.bias.gradient_target()
        before = here.held_bytes
        x = Tensor(here.empty((rows, width), np.float32))
        y, late = model(x), DeferredGradients()
        gradient = here.empty(y.shape, np.float32)
        array = rows * width * 4
        # The input of the first layer, what goes into the two GELUs, the result, and its gradient: the inputs
        # of the others, which the GELUs give, are made again.
        assert here.held_bytes - before == (1 + 2 + 1 + 1) * array
        autograd.backward(y, gradient, deferred=late)
        del x, y, gradient
        assert here.held_bytes - before == 2 * 3 * array
        held, run = [], Work.run

        def noted(work):
            held.append((here.held_bytes - before) // array)
            run(work)

        monkeypatch.setattr(Work, "run", noted)
        late.flush()
        assert held == [6, 4, 2] and here.held_bytes == before


def test_one_that_is_dropped_holds_nothing_and_one_that_has_run_neither():
    gc.disable()
    try:
        for end in (lambda late: late.flush(), lambda late: None):
            model, late = layers(), DeferredGradients()
            x = Tensor(BATCHES[0].copy())
            alive = weakref.ref(x.data)
            y = model(x)
            node = weakref.ref(y.node)
            autograd.backward(y, np.ones(y.shape, np.float32), deferred=late)
            del x, y
            assert alive() is not None and node() is None
            end(late)
            del late
            assert alive() is None
        assert model[0].weight.grad is None
    finally:
        gc.enable()


def test_it_is_for_one_backward_and_runs_once():
    model, late = layers(), DeferredGradients()
    with pytest.raises(RuntimeError, match="no backward with deferred= this object has ended"):
        late.flush()
    model(Tensor(BATCHES[0])).sum().backward(deferred=late)
    with pytest.raises(RuntimeError, match="another backward has used these"):
        model(Tensor(BATCHES[1])).sum().backward(deferred=late)
    late.flush()
    with pytest.raises(RuntimeError, match="it was flushed before"):
        late.flush()


def test_a_backward_that_raises_leaves_nothing_to_run():
    def fail(gradient):
        raise ZeroDivisionError

    expected = gradients_of(layers, usual)
    shardrt.manual_seed(5)
    model, late = layers(), DeferredGradients()
    hidden = model[0](Tensor(BATCHES[0].copy()))
    alive = weakref.ref(hidden.data)
    hidden.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model[2](model[1](hidden)).sum().backward(deferred=late)
    del hidden
    with pytest.raises(RuntimeError, match="no backward with deferred="):
        late.flush()
    gc.collect()
    assert alive() is None
    model.zero_grad()
    usual(lambda number: loss_of(model, number))
    lab.assert_equal({name: p.grad for name, p in model.named_parameters()}, expected)


def test_what_comes_at_the_end_comes_after_the_late_half_and_hooks_last():
    message = []

    class Ask(Function):
        __slots__ = ()

        def forward(self, x):
            return x.copy()

        def backward(self, dy):
            run = autograd.running()
            run.after_nodes(lambda: message.append("after nodes"))
            run.at_end(lambda: message.append("end"))
            run.in_any_case(lambda: message.append("in any case"))
            autograd.call_or_defer(self.put_off)
            return dy

        def put_off(self):
            message.append("late")
            autograd.running().in_any_case(lambda: message.append("in any case, late"))
            return ()

    model, late = layers(1), DeferredGradients()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: message.append("hook"))
    y = model(Ask.apply(Tensor(BATCHES[0], requires_grad=True)))
    y.register_hook(lambda gradient: message.append("of a result"))
    y.sum().backward(deferred=late)
    assert message == ["of a result", "after nodes", "in any case"]
    late.flush()
    assert message[3:] == ["late", "end", "in any case, late", "hook"]
    assert autograd.running() is None


def test_several_roots_are_one_run():
    def of(separate):
        model = layers()
        x = model[0](Tensor(BATCHES[0]))
        results = [model[1](x), x * 2.0, model[2](x).sum()]
        gradients = [np.full((3, 4, 6), 2, np.float32), np.ones((3, 4, 6), np.float32), None]
        if separate:
            for y, gradient in zip(results, gradients, strict=True):
                y.backward(gradient, retain_graph=True)
        else:
            late = DeferredGradients()
            autograd.backward(results, gradients, deferred=late)
            late.flush()
        return {name: p.grad for name, p in model.named_parameters()}

    expected, found = of(True), of(False)
    lab.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_several_roots_need_a_gradient_each():
    model = layers()
    y = model(Tensor(BATCHES[0]))
    with pytest.raises(ValueError, match="2 tensors need as many gradients, got 1"):
        autograd.backward([y, y.sum()], [None])
    with pytest.raises(ValueError, match="is no scalar; pass a gradient"):
        autograd.backward([y.sum(), y])


def test_a_graph_that_is_retained_runs_again():
    expected, found = layers(), layers()
    for _ in range(2):
        expected(Tensor(BATCHES[0])).sum().backward()
    loss, lates = found(Tensor(BATCHES[0])).sum(), [DeferredGradients(), DeferredGradients()]
    loss.backward(retain_graph=True, deferred=lates[0])
    loss.backward(deferred=lates[1])
    for late in lates:
        late.flush()
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        assert np.array_equal(ours.grad, theirs.grad)


def test_half_a_backward_that_raises_does_not_count_as_run():
    model, late = layers(), DeferredGradients()
    model(Tensor(BATCHES[0])).sum().backward(deferred=late)

    def fail(parameter):
        raise ZeroDivisionError

    model[0].weight.storage.gradient_target = fail
    with pytest.raises(ZeroDivisionError):
        late.flush()
    assert not late.done and autograd.running() is None
    del model[0].weight.storage.gradient_target
    with pytest.raises(RuntimeError, match="no backward with deferred="):
        late.flush()
