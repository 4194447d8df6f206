// The pass over the gradient of a linear layer with a GELU behind it: through the GELU, and summed over rows.
#include "gelu.cuh"
#include "ranges.cuh"

constexpr int ROWS = 64, AHEAD = 2;  // of a block; rows that are loaded before the first is written

template <int W>
__device__ __forceinline__ void slope_and_sum(const T* dy, const T* inner, T* dinner, A* partials, int64 rows,
                                              int64 columns) {
    int64 column = (blockIdx.y * (int64)blockDim.x + threadIdx.x) * W;
    if (column >= columns) return;
    int64 begin = blockIdx.x * (int64)ROWS, end = min(begin + ROWS, rows);
    Pack<A, W> total = {};
    for (int64 row = begin; row < end; row += AHEAD) {
        Pack<T, W> upper[AHEAD], line[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (row + k >= end) break;
            upper[k] = load<W>(dy + (row + k) * columns + column);
            line[k] = load<W>(inner + (row + k) * columns + column);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (row + k >= end) break;
#pragma unroll
            for (int j = 0; j < W; j++) {
                A slope = GeluTanh::slope(to_acc(line[k][j]), to_acc(upper[k][j]));
                line[k][j] = from_acc<T>(slope);
                total[j] += slope;
            }
            store<W>(dinner + (row + k) * columns + column, line[k]);
        }
    }
    store<W>(partials + blockIdx.x * columns + column, total);
}

// dinner (rows, columns) of dy and inner; partials (blocks, columns): the sums of a block's rows of it.
extern "C" __global__ void gelu_backward(const T* dy, const T* inner, T* dinner, A* partials, int64 rows, int64 columns,
                                         int vectors) {
    if (vectors) slope_and_sum<Vector<T>::width>(dy, inner, dinner, partials, rows, columns);
    else slope_and_sum<1>(dy, inner, dinner, partials, rows, columns);
}
