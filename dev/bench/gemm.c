// dev/bench/gemm.c: the ladder of the CPU's GEMM, checked and timed.
//
//     out (M, N) = X (M, K) W (N, K)^T        and the two matmuls of its backward pass, dX = dY W and dW += dY^T X
//
// The ladder, for M = 1024, N = 2304, K = 768 on two processors; per cent of the register-only peak of the machine for
// the type (float 227 GFLOP/s, bfloat16 442). AMD EPYC 9004 (Zen 4), two of its cores shared with other work, gcc 12,
// November 2026, processor time.
//
//     rung         idea                                                      predicted               measured GFLOP/s
//     naive        one sum at a time, in the order of the formula            1 add in 4 cycles        5   2%
//     blocked      4 x 4 sums, each operand loaded is used 4 times           16 sums: x 4            20   9%
//     portable     packed panels, so that the compiler vectorizes            4 lanes: x 4            64  28%
//     avx2         8 lanes and one instruction to multiply and add           x 4, less packing      196  86%
//     avx512       16 lanes, 32 registers: 12 x 32 tile, half the loads      to above 90%           211  93%
//     avx512bf16   two products per lane and instruction, half the bytes     x 2                    424  96%
//     amx          32 x 32 tile, 16 x 16 x 32 products per instruction       x 8 of avx512          no AMX here
//
//     gcc -std=c11 -O3 -fopenmp dev/bench/gemm.c -o build/gemm -lm -ldl
//     build/gemm --check                      every kernel of this machine against float64; exit status 1 on failure
//     build/gemm --check amx                  that kernel alone
//     build/gemm                              the ladder at one shape, then the matmuls of GPT-2 124M
//     build/gemm --m 1024 --n 3072 --k 768    one shape; further: --threads T --rounds R --json
//
// With -DGEMM_EMULATE_AMX the AMX kernel runs on emulated tile registers: for --check on any machine with AVX-512. The
// speed of a shared machine changes, so each measurement has its own peak: a loop of multiplications and additions in
// registers alone, with the widest instructions that the machine has for the type. If other programs take processor
// time, OMP_WAIT_POLICY=passive build/gemm --processor-time counts only this program's time (divided by the number of
// threads).

#include "llmtrain/ops/base.h"
#ifdef GEMM_EMULATE_AMX
#include "dev/test/amx_emulation.h"
#endif

static bool without_memory;  // what gemm.h allocates

static inline void* memory_or_none(size_t bytes) { return without_memory ? NULL : memory_allocate(bytes); }

#define memory_allocate memory_or_none
#include "llmtrain/ops/gemm.h"
#undef memory_allocate
#include "peak.h"

#include <dlfcn.h>
#include <sys/mman.h>

static const char* const kernel_names[] = {"portable", "avx2", "avx512", "avx512bf16", "amx", "bfmmla"};
enum { KERNELS = 6 };

// ------------------------------------------------------------------------------------------------
// Check
//
// Inputs are uniform in [-1, 1), rounded to their type, and the reference multiplies and adds them in double. A float
// sum of n terms, in any order, is off by at most n u times the sum of the terms' magnitudes, u = 2^-24 ("Accuracy and
// Stability of Numerical Algorithms", Higham, 2002, section 3.1), and, rounding errors being of either sign, by more
// than 6 sqrt(n) u with a probability below 2 exp(-18) ("A New Approach to Probabilistic Rounding Error Analysis",
// Higham and Mary, 2019): the bound is the smaller of both. n = K + 4 counts the bias, the old value of out and the
// joints between blocks. Rounding to a 16-bit type adds half a unit in the last place. Float outputs show one missing
// term at every K that is checked: it is off by 1 / K of the magnitudes, ten times the bound at K = 4000.
//
// Operands end at an inaccessible page; the gaps between rows hold NaN for inputs, and for the output a pattern that
// must survive.

static int passed, failed;

// Uses the kernels of that name from now on: portable, avx2, avx512, avx512bf16, amx, bfmmla, accelerate, or auto for
// the best. Not while a matmul is running.
static bool gemm_force(Error* error, const char* name) {
    gemm_ready();
    return gemm_use(name) || fail_with(error, "gemm: kernel '%s' is unknown, or this processor, system or compiler "
                                       "lacks it; use auto", name);
}

static void report(bool good, const char* family, const char* details, double error, double bound) {
    printf("%-6s %-34s %-52s err %8.2e <= %8.2e\n", good ? "ok" : "FAILED", family, details, error, bound);
    fflush(stdout);
    if (good) passed++;
    else failed++;
}

// Checks one matmul of every so many on the list: more than 1 where an emulator is slow.
#ifndef GEMM_CHECK_EVERY
#define GEMM_CHECK_EVERY LLMTRAIN_PIECE(1, 7)  // of all cases; small pieces and sanitizers take long
#endif

