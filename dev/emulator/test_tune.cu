// test_tune.cu: build/tune, its file, and models that train with it, in the emulator. Its cuBLASLt offers algorithms
// that compute a sum in one to four parts, and so with different bits; their times are pretended (cublaslt.h).
//
//   tuning     the fastest is stored for every matmul of a step; never a wrong one, nor one that fails
//   training   the same file, the same bits; without it, or with algorithms that fail here, the default's bits
//   files      of another GPU or library, truncated, changed in any byte, or with impossible entries
//
// Every run is a process of its own.

#define PRECISION_BF16
#define main tune_main
#include "tools/tune.cu"
#undef main
#include "dev/test/harness.h"

// The properties of the emulated library in a run, and what the run does.
typedef struct {
    unsigned wrong, refused;
    size_t version, split_bytes;
    const char* arguments;  // of tune; NULL: trains
    const char* file;       // for training; NULL: none
} Scene;

// Gradients of attention matrices, of the head and by GELU; float matmuls, for Muon.
#define MODEL "--layers 1 --heads 2 --channels 32 --vocab 200 --context 16 --batch 2 --optimizer muon"
enum { B = 2, T = 16, STEPS = 3, FASTEST = 2, NEXT = 3 };  // of the algorithms, from 0

static void print_weights(Model* model) {
    size_t bytes = model->parameters.true_size * sizeof(floatX);
    void* params = memory_allocate(bytes);
    need(params != NULL, "memory for the weights");
    device_download(params, model->flat.params, bytes, model->stream);
    printf("weights %016llx, algorithms %016llx\n", (unsigned long long)hash_bytes(params, bytes),
           (unsigned long long)matmul_choices_hash(model->stream));
    free(params);
}

// The forwards of a file that relies on more than 16 bytes of alignment, with arrays that have no more: the library
// still computes them.
static void misaligned(Stream stream) {
    const struct Matmul* matmul = stream->matmul;
    Error error;
    for (size_t i = 0; i < matmul->capacity; i++) {
        const MatmulPlan* plan = &matmul->plans[i];
        const MatmulShape* s = &plan->shape;
        if (!plan->taken || plan->alignment == MATMUL_ALIGNMENT || s->kind != MATMUL_FORWARD || s->bias) continue;
        size_t elements[] = {s->M * s->N, s->N * s->K, s->M * s->K}, bytes[3];
        char* arrays[3];
        for (int a = 0; a < 3; a++) {
            bytes[a] = 16 + elements[a] * dtype_bytes((Dtype)s->type);
            arrays[a] = (char*)device_allocate(bytes[a], stream, &error);
            need(arrays[a] != NULL, "%s", error.text);
        }
        bool taken = matmul_library_of(MATMUL_FORWARD, (Dtype)s->type, s->tf32, arrays[0] + 16, arrays[1] + 16,
                                       arrays[2] + 16, NULL, NULL, false, s->M, s->N, s->K, stream);
        need(taken, "the library is not asked for matmuls of arrays that are aligned to 16 bytes");
        device_wait(stream);
        for (int a = 0; a < 3; a++) device_free(arrays[a], bytes[a]);
    }
}

// A few steps; prints a hash of the weights.
static int train(const char* file) {
    Error error;
    Config config;
    Model model;
    ModelOptions options;
    StepResult result;
    StepFlags none;
    int32_t tokens[B * T];
    memset(&config, 0, sizeof config);
    memset(&options, 0, sizeof options);
    memset(&none, 0, sizeof none);
    config.tied = true;
    bool ok = config_set(&config, "layers=1 heads=2 channels=32 vocab=200 context=16", &error);
    options.B = B;
    options.T = T;
    options.training = true;
    options.optimizer = optimizer_defaults(OPTIMIZER_MUON);
    options.matmul_algorithms = file;
    for (int i = 0; i < B * T; i++) tokens[i] = i * 13 % 200;
    ok = ok && config_complete(&config, &error) && model_create(&model, &config, options, &error);
    if (!ok) return fprintf(stderr, "%s\n", error.text), 1;
    need(model_randomize(&model, 1, &error), "%s", error.text);
    for (int step = 1; step <= STEPS; step++) {
        model_begin_step(&model, 1.0, 1);
        model_gradients(&model, tokens, tokens, B, T);
        need(model_finish_step(&model, &result, none, &error), "%s", error.text);
        model_update(&model, (uint64_t)step, 1e-2, 1.0);
    }
    for (size_t i = 0; i < model.stream->matmul->capacity; i++) {
        const MatmulPlan* plan = &model.stream->matmul->plans[i];
        need(!plan->taken || plan->calls > 0, "an array of %s is not aligned to %zu bytes",
             matmul_names[plan->shape.kind], plan->alignment);
    }
    print_weights(&model);
    misaligned(model.stream);
    model_free(&model);
    return 0;
}

