// peft.h: LoRA adapters in the format of PEFT: a directory with adapter_config.json and adapter_model.safetensors.
//
//   1. configuration   a row per key of adapter_config.json: honored, without effect, or refused by name
//   2. tensors         lora_A, lora_B, DoRA's magnitudes, whole tensors: each used once, every shape checked
//   3. use             merged into a source, or the initial values of a model's pairs
//
//   Adapter adapter;
//   if (adapter_open(&adapter, "adapters/x", &source, &error)) ...          for the model of that source
//   if (source_add_adapters(&source, "adapters/x,adapters/y:0.5", stderr, &error)) ...  source_read then has their sum
//   if (adapter_set(&model, &adapter, &error)) ...                          the pairs of a model with --lora
//   adapter_close(&adapter);
//
// An adapter changes nothing by mistake: a key or a tensor that is not known, a tensor without its partner, delta
// weights that are all zero, and another base than the one that the adapter names, are errors.

#ifndef LLMTRAIN_PEFT_H
#define LLMTRAIN_PEFT_H

#include "source.h"

#define PEFT_TENSORS "adapter_model.safetensors"
#define PEFT_PREFIX "base_model.model."
#define PEFT_BASE "llmtrain_base"  // in the metadata of the tensors: source_hash of the base, where we have written it

typedef struct {
    char path[FILE_PATH_MAX];
    SourcePairs pairs;
    size_t r;                    // of adapter_config.json
    double alpha;
    LoraScale scale;
    bool plain;                  // every pair has this rank and alpha, and there is nothing but pairs
    bool names_base;             // it gives the hash of its base, which is:
    uint64_t base;
    double smallest, largest;    // norms of s b a
} Adapter;

static inline void adapter_close(Adapter* a) { source_pairs_free(&a->pairs); }

// ------------------------------------------------------------------------------------------------
// 1. Configuration

typedef struct {
    const char* keys;            // separated by |
    const char* values;          // the only ones that are accepted; NULL: any, {} and [] being null
} PeftRule;

static const PeftRule PEFT_RULES[] = {
    {"peft_type", "LORA"},
    {"task_type", "CAUSAL_LM|null"},
    {"bias", "none"},
    {"init_lora_weights", "true|false|gaussian|eva|orthogonal|null"},  // others change the weights of the base
    {"alora_invocation_tokens|arrow_config|ensure_weight_tying|kasa_config|layer_replication|loftq_config|lora_bias|"
     "megatron_config|monteclora_config|target_parameters|trainable_token_indices|use_bdlora|use_qalora|velora_config",
     "false|null"},
    // Read below.
    {"r|lora_alpha|use_rslora|use_dora|rank_pattern|alpha_pattern|target_modules|modules_to_save", NULL},
    // The tensors that are there say the same.
    {"exclude_modules|layers_pattern|layers_to_transform", NULL},
    // Without effect on what the model computes. PEFT sets fan_in_fan_out itself where it matters.
    {"auto_mapping|base_model_name_or_path|corda_config|eva_config|fan_in_fan_out|inference_mode|lora_dropout|"
     "lora_ga_config|megatron_core|peft_version|qalora_group_size|revision|runtime_config", NULL},
};

// Checks every key against its rule.
static inline bool peft_check_keys(const Json* json, const char* path, Error* error) {
    for (uint32_t i = json_first(json, 0); i != JSON_NONE; i = json_next(json, i)) {
        const char* key = json_key(json, i);
        const PeftRule* rule = NULL;
        char value[64] = "null";
        bool empty = (json_is(json, i, JSON_OBJECT) || json_is(json, i, JSON_ARRAY)) && json_count(json, i) == 0;
        for (size_t k = 0; k < sizeof PEFT_RULES / sizeof PEFT_RULES[0]; k++)
            if (choice_find(PEFT_RULES[k].keys, key) >= 0) rule = &PEFT_RULES[k];
        if (!rule)
            return fail_with(error, "%.600s has the key \"%.80s\", which this program does not know; remove it if it "
                             "does not change what the adapter computes", path, key);
        if (!empty) json_scalar_text(value, json, i);
        if (rule->values && choice_find(rule->values, value) < 0)
            return fail_with(error, "%.600s: \"%.80s\" is %.60s, which this program does not support: it supports "
                             "%.60s; merge the adapter with PEFT's merge_and_unload()", path, key, value, rule->values);
    }
    return true;
}

