// trace.h: which sequences made a step anomalous, and which operation first computed a number that is not finite.
//
//   1. sequence   its loss and its part of the step's gradient
//   2. finder     the first operation whose output is not finite
//   3. trace      all sequences of a step, and the worst over all ranks
//
//   StepTrace trace;
//   bool ok = trace_begin(&trace, &model, &error);
//   if (ok) ok = trace_sequences(&trace, &loader, first_sample, tokens, targets, &error);
//   trace_end(&trace);
//   ok = ok && trace_gather(&trace, &error);
//
// A step whose gradient norm is far too large is skipped or clipped (state.h), and by then nobody knows which sequences
// caused it. But the order of the data is a function of the sample number (data.h), so they can be read again: a second
// pass over the step's batch takes one sequence at a time, with the parameters and the dropout of the step, and records
// its loss and the norm of its gradient. These gradients add up to the step's. If one is not finite, that sequence is
// computed once more, and the output of each operation is checked (watch.h).
//
// Call it after the step's gradients have been read and before its update. Parameters, the step's gradients and
// optimizer state stay as they are; the activations do not. A normal step keeps and computes nothing for it. The pass
// needs memory for the gradients of two buckets, unless the ranks have it already for their own reductions.

#ifndef LLMTRAIN_TRACE_H
#define LLMTRAIN_TRACE_H

#include "../../llmtrain.h"
#include "../ranks/comm.h"
#include "../text/data.h"

// ------------------------------------------------------------------------------------------------
// 1. Sequence

enum { TRACE_WORST = 4 };  // sequences kept for each measure

typedef enum { TRACE_LOSS, TRACE_NORM, TRACE_MEASURES } TraceMeasure;

typedef SequenceTrace WorstSequences[TRACE_MEASURES][TRACE_WORST];  // the largest first; NaN is the largest

static inline double sequence_measure(const SequenceTrace* s, TraceMeasure measure) {
    return measure == TRACE_LOSS ? s->loss : s->norm;
}

typedef struct {
    WorstSequences worst;
    size_t count;               // of sequences in each row
    char not_finite[400];       // the first operation with a non-finite output; empty: none
    Model* model;
    Staging staging[STAGINGS];  // the model's own, which trace_end restores
    void* memory[2];            // owned: gradients of one bucket each; NULL: not needed
    size_t bytes[2];
    const volatile sig_atomic_t* stop;  // not 0: a signal has asked this rank to stop; NULL: none will
    int ended;                  // the signal that asked a rank to, or -1 if one has failed; 0: all are traced
} StepTrace;

// Inserts a sequence if it is one of the worst. Of two equal ones the earlier sample comes first.
static inline void trace_insert(SequenceTrace* worst, size_t count, const SequenceTrace* s, TraceMeasure measure) {
    size_t place = count;
    for (; place > 0; place--) {
        double own = sequence_measure(s, measure), other = sequence_measure(&worst[place - 1], measure);
        int order = compare_doubles(&own, &other);
        if (order < 0 || (order == 0 && s->sample > worst[place - 1].sample)) break;
        if (place < TRACE_WORST) worst[place] = worst[place - 1];
    }
    if (place < TRACE_WORST) worst[place] = *s;
}

// Loss and gradient norm of one sequence, tokens and targets (T) on the host, from a micro-batch of B. Its gradient is
// weighted as there, not as in a micro-batch of its own.
static inline void sequence_measure_gradient(SequenceTrace* s, Model* model, const int32_t* tokens,
                                             const int32_t* targets, size_t B, size_t T) {
    FlatVector* flat = &model->flat;
    double loss_scale = flat->loss_scale;
    size_t count = model_targets(model, targets, T);
    if (count == 0) return;  // masked as a whole: loss and gradient are zero
    fill_zero(flat->sums, sizeof *flat->sums, model->stream);
    flat->loss_scale = loss_scale / (double)B;
    model_gradients(model, tokens, targets, 1, T);
    flat->loss_scale = loss_scale;
    device_download(&flat->sums_host, flat->sums, sizeof flat->sums_host, model->stream);
    s->loss = exact_value(flat->sums_host.losses) / (double)count;
    s->norm = sqrt(exact_value(flat->sums_host.squares)) * flat_scale(flat);
}