enum { ARENA_BYTES = 8 << 20, POOL = 1 << 20 };
static unsigned char* arenas[4];  // of a, b, bias, out: ARENA_BYTES, then a page without access
static float* pool;               // random numbers in [-1, 1)

static bool make_arenas(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int i = 0; i < 4; i++) {
        void* memory = mmap(NULL, ARENA_BYTES + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED || mprotect((char*)memory + ARENA_BYTES, page, PROT_NONE) != 0) return false;
        arenas[i] = (unsigned char*)memory;
    }
    pool = (float*)memory_allocate(POOL * sizeof(float));
    if (!pool) return false;
    for (size_t i = 0; i < POOL; i++) pool[i] = 2.0f * random_uniform(1, RANDOM_TEST, 0, i) - 1.0f;
    return true;
}

typedef struct {
    Dtype a, b, out, bias_type;
    bool a_transposed, b_transposed, accumulate, bias;
    size_t M, N, K;
} Case;

// A (rows, cols) matrix at the end of an arena, filled from the pool, with NaN between its rows; the values go to
// `values` (double, rows x cols; if `turned`, cols x rows) too.
static void* fill(double* values, bool turned, int arena, Dtype type, size_t rows, size_t cols, size_t stride,
                  size_t seed) {
    size_t elements = (rows - 1) * stride + cols;
    unsigned char* data = arenas[arena] + ARENA_BYTES - elements * dtype_bytes(type);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < stride && r * stride + c < elements; c++) {
            size_t at = r * stride + c;
            gemm_save(data, type, at, c < cols ? pool[(seed * 7919 + r * cols + c) % POOL] : NAN);
            if (c < cols) values[turned ? c * rows + r : r * cols + c] = (double)gemm_load(data, type, at);
        }
    return data;
}

// Worst error relative to its bound; NaN, or infinity if a byte around the output changed. Fewer threads than `threads`
// must give the same bits, otherwise `different` is incremented.
static double case_error(Case c, int threads, size_t* different) {
    size_t a_rows = c.a_transposed ? c.K : c.M, a_cols = c.a_transposed ? c.M : c.K;
    size_t b_rows = c.b_transposed ? c.N : c.K, b_cols = c.b_transposed ? c.K : c.N;
    size_t gap = (c.M + c.N + c.K) % 4, stride = c.N + gap, out_size = dtype_bytes(c.out);
    double* a_values = (double*)memory_allocate(c.M * c.K * sizeof(double));
    double* b_values = (double*)memory_allocate(c.N * c.K * sizeof(double));
    double* bias_values = (double*)memory_allocate(c.N * sizeof(double));
    double* old = (double*)memory_allocate(c.M * c.N * sizeof(double));
    double* sum = (double*)memory_allocate(c.N * sizeof(double));
    double* magnitude = (double*)memory_allocate(c.N * sizeof(double));
    if (!a_values || !b_values || !bias_values || !old || !sum || !magnitude) return NAN;
    void* a = fill(a_values, c.a_transposed, 0, c.a, a_rows, a_cols, a_cols + gap, 1);     // values (M, K)
    void* b = fill(b_values, c.b_transposed, 1, c.b, b_rows, b_cols, b_cols + gap, 2);     // values (K, N)
    void* bias = fill(bias_values, false, 2, c.bias_type, 1, c.N, c.N, 3);
    void* out = NULL;
    size_t out_bytes = ((c.M - 1) * stride + c.N) * out_size, margin = 256;
    uint64_t first_bits = 0;
    bool same = true;
    for (int t = threads; t > 0; t--) {
        out = fill(old, false, 3, c.out, c.M, c.N, stride, 4);
        memset((unsigned char*)out - margin, 0xa5, margin);
        threads_set((size_t)t);
        gemm_compute(out, c.out, stride, c.accumulate, gemm_matrix(a, c.a, a_cols + gap, c.a_transposed),
                     gemm_matrix(b, c.b, b_cols + gap, c.b_transposed), c.bias ? bias : NULL, c.bias_type, c.M, c.N,
                     c.K);
        uint64_t bits = hash_bytes(out, out_bytes);
        if (t == threads) first_bits = bits;
        same = same && bits == first_bits;
    }
    *different += !same;

    double worst = 0.0, unit = c.out == DTYPE_BF16 ? 0x1p-8 : c.out == DTYPE_F16 ? 0x1p-11 : 0.0;
    for (size_t i = 0; i < margin; i++)
        if (((unsigned char*)out - margin)[i] != 0xa5) worst = INFINITY;
    for (size_t i = 0; i < c.M; i++) {
        for (size_t j = 0; j < c.N; j++) {
            sum[j] = (c.bias ? bias_values[j] : 0.0) + (c.accumulate ? old[i * c.N + j] : 0.0);
            magnitude[j] = (c.bias ? fabs(bias_values[j]) : 0.0) + (c.accumulate ? fabs(old[i * c.N + j]) : 0.0);
        }
        for (size_t k = 0; k < c.K; k++) {
            double x = a_values[i * c.K + k];
            const double* y = b_values + k * c.N;
            for (size_t j = 0; j < c.N; j++) {
                sum[j] += x * y[j];
                magnitude[j] += fabs(x * y[j]);
            }
        }
        for (size_t j = 0; j < stride && i * stride + j < out_bytes / out_size; j++) {
            float value = gemm_load(out, c.out, i * stride + j);
            if (j >= c.N) {
                if (value == value) worst = INFINITY;  // the gap's NaN was overwritten
                continue;
            }
            double terms = (double)(c.K + 4), growth = fmin(terms, 6.0 * sqrt(terms)) * 0x1p-24;
            double bound = growth * magnitude[j] * (1.0 + unit) + unit * fabs(sum[j]);
            if (c.out == DTYPE_F16) bound += 0x1p-25;  // half of the smallest subnormal
            double share = fabs((double)value - sum[j]) / bound;
            if (!(share <= worst)) worst = share;
        }
    }
    free(a_values);
    free(b_values);
    free(bias_values);
    free(old);
    free(sum);
    free(magnitude);
    return worst;
}

