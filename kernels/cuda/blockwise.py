"""Block-wise 8-bit numbers: see the CPU's. The maps are made in shared memory."""

from shardrt.kernels.cuda._launch import Array, blocks_for, launch, vectors


def quantize(x: Array, codes: Array, scales: Array, signed: bool) -> None:
    """Encode x (float32, 1-D) as codes (uint8) and scales (uint16): see the CPU's."""
    args = (x, codes, scales, x.size, vectors(x, codes))
    name = "quantize_signed" if signed else "quantize_positive"
    launch("blockwise", name, x.dtype, blocks_for(x.size, 16), args)


def dequantize(codes: Array, scales: Array, x: Array, signed: bool) -> None:
    """Decode what quantize has made, into x."""
    name = "dequantize_signed" if signed else "dequantize_positive"
    launch("blockwise", name, x.dtype, blocks_for(x.size, 16), (codes, scales, x, x.size))
