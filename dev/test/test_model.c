// test_model.c: tests of a whole model's parts, and of what a run decides with: everything that one process can check
// without the program. test_train.cu compares the model with float64, test_runs.c runs the program.
//
//   cc -std=c11 -O2 -ffp-contract=off -fopenmp -I. dev/test/test_model.c -o build/test_model -lm -pthread
//   build/test_model [--model | --sizes]      all parts, or one of them; an emulated GPU is fast enough for --model
//   alone
//
//   --model   1. the model       dropout, documents, the KV cache, overflows, two models in one process, validation
//             2. memory          --recompute, --offload, --train: the same bits with less memory
//             3. a run's rules   schedules, the guard, the loss scale, when to save and what to keep
//             4. text            sampling, generation
//   --sizes   5. sizes           presets; initial weights and gradients of models that need several pieces
//
// Run it in the root of the checkout.

#include "llmtrain/checkpoint/record.h"
#include "llmtrain/run/flops.h"
#include "llmtrain/run/plan.h"
#include "llmtrain/run/presets.h"
#include "llmtrain/run/validate.h"
#include "llmtrain/text/generate.h"
#include "small_model.h"

#include <fnmatch.h>

// ------------------------------------------------------------------------------------------------
// 1. The model

// With dropout, the loss must rise along the gradient as the gradient says: the forward and the backward drop the same
// elements. The difference quotient in floatX is accurate to the square root of its roundoff.
static void test_dropout(Family family) {
    enum { B = 2, T = 11 };
    Config c = small_config(family);
    Model model;
    int32_t tokens[B * T], targets[B * T];
    random_tokens(tokens, B * T, c.vocab, 1);
    random_tokens(targets, B * T, c.vocab, 2);
    small_create(&model, &c, small_options(B, T), 5);
    model.dropout.p = 0.2f;
    model.dropout.seed = 7;
    model.dropout.first_token = 1234;
    size_t P = model.parameters.flat_size, bytes = P * sizeof(floatX);
    double norm, loss = batch_gradients(&model, &norm, tokens, targets, B, T);
    float *direction = (float*)memory_allocate(P * sizeof(float));
    floatX *start = (floatX*)memory_allocate(bytes), *moved = (floatX*)memory_allocate(bytes);
    device_download(direction, model.flat.grads, P * sizeof(float), model.stream);
    device_download(start, model.flat.params, bytes, model.stream);
    double h = 0.25 * cbrt(FLOATX_EPSILON) / norm, value[2];
    for (int side = 0; side < 2; side++) {
        for (size_t i = 0; i < P; i++)
            moved[i] = floatX_of(float_of(start[i]) + (float)((side ? h : -h) / norm) * direction[i] * (float)norm);
        device_upload(model.flat.params, moved, bytes, model.stream);
        value[side] = batch_gradients(&model, NULL, tokens, targets, B, T);
    }
    double slope = (value[1] - value[0]) / (2 * h);
    if (FLOATX_IS_FLOAT)
        check_bound(fabs(slope / (norm * norm) - 1), 1e-3, "%s slope along the gradient, dropout 0.2",
                    family_name(family));
    device_upload(model.flat.params, start, bytes, model.stream);
    double again = batch_gradients(&model, NULL, tokens, targets, B, T);
    model.dropout.first_token++;
    double other = batch_gradients(&model, NULL, tokens, targets, B, T);
    check(again == loss && other != loss, "dropout is a function of the token's number");
    free(direction);
    free(start);
    free(moved);
    model_free(&model);
}

// Each use of dropout has its own mask. With the branches' weights 0 and biases 1, what each adds to the residual
// stream is its scaled mask; with token embeddings of 1, the stream also begins as a mask.
static void test_dropout_masks(void) {
    enum { B = 2, T = 24, MASKS = 5 };
    Config c = small_config(FAMILY_GPT2);
    Model model;
    Error error;
    int32_t tokens[B * T];
    size_t N = B * T, n = N * c.channels;
    float *stream[MASKS + 1], *values = (float*)memory_allocate(c.vocab * c.channels * sizeof(float));
    double worst = 0, spread = sqrt(0.25 * (double)n);
    bool scaled = true;
    random_tokens(tokens, N, c.vocab, 1);
    need(model_create(&model, &c, small_options(B, T), &error), "%s", error.text);
    for (size_t i = 0; i < c.vocab * c.channels; i++) values[i] = 1;
    bool set = flat_set_params(&model.flat, model.weights.token_embedding, 0, values, c.vocab * c.channels, &error);
    for (size_t l = 0; l < c.layers; l++) {
        const Block* b = &model.weights.blocks[l];
        set = set && flat_set_params(&model.flat, b->attention_out.bias, 0, values, c.channels, &error) &&
              flat_set_params(&model.flat, b->ffn_out.bias, 0, values, c.channels, &error);
    }
    need(set, "%s", error.text);
    model.dropout.p = 0.5f;
    model.dropout.seed = 7;
    model_upload(&model, tokens, NULL, B, T, false);
    model_forward(&model);
    const BlockActivations* blocks = model.activations->blocks;
    const floatX* sites[MASKS + 1] = {NULL, blocks[0].input, blocks[0].attention_residual, blocks[1].input,
                                      blocks[1].attention_residual, model.activations->output};
    for (int m = 0; m <= MASKS; m++) {
        stream[m] = (float*)memory_allocate(n * sizeof(float));
        if (m > 0) floats_download(stream[m], sites[m], n, &model);
    }
    for (int m = MASKS; m > 0; m--) for (size_t i = 0; i < n; i++) stream[m][i] -= stream[m - 1][i];  // stream[0] is 0
    for (int a = 1; a <= MASKS; a++) {
        double kept = 0;
        for (size_t i = 0; i < n; i++) {
            scaled = scaled && (stream[a][i] == 0 || stream[a][i] == 2);
            kept += stream[a][i] != 0;
        }
        worst = fmax(worst, fabs(kept - 0.5 * (double)n) / spread);
        for (int b = a + 1; b <= MASKS; b++) {
            double equal = 0;
            for (size_t i = 0; i < n; i++) equal += stream[a][i] == stream[b][i];
            worst = fmax(worst, fabs(equal - 0.5 * (double)n) / spread);
        }
    }
    check(scaled, "dropout 0.5 keeps an element twice as large or drops it");
    model.dropout.first_token = T;
    model_upload(&model, tokens + T, NULL, 1, T, false);
    model_forward(&model);
    floats_download(values, blocks[0].input, T * c.channels, &model);
    check(memcmp(values, stream[1] + T * c.channels, T * c.channels * sizeof(float)) == 0,
          "dropout drops the same of a batch and of its second half");
    check_bound(worst, 5, "dropout: elements kept, and equal in two sites, in standard deviations");
    for (int m = 0; m <= MASKS; m++) free(stream[m]);
    free(values);
    model_free(&model);
}

// A batch with attention masked between documents must give the same as each document alone: hidden states, loss and
// gradients. Learned positions are 0, since they count through the row.
static void test_documents(Family family) {
    enum { B = 2, T = 24, N = B * T, END = 60, COUNT = 6 };
    static const size_t ends[COUNT] = {7, 15, T - 1, T, N - 2, N - 1};  // last rows of documents
    Config c = small_config(family);
    Model joined, alone;
    Error error;
    ModelOptions options = small_options(B, T);
    int32_t tokens[N], targets[N];
    size_t C = c.channels, first = 0, counted = 0;
    random_tokens(tokens, N, END, 1);
    random_tokens(targets, N, END, 2);
    for (int i = 0; i < COUNT; i++) if (ends[i] != T - 1) tokens[ends[i]] = END;
    for (size_t i = 0; i < N; i++) if (tokens[i] == END) targets[i] = -1;
    need(model_create(&alone, &c, options, &error), "%s", error.text);
    options.mask_documents = true;
    options.end_of_text = END;
    need(model_create(&joined, &c, options, &error), "%s", error.text);
    size_t P = joined.parameters.flat_size;
    float *hidden = (float*)memory_allocate(N * C * sizeof(float)),
          *expected = (float*)memory_allocate(N * C * sizeof(float));
    float *grads = (float*)memory_allocate(P * sizeof(float)), *sum = (float*)memory_allocate(P * sizeof(float));
    float *part = (float*)memory_allocate(P * sizeof(float)),
          *zeros = (float*)memory_allocate(c.context * C * sizeof(float));
    for (Model* m = &joined; m; m = m == &joined ? &alone : NULL) {
        need(model_randomize(m, 5, &error), "%s", error.text);
        if (family == FAMILY_GPT2)
            need(flat_set_params(&m->flat, m->weights.position_embedding, 0, zeros, c.context * C, &error), "%s",
                 error.text);
    }
    double loss = batch_gradients(&joined, NULL, tokens, targets, B, T), losses = 0;
    floats_download(hidden, joined.activations->hidden, N * C, &joined);
    device_download(grads, joined.flat.grads, P * sizeof(float), joined.stream);
    for (size_t e = 0; e < P; e++) grads[e] *= (float)joined.flat.mean_factor;
    for (int i = 0; i < COUNT; first = ends[i++] + 1) {
        size_t length = ends[i] + 1 - first, count = targets_count(targets + first, length);
        double mean = batch_gradients(&alone, NULL, tokens + first, targets + first, 1, length);
        floats_download(expected + first * C, alone.activations->hidden, length * C, &alone);
        device_download(part, alone.flat.grads, P * sizeof(float), alone.stream);
        for (size_t e = 0; e < P; e++) sum[e] += (float)((double)count * alone.flat.mean_factor) * part[e];
        losses += mean * (double)count;
        counted += count;
    }
    for (size_t e = 0; e < P; e++) sum[e] /= (float)counted;
    const char* name = family_name(family);
    check_bound(relative_error(hidden, expected, N * C), bound_of(1e-5, c.layers),
                "%s hidden states of documents in one batch", name);
    check_bound(fabs(loss / (losses / (double)counted) - 1), bound_of(1e-5, c.layers),
                "%s loss of documents in one batch", name);
    for (size_t i = 0; i < joined.parameters.count; i++) {
        const Tensor* t = &joined.parameters.tensors[i];
        if (i == joined.weights.position_embedding.row) continue;
        check_bound(relative_error(grads + t->offset, sum + t->offset, tensor_elements(t)), bound_of(1e-5, c.layers),
                    "%s gradient over documents of %s", name, t->name);
    }
    tokens[0] = (tokens[0] + 1) % END;  // in the first document
    batch_gradients(&joined, NULL, tokens, targets, B, T);
    floats_download(expected, joined.activations->hidden, N * C, &joined);
    size_t others = (ends[0] + 1) * C;
    check(memcmp(hidden, expected, C * sizeof(float)) != 0 &&
              memcmp(hidden + others, expected + others, (N * C - others) * sizeof(float)) == 0,
          "%s: a document sees nothing of those before it", name);
    float* all[] = {hidden, expected, grads, sum, part, zeros};
    for (int i = 0; i < 6; i++) free(all[i]);
    model_free(&joined);
    model_free(&alone);
}

// Computes hidden states (B, T, C) of tokens (B, T) through the cache, `step` positions at a time.
static void cache_forward(float* hidden, Model* model, const int32_t* tokens, size_t B, size_t T, size_t step) {
    size_t C = model->config.channels;
    int32_t* part = (int32_t*)memory_allocate(B * step * sizeof(int32_t));
    float* rows = (float*)memory_allocate(B * step * C * sizeof(float));
    memset(model->cache.lengths, 0, B * sizeof(size_t));
    for (size_t t = 0, count; t < T; t += count) {
        count = min_size(step, T - t);
        for (size_t b = 0; b < B; b++) memcpy(part + b * count, tokens + b * T + t, count * sizeof(int32_t));
        model_upload(model, part, NULL, B, count, true);
        model_forward(model);
        floats_download(rows, model->activations->hidden, B * count * C, model);
        for (size_t b = 0; b < B; b++)
            memcpy(hidden + (b * T + t) * C, rows + b * count * C, count * C * sizeof(float));
    }
    free(part);
    free(rows);
}

// Whether few rows have the bits that they have among many: not on a GPU, nor in BF16 with AMX or BFMMLA.
static bool rows_are_exact(void) {
    return device_is_host() && !(FLOATX_DTYPE == DTYPE_BF16 && gemm_state.for_bf16->a_by_lane);
}