// ------------------------------------------------------------------------------------------------
// 2. Finder

typedef struct {
    StepTrace* trace;
    Model* model;
    double sample;  // the sequence being computed
    void* piece;    // (INIT_PIECE) floats or floatX on the host
} Finder;

typedef enum { OF_BLOCK, OF_FORWARD, OF_BACKWARD } OutputOwner;  // BlockActivations, Activations, ActivationGradients
typedef enum { WIDTH_C, WIDTH_QKV, WIDTH_ATTENTION, WIDTH_FFN_IN, WIDTH_FFN, WIDTH_VOCAB, WIDTH_ONE } Width;

// An array that an operation writes, and the point at which it is checked: in the order of computation.
typedef struct {
    WatchPoint point;
    const char* operation;
    OutputOwner owner;
    size_t offset;       // of the array's pointer in that struct; NULL there: this model has none
    Width width;         // elements in a row; floatX, or float for WIDTH_ONE
} Output;

static const Output OUTPUTS[] = {
    {WATCH_QKV, "residual addition", OF_BLOCK, offsetof(BlockActivations, input), WIDTH_C},
    {WATCH_QKV, "norm1", OF_BLOCK, offsetof(BlockActivations, norm1), WIDTH_C},
    {WATCH_QKV, "qkv matmul", OF_BLOCK, offsetof(BlockActivations, qkv), WIDTH_QKV},
    {WATCH_ATTENTION, "norm or rotation of queries and keys", OF_BLOCK, offsetof(BlockActivations, qkv), WIDTH_QKV},
    {WATCH_ATTENTION, "attention", OF_BLOCK, offsetof(BlockActivations, attention), WIDTH_ATTENTION},
    {WATCH_ATTENTION, "attention_out matmul", OF_FORWARD, offsetof(Activations, branch), WIDTH_C},
    {WATCH_FFN, "residual addition after attention", OF_BLOCK, offsetof(BlockActivations, attention_residual), WIDTH_C},
    {WATCH_FFN, "norm2", OF_BLOCK, offsetof(BlockActivations, norm2), WIDTH_C},
    {WATCH_FFN, "ffn_in matmul", OF_BLOCK, offsetof(BlockActivations, ffn_in), WIDTH_FFN_IN},
    {WATCH_FFN, "activation function", OF_BLOCK, offsetof(BlockActivations, ffn_act), WIDTH_FFN},
    {WATCH_FFN, "ffn_out matmul", OF_FORWARD, offsetof(Activations, branch), WIDTH_C},
    {WATCH_HIDDEN, "residual addition after the last block", OF_FORWARD, offsetof(Activations, output), WIDTH_C},
    {WATCH_HIDDEN, "final norm", OF_FORWARD, offsetof(Activations, hidden), WIDTH_C},
    {WATCH_LOGITS, "head matmul", OF_FORWARD, offsetof(Activations, logits), WIDTH_VOCAB},
    {WATCH_LOSS, "loss", OF_FORWARD, offsetof(Activations, losses), WIDTH_ONE},
    {WATCH_LOSS, "head matmul", OF_BACKWARD, offsetof(ActivationGradients, hidden), WIDTH_C},
    {WATCH_HIDDEN_BACKWARD, "final norm", OF_BACKWARD, offsetof(ActivationGradients, residual), WIDTH_C},
    {WATCH_FFN_BACKWARD, "ffn_out matmul", OF_BACKWARD, offsetof(ActivationGradients, ffn_act), WIDTH_FFN},
    {WATCH_FFN_BACKWARD, "activation function (GPT-2: or ffn_out matmul)", OF_BACKWARD,
     offsetof(ActivationGradients, ffn_in), WIDTH_FFN_IN},
    {WATCH_FFN_BACKWARD, "ffn_in matmul", OF_BACKWARD, offsetof(ActivationGradients, hidden), WIDTH_C},
    {WATCH_FFN_BACKWARD, "norm2", OF_BACKWARD, offsetof(ActivationGradients, residual), WIDTH_C},
    {WATCH_ATTENTION_BACKWARD, "attention_out matmul", OF_BACKWARD, offsetof(ActivationGradients, attention),
     WIDTH_ATTENTION},
    {WATCH_ATTENTION_BACKWARD, "attention", OF_BACKWARD, offsetof(ActivationGradients, qkv), WIDTH_QKV},
    {WATCH_QKV_BACKWARD, "norm or rotation of queries and keys", OF_BACKWARD, offsetof(ActivationGradients, qkv),
     WIDTH_QKV},
    {WATCH_QKV_BACKWARD, "qkv matmul", OF_BACKWARD, offsetof(ActivationGradients, hidden), WIDTH_C},
    {WATCH_QKV_BACKWARD, "norm1", OF_BACKWARD, offsetof(ActivationGradients, residual), WIDTH_C},
};

