// Kernels with a known mistake each, and with -DMENDED without it: what the checker of races is tested with.
//
// Lines of the two accesses that nothing orders end in "first" and "second"; "only" is the one of another mistake.
// What CUDA leaves undefined ends a launch: with "error: ".
#ifdef MENDED
#define IF_MENDED(x) x
#define BROKEN_ELSE_MENDED(broken, mended) mended
#else
#define IF_MENDED(x)
#define BROKEN_ELSE_MENDED(broken, mended) broken
#endif
#define OWN (blockIdx.x * 64 + threadIdx.x)
constexpr unsigned ALL = 0xffffffffu;

extern "C" __global__ void missing_barrier(int* out, int count) {
    __shared__ int kept[64];
    int i = threadIdx.x;
    kept[i] = i;  // first
    IF_MENDED(__syncthreads());
    out[OWN] = kept[63 - i];  // second
}

extern "C" __global__ void missing_warp_barrier(int* out, int count) {
    __shared__ int kept[64];
    int i = threadIdx.x;
    kept[i] = i;  // first
    IF_MENDED(__syncwarp());
    out[OWN] = kept[i ^ 1];  // second
}

extern "C" __global__ void warp_barrier_for_a_block(int* out, int count) {
    __shared__ int kept[64];
    int i = threadIdx.x;
    kept[i] = i;  // first
    BROKEN_ELSE_MENDED(__syncwarp(), __syncthreads());
    out[OWN] = kept[i ^ 32];  // second
}

extern "C" __global__ void shuffles_and_votes_order_nothing(int* out, int count) {
    __shared__ int kept[64];
    int i = threadIdx.x;
    kept[i] = i;  // first
    int other = __shfl_xor_sync(ALL, i, 1), equal = __match_any_sync(ALL, 1u);
    IF_MENDED(__syncwarp());
    out[OWN] = kept[other] + equal;  // second
}

extern "C" __global__ void barrier_of_half_a_warp(int* out, int count) {
    __shared__ int kept[64];
    int i = threadIdx.x;
    kept[i] = i;  // first
    __syncwarp(i % 32 < 16 ? 0xffffu : 0xffff0000u);
    out[OWN] = kept[BROKEN_ELSE_MENDED(i ^ 16, i ^ 15)];  // second
}

extern "C" __global__ void barrier_not_of_the_last_warp(int* out, int count) {  // of which a part has elements
    __shared__ int kept[64];
    int i = threadIdx.x, warp = i / 32;
    bool there = i < count;
    if (there) kept[i] = i;  // first
    if (BROKEN_ELSE_MENDED((warp + 1) * 32 <= count, true)) __syncwarp();
    if (there) out[OWN] = kept[i % 2 || i + 1 == count ? i : i + 1];  // second
}

extern "C" __global__ void written_again_while_others_read(int* out, int count) {  // one barrier wants two buffers
    __shared__ int kept[2][64];
    int i = threadIdx.x, sum = 0;
    for (int turn = 0; turn < 5; turn++) {
        int* now = kept[BROKEN_ELSE_MENDED(0, turn % 2)];
        now[i] = turn;  // second
        __syncthreads();
        sum += now[i ^ 32];  // first
    }
    out[OWN] = sum;
}

extern "C" __global__ void shared_is_used_again(int* out, int count) {
    __shared__ int kept[64];
    int i = threadIdx.x;
    kept[i] = i;
    __syncthreads();
    int other = kept[63 - i];  // first
    IF_MENDED(__syncthreads());
    kept[i] = 2 * i;  // second
    __syncthreads();
    out[OWN] = other + kept[63 - i];
}

extern "C" __global__ void global_memory_of_a_block(int* out, int count) {
    out[OWN] = 1;  // first
    IF_MENDED(__syncthreads());
    out[128 + OWN] = out[OWN ^ 1];  // second
}

extern "C" __global__ void written_by_two_blocks(int* out, int count) {
    if (threadIdx.x == 0) out[BROKEN_ELSE_MENDED(0, blockIdx.x)] = 1;  // first second
}

extern "C" __global__ void read_by_another_block(int* out, int count) {
    int i = threadIdx.x;
    __syncthreads();
    if (blockIdx.x == 0) out[i] = i;  // first
    __syncthreads();
    if (blockIdx.x == BROKEN_ELSE_MENDED(1, 0)) out[64 + i] = out[i];  // second
}

extern "C" __global__ void written_where_another_block_read(int* out, int count) {
    int i = threadIdx.x;
    if (blockIdx.x == 0) out[64 + i] = out[i];  // first
    if (blockIdx.x == 1) out[BROKEN_ELSE_MENDED(i, 128 + i)] = i;  // second
}

extern "C" __global__ void counted_without_atomics(int* out, int count) {
    BROKEN_ELSE_MENDED(out[0]++, atomicAdd(out, 1));  // first second
}

extern "C" __global__ void atomics_and_a_plain_read(int* out, int count) {
    __shared__ int total;
    int i = threadIdx.x;
    if (i == 0) total = 0;
    __syncthreads();
    atomicAdd(&total, 1);  // first
    IF_MENDED(__syncthreads());
    out[OWN] = total;  // second
}

// Neighbours in one word: bytes and halves of their own are no race.
extern "C" __global__ void bytes_of_a_word(int* out, int count) {
    unsigned char* bytes = reinterpret_cast<unsigned char*>(out);
    bytes[BROKEN_ELSE_MENDED(threadIdx.x / 2, threadIdx.x) + blockIdx.x * 64] = 1;  // first second
}

