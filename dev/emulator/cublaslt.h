// cublaslt.h: the part of cuBLASLt that matmul.cuh uses, on the CPU.
//
//   1. objects    descriptors and their attributes
//   2. rules      what the library refuses
//   3. algorithms those that cublasLtMatmulAlgoGetHeuristic proposes
//   4. matmul     cublasLtMatmul
//
// Arguments are checked as the library checks them, and a little more strictly: an algorithm is valid only for exactly
// the problem that it was proposed for, pointers must have the promised alignment, and the workspace is overwritten
// with NaN, as the library may overwrite it. A call that the library would answer with an error status gets that
// status. Anything unknown to this file (attributes, orders, types, batches) ends the program and is named: nothing is
// skipped. The matmul itself is queued in the stream like a kernel.
//
// Not modeled: which shapes the real library has kernels for. A program must expect none, so this one has none for
// 16-bit matrices whose rows are not multiples of 16 bytes, and none for the epilogues in cublaslt_missing.

#ifndef EMULATOR_CUBLASLT_H
#define EMULATOR_CUBLASLT_H

#include "emulator.h"

#include "../../llmtrain/ops/gemm.h"

#include <cublasLt.h>

namespace emulator {

// Tests set it: a mask of cublasLtEpilogue_t for which there is no algorithm; CUBLASLT_EPILOGUE_DEFAULT too.
inline unsigned cublaslt_missing = 0;

// The same for algorithms, indexed by their number of parts less one: those that fail, those whose last element is
// wrong, and how much each delays an event recorded after it (emulated times mean nothing).
enum { CUBLASLT_ALGORITHMS = 4 };
inline unsigned cublaslt_refused = 0, cublaslt_wrong = 0;
inline double cublaslt_ms[CUBLASLT_ALGORITHMS];
inline size_t cublaslt_version = 130000;
inline size_t cublaslt_split_bytes = 0;  // of workspace that algorithms with several parts need besides

// ------------------------------------------------------------------------------------------------
// 1. Objects
//
// They are stored in the opaque structs of the library's header, and begin with their kind, so that a wrong pointer is
// detected. Destroyed ones stay until the end of the program, so that their use is detected, too.

inline std::vector<std::unique_ptr<void, void (*)(void*)>> cublaslt_destroyed;

const uint32_t DESTROYED_KIND = 0x44657374;

struct CublasltAttribute {
    int name;
    size_t offset, bytes;
};

#define EMULATOR_ATTRIBUTE(name, type, member) {name, offsetof(type, member), sizeof(type::member)}

struct CublasltHandle {
    static constexpr uint32_t KIND = 0x48616e64;
    static constexpr char NAME[] = "handle";
    uint32_t kind;
};

struct CublasltLayout {
    static constexpr uint32_t KIND = 0x4c61796f;
    static constexpr char NAME[] = "matrix layout";
    static const CublasltAttribute attributes[];
    uint32_t kind;
    int32_t type, order, batches;
    uint64_t rows, columns;
    int64_t stride, batch_stride;  // stride: the leading dimension
};

inline const CublasltAttribute CublasltLayout::attributes[] = {
    EMULATOR_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_TYPE, CublasltLayout, type),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_ORDER, CublasltLayout, order),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_ROWS, CublasltLayout, rows),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_COLS, CublasltLayout, columns),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_LD, CublasltLayout, stride),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, CublasltLayout, batches),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, CublasltLayout, batch_stride),
    {-1, 0, 0},
};

struct CublasltOperation {
    static constexpr uint32_t KIND = 0x4f706572;
    static constexpr char NAME[] = "matmul descriptor";
    static const CublasltAttribute attributes[];
    uint32_t kind;
    int32_t compute, scale_type, pointer_mode, transpose_a, transpose_b, transpose_c, aux_type, bias_type;
    uint32_t epilogue;
    const void* bias;
    void* aux;
    int64_t aux_stride;
};

