// test_gguf.c: GGUF files of every architecture and type, compared with those of Python's gguf package (by hashes that
// python3 dev/peers/gguf.py --hashes prints) and read back element by element; Q8_0 against its definition; what is
// refused.

#include "tools/gguf_model.h"
#include "llmtrain/run/presets.h"

#include "harness.h"

// ------------------------------------------------------------------------------------------------
// Models with weights from a formula

typedef struct {
    const char *name, *members;
    const char* tokenizer;             // a directory of fixtures; NULL: byte tokenizer
    uint64_t hashes[GGUF_TYPE_COUNT];  // XXH64 of the files in the order of GGUF_TYPES, as the gguf package writes them
} Case;

static const Case CASES[] = {
    {"gpt2", "family=gpt2 layers=2 heads=2 channels=64 context=48 tied=on", NULL,
     {0xcea3e0a24b035ea3, 0x7951b96fa77b0a07,
      0x2401e04fdccc6021, 0xb0aed6eb45d5e0d1}},
    {"llama", "family=llama layers=2 heads=4 kv_heads=2 channels=64 ffn=96 context=48 tied=off", NULL,
     {0x78ad0df7fb916f62, 0x5eaf7ec0f2136952,
      0x75198d2fb9be0532, 0xd152e66b089ad162}},
    {"llama3", "family=llama layers=1 heads=2 kv_heads=1 channels=64 ffn=72 context=256 tied=on rope_theta=500000 "
     "rope_scaling=llama3 rope_factor=8 rope_low_freq=1 rope_high_freq=4 rope_original=32", NULL,
     {0x34b55e75bed4360d, 0x827174e0dc7e7623,
      0x75918fa8f0d686d0, 0x4332112a642d2099}},
    {"linear", "family=llama layers=1 heads=2 channels=64 ffn=96 context=64 tied=on rope_scaling=linear rope_factor=4",
     NULL,
     {0x91e7ee4c6a3f7797, 0x9c5b14bf0449f06c,
      0xd8e390dff44d84cc, 0x769ff9fb5439a0c6}},
    {"qwen2", "family=llama layers=2 heads=4 kv_heads=2 channels=64 ffn=96 context=48 tied=on qkv_bias=on "
     "norm_epsilon=1e-6", NULL,
     {0x67f3dac8eb663cc1, 0x09bd4281b1d24d04,
      0x4a5c4dbe35707922, 0x3fd6ecea68b42f00}},
    {"qwen3", "family=llama layers=2 heads=4 kv_heads=2 channels=64 ffn=96 context=48 tied=off qk_norm=on head_size=32",
     NULL,
     {0x7da37b7d2946983e, 0xafbf6a06c2e19b7a,
      0x1401ff0c628413db, 0xfdd7ccab472c704b}},
    {"bytes", "family=gpt2 layers=1 heads=2 channels=32 context=16 tied=on vocab=330", "byte_level",
     {0x75b9790e5b412238, 0x200541487c94eb79,
      0x297f36325cb5cf86, 0x81b8d47eadcebdd1}},
    {"pieces", "family=llama layers=1 heads=2 channels=32 ffn=96 context=16 tied=on vocab=430", "sentencepiece",
     {0xce1eb8a91f482701, 0xade7d9ca3b790aed,
      0xc7f24902d0bf4f79, 0x5bd9ea5226d48a61}},
};

typedef struct {
    Config config;
    Weights weights;
    Parameters parameters;
    float bad;  // replaces one element, unless it is 0
    size_t bad_at;
    Tokenizer tokenizer;
} FormulaModel;

static char fixtures[PATH_MAX];

static void formula_create(FormulaModel* m, const Case* c) {
    Error error;
    memset(m, 0, sizeof *m);
    m->config.vocab = 256;
    need(config_set(&m->config, c->members, &error) && config_complete(&m->config, &error) &&
             weights_create(&m->weights, &m->parameters, &m->config, NULL, 0, 1, &error), "%s: %s", c->name, error.text);
    m->tokenizer = tokenizer_of_bytes();
    if (c->tokenizer == NULL) return;
    const char* path = text_of("%s/%s", fixtures, c->tokenizer);
    need(tokenizer_open(&m->tokenizer, path, NULL, &error), "%s", error.text);
}

