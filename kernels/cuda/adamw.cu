// AdamW over ranges of flat arrays: one pass that reads and writes everything once.
//
// The gradient and the moments may be of types of their own (macros GRADIENT and STATE; MOMENT for the first moment). The new weights may be written
// once more, rounded to another type (ROUNDED). Multiply-adds are written out, so that an element has the same bits on
// the path of vectors and on the other.
#include "ranges.cuh"

#ifndef MOMENT
#define MOMENT STATE
#endif
#ifndef ROUNDED
#define ROUNDED __nv_bfloat16
#endif

constexpr int N = Widest<T, GRADIENT, STATE>::value;

// ranges (count, 8): start, stop, and what an element of it has for keep, rate, correction, beta1, beta2 and eps.
// rounded may be null.
extern "C" __global__ void adamw(T* param, const GRADIENT* grad, MOMENT* m, STATE* v, ROUNDED* rounded,
                                 const double* ranges, int64 count, int vectors) {
    each_in_ranges<N, 8>(ranges, count, vectors, [=](const double* row) {
        A keep = A(row[2]), rate = A(row[3]), correction = A(row[4]), eps = A(row[7]);
        A beta1 = A(row[5]), rest1 = A(1 - row[5]), beta2 = A(row[6]), rest2 = A(1 - row[6]);
        return [=](int64 i, auto width) {
            constexpr int W = decltype(width)::value;
            Pack<T, W> p = load<W>(param + i);
            Pack<GRADIENT, W> g = load<W>(grad + i);
            Pack<MOMENT, W> one = load<W>(m + i);
            Pack<STATE, W> two = load<W>(v + i);
#pragma unroll
            for (int k = 0; k < W; k++) {
                A gradient = A(to_acc(g[k]));
                A first = fma(beta1, A(to_acc(one[k])), rest1 * gradient);
                A second = fma(beta2, A(to_acc(two[k])), rest2 * gradient * gradient);
                one[k] = from_acc<MOMENT>(first);
                two[k] = from_acc<STATE>(second);
                A change = rate * (first / fma(sqrt(second), correction, eps));
                p[k] = from_acc<T>(fma(to_acc(p[k]), keep, -change));
            }
            store<W>(m + i, one);
            store<W>(v + i, two);
            store<W>(param + i, p);
            if (rounded) {
                Pack<ROUNDED, W> low;
#pragma unroll
                for (int k = 0; k < W; k++) low[k] = from_acc<ROUNDED>(float(to_acc(p[k])));
                store<W>(rounded + i, low);
            }
        };
    });
}
