// matmul.cuh: the matmuls of kernels_cpu.h, section 4, on the device.
//
//   1. cuBLASLt   how our matrices look to it; plans, each made once and then found
//   2. plain      our own kernel, for shapes and alignments that cuBLASLt does not take
//   3. columns    column sums in a fixed order: the gradient of a bias
//   4. operations matmul_forward, matmul_backward_input, matmul_backward_weight; the first two also as float sums
//
// M rows, N outputs, K inputs; in (M, K), weight (N, K), out (M, N), all row-major. Operands are floatX and are
// accumulated in float; weight gradients are float, and are either overwritten or added to.
//
// Every operation gives the same bits on every run: a plan uses the first algorithm that the library proposes, which
// depends only on the shape and the device, and never one chosen by timing it in this run. matmul_choice.cuh replaces
// some by algorithms that were timed once and stored in a file.
//
// Link with -lcublasLt.

#ifndef LLMTRAIN_MATMUL_CUH
#define LLMTRAIN_MATMUL_CUH

#include "base.h"
#include "blocks.cuh"
#include "dtypes.h"

#include <cublasLt.h>
#ifdef EMULATED
#include "dev/emulator/cublaslt.h"
#endif

// ------------------------------------------------------------------------------------------------
// 1. cuBLASLt
//
// The library is column-major: it sees a row-major array (R, C) as a matrix of C rows and R columns with leading
// dimension C, the transpose of what we mean. So we ask it for the transpose of each result, with the operands
// exchanged, and never move any data. In its terms, (rows, columns), T where it transposes an operand as it reads:
//
//     operation          result             first operand        second operand
//     forward            out (N, M)      =  weight (K, N) T      in (K, M)
//     backward_input     din (K, M)      =  weight (K, N)        dout (N, M)
//     backward_weight    dweight (K, N) =   in (K, M)            dout (N, M) T
//
// A bias has one number for each row of the library's result, a column of ours, so its bias epilogue fits. Its bias
// gradient epilogue does not: it overwrites, while we accumulate over micro-batches. Section 3 does that.
//
// GELU fused into the matmul saves a pass over (M, N) in each direction. On an A100 the library's fused kernel was
// measured to be slower than two kernels, in BF16 and float (llm.c, pull request 338), and so it was on an RTX 5090
// (sgl-project/sglang, pull request 34350). So we ask for it on compute capabilities 9 and 10, for 16-bit types;
// elsewhere, and where the library has no fused kernel, the two operations run one after the other. dev/matmul.cu
// measures both.
//
// The library gets only rows of a multiple of 16 bytes that are 16-byte aligned: its tensor core kernels need that,
// and so do the vectors of its epilogues. Section 2 handles everything else.

typedef enum {
    MATMUL_FORWARD,
    MATMUL_BACKWARD_INPUT,
    MATMUL_BACKWARD_WEIGHT,  // = or +=, as the call says
    MATMUL_GELU_FORWARD,
    MATMUL_GELU_BACKWARD_INPUT,
    MATMUL_FORWARD_SUMS,  // the sums of the first two, not rounded to floatX
    MATMUL_BACKWARD_INPUT_SUMS
} MatmulKind;  // a new kind comes last: the checksums of files (matmul_choice.cuh) include these numbers

static const char* const matmul_names[] = {"matmul_forward", "matmul_backward_input", "matmul_backward_weight",
                                           "matmul_gelu_forward", "matmul_gelu_backward_input", "matmul_forward_sums",
                                           "matmul_backward_input_sums"};

// Whether the result is (M, N); whether it is float whatever the operands are; whether there is a GELU.
static inline bool matmul_is_forward(uint32_t kind) {
    return kind == MATMUL_FORWARD || kind == MATMUL_GELU_FORWARD || kind == MATMUL_FORWARD_SUMS;
}
static inline bool matmul_makes_floats(uint32_t kind) {
    return kind == MATMUL_BACKWARD_WEIGHT || kind == MATMUL_FORWARD_SUMS || kind == MATMUL_BACKWARD_INPUT_SUMS;
}
static inline bool matmul_has_gelu(uint32_t kind) {
    return kind == MATMUL_GELU_FORWARD || kind == MATMUL_GELU_BACKWARD_INPUT;
}

