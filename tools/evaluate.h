// evaluate.h: evaluates a model: the loss of a text, and the answers to multiple-choice questions.
//
//   1. sources     items to evaluate, each of one or more rows of tokens
//   2. text        windows of a dataset; an item is a window
//   3. choices     questions in JSON lines; an item is a question, a row one of its answers
//   4. score log   a file of finished items, from which a killed evaluation resumes
//   5. scoring     rows in batches, divided among ranks
//   6. results     sums, answers, accuracy
//
//   Source source;
//   Score* scores;
//   bool ok = choices_open(&choices, &source, "hellaswag.jsonl", &tokenizer, T, context, &error) &&
//             evaluate(&scores, &model, &source, NULL, &error);
//   if (ok) printf("%g\n", choices_accuracy(&choices, &source, scores, false)), free(scores);
//   choices_close(&choices, &source);
//
// Where a row's logits do not depend on the batch around it, as on a CPU, batches, ranks and interruptions change no
// bit of a result. The questions must fit in memory; the scores take 24 bytes per row.

#ifndef LLMTRAIN_EVALUATE_H
#define LLMTRAIN_EVALUATE_H

#include "../llmtrain.h"
#include "../llmtrain/base/progress.h"
#include "../llmtrain/checkpoint/checkpoint.h"
#include "../llmtrain/ranks/comm.h"
#include "../llmtrain/text/data.h"
#include "../llmtrain/text/tokenizer.h"

// ------------------------------------------------------------------------------------------------
// 1. Sources

typedef struct {
    size_t items;
    size_t* rows;   // (items + 1), owned: the number of the first row of each; last, the number of rows
    uint64_t hash;  // of everything that determines the scores, except the model
    // Appends the tokens of a row, at most T + 1. *first: the first token that is scored, at least 1; of those after it
    // token_unscored are not. *bytes, 0 before: the length of the scored text.
    bool (*append)(Tokens* out, size_t* first, size_t* bytes, void* context, size_t item, size_t row, Error* error);
    void* context;
} Source;

// How a row has a token that is not scored; and which token that is.
static inline int32_t token_unscored(int32_t token) { return ~token; }

// Allocates a source of `items` items; the caller fills in the rest.
static inline bool source_allocate(Source* s, size_t items, Error* error) {
    memset(s, 0, sizeof *s);
    s->items = items;
    s->rows = (size_t*)memory_allocate((items + 1) * sizeof(size_t));
    return s->rows != NULL || fail_with(error, "out of memory for %zu items to evaluate", items);
}

// The length in bytes of the text of tokens.
static inline size_t tokens_bytes(const Tokenizer* tokenizer, const int32_t* tokens, size_t count) {
    size_t bytes = 0, all = 0;
    for (size_t i = 0; i < count; i++, all += bytes) tokenizer_piece(&bytes, tokenizer, tokens[i]);
    return all;
}

// ------------------------------------------------------------------------------------------------
// 2. Text
//
// The windows of validation (data.h): T + 1 tokens each, of which `overlap` are shared with the previous window and not
// scored again; a remainder is left out. Nats per byte count the bytes of the scored tokens.

typedef struct {
    const Dataset* dataset;
    const Tokenizer* tokenizer;  // without a vocabulary: the bytes are unknown, and taken as 0
    int32_t vocabulary;          // of the model
    size_t T, overlap;
} Windows;

static inline bool windows_append(Tokens* out, size_t* first, size_t* bytes, void* context, size_t item, size_t row,
                                  Error* error) {
    const Windows* w = (const Windows*)context;
    Window window = dataset_window(w->dataset, item, w->T, w->overlap);
    (void)row;
    if (!tokens_reserve(out, w->T + 1, error)) return false;
    int32_t* tokens = out->ids + out->count;
    if (!window_read(tokens, tokens + 1, w->dataset, window, w->vocabulary, w->T, error)) return false;
    out->count += w->T + 1;
    *first = window.start > 0 ? w->overlap + 1 : 1;
    *bytes = tokens_bytes(w->tokenizer, tokens + *first, w->T + 1 - *first);
    return true;
}

