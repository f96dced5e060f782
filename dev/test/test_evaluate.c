// test_evaluate.c: how evaluate.h and build/evaluate score a model.
//
//   build/test_evaluate --evaluate build/evaluate-FP32
//
// A model that gives every token a fixed probability, whatever comes before, so that scores can be computed by hand; a
// random model against model_validate and model_losses; truncated score logs; refusals; several ranks.

#include "llmtrain/checkpoint/record.h"
#include "tools/evaluate.h"
#include "llmtrain/run/presets.h"
#include "llmtrain/run/validate.h"

#include "data/shards.h"
#include "harness.h"

enum { B = 3, T = 24, V = 256 };

static const char* evaluate_program = "build/evaluate-FP32";
static char other_tokenizer[PATH_MAX];

// ------------------------------------------------------------------------------------------------
// Models

static void model_of(Model* model, const char* members, size_t batch, size_t sequence) {
    Error error;
    Config config;
    ModelOptions options;
    memset(&config, 0, sizeof config);
    memset(&options, 0, sizeof options);
    config.vocab = V;
    options.B = batch;
    options.T = sequence;
    need(config_set(&config, members, &error) && model_create(model, &config, options, &error), "%s", error.text);
}

static void random_model(Model* model, size_t batch, size_t sequence) {
    Error error;
    model_of(model, "family=llama layers=2 heads=4 kv_heads=2 channels=32 context=64", batch, sequence);
    need(model_randomize(model, 7, &error), "%s", error.text);
}

// The logit of a token: letters are less likely the later they come in the alphabet.
static float unigram_logit(int token) { return token >= 'a' && token <= 'z' ? (float)('z' - token) / 8 : -2; }

// -ln of the probability of a token.
static double unigram_nats(int token) {
    double sum = 0;
    for (int v = 0; v < V; v++) sum += exp((double)unigram_logit(v));
    return log(sum) - (double)unigram_logit(token);
}

// The final norm returns (1, 0, 0, ...) at every position, and the first column of the head holds the logits.
static void unigram_model(Model* model) {
    Error error;
    float values[16] = {1};
    model_of(model, "family=gpt2 layers=1 heads=2 channels=16 context=64 tied=off", B, T);
    need(flat_set_params(&model->flat, model->weights.final_norm.bias, 0, values, 16, &error), "%s", error.text);
    for (size_t v = 0; v < V; v++) {
        values[0] = unigram_logit((int)v);
        need(flat_set_params(&model->flat, model->weights.head.weight, v * 16, values, 16, &error), "%s", error.text);
    }
}

// ------------------------------------------------------------------------------------------------
// Text

// Opens a text as a dataset; the tokens are static.
static void dataset_of(Dataset* data, size_t count) {
    static uint16_t tokens[4096];
    Error error;
    for (size_t i = 0; i < count; i++) tokens[i] = (uint16_t)(random4(3, RANDOM_TEST, 0, i).bits[0] % V);
    need(dataset_from_memory(data, tokens, sizeof tokens[0], count, &error), "%s", error.text);
}

static Score* scores_of(Model* model, const Dataset* data, size_t overlap, const char* log, Source* source) {
    Error error;
    Score* scores = NULL;
    static Tokenizer tokenizer;
    static Windows windows;
    tokenizer = tokenizer_of_bytes();
    windows.dataset = data;
    windows.tokenizer = &tokenizer;
    windows.vocabulary = V;
    windows.T = T;
    windows.overlap = overlap;
    need(windows_open(source, &windows, &error) && evaluate(&scores, model, source, log, &error), "%s", error.text);
    return scores;
}