// Options number `n`: 4 transposes x 9 operand types x 3 of out x accumulate x bias (none or one of 3 types).
enum { OPTIONS = 4 * 9 * 3 * 2 * 4 };
static Case make_case(size_t n, size_t M, size_t N, size_t K) {
    static const Dtype types[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    Case c;
    c.a_transposed = n % 2;
    c.b_transposed = n / 2 % 2;
    c.accumulate = n / 4 % 2;
    c.bias = n / 8 % 4 > 0;
    c.bias_type = types[c.bias ? n / 8 % 4 - 1 : 0];
    c.out = types[n / 32 % 3];
    c.a = types[n / 96 % 3];
    c.b = types[n / 288 % 3];
    c.M = M;
    c.N = N;
    c.K = K;
    return c;
}

typedef struct {
    double floats, halves;  // worst error relative to the bound, for float and 16-bit outputs
    size_t cases;
} Worst;

static void add_case(Worst* worst, Case c) {
    size_t different = 0;
    double share = case_error(c, 1, &different);
    double* here = c.out == DTYPE_F32 ? &worst->floats : &worst->halves;
    if (!(share <= *here)) *here = share;
    worst->cases++;
}

static void report_worst(const char* name, const char* family, const char* details, Worst worst) {
    char full_family[64], full_details[96];
    for (int half = 0; half < 2; half++) {
        snprintf(full_family, sizeof full_family, "%s: %s", name, family);
        snprintf(full_details, sizeof full_details, "%zu products %s, %s out", worst.cases, details,
                 half ? "16-bit" : "float");
        double share = half ? worst.halves : worst.floats;
        report(share <= 1.0, full_family, full_details, share, 1.0);
    }
}

static void check_kernel(const char* name, bool pairs_only) {
    static const size_t sizes[] = {1, 2, 3, 7, 17, 31, 33, 64, 65, 257};
    static const size_t fixed[4][3] = {{33, 65, 31}, {7, 64, 65}, {70, 97, 130}, {3, 19, 50}};
    static const size_t large[4][3] = {{130, 900, 1100}, {700, 400, 800}, {20, 70, 4000}, {500, 100, 1000}};
    Worst by_size = {0.0, 0.0, 0}, by_options = by_size, by_blocks = by_size;
    for (size_t n = 0; n < 1000; n += GEMM_CHECK_EVERY) {
        size_t options = random_bits(2, RANDOM_TEST, 0, n) % OPTIONS;
        Case c = make_case(options, sizes[n % 10], sizes[n / 10 % 10], sizes[n / 100]);
        if (pairs_only) c.a = c.b = DTYPE_BF16;
        add_case(&by_size, c);
    }
    report_worst(name, "sizes", "of M, N, K in 1 .. 257", by_size);

    for (size_t n = 0; n < OPTIONS; n += GEMM_CHECK_EVERY)
        for (int s = 0; s < 4; s++) {
            Case c = make_case(n, fixed[s][0], fixed[s][1], fixed[s][2]);
            if (!pairs_only || (c.a == DTYPE_BF16 && c.b == DTYPE_BF16)) add_case(&by_options, c);
        }
    report_worst(name, "options", "of all transposes, types, ...", by_options);

    for (size_t n = 0; n < 32; n += GEMM_CHECK_EVERY) {
        Case c = make_case(0, large[n / 8][0], large[n / 8][1], large[n / 8][2]);
        c.a_transposed = n % 2;
        c.b_transposed = n / 2 % 2;
        c.out = n / 4 % 2 ? DTYPE_BF16 : DTYPE_F32;
        c.accumulate = c.bias = n % 3 == 0;
        if (pairs_only || n % 5 == 0) c.a = c.b = DTYPE_BF16;
        add_case(&by_blocks, c);
    }
    report_worst(name, "blocks", "of up to 130x900x1100, 700x400x800", by_blocks);

    char family[64], details[96];
    double worst = 0.0;
    size_t cases = 0;
    size_t different = 0;
    for (size_t n = 0; n < 24; n += GEMM_CHECK_EVERY) {
        static const size_t shapes[3][3] = {{131, 257, 400}, {5, 3000, 200}, {37, 999, 129}};
        size_t options = random_bits(3, RANDOM_TEST, 0, n) % OPTIONS;
        Case c = make_case(options, shapes[n % 3][0], shapes[n % 3][1], shapes[n % 3][2]);
        if (pairs_only) c.a = c.b = DTYPE_BF16;
        double share = case_error(c, 3, &different);
        if (!(share <= worst)) worst = share;
        cases++;
    }
    snprintf(family, sizeof family, "%s: threads", name);
    snprintf(details, sizeof details, "%zu products, the same bits with 1, 2 and 3 threads", cases);
    report(worst <= 1.0 && different == 0, family, details, (double)different, 0.0);
}

// NaN in one element of A must reach its row of the output and no other.
static void check_nan(const char* name, Dtype type) {
    enum { M = 40, N = 70, K = 90, ROW = 21 };
    uint32_t a[M * K], b[K * N];  // room for either type
    float out[M * N];
    size_t wrong = 0;
    for (size_t i = 0; i < M * K; i++) gemm_save(a, type, i, i == ROW * K + 88 ? NAN : pool[i]);
    for (size_t i = 0; i < K * N; i++) gemm_save(b, type, i, pool[i + 5000]);
    gemm_compute(out, DTYPE_F32, N, false, gemm_matrix(a, type, K, false), gemm_matrix(b, type, N, false), NULL,
                 DTYPE_F32, M, N, K);
    for (size_t i = 0; i < M * N; i++) wrong += (out[i] != out[i]) != (i / N == ROW);
    char family[64];
    snprintf(family, sizeof family, "%s: NaN", name);
    report(wrong == 0, family, "a NaN in A fills its row of out and no other", (double)wrong, 0.0);
}

// 1 to 8 rows take a different path than more rows, with the same bits: generated text does not depend on how many
// samples are generated at once, nor on how much of the prompt is read at once. AMX has an order of its own.
static void check_few_rows(const char* name) {
    static const Dtype types[] = {DTYPE_F32, DTYPE_BF16, DTYPE_F16};
    static const size_t depths[] = {16, 771, 4500};
    enum { ROWS = GEMM_FEW_ROWS + 1, N = 130 };
    static double values[N * 4500];
    static float many[ROWS * N], few[ROWS * N];
    size_t different = 0, products = 0;
    for (size_t n = 0; n < 9; n++) {
        Dtype type = types[n % 3];
        size_t K = depths[n / 3];
        if (type == DTYPE_BF16 && gemm_state.for_bf16->a_by_lane) continue;
        GemmMatrix a = gemm_matrix(fill(values, false, 0, type, ROWS, K, K + 3, 1), type, K + 3, false);
        GemmMatrix b = gemm_matrix(fill(values, false, 1, type, N, K, K + 1, 2), type, K + 1, true);
        void* bias = fill(values, false, 2, type, 1, N, N, 3);
        gemm_compute(many, DTYPE_F32, N, false, a, b, bias, type, ROWS, N, K);
        for (size_t rows = 1; rows <= GEMM_FEW_ROWS; rows++, products++) {
            gemm_compute(few, DTYPE_F32, N, false, a, b, bias, type, rows, N, K);
            different += memcmp(few, many, rows * N * sizeof(float)) != 0;
        }
    }
    char family[64], details[96];
    snprintf(family, sizeof family, "%s: few rows", name);
    snprintf(details, sizeof details, "%zu products of 1 to 8 rows, the same bits as of 9", products);
    report(different == 0 && products > 0, family, details, (double)different, 0.0);
}

// Every half-precision number against its definition; conversions to 16 bits against the nearest of both neighbors.
static void check_conversions(void) {
    size_t wrong = 0;
    for (uint32_t h = 0; h < 65536; h++) {
        int exponent = h >> 10 & 31;
        double fraction = (double)(h & 1023) / 1024.0, sign = h >> 15 ? -1.0 : 1.0, value;
        if (exponent == 31) value = (h & 1023) ? NAN : sign * INFINITY;
        else value = sign * (exponent ? ldexp(1.0 + fraction, exponent - 15) : ldexp(fraction, -14));
        float f = float_from_f16((uint16_t)h);
        bool same = isnan(value) ? f != f : (double)f == value && !signbit(f) == !signbit(value);
        bool back = isnan(value) ? (f16_from_float(f) & 0x7fff) > 0x7c00 : f16_from_float(f) == h;
        wrong += !same || !back;
        float g = float_from_bf16((uint16_t)h);
        wrong += g == g ? bf16_from_float(g) != h : (bf16_from_float(g) & 0x7fff) <= 0x7f80;
    }
    report(wrong == 0, "conversions", "all f16 and bf16 to float and back", (double)wrong, 0.0);

    wrong = 0;
    for (uint64_t i = 0; i < 4000000; i++) {
        uint32_t bits = random_bits(4, RANDOM_TEST, 0, i);
        if (i % 2) bits = (bits & 0x80ffffffu) | (uint32_t)(100 + i / 2 % 45) << 23;  // the range of f16
        if (i % 8 == 7) bits = (bits & ~0x1fffu) | 0x1000;                            // ties of f16
        if (i % 8 == 6) bits = (bits & ~0xffffu) | 0x8000;                            // ties of bf16
        float f = float_from_bits(bits);
        if (f != f) continue;
        for (int bf16 = 0; bf16 <= 1; bf16++) {
            Dtype type = bf16 ? DTYPE_BF16 : DTYPE_F16;
            uint16_t near = bf16 ? bf16_from_float(f) : f16_from_float(f);
            uint16_t infinite = bf16 ? 0x7f80 : 0x7c00, size = near & 0x7fff;
            // Beyond the largest number the next one would follow; halfway to it rounding overflows.
            double limit = bf16 ? 0x1p128 : 65536.0, target = fabs((double)f), here, above, below;
            here = size == infinite ? limit : (double)gemm_load(&size, type, 0);
            uint16_t up = (uint16_t)(size + 1), down = (uint16_t)(size - 1);
            above = size >= infinite ? INFINITY : up == infinite ? limit : (double)gemm_load(&up, type, 0);
            below = size == 0 ? -INFINITY : (double)gemm_load(&down, type, 0);
            double distance = fabs(here - target);
            bool best = size == infinite ? !(target - below < limit - target && target < limit)
                                         : distance <= above - target && distance <= target - below;
            bool tie = distance == above - target || distance == target - below;
            if (!best || (tie && size != infinite && (size & 1)) || (near >> 15) != (bits >> 31)) wrong++;
        }
    }
    report(wrong == 0, "conversions", "float to f16 and bf16: nearest, ties to even", (double)wrong, 0.0);
}

// A thread that cannot allocate its workspace computes without one: many rows and a few, with all options.
static void* check_without_memory(void* unused) {
    static const size_t sizes[][3] = {{20, 30, 40}, {5, 33, 50}, {1, 130, 17}, {70, 97, 9}};
    Worst worst = {0.0, 0.0, 0};
    (void)unused;
    without_memory = true;
    for (size_t n = 0; n < OPTIONS; n += GEMM_CHECK_EVERY)
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++)
            add_case(&worst, make_case(n, sizes[s][0], sizes[s][1], sizes[s][2]));
    without_memory = false;
    if (pthread_getspecific(gemm_state.workspace) != NULL) worst.floats = worst.halves = NAN;  // nothing was tested
    report_worst("no memory", "options", "without a workspace", worst);
    return NULL;
}

