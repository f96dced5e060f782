// dev/gelu.cu: the ladders of the nonlinearities, GELU and SwiGLU, forward and backward.
//
//     gelu      out (N, F) = 0.5 x (1 + tanh(u)) = x sigmoid(2u),  u = sqrt(2/pi) (x + 0.044715 x^3),  x = in (N, F)
//     swiglu    out (N, F) = gate sigmoid(gate) up,  in (N, 2F) = gate (F), up (F) per row
//
// All are bound by memory: gelu moves 2 elements per output forward and 3 backward, swiglu 3 and 5.
//
//     rung          idea                                                      expected
//     naive         the formula as it is written, an element a thread; for    2 bytes a thread in flight: half of the
//                   swiglu its row by a division                              peak in 16 bits
//     sigmoid       one exponential and one approximate division per          no faster where memory bounds; leaves the
//                   element instead of tanh; for swiglu a row a block         instructions that the next rung needs
//     shipped       16 bytes a load and the approximate division              above 90% of the peak
//
//     FLAGS="-O3 -arch=native -I. -DLLMTRAIN_CUDA -DPRECISION_BF16 -Xcompiler=-fopenmp"
//     nvcc $FLAGS dev/gelu.cu -o build/gelu
//     build/gelu --rows 16384 --ffn 3072

#include "kernels.cuh"
#include "ladder.h"

typedef struct {
    size_t N, F, n;            // n = N F
    floatX *out, *din;         // (N, F); (N, F) or (N, 2F)
    const floatX *in, *dout;   // (N, F) or (N, 2F); (N, F)
} Nonlinearity;

// ------------------------------------------------------------------------------------------------
// Naive kernels: element i of the output is thread i's

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
// Rungs

static void run_gelu_forward_naive(void* problem, Stream stream) {
    Nonlinearity* p = (Nonlinearity*)problem;
    gelu_forward_naive<<<flat_blocks(p->n, 1), FLAT_THREADS, 0, stream->compute>>>(p->out, p->in, p->n);
    LAUNCH_CHECK();
}

static void run_gelu_forward_sigmoid(void* problem, Stream stream) {
    Nonlinearity* p = (Nonlinearity*)problem;
    gelu_forward_kernel<1><<<flat_blocks(p->n, 1), FLAT_THREADS, 0, stream->compute>>>(p->out, p->in, p->n);
    LAUNCH_CHECK();
}

static void run_gelu_forward_shipped(void* problem, Stream stream) {
    Nonlinearity* p = (Nonlinearity*)problem;
    gelu_forward(p->out, p->in, p->n, stream);
}

static void run_gelu_backward_naive(void* problem, Stream stream) {
    Nonlinearity* p = (Nonlinearity*)problem;
    gelu_backward_naive<<<flat_blocks(p->n, 1), FLAT_THREADS, 0, stream->compute>>>(p->din, p->dout, p->in, p->n);
    LAUNCH_CHECK();
}

static void run_gelu_backward_sigmoid(void* problem, Stream stream) {
    Nonlinearity* p = (Nonlinearity*)problem;
    gelu_backward_kernel<1><<<flat_blocks(p->n, 1), FLAT_THREADS, 0, stream->compute>>>(p->din, p->dout, p->in, p->n);
    LAUNCH_CHECK();
}

static void run_gelu_backward_shipped(void* problem, Stream stream) {
    Nonlinearity* p = (Nonlinearity*)problem;
    gelu_backward(p->din, p->dout, p->in, p->n, stream);
}

static void run_swiglu_forward_naive(void* problem, Stream stream) {
    Nonlinearity* p = (Nonlinearity*)problem;
    swiglu_forward_naive<<<flat_blocks(p->n, 1), FLAT_THREADS, 0, stream->compute>>>(p->out, p->in, p->N, p->F);
    LAUNCH_CHECK();
}

static void run_swiglu_forward_sigmoid(void* problem, Stream stream) {
    Nonlinearity* p = (Nonlinearity*)problem;
    unsigned blocks = grid_blocks(p->N), threads = block_threads(p->F, FLAT_THREADS);
    swiglu_forward_kernel<1><<<blocks, threads, 0, stream->compute>>>(p->out, p->in, p->N, p->F);
    LAUNCH_CHECK();
}

static void run_swiglu_forward_shipped(void* problem, Stream stream) {
    Nonlinearity* p = (Nonlinearity*)problem;
    swiglu_forward(p->out, p->in, p->N, p->F, stream);
}

