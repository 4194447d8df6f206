// CUDA on the CPU, for tests: a block's threads are fibers that take turns at barriers and shuffles.
//
// Enough of the language for kernels/cuda to run unchanged under g++: indices, static and dynamic shared memory,
// __syncthreads, shuffles and votes of a warp, atomics, fp16 and bf16 as storage. Blocks run one after the other.
// A barrier that some threads do not reach, or a shuffle that part of a warp does not, ends the launch with an
// error. Races are not found, and neither is speed.
// shim.cpp runs the threads.
#pragma once
#define SHARDRT_SHIM
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__ __attribute__((noinline))  // compiled once, not into its caller as well
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __restrict__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static
#define __constant__ static
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(shim::dynamic_shared)

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
template <class X> struct alignas(4 * sizeof(X)) Four { X x, y, z, w; };
typedef Four<float> float4;
typedef Four<unsigned> uint4;
struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace shim {
enum class Status { running, at_barrier, in_warp, done };
struct Thread {
    uint3 index;
    unsigned number;
};
extern Thread* current;
extern dim3 block_dim, grid_dim;
extern uint3 block_index;
extern unsigned char* dynamic_shared;
extern uint64_t (*slots)[32];  // of each warp, one per lane
void yield(Status status);

template <class X> inline X exchange(X value, unsigned from) {
    static_assert(sizeof(X) <= 8, "a shuffle moves at most 8 bytes");
    auto& warp = slots[current->number / 32];
    unsigned lane = current->number % 32;
    memcpy(&warp[lane], &value, sizeof value);
    yield(Status::in_warp);
    X result = value;
    if (from < 32) memcpy(&result, &warp[from], sizeof result);
    yield(Status::in_warp);
    return result;
}
}  // namespace shim

#define threadIdx (shim::current->index)
#define blockIdx (shim::block_index)
#define blockDim (shim::block_dim)
#define gridDim (shim::grid_dim)

inline void __syncthreads() { shim::yield(shim::Status::at_barrier); }
inline void __syncwarp(unsigned = 0xffffffffu) { shim::yield(shim::Status::in_warp); }
inline void __threadfence() {}
inline int __syncthreads_or(int x) {
    static int any;
    if (shim::current->number == 0) any = 0;
    __syncthreads();
    any |= x;
    __syncthreads();
    int result = any;
    __syncthreads();
    return result != 0;
}
template <class X> inline X __shfl_sync(unsigned, X x, int from) { return shim::exchange(x, from & 31); }
template <class X> inline X __shfl_xor_sync(unsigned, X x, int mask) {
    return shim::exchange(x, (shim::current->number % 32) ^ mask);
}
template <class X> inline X __shfl_down_sync(unsigned, X x, unsigned by) {
    return shim::exchange(x, shim::current->number % 32 + by);
}
template <class X> inline X __shfl_up_sync(unsigned, X x, unsigned by) {
    unsigned lane = shim::current->number % 32;
    return shim::exchange(x, lane >= by ? lane - by : 32);
}
// One exchange for all lanes: `of` is called with what each of them gave.
template <class X, class Of> inline unsigned __vote(X x, Of of) {
    auto& warp = shim::slots[shim::current->number / 32];
    memcpy(&warp[shim::current->number % 32], &x, sizeof x);
    shim::yield(shim::Status::in_warp);
    unsigned result = 0;
    for (unsigned lane = 0; lane < 32; lane++) {
        X other;
        memcpy(&other, &warp[lane], sizeof other);
        result |= unsigned(of(other)) << lane;
    }
    shim::yield(shim::Status::in_warp);
    return result;
}
inline unsigned __match_any_sync(unsigned, unsigned x) {
    return __vote(x, [=](unsigned other) { return other == x; });
}
inline unsigned __ballot_sync(unsigned, int x) {
    return __vote(unsigned(x != 0), [](unsigned other) { return other; });
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }

template <class X> inline X atomicAdd(X* to, X x) { X old = *to; *to = old + x; return old; }
template <class X> inline X atomicMax(X* to, X x) { X old = *to; *to = x > old ? x : old; return old; }
template <class X> inline X atomicOr(X* to, X x) { X old = *to; *to = old | x; return old; }
template <class X> inline X atomicExch(X* to, X x) { X old = *to; *to = x; return old; }

template <class X> inline X __ldg(const X* from) { return *from; }
template <class X> inline X __ldcs(const X* from) { return *from; }
template <class X> inline void __stcs(X* to, X x) { *to = x; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned((uint64_t(x) * y) >> 32); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
// Rounded once, never fused: where a kernel needs it to be so.
inline float __fmul_rn(float x, float y) { volatile float z = x * y; return z; }
inline float __fadd_rn(float x, float y) { volatile float z = x + y; return z; }
inline double __dmul_rn(double x, double y) { volatile double z = x * y; return z; }
inline double __dadd_rn(double x, double y) { volatile double z = x + y; return z; }
template <class X> inline X min(X a, X b) { return b < a ? b : a; }
template <class X> inline X max(X a, X b) { return a < b ? b : a; }

struct __nv_bfloat16 { uint16_t bits; };
struct __half { uint16_t bits; };
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    unsigned u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16)};
}
inline float __half2float(__half x) { _Float16 y; memcpy(&y, &x.bits, 2); return float(y); }
inline __half __float2half_rn(float x) { _Float16 y = _Float16(x); __half z; memcpy(&z.bits, &y, 2); return z; }
