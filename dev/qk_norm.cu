// dev/qk_norm.cu: the ladder of the norms of query and key heads, forward and backward.
//
//     qkv (N, (H + 2K) D): each query and key head of D elements is divided by the root of its mean square, and
//     multiplied by a weight
//
// Bound by memory. Forward: reads (H + K) D elements per row and writes them twice, since the backward needs the
// inputs. Backward: reads twice as much as it writes.
//
//     rung       idea                                                  expected
//     thread     one head per thread; for the weights' gradients one   loads D elements apart: a tenth of the peak, and
//                element per thread                                    D threads for the sums: far below
//     warp       one head per warp, which keeps it in registers, and   half of the peak or more: 2 bytes per load
//                the sums for the weights too
//     shipped    16 bytes per load                                     near the peak
//
//     build/qk_norm --rows 8192 --heads 32 --kv-heads 8 --head-size 128

#include "kernels.cuh"
#include "ladder.h"

#define QK_NORM_EPSILON 1e-6f

// ------------------------------------------------------------------------------------------------
// Kernels

static __global__ void qk_norm_by_thread(floatX* qkv, floatX* saved, float* rstd, const floatX* q_weight,
                                         const floatX* k_weight, size_t n, size_t H, size_t K, size_t D) {
    size_t at = flat_index(1), row = at / (H + K), head = at % (H + K);
    if (at >= n) return;
    floatX* x = qkv + (row * (H + 2 * K) + head) * D;
    const floatX* weight = head < H ? q_weight : k_weight;
    float squares = 0.0f;
    for (size_t i = 0; i < D; i++) squares += float_of(x[i]) * float_of(x[i]);
    float s = 1.0f / sqrtf(squares / (float)D + QK_NORM_EPSILON);
    for (size_t i = 0; i < D; i++) {
        saved[at * D + i] = x[i];
        x[i] = floatX_of(float_of(x[i]) * s * float_of(weight[i]));
    }
    rstd[at] = s;
}

// dweight (D) += the sum over rows and `count` heads from `first` on; a thread owns an element. Runs before dx, which
// overwrites its input.
static __global__ void qk_norm_sums_by_thread(float* dweight, const floatX* dqkv, const floatX* saved,
                                              const float* rstd, size_t first, size_t count, size_t N, size_t H,
                                              size_t K, size_t D) {
    size_t i = flat_index(1);
    if (i >= D) return;
    float sum = 0.0f;
    for (size_t row = 0; row < N; row++) {
        for (size_t head = first; head < first + count; head++) {
            size_t at = row * (H + K) + head;
            sum += float_of(dqkv[(row * (H + 2 * K) + head) * D + i]) * float_of(saved[at * D + i]) * rstd[at];
        }
    }
    dweight[i] += sum;
}

static __global__ void qk_norm_dx_by_thread(floatX* dqkv, const floatX* saved, const float* rstd,
                                            const floatX* q_weight, const floatX* k_weight, size_t n, size_t H,
                                            size_t K, size_t D) {
    size_t at = flat_index(1), row = at / (H + K), head = at % (H + K);
    if (at >= n) return;
    floatX* d = dqkv + (row * (H + 2 * K) + head) * D;
    const floatX *x = saved + at * D, *weight = head < H ? q_weight : k_weight;
    float sum = 0.0f, s = rstd[at];
    for (size_t i = 0; i < D; i++) sum += float_of(d[i]) * float_of(weight[i]) * (float_of(x[i]) * s);
    for (size_t i = 0; i < D; i++)
        d[i] = floatX_of(s * (float_of(d[i]) * float_of(weight[i]) - float_of(x[i]) * s * (sum / (float)D)));
}

// ------------------------------------------------------------------------------------------------
// Program: two ladders

