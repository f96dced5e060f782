// dev/layernorm.cu: the ladders of the normalizations, layernorm and rmsnorm, forward and backward.
//
//     forward   residual = in + branch;  out = (residual - mean) rstd weight + bias    rmsnorm: mean 0, no bias
//     backward  dx += rstd (g - average(g) - n average(g n)),  g = dout weight,  n = (x - mean) rstd
//               dweight += the sum over rows of dout n;  dbias += that of dout
//
// All are bound by memory. The minimum is 4 elements per channel and row: in, branch, residual and out; dout, x, and dx
// twice.
//
//     forward   idea                                              expected
//     naive     one thread per row                                each warp load touches 32 cache lines, most evicted
//                                                                 before the rest is used: below a fifth of the peak
//     warp      one warp per row, neighboring channels to         whole lines; but the row comes three times, two of
//               neighboring lanes                               them from the cache, one element per lane: half of the
//                                                                 peak
//     unfused   the residual add by itself, then the shipped      moves 5 elements: four fifths of the next
//               kernel
//     shipped   the row stays in registers; 16 bytes per load,    near the peak
//               and all loads of a row under way together
//
//     backward  idea                                              expected
//     naive     dx: one thread per row; sums: one per channel     as above, and too few threads for the sums
//     warp      dx: one warp per row; sums: one block per 32      C / 32 blocks do not fill a GPU: below half of the
//               channels, whose 32 warps share the rows           next
//     split     the rows of the sums are cut too: partial sums,   dout and x are read twice, 6 elements: two thirds of
//               which a second kernel adds                        the next
//     shipped   one reading: the block that makes dx of a row     three quarters of the peak or more: while a block
//               adds the row to its partial sums, in registers    waits for the sums of its row, dx, the next row and
//                                                                 what other blocks read are on their way (at 768
//                                                                 channels nine others per multiprocessor)
//
//     build/layernorm --rows 16384 --channels 768

#include "kernels.cuh"
#include "ladder.h"

#define EPSILON 1e-5f

typedef struct {
    size_t N, C;
    bool centered;                               // layernorm; otherwise rmsnorm
    const floatX *weight, *bias;                 // (C)
    float *mean, *rstd;                          // (N)
    floatX *out, *residual;                      // (N, C)
    const floatX *in, *branch;                   // (N, C)
    floatX* dx;                                  // (N, C)
    float *dweight, *dbias;                      // (C)
    const floatX *dout, *x;                      // (N, C)
} Norm;

// ------------------------------------------------------------------------------------------------
// Naive: a thread owns a row

// Three passes: the sum, the squares, the output.
static __global__ void forward_naive(Norm p) {
    size_t row = flat_index(1);
    if (row >= p.N) return;
    const floatX *in = p.in + row * p.C, *branch = p.branch + row * p.C;
    floatX *x = p.residual + row * p.C, *out = p.out + row * p.C;
    float mean = 0.0f, variance = 0.0f;
    for (size_t c = 0; c < p.C; c++) {
        x[c] = floatX_of(float_of(in[c]) + float_of(branch[c]));
        if (p.centered) mean += float_of(x[c]) / (float)p.C;
    }
    for (size_t c = 0; c < p.C; c++) variance += (float_of(x[c]) - mean) * (float_of(x[c]) - mean) / (float)p.C;
    float rstd = 1.0f / sqrtf(variance + EPSILON);
    for (size_t c = 0; c < p.C; c++) {
        float bias = p.centered ? float_of(p.bias[c]) : 0.0f;
        out[c] = floatX_of((float_of(x[c]) - mean) * rstd * float_of(p.weight[c]) + bias);
    }
    if (p.centered) p.mean[row] = mean;
    p.rstd[row] = rstd;
}

