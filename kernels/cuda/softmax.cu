// Softmax over rows: each row is read once where it fits into registers, else twice.
#include "rows.cuh"

template <class Team> __device__ __forceinline__ void forward(const T* x, T* y, int64 rows, int width) {
    int64 row = Team::row();
    if (row >= rows) return;
    Vector<T> held[HELD];
    load_held<Team>(held, x + row * width, width);
    A highest = -infinity(), total = 0;
    each_held<Team>(width, [&](int k, int) {
        for (int i = 0; i < N; i++) highest = to_acc(held[k][i]) > highest ? to_acc(held[k][i]) : highest;
    });
    highest = Team::max(highest);
    keep_packed(held);
    each_held<Team>(width, [&](int k, int) {
        for (int i = 0; i < N; i++) total += exp(to_acc(held[k][i]) - highest);
    });
    A factor = A(1) / Team::sum(total);
    keep_packed(held);
    each_held<Team>(width, [&](int k, int j) {
        for (int i = 0; i < N; i++) held[k][i] = from_acc<T>(exp(to_acc(held[k][i]) - highest) * factor);
        store16(y + row * width + j, held[k]);
    });
}

extern "C" __global__ void forward_warps(const T* x, T* y, int64 rows, int64 width, int vectors) {
    forward<Warp>(x, y, rows, width);
}

extern "C" __global__ void forward_blocks(const T* x, T* y, int64 rows, int64 width, int vectors) {
    forward<Block>(x, y, rows, width);
}

extern "C" __global__ void forward_any(const T* x, T* y, int64 rows, int64 width, int vectors) {
    int64 start = blockIdx.x * width;
    Exponentials all;
    each_in_row(start, width, vectors, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        all.add(load<W>(x + start + j));
    });
    all.join();
    A factor = A(1) / all.total;
    each_in_row(start, width, vectors, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        Pack<T, W> pack = load<W>(x + start + j);
        for (int k = 0; k < W; k++) pack[k] = from_acc<T>(exp(to_acc(pack[k]) - all.highest) * factor);
        store<W>(y + start + j, pack);
    });
}

template <class Team>
__device__ __forceinline__ void backward(const T* dy, const T* y, T* dx, int64 rows, int width) {
    int64 row = Team::row();
    if (row >= rows) return;
    Vector<T> upper[HELD], held[HELD];
    load_held<Team>(upper, dy + row * width, width);
    load_held<Team>(held, y + row * width, width);
    A dot = 0;
    each_held<Team>(width, [&](int k, int) {
        for (int i = 0; i < N; i++) dot += to_acc(upper[k][i]) * to_acc(held[k][i]);
    });
    dot = Team::sum(dot);
    keep_packed(upper);
    keep_packed(held);
    each_held<Team>(width, [&](int k, int j) {
        for (int i = 0; i < N; i++) held[k][i] = from_acc<T>(to_acc(held[k][i]) * (to_acc(upper[k][i]) - dot));
        store16(dx + row * width + j, held[k]);
    });
}

extern "C" __global__ void backward_warps(const T* dy, const T* y, T* dx, int64 rows, int64 width, int vectors) {
    backward<Warp>(dy, y, dx, rows, width);
}

extern "C" __global__ void backward_blocks(const T* dy, const T* y, T* dx, int64 rows, int64 width, int vectors) {
    backward<Block>(dy, y, dx, rows, width);
}

extern "C" __global__ void backward_any(const T* dy, const T* y, T* dx, int64 rows, int64 width, int vectors) {
    int64 start = blockIdx.x * width;
    A dot = 0;
    each_in_row(start, width, vectors, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        Pack<T, W> upper = load<W>(dy + start + j), pack = load<W>(y + start + j);
        for (int k = 0; k < W; k++) dot += to_acc(upper[k]) * to_acc(pack[k]);
    });
    dot = Block::sum(dot);
    each_in_row(start, width, vectors, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        Pack<T, W> upper = load<W>(dy + start + j), pack = load<W>(y + start + j);
        for (int k = 0; k < W; k++) pack[k] = from_acc<T>(to_acc(pack[k]) * (to_acc(upper[k]) - dot));
        store<W>(dx + start + j, pack);
    });
}