static void run_swiglu_backward_naive(void* problem, Stream stream) {
    Nonlinearity* p = (Nonlinearity*)problem;
    unsigned blocks = flat_blocks(p->n, 1);
    swiglu_backward_naive<<<blocks, FLAT_THREADS, 0, stream->compute>>>(p->din, p->dout, p->in, p->N, p->F);
    LAUNCH_CHECK();
}

static void run_swiglu_backward_sigmoid(void* problem, Stream stream) {
    Nonlinearity* p = (Nonlinearity*)problem;
    unsigned blocks = grid_blocks(p->N), threads = block_threads(p->F, FLAT_THREADS);
    swiglu_backward_kernel<1><<<blocks, threads, 0, stream->compute>>>(p->din, p->dout, p->in, p->N, p->F);
    LAUNCH_CHECK();
}

static void run_swiglu_backward_shipped(void* problem, Stream stream) {
    Nonlinearity* p = (Nonlinearity*)problem;
    swiglu_backward(p->din, p->dout, p->in, p->N, p->F, stream);
}

// ------------------------------------------------------------------------------------------------
// Program
//
// Each operation is a ladder of its own.

enum { RUNGS = 3 };

typedef struct {
    const char* title;
    bool gated, backward;
    struct { const char* name; LadderRun run; } rungs[RUNGS];
} Operation;

static const Operation OPERATIONS[] = {
    {"gelu_forward: out (N, F) = gelu(in (N, F))", false, false,
     {{"naive", run_gelu_forward_naive}, {"sigmoid", run_gelu_forward_sigmoid},
      {"shipped", run_gelu_forward_shipped}}},
    {"gelu_backward: din (N, F) = dout (N, F) gelu'(in (N, F))", false, true,
     {{"naive", run_gelu_backward_naive}, {"sigmoid", run_gelu_backward_sigmoid},
      {"shipped", run_gelu_backward_shipped}}},
    {"swiglu_forward: out (N, F) = silu(gate (N, F)) up (N, F)", true, false,
     {{"naive", run_swiglu_forward_naive}, {"sigmoid", run_swiglu_forward_sigmoid},
      {"shipped", run_swiglu_forward_shipped}}},
    {"swiglu_backward: din (N, 2F) from dout (N, F) and in (N, 2F)", true, true,
     {{"naive", run_swiglu_backward_naive}, {"sigmoid", run_swiglu_backward_sigmoid},
      {"shipped", run_swiglu_backward_shipped}}},
};

int main(int argc, char** argv) {
    uint64_t N = ladder_size(16384, 33), F = ladder_size(3072, 40);
    Flag flags[] = {
        {"rows", FLAG_COUNT, &N, "N", 1, 1e7, "rows: B times T", false},
        {"ffn", FLAG_COUNT, &F, "F", 1, 1e6, "columns", false},
    };
    Ladder l = {};
    for (size_t i = 0; i < sizeof OPERATIONS / sizeof OPERATIONS[0]; i++) {
        const Operation* o = &OPERATIONS[i];
        if (!ladder_open(&l, argc, argv, o->title, flags, 2)) return l.status;
        size_t n = N * F, ins = o->gated ? 2 * n : n;
        // Products of up to three numbers of about 2; the derivative takes differences of what is smaller than 10.
        LadderBound bound = ladder_bound(16, 10, 0);
        Nonlinearity p = {N, F, n, NULL, NULL, ladder_input<floatX>(&l, "in", ins, 2.0), NULL};
        if (o->backward) {
            p.dout = ladder_input<floatX>(&l, "dout", n, 1.0);
            p.din = ladder_output<floatX>(&l, "din", ins, bound);
            floatX* din = ladder_twin(&l, p.din);
            const floatX *dout = ladder_twin(&l, p.dout), *in = ladder_twin(&l, p.in);
            if (l.check && o->gated) cpu::swiglu_backward(din, dout, in, N, F, NULL);
            if (l.check && !o->gated) cpu::gelu_backward(din, dout, in, n, NULL);
        } else {
            p.out = ladder_output<floatX>(&l, "out", n, bound);
            floatX* out = ladder_twin(&l, p.out);
            if (l.check && o->gated) cpu::swiglu_forward(out, ladder_twin(&l, p.in), N, F, NULL);
            if (l.check && !o->gated) cpu::gelu_forward(out, ladder_twin(&l, p.in), n, NULL);
        }
        ladder_work(&l, LADDER_BYTES, (double)(o->backward ? n + 2 * ins : n + ins) * sizeof(floatX));
        for (int rung = 0; rung < RUNGS; rung++)
            ladder_rung(&l, o->rungs[rung].name, o->rungs[rung].run, &p);
        ladder_close(&l);
    }
    return ladder_result(&l);
}