// Whether a name of PEFT's lists means a module: its whole name, or what is after a dot. After ^ only the former.
static inline bool peft_matches(const char* pattern, const char* module) {
    size_t length = strlen(pattern), whole = strlen(module);
    if (pattern[0] == '^') return strcmp(pattern + 1, module) == 0;
    return length <= whole && strcmp(module + whole - length, pattern) == 0 &&
           (length == whole || module[whole - length - 1] == '.');
}

// Whether a list names a module; false for anything that is not a list.
static inline bool peft_lists(const Json* json, uint32_t list, const char* module) {
    bool named = false;
    char name[256];
    for (uint32_t i = json_is(json, list, JSON_ARRAY) ? json_first(json, list) : JSON_NONE; i != JSON_NONE;
         i = json_next(json, i))
        named |= json_string(json, i, name, sizeof name) && name[0] != '^' && peft_matches(name, module);
    return named;
}

// The number that rank_pattern or alpha_pattern has for a module, or `usual`.
static inline bool peft_pattern(double* number, const Json* json, const char* key, const char* module, double usual,
                                const char* path, Error* error) {
    uint32_t patterns = json_get(json, 0, key);
    bool found = false;
    *number = usual;
    for (uint32_t i = json_first(json, patterns); i != JSON_NONE; i = json_next(json, i)) {
        if (json_key(json, i)[strcspn(json_key(json, i), "*+?[](){}|\\$")] != 0)
            return fail_with(error, "%.600s: \"%s\" has the regular expression %.80s, and names alone are read here; "
                             "name the modules", path, key, json_key(json, i));
        if (found || !peft_matches(json_key(json, i), module)) continue;
        found = true;
        if (!json_number(json, i, number))
            return fail_with(error, "%.600s: \"%s\" is not a number for %.80s; use another copy", path, key,
                             json_key(json, i));
    }
    return true;
}

// Reads a switch, which is off where it is missing.
static inline bool peft_switch(bool* on, const Json* json, const char* key, const char* path, Error* error) {
    uint32_t node = json_get(json, 0, key);
    *on = false;
    return json_absent(json, node) || json_bool(json, node, on) ||
           fail_with(error, "%.600s: \"%s\" is neither true nor false; use another copy", path, key);
}

// ------------------------------------------------------------------------------------------------
// 2. Tensors

// A tensor of the file. kind: 'a', 'b', 'm' DoRA's magnitudes of a module; 'w' a whole tensor of that name.
typedef struct {
    const SafetensorsTensor* saved;
    char module[SAFETENSORS_NAME_MAX];
    char kind;
    bool used;
} PeftTensor;

// What is read of an adapter's directory, for the model of a source.
typedef struct {
    Adapter* adapter;
    const ModelSource* source;
    Json json;                   // adapter_config.json
    char path[FILE_PATH_MAX];    // of it
    SafetensorsFile file;
    PeftTensor* tensors;         // (file.header.count)
    bool rs, dora;
} PeftReading;

// Splits a name: base_model.model.MODULE.lora_A.weight, or with the name of the adapter before `weight`.
static inline bool peft_parse_name(PeftTensor* t, const char* path, Error* error) {
    static const struct { const char* text; char kind; } marks[] = {
        {".lora_A.", 'a'}, {".lora_B.", 'b'}, {".lora_magnitude_vector", 'm'}};
    const char* name = t->saved->name;
    size_t prefix = strlen(PEFT_PREFIX);
    if (strncmp(name, PEFT_PREFIX, prefix) != 0)
        return fail_with(error, "%.600s: %.160s does not begin with " PEFT_PREFIX ", as names of PEFT do; use another "
                         "copy", path, name);
    t->kind = 'w';
    snprintf(t->module, sizeof t->module, "%s", name + prefix);
    for (size_t i = 0; i < sizeof marks / sizeof marks[0]; i++) {
        char* mark = strstr(t->module, marks[i].text);
        size_t length = strlen(t->module);
        if (mark == NULL || (i < 2 && (length < 7 || strcmp(t->module + length - 7, ".weight") != 0))) continue;
        t->kind = marks[i].kind;
        *mark = 0;
    }
    return true;
}

static inline PeftTensor* peft_find(const PeftReading* p, const char* module, char kind) {
    for (size_t i = 0; i < p->file.header.count; i++)
        if (p->tensors[i].kind == kind && strcmp(p->tensors[i].module, module) == 0) return &p->tensors[i];
    return NULL;
}

