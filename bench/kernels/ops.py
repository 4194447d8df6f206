"""The table of passes: by op, what is called, on which arrays, and the same in PyTorch.

An op is a function from a Maker to its Cases. Bytes and operations are those that kernels declare
(kernels/cost.py).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf, sqrt
from typing import Any

import numpy as np

from shardrt import Tensor
from shardrt import device as devices
from shardrt import functional as F

from ..gpu.clock import blank, filled
from .case import Array, Calls, Case, Maker, Moved, Peer, gradient, placed, shape_of, value

Pass = tuple[Calls, Sequence[Array], Sequence[Array]]  # calls, their results, and inputs of the others
GELU = {"approximate": "tanh"}
EPS = 1e-5


def both(
    make: Maker,
    op: str,
    shape: str,
    forward: Pass,
    backward: Pass,
    function: Callable,
    slope: Peer | None = None,
) -> Iterator[Case]:
    """The two passes of `function(torch, *inputs)`. slope: its backward, where not `gradient` of it."""
    peers = value(function), slope or gradient(function)
    for which, given, peer in zip(("forward", "backward"), (forward, backward), peers, strict=True):
        made = make.case(op, which, shape, *given, peer)
        yield made
        made.ours()  # backward reads what forward has made


def functional(name: str, torch: Any, *tensors: Any, **how: Any) -> Any:
    """PyTorch's function of that name."""
    return getattr(torch.nn.functional, name)(*tensors, **how)


# -- products


def matmul(make: Maker) -> Iterator[Case]:
    """Cases of a matmul with a square weight, and of its gradients."""
    m, n, k = make.sizes.multiplied, make.sizes.width, make.sizes.width
    a, b, dy = make.numbers(m, k), make.numbers(k, n, seed=1), make.numbers(m, n, seed=2)
    y, da, db = make.blank(m, n), make.blank(m, k), make.blank(k, n)
    back = [("matmul.matmul", dy, b.T, da), ("matmul.matmul", a.T, dy, db)]
    forward = [("matmul.matmul", a, b, y)], (y,), (a, b)
    text = shape_of(m, n, k)
    return both(make, "matmul", text, forward, (back, (da, db), (dy, a, b)), lambda torch, a, b: a @ b)


def linear(make: Maker, *, with_gelu: bool = False) -> Iterator[Case]:
    """The first layer of an MLP."""
    rows, inputs, outputs = make.sizes.multiplied, make.sizes.width, make.sizes.wide
    x, dy = make.numbers(rows, inputs), make.numbers(rows, outputs, seed=1)
    weight, bias = make.numbers(outputs, inputs, seed=2, scale=0.02), make.numbers(outputs, seed=3)
    y, dx, inner, dinner = (make.blank(*like.shape) for like in (dy, x, dy, dy))
    dweight, dbias = make.exact(outputs, inputs), make.exact(outputs)
    if with_gelu:
        calls = [("linear.forward_gelu", x, weight, bias, inner, y)]
        back = [
            ("linear.backward_gelu", dy, inner, dinner, dbias, False),
            ("linear.backward_input", dinner, weight, dx),
            ("linear.backward_weight", x, dinner, dweight, False),
        ]
    else:
        calls = [("linear.forward", x, weight, bias, y)]
        parameters = ("linear.backward_parameters", x, dy, dweight, False, dbias, False)
        back = [("linear.backward_input", dy, weight, dx), parameters]

    def function(torch: Any, *given: Any) -> Any:
        y = functional("linear", torch, *given)
        return functional("gelu", torch, y, **GELU) if with_gelu else y

    given = x, weight, bias
    op, text = "linear_gelu" if with_gelu else "linear", f"{shape_of(rows, inputs)} -> {outputs}"
    results = dx, dweight, dbias
    return both(make, op, text, (calls, (y,), given), (back, results, (dy, *given)), function)


