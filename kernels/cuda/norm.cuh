// Layer norm and RMS norm, which is layer norm without the mean: forward and backward over rows.
//
// Backward's sums over rows come in two stages: a block sums some rows, in their order, to a row of partial sums
// (a thread keeps the sums of its columns); reduce.cu adds those. Nothing depends on which block is first.
#pragma once
#include "rows.cuh"

// y = (x - mean) * rstd * weight + bias; bias may be null. With `added`, total = x + added takes the place of x.
template <class Team, bool CENTRED>
__device__ __forceinline__ void forward_held(const T* x, const T* added, T* total, const T* weight, const T* bias,
                                             T* y, A* mean, A* rstd, int64 rows, int width, A eps) {
    int64 row = Team::row();
    if (row >= rows) return;
    Vector<T> held[HELD];
    load_held<Team>(held, x + row * width, width);
    if (added) {
        each_held<Team>(width, [&](int k, int j) {
            Vector<T> other = load16(added + row * width + j);
            for (int i = 0; i < N; i++) held[k][i] = from_acc<T>(to_acc(held[k][i]) + to_acc(other[i]));
            store16(total + row * width + j, held[k]);
        });
    }
    A centre = 0, squares = 0;
    if (CENTRED) {
        each_held<Team>(width, [&](int k, int) {
            for (int i = 0; i < N; i++) centre += to_acc(held[k][i]);
        });
        centre = Team::sum(centre) / A(width);
        keep_packed(held);
    }
    each_held<Team>(width, [&](int k, int) {
        for (int i = 0; i < N; i++) squares += (to_acc(held[k][i]) - centre) * (to_acc(held[k][i]) - centre);
    });
    A factor = A(1) / sqrt(Team::sum(squares) / A(width) + eps);
    keep_packed(held);
    each_held<Team>(width, [&](int k, int j) {
        Vector<T> scale = load16(weight + j), shift = {};
        if (bias) shift = load16(bias + j);
        for (int i = 0; i < N; i++) {
            A normal = (to_acc(held[k][i]) - centre) * factor;
            held[k][i] = from_acc<T>(normal * to_acc(scale[i]) + to_acc(shift[i]));
        }
        store16(y + row * width + j, held[k]);
    });
    if (Team::rank() > 0) return;
    if (CENTRED) mean[row] = centre;
    rstd[row] = factor;
}

template <bool CENTRED>
__device__ __forceinline__ void forward_read_again(const T* x, const T* added, T* total, const T* weight,
                                                   const T* bias, T* y, A* mean, A* rstd, int64 width, A eps,
                                                   bool vectors) {
    int64 start = blockIdx.x * width;
    A centre = 0, squares = 0;
    if (added) {
        each_in_row(start, width, vectors, [&](int64 j, auto many) {
            constexpr int W = decltype(many)::value;
            Pack<T, W> pack = load<W>(x + start + j), other = load<W>(added + start + j);
            for (int k = 0; k < W; k++) pack[k] = from_acc<T>(to_acc(pack[k]) + to_acc(other[k]));
            store<W>(total + start + j, pack);
        });
        x = total;  // below, a thread reads what it has written itself
    }
    if (CENTRED) {
        each_in_row(start, width, vectors, [&](int64 j, auto many) {
            constexpr int W = decltype(many)::value;
            Pack<T, W> pack = load<W>(x + start + j);
            for (int k = 0; k < W; k++) centre += to_acc(pack[k]);
        });
        centre = Block::sum(centre) / A(width);
    }
    each_in_row(start, width, vectors, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        Pack<T, W> pack = load<W>(x + start + j);
        for (int k = 0; k < W; k++) squares += (to_acc(pack[k]) - centre) * (to_acc(pack[k]) - centre);
    });
    A factor = A(1) / sqrt(Block::sum(squares) / A(width) + eps);
    each_in_row(start, width, vectors, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        Pack<T, W> pack = load<W>(x + start + j);
        for (int k = 0; k < W; k++) {  // a row need not begin as its weight does: one at a time
            A scaled = (to_acc(pack[k]) - centre) * factor * to_acc(weight[j + k]);
            pack[k] = from_acc<T>(bias ? scaled + to_acc(bias[j + k]) : scaled);
        }
        store<W>(y + start + j, pack);
    });
    if (threadIdx.x > 0) return;
    if (CENTRED) mean[blockIdx.x] = centre;
    rstd[blockIdx.x] = factor;
}

// The sums of COUNT numbers over the block. `shared`: its own in each of two successive calls, so that one barrier
// is enough: who writes it again has seen everybody past the call between.
template <int COUNT> __device__ __forceinline__ void block_sums(A* x, A (*shared)[WARP]) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = warp_sum(x[i]);
    if (warps == 1) return;
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) shared[i][warp] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = warp_sum(lane < warps ? shared[i][lane] : A(0));
}

// dx, and partial sums (blocks, width) of the gradients of weight and bias over `each` rows a block. A thread has V
// vectors of columns; SLOTS / V rows are loaded at once. Null where one is not wanted; `mean` is null if not CENTRED.
// `dtotal`, which may be null, is added to dx.
constexpr int SLOTS = 4;