// What a plan depends on. It has no padding, since it is hashed and compared as bytes.
typedef struct {
    uint32_t kind;
    uint8_t bias, tf32;
    uint16_t type;  // Dtype of the operands
    uint64_t M, N, K;
} MatmulShape;

typedef struct MatmulPlan {
    bool taken;     // this entry of the table holds a plan
    bool possible;  // the library has an algorithm
    MatmulShape shape;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t first, second, out;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;  // bytes
    size_t alignment;  // of its arrays, in bytes
    uint64_t calls;    // so far
    struct MatmulPlan* narrow;  // of a file's plan: the library's first proposal, for arrays that are aligned to less
} MatmulPlan;

struct Matmul {
    cublasLtHandle_t handle;
    bool fuse_gelu;
    uint64_t chosen;         // checksum of a file's algorithms (matmul_choice.cuh); 0: no file
    MatmulPlan* plans;       // a hash table with linear probing, at most half full: it grows
    size_t capacity, count;  // capacity is a power of two
};

enum { MATMUL_FIRST_CAPACITY = 64, MATMUL_ALIGNMENT = 16 };

// What NVIDIA recommends for Hopper; only algorithms from a file (matmul_choice.cuh) may need more. It must be aligned
// to 256 bytes, as everything that cudaMalloc returns is.
static const size_t matmul_workspace = (size_t)32 << 20;
static inline size_t matmul_scratch_bytes(void) { return matmul_workspace; }

// What the algorithms that the library proposes may rely on.
typedef struct {
    uint64_t workspace;  // at most, in bytes
    uint32_t alignment;  // of all arrays, in bytes
    uint32_t schemes;    // how the parts of a sum that is split over blocks (split-K) may be added up
} MatmulRequest;

// Parts are added as floats; other schemes round them to the type of the result.
static const MatmulRequest MATMUL_REQUEST = {matmul_workspace, MATMUL_ALIGNMENT,
                                             CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE};

static inline void matmul_check(cublasStatus_t status, const char* call, const MatmulShape* s, const char* file,
                                int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    char what[256];
    snprintf(what, sizeof what, "%.*s of %s with M=%llu, N=%llu, K=%llu (%s)", (int)strcspn(call, "("), call,
             matmul_names[s->kind], (unsigned long long)s->M, (unsigned long long)s->N, (unsigned long long)s->K,
             DTYPES[s->type].name);
    device_fail(what, cublasLtGetStatusString(status), file, line);
}

#define MATMUL_CHECK(call, shape) matmul_check((call), #call, (shape), __FILE__, __LINE__)

static inline void* matmul_allocate(size_t bytes) {
    void* memory = memory_allocate(bytes);
    if (memory == NULL) device_fail("the table of matmul plans", "the host is out of memory", __FILE__, __LINE__);
    return memory;
}

static inline void matmul_plan_free(const MatmulPlan* plan) {
    const MatmulShape* s = &plan->shape;
    if (plan->narrow) matmul_plan_free(plan->narrow);
    free(plan->narrow);
    MATMUL_CHECK(cublasLtMatmulDescDestroy(plan->operation), s);
    MATMUL_CHECK(cublasLtMatrixLayoutDestroy(plan->first), s);
    MATMUL_CHECK(cublasLtMatrixLayoutDestroy(plan->second), s);
    MATMUL_CHECK(cublasLtMatrixLayoutDestroy(plan->out), s);
}

static inline void matmul_free(struct Matmul* matmul) {
    for (size_t i = 0; i < matmul->capacity; i++)
        if (matmul->plans[i].taken) matmul_plan_free(&matmul->plans[i]);
    cublasLtDestroy(matmul->handle);
    free(matmul->plans);
    free(matmul);
}

