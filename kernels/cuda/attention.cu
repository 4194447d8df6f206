// Attention that keeps no matrix of weights, on ordinary cores: the reference where cuDNN's is not there.
//
// (Dao et al., FlashAttention, 2022; Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.)
// A block has WARPS * ROWS queries of one head and goes through the keys, TILE at a time, which its warps share;
// lane j of a warp makes the scores of key j. Backward makes the scores again, once with the roles as they are
// for dq and once with them exchanged for dk and dv: so every sum has one owner and one order. `group` heads of
// queries in a row share one of keys and values (Ainslie et al., GQA, 2023).
// starts (batch, time), or null: the first key that a query sees, where it sees no more than its document.
// Causal: query i sees keys up to i + early, from query `chunk` on up to i + later, which is no less.
// window: how many keys a query sees at most, the last of these; causal alone.
// done, or null: where it is not 0, something else has computed it.
// Macro: DIM=64
#include "common.cuh"

constexpr int WARPS = 8, TILE = WARP;
constexpr int ROWS = DIM > 128 ? 2 : 4;  // of a warp
constexpr int OWN = WARPS * ROWS;        // of a block
constexpr int PITCH = DIM + 1;           // of a tile's rows: lanes read one column each, from different banks
constexpr int PARTS = DIM / WARP;        // elements of a row that a lane adds up

__device__ __forceinline__ A infinity() { return __int_as_float(0x7f800000); }

// The last key that query i sees.
__device__ __forceinline__ int64 place(int64 i, int64 chunk, int64 early, int64 later) {
    return i + (i < chunk ? early : later);
}

// The first key that query i, one of `time`, sees; `last` is the last. It never falls with i.
__device__ __forceinline__ int64 oldest_of(int64 i, const int64* starts, int64 time, int64 last, int64 window) {
    int64 first = starts && i < time ? starts[i] : 0;
    return first > last - window ? first : last - window + 1;
}

// The first query whose last key is `key` or behind it.
__device__ __forceinline__ int64 query_of(int64 key, int64 chunk, int64 early, int64 later) {
    if (key - early < chunk) return key - early;
    return key - later < chunk ? chunk : key - later;
}

// `count` rows of `width` elements from row `first` on, as A; zeros beyond `rows` and `width`.
__device__ __forceinline__ void load(A* to, int pitch, const T* from, int64 stride, int64 first, int count, int64 rows,
                                     int64 width) {
    for (int i = threadIdx.x; i < count * DIM; i += WARPS * WARP) {
        int row = i / DIM, column = i % DIM;
        bool there = first + row < rows && column < width;
        to[row * pitch + column] = there ? to_acc(from[(first + row) * stride + column]) : A(0);
    }
}

// score[r] = row r of this warp's own, times row `lane` of the tile.
__device__ __forceinline__ void products(A* score, const A* own, const A* tile) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < ROWS; r++) score[r] = 0;
#pragma unroll 8
    for (int d = 0; d < DIM; d++) {
        A value = tile[lane * PITCH + d];
#pragma unroll
        for (int r = 0; r < ROWS; r++) score[r] += own[(warp * ROWS + r) * DIM + d] * value;
    }
}

// sum[r] += weight of (r, j) times row j of the tile, for all j. Lane j holds the weights of j.
__device__ __forceinline__ void weigh(A (*sum)[PARTS], const A* weight, const A* tile) {
    int lane = threadIdx.x % WARP;
#pragma unroll 4
    for (int j = 0; j < TILE; j++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            A w = __shfl_sync(0xffffffffu, weight[r], j);
#pragma unroll
            for (int p = 0; p < PARTS; p++) sum[r][p] += w * tile[j * PITCH + p * WARP + lane];
        }
    }
}

__device__ __forceinline__ void store(T* to, int64 stride, const A (*sum)[PARTS], int64 own, int64 rows, int64 width) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (own + r >= rows) break;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            int column = p * WARP + lane;
            if (column < width) to[(own + r) * stride + column] = from_acc<T>(sum[r][p]);
        }
    }
}

