// Numbers quantised in blocks to 8 or 4 bits: one warp to a block. The form is in kernels/packed.py, the
// arithmetic is that of kernels/cpu/quantise.py, step by step: bitwise identical, except for codes of nan.
//
// ELEMENT: float
// Macro: CODES=8
#include "common.cuh"

typedef unsigned char uint8;

constexpr float ROUND = 12582912.0f, SMALLEST = 1e-30f;  // 1.5 * 2**23
constexpr unsigned MAGNITUDE = 0x7fffffffu, INFINITE = 0x7f800000u;

__device__ __forceinline__ unsigned code_of(float x, float factor) {
    return factor > 0 ? __float_as_uint(__fadd_rn(__fmul_rn(x, factor), ROUND)) : 0u;
}

// The number whose code is number i of `codes`, without its scale.
__device__ __forceinline__ float number(const uint8* codes, int64 i) {
    if (CODES == 8) return float((signed char)codes[i]);
    int code = (codes[i >> 1] >> (4 * (i & 1))) & 15;
    return float((code ^ 8) - 8);
}

// For each block: step(number of the block, its first element, its length, lane).
template <class Step> __device__ __forceinline__ void each_block(int64 count, int64 block, Step step) {
    int64 blocks = (count + block - 1) / block, warps = gridDim.x * (int64)(blockDim.x / WARP);
    for (int64 b = (blockIdx.x * (int64)blockDim.x + threadIdx.x) / WARP; b < blocks; b += warps)
        step(b, b * block, min(block, count - b * block), int(threadIdx.x % WARP));
}

extern "C" __global__ void pack(const float* x, float* scales, uint8* codes, int64 count, int64 block,
                                float largest) {
    each_block(count, block, [=](int64 b, int64 first, int64 length, int lane) {
        unsigned top = 0;
        for (int64 i = lane; i < length; i += WARP) top = max(top, __float_as_uint(x[first + i]) & MAGNITUDE);
        top = warp_max(top);
        float factor = 0, scale = 0;
        if (top >= INFINITE) {
            scale = __uint_as_float(0x7fc00000u);
        } else if (__uint_as_float(top) >= SMALLEST) {
            scale = __uint_as_float(top) / largest;
            factor = largest / __uint_as_float(top);
        }
        if (lane == 0) scales[b] = scale;
        if (CODES == 8) {
            for (int64 i = lane; i < length; i += WARP) codes[first + i] = uint8(code_of(x[first + i], factor));
            return;
        }
        for (int64 i = lane; i < (length + 1) / 2; i += WARP) {
            unsigned low = code_of(x[first + 2 * i], factor), high = 0;
            if (2 * i + 1 < length) high = code_of(x[first + 2 * i + 1], factor);
            codes[first / 2 + i] = uint8((low & 15u) | ((high & 15u) << 4));
        }
    });
}

// A row of packed: its scales, and its codes `ends` bytes behind their begin.
__device__ __forceinline__ float value(const uint8* row, int64 ends, int64 b, int64 i) {
    return __fmul_rn(number(row + ends, i), reinterpret_cast<const float*>(row)[b]);
}

// out (rows, count).
extern "C" __global__ void unpack(const uint8* packed, float* out, int64 nbytes, int64 ends, int64 count, int64 block) {
    packed += blockIdx.y * nbytes;
    out += blockIdx.y * count;
    each_block(count, block, [=](int64 b, int64 first, int64 length, int lane) {
        for (int64 i = first + lane; i < first + length; i += WARP)
            out[i] = value(packed, ends, b, i);
    });
}

extern "C" __global__ void sum_rows(const uint8* packed, float* out, int64 rows, int64 nbytes, int64 ends, int64 count,
                                    int64 block, float scale, int accumulate) {
    each_block(count, block, [=](int64 b, int64 first, int64 length, int lane) {
        for (int64 i = first + lane; i < first + length; i += WARP) {
            float total = 0;
            for (int64 row = 0; row < rows; row++)
                total = __fadd_rn(total, value(packed + row * nbytes, ends, b, i));
            total = __fmul_rn(total, scale);
            out[i] = accumulate ? __fadd_rn(total, out[i]) : total;
        }
    });
}

extern "C" __global__ void subtract(const uint8* packed, float* x, int64 ends, int64 count, int64 block) {
    each_block(count, block, [=](int64 b, int64 first, int64 length, int lane) {
        for (int64 i = first + lane; i < first + length; i += WARP) {
            float error = x[i] - value(packed, ends, b, i);
            x[i] = error == error ? error : 0.0f;
        }
    });
}
