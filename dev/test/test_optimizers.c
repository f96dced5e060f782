// test_optimizers.c: optimizers with narrow or factored states: results over 100 steps, and code maps.
//
//   cc -std=c11 -O2 -fopenmp -I. dev/test/test_optimizers.c -o build/test_optimizers -lm && build/test_optimizers
//
//   maps       the values of the 8-bit codes have bitsandbytes' bits; a number gets the code of the nearest value: next
//              to each midpoint of two, and for random numbers of all sizes
//   100 steps  the weights of a matrix with heads, an embedding with a row without gradient, and a vector equal those
//              of torch, bitsandbytes' arithmetic or a float64 program, within bounds: dev/peers/optimizers.py
//   parts      a tensor updated in slices, cut as ZeRO may, has the same bits as the whole
//   rates      a step's size and decay are proportional to the learning rate, in late steps and at high rates, too;
//              only Adafactor's steps are at most 1 / sqrt(t)
//
// One step of each, on both backends and for each storage dtype, is in operations.h.

#include "kernels_cpu.h"
#include "harness.h"

enum { TENSORS = 3, STEPS = 100, MAPS = 2 * DYNAMIC_CODES };
static const struct {
    TensorShape shape;
    size_t first;
    float decay;
} TENSOR[TENSORS] = {{{48, 40, true, 32, 8, {0}}, 0, 0.1f}, {{37, 24, false, 0, 0, {0}}, 1920, 0.1f},
                     {{300, 0, false, 0, 0, {0}}, 2816, 0.0f}};
enum { WEIGHTS = 48 * 40 + 37 * 24 + 300 };

// In the order of the fixture. A step moves a weight by about lr. `unit`: the rounding errors of float in a step, in
// units in the last place of the step and the weight, of about ten operations and of the sums; errors of 100 steps add
// at random. jumps: of 1000 weights, how many may be off by `jump` lr, because a state was rounded to a neighbor.
static const struct {
    OptimizerKind kind;
    double unit, jumps, jump;
} METHODS[] = {
    {OPTIMIZER_ADAMW_8BIT, 8, 10, 0.1}, {OPTIMIZER_ADAMW_BF16, 4, 10, 0.1}, {OPTIMIZER_ADAFACTOR, 4, 0, 0},
    {OPTIMIZER_CAME, 16, 0, 0}, {OPTIMIZER_ADAM_MINI, 4, 0, 0}, {OPTIMIZER_SM3, 4, 0, 0},
};
static float fixture[COUNT_OF(METHODS) * WEIGHTS + MAPS];

// ------------------------------------------------------------------------------------------------
// Maps

// The value from 0 to 1 nearest to x, by trying all; at a midpoint the one nearer to 0.
static int nearest(const float* numbers, int count, float x) {
    int best = 0;
    while (best + 1 < count && x > (numbers[best] + numbers[best + 1]) * 0.5f) best++;
    return best;
}

static bool quantizes(const DynamicMap* map, bool is_signed, float x) {
    const float* numbers = map->values + (is_signed ? DYNAMIC_ZERO : 0);
    int count = is_signed ? DYNAMIC_CODES - DYNAMIC_ZERO : DYNAMIC_CODES, below = count - (x < 0 && is_signed ? 2 : 1);
    float block[2] = {x, 1.0f};  // so that the scale is 1
    uint8_t codes[2];
    quantize_block(codes, block, map, is_signed, 2);
    int expected = nearest(numbers, count, fabsf(x));
    if (expected > below) expected = below;
    return codes[0] == (is_signed ? DYNAMIC_ZERO + (x < 0 ? -expected : expected) : expected);
}

