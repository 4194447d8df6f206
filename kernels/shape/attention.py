"""What attention costs. That cuDNN computes it is assumed of 16 bits, heads of up to 128 elements in 16-byte
vectors and all keys up to a query: one call, and with `offsets` one for each chunk. (Where deterministic
algorithms or cuDNN's faults ask for more calls or for other kernels, more are launched.) Documents side by
side are taken to be one. A kernel tells cuDNN of them, and kernels for too many documents are launched too.
"""

from shardrt.kernels.shape._cost import Array, Cost, cost

_WIDEST, _VECTOR = 128, 16  # elements of a head, bytes
MEAN = 128  # tokens of a document, as in _cudnn_documents.py


def forward(
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    lse: Array,
    *,
    causal: bool,
    scale: float,
    starts: Array | None = None,
    offsets: tuple[int, ...] = (0,),
) -> Cost:
    flops = 4 * _pairs(q, k, causal, offsets) * q.shape[3]
    launches, scratch = 1, 0
    if offsets != (0,) and starts is None and _fused(q, k, offsets, v, y):
        apart = _rows_apart(lse, offsets)
        launches, scratch = len(offsets) + len(apart), sum(apart)
    if starts is not None and offsets == (0,) and _documents_fused((q, k, v), (y,)):
        launches, scratch = 4, lse.nbytes + _told(starts)  # and cuDNN, the sums in another order, forward
    launches = launches if q.size else 0
    return cost((q, k, v, starts), (y, lse), flops, launches=launches, sizes=_sizes(q, k), scratch=scratch)


def backward(
    dy: Array,
    q: Array,
    k: Array,
    v: Array,
    y: Array,
    lse: Array,
    dq: Array,
    dk: Array,
    dv: Array,
    *,
    causal: bool,
    scale: float,
    starts: Array | None = None,
    offsets: tuple[int, ...] = (0,),
) -> Cost:
    launches, scratch = 3, lse.nbytes  # dots, gradients of queries, of keys
    if starts is None and _fused(q, k, offsets, dy, v, y, dq, dk, dv):
        launches, scratch = 1, 0
        if offsets != (0,):
            apart, each = _rows_apart(lse, offsets), q.shape[2] // len(offsets)
            both = offsets[0] + each if len(offsets) > 1 else 0  # keys that both chunks see
            left = k.shape[2] - offsets[-1] - each
            launches = len(offsets) + len(apart) + (both + left > 0)
            scratch = sum(apart) + (dk.nbytes + dv.nbytes) // k.shape[2] * both
    elif offsets == (0,) and starts is not None and _documents_fused((q, k, v, dq, dk, dv), (y, dy)):
        launches, scratch = 6, 2 * lse.nbytes + _told(starts)
    flops = 10 * _pairs(q, k, causal, offsets) * q.shape[3]
    how = {
        "launches": launches if q.size else 0,
        "sizes": _sizes(q, k),
        "scratch": scratch,
    }
    return cost((dy, q, k, v, y, lse, starts), (dq, dk, dv), flops, **how)


def _sizes(q: Array, k: Array) -> tuple[int, ...]:
    """(batch, heads, queries, keys, width)."""
    return *q.shape[:3], k.shape[2], q.shape[3]


def _pairs(q: Array, k: Array, causal: bool, offsets: tuple[int, ...]) -> int:
    """Pairs of a query and a key that it sees, of all heads."""
    batch, heads, time, _ = q.shape
    keys = k.shape[2]
    if not causal:
        return batch * heads * time * keys
    found, each = 0, time // len(offsets)
    for offset in offsets:
        part = min(each, max(0, keys - offset))  # queries that see keys up to their own place; others see all
        found += part * offset + part * (part + 1) // 2 + (each - part) * keys
    return batch * heads * found


def _fused(q: Array, k: Array, offsets: tuple[int, ...], *others: Array) -> bool:
    """Whether cuDNN computes it."""
    there = offsets == (0,) or offsets[-1] + q.shape[2] // len(offsets) <= k.shape[2]
    whole = q.dtype.itemsize == 2 and q.shape[1] % k.shape[1] == 0
    return there and whole and all(map(_readable, (q, k, *others)))


def _documents_fused(packed: tuple[Array, ...], dense: tuple[Array, ...]) -> bool:
    """Whether cuDNN computes attention of documents, in arrays like q and in those like y."""
    everything = (*packed, *dense)
    even = all(x.shape[0] == 1 or x.strides[0] == x.shape[2] * x.strides[2] for x in everything)
    steps = [len({x.strides[2] for x in each}) for each in (packed, dense)]
    suits = packed[0].shape[3] % 16 == 0 and _fused(*packed[:2], (0,), *packed[2:], *dense)
    return even and suits and steps == [1, 1]


def _told(starts: Array) -> int:
    """Bytes in which cuDNN is told of documents: lengths, places, and whether there are not too many."""
    count = starts.shape[0] + starts.size // MEAN
    return 4 * count + 3 * 8 * (-(-(count + 1) // 2) * 2) + 4


def _rows_apart(lse: Array, offsets: tuple[int, ...]) -> list[int]:
    """Bytes of the rows of each chunk that cuDNN can't be given where they lie."""
    batch, heads, time = lse.shape
    size = time // len(offsets) * lse.dtype.itemsize
    single = batch * heads == 1 or len(offsets) == 1
    return [batch * heads * size for i in range(len(offsets)) if not single or i * size % _VECTOR]


def _readable(x: Array) -> bool:
    """Whether cuDNN reads such heads: in whole vectors."""
    *steps, item = x.strides
    if x.shape[3] * item % _VECTOR or x.shape[3] > _WIDEST:
        return False
    wrong = [s for s, count in zip(steps, x.shape[:3], strict=True) if count > 1 and (s < 1 or s % _VECTOR)]
    return not wrong
