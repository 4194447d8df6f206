"""Matmuls with a weight in parts: the same calls, so bitwise identical results, on any number of ranks.

Each part of a weight, of its outputs or of its inputs, has separate matmuls, in forward and for all
gradients. Sums over parts are added as neighbours, (0 + 1) + (2 + 3), and a sum over ranks goes on likewise
(comm/reduction.py). Parts are powers of two. Used for the weights that parallel.set_tensor_invariant marks.

On a GPU, and in bfloat16 on the CPU, operands of a matmul are copied to separate memory: strides decide
there which algorithm computes it, on a GPU alignment too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardrt import autograd, device, dtypes
from shardrt.autograd import Function, Variable, contiguous
from shardrt.functional._again import SavedTensor, to_save, unpack
from shardrt.functional._arrays import empty, flat, for_product, kernels, operands, rows
from shardrt.functional._types import Array


@dataclass(frozen=True)
class InParts:
    """Which parts of a weight (outputs, inputs) this rank has.

    Attributes:
        axis: 0 where outputs are split, 1 for inputs.
        parts: where each lies along that axis; in several places where layers lie side by side.
        goes_on: whether ranks add up these sums. Then sums of 16-bit matmuls stay float32 until the ranks
            have added them.
    """

    axis: int
    parts: tuple[tuple[slice, ...], ...]
    goes_on: bool

    @property
    def places(self) -> list[slice]:
        """All parts, in order."""
        return [place for part in self.parts for place in part]

    def sum_dtype(self, dtype: Any) -> Any:
        """The type of a sum of parts of this type."""
        return dtypes.exact(dtype) if self.goes_on else dtype


class Columns(Function):
    """Outputs in parts: nothing is summed in forward; the input's gradient is a sum over parts."""

    handles = (1, 2)
    expensive = True

    def forward(self, x: Array, weight: Variable, bias: Variable | None, how: InParts) -> Array:
        y = empty((*x.shape[:-1], weight.shape[0]), x.dtype)
        low, matrix = operands(x, weight)
        self.saved = (self._input(x, low), weight, bias, how)
        shift = None if bias is None else contiguous(bias.lent())
        for place in how.places:
            own = None if shift is None else apart(shift[place])
            multiplied(kernels().linear.forward, (rows(low), apart(matrix[place]), own), rows(y)[:, place])
        return y

    def resume(self, kept: tuple, x: Array, weight: Variable, bias: Variable | None, how: InParts) -> Array:
        self.saved = (self._input(x, operands(x, weight)[0]), weight, bias, how)
        return kept[0]

    def _input(self, x: Array, low: Array) -> SavedTensor | None:
        """Return x as backward's matmuls need it. low: x as the matmul takes it."""
        return to_save(self, 0, x, low, cheap=False) if self.needs[1] else None

    def backward(self, dy: Array) -> tuple:
        x, weight, bias, how = self.saved
        dx, factor = None, dy if x is None else for_product(dy, x)
        if self.needs[0]:
            dx = empty((*dy.shape[:-1], weight.shape[1]), how.sum_dtype(dy.dtype))
            factor, matrix = operands(factor, weight)
            dy2 = rows(factor)

            def product(part: int, out: Array) -> None:
                for number, place in enumerate(how.parts[part]):
                    multiply = partial(kernels().matmul.matmul, accumulate=number > 0)
                    multiplied(multiply, (apart(dy2[:, place]), apart(matrix[place])), out, own=True)

            add_neighbours(rows(dx), len(how.parts), product, dy.dtype)
        into = (weight if self.needs[1] else None, bias if self.needs[2] else None)
        x = None if x is None else unpack(x)
        return dx, *autograd.call_or_defer(_add_column_gradients, x, factor, dy, how, into=into), None


def _add_column_gradients(
    x: Array | None, factor: Array, dy: Array, how: InParts, weight: Variable | None, bias: Variable | None
) -> tuple:
    """factor: dy as matmuls take it."""
    weight_token = bias_token = None
    if weight is not None:
        dweight, accumulate, weight_token = weight.gradient_target()
        for place in how.places:
            factors = rows(x), apart(rows(factor)[:, place])
            multiplied(kernels().linear.backward_weight, factors, dweight[place], accumulate)
    if bias is not None:
        dbias, accumulate, bias_token = bias.gradient_target()
        kernels().linear.backward_bias(rows(dy), dbias, accumulate)  # each column by itself
    return weight_token, bias_token


