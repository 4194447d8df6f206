// Encodes and decodes block-wise 8-bit numbers.
//
// ELEMENT: float
#include "blockwise.cuh"

template <bool SIGNED>
__device__ __forceinline__ void quantize(const float* x, unsigned char* codes, uint16* scales, int64 count,
                                         bool vectors) {
    __shared__ Map map;
    fill<SIGNED>(map);
    int64 blocks = (count + BLOCK - 1) / BLOCK, stride = gridDim.x * (int64)blockDim.x;
    for (int64 b = blockIdx.x * (int64)blockDim.x + threadIdx.x; b < blocks; b += stride) {
        int size = int(min(int64(BLOCK), count - b * BLOCK));
        bool whole = vectors && size == BLOCK;
        Pack<float, BLOCK> numbers = load_block(x + b * BLOCK, size, whole);
        Pack<uint8, BLOCK> found;
        scales[b] = encode<SIGNED>(numbers.value, size, found, map);
        store_block(codes + b * BLOCK, found, size, whole);
    }
}

extern "C" __global__ void quantize_signed(const float* x, unsigned char* codes, uint16* scales, int64 count,
                                           int vectors) {
    quantize<true>(x, codes, scales, count, vectors);
}
extern "C" __global__ void quantize_positive(const float* x, unsigned char* codes, uint16* scales, int64 count,
                                             int vectors) {
    quantize<false>(x, codes, scales, count, vectors);
}

template <bool SIGNED>
__device__ __forceinline__ void dequantize(const unsigned char* codes, const uint16* scales, float* x, int64 count) {
    __shared__ Map map;
    fill<SIGNED>(map);
    for (int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (int64)blockDim.x)
        x[i] = decode(codes[i], scale_of(scales[i / BLOCK]), map);
}

extern "C" __global__ void dequantize_signed(const unsigned char* codes, const uint16* scales, float* x, int64 count) {
    dequantize<true>(codes, scales, x, count);
}
extern "C" __global__ void dequantize_positive(const unsigned char* codes, const uint16* scales, float* x,
                                               int64 count) {
    dequantize<false>(codes, scales, x, count);
}
