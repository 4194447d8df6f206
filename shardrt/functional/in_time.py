"""Gradients that are sums over time, in parts of the time: like in_parts.py, for sums over time.

With sequence parallelism each rank has a slice of the time, and all of the parameters of norms, of positions
and of vectors added to each position. Their gradients are then summed at once, by the backward of each op:
over the rows of each part of the time, over the parts as neighbours, and over ranks. For parameters that
parallel.set_tensor_invariant marks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardrt import dtypes
from shardrt.autograd import Function, Variable
from shardrt.comm import Communicator
from shardrt.functional._arrays import empty, flat, kernels, rows
from shardrt.functional._types import Array, Tensor
from shardrt.functional.collective import named, summed
from shardrt.functional.elementwise import add
from shardrt.functional.in_parts import add_neighbours, dense


@dataclass(frozen=True)
class InTime:
    """count: parts of the time on this rank. communicator: of the ranks with the other parts."""

    count: int
    communicator: Communicator

    def places(self, x: Array) -> list[tuple]:
        """Where each part lies in an array (..., time, width).

        Raises:
            ValueError: where they are not equal.
        """
        each, rest = divmod(x.shape[-2], self.count)
        if rest:
            raise ValueError(
                f"set_tensor_invariant: {x.shape[-2]} positions can't be split into {self.count} equal parts"
            )
        return [(..., slice(i * each, (i + 1) * each), slice(None)) for i in range(self.count)]

    def total(self, product: Callable[[int, Array], None], shape: tuple[int, int], dtype: Any) -> Array:
        """The sum over parts and ranks of the results of product(part, array)."""
        out = empty(shape, dtypes.exact(dtype))
        add_neighbours(out, self.count, product, out.dtype)
        return self.joined(out)

    def joined(self, gradient: Array) -> Array:
        """The sum over ranks."""
        alone = self.communicator.size == 1
        return gradient if alone else summed(gradient, self.communicator, named("in_time"))


def put(handle: Variable | None, gradient: Array) -> Any:
    """Add the gradient of a parameter to its sum so far; gives the token for it."""
    if handle is None:
        return None
    target, accumulate, token = handle.gradient_target()
    if accumulate:
        target += gradient.reshape(target.shape)
    else:
        np.copyto(target, gradient.reshape(target.shape), casting="unsafe")
    return token


def norm_gradients(
    how: InTime,
    arrays: tuple[Array, Array, Array | None],
    statistics: tuple[Array, ...],
    dx: Array | None,
    backward: Callable,
    parameters: int,
) -> Array:
    """The gradients (parameters, width) of a norm over the last dimension; dx is written.

    Args:
        arrays: dy, x and what is added to dx or None, (..., time, width).
        statistics: a number for each row. backward(dy, x, more, statistics, dx, gradients): of some rows.
    """
    dy, x, more = arrays
    by_time = [each.reshape(x.shape[:-1]) for each in statistics]
    places = how.places(x)

    def product(part: int, out: Array) -> None:
        place = places[part]
        own = [None if array is None else rows(dense(array[place])) for array in (dy, x, more)]
        numbers = [flat(dense(each[place[:2]])) for each in by_time]
        down = None if dx is None else empty(x[place].shape, x.dtype)
        backward(*own, numbers, None if down is None else rows(down), out)
        if down is not None:
            dx[place] = down

    return how.total(product, (parameters, x.shape[-1]), x.dtype)


class AddBias(Function):
    """x + bias, at each position."""

    def forward(self, x: Array, bias: Array, how: InTime) -> Array:
        self.saved = (how, bias.dtype)
        y = empty(x.shape, x.dtype)
        np.add(x, bias, out=y)
        return y

    def backward(self, dy: Array) -> tuple:
        (how, dtype), dbias = self.saved, None
        if self.needs[1]:
            places = how.places(dy)

            def product(part: int, out: Array) -> None:
                kernels().linear.backward_bias(rows(dense(dy[places[part]])), out[0], False)

            dbias = how.total(product, (1, dy.shape[-1]), dy.dtype)[0].astype(dtype, copy=False)
        return dy, dbias, None


def add_bias(x: "Tensor", bias: "Tensor") -> "Tensor":
    """Return x (..., time, width) + bias (width,)."""
    how = getattr(bias, "in_parts", None)
    return add(x, bias) if how is None else AddBias.apply(x, bias, how)