class Rows(Function):
    """Inputs in parts: the result is a sum over parts, or this rank's summand of one."""

    handles = (1,)
    expensive = True

    def forward(self, x: Array, weight: Variable, how: InParts) -> Array:
        y = empty((*x.shape[:-1], weight.shape[0]), how.sum_dtype(x.dtype))
        low, matrix = operands(x, weight)
        self.saved, x2 = (low if self.needs[1] else None, weight, how, x.dtype), rows(low)

        def product(part: int, out: Array) -> None:
            (place,) = how.parts[part]
            factors = apart(x2[:, place]), apart(matrix[:, place]), None
            multiplied(kernels().linear.forward, factors, out, own=True)

        add_neighbours(rows(y), len(how.parts), product, x.dtype)
        return y

    def resume(self, kept: tuple, x: Array, weight: Variable, how: InParts) -> Array:
        self.saved = (operands(x, weight)[0] if self.needs[1] else None, weight, how, x.dtype)
        return kept[0]

    def backward(self, dy: Array) -> tuple:
        x, weight, how, dtype = self.saved
        dx, dy = None, dy.astype(dtype, copy=False)
        dy = dy if x is None else for_product(dy, x)
        if self.needs[0]:
            dx = empty((*dy.shape[:-1], weight.shape[1]), dtype)
            dy, matrix = operands(dy, weight)
            for place in how.places:
                factors = rows(dy), apart(matrix[:, place])
                multiplied(kernels().linear.backward_input, factors, rows(dx)[:, place])
        into = (weight if self.needs[1] else None,)
        return dx, *autograd.call_or_defer(_add_row_gradient, x, dy, how, into=into), None


def _add_row_gradient(x: Array, dy: Array, how: InParts, weight: Variable) -> tuple:
    dweight, accumulate, token = weight.gradient_target()
    for place in how.places:
        factors = apart(rows(x)[:, place]), rows(dy)
        multiplied(kernels().linear.backward_weight, factors, dweight[:, place], accumulate)
    return (token,)


def add_neighbours(out: Array, count: int, product: Callable[[int, Array], None], dtype: Any) -> None:
    """Compute out = the sum of the results of product(0, array), product(1, array), ..., added as neighbours.

    Args:
        out: (rows, columns), dense, of `dtype`, the type of the results, or float32.
        count: a power of two. With 16 bits, the sums are float32. It takes memory for log2(count) more of
            `out`, and for another one where `out` has another type.
    """
    waiting: list[Array] = []  # sums of 2^k parts each, the largest first, as a binary counter counts
    for number in range(count):
        total = out if number == 0 and out.dtype == dtype == dtypes.exact(dtype) else empty(out.shape, dtype)
        product(number, total)
        if total.dtype != dtypes.exact(dtype):
            total, rounded = empty(out.shape, dtypes.exact(dtype)), total
            np.copyto(total, rounded, casting="unsafe")
        while number & 1:
            left = waiting.pop()
            if left.size:
                kernels().reduce.sum_into(flat(left), [flat(left), flat(total)], 1.0, False)
            total, number = left, number >> 1
        waiting.append(total)
    if waiting[0] is not out:
        np.copyto(out, waiting[0], casting="unsafe")


def multiplied(
    product: Callable, factors: tuple, out: Array, accumulate: bool | None = None, *, own: bool = False
) -> None:
    """product(*factors, out): factors and `out` may be parts of arrays.

    Args:
        accumulate: None for a product without that argument.
        own: `out` is no part of another array. If the host multiplies by a vector, strides decide which
            routine NumPy calls, so it gets dense copies.
    """
    more = () if accumulate is None else (accumulate,)
    host, vector = as_it_lies(factors[0]), any(1 in array.shape for array in (*factors[:2], out))
    if host and vector:
        factors = tuple(None if array is None else dense(array) for array in factors)
    if own or (host and not vector):
        product(*factors, out, *more)
        return
    whole = dense(out) if accumulate else empty(out.shape, out.dtype)
    product(*factors, whole, *more)
    out[...] = whole


def apart(x: Array) -> Array:
    """A part of an array to be multiplied: as it lies, or where that is not to count a copy."""
    return x if as_it_lies(x) else dense(x)


def dense(x: Array) -> Array:
    """A copy in separate memory, which plans count."""
    y = empty(x.shape, x.dtype)
    y[...] = x
    return y


def as_it_lies(x: Array) -> bool:
    """Whether matmuls with x are bitwise identical for any strides of x: false for oneDNN's bfloat16."""
    return x.dtype != np.uint16 and device.current().matmul_ignores_place()
