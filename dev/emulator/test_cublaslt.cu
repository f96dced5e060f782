// test_cublaslt.cu: cuBLASLt as matmul.cuh uses it, against a double loop.
//
// In the emulator this tests cublaslt.h. The part "products" compiles with nvcc too: on a GPU it compares the library
// itself with the same loop, and so shows whether the emulation is correct.
//
//     nvcc -I. dev/emulator/test_cublaslt.cu -lcublasLt -o build/test_cublaslt
//
// Products: all types, transpositions, epilogues, values of alpha and beta, matrices with gaps between their columns.
// An element of a sum of k terms is right within
//
//     epsilon |x| + 4 sqrt(k) 2^-24 (sum of the terms' magnitudes)
//
// with the epsilon of its stored type (0 for float) and a slope of GELU of at most 1.13; for a stored GELU, x is also
// the input. The gaps, and the bytes behind each matrix, must not change.
//
// Refusals: an error status of the library is returned as such; a mistake that ends the program does so with the exit
// status of a diagnosis, in a process of its own.

#include "llmtrain/ops/gemm.h"
#include "dev/test/harness.h"

#include <cublasLt.h>
#include <cuda_runtime.h>
#ifdef EMULATED
#include "cublaslt.h"
#endif

#define CUDA(call) need((call) == cudaSuccess, "%s", #call)
#define LT(call) need((call) == CUBLAS_STATUS_SUCCESS, "%s", #call)

// ------------------------------------------------------------------------------------------------
// Problems

typedef struct {
    Dtype in, out;
    bool transpose_a, transpose_b, tf32;
    cublasLtEpilogue_t epilogue;
    float alpha, beta;
    size_t rows, columns, length, gap;  // gap: elements between columns, of each matrix
} Problem;

// A column-major matrix, on the host and on the device.
typedef struct {
    Dtype type;
    size_t rows, columns, stride, bytes;
    unsigned char *host, *device;
} Matrix;

enum { GUARD = 64 };  // bytes behind a matrix

static cudaStream_t stream;
static cublasLtHandle_t handle;
static void* workspace;
static const size_t workspace_bytes = 1 << 20;

static cudaDataType cuda_type(Dtype type) {
    return type == DTYPE_F32 ? CUDA_R_32F : type == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

static double at(const Matrix* m, size_t i, size_t j) { return (double)gemm_load(m->host, m->type, j * m->stride + i); }

// Every byte is random, the gaps and the guard too; numbers in [-1, 1).
static Matrix matrix_make(Dtype type, size_t rows, size_t columns, size_t gap, uint64_t seed) {
    Matrix m = {type, rows, columns, rows + gap, 0, NULL, NULL};
    size_t elements = m.stride * columns;
    m.bytes = elements * dtype_bytes(type) + GUARD;
    m.host = (unsigned char*)memory_allocate(m.bytes);
    need(m.host != NULL, "memory for a matrix");
    for (size_t i = 0; i < m.bytes; i++) m.host[i] = (unsigned char)(random_bits(seed, RANDOM_TEST, 1, i));
    for (size_t i = 0; i < elements; i++)
        gemm_save(m.host, type, i, 2.0f * random_uniform(seed, RANDOM_TEST, 0, i) - 1.0f);
    CUDA(cudaMalloc((void**)&m.device, m.bytes));
    CUDA(cudaMemcpyAsync(m.device, m.host, m.bytes, cudaMemcpyHostToDevice, stream));
    return m;
}

static void matrix_free(Matrix* m) {
    CUDA(cudaFree(m->device));
    free(m->host);
}

// A float as the tensor cores read it: 11 significant bits.
static double to_tf32(double x) {
    int exponent = 0;
    double fraction = frexp(x, &exponent);
    return ldexp(round(ldexp(fraction, 11)), exponent - 11);
}

static double gelu(double x) { return 0.5 * x * (1.0 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x))); }

static double gelu_slope(double x) {
    const double h = 1e-6;
    return (gelu(x + h) - gelu(x - h)) / (2.0 * h);  // differences, since the emulator has the formula
}

typedef struct {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c, d;
    cublasLtMatmulPreference_t wish;
} Objects;

static cublasLtMatrixLayout_t layout_of(const Matrix* m) {
    cublasLtMatrixLayout_t layout;
    LT(cublasLtMatrixLayoutCreate(&layout, cuda_type(m->type), m->rows, m->columns, (int64_t)m->stride));
    return layout;
}

