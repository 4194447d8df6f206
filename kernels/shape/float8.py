"""What casts to float8 and products of it cost: of a GPU alone, and as the binding of cublasLt has them."""

from shardrt.kernels.shape._cost import Array, Cost, cost, upto

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
MULTIPLE = 16
_BLOCKS = 8 * 132  # of an H100, at most


def cast(
    x: Array, kind: str, rowwise: Array | None, columnwise: Array | None, scale: Array, *, known: bool = False
) -> Cost:
    if known:
        return cost((x, scale), (rowwise, columnwise), 2 * x.size, sizes=x.shape)
    scratch = 4 * min(upto(x.nbytes, 16 * 256), _BLOCKS)
    found = cost((x,), (rowwise, columnwise, scale), 3 * x.size, launches=2, sizes=x.shape, scratch=scratch)
    return found._replace(nbytes=found.nbytes + x.nbytes)


def matmul(
    a: Array,
    b: Array,
    out: Array,
    kinds: tuple[str, str],
    scales: tuple[Array, Array],
    *,
    bias: Array | None = None,
    accumulate: bool = False,
    fast: bool = False,
) -> Cost:
    (m, k), n = a.shape, len(b)
    reads = a, b, *scales, bias, out if accumulate else None
    return cost(reads, (out,), 2 * m * n * k, sizes=(m, n, k))
