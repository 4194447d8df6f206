"""Ops on rows: activations, norms, softmax, rotary, losses, embedding, dropout. Memory-bound."""

from collections.abc import Callable, Iterator
from functools import partial
from math import inf, sqrt

import numpy as np

from bench.kernels import plain
from bench.kernels.case import Case, Maker, gradient, needs, placed, shape_of, value
from shardrt import device as devices
from shardrt.kernels.costs import ON_GPU as costs


def gelu(make: Maker) -> Iterator[Case]:
    return _activation(make, "gelu", "gelu_tanh", partial(_functional, "gelu", approximate="tanh"))


def silu(make: Maker) -> Iterator[Case]:
    return _activation(make, "silu", "silu", partial(_functional, "silu"))


def relu(make: Maker) -> Iterator[Case]:
    return _activation(make, "relu", "relu", partial(_functional, "relu"))


def _functional(name: str, torch, *tensors, **how):
    return getattr(torch.nn.functional, name)(*tensors, **how)


def _activation(make: Maker, op: str, kernel: str, function: Callable) -> Iterator[Case]:
    module, shape = make.kernels.activation, (make.sizes.tokens, make.sizes.wide)
    forward, backward = (getattr(module, f"{kernel}_{which}") for which in ("forward", "backward"))
    x, dy, y = make.numbers(*shape), make.numbers(*shape, seed=1), make.blank(*shape)
    flat = [array.reshape(-1) for array in (dy, x, y)]
    text, cost = shape_of(*shape), costs.activation
    yield Case(
        *(op, "forward", text, *needs(getattr(cost, f"{kernel}_forward")(*flat[1:]))),
        ours=lambda: forward(*flat[1:]),
        results=(y,),
        inputs=(x,),
        plain=getattr(plain, op),
        peer=value(function),
    )
    yield Case(
        *(op, "backward", text, *needs(getattr(cost, f"{kernel}_backward")(*flat))),
        ours=lambda: backward(*flat),
        results=(y,),
        inputs=(dy, x),
        plain=getattr(plain, f"{op}_backward"),
        peer=gradient(function),
    )


def gelu_bias(make: Maker) -> Iterator[Case]:
    """What is left of linear_gelu's backward without its products; PyTorch's are two ops."""
    shape = make.sizes.tokens, make.sizes.wide
    x, dy, dx = make.numbers(*shape), make.numbers(*shape, seed=1), make.blank(*shape)
    dbias = make.exact(make.sizes.wide)

    def peer(torch, dy, x):
        slope = gradient(partial(_functional, "gelu", approximate="tanh"))(torch, dy, x)

        def call():
            (dx,) = slope()
            return dx, dx.sum(0)

        return call

    yield Case(
        *("gelu_bias", "backward", shape_of(*shape)),
        *needs(costs.linear.backward_gelu(dy, x, dx, dbias, False)),
        ours=lambda: make.kernels.linear.backward_gelu(dy, x, dx, dbias, False),
        results=(dx, dbias),
        inputs=(dy, x),
        plain=plain.gelu_bias_backward,
        peer=peer,
    )


def swiglu(make: Maker) -> Iterator[Case]:
    module, rows, width = make.kernels.swiglu, make.sizes.tokens, make.sizes.wide
    x, dy = make.numbers(rows, 2 * width), make.numbers(rows, width, seed=1)
    y, dx = make.blank(rows, width), make.blank(rows, 2 * width)

    def function(torch, x):
        a, b = x.chunk(2, dim=1)
        return torch.nn.functional.silu(a) * b

    yield Case(
        *("swiglu", "forward", shape_of(*x.shape), *needs(costs.swiglu.forward(x, y))),
        ours=lambda: module.forward(x, y),
        results=(y,),
        inputs=(x,),
        plain=plain.swiglu,
        peer=value(function),
    )
    yield Case(
        *("swiglu", "backward", shape_of(*x.shape), *needs(costs.swiglu.backward(dy, x, dx))),
        ours=lambda: module.backward(dy, x, dx),
        results=(dx,),
        inputs=(dy, x),
        plain=plain.swiglu_backward,
        peer=gradient(function),
    )


