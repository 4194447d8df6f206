"""Layer norm over the last dimension (Ba et al., Layer Normalization, 2016)."""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import reordered
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu.reduce import ROWS, combine_blocks


@cost("x added weight bias -> total y mean rstd", flops=8)
def forward(
    x: Array,
    weight: Array,
    bias: Array | None,
    y: Array,
    mean: Array,
    rstd: Array,
    eps: float,
    added: Array | None = None,
    total: Array | None = None,
) -> None:
    """Set y = (x - mean) * rstd * weight + bias. x, y (rows, width); mean, rstd (rows,) for backward.

    added, total: total = x + added is written and takes the place of x.
    """
    shift = np.zeros_like(weight) if bias is None else bias
    summed, other, result = added is not None, x if added is None else added, y if total is None else total
    statistics = (mean, rstd, x.dtype.type(eps))
    run_rows(_forward, x.shape[0], x.size, x, other, summed, result, weight, shift, y, *statistics)


@cost("dy x weight mean rstd dtotal dweight?accumulate dbias?accumulate -> dx dweight dbias", flops=16)
def backward(
    dy: Array,
    x: Array,
    weight: Array,
    mean: Array,
    rstd: Array,
    dx: Array | None,
    dweight: Array | None,
    dbias: Array | None,
    accumulate: bool,
    dtotal: Array | None = None,
) -> None:
    """Write dx; dweight and dbias (width,) written or added to. None where one is not wanted.

    dtotal is added to dx.
    """
    rows, width = x.shape
    blocks = -(-rows // ROWS)
    dweights, dbiases = np.empty((blocks, width), x.dtype), np.empty((blocks, width), x.dtype)
    wanted, target = dx is not None, dy if dx is None else dx
    more, beside = dtotal is not None, dy if dtotal is None else dtotal
    how = (target, wanted, beside, more, dweights, dbiases)
    run_rows(_backward, blocks, x.size, dy, x, weight, mean, rstd, *how)
    if dweight is not None:
        combine_blocks(dweights, dweight, accumulate)
    if dbias is not None:
        combine_blocks(dbiases, dbias, accumulate)


@reordered
def _forward(start, stop, x, other, summed, result, weight, bias, y, mean, rstd, eps):
    width = x.shape[1]
    one = x.dtype.type(1)
    scale = one / x.dtype.type(width)
    for row in range(start, stop):
        line, out = x[row], y[row]
        if summed:
            first, second, line = x[row], other[row], result[row]
            for j in range(width):
                line[j] = first[j] + second[j]
        total = x.dtype.type(0)
        for j in range(width):
            total += line[j]
        centre = total * scale
        squares = x.dtype.type(0)
        for j in range(width):
            squares += (line[j] - centre) * (line[j] - centre)
        factor = one / np.sqrt(squares * scale + eps)
        for j in range(width):
            out[j] = (line[j] - centre) * factor * weight[j] + bias[j]
        mean[row], rstd[row] = centre, factor


@reordered
def _backward(start, stop, dy, x, weight, mean, rstd, dx, wanted, dtotal, more, dweights, dbiases):
    width = x.shape[1]
    scale = x.dtype.type(1) / x.dtype.type(width)
    for block in range(start, stop):
        dweight, dbias = dweights[block], dbiases[block]
        dweight[:] = 0
        dbias[:] = 0
        for row in range(block * ROWS, min((block + 1) * ROWS, x.shape[0])):
            line, upper, out = x[row], dy[row], dx[row]
            centre, factor = mean[row], rstd[row]
            first = x.dtype.type(0)
            second = x.dtype.type(0)
            for j in range(width):
                normal = (line[j] - centre) * factor
                first += upper[j] * weight[j]
                second += upper[j] * weight[j] * normal
                dweight[j] += upper[j] * normal
                dbias[j] += upper[j]
            if wanted:
                first *= scale
                second *= scale
                for j in range(width):
                    normal = (line[j] - centre) * factor
                    out[j] = factor * (upper[j] * weight[j] - first - normal * second)
                if more:
                    beside = dtotal[row]
                    for j in range(width):
                        out[j] += beside[j]