// The index of the first of n elements on the device that is not finite; n if all are.
static inline size_t find_not_finite(const Finder* f, const void* data, bool is_float, size_t n) {
    size_t bytes = is_float ? sizeof(float) : sizeof(floatX);
    for (size_t first = 0; first < n; first += INIT_PIECE) {
        size_t count = min_size(INIT_PIECE, n - first);
        device_download(f->piece, (const char*)data + first * bytes, count * bytes, f->model->stream);
        for (size_t i = 0; i < count; i++) {
            float x = is_float ? ((const float*)f->piece)[i] : float_of(((const floatX*)f->piece)[i]);
            if (!isfinite(x)) return first + i;
        }
    }
    return n;
}

// The array that a row of the table describes, for block l; *width: elements in a row of that array.
static inline const void* output_data(const Output* output, size_t* width, const Model* model, size_t l) {
    const Config* c = &model->config;
    size_t widths[] = {c->channels, config_qkv(c), c->heads * config_head_size(c), config_ffn_in(c), c->ffn,
                       config_padded_vocab(c), 1};
    const char* owners[] = {(const char*)&model->activations->blocks[output->owner == OF_BLOCK ? l : 0],
                            (const char*)model->activations, (const char*)&model->gradients};
    const void* data;
    memcpy(&data, owners[output->owner] + output->offset, sizeof data);
    *width = widths[output->width];
    return data;
}

// ", and these weights are not finite: ..." if there are any.
static inline void describe_weights(char* text, size_t size, const Finder* f) {
    const Parameters* p = &f->model->parameters;
    size_t used = 0, count = 0;
    for (size_t i = 0; i < p->count && used + 64 < size; i++) {
        const Tensor* t = &p->tensors[i];
        if (t->quantized || find_not_finite(f, flat_param(&f->model->flat, t), FLOATX_IS_FLOAT, t->size) == t->size)
            continue;
        const char* before = count == 0 ? "; weights that are not finite: " : ", ";
        used += (size_t)snprintf(text + used, size - used, "%s%s", count < 3 ? before : ", ...",
                                 count < 3 ? t->name : "");
        if (count++ == 3) return;
    }
}

static inline void finder_report(Finder* f, WatchPoint point, size_t l, const char* operation, bool backward,
                                 size_t token) {
    char block[32] = "", at[32] = "", weights[240] = "";
    describe_weights(weights, sizeof weights, f);
    bool in_block = point <= WATCH_FFN || (point >= WATCH_FFN_BACKWARD && point <= WATCH_QKV_BACKWARD);
    if (in_block) snprintf(block, sizeof block, " of block %zu", l);
    if (token != SIZE_MAX) snprintf(at, sizeof at, "token %zu of ", token);
    snprintf(f->trace->not_finite, sizeof f->trace->not_finite, "%s%s, %s, %ssample %.0f%s", operation, block,
             backward ? "backward" : "forward", at, f->sample, weights);
}

// Checks the gradients of a bucket's tensors; a tensor's name includes the block.
static inline void finder_look_at_gradients(Finder* f, size_t bucket) {
    const Parameters* p = &f->model->parameters;
    for (size_t i = 0; i < p->count && f->trace->not_finite[0] == 0; i++) {
        const Tensor* t = &p->tensors[i];
        char operation[80];
        if (t->bucket != bucket || !t->trains) continue;
        if (find_not_finite(f, flat_gradient(&f->model->flat, t), true, t->size) == t->size) continue;
        snprintf(operation, sizeof operation, "gradient of %s", t->name);
        finder_report(f, WATCH_EMBEDDING_BACKWARD, 0, operation, true, SIZE_MAX);
    }
}

