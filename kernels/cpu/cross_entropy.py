"""Cross entropy from logits: the loss of every row, and the gradient of the logits."""

from typing import Any

import numpy as np

from shardrt.kernels.cpu._jit import exact, exp, larger, reordered
from shardrt.kernels.cpu._threads import run_rows

Array = Any

LEAVES_SCALE = False  # whether rows are still to be multiplied by `scale` behind backward_in_place


def forward(logits: Array, targets: Array, losses: Array, lse: Array, ignore_index: int) -> None:
    """losses = lse - logits[target], 0 where ignored; lse = log of the sum of exponentials.

    logits (rows, vocab), dense; targets int64, losses, lse (rows,).
    """
    args = (logits, targets, losses, lse, ignore_index, 0, False)
    run_rows(_forward, logits.shape[0], logits.size, *args)


def forward_part(
    logits: Array, targets: Array, chosen: Array, lse: Array, ignore_index: int, first: int, vocab: int
) -> None:
    """What a part of a vocabulary of `vocab` adds: chosen = logits[target], 0 where that is elsewhere; lse.

    logits (rows, count): of the words from `first` on. lse is that of these, -infinity of none.
    """
    args = (logits, targets, chosen, lse, ignore_index, int(first), True)
    run_rows(_forward, logits.shape[0], logits.size, *args)


def join(parts: Array, targets: Array, losses: Array, lse: Array, ignore_index: int) -> None:
    """losses and lse, as of forward, of all parts. parts (parts, 2, rows): lse and chosen of each."""
    _join(parts, targets, losses, lse, ignore_index)


def backward(
    logits: Array,
    targets: Array,
    lse: Array,
    dlogits: Array,
    scale: Array | None,
    ignore_index: int,
    first: int = 0,
) -> None:
    """dlogits = scale * (softmax(logits) - one-hot target), 0 in ignored rows; may be `logits` itself.

    scale: one float64, None for 1. first: the word of the first column, where these are a part of the
    vocabulary, and lse is that of all of it.
    """
    factor = logits.dtype.type(1 if scale is None else scale.item())
    args = (logits, targets, lse, dlogits, factor, ignore_index, int(first))
    run_rows(_backward, logits.shape[0], logits.size, *args)


def forward_in_place(logits: Array, targets: Array, losses: Array, lse: Array, ignore_index: int) -> None:
    """As forward, of logits that only backward_in_place will read: it may leave in them what it likes."""
    forward(logits, targets, losses, lse, ignore_index)


def backward_in_place(
    logits: Array, targets: Array, lse: Array, scale: Array | None, ignore_index: int
) -> None:
    """What forward_in_place has left becomes the gradient.

    scale: float64, one number, one for each row, or None for 1; see LEAVES_SCALE.
    """
    of_rows = scale is not None and scale.ndim == 1
    backward(logits, targets, lse, logits, None if of_rows else scale, ignore_index)
    if of_rows:
        scale_rows(logits, scale, logits)


def scale_rows(x: Array, factor: Array, out: Array) -> None:
    """out = x * factor, (rows, width), of float64: one number, or one for each row. out may be x."""
    by = factor.astype(x.dtype)
    np.multiply(x, by[:, None] if by.ndim else by, out=out)


@reordered
def _forward(start, stop, logits, targets, losses, lse, ignore_index, first, part):
    for row in range(start, stop):
        line = logits[row]
        highest = logits.dtype.type(-np.inf)
        for j in range(line.size):
            highest = larger(highest, line[j])
        shift = highest if highest > -np.inf else logits.dtype.type(0)
        total = logits.dtype.type(0)
        for j in range(line.size):
            total += exp(line[j] - shift)
        lse[row] = shift + np.log(total)
        target = targets[row]
        ignored, column = target == ignore_index, target - first
        chosen = line[column] if 0 <= column < line.size and not ignored else logits.dtype.type(0)
        losses[row] = chosen if part else 0 if ignored else lse[row] - chosen


@exact
def _join(parts, targets, losses, lse, ignore_index):
    for row in range(targets.size):
        highest = parts[0, 0, row]
        for part in range(1, len(parts)):
            highest = max(highest, parts[part, 0, row])
        shift = highest if highest != -np.inf else parts.dtype.type(0)
        total, chosen = parts.dtype.type(0), parts.dtype.type(0)
        for part in range(len(parts)):
            total += exp(parts[part, 0, row] - shift)
            chosen += parts[part, 1, row]
        lse[row] = shift + np.log(total)
        losses[row] = 0 if targets[row] == ignore_index else lse[row] - chosen


@reordered
def _backward(start, stop, logits, targets, lse, dlogits, scale, ignore_index, first):
    for row in range(start, stop):
        line, out, target = logits[row], dlogits[row], targets[row]
        if target == ignore_index:
            out[:] = 0
            continue
        shift = lse[row]
        for j in range(line.size):
            out[j] = exp(line[j] - shift) * scale
        column = target - first
        if 0 <= column < line.size:
            out[column] -= scale
