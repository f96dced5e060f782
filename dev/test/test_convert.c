// test_convert.c: model import and export: source.h, convert.h, export.h, open.h, and the program tools/export.cu.
//
//   1. in          each fixture (dev/peers/models.py --fixtures) computes what transformers computed
//   2. out         exported models are read back to the same bits, from any form to any form, in shards, in 16 bits;
//                  every key of their configurations, every type of safetensors
//   3. wide        tensors of more elements than any loop handles at a time, through every format, to the bit
//   4. runs        a checkpoint of several pieces; a run from an imported model; a shorter context; its tokenizer
//   5. keys        each key of config.json deleted, null, or of another value: refused, or what transformers takes
//   6. 4 bits      a model that bitsandbytes has quantized: transformers' bits; in shards; other kinds refused
//   7. bad files   configurations, headers, indices, shapes, types: each refused with a message; nothing is written
//
//   build/test_convert [--export build/export] [--train build/train-FP32]

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "tools/export.h"
#include "llmtrain/text/generate.h"
#include "tools/open.h"
#include "llmtrain/run/presets.h"
#include "dev/test/harness.h"  // after comm.h, whose roots it would shadow
#include "dev/test/whole_tensors.h"

static char fixtures[PATH_MAX], export_program[PATH_MAX], train_program[PATH_MAX];
static const char* const NAMES[] = {"gpt2", "llama", "llama_linear", "mistral", "qwen2", "qwen3"};

static const char* fixture(const char* name) { return text_of("%s/%s", fixtures, name); }

// Reads a whole tensor of a file; the caller frees it.
static void* tensor_of(const char* path, const char* name, size_t* bytes) {
    SafetensorsFile file;
    Error error;
    need(safetensors_open(&file, path, &error), "%s", error.text);
    const SafetensorsTensor* t = safetensors_find(&file, name);
    need(t != NULL, "%s has no %s", path, name);
    void* data = memory_allocate(t->bytes);
    need(data && safetensors_read(&file, t, data, t->bytes, NULL, &error), "%s", error.text);
    if (bytes) *bytes = t->bytes;
    safetensors_close(&file);
    return data;
}

static ModelOptions options_of(size_t B, size_t T) {
    ModelOptions options;
    memset(&options, 0, sizeof options);
    options.B = B;
    options.T = T;
    return options;
}

// All weights of a source, one after the other; the caller frees them.
static float* weights_of(const char* path, size_t* count) {
    ModelSource s;
    Error error;
    need(source_open(&s, path, &error), "%s", error.text);
    float* values = (float*)memory_allocate(s.parameters.true_size * sizeof(float));
    *count = 0;
    for (size_t i = 0; i < s.parameters.count; i++) {
        size_t n = tensor_elements(&s.parameters.tensors[i]);
        const float* tensor;
        need(source_read(&tensor, &s, i, &error), "%s", error.text);
        memcpy(values + *count, tensor, n * sizeof(float));
        *count += n;
    }
    source_close(&s);
    return values;
}

static bool same_weights(const char* a, const char* b) {
    size_t counts[2];
    float *one = weights_of(a, &counts[0]), *other = weights_of(b, &counts[1]);
    bool same = counts[0] == counts[1] && memcmp(one, other, counts[0] * sizeof(float)) == 0;
    free(one);
    free(other);
    return same;
}

// Exports without the program; the directory must be created.
static bool export_to(const char* from, const char* to, ExportType type, size_t shard_bytes,
                      bool (*write)(const Export*, Error*), Error* error) {
    ModelSource s;
    if (!source_open(&s, from, error)) return false;
    const Export e = {.source = &s, .type = type, .directory = to, .shard_bytes = shard_bytes};
    bool ok = directory_make(to, error) && write(&e, error);
    source_close(&s);
    return ok;
}

// Runs a program; its exit code must match, and standard error must contain the words.
static void expect_program(int code, const char* words, const char* line) {
    Words w;
    Program p;
    memset(&w, 0, sizeof w);
    words_add(&w, line);
    program_start(&p, w.words, NULL, NULL);
    programs_wait(&p, 1, PROGRAM_MS);
    expect(program_code(&p) == code && strstr(code ? p.text[1] : p.text[0], words), "%s: exit code %d, not %d: %s%s",
           line, program_code(&p), code, p.text[0], p.text[1]);
    program_free(&p);
}

// ------------------------------------------------------------------------------------------------
// 1. In

// The largest difference between our logits and those of transformers.
static double logits_apart(const char* path, const char* expected, double* loss_apart) {
    enum { B = 2, T = 12 };
    size_t bytes;
    Model model;
    Tokenizer tokenizer;
    Error error;
    ModelOptions options = options_of(B, T);
    int32_t* batch = (int32_t*)tensor_of(expected, "tokens", &bytes);
    float *logits = (float*)tensor_of(expected, "logits", NULL), *loss = (float*)tensor_of(expected, "loss", NULL);
    int32_t tokens[B * T], targets[B * T];
    double worst = 0;
    need(bytes == B * (T + 1) * sizeof(int32_t), "%s", expected);
    for (size_t i = 0; i < B * T; i++) {
        tokens[i] = batch[i / T * (T + 1) + i % T];
        targets[i] = batch[i / T * (T + 1) + i % T + 1];
    }
    need(model_open(&model, &tokenizer, NULL, path, &options, "test", &error), "%s", error.text);
    model_upload(&model, tokens, NULL, B, T, false);
    model_forward(&model);
    for (size_t row = 0; row < B * T; row++) {
        model_logits(&model, row, 1);
        for (size_t v = 0; v < model.config.vocab; v++) {
            double apart = fabs(float_of(model.activations->logits[v]) - logits[row * model.config.vocab + v]);
            worst = apart > worst || isnan(apart) ? apart : worst;
        }
    }
    ExactSum sum;
    fill_zero(&model.flat.sums->losses, sizeof sum, model.stream);
    model_losses(&model, tokens, targets, B, T);
    device_download(&sum, &model.flat.sums->losses, sizeof sum, model.stream);
    *loss_apart = fabs(exact_value(sum) / (B * T) - *loss);
    tokenizer_close(&tokenizer);
    model_free(&model);
    free(batch);
    free(logits);
    free(loss);
    return worst;
}

static void test_in(void) {
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) {
        const char* expected = text_of("%s/expected.safetensors", fixture(NAMES[i]));
        double loss, apart = logits_apart(fixture(NAMES[i]), expected, &loss);
        // Logits of a few units, sums of a few dozen float terms, which transformers adds in another order.
        check_bound(apart, 1e-5, "%s: logits of transformers", NAMES[i]);
        check_bound(loss, 1e-6, "%s: loss of transformers", NAMES[i]);
    }
}

// ------------------------------------------------------------------------------------------------
// 2. Out

// A token that a configuration of an export names, -1: null.
static const TokenIds no_ids = {.begin = -1, .pad = -1};

static void expect_token(const Json* json, const char* key, int32_t token, const char* path) {
    uint64_t found = 0;
    uint32_t node = json_get(json, 0, key);
    bool same = token < 0 ? json_is(json, node, JSON_NULL) : json_u64(json, node, &found) && found == (uint64_t)token;
    expect(same, "%s: %s is not %d", path, key, token);
}

// Whether a text is the expected JSON, but for white space; ' stands for ".
static bool same_json(const char* text, const char* expected) {
    for (;; text++, expected++) {
        text += strspn(text, " \n");
        expected += strspn(expected, " ");
        if (*text != (*expected == '\'' ? '"' : *expected)) return false;
        if (*text == 0) return true;
    }
}

// Every key of an exported config.json, of a model with no member at its default.
static void test_written_configs(void) {
#define SIZES " layers=3 channels=16 ffn=40 context=24 vocab=33 norm_epsilon=3e-5"
#define LLAMA "family=llama kv_heads=2 rope_theta=12345.5 tied=on" SIZES
#define LLAMA_SIZES(heads, kv_heads, head_size) \
    "'hidden_size': 16, 'num_hidden_layers': 3, 'num_attention_heads': " heads ", 'num_key_value_heads': " kv_heads \
    ", 'head_dim': " head_size ", 'intermediate_size': 40, 'max_position_embeddings': 24, 'vocab_size': 33, " \
    "'rms_norm_eps': 3e-05, 'rope_theta': 12345.5, 'tie_word_embeddings': true, 'hidden_act': 'silu', " \
    "'attention_bias': false, "
    static const struct { const char *members, *json; } models[] = {
        {"family=gpt2 heads=2 tied=off" SIZES,
         "{'architectures': ['GPT2LMHeadModel'], 'model_type': 'gpt2', 'n_embd': 16, 'n_layer': 3, 'n_head': 2, "
         "'n_inner': 40, 'n_positions': 24, 'vocab_size': 33, 'layer_norm_epsilon': 3e-05, "
         "'tie_word_embeddings': false, 'activation_function': 'gelu_new', 'scale_attn_weights': true, "
         "'scale_attn_by_inverse_layer_idx': false, "},
        {LLAMA " heads=4 rope_scaling=llama3 rope_factor=7.5 rope_low_freq=1.25 rope_high_freq=3.5 rope_original=12",
         "{'architectures': ['LlamaForCausalLM'], 'model_type': 'llama', " LLAMA_SIZES("4", "2", "4")
         "'rope_scaling': {'rope_type': 'llama3', 'factor': 7.5, 'low_freq_factor': 1.25, 'high_freq_factor': 3.5, "
         "'original_max_position_embeddings': 12}, "},
        {LLAMA " heads=6 head_size=10 rope_scaling=linear rope_factor=7.5",
         "{'architectures': ['MistralForCausalLM'], 'model_type': 'mistral', " LLAMA_SIZES("6", "2", "10")
         "'sliding_window': null, 'rope_scaling': {'rope_type': 'linear', 'factor': 7.5}, "},
        {LLAMA " heads=4 head_size=6 qkv_bias=on",
         "{'architectures': ['Qwen2ForCausalLM'], 'model_type': 'qwen2', " LLAMA_SIZES("4", "2", "6")
         "'use_sliding_window': false, "},
        {LLAMA " heads=4 head_size=6 qk_norm=on",
         "{'architectures': ['Qwen3ForCausalLM'], 'model_type': 'qwen3', " LLAMA_SIZES("4", "2", "6")
         "'use_sliding_window': false, "},
    };
    static const char* const ends[] = {
        "'bos_token_id': null, 'eos_token_id': 0, 'torch_dtype': 'float32'}",
        "'bos_token_id': 0, 'eos_token_id': [7, 5], 'pad_token_id': 0, 'torch_dtype': 'float16'}",
        "'bos_token_id': 5, 'eos_token_id': null, 'torch_dtype': 'bfloat16'}"};
    static const struct { Dtype dtype; TokenIds ids; } given[] = {{DTYPE_F32, {-1, -1, {0}, 1}},
                                                                  {DTYPE_F16, {0, 0, {7, 5}, 2}},
                                                                  {DTYPE_BF16, {5, -1, {0}, 0}}};
    for (size_t i = 0; i < COUNT_OF(models) * COUNT_OF(given); i++) {
        size_t n = i / COUNT_OF(given), k = i % COUNT_OF(given);
        Config c, again;
        Error error;
        JsonWriter w;
        memset(&c, 0, sizeof c);
        need(config_set(&c, models[n].members, &error) && config_complete(&c, &error) &&
             hf_config_write(&w, &c, given[k].dtype, &given[k].ids, &error), "%s", error.text);
        json_put(&w, "", 1);
        expect(same_json(w.text, text_of("%s%s", models[n].json, ends[k])), "%s: %s", models[n].members, w.text);
        put_text("written.json", w.text);
        expect(hf_config_read(&again, "written.json", &error) &&
               fields_agree(CONFIG_FIELDS, CONFIG_FIELD_COUNT, &c, &again, "x", models[n].members, &error), "%s",
               error.text);
        json_writer_free(&w);
    }
    verdict("every key of an exported config.json, of models unlike all defaults");
}

// The types of the safetensors format, from its documentation: name and size. Each is read and written in a file made
// by hand; as weights only floats of up to 32 bits.
static void test_dtypes(void) {
    static const struct { Dtype type; const char* name; size_t bytes; } types[] = {
        {DTYPE_BOOL, "BOOL", 1}, {DTYPE_U8, "U8", 1},   {DTYPE_I8, "I8", 1},   {DTYPE_U16, "U16", 2},
        {DTYPE_I16, "I16", 2},   {DTYPE_F16, "F16", 2}, {DTYPE_BF16, "BF16", 2}, {DTYPE_U32, "U32", 4},
        {DTYPE_I32, "I32", 4},   {DTYPE_F32, "F32", 4}, {DTYPE_U64, "U64", 8}, {DTYPE_I64, "I64", 8},
        {DTYPE_F64, "F64", 8},
    };
    static const char zeros[4096];
    Error error;
    SafetensorsFile f, t;
    const size_t shape[] = {3};
    expect(COUNT_OF(types) == DTYPE_COUNT, "%d types", DTYPE_COUNT);
    need(safetensors_open(&f, text_of("%s/model.safetensors", fixture("qwen2")), &error), "%s", error.text);
    copy_tree(fixture("qwen2"), "typed");
    for (size_t i = 0; i < COUNT_OF(types); i++) {
        char file[256];
        SafetensorsWriter w;
        const char* name = types[i].name;
        size_t data = 3 * types[i].bytes, bytes;
        uint64_t length = 64;
        int used = snprintf(file + 8, sizeof file - 8, "{\"t\": {\"dtype\": \"%s\",\"shape\": [3],\"data_offsets\": "
                            "[0,%zu]}}", name, data);
        memcpy(file, &length, 8);
        memset(file + 8 + used, ' ', 64 - (size_t)used);
        memset(file + 72, 0, data);
        need(safetensors_create(&w, "t.safetensors", &error) &&
             safetensors_declare(&w, "t", types[i].type, shape, 1, &error) && safetensors_begin(&w, &error) &&
             safetensors_write(&w, zeros, data, &error) && safetensors_end(&w, &error), "%s", error.text);
        safetensors_writer_free(&w);
        char* written = text_read("t.safetensors", &bytes);
        expect(bytes == 72 + data && memcmp(written, file, bytes) == 0, "%s is written as %.64s", name, written + 8);
        free(written);
        if (expect(safetensors_open(&t, "t.safetensors", &error), "%s: %s", name, error.text)) {
            expect(t.header.tensors[0].type == types[i].type && t.header.tensors[0].bytes == data, "%s is read", name);
            safetensors_close(&t);
        }

        // As the type of one of a model's weights, with zeros.
        need(safetensors_create(&w, "typed/model.safetensors", &error), "%s", error.text);
        for (int write = 0; write < 2; write++) {
            for (size_t k = 0; k < f.header.count; k++) {
                const SafetensorsTensor* of = &f.header.tensors[k];
                bool norm = strcmp(of->name, "model.norm.weight") == 0;
                size_t n = of->bytes / 4 * (norm ? types[i].bytes : 4);
                need(write ? n <= sizeof zeros && safetensors_write(&w, zeros, n, &error)
                           : safetensors_declare(&w, of->name, norm ? types[i].type : of->type, of->shape, of->dims,
                                                 &error), "%s", error.text);
            }
            need(write || safetensors_begin(&w, &error), "%s", error.text);
        }
        need(safetensors_end(&w, &error), "%s", error.text);
        safetensors_writer_free(&w);
        ModelSource s;
        bool opened = source_open(&s, "typed", &error), floats = strchr(name, 'F') && types[i].bytes < 8;
        if (floats) expect(opened, "%s: %s", name, error.text);
        else expect_refusal(opened, &error, text_of("model.norm.weight is of type %s", name), name);
        if (opened) source_close(&s);
    }
    safetensors_close(&f);
    verdict("every type of the safetensors format by its name and size; as weights only those of up to 32 bits");
}