// The windows of a dataset as a source; free(source->rows) frees it. Both *w and the dataset must outlive it.
static inline bool windows_open(Source* source, const Windows* w, Error* error) {
    if (!dataset_suffices(w->dataset, w->T, error)) return false;
    if (!source_allocate(source, dataset_windows(w->dataset, w->T, w->overlap), error)) return false;
    for (size_t i = 0; i <= source->items; i++) source->rows[i] = i;
    const uint64_t numbers[3] = {dataset_fingerprint(w->dataset), w->T, w->overlap};
    source->hash = hash_bytes(numbers, sizeof numbers);
    source->append = windows_append;
    source->context = (void*)(uintptr_t)w;
    return true;
}

// ------------------------------------------------------------------------------------------------
// 3. Choices
//
// A line of JSON per question, in the form of HellaSwag, MMLU or ARC:
//   {"ctx": "...", "endings": ["...", ...], "label": 3}                                       or "label": "3"
//   {"question": "...", "choices": ["...", ...], "answer": 3}
//   {"question": "...", "choices": {"text": ["...", ...], "label": ["A", ...]}, "answerKey": "D"}
// Context and ending are joined by a space and tokenized together. The tokens scored are those after the tokens of the
// context alone, without the white space at its end, as in lm-evaluation-harness. A row that is too long loses tokens
// at its beginning; questions with such rows are counted.

// One answer of a question: its range in the tokens of all rows.
typedef struct {
    size_t start, end;
    size_t first, bytes;         // what Source.append returns for it
} ChoiceRow;

typedef struct {
    char* text;                  // the file, owned
    size_t bytes;
    size_t* labels;              // (items), owned: the right answers
    const char* path;
    const Tokenizer* tokenizer;
    size_t T, model_context;     // the longest sequence now, and the longest that the model can be given
    size_t cut;                  // questions of which a row has lost tokens
    Tokens tokens;               // of all rows
    ChoiceRow* rows;             // (row_capacity), owned: the range of each in `tokens`
    size_t row_capacity;
    const size_t* first_rows;    // (items + 1): rows of the source
    Tokens context;              // scratch
    JsonWriter joined;           // scratch: a context and an ending
} Choices;

#define CHOICES_BYTES_MAX ((size_t)1 << 32)
enum { CHOICES_ENDINGS_MAX = 1024 };

// A question: the nodes of a parsed line.
typedef struct {
    Json json;
    uint32_t context, endings;   // a string; an array of strings
    size_t count, label;         // endings; the right one
} Question;

static inline uint32_t question_member(const Json* json, const char* name, const char* other) {
    uint32_t node = json_get(json, 0, name);
    return node != JSON_NONE ? node : json_get(json, 0, other);
}

// The right answer of `count`: its number, also as text, its letter, or one of the texts in `names`. Returns NULL, or
// what is wrong.
static inline const char* question_label(size_t* label, size_t count, const Json* json, uint32_t node, uint32_t names) {
    char text[64] = "", name[64];
    uint64_t number;
    int length = 0;
    size_t i = 0;
    if (node == JSON_NONE) return "there is no \"label\", \"answer\" or \"answerKey\"";
    if (json_u64(json, node, &number)) {
        *label = (size_t)number;
        return *label < count ? NULL : "its label is not the number of an ending; the first is 0";
    }
    if (names != JSON_NONE && json_count(json, names) != count) return "there are not as many labels as endings";
    *label = SIZE_MAX;
    if (json_string(json, node, text, sizeof text))
        for (uint32_t n = json_first(json, names); n != JSON_NONE; n = json_next(json, n), i++) {
            if (!json_string(json, n, name, sizeof name) || strcmp(name, text) != 0) continue;
            if (*label != SIZE_MAX) return "two endings have the label of its answer";
            *label = i;
        }
    if (names != JSON_NONE) return *label < count ? NULL : "its answer is none of the labels of its endings";
    if (text[0] >= 'A' && text[0] <= 'Z' && text[1] == 0) *label = (size_t)(text[0] - 'A');
    else if (sscanf(text, "%6zu%n", label, &length) != 1 || text[length] != 0) *label = SIZE_MAX;
    return *label < count ? NULL : "its label is neither the number of an ending, the first being 0, nor its letter";
}