// Opens the file of tensors and parses their names.
static inline bool peft_open_tensors(PeftReading* p, Error* error) {
    char path[FILE_PATH_MAX], hash[24];
    unsigned long long base;
    snprintf(path, sizeof path, "%.4000s/" PEFT_TENSORS, p->adapter->path);
    if (!safetensors_open(&p->file, path, error)) return false;
    const SafetensorsHeader* h = &p->file.header;
    p->tensors = (PeftTensor*)memory_allocate(max_size(h->count, 1) * sizeof(PeftTensor));
    if (p->tensors == NULL) return fail_memory(error, path, h->count * sizeof(PeftTensor));
    for (size_t i = 0; i < h->count; i++) {
        p->tensors[i].saved = &h->tensors[i];
        if (!peft_parse_name(&p->tensors[i], path, error)) return false;
        if (peft_find(p, p->tensors[i].module, p->tensors[i].kind) != &p->tensors[i])
            return fail_with(error, "%.600s holds %.160s for several adapters; give one of them", path,
                             h->tensors[i].name);
    }
    uint32_t node = json_get(&h->json, json_get(&h->json, 0, "__metadata__"), PEFT_BASE);
    if (node == JSON_NONE) return true;
    p->adapter->names_base = json_string(&h->json, node, hash, sizeof hash) && sscanf(hash, "%llx", &base) == 1;
    if (p->adapter->names_base) p->adapter->base = base;
    return p->adapter->names_base ||
           fail_with(error, "%.600s: \"" PEFT_BASE "\" is not a hash; use another copy", path);
}

// Reads a tensor of rows x cols (cols 0: a vector), or of cols x rows if `transposed`, as floats.
static inline bool peft_read(float* values, PeftReading* p, PeftTensor* t, size_t rows, size_t cols, bool transposed,
                             Error* error) {
    const SafetensorsTensor* saved = t->saved;
    size_t shape[2] = {transposed ? cols : rows, transposed ? rows : cols}, n = rows * max_size(cols, 1), bad;
    int dims = cols ? 2 : 1;
    char expected[64];
    snprintf(expected, sizeof expected, dims == 2 ? "%zu x %zu" : "%zu", shape[0], shape[1]);
    t->used = true;
    if (saved->dims != dims || memcmp(saved->shape, shape, (size_t)dims * sizeof shape[0]) != 0)
        return fail_with(error, "%.600s: %.160s is not %s, the shape that it has for this model and "
                         "adapter_config.json; they do not belong together", p->file.path, saved->name, expected);
    if (!convert_knows(saved->type))
        return fail_with(error, "%.600s: %.160s is of type %s; weights must be F32, F16 or BF16", p->file.path,
                         saved->name, DTYPES[saved->type].safetensors);
    char* bytes = (char*)memory_allocate(max_size(saved->bytes, 1));
    float* wide = transposed ? (float*)memory_allocate(n * sizeof(float)) : values;
    bool ok = (bytes && wide) || fail_memory(error, p->file.path, saved->bytes);
    ok = ok && safetensors_read_range(&p->file, saved, 0, saved->bytes, bytes, error);
    if (ok && (bad = convert_find_bad(bytes, saved->type, n)) < n)
        ok = fail_with(error, "%.600s: element %zu of %.160s is not finite; use another copy", p->file.path, bad,
                       saved->name);
    if (ok) convert_to_float(wide, bytes, saved->type, n);
    for (size_t i = 0; ok && transposed && i < n; i++) values[i % rows * cols + i / rows] = wide[i];
    if (transposed) free(wide);
    free(bytes);
    return ok;
}

// The norm of s b a, the delta weight, from the products of the columns of b and of the rows of a.
static inline double peft_norm(const SourcePair* pair, size_t cols) {
    double sum = 0;
    for (size_t i = 0; i < pair->r; i++)
        for (size_t j = 0; j < pair->r; j++) {
            double of_a = 0, of_b = 0;
            for (size_t c = 0; c < cols; c++)
                of_a += (double)pair->a[i * cols + c] * (double)pair->a[j * cols + c];
            for (size_t row = 0; row < pair->rows; row++)
                of_b += (double)pair->b[row * pair->r + i] * (double)pair->b[row * pair->r + j];
            sum += of_a * of_b;
        }
    return fabs((double)pair->scale) * sqrt(sum > 0 ? sum : 0);
}