def linear_cross_entropy(make: Maker) -> Iterator[Case]:
    """Forward and backward together, in chunks of 128 rows; PyTorch holds all logits."""
    sizes = make.sizes
    rows, vocab, width = sizes.classified, sizes.vocab, sizes.width
    x, weight = make.numbers(rows, width), make.numbers(vocab, width, seed=1, scale=0.02)
    targets = make.indices(rows, vocab)
    results = (make.exact(1), make.blank(rows, width), make.blank(vocab, width))

    def ours() -> None:
        leaves = Tensor(x, requires_grad=True), Tensor(weight, requires_grad=True)
        made = F.linear_cross_entropy(*leaves, targets)
        made.backward()
        for result, found in zip(results, (made.data, leaves[0].grad, leaves[1].grad), strict=True):
            result[...] = found.reshape(result.shape)

    def peer(torch: Any, x: Any, weight: Any, targets: Any) -> Callable[[], Sequence]:
        leaves = x.requires_grad_(), weight.requires_grad_()

        def call() -> Sequence:
            made = functional("cross_entropy", torch, leaves[0] @ leaves[1].T, targets)
            return made.detach().reshape(1), *torch.autograd.grad(made, leaves)

        return call

    logits, numbers = np.empty((rows, vocab), x.dtype), np.empty(rows, x.dtype)  # never touched
    needed = make.needs(
        ("linear.forward", x, weight, None, logits),
        ("linear.backward_input", logits, weight, x),
        ("linear.backward_weight", x, logits, weight, False),
    )
    _, more = make.needs(("cross_entropy.forward_in_place", logits, targets, numbers, numbers, -100))
    text, inputs = f"{shape_of(rows, width)} -> {vocab}", (x, weight, targets)
    how = results, inputs, peer
    yield Case("linear_cross_entropy", "both", text, needed[0], needed[1] + more, ours, *how)


def attention(make: Maker) -> Iterator[Case]:
    """In PyTorch's layout, (batch, heads, time, head_dim)."""
    for name, (batch, heads, kv_heads, time, dim, causal) in make.sizes.attentions.items():
        q, dy = make.numbers(batch, heads, time, dim), make.numbers(batch, heads, time, dim, seed=3)
        k, v = (make.numbers(batch, kv_heads, time, dim, seed=seed) for seed in (1, 2))
        y, dq, dk, dv = (make.blank(*like.shape) for like in (q, q, k, v))
        lse, how = make.exact(batch, heads, time), {"causal": causal, "scale": dim**-0.5}
        forward = [("attention.forward", q, k, v, y, lse, how)], (y,), (q, k, v)
        back = [("attention.backward", dy, q, k, v, y, lse, dq, dk, dv, how)]
        options = {"is_causal": causal} | ({"enable_gqa": True} if heads != kv_heads else {})
        function = partial(functional, "scaled_dot_product_attention", **options)
        backward = back, (dq, dk, dv), (dy, q, k, v)
        yield from both(make, "attention", name, forward, backward, function)