static void test_text(void) {
    static int32_t tokens[B * T], targets[B * T];
    static const size_t overlaps[] = {0, 1, 10, T - 1}, batches[] = {1, B, 7};
    Dataset data;
    Error error;
    dataset_of(&data, 1000);
    for (size_t o = 0; o < COUNT_OF(overlaps); o++) {
        Model model;
        Validation v = {.data = &data, .overlap = overlaps[o], .tokens = tokens, .targets = targets, .B = B, .T = T};
        random_model(&model, B, T);
        need(model_validate(&model, &v, &error), "%s", error.text);
        model_free(&model);
        for (size_t b = 0; b < COUNT_OF(batches); b++) {
            Source source;
            random_model(&model, batches[b], T);
            Score* scores = scores_of(&model, &data, overlaps[o], NULL, &source);
            Score sum = scores_sum(scores, source.items);
            size_t scored = T + (source.items - 1) * (T - overlaps[o]);
            expect(sum.tokens == (double)scored && sum.bytes == sum.tokens, "%g tokens, not %zu", sum.tokens, scored);
            // Both are sums of the same losses, in double, in different orders.
            expect(fabs(sum.nats / sum.tokens - v.loss) <= 1e-13 * v.loss, "%.17g, not %.17g", sum.nats / sum.tokens,
                   v.loss);
            free(scores);
            free(source.rows);
            model_free(&model);
        }
    }
    dataset_close(&data);
    verdict("the loss of a text is that of model_validate, for any overlap and batch");
}

// ------------------------------------------------------------------------------------------------
// Choices

static const char* const QUESTIONS =
    "\xEF\xBB\xBF{\"ctx\": \"the cat\", \"endings\": [\"zz\", \"ab\", \"b\"], \"answer\": \"C\"}\n \r\n\n"
    "{\"ctx\": \"a  \", \"endings\": [\"b\", \"bbbb\", \"b\"], \"label\": \"0\"}\r\n"
    "{\"question\": \"q\", \"choices\": {\"label\": [\"A\", \"B\"], \"text\": [\"zy\", \"aaa\"]}, "
    "\"answerKey\": \"B\"}\n"
    "{\"question\": \"q\", \"choices\": [\"ze\", \"a\"], \"answer\": 0}\n"
    "{\"ctx\": \"a context that is longer than the sequences of the model\", \"endings\": [\"xyz\", \"xy\"], "
    "\"label\": 1}\n"
    "\n  \n";

// The scored text of each row, derived by hand from the rules. The space before the ending is scored, and so are spaces
// at the end of the context.
static const char* const SCORED[] = {" zz",  " ab", " b",  "   b", "   bbbb", "   b",
                                     " zy", " aaa", " ze", " a",   " xyz",    " xy"};
static const size_t ROWS_OF[] = {3, 3, 2, 2, 2}, BEST[] = {2, 0, 1, 1, 1}, BEST_NORM[] = {1, 1, 1, 0, 0},
                    LABELS[] = {2, 0, 1, 0, 1};

static void test_choices(void) {
    Model model;
    Choices choices;
    Source source;
    Score* scores;
    Error error;
    Tokenizer tokenizer = tokenizer_of_bytes();
    const char* path = text_of("%s/questions.jsonl", root);
    put_text(path, QUESTIONS);
    unigram_model(&model);
    need(choices_open(&choices, &source, path, &tokenizer, T, 2 * T, &error), "%s", error.text);
    need(evaluate(&scores, &model, &source, NULL, &error), "%s", error.text);
    expect(source.items == COUNT_OF(ROWS_OF) && source.rows[source.items] == COUNT_OF(SCORED), "the rows");
    double worst = 0;
    for (size_t r = 0; r < COUNT_OF(SCORED); r++) {
        double nats = 0;
        for (const char* c = SCORED[r]; *c; c++) nats += unigram_nats(*c);
        expect(scores[r].tokens == (double)strlen(SCORED[r]), "row %zu has %g tokens", r, scores[r].tokens);
        worst = fmax(worst, fabs(scores[r].nats - nats) / nats);
    }
    size_t right = 0, right_norm = 0;
    for (size_t i = 0; i < source.items; i++) {
        const Score* of = scores + source.rows[i];
        expect(scores_best(of, ROWS_OF[i], false) == BEST[i], "item %zu: %zu", i, scores_best(of, ROWS_OF[i], false));
        expect(scores_best(of, ROWS_OF[i], true) == BEST_NORM[i], "item %zu by byte: %zu", i,
               scores_best(of, ROWS_OF[i], true));
        expect(choices.labels[i] == LABELS[i], "item %zu: its label is %zu", i, choices.labels[i]);
        right += BEST[i] == LABELS[i];
        right_norm += BEST_NORM[i] == LABELS[i];
    }
    expect(choices.cut == 1, "%zu questions were cut, not the last alone", choices.cut);
    expect(choices_accuracy(&choices, &source, scores, false) == (double)right / 5, "accuracy");
    expect(choices_accuracy(&choices, &source, scores, true) == (double)right_norm / 5, "accuracy by byte");
    verdict("questions of all forms: their rows, the best by sum and by byte");
    // A loss is a float: log-sum-exp of 256 logits minus one.
    check_bound(worst, 256 * 0x1p-24, "their log-likelihoods, against those computed by hand");
    check(fabs(accuracy_error(0.4, 5) - sqrt(0.24 / 4)) < 1e-15, "the standard error of an accuracy");
    free(scores);
    choices_close(&choices, &source);
    model_free(&model);
}