template <class X> __device__ __forceinline__ void clear(X (*sum)[PARTS]) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int p = 0; p < PARTS; p++) sum[r][p] = 0;
}

// Grid: blocks of queries, heads, batch. lse is (batch, heads, time).
extern "C" __global__ void __launch_bounds__(256) forward(
    const T* q, const T* k, const T* v, const int64* starts, const int* done, T* y, A* lse, int64 q_batch, int64 q_head,
    int64 q_time, int64 k_batch, int64 k_head, int64 k_time, int64 v_batch, int64 v_head, int64 v_time,
    int64 y_batch, int64 y_head, int64 y_time, int64 time, int64 keys, int64 width, int64 group, int causal,
    int64 chunk, int64 early, int64 later, int64 window, A scale) {
    if (done && *done) return;
    DYNAMIC_SHARED(A, memory);
    A *queries = memory, *tile_k = queries + OWN * DIM, *tile_v = tile_k + TILE * PITCH;
    q += blockIdx.z * q_batch + blockIdx.y * q_head;
    k += blockIdx.z * k_batch + blockIdx.y / (unsigned)group * k_head;
    v += blockIdx.z * v_batch + blockIdx.y / (unsigned)group * v_head;
    int64 first = blockIdx.x * (int64)OWN, own = first + threadIdx.x / WARP * ROWS;
    int lane = threadIdx.x % WARP;
    load(queries, DIM, q, q_time, first, OWN, time, width);
    A highest[ROWS], total[ROWS], weight[ROWS], sum[ROWS][PARTS];
    for (int r = 0; r < ROWS; r++) highest[r] = -infinity(), total[r] = 0;
    clear(sum);
    int64 end = first + OWN < time ? first + OWN : time, begin = 0;
    int64 last = causal ? place(end - 1, chunk, early, later) + 1 : keys;
    last = last < keys ? last : keys;
    if (starts) starts += blockIdx.z * time;
    int64 oldest[ROWS];
    for (int r = 0; r < ROWS; r++) oldest[r] = 0;
    if (causal) {
        begin = oldest_of(first, starts, time, place(first, chunk, early, later), window) / TILE * TILE;
        for (int r = 0; r < ROWS; r++)
            oldest[r] = oldest_of(own + r, starts, time, place(own + r, chunk, early, later), window);
    }
    for (int64 start = begin; start < last; start += TILE) {
        __syncthreads();
        load(tile_k, PITCH, k, k_time, start, TILE, keys, width);
        load(tile_v, PITCH, v, v_time, start, TILE, keys, width);
        __syncthreads();
        products(weight, queries, tile_k);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int64 key = start + lane;
            bool ahead = causal && key > place(own + r, chunk, early, later);
            bool seen = key < keys && !ahead && oldest[r] <= key;
            A score = seen ? weight[r] * scale : -infinity();
            A most = warp_max(score);
            if (most < highest[r]) most = highest[r];
            A factor = most == -infinity() ? A(1) : exp(highest[r] - most);  // nothing seen yet: nothing to scale
            weight[r] = seen ? exp(score - most) : A(0);
            total[r] = total[r] * factor + warp_sum(weight[r]);
            highest[r] = most;
#pragma unroll
            for (int p = 0; p < PARTS; p++) sum[r][p] *= factor;
        }
        weigh(sum, weight, tile_v);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        A factor = A(1) / total[r];
#pragma unroll
        for (int p = 0; p < PARTS; p++) sum[r][p] *= factor;
        if (lane == 0 && own + r < time)
            lse[(blockIdx.z * (int64)gridDim.y + blockIdx.y) * time + own + r] = highest[r] + log(total[r]);
    }
    store(y + blockIdx.z * y_batch + blockIdx.y * y_head, y_time, sum, own, time, width);
}