template <bool CENTRED, int V>
__device__ __forceinline__ void backward_held(const T* dy, const T* x, const T* weight, const A* mean, const A* rstd,
                                              const T* dtotal, T* dx, A* dweights, A* dbiases, int64 rows, int width,
                                              int each) {
    constexpr int R = SLOTS / V, SUMS = CENTRED ? 2 * R : R;
    __shared__ A shared[2][SUMS][WARP];
    Pack<A, N> dweight[V] = {}, dbias[V] = {};
    int64 begin = blockIdx.x * (int64)each, end = min(begin + each, rows);
    int turn = 0;
    for (int64 first = begin; first < end; first += R, turn ^= 1) {
        Vector<T> upper[R][V] = {}, line[R][V] = {};  // zeros beyond the rows and the columns add nothing
        A centre[R] = {}, factor[R] = {}, sums[SUMS] = {};
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (first + r >= end) break;
            centre[r] = CENTRED ? mean[first + r] : A(0);
            factor[r] = rstd[first + r];
#pragma unroll
            for (int v = 0; v < V; v++) {
                int j = (v * blockDim.x + threadIdx.x) * N;
                if (j >= width) break;
                upper[r][v] = load16(dy + (first + r) * width + j);
                line[r][v] = load16(x + (first + r) * width + j);
            }
        }
#pragma unroll
        for (int v = 0; v < V; v++) {
            int j = (v * blockDim.x + threadIdx.x) * N;
            if (j >= width) break;
            Vector<T> scale = load16(weight + j);
#pragma unroll
            for (int r = 0; r < R; r++) {
#pragma unroll
                for (int i = 0; i < N; i++) {
                    A up = to_acc(upper[r][v][i]), normal = (to_acc(line[r][v][i]) - centre[r]) * factor[r];
                    A scaled = up * to_acc(scale[i]);
                    sums[r] += scaled * normal;
                    if (CENTRED) sums[R + r] += scaled;
                    dweight[v][i] += up * normal;
                    if (CENTRED) dbias[v][i] += up;
                }
            }
        }
        if (!dx) continue;
        block_sums<SUMS>(sums, shared[turn]);
        keep_packed<SLOTS>(upper[0]);
        keep_packed<SLOTS>(line[0]);
#pragma unroll
        for (int v = 0; v < V; v++) {
            int j = (v * blockDim.x + threadIdx.x) * N;
            if (j >= width) break;
            Vector<T> scale = load16(weight + j);
#pragma unroll
            for (int r = 0; r < R; r++) {
                if (first + r >= end) break;
                A along = sums[r] / A(width), level = CENTRED ? sums[R + r] / A(width) : A(0);
                Vector<T> beside = {};
                if (dtotal) beside = load16(dtotal + (first + r) * width + j);
#pragma unroll
                for (int i = 0; i < N; i++) {
                    A normal = (to_acc(line[r][v][i]) - centre[r]) * factor[r];
                    A scaled = to_acc(upper[r][v][i]) * to_acc(scale[i]);
                    A own = factor[r] * (scaled - level - normal * along);
                    line[r][v][i] = from_acc<T>(own + to_acc(beside[i]));
                }
                store16(dx + (first + r) * width + j, line[r][v]);
            }
        }
    }
#pragma unroll
    for (int v = 0; v < V; v++) {
        int j = (v * blockDim.x + threadIdx.x) * N;
        if (j >= width) break;
        if (dweights) store<N>(dweights + blockIdx.x * (int64)width + j, dweight[v]);
        if (CENTRED && dbiases) store<N>(dbiases + blockIdx.x * (int64)width + j, dbias[v]);
    }
}

// The same for any width: columns first, since dx may be dy, then rows.
template <bool CENTRED>
__device__ __forceinline__ void backward_read_again(const T* dy, const T* x, const T* weight, const A* mean,
                                                    const A* rstd, const T* dtotal, T* dx, A* dweights, A* dbiases,
                                                    int64 rows, int64 width, int each, bool vectors) {
    int64 begin = blockIdx.x * (int64)each, end = min(begin + each, rows);
    each_in_row(0, width, vectors && width % N == 0, [&](int64 j, auto many) {
        constexpr int W = decltype(many)::value;
        Pack<A, W> dweight = {}, dbias = {};
        for (int64 row = begin; row < end; row++) {
            Pack<T, W> upper = load<W>(dy + row * width + j), line = load<W>(x + row * width + j);
            for (int k = 0; k < W; k++) {
                dweight[k] += to_acc(upper[k]) * ((to_acc(line[k]) - (CENTRED ? mean[row] : A(0))) * rstd[row]);
                dbias[k] += to_acc(upper[k]);
            }
        }
        for (int k = 0; k < W; k++) {
            if (dweights) dweights[blockIdx.x * width + j + k] = dweight[k];
            if (CENTRED && dbiases) dbiases[blockIdx.x * width + j + k] = dbias[k];
        }
    });
    if (!dx) return;
    for (int64 row = begin; row < end; row++) {
        int64 start = row * width;
        A centre = CENTRED ? mean[row] : A(0), factor = rstd[row], along = 0, level = 0;
        each_in_row(start, width, vectors, [&](int64 j, auto many) {
            constexpr int W = decltype(many)::value;
            Pack<T, W> upper = load<W>(dy + start + j), line = load<W>(x + start + j);
            for (int k = 0; k < W; k++) {
                A scaled = to_acc(upper[k]) * to_acc(weight[j + k]);
                along += scaled * ((to_acc(line[k]) - centre) * factor);
                level += scaled;
            }
        });
        along = Block::sum(along) / A(width);  // and nobody writes a row before all have read it
        level = CENTRED ? Block::sum(level) / A(width) : A(0);
        each_in_row(start, width, vectors, [&](int64 j, auto many) {
            constexpr int W = decltype(many)::value;
            Pack<T, W> upper = load<W>(dy + start + j), line = load<W>(x + start + j), beside;
            if (dtotal) beside = load<W>(dtotal + start + j);
            for (int k = 0; k < W; k++) {
                A normal = (to_acc(line[k]) - centre) * factor;
                A own = factor * (to_acc(upper[k]) * to_acc(weight[j + k]) - level - normal * along);
                line[k] = from_acc<T>(dtotal ? own + to_acc(beside[k]) : own);
            }
            store<W>(dx + start + j, line);
        });
    }
}