def add(make: Maker) -> Iterator[Case]:
    shape = make.sizes.tokens, make.sizes.width
    x, other, y = make.numbers(*shape), make.numbers(*shape, seed=1), make.blank(*shape)
    module = make.kernels.elementwise
    yield Case(
        *("add", "forward", shape_of(*shape), *needs(costs.elementwise.add(x, other, y))),
        ours=lambda: module.add(x, other, y),
        results=(y,),
        inputs=(x, other),
        plain=lambda x, other: (x + other,),
        peer=value(lambda torch, x, other: x + other),
    )


def dropout(make: Maker, p: float = 0.1) -> Iterator[Case]:
    """The mask is made from a counter, in both directions; PyTorch's backward reads one that it kept."""
    shape = make.sizes.tokens, make.sizes.width
    x, y, module = make.numbers(*shape), make.blank(*shape), make.kernels.dropout
    given = x.reshape(-1), y.reshape(-1), p, 7, 3, 0
    random = np.random.default_rng(0)

    def simple(x):
        return (np.where(random.random(x.shape, np.float32) >= p, x / (1 - p), 0).astype(x.dtype),)

    yield Case(
        *("dropout", "forward", shape_of(*shape), *needs(costs.dropout.forward(*given))),
        ours=lambda: module.forward(*given),
        results=(y,),
        inputs=(x,),
        plain=simple,
        peer=value(lambda torch, x: torch.nn.functional.dropout(x, p)),
        judge=partial(_dropped, p),
    )


def _dropped(p: float, inputs: tuple, results: tuple) -> float:
    """How far what was kept is from x / (1 - p); infinity where other than the part p was dropped."""
    (x,), (y,) = inputs, results
    kept = y != 0
    if abs(1 - kept.mean() - p) > 6 * sqrt(p * (1 - p) / x.size) + 1 / x.size:
        return inf
    return float(np.abs(y - x / (1 - p))[kept].max() / np.abs(x).max())


def layer_norm(make: Maker) -> Iterator[Case]:
    module, shape, width = make.kernels.layer_norm, (make.sizes.tokens, make.sizes.width), make.sizes.width
    x, dy, y = make.numbers(*shape), make.numbers(*shape, seed=1), make.blank(*shape)
    weight, bias = make.numbers(width, seed=2), make.numbers(width, seed=3)
    mean, rstd, dweight, dbias = *(make.exact(len(x)) for _ in range(2)), *(make.exact(width) for _ in "wb")
    given, back = (x, weight, bias, y, mean, rstd), (dy, x, weight, mean, rstd, y, dweight, dbias, False)
    text, cost, function = shape_of(*shape), costs.layer_norm, _layer_norm
    forward = lambda: module.forward(*given, plain.EPS)  # noqa: E731
    yield Case(
        *("layer_norm", "forward", text, *needs(cost.forward(*given, plain.EPS)), forward),
        results=(y,),
        inputs=(x, weight, bias),
        plain=plain.layer_norm,
        peer=value(function),
    )
    forward()
    yield Case(
        *("layer_norm", "backward", text, *needs(cost.backward(*back))),
        ours=lambda: module.backward(*back),
        results=(y, dweight, dbias),
        inputs=(dy, x, weight, bias),
        plain=plain.layer_norm_backward,
        peer=gradient(function),
    )


def _layer_norm(torch, x, weight, bias):
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, plain.EPS)


def add_layer_norm(make: Maker) -> Iterator[Case]:
    module, shape, width = make.kernels.layer_norm, (make.sizes.tokens, make.sizes.width), make.sizes.width
    x, added, dy, dtotal = (make.numbers(*shape, seed=seed) for seed in range(4))
    weight, bias = make.numbers(width, seed=4), make.numbers(width, seed=5)
    total, y = make.blank(*shape), make.blank(*shape)
    mean, rstd, dweight, dbias = *(make.exact(len(x)) for _ in range(2)), *(make.exact(width) for _ in "wb")
    given = x, weight, bias, y, mean, rstd, plain.EPS, added, total
    back = dy, total, weight, mean, rstd, y, dweight, dbias, False, dtotal
    text, cost = shape_of(*shape), costs.layer_norm
    forward = lambda: module.forward(*given)  # noqa: E731

    def function(torch, x, added, weight, bias):
        total = x + added
        return total, _layer_norm(torch, total, weight, bias)

    yield Case(
        *("add_layer_norm", "forward", text, *needs(cost.forward(*given)), forward),
        results=(total, y),
        inputs=(x, added, weight, bias),
        plain=plain.add_layer_norm,
        peer=value(function),
    )
    forward()
    yield Case(
        *("add_layer_norm", "backward", text, *needs(cost.backward(*back))),
        ours=lambda: module.backward(*back),
        results=(y, dweight, dbias),
        inputs=(dtotal, dy, total, weight, bias),
        plain=plain.add_layer_norm_backward,
        peer=gradient(lambda torch, total, *rest: (total, _layer_norm(torch, total, *rest)), results=2),
    )


