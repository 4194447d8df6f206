"""Ops made of matrix products: linear layers, attention, convolution. Compute-bound."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from bench.kernels import plain
from bench.kernels.case import Case, Maker, gradient, needs, shape_of, value
from shardrt import Tensor
from shardrt import functional as F
from shardrt.kernels.costs import ON_GPU as costs


def matmul(make: Maker) -> Iterator[Case]:
    module, sizes = make.kernels.matmul, make.sizes
    m, n, k = sizes.multiplied, sizes.width, sizes.width
    a, b, dy = make.numbers(m, k), make.numbers(k, n, seed=1), make.numbers(m, n, seed=2)
    y, da, db = make.blank(m, n), make.blank(m, k), make.blank(k, n)
    text, both, cost = shape_of(m, n, k), ((dy, b.T, da), (a.T, dy, db)), costs.matmul.matmul

    def backward():
        for each in both:
            module.matmul(*each)

    function = lambda torch, a, b: a @ b  # noqa: E731
    yield Case(
        *("matmul", "forward", text, *needs(cost(a, b, y))),
        ours=lambda: module.matmul(a, b, y),
        results=(y,),
        inputs=(a, b),
        plain=plain.matmul,
        peer=value(function),
    )
    yield Case(
        *("matmul", "backward", text, *needs(*(cost(*each) for each in both)), backward),
        results=(da, db),
        inputs=(dy, a, b),
        plain=plain.matmul_backward,
        peer=gradient(function),
    )


def linear(make: Maker) -> Iterator[Case]:
    module, inputs, outputs, function = make.kernels.linear, make.sizes.width, make.sizes.wide, _linear
    x, weight, bias, dy, y, dx, dweight, dbias = _layer(make)
    text, cost = f"{shape_of(len(x), inputs)} -> {outputs}", costs.linear
    back = (
        cost.backward_input(dy, weight, dx),
        cost.backward_parameters(x, dy, dweight, False, dbias, False),
    )

    def backward():
        module.backward_input(dy, weight, dx)
        module.backward_weight(x, dy, dweight, False)
        module.backward_bias(dy, dbias, False)

    yield Case(
        *("linear", "forward", text, *needs(cost.forward(x, weight, bias, y))),
        ours=lambda: module.forward(x, weight, bias, y),
        results=(y,),
        inputs=(x, weight, bias),
        plain=plain.linear,
        peer=value(function),
    )
    yield Case(
        *("linear", "backward", text, *needs(*back), backward),
        results=(dx, dweight, dbias),
        inputs=(dy, x, weight, bias),
        plain=plain.linear_backward,
        peer=gradient(function),
    )


def linear_gelu(make: Maker) -> Iterator[Case]:
    module, inputs, outputs = make.kernels.linear, make.sizes.width, make.sizes.wide
    x, weight, bias, dy, y, dx, dweight, dbias = _layer(make)
    inner, dinner = make.blank(*y.shape), make.blank(*y.shape)
    text, cost = f"{shape_of(len(x), inputs)} -> {outputs}", costs.linear
    back = (
        cost.backward_gelu(dy, inner, dinner, dbias, False),
        cost.backward_input(dinner, weight, dx),
        cost.backward_weight(x, dinner, dweight, False),
    )
    forward = lambda: module.forward_gelu(x, weight, bias, inner, y)  # noqa: E731

    def backward():
        module.backward_gelu(dy, inner, dinner, dbias, False)
        module.backward_input(dinner, weight, dx)
        module.backward_weight(x, dinner, dweight, False)

    function = lambda torch, *given: torch.nn.functional.gelu(_linear(torch, *given), approximate="tanh")  # noqa: E731
    yield Case(
        *("linear_gelu", "forward", text, *needs(cost.forward_gelu(x, weight, bias, inner, y)), forward),
        results=(y,),
        inputs=(x, weight, bias),
        plain=plain.linear_gelu,
        peer=value(function),
    )
    forward()
    yield Case(
        *("linear_gelu", "backward", text, *needs(*back), backward),
        results=(dx, dweight, dbias),
        inputs=(dy, x, weight, bias),
        plain=plain.linear_gelu_backward,
        peer=gradient(function),
    )


def linear_cross_entropy(make: Maker) -> Iterator[Case]:
    """Forward and backward together, in chunks of 128 rows; PyTorch and NumPy hold all logits."""
    sizes = make.sizes
    rows, vocab, width = sizes.classified, sizes.vocab, sizes.width
    x, weight = make.numbers(rows, width), make.numbers(vocab, width, seed=1, scale=0.02)
    targets = make.indices(rows, vocab)
    results = (make.exact(1), make.blank(rows, width), make.blank(vocab, width))

    def ours():
        leaves = Tensor(x, requires_grad=True), Tensor(weight, requires_grad=True)
        made = F.linear_cross_entropy(*leaves, targets)
        made.backward()
        for result, found in zip(results, (made.data, leaves[0].grad, leaves[1].grad), strict=True):
            result[...] = found.reshape(result.shape)

    def peer(torch, x, weight, targets):
        leaves = x.requires_grad_(), weight.requires_grad_()

        def call():
            made = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].T, targets)
            return made.detach().reshape(1), *torch.autograd.grad(made, leaves)

        return call

    def simple(x, weight, targets):
        loss, *gradients = plain.linear_cross_entropy(x, weight, targets)
        return loss.reshape(1), *gradients

    logits, numbers = np.empty((rows, vocab), x.dtype), np.empty(rows, x.dtype)  # never touched
    products = (
        costs.linear.forward(x, weight, None, logits),
        costs.linear.backward_input(logits, weight, x),
        costs.linear.backward_weight(x, logits, weight, False),
    )
    nbytes, flops = needs(*products)
    loss = costs.cross_entropy.forward_in_place(logits, targets, numbers, numbers, -100)
    yield Case(
        *("linear_cross_entropy", "both", f"{shape_of(rows, width)} -> {vocab}", nbytes, flops + loss.flops),
        ours=ours,
        results=results,
        inputs=(x, weight, targets),
        plain=simple,
        peer=peer,
    )


def attention(make: Maker) -> Iterator[Case]:
    """In PyTorch's layout, (batch, heads, time, head_dim)."""
    for name, shape in make.sizes.attentions.items():
        yield from _attention(make, name, *shape)


