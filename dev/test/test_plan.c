// test_plan.c: what tools/predict.h and build/plan predict. dev/bench/plan.sh compares it with runs.
//
//   build/test_plan --plan build/plan-BF16 --train build/train-BF16
//
// The predicted time of large models; that build/plan prints what ./train --plan prints; that a row of what fits, given
// as flags, takes what the row says; what it prints if nothing fits; refusals.

#define PRECISION_BF16

#include "tools/predict.h"
#include "llmtrain/run/presets.h"

#include "harness.h"

static const char *plan_program = "build/plan-BF16", *train_program = "build/train-BF16";

// ------------------------------------------------------------------------------------------------
// Predictions

static Rates rates_of(const char* text) {
    Rates rates;
    Error error;
    need(rates_parse(&rates, text, &error), "%s", error.text);
    return rates;
}

static void llama_plan(Model* model, ModelOptions options) {
    Config config;
    Error error;
    need(config_preset(&config, "llama:8B", &error) && model_plan(model, &config, options, &error), "%s", error.text);
}

// Llama 8B, 8,192 tokens in 16 bits: the blocks' activations shrink from 36.5 GB to less than 4, at less than 35% more
// time by the costs of the operations, at the rates of a CPU and of a GPU.
static void test_recompute(void) {
    const Rates rates[] = {rates_of("300,25"), rates_of("500000,2500")};
    Model model;
    ModelOptions options = {.B = 1, .T = 8192, .training = true, .recompute = RECOMPUTE_BLOCK,
                            .optimizer = optimizer_defaults(OPTIMIZER_ADAMW)};
    double activations = 0;
    llama_plan(&model, options);
    for (size_t i = 0; i < model.memory.count; i++)
        if (strcmp(model.memory.lines[i].name, "activations of the blocks") == 0)
            activations = (double)model.memory.lines[i].bytes;
    check_bound(1e-9 * activations, 4, "llama:8B, 8192 tokens, --recompute block: GB of activations");
    for (int i = 0; i < 2; i++) {
        double added = model_recompute_ms(&model, &rates[i]);
        check_bound(added / (step_ms(&model, &rates[i], 1) - added), 0.35, "and share of time added, rates %d", i);
    }
    double all = step_ms(&model, &rates[0], 1);
    model_free(&model);
    options.train = "block.31.*";
    llama_plan(&model, options);
    check_bound(step_ms(&model, &rates[0], 1) / all, 0.4, "llama:8B, training its last block alone: share of the time");
    model_free(&model);
}

static void test_offload(void) {
    Rates rates = rates_of("300,25");
    Model model;
    ModelOptions options = {.B = 1, .T = 8192, .training = true, .recompute = RECOMPUTE_BLOCK,
                            .optimizer = optimizer_defaults(OPTIMIZER_ADAMW), .train = "block.2[0-9].*,block.3[01].*",
                            .offload = OFFLOAD_ACTIVATIONS};
    llama_plan(&model, options);
    size_t piece = offload_bytes(&model.offloaded.store, 20);
    rates.offload = offload_rate_hidden(&model, &rates);
    double hidden = offload_wait_ms(&model, &rates);
    rates.offload *= 0.9;
    check(hidden == 0 && offload_wait_ms(&model, &rates) > 0,
          "--offload activations: at the rate that the plan prints nothing waits, below it something does");
    check(offload_total(&model.offloaded.store) < 10 * piece && offload_blocks_bytes(&model.offloaded) == 9 * piece,
          "--offload activations --train: blocks without a backward take no room");
    model_free(&model);
}

// ------------------------------------------------------------------------------------------------
// The program

#define SMALL "--layers 2 --heads 4 --channels 40 --ffn 72 --vocab 256 --seq 16 --batch 3 "

