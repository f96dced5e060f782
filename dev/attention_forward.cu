// dev/attention_forward.cu: the ladder of attention's forward.
//
//     out_i = sum over j <= i of softmax_j(q_i k_j / sqrt(D)) v_j      for each of H heads, T positions, B samples
//
// 2 D multiply-adds for each pair (i, j <= i): 2 B H T^2 D flops. From memory at least qkv, out and lse, so that
// arithmetic is the bound as soon as T passes a few hundred; a version that keeps the scores in memory moves 3 more
// T^2 floats per head.
//
//     rung      idea                                                     expected
//     naive     three kernels, scores in memory, a thread per number     a load per multiply-add: 1% of float's peak
//     plain     tiles in shared memory, running maximum and sum, 4 x 4   8 loads from shared memory for 16 multiply-
//               numbers a thread: no scores in memory                    adds: at most half of float's peak
//     rows16    tensor cores; each warp 16 queries                       a matrix from shared memory is used once:
//               (16-bit storage and head sizes 8, 16, ... 128)           loads take as long as products
//     shipped   each warp 32 queries                                     used twice: half or more of mma's peak
//
// Where the head size or the type has no tensor cores, shipped is plain. None of this is measured yet.
//
//     nvcc -O3 -arch=native -DLLMTRAIN_CUDA -DPRECISION_BF16 -Xcompiler -fopenmp
//         dev/attention_forward.cu -o build/attention_forward -lcublasLt
//     build/attention_forward --batch 4 --seq 4096 --heads 16 --kv-heads 16 --head-size 128

#include "llmtrain/attention.cuh"
#include "ladder.h"

typedef struct {
    size_t B, T, H, K, D;
    floatX* out;          // (B, T, H, D)
    float* lse;           // (B, H, T)
    const floatX* qkv;    // (B, T, (H + 2K) D)
    float* scores;        // (B, H, T, T), of the naive rung
} Attention;

// ------------------------------------------------------------------------------------------------
// Naive: thread i makes number i

// scores (B, H, T, T) = q k / sqrt(D) for keys up to the query.
static __global__ void scores_naive(float* scores, const floatX* qkv, size_t B, size_t T, size_t H, size_t K,
                                    size_t D) {
    size_t i = ladder_index(), key = i % T, query = i / T % T, h = i / (T * T) % H, b = i / (T * T * H);
    if (b >= B || key > query) return;
    HeadRows at = head_rows(b, h, T, H, K, D);
    float sum = 0.0f;
    for (size_t d = 0; d < D; d++)
        sum += float_of(qkv[at.q + query * at.stride + d]) * float_of(qkv[at.k + key * at.stride + d]);
    scores[i] = sum / sqrtf((float)D);
}

// Each row of scores becomes probabilities.
static __global__ void softmax_naive(float* scores, float* lse, size_t rows, size_t T) {
    size_t row = ladder_index(), visible = row % T + 1;
    if (row >= rows) return;
    float *score = scores + row * T, maximum = -INFINITY, total = 0.0f;
    for (size_t j = 0; j < visible; j++) maximum = fmaxf(maximum, score[j]);
    for (size_t j = 0; j < visible; j++) total += expf(score[j] - maximum);
    for (size_t j = 0; j < visible; j++) score[j] = expf(score[j] - maximum) / total;
    lse[row] = maximum + logf(total);
}

static __global__ void values_naive(floatX* out, const float* scores, const floatX* qkv, size_t B, size_t T, size_t H,
                                    size_t K, size_t D) {
    size_t i = ladder_index(), d = i % D, h = i / D % H, query = i / (D * H) % T, b = i / (D * H * T);
    if (b >= B) return;
    HeadRows at = head_rows(b, h, T, H, K, D);
    float sum = 0.0f;
    for (size_t key = 0; key <= query; key++)
        sum += scores[((b * H + h) * T + query) * T + key] * float_of(qkv[at.v + key * at.stride + d]);
    out[i] = floatX_of(sum);
}

