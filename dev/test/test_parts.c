// test_parts.c: checkpoints of ranks that have parts of tensors (llmtrain/model/parts.h, llmtrain/checkpoint).
//
//   1. layouts    what ranks of any layout have saved, ranks of any other load: every parameter, master weight and
//                 state, whatever is frozen; and every number is saved once
//   2. damage     names that are not a piece's, missing parts, parts twice: refused
//
//   build/test_parts-FP32; build/test_parts-BF16
//
// The ranks of a layout are flat vectors in this process. No values are computed: each number follows from the tensor,
// from what it is of, and from where it is in the whole tensor.

#include "small_pieces.h"

#include "llmtrain/checkpoint/saver.h"
#include "llmtrain/model/weights.h"
#include "harness.h"

#pragma GCC diagnostic ignored "-Wmissing-field-initializers"  // of structures whose remaining members are zero

enum { RANKS = 8, LAYERS = 2 };

typedef struct { size_t tp, cp, pp, stage, world; } Ranks;

static const size_t STAGES[LAYERS + 2] = {0, 0, 1, 1};

static const Ranks LAYOUTS[] = {
    {1, 1, 1, 0, 1}, {1, 1, 1, 1, 3}, {2, 1, 1, 0, 2}, {2, 1, 1, 1, 4}, {2, 2, 1, 2, 4},
    {4, 1, 1, 0, 4}, {4, 1, 1, 3, 8}, {4, 1, 2, 1, 8}, {2, 1, 2, 1, 8},
};

typedef struct {
    Parameters parameters;
    FlatVector flat;
    Arena plan;
    Stream stream;
} Rank;

static OptimizerOptions optimizer;

// Of 256 padded rows of the vocabulary the third of four parts has two true ones, the last none.
static Config config_of(bool llama) {
    Config c = {.family = llama ? FAMILY_LLAMA : FAMILY_GPT2, .layers = LAYERS, .heads = llama ? 8u : 4u, .kv_heads = 4,
                .channels = 32, .context = 16, .vocab = 130, .tied = !llama, .qkv_bias = llama};
    Error error;
    need(config_complete(&c, &error), "%s", error.text);
    return c;
}

static void rank_open(Rank* r, const Ranks* layout, size_t rank, const Config* c, const char* train) {
    Weights weights = {0};
    Error error;
    const RankOptions options = {.rank = rank, .world = layout->world, .stage = layout->stage, .tp = layout->tp,
                                 .cp = layout->cp, .pp = layout->pp};
    const FlatOptions holds = {.training = true, .optimizer = &optimizer};
    memset(r, 0, sizeof *r);
    need(weights_create(&weights, &r->parameters, c, train, rank % layout->tp, layout->tp, &error) &&
         flat_create(&r->flat, &r->parameters, &options, &holds, layout->pp > 1 ? STAGES : NULL, &error) &&
         device_open(&r->stream, false, &error), "%s", error.text);
    free(weights.blocks);
    flat_layout(&r->flat, &r->plan);
    need(arena_allocate(&r->plan, 1, r->stream, &error), "%s", error.text);
    flat_layout(&r->flat, &r->plan);
    need(flat_prepare(&r->flat, r->stream, &error), "%s", error.text);
}

static void rank_close(Rank* r) {
    size_t bytes = arena_bytes(&r->plan);
    flat_free(&r->flat);
    device_free(r->plan.base, bytes);
    device_close(r->stream);
    parameters_free(&r->parameters);
}

// ------------------------------------------------------------------------------------------------
// 1. Layouts

// Element e of this rank's part of tensor i, of array a; frozen weights are of the storage dtype.
static float value_of(const Rank* r, size_t i, size_t a, size_t e) {
    const Tensor* t = &r->parameters.tensors[i];
    size_t whole = part_run(&t->part, e).whole;
    float value = (float)(1 + random_bits(7, RANDOM_TEST, 16 * i + a, whole) % 1000003) / 65536;
    return t->trains ? value : float_of(floatX_of(value));
}

static size_t arrays_of(CheckpointArray arrays[CHECKPOINT_ARRAYS], const Rank* r) {
    return checkpoint_arrays(arrays, &r->flat);
}

