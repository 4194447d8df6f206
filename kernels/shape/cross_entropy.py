"""What cross entropy costs. In place, forward leaves the gradient in the logits."""

from shardrt.kernels.shape._cost import Array, Cost, by_rows, cost

LEAVES_SCALE = True
_SHARED = 99 << 10  # bytes of a row that a block may hold


def forward(logits: Array, targets: Array, losses: Array, lse: Array, ignore_index: int) -> Cost:
    return by_rows((logits, targets), (losses, lse), 13)


def forward_part(
    logits: Array, targets: Array, chosen: Array, lse: Array, ignore_index: int, first: int, vocab: int
) -> Cost:
    return by_rows((logits, targets), (chosen, lse), 13)


def join(parts: Array, targets: Array, losses: Array, lse: Array, ignore_index: int) -> Cost:
    launches = min(targets.size, 1)
    return cost((parts, targets), (losses, lse), 6 * parts.size, launches=launches, sizes=parts.shape)


def backward(
    logits: Array,
    targets: Array,
    lse: Array,
    dlogits: Array,
    scale: Array | None,
    ignore_index: int,
    first: int = 0,
) -> Cost:
    return by_rows((logits, targets, lse, scale), (dlogits,), 12)


def forward_in_place(logits: Array, targets: Array, losses: Array, lse: Array, ignore_index: int) -> Cost:
    """Counted as read twice if a row is too long for the smallest GPUs to hold; others read less."""
    found = by_rows((logits, targets), (losses, lse, logits), 25)
    held = logits.shape[1] * logits.dtype.itemsize + 16 <= _SHARED
    return found if held else found._replace(nbytes=found.nbytes + logits.nbytes)


def backward_in_place(
    logits: Array, targets: Array, lse: Array, scale: Array | None, ignore_index: int
) -> Cost:
    return cost((), (), 0, launches=0)


def scale_rows(x: Array, factor: Array, out: Array) -> Cost:
    return by_rows((x, factor), (out,), 1)