// How context and ending are split, and what precedes an empty context, as in lm-evaluation-harness.
static void test_contexts(void) {
    static const struct { const char* context; size_t tokens; } contexts[] = {
        {"a", 1}, {"a \t", 1}, {"a\xC2\xA0\xE3\x80\x80", 1}, {"a\xE2\x80\x83\x1F\n", 1}, {"a\xE2\x80\x8B", 4},
    };
    Tokenizer tokenizer = tokenizer_of_bytes();
    Choices choices;
    Error error;
    ChoiceRow row;
    memset(&choices, 0, sizeof choices);
    choices.tokenizer = &tokenizer;
    for (size_t i = 0; i < COUNT_OF(contexts); i++) {
        const char* context = contexts[i].context;
        expect(choices_context(&choices, context, strlen(context), &error) &&
               choices_join(&row, &choices, context, strlen(context), "b", 1, &error) &&
               row.first == contexts[i].tokens, "'%s': %zu", context, row.first);
    }
    verdict("the white space at the end of a context, of any kind, belongs to the ending");
    for (int32_t begin = -1; begin < 9; begin += 9) {
        tokenizer.begin_token = begin;
        tokenizer.end_of_text = begin < 0 ? 7 : -1;
        choices.tokens.count = 0;
        expect(choices_context(&choices, "", 0, &error) && choices_join(&row, &choices, "", 0, "b", 1, &error) &&
               row.first == 1 && choices.tokens.ids[0] == (begin < 0 ? 7 : begin), "begin token %d", begin);
    }
    verdict("an empty context is the begin-of-text token where there is one, otherwise the end-of-text token");
    json_writer_free(&choices.joined);
    tokens_free(&choices.context);
    tokens_free(&choices.tokens);
}

// A random model scores each row as model_losses does for that row alone.
static void test_rows(void) {
    Model model;
    Choices choices;
    Source source;
    Score* scores;
    Error error;
    Tokens tokens;
    Tokenizer tokenizer = tokenizer_of_bytes();
    const char* path = text_of("%s/questions.jsonl", root);
    memset(&tokens, 0, sizeof tokens);
    put_text(path, QUESTIONS);
    random_model(&model, B, T);
    need(choices_open(&choices, &source, path, &tokenizer, T, 2 * T, &error), "%s", error.text);
    need(evaluate(&scores, &model, &source, NULL, &error), "%s", error.text);
    for (size_t i = 0; i < source.items; i++) {
        for (size_t r = 0; r < ROWS_OF[i]; r++) {
            int32_t targets[T];
            size_t first, bytes;
            ExactSum losses;
            tokens.count = 0;
            need(source.append(&tokens, &first, &bytes, source.context, i, r, &error), "%s", error.text);
            for (size_t t = 0; t + 1 < tokens.count; t++) targets[t] = t + 1 < first ? -1 : tokens.ids[t + 1];
            fill_zero(&model.flat.sums->losses, sizeof losses, model.stream);
            model_losses(&model, tokens.ids, targets, 1, tokens.count - 1);
            device_download(&losses, &model.flat.sums->losses, sizeof losses, model.stream);
            double nats = scores[source.rows[i] + r].nats, sum = exact_value(losses);
            // With few rows, matmuls round differently.
            expect(fabs(nats - sum) <= 1e-5 * sum, "item %zu row %zu: %.9g, not %.9g", i, r, nats, sum);
        }
    }
    verdict("rows that are scored together have the scores that they have alone");
    tokens_free(&tokens);
    free(scores);
    choices_close(&choices, &source);
    model_free(&model);
}

