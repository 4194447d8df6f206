"""RMS norm over the last dimension (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019)."""

import numpy as np

from shardrt.kernels.cuda._launch import Array, accumulator, empty, launch
from shardrt.kernels.cuda._rows import columns, split
from shardrt.kernels.cuda.reduce import combine_blocks


def forward(
    x: Array,
    weight: Array,
    y: Array,
    rstd: Array,
    eps: float,
    added: Array | None = None,
    total: Array | None = None,
) -> None:
    """Compute y = x * rstd * weight, as on the CPU; rstd is float32 for 16-bit x."""
    rows, width = x.shape
    how = split(rows, width, x, added, total, y, weight)
    args = (x, added, total, weight, y, rstd, rows, width, accumulator(x.dtype)(eps), how.vectors)
    launch("rms_norm", f"forward_{how.form}", x.dtype, how.grid, args, threads=how.threads)


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
    """Write dx; dweight written or added to, as on the CPU.

    It may be of another type than x: sums are float32 (float64 in float64), rounded once.
    """
    rows, width = x.shape
    how, each = columns(rows, width, dy, x, weight, dtotal, dx)
    partials = None if dweight is None else empty((how.grid, width), accumulator(x.dtype))
    args = (dy, x, weight, rstd, dtotal, dx, partials, rows, width, np.int32(each), how.vectors)
    launch("rms_norm", f"backward_{how.form}", x.dtype, how.grid, args, threads=how.threads)
    if dweight is not None:
        combine_blocks(partials, dweight, accumulate)