// With the cache, for one token or several at a time, one sequence or several, the results must equal those of the
// whole sequence without it: to the bit where rows are exact. A model reads on to the end of its context, also one that
// takes a third of it at a time.
static void test_cache(Family family) {
    enum { B = 3, T_MOST = 150, WAYS = 5 };
    const size_t T = device_is_host() ? T_MOST : T_MOST / 2;  // time is quadratic in it
    const struct {
        const char* name;
        size_t B, step;
    } ways[WAYS] = {{"token by token", B, 1}, {"70 tokens at a time", B, 70}, {"at once", B, T},
                    {"one sequence alone", 1, 17}, {"three times all that a model takes", B, T / 3}};
    Config c = small_config(family);
    Model model, third;
    int32_t tokens[B * T_MOST];
    c.context = T;
    const char* name = family_name(family);
    size_t C = c.channels, n = B * T * C;
    random_tokens(tokens, B * T, c.vocab, 3);
    float *whole = (float*)memory_allocate(n * sizeof(float)), *cached = (float*)memory_allocate(n * sizeof(float));
    for (int q8 = 0; q8 < 2; q8++) {
        ModelOptions options = small_options(B, T);
        options.kv_q8 = q8;
        small_create(&model, &c, options, 11);
        options.T = T / 3;
        small_create(&third, &c, options, 11);
        model_upload(&model, tokens, NULL, B, T, false);
        model_forward(&model);
        floats_download(whole, model.activations->hidden, n, &model);
        for (int w = 0; w < WAYS; w++) {
            size_t count = ways[w].B * T * C;
            cache_forward(cached, ways[w].step <= T / 3 ? &third : &model, tokens, ways[w].B, T, ways[w].step);
            double worst = relative_error(cached, whole, count);
            // 8 bits: an element of a key or value is rounded to multiples of 1/127 of its vector's largest element,
            // about sqrt(2 ln 2D) standard deviations: this is the error of one attention, and layers add independent
            // errors. (The operation alone is compared exactly in operations.h.)
            double rounding = sqrt(2 * log(2.0 * (double)config_head_size(&c)) / 12) / 127;
            double bound = bound_of(1e-5, c.layers) + (q8 ? rounding * sqrt((double)c.layers) : 0);
            check_bound(worst, bound, "%s, cache%s, %s", name, q8 ? " of 8 bits" : "", ways[w].name);
            if (q8 || !rows_are_exact()) continue;
            check(memcmp(cached, whole, count * sizeof(float)) == 0, "%s, cache, %s: the same bits", name,
                  ways[w].name);
        }
        model_free(&model);
        model_free(&third);
    }
    free(whole);
    free(cached);
}

// After kv_cache_copy the first positions of a sequence are those of another, in every layer, and all others are as
// they were.
static void test_cache_copy(bool q8) {
    enum { LAYERS = 3, SEQUENCES = 4, CONTEXT = 9, K = 2, D = 8, FILLED = 5, TO = 1, FROM = 2 };
    Arena arena = {.base = NULL};
    KvCache cache = {.layers = 0};
    Stream stream;
    Error error;
    need(device_open(&stream, false, &error), "%s", error.text);
    kv_cache_layout(&cache, &arena, LAYERS, SEQUENCES, CONTEXT, K, D, q8);
    need(arena_allocate(&arena, 1, stream, &error), "%s", error.text);
    kv_cache_layout(&cache, &arena, LAYERS, SEQUENCES, CONTEXT, K, D, q8);
    need(kv_cache_open(&cache), "memory for four lengths");
    const size_t vectors = LAYERS * SEQUENCES * CONTEXT * K, element = q8 ? 1 : sizeof(floatX);
    void* const arrays[] = {cache.keys, cache.values, cache.scales};
    const size_t position[] = {K * D * element, K * D * element, 2 * K * sizeof(float)};  // bytes of one
    for (int a = 0; a < (q8 ? 3 : 2); a++) {
        size_t bytes = position[a] * vectors / K;
        unsigned char* before = (unsigned char*)memory_allocate(bytes);
        for (size_t i = 0; i < bytes; i++) before[i] = (unsigned char)random_bits(5, RANDOM_TEST, (uint64_t)a, i);
        device_upload(arrays[a], before, bytes, stream);
        kv_cache_copy(&cache, TO, FROM, FILLED, stream);
        unsigned char* after = (unsigned char*)memory_allocate(bytes);
        device_download(after, arrays[a], bytes, stream);
        for (size_t l = 0; l < LAYERS; l++)
            for (size_t b = 0; b < SEQUENCES; b++)
                for (size_t t = 0; t < CONTEXT; t++) {
                    size_t at = ((l * SEQUENCES + b) * CONTEXT + t) * position[a];
                    size_t sequence = b == TO && t < FILLED ? (size_t)FROM : b;
                    size_t from = ((l * SEQUENCES + sequence) * CONTEXT + t) * position[a];
                    expect(memcmp(after + at, before + from, position[a]) == 0,
                           "array %d, layer %zu, sequence %zu, position %zu", a, l, b, t);
                }
        free(before);
        free(after);
    }
    for (size_t b = 0; b < SEQUENCES; b++)
        expect(cache.lengths[b] == (b == TO ? (size_t)FILLED : 0), "sequence %zu has %zu positions", b,
               cache.lengths[b]);
    verdict("cache%s: a sequence gets the first positions of another, and nothing else", q8 ? " of 8 bits" : "");
    kv_cache_close(&cache);
    device_free(arena.base, arena_bytes(&arena));
    device_close(stream);
}

// A gradient that is not finite gives the norm NaN, whether gradients are summed as floats or in fixed point.
static void test_overflow(void) {
    enum { B = 2, T = 11 };
    static const struct { ReduceKind reduce; const char* what; } cases[] = {
        {REDUCE_FLOAT, "an overflow, summed as floats"}, {REDUCE_EXACT, "an overflow, summed in fixed point"}};
    Config c = small_config(FAMILY_GPT2);
    int32_t tokens[B * T], targets[B * T];
    random_tokens(tokens, B * T, c.vocab, 1);
    random_tokens(targets, B * T, c.vocab, 2);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Model model;
        ModelOptions options = small_options(B, T);
        double norm;
        options.ranks.reduce = cases[i].reduce;
        small_create(&model, &c, options, 5);
        step_gradients(&model, &norm, tokens, targets, 1, 1, B, T);
        bool finite = isfinite(norm);
        step_gradients(&model, &norm, tokens, targets, 1e60, 1, B, T);
        check(finite && isnan(norm), "the norm is NaN only after %s", cases[i].what);
        model_free(&model);
    }
}

// Two models trained in turn in one process end with the bits of each trained alone.
static void test_two_models(void) {
    enum { B = 2, T = 9, STEPS = 5 };
    uint64_t hash[2][2];
    for (int together = 0; together < 2; together++) {
        Model model[2];
        int32_t tokens[B * T], targets[B * T];
        for (int i = 0; i < 2; i++) {
            Config c = small_config(i ? FAMILY_LLAMA : FAMILY_GPT2);
            small_create(&model[i], &c, small_options(B, T), 1);
        }
        for (int k = 0; k < 2 * STEPS; k++) {
            int i = together ? k % 2 : k / STEPS;
            uint64_t step = (uint64_t)(together ? k / 2 : k % STEPS);
            random_tokens(tokens, B * T, 61, 2 * step);
            random_tokens(targets, B * T, 61, 2 * step + 1);
            batch_gradients(&model[i], NULL, tokens, targets, B, T);
            model_update(&model[i], step + 1, 1e-3, 1.0);
        }
        for (int i = 0; i < 2; i++) {
            hash[together][i] = model_hash(&model[i]);
            model_free(&model[i]);
        }
    }
    check(memcmp(hash[0], hash[1], sizeof hash[0]) == 0, "two models in one process do not disturb each other");
}

// The validation loss of a model, B windows at a time; tokens and targets (B, T) in `batch`.
static double validation_loss(Model* model, const Dataset* data, size_t windows, size_t overlap, int32_t* batch,
                              size_t B, size_t T) {
    Validation v = {.data = data, .windows = windows, .overlap = overlap, .tokens = batch, .targets = batch + B * T,
                    .B = B, .T = T};
    Error error;
    need(model_validate(model, &v, &error) && !v.ended, "%s", error.text);
    return v.loss;
}

// The mean over validation windows does not depend on how they are batched.
static void test_validation(void) {
    enum { T = 8, TOKENS = 100 };
    Config c = small_config(FAMILY_GPT2);
    Model model;
    Dataset data;
    Error error;
    int32_t batch[2][5 * T];
    uint16_t text[TOKENS];
    double loss[2] = {0, 0}, part = 0, part_by_one = 0, overlapped = 0, expected = 0;
    for (size_t i = 0; i < TOKENS; i++) text[i] = (uint16_t)(random_bits(3, RANDOM_TEST, 8, i) % 61);
    need(dataset_from_memory(&data, text, sizeof text[0], TOKENS, &error), "%s", error.text);
    small_create(&model, &c, small_options(5, T), 4);
    loss[0] = validation_loss(&model, &data, 0, 0, batch[0], 5, T);
    loss[1] = validation_loss(&model, &data, 0, 0, batch[0], 1, T);
    part = validation_loss(&model, &data, 3, 0, batch[0], 2, T);
    check_bound(fabs(loss[0] / loss[1] - 1), FLOATX_EPSILON * 100, "validation does not depend on the batch");
    check(part != loss[0] && part > 0, "validation on some windows differs from all");
    part_by_one = validation_loss(&model, &data, 3, 0, batch[0], 1, T);
    check_bound(fabs(part / part_by_one - 1), FLOATX_EPSILON * 100,
                "validation on three windows does not depend on the batch");
    model.dropout.p = 0.5f;
    part = validation_loss(&model, &data, 0, 0, batch[0], 5, T);
    check(part == loss[0] && model.dropout.p == 0.5f, "validation runs without dropout, and leaves it as it was");
    model.dropout.p = 0;

    // With an overlap of T - 1 all tokens after the first T are scored one by one, each after T - 1 others.
    overlapped = validation_loss(&model, &data, 0, T - 1, batch[0], 5, T);
    for (size_t start = 0; start + T < TOKENS; start++) {
        for (size_t t = 0; t < T; t++) {
            batch[0][t] = text[start + t];
            batch[1][t] = start == 0 || t == T - 1 ? text[start + t + 1] : -1;
        }
        model_upload(&model, batch[0], batch[1], 1, T, false);
        float losses[T];
        model_forward(&model);
        model_head(&model, NULL, 0.0f);
        device_download(losses, model.activations->losses, sizeof losses, model.stream);
        for (size_t t = 0; t < T; t++) expected += (double)losses[t] / (TOKENS - 1);
    }
    check_bound(fabs(overlapped / expected - 1), FLOATX_EPSILON * 100,
                "validation with overlap scores each token once");
    dataset_close(&data);
    model_free(&model);
}

// ------------------------------------------------------------------------------------------------
// 2. Memory

static uint64_t recompute_steps(void) { return device_is_host() ? 20 : 3; }  // an emulated GPU is slow

// Trains some steps of two micro-batches, the second shorter, with dropout and masked documents. Returns a hash of
// all weights, master weights and optimizer state; bytes: memory of the model. budget: 0, or a memory budget that sets
// what is recomputed. offload: the bits of --offload.
static uint64_t recompute_run(double* bytes, const Config* c, RecomputeLevel level, int offload, double budget) {
    enum { B = 2, T = 12, N = B * T, END = 60 };
    Model model;
    Error error;
    ModelOptions options = small_options(B, T);
    StepFlags flags = {.stop = false};
    StepResult result;
    int32_t tokens[N], targets[N];
    double missing = 0;
    options.mask_documents = true;
    options.end_of_text = END;
    options.recompute = level;
    options.offload = offload;
    options.offload_dir = device_is_host() || level % 2 ? root : NULL;
    need(model_plan(&model, c, options, &error), "%s", error.text);
    if (budget > 0) missing = model_recompute_within(&model, budget);
    *bytes = missing > 0 ? INFINITY : (double)model.memory.total;
    need(model_allocate(&model, &error) && model_connect(&model, &error) && model_randomize(&model, 5, &error), "%s",
         error.text);
    model.dropout.p = 0.1f;
    for (uint64_t step = 1; step <= recompute_steps(); step++) {
        model_begin_step(&model, 1.0, 2);
        for (uint64_t i = 0; i < 2; i++) {
            random_tokens(tokens, N, c->vocab, 4 * step + 2 * i);
            random_tokens(targets, N, c->vocab, 4 * step + 2 * i + 1);
            tokens[7] = END;
            model.dropout.first_token = N * (2 * step + i);
            model_gradients(&model, tokens, targets, B, T - i);
            if (step % 8 == 2) model_losses(&model, tokens, targets, B, T);
        }
        need(model_finish_step(&model, &result, flags, &error), "%s", error.text);
        model_update(&model, step, 0.01, 1.0);
    }
    uint64_t hash = model_hash(&model);
    model_free(&model);
    return hash;
}