// ------------------------------------------------------------------------------------------------
// Score logs

static bool same_scores(const Score* a, const Score* b, size_t rows) {
    for (size_t i = 0; i < rows; i++)
        if (a[i].nats != b[i].nats || a[i].tokens != b[i].tokens || a[i].bytes != b[i].bytes) return false;
    return true;
}

static void test_log(void) {
    Model model;
    Dataset data;
    Source source;
    Error error;
    size_t bytes;
    const char *path = text_of("%s/scores", root), *cut = text_of("%s/cut", root);
    dataset_of(&data, 300);
    random_model(&model, B, T);
    Score* scores = scores_of(&model, &data, 0, path, &source);
    size_t rows = source.rows[source.items];
    free(source.rows);
    char* text = text_read(path, &bytes);
    expect(count_in(text, "\n") == rows + 1, "%zu lines for %zu items", count_in(text, "\n"), rows);
    // Everywhere in the first line, which has 45 bytes, and at some places of the others.
    for (size_t length = 0, step; length <= bytes; length += step) {
        step = length < 46 || length == bytes ? 1 : min_size(37, bytes - length);
        put_bytes(cut, text, length);
        Score* again = scores_of(&model, &data, 0, cut, &source);
        expect(same_scores(scores, again, rows), "cut to %zu bytes: other scores", length);
        free(again);
        free(source.rows);
        again = scores_of(&model, &data, 0, cut, &source);
        expect(same_scores(scores, again, rows), "cut to %zu bytes, the second time: other scores", length);
        free(again);
        size_t lines = 0, complete;
        char* log = text_read(cut, &complete);
        for (size_t item = 0; item < source.items; item++) {
            char begins[64];
            snprintf(begins, sizeof begins, "\nitem %zu ", item);
            lines += count_in(log, begins);
        }
        expect(lines >= source.items && lines <= source.items + 1, "cut to %zu bytes: %zu lines of %zu items", length,
               lines, source.items);
        free(log);
        free(source.rows);
    }
    verdict("a score log that was cut anywhere continues with the same scores");

    // Existing scores are not computed again: appends another score of item 0, with its checksum.
    ScoreLog log = {open(path, O_WRONLY | O_APPEND), path, {0}};
    Score other = {1.5, T, T};
    expect(score_log_add(&log, 0, &other, 1, &error), "%s", error.text);
    score_log_close(&log);
    Score* again = scores_of(&model, &data, 0, path, &source);
    expect(again[0].nats == 1.5 && same_scores(scores + 1, again + 1, rows - 1), "item 0 has %g", again[0].nats);
    free(again);
    text[60] ^= 1;  // in a line of the first items
    put_bytes(path, text, bytes);
    free(source.rows);
    again = scores_of(&model, &data, 0, path, &source);
    expect(same_scores(scores, again, rows), "a wrong bit changes a score");
    free(again);
    verdict("items of the log are not scored again; one with a wrong bit is");

    Model other_model;
    random_model(&other_model, B, T);
    float half = 0.5f;
    need(flat_set_params(&other_model.flat, other_model.weights.token_embedding, 0, &half, 1, &error), "%s",
         error.text);
    bool ok = evaluate(&again, &other_model, &source, path, &error);
    expect_refusal(ok, &error, "another evaluation", "other weights");
    source.hash++;
    expect_refusal(evaluate(&again, &model, &source, path, &error), &error, "another evaluation", "another text");
    static const char* const others[] = {"some text of mine\n", "evaluation of mine", "evaluation\n"};
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        put_text(cut, others[i]);
        expect_refusal(evaluate(&again, &model, &source, cut, &error), &error, "not a file of scores", others[i]);
        size_t kept;
        char* still = text_read(cut, &kept);
        expect(strcmp(still, others[i]) == 0, "%s became %s", others[i], still);
        free(still);
    }
    expect_refusal(evaluate(&again, &model, &source, root, &error), &error, "open", "a directory");
    verdict("a log of another evaluation, and what is no log, is refused");
    model_free(&other_model);
    free(source.rows);
    free(scores);
    free(text);
    dataset_close(&data);
    model_free(&model);
}

