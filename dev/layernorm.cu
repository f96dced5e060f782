// dev/layernorm.cu: the ladders of the normalisations, layernorm and rmsnorm, forward and backward.
//
//     forward   residual = in + branch;  out = (residual - mean) rstd weight + bias    rmsnorm: mean 0, no bias
//     backward  dx += rstd (g - average(g) - n average(g n)),  g = dout weight,  n = (x - mean) rstd
//               dweight += the sum over rows of dout n;  dbias += that of dout
//
// All are bound by memory. The least to move is 4 elements per channel and row: in, branch, residual and out; dout, x,
// and dx twice.
//
//     forward   idea                                              expected
//     naive     a thread a row                                    a load of a warp touches 32 lines, most of which are
//                                                                 gone before their other bytes are asked for: below a
//                                                                 fifth of the peak
//     warp      a warp a row, neighbouring channels to            whole lines; but the row comes three times, two of
//               neighbouring lanes                                them from the cache, an element a lane: half of the
//                                                                 peak
//     unfused   the residual add by itself, then the shipped      moves 5 elements: four fifths of the next
//               kernel
//     shipped   the row stays in registers; 16 bytes a load,      near the peak
//               and all loads of a row under way together
//
//     backward  idea                                              expected
//     naive     dx: a thread a row; sums: a thread a channel      as above, and too few threads for the sums
//     warp      dx: a warp a row; sums: a block 32 channels,      C / 32 blocks do not fill a GPU: below half of the
//               its 32 warps share the rows                       next
//     split     the rows of the sums are cut too: partial sums,   dout and x are read twice, 6 elements: two thirds of
//               which a second kernel adds                        the next
//     shipped   one reading: the block that makes dx of a row     two thirds of the peak or more: a block waits for the
//               adds the row to its partial sums, in registers    sums of its row before it can write
//
//     FLAGS="-O3 -arch=native -I. -DLLMTRAIN_CUDA -DPRECISION_BF16 -Xcompiler=-fopenmp"
//     nvcc $FLAGS dev/layernorm.cu -o build/layernorm -lcublasLt
//     build/layernorm --rows 16384 --channels 768

#include "kernels.cuh"
#include "ladder.h"

#define EPSILON 1e-5f

typedef struct {
    size_t N, C;
    bool centred;                                // layernorm
    floatX *out, *residual, *dx;                 // (N, C)
    const floatX *in, *branch, *dout, *x;        // (N, C)
    const floatX *weight, *bias;                 // (C)
    float *mean, *rstd, *dweight, *dbias;        // (N), (N), (C), (C)
} Norm;

enum { NORM_LADDER_CHUNKS = 64 };

// ------------------------------------------------------------------------------------------------
// Forward: naive kernels

// `lanes` threads, 1 or WARP, share a row; this one is number `lane`. Three walks: the sum, the squares, the output.
static __device__ void forward_row(Norm p, size_t row, size_t lane, size_t lanes) {
    const floatX *in = p.in + row * p.C, *branch = p.branch + row * p.C;
    floatX *x = p.residual + row * p.C, *out = p.out + row * p.C;
    float sum = 0.0f, squares = 0.0f, m = 0.0f;
    for (size_t c = lane; c < p.C; c += lanes) {
        x[c] = floatX_of(float_of(in[c]) + float_of(branch[c]));
        sum += float_of(x[c]);
    }
    if (p.centred) m = (lanes == WARP ? warp_sum(sum) : sum) / (float)p.C;
    for (size_t c = lane; c < p.C; c += lanes) squares += (float_of(x[c]) - m) * (float_of(x[c]) - m);
    float s = 1.0f / sqrtf((lanes == WARP ? warp_sum(squares) : squares) / (float)p.C + EPSILON);
    for (size_t c = lane; c < p.C; c += lanes) {
        float bias = p.centred ? float_of(p.bias[c]) : 0.0f;
        out[c] = floatX_of((float_of(x[c]) - m) * s * float_of(p.weight[c]) + bias);
    }
    if (lane > 0) return;
    if (p.centred) p.mean[row] = m;
    p.rstd[row] = s;
}

static __global__ void forward_naive(Norm p) {
    size_t row = ladder_index();
    if (row < p.N) forward_row(p, row, 0, 1);
}

static __global__ void forward_warp(Norm p) {
    size_t row = ladder_index() / WARP;
    if (row < p.N) forward_row(p, row, threadIdx.x % WARP, WARP);
}

