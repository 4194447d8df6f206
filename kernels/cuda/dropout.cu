// Dropout by counter: the mask is made here, of the CPU's bits, and never stored.
#include "philox.cuh"

// place: the seed, and what `call` counts from, if they are not known when this is launched.
extern "C" __global__ void dropout(const T* x, T* y, uint64 threshold, A scale, uint64 seed, uint64 call,
                                   const uint64* place, uint64 offset, int64 count, int vectors) {
    if (place) seed = place[0], call += place[1];
    auto apply = [=](T value, uint32 number) {
        return from_acc<T>(number >= threshold ? to_acc(value) * scale : A(0));
    };
    each_number(
        {seed, call, offset}, count, vectors,
        [=](int64 i, const Words(&numbers)[AT_ONCE / 4]) {
            Pack<T, AT_ONCE> pack = load<AT_ONCE>(x + i);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) pack[k] = apply(pack[k], numbers[k / 4].word[k % 4]);
            store<AT_ONCE>(y + i, pack);
        },
        [=](int64 i, const Words& words, int lane) { y[i] = apply(x[i], words.word[lane]); });
}