static inline struct Matmul* matmul_state(Stream stream) {
    if (stream->matmul) return stream->matmul;
    struct Matmul* matmul = (struct Matmul*)matmul_allocate(sizeof *matmul);
    int device = 0, major = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    matmul->fuse_gelu = (major == 9 || major == 10) && !FLOATX_IS_FLOAT;
    matmul->capacity = MATMUL_FIRST_CAPACITY;
    matmul->plans = (MatmulPlan*)matmul_allocate(matmul->capacity * sizeof(MatmulPlan));
    cublasStatus_t status = cublasLtCreate(&matmul->handle);
    if (status != CUBLAS_STATUS_SUCCESS)
        device_fail("cublasLtCreate (is the device's memory full, or the library not of this driver?)",
                    cublasLtGetStatusString(status), __FILE__, __LINE__);
    stream->matmul = matmul;
    stream->matmul_free = matmul_free;
    return matmul;
}

// The library's constant for a dtype that it takes.
static inline cudaDataType matmul_type(Dtype type) {
    return type == DTYPE_BF16 ? CUDA_R_16BF : type == DTYPE_F16 ? CUDA_R_16F : CUDA_R_32F;
}

static inline cublasLtMatrixLayout_t matmul_layout(const MatmulShape* s, cudaDataType type, size_t rows,
                                                   size_t columns) {
    cublasLtMatrixLayout_t layout;
    MATMUL_CHECK(cublasLtMatrixLayoutCreate(&layout, type, rows, columns, (int64_t)rows), s);
    return layout;
}

#define MATMUL_SET(operation, attribute, value, shape) \
    MATMUL_CHECK(cublasLtMatmulDescSetAttribute((operation), CUBLASLT_MATMUL_DESC_##attribute, &(value), \
                                                sizeof(value)), (shape))

// The addresses of bias and pre belong to a call, not to a shape; setting them costs a few stores.
static inline void matmul_plan_point(const MatmulPlan* plan, const void* bias, const void* pre) {
    if (bias) MATMUL_SET(plan->operation, BIAS_POINTER, bias, &plan->shape);
    if (pre) MATMUL_SET(plan->operation, EPILOGUE_AUX_POINTER, pre, &plan->shape);
}

// A plan without an algorithm, for arrays of this alignment.
// The library derives the alignment of bias and pre from their addresses; a plan must serve all that are aligned so,
// and is made with addresses that are aligned no better.
static inline MatmulPlan matmul_plan_describe(MatmulShape shape, size_t alignment) {
    const MatmulShape* s = &shape;
    const void* barely_aligned = (const void*)(uintptr_t)alignment;
    bool gelu = s->kind == MATMUL_GELU_FORWARD, dgelu = s->kind == MATMUL_GELU_BACKWARD_INPUT;
    bool forward = matmul_is_forward(s->kind), weight = s->kind == MATMUL_BACKWARD_WEIGHT;
    cudaDataType type = matmul_type((Dtype)s->type);
    cublasComputeType_t compute = s->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    cublasOperation_t transposed = CUBLAS_OP_T;
    cublasLtEpilogue_t epilogue = dgelu             ? CUBLASLT_EPILOGUE_DGELU
                                : gelu && s->bias    ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS
                                : gelu               ? CUBLASLT_EPILOGUE_GELU_AUX
                                : forward && s->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    int64_t pre_columns = (int64_t)(gelu ? s->N : dgelu ? s->K : 0);
    MatmulPlan plan;
    memset(&plan, 0, sizeof plan);
    plan.taken = true;
    plan.shape = shape;
    plan.alignment = alignment;
    MATMUL_CHECK(cublasLtMatmulDescCreate(&plan.operation, compute, CUDA_R_32F), s);
    plan.first = matmul_layout(s, type, s->K, weight ? s->M : s->N);
    plan.second = matmul_layout(s, type, forward ? s->K : s->N, s->M);
    plan.out = matmul_layout(s, matmul_makes_floats(s->kind) ? CUDA_R_32F : type, forward ? s->N : s->K,
                             weight ? s->N : s->M);
    if (forward) MATMUL_SET(plan.operation, TRANSA, transposed, s);
    if (weight) MATMUL_SET(plan.operation, TRANSB, transposed, s);
    MATMUL_SET(plan.operation, EPILOGUE, epilogue, s);
    if (pre_columns) MATMUL_SET(plan.operation, EPILOGUE_AUX_LD, pre_columns, s);
    matmul_plan_point(&plan, s->bias ? barely_aligned : NULL, pre_columns ? barely_aligned : NULL);
    return plan;
}

