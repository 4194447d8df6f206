// Layer norm over rows; the kernels' forms are those of rows.cuh, their bodies are in norm.cuh.
#include "norm.cuh"

extern "C" __global__ void forward_warps(const T* x, const T* added, T* total, const T* weight, const T* bias, T* y,
                                         A* mean, A* rstd, int64 rows, int64 width, A eps, int vectors) {
    forward_held<Warp, true>(x, added, total, weight, bias, y, mean, rstd, rows, width, eps);
}

extern "C" __global__ void forward_blocks(const T* x, const T* added, T* total, const T* weight, const T* bias, T* y,
                                          A* mean, A* rstd, int64 rows, int64 width, A eps, int vectors) {
    forward_held<Block, true>(x, added, total, weight, bias, y, mean, rstd, rows, width, eps);
}

extern "C" __global__ void forward_any(const T* x, const T* added, T* total, const T* weight, const T* bias, T* y,
                                       A* mean, A* rstd, int64 rows, int64 width, A eps, int vectors) {
    forward_read_again<true>(x, added, total, weight, bias, y, mean, rstd, width, eps, vectors);
}

extern "C" __global__ void backward_1(const T* dy, const T* x, const T* weight, const A* mean, const A* rstd,
                                      const T* dtotal, T* dx, A* dweights, A* dbiases, int64 rows, int64 width,
                                      int each, int vectors) {
    backward_held<true, 1>(dy, x, weight, mean, rstd, dtotal, dx, dweights, dbiases, rows, width, each);
}

extern "C" __global__ void backward_2(const T* dy, const T* x, const T* weight, const A* mean, const A* rstd,
                                      const T* dtotal, T* dx, A* dweights, A* dbiases, int64 rows, int64 width,
                                      int each, int vectors) {
    backward_held<true, 2>(dy, x, weight, mean, rstd, dtotal, dx, dweights, dbiases, rows, width, each);
}

extern "C" __global__ void backward_any(const T* dy, const T* x, const T* weight, const A* mean, const A* rstd,
                                        const T* dtotal, T* dx, A* dweights, A* dbiases, int64 rows, int64 width,
                                        int each, int vectors) {
    backward_read_again<true>(dy, x, weight, mean, rstd, dtotal, dx, dweights, dbiases, rows, width, each, vectors);
}