// Whatever the backward recomputes, training has the same bits, and each level takes less memory than the one before
// it; a budget between two levels is kept, and used except for less than an array of a block.
static void test_recompute(Family family, bool relatives) {
    static const char* const names[] = {"none", "norms", "gelu", "attention", "block"};
    Config c = small_config(family);
    double bytes[RECOMPUTE_AUTO], fitted;
    uint64_t hashes[RECOMPUTE_AUTO];
    const char* name = relatives ? "qwen" : family_name(family);
    c.layers = 5;
    c.qk_norm = c.qkv_bias = relatives;
    for (int level = 0; level < RECOMPUTE_AUTO; level++) {
        hashes[level] = recompute_run(&bytes[level], &c, (RecomputeLevel)level, 0, 0);
        if (level)
            check(hashes[level] == hashes[0] && bytes[level] < bytes[level - 1],
                  "%s, --recompute %s: less memory, the same bits after %d steps", name, names[level],
                  (int)recompute_steps());
        double moved;
        uint64_t hash = recompute_run(&moved, &c, (RecomputeLevel)level, OFFLOAD_ACTIVATIONS, 0);
        check(hash == hashes[0] && (level > RECOMPUTE_NONE || moved < bytes[level]),
              "%s, --recompute %s --offload activations: less memory, the same bits", name, names[level]);
    }
    double largest = 2.0 * 24 * 72 * (family == FAMILY_LLAMA ? 2 : 1) * sizeof(floatX);
    for (int part = 0; part <= 4; part++) {
        double budget = bytes[RECOMPUTE_BLOCK] + part * 0.25 * (bytes[0] - bytes[RECOMPUTE_BLOCK]);
        uint64_t hash = recompute_run(&fitted, &c, RECOMPUTE_NONE, 0, budget);
        check(hash == hashes[0] && fitted <= budget && fitted > budget - largest,
              "%s, --recompute auto, %d%% of what can be saved is kept: the same", name, 25 * part);
    }
    Model model;
    Error error;
    need(model_plan(&model, &c, small_options(2, 12), &error), "%s", error.text);
    check(model_recompute_within(&model, 0.5 * bytes[RECOMPUTE_BLOCK]) > 0,
          "a budget below the last level: what is missing is said");
    model_free(&model);
}

// Whether a name matches one of the comma-separated patterns.
static bool is_named(const char* list, const char* name) {
    char copy[160];
    bool named = false;
    snprintf(copy, sizeof copy, "%s", list);
    for (char* pattern = strtok(copy, ","); pattern; pattern = strtok(NULL, ","))
        named |= fnmatch(pattern, name, 0) == 0;
    return named;
}

// Frozen weights have no gradient, no state and no update; trained ones have the same gradient as when everything
// trains, to the bit. A checkpoint has the frozen weights too, written once, and a run that loads it continues with the
// same bits. The same with everything offloaded that can be.
static void test_frozen(Family family, const char* train) {
    enum { B = 2, T = 16 };
    Config c = small_config(family);
    Model all, model[2];
    Error error;
    ModelOptions options = small_options(B, T);
    int32_t tokens[B * T], targets[B * T];
    const char* out = "frozen";
    char hot[300];
    c.layers = 5;
    snprintf(hot, sizeof hot, SYSTEM_MEMORY_FOLDER "/llmtrain-frozen-%ld", (long)getpid());
    random_tokens(tokens, B * T, c.vocab, 1);
    random_tokens(targets, B * T, c.vocab, 2);
    small_create(&all, &c, options, 1);
    batch_gradients(&all, NULL, tokens, targets, B, T);
    options.train = train;
    for (int i = 0; i < 2; i++) {
        options.offload = i == 1 ? OFFLOAD_BOTH : OFFLOAD_NOTHING;
        options.offload_dir = i == 1 ? "." : NULL;
        small_create(&model[i], &c, options, 1);
    }
    double norm, squares = 0;
    batch_gradients(&model[0], &norm, tokens, targets, B, T);
    size_t n = all.parameters.flat_size, elements = 0, wrong = 0, started = 0;
    float *whole = (float*)memory_allocate(n * sizeof(float)), *part = (float*)memory_allocate(n * sizeof(float));
    floatX *first = (floatX*)memory_allocate(n * sizeof(floatX)), *last = (floatX*)memory_allocate(n * sizeof(floatX));
    device_download(whole, all.flat.grads, n * sizeof(float), all.stream);
    device_download(part, model[0].flat.grads, model[0].flat.sums_size * sizeof(float), model[0].stream);
    device_download(first, all.flat.params, n * sizeof(floatX), all.stream);
    device_download(last, model[0].flat.params, n * sizeof(floatX), model[0].stream);
    for (size_t i = 0; i < all.parameters.count; i++) {
        const Tensor *t = &all.parameters.tensors[i], *u = &model[0].parameters.tensors[i];
        float* gradient = flat_gradient(&model[0].flat, u);
        started += memcmp(first + t->offset, last + u->offset, t->size * sizeof(floatX)) != 0;
        wrong += u->trains != is_named(train, u->name) || u->trains != (gradient != NULL);
        if (!u->trains) continue;
        elements += round_up(u->size, 64);
        const float* mine = part + (gradient - model[0].flat.grads);
        wrong += memcmp(mine, whole + t->offset, t->size * sizeof(float)) != 0;
        for (size_t e = 0; e < t->size; e++) squares += (double)mine[e] * (double)mine[e];
    }
    check(started == 0, "--train %s: the same initial weights", train);
    check(wrong == 0, "--train %s: the same gradients", train);
    check(model[0].flat.sums_size == elements && model[0].flat.state_sizes[0] == elements,
          "--train %s: no gradients and no state for the rest", train);
    check_bound(fabs(norm / sqrt(squares) - 1), 1e-5, "--train %s: the norm is that of what trains", train);

    device_download(first, model[0].flat.params, n * sizeof(floatX), model[0].stream);
    RunRecord record = {.config = model[0].config, .state = run_state_begin(false, 1)}, saved;
    Saver saver;
    need(saver_open(&saver, &model[0].flat, false, 0, &error), "%s", error.text);
    for (uint64_t step = 1; step <= 8; step++) {
        for (int i = 0; i < 2 && step <= 2; i++) {
            batch_gradients(&model[i], NULL, tokens, targets, B, T);
            model_update(&model[i], step, 1e-2, 1.0);
        }
        JsonWriter manifest;
        record.state.step = step;
        record_write(&manifest, &record, &model[0].flat);
        saver_begin(&saver, step, step % 2 ? hot : out, &manifest);
        need(saver_end(&saver, &error), "%s", error.text);
    }
    saver_close(&saver);
    device_download(last, model[0].flat.params, n * sizeof(floatX), model[0].stream);
    wrong = 0;
    for (size_t i = 0; i < model[0].parameters.count; i++) {
        const Tensor* t = &model[0].parameters.tensors[i];
        bool same = memcmp(first + t->offset, last + t->offset, t->size * sizeof(floatX)) == 0;
        wrong += same == t->trains;
    }
    device_download(first, model[1].flat.params, n * sizeof(floatX), model[1].stream);
    check(memcmp(first, last, n * sizeof(floatX)) == 0, "--train %s: the same bits with --offload", train);
    check(wrong == 0, "--train %s: what trains changes, and nothing else", train);
    // Step 2, 4, 6, 8 in `out`, the others in memory, where there is one file.
    struct stat status[8];
    bool links = true;
    for (int i = 0; i < 8; i++) {
        const char* path = text_of("%s/step_%08d/" CHECKPOINT_FROZEN, i % 2 ? out : hot, i + 1);
        int like = i % 2 ? i - 4 : i - 2;
        links = links && stat(path, &status[i]) == 0 && (like < 0 || status[i].st_ino == status[like].st_ino);
    }
    check(links && status[1].st_ino != status[3].st_ino,
          "--train %s: the frozen weights are written twice to a disk, and once to memory", train);
    put_text(text_of("%s/step_00000008/" CHECKPOINT_FROZEN, out), "damaged");
    check(!model_load(&model[1], &saved, text_of("%s/step_00000008", out), false, &error) &&
              model_load(&model[1], &saved, text_of("%s/step_00000006", out), false, &error),
          "--train %s: if the frozen weights of one checkpoint are damaged, those of the one before it are not", train);
    const char* path = "frozen/step_00000002";
    need(model_load(&model[1], &saved, path, false, &error), "%s", error.text);
    for (int i = 0; i < 2; i++) {
        batch_gradients(&model[i], NULL, tokens, targets, B, T);
        model_update(&model[i], 3, 1e-2, 1.0);
    }
    device_download(first, model[0].flat.params, n * sizeof(floatX), model[0].stream);
    device_download(last, model[1].flat.params, n * sizeof(floatX), model[1].stream);
    check(memcmp(first, last, n * sizeof(floatX)) == 0,
          "--train %s: a run that is resumed continues with the same bits", train);
    need(model_load(&all, &saved, path, true, &error), "%s", error.text);  // here all of it trains
    free(first);
    free(last);
    free(whole);
    free(part);
    checkpoint_discard(out);
    checkpoint_discard(hot);
    model_free(&all);
    for (int i = 0; i < 2; i++) model_free(&model[i]);
}

// A checkpoint of another build, whose frozen weights are BF16 where this one's are FP16, or 16 bits where these are
// floats: values that both types have are loaded, also into weights that train here; for a value that this type lacks,
// the tensor is refused by name.
static void test_frozen_converted(void) {
    const Dtype other = FLOATX_DTYPE == DTYPE_BF16 ? DTYPE_F16 : DTYPE_BF16;
    const float odd = other == DTYPE_F16 ? 1 + 0x1p-10f : 0x1p-100f;
    Config c = small_config(FAMILY_GPT2);
    ModelOptions options = small_options(1, 8);
    Error error;
    const char* out = "converted";
    for (int i = 0; i < 3; i++) {  // frozen there and here; trains here; a value that is not exact
        Model model, loaded;
        Saver saver;
        JsonWriter manifest;
        float values[1000];
        uint16_t half[1000];
        options.train = "block.0.*,*weight,*embedding";
        need(model_create(&model, &c, options, &error), "%s", error.text);
        if (i == 1) options.train = NULL;
        need(model_create(&loaded, &c, options, &error), "%s", error.text);
        RunRecord record = {.config = model.config, .state = run_state_begin(false, 1)}, saved;
        record_write(&manifest, &record, &model.flat);
        need(saver_open(&saver, &model.flat, false, 0, &error), "%s", error.text);
        saver_begin(&saver, 1, out, &manifest);
        safetensors_writer_free(&saver.frozen);
        need(safetensors_create(&saver.frozen, "converted/step_00000001.tmp/" CHECKPOINT_FROZEN, &error), "%s",
             error.text);
        size_t frozen = 0, wrong = 0;
        for (size_t n = 0; n < model.parameters.count; n++) {
            const Tensor* t = &model.parameters.tensors[n];
            size_t shape[1] = {tensor_elements(t)};
            if (t->trains) continue;
            need(safetensors_declare(&saver.frozen, text_of("weight.%s", t->name), other, shape, 1, &error), "%s",
                 error.text);
        }
        need(safetensors_begin(&saver.frozen, &error), "%s", error.text);
        for (size_t k = 0; k < 1000; k++) values[k] = (float)((int)(k * 7 % 129) - 64) / 32;
        if (i == 2) values[5] = odd;
        for (size_t k = 0; k < 1000; k++)
            half[k] = other == DTYPE_F16 ? f16_from_float(values[k]) : bf16_from_float(values[k]);
        for (size_t n = 0; n < model.parameters.count; n++) {
            const Tensor* t = &model.parameters.tensors[n];
            if (t->trains) continue;
            need(tensor_elements(t) <= 1000, "%s has too many elements", t->name);
            frozen++;
            need(safetensors_write(&saver.frozen, half, tensor_elements(t) * sizeof half[0], &error), "%s", error.text);
        }
        need(safetensors_end(&saver.frozen, &error) && saver_end(&saver, &error), "%s", error.text);
        error.text[0] = 0;
        bool good =
            model_load(&loaded, &saved, "converted/step_00000001", i == 1, &error);  // frozen weights have no state
        for (size_t n = 0; good && n < model.parameters.count; n++) {
            const Tensor* t = &model.parameters.tensors[n];
            floatX here[1000];
            if (t->trains) continue;
            size_t offset = loaded.parameters.tensors[n].offset;
            device_download(here, loaded.flat.params + offset, tensor_elements(t) * sizeof(floatX), loaded.stream);
            for (size_t k = 0; k < tensor_elements(t); k++) wrong += float_of(here[k]) != values[k];
        }
        bool refuses = i == 2 && !FLOATX_IS_FLOAT;
        bool named = strstr(error.text, "build the program with the checkpoint's precision") != NULL;
        check(frozen > 0 && (refuses ? !good && named && strstr(error.text, "element 5;") : good && !wrong),
              "frozen weights in %s, %s: %s", DTYPES[other].safetensors,
              i == 0   ? "frozen here"
              : i == 1 ? "trained here"
                       : "one that is not exact",
              refuses ? "refused by name" : "the same values");
        saver_close(&saver);
        checkpoint_discard(out);
        model_free(&loaded);
        model_free(&model);
    }
}

