"""Batch norm over the channels of (batch, channels, pixels), in parts between which ranks may join sums.

Statistics, parameters and their gradients are float32 or, for float64, float64.

cuDNN's batch norm is not bound: bandwidth bounds either, both read x twice and write once, and its one node
leaves no place between the statistics and what uses them for ranks to join theirs.
"""

from shardrt.kernels.cuda._launch import Array, blocks_for, launch, type_name


def statistics(x: Array, mean: Array, squares: Array) -> None:
    """Compute mean and sum of squared deviations from it of each channel: (channels,) each."""
    launch("batch_norm", "statistics", x.dtype, x.shape[1], (x, mean, squares, *x.shape))


def forward(x: Array, mean: Array, rstd: Array, weight: Array, bias: Array, y: Array) -> None:
    """Compute y = (x - mean) * rstd * weight + bias; mean, rstd, weight and bias (channels,)."""
    args = x, mean, rstd, weight, bias, y, x.size, *x.shape[1:]
    launch("batch_norm", "forward", x.dtype, blocks_for(x.size, 1), args)


def backward_sums(dy: Array, x: Array, mean: Array, rstd: Array, dweight: Array, dbias: Array) -> None:
    """Compute dweight = sum of dy * (x - mean) * rstd over each channel, dbias = sum of dy; both written."""
    args = dy, x, mean, rstd, dweight, dbias, *x.shape
    launch("batch_norm", "backward_sums", x.dtype, x.shape[1], args)


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
    """Compute dx = weight * rstd * (dy - level - (x - mean) * rstd * along)."""
    args = dy, x, mean, rstd, weight, along, level, dx, x.size, *x.shape[1:]
    launch("batch_norm", "backward_input", x.dtype, blocks_for(x.size, 1), args)


def channel_sums(x: Array, out: Array, accumulate: bool) -> None:
    """Compute out (channels,) = the sum of each channel of x, or plus it."""
    args = x, out, bool(accumulate), *x.shape
    launch("batch_norm", "channel_sums", x.dtype, x.shape[1], args, GRADIENT=type_name(out.dtype))