template <int W>
static __global__ void add_residual(floatX* residual, const floatX* in, const floatX* branch, size_t n) {
    size_t i = ladder_index() * W;
    if (i < n) lanes_store(residual + i, residual_lanes<W>(in, branch, i));
}

// ------------------------------------------------------------------------------------------------
// Backward: naive kernels

static __device__ void backward_row(Norm p, size_t row, size_t lane, size_t lanes) {
    const floatX *dout = p.dout + row * p.C, *x = p.x + row * p.C;
    floatX* dx = p.dx + row * p.C;
    float m = p.centred ? p.mean[row] : 0.0f, s = p.rstd[row], sum_g = 0.0f, sum_gn = 0.0f;
    for (size_t c = lane; c < p.C; c += lanes) {
        float g = float_of(dout[c]) * float_of(p.weight[c]);
        sum_g += g;
        sum_gn += g * (float_of(x[c]) - m) * s;
    }
    float average_g = p.centred ? (lanes == WARP ? warp_sum(sum_g) : sum_g) / (float)p.C : 0.0f;
    float average_gn = (lanes == WARP ? warp_sum(sum_gn) : sum_gn) / (float)p.C;
    for (size_t c = lane; c < p.C; c += lanes) {
        float n = (float_of(x[c]) - m) * s, g = float_of(dout[c]) * float_of(p.weight[c]);
        dx[c] = floatX_of(float_of(dx[c]) + s * (g - average_g - n * average_gn));
    }
}

static __global__ void backward_naive(Norm p) {
    size_t row = ladder_index();
    if (row < p.N) backward_row(p, row, 0, 1);
}

static __global__ void backward_warp(Norm p) {
    size_t row = ladder_index() / WARP;
    if (row < p.N) backward_row(p, row, threadIdx.x % WARP, WARP);
}

static __global__ void sums_naive(Norm p) {
    size_t c = ladder_index();
    if (c >= p.C) return;
    float weight = 0.0f, bias = 0.0f;
    for (size_t row = 0; row < p.N; row++) {
        float d = float_of(p.dout[row * p.C + c]), m = p.centred ? p.mean[row] : 0.0f;
        weight += d * (float_of(p.x[row * p.C + c]) - m) * p.rstd[row];
        bias += d;
    }
    p.dweight[c] += weight;
    if (p.centred) p.dbias[c] += bias;
}

// partial (1 or 2, gridDim.y, C), as norm_add_partial takes it: block (x, y) sums 32 channels over every gridDim.y-th
// group of 32 rows.
static __global__ void sums_partial(float* partial, Norm p) {
    __shared__ float weights[WARP][WARP], biases[WARP][WARP];
    size_t c = (size_t)blockIdx.x * WARP + threadIdx.x;
    float weight = 0.0f, bias = 0.0f;
    if (c < p.C) {
        for (size_t row = (size_t)blockIdx.y * WARP + threadIdx.y; row < p.N; row += (size_t)gridDim.y * WARP) {
            float d = float_of(p.dout[row * p.C + c]), m = p.centred ? p.mean[row] : 0.0f;
            weight += d * (float_of(p.x[row * p.C + c]) - m) * p.rstd[row];
            bias += d;
        }
    }
    weights[threadIdx.y][threadIdx.x] = weight;
    biases[threadIdx.y][threadIdx.x] = bias;
    __syncthreads();
    if (threadIdx.y > 0 || c >= p.C) return;
    for (int y = 1; y < WARP; y++) {
        weight += weights[y][threadIdx.x];
        bias += biases[y][threadIdx.x];
    }
    partial[blockIdx.y * p.C + c] = weight;
    if (p.centred) partial[((size_t)gridDim.y + blockIdx.y) * p.C + c] = bias;
}

// ------------------------------------------------------------------------------------------------
// Rungs

static void run_forward_naive(void* problem, Stream stream) {
    Norm p = *(Norm*)problem;
    forward_naive<<<ladder_blocks(p.N), LADDER_THREADS, 0, stream->compute>>>(p);
    LAUNCH_CHECK();
}

static void run_forward_warp(void* problem, Stream stream) {
    Norm p = *(Norm*)problem;
    forward_warp<<<ladder_blocks(p.N * WARP), LADDER_THREADS, 0, stream->compute>>>(p);
    LAUNCH_CHECK();
}

static void run_forward(const Norm* p, const floatX* in, const floatX* branch, Stream stream) {
    if (p->centred)
        layernorm_forward(p->out, p->residual, p->mean, p->rstd, in, branch, p->weight, p->bias, EPSILON, p->N, p->C,
                          stream);
    else
        rmsnorm_forward(p->out, p->residual, p->rstd, in, branch, p->weight, EPSILON, p->N, p->C, stream);
}

