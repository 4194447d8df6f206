// A type of 16 bits that is computed with in float, as CUDA's headers have them.
#pragma once
#define ROUNDED(name, stored, widen, round)                                                  \
    struct name {                                                                            \
        stored value;                                                                        \
        name() = default;                                                                    \
        name(stored x) : value(x) {}                                                         \
        name(float x) : value(round(x)) {}                                                   \
        name(double x) : value(round(float(x))) {}                                           \
        name(bool x) : value(round(float(x))) {}                                             \
        name(int x) : value(round(float(x))) {}                                              \
        name(unsigned x) : value(round(float(x))) {}                                         \
        name(long x) : value(round(float(x))) {}                                             \
        name(unsigned long x) : value(round(float(x))) {}                                    \
        name(long long x) : value(round(float(x))) {}                                        \
        name(unsigned long long x) : value(round(float(x))) {}                               \
        operator float() const { return widen(value); }                                      \
    };
#define __hisnan(x) (float(x) != float(x))
#define __hisinf(x) (std::isinf(float(x)))