static void formula_free(FormulaModel* m) {
    free(m->weights.blocks);
    parameters_free(&m->parameters);
    tokenizer_close(&m->tokenizer);
}

// The same bits as in dev/peers/gguf.py.
static float formula(size_t tensor, size_t element) {
    return (float)((double)((int)(((tensor + 1) * 7919 + element * 104729) % 2003) - 1001) / 4093);
}

static bool formula_read(const float** read, void* context, size_t number, Error* error) {
    static float* values;
    const FormulaModel* m = (const FormulaModel*)context;
    const Tensor* t = &m->parameters.tensors[number];
    (void)error;
    free(values);
    *read = values = (float*)memory_allocate(tensor_elements(t) * sizeof(float));
    for (size_t i = 0; i < tensor_elements(t); i++) values[i] = formula(number, i);
    if (m->bad != 0 && strcmp(t->name, "block.0.qkv_weight") == 0) values[m->bad_at] = m->bad;
    return true;
}

static bool formula_export(FormulaModel* m, const char* path, GgufType type, Error* error) {
    return gguf_export(path, &m->config, &m->parameters, &m->tokenizer, type, formula_read, m, error);
}

// ------------------------------------------------------------------------------------------------
// A small reader for the written files

typedef struct {
    char name[64];
    uint64_t dims, shape[2], type, offset;
} Info;

typedef struct {
    char key[64], text[64];
    uint64_t number;  // of an array, of how many elements; of a float, its bits
} Value;

typedef struct {
    char* text;
    size_t bytes, at;
    Value values[64];
    Info tensors[64];
    uint64_t value_count, count;
    size_t data;  // where the data begin
} Gguf;

static uint64_t read_number(Gguf* g, size_t bytes) {
    uint64_t number = 0;
    need(g->at + bytes <= g->bytes, "the file ends early");
    memcpy(&number, g->text + g->at, bytes);
    g->at += bytes;
    return number;
}

static void read_text(Gguf* g, char* text, size_t size) {
    size_t bytes = (size_t)read_number(g, 8);
    need(bytes < size && g->at + bytes <= g->bytes, "a text of %zu bytes", bytes);
    memcpy(text, g->text + g->at, bytes);
    text[bytes] = 0;
    g->at += bytes;
}

static void read_value(Gguf* g, uint64_t type, Value* v) {
    if (type == GGUF_STRING) {
        read_text(g, v->text, sizeof v->text);
    } else if (type == GGUF_ARRAY) {
        Value element;
        uint64_t of = read_number(g, 4);
        v->number = read_number(g, 8);
        for (uint64_t i = 0; i < v->number; i++) read_value(g, of, &element);
    } else {
        v->number = read_number(g, type == GGUF_BOOL ? 1 : 4);
    }
}

static void gguf_read(Gguf* g, const char* path) {
    memset(g, 0, sizeof *g);
    g->text = text_read(path, &g->bytes);
    need(g->text != NULL, "%s", path);
    uint64_t magic = read_number(g, 4), version = read_number(g, 4);
    g->count = read_number(g, 8);
    g->value_count = read_number(g, 8);
    need(magic == 0x46554747 && version == 3 && g->count <= COUNT_OF(g->tensors) &&
         g->value_count <= COUNT_OF(g->values), "the header of %s", path);
    for (uint64_t i = 0; i < g->value_count; i++) {
        read_text(g, g->values[i].key, sizeof g->values[i].key);
        read_value(g, read_number(g, 4), &g->values[i]);
    }
    for (uint64_t i = 0; i < g->count; i++) {
        Info* t = &g->tensors[i];
        read_text(g, t->name, sizeof t->name);
        t->dims = read_number(g, 4);
        for (uint64_t d = 0; d < t->dims; d++) t->shape[d] = read_number(g, 8);
        t->type = read_number(g, 4);
        t->offset = read_number(g, 8);
    }
    g->data = round_up(g->at, 32);
}

// The value of a key; NULL if there is none.
static const Value* gguf_value(const Gguf* g, const char* key) {
    for (uint64_t i = 0; i < g->value_count; i++)
        if (strcmp(g->values[i].key, key) == 0) return &g->values[i];
    return NULL;
}

