// dev/muon.cu: the ladder of Muon's update of one matrix (llmtrain/ops/optimizers/matrix.h has formula and sources).
//
// Five times X = a X + (b A + c A A) X with A = X X^T: 5 (4 d^2 l + 2 d^3) flops for a matrix of d x l, d <= l. All
// rungs run the same algorithm on different matmuls, which are the bound; the elementwise work, 20 passes over the
// matrix, is about 1% at d = 1,024.
//
//     rung          idea                                                   expected
//     plain         matmuls by the kernel that takes any shape             10 to 20% of the peak of float
//     float         cuBLASLt, in float                                     60 to 80% of the peak of float
//     shipped       operands rounded to TF32 in 16-bit builds              the tensor cores: 5 times the rung before
//
//     build/muon --rows 1024 --cols 4096

#include "kernels.cuh"
#include "ladder.h"

static inline void muon_multiply_plain(float* out, const float* a, const float* b, MatrixForm form, bool rounds,
                                       size_t M, size_t N, size_t K, Stream stream) {
    (void)rounds;
    if (form == MATRIX_NT) plain_matmul<float>(MATMUL_FORWARD, out, b, a, NULL, false, M, N, K, stream);
    else if (form == MATRIX_NN) plain_matmul<float>(MATMUL_BACKWARD_INPUT, out, b, a, NULL, false, M, K, N, stream);
    else plain_matmul<float>(MATMUL_BACKWARD_WEIGHT, out, b, a, NULL, false, K, M, N, stream);
}

static inline void muon_multiply_float(float* out, const float* a, const float* b, MatrixForm form, bool rounds,
                                       size_t M, size_t N, size_t K, Stream stream) {
    (void)rounds;
    matrix_multiply(out, a, b, form, false, M, N, K, stream);
}

int main(int argc, char** argv) {
    uint64_t rows = ladder_size(1024, 24), cols = ladder_size(4096, 40);
    ladder_open(argc, argv, {{"rows", KIND_COUNT, &rows, "R", 1, 65536, "rows of the matrix", 0},
                             {"cols", KIND_COUNT, &cols, "C", 1, 65536, "its columns", 0}});
    ladder_begin("optimizer_update: Muon on a matrix");
    size_t n = rows * cols, d = min_size(rows, cols), l = max_size(rows, cols);
    OptimizerStep o = {.kind = OPTIMIZER_MUON, .lr = 0.01f, .weight_decay = 0.1f, .grad_scale = 0.5f, .step = 10};
    OptimizerSlice slice = {.n = n, .shape = {.rows = rows, .cols = cols, .hidden = true}};
    // The iterations amplify a rounding by up to 3.4445^5, about 500; TF32 roundings are 2^13 times larger, but there
    // are many, of random sign.
    const double size = 1.0 + 0.01 * (FLOATX_IS_FLOAT ? 500.0 : 8.0 * 0x1p13);
    auto params = ladder_output<floatX>("params", n, {1, size, 0});
    auto masters = ladder_added<float>("masters", n, 1.0, {1, size, 0});
    auto m = ladder_added<float>("m", n, 1.0, {1, 1, 0});
    auto grads = ladder_input<float>("grads", n, 1.0);
    size_t floats = optimizer_scratch_floats(OPTIMIZER_MUON, &slice.shape, 0);
    std::vector<double> twin(floats / 2 + 1);
    float* scratch = (float*)ladder_scratch(floats * sizeof(float));
    ladder_give_scratch(scratch_bytes(rows, cols));
    auto with = [&](const MatrixOperations& operations) {
        slice.params = params, slice.master_weights = masters, slice.grads = grads, slice.states[0] = (float*)m;
        slice.scratch = ladder.on_cpu ? (float*)twin.data() : scratch;
        matrix_update(&operations, &slice, &o, ladder.stream);
    };
    ladder_work(LADDER_MATMUL_FLOPS, 5.0 * (4.0 * (double)(d * d) * (double)l + 2.0 * (double)(d * d) * (double)d),
                [&] { with(ladder.on_cpu ? cpu::MATRIX_OPERATIONS : MATRIX_OPERATIONS); });
    MatrixOperations plain = MATRIX_OPERATIONS, in_float = MATRIX_OPERATIONS;
    plain.multiply = muon_multiply_plain;
    in_float.multiply = muon_multiply_float;
    ladder_rung("plain", [&] { with(plain); });
    ladder_rung("float", [&] { with(in_float); });
    ladder_rung("shipped", [&] { with(MATRIX_OPERATIONS); });
    return ladder_end();
}
