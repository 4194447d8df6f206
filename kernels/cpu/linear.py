"""Linear layer: y = x weight^T + bias, or GELU of that. Three matmuls and one sum over rows.

The operands of a matmul, x, weight and dy, may be uint16: the bits of bfloat16, both or none. What comes of
it is float32, and so is a bias.
"""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import exp, fused
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu.activation import CUBE, ROOT
from shardrt.kernels.cpu.cast import narrowed, widened
from shardrt.kernels.cpu.matmul import affine, matmul
from shardrt.kernels.cpu.reduce import ROWS, column_sum, combine_blocks

# Whether a norm or an activation is to make an input again for backward, not keep it: here that pass costs
# about what the page faults and caches of more memory do.
INPUT_AGAIN = True
BLOCK = 4096  # outputs above which rows of a weight's gradient can be computed by themselves
TILE = 256  # of these rows go into one matmul, which makes a whole gradient 3 to 8 % slower (OpenBLAS, Zen 4)


@cost(
    "x weight bias -> y",
    flops=lambda x, weight: 2 * x.size * len(weight),
    sizes=lambda x, weight: (len(x), *weight.shape),
)
def forward(x: Array, weight: Array, bias: Array | None, y: Array) -> None:
    """Compute y (rows, outputs) from x (rows, inputs), weight (outputs, inputs), bias (outputs,) or None."""
    if bias is None:
        matmul(x, weight.T, y)
    else:
        affine(x, weight.T, bias, y)


@cost(
    "x weight bias -> inner y",
    flops=lambda x, weight, y: 2 * x.size * len(weight) + 18 * y.size,
    sizes=lambda x, weight: (len(x), *weight.shape),
    more=lambda inner, launches: inner.nbytes * (launches > 1),  # GELU reads it, in a launch of its own
)
def forward_gelu(x: Array, weight: Array, bias: Array | None, inner: Array, y: Array) -> None:
    """As forward, to inner (rows, outputs), and y = GELU of it in the tanh form (activation.py).

    inner may be uint16, bits of bfloat16; then y is GELU of what they say.
    """
    low = inner.dtype == np.uint16
    matmul(x, weight.T, y if low else inner)
    shift = np.zeros(inner.shape[1], y.dtype) if bias is None else bias
    run_rows(_shift_and_gelu_low if low else _shift_and_gelu, inner.shape[0], inner.size, inner, shift, y)


