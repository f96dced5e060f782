// model_dump.c: writes what a model computes to a file, for a program that compares it with its own results
// (dev/peers/models.py): logits and loss of a batch, and the gradient of every weight under Hugging Face's names.
//
//   build/model_dump-FP32 --init-from models/x --tokens batch.bin --batch 2 --seq 16 --to out.safetensors
//
// The batch is int32 (B, T + 1). The file holds "logits" (B T, V), "loss" (1) and "grad.NAME" for each weight, as F32.
//
//   build/model_dump-FP32 --data 'x_*.bin' --batch 2 --seq 64 --steps 10 --to batches.safetensors
//
// writes the batches that a run on these shards reads with the default seed: "tokens" and "targets", I32 (steps, B, T).

#include "llmtrain/text/data.h"
#include "tools/open.h"

// Writes the gradient of one Hugging Face tensor: rows of one of our tensors, transposed where theirs is.
static bool write_gradient(SafetensorsWriter* w, const Model* model, const ForeignTensor* f, Error* error) {
    size_t width = max_size(f->cols, 1), n = f->rows * width;
    const Tensor* t = &model->parameters.tensors[f->tensor];
    const float* from = flat_gradient(&model->flat, t) + f->first * width;
    float* values = (float*)memory_allocate(n * sizeof(float));
    if (values == NULL) return fail_with(error, "out of memory for a gradient");
    for (size_t i = 0; i < n; i++) values[i] = from[f->transposed ? i % f->rows * width + i / f->rows : i];
    bool ok = safetensors_write(w, values, n * sizeof(float), error);
    free(values);
    return ok;
}

static bool dump(Model* model, const int32_t* batch, size_t B, size_t T, const char* to, Error* error) {
    size_t N = B * T, V = model->config.vocab, count = 0, one = 1, logits_shape[2] = {N, V};
    int32_t *tokens = (int32_t*)memory_allocate(N * sizeof(int32_t)),
            *targets = (int32_t*)memory_allocate(N * sizeof(int32_t));
    float* logits = (float*)memory_allocate(N * V * sizeof(float));
    ForeignTensor* list = NULL;
    StepResult result;
    StepFlags flags = {.stop = false};
    SafetensorsWriter w;
    char name[128];
    memset(&result, 0, sizeof result);
    memset(&w, 0, sizeof w);  // it is freed whichever step fails
    if (!tokens || !targets || !logits) return fail_with(error, "out of memory for a batch");
    for (size_t i = 0; i < N; i++) {
        tokens[i] = batch[i / T * (T + 1) + i % T];
        targets[i] = batch[i / T * (T + 1) + i % T + 1];
    }
    model_upload(model, tokens, NULL, B, T, false);
    model_forward(model);
    for (size_t row = 0; row < N; row++) {
        model_logits(model, row, 1);
        for (size_t v = 0; v < V; v++) logits[row * V + v] = float_of(model->activations->logits[v]);
    }
    model_begin_step(model, 1.0, 1);
    model_gradients(model, tokens, targets, B, T);
    bool ok = model_finish_step(model, &result, flags, error) &&
              convert_list(&list, &count, &model->config, &model->parameters, error) &&
              safetensors_create(&w, to, error) &&
              safetensors_declare(&w, "logits", DTYPE_F32, logits_shape, 2, error) &&
              safetensors_declare(&w, "loss", DTYPE_F32, &one, 1, error);
    for (size_t i = 0; ok && i < count; i++) {
        const ForeignTensor* f = &list[i];
        size_t shape[2] = {f->transposed ? f->cols : f->rows, f->transposed ? f->rows : f->cols};
        snprintf(name, sizeof name, "grad.%s", f->name);
        ok = safetensors_declare(&w, name, DTYPE_F32, shape, f->cols ? 2 : 1, error);
    }
    float loss = (float)result.loss;
    ok = ok && safetensors_begin(&w, error) && safetensors_write(&w, logits, N * V * sizeof(float), error) &&
         safetensors_write(&w, &loss, sizeof loss, error);
    for (size_t i = 0; ok && i < count; i++) ok = write_gradient(&w, model, &list[i], error);
    ok = ok && safetensors_end(&w, error);
    safetensors_writer_free(&w);
    free(list);
    free(tokens);
    free(targets);
    free(logits);
    return ok;
}

