// The part of cublasLt that kernels/cuda/_cublaslt_plan.py calls, on the CPU: every argument is checked as the real
// library would, then the product is made by three loops. A status other than 0 tells what was wrong: 7 is an invalid
// value, 15 not supported. What is refused is what cublasLt.h of cuBLAS 13 demands.
#include <stdlib.h>

#include "fake_numbers.h"

enum { PLAIN = 1, BIAS = 4, GELU_AUX = 160, GELU_AUX_BIAS = 164, DGELU = 192, BGRADB = 512 };
// bias: a bias, or where sums go. inner: "aux", what goes into GELU.
typedef struct { int32_t compute, scale, transpose[2]; uint32_t epilogue; void* bias; int32_t bias_type; void* inner; int64_t leading; const float* scales[2]; int8_t fast; } Product;
typedef struct { int32_t type, batch; uint64_t rows, columns; int64_t leading, stride; } Layout;
typedef struct { uint64_t workspace; uint32_t reduction, alignment[4]; } Preference;
typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } Heuristic;
typedef struct { int64_t products, algorithm, workspace, stream, beta_is_one, fast; } Record;

Record fake_record;
int fake_proposals = 3;  // algorithms: number 100, which is not usable, 101, ...
int64_t fake_unable;     // the number of one that can't compute what it was proposed for, as is seen when it should
int64_t fake_destroyed;  // descriptors
int (*fake_device)(void);  // the current GPU; unset, there is one
static int handles[16];    // by the GPU that was current when they were made
static void* handle(void) { return &handles[fake_device ? fake_device() : 0]; }

