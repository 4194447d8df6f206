"""Softmax over the last dimension."""

from shardrt.kernels.cuda._launch import Array, launch
from shardrt.kernels.cuda._rows import split


def forward(x: Array, y: Array) -> None:
    """Compute y = exp(x - max) / sum, per row. x, y (rows, width)."""
    _run("forward", x, y)


def backward(dy: Array, y: Array, dx: Array) -> None:
    """Compute dx = y * (dy - sum(dy * y)), per row."""
    _run("backward", dy, y, dx)


def _run(function: str, *arrays: Array) -> None:
    rows, width = arrays[0].shape
    how = split(rows, width, *arrays)
    args = (*arrays, rows, width, how.vectors)
    launch("softmax", f"{function}_{how.form}", arrays[0].dtype, how.grid, args, threads=how.threads)
