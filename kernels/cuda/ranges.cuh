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

// Calls step for all of [start, stop), of which this thread takes every stride-th from its own on. vectors: the arrays
// begin at multiples of 16.
template <int N, class Step>
__device__ __forceinline__ void each_of(int64 start, int64 stop, bool vectors, int64 own, int64 stride, Step step) {
    int64 begin = vectors ? min((start + N - 1) / N * N, stop) : stop;  // N at once in [begin, end)
    int64 end = max(begin, stop / N * N);
    for (int64 i = begin + own * N; i < end; i += stride * N) step(i, Width<N>());
    for (int64 i = start + own; i < begin; i += stride) step(i, Width<1>());
    for (int64 i = end + own; i < stop; i += stride) step(i, Width<1>());
}

// The same, shared out among the grid.
template <int N, class Step>
__device__ __forceinline__ void each_in(int64 start, int64 stop, bool vectors, Step step) {
    each_of<N>(start, stop, vectors, blockIdx.x * (int64)blockDim.x + threadIdx.x, gridDim.x * (int64)blockDim.x, step);
}

// The same for many ranges, shared out among the grid in tiles. step_of(row) gives the step of one, from its row.
//
// table (count, COLUMNS): start and stop of a range, then its numbers. Ranges are in order and do not overlap. A range
// may be as short as one element, so a block looks for those of its tile, not for all.
constexpr int64 RANGE_TILE = 4096;  // elements: a multiple of every N

template <int N, int COLUMNS, class StepOf>
__device__ __forceinline__ void each_in_ranges(const double* table, int64 count, bool vectors, StepOf step_of) {
    int64 first = int64(table[0]), last = int64(table[(count - 1) * COLUMNS + 1]);
    for (int64 tile = first / RANGE_TILE + blockIdx.x; tile * RANGE_TILE < last; tile += gridDim.x) {
        int64 begin = tile * RANGE_TILE, end = begin + RANGE_TILE;
        int64 k = 0, high = count;  // the first range that stops beyond `begin` is in [k, high]
        while (k < high) {
            int64 middle = k + (high - k) / 2;
            if (int64(table[middle * COLUMNS + 1]) > begin) high = middle;
            else k = middle + 1;
        }
        for (; k < count && int64(table[k * COLUMNS]) < end; k++) {
            const double* row = table + k * COLUMNS;
            int64 start = max(int64(row[0]), begin), stop = min(int64(row[1]), end);
            each_of<N>(start, stop, vectors, threadIdx.x, blockDim.x, step_of(row));
        }
    }
}
