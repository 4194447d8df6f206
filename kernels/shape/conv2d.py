"""What convolution costs. cuDNN is assumed to compute it for all types but float64, in one call."""

from math import prod

from shardrt.kernels.shape._cost import Array, Cost, cost, upto

Pair = tuple[int, int]

_PATCHES = 1 << 26  # elements of patches that exist at once, in float64


def forward(
    x: Array,
    weight: Array,
    bias: Array | None,
    y: Array,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Cost:
    launches = _launches(x, weight, y, groups)
    if x.dtype.itemsize < 8 and bias is not None:
        launches += 1
    return _product((x, weight, bias), y, weight, y, groups, launches)


def backward_input(
    dy: Array, weight: Array, dx: Array, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Cost:
    return _product((dy, weight), dx, weight, dy, groups, _launches(dx, weight, dy, groups))


def backward_weight(
    x: Array,
    dy: Array,
    dweight: Array,
    accumulate: bool,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
) -> Cost:
    """cuDNN can't add to what is there: the sum is made beside it."""
    launches, reads, scratch = _launches(x, dweight, dy, groups), (x, dy), 0
    if accumulate:
        reads = x, dy, dweight
        if x.dtype.itemsize < 8:
            launches, scratch = launches + 1, dweight.size * 4
    return _product(reads, dweight, dweight, dy, groups, launches, scratch)


def backward_bias(dy: Array, dbias: Array, accumulate: bool) -> Cost:
    reads = (dy, dbias) if accumulate else (dy,)
    return cost(reads, (dbias,), dy.size, launches=min(dy.shape[1], 1), sizes=dy.shape)


def _product(
    reads: tuple, out: Array, weight: Array, y: Array, groups: int, launches: int, scratch: int = 0
) -> Cost:
    """sizes: of the product with patches, of one group, and how many groups."""
    inner = prod(weight.shape[1:])
    sizes = len(weight) // groups, len(y) * prod(y.shape[2:]), inner, groups
    return cost(reads, (out,), 2 * y.size * inner, launches=launches, sizes=sizes, scratch=scratch)


def _launches(x: Array, weight: Array, y: Array, groups: int) -> int:
    """In float64 patches, a product, and a copy, of some images at a time and each group."""
    if x.dtype.itemsize < 8:
        return 1
    images = max(1, _PATCHES // max(1, prod(y.shape[2:]) * prod(weight.shape[1:])))
    return 3 * groups * upto(len(x), images)
