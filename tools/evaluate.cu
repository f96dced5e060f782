// evaluate.cu: evaluates a model: the loss of a text, or the answers to multiple-choice questions, as a line of JSON.
//
//   make build/evaluate && build/evaluate --out runs/x --text book.txt
//   build/evaluate --out runs/x --choices hellaswag.jsonl --scores hellaswag.scores --ranks 2
//
// Keys for a text: loss (nats per token), nats_per_byte (null if the tokenizer is not known), tokens. For questions:
// accuracy, accuracy_norm (log-likelihoods divided by the bytes of the ending), accuracy_stderr, questions,
// questions_cut (those whose beginning did not fit in --seq); with --answers also answers. Exit code: 0 done;
// 1 something failed; 2 a flag is wrong.

#include "evaluate_documents.h"
#include "open.h"
#include "../llmtrain/base/container.h"
#include "../llmtrain/run/run_tokenizer.h"

typedef struct {
    const char *out, *init_from, *adapter, *text, *data, *choices, *scores, *logps, *matmul_algorithms;
    bool answers;
    uint64_t seq, batch, overlap, ranks, threads;
    double timeout;
} Options;

enum { SEQUENCE = 2048, TEXT_BYTES_MAX = 2000000000 };

static Flags options_flags(Options* o) {
    const Flag table[] = {
        FLAG_TEXT("out", &o->out, NULL, "DIR", 0, "directory of a run, for its newest checkpoint"),
        FLAG_TEXT("init-from", &o->init_from, NULL, "DIR", 0,
                  "instead of --out: a checkpoint or run, a Hugging Face directory, or an llm.c file"),
        FLAG_TEXT("adapter", &o->adapter, NULL, "DIR", 0, ADAPTER_HELP),
        FLAG_TEXT("text", &o->text, NULL, "FILE", 0, "text file to compute the loss of"),
        FLAG_TEXT("data", &o->data, NULL, "GLOB", 0, "instead of --text: token shards"),
        FLAG_TEXT("choices", &o->choices, NULL, "FILE", 0,
                  "instead of --text: multiple-choice questions, one JSON object per line: ctx, endings, label "
                  "(HellaSwag), question, choices, answer (MMLU), or question, choices, answerKey (ARC)"),
        FLAG_SWITCH("answers", &o->answers, false, 0, "with --choices: print the number of each answer too"),
        FLAG_TEXT("scores", &o->scores, NULL, "FILE", 0,
                  "file that keeps the scores of finished items: the same command continues from it after an "
                  "interruption"),
        FLAG_TEXT("logps", &o->logps, NULL, "FILE", 0,
                  "with --data that has conversations: write their log-probabilities, which ./train reads as --reference"),
        FLAG_COUNT("seq", &o->seq, 0, 0, 1 << 24, 0,
                   "tokens per sequence; 0: the model's context, at most 2048"),
        FLAG_COUNT("val-overlap", &o->overlap, 0, 0, 1e7, 0,
                   "tokens shared by consecutive sequences of a text, given as context and not scored again"),
        FLAG_COUNT("batch", &o->batch, 4, 1, 65536, 0, "sequences of --seq tokens at a time"),
        FLAG_TEXT("matmul-algorithms", &o->matmul_algorithms, NULL, "FILE", 0, MATMUL_ALGORITHMS_HELP),
        FLAG_COUNT("ranks", &o->ranks, 1, 1, 65536, 0, "processes to start here"),
        FLAG_COUNT("threads", &o->threads, 0, 0, 4096, 0, THREADS_HELP),
        FLAG_REAL("timeout", &o->timeout, 600, 1, 1e6, 0,
                  "declare a rank lost after X seconds without data from it"),
    };
    return flags_of(table, sizeof table / sizeof table[0]);
}

static bool options_check(const Options* o, Error* error) {
    if (!o->out == !o->init_from) return fail_with(error, "give one of --out and --init-from, the model to evaluate");
    if (!o->text + !o->data + !o->choices != 2) return fail_with(error, "give one of --text, --data and --choices");
    if (o->choices && o->overlap) return fail_with(error, "--val-overlap is for --text and --data; leave it out");
    if (o->logps && !o->data) return fail_with(error, "--logps is for --data; leave it out");
    if (!o->choices && o->answers) return fail_with(error, "--answers is for --choices; leave it out");
    return true;
}

