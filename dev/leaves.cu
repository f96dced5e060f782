// dev/leaves.cu: the ladders of layers that ranks share: sums of leaves, statistics of leaves of logits, columns.
//
//     leaves_sum         out (M, C) = the tree over parts (count, M, C), + bias (C), rounded
//     classifier_leaves  stats (M, leaves, 3) of logits (M, columns): maximum, sum of exp(x - maximum), target's logit
//     columns_copy       a block of columns out of rows that are `count` times as long
//
// Bound by memory: 4 count bytes read per element of out; one element read per logit; one read and one written.
//
//     rung       idea                                                  expected
//     leaves_sum
//     levels     a kernel per level of the tree, pairs added in place  of 3 bytes moved 1 is needed: a third
//     element    one element per thread, part after part; sums that    one load at a time: half or less
//                wait for their neighbors in local memory
//     shipped    16 bytes per load, many loads at once                 near the peak
//     classifier_leaves
//     warp       a warp per row of a leaf: maximum, then sum           what it reads twice comes from a cache; half
//     shipped    a block per row of a leaf, maximum and sum together   near the peak for wide leaves
//     columns_copy
//     element    one element per thread, whose row a division of       2 bytes per load: a third of the peak
//                64 bits finds
//     shipped    16 bytes per load, rows by thread index               near the peak
//
//     build/leaves --count 8 --rows 8192 --channels 4096 --vocab 50257

#include "kernels.cuh"
#include "ladder.h"

// ------------------------------------------------------------------------------------------------
// Kernels

// Parts 2 step i += parts 2 step i + step: thread (x, y) owns an element of pair y.
static __global__ void leaves_level(float* parts, size_t step, size_t n) {
    size_t i = flat_index(1);
    if (i < n) parts[2 * step * blockIdx.y * n + i] += parts[(2 * blockIdx.y + 1) * step * n + i];
}

static __global__ void leaves_round(floatX* out, const float* sums, const floatX* bias, size_t n, size_t C) {
    size_t i = flat_index(1);
    if (i < n) out[i] = floatX_of(sums[i] + float_of(bias[i % C]));
}

static __global__ void leaves_element(floatX* out, const float* parts, const floatX* bias, size_t count, size_t n,
                                      size_t C) {
    size_t i = flat_index(1);
    float sums[8], sum = 0.0f;
    if (i >= n) return;
    for (size_t part = 0; part < count; part++) {
        int level = 0;
        sum = parts[part * n + i];
        for (; part >> level & 1; level++) sum = sums[level] + sum;
        sums[level] = sum;
    }
    out[i] = floatX_of(sum + float_of(bias[i % C]));
}

static __global__ void leaves_warp(float* stats, const floatX* logits, const int32_t* targets, size_t leaves, size_t N,
                                   size_t V, size_t width) {
    size_t i = flat_index(1) / WARP, lane = threadIdx.x % WARP;
    if (i >= N * leaves) return;
    size_t begin = i % leaves * width, n = begin < V ? min(V - begin, width) : 0;
    const floatX* x = logits + i * width;
    size_t target = (size_t)targets[i / leaves] - begin;
    bool counts = targets[i / leaves] >= 0;
    float maximum = LEAF_NO_MAXIMUM, sum = 0.0f;
    for (size_t v = lane; v < n; v += WARP) maximum = fmaxf(maximum, float_of(x[v]));
    maximum = warp_max(maximum);
    for (size_t v = lane; v < n; v += WARP) sum += expf(float_of(x[v]) - maximum);
    sum = warp_sum(sum);
    if (lane > 0) return;
    stats[i * LEAF_STATS + LEAF_MAXIMUM] = counts ? maximum : 0.0f;
    stats[i * LEAF_STATS + LEAF_SUM] = counts ? sum : 0.0f;
    stats[i * LEAF_STATS + LEAF_TARGET] = counts && target < n ? float_of(x[target]) : 0.0f;
}

static __global__ void columns_element(floatX* out, const floatX* in, size_t stride, size_t M, size_t columns) {
    size_t i = flat_index(1);
    if (i < M * columns) out[i] = in[i / columns * stride + i % columns];
}