// The batches that training sees.
static bool dump_batches(const char* data, size_t B, size_t T, size_t steps, const char* to, Error* error) {
    Dataset dataset;
    Loader loader;
    SafetensorsWriter w;
    size_t N = B * T, shape[3] = {steps, B, T};
    int32_t *tokens = (int32_t*)memory_allocate(steps * N * sizeof(int32_t));
    int32_t *targets = (int32_t*)memory_allocate(steps * N * sizeof(int32_t));
    if (!tokens || !targets) return fail_with(error, "out of memory for the batches");
    bool ok = dataset_open(&dataset, data, error) && loader_open(&loader, &dataset, 1 << 24, 1337, 0, 1, B, T, error) &&
              loader_start(&loader, 0, error);
    for (size_t i = 0; ok && i < steps; i++) ok = loader_next(&loader, tokens + i * N, targets + i * N, error);
    if (!ok) return false;
    ok = safetensors_create(&w, to, error) && safetensors_declare(&w, "tokens", DTYPE_I32, shape, 3, error) &&
         safetensors_declare(&w, "targets", DTYPE_I32, shape, 3, error) && safetensors_begin(&w, error) &&
         safetensors_write(&w, tokens, steps * N * sizeof(int32_t), error) &&
         safetensors_write(&w, targets, steps * N * sizeof(int32_t), error) && safetensors_end(&w, error);
    safetensors_writer_free(&w);
    loader_close(&loader);
    dataset_close(&dataset);
    free(tokens);
    free(targets);
    return ok;
}

int main(int argc, char** argv) {
    const char *from = NULL, *tokens = NULL, *to = NULL, *data = NULL;
    uint64_t batch = 1, seq = 0, steps = 1;
    const Flag rows[] = {
        FLAG_TEXT("init-from", &from, NULL, "DIR", 0, "the model"),
        FLAG_TEXT("tokens", &tokens, NULL, "FILE", 0, "int32 (B, T + 1)"),
        FLAG_TEXT("data", &data, NULL, "GLOB", 0, "instead of a model: shards whose batches are written"),
        FLAG_COUNT("steps", &steps, 1, 1, 1e6, 0, "with --data: batches"),
        FLAG_COUNT("batch", &batch, 1, 1, 4096, 0, "B"),
        FLAG_COUNT("seq", &seq, 16, 1, 1 << 20, 0, "T"),
        FLAG_TEXT("to", &to, NULL, "FILE", 0, "file to write (required)"),
    };
    Flags flags = flags_of(rows, sizeof rows / sizeof rows[0]);
    Error error;
    int code;
    char* text = NULL;
    size_t bytes;
    Model model;
    Tokenizer tokenizer;
    ModelOptions options;
    memset(&options, 0, sizeof options);
    if (!flags_begin(&code, "model_dump", NULL, &flags, argc, argv)) return code;
    options.B = batch;
    options.T = seq;
    options.training = true;
    bool ok =
        (to && (data || (from && tokens))) || fail_with(&error, "give --to, and --data or --init-from and --tokens");
    if (ok && data) {
        ok = dump_batches(data, batch, seq, steps, to, &error);
        if (!ok) fprintf(stderr, "model_dump: %s\n", error.text);
        return ok ? 0 : 1;
    }
    ok = ok && file_read(tokens, (size_t)1 << 30, &text, &bytes, &error) &&
         (bytes == batch * (seq + 1) * sizeof(int32_t) || fail_with(&error, "%s is not int32 (B, T + 1)", tokens)) &&
         model_open(&model, &tokenizer, NULL, from, &options, "model_dump", &error);
    if (ok) {
        ok = dump(&model, (const int32_t*)text, batch, seq, to, &error);
        tokenizer_close(&tokenizer);
        model_free(&model);
    }
    free(text);
    if (!ok) fprintf(stderr, "model_dump: %s\n", error.text);
    return ok ? 0 : 1;
}