// ------------------------------------------------------------------------------------------------
// Bad questions

#define NO_ENDING "neither the number of an ending"

static void test_bad_questions(void) {
    static const struct {
        const char *line, *says;
    } cases[] = {
        {"", "has no questions"},
        {"\n\n", "has no questions"},
        {"{\"ctx\": \"a\"", "is not valid JSON"},
        {"[1, 2]", "there is no string \"ctx\""},
        {"{\"ctx\": 1, \"endings\": [\"a\", \"b\"], \"label\": 0}", "there is no string \"ctx\""},
        {"{\"ctx\": \"a\", \"endings\": \"ab\", \"label\": 0}", "there is no array \"endings\""},
        {"{\"ctx\": \"a\", \"endings\": [\"a\"], \"label\": 0}", "2 to 1024 endings"},
        {"{\"ctx\": \"a\", \"endings\": [\"a\", 2], \"label\": 0}", "an ending is empty, or not a string"},
        {"{\"ctx\": \"a\", \"endings\": [\"a\", \"\"], \"label\": 0}", "an ending is empty, or not a string"},
        {"{\"ctx\": \"a\", \"endings\": [\"a\", \"b\"]}", "there is no \"label\""},
        {"{\"ctx\": \"a\", \"endings\": [\"a\", \"b\"], \"label\": 2}", "not the number of an ending"},
        {"{\"question\": \"a\", \"choices\": [\"a\", \"b\"], \"answer\": \"C\"}", NO_ENDING},
        {"{\"question\": \"a\", \"choices\": {\"text\": [\"a\", \"b\"], \"label\": [\"A\", \"B\", \"C\"]}, "
         "\"answerKey\": \"C\"}", "not as many labels as endings"},
        {"{\"question\": \"a\", \"choices\": {\"text\": [\"x\", \"y\"], \"label\": [\"A\"]}, \"answerKey\": \"A\"}",
         "not as many labels as endings"},
        {"{\"question\": \"a\", \"choices\": {\"text\": [\"x\", \"y\"], \"label\": [\"A\", \"A\"]}, \"answerKey\": \"A\"}",
         "two endings have the label of its answer"},
        {"{\"ctx\": \"a\", \"endings\": [\"a\", \"b\"], \"label\": -1}", NO_ENDING},
        {"{\"ctx\": \"a\", \"endings\": [\"a\", \"b\"], \"label\": \"\"}", NO_ENDING},
        {"{\"ctx\": \"a\", \"endings\": [\"a\", \"b\"], \"label\": \"1x\"}", NO_ENDING},
        {"{\"ctx\": \"a\", \"endings\": [\"a\", \"b\"], \"label\": \"99999999999999999999\"}", NO_ENDING},
        {"{\"question\": \"a\", \"choices\": {\"text\": [\"a\", \"b\"], \"label\": [\"A\", \"B\"]}, "
         "\"answerKey\": \"C\"}", "none of the labels"},
        {"{\"ctx\": \"a\", \"endings\": [\"a\", \"b\"], \"label\": 0}\n\n{\"ctx\": 1}", "line 3"},
        {"{\"ctx\": \"\", \"endings\": [\"a\", \"b\"], \"label\": 0}", "line 1: a question without context"},
        {"{\"ctx\": \"a\", \"endings\": [\"b\", \"an ending longer than a sequence\"], \"label\": 0}",
         "line 1: an ending has more than 24 tokens; make --seq larger"},
    };
    Tokenizer tokenizer = tokenizer_of_bytes();
    Choices choices;
    Source source;
    Error error;
    const char* path = text_of("%s/bad.jsonl", root);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        put_text(path, cases[i].line);
        bool ok = choices_open(&choices, &source, path, &tokenizer, T, 2 * T, &error);
        expect_refusal(ok, &error, cases[i].says, cases[i].line);
    }
    verdict("questions that are none are refused, with the number of the line");
}