static void test_frozen_patterns(void) {
    static const char* const bad[] = {"", "blok.*", "block.0.*,head"};
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        Model model;
        Error error;
        Config c = small_config(FAMILY_GPT2);
        ModelOptions options = small_options(1, 4);
        options.train = bad[i];
        error.text[0] = 0;
        bool planned = model_plan(&model, &c, options, &error);
        check(!planned && strstr(error.text, "--train"), "--train of a pattern that matches nothing is refused");
    }
    static const char* const patterns[] = {"block.1.*,final_norm_weight", "block.3.*norm?_weight",
                                           "*.qkv_weight"};
    for (size_t i = 0; i < 3; i++) {
        test_frozen(FAMILY_GPT2, patterns[i]);
        test_frozen(FAMILY_LLAMA, patterns[i]);
    }
    test_frozen(FAMILY_GPT2, "*_bias");
    test_frozen(FAMILY_GPT2, "position_embedding,final_norm_*");
}

// ------------------------------------------------------------------------------------------------
// 3. A run's rules

static void test_schedules(void) {
    Schedule s = {.kind = SCHEDULE_CONSTANT, .lr = 1.0, .final_fraction = 0.1, .warmup = 10, .steps = 110,
                  .decay_fraction = 0.2, .decay_every = 20, .decay_factor = 0.5};
    check_bound(fabs(schedule_lr(&s, 0) - 0.1), 1e-12, "schedule: warm-up starts at lr / warmup");
    check_bound(fabs(schedule_lr(&s, 9) - 1.0), 1e-12, "schedule: warm-up ends at lr");
    check_bound(fabs(schedule_lr(&s, 109) - 1.0), 1e-12, "schedule: constant");
    for (int kind = SCHEDULE_LINEAR; kind <= SCHEDULE_EXPONENTIAL; kind++) {
        char name[32];
        s.kind = (ScheduleKind)kind;
        choice_name(SCHEDULE_NAMES, kind, name, sizeof name);
        bool falls = true;
        for (uint64_t step = 10; step < 130; step++)
            falls = falls && schedule_lr(&s, step + 1) <= schedule_lr(&s, step);
        check(falls && schedule_lr(&s, 10) == 1.0, "schedule: %s begins at lr and never rises", name);
        check_bound(fabs(schedule_lr(&s, 109) - (kind == SCHEDULE_STEP ? 0.0625 : 0.1)), 1e-12,
                    "schedule: %s at the last step", name);
    }
    s.kind = SCHEDULE_COSINE;
    s.steps = 111;
    check_bound(fabs(schedule_lr(&s, 60) - 0.55), 1e-12, "schedule: cosine half way");
    s.kind = SCHEDULE_WSD;
    check_bound(fabs(schedule_lr(&s, 89) - 1.0), 1e-12, "schedule: wsd is flat until its fall");
}

static void test_guard(void) {
    GuardOptions o = {.clip = 1, .spike_sigma = 4, .spike_skip = 20, .spike_warmup = 20, .scale_growth = 3};
    RunState s = run_state_begin(false, 1);
    double factor = 0;
    bool all = true;
    for (int i = 0; i < 40; i++) all = all && guard_step(&s, &factor, &o, i % 2 ? 0.5 : 0.7);
    check(all && factor == 1.0, "guard: usual norms pass whole");
    check_bound(fabs(s.norms.mean - 0.6), 0.01, "guard: mean of the norms");
    check_bound(fabs(sqrt(s.norms.variance) - 0.1), 0.01, "guard: deviation of the norms");
    check(!guard_step(&s, &factor, &o, 1000.0), "guard: a norm over 20 means is skipped");
    check_bound(s.norms.mean, 0.61, "guard: a skipped norm is remembered only up to the bound");
    RunState first = run_state_begin(false, 1);
    for (int i = 0; i < 20; i++) guard_step(&first, &factor, &o, 0.5);
    check(!guard_step(&first, &factor, &o, 1000.0), "guard: the first norm after --spike-warmup is judged");
    double mean = s.norms.mean;
    for (int i = 0; i < 200; i++) guard_step(&s, &factor, &o, i % 2 ? 0.5 : 0.7);
    RunState late = s;
    mean = late.norms.mean;
    guard_step(&late, &factor, &o, 0.9);
    check_bound(fabs(late.norms.mean - (mean + (0.9 - mean) / 100)), 1e-12,
                "guard: in the long run a norm weighs 1/100");
    check(!guard_step(&s, &factor, &o, NAN) && !guard_step(&s, &factor, &o, INFINITY),
          "guard: NaN and infinity are skipped");
    double bound = fmax(1.0, s.norms.mean + 4 * sqrt(s.norms.variance));
    guard_step(&s, &factor, &o, 3.0);
    check_bound(fabs(factor - bound / 3.0), 1e-12, "guard: a large norm is clipped to the bound");
    RunState shifted = s;
    int skipped = 0;
    while (skipped < 1000 && !guard_step(&shifted, &factor, &o, 1000.0)) skipped++;
    check_bound(skipped, 999, "guard: norms that stay high are taken in the end, after so many steps");
    GuardOptions plain = {.clip = 1, .spike_warmup = 1, .scale_growth = 3};
    check(guard_step(&s, &factor, &plain, 1000) && factor == 1e-3, "guard: with both rules off only --clip holds");
    GuardOptions unclipped = o;
    unclipped.clip = 0;
    RunState calm = run_state_begin(false, 1);
    for (int i = 0; i < 40; i++) guard_step(&calm, &factor, &unclipped, i % 2 ? 0.5 : 0.7);
    check(guard_step(&calm, &factor, &unclipped, 6.0) && factor == 1.0, "guard: with --clip 0 nothing is clipped");
    mean = calm.norms.mean;
    check(!guard_step(&calm, &factor, &unclipped, 1e6), "guard: with --clip 0 a spike is skipped");
    check_bound(fabs(calm.norms.mean - (mean + 19 * mean / 42)), 1e-9, "guard: and moves the mean as 20 means would");
    RunState young = run_state_begin(false, 1);
    check(guard_step(&young, &factor, &o, 1.0) && guard_step(&young, &factor, &o, 100.0) && factor == 0.01,
          "guard: nothing is skipped before it has seen enough");
    GuardOptions untraced = o;
    untraced.spike_trace = 0;
    untraced.spike_loss = 5;
    RunState seen = run_state_begin(false, 1);
    for (int i = 0; i < 40; i++) guard_traces(&seen, &untraced, i % 2 ? 2.0 : 2.1, 0.5, true, 1.0);
    RunState spiking = seen;
    check(guard_traces(&seen, &untraced, NAN, NAN, false, 0.0) == SPIKE_NONE &&
              guard_traces(&spiking, &untraced, 9.0, 0.5, true, 1.0) == SPIKE_LOSS,
          "traces: with --spike-trace 0 a loss of NaN is no spike, one far above the mean is");
    o.dynamic_scale = true;
    RunState f = run_state_begin(true, 1024);
    guard_step(&f, &factor, &o, INFINITY);
    check(f.loss_scale == 512, "loss scale: halves on overflow");
    for (int i = 0; i < 3; i++) guard_step(&f, &factor, &o, 1.0);
    check(f.loss_scale == 1024 && f.scale_good == 0, "loss scale: doubles after enough good steps");
    for (int i = 0; i < 10; i++) guard_step(&f, &factor, &o, i % 3 == 2 ? NAN : 1.0);
    check(f.loss_scale == 128, "loss scale: only consecutive good steps count");
    for (int i = 0; i < 100; i++) guard_step(&f, &factor, &o, 1.0);
    check(f.loss_scale == 0x1p24, "loss scale: grows to 2^24");
    for (int i = 0; i < 100; i++) guard_step(&f, &factor, &o, INFINITY);
    check(f.loss_scale == 1, "loss scale: falls to 1");
    check(run_state_begin(false, 1024).loss_scale == 1 && run_state_begin(true, 1024).loss_scale == 1024,
          "loss scale: only FP16 builds have one");
}

// Minimum, median and maximum over three ranks; NaN is the largest, and the median of two ranks the lower.
static void test_statistics(void) {
    double gathered[3] = {3, NAN, 1}, sorted[3], min, median, max;
    RankStats stats = {.world = 3, .count = 1, .gathered = gathered, .sorted = sorted};
    size_t rank = stats_min_median_max(&min, &median, &max, &stats, 0, 0);
    check(rank == 1 && min == 1 && median == 3 && isnan(max), "statistics of ranks: NaN is the largest");
    stats.world = 2;
    gathered[1] = 4;
    rank = stats_min_median_max(&min, &median, &max, &stats, 0, 0);
    check(rank == 1 && min == 3 && median == 3 && max == 4, "statistics of ranks: the lower of two medians");
    stats.world = 3;
    stats.options.pp = 2;
    rank = stats_min_median_max(&min, &median, &max, &stats, 0, 0);
    check(rank == 0 && min == 1 && median == 1 && max == 3, "statistics of the ranks of a stage");
    double busy[6] = {9, 30, 10, 31, 14, 29};
    RankStats stages = {.world = 6, .options = {.pp = 2}, .count = 1, .gathered = busy, .sorted = sorted};
    StepResult result = {0};
    stats_find_slowest(&result, &stages, 0);
    check(result.slowest == 4 && result.busy_median == 10 && result.busy_max == 14,
          "statistics of ranks: a rank is slow beside those of its stage");
}

// The most steps lost by a crash at any point: an asynchronous save is complete when the next one begins.
static uint64_t cadence_most_lost(const Cadence* c) {
    uint64_t durable = 0, last = 0, most = 0;
    for (uint64_t step = 1; step <= 200; step++) {
        if (step - durable > most) most = step - durable;
        if (!cadence_due(c, step)) continue;
        durable = c->async ? last : step;
        last = step;
    }
    return most;
}

static void test_cadence(void) {
    Cadence c;
    Error error;
    bool promise = true, whole = true;
    char text[32];
    for (uint64_t every = 1; every <= 20; every++) {
        for (int async = 0; async < 2; async++) {
            snprintf(text, sizeof text, "%llu", (unsigned long long)every);
            need(cadence_parse(&c, text, 24, async, &error), "%s", error.text);
            promise = promise && cadence_most_lost(&c) == (c.async ? 2 : 1) * every && c.async == (async && every > 1);
            for (uint64_t step = 1; step <= 100; step++) whole = whole && (step % every != 0 || cadence_due(&c, step));
        }
    }
    check(promise, "cadence: a crash loses --ckpt-every steps at most, and those of the write in flight");
    check(whole, "cadence: there is a checkpoint of every multiple");
    need(cadence_parse(&c, "10min", 24, false, &error), "%s", error.text);
    cadence_start(&c, 5e3);
    check(!cadence_due_now(&c, 604e3) && cadence_due_now(&c, 606e3) && !cadence_due(&c, 10), "cadence: minutes");

    // Steps of 100 ms; a save stalls training for 300 ms, and makes 5 steps 40 ms longer.
    need(cadence_parse(&c, "auto", 1, true, &error), "%s", error.text);
    cadence_start(&c, 0);
    for (int i = 0; i < 7; i++) cadence_count_step(&c, 100, false);
    cadence_count_save(&c, 60e3, true);
    c.cost_ms = 300;
    for (int i = 0; i < 5; i++) cadence_count_step(&c, 140, true);
    check(!cadence_choose(&c), "cadence: auto chooses nothing before a checkpoint is there");
    c.took_ms = 1000;
    check(cadence_choose(&c) && !cadence_choose(&c), "cadence: auto chooses once");
    check_bound(fabs(c.every_ms - 60e3), 1e-9, "cadence: auto takes sqrt(2 x 500 ms x 1 h), a minute");
    check(!cadence_due_now(&c, 119e3) && cadence_due_now(&c, 121e3), "cadence: from the beginning of the last save");
    cadence_count_save(&c, 100e3, false);
    check(cadence_due_now(&c, 121e3), "cadence: a save in a tier does not delay the next checkpoint");
    cadence_count_save(&c, 121e3, true);
    check_bound(fabs(c.costs_ms - 500), 1e-9, "cadence: and adds up what saves have cost");
    c.took_ms = 90e3;
    check(cadence_choose(&c) && c.every_ms == 90e3, "cadence: a save has time to end");
}

