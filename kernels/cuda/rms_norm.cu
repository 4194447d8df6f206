// RMS norm over rows; the kernels' forms are those of rows.cuh, their bodies are in norm.cuh.
#include "norm.cuh"

extern "C" __global__ void forward_warps(const T* x, const T* added, T* total, const T* weight, T* y, A* rstd,
                                         int64 rows, int64 width, A eps, int vectors) {
    forward_held<Warp, false>(x, added, total, weight, nullptr, y, nullptr, rstd, rows, width, eps);
}

extern "C" __global__ void forward_blocks(const T* x, const T* added, T* total, const T* weight, T* y, A* rstd,
                                          int64 rows, int64 width, A eps, int vectors) {
    forward_held<Block, false>(x, added, total, weight, nullptr, y, nullptr, rstd, rows, width, eps);
}

extern "C" __global__ void forward_any(const T* x, const T* added, T* total, const T* weight, T* y, A* rstd, int64 rows,
                                       int64 width, A eps, int vectors) {
    forward_read_again<false>(x, added, total, weight, nullptr, y, nullptr, rstd, width, eps, vectors);
}

extern "C" __global__ void backward_1(const T* dy, const T* x, const T* weight, const A* rstd, const T* dtotal, T* dx,
                                      A* dweights, int64 rows, int64 width, int each, int vectors) {
    backward_held<false, 1>(dy, x, weight, nullptr, rstd, dtotal, dx, dweights, nullptr, rows, width, each);
}

extern "C" __global__ void backward_2(const T* dy, const T* x, const T* weight, const A* rstd, const T* dtotal, T* dx,
                                      A* dweights, int64 rows, int64 width, int each, int vectors) {
    backward_held<false, 2>(dy, x, weight, nullptr, rstd, dtotal, dx, dweights, nullptr, rows, width, each);
}

extern "C" __global__ void backward_any(const T* dy, const T* x, const T* weight, const A* rstd, const T* dtotal, T* dx,
                                        A* dweights, int64 rows, int64 width, int each, int vectors) {
    backward_read_again<false>(dy, x, weight, nullptr, rstd, dtotal, dx, dweights, nullptr, rows, width, each, vectors);
}