// The tokens of a file, after a begin-of-text token if the tokenizer's template puts one.
static bool text_read(Dataset* dataset, Tokens* tokens, const char* path, const Tokenizer* tokenizer, Error* error) {
    char* text;
    size_t bytes;
    if (!file_read(path, TEXT_BYTES_MAX, &text, &bytes, error)) return false;
    bool ok = (tokenizer->begin_of_text < 0 || tokens_append(tokens, &tokenizer->begin_of_text, 1, error)) &&
              tokenizer_encode(tokens, tokenizer, text, bytes, error) &&
              dataset_from_memory(dataset, tokens->ids, sizeof *tokens->ids, tokens->count, error);
    free(text);
    return ok;
}

// Ends the object, and prints and frees it.
static bool print_json(JsonWriter* w, Error* error) {
    json_write_end(w, '}');
    bool ok = json_write_done(w, error);
    if (ok) printf("%s\n", w->text);
    json_writer_free(w);
    return ok;
}

static bool print_text(const Dataset* dataset, const Source* source, const Score* scores, Error* error) {
    Score sum = scores_sum(scores, source->rows[source->items]);
    JsonWriter w = {0};
    json_write_begin(&w, '{');
    json_member_number(&w, "loss", sum.nats / sum.tokens);
    json_member_number(&w, "nats_per_byte", sum.bytes > 0 ? sum.nats / sum.bytes : NAN);
    json_member_u64(&w, "tokens", (uint64_t)sum.tokens);
    size_t rows = source->rows[source->items];
    if (dataset->spans) json_member_u64(&w, "documents", rows);
    if (dataset->spans) json_member_u64(&w, "documents_too_long", source->items - rows);
    return print_json(&w, error);
}

// Refuses shards if their tokenizer is not the model's.
static bool data_check(const Dataset* dataset, const Model* model, const Tokenizer* tokenizer, const Options* o,
                       Error* error) {
    FoundTokenizer of_data, of_model;
    if (!dataset_fits_model(dataset, model->config.vocab, tokenizer, o->init_from))
        return fail_with(error, "--data has a vocabulary of %d but the model has %zu; give shards of the model's "
                         "tokenizer", dataset->vocabulary, model->config.vocab);
    of_model.tokenizer = *tokenizer;
    snprintf(of_model.where, sizeof of_model.where, "%s", o->out ? o->out : o->init_from);
    if (!dataset_tokenizer_open(&of_data, dataset, error)) return false;
    bool ok = found_tokenizers_agree(&of_data, &of_model, error);
    tokenizer_close(&of_data.tokenizer);
    return ok;
}

static bool evaluate_text(Model* model, const Tokenizer* tokenizer, const Options* o, Error* error) {
    Dataset dataset = {0};
    Tokens tokens = {0};
    Source source = {0};
    Score* scores;
    Windows windows = {&dataset, tokenizer, (int32_t)model->config.vocab, model->options.T, o->overlap};
    bool ok = o->data ? dataset_open_unweighted(&dataset, o->data, error)
                      : text_read(&dataset, &tokens, o->text, tokenizer, error);
    if (ok && dataset.spans && o->overlap > 0)
        ok = fail_with(error, "--val-overlap is for texts: a conversation is evaluated as a whole; leave it out");
    if (ok && o->data) ok = data_check(&dataset, model, tokenizer, o, error);
    if (ok && o->logps && !dataset.spans)
        ok = fail_with(error, "--logps is for conversations, and --data has texts; make shards with tokenize --chat");
    Documents documents = {&dataset, tokenizer, (int32_t)model->config.vocab, model->options.T};
    ok = ok && (dataset.spans ? documents_open(&source, &documents, error) : windows_open(&source, &windows, error));
    bool scored = ok && evaluate(&scores, model, &source, o->scores, error);
    ok = scored;
    if (ok && o->logps && model->flat.options.rank == 0)
        ok = documents_write_logps(o->logps, &documents, &source, scores, model, error);
    ok = ok && print_text(&dataset, &source, scores, error);
    if (scored) free(scores);
    free(source.rows);
    dataset_close(&dataset);
    tokens_free(&tokens);
    return ok;
}