// Reads line `number`, from 1. The caller frees question->json after success.
static inline bool question_read(Question* q, const Choices* c, size_t number, const char* line, size_t bytes,
                                 Error* error) {
    char what[FILE_PATH_MAX + 32];
    const char* problem = NULL;
    snprintf(what, sizeof what, "%.600s, line %zu", c->path, number);
    if (!json_parse(&q->json, line, bytes, what, error)) return false;
    uint32_t names = JSON_NONE, label = question_member(&q->json, "label", "answer");
    q->context = question_member(&q->json, "ctx", "question");
    q->endings = question_member(&q->json, "endings", "choices");
    if (json_is(&q->json, q->endings, JSON_OBJECT)) {
        names = json_get(&q->json, q->endings, "label");
        q->endings = json_get(&q->json, q->endings, "text");
        label = question_member(&q->json, "answerKey", "label");
    }
    q->count = json_count(&q->json, q->endings);
    if (!json_is(&q->json, q->context, JSON_STRING)) problem = "there is no string \"ctx\"";
    else if (!json_is(&q->json, q->endings, JSON_ARRAY)) problem = "there is no array \"endings\"";
    else if (q->count < 2 || q->count > CHOICES_ENDINGS_MAX) problem = "there must be 2 to 1024 endings";
    else problem = question_label(&q->label, q->count, &q->json, label, names);
    for (uint32_t n = json_first(&q->json, q->endings); n != JSON_NONE && !problem; n = json_next(&q->json, n))
        if (!json_is(&q->json, n, JSON_STRING) || q->json.nodes[n].bytes == 0)
            problem = "an ending is empty, or not a string";
    if (problem == NULL) return true;
    json_free(&q->json);
    return fail_with(error, "%s: %s; give {\"ctx\": \"...\", \"endings\": [\"...\", \"...\"], \"label\": 0}", what,
                     problem);
}

// Puts the tokens of a question's context alone, without the white space at its end, in c->context.
static inline bool choices_context(Choices* c, const char* context, size_t bytes, Error* error) {
    const Tokenizer* tokenizer = c->tokenizer;
    for (size_t n; (n = utf8_space_before(context + bytes, bytes)) > 0;) bytes -= n;
    c->context.count = 0;
    if (!tokenizer_encode(&c->context, tokenizer, context, bytes, error)) return false;
    bool needs = c->context.count == 0 && tokenizer->begin_of_text < 0 && tokenizer->begin_token < 0 &&
                 tokenizer->end_of_text < 0;
    return !needs || fail_with(error, "a question without context needs a begin- or end-of-text token, and this "
                               "tokenizer has none; give it a context");
}

// Appends the tokens of context, a space and an ending to the tokens of all rows, as `row`.
static inline bool choices_join(ChoiceRow* row, Choices* c, const char* context, size_t bytes, const char* ending,
                                size_t ending_bytes, Error* error) {
    const Tokenizer* tokenizer = c->tokenizer;
    Tokens* out = &c->tokens;
    JsonWriter* joined = &c->joined;
    joined->bytes = 0;
    json_put(joined, context, bytes);
    json_put(joined, " ", 1);
    json_put(joined, ending, ending_bytes);
    if (joined->failed) return fail_with(error, "out of memory for a question of %zu bytes", bytes + 1 + ending_bytes);
    int32_t begin = tokenizer->begin_of_text;
    // Without a context there is nothing to predict the first token from.
    if (begin < 0 && c->context.count == 0) begin = tokenizer->begin_token;
    if (begin < 0 && c->context.count == 0) begin = tokenizer->end_of_text;
    row->start = out->count;
    row->first = c->context.count + (begin >= 0);
    row->bytes = ending_bytes;
    if (begin >= 0 && !tokens_append(out, &begin, 1, error)) return false;
    if (!tokenizer_encode(out, tokenizer, joined->text, joined->bytes, error)) return false;
    row->end = out->count;
    return row->end - row->start > row->first || fail_with(error, "an ending adds no token to its context");
}

