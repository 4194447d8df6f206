// Rows of a table by index, and the gradient of the table without atomics: rows of equal index are brought together
// by a stable radix sort of the indices, and each such run is summed in the order of the rows.
//
// Gradients have a type of their own (macro GRADIENT).
#include "ranges.cuh"

// A warp copies a row. The table has `count` rows of `vocab`, from `first` on: of another one it makes zeros, and of an
// index outside of all of them nan.
template <int W>
__device__ __forceinline__ void gather_rows(const int64* indices, const T* weight, T* y, int64 rows, int64 count,
                                            int64 width, int64 first, int64 vocab) {
    int64 warps = gridDim.x * (int64)(blockDim.x / WARP);
    int64 begin = blockIdx.x * (int64)(blockDim.x / WARP) + threadIdx.x / WARP;
    for (int64 row = begin; row < rows; row += warps) {
        int64 given = indices[row], index = given - first;
        bool known = 0 <= given && given < vocab, inside = known && 0 <= index && index < count;
        T nothing = from_acc<T>(known ? A(0) : A(nan("")));
        const T* from = weight + (inside ? index : 0) * width;
        T* to = y + row * width;
        for (int64 j = threadIdx.x % WARP * W; j < width; j += WARP * W) {
            Pack<T, W> pack;
            if (inside) pack = load<W>(from + j);
            else
                for (int k = 0; k < W; k++) pack[k] = nothing;
            store<W>(to + j, pack);
        }
    }
}

extern "C" __global__ void gather(const int64* indices, const T* weight, T* y, int64 rows, int64 count, int64 width,
                                  int64 first, int64 vocab, int vectors) {
    if (vectors) gather_rows<Vector<T>::width>(indices, weight, y, rows, count, width, first, vocab);
    else gather_rows<1>(indices, weight, y, rows, count, width, first, vocab);
}

// The sort: a pass for each eight bits of the ids, which are `indices` in the first pass (then the rows are
// 0, 1, ...) and `ids` with `rows` in the others. A block has a tile of ids and 256 threads, a warp a part of it.
// Ids count from the `first` row of the table. An index outside of it becomes the id `vocab`, behind all others, which
// nothing is summed for.
__device__ __forceinline__ uint32 id_of(int64 index, int64 first, int64 vocab) {
    return uint32(first <= index && index < first + vocab ? index - first : vocab);
}

constexpr int DIGITS = 256, WARPS = 8, ROUNDS = 4, TILE = WARPS * WARP * ROUNDS;

// counts (tiles, DIGITS): how many ids of a tile have each digit.
extern "C" __global__ void count_digits(const int64* indices, const uint32* ids, int* counts, int64 count,
                                        int64 first, int64 vocab, int shift) {
    __shared__ int found[DIGITS];
    found[threadIdx.x] = 0;
    __syncthreads();
    int64 end = min(count, (blockIdx.x + int64(1)) * TILE);
    for (int64 i = blockIdx.x * int64(TILE) + threadIdx.x; i < end; i += blockDim.x) {
        uint32 id = indices ? id_of(indices[i], first, vocab) : ids[i];
        atomicAdd(&found[id >> shift & (DIGITS - 1)], 1);  // of integers: their order does not matter
    }
    __syncthreads();
    counts[blockIdx.x * int64(DIGITS) + threadIdx.x] = found[threadIdx.x];
}

// The sum of x over the threads before this one; in it everybody waits for all. `shared`: WARP elements.
__device__ __forceinline__ int sum_before(int x, int* shared) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, sum = x;
    for (int distance = 1; distance < WARP; distance *= 2) {
        int other = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == WARP - 1) shared[warp] = sum;
    __syncthreads();
    for (int other = 0; other < warp; other++) sum += shared[other];
    return sum - x;
}

// Moves every id with its row to its place by this digit; equal digits keep their order.
extern "C" __global__ void place(const int64* indices, const uint32* ids, const uint32* rows, const int* counts,
                                 uint32* ids_out, uint32* rows_out, int64 count, int64 first, int64 vocab,
                                 int shift) {
    __shared__ int places[WARPS][DIGITS];
    __shared__ int sums[WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int i = lane; i < DIGITS; i += WARP) places[warp][i] = 0;
    __syncwarp();

    int64 begin = blockIdx.x * int64(TILE) + warp * (WARP * ROUNDS) + lane;
    uint32 id[ROUNDS];
    int rank[ROUNDS];  // among the equal digits of the warp
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        int64 i = begin + round * WARP;
        bool inside = i < count;
        id[round] = inside ? (indices ? id_of(indices[i], first, vocab) : ids[i]) : 0;
        int digit = id[round] >> shift & (DIGITS - 1);
        uint32 equal = __match_any_sync(0xffffffffu, inside ? uint32(digit) : uint32(DIGITS));
        int before = __popc(equal & ((1u << lane) - 1)), seen = places[warp][digit];
        __syncwarp();
        if (inside && before == 0) places[warp][digit] = seen + __popc(equal);
        __syncwarp();
        rank[round] = seen + before;
    }

    int digit = threadIdx.x, total = 0, earlier = 0;  // of this digit: in all tiles, in those before this one
    for (int tile = 0; tile < gridDim.x; tile++) {
        int there = counts[tile * int64(DIGITS) + digit];
        total += there;
        if (tile < blockIdx.x) earlier += there;
    }
    int next = sum_before(total, sums) + earlier;  // and all warps have counted
    for (int i = 0; i < WARPS; i++) {
        int there = places[i][digit];
        places[i][digit] = next;
        next += there;
    }
    __syncthreads();

