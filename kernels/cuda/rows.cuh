// Work on the rows of a matrix: kept in registers by a warp or a block, or read again from memory by a block.
//
// Rows that are a whole number of vectors, and not too many, are loaded once (Warp, Block, each_held); other rows
// go by each_in_row, which takes any width and pointers.
#pragma once
#include "ranges.cuh"

constexpr int N = Vector<T>::width;
constexpr int HELD = 8;  // vectors of a row that a thread keeps

// The threads that share a row: a warp, or the whole block.
struct Warp {
    static __device__ __forceinline__ int64 row() {
        return blockIdx.x * (int64)(blockDim.x / WARP) + threadIdx.x / WARP;
    }
    static __device__ __forceinline__ int rank() { return threadIdx.x % WARP; }
    static __device__ __forceinline__ int size() { return WARP; }
    static __device__ __forceinline__ A sum(A x) { return warp_sum(x); }
    static __device__ __forceinline__ A max(A x) { return warp_max(x); }
};
struct Block {
    static __device__ __forceinline__ int64 row() { return blockIdx.x; }
    static __device__ __forceinline__ int rank() { return threadIdx.x; }
    static __device__ __forceinline__ int size() { return blockDim.x; }
    static __device__ __forceinline__ A sum(A x) {
        __shared__ A shared[WARP];
        return block_sum(x, shared);
    }
    static __device__ __forceinline__ A max(A x) {
        __shared__ A shared[WARP];
        return block_max(x, shared);
    }
};

// Calls step(k, j) for every vector of a row of `width` that this thread keeps: its k-th, from element j on.
template <class Team, class Step> __device__ __forceinline__ void each_held(int width, Step step) {
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        int j = (k * Team::size() + Team::rank()) * N;
        if (j < width) step(k, j);
    }
}
// Between two uses of kept vectors: that the compiler converts them again, instead of keeping what they became.
template <int COUNT = HELD> __device__ __forceinline__ void keep_packed(Vector<T>* held) {
#ifndef SHARDRT_SHIM
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        uint4& words = reinterpret_cast<uint4&>(held[k]);
        asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
    }
#endif
}
template <class Team> __device__ __forceinline__ void load_held(Vector<T>* held, const T* line, int width) {
    each_held<Team>(width, [&](int k, int j) { held[k] = load16(line + j); });
}

// Calls step(j, Width<N> or Width<1>) for a row of `width` that begins at element `start` of its arrays, shared out
// among the block. vectors: the arrays begin at multiples of 16 bytes; the row need not.
template <class Step>
__device__ __forceinline__ void each_in_row(int64 start, int64 width, bool vectors, Step step) {
    int64 head = vectors ? min((N - start % N) % N, width) : width;
    int64 end = head + (width - head) / N * N;
    for (int64 j = threadIdx.x; j < head; j += blockDim.x) step(j, Width<1>());
    for (int64 j = head + threadIdx.x * N; j < end; j += blockDim.x * N) step(j, Width<N>());
    for (int64 j = end + threadIdx.x; j < width; j += blockDim.x) step(j, Width<1>());
}

// The largest of some numbers and the sum of their exponentials, each over that of the largest, in one pass
// (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018).
__device__ __forceinline__ A infinity() { return __int_as_float(0x7f800000); }

struct Exponentials {
    A highest = -infinity(), total = 0;

    template <int W> __device__ __forceinline__ void add(const Pack<T, W>& pack) {
        A most = highest;
#pragma unroll
        for (int k = 0; k < W; k++) most = to_acc(pack[k]) > most ? to_acc(pack[k]) : most;
        A shift = most == -infinity() ? A(0) : most;  // exp(-inf) is 0, exp(-inf + inf) is not a number
        total *= exp(highest - shift);
#pragma unroll
        for (int k = 0; k < W; k++) total += exp(to_acc(pack[k]) - shift);
        highest = most;
    }
    // That of the whole block, in all its threads.
    __device__ __forceinline__ void join() {
        A most = Block::max(highest);
        total = Block::sum(highest == -infinity() ? total : total * exp(highest - most));
        highest = most;
    }
};