// Cuts tokens at the beginning of a row that is too long, and sets *shortened.
static inline bool choices_shorten(ChoiceRow* row, bool* shortened, Choices* c, Error* error) {
    size_t count = row->end - row->start, most = c->T + 1, cut = count - most;
    if (count <= most) return true;
    if (cut >= row->first)
        return fail_with(error, "an ending has more than %zu tokens; %s", c->T, c->T < c->model_context
                         ? "make --seq larger" : "the model's context is no longer, so leave the question out");
    *shortened = true;
    row->first -= cut;
    memmove(c->tokens.ids + row->start, c->tokens.ids + row->start + cut, most * sizeof(int32_t));
    c->tokens.count = row->end = row->start + most;
    return true;
}

static inline bool choices_reserve(Choices* c, size_t rows, Error* error) {
    if (rows <= c->row_capacity) return true;
    ChoiceRow* grown = (ChoiceRow*)realloc(c->rows, 2 * rows * sizeof(ChoiceRow));
    if (grown == NULL) return fail_with(error, "out of memory for %zu answers", rows);
    c->rows = grown;
    c->row_capacity = 2 * rows;
    return true;
}

// Reads question `item`, of line `number`, and tokenizes its answers.
static inline bool choices_read(Choices* c, Source* source, size_t item, size_t number, const char* line, size_t bytes,
                                Error* error) {
    Question q;
    Error reason;
    if (!question_read(&q, c, number, line, bytes, error)) return false;
    const Json* json = &q.json;
    const JsonNode* asked = &json->nodes[q.context];
    const char* context = json->text + asked->start;
    size_t row = source->rows[item];
    bool shortened = false;
    c->labels[item] = q.label;
    source->rows[item + 1] = row + q.count;
    bool ok = choices_reserve(c, row + q.count, &reason) && choices_context(c, context, asked->bytes, &reason);
    for (uint32_t n = json_first(json, q.endings); ok && n != JSON_NONE; n = json_next(json, n), row++) {
        const JsonNode* ending = &json->nodes[n];
        ok = choices_join(&c->rows[row], c, context, asked->bytes, json->text + ending->start, ending->bytes,
                          &reason) && choices_shorten(&c->rows[row], &shortened, c, &reason);
    }
    c->cut += shortened;
    json_free(&q.json);
    return ok || fail_with(error, "%.600s, line %zu: %.300s", c->path, number, reason.text);
}

static inline bool choices_append(Tokens* out, size_t* first, size_t* bytes, void* context, size_t item, size_t row,
                                  Error* error) {
    const Choices* c = (const Choices*)context;
    const ChoiceRow* r = c->rows + c->first_rows[item] + row;
    *first = r->first;
    *bytes = r->bytes;
    return tokens_append(out, c->tokens.ids + r->start, r->end - r->start, error);
}

static inline void choices_close(Choices* c, Source* source) {
    free(c->text);
    free(c->labels);
    free(c->rows);
    json_writer_free(&c->joined);
    free(source->rows);
    tokens_free(&c->tokens);
    tokens_free(&c->context);
    memset(c, 0, sizeof *c);
    memset(source, 0, sizeof *source);
}

// Finds the end of a line. False for a blank line, which is no question.
static inline bool choices_line(const char** next, const char* line, const char* end) {
    const char* newline = (const char*)memchr(line, '\n', (size_t)(end - line));
    *next = newline ? newline + 1 : end;
    while (line < *next && memchr(" \t\r\n", *line, 4)) line++;
    return line < *next;
}

