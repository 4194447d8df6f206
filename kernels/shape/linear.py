"""What a linear layer costs.

Epilogues of cublasLt (GELU, its slope, the sum for the gradient of a bias) are assumed to be there for all
types but float64, and to be faster than kernels of their own; addresses to be multiples of 16 bytes.
"""

from shardrt.kernels.shape._cost import Array, Cost, cost, real, upto
from shardrt.kernels.shape.matmul import matmul
from shardrt.kernels.shape.reduce import ROWS, column_sum

INPUT_AGAIN = False
BLOCK = 1 << 62
_MULTIPLE = 8  # of columns that a GELU in an epilogue takes


def forward(x: Array, weight: Array, bias: Array | None, y: Array) -> Cost:
    (rows, inputs), outputs = x.shape, len(weight)
    launches = 1 if x.size and y.size else min(y.size, 1)
    return _product((x, weight, bias), (y,), rows, outputs, inputs, launches)


def forward_gelu(x: Array, weight: Array, bias: Array | None, inner: Array, y: Array) -> Cost:
    (rows, inputs), outputs = x.shape, len(weight)
    whole = _product((x, weight, bias), (inner, y), rows, outputs, inputs, 1, 18 * y.size)
    if x.size and _in_epilogue(inner):
        return whole
    return whole._replace(nbytes=whole.nbytes + inner.nbytes, launches=2 if y.size else 0)


def backward_gelu(dy: Array, inner: Array, dinner: Array, dbias: Array | None, accumulate: bool) -> Cost:
    rows, columns = inner.shape
    launches = int(inner.size > 0) + int(dbias is not None and columns > 0)
    scratch = upto(rows, ROWS) * columns * real(inner)
    added = dbias if accumulate else None
    how = {"launches": launches, "sizes": (rows, columns), "scratch": scratch}
    return cost((dy, inner, added), (dinner, dbias), 28 * inner.size, **how)


def backward_input(dy: Array, weight: Array, dx: Array) -> Cost:
    return matmul(dy, weight, dx)


def backward_input_gelu(dy: Array, weight: Array, inner: Array, dinner: Array) -> Cost:
    if not (dy.size and _in_epilogue(inner)):
        return cost((), (), 0, launches=0, value=False)
    (rows, outputs), inputs = dy.shape, weight.shape[1]
    found = _product((dy, weight, inner), (dinner,), rows, inputs, outputs, 1, 28 * inner.size)
    return found._replace(value=True)


def backward_weight(x: Array, dy: Array, dweight: Array, accumulate: bool, first: int = 0) -> Cost:
    own = dy if len(dweight) == dy.shape[1] else dy[:, first : first + len(dweight)]
    return matmul(own.T, x, dweight, accumulate=accumulate)


def backward_bias(dy: Array, dbias: Array, accumulate: bool) -> Cost:
    return column_sum(dy, dbias, accumulate)


def backward_parameters(
    x: Array, dy: Array, dweight: Array, accumulate: bool, dbias: Array, accumulate_bias: bool
) -> Cost:
    (rows, inputs), outputs = x.shape, dy.shape[1]
    kind = real(dy)
    reads = dy, x, dweight if accumulate else None, dbias if accumulate_bias else None
    if x.size and dweight.dtype.itemsize == kind == 4:  # sums come in the type of dweight
        direct = not accumulate_bias and dbias.dtype.itemsize == kind
        launches, scratch = (1, 0) if direct else (2, outputs * kind)
    else:
        weight, bias = backward_weight(x, dy, dweight, accumulate), backward_bias(dy, dbias, accumulate_bias)
        launches, scratch = weight.launches + bias.launches, upto(rows, ROWS) * outputs * kind
    how = {"launches": launches, "sizes": (outputs, inputs, rows), "scratch": scratch}
    return cost(reads, (dweight, dbias), 2 * rows * inputs * outputs + dy.size, **how)


def _product(reads: tuple, writes: tuple, m: int, n: int, k: int, launches: int, more: int = 0) -> Cost:
    return cost(reads, writes, 2 * m * n * k + more, launches=launches, sizes=(m, n, k))


def _in_epilogue(inner: Array) -> bool:
    """Whether such a GELU is computed by the product."""
    return inner.dtype.itemsize < 8 and inner.shape[1] % _MULTIPLE == 0