inline const CublasltAttribute CublasltOperation::attributes[] = {
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, CublasltOperation, compute),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_DESC_SCALE_TYPE, CublasltOperation, scale_type),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_DESC_POINTER_MODE, CublasltOperation, pointer_mode),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_DESC_TRANSA, CublasltOperation, transpose_a),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_DESC_TRANSB, CublasltOperation, transpose_b),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_DESC_TRANSC, CublasltOperation, transpose_c),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_DESC_EPILOGUE, CublasltOperation, epilogue),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_DESC_BIAS_POINTER, CublasltOperation, bias),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CublasltOperation, bias_type),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, CublasltOperation, aux),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, CublasltOperation, aux_stride),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, CublasltOperation, aux_type),
    {-1, 0, 0},
};

struct CublasltPreference {
    static constexpr uint32_t KIND = 0x50726566;
    static constexpr char NAME[] = "matmul preference";
    static const CublasltAttribute attributes[];
    uint32_t kind, search, schemes;
    uint32_t alignment[4];  // of A, B, C, D
    uint64_t workspace;
};

inline const CublasltAttribute CublasltPreference::attributes[] = {
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_PREF_SEARCH_MODE, CublasltPreference, search),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CublasltPreference, workspace),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CublasltPreference, schemes),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CublasltPreference, alignment[0]),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CublasltPreference, alignment[1]),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CublasltPreference, alignment[2]),
    EMULATOR_ATTRIBUTE(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, CublasltPreference, alignment[3]),
    {-1, 0, 0},
};
#undef EMULATOR_ATTRIBUTE

// The contents of cublasLtMatmulAlgo_t: its problem, its requirements, and the number of parts that sums are split in.
struct CublasltAlgorithm {
    uint64_t problem, workspace;
    uint32_t alignment[4], parts;
};
static_assert(sizeof(CublasltAlgorithm) <= sizeof(cublasLtMatmulAlgo_t), "room for an algorithm");

// The object behind one of the library's pointers; ends the program if it is not one.
template <class Object>
inline Object* cublaslt_object(void* opaque) {
    Object* object = (Object*)opaque;
    if (object && object->kind == DESTROYED_KIND) die("cuBLASLt: the %s was destroyed", Object::NAME);
    if (object == nullptr || object->kind != Object::KIND) die("cuBLASLt: this is not a %s", Object::NAME);
    return object;
}

