// matmul_choice.cuh: which cuBLASLt algorithm each matmul uses, from a file that build/tune has written.
//
//   matmul_choices_open("h200.json", true, stream, &error)      before the first matmul: its algorithms become plans
//
//   MatmulChoices c = {gpu, version, choices, count};
//   matmul_choices_write(&c, "h200.json", &error) && matmul_choices_read(&c, "h200.json", &error);
//   matmul_choices_free(&c);
//
// Without a file a matmul takes the library's first proposal. Another may be faster, but it adds in a different order
// and so gives different bits: if each run timed them and chose for itself, runs would not be reproducible. So the
// choice is made once and kept: the same file gives the same bits. Other shapes still take the first proposal.
//
// An algorithm is 64 bytes that only one version of the library understands, and it was timed on one kind of GPU. A
// file for another version or GPU is reported and not used. A damaged file is refused: it ends in a checksum.

#ifndef LLMTRAIN_MATMUL_CHOICE_CUH
#define LLMTRAIN_MATMUL_CHOICE_CUH

#include "files.h"
#include "json.h"
#include "../ops/matmul.cuh"

// ------------------------------------------------------------------------------------------------
// 1. File
//
//   {
//     "format": "llmtrain matmul algorithms 2",
//     "gpu": "NVIDIA H200",
//     "cublaslt": 130100,
//     "algorithms": [
//       {"kind": "matmul_forward", "bias": true, "dtype": "bf16", "tf32": false, "M": 65536, "N": 2304, "K": 768,
//        "workspace": 0, "alignment": 16, "algorithm": "128 hexadecimal digits"},
//       ...
//     ],
//     "checksum": "16 hexadecimal digits"
//   }

typedef struct {
    MatmulShape shape;
    uint64_t workspace;  // bytes
    uint64_t alignment;  // of its arrays, in bytes
    cublasLtMatmulAlgo_t algorithm;
} MatmulChoice;

static_assert(sizeof(MatmulChoice) == sizeof(MatmulShape) + 80, "it is hashed as bytes, so it has no gaps");

typedef struct {
    char gpu[256];
    uint64_t version;       // of cuBLASLt
    MatmulChoice* choices;  // (count), owned
    size_t count;
} MatmulChoices;

#define MATMUL_CHOICES_FORMAT "llmtrain matmul algorithms 2"
enum { MATMUL_CHOICES_BYTES_MAX = 1 << 24, MATMUL_WORDS = sizeof(cublasLtMatmulAlgo_t) / 8 };
enum { MATMUL_WORKSPACE_MAX = 1 << 30 };  // bytes

static inline void matmul_choices_free(MatmulChoices* c) {
    free(c->choices);
    memset(c, 0, sizeof *c);
}

static inline uint64_t matmul_choices_checksum(const MatmulChoices* c) {
    Hash hash = hash_begin(c->version);
    hash_add(&hash, c->gpu, strlen(c->gpu));
    hash_add(&hash, c->choices, c->count * sizeof *c->choices);
    return hash_end(&hash);
}

static inline void matmul_choice_write(JsonWriter* w, const MatmulChoice* choice) {
    char digits[16 * MATMUL_WORDS + 1];
    const MatmulShape* s = &choice->shape;
    for (size_t i = 0; i < MATMUL_WORDS; i++)
        snprintf(digits + 16 * i, 17, "%016llx", (unsigned long long)choice->algorithm.data[i]);
    json_write_begin(w, '{');
    json_member_string(w, "kind", matmul_names[s->kind]);
    json_member_bool(w, "bias", s->bias);
    json_member_string(w, "dtype", DTYPES[s->type].name);
    json_member_bool(w, "tf32", s->tf32);
    json_member_u64(w, "M", s->M);
    json_member_u64(w, "N", s->N);
    json_member_u64(w, "K", s->K);
    json_member_u64(w, "workspace", choice->workspace);
    json_member_u64(w, "alignment", choice->alignment);
    json_member_string(w, "algorithm", digits);
    json_write_end(w, '}');
}

