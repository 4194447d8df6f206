"""recompute.py: gradients are the same to the bit, and only what was asked for is kept.

What holds of activations on the host, too, is tested with both; the rest of them in test_activation_offload.
"""

import gc
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from shardrt import Tensor, autograd, device, nn, no_grad, tape
from shardrt import functional as F
from shardrt import random as shardrt_random
from shardrt.activation_offload import offload_activations
from shardrt.autograd import Function
from shardrt.functional.attention import SelfAttention
from shardrt.functional.linear import Linear, LinearGELU
from shardrt.functional.matmul import MatMul
from shardrt.kernels.cpu import linear
from shardrt.recompute import Recompute, checkpoint, checkpoint_blocks
from tests import lab
from tests.gradcheck import leaf, normal

TOKENS = np.random.default_rng(0).integers(0, 31, (4, 16))


def gpt(width=16, layers=3, dropout=0.2):
    shardrt.manual_seed(5)
    return GPT(
        GPTConfig(n_layer=layers, n_head=2, n_embd=width, block_size=64, vocab_size=31, dropout=dropout)
    )


def step(model, tokens=TOKENS):
    """(loss, name -> gradient) of one step of a language model, whose dropout is the same every time."""
    shardrt.manual_seed(7)
    loss = F.cross_entropy(model(tokens), tokens)
    loss.backward()
    return loss.item(), gradients(model)


def hidden(*shape):
    """What goes into a block."""
    return Tensor(normal(*shape).astype(np.float32), requires_grad=True)


def gradients(model):
    return {name: p.grad.copy() for name, p in model.named_parameters() if p.grad is not None}


class Layer(nn.Module):
    """A module from a function of (x, weight)."""

    def __init__(self, function, width=4):
        super().__init__()
        self.weight = nn.Parameter((width, width), nn.init.Normal(0.0, 0.5), dtype=np.float64)
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs, weight=self.weight)


def offload_blocks(model, policy=None):
    for block in model.blocks:
        offload_activations(block if policy is None else checkpoint(block, policy))


PREPARED = {
    "full": lambda model: checkpoint_blocks(model.blocks),
    "full, every second": lambda model: checkpoint_blocks(model.blocks, 2),
    "matmul": lambda model: checkpoint_blocks(model.blocks, policy="matmul"),
    "matmul, every second": lambda model: checkpoint_blocks(model.blocks, 2, "matmul"),
    "on the host": offload_blocks,
    "full, on the host": partial(offload_blocks, policy="full"),
    "matmul, on the host": partial(offload_blocks, policy="matmul"),
}
prepared = pytest.mark.parametrize("prepare", PREPARED.values(), ids=PREPARED)
WRAPS = {"full": checkpoint, "matmul": partial(checkpoint, policy="matmul"), "host": offload_activations}
wrapped = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


class Followed:
    """A layer whose activations are on the host alone after each call: another module departs behind it."""

    def __init__(self, layer):
        self.__dict__["layer"] = offload_activations(layer)

    def __call__(self, *args, **kwargs):
        y = self.layer(*args, **kwargs)
        offload_activations(Layer(lambda x, weight: x * x))(leaf(normal(3)))
        return y

    def __getattr__(self, name):
        return getattr(self.layer, name)

    def __setattr__(self, name, value):
        setattr(self.layer, name, value)


def assert_alike(function, use):
    """`use` gives the same arrays with the layer of `function` as it is, recomputed, and on the host."""
    results = []
    for wrap in (lambda layer: layer, *WRAPS.values(), Followed, lambda layer: Followed(checkpoint(layer))):
        shardrt.manual_seed(5)
        results.append(use(wrap(Layer(function))))
    for found in results[1:]:
        lab.assert_equal(found, results[0])


# -- the same gradients


@prepared
def test_gradients_of_a_gpt_with_dropout_are_the_same_to_the_bit(prepare):
    plain, other = gpt(), gpt()
    prepare(other)
    for _ in range(3):
        lab.assert_equal(step(other), step(plain))