def rms_norm(make: Maker) -> Iterator[Case]:
    module, shape, width = make.kernels.rms_norm, (make.sizes.tokens, make.sizes.width), make.sizes.width
    x, dy, y = make.numbers(*shape), make.numbers(*shape, seed=1), make.blank(*shape)
    weight, rstd, dweight = make.numbers(width, seed=2), make.exact(len(x)), make.exact(width)
    given, back = (x, weight, y, rstd, plain.EPS), (dy, x, weight, rstd, y, dweight, False)
    text, cost = shape_of(*shape), costs.rms_norm
    forward = lambda: module.forward(*given)  # noqa: E731
    yield Case(
        *("rms_norm", "forward", text, *needs(cost.forward(*given)), forward),
        results=(y,),
        inputs=(x, weight),
        plain=plain.rms_norm,
        peer=value(_rms_norm),
    )
    forward()
    yield Case(
        *("rms_norm", "backward", text, *needs(cost.backward(*back))),
        ours=lambda: module.backward(*back),
        results=(y, dweight),
        inputs=(dy, x, weight),
        plain=plain.rms_norm_backward,
        peer=gradient(_rms_norm),
    )


def _rms_norm(torch, x, weight):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, plain.EPS)


def add_rms_norm(make: Maker) -> Iterator[Case]:
    module, shape, width = make.kernels.rms_norm, (make.sizes.tokens, make.sizes.width), make.sizes.width
    x, added, dy, dtotal = (make.numbers(*shape, seed=seed) for seed in range(4))
    weight, rstd, dweight = make.numbers(width, seed=4), make.exact(len(x)), make.exact(width)
    total, y = make.blank(*shape), make.blank(*shape)
    given = x, weight, y, rstd, plain.EPS, added, total
    back = dy, total, weight, rstd, y, dweight, False, dtotal
    text, cost = shape_of(*shape), costs.rms_norm
    forward = lambda: module.forward(*given)  # noqa: E731

    def function(torch, x, added, weight):
        total = x + added
        return total, _rms_norm(torch, total, weight)

    yield Case(
        *("add_rms_norm", "forward", text, *needs(cost.forward(*given)), forward),
        results=(total, y),
        inputs=(x, added, weight),
        plain=plain.add_rms_norm,
        peer=value(function),
    )
    forward()
    yield Case(
        *("add_rms_norm", "backward", text, *needs(cost.backward(*back))),
        ours=lambda: module.backward(*back),
        results=(y, dweight),
        inputs=(dtotal, dy, total, weight),
        plain=plain.add_rms_norm_backward,
        peer=gradient(lambda torch, total, weight: (total, _rms_norm(torch, total, weight)), results=2),
    )


def softmax(make: Maker) -> Iterator[Case]:
    module, shape = make.kernels.softmax, (make.sizes.tokens, make.sizes.time)
    x, dy, y, dx = make.numbers(*shape), make.numbers(*shape, seed=1), make.blank(*shape), make.blank(*shape)
    text = shape_of(*shape)
    yield Case(
        *("softmax", "forward", text, *needs(costs.softmax.forward(x, y))),
        ours=lambda: module.forward(x, y),
        results=(y,),
        inputs=(x,),
        plain=plain.softmax,
        peer=value(lambda torch, x: torch.softmax(x, dim=1)),
    )
    module.forward(x, y)
    yield Case(
        *("softmax", "backward", text, *needs(costs.softmax.backward(dy, y, dx))),
        ours=lambda: module.backward(dy, y, dx),
        results=(dx,),
        inputs=(dy, y),
        plain=plain.softmax_backward,
        peer=lambda torch, dy, y: lambda: (torch._softmax_backward_data(dy, y, 1, y.dtype),),
    )