const char* cublasLtGetStatusString(int status) { return status == 7 ? "invalid value" : "not supported"; }
size_t cublasLtGetVersion(void) { return 131000; }
int cublasLtCreate(void** out) { *out = handle(); return 0; }
int cublasLtMatmulDescCreate(void** out, int compute, int scale) {
    Product product = {compute, scale, {0, 0}, 1, 0, -1, 0, 0, {0, 0}, 0};
    *out = malloc(sizeof product);
    memcpy(*out, &product, sizeof product);
    return (compute == 68 && scale == F32) || (compute == 70 && scale == F64) ? 0 : 15;
}
int cublasLtMatmulDescSetAttribute(Product* product, int name, const void* value, size_t size) {
    if (name == 3 || name == 4) { if (size != 4) return 7; memcpy(&product->transpose[name - 3], value, 4); return 0; }
    if (name == 7) { if (size != 4) return 7; memcpy(&product->epilogue, value, 4); return 0; }
    if (name == 8) { if (size != 8) return 7; memcpy(&product->bias, value, 8); return 0; }
    if (name == 11) { if (size != 8) return 7; memcpy(&product->inner, value, 8); return 0; }
    if (name == 12) { if (size != 8) return 7; memcpy(&product->leading, value, 8); return 0; }
    if (name == 17 || name == 18) { if (size != 8) return 7; memcpy(&product->scales[name - 17], value, 8); return 0; }
    if (name == 25) { if (size != 1) return 7; memcpy(&product->fast, value, 1); return 0; }
    if (name == 26) { if (size != 4) return 7; memcpy(&product->bias_type, value, 4); return 0; }
    return 7;
}
int cublasLtMatrixLayoutCreate(void** out, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    Layout layout = {type, 1, rows, columns, leading, 0};
    *out = malloc(sizeof layout);
    memcpy(*out, &layout, sizeof layout);
    return leading >= (int64_t)rows && rows && columns ? 0 : 7;
}
int cublasLtMatrixLayoutSetAttribute(Layout* layout, int name, const void* value, size_t size) {
    if (name == 5 && size == 4) { memcpy(&layout->batch, value, 4); return 0; }
    if (name == 6 && size == 8) { memcpy(&layout->stride, value, 8); return 0; }
    return 7;
}
int cublasLtMatmulDescDestroy(void* product) { fake_destroyed++; free(product); return 0; }
int cublasLtMatrixLayoutDestroy(void* layout) { fake_destroyed++; free(layout); return 0; }
int cublasLtMatmulPreferenceCreate(void** out) { *out = calloc(1, sizeof(Preference)); return 0; }
int cublasLtMatmulPreferenceDestroy(void* preference) { free(preference); return 0; }
int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int name, const void* value, size_t size) {
    if (name == 1 && size == 8) { memcpy(&preference->workspace, value, 8); return 0; }
    if (name == 3 && size == 4) { memcpy(&preference->reduction, value, 4); return 0; }
    if (name >= 5 && name <= 8 && size == 4) { memcpy(&preference->alignment[name - 5], value, 4); return 0; }
    return 7;
}
static int is_float8(int type) { return type == E4M3 || type == E5M2; }
// cuBLAS's documentation of cublasLtMatmul, "To use FP8 kernels", and its table of types; on Hopper.
static int float8_fits(const Product* p, const Layout* a, const Layout* b, const Layout* d) {
    if (!p->transpose[0] || p->transpose[1]) return 15;  // TN alone
    if (!is_float8(a->type) || !is_float8(b->type) || (a->type == E5M2 && b->type == E5M2)) return 15;
    if (d->type != F32 && d->type != BF16 && d->type != F16) return 15;
    if (p->epilogue != PLAIN && p->epilogue != BIAS) return 15;  // others are not asked for
    if (p->epilogue == BIAS && p->bias_type != (d->type == F16 ? F16 : BF16)) return 15;
    const Layout* all[] = {a, b, d};
    for (int i = 0; i < 3; i++)
        if (all[i]->rows % 16 || all[i]->columns % 16 || all[i]->leading % 16) return 15;
    return p->compute == 68 && p->scale == F32 ? 0 : 15;
}
static int fits(const Product* p, const Layout* a, const Layout* b, const Layout* d) {
    uint64_t m = p->transpose[0] ? a->columns : a->rows, k = p->transpose[0] ? a->rows : a->columns;
    uint64_t n = p->transpose[1] ? b->rows : b->columns, inner = p->transpose[1] ? b->columns : b->rows;
    if (m != d->rows || n != d->columns || k != inner || a->batch != d->batch || b->batch != d->batch) return 7;
    if (is_float8(a->type) || is_float8(b->type)) return float8_fits(p, a, b, d);
    if (p->scales[0] || p->scales[1] || p->fast) return 7;
    if (a->type != b->type) return 15;
    if (d->type != a->type && !(d->type == F32 && (a->type == F16 || a->type == BF16))) return 15;
    return (p->compute == 70) == (d->type == F64) ? 0 : 15;
}
static int epilogue_fits(const Product* p, const Layout* d) {
    uint32_t e = p->epilogue;
    int aux = e == GELU_AUX || e == GELU_AUX_BIAS || e == DGELU, vector = e == BIAS || e == GELU_AUX_BIAS || e == BGRADB;
    if (!(aux || vector || e == PLAIN)) return 7;
    if (vector && p->bias_type != d->type && !(d->type == F32 && p->scales[0])) return 15;
    if (e == BGRADB && (!p->transpose[1] || d->batch > 1)) return 15;
    if (aux && d->type == F64) return 15;  // GELU only in float32 and less
    return aux && (p->leading % 8 || p->leading < (int64_t)d->rows || d->batch > 1) ? 7 : 0;
}
static uint64_t alignment(const void* pointer) { return pointer ? (uintptr_t)pointer & -(uintptr_t)pointer & 255 : 0; }
static uint64_t mix(uint64_t sum, uint64_t value) { return (sum ^ value) * 1099511628211u; }
// What of a product an algorithm is made for.
static uint64_t fingerprint(const Product* p, const Layout* a, const Layout* b, const Layout* d) {
    uint64_t sum = mix(mix(mix(14695981039346656037u, p->epilogue), p->transpose[0]), p->transpose[1]);
    const Layout* all[] = {a, b, d};
    for (int i = 0; i < 3; i++) sum = mix(mix(mix(sum, all[i]->type), all[i]->rows), all[i]->columns);
    return sum;
}
int cublasLtMatmulAlgoGetHeuristic(void* h, Product* p, Layout* a, Layout* b, Layout* c, Layout* d,
                                   Preference* preference, int wanted, Heuristic* results, int* found) {
    if (h != handle() || c != d || fits(p, a, b, d)) return 7;
    if (epilogue_fits(p, d)) return epilogue_fits(p, d);
    if (preference->reduction != 2) return 7;  // sums would be rounded on the way
    for (int i = 0; i < 4; i++)
        if (!preference->alignment[i] || preference->alignment[i] > 256) return 7;
    *found = wanted < fake_proposals ? wanted : fake_proposals;
    for (int i = 0; i < *found; i++) {
        memset(&results[i], 0, sizeof results[i]);
        results[i].algorithm[0] = 100 + i;
        results[i].algorithm[1] = preference->alignment[0] | (uint64_t)preference->alignment[1] << 16 |
                                  (uint64_t)preference->alignment[3] << 32;
        results[i].algorithm[2] = fingerprint(p, a, b, d);
        results[i].algorithm[3] = alignment(p->bias) | alignment(p->inner) << 16;
        results[i].workspace = preference->workspace;
        results[i].state = i == 0 ? 15 : 0;  // the first is not usable
    }
    return 0;
}
int cublasLtMatmulAlgoCheck(void* h, Product* p, Layout* a, Layout* b, Layout* c, Layout* d, const uint64_t* algorithm,
                            Heuristic* result) {
    if (h != handle() || c != d || fits(p, a, b, d) || epilogue_fits(p, d)) return 7;
    if (algorithm[0] < 101 || algorithm[0] >= 100 + fake_proposals) return 15;
    if (algorithm[2] != fingerprint(p, a, b, d)) return 7;
    result->workspace = 32 << 20;
    return result->state = 0;
}
static int aligned(const void* pointer, uint64_t to) { return (uintptr_t)pointer % to == 0; }
// A product that was asked for, with all that is read on the host; a graph may make it again and again, so it stays.
typedef struct { Product p; Layout a, b, d; const void *at_a, *at_b; void* at_d; double add; } Job;
// Where work waits for its turn in a stream, with a status; unset, it is done at once.
int (*fake_enqueue)(int64_t stream, void (*run)(const void*), const void* job);