// ------------------------------------------------------------------------------------------------
// Program: three ladders

static void sum_ladder(size_t count, size_t M, size_t C) {
    ladder_begin("leaves_sum: out (M, C) from parts (count, M, C)");
    const size_t n = M * C;
    auto parts = ladder_input<float>("parts", count * n, 1.0);
    auto bias = ladder_input<floatX>("bias", C, 1.0);
    auto out = ladder_output<floatX>("out", n, {(double)count, (double)count, 0});
    float* memory = (float*)ladder_scratch(count * n * sizeof(float));
    auto shipped = LADDER_OPERATION(leaves_sum, out, parts, bias, count, M, C);
    ladder_work(LADDER_BYTES, (double)n * (4.0 * (double)count + sizeof(floatX)), shipped);
    ladder_rung("levels", [&] {
        device_copy(memory, parts, count * n * sizeof(float), ladder.stream);
        for (size_t step = 1; step < count; step *= 2) {
            dim3 grid(flat_blocks(n, 1), (unsigned)(count / step / 2));
            leaves_level<<<grid, FLAT_THREADS, 0, ladder.stream->compute>>>(memory, step, n);
        }
        ladder_launch(leaves_round, n, out, memory, bias, n, C);
    });
    ladder_rung("element", [&] { ladder_launch(leaves_element, n, out, parts, bias, count, n, C); });
    ladder_rung("shipped", shipped);
}

static void classifier_ladder(size_t leaves, size_t N, size_t V) {
    ladder_begin("classifier_leaves: stats (N, leaves, 3) from logits (N, Vp)");
    const size_t Vp = round_up(V, 8 * leaves), width = Vp / leaves;
    auto logits = ladder_input<floatX>("logits", N * Vp, 1.0);
    auto targets = ladder_input<int32_t>("targets", N, (double)V);
    auto stats = ladder_output<float>("stats", N * leaves * LEAF_STATS, {(double)width, 0.1 * (double)width, 0});
    for (size_t row = 3; row < N; row += 16) targets.twin[row] = -1;
    ladder_update(targets);
    auto shipped = LADDER_OPERATION(classifier_leaves, stats, logits, targets, 0, leaves, N, V, Vp);
    ladder_work(LADDER_BYTES, (double)(N * Vp) * sizeof(floatX), shipped);
    ladder_rung("warp", [&] {
        ladder_launch(leaves_warp, N * leaves * WARP, stats, logits, targets, leaves, N, V, width);
    });
    ladder_rung("shipped", shipped);
}

static void columns_ladder(size_t count, size_t M, size_t C) {
    ladder_begin("columns_copy: out (M, C) from rows of count C elements");
    auto in = ladder_input<floatX>("in", M * count * C, 1.0);
    auto out = ladder_output<floatX>("out", M * C, {0, 0, 0});
    auto shipped = LADDER_OPERATION(columns_copy, out, C, in, count * C, M, C);
    ladder_work(LADDER_BYTES, 2.0 * (double)(M * C) * sizeof(floatX), shipped);
    ladder_rung("element", [&] { ladder_launch(columns_element, M * C, out, in, count * C, M, C); });
    ladder_rung("shipped", shipped);
}

int main(int argc, char** argv) {
    uint64_t count = ladder_size(8, 4), M = ladder_size(8192, 9), C = ladder_size(4096, 40);
    uint64_t V = ladder_size(50257, 257);
    ladder_open(argc, argv, {
        {"count", KIND_COUNT, &count, "S", 1, LEAVES_MAX, "leaves, a power of two", 0},
        {"rows", KIND_COUNT, &M, "N", 1, 1e6, "rows", 0},
        {"channels", KIND_COUNT, &C, "C", 1, 1e6, "columns of sums, and of a copied block", 0},
        {"vocab", KIND_COUNT, &V, "V", 1, 1e6, "vocabulary, padded to a multiple of 8 for each leaf", 0},
    });
    if ((count & (count - 1)) != 0) ladder_give_up("--count must be a power of two");
    sum_ladder(count, M, C);
    classifier_ladder(count, M, V);
    columns_ladder(count, M, C);
    return ladder_end();
}
