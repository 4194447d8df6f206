"""Matmuls of experts: all groups in one launch, or in one cuBLAS call, against a call for each.

These are the three ways of kernels/cuda/grouped.py. It takes cuBLAS where that can, and else one of the
others by a group's rows. Each is timed on the GPU alone, behind a queue, and with the host that launches it:
a layer's forward and both gradients. The gradients of weights are float32, which cuBLAS does not write from
factors of 16 bits, so they are made as without it. What is chosen is beside PyTorch's forward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import shardrt
from shardrt.kernels.cuda import grouped

from .clock import Clock, Torch, blank, difference, filled
from .products import CLOSE
from .report import agreement
from .state import Run


@dataclass(frozen=True)
class Shape:
    """A layer of all experts."""

    experts: int
    inputs: int
    outputs: int


SHAPES = {
    "OLMoE's up": Shape(64, 2048, 2048),
    "Qwen3-MoE's up": Shape(128, 2048, 1536),
    "8 x 1024": Shape(8, 1024, 1024),
}
ROWS = (4, 16, 64, 256)  # of each expert


def measure(run: Run, shapes: dict[str, Shape] | None = None, rows: tuple[int, ...] = ROWS) -> None:
    """Five rows for each shape and number of rows."""
    clock = Clock()
    torch = Torch(clock)
    with torch.stream():
        for name, shape in (shapes or SHAPES).items():
            for count in rows:
                with run.guarded(f"{name}, {count} rows each"):
                    compare(run, clock, torch, f"{name}, {count} rows each", shape, count)


def compare(run: Run, clock: Clock, torch: Torch, name: str, shape: Shape, rows: int) -> None:
    """Time grouped matmuls next to PyTorch's, with `rows` rows for each expert."""
    layer = Layer(shape, rows)
    works = [layer.step, layer.with_limit(1 << 62), layer.with_limit(0)]
    results = []
    for work in works:
        work()
        results.append([array.astype("float32") for array in layer.results])
    off = max(float(abs(a - b).max() / abs(b).max()) for *both, b in zip(*results, strict=True) for a in both)
    beside = {"beside": "cublasLt, one by one", "check": agreement(off, CLOSE)}
    for how, times in (("GPU", clock.by_turns(works)), ("with the host", with_host(clock, works))):
        chosen, together, apart = (1e6 * seconds for seconds in times)
        run.add(f"{name}, {how}", together, "us", theirs=apart, **beside)
        run.add(f"{name}, by cuBLAS, {how}", chosen, "us", theirs=apart, **beside)
    if torch.there and hasattr(torch.torch.nn.functional, "grouped_mm"):
        theirs, result = layer.of_torch(torch)
        ours, theirs = with_host(clock, [layer.forward, theirs])
        off = difference(torch.of(layer.y), result())
        more = {"beside": "torch grouped_mm", "theirs": 1e6 * theirs, "check": agreement(off, CLOSE)}
        run.add(f"{name}, forward as chosen", 1e6 * ours, "us", **more)


class Layer:
    """Arrays in bfloat16, the gradient of the weights in float32."""

    def __init__(self, shape: Shape, rows: int) -> None:
        self.counts = (rows,) * shape.experts
        total = rows * shape.experts
        self.x, self.dy = filled(total, shape.inputs), filled(total, shape.outputs, seed=1)
        self.weight = filled(shape.experts, shape.outputs, shape.inputs, seed=2, scale=0.02)
        self.y, self.dx = blank(*self.dy.shape), blank(*self.x.shape)
        self.dweight = blank(*self.weight.shape, dtype="float32")
        self.results = self.y, self.dx, self.dweight

    def forward(self) -> None:
        grouped.forward(self.x, self.weight, self.counts, self.y)

    def step(self) -> None:
        """Forward and both gradients, as chosen."""
        self.forward()
        grouped.backward_input(self.dy, self.weight, self.counts, self.dx)
        grouped.backward_weight(self.x, self.dy, self.counts, self.dweight, False)

    def with_limit(self, limit: int) -> Callable[[], None]:
        """The same without cuBLAS, in one launch each up to this work of a group."""

        def work() -> None:
            with few(limit), deterministic():
                self.step()

        return work

    def of_torch(self, torch: Torch) -> tuple[Callable[[], None], Callable[[], Any]]:
        """(PyTorch's forward, what gives its result)."""
        t, made = torch.torch, [None]
        x, weight = torch.of(self.x), torch.of(self.weight).transpose(1, 2)
        ends = t.tensor(self.counts).cumsum(0).to(t.int32).to(x.device)

        def call() -> None:
            made[0] = t.nn.functional.grouped_mm(x, weight, offs=ends)

        return call, lambda: made[0]


@contextmanager
def deterministic() -> Iterator[None]:
    """Algorithms that leave cuBLAS's grouped products out."""
    before = shardrt.are_deterministic_algorithms_enabled()
    shardrt.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        shardrt.use_deterministic_algorithms(before)


@contextmanager
def few(limit: int) -> Iterator[None]:
    """Another limit than the library's."""
    before, grouped.FEW = grouped.FEW, limit
    try:
        yield
    finally:
        grouped.FEW = before


def with_host(clock: Clock, works: list[Callable[[], Any]]) -> tuple[float, ...]:
    """Seconds of a call of each where nothing is queued before: the least of rounds by turns."""
    for work in works:
        work()
    times = [[clock.on_host(work, calls=20) for work in works] for _ in range(5)]
    return tuple(map(min, zip(*times, strict=True)))