static void run_forward_unfused(void* problem, Stream stream) {
    Norm* p = (Norm*)problem;
    size_t n = p->N * p->C, W = n % PACK == 0 ? PACK : 1;
    auto add = W == PACK ? add_residual<PACK> : add_residual<1>;
    add<<<ladder_blocks(n / W), LADDER_THREADS, 0, stream->compute>>>(p->residual, p->in, p->branch, n);
    LAUNCH_CHECK();
    run_forward(p, p->residual, NULL, stream);
}

static void run_forward_shipped(void* problem, Stream stream) {
    Norm* p = (Norm*)problem;
    run_forward(p, p->in, p->branch, stream);
}

static void run_backward_naive(void* problem, Stream stream) {
    Norm p = *(Norm*)problem;
    backward_naive<<<ladder_blocks(p.N), LADDER_THREADS, 0, stream->compute>>>(p);
    LAUNCH_CHECK();
    sums_naive<<<ladder_blocks(p.C), LADDER_THREADS, 0, stream->compute>>>(p);
    LAUNCH_CHECK();
}

static void backward_in_two(Norm p, size_t chunks, Stream stream) {
    float* partial = (float*)device_scratch(stream, 2 * chunks * p.C * sizeof(float));
    unsigned strips = (unsigned)divide_up(p.C, WARP);
    backward_warp<<<ladder_blocks(p.N * WARP), LADDER_THREADS, 0, stream->compute>>>(p);
    LAUNCH_CHECK();
    sums_partial<<<dim3(strips, (unsigned)chunks), dim3(WARP, WARP), 0, stream->compute>>>(partial, p);
    LAUNCH_CHECK();
    norm_add_partial<<<dim3(strips, p.centred ? 2 : 1), dim3(WARP, WARP), 0, stream->compute>>>(
        p.dweight, p.dbias, partial, chunks, p.C);
    LAUNCH_CHECK();
}

static void run_backward_warp(void* problem, Stream stream) { backward_in_two(*(Norm*)problem, 1, stream); }
static void run_backward_split(void* problem, Stream stream) {
    backward_in_two(*(Norm*)problem, NORM_LADDER_CHUNKS, stream);
}

static void run_backward_shipped(void* problem, Stream stream) {
    Norm* p = (Norm*)problem;
    if (p->centred)
        layernorm_backward(p->dx, p->dweight, p->dbias, p->dout, p->x, p->weight, p->mean, p->rstd, p->N, p->C, stream);
    else
        rmsnorm_backward(p->dx, p->dweight, p->dout, p->x, p->weight, p->rstd, p->N, p->C, stream);
}

// ------------------------------------------------------------------------------------------------
// Program
//
// Each operation is a ladder of its own.

static void ladder_forward(Ladder* l, Norm* p) {
    size_t N = p->N, C = p->C, n = N * C;
    p->in = ladder_input<floatX>(l, "in", n, 1.0);
    p->branch = ladder_input<floatX>(l, "branch", n, 1.0);
    p->residual = ladder_output<floatX>(l, "residual", n, ladder_bound(1, 0, 0));
    p->out = ladder_output<floatX>(l, "out", n, ladder_bound((double)C, 16, 0));  // numbers below 16
    p->rstd = ladder_output<float>(l, "rstd", N, ladder_bound((double)C, 1, 0));
    const floatX *in = ladder_twin(l, p->in), *branch = ladder_twin(l, p->branch), *weight = ladder_twin(l, p->weight);
    floatX *out = ladder_twin(l, p->out), *residual = ladder_twin(l, p->residual);
    float* rstd = ladder_twin(l, p->rstd);
    if (p->centred) {
        p->mean = ladder_output<float>(l, "mean", N, ladder_bound((double)C, 2, 0));
        if (l->check) cpu::layernorm_forward(out, residual, ladder_twin(l, p->mean), rstd, in, branch, weight,
                                             ladder_twin(l, p->bias), EPSILON, N, C, NULL);
    } else if (l->check) {
        cpu::rmsnorm_forward(out, residual, rstd, in, branch, weight, EPSILON, N, C, NULL);
    }
    ladder_work(l, LADDER_BYTES, 4.0 * (double)n * sizeof(floatX));
    ladder_rung(l, "naive", run_forward_naive, p);
    ladder_rung(l, "warp", run_forward_warp, p);
    ladder_rung(l, "unfused", run_forward_unfused, p);
    ladder_rung(l, "shipped", run_forward_shipped, p);
}