static void test_out(void) {
    Error error;
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) {
        const char* name = NAMES[i];
        ModelSource s;
        need(source_open(&s, fixture(name), &error), "%s", error.text);
        Dtype dtype = s.dtype;
        source_close(&s);
        ExportType type = dtype == DTYPE_BF16 ? EXPORT_BF16 : dtype == DTYPE_F16 ? EXPORT_F16 : EXPORT_F32;
        expect(export_to(fixture(name), text_of("%s.same", name), type, (size_t)5e9, export_hf, &error) &&
               same_weights(fixture(name), text_of("%s.same", name)), "%s: %s", name, error.text);
        expect(export_to(fixture(name), text_of("%s.f32", name), EXPORT_F32, 3000, export_hf, &error) &&
               same_weights(fixture(name), text_of("%s.f32", name)), "%s in shards: %s", name, error.text);
        int files = directory_count(text_of("%s.f32", name), "-of-");
        expect(files > 3, "%s: shards", name);
        size_t before = 3000;  // no two files have room in one
        for (int k = 1; k <= files; k++) {
            SafetensorsFile f;
            size_t bytes = 0;
            need(safetensors_open(&f, text_of("%s.f32/model-%05d-of-%05d.safetensors", name, k, files), &error), "%s",
                 error.text);
            for (size_t t = 0; t < f.header.count; t++) bytes += f.header.tensors[t].bytes;
            expect(bytes + before > 3000 && (bytes <= 3000 || f.header.count == 1), "%s: file %d has %zu bytes of "
                   "weights, the one before %zu", name, k, bytes, before);
            before = bytes;
            safetensors_close(&f);
        }
        expect(file_exists(text_of("%s.same/model.safetensors", name)) &&
               file_exists(text_of("%s.same/generation_config.json", name)), "%s: files", name);
        Config a, b;
        expect(hf_config_read(&a, text_of("%s/config.json", fixture(name)), &error) &&
               hf_config_read(&b, text_of("%s.same/config.json", name), &error) &&
               fields_agree(CONFIG_FIELDS, CONFIG_FIELD_COUNT, &a, &b, "x", name, &error),
               "%s: the configuration: %s", name, error.text);
    }
    verdict("what is exported in the type that it had, or in f32 in shards, is read back to the same bits");

    // What the other files of an export say, with a tokenizer whose first and last tokens differ, with none of either
    // kind, and without a tokenizer.
    static const struct { const char* tokenizer; int32_t begin, end; } tokenizers[] = {
        {"llama2.json", 1, 2}, {"gpt2.json", 7, 420}, {NULL, -1, -1},
    };
    static const struct { ExportType type; const char* name; size_t shard_bytes; } types[] = {
        {EXPORT_F32, "float32", 3000}, {EXPORT_F16, "float16", (size_t)5e9}, {EXPORT_BF16, "bfloat16", 1000},
    };
    static const char* const classes[] = {"GPT2LMHeadModel", "LlamaForCausalLM", "LlamaForCausalLM",
                                          "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"};
    for (size_t i = 0; i < COUNT_OF(NAMES) * COUNT_OF(tokenizers); i++) {
        size_t n = i / COUNT_OF(tokenizers), k = i % COUNT_OF(tokenizers), bytes;
        Tokenizer tokenizer;
        ModelSource s;
        if (tokenizers[k].tokenizer)
            need(tokenizer_open(&tokenizer, text_of("%s/../tokenizers/%s", fixtures, tokenizers[k].tokenizer), NULL,
                                &error), "%s", error.text);
        need(source_open(&s, fixture(NAMES[n]), &error) && directory_make("says", &error), "%s", error.text);
        if (k == 1) tokenizer.begin_token = 7;  // which the tokenizer does not put before a text
        bool own = n % 2;  // as of a model whose config.json names no tokens
        if (own) s.ids = no_ids;
        const Export e = {.source = &s, .tokenizer = tokenizers[k].tokenizer ? &tokenizer : NULL,
                          .type = types[k].type, .directory = "says", .shard_bytes = types[k].shard_bytes};
        expect(export_hf(&e, &error), "%s", error.text);
        static const char* const files[] = {"config.json", "generation_config.json"};
        for (size_t f = 0; f < COUNT_OF(files); f++) {
            const char* path = text_of("says/%s", files[f]);
            char* text = text_read(path, &bytes);
            Json json;
            need(json_parse(&json, text, bytes, path, &error), "%s", error.text);
            expect_token(&json, "bos_token_id", own ? tokenizers[k].begin : n == 0 ? 0 : 1, path);
            expect_token(&json, "eos_token_id", own ? tokenizers[k].end : n == 0 ? 0 : 2, path);
            char word[64] = "", class_name[64] = "";
            json_string(&json, json_get(&json, 0, "torch_dtype"), word, sizeof word);
            json_string(&json, json_first(&json, json_get(&json, 0, "architectures")), class_name, sizeof class_name);
            bool derived = false;
            json_bool(&json, json_get(&json, 0, "_from_model_config"), &derived);
            if (f == 0) expect(strcmp(word, types[k].name) == 0 && strcmp(class_name, classes[n]) == 0, "%s: %s of %s",
                               NAMES[n], class_name, word);
            else expect(derived && json_count(&json, 0) == 3, "%s: %s", NAMES[n], text);
            json_free(&json);
            free(text);
        }
        expect(file_exists("says/tokenizer.json") == (tokenizers[k].tokenizer != NULL), "%s: the tokenizer", NAMES[n]);
        char* weights = text_read(k == 1 ? "says/model.safetensors" : text_of("says/model-00001-of-%05d.safetensors",
                                                                              directory_count("says", "-of-")), &bytes);
        expect(bytes > 8 && strstr(weights + 8, "{\"__metadata__\": {\"format\": \"pt\"},") == weights + 8,
               "%s: transformers does not load weights without their format", NAMES[n]);
        free(weights);
        char* index = text_read("says/model.safetensors.index.json", &bytes);
        expect(strstr(index, text_of("\"total_size\": %zu,", s.parameters.true_size * (types[k].type ? 2 : 4))) ||
               strstr(index, text_of("\"total_size\": %zu\n", s.parameters.true_size * (types[k].type ? 2 : 4))) ||
               types[k].shard_bytes > 3000, "%s: the size in the index", NAMES[n]);
        free(index);
        source_close(&s);
        if (tokenizers[k].tokenizer) tokenizer_close(&tokenizer);
        remove_tree("says");
    }
    verdict("the files of an export name the first and last token, the dtype and the size");

    // Rounding twice is rounding once: f32 -> bf16 -> f32 -> bf16.
    bool ok = export_to(fixture("qwen2"), "q.bf16", EXPORT_BF16, (size_t)5e9, export_hf, &error) &&
              export_to("q.bf16", "q.f32", EXPORT_F32, (size_t)5e9, export_hf, &error) &&
              export_to("q.f32", "q.bf16.again", EXPORT_BF16, (size_t)5e9, export_hf, &error);
    expect(ok && same_weights("q.bf16", "q.bf16.again") && !same_weights("q.bf16", fixture("qwen2")), "bf16");
    size_t count;
    float *exact = weights_of(fixture("qwen2"), &count), *rounded = weights_of("q.bf16", &count);
    double worst = 0;
    for (size_t i = 0; i < count; i++)
        worst = fmax(worst, fabs(rounded[i] - exact[i]) / fmax(fabs(exact[i]), 0x1p-100));
    expect(worst <= 0x1p-8, "rounding moves a weight by %g of it", worst);
    free(exact);
    free(rounded);
    verdict("an export in bf16 is rounded to the nearest");
    const float large[2] = {65519, 65520};
    char* weights = text_read("q.f32/model.safetensors", &count);
    free(weights);
    patch("q.f32/model.safetensors", count - 4, &large[0], 4);
    expect(export_to("q.f32", "q.f16", EXPORT_F16, (size_t)5e9, export_hf, &error), "%s", error.text);
    patch("q.f32/model.safetensors", count - 4, &large[1], 4);
    ok = export_to("q.f32", "q.f16.no", EXPORT_F16, (size_t)5e9, export_hf, &error);
    expect_refusal(ok, &error, "holds 65520, which f16 cannot", "a large weight");
    verdict("a weight that f16 cannot hold is refused");

    expect(export_to(fixture("gpt2"), "llmc", EXPORT_F32, 0, export_llmc, &error) &&
           same_weights(fixture("gpt2"), "llmc/model.bin"), "f32: %s", error.text);
    expect(export_to("llmc/model.bin", "gpt2.back", EXPORT_F32, (size_t)5e9, export_hf, &error) &&
           same_weights(fixture("gpt2"), "gpt2.back"), "back: %s", error.text);
    ok = export_to(fixture("gpt2"), "gpt2.bf16", EXPORT_BF16, (size_t)5e9, export_hf, &error) &&
         export_to("gpt2.bf16", "llmc16", EXPORT_BF16, 0, export_llmc, &error);
    expect(ok && same_weights("gpt2.bf16", "llmc16/model.bin"), "bf16: %s", error.text);
    int32_t header[8];
    char* text = text_read("llmc/model.bin", &count);
    memcpy(header, text, sizeof header);
    expect(header[0] == 20240326 && header[1] == 3 && header[2] == 16 && header[3] == 40 && header[4] == 2 &&
           header[5] == 4 && header[6] == 16 && header[7] == 128, "the header");
    free(text);
    expect_refusal(export_to(fixture("llama"), "no", EXPORT_F32, 0, export_llmc, &error), &error, "GPT-2", "a llama");
    verdict("GPT-2 goes through llm.c's format and back to the same bits");
}

// ------------------------------------------------------------------------------------------------
// 3. Wide
//
// Every element is known from its place, and exact in all types. Of each family some tensors have more than
// CHECKPOINT_CHUNK elements, and so several pieces in every loop over elements. Of GPT-2's token embedding only the
// padding of llm.c's file is in the second piece.

static float wide_value(size_t tensor, size_t element) {
    uint32_t mixed = ((uint32_t)element + (uint32_t)tensor * 40503u) * 2654435761u;
    return (float)((int)((mixed >> 16) % 511) - 255) / 4096;
}

// The table of a model of C = 576. The caller frees it.
static void wide_config(Config* c, Parameters* p, Family family) {
    Error error;
    Weights weights = {0};
    bool llama = family == FAMILY_LLAMA;
    *c = (Config){.family = family, .layers = 1, .heads = 9, .kv_heads = llama ? 3u : 9u, .channels = 576, .ffn = 2304,
                  .context = 16, .vocab = llama ? 61u : 1820u, .tied = !llama};
    need(config_complete(c, &error) && weights_create(&weights, p, c, NULL, 0, 1, &error), "%s", error.text);
    free(weights.blocks);
}

// Counts an expectation for a tensor: its first element that is not the known one is named.
static void expect_wide(const char* what, const Parameters* p, size_t tensor, const float* values) {
    size_t n = tensor_elements(&p->tensors[tensor]), i = 0;
    while (i < n && values[i] == wide_value(tensor, i)) i++;
    expect(i == n, "%s: %s, element %zu of %zu", what, p->tensors[tensor].name, i, n);
}

// Element i of one of their tensors, which holds rows of one of ours, transposed or not.
static float wide_foreign(const ForeignTensor* f, size_t i) {
    size_t width = f->cols ? f->cols : 1, row = f->transposed ? i % f->rows : i / width;
    return wide_value(f->tensor, (f->first + row) * width + (f->transposed ? i / f->rows : i % width));
}

// Reads a model through source.h.
static void expect_wide_source(const char* path, const Parameters* p) {
    ModelSource s;
    Error error;
    if (!expect(source_open(&s, path, &error), "%s: %s", path, error.text)) return;
    for (size_t i = 0; i < p->count; i++) {
        const float* values;
        if (expect(source_read(&values, &s, i, &error), "%s: %s", path, error.text)) expect_wide(path, p, i, values);
    }
    source_close(&s);
}

