// Pooling of planes (planes, height, width): a thread has an output in forward and a pixel in backward, which
// looks at the windows that it is in. So nothing is added to by two threads.
#include "common.cuh"

// The first and one past the last output whose window holds pixel `at`.
__device__ __forceinline__ int first_window(int at, int window, int stride, int padding) {
    int reach = at + padding - window + 1;
    return reach > 0 ? (reach + stride - 1) / stride : 0;
}
__device__ __forceinline__ int end_of_windows(int at, int outputs, int stride, int padding) {
    return min(outputs, (at + padding) / stride + 1);
}
__device__ __forceinline__ int64 first_of_grid() { return blockIdx.x * (int64)blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64 grid_stride() { return gridDim.x * (int64)blockDim.x; }

extern "C" __global__ void max_forward(const T* x, T* y, int* index, int64 planes, int height, int width, int tall,
                                       int wide, int window_h, int window_w, int stride_h, int stride_w,
                                       int padding_h, int padding_w) {
    int64 count = planes * tall * wide;
    for (int64 i = first_of_grid(); i < count; i += grid_stride()) {
        int left = i % wide * stride_w - padding_w, top = i / wide % tall * stride_h - padding_h;
        const T* plane = x + i / wide / tall * height * width;
        int right = min(width, left + window_w), bottom = min(height, top + window_h);
        left = max(left, 0), top = max(top, 0);
        int where = top * width + left;
        A best = to_acc(plane[where]);
        for (int h = top; h < bottom; h++)
            for (int w = left; w < right; w++) {
                A value = to_acc(plane[h * width + w]);
                if (value > best || (value != value && best == best)) best = value, where = h * width + w;
            }
        y[i] = from_acc<T>(best);
        index[i] = where;
    }
}

extern "C" __global__ void max_backward(const T* dy, const int* index, T* dx, int64 planes, int height, int width,
                                        int tall, int wide, int window_h, int window_w, int stride_h, int stride_w,
                                        int padding_h, int padding_w) {
    int64 count = planes * height * width;
    for (int64 i = first_of_grid(); i < count; i += grid_stride()) {
        int w = i % width, h = i / width % height;
        int64 plane = i / width / height * tall * wide;
        int bottom = end_of_windows(h, tall, stride_h, padding_h), right = end_of_windows(w, wide, stride_w, padding_w);
        A total = 0;
        for (int k = first_window(h, window_h, stride_h, padding_h); k < bottom; k++)
            for (int j = first_window(w, window_w, stride_w, padding_w); j < right; j++) {
                int64 at = plane + k * wide + j;
                if (index[at] == h * width + w) total += to_acc(dy[at]);
            }
        dx[i] = from_acc<T>(total);
    }
}

extern "C" __global__ void mean_forward(const T* x, T* y, int64 planes, int height, int width, int tall, int wide,
                                        int window_h, int window_w, int stride_h, int stride_w, int padding_h,
                                        int padding_w) {
    int64 count = planes * tall * wide;
    for (int64 i = first_of_grid(); i < count; i += grid_stride()) {
        int left = i % wide * stride_w - padding_w, top = i / wide % tall * stride_h - padding_h;
        const T* plane = x + i / wide / tall * height * width;
        int right = min(width, left + window_w), bottom = min(height, top + window_h);
        A total = 0;
        for (int h = max(top, 0); h < bottom; h++)
            for (int w = max(left, 0); w < right; w++) total += to_acc(plane[h * width + w]);
        y[i] = from_acc<T>(total / A(window_h * window_w));
    }
}

extern "C" __global__ void mean_backward(const T* dy, T* dx, int64 planes, int height, int width, int tall, int wide,
                                         int window_h, int window_w, int stride_h, int stride_w, int padding_h,
                                         int padding_w) {
    int64 count = planes * height * width;
    for (int64 i = first_of_grid(); i < count; i += grid_stride()) {
        int w = i % width, h = i / width % height;
        int64 plane = i / width / height * tall * wide;
        int bottom = end_of_windows(h, tall, stride_h, padding_h), right = end_of_windows(w, wide, stride_w, padding_w);
        A total = 0;
        for (int k = first_window(h, window_h, stride_h, padding_h); k < bottom; k++)
            for (int j = first_window(w, window_w, stride_w, padding_w); j < right; j++)
                total += to_acc(dy[plane + k * wide + j]);
        dx[i] = from_acc<T>(total / A(window_h * window_w));
    }
}
