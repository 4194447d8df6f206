// Sums in a fixed order: over rows, of powers. The sum over rows may be of another type (macro GRADIENT).
#include "ranges.cuh"

// Columns of x (rows, columns): a block has ROWS rows of 32 lanes' columns, a warp every eighth of the rows, which are
// all loaded before the first is added. partials (blocks, columns).
constexpr int ROWS = 64, WARPS = 8, AHEAD = ROWS / WARPS;

template <int W> __device__ __forceinline__ void sum_columns(const T* x, A* partials, int64 rows, int64 columns) {
    __shared__ Pack<A, W> shared[WARPS][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64 first = blockIdx.y * (int64)(WARP * W), column = first + lane * W, begin = blockIdx.x * (int64)ROWS + warp;
    Pack<T, W> lines[AHEAD] = {};  // zeros beyond the rows and columns
    if (column < columns) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (begin + k * WARPS < rows) lines[k] = load<W>(x + (begin + k * WARPS) * columns + column);
    }
    Pack<A, W> total = {};
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
#pragma unroll
        for (int j = 0; j < W; j++) total[j] += to_acc(lines[k][j]);
    }
    shared[warp][lane] = total;
    __syncthreads();
    const A* sums = reinterpret_cast<const A*>(shared);
    for (int own = threadIdx.x; own < WARP * W && first + own < columns; own += WARPS * WARP) {
        A sum = 0;
        for (int other = 0; other < WARPS; other++) sum += sums[other * (WARP * W) + own];
        partials[blockIdx.x * columns + first + own] = sum;
    }
}

extern "C" __global__ void column_blocks(const T* x, A* partials, int64 rows, int64 columns, int vectors) {
    if (vectors) sum_columns<Vector<T>::width>(x, partials, rows, columns);
    else sum_columns<1>(x, partials, rows, columns);
}

// out = (out if accumulate) + the sum of the rows of partials (blocks, columns); of a grid of two rows, the second does
// the same to other_out and other. A block of 1,024 threads has 32 columns; a warp sums every 32nd row, then the warps
// are added in order.
extern "C" __global__ void __launch_bounds__(1024) combine(const T* partials, GRADIENT* out, const T* other,
                                                           GRADIENT* other_out, int64 blocks, int64 columns,
                                                           int accumulate) {
    __shared__ A sums[WARP][WARP];
    if (blockIdx.y) {
        partials = other;
        out = other_out;
    }
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64 column = blockIdx.x * (int64)WARP + lane;
    A total = 0;
    if (column < columns) {
#pragma unroll 8
        for (int64 block = warp; block < blocks; block += WARP) total += to_acc(partials[block * columns + column]);
    }
    sums[warp][lane] = total;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    for (int next = 1; next < WARP; next++) total += sums[next][lane];
    out[column] = from_acc<GRADIENT>(accumulate ? A(to_acc(out[column])) + total : total);
}

// high + low += term: the rounding error of the sum goes to `low` (Knuth's TwoSum).
__device__ __forceinline__ void add_exactly(double& high, double& low, double term) {
    double total = high + term, added = total - high;
    low += (high - (total - added)) + (term - added);
    high = total;
}

__device__ __forceinline__ double power(double x, double p) {  // not fused with what follows: the error is exact
    x = fabs(x);
    if (p == 2) return __dmul_rn(x, x);
    if (p == 1) return x;
    if (p == 3) return __dmul_rn(__dmul_rn(x, x), x);
    return pow(x, p);
}

// sum (2): that of the block's threads, as high + low. blockDim.x is a power of two.
__device__ __forceinline__ void add_threads(double high, double low, double* sum) {
    constexpr int MOST = 1024;
    __shared__ double highs[MOST], lows[MOST];
    highs[threadIdx.x] = high;
    lows[threadIdx.x] = low;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x >= half) continue;
        add_exactly(high, low, highs[threadIdx.x + half]);
        low += lows[threadIdx.x + half];
        highs[threadIdx.x] = high;
        lows[threadIdx.x] = low;
    }
    if (threadIdx.x > 0) return;
    sum[0] = high;
    sum[1] = high - high == 0 ? low : 0;
}

// partials (pieces, 2): the sum of |x| ** p over a piece, a block's, as high + low.
constexpr int PIECE = 65536;

