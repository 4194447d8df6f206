// GELU in both forms, SiLU and ReLU, on flat arrays: y of x, and dx of dy and x; and the error function. Sixteen
// bytes per thread and turn.
//
// A function of one element is written once, as value(x) and slope(x, dy); dx may be dy, and y may be x.
#include "gelu.cuh"
#include "ranges.cuh"

constexpr int N = Vector<T>::width;

struct GeluErf {
    static constexpr double HALF_ROOT = 0.7071067811865476, DENSITY = 0.3989422804014327;  // 1 / sqrt(2 pi)
    static __device__ __forceinline__ A value(A x) { return A(0.5) * x * (A(1) + erf(x * A(HALF_ROOT))); }
    static __device__ __forceinline__ A slope(A x, A dy) {
        return dy * (A(0.5) * (A(1) + erf(x * A(HALF_ROOT))) + x * A(DENSITY) * exp(A(-0.5) * x * x));
    }
};

struct Silu {
    static __device__ __forceinline__ A value(A x) { return quotient(x, A(1) + exp(-x)); }
    static __device__ __forceinline__ A slope(A x, A dy) {
        A s = quotient(A(1), A(1) + exp(-x));
        return dy * s * (A(1) + x * (A(1) - s));
    }
};

struct Relu {
    static __device__ __forceinline__ A value(A x) { return x < A(0) ? A(0) : x; }  // nan stays
    static __device__ __forceinline__ A slope(A x, A dy) { return dy * (x > A(0) ? A(1) : A(0)); }
};

struct Erf {
    static __device__ __forceinline__ A value(A x) { return erf(x); }
};

template <class Of> __device__ __forceinline__ void forward(const T* x, T* y, int64 count, int vectors) {
    each_in<N>(0, count, vectors, [=](int64 i, auto width) {
        constexpr int W = decltype(width)::value;
        Pack<T, W> pack = load<W>(x + i);
#pragma unroll
        for (int k = 0; k < W; k++) pack[k] = from_acc<T>(Of::value(to_acc(pack[k])));
        store<W>(y + i, pack);
    });
}

template <class Of>
__device__ __forceinline__ void backward(const T* dy, const T* x, T* dx, int64 count, int vectors) {
    each_in<N>(0, count, vectors, [=](int64 i, auto width) {
        constexpr int W = decltype(width)::value;
        Pack<T, W> upper = load<W>(dy + i), pack = load<W>(x + i);
#pragma unroll
        for (int k = 0; k < W; k++) pack[k] = from_acc<T>(Of::slope(to_acc(pack[k]), to_acc(upper[k])));
        store<W>(dx + i, pack);
    });
}

extern "C" __global__ void gelu_tanh_forward(const T* x, T* y, int64 count, int vectors) {
    forward<GeluTanh>(x, y, count, vectors);
}

extern "C" __global__ void gelu_tanh_backward(const T* dy, const T* x, T* dx, int64 count, int vectors) {
    backward<GeluTanh>(dy, x, dx, count, vectors);
}

extern "C" __global__ void gelu_erf_forward(const T* x, T* y, int64 count, int vectors) {
    forward<GeluErf>(x, y, count, vectors);
}

extern "C" __global__ void gelu_erf_backward(const T* dy, const T* x, T* dx, int64 count, int vectors) {
    backward<GeluErf>(dy, x, dx, count, vectors);
}

extern "C" __global__ void silu_forward(const T* x, T* y, int64 count, int vectors) {
    forward<Silu>(x, y, count, vectors);
}

extern "C" __global__ void silu_backward(const T* dy, const T* x, T* dx, int64 count, int vectors) {
    backward<Silu>(dy, x, dx, count, vectors);
}

extern "C" __global__ void relu_forward(const T* x, T* y, int64 count, int vectors) {
    forward<Relu>(x, y, count, vectors);
}

extern "C" __global__ void relu_backward(const T* dy, const T* x, T* dx, int64 count, int vectors) {
    backward<Relu>(dy, x, dx, count, vectors);
}

extern "C" __global__ void erf_forward(const T* x, T* y, int64 count, int vectors) {
    forward<Erf>(x, y, count, vectors);
}