def _attention(
    make: Maker, name: str, batch: int, heads: int, kv_heads: int, time: int, dim: int, causal: bool
) -> Iterator[Case]:
    module, how = make.kernels.attention, {"causal": causal, "scale": dim**-0.5}
    q, dy = make.numbers(batch, heads, time, dim), make.numbers(batch, heads, time, dim, seed=3)
    k, v = (make.numbers(batch, kv_heads, time, dim, seed=seed) for seed in (1, 2))
    y, dq, dk, dv = (make.blank(*like.shape) for like in (q, q, k, v))
    lse = make.exact(batch, heads, time)
    given, back, cost = (q, k, v, y, lse), (dy, q, k, v, y, lse, dq, dk, dv), costs.attention
    forward = lambda: module.forward(*given, **how)  # noqa: E731

    def function(torch, q, k, v):
        grouped = {"enable_gqa": True} if heads != kv_heads else {}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **grouped)

    yield Case(
        *("attention", "forward", name, *needs(cost.forward(*given, **how)), forward),
        results=(y,),
        inputs=(q, k, v),
        plain=partial(plain.attention, causal=causal),
        peer=value(function),
    )
    forward()
    yield Case(
        *("attention", "backward", name, *needs(cost.backward(*back, **how))),
        ours=lambda: module.backward(*back, **how),
        results=(dq, dk, dv),
        inputs=(dy, q, k, v),
        plain=partial(plain.attention_backward, causal=causal),
        peer=gradient(function),
    )


def conv2d(make: Maker) -> Iterator[Case]:
    for name, shape in make.sizes.convolutions.items():
        yield from _conv2d(make, name, *shape)


def _conv2d(
    make: Maker,
    name: str,
    batch: int,
    channels: int,
    outputs: int,
    window: int,
    stride: int,
    padding: int,
    groups: int,
    size: int,
) -> Iterator[Case]:
    module, side = make.kernels.conv2d, (size + 2 * padding - window) // stride + 1
    x, dy = make.numbers(batch, channels, size, size), make.numbers(batch, outputs, side, side, seed=1)
    weight = make.numbers(outputs, channels // groups, window, window, seed=2, scale=0.1)
    y, dx, dweight = make.blank(*dy.shape), make.blank(*x.shape), make.exact(*weight.shape)
    how = (stride, stride), (padding, padding), (1, 1), groups
    simple = {"stride": stride, "padding": padding, "groups": groups}
    cost = costs.conv2d
    yield Case(
        *("conv2d", "forward", name, *needs(cost.forward(x, weight, None, y, *how))),
        ours=lambda: module.forward(x, weight, None, y, *how),
        results=(y,),
        inputs=(x, weight),
        plain=partial(plain.conv2d, **simple),
        peer=value(lambda torch, x, w: torch.nn.functional.conv2d(x, w, **simple)),
    )
    works: dict[str, tuple[tuple, tuple, Callable]] = {
        "input": ((dy, weight, dx, *how), (dx,), plain.conv2d_input),
        "weight": ((x, dy, dweight, False, *how), (dweight,), plain.conv2d_weight),
    }
    for wanted, (which, (given, results, truth)) in enumerate(works.items()):
        ours, back = (getattr(of, f"backward_{which}") for of in (module, cost))
        yield Case(
            *("conv2d", which, name, *needs(back(*given)), partial(ours, *given), results),
            inputs=(dy, x, weight),
            plain=partial(truth, **simple),
            peer=partial(_conv2d_gradient, wanted, how),
        )


def _conv2d_gradient(wanted: int, how: tuple, torch, dy, x, weight):
    stride, padding, dilation, groups = how
    rest = list(stride), list(padding), list(dilation), False, [0, 0], groups
    mask = [wanted == 0, wanted == 1, False]
    work = torch.ops.aten.convolution_backward
    return lambda: (work(dy, x, weight, None, *rest, mask)[wanted],)


def _layer(make: Maker) -> tuple:
    """x, weight, bias, dy of an MLP's first layer; and room for y, dx, dweight, dbias."""
    rows, inputs, outputs = make.sizes.multiplied, make.sizes.width, make.sizes.wide
    x, dy = make.numbers(rows, inputs), make.numbers(rows, outputs, seed=1)
    weight, bias = make.numbers(outputs, inputs, seed=2, scale=0.02), make.numbers(outputs, seed=3)
    room = (
        make.blank(rows, outputs),
        make.blank(rows, inputs),
        make.exact(outputs, inputs),
        make.exact(outputs),
    )
    return x, weight, bias, dy, *room


def _linear(torch, x, weight, bias):
    return torch.nn.functional.linear(x, weight, bias)


OPS = {
    function.__name__: function
    for function in (matmul, linear, linear_gelu, linear_cross_entropy, attention, conv2d)
}
