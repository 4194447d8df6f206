"""What tokens to experts and back cost."""

from shardrt.kernels.shape._cost import Array, Cost, cost, flat
from shardrt.kernels.shape.embedding import in_order


def top_k(scores: Array, experts: Array) -> Cost:
    flops, launches = scores.size * experts.shape[1], min(len(experts), 1)
    return cost((scores,), (experts,), flops, launches=launches, sizes=(*scores.shape, experts.shape[1]))


def take(scores: Array, experts: Array, y: Array) -> Cost:
    return flat((scores, experts), (y,), 1)


def put(dy: Array, experts: Array, dscores: Array) -> Cost:
    return flat((dy, experts), (dscores,), 1)


def order(
    experts: Array, priority: Array | None, capacity: int, places: Array, copies: Array, counts: Array
) -> Cost:
    size, count = experts.size, counts.shape[1]
    launches, scratch = in_order(size, count)
    if priority is not None:
        launches, scratch = 2 * launches + min(size, 1), 2 * scratch + 16 * size
    launches += min(count, 1) + min(size, 1)
    how = {"launches": launches, "sizes": (size, count), "scratch": scratch // 2}
    return cost((experts, priority), (places, copies, counts), 0, **how)


def spread(x: Array, weights: Array | None, copies: Array, k: int, y: Array) -> Cost:
    return _moved((x, weights, copies), y, copies, y.size)


def collect(x: Array, weights: Array | None, places: Array, y: Array) -> Cost:
    return _moved((x, weights, places), y, places, 2 * places.size * x.shape[1])


def weights_backward(dy: Array, x: Array, places: Array, dweights: Array) -> Cost:
    found = _moved((x, dy, places), dweights, places, 2 * places.size * x.shape[1])
    return found._replace(sizes=(places.size, x.shape[1]))


def _moved(reads: tuple, out: Array, places: Array, flops: int) -> Cost:
    """A row of reads[0] moves for each of `places`."""
    x, *others = reads
    rows = places.size * x.shape[1] * x.dtype.itemsize
    how = {"launches": min(places.size, 1), "sizes": (places.size, x.shape[1])}
    found = cost(others, (out,), flops, **how)
    return found._replace(reads=(x, *found.reads), nbytes=found.nbytes + rows)