static void play(const void* context) {
    const Scene* s = (const Scene*)context;
    const double ms[] = {1e6, 8e5, 2e5, 6e5};  // real times are negligible in comparison
    Words words;
    memcpy(emulator::cublaslt_ms, ms, sizeof ms);
    emulator::cublaslt_wrong = s->wrong;
    emulator::cublaslt_refused = s->refused;
    if (s->version) emulator::cublaslt_version = s->version;
    emulator::cublaslt_split_bytes = s->split_bytes;
    if (s->arguments == NULL) exit(train(s->file));
    memset(&words, 0, sizeof words);
    words_add(&words, "tune");
    words_add(&words, s->arguments);
    exit(tune_main((int)words.count, words.words));
}

// Runs it to the end; the caller frees *p.
static int run(Program* p, const Scene* s) {
    program_start(p, NULL, play, s);
    programs_wait(p, 1, 60e3);
    return program_code(p);
}

// Trains, and expects these words on standard error, "" for none at all. Returns the line of the weights.
static const char* trained(const Scene* s, const char* words, const char* what) {
    Program p;
    int code = run(&p, s);
    bool said = words[0] ? strstr(p.text[1], words) != NULL : p.text[1][0] == 0;
    expect(code == 0 && said, "%s: exit code %d, '%s'", what, code, p.text[1]);
    const char* line = text_of("%.100s", p.text[0]);
    program_free(&p);
    return line;
}

static bool same_weights(const char* a, const char* b) { return strncmp(a, b, 24) == 0; }

// ------------------------------------------------------------------------------------------------
// Tuning

static uint32_t parts_of(const MatmulChoice* choice) {
    emulator::CublasltAlgorithm algorithm;
    memcpy(&algorithm, &choice->algorithm, sizeof algorithm);
    return algorithm.parts;
}

// Tunes, reads the file, and expects that every algorithm is number `best`, from 0; the output is in *p.
static void tuned(Program* p, MatmulChoices* c, const char* file, unsigned wrong, unsigned refused, uint32_t best) {
    Error error;
    const Scene scene = {wrong, refused, 0, 0, text_of(MODEL " --out %s", file), NULL};
    int code = run(p, &scene);
    need(code == 0, "tune: exit code %d, %s", code, p->text[1]);
    need(matmul_choices_read(c, file, &error), "%s", error.text);
    for (size_t i = 0; i < c->count; i++)
        expect(parts_of(&c->choices[i]) == best + 1, "%s: algorithm %u, not %u", matmul_names[c->choices[i].shape.kind],
               parts_of(&c->choices[i]) - 1, best);
}

static bool has(const MatmulChoices* c, MatmulKind kind, bool bias, Dtype type) {
    bool found = false;
    for (size_t i = 0; i < c->count; i++) {
        const MatmulShape* s = &c->choices[i].shape;
        found = found || (s->kind == kind && s->bias == bias && s->type == type);
    }
    return found;
}

static void test_tuning(void) {
    Program p;
    MatmulChoices c;
    tuned(&p, &c, "best.json", 0, 0, FASTEST);
    verdict("the fastest algorithm of every matmul is stored");
    expect(has(&c, MATMUL_FORWARD, true, DTYPE_BF16), "a forward with a bias");
    expect(has(&c, MATMUL_FORWARD, false, DTYPE_BF16), "the head's forward");
    expect(has(&c, MATMUL_GELU_FORWARD, true, DTYPE_BF16), "a forward with GELU");
    expect(has(&c, MATMUL_GELU_BACKWARD_INPUT, false, DTYPE_BF16), "a backward with GELU");
    expect(has(&c, MATMUL_BACKWARD_INPUT, false, DTYPE_BF16), "a gradient of an input");
    expect(has(&c, MATMUL_BACKWARD_WEIGHT, false, DTYPE_BF16), "a gradient of a weight");
    expect(has(&c, MATMUL_FORWARD, false, DTYPE_F32), "a matmul of floats");
    expect(count_in(p.text[0], "\nmatmul_") == c.count, "%zu rows", count_in(p.text[0], "\nmatmul_"));
    expect(strstr(p.text[0], " 80.0%") && strstr(p.text[0], "80.0% less"), "100 and 20 are not 80%% apart");
    verdict("every kind of matmul of a step is in the table and the file, %zu of them", c.count);
    matmul_choices_free(&c);
    program_free(&p);

    tuned(&p, &c, "right.json", 1u << FASTEST, 0, NEXT);
    expect(count_in(p.text[0], " is WRONG and not used") == 2 * c.count, "it is not reported each time");
    verdict("an algorithm whose results are wrong is reported, and the next one stored");
    matmul_choices_free(&c);
    program_free(&p);
    tuned(&p, &c, "running.json", 0, 1u << FASTEST, NEXT);
    expect(count_in(p.text[0], " does not run") == 2 * c.count, "it is not reported each time");
    verdict("an algorithm that does not run is reported, and the next one stored");
    matmul_choices_free(&c);
    program_free(&p);
}