static bool print_choices(const Choices* choices, const Source* source, const Score* scores, bool answers,
                          Error* error) {
    double accuracy = choices_accuracy(choices, source, scores, false);
    JsonWriter w = {0};
    json_write_begin(&w, '{');
    json_member_number(&w, "accuracy", accuracy);
    json_member_number(&w, "accuracy_norm", choices_accuracy(choices, source, scores, true));
    json_member_number(&w, "accuracy_stderr", accuracy_error(accuracy, source->items));
    json_member_u64(&w, "questions", source->items);
    json_member_u64(&w, "questions_cut", choices->cut);
    if (answers) {
        json_member_begin(&w, "answers", '[');
        for (size_t i = 0; i < source->items; i++)
            json_write_u64(&w, scores_best(scores + source->rows[i], source->rows[i + 1] - source->rows[i], false));
        json_write_end(&w, ']');
    }
    return print_json(&w, error);
}

static bool evaluate_choices(Model* model, const Tokenizer* tokenizer, const Options* o, Error* error) {
    Choices choices;
    Source source;
    Score* scores;
    if (!choices_open(&choices, &source, o->choices, tokenizer, model->options.T, model->config.context, error))
        return false;
    bool scored = evaluate(&scores, model, &source, o->scores, error);
    bool ok = scored && print_choices(&choices, &source, scores, o->answers, error);
    if (scored) free(scores);
    choices_close(&choices, &source);
    return ok;
}

static bool evaluate_model(Comm* comm, const Options* o, Error* error) {
    Model model;
    Tokenizer tokenizer;
    const ModelOpening opening = {
        .out = o->out, .init_from = o->init_from, .adapter = o->adapter, .program = "evaluate",
        .options = {.B = o->batch, .T = o->seq ? o->seq : (uint64_t)SEQUENCE, .matmul_algorithms = o->matmul_algorithms,
                    .ranks = {.transport = &comm->transport, .rank = comm->rank, .world = comm->world,
                              .local_rank = comm->local_rank}}};
    if (!model_open_planned(&model, &tokenizer, &opening, error)) return false;
    bool ok = true;
    if (o->seq > model.config.context)
        ok = fail_with(error, "--seq %llu is longer than the model's context of %zu; make it smaller",
                       (unsigned long long)o->seq, model.config.context);
    if (ok && o->overlap >= model.options.T)
        ok = fail_with(error, "--val-overlap %llu leaves no new tokens in sequences of %zu; make it smaller",
                       (unsigned long long)o->overlap, model.options.T);
    if (ok && !o->data && tokenizer.vocabulary == 0)
        ok = fail_with(error, "the tokenizer of this model is not known; give --data, token shards");
    ok = ok && (o->choices ? evaluate_choices : evaluate_text)(&model, &tokenizer, o, error);
    tokenizer_close(&tokenizer);
    model_free(&model);
    return ok && output_written(error);
}

// Joins the other ranks, evaluates, and leaves them; returns the exit code.
static int evaluate_as_rank(const Options* o, bool forks) {
    Error error, of_others;
    Launch launch;
    Comm comm = {0};
    bool ok = (forks ? launch_fork(&launch, o->ranks, &error) : launch_find(&launch, &error)) &&
              (launch.rank == 0 || freopen("/dev/null", "w", stdout) || fail_file(&error, "open", "/dev/null")) &&
              comm_open(&comm, &launch, 1e3 * o->timeout, &error);
    if (ok) threads_choose(o->threads, comm.local_world, !forks && threads_are_bound(), comm.rank ? NULL : stderr);
    ok = ok && evaluate_model(&comm, o, &error);
    if (!ok) launch_report(&launch, "evaluate", error.text);
    if (!ok && comm.world > 1 && !error.on_all_ranks) comm_abort(&comm, error.text);
    if (comm.world > 0) comm_close(&comm);
    return launch_reap(&launch, "evaluate", ok ? 0 : 1, ok ? 1e3 * o->timeout : 2e3, &of_others);
}

int main(int argc, char** argv) {
    Options options = {0};
    Error error;
    int code;
    threads_spin_briefly(argv);
    files_open_standard();
    Flags flags = options_flags(&options);
    const char* title = "evaluate: computes a model's loss on a text, or its accuracy on multiple-choice questions";
    if (!flags_begin(&code, "evaluate", title, &flags, argc, argv)) return code;
    if (!options_check(&options, &error)) return fprintf(stderr, "evaluate: %s\n", error.text), 2;
    return evaluate_as_rank(&options, flag_was_given(&flags, "ranks"));
}
