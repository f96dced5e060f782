// copied.cu: for copy.sh, which compiles it once for each piece that it copies into an empty folder, with -DPIECE_NAME.
// A piece's program calls the copied operations and the CPU's operations of the same names, and compares all outputs.
// The latter are compiled from the repository, with -DREFERENCE, and linked. Copied CPU operations are compared with
// plain loops in double.

#ifdef REFERENCE

#include "kernels_cpu.h"
#include "llmtrain/ops/nf4.h"

#define OPERATIONS(X) \
    X(attention_forward) X(attention_backward) X(attention_decode) X(matmul_forward) X(matmul_backward_weight) \
    X(matmul_gelu_forward) X(embedding_forward) X(embedding_backward) X(layernorm_forward) X(layernorm_backward) \
    X(qk_norm_forward) X(qk_norm_backward) X(rope_forward) X(rope_backward) X(gelu_forward) X(swiglu_forward) \
    X(heads_split) X(heads_join) X(heads_repeat) X(heads_sum) X(nf4_dequantize) X(columns_copy) X(columns_add) \
    X(columns_scale) X(leaves_sum) \
    X(embedding_part_forward) X(embedding_join) X(classifier_leaves) X(classifier_gradient) X(dropout_apply) \
    X(classifier) X(exact_sum_squares) X(sum_of_squares) X(vector_checksum) X(exact_add) X(exact_merge) X(exact_read) \
    X(cast_to_float) X(cast_from_float) X(vector_add_stored) X(residual_forward) \
    X(optimizer_update_elements) X(optimizer_update) X(optimizer_update_list)
#define REFERENCE_TO(name) decltype(&cpu::name) reference_##name = cpu::name;
OPERATIONS(REFERENCE_TO)

#else

#include "piece.h"

static int wrong;

static void expect(const char* what, double got, double wanted, double bound) {
    bool good = fabs(got - wanted) <= bound;  // false for NaN
    if (!good) printf("FAILED %s: %g instead of %g, bound %g\n", what, got, wanted, bound);
    wrong += !good;
}

static float number(size_t i) { return (float)((i * 2654435761u >> 7) % 2001) / 1000.0f - 1.0f; }  // in [-1, 1]

#ifndef PIECE_KERNELS_CPU

#include <vector>

static struct Device device;
Stream stream = &device;
bool on_cpu;