// Reads and tokenizes all questions: one that cannot be scored is found now, not after hours. T: the longest sequence
// that the model will be given; context: the longest that it could be given. The path and the tokenizer must outlive
// the source. After a failure there is nothing to close.
static inline bool choices_open(Choices* c, Source* source, const char* path, const Tokenizer* tokenizer, size_t T,
                                size_t context, Error* error) {
    memset(c, 0, sizeof *c);
    memset(source, 0, sizeof *source);
    c->path = path;
    c->tokenizer = tokenizer;
    c->T = T;
    c->model_context = context;
    bool ok = file_read(path, CHOICES_BYTES_MAX, &c->text, &c->bytes, error);
    const char *text = ok ? c->text : "", *end = text + (ok ? c->bytes : 0), *next;
    if (ok && c->bytes >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) text += 3;  // a byte order mark
    size_t items = 0, number = 0;
    for (const char* line = text; line < end; line = next) items += choices_line(&next, line, end);
    if (ok && items == 0) ok = fail_with(error, "%.600s has no questions; give a line of JSON for each", path);
    ok = ok && source_allocate(source, items, error);
    c->labels = (size_t*)memory_allocate(items * sizeof *c->labels);
    c->first_rows = source->rows;
    if (ok && !c->labels) ok = fail_memory(error, path, c->bytes);
    items = 0;
    for (const char* line = text; ok && line < end; line = next) {
        number++;
        if (choices_line(&next, line, end))
            ok = choices_read(c, source, items++, number, line, (size_t)(next - line), error);
    }
    if (!ok) choices_close(c, source);
    if (!ok) return false;
    const uint64_t numbers[3] = {hash_bytes(c->text, c->bytes), tokenizer->hash, T};
    source->hash = hash_bytes(numbers, sizeof numbers);
    source->append = choices_append;
    source->context = c;
    return true;
}

// ------------------------------------------------------------------------------------------------
// 4. Score log
//
// A text file: a line that identifies the evaluation, then a line per finished item with the scores of its rows. Each
// line ends in its checksum, so that a truncated one is ignored. Ranks append to one file, a line at a time.

typedef struct {
    double nats, tokens, bytes;  // negative log-likelihood; tokens and bytes scored
} Score;

typedef struct {
    int file;          // open descriptor; -1: none
    const char* path;
    JsonWriter line;   // the text of a line
} ScoreLog;

static inline void score_log_close(ScoreLog* log) {
    if (log->file >= 0) close(log->file);
    json_writer_free(&log->line);
    log->file = -1;
}

__attribute__((format(printf, 2, 3))) static inline void score_log_put(ScoreLog* log, const char* format, ...) {
    char text[128];
    va_list arguments;
    va_start(arguments, format);
    json_put(&log->line, text, (size_t)vsnprintf(text, sizeof text, format, arguments));
    va_end(arguments);
}

// Ends the line and writes it at once.
static inline bool score_log_end(ScoreLog* log, Error* error) {
    JsonWriter* line = &log->line;
    score_log_put(log, " %016llx\n", (unsigned long long)hash_bytes(line->text, line->bytes));
    if (line->failed) return fail_with(error, "out of memory for a line of %.600s", log->path);
    size_t bytes = line->bytes;
    line->bytes = 0;
    ssize_t written = write(log->file, line->text, bytes);
    if (written >= 0 && (size_t)written < bytes) errno = ENOSPC;
    return written == (ssize_t)bytes || fail_file(error, "write", log->path);
}

static inline bool score_log_add(ScoreLog* log, size_t item, const Score* scores, size_t rows, Error* error) {
    score_log_put(log, "item %zu", item);
    for (size_t i = 0; i < rows; i++)
        score_log_put(log, " %.17g %.0f %.0f", scores[i].nats, scores[i].tokens, scores[i].bytes);
    return score_log_end(log, error);
}

// Reads the scores of an item from its line and marks it as done; ignores a line that is not an item's.
static inline void score_log_read_item(Score* scores, bool* done, const Source* source, char* line) {
    size_t item;
    int length = 0;
    if (sscanf(line, "item %zu%n", &item, &length) != 1 || item >= source->items) return;
    char* at = line + length;
    for (size_t row = source->rows[item]; row < source->rows[item + 1]; row++) {
        scores[row].nats = strtod(at, &at);
        scores[row].tokens = strtod(at, &at);
        scores[row].bytes = strtod(at, &at);
    }
    done[item] = true;
}