static __global__ void backward_naive(Norm p) {
    size_t row = flat_index(1);
    if (row >= p.N) return;
    const floatX *dout = p.dout + row * p.C, *x = p.x + row * p.C;
    floatX* dx = p.dx + row * p.C;
    float mean = p.centered ? p.mean[row] : 0.0f, rstd = p.rstd[row], average_g = 0.0f, average_gn = 0.0f;
    for (size_t c = 0; c < p.C; c++) {
        float n = (float_of(x[c]) - mean) * rstd, g = float_of(dout[c]) * float_of(p.weight[c]);
        if (p.centered) average_g += g / (float)p.C;
        average_gn += g * n / (float)p.C;
    }
    for (size_t c = 0; c < p.C; c++) {
        float n = (float_of(x[c]) - mean) * rstd, g = float_of(dout[c]) * float_of(p.weight[c]);
        dx[c] = floatX_of(float_of(dx[c]) + rstd * (g - average_g - n * average_gn));
    }
}

// ------------------------------------------------------------------------------------------------
// Warps: a warp owns a row, a lane every 32nd channel of it

// The average over C channels of the lanes' sums.
static __device__ float row_average(float sum, size_t C) { return warp_sum(sum) / (float)C; }

static __global__ void forward_warps(Norm p) {
    size_t row = flat_index(1) / WARP, lane = threadIdx.x % WARP;
    if (row >= p.N) return;
    const floatX *in = p.in + row * p.C, *branch = p.branch + row * p.C;
    floatX *x = p.residual + row * p.C, *out = p.out + row * p.C;
    float sum = 0.0f, squares = 0.0f;
    for (size_t c = lane; c < p.C; c += WARP) {
        x[c] = floatX_of(float_of(in[c]) + float_of(branch[c]));
        sum += float_of(x[c]);
    }
    float m = p.centered ? row_average(sum, p.C) : 0.0f;
    for (size_t c = lane; c < p.C; c += WARP) squares += (float_of(x[c]) - m) * (float_of(x[c]) - m);
    float s = 1.0f / sqrtf(row_average(squares, p.C) + EPSILON);
    for (size_t c = lane; c < p.C; c += WARP) {
        float bias = p.centered ? float_of(p.bias[c]) : 0.0f;
        out[c] = floatX_of((float_of(x[c]) - m) * s * float_of(p.weight[c]) + bias);
    }
    if (lane > 0) return;
    if (p.centered) p.mean[row] = m;
    p.rstd[row] = s;
}

template <int W>
static __global__ void add_residual(floatX* residual, const floatX* in, const floatX* branch, size_t n) {
    size_t i = flat_index(W);
    if (i < n) lanes_store(residual + i, residual_lanes<W>(in, branch, i));
}

static __global__ void backward_warps(Norm p) {
    size_t row = flat_index(1) / WARP, lane = threadIdx.x % WARP;
    if (row >= p.N) return;
    const floatX *dout = p.dout + row * p.C, *x = p.x + row * p.C;
    floatX* dx = p.dx + row * p.C;
    float m = p.centered ? p.mean[row] : 0.0f, s = p.rstd[row], sum_g = 0.0f, sum_gn = 0.0f;
    for (size_t c = lane; c < p.C; c += WARP) {
        float g = float_of(dout[c]) * float_of(p.weight[c]);
        sum_g += g;
        sum_gn += g * (float_of(x[c]) - m) * s;
    }
    float average_g = p.centered ? row_average(sum_g, p.C) : 0.0f, average_gn = row_average(sum_gn, p.C);
    for (size_t c = lane; c < p.C; c += WARP) {
        float n = (float_of(x[c]) - m) * s, g = float_of(dout[c]) * float_of(p.weight[c]);
        dx[c] = floatX_of(float_of(dx[c]) + s * (g - average_g - n * average_gn));
    }
}

// ------------------------------------------------------------------------------------------------
// Sums over the rows, for the gradients of weight and bias

// Adds the contribution of channel c of a row to the gradients of weight and bias.
static __device__ void sums_add(float* weight, float* bias, const Norm& p, size_t row, size_t c) {
    float d = float_of(p.dout[row * p.C + c]), m = p.centered ? p.mean[row] : 0.0f;
    *weight += d * (float_of(p.x[row * p.C + c]) - m) * p.rstd[row];
    *bias += d;
}