static const Info* gguf_find(const Gguf* g, const char* name) {
    for (uint64_t i = 0; i < g->count; i++)
        if (strcmp(g->tensors[i].name, name) == 0) return &g->tensors[i];
    need(false, "there is no %s", name);
    return NULL;
}

static double read_element(const Gguf* g, const Info* t, size_t i) {
    const char* data = g->text + g->data + t->offset;
    uint16_t half;
    float value;
    memcpy(&half, t->type == GGUF_Q8_0 ? data + i / 32 * 34 : data + 2 * i, 2);
    if (t->type == GGUF_Q8_0) return (double)float_from_f16(half) * (double)(signed char)data[i / 32 * 34 + 2 + i % 32];
    if (t->type == GGUF_F16) return (double)float_from_f16(half);
    if (t->type == GGUF_BF16) return (double)float_from_bf16(half);
    memcpy(&value, data + 4 * i, 4);
    return (double)value;
}

// ------------------------------------------------------------------------------------------------
// Tests

// Every file equals, byte for byte, what the gguf package writes for the same weights.
static void test_hashes(void) {
    for (size_t i = 0; i < COUNT_OF(CASES); i++) {
        FormulaModel m;
        formula_create(&m, &CASES[i]);
        for (size_t type = 0; type < GGUF_TYPE_COUNT; type++) {
            Error error;
            size_t bytes;
            const char* path = text_of("%s/%s.gguf", root, CASES[i].name);
            need(formula_export(&m, path, GGUF_TYPES[type].type, &error), "%s", error.text);
            char* text = text_read(path, &bytes);
            uint64_t hash = hash_bytes(text, bytes);
            expect(hash == CASES[i].hashes[type], "%s in type %zu: 0x%016llx", CASES[i].name, type,
                   (unsigned long long)hash);
            free(text);
        }
        formula_free(&m);
    }
    verdict("files of all architectures, types and tokenizers are those of the gguf package");
}

// What a number of magnitude below 0.25 may lose: half of the distance between two numbers of the type; Q8_0's scale is
// rounded too, by 2^-11 of itself.
static double bound_of_type(uint64_t type) {
    return type == GGUF_F32 ? 0 : type == GGUF_F16 ? 0x1p-13 : type == GGUF_BF16 ? 0x1p-10
                                                           : 0.25 / 127 / 2 + 0.25 * 0x1p-11;
}

