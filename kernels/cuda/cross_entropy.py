"""Cross entropy from logits: the loss of every row, and the gradient of the logits."""

from typing import Any

from shardrt.kernels.cuda._launch import launch
from shardrt.kernels.cuda._rows import read_again

Array = Any


def forward(logits: Array, targets: Array, losses: Array, lse: Array, ignore_index: int) -> None:
    """losses = lse - logits[target], 0 where ignored; lse = log of the sum of exponentials.

    logits (rows, vocab); targets int64, losses, lse (rows,), float32 for 16-bit logits. Of a target outside
    of the vocabulary the loss is nan, and the gradient.
    """
    rows, vocab = logits.shape
    how = read_again(rows, vocab, logits)
    args = (logits, targets, losses, lse, vocab, int(ignore_index), how.vectors)
    launch("cross_entropy", "forward", logits.dtype, how.grid, args, threads=how.threads)


def backward(
    logits: Array, targets: Array, lse: Array, dlogits: Array, scale: Array | None, ignore_index: int
) -> None:
    """dlogits = scale * (softmax(logits) - one-hot target), 0 in ignored rows; may be `logits` itself.

    scale: one float64, None for 1.
    """
    rows, vocab = logits.shape
    how = read_again(rows, vocab, logits, dlogits)
    args = (logits, targets, lse, dlogits, scale, vocab, int(ignore_index), how.vectors)
    launch("cross_entropy", "backward", logits.dtype, how.grid, args, threads=how.threads)


def bytes_moved(rows: int, vocab: int, itemsize: int = 4) -> int:
    """Bytes of forward: the logits are read once. Backward moves twice as many."""
    return rows * vocab * itemsize


def flops(rows: int, vocab: int) -> int:
    """Operations of forward, about, an exponential counted as ten."""
    return 13 * rows * vocab