@cost("dy inner dbias?accumulate -> dinner dbias", flops=28)
def backward_gelu(dy: Array, inner: Array, dinner: Array, dbias: Array | None, accumulate: bool) -> None:
    """Set dinner (rows, outputs) from dy, inner; dbias (outputs,) or None: its sum over rows, or added.

    inner and dinner may be uint16: bits, as cast.pack makes them.
    """
    blocks = -(-inner.shape[0] // ROWS)
    partials = np.empty((blocks, inner.shape[1]), dy.dtype)
    kernel = _gelu_slope_and_sum_low if dinner.dtype == np.uint16 else _gelu_slope_and_sum
    run_rows(kernel, blocks, inner.size, dy, inner, dinner, partials)
    if dbias is not None:
        combine_blocks(partials, dbias, accumulate)


@cost(
    "dy weight -> dx",
    flops=lambda dy, dx: 2 * dy.size * dx.shape[1],
    sizes=lambda dy, dx: (*dx.shape, dy.shape[1]),
)
def backward_input(dy: Array, weight: Array, dx: Array) -> None:
    """Compute dx (rows, inputs) from dy (rows, outputs), weight (outputs, inputs)."""
    matmul(dy, weight, dx)


@cost("->", value=False)
def backward_input_gelu(dy: Array, weight: Array, inner: Array, dinner: Array) -> bool:
    """backward_input where x is GELU of `inner`, and on through that: dinner (rows, inputs) in one product.

    False, with nothing done: here backward_input and backward_gelu do it.
    """
    return False


@cost(
    "dy x dweight?accumulate -> dweight",
    flops=lambda x, dweight: 2 * x.size * len(dweight),
    sizes=lambda x, dweight: (*dweight.shape, len(x)),
    part={"dy": lambda dy, dweight, first: dy[:, first : first + len(dweight)]},
)
def backward_weight(x: Array, dy: Array, dweight: Array, accumulate: bool, first: int = 0) -> None:
    """Compute dweight (outputs, inputs) from x (rows, inputs), dy (rows, outputs), written or added to.

    If there are more than BLOCK outputs, dweight may be some of these rows, those from `first` on, and they
    are bitwise identical to those of the whole: a row's sums depend on how many rows the library computes
    with it, so every call computes the same TILE rows that contain it. At either end of `dweight` such a
    tile is computed apart, and the rows that belong to `dweight` are copied.
    """
    outputs, stop = dy.shape[1], first + len(dweight)
    if outputs <= BLOCK:
        matmul(dy[:, first:stop].T, x, dweight, accumulate=accumulate)
        return
    for start in range(first // TILE * TILE, stop, TILE):
        end = min(start + TILE, outputs)
        low, high = max(start, first), min(end, stop)
        wanted = dweight[low - first : high - first]
        if (low, high) == (start, end):
            matmul(dy[:, start:end].T, x, wanted, accumulate=accumulate)
            continue
        tile = np.zeros((end - start, dweight.shape[1]), dweight.dtype)
        if accumulate:
            tile[low - start : high - start] = wanted
        matmul(dy[:, start:end].T, x, tile, accumulate=accumulate)
        wanted[...] = tile[low - start : high - start]


@cost("dy dbias?accumulate -> dbias", flops=1)
def backward_bias(dy: Array, dbias: Array, accumulate: bool) -> None:
    """Compute dbias (outputs,) from dy (rows, outputs), written or added to."""
    column_sum(dy, dbias, accumulate)


@cost(
    "dy x dweight?accumulate dbias?accumulate_bias -> dweight dbias",
    flops=lambda x, dy: 2 * x.size * dy.shape[1] + dy.size,
    sizes=lambda x, dweight: (*dweight.shape, len(x)),
)
def backward_parameters(
    x: Array, dy: Array, dweight: Array, accumulate: bool, dbias: Array, accumulate_bias: bool
) -> None:
    """backward_weight and backward_bias."""
    backward_weight(x, dy, dweight, accumulate)
    backward_bias(dy, dbias, accumulate_bias)


@fused
def _shift_and_gelu(start, stop, inner, bias, y):
    kind = inner.dtype.type
    one, cube, twice = kind(1), kind(CUBE), kind(-2 * ROOT)
    for row in range(start, stop):
        line, out = inner[row], y[row]
        for j in range(line.size):
            v = line[j] + bias[j]
            line[j] = v
            out[j] = v / (one + exp(twice * (v + cube * v * v * v)))


@fused
def _shift_and_gelu_low(start, stop, inner, bias, y):
    """Finish y, which has the matmuls; inner: bits of them plus bias."""
    kind = y.dtype.type
    one, cube, twice = kind(1), kind(CUBE), kind(-2 * ROOT)
    for row in range(start, stop):
        kept, line = inner[row], y[row]
        for j in range(line.size):
            bits = narrowed(line[j] + bias[j])
            kept[j] = bits
            v = widened(bits)
            line[j] = v / (one + exp(twice * (v + cube * v * v * v)))


@fused
def _gelu_slope_and_sum_low(start, stop, dy, inner, dinner, sums):
    """As _gelu_slope_and_sum, of bits; what is kept is rounded, the sums are of what is not."""
    kind = dy.dtype.type
    one, cube, twice = kind(1), kind(CUBE), kind(-2 * ROOT)
    slope, cubes = kind(2 * ROOT), kind(3 * CUBE)
    for block in range(start, stop):
        total = sums[block]
        total[:] = 0
        for row in range(block * ROWS, min((block + 1) * ROWS, inner.shape[0])):
            upper, line, out = dy[row], inner[row], dinner[row]
            for j in range(line.size):
                v = widened(line[j])
                s = one / (one + exp(twice * (v + cube * v * v * v)))
                d = upper[j] * (s + v * s * (one - s) * slope * (one + cubes * v * v))
                out[j] = narrowed(d)
                total[j] += d


@fused
def _gelu_slope_and_sum(start, stop, dy, inner, dinner, sums):
    kind = inner.dtype.type
    one, cube, twice = kind(1), kind(CUBE), kind(-2 * ROOT)
    slope, cubes = kind(2 * ROOT), kind(3 * CUBE)
    for block in range(start, stop):
        total = sums[block]
        total[:] = 0
        for row in range(block * ROWS, min((block + 1) * ROWS, inner.shape[0])):
            upper, line, out = dy[row], inner[row], dinner[row]
            for j in range(line.size):
                v = line[j]
                s = one / (one + exp(twice * (v + cube * v * v * v)))
                d = upper[j] * (s + v * s * (one - s) * slope * (one + cubes * v * v))
                out[j] = d
                total[j] += d
