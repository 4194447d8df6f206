// The part of cuBLAS that kernels/cuda/_cublas_grouped.py calls, on the CPU. It refuses what cuBLAS refuses by its
// documentation and cublas_api.h of 13.10: 7 is an invalid value, 15 not supported, 1 no handle of this GPU.
// Arrays of sizes are read in the call, as they are the host's; arrays of addresses later, in the stream.
#include <stdlib.h>

#include "fake_numbers.h"

enum { OK = 0, NOT_INITIALIZED = 1, INVALID = 7, MAPPING = 11, NOT_SUPPORTED = 15 };
typedef struct { int64_t calls, groups, stream, workspace, faults; } Record;
typedef struct { int64_t stream, workspace, workspace_size; int math; } Handle;

Record fake_record;        // faults: products whose addresses were not aligned; their results are NaN
int fake_unsupported;      // a type of elements that this GPU has no products of, unless 0
int (*fake_device)(void);  // the current GPU; unset, there is one
int (*fake_in_gpu)(int64_t address, int64_t size);  // whether these bytes are the GPU's; unset, nothing is asked
// Where work waits for its turn in a stream, with a status; unset, it is done at once.
int (*fake_enqueue)(int64_t stream, void (*run)(const void*), const void* job);
static Handle handles[16];  // by the GPU that was current when they were made

static Handle* current(void) { return &handles[fake_device ? fake_device() : 0]; }
const char* cublasGetStatusString(int status) { return status == INVALID ? "invalid value" : "not supported"; }
int cublasCreate_v2(void** out) { *out = current(); return OK; }
int cublasSetStream_v2(Handle* handle, int64_t stream) {
    if (handle != current()) return NOT_INITIALIZED;
    handle->stream = stream;
    handle->workspace = handle->workspace_size = 0;  // its own again
    return OK;
}
int cublasSetWorkspace_v2(Handle* handle, int64_t place, size_t size) {
    if (handle != current()) return NOT_INITIALIZED;
    if (place % 256) return INVALID;
    handle->workspace = place, handle->workspace_size = size;
    return OK;
}
int cublasSetMathMode(Handle* handle, int mode) {
    if (handle != current()) return NOT_INITIALIZED;
    handle->math = mode;
    return mode & ~(1 | 2 | 3 | 16) ? INVALID : OK;
}

static int size_of(int type) { return type == F64 ? 8 : type == F32 ? 4 : 2; }

// A group of one product or more, and a call with all that was on the host.
typedef struct { int ta, tb, m, n, k, lda, ldb, ldc, size; double alpha, beta; } Group;
typedef struct { void **a, **b, **c; int type, compute, rounded, count; Group groups[]; } Job;

// "If k times the size is a multiple of 16 (of 4), pointers must be, too": of 16 bits, and of TF32.
static int aligned(const Job* job, const Group* g, const void* pointer) {
    uint64_t bytes = (uint64_t)g->k * size_of(job->type), place = (uintptr_t)pointer;
    if (size_of(job->type) > 2 && job->compute != 77) return 1;
    return !(bytes % 16 == 0 && place % 16) && !(bytes % 4 == 0 && place % 4);
}
static void product(const Job* job, const Group* g, const void* a, const void* b, void* c) {
    int type = job->type, fault = !aligned(job, g, a) || !aligned(job, g, b) || !aligned(job, g, c);
    fake_record.faults += fault;
    for (int64_t j = 0; j < g->n; j++)
        for (int64_t i = 0; i < g->m; i++) {
            double sum = 0;
            for (int64_t l = 0; l < g->k; l++) {
                double x = get(a, g->ta ? l + i * g->lda : i + l * g->lda, type);
                sum += x * get(b, g->tb ? j + l * g->ldb : l + j * g->ldb, type);
                if (job->rounded && l == g->k / 2) {  // a part of the sum goes through 16 bits
                    uint16_t part;
                    put(&part, 0, type, sum);
                    sum = get(&part, 0, type);
                }
            }
            sum *= g->alpha;
            if (g->beta) sum += g->beta * get(c, i + j * g->ldc, type);
            put(c, i + j * g->ldc, type, fault ? 0.0 / 0.0 : sum);
        }
}
static void run(const void* given) {
    const Job* job = given;
    int64_t at = 0;
    for (int i = 0; i < job->count; i++)
        for (int j = 0; j < job->groups[i].size; j++, at++)
            product(job, &job->groups[i], job->a[at], job->b[at], job->c[at]);
}
static int most(int x, int y) { return x > y ? x : y; }
static int supported(int a, int b, int c, int compute) {
    if (a != b || a != c || a == fake_unsupported) return 0;
    if (compute == 68) return a == F32 || a == F16 || a == BF16;
    return compute == 70 || compute == 71 ? a == F64 : (compute == 69 || compute == 77) && a == F32;
}
int cublasGemmGroupedBatchedEx(Handle* handle, const int* ta, const int* tb, const int* m, const int* n, const int* k,
                               const void* alpha, void** a, int a_type, const int* lda, void** b, int b_type,
                               const int* ldb, const void* beta, void** c, int c_type, const int* ldc, int count,
                               const int* size, int compute) {
    if (handle != current()) return NOT_INITIALIZED;
    if (!ta || !tb || !m || !n || !k || !alpha || !lda || !ldb || !beta || !ldc || !size || count < 0) return INVALID;
    if (!supported(a_type, b_type, c_type, compute)) return NOT_SUPPORTED;
    const void* of_host[] = {ta, tb, m, n, k, alpha, lda, ldb, beta, ldc, size};
    for (int i = 0; fake_in_gpu && i < 11; i++)
        if (fake_in_gpu((int64_t)of_host[i], count * 4)) return MAPPING;  // the host would fault
    int64_t products = 0;
    Job* job = malloc(sizeof *job + count * sizeof(Group));
    for (int i = 0; i < count; i++) {
        Group g = {ta[i], tb[i], m[i], n[i], k[i], lda[i], ldb[i], ldc[i], size[i]};
        int scale = a_type == F64 ? F64 : F32, wrong = g.ta < 0 || g.ta > 2 || g.tb < 0 || g.tb > 2;
        g.alpha = get(alpha, i, scale), g.beta = get(beta, i, scale);
        wrong |= g.m < 0 || g.n < 0 || g.k < 0 || g.size < 0 || g.lda < most(1, g.ta ? g.k : g.m);
        if (wrong || g.ldb < most(1, g.tb ? g.n : g.k) || g.ldc < most(1, g.m)) return INVALID;
        job->groups[i] = g;
        products += g.size;
    }
    const void* of_gpu[] = {a, b, c};
    for (int i = 0; fake_in_gpu && i < 3; i++)
        if (!fake_in_gpu((int64_t)of_gpu[i], products * 8)) return MAPPING;  // a kernel would fault
    job->a = a, job->b = b, job->c = c, job->type = a_type, job->compute = compute, job->count = count;
    job->rounded = size_of(a_type) == 2 && !(handle->math & 16);
    fake_record = (Record){fake_record.calls + 1, count, handle->stream, handle->workspace, fake_record.faults};
    if (fake_enqueue) return fake_enqueue(handle->stream, run, job);  // a graph may run it again and again: it stays
    run(job);
    free(job);
    return OK;
}