// Reads the tensors of a Hugging Face directory as whole, without source.h.
static void expect_wide_files(const char* path, const Config* c, const Parameters* p) {
    ForeignTensor* list;
    size_t count, bytes, found = 0;
    Error error;
    need(convert_list(&list, &count, c, p, &error), "%s", error.text);
    for (int number = 0; number < 100; number++) {
        SafetensorsFile file;
        const char* name = number ? text_of("%s/model-%05d-of-%05d.safetensors", path, number,
                                            directory_count(path, "-of-")) : text_of("%s/model.safetensors", path);
        if (!file_exists(name)) continue;
        need(safetensors_open(&file, name, &error), "%s", error.text);
        for (size_t i = 0; i < count; i++) {
            const SafetensorsTensor* t = safetensors_find(&file, list[i].name);
            size_t n = list[i].rows * max_size(list[i].cols, 1), at = 0;
            if (t == NULL) continue;
            found++;
            void* data = tensor_of(name, list[i].name, &bytes);
            float* values = (float*)memory_allocate(n * sizeof(float));
            need(values && bytes == n * dtype_bytes(t->type), "%s of %zu bytes", list[i].name, bytes);
            convert_to_float(values, data, t->type, n);
            while (at < n && values[at] == wide_foreign(&list[i], at)) at++;
            expect(at == n, "%s: %s, element %zu of %zu", path, list[i].name, at, n);
            free(values);
            free(data);
        }
        safetensors_close(&file);
    }
    expect(found == count, "%s: %zu tensors of %zu", path, found, count);
    free(list);
}

// Writes a Hugging Face directory, each tensor as a whole.
static void put_wide(const char* path, const Config* c, const Parameters* p, Dtype type) {
    ForeignTensor* list;
    SafetensorsWriter w;
    JsonWriter config;
    size_t count;
    Error error;
    need(directory_make(path, &error) && hf_config_write(&config, c, type, &no_ids, &error), "%s", error.text);
    put_bytes(text_of("%s/config.json", path), config.text, config.bytes);
    json_writer_free(&config);
    need(convert_list(&list, &count, c, p, &error) &&
         safetensors_create(&w, text_of("%s/model.safetensors", path), &error), "%s", error.text);
    for (size_t i = 0; i < count; i++) {
        size_t shape[2] = {list[i].transposed ? list[i].cols : list[i].rows, list[i].transposed ? list[i].rows
                                                                                                 : list[i].cols};
        need(safetensors_declare(&w, list[i].name, type, shape, list[i].cols ? 2 : 1, &error), "%s", error.text);
    }
    need(safetensors_begin(&w, &error), "%s", error.text);
    for (size_t i = 0; i < count; i++) {
        size_t n = list[i].rows * max_size(list[i].cols, 1);
        float *values = (float*)memory_allocate(n * sizeof(float)), *data = (float*)memory_allocate(n * sizeof(float));
        need(values && data, "memory");
        for (size_t at = 0; at < n; at++) values[at] = wide_foreign(&list[i], at);
        convert_from_float(data, values, type, n);
        need(safetensors_write(&w, data, n * dtype_bytes(type), &error), "%s", error.text);
        free(values);
        free(data);
    }
    need(safetensors_end(&w, &error), "%s", error.text);
    safetensors_writer_free(&w);
    free(list);
}

// A file of llm.c: after its header the tensors, of one block in the order of our table, the first with zeros after it.
static void expect_wide_llmc(const char* path, const Config* c, const Parameters* p, Dtype type) {
    size_t bytes, at = 1024, size = dtype_bytes(type), padding = (config_padded_vocab(c) - c->vocab) * c->channels;
    char* file = text_read(path, &bytes);
    const int32_t header[256] = {20240326, type == DTYPE_BF16 ? 5 : 3, 16, 1820, 1, 9, 576, 1920};  // of wide_config
    expect(bytes > sizeof header && memcmp(file, header, sizeof header) == 0, "%s: its header", path);
    for (size_t i = 0; i < p->count; i++) {
        size_t n = tensor_elements(&p->tensors[i]), zeros = i == 0 ? padding : 0;
        float* values = (float*)memory_allocate((n + zeros) * sizeof(float));
        need(values && at + (n + zeros) * size <= bytes, "%s has only %zu bytes", path, bytes);
        convert_to_float(values, file + at, type, n + zeros);
        expect_wide(path, p, i, values);
        for (size_t e = n; e < n + zeros; e++) if (values[e] != 0) expect(false, "padding element %zu", e - n);
        at += (n + zeros) * size;
        free(values);
    }
    expect(at == bytes, "%s has %zu bytes, not %zu", path, bytes, at);
    free(file);
}

static bool wide_read(const float** values, void* parameters, size_t tensor, Error* error) {
    static float* whole;
    size_t n = tensor_elements(&((const Parameters*)parameters)->tensors[tensor]);
    (void)error;
    free(whole);
    *values = whole = (float*)memory_allocate(n * sizeof(float));
    for (size_t i = 0; i < n; i++) whole[i] = wide_value(tensor, i);
    return true;
}

// The file that gguf_export writes of the known values, without a source.
static void expect_wide_gguf(const char* path, const Config* c, Parameters* p) {
    size_t counts[2];
    Error error;
    need(gguf_export("known.gguf", c, p, NULL, GGUF_F32, wide_read, p, &error), "%s", error.text);
    char *ours = text_read(path, &counts[0]), *known = text_read("known.gguf", &counts[1]);
    expect(counts[0] == counts[1] && memcmp(ours, known, counts[0]) == 0, "%s", path);
    free(ours);
    free(known);
}

static void test_wide(void) {
    for (int family = FAMILY_GPT2; family <= FAMILY_LLAMA; family++) {
        bool gpt2 = family == FAMILY_GPT2;
        Dtype half = gpt2 ? DTYPE_BF16 : DTYPE_F16;
        ExportType half_type = gpt2 ? EXPORT_BF16 : EXPORT_F16;
        const char* name = gpt2 ? "gpt2" : "llama";
        char run[64];
        Config c;
        Parameters p = {0};
        Model model;
        ModelSource s;
        Error error;
        RunRecord record = {.state = run_state_begin(false, 1.0)};
        ModelOptions options = options_of(1, 8);
        options.training = true;
        wide_config(&c, &p, (Family)family);
        size_t largest = 0;
        for (size_t i = 0; i < p.count; i++) largest = max_size(largest, tensor_elements(&p.tensors[i]));
        need(largest > CHECKPOINT_CHUNK && largest % CHECKPOINT_CHUNK != 0 && largest > 2 * INIT_PIECE &&
             largest > GGUF_PIECE, "the wide model is too small");

        // In: files of both widths, a model, a checkpoint.
        put_wide("wide.half", &c, &p, half);
        put_wide("wide", &c, &p, DTYPE_F32);
        expect_wide_source("wide.half", &p);
        need(source_open(&s, "wide", &error) && model_create(&model, &c, options, &error), "%s", error.text);
        expect(source_load(&model, &s, "init-from", &error), "%s", error.text);
        source_close(&s);
        for (uint32_t i = 0; i < p.count; i++) expect_wide("the model", &p, i, model_param(&model, (TensorId){i}));
        record.config = model.config;
        record.optimizer = model.options.optimizer;
        record.state.step = 3;
        snprintf(run, sizeof run, "wide.%s", name);
        need(directory_make(run, &error) && model_save(&model, &record, run, &error), "%s", error.text);
        model_free(&model);
        expect_wide_source(run, &p);
        verdict("%s: a wide model is imported, loaded and saved to the bit", name);

        // Out: each format, in 32 and 16 bits, one file and several.
        expect(export_to(run, "wide.f32", EXPORT_F32, (size_t)5e6, export_hf, &error), "%s", error.text);
        expect(export_to(run, "wide.16", half_type, (size_t)5e9, export_hf, &error), "%s", error.text);
        expect(directory_count("wide.f32", "-of-") > 2 && directory_count("wide.16", "-of-") == 0, "shards");
        expect_wide_files("wide.f32", &c, &p);
        expect_wide_files("wide.16", &c, &p);
        expect_wide_source("wide.f32", &p);
        expect(export_to(run, "wide.gguf", EXPORT_F32, 0, export_gguf, &error), "%s", error.text);
        expect_wide_gguf("wide.gguf/model.gguf", &c, &p);
        for (int bf16 = 0; gpt2 && bf16 < 2; bf16++) {
            // First a longer tensor than the embedding is read, so that the buffer is not zero after its elements.
            const float* longer;
            const Export e = {.source = &s, .type = bf16 ? EXPORT_BF16 : EXPORT_F32, .directory = "wide.llmc"};
            size_t tensor = 0;
            while (tensor_elements(&p.tensors[tensor]) < largest) tensor++;
            need(source_open(&s, run, &error) && source_read(&longer, &s, tensor, &error), "%s", error.text);
            expect(directory_make("wide.llmc", &error) && export_llmc(&e, &error), "%s", error.text);
            source_close(&s);
            expect_wide_llmc("wide.llmc/model.bin", &c, &p, bf16 ? DTYPE_BF16 : DTYPE_F32);
            expect_wide_source("wide.llmc/model.bin", &p);
        }
        verdict("%s: a wide model is exported to the bit", name);
        static const char* const made[] = {"wide", "wide.half", "wide.f32", "wide.16", "wide.gguf", "wide.llmc",
                                           "known.gguf"};
        for (size_t i = 0; i < COUNT_OF(made); i++) remove_tree(made[i]);
        remove_tree(run);
        parameters_free(&p);
    }
}

// ------------------------------------------------------------------------------------------------
// 4. Runs

// Saves a fixture's model as a checkpoint, in the directory of a run.
static void save_checkpoint(const char* from, const char* out) {
    Model model;
    Tokenizer tokenizer;
    RunRecord record;
    Error error;
    ModelOptions options = options_of(1, 8);
    options.training = true;
    memset(&record, 0, sizeof record);
    need(model_open(&model, &tokenizer, NULL, from, &options, "test", &error), "%s", error.text);
    record.config = model.config;
    record.optimizer = model.options.optimizer;
    record.state = run_state_begin(false, 1.0);
    record.state.step = 7;
    need(directory_make(out, &error) && model_save(&model, &record, out, &error), "%s", error.text);
    tokenizer_close(&tokenizer);
    model_free(&model);
}

static void test_runs(void) {
    Error error;
    Model model;
    Tokenizer tokenizer;
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) {
        save_checkpoint(fixture(NAMES[i]), text_of("%s.run", NAMES[i]));
        expect(same_weights(fixture(NAMES[i]), text_of("%s.run", NAMES[i])) &&
               same_weights(fixture(NAMES[i]), text_of("%s.run/step_00000007", NAMES[i])), "%s", NAMES[i]);
        expect(export_to(text_of("%s.run", NAMES[i]), text_of("%s.hf", NAMES[i]), EXPORT_F32, (size_t)5e9, export_hf,
                         &error) && same_weights(fixture(NAMES[i]), text_of("%s.hf", NAMES[i])), "%s: %s", NAMES[i],
               error.text);
    }
    verdict("a checkpoint of an imported model is exported to the same bits");

    ModelOptions options = options_of(1, 0);
    bool ok = model_open(&model, &tokenizer, "qwen3.run", NULL, &options, "test", &error);
    expect(ok && model.options.T == 32 && tokenizer.vocabulary == 0, "%s", error.text);
    if (ok) model_free(&model);
    flip_byte("qwen3.run/step_00000007/rank_00000.safetensors", 9000);
    expect_refusal(model_open(&model, &tokenizer, NULL, "qwen3.run", &options, "test", &error), &error, "checksum",
                   "a flipped bit");
    expect_refusal(export_to("qwen3.run", "damaged", EXPORT_F32, (size_t)5e9, export_hf, &error), &error, "checksum",
                   "a flipped bit, exported");
    verdict("a run opens at its context, without a tokenizer if it has none; a damaged one is refused");

    for (int context = 8; context <= 16; context += 8) {  // a shorter context is the beginning of the longer
        Config config;
        ModelSource s;
        need(source_open(&s, fixture("gpt2"), &error), "%s", error.text);
        config = s.config;
        config.context = (size_t)context;
        options = options_of(1, 8);
        need(model_create(&model, &config, options, &error), "%s", error.text);
        expect(source_load(&model, &s, "init-from", &error), "%s", error.text);
        const float* positions;
        need(source_read(&positions, &s, 1, &error), "%s", error.text);
        expect(memcmp(model_param(&model, model.weights.position_embedding), positions, 16 * (size_t)context * 4) == 0,
               "positions of %d", context);
        model_free(&model);
        config.context = 24;
        need(model_create(&model, &config, options, &error), "%s", error.text);
        expect_refusal(source_load(&model, &s, "init-from", &error), &error, "--context", "more positions");
        model_free(&model);
        source_close(&s);
    }
    verdict("the context of a GPT-2 can be shortened, but not made longer");
}

// A model of random weights with a tokenizer: both are exported and imported together.
static void test_tokenizer(void) {
    Config config;
    Model model;
    Tokenizer bytes = tokenizer_of_bytes(), tokenizer;
    RunRecord record;
    Error error;
    ModelOptions options = options_of(1, 8);
    memset(&config, 0, sizeof config);
    memset(&record, 0, sizeof record);
    need(config_set(&config, "family=llama layers=1 heads=2 channels=16 context=16 vocab=300 tied=on", &error) &&
         model_create(&model, &config, options, &error) && model_randomize(&model, 1, &error), "%s", error.text);
    record.config = model.config;
    record.state = run_state_begin(false, 1.0);
    record.state.step = 1;
    need(directory_make("bytes.run", &error) && model_save(&model, &record, "bytes.run", &error) &&
         tokenizer_save(&bytes, "bytes.run/tokenizer", &error), "%s", error.text);
    model_free(&model);
    if (!file_exists(export_program)) return;
    expect_program(0, "parameters", text_of("%s --out bytes.run --to hf --dir bytes.hf", export_program));
    static const char* const paths[] = {"bytes.run", "bytes.run/step_00000001", "bytes.hf"};
    for (size_t i = 0; i < COUNT_OF(paths); i++) {
        bool ok = model_open(&model, &tokenizer, i ? NULL : paths[i], i ? paths[i] : NULL, &options, "test", &error);
        expect(ok, "%s: %s", paths[i], error.text);
        if (!ok) continue;
        Tokens tokens;
        memset(&tokens, 0, sizeof tokens);
        expect(tokenizer.vocabulary == 256 && tokenizer_encode(&tokens, &tokenizer, "A\xC3\xA9", 3, &error) &&
               tokens.count == 3 && tokens.ids[0] == 'A', "%s: the tokenizer", paths[i]);
        tokens_free(&tokens);
        tokenizer_close(&tokenizer);
        model_free(&model);
    }
    copy_tree(fixture("llama"), "misfit");
    need(tokenizer_write_bytes("misfit/tokenizer.json", &error), "%s", error.text);
    bool opened = model_open(&model, &tokenizer, NULL, "misfit", &options, "test", &error);
    expect_refusal(opened, &error, "the tokenizer in misfit has 256 tokens, but the model 40; they do not belong "
                   "together", "another model's tokenizer");
    // One of two files, as that of the first GPT-2.
    copy_tree(fixture("llama"), "pair");
    for (int i = 0; i < 2; i++) {
        size_t length;
        char* text = text_read(text_of("%s/../tokenizers/gpt2/%s", fixtures, GPT2_FILES[1][i]), &length);
        put_bytes(text_of("pair/%s", GPT2_FILES[1][i]), text, length);
        free(text);
    }
    opened = model_open(&model, &tokenizer, NULL, "pair", &options, "test", &error);
    expect_refusal(opened, &error, "the tokenizer in pair has", "another model's tokenizer of two files");
    verdict("a tokenizer goes out and in with its model");
}

