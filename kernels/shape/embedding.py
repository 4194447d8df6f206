"""What rows of a table, and its gradient, cost. As many rows move as there are indices, at most all."""

from shardrt.kernels.shape._cost import Array, Cost, real, upto

_TILE, _ROWS = 1024, 32  # indices that a block sorts, sorted rows that it sums


def forward(indices: Array, weight: Array, y: Array, first: int = 0, vocab: int | None = None) -> Cost:
    nbytes = indices.nbytes + _rows(indices, weight) + y.nbytes
    sizes = indices.size, *weight.shape
    return Cost((indices, weight), (y,), 0, nbytes, min(indices.size, 1), sizes)


def backward(indices: Array, dy: Array, dweight: Array, first: int = 0) -> Cost:
    """Two launches for each eight bits of the vocabulary's size sort the indices, two sum."""
    (vocab, width), count = dweight.shape, indices.size
    launches, sorting = in_order(count, vocab)
    partials = upto(count, _ROWS) * 2 * width * real(dy)
    scratch = sorting + 2 * partials
    nbytes = indices.nbytes + dy.nbytes + 2 * _rows(indices, dweight) + scratch
    how = launches + 2 if count and dweight.size else 0, (count, vocab, width), None, scratch
    return Cost((indices, dy, dweight), (dweight,), dy.size, nbytes, *how)


def in_order(count: int, vocab: int) -> tuple[int, int]:
    """(launches, bytes) that sorting `count` indices takes."""
    passes = upto(max(1, vocab.bit_length()), 8)
    scratch = passes * 8 * count + upto(count, _TILE) * 256 * 4
    return 2 * passes if count else 0, 2 * scratch


def _rows(indices: Array, table: Array) -> int:
    return min(indices.size, len(table)) * table.shape[1] * table.dtype.itemsize
