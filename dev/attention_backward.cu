// dev/attention_backward.cu: the ladder of attention's backward.
//
//     p_ij = exp(q_i k_j / sqrt(D) - lse_i),   delta_i = dout_i out_i,   ds_ij = p_ij (dout_i v_j - delta_i)
//     dv_j = sum over i of p_ij dout_i
//     dq_i = sum over j of ds_ij k_j / sqrt(D),   dk_j = sum over i of ds_ij q_i / sqrt(D)
//
// for j <= i; dk and dv are also summed over the query heads that share a key head. Five matmuls, of D multiply-adds
// for each pair (i, j <= i): 5 B H T^2 D flops, from which the rates are computed; arithmetic is the bound.
//
//     rung      idea                                                       expected
//     naive     p and ds in memory, one thread per number, one sum per     a load per multiply-add: 1% of float's peak
//               output
//     plain     tiles in shared memory, p and ds computed twice: for dq,   7 products for 5, at most half of float's
//               and for dk and dv                                          peak on each: up to 35%
//     every     the same on tensor cores, p and ds in registers            7 for 5, and 0.4 to 0.6 loads from shared
//               (16-bit storage and head sizes 8, 16, ... 128)             memory per product: 30 to 45% of mma's peak
//     shipped   as many heads at a time as the L2 cache has room for       what blocks stream comes from memory once
//
// Where tensor cores do not support the head size or the dtype, shipped is plain. All rungs are deterministic: each
// output is one sum in a fixed order. None of this is measured yet.
//
// delta alone, 2 D elements and a float per row, bound by memory; after the first, 8 lanes take a row:
//
//     naive     one thread per row                                         each warp load touches 32 cache lines: a
//                                                                          tenth of the peak
//     tokens    a warp has four heads of a token: it stores 4 bytes in     a quarter of the sectors for two loads of
//               each of four sectors                                       16 sectors each: 90%
//     shipped   four positions of a head: 16 bytes in one sector           above 90%
//
//     build/attention_backward --batch 4 --seq 4096 --heads 16 --kv-heads 16 --head-size 128

#include "llmtrain/ops/attention.cuh"
#include "ladder.h"

// ------------------------------------------------------------------------------------------------
// Naive: thread i computes element i

static __global__ void delta_naive(float* delta, const floatX* dout, const floatX* out, size_t B, size_t T, size_t H,
                                   size_t D) {
    size_t i = flat_index(1), t = i % T, h = i / T % H, b = i / (T * H), at = ((b * T + t) * H + h) * D;
    if (b >= B) return;
    float sum = 0.0f;
    for (size_t d = 0; d < D; d++) sum += float_of(dout[at + d]) * float_of(out[at + d]);
    delta[i] = sum;
}

