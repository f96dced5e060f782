// dev/matmul.cu: the ladders of the matmuls.
//
//     forward        out (M, N) = in (M, K) weight (N, K)^T + bias (N)
//     backward       din (M, K) = dout (M, N) weight (N, K);   dweight (N, K) += dout^T in, dbias (N) += sums of dout
//     with GELU      out = gelu(pre) after the forward, din *= gelu'(pre) after the backward
//
// Each element is multiplied with a whole row or column of the other operand: 2 M N K operations on M K + N K + M N
// elements. So arithmetic is the bound if each loaded element is used often enough; the rungs differ in how often:
//
//     rung        idea                                                       expected
//     naive       one thread per result, operands from memory                2 loads for a multiplication: under 1% of
//                                                                            the tensor cores, 5% of the float units
//     tiles       32 x 32 results per block, operands in shared memory,      32 times less from memory; still 2 loads
//                 each used 32 times                                         from shared memory: 10% of the float units
//     registers   64 x 64 results per block, 4 x 4 per thread: 8 loads from  12 wavefronts for 16 multiplications of a
//                 shared memory for 16 multiplications                       warp: a third of the float units
//     plain       the same in two loads of 16 bytes (matmul.cuh)             4 wavefronts: 80% of the float units
//     tensor      tensor cores, 128 x 128 results per block, 64 x 32 per     most of what mma.sync can do: 80% of an
//                 warp, operands copied two steps ahead of their use         Ampere's peak, half of a Hopper's
//     shipped     cuBLASLt: on Hopper wgmma and bulk copies                  80% of the peak
//
// The gradient of a bias, the sums of dout's columns, where both gradients are overwritten:
//
//     epilogue    cuBLASLt sums what it reads of dout for dweight: BGRADB,   dout is read once instead of twice: 3% of
//                 of the result's type, here float                           a step, if the matmul keeps its speed
//     shipped     a matmul and two kernels (section 3 of matmul.cuh)
//
// The library's epilogue cannot add to a bias gradient, and is not used until this rung has been timed on a GPU.
//
// For floats there is no rung with tensor cores: they would round the operands to 10 bits of fraction. The backwards
// that add have the rungs `naive`, `plain` and `shipped`, and the operations with GELU `separate`, two kernels, and
// `shipped`: one library matmul where matmul.cuh finds it faster.
//
//     build/matmul --rows 16384 --outputs 3072 --inputs 768

#include "kernels.cuh"
#include "ladder.h"

// ------------------------------------------------------------------------------------------------
// Naive: each thread computes result (blockIdx.y * 16 + threadIdx.y, blockIdx.x * 16 + threadIdx.x)

static __global__ void matmul_naive(floatX* out, const floatX* in, const floatX* weight, const floatX* bias,
                                    size_t M, size_t N, size_t K) {
    size_t row = (size_t)blockIdx.y * blockDim.y + threadIdx.y, column = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= M || column >= N) return;
    float sum = float_of(bias[column]);
    for (size_t k = 0; k < K; k++) sum += float_of(in[row * K + k]) * float_of(weight[column * K + k]);
    out[row * N + column] = floatX_of(sum);
}

static __global__ void matmul_backward_input_naive(floatX* din, const floatX* dout, const floatX* weight,
                                                   size_t M, size_t N, size_t K) {
    size_t row = (size_t)blockIdx.y * blockDim.y + threadIdx.y, column = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= M || column >= K) return;
    float sum = 0.0f;
    for (size_t n = 0; n < N; n++) sum += float_of(dout[row * N + n]) * float_of(weight[n * K + column]);
    din[row * K + column] = floatX_of(sum);
}

