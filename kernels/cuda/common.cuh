// What every kernel of this folder starts from: the element type, vectors of 16 bytes, sums over warps and blocks.
//
// A file is compiled once for each element type T (-DELEMENT=...). Sums and functions are computed in A: float,
// or double where T is. tests/cuda/shim.h stands in for CUDA's headers when g++ compiles the same files.
#pragma once

#ifndef SHARDRT_SHIM
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define DYNAMIC_SHARED(type, name)                                                                                 \
    extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];                                          \
    type* name = reinterpret_cast<type*>(dynamic_shared_bytes)
#endif

typedef long long int64;
typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef unsigned short uint16;

template <class X> struct Accumulator { typedef float type; };
template <> struct Accumulator<double> { typedef double type; };

typedef ELEMENT T;
typedef Accumulator<T>::type A;

// The types of gradients and of an optimizer's state, where they are others (-DGRADIENT=..., -DSTATE=...).
#ifndef GRADIENT
#define GRADIENT ELEMENT
#endif
#ifndef STATE
#define STATE ELEMENT
#endif

// Conversions. Rounding to 16 bits is to nearest, ties to even.
__device__ __forceinline__ float to_acc(float x) { return x; }
__device__ __forceinline__ double to_acc(double x) { return x; }
__device__ __forceinline__ float to_acc(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_acc(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class X> struct From;
template <> struct From<float> { static __device__ __forceinline__ float of(float x) { return x; } };
template <> struct From<double> { static __device__ __forceinline__ double of(double x) { return x; } };
template <> struct From<__half> { static __device__ __forceinline__ __half of(float x) { return __float2half_rn(x); } };
template <> struct From<__nv_bfloat16> {
    static __device__ __forceinline__ __nv_bfloat16 of(float x) { return __float2bfloat16_rn(x); }
};
template <class X> __device__ __forceinline__ X from_acc(typename Accumulator<X>::type x) { return From<X>::of(x); }

// x / y to 2 units in the last place; 0 where y is above 2^126.
__device__ __forceinline__ float quotient(float x, float y) { return __fdividef(x, y); }
__device__ __forceinline__ double quotient(double x, double y) { return x / y; }

// Sixteen bytes that are loaded and stored at once. The pointer must be aligned to 16.
template <class X> struct alignas(16) Vector {
    static constexpr int width = 16 / sizeof(X);
    X value[width];
    __device__ __forceinline__ X& operator[](int i) { return value[i]; }
    __device__ __forceinline__ const X& operator[](int i) const { return value[i]; }
};
template <class X> __device__ __forceinline__ Vector<X> load16(const X* from) {
    return *reinterpret_cast<const Vector<X>*>(from);
}
template <class X> __device__ __forceinline__ void store16(X* to, const Vector<X>& vector) {
    *reinterpret_cast<Vector<X>*>(to) = vector;
}

// Sums and maxima, the same bits in every thread, whatever ran first. Blocks have a multiple of 32 threads.
constexpr int WARP = 32;
template <class X> __device__ __forceinline__ X warp_sum(X x) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}
template <class X> __device__ __forceinline__ X warp_max(X x) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        X other = __shfl_xor_sync(0xffffffffu, x, distance);
        x = other > x ? other : x;
    }
    return x;
}
// `shared`: WARP elements. All threads of the block call it. block_sum ends with everybody past reading `shared`;
// behind block_max there must be another barrier before `shared` is written again.
template <class X> __device__ __forceinline__ X block_sum(X x, X* shared) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? shared[lane] : X(0));
    __syncthreads();
    return x;
}
template <class X> __device__ __forceinline__ X block_max(X x, X* shared) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    x = warp_max(x);
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    return warp_max(shared[lane < warps ? lane : 0]);
}