static inline bool matmul_choices_write(const MatmulChoices* c, const char* path, Error* error) {
    JsonWriter w;
    memset(&w, 0, sizeof w);
    w.line_depth = 2;
    json_write_begin(&w, '{');
    json_member_string(&w, "format", MATMUL_CHOICES_FORMAT);
    json_member_string(&w, "gpu", c->gpu);
    json_member_u64(&w, "cublaslt", c->version);
    json_write_key(&w, "algorithms");
    json_write_begin(&w, '[');
    for (size_t i = 0; i < c->count; i++) matmul_choice_write(&w, &c->choices[i]);
    json_write_end(&w, ']');
    json_member_hash(&w, "checksum", matmul_choices_checksum(c));
    json_write_end(&w, '}');
    json_put(&w, "\n", 1);
    bool ok = json_write_done(&w, error) && file_write_atomic(path, w.text, w.bytes, error);
    json_writer_free(&w);
    return ok;
}

// The matmul kind with a name, MATMUL_KINDS if there is none; and the dtype, DTYPE_COUNT if matmuls do not take it.
enum { MATMUL_KINDS = sizeof matmul_names / sizeof matmul_names[0] };

static inline uint32_t matmul_kind_find(const char* name) {
    uint32_t kind = 0;
    while (kind < MATMUL_KINDS && strcmp(matmul_names[kind], name) != 0) kind++;
    return kind;
}

