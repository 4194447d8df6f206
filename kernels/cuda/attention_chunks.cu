// What is left to do where cuDNN's attention was called for each chunk of queries (_cudnn_chunks.py).
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