// only: the name of one kernel, or NULL.
static int check_all(const char* only) {
    if (!make_arenas()) {
        fprintf(stderr, "gemm: no memory for the operands of the check\n");
        return 1;
    }
    if (only == NULL) check_conversions();
    for (int n = 0; n < KERNELS; n++) {
        Error error;
        if (only != NULL && strcmp(only, kernel_names[n]) != 0) continue;
        if (!gemm_force(&error, kernel_names[n])) {
            printf("absent %s\n", error.text);
            continue;
        }
        bool pairs = gemm_state.for_bf16->pairs;
        check_kernel(kernel_names[n], pairs);
        check_few_rows(kernel_names[n]);
        check_nan(kernel_names[n], pairs ? DTYPE_BF16 : DTYPE_F32);
    }
    pthread_t thread;
    threads_set(1);
    bool began = pthread_create(&thread, NULL, check_without_memory, NULL) == 0;
    if (began) pthread_join(thread, NULL);
    else report(false, "no memory", "a thread", NAN, 1.0);
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}

// ------------------------------------------------------------------------------------------------
// The rungs below the packed kernels: out (M, N) = x (M, K) w (N, K)^T

static void product_naive(float* out, const float* x, const float* w, size_t M, size_t N, size_t K) {
#ifdef _OPENMP
#pragma omp parallel for
#endif
    for (size_t i = 0; i < M; i++)
        for (size_t j = 0; j < N; j++) {
            float sum = 0.0f;
            for (size_t k = 0; k < K; k++) sum += x[i * K + k] * w[j * K + k];
            out[i * N + j] = sum;
        }
}