// Gives all that a rank holds its value.
static void rank_fill(Rank* r) {
    CheckpointArray arrays[CHECKPOINT_ARRAYS];
    size_t count = arrays_of(arrays, r);
    for (uint32_t i = 0; i < r->parameters.count; i++) {
        const Tensor* t = &r->parameters.tensors[i];
        size_t n = tensor_elements(t);
        float* values = (float*)memory_allocate(max_size(n, 1) * sizeof(float));
        Error error;
        for (size_t a = 0; a < count; a++) {
            char* address;
            for (size_t e = 0; e < n; e++) values[e] = value_of(r, i, a, e);
            if (a == 0) need(flat_set_params(&r->flat, (TensorId){i}, 0, values, n, &error), "%s", error.text);
            if (a == 0 || !t->trains) continue;
            Slice part = checkpoint_part(&address, &arrays[a], &r->flat, t, 0, n);
            if (slice_length(part) == 0) continue;
            need(checkpoint_put(&r->flat, &arrays[a], t, part, address, (const char*)(values + part.first), &error),
                 "%s", error.text);
        }
        free(values);
    }
}

// How many of the numbers that a rank holds are not theirs, padding included; *held: of how many.
static size_t rank_wrong(const Rank* r, size_t* held) {
    CheckpointArray arrays[CHECKPOINT_ARRAYS];
    size_t count = arrays_of(arrays, r), wrong = 0;
    for (size_t i = 0; i < r->parameters.count; i++) {
        const Tensor* t = &r->parameters.tensors[i];
        size_t n = tensor_elements(t);
        char* at;
        Slice kept = flat_kept_part(&at, &r->flat, t, 0, t->size);
        const floatX* params = (const floatX*)at;
        for (size_t e = kept.first; e < kept.end; e++)
            wrong += float_of(params[e - kept.first]) != (e < n ? float_of(floatX_of(value_of(r, i, 0, e))) : 0);
        *held += slice_length(kept);
        for (size_t a = 0; a < count; a++) {
            char* address;
            if (a == 0 && !checkpoint_is_master(&arrays[0], t)) continue;
            if (!t->trains) continue;
            Slice part = checkpoint_part(&address, &arrays[a], &r->flat, t, 0, t->size);
            const float* numbers = (const float*)address;
            for (size_t e = part.first; e < part.end; e++)
                wrong += numbers[e - part.first] != (e < n ? value_of(r, i, a, e) : 0);
            *held += slice_length(part);
        }
    }
    return wrong;
}

// Saves what the ranks hold as OUT/step_N, as model_save does with ranks that are processes.
static void ranks_save(Saver* savers, size_t world, const char* out, uint64_t step) {
    size_t begins[RANKS + 1] = {0};
    char files[1 << 18];
    Error error;
    for (size_t r = 0; r < world; r++) {
        JsonWriter manifest, w = {0};
        manifest_begin(&manifest, savers[r].flat);
        saver_begin(&savers[r], step, out, &manifest);
        need(saver_state(&savers[r]) == SAVER_WRITTEN, "%s", savers[r].error.text);
        saver_write_files(&w, &savers[r]);
        need(json_write_done(&w, &error) && begins[r] + w.bytes < sizeof files, "the texts are too long");
        memcpy(files + begins[r], w.text, w.bytes + 1);
        begins[r + 1] = begins[r] + w.bytes + 1;
        json_writer_free(&w);
    }
    need(saver_publish(&savers[0], files, begins, &error), "%s", error.text);
    for (size_t r = 0; r < world; r++) {
        saver_note_newest(&savers[r]);
        json_writer_free(&savers[r].manifest);
        safetensors_writer_free(&savers[r].writer);
        savers[r].state = SAVER_IDLE;
    }
}

static void layout_save(const Ranks* layout, const Config* c, const char* train, const char* out, uint64_t steps) {
    Rank ranks[RANKS];
    Saver* savers = (Saver*)memory_allocate(RANKS * sizeof(Saver));
    Error error;
    for (size_t r = 0; r < layout->world; r++) {
        rank_open(&ranks[r], layout, r, c, train);
        rank_fill(&ranks[r]);
        need(saver_open(&savers[r], &ranks[r].flat, false, 0, &error), "%s", error.text);
    }
    for (uint64_t step = 1; step <= steps; step++) ranks_save(savers, layout->world, out, step);
    for (size_t r = 0; r < layout->world; r++) {
        saver_close(&savers[r]);
        rank_close(&ranks[r]);
    }
    free(savers);
}

