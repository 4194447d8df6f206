// Cross entropy from logits, a block per row: forward reads them once, backward reads and writes them once.
#include "rows.cuh"

// lse = log of the sum of exponentials; losses = lse - logits[target], 0 where the target is ignore_index. Both are nan
// where the target is not in the vocabulary.
extern "C" __global__ void forward(const T* logits, const int64* targets, A* losses, A* lse, int64 vocab,
                                   int64 ignore_index, int vectors) {
    int64 row = blockIdx.x, start = row * vocab;
    Exponentials all;
    each_in_row(start, vocab, vectors, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        all.add(load<W>(logits + start + j));
    });
    all.join();
    if (threadIdx.x > 0) return;
    int64 target = targets[row];
    bool ignored = target == ignore_index, inside = 0 <= target && target < vocab;
    A value = ignored || inside ? all.highest + log(all.total) : A(nan(""));
    lse[row] = value;
    losses[row] = ignored ? A(0) : inside ? value - to_acc(logits[start + target]) : value;
}

// dlogits = scale * (softmax - one-hot target), 0 in ignored rows, which are not read. It may be the logits. scale: one
// number, 1 where there is none.
extern "C" __global__ void backward(const T* logits, const int64* targets, const A* lse, T* dlogits,
                                    const double* scale, int64 vocab, int64 ignore_index, int vectors) {
    int64 row = blockIdx.x, start = row * vocab, target = targets[row];
    A shift = lse[row], factor = scale ? A(*scale) : A(1);
    bool ignored = target == ignore_index;
    each_in_row(start, vocab, vectors, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        Pack<T, W> pack = {};
        if (!ignored) {
            pack = load<W>(logits + start + j);
#pragma unroll
            for (int k = 0; k < W; k++) {
                A probability = exp(to_acc(pack[k]) - shift);
                pack[k] = from_acc<T>((j + k == target ? probability - A(1) : probability) * factor);
            }
        }
        store<W>(dlogits + start + j, pack);
    });
}