// Adds the pair of a module, one of the model's matrices, if the file has it.
static inline bool peft_add_pair(PeftReading* p, const ForeignTensor* f, const char* module, Error* error) {
    Adapter* adapter = p->adapter;
    PeftTensor *a = peft_find(p, module, 'a'), *b = peft_find(p, module, 'b'), *m = peft_find(p, module, 'm');
    double r, alpha;
    if (!a && !b && !m) return true;
    if (!a || !b || p->dora != (m != NULL))
        return fail_with(error, "%.600s has only a part of the pair of %.160s: lora_%s is missing; use another copy",
                         p->file.path, module, !a ? "A" : !b ? "B" : "magnitude_vector, or \"use_dora\",");
    if (!peft_pattern(&r, &p->json, "rank_pattern", module, (double)adapter->r, p->path, error) ||
        !peft_pattern(&alpha, &p->json, "alpha_pattern", module, adapter->alpha, p->path, error)) return false;
    if (!(r >= 1 && r <= 65536) || r != floor(r))
        return fail_with(error, "%.600s: the rank of %.160s is %g; use another copy", p->path, module, r);
    adapter->plain &= r == (double)adapter->r && alpha == adapter->alpha && !p->dora;
    SourcePair pair = {.tensor = f->tensor, .first = f->first, .rows = f->rows, .r = (size_t)r,
                       .scale = (float)(alpha / (p->rs ? sqrt(r) : r))};
    SourcePair* to = source_pairs_add(&adapter->pairs, pair, f->cols);
    if (to && m) to->magnitude = (float*)memory_allocate(f->rows * sizeof(float));
    if (to == NULL || (m && to->magnitude == NULL))
        return fail_memory(error, p->file.path, (f->rows + f->cols) * pair.r * sizeof(float));
    if (!peft_read(to->a, p, a, pair.r, f->cols, false, error) ||
        !peft_read(to->b, p, b, f->rows, pair.r, false, error)) return false;
    if (m && !peft_read(to->magnitude, p, m, f->rows, 0, false, error)) return false;
    double norm = peft_norm(to, f->cols);
    adapter->smallest = adapter->pairs.count == 1 ? norm : fmin(adapter->smallest, norm);
    adapter->largest = fmax(adapter->largest, norm);
    return true;
}

// Adds what the file has for one of the model's tensors.
static inline bool peft_add(PeftReading* p, const ForeignTensor* f, Error* error) {
    char module[sizeof f->name];
    const ModelSource* s = p->source;
    uint32_t targets = json_get(&p->json, 0, "target_modules");
    bool partial = !json_absent(&p->json, json_get(&p->json, 0, "layers_to_transform")) ||
                   !json_absent(&p->json, json_get(&p->json, 0, "exclude_modules"));
    bool of_block = s->parameters.tensors[f->tensor].shape.hidden;
    bool linear = of_block || strcmp(f->name, "lm_head.weight") == 0;
    PeftTensor* whole = peft_find(p, f->name, 'w');
    snprintf(module, sizeof module, "%.*s", (int)(strrchr(f->name, '.') - f->name), f->name);
    if (whole && s->config.tied && strcmp(TENSOR_NAMES[f->row].ours, "token_embedding") == 0)
        return fail_with(error, "%.600s: %.160s replaces an embedding that is also the head, and does not say of "
                         "which; merge the adapter with PEFT's merge_and_unload()", p->file.path, whole->saved->name);
    if (whole) {
        SourcePair pair = {.tensor = f->tensor, .first = f->first, .rows = f->rows};
        SourcePair* to = source_pairs_add(&p->adapter->pairs, pair, max_size(f->cols, 1));
        p->adapter->plain = false;
        if (to == NULL) return fail_memory(error, p->file.path, whole->saved->bytes);
        if (!peft_read(to->a, p, whole, f->rows, f->cols, f->transposed, error)) return false;
    }
    if (linear && !peft_add_pair(p, f, module, error)) return false;
    bool has = linear && peft_find(p, module, 'a') != NULL;
    char text[16] = "";  // another text is a regular expression: the tensors say what it names
    json_string(&p->json, targets, text, sizeof text);
    bool named = peft_lists(&p->json, targets, module) ||
                 (strcmp(text, "all-linear") == 0 && of_block);
    if (linear && named && !has && !partial)
        return fail_with(error, "%.600s has no lora_A.weight of %.160s, which \"target_modules\" names; use another "
                         "copy", p->file.path, module);
    if (has && !named && json_is(&p->json, targets, JSON_ARRAY))
        return fail_with(error, "%.600s has a pair for %.160s, which \"target_modules\" does not name; use another "
                         "copy", p->file.path, module);
    return true;
}