// Applies the rule to the checkpoints of the steps in `from`, newest first; returns those that it keeps. Multiples of
// 100 were saved by --ckpt-every, the others by signals.
static const char* kept(const KeepRule* rule, const uint64_t* from) {
    static char text[256];
    uint64_t counted = 0;
    size_t used = 0;
    for (size_t i = 0; from[i] > 0; i++) {
        SaveKind kind = from[i] % 100 == 0 ? SAVE_REQUESTED : SAVE_END;
        if (i > 0 && !keep_rule_keeps(rule, from[i], from[i + 1], counted)) continue;
        counted += keep_rule_counts(rule, kind);
        used += (size_t)snprintf(text + used, sizeof text - used, "%llu ", (unsigned long long)from[i]);
    }
    return text;
}

static void test_keeping(void) {
    const uint64_t from[] = {630, 600, 530, 500, 400, 300, 250, 200, 100, 0};
    const KeepRule all = {.newest = 0}, two = {.newest = 2}, and_some = {.newest = 2, .forever = 240},
                   rewinds = {.newest = 2, .rewinds = true};
    check(strcmp(kept(&all, from), "630 600 530 500 400 300 250 200 100 ") == 0, "keeping: all");
    check(strcmp(kept(&two, from), "630 600 ") == 0, "keeping: the newest");
    check(strcmp(kept(&and_some, from), "630 600 500 250 ") == 0, "keeping: and the first from each multiple on");
    check(strcmp(kept(&rewinds, from), "630 600 530 500 ") == 0, "keeping: and enough to go back to");
}

// A struct read from files that lack a member: accepted if the member's row gives a default.
static void test_missing_fields(void) {
    typedef struct { uint64_t layers; double scale; bool tied; int family; } Sizes;
    static const Field fields[] = {
        FIELD_COUNT(Sizes, layers, "layers", 0, 0, NULL, NULL),
        FIELD_REAL(Sizes, scale, "scale", 0, 0, "2.5", NULL),
        FIELD_SWITCH(Sizes, tied, "tied", "on", NULL),
        FIELD_CHOICE(Sizes, family, "family", FAMILY_NAMES, "llama", NULL)};
    static const struct { const char* text; bool reads; double scale; bool tied; int family; } files[] = {
        {"{\"layers\": 3, \"scale\": 0.5, \"tied\": false, \"family\": \"gpt2\"}", true, 0.5, false, FAMILY_GPT2},
        {"{\"layers\": 3}", true, 2.5, true, FAMILY_LLAMA},
        {"{\"layers\": 3, \"tied\": false}", true, 2.5, false, FAMILY_LLAMA},
        {"{\"scale\": 0.5, \"tied\": false, \"family\": \"gpt2\"}", false, 0, false, 0},
        {"{\"layers\": 3, \"scale\": null}", false, 0, false, 0},
        {"{\"layers\": 3, \"family\": \"bert\"}", false, 0, false, 0}};
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        Json json;
        Error error;
        Sizes s;
        memset(&s, 0, sizeof s);
        need(json_parse(&json, files[i].text, strlen(files[i].text), "file", &error), "%s", error.text);
        bool reads = fields_read(&s, fields, COUNT_OF(fields), &json, 0);
        bool right = s.layers == 3 && s.scale == files[i].scale && s.tied == files[i].tied &&
            s.family == files[i].family;
        check(reads == files[i].reads && (!reads || right), "members of %s: %s", files[i].text,
              files[i].reads ? "read" : "refused");
        json_free(&json);
    }
}

// A first save that fails before it opens a file must not close another one.
static void test_failed_save(void) {
    Config c = small_config(FAMILY_GPT2);
    RunRecord record = {.config = c, .state = run_state_begin(false, 1)};
    Model model;
    Error error;
    files_open_standard();
    put_text("taken", "a file");
    small_create(&model, &c, small_options(1, 1), 1);
    check(!model_save(&model, &record, "taken", &error), "a save into what is no directory fails");
    check(fcntl(STDIN_FILENO, F_GETFD) != -1, "and leaves standard input open");
    model_free(&model);
}

// ------------------------------------------------------------------------------------------------
// 4. Text

static void test_sampling(void) {
    enum { V = 5, DRAWS = 20000 };
    const float logit[V] = {0.0f, 2.0f, 1.0f, -1.0f, 2.0f};
    floatX logits[V];
    Candidate candidates[V];
    SamplingOptions o = {.top_p = 1, .seed = 3};
    for (int v = 0; v < V; v++) logits[v] = floatX_of(logit[v]);
    check(sample_token(candidates, logits, NULL, 0, &o, 0.99f, V) == 1,
          "sampling: temperature 0 takes the likeliest, the first among equals");
    o.temperature = 0.5;
    int seen[V] = {0};
    double sum = 0.0, worst = 0.0;
    for (int v = 0; v < V; v++) sum += exp(2 * (double)logit[v]);
    for (int i = 0; i < DRAWS; i++)
        seen[sample_token(candidates, logits, NULL, 0, &o, random_uniform(1, RANDOM_TEST, 4, (uint64_t)i), V)]++;
    for (int v = 0; v < V; v++) {
        double p = exp(2 * (double)logit[v]) / sum;
        worst = fmax(worst, fabs(seen[v] - (int)DRAWS * p) / sqrt((int)DRAWS * p * (1 - p)));
    }
    check_bound(worst, 4, "sampling: frequencies at temperature 0.5, in deviations");
    o.top_k = 2;
    bool inside = true;
    for (int i = 0; i < 1000; i++)
        inside = inside && logit[sample_token(candidates, logits, NULL, 0, &o, (float)i / 1000, V)] == 2.0f;
    check(inside, "sampling: top-k keeps the k likeliest");
    o.top_k = 0;
    o.top_p = 0.4;
    inside = true;
    for (int i = 0; i < 1000; i++)
        inside = inside && sample_token(candidates, logits, NULL, 0, &o, (float)i / 1000, V) == 1;
    check(inside, "sampling: top-p keeps the smallest set that reaches p");
    // At temperature 1 the probabilities relative to the largest are 1, e^-1, e^-2, e^-3.
    o.top_p = o.temperature = 1;
    bool kept[2][V] = {{false}};
    for (int i = 0; i < 2000; i++) {
        o.min_p = i % 2 ? 0.3 : 0.1;
        kept[i % 2][sample_token(candidates, logits, NULL, 0, &o, (float)i / 2000, V)] = true;
    }
    check(kept[1][2] && !kept[1][0] && kept[0][0] && !kept[0][3],
          "sampling: min-p leaves out what is below its share of the largest");
    // Of the 4 likeliest tokens the first has 0.40 and the second as much: after min-p the first would have a half.
    SamplingOptions three = {.temperature = 1, .top_k = 4, .top_p = 0.45, .seed = 3, .min_p = 0.5};
    bool of_k[V] = {false};
    for (int i = 0; i < 1000; i++)
        of_k[sample_token(candidates, logits, NULL, 0, &three, (float)i / 1000, V)] = true;
    check(of_k[1] && of_k[4] && !of_k[2] && !of_k[0], "sampling: top-k, then top-p of what it left, then min-p");
    const int32_t text[3] = {1, 4, 1};
    o.min_p = o.temperature = 0;
    o.repetition_penalty = 4;  // 2 / 4 is below 1
    check(sample_token(candidates, logits, text, 3, &o, 0.5f, V) == 2 &&
              sample_token(candidates, logits, text, 1, &o, 0.5f, V) == 4,
          "sampling: the repetition penalty divides positive logits once");
    o.repetition_penalty = 1.5;
    check(sample_token(candidates, logits, text, 3, &o, 0.5f, V) == 1,
          "sampling: and so little that the likeliest stays");
    const float low[V] = {-2.0f, -1.0f, -1.25f, -3.0f, -4.0f};
    for (int v = 0; v < V; v++) logits[v] = floatX_of(low[v]);
    check(sample_token(candidates, logits, text, 3, &o, 0.5f, V) == 2,
          "sampling: the repetition penalty multiplies negative logits");
}

static int compare_candidates(const void* a, const void* b) {
    return candidate_before(*(const Candidate*)a, *(const Candidate*)b) ? -1 : 1;
}

// sample_token sorts only as much as it needs. It must draw the first candidate of the sorted list at which the
// cumulative probability reaches the random number: for numbers up to 1 - 2^-24, probabilities down to e^-30.
static void test_sampling_order(void) {
    enum { V = 3000 };
    static floatX logits[V];
    static Candidate sorted[V], candidates[V];
    SamplingOptions o = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};
    for (size_t v = 0; v < V; v++) logits[v] = floatX_of(30 * random_uniform(3, RANDOM_TEST, 0, v));
    candidates_read(sorted, logits, NULL, 0, 1, V);
    float sum = candidates_softmax(sorted, 1, V);
    qsort(sorted, V, sizeof(Candidate), compare_candidates);
    size_t different = 0, last = 0;
    for (int i = 1; i <= 24; i++) {
        float uniform = 1 - ldexpf(1, -i), all = sum, reached;
        for (int round = 0; round < 2; round++, all = reached) {  // the sorted sum may stay below the softmax's
            reached = 0;
            for (last = 0; last < V; last++) {
                reached += sorted[last].probability;
                if (uniform * all < reached) break;
            }
            if (last < V) break;
        }
        different += sample_token(candidates, logits, NULL, 0, &o, uniform, V) != sorted[last].token;
        o.top_k = i * i;  // the last of them, for numbers near 1
        different += sample_token(candidates, logits, NULL, 0, &o, 1 - 0x1p-24f, V) != sorted[i * i - 1].token;
        o.top_k = 0;
    }
    check(different == 0 && last > 1000, "sampling: the token that all candidates in order give");
}

// Generates `samples` texts that begin with `known` tokens, up to `total`: tokens (samples, total).
static void generate_all(int32_t* tokens, Model* model, const SamplingOptions* o, size_t samples, size_t known,
                         size_t total) {
    Generator g;
    Error error;
    need(generator_open(&g, model, o, samples, total, &error), "%s", error.text);
    generator_append(&g, tokens, known);
    while (g.rows[0].known < total) generator_step(&g);
    memcpy(tokens, g.tokens, samples * total * sizeof(int32_t));
    generator_close(&g);
}

// Each token of each sample is the one that sample_token draws with the random number of its sample and position, from
// the logits of a whole forward of the sample's own text, without a cache, and with that text's penalty.
static void test_generated_tokens(Family family) {
    enum { SAMPLES = 5, PROMPT = 8, TOTAL = 24 };
    static const struct { double temperature, penalty; uint64_t top_k; } ways[] = {
        {1, 1, 0}, {0.7, 1.8, 0}, {0, 1.5, 0}, {1, 0.6, 7}};
    Config c = small_config(family);
    Model model, whole;
    ModelOptions options = small_options(SAMPLES, 3), of_whole = small_options(1, TOTAL);
    options.training = of_whole.training = false;
    options.cached_sequences = SAMPLES;
    small_create(&model, &c, options, 2);
    small_create(&whole, &c, of_whole, 2);
    floatX logits[61];
    Candidate candidates[61];
    need(c.vocab == COUNT_OF(logits), "a vocabulary of 61");
    for (size_t w = 0; w < COUNT_OF(ways); w++) {
        SamplingOptions o = {.temperature = ways[w].temperature, .top_k = ways[w].top_k, .top_p = 1, .seed = 4,
                             .repetition_penalty = ways[w].penalty};
        int32_t tokens[SAMPLES * TOTAL];
        size_t repeated = 0;
        random_tokens(tokens, PROMPT, c.vocab, 9);
        generate_all(tokens, &model, &o, SAMPLES, PROMPT, TOTAL);
        for (size_t s = 0; s < SAMPLES; s++) {
            const int32_t* text = tokens + s * TOTAL;
            for (size_t t = PROMPT; t < TOTAL; t++) {
                model_upload(&whole, text, NULL, 1, t, false);
                model_forward(&whole);
                model_logits(&whole, t - 1, 1);
                device_download(logits, whole.activations->logits, sizeof logits, whole.stream);
                float uniform = random_uniform(o.seed, RANDOM_SAMPLING, s, t);
                int32_t token = sample_token(candidates, logits, text, t, &o, uniform, c.vocab);
                expect(text[t] == token, "sample %zu, token %zu is %d, not %d", s, t, text[t], token);
                for (size_t i = 0; i < t; i++) repeated += text[i] == text[t];
            }
        }
        verdict("%s, generation: temperature %g, penalty %g, top-k %d: the tokens of all samples (%zu repeat)",
                family_name(family), o.temperature, o.repetition_penalty, (int)o.top_k, repeated);
    }
    model_free(&model);
    model_free(&whole);
}

