"""Convolutions of ResNet-50 and RegNetY beside PyTorch's, in the faster of the two layouts that it knows."""

from collections.abc import Callable, Iterator
from typing import Any

from bench.gpu.clock import Clock, Torch, blank, filled
from bench.gpu.products import Product, compare
from bench.gpu.state import Run
from shardrt.kernels.costs import ON_GPU as costs

# batch, channels, outputs, window, stride, padding, groups, height and width
SHAPES = {
    "ResNet-50 stage 1, 3 x 3": (64, 64, 64, 3, 1, 1, 1, 56),
    "ResNet-50 stage 3, 3 x 3": (64, 256, 256, 3, 1, 1, 1, 14),
    "RegNetY-16GF stage 2": (64, 448, 448, 3, 1, 1, 4, 28),
}


def measure(run: Run, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
    """Three rows for each shape."""
    clock = Clock()
    torch = Torch(clock)
    with torch.stream():
        for name, shape in (shapes or SHAPES).items():
            with run.guarded(name):
                for product in products(clock, torch, name, *shape):
                    compare(run, clock, product)


def products(
    clock: Clock,
    torch: Torch,
    name: str,
    batch: int,
    channels: int,
    outputs: int,
    window: int,
    stride: int,
    padding: int,
    groups: int,
    size: int,
) -> Iterator[Product]:
    """Forward, the gradient of the input and that of the weight, all bfloat16, (batch, channels, ...)."""
    kernel = clock.device.kernels.conv2d
    side = (size + 2 * padding - window) // stride + 1
    x, dy = filled(batch, channels, size, size), filled(batch, outputs, side, side, seed=1)
    weight = filled(outputs, channels // groups, window, window, seed=2, scale=0.02)
    y, dx, dweight = (blank(*like.shape) for like in (dy, x, weight))
    how = (stride, stride), (padding, padding), (1, 1), groups
    works = {
        "forward": (y, lambda: kernel.forward(x, weight, None, y, *how)),
        "input gradient": (dx, lambda: kernel.backward_input(dy, weight, dx, *how)),
        "weight gradient": (dweight, lambda: kernel.backward_weight(x, dy, dweight, False, *how)),
    }
    flops = costs.conv2d.forward(x, weight, None, y, *how).flops
    for which, (out, ours) in works.items():
        theirs = results = None
        layout = ""
        if torch.there:
            theirs, result, layout = _fastest(torch, which, (x, weight, dy), how)
            results = _both(torch, out, result)
        yield Product(f"{name}, {which}{layout}", flops, ours, theirs, results)


def _fastest(torch: Torch, which: str, arrays: tuple, how: tuple) -> tuple[Callable, Callable, str]:
    """(PyTorch's call, what gives its latest result, its layout), tuned by cuDNN's own benchmark."""
    t, found = torch.torch, []
    t.backends.cudnn.benchmark = True
    for layout in ("contiguous_format", "channels_last"):
        x, weight, dy = (torch.of(a).contiguous(memory_format=getattr(t, layout)) for a in arrays)
        call, result = _kept(_torch_call(t, which, x, weight, dy, *how))
        found.append((torch.seconds(call), call, result, layout))
    _, call, result, layout = min(found, key=lambda each: each[0])
    return call, result, " (torch: NHWC)" if layout == "channels_last" else " (torch: NCHW)"


def _torch_call(
    t: Any,
    which: str,
    x: Any,
    weight: Any,
    dy: Any,
    stride: tuple,
    padding: tuple,
    dilation: tuple,
    groups: int,
) -> Callable[[], Any]:
    if which == "forward":
        return lambda: t.nn.functional.conv2d(x, weight, None, stride, padding, dilation, groups)
    wanted = [which == "input gradient", which == "weight gradient", False]
    rest = list(stride), list(padding), list(dilation), False, [0, 0], groups, wanted
    gradient = t.ops.aten.convolution_backward
    return lambda: gradient(dy, x, weight, None, *rest)[wanted.index(True)]


def _kept(call: Callable[[], Any]) -> tuple[Callable[[], None], Callable[[], Any]]:
    """(the call, its latest result)."""
    last = [None]

    def work() -> None:
        last[0] = call()

    return work, lambda: last[0]


def _both(torch: Torch, ours: Any, result: Callable[[], Any]) -> Callable[[], tuple[Any, Any]]:
    return lambda: (torch.of(ours), result())
