// Tokens to experts and back: the choice, the order of rows, and the copies between tokens and rows. No atomics:
// rows come in order from the radix sort of embedding.cu, and a token's sum over its rows is made by one warp.
//
// Weights are A where x is T.
#include "ranges.cuh"

__device__ __forceinline__ int64 warp_row() { return blockIdx.x * (int64)(blockDim.x / WARP) + threadIdx.x / WARP; }

__device__ __forceinline__ A number(T x) {
    A value = to_acc(x);
    return value == value ? value : A(-__int_as_float(0x7f800000));
}

// Whether a score comes before another: the larger, then the lower expert.
__device__ __forceinline__ bool before(A one, int64 i, A other, int64 j) {
    return one > other || (one == other && i < j);
}

// A warp has a token. The last that is chosen is found in k rounds, each for the best behind that of the round before;
// chosen are it and all before it.
extern "C" __global__ void top_k(const T* scores, int64* experts, int64 tokens, int64 count, int64 k) {
    int64 token = warp_row();
    if (token >= tokens) return;
    const T* line = scores + token * count;
    int lane = threadIdx.x % WARP;
    A last = 0;
    int64 place = -1;
    for (int64 round = 0; round < k; round++) {
        A best = 0;
        int64 at = count;
        for (int64 i = lane; i < count; i += WARP) {
            A value = number(line[i]);
            bool open = round == 0 || before(last, place, value, i);
            if (open && (at == count || before(value, i, best, at))) best = value, at = i;
        }
        for (int distance = WARP / 2; distance > 0; distance /= 2) {
            A other = __shfl_xor_sync(0xffffffffu, best, distance);
            int64 there = __shfl_xor_sync(0xffffffffu, at, distance);
            if (there < count && (at == count || before(other, there, best, at))) best = other, at = there;
        }
        last = best, place = at;
    }
    int64 found = 0;
    for (int64 start = 0; start < count; start += WARP) {
        int64 i = start + lane;
        bool chosen = i < count && !before(last, place, number(line[i]), i);
        uint32 all = __ballot_sync(0xffffffffu, chosen);
        if (chosen) experts[token * k + found + __popc(all & ((1u << lane) - 1))] = i;
        found += __popc(all);
    }
}

extern "C" __global__ void take(const T* scores, const int64* experts, T* y, int64 size, int64 count, int64 k) {
    for (int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x; i < size; i += gridDim.x * (int64)blockDim.x)
        y[i] = scores[i / k * count + experts[i]];
}

extern "C" __global__ void put(const T* dy, const int64* experts, T* dscores, int64 size, int64 count, int64 k) {
    for (int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x; i < size; i += gridDim.x * (int64)blockDim.x) {
        int64 token = i / count, expert = i % count;
        T value = from_acc<T>(A(0));
        for (int64 j = token * k; j < token * k + k; j++)
            if (experts[j] == expert) value = dy[j];
        dscores[i] = value;
    }
}

// The first of the sorted ids that is not below `id`.
__device__ __forceinline__ int64 first_of(const uint32* ids, int64 size, int64 id) {
    int64 low = 0, high = size;
    while (low < high) {
        int64 middle = low + (high - low) / 2;
        if (ids[middle] < id) low = middle + 1;
        else high = middle;
    }
    return low;
}

// counts (2, count): how many ids there are of each, and how many of these within the limit.
extern "C" __global__ void count(const uint32* ids, int64* counts, int64 size, int64 count, int64 limit) {
    int64 id = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    if (id >= count) return;
    int64 found = first_of(ids, size, id + 1) - first_of(ids, size, id);
    counts[id] = found;
    counts[count + id] = min(found, limit);
}

// Non-negative numbers in their order, as integers: what is not a number comes behind all.
__device__ __forceinline__ uint32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint64 bits_of(double x) { return uint64(__double_as_longlong(x)); }

// kept (size): the expert of each copy, -1 if its expert has `capacity` copies that come before. A warp has a copy.
extern "C" __global__ void drop(const uint32* ids, const uint32* copies, const int64* counts, const T* priority,
                                int64* kept, int64 size, int64 count, int64 capacity) {
    int64 row = warp_row();
    if (row >= size) return;
    int64 id = ids[row], copy = copies[row], better = 0;
    if (counts[id] > capacity) {
        int64 start = first_of(ids, size, id), stop = start + counts[id];
        auto own = bits_of(to_acc(priority[copy]));
        for (int64 other = start + threadIdx.x % WARP; other < stop; other += WARP) {
            auto theirs = bits_of(to_acc(priority[copies[other]]));
            better += theirs > own || (theirs == own && other < row);
        }
        better = warp_sum(better);
    }
    if (threadIdx.x % WARP == 0) kept[copy] = better < capacity ? id : -1;
}

