// What CuPy's kernels use of CUDA's header of this name.
#pragma once
#include "rounded.h"
ROUNDED(shim_bfloat16, __nv_bfloat16, __bfloat162float, __float2bfloat16_rn)
inline unsigned short __bfloat16_as_ushort(shim_bfloat16 x) { return x.value.bits; }
inline shim_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16{bits}; }
#define __nv_bfloat16 shim_bfloat16
