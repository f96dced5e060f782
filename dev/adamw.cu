// dev/adamw.cu: the ladder of AdamW's update ("Decoupled Weight Decay Regularization").
//
//     m += (1 - beta1) (g - m);   v += (1 - beta2) (g^2 - v);   w -= lr (m' / (sqrt(v') + epsilon) + weight_decay w)
//
// for all n parameters, m' and v' being m and v corrected for their start at 0. In 16 bits w is the float master, which
// is then rounded to the stored parameter. Bound by memory: w, m, v, g in, w, m, v and the 16-bit parameter out are 30
// bytes per parameter (28 in FP32), and the arithmetic is a tenth of what that leaves time for.
//
//     rung          idea                                                       expected
//     separate      a kernel for each line of the formula, and a cast          46 bytes instead of 30: 65% of the peak
//     fused         one kernel, an element a thread                            30 bytes; 80 to 90%
//     shipped       four elements a thread: 16 bytes of each float array       above 90%
//
//     FLAGS="-O3 -arch=native -I. -DLLMTRAIN_CUDA -DPRECISION_BF16 -Xcompiler=-fopenmp"
//     nvcc $FLAGS dev/adamw.cu -o build/adamw
//     build/adamw --parameters 124475904

#include "kernels.cuh"
#include "ladder.h"

typedef struct {
    size_t n;
    floatX* params;       // (n), as all of these
    float* master_weights;       // NULL in FP32, where params are the master weights
    float *m, *v;
    const float* grads;
    OptimizerArguments a;
} Update;

// mean += (1 - beta) (g - mean), or of g^2.
static __global__ void adamw_moment(float* mean, const float* grads, float beta, float grad_scale, bool square,
                                    size_t n) {
    size_t i = flat_index(1);
    if (i >= n) return;
    float g = grads[i] * grad_scale;
    mean[i] += (1.0f - beta) * ((square ? g * g : g) - mean[i]);
}

static __global__ void adamw_step(float* w, const float* m, const float* v, OptimizerArguments a, size_t n) {
    size_t i = flat_index(1);
    if (i >= n) return;
    float direction = m[i] * a.m_correction / (sqrtf(v[i] * a.v_correction) + a.step.epsilon);
    w[i] -= a.step.lr * (direction + a.step.weight_decay * w[i]);
}

static void run_separate(void* problem, Stream stream) {
    Update* u = (Update*)problem;
    const OptimizerStep* o = &u->a.step;
    float* w = u->master_weights ? u->master_weights : (float*)u->params;
    unsigned blocks = flat_blocks(u->n, 1);
    adamw_moment<<<blocks, FLAT_THREADS, 0, stream->compute>>>(u->m, u->grads, o->beta1, o->grad_scale, false, u->n);
    LAUNCH_CHECK();
    adamw_moment<<<blocks, FLAT_THREADS, 0, stream->compute>>>(u->v, u->grads, o->beta2, o->grad_scale, true, u->n);
    LAUNCH_CHECK();
    adamw_step<<<blocks, FLAT_THREADS, 0, stream->compute>>>(w, u->m, u->v, u->a, u->n);
    LAUNCH_CHECK();
    if (u->master_weights) cast_from_float(u->params, w, u->n, stream);
}

static void run_fused(void* problem, Stream stream) {
    Update* u = (Update*)problem;
    optimizer_kernel<1><<<flat_blocks(u->n, 1), FLAT_THREADS, 0, stream->compute>>>(
        u->params, u->master_weights, u->m, u->v, u->grads, u->a, 0, u->n);
    LAUNCH_CHECK();
}

static void run_shipped(void* problem, Stream stream) {
    Update* u = (Update*)problem;
    optimizer_update(u->params, u->master_weights, u->m, u->v, u->grads, &u->a.step, 0, u->n, stream);
}

int main(int argc, char** argv) {
    uint64_t n = ladder_size(124475904, 5000);  // GPT-2 124M
    Flag flags[] = {{"parameters", FLAG_COUNT, &n, "n", 1, 1e10, "length of the vectors", false}};
    Ladder l = {};
    if (!ladder_open(&l, argc, argv, "optimizer_update: AdamW on n parameters", flags, 1)) return l.status;
    Update u;
    memset(&u, 0, sizeof u);
    u.n = n;
    OptimizerStep* o = &u.a.step;
    o->kind = OPTIMIZER_ADAMW;
    o->lr = 1e-3f, o->beta1 = 0.9f, o->beta2 = 0.95f, o->epsilon = 1e-8f, o->weight_decay = 0.1f, o->grad_scale = 0.5f;
    o->seed = 1, o->step = 10;
    u.a.m_correction = (float)(1.0 / (1.0 - pow((double)o->beta1, (double)o->step)));
    u.a.v_correction = (float)(1.0 / (1.0 - pow((double)o->beta2, (double)o->step)));
    LadderBound bound = ladder_bound(4, 1, 0);
    if (FLOATX_IS_FLOAT) {
        u.params = ladder_added<floatX>(&l, "params", n, 1.0, bound);
    } else {
        u.params = ladder_output<floatX>(&l, "params", n, bound);
        u.master_weights = ladder_added<float>(&l, "masters", n, 1.0, bound);
    }
    u.m = ladder_added<float>(&l, "m", n, 1.0, bound);
    u.v = ladder_added<float>(&l, "v", n, 1.0, bound);
    u.grads = ladder_input<float>(&l, "grads", n, 1.0);
    float* v = ladder_twin(&l, u.v);
    for (size_t i = 0; i < n; i++) v[i] = 0.01f + v[i] * v[i];  // a mean of squares
    ladder_update(&l, u.v);
    floatX* params = ladder_twin(&l, u.params);
    float *master_weights = u.master_weights ? ladder_twin(&l, u.master_weights) : NULL, *m = ladder_twin(&l, u.m);
    if (l.check) cpu::optimizer_update(params, master_weights, m, v, ladder_twin(&l, u.grads), o, 0, n, NULL);
    double bytes = 7 * sizeof(float) + (u.master_weights ? sizeof(floatX) : 0);
    ladder_work(&l, LADDER_BYTES, (double)n * bytes);
    ladder_rung(&l, "separate", run_separate, &u);
    ladder_rung(&l, "fused", run_fused, &u);
    ladder_rung(&l, "shipped", run_shipped, &u);
    ladder_close(&l);
    return ladder_result(&l);
}
