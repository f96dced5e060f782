// dev/optimizers.cu: the ladders of optimizers with narrow or factored states, each on a matrix of R x C parameters.
//
// adamw-8bit   AdamW, with the states of 256 elements as 8 bits and a scale ("8-bit Optimizers via Block-wise
//              Quantization"). Bound by memory: 18 bytes per parameter in 16 bits (AdamW: 30); look-ups are next.
//
//     rung          idea                                                       expected
//     search        a block of threads owns 256 elements, one each; a state's  half of the bytes' time: 16 dependent
//                   code comes from a binary search in shared memory           look-ups per element
//     shipped       a warp owns 256 elements, 8 to a lane; the position in a   above 80%
//                   decade is computed, one look-up per state
//
// adamw-bf16   AdamW with states in bfloat16, rounded stochastically: 22 bytes per parameter in 16 bits.
//
//     element       one element per thread, which calls random4 for itself     bound by integer arithmetic: 40%
//     shipped       four elements per thread share a call                      above 85%
//
// adafactor    second moments of rows and columns. Five passes: the bytes counted here are for reading gradients and
//              weights once and writing weights once, so that a perfect fusion would be at 100%.
//
//     threads       a thread owns a row, or a column, of each sum              rows are read one line per element: 10%
//     shipped       a block owns a row; columns are cut into 32 pieces         40%: the gradient is read four times
//
//     build/optimizers --rows 50257 --columns 768

#include "kernels.cuh"
#include "ladder.h"

// The code of x by binary search: the first code whose midpoint to the next is not below x.
static __device__ inline uint8_t search_code(float x, const float* values) {
    int low = 0, high = DYNAMIC_CODES - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (x > (values[middle] + values[middle + 1]) * 0.5f) low = middle + 1;
        else high = middle;
    }
    return (uint8_t)low;
}

static __global__ void search_kernel(OptimizerSlice slice, ElementStep e, DynamicMaps maps) {
    __shared__ float values[2][DYNAMIC_CODES], shared[WARP];
    size_t block = blockIdx.x, i = block * OPTIMIZER_BLOCK + threadIdx.x;
    values[0][threadIdx.x] = maps.m.values[threadIdx.x];
    values[1][threadIdx.x] = maps.v.values[threadIdx.x];
    __syncthreads();
    uint8_t *m_codes = (uint8_t*)slice.states[0], *v_codes = (uint8_t*)slice.states[1];
    float *m_scales = (float*)slice.states[2], *v_scales = (float*)slice.states[3], m = 0.0f, v = 0.0f;
    if (i < slice.n) {
        float w = slice.master_weights ? slice.master_weights[i] : float_of(slice.params[i]);
        m = values[0][m_codes[i]] * m_scales[block];
        v = values[1][v_codes[i]] * v_scales[block];
        optimizer_element(OPTIMIZER_ADAMW, &w, &m, &v, slice.grads[i], &e);
        if (slice.master_weights) slice.master_weights[i] = w;
        slice.params[i] = floatX_of(w);
    }
    float m_scale = block_max(fabsf(m), shared), v_scale = block_max(v, shared);
    if (i < slice.n) {
        m_codes[i] = search_code(m * dynamic_inverse(m_scale), values[0]);
        v_codes[i] = search_code(v * dynamic_inverse(v_scale), values[1]);
    }
    if (threadIdx.x > 0) return;
    m_scales[block] = m_scale;
    v_scales[block] = v_scale;
}

// A thread owns an element and draws its own random bits: the lower half for m, the upper for v.
static __global__ void element_kernel(OptimizerSlice slice, ElementStep e) {
    size_t i = flat_index(1);
    if (i >= slice.n) return;
    uint16_t *m_halves = (uint16_t*)slice.states[0], *v_halves = (uint16_t*)slice.states[1];
    float w = slice.master_weights ? slice.master_weights[i] : float_of(slice.params[i]);
    float m = float_from_bf16(m_halves[i]), v = float_from_bf16(v_halves[i]);
    optimizer_element(OPTIMIZER_ADAMW, &w, &m, &v, slice.grads[i], &e);
    uint32_t random = random_bits(e.step.seed, RANDOM_STATES, e.step.step, slice.first + i);
    m_halves[i] = bf16_of_stochastic(m, random);
    v_halves[i] = bf16_of_stochastic(v, random >> 16);
    if (slice.master_weights) slice.master_weights[i] = w;
    slice.params[i] = floatX_of(w);
}

