"""The matmuls and the attention of GPT-2 next to PyTorch's on the same arrays, alternating."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..kernels import case as cases
from ..kernels.case import Case, Maker, value
from .clock import Clock, Torch, blank, difference, filled
from .report import agreement
from .state import Run

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


def measure(run: Run, sizes: Sizes | None = None) -> None:
    """A row for each product, for the twelve of the layers together, and for attention."""
    sizes, clock = sizes or Sizes(), Clock()
    torch, seconds = Torch(clock), []
    make, rows = Maker(cases.Sizes(), "bfloat16"), sizes.batch * sizes.time
    with torch.stream():
        for name, (inputs, outputs) in layers(sizes.width).items():
            with run.guarded(name):
                for case in products(make, name, rows, inputs, outputs):
                    seconds.append((case.flops, *compare(run, clock, torch, case)))
        if len(seconds) == 12:
            row(run, "the twelve together", *map(sum, zip(*seconds, strict=True)))
        with run.guarded("up with GELU"):
            compare(run, clock, torch, with_gelu(make, rows, sizes.width, 4 * sizes.width))
        with run.guarded("head"):
            for case in products(make, "head", rows, sizes.width, sizes.vocab):
                compare(run, clock, torch, case)
        with run.guarded("attention"):
            attention(run, clock, torch, make, sizes)


def compare(
    run: Run,
    clock: Clock,
    torch: Torch,
    case: Case,
    name: str = "",
    *,
    theirs: Callable[[], Sequence] | None = None,
    close: float = CLOSE,
    message: str = "",
    **how: int,
) -> tuple[float, float]:
    """A row; (our seconds, PyTorch's; 0 without it).

    theirs: PyTorch's call, where that is not the case's own peer. told: what the check says besides. how: see
    Clock.by_turns.
    """
    if torch.there and theirs is None and case.peer is not None:
        theirs = case.peer(torch.torch, *map(torch.of, case.inputs))
    seconds = clock.by_turns([case.ours] if theirs is None else [case.ours, theirs], **how)
    check = ""
    if theirs is not None:
        off = max(map(difference, map(torch.of, case.results), theirs()))
        check = agreement(off, close) + message
    found = seconds[0], seconds[1] if theirs is not None else 0.0
    row(run, name or case.name, case.flops, *found, check)
    return found


def row(run: Run, name: str, flops: float, ours: float, theirs: float, check: str = "") -> None:
    """Beside PyTorch; without it beside the ceiling."""
    more = {}
    if theirs:
        rate = flops / theirs / 1e12
        more = {"beside": "torch", "theirs": rate, "at_least": LEAST, "goal": GOAL, "check": check}
    elif "matmul" in run.ceilings:
        more = {"beside": "matmul 8192^3", "theirs": run.ceilings["matmul"]}
    run.add(name, flops / ours / 1e12, "TFLOP/s", **more)


def products(make: Maker, name: str, rows: int, inputs: int, outputs: int) -> Iterator[Case]:
    """Forward, the gradient of the input and that of the weight, all bfloat16."""
    x, dy = filled(rows, inputs), filled(rows, outputs, seed=1)
    weight = filled(outputs, inputs, seed=2, scale=0.02)
    y, dx, dweight = (blank(*like.shape) for like in (dy, x, weight))
    for which, call, result, factors in (
        ("forward", ("linear.forward", x, weight, None, y), y, (x, weight.T)),
        ("input gradient", ("linear.backward_input", dy, weight, dx), dx, (dy, weight)),
        ("weight gradient", ("linear.backward_weight", x, dy, dweight, False), dweight, (dy.T, x)),
    ):
        yield make.case(f"{name} {inputs} -> {outputs},", which, "", [call], (result,), factors, _into)


def _into(torch: Any, left: Any, right: Any) -> Callable[[], tuple]:
    """Their product, into an array that is there."""
    out = torch.empty((len(left), right.shape[1]), dtype=left.dtype, device=left.device)
    return lambda: (torch.mm(left, right, out=out),)


def with_gelu(make: Maker, rows: int, inputs: int, outputs: int) -> Case:
    """The MLP's first layer with bias and GELU, what goes into the GELU kept; PyTorch: addmm and gelu."""
    x, weight, bias = filled(rows, inputs), filled(outputs, inputs, scale=0.02), filled(outputs)
    inner, y = blank(rows, outputs), blank(rows, outputs)

    def function(torch: Any, x: Any, weight: Any, bias: Any) -> Any:
        return torch.nn.functional.gelu(torch.addmm(bias, x, weight.t()), approximate="tanh")

    call = ("linear.forward_gelu", x, weight, bias, inner, y)
    name = f"up {inputs} -> {outputs}", "with bias and GELU"
    _, flops = make.needs(("linear.forward", x, weight, bias, y))
    return Case(*name, "", 0, flops, make.call(call), (y,), (x, weight, bias), value(function))


def attention(run: Run, clock: Clock, torch: Torch, make: Maker, sizes: Sizes) -> None:
    """Causal attention over queries, keys and values packed in one array, beside PyTorch's fastest."""
    batch, time, heads = sizes.batch, sizes.time, sizes.heads
    dim = sizes.width // heads
    qkv, dy = filled(batch, time, 3 * sizes.width), filled(batch, time, sizes.width, seed=1)
    inputs, slopes = (_heads(array, 3, heads) for array in (qkv, blank(*qkv.shape)))
    (y,), (upper,) = (_heads(array, 1, heads) for array in (blank(*dy.shape), dy))
    lse, how = blank(batch, heads, time, dtype=np.float32), {"causal": True, "scale": dim**-0.5}
    forward = ("attention.forward", *inputs, y, lse, how)
    backward = ("attention.backward", upper, *inputs, y, lse, *slopes, how)
    _, flops = make.needs(forward)
    peers, backend = _torch_attention(torch, inputs, upper) if torch.there else ((None, None), "")
    works = ("forward", forward, flops, (y,)), ("backward", backward, 2.5 * flops, slopes)
    for (which, call, operations, results), theirs in zip(works, peers, strict=True):
        with run.guarded(f"attention {which}"):
            name = f"{which}, ({batch}, {heads}, {time}, {dim}) causal"
            case = Case("attention", name, "", 0, operations, make.call(call), results, (), None)
            message = f"; torch: {backend}"
            compare(run, clock, torch, case, theirs=theirs, calls=3, close=2 * CLOSE, message=message)


def _torch_attention(torch: Torch, arrays: Sequence, upper: Any) -> tuple[Sequence[Callable | None], str]:
    """(calls of forward and backward, backend's name), of the backend whose calls together are fastest."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    t, found = torch.torch, []
    inputs, dy = [torch.of(array).requires_grad_() for array in arrays], torch.of(upper)

    def forward(backend: Any) -> tuple:
        with sdpa_kernel(backend):
            return (t.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True),)

    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        if found and backend == SDPBackend.MATH:
            break
        try:
            calls = partial(forward, backend), _gradient(t, forward(backend), inputs, dy)
            found.append((torch.seconds(lambda calls=calls: [call() for call in calls]), calls, backend.name))
        except RuntimeError:  # not for these shapes, or not built in
            continue
    _, calls, name = min(found, key=lambda each: each[0]) if found else (0.0, (None, None), "")
    return calls, name


def _gradient(t: Any, y: Any, inputs: Any, dy: Any) -> Callable[[], Sequence]:
    return lambda: t.autograd.grad(y, inputs, dy, retain_graph=True)


def _heads(x: Any, parts: int, heads: int) -> list:
    """(batch, time, parts * width) as that many views (batch, heads, time, head_dim)."""
    batch, time, width = x.shape
    x = x.reshape(batch, time, parts, heads, width // (parts * heads))
    return [x[:, :, part].transpose(0, 2, 1, 3) for part in range(parts)]