static const double ROOT = 0.7978845608028654, CUBE = 0.044715;
static double slope(double x) {  // of GELU, the derivative of its tanh form
    double t = tanh(ROOT * (x + CUBE * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * ROOT * (1 + 3 * CUBE * x * x);
}
static void run(const void* given) {
    const Job* job = given;
    const Product* p = &job->p;
    const Layout *la = &job->a, *lb = &job->b, *ld = &job->d;
    int64_t m = ld->rows, n = ld->columns, k = p->transpose[0] ? la->rows : la->columns;
    double *x = malloc(m * k * sizeof *x), *y = malloc(k * n * sizeof *y), *sums = malloc(m * sizeof *sums);
    // Read when the product runs, not before: kernels write them in the same stream.
    double scale = (p->scales[0] ? *p->scales[0] : 1) * (p->scales[1] ? *p->scales[1] : 1);
    for (int batch = 0; batch < ld->batch; batch++) {
        for (int64_t l = 0; l < k; l++)
            for (int64_t i = 0; i < m; i++) {
                int64_t at = p->transpose[0] ? l + i * la->leading : i + l * la->leading;
                x[l * m + i] = get(job->at_a, at + batch * la->stride, la->type);
            }
        for (int64_t j = 0; j < n; j++)
            for (int64_t l = 0; l < k; l++) {
                int64_t at = p->transpose[1] ? j + l * lb->leading : l + j * lb->leading;
                y[j * k + l] = get(job->at_b, at + batch * lb->stride, lb->type);
            }
        for (int64_t j = 0; j < n; j++) {
            memset(sums, 0, m * sizeof *sums);
            for (int64_t l = 0; l < k; l++)
                for (int64_t i = 0; i < m; i++) sums[i] += x[l * m + i] * y[j * k + l];
            for (int64_t i = 0; i < m; i++) {
                int64_t at = i + j * ld->leading + batch * ld->stride;
                double sum = scale * sums[i];
                if (p->bias && p->epilogue != BGRADB) sum += get(p->bias, i, p->bias_type);
                if (p->epilogue == DGELU) {
                    sum *= slope(get(p->inner, i + j * p->leading, ld->type));
                } else if (p->inner) {
                    put(p->inner, i + j * p->leading, ld->type, sum);
                    sum = sum / (1 + exp(-2 * ROOT * (sum + CUBE * sum * sum * sum)));
                }
                if (job->add) sum += job->add * get(job->at_d, at, ld->type);
                put(job->at_d, at, ld->type, sum);
            }
        }
    }
    for (int64_t j = 0; p->epilogue == BGRADB && j < n; j++) {
        double sum = 0;
        for (int64_t l = 0; l < k; l++) sum += y[j * k + l];
        put(p->bias, j, p->bias_type, sum);
    }
    free(x);
    free(y);
    free(sums);
}
int cublasLtMatmul(void* h, Product* p, const void* alpha, const void* a, Layout* la, const void* b, Layout* lb,
                   const void* beta, const void* c, Layout* lc, void* d, Layout* ld, const uint64_t* algorithm,
                   void* workspace, size_t workspace_size, void* stream) {
    if (h != handle() || c != d || lc != ld || fits(p, la, lb, ld) || workspace_size != 64 << 20) return 7;
    if (epilogue_fits(p, ld)) return epilogue_fits(p, ld);
    if (algorithm[0] < 101 || algorithm[0] == fake_unable) return 15;  // not one that may be used
    if (algorithm[2] != fingerprint(p, la, lb, ld)) return 7;
    if (!aligned(a, algorithm[1] & 0xffff) || !aligned(b, algorithm[1] >> 16 & 0xffff) || !aligned(d, algorithm[1] >> 32))
        return 14;  // a real kernel would fault
    double one = get(alpha, 0, p->scale), add = get(beta, 0, p->scale);
    int vector = p->epilogue == BIAS || p->epilogue == GELU_AUX_BIAS || p->epilogue == BGRADB;
    int aux = p->epilogue == GELU_AUX || p->epilogue == GELU_AUX_BIAS || p->epilogue == DGELU;
    if (one != 1 || !p->bias != !vector || !p->inner != !aux || (p->inner && add)) return 7;
    if (p->inner && (!aligned(p->inner, 16) || !aligned(d, 16) || !aligned(p->bias, 16))) return 14;
    if (is_float8(la->type) && !(aligned(a, 16) && aligned(b, 16) && aligned(d, 16))) return 14;
    uint64_t promised = algorithm[3] & 0xffff, of_aux = algorithm[3] >> 16;
    if (!aligned(p->bias, promised ? promised : 256) || !aligned(p->inner, of_aux ? of_aux : 256)) return 14;
    Job* job = malloc(sizeof *job);
    *job = (Job){*p, *la, *lb, *ld, a, b, d, add};
    fake_record = (Record){fake_record.products + 1, (int64_t)algorithm[0], (int64_t)workspace, (int64_t)stream, add == 1, p->fast};
    if (fake_enqueue) return fake_enqueue((int64_t)stream, run, job);
    run(job);
    free(job);
    return 0;
}