// All samples have the same hidden states after a prompt that is read once for all: to the bit those of one alone, with
// either kind of cache.
static void test_generation_shares(bool q8) {
    enum { SAMPLES = 3, PROMPT = 13 };
    Config c = small_config(FAMILY_LLAMA);
    Model model;
    Error error;
    ModelOptions options = small_options(SAMPLES, 4);
    SamplingOptions o = {.temperature = 0, .top_p = 1, .seed = 3, .repetition_penalty = 1};
    int32_t prompt[PROMPT];
    float alone[40], hidden[SAMPLES * 40];
    options.training = false;
    options.kv_q8 = q8;
    need(c.channels == COUNT_OF(alone), "40 channels");
    small_create(&model, &c, options, 2);
    random_tokens(prompt, PROMPT, c.vocab, 8);
    for (int step = 1; step <= 3; step++) {
        for (size_t samples = 1; samples <= SAMPLES; samples += SAMPLES - 1) {
            Generator g;
            need(generator_open(&g, &model, &o, samples, PROMPT + 3, &error), "%s", error.text);
            generator_append(&g, prompt, PROMPT);
            for (int i = 0; i < step; i++) generator_step(&g);
            floats_download(samples == 1 ? alone : hidden, model.activations->hidden, samples * c.channels, &model);
            generator_close(&g);
        }
        for (size_t s = 0; s < SAMPLES; s++) {
            double found = relative_error(hidden + s * c.channels, alone, c.channels);
            expect(found <= (rows_are_exact() ? 0 : bound_of(1e-5, c.layers)), "sample %zu, step %d: an error of %g", s,
                   step, found);
        }
    }
    verdict("generation%s: every sample of several attends to what one alone does", q8 ? ", cache of 8 bits" : "");
    model_free(&model);
}

// Prompts of different lengths in one batch, of which a row that is done takes the next, or leaves: each sample is the
// one that its number, prompt and length give alone, and no row is computed for those that are done. Sample 4 outgrows
// the context, and moves to row 0 while it is generated.
static void test_generation_lengths(Family family) {
    enum { ROWS = 3, COUNT = 8, SIZE = 60 };
    static const size_t prompts[COUNT] = {5, 1, 12, 7, 7, 3, 20, 4}, more[COUNT] = {6, 9, 1, 3, 20, 2, 2, 5};
    Config c = small_config(family);
    Model model;
    Generator g;
    Error error;
    ModelOptions options = small_options(ROWS, 3);
    SamplingOptions o = {.temperature = 1, .top_p = 1, .seed = 3, .repetition_penalty = 1.2};
    options.training = false;
    int32_t texts[COUNT][SIZE], alone[SIZE];
    size_t next = 0, computed = 0, needed = 0, differ = 0;
    for (size_t i = 0; i < COUNT; i++) {
        random_tokens(texts[i], SIZE, c.vocab, i == 4 ? 3 : i);  // 3 and 4 have the same prompt
        needed += more[i];
    }
    small_create(&model, &c, options, 2);
    need(generator_open(&g, &model, &o, ROWS, SIZE, &error), "%s", error.text);
    for (; next < ROWS; next++) generator_start(&g, next, next, texts[next], prompts[next]);
    while (g.samples > 0) {
        generator_step(&g);
        computed += g.samples;
        expect(model.activations->B == g.samples && model.activations->T == 1, "a batch of %zu", model.activations->B);
        for (size_t r = g.samples; r-- > 0;) {
            size_t i = (size_t)g.rows[r].number, total = prompts[i] + more[i];
            if (g.rows[r].known < total) continue;
            memcpy(texts[i], g.tokens + r * g.size, total * sizeof(int32_t));
            if (next == COUNT) generator_drop(&g, r);
            else generator_start(&g, r, next, texts[next], prompts[next]), next++;
        }
    }
    expect(computed == needed, "%zu tokens were computed, not %zu", computed, needed);
    generator_close(&g);
    for (size_t i = 0; i < COUNT; i++) {
        size_t total = prompts[i] + more[i];
        need(generator_open(&g, &model, &o, 1, SIZE, &error), "%s", error.text);
        generator_start(&g, 0, i, texts[i], prompts[i]);
        while (g.rows[0].known < total) generator_step(&g);
        memcpy(alone, g.tokens, total * sizeof(int32_t));
        generator_close(&g);
        expect(memcmp(alone, texts[i], total * sizeof(int32_t)) == 0, "sample %zu is not the one alone", i);
        differ += memcmp(texts[i] + prompts[i], texts[(i + 1) % COUNT] + prompts[i], sizeof(int32_t)) != 0;
    }
    expect(memcmp(texts[3] + prompts[3], texts[4] + prompts[3], more[3] * sizeof(int32_t)) != 0 && differ > COUNT / 2,
           "samples are the same");
    verdict("%s, generation: samples of different lengths, together and in turn, are those alone", family_name(family));
    model_free(&model);
}

// The log-probabilities of drawn tokens are minus the losses of a training forward of the same text: to the bit in FP32
// on a CPU. At another temperature they are those of a softmax in double of that model's logits.
static void test_logps(Family family) {
    enum { ROWS = 3, PROMPT = 5, TOTAL = 24 };
    static const double temperatures[] = {1, 0.6, 2.5, 0};
    Config c = small_config(family);
    Model model, trained;
    Error error;
    ModelOptions options = small_options(ROWS, 3);
    options.training = false;
    small_create(&model, &c, options, 2);
    small_create(&trained, &c, small_options(1, TOTAL - 1), 2);
    size_t V = c.vocab;
    for (size_t k = 0; k < COUNT_OF(temperatures); k++) {
        // The cuts and the penalty change what is drawn, and neither logarithm.
        SamplingOptions o = {.temperature = temperatures[k], .top_k = 9, .top_p = 0.9, .seed = 8 + k,
                             .repetition_penalty = 1.3};
        int32_t texts[ROWS * TOTAL], targets[TOTAL - 1];
        float logps[ROWS][TOTAL] = {{0}}, sampled[ROWS][TOTAL] = {{0}}, losses[TOTAL - 1];
        floatX logits[61];
        double worst = 0, worst_sampled = 0;
        size_t other_bits = 0;
        Generator g;
        need(V == COUNT_OF(logits), "a vocabulary of 61");
        need(generator_open(&g, &model, &o, ROWS, TOTAL, &error), "%s", error.text);
        g.scores = true;
        for (size_t s = 0; s < ROWS; s++) {
            random_tokens(texts + s * TOTAL, PROMPT, V, s);
            generator_start(&g, s, s, texts + s * TOTAL, PROMPT);
        }
        for (size_t t = PROMPT; t < TOTAL; t++) {
            generator_step(&g);
            for (size_t s = 0; s < ROWS; s++) logps[s][t] = g.logps[s], sampled[s][t] = g.sampled_logps[s];
        }
        memcpy(texts, g.tokens, sizeof texts);
        generator_close(&g);
        for (size_t s = 0; s < ROWS; s++) {
            const int32_t* text = texts + s * TOTAL;
            memcpy(targets, text + 1, sizeof targets);
            model_losses(&trained, text, targets, 1, TOTAL - 1);
            device_download(losses, trained.activations->losses, sizeof losses, trained.stream);
            for (size_t t = PROMPT; t < TOTAL; t++) {
                double loss = (double)losses[t - 1], T = o.temperature, sum = 0, maximum = -INFINITY, expected = 0;
                model_logits(&trained, t - 1, 1);
                device_download(logits, trained.activations->logits, sizeof logits, trained.stream);
                for (size_t v = 0; v < V; v++) maximum = fmax(maximum, (double)float_of(logits[v]));
                for (size_t v = 0; v < V && T > 0; v++) sum += exp(((double)float_of(logits[v]) - maximum) / T);
                if (T > 0) expected = ((double)float_of(logits[text[t]]) - maximum) / T - log(sum);
                other_bits += logps[s][t] != -losses[t - 1] || (T == 1 && sampled[s][t] != logps[s][t]);
                worst = fmax(worst, fabs((double)logps[s][t] + loss) / loss);
                worst_sampled = fmax(worst_sampled, fabs((double)sampled[s][t] - expected) / fmax(-expected, 1));
            }
        }
        const char* name = family_name(family);
        check_bound(worst, bound_of(1e-5, c.layers), "%s, temperature %g: log p against a training forward's losses",
                    name, o.temperature);
        check_bound(worst_sampled, bound_of(1e-5, c.layers), "%s, temperature %g: log p at that temperature", name,
                    o.temperature);
        if (rows_are_exact() && FLOATX_DTYPE == DTYPE_F32)
            check(other_bits == 0, "%s, temperature %g: the same bits as the losses", name, o.temperature);
    }
    model_free(&model);
    model_free(&trained);
}

// A text that comes in pieces of any length ends before the first stop string in it, wherever the pieces are cut; what
// has been shown before is all that cannot be the beginning of one.
static void test_stop_strings(void) {
    static const char whole[] = "ab aab abab; abcab aabac. caabcb\naabbab\xc3\xa9\xc3\xa8 aabaab";
    static const char* const lists[][4] = {{"\n"}, {"ca"}, {"aabac"}, {"abab", "b a"}, {"abcabd", "bca", "cab a"},
                                           {"\xc3\xa8"}, {"\xa9\xc3"}, {"aabaab"}, {"abba", "none"}, {"ab aab"}};
    const size_t length = strlen(whole);
    for (size_t k = 0; k < COUNT_OF(lists); k++)
        for (size_t piece = 1; piece <= 7; piece++) {
            TextList stops = {.count = 0};
            SampleText t;
            Error error;
            char *shown = NULL;
            size_t bytes = 0, at = 0, end = SIZE_MAX;
            memset(&t, 0, sizeof t);
            sample_text_begin(&t, NULL, NULL);
            while (stops.count < COUNT_OF(lists[0]) && lists[k][stops.count]) {
                stops.texts[stops.count] = lists[k][stops.count];
                stops.count++;
            }
            FILE* out = open_memstream(&shown, &bytes);
            need(out != NULL, "a file in memory");
            while (at < length && !t.ended) {
                size_t n = min_size(piece, length - at), certain;
                need(sample_text_grow(&t, whole + at, n, &stops, &error), "%s", error.text);
                at += n;
                sample_text_show(&t, &stops, out);
                for (size_t i = 0; i < stops.count; i++) {  // the whole text up to here, searched by the C library
                    char* found = (char*)memmem(whole, at, stops.texts[i], strlen(stops.texts[i]));
                    if (found) end = min_size(end, (size_t)(found - whole));
                }
                certain = end == SIZE_MAX ? at : end;
                for (size_t i = 0; i < stops.count && end == SIZE_MAX; i++)
                    for (size_t begun = strlen(stops.texts[i]) - 1; begun > 0; begun--)
                        if (begun <= at && memcmp(whole + at - begun, stops.texts[i], begun) == 0)
                            certain = min_size(certain, at - begun);
                expect(t.ended == (end != SIZE_MAX) && t.bytes == (t.ended ? end : at),
                       "'%s' in pieces of %zu: %zu bytes of %zu, ends at %zu", lists[k][0], piece, t.bytes, at, end);
                expect(bytes == certain && memcmp(shown, whole, certain) == 0,
                       "'%s' in pieces of %zu: %zu of %zu bytes are shown, not %zu", lists[k][0], piece, bytes, at,
                       certain);
            }
            fclose(out);
            free(shown);
            free(t.text);
        }
    verdict("stop strings: in pieces of 1 to 7 bytes a text ends before the first, and shows nothing of one");
}

