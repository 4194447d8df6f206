// Random numbers by counter: the bits of kernels/cpu/philox.py. Computed in double, as there, and rounded once.
#include "philox.cuh"

struct Numbers {
    double value[4];
};

// Fills the array with what make(Words) makes of its four words.
template <class Make>
__device__ __forceinline__ void fill(T* out, Sequence of, int64 count, bool vectors, Make make) {
    each_number(
        of, count, vectors,
        [=](int64 i, const Words(&numbers)[AT_ONCE / 4]) {
            Pack<T, AT_ONCE> pack;
#pragma unroll
            for (int k = 0; k < AT_ONCE / 4; k++) {
                Numbers made = make(numbers[k]);
#pragma unroll
                for (int lane = 0; lane < 4; lane++) pack[4 * k + lane] = from_acc<T>(A(made.value[lane]));
            }
            store<AT_ONCE>(out + i, pack);
        },
        [=](int64 i, const Words& words, int lane) { out[i] = from_acc<T>(A(make(words).value[lane])); });
}

// The largest number below 1: rounding to 16 bits must not make it 1. Wider types hold the 24 bits exactly.
template <class X> struct BelowOne { static constexpr double value = 1; };
template <> struct BelowOne<__half> { static constexpr double value = 1 - 1.0 / 2048; };
template <> struct BelowOne<__nv_bfloat16> { static constexpr double value = 1 - 1.0 / 256; };

extern "C" __global__ void uniform(T* out, uint64 seed, uint64 stream, uint64 offset, int64 count, int vectors) {
    fill(out, {seed, stream, offset}, count, vectors, [](const Words& words) {
        Numbers made;
        for (int lane = 0; lane < 4; lane++) {
            double value = (words.word[lane] >> 8) * (1.0 / (1 << 24)), largest = BelowOne<T>::value;
            made.value[lane] = value > largest ? largest : value;
        }
        return made;
    });
}

// Sine and cosine of 0 <= x < 8, to the last bit or so: after fdlibm's k_sin.c and k_cos.c (Sun Microsystems, 1993).
// CUDA's own reduce large arguments in memory on the stack.
__device__ __forceinline__ void sine_and_cosine(double x, double& sine, double& cosine) {
    int quarter = int(x * 6.36619772367581382433e-01 + 0.5);
    double near = fma(-quarter, 1.57079632673412561417e+00, x);  // 33 bits of pi / 2: no rounding
    double tail = __dmul_rn(quarter, 6.07710050650619224932e-11);
    double r = near - tail, low = (near - r) - tail, z = r * r;  // x = quarter * pi / 2 + (r + low)
    double p = 8.33333333332248946124e-03 +
               z * (-1.98412698298579493134e-04 +
                    z * (2.75573137070700676789e-06 +
                         z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)));
    double s = r - ((z * (0.5 * low - z * r * p) - low) + z * r * 1.66666666666666324348e-01);
    double q = 4.16666666666666019037e-02 +
               z * (-1.38888888888741095749e-03 +
                    z * (2.48015872894767294178e-05 +
                         z * (-2.75573143513906633035e-07 +
                              z * (2.08757232129817482790e-09 - z * 1.13596475577881948265e-11))));
    double half = 0.5 * z, w = 1 - half;
    double c = w + (((1 - w) - half) + (z * (z * q) - r * low));
    sine = quarter & 1 ? c : s;
    cosine = quarter & 1 ? s : c;
    if (quarter & 2) sine = -sine;
    if ((quarter + 1) & 2) cosine = -cosine;
}

extern "C" __global__ void normal(T* out, uint64 seed, uint64 stream, uint64 offset, double mean, double std,
                                  int64 count, int vectors) {
    fill(out, {seed, stream, offset}, count, vectors, [=](const Words& words) {
        Numbers made;
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            double length = (words.word[2 * pair] + 0.5) * (1.0 / 4294967296.0);
            double turn = words.word[2 * pair + 1] * (1.0 / 4294967296.0), sine, cosine;
            double radius = __dmul_rn(sqrt(-2 * log(length)), std);  // not fused: the CPU rounds here too
            sine_and_cosine(6.28318530717958647693 * turn, sine, cosine);
            made.value[2 * pair] = __dadd_rn(mean, __dmul_rn(radius, cosine));
            made.value[2 * pair + 1] = __dadd_rn(mean, __dmul_rn(radius, sine));
        }
        return made;
    });
}