// Some rows, matched by hand: the row of the GGUF tensor, and our row that it holds.
static void test_rows(void) {
    static const struct {
        size_t model;
        const char* architecture;
        const char* theirs;
        size_t row;
        const char* ours;
        size_t our_row;
    } rows[] = {
        {0, "gpt2", "token_embd.weight", 255, "token_embedding", 255},
        {0, "gpt2", "position_embd.weight", 47, "position_embedding", 47},
        {0, "gpt2", "blk.1.attn_qkv.weight", 100, "block.1.qkv_weight", 100},
        {0, "gpt2", "blk.1.ffn_up.weight", 255, "block.1.ffn_in_weight", 255},
        {1, "llama", "output.weight", 3, "head_weight", 3},
        {1, "llama", "blk.0.attn_q.weight", 0, "block.0.qkv_weight", 0},
        {1, "llama", "blk.0.attn_q.weight", 1, "block.0.qkv_weight", 8},
        {1, "llama", "blk.0.attn_q.weight", 18, "block.0.qkv_weight", 17},
        {1, "llama", "blk.1.attn_k.weight", 31, "block.1.qkv_weight", 64 + 31},
        {1, "llama", "blk.1.attn_k.weight", 17, "block.1.qkv_weight", 64 + 16 + 8},
        {1, "llama", "blk.1.attn_v.weight", 1, "block.1.qkv_weight", 64 + 32 + 1},
        {1, "llama", "blk.0.ffn_gate.weight", 5, "block.0.ffn_in_weight", 5},
        {1, "llama", "blk.0.ffn_up.weight", 5, "block.0.ffn_in_weight", 96 + 5},
        {4, "qwen2", "blk.0.attn_k.weight", 1, "block.0.qkv_weight", 64 + 1},
        {5, "qwen3", "blk.1.attn_v.weight", 1, "block.1.qkv_weight", 4 * 32 + 2 * 32 + 1},
        {5, "qwen3", "blk.1.attn_output.weight", 63, "block.1.attention_out_weight", 63},
    };
    for (size_t type = 0; type < GGUF_TYPE_COUNT; type++) {
        double worst = 0;  // relative to what the type may lose
        for (size_t i = 0; i < COUNT_OF(rows); i++) {
            FormulaModel m;
            Gguf g;
            Error error;
            const char* path = text_of("%s/rows.gguf", root);
            formula_create(&m, &CASES[rows[i].model]);
            need(formula_export(&m, path, GGUF_TYPES[type].type, &error), "%s", error.text);
            gguf_read(&g, path);
            const Info* t = gguf_find(&g, rows[i].theirs);
            const Value* architecture = gguf_value(&g, "general.architecture");
            need(architecture != NULL, "no architecture");
            expect(strcmp(architecture->text, rows[i].architecture) == 0, "architecture %s", architecture->text);
            size_t ours = 0, cols = (size_t)t->shape[0];
            while (strcmp(m.parameters.tensors[ours].name, rows[i].ours) != 0) ours++;
            expect(cols == m.parameters.tensors[ours].cols, "%s has %zu columns", t->name, cols);
            for (size_t j = 0; j < cols; j++) {
                double exact = (double)formula(ours, rows[i].our_row * cols + j);
                double error_of = fabs(read_element(&g, t, rows[i].row * cols + j) - exact);
                double bound = bound_of_type(t->type);
                if (!(error_of <= bound)) expect(false, "%s element %zu: off by %g", t->name, j, error_of);
                worst = fmax(worst, bound > 0 ? error_of / bound : error_of);
            }
            size_t end = g.data;
            for (uint64_t k = 0; k < g.count; k++) {
                const Info* of = &g.tensors[k];
                size_t elements = (size_t)(of->shape[0] * (of->dims > 1 ? of->shape[1] : 1));
                expect(g.data + of->offset == end, "%s begins at %zu, not %zu", of->name,
                       (size_t)(g.data + of->offset), end);
                end += round_up(gguf_type_bytes((GgufType)of->type, elements), 32);
            }
            expect(end == g.bytes, "the data end at %zu, the file at %zu", end, g.bytes);
            free(g.text);
            formula_free(&m);
        }
        char name[16];
        choice_name(GGUF_TYPE_NAMES, (int)type, name, sizeof name);
        verdict("%s: rows are where llama.cpp looks for them, at most %.2f of the type's rounding off", name, worst);
    }
}

// Every element of models whose tensors have more than GGUF_PIECE elements.
static void test_wide(void) {
    static const struct { GgufType types[2]; Case model; } wide[] = {
        {{GGUF_F32, GGUF_Q8_0}, {"gpt2", "family=gpt2 layers=1 heads=9 channels=576 ffn=1152 context=16 tied=on", NULL,
                                 {0}}},
        {{GGUF_BF16, GGUF_BF16}, {"llama", "family=llama layers=1 heads=9 kv_heads=3 channels=576 ffn=1152 context=16 "
                                  "tied=on", NULL, {0}}},
        {{GGUF_F16, GGUF_F16}, {"qwen2", "family=llama layers=1 heads=9 kv_heads=3 channels=576 ffn=1152 context=16 "
                                "tied=on qkv_bias=on", NULL, {0}}},
    };
    Error error;
    for (size_t i = 0; i < 2 * COUNT_OF(wide); i++) {
        GgufType type = wide[i / 2].types[i % 2];
        FormulaModel m;
        ForeignTensor* list = NULL;
        Gguf g;
        size_t count = 0, largest = 0;
        if (i % 2 && type == wide[i / 2].types[0]) continue;
        formula_create(&m, &wide[i / 2].model);
        need(formula_export(&m, "wide.gguf", type, &error) &&
             convert_list(&list, &count, &m.config, &m.parameters, &error), "%s", error.text);
        gguf_read(&g, "wide.gguf");
        bool llama = strcmp(wide[i / 2].model.name, "llama") == 0;
        size_t D = config_head_size(&m.config);
        expect(g.count == count, "%s: %zu tensors of %zu", wide[i / 2].model.name, (size_t)g.count, count);
        for (size_t k = 0; k < count; k++) {
            const ForeignTensor* f = &list[k];
            char name[96];
            size_t width = max_size(f->cols, 1), n = f->rows * width, at = 0;
            convert_name(name, sizeof name, TENSOR_NAMES[f->row].gguf, 0);
            const Info* t = gguf_find(&g, name);
            StackPart part = TENSOR_NAMES[f->row].part;
            double bound = bound_of_type(t->type);
            largest = max_size(largest, n);
            for (; at < n; at++) {
                size_t row = at / width, in_head = row % D;
                if (llama && (part == PART_Q || part == PART_K))  // its pairs are neighbors, ours are half a head apart
                    row += in_head / 2 + in_head % 2 * D / 2 - in_head;
                double exact = (double)formula(f->tensor, (f->first + row) * width + at % width);
                if (!(fabs(read_element(&g, t, at) - exact) <= bound)) break;
            }
            expect(at == n, "%s: %s, element %zu of %zu", wide[i / 2].model.name, t->name, at, n);
        }
        need(largest > 2 * GGUF_PIECE && largest % GGUF_PIECE != 0, "the wide model is too small");
        free(list);
        free(g.text);
        formula_free(&m);
    }
    verdict("every element of tensors of more than %d elements", GGUF_PIECE);

    FormulaModel m;
    static const size_t places[] = {7, GGUF_PIECE - 1, GGUF_PIECE, GGUF_PIECE + 70};
    formula_create(&m, &wide[0].model);
    m.bad = NAN;
    for (size_t i = 0; i < COUNT_OF(places); i++) {
        m.bad_at = places[i];
        expect_refusal(formula_export(&m, "wide.gguf", GGUF_F16, &error), &error,
                       text_of("attn_qkv.weight has numbers from element %zu on", places[i]), "NaN");
    }
    formula_free(&m);
    verdict("the first element that a type cannot hold is named, in any piece");
}

