// Sums over ranks' buffers, in a fixed order.
//
// What is summed may be of another type than the sum (macro SOURCE). Compiled for a few numbers of buffers (macro
// PARTS): fewer take fewer registers, so that more threads of a multiprocessor load at once.
#include "ranges.cuh"

#ifndef SOURCE
#define SOURCE ELEMENT
#endif
#ifndef PARTS
#define PARTS 8
#endif

// Not fused: the bits of the CPU, and the same on the path of vectors and on the other.
__device__ __forceinline__ float scaled_sum(float base, float scale, float x) {
    return __fadd_rn(base, __fmul_rn(scale, x));
}
__device__ __forceinline__ double scaled_sum(double base, double scale, double x) {
    return __dadd_rn(base, __dmul_rn(scale, x));
}

constexpr int MOST = 8;  // that a launch is given

// out = (out if accumulate) + scale * (the first `parts` of a, b, ... added as a tree of neighbours).
// The parts are of SOURCE; `out` may be one of them.
extern "C" __global__ void sum_parts(T* out, const void* a, const void* b, const void* c, const void* d,
                                     const void* e, const void* f, const void* g, const void* h, int parts, A scale,
                                     int accumulate, int64 count, int vectors) {
    const void* all[MOST] = {a, b, c, d, e, f, g, h};
    each_in<Widest<T, SOURCE>::value>(0, count, vectors, [&](int64 i, auto width) {
        constexpr int W = decltype(width)::value;
        Pack<SOURCE, W> sources[PARTS];
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            if (part < parts) sources[part] = load<W>(static_cast<const SOURCE*>(all[part]) + i);
        Pack<T, W> result;
        if (accumulate) result = load<W>(out + i);
#pragma unroll
        for (int k = 0; k < W; k++) {
            A sums[PARTS];
#pragma unroll
            for (int part = 0; part < PARTS; part++) sums[part] = part < parts ? A(to_acc(sources[part][k])) : A(0);
#pragma unroll
            for (int step = 1; step < PARTS; step *= 2)
#pragma unroll
                for (int part = 0; part + step < PARTS; part += 2 * step)
                    if (part + step < parts) sums[part] += sums[part + step];
            result[k] = from_acc<T>(accumulate ? scaled_sum(to_acc(result[k]), scale, sums[0]) : scale * sums[0]);
        }
        store<W>(out + i, result);
    });
}
