"""Linear layer: y = x weight^T + bias. Three matrix products and one sum over rows."""

from typing import Any

from shardrt.kernels.cpu import matmul as products
from shardrt.kernels.cpu.matmul import matmul
from shardrt.kernels.cpu.reduce import column_sum

Array = Any


def forward(x: Array, weight: Array, bias: Array | None, y: Array) -> None:
    """x (rows, inputs), weight (outputs, inputs), bias (outputs,) or None -> y (rows, outputs)."""
    if bias is not None:
        y[...] = bias  # the product adds to it: one pass less than adding the bias after
    matmul(x, weight.T, y, accumulate=bias is not None)


def backward_input(dy: Array, weight: Array, dx: Array) -> None:
    """dy (rows, outputs), weight (outputs, inputs) -> dx (rows, inputs)."""
    matmul(dy, weight, dx)


def backward_weight(x: Array, dy: Array, dweight: Array, accumulate: bool) -> None:
    """x (rows, inputs), dy (rows, outputs) -> dweight (outputs, inputs), written or added to."""
    matmul(dy.T, x, dweight, accumulate=accumulate)


def backward_bias(dy: Array, dbias: Array, accumulate: bool) -> None:
    """dy (rows, outputs) -> dbias (outputs,), written or added to."""
    column_sum(dy, dbias, accumulate)


def bytes_moved(rows: int, inputs: int, outputs: int, itemsize: int = 4) -> int:
    """Bytes of forward: x, weight, y."""
    return products.bytes_moved(rows, outputs, inputs, itemsize)


def flops(rows: int, inputs: int, outputs: int) -> int:
    """Operations of forward; backward has twice as many."""
    return products.flops(rows, outputs, inputs)