@pytest.mark.parametrize("inner", WRAPS)
@pytest.mark.parametrize("outer", WRAPS)
def test_a_whole_model_may_be_wrapped_and_its_parts_again_inside(inner, outer):
    model = gpt()
    for block in model.blocks:
        WRAPS[inner](block)
        WRAPS[inner](block.mlp)
    lab.assert_equal(step(WRAPS[outer](model)), step(gpt()))


def test_gradients_add_up_in_the_same_order_where_an_input_is_used_inside_and_outside():
    def use(layer):
        x = leaf(normal(4, 4))
        y = x * 3.0
        z = F.exp(y) + layer(y) + y * y  # y gets gradients from outside, from within twice, from outside
        (z * normal(4, 4, seed=1)).sum().backward()
        return x.grad, layer.weight.grad

    assert_alike(lambda x, weight: x @ weight + F.tanh(x), use)


@dataclass(frozen=True)
class Pair:
    first: object
    second: object = "text"


def test_tensors_may_be_anywhere_in_arguments_and_results():
    def function(pair, weight, *, rest, module):
        first, (second, scale) = pair.first
        product = F.matmul(first, weight) * scale
        return {"sum": product + second, "more": [Pair((product * rest["factor"],)), first.detach()]}

    def use(layer):
        x, y, factor = leaf(normal(4, 4)), leaf(normal(4, 4, seed=1)), leaf(normal(4, seed=2))
        out = layer(Pair((x * 1.0, (y, 2.0))), rest={"factor": factor * 1.0, "none": None}, module=None)
        pair, _ = out["more"]
        assert pair.second == "text"
        (out["sum"].sum() + (pair.first[0] * normal(4, 4, seed=3)).sum()).backward()
        return x.grad, y.grad, factor.grad, layer.weight.grad

    assert_alike(function, use)


def attention_of_views(x, weight):
    q, k, v = F.split(F.linear(x, F.concatenate([weight, weight * 2.0, weight @ weight])), 4, axis=-1)
    heads = [F.permute(t.reshape(2, 5, 2, 2), (0, 2, 1, 3)) for t in (q, k, v)]
    y = F.scaled_dot_product_attention(*heads, is_causal=True)
    return F.permute(y, (0, 2, 1, 3)).reshape(2, 5, 4) @ weight.T + x[0] @ x[1].T @ x[1]


def attention_of_views_of_one_array(x, weight):
    heads = F.permute(F.concatenate([x, x * 2.0, x * x]).reshape(2, 5, 3, 2, 2), (2, 0, 3, 1, 4))
    y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
    return F.permute(y, (0, 2, 1, 3)).reshape(2, 5, 4) @ weight


def factors_that_are_results(x, weight):
    return F.linear(x, F.exp(weight), None) @ F.permute(F.tanh(x), (0, 2, 1))


@pytest.mark.parametrize(
    "function", [attention_of_views, attention_of_views_of_one_array, factors_that_are_results]
)
def test_products_and_attention_are_taken_up_from_what_was_kept(function):
    def use(layer):
        x = leaf(normal(2, 5, 4))
        y = layer(x * 1.0)
        (y * normal(*y.shape, seed=1)).sum().backward()
        return x.grad, layer.weight.grad

    assert_alike(function, use)


def test_a_result_that_nothing_used_gets_no_gradient():
    def use(layer):
        x = leaf(normal(4, 4))
        layer(x)[1].sum().backward()
        return x.grad, layer.weight.grad

    assert_alike(lambda x, weight: (F.exp(x), x @ weight), use)


def test_a_module_may_return_what_it_got():
    def use(layer):
        x = leaf(normal(4, 4))
        y = x * 2.0
        same, other = layer(y)
        (same * normal(4, 4) + other).sum().backward()
        return x.grad, layer.weight.grad

    assert_alike(lambda x, weight: (x, x @ weight), use)


