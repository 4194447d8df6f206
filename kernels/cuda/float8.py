"""Matrices in float8 with one scale each (per-tensor, current scaling), and their matmuls by cublasLt.

(Micikevicius et al., FP8 Formats for Deep Learning, 2022.) The scale comes from the largest absolute value of
the matrix itself and stays on the GPU: the host waits for nothing. Of a GPU from Hopper on, alone: it has no
twin on the CPU.
"""

import numpy as np

from shardrt.kernels.cost import cost
from shardrt.kernels.cuda._launch import Array, backend, blocks_for, empty, launch, vectors

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"  # largest numbers 448 and 57344
MULTIPLE = 16  # of each size of a matmul
_KERNELS = {E4M3: "cast_e4m3", E5M2: "cast_e5m2"}
_TILE = 64  # as in float8.cu


@cost(
    "x scale?known -> rowwise columnwise scale?!known",
    flops=lambda x, known: (2 if known else 3) * x.size,
    more=lambda x, known: 0 if known else x.nbytes,
)
def cast(
    x: Array, kind: str, rowwise: Array | None, columnwise: Array | None, scale: Array, *, known: bool = False
) -> None:
    """Return x times (the largest of `kind`) / amax, rounded to nearest, ties to even, as bits of `kind`.

    x (rows, columns): float32 or bfloat16, dense, aligned to 16 bytes. rowwise (rows, columns) and columnwise
    (columns, rows), its transpose: uint8, None where it is not wanted. scale (2,), float32: what takes float8
    back to x, and amax, which is taken for at least 1e-12. known: amax stands there, and is not computed.
    A matrix with an infinity or nan has a scale that is not finite either.

    Two launches, one if amax is known; x is read twice, or once. Raises ValueError for sizes that are not
    multiples of 16 and for addresses.
    """
    rows, columns = x.shape
    if rows % MULTIPLE or columns % MULTIPLE or not vectors(x, rowwise, columnwise):
        raise ValueError(f"float8: sizes must be multiples of {MULTIPLE}, aligned to 16 bytes; got {x.shape}")
    amaxes = scale[1:]
    if not known:
        amaxes = empty(blocks_for(x.size, 16 // x.dtype.itemsize), np.float32)
        launch("reduce", "abs_max", x.dtype, len(amaxes), (x, amaxes, x.size, True))
    tiles = -(-rows // _TILE) * -(-columns // _TILE)
    words = (each if each is None else each.view(np.uint32) for each in (rowwise, columnwise))
    args = (x, amaxes, len(amaxes), *words, None if known else scale, rows, columns)
    launch("float8", _KERNELS[kind], x.dtype, min(tiles, 8 * backend().multiprocessors), args)


@cost(
    "a b scales bias out?accumulate -> out",
    flops=lambda a, b: 2 * a.size * len(b),
    sizes=lambda a, b: (len(a), len(b), a.shape[1]),
)
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
) -> None:
    """Compute out (m, n) = a (m, k) times the transpose of b (n, k), times both scales (+ bias) (+ out).

    a, b: uint8, bits of `kinds`, of which one is E4M3. out: bfloat16, float16 or float32; bias (n,): of its
    type, bfloat16 for float32. scales: those of `cast`. fast: fast accumulation, which is less exact.

    Raises RuntimeError (NoSuchProduct) where cublasLt can't.
    """
    backend().matmuls.gemm_float8(a, b.T, out, kinds, scales, accumulate=accumulate, bias=bias, fast=fast)
