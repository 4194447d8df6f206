// SwiGLU: silu(a) * b, a and b side by side in each row. A block has a row; 16 bytes per thread and turn where rows allow.
#include "ranges.cuh"

constexpr int N = Vector<T>::width;

// Calls step(j, width) for every j of a row of `width` elements, N at once where `vectors` says that they are aligned.
template <class Step> __device__ __forceinline__ void each_of_row(int width, bool vectors, Step step) {
    if (vectors)
        for (int j = threadIdx.x * N; j < width; j += blockDim.x * N) step(j, Width<N>());
    else
        for (int j = threadIdx.x; j < width; j += blockDim.x) step(j, Width<1>());
}

extern "C" __global__ void forward(const T* x, T* y, int width, int vectors) {
    int64 row = blockIdx.x;
    x += 2 * row * width, y += row * width;
    each_of_row(width, vectors, [=](int j, auto many) {
        constexpr int W = decltype(many)::value;
        Pack<T, W> gate = load<W>(x + j), up = load<W>(x + width + j);
#pragma unroll
        for (int k = 0; k < W; k++) {
            A a = to_acc(gate[k]);
            gate[k] = from_acc<T>(quotient(a, A(1) + exp(-a)) * to_acc(up[k]));
        }
        store<W>(y + j, gate);
    });
}

// dx may be x.
extern "C" __global__ void backward(const T* dy, const T* x, T* dx, int width, int vectors) {
    int64 row = blockIdx.x;
    dy += row * width, x += 2 * row * width, dx += 2 * row * width;
    each_of_row(width, vectors, [=](int j, auto many) {
        constexpr int W = decltype(many)::value;
        Pack<T, W> upper = load<W>(dy + j), gate = load<W>(x + j), up = load<W>(x + width + j);
#pragma unroll
        for (int k = 0; k < W; k++) {
            A a = to_acc(gate[k]), b = to_acc(up[k]), dy = to_acc(upper[k]), s = quotient(A(1), A(1) + exp(-a));
            gate[k] = from_acc<T>(dy * b * s * (A(1) + a * (A(1) - s)));
            up[k] = from_acc<T>(dy * a * s);
        }
        store<W>(dx + j, gate);
        store<W>(dx + width + j, up);
    });
}