static __global__ void sums_naive(Norm p) {
    size_t c = flat_index(1);
    if (c >= p.C) return;
    float weight = 0.0f, bias = 0.0f;
    for (size_t row = 0; row < p.N; row++) sums_add(&weight, &bias, p, row, c);
    p.dweight[c] += weight;
    if (p.centered) p.dbias[c] += bias;
}

// partial (1 or 2, gridDim.y, C), as add_partial takes it: block (x, y) sums 32 channels over every gridDim.y-th
// group of 32 rows.
static __global__ void sums_partial(float* partial, Norm p) {
    __shared__ float weights[WARP][WARP], biases[WARP][WARP];
    size_t c = (size_t)blockIdx.x * WARP + threadIdx.x;
    float weight = 0.0f, bias = 0.0f;
    for (size_t row = (size_t)blockIdx.y * WARP + threadIdx.y; c < p.C && row < p.N; row += (size_t)gridDim.y * WARP)
        sums_add(&weight, &bias, p, row, c);
    weights[threadIdx.y][threadIdx.x] = weight;
    biases[threadIdx.y][threadIdx.x] = bias;
    __syncthreads();
    if (threadIdx.y > 0 || c >= p.C) return;
    for (int y = 1; y < WARP; y++) {
        weight += weights[y][threadIdx.x];
        bias += biases[y][threadIdx.x];
    }
    partial[blockIdx.y * p.C + c] = weight;
    if (p.centered) partial[((size_t)gridDim.y + blockIdx.y) * p.C + c] = bias;
}

// ------------------------------------------------------------------------------------------------
// Program: four ladders

static void ladder_forward(bool centered, size_t N, size_t C) {
    ladder_begin(centered
        ? "layernorm_forward: out (N, C) = layernorm(residual (N, C)), residual = in (N, C) + branch (N, C)"
        : "rmsnorm_forward: out (N, C) = rmsnorm(residual (N, C)), residual = in (N, C) + branch (N, C)");
    const size_t n = N * C, W = n % PACK == 0 ? PACK : 1;
    auto weight = ladder_input<floatX>("weight", C, 1.0);
    auto in = ladder_input<floatX>("in", n, 1.0), branch = ladder_input<floatX>("branch", n, 1.0);
    auto residual = ladder_output<floatX>("residual", n, {1, 0, 0});
    auto out = ladder_output<floatX>("out", n, {(double)C, 16, 0});  // numbers below 16
    auto rstd = ladder_output<float>("rstd", N, {(double)C, 1, 0});
    LadderPointer<floatX> bias = {};
    LadderPointer<float> mean = {};
    LadderRun shipped = LADDER_OPERATION(rmsnorm_forward, out, residual, rstd, in, branch, weight, EPSILON, N, C);
    if (centered) {
        bias = ladder_input<floatX>("bias", C, 1.0);
        mean = ladder_output<float>("mean", N, {(double)C, 2, 0});
        shipped = LADDER_OPERATION(layernorm_forward, out, residual, mean, rstd, in, branch, weight, bias, EPSILON, N,
                                   C);
    }
    Norm p = {N, C, centered, weight, bias, mean, rstd, out, residual, in, branch, NULL, NULL, NULL, NULL, NULL};
    ladder_work(LADDER_BYTES, 4.0 * (double)n * sizeof(floatX), shipped);
    ladder_rung("naive", [&] { ladder_launch(forward_naive, N, p); });
    ladder_rung("warp", [&] { ladder_launch(forward_warps, N * WARP, p); });
    ladder_rung("unfused", [&] {
        ladder_launch(W == PACK ? add_residual<PACK> : add_residual<1>, n / W, residual, in, branch, n);
        if (centered)
            layernorm_forward(out, residual, mean, rstd, residual, NULL, weight, bias, EPSILON, N, C, ladder.stream);
        else rmsnorm_forward(out, residual, rstd, residual, NULL, weight, EPSILON, N, C, ladder.stream);
    });
    ladder_rung("shipped", shipped);
}

