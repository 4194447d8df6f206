// Lion over ranges of flat arrays with its moment in 8 bits: one pass that reads and writes everything once.
//
// The gradient may be of a type of its own (macro GRADIENT).
// ELEMENT: float
#include "blockwise.cuh"

// ranges (count, 6) as lion.cu's.
extern "C" __global__ void lion8bit(float* param, const GRADIENT* grad, unsigned char* m, uint16* m_scales,
                                    const double* ranges, int64 count, int vectors) {
    __shared__ Map map;
    fill<true>(map);
    const Map* of_m = &map;
    each_block_in_ranges<6>(ranges, count, [=](const double* row) {
        float keep = row[2], rate = row[3];
        float beta1 = row[4], rest1 = 1 - row[4], beta2 = row[5], rest2 = 1 - row[5];
        return [=](int64 i, int size) {
            bool whole = vectors && size == BLOCK;
            Pack<float, BLOCK> p = load_block(param + i, size, whole);
            Pack<GRADIENT, BLOCK> g = load_block(grad + i, size, whole);
            Pack<uint8, BLOCK> codes = load_block(m + i, size, whole);
            float scale = scale_of(m_scales[i / BLOCK]), moving[BLOCK];
#pragma unroll
            for (int k = 0; k < BLOCK; k++) {
                float gradient = to_acc(g[k]), before = decode(codes[k], scale, *of_m);
                float mixed = fmaf(beta1, before, rest1 * gradient);
                float sign = mixed > 0 ? 1.0f : mixed < 0 ? -1.0f : mixed;  // nan stays
                moving[k] = fmaf(beta2, before, rest2 * gradient);
                p[k] = fmaf(p[k], keep, -(rate * sign));
            }
            m_scales[i / BLOCK] = encode<true>(moving, size, codes, *of_m);
            store_block(m + i, codes, size, whole);
            store_block(param + i, p, size, whole);
        };
    });
}