// delta = the sum of dy times y over each row: what the softmax's backward subtracts. A warp has a row.
extern "C" __global__ void dots(const T* dy, const T* y, const int* done, A* delta, int64 dy_batch, int64 dy_head, int64 dy_time,
                                int64 y_batch, int64 y_head, int64 y_time, int64 time, int64 width) {
    int64 row = blockIdx.x * (int64)WARPS + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP;
    if (row >= time || (done && *done)) return;
    dy += blockIdx.z * dy_batch + blockIdx.y * dy_head + row * dy_time;
    y += blockIdx.z * y_batch + blockIdx.y * y_head + row * y_time;
    A sum = 0;
    for (int64 i = lane; i < width; i += WARP) sum += to_acc(dy[i]) * to_acc(y[i]);
    sum = warp_sum(sum);
    if (lane == 0) delta[(blockIdx.z * (int64)gridDim.y + blockIdx.y) * time + row] = sum;
}

// dq. Grid and shared memory as in forward, and dy beside q.
extern "C" __global__ void __launch_bounds__(256) backward_queries(
    const T* dy, const T* q, const T* k, const T* v, const int64* starts, const int* done, const A* lse, const A* delta, T* dq,
    int64 dy_batch, int64 dy_head, int64 dy_time, int64 q_batch, int64 q_head, int64 q_time, int64 k_batch,
    int64 k_head, int64 k_time, int64 v_batch, int64 v_head, int64 v_time, int64 dq_batch, int64 dq_head,
    int64 dq_time, int64 time, int64 keys, int64 width, int64 group, int causal,
    int64 chunk, int64 early, int64 later, int64 window, A scale) {
    if (done && *done) return;
    DYNAMIC_SHARED(A, memory);
    A *queries = memory, *upper = queries + OWN * DIM, *tile_k = upper + OWN * DIM, *tile_v = tile_k + TILE * PITCH;
    k += blockIdx.z * k_batch + blockIdx.y / (unsigned)group * k_head;
    v += blockIdx.z * v_batch + blockIdx.y / (unsigned)group * v_head;
    int64 first = blockIdx.x * (int64)OWN, own = first + threadIdx.x / WARP * ROWS;
    int64 numbers = (blockIdx.z * (int64)gridDim.y + blockIdx.y) * time;
    int lane = threadIdx.x % WARP;
    load(queries, DIM, q + blockIdx.z * q_batch + blockIdx.y * q_head, q_time, first, OWN, time, width);
    load(upper, DIM, dy + blockIdx.z * dy_batch + blockIdx.y * dy_head, dy_time, first, OWN, time, width);
    A score[ROWS], dscore[ROWS], shift[ROWS], dot[ROWS], sum[ROWS][PARTS];
    for (int r = 0; r < ROWS; r++) {
        bool there = own + r < time;
        shift[r] = there ? lse[numbers + own + r] : A(0);
        dot[r] = there ? delta[numbers + own + r] : A(0);
    }
    clear(sum);
    int64 end = first + OWN < time ? first + OWN : time, begin = 0;
    int64 last = causal ? place(end - 1, chunk, early, later) + 1 : keys;
    last = last < keys ? last : keys;
    if (starts) starts += blockIdx.z * time;
    int64 oldest[ROWS];
    for (int r = 0; r < ROWS; r++) oldest[r] = 0;
    if (causal) {
        begin = oldest_of(first, starts, time, place(first, chunk, early, later), window) / TILE * TILE;
        for (int r = 0; r < ROWS; r++)
            oldest[r] = oldest_of(own + r, starts, time, place(own + r, chunk, early, later), window);
    }
    for (int64 start = begin; start < last; start += TILE) {
        __syncthreads();
        load(tile_k, PITCH, k, k_time, start, TILE, keys, width);
        load(tile_v, PITCH, v, v_time, start, TILE, keys, width);
        __syncthreads();
        products(score, queries, tile_k);
        products(dscore, upper, tile_v);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            int64 key = start + lane;
            bool ahead = causal && key > place(own + r, chunk, early, later);
            bool seen = key < keys && own + r < time && !ahead && oldest[r] <= key;
            A weight = seen ? exp(score[r] * scale - shift[r]) : A(0);
            dscore[r] = weight * (dscore[r] - dot[r]) * scale;
        }
        weigh(sum, dscore, tile_k);
    }
    store(dq + blockIdx.z * dq_batch + blockIdx.y * dq_head, dq_time, sum, own, time, width);
}

