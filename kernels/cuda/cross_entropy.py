"""Cross entropy from logits: the loss of every row, and the gradient of the logits."""

from shardrt.kernels.cuda._launch import STATIC_SHARED, THREADS, Array, backend, launch
from shardrt.kernels.cuda._rows import read_again

# Whether rows are still to be multiplied by `scale` behind backward_in_place: the rows that the logits were
# made of, and those that come of them, are far narrower.
LEAVES_SCALE = True
_LONG = 50 << 10  # bytes of a row from which on few rows fit beside one another: more threads for each


def forward(logits: Array, targets: Array, losses: Array, lse: Array, ignore_index: int) -> None:
    """Compute losses = lse - logits[target], 0 where ignored; lse = log of the sum of exponentials.

    logits' rows may be padded; losses and lse are float32 for 16-bit logits. Of a target outside of the
    vocabulary the loss is nan, and the gradient.
    """
    _forward((logits, targets, losses, lse), ignore_index, 0, logits.shape[1], part=False)


def forward_part(
    logits: Array, targets: Array, chosen: Array, lse: Array, ignore_index: int, first: int, vocab: int
) -> None:
    """What a part of a vocabulary adds, as on the CPU; lse is nan where the target is no word."""
    _forward((logits, targets, chosen, lse), ignore_index, first, vocab, part=True)


def join(parts: Array, targets: Array, losses: Array, lse: Array, ignore_index: int) -> None:
    """Compute losses and lse, as of forward, of all parts. parts (parts, 2, rows): lse and chosen of each."""
    count, _, rows = parts.shape
    args = (parts, targets, losses, lse, rows, count, int(ignore_index))
    launch("cross_entropy", "join", parts.dtype, -(-rows // THREADS), args)


def backward(
    logits: Array,
    targets: Array,
    lse: Array,
    dlogits: Array,
    scale: Array | None,
    ignore_index: int,
    first: int = 0,
) -> None:
    """Compute dlogits = scale * (softmax(logits) - one-hot target), as on the CPU."""
    rows, count = logits.shape
    how = read_again(rows, count, logits, dlogits)
    sizes = count, _stride(logits), _stride(dlogits), int(ignore_index), int(first)
    args = (logits, targets, lse, dlogits, scale, *sizes, how.vectors)
    launch("cross_entropy", "backward", logits.dtype, how.grid, args, threads=how.threads)


def forward_in_place(logits: Array, targets: Array, losses: Array, lse: Array, ignore_index: int) -> None:
    """As forward, of logits that only backward_in_place will read: softmax - one-hot takes their place.

    Written once, and read once where a block can hold a row in shared memory. Of a longer row the part that
    does not fit is read again.
    """
    rows, vocab = logits.shape
    how = read_again(rows, vocab, logits)
    item, most = logits.dtype.itemsize, backend().shared - STATIC_SHARED
    held, shared = vocab, vocab * item + 16  # a row need not begin at 16 bytes
    if shared > most:
        held, shared = (most - 32) // item, most  # the last 16 bytes held, too, may begin at any element
    threads = how.threads * (2 if vocab * item > _LONG else 1)
    args = (logits, targets, losses, lse, vocab, _stride(logits), int(ignore_index), held, how.vectors)
    launch("cross_entropy", "in_place", logits.dtype, how.grid, args, threads=threads, shared=shared)


def backward_in_place(
    logits: Array, targets: Array, lse: Array, scale: Array | None, ignore_index: int
) -> None:
    """What forward_in_place has left is the gradient already, but for the scale; see LEAVES_SCALE."""


def scale_rows(x: Array, factor: Array, out: Array) -> None:
    """Compute out = x * factor, (rows, width), of float64: one number, or one for each row. out may be x."""
    rows, width = x.shape
    how = read_again(rows, width, x, out)
    args = (x, factor, out, bool(factor.ndim), width, how.vectors)
    launch("cross_entropy", "scale_rows", x.dtype, how.grid, args, threads=how.threads)


def _forward(arrays: tuple[Array, ...], ignore_index: int, first: int, vocab: int, part: bool) -> None:
    logits = arrays[0]
    rows, count = logits.shape
    how = read_again(rows, count, logits)
    sizes = count, _stride(logits), int(ignore_index), int(first), int(vocab)
    args = (*arrays, *sizes, part, how.vectors)
    launch("cross_entropy", "forward", logits.dtype, how.grid, args, threads=how.threads)


def _stride(x: Array) -> int:
    """Elements from one row to the next."""
    return x.strides[0] // x.dtype.itemsize