static inline void finder_look(void* watcher, WatchPoint point, size_t l) {
    Finder* f = (Finder*)watcher;
    const Model* model = f->model;
    for (size_t i = 0; i < sizeof OUTPUTS / sizeof OUTPUTS[0] && f->trace->not_finite[0] == 0; i++) {
        const Output* output = &OUTPUTS[i];
        size_t width, rows = model->activations->B * model->activations->T, first = point == WATCH_LOGITS ? l : 0;
        if (output->point != point) continue;
        const void* data = output_data(output, &width, model, l);
        if (point == WATCH_LOGITS) rows = min_size(model->logits_rows, rows - first);
        bool is_float = output->width == WIDTH_ONE || FLOATX_IS_FLOAT;
        size_t found = data ? find_not_finite(f, data, is_float, rows * width) : 0;
        if (data == NULL || found == rows * width) continue;
        bool embedded = i == 0 && l == 0;  // the input of the first block
        finder_report(f, embedded ? WATCH_HIDDEN : point, l, embedded ? "embedding" : output->operation,
                      output->owner == OF_BACKWARD, first + found / width);
    }
    if (point == WATCH_QKV_BACKWARD) finder_look_at_gradients(f, l + 1);
    if (point == WATCH_HIDDEN_BACKWARD) finder_look_at_gradients(f, model->config.layers + 1);
    if (point == WATCH_EMBEDDING_BACKWARD) finder_look_at_gradients(f, 0);
}

// ------------------------------------------------------------------------------------------------
// 3. Trace

static inline void trace_end(StepTrace* trace) {
    FlatVector* flat = &trace->model->flat;
    if (flat->discards) memcpy(flat->staging, trace->staging, sizeof flat->staging);
    flat->discards = false;
    for (int i = 0; i < 2; i++) {
        if (trace->memory[i]) device_free(trace->memory[i], trace->bytes[i]);
        trace->memory[i] = NULL;
    }
}

// Redirects the gradients of the passes to staging buffers, so that the step's sums stay as they are. If there is no
// memory for them, it fails and changes nothing: allocating anyway could kill the run, and again after a resume.
static inline bool trace_begin(StepTrace* trace, Model* model, Error* error) {
    FlatVector* flat = &model->flat;
    memset(trace, 0, sizeof *trace);
    trace->model = model;
    if (flat->sharded > 0) return fail_with(error, "ranks do that alone, and with --zero 3 none has all parameters");
    for (size_t b = 0; b < flat->count; b++) {
        const Bucket* k = &flat->buckets[b];
        size_t* bytes = &trace->bytes[k->staging != STAGING_EMBEDDING];
        *bytes = max_size(*bytes, max_size(k->end - k->first, 1) * sizeof(float));  // perhaps nothing in it is trained
    }
    for (int i = 0; i < 2; i++) {
        if (flat->staging[i].grads) continue;
        const Transport* ranks = flat->options.transport;
        size_t sharing = device_is_host() && ranks ? max_size(ranks->local_world, 1) : 1;
        size_t available = device_available(1) / sharing;  // NCCL has its buffers by now
        if (trace->bytes[i] > available)
            fail_with(error, "that needs %.3f GB, but only %.3f GB of memory are free", 1e-9 * (double)trace->bytes[i],
                      1e-9 * (double)available);
        else trace->memory[i] = device_allocate(trace->bytes[i], model->stream, error);
        if (trace->memory[i]) continue;
        trace_end(trace);
        return false;
    }
    memcpy(trace->staging, flat->staging, sizeof flat->staging);
    for (int s = 0; s < STAGINGS; s++) {
        Staging* staging = &flat->staging[s];
        if (staging->grads == NULL) staging->grads = (float*)trace->memory[s != STAGING_EMBEDDING];
        staging->comm_buffer = NULL;
    }
    flat->discards = true;
    return true;
}

// Finds the operation behind a sequence whose loss or gradient is not finite, by computing it again.
static inline bool trace_find(StepTrace* trace, const SequenceTrace* s, const int32_t* tokens, const int32_t* targets,
                                size_t B, size_t T, Error* error) {
    Model* model = trace->model;
    SequenceTrace again = *s;
    Finder finder = {trace, model, s->sample, memory_allocate(INIT_PIECE * sizeof(float))};
    if (finder.piece == NULL) return fail_with(error, "out of memory for the search for values that are not finite");
    Watch watch = {finder_look, &finder}, nobody = {NULL, NULL};
    model->watch = watch;
    sequence_measure_gradient(&again, model, tokens, targets, B, T);
    model->watch = nobody;
    free(finder.piece);
    return true;
}

