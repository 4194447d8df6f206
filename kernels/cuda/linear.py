"""Linear layer: y = x weight^T + bias, or GELU of that. Three matmuls.

The bias, GELU, GELU's backward and the gradient of the bias are in epilogues of these where cublasLt has such
a product and it takes less time.
"""

from shardrt.kernels.cost import cost
from shardrt.kernels.cuda import _launch
from shardrt.kernels.cuda._launch import Array
from shardrt.kernels.cuda.activation import gelu_tanh_forward
from shardrt.kernels.cuda.matmul import matmul
from shardrt.kernels.cuda.reduce import ROWS, column_grid, column_sum, combine_blocks

INPUT_AGAIN = False  # whether a norm or an activation is to make an input again for backward, not keep it
# cublasLt chooses by sizes, so rows of a weight's gradient need not have the bits of the whole.
BLOCK = 1 << 62


def forward(x: Array, weight: Array, bias: Array | None, y: Array) -> None:
    """Compute y (rows, outputs) from x (rows, inputs), weight (outputs, inputs), bias (outputs,) or None."""
    if x.size == 0:
        y[...] = 0 if bias is None else bias
    elif bias is None:
        matmul(x, weight.T, y)
    else:
        _launch.backend().matmuls.gemm(x, weight.T, y, accumulate=False, bias=bias)


def forward_gelu(x: Array, weight: Array, bias: Array | None, inner: Array, y: Array) -> None:
    """As forward, to inner (rows, outputs), and y = GELU of it in the tanh form (activation.py)."""

    def apart(y: Array) -> None:
        forward(x, weight, bias, inner)
        gelu_tanh_forward(inner.reshape(-1), y.reshape(-1))

    if not (x.size and _launch.backend().matmuls.gemm_gelu(x, weight.T, bias, inner, y, apart)):
        apart(y)


def backward_gelu(dy: Array, inner: Array, dinner: Array, dbias: Array | None, accumulate: bool) -> None:
    """Set dinner (rows, outputs) from dy, inner; dbias (outputs,) or None: its sum over rows, or added.

    dbias may be of another type than dinner: sums are float32 (float64 in float64), rounded once.
    """
    rows, columns = inner.shape
    blocks = -(-rows // ROWS)
    partials = _launch.empty((blocks, columns), _launch.accumulator(inner.dtype))
    if rows and columns:
        wide, grid, threads = column_grid(rows, columns, dy, inner, dinner, partials)
        args = (dy, inner, dinner, partials, rows, columns, wide)
        _launch.launch("linear", "gelu_backward", inner.dtype, grid, args, threads=threads)
    if dbias is not None:
        combine_blocks(partials, dbias, accumulate)


def backward_input(dy: Array, weight: Array, dx: Array) -> None:
    """Compute dx (rows, inputs) from dy (rows, outputs), weight (outputs, inputs)."""
    matmul(dy, weight, dx)


@cost(
    "dy weight inner -> dinner",
    flops=lambda dy, dinner: 2 * dy.size * dinner.shape[1] + 28 * dinner.size,
    sizes=lambda dy, dinner: (*dinner.shape, dy.shape[1]),
)
def backward_input_gelu(dy: Array, weight: Array, inner: Array, dinner: Array) -> bool:
    """backward_input where x is GELU of `inner`, and on through that: dinner (rows, inputs) in one product.

    False, with nothing done, where there is no such product, or backward_input and backward_gelu take less.
    """

    def apart(dinner: Array) -> None:
        backward_input(dy, weight, dinner)
        backward_gelu(dinner, inner, dinner, None, False)

    return bool(dy.size) and _launch.backend().matmuls.gemm_gelu_backward(dy, weight, inner, dinner, apart)


def backward_weight(x: Array, dy: Array, dweight: Array, accumulate: bool, first: int = 0) -> None:
    """Compute dweight (outputs, inputs) from x (rows, inputs), dy (rows, outputs), written or added to.

    dweight may be some of these rows, those from `first` on.
    """
    own = dy if len(dweight) == dy.shape[1] else dy[:, first : first + len(dweight)]
    matmul(own.T, x, dweight, accumulate=accumulate)


def backward_bias(dy: Array, dbias: Array, accumulate: bool) -> None:
    """Compute dbias (outputs,) from dy (rows, outputs), written or added to."""
    column_sum(dy, dbias, accumulate)


def backward_parameters(
    x: Array, dy: Array, dweight: Array, accumulate: bool, dbias: Array, accumulate_bias: bool
) -> None:
    """backward_weight and backward_bias."""

    def apart(dweight: Array) -> None:
        backward_weight(x, dy, dweight, accumulate)
        column_sum(dy, sums, False)

    kind = _launch.accumulator(dy.dtype)
    if x.size and dweight.dtype == kind:  # sums come in the type of dweight
        direct = not accumulate_bias and dbias.dtype == kind and _launch.vectors(dbias)
        sums = dbias if direct else _launch.empty(dbias.shape, kind)
        if _launch.backend().matmuls.gemm_sums(dy.T, x, dweight, sums, accumulate=accumulate, apart=apart):
            if not direct:
                combine_blocks(sums.reshape(1, -1), dbias, accumulate_bias)
            return
    backward_weight(x, dy, dweight, accumulate)
    backward_bias(dy, dbias, accumulate_bias)