// Reads the file, if there is one, and opens it to append; the first rank starts a new one. key: of the evaluation.
static inline bool score_log_open(ScoreLog* log, Score* scores, bool* done, const Source* source, const char* path,
                                  uint64_t key, bool first_rank, Error* error) {
    char *text = NULL, header[64];
    size_t bytes = 0;
    log->path = path;
    snprintf(header, sizeof header, "evaluation %016llx", (unsigned long long)key);
    log->file = open(path, O_RDWR | O_APPEND | O_CLOEXEC | (first_rank ? O_CREAT : 0), 0666);
    if (log->file < 0) return fail_file(error, "open", path);
    if (!file_read(path, CHOICES_BYTES_MAX, &text, &bytes, error)) return false;
    bool ok = true, begun = false, whole = bytes == 0 || text[bytes - 1] == '\n';
    for (char *line = text, *end; ok && (end = strchr(line, '\n')) != NULL; line = end + 1) {
        unsigned long long hash;
        char* space = line + max_size((size_t)(end - line), 17) - 17;
        *end = 0;
        if (sscanf(space, " %16llx", &hash) != 1 || hash_bytes(line, (size_t)(space - line)) != hash) continue;
        *space = 0;
        if (begun) score_log_read_item(scores, done, source, line);
        else if (strcmp(line, header) != 0)
            ok = fail_with(error, "%.600s belongs to another evaluation: other weights, another text or tokenizer, or "
                           "another --seq; remove it, or name another file", path);
        begun = true;
    }
    if (ok && !begun && bytes > 0) {  // another file, or a first line that was cut short
        bool cut = !whole && strncmp(text, header, min_size(bytes, strlen(header))) == 0;
        if (!cut) ok = fail_with(error, "%.600s is not a file of scores; name another one", path);
        else if (first_rank && ftruncate(log->file, 0) != 0) ok = fail_file(error, "empty", path);
        whole = true;
    }
    free(text);
    if (!ok || !first_rank) return ok;
    if (!whole) score_log_put(log, "\ncut");  // ends the truncated line
    if (!whole && !score_log_end(log, error)) return false;
    if (!begun) score_log_put(log, "%s", header);
    return begun || score_log_end(log, error);
}

// ------------------------------------------------------------------------------------------------
// 5. Scoring
//
// Rows are collected until a batch is full, padded to the longest, and go through the model together. Ranks take
// consecutive items and gather the scores at the end.

typedef struct {
    size_t item, row;      // the row's number, over all items
    size_t start, length;  // of its tokens
    size_t first, bytes;
} PendingRow;

typedef struct {
    Tokens tokens;               // of the pending rows
    PendingRow* pending;         // (B * T)
    size_t count, longest;       // rows; the longest of their inputs
    int32_t *inputs, *targets;   // (B * T)
    float* losses;               // (B * T)
    ScoreLog log;
    Score* scores;
    bool* done;                  // (items)
} Scorer;

static inline void scorer_free(Scorer* s) {
    score_log_close(&s->log);
    tokens_free(&s->tokens);
    free(s->pending);
    free(s->inputs);
    free(s->targets);
    free(s->losses);
    free(s->done);
    memset(s, 0, sizeof *s);
    s->log.file = -1;
}

// Scores the pending rows.
static inline bool scorer_run(Scorer* s, Model* model, const Source* source, Error* error) {
    size_t T = s->longest, rows = s->count;
    for (size_t r = 0; r < rows; r++) {
        const PendingRow* p = &s->pending[r];
        const int32_t* ids = s->tokens.ids + p->start;
        for (size_t t = 0; t < T; t++) {
            bool inside = t + 1 < p->length;
            int32_t target = inside && ids[t + 1] >= 0 ? ids[t + 1] : TARGET_NONE;
            s->inputs[r * T + t] = !inside ? 0 : ids[t] < 0 ? token_unscored(ids[t]) : ids[t];
            s->targets[r * T + t] = t + 1 >= p->first ? target : TARGET_NONE;
        }
    }
    if (rows == 0) return true;
    model_losses(model, s->inputs, s->targets, rows, T);
    device_download(s->losses, model->activations->losses, rows * T * sizeof(float), model->stream);
    for (size_t r = 0; r < rows; r++) {
        const PendingRow* p = &s->pending[r];
        Score* score = &s->scores[p->row];
        score->nats = 0;  // 0 where there is no target
        for (size_t t = p->first - 1; t + 1 < p->length; t++) score->nats += (double)s->losses[r * T + t];
        if (isnan(score->nats))
            return fail_with(error, "the loss of item %zu is not a number, perhaps because weights are damaged; give "
                             "another checkpoint", p->item);
        score->tokens = (double)targets_count(s->targets + r * T, T);
        score->bytes = (double)p->bytes;
        size_t first = source->rows[p->item], end = source->rows[p->item + 1];
        bool logs = p->row + 1 == end && s->log.file >= 0;
        if (logs && !score_log_add(&s->log, p->item, s->scores + first, end - first, error)) return false;
    }
    s->tokens.count = s->count = s->longest = 0;
    return true;
}