static void test_maps(void) {
    for (int is_signed = 1; is_signed >= 0; is_signed--) {
        const float* published = fixture + COUNT_OF(METHODS) * WEIGHTS + (is_signed ? 0 : DYNAMIC_CODES);
        DynamicMap map;
        dynamic_map(&map, is_signed);
        for (size_t i = 0; i < DYNAMIC_CODES; i++)
            expect(map.values[i] == published[i], "number %zu is %.9g, not %.9g", i, (double)map.values[i],
                   (double)published[i]);
        for (size_t i = 0; i < DYNAMIC_CODES; i++) {
            float places[2] = {map.middles[i], fabsf(map.values[i])};
            for (int place = 0; place < 2; place++)
                for (int step = -2; step <= 2; step++) {
                    float x = float_from_bits(bits_from_float(places[place]) + (uint32_t)step);
                    if (!(x >= 0.0f && x <= 1.0f)) continue;
                    expect(quantizes(&map, is_signed, x), "%.9g", (double)x);
                    expect(!is_signed || quantizes(&map, is_signed, -x), "%.9g", -(double)x);
                }
        }
        for (uint64_t i = 0; i < 20000; i++) {
            uint32_t bits = random_bits(1, RANDOM_TEST, 9, i);
            // Any number, or one from 2^-25 up.
            float x = float_from_bits(i % 2 ? bits % 0x3f800001u : 0x33000000u + bits % 0x0c800001u);
            expect(quantizes(&map, is_signed, is_signed && i % 3 == 0 ? -x : x), "%.9g", (double)x);
        }
        verdict("the map of %s: bitsandbytes' bits, and every number becomes the nearest", is_signed ? "m" : "v");
    }
    uint8_t codes[3];
    float none[3] = {0.0f, -0.0f, 0.0f}, bad[3] = {1.0f, NAN, -INFINITY};
    DynamicMaps maps;
    dynamic_maps(&maps);
    check(quantize_block(codes, none, &maps.m, true, 3) == 0.0f && codes[0] == DYNAMIC_ZERO && codes[1] == DYNAMIC_ZERO,
          "zeros have the scale 0");
    check(isnan(quantize_block(codes, bad, &maps.m, true, 3)), "a NaN shows in the scale");
}

// ------------------------------------------------------------------------------------------------
// Steps

// A tensor and the buffers of its update.
typedef struct {
    OptimizerSlice slice;
    floatX params[48 * 40];
    float grads[48 * 40];
    unsigned char states[OPTIMIZER_STATES][48 * 40 * sizeof(float)];
} Trained;

static void begin(Trained* t, OptimizerKind kind, size_t number) {
    memset(t, 0, sizeof *t);
    t->slice.shape = TENSOR[number].shape;
    t->slice.first = TENSOR[number].first;
    t->slice.n = shape_elements(&t->slice.shape);
    t->slice.params = t->params;
    t->slice.grads = t->grads;
    t->slice.scratch =
        (float*)memory_allocate((optimizer_scratch_floats(kind, &t->slice.shape, 0) + 1) * sizeof(float));
    for (size_t s = 0, at; s < optimizer_states(kind); s++) {
        StateShape shape = OPTIMIZERS[kind].states[s].shape;
        size_t n = optimizer_state_part(&at, shape, &t->slice.shape, 0, 0, t->slice.n);
        need(n * dtype_bytes(OPTIMIZERS[kind].states[s].dtype) <= sizeof t->states[s], "room for a state");
        if (n > 0) t->slice.states[s] = t->states[s];
    }
    for (size_t i = 0; i < t->slice.n; i++)
        t->params[i] = floatX_of((random_uniform(1, RANDOM_TEST, 0, t->slice.first + i) - 0.5f) * 0.25f);
}

// Elements [first, end) of the tensor, with its states cut as ZeRO cuts them.
static OptimizerSlice part(const Trained* t, OptimizerKind kind, size_t first, size_t end) {
    OptimizerSlice slice = t->slice;
    slice.params += first;
    slice.grads += first;
    slice.first += first;
    slice.n = end - first;
    for (size_t s = 0, at; s < optimizer_states(kind); s++) {
        const OptimizerState* state = &OPTIMIZERS[kind].states[s];
        size_t n = optimizer_state_part(&at, state->shape, &t->slice.shape, 0, first, end);
        slice.states[s] = n > 0 ? (char*)t->slice.states[s] + at * dtype_bytes(state->dtype) : NULL;
    }
    return slice;
}

// Updates in parts of this length; 0: whole.
static void step(Trained* t, OptimizerKind kind, size_t number, uint64_t update, size_t length, float lr) {
    OptimizerStep o;
    memset(&o, 0, sizeof o);
    o.kind = kind;
    o.lr = lr, o.beta1 = 0.9f, o.beta2 = 0.95f, o.epsilon = 1e-8f, o.weight_decay = TENSOR[number].decay;
    o.grad_scale = 0.5f, o.seed = 1, o.step = update;
    size_t cols = t->slice.shape.cols;
    for (size_t i = 0; i < t->slice.n; i++) {
        float uniform = random_uniform(1, RANDOM_TEST, update, t->slice.first + i) - 0.4375f;
        t->grads[i] = cols && i / cols == 3 ? 0.0f : uniform / (float)(1 << i % 5);
    }
    for (size_t first = 0; first < t->slice.n; first += length ? length : t->slice.n) {
        OptimizerSlice slice = part(t, kind, first, length ? min_size(first + length, t->slice.n) : t->slice.n);
        optimizer_update(&slice, &o, NULL);
    }
}