static void ladder_forward(size_t N, size_t H, size_t K, size_t D) {
    const size_t heads = N * (H + K);
    ladder_begin("qk_norm_forward: qkv (N, (H + 2K) D) normalized in place, saved (N, (H + K) D)");
    auto q_weight = ladder_input<floatX>("q_weight", D, 1.0), k_weight = ladder_input<floatX>("k_weight", D, 1.0);
    auto qkv = ladder_added<floatX>("qkv", N * (H + 2 * K) * D, 1.0, {(double)D, 40, 0});
    auto saved = ladder_output<floatX>("saved", heads * D, {0, 5, 0});
    auto rstd = ladder_output<float>("rstd", heads, {(double)D, 5, 0});
    LadderRun shipped =
        LADDER_OPERATION(qk_norm_forward, qkv, saved, rstd, q_weight, k_weight, QK_NORM_EPSILON, N, H, K, D);
    ladder_work(LADDER_BYTES, 3.0 * (double)(heads * D) * sizeof(floatX), shipped);
    ladder_rung("thread", [&] {
        ladder_launch(qk_norm_by_thread, heads, qkv, saved, rstd, q_weight, k_weight, heads, H, K, D);
    });
    ladder_rung("warp", [&] {
        qk_norm_forward_kernel<1><<<grid_blocks(divide_up(heads, QK_NORM_WARPS)), QK_NORM_WARPS * WARP, 0,
                                    ladder.stream->compute>>>(qkv, saved, rstd, q_weight, k_weight,
                                                              QK_NORM_EPSILON, N, H, K, D);
    });
    ladder_rung("shipped", shipped);
}

static void ladder_backward(size_t N, size_t H, size_t K, size_t D) {
    const size_t heads = N * (H + K);
    ladder_begin("qk_norm_backward: dqkv (N, (H + 2K) D) in place, dq_weight (D) and dk_weight (D) += ...");
    auto q_weight = ladder_input<floatX>("q_weight", D, 1.0), k_weight = ladder_input<floatX>("k_weight", D, 1.0);
    auto saved = ladder_input<floatX>("saved", heads * D, 1.0);
    auto rstd = ladder_input<float>("rstd", heads, 1.0);
    auto dqkv = ladder_added<floatX>("dqkv", N * (H + 2 * K) * D, 1.0, {(double)D, 40, 0});
    auto dq_weight = ladder_added<float>("dq_weight", D, 1.0, ladder_random_sum(N * H));
    auto dk_weight = ladder_added<float>("dk_weight", D, 1.0, ladder_random_sum(N * K));
    ladder_give_scratch(qk_norm_backward_scratch_bytes(N));
    LadderRun shipped = LADDER_OPERATION(qk_norm_backward, dqkv, dq_weight, dk_weight, saved, rstd, q_weight, k_weight,
                                         N, H, K, D);
    ladder_work(LADDER_BYTES, 3.0 * (double)(heads * D) * sizeof(floatX), shipped);
    ladder_rung("thread", [&] {
        ladder_launch(qk_norm_sums_by_thread, D, dq_weight, dqkv, saved, rstd, 0, H, N, H, K, D);
        ladder_launch(qk_norm_sums_by_thread, D, dk_weight, dqkv, saved, rstd, H, K, N, H, K, D);
        ladder_launch(qk_norm_dx_by_thread, heads, dqkv, saved, rstd, q_weight, k_weight, heads, H, K, D);
    });
    ladder_rung("warp", [&] {
        size_t blocks = qk_norm_backward_blocks(N);
        float* partial = (float*)device_scratch(ladder.stream, qk_norm_backward_scratch_bytes(N));
        qk_norm_backward_kernel<1><<<(unsigned)blocks, QK_NORM_WARPS * WARP, 0, ladder.stream->compute>>>(
            dqkv, partial, saved, rstd, q_weight, k_weight, N, H, K, D);
        add_partial<float><<<dim3((unsigned)divide_up(D, WARP), 2), dim3(WARP, WARP), 0, ladder.stream->compute>>>(
            dq_weight, dk_weight, partial, blocks, D);
    });
    ladder_rung("shipped", shipped);
}

int main(int argc, char** argv) {
    uint64_t N = ladder_size(8192, 9), H = ladder_size(32, 5), K = ladder_size(8, 1), D = ladder_size(128, 32);
    ladder_open(argc, argv, {
        {"rows", KIND_COUNT, &N, "N", 1, 1e8, "tokens", 0},
        {"heads", KIND_COUNT, &H, "H", 1, 1e4, "query heads", 0},
        {"kv-heads", KIND_COUNT, &K, "K", 1, 1e4, "key and value heads", 0},
        {"head-size", KIND_COUNT, &D, "D", 1, ATTENTION_MAX_D, "elements of a head", 0},
    });
    ladder_forward(N, H, K, D);
    ladder_backward(N, H, K, D);
    return ladder_end();
}