// Adds a row; the rows before it are scored first if they fill a batch of N inputs.
static inline bool scorer_add(Scorer* s, Model* model, const Source* source, size_t item, size_t row, Error* error) {
    const size_t N = model->options.B * model->options.T;
    PendingRow p = {.item = item, .row = source->rows[item] + row, .start = s->tokens.count};
    if (!source->append(&s->tokens, &p.first, &p.bytes, source->context, item, row, error)) return false;
    p.length = s->tokens.count - p.start;
    if (p.length <= p.first)
        return fail_with(error, "item %zu, row %zu has no token to score; leave it out", item, row);
    for (size_t i = p.start; i < s->tokens.count; i++) {
        int32_t id = s->tokens.ids[i], token = id < 0 ? token_unscored(id) : id;
        if ((size_t)token >= model->config.vocab)
            return fail_with(error, "token %d is outside the model's vocabulary of %zu; give the tokenizer that the "
                             "model was trained with", token, model->config.vocab);
    }
    if ((s->count + 1) * max_size(s->longest, p.length - 1) > N) {
        if (!scorer_run(s, model, source, error)) return false;
        memmove(s->tokens.ids, s->tokens.ids + p.start, p.length * sizeof(int32_t));
        p.start = 0;
        s->tokens.count = p.length;
    }
    s->pending[s->count++] = p;
    s->longest = max_size(s->longest, p.length - 1);
    return (s->count < N && (s->count + 1) * s->longest <= N) || scorer_run(s, model, source, error);
}

// The key of a score log: a hash of source and weights. False if there is no memory for a piece of the weights.
static inline bool evaluate_key(uint64_t* key, Model* model, const Source* source, Error* error) {
    const FlatVector* flat = &model->flat;
    floatX* piece = (floatX*)memory_allocate(CHECKPOINT_CHUNK * sizeof(floatX));
    if (piece == NULL) return fail_with(error, "out of memory for a piece of the weights");
    Hash hash = hash_begin(source->hash);
    for (size_t first = 0, n; first < flat->parameters->flat_size; first += n) {
        n = min_size(CHECKPOINT_CHUNK, flat->parameters->flat_size - first);
        device_download(piece, flat->params + first, n * sizeof(floatX), flat->stream);
        hash_add(&hash, piece, n * sizeof(floatX));
    }
    free(piece);
    *key = hash_end(&hash);
    return true;
}

typedef struct {
    const Source* source;
    size_t world;
} EvaluateShares;

// The bytes of a rank's scores.
static inline Slice evaluate_bytes(size_t rank, const void* context) {
    const EvaluateShares* shares = (const EvaluateShares*)context;
    Slice items = comm_even_slice(rank, shares->world, shares->source->items), bytes;
    bytes.first = shares->source->rows[items.first] * sizeof(Score);
    bytes.end = shares->source->rows[items.end] * sizeof(Score);
    return bytes;
}