// As attention_delta, but lane group i takes row i of dout and out.
template <int W>
static __global__ void delta_tokens(float* delta, const floatX* dout, const floatX* out, size_t rows, size_t T,
                                    size_t H, size_t D) {
    size_t row = flat_index(1) / DELTA_LANES, lane = threadIdx.x % DELTA_LANES;
    float sum = 0.0f;
    for (size_t d = lane * W; row < rows && d < D; d += DELTA_LANES * W) {
        Lanes<W> x = lanes_load<W>(dout + row * D + d), y = lanes_load<W>(out + row * D + d);
        for (int i = 0; i < W; i++) sum += x.x[i] * y.x[i];
    }
    for (int distance = DELTA_LANES / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (row < rows && lane == 0) delta[(row / (T * H) * H + row % H) * T + row / H % T] = sum;
}

static __global__ void probabilities_naive(float* p, float* ds, const floatX* dout, const float* lse,
                                           const float* delta, const floatX* qkv,
                                           size_t B, size_t T, size_t H, size_t K, size_t D) {
    size_t i = flat_index(1), key = i % T, query = i / T % T, h = i / (T * T) % H, b = i / (T * T * H);
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
    size_t i = flat_index(1), heads = H + 2 * K, d = i % D, head = i / D % heads, t = i / (D * heads) % T;
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
// Program

int main(int argc, char** argv) {
    uint64_t B = ladder_size(4, 1), T = ladder_size(2048, 150), H = ladder_size(16, 4), K = ladder_size(16, 2), D = 64;
    ladder_open(argc, argv, {
        {"batch", KIND_COUNT, &B, "B", 1, 1e6, "samples", 0},
        {"seq", KIND_COUNT, &T, "T", 1, 1e6, "positions of a sample", 0},
        {"heads", KIND_COUNT, &H, "H", 1, 1e4, "query heads", 0},
        {"kv-heads", KIND_COUNT, &K, "K", 1, 1e4, "key/value heads, of which --heads is a multiple", 0},
        {"head-size", KIND_COUNT, &D, "D", 1, ATTENTION_MAX_D, "numbers in a head", 0},
    });
    if (H % K != 0) ladder_give_up("--heads is not a multiple of --kv-heads; give one that is");
    ladder_begin("attention, backward: dqkv (B, T, (H + 2K) D) from dout (B, T, H, D)");
    const size_t n = B * T * (H + 2 * K) * D, outs = B * T * H * D, rows = B * H * T;
    // As in the forward, for normal random inputs; a key's gradients are sums of terms of both signs over the heads of
    // its group, and over some queries that attend to little else.
    const double group = sqrt((double)(H / K)), size = 16.0 * group, length = (double)(T + D);
    auto out = ladder_input<floatX>("out", outs, 1.0);
    auto lse = ladder_input<float>("lse", rows, 1.0);
    auto qkv = ladder_input<floatX>("qkv", n, 1.0), dout = ladder_input<floatX>("dout", outs, 1.0);
    auto dqkv = ladder_output<floatX>("dqkv", n, {length, size, FLOATX_IS_FLOAT ? 0.0 : 2.0 * group});
    float* delta = (float*)ladder_scratch(rows * sizeof(float));
    float* p = ladder_wants("naive") ? (float*)ladder_scratch(2 * rows * T * sizeof(float)) : NULL;
    float* ds = p ? p + rows * T : NULL;
    if (ladder.check) {
        cpu::attention_forward(out.twin, lse.twin, qkv.twin, B, T, H, K, D, NULL);
        ladder_update(out);
        ladder_update(lse);
    }
    auto shipped = LADDER_OPERATION(attention_backward, dqkv, delta, dout, out, lse, qkv, B, T, H, K, D);
    ladder_work(LADDER_MATMUL_FLOPS, 5.0 * (double)rows * (double)(T + 1) * (double)D, shipped);
    ladder_rung("naive", [&] {
        ladder_launch(delta_naive, rows, delta, dout, out, B, T, H, D);
        ladder_launch(probabilities_naive, rows * T, p, ds, dout, lse, delta, qkv, B, T, H, K, D);
        ladder_launch(gradients_naive, n, dqkv, p, ds, dout, qkv, B, T, H, K, D);
    });
    ladder_rung("plain", [&] {
        attention_delta_launch(delta, dout, out, B, T, H, D, ladder.stream);
        attention_backward_plain_any(dqkv, delta, dout, lse, qkv, B, T, H, K, D, ladder.stream);
    });
#if !FLOATX_IS_FLOAT
    if (D <= 128 && D % PACK == 0)
        ladder_rung("every", [&] {
            attention_delta_launch(delta, dout, out, B, T, H, D, ladder.stream);
            attention_backward_tensor_any(dqkv, delta, dout, lse, qkv, B, T, H, K, D, SIZE_MAX, ladder.stream);
        });
#endif
    ladder_rung("shipped", shipped);

    ladder_begin("attention_delta: delta (B, H, T) from dout and out (B, T, H, D)");
    out = ladder_input<floatX>("out", outs, 1.0), dout = ladder_input<floatX>("dout", outs, 1.0);
    auto deltas = ladder_output<float>("delta", rows, {(double)D, (double)D, 0.0});
    auto shipped_delta = [&] {
        if (!ladder.on_cpu) attention_delta_launch(deltas, dout, out, B, T, H, D, ladder.stream);
        for (size_t i = 0; ladder.on_cpu && i < outs; i++) {
            float* sum = &deltas.twin[(i / (D * H * T) * H + i / D % H) * T + i / (D * H) % T];
            *sum = (i % D ? *sum : 0.0f) + float_of(dout.twin[i]) * float_of(out.twin[i]);
        }
    };
    ladder_work(LADDER_BYTES, (double)rows * (double)(2 * D * sizeof(floatX) + sizeof(float)), shipped_delta);
    ladder_rung("naive", [&] { ladder_launch(delta_naive, rows, deltas, dout, out, B, T, H, D); });
    ladder_rung("tokens", [&] {
        auto kernel = D % PACK == 0 ? delta_tokens<PACK> : delta_tokens<1>;
        ladder_launch(kernel, rows * DELTA_LANES, deltas, dout, out, rows, T, H, D);
    });
    ladder_rung("shipped", shipped_delta);
    return ladder_end();
}