// The threads of column 0 also add up a bias's gradient.
static __global__ void matmul_backward_weight_naive(float* dweight, float* dbias, const floatX* dout, const floatX* in,
                                                    size_t M, size_t N, size_t K) {
    size_t row = (size_t)blockIdx.y * blockDim.y + threadIdx.y, column = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N || column >= K) return;
    float sum = 0.0f, bias = 0.0f;
    for (size_t m = 0; m < M; m++) {
        sum += float_of(dout[m * N + row]) * float_of(in[m * K + column]);
        bias += float_of(dout[m * N + row]);
    }
    dweight[row * K + column] += sum;
    if (column == 0) dbias[row] += bias;
}

// ------------------------------------------------------------------------------------------------
// Tiles: a block of 32 x 32 threads computes as many results, in steps of 32 terms

enum { TILE = 32 };

static __global__ void matmul_tiles(floatX* out, const floatX* in, const floatX* weight, const floatX* bias,
                                    size_t M, size_t N, size_t K) {
    __shared__ float a[TILE][TILE], b[TILE][TILE + 1];  // + 1: lanes read b down a column
    size_t row = (size_t)blockIdx.y * TILE + threadIdx.y, column = (size_t)blockIdx.x * TILE + threadIdx.x;
    size_t b_row = (size_t)blockIdx.x * TILE + threadIdx.y;
    float sum = 0.0f;
    for (size_t first = 0; first < K; first += TILE) {
        size_t k = first + threadIdx.x;
        a[threadIdx.y][threadIdx.x] = row < M && k < K ? float_of(in[row * K + k]) : 0.0f;
        b[threadIdx.y][threadIdx.x] = b_row < N && k < K ? float_of(weight[b_row * K + k]) : 0.0f;
        __syncthreads();
        for (int i = 0; i < TILE; i++) sum += a[threadIdx.y][i] * b[threadIdx.x][i];
        __syncthreads();
    }
    if (row < M && column < N) out[row * N + column] = floatX_of(sum + float_of(bias[column]));
}

// ------------------------------------------------------------------------------------------------
// Registers: a block of 256 threads computes 64 x 64 results, in steps of 16 terms, 4 x 4 per thread

static __global__ __launch_bounds__(MATMUL_THREADS)
void matmul_registers(floatX* out, const floatX* in, const floatX* weight, const floatX* bias, size_t M, size_t N,
                      size_t K) {
    __shared__ float a[MATMUL_DEPTH][MATMUL_PITCH], b[MATMUL_DEPTH][MATMUL_PITCH];
    size_t row = (size_t)blockIdx.y * MATMUL_TILE, column = (size_t)blockIdx.x * MATMUL_TILE;
    unsigned own_row = threadIdx.x / 16 * MATMUL_OWN, own_column = threadIdx.x % 16 * MATMUL_OWN;
    float sums[MATMUL_OWN][MATMUL_OWN] = {{0.0f}};
    for (size_t first = 0; first < K; first += MATMUL_DEPTH) {
        plain_matmul_load(a, in, K, 1, row, M, first, K);
        plain_matmul_load(b, weight, K, 1, column, N, first, K);
        __syncthreads();
        for (int k = 0; k < MATMUL_DEPTH; k++)
            for (int i = 0; i < MATMUL_OWN * MATMUL_OWN; i++)
                sums[i / MATMUL_OWN][i % MATMUL_OWN] +=
                    a[k][own_row + i / MATMUL_OWN] * b[k][own_column + i % MATMUL_OWN];
        __syncthreads();
    }
    for (int i = 0; i < MATMUL_OWN * MATMUL_OWN; i++) {
        size_t r = row + own_row + i / MATMUL_OWN, c = column + own_column + i % MATMUL_OWN;
        if (r < M && c < N) out[r * N + c] = floatX_of(sums[i / MATMUL_OWN][i % MATMUL_OWN] + float_of(bias[c]));
    }
}

