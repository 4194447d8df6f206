// Stochastic gradient descent over ranges of flat arrays.
//
// The gradient and the momentum may be of types of their own (macros GRADIENT and STATE). Multiply-adds are written
// out, so that an element has the same bits on the path of vectors and on the other.
#include "ranges.cuh"

// ranges (count, 6): start, stop, and what an element of it has for lr, decay, kept and added.
extern "C" __global__ void descend(T* param, const GRADIENT* grad, const double* ranges, int64 count, int vectors) {
    each_in_ranges<Widest<T, GRADIENT>::value, 6>(ranges, count, vectors, [=](const double* row) {
        A lr = A(row[2]), decay = A(row[3]);
        return [=](int64 i, auto width) {
            constexpr int W = decltype(width)::value;
            Pack<T, W> p = load<W>(param + i);
            Pack<GRADIENT, W> g = load<W>(grad + i);
#pragma unroll
            for (int k = 0; k < W; k++) {
                A value = to_acc(p[k]);
                p[k] = from_acc<T>(fma(-lr, fma(decay, value, A(to_acc(g[k]))), value));
            }
            store<W>(param + i, p);
        };
    });
}

// Where kept is 0 the buffer is not read: it may hold nan.
extern "C" __global__ void descend_with_momentum(T* param, const GRADIENT* grad, STATE* buffer, const double* ranges,
                                                 int64 count, A momentum, int nesterov, int vectors) {
    constexpr int N = Widest<T, GRADIENT, STATE>::value;
    each_in_ranges<N, 6>(ranges, count, vectors, [=](const double* row) {
        A lr = A(row[2]), decay = A(row[3]), kept = A(row[4]), added = A(row[5]);
        return [=](int64 i, auto width) {
            constexpr int W = decltype(width)::value;
            Pack<T, W> p = load<W>(param + i);
            Pack<GRADIENT, W> g = load<W>(grad + i);
            Pack<STATE, W> b = load<W>(buffer + i);
#pragma unroll
            for (int k = 0; k < W; k++) {
                A value = to_acc(p[k]), gradient = fma(decay, value, A(to_acc(g[k])));
                A before = kept == A(0) ? A(0) : A(to_acc(b[k]));
                A moving = fma(kept, before, added * gradient);
                b[k] = from_acc<STATE>(moving);
                p[k] = from_acc<T>(fma(-lr, nesterov ? fma(momentum, moving, gradient) : moving, value));
            }
            store<W>(buffer + i, b);
            store<W>(param + i, p);
        };
    });
}