def test_an_argument_that_is_not_used_gets_no_gradient():
    used, unused = leaf(normal(4, 4)), leaf(normal(4, 4))
    layer = checkpoint(Layer(lambda x, y, weight: x @ weight))
    layer(used * 1.0, unused * 1.0).sum().backward()
    assert used.grad is not None and unused.grad is None


def test_parameters_get_gradients_where_no_argument_needs_one():
    layer = checkpoint(Layer(lambda x, weight: x @ weight))
    layer(Tensor(np.ones((2, 4)))).sum().backward()
    np.testing.assert_array_equal(layer.weight.grad, np.full((4, 4), 2.0))


def test_a_parameter_of_another_module_may_be_an_argument():
    head, body = (
        Layer(lambda x, weight: x @ weight),
        checkpoint(Layer(lambda x, other, weight: x @ other @ weight)),
    )
    (body(Tensor(np.eye(4)), head.weight) + head(Tensor(np.eye(4)))).sum().backward()
    expected = np.ones((4, 4)) @ body.weight.data.T + np.ones((4, 4))
    np.testing.assert_allclose(head.weight.grad, expected, rtol=1e-12)


# -- what is kept


def saved_arrays(node):
    kept = [node.saved]
    arrays = []
    while kept:
        item = kept.pop()
        if isinstance(item, tuple | list):
            kept.extend(item)
        elif isinstance(item, np.ndarray):
            arrays.append(item)
    return arrays


def test_a_recomputed_module_is_one_node_that_keeps_its_input_alone():
    block = checkpoint(gpt().blocks[0])
    x = hidden(2, 8, 16)
    y = block(x * 1.0)
    assert isinstance(y.node, Recompute)
    (only,) = saved_arrays(y.node)
    assert only.shape == x.shape


def test_policy_matmul_keeps_products_and_attention_and_computes_none_of_them_again(monkeypatch):
    calls = []
    for op in (Linear, LinearGELU, MatMul, SelfAttention):
        original = op.forward

        def counted(self, *args, original=original):
            calls.append(type(self).__name__)
            return original(self, *args)

        monkeypatch.setattr(op, "forward", counted)
    block = checkpoint(gpt().blocks[0], "matmul")
    y = block(hidden(2, 8, 16))
    kept = [array.shape for array in saved_arrays(y.node)]
    assert sorted(kept) == sorted([(2, 8, 48), (2, 8, 16), (2, 2, 8), (2, 8, 16), (2, 8, 64), (2, 8, 16)])
    in_forward = len(calls)
    y.sum().backward()
    assert in_forward == len(calls) == 5


def peak_of_step(prepare):
    """(bytes held after forward, peak of the step) in a model of six blocks, beyond what was there before."""
    model = gpt(width=64, layers=6)
    prepare(model)
    here = device.get("cpu")
    tokens = np.random.default_rng(0).integers(0, 31, (8, 64))
    loss_of = lambda: F.cross_entropy(model(tokens), tokens)  # noqa: E731
    loss_of().backward()  # gradients have their memory
    gc.collect()  # what other tests left in cycles must not go away in between
    before = here._pool.held_bytes
    here._pool.peak_bytes = before
    loss = loss_of()
    held = here._pool.held_bytes - before
    loss.backward()
    return held, here.peak_bytes() - before


def test_memory_falls_to_the_inputs_of_the_blocks_and_one_block(monkeypatch):
    monkeypatch.setattr(linear, "INPUT_AGAIN", False)  # as on a GPU
    plain, plain_peak = peak_of_step(lambda model: None)
    full, full_peak = peak_of_step(lambda model: checkpoint_blocks(model.blocks))
    half, half_peak = peak_of_step(lambda model: checkpoint_blocks(model.blocks, every=2))
    matmul, matmul_peak = peak_of_step(lambda model: checkpoint_blocks(model.blocks, policy="matmul"))
    entry = 8 * 64 * 64 * 4  # bytes of a block's input
    block = (plain - full) / 6 + entry  # what a block saves, its input included
    assert block > 10 * entry
    assert full < 10 * entry  # six inputs, and what the embedding and the head save
    assert abs(half - (plain + full) / 2) < entry
    assert full < matmul < plain
    assert full_peak < full + 1.5 * block
    assert half_peak < plain_peak - 2.5 * (block - entry) and matmul_peak < plain_peak - block / 2


