// Rotary position embedding (Su et al., 2021) in the half-split order, on packed rows. A block has a row; 16 bytes per
// thread and turn where the halves of a head allow it.
#include "ranges.cuh"

constexpr int N = Vector<T>::width;

// Element i of a head pairs with i + half. sign: 1 turns by the angles, -1 back, which is backward. y may be x.
template <int W>
__device__ __forceinline__ void turn(const T* x, const A* cos, const A* sin, T* y, int width, int heads, int half,
                                     A sign) {
    int pairs = heads * half / W, vectors = pairs + (width - 2 * heads * half) / W;
    for (int j = threadIdx.x; j < vectors; j += blockDim.x) {
        if (j >= pairs) {  // beyond the heads that turn
            int at = 2 * heads * half + (j - pairs) * W;
            store<W>(y + at, load<W>(x + at));
            continue;
        }
        int head = j * W / half, i = j * W - head * half, at = 2 * head * half + i;
        Pack<T, W> first = load<W>(x + at), second = load<W>(x + at + half);
        Pack<A, W> c = load<W>(cos + i), s = load<W>(sin + i);
#pragma unroll
        for (int k = 0; k < W; k++) {
            A a = to_acc(first[k]), b = to_acc(second[k]), turned = sign * s[k];
            first[k] = from_acc<T>(a * c[k] - b * turned);
            second[k] = from_acc<T>(b * c[k] + a * turned);
        }
        store<W>(y + at, first);
        store<W>(y + at + half, second);
    }
}

extern "C" __global__ void rotate(const T* x, const A* cos, const A* sin, T* y, int64 time, int width, int heads,
                                  int half, A sign, int vectors) {
    int64 row = blockIdx.x, position = row % time;
    x += row * width, y += row * width;
    cos += position * half, sin += position * half;
    if (vectors)
        turn<N>(x, cos, sin, y, width, heads, half, sign);
    else
        turn<1>(x, cos, sin, y, width, heads, half, sign);
}
