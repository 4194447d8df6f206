// Numbers quantised in blocks to 8 or 4 bits: one warp to a block. The form is in kernels/packed.py, the
// arithmetic is that of kernels/cpu/quantise.py, step by step: bitwise identical, except for codes of nan.
//
// ELEMENT: float
// Macro: CODES=8
#include "common.cuh"

typedef unsigned char uint8;

constexpr float ROUND = 12582912.0f, SMALLEST = 1e-30f;  // 1.5 * 2**23
constexpr uint32 MAGNITUDE = 0x7fffffffu, INFINITE = 0x7f800000u, SIGN = 0x80000000u, NAN_BITS = 0x7fc00000u;

// What a block's codes mean: least + code * step. In 8 bits `least` is 0 and codes are signed.
struct Scale {
    float step, least, factor;
};

__device__ __forceinline__ Scale scale_of(uint32 scale) {
    if (CODES == 8) return {__uint_as_float(scale), 0, 0};
    return {__uint_as_float(scale << 16), __uint_as_float(scale & 0xffff0000u), 0};
}

__device__ __forceinline__ uint32 code_of(float x, Scale scale) {
    if (CODES == 8) return scale.factor > 0 ? __float_as_uint(__fadd_rn(__fmul_rn(x, scale.factor), ROUND)) : 0u;
    float place = __fmul_rn(x - scale.least, scale.factor);
    return __float_as_uint(__fadd_rn(fminf(fmaxf(place, 0.0f), 15.0f), ROUND));
}

// Bits that have the order of the floats: those of nan are below or above all others.
__device__ __forceinline__ uint32 ordered(float x) {
    uint32 bits = __float_as_uint(x);
    return bits < SIGN ? bits ^ SIGN : ~bits;
}

__device__ __forceinline__ float from_ordered(uint32 bits) {
    return __uint_as_float(bits >= SIGN ? bits ^ SIGN : ~bits);
}

__device__ __forceinline__ float bfloat16(float x) { return to_acc(from_acc<__nv_bfloat16>(x)); }

// The greatest finite bfloat16 that is not above x, or the least.
__device__ __forceinline__ float below(float x) {
    uint32 bits = __float_as_uint(x);
    if (bits < SIGN) return __uint_as_float(bits & 0xffff0000u);
    return __uint_as_float(min((bits + 0xffffu) & 0xffff0000u, 0xff7f0000u));
}

// For each block: step(number of the block, its first element, its length, lane).
template <class Step> __device__ __forceinline__ void each_block(int64 count, int64 block, Step step) {
    int64 blocks = (count + block - 1) / block, warps = gridDim.x * (int64)(blockDim.x / WARP);
    for (int64 b = (blockIdx.x * (int64)blockDim.x + threadIdx.x) / WARP; b < blocks; b += warps)
        step(b, b * block, min(block, count - b * block), int(threadIdx.x % WARP));
}

// The scale of a symmetric block. All lanes of a warp get it.
__device__ __forceinline__ Scale symmetric(const float* x, int64 length, int lane) {
    uint32 top = 0;
    for (int64 i = lane; i < length; i += WARP) top = max(top, __float_as_uint(x[i]) & MAGNITUDE);
    top = warp_max(top);
    float most = __uint_as_float(top);
    if (top >= INFINITE) return {__uint_as_float(NAN_BITS), 0, 0};
    if (most < SMALLEST) return {0, 0, 0};
    return {most / 127.0f, 0, 127.0f / most};
}

// The steps of a block from its least number to its greatest.
__device__ __forceinline__ Scale span(const float* x, int64 length, int lane) {
    uint32 lowest = 0, above = 0;  // lowest: of the least number, inverted
    for (int64 i = lane; i < length; i += WARP) {
        uint32 bits = ordered(x[i]);
        lowest = max(lowest, ~bits);
        above = max(above, bits);
    }
    lowest = warp_max(lowest);
    above = warp_max(above);
    float infinity = __uint_as_float(INFINITE);
    if (~lowest <= ordered(-infinity) || above >= ordered(infinity)) return {__uint_as_float(NAN_BITS), 0, 0};
    float least = below(from_ordered(~lowest));
    float step = bfloat16(from_ordered(above) / 15.0f - least / 15.0f);
    if (!(step >= SMALLEST)) return {0, least, 0};
    return {step, least, 1.0f / step};
}

extern "C" __global__ void pack(const float* x, uint32* scales, uint8* codes, int64 count, int64 block) {
    each_block(count, block, [=](int64 b, int64 first, int64 length, int lane) {
        if (CODES == 8) {
            Scale scale = symmetric(x + first, length, lane);
            if (lane == 0) scales[b] = __float_as_uint(scale.step);
            for (int64 i = lane; i < length; i += WARP) codes[first + i] = uint8(code_of(x[first + i], scale));
            return;
        }
        Scale scale = span(x + first, length, lane);
        if (lane == 0) scales[b] = __float_as_uint(scale.least) | __float_as_uint(scale.step) >> 16;
        for (int64 i = lane; i < (length + 1) / 2; i += WARP) {
            uint32 low = code_of(x[first + 2 * i], scale), high = 0;
            if (2 * i + 1 < length) high = code_of(x[first + 2 * i + 1], scale);
            codes[first / 2 + i] = uint8((low & 15u) | ((high & 15u) << 4));
        }
    });
}

// A row of packed: its scales, and its codes `ends` bytes behind their begin.
__device__ __forceinline__ float value(const uint8* row, int64 ends, int64 b, int64 i) {
    const uint8* codes = row + ends;
    Scale scale = scale_of(reinterpret_cast<const uint32*>(row)[b]);
    if (CODES == 8) return __fmul_rn(float((signed char)codes[i]), scale.step);
    return __fadd_rn(__fmul_rn(float((codes[i >> 1] >> (4 * (i & 1))) & 15), scale.step), scale.least);
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
