// gemm.h: GEMM, matrix multiplication, for the CPU backend.
//
//     gemm_compute(out, DTYPE_F32, N, false, x, w, bias, DTYPE_F32, M, N, K);      // out = x w^T + bias
//
//   1. choice      what this processor has, and workspaces
//   2. matmul      the blocked loops
//
// The kernel in plain C is in gemm_portable.h, those for AVX2, AVX-512 and AMX are in gemm_x86.h, that for BFMMLA in
// gemm_arm.h.
//
// The algorithm is that of "Anatomy of High-Performance Matrix Multiplication" (Goto, van de Geijn, 2008), with the
// roles of the operands exchanged. A processor multiplies far faster than memory delivers operands, so each operand is
// copied once into the order in which it will be read (packed), and used many times from a cache:
//
//     for each task: some rows of a block of out              independent of all others, one thread each
//         for each k block (384 long, or all of k if then the whole of B fits)
//             pack B (k block x cols), if it is not there     stays in the L2 cache, or near it in the L3 cache
//             for each group of 48 rows
//                 pack A (48 x k block)
//                 for each panel of 12 rows                   384 of k at a time stay in the L1 cache: 18 KiB
//                     for each panel of 32 columns
//                         12 x 32 sums in registers = A panel x B panel
//                         add them to out
//
// Traffic in elements per multiplication-addition: the registers take 1/32 from L1 (A) and 1/12 from L2 (B); out is
// read and written once per k block, 2/384; a task packs its part of A once, 1/cols, and of B once, 1/rows. With tasks
// of a few hundred rows and columns memory delivers one element for 100 multiplications or more. A thread's tasks lie
// in neighboring rows: it mostly reads the rows of A that it wrote itself, in the operation before.
//
// An element of out is one sum in the order of k, by fused multiply-adds, that starts from what is there already: the
// old out, the bias, or 0. So for floats its bits depend neither on the number of threads nor on the kernel. (Kernels
// that multiply pairs of bfloat16 add two products at a time, each in its own way.) Ragged edges are packed with zeros;
// a tile there is computed whole, or its first half if no more is needed, and stored in part.
//
// A few rows (generating text) are multiplied differently: memory is the bound then, so B is read once, unpacked, and
// 16 columns of it at a time are transposed in registers. The sums are the same, to the bit. (AMX and BFMMLA, which add
// in their own order, leave a few rows to the kernel for floats.)

#ifndef LLMTRAIN_GEMM_H
#define LLMTRAIN_GEMM_H

#include "base.h"
#include "gemm_arm.h"
#include "gemm_portable.h"
#if defined(__x86_64__) && defined(__linux__) && !defined(__CUDACC__)  // nvcc does not know all of these intrinsics
#include "gemm_x86.h"
#endif
#ifdef __APPLE__
#include "gemm_apple.h"
#endif

#include <pthread.h>

// ------------------------------------------------------------------------------------------------
// 1. Choice
//
// Made once per process, by what the processor and the system can do, never by a measurement: two runs on one machine
// must give the same bits. Each thread that computes owns a workspace, which is allocated at its first matmul and freed
// when the thread ends.

// The best kernels that a build may use: make ISA=x86-64-v3 sets it to avx2.
#ifndef GEMM_KERNELS
#define GEMM_KERNELS "auto"
#endif

typedef struct {
    uint32_t* b;  // the packed block of B
    uint32_t* a;  // packed panels of up to GEMM_GROUP_ROWS rows of A
    float* sums;  // GEMM_SUMS: tiles that are not summed in out
} GemmWorkspace;

typedef struct {
    const GemmKernel* for_any;   // for operands of any types
    const GemmKernel* for_bf16;  // for two operands of bfloat16
    char backend[48];            // their names
    size_t b_units;              // of a packed block of B
    pthread_key_t workspace;
} GemmState;

// One for the process, even if several of its files include this one.
__attribute__((weak)) GemmState gemm_state;
__attribute__((weak)) pthread_once_t gemm_once = PTHREAD_ONCE_INIT;

enum { GEMM_SUMS = 256 * GEMM_TILE_MAX };

static inline bool gemm_always(void) { return true; }

