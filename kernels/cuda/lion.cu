// Lion over ranges of flat arrays: one pass that reads and writes everything once.
//
// The gradient and the momentum may be of types of their own (macros GRADIENT and STATE). Multiply-adds are written
// out, so that an element has the same bits on the path of vectors and on the other.
#include "ranges.cuh"

constexpr int N = Widest<T, GRADIENT, STATE>::value;

// ranges (count, 6): start, stop, and what an element of it has for keep, rate, beta1 and beta2.
extern "C" __global__ void lion(T* param, const GRADIENT* grad, STATE* m, const double* ranges, int64 count,
                                int vectors) {
    each_in_ranges<N, 6>(ranges, count, vectors, [=](const double* row) {
        A keep = A(row[2]), rate = A(row[3]);
        A beta1 = A(row[4]), rest1 = A(1 - row[4]), beta2 = A(row[5]), rest2 = A(1 - row[5]);
        return [=](int64 i, auto width) {
            constexpr int W = decltype(width)::value;
            Pack<T, W> p = load<W>(param + i);
            Pack<GRADIENT, W> g = load<W>(grad + i);
            Pack<STATE, W> moving = load<W>(m + i);
#pragma unroll
            for (int k = 0; k < W; k++) {
                A gradient = A(to_acc(g[k])), before = A(to_acc(moving[k]));
                A mixed = fma(beta1, before, rest1 * gradient);
                A sign = mixed > A(0) ? A(1) : mixed < A(0) ? A(-1) : mixed;  // nan stays
                moving[k] = from_acc<STATE>(fma(beta2, before, rest2 * gradient));
                p[k] = from_acc<T>(fma(to_acc(p[k]), keep, -(rate * sign)));
            }
            store<W>(m + i, moving);
            store<W>(param + i, p);
        };
    });
}