// The same array in both memories; it converts to the pointer for the operation to be called.
template <typename T>
struct Array {
    std::vector<T> host;
    T* copy;
    Array(std::vector<T> values) : host(values) {
        CUDA_CHECK(cudaMalloc((void**)&copy, host.size() * sizeof(T)));
        CUDA_CHECK(cudaMemcpy(copy, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    explicit Array(size_t n) : Array(std::vector<T>(n)) {}
    operator T*() { return on_cpu ? host.data() : copy; }
};
typedef Array<floatX> Stored;
typedef Array<float> Floats;

std::vector<floatX> numbers(size_t n, size_t seed) {
    std::vector<floatX> x(n);
    for (size_t i = 0; i < n; i++) x[i] = floatX_of(number(i + 1000 * seed));
    return x;
}

#define RUN(operation, ...)                                     \
    do {                                                        \
        extern decltype(&::operation) reference_##operation;    \
        on_cpu = false;                                         \
        ::operation(__VA_ARGS__, stream);                       \
        on_cpu = true;                                          \
        reference_##operation(__VA_ARGS__, NULL);               \
    } while (0)

template <typename T>
static double real(T x) {
    if constexpr (std::is_same<T, floatX>::value) return (double)float_of(x);
    else return (double)x;
}

template <typename T>
static std::vector<T> device_download(const Array<T>& array) {
    std::vector<T> got(array.host.size());
    CUDA_CHECK(cudaStreamSynchronize(device.compute));
    CUDA_CHECK(cudaMemcpy(got.data(), array.copy, got.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return got;
}

template <typename T>
static void same(const char* what, const Array<T>& array, double bound) {
    std::vector<T> got = device_download(array);
    for (size_t i = 0; i < got.size(); i++) expect(what, real(got[i]), real(array.host[i]), bound);
}

template <typename T>
static void same_bits(const char* what, const Array<T>& array) {
    expect(what, memcmp(device_download(array).data(), array.host.data(), array.host.size() * sizeof(T)), 0, 0);
}
#endif

#ifdef PIECE_ATTENTION
static void test(void) {
    enum { T = 70, H = 4, K = 2, HEAD = 64, ROW = (H + 2 * K) * HEAD };
    Stored qkv = numbers(T * ROW, 1), dout = numbers(T * H * HEAD, 2), out(T * H * HEAD), dqkv(T * ROW);
    Floats lse(H * T), delta(H * T);
    RUN(attention_forward, out, lse, qkv, 1, T, H, K, HEAD);
    RUN(attention_backward, dqkv, delta, dout, out, lse, qkv, 1, T, H, K, HEAD);
    same("out", out, 0.02);
    same("dqkv", dqkv, 0.05);
}
#endif

#ifdef PIECE_MATMUL
static void test(void) {
    enum { M = 9, N = 16, L = 24 };  // L: input channels
    Stored in = numbers(M * L, 1), weight = numbers(N * L, 2), bias = numbers(N, 3), dout = numbers(M * N, 4);
    Stored out(M * N);
    Floats dweight(N * L), dbias(N);
    RUN(matmul_forward, out, in, weight, bias, M, N, L);
    RUN(matmul_backward_weight, dweight, dbias, dout, in, true, M, N, L);
    same("out", out, 0.05);
    same("dweight", dweight, 1e-3);
    same("dbias", dbias, 1e-3);
}
#endif

#ifdef PIECE_FUSED
static void test(void) {
    enum { M = 9, N = 16, L = 24 };
    Stored in = numbers(M * L, 1), weight = numbers(N * L, 2), bias = numbers(N, 3), out(M * N), pre(M * N);
    RUN(matmul_gelu_forward, out, pre, in, weight, bias, M, N, L);
    same("out", out, 0.05);
    same("pre", pre, 0.05);
}
#endif

#ifdef PIECE_EMBEDDING
static void test(void) {
    enum { B = 2, T = 5, C = 24, V = 7 };
    Array<int32_t> tokens = std::vector<int32_t>{3, 1, 3, 0, 6, 6, 3, 2, 1, 3};
    Array<int32_t> positions = std::vector<int32_t>{0, 1, 2, 3, 4, 0, 1, 0, 1, 2};
    Stored token = numbers(V * C, 1), position = numbers(T * C, 2), dout = numbers(B * T * C, 3), out(B * T * C);
    Floats dtoken(V * C), dposition(T * C);
    RUN(embedding_forward, out, tokens, positions, token, position, B * T, C);
    RUN(embedding_backward, dtoken, dposition, dout, tokens, positions, B * T, C);
    same("out", out, 0.01);
    same("dtoken_weight", dtoken, 1e-5);
    same("dposition_weight", dposition, 1e-5);
}
#endif

#ifdef PIECE_NORMALIZATION
static void test(void) {
    enum { N = 6, C = 40 };
    Stored in = numbers(N * C, 1), weight = numbers(C, 2), bias = numbers(C, 3), dout = numbers(N * C, 4);
    Stored out(N * C), dx(N * C);
    Floats mean(N), rstd(N), dweight(C), dbias(C);
    RUN(layernorm_forward, out, NULL, mean, rstd, in, NULL, weight, bias, 1e-5f, N, C);
    RUN(layernorm_backward, dx, dweight, dbias, dout, in, weight, mean, rstd, N, C);
    same("out", out, 0.02);
    same("dx", dx, 0.05);
    same("dweight", dweight, 1e-3);
    same("dbias", dbias, 1e-4);
}
#endif

#ifdef PIECE_QK_NORM
static void test(void) {
    enum { T = 5, H = 2, K = 1, HEAD = 16, HEADS = H + 2 * K };
    Stored qkv = numbers(T * HEADS * HEAD, 1), q_weight = numbers(HEAD, 2), k_weight = numbers(HEAD, 3);
    Stored saved(T * (H + K) * HEAD), gradient = numbers(T * HEADS * HEAD, 4);
    Floats rstd(T * (H + K)), dq_weight(HEAD), dk_weight(HEAD);
    RUN(qk_norm_forward, qkv, saved, rstd, q_weight, k_weight, 1e-6f, T, H, K, HEAD);
    same("qkv", qkv, 0.02);
    same("saved", saved, 0);
    same("rstd", rstd, 1e-5);
    RUN(qk_norm_backward, gradient, dq_weight, dk_weight, saved, rstd, q_weight, k_weight, T, H, K, HEAD);
    same("dqkv", gradient, 0.05);
    same("dq_weight", dq_weight, 1e-3);
    same("dk_weight", dk_weight, 1e-3);
}
#endif

#ifdef PIECE_ROPE
static void test(void) {
    enum { T = 5, H = 2, K = 1, HEAD = 16, ROW = (H + 2 * K) * HEAD };
    std::vector<float> angles;
    for (size_t i = 0; i < T * HEAD / 2; i++) angles.push_back(cosf((float)i)), angles.push_back(sinf((float)i));
    Stored x = numbers(T * ROW, 1);
    Floats table = angles;
    Array<int32_t> positions = std::vector<int32_t>{0, 1, 2, 0, 4};
    RUN(rope_forward, x, table, positions, T, H, K, HEAD);
    same("x", x, 0.02);
    RUN(rope_backward, x, table, positions, T, H, K, HEAD);
    same("rotated back", x, 0.02);
    for (size_t i = 0; i < T * ROW; i++) expect("as it was", real(x.host[i]), real(numbers(T * ROW, 1)[i]), 0.02);
}
#endif

#ifdef PIECE_COLUMNS
static void test(void) {
    enum { N = 5, WIDTH = 96, FIRST = 32, COLUMNS = 16 };
    Stored wide = numbers(N * WIDTH, 1), narrow(N * COLUMNS);
    RUN(columns_scale, narrow, wide, 2.0f, FIRST, COLUMNS, N, WIDTH);
    same_bits("scaled", narrow);
    RUN(columns_add, wide, narrow, 0.5f, FIRST, COLUMNS, N, WIDTH);
    same_bits("added", wide);
    for (size_t i = 0; i < N * WIDTH; i++) {
        size_t column = i % WIDTH - FIRST;
        expect("twice in these columns", real(wide.host[i]),
               real(numbers(N * WIDTH, 1)[i]) * (column < COLUMNS ? 2 : 1), 0);
    }
}
#endif

#ifdef PIECE_HEADS
static void test(void) {
    enum { PARTS = 2, N = 5, H = 4, K = 2, HEAD = 16, ROW = (H + 2 * K) * HEAD };
    enum { COPIES = 4, LONG = (H + 2 * K * COPIES) * HEAD };
    Stored rows = numbers(N * ROW, 1), split(N * ROW), joined(N * ROW), repeated(N * LONG), sum(N * ROW);
    RUN(heads_split, split, rows, PARTS, N, H, K, HEAD);
    same_bits("split", split);
    RUN(heads_join, joined, split, PARTS, N, H, K, HEAD);
    same_bits("joined", joined);
    for (size_t i = 0; i < N * ROW; i++) expect("as it was", real(joined.host[i]), real(rows.host[i]), 0);
    RUN(heads_repeat, repeated, rows, COPIES, N, H, K, HEAD);
    same_bits("repeated", repeated);
    RUN(heads_sum, sum, repeated, COPIES, N, H, K, HEAD);
    same_bits("sum", sum);
    for (size_t i = 0; i < N * ROW; i++)
        expect("sum of copies", real(sum.host[i]), real(rows.host[i]) * (i % ROW < H * HEAD ? 1 : COPIES), 0);
}
#endif

#ifdef PIECE_NF4
static void test(void) {
    enum { N = 640, BLOCKS = N / NF4_BLOCK };
    Stored out(N);
    Array<uint8_t> codes = std::vector<uint8_t>(N / 2), scale_codes = std::vector<uint8_t>(BLOCKS);
    std::vector<float> weights(N);
    Floats scales(1), map(DYNAMIC_CODES);
    Nf4 q = {N, codes.host.data(), scales.host.data(), map.host.data(), scale_codes.host.data(), 0};
    Error error;
    for (size_t i = 0; i < N; i++) weights[i] = number(i) * (float)(1 + i / NF4_BLOCK);
    expect("quantized", nf4_quantize(&q, weights.data(), "weights", &error), true, 0);
    CUDA_CHECK(cudaMemcpy(codes.copy, q.codes, N / 2, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(scale_codes.copy, q.scale_codes, BLOCKS, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(scales.copy, q.scales, sizeof(float), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaMemcpy(map.copy, q.map, DYNAMIC_CODES * sizeof(float), cudaMemcpyHostToDevice));
    auto there = [&] {
        q.codes = codes, q.scales = scales, q.map = map, q.scale_codes = scale_codes;
        return (const Nf4*)&q;
    };
    RUN(nf4_dequantize, out, there(), 64, N - 64);
    same_bits("numbers", out);
    for (size_t i = 0; i < N - 64; i++)  // half of the largest distance between numbers, and the rounding of scales
        expect("weight", real(out.host[i]), weights[64 + i], 0.16 * (double)(2 + i / NF4_BLOCK));
}
#endif

#ifdef PIECE_LEAVES
static void test(void) {
    enum { PARTS = 2, LEAVES = 2, N = 5, C = 16, ROWS = 7, V = 27, COLUMNS = 16, VP = PARTS * COLUMNS };
    Stored sum(N * C), weight = numbers(PARTS * ROWS * C, 1), embedded(PARTS * N * C), joined(N * C);
    Stored logits = numbers(N * VP, 2), part(N * COLUMNS);
    Floats parts(4 * N * C), stats(PARTS * N * LEAVES * LEAF_STATS), losses(N);
    Array<int32_t> tokens = std::vector<int32_t>{0, 13, 6, 7, 3}, targets = std::vector<int32_t>{0, 26, -1, 15, 16};
    for (size_t i = 0; i < 4 * N * C; i++) parts.host[i] = number(i);
    CUDA_CHECK(cudaMemcpy(parts.copy, parts.host.data(), 4 * N * C * sizeof(float), cudaMemcpyHostToDevice));
    RUN(leaves_sum, sum, parts, weight, 4, N, C);
    same_bits("sum", sum);
    for (size_t p = 0; p < PARTS; p++)
        RUN(embedding_part_forward, embedded + p * N * C, tokens, weight + p * ROWS * C, p * ROWS, ROWS, N, C);
    RUN(embedding_join, joined, embedded, tokens, NULL, NULL, ROWS, N, C);
    same_bits("joined", joined);
    for (size_t n = 0; n < N * C; n++)
        expect("embedding", real(joined.host[n]), real(weight.host[(size_t)tokens.host[n / C] * C + n % C]), 0);
    for (size_t p = 0; p < PARTS; p++) {
        RUN(columns_copy, part, COLUMNS, logits + p * COLUMNS, VP, N, COLUMNS);
        RUN(classifier_leaves, stats + p * N * LEAVES * LEAF_STATS, part, targets, p * COLUMNS, LEAVES, N, V, COLUMNS);
    }
    same("statistics", stats, 1e-3);
    RUN(classifier_gradient, part, losses, stats, targets, 1.0f, NULL, COLUMNS, PARTS, LEAVES, N, V, COLUMNS);
    same("losses", losses, 1e-4);
    same("gradients", part, 0.01);
}
#endif

#ifdef PIECE_DECODE
static void test(void) {
    enum { H = 2, K = 1, HEAD = 16, CONTEXT = 4, ROW = (H + 2 * K) * HEAD };
    Stored out(2 * H * HEAD), keys(CONTEXT * HEAD), values(CONTEXT * HEAD);
    Stored first = numbers(ROW, 1), more = numbers(2 * ROW, 2);
    Array<int32_t> positions = std::vector<int32_t>{0, 1, 2};
    RUN(attention_decode, out, keys, values, NULL, first, positions, 1, 1, CONTEXT, H, K, HEAD);
    same("the only value", out, 0);
    RUN(attention_decode, out, keys, values, NULL, more, positions + 1, 1, 2, CONTEXT, H, K, HEAD);
    same("of two and of three values", out, 0.01);
}
#endif

#ifdef PIECE_GELU_AND_SWIGLU
static void test(void) {
    enum { N = 4, F = 24 };
    Stored in = numbers(N * 2 * F, 1), gelu(N * 2 * F), swiglu(N * F);
    RUN(gelu_forward, gelu, in, N * 2 * F);
    RUN(swiglu_forward, swiglu, in, N, F);
    same("gelu", gelu, 0.01);
    same("swiglu", swiglu, 0.01);
}
#endif

#ifdef PIECE_RANDOM
static __global__ void draw(uint32_t* out) {
    for (int j = 0; j < 4; j++) out[j] = group_random<4>(5, RANDOM_TEST, 6, 8, j);
}
static void test(void) {
    Array<uint32_t> out(4);
    draw<<<1, 1, 0, stream->compute>>>(out);
    LAUNCH_CHECK();
    for (size_t j = 0; j < 4; j++) out.host[j] = random_bits(5, RANDOM_TEST, 6, 8 + j);
    same_bits("bits", out);
}
#endif

#ifdef PIECE_DROPOUT
static void test(void) {
    enum { N = 4096 };
    Stored x = numbers(N, 1);
    double kept = 0;
    RUN(dropout_apply, x, x, 0.25f, 1, 2, 0, N);
    same("element", x, 0.01);
    for (size_t i = 0; i < N; i++) kept += random_bits(1, RANDOM_DROPOUT, 2, i) >= 1u << 30;
    expect("elements kept", kept / (double)N, 0.75, 0.05);
}
#endif

#ifdef PIECE_CLASSIFIER
static void test(void) {
    enum { N = 3, V = 21, VP = 32 };
    Stored logits = numbers(N * VP, 1);
    Array<int32_t> targets = std::vector<int32_t>{4, -1, 20};
    Floats losses(N);
    Floats weights = std::vector<float>{-1.5f, 1.0f, 0.25f};
    RUN(classifier, logits, losses, targets, 0.5f, weights, N, V, VP);
    same("loss", losses, 1e-4);
    same("gradient", logits, 0.005);
}
#endif

#ifdef PIECE_SUMS
static void test(void) {
    enum { N = 1003 };
    std::vector<float> values(N);
    for (size_t i = 0; i < N; i++) values[i] = number(i);
    Floats x = values;
    Stored stored = numbers(N, 1);
    Array<double> squares(1);
    Array<ExactSum> sum(1);
    Array<uint64_t> hash(1);
    RUN(sum_of_squares, squares, x, N);
    RUN(exact_sum_squares, sum, x, N);
    RUN(vector_checksum, hash, stored, 7, N);
    same("squares", squares, 1e-10);
    expect("exact squares", exact_value(device_download(sum)[0]), exact_value(sum.host[0]), 0);
    same_bits("checksum", hash);
}
#endif

#ifdef PIECE_FIXED_POINT
static void test(void) {
    Floats x = std::vector<float>{1.5f, -0.25f, 3.0f, 100.0f, NAN}, out(5);
    Array<int64_t> sums(5);
    Array<double> bad(1);
    RUN(exact_add, sums, bad, x, 1024.0, 50.0, 5);
    RUN(exact_merge, sums, sums, 5);
    RUN(exact_read, out, sums, 1.0 / 1024.0, 5);
    same("twice", out, 0);
    same("bad", bad, 0);
    expect("bad, of the CPU", bad.host[0], 1, 0);
}
#endif

#ifdef PIECE_CASTS_ADD
static void test(void) {
    enum { N = 37 };
    Stored x = numbers(N, 1), twice(N);
    Floats y(N);
    RUN(cast_to_float, y, x, N);
    RUN(vector_add_stored, y, x, N);
    RUN(residual_forward, x, x, x, N);
    RUN(cast_from_float, twice, y, N);
    same_bits("twice", twice);
}
#endif

#ifdef PIECE_ELEMENTWISE_OPTIMIZERS
static void test(void) {
    enum { N = 37 };
    OptimizerStep step = {OPTIMIZER_ADAMW, 0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 1, 1, 0};
    std::vector<float> weights(N), gradients(N);
    for (size_t i = 0; i < N; i++) weights[i] = number(i), gradients[i] = number(i + N);
    Floats w = weights, g = gradients, m(N), v(N);
    Stored params(N);
    auto slice = [&] {
        static OptimizerSlice all;
        all.params = params, all.master_weights = w, all.grads = g, all.n = N;
        all.states[0] = (float*)m, all.states[1] = (float*)v;
        return &all;
    };
    RUN(optimizer_update_elements, slice(), &step);
    same("w", w, 1e-4);
    same("params", params, 0.01);
}
#endif

#ifdef PIECE_ANY_OPTIMIZER
static void test(void) {
    enum { ROWS = 12, COLS = 20, N = ROWS * COLS };
    OptimizerStep step = {OPTIMIZER_MUON, 0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 1, 1, 0};
    TensorShape shape = {};
    shape.rows = ROWS, shape.cols = COLS, shape.hidden = true;
    std::vector<float> weights(N), gradients(N);
    for (size_t i = 0; i < N; i++) weights[i] = number(i), gradients[i] = number(i + N);
    Floats w = weights, g = gradients, m(N), scratch(optimizer_scratch_floats(OPTIMIZER_MUON, &shape, 0));
    Stored params(N);
    auto slice = [&] {
        static OptimizerSlice all;
        all.params = params, all.master_weights = w, all.grads = g, all.n = N, all.shape = shape;
        all.states[0] = (float*)m, all.scratch = scratch;
        return &all;
    };
    RUN(optimizer_update, slice(), &step);
    same("master weights", w, 1e-3);
    same("m", m, 1e-6);
}
#endif

#ifdef PIECE_SCRATCH
static void test(void) { expect("scratch_bytes", scratch_bytes(1000, 768) >= matmul_scratch_bytes(), 1, 0); }
#endif

#ifdef PIECE_KERNELS_CPU
// The CPU operations' names: plain in C11, cpu:: in CUDA C++.
#ifdef LLMTRAIN_CUDA
using namespace cpu;
#endif
static void test(void) {
    enum { M = 9, N = 16, L = 24 };
    floatX in[M * L], weight[N * L], out[M * N], gelu[M * N];
    for (size_t i = 0; i < M * L; i++) in[i] = floatX_of(number(i));
    for (size_t i = 0; i < N * L; i++) weight[i] = floatX_of(number(i + 1000));
    matmul_forward(out, in, weight, NULL, M, N, L, NULL);
    gelu_forward(gelu, out, M * N, NULL);
    for (size_t i = 0; i < M * N; i++) {
        double sum = 0, x = (double)float_of(out[i]);
        for (size_t k = 0; k < L; k++)
            sum += (double)float_of(in[i / N * L + k]) * (double)float_of(weight[i % N * L + k]);
        expect("out", x, sum, 0.05);
        double wanted = 0.5 * x * (1 + tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
        expect("gelu", (double)float_of(gelu[i]), wanted, 0.02);
    }
}
#endif

int main(void) {
#ifndef PIECE_KERNELS_CPU
    device.processors = 4;
    device.scratch_bytes = (size_t)48 << 20;
    CUDA_CHECK(cudaStreamCreateWithFlags(&device.compute, cudaStreamNonBlocking));
    CUDA_CHECK(cudaMalloc(&device.scratch, device.scratch_bytes));
#endif
    test();
    puts(wrong ? "wrong" : "right");
    fflush(stdout);
    _Exit(wrong > 0);  // without freeing memory
}
#endif  // REFERENCE