static void test_steps(void) {
    for (size_t method = 0; method < COUNT_OF(METHODS); method++) {
        OptimizerKind kind = METHODS[method].kind;
        const float* expected = fixture + method * WEIGHTS;
        size_t off = 0;
        double worst = 0.0, worst_jump = 0.0, lr = 0.01, places = 0x1p-24 * METHODS[method].unit * sqrt(STEPS);
        for (size_t number = 0; number < TENSORS; number++) {
            static Trained t, cut;
            begin(&t, kind, number);
            begin(&cut, kind, number);
            size_t length = OPTIMIZERS[kind].rule == SHARD_ANYWHERE ? 104
                            : OPTIMIZERS[kind].rule == SHARD_BLOCKS ? 512
                                                                   : 0;
            for (uint64_t update = 1; update <= STEPS; update++) {
                threads_set(1 + update % 3);
                step(&t, kind, number, update, 0, 0.01f);
                step(&cut, kind, number, update, length, 0.01f);
            }
            bool same = memcmp(t.params, cut.params, sizeof t.params) == 0;
            expect(same && memcmp(t.states, cut.states, sizeof t.states) == 0, "tensor %zu in parts", number);
            for (size_t i = 0; i < t.slice.n; i++, expected++) {
                double error = fabs((double)float_of(t.params[i]) - (double)*expected);
                double bound = places * (fabs((double)*expected) + lr * 10);
                if (error <= bound) worst = fmax(worst, error / bound);
                else off++;
                worst_jump = fmax(worst_jump, isnan(error) ? INFINITY : error);
            }
            free(t.slice.scratch);
            free(cut.slice.scratch);
        }
        expect((double)off <= METHODS[method].jumps * WEIGHTS / 1000, "%zu of %d weights are off", off, (int)WEIGHTS);
        expect(off == 0 || worst_jump <= METHODS[method].jump * lr, "by %.2g", worst_jump);
        verdict("%-10s 100 steps are the reference's: errors to %.2f of the bound, %zu of %d beyond it, %.1e at most",
                OPTIMIZERS[kind].name, worst, off, (int)WEIGHTS, worst_jump);
    }
}

// From the same weights, gradients and states a step moves each weight by lr (decay w + u), where u is the same at all
// rates; with Adafactor by lr decay w + min(lr, 1 / sqrt(t)) u. u follows from a step at a low rate.
static void test_rates(void) {
    static const uint64_t updates[] = {1, 3, 4, 5, 30, 400};
    static const double rates[] = {0.04, 0.5, 3};
    const double low = 0.01;  // 1 / sqrt(10000)
    for (size_t method = 0; method < COUNT_OF(METHODS); method++) {
        OptimizerKind kind = METHODS[method].kind;
        for (size_t number = 0; number < TENSORS; number++)
            for (size_t k = 0; k < COUNT_OF(updates) * COUNT_OF(rates); k++) {
                static Trained slow, fast, start;
                uint64_t update = updates[k / COUNT_OF(rates)];
                double lr = rates[k % COUNT_OF(rates)], decay = (double)TENSOR[number].decay, wrong = 0, most = 0;
                double least = 1 / sqrt((double)update), size = kind == OPTIMIZER_ADAFACTOR ? fmin(lr, least) : lr;
                begin(&slow, kind, number);
                begin(&fast, kind, number);
                memcpy(start.params, slow.params, sizeof start.params);
                step(&slow, kind, number, update, 0, (float)low);
                step(&fast, kind, number, update, 0, (float)lr);
                for (size_t i = 0; i < slow.slice.n; i++) {
                    double w = (double)float_of(start.params[i]), moved = (double)float_of(slow.params[i]) - w;
                    double u = (moved + low * decay * w) / low, expected = -lr * decay * w + size * u;
                    wrong = fmax(wrong, fabs((double)float_of(fast.params[i]) - w - expected));
                    most = fmax(most, fabs(expected));
                }
                expect(wrong < 1e-3 * most, "%s, tensor %zu, step %d at rate %g: off by %g of %g",
                       OPTIMIZERS[kind].name, number, (int)update, lr, wrong, most);
                free(slow.slice.scratch);
                free(fast.slice.scratch);
            }
    }
    verdict("a step is proportional to the learning rate, Adafactor's up to 1 / sqrt(t)");
}

int main(void) {
    tests_begin("test_optimizers");
    FILE* file = fopen("dev/test/fixtures/optimizers.f32", "rb");
    need(file != NULL, "run it in the root of the checkout");
    need(fread(fixture, 1, sizeof fixture, file) == sizeof fixture, "dev/test/fixtures/optimizers.f32 is short");
    fclose(file);
    test_maps();
    test_steps();
    test_rates();
    return tests_end();
}
