// AdamW over ranges of flat arrays with moments in 8 bits: one pass that reads and writes everything once.
//
// The gradient may be of a type of its own (macro GRADIENT). The new weights may be written once more, rounded (ROUNDED).
// ELEMENT: float
#include "blockwise.cuh"

#ifndef ROUNDED
#define ROUNDED __nv_bfloat16
#endif

// ranges (count, 8) as adamw.cu's. rounded may be null.
extern "C" __global__ void adamw8bit(float* param, const GRADIENT* grad, unsigned char* m, uint16* m_scales, unsigned char* v,
                                     uint16* v_scales, ROUNDED* rounded, const double* ranges, int64 count,
                                     int vectors) {
    __shared__ Map both, positive;
    fill<true>(both);
    fill<false>(positive);
    const Map *of_m = &both, *of_v = &positive;
    each_block_in_ranges<8>(ranges, count, [=](const double* row) {
        float keep = row[2], rate = row[3], correction = row[4], eps = row[7];
        float beta1 = row[5], rest1 = 1 - row[5], beta2 = row[6], rest2 = 1 - row[6];
        return [=](int64 i, int size) {
            bool whole = vectors && size == BLOCK;
            Pack<float, BLOCK> p = load_block(param + i, size, whole);
            Pack<GRADIENT, BLOCK> g = load_block(grad + i, size, whole);
            Pack<uint8, BLOCK> one = load_block(m + i, size, whole), two = load_block(v + i, size, whole);
            float m_scale = scale_of(m_scales[i / BLOCK]), v_scale = scale_of(v_scales[i / BLOCK]);
            float first[BLOCK], second[BLOCK];
#pragma unroll
            for (int k = 0; k < BLOCK; k++) {
                float gradient = to_acc(g[k]);
                first[k] = fmaf(beta1, decode(one[k], m_scale, *of_m), rest1 * gradient);
                second[k] = fmaf(beta2, decode(two[k], v_scale, *of_v), rest2 * gradient * gradient);
                float change = rate * (first[k] / fmaf(sqrt(second[k]), correction, eps));
                p[k] = fmaf(p[k], keep, -change);
            }
            m_scales[i / BLOCK] = encode<true>(first, size, one, *of_m);
            v_scales[i / BLOCK] = encode<false>(second, size, two, *of_v);
            store_block(m + i, one, size, whole);
            store_block(v + i, two, size, whole);
            store_block(param + i, p, size, whole);
            if (rounded) {
                Pack<ROUNDED, BLOCK> low;
#pragma unroll
                for (int k = 0; k < BLOCK; k++) low[k] = from_acc<ROUNDED>(p[k]);
                store_block(rounded + i, low, size, whole);
            }
        };
    });
}