// mean and rstd come from the CPU's forward; unchecked, any numbers will do.
static void ladder_backward(Ladder* l, Norm* p) {
    size_t N = p->N, C = p->C, n = N * C;
    p->x = ladder_input<floatX>(l, "x", n, 1.0);
    p->dout = ladder_input<floatX>(l, "dout", n, 1.0);
    p->rstd = ladder_input<float>(l, "rstd", N, 1.0);
    p->dx = ladder_added<floatX>(l, "dx", n, 1.0, ladder_bound((double)C, 32, 0));  // numbers below 32
    p->dweight = ladder_added<float>(l, "dweight", C, 1.0, ladder_random_sum(N));
    const floatX *x = ladder_twin(l, p->x), *dout = ladder_twin(l, p->dout), *weight = ladder_twin(l, p->weight);
    floatX *dx = ladder_twin(l, p->dx), *normalised = (floatX*)allocate(n * sizeof(floatX));
    float *rstd = ladder_twin(l, p->rstd), *dweight = ladder_twin(l, p->dweight);
    if (normalised == NULL) ladder_give_up("out of memory; give smaller shapes");
    if (p->centred) {
        p->mean = ladder_input<float>(l, "mean", N, 1.0);
        p->dbias = ladder_added<float>(l, "dbias", C, 1.0, ladder_random_sum(N));
    }
    if (l->check && p->centred) {
        float* mean = ladder_twin(l, p->mean);
        cpu::layernorm_forward(normalised, NULL, mean, rstd, x, NULL, weight, ladder_twin(l, p->bias), EPSILON, N, C,
                               NULL);
        cpu::layernorm_backward(dx, dweight, ladder_twin(l, p->dbias), dout, x, weight, mean, rstd, N, C, NULL);
        ladder_update(l, p->mean);
    } else if (l->check) {
        cpu::rmsnorm_forward(normalised, NULL, rstd, x, NULL, weight, EPSILON, N, C, NULL);
        cpu::rmsnorm_backward(dx, dweight, dout, x, weight, rstd, N, C, NULL);
    }
    ladder_update(l, p->rstd);
    free(normalised);
    size_t split_bytes = 2 * NORM_LADDER_CHUNKS * C * sizeof(float);
    ladder_give_scratch(l, max_size(layernorm_backward_scratch_bytes(N, C), split_bytes));
    ladder_work(l, LADDER_BYTES, 4.0 * (double)n * sizeof(floatX));
    ladder_rung(l, "naive", run_backward_naive, p);
    ladder_rung(l, "warp", run_backward_warp, p);
    ladder_rung(l, "split", run_backward_split, p);
    ladder_rung(l, "shipped", run_backward_shipped, p);
}

typedef struct {
    const char* title;
    bool centred;
    void (*rungs)(Ladder* l, Norm* p);
} Operation;

static const Operation OPERATIONS[] = {
    {"layernorm_forward: out (N, C) = layernorm(residual (N, C)), residual = in (N, C) + branch (N, C)", true,
     ladder_forward},
    {"layernorm_backward: dx (N, C), dweight (C) and dbias (C) += ... from dout (N, C) and x (N, C)", true,
     ladder_backward},
    {"rmsnorm_forward: out (N, C) = rmsnorm(residual (N, C)), residual = in (N, C) + branch (N, C)", false,
     ladder_forward},
    {"rmsnorm_backward: dx (N, C) and dweight (C) += ... from dout (N, C) and x (N, C)", false, ladder_backward},
};

int main(int argc, char** argv) {
    uint64_t N = ladder_size(16384, 70), C = ladder_size(768, 264);
    Flag flags[] = {
        {"rows", FLAG_COUNT, &N, "N", 1, 1e7, "rows: B times T", false},
        {"channels", FLAG_COUNT, &C, "C", 1, 1e5, "channels of a row", false},
    };
    Ladder l = {};
    for (size_t i = 0; i < sizeof OPERATIONS / sizeof OPERATIONS[0]; i++) {
        if (!ladder_open(&l, argc, argv, OPERATIONS[i].title, flags, 2)) return l.status;
        Norm p;
        memset(&p, 0, sizeof p);
        p.N = N, p.C = C, p.centred = OPERATIONS[i].centred;
        p.weight = ladder_input<floatX>(&l, "weight", C, 1.0);
        if (p.centred) p.bias = ladder_input<floatX>(&l, "bias", C, 1.0);
        OPERATIONS[i].rungs(&l, &p);
        ladder_close(&l);
    }
    return ladder_result(&l);
}