template <class Object, class Opaque>
inline cublasStatus_t cublaslt_create(Opaque** opaque, const Object& object) {
    if constexpr (!std::is_same_v<Object, CublasltHandle>)
        static_assert(sizeof(Object) <= sizeof(Opaque), "room for the object");
    if (opaque == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    *opaque = (Opaque*)malloc(sizeof object);
    if (*opaque == nullptr) return CUBLAS_STATUS_ALLOC_FAILED;
    memcpy((void*)*opaque, &object, sizeof object);
    return CUBLAS_STATUS_SUCCESS;
}

template <class Object>
inline cublasStatus_t cublaslt_destroy(void* opaque) {
    cublaslt_object<Object>(opaque)->kind = DESTROYED_KIND;
    std::lock_guard<DeviceLock> guard(runtime_lock);
    cublaslt_destroyed.emplace_back(opaque, free);
    return CUBLAS_STATUS_SUCCESS;
}

template <class Object>
inline cublasStatus_t cublaslt_set(void* opaque, int name, const void* value, size_t bytes) {
    Object* object = cublaslt_object<Object>(opaque);
    const CublasltAttribute* attribute = Object::attributes;
    while (attribute->name != name && attribute->name >= 0) attribute++;
    if (attribute->name < 0) die("cuBLASLt: attribute %d is not emulated", name);
    if (value == nullptr || bytes != attribute->bytes) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy((char*)object + attribute->offset, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

// ------------------------------------------------------------------------------------------------
// 2. Rules

struct CublasltProblem {
    CublasltOperation operation;
    CublasltLayout a, b, c, d;
    uint64_t length;  // of the sums
};

inline bool cublaslt_has_bias(uint32_t epilogue) { return epilogue & CUBLASLT_EPILOGUE_BIAS; }
inline bool cublaslt_has_aux(uint32_t epilogue) { return epilogue & 128; }  // the bit of all epilogues that end in AUX

inline size_t cublaslt_type_bytes(int32_t type) {
    if (type == CUDA_R_32F) return 4;
    if (type == CUDA_R_16BF || type == CUDA_R_16F) return 2;
    die("cuBLASLt: data type %d is not emulated", type);
}

inline Dtype cublaslt_gemm_type(int32_t type) {
    return type == CUDA_R_32F ? DTYPE_F32 : type == CUDA_R_16BF ? DTYPE_BF16 : DTYPE_F16;
}

// Elements of the bias that is added to the columns of D, or of the bias gradient (the sums of the columns of op(B))
// that is written; 0 if there is neither.
inline uint64_t cublaslt_bias_length(const CublasltProblem& p) {
    if (p.operation.epilogue == CUBLASLT_EPILOGUE_BGRADB) return p.d.columns;
    return cublaslt_has_bias(p.operation.epilogue) ? p.d.rows : 0;
}

// The types of the bias and of the auxiliary matrix are those of D unless they were set.
inline int32_t cublaslt_or_type_of_d(int32_t type, const CublasltProblem& p) { return type == -1 ? p.d.type : type; }

// Ends the program for what is not emulated; otherwise returns the library's status.
inline cublasStatus_t cublaslt_check(const CublasltProblem& p) {
    const CublasltOperation& o = p.operation;
    for (const CublasltLayout* layout : {&p.a, &p.b, &p.c, &p.d}) {
        cublaslt_type_bytes(layout->type);
        if (layout->order != CUBLASLT_ORDER_COL) die("cuBLASLt: matrix order %d is not emulated", layout->order);
        if (layout->batches != 1) die("cuBLASLt: a batch of %d matrices is not emulated", layout->batches);
        if (layout->rows == 0 || layout->columns == 0) return CUBLAS_STATUS_INVALID_VALUE;
        if (layout->stride < (int64_t)layout->rows) return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (o.pointer_mode != CUBLASLT_POINTER_MODE_HOST) die("cuBLASLt: pointer mode %d is not emulated", o.pointer_mode);
    if (o.compute != CUBLAS_COMPUTE_32F && o.compute != CUBLAS_COMPUTE_32F_FAST_TF32)
        die("cuBLASLt: compute type %d is not emulated", o.compute);
    for (int32_t transpose : {o.transpose_a, o.transpose_b})
        if (transpose != CUBLAS_OP_N && transpose != CUBLAS_OP_T)
            die("cuBLASLt: operation %d is not emulated", transpose);
    if (o.transpose_c != CUBLAS_OP_N) return CUBLAS_STATUS_NOT_SUPPORTED;
    const uint32_t epilogues[] = {CUBLASLT_EPILOGUE_DEFAULT,   CUBLASLT_EPILOGUE_BIAS,
                                  CUBLASLT_EPILOGUE_GELU,      CUBLASLT_EPILOGUE_GELU_BIAS,
                                  CUBLASLT_EPILOGUE_GELU_AUX,  CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
                                  CUBLASLT_EPILOGUE_DGELU,     CUBLASLT_EPILOGUE_BGRADB};
    if (std::find(std::begin(epilogues), std::end(epilogues), o.epilogue) == std::end(epilogues))
        die("cuBLASLt: epilogue %u is not emulated", o.epilogue);

    uint64_t a_rows = o.transpose_a ? p.a.columns : p.a.rows, b_columns = o.transpose_b ? p.b.rows : p.b.columns;
    uint64_t b_rows = o.transpose_b ? p.b.columns : p.b.rows;
    if (b_rows != p.length || p.d.rows != a_rows || p.d.columns != b_columns) return CUBLAS_STATUS_INVALID_VALUE;
    if (p.c.rows != p.d.rows || p.c.columns != p.d.columns) return CUBLAS_STATUS_INVALID_VALUE;

    // The table of types in the library's manual, for these three and float arithmetic.
    bool tf32 = o.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    if (o.scale_type != CUDA_R_32F || p.a.type != p.b.type || p.c.type != p.d.type ||
        (p.d.type != p.a.type && p.d.type != CUDA_R_32F) || (tf32 && p.a.type != CUDA_R_32F))
        return CUBLAS_STATUS_NOT_SUPPORTED;

    if (cublaslt_has_aux(o.epilogue)) {
        if (o.aux_stride < (int64_t)p.d.rows || o.aux_stride % 8 != 0) return CUBLAS_STATUS_INVALID_VALUE;
        if (cublaslt_or_type_of_d(o.aux_type, p) != p.d.type) return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (cublaslt_bias_length(p) > 0 && cublaslt_or_type_of_d(o.bias_type, p) != p.d.type)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return CUBLAS_STATUS_SUCCESS;
}

inline CublasltProblem cublaslt_problem(cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                                        cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
    CublasltProblem p = {*cublaslt_object<CublasltOperation>(operation),
                         *cublaslt_object<CublasltLayout>(a),
                         *cublaslt_object<CublasltLayout>(b),
                         *cublaslt_object<CublasltLayout>(c),
                         *cublaslt_object<CublasltLayout>(d),
                         0};
    p.length = p.operation.transpose_a ? p.a.rows : p.a.columns;
    return p;
}

inline bool cublaslt_aligned(const void* pointer, size_t bytes) { return (uintptr_t)pointer % bytes == 0; }

// ------------------------------------------------------------------------------------------------
// 3. Algorithms
//
// The first computes a sum in one part, the next ones in 2, 3 and 4 parts, each rounded to a float: other bits. They
// support any layout, but promise nothing beyond the request.

// A hash of all that an algorithm is bound to; the pointers in the operation may change from call to call.
inline uint64_t cublaslt_fingerprint(const CublasltProblem& p) {
    const CublasltOperation& o = p.operation;
    uint64_t parts[32], count = 0;
    for (int32_t part : {o.compute, o.scale_type, o.transpose_a, o.transpose_b, o.aux_type, o.bias_type})
        parts[count++] = (uint64_t)part;
    parts[count++] = o.epilogue;
    parts[count++] = (uint64_t)o.aux_stride;
    for (const CublasltLayout* layout : {&p.a, &p.b, &p.c, &p.d})
        for (uint64_t part : {(uint64_t)layout->type, layout->rows, layout->columns, (uint64_t)layout->stride})
            parts[count++] = part;
    return hash_bytes(parts, count * sizeof parts[0]);
}

// Whether there is an algorithm: tensor cores take rows of multiples of 16 bytes, aligned to 16 bytes.
inline bool cublaslt_available(const CublasltProblem& p, const CublasltPreference& wish) {
    const CublasltOperation& o = p.operation;
    const CublasltLayout* layouts[] = {&p.a, &p.b, &p.c, &p.d};
    if (o.epilogue & cublaslt_missing) return false;
    for (int i = 0; i < 4; i++) {
        size_t bytes = cublaslt_type_bytes(layouts[i]->type);
        if (wish.alignment[i] < bytes) return false;
        if (p.a.type == CUDA_R_32F) continue;
        if (wish.alignment[i] < 16 || (size_t)layouts[i]->stride * bytes % 16 != 0) return false;
    }
    return cublaslt_aligned(o.bias, 16) && cublaslt_aligned(o.aux, 16);
}

inline bool cublaslt_runs(const CublasltAlgorithm& algorithm) {
    return algorithm.parts - 1 < CUBLASLT_ALGORITHMS && !(cublaslt_refused >> (algorithm.parts - 1) & 1);
}

// The first requests memory for a sum split in two, if it may, and if sums are long; the others request memory for
// their parts.
inline uint64_t cublaslt_workspace(const CublasltProblem& p, const CublasltPreference& wish, uint32_t parts) {
    uint64_t bytes = p.d.rows * p.d.columns * sizeof(float);
    if (parts > 1) return parts * bytes + cublaslt_split_bytes;
    bool split = p.length > p.d.rows && (wish.schemes & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    return split && bytes <= wish.workspace ? bytes : 0;
}

// ------------------------------------------------------------------------------------------------
// 4. Matmul
//
//     D = epilogue(alpha op(A) op(B) + beta C)
//
// The library's column-major D is a row-major D^T = op(B)^T op(A)^T, which gemm.h computes in float; the epilogue is a
// loop over the elements.

// Ends the program unless the whole matrix lies in one allocation on the device.
inline void cublaslt_reach(const char* what, const void* data, int32_t type, int64_t stride, uint64_t rows,
                           uint64_t columns) {
    size_t elements = (columns - 1) * (size_t)stride + rows;
    check_end(what, data, elements * cublaslt_type_bytes(type), true);
}

// A float as the tensor cores read it.
inline float cublaslt_tf32(float x) { return float_from_bits(bits_of_tf32(bits_from_float(x))); }

struct CublasltCall {
    CublasltProblem problem;
    const void *a, *b, *c;
    void *d, *workspace;
    size_t workspace_bytes;
    float alpha, beta;
    uint32_t parts;
};

// An operand for gemm, which takes its transpose: op(A)^T.
inline GemmMatrix cublaslt_operand(const CublasltLayout& layout, const void* data, bool transpose, bool tf32,
                                   float** copy) {
    *copy = nullptr;
    if (tf32) {
        size_t count = (size_t)layout.stride * (layout.columns - 1) + layout.rows;
        *copy = (float*)memory_allocate(count * sizeof(float));
        if (*copy == nullptr) die("cuBLASLt: out of memory for a copy of an operand");
        for (size_t i = 0; i < layout.columns; i++)
            for (size_t j = 0; j < layout.rows; j++) {
                size_t at = i * (size_t)layout.stride + j;
                (*copy)[at] = cublaslt_tf32(((const float*)data)[at]);
            }
        data = *copy;
    }
    return gemm_matrix(data, cublaslt_gemm_type(layout.type), (size_t)layout.stride, transpose);
}

// The library's GELU is the form with tanh.
inline float cublaslt_gelu(float x) {
    double u = sqrt(2.0 / M_PI) * ((double)x + 0.044715 * (double)x * (double)x * (double)x);
    return (float)(0.5 * (double)x * (1.0 + tanh(u)));
}

inline float cublaslt_gelu_slope(float value) {
    double x = (double)value, t = tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x));
    return (float)(0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * x * x));
}

inline void cublaslt_run(const CublasltCall& call) {
    const CublasltProblem& p = call.problem;
    const CublasltOperation& o = p.operation;
    bool tf32 = o.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    size_t rows = p.d.rows, columns = p.d.columns;
    float *sums = (float*)memory_allocate(2 * rows * columns * sizeof(float)), *part_sums = sums + rows * columns;
    float *a_copy, *b_copy;
    if (sums == nullptr) die("cuBLASLt: out of memory for a product of %zu x %zu", rows, columns);
    if (call.workspace_bytes) memset(call.workspace, 0xff, call.workspace_bytes);
    GemmMatrix b = cublaslt_operand(p.b, call.b, o.transpose_b != 0, tf32, &b_copy);
    GemmMatrix a = cublaslt_operand(p.a, call.a, o.transpose_a != 0, tf32, &a_copy);
    GemmMatrix b_part = b, a_part = a;
    for (uint64_t part = 0; part < call.parts; part++) {
        uint64_t first = p.length * part / call.parts, end = p.length * (part + 1) / call.parts;
        b_part.data = (const char*)b.data + first * (b.transposed ? b.stride : 1) * dtype_bytes(b.type);
        a_part.data = (const char*)a.data + first * (a.transposed ? 1 : a.stride) * dtype_bytes(a.type);
        // Starts from zero: continuing the previous part's sum would give the bits of one part.
        gemm_compute(part ? part_sums : sums, DTYPE_F32, rows, false, b_part, a_part, nullptr, DTYPE_F32, columns, rows,
                     end - first);
        for (size_t i = 0; part && i < rows * columns; i++) sums[i] += part_sums[i];
    }
    events_later_ms += cublaslt_ms[call.parts - 1];

    Dtype type = cublaslt_gemm_type(p.d.type);
    for (size_t j = 0; j < columns; j++) {
        for (size_t i = 0; i < rows; i++) {
            size_t at = j * (size_t)p.d.stride + i, aux_at = j * (size_t)o.aux_stride + i;
            float x = call.alpha * sums[j * rows + i];
            if (call.beta != 0.0f) x += call.beta * gemm_load(call.c, type, j * (size_t)p.c.stride + i);
            if (cublaslt_has_bias(o.epilogue)) x += gemm_load(o.bias, type, i);
            if (o.epilogue == CUBLASLT_EPILOGUE_DGELU) x *= cublaslt_gelu_slope(gemm_load(o.aux, type, aux_at));
            else if (cublaslt_has_aux(o.epilogue)) gemm_save(o.aux, type, aux_at, x);
            if (o.epilogue & CUBLASLT_EPILOGUE_GELU) x = cublaslt_gelu(x);
            bool last = j + 1 == columns && i + 1 == rows;
            if (last && cublaslt_wrong >> (call.parts - 1) & 1) x += 8.0f;
            gemm_save(call.d, type, at, x);
        }
    }
    for (size_t j = 0; o.epilogue == CUBLASLT_EPILOGUE_BGRADB && j < columns; j++) {
        float sum = 0.0f;
        for (size_t k = 0; k < p.length; k++)
            sum += gemm_load(call.b, cublaslt_gemm_type(p.b.type),
                             o.transpose_b ? k * (size_t)p.b.stride + j : j * (size_t)p.b.stride + k);
        gemm_save((void*)o.bias, type, j, sum);
    }
    free(sums);
    free(a_copy);
    free(b_copy);
}

}  // namespace emulator

// ------------------------------------------------------------------------------------------------
// The functions of the library

#define EMULATOR_CUBLASLT extern "C" inline cublasStatus_t CUBLASWINAPI

EMULATOR_CUBLASLT cublasLtCreate(cublasLtHandle_t* handle) {
    return emulator::cublaslt_create(handle, emulator::CublasltHandle{emulator::CublasltHandle::KIND});
}

EMULATOR_CUBLASLT cublasLtDestroy(cublasLtHandle_t handle) {
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    return emulator::cublaslt_destroy<emulator::CublasltHandle>(handle);
}

extern "C" inline const char* CUBLASWINAPI cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    default: return "another cuBLAS status";
    }
}

