// Calls a kernel by its address with the arguments of a launch, whose types the compiler knows.
#pragma once
#include <type_traits>
#include <utility>

namespace shim {
template <class... A, size_t... I> void call_(void (*kernel)(A...), std::index_sequence<I...>, void** arguments) {
    kernel(*(A*)arguments[I]...);
}
template <class... A> void call(void (*kernel)(A...), void** arguments) {
    call_(kernel, std::index_sequence_for<A...>(), arguments);
}
template <class... A> size_t sizes(void (*)(A...), size_t* out) {
    size_t all[] = {sizeof(A) + (std::is_pointer<A>::value ? 1 << 16 : 0)..., 0};  // kernels.py knows both
    for (size_t i = 0; i < sizeof...(A); i++) out[i] = all[i];
    return sizeof...(A);
}
}  // namespace shim

// What NVRTC knows without any header.
#include <cassert>
#include <cstddef>
using std::isfinite;
using std::isinf;
using std::isnan;
using std::ptrdiff_t;
using std::signbit;
#define __CUDACC_VER_MAJOR__ 13
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
