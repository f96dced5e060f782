// dev/matmul.cu: the ladders of the matrix products.
//
//     forward        out (M, N) = in (M, K) weight (N, K)^T + bias (N)
//     backward       din (M, K) = dout (M, N) weight (N, K);   dweight (N, K) += dout^T in, dbias (N) += sums of dout
//     with GELU      out = gelu(pre) after the forward, din *= gelu'(pre) after the backward
//
// An element is needed by every row or column of the other operand: 2 M N K operations on M K + N K + M N elements, so
// that arithmetic bounds the product if each element is used often enough where it is near. The ladder is how often:
//
//     rung        idea                                                       expected
//     naive       a thread for each result, operands from memory             2 loads for a multiplication: under 1% of
//                                                                            the tensor cores, 5% of the float units
//     tiles       32 x 32 results a block, operands in shared memory,        32 times less from memory; still 2 loads
//                 each used 32 times                                         from shared memory: 10% of the float units
//     registers   64 x 64 results a block, 4 x 4 a thread: 8 loads from      half of the float units
//                 shared memory for 16 multiplications (matmul.cuh)
//     tensor      tensor cores, 128 x 128 results a block, 64 x 32 a warp,   most of what mma.sync can do: 80% of an
//                 operands copied two steps ahead of their use               Ampere's peak, half of a Hopper's
//     shipped     cuBLASLt: on Hopper wgmma and bulk copies                  80% of the peak
//
// For floats there is no rung of tensor cores: they would round the operands to 10 bits of fraction. The other
// operations have the rungs `registers` and `shipped`, and those with GELU `separate`, two kernels, and `shipped`,
// which is one product of the library where matmul.cuh finds that it pays.
//
//     nvcc -O3 -arch=native -DLLMTRAIN_CUDA -DPRECISION_BF16 -Xcompiler -fopenmp dev/matmul.cu -lcublasLt -o matmul
//     ./matmul --rows 16384 --outputs 3072 --inputs 768

#include "kernels.cuh"
#include "ladder.h"

typedef struct {
    size_t M, N, K;
    const floatX *in, *weight, *bias, *dout;  // (M, K), (N, K), (N), (M, N)
    floatX *out, *pre, *din;                  // (M, N), (M, N), (M, K)
    const floatX* saved;                      // (M, K): what went into the GELU before
    float *dweight, *dbias;                   // (N, K), (N)
} Product;

// ------------------------------------------------------------------------------------------------
// Naive: result (blockIdx.y * 16 + threadIdx.y, blockIdx.x * 16 + threadIdx.x) is the thread's

static __global__ void matmul_naive(floatX* out, const floatX* in, const floatX* weight, const floatX* bias,
                                    size_t M, size_t N, size_t K) {
    size_t row = (size_t)blockIdx.y * blockDim.y + threadIdx.y, column = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= M || column >= N) return;
    float sum = float_of(bias[column]);
    for (size_t k = 0; k < K; k++) sum += float_of(in[row * K + k]) * float_of(weight[column * K + k]);
    out[row * N + column] = floatX_of(sum);
}

// ------------------------------------------------------------------------------------------------
// Tiles: a block of 32 x 32 threads makes as many results, in steps of 32 terms

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
// Tensor cores
//
// A block of 8 warps makes 128 x 128 results in steps of 32 terms. While the tensor cores work on one step, the
// operands of the next two are on their way into shared memory: three stages of 2 x 8 KiB. A warp makes 64 x 32
// results, 4 x 4 tiles of mma, in 64 registers a thread; per step it reads 6 KiB of shared memory for 2 x 16 products
// of 16 x 8 x 16.
//
// A row of a stage is 64 bytes, 4 chunks of 16. The eight rows that ldmatrix reads at a time would lie in two groups of
// banks; so chunk c of row r is at place c ^ (r / 2 % 4), and they lie in all eight.
//
// K and N must be multiples of 8; what is outside of the matrices is zero in shared memory and not stored. The
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