// Algorithms that need SPLIT bytes: a model without a file has no memory for them, a model with one takes it.
static void test_workspace(void) {
    enum { SPLIT = 48 << 20 };
    Program p;
    MatmulChoices c;
    Error error;
    size_t bytes = 0;
    const Scene narrow = {0, 0, 0, SPLIT, MODEL " --workspace 32 --out narrow.json", NULL};
    const Scene wide = {0, 0, 0, SPLIT, MODEL " --out wide.json", NULL};
    const Scene trains = {0, 0, 0, SPLIT, NULL, "wide.json"};
    int code = run(&p, &narrow);
    expect(code == 0, "tune: %s", p.text[1]);
    program_free(&p);
    need(matmul_choices_read(&c, "narrow.json", &error), "%s", error.text);
    for (size_t i = 0; i < c.count; i++) expect(parts_of(&c.choices[i]) == 1, "32 MiB are not kept to");
    matmul_choices_free(&c);
    code = run(&p, &wide);
    expect(code == 0, "tune: %s", p.text[1]);
    program_free(&p);
    need(matmul_choices_read(&c, "wide.json", &error), "%s", error.text);
    for (size_t i = 0; i < c.count; i++)
        expect(parts_of(&c.choices[i]) == FASTEST + 1 && c.choices[i].alignment == 128 &&
               c.choices[i].workspace > SPLIT, "%s: %u parts, alignment %llu",
               matmul_names[c.choices[i].shape.kind], parts_of(&c.choices[i]),
               (unsigned long long)c.choices[i].alignment);
    expect(matmul_choices_workspace("wide.json", &bytes, &error) && bytes > SPLIT, "%zu bytes", bytes);
    verdict("--workspace: algorithms that need more memory and aligned arrays are found, and stored with their needs");
    const char* with = trained(&trains, text_of("wide.json: %zu of %zu matmul", c.count, c.count), "a wide file");
    const char* again = trained(&trains, "are used\n", "again");
    expect(strcmp(with, again) == 0, "two runs with the file: %s%s", with, again);
    verdict("a model trains with them: the same file, the same bits; the library takes arrays that are aligned to less");
    matmul_choices_free(&c);
}

static void test_usage(void) {
    static const struct {
        const char *arguments, *words;
        int code;
    } cases[] = {
        {"--model gpt2:124M", "give --out", 2},
        {"--model gpt2:1 --out x.json", "there is no model", 2},
        {"--model gpt2:124M --recompute auto --out x.json", "--recompute auto is for ./train", 2},
        {"--layers 1 --heads 1 --channels 20 --vocab 4 --context 3 --batch 1 --ffn 12 --out x.json", "takes none", 1},
        {MODEL " --out nowhere/x.json", "cannot create nowhere/x.json", 1},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Program p;
        const Scene scene = {0, 0, 0, 0, cases[i].arguments, NULL};
        int code = run(&p, &scene);
        expect(code == cases[i].code && strstr(p.text[1], cases[i].words), "%s: exit code %d, '%s'", cases[i].arguments,
               code, p.text[1]);
        program_free(&p);
    }
    expect(!file_exists("x.json"), "a file is left");
    verdict("what cannot be tuned is refused in a sentence");
}

// ------------------------------------------------------------------------------------------------
// Training

