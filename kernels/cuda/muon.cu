// Muon's elementwise passes over a piece of a matrix: before the matrix is orthogonalized, and after.
//
// The gradient may be of a type of its own (macro GRADIENT). Multiply-adds are written out, so that an element has the
// same bits on the path of vectors and on the other.
#include "ranges.cuh"

constexpr int N = Widest<T, GRADIENT>::value;

extern "C" __global__ void direction(const GRADIENT* grad, T* m, T* out, A kept, A ahead, int64 count, int vectors) {
    A added = A(1) - kept, rest = A(1) - ahead;
    each_in<N>(0, count, vectors, [=](int64 i, auto width) {
        constexpr int W = decltype(width)::value;
        Pack<GRADIENT, W> g = load<W>(grad + i);
        Pack<T, W> moving = load<W>(m + i), result;
#pragma unroll
        for (int k = 0; k < W; k++) {
            A gradient = A(to_acc(g[k])), mean = fma(kept, A(to_acc(moving[k])), added * gradient);
            moving[k] = from_acc<T>(mean);
            result[k] = from_acc<T>(fma(ahead, mean, rest * gradient));
        }
        store<W>(m + i, moving);
        store<W>(out + i, result);
    });
}

extern "C" __global__ void apply(T* param, const T* update, A keep, A rate, int64 count, int vectors) {
    each_in<N>(0, count, vectors, [=](int64 i, auto width) {
        constexpr int W = decltype(width)::value;
        Pack<T, W> p = load<W>(param + i), step = load<W>(update + i);
#pragma unroll
        for (int k = 0; k < W; k++) p[k] = from_acc<T>(fma(keep, to_acc(p[k]), -(rate * to_acc(step[k]))));
        store<W>(param + i, p);
    });
}
