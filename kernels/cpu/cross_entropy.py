"""Cross entropy from logits: the loss of every row, and the gradient of the logits."""

import numpy as np

from shardrt.kernels.cost import Array, cost
from shardrt.kernels.cpu import cast
from shardrt.kernels.cpu._jit import exact, exp, larger, reordered
from shardrt.kernels.cpu._threads import run_rows
from shardrt.kernels.cpu.matmul import widened

# Whether rows are still to be multiplied by `scale` behind backward_in_place: the rows that the logits were
# made of, and those that come of them, are far narrower.
LEAVES_SCALE = True


@cost("logits targets -> losses lse", flops=13)
def forward(logits: Array, targets: Array, losses: Array, lse: Array, ignore_index: int) -> None:
    """Compute losses = lse - logits[target], 0 where ignored; lse = log of the sum of exponentials.

    logits (rows, vocab), dense; targets int64, losses, lse (rows,).
    """
    args = (logits, targets, losses, lse, ignore_index, 0, False)
    run_rows(_forward, logits.shape[0], logits.size, *args)


@cost("logits targets -> chosen lse", flops=13)
def forward_part(
    logits: Array, targets: Array, chosen: Array, lse: Array, ignore_index: int, first: int, vocab: int
) -> None:
    """What a part of a vocabulary of `vocab` adds: chosen = logits[target], 0 where that is elsewhere; lse.

    logits (rows, count): of the words from `first` on. lse is that of these, -infinity of none.
    """
    args = (logits, targets, chosen, lse, ignore_index, int(first), True)
    run_rows(_forward, logits.shape[0], logits.size, *args)


@cost("parts targets -> losses lse", flops=6)
def join(parts: Array, targets: Array, losses: Array, lse: Array, ignore_index: int) -> None:
    """Compute losses and lse, as of forward, of all parts. parts (parts, 2, rows): lse and chosen of each."""
    _join(parts, targets, losses, lse, ignore_index)


@cost("logits targets lse scale -> dlogits", flops=12)
def backward(
    logits: Array,
    targets: Array,
    lse: Array,
    dlogits: Array,
    scale: Array | None,
    ignore_index: int,
    first: int = 0,
) -> None:
    """Set dlogits = scale * (softmax(logits) - one-hot target), 0 in ignored rows; may be `logits`.

    scale: one float64, None for 1. first: the word of the first column, where these are a part of the
    vocabulary, and lse is that of all of it.
    """
    factor = logits.dtype.type(1 if scale is None else scale.item())
    how = (factor, ignore_index, int(first))
    if dlogits is logits:
        run_rows(_backward_over, logits.shape[0], logits.size, logits, targets, lse, *how)
    else:
        run_rows(_backward, logits.shape[0], logits.size, logits, targets, lse, dlogits, *how)


@cost("logits targets -> losses lse logits", flops=25, more=lambda logits: _read_again(logits))
def forward_in_place(logits: Array, targets: Array, losses: Array, lse: Array, ignore_index: int) -> None:
    """As forward, of logits that only backward_in_place will read: softmax - one-hot takes their place.

    One exponential for each logit, while its row is in cache.
    """
    args = (logits, targets, losses, lse, ignore_index)
    run_rows(_forward_in_place, logits.shape[0], logits.size, *args)


@cost("->")
def backward_in_place(
    logits: Array, targets: Array, lse: Array, scale: Array | None, ignore_index: int
) -> None:
    """What forward_in_place has left is the gradient already, but for the scale; see LEAVES_SCALE.

    scale: float64, one number, one for each row, or None for 1.
    """


@cost("x factor -> out", flops=1)
def scale_rows(x: Array, factor: Array, out: Array) -> None:
    """Compute out = x * factor, (rows, width), of float64: one number, or one for each row. out may be x.

    x and out may be uint16, bits of bfloat16.
    """
    if x.dtype == np.uint16:
        scaled = widened(x)
        scale_rows(scaled, factor, scaled)
        cast.pack(scaled.reshape(-1), out.reshape(-1), "bfloat16")
        return
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


@reordered
def _forward_in_place(start, stop, logits, targets, losses, lse, ignore_index):
    for row in range(start, stop):
        line, target = logits[row], targets[row]
        ignored = target == ignore_index
        chosen = logits.dtype.type(0) if ignored else line[target]
        highest = logits.dtype.type(-np.inf)
        for j in range(line.size):
            highest = larger(highest, line[j])
        shift = highest if highest > -np.inf else logits.dtype.type(0)
        total = logits.dtype.type(0)
        for j in range(line.size):
            value = exp(line[j] - shift)
            line[j] = value
            total += value
        lse[row] = shift + np.log(total)
        losses[row] = 0 if ignored else lse[row] - chosen
        if ignored:
            line[:] = 0
            continue
        factor = logits.dtype.type(1) / total
        for j in range(line.size):
            line[j] *= factor
        line[target] -= logits.dtype.type(1)


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


@reordered
def _backward_over(start, stop, logits, targets, lse, scale, ignore_index, first):
    """_backward of one array: of two that are one, the compiler would fear overlap and not vectorise."""
    for row in range(start, stop):
        line, target = logits[row], targets[row]
        if target == ignore_index:
            line[:] = 0
            continue
        shift = lse[row]
        for j in range(line.size):
            line[j] = exp(line[j] - shift) * scale
        column = target - first
        if 0 <= column < line.size:
            line[column] -= scale


def _read_again(logits: Array) -> int:
    """Bytes: all, if a row is too long for a block of the smallest GPUs to hold; others read less."""
    held = logits.shape[1] * logits.dtype.itemsize + 16 <= 99 << 10
    return 0 if held else logits.nbytes