// A row of one token.
static bool append_one(Tokens* out, size_t* first, size_t* bytes, void* context, size_t item, size_t row,
                       Error* error) {
    (void)context, (void)item, (void)row;
    if (!tokens_reserve(out, 1, error)) return false;
    out->ids[out->count++] = 1;
    *first = *bytes = 1;
    return true;
}

static void test_bad_rows(void) {
    Model model;
    Source source;
    Dataset data;
    Error error;
    Score* scores;
    float nan = NAN;
    random_model(&model, B, T);
    need(source_allocate(&source, 2 * B * T, &error), "%s", error.text);
    for (size_t i = 0; i <= source.items; i++) source.rows[i] = i;
    source.append = append_one;
    expect_refusal(evaluate(&scores, &model, &source, NULL, &error), &error, "no token to score", "rows of one token");
    free(source.rows);
    dataset_of(&data, 100);
    scores = scores_of(&model, &data, 0, NULL, &source);
    free(scores);
    need(flat_set_params(&model.flat, model.weights.final_norm.weight, 0, &nan, 1, &error), "%s", error.text);
    expect_refusal(evaluate(&scores, &model, &source, NULL, &error), &error, "not a number", "a weight that is NaN");
    verdict("rows without a token to score, and losses that are no numbers, are refused");
    free(source.rows);
    dataset_close(&data);
    model_free(&model);
}

// ------------------------------------------------------------------------------------------------
// The program

static void shard_of(const char* path, int32_t vocabulary) {
    ShardWriter writer;
    Error error;
    int32_t tokens[100];
    for (int32_t i = 0; i < 100; i++) tokens[i] = i;
    need(shard_writer_open(&writer, path, vocabulary, 0, &error) && shard_writer_add(&writer, tokens, 100, &error) &&
         shard_writer_finish(&writer, &error) && shard_publish(path, &error), "%s", error.text);
}

// Its standard output, static; NULL if it does not exit with `code`.
static const char* program_says(int code, const char* arguments) {
    static char text[4096];
    Program p;
    Words* words = (Words*)memory_allocate(sizeof *words);
    need(words != NULL, "memory");
    words_add(words, evaluate_program);
    words_add(words, arguments);
    program_start(&p, words->words, NULL, NULL);
    programs_wait(&p, 1, PROGRAM_MS);
    bool good = !p.late && program_code(&p) == code;
    if (!good) program_print(&p, arguments);
    snprintf(text, sizeof text, "%s", p.text[code ? 1 : 0]);
    program_free(&p);
    free(words);
    return good ? text : NULL;
}

