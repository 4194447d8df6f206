// Elementwise work on a part [start, stop) of flat arrays: N elements at once where N of them are aligned, else one.
//
// The step of such a loop is written once, as a generic lambda step(i, width) whose width is Width<N> or Width<1>.
#pragma once
#include "common.cuh"

template <int N> struct Width {
    static constexpr int value = N;
};

// The largest number of elements in sixteen bytes: so many at once when arrays of several types go side by side.
template <class X, class... Others> struct Widest {
    static constexpr int own = 16 / sizeof(X), others = Widest<Others...>::value;
    static constexpr int value = own > others ? own : others;
};
template <class X> struct Widest<X> {
    static constexpr int value = 16 / sizeof(X);
};

// N elements, moved sixteen bytes at a time (less if they are less). Aligned to that.
template <class X, int N> struct alignas(N * sizeof(X) < 16 ? N * sizeof(X) : 16) Pack {
    X value[N];
    __device__ __forceinline__ X& operator[](int i) { return value[i]; }
    __device__ __forceinline__ const X& operator[](int i) const { return value[i]; }
};
template <int N, class X> __device__ __forceinline__ Pack<X, N> load(const X* from) {
    return *reinterpret_cast<const Pack<X, N>*>(from);
}
template <int N, class X> __device__ __forceinline__ void store(X* to, const Pack<X, N>& pack) {
    *reinterpret_cast<Pack<X, N>*>(to) = pack;
}

// Calls step for all of [start, stop), shared out among the grid. vectors: the arrays begin at multiples of 16.
template <int N, class Step>
__device__ __forceinline__ void each_in(int64 start, int64 stop, bool vectors, Step step) {
    int64 first = blockIdx.x * (int64)blockDim.x + threadIdx.x, stride = gridDim.x * (int64)blockDim.x;
    int64 begin = vectors ? min((start + N - 1) / N * N, stop) : stop;  // N at once in [begin, end)
    int64 end = max(begin, stop / N * N);
    for (int64 i = begin + first * N; i < end; i += stride * N) step(i, Width<N>());
    for (int64 i = start + first; i < begin; i += stride) step(i, Width<1>());
    for (int64 i = end + first; i < stop; i += stride) step(i, Width<1>());
}