// The value of a tokenizer's key is a text, or else a number; -1: there is none.
static void expect_value(const Gguf* g, const char* what, const char* key, const char* text, int number) {
    const Value* v = gguf_value(g, text_of("tokenizer.ggml.%s", key));
    bool same = text ? v && strcmp(v->text, text) == 0 : number < 0 ? v == NULL : v && v->number == (uint64_t)number;
    expect(same, "%s: %s is %s, %d", what, key, v ? v->text : "not there", v ? (int)v->number : -1);
}

// Every tokenizer of the fixtures, by the names that llama.cpp has for its kind (src/llama-vocab.cpp), with its special
// tokens, and without: then byte 0 ends a text.
static void test_tokenizers(void) {
    static const struct {
        const char *path, *pattern, *model, *pre;  // model NULL: llama.cpp has none
        int begin, end, unknown, space, byte_0;    // -1: there is none
        const char* refusal;
    } rows[] = {
        {"gpt2.json", NULL, "gpt2", "gpt-2", -1, 420, -1, -1, 188, ""},
        {"gpt2-added.json", NULL, "gpt2", "gpt-2", -1, 420, -1, -1, 188, ""},
        {"gpt2", NULL, "gpt2", "gpt-2", -1, 420, -1, -1, 188, ""},
        {"r50k.json", NULL, "gpt2", "gpt-2", -1, 420, -1, -1, 188, ""},
        {"llama3.json", NULL, "gpt2", "llama-bpe", -1, 420, -1, -1, 188, ""},
        {"gpt4-removed.json", NULL, "gpt2", "dbrx", -1, 420, -1, -1, 188, ""},
        {"phi4.json", NULL, "gpt2", "dbrx", -1, 420, -1, -1, 188, ""},
        {"qwen2.json", NULL, "gpt2", "qwen2", -1, 420, -1, -1, 188, ""},
        {"o200k.json", NULL, "gpt2", "gpt-4o", -1, 420, -1, -1, 188, ""},
        {"smollm2.json", NULL, "gpt2", "smollm", -1, 420, -1, -1, 188, ""},
        {"ranks.tiktoken", "gpt2", "gpt2", "gpt-2", -1, 420, -1, -1, 188, ""},
        {"ranks.tiktoken", "o200k", "gpt2", "gpt-4o", -1, 420, -1, -1, 188, ""},
        {"llama2.json", NULL, "llama", "default", 1, 2, 0, 1, 3, ""},
        {"llama2-added.json", NULL, "llama", "default", 1, 2, 0, 1, 3, ""},
        {"mistral.json", NULL, "llama", "default", 1, 2, 0, 1, 3, ""},
        {"gemma.json", NULL, "llama", "default", 1, 2, 0, 0, 3, ""},
        {"metaspace.json", NULL, NULL, NULL, 0, 0, 0, 0, 0, "lacks byte tokens"},
        {"gpt2-prefix.json", NULL, NULL, NULL, 0, 0, 0, 0, 0, "add_prefix_space"},
        {"ranks.tiktoken", "cl100k", NULL, NULL, 0, 0, 0, 0, 0, "does not split words"},
    };
    static const Case model = {"tokens", "family=gpt2 layers=1 heads=1 channels=8 context=8 tied=on vocab=700", NULL,
                               {0}};
    Error error;
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        FormulaModel m;
        Gguf g;
        const char* what = text_of("%s %s", rows[i].path, rows[i].pattern ? rows[i].pattern : "");
        formula_create(&m, &model);
        need(tokenizer_open(&m.tokenizer, text_of("%s/../tokenizers/%s", fixtures, rows[i].path), rows[i].pattern,
                            &error), "%s", error.text);
        for (int none = 0; none < 3; none++) {  // 2: a token that begins chats, and no other texts
            if (none) m.tokenizer.begin_of_text = m.tokenizer.begin_token = m.tokenizer.end_of_text = -1;
            if (none == 2) m.tokenizer.begin_token = 7;
            int begin = none ? -1 : rows[i].begin, end = none ? rows[i].byte_0 : rows[i].end;
            bool ok = formula_export(&m, "tokens.gguf", GGUF_F32, &error);
            if (rows[i].model == NULL) expect_refusal(ok, &error, rows[i].refusal, what);
            if (rows[i].model == NULL || !expect(ok, "%s: %s", what, error.text)) continue;
            gguf_read(&g, "tokens.gguf");
            expect_value(&g, what, "model", rows[i].model, -1);
            expect_value(&g, what, "pre", rows[i].pre, -1);
            expect_value(&g, what, "bos_token_id", NULL, none == 2 ? 7 : begin < 0 ? end : begin);
            expect_value(&g, what, "eos_token_id", NULL, end);
            expect_value(&g, what, "add_bos_token", NULL, begin >= 0);
            expect_value(&g, what, "unknown_token_id", NULL, rows[i].unknown);
            expect_value(&g, what, "add_space_prefix", NULL, rows[i].space);
            expect_value(&g, what, "tokens", NULL, (int)m.config.vocab);
            expect_value(&g, what, "token_type", NULL, (int)m.config.vocab);
            free(g.text);
        }
        formula_free(&m);
    }
    verdict("every tokenizer has llama.cpp's name for its kind, and its special tokens, or is refused");
}

