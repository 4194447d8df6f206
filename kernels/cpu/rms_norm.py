"""RMS norm over the last dimension (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019)."""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import reordered
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu.reduce import ROWS, combine_blocks


@cost("x added weight -> total y rstd", flops=4)
def forward(
    x: Array,
    weight: Array,
    y: Array,
    rstd: Array,
    eps: float,
    added: Array | None = None,
    total: Array | None = None,
) -> None:
    """Compute y = x * rstd * weight. x, y (rows, width); rstd (rows,) is kept for backward.

    added, total: total = x + added is written and takes the place of x.
    """
    summed, other, result = added is not None, x if added is None else added, y if total is None else total
    how = (other, summed, result, weight, y, rstd, x.dtype.type(eps))
    run_rows(_forward, x.shape[0], x.size, x, *how)


@cost("dy x weight rstd dtotal dweight?accumulate -> dx dweight", flops=10)
def backward(
    dy: Array,
    x: Array,
    weight: Array,
    rstd: Array,
    dx: Array | None,
    dweight: Array | None,
    accumulate: bool,
    dtotal: Array | None = None,
) -> None:
    """Write dx; dweight (width,) written or added to. None where one is not wanted.

    dtotal is added to dx.
    """
    rows, width = x.shape
    blocks = -(-rows // ROWS)
    dweights = np.empty((blocks, width), x.dtype)
    wanted, target = dx is not None, dy if dx is None else dx
    more, beside = dtotal is not None, dy if dtotal is None else dtotal
    run_rows(_backward, blocks, x.size, dy, x, weight, rstd, target, wanted, beside, more, dweights)
    if dweight is not None:
        combine_blocks(dweights, dweight, accumulate)


@reordered
def _forward(start, stop, x, other, summed, result, weight, y, rstd, eps):
    width = x.shape[1]
    one = x.dtype.type(1)
    for row in range(start, stop):
        line, out = x[row], y[row]
        if summed:
            first, second, line = x[row], other[row], result[row]
            for j in range(width):
                line[j] = first[j] + second[j]
        squares = x.dtype.type(0)
        for j in range(width):
            squares += line[j] * line[j]
        factor = one / np.sqrt(squares / x.dtype.type(width) + eps)
        for j in range(width):
            out[j] = line[j] * factor * weight[j]
        rstd[row] = factor


@reordered
def _backward(start, stop, dy, x, weight, rstd, dx, wanted, dtotal, more, dweights):
    width = x.shape[1]
    for block in range(start, stop):
        dweight = dweights[block]
        dweight[:] = 0
        for row in range(block * ROWS, min((block + 1) * ROWS, x.shape[0])):
            line, upper, out = x[row], dy[row], dx[row]
            factor = rstd[row]
            dot = x.dtype.type(0)
            for j in range(width):
                normal = line[j] * factor
                dot += upper[j] * weight[j] * normal
                dweight[j] += upper[j] * normal
            if wanted:
                dot /= x.dtype.type(width)
                for j in range(width):
                    out[j] = factor * (upper[j] * weight[j] - line[j] * factor * dot)
                if more:
                    beside = dtotal[row]
                    for j in range(width):
                        out[j] += beside[j]