static void test_program(void) {
    Model model;
    Error error;
    RunRecord record;
    Dataset data;
    Source source;
    char expected[128], first[4096];
    random_model(&model, B, T);
    memset(&record, 0, sizeof record);
    record.config = model.config;
    record.T = T;
    record.state = run_state_begin(false, 1.0);
    record.state.step = 5;
    need(model_save(&model, &record, text_of("%s/run", root), &error), "%s", error.text);
    dataset_of(&data, 500);
    char text[500];
    for (size_t i = 0; i < 500; i++) text[i] = (char)shard_token(data.shards, i);
    put_bytes("text", text, 500);
    put_text("questions.jsonl", QUESTIONS);
    Score* scores = scores_of(&model, &data, 0, NULL, &source);
    Score sum = scores_sum(scores, source.items);
    snprintf(expected, sizeof expected, "{\"loss\": %.17g", sum.nats / sum.tokens);
    const char* said = program_says(0, "--out run --text text --seq 24");
    double loss = 0;
    expect(said && sscanf(said, "{\"loss\": %lf", &loss) == 1 && loss == sum.nats / sum.tokens, "%s, not %s",
           said ? said : "nothing", expected);
    expect(said && strstr(said, "\"tokens\": 480}") != NULL, "%s", said ? said : "nothing");
    snprintf(first, sizeof first, "%s", said ? said : "");
    static const char* const same[] = {
        "--out run --text text --seq 24 --ranks 3", "--init-from run/step_00000005 --text text --seq 24 --batch 9",
        "--out run --text text --seq 24 --ranks 2 --scores log", "--out run --text text --seq 24 --scores log"};
    for (size_t i = 0; i < COUNT_OF(same); i++) {
        said = program_says(0, same[i]);
        expect(said && strcmp(said, first) == 0, "%s: %s, not %s", same[i], said ? said : "nothing", first);
    }
    verdict("build/evaluate --text prints the same, for any ranks and batches, and from its score log");

    said = program_says(0, "--out run --choices questions.jsonl --answers");
    snprintf(first, sizeof first, "%s", said ? said : "");
    static const char* const keys[] = {"accuracy", "accuracy_norm", "accuracy_stderr", "questions", "questions_cut",
                                       "answers"};
    for (size_t i = 0; i < COUNT_OF(keys); i++) expect(count_in(first, text_of("\"%s\": ", keys[i])) == 1, "%s", first);
    said = program_says(0, "--out run --choices questions.jsonl --answers --ranks 3 --scores choices.log");
    expect(said && strcmp(said, first) == 0, "%s, not %s", said ? said : "nothing", first);
    Model known;
    unigram_model(&known);
    record.config = known.config;
    need(model_save(&known, &record, text_of("%s/known", root), &error), "%s", error.text);
    said = program_says(0, "--out known --choices questions.jsonl --answers");
    double right = 0, by_byte = 0, spread = 0;
    expect(said && sscanf(said, "{\"accuracy\": %lf,\"accuracy_norm\": %lf,\"accuracy_stderr\": %lf", &right, &by_byte,
                          &spread) == 3 && right == 0.8 && by_byte == 0.4 && fabs(spread - 0.2) < 1e-15 &&
           strstr(said, "\"questions\": 5,\"questions_cut\": 0,\"answers\": [2,0,1,1,1]}"), "%s",
           said ? said : "nothing");
    said = program_says(0, "--out known --choices questions.jsonl --seq 24");
    expect(said && strstr(said, "\"questions\": 5,\"questions_cut\": 1}"), "%s", said ? said : "nothing");
    model_free(&known);
    verdict("build/evaluate --choices: its keys, known answers, the questions that were cut; the same with ranks");

    shard_of("bytes_train_000000.bin", V);
    shard_of("fewer_train_000000.bin", V - 1);
    shard_of("other_train_000000.bin", V);
    need(mkdir("other_tokenizer", 0777) == 0, "other_tokenizer");
    copy_tree(other_tokenizer, "other_tokenizer/tokenizer.json");
    expect(program_says(0, "--out run --data bytes_train_*.bin --seq 24") != NULL, "shards of bytes");
    expect(program_says(0, "--init-from run/step_00000005 --data fewer_train_*.bin --seq 24") != NULL, "padded");
    verdict("build/evaluate --data: shards of the model's vocabulary, which may be padded");

    // A model whose tokenizer is not known, and one that lacks the last added tokens of its tokenizer.
    for (int added = 0; added < 2; added++) {
        model_of(&known, added ? "family=gpt2 layers=1 heads=2 channels=16 context=64 vocab=421"
                               : "family=gpt2 layers=1 heads=2 channels=16 context=64 vocab=100", B, T);
        record.config = known.config;
        const char* run = text_of("%s/%s", root, added ? "added" : "unknown");
        need(model_save(&known, &record, run, &error), "%s", error.text);
        model_free(&known);
    }
    need(mkdir("added/tokenizer", 0777) == 0, "added/tokenizer");
    copy_tree(other_tokenizer, "added/tokenizer/tokenizer.json");
    put_text("added.jsonl", "{\"ctx\": \"a <|im_start|> b\", \"endings\": [\"x\", \"y\"], \"label\": 0}\n");

    put_text("long.jsonl", "{\"ctx\": \"a\", \"endings\": [\"x\", \"an ending of more than sixty-four bytes, one token "
             "each with a tokenizer of bytes\"], \"label\": 0}\n");

    static const struct {
        int code;
        const char *arguments, *says;
    } wrong[] = {
        {2, "--text text", "give one of --out and --init-from"},
        {2, "--out run", "give one of --text, --data and --choices"},
        {2, "--out run --text text --data x", "give one of --text, --data and --choices"},
        {2, "--out run --text text --answers", "--answers is for --choices"},
        {2, "--out run --choices questions.jsonl --val-overlap 2", "--val-overlap is for"},
        {2, "--out run --textt text", "did you mean --text?"},
        {1, "--out none --text text", "holds no checkpoint"},
        {1, "--out run --text none", "cannot open none"},
        {1, "--out run --text none --ranks 2", "cannot open none"},
        {1, "--out run --data none", "no file matches"},
        {1, "--out run --data fewer_train_*.bin --seq 24", "a vocabulary of 255 but the model has 256"},
        {1, "--out run --data other_train_*.bin --seq 24", "is the tokenizer"},
        {1, "--out run --text text --seq 65", "longer than the model's context of 64"},
        {1, "--out run --text text --seq 24 --val-overlap 24", "leaves no new tokens"},
        {1, "--out run --text questions.jsonl --seq 24 --scores log", "another evaluation"},
        {1, "--out unknown --text text --seq 24", "the tokenizer of this model is not known; give --data"},
        {1, "--init-from unknown/step_00000005 --choices questions.jsonl", "the tokenizer of this model is not known"},
        {1, "--out added --choices added.jsonl", "token 421 is outside the model's vocabulary of 421; give the token"},
        {1, "--out run --choices long.jsonl", "an ending has more than 64 tokens; the model's context is no longer"},
        {1, "--out run --choices long.jsonl --seq 24", "an ending has more than 24 tokens; make --seq larger"},
        {1, "--out run --choices text", "is not valid JSON"},
    };
    for (size_t i = 0; i < COUNT_OF(wrong); i++) {
        said = program_says(wrong[i].code, wrong[i].arguments);
        bool good = said && strstr(said, wrong[i].says) && strncmp(said, "evaluate: ", 10) == 0;
        expect(good, "%s: %s", wrong[i].arguments, said ? said : "nothing");
        expect(said && count_in(said, "\n") == 1, "%s: more than a line", wrong[i].arguments);
    }
    verdict("build/evaluate refuses what is wrong with one sentence");
    free(scores);
    free(source.rows);
    dataset_close(&data);
    model_free(&model);
}

int main(int argc, char** argv) {
    static char path[PATH_MAX];
    const Flag rows[] = {FLAG_TEXT("evaluate", &evaluate_program, evaluate_program, "PATH", 0, "the program")};
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_evaluate", NULL, &flags, argc, argv)) return code;
    tests_begin("test_evaluate");
    need(realpath(evaluate_program, path) != NULL, "%s", evaluate_program);
    need(realpath("dev/test/fixtures/tokenizers/gpt2.json", other_tokenizer) != NULL, "run it in the checkout");
    evaluate_program = path;
    environment_clear();
    root_enter();
    test_text();
    test_choices();
    test_contexts();
    test_rows();
    test_log();
    test_bad_questions();
    test_bad_rows();
    test_program();
    return tests_end();
}
