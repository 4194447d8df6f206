"""Batch norm over the channels of (batch, channels, pixels), in parts between which ranks may join sums.

(Ioffe, Szegedy: Batch Normalization, 2015.) Forward: statistics, then normalise; backward: two sums over each
channel, then the gradient of the input.
"""

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu._jit import fused, reordered
from shardrt.kernels.cpu._threads import run_rows


@cost("x -> mean squares", flops=4)
def statistics(x: Array, mean: Array, squares: Array) -> None:
    """Compute mean and sum of squared deviations from it of each channel: (channels,) each."""
    run_rows(_statistics, x.shape[1], x.size, x, mean, squares)


@cost("x mean rstd weight bias -> y", flops=2)
def forward(x: Array, mean: Array, rstd: Array, weight: Array, bias: Array, y: Array) -> None:
    """Compute y = (x - mean) * rstd * weight + bias; mean, rstd, weight and bias (channels,)."""
    run_rows(_forward, x.shape[0] * x.shape[1], x.size, x, mean, rstd, weight, bias, y)


@cost("dy x mean rstd -> dweight dbias", flops=4)
def backward_sums(dy: Array, x: Array, mean: Array, rstd: Array, dweight: Array, dbias: Array) -> None:
    """Compute dweight = sum of dy * (x - mean) * rstd over each channel, dbias = sum of dy; both written."""
    run_rows(_backward_sums, x.shape[1], x.size, dy, x, mean, rstd, dweight, dbias)


@cost("dy x mean rstd weight along level -> dx", flops=5)
def backward_input(
    dy: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array,
    along: Array,
    level: Array,
    dx: Array,
) -> None:
    """Compute dx = weight * rstd * (dy - level - (x - mean) * rstd * along).

    along, level (channels,): the means of dy * (x - mean) * rstd and of dy; 0 where statistics are given.
    """
    args = dy, x, mean, rstd, weight, along, level, dx
    run_rows(_backward_input, x.shape[0] * x.shape[1], x.size, *args)


@reordered
def _statistics(start, stop, x, mean, squares):
    """A plane at a time, which is in cache the second time; planes are joined as Chan et al. (1979) do."""
    pixels = x.shape[2]
    one = x.dtype.type(1)
    for c in range(start, stop):
        centre, spread = x.dtype.type(0), x.dtype.type(0)
        for n in range(x.shape[0]):
            plane = x[n, c]
            total = x.dtype.type(0)
            for j in range(pixels):
                total += plane[j]
            own = total * (one / x.dtype.type(pixels))
            around = x.dtype.type(0)
            for j in range(pixels):
                around += (plane[j] - own) * (plane[j] - own)
            distance = own - centre
            share = one / x.dtype.type(n + 1)
            centre += distance * share
            spread += around + distance * distance * (x.dtype.type(n) * share * x.dtype.type(pixels))
        mean[c], squares[c] = centre, spread


@fused
def _forward(start, stop, x, mean, rstd, weight, bias, y):
    channels = x.shape[1]
    for at in range(start, stop):
        n, c = at // channels, at % channels
        plane, out = x[n, c], y[n, c]
        scale = weight[c] * rstd[c]
        centre, shift = mean[c], bias[c]
        for j in range(plane.size):
            out[j] = (plane[j] - centre) * scale + shift


@reordered
def _backward_sums(start, stop, dy, x, mean, rstd, dweight, dbias):
    for c in range(start, stop):
        centre = mean[c]
        along, level = x.dtype.type(0), x.dtype.type(0)
        for n in range(x.shape[0]):
            upper, plane = dy[n, c], x[n, c]
            for j in range(plane.size):
                along += upper[j] * (plane[j] - centre)
                level += upper[j]
        dweight[c], dbias[c] = along * rstd[c], level


@fused
def _backward_input(start, stop, dy, x, mean, rstd, weight, along, level, dx):
    channels = x.shape[1]
    for at in range(start, stop):
        n, c = at // channels, at % channels
        upper, plane, out = dy[n, c], x[n, c], dx[n, c]
        centre, factor = mean[c], weight[c] * rstd[c]
        base, slope = level[c], along[c] * rstd[c]
        for j in range(plane.size):
            out[j] = factor * (upper[j] - base - (plane[j] - centre) * slope)