def test_a_piece_is_freed_as_backward_goes_on_like_any_graph():
    class Look(Function):
        __slots__ = ()

        def forward(self, x):
            self.saved = (x,)
            return x + 1  # NumPy's own memory

        def backward(self, dy):
            alive.append(device.get("cpu")._pool.held_bytes)
            return dy

    def function(x, weight):
        for _ in range(6):
            x = Look.apply(x @ weight)
        return x

    freed = []
    for wrap in (lambda layer: layer, *WRAPS.values(), Followed):
        alive = []
        wrap(Layer(function, width=200))(leaf(np.zeros((200, 200))) * 1.0).sum().backward()
        freed.append(alive[0] - alive[-1])
    assert freed[0] == freed[1] == freed[2] == freed[3] > 0
    assert freed[4] >= freed[0], "what came back from the host"


# -- the same run


def switch_modes(model):
    model.eval()
    model.blocks[0].dropout.train()


@pytest.mark.parametrize("happens", [switch_modes, lambda model: shardrt.manual_seed(2)])
def test_training_evaluation_and_seed_are_as_they_were_in_forward(happens):
    def use(between):
        model = gpt()
        checkpoint_blocks(model.blocks)
        model.blocks[1].dropout.eval()
        shardrt.manual_seed(1)
        loss = F.cross_entropy(model(TOKENS), TOKENS)
        between(model)
        modes = [module.training for module in model.modules()]
        loss.backward()
        assert modes == [module.training for module in model.modules()]
        return gradients(model)

    lab.assert_equal(use(happens), use(lambda model: None))


def test_random_numbers_after_backward_are_those_without_recomputation():
    states = []
    for recomputed in (False, True):
        model = gpt()
        if recomputed:
            checkpoint_blocks(model.blocks)
        step(model)
        states.append(shardrt_random.state())
    assert states[0] == states[1] and states[0][2] > 0


def test_without_a_tape_forward_is_forward():
    model = checkpoint(gpt())
    with no_grad():
        logits = model(TOKENS)
    assert logits.node is None
    for parameter in model.parameters():
        parameter.requires_grad = False
    assert model(TOKENS).node is None


@prepared
def test_a_graph_that_is_retained_can_be_gone_through_again(prepare):
    model = gpt()
    prepare(model)
    loss = F.cross_entropy(model(TOKENS), TOKENS)
    loss.backward(retain_graph=True)
    once = gradients(model)
    loss.backward()
    for name, gradient in gradients(model).items():
        np.testing.assert_allclose(gradient, 2 * once[name], rtol=1e-5, atol=1e-7)


@wrapped
def test_a_second_backward_is_an_error_that_names_the_module(wrap):
    y = wrap(gpt().blocks[0])(hidden(1, 4, 16))
    y.sum().backward()
    with pytest.raises(RuntimeError, match="were freed by an earlier backward"):
        y.sum().backward()


# -- the run of backward


class Look(Function):
    """The identity; tells in backward what runs after it."""

    __slots__ = ()

    def forward(self, x, name, log):
        self.saved = (name, log)
        return x * 1

    def backward(self, dy):
        name, log = self.saved
        following = [node.saved[0] for node in autograd.running().upcoming(Look)]
        log.append((name, following))
        autograd.running().at_end(log.end)
        return dy, None, None


class Log(list):
    def end(self):
        self.append("end")


