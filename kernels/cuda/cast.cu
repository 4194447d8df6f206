// Between float32 and the 16-bit type T, whose arrays are bits (uint16) or numbers, as the caller likes.
//
// ELEMENT: __half __nv_bfloat16
#include "ranges.cuh"

constexpr int N = 8;  // sixteen bytes of T

// x and out may be one array.
extern "C" __global__ void round_to(const float* x, float* out, int64 count, int vectors) {
    each_in<4>(0, count, vectors, [=](int64 i, auto width) {
        constexpr int W = decltype(width)::value;
        Pack<float, W> pack = load<W>(x + i);
        for (int k = 0; k < W; k++) pack[k] = to_acc(from_acc<T>(pack[k]));
        store<W>(out + i, pack);
    });
}

extern "C" __global__ void pack(const float* x, uint16* out, int64 count, int vectors) {
    each_in<N>(0, count, vectors, [=](int64 i, auto width) {
        constexpr int W = decltype(width)::value;
        Pack<float, W> numbers = load<W>(x + i);
        Pack<T, W> bits;
        for (int k = 0; k < W; k++) bits[k] = from_acc<T>(numbers[k]);
        store<W>(reinterpret_cast<T*>(out) + i, bits);
    });
}

extern "C" __global__ void unpack(const uint16* x, float* out, int64 count, int vectors) {
    each_in<N>(0, count, vectors, [=](int64 i, auto width) {
        constexpr int W = decltype(width)::value;
        Pack<T, W> bits = load<W>(reinterpret_cast<const T*>(x) + i);
        Pack<float, W> numbers;
        for (int k = 0; k < W; k++) numbers[k] = to_acc(bits[k]);
        store<W>(out + i, numbers);
    });
}
