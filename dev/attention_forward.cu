// dev/attention_forward.cu: the ladder of attention's forward.
//
//     out_i = sum over j <= i of softmax_j(q_i k_j / sqrt(D)) v_j      for each of H heads, T positions, B samples
//
// 2 D multiply-adds for each pair (i, j <= i): 2 B H T^2 D flops. At least qkv, out and lse are read or written, so
// arithmetic is the bound once T exceeds a few hundred; a version that keeps the scores in memory moves another 3 T^2
// floats per head.
//
//     rung      idea                                                     expected
//     naive     three kernels, scores in memory, one thread per number   a load per multiply-add: 1% of float's peak
//     plain     tiles in shared memory, running maximum and sum, 4 x 4   8 loads from shared memory for 16 multiply-
//               numbers per thread: no scores in memory                  adds: at most half of float's peak
//     rows16    tensor cores; each warp 16 queries                       a matrix from shared memory is used once:
//               (16-bit storage and head sizes 8, 16, ... 128)           loads take as long as products
//     every     each warp 32 queries, blocks of all heads side by side   used twice: half or more of mma's peak; but
//                                                                        keys and values come from memory once per tile
//     shipped   as many heads at a time as the L2 cache has room for     keys and values come from memory once
//
// Where tensor cores do not support the head size or the dtype, shipped is plain. None of this is measured yet.
//
// How a warp stores the rows of its result, 64 elements each, bound by memory:
//
//     pairs     4 bytes per lane, from where tensor cores leave them       half of a sector per row: 8 sectors and an
//                                                                          instruction for 128 bytes
//     shipped   through shared memory, then 16 bytes per lane              whole sectors, a quarter of the stores
//
//     build/attention_forward --batch 4 --seq 4096 --heads 16 --kv-heads 16 --head-size 128

#include "llmtrain/ops/attention.cuh"
#include "ladder.h"

// ------------------------------------------------------------------------------------------------
// Naive: thread i computes element i

// scores (B, H, T, T) = q k / sqrt(D) for keys up to the query.
static __global__ void scores_naive(float* scores, const floatX* qkv, size_t B, size_t T, size_t H, size_t K,
                                    size_t D) {
    size_t i = flat_index(1), key = i % T, query = i / T % T, h = i / (T * T) % H, b = i / (T * T * H);
    if (b >= B || key > query) return;
    HeadRows at = head_rows(b, h, T, H, K, D);
    float sum = 0.0f;
    for (size_t d = 0; d < D; d++)
        sum += float_of(qkv[at.q + query * at.stride + d]) * float_of(qkv[at.k + key * at.stride + d]);
    scores[i] = sum / sqrtf((float)D);
}

// Each row of scores becomes probabilities.
static __global__ void softmax_naive(float* scores, float* lse, size_t rows, size_t T) {
    size_t row = flat_index(1), visible = row % T + 1;
    if (row >= rows) return;
    float *score = scores + row * T, maximum = -INFINITY, total = 0.0f;
    for (size_t j = 0; j < visible; j++) maximum = fmaxf(maximum, score[j]);
    for (size_t j = 0; j < visible; j++) total += expf(score[j] - maximum);
    for (size_t j = 0; j < visible; j++) score[j] = expf(score[j] - maximum) / total;
    lse[row] = maximum + logf(total);
}

static __global__ void values_naive(floatX* out, const float* scores, const floatX* qkv, size_t B, size_t T, size_t H,
                                    size_t K, size_t D) {
    size_t i = flat_index(1), d = i % D, h = i / D % H, query = i / (D * H) % T, b = i / (D * H * T);
    if (b >= B) return;
    HeadRows at = head_rows(b, h, T, H, K, D);
    float sum = 0.0f;
    for (size_t key = 0; key <= query; key++)
        sum += scores[((b * H + h) * T + query) * T + key] * float_of(qkv[at.v + key * at.stride + d]);
    out[i] = floatX_of(sum);
}

// ------------------------------------------------------------------------------------------------
// Rows of a result, from the registers where multiply_add leaves them

#if !FLOATX_IS_FLOAT
constexpr int STORE_WIDTH = 64, STORE_ROWS = 32;  // of a warp

// Where the tensor cores leave elements i and i + 1, i even, of a lane's part of the warp's rows from `first` on.
static __device__ size_t store_place(size_t first, int i, size_t* row) {
    size_t lane = threadIdx.x % WARP;
    *row = first + i / 32 * 16 + lane / 4 + i % 4 / 2 * 8;
    return *row * STORE_WIDTH + i % 32 / 4 * 8 + 2 * (lane % 4);
}

