// Cross entropy from logits, a block per row: forward reads them once, backward reads and writes them once; or forward
// reads them and writes their gradient. Rows begin `stride` elements apart.
#include "rows.cuh"

// What of a row's loss does not depend on the other rows. These are the logits of `count` words from `first` on, of
// `vocab`. The loss is nan, and what all of them have, where the target is no word.
struct Row {
    int64 target;  // as a column of these logits
    bool ignored, known, here;

    __device__ __forceinline__ Row(const int64* targets, int64 count, int64 ignore_index, int64 first, int64 vocab) {
        int64 word = targets[blockIdx.x];
        target = word - first;
        ignored = word == ignore_index;
        known = 0 <= word && word < vocab;
        here = known && 0 <= target && target < count;
    }
    __device__ __forceinline__ A logarithm(const Exponentials& all) const {
        return ignored || known ? all.highest + log(all.total) : A(nan(""));
    }
    __device__ __forceinline__ A loss(A value, A chosen) const { return ignored ? A(0) : value - chosen; }
};

// lse = log of the sum of exponentials; losses = lse - logits[target], 0 where the target is ignore_index. part: in
// their place goes logits[target], 0 where that is not among these, for `join`.
extern "C" __global__ void forward(const T* logits, const int64* targets, A* losses, A* lse, int64 count, int64 stride,
                                   int64 ignore_index, int64 first, int64 vocab, int part, int vectors) {
    int64 start = blockIdx.x * stride;
    Exponentials all;
    each_in_row(start, count, vectors, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        all.add(load<W>(logits + start + j));
    });
    all.join();
    if (threadIdx.x > 0) return;
    Row row(targets, count, ignore_index, first, vocab);
    A value = row.logarithm(all), chosen = row.here ? to_acc(logits[start + row.target]) : A(0);
    lse[blockIdx.x] = value;
    losses[blockIdx.x] = part ? chosen : row.loss(value, chosen);
}

// losses and lse of the whole vocabulary, a thread per row. pairs (parts, 2, rows): lse and logits[target] of each.
extern "C" __global__ void join(const A* pairs, const int64* targets, A* losses, A* lse, int64 rows, int64 parts,
                                int64 ignore_index) {
    int64 row = blockIdx.x * (int64)blockDim.x + threadIdx.x;
    if (row >= rows) return;
    A highest = -infinity(), total = 0, chosen = 0;
    for (int64 part = 0; part < parts; part++) highest = max(highest, pairs[part * 2 * rows + row]);
    A shift = highest == -infinity() ? A(0) : highest;
    for (int64 part = 0; part < parts; part++) {
        total += exp(pairs[part * 2 * rows + row] - shift);
        chosen += pairs[(part * 2 + 1) * rows + row];
    }
    A value = shift + log(total);
    lse[row] = value;
    losses[row] = targets[row] == ignore_index ? A(0) : value - chosen;
}

// scale * (softmax - one-hot) of some logits from the j-th of their row on.
template <int W>
__device__ __forceinline__ Pack<T, W> slopes(Pack<T, W> pack, int64 j, int64 target, A shift, A scale) {
#pragma unroll
    for (int k = 0; k < W; k++) {
        A probability = exp(to_acc(pack[k]) - shift);
        pack[k] = from_acc<T>((j + k == target ? probability - A(1) : probability) * scale);
    }
    return pack;
}

// dlogits = scale * (softmax - one-hot target), 0 in ignored rows, which are not read. It may be the logits, which are
// those of the words from `first` on; lse is that of all words. scale: one number, 1 where there is none.
extern "C" __global__ void backward(const T* logits, const int64* targets, const A* lse, T* dlogits,
                                    const double* scale, int64 count, int64 stride, int64 dstride, int64 ignore_index,
                                    int64 first, int vectors) {
    int64 start = blockIdx.x * stride, dstart = blockIdx.x * dstride;
    int64 word = targets[blockIdx.x], target = word - first;
    A shift = lse[blockIdx.x], factor = scale ? A(*scale) : A(1);
    bool together = vectors && (dstart - start) % N == 0, ignored = word == ignore_index;
    each_in_row(start, count, together, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        Pack<T, W> pack = {};
        if (!ignored) pack = slopes(load<W>(logits + start + j), j, target, shift, factor);
        store<W>(dlogits + dstart + j, pack);
    });
}

constexpr int ROOM = sizeof(T) > 4 ? 1 : 2;  // blocks on a multiprocessor

// As forward; then softmax - one-hot, 0 in ignored rows, takes the place of the logits. A thread keeps what it has read
// of the first `held` in shared memory, where nobody else looks, and reads the others again.
extern "C" __global__ void __launch_bounds__(1024, ROOM) in_place(T* logits, const int64* targets, A* losses, A* lse,
                                                                  int64 vocab, int64 stride, int64 ignore_index,
                                                                  int64 held, int vectors) {
    DYNAMIC_SHARED(T, shared);
    int64 start = blockIdx.x * stride;
    T *line = logits + start, *kept = shared + start % N;  // aligned alike
    Exponentials all;
    each_in_row(start, vocab, vectors, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        Pack<T, W> pack = load<W>(line + j);
        if (j < held) store<W>(kept + j, pack);
        all.add(pack);
    });
    Row row(targets, vocab, ignore_index, 0, vocab);
    A chosen = row.here ? to_acc(line[row.target]) : A(0);
    all.join();  // and nobody writes before all have read
    A value = row.logarithm(all);
    each_in_row(start, vocab, vectors, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        Pack<T, W> pack = {};
        if (!row.ignored) {
            pack = j < held ? load<W>(kept + j) : load<W>(line + j);
            pack = slopes(pack, j, row.target, value, A(1));
        }
        store<W>(line + j, pack);
    });
    if (threadIdx.x > 0) return;
    lse[blockIdx.x] = value;
    losses[blockIdx.x] = row.loss(value, chosen);
}

// out = x * factor, the row's own or, where there is one, that for all. `out` may be x, which is not touched for 1.
extern "C" __global__ void scale_rows(const T* x, const double* factor, T* out, int of_rows, int64 width,
                                      int vectors) {
    int64 start = blockIdx.x * width;
    A by = A(factor[of_rows ? blockIdx.x : 0]);
    if (by == A(1) && out == x) return;
    each_in_row(start, width, vectors, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        Pack<T, W> pack = load<W>(x + start + j);
#pragma unroll
        for (int k = 0; k < W; k++) pack[k] = from_acc<T>(to_acc(pack[k]) * by);
        store<W>(out + start + j, pack);
    });
}