static inline bool scorer_open(Scorer* s, Model* model, const Source* source, Score** scores, Error* error) {
    size_t N = model->options.B * model->options.T;
    memset(s, 0, sizeof *s);
    s->log.file = -1;
    s->pending = (PendingRow*)memory_allocate(N * sizeof(PendingRow));
    s->inputs = (int32_t*)memory_allocate(N * sizeof(int32_t));
    s->targets = (int32_t*)memory_allocate(N * sizeof(int32_t));
    s->losses = (float*)memory_allocate(N * sizeof(float));
    s->done = (bool*)memory_allocate(source->items);
    s->scores = *scores = (Score*)memory_allocate(source->rows[source->items] * sizeof(Score));
    return (s->pending && s->inputs && s->targets && s->losses && s->done && s->scores) ||
           fail_with(error, "out of memory for the scores of %zu rows", source->rows[source->items]);
}

// Scores all rows of a source: *scores (source->rows[source->items]), which the caller frees. log: the path of the
// score log; NULL: none. All ranks of the model call it; if one fails, all fail.
static inline bool evaluate(Score** scores, Model* model, const Source* source, const char* log, Error* error) {
    const RankOptions* ranks = &model->flat.options;
    Comm* comm = ranks->transport ? ranks->transport->comm : NULL;
    Scorer s;
    Slice items = comm_even_slice(ranks->rank, ranks->world, source->items);
    uint64_t key = 0;
    bool ok = scorer_open(&s, model, source, scores, error) && (!log || evaluate_key(&key, model, source, error));
    if (ok && log && ranks->rank == 0)
        ok = score_log_open(&s.log, s.scores, s.done, source, log, key, true, error);
    if (comm && !comm_agree_all(comm, ok, error)) ok = false;
    if (ok && log && ranks->rank > 0)
        ok = score_log_open(&s.log, s.scores, s.done, source, log, key, false, error);
    Progress progress = progress_begin("evaluation", items.end - items.first);
    for (size_t item = items.first; ok && item < items.end; item++) {
        size_t rows = source->rows[item + 1] - source->rows[item];
        for (size_t row = 0; ok && row < rows && !s.done[item]; row++)
            ok = scorer_add(&s, model, source, item, row, error);
        if (ranks->rank == 0) progress_show(&progress, item - items.first);
    }
    ok = ok && scorer_run(&s, model, source, error);
    progress_end(&progress);
    if (comm) {
        EvaluateShares shares = {source, ranks->world};
        comm_extend_timeout(comm, true);
        ok = comm_agree_all(comm, ok, error) &&
             comm_all_gather(comm, s.scores, source->rows[source->items] * sizeof(Score), DTYPE_U8, evaluate_bytes,
                             &shares, error);
    }
    scorer_free(&s);
    if (!ok) free(*scores);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 6. Results

static inline Score scores_sum(const Score* scores, size_t rows) {
    Score sum = {0, 0, 0};
    for (size_t i = 0; i < rows; i++) {
        sum.nats += scores[i].nats;
        sum.tokens += scores[i].tokens;
        sum.bytes += scores[i].bytes;
    }
    return sum;
}

// The row of an item with the highest log-likelihood, per byte if by_byte; of equal ones the first.
static inline size_t scores_best(const Score* scores, size_t rows, bool by_byte) {
    size_t best = 0;
    for (size_t i = 1; i < rows; i++) {
        double there = by_byte ? scores[best].nats / scores[best].bytes : scores[best].nats;
        if ((by_byte ? scores[i].nats / scores[i].bytes : scores[i].nats) < there) best = i;
    }
    return best;
}

// The fraction of right answers: by the sum of log-likelihoods, or by that sum divided by the ending's bytes.
static inline double choices_accuracy(const Choices* c, const Source* source, const Score* scores, bool by_byte) {
    size_t right = 0;
    for (size_t i = 0; i < source->items; i++)
        right += scores_best(scores + source->rows[i], source->rows[i + 1] - source->rows[i], by_byte) == c->labels[i];
    return (double)right / (double)source->items;
}

// The standard error of an accuracy over n questions: the sample's standard deviation / sqrt(n).
static inline double accuracy_error(double accuracy, size_t n) {
    return n > 1 ? sqrt(accuracy * (1 - accuracy) / (double)(n - 1)) : NAN;
}

#endif  // LLMTRAIN_EVALUATE_H