// SentencePiece tokenizers put a space before a text, but not before a continuation of one.
static void test_continued(void) {
    Tokenizer tokenizer;
    Error error;
    Tokens tokens;
    TextList none;
    SampleText text;
    memset(&tokens, 0, sizeof tokens);
    memset(&none, 0, sizeof none);
    memset(&text, 0, sizeof text);
    const char* words = "One word and another";
    need(tokenizer_open(&tokenizer, text_of("%s/../tokenizers/llama2.json", fixtures), NULL, &error) &&
         tokenizer_encode(&tokens, &tokenizer, words, strlen(words), &error), "%s", error.text);
    for (size_t cut = 0; cut <= tokens.count; cut++) {
        Tokens before = tokens;
        size_t length = 0;
        before.count = cut;
        for (size_t i = 0, bytes; i < cut; i++, length += bytes) tokenizer_piece(&bytes, &tokenizer, tokens.ids[i]);
        length -= length > 0;  // the space before the text
        sample_text_begin(&text, &tokenizer, &before);
        for (size_t i = cut; i < tokens.count; i++)
            need(sample_text_add(&text, tokens.ids[i], NULL, &none, &error), "%s", error.text);
        need(sample_text_end(&text, &none, &error), "%s", error.text);
        expect(text.bytes == strlen(words + length) && memcmp(text.text, words + length, text.bytes) == 0,
               "after %zu tokens: '%.*s'", cut, (int)text.bytes, text.text);
    }
    sample_text_free(&text);
    tokens_free(&tokens);
    tokenizer_close(&tokenizer);
    verdict("what continues a text keeps the space that it begins with");
}

// ------------------------------------------------------------------------------------------------
// 5. Keys
//
// The facts are those of transformers, in tables of their own: config_keys.txt, which dev/peers/config_keys.py records,
// has what becomes of every key that transformers or the program's tables know. The loops go over the keys of both.

static const char* const TYPES[] = {"gpt2", "llama", "mistral", "qwen2", "qwen3"};
static char* recorded;             // config_keys.txt
static char* recorded_values[32];  // as JSON; the texts of its first line
static size_t recorded_count;

// The line of a key, after its name; NULL if there is none.
static const char* recorded_line(const char* what, const char* type, const char* key) {
    const char* line = text_of("\n%s\t%s\t%s\t", what, type, key);
    const char* found = strstr(recorded, line);
    return found ? found + strlen(line) : NULL;
}

// What transformers has for a size that a file lacks, or that is null; NAN if it fails.
static double recorded_size(const char* type, const char* key, bool null) {
    const char* line = recorded_line("size", type, key);
    need(line != NULL, "config_keys.txt lacks %s of %s: run dev/peers/config_keys.py", key, type);
    if (null) line = strchr(line, '\t') + 1;
    return strncmp(line, "true", 4) == 0 ? 1 : strncmp(line, "false", 5) == 0 ? 0
           : strncmp(line, "none", 4) == 0 ? (double)NAN : strtod(line, NULL);
}

// Keys that a file may lack; transformers then takes a value that fits. All other sizes must be there: their defaults
// are those of a published model.
static const struct { const char *types, *key; } IMPLIED[] = {
    {"gpt2", "n_inner"},
    {"gpt2", "n_positions"},
    {"gpt2", "layer_norm_epsilon"},
    {"gpt2", "tie_word_embeddings"},
    {"llama", "num_key_value_heads"},
    {"llama|mistral|qwen2", "head_dim"},
    {"llama|mistral|qwen2|qwen3", "max_position_embeddings"},
    {"llama|mistral|qwen2|qwen3", "rms_norm_eps"},
    {"llama|mistral|qwen2|qwen3", "rope_theta"},
    {"llama|mistral|qwen2|qwen3", "tie_word_embeddings"},
};

// Values, as JSON writes them, with which transformers computes what our model does: the first is its own for a file
// without the key. With any other, or in another architecture, it computes something else, or fails.
static const struct { const char *types, *key; const char* values[3]; } COMPUTED[] = {
    {"gpt2", "activation_function", {"\"gelu_new\"", "\"gelu_pytorch_tanh\""}},
    {"gpt2", "scale_attn_weights", {"true"}},
    {"gpt2", "scale_attn_by_inverse_layer_idx", {"false"}},
    {"llama|mistral|qwen2|qwen3", "hidden_act", {"\"silu\"", "\"swish\""}},
    {"llama|mistral|qwen2|qwen3", "attention_bias", {"false"}},
    {"llama|mistral|qwen2|qwen3", "mlp_bias", {"false"}},
    {"llama|mistral|qwen2|qwen3", "rope_interleaved", {"false"}},
    {"llama|mistral|qwen2|qwen3", "use_mrope", {"false"}},
    {"llama|mistral|qwen2|qwen3", "partial_rotary_factor", {"null", "1", "1.0"}},
    {"qwen2|qwen3", "use_sliding_window", {"false"}},
    {"gpt2|llama|mistral|qwen2|qwen3", "quantization_config", {"null"}},
    {"gpt2|llama|mistral|qwen2|qwen3", "is_encoder_decoder", {"false"}},
    {"gpt2|llama|mistral|qwen2|qwen3", "add_cross_attention", {"false"}},
};

// Some JSON of every kind.
static const char* const VALUES[] = {
    "null", "true", "false", "0", "1", "1.0", "-1", "0.5", "32", "4096", "\"\"", "\"true\"", "\"false\"", "\"null\"",
    "\"1\"", "\"1.0\"", "\"relu\"", "\"gelu\"", "\"gelu_new\"", "\"gelu_pytorch_tanh\"", "\"silu\"", "\"swish\"",
    "\"full_attention\"", "\"sliding_attention\"", "[]", "[1]", "[\"full_attention\"]",
    "[\"full_attention\", \"sliding_attention\"]", "{}", "{\"0\": [1]}", "{\"0\": \"full_attention\"}"};

// The text of a fixture's config.json without a key, or with another value of it. The caller frees it.
static char* config_edited(const char* text, const char* key, const char* value) {
    const char* member = strstr(text, text_of("\n  \"%s\":", key));
    const char* rest = member ? strstr(member + 1, "\n  \"") : NULL;  // the next key of the outer object
    size_t before = member ? (size_t)(member - text) : (size_t)(strrchr(text, '}') - text);
    char* edited = (char*)malloc(strlen(text) + strlen(key) + (value ? strlen(value) : 0) + 32);
    need(edited != NULL, "memory");
    memcpy(edited, text, before);
    if (rest) strcpy(edited + before, rest);
    size_t end = rest ? (size_t)(strrchr(edited, '}') - edited) : before;
    if (!rest) edited[end] = 0;
    while (end > 0 && strchr(" \n,", edited[end - 1])) end--;
    sprintf(edited + end, value ? ",\n  \"%s\": %s\n}\n" : "\n}\n", key, value);
    return edited;
}

// Reads a configuration with one key changed.
static bool read_edited(Config* c, const char* text, const char* key, const char* value, Error* error) {
    Json json;
    char* edited = config_edited(text, key, value);
    bool ok = json_parse(&json, edited, strlen(edited), "edited.json", error);
    need(ok, "%s: %s", edited, error->text);
    ok = hf_config_parse(c, &json, "edited.json", error) && convert_complete(c, "edited.json", true, error);
    json_free(&json);
    free(edited);
    return ok;
}

static double field_number(const Field* field, const Config* c) {
    const char* member = (const char*)c + field->offset;
    if (field->offset == offsetof(Config, head_size)) return (double)config_head_size(c);
    return field->kind == KIND_COUNT ? (double)*(const size_t*)member
           : field->kind == KIND_REAL ? *(const double*)member : (double)*(const bool*)member;
}

// One architecture's keys that are members of Config: deleted, null, and of values that they cannot have.
static void expect_members(const char* type, const char* text) {
    static const char* const wrong[] = {"\"16\"", "true", "[]", "[16]", "{}", "-1", "0", "0.0"};
    size_t count;
    Config c;
    Error error;
    const Field* keys = hf_keys(&count, strcmp(type, "gpt2") == 0 ? FAMILY_GPT2 : FAMILY_LLAMA);
    for (size_t i = 0; i < count; i++) {
        const char* key = keys[i].name;
        for (int null = 0; null < 2; null++) {
            const char* what = text_of("%s: %s %s", type, key, null ? "is null" : "is not there");
            bool implied = false, ok = read_edited(&c, text, key, null ? "null" : NULL, &error);
            for (size_t k = 0; k < COUNT_OF(IMPLIED); k++) {
                if (strcmp(IMPLIED[k].key, key) != 0 || choice_find(IMPLIED[k].types, type) < 0) continue;
                double value = recorded_size(type, key, null);  // where transformers refuses null, ours is no key
                implied = true;
                if (isnan(value)) value = recorded_size(type, key, false);
                expect(ok && field_number(&keys[i], &c) == value, "%s: %s", what,
                       ok ? text_of("it is %g", field_number(&keys[i], &c)) : error.text);
            }
            if (!implied) expect_refusal(ok, &error, text_of("lacks \"%s\"", key), what);
        }
        for (size_t k = 0; k < COUNT_OF(wrong); k++) {
            bool truth = keys[i].kind == KIND_SWITCH, fits = truth && strcmp(wrong[k], "true") == 0;
            bool ok = read_edited(&c, text, key, wrong[k], &error);
            const char* what = text_of("%s: %s is %s", type, key, wrong[k]);
            if (fits) expect(ok && field_number(&keys[i], &c) == 1, "%s", what);
            else expect_refusal(ok, &error, text_of("\"%s\" is ", key), what);
        }
        bool ok = keys[i].kind != KIND_COUNT || read_edited(&c, text, key, "1.5", &error);
        if (keys[i].kind == KIND_COUNT) expect_refusal(ok, &error, text_of("\"%s\" is 1.5", key), key);
    }
}

// One architecture's other keys, whatever rule they have: values that change what is computed are refused by name, and
// all others leave the configuration as it is.
static void expect_rules(const char* type, const char* text) {
    Config before, c;
    Error error;
    put_text("whole.json", text);
    need(hf_config_read(&before, "whole.json", &error), "%s", error.text);
    for (size_t i = 0; i < COUNT_OF(COMPUTED); i++) {
        const char* key = COMPUTED[i].key;
        bool known = choice_find(COMPUTED[i].types, type) >= 0;
        for (size_t v = 0; v < COUNT_OF(VALUES); v++) {
            bool good = false, ok = read_edited(&c, text, key, VALUES[v], &error);
            for (size_t k = 0; k < 3 && COMPUTED[i].values[k]; k++)
                good = good || (known && strcmp(COMPUTED[i].values[k], VALUES[v]) == 0);
            const char* what = text_of("%s: %s is %s", type, key, VALUES[v]);
            if (good) expect(ok && memcmp(&c, &before, sizeof c) == 0, "%s: %s", what, error.text);
            else expect_refusal(ok, &error, text_of("\"%s\"", key), what);
        }
        bool ok = read_edited(&c, text, key, NULL, &error);
        expect(ok && memcmp(&c, &before, sizeof c) == 0, "%s without %s: %s", type, key, error.text);
    }
    const Architecture* a = ARCHITECTURES;
    while (strcmp(a->type, type) != 0) a++;
    for (size_t i = 0; i < CONFIG_RULE_COUNT; i++) {
        char keys[1024];
        snprintf(keys, sizeof keys, "%s", CONFIG_RULES[i].keys);
        for (char *rest = keys, *key; (key = strsep(&rest, "|")) != NULL;) {
            bool fact = false;
            RuleKind kind = hf_rule(a, key) ? hf_rule(a, key)->kind : RULE_VALUES;
            for (size_t k = 0; k < COUNT_OF(COMPUTED); k++) fact = fact || strcmp(COMPUTED[k].key, key) == 0;
            expect(fact || CONFIG_RULES[i].kind != RULE_VALUES, "%s has no row in this test", key);
            if (fact || hf_rule(a, key) == NULL || kind == RULE_ROPE || strcmp(key, "model_type") == 0) continue;
            for (size_t v = 0; v < COUNT_OF(VALUES); v++) {
                const char* value = VALUES[v];
                bool window = strcmp(value, "32") == 0 || strcmp(value, "4096") == 0;  // the context is 32
                bool none = strcmp(value, "null") == 0 || (kind == RULE_LAYERS && (strcmp(value, "[]") == 0 ||
                                                                                   strcmp(value, "{}") == 0));
                bool full = strcmp(key, "layer_types") == 0 && strcmp(value, "[\"full_attention\"]") == 0;
                bool good = kind == RULE_UNREAD || none || full || (kind == RULE_WINDOW && window);
                bool ok = read_edited(&c, text, key, value, &error);
                const char* what = text_of("%s: %s is %s", type, key, value);
                if (good) expect(ok && memcmp(&c, &before, sizeof c) == 0, "%s: %s", what, error.text);
                else expect_refusal(ok, &error, text_of("\"%s\"", key), what);
            }
        }
    }
    expect_refusal(read_edited(&c, text, "a_new_key", "null", &error), &error, "a_new_key", type);
}