// Fills in up to `wanted` algorithms that the library proposes, the fastest by its own estimate first; returns their
// number. The plan is made for request->alignment.
static inline int matmul_plan_propose(cublasLtMatmulHeuristicResult_t* results, int wanted, struct Matmul* matmul,
                                      const MatmulPlan* plan, const MatmulRequest* request) {
    const MatmulShape* s = &plan->shape;
    cublasLtMatmulPreference_t preference;
    MATMUL_CHECK(cublasLtMatmulPreferenceCreate(&preference), s);
    MATMUL_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &request->workspace, sizeof request->workspace), s);
    MATMUL_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                      &request->schemes, sizeof request->schemes), s);
    const cublasLtMatmulPreferenceAttributes_t alignments[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (size_t i = 0; i < sizeof alignments / sizeof alignments[0]; i++)
        MATMUL_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, alignments[i], &request->alignment,
                                                          sizeof request->alignment), s);

    int found = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(matmul->handle, plan->operation, plan->first, plan->second,
                                                           plan->out, plan->out, preference, wanted, results, &found);
    MATMUL_CHECK(cublasLtMatmulPreferenceDestroy(preference), s);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) MATMUL_CHECK(status, s);
    return status == CUBLAS_STATUS_SUCCESS ? found : 0;
}

static inline void matmul_plan_take(MatmulPlan* plan, const cublasLtMatmulAlgo_t* algorithm, size_t workspace) {
    plan->possible = true;
    plan->algorithm = *algorithm;
    plan->workspace = workspace;
}

// A plan with the library's first proposal. Takes tens of microseconds, once per shape.
static inline MatmulPlan matmul_plan_make(struct Matmul* matmul, MatmulShape shape) {
    cublasLtMatmulHeuristicResult_t result;
    MatmulPlan plan = matmul_plan_describe(shape, MATMUL_ALIGNMENT);
    bool possible = matmul_plan_propose(&result, 1, matmul, &plan, &MATMUL_REQUEST) > 0 &&
                    result.state == CUBLAS_STATUS_SUCCESS;
    if (possible) matmul_plan_take(&plan, &result.algo, result.workspaceSize);
    return plan;
}

// out = or += the matmul, as matmul_library_of says.
static inline cublasStatus_t matmul_plan_run(struct Matmul* matmul, const MatmulPlan* plan, void* out,
                                             const void* first, const void* second, const void* bias, const void* pre,
                                             bool adds, Stream stream) {
    float one = 1.0f, add = adds ? 1.0f : 0.0f;
    matmul_plan_point(plan, bias, pre);
    return cublasLtMatmul(matmul->handle, plan->operation, &one, first, plan->first, second, plan->second, &add, out,
                          plan->out, out, plan->out, &plan->algorithm, device_scratch(stream, plan->workspace),
                          plan->workspace, stream->compute);
}

// The table entry for a shape: its plan, or the free entry where it belongs.
static inline MatmulPlan* matmul_plan_find(MatmulPlan* plans, size_t capacity, const MatmulShape* shape) {
    size_t at = (size_t)hash_bytes(shape, sizeof *shape) & (capacity - 1);
    while (plans[at].taken && memcmp(&plans[at].shape, shape, sizeof *shape) != 0) at = (at + 1) & (capacity - 1);
    return &plans[at];
}

static inline void matmul_plans_grow(struct Matmul* matmul) {
    size_t capacity = 2 * matmul->capacity;
    MatmulPlan* plans = (MatmulPlan*)matmul_allocate(capacity * sizeof(MatmulPlan));
    for (size_t i = 0; i < matmul->capacity; i++)
        if (matmul->plans[i].taken) *matmul_plan_find(plans, capacity, &matmul->plans[i].shape) = matmul->plans[i];
    free(matmul->plans);
    matmul->plans = plans;
    matmul->capacity = capacity;
}

