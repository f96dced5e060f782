// dev/attention_backward.cu: the ladder of attention's backward.
//
//     p_ij = exp(q_i k_j / sqrt(D) - lse_i),   delta_i = dout_i out_i,   ds_ij = p_ij (dout_i v_j - delta_i)
//     dv_j = sum over i of p_ij dout_i
//     dq_i = sum over j of ds_ij k_j / sqrt(D),   dk_j = sum over i of ds_ij q_i / sqrt(D)
//
// for j <= i; dk and dv are sums over the query heads that share a key head as well. Five products of D multiply-adds
// for each pair (i, j <= i), 5 B H T^2 D flops, of which the rates are computed; arithmetic is the bound.
//
//     rung      idea                                                       expected
//     naive     p and ds in memory, a thread per number, a sum per output  a load per multiply-add: 1% of float's peak
//     plain     tiles in shared memory, p and ds made again where they are 7 products for 5, at most half of float's
//               needed: once for dq, once for dk and dv                    peak on each: up to 35%
//     shipped   the same on tensor cores, p and ds in registers            7 for 5, and 0.4 to 0.6 loads from shared
//               (16-bit storage and head sizes 8, 16, ... 128)             memory a product: 30 to 45% of mma's peak
//
// Where the head size or the type has no tensor cores, shipped is plain. All are deterministic: each output is one sum
// in a fixed order. None of this is measured yet.
//
//     nvcc -O3 -arch=native -DLLMTRAIN_CUDA -DPRECISION_BF16 -Xcompiler -fopenmp
//         dev/attention_backward.cu -o build/attention_backward -lcublasLt
//     build/attention_backward --batch 4 --seq 4096 --heads 16 --kv-heads 16 --head-size 128

#include "llmtrain/attention.cuh"
#include "ladder.h"

typedef struct {
    size_t B, T, H, K, D;
    floatX* dqkv;               // (B, T, (H + 2K) D)
    float* delta;               // (B, H, T)
    const floatX *dout, *out;   // (B, T, H, D)
    const float* lse;           // (B, H, T)
    const floatX* qkv;          // (B, T, (H + 2K) D)
    float *p, *ds;              // (B, H, T, T), of the naive rung
} Attention;

// ------------------------------------------------------------------------------------------------
// Naive: thread i makes number i

static __global__ void delta_naive(float* delta, const floatX* dout, const floatX* out, size_t B, size_t T, size_t H,
                                   size_t D) {
    size_t i = ladder_index(), t = i % T, h = i / T % H, b = i / (T * H), at = ((b * T + t) * H + h) * D;
    if (b >= B) return;
    float sum = 0.0f;
    for (size_t d = 0; d < D; d++) sum += float_of(dout[at + d]) * float_of(out[at + d]);
    delta[i] = sum;
}

static __global__ void probabilities_naive(float* p, float* ds, const floatX* dout, const float* lse,
                                           const float* delta, const floatX* qkv,
                                           size_t B, size_t T, size_t H, size_t K, size_t D) {
    size_t i = ladder_index(), key = i % T, query = i / T % T, h = i / (T * T) % H, b = i / (T * T * H);
    if (b >= B || key > query) return;
    HeadRows at = head_rows(b, h, T, H, K, D);
    const floatX *q = qkv + at.q + query * at.stride, *k = qkv + at.k + key * at.stride;
    const floatX *v = qkv + at.v + key * at.stride, *g = dout + ((b * T + query) * H + h) * D;
    float score = 0.0f, dp = 0.0f;
    for (size_t d = 0; d < D; d++) {
        score += float_of(q[d]) * float_of(k[d]);
        dp += float_of(g[d]) * float_of(v[d]);
    }
    p[i] = expf(score / sqrtf((float)D) - lse[i / T]);
    ds[i] = p[i] * (dp - delta[i / T]);
}

// Element i of dqkv: of a query, key or value.
static __global__ void gradients_naive(floatX* dqkv, const float* p, const float* ds, const floatX* dout,
                                       const floatX* qkv, size_t B, size_t T, size_t H, size_t K, size_t D) {
    size_t i = ladder_index(), heads = H + 2 * K, d = i % D, head = i / D % heads, t = i / (D * heads) % T;
    size_t b = i / (D * heads * T), group = H / K, kv = (head - H) % K;
    float sum = 0.0f, scale = 1.0f / sqrtf((float)D);
    if (b >= B) return;
    if (head < H) {
        HeadRows at = head_rows(b, head, T, H, K, D);
        for (size_t key = 0; key <= t; key++)
            sum += ds[((b * H + head) * T + t) * T + key] * float_of(qkv[at.k + key * at.stride + d]) * scale;
    } else {
        for (size_t h = kv * group; h < (kv + 1) * group; h++) {
            HeadRows at = head_rows(b, h, T, H, K, D);
            for (size_t query = t; query < T; query++) {
                size_t pair = ((b * H + h) * T + query) * T + t;
                sum += head < H + K ? ds[pair] * float_of(qkv[at.q + query * at.stride + d]) * scale
                                    : p[pair] * float_of(dout[((b * T + query) * H + h) * D + d]);
            }
        }
    }
    dqkv[i] = floatX_of(sum);
}

// ------------------------------------------------------------------------------------------------
// Rungs

