"""A linear layer whose three matmuls are in float8: per-tensor scaling, current scaling.

x, the weight and the gradient of the result are each cast with a scale that comes from their own largest
absolute value: x and the weight to E4M3, the gradient to E5M2. Results, the bias and its gradient keep their
type. Each matmul reads both operands along its inner dimension, so backward takes the transposes. Forward
saves the transpose of x, a byte for each element. The weight is freed with its unit, and is cast again.
"""

import warnings
from math import prod
from typing import Any, NamedTuple

import numpy as np

from shardrt import autograd
from shardrt.autograd import Function, Variable, contiguous
from shardrt.functional._arrays import empty, kernels, rows
from shardrt.functional._types import Array

MULTIPLE = 16  # of all sizes of such a matmul


class Operand(NamedTuple):
    """A matrix as a matmul takes it, dense along the inner dimension."""

    bits: Array
    kind: str
    scale: Array


class Float8Linear(Function):
    handles = (1, 2)
    expensive = True

    def forward(self, x: Array, weight: Variable, bias: Variable | None) -> Array:
        y, kind = empty((*x.shape[:-1], weight.shape[0]), x.dtype), kernels().float8.E4M3
        lying, saved = _cast(x, kind, True, self.needs[1])
        matrix, _ = _cast(weight.lent(), kind, True, False)
        _multiply(lying, matrix, rows(y), bias=None if bias is None else contiguous(bias.lent()), fast=True)
        self.saved = (saved, weight, bias, matrix.scale)
        return y

    def resume(self, kept: tuple, x: Array, weight: Variable, bias: Variable | None) -> Array:
        self.saved = (_cast(x, kernels().float8.E4M3, False, self.needs[1])[1], weight, bias, None)
        return kept[0]

    def backward(self, dy: Array) -> tuple:
        x, weight, bias, scale = self.saved
        lying, transposed = _cast(dy, kernels().float8.E5M2, *self.needs[:2])
        dx = None
        if self.needs[0]:
            dx = empty((*dy.shape[:-1], weight.shape[1]), dy.dtype)
            _, matrix = _cast(weight.lent(), kernels().float8.E4M3, False, True, scale)
            _multiply(lying, matrix, rows(dx))
        into = (weight if self.needs[1] else None, bias if self.needs[2] else None)
        return dx, *autograd.call_or_defer(_add_gradients, x, transposed, dy, into=into)


def takes(x: Variable, weight: Variable) -> bool:
    """Whether the matmul of x with a weight marked for float8 can be in float8: by the rows of x.

    The other sizes were checked when the weight was marked. In training it warns, once, where it can't.
    """
    count = prod(x.shape[:-1])
    fits = count > 0 and count % MULTIPLE == 0
    if not fits and weight.requires_grad and autograd.is_grad_enabled():
        message = f"float8: rows that are not a multiple of {MULTIPLE} are multiplied in bfloat16"
        warnings.warn(f"{message}; choose batch and sequence so that batch * sequence is one", stacklevel=3)
    return fits


def _cast(x: Array, kind: str, lying: bool, transposed: bool, scale: Array | None = None) -> tuple:
    """Return x as it lies, (rows, columns), and its transpose, each where it is wanted, else None.

    scale: the scale that an earlier cast of these numbers gave.
    """
    x, known = rows(contiguous(x)), scale is not None
    if not (lying or transposed):
        return None, None
    scale = scale if known else empty((2,), np.float32)
    shapes = x.shape if lying else None, x.shape[::-1] if transposed else None
    bits = [None if shape is None else empty(shape, np.uint8) for shape in shapes]
    kernels().float8.cast(x, kind, *bits, scale, known=known)
    return tuple(None if each is None else Operand(each, kind, scale) for each in bits)


def _multiply(a: Operand, b: Operand, out: Array, **how: Any) -> None:
    """Compute out = a times the transpose of b."""
    kernels().float8.matmul(a.bits, b.bits, out, (a.kind, b.kind), (a.scale, b.scale), **how)


def _add_gradients(
    x: Operand | None, factor: Operand | None, dy: Array, weight: Variable | None, bias: Variable | None
) -> tuple:
    """Of the handles given; their tokens. x, factor: the transposes of x and dy. dy: for the bias."""
    of_weight = of_bias = None
    if weight is not None:
        target, accumulate, of_weight = weight.gradient_target()
        _multiply(factor, x, target, accumulate=accumulate)
    if bias is not None:
        target, accumulate, of_bias = bias.gradient_target()
        kernels().linear.backward_bias(rows(dy), target, accumulate)
    return of_weight, of_bias