// From the plainest to the best; `pays` says whether to use a kernel that was not asked for by name.
static const struct {
    const GemmKernel* kernel;
    bool (*has)(void), (*pays)(void);
} gemm_kernels[] = {
    {&gemm_portable, gemm_always, gemm_always},
#ifdef GEMM_X86
    {&gemm_avx2, gemm_has_avx2, gemm_always},
    {&gemm_avx512, gemm_has_avx512, gemm_always},
#endif
#ifdef GEMM_X86_BF16
    {&gemm_avx512bf16, gemm_has_avx512bf16, gemm_vendor_is_amd},
    {&gemm_amx, gemm_has_amx, gemm_always},
#endif
#ifdef GEMM_ARM
    {&gemm_bfmmla, gemm_has_bfmmla, gemm_always},
#endif
#ifdef __APPLE__
    {&gemm_accelerate, gemm_has_accelerate, gemm_never},
#endif
};

// Selects the best kernels up to the named one, for "auto" the best that the build may use; false if there is none.
static inline bool gemm_use(const char* name) {
    if (strcmp(name, "auto") == 0) name = GEMM_KERNELS;
    const GemmKernel *for_any = NULL, *for_bf16 = NULL;
    bool best = strcmp(name, "auto") == 0, found = best;
    for (size_t n = 0; n < sizeof gemm_kernels / sizeof gemm_kernels[0] && (best || !found); n++) {
        const GemmKernel* kernel = gemm_kernels[n].kernel;
        bool named = strcmp(name, kernel->name) == 0;
        if (!gemm_kernels[n].has() || !(named || gemm_kernels[n].pays())) continue;
        if (!kernel->pairs) for_any = kernel;
        for_bf16 = kernel;
        found = best || named;
    }
    if (!found) return false;
    gemm_state.for_any = for_any;
    gemm_state.for_bf16 = for_bf16;
    snprintf(gemm_state.backend, sizeof gemm_state.backend, "%s (float) / %s (bf16)", for_any->name, for_bf16->name);
    return true;
}

// The bytes for a packed block of B: five eighths of the L2 cache, or twice that if a thread's share of the L3 has room
// for it; at most 1.25 MiB. (GPT-2 124M is 2% faster with 1.25 than with 0.63 MiB on Zen 4, whose L2 has 1 MiB.)
static inline size_t gemm_b_cache(void) {
    long l2 = 0, l3 = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
    l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
    l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    size_t bytes = (l2 < (256 << 10) ? 512 << 10 : (size_t)l2) / 8 * 5;  // 512 KiB if the system cannot tell
    if (l3 > 0 && (size_t)l3 / threads_count() >= 2 * bytes) bytes *= 2;
    return min_size(bytes, LLMTRAIN_PIECE(5 << 18, 1 << 13));
}

static inline void gemm_init(void) {
    gemm_state.b_units = gemm_b_cache() / 4;
    if (!gemm_use("auto")) gemm_use("portable");  // the processor lacks what the build was made for
    pthread_key_create(&gemm_state.workspace, free);
}

// The choice, made at the first call.
static inline const GemmState* gemm_ready(void) {
    pthread_once(&gemm_once, gemm_init);
    return &gemm_state;
}

// The kernels for float and for bfloat16: "avx512 (float) / amx (bf16)".
static inline const char* gemm_backend(void) { return gemm_ready()->backend; }

// The kernel for operands of any type.
static inline const GemmKernel* gemm_kernel(void) { return gemm_ready()->for_any; }

// Whether operands of bfloat16 are multiplied as they are, not converted to float.
static inline bool gemm_multiplies_bf16(void) { return gemm_ready()->for_bf16->pairs; }

// A block of B is at least one panel, however small L2; packing may write past the end of a panel.
static inline size_t gemm_b_bytes(void) { return 4 * (gemm_state.b_units + 2 * GEMM_PANEL_MAX); }
static inline size_t gemm_a_bytes(void) { return 4 * (GEMM_GROUP_ROWS * GEMM_GROUP_UNITS + GEMM_PANEL_MAX); }

static inline size_t gemm_workspace_bytes(int threads) {
    gemm_ready();
    return (size_t)threads * (64 + gemm_b_bytes() + gemm_a_bytes() + GEMM_SUMS * sizeof(float));
}