EMULATOR_CUBLASLT cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                             uint64_t columns, int64_t stride) {
    using Object = emulator::CublasltLayout;
    Object object = {Object::KIND, type, CUBLASLT_ORDER_COL, 1, rows, columns, stride, 0};
    return emulator::cublaslt_create(layout, object);
}

EMULATOR_CUBLASLT cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    return emulator::cublaslt_destroy<emulator::CublasltLayout>(layout);
}

EMULATOR_CUBLASLT cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t name,
                                                   const void* value, size_t bytes) {
    return emulator::cublaslt_set<emulator::CublasltLayout>(layout, name, value, bytes);
}

EMULATOR_CUBLASLT cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute,
                                           cudaDataType_t scale_type) {
    emulator::CublasltOperation object = {};
    object.kind = emulator::CublasltOperation::KIND;
    object.compute = compute;
    object.scale_type = scale_type;
    object.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    object.aux_type = object.bias_type = -1;
    return emulator::cublaslt_create(operation, object);
}

EMULATOR_CUBLASLT cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
    return emulator::cublaslt_destroy<emulator::CublasltOperation>(operation);
}

EMULATOR_CUBLASLT cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t name,
                                                 const void* value, size_t bytes) {
    return emulator::cublaslt_set<emulator::CublasltOperation>(operation, name, value, bytes);
}

