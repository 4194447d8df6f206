// Block-wise 8-bit numbers: a code per element and a scale per block of 16. kernels/cpu/blockwise.py says what they are.
//
// A thread has a whole block: it finds the block's largest number without others.
#pragma once
#include "ranges.cuh"

typedef unsigned char uint8;
constexpr int BLOCK = 16;  // elements, and bytes of codes: one load

// A map in shared memory: the numbers of its codes, and the middles between neighbours.
struct Map {
    float value[256], middle[255];
};

__device__ const float DECADES[7] = {1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f, 1e0f};

// Edge k of `parts` equal parts of [0.1, 1], counted from the nearer end.
__device__ __forceinline__ float edge(int k, int parts) {
    float step = (1.0f - 0.1f) / parts;
    return k < (parts + 1) / 2 ? fmaf(step, k, 0.1f) : fmaf(-step, parts - k, 1.0f);
}

// Number `place` > 0 in ascending order; the smallest decade has 2^first parts.
__device__ __forceinline__ float number_of(int place, int first) {
    int order = place + (1 << first) - 1, bits = first;
    while ((2 << bits) <= order) bits++;
    int decade = bits - first;
    if (decade > 6) return 1;
    int parts = 1 << bits, k = order - parts;
    return DECADES[decade] * ((edge(k, parts) + edge(k + 1, parts)) / 2);
}

// Fills the map, by all threads of the block.
template <bool SIGNED> __device__ __forceinline__ void fill(Map& map) {
    constexpr int ZERO = SIGNED ? 127 : 0;
    for (int code = threadIdx.x; code < 256; code += blockDim.x) {
        int place = code - ZERO;
        float size = place ? number_of(place < 0 ? -place : place, SIGNED ? 0 : 1) : 0;
        map.value[code] = place < 0 ? -size : size;
    }
    __syncthreads();
    for (int code = threadIdx.x; code < 255; code += blockDim.x)
        map.middle[code] = (map.value[code] + map.value[code + 1]) / 2;
    __syncthreads();
}

// The code of the number that is nearest to x; of two as near, the lower one.
__device__ __forceinline__ int code_of(float x, const Map& map) {
    int code = 0;
#pragma unroll
    for (int bit = 128; bit; bit >>= 1) code += x > map.middle[code + bit - 1] ? bit : 0;
    return code;
}

__device__ __forceinline__ float scale_of(uint16 bits) { return __uint_as_float(uint32(bits) << 16); }

// The codes of a block of `count` numbers; gives their scale.
template <bool SIGNED, int W>
__device__ __forceinline__ uint16 encode(const float (&x)[W], int count, Pack<uint8, W>& codes, const Map& map) {
    float lowest = map.value[0], top = 0, wrong = 0;
#pragma unroll
    for (int k = 0; k < W; k++) {
        float size = k >= count ? 0 : !SIGNED || x[k] >= 0 ? x[k] : x[k] / lowest;
        wrong += size - size;  // nan, if it is not finite
        top = size > top ? size : top;
    }
    top += wrong;
    __nv_bfloat16 kept = from_acc<__nv_bfloat16>(top);
    float scale = to_acc(kept);
#pragma unroll
    for (int k = 0; k < W; k++) {
        float size = !SIGNED || x[k] >= 0 ? x[k] : x[k] / lowest;
        int code = scale > 0 ? code_of(x[k] / scale, map) : 0;
        if (size == top && top > 0) code = x[k] >= 0 ? 255 : 0;  // an end of the map, however the scale was rounded
        codes[k] = !SIGNED && x[k] > 0 && code < 1 ? 1 : code;
    }
    return *reinterpret_cast<uint16*>(&kept);
}

__device__ __forceinline__ float decode(uint8 code, float scale, const Map& map) {
    return __fadd_rn(__fmul_rn(map.value[code], scale), 0.0f);  // never -0
}

// Moves a block, or its first `count` elements one by one.
template <class X> __device__ __forceinline__ Pack<X, BLOCK> load_block(const X* from, int count, bool whole) {
    if (whole) return load<BLOCK>(from);
    Pack<X, BLOCK> pack;
#pragma unroll
    for (int k = 0; k < BLOCK; k++) pack[k] = k < count ? from[k] : X();
    return pack;
}
template <class X>
__device__ __forceinline__ void store_block(X* to, const Pack<X, BLOCK>& pack, int count, bool whole) {
    if (whole) return store<BLOCK>(to, pack);
#pragma unroll
    for (int k = 0; k < BLOCK; k++)
        if (k < count) to[k] = pack[k];
}

// Calls step(first element, number of elements, settings) for each block of the ranges, which begin with blocks.
template <int COLUMNS, class StepOf>
__device__ __forceinline__ void each_block_in_ranges(const double* table, int64 count, StepOf step_of) {
    each_in_ranges<BLOCK, COLUMNS>(table, count, true, [=](const double* row) {
        auto step = step_of(row);
        int64 stop = int64(row[1]);
        return [=](int64 i, auto) {  // one by one in the last block: its first element stands for all
            if (i % BLOCK == 0) step(i, int(min(int64(BLOCK), stop - i)));
        };
    });
}