// This thread's workspace; NULL if there is no memory.
static inline GemmWorkspace* gemm_workspace(void) {
    char* memory = (char*)pthread_getspecific(gemm_ready()->workspace);
    if (memory) return (GemmWorkspace*)memory;
    memory = (char*)memory_allocate(gemm_workspace_bytes(1));
    if (!memory || pthread_setspecific(gemm_state.workspace, memory) != 0) {
        free(memory);
        return NULL;
    }
    GemmWorkspace* w = (GemmWorkspace*)memory;
    w->b = (uint32_t*)(memory + 64);
    w->a = (uint32_t*)(memory + 64 + gemm_b_bytes());
    w->sums = (float*)(memory + 64 + gemm_b_bytes() + gemm_a_bytes());
    return w;
}

// ------------------------------------------------------------------------------------------------
// 2. Matmul
//
// The loops at the top of this file. A plan cuts `out` into tasks; threads take one after the other, and no task waits
// for another: threads wait for each other only at the end of the matmul.

typedef struct {
    size_t rows, cols;  // of a block of out
    size_t task_rows;   // a task is so many rows of a block
    size_t k_block;     // elements
} GemmPlan;

// From one panel to the next, for each lane: what packing writes past the end of a panel must not reach the next one.
static inline size_t gemm_panel_units(size_t units) { return round_up(units, GEMM_PIECE_UNITS) + 1; }

// If all of B fits into the workspace there is one k block, else k blocks as equal as possible, and multiples of 32.
// Blocks of out are as large as the workspace allows, and halved until there are enough: two for each thread, each a
// task, or with one k block one for each thread, of four tasks, for which the thread packs its B once.
static inline GemmPlan gemm_block_plan(const GemmProblem* p, const GemmKernel* kernel, size_t threads) {
    GemmPlan plan;
    size_t per_unit = kernel->pairs ? 2 : 1, units = gemm_panel_units(divide_up(p->K, per_unit));
    bool whole = units <= GEMM_GROUP_UNITS && units * round_up(p->N, kernel->cols) <= gemm_state.b_units;
    size_t k_blocks = whole ? 1 : divide_up(p->K, kernel->k_block * per_unit);
    size_t wanted = threads > 1 && k_blocks > 1 ? 2 * threads : threads;
    plan.k_block = round_up(divide_up(p->K, k_blocks), 32);
    size_t panels = max_size(1, gemm_state.b_units / (gemm_panel_units(plan.k_block / per_unit) * kernel->cols));
    bool keep = p->out_type != DTYPE_F32 && k_blocks > 1;  // sums of a whole task wait in the workspace
    if (keep) panels = min_size(panels, 512 / kernel->cols);  // about as many columns as rows
    plan.cols = round_up(divide_up(p->N, divide_up(p->N, panels * kernel->cols)), kernel->cols);
    size_t most_rows = keep ? GEMM_SUMS / plan.cols / kernel->rows * kernel->rows : p->M;
    plan.rows = round_up(divide_up(p->M, divide_up(p->M, most_rows)), kernel->rows);
    while (divide_up(p->M, plan.rows) * divide_up(p->N, plan.cols) < wanted) {
        bool tall = plan.rows >= 8 * kernel->rows, wide = plan.cols >= 4 * kernel->cols;
        if (tall && (plan.rows >= plan.cols || !wide)) plan.rows = round_up(plan.rows / 2, kernel->rows);
        else if (wide) plan.cols = round_up(plan.cols / 2, kernel->cols);
        else break;
    }
    plan.task_rows = k_blocks > 1 ? plan.rows : round_up(divide_up(plan.rows, 4), kernel->rows);
    return plan;
}

static inline GemmPlan gemm_dot_plan(const GemmProblem* p, size_t threads) {
    GemmPlan plan = {.rows = p->M, .cols = round_up(divide_up(p->N, 8 * threads), GEMM_DOT_COLS), .task_rows = p->M,
                     .k_block = min_size(p->K, GEMM_DOT_K)};
    // With several blocks of k the sums wait in the workspace.
    if (plan.k_block < p->K) plan.cols = min_size(plan.cols, (size_t)GEMM_SUMS / GEMM_FEW_ROWS);
    return plan;
}

