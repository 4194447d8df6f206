// How the stand-ins for cuBLAS and cublasLt read and write an element of a cudaDataType; float8 is only read.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { F32 = 0, F64 = 1, F16 = 2, BF16 = 14, E4M3 = 28, E5M2 = 29 };
static double get(const void* from, int64_t i, int type) {
    if (type == F64) return ((const double*)from)[i];
    if (type == F32) return ((const float*)from)[i];
    if (type == E5M2) { uint16_t half = ((const uint8_t*)from)[i] << 8; _Float16 y; memcpy(&y, &half, 2); return y; }
    if (type == E4M3) {
        int byte = ((const uint8_t*)from)[i], exponent = byte >> 3 & 15, fraction = byte & 7;
        double y = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
        if ((byte & 127) == 127) y = NAN;
        return byte >> 7 ? -y : y;
    }
    uint16_t bits = ((const uint16_t*)from)[i];
    if (type == BF16) { uint32_t wide = (uint32_t)bits << 16; float x; memcpy(&x, &wide, 4); return x; }
    _Float16 x;
    memcpy(&x, &bits, 2);
    return x;
}
static void put(void* to, int64_t i, int type, double x) {
    if (type == F64) { ((double*)to)[i] = x; return; }
    if (type == F32) { ((float*)to)[i] = x; return; }
    if (type == F16) { _Float16 y = x; memcpy((uint16_t*)to + i, &y, 2); return; }
    float y = x;
    uint32_t wide;
    memcpy(&wide, &y, 4);
    ((uint16_t*)to)[i] = x != x ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
}