// Every name of a list must be that of a module with a tensor of this kind.
static inline bool peft_check_names(const PeftReading* p, const char* key, char kind, Error* error) {
    uint32_t list = json_get(&p->json, 0, key);
    char name[256], module[SAFETENSORS_NAME_MAX];
    for (uint32_t i = json_is(&p->json, list, JSON_ARRAY) ? json_first(&p->json, list) : JSON_NONE; i != JSON_NONE;
         i = json_next(&p->json, i)) {
        bool found = false, text = json_string(&p->json, i, name, sizeof name);
        for (size_t k = 0; text && k < p->file.header.count; k++) {
            snprintf(module, sizeof module, "%s", p->tensors[k].module);
            char* last = strrchr(module, '.');
            if (kind == 'w' && last) *last = 0;
            found |= p->tensors[k].kind == kind && peft_matches(name, module);
        }
        if (!found)
            return fail_with(error, "%.600s has no tensor of %.160s, which \"%s\" names; use another copy",
                             p->file.path, text ? name : "what is no name", key);
    }
    return true;
}

static inline bool peft_read_config(PeftReading* p, Error* error) {
    Adapter* a = p->adapter;
    uint64_t r = 0;
    if (!peft_check_keys(&p->json, p->path, error) || !peft_switch(&p->rs, &p->json, "use_rslora", p->path, error) ||
        !peft_switch(&p->dora, &p->json, "use_dora", p->path, error)) return false;
    bool good = json_get(&p->json, 0, "peft_type") != JSON_NONE && json_u64(&p->json, json_get(&p->json, 0, "r"), &r) &&
                r >= 1 && r <= 65536 && json_number(&p->json, json_get(&p->json, 0, "lora_alpha"), &a->alpha);
    a->r = r;
    a->scale = p->rs ? LORA_RS : LORA_PLAIN;
    return good || fail_with(error, "%.600s lacks \"peft_type\", \"r\" or \"lora_alpha\", or they are no numbers; use "
                             "another copy", p->path);
}

// Takes the weight off "DIR:WEIGHT"; without one it is 1.
static inline double adapter_weight(char* path) {
    char *colon = strrchr(path, ':'), *end;
    if (colon == NULL || directory_exists(path)) return 1;
    double weight = strtod(colon + 1, &end);
    if (end == colon + 1 || *end || !isfinite(weight)) return 1;  // a part of the path, which opening it reports
    *colon = 0;
    return weight;
}