// Every element by its own loop: slow, but needs no memory.
static inline void gemm_unpacked(const GemmProblem* p, size_t i_begin, size_t i_end, size_t j_begin, size_t j_end) {
    for (size_t i = i_begin; i < i_end; i++)
        for (size_t j = j_begin; j < j_end; j++) {
            float sum = p->bias ? gemm_load(p->bias, p->bias_type, j) : 0.0f;
            if (p->accumulate) sum = gemm_load(p->out, p->out_type, i * p->out_stride + j) + sum;
            for (size_t k = 0; k < p->K; k++) {
                size_t at_a = p->a.k_contiguous ? i * p->a.stride + k : k * p->a.stride + i;
                size_t at_b = p->b.k_contiguous ? j * p->b.stride + k : k * p->b.stride + j;
                sum = multiply_add(gemm_load(p->a.data, p->a.type, at_a), gemm_load(p->b.data, p->b.type, at_b), sum);
            }
            gemm_save(p->out, p->out_type, i * p->out_stride + j, sum);
        }
}

// Packs the panels of lanes [from, to). Where not k but lanes are contiguous, all panels take a few units in turn, so
// that memory is read in its order.
static inline void gemm_pack(uint32_t* panels, const GemmKernel* kernel, const GemmOperand* o, size_t width,
                             size_t from, size_t to, size_t panel_units, size_t k, size_t count) {
    size_t per_unit = kernel->pairs ? 2 : 1, step = o->k_contiguous ? count : GEMM_PIECE_UNITS * per_unit;
    for (size_t done = 0; done < count; done += step)
        for (size_t lane = from; lane < to; lane += width)
            kernel->pack(panels + (lane - from) * panel_units + done / per_unit * width, o, lane,
                         min_size(width, to - lane), width, k + done, min_size(step, count - done));
}

// Prefetches a tile of out, which will be needed when the one before it is done.
static inline void gemm_prefetch_tile(const GemmProblem* p, size_t i, size_t rows, size_t j, size_t cols) {
    size_t bytes = dtype_bytes(p->out_type);
    for (size_t r = i; r < min_size(i + rows, p->M); r++)
        for (size_t c = 0; c < cols * bytes; c += 64)
            __builtin_prefetch((const char*)p->out + (r * p->out_stride + j) * bytes + c, 1);
}

// Whether whole tiles of out are summed in place, not in the workspace.
static inline bool gemm_sums_in_out(const GemmProblem* p) {
    return p->out_type == DTYPE_F32 && (!p->bias || (!p->accumulate && p->bias_type == DTYPE_F32));
}

// Adds `units` units of A panel x B panel to the tile of out at (i, j), in a task that ends at (i_end, j_end): in out
// itself, or else in sums, in the workspace. first: nothing is summed yet; loads: sums start from what is in out; last:
// the sums are complete.
ALWAYS_INLINE void gemm_tile(const GemmProblem* p, const GemmKernel* kernel, size_t i, size_t i_end, size_t j,
                             size_t j_end, float* sums, const uint32_t* a, const uint32_t* b, size_t units,
                             bool first, bool loads, bool last) {
    size_t cols = kernel->cols;
    bool half = kernel->multiply_half && j_end - j <= cols / 2;
    bool bias = first && p->bias;
    GemmMultiply* multiply = half ? kernel->multiply_half : kernel->multiply;
    if (gemm_sums_in_out(p) && i + kernel->rows <= i_end && j + (half ? cols / 2 : cols) <= j_end) {
        float* out = (float*)p->out + i * p->out_stride + j;
        bool adds = !first || p->accumulate;
        const float* from = adds ? out : bias ? (const float*)p->bias + j : NULL;
        multiply(out, p->out_stride, from, adds ? p->out_stride : 0, a, b, units);
        return;
    }
    if (loads || bias) kernel->start(p, sums, i, j, loads, bias);
    multiply(sums, cols, !first || loads || bias ? sums : NULL, cols, a, b, units);
    if (last) kernel->store(p, sums, i, j);
}

