// Batch norm over the channels of (batch, channels, pixels). A block sums a channel, in an order that depends on the
// sizes only. Statistics, parameters and their gradients are of type A.
//
// The sum over channels may be of another type than what is summed (macro GRADIENT).
#include "common.cuh"

// step(element of the arrays) for all elements of channel blockIdx.x that are this thread's.
template <class Step> __device__ __forceinline__ void each_of_channel(int64 batch, int64 channels, int64 pixels, Step step) {
    for (int64 i = threadIdx.x; i < batch * pixels; i += blockDim.x)
        step((i / pixels * channels + blockIdx.x) * pixels + i % pixels);
}

extern "C" __global__ void statistics(const T* x, A* mean, A* squares, int64 batch, int64 channels, int64 pixels) {
    __shared__ A shared[WARP];
    A total = 0, spread = 0;
    each_of_channel(batch, channels, pixels, [&](int64 i) { total += to_acc(x[i]); });
    A centre = block_sum(total, shared) / A(batch * pixels);
    each_of_channel(batch, channels, pixels, [&](int64 i) {
        A distance = to_acc(x[i]) - centre;
        spread += distance * distance;
    });
    spread = block_sum(spread, shared);
    if (threadIdx.x > 0) return;
    mean[blockIdx.x] = centre;
    squares[blockIdx.x] = spread;
}

extern "C" __global__ void forward(const T* x, const A* mean, const A* rstd, const A* weight, const A* bias, T* y,
                                   int64 count, int64 channels, int64 pixels) {
    int64 stride = gridDim.x * (int64)blockDim.x;
    for (int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x; i < count; i += stride) {
        int64 c = i / pixels % channels;
        y[i] = from_acc<T>((to_acc(x[i]) - mean[c]) * (weight[c] * rstd[c]) + bias[c]);
    }
}

extern "C" __global__ void backward_sums(const T* dy, const T* x, const A* mean, const A* rstd, A* dweight, A* dbias,
                                         int64 batch, int64 channels, int64 pixels) {
    __shared__ A shared[WARP];
    A centre = mean[blockIdx.x], along = 0, level = 0;
    each_of_channel(batch, channels, pixels, [&](int64 i) {
        along += to_acc(dy[i]) * (to_acc(x[i]) - centre);
        level += to_acc(dy[i]);
    });
    along = block_sum(along, shared);
    level = block_sum(level, shared);
    if (threadIdx.x > 0) return;
    dweight[blockIdx.x] = along * rstd[blockIdx.x];
    dbias[blockIdx.x] = level;
}

extern "C" __global__ void backward_input(const T* dy, const T* x, const A* mean, const A* rstd, const A* weight,
                                          const A* along, const A* level, T* dx, int64 count, int64 channels,
                                          int64 pixels) {
    int64 stride = gridDim.x * (int64)blockDim.x;
    for (int64 i = blockIdx.x * (int64)blockDim.x + threadIdx.x; i < count; i += stride) {
        int64 c = i / pixels % channels;
        A normal = (to_acc(x[i]) - mean[c]) * rstd[c];
        dx[i] = from_acc<T>(weight[c] * rstd[c] * (to_acc(dy[i]) - level[c] - normal * along[c]));
    }
}

// out = (out if accumulate) + the sum of each channel of x.
extern "C" __global__ void channel_sums(const T* x, GRADIENT* out, int accumulate, int64 batch, int64 channels,
                                        int64 pixels) {
    __shared__ A shared[WARP];
    A total = 0;
    each_of_channel(batch, channels, pixels, [&](int64 i) { total += to_acc(x[i]); });
    total = block_sum(total, shared);
    if (threadIdx.x > 0) return;
    out[blockIdx.x] = from_acc<GRADIENT>(accumulate ? A(to_acc(out[blockIdx.x])) + total : total);
}