#define SET(attribute, value) LT(cublasLtMatmulDescSetAttribute(o.operation, attribute, &(value), sizeof(value)))

static Objects objects_make(const Problem* p, const Matrix* a, const Matrix* b, const Matrix* d, const Matrix* bias,
                            const Matrix* aux) {
    Objects o;
    cublasOperation_t transposed = CUBLAS_OP_T;
    int64_t aux_stride = (int64_t)aux->stride;
    cublasComputeType_t compute = p->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    LT(cublasLtMatmulDescCreate(&o.operation, compute, CUDA_R_32F));
    if (p->transpose_a) SET(CUBLASLT_MATMUL_DESC_TRANSA, transposed);
    if (p->transpose_b) SET(CUBLASLT_MATMUL_DESC_TRANSB, transposed);
    SET(CUBLASLT_MATMUL_DESC_EPILOGUE, p->epilogue);
    SET(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias->device);
    SET(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux->device);
    SET(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux_stride);
    o.a = layout_of(a);
    o.b = layout_of(b);
    o.c = layout_of(d);
    o.d = layout_of(d);
    LT(cublasLtMatmulPreferenceCreate(&o.wish));
    uint64_t most = workspace_bytes;
    uint32_t alignment = 16;
    LT(cublasLtMatmulPreferenceSetAttribute(o.wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most));
    const cublasLtMatmulPreferenceAttributes_t names[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; i++)
        LT(cublasLtMatmulPreferenceSetAttribute(o.wish, names[i], &alignment, sizeof alignment));
    return o;
}

// A problem with its matrices, and an algorithm if the library has one.
typedef struct {
    Problem p;
    Matrix a, b, d, bias, aux;
    Objects o;
    cublasLtMatmulHeuristicResult_t result;
    int found;
} Setting;

static cublasStatus_t ask(Setting* s) {
    return cublasLtMatmulAlgoGetHeuristic(handle, s->o.operation, s->o.a, s->o.b, s->o.c, s->o.d, s->o.wish, 1,
                                          &s->result, &s->found);
}

static Setting setting_make(const Problem& p) {
    Setting s;
    memset(&s, 0, sizeof s);
    s.p = p;
    s.a = matrix_make(p.in, p.transpose_a ? p.length : p.rows, p.transpose_a ? p.rows : p.length, p.gap, 1);
    s.b = matrix_make(p.in, p.transpose_b ? p.columns : p.length, p.transpose_b ? p.length : p.columns, p.gap, 2);
    s.d = matrix_make(p.out, p.rows, p.columns, p.gap, 3);
    s.aux = matrix_make(p.out, p.rows, p.columns, p.gap, 4);
    s.bias = matrix_make(p.out, p.epilogue == CUBLASLT_EPILOGUE_BGRADB ? p.columns : p.rows, 1, 0, 5);
    s.o = objects_make(&p, &s.a, &s.b, &s.d, &s.bias, &s.aux);
    return s;
}

static void setting_free(Setting* s) {
    LT(cublasLtMatmulDescDestroy(s->o.operation));
    for (cublasLtMatrixLayout_t layout : {s->o.a, s->o.b, s->o.c, s->o.d}) LT(cublasLtMatrixLayoutDestroy(layout));
    LT(cublasLtMatmulPreferenceDestroy(s->o.wish));
    for (Matrix* m : {&s->a, &s->b, &s->d, &s->bias, &s->aux}) matrix_free(m);
}

static cublasStatus_t multiply_in(Setting* s, void* memory, size_t bytes) {
    return cublasLtMatmul(handle, s->o.operation, &s->p.alpha, s->a.device, s->o.a, s->b.device, s->o.b, &s->p.beta,
                          s->d.device, s->o.c, s->d.device, s->o.d, &s->result.algo, memory, bytes, stream);
}

static cublasStatus_t multiply(Setting* s) { return multiply_in(s, workspace, workspace_bytes); }

// ------------------------------------------------------------------------------------------------
// Products

static double epsilon_of(Dtype type) { return type == DTYPE_BF16 ? 0x1p-8 : type == DTYPE_F16 ? 0x1p-11 : 0.0; }