// Loads a checkpoint into ranks of a layout.
static void expect_loads(const Ranks* layout, const Config* c, const char* train, const char* path, const char* what) {
    size_t wrong = 0, held = 0;
    for (size_t r = 0; r < layout->world; r++) {
        Rank rank;
        Json manifest;
        Error error;
        rank_open(&rank, layout, r, c, train);
        need(manifest_open(&manifest, path, &error), "%s", error.text);
        bool ok = checkpoint_load(&rank.flat, &manifest, path, false, &error);
        expect(ok, "%s, rank %zu: %s", what, r, error.text);
        if (ok) wrong += rank_wrong(&rank, &held);
        json_free(&manifest);
        rank_close(&rank);
    }
    expect(wrong == 0 && held > 0, "%s: %zu of %zu numbers are wrong", what, wrong, held);
}

// The shapes in a manifest: "8x4 2 ".
static void shapes_of(char text[8192], const char* path) {
    Json manifest;
    Error error;
    uint64_t tp = 0;
    text[0] = 0;
    need(manifest_open(&manifest, path, &error), "%s", error.text);
    uint32_t table = json_get(&manifest, 0, "flat_vector");
    for (uint32_t t = json_first(&manifest, table); t != JSON_NONE; t = json_next(&manifest, t)) {
        uint32_t shape = json_get(&manifest, t, "shape");
        for (uint32_t n = json_first(&manifest, shape); n != JSON_NONE; n = json_next(&manifest, n)) {
            uint64_t number = 0;
            json_u64(&manifest, n, &number);
            snprintf(text + strlen(text), 8192 - strlen(text), "%llux", (unsigned long long)number);
        }
        snprintf(text + strlen(text), 8192 - strlen(text), " ");
    }
    expect(json_u64(&manifest, json_get(&manifest, 0, "tp"), &tp) && tp > 0, "%s says no tp", path);
    json_free(&manifest);
}

static void test_layouts(void) {
    for (int family = 0; family < 2; family++)
        for (int frozen = 0; frozen < 2; frozen++) {
            Config c = config_of(family);
            const char* train = frozen ? "block.1.*,final_norm*" : NULL;
            char shapes[COUNT_OF(LAYOUTS)][8192];
            for (size_t from = 0; from < COUNT_OF(LAYOUTS); from++) {
                layout_save(&LAYOUTS[from], &c, train, "run", 1);
                shapes_of(shapes[from], "run/step_00000001");
                expect(strcmp(shapes[from], shapes[0]) == 0, "layout %zu has the shapes %s", from, shapes[from]);
                for (size_t to = 0; to < COUNT_OF(LAYOUTS); to++)
                    expect_loads(&LAYOUTS[to], &c, train, "run/step_00000001", text_of("layout %zu to %zu", from, to));
                checkpoint_discard("run");
            }
            verdict("%s%s: what %zu layouts have saved, each loads", family ? "llama" : "gpt2",
                    frozen ? ", partly frozen" : "", COUNT_OF(LAYOUTS));
        }
}

// The frozen parts are written with two checkpoints, and linked by later ones, as the whole tensors are.
static void test_frozen(void) {
    Config c = config_of(true);
    struct stat status[4];
    layout_save(&LAYOUTS[3], &c, "block.1.*", "run", 4);
    for (int file = 0; file < 2; file++) {
        bool there = true;
        for (int i = 0; i < 4; i++)
            there = there && stat(text_of("run/step_0000000%d/%s", i + 1,
                                          file ? "frozen_00001.safetensors" : CHECKPOINT_FROZEN), &status[i]) == 0;
        expect(there && status[0].st_ino != status[1].st_ino && status[2].st_ino == status[0].st_ino &&
               status[3].st_ino == status[1].st_ino, "file %d", file);
    }
    expect(!file_exists("run/step_00000001/frozen_00002.safetensors"), "a third file");
    expect_loads(&LAYOUTS[5], &c, "block.1.*", "run/step_00000004", "the last one");
    verdict("each part of the frozen weights is written twice, and linked later");
    checkpoint_discard("run");
}

// ------------------------------------------------------------------------------------------------
// 2. Damage

// a: (6) on all ranks; b: (12, 4) by the rows of three matrices; c: (4, 8) by columns.
static void small_table(Parameters* p, size_t number, size_t count) {
    const size_t stacked[SHAPE_MATRICES] = {8, 2, 2};
    Error error;
    parameters_add(p, "a", 6, 6, 0, 0, INIT_ZERO, 0);
    parameters_add(p, "b", 12, 12, 4, 0, INIT_ZERO, 0);
    parameters_last(p)->part.by = SPLIT_ROWS;
    memcpy(parameters_last(p)->part.stacked, stacked, sizeof stacked);
    parameters_add(p, "c", 4, 4, 8, 0, INIT_ZERO, 0);
    parameters_last(p)->part.by = SPLIT_COLUMNS;
    parameters_divide(p, number, count);
    need(parameters_finish(p, NULL, &error), "%s", error.text);
}

