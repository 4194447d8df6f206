// AdamW and Lion with moments in bfloat16, rounded up or down at random: kernels/cpu/stochastic.py says how.
//
// The gradient may be of a type of its own (macro GRADIENT). The new weights may be written once more, rounded (ROUNDED).
// ELEMENT: float
#include "philox.cuh"

#ifndef ROUNDED
#define ROUNDED __nv_bfloat16
#endif

constexpr int QUAD = 4;  // elements with one block of Philox's numbers

__device__ __forceinline__ float widened(uint16 bits) { return __uint_as_float(uint32(bits) << 16); }

// The bits in bfloat16 of x, after `noise` of 16 bits is added below them.
__device__ __forceinline__ uint16 dithered(float x, uint32 noise) {
    uint32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) == 0x7f800000u) return uint16(bits >> 16);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16(bits >> 16 | 0x40);  // nan: a sum might be an infinity
    return uint16((bits + noise) >> 16);
}

// The sequence of a range, from the five numbers at the end of its row.
__device__ __forceinline__ Sequence sequence_of(const double* seed) {
    return {uint64(seed[1]) << 32 | uint64(seed[0]), uint64(seed[3]) << 32 | uint64(seed[2]), uint64(seed[4])};
}

// Calls step(element, its 32 random bits) for the elements of ranges, by quads.
template <int COLUMNS, class StepOf>
__device__ __forceinline__ void each_in_random(const double* table, int64 count, StepOf step_of) {
    each_in_ranges<QUAD, COLUMNS>(table, count, true, [=](const double* row) {
        auto step = step_of(row);
        Sequence sequence = sequence_of(row + COLUMNS - 5);
        int64 start = int64(row[0]), stop = int64(row[1]);
        return [=](int64 i, auto) {  // one by one in the last quad: its first element stands for all
            if ((i - start) % QUAD) return;
            Words words = philox(sequence, (sequence.offset + (i - start)) / QUAD);
#pragma unroll
            for (int k = 0; k < QUAD; k++)
                if (i + k < stop) step(i + k, words.word[k]);
        };
    });
}

extern "C" __global__ void adamw_stochastic(float* param, const GRADIENT* grad, uint16* m, uint16* v, ROUNDED* rounded,
                                            const double* ranges, int64 count) {
    each_in_random<13>(ranges, count, [=](const double* row) {
        float keep = row[2], rate = row[3], correction = row[4], eps = row[7];
        float beta1 = row[5], rest1 = 1 - row[5], beta2 = row[6], rest2 = 1 - row[6];
        return [=](int64 i, uint32 random) {
            float gradient = to_acc(grad[i]);
            float first = fmaf(beta1, widened(m[i]), rest1 * gradient);
            float second = fmaf(beta2, widened(v[i]), rest2 * gradient * gradient);
            float change = rate * (first / fmaf(sqrt(second), correction, eps));
            float updated = fmaf(param[i], keep, -change);
            m[i] = dithered(first, random & 0xffff);
            v[i] = dithered(second, random >> 16);
            param[i] = updated;
            if (rounded) rounded[i] = from_acc<ROUNDED>(updated);
        };
    });
}

extern "C" __global__ void lion_stochastic(float* param, const GRADIENT* grad, uint16* m, const double* ranges,
                                           int64 count) {
    each_in_random<11>(ranges, count, [=](const double* row) {
        float keep = row[2], rate = row[3];
        float beta1 = row[4], rest1 = 1 - row[4], beta2 = row[5], rest2 = 1 - row[5];
        return [=](int64 i, uint32 random) {
            float gradient = to_acc(grad[i]), before = widened(m[i]);
            float mixed = fmaf(beta1, before, rest1 * gradient);
            float sign = mixed > 0 ? 1.0f : mixed < 0 ? -1.0f : mixed;  // nan stays
            m[i] = dithered(fmaf(beta2, before, rest2 * gradient), random & 0xffff);
            param[i] = fmaf(param[i], keep, -(rate * sign));
        };
    });
}
