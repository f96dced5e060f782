// dev/gelu.cu: the ladders of the nonlinearities, GELU and SwiGLU, forward and backward.
//
//     gelu      out (N, F) = 0.5 x (1 + tanh(u)) = x sigmoid(2u),  u = sqrt(2/pi) (x + 0.044715 x^3),  x = in (N, F)
//     swiglu    out (N, F) = gate sigmoid(gate) up,  in (N, 2F) = gate (F), up (F) per row
//
// All are bound by memory: gelu moves 2 elements per output forward and 3 backward, swiglu 3 and 5.
//
//     rung          idea                                                      expected
//     naive         the formula as it is written, one element per thread;     2 bytes per thread in flight: half of the
//                   for swiglu its row by a division                          peak in 16 bits
//     sigmoid       one exponential and one approximate division per          no faster where memory bounds; leaves the
//                   element instead of tanh; for swiglu one block per row     instructions that the next rung needs
//     shipped       16 bytes per load and the approximate division            above 90% of the peak
//
//     build/gelu --rows 16384 --ffn 3072

#include "kernels.cuh"
#include "ladder.h"

// ------------------------------------------------------------------------------------------------
// Naive kernels: thread i computes output element i

static __device__ float gelu_tanh(float x) { return tanhf(0.7978845608f * (x + 0.044715f * x * x * x)); }

static __global__ void gelu_forward_naive(floatX* out, const floatX* in, size_t n) {
    size_t i = flat_index(1);
    if (i >= n) return;
    float x = float_of(in[i]);
    out[i] = floatX_of(0.5f * x * (1.0f + gelu_tanh(x)));
}

static __global__ void gelu_backward_naive(floatX* din, const floatX* dout, const floatX* in, size_t n) {
    size_t i = flat_index(1);
    if (i >= n) return;
    float x = float_of(in[i]), t = gelu_tanh(x), du = 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
    din[i] = floatX_of(float_of(dout[i]) * 0.5f * (1.0f + t + x * (1.0f - t * t) * du));
}

static __global__ void swiglu_forward_naive(floatX* out, const floatX* in, size_t N, size_t F) {
    size_t i = flat_index(1);
    if (i >= N * F) return;
    size_t gate_at = i / F * 2 * F + i % F;
    float gate = float_of(in[gate_at]), up = float_of(in[gate_at + F]);
    out[i] = floatX_of(gate / (1.0f + expf(-gate)) * up);
}

static __global__ void swiglu_backward_naive(floatX* din, const floatX* dout, const floatX* in, size_t N, size_t F) {
    size_t i = flat_index(1);
    if (i >= N * F) return;
    size_t gate_at = i / F * 2 * F + i % F;
    float gate = float_of(in[gate_at]), up = float_of(in[gate_at + F]), d = float_of(dout[i]);
    float s = 1.0f / (1.0f + expf(-gate));
    din[gate_at] = floatX_of(d * up * s * (1.0f + gate * (1.0f - s)));
    din[gate_at + F] = floatX_of(d * gate * s);
}

// ------------------------------------------------------------------------------------------------
// Program: four ladders

// Products of up to three numbers of about 2; the derivative subtracts terms smaller than 10.
static const LadderBound BOUND = {16, 10, 0};

static void ladder_gelu_forward(size_t n) {
    ladder_begin("gelu_forward: out (N, F) = gelu(in (N, F))");
    auto in = ladder_input<floatX>("in", n, 2.0);
    auto out = ladder_output<floatX>("out", n, BOUND);
    auto shipped = LADDER_OPERATION(gelu_forward, out, in, n);
    ladder_work(LADDER_BYTES, 2.0 * (double)n * sizeof(floatX), shipped);
    ladder_rung("naive", [&] { ladder_launch(gelu_forward_naive, n, out, in, n); });
    ladder_rung("sigmoid", [&] { ladder_launch(gelu_forward_kernel<1>, n, out, in, n); });
    ladder_rung("shipped", shipped);
}

static void ladder_gelu_backward(size_t n) {
    ladder_begin("gelu_backward: din (N, F) = dout (N, F) gelu'(in (N, F))");
    auto in = ladder_input<floatX>("in", n, 2.0), dout = ladder_input<floatX>("dout", n, 1.0);
    auto din = ladder_output<floatX>("din", n, BOUND);
    auto shipped = LADDER_OPERATION(gelu_backward, din, dout, in, n);
    ladder_work(LADDER_BYTES, 3.0 * (double)n * sizeof(floatX), shipped);
    ladder_rung("naive", [&] { ladder_launch(gelu_backward_naive, n, din, dout, in, n); });
    ladder_rung("sigmoid", [&] { ladder_launch(gelu_backward_kernel<1>, n, din, dout, in, n); });
    ladder_rung("shipped", shipped);
}

static void ladder_swiglu_forward(size_t N, size_t F) {
    ladder_begin("swiglu_forward: out (N, F) = silu(gate (N, F)) up (N, F)");
    size_t n = N * F;
    auto in = ladder_input<floatX>("in", 2 * n, 2.0);
    auto out = ladder_output<floatX>("out", n, BOUND);
    auto shipped = LADDER_OPERATION(swiglu_forward, out, in, N, F);
    ladder_work(LADDER_BYTES, 3.0 * (double)n * sizeof(floatX), shipped);
    ladder_rung("naive", [&] { ladder_launch(swiglu_forward_naive, n, out, in, N, F); });
    ladder_rung("sigmoid", [&] {
        unsigned threads = block_threads(F, FLAT_THREADS);
        swiglu_forward_kernel<1><<<grid_blocks(N), threads, 0, ladder.stream->compute>>>(out, in, N, F);
    });
    ladder_rung("shipped", shipped);
}

static void ladder_swiglu_backward(size_t N, size_t F) {
    ladder_begin("swiglu_backward: din (N, 2F) from dout (N, F) and in (N, 2F)");
    size_t n = N * F;
    auto in = ladder_input<floatX>("in", 2 * n, 2.0), dout = ladder_input<floatX>("dout", n, 1.0);
    auto din = ladder_output<floatX>("din", 2 * n, BOUND);
    auto shipped = LADDER_OPERATION(swiglu_backward, din, dout, in, N, F);
    ladder_work(LADDER_BYTES, 5.0 * (double)n * sizeof(floatX), shipped);
    ladder_rung("naive", [&] { ladder_launch(swiglu_backward_naive, n, din, dout, in, N, F); });
    ladder_rung("sigmoid", [&] {
        unsigned threads = block_threads(F, FLAT_THREADS);
        swiglu_backward_kernel<1><<<grid_blocks(N), threads, 0, ladder.stream->compute>>>(din, dout, in, N, F);
    });
    ladder_rung("shipped", shipped);
}

int main(int argc, char** argv) {
    uint64_t N = ladder_size(16384, 33), F = ladder_size(3072, 40);
    ladder_open(argc, argv, {{"rows", KIND_COUNT, &N, "N", 1, 1e7, "rows: B times T", 0},
                             {"ffn", KIND_COUNT, &F, "F", 1, 1e6, "columns", 0}});
    ladder_gelu_forward(N * F);
    ladder_gelu_backward(N * F);
    ladder_swiglu_forward(N, F);
    ladder_swiglu_backward(N, F);
    return ladder_end();
}
