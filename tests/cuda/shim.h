// CUDA on the CPU, for tests: a block's threads are fibers that take turns at barriers and shuffles.
//
// Enough of the language for kernels/cuda to run unchanged under g++: indices, static and dynamic shared memory,
// __syncthreads, shuffles and votes of a warp, atomics, fp16 and bf16 as storage. Blocks run one after the other.
// What CUDA leaves undefined ends the launch with an error: a barrier that some threads do not reach, or that they
// reach in different lines; a shuffle that a lane of its mask does not reach, or that asks one that is not there.
// shim.cpp runs the threads. With -fsanitize=thread, shadow.h sees every access to memory and finds races.
#pragma once
#define SHARDRT_SHIM
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__ __attribute__((noinline))  // compiled once, not into its caller as well
#define __device__
#define __host__
#ifdef __SANITIZE_THREAD__
#define __forceinline__ inline __attribute__((always_inline))  // so that a line is told with those that it is used in
#define __shared__ static __attribute__((aligned(4096)))       // not one right behind the other
#else
#define __forceinline__ inline
#define __shared__ static
#endif
#define __noinline__ __attribute__((noinline))
#define __restrict__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __constant__ static
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(shim::now.dynamic_shared)

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
struct Thread {
    uint3 index;
    unsigned number;
};
struct Launch {
    Thread* current;
    dim3 block_dim, grid_dim;
    uint3 block_index;
    unsigned char* dynamic_shared;
};
extern Launch now;
struct Call {  // of something that threads do together
    const char *what, *file;
    int line;
};
int at_barrier(int x, Call call);  // whether any of the block gave something else than 0
void in_warp(unsigned mask, Call call);
void fence();
uint64_t shuffle(unsigned mask, uint64_t x, unsigned from, Call call);  // what lane `from` gave, x itself from 32 on
unsigned vote(unsigned mask, unsigned x, bool match, Call call);        // lanes that gave the same, or else not 0
void atomic(const void* at, size_t size, const void* caller);

template <class X> inline X exchange(unsigned mask, X x, unsigned from, Call call) {
    static_assert(sizeof(X) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    bits = shuffle(mask, bits, from, call);
    memcpy(&x, &bits, sizeof x);
    return x;
}
inline unsigned lane() { return now.current->number % 32; }
}  // namespace shim

#define threadIdx (shim::now.current->index)
#define blockIdx (shim::now.block_index)
#define blockDim (shim::now.block_dim)
#define gridDim (shim::now.grid_dim)

#define SHIM_LINE const char *file = __builtin_FILE(), int line = __builtin_LINE()  // of who calls
#define SHIM_CALL shim::Call{__func__, file, line}
inline void __syncthreads(SHIM_LINE) { shim::at_barrier(0, SHIM_CALL); }
inline int __syncthreads_or(int x, SHIM_LINE) { return shim::at_barrier(x, SHIM_CALL); }
inline void __syncwarp(unsigned mask = 0xffffffffu, SHIM_LINE) { shim::in_warp(mask, SHIM_CALL); }
inline void __threadfence() { shim::fence(); }
template <class X> inline X __shfl_sync(unsigned mask, X x, int from, SHIM_LINE) {
    return shim::exchange(mask, x, from & 31, SHIM_CALL);
}
template <class X> inline X __shfl_xor_sync(unsigned mask, X x, int with, SHIM_LINE) {
    return shim::exchange(mask, x, shim::lane() ^ with, SHIM_CALL);
}
template <class X> inline X __shfl_down_sync(unsigned mask, X x, unsigned by, SHIM_LINE) {
    return shim::exchange(mask, x, shim::lane() + by, SHIM_CALL);
}
template <class X> inline X __shfl_up_sync(unsigned mask, X x, unsigned by, SHIM_LINE) {
    return shim::exchange(mask, x, shim::lane() >= by ? shim::lane() - by : 32, SHIM_CALL);
}
inline unsigned __match_any_sync(unsigned mask, unsigned x, SHIM_LINE) { return shim::vote(mask, x, true, SHIM_CALL); }
inline unsigned __ballot_sync(unsigned mask, int x, SHIM_LINE) { return shim::vote(mask, x, false, SHIM_CALL); }
inline int __any_sync(unsigned mask, int x, SHIM_LINE) { return shim::vote(mask, x, false, SHIM_CALL) != 0; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
// Their own accesses are one, of their caller.
#ifdef __SANITIZE_THREAD__
#define SHIM_ATOMIC template <class X> __attribute__((noinline, no_sanitize("thread"))) X
#define SHIM_SEEN shim::atomic(to, sizeof *to, __builtin_return_address(0))
#else
#define SHIM_ATOMIC template <class X> inline X
#define SHIM_SEEN
#endif
SHIM_ATOMIC atomicAdd(X* to, X x) { SHIM_SEEN; X old = *to; *to = old + x; return old; }
SHIM_ATOMIC atomicMax(X* to, X x) { SHIM_SEEN; X old = *to; *to = x > old ? x : old; return old; }
SHIM_ATOMIC atomicOr(X* to, X x) { SHIM_SEEN; X old = *to; *to = old | x; return old; }
SHIM_ATOMIC atomicExch(X* to, X x) { SHIM_SEEN; X old = *to; *to = x; return old; }
SHIM_ATOMIC atomicCAS(X* to, X expected, X x) { SHIM_SEEN; X old = *to; if (old == expected) *to = x; return old; }

template <class X> inline X __ldg(const X* from) { return *from; }
template <class X> inline X __ldcs(const X* from) { return *from; }
template <class X> inline void __stcs(X* to, X x) { *to = x; }
inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline long long __double_as_longlong(double x) { long long y; memcpy(&y, &x, 8); return y; }
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

// cuda_fp8.h: what a float becomes in 8 bits, to nearest, ties to even; too large is the largest.
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
inline unsigned char __nv_cvt_float_to_fp8(float x, __nv_saturation_t, __nv_fp8_interpretation_t kind) {
    const int fraction = kind == __NV_E4M3 ? 3 : 2, lowest = kind == __NV_E4M3 ? -6 : -14;  // exponent of normals
    const unsigned most = kind == __NV_E4M3 ? 0x7e : 0x7b, sign = __float_as_uint(x) >> 24 & 0x80;
    if (x != x) return 0x7f;
    if (fabsf(x) > 65536) return sign | most;
    int exponent;
    frexpf(x, &exponent);
    exponent = x == 0 || exponent - 1 < lowest ? lowest : exponent - 1;
    float steps = rintf(ldexpf(fabsf(x), fraction - exponent));
    unsigned bits = unsigned(steps) + (unsigned(exponent - lowest) << fraction);  // a carry goes into the exponent
    return sign | (bits < most ? bits : most);
}
inline unsigned short __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t how, __nv_fp8_interpretation_t kind) {
    return __nv_cvt_float_to_fp8(x.x, how, kind) | __nv_cvt_float_to_fp8(x.y, how, kind) << 8;
}
