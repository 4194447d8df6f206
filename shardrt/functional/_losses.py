"""Helpers of the cross entropies: checked targets, reductions, chunks of rows. No op."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardrt.functional._arrays import asarray, indices
from shardrt.functional._types import Array, Tensor


def checked(
    op: str, name: str, x: "Tensor", vocab: tuple, targets: Any, ignore_index: int, reduction: str
) -> Array:
    """The targets as an array, if they and the reduction are fit for x (..., width)."""
    if x.ndim == 0:
        raise ValueError(f"{op}: {name} must have at least one dimension, got a scalar")
    targets = indices(op, "targets", targets, *vocab, ignore_index)
    if targets.shape != x.shape[:-1]:
        raise ValueError(
            f"{op}: {name} (..., {'vocab' if name == 'logits' else 'inputs'}) need targets (...), "
            f"got {x.shape} and {targets.shape}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    return targets


def counted(targets: Array, ignore_index: int, reduction: str) -> Array | None:
    """The divisor of the sum of the losses, which stays on the device; None for no division."""
    return (targets != ignore_index).sum() if reduction == "mean" else None


def reduced(losses: Array, targets: Array, reduction: str, count: Array | None) -> Array:
    if reduction == "none":
        return losses.reshape(targets.shape)
    total = losses.sum(dtype=np.float64)
    if count is not None:
        with np.errstate(invalid="ignore"):  # 0 / 0: nan
            total = total / count
    return asarray(total, losses.dtype)


def scale_of(dy: Array, reduction: str, count: Array | None) -> Array | None:
    """The factor of the gradient of every row, one float64 on the device; None for 1."""
    if reduction == "none":
        return None
    scale = dy.astype(np.float64)
    return asarray(scale if count is None else scale / np.maximum(count, 1))


def chunks(memory: Array, count: int) -> Iterator[tuple[slice, Array]]:
    """Yields (rows, their slice of the memory) until all `count` rows are done."""
    for start in range(0, count, max(1, len(memory))):
        stop = min(start + len(memory), count)
        yield slice(start, stop), memory[: stop - start]