// One architecture's keys and RoPE objects with every value that was recorded: what is accepted computes what
// transformers computes.
static void expect_recorded(const char* type, const char* text) {
    Config before, c;
    Error error;
    char *lines = strdup(recorded), *rest = lines, *line;
    const Architecture* a = ARCHITECTURES;
    size_t keys = 0, ropes = 0;
    while (strcmp(a->type, type) != 0) a++;
    put_text("whole.json", text);
    need(hf_config_read(&before, "whole.json", &error), "%s", error.text);
    while ((line = strsep(&rest, "\n")) != NULL) {
        const char* kind = strsep(&line, "\t");
        const char* of = line ? strsep(&line, "\t") : NULL;
        if (of == NULL || strcmp(of, type) != 0) continue;
        const char* key = strsep(&line, "\t");
        if (strcmp(kind, "rope") == 0) {
            bool ok = read_edited(&c, text, "rope_scaling", key, &error), fails = strtod(line, NULL) == 0;
            size_t D = ok ? config_head_size(&c) : 0;
            if (fails) expect_refusal(ok, &error, "", key);
            for (size_t i = 0; ok && !fails && i < D / 2; i++) {
                RopeOptions rope = config_rope(&c);
                double is = rope_frequency(&rope, i, D), wanted = strtod(strsep(&line, "\t"), NULL);
                expect(fabs(is / wanted - 1) < 1e-6, "%s: %s: pair %zu turns by %g, not %g", type, key, i, is,
                       wanted);
            }
            ropes++;
        }
        for (size_t i = 0; strcmp(kind, "key") == 0 && i <= recorded_count; i++) {
            const char* value = i ? recorded_values[i - 1] : NULL;
            bool ok = read_edited(&c, text, key, value, &error);
            const char* what = text_of("%s: %s %s", type, key, value ? value : "is not there");
            if (line[i] == '~') expect_refusal(ok, &error, text_of("\"%s\"", key), what);
            else if (ok) expect(memcmp(&c, &before, sizeof c) == 0, "%s changes the configuration", what);
            keys++;
        }
    }
    expect(keys > 500 && (ropes > 20) == (strcmp(type, "gpt2") != 0), "%zu keys, %zu objects", keys, ropes);
    for (size_t i = 0; i < CONFIG_RULE_COUNT; i++) {
        char all[1024];
        snprintf(all, sizeof all, "%s", CONFIG_RULES[i].keys);
        for (char *next = all, *key; (key = strsep(&next, "|")) != NULL;)
            expect(hf_rule(a, key) == NULL || CONFIG_RULES[i].kind == RULE_ROPE || strcmp(key, "model_type") == 0 ||
                   recorded_line("key", type, key), "config_keys.txt lacks %s of %s", key, type);
    }
    free(lines);
}

// The keys of a RoPE object: of each kind of scaling that transformers has, and each key of those that our model has.
static void expect_ropes(const char* type, const char* text) {
    static const char* const kinds[] = {"default", "linear", "llama3", "dynamic", "longrope", "proportional", "yarn",
                                        "su", "mrope", ""};
    static const char* const objects[] = {"rope_scaling", "rope_parameters"};
    static const char* const keys[] = {"factor", "low_freq_factor", "high_freq_factor",
                                       "original_max_position_embeddings", "rope_theta", "rope_type"};
    static const char* const values[] = {"4.0", "1.5", "3.5", "16", "500.0"};
    Config c;
    Error error;
    bool gpt2 = strcmp(type, "gpt2") == 0;
    char* plain = config_edited(text, objects[1], NULL);
    for (size_t o = 0; o < COUNT_OF(objects); o++) {
        for (size_t i = 0; i < COUNT_OF(kinds); i++) {
            bool ok = read_edited(&c, plain, objects[o],
                                  text_of("{\"rope_type\": \"%s\", \"factor\": 4.0, \"low_freq_factor\": 1.5, "
                                          "\"high_freq_factor\": 3.5, \"original_max_position_embeddings\": 16, "
                                          "\"rope_theta\": 500.0}", kinds[i]), &error);
            const char* what = text_of("%s: %s of type %s", type, objects[o], kinds[i]);
            if (gpt2) expect_refusal(ok, &error, objects[o], what);
            else if (i > 2) expect_refusal(ok, &error, "rope_type", what);
            else expect(ok && (size_t)c.rope_scaling == i && c.rope_theta == 500 && (i < 1 || c.rope_factor == 4) &&
                        (i < 2 || (c.rope_low_freq == 1.5 && c.rope_high_freq == 3.5 && c.rope_original == 16)),
                        "%s: %s", what, error.text);
        }
        // Of llama3's keys each one deleted, null, or wrong; and keys of other kinds.
        for (size_t i = 0; !gpt2 && i < COUNT_OF(keys); i++) {
            static const char* const changes[] = {NULL, "null", "\"4\"", "true", "[]", "-1", "0"};
            for (size_t v = 0; v < COUNT_OF(changes); v++) {
                const char* change = changes[v];
                char object[512] = "{";
                size_t used = 1;
                for (size_t k = 0; k < COUNT_OF(keys); k++) {
                    const char* value = k != i ? k < 5 ? values[k] : "\"llama3\"" : change;
                    if (value) used += (size_t)sprintf(object + used, "%s\"%s\": %s", used > 1 ? ", " : "", keys[k],
                                                       value);
                }
                sprintf(object + used, "}");
                bool ok = read_edited(&c, plain, objects[o], object, &error);
                const char* what = text_of("%s: %s", type, object);
                if (!change && i == 4) expect(ok && c.rope_theta == 10000, "%s: %s", what, error.text);
                else if (!change && i == 5) expect(ok && c.rope_scaling == ROPE_SCALING_NONE, "%s", what);
                else if (i < 5 && v < 2) expect_refusal(ok, &error, text_of("lacks \"%s\"", keys[i]), what);
                else if (i != 3 && i < 5 && change[0] == '-') expect_refusal(ok, &error, "'-1'; give a number", what);
                else expect_refusal(ok, &error, text_of("\"%s\" is ", keys[i]), what);
            }
        }
        static const char* const unknown[] = {"beta_fast", "attention_factor", "mscale", "truncate", "short_factor"};
        for (size_t i = 0; !gpt2 && i < COUNT_OF(unknown); i++)
            expect_refusal(read_edited(&c, plain, objects[o],
                                       text_of("{\"rope_type\": \"linear\", \"factor\": 4.0, \"%s\": 1}", unknown[i]),
                                       &error), &error, unknown[i], type);
    }
    free(plain);
}

static void test_keys(void) {
    Config c;
    Error error;
    char* values = recorded = text_read(text_of("%s/../config_keys.txt", fixtures), NULL);
    values = strstr(values, "\nvalues\t");
    need(values != NULL, "config_keys.txt");
    values = strdup(values + 8);
    values[strcspn(values, "\n")] = 0;
    for (char *rest = values, *value; (value = strsep(&rest, "\t")) != NULL;) recorded_values[recorded_count++] = value;
    for (size_t i = 0; i < COUNT_OF(TYPES); i++) {
        char* text = text_read(text_of("%s/config.json", fixture(TYPES[i])), NULL);
        char* plain = config_edited(text, "rope_parameters", NULL);  // it may have a rope_theta of its own
        expect_members(TYPES[i], plain);
        verdict("%s: keys of sizes that are missing, null or wrong: refused, or what transformers takes", TYPES[i]);
        expect_rules(TYPES[i], text);
        verdict("%s: every other key, with every kind of value", TYPES[i]);
        expect_ropes(TYPES[i], text);
        verdict("%s: every RoPE scaling and each of its keys", TYPES[i]);
        expect_recorded(TYPES[i], plain);
        verdict("%s: what is accepted of every key computes what transformers computes", TYPES[i]);
        free(text);
        free(plain);
    }
    static const char* const others[] = {"\"gpt_neo\"", "\"gptj\"", "\"gpt_bigcode\"", "\"gemma\"", "\"mixtral\"",
                                         "\"ministral\"", "\"qwen2_moe\"", "\"qwen3_moe\"", "\"phi3\"", "\"llama4\"",
                                         "\"LLAMA\"", "\"llama|mistral\"", "\"\"", "null", "7", "[\"llama\"]"};
    char* text = text_read(text_of("%s/config.json", fixture("llama")), NULL);
    for (size_t i = 0; i < COUNT_OF(others); i++)
        expect_refusal(read_edited(&c, text, "model_type", others[i], &error), &error, "model_type", others[i]);
    expect_refusal(read_edited(&c, text, "model_type", NULL, &error), &error, "model_type", "none");
    free(text);
    free(values);
    free(recorded);
    verdict("other architectures are refused");
}

// ------------------------------------------------------------------------------------------------
// 7. Bad files

// Replaces the first `old` in a file, which must be there.
static void replace(const char* path, const char* old, const char* new_text) {
    size_t bytes;
    char* text = text_read(path, &bytes);
    char* at = text;
    while (at < text + bytes && strncmp(at, old, strlen(old)) != 0) at++;  // there may be zero bytes before it
    if (at == text + bytes) at = NULL;
    need(at != NULL, "'%s' in %s", old, path);
    FILE* file = fopen(path, "wbe");
    need(file != NULL, "%s", path);
    fwrite(text, 1, (size_t)(at - text), file);
    fputs(new_text, file);
    fwrite(at + strlen(old), 1, bytes - (size_t)(at - text) - strlen(old), file);
    need(fclose(file) == 0, "%s", path);
    free(text);
}

static void expect_bad(const char* path, const char* words, const char* what) {
    ModelSource s;
    Error error;
    int before = open_descriptors();
    bool opened = source_open(&s, path, &error);
    if (opened) source_close(&s);
    expect_refusal(opened, &error, words, what);
    expect(open_descriptors() == before, "%s: a descriptor stays open", what);
}