// 4 x 4 sums at a time, so that each loaded element is used four times; 64 rows of w stay in L2 for all rows of x.
static void product_blocked(float* out, const float* x, const float* w, size_t M, size_t N, size_t K) {
#ifdef _OPENMP
#pragma omp parallel for
#endif
    for (size_t block = 0; block < N; block += 64)
        for (size_t i = 0; i < M; i += 4)
            for (size_t j = block; j < min_size(block + 64, N); j += 4) {
                float sums[4][4] = {{0.0f}};
                size_t height = min_size(4, M - i), width = min_size(4, N - j);
                if (height == 4 && width == 4)
                    for (size_t k = 0; k < K; k++)
                        for (size_t r = 0; r < 4; r++)
                            for (size_t c = 0; c < 4; c++) sums[r][c] += x[(i + r) * K + k] * w[(j + c) * K + k];
                else
                    for (size_t k = 0; k < K; k++)
                        for (size_t r = 0; r < height; r++)
                            for (size_t c = 0; c < width; c++) sums[r][c] += x[(i + r) * K + k] * w[(j + c) * K + k];
                for (size_t r = 0; r < height; r++)
                    for (size_t c = 0; c < width; c++) out[(i + r) * N + j + c] = sums[r][c];
            }
}

// ------------------------------------------------------------------------------------------------
// Timing