// Task number t computes out[i_begin..i_end, j_begin..j_end]. *packed: the first column of the block of this matmul's B
// that is in the workspace, with all of k; SIZE_MAX for none.
static inline void gemm_block_task(const GemmProblem* p, const GemmKernel* kernel, const GemmPlan* plan, size_t t,
                                   size_t* packed) {
    size_t rows = kernel->rows, cols = kernel->cols, group = GEMM_GROUP_ROWS / rows * rows;
    size_t across = divide_up(p->N, plan->cols), parts = divide_up(plan->rows, plan->task_rows), block = t / parts;
    size_t block_begin = block / across * plan->rows, block_end = min_size(block_begin + plan->rows, p->M);
    size_t i_begin = block_begin + t % parts * plan->task_rows, i_end = min_size(i_begin + plan->task_rows, block_end);
    size_t j_begin = block % across * plan->cols, j_end = min_size(j_begin + plan->cols, p->N);
    if (i_begin >= i_end) return;  // the last blocks may have fewer tasks
    GemmWorkspace* w = gemm_workspace();
    if (!w) {
        gemm_unpacked(p, i_begin, i_end, j_begin, j_end);
        return;
    }
    bool keep = p->out_type != DTYPE_F32 && plan->k_block < p->K;  // sums stay in the workspace until the last k block
    if (kernel->begin) kernel->begin();
    for (size_t k = 0; k < p->K; k += plan->k_block) {
        size_t count = min_size(plan->k_block, p->K - k), inner;
        size_t units = round_up(kernel->pairs ? (count + 1) / 2 : count, kernel->k_round);
        size_t panel_units = gemm_panel_units(units);
        if (*packed != j_begin) gemm_pack(w->b, kernel, &p->b, cols, j_begin, j_end, panel_units, k, count);
        *packed = count < p->K ? SIZE_MAX : j_begin;
        for (size_t i = i_begin; i < i_end; i += rows) {
            if ((i - i_begin) % group == 0)
                gemm_pack(w->a, kernel, &p->a, rows, i, min_size(i + group, i_end), panel_units, k, count);
            const uint32_t* a = w->a + (i - i_begin) % group * panel_units;
            float* row_sums = w->sums + (keep ? (i - i_begin) * round_up(j_end - j_begin, cols) : 0);
            for (size_t u = 0; u < units; u += inner) {
                inner = min_size(kernel->k_inner, units - u);
                bool first = k == 0 && u == 0, loads = u == 0 && (k > 0 ? !keep : p->accumulate);
                bool last = u + inner == units && (!keep || k + count == p->K);
                for (size_t j = j_begin; j < j_end; j += cols) {
                    bool row_ends = j + cols >= j_end;
                    gemm_prefetch_tile(p, row_ends ? i + rows : i, rows, row_ends ? j_begin : j + cols, cols);
                    gemm_tile(p, kernel, i, i_end, j, j_end,
                              row_sums + (keep || inner < units ? (j - j_begin) * rows : 0), a + u * rows,
                              w->b + (j - j_begin) * panel_units + u * cols, inner, first, loads, last);
                }
            }
        }
    }
    if (kernel->end) kernel->end();
}

// a = elements [k, k + count) of the rows of A, unit after unit, `width` lanes each; 0 outside of A, and in
// GEMM_DOT_EXTRA units more. For a width of 1 -O3 makes a separate, vectorized loop.
static inline void gemm_dot_pack(uint32_t* a, const GemmProblem* p, size_t width, size_t k, size_t count) {
    size_t bytes = count * dtype_bytes(p->a.type), units = p->a.pairs ? divide_up(count, 2) : count;
    memset(a, 0, (units + GEMM_DOT_EXTRA) * width * sizeof *a);
    for (size_t i = 0; i < p->M; i++, a++) {
        const char* from = p->a.data + (i * p->a.stride + k) * dtype_bytes(p->a.type);
        if (width == 1 && (p->a.pairs || p->a.type == DTYPE_F32)) {
            memcpy(a, from, bytes);
        } else if (p->a.pairs || p->a.type == DTYPE_F32) {
            for (size_t u = 0; u < bytes / 4; u++) memcpy(a + u * width, from + 4 * u, 4);
            memcpy(a + bytes / 4 * width, from + bytes / 4 * 4, bytes % 4);
        } else if (p->a.type == DTYPE_BF16) {
            for (size_t u = 0; u < count; u++) a[u * width] = bits_from_float(gemm_load(from, DTYPE_BF16, u));
        } else {
            for (size_t u = 0; u < count; u++) a[u * width] = bits_from_float(gemm_load(from, DTYPE_F16, u));
        }
    }
}