static void test_bad_configs(void) {
    static const struct { const char *fixture, *old, *with, *words; } cases[] = {
        {"gpt2", "\"n_layer\": 2,", "", "lacks \"n_layer\""},
        {"gpt2", "\"n_layer\": 2,", "\"n_layer\": 2, \"new_a\": 1, \"new_b\": [2],",
         "gpt2: \"new_a\", \"new_b\"; remove"},
        {"gpt2", "\"n_layer\": 2,", "\"n_layer\": 2, \"quantization_config\": {\"quant_method\": \"fp8\"},",
         "\"quant_method\" is fp8, which this program does not support: it supports bitsandbytes"},
        {"gpt2", "\"n_embd\": 16", "\"n_embd\": \"16\"", "\"n_embd\" is 16, which is not a valid value"},
        {"gpt2", "\"n_embd\": 16", "\"n_embd\": -16", "\"n_embd\" is -16"},
        {"gpt2", "\"n_head\": 4", "\"n_head\": 5", "do not divide"},
        {"gpt2", "\"n_head\": 4", "\"n_head\": 0", "\"n_head\" is 0"},
        {"gpt2", "\"vocab_size\": 40", "\"vocab_size\": 99999999999",
         "\"vocab_size\" is '99999999999'; give a whole number"},
        {"gpt2", "\"layer_norm_epsilon\": 1e-05", "\"layer_norm_epsilon\": -1e-06",
         "\"layer_norm_epsilon\" is '-1e-06'; give a number from 0 to 1"},
        {"gpt2", "GPT2LMHeadModel", "GPT2ForSequenceClassification",
         "\"architectures\" is GPT2ForSequenceClassification, which this program does not support"},
        {"gpt2", "{", "<!doctype html>{", "config.json begins with '<', as a web page does"},
        {"gpt2", "{", "version https://git-lfs.github.com/spec/v1\n", "config.json is a pointer of Git LFS"},
        {"gpt2", "\"use_cache\": true", "\"a\\u001b[31m\": true", "\"a\\x1b[31m\""},
        {"gpt2", "\"vocab_size\": 40", "\"vocab_size\": 41", "41 x 16"},
        {"gpt2", "\"n_embd\": 16", "\"n_embd\": 32", "wte.weight is not 40 x 32"},
        {"gpt2", "gelu_new", "relu", "\"activation_function\" is relu"},
        {"gpt2", "\"use_cache\": true", "\"scale_attn_weights\": false", "scale_attn_weights"},
        {"gpt2", "\"use_cache\": true", "\"a_new_kind_of_layer\": true", "a_new_kind_of_layer"},
        {"gpt2", "\"model_type\": \"gpt2\"", "\"model_type\": \"bloom\"", "bloom"},
        {"gpt2", "\"model_type\": \"gpt2\",", "", "model_type"},
        {"gpt2", "{", "[", "not valid JSON"},
        {"llama", "\"rope_type\": \"llama3\"", "\"rope_type\": \"yarn\"", "yarn"},
        {"llama", "\"factor\": 8.0,", "", "lacks \"factor\""},
        {"llama", "\"factor\": 8.0,", "\"factor\": 8.0, \"beta_fast\": 32,", "beta_fast"},
        {"llama", "\"factor\": 8.0,", "\"factor\": 0.5,", "needs \"factor\", at least 1"},
        {"llama", "\"attention_bias\": false", "\"attention_bias\": true", "attention_bias"},
        {"llama", "\"mlp_bias\": false", "\"mlp_bias\": true", "mlp_bias"},
        {"llama", "\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"", "hidden_act"},
        {"llama", "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3", "choose \"num_key_value_heads\" so that"},
        {"llama", "\"head_dim\": 4", "\"head_dim\": 5", "head size 5"},
        {"llama", "\"head_dim\": 4", "\"head_dim\": 8", "q_proj.weight is not 32 x 16"},
        {"llama", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false", "no tensor lm_head.weight"},
        {"llama", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3", "no tensor model.layers.2."},
        {"llama", "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1", "belongs to no tensor"},
        {"llama", "\"use_cache\": true", "\"quantization_config\": {\"bits\": 4}", "quantization_config"},
        {"mistral", "\"sliding_window\": null", "\"sliding_window\": 16", "sliding_window"},
        {"mistral", "\"num_key_value_heads\": 2,", "", "lacks \"num_key_value_heads\""},
        {"mistral", "\"rope_scaling\": null", "\"rope_scaling\": 8", "\"rope_scaling\" is not an object"},
        {"llama", "\"use_cache\": true", "\"rope_scaling\": [8]", "\"rope_scaling\" is not an object"},
        {"qwen2", "\"use_sliding_window\": false", "\"use_sliding_window\": true", "use_sliding_window"},
        {"qwen2", "\"full_attention\"", "\"sliding_attention\"", "sliding_attention"},
        {"qwen2", "\"model_type\": \"qwen2\"", "\"model_type\": \"llama\"", "use_sliding_window"},
        {"qwen3", "\"head_dim\": 8,", "", "lacks \"head_dim\""},
        {"qwen3", "\"intermediate_size\": 24", "\"intermediate_size\": 25", "25 x 16"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        remove_tree("bad");
        copy_tree(fixture(cases[i].fixture), "bad");
        replace("bad/config.json", cases[i].old, cases[i].with);
        expect_bad("bad", cases[i].words, cases[i].with[0] ? cases[i].with : cases[i].old);
    }
    remove_tree("bad");
    copy_tree(fixture("mistral"), "bad");
    replace("bad/config.json", "\"max_position_embeddings\": 32", "\"max_position_embeddings\": 8192");
    replace("bad/config.json", "\"sliding_window\": null,", "");
    expect_bad("bad", "lacks \"sliding_window\", whose default is 4096 tokens, fewer than its context of 8192",
               "a long context without a window");
    verdict("configurations that lack a key, or ask for what our model does not compute, are refused by name");

    static const struct { const char *fixture, *old, *with; } good[] = {
        {"mistral", "\"sliding_window\": null", "\"sliding_window\": 32"},
        {"mistral", "\"sliding_window\": null,", ""},
        {"gpt2", "\"n_layer\": 2", "\"n_layer\": 2, \"n_inner\": null"},
        {"gpt2", "\"n_layer\": 2", "\"n_layer\": 2, \"n_inner\": 64"},
        {"llama", "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 2, \"partial_rotary_factor\": 1.0"},
        {"llama", "\"rope_type\": \"llama3\"", "\"type\": \"llama3\""},
        {"llama_linear", "\"initializer_range\": 0.02", "\"initializer_range\": 7"},
        {"llama", "\"use_cache\": true", "\"rope_scaling\": {}"},
        {"llama", "\"use_cache\": true", "\"rope_scaling\": null"},
    };
    for (size_t i = 0; i < COUNT_OF(good); i++) {
        ModelSource s;
        Error error;
        remove_tree("bad");
        copy_tree(fixture(good[i].fixture), "bad");
        replace("bad/config.json", good[i].old, good[i].with);
        bool opened = source_open(&s, "bad", &error);
        expect(opened, "%s: %s", good[i].with, error.text);
        if (opened) source_close(&s);
    }
    verdict("what changes no result is accepted");

    // If there are two RoPE objects "rope_scaling" is read, in either order; an empty one does not count.
    static const struct { const char* put; RopeScaling scaling; } ropes[] = {
        {"{\"rope_scaling\": {},", ROPE_SCALING_LLAMA3},
        {"{\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2.0},", ROPE_SCALING_LINEAR},
        {"\"rope_scaling\": {}}", ROPE_SCALING_LLAMA3},
        {"\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 2.0}}", ROPE_SCALING_LINEAR},
    };
    for (size_t i = 0; i < COUNT_OF(ropes); i++) {
        Config config;
        Error error;
        size_t bytes;
        char *text = text_read(text_of("%s/config.json", fixture("llama")), &bytes), *end = strrchr(text, '}');
        *end = 0;
        put_text("rope.json", ropes[i].put[0] == '{' ? text_of("%s%s}", ropes[i].put, text + 1)
                                                     : text_of("%s,%s", text, ropes[i].put));
        expect(hf_config_read(&config, "rope.json", &error) && config.rope_scaling == ropes[i].scaling, "%s: %s",
               ropes[i].put, error.text);
        free(text);
    }
    verdict("of rope_scaling and rope_parameters the first is read");
}

// Rewrites a file of weights, with a head equal to its embedding except for one element, changed by `change`.
static void add_head(const char* from, const char* to, size_t element, float change) {
    Error error;
    SafetensorsFile file;
    SafetensorsWriter w;
    need(safetensors_open(&file, from, &error) && safetensors_create(&w, to, &error), "%s", error.text);
    const SafetensorsTensor* embedding = safetensors_find(&file, "model.embed_tokens.weight");
    need(embedding != NULL && embedding->type == DTYPE_F32, "%s", from);
    for (size_t i = 0; i <= file.header.count; i++) {
        const SafetensorsTensor* t = i < file.header.count ? &file.header.tensors[i] : embedding;
        const char* name = i < file.header.count ? t->name : "lm_head.weight";
        need(safetensors_declare(&w, name, t->type, t->shape, t->dims, &error), "%s", error.text);
    }
    need(safetensors_begin(&w, &error), "%s", error.text);
    for (size_t i = 0; i <= file.header.count; i++) {
        const SafetensorsTensor* t = i < file.header.count ? &file.header.tensors[i] : embedding;
        float* values = (float*)malloc(t->bytes);
        need(values && safetensors_read(&file, t, values, t->bytes, NULL, &error), "%s", error.text);
        if (i == file.header.count) values[element] += change;
        need(safetensors_write(&w, values, t->bytes, &error), "%s", error.text);
        free(values);
    }
    need(safetensors_end(&w, &error), "%s", error.text);
    safetensors_writer_free(&w);
    safetensors_close(&file);
}

// transformers ties a head only if it is the embedding.
static void test_heads(void) {
    Error error;
    ModelSource s;
    copy_tree(fixture("qwen2"), "tied");
    add_head(text_of("%s/model.safetensors", fixture("qwen2")), "tied/model.safetensors", 0, 0);
    bool opened = source_open(&s, "tied", &error);
    expect(opened, "%s", error.text);
    if (opened) source_close(&s);
    expect(same_weights("tied", fixture("qwen2")), "a copy of the embedding");
    add_head(text_of("%s/model.safetensors", fixture("qwen2")), "tied/model.safetensors", 0, 1);
    expect_bad("tied", "lm_head.weight that is not model.embed_tokens.weight", "another head");
    // An embedding of two pieces, one of them a single row: every row of the head is compared.
    Config c;
    Parameters p = {0};
    wide_config(&c, &p, FAMILY_LLAMA);
    parameters_free(&p);
    c.ffn = 8;
    c.vocab = 1821;
    c.tied = true;
    Weights weights = {0};
    need(weights_create(&weights, &p, &c, NULL, 0, 1, &error), "%s", error.text);
    put_wide("tied.wide", &c, &p, DTYPE_F32);
    need(rename("tied.wide/model.safetensors", "tied.safetensors") == 0, "tied.safetensors");
    const size_t last = c.vocab * c.channels - 1;
    static const size_t parts[] = {0, CHECKPOINT_CHUNK - 1, CHECKPOINT_CHUNK};
    for (size_t i = 0; i <= COUNT_OF(parts); i++) {
        add_head("tied.safetensors", "tied.wide/model.safetensors", i < COUNT_OF(parts) ? parts[i] : last, 1);
        expect_bad("tied.wide", "lm_head.weight that is not model.embed_tokens.weight", "another element of the head");
    }
    add_head("tied.safetensors", "tied.wide/model.safetensors", 0, 0);
    expect_wide_source("tied.wide", &p);
    remove_tree("tied.wide");
    free(weights.blocks);
    parameters_free(&p);
    verdict("the head of a tied model may be saved, but only as a copy");

    // A llama's heads divide its channels; a mistral's need not.
    JsonWriter w;
    need(hf_config_read(&c, text_of("%s/config.json", fixture("mistral")), &error), "%s", error.text);
    for (int even = 0; even < 2; even++) {
        c.channels = even ? 16 : 18;
        c.head_size = even ? 0 : 4;
        need(hf_config_write(&w, &c, DTYPE_F32, &no_ids, &error), "%s", error.text);
        json_put(&w, "", 1);
        expect(strstr(w.text, even ? "\"model_type\": \"llama\"" : "\"model_type\": \"mistral\"") != NULL &&
               (strstr(w.text, "\"sliding_window\": null") != NULL) == !even, "%zu channels: %s", c.channels, w.text);
        json_writer_free(&w);
    }
    verdict("a model leaves as an architecture that takes its sizes");
}

static void test_bad_weights(void) {
    size_t bytes;
    copy_tree(fixture("llama"), "shards");
    copy_tree(fixture("qwen2"), "one");
    char* index = text_read("shards/model.safetensors.index.json", NULL);
    char* weights = text_read("one/model.safetensors", &bytes);

    expect_bad("nothing", "No such file", "no directory");
    need(mkdir("empty", 0777) == 0, "a directory");
    expect_bad("empty", "holds no model", "an empty directory");
    expect_bad("no\x1b[31m\x7f\xc2\x85", "no\\x1b[31m\\x7f\\x85", "a directory's name that it would obey");
    put_text("text.txt", "a text");
    expect_bad("text.txt", "not a model file", "a text");

    for (size_t cut = 0; cut < bytes; cut += bytes / 23 + 1) {
        put_bytes("one/model.safetensors", weights, cut);
        expect_bad("one", "model.safetensors", "a file that was cut");
    }
    put_bytes("one/model.safetensors", weights, bytes);
    replace("one/model.safetensors", "model.norm.weight", "model.norn.weight");
    expect_bad("one", "no tensor model.norm.weight", "a weight is missing");
    expect_bad("one", "but model.embed_tokens.weight and others", "which weights there are");
    put_bytes("one/model.safetensors", weights, bytes);
    replace("one/model.safetensors", "model.norm.weight", "mo\\u001b\x7f\xc2\x85[31mab");
    expect_bad("one", "mo\\x1b\\x7f\\x85[31mab", "a tensor's name that a terminal would obey");
    put_text("one/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n");
    expect_bad("one", "model.safetensors is a pointer of Git LFS, not the file itself; run git lfs pull", "a pointer");
    put_text("one/model.safetensors", "<html><body>Not found</body></html>");
    expect_bad("one", "model.safetensors begins with '<', as a web page does", "a web page");
    put_text("empty/adapter_config.json", "{}");
    expect_bad("empty", "holds a LoRA adapter, not a model; give the model", "an adapter");
    put_bytes("one/model.safetensors", weights, bytes);
    replace("one/model.safetensors", "\"F32\",\"shape\":[16]", "\"I32\",\"shape\":[16]");
    expect_bad("one", "is of type I32", "another type");
    put_bytes("one/model.safetensors", weights, bytes);
    replace("one/model.safetensors", "[16,24]", "[24,16]");
    expect_bad("one", "down_proj.weight is not 16 x 24", "another shape");
    remove("one/model.safetensors");
    expect_bad("one", "neither model.safetensors nor", "no weights");

    replace("shards/model.safetensors.index.json", "model-00002-of-00004", "model-00001-of-00004");
    expect_bad("shards", "is not in model-00001", "the index names another shard");
    put_text("shards/model.safetensors.index.json", index);
    replace("shards/model.safetensors.index.json", "model-00002-of-00004", "../one/model-00002-of-00004");
    expect_bad("shards", "is in no file of the directory", "the index leaves the directory");
    put_text("shards/model.safetensors.index.json", "{\"weight_map\": {}}");
    expect_bad("shards", "no tensor", "an empty index");
    put_text("shards/model.safetensors.index.json", "{}");
    expect_bad("shards", "weight_map", "no index");
    put_text("shards/model.safetensors.index.json", index);
    replace("shards/model.safetensors.index.json",
            "\"model.layers.1.input_layernorm.weight\": \"model-00004-of-00004.safetensors\",", "");
    expect_bad("shards", "names 19 tensors, but the files have 20; they are of different models",
               "a tensor that the index lacks");
    put_text("shards/model.safetensors.index.json", index);
    char* last = text_read("shards/model-00004-of-00004.safetensors", &bytes);
    replace("shards/model-00004-of-00004.safetensors", "layers.1.input_layernorm", "layers.0.input_layernorm");
    expect_bad("shards", "two tensors are called model.layers.0.input_layernorm.weight", "a tensor in two shards");
    put_bytes("shards/model-00004-of-00004.safetensors", last, bytes);
    free(last);
    remove("shards/model-00003-of-00004.safetensors");
    expect_bad("shards", "model-00003", "a shard is missing");
    verdict("files of weights that are cut, of another shape or type, or inconsistent are refused by name");
    free(index);
    free(weights);

    Error error;
    need(export_to(fixture("gpt2"), "bin", EXPORT_F32, 0, export_llmc, &error), "%s", error.text);
    char* model = text_read("bin/model.bin", &bytes);
    for (size_t cut = 0; cut < bytes; cut += bytes / 13 + 1) {
        put_bytes("cut.bin", model, cut);
        expect_bad("cut.bin", cut < 1024 ? "too short" : "its header asks for", "a file of llm.c that was cut");
    }
    static const struct { int place; int32_t value; const char* words; } cases[] = {
        {0, 20240520, "not an llm.c model file"}, {1, 4, "version 4"}, {2, 0, "a size of 0"}, {3, -5, "a size of -5"},
        {4, 1001, "\"layers\" is '1001'"}, {5, 3, "do not divide"}, {6, 1 << 30, "\"channels\""}, {7, 39, "39 rows"},
        {7, 256, "its header asks for"}, {3, 129, "128 rows"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        put_bytes("cut.bin", model, bytes);
        patch("cut.bin", 4 * (size_t)cases[i].place, &cases[i].value, 4);
        expect_bad("cut.bin", cases[i].words, "a wrong header of llm.c");
    }
    free(model);
    verdict("files of llm.c that are cut or of another version or size are refused");
}

// ------------------------------------------------------------------------------------------------
// The programs

// Weights that are not finite are found where they are read, in a vector and in a matrix that is stored transposed.
static void test_not_finite(void) {
    static const struct { const char *name, *ours; size_t element; float value; } cases[] = {
        {"transformer.ln_f.weight", "final_norm_weight", 3, NAN},
        {"transformer.h.1.mlp.c_proj.weight", "block.1.ffn_out_weight", 700, INFINITY},
        {"transformer.wte.weight", "token_embedding", 639, -INFINITY},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Error error;
        ModelSource s;
        SafetensorsFile f;
        const float* values;
        remove_tree("bad");
        copy_tree(fixture("gpt2"), "bad");
        need(safetensors_open(&f, "bad/model.safetensors", &error), "%s", error.text);
        const SafetensorsTensor* t = safetensors_find(&f, cases[i].name);
        if (t == NULL) t = safetensors_find(&f, strchr(cases[i].name, '.') + 1);
        need(t && t->type == DTYPE_F32, "%s in float", cases[i].name);
        patch("bad/model.safetensors", f.data_start + t->offset + 4 * cases[i].element, &cases[i].value, 4);
        safetensors_close(&f);
        need(source_open(&s, "bad", &error), "%s", error.text);
        bool read = true;
        for (size_t p = 0; read && p < s.parameters.count; p++) read = source_read(&values, &s, p, &error);
        expect(!read && strstr(error.text, text_of("element %zu of %s is not finite", cases[i].element, cases[i].ours)),
               "%s: %s", cases[i].name, read ? "was read" : error.text);
        source_close(&s);
    }
    verdict("weights that are not finite are refused by name");
}

// The ids that a model continues the prompt 1 with, as generate writes them; the caller frees the text.
static char* continued(const char* path, bool past_end) {
    Error error;
    Model model;
    Tokenizer tokenizer;
    ModelOptions options = {.B = 1, .T = 8, .cached_sequences = 1};
    Sampler s = {.tokens = 12, .prompt_ids = "1", .print_ids = true, .past_end = past_end,
                 .options = {.top_p = 1, .repetition_penalty = 1.5}};
    char* text = NULL;
    size_t bytes = 0;
    FILE* out = open_memstream(&text, &bytes);
    need(out && model_open(&model, &tokenizer, NULL, path, &options, "test", &error) &&
         sampler_open(&s, &model, &tokenizer, &error) && sampler_write(&s, out, &error), "%s", error.text);
    fclose(out);
    sampler_close(&s);
    tokenizer_close(&tokenizer);
    model_free(&model);
    return text;
}

// The ids and settings of a model's config.json and generation_config.json, in an export of it, of a run that begins
// from it, of that run resumed, and of a run that begins from that one.
static void test_generation_config(void) {
    char run[PATH_MAX + 256];  // text_of's texts last for 15 calls
    snprintf(run, sizeof run, "%s --data tokens.bin --batch 1 --seq 8 --lr 0 --init-from", train_program);
    static const char settings[] = "{\"do_sample\": true, \"temperature\": 0.6, \"top_p\": 0.9,\n  \"bos_token_id\": 1,"
                                   " \"eos_token_id\": [38, %d],\n\"pad_token_id\": 3}\n";
    copy_tree(fixture("llama"), "ends");
    replace("ends/config.json", "\"eos_token_id\": 2", "\"eos_token_id\": [2, 5]");
    replace("ends/config.json", "\"pad_token_id\": null", "\"pad_token_id\": 3");
    put_text("ends/generation_config.json", "{}");
    char *whole = continued("ends", true), *next = whole;
    int ids[13];
    for (int i = 0; i < 13; i++) ids[i] = (int)strtol(next, &next, 10);
    int last = 1, shown = 0;
    while (last < 6 && (ids[last] == ids[1] || last < 3)) last++;  // an id that is not the first one
    while (shown < last && ids[shown] != ids[last]) shown++;
    put_text("ends/generation_config.json", text_of(settings, ids[last]));
    char* cut = continued("ends", false);
    expect(strncmp(cut, whole, strlen(cut) - 1) == 0 && strspn(cut, "0123456789 ") == strlen(cut) - 1 &&
           atoi(strrchr(cut, ' ')) == ids[shown] && shown < 12, "the second end, %d: %s of %s", ids[last], cut, whole);
    free(cut);
    put_text("ends/generation_config.json", "{\"eos_token_id\": null}");
    replace("ends/config.json", "[2, 5]", text_of("[39, %d]", ids[last]));
    cut = continued("ends", false);
    expect(atoi(strrchr(cut, ' ')) == ids[shown], "the second end of config.json: %s", cut);
    replace("ends/config.json", text_of("[39, %d]", ids[last]), "[2, 5]");
    put_text("ends/generation_config.json", text_of(settings, ids[last]));
    free(cut);
    free(whole);
    static const char* const commands[][2] = {
        {NULL, "--init-from ends"}, {"ends --steps 2 --out ends.run", "--out ends.run"},
        {"ends --steps 3 --resume --out ends.run", "--out ends.run"},
        {"ends.run --steps 2 --out ends.two", "--out ends.two"},
    };
    for (size_t i = 0; i < COUNT_OF(commands); i++) {
        Error error;
        TokenIds found;
        size_t bytes;
        if (commands[i][0]) expect_program(0, "saved", text_of("%s %s", run, commands[i][0]));
        expect_program(0, "parameters", text_of("%s %s --to hf --dir ends.%zu", export_program, commands[i][1], i));
        need(source_read_ids(&found, text_of("ends.%zu", i), false, &error), "%s", error.text);
        expect(found.begin == 1 && found.pad == 3 && found.count == 2 && found.ends[0] == 2 && found.ends[1] == 5,
               "%s: ids %d, %d, %zu ends", commands[i][1], found.begin, found.pad, found.count);
        char* text = text_read(text_of("ends.%zu/generation_config.json", i), &bytes);
        expect(strcmp(text, text_of(settings, ids[last])) == 0, "%s: %s", commands[i][1], text);
        free(text);
    }
    put_text("ends/generation_config.json", "{\"eos_token_id\": [2, \"</s>\"]}");
    expect_program(1, "\"eos_token_id\" is not the id of a token", text_of("%s ends --out ends.no", run));
    verdict("what a model's files say of its tokens and of generation: obeyed, and the same in exports");
}

static void test_programs(void) {
    if (!file_exists(export_program)) {
        skip("build/export", "it is not there");
        return;
    }
    const char* e = export_program;
    expect_program(0, "parameters as bf16", text_of("%s --init-from %s --to hf --dir p.hf", e, fixture("llama")));
    expect(same_weights("p.hf", fixture("llama")), "the program's export");
    expect(directory_count("p.hf", "model") == 1 && file_exists("p.hf/model.safetensors"), "one file of weights");
    expect_program(0, "p.3000:", text_of("%s --init-from %s --to hf --shard-size 3e-6 --dir p.3000", e,
                                         fixture("llama")));
    expect(directory_count("p.3000", "-of-") > 3, "--shard-size");
    expect_program(1, "exists", text_of("%s --init-from %s --to hf --dir p.hf", e, fixture("llama")));
    expect_program(0, "p.slash:", text_of("%s --init-from %s --to hf --dir p.slash//", e, fixture("llama")));
    expect_program(0, "note: 7 matrices of", text_of("%s --init-from %s --to hf --dir p.nf4", e, fixture("llama_nf4")));
    expect_program(2, "--step", text_of("%s --init-from %s --step 7 --to hf --dir p.no", e, fixture("llama")));
    expect_program(1, "step_00000008", text_of("%s --out qwen2.run --step 8 --to hf --dir p.8", e));
    copy_tree("qwen2.run", "two.run");
    copy_tree("qwen2.run/step_00000007", "two.run/step_00000009");
    flip_byte("two.run/step_00000009/rank_00000.safetensors", 9000);
    expect_program(1, "checksum; the file is damaged; or give another --step: 7", text_of("%s --out two.run --to hf "
                                                                                        "--dir p.no", e));
    expect_program(1, "check the path; or give another --step: 9, 7", text_of("%s --out two.run --step 8 --to hf "
                                                                             "--dir p.no", e));
    expect_program(0, "step_00000007", text_of("%s --out qwen2.run --step 7 --to hf --dtype f16 --dir p.7", e));
    expect_program(1, "checksum", text_of("%s --out qwen3.run --to hf --dir p.no", e));
    expect_program(1, "GPT-2", text_of("%s --init-from %s --to llm.c --dtype f32 --dir p.no", e, fixture("qwen3")));
    expect_program(2, "cannot hold f16",
                   text_of("%s --init-from %s --to llm.c --dtype f16 --dir p.no", e, fixture("gpt2")));
    expect_program(2, "--to is 'onnx'", text_of("%s --init-from %s --to onnx --dir p.no", e, fixture("gpt2")));
    expect_program(2, "--out", text_of("%s --to hf --dir p.no", e));
    expect_program(2, "--dir", text_of("%s --init-from %s --to hf", e, fixture("gpt2")));
    expect(!file_exists("p.no") && directory_count(".", "p.no") == 0 && directory_count(".", ".tmp-") == 0,
           "nothing is left of what failed");
    verdict("build/export writes whole directories or none");

    // What a killed export left goes; not what one of a process that lives, or of another machine, is writing.
    char machine[65] = "";
    pid_t killed = fork();
    if (killed == 0) _exit(0);
    waitpid(killed, NULL, 0);
    gethostname(machine, sizeof machine - 1);
    struct stat space = {0};
    if (stat("/proc/self/ns/pid", &space) != 0) space.st_ino = 0;
    unsigned long long inside = (unsigned long long)space.st_ino;
    const char* left[] = {text_of("p.again.tmp-%s-%llx-%d", machine, inside, (int)killed),
                          text_of("p.again.tmp-%s-%llx-%d", machine, inside, (int)getppid()),
                          text_of("p.again.tmp-%s.x-%llx-%d", machine, inside, (int)killed)};
    for (int i = 0; i < 3; i++) {
        need(mkdir(left[i], 0755) == 0, "%s", left[i]);
        put_text(text_of("%s/model.safetensors", left[i]), "half");
    }
    expect_program(0, "p.again:", text_of("%s --init-from %s --to hf --dir p.again", e, fixture("gpt2")));
    for (int i = 0; i < 3; i++) expect(file_exists(left[i]) == (i > 0), "%s", left[i]);
    verdict("build/export removes what killed exports have left");

    // A run that trains removes its newest checkpoint when there is a newer one. No step comes a second time. It removes
    // one while each is opened, at most, however slow the machine is.
    enum { TURNS = 100 };
    need(mkdir("turns", 0755) == 0 && mkdir("away", 0755) == 0, "directories");
    copy_tree("llama.run/step_00000007", "turns/step_00000007");
    copy_tree("llama.run/step_00000007", "away/next");
    need(mkdir("turns/tokenizer", 0755) == 0, "a directory");
    put_text("turns/tokenizer/config.json", "{\"eos_token_id\": 5}");
    const int shared = MAP_SHARED | MAP_ANONYMOUS;
    volatile size_t* opened = (size_t*)mmap(NULL, sizeof *opened, PROT_READ | PROT_WRITE, shared, -1, 0);
    need(opened != MAP_FAILED, "shared memory");
    pid_t run = fork();
    for (int turn = 1; run == 0 && turn <= TURNS; turn++) {
        size_t before = *opened;
        do sleep_ms(20); while (*opened == before);
        if (rename("away/next", text_of("turns/step_%08d", 7 + turn)) != 0) _exit(1);
        if (rename(text_of("turns/step_%08d", 6 + turn), "away/next") != 0) _exit(1);
    }
    if (run == 0) _exit(0);
    int status = 1;
    Error why;
    while (waitpid(run, &status, WNOHANG) == 0) {
        ModelSource source;
        ++*opened;
        if (!expect(source_open(&source, "turns", &why), "after %zu times: %s", *opened, why.text)) break;
        expect(source.ids.count == 1 && source.ids.ends[0] == 5, "after %zu times: no ids of tokens", *opened);
        source_close(&source);
        Model model;
        Tokenizer tokenizer;
        const ModelOptions options = {.B = 1, .T = 4, .cached_sequences = 1};
        ++*opened;
        if (!expect(model_open(&model, &tokenizer, "turns", NULL, &options, "test", &why), "%s", why.text)) break;
        model_free(&model);
        tokenizer_close(&tokenizer);
    }
    if (status == 1) kill(run, SIGKILL), waitpid(run, &status, 0);
    munmap((void*)(uintptr_t)opened, sizeof *opened);
    verdict("a checkpoint that a run removes while it is opened: the newest is tried again");

    if (!file_exists(train_program)) {
        skip("train --init-from", "it is not there");
        return;
    }
    const char* t = train_program;
    uint16_t shard[512 + 600];
    int32_t header[256] = {20240520, 1, 600};
    memcpy(shard, header, sizeof header);
    for (size_t i = 0; i < 600; i++) shard[512 + i] = (uint16_t)(i * 7 % 40);
    put_bytes("tokens.bin", shard, sizeof shard);
    char usual[PATH_MAX + 256];  // text_of's texts last for 15 calls
    snprintf(usual, sizeof usual, "%s --data tokens.bin --batch 1 --steps 2 --seq 8 --lr 0 --init-from", t);
    for (size_t i = 0; i < COUNT_OF(NAMES); i++) {
        const char* line = text_of("%s %s --out t.%s", usual, fixture(NAMES[i]), NAMES[i]);
        expect_program(0, "starting from the weights of", line);
        expect(same_weights(text_of("t.%s", NAMES[i]), fixture(NAMES[i])), "%s: weights of the run", NAMES[i]);
    }
    expect_program(0, "note: 7 matrices of", text_of("%s %s --out t.nf4", usual, fixture("llama_nf4")));
    expect(same_weights("t.nf4", fixture("llama_nf4")), "llama_nf4: weights of the run");
    expect_program(0, "starting from the weights", text_of("%s llmc/model.bin --out t.llmc", usual));
    expect_program(0, "context 12", text_of("%s %s --context 12 --out t.12", usual, fixture("gpt2")));
    expect_program(2, "--heads is 4", text_of("%s %s --layers 2 --heads 2 --channels 16 --vocab 40 --out t.no", usual,
                                              fixture("gpt2")));
    expect_program(0, "qkv_bias on",
                   text_of("%s --data tokens.bin --steps 1 --seq 8 --family llama --layers 1 --heads 2 "
                           "--channels 16 --vocab 40 --qkv-bias on --qk-norm on --out t.both",
                           t));
    expect_program(1, "no Hugging Face architecture", text_of("%s --out t.both --to hf --dir p.no", e));
    expect(!file_exists("p.no"), "nothing is left of an export that no architecture takes");
    remove_tree("bad");
    copy_tree(fixture("gpt2"), "bad");
    replace("bad/config.json", "gelu_new", "relu");
    expect_program(1, "relu", text_of("%s bad --out t.no2", usual));
    expect(!file_exists("t.no2"), "nothing is written");
    verdict("train begins with models of other programs, and takes their configuration");
    static const char* const layouts[] = {"--reduce exact", "--ranks 2 --pp 2", "--ranks 4 --pp 2 --zero 1",
                                          "--ranks 2 --tp 2"};
    for (size_t k = 0; k < COUNT_OF(layouts); k++) {
        expect_program(0, "saved", text_of("%s --data tokens.bin --vocab 40 --steps 2 --seq 8 --batch 1 "
                                           "--total-batch 16 --layers 3 --heads 2 --channels 16 --leaves 2 "
                                           "--out pipe.%zu %s", t, k, layouts[k]));
        expect_program(0, "pipe.hf", text_of("%s --out pipe.%zu --to hf --dir pipe.hf.%zu", e, k, k));
        expect_program(0, "pipe.gguf", text_of("%s --out pipe.%zu --to gguf --dir pipe.gguf.%zu", e, k, k));
        expect(system(text_of("diff -r pipe.hf.0 pipe.hf.%zu && diff -r pipe.gguf.0 pipe.gguf.%zu", k, k)) == 0,
               "%s: other files", layouts[k]);
    }
    verdict("a checkpoint of a pipeline, or of ranks with parts of tensors, is exported to the files of one rank's");
    for (int i = 0; i < 2; i++) {  // another program's, and the parts of ranks
        const char* from = i ? "pipe.3" : "pipe.hf.0";
        expect_program(0, "saved", text_of("%s --data tokens.bin --steps 1 --seq 8 --batch 1 --lr 0 --init-from %s "
                                           "--ranks 2 --tp 2 --out parts.%d", t, from, i));
        expect(same_weights("pipe.hf.0", text_of("parts.%d", i)), "from %s: other weights", from);
    }
    verdict("ranks with parts of tensors begin with models of other programs, and of such ranks");
    test_generation_config();
}

// ------------------------------------------------------------------------------------------------
// 6. 4 bits

// checksum() of dev/peers/finetune.py, of 16-bit numbers.
static uint64_t checksum(const uint16_t* x, size_t n) {
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += (i + 1) * (uint64_t)x[i];
    return sum;
}

// Copies tensors of a file to another: all, or those with an even or odd number (part 0 or 1). That called `old` gets
// another name.
static void copy_tensors(const char* from, const char* to, int part, const char* old, const char* name) {
    Error error;
    SafetensorsFile file;
    SafetensorsWriter w;
    need(safetensors_open(&file, from, &error) && safetensors_create(&w, to, &error), "%s", error.text);
    for (int write = 0; write < 2; write++) {
        for (size_t i = 0; i < file.header.count; i++) {
            const SafetensorsTensor* t = &file.header.tensors[i];
            const char* called = strcmp(t->name, old) == 0 ? name : t->name;
            if (part >= 0 && i % 2 != (size_t)part) continue;
            void* data = malloc(t->bytes);
            need(data && safetensors_read(&file, t, data, t->bytes, NULL, &error) &&
                 (write ? safetensors_write(&w, data, t->bytes, &error)
                        : safetensors_declare(&w, called, t->type, t->shape, t->dims, &error)), "%s", error.text);
            free(data);
        }
        need(write || safetensors_begin(&w, &error), "%s", error.text);
    }
    need(safetensors_end(&w, &error), "%s", error.text);
    safetensors_writer_free(&w);
    safetensors_close(&file);
}

static void test_quantized(void) {
    const char* expected = text_of("%s/expected.safetensors", fixture("llama_nf4"));
    double loss, apart = logits_apart(fixture("llama_nf4"), expected, &loss);
    check_bound(apart, 1e-5, "4 bits: logits of transformers");
    check_bound(loss, 1e-6, "4 bits: loss of transformers");

    // Every weight, as it leaves in its own type.
    Error error;
    ModelSource s;
    SafetensorsFile sums;
    size_t count = 0, bytes;
    need(source_open(&s, fixture("llama_nf4"), &error), "%s", error.text);
    expect(s.quantized_count == 7 && s.dtype == DTYPE_BF16, "%zu matrices, type %d", s.quantized_count, (int)s.dtype);
    source_close(&s);
    need(export_to(fixture("llama_nf4"), "nf4.hf", EXPORT_BF16, (size_t)5e9, export_hf, &error) &&
         safetensors_open(&sums, expected, &error), "%s", error.text);
    for (size_t i = 0; i < sums.header.count; i++) {
        const char* name = sums.header.tensors[i].name;
        if (strncmp(name, "weight.", 7) != 0) continue;
        uint64_t* sum = (uint64_t*)tensor_of(expected, name, NULL);
        uint16_t* weight = (uint16_t*)tensor_of("nf4.hf/model.safetensors", name + 7, &bytes);
        expect(checksum(weight, bytes / 2) == *sum, "%s has other bits", name);
        free(sum);
        free(weight);
        count++;
    }
    safetensors_close(&sums);
    expect(count == 11, "%zu weights", count);
    expect(same_weights("nf4.hf", fixture("llama_nf4")), "exported to bf16 and read again");
    verdict("a model of 4 bits, of scales quantized once or twice, has the bits of bitsandbytes");

    // The tensors of a matrix in two files.
    copy_tree(fixture("llama_nf4"), "halves");
    char* index = NULL;
    size_t size = 0;
    FILE* text = open_memstream(&index, &size);
    need(text != NULL, "memory");
    fputs("{\"weight_map\": {", text);
    for (int part = 0; part < 2; part++) {
        const char* path = text_of("halves/half%d.safetensors", part);
        copy_tensors("halves/model.safetensors", path, part, "", "");
        need(safetensors_open(&sums, path, &error), "%s", error.text);
        for (size_t i = 0; i < sums.header.count; i++)
            fprintf(text, "%s\"%s\": \"half%d.safetensors\"", i + (size_t)part ? ", " : "", sums.header.tensors[i].name,
                    part);
        safetensors_close(&sums);
    }
    fputs("}}", text);
    fclose(text);
    put_text("halves/model.safetensors.index.json", index);
    free(index);
    need(remove("halves/model.safetensors") == 0, "halves");
    expect(same_weights("halves", fixture("llama_nf4")), "in two files");
    verdict("tensors of one matrix may be in different files");

    // The first states in the file are those of mlp.down_proj, quantized once, and mlp.gate_proj. With equal lengths
    // bytes are replaced, otherwise a tensor gets another name.
#define DOWN "model.layers.0.mlp.down_proj.weight"
#define QUERIES "model.layers.0.self_attn.q_proj"
    static const struct { const char *old, *with, *words; } cases[] = {
        {"quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4", "it is quantized to FP4"},
        {"quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__nf5", "a tensor of it is missing"},
        {DOWN ".quant_map", "other", "a tensor of it is missing"},
        {QUERIES ".weight.nested_absmax", "other", "a tensor of it is missing"},
        {QUERIES ".weight.absmax", QUERIES ".SCB", "it is quantized to 8 bits (LLM.int8)"},
        {QUERIES ".weight.absmax", "other", QUERIES ".weight is not 64 x 64, the shape"},
        {"model.norm.weight", DOWN ".nested_absmax", "its scales have two forms"},
        {"\"quant_type\": \"nf4\"", "\"quant_type\": \"nf3\"", "its quant_type is not nf4"},
        {"\"blocksize\": 64", "\"blocksize\": 32", "its blocksize is not 64"},
        {"\"nested_blocksize\": 256", "\"nested_blocksize\": 128", "its nested_blocksize is not 256"},
        {"\"nested_dtype\": \"float32\"", "\"nested_dtype\": \"float64\"", "its nested_dtype is not float32"},
        {"\"nested_offset\"", "\"nested_affset\"", "it has no nested_offset"},
        {"\"shape\": [64, 64], \"nested_blocksize\": 256, "
         "\"nested_dtype\": \"float32\", \"nested_offset\": 0.",
         "\"shape\":[64,64],\"nested_blocksize\":256,"
         "\"nested_dtype\":\"float32\",\"nested_offset\":1e39,\"a\":1", "its nested_offset is not a finite float"},
        {"\"dtype\": \"bfloat16\"", "\"dtype\": \"bfloat17\"", "its dtype is none of bfloat16, float16, float32"},
        {"\"shape\": [64, 64]", "\"shape\": [64, -4]", "its shape is not that of a matrix"},
        {"\"shape\": [64, 64]", "\"shape\": [64, 99]", "the sizes of its tensors do not agree"},
        {"\"shape\": [64, 64]", "\"shape\": [32,128]", "a matrix of 32 x 128, which is not the shape that config.json"},
        {"\"shape\": [64, 64]", "\"shape\": [64, 64[", "its state is not JSON"},
        {"\xb3\x13\x39\x3f", "\xb3\x13\x38\x3f", "its quant_map is not that of NF4"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        remove_tree("bad");
        copy_tree(fixture("llama_nf4"), "bad");
        if (strlen(cases[i].old) == strlen(cases[i].with))
            replace("bad/model.safetensors", cases[i].old, cases[i].with);
        else
            copy_tensors(text_of("%s/model.safetensors", fixture("llama_nf4")), "bad/model.safetensors", -1,
                         cases[i].old, cases[i].with);
        expect_bad("bad", cases[i].words, cases[i].with);
    }

    // A scale that is not finite, of the fourth block.
    const float* values;
    const float not_finite = NAN;
    remove_tree("bad");
    copy_tree(fixture("llama_nf4"), "bad");
    need(safetensors_open(&sums, "bad/model.safetensors", &error), "%s", error.text);
    const SafetensorsTensor* scales = safetensors_find(&sums, DOWN ".absmax");
    need(scales != NULL && scales->type == DTYPE_F32, "scales of " DOWN);
    patch("bad/model.safetensors", sums.data_start + scales->offset + 3 * 4, &not_finite, 4);
    safetensors_close(&sums);
    need(source_open(&s, "bad", &error), "%s", error.text);
    bool read = true;
    for (size_t i = 0; read && i < s.parameters.count; i++) read = source_read(&values, &s, i, &error);
    expect_refusal(read, &error, "element 192 of block.0.ffn_out_weight is not finite", "a scale that is NaN");
    source_close(&s);
    verdict("other quantizations, and tensors that do not belong together, are refused by name");

    static const struct { const char *old, *with, *words; } configs[] = {
        {"\"quant_method\": \"bitsandbytes\"", "\"quant_method\": \"gptq\"", "\"quant_method\" is gptq"},
        {"\"quant_method\": \"bitsandbytes\"", "\"quant_method\": \"awq\"", "\"quant_method\" is awq"},
        {"\"load_in_8bit\": false", "\"load_in_8bit\": true", "\"load_in_8bit\" is true"},
        {"\"bnb_4bit_quant_type\": \"nf4\"", "\"bnb_4bit_quant_type\": \"fp4\"", "\"bnb_4bit_quant_type\" is fp4"},
        {"\"bnb_4bit_quant_storage\": \"uint8\"", "\"bnb_4bit_quant_storage\": \"bfloat16\"",
         "\"bnb_4bit_quant_storage\" is bfloat16, which this program does not support: it supports uint8"},
        {"\"load_in_4bit\": true", "\"load_in_5bit\": true", "\"quantization_config\" is an object, which"},
        {",\n    \"quant_method\": \"bitsandbytes\"", "", NULL},  // of before transformers 4.34
        {"\"llm_int8_threshold\": 6.0", "\"llm_int8_threshold\": 7.0", NULL},
    };
    for (size_t i = 0; i < COUNT_OF(configs); i++) {
        remove_tree("bad");
        copy_tree(fixture("llama_nf4"), "bad");
        replace("bad/config.json", configs[i].old, configs[i].with);
        if (configs[i].words) expect_bad("bad", configs[i].words, configs[i].with);
        else expect(same_weights("bad", fixture("llama_nf4")), "%s", configs[i].old);
    }
    verdict("what config.json says of other quantizations is refused by name");
}

int main(int argc, char** argv) {
    const char *export_path = "build/export", *train = "build/train-FP32";
    const Flag rows[] = {
        FLAG_TEXT("export", &export_path, "build/export", "PATH", 0, "the program"),
        FLAG_TEXT("train", &train, "build/train-FP32", "PATH", 0, "the program, built for fp32"),
    };
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_convert", NULL, &flags, argc, argv)) return code;
    tests_begin("test_convert");
    need(realpath("dev/test/fixtures/models", fixtures) != NULL, "run it in the root of the checkout");
    if (realpath(export_path, export_program) == NULL) export_program[0] = 0;
    if (realpath(train, train_program) == NULL) train_program[0] = 0;
    root_enter();
    test_in();
    test_out();
    test_written_configs();
    test_dtypes();
    test_wide();
    test_runs();
    test_tokenizer();
    test_continued();
    test_keys();
    test_bad_configs();
    test_bad_weights();
    test_not_finite();
    test_quantized();
    test_heads();
    test_programs();
    return tests_end();
}