// Adds a plan for a shape that has none to the table; returns its entry, which is valid until the next one is added.
static inline MatmulPlan* matmul_plan_add(struct Matmul* matmul, MatmulPlan plan) {
    *matmul_plan_find(matmul->plans, matmul->capacity, &plan.shape) = plan;
    if (++matmul->count > matmul->capacity / 2) matmul_plans_grow(matmul);
    return matmul_plan_find(matmul->plans, matmul->capacity, &plan.shape);
}

// out = or, if `adds`, += the matmul of that kind; first and second are in the order of the table above, and only
// backward_weight may add. Returns false, and does nothing, if the library does not take these arrays or has no
// algorithm. pre: the input of the GELU, which the forward writes and the backward reads.
static inline bool matmul_library_of(MatmulKind kind, Dtype type, bool tf32, void* out, const void* first,
                                     const void* second, const floatX* bias, const void* pre, bool adds, size_t M,
                                     size_t N, size_t K, Stream stream) {
    if (!packs_fit(N, out, first, second, bias) || !packs_fit(K, pre, NULL, NULL, NULL)) return false;
    struct Matmul* matmul = matmul_state(stream);
    MatmulShape shape = {(uint32_t)kind, bias != NULL, tf32, (uint16_t)type, M, N, K};
    MatmulPlan* plan = matmul_plan_find(matmul->plans, matmul->capacity, &shape);
    if (!plan->taken) plan = matmul_plan_add(matmul, matmul_plan_make(matmul, shape));
    uintptr_t addresses = (uintptr_t)out | (uintptr_t)first | (uintptr_t)second | (uintptr_t)bias | (uintptr_t)pre;
    if (plan->alignment > MATMUL_ALIGNMENT && addresses % plan->alignment != 0) {
        if (!plan->narrow) {
            plan->narrow = (MatmulPlan*)matmul_allocate(sizeof(MatmulPlan));
            *plan->narrow = matmul_plan_make(matmul, shape);
        }
        plan = plan->narrow;
    }
    if (!plan->possible || addresses % plan->alignment != 0) return false;
    plan->calls++;
    matmul_check(matmul_plan_run(matmul, plan, out, first, second, bias, pre, adds, stream), "cublasLtMatmul", &shape,
                 __FILE__, __LINE__);
    return true;
}

static inline bool matmul_library(MatmulKind kind, void* out, const floatX* first, const floatX* second,
                                  const floatX* bias, const void* pre, bool adds, size_t M, size_t N, size_t K,
                                  Stream stream) {
    bool tf32 = stream->tf32 && FLOATX_IS_FLOAT;
    return matmul_library_of(kind, FLOATX_DTYPE, tf32, out, first, second, bias, pre, adds, M, N, K, stream);
}

// ------------------------------------------------------------------------------------------------
// 2. Plain
//
// A matmul for any shape and any alignment, in float arithmetic. A block of 256 threads computes a tile of 64 x 64
// results in steps of 16 terms: it copies 64 x 16 elements of each operand into shared memory, where each is used 64
// times, and each thread holds 4 x 4 sums in registers, so that the 8 numbers it reads from shared memory, in two loads
// of 16 bytes, serve 16 multiplications. Bound by shared memory reads: 2 bytes per multiply-add.

enum {
    MATMUL_TILE = 64,
    MATMUL_DEPTH = 16,
    MATMUL_OWN = 4,
    MATMUL_THREADS = 256,
    MATMUL_PITCH = MATMUL_TILE + 4  // fewer bank conflicts; rows stay 16-byte aligned
};