static void test_q8(void) {
    float values[Q8_BLOCK];
    Q8Block block;
    for (int i = 0; i < Q8_BLOCK; i++) values[i] = (float)(i - 16) * 127.0f / 16.0f;
    expect(q8_block_of(&block, values), "refused");
    expect(float_from_f16(block.scale) == 1, "scale %g", (double)float_from_f16(block.scale));
    for (int i = 0; i < Q8_BLOCK; i++)
        expect((float)block.values[i] == roundf(values[i]), "element %d is %d", i, block.values[i]);
    memset(values, 0, sizeof values);
    expect(q8_block_of(&block, values) && block.scale == 0 && block.values[7] == 0, "zeros");
    values[3] = 0x1p-140f;
    expect(q8_block_of(&block, values) && block.scale == 0, "a number too small for binary16");
    values[3] = 127.0f * 65504;
    expect(q8_block_of(&block, values) && block.values[3] == 127, "the largest number");
    values[3] = 127.0f * 65536;
    expect(!q8_block_of(&block, values), "a number beyond it is accepted");
    values[3] = NAN;
    expect(!q8_block_of(&block, values), "NaN is accepted");
    verdict("a block of Q8_0: its scale, its bytes, zeros, the smallest and largest numbers, NaN");
}

static void test_refusals(void) {
    Error error;
    FormulaModel m;
    const char* path = "refused.gguf";
    formula_create(&m, &CASES[1]);
    m.bad_at = 5;
    static const float bad[] = {NAN, INFINITY, 1e5f};
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        m.bad = bad[i];
        expect_refusal(formula_export(&m, path, GGUF_F16, &error), &error, "blk.0.attn_q.weight has numbers", "f16");
        expect(formula_export(&m, path, GGUF_BF16, &error), "bf16: %s", error.text);
        need(unlink(path) == 0, "%s", path);
    }
    m.bad = NAN;
    expect_refusal(formula_export(&m, path, GGUF_Q8_0, &error), &error, "its type cannot hold", "q8_0");
    m.bad = 0;
    expect(directory_count(root, "refused") == 0, "a file is left");
    expect_refusal(formula_export(&m, "none/x.gguf", GGUF_F32, &error), &error, "create", "no folder");
    FormulaModel wide;
    formula_create(&wide, &CASES[0]);
    wide.config.head_size = 16;
    expect_refusal(formula_export(&wide, path, GGUF_F32, &error), &error, "no GPT-2 whose heads times head size, 32, "
                   "differ from its channels, 64", "small heads");
    formula_free(&wide);
    m.config.qk_norm = true;
    m.config.rope_scaling = ROPE_SCALING_LLAMA3;
    expect_refusal(formula_export(&m, path, GGUF_F32, &error), &error, "llama3", "qwen3 with llama3 scaling");
    m.config.qk_norm = false;
    m.config.vocab = 255;
    expect_refusal(formula_export(&m, path, GGUF_F32, &error), &error, "has 256 tokens", "too large a tokenizer");
    formula_free(&m);
    formula_create(&m, &CASES[6]);
    Rules* rules = m.tokenizer.rules;
    Split split = rules->split;
    rules->split = SPLIT_CL100K;
    expect_refusal(formula_export(&m, path, GGUF_F32, &error), &error, "does not split words", "cl100k's pattern");
    rules->split = split;
    rules->prefix = PREFIX_ALWAYS;
    expect_refusal(formula_export(&m, path, GGUF_F32, &error), &error, "add_prefix_space", "a space in front");
    rules->prefix = PREFIX_NEVER;
    rules->normalizer_count = 1;
    rules->normalizers[0].kind = NORMALIZE_REPLACE;
    expect_refusal(formula_export(&m, path, GGUF_F32, &error), &error, "normalizer", "a normalizer");
    rules->normalizer_count = 0;
    Vocabulary* v = &rules->vocabulary;
    Token token = v->tokens[300];
    v->tokens[300] = v->tokens[299];
    expect_refusal(formula_export(&m, path, GGUF_F32, &error), &error, "have the same text", "two tokens of one text");
    v->tokens[300] = token;
    formula_free(&m);
    formula_create(&m, &CASES[7]);
    m.tokenizer.rules->vocabulary.bytes[200] = -1;
    expect_refusal(formula_export(&m, path, GGUF_F32, &error), &error, "lacks byte tokens", "no token of a byte");
    formula_free(&m);
    expect(directory_count(root, "refused") == 0, "a file is left");
    verdict("numbers that a type cannot hold, models and tokenizers that llama.cpp lacks: refused, no file left");
}