typedef void (*CblasSgemm)(int order, int a, int b, int M, int N, int K, float alpha, const float* A, int lda,
                           const float* B, int ldb, float beta, float* C, int ldc);

typedef enum { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, PRODUCTS } Product;
static const char* const product_names[] = {"out = X W^T", "dX = dY W", "dW += dY^T X"};
typedef enum { RUNG_NAIVE, RUNG_BLOCKED, RUNG_KERNEL, RUNG_OPENBLAS } RungKind;

typedef struct {
    RungKind kind;
    const char* name;    // a kernel's name as gemm_force knows it
    bool bf16, out_bf16;
} Rung;

typedef struct {
    size_t m, n, k;
    int threads, rounds;
    bool json, processor_time;
    CblasSgemm openblas;
    void *x, *w, *y;     // (M, K), (N, K), (M, N): floats, or the same numbers as bf16
    void *x16, *w16, *y16;
    float *out;
} Bench;

static void run_rung(const Bench* b, Rung r, Product product, size_t M, size_t N, size_t K) {
    if (r.kind == RUNG_NAIVE) product_naive(b->out, (float*)b->x, (float*)b->w, M, N, K);
    if (r.kind == RUNG_BLOCKED) product_blocked(b->out, (float*)b->x, (float*)b->w, M, N, K);
    if (r.kind == RUNG_OPENBLAS) {
        const float *x = (float*)b->x, *w = (float*)b->w, *y = (float*)b->y;
        int m = (int)M, n = (int)N, k = (int)K;
        enum { ROWS = 101, PLAIN = 111, TRANSPOSED = 112 };
        if (product == FORWARD) b->openblas(ROWS, PLAIN, TRANSPOSED, m, n, k, 1, x, k, w, k, 0, b->out, n);
        if (product == BACKWARD_INPUT) b->openblas(ROWS, PLAIN, PLAIN, m, k, n, 1, y, n, w, k, 0, b->out, k);
        if (product == BACKWARD_WEIGHT) b->openblas(ROWS, TRANSPOSED, PLAIN, n, k, m, 1, y, n, x, k, 1, b->out, k);
    }
    if (r.kind != RUNG_KERNEL) return;
    Dtype type = r.bf16 ? DTYPE_BF16 : DTYPE_F32;
    Dtype out = r.out_bf16 && product != BACKWARD_WEIGHT ? DTYPE_BF16 : DTYPE_F32;  // gradients accumulate in float
    void *x = r.bf16 ? b->x16 : b->x, *w = r.bf16 ? b->w16 : b->w, *y = r.bf16 ? b->y16 : b->y;
    if (product == FORWARD)
        gemm_compute(b->out, out, N, false, gemm_matrix(x, type, K, false), gemm_matrix(w, type, K, true), NULL,
                     DTYPE_F32, M, N, K);
    if (product == BACKWARD_INPUT)
        gemm_compute(b->out, out, K, false, gemm_matrix(y, type, N, false), gemm_matrix(w, type, K, false), NULL,
                     DTYPE_F32, M, K, N);
    if (product == BACKWARD_WEIGHT)
        gemm_compute(b->out, out, K, true, gemm_matrix(y, type, N, true), gemm_matrix(x, type, K, false), NULL,
                     DTYPE_F32, N, K, M);
}

