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
//     build/adamw --parameters 124475904

#include "kernels.cuh"
#include "ladder.h"

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

int main(int argc, char** argv) {
    uint64_t n = ladder_size(124475904, 5000);  // GPT-2 124M
    ladder_open(argc, argv, {{"parameters", FLAG_COUNT, &n, "n", 1, 1e10, "length of the vectors", 0}});
    ladder_begin("optimizer_update: AdamW on n parameters");
    OptimizerArguments a = {};
    OptimizerStep* o = &a.step;
    o->kind = OPTIMIZER_ADAMW;
    o->lr = 1e-3f, o->beta1 = 0.9f, o->beta2 = 0.95f, o->epsilon = 1e-8f, o->weight_decay = 0.1f, o->grad_scale = 0.5f;
    o->seed = 1, o->step = 10;
    a.m_correction = (float)(1.0 / (1.0 - pow((double)o->beta1, (double)o->step)));
    a.v_correction = (float)(1.0 / (1.0 - pow((double)o->beta2, (double)o->step)));
    const LadderBound bound = {4, 1, 0};
    LadderPointer<floatX> params;
    LadderPointer<float> masters = {};  // of 16-bit parameters
    if (FLOATX_IS_FLOAT) params = ladder_added<floatX>("params", n, 1.0, bound);
    else params = ladder_output<floatX>("params", n, bound), masters = ladder_added<float>("masters", n, 1.0, bound);
    auto m = ladder_added<float>("m", n, 1.0, bound), v = ladder_added<float>("v", n, 1.0, bound);
    auto grads = ladder_input<float>("grads", n, 1.0);
    for (size_t i = 0; i < n; i++) v.twin[i] = 0.01f + v.twin[i] * v.twin[i];  // a mean of squares
    ladder_update(v);
    auto shipped = [&] {
        OptimizerSlice all = {};
        all.params = params, all.master_weights = masters, all.grads = grads, all.n = n;
        all.states[0] = (float*)m, all.states[1] = (float*)v;
        if (ladder.on_cpu) cpu::optimizer_update(&all, o, NULL);
        else optimizer_update(&all, o, ladder.stream);
    };
    ladder_work(LADDER_BYTES, (double)n * (7 * sizeof(float) + (masters ? sizeof(floatX) : 0)), shipped);
    ladder_rung("separate", [&] {
        float* w = masters ? masters.device : (float*)params.device;
        ladder_launch(adamw_moment, n, m, grads, o->beta1, o->grad_scale, false, n);
        ladder_launch(adamw_moment, n, v, grads, o->beta2, o->grad_scale, true, n);
        ladder_launch(adamw_step, n, w, m, v, a, n);
        if (masters) cast_from_float(params, w, n, ladder.stream);
    });
    ladder_rung("fused", [&] { ladder_launch(optimizer_kernel<1>, n, params, masters, m, v, grads, a, 0, n); });
    ladder_rung("shipped", shipped);
    return ladder_end();
}