// dk and dv. A block has keys of its own and goes through the queries that see them, of every head in their group.
extern "C" __global__ void __launch_bounds__(256) backward_keys(
    const T* dy, const T* q, const T* k, const T* v, const int64* starts, const int* done, const A* lse, const A* delta, T* dk,
    T* dv, int64 dy_batch, int64 dy_head, int64 dy_time, int64 q_batch, int64 q_head, int64 q_time, int64 k_batch,
    int64 k_head, int64 k_time, int64 v_batch, int64 v_head, int64 v_time, int64 dk_batch, int64 dk_head,
    int64 dk_time, int64 dv_batch, int64 dv_head, int64 dv_time, int64 time, int64 keys, int64 width, int64 group,
    int causal, int64 chunk, int64 early, int64 later, int64 window, A scale) {
    if (done && *done) return;
    DYNAMIC_SHARED(A, memory);
    A *own_k = memory, *own_v = own_k + OWN * DIM, *tile_q = own_v + OWN * DIM, *tile_dy = tile_q + TILE * PITCH;
    q += blockIdx.z * q_batch + blockIdx.y * group * q_head;
    dy += blockIdx.z * dy_batch + blockIdx.y * group * dy_head;
    int64 first = blockIdx.x * (int64)OWN, own = first + threadIdx.x / WARP * ROWS;
    int64 numbers = (blockIdx.z * (int64)gridDim.y + blockIdx.y) * group * time;
    if (starts) starts += blockIdx.z * time;
    int lane = threadIdx.x % WARP;
    int64 begin = 0, stop = time;  // the queries that see one of these keys
    if (causal) {
        begin = query_of(first, chunk, early, later);
        begin = begin < 0 ? 0 : begin / TILE * TILE;
        int64 behind = query_of((first + OWN < keys ? first + OWN : keys) - 1 + window, chunk, early, later);
        stop = behind < time ? behind : time;
    }
    load(own_k, DIM, k + blockIdx.z * k_batch + blockIdx.y * k_head, k_time, first, OWN, keys, width);
    load(own_v, DIM, v + blockIdx.z * v_batch + blockIdx.y * v_head, v_time, first, OWN, keys, width);
    A weight[ROWS], dscore[ROWS], sum_k[ROWS][PARTS], sum_v[ROWS][PARTS];
    clear(sum_k);
    clear(sum_v);
    for (int64 member = 0; member < group; member++, q += q_head, dy += dy_head, numbers += time) {
        for (int64 start = begin; start < stop; start += TILE) {
            __syncthreads();
            load(tile_q, PITCH, q, q_time, start, TILE, time, width);
            load(tile_dy, PITCH, dy, dy_time, start, TILE, time, width);
            __syncthreads();
            products(weight, own_k, tile_q);
            products(dscore, own_v, tile_dy);
            int64 query = start + lane, latest = place(query, chunk, early, later);
            A shift = query < time ? lse[numbers + query] : A(0), dot = query < time ? delta[numbers + query] : A(0);
            int64 oldest = causal ? oldest_of(query, starts, time, latest, window) : 0;  // key that it sees
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                bool seen = query < time && own + r < keys && (!causal || own + r <= latest) && oldest <= own + r;
                weight[r] = seen ? exp(weight[r] * scale - shift) : A(0);
                dscore[r] = weight[r] * (dscore[r] - dot) * scale;
            }
            weigh(sum_v, weight, tile_dy);
            weigh(sum_k, dscore, tile_q);
        }
    }
    store(dk + blockIdx.z * dk_batch + blockIdx.y * dk_head, dk_time, sum_k, own, keys, width);
    store(dv + blockIdx.z * dv_batch + blockIdx.y * dv_head, dv_time, sum_v, own, keys, width);
}