// The result (rows, columns) goes to out or, as floats, to sums; the other one is NULL. T: floatX, or float.
template <typename T>
struct PlainMatmul {
    T* out;
    float* sums;
    bool adds;            // it is added to sums
    const T* bias;        // (columns) or NULL
    const T *a, *b;       // elements a[row * a_row + k * a_k] and b[column * b_column + k * b_k]:
    size_t a_row, a_k, b_column, b_k;  // of each pair of steps one is 1
    size_t rows, columns, length;      // k = 0 to length - 1
};

// tile[k][lane] = the element for (first_lane + lane, first_k + k), 0 outside the matrix. Neighboring threads read
// neighboring addresses.
template <typename T>
static __device__ inline void plain_matmul_load(float (*tile)[MATMUL_PITCH], const T* x, size_t lane_step,
                                                size_t k_step, size_t first_lane, size_t lanes, size_t first_k,
                                                size_t length) {
    for (unsigned i = threadIdx.x; i < MATMUL_TILE * MATMUL_DEPTH; i += MATMUL_THREADS) {
        unsigned lane = k_step == 1 ? i / MATMUL_DEPTH : i % MATMUL_TILE;
        unsigned k = k_step == 1 ? i % MATMUL_DEPTH : i / MATMUL_TILE;
        bool inside = first_lane + lane < lanes && first_k + k < length;
        tile[k][lane] = inside ? float_widen(x[(first_lane + lane) * lane_step + (first_k + k) * k_step]) : 0.0f;
    }
}