def rotary(make: Maker) -> Iterator[Case]:
    """All heads are turned."""
    module, sizes = make.kernels.rotary, make.sizes
    shape, half = (sizes.tokens, sizes.width), sizes.width // sizes.heads // 2
    split = (sizes.tokens // sizes.time, sizes.time, sizes.heads, 2 * half)
    x, y = make.numbers(*shape), make.blank(*shape)
    angles = np.arange(sizes.time)[:, None] * 10000.0 ** -(np.arange(half) / half)
    cos, sin = (devices.current().asarray(f(angles).astype(x.dtype)) for f in (np.cos, np.sin))
    inputs = (x.reshape(split), cos[:, None], sin[:, None])
    needed = needs(costs.rotary.forward(x, cos, sin, y, sizes.heads))

    def function(torch, x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    for which, work, simple, sign in (
        ("forward", module.forward, plain.rotary, 1),
        ("backward", module.backward, plain.rotary_backward, -1),
    ):
        yield Case(
            *("rotary", which, shape_of(*split), *needed),
            ours=partial(work, x, cos, sin, y, sizes.heads),
            results=(y.reshape(split),),
            inputs=inputs,
            plain=simple,
            peer=value(lambda torch, x, cos, sin, sign=sign: function(torch, x, cos, sign * sin)),
        )


def cross_entropy(make: Maker) -> Iterator[Case]:
    """In place backward: what PyTorch does not offer."""
    module, shape = make.kernels.cross_entropy, (make.sizes.classified, make.sizes.vocab)
    logits, targets, dlogits = make.numbers(*shape), make.indices(*shape), make.blank(*shape)
    losses, lse = make.exact(shape[0]), make.exact(shape[0])
    scale = devices.current().asarray(np.full(1, 1 / shape[0]))
    given, back = (logits, targets, losses, lse, -100), (logits, targets, lse, dlogits, scale, -100)
    text, cost = shape_of(*shape), costs.cross_entropy
    forward = lambda: module.forward(*given)  # noqa: E731
    function = partial(_functional, "cross_entropy")
    yield Case(
        *("cross_entropy", "forward", text, *needs(cost.forward(*given)), forward),
        results=(losses,),
        inputs=(logits, targets),
        plain=plain.cross_entropy,
        peer=value(partial(function, reduction="none")),
    )
    forward()

    def peer(torch, logits, targets):
        logits.requires_grad_()
        loss = function(torch, logits, targets)
        return lambda: torch.autograd.grad(loss, [logits], retain_graph=True)

    yield Case(
        *("cross_entropy", "backward", text, *needs(cost.backward(*back))),
        ours=lambda: module.backward(*back),
        results=(dlogits,),
        inputs=(logits, targets),
        plain=plain.cross_entropy_backward,
        peer=peer,
    )


def embedding(make: Maker) -> Iterator[Case]:
    """Backward fills the table with zeros and adds to it."""
    module, (rows, width) = make.kernels.embedding, (make.sizes.tokens, make.sizes.width)
    table, indices = make.numbers(make.sizes.vocab, width), make.indices(rows, make.sizes.vocab)
    y, dtable = make.numbers(rows, width, seed=1), make.exact(make.sizes.vocab, width)
    text, cost = f"{shape_of(rows, width)} of {make.sizes.vocab}", costs.embedding
    dy = placed(y)  # y is written to

    def backward():
        dtable.fill(0)
        module.backward(indices, dy, dtable)

    yield Case(
        *("embedding", "forward", text, *needs(cost.forward(indices, table, y))),
        ours=lambda: module.forward(indices, table, y),
        results=(y,),
        inputs=(indices, table),
        plain=plain.embedding,
        peer=value(partial(_functional, "embedding")),
    )
    nbytes, flops = needs(cost.backward(indices, dy, dtable))
    yield Case(
        *("embedding", "backward", text, nbytes + dtable.nbytes, flops),
        ours=backward,
        results=(dtable,),
        inputs=(dy, indices, table),
        plain=plain.embedding_backward,
        peer=gradient(partial(_functional, "embedding")),
    )


OPS = {
    function.__name__: function
    for function in (
        *(gelu, gelu_bias, silu, relu, swiglu, add, dropout),
        *(layer_norm, add_layer_norm, rms_norm, add_rms_norm, softmax, rotary, cross_entropy, embedding),
    )
}
