// The few elementwise passes that the runtime itself makes, on flat arrays: sixteen bytes per thread and turn.
#include "common.cuh"

constexpr int VECTOR = Vector<T>::width;

// Calls step(i, full) for the elements from i on, a vector of them if full, else one, over the whole array.
template <class Step> __device__ __forceinline__ void each(int64 count, bool vectors, Step step) {
    int64 first = blockIdx.x * (int64)blockDim.x + threadIdx.x, stride = gridDim.x * (int64)blockDim.x;
    int64 whole = vectors ? count / VECTOR * VECTOR : 0;
    for (int64 i = first * VECTOR; i < whole; i += stride * VECTOR) step(i, true);
    for (int64 i = whole + first; i < count; i += stride) step(i, false);
}

extern "C" __global__ void add(const T* first, const T* second, T* out, int64 count, int vectors) {
    each(count, vectors, [=](int64 i, bool full) {
        if (!full) {
            out[i] = from_acc<T>(to_acc(first[i]) + to_acc(second[i]));
            return;
        }
        Vector<T> a = load16(first + i), b = load16(second + i);
        for (int k = 0; k < VECTOR; k++) a[k] = from_acc<T>(to_acc(a[k]) + to_acc(b[k]));
        store16(out + i, a);
    });
}

extern "C" __global__ void scale(T* x, A factor, int64 count, int vectors) {
    each(count, vectors, [=](int64 i, bool full) {
        if (!full) {
            x[i] = from_acc<T>(to_acc(x[i]) * factor);
            return;
        }
        Vector<T> a = load16(x + i);
        for (int k = 0; k < VECTOR; k++) a[k] = from_acc<T>(to_acc(a[k]) * factor);
        store16(x + i, a);
    });
}

// As scale, by a number that the host need not know; there is nothing to do where it is 1.
extern "C" __global__ void scale_by(T* x, const double* factor, int64 count, int vectors) {
    A by = A(*factor);
    if (by == A(1)) return;
    each(count, vectors, [=](int64 i, bool full) {
        if (!full) {
            x[i] = from_acc<T>(to_acc(x[i]) * by);
            return;
        }
        Vector<T> a = load16(x + i);
        for (int k = 0; k < VECTOR; k++) a[k] = from_acc<T>(to_acc(a[k]) * by);
        store16(x + i, a);
    });
}

// *wrong becomes 1 if an element is infinite or not a number.
extern "C" __global__ void unscale(T* x, A factor, int* wrong, int64 count, int vectors) {
    bool found = false;
    each(count, vectors, [&](int64 i, bool full) {
        if (!full) {
            A value = to_acc(x[i]);
            found |= !(value - value == A(0));
            x[i] = from_acc<T>(value * factor);
            return;
        }
        Vector<T> a = load16(x + i);
        for (int k = 0; k < VECTOR; k++) {
            A value = to_acc(a[k]);
            found |= !(value - value == A(0));
            a[k] = from_acc<T>(value * factor);
        }
        store16(x + i, a);
    });
    if (found) *wrong = 1;  // whoever writes, writes the same
}

extern "C" __global__ void clamp(T* x, A limit, int64 count, int vectors) {
    each(count, vectors, [=](int64 i, bool full) {
        int width = full ? VECTOR : 1;
        for (int k = 0; k < width; k++) {
            A value = to_acc(x[i + k]);
            value = value > limit ? limit : value;  // a comparison with nan is false: nan stays
            x[i + k] = from_acc<T>(value < -limit ? -limit : value);
        }
    });
}
