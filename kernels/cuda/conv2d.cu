// Convolution as products with the matrix of patches: it and its adjoint, and images of one group side by side.
//
// A group's patches of some images: (channels * rows * columns of the window, images * outputs of one image).
#include "common.cuh"

struct Window {  // of one axis: where tap t of output i lies in the input
    int stride, padding, dilation;
    __device__ __forceinline__ int64 at(int64 i, int t) const { return i * stride - padding + t * dilation; }
};

__device__ __forceinline__ int64 first_of_grid() { return blockIdx.x * (int64)blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64 grid_stride() { return gridDim.x * (int64)blockDim.x; }

// patches from x (images, all, height, width), of `channels` channels from `from` on.
extern "C" __global__ void im2col(const T* x, T* patches, int64 images, int all, int from, int channels, int height,
                                  int width, int rows, int columns, int tall, int wide, int stride_h, int stride_w,
                                  int padding_h, int padding_w, int dilation_h, int dilation_w) {
    Window down = {stride_h, padding_h, dilation_h}, across = {stride_w, padding_w, dilation_w};
    int64 pixels = images * tall * wide, count = pixels * channels * rows * columns;
    for (int64 i = first_of_grid(); i < count; i += grid_stride()) {
        int64 pixel = i % pixels, product = i / pixels;
        int j = product % columns, k = product / columns % rows, c = product / columns / rows;
        int64 image = pixel / wide / tall, h = down.at(pixel / wide % tall, k), w = across.at(pixel % wide, j);
        bool inside = h >= 0 && h < height && w >= 0 && w < width;
        patches[i] = inside ? x[((image * all + from + c) * height + h) * width + w] : from_acc<T>(A(0));
    }
}

// dx in the place of x from the gradient of the patches: each pixel adds up what the windows around it have for it.
extern "C" __global__ void col2im(const T* patches, T* dx, int64 images, int all, int from, int channels, int height,
                                  int width, int rows, int columns, int tall, int wide, int stride_h, int stride_w,
                                  int padding_h, int padding_w, int dilation_h, int dilation_w) {
    int64 pixels = images * tall * wide, count = images * channels * height * width;
    for (int64 i = first_of_grid(); i < count; i += grid_stride()) {
        int w = i % width, h = i / width % height, c = i / width / height % channels;
        int64 image = i / width / height / channels;
        A total = 0;
        for (int k = 0; k < rows; k++) {
            int up = h + padding_h - k * dilation_h;
            if (up < 0 || up % stride_h || up / stride_h >= tall) continue;
            for (int j = 0; j < columns; j++) {
                int left = w + padding_w - j * dilation_w;
                if (left < 0 || left % stride_w || left / stride_w >= wide) continue;
                int64 pixel = (image * tall + up / stride_h) * wide + left / stride_w;
                total += to_acc(patches[((c * (int64)rows + k) * columns + j) * pixels + pixel]);
            }
        }
        dx[((image * all + from + c) * height + h) * (int64)width + w] = from_acc<T>(total);
    }
}

// beside (channels, images * pixels) from planes (images, all, pixels), of `channels` channels from `from` on.
extern "C" __global__ void gather(const T* planes, T* beside, int64 images, int all, int from, int channels,
                                  int64 pixels) {
    int64 count = images * channels * pixels;
    for (int64 i = first_of_grid(); i < count; i += grid_stride()) {
        int64 pixel = i % pixels, image = i / pixels % images, c = i / pixels / images;
        beside[i] = planes[(image * all + from + c) * pixels + pixel];
    }
}

// The other way, plus bias, which may be null.
extern "C" __global__ void scatter(const T* beside, const T* bias, T* planes, int64 images, int all, int from,
                                   int channels, int64 pixels) {
    int64 count = images * channels * pixels;
    for (int64 i = first_of_grid(); i < count; i += grid_stride()) {
        int64 pixel = i % pixels, image = i / pixels % images, c = i / pixels / images;
        A value = to_acc(beside[i]) + (bias ? to_acc(bias[from + c]) : A(0));
        planes[(image * all + from + c) * pixels + pixel] = from_acc<T>(value);
    }
}

// y (images, channels, pixels) += bias, for a convolution that came without it.
extern "C" __global__ void add_bias(T* y, const T* bias, int64 count, int64 channels, int64 pixels) {
    for (int64 i = first_of_grid(); i < count; i += grid_stride())
        y[i] = from_acc<T>(to_acc(y[i]) + to_acc(bias[i / pixels % channels]));
}
