// dev/adamw.cu: the ladder of AdamW's update ("Decoupled Weight Decay Regularization").
//
//     m += (1 - beta1) (g - m);   v += (1 - beta2) (g^2 - v);   w -= lr (m' / (sqrt(v') + epsilon) + weight_decay w)
//
// for all n parameters, with m' and v' the bias-corrected m and v. In 16 bits w is the fp32 master weight, then rounded
// to the stored parameter. Bound by memory: w, m, v, g in, w, m, v and the 16-bit parameter out are 30 bytes per
// parameter (28 in FP32), and the arithmetic takes a tenth of that time.
//
//     rung          idea                                                       expected
//     separate      a kernel for each line of the formula, and a cast          46 bytes instead of 30: 65% of the peak
//     fused         one kernel, one element per thread                         30 bytes; 80 to 90%
//     each          four elements per thread: 16 bytes of each float array     above 90% of a matrix; 2 us for each of
//                                                                              74 vectors
//     shipped       all tensors in one launch, which carries their table       above 90%
//
// The parameters belong to --tensors tensors: every other one is a vector of 768, without weight decay, and between
// them are matrices of equal size.
//
//     build/adamw --parameters 124475904 --tensors 148

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

static __global__ void adamw_step(float* w, const float* m, const float* v, ElementStep e, size_t n) {
    size_t i = flat_index(1);
    if (i >= n) return;
    float direction = m[i] * e.m_correction / (sqrtf(v[i] * e.v_correction) + e.step.epsilon);
    w[i] -= e.step.lr * (direction + e.step.weight_decay * w[i]);
}

static LadderPointer<floatX> params;
static LadderPointer<float> masters, m, v, grads;

// Parameters [begin, begin + n).
static OptimizerSlice slice_of(size_t begin, size_t n, bool no_decay) {
    return {.params = params + begin, .master_weights = masters ? masters + begin : NULL, .grads = grads + begin,
            .states = {m + begin, v + begin}, .first = begin, .n = n, .no_decay = no_decay};
}

// n parameters as that many tensors, each of which begins at a multiple of 64; as one tensor if that is too many.
static std::vector<OptimizerSlice> tensors_of(size_t n, size_t tensors) {
    std::vector<OptimizerSlice> slices;
    size_t vector = min_size(768, n / tensors / 64 * 64), matrices = divide_up(tensors, 2), begin = 0;
    size_t matrix = (n - tensors / 2 * vector) / matrices / 64 * 64;
    for (size_t i = 0; i + 1 < tensors && vector > 0; i++) {
        size_t size = i % 2 ? vector : matrix;
        slices.push_back(slice_of(begin, size, i % 2));
        begin += size;
    }
    slices.push_back(slice_of(begin, n - begin, false));
    return slices;
}

int main(int argc, char** argv) {
    uint64_t n = ladder_size(124475904, 20000), tensors = ladder_size(148, 7);  // GPT-2 124M
    ladder_open(argc, argv, {{"parameters", KIND_COUNT, &n, "n", 1, 1e10, "length of the vectors", 0},
                             {"tensors", KIND_COUNT, &tensors, "N", 1, 1e6, "tensors that they are of", 0}});
    ladder_begin("optimizer_update_list: AdamW on n parameters");
    OptimizerStep o = {.kind = OPTIMIZER_ADAMW, .lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f,
                       .weight_decay = 0.1f, .grad_scale = 0.5f, .seed = 1, .step = 10};
    const LadderBound bound = {4, 1, 0};
    if (FLOATX_IS_FLOAT) params = ladder_added<floatX>("params", n, 1.0, bound);
    else params = ladder_output<floatX>("params", n, bound), masters = ladder_added<float>("masters", n, 1.0, bound);
    m = ladder_added<float>("m", n, 1.0, bound), v = ladder_added<float>("v", n, 1.0, bound);
    grads = ladder_input<float>("grads", n, 1.0);
    for (size_t i = 0; i < n; i++) v.twin[i] = 0.01f + v.twin[i] * v.twin[i];  // a mean of squares
    ladder_update(v);
    auto shipped = [&] {
        std::vector<OptimizerSlice> slices = tensors_of(n, tensors);
        if (ladder.on_cpu) cpu::optimizer_update_list(slices.data(), slices.size(), &o, NULL);
        else optimizer_update_list(slices.data(), slices.size(), &o, ladder.stream);
    };
    ladder_work(LADDER_BYTES, (double)n * (7 * sizeof(float) + (masters ? sizeof(floatX) : 0)), shipped);
    ladder_rung("separate", [&] {
        float* w = masters ? masters.device : (float*)params.device;
        ladder_launch(adamw_moment, n, m, grads, o.beta1, o.grad_scale, false, n);
        ladder_launch(adamw_moment, n, v, grads, o.beta2, o.grad_scale, true, n);
        for (const OptimizerSlice& s : tensors_of(n, tensors)) {
            OptimizerStep own = optimizer_step_of(&s, &o);
            ladder_launch(adamw_step, s.n, w + s.first, m + s.first, v + s.first, element_step(&own), s.n);
        }
        if (masters) cast_from_float(params, w, n, ladder.stream);
    });
    ladder_rung("fused", [&] {
        for (const OptimizerSlice& s : tensors_of(n, tensors)) {
            MultiTensorList one;
            size_t next = 0;
            multi_tensor_next(&one, &next, &s, 1, &o, multi_tensor_fours(&s), FLAT_THREADS);
            ladder_launch(optimizer_kernel<1>, s.n, one, element_step(&o));
        }
    });
    ladder_rung("each", [&] {
        for (const OptimizerSlice& s : tensors_of(n, tensors)) optimizer_update(&s, &o, ladder.stream);
    });
    ladder_rung("shipped", shipped);
    return ladder_end();
}
