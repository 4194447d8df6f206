"""Casts between float types; 16-bit ones as float32 numbers rounded to the values of the type."""

from typing import Any

import numpy as np

from shardrt import device, dtypes
from shardrt.autograd import Function
from shardrt.functional._arrays import empty, flat, floating, kernels
from shardrt.functional._types import Array, Tensor


class Convert(Function):
    strided = True

    def forward(self, x: Array, dtype: str) -> Array:
        self.saved = (x.dtype,)
        return _convert(x, dtype)

    def backward(self, dy: Array) -> tuple:
        (dtype,) = self.saved
        return _convert(dy, dtype), None


class Round(Function):
    def forward(self, x: Array, kind: str) -> Array:
        self.saved = (kind,)
        return _rounded(x, kind)

    def backward(self, dy: Array) -> tuple:
        (kind,) = self.saved
        return _rounded(dy, kind), None


def cast(x: "Tensor", dtype: str) -> "Tensor":
    """`x` as "float32", "float64", "bfloat16", "float16", or such a NumPy dtype; `x` itself if it is that.

    float32 and float64 are converted into each other. "bfloat16" and "float16" give a float32 tensor whose
    values are rounded to the nearest of that type (ties to even; too large is infinity), and its gradient is
    rounded likewise, as if it had been computed in that type; a cast of it to "float32" is the tensor itself.
    On a device that computes in 16 bits they are types like the others.

    Integers become float32 first.

    Raises:
        ValueError: for another dtype.
    """
    dtype = dtypes.named("cast: dtype", dtype)
    x = floating(x)
    if dtype in dtypes.LOW and device.current().compute_dtype(dtype).name != dtype:
        return Round.apply(cast(x, dtypes.float32), dtype)
    dtype = device.current().compute_dtype(dtype)
    return x if x.dtype == dtype else Convert.apply(x, dtype)


def _convert(x: Array, dtype: Any) -> Array:
    y = empty(x.shape, dtype)
    np.copyto(y, x, casting="unsafe")  # bfloat16 is no kind that NumPy knows
    return y


def _rounded(x: Array, kind: str) -> Array:
    y = empty(x.shape, x.dtype)
    kernels().cast.round_to(flat(x), flat(y), kind)
    return y