// The error of `got` relative to what is allowed. NaN counts as infinite.
static double part_of_bound(double got, double x, double spread, Dtype type) {
    double part = fabs(got - x) / (epsilon_of(type) * fabs(x) + spread + 0x1p-24);
    return part == part ? part : INFINITY;
}

static void test_product(const char* name, Problem p) {
    Setting s = setting_make(p);
    Matrix &a = s.a, &b = s.b, &d = s.d, &aux = s.aux, &bias = s.bias;
    cublasStatus_t status = ask(&s);
    if (status == CUBLAS_STATUS_SUCCESS && s.found == 1) status = multiply(&s);
    if (status != CUBLAS_STATUS_SUCCESS || s.found != 1) {
        check(false, "%-44s status %d, %d algorithms", name, (int)status, s.found);
    } else {
        unsigned char *got = (unsigned char*)memory_allocate(d.bytes),
                      *got_aux = (unsigned char*)memory_allocate(aux.bytes);
        unsigned char* got_bias = (unsigned char*)memory_allocate(bias.bytes);
        need(got != NULL && got_aux != NULL && got_bias != NULL, "memory for the results");
        CUDA(cudaStreamSynchronize(stream));
        CUDA(cudaMemcpy(got, d.device, d.bytes, cudaMemcpyDeviceToHost));
        CUDA(cudaMemcpy(got_aux, aux.device, aux.bytes, cudaMemcpyDeviceToHost));
        CUDA(cudaMemcpy(got_bias, bias.device, bias.bytes, cudaMemcpyDeviceToHost));
        bool with_bias = p.epilogue & CUBLASLT_EPILOGUE_BIAS, with_gelu = p.epilogue & CUBLASLT_EPILOGUE_GELU;
        bool writes_aux = with_gelu && (p.epilogue & 128);
        double worst = 0.0, worst_aux = 0.0;
        for (size_t j = 0; j < p.columns; j++) {
            for (size_t i = 0; i < p.rows; i++) {
                double sum = 0.0, size = 0.0;
                for (size_t k = 0; k < p.length; k++) {
                    double x = p.transpose_a ? at(&a, k, i) : at(&a, i, k);
                    double y = p.transpose_b ? at(&b, j, k) : at(&b, k, j);
                    sum += p.tf32 ? to_tf32(x) * to_tf32(y) : x * y;
                    size += fabs(x * y);
                }
                double x = (double)p.alpha * sum + (double)p.beta * at(&d, i, j) + (with_bias ? at(&bias, i, 0) : 0.0);
                size = fabs((double)p.alpha) * size + fabs((double)p.beta) + 1.0;
                double spread = 4.0 * sqrt((double)p.length + 4.0) * 0x1p-24 * size;
                double stored = (double)gemm_load(got, p.out, j * d.stride + i);
                if (writes_aux) {
                    double stored_aux = (double)gemm_load(got_aux, p.out, j * aux.stride + i);
                    worst_aux = fmax(worst_aux, part_of_bound(stored_aux, x, spread, p.out));
                }
                if (p.epilogue == CUBLASLT_EPILOGUE_DGELU) {
                    x *= gelu_slope(at(&aux, i, j));
                    spread = 1.2 * spread + 1e-9 * fabs(x);
                }
                if (with_gelu) {
                    x = gelu(x);
                    spread *= 1.2;
                }
                worst = fmax(worst, part_of_bound(stored, x, spread, p.out));
                gemm_save(got, p.out, j * d.stride + i, 0.0f);  // so that leftover bytes can be compared
                gemm_save(d.host, p.out, j * d.stride + i, 0.0f);
                if (writes_aux) {
                    gemm_save(got_aux, p.out, j * aux.stride + i, 0.0f);
                    gemm_save(aux.host, p.out, j * aux.stride + i, 0.0f);
                }
            }
        }
        for (size_t j = 0; p.epilogue == CUBLASLT_EPILOGUE_BGRADB && j < p.columns; j++) {
            double sum = 0.0, size = 0.0;
            for (size_t k = 0; k < p.length; k++) {
                double y = p.transpose_b ? at(&b, j, k) : at(&b, k, j);
                sum += y;
                size += fabs(y);
            }
            double spread = 4.0 * sqrt((double)p.length) * 0x1p-24 * size;
            worst_aux = fmax(worst_aux, part_of_bound((double)gemm_load(got_bias, p.out, j), sum, spread, p.out));
            gemm_save(got_bias, p.out, j, 0.0f);
            gemm_save(bias.host, p.out, j, 0.0f);
        }
        bool kept = memcmp(got, d.host, d.bytes) == 0 && memcmp(got_aux, aux.host, aux.bytes) == 0 &&
                    memcmp(got_bias, bias.host, bias.bytes) == 0;
        check(worst <= 1.0 && worst_aux <= 1.0 && kept,
              "%-44s %s%s %zux%zux%zu gap %zu alpha %g beta %g%s: %.2f, %.2f of the bound%s", name,
              p.transpose_a ? "T" : "N", p.transpose_b ? "T" : "N", p.rows, p.columns, p.length, p.gap,
              (double)p.alpha, (double)p.beta, p.tf32 ? " tf32" : "", worst, worst_aux, kept ? "" : ", WROTE OUTSIDE");
        free(got);
        free(got_aux);
        free(got_bias);
    }
    setting_free(&s);
}