extern "C" __global__ void power_sums(const T* x, double p, double* partials, int64 count, int vectors) {
    constexpr int N = Vector<T>::width;
    int64 begin = blockIdx.x * (int64)PIECE, end = min(begin + PIECE, count);
    int64 whole = vectors ? begin + (end - begin) / N * N : begin;
    double high = 0, low = 0;
    for (int64 i = begin + threadIdx.x * N; i < whole; i += blockDim.x * N) {
        Pack<T, N> line = load<N>(x + i);
#pragma unroll
        for (int k = 0; k < N; k++) add_exactly(high, low, power(to_acc(line[k]), p));
    }
    for (int64 i = whole + threadIdx.x; i < end; i += blockDim.x) add_exactly(high, low, power(to_acc(x[i]), p));
    add_threads(high, low, partials + 2 * blockIdx.x);
}

// out (2): the sum of pairs (count, 2), by one block.
__device__ __forceinline__ void sum_of_pairs(const double* pairs, double* out, int64 count) {
    double high = 0, low = 0;
    for (int64 i = threadIdx.x; i < count; i += blockDim.x) {
        add_exactly(high, low, pairs[2 * i]);
        low += pairs[2 * i + 1];
    }
    add_threads(high, low, out);
}

extern "C" __global__ void add_pairs(const double* pairs, double* out, int64 count) { sum_of_pairs(pairs, out, count); }

// out (2): the root of the sum of pairs (count, 2), and what makes it limit, at most 1; see clip_factor. One block.
extern "C" __global__ void clip_factor(const double* pairs, double limit, int leave, double* out, int64 count) {
    sum_of_pairs(pairs, out, count);
    if (threadIdx.x > 0) return;
    double norm = sqrt(out[0] + out[1]), factor = limit / (norm + 1e-6);
    bool finite = norm - norm == 0;
    out[0] = norm;
    out[1] = factor > 1 || (leave && !finite) ? 1 : factor;
}

// tables (blocks, 256, 2): see exact_power_sums. A thread has a row of the block's table, a warp sums of its own in
// shared memory: of integers, so their order does not matter. 2**16 squares below 2**48 fit in 64 bits.
constexpr int BINS = 256;

extern "C" __global__ void exact_tables(const float* x, int64* tables, int64 count, int squared) {
    constexpr int WARPS = 8;
    __shared__ uint64 sums[WARPS][BINS];
    __shared__ uint64 unbounded[2];
    int bin = threadIdx.x;
    for (int warp = 0; warp < WARPS; warp++) sums[warp][bin] = 0;
    if (bin < 2) unbounded[bin] = 0;
    uint64* own = sums[threadIdx.x / WARP];
    int64 low = 0, high = 0;
    for (int64 begin = blockIdx.x * (int64)PIECE; begin < count; begin += gridDim.x * (int64)PIECE) {
        __syncthreads();
        int64 end = min(begin + PIECE, count);
        for (int64 i = begin + threadIdx.x; i < end; i += blockDim.x) {
            uint32 bits = __float_as_uint(x[i]), e = bits >> 23 & 255, fraction = bits & 0x7FFFFF;
            uint64 number = e ? fraction | 0x800000 : fraction;
            if (e < 255) atomicAdd(&own[e], squared ? number * number : number);
            else atomicAdd(&unbounded[fraction ? 0 : 1], uint64(1));
        }
        __syncthreads();
        for (int warp = 0; warp < WARPS; warp++) {
            low += int64(sums[warp][bin] & 0xFFFFFF);
            high += int64(sums[warp][bin] >> 24);
            sums[warp][bin] = 0;
        }
    }
    __syncthreads();
    if (bin == 255) {
        low = int64(unbounded[0]);
        high = int64(unbounded[1]);
    }
    int64* row = tables + (blockIdx.x * int64(BINS) + bin) * 2;
    row[0] = low;
    row[1] = high;
}

// table (256, 2): the sum of `blocks` of them.
extern "C" __global__ void add_tables(const int64* tables, int64* table, int64 blocks) {
    int64 place = blockIdx.x * (int64)blockDim.x + threadIdx.x, total = 0;
    for (int64 block = 0; block < blocks; block++) total += tables[block * (2 * BINS) + place];
    table[place] = total;
}

__device__ __forceinline__ A larger(A x, A other) { return other > x || other != other ? other : x; }  // nan wins

// largest (blocks,): of the absolute values that each block saw.
extern "C" __global__ void abs_max(const T* x, A* largest, int64 count, int vectors) {
    __shared__ A shared[WARP];
    A best = 0;
    each_in<Vector<T>::width>(0, count, vectors, [&](int64 i, auto width) {
        constexpr int W = decltype(width)::value;
        Pack<T, W> line = load<W>(x + i);
#pragma unroll
        for (int k = 0; k < W; k++) best = larger(best, fabs(to_acc(line[k])));
    });
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        best = larger(best, __shfl_xor_sync(0xffffffffu, best, distance));
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = best;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < blockDim.x / WARP; warp++) best = larger(best, shared[warp]);
    largest[blockIdx.x] = best;
}