static double median(double* values, int count) {
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return 0.5 * (values[(count - 1) / 2] + values[count / 2]);
}

static double bench_ms(const Bench* b) {
    return b->processor_time ? clock_ms(CLOCK_PROCESS_CPUTIME_ID) / b->threads : now_ms();
}

// GFLOP/s of all threads together.
static double bench_peak(const Bench* b, PeakLoop peak) {
    clockid_t clock = b->processor_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
    return 1e-9 * peak_measure(peak, (size_t)b->threads, clock, 2.0);
}

// Each round: peak, matmul for 15 ms or more, peak. The share of the peak is the median over rounds of their ratios.
static void time_rung(const Bench* b, Rung r, Product product, size_t M, size_t N, size_t K) {
    enum { ROUNDS = 64 };
    double times[ROUNDS], shares[ROUNDS], minimum = INFINITY, gflop = 2e-9 * (double)M * (double)N * (double)K;
    Error error;
    gemm_force(&error, "auto");  // the peak is the best kernel's, whatever the rung
    PeakLoop peak = peak_loop(r.bf16);
    if (r.kind == RUNG_KERNEL && !gemm_force(&error, r.name)) return;
    threads_set((size_t)b->threads);
    int rounds = b->rounds;
    run_rung(b, r, product, M, N, K);
    for (int round = 0; round < rounds; round++) {
        double before = bench_peak(b, peak), begin = bench_ms(b), end = begin;
        size_t calls = 0;
        for (; end - begin < 15.0; calls++) {
            double start = bench_ms(b);
            run_rung(b, r, product, M, N, K);
            end = bench_ms(b);
            if (end - start < minimum) minimum = end - start;
        }
        times[round] = (end - begin) / (double)calls;
        double after = bench_peak(b, peak);
        shares[round] = gflop / (1e-3 * times[round]) / (0.5 * (before + after));
        if (times[round] > 300.0) rounds = 3;
    }
    double middle = median(times, rounds), share = median(shares, rounds);
    const char* type = r.bf16 ? r.out_bf16 ? "bf16 to bf16" : "bf16 to f32" : "f32";
    if (b->json)
        printf("{\"rung\": \"%s\", \"type\": \"%s\", \"product\": \"%s\", \"M\": %zu, \"N\": %zu, \"K\": %zu, "
               "\"threads\": %d, \"median_ms\": %.4f, \"min_ms\": %.4f, \"gflops\": %.1f, \"peak_share\": %.3f}\n",
               r.name, type, product_names[product], M, N, K, b->threads, middle, minimum, 1e3 * gflop / middle, share);
    else
        printf("%-11s %-12s %-12s %5zu x %5zu x %4zu %10.3f %10.3f %9.1f %6.1f%%\n", r.name, type,
               product_names[product], M, N, K, middle, minimum, 1e3 * gflop / middle, 100.0 * share);
    fflush(stdout);
}

static const Rung rungs[] = {{RUNG_NAIVE, "naive", false, false},         {RUNG_BLOCKED, "blocked", false, false},
                             {RUNG_KERNEL, "portable", false, false},     {RUNG_KERNEL, "avx2", false, false},
                             {RUNG_KERNEL, "avx512", false, false},       {RUNG_OPENBLAS, "openblas", false, false},
                             {RUNG_KERNEL, "avx512bf16", true, false},    {RUNG_KERNEL, "avx512bf16", true, true},
                             {RUNG_KERNEL, "amx", true, false},           {RUNG_KERNEL, "amx", true, true}};
static const Rung best_rungs[] = {{RUNG_KERNEL, "auto", false, false},
                                  {RUNG_OPENBLAS, "openblas", false, false},
                                  {RUNG_KERNEL, "auto", true, false},
                                  {RUNG_KERNEL, "auto", true, true}};

static bool bench_allocate(Bench* b, size_t M, size_t N, size_t K) {
    size_t sizes[3] = {M * K, N * K, M * N}, largest = max_size(max_size(M * K, N * K), M * N);
    void** floats[3] = {&b->x, &b->w, &b->y};
    void** halves[3] = {&b->x16, &b->w16, &b->y16};
    for (int i = 0; i < 3; i++) {
        *floats[i] = memory_allocate(sizes[i] * 4);
        *halves[i] = memory_allocate(sizes[i] * 2);
        if (!*floats[i] || !*halves[i]) return false;
        for (size_t e = 0; e < sizes[i]; e++) {
            float value = (float)((e * 2654435761u >> 7 & 0xffff) + (size_t)i) * 0x1p-15f - 1.0f;
            ((float*)*floats[i])[e] = value;
            ((uint16_t*)*halves[i])[e] = bf16_from_float(value);
        }
    }
    b->out = (float*)memory_allocate(largest * 4);
    return b->out != NULL;
}
static void bench_free(Bench* b) {
    void* all[7] = {b->x, b->w, b->y, b->x16, b->w16, b->y16, b->out};
    for (int i = 0; i < 7; i++) free(all[i]);
}

