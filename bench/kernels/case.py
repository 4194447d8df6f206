"""One pass of an op: our call on arrays of the current device, what it must move, and PyTorch's way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from shardrt import device as devices
from shardrt import dtypes
from shardrt.kernels.costs import ON_GPU as costs

from ..gpu.clock import blank, element, filled

Array = Any
Peer = Callable[..., Callable[[], Sequence]]  # (torch, *tensors) -> a call that gives the results
Call = Any  # ("module.kernel", *arguments), the last of which may be a dict of named ones; or Moved
Calls = Sequence[Call]

# batch, channels, outputs, window, stride, padding, groups, height and width
CONVOLUTIONS = {
    "ResNet-50 stem": (8, 3, 64, 7, 2, 3, 1, 224),
    "ResNet-50 stage 1, 3 x 3": (8, 64, 64, 3, 1, 1, 1, 56),
    "ResNet-50 stage 1, widen": (8, 64, 256, 1, 1, 0, 1, 56),
    "ResNet-50 stage 1, narrow": (8, 256, 64, 1, 1, 0, 1, 56),
    "ResNet-50 stage 2, stride": (8, 128, 128, 3, 2, 1, 1, 56),
    "ResNet-50 stage 2, shortcut": (8, 256, 512, 1, 2, 0, 1, 56),
    "ResNet-50 stage 2, 3 x 3": (8, 128, 128, 3, 1, 1, 1, 28),
    "ResNet-50 stage 3, 3 x 3": (8, 256, 256, 3, 1, 1, 1, 14),
    "ResNet-50 stage 3, narrow": (8, 1024, 256, 1, 1, 0, 1, 14),
    "ResNet-50 stage 4, 3 x 3": (8, 512, 512, 3, 1, 1, 1, 7),
    "RegNetY-16GF stage 1": (8, 224, 224, 3, 1, 1, 2, 56),
    "RegNetY-16GF stage 2": (8, 448, 448, 3, 1, 1, 4, 28),
    "RegNetY-3.2GF stage 2": (8, 216, 216, 3, 1, 1, 9, 28),
    "RegNetY-800MF stage 2": (8, 144, 144, 3, 1, 1, 9, 28),
    "RegNetY-800MF stage 4": (8, 784, 784, 3, 1, 1, 49, 7),
    "RegNetY-400MF stage 2": (8, 104, 104, 3, 1, 1, 13, 28),
    "depthwise": (8, 128, 128, 3, 1, 1, 128, 28),
    "depthwise, stride": (8, 144, 144, 3, 2, 1, 144, 56),
    "depthwise, 7 x 7": (8, 960, 960, 3, 1, 1, 960, 7),
}
# batch, heads, heads of keys, time, head_dim, causal
ATTENTIONS = {
    "small GPT": (8, 6, 6, 256, 64, True),
    "GPT-2": (2, 12, 12, 1024, 64, True),
    "Llama 3.2 1B": (1, 32, 8, 1024, 64, True),
    "ViT-B/16": (8, 12, 12, 197, 64, False),
}


@dataclass(frozen=True)
class Sizes:
    """What the arrays of all ops are made from; the defaults are larger than a processor's caches.

    tokens: rows of what is done row by row. multiplied, classified: rows of the linear layers and of the
    losses. elements: of a flat shard. planes, side: batch, channels, and height and width of images.
    """

    tokens: int = 8192
    width: int = 768
    heads: int = 12
    time: int = 1024
    vocab: int = 50304
    multiplied: int = 2048
    classified: int = 512
    elements: int = 1 << 24
    planes: tuple[int, int] = (16, 256)
    side: int = 56
    attentions: dict[str, tuple] = field(default_factory=lambda: ATTENTIONS)
    convolutions: dict[str, tuple] = field(default_factory=lambda: CONVOLUTIONS)

    @property
    def wide(self) -> int:
        """The width inside of an MLP."""
        return 4 * self.width


@dataclass(frozen=True)
class Moved:
    """A call of no kernel, and the bytes that it moves."""

    work: Callable[[], Any]
    nbytes: int


@dataclass(frozen=True)
class Case:
    """One pass. nbytes, flops: that it can't do without.

    ours leaves its results in `results`, or gives them where that is empty. peer: the same in PyTorch, from
    `inputs`. judge, where results are random: how wrong they are, from (inputs, results), both float64 on the
    host; else they are compared with the peer's in float64. dtype: where it is not the one asked for.
    """

    op: str
    which: str
    shape: str
    nbytes: float
    flops: float
    ours: Callable[[], Any]
    results: Sequence[Array]
    inputs: Sequence[Array]
    peer: Peer | None
    judge: Callable[[tuple, tuple], float] | None = None
    dtype: str = ""

    @property
    def name(self) -> str:
        """As in a list of cases."""
        return f"{self.op} {self.which}"


@dataclass(frozen=True)
class Ceilings:
    """What this machine does in a second, measured: bytes copied (read and written), flops of a product."""

    copied: float
    multiplied: float

    def seconds(self, case: Case) -> float:
        """The least that a case can take (Williams et al., Roofline, 2009)."""
        return max(case.nbytes / self.copied, case.flops / self.multiplied)

    def bound(self, case: Case) -> str:
        """Which of the two that is."""
        return "bytes" if case.nbytes / self.copied >= case.flops / self.multiplied else "flops"


@dataclass(frozen=True)
class Maker:
    """Gives the ops their kernels, sizes, and arrays on the current device."""

    sizes: Sizes
    dtype: str

    @property
    def kernels(self) -> Any:
        """Those of the current device."""
        return devices.current().kernels

    def numbers(self, *shape: int, seed: int = 0, scale: float = 1.0) -> Array:
        """Normally distributed."""
        return placed(filled(*shape, dtype=self.dtype, seed=seed, scale=scale))

    def blank(self, *shape: int) -> Array:
        """For results."""
        return blank(*shape, dtype=self.dtype)

    def exact(self, *shape: int) -> Array:
        """For statistics and gradients of parameters: float32 where elements have 16 bits."""
        return blank(*shape, dtype=dtypes.exact(element(self.dtype)))

    def indices(self, count: int, size: int) -> Array:
        """Random, int64."""
        return devices.current().asarray(np.random.default_rng(0).integers(0, size, count))

    def case(
        self,
        op: str,
        which: str,
        shape: str,
        calls: Calls,
        results: Sequence[Array],
        inputs: Sequence[Array],
        peer: Peer,
        **more: Any,
    ) -> Case:
        """A pass that is these calls."""
        works = [self.call(call) for call in calls]

        def ours() -> None:
            for work in works:
                work()

        given = ours if len(works) > 1 else works[0], results, inputs, peer
        return Case(op, which, shape, *self.needs(*calls), *given, **more)

    def call(self, call: Call) -> Callable[[], Any]:
        """It, on the kernels of the current device."""
        return call.work if isinstance(call, Moved) else _bound(self.kernels, *call)

    def needs(self, *calls: Call) -> tuple[int, int]:
        """(bytes, operations) that the calls can't do without: kernels' own scratch is not among them."""
        others = sum(call.nbytes for call in calls if isinstance(call, Moved))
        found = [_bound(costs, *call)() for call in calls if not isinstance(call, Moved)]
        return others + sum(cost.nbytes - cost.scratch for cost in found), sum(cost.flops for cost in found)


def _bound(kernels: Any, name: str, *arguments: Any) -> Callable[[], Any]:
    module, function = name.split(".")
    named = arguments[-1] if isinstance(arguments[-1], dict) else {}
    return partial(getattr(getattr(kernels, module), function), *arguments[: -1 if named else None], **named)


def placed(array: Array) -> Array:
    """A copy where the device keeps what ops make: on the CPU in whole cache lines, unlike NumPy's own."""
    device = devices.current()
    target = device.empty(array.shape, array.dtype)
    device.copy(target, array)
    return target


def value(function: Callable) -> Peer:
    """The forward pass of function(torch, *tensors)."""

    def peer(torch: Any, *tensors: Any) -> Callable[[], Sequence]:
        def call() -> Sequence:
            with torch.no_grad():
                return _sequence(function(torch, *tensors))

        return call

    return peer


def gradient(function: Callable, results: int = 1) -> Peer:
    """The backward pass of function(torch, *tensors), of so many results, to all its tensors of floats.

    The peer's tensors begin with the gradients of the results.
    """

    def peer(torch: Any, *tensors: Any) -> Callable[[], Sequence]:
        upper, inputs = tensors[:results], tensors[results:]
        leaves = [tensor.requires_grad_() for tensor in inputs if tensor.is_floating_point()]
        made = _sequence(function(torch, *inputs))
        return lambda: torch.autograd.grad(made, leaves, upper, retain_graph=True)

    return peer


def shape_of(*sizes: int) -> str:
    """For a reader."""
    return " x ".join(map(str, sizes))


def _sequence(results: Any) -> Sequence:
    return results if isinstance(results, (tuple, list)) else (results,)