def conv2d(make: Maker) -> Iterator[Case]:
    """Its two gradients are passes of their own."""
    for name, shape in make.sizes.convolutions.items():
        batch, channels, outputs, window, stride, padding, groups, size = shape
        side = (size + 2 * padding - window) // stride + 1
        x, dy = make.numbers(batch, channels, size, size), make.numbers(batch, outputs, side, side, seed=1)
        weight = make.numbers(outputs, channels // groups, window, window, seed=2, scale=0.1)
        y, dx, dweight = make.blank(*dy.shape), make.blank(*x.shape), make.exact(*weight.shape)
        how = (stride, stride), (padding, padding), (1, 1), groups
        convolve = value(partial(functional, "conv2d", stride=stride, padding=padding, groups=groups))
        slopes = [partial(_conv2d_gradient, wanted, how) for wanted in range(2)]
        for which, kernel, call, result, inputs, peer in (
            ("forward", "forward", (x, weight, None, y), y, (x, weight), convolve),
            ("input", "backward_input", (dy, weight, dx), dx, (dy, x, weight), slopes[0]),
            ("weight", "backward_weight", (x, dy, dweight, False), dweight, (dy, x, weight), slopes[1]),
        ):
            yield make.case(
                "conv2d", which, name, [(f"conv2d.{kernel}", *call, *how)], (result,), inputs, peer
            )


def _conv2d_gradient(wanted: int, how: tuple, torch: Any, dy: Any, x: Any, weight: Any) -> Callable:
    stride, padding, dilation, groups = how
    rest = list(stride), list(padding), list(dilation), False, [0, 0], groups
    mask = [wanted == 0, wanted == 1, False]
    work = torch.ops.aten.convolution_backward
    return lambda: (work(dy, x, weight, None, *rest, mask)[wanted],)


# -- rows


def activation(make: Maker, op: str, kernel: str, **how: str) -> Iterator[Case]:
    """Cases of an activation, forward and backward, over the hidden layer of all tokens."""
    shape = make.sizes.tokens, make.sizes.wide
    x, dy, y = make.numbers(*shape), make.numbers(*shape, seed=1), make.blank(*shape)
    flat = [array.reshape(-1) for array in (dy, x, y)]
    forward = [(f"activation.{kernel}_forward", *flat[1:])], (y,), (x,)
    backward = [(f"activation.{kernel}_backward", *flat)], (y,), (dy, x)
    return both(make, op, shape_of(*shape), forward, backward, partial(functional, op, **how))


def gelu_bias(make: Maker) -> Iterator[Case]:
    """What is left of linear_gelu's backward without its products; PyTorch's are two ops."""
    shape = make.sizes.tokens, make.sizes.wide
    x, dy, dx = make.numbers(*shape), make.numbers(*shape, seed=1), make.blank(*shape)
    dbias = make.exact(make.sizes.wide)

    def peer(torch: Any, dy: Any, x: Any) -> Callable[[], Sequence]:
        slope = gradient(partial(functional, "gelu", **GELU))(torch, dy, x)

        def call() -> Sequence:
            (dx,) = slope()
            return dx, dx.sum(0)

        return call

    calls = [("linear.backward_gelu", dy, x, dx, dbias, False)]
    given = calls, (dx, dbias), (dy, x), peer
    yield make.case("gelu_bias", "backward", shape_of(*shape), *given)


def swiglu(make: Maker) -> Iterator[Case]:
    """Cases of SwiGLU, forward and backward, over the hidden layer of all tokens."""
    rows, width = make.sizes.tokens, make.sizes.wide
    x, dy = make.numbers(rows, 2 * width), make.numbers(rows, width, seed=1)
    y, dx = make.blank(rows, width), make.blank(rows, 2 * width)

    def function(torch: Any, x: Any) -> Any:
        a, b = x.chunk(2, dim=1)
        return functional("silu", torch, a) * b

    forward = [("swiglu.forward", x, y)], (y,), (x,)
    backward = [("swiglu.backward", dy, x, dx)], (dx,), (dy, x)
    return both(make, "swiglu", shape_of(*x.shape), forward, backward, function)


def add(make: Maker) -> Iterator[Case]:
    """The case of a sum of two activations."""
    shape = make.sizes.tokens, make.sizes.width
    x, other, y = make.numbers(*shape), make.numbers(*shape, seed=1), make.blank(*shape)
    calls, peer = [("elementwise.add", x, other, y)], value(lambda torch, x, other: x + other)
    given = calls, (y,), (x, other), peer
    yield make.case("add", "forward", shape_of(*shape), *given)


def dropout(make: Maker, p: float = 0.1) -> Iterator[Case]:
    """The mask is made from a counter, in both directions; PyTorch's backward reads one that it kept."""
    shape = make.sizes.tokens, make.sizes.width
    x, y = make.numbers(*shape), make.blank(*shape)
    calls = [("dropout.forward", x.reshape(-1), y.reshape(-1), p, 7, 3, 0)]
    given = calls, (y,), (x,), value(partial(functional, "dropout", p=p))
    yield make.case("dropout", "forward", shape_of(*shape), *given, judge=partial(_dropped, p))


def _dropped(p: float, inputs: tuple, results: tuple) -> float:
    """How far what was kept is from x / (1 - p); infinity where other than the part p was dropped."""
    (x,), (y,) = inputs, results
    kept = y != 0
    if abs(1 - kept.mean() - p) > 6 * sqrt(p * (1 - p) / x.size) + 1 / x.size:
        return inf
    return float(np.abs(y - x / (1 - p))[kept].max() / np.abs(x).max())


def norm(make: Maker, kernel: str, *, added: bool = False) -> Iterator[Case]:
    """Of x, or of the sum with another, which is a result of its own."""
    count = 2 if kernel == "layer_norm" else 1  # weight and bias, mean and rstd
    rows, width = shape = make.sizes.tokens, make.sizes.width
    x, dy, other, dtotal = (make.numbers(*shape, seed=seed) for seed in range(4))
    parameters = [make.numbers(width, seed=4 + number) for number in range(count)]
    statistics, slopes = ([make.exact(size) for _ in range(count)] for size in (rows, width))
    y, total, dx = (make.blank(*shape) for _ in range(3))
    call = (f"{kernel}.forward", x, *parameters, y, *statistics, EPS)
    back = (f"{kernel}.backward", dy, total if added else x, parameters[0], *statistics, dx, *slopes, False)
    text, results = shape_of(*shape), (dx, *slopes)

    def function(torch: Any, x: Any, weight: Any, *bias: Any) -> Any:
        return functional(kernel, torch, x, weight.shape, weight, *bias, EPS)

    if not added:
        forward, backward = ([call], (y,), (x, *parameters)), ([back], results, (dy, x, *parameters))
        return both(make, kernel, text, forward, backward, function)

    def sums(torch: Any, x: Any, other: Any, *parameters: Any) -> Sequence:
        return after(torch, x + other, *parameters)

    def after(torch: Any, total: Any, *parameters: Any) -> Sequence:
        return total, function(torch, total, *parameters)

    forward = [(*call, other, total)], (total, y), (x, other, *parameters)
    backward = [(*back, dtotal)], results, (dtotal, dy, total, *parameters)
    return both(make, f"add_{kernel}", text, forward, backward, sums, gradient(after, 2))


def softmax(make: Maker) -> Iterator[Case]:
    """Cases of a softmax over rows as long as a sequence, forward and backward."""
    shape = make.sizes.tokens, make.sizes.time
    x, dy, y, dx = make.numbers(*shape), make.numbers(*shape, seed=1), make.blank(*shape), make.blank(*shape)

    def slope(torch: Any, dy: Any, y: Any) -> Callable[[], Sequence]:
        return lambda: (torch._softmax_backward_data(dy, y, 1, y.dtype),)

    forward = [("softmax.forward", x, y)], (y,), (x,)
    backward = [("softmax.backward", dy, y, dx)], (dx,), (dy, y)
    function = partial(functional, "softmax", dim=1)
    return both(make, "softmax", shape_of(*shape), forward, backward, function, slope)


def rotary(make: Maker) -> Iterator[Case]:
    """All heads are turned."""
    sizes = make.sizes
    shape, half = (sizes.tokens, sizes.width), sizes.width // sizes.heads // 2
    split = (sizes.tokens // sizes.time, sizes.time, sizes.heads, 2 * half)
    x, y = make.numbers(*shape), make.blank(*shape)
    angles = np.arange(sizes.time)[:, None] * 10000.0 ** -(np.arange(half) / half)
    cos, sin = (devices.current().asarray(f(angles).astype(x.dtype)) for f in (np.cos, np.sin))

    def function(sign: int, torch: Any, x: Any, cos: Any, sin: Any) -> Any:
        (a, b), sin = x.chunk(2, dim=-1), sign * sin
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    inputs = (x.reshape(split), cos[:, None], sin[:, None])
    for which, sign in (("forward", 1), ("backward", -1)):
        calls, peer = [(f"rotary.{which}", x, cos, sin, y, sizes.heads)], value(partial(function, sign))
        yield make.case("rotary", which, shape_of(*split), calls, (y.reshape(split),), inputs, peer)


def cross_entropy(make: Maker) -> Iterator[Case]:
    """Backward of the mean; PyTorch has none in place."""
    rows, vocab = shape = (make.sizes.classified, make.sizes.vocab)
    logits, targets, dlogits = make.numbers(*shape), make.indices(*shape), make.blank(*shape)
    losses, lse = make.exact(rows), make.exact(rows)
    scale = devices.current().asarray(np.full(1, 1 / rows))

    def slope(torch: Any, logits: Any, targets: Any) -> Callable[[], Sequence]:
        loss = functional("cross_entropy", torch, logits.requires_grad_(), targets)
        return lambda: torch.autograd.grad(loss, [logits], retain_graph=True)

    inputs = logits, targets
    forward = [("cross_entropy.forward", *inputs, losses, lse, -100)], (losses,), inputs
    backward = [("cross_entropy.backward", *inputs, lse, dlogits, scale, -100)], (dlogits,), inputs
    function = partial(functional, "cross_entropy", reduction="none")
    return both(make, "cross_entropy", shape_of(*shape), forward, backward, function, slope)


def embedding(make: Maker) -> Iterator[Case]:
    """Backward fills the table with zeros and adds to it."""
    rows, width = make.sizes.tokens, make.sizes.width
    table, indices = make.numbers(make.sizes.vocab, width), make.indices(rows, make.sizes.vocab)
    dy, y, dtable = make.numbers(rows, width, seed=1), make.blank(rows, width), make.exact(*table.shape)
    forward = [("embedding.forward", indices, table, y)], (y,), (indices, table)
    back = [Moved(partial(dtable.fill, 0), dtable.nbytes), ("embedding.backward", indices, dy, dtable)]
    backward = back, (dtable,), (dy, indices, table)
    text = f"{shape_of(rows, width)} of {make.sizes.vocab}"
    return both(make, "embedding", text, forward, backward, partial(functional, "embedding"))


# -- images


def batch_norm(make: Maker) -> Iterator[Case]:
    """By the statistics of the batch, which forward makes first."""
    shape = (*make.sizes.planes, make.sizes.side, make.sizes.side)
    x, dy, y = make.numbers(*shape), make.numbers(*shape, seed=1), make.blank(*shape)
    weight, bias = make.numbers(shape[1], seed=2), make.numbers(shape[1], seed=3)
    mean, squares, rstd, *sums = (make.exact(shape[1]) for _ in range(5))
    planes, upper, out = (array.reshape(*shape[:2], -1) for array in (x, dy, y))
    count, first = x.size // shape[1], ("batch_norm.statistics", planes, mean, squares)
    make.call(first)()
    rstd[...] = 1 / np.sqrt(squares / count + EPS)
    second = ("batch_norm.backward_sums", upper, planes, mean, rstd, *sums)
    make.call(second)()
    means = [array / count for array in sums]

    def function(torch: Any, x: Any, weight: Any, bias: Any) -> Any:
        return functional("batch_norm", torch, x, None, None, weight, bias, training=True, eps=EPS)

    inputs = x, weight, bias
    forward = [first, ("batch_norm.forward", planes, mean, rstd, weight, bias, out)], (y,), inputs
    back = [second, ("batch_norm.backward_input", upper, planes, mean, rstd, weight, *means, out)]
    backward = back, (y, *sums), (dy, *inputs)
    return both(make, "batch_norm", shape_of(*shape), forward, backward, function)


def pool(make: Maker, kind: str, peer: str) -> Iterator[Case]:
    """As in ResNet."""
    shape = (*make.sizes.planes, make.sizes.side, make.sizes.side)
    how = {"window": 3, "stride": 2, "padding": 1}
    small = *shape[:2], *((shape[2] - 1) // 2 + 1,) * 2
    x, dy, y, dx = make.numbers(*shape), make.numbers(*small, seed=1), make.blank(*small), make.blank(*shape)
    index = devices.current().empty(small, np.int32)
    ours = (array.reshape(-1, *array.shape[2:]) for array in (x, dy, y, dx, index))
    planes, upper, out, slope, where = ours
    found, window = [where] if kind == "max" else [], [(number, number) for number in how.values()]
    forward = [(f"pool.{kind}_forward", planes, out, *found, *window)], (y,), (x,)
    backward = [(f"pool.{kind}_backward", upper, *found, slope, *window)], (dx,), (dy, x)

    def function(torch: Any, x: Any) -> Any:
        return functional(peer, torch, x, *how.values())

    text = f"{shape_of(*shape)}, 3 x 3, stride 2"
    return both(make, f"{kind}_pool", text, forward, backward, function)


# -- flat shards


def copy(make: Maker) -> Iterator[Case]:
    """The case of a copy, the ceiling of kernels that move memory."""
    x, y = make.numbers(make.sizes.elements), make.blank(make.sizes.elements)

    def peer(torch: Any, x: Any) -> Callable[[], Sequence]:
        target = torch.empty_like(x)
        return lambda: (target.copy_(x),)

    calls = [Moved(partial(devices.current().copy, y, x), 2 * x.nbytes)]
    yield make.case("copy", "forward", str(x.size), calls, (y,), (x,), peer)


def cast(make: Maker) -> Iterator[Case]:
    """Between float32 and the bits of the 16-bit types."""
    count = make.sizes.elements
    exact, bits, found = _exact(count), blank(count, dtype=np.uint16), blank(count, dtype=np.float32)
    for kind in ("bfloat16", "float16"):
        for which, call, result, source, peer in (
            ("to", ("cast.pack", exact, bits, kind), bits, exact, _pack),
            ("from", ("cast.unpack", bits, found, kind), found, bits, _unpack),
        ):
            given = [call], (result,), (source,), value(partial(peer, kind))
            made = make.case("cast", f"{which} {kind}", str(count), *given, dtype="float32")
            yield made
            made.ours()


def _pack(kind: str, torch: Any, x: Any) -> Any:
    return x.to(getattr(torch, kind)).view(torch.uint16)


def _unpack(kind: str, torch: Any, x: Any) -> Any:
    return x.view(getattr(torch, kind)).float()


def normal(make: Maker) -> Iterator[Case]:
    """From a counter: each element by itself; the others' depend on those before."""
    count = make.sizes.elements // 4
    numbers = blank(count, dtype=np.float32)

    def peer(torch: Any) -> Callable[[], Sequence]:
        target = torch.empty(count)
        return lambda: (target.normal_(),)

    calls = [("philox.normal", numbers, 7, 3, 0, 0.0, 1.0)]
    given = calls, (numbers,), (), peer
    yield make.case("normal", "forward", str(count), *given, judge=_not_normal, dtype="float32")


def _not_normal(inputs: tuple, results: tuple) -> float:
    """0, or infinity where mean or variance are further off than six of their deviations."""
    (x,) = results
    return 0.0 if abs(x.mean()) < 6 / sqrt(x.size) and abs(x.var() - 1) < 6 * sqrt(2 / x.size) else inf


def sum_ranks(make: Maker) -> Iterator[Case]:
    """What a reduce_scatter adds up: slices of 2 and of 4 ranks, in float32 and sent in bfloat16."""
    count, scale, low = make.sizes.elements, 0.25, "bfloat16"
    out = blank(count, dtype=np.float32)

    def peer(widen: Callable, torch: Any, *parts: Any) -> Any:
        return _sum([widen(torch, part) for part in parts]).mul_(scale)

    for ranks in (2, 4):
        parts = [_exact(count, seed) for seed in range(ranks)]
        bits = [blank(count, dtype=np.uint16) for _ in parts]
        for part, packed in zip(parts, bits, strict=True):
            make.kernels.cast.pack(part, packed, low)
        for which, call, inputs, widen in (
            ("", ("reduce.sum_into", out, parts, scale, False), parts, lambda torch, part: part),
            (f", {low}", ("reduce.sum_packed", out, bits, scale, False, low), bits, partial(_unpack, low)),
        ):
            given = [call], (out,), inputs, value(partial(peer, widen))
            yield make.case("sum_ranks", f"of {ranks}{which}", str(count), *given, dtype="float32")


def _sum(parts: Sequence) -> Any:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def column_sum(make: Maker) -> Iterator[Case]:
    """A bias' gradient."""
    x, out = make.numbers(make.sizes.tokens, make.sizes.wide), make.exact(make.sizes.wide)
    calls, peer = [("reduce.column_sum", x, out, False)], value(lambda torch, x: x.sum(0))
    given = calls, (out,), (x,), peer
    yield make.case("column_sum", "forward", shape_of(*x.shape), *given)


def power_sums(make: Maker) -> Iterator[Case]:
    """For the norm of gradients: exact to 100 bits; the others' in float64, for in float32 they are wrong."""
    x = make.numbers(make.sizes.elements)
    sums = make.kernels.reduce.power_sums

    def peer(torch: Any, x: Any) -> Any:
        return torch.linalg.vector_norm(x, dtype=torch.float64).square().reshape(1)

    needed = make.needs(("reduce.power_sums", x, 2.0))
    given = lambda: (sums(x, 2.0).sum().reshape(1),), (), (x,), value(peer)  # noqa: E731
    yield Case("power_sums", "forward", str(x.size), *needed, *given)


def adamw(make: Maker) -> Iterator[Case]:
    """All float32."""
    lr, decay, betas, eps = 1e-3, 0.1, (0.9, 0.95), 1e-8
    row = [1 - lr * decay, lr / (1 - betas[0]), (1 - betas[1]) ** -0.5, *betas, eps]

    def peer(torch: Any, param: Any, grad: Any) -> Callable[[], Sequence]:
        optimizer = torch.optim.AdamW([param], lr, betas, eps, decay, fused=True)
        return _stepped(optimizer, param, grad, "exp_avg", "exp_avg_sq")

    return _optimizer(make, "adamw", 2, row, (), peer)


def lion(make: Maker) -> Iterator[Case]:
    """All float32; beside four of PyTorch's calls, which has no Lion."""
    lr, decay, betas = 1e-4, 0.1, (0.9, 0.99)

    def peer(torch: Any, param: Any, grad: Any) -> Callable[[], Sequence]:
        moving = torch.zeros_like(param)

        def call() -> Sequence:
            sign = moving.lerp(grad, 1 - betas[0]).sign_()
            moving.lerp_(grad, 1 - betas[1])
            return param.mul_(1 - lr * decay).sub_(sign, alpha=lr), moving

        return call

    return _optimizer(make, "lion", 1, [1 - lr * decay, lr, *betas], (), peer)


def sgd(make: Maker) -> Iterator[Case]:
    """With momentum, all float32."""
    lr, decay, momentum = 1e-3, 1e-4, 0.9

    def peer(torch: Any, param: Any, grad: Any) -> Callable[[], Sequence]:
        optimizer = torch.optim.SGD([param], lr, momentum, weight_decay=decay, fused=True)
        return _stepped(optimizer, param, grad, "momentum_buffer")

    row = [lr, decay, momentum, 1.0]
    return _optimizer(make, "sgd", 1, row, (momentum, False), peer)


def _stepped(optimizer: Any, param: Any, grad: Any, *names: str) -> Callable[[], Sequence]:
    param.requires_grad_().grad = grad

    def call() -> Sequence:
        optimizer.step()
        return param.detach(), *(optimizer.state[param][name] for name in names)

    return call


def _optimizer(
    make: Maker, name: str, states: int, row: list[float], tail: tuple, peer: Peer
) -> Iterator[Case]:
    """The first step. row: what the kernel takes for a range of elements."""
    count = make.sizes.elements
    param, grad, *state = _exact(count), _exact(count, 1), *(_exact(count) for _ in range(states))
    for array in state:
        array.fill(0)
    ranges, inputs = devices.current().asarray(np.array([[0, count, *row]])), (placed(param), grad)
    calls = [(f"{name}.step", param, grad, *state, ranges, *tail)]

    given = calls, (param, *state), inputs, peer
    yield make.case(name, "step", str(count), *given, dtype="float32")


def _exact(count: int, seed: int = 0) -> Array:
    return placed(filled(count, dtype=np.float32, seed=seed))


OPS: dict[str, Callable[[Maker], Iterator[Case]]] = {
    "matmul": matmul,
    "linear": linear,
    "linear_gelu": partial(linear, with_gelu=True),
    "linear_cross_entropy": linear_cross_entropy,
    "attention": attention,
    "conv2d": conv2d,
    "gelu": partial(activation, op="gelu", kernel="gelu_tanh", **GELU),
    "gelu_bias": gelu_bias,
    "silu": partial(activation, op="silu", kernel="silu"),
    "relu": partial(activation, op="relu", kernel="relu"),
    "swiglu": swiglu,
    "add": add,
    "dropout": dropout,
    "layer_norm": partial(norm, kernel="layer_norm"),
    "add_layer_norm": partial(norm, kernel="layer_norm", added=True),
    "rms_norm": partial(norm, kernel="rms_norm"),
    "add_rms_norm": partial(norm, kernel="rms_norm", added=True),
    "softmax": softmax,
    "rotary": rotary,
    "cross_entropy": cross_entropy,
    "embedding": embedding,
    "batch_norm": batch_norm,
    "max_pool": partial(pool, kind="max", peer="max_pool2d"),
    "mean_pool": partial(pool, kind="mean", peer="avg_pool2d"),
    "copy": copy,
    "cast": cast,
    "normal": normal,
    "sum_ranks": sum_ranks,
    "column_sum": column_sum,
    "power_sums": power_sums,
    "adamw": adamw,
    "lion": lion,
    "sgd": sgd,
}