// Writes a checkpoint of one file whose pieces have these names, and these numbers of elements.
static void put_pieces(const char* directory, const FlatVector* flat, const char* pieces) {
    SafetensorsWriter writer = {.file = {.file = -1}};
    JsonWriter manifest, w = {0};
    const float zeros[64] = {0};
    size_t sizes[16], count = 0, begin = 0;
    char name[64];
    Error error;
    need(directory_make(directory, &error) &&
         safetensors_create(&writer, text_of("%s/rank_00000.safetensors", directory), &error), "%s", error.text);
    for (int used; sscanf(pieces, "%63s %zu%n", name, &sizes[count], &used) == 2; pieces += used, count++)
        need(safetensors_declare(&writer, name, DTYPE_F32, &sizes[count], 1, &error), "%s", error.text);
    need(safetensors_begin(&writer, &error), "%s", error.text);
    for (size_t i = 0; i < count; i++)
        need(safetensors_write(&writer, zeros, sizes[i] * sizeof(float), &error), "%s", error.text);
    need(safetensors_end(&writer, &error), "%s", error.text);
    manifest_begin(&manifest, flat);
    manifest_write_file(&w, "rank_00000.safetensors", &writer.header);
    need(json_write_done(&w, &error) &&
         manifest_finish(&manifest, text_of("%s/manifest.json", directory), flat, w.text, &begin, &error), "%s",
         error.text);
    json_writer_free(&manifest);
    json_writer_free(&w);
    safetensors_writer_free(&writer);
}

// Loads a checkpoint of these pieces into each part of each number of parts.
static void expect_pieces(const char* pieces, const char* words, const OptimizerOptions* o, const char* what) {
    for (size_t count = 1; count <= 2; count++)
        for (size_t number = 0; number < count; number++) {
            Rank r;
            Json manifest;
            Error error;
            const RankOptions options = {.rank = number, .world = count, .tp = count};
            const FlatOptions holds = {.training = o != NULL, .optimizer = o ? o : &optimizer};
            memset(&r, 0, sizeof r);
            small_table(&r.parameters, number, count);
            need(flat_create(&r.flat, &r.parameters, &options, &holds, NULL, &error) &&
                 device_open(&r.stream, false, &error), "%s", error.text);
            flat_layout(&r.flat, &r.plan);
            need(arena_allocate(&r.plan, 1, r.stream, &error), "%s", error.text);
            flat_layout(&r.flat, &r.plan);
            need(flat_prepare(&r.flat, r.stream, &error), "%s", error.text);
            r.flat.options.world = 1;  // of the one that saves
            size_t tp = r.flat.tp;
            r.flat.tp = 1;
            put_pieces("pieces", &r.flat, pieces);
            r.flat.tp = tp;
            need(manifest_open(&manifest, "pieces", &error), "%s", error.text);
            error.text[0] = 0;
            bool ok = checkpoint_load(&r.flat, &manifest, "pieces", false, &error);
            if (words) expect_refusal(ok, &error, words, what);
            else expect(ok, "%s: %s", what, error.text);
            json_free(&manifest);
            rank_close(&r);
            remove_tree("pieces");
        }
}

#define PIECE_A "weight.a 6 "
#define PIECE_B "weight.b{0/2} 24 weight.b{1/2} 24 "
#define PIECE_C "weight.c{0/2}[0:10] 10 weight.c{0/2}[10:16] 6 weight.c{1/2} 16 "

