"""Ops made of matrix products: linear layers, attention, convolution. Compute-bound."""

from collections.abc import Callable, Iterator
from functools import partial

from bench.kernels import plain
from bench.kernels.case import Case, Maker, gradient, shape_of, value
from shardrt import Tensor
from shardrt import functional as F


def matmul(make: Maker) -> Iterator[Case]:
    module, sizes = make.kernels.matmul, make.sizes
    m, n, k = sizes.multiplied, sizes.width, sizes.width
    a, b, dy = make.numbers(m, k), make.numbers(k, n, seed=1), make.numbers(m, n, seed=2)
    y, da, db = make.blank(m, n), make.blank(m, k), make.blank(k, n)
    nbytes, flops, text = module.bytes_moved(m, n, k, make.itemsize), module.flops(m, n, k), shape_of(m, n, k)

    def backward():
        module.matmul(dy, b.T, da)
        module.matmul(a.T, dy, db)

    function = lambda torch, a, b: a @ b  # noqa: E731
    yield Case(
        *("matmul", "forward", text, nbytes, flops),
        ours=lambda: module.matmul(a, b, y),
        results=(y,),
        inputs=(a, b),
        plain=plain.matmul,
        peer=value(function),
    )
    yield Case(
        *("matmul", "backward", text, 2 * nbytes, 2 * flops, backward),
        results=(da, db),
        inputs=(dy, a, b),
        plain=plain.matmul_backward,
        peer=gradient(function),
    )


def linear(make: Maker) -> Iterator[Case]:
    module, inputs, outputs, function = make.kernels.linear, make.sizes.width, make.sizes.wide, _linear
    x, weight, bias, dy, y, dx, dweight, dbias = _layer(make)
    nbytes, flops = _cost(make)
    text = f"{shape_of(len(x), inputs)} -> {outputs}"

    def backward():
        module.backward_input(dy, weight, dx)
        module.backward_weight(x, dy, dweight, False)
        module.backward_bias(dy, dbias, False)

    yield Case(
        *("linear", "forward", text, nbytes, flops),
        ours=lambda: module.forward(x, weight, bias, y),
        results=(y,),
        inputs=(x, weight, bias),
        plain=plain.linear,
        peer=value(function),
    )
    yield Case(
        *("linear", "backward", text, 2 * nbytes, 2 * flops, backward),
        results=(dx, dweight, dbias),
        inputs=(dy, x, weight, bias),
        plain=plain.linear_backward,
        peer=gradient(function),
    )


def linear_gelu(make: Maker) -> Iterator[Case]:
    module, inputs, outputs = make.kernels.linear, make.sizes.width, make.sizes.wide
    x, weight, bias, dy, y, dx, dweight, dbias = _layer(make)
    inner, dinner = make.blank(*y.shape), make.blank(*y.shape)
    (nbytes, flops), passed = _cost(make), y.nbytes
    text = f"{shape_of(len(x), inputs)} -> {outputs}"
    forward = lambda: module.forward_gelu(x, weight, bias, inner, y)  # noqa: E731

    def backward():
        module.backward_gelu(dy, inner, dinner, dbias, False)
        module.backward_input(dinner, weight, dx)
        module.backward_weight(x, dinner, dweight, False)

    function = lambda torch, *given: torch.nn.functional.gelu(_linear(torch, *given), approximate="tanh")  # noqa: E731
    yield Case(
        *("linear_gelu", "forward", text, nbytes + passed, flops, forward),
        results=(y,),
        inputs=(x, weight, bias),
        plain=plain.linear_gelu,
        peer=value(function),
    )
    forward()
    yield Case(
        *("linear_gelu", "backward", text, 2 * nbytes + 3 * passed, 2 * flops, backward),
        results=(dx, dweight, dbias),
        inputs=(dy, x, weight, bias),
        plain=plain.linear_gelu_backward,
        peer=gradient(function),
    )


def linear_cross_entropy(make: Maker) -> Iterator[Case]:
    """Forward and backward together, in chunks of 128 rows; PyTorch and NumPy hold all logits."""
    sizes, linear, loss = make.sizes, make.kernels.linear, make.kernels.cross_entropy
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

    yield Case(
        *("linear_cross_entropy", "both", f"{shape_of(rows, width)} -> {vocab}"),
        nbytes=3 * linear.bytes_moved(rows, width, vocab, make.itemsize),
        flops=3 * linear.flops(rows, width, vocab) + 2 * loss.flops(rows, vocab),
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
    nbytes = module.bytes_moved(batch, heads, time, dim, make.itemsize)
    flops = module.flops(batch, heads, time, dim, causal)
    forward = lambda: module.forward(q, k, v, y, lse, **how)  # noqa: E731

    def function(torch, q, k, v):
        grouped = {"enable_gqa": True} if heads != kv_heads else {}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **grouped)

    yield Case(
        *("attention", "forward", name, nbytes, flops, forward),
        results=(y,),
        inputs=(q, k, v),
        plain=partial(plain.attention, causal=causal),
        peer=value(function),
    )
    forward()
    yield Case(
        *("attention", "backward", name, 2 * nbytes, 2.5 * flops),
        ours=lambda: module.backward(dy, q, k, v, y, lse, dq, dk, dv, **how),
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
    nbytes = module.bytes_moved(x.shape, weight.shape, y.shape, make.itemsize)
    common = name, nbytes, module.flops(y.shape, weight.shape)
    yield Case(
        *("conv2d", "forward", *common),
        ours=lambda: module.forward(x, weight, None, y, *how),
        results=(y,),
        inputs=(x, weight),
        plain=partial(plain.conv2d, **simple),
        peer=value(lambda torch, x, w: torch.nn.functional.conv2d(x, w, **simple)),
    )
    works: dict[str, tuple[Callable, tuple, Callable]] = {
        "input": (lambda: module.backward_input(dy, weight, dx, *how), (dx,), plain.conv2d_input),
        "weight": (
            lambda: module.backward_weight(x, dy, dweight, False, *how),
            (dweight,),
            plain.conv2d_weight,
        ),
    }
    for wanted, (which, (ours, results, truth)) in enumerate(works.items()):
        yield Case(
            *("conv2d", which, *common, ours, results),
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


def _cost(make: Maker) -> tuple[int, int]:
    """Bytes and flops of that layer's forward."""
    rows, inputs, outputs = make.sizes.multiplied, make.sizes.width, make.sizes.wide
    module = make.kernels.linear
    return module.bytes_moved(rows, inputs, outputs, make.itemsize), module.flops(rows, inputs, outputs)


def _linear(torch, x, weight, bias):
    return torch.nn.functional.linear(x, weight, bias)


OPS = {
    function.__name__: function
    for function in (matmul, linear, linear_gelu, linear_cross_entropy, attention, conv2d)
}