// A few rows: task number t computes the columns j_begin..j_end.
static inline void gemm_dot_task(const GemmProblem* p, const GemmKernel* kernel, const GemmPlan* plan, size_t t,
                                 size_t* packed) {
    (void)packed;
    size_t j_begin = t * plan->cols, j_end = min_size(j_begin + plan->cols, p->N), cols = GEMM_DOT_COLS;
    size_t width = p->M == 1 ? 1 : p->M <= 4 ? 4 : 8;
    GemmWorkspace* w = gemm_workspace();
    if (!w) {
        gemm_unpacked(p, 0, p->M, j_begin, j_end);
        return;
    }
    for (size_t k = 0; k < p->K; k += plan->k_block) {
        size_t count = min_size(plan->k_block, p->K - k);
        gemm_dot_pack(w->a, p, width, k, count);
        for (size_t j = j_begin; j < j_end; j += cols) {
            size_t lanes = min_size(cols, j_end - j);
            float* sums = w->sums + (plan->k_block < p->K ? (j - j_begin) * width : 0);
            if (k == 0) {
                memset(sums, 0, width * cols * sizeof(float));
                gemm_start_typed(p, p->out_type, sums, cols, 0, p->M, j, lanes, p->accumulate, p->bias != NULL);
            }
            kernel->dot(sums, w->a, width, &p->b, j, lanes, k, count);
            if (k + count == p->K) gemm_store_typed(p, p->out_type, sums, cols, 0, p->M, j, lanes);
        }
    }
}

static inline GemmOperand gemm_operand(GemmMatrix m, bool k_contiguous, bool pairs, bool by_lane) {
    GemmOperand o = {(const char*)m.data, m.type, m.stride, k_contiguous, pairs, by_lane};
    return o;
}

// The number of threads that pays: each should have some microseconds of work.
static inline size_t gemm_threads(size_t multiplications) {
#ifdef _OPENMP
    if (omp_in_parallel()) return 1;
    return min_size(threads_count(), 1 + multiplications / 400000);
#else
    (void)multiplications;
    return 1;
#endif
}

// out (M, N) = [out +] op(A) (M, K) * op(B) (K, N) [+ bias (N)], for M, N, K >= 1. Sums are floats whatever the types.
// out must not overlap the operands.
static inline void gemm_compute(void* out, Dtype out_type, size_t out_stride, bool accumulate, GemmMatrix a,
                                GemmMatrix b, const void* bias, Dtype bias_type, size_t M, size_t N, size_t K) {
    if (M == 0 || N == 0) return;
    gemm_ready();
    bool both_bf16 = a.type == DTYPE_BF16 && b.type == DTYPE_BF16;
    bool few_rows = M <= GEMM_FEW_ROWS && !a.transposed && b.transposed && gemm_state.for_any->dot;
    const GemmKernel* kernel = both_bf16 && !(few_rows && gemm_state.for_bf16->a_by_lane) ? gemm_state.for_bf16
                                                                                          : gemm_state.for_any;
    GemmProblem p = {.out = out, .out_type = out_type, .out_stride = out_stride, .accumulate = accumulate,
                     .a = gemm_operand(a, !a.transposed, kernel->pairs, kernel->a_by_lane),
                     .b = gemm_operand(b, b.transposed, kernel->pairs, false),
                     .bias = bias, .bias_type = bias_type, .M = M, .N = N, .K = K};
#ifdef __APPLE__
    if (kernel == &gemm_accelerate && gemm_by_cblas(&p)) return;
#endif
    size_t threads = gemm_threads(M * N * K);
    GemmPlan plan = few_rows ? gemm_dot_plan(&p, threads) : gemm_block_plan(&p, kernel, threads);
    void (*compute)(const GemmProblem*, const GemmKernel*, const GemmPlan*, size_t, size_t*) =
        few_rows ? gemm_dot_task : gemm_block_task;
    size_t blocks = divide_up(M, plan.rows) * divide_up(N, plan.cols);
    Tasks tasks;
    tasks_share(&tasks, blocks * divide_up(plan.rows, plan.task_rows), threads);
    #pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        size_t packed = SIZE_MAX;
        for (size_t task; tasks_take(&tasks, &task);) compute(&p, kernel, &plan, task, &packed);
    }
}

#endif  // LLMTRAIN_GEMM_H