#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        int64 i = begin + round * WARP;
        if (i >= count) break;
        int to = places[warp][id[round] >> shift & (DIGITS - 1)] + rank[round];
        ids_out[to] = id[round];
        rows_out[to] = indices ? uint32(i) : rows[i];
    }
}

// The sums. A block has ROWS sorted rows, a thread some columns. A run that lies within is added to dweight;
// the part of one that came from the block before, or that goes on in the next, is kept in `partials`
// (blocks, 2, width): [0] where it came from before, else [1].
constexpr int ROWS = 32, AHEAD = 4;  // rows that are loaded before the first is added
constexpr int COLUMNS = Widest<T, GRADIENT>::value;

template <int W> __device__ __forceinline__ void add_to(GRADIENT* to, const Pack<A, W>& total) {
    Pack<GRADIENT, W> pack = load<W>(to);
#pragma unroll
    for (int k = 0; k < W; k++) pack[k] = from_acc<GRADIENT>(to_acc(pack[k]) + total[k]);
    store<W>(to, pack);
}

template <int W>
__device__ __forceinline__ void sum_columns(const uint32* ids, const uint32* rows, const T* dy, A* partials,
                                            GRADIENT* dweight, int64 count, int64 vocab, int64 width) {
    int64 column = (blockIdx.y * (int64)blockDim.x + threadIdx.x) * W;
    if (column >= width) return;
    int64 begin = blockIdx.x * (int64)ROWS, end = min(begin + ROWS, count);
    if (ids[begin] >= vocab) return;  // and so are all behind it
    bool came = begin > 0 && ids[begin - 1] == ids[begin];
    Pack<A, W> total = {};
    for (int64 i = begin; i < end; i += AHEAD) {
        Pack<T, W> lines[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            if (i + k < end) lines[k] = load<W>(dy + rows[i + k] * width + column);
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            int64 here = i + k;
            if (here >= end) break;
#pragma unroll
            for (int j = 0; j < W; j++) total[j] += to_acc(lines[k][j]);
            bool same = here + 1 < count && ids[here + 1] == ids[here], last = here + 1 == end;
            if (same && !last) continue;
            A* partial = partials + blockIdx.x * 2 * width + column;
            if (came) store<W>(partial, total);
            else if (same) store<W>(partial + width, total);
            else if (ids[here] < vocab) add_to<W>(dweight + ids[here] * width + column, total);
            came = false;
            total = {};
        }
    }
}

extern "C" __global__ void sum_runs(const uint32* ids, const uint32* rows, const T* dy, A* partials,
                                    GRADIENT* dweight, int64 count, int64 vocab, int64 width, int vectors) {
    if (vectors) sum_columns<COLUMNS>(ids, rows, dy, partials, dweight, count, vocab, width);
    else sum_columns<1>(ids, rows, dy, partials, dweight, count, vocab, width);
}

template <int W>
__device__ __forceinline__ void join_columns(uint32 id, int64 last, const A* partials, GRADIENT* dweight,
                                             int64 width) {
    int64 column = (blockIdx.y * (int64)blockDim.x + threadIdx.x) * W;
    if (column >= width) return;
    Pack<A, W> total = load<W>(partials + (blockIdx.x * 2 + 1) * width + column);
#pragma unroll 4
    for (int64 block = blockIdx.x + 1; block <= last; block++) {
        Pack<A, W> more = load<W>(partials + block * 2 * width + column);
#pragma unroll
        for (int j = 0; j < W; j++) total[j] += more[j];
    }
    add_to<W>(dweight + id * width + column, total);
}

// A run that begins in this block's rows and goes on in the next: its parts are added in order.
extern "C" __global__ void join_runs(const uint32* ids, const A* partials, GRADIENT* dweight, int64 count,
                                     int64 vocab, int64 width, int vectors) {
    int64 begin = blockIdx.x * (int64)ROWS, end = begin + ROWS;
    if (end >= count || ids[end - 1] != ids[end] || ids[end] >= vocab) return;
    uint32 id = ids[end];
    if (begin > 0 && ids[begin - 1] == id) return;
    int64 low = end, high = count;  // the first row of another id is in (low, high]
    while (high - low > 1) {
        int64 middle = low + (high - low) / 2;
        if (ids[middle] == id) low = middle;
        else high = middle;
    }
    if (vectors) join_columns<COLUMNS>(id, low / ROWS, partials, dweight, width);
    else join_columns<1>(id, low / ROWS, partials, dweight, width);
}
