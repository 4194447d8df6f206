// What CuPy's kernels use of CUDA's header of this name.
#pragma once
#include "rounded.h"
struct __half_raw { unsigned short x; };
ROUNDED(shim_float16, __half, __half2float, __float2half_rn)
struct half : shim_float16 {
    using shim_float16::shim_float16;
    half() = default;
    half(__half_raw raw) : shim_float16(__half{raw.x}) {}
    operator __half_raw() const { return {value.bits}; }
};
inline unsigned short __half_as_ushort(half x) { return x.value.bits; }
inline half __ushort_as_half(unsigned short bits) { return half(__half{bits}); }
