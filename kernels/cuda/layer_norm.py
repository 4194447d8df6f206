"""Layer norm over the last dimension (Ba et al., Layer Normalization, 2016)."""

import numpy as np

from shardrt.kernels.cuda._launch import Array, accumulator, empty, launch
from shardrt.kernels.cuda._rows import columns, split
from shardrt.kernels.cuda.reduce import combine_two


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
    """Set y = (x - mean) * rstd * weight + bias, as on the CPU; mean, rstd are float32 for 16-bit x."""
    rows, width = x.shape
    how = split(rows, width, x, added, total, y, weight, bias)
    args = (x, added, total, weight, bias, y, mean, rstd, rows, width, accumulator(x.dtype)(eps), how.vectors)
    launch("layer_norm", f"forward_{how.form}", x.dtype, how.grid, args, threads=how.threads)


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
    """Write dx; dweight and dbias written or added to, as on the CPU.

    They may be of another type than x: sums are float32 (float64 in float64), rounded once.
    """
    rows, width = x.shape
    how, each = columns(rows, width, dy, x, weight, dtotal, dx)
    wanted = (dweight, dbias)
    partials = [None if out is None else empty((how.grid, width), accumulator(x.dtype)) for out in wanted]
    args = (dy, x, weight, mean, rstd, dtotal, dx, *partials, rows, width, np.int32(each), how.vectors)
    launch("layer_norm", f"backward_{how.form}", x.dtype, how.grid, args, threads=how.threads)
    sums = [(partial, out) for partial, out in zip(partials, wanted, strict=True) if out is not None]
    if sums:
        combine_two(sums, accumulate)
