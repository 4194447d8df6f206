"""The matrix products and the attention of GPT-2 beside PyTorch's on the same arrays, by turns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from bench.gpu.clock import Clock, Torch, blank, difference, filled
from bench.gpu.state import Run
from shardrt.kernels.costs import ON_GPU as costs

LEAST, GOAL = 0.97, 1.02  # of PyTorch's rate
CLOSE = 1e-2  # relative difference in bfloat16


@dataclass(frozen=True)
class Sizes:
    """GPT-2 124M at 32 sequences of 1,024."""

    batch: int = 32
    time: int = 1024
    width: int = 768
    heads: int = 12
    vocab: int = 50304


def layers(width: int) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of GPT-2's four linear layers: each gives three products, together the twelve."""
    return {
        "qkv": (width, 3 * width),
        "output": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }


@dataclass(frozen=True)
class Product:
    """The same product by us and by PyTorch, into arrays of their own."""

    name: str
    flops: float
    ours: Callable[[], Any]
    theirs: Callable[[], Any] | None
    results: Callable[[], tuple[Any, Any]] | None


def measure(run: Run, sizes: Sizes | None = None) -> None:
    """A row for each product, for the twelve of the layers together, and for attention."""
    sizes, clock = sizes or Sizes(), Clock()
    torch, seconds = Torch(clock), []
    with torch.stream():
        for name, (inputs, outputs) in layers(sizes.width).items():
            with run.guarded(name):
                for product in products(clock, torch, name, sizes.batch * sizes.time, inputs, outputs):
                    seconds.append((product.flops, *compare(run, clock, product)))
        if len(seconds) == 12:
            flops, ours, theirs = map(sum, zip(*seconds, strict=True))
            _row(run, "the twelve together", flops, ours, theirs, "")
        with run.guarded("up with GELU"):
            compare(run, clock, with_gelu(torch, sizes))
        with run.guarded("head"):
            for product in products(clock, torch, "head", sizes.batch * sizes.time, sizes.width, sizes.vocab):
                compare(run, clock, product)
        with run.guarded("attention"):
            attention(run, clock, torch, sizes)


def products(
    clock: Clock, torch: Torch, name: str, rows: int, inputs: int, outputs: int
) -> Iterator[Product]:
    """Forward, the gradient of the input and that of the weight, all bfloat16."""
    linear = clock.device.kernels.linear
    x, dy = filled(rows, inputs), filled(rows, outputs, seed=1)
    weight = filled(outputs, inputs, seed=2, scale=0.02)
    y, dx, dweight = (blank(*like.shape) for like in (dy, x, weight))
    flops = costs.linear.forward(x, weight, None, y).flops
    works = {
        "forward": (y, lambda: linear.forward(x, weight, None, y)),
        "input gradient": (dx, lambda: linear.backward_input(dy, weight, dx)),
        "weight gradient": (dweight, lambda: linear.backward_weight(x, dy, dweight, False)),
    }
    if torch.there:
        tx, tdy, tw = map(torch.of, (x, dy, weight))
        factors = {
            "forward": (tx, tw.t()),
            "input gradient": (tdy, tw),
            "weight gradient": (tdy.t(), tx),
        }
    for which, (out, ours) in works.items():
        theirs = results = None
        if torch.there:
            left, right = factors[which]
            other = torch.torch.empty(out.shape, dtype=tx.dtype, device=tx.device)
            theirs = _product(torch, left, right, other)
            results = _both(torch, out, other)
        yield Product(f"{name} {inputs} -> {outputs}, {which}", flops, ours, theirs, results)


def with_gelu(torch: Torch, sizes: Sizes) -> Product:
    """The MLP's first layer with bias and GELU, what goes into the GELU kept; PyTorch: addmm and gelu."""
    linear = Clock().device.kernels.linear
    rows, inputs, outputs = sizes.batch * sizes.time, sizes.width, 4 * sizes.width
    x, weight, bias = filled(rows, inputs), filled(outputs, inputs, scale=0.02), filled(outputs)
    inner, y = blank(rows, outputs), blank(rows, outputs)
    theirs = results = None
    if torch.there:
        tx, tw, tb = map(torch.of, (x, weight, bias))
        gelu, addmm, out = torch.torch.nn.functional.gelu, torch.torch.addmm, [None]

        def theirs() -> None:
            out[0] = gelu(addmm(tb, tx, tw.t()), approximate="tanh")

        results = lambda: (torch.of(y), out[0])  # noqa: E731
    flops = costs.linear.forward(x, weight, bias, y).flops
    ours = lambda: linear.forward_gelu(x, weight, bias, inner, y)  # noqa: E731
    return Product(f"up {inputs} -> {outputs} with bias and GELU", flops, ours, theirs, results)


def _product(torch: Torch, left: Any, right: Any, out: Any) -> Callable[[], Any]:
    return lambda: torch.torch.mm(left, right, out=out)


def _both(torch: Torch, ours: Any, theirs: Any) -> Callable[[], tuple[Any, Any]]:
    return lambda: (torch.of(ours), theirs)