// A writer takes as many elements as were declared.
static void test_amounts(void) {
    static const float values[3] = {1, 2, 3};
    static const size_t shape[1] = {2};
    for (size_t n = 1; n <= 3; n++) {
        Error error;
        GgufWriter w;
        const char* path = text_of("%s/amounts.gguf", root);
        need(gguf_create(&w, path, &error), "%s", error.text);
        gguf_declare(&w, "t", GGUF_F32, shape, 1);
        need(gguf_begin(&w, &error), "%s", error.text);
        bool good = gguf_write(&w, values, n, &error) && gguf_end(&w, &error);
        if (n == 2) expect(good, "%s", error.text);
        else expect_refusal(good, &error, n == 3 ? "more data than declared" : "not enough data for t", "elements");
        gguf_writer_free(&w);
        expect(file_exists(path) == (n == 2), "%zu elements: a file", n);
        remove(path);
    }
    verdict("files with more or less data than declared are refused");
}

int main(void) {
    tests_begin("test_gguf");
    need(realpath("dev/test/fixtures/gguf", fixtures) != NULL, "dev/test/fixtures/gguf");
    root_enter();
    test_hashes();
    test_rows();
    test_wide();
    test_tokenizers();
    test_q8();
    test_refusals();
    test_amounts();
    return tests_end();
}