static volatile sig_atomic_t sampling_stops;

// Writes the samples of a sampler, with these stop strings; returns the text, which the caller frees.
static char* samples_written(Model* model, size_t samples, const TextList* stops) {
    Sampler sampler = {.prompt = "a prompt", .tokens = 150,
                       .options = {.temperature = 1, .top_k = 4, .top_p = 1, .seed = 3, .repetition_penalty = 1},
                       .samples = samples, .past_end = true, .stops = *stops, .stop = &sampling_stops};
    char* text = NULL;
    size_t bytes = 0;
    Error error;
    FILE* out = open_memstream(&text, &bytes);
    need(out && sampler_open(&sampler, model, NULL, &error) && sampler_write(&sampler, out, &error), "%s", error.text);
    fclose(out);
    for (size_t i = 0; i < bytes; i++) text[i] = (char)(text[i] ? text[i] : 1);
    sampler_close(&sampler);
    return text;
}

// With stop strings the output is that of the same samples without them, each cut before the first stop string of its
// own continuation: of one sample, which is written as it comes, and of several.
static void test_stopped_samples(void) {
    Config c = small_config(FAMILY_LLAMA);
    Model model;
    ModelOptions options = small_options(3, 8);
    const TextList none = {.count = 0};
    options.training = false;
    c.context = 200;
    c.vocab = (size_t)tokenizer_of_bytes().vocabulary;
    small_create(&model, &c, options, 2);
    for (size_t samples = 1; samples <= 3; samples += 2) {
        sampling_stops = SIGTERM;
        char* nothing = samples_written(&model, samples, &none);
        check(strncmp(nothing + strlen(nothing) - 9, "a prompt\n", 9) == 0, "a signal ends %zu samples", samples);
        free(nothing);
        sampling_stops = 0;
        char* whole = samples_written(&model, samples, &none);
        for (size_t length = 1; length <= 4; length++) {
            char expected[4096] = "", stop[8] = "";
            size_t cut = 0;
            const char* at = samples == 1 ? whole : strstr(whole, "\n== sample 2\n");
            need(at != NULL, "a second sample");
            for (at += 70; memchr(at, 1, 4);) at++;  // it stands for a zero byte
            memcpy(stop, at, length);
            TextList stops = {.texts = {"no such text", stop}, .count = 2};
            const char* text = whole;
            for (size_t s = 1; s <= samples; s++) {
                const char* head = samples == 1 ? "" : text_of("%s== sample %zu\n", s > 1 ? "\n" : "", s);
                const char* next = s < samples ? strstr(text, text_of("\n\n== sample %zu\n", s + 1)) : NULL;
                size_t prompt = strlen(head) + strlen("a prompt");
                size_t kept = (next ? (size_t)(next - text) : strlen(text) - 1);
                const char* found = (const char*)memmem(text + prompt, kept - prompt, stop, length);
                if (found) kept = (size_t)(found - text), cut++;
                size_t used = strlen(expected);
                snprintf(expected + used, sizeof expected - used, "%.*s\n", (int)kept, text);
                text = next ? next + 1 : NULL;
            }
            char* stopped = samples_written(&model, samples, &stops);
            expect(cut > 0 && strcmp(stopped, expected) == 0, "%zu samples, a stop of %zu bytes", samples, length);
            free(stopped);
        }
        free(whole);
    }
    verdict("stop strings: samples end before theirs, one alone and several");
    model_free(&model);
}

// Generation past the context restarts from the later half; the cache never overflows and the text is a function of the
// seed.
static void test_generation(void) {
    enum { TOTAL_MOST = 100, SAMPLES = 3 };
    const size_t total = device_is_host() ? TOTAL_MOST : TOTAL_MOST / 2, bytes = total * sizeof(int32_t);
    Config c = small_config(FAMILY_LLAMA);
    Model model;
    Error error;
    ModelOptions options = small_options(SAMPLES, 4);
    options.training = false;
    int32_t first[TOTAL_MOST] = {1, 2, 3}, second[TOTAL_MOST] = {1, 2, 3}, longer[TOTAL_MOST];
    int32_t many[SAMPLES * TOTAL_MOST] = {1, 2, 3};
    SamplingOptions o = {.temperature = 1, .top_p = 1, .seed = 3, .repetition_penalty = 1};
    small_create(&model, &c, options, 2);
    generate_all(first, &model, &o, 1, 3, total);
    generate_all(second, &model, &o, 1, 3, total);
    check(memcmp(first, second, bytes) == 0, "generation: the same seed gives the same text");
    check(model.cache.lengths[0] <= c.context, "generation: the cache stays within the context");
    generate_all(many, &model, &o, SAMPLES, 3, total);
    check(memcmp(first, many, bytes) == 0, "generation: the first of several samples is the one alone");
    check(memcmp(many, many + total, bytes) != 0 && memcmp(many + total, many + 2 * total, bytes) != 0,
          "generation: the samples differ");
    bool same = true;
    o.temperature = 0;
    generate_all(first, &model, &o, 1, 3, total);
    generate_all(many, &model, &o, SAMPLES, 3, total);
    for (size_t s = 0; s < SAMPLES; s++) same = same && memcmp(many + s * total, first, bytes) == 0;
    check(same, "generation: at temperature 0 every sample continues the prompt as one alone");
    o.temperature = 1;
    // Of a prompt longer than the context of 24 the last 24 tokens count; then it is full, and its later half counts.
    size_t as_end = 0, as_half = 0, differ = 0, cases = 8, known = total - 10;
    o.temperature = 0;
    for (size_t n = 0; n < cases; n++) {
        int32_t end[25], half[13];
        random_tokens(longer, total, c.vocab, 6 + (uint32_t)n);
        generate_all(longer, &model, &o, 1, known, known + 2);
        memcpy(end, longer + known - 24, 24 * sizeof(int32_t));
        generate_all(end, &model, &o, 1, 24, 25);
        as_end += longer[known] == end[24];
        memcpy(half, longer + known - 12, 12 * sizeof(int32_t));
        generate_all(half, &model, &o, 1, 12, 13);
        differ += longer[known] != half[12];
        memcpy(half, longer + known - 11, 12 * sizeof(int32_t));
        generate_all(half, &model, &o, 1, 12, 13);
        as_half += longer[known + 1] == half[12];
    }
    check(as_end == cases && as_half == cases && differ > 0,
          "generation: of a prompt longer than the context its end counts, then half of that");

    // A text cut back to the prefix that it shares with another continues as if written after it.
    Generator g;
    need(generator_open(&g, &model, &o, 1, total, &error), "%s", error.text);
    generator_append(&g, longer, 15);
    generator_step(&g);
    generator_cut(&g, 0, 9);
    generator_append(&g, longer + 20, 5);
    generator_step(&g);
    memcpy(second, longer, 9 * sizeof(int32_t));
    memcpy(second + 9, longer + 20, 5 * sizeof(int32_t));
    generate_all(second, &model, &o, 1, 14, 15);
    check(second[14] == g.tokens[14], "generation: after a cut the text is what it would be without");
    generator_close(&g);
    // The same for several samples, of which the cut leaves two tokens that differ.
    need(generator_open(&g, &model, &o, SAMPLES, total, &error), "%s", error.text);
    g.options.temperature = 1;
    generator_append(&g, longer, 10);
    for (int i = 0; i < 4; i++) generator_step(&g);
    g.options.temperature = 0;
    for (size_t r = 0; r < SAMPLES; r++) generator_cut(&g, r, 12);
    generator_append(&g, longer + 20, 3);
    generator_step(&g);
    same = true;
    for (size_t s = 0; s < SAMPLES; s++) {
        memcpy(second, g.tokens + s * g.size, 15 * sizeof(int32_t));
        generate_all(second, &model, &o, 1, 15, 16);
        same = same && second[15] == g.tokens[s * g.size + 15];
    }
    check(same && memcmp(g.tokens, g.tokens + g.size, 12 * sizeof(int32_t)) != 0,
          "generation: and after a cut of several samples behind what they have in common");
    generator_close(&g);
    need(!generator_open(&g, &model, &o, SAMPLES + 1, total, &error), "more samples than the cache holds are accepted");
    o.temperature = 1;
    generate_all(many, &model, &o, SAMPLES, 3, 20);
    model_free(&model);

    // A cache with room for just the text works like one for the whole context.
    options.kv_context = 20;
    small_create(&model, &c, options, 2);
    int32_t again[SAMPLES * 20];
    memcpy(again, many, 3 * sizeof(int32_t));
    generate_all(again, &model, &o, SAMPLES, 3, 20);
    check(memcmp(many, again, sizeof again) == 0, "generation: a cache of the text alone gives the same text");
    check(model.cache.context == 20, "generation: it has as many positions");
    model_free(&model);
    options.kv_context = 0;

    // A model of zeros finds all tokens equally likely: only the random number of a position decides its token.
    need(model_create(&model, &c, options, &error), "%s", error.text);
    o.temperature = 1;
    generate_all(many, &model, &o, SAMPLES, 3, total);
    size_t wrong = 0;
    for (size_t s = 0; s < SAMPLES; s++)
        for (size_t i = 3; i < total; i++) {
            float uniform = random_uniform(o.seed, RANDOM_SAMPLING, s, i);
            wrong += many[s * total + i] != (int32_t)(uniform * (float)c.vocab);
        }
    check_bound((double)wrong, 0, "generation: tokens that do not follow their positions' random numbers");
    model_free(&model);
}

// ------------------------------------------------------------------------------------------------
// 5. Sizes
//
// What small models do not cover: presets, and loops over pieces that run more than once.

// Limits hold for sizes that no flag has checked, too: those of a file.
static void test_limits(void) {
    for (size_t i = 0; i < CONFIG_FIELD_COUNT; i++) {
        const Field* f = &CONFIG_FIELDS[i];
        Config c = small_config(FAMILY_LLAMA);
        Error error;
        if (f->kind != KIND_COUNT) continue;
        uint64_t most = (uint64_t)f->high, more = most + 1;
        memcpy((char*)&c + f->offset, &more, sizeof more);
        const char* words = text_of("%s is %llu in the model, and %.0f is the most", f->name, (unsigned long long)more,
                                    f->high);
        bool refused = !config_complete(&c, &error) && strstr(error.text, words);
        memcpy((char*)&c + f->offset, &most, sizeof most);
        check(refused && config_within_limits(&c, &error), "a model with %s up to %.0f", f->name, f->high);
    }
}