template <typename T>
static __global__ __launch_bounds__(MATMUL_THREADS) void plain_matmul_kernel(PlainMatmul<T> p) {
    __shared__ __align__(16) float a_tile[MATMUL_DEPTH][MATMUL_PITCH], b_tile[MATMUL_DEPTH][MATMUL_PITCH];
    size_t tiles_across = divide_up(p.columns, MATMUL_TILE);
    size_t row = blockIdx.x / tiles_across * MATMUL_TILE, column = blockIdx.x % tiles_across * MATMUL_TILE;
    unsigned own_row = threadIdx.x / (MATMUL_TILE / MATMUL_OWN) * MATMUL_OWN;
    unsigned own_column = threadIdx.x % (MATMUL_TILE / MATMUL_OWN) * MATMUL_OWN;
    float sums[MATMUL_OWN][MATMUL_OWN] = {{0.0f}};

    for (size_t first = 0; first < p.length; first += MATMUL_DEPTH) {
        plain_matmul_load(a_tile, p.a, p.a_row, p.a_k, row, p.rows, first, p.length);
        plain_matmul_load(b_tile, p.b, p.b_column, p.b_k, column, p.columns, first, p.length);
        __syncthreads();
        #pragma unroll
        for (int k = 0; k < MATMUL_DEPTH; k++) {
            Group<float, MATMUL_OWN> a = group_load<MATMUL_OWN>(&a_tile[k][own_row]);
            Group<float, MATMUL_OWN> b = group_load<MATMUL_OWN>(&b_tile[k][own_column]);
            for (int i = 0; i < MATMUL_OWN; i++)
                for (int j = 0; j < MATMUL_OWN; j++) sums[i][j] += a.x[i] * b.x[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < MATMUL_OWN; i++) {
        for (int j = 0; j < MATMUL_OWN; j++) {
            size_t r = row + own_row + i, c = column + own_column + j;
            if (r >= p.rows || c >= p.columns) continue;
            if (p.sums) p.sums[r * p.columns + c] = sums[i][j] + (p.adds ? p.sums[r * p.columns + c] : 0.0f);
            else p.out[r * p.columns + c] = float_narrow<T>(sums[i][j] + (p.bias ? float_widen(p.bias[c]) : 0.0f));
        }
    }
}

// As matmul_library_of, without the kinds that have a GELU.
template <typename T>
static inline void plain_matmul(MatmulKind kind, void* out, const T* first, const T* second, const T* bias, bool adds,
                                size_t M, size_t N, size_t K, Stream stream) {
    PlainMatmul<T> p = {(T*)out, NULL, false, bias, second, first, K, 1, K, 1, M, N, K};
    if (kind == MATMUL_BACKWARD_INPUT || kind == MATMUL_BACKWARD_INPUT_SUMS)
        p = {(T*)out, NULL, false, NULL, second, first, N, 1, 1, K, M, K, N};
    if (kind == MATMUL_BACKWARD_WEIGHT) p = {NULL, NULL, adds, NULL, second, first, 1, N, 1, K, N, K, M};
    if (matmul_makes_floats(kind)) p.sums = (float*)out;
    size_t across = divide_up(p.columns, MATMUL_TILE), down = divide_up(p.rows, MATMUL_TILE);
    if (across * down > INT32_MAX)
        device_fail("a matmul", "it is too large for one grid; use a smaller --batch, or sizes that are multiples of 8",
                    __FILE__, __LINE__);
    plain_matmul_kernel<T><<<(unsigned)(across * down), MATMUL_THREADS, 0, stream->compute>>>(p);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 3. Columns
//
// dbias (N) = or += the sum of dout's rows, in two steps with a fixed order: the rows are cut into pieces, whose sums
// go to scratch memory, and then the pieces are added up. Both steps are memory-bound: dout is read once, and the
// sums are much smaller, one row for 64 or more. The number of pieces depends on the sizes alone, so the bits do not
// depend on the device.
//
// In both steps a block owns the columns of one warp, and its 8 warps take the rows in turn; then the warps' sums are
// added up through shared memory.

enum { COLUMN_WARPS = 8, COLUMN_PIECES = 512, COLUMN_PIECE_ROWS = 64 };

// Sums what each thread holds for its W columns over the block's warps; thread t < 32 W returns the sum of column t.
// In shared memory sum i of all lanes is contiguous, followed by 32 / W unused floats, so that neither writes nor
// reads have bank conflicts.
template <int W>
static __device__ inline float column_sums_join(float (*shared)[WARP * (W + 1)], const float* sums) {
    const unsigned pitch = WARP + WARP / W;
    for (int i = 0; i < W; i++) shared[threadIdx.y][i * pitch + threadIdx.x] = sums[i];
    __syncthreads();
    unsigned t = threadIdx.y * WARP + threadIdx.x;
    float total = 0.0f;
    if (t < WARP * W)
        for (int warp = 0; warp < COLUMN_WARPS; warp++) total += shared[warp][t % W * pitch + t / W];
    return total;
}

// pieces (gridDim.y, N) = sums of `rows` rows each of dout (M, N). W columns a thread, W = PACK or 1.
template <int W>
static __global__ void column_pieces_kernel(float* pieces, const floatX* dout, size_t rows, size_t M, size_t N) {
    __shared__ float shared[COLUMN_WARPS][WARP * (W + 1)];
    size_t begin = (size_t)blockIdx.x * WARP * W, column = begin + threadIdx.x * W;
    size_t first = blockIdx.y * rows, end = first + rows < M ? first + rows : M;
    float sums[W] = {0.0f};
    if (column < N) {
        for (size_t row = first + threadIdx.y; row < end; row += COLUMN_WARPS) {
            Lanes<W> lanes = lanes_load<W>(dout + row * N + column);
            #pragma unroll
            for (int i = 0; i < W; i++) sums[i] += lanes.x[i];
        }
    }
    float total = column_sums_join<W>(shared, sums);
    size_t t = threadIdx.y * WARP + threadIdx.x;
    if (t < WARP * W && begin + t < N) pieces[blockIdx.y * N + begin + t] = total;
}

// dbias (N) = or, if `adds`, += the sum of pieces (count, N) over count.
static __global__ void column_join_kernel(float* dbias, const float* pieces, bool adds, size_t count, size_t N) {
    __shared__ float shared[COLUMN_WARPS][WARP * 2];
    size_t column = (size_t)blockIdx.x * WARP + threadIdx.x;
    float sum = 0.0f;
    if (column < N)
        for (size_t piece = threadIdx.y; piece < count; piece += COLUMN_WARPS) sum += pieces[piece * N + column];
    float total = column_sums_join<1>(shared, &sum);
    if (threadIdx.y == 0 && column < N) dbias[column] = total + (adds ? dbias[column] : 0.0f);
}

static inline void column_sums(float* dbias, const floatX* dout, bool adds, size_t M, size_t N, Stream stream) {
    size_t most = min_size(COLUMN_PIECES, max_size(1, matmul_workspace / (N * sizeof(float))));
    size_t rows = max_size(COLUMN_PIECE_ROWS, divide_up(M, most)), count = divide_up(M, rows);
    float* pieces = (float*)device_scratch(stream, count * N * sizeof(float));
    bool packs = packs_fit(N, dout, NULL, NULL, NULL);
    dim3 block(WARP, COLUMN_WARPS), grid((unsigned)divide_up(N, WARP * (packs ? PACK : 1)), (unsigned)count);
    auto kernel = packs ? column_pieces_kernel<PACK> : column_pieces_kernel<1>;
    kernel<<<grid, block, 0, stream->compute>>>(pieces, dout, rows, M, N);
    LAUNCH_CHECK();
    column_join_kernel<<<(unsigned)divide_up(N, WARP), block, 0, stream->compute>>>(dbias, pieces, adds, count, N);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 4. Operations: as in kernels_cpu.h, with pointers to the device's memory

// By the library, or by our own kernel where the library does not take the arrays.
static inline void matmul_any(MatmulKind kind, void* out, const floatX* first, const floatX* second, const floatX* bias,
                              bool adds, size_t M, size_t N, size_t K, Stream stream) {
    if (!matmul_library(kind, out, first, second, bias, NULL, adds, M, N, K, stream))
        plain_matmul(kind, out, first, second, bias, adds, M, N, K, stream);
}

static inline void matmul_forward(floatX* out, const floatX* in, const floatX* weight, const floatX* bias,
                                  size_t M, size_t N, size_t K, Stream stream) {
    matmul_any(MATMUL_FORWARD, out, weight, in, bias, false, M, N, K, stream);
}

static inline void matmul_backward_input(floatX* din, const floatX* dout, const floatX* weight,
                                         size_t M, size_t N, size_t K, Stream stream) {
    matmul_any(MATMUL_BACKWARD_INPUT, din, weight, dout, NULL, false, M, N, K, stream);
}

static inline void matmul_forward_sums(float* out, const floatX* in, const floatX* weight, size_t M, size_t N, size_t K,
                                       Stream stream) {
    MatmulKind kind = FLOATX_IS_FLOAT ? MATMUL_FORWARD : MATMUL_FORWARD_SUMS;
    matmul_any(kind, out, weight, in, NULL, false, M, N, K, stream);
}

static inline void matmul_backward_input_sums(float* out, const floatX* dout, const floatX* weight,
                                              size_t M, size_t N, size_t K, Stream stream) {
    MatmulKind kind = FLOATX_IS_FLOAT ? MATMUL_BACKWARD_INPUT : MATMUL_BACKWARD_INPUT_SUMS;
    matmul_any(kind, out, weight, dout, NULL, false, M, N, K, stream);
}

// Skips either output if it is NULL.
static inline void matmul_backward_weight(float* dweight, float* dbias, const floatX* dout, const floatX* in, bool adds,
                                          size_t M, size_t N, size_t K, Stream stream) {
    if (dweight) matmul_any(MATMUL_BACKWARD_WEIGHT, dweight, in, dout, NULL, adds, M, N, K, stream);
    if (dbias) column_sums(dbias, dout, adds, M, N, stream);
}

// One of these three matmuls, without bias, on floats whatever the build's storage dtype; first and second are in the
// order of the table in section 1.
static inline void matmul_floats(MatmulKind kind, bool tf32, float* out, const float* first, const float* second,
                                 size_t M, size_t N, size_t K, Stream stream) {
    if (!matmul_library_of(kind, DTYPE_F32, tf32, out, first, second, NULL, NULL, false, M, N, K, stream))
        plain_matmul<float>(kind, out, first, second, NULL, false, M, N, K, stream);
}

#endif  // LLMTRAIN_MATMUL_CUH
