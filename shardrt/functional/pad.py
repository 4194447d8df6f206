"""Padding: zeros, another number, or repeated elements of the border."""

from collections.abc import Sequence

import numpy as np

from shardrt.autograd import Function
from shardrt.functional._arrays import asarray, empty, tensor
from shardrt.functional._types import Array, Tensor
from shardrt.functional.shape import getitem
from shardrt.functional.words import also

_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}  # PyTorch's names, and NumPy's


class Pad(Function):
    """Negative widths crop."""

    strided = True

    def forward(self, x: Array, widths: tuple[tuple[int, int], ...], value: float) -> Array:
        shape = tuple(n + before + after for n, (before, after) in zip(x.shape, widths, strict=True))
        into = tuple(slice(max(b, 0), n - max(a, 0)) for n, (b, a) in zip(shape, widths, strict=True))
        of = tuple(slice(max(-b, 0), n - max(-a, 0)) for n, (b, a) in zip(x.shape, widths, strict=True))
        self.saved = (x.shape, into, of)
        y = empty(shape, x.dtype)
        y.fill(value)
        y[into] = x[of]
        return y

    def backward(self, dy: Array) -> tuple:
        shape, into, of = self.saved
        dx = empty(shape, dy.dtype)
        dx.fill(0)
        dx[of] = dy[into]
        return dx, None, None


@also(pad="widths")
def pad(x: "Tensor", widths: Sequence[int], mode: str = "constant", value: float | None = None) -> "Tensor":
    """Wider along the last axes: `widths` are (before, after) of the last one, then of the one before it, ...

    Args:
        mode: "constant" fills with `value` (0 if None), and negative widths crop; "reflect", "replicate" and
            "circular" take elements of x.

    Raises:
        ValueError: for an odd number of widths, too many, ones that x is too small for, or another mode.
    """
    x = tensor(x)
    widths = [int(n) for n in widths]
    if len(widths) % 2 or len(widths) > 2 * x.ndim:
        raise ValueError(f"pad: widths must be (before, after) of at most {x.ndim} axes, got {widths}")
    pairs = [(widths[i], widths[i + 1]) for i in range(0, len(widths), 2)]
    pairs = tuple([(0, 0)] * (x.ndim - len(pairs)) + pairs[::-1])
    if any(n + before + after < 0 for n, (before, after) in zip(x.shape, pairs, strict=True)):
        raise ValueError(f"pad: negative widths {widths} remove more than x {x.shape} has")
    if mode == "constant":
        return Pad.apply(x, pairs, 0.0 if value is None else value)
    if mode not in _MODES:
        raise ValueError(f"pad: mode must be 'constant', {', '.join(map(repr, _MODES))}, got {mode!r}")
    for axis, (before, after) in enumerate(pairs):
        least = {"reflect": max(before, after) + 1, "replicate": 1, "circular": max(before, after)}[mode]
        if min(before, after) < 0 or (before or after) and x.shape[axis] < least:
            raise ValueError(f"pad: mode {mode!r} can't pad axis {axis} of {x.shape} by {(before, after)}")
        if before or after:
            index = np.pad(np.arange(x.shape[axis]), (before, after), _MODES[mode])
            x = getitem(x, (slice(None),) * axis + (asarray(index),))
    return x