// ------------------------------------------------------------------------------------------------
// Tensor cores
//
// A block of 8 warps computes 128 x 128 results in steps of 32 terms. While the tensor cores work on one step, the
// operands of the next two are being copied to shared memory: three stages of 2 x 8 KiB. A warp computes 64 x 32
// results, 4 x 4 tiles of mma, in 64 registers per thread; per step it reads 6 KiB of shared memory for 2 x 16 matmuls
// of 16 x 8 x 16.
//
// A row of a stage is 64 bytes, 4 chunks of 16. The eight rows that ldmatrix reads at a time would lie in two groups of
// banks; so chunk c of row r is stored in slot c ^ (r / 2 % 4), which spreads them over all eight.
//
// K and N must be multiples of 8; elements outside the matrices are zero in shared memory and not stored. The
// instructions are those of attention.cuh.

#if !FLOATX_IS_FLOAT

enum {
    MMA_TILE = 128,
    MMA_DEPTH = 32,
    MMA_STAGES = 3,
    MMA_WARPS = 8,
    MMA_THREADS = MMA_WARPS * WARP,
    WARP_ROWS = 64,
    WARP_COLUMNS = 32,
    CHUNK = 8,                  // elements
    CHUNKS = MMA_DEPTH / CHUNK  // in a row of a stage
};