extern "C" __global__ void a_word_over_bytes(int* out, int count) {
    __shared__ unsigned char bytes[256];
    int i = threadIdx.x;
    bytes[4 * i + 2] = 1;  // first
    IF_MENDED(__syncthreads());
    reinterpret_cast<int*>(bytes)[63 - i] = 0;  // second
    out[OWN] = 0;
}

// The last block adds up what all have written. out: parts, then the ticket, then the sum.
template <class Before, class Behind> inline void sum_of_blocks(int* out, int blocks, Before before, Behind behind) {
    __shared__ bool last;
    int i = threadIdx.x;
    out[blockIdx.x * 64 + i] = 1;  // first
    before();
    __syncthreads();
    if (i == 0) {
        before();
        last = atomicAdd(&out[blocks * 64], 1) == blocks - 1;
    }
    __syncthreads();
    if (!last) return;
    behind();
    int sum = 0;
    for (int block = 0; block < blocks; block++) sum += out[block * 64 + i];  // second
    atomicAdd(&out[blocks * 64 + 1], sum);
}

extern "C" __global__ void last_block_without_the_fence_before(int* out, int count) {
    sum_of_blocks(out, gridDim.x, [] { IF_MENDED(__threadfence()); }, [] { __threadfence(); });
}

extern "C" __global__ void last_block_without_the_fence_behind(int* out, int count) {
    sum_of_blocks(out, gridDim.x, [] { __threadfence(); }, [] { IF_MENDED(__threadfence()); });
}

extern "C" __global__ void last_block_by_one_fence_of_one_thread(int* out, int count) {  // behind the barrier
    sum_of_blocks(out, gridDim.x, [] { if (BROKEN_ELSE_MENDED(false, threadIdx.x == 0)) __threadfence(); },
                  [] { __threadfence(); });
}

extern "C" __global__ void fence_of_one_thread_for_all(int* out, int count) {  // before the barrier: for what it wrote
    __shared__ bool last;
    int i = threadIdx.x;
    out[blockIdx.x * 64 + i] = 1;  // first
    IF_MENDED(__syncthreads());
    if (i == 0) {
        __threadfence();
        last = atomicAdd(&out[gridDim.x * 64], 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (last) out[gridDim.x * 64 + 1 + i] = out[i];  // second
}

extern "C" __global__ void read_before_it_was_written(int* out, int count) {
    __shared__ int kept[64];
    int i = threadIdx.x;
    if (i < BROKEN_ELSE_MENDED(63, 64)) kept[i] = i;
    __syncthreads();
    out[OWN] = kept[63 - i];  // only
}

extern "C" __global__ void shared_of_the_block_before(int* out, int count) {
    __shared__ int kept[64];
    int i = threadIdx.x;
    if (blockIdx.x < BROKEN_ELSE_MENDED(1, 2)) kept[i] = i;
    out[OWN] = kept[i];  // only
}

extern "C" __global__ void beyond_shared_memory(int* out, int count) {
    __shared__ int kept[64];
    int i = threadIdx.x;
    kept[i < 63 ? i : BROKEN_ELSE_MENDED(64, 63)] = i;  // only
    out[OWN] = i < 63 ? kept[i] : 0;
}

extern "C" __global__ void beyond_dynamic_shared_memory(int* out, int count) {
    DYNAMIC_SHARED(int, kept);
    int i = threadIdx.x;
    kept[i + BROKEN_ELSE_MENDED(1, 0)] = i;  // only
    out[OWN] = i;
}

extern "C" __global__ void beyond_an_array(int* out, int count) {
    out[OWN] = out[OWN * BROKEN_ELSE_MENDED(count, 1)];  // only
}

extern "C" __global__ void barrier_of_two_lines(int* out, int count) {
    if (BROKEN_ELSE_MENDED(threadIdx.x, blockIdx.x) < 32) __syncthreads();  // error: a barrier of two lines
    else
        __syncthreads();
}

extern "C" __global__ void barrier_that_some_do_not_reach(int* out, int count) {
    if (BROKEN_ELSE_MENDED(threadIdx.x, blockIdx.x) < 1) __syncthreads();  // error: threads wait that nobody releases
    __shfl_xor_sync(ALL, 0, 1);
}

// A thread that has ended is not waited for.
extern "C" __global__ void shuffle_with_a_lane_that_has_ended(int* out, int count) {
    int i = threadIdx.x;
    if (i == BROKEN_ELSE_MENDED(1, 64)) return;
    int other = __shfl_xor_sync(ALL, i, 1);  // error: lane 1 has ended or is not in the mask: thread 0 at __shfl_xor_sync
    __syncthreads();
    out[OWN] = other;
}

extern "C" __global__ void shuffle_with_a_lane_not_in_the_mask(int* out, int count) {
    int i = threadIdx.x;
    unsigned mask = i % 32 < 16 ? 0xffffu : 0xffff0000u;
    out[OWN] = __shfl_xor_sync(mask, i, BROKEN_ELSE_MENDED(16, 15));  // error: lane 16 has ended or is not in the mask
}

extern "C" __global__ void mask_without_the_lane_itself(int* out, int count) {
    int i = threadIdx.x;
    __syncwarp(BROKEN_ELSE_MENDED(1u << (i ^ 1) % 32, 1u << i % 32));  // error: a mask without the lane itself
}

extern "C" __global__ void shuffle_in_the_place_of_a_vote(int* out, int count) {
    int i = threadIdx.x;
    if (BROKEN_ELSE_MENDED(i, 0) % 2) __shfl_xor_sync(ALL, i, 2);
    else
        __ballot_sync(ALL, 1);  // error: threads wait that nobody releases
}
