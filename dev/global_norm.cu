// dev/global_norm.cu: the ladder of the gradient's norm: the sum of squares of a long vector of floats.
//
//     out (1) = sum over i of x_i^2,  x (n)
//
// Memory moves 4 bytes per element, once. The rungs in double add in a fixed order, so that a run repeats its bits;
// atomic additions would not. The last one adds integers: neither order nor the number of ranks changes a bit.
//
//     rung          idea                                                     expected
//     one block     1024 threads walk the vector, then a tree in shared      one of a hundred processors: 1% of peak
//                   memory
//     tree          as many blocks as the GPU holds, each with a tree;       near the peak
//                   one more block sums their sums
//     shuffles      sums inside of warps by shuffles: two barriers instead   the same for long vectors: the tree is a
//                   of one per level                                         small part of them
//     fours         16 bytes per load, four loads at once: sum_of_squares    a few per cent more: fewer instructions
//     shipped       of each 8 squares the sum in double, cut into four       the same; longer where a multiprocessor
//                   integers; atomic additions: exact_sum_squares            has only two units for doubles
//
//     build/global_norm --elements 124475904

#include "kernels.cuh"
#include "ladder.h"

enum { TREE_MOST_THREADS = 1024 };

// The sum over the block, for its thread 0; blockDim.x is a power of two. Half of the threads add what the other half
// has, then half of those, and so on.
static __device__ double tree_sum(double sum) {
    __shared__ double sums[TREE_MOST_THREADS];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    return sums[0];
}

// out (gridDim.x): each block's part of the sum of squares of x (n).
static __global__ void squares_tree(double* out, const float* x, size_t n) {
    double sum = 0.0;
    for (size_t i = flat_index(1); i < n; i += (size_t)gridDim.x * blockDim.x) sum += (double)x[i] * (double)x[i];
    sum = tree_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

// out (1) = the sum of x (n), by one block.
static __global__ void sums_tree(double* out, const double* x, size_t n) {
    double sum = 0.0;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    sum = tree_sum(sum);
    if (threadIdx.x == 0) *out = sum;
}

// Blocks that the GPU runs at once, 2048 threads per multiprocessor.
static size_t tree_most_blocks(void) { return ladder.stream->processors * (2048 / FLAT_THREADS); }

static __global__ void exact_value_kernel(double* out, const ExactSum* sum) { *out = exact_value(*sum); }

int main(int argc, char** argv) {
    uint64_t n = ladder_size(124475904, 100003);  // GPT-2 124M
    ladder_open(argc, argv, {{"elements", KIND_COUNT, &n, "n", 1, 1e10, "length of the vector", 0}});
    ladder_begin("sum of squares: out (1) = sum of squares of x (n), in double");
    ladder_give_scratch(sum_of_squares_scratch_bytes());
    auto x = ladder_input<float>("x", n, 1.0);
    // The bound for a sum of n terms in double; a LadderBound counts float roundings, 2^29 times as large.
    auto out = ladder_output<double>("out", 1, {(double)n * 0x1p-58, 0, 0});
    double* pieces = (double*)ladder_scratch(max_size(SUM_BLOCKS, tree_most_blocks()) * sizeof(double));
    cudaStream_t compute = ladder.stream->compute;
    ExactSum* exact = (ExactSum*)ladder_scratch(sizeof(ExactSum));
    auto fours = LADDER_OPERATION(sum_of_squares, out, x, n);
    ladder_work(LADDER_BYTES, (double)n * sizeof(float), fours);
    ladder_rung("one block", [&] { squares_tree<<<1, TREE_MOST_THREADS, 0, compute>>>(out, x, n); });
    ladder_rung("tree", [&] {
        unsigned blocks = (unsigned)min_size(flat_blocks(n, 1), tree_most_blocks());
        squares_tree<<<blocks, FLAT_THREADS, 0, compute>>>(pieces, x, n);
        sums_tree<<<1, FLAT_THREADS, 0, compute>>>(out, pieces, blocks);
    });
    ladder_rung("shuffles", [&] {
        unsigned blocks = (unsigned)min_size(flat_blocks(n, 1), SUM_BLOCKS);
        sum_pieces_kernel<1><<<blocks, SUM_THREADS, 0, compute>>>(pieces, x, n);
        sum_finish_kernel<<<1, SUM_THREADS, 0, compute>>>(out, pieces, blocks);
    });
    ladder_rung("fours", fours);
    ladder_rung("shipped", [&] {
        fill_zero(exact, sizeof *exact, ladder.stream);
        exact_sum_squares(exact, x, n, ladder.stream);
        exact_value_kernel<<<1, 1, 0, compute>>>(out, exact);
    });
    return ladder_end();
}