static void test_damage(void) {
    static const char* const good[] = {
        PIECE_A PIECE_B PIECE_C,
        PIECE_A PIECE_B "weight.c 32",
        "weight.c[0:10] 10 " PIECE_A "weight.b[0:40] 40 weight.b[40:48] 8 weight.c[10:32] 22",
        PIECE_A "weight.b 48 weight.c{0/4} 8 weight.c{1/4} 8 weight.c{2/4} 8 weight.c{3/4} 8 other.b{9/9} 7",
    };
    static const char* const bad[][3] = {
        {PIECE_A "weight.b{0/2} 24 " PIECE_C, "24 of 48", "the last part is missing"},
        {PIECE_A "weight.b{1/2} 24 " PIECE_C, "follows element 0", "the first part is missing"},
        {PIECE_A "weight.b{1/2} 24 weight.b{0/2} 24 " PIECE_C, "follows element 0", "parts in another order"},
        {PIECE_A PIECE_B "weight.c{0/2} 16 weight.c{1/2}[2:16] 14", "follows element 16", "a gap in a part"},
        {PIECE_A PIECE_B "weight.c{0/2}[0:10] 10 weight.c{1/2} 16", "follows element 10", "a part that ends too soon"},
        {PIECE_A PIECE_B PIECE_C "weight.b{1/2}[0:24] 24", "follows element 48", "a part twice"},
        {PIECE_A PIECE_B PIECE_C "weight.b 48", "of two checkpoints", "the whole after its parts"},
        {PIECE_A "weight.b{0/2} 24 weight.b[24:48] 24 " PIECE_C, "of two checkpoints", "a half and a part"},
        {PIECE_A PIECE_B "weight.c{0/2} 16 weight.c{2/4} 8 weight.c{3/4} 8", "of two checkpoints", "halves, quarters"},
        {PIECE_A "weight.b{0/2} 24 weight.b{1/2} 20 " PIECE_C, "has 80 bytes", "too few elements"},
        {PIECE_A "weight.b{2/2} 24 " PIECE_C, "does not end as", "part 2 of 0 and 1"},
        {PIECE_A "weight.b{0/1} 48 " PIECE_C, "does not end as", "one of one part"},
        {PIECE_A "weight.b{0/0} 48 " PIECE_C, "does not end as", "one of no parts"},
        {PIECE_A "weight.b{-1/2} 24 " PIECE_C, "does not end as", "a negative part"},
        {PIECE_A "weight.b{0/2 24 " PIECE_C, "does not end as", "no bracket"},
        {PIECE_A "weight.b{0/2}x 24 " PIECE_C, "does not end as", "a letter"},
        {PIECE_A "weight.b{x/2} 24 " PIECE_C, "does not end as", "a letter for a number"},
        {PIECE_A "weight.b[0:24 24 " PIECE_C, "does not end as", "no bracket after a range"},
        {PIECE_A "weight.b[0:24]{0/2} 24 " PIECE_C, "does not end as", "range and part exchanged"},
        {PIECE_A "weight.b{0/4} 12 " PIECE_C, "cannot be divided", "a matrix of 2 rows in 4 parts"},
        {PIECE_A PIECE_B "weight.c{0/3} 12", "cannot be divided", "8 columns in 3 parts"},
        {PIECE_A PIECE_B "weight.c{0/16} 2", "cannot be divided", "8 columns in 16 parts"},
        {"weight.a{0/2} 3 weight.a{1/2} 3 " PIECE_B PIECE_C, "cannot be divided", "what all ranks have, in parts"},
        {PIECE_A "weight.b{0/2}[0:25] 25 " PIECE_C, "24 elements", "more than a part has"},
        {PIECE_A "weight.b{0/2}[9:5] 4 " PIECE_C, "24 elements", "a range that ends before it begins"},
        {PIECE_A "weight.b{0/2}[0:18446744073709551615] 24 " PIECE_C, "24 elements", "a range without end"},
    };
    for (size_t i = 0; i < COUNT_OF(good); i++) expect_pieces(good[i], NULL, NULL, good[i]);
    verdict("pieces of a tensor follow each other, part by part");
    for (size_t i = 0; i < COUNT_OF(bad); i++) expect_pieces(bad[i][0], bad[i][1], NULL, bad[i][2]);
    verdict("what covers less than all elements, or some twice, is refused, as are names that are not a piece's");
    OptimizerOptions factored = optimizer_defaults(OPTIMIZER_ADAFACTOR);
    expect_pieces(PIECE_A PIECE_B PIECE_C "v.a 6 v_row.b{0/2} 12 v_row.b{1/2} 12", "a number per element", &factored,
                  "sums of rows in parts");
    verdict("of a state without a number per element there are no parts");
}

int main(void) {
    tests_begin("test_parts-" FLOATX_NAME);
    root_enter();
    optimizer = optimizer_defaults(OPTIMIZER_ADAMW);
    test_layouts();
    test_frozen();
    test_damage();
    return tests_end();
}
