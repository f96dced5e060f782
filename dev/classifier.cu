// dev/classifier.cu: the ladder of the classifier: softmax, cross-entropy and the gradient of the logits, in place.
//
//     losses (N) = log(sum over v of exp(x_v)) - x_target,    x (N, Vp) becomes dloss (softmax(x) - onehot(target))
//
// All rows have weight 1 here, as in pretraining.
//
// Minimum memory traffic: 2 elements per logit, one read and one written. A row of GPT-2's logits is 100 KB in 16 bits:
// too long for a thread's registers, short enough for the L2 cache to keep the rows being worked on.
//
//     rung        idea                                                          expected
//     thread      a thread owns a row and walks it three times: for the         an access of a warp goes to 32 rows:
//                 maximum, the sum and the gradient                             a few per cent of the peak
//     block       a block owns a row, still in three walks                      neighbors read neighbors: x 10;
//                                                                               later walks hit the L2 cache
//     online      maximum and sum in one walk ("Online normalizer calculation   2 walks, not 3: at most x 1.5
//                 for softmax"); the second walk begins where the first ends;
//                 exp2 of one multiply-add
//     shipped     the same with 16 bytes per load                               fewer instructions: x 1.5 in 16 bits
//
//     build/classifier --rows 1024 --vocab 50257

#include "kernels.cuh"
#include "ladder.h"

static __global__ void classifier_thread(floatX* logits, float* losses, const int32_t* targets, float dloss, size_t N,
                                         size_t V, size_t Vp) {
    size_t row = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    floatX* x = logits + row * Vp;
    float maximum = -FLT_MAX, sum = 0.0f;
    int target = targets[row];
    if (target >= 0) {
        for (size_t v = 0; v < V; v++) maximum = fmaxf(maximum, float_of(x[v]));
        for (size_t v = 0; v < V; v++) sum += expf(float_of(x[v]) - maximum);
    }
    losses[row] = target < 0 ? 0.0f : logf(sum) + (maximum - float_of(x[target]));
    for (size_t v = 0; v < Vp; v++) {
        float probability = target < 0 || v >= V ? 0.0f : expf(float_of(x[v]) - maximum) / sum;
        x[v] = floatX_of(dloss * (probability - (v == (size_t)target ? 1.0f : 0.0f)));
    }
}

static __global__ void classifier_block(floatX* logits, float* losses, const int32_t* targets, float dloss, size_t V,
                                        size_t Vp) {
    __shared__ float shared[WARP];
    size_t row = blockIdx.x;
    floatX* x = logits + row * Vp;
    float maximum = -FLT_MAX, sum = 0.0f;
    int target = targets[row];
    float target_logit = target < 0 ? 0.0f : float_of(x[target]);
    for (size_t v = threadIdx.x; v < V; v += blockDim.x) maximum = fmaxf(maximum, float_of(x[v]));
    maximum = block_max(maximum, shared);
    for (size_t v = threadIdx.x; v < V; v += blockDim.x) sum += expf(float_of(x[v]) - maximum);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) losses[row] = target < 0 ? 0.0f : logf(sum) + (maximum - target_logit);
    for (size_t v = threadIdx.x; v < Vp; v += blockDim.x) {
        float probability = target < 0 || v >= V ? 0.0f : expf(float_of(x[v]) - maximum) / sum;
        x[v] = floatX_of(dloss * (probability - (v == (size_t)target ? 1.0f : 0.0f)));
    }
}

int main(int argc, char** argv) {
    uint64_t N = ladder_size(1024, 9), V = ladder_size(50257, 257);
    ladder_open(argc, argv, {
        {"rows", KIND_COUNT, &N, "N", 1, 1e6, "rows of logits", 0},
        {"vocab", KIND_COUNT, &V, "V", 1, 1e6, "vocabulary, padded to a multiple of 128 as in training", 0},
    });
    ladder_begin("classifier: losses (N), and logits (N, Vp) become their gradient");
    size_t Vp = round_up(V, 128);
    double length = (double)V;
    float dloss = (float)V;  // gradients are about as large as logits: one bound serves both
    auto logits = ladder_added<floatX>("logits", N * Vp, 1.0, {length, 1, 0});
    auto losses = ladder_output<float>("losses", N, {length, log(length), 0});
    auto targets = ladder_input<int32_t>("targets", N, length);
    for (size_t row = 3; row < N; row += 16) targets.twin[row] = -1;  // no target: neither loss nor gradient
    ladder_update(targets);
    cudaStream_t compute = ladder.stream->compute;
    auto shipped = LADDER_OPERATION(classifier, logits, losses, targets, dloss, NULL, N, V, Vp);
    ladder_work(LADDER_BYTES, 2.0 * (double)(N * Vp) * sizeof(floatX), shipped);
    ladder_rung("thread", [&] {
        unsigned blocks = (unsigned)divide_up(N, WARP);
        classifier_thread<<<blocks, WARP, 0, compute>>>(logits, losses, targets, dloss, N, V, Vp);
    });
    ladder_rung("block", [&] {
        classifier_block<<<(unsigned)N, 512, 0, compute>>>(logits, losses, targets, dloss, V, Vp);
    });
    ladder_rung("online", [&] {
        unsigned threads = block_threads(Vp, CLASSIFIER_THREADS);
        classifier_kernel<1><<<grid_blocks(N), threads, 0, compute>>>(
            logits, losses, targets, dloss, NULL, N, (int)V, (int)Vp);
    });
    ladder_rung("shipped", shipped);
    return ladder_end();
}
