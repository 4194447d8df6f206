// Philox4x32-10, as in kernels/cpu/philox.py: element i of a stream is number i % 4 of block i / 4.
#pragma once
#include "ranges.cuh"

struct Sequence {
    uint64 seed, stream, offset;  // element i of an array is element offset + i of the stream
};
struct Words {
    uint32 word[4];
};

__device__ __forceinline__ Words philox(Sequence of, uint64 block) {
    uint32 a = uint32(block), b = uint32(block >> 32), c = uint32(of.stream), d = uint32(of.stream >> 32);
    uint32 k0 = uint32(of.seed), k1 = uint32(of.seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint32 high0 = __umulhi(0xD2511F53u, a), low0 = 0xD2511F53u * a;
        uint32 high1 = __umulhi(0xCD9E8D57u, c), low1 = 0xCD9E8D57u * c;
        a = high1 ^ b ^ k0, b = low1, c = high0 ^ d ^ k1, d = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {{a, b, c, d}};
}

// What a thread makes at once: whole blocks of numbers, sixteen bytes at least.
constexpr int AT_ONCE = Vector<T>::width < 4 ? 4 : Vector<T>::width;

// Calls many(i, numbers), whose AT_ONCE elements from i on have the numbers of `numbers` in order, and where that
// is not possible one(i, words, lane), whose element i has number words.word[lane]; over [0, count).
//
// Blocks lie at multiples of four of the stream, so `many` also needs an offset that is one.
template <class Many, class One>
__device__ __forceinline__ void each_number(Sequence of, int64 count, bool vectors, Many many, One one) {
    int64 first = blockIdx.x * (int64)blockDim.x + threadIdx.x, stride = gridDim.x * (int64)blockDim.x;
    int64 whole = vectors && of.offset % 4 == 0 ? count / AT_ONCE * AT_ONCE : 0;
    for (int64 i = first * AT_ONCE; i < whole; i += stride * AT_ONCE) {
        Words numbers[AT_ONCE / 4];
#pragma unroll
        for (int k = 0; k < AT_ONCE / 4; k++) numbers[k] = philox(of, (of.offset + i) / 4 + k);
        many(i, numbers);
    }
    uint64 low = of.offset + whole, high = of.offset + count;
    for (uint64 block = low / 4 + first; block * 4 < high; block += stride) {
        Words words = philox(of, block);
#pragma unroll
        for (int lane = 0; lane < 4; lane++) {
            uint64 element = block * 4 + lane;
            if (low <= element && element < high) one(int64(element - of.offset), words, lane);
        }
    }
}