static void test_training(void) {
    MatmulChoices c;
    Error error;
    const Scene plain = {0, 0, 0, 0, NULL, NULL}, best = {0, 0, 0, 0, NULL, "best.json"};
    const Scene right = {0, 0, 0, 0, NULL, "right.json"};
    const Scene refused = {0, 1u << FASTEST, 0, 0, NULL, "best.json"}, newer = {0, 0, 130001, 0, NULL, "best.json"};
    const Scene other = {0, 0, 0, 0, NULL, "other.json"};
    const char* without = trained(&plain, "", "no file");
    const char* with = trained(&best, "matmul algorithms are used\n", "a file");
    const char* again = trained(&best, "are used\n", "again");
    expect(strcmp(with, again) == 0, "two runs with the file: %s%s", with, again);
    expect(!same_weights(without, with), "the algorithms of the file are not used: %s%s", without, with);
    expect(!same_weights(with, trained(&right, "are used\n", "another file")), "two files make the same bits");
    verdict("the same file, the same bits; other algorithms, others");
    need(matmul_choices_read(&c, "best.json", &error), "%s", error.text);
    const char* none_used = text_of(": 0 of %zu matmul algorithms are used; ", c.count);
    expect(same_weights(without, trained(&refused, none_used, "refused")),
           "algorithms that do not run here change the bits");
    expect(same_weights(without, trained(&newer, "this machine has emulated CPU and 130001", "another library")),
           "another library's algorithms change the bits");
    snprintf(c.gpu, sizeof c.gpu, "another GPU");
    need(matmul_choices_write(&c, "other.json", &error), "%s", error.text);
    expect(same_weights(without, trained(&other, "other.json is for another GPU and", "another GPU")),
           "another GPU's algorithms change the bits");
    verdict("what is not of this GPU and library, or does not run, is reported and not used");
    matmul_choices_free(&c);
}

// ------------------------------------------------------------------------------------------------
// Files

static bool same_choices(const MatmulChoices* a, const MatmulChoices* b) {
    return strcmp(a->gpu, b->gpu) == 0 && a->version == b->version && a->count == b->count &&
           memcmp(a->choices, b->choices, a->count * sizeof *a->choices) == 0;
}

static bool reads(MatmulChoices* c, const char* text, size_t bytes, Error* error) {
    put_bytes("damaged.json", text, bytes);
    return matmul_choices_read(c, "damaged.json", error);
}

static void test_files(void) {
    MatmulChoices c, got;
    Error error;
    size_t bytes;
    need(matmul_choices_read(&c, "best.json", &error), "%s", error.text);
    char* text = text_read("best.json", &bytes);
    for (size_t cut = 0; cut + 1 < bytes; cut += 13)
        if (!expect(!reads(&got, text, cut, &error), "cut after %zu bytes: it is read", cut)) matmul_choices_free(&got);
    for (size_t at = 0; at < bytes; at += 5) {
        char right = text[at];
        text[at] = (char)(right ^ (at % 3 ? 1 : 32));
        if (reads(&got, text, bytes, &error)) {
            expect(same_choices(&c, &got), "a change of byte %zu of %zu is read", at, bytes);
            matmul_choices_free(&got);
        } else {
            expect(strstr(error.text, "damaged.json") != NULL, "byte %zu: %s", at, error.text);
        }
        text[at] = right;
    }
    verdict("a file that is cut, or changed in a byte, is refused");

    // With a correct checksum, as only a faulty program would write them.
    const MatmulShape shape = c.choices[0].shape;
    for (int i = 0; i < 3; i++) {
        uint64_t* const sizes[] = {&c.choices[0].shape.M, &c.choices[0].shape.N, &c.choices[0].shape.K};
        *sizes[i] = i == 1 ? (uint64_t)1 << 33 : 0;
        bool read = matmul_choices_write(&c, "impossible.json", &error) &&
                    matmul_choices_read(&got, "impossible.json", &error);
        expect_refusal(read, &error, "impossible.json is damaged; write it again with build/tune", "a size");
        c.choices[0].shape = shape;
    }
    expect_refusal(reads(&got, "{}", 2, &error), &error, "is not a file of matmul algorithms", "another file");
    expect_refusal(matmul_choices_read(&got, "none.json", &error), &error, "cannot open none.json", "no file");
    verdict("entries that cannot be, other files and missing ones are refused in a sentence");
    free(text);
    matmul_choices_free(&c);

    Program p;
    const Scene scene = {0, 0, 0, 0, NULL, "impossible.json"};
    int code = run(&p, &scene);
    check(code == 1 && strstr(p.text[1], "is damaged"), "a model is not made with a damaged file: exit code %d", code);
    program_free(&p);
}

int main(void) {
    tests_begin("test_tune");
    root_enter();
    test_tuning();
    test_workspace();
    test_usage();
    test_training();
    test_files();
    return tests_end();
}