// ------------------------------------------------------------------------------------------------
// Rungs

static void run_naive(void* problem, Stream stream) {
    Attention* a = (Attention*)problem;
    size_t rows = a->B * a->H * a->T;
    scores_naive<<<ladder_blocks(rows * a->T), LADDER_THREADS, 0, stream->compute>>>(
        a->scores, a->qkv, a->B, a->T, a->H, a->K, a->D);
    LAUNCH_CHECK();
    softmax_naive<<<ladder_blocks(rows), LADDER_THREADS, 0, stream->compute>>>(a->scores, a->lse, rows, a->T);
    LAUNCH_CHECK();
    values_naive<<<ladder_blocks(rows * a->D), LADDER_THREADS, 0, stream->compute>>>(
        a->out, a->scores, a->qkv, a->B, a->T, a->H, a->K, a->D);
    LAUNCH_CHECK();
}

static void run_plain(void* problem, Stream stream) {
    Attention* a = (Attention*)problem;
    attention_forward_plain_any(a->out, a->lse, a->qkv, a->B, a->T, a->H, a->K, a->D, stream);
}

#if !FLOATX_IS_FLOAT
static void run_rows16(void* problem, Stream stream) {
    Attention* a = (Attention*)problem;
    attention_forward_tensor_any<1>(a->out, a->lse, a->qkv, a->B, a->T, a->H, a->K, a->D, stream);
}
#endif

static void run_shipped(void* problem, Stream stream) {
    Attention* a = (Attention*)problem;
    attention_forward(a->out, a->lse, a->qkv, a->B, a->T, a->H, a->K, a->D, stream);
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
    const char* title = "attention, forward: out (B, T, H, D) from qkv (B, T, (H + 2K) D)";
    if (!ladder_open(&l, argc, argv, title, flags, 5)) return l.status;
    ladder_tensor_peak(&l);
    if (H % K != 0) ladder_give_up("--heads is not a multiple of --kv-heads; give one that is");
    size_t outs = B * T * H * D, rows = B * H * T;
    // Of normal random inputs scores are a few units, which is the error of a probability in units of 2^-24; rounded
    // probabilities add up to 1, and the values that they multiply are of order 1.
    double size = 4.0, length = (double)(T + D);
    Attention a;
    memset(&a, 0, sizeof a);
    a.B = B, a.T = T, a.H = H, a.K = K, a.D = D;
    a.qkv = ladder_input<floatX>(&l, "qkv", B * T * (H + 2 * K) * D, 1.0);
    a.out = ladder_output<floatX>(&l, "out", outs, ladder_bound(length, size, FLOATX_IS_FLOAT ? 0.0 : 1.0));
    a.lse = ladder_output<float>(&l, "lse", rows, ladder_bound(length, size, 0.0));
    if (ladder_wants(&l, "naive")) a.scores = (float*)ladder_scratch(&l, rows * T * sizeof(float));
    floatX* out = ladder_twin(&l, a.out);
    float* lse = ladder_twin(&l, a.lse);
    if (l.check) cpu::attention_forward(out, lse, ladder_twin(&l, a.qkv), B, T, H, K, D, NULL);
    double flops = 2.0 * (double)rows * (double)(T + 1) * (double)D;
    ladder_work(&l, FLOATX_IS_FLOAT ? LADDER_FLOAT_FLOPS : LADDER_TENSOR_FLOPS, flops);
    ladder_rung(&l, "naive", run_naive, &a);
    ladder_rung(&l, "plain", run_plain, &a);
#if !FLOATX_IS_FLOAT
    if (D <= 128 && D % PACK == 0) ladder_rung(&l, "rows16", run_rows16, &a);
#endif
    ladder_rung(&l, "shipped", run_shipped, &a);
    ladder_close(&l);
    return ladder_result(&l);
}