// What it prints, static: its standard output, or its errors if `code` is not 0; empty if it exits with another code.
static const char* program_says(const char* program, int code, const char* arguments) {
    static char text[16384];
    Program p;
    Words words = {.count = 0};
    words_add(&words, program);
    words_add(&words, arguments);
    program_start(&p, words.words, NULL, NULL);
    programs_wait(&p, 1, PROGRAM_MS);
    bool good = !p.late && program_code(&p) == code;
    if (!good) program_print(&p, arguments);
    snprintf(text, sizeof text, "%s", good ? p.text[code ? 1 : 0] : "");
    program_free(&p);
    return text;
}

// The GB and ms that it predicts for a step with these flags; NAN: none.
static void predicted(double* gb, double* ms, const char* arguments) {
    const char* line = strstr(program_says(plan_program, 0, arguments), "a step with these flags: ");
    *gb = *ms = NAN;
    if (line) sscanf(line, "a step with these flags: %lf GB, %lf ms", gb, ms);
}

// The first lines are those of ./train --plan, but for the size of the program itself.
static void test_same(void) {
    static const char* const flags[] = {
        SMALL "--out none --ckpt-every 1 ", SMALL "--ranks 3 --zero 2 --total-batch 288 --recompute norms ",
        "--model gpt2:124M --batch 4 --seq 256 --recompute auto --memory 2 --offload activations --offload-dir . "};
    for (size_t i = 0; i < COUNT_OF(flags); i++) {
        static char of_train[16384];
        size_t lines = 0;
        snprintf(of_train, sizeof of_train, "%s", program_says(train_program, 0, text_of("%s --plan", flags[i])));
        const char* said = program_says(plan_program, 0, text_of("%s --rate 300,25", flags[i]));
        for (char *rest = of_train, *line; (line = strsep(&rest, "\n")) != NULL && *line; lines++) {
            size_t length = strcspn(said, "\n");
            bool varies = strstr(line, "outside: the program") || strstr(line, "GB in all");
            expect(varies || (strlen(line) == length && strncmp(line, said, length) == 0), "%s: '%s' is '%.*s'",
                   flags[i], line, (int)length, said);
            said += length + (said[length] != 0);
        }
        expect(lines > 10, "%s: %zu lines", flags[i], lines);
    }
    verdict("build/plan begins with what ./train --plan prints");
}