// Each thread owns a row of the sums of squares, or a column.
static __global__ void thread_sums(Factored f) {
    size_t i = flat_index(1);
    float sum = 0.0f;
    if (i < f.R) {
        for (size_t c = 0; c < f.C; c++) sum += factored_term(&f, TERM_SQUARE, 0.0f, 1.0f, i * f.C + c, c);
        f.row_sums[i] = sum;
    } else if (i < f.R + f.C) {
        size_t c = i - f.R;
        for (size_t row = 0; row < f.R; row++) sum += factored_term(&f, TERM_SQUARE, 0.0f, 1.0f, row * f.C + c, c);
        f.partial[c] = sum;
        for (size_t piece = 1; piece < FACTORED_PIECES; piece++) f.partial[piece * f.C + c] = 0.0f;
    }
}

// What a row's thread needs from the other rows: u's size, and the update.
static __global__ void thread_rows(Factored f, bool apply) {
    size_t row = flat_index(1);
    if (row >= f.R) return;
    float sum = 0.0f;
    for (size_t i = row * f.C, c = 0; c < f.C; i++, c++) {
        sum += factored_term(&f, TERM_UPDATE, f.row_factors[row], 1.0f, i, c);
        if (!apply) continue;
        float w = factored_element(&f, OPTIMIZER_ADAFACTOR, f.scalars[SCALAR_STEP], factored_weight(&f, i), i, row, c);
        if (f.master_weights) f.master_weights[i] = w;
        f.params[i] = floatX_of(w);
    }
    if (!apply) f.row_sums[row] = sum;
}

static size_t R, C;
static OptimizerStep step;
static LadderPointer<floatX> params;
static LadderPointer<float> masters, grads;
static std::vector<void*> twins;  // of arrays that a rung's check skips

// A state of n elements that starts as zeros; a rung's check skips it, since test_cuda.cu checks it.
template <typename T>
static LadderPointer<T> unread(size_t n) {
    twins.push_back(memory_allocate(n * sizeof(T)));
    return {(T*)ladder_scratch(n * sizeof(T)), (T*)twins.back()};
}

static int end(void) {
    for (void* twin : twins) free(twin);
    twins.clear();
    return ladder_end();
}

// Allocates a ladder's arrays, for a new optimizer kind.
static void begin(OptimizerKind kind, const char* title) {
    const LadderBound bound = {(double)(R + C), 4, 0};
    size_t n = R * C;
    ladder_begin(title);
    step = {.kind = kind, .lr = 1e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .weight_decay = 0.1f,
            .grad_scale = 0.5f, .seed = 1, .step = 10};
    masters = {};
    if (FLOATX_IS_FLOAT) params = ladder_added<floatX>("params", n, 1.0, bound);
    else params = ladder_output<floatX>("params", n, bound), masters = ladder_added<float>("masters", n, 1.0, bound);
    grads = ladder_input<float>("grads", n, 1.0);
}

static OptimizerSlice slice_of(void) {
    return {.params = params, .master_weights = masters, .grads = grads, .n = R * C, .shape = {.rows = R, .cols = C}};
}

static void update(const OptimizerSlice* slice) {
    if (ladder.on_cpu) cpu::optimizer_update(slice, &step, NULL);
    else optimizer_update(slice, &step, ladder.stream);
}

// Bytes of gradients read, weights read and written, parameters written.
static double bytes_of_weights(void) { return (double)(R * C) * (3 * sizeof(float) + (masters ? sizeof(floatX) : 0)); }

