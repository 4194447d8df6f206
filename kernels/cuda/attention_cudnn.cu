// What cuDNN's attention does not do itself: of chunks of queries (_cudnn_chunks.py) and of documents
// (_cudnn_documents.py).
#include "common.cuh"

constexpr int VECTOR = Vector<T>::width;

// Of dk and dv (batch, heads, keys, width): rows before `added` += those of more (batch, heads, added, width), rows
// from `seen` on = 0. Grid: blocks of vectors of a head, heads of dk and then of dv, batch. Rows begin at 16 bytes.
extern "C" __global__ void __launch_bounds__(256) complete(
    T* dk, T* dv, const T* more_k, const T* more_v, int64 dk_batch, int64 dk_head, int64 dk_time, int64 dv_batch,
    int64 dv_head, int64 dv_time, int64 added, int64 seen, int64 keys, int64 width) {
    int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x, vectors = width / VECTOR;
    int64 row = i / vectors, column = i % vectors * VECTOR;
    if (row >= added + keys - seen) return;
    int heads = gridDim.y / 2, head = blockIdx.y % heads;
    bool values = blockIdx.y >= heads;
    T* into = values ? dv + blockIdx.z * dv_batch + head * dv_head : dk + blockIdx.z * dk_batch + head * dk_head;
    int64 stride = values ? dv_time : dk_time;
    if (row < added) {
        const T* more = (values ? more_v : more_k) + ((blockIdx.z * (int64)heads + head) * added + row) * width + column;
        into += row * stride + column;
        Vector<T> a = load16(into), b = load16(more);
        for (int n = 0; n < VECTOR; n++) a[n] = from_acc<T>(to_acc(a[n]) + to_acc(b[n]));
        store16(into, a);
    } else {
        Vector<T> zeros;
        for (int n = 0; n < VECTOR; n++) zeros[n] = from_acc<T>(A(0));
        store16(into + (row - added + seen) * stride + column, zeros);
    }
}

// What cuDNN is told of documents, from starts (batch, time) of `tokens` tokens: row i of places (3, pitch) has the
// first token of each document times the i-th of packed, dense and heads, and then the number of tokens so, up to
// place `most`; lengths (most) has their lengths, and then 0. *done = 1. If there are more than `most`, there are none,
// and *done = 0. One block, in which a warp has tokens side by side.
extern "C" __global__ void __launch_bounds__(512) documents(
    const int64* starts, int* lengths, int64* places, int* done, int64 tokens, int64 time, int64 most, int64 pitch,
    int64 packed, int64 dense, int64 heads) {
    __shared__ int found[WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    int64 span = (tokens + warps - 1) / warps, first = warp * span, stop = first + span < tokens ? first + span : tokens;
    int mine = 0;
    for (int64 i = first; i < stop; i += WARP)
        mine += __popc(__ballot_sync(0xffffffffu, i + lane < stop && starts[i + lane] == (i + lane) % time));
    if (lane == 0) found[warp] = mine;
    __syncthreads();
    int64 before = warp_sum(lane < warp ? found[lane] : 0), all = warp_sum(lane < warps ? found[lane] : 0);
    bool fit = all <= most;
    for (int64 i = first; fit && i < stop; i += WARP) {
        bool begins = i + lane < stop && starts[i + lane] == (i + lane) % time;
        uint32 there = __ballot_sync(0xffffffffu, begins);
        int64 place = before + __popc(there & ((1u << lane) - 1)), token = i + lane;
        if (begins) places[place] = token * packed, places[pitch + place] = token * dense;
        if (begins) places[2 * pitch + place] = token * heads;
        before += __popc(there);
    }
    __syncthreads();
    if (!fit) all = 0;
    for (int64 i = threadIdx.x; i <= most; i += blockDim.x) {
        if (i >= all) places[i] = tokens * packed, places[pitch + i] = tokens * dense, places[2 * pitch + i] = tokens * heads;
        int64 end = i + 1 < all ? places[i + 1] / packed : tokens;
        if (i < most) lengths[i] = i < all ? int(end - places[i] / packed) : 0;
    }
    if (threadIdx.x == 0) *done = fit;
}
