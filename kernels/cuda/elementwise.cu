// The few elementwise passes that the runtime itself makes, on flat arrays: sixteen bytes per thread and turn.
#include "ranges.cuh"

constexpr int N = Vector<T>::width;

extern "C" __global__ void add(const T* first, const T* second, T* out, int64 count, int vectors) {
    each_in<N>(0, count, vectors, [=](int64 i, auto width) {
        constexpr int W = decltype(width)::value;
        Pack<T, W> a = load<W>(first + i), b = load<W>(second + i);
#pragma unroll
        for (int k = 0; k < W; k++) a[k] = from_acc<T>(to_acc(a[k]) + to_acc(b[k]));
        store<W>(out + i, a);
    });
}

// x = of(x) for every element.
template <class Of> __device__ __forceinline__ void change(T* x, int64 count, int vectors, Of of) {
    each_in<N>(0, count, vectors, [&](int64 i, auto width) {
        constexpr int W = decltype(width)::value;
        Pack<T, W> pack = load<W>(x + i);
#pragma unroll
        for (int k = 0; k < W; k++) pack[k] = from_acc<T>(of(to_acc(pack[k])));
        store<W>(x + i, pack);
    });
}

extern "C" __global__ void scale(T* x, A factor, int64 count, int vectors) {
    change(x, count, vectors, [=](A value) { return value * factor; });
}

// As scale, by a number that the host need not know; there is nothing to do where it is 1.
extern "C" __global__ void scale_by(T* x, const double* factor, int64 count, int vectors) {
    A by = A(*factor);
    if (by != A(1)) change(x, count, vectors, [=](A value) { return value * by; });
}

// *wrong becomes 1 if an element is infinite or not a number.
extern "C" __global__ void unscale(T* x, A factor, int* wrong, int64 count, int vectors) {
    bool found = false;
    change(x, count, vectors, [&](A value) {
        found |= !(value - value == A(0));
        return value * factor;
    });
    if (found) *wrong = 1;  // whoever writes, writes the same
}

extern "C" __global__ void clamp(T* x, A limit, int64 count, int vectors) {
    change(x, count, vectors, [=](A value) {
        value = value > limit ? limit : value;  // a comparison with nan is false: nan stays
        return value < -limit ? -limit : value;
    });
}
