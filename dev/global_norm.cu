// dev/global_norm.cu: the ladder of the gradient's norm: the sum of squares of a long vector of floats, in double.
//
//     out (1) = sum over i of x_i^2,  x (n)
//
// Memory moves 4 bytes per element, once. Every rung adds in a fixed order, so that a run repeats its bits; atomic
// additions would not.
//
//     rung          idea                                                     expected
//     one block     1024 threads walk the vector, then a tree in shared      one of a hundred processors: 1% of peak
//                   memory
//     tree          as many blocks as the GPU holds, each with a tree;       near the peak
//                   one more block sums their sums
//     shuffles      sums inside of warps by shuffles: two barriers instead   the same for long vectors: the tree is a
//                   of one per level                                         small part of them
//     shipped       16 bytes a load, four loads at once                       a few per cent more: fewer instructions
//
//     FLAGS="-O3 -arch=native -I. -DLLMTRAIN_CUDA -Xcompiler=-fopenmp"
//     nvcc $FLAGS dev/global_norm.cu -o build/global_norm
//     build/global_norm --elements 124475904

#include "kernels.cuh"
#include "ladder.h"

enum { TREE_MOST_THREADS = 1024 };

typedef struct {
    size_t n;
    const float* x;  // (n)
    double* out;     // (1)
    double* pieces;  // (blocks of the first kernel)
} Norm;

// out (gridDim.x): each block's part of the sum of x (n), or of its squares. blockDim.x is a power of two.
template <typename T, bool SQUARES>
static __global__ void norm_tree(double* out, const T* x, size_t n) {
    __shared__ double sums[TREE_MOST_THREADS];
    double sum = 0.0;
    for (size_t i = flat_index(1); i < n; i += (size_t)gridDim.x * blockDim.x)
        sum += SQUARES ? (double)x[i] * (double)x[i] : (double)x[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = sums[0];
}

static void run_one_block(void* problem, Stream stream) {
    Norm* p = (Norm*)problem;
    norm_tree<float, true><<<1, TREE_MOST_THREADS, 0, stream->compute>>>(p->out, p->x, p->n);
    LAUNCH_CHECK();
}

// Blocks that the GPU holds at once, 2048 threads to a processor.
static size_t tree_most_blocks(Stream stream) { return stream->processors * (2048 / FLAT_THREADS); }

static void run_tree(void* problem, Stream stream) {
    Norm* p = (Norm*)problem;
    unsigned blocks = (unsigned)min_size(flat_blocks(p->n, 1), tree_most_blocks(stream));
    norm_tree<float, true><<<blocks, FLAT_THREADS, 0, stream->compute>>>(p->pieces, p->x, p->n);
    LAUNCH_CHECK();
    norm_tree<double, false><<<1, FLAT_THREADS, 0, stream->compute>>>(p->out, p->pieces, blocks);
    LAUNCH_CHECK();
}

static void run_shuffles(void* problem, Stream stream) {
    Norm* p = (Norm*)problem;
    unsigned blocks = (unsigned)min_size(flat_blocks(p->n, 1), SUM_BLOCKS);
    sum_pieces_kernel<1, true><<<blocks, SUM_THREADS, 0, stream->compute>>>(p->pieces, p->x, p->n);
    LAUNCH_CHECK();
    sum_finish_kernel<<<1, SUM_THREADS, 0, stream->compute>>>(p->out, p->pieces, blocks, 1.0, false);
    LAUNCH_CHECK();
}

static void run_shipped(void* problem, Stream stream) {
    Norm* p = (Norm*)problem;
    sum_of_squares(p->out, p->x, p->n, stream);
}

int main(int argc, char** argv) {
    uint64_t n = ladder_size(124475904, 100003);  // GPT-2 124M
    Flag flags[] = {{"elements", FLAG_COUNT, &n, "n", 1, 1e10, "length of the vector", false}};
    Ladder l = {};
    if (!ladder_open(&l, argc, argv, "sum_of_squares: out (1) = sum of squares of x (n), in double", flags, 1))
        return l.status;
    ladder_give_scratch(&l, sum_of_squares_scratch_bytes());
    // The bound of a sum of n terms in double, where ladder_bound counts in roundings of float, 2^29 times as large.
    LadderBound bound = ladder_bound((double)n * 0x1p-58, 0, 0);
    Norm p = {n, ladder_input<float>(&l, "x", n, 1.0), ladder_output<double>(&l, "out", 1, bound), NULL};
    p.pieces = (double*)ladder_scratch(&l, max_size(SUM_BLOCKS, tree_most_blocks(l.stream)) * sizeof(double));
    if (l.check) cpu::sum_of_squares(ladder_twin(&l, p.out), ladder_twin(&l, p.x), n, NULL);
    ladder_work(&l, LADDER_BYTES, (double)n * sizeof(float));
    ladder_rung(&l, "one block", run_one_block, &p);
    ladder_rung(&l, "tree", run_tree, &p);
    ladder_rung(&l, "shuffles", run_shuffles, &p);
    ladder_rung(&l, "shipped", run_shipped, &p);
    ladder_close(&l);
    return ladder_result(&l);
}
