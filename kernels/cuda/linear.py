"""Linear layer: y = x weight^T + bias. Three matrix products, the bias in the epilogue of the first."""

from typing import Any

from shardrt.kernels.cuda import _launch
from shardrt.kernels.cuda import matmul as products
from shardrt.kernels.cuda.matmul import matmul
from shardrt.kernels.cuda.reduce import column_sum

Array = Any


def forward(x: Array, weight: Array, bias: Array | None, y: Array) -> None:
    """x (rows, inputs), weight (outputs, inputs), bias (outputs,) or None -> y (rows, outputs)."""
    if x.size == 0:
        y[...] = 0 if bias is None else bias
    elif bias is None:
        matmul(x, weight.T, y)
    else:
        _launch.backend().gemm(x, weight.T, y, accumulate=False, bias=bias)


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