// After each sequence: whether all ranks go on to the next. False with an error if this one has failed or one is lost.
static inline bool trace_goes_on(StepTrace* trace, bool good, Error* error) {
    RankStats* stats = &trace->model->stats;
    double own = !good ? -1 : trace->stop ? *trace->stop : 0;
    if (!stats_gather(stats, &own, 1, error)) trace->ended = -1, good = false;
    else trace->ended = stats_end(stats, 0);
    return good;
}

// Traces all sequences of this rank in the step that begins at first_sample; tokens, targets (B, T) are scratch. All
// ranks return together, earlier if a signal has come (trace->ended).
static inline bool trace_sequences(StepTrace* trace, const Loader* loader, uint64_t first_sample, int32_t* tokens,
                                 int32_t* targets, Error* error) {
    Model* model = trace->model;
    const Dataset* data = loader->dataset;
    size_t B = loader->B, T = loader->T;
    bool good = true;
    for (uint64_t i = 0; !trace->ended && i < model->flat.micro_batches; i++) {
        uint64_t first = loader_sample(loader, first_sample, i);
        for (size_t b = 0; good && b < B; b++) {
            Window window = dataset_sample(data, loader->seed, first + b, T);
            good = window_read(tokens + b * T, targets + b * T, data, window, loader->vocabulary, T, error);
        }
        if (!good) return trace_goes_on(trace, false, error);
        for (size_t b = 0; !trace->ended && b < B; b++) {
            Window window = dataset_sample(data, loader->seed, first + b, T);
            SequenceTrace s = {(double)(first + b), (double)window.shard, (double)window.start, (double)loader->rank,
                               0, 0};
            const int32_t *row = tokens + b * T, *row_targets = targets + b * T;
            model->dropout.first_token = (first + b) * T;
            sequence_measure_gradient(&s, model, row, row_targets, B, T);
            for (int m = 0; m < TRACE_MEASURES; m++) trace_insert(trace->worst[m], trace->count, &s, (TraceMeasure)m);
            trace->count = min_size(trace->count + 1, TRACE_WORST);
            bool found = !(isfinite(s.loss) && isfinite(s.norm)) && trace->not_finite[0] == 0;
            fault_point("trace");
            good = !found || trace_find(trace, &s, row, row_targets, B, T, error);
            if (!trace_goes_on(trace, good, error)) return false;
        }
    }
    return true;
}

// Gathers the worst sequences over all ranks, and the operation that the lowest rank has found. All ranks call it.
static inline bool trace_gather(StepTrace* trace, Error* error) {
    const RankOptions* o = &trace->model->flat.options;
    size_t world = o->world, *begins = NULL, own = trace->count;
    char* texts = NULL;
    if (o->transport == NULL || world == 1) return true;
    WorstSequences* all = (WorstSequences*)memory_allocate(world * sizeof *all);
    if (all == NULL) return fail_with(error, "out of memory for the sequences of %zu ranks", world);
    memcpy(all[o->rank], trace->worst, sizeof trace->worst);
    bool ok = transport_all_gather(o->transport, all, world * sizeof *all, DTYPE_U8, error) &&
              comm_gather_texts(o->transport->comm, &texts, &begins, trace->not_finite, error);
    for (int m = 0; ok && m < TRACE_MEASURES; m++) {
        trace->count = 0;
        for (size_t r = 0; r < world; r++)
            for (size_t i = 0; i < own; i++) {
                trace_insert(trace->worst[m], trace->count, &all[r][m][i], (TraceMeasure)m);
                trace->count = min_size(trace->count + 1, TRACE_WORST);
            }
    }
    for (size_t r = 0; ok && r < world; r++) {
        if (texts[begins[r]] == 0) continue;
        snprintf(trace->not_finite, sizeof trace->not_finite, "%s", texts + begins[r]);
        break;
    }
    free(all);
    free(texts);
    free(begins);
    return ok;
}

#endif  // LLMTRAIN_TRACE_H