static const struct {
    const char* name;
    cublasLtEpilogue_t value;
} epilogues[] = {
    {"default", CUBLASLT_EPILOGUE_DEFAULT},   {"bias", CUBLASLT_EPILOGUE_BIAS},
    {"gelu", CUBLASLT_EPILOGUE_GELU},         {"gelu_bias", CUBLASLT_EPILOGUE_GELU_BIAS},
    {"gelu_aux", CUBLASLT_EPILOGUE_GELU_AUX}, {"gelu_aux_bias", CUBLASLT_EPILOGUE_GELU_AUX_BIAS},
    {"dgelu", CUBLASLT_EPILOGUE_DGELU},       {"bgradb", CUBLASLT_EPILOGUE_BGRADB},
};
static void test_products(void) {
    static const Dtype types[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    const size_t shapes[][3] = {{8, 1, 8}, {16, 40, 24}, {72, 8, 328}};
    for (int t = 0; t < 3; t++) {
        Dtype type = types[t];
        for (int wide = 0; wide <= (type != DTYPE_F32); wide++) {
            for (int transposes = 0; transposes < 3; transposes++) {  // NN, TN, NT: the three that matmul.cuh needs
                for (int e = 0; e < (int)COUNT_OF(epilogues); e++) {
                    for (int tf32 = 0; tf32 <= (type == DTYPE_F32); tf32++) {
                        // 16-bit operands with a float result are for gradients of weights, and of biases with them.
                        if (wide && e > 0 && epilogues[e].value != CUBLASLT_EPILOGUE_BGRADB) continue;
                        const size_t* s = shapes[(t + wide + transposes + e) % 3];
                        size_t columns = transposes == 2 ? round_up(s[1], 8) : s[1];  // rows of B then: whole 16 bytes
                        Problem p = {type, wide ? DTYPE_F32 : type, transposes == 1, transposes == 2,
                                     tf32 != 0, epilogues[e].value, 1.0f, wide ? 1.0f : 0.0f, s[0], columns, s[2],
                                     e % 2 ? 8u : 0u};
                        char name[64];
                        snprintf(name, sizeof name, "%s -> %s %s", DTYPES[p.in].name, DTYPES[p.out].name,
                                 epilogues[e].name);
                        test_product(name, p);
                        p.alpha = -0.5f;
                        p.beta = 0.25f;
                        if (e == 0) test_product(name, p);
                    }
                }
            }
        }
    }
    Problem odd = {DTYPE_F32, DTYPE_F32, true, true, false, CUBLASLT_EPILOGUE_BIAS, 1.0f, 1.0f, 257, 3, 5, 0};
    test_product("float, odd sizes, both transposed", odd);
}

#ifdef EMULATED

// ------------------------------------------------------------------------------------------------
// Refusals

// A bf16 matmul that is correct in every respect.
static const Problem RIGHT = {DTYPE_BF16, DTYPE_BF16, false, false, false, CUBLASLT_EPILOGUE_GELU_AUX_BIAS, 1.0f, 0.0f,
                              16, 8, 32, 0};

static cublasStatus_t set(Setting* s, cublasLtMatmulDescAttributes_t name, int64_t value, size_t bytes) {
    return cublasLtMatmulDescSetAttribute(s->o.operation, name, &value, bytes);
}

static cublasStatus_t set_layout(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t name, int64_t value,
                                 size_t bytes) {
    return cublasLtMatrixLayoutSetAttribute(layout, name, &value, bytes);
}

// How it is changed before the heuristic or the matmul.
#define WITH(change, then) \
    [](Setting* s) { \
        change; \
        return then(s); \
    }

// The library's status.
static const struct {
    const char* name;
    cublasStatus_t status;
    cublasStatus_t (*deed)(Setting* s);
} refusals[] = {
    {"nothing wrong", CUBLAS_STATUS_SUCCESS, [](Setting* s) { return multiply(s); }},
    {"attribute of the wrong size", CUBLAS_STATUS_INVALID_VALUE, [](Setting* s) {
         return set(s, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS, 8);
     }},
    {"leading dimension below the rows", CUBLAS_STATUS_INVALID_VALUE,
     WITH(set_layout(s->o.a, CUBLASLT_MATRIX_LAYOUT_LD, 8, 8), ask)},
    {"shapes that do not fit", CUBLAS_STATUS_INVALID_VALUE,
     WITH(set_layout(s->o.b, CUBLASLT_MATRIX_LAYOUT_ROWS, 24, 8), ask)},
    {"C unlike D", CUBLAS_STATUS_INVALID_VALUE, WITH(set_layout(s->o.c, CUBLASLT_MATRIX_LAYOUT_COLS, 7, 8), ask)},
    {"operands of two types", CUBLAS_STATUS_NOT_SUPPORTED,
     WITH(set_layout(s->o.a, CUBLASLT_MATRIX_LAYOUT_TYPE, CUDA_R_16F, 4), ask)},
    {"tf32 of bf16", CUBLAS_STATUS_NOT_SUPPORTED,
     WITH(set(s, CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, CUBLAS_COMPUTE_32F_FAST_TF32, 4), ask)},
    {"auxiliary stride not a multiple of 8", CUBLAS_STATUS_INVALID_VALUE,
     WITH(set(s, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 20, 8), ask)},
    {"no auxiliary stride", CUBLAS_STATUS_INVALID_VALUE, WITH(set(s, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, 0, 8), ask)},
    {"rows that are not whole 16 bytes", CUBLAS_STATUS_NOT_SUPPORTED,
     WITH(set_layout(s->o.a, CUBLASLT_MATRIX_LAYOUT_LD, 17, 8), ask)},
    {"bias that is not on 16 bytes", CUBLAS_STATUS_NOT_SUPPORTED,
     WITH(set(s, CUBLASLT_MATMUL_DESC_BIAS_POINTER, (int64_t)(intptr_t)(s->bias.device + 2), 8), ask)},
    {"too little alignment promised", CUBLAS_STATUS_NOT_SUPPORTED, [](Setting* s) {
         uint32_t alignment = 2;
         LT(cublasLtMatmulPreferenceSetAttribute(s->o.wish, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &alignment, 4));
         return ask(s);
     }},
    {"epilogue that is missing", CUBLAS_STATUS_NOT_SUPPORTED, [](Setting* s) {
         emulator::cublaslt_missing = CUBLASLT_EPILOGUE_GELU;
         cublasStatus_t status = ask(s);
         emulator::cublaslt_missing = 0;
         return status;
     }},
    {"algorithm of another problem", CUBLAS_STATUS_INVALID_VALUE,
     WITH(set(s, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS, 4), multiply)},
    {"no bias", CUBLAS_STATUS_INVALID_VALUE, WITH(set(s, CUBLASLT_MATMUL_DESC_BIAS_POINTER, 0, 8), multiply)},
    {"workspace too small", CUBLAS_STATUS_INVALID_VALUE, [](Setting* s) {
         if (s->result.workspaceSize == 0) return CUBLAS_STATUS_SUCCESS;
         return multiply_in(s, workspace, s->result.workspaceSize - 1);
     }},
    {"workspace that is not on 256 bytes", CUBLAS_STATUS_INVALID_VALUE, [](Setting* s) {
         return multiply_in(s, (char*)workspace + 64, workspace_bytes - 64);
     }},
};

// Mistakes that end the program.
static const struct {
    const char* name;
    cublasStatus_t (*deed)(Setting* s);
} diagnoses[] = {
    {"attribute that is not emulated", [](Setting* s) { return set(s, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, 0, 8); }},
    {"row order", WITH(set_layout(s->o.b, CUBLASLT_MATRIX_LAYOUT_ORDER, CUBLASLT_ORDER_ROW, 4), ask)},
    {"batch of matrices", WITH(set_layout(s->o.b, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 2, 4), ask)},
    {"type of 8 bits", WITH(set_layout(s->o.b, CUBLASLT_MATRIX_LAYOUT_TYPE, CUDA_R_8I, 4), ask)},
    {"alpha on the device", WITH(set(s, CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE, 4), ask)},
    {"epilogue of a bias gradient", WITH(set(s, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BGRADA, 4), ask)},
    {"pointer that is less aligned than promised", WITH(s->a.device += 2, multiply)},
    {"operand in host memory", WITH(s->a.device = s->a.host, multiply)},
    {"operand past its allocation", WITH(s->a.device += 5 * GUARD, multiply)},
    {"bias in host memory",
     WITH(set(s, CUBLASLT_MATMUL_DESC_BIAS_POINTER, (int64_t)(intptr_t)s->bias.host, 8), multiply)},
    {"result on an operand", WITH(s->d.device = s->b.device, multiply)},
    {"layout where an operation should be", WITH(s->o.operation = (cublasLtMatmulDesc_t)(void*)s->o.a, ask)},
    {"layout after its end", WITH(LT(cublasLtMatrixLayoutDestroy(s->o.b)), ask)},
    {"operation destroyed twice", [](Setting* s) {
         LT(cublasLtMatmulDescDestroy(s->o.operation));
         return cublasLtMatmulDescDestroy(s->o.operation);
     }},
    {"handle after its end", WITH(LT(cublasLtDestroy(handle)), multiply)},
};

enum { DIAGNOSIS = 86 };  // exit status

static void diagnose(const void* deed) {
    alarm(10);  // for a matmul that was not refused: its threads do not exist in this process
    Setting s = setting_make(RIGHT);
    LT(ask(&s));
    (*(cublasStatus_t(*const*)(Setting*))deed)(&s);
}

static void test_refusals(void) {
    for (const auto& r : refusals) {
        Setting s = setting_make(RIGHT);
        LT(ask(&s));
        cublasStatus_t status = r.deed(&s);
        check(status == r.status, "%-44s %s", r.name, cublasLtGetStatusString(status));
        CUDA(cudaStreamSynchronize(stream));
        setting_free(&s);
    }
    for (const auto& r : diagnoses) {
        Program p;
        program_start(&p, NULL, diagnose, &r.deed);
        programs_wait(&p, 1, 20e3);
        check(program_code(&p) == DIAGNOSIS, "%-44s exit status %d", r.name, program_code(&p));
        program_free(&p);
    }
}

// A matmul waits in its stream: with delayed streams, it sees what another stream does to its operand meanwhile.
static void test_order(void) {
    Setting s = setting_make(RIGHT);
    cudaStream_t other;
    unsigned char *zeros, *got = (unsigned char*)memory_allocate(s.d.bytes);
    need(got != NULL, "memory for a result");
    set(&s, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DEFAULT, 4);
    LT(ask(&s));
    CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CUDA(cudaMallocHost((void**)&zeros, s.a.bytes));
    memset(zeros, 0, s.a.bytes);
    CUDA(cudaStreamSynchronize(stream));
    LT(multiply(&s));
    CUDA(cudaMemcpyAsync(s.a.device, zeros, s.a.bytes, cudaMemcpyHostToDevice, other));
    CUDA(cudaStreamSynchronize(other));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemcpy(got, s.d.device, s.d.bytes, cudaMemcpyDeviceToHost));
    bool zero = true;
    for (size_t i = 0; i < 16 * 8; i++) zero = zero && gemm_load(got, DTYPE_BF16, i) == 0.0f;
    bool held_back = emulator::modes.delayed_streams && !emulator::modes.others_ahead;
    check(zero == held_back, "%-44s %s", "a product waits in its stream",
          zero ? "saw the later operand" : "saw the earlier one");
    CUDA(cudaFreeHost(zeros));
    CUDA(cudaStreamDestroy(other));
    free(got);
    setting_free(&s);
}

#endif

int main(void) {
    tests_begin("test_cublaslt");
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaMalloc(&workspace, workspace_bytes));
    LT(cublasLtCreate(&handle));
    test_products();
#ifdef EMULATED
    test_refusals();
    test_order();
#endif
    LT(cublasLtDestroy(handle));
    CUDA(cudaFree(workspace));
    CUDA(cudaStreamDestroy(stream));
    return tests_end();
}