def test_a_piece_is_followed_by_the_rest_and_the_end_comes_once():
    log = Log()

    def function(x, weight):
        return Look.apply(Look.apply(x, "inside 1", log), "inside 2", log)

    x = leaf(np.ones(4))
    y = Look.apply(checkpoint(Layer(function))(Look.apply(x, "before", log)), "after", log)
    y.sum().backward()
    assert log == [
        ("after", ["before"]),
        ("inside 2", ["inside 1", "before"]),
        ("inside 1", ["before"]),
        ("before", []),
        "end",
    ]


def test_a_gradient_that_would_be_lost_is_an_error():
    x = leaf(normal(4, 4))
    elsewhere = leaf(normal(4, 4)) * 2.0
    layer = checkpoint(Layer(lambda x, weight: x @ weight + elsewhere))
    with pytest.raises(
        RuntimeError, match="result of Mul, whose gradient would be lost.*pass it as an argument"
    ):
        layer(x * 1.0).sum().backward()


def test_a_tensor_that_is_no_argument_is_right_where_backward_comes_to_it_anyway():
    def use(layer):
        x = leaf(normal(4, 4))
        layer.outside = x * 2.0
        (layer(x * 1.0) + layer.outside).sum().backward()
        return x.grad

    def function(x, weight):
        return x @ weight + function.layer.outside * 3.0

    results = []
    for policy in (None, "full"):
        function.layer = layer = Layer(function)
        results.append(use(layer if policy is None else checkpoint(layer, policy)))
    np.testing.assert_array_equal(*results)


def test_an_error_in_forward_or_backward_leaves_nothing_behind():
    def function(x, weight):
        if (autograd.in_second_run() is not None) == function.fails_again:
            raise ArithmeticError
        return x @ weight

    for function.fails_again in (False, True):
        with pytest.raises(ArithmeticError):
            checkpoint(Layer(function), "matmul")(leaf(normal(4, 4))).sum().backward()
    assert autograd.in_first_run() is None and autograd.in_second_run() is None
    assert autograd.modules() == []
    assert autograd.is_grad_enabled() and tape.keeper() is None and autograd.running() is None


# -- errors


def twice(wrap):
    model = gpt()
    for module in (*model.blocks, model.blocks[0]):
        wrap(module)


test_what_cannot_be_recomputed_or_offloaded_is_refused = lab.refusals(
    (lambda: checkpoint([]), TypeError, "module must be a shardrt.nn.Module, got list"),
    (lambda: offload_activations([]), TypeError, "module must be a shardrt.nn.Module, got list"),
    (lambda: checkpoint(gpt(), "half"), "policy must be 'full' or 'matmul', got 'half'"),
    (lambda: twice(checkpoint), "checkpoint: it was called on blocks.0 before"),
    (lambda: twice(offload_activations), "offload_activations: it was called on blocks.0 before"),
    (lambda: checkpoint_blocks(gpt().blocks, every=0), "every must be at least 1, got 0"),
)


@wrapped
def test_a_result_whose_gradients_would_be_lost_is_an_error(wrap):
    class Opaque:
        def __init__(self, y):
            self.y = y

    layer = wrap(Layer(lambda x, weight: Opaque(x @ weight)))
    with pytest.raises(TypeError, match="forward of Layer returned Opaque, in which no tensor is found"):
        layer(leaf(normal(4, 4)))
    with no_grad():
        assert layer(leaf(normal(4, 4))).y.shape == (4, 4)


def test_a_forward_that_does_something_else_the_second_time_is_an_error():
    def function(x, weight):
        return x @ weight if autograd.in_second_run() else x[:2] @ weight

    with pytest.raises(
        RuntimeError, match=r"Layer gave shapes \[\(2, 4\)\] and then, run again, \[\(4, 4\)\]"
    ):
        checkpoint(Layer(function))(leaf(normal(4, 4))).sum().backward()

    def more(x, weight):
        return x @ weight @ weight if autograd.in_second_run() else x @ weight

    with pytest.raises(RuntimeError, match="runs again, but did not run the first time"):
        checkpoint(Layer(more), "matmul")(leaf(normal(4, 4))).sum().backward()