// Opens the adapter at a path, for the model of a source. The caller closes it after success.
static inline bool adapter_open(Adapter* a, const char* path, const ModelSource* s, Error* error) {
    PeftReading p = {.adapter = a, .source = s};
    ForeignTensor* list = NULL;
    size_t count = 0;
    memset(a, 0, sizeof *a);
    a->plain = true;
    p.file.file = -1;
    if (!path_copy(a->path, path, error)) return false;
    adapter_weight(a->path);
    if (!directory_exists(path) && (strchr(path, ',') || strcmp(a->path, path) != 0))
        return fail_with(error, "--adapter %.600s is a list or has a weight, but --lora continues the training of one "
                         "adapter; give its directory alone", path);
    snprintf(p.path, sizeof p.path, "%.4000s/" PEFT_CONFIG, path);
    if (!hf_json_open(&p.json, p.path, error)) return false;
    bool ok = json_is(&p.json, 0, JSON_OBJECT) || fail_with(error, "%.600s is not an object; use another copy", p.path);
    ok = ok && peft_read_config(&p, error) && peft_open_tensors(&p, error) &&
         convert_list(&list, &count, &s->config, &s->parameters, error);
    for (size_t i = 0; ok && i < count; i++) ok = peft_add(&p, &list[i], error);
    for (size_t i = 0; ok && i < p.file.header.count; i++)
        if (!p.tensors[i].used)
            ok = fail_with(error, "%.600s: %.160s belongs to no matrix of %.600s that can have a pair; they are of "
                           "different models", p.file.path, p.tensors[i].saved->name, s->path);
    ok = ok && peft_check_names(&p, "modules_to_save", 'w', error) &&
         peft_check_names(&p, "target_modules", 'a', error);
    if (ok && a->plain && a->largest == 0)
        ok = fail_with(error, "%.600s changes nothing: %s; use another copy", p.file.path,
                       a->pairs.count ? "all its delta weights are zero" : "it has no pairs");
    if (p.tensors) safetensors_close(&p.file);
    free(p.tensors);
    free(list);
    json_free(&p.json);
    if (!ok) adapter_close(a);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 3. Use

// Refuses a source with pairs of its own: those of an adapter would be added to them.
static inline bool adapter_check_alone(const ModelSource* s, Error* error) {
    bool has = s->merged.count > 0;
    for (size_t i = 0; i < s->parameters.count; i++) has |= s->parameters.tensors[i].adapter != 0;
    return !has ||
           fail_with(error, "%.600s has pairs of LoRA of its own, and --adapter others; give the model that it began "
                     "with by --init-from, or leave out --adapter", s->path);
}

// Refuses an adapter that names another base than the model of a source. It reads the weights, for their hash.
static inline bool adapter_check_base(const Adapter* a, ModelSource* s, Error* error) {
    uint64_t hash;
    if (!a->names_base) return true;
    if (!source_hash(&hash, s, error)) return false;
    return hash == a->base ||
           fail_with(error, "%.600s was trained on other weights than those of %.600s (hash %016llx, here %016llx); "
                     "give the model that it was trained on", a->path, s->path, (unsigned long long)a->base,
                     (unsigned long long)hash);
}

static inline void adapter_describe(FILE* file, const Adapter* a) {
    say(file, "adapter %s: %zu tensors, rank %zu, delta-weight norms from %.3g to %.3g%s", a->path, a->pairs.count,
        a->r, a->smallest, a->largest, a->names_base ? "" : "; it does not name its base, so only shapes are compared");
}

// Makes the pairs of an adapter count `weight` times.
static inline bool adapter_weigh(Adapter* a, double weight, Error* error) {
    for (size_t i = 0; weight != 1 && i < a->pairs.count; i++) {
        SourcePair* pair = &a->pairs.pairs[i];
        if (pair->r == 0 || pair->magnitude)
            return fail_with(error, "%.600s replaces weights (DoRA, modules_to_save), which cannot count %g times; "
                             "leave the number out", a->path, weight);
        pair->scale = (float)(pair->scale * weight);
        if (!isfinite(pair->scale)) return fail_with(error, "%.600s cannot count %g times", a->path, weight);
    }
    return true;
}

// Adds adapters, a list of directories separated by commas, each DIR or DIR:WEIGHT, to what source_read returns. notes:
// where each is described; NULL: nowhere.
static inline bool source_add_adapters(ModelSource* s, const char* list, FILE* notes, Error* error) {
    SourcePairs all = {0};
    bool ok = true;
    if (list[0] == 0) return fail_with(error, "--adapter is empty; give the directory of an adapter");
    if (!adapter_check_alone(s, error)) return false;
    for (const char* item = list; ok && *item; item += *item == ',') {
        char path[FILE_PATH_MAX];
        size_t length = strcspn(item, ",");
        Adapter a;
        snprintf(path, sizeof path, "%.*s", (int)min_size(length, sizeof path - 1), item);
        item += length;
        double weight = adapter_weight(path);
        if (!(ok = adapter_open(&a, path, s, error))) break;
        ok = adapter_check_base(&a, s, error) && adapter_weigh(&a, weight, error);
        if (!ok) {
            adapter_close(&a);
            break;
        }
        if (notes) adapter_describe(notes, &a);
        if (notes && weight != 1) say(notes, "adapter %s counts %g times", path, weight);
        size_t sum = all.count + a.pairs.count;
        SourcePair* more = (SourcePair*)realloc(all.pairs, sum * sizeof(SourcePair));
        ok = more != NULL || fail_memory(error, path, sum * sizeof(SourcePair));
        if (more) {
            memcpy(more + all.count, a.pairs.pairs, a.pairs.count * sizeof(SourcePair));
            all.pairs = more;
            all.count = all.capacity = sum;
            a.pairs.count = 0;
        }
        adapter_close(&a);
    }
    if (ok) s->merged = all, s->held = SIZE_MAX;
    else source_pairs_free(&all);
    return ok;
}

// The pair that an adapter for the model of a source has at a row of a layer's weight; NULL: none.
static inline const SourcePair* adapter_find(const Adapter* a, const ModelSource* s, const char* weight, size_t first) {
    for (size_t i = 0; i < a->pairs.count; i++) {
        const SourcePair* pair = &a->pairs.pairs[i];
        if (pair->first == first && strcmp(s->parameters.tensors[pair->tensor].name, weight) == 0) return pair;
    }
    return NULL;
}

// Which of LORA_TARGETS an adapter has, in any block.
static inline bool adapter_targets(int* targets, const Config* config, const Adapter* a, const ModelSource* s,
                                   Error* error) {
    Config c = *config;
    Weights weights = {0};
    Parameters p = {0};
    int all = 0;
    *targets = c.lora_targets = 0;
    if (!config_complete(&c, error)) return false;
    bool ok = weights_create(&weights, &p, &c, NULL, 0, 1, error);
    for (size_t i = 0; ok && i < c.layers * BLOCK_LINEARS; i++) {
        const Linear* linears[BLOCK_LINEARS];
        block_linears(linears, &weights.blocks[i / BLOCK_LINEARS]);
        const Linear* l = linears[i % BLOCK_LINEARS];
        for (size_t k = 0; k < l->pair_count; k++) {
            char word[24];
            const char* name = strchr(strchr(p.tensors[l->pairs[k].a.row].name, '.') + 1, '.') + 1;  // block.3.q.lora_a
            snprintf(word, sizeof word, "%.*s", (int)strcspn(name, "."), name);
            int bit = 1 << choice_find(LORA_TARGETS, word);
            all |= bit;
            if (adapter_find(a, s, p.tensors[l->weight.row].name, l->pairs[k].first)) *targets |= bit;
        }
    }
    if (*targets == all) *targets = 0;
    free(weights.blocks);
    parameters_free(&p);
    return ok;
}

// Makes a configuration with --lora that of an adapter, whose pairs training is to continue. Members whose flags were
// given must be equal; given: whether --lora-alpha, --lora-scale and --lora-targets were.
static inline bool adapter_configure(Config* c, const Adapter* a, const ModelSource* s, const bool given[3],
                                     Error* error) {
    int targets;
    if (!a->plain)
        return fail_with(error, "%.600s has pairs of several ranks or scales, or more than pairs, and cannot be "
                         "trained further; without --lora it is merged into the weights", a->path);
    if (!adapter_check_alone(s, error)) return false;
    if (c->lora != a->r || (given[0] && c->lora_alpha != a->alpha) || (given[1] && c->lora_scale != a->scale))
        return fail_with(error, "%.600s has --lora %zu --lora-alpha %g --lora-scale %s, not those that are given; give "
                         "these", a->path, a->r, a->alpha, a->scale == LORA_RS ? "rs" : "plain");
    c->lora_alpha = a->alpha;
    c->lora_scale = a->scale;
    if (!adapter_targets(&targets, c, a, s, error)) return false;
    if (!given[2]) c->lora_targets = targets;
    return true;
}

// Sets the pairs of a model from an adapter for the model of a source, which must have exactly these.
static inline bool adapter_set(Model* model, const Adapter* a, const ModelSource* s, Error* error) {
    size_t set = 0;
    for (size_t i = 0; i < model->config.layers * BLOCK_LINEARS; i++) {
        const Linear* linears[BLOCK_LINEARS];
        block_linears(linears, &model->weights.blocks[i / BLOCK_LINEARS]);
        const Linear* l = linears[i % BLOCK_LINEARS];
        for (size_t k = 0; k < l->pair_count; k++, set++) {
            const SourcePair* pair = adapter_find(a, s, model_tensor(model, l->weight)->name, l->pairs[k].first);
            if (pair == NULL)
                return fail_with(error, "%.600s has no pair for %s, which --lora-targets names; give those that it has",
                                 a->path, model_tensor(model, l->pairs[k].a)->name);
            if (!source_set(model, l->pairs[k].a, pair->a, error) || !source_set(model, l->pairs[k].b, pair->b, error))
                return false;
        }
    }
    return set == a->pairs.count ||
           fail_with(error, "%.600s has %zu pairs, and the model %zu; leave out --lora-targets", a->path,
                     a->pairs.count, set);
}

#endif  // LLMTRAIN_PEFT_H