static void ladder_8bit(void) {
    size_t n = R * C, blocks = divide_up(n, OPTIMIZER_BLOCK);
    begin(OPTIMIZER_ADAMW_8BIT, "optimizer_update: AdamW with 8-bit states");
    // Scales of 0: the rungs start with m = v = 0.
    auto m_scales = ladder_added<float>("m_scale", blocks, 0.0, {1, 4, 0});
    auto v_scales = ladder_added<float>("v_scale", blocks, 0.0, {1, 4, 0});
    auto m = unread<uint8_t>(n), v = unread<uint8_t>(n);
    auto slice = [=] {
        OptimizerSlice all = slice_of();
        void* states[4] = {(uint8_t*)m, (uint8_t*)v, (float*)m_scales, (float*)v_scales};
        memcpy(all.states, states, sizeof states);
        return all;
    };
    auto shipped = [=] { OptimizerSlice all = slice(); update(&all); };
    ladder_work(LADDER_BYTES, bytes_of_weights() + 4.0 * (double)n, shipped);
    ladder_rung("search", [=] {
        DynamicMaps maps;
        dynamic_maps(&maps);
        search_kernel<<<grid_blocks(blocks), OPTIMIZER_BLOCK, 0, ladder.stream->compute>>>(slice(), element_step(&step),
                                                                                         maps);
    });
    ladder_rung("shipped", shipped);
}

static void ladder_bf16(void) {
    size_t n = R * C;
    begin(OPTIMIZER_ADAMW_BF16, "optimizer_update: AdamW with states in bfloat16");
    // Halves as integers: 0 at the start, and the same bits on both backends unless only one fuses multiply-adds.
    auto m = unread<uint16_t>(n), v = unread<uint16_t>(n);
    auto slice = [=] {
        OptimizerSlice all = slice_of();
        all.states[0] = (uint16_t*)m;
        all.states[1] = (uint16_t*)v;
        if (ladder.on_cpu) return all;
        CUDA_CHECK(cudaMemsetAsync(all.states[0], 0, n * sizeof(uint16_t), ladder.stream->compute));
        CUDA_CHECK(cudaMemsetAsync(all.states[1], 0, n * sizeof(uint16_t), ladder.stream->compute));
        return all;
    };
    auto shipped = [=] { OptimizerSlice all = slice(); update(&all); };
    ladder_work(LADDER_BYTES, bytes_of_weights() + 12.0 * (double)n, shipped);  // 4 of them clear the states
    ladder_rung("element", [=] { ladder_launch(element_kernel, n, slice(), element_step(&step)); });
    ladder_rung("shipped", shipped);
}

static void ladder_adafactor(void) {
    begin(OPTIMIZER_ADAFACTOR, "optimizer_update: Adafactor");
    const LadderBound bound = {(double)(R + C), 8, 0};
    auto rows = ladder_added<float>("v_row", R, 0.0, bound), columns = ladder_added<float>("v_column", C, 0.0, bound);
    const TensorShape shape = slice_of().shape;
    auto scratch = unread<float>(optimizer_scratch_floats(OPTIMIZER_ADAFACTOR, &shape, 0));
    auto slice = [=] {
        OptimizerSlice all = slice_of();
        all.states[0] = (float*)rows;
        all.states[1] = (float*)columns;
        all.scratch = scratch;
        return all;
    };
    auto shipped = [=] { OptimizerSlice all = slice(); update(&all); };
    ladder_work(LADDER_BYTES, bytes_of_weights(), shipped);
    ladder_rung("threads", [=] {
        OptimizerSlice all = slice();
        const Factored f = factored_begin(&all, &step);
        ladder_launch(thread_sums, R + C, f);
        factored_find_factors(&f, f.v_row, f.v_column, f.rate, ladder.stream);
        factored_sum_rows<TERM_WEIGHT>(&f, ladder.stream);
        factored_find_scalar(&f, TERM_WEIGHT, ladder.stream);
        ladder_launch(thread_rows, R, f, false);
        factored_find_scalar(&f, TERM_UPDATE, ladder.stream);
        ladder_launch(thread_rows, R, f, true);
    });
    ladder_rung("shipped", shipped);
}

int main(int argc, char** argv) {
    uint64_t rows = ladder_size(50257, 70), columns = ladder_size(768, 72);  // GPT-2's embedding
    ladder_open(argc, argv, {{"rows", KIND_COUNT, &rows, "R", 1, 1e9, "rows of the matrix", 0},
                             {"columns", KIND_COUNT, &columns, "C", 1, 1e9, "its columns", 0}});
    R = rows, C = columns;
    ladder_8bit();
    ladder_bf16();
    ladder_adafactor();
    return end();
}
