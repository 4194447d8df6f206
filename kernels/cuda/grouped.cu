// Products by group, of all groups that have few rows, in one launch: on ordinary cores, without cublasLt.
//
// A block makes a tile of ROWS x COLUMNS results, which it goes through the sum for DEPTH terms at a time; both factors
// lie in shared memory as A. A group's results have one order of sums, whatever the other groups have.
// tiles (count, 3): a group, its first row here, and the one behind its last. Sums may be written to another type than T
// (macro GRADIENT). vectors: rows begin at multiples of 16 bytes and are whole vectors.
#include "ranges.cuh"

constexpr int ROWS = 32, COLUMNS = 64, DEPTH = 32, EACH = 4;  // a thread has EACH x EACH results
constexpr int THREADS = ROWS * COLUMNS / (EACH * EACH);
constexpr int PAD = EACH;  // behind a row of a tile, so that what lies along the sum is in different banks

struct alignas(16) Tiles {
    A left[DEPTH][ROWS + PAD], right[DEPTH][COLUMNS + PAD];
};

// to[k][i], from numbers of which those along k lie side by side (ALONG), or those of neighbouring i; `stride` is the
// distance of the others. 0 beyond `size` and `depth`.
template <int SIZE, bool ALONG, int W>
__device__ __forceinline__ void fill(A (*to)[SIZE + PAD], const T* from, int64 stride, int64 size, int64 depth) {
    for (int n = threadIdx.x; n < SIZE * DEPTH / W; n += THREADS) {
        int k = ALONG ? n % (DEPTH / W) * W : n / (SIZE / W), i = ALONG ? n / (DEPTH / W) : n % (SIZE / W) * W;
        Pack<T, W> pack = {};
        if (i < size && k < depth) pack = load<W>(from + (ALONG ? i * stride + k : k * stride + i));
#pragma unroll
        for (int j = 0; j < W; j++) to[k + (ALONG ? j : 0)][i + (ALONG ? 0 : j)] = to_acc(pack[j]);
    }
}

// A tile of out (rows, columns) = the sum over k of left[k][i] right[k][j] (+ out).
template <int W, bool LEFT_ALONG, bool RIGHT_ALONG, class X>
__device__ __forceinline__ void product(Tiles& tiles, const T* left, int64 left_stride, const T* right,
                                        int64 right_stride, int64 depth, X* out, int64 rows, int64 columns,
                                        int64 stride, bool accumulate) {
    int row = threadIdx.x / (COLUMNS / EACH) * EACH, column = threadIdx.x % (COLUMNS / EACH) * EACH;
    A sum[EACH][EACH] = {};
    for (int64 start = 0; start < depth; start += DEPTH) {
        __syncthreads();  // all have multiplied what lies there
        fill<ROWS, LEFT_ALONG, W>(tiles.left, left + start * (LEFT_ALONG ? 1 : left_stride), left_stride, rows,
                                  depth - start);
        fill<COLUMNS, RIGHT_ALONG, W>(tiles.right, right + start * (RIGHT_ALONG ? 1 : right_stride), right_stride,
                                      columns, depth - start);
        __syncthreads();  // it is there
#pragma unroll 8
        for (int k = 0; k < DEPTH; k++) {
            Pack<A, EACH> one = load<EACH>(tiles.left[k] + row), other = load<EACH>(tiles.right[k] + column);
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++) sum[i][j] += one[i] * other[j];
        }
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (row + i >= rows || column + j >= columns) continue;
            X* to = out + (row + i) * stride + column + j;
            *to = from_acc<X>(accumulate ? to_acc(*to) + sum[i][j] : sum[i][j]);
        }
}

// y = x weight^T: x (rows, inputs), weight (groups, outputs, inputs). Blocks: tiles of rows, of outputs.
extern "C" __global__ void __launch_bounds__(128) forward(const T* x, const T* weight, const int64* tiles, T* y,
                                                          int64 inputs, int64 outputs, int vectors) {
    __shared__ Tiles shared;
    const int64* tile = tiles + blockIdx.x * int64(3);
    int64 first = tile[1], column = blockIdx.y * int64(COLUMNS);
    const T *left = x + first * inputs, *right = weight + (tile[0] * outputs + column) * inputs;
    int64 rows = tile[2] - first, columns = outputs - column;
    T* out = y + first * outputs + column;
    if (vectors)
        product<Vector<T>::width, true, true>(shared, left, inputs, right, inputs, inputs, out, rows, columns, outputs,
                                              false);
    else product<1, true, true>(shared, left, inputs, right, inputs, inputs, out, rows, columns, outputs, false);
}

// dx = dy weight: dy (rows, outputs). Blocks: tiles of rows, of inputs.
extern "C" __global__ void __launch_bounds__(128) backward_input(const T* dy, const T* weight, const int64* tiles,
                                                                 T* dx, int64 inputs, int64 outputs, int vectors) {
    __shared__ Tiles shared;
    const int64* tile = tiles + blockIdx.x * int64(3);
    int64 first = tile[1], column = blockIdx.y * int64(COLUMNS);
    const T *left = dy + first * outputs, *right = weight + tile[0] * outputs * inputs + column;
    int64 rows = tile[2] - first, columns = inputs - column;
    T* out = dx + first * inputs + column;
    if (vectors)
        product<Vector<T>::width, true, false>(shared, left, outputs, right, inputs, outputs, out, rows, columns,
                                               inputs, false);
    else product<1, true, false>(shared, left, outputs, right, inputs, outputs, out, rows, columns, inputs, false);
}

// dweight = dy^T x (+ dweight). Blocks: groups, tiles of outputs, of inputs.
extern "C" __global__ void __launch_bounds__(128) backward_weight(const T* x, const T* dy, const int64* tiles,
                                                                  GRADIENT* dweight, int64 inputs, int64 outputs,
                                                                  int accumulate, int vectors) {
    __shared__ Tiles shared;
    const int64* tile = tiles + blockIdx.x * int64(3);
    int64 first = tile[1], depth = tile[2] - first, row = blockIdx.y * int64(ROWS), column = blockIdx.z * int64(COLUMNS);
    const T *left = dy + first * outputs + row, *right = x + first * inputs + column;
    int64 rows = outputs - row, columns = inputs - column;
    GRADIENT* out = dweight + (tile[0] * outputs + row) * inputs + column;
    if (vectors)
        product<Vector<T>::width, false, false>(shared, left, outputs, right, inputs, depth, out, rows, columns, inputs,
                                                accumulate);
    else
        product<1, false, false>(shared, left, outputs, right, inputs, depth, out, rows, columns, inputs, accumulate);
}
