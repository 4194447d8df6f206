// GELU in its tanh form (Hendrycks and Gimpel, 2016) of one element: what activation.cu and linear.cu have in common.
#pragma once
#include "common.cuh"

struct GeluTanh {  // x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3): one exponential
    static constexpr double ROOT = 0.7978845608028654, CUBE = 0.044715;  // sqrt(2 / pi)
    static __device__ __forceinline__ A divisor(A x) {
        return A(1) + exp(A(-2 * ROOT) * (x + A(CUBE) * x * x * x));
    }
    static __device__ __forceinline__ A value(A x) { return quotient(x, divisor(x)); }
    static __device__ __forceinline__ A slope(A x, A dy) {
        A s = quotient(A(1), divisor(x));
        return dy * (s + x * s * (A(1) - s) * A(2 * ROOT) * (A(1) + A(3 * CUBE) * x * x));
    }
};