def compare(run: Run, clock: Clock, product: Product) -> tuple[float, float]:
    """A row; (our seconds, theirs; 0 without PyTorch)."""
    works = [product.ours] if product.theirs is None else [product.ours, product.theirs]
    seconds, _ = clock.by_turns(works)
    check = ""
    if product.results is not None:
        off = difference(*product.results())
        check = f"differ by {off:.0e}{'' if off < CLOSE else ' WRONG'}"
    theirs = seconds[1] if product.theirs is not None else 0.0
    _row(run, product.name, product.flops, seconds[0], theirs, check)
    return seconds[0], theirs


def _row(run: Run, name: str, flops: float, ours: float, theirs: float, check: str) -> None:
    more = {}
    if theirs:
        more = {
            "beside": "torch",
            "theirs": flops / theirs / 1e12,
            "at_least": LEAST,
            "goal": GOAL,
            "check": check,
        }
    elif "matmul" in run.ceilings:
        more = {"beside": "matmul 8192^3", "theirs": run.ceilings["matmul"]}
    run.add(name, flops / ours / 1e12, "TFLOP/s", **more)


def attention(run: Run, clock: Clock, torch: Torch, sizes: Sizes) -> None:
    """Causal attention over queries, keys and values packed in one array, beside PyTorch's fastest."""
    kernel = clock.device.kernels.attention
    batch, time, heads = sizes.batch, sizes.time, sizes.heads
    dim = sizes.width // heads
    qkv, dy = filled(batch, time, 3 * sizes.width), filled(batch, time, sizes.width, seed=1)
    y, dqkv = blank(*dy.shape), blank(*qkv.shape)
    lse = blank(batch, heads, time, dtype=np.float32)
    q, k, v = _heads(qkv, 3, heads)
    (y_heads,), (dy_heads,) = _heads(y, 1, heads), _heads(dy, 1, heads)
    how = {"causal": True, "scale": 1 / sqrt(dim)}
    flops = costs.attention.forward(q, k, v, y_heads, lse, **how).flops

    def forward() -> None:
        kernel.forward(q, k, v, y_heads, lse, **how)

    def backward() -> None:
        kernel.backward(dy_heads, q, k, v, y_heads, lse, *_heads(dqkv, 3, heads), **how)

    works = {"forward": (forward, flops), "backward": (backward, 2.5 * flops)}
    peers = _torch_attention(torch, (qkv, dy), heads) if torch.there else {}
    for which, (ours, operations) in works.items():
        with run.guarded(f"attention {which}"):
            theirs, result, backend = peers.get(which, (None, None, ""))
            seconds, _ = clock.by_turns([ours] if theirs is None else [ours, theirs], calls=3)
            check = ""
            if theirs is not None:
                off = difference(torch.of(y if which == "forward" else dqkv), result())
                check = f"differ by {off:.0e}{'' if off < 2 * CLOSE else ' WRONG'}; torch: {backend}"
            name = f"attention {which}, ({batch}, {heads}, {time}, {dim}) causal"
            _row(run, name, operations, seconds[0], seconds[1] if theirs else 0.0, check)


def _torch_attention(torch: Torch, arrays: tuple[Any, Any], heads: int) -> dict[str, tuple]:
    """which -> (call, its result, backend's name), of the backend whose forward and backward is fastest."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    t = torch.torch
    qkv, dy = map(torch.of, arrays)
    batch, time, width = dy.shape
    split = (batch, time, 3, heads, width // heads)
    inputs = (
        qkv.requires_grad_().view(split).permute(2, 0, 3, 1, 4).unbind(0)
    )  # (batch, heads, time, head_dim)
    dy_heads = dy.view(batch, time, heads, width // heads).transpose(1, 2)

    def forward(backend: Any) -> Any:
        with sdpa_kernel(backend):
            return t.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)

    def packed_gradient(backward: Callable[[], Any]) -> Any:
        return t.stack([g.transpose(1, 2) for g in backward()], dim=2).reshape(batch, time, 3 * width)

    best = None
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        if best is not None and backend == SDPBackend.MATH:
            break
        try:
            y = forward(backend)
            backward = _gradient(t, y, inputs, dy_heads)
            seconds = torch.seconds(lambda b=backend, g=backward: (forward(b), g()))
        except RuntimeError:  # not for these shapes, or not built in
            continue
        if best is None or seconds < best[0]:
            best = seconds, backend, y, backward
    if best is None:
        return {}
    _, backend, y, backward = best
    packed = y.detach().transpose(1, 2).reshape(batch, time, width)
    return {
        "forward": (lambda: forward(backend), lambda: packed, backend.name),
        "backward": (backward, lambda: packed_gradient(backward), backend.name),
    }


def _gradient(t: Any, y: Any, inputs: Any, dy: Any) -> Callable[[], Any]:
    return lambda: t.autograd.grad(y, inputs, dy, retain_graph=True)


def _heads(x: Any, parts: int, heads: int) -> list:
    """(batch, time, parts * width) as that many views (batch, heads, time, head_dim)."""
    batch, time, width = x.shape
    x = x.reshape(batch, time, parts, heads, width // (parts * heads))
    return [x[:, :, part].transpose(0, 2, 1, 3) for part in range(parts)]