static void run_naive(void* problem, Stream stream) {
    Attention* a = (Attention*)problem;
    size_t rows = a->B * a->H * a->T, n = a->B * a->T * (a->H + 2 * a->K) * a->D;
    delta_naive<<<ladder_blocks(rows), LADDER_THREADS, 0, stream->compute>>>(
        a->delta, a->dout, a->out, a->B, a->T, a->H, a->D);
    LAUNCH_CHECK();
    probabilities_naive<<<ladder_blocks(rows * a->T), LADDER_THREADS, 0, stream->compute>>>(
        a->p, a->ds, a->dout, a->lse, a->delta, a->qkv, a->B, a->T, a->H, a->K, a->D);
    LAUNCH_CHECK();
    gradients_naive<<<ladder_blocks(n), LADDER_THREADS, 0, stream->compute>>>(
        a->dqkv, a->p, a->ds, a->dout, a->qkv, a->B, a->T, a->H, a->K, a->D);
    LAUNCH_CHECK();
}

static void run_plain(void* problem, Stream stream) {
    Attention* a = (Attention*)problem;
    attention_delta_launch(a->delta, a->dout, a->out, a->B, a->T, a->H, a->D, stream);
    attention_backward_plain_any(a->dqkv, a->delta, a->dout, a->lse, a->qkv, a->B, a->T, a->H, a->K, a->D, stream);
}

static void run_shipped(void* problem, Stream stream) {
    Attention* a = (Attention*)problem;
    attention_backward(a->dqkv, a->delta, a->dout, a->out, a->lse, a->qkv, a->B, a->T, a->H, a->K, a->D, stream);
}

int main(int argc, char** argv) {
    uint64_t B = ladder_size(4, 1), T = ladder_size(2048, 150), H = ladder_size(16, 4), K = ladder_size(16, 2), D = 64;
    Flag flags[] = {
        {"batch", FLAG_COUNT, &B, "B", 1, 1e6, "samples", false},
        {"seq", FLAG_COUNT, &T, "T", 1, 1e6, "positions of a sample", false},
        {"heads", FLAG_COUNT, &H, "H", 1, 1e4, "query heads", false},
        {"kv-heads", FLAG_COUNT, &K, "K", 1, 1e4, "key/value heads, of which --heads is a multiple", false},
        {"head-size", FLAG_COUNT, &D, "D", 1, ATTENTION_MAX_D, "numbers in a head", false},
    };
    Ladder l = {};
    const char* title = "attention, backward: dqkv (B, T, (H + 2K) D) from dout (B, T, H, D)";
    if (!ladder_open(&l, argc, argv, title, flags, 5)) return l.status;
    ladder_tensor_peak(&l);
    if (H % K != 0) ladder_give_up("--heads is not a multiple of --kv-heads; give one that is");
    size_t n = B * T * (H + 2 * K) * D, outs = B * T * H * D, rows = B * H * T;
    // As in the forward, for normal random inputs; a key's gradients are sums over group heads of terms of both signs,
    // and over some queries that look at little else.
    double group = sqrt((double)(H / K)), size = 16.0 * group, length = (double)(T + D);
    Attention a;
    memset(&a, 0, sizeof a);
    a.B = B, a.T = T, a.H = H, a.K = K, a.D = D;
    floatX* out = ladder_input<floatX>(&l, "out", outs, 1.0);
    float* lse = ladder_input<float>(&l, "lse", rows, 1.0);
    a.out = out, a.lse = lse;
    a.qkv = ladder_input<floatX>(&l, "qkv", n, 1.0);
    a.dout = ladder_input<floatX>(&l, "dout", outs, 1.0);
    LadderBound bound = ladder_bound(length, size, FLOATX_IS_FLOAT ? 0.0 : 2.0 * group);
    a.dqkv = ladder_output<floatX>(&l, "dqkv", n, bound);
    a.delta = ladder_output<float>(&l, "delta", rows, ladder_bound((double)D, (double)D, 0.0));
    if (ladder_wants(&l, "naive")) {
        a.p = (float*)ladder_scratch(&l, rows * T * sizeof(float));
        a.ds = (float*)ladder_scratch(&l, rows * T * sizeof(float));
    }
    if (l.check) {
        floatX *out_twin = ladder_twin(&l, out), *dqkv = ladder_twin(&l, a.dqkv);
        float *lse_twin = ladder_twin(&l, lse), *delta = ladder_twin(&l, a.delta);
        const floatX *qkv = ladder_twin(&l, a.qkv), *dout = ladder_twin(&l, a.dout);
        cpu::attention_forward(out_twin, lse_twin, qkv, B, T, H, K, D, NULL);
        ladder_update(&l, out);
        ladder_update(&l, lse);
        cpu::attention_backward(dqkv, delta, dout, out_twin, lse_twin, qkv, B, T, H, K, D, NULL);
    }
    double flops = 5.0 * (double)rows * (double)(T + 1) * (double)D;
    ladder_work(&l, FLOATX_IS_FLOAT ? LADDER_FLOAT_FLOPS : LADDER_TENSOR_FLOPS, flops);
    ladder_rung(&l, "naive", run_naive, &a);
    ladder_rung(&l, "plain", run_plain, &a);
    ladder_rung(&l, "shipped", run_shipped, &a);
    ladder_close(&l);
    return ladder_result(&l);
}
