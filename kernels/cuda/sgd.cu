// Stochastic gradient descent over a range of flat arrays.
//
// The gradient and the momentum may be of types of their own (macros GRADIENT and STATE). Multiply-adds are written
// out, so that an element has the same bits on the path of vectors and on the other.
#include "ranges.cuh"

#ifndef GRADIENT
#define GRADIENT ELEMENT
#endif
#ifndef STATE
#define STATE ELEMENT
#endif

extern "C" __global__ void descend(T* param, const GRADIENT* grad, int64 start, int64 stop, A lr, A decay,
                                   int vectors) {
    each_in<Widest<T, GRADIENT>::value>(start, stop, vectors, [=](int64 i, auto width) {
        constexpr int W = decltype(width)::value;
        Pack<T, W> p = load<W>(param + i);
        Pack<GRADIENT, W> g = load<W>(grad + i);
#pragma unroll
        for (int k = 0; k < W; k++) {
            A value = to_acc(p[k]);
            p[k] = from_acc<T>(fma(-lr, fma(decay, value, A(to_acc(g[k]))), value));
        }
        store<W>(param + i, p);
    });
}

// first: the buffer holds nothing yet. Then kept is 0 and rest 1, and it is not read: it may hold nan.
extern "C" __global__ void descend_with_momentum(T* param, const GRADIENT* grad, STATE* buffer, int64 start,
                                                 int64 stop, A lr, A decay, A momentum, A kept, A rest, int nesterov,
                                                 int first, int vectors) {
    each_in<Widest<T, GRADIENT, STATE>::value>(start, stop, vectors, [=](int64 i, auto width) {
        constexpr int W = decltype(width)::value;
        Pack<T, W> p = load<W>(param + i);
        Pack<GRADIENT, W> g = load<W>(grad + i);
        Pack<STATE, W> b = load<W>(buffer + i);
#pragma unroll
        for (int k = 0; k < W; k++) {
            A value = to_acc(p[k]), gradient = fma(decay, value, A(to_acc(g[k])));
            A before = first ? A(0) : A(to_acc(b[k]));
            A moving = fma(kept, before, rest * gradient);
            b[k] = from_acc<STATE>(moving);
            p[k] = from_acc<T>(fma(-lr, nesterov ? fma(momentum, moving, gradient) : moving, value));
        }
        store<W>(buffer + i, b);
        store<W>(param + i, p);
    });
}