static __global__ void store_pairs(floatX* out, const float* in, size_t rows) {
    size_t first = (blockIdx.x * TENSOR_WARPS + threadIdx.x / WARP) * STORE_ROWS, row;
    for (int i = 0; i < STORE_ROWS * STORE_WIDTH / WARP; i += 2) {
        size_t at = store_place(first, i, &row);
        if (row < rows) *(uint32_t*)(out + at) = pair_of(in[at], in[at + 1]);
    }
}

static __global__ void store_rows(floatX* out, const float* in, size_t rows) {
    __shared__ __align__(16) char tiles[TENSOR_WARPS][STORE_ROWS * (STORE_WIDTH + TILE_PADDING) * sizeof(floatX)];
    float sum[STORE_ROWS / 16][STORE_WIDTH / 8][4];
    size_t warp = threadIdx.x / WARP, first = (blockIdx.x * TENSOR_WARPS + warp) * STORE_ROWS, row;
    #pragma unroll
    for (int i = 0; i < STORE_ROWS * STORE_WIDTH / WARP; i += 2) {
        size_t at = store_place(first, i, &row);
        float2 pair = row < rows ? *(const float2*)(in + at) : make_float2(0.0f, 0.0f);
        sum[i / 32][i % 32 / 4][i % 4] = pair.x, sum[i / 32][i % 32 / 4][i % 4 + 1] = pair.y;
    }
    rows_store<STORE_WIDTH>(out + first * STORE_WIDTH, STORE_WIDTH, (int)rows - (int)first, STORE_WIDTH, sum, 1.0f,
                            tiles[warp]);
}

static void ladder_stores(size_t rows) {
    const size_t n = rows * STORE_WIDTH;
    const unsigned blocks = (unsigned)divide_up(rows, TENSOR_WARPS * STORE_ROWS);
    ladder_begin("rows_store: out (rows, 64) from registers");
    auto in = ladder_input<float>("in", n, 1.0);
    auto out = ladder_output<floatX>("out", n, {1, 0, 0});
    auto shipped = [&] {
        for (size_t i = 0; ladder.on_cpu && i < n; i++) out.twin[i] = floatX_of(in.twin[i]);
        if (!ladder.on_cpu) store_rows<<<blocks, TENSOR_THREADS, 0, ladder.stream->compute>>>(out, in, rows);
    };
    ladder_work(LADDER_BYTES, (double)n * (sizeof(float) + sizeof(floatX)), shipped);
    ladder_rung("pairs", [&] {
        store_pairs<<<blocks, TENSOR_THREADS, 0, ladder.stream->compute>>>(out, in, rows);
    });
    ladder_rung("shipped", shipped);
}
#endif

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
    ladder_begin("attention, forward: out (B, T, H, D) from qkv (B, T, (H + 2K) D)");
    const size_t outs = B * T * H * D, rows = B * H * T;
    // For normal random inputs scores are a few units, which is the error of a probability in units of 2^-24; rounded
    // probabilities add up to 1, and the values that they weight are of order 1.
    const double size = 4.0, length = (double)(T + D);
    auto qkv = ladder_input<floatX>("qkv", B * T * (H + 2 * K) * D, 1.0);
    auto out = ladder_output<floatX>("out", outs, {length, size, FLOATX_IS_FLOAT ? 0.0 : 1.0});
    auto lse = ladder_output<float>("lse", rows, {length, size, 0.0});
    float* scores = ladder_wants("naive") ? (float*)ladder_scratch(rows * T * sizeof(float)) : NULL;
    auto shipped = LADDER_OPERATION(attention_forward, out, lse, qkv, B, T, H, K, D);
    ladder_work(LADDER_MATMUL_FLOPS, 2.0 * (double)rows * (double)(T + 1) * (double)D, shipped);
    ladder_rung("naive", [&] {
        ladder_launch(scores_naive, rows * T, scores, qkv, B, T, H, K, D);
        ladder_launch(softmax_naive, rows, scores, lse, rows, T);
        ladder_launch(values_naive, outs, out, scores, qkv, B, T, H, K, D);
    });
    ladder_rung("plain", [&] { attention_forward_plain_any(out, lse, qkv, B, T, H, K, D, ladder.stream); });
#if !FLOATX_IS_FLOAT
    if (D <= 128 && D % PACK == 0) {
        ladder_rung("rows16", [&] {
            attention_forward_tensor_any<1>(out, lse, qkv, B, T, H, K, D, ATTENTION_CACHE, ladder.stream);
        });
        ladder_rung("every", [&] {
            attention_forward_tensor_any<2>(out, lse, qkv, B, T, H, K, D, SIZE_MAX, ladder.stream);
        });
    }
#endif
    ladder_rung("shipped", shipped);
#if !FLOATX_IS_FLOAT
    ladder_stores(rows);
#endif
    return ladder_end();
}