EMULATOR_CUBLASLT cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    return emulator::cublaslt_create(
        preference, emulator::CublasltPreference{emulator::CublasltPreference::KIND, CUBLASLT_SEARCH_BEST_FIT,
                                                 CUBLASLT_REDUCTION_SCHEME_MASK, {256, 256, 256, 256}, 0});
}

EMULATOR_CUBLASLT cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return emulator::cublaslt_destroy<emulator::CublasltPreference>(preference);
}

EMULATOR_CUBLASLT cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                       cublasLtMatmulPreferenceAttributes_t name, const void* value,
                                                       size_t bytes) {
    return emulator::cublaslt_set<emulator::CublasltPreference>(preference, name, value, bytes);
}

EMULATOR_CUBLASLT cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                                 cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                                 cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                                 cublasLtMatmulPreference_t preference, int wanted,
                                                 cublasLtMatmulHeuristicResult_t results[], int* found) {
    using namespace emulator;
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    cublaslt_object<CublasltHandle>(handle);
    if (wanted <= 0 || results == nullptr || found == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    *found = 0;
    CublasltProblem problem = cublaslt_problem(operation, a, b, c, d);
    const CublasltPreference& wish = *cublaslt_object<CublasltPreference>(preference);
    if (wish.search != CUBLASLT_SEARCH_BEST_FIT) die("cuBLASLt: search mode %u is not emulated", wish.search);
    cublasStatus_t status = cublaslt_check(problem);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (!cublaslt_available(problem, wish)) return CUBLAS_STATUS_NOT_SUPPORTED;

    for (uint32_t parts = 1; parts <= CUBLASLT_ALGORITHMS && *found < wanted; parts++) {
        uint64_t bytes = cublaslt_workspace(problem, wish, parts);
        CublasltAlgorithm algorithm = {cublaslt_fingerprint(problem), bytes, {}, parts};
        if (parts > 1 && (algorithm.workspace > wish.workspace || parts > problem.length)) break;
        memcpy(algorithm.alignment, wish.alignment, sizeof algorithm.alignment);
        cublasLtMatmulHeuristicResult_t* result = &results[(*found)++];
        memset((void*)result, 0, sizeof *result);
        memcpy(result->algo.data, &algorithm, sizeof algorithm);
        result->workspaceSize = algorithm.workspace;
        result->state = CUBLAS_STATUS_SUCCESS;
        result->wavesCount = 1.0f;
    }
    return CUBLAS_STATUS_SUCCESS;
}

EMULATOR_CUBLASLT cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                          cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                          cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t* algo,
                                          cublasLtMatmulHeuristicResult_t* result) {
    using namespace emulator;
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    cublaslt_object<CublasltHandle>(handle);
    if (algo == nullptr || result == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    CublasltProblem problem = cublaslt_problem(operation, a, b, c, d);
    cublasStatus_t status = cublaslt_check(problem);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    CublasltAlgorithm algorithm;
    memcpy(&algorithm, algo->data, sizeof algorithm);
    if (algorithm.problem != cublaslt_fingerprint(problem)) return CUBLAS_STATUS_INVALID_VALUE;
    if (!cublaslt_runs(algorithm)) return CUBLAS_STATUS_NOT_SUPPORTED;
    result->workspaceSize = algorithm.workspace;
    result->state = CUBLAS_STATUS_SUCCESS;
    result->wavesCount = 1.0f;
    return CUBLAS_STATUS_SUCCESS;
}

extern "C" inline size_t CUBLASWINAPI cublasLtGetVersion(void) { return emulator::cublaslt_version; }

EMULATOR_CUBLASLT cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha,
                                 const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                                 cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                                 cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                                 const cublasLtMatmulAlgo_t* algo, void* workspace, size_t workspace_bytes,
                                 cudaStream_t stream) {
    using namespace emulator;
    Entry entry(__func__);
    if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    cublaslt_object<CublasltHandle>(handle);
    if (algo == nullptr) die("cuBLASLt: cublasLtMatmul without an algorithm is not emulated");
    for (const void* pointer : {alpha, beta, a, b, (const void*)d})
        if (pointer == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    CublasltAlgorithm algorithm;
    memcpy(&algorithm, algo->data, sizeof algorithm);
    CublasltCall call = {cublaslt_problem(operation, a_layout, b_layout, c_layout, d_layout), a, b, c, d, workspace,
                         algorithm.workspace, *(const float*)alpha, *(const float*)beta, algorithm.parts};
    const CublasltOperation& o = call.problem.operation;
    cublasStatus_t status = cublaslt_check(call.problem);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (algorithm.problem != cublaslt_fingerprint(call.problem)) return CUBLAS_STATUS_INVALID_VALUE;
    if (!cublaslt_runs(algorithm)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (workspace_bytes < algorithm.workspace) return CUBLAS_STATUS_INVALID_VALUE;
    if (workspace_bytes > 0 && (workspace == nullptr || !cublaslt_aligned(workspace, 256)))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (call.beta != 0.0f && c == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    if (c == d && call.problem.c.stride != call.problem.d.stride) return CUBLAS_STATUS_INVALID_VALUE;
    if (cublaslt_bias_length(call.problem) > 0 && o.bias == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    if (cublaslt_has_aux(o.epilogue) && o.aux == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
    if (d == a || d == b) die("cuBLASLt: the result lies on an operand");

    // The real library would fail on these later, or never.
    const void* pointers[] = {a, b, call.beta != 0.0f ? c : d, d};
    const CublasltLayout* layouts[] = {&call.problem.a, &call.problem.b, &call.problem.c, &call.problem.d};
    const char* const names[] = {"matrix A", "matrix B", "matrix C", "matrix D"};
    for (int i = 0; i < 4; i++) {
        if (!cublaslt_aligned(pointers[i], algorithm.alignment[i]))
            die("cuBLASLt: %s is at %p, but the algorithm was promised %u bytes of alignment", names[i], pointers[i],
                algorithm.alignment[i]);
        const CublasltLayout& layout = *layouts[i];
        cublaslt_reach(names[i], pointers[i], layout.type, layout.stride, layout.rows, layout.columns);
    }
    const CublasltLayout& result = call.problem.d;
    const uint64_t bias_length = cublaslt_bias_length(call.problem);
    if (bias_length > 0) cublaslt_reach("bias", o.bias, result.type, 0, bias_length, 1);
    if (cublaslt_has_aux(o.epilogue))
        cublaslt_reach("auxiliary matrix", o.aux, result.type, o.aux_stride, result.rows, result.columns);
    if (algorithm.workspace > 0) check_end("workspace", workspace, algorithm.workspace, true);
    if (bias_length > 0 && !cublaslt_aligned(o.bias, 16)) die("cuBLASLt: the bias is not on 16 bytes");
    if (cublaslt_has_aux(o.epilogue) && !cublaslt_aligned(o.aux, 16))
        die("cuBLASLt: the auxiliary matrix is not on 16 bytes");

    if (modes.launches) {
        fprintf(launches_file(), "{\"matmul\": [%zu, %zu, %zu], \"bytes\": [%zu, %zu, %zu, %zu], \"transposed\": %d, "
                "\"epilogue\": %u, \"beta\": %g}\n", (size_t)result.rows, (size_t)result.columns,
                (size_t)call.problem.length,
                cublaslt_type_bytes(call.problem.a.type), cublaslt_type_bytes(call.problem.b.type),
                cublaslt_type_bytes(call.problem.c.type), cublaslt_type_bytes(result.type),
                o.transpose_a != CUBLAS_OP_N, o.epilogue, call.beta);
        return CUBLAS_STATUS_SUCCESS;
    }
    enqueue(stream, [call] { cublaslt_run(call); }, "cublasLtMatmul", call_place);
    return CUBLAS_STATUS_SUCCESS;
}

#undef EMULATOR_CUBLASLT

#define cublasLtMatmul(...) EMULATOR_CALL(cublasLtMatmul(__VA_ARGS__))  // notes the place of the call, for reports

#endif  // EMULATOR_CUBLASLT_H