// Everything that this thread began to copy since the last call is one group.
static __device__ inline void copies_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of this thread but the newest.
static __device__ inline void copies_wait_but_one(void) { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// Where chunk `chunk` of row `row` lies in a stage.
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
        copy_begin(stage + chunk_place(row, chunk), source, inside);
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
        copies_wait_but_one();  // this step's operands have come, for this thread ...
        __syncthreads();        // ... and for all; and all are done with the stage of the step before, which is free
        size_t next = step + MMA_STAGES - 1;
        stage_copy_begin(a[next % MMA_STAGES], in, row, M, next * MMA_DEPTH, K);
        stage_copy_begin(b[next % MMA_STAGES], weight, column, N, next * MMA_DEPTH, K);
        copies_commit();        // also past the last step, where all is outside: the count of groups goes on
        const floatX *left = a[step % MMA_STAGES], *right = b[step % MMA_STAGES];
        #pragma unroll
        for (unsigned k = 0; k < CHUNKS; k += 2) {  // 16 terms
            uint32_t rows[WARP_ROWS / 16][4], columns[4];
            // Matrices: upper left, lower left, upper right, lower right of 16 x 16.
            #pragma unroll
            for (unsigned m = 0; m < WARP_ROWS / 16; m++)
                matrices_load(rows[m], left + chunk_place(warp_row + 16 * m + lane % 16, k + lane / 16));
            #pragma unroll
            for (unsigned n = 0; n < WARP_COLUMNS / 8; n += 2) {
                // Here upper left, upper right, lower left, lower right: the rows of weight are columns of the product.
                unsigned b_row = warp_column + 8 * n + lane % 8 + lane / 16 * 8;
                matrices_load(columns, right + chunk_place(b_row, k + lane / 8 % 2));
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

static void run_forward_tensor(void* problem, Stream stream) {
    Product* p = (Product*)problem;
    size_t across = (p->N + MMA_TILE - 1) / MMA_TILE, down = (p->M + MMA_TILE - 1) / MMA_TILE;
    dim3 grid((unsigned)across, (unsigned)down);
    matmul_tensor<<<grid, MMA_THREADS, 0, stream->compute>>>(p->out, p->in, p->weight, p->bias, p->M, p->N, p->K);
    LAUNCH_CHECK();
}

#endif

// ------------------------------------------------------------------------------------------------
// Rungs

static void run_forward_naive(void* problem, Stream stream) {
    Product* p = (Product*)problem;
    dim3 block(16, 16), grid((unsigned)((p->N + 15) / 16), (unsigned)((p->M + 15) / 16));
    matmul_naive<<<grid, block, 0, stream->compute>>>(p->out, p->in, p->weight, p->bias, p->M, p->N, p->K);
    LAUNCH_CHECK();
}

static void run_forward_tiles(void* problem, Stream stream) {
    Product* p = (Product*)problem;
    dim3 block(TILE, TILE), grid((unsigned)((p->N + TILE - 1) / TILE), (unsigned)((p->M + TILE - 1) / TILE));
    matmul_tiles<<<grid, block, 0, stream->compute>>>(p->out, p->in, p->weight, p->bias, p->M, p->N, p->K);
    LAUNCH_CHECK();
}

static void run_forward_registers(void* problem, Stream stream) {
    Product* p = (Product*)problem;
    plain_matmul_forward(p->out, p->in, p->weight, p->bias, p->M, p->N, p->K, stream);
}

static void run_forward_shipped(void* problem, Stream stream) {
    Product* p = (Product*)problem;
    matmul_forward(p->out, p->in, p->weight, p->bias, p->M, p->N, p->K, stream);
}

static void run_backward_input_registers(void* problem, Stream stream) {
    Product* p = (Product*)problem;
    plain_matmul_backward_input(p->din, p->dout, p->weight, p->M, p->N, p->K, stream);
}

static void run_backward_input_shipped(void* problem, Stream stream) {
    Product* p = (Product*)problem;
    matmul_backward_input(p->din, p->dout, p->weight, p->M, p->N, p->K, stream);
}

static void run_backward_weight_registers(void* problem, Stream stream) {
    Product* p = (Product*)problem;
    plain_matmul_backward_weight(p->dweight, p->dout, p->in, p->M, p->N, p->K, stream);
    column_sums_add(p->dbias, p->dout, p->M, p->N, stream);
}

static void run_backward_weight_shipped(void* problem, Stream stream) {
    Product* p = (Product*)problem;
    matmul_backward_weight(p->dweight, p->dbias, p->dout, p->in, p->M, p->N, p->K, stream);
}

static void run_gelu_forward_separate(void* problem, Stream stream) {
    Product* p = (Product*)problem;
    matmul_forward(p->pre, p->in, p->weight, p->bias, p->M, p->N, p->K, stream);
    gelu_forward(p->out, p->pre, p->M * p->N, stream);
}

static void run_gelu_forward_shipped(void* problem, Stream stream) {
    Product* p = (Product*)problem;
    matmul_gelu_forward(p->out, p->pre, p->in, p->weight, p->bias, p->M, p->N, p->K, stream);
}

static void run_gelu_backward_separate(void* problem, Stream stream) {
    Product* p = (Product*)problem;
    matmul_backward_input(p->din, p->dout, p->weight, p->M, p->N, p->K, stream);
    gelu_backward(p->din, p->din, p->saved, p->M * p->K, stream);
}

static void run_gelu_backward_shipped(void* problem, Stream stream) {
    Product* p = (Product*)problem;
    matmul_gelu_backward_input(p->din, p->dout, p->weight, p->saved, p->M, p->N, p->K, stream);
}

// ------------------------------------------------------------------------------------------------
// Program
//
// Each operation is a ladder of its own. Activations and gradients are normal numbers, weights those of variance 1 / K,
// so that out is normal too.

enum { MOST_RUNGS = 5 };

typedef struct {
    MatmulKind kind;
    const char* title;
    struct { const char* name; LadderRun run; } rungs[MOST_RUNGS];  // those that there are
} Operation;

static const Operation operations[] = {
    {MATMUL_FORWARD, "matmul_forward: out (M, N) = in (M, K) weight (N, K)^T + bias (N)",
     {{"naive", run_forward_naive}, {"tiles", run_forward_tiles}, {"registers", run_forward_registers},
#if !FLOATX_IS_FLOAT
      {"tensor", run_forward_tensor},
#endif
      {"shipped", run_forward_shipped}}},
    {MATMUL_BACKWARD_INPUT, "matmul_backward_input: din (M, K) = dout (M, N) weight (N, K)",
     {{"registers", run_backward_input_registers}, {"shipped", run_backward_input_shipped}}},
    {MATMUL_BACKWARD_WEIGHT, "matmul_backward_weight: dweight (N, K) += dout (M, N)^T in (M, K), and dbias (N)",
     {{"registers", run_backward_weight_registers}, {"shipped", run_backward_weight_shipped}}},
    {MATMUL_GELU_FORWARD, "matmul_gelu_forward: out = gelu(pre (M, N) = in weight^T + bias)",
     {{"separate", run_gelu_forward_separate}, {"shipped", run_gelu_forward_shipped}}},
    {MATMUL_GELU_BACKWARD_INPUT, "matmul_gelu_backward_input: din (M, K) = (dout weight) gelu'(pre (M, K))",
     {{"separate", run_gelu_backward_separate}, {"shipped", run_gelu_backward_shipped}}},
};

// Fills p for one operation: inputs, outputs with their bounds, and the CPU's results.
static void problem_make(Product* p, Ladder* l, MatmulKind kind) {
    size_t M = p->M, N = p->N, K = p->K;
    bool forward = kind == MATMUL_FORWARD || kind == MATMUL_GELU_FORWARD;
    double weight_scale = 1.0 / sqrt((double)K), backward_scale = sqrt((double)N / (double)K);
    double largest = 6.0;  // of a billion normal numbers
    if (kind != MATMUL_BACKWARD_WEIGHT) p->weight = ladder_input<floatX>(l, "weight", N * K, weight_scale);
    if (forward || kind == MATMUL_BACKWARD_WEIGHT) p->in = ladder_input<floatX>(l, "in", M * K, 1.0);
    if (forward) p->bias = ladder_input<floatX>(l, "bias", N, 1.0);
    else p->dout = ladder_input<floatX>(l, "dout", M * N, 1.0);

    // Rounding to floatX on the way: of pre before the GELU, of the product before its derivative, whose slope is 1.13.
    LadderBound sum_of_inputs = ladder_bound((double)K + 1.0, (double)K * weight_scale, 0.0);
    LadderBound sum_of_outputs = ladder_bound((double)N, (double)N * weight_scale, 0.0);
    if (kind == MATMUL_FORWARD) {
        p->out = ladder_output<floatX>(l, "out", M * N, sum_of_inputs);
        if (l->check)
            cpu::matmul_forward(ladder_twin(l, p->out), ladder_twin(l, p->in), ladder_twin(l, p->weight),
                                ladder_twin(l, p->bias), M, N, K, NULL);
    } else if (kind == MATMUL_BACKWARD_INPUT) {
        p->din = ladder_output<floatX>(l, "din", M * K, sum_of_outputs);
        if (l->check)
            cpu::matmul_backward_input(ladder_twin(l, p->din), ladder_twin(l, p->dout), ladder_twin(l, p->weight),
                                       M, N, K, NULL);
    } else if (kind == MATMUL_BACKWARD_WEIGHT) {
        LadderBound sum_of_rows = ladder_bound((double)M + 1.0, (double)M, 0.0);
        p->dweight = ladder_added<float>(l, "dweight", N * K, 1.0, sum_of_rows);
        p->dbias = ladder_added<float>(l, "dbias", N, 1.0, sum_of_rows);
        if (l->check)
            cpu::matmul_backward_weight(ladder_twin(l, p->dweight), ladder_twin(l, p->dbias), ladder_twin(l, p->dout),
                                        ladder_twin(l, p->in), M, N, K, NULL);
    } else if (kind == MATMUL_GELU_FORWARD) {
        p->pre = ladder_output<floatX>(l, "pre", M * N, sum_of_inputs);
        sum_of_inputs.size *= 1.13;
        sum_of_inputs.rounded = 1.13 * largest * sqrt(2.0);  // of pre, whose variance the bias doubles
        p->out = ladder_output<floatX>(l, "out", M * N, sum_of_inputs);
        if (l->check)
            cpu::matmul_gelu_forward(ladder_twin(l, p->out), ladder_twin(l, p->pre), ladder_twin(l, p->in),
                                     ladder_twin(l, p->weight), ladder_twin(l, p->bias), M, N, K, NULL);
    } else {
        p->saved = ladder_input<floatX>(l, "pre", M * K, 1.0);
        sum_of_outputs.size *= 1.13;
        sum_of_outputs.rounded = 1.13 * largest * backward_scale;
        p->din = ladder_output<floatX>(l, "din", M * K, sum_of_outputs);
        if (l->check)
            cpu::matmul_gelu_backward_input(ladder_twin(l, p->din), ladder_twin(l, p->dout), ladder_twin(l, p->weight),
                                            ladder_twin(l, p->saved), M, N, K, NULL);
    }
}

int main(int argc, char** argv) {
    uint64_t M = ladder_size(16384, 70), N = ladder_size(3072, 136), K = ladder_size(768, 72);
    Flag flags[] = {
        {"rows", FLAG_COUNT, &M, "M", 1, 1e7, "rows: B times T", false},
        {"outputs", FLAG_COUNT, &N, "N", 1, 1e6, "outputs, a multiple of 8", false},
        {"inputs", FLAG_COUNT, &K, "K", 1, 1e6, "inputs, a multiple of 8", false},
    };
    Ladder l = {};
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
        const Operation* o = &operations[i];
        if (!ladder_open(&l, argc, argv, o->title, flags, sizeof flags / sizeof flags[0])) return l.status;
        if (N % 8 != 0 || K % 8 != 0) ladder_give_up("--outputs and --inputs must be multiples of 8: tensor cores");
        ladder_give_scratch(&l, matmul_scratch_bytes());
        ladder_tensor_peak(&l);
        Product p = {M, N, K, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL};
        problem_make(&p, &l, o->kind);
        LadderWork work = FLOATX_IS_FLOAT ? LADDER_FLOAT_FLOPS : LADDER_TENSOR_FLOPS;
        ladder_work(&l, work, 2.0 * (double)M * (double)N * (double)K);
        for (int rung = 0; rung < MOST_RUNGS && o->rungs[rung].run; rung++)
            ladder_rung(&l, o->rungs[rung].name, o->rungs[rung].run, &p);
        ladder_close(&l);
    }
    return ladder_result(&l);
}
