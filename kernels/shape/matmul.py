"""What a matrix product costs: one call of cublasLt."""

from shardrt.kernels.shape._cost import Array, Cost, cost


def matmul(a: Array, b: Array, out: Array, *, accumulate: bool = False) -> Cost:
    (m, k), n = a.shape[-2:], b.shape[-1]
    batch = a.shape[:-2]  # (): one
    flops = 2 * m * n * k * (batch[0] if batch else 1)
    launches, scratch = 1, 0
    if not flops:
        launches = int(not accumulate and out.size > 0)
    else:
        for x in (a, b):
            if x.dtype.itemsize not in x.strides[-2:]:  # is copied first
                launches, scratch = launches + 1, scratch + x.nbytes
    reads = (a, b, out) if accumulate else (a, b)
    return cost(reads, (out,), flops, launches=launches, sizes=(m, n, k, *batch), scratch=scratch)