// places (size), out (rows): where each copy went, and back.
extern "C" __global__ void place(const uint32* ids, const uint32* copies, int64* places, int64* out, int64 size,
                                 int64 count, int64 rows) {
    for (int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x; i < size; i += gridDim.x * (int64)blockDim.x) {
        bool there = ids[i] < count;
        places[copies[i]] = there ? i : -1;
        if (i < rows) out[i] = there ? int64(copies[i]) : -1;
    }
}

template <int W>
__device__ __forceinline__ void spread_row(const T* x, const A* weights, const int64* copies, T* y, int64 row,
                                           int64 width, int64 k) {
    int64 copy = copies[row];
    A factor = copy < 0 ? A(0) : weights ? weights[copy] : A(1);
    const T* from = x + (copy < 0 ? 0 : copy / k) * width;
    for (int64 j = threadIdx.x % WARP * W; j < width; j += WARP * W) {
        Pack<T, W> pack = {};
        if (copy >= 0) {
            pack = load<W>(from + j);
#pragma unroll
            for (int i = 0; i < W; i++) pack[i] = from_acc<T>(factor * to_acc(pack[i]));
        }
        store<W>(y + row * width + j, pack);
    }
}

extern "C" __global__ void spread(const T* x, const A* weights, const int64* copies, T* y, int64 rows, int64 width,
                                  int64 k, int vectors) {
    int64 row = warp_row();
    if (row >= rows) return;
    if (vectors) spread_row<Vector<T>::width>(x, weights, copies, y, row, width, k);
    else spread_row<1>(x, weights, copies, y, row, width, k);
}

template <int W>
__device__ __forceinline__ void collect_row(const T* x, const A* weights, const int64* places, T* y, int64 token,
                                            int64 width, int64 k) {
    for (int64 column = threadIdx.x % WARP * W; column < width; column += WARP * W) {
        Pack<A, W> total = {};
        for (int64 j = token * k; j < token * k + k; j++) {
            int64 place = places[j];
            if (place < 0) continue;
            A factor = weights ? weights[j] : A(1);
            Pack<T, W> pack = load<W>(x + place * width + column);
#pragma unroll
            for (int i = 0; i < W; i++) total[i] += factor * to_acc(pack[i]);
        }
        Pack<T, W> sum;
#pragma unroll
        for (int i = 0; i < W; i++) sum[i] = from_acc<T>(total[i]);
        store<W>(y + token * width + column, sum);
    }
}

extern "C" __global__ void collect(const T* x, const A* weights, const int64* places, T* y, int64 tokens, int64 width,
                                   int64 k, int vectors) {
    int64 token = warp_row();
    if (token >= tokens) return;
    if (vectors) collect_row<Vector<T>::width>(x, weights, places, y, token, width, k);
    else collect_row<1>(x, weights, places, y, token, width, k);
}

template <int W> __device__ __forceinline__ A dot(const T* one, const T* other, int64 width) {
    A total = 0;
    for (int64 j = threadIdx.x % WARP * W; j < width; j += WARP * W) {
        Pack<T, W> first = load<W>(one + j), second = load<W>(other + j);
#pragma unroll
        for (int i = 0; i < W; i++) total += to_acc(first[i]) * to_acc(second[i]);
    }
    return warp_sum(total);
}

// A warp has a copy.
extern "C" __global__ void weights_backward(const T* dy, const T* x, const int64* places, A* dweights, int64 size,
                                            int64 width, int64 k, int vectors) {
    int64 copy = warp_row();
    if (copy >= size) return;
    int64 place = places[copy];
    A total = 0;
    if (place >= 0) {
        const T *one = dy + copy / k * width, *other = x + place * width;
        total = vectors ? dot<Vector<T>::width>(one, other, width) : dot<1>(one, other, width);
    }
    if (threadIdx.x % WARP == 0) dweights[copy] = total;
}