static inline Dtype matmul_type_find(const char* name) {
    static const Dtype types[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    for (int i = 0; i < 3; i++)
        if (strcmp(DTYPES[types[i]].name, name) == 0) return types[i];
    return DTYPE_COUNT;
}

// False unless the entry has the form that matmul_choice_write writes.
static inline bool matmul_choice_read(MatmulChoice* choice, const Json* json, uint32_t node) {
    char kind[40], type[8], digits[16 * MATMUL_WORDS + 1];
    bool bias, tf32;
    MatmulShape* s = &choice->shape;
    if (!json_string(json, json_get(json, node, "kind"), kind, sizeof kind) ||
        !json_string(json, json_get(json, node, "dtype"), type, sizeof type) ||
        !json_bool(json, json_get(json, node, "bias"), &bias) ||
        !json_bool(json, json_get(json, node, "tf32"), &tf32) ||
        !json_u64(json, json_get(json, node, "M"), &s->M) || !json_u64(json, json_get(json, node, "N"), &s->N) ||
        !json_u64(json, json_get(json, node, "K"), &s->K) ||
        !json_u64(json, json_get(json, node, "workspace"), &choice->workspace) ||
        !json_u64(json, json_get(json, node, "alignment"), &choice->alignment) ||
        !json_string(json, json_get(json, node, "algorithm"), digits, sizeof digits))
        return false;
    s->kind = matmul_kind_find(kind);
    s->type = (uint16_t)matmul_type_find(type);
    s->bias = bias;
    s->tf32 = tf32;
    for (size_t i = 0; i < MATMUL_WORDS; i++) {
        char word[17];
        unsigned long long bits = 0;
        snprintf(word, sizeof word, "%.16s", digits + 16 * i);
        if (strspn(word, "0123456789abcdef") != 16 || sscanf(word, "%llx", &bits) != 1) return false;
        choice->algorithm.data[i] = bits;
    }
    return s->kind < MATMUL_KINDS && s->type < DTYPE_COUNT && s->M - 1 < UINT32_MAX && s->N - 1 < UINT32_MAX &&
           s->K - 1 < UINT32_MAX && choice->workspace <= MATMUL_WORKSPACE_MAX &&
           choice->alignment >= MATMUL_ALIGNMENT && 256 % choice->alignment == 0;
}

static inline bool matmul_choices_parse(MatmulChoices* c, const Json* json, const char* path, Error* error) {
    char format[64] = "";
    uint32_t list = json_get(json, 0, "algorithms");
    json_string(json, json_get(json, 0, "format"), format, sizeof format);
    if (strcmp(format, MATMUL_CHOICES_FORMAT) != 0)
        return fail_with(error, "%.600s is not a file of matmul algorithms; write one with build/tune", path);
    c->choices = (MatmulChoice*)memory_allocate(json_count(json, list) * sizeof(MatmulChoice));
    if (c->choices == NULL) return fail_memory(error, path, json_count(json, list) * sizeof(MatmulChoice));
    bool ok = json_string(json, json_get(json, 0, "gpu"), c->gpu, sizeof c->gpu) &&
              json_u64(json, json_get(json, 0, "cublaslt"), &c->version) && json_is(json, list, JSON_ARRAY);
    for (uint32_t i = json_first(json, list); ok && i != JSON_NONE; i = json_next(json, i))
        ok = matmul_choice_read(&c->choices[c->count++], json, i);
    ok = ok && json_hash_is(json, json_get(json, 0, "checksum"), matmul_choices_checksum(c));
    return ok || fail_with(error, "%.600s is damaged; write it again with build/tune", path);
}

// The caller frees *c with matmul_choices_free; after a failure there is nothing to free.
static inline bool matmul_choices_read(MatmulChoices* c, const char* path, Error* error) {
    Json json;
    char* text;
    size_t bytes;
    memset(c, 0, sizeof *c);
    if (!file_read(path, MATMUL_CHOICES_BYTES_MAX, &text, &bytes, error)) return false;
    bool parsed = json_parse(&json, text, bytes, path, error);
    bool ok = parsed && matmul_choices_parse(c, &json, path, error);
    if (parsed) json_free(&json);
    if (!ok) matmul_choices_free(c);
    free(text);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 2. Plans

// The inputs of an algorithm's choice besides the shape.
static inline void matmul_choices_here(MatmulChoices* c) {
    struct cudaDeviceProp properties;
    int device = 0;
    memset(c, 0, sizeof *c);
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    snprintf(c->gpu, sizeof c->gpu, "%s", properties.name);
    c->version = cublasLtGetVersion();
}

// Makes a plan with this algorithm. Returns false, and does nothing, if it does not run here or the shape has a plan.
static inline bool matmul_choice_use(struct Matmul* matmul, const MatmulChoice* choice) {
    cublasLtMatmulHeuristicResult_t result;
    MatmulPlan plan = matmul_plan_describe(choice->shape, choice->alignment);
    memset(&result, 0, sizeof result);
    cublasStatus_t status = cublasLtMatmulAlgoCheck(matmul->handle, plan.operation, plan.first, plan.second, plan.out,
                                                    plan.out, &choice->algorithm, &result);
    bool known = matmul_plan_find(matmul->plans, matmul->capacity, &choice->shape)->taken;
    size_t allowed = max_size(matmul_workspace, choice->workspace);
    bool runs = status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= allowed && !known;
    if (runs) matmul_plan_take(&plan, &choice->algorithm, result.workspaceSize);
    if (runs) matmul_plan_add(matmul, plan);
    else matmul_plan_free(&plan);
    return runs;
}

// The workspace in bytes that the algorithms of the file at `path` need, at most; 0: there is no file, path is NULL.
static inline bool matmul_choices_workspace(const char* path, size_t* bytes, Error* error) {
    MatmulChoices c;
    *bytes = 0;
    if (path == NULL) return true;
    if (!matmul_choices_read(&c, path, error)) return false;
    for (size_t i = 0; i < c.count; i++) *bytes = max_size(*bytes, c.choices[i].workspace);
    matmul_choices_free(&c);
    return true;
}

// Puts the algorithms of the file at `path` into the stream's table of plans; NULL: there is no file. If `tells`,
// reports on standard error how many are used. False if the file cannot be read, or is damaged.
static inline bool matmul_choices_open(const char* path, bool tells, Stream stream, Error* error) {
    MatmulChoices c, here;
    size_t used = 0;
    struct Matmul* matmul = matmul_state(stream);  // now: making the library's handle may wait for kernels that run
    if (path == NULL) return true;
    if (!matmul_choices_read(&c, path, error)) return false;
    matmul_choices_here(&here);
    bool fits = strcmp(c.gpu, here.gpu) == 0 && c.version == here.version;
    if (fits) {
        for (size_t i = 0; i < c.count; i++) used += matmul_choice_use(matmul, &c.choices[i]);
        matmul->chosen = matmul_choices_checksum(&c);
    }
    if (tells && !fits)
        say(stderr, "%.600s is for %s and cuBLASLt %llu, but this machine has %s and %llu: its matmul algorithms "
            "are not used; write another with build/tune", path, c.gpu, (unsigned long long)c.version, here.gpu,
            (unsigned long long)here.version);
    if (tells && fits)
        say(stderr, "%.600s: %zu of %zu matmul algorithms are used%s", path, used, c.count,
            used < c.count ? "; the others do not run here: cuBLASLt's first proposals replace them" : "");
    matmul_choices_free(&c);
    return true;
}

// A checksum of the file's algorithms that are in use; 0: none are.
static inline uint64_t matmul_choices_hash(Stream stream) { return stream->matmul ? stream->matmul->chosen : 0; }

#endif  // LLMTRAIN_MATMUL_CHOICE_CUH