// The presets' parameters as their authors count them, and training's operations per token. Exact numbers are counts of
// the weights on Hugging Face; llm.c states its own sizes to two digits.
static void test_presets(void) {
    static const struct {
        const char* name;
        double parameters, bound;  // relative
        size_t head, context;
        double theta;
    } presets[] = {
        {"gpt2:124M", 124439808, 0, 64, 1024, 0}, {"gpt2:350M", 354823168, 0, 64, 1024, 0},
        {"gpt2:774M", 774030080, 0, 64, 1024, 0}, {"gpt2:1558M", 1557611200, 0, 64, 1024, 0},
        {"gpt2:d6", 30e6, 0.03, 64, 1024, 0}, {"gpt2:d12", 124439808, 0, 64, 1024, 0},
        {"gpt2:d24", 354823168, 0, 64, 1024, 0}, {"gpt2:d36", 774030080, 0, 64, 1024, 0},
        {"gpt2:d48", 1557611200, 0, 64, 1024, 0}, {"gpt2:d60", 2.7e9, 0.03, 64, 1024, 0},
        {"gpt2:d72", 7.3e9, 0.03, 96, 1024, 0}, {"gpt2:d84", 12.2e9, 0.03, 96, 1024, 0},
        {"llama:15M", 15191712, 0, 48, 256, 1e4}, {"llama:42M", 41689600, 0, 64, 1024, 1e4},
        {"llama:110M", 109529856, 0, 64, 1024, 1e4}, {"llama:1B", 1235814400, 0, 64, 8192, 5e5},
        {"llama:3B", 3212749824, 0, 128, 8192, 5e5}, {"llama:8B", 8030261248, 0, 128, 8192, 5e5},
        {"llama:70B", 70553706496, 0, 128, 8192, 5e5}, {"llama:405B", 405853388800, 0, 128, 8192, 5e5}};
    // 6 for each weight that multiplies a token ("Scaling Laws for Neural Language Models"), and 6 x layers x context x
    // channels for causal attention: half of what "PaLM", appendix B, counts for attention without a mask.
    static const struct { const char* name; size_t T; double flops; } operations[] = {
        {"gpt2:124M", 1024, 798543360}, {"llama:8B", 8192, 51471998976}};
    Config c;
    Error error;
    for (size_t i = 0; i < COUNT_OF(presets); i++) {
        Parameters p;
        Weights w;
        need(config_preset(&c, presets[i].name, &error) && config_complete(&c, &error), "%s", error.text);
        memset(&p, 0, sizeof p);
        need(weights_create(&w, &p, &c, NULL, 0, 1, &error), "%s", error.text);
        check_bound(fabs((double)p.true_size / presets[i].parameters - 1), presets[i].bound, "%s has %.4g parameters",
                    presets[i].name, presets[i].parameters);
        parameters_free(&p);
        free(w.blocks);
        bool same = config_head_size(&c) == presets[i].head && c.context == presets[i].context;
        same = same && (c.rope_theta == presets[i].theta || c.family == FAMILY_GPT2) && c.norm_epsilon == 1e-5;
        size_t ffn = c.ffn;
        c.ffn = 0;
        // If the feed-forward width is not given, GPT-2's and llama2.c's follow from the channels; Llama 3's does not.
        same = same && config_complete(&c, &error) && (c.ffn == ffn || presets[i].theta == 5e5);
        check(same, "%s: head size, context, ffn, epsilon and rotary angles", presets[i].name);
    }
    for (size_t i = 0; i < COUNT_OF(operations); i++) {
        Model model;
        need(config_preset(&c, operations[i].name, &error), "%s", error.text);
        need(model_plan(&model, &c, small_options(1, operations[i].T), &error), "%s", error.text);
        check_bound(fabs(model_flops_per_token(&model, operations[i].T) - operations[i].flops), 0,
                    "%s takes %.11g operations a token", operations[i].name, operations[i].flops);
        model_free(&model);
    }
}

// Initial weights: each tensor has the mean and std of its kind, and its pieces differ. The bounds are 5 standard
// deviations of the estimates.
static void test_initial_weights(Family family) {
    Config c = small_config(family);
    Model model;
    ModelOptions options = small_options(1, 1);
    c.heads = 8;
    c.channels = 192;
    c.ffn = 1000;
    c.vocab = 5501;  // over two pieces
    options.training = false;
    small_create(&model, &c, options, 3);
    double worst = 0, usual = sqrt(2.0 / (5.0 * 192)), residual = usual / sqrt(2.0 * 2);
    bool constant = true, repeats = false;
    for (size_t i = 0; i < model.parameters.count; i++) {
        const Tensor* t = &model.parameters.tensors[i];
        size_t n = tensor_elements(t);
        double sum = 0, squares = 0, std = strstr(t->name, "_out_weight") ? residual : usual;
        float* values = (float*)memory_allocate(n * sizeof(float));
        floats_download(values, model.flat.params + t->offset, n, &model);
        for (size_t e = 0; e < n; e++) {
            sum += (double)values[e];
            squares += (double)values[e] * (double)values[e];
            if (t->cols == 0) constant = constant && values[e] == (strstr(t->name, "bias") ? 0 : 1);
        }
        if (t->cols > 0) {
            worst = fmax(worst, fabs(sum / (double)n) / (std / sqrt((double)n)));
            worst = fmax(worst, fabs(sqrt(squares / (double)n) / std - 1) * sqrt(2.0 * (double)n));
            if (n > 2 * INIT_PIECE) repeats = repeats || memcmp(values, values + INIT_PIECE, 64 * sizeof(float)) == 0;
        }
        free(values);
    }
    const char* name = family_name(family);
    check_bound(worst, 5, "%s initial matrices: mean 0, std sqrt(2/5C), or / sqrt(2L): errors in sigmas", name);
    check(constant, "%s initial norms are 1 and biases 0", name);
    check(!repeats, "%s initial weights do not repeat", name);
    model_free(&model);
}

// With GPT-2's vocabulary logits are computed for a part of the rows at a time. One batch of 32 must give the gradients
// of 4 micro-batches of 8, each with one part of logits.
static void test_head_in_parts(void) {
    enum { B = 32, T = 32 };
    Config c = small_config(FAMILY_LLAMA);
    Model model;
    int32_t tokens[B * T], targets[B * T];
    c.layers = 1;
    c.context = T;
    c.vocab = 50257;
    random_tokens(tokens, B * T, c.vocab, 1);
    random_tokens(targets, B * T, c.vocab, 2);
    small_create(&model, &c, small_options(B, T), 5);
    size_t P = model.parameters.flat_size;
    float *whole = (float*)memory_allocate(P * sizeof(float)), *parts = (float*)memory_allocate(P * sizeof(float));
    double norm, loss = step_gradients(&model, &norm, tokens, targets, 1, 1, B, T);
    device_download(whole, model.flat.grads, P * sizeof(float), model.stream);
    double loss_of_parts = step_gradients(&model, &norm, tokens, targets, 1, 4, B / 4, T), worst = 0;
    device_download(parts, model.flat.grads, P * sizeof(float), model.stream);
    for (size_t i = 0; i < model.parameters.count; i++) {
        const Tensor* t = &model.parameters.tensors[i];
        double error_of_tensor = relative_error(whole + t->offset, parts + t->offset, tensor_elements(t));
        worst = error_of_tensor <= worst ? worst : error_of_tensor;
    }
    check((model.logits_rows < B * T || !device_is_host()) && model.logits_rows >= LLMTRAIN_PIECE(B / 4 * T, 1),
          "logits of 32 x 32 tokens of 50257 come in parts, of 8 x 32 in one");
    check_bound(fabs(loss / loss_of_parts - 1), 1e-6, "batch 32 and 4 micro-batches of 8 at V=50257: loss");
    check_bound(worst, 1e-5, "batch 32 and 4 micro-batches of 8 at V=50257: worst tensor of the gradients");
    free(whole);
    free(parts);
    model_free(&model);
}

// A model that leaves and copies divide: of 8 heads, Llama with 4 key and value heads and norms of them.
static Config leaves_config(Family family) {
    bool llama = family == FAMILY_LLAMA;
    Config c = small_config(family);
    c.heads = 8;
    c.kv_heads = llama ? 4 : 8;
    c.head_size = llama ? 6 : 5;
    c.qk_norm = llama;
    c.ffn = 64;
    return c;
}

// The gradients (flat_size) of a batch, summed in fixed point, where sums over a layer's inputs have `leaves` parts,
// and attention has `copies` of each key and value head; returns the loss.
static double leaves_gradients(float* gradients, const Config* c, size_t leaves, size_t copies) {
    enum { B = 3, T = 16 };
    int32_t tokens[B * T], targets[B * T];
    Model model;
    ModelOptions options = small_options(B, T);
    options.ranks.reduce = REDUCE_EXACT;
    options.ranks.leaves = leaves;
    options.ranks.kv_copies = copies;
    small_create(&model, c, options, 5);
    random_tokens(tokens, B * T, c->vocab, 11);
    random_tokens(targets, B * T, c->vocab, 12);
    double loss = step_gradients(&model, NULL, tokens, targets, FLOATX_DTYPE == DTYPE_F16 ? 256 : 1, 1, B, T);
    int64_t* fixed = (int64_t*)memory_allocate(model.flat.sums_size * sizeof(int64_t));
    device_download(fixed, model.flat.exact, model.flat.sums_size * sizeof(int64_t), model.stream);
    for (size_t i = 0; i < model.parameters.count; i++) {
        const Tensor* t = &model.parameters.tensors[i];
        const Bucket* k = &model.flat.buckets[t->bucket];
        for (size_t e = 0; e < t->size; e++)
            gradients[t->offset + e] = (float)((double)fixed[k->sums_offset + t->offset - k->first + e] / EXACT_SCALE);
    }
    free(fixed);
    model_free(&model);
    return loss;
}

// Sums in several leaves, and copies of key and value heads, have the gradients of the usual ones, but for roundings.
static void test_leaves(Family family) {
    static const struct { size_t leaves, copies; const char* name; } cases[] = {
        {2, 1, "2 leaves"}, {4, 1, "4 leaves"}, {1, 2, "2 copies of key/value heads"}, {4, 2, "4 leaves, 2 copies"}};
    Config c = leaves_config(family);
    Model model;
    Error error;
    need(model_plan(&model, &c, small_options(3, 16), &error), "%s", error.text);
    size_t n = model.parameters.flat_size;
    float *usual = (float*)memory_allocate(n * sizeof(float)), *other = (float*)memory_allocate(n * sizeof(float));
    double loss = leaves_gradients(usual, &c, 1, 1);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        if (cases[i].copies > 1 && c.heads == c.kv_heads) continue;
        double worst = 0, loss_of_case = leaves_gradients(other, &c, cases[i].leaves, cases[i].copies);
        for (size_t k = 0; k < model.parameters.count; k++) {
            const Tensor* t = &model.parameters.tensors[k];
            double apart = relative_error(other + t->offset, usual + t->offset, tensor_elements(t));
            worst = apart <= worst ? worst : apart;
        }
        check(worst > 0, "%s, %s: other bits", family_name(family), cases[i].name);
        check_bound(fabs(loss_of_case / loss - 1), bound_of(1e-6, c.layers), "%s, %s: loss", family_name(family),
                    cases[i].name);
        check_bound(worst, bound_of(1e-5, c.layers), "%s, %s: worst tensor of the gradients", family_name(family),
                    cases[i].name);
    }
    free(usual);
    free(other);
    model_free(&model);
}

// With several stages receives are posted before the first operation, and a GPU that loads or connects something then
// may wait for them.
static void test_stages_prepared(void) {
    Config c = small_config(FAMILY_GPT2);
    ModelOptions options = small_options(2, 4);
    Model model;
    Error error;
    options.ranks.world = options.ranks.pp = 2;
    need(model_plan(&model, &c, options, &error) && model_allocate(&model, &error), "%s", error.text);
    const char *loading = getenv("CUDA_MODULE_LOADING"), *connect = getenv("NCCL_RUNTIME_CONNECT");
    check(loading && strcmp(loading, "EAGER") == 0 && connect && strcmp(connect, "0") == 0,
          "two stages: kernels are loaded and ranks connected before the first step");
#ifdef LLMTRAIN_CUDA
    check(model.stream->matmul != NULL, "two stages: cuBLASLt's handle is made before the first step");
#endif
    model_free(&model);
}

static void test_model(void) {
    test_stages_prepared();
    test_leaves(FAMILY_GPT2);
    test_leaves(FAMILY_LLAMA);
    for (int family = 0; family < 2; family++) {
        test_dropout((Family)family);
        test_cache((Family)family);
    }
    test_dropout_masks();
    test_documents(FAMILY_GPT2);
    test_documents(FAMILY_LLAMA);
    if (device_is_host() || FLOATX_DTYPE == DTYPE_BF16) {  // an emulated GPU is too slow for more than one type
        test_recompute(FAMILY_GPT2, false);
        test_recompute(FAMILY_LLAMA, false);
        test_recompute(FAMILY_LLAMA, true);
        test_frozen_patterns();
        test_frozen_converted();
    }
    test_overflow();
    test_schedules();
    test_guard();
    test_statistics();
    test_cadence();
    test_keeping();
    test_failed_save();
    test_missing_fields();
    test_sampling();
    test_sampling_order();
    test_generation();
    for (int q8 = 0; q8 < 2; q8++) {
        test_cache_copy(q8);
        test_generation_shares(q8);
    }
    for (int family = 0; family < 2 && rows_are_exact(); family++) test_generated_tokens((Family)family);
    for (int family = 0; family < 2; family++) {
        test_generation_lengths((Family)family);
        test_logps((Family)family);
    }
    test_stop_strings();
    if (device_is_host()) test_stopped_samples();
    test_two_models();
    test_validation();
}

static void test_sizes(void) {
    test_limits();
    test_presets();
    for (int family = 0; family < 2; family++) test_initial_weights((Family)family);
    test_head_in_parts();
}

int main(int argc, char** argv) {
    tests_begin("test_model");
    printf("test_model (%s)\n", FLOATX_NAME);
    root_enter();
    if (argc == 1 || strcmp(argv[1], "--model") == 0) test_model();
    if (argc == 1 || strcmp(argv[1], "--sizes") == 0) test_sizes();
    return tests_end();
}
