// A matrix in float8 with one scale, as it lies and transposed: cublasLt's products of Hopper read both operands along
// the inner dimension, which is another one in forward, for the gradient of the input and for that of the weight.
//
// ELEMENT: float __nv_bfloat16
#include "ranges.cuh"
#ifndef SHARDRT_SHIM
#include <cuda_fp8.h>
#endif

constexpr int TILE = 64, QUAD = 4;  // a tile is TILE x TILE elements, a thread has QUAD x QUAD of them
constexpr int QUADS = TILE / QUAD;
constexpr float LEAST = 1e-12f;  // amax below which the scale is that of it, so that it is finite

template <__nv_fp8_interpretation_t KIND> __device__ __forceinline__ uint32 pair(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, KIND);
}

template <__nv_fp8_interpretation_t KIND>
__device__ __forceinline__ void cast(const T* x, const float* amaxes, int64 count, uint32* rowwise, uint32* columnwise,
                                     float* scale, int64 rows, int64 columns) {
    __shared__ uint32 largest[WARP], tile[TILE][QUADS + 1];
    constexpr float MOST = KIND == __NV_E4M3 ? 448 : 57344;
    uint32 bits = 0;  // of floats that are not negative they are in the order of these, and nan is above all
    for (int64 i = threadIdx.x; i < count; i += blockDim.x) bits = max(bits, __float_as_uint(amaxes[i]));
    float amax = __uint_as_float(block_max(bits, largest));
    float held = amax < LEAST ? LEAST : amax;
    float factor = MOST / held;  // of infinity it is 0, so what is not finite makes products that are not
    if (scale && blockIdx.x == 0 && threadIdx.x == 0) {
        scale[0] = held / MOST;
        scale[1] = amax;
    }
    int across = threadIdx.x % QUADS, down = threadIdx.x / QUADS;
    int64 width = (columns + TILE - 1) / TILE, tiles = width * ((rows + TILE - 1) / TILE);
    for (int64 number = blockIdx.x; number < tiles; number += gridDim.x) {
        int64 top = number / width * TILE, left = number % width * TILE;
        int64 row = top + down * QUAD, column = left + across * QUAD;
        if (row < rows && column < columns) {  // sizes are multiples of QUAD
            Pack<T, QUAD> numbers[QUAD];
            uint32 words[QUAD];
#pragma unroll
            for (int i = 0; i < QUAD; i++) numbers[i] = load<QUAD>(x + (row + i) * columns + column);
#pragma unroll
            for (int i = 0; i < QUAD; i++) {
                float value[QUAD];
#pragma unroll
                for (int j = 0; j < QUAD; j++) value[j] = __fmul_rn(to_acc(numbers[i][j]), factor);
                words[i] = pair<KIND>(value[0], value[1]) | pair<KIND>(value[2], value[3]) << 16;
                if (rowwise) rowwise[((row + i) * columns + column) / QUAD] = words[i];
            }
            if (columnwise)
#pragma unroll
                for (int j = 0; j < QUAD; j++) {
                    uint32 word = 0;
#pragma unroll
                    for (int i = 0; i < QUAD; i++) word |= (words[i] >> 8 * j & 0xff) << 8 * i;
                    tile[across * QUAD + j][down] = word;
                }
        }
        if (!columnwise) continue;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < QUAD; k++) {  // half a warp writes the 64 bytes of a column
            int64 column = left + k * QUADS + down, row = top + across * QUAD;
            if (column < columns && row < rows)
                columnwise[(column * rows + row) / QUAD] = tile[k * QUADS + down][across];
        }
        __syncthreads();
    }
}

// x (rows, columns), multiples of 4, aligned to 16 bytes; 256 threads. amaxes (count,): the largest of them is that of
// |x|. rowwise (rows, columns), columnwise (columns, rows), scale (2,): what float8 is multiplied by, and amax; each may
// be null.
extern "C" __global__ void __launch_bounds__(256) cast_e4m3(const T* x, const float* amaxes, int64 count, uint32* rowwise,
                                                            uint32* columnwise, float* scale, int64 rows, int64 columns) {
    cast<__NV_E4M3>(x, amaxes, count, rowwise, columnwise, scale, rows, columns);
}
extern "C" __global__ void __launch_bounds__(256) cast_e5m2(const T* x, const float* amaxes, int64 count, uint32* rowwise,
                                                            uint32* columnwise, float* scale, int64 rows, int64 columns) {
    cast<__NV_E5M2>(x, amaxes, count, rowwise, columnwise, scale, rows, columns);
}