// Of the rows that fit, each has at most --memory, and later ones are slower; the first, given as flags with the sizes,
// takes what it says.
static void test_choices(void) {
    static const struct { double gb; const char *sizes, *batches, *first; } cases[] = {
        {1, "--layers 2 --heads 4 --channels 40 --ffn 72 --vocab 256 --seq 16 --ranks 2", "--batch 6", "--zero"},
        {0.45, "--model llama:15M --seq 256", "--batch 8", "--optimizer adamw"},
        {12, "--model llama:1B --seq 2048", "--batch 1", "--optimizer adamw-8bit --masters off"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        double gb, ms, of_first[2] = {NAN, NAN}, before = 0;
        char row[512], first[512] = "";
        size_t rows = 0;
        const char* flags = text_of("%s %s --memory %g --rate 300,25", cases[i].sizes, cases[i].batches, cases[i].gb);
        const char* said = program_says(plan_program, 0, flags);
        const char* list = strstr(said, text_of("within %g GB\n", cases[i].gb));
        expect(list != NULL, "%s: %s", flags, said);
        for (; list && (list = strchr(list, '\n')) != NULL; list++) {
            if (sscanf(list, " %lf %lf %*f %511[^\n]", &gb, &ms, row) < 3) continue;
            expect(gb <= cases[i].gb + 5e-4 && ms >= before, "%g GB, %g ms after %g: %s", gb, ms, before, row);
            before = ms;
            if (rows++ > 0) continue;
            of_first[0] = gb, of_first[1] = ms;
            snprintf(first, sizeof first, "%s", row);
        }
        expect(rows > 1 && strstr(first, cases[i].first), "%s: %zu rows, the first %s", flags, rows, first);
        predicted(&gb, &ms, text_of("%s %s --rate 300,25", cases[i].sizes, first));
        expect(fabs(gb - of_first[0]) < 2e-3 && fabs(ms / of_first[1] - 1) < 0.02,
               "%s: the row says %g GB, %g ms, its flags take %g GB, %g ms", first, of_first[0], of_first[1], gb, ms);
    }
    verdict("build/plan --memory: what fits, fastest first; the flags of a row take what it says");
}

static void test_program(void) {
    double gb, slow, fast;
    predicted(&gb, &slow, SMALL "--ranks 2 --total-batch 192 --rate 1,0.1,0.1,0.1");
    predicted(&gb, &fast, SMALL "--ranks 2 --total-batch 192 --rate 10,1,1,1");
    check_bound(fabs(slow / fast / 10 - 1), 0.05, "a step at ten times the rates takes a tenth of the time");
    predicted(&gb, &fast, SMALL);
    check(gb > 0 && fast > 0, "without --rate: measured here, %.3f ms", fast);
    static const struct { int code; const char *arguments, *says; } cases[] = {
        {0, SMALL "--ranks 2 --memory 1 --rate 300,25", "--zero 0 --reduce exact is the lowest stage that fits in"},
        {0, SMALL "--ranks 2 --memory 1 --rate 100,10", "--zero 1 --optimizer adamw"},
        {0, SMALL "--memory 0.001 --rate 300,25", "nothing fits in 0.001 GB; the nearest needs 0."},
        {0, SMALL "--memory 0.001 --rate 300,25", "--batch 1 --optimizer adamw"},
        {0, SMALL "--memory 0.001 --rate 300,25", "--recompute auto --memory 0."},
        {0, SMALL "--recompute norms --rate 300,25", "recomputation: +"},
        {0, SMALL "--offload optimizer --offload-dir . --rate 300,25,1,2", "waiting for the offloaded optimizer state"},
        {0, "--help", "--rate F,M"},
        {0, "--help", "--total-batch N"},
        {1, SMALL "--data none", "plan: no file matches 'none'"},
        {2, SMALL "--rate 300", "plan: --rate is '300'; give"},
        {2, SMALL "--rate 300,0", "--rate is '300,0'; give"},
        {2, SMALL "--rate 300,25,1,2,", "--rate is '300,25,1,2,'; give"},
        {2, SMALL "--rate 300,25,", "as in 300,25 or 300,25,1,2"},
        {2, SMALL "--rate nan,25", "--rate is 'nan,25'; give"},
        {2, SMALL "--rates 300,25", "did you mean --rate?"},
        {2, SMALL "--recompute auto", "plan: --recompute auto needs --memory"},
        {2, SMALL "--total-batch 33", "--total-batch 33 is not a multiple"},
        {2, "--seq 16", "plan: "},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const char* said = program_says(plan_program, cases[i].code, cases[i].arguments);
        expect(strstr(said, cases[i].says) != NULL, "%s: no '%s' in: %s", cases[i].arguments, cases[i].says, said);
        expect(cases[i].code == 0 || (strchr(said, '\n') && strchr(said, '\n')[1] == 0), "%s: not one line: %s",
               cases[i].arguments, said);
    }
    verdict("build/plan: stages, what is nearest if nothing fits, recomputation, offloading; refusals in one sentence");
}

int main(int argc, char** argv) {
    static char paths[2][PATH_MAX];
    const Flag rows[] = {FLAG_TEXT("plan", &plan_program, plan_program, "PATH", 0, "the program, for BF16"),
                         FLAG_TEXT("train", &train_program, train_program, "PATH", 0, "the trainer, for BF16")};
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_plan", NULL, &flags, argc, argv)) return code;
    tests_begin("test_plan");
    need(realpath(plan_program, paths[0]) != NULL, "%s", plan_program);
    need(realpath(train_program, paths[1]) != NULL, "%s", train_program);
    plan_program = paths[0];
    train_program = paths[1];
    environment_clear();
    root_enter();
    test_recompute();
    test_offload();
    test_same();
    test_choices();
    test_program();
    return tests_end();
}