// Everything that this thread has begun to copy since the last call becomes one group.
static __device__ inline void copies_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread except the newest.
static __device__ inline void copies_wait_but_one(void) { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// The offset of chunk `chunk` of row `row` in a stage.
static __device__ inline unsigned chunk_place(unsigned row, unsigned chunk) {
    return (row * CHUNKS + (chunk ^ (row / 2 % CHUNKS))) * CHUNK;
}

// Begins to copy rows [first, first + 128), columns [k, k + 32) of a matrix (rows, K).
static __device__ inline void stage_copy_begin(floatX* stage, const floatX* matrix, size_t first, size_t rows,
                                               size_t k, size_t K) {
    for (unsigned i = threadIdx.x; i < MMA_TILE * CHUNKS; i += MMA_THREADS) {
        unsigned row = i / CHUNKS, chunk = i % CHUNKS;
        bool inside = first + row < rows && k + chunk * CHUNK < K;
        const floatX* source = inside ? matrix + (first + row) * K + k + chunk * CHUNK : matrix;
        copy_begin(shared_address(stage + chunk_place(row, chunk)), source, inside);
    }
}

static __global__ __launch_bounds__(MMA_THREADS, 2)
void matmul_tensor(floatX* out, const floatX* in, const floatX* weight, const floatX* bias,
                   size_t M, size_t N, size_t K) {
    __shared__ __align__(16) floatX a[MMA_STAGES][MMA_TILE * MMA_DEPTH];
    __shared__ __align__(16) floatX b[MMA_STAGES][MMA_TILE * MMA_DEPTH];
    size_t row = (size_t)blockIdx.y * MMA_TILE, column = (size_t)blockIdx.x * MMA_TILE;
    size_t steps = (K + MMA_DEPTH - 1) / MMA_DEPTH;
    unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    unsigned warp_row = warp % 2 * WARP_ROWS, warp_column = warp / 2 * WARP_COLUMNS;
    float sums[WARP_ROWS / 16][WARP_COLUMNS / 8][4] = {{{0.0f}}};

    for (size_t step = 0; step < MMA_STAGES - 1; step++) {
        stage_copy_begin(a[step], in, row, M, step * MMA_DEPTH, K);
        stage_copy_begin(b[step], weight, column, N, step * MMA_DEPTH, K);
        copies_commit();
    }
    for (size_t step = 0; step < steps; step++) {
        copies_wait_but_one();  // this step's operands have arrived, for this thread ...
        __syncthreads();        // ... and for all; and all have finished with the previous step's stage: it is free
        size_t next = step + MMA_STAGES - 1;
        stage_copy_begin(a[next % MMA_STAGES], in, row, M, next * MMA_DEPTH, K);
        stage_copy_begin(b[next % MMA_STAGES], weight, column, N, next * MMA_DEPTH, K);
        copies_commit();        // also past the last step, where all is outside, to keep the count of groups
        const floatX *left = a[step % MMA_STAGES], *right = b[step % MMA_STAGES];
        #pragma unroll
        for (unsigned k = 0; k < CHUNKS; k += 2) {  // 16 terms
            uint32_t rows[WARP_ROWS / 16][4], columns[4];
            // Matrices: upper left, lower left, upper right, lower right of 16 x 16.
            #pragma unroll
            for (unsigned m = 0; m < WARP_ROWS / 16; m++)
                matrices_load(rows[m],
                              shared_address(left + chunk_place(warp_row + 16 * m + lane % 16, k + lane / 16)));
            #pragma unroll
            for (unsigned n = 0; n < WARP_COLUMNS / 8; n += 2) {
                // Here upper left, upper right, lower left, lower right: the rows of weight are columns of the result.
                unsigned b_row = warp_column + 8 * n + lane % 8 + lane / 16 * 8;
                matrices_load(columns, shared_address(right + chunk_place(b_row, k + lane / 8 % 2)));
                #pragma unroll
                for (unsigned m = 0; m < WARP_ROWS / 16; m++) {
                    multiply_add(sums[m][n], rows[m], columns[0], columns[1]);
                    multiply_add(sums[m][n + 1], rows[m], columns[2], columns[3]);
                }
            }
        }
    }
    #pragma unroll
    for (unsigned m = 0; m < WARP_ROWS / 16; m++) {
        #pragma unroll
        for (unsigned n = 0; n < WARP_COLUMNS / 8; n++) {
            size_t c = column + warp_column + 8 * n + 2 * (lane % 4);
            if (c >= N) continue;
            float first = float_of(bias[c]), second = float_of(bias[c + 1]);
            #pragma unroll
            for (unsigned half = 0; half < 2; half++) {
                size_t r = row + warp_row + 16 * m + lane / 4 + 8 * half;
                if (r >= M) continue;
                const float* pair = &sums[m][n][2 * half];
                *(uint32_t*)(out + r * N + c) = pair_of(pair[0] + first, pair[1] + second);
            }
        }
    }
}

#endif

// ------------------------------------------------------------------------------------------------
// The gradients of weight and bias in one library matmul

static MatmulPlan bias_gradient_plan(size_t M, size_t N, size_t K) {
    struct Matmul* matmul = matmul_state(ladder.stream);
    MatmulShape shape = {(uint32_t)MATMUL_BACKWARD_WEIGHT, false, false, (uint16_t)FLOATX_DTYPE, M, N, K};
    MatmulPlan plan = matmul_plan_describe(shape, MATMUL_ALIGNMENT);
    cublasLtMatmulHeuristicResult_t result;
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BGRADB;
    MATMUL_SET(plan.operation, EPILOGUE, epilogue, &shape);
    matmul_plan_point(&plan, (const void*)(uintptr_t)MATMUL_ALIGNMENT, NULL);
    bool possible = matmul_plan_propose(&result, 1, matmul, &plan, &MATMUL_REQUEST) > 0;
    if (possible && result.state == CUBLAS_STATUS_SUCCESS)
        matmul_plan_take(&plan, &result.algo, result.workspaceSize);
    return plan;
}

// ------------------------------------------------------------------------------------------------
// Program: six ladders
//
// Activations and gradients are normal numbers, weights those of variance 1 / K, so that out is normal too.

static void ladder_products(size_t M, size_t N, size_t K) {
    const double flops = 2.0 * (double)M * (double)N * (double)K;
    const double weight_scale = 1.0 / sqrt((double)K), backward_scale = sqrt((double)N / (double)K);
    const double largest = 6.0;  // of a billion normal numbers
    const LadderBound sum_of_inputs = {(double)K + 1.0, (double)K * weight_scale, 0.0};
    const LadderBound sum_of_outputs = {(double)N, (double)N * weight_scale, 0.0};
    const LadderBound sum_of_rows = {(double)M + 1.0, (double)M, 0.0};
    // Rounding to floatX in between: of pre before the GELU, whose slope is at most 1.13, and whose variance the bias
    // doubles; of the matmul's result before the GELU's derivative.
    const LadderBound gelu_of_inputs = {(double)K + 1.0, 1.13 * sum_of_inputs.size, 1.13 * largest * sqrt(2.0)};
    const LadderBound gelu_of_outputs = {(double)N, 1.13 * sum_of_outputs.size, 1.13 * largest * backward_scale};
    Stream stream = ladder.stream;
    LadderPointer<floatX> in, weight, bias, dout, out, pre, din;
    auto begin = [&](const char* title) {
        ladder_begin(title);
        ladder_give_scratch(matmul_scratch_bytes());
        weight = ladder_input<floatX>("weight", N * K, weight_scale);
        in = ladder_input<floatX>("in", M * K, 1.0);
        bias = ladder_input<floatX>("bias", N, 1.0);
        dout = ladder_input<floatX>("dout", M * N, 1.0);
    };

    begin("matmul_forward: out (M, N) = in (M, K) weight (N, K)^T + bias (N)");
    out = ladder_output<floatX>("out", M * N, sum_of_inputs);
    auto forward = LADDER_OPERATION(matmul_forward, out, in, weight, bias, M, N, K);
    auto blocks = [&](size_t tile) { return dim3((unsigned)divide_up(N, tile), (unsigned)divide_up(M, tile)); };
    ladder_work(LADDER_MATMUL_FLOPS, flops, forward);
    ladder_rung("naive", [&] {
        matmul_naive<<<blocks(16), dim3(16, 16), 0, stream->compute>>>(out, in, weight, bias, M, N, K);
    });
    ladder_rung("tiles", [&] {
        matmul_tiles<<<blocks(TILE), dim3(TILE, TILE), 0, stream->compute>>>(out, in, weight, bias, M, N, K);
    });
    ladder_rung("registers", [&] {
        matmul_registers<<<blocks(MATMUL_TILE), MATMUL_THREADS, 0, stream->compute>>>(out, in, weight, bias, M, N, K);
    });
    ladder_rung("plain", [&] {
        plain_matmul<floatX>(MATMUL_FORWARD, out, weight, in, bias, false, M, N, K, stream);
    });
#if !FLOATX_IS_FLOAT
    ladder_rung("tensor", [&] {
        matmul_tensor<<<blocks(MMA_TILE), MMA_THREADS, 0, stream->compute>>>(out, in, weight, bias, M, N, K);
    });
#endif
    ladder_rung("shipped", forward);

    begin("matmul_backward_input: din (M, K) = dout (M, N) weight (N, K)");
    din = ladder_output<floatX>("din", M * K, sum_of_outputs);
    auto backward_input = LADDER_OPERATION(matmul_backward_input, din, dout, weight, M, N, K);
    ladder_work(LADDER_MATMUL_FLOPS, flops, backward_input);
    ladder_rung("naive", [&] {
        dim3 grid((unsigned)divide_up(K, 16), (unsigned)divide_up(M, 16));
        matmul_backward_input_naive<<<grid, dim3(16, 16), 0, stream->compute>>>(din, dout, weight, M, N, K);
    });
    ladder_rung("plain", [&] {
        plain_matmul<floatX>(MATMUL_BACKWARD_INPUT, din, weight, dout, NULL, false, M, N, K, stream);
    });
    ladder_rung("shipped", backward_input);

    begin("matmul_backward_weight: dweight (N, K) += dout (M, N)^T in (M, K), and dbias (N)");
    auto dweight = ladder_added<float>("dweight", N * K, 1.0, sum_of_rows);
    auto dbias = ladder_added<float>("dbias", N, 1.0, sum_of_rows);
    auto backward_weight = LADDER_OPERATION(matmul_backward_weight, dweight, dbias, dout, in, true, M, N, K);
    ladder_work(LADDER_MATMUL_FLOPS, flops, backward_weight);
    ladder_rung("naive", [&] {
        dim3 grid((unsigned)divide_up(K, 16), (unsigned)divide_up(N, 16));
        matmul_backward_weight_naive<<<grid, dim3(16, 16), 0, stream->compute>>>(dweight, dbias, dout, in, M, N, K);
    });
    ladder_rung("plain", [&] {
        plain_matmul<floatX>(MATMUL_BACKWARD_WEIGHT, dweight, in, dout, NULL, true, M, N, K, stream);
        column_sums(dbias, dout, true, M, N, stream);
    });
    ladder_rung("shipped", backward_weight);

    begin("matmul_backward_weight: dweight (N, K) = dout (M, N)^T in (M, K), and dbias (N)");
    dweight = ladder_output<float>("dweight", N * K, sum_of_rows);
    dbias = ladder_output<float>("dbias", N, sum_of_rows);
    auto overwrite = LADDER_OPERATION(matmul_backward_weight, dweight, dbias, dout, in, false, M, N, K);
    ladder_work(LADDER_MATMUL_FLOPS, flops, overwrite);
    MatmulPlan plan = bias_gradient_plan(M, N, K);
    if (plan.possible) {
        ladder_rung("epilogue", [&] {
            MATMUL_CHECK(matmul_plan_run(matmul_state(stream), &plan, dweight, in, dout, dbias, NULL, false, stream),
                         &plan.shape);
        });
    } else if (ladder_wants("epilogue")) {
        ladder.rungs++;
        fprintf(stderr, "        skipped epilogue: the library has no algorithm for it\n");
    }
    matmul_plan_free(&plan);
    ladder_rung("shipped", overwrite);

    begin("matmul_gelu_forward: out = gelu(pre (M, N) = in weight^T + bias)");
    pre = ladder_output<floatX>("pre", M * N, sum_of_inputs);
    out = ladder_output<floatX>("out", M * N, gelu_of_inputs);
    auto gelu_after = LADDER_OPERATION(matmul_gelu_forward, out, pre, in, weight, bias, M, N, K);
    ladder_work(LADDER_MATMUL_FLOPS, flops, gelu_after);
    ladder_rung("separate", [&] {
        matmul_forward(pre, in, weight, bias, M, N, K, stream);
        gelu_forward(out, pre, M * N, stream);
    });
    ladder_rung("shipped", gelu_after);

    begin("matmul_gelu_backward_input: din (M, K) = (dout weight) gelu'(pre (M, K))");
    pre = ladder_input<floatX>("pre", M * K, 1.0);
    din = ladder_output<floatX>("din", M * K, gelu_of_outputs);
    auto gelu_before = LADDER_OPERATION(matmul_gelu_backward_input, din, dout, weight, pre, M, N, K);
    ladder_work(LADDER_MATMUL_FLOPS, flops, gelu_before);
    ladder_rung("separate", [&] {
        matmul_backward_input(din, dout, weight, M, N, K, stream);
        gelu_backward(din, din, pre, M * K, stream);
    });
    ladder_rung("shipped", gelu_before);
}

int main(int argc, char** argv) {
    uint64_t M = ladder_size(16384, 70), N = ladder_size(3072, 136), K = ladder_size(768, 72);
    ladder_open(argc, argv, {{"rows", KIND_COUNT, &M, "M", 1, 1e7, "rows: B times T", 0},
                             {"outputs", KIND_COUNT, &N, "N", 1, 1e6, "outputs, a multiple of 8", 0},
                             {"inputs", KIND_COUNT, &K, "K", 1, 1e6, "inputs, a multiple of 8", 0}});
    if (N % 8 != 0 || K % 8 != 0) ladder_give_up("--outputs and --inputs must be multiples of 8: tensor cores");
    ladder_products(M, N, K);
    return ladder_end();
}
