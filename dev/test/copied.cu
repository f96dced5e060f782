// copied.cu: for copy.sh, which compiles it once for each piece that it copies into an empty folder, with -DPIECE_NAME.
// Each piece's program calls what was copied and compares it with plain loops in double.

#include "piece.h"

static int wrong;

static void expect(const char* what, double got, double wanted, double bound) {
    bool good = fabs(got - wanted) <= bound;  // not so for NaN
    if (!good) printf("FAILED %s: %g instead of %g, bound %g\n", what, got, wanted, bound);
    wrong += !good;
}

static float number(size_t i) { return (float)((i * 2654435761u >> 7) % 2001) / 1000.0f - 1.0f; }  // in [-1, 1]

#ifndef PIECE_KERNELS_CPU

#include <vector>

static struct Device device;
Stream stream = &device;

template <typename T>
static T* upload(const std::vector<T>& host) {
    T* memory;
    CUDA_CHECK(cudaMalloc((void**)&memory, host.size() * sizeof(T)));
    CUDA_CHECK(cudaMemcpy(memory, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return memory;
}

template <typename T>
static std::vector<T> download(const T* memory, size_t n) {
    std::vector<T> host(n);
    CUDA_CHECK(cudaStreamSynchronize(device.compute));
    CUDA_CHECK(cudaMemcpy(host.data(), memory, n * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
}

std::vector<floatX> numbers(size_t n, size_t seed) {
    std::vector<floatX> x(n);
    for (size_t i = 0; i < n; i++) x[i] = floatX_of(number(i + 1000 * seed));
    return x;
}

std::vector<float> zeros(size_t n) { return std::vector<float>(n); }
#define D(x) ((double)float_of(x))
#endif

#ifdef PIECE_ATTENTION
static void test(void) {
    enum { T = 70, H = 4, K = 2, HEAD = 64, ROW = (H + 2 * K) * HEAD };
    std::vector<floatX> qkv = numbers(T * ROW, 1), dout = numbers(T * H * HEAD, 2), none(T * H * HEAD), none3(T * ROW);
    floatX *qkv_d = upload(qkv), *out_d = upload(none), *dqkv_d = upload(none3);
    float *lse = upload(zeros(H * T)), *delta = upload(zeros(H * T));
    attention_forward(out_d, lse, qkv_d, 1, T, H, K, HEAD, stream);
    attention_backward(dqkv_d, delta, upload(dout), out_d, lse, qkv_d, 1, T, H, K, HEAD, stream);
    std::vector<floatX> out = download(out_d, T * H * HEAD), dqkv = download(dqkv_d, T * ROW);
    double dv[T][K] = {};  // of element 3 of each head
    for (size_t t = 0; t < T; t++) {
        for (size_t h = 0; h < H; h++) {
            HeadRows at = head_rows(0, h, T, H, K, HEAD);
            double p[T], total = 0, sum = 0;
            for (size_t j = 0; j <= t; j++) {
                double score = 0;
                for (size_t d = 0; d < HEAD; d++)
                    score += D(qkv[at.q + t * at.stride + d]) * D(qkv[at.k + j * at.stride + d]);
                total += p[j] = exp(score / sqrt((double)HEAD));
            }
            for (size_t j = 0; j <= t; j++) {
                sum += p[j] / total * D(qkv[at.v + j * at.stride + 3]);
                dv[j][h / (H / K)] += p[j] / total * D(dout[(t * H + h) * HEAD + 3]);
            }
            expect("out", D(out[(t * H + h) * HEAD + 3]), sum, 0.02);
        }
    }
    for (size_t t = 0; t < T; t++)
        for (size_t k = 0; k < K; k++) expect("dv", D(dqkv[t * ROW + (H + K + k) * HEAD + 3]), dv[t][k], 0.05);
}
#endif

#if defined(PIECE_MATMUL) || defined(PIECE_FUSED)
static void test(void) {
    enum { M = 9, N = 16, L = 24 };  // L inputs
    std::vector<floatX> in = numbers(M * L, 1), weight = numbers(N * L, 2), bias = numbers(N, 3), none(M * N);
    floatX *in_d = upload(in), *weight_d = upload(weight), *bias_d = upload(bias), *out_d = upload(none);
#ifdef PIECE_FUSED
    matmul_gelu_forward(out_d, upload(none), in_d, weight_d, bias_d, M, N, L, stream);
#else
    matmul_forward(out_d, in_d, weight_d, bias_d, M, N, L, stream);
    float *dweight = upload(zeros(N * L)), *dbias = upload(zeros(N));
    matmul_backward_weight(dweight, dbias, out_d, in_d, M, N, L, stream);
#endif
    std::vector<floatX> out = download(out_d, M * N);
    for (size_t m = 0; m < M; m++) {
        for (size_t n = 0; n < N; n++) {
            double sum = D(bias[n]);
            for (size_t k = 0; k < L; k++) sum += D(in[m * L + k]) * D(weight[n * L + k]);
#ifdef PIECE_FUSED
            sum = 0.5 * sum * (1 + tanh(0.7978845608 * (sum + 0.044715 * sum * sum * sum)));
#endif
            expect("out", D(out[m * N + n]), sum, 0.05);
        }
    }
#ifdef PIECE_MATMUL
    double column = 0;
    for (size_t m = 0; m < M; m++) column += D(out[m * N + 5]);
    expect("dbias", (double)download(dbias, N)[5], column, 1e-3);
#endif
}
#endif

#ifdef PIECE_EMBEDDING
static void test(void) {
    enum { B = 2, T = 5, C = 24, V = 7 };
    std::vector<int32_t> tokens = {3, 1, 3, 0, 6, 6, 3, 2, 1, 3};
    std::vector<floatX> token = numbers(V * C, 1), position = numbers(T * C, 2);
    std::vector<floatX> dout = numbers(B * T * C, 3), none(B * T * C);
    floatX* out_d = upload(none);
    float* dtoken_d = upload(zeros(V * C));
    embedding_forward(out_d, upload(tokens), upload(token), upload(position), 0, B, T, C, stream);
    embedding_backward(dtoken_d, NULL, upload(dout), upload(tokens), B, T, C, stream);
    std::vector<floatX> out = download(out_d, B * T * C);
    std::vector<float> dtoken = download(dtoken_d, V * C);
    for (size_t i = 0; i < B * T * C; i++) {
        size_t row = i / C, v = (size_t)tokens[row] * C + i % C;
        expect("out", D(out[i]), D(token[v]) + D(position[row % T * C + i % C]), 0.01);
        dtoken[v] -= float_of(dout[i]);
    }
    for (size_t i = 0; i < V * C; i++) expect("dtoken_weight", (double)dtoken[i], 0, 1e-5);
}
#endif

#ifdef PIECE_NORMALISATION
static void test(void) {
    enum { N = 6, C = 40 };
    std::vector<floatX> in = numbers(N * C, 1), weight = numbers(C, 2), bias = numbers(C, 3);
    std::vector<floatX> dout = numbers(N * C, 4), none(N * C);
    floatX *out_d = upload(none), *in_d = upload(in), *weight_d = upload(weight);
    float *mean = upload(zeros(N)), *rstd = upload(zeros(N)), *dweight = upload(zeros(C)), *dbias = upload(zeros(C));
    layernorm_forward(out_d, NULL, mean, rstd, in_d, NULL, weight_d, upload(bias), 1e-5f, N, C, stream);
    layernorm_backward(upload(none), dweight, dbias, upload(dout), in_d, weight_d, mean, rstd, N, C, stream);
    std::vector<floatX> out = download(out_d, N * C);
    double column = 0;
    for (size_t row = 0; row < N; row++) {
        double m = 0, square = 0;
        for (size_t c = 0; c < C; c++) m += D(in[row * C + c]) / C;
        for (size_t c = 0; c < C; c++) square += (D(in[row * C + c]) - m) * (D(in[row * C + c]) - m) / C;
        double normal = (D(in[row * C + 7]) - m) / sqrt(square + 1e-5);
        expect("out", D(out[row * C + 7]), normal * D(weight[7]) + D(bias[7]), 0.02);
        column += D(dout[row * C + 7]);
    }
    expect("dbias", (double)download(dbias, C)[7], column, 1e-4);
}
#endif

#ifdef PIECE_ROPE
static void test(void) {
    enum { T = 5, H = 2, K = 1, HEAD = 16, ROW = (H + 2 * K) * HEAD };
    std::vector<floatX> x = numbers(T * ROW, 1);
    std::vector<float> table;
    for (size_t i = 0; i < T * HEAD / 2; i++) table.push_back(cosf((float)i)), table.push_back(sinf((float)i));
    floatX* x_d = upload(x);
    rope_forward(x_d, upload(table), 0, 1, T, H, K, HEAD, stream);
    std::vector<floatX> y = download(x_d, T * ROW);
    for (size_t t = 0; t < T; t++) {
        double angle = (double)(t * HEAD / 2 + 3);
        expect("x", D(y[t * ROW + 3]), D(x[t * ROW + 3]) * cos(angle) - D(x[t * ROW + 11]) * sin(angle), 0.02);
    }
    rope_backward(x_d, upload(table), 1, T, H, K, HEAD, stream);
    y = download(x_d, T * ROW);
    for (size_t i = 0; i < T * ROW; i++) expect("turned back", D(y[i]), D(x[i]), 0.02);
}
#endif

#ifdef PIECE_DECODE
static void test(void) {
    enum { H = 2, K = 1, HEAD = 16, CONTEXT = 4, ROW = (H + 2 * K) * HEAD };
    std::vector<floatX> none(H * HEAD), cache(CONTEXT * HEAD), first = numbers(ROW, 1), second = numbers(ROW, 2);
    floatX *out_d = upload(none), *keys = upload(cache), *values = upload(cache);
    float* scores = upload(zeros(H * CONTEXT));
    attention_decode(out_d, keys, values, scores, upload(first), 0, CONTEXT, H, K, HEAD, stream);
    expect("the only value", D(download(out_d, H * HEAD)[5]), D(first[(H + K) * HEAD + 5]), 0);
    attention_decode(out_d, keys, values, scores, upload(second), 1, CONTEXT, H, K, HEAD, stream);
    double a = 0, b = 0;
    for (size_t d = 0; d < HEAD; d++) {
        a += D(second[d]) * D(first[H * HEAD + d]) / 4;  // sqrt(HEAD)
        b += D(second[d]) * D(second[H * HEAD + d]) / 4;
    }
    double p = 1 / (1 + exp(b - a)), v = p * D(first[(H + K) * HEAD + 5]) + (1 - p) * D(second[(H + K) * HEAD + 5]);
    expect("of two values", D(download(out_d, H * HEAD)[5]), v, 0.01);
}
#endif

#ifdef PIECE_GELU_AND_SWIGLU
static void test(void) {
    enum { N = 4, F = 24 };
    std::vector<floatX> in = numbers(N * 2 * F, 1), none(N * 2 * F);
    floatX *gelu_d = upload(none), *swiglu_d = upload(none);
    gelu_forward(gelu_d, upload(in), N * 2 * F, stream);
    swiglu_forward(swiglu_d, upload(in), N, F, stream);
    std::vector<floatX> gelu = download(gelu_d, N * 2 * F), swiglu = download(swiglu_d, N * F);
    for (size_t i = 0; i < N * 2 * F; i++) {
        double x = D(in[i]);
        expect("gelu", D(gelu[i]), 0.5 * x * (1 + tanh(0.7978845608 * (x + 0.044715 * x * x * x))), 0.01);
    }
    for (size_t i = 0; i < N * F; i++) {
        double gate = D(in[i / F * 2 * F + i % F]), up = D(in[i / F * 2 * F + F + i % F]);
        expect("swiglu", D(swiglu[i]), gate / (1 + exp(-gate)) * up, 0.01);
    }
}
#endif

#ifdef PIECE_RANDOM_NUMBERS
static __global__ void draw(uint32_t* out) {
    for (int j = 0; j < 4; j++) out[j] = group_random<4>(5, RANDOM_TEST, 6, 8, j);
}
static void test(void) {
    uint32_t* out = upload(std::vector<uint32_t>(4));
    draw<<<1, 1, 0, stream->compute>>>(out);
    LAUNCH_CHECK();
    for (size_t j = 0; j < 4; j++) expect("bits", download(out, 4)[j], random_bits(5, RANDOM_TEST, 6, 8 + j), 0);
}
#endif

#ifdef PIECE_DROPOUT
static void test(void) {
    enum { N = 4096 };
    std::vector<floatX> in = numbers(N, 1);
    floatX* x_d = upload(in);
    dropout(x_d, x_d, 0.25f, 1, 2, 0, N, stream);
    std::vector<floatX> out = download(x_d, N);
    double kept = 0;
    for (size_t i = 0; i < N; i++) {
        bool keeps = random_bits(1, RANDOM_DROPOUT, 2, i) >= 1u << 30;
        expect("element", D(out[i]), keeps ? D(in[i]) / 0.75 : 0, 0.01);
        kept += keeps;
    }
    expect("elements kept", kept / N, 0.75, 0.05);
}
#endif

#ifdef PIECE_CLASSIFIER
static void test(void) {
    enum { N = 3, V = 21, VP = 32 };
    std::vector<floatX> logits = numbers(N * VP, 1);
    std::vector<int32_t> targets = {4, -1, 20};
    floatX* x_d = upload(logits);
    float* losses_d = upload(zeros(N));
    classifier(x_d, losses_d, upload(targets), 0.5f, N, V, VP, stream);
    std::vector<floatX> gradient = download(x_d, N * VP);
    std::vector<float> losses = download(losses_d, N);
    for (size_t row = 0; row < N; row++) {
        double total = 0;
        const floatX* x = &logits[row * VP];
        for (size_t v = 0; v < V; v++) total += exp(D(x[v]));
        if (targets[row] >= 0) expect("loss", (double)losses[row], log(total) - D(x[targets[row]]), 1e-4);
        for (size_t v = 0; v < VP; v++) {
            double p = v < V ? exp(D(x[v])) / total - ((int32_t)v == targets[row]) : 0;
            expect("gradient", D(gradient[row * VP + v]), targets[row] < 0 ? 0 : 0.5 * p, 0.005);
        }
    }
}
#endif

#ifdef PIECE_SUMS
static void test(void) {
    enum { N = 1003 };
    std::vector<float> x(N);
    std::vector<floatX> stored = numbers(N, 1);
    double squares = 0;
    uint64_t expected = 0;
    for (size_t i = 0; i < N; i++) {
        x[i] = number(i);
        squares += (double)x[i] * (double)x[i];
        expected += checksum_element(stored[i], 7 + i);
    }
    double* out = upload(std::vector<double>(1));
    uint64_t* hash = upload(std::vector<uint64_t>(1));
    sum_of_squares(out, upload(x), N, stream);
    checksum(hash, upload(stored), 7, N, stream);
    expect("squares", download(out, 1)[0], squares, 1e-10);
    expect("checksum", download(hash, 1)[0] == expected, 1, 0);
}
#endif

#ifdef PIECE_FIXED_POINT
static void test(void) {
    std::vector<float> x = {1.5f, -0.25f, 3.0f, 100.0f, NAN};
    int64_t* sums = upload(std::vector<int64_t>(5));
    double* bad = upload(std::vector<double>(1));
    float* out = upload(zeros(5));
    exact_add(sums, bad, upload(x), 1024.0, 50.0, 5, stream);
    exact_merge(sums, sums, 5, stream);
    exact_read(out, sums, 1.0 / 1024.0, 5, stream);
    for (size_t i = 0; i < 5; i++) expect("twice", (double)download(out, 5)[i], i < 3 ? 2 * (double)x[i] : 0, 0);
    expect("bad", download(bad, 1)[0], 1, 0);
}
#endif

#ifdef PIECE_CASTS_ADD
static void test(void) {
    enum { N = 37 };
    std::vector<floatX> x = numbers(N, 1);
    float* y = upload(zeros(N));
    floatX* back = upload(std::vector<floatX>(N));
    cast_to_float(y, upload(x), N, stream);
    add_stored(y, upload(x), N, stream);
    cast_from_float(back, y, N, stream);
    for (size_t i = 0; i < N; i++) expect("twice", D(download(back, N)[i]), 2 * D(x[i]), 0);
}
#endif

#ifdef PIECE_OPTIMIZER
static void test(void) {
    enum { N = 37 };
    OptimizerStep step = {OPTIMIZER_ADAMW, 0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f, 1, 1};
    std::vector<float> w(N), g(N);
    for (size_t i = 0; i < N; i++) w[i] = number(i), g[i] = number(i + N);
    float *w_d = upload(w), *m = upload(zeros(N)), *v = upload(zeros(N));
    floatX* params = upload(std::vector<floatX>(N));
    optimizer_update(params, w_d, m, v, upload(g), &step, 0, N, stream);
    for (size_t i = 0; i < N; i++) {  // the first step of AdamW is as long as the learning rate
        double sign = g[i] > 0 ? 1 : g[i] < 0 ? -1 : 0, wanted = (double)w[i] - 0.01 * (sign + 0.1 * (double)w[i]);
        expect("w", (double)download(w_d, N)[i], wanted, 1e-4);
        expect("params", D(download(params, N)[i]), wanted, 0.01);
    }
}
#endif

#ifdef PIECE_SCRATCH
static void test(void) { expect("scratch_bytes", scratch_bytes(1000, 768) >= matmul_scratch_bytes(), 1, 0); }
#endif

#ifdef PIECE_KERNELS_CPU
// C11, and CUDA C++, where the operations are cpu::.
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
    _Exit(wrong > 0);  // the memory is not given back
}