// mean and rstd come from the CPU's forward; without checks, any numbers will do. `twin`: on the host.
static void ladder_backward(bool centered, size_t N, size_t C) {
    enum { CHUNKS = 64 };
    ladder_begin(centered
        ? "layernorm_backward: dx (N, C), dweight (C) and dbias (C) += ... from dout (N, C) and x (N, C)"
        : "rmsnorm_backward: dx (N, C) and dweight (C) += ... from dout (N, C) and x (N, C)");
    const size_t n = N * C;
    auto weight = ladder_input<floatX>("weight", C, 1.0);
    auto x = ladder_input<floatX>("x", n, 1.0), dout = ladder_input<floatX>("dout", n, 1.0);
    auto rstd = ladder_input<float>("rstd", N, 1.0);
    auto dx = ladder_added<floatX>("dx", n, 1.0, {(double)C, 32, 0});  // numbers below 32
    auto dweight = ladder_added<float>("dweight", C, 1.0, ladder_random_sum(N));
    LadderPointer<float> mean = {}, dbias = {};
    LadderRun shipped = LADDER_OPERATION(rmsnorm_backward, dx, dweight, dout, x, weight, rstd, N, C);
    if (centered) {
        mean = ladder_input<float>("mean", N, 1.0);
        dbias = ladder_added<float>("dbias", C, 1.0, ladder_random_sum(N));
        shipped = LADDER_OPERATION(layernorm_backward, dx, dweight, dbias, dout, x, weight, mean, rstd, N, C);
    }
    if (ladder.check) {
        std::vector<floatX> y(n), zeros(C);
        floatX *out = y.data(), *in = x.twin, *w = weight.twin, *b = zeros.data();
        if (centered) cpu::layernorm_forward(out, NULL, mean.twin, rstd.twin, in, NULL, w, b, EPSILON, N, C, NULL);
        else cpu::rmsnorm_forward(out, NULL, rstd.twin, in, NULL, w, EPSILON, N, C, NULL);
        ladder_update(mean);
        ladder_update(rstd);
    }
    ladder_give_scratch(max_size(layernorm_backward_scratch_bytes(N, C), 2 * CHUNKS * C * sizeof(float)));
    Norm p = {N, C, centered, weight, NULL, mean, rstd, NULL, NULL, NULL, NULL, dx, dweight, dbias, dout, x};
    ladder_work(LADDER_BYTES, 4.0 * (double)n * sizeof(floatX), shipped);
    ladder_rung("naive", [&] {
        ladder_launch(backward_naive, N, p);
        ladder_launch(sums_naive, C, p);
    });
    // dx, and sums over the rows in `chunks` parts.
    auto dx_and_sums = [&](unsigned chunks) {
        float* partial = (float*)device_scratch(ladder.stream, 2 * chunks * C * sizeof(float));
        unsigned strips = (unsigned)divide_up(C, WARP);
        dim3 block(WARP, WARP);
        ladder_launch(backward_warps, N * WARP, p);
        sums_partial<<<dim3(strips, chunks), block, 0, ladder.stream->compute>>>(partial, p);
        add_partial<float><<<dim3(strips, centered ? 2 : 1), block, 0, ladder.stream->compute>>>(
            dweight, dbias, partial, chunks, C);
    };
    ladder_rung("warp", [&] { dx_and_sums(1); });
    ladder_rung("split", [&] { dx_and_sums(CHUNKS); });
    ladder_rung("shipped", shipped);
}

int main(int argc, char** argv) {
    uint64_t N = ladder_size(16384, 70), C = ladder_size(768, 264);
    ladder_open(argc, argv, {{"rows", KIND_COUNT, &N, "N", 1, 1e7, "rows: B times T", 0},
                             {"channels", KIND_COUNT, &C, "C", 1, 1e5, "channels of a row", 0}});
    for (int rms = 0; rms < 2; rms++) {
        ladder_forward(!rms, N, C);
        ladder_backward(!rms, N, C);
    }
    return ladder_end();
}