static bool bench_shape(Bench* b, const Rung* list, size_t count, size_t M, size_t N, size_t K, int products) {
    if (!bench_allocate(b, M, N, K)) return false;
    for (int product = 0; product < products; product++)
        for (size_t i = 0; i < count; i++) {
            if (list[i].kind == RUNG_OPENBLAS && !b->openblas) continue;
            if (list[i].kind <= RUNG_BLOCKED && product != FORWARD) continue;
            time_rung(b, list[i], (Product)product, M, N, K);
        }
    bench_free(b);
    return true;
}

static bool bench_all(Bench* b) {
    size_t all = sizeof rungs / sizeof rungs[0], best = sizeof best_rungs / sizeof best_rungs[0];
    if (!b->json)
        printf("%s; %d threads\n%-11s %-12s %-12s %-20s %10s %10s %9s %7s\n", gemm_backend(), b->threads, "rung",
               "type", "product", "    M x     N x    K", "median ms", "min ms", "GFLOP/s", "of peak");
    if (b->m || b->n || b->k)
        return bench_shape(b, rungs, all, b->m ? b->m : 1024, b->n ? b->n : 768, b->k ? b->k : 768, PRODUCTS);
    static const size_t layers[5][2] = {{2304, 768}, {768, 768}, {3072, 768}, {768, 3072}, {50304, 768}};
    static const size_t tiny[4][2] = {{384, 128}, {128, 128}, {512, 128}, {256, 128}};
    if (!bench_shape(b, rungs, all, 256, 2304, 768, 1)) return false;
    for (int i = 0; i < 5; i++)
        if (!bench_shape(b, best_rungs, best, 1024, layers[i][0], layers[i][1], PRODUCTS)) return false;
    for (int i = 0; i < 4; i++)
        if (!bench_shape(b, best_rungs, best, 768, tiny[i][0], tiny[i][1], PRODUCTS)) return false;
    return bench_shape(b, best_rungs, best, 1, 3072, 768, 1) && bench_shape(b, best_rungs, best, 1, 50304, 768, 1);
}

static bool parse_size(size_t* value, const char* text) {
    char* end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    *value = (size_t)number;
    return errno == 0 && end != text && *end == '\0' && text[0] != '-' && number > 0 && number < (1u << 30);
}

int main(int argc, char** argv) {
    if (argc == 2 && strcmp(argv[1], "--check") == 0) return check_all(NULL);
    for (int n = 0; n < KERNELS && argc == 3 && strcmp(argv[1], "--check") == 0; n++)
        if (strcmp(argv[2], kernel_names[n]) == 0) return check_all(kernel_names[n]);
    Bench b;
    memset(&b, 0, sizeof b);
    b.rounds = 7;
    b.threads = (int)threads_count();
    for (int i = 1; i < argc; i++) {
        size_t value = 1;
        bool has_value = i + 1 < argc && parse_size(&value, argv[i + 1]), good = has_value;
        if (strcmp(argv[i], "--json") == 0) b.json = good = true, has_value = false;
        else if (strcmp(argv[i], "--processor-time") == 0) b.processor_time = good = true, has_value = false;
        else if (strcmp(argv[i], "--m") == 0) b.m = value;
        else if (strcmp(argv[i], "--n") == 0) b.n = value;
        else if (strcmp(argv[i], "--k") == 0) b.k = value;
        else if (strcmp(argv[i], "--threads") == 0) b.threads = (int)value;
        else if (strcmp(argv[i], "--rounds") == 0) b.rounds = (int)min_size(value, 64);
        else good = false;
        if (!good) {
            fprintf(stderr, "gemm: wrong flag or value at '%s': --check [KERNEL], or --m, --n, --k, --threads, "
                    "--rounds with a positive number, --json and --processor-time\n", argv[i]);
            return 2;
        }
        i += has_value;
    }
    void* library = dlopen("libopenblas.so.0", RTLD_NOW);
    if (library) {
        void* symbol = dlsym(library, "cblas_sgemm");
        void* threads = dlsym(library, "openblas_set_num_threads");
        void (*set_threads)(int);
        memcpy(&b.openblas, &symbol, sizeof symbol);
        memcpy(&set_threads, &threads, sizeof threads);
        if (threads) set_threads(b.threads);
    } else if (!b.json) printf("OpenBLAS is not installed (libopenblas0): no comparison\n");
    if (!bench_all(&b)) {
        fprintf(stderr, "gemm: no memory for the operands; choose smaller --m, --n, --k\n");
        return 1;
    }
    return 0;
}
