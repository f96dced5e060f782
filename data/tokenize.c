// tokenize.c: converts texts to token shards, for training and for validation.
//
//   make build/tokenize
//   build/tokenize --bytes story.txt --out data/story --val 0.1
//   build/tokenize --tokenizer models/x --text 'books/*.txt.gz' --out data/books --val 0.01
//   build/tokenize --tokenizer models/x --jsonl 'web/*.jsonl.zst' --field text --out data/web --val 0.001
//   build/tokenize --tokenizer models/x --encode < book.txt > ids; build/tokenize --tokenizer models/x --decode < ids
//   build/tokenize --train-bpe 4096 --text 'books/*.txt' --out models/y
//   build/tokenize --tokenizer models/x --chat 'chats/*.jsonl' --out data/chat --val 0.01
//   build/tokenize --show data/books_train_000000.bin --at 1000000 --tokens 64
//
//   1. flags
//   2. bytes       --bytes: a token per byte of one text
//   3. documents   --text, --jsonl: documents by a tokenizer
//   4. chat        --chat: documents of conversations, and which of their tokens are trained
//   5. duplicates  --dedup: finds the documents to leave out
//   6. conversion  all of it together
//   7. training    --train-bpe: a tokenizer from documents
//   8. main        and --encode, --decode, --show: to standard output
//
// Memory does not depend on the size of the texts. All shards get their names after the last byte was flushed to the
// disk; if anything fails before, no file has changed.

#include "bpe.h"
#include "chat.h"
#include "duplicates.h"
#include "input.h"
#include "shards.h"
#include "stream.h"
#include "../llmtrain/base/container.h"
#include "../llmtrain/base/flags.h"
#include "../llmtrain/base/progress.h"

#include <signal.h>

// ------------------------------------------------------------------------------------------------
// 1. Flags

typedef struct {
    const char *bytes, *text, *jsonl, *chat;  // source of the text: one of these
    const char *field, *tokenizer, *pattern, *out;
    double val;                        // fraction
    bool val_given;
    int bad_lines;                     // 0: stop; 1: skip
    bool special;                      // the text of special tokens in documents is those tokens
    int turns;                         // of --chat: TURNS_ALL ...
    const char *system, *template_file;
    bool alpaca_text;
    int dedup;                         // DEDUP_OFF ...
    double similarity;                 // of near duplicates
    uint64_t shard_tokens;
    double entropy;                    // nats per byte; 0 = unknown
    uint64_t vocabulary;               // of --train-bpe; 0: not given
    uint64_t threads;
    bool encode, decode;               // standard input to standard output
    const char* show;                  // a shard:
    uint64_t at, tokens;               // position, and number of tokens from there on
} Options;

#define VAL_MIN 1e-9  // besides 0: with less, the number of a document far ahead would not fit 64 bits
enum { DEDUP_OFF, DEDUP_EXACT, DEDUP_NEAR };

static Flags options_flags(Options* o) {
    const Flag table[] = {
        FLAG_HEADING("Texts"),
        FLAG_TEXT("bytes", &o->bytes, NULL, "FILE", 0, "text file to convert, one token per byte; -: standard input"),
        FLAG_TEXT("text", &o->text, NULL, "GLOB", 0, "text files to convert with --tokenizer, each a document: paths "
                  "and patterns, separated by commas; gzip and zstd files are decompressed"),
        FLAG_TEXT("jsonl", &o->jsonl, NULL, "GLOB", 0, "JSON Lines files to convert with --tokenizer: paths and "
                  "patterns, separated by commas; the member --field of each line is a document"),
        FLAG_TEXT("field", &o->field, "text", "NAME", 0, "with --jsonl: name of the member that holds the text"),
        FLAG_SWITCH("special", &o->special, true, 0, "on: <|endoftext|> and other special tokens in a document's text "
                    "are those tokens; off: they are text like any other"),
        FLAG_CHOICE("bad-lines", &o->bad_lines, 0, "stop|skip", 0,
                    "with --jsonl and --chat: end at a line that cannot be read, or skip such lines, and count them"),
        FLAG_HEADING("Conversations"),
        FLAG_TEXT("chat", &o->chat, NULL, "GLOB", 0, "JSON Lines files to convert with --tokenizer: paths and "
                  "patterns, separated by commas; each line has messages (OpenAI), conversations (ShareGPT), "
                  "instruction and output (Alpaca), prompt and completion, prompt, chosen and rejected, segments, or "
                  "text; only answers are trained"),
        FLAG_CHOICE("turns", &o->turns, TURNS_ALL, CHAT_TURNS, 0, "answers of a conversation that are trained: all; "
                    "the last; or each, in a document of its own with the conversation before it"),
        FLAG_TEXT("system", &o->system, NULL, "TEXT", 0, "system message of conversations that have none"),
        FLAG_TEXT("template", &o->template_file, NULL, "FILE", 0, "chat template (Jinja) instead of the tokenizer's; "
                  "it is kept in PREFIX_tokenizer/, and with each model trained on the shards"),
        FLAG_SWITCH("alpaca-text", &o->alpaca_text, false, 0, "write instructions as Stanford's Alpaca does, instead "
                    "of with the chat template"),
        FLAG_HEADING("Tokenizer"),
        FLAG_TEXT("tokenizer", &o->tokenizer, NULL, "PATH", 0, "tokenizer.json, vocab.json with merges.txt next to it, "
                  "encoder.json with vocab.bpe next to it, a tiktoken rank file, or a directory that has one of them"),
        FLAG_TEXT("pattern", &o->pattern, NULL, "NAME", 0,
                  "with a tiktoken rank file: pattern that splits words: gpt2, cl100k or o200k"),
        FLAG_COUNT("train-bpe", &o->vocabulary, 0, BPE_VOCABULARY_MIN, BPE_VOCABULARY_MAX, 0, "train a byte-level BPE "
                   "tokenizer of N tokens, with GPT-2's pattern, on the texts, and write OUT/tokenizer.json"),
        FLAG_HEADING("Standard input"),
        FLAG_SWITCH("encode", &o->encode, false, 0, "print the tokens of the text on standard input"),
        FLAG_SWITCH("decode", &o->decode, false, 0, "print the text of the tokens on standard input"),
        FLAG_HEADING("Inspecting a shard"),
        FLAG_TEXT("show", &o->show, NULL, "FILE", 0,
                  "print a part of a shard as text, decoded with --tokenizer or the tokenizer next to it; of "
                  "conversations with the trained tokens marked"),
        FLAG_COUNT("at", &o->at, 0, 0, 1e15, 0, "with --show: position of the first token"),
        FLAG_COUNT("tokens", &o->tokens, 64, 1, 1e15, 0, "with --show: tokens to print"),
        FLAG_HEADING("Duplicates"),
        FLAG_CHOICE("dedup", &o->dedup, DEDUP_OFF, "off|exact|near", 0,
                    "leave out documents that repeat earlier ones, and list them in PREFIX_duplicates.jsonl: exact: "
                    "equal documents; near: also those that share most word 5-grams"),
        FLAG_REAL("similarity", &o->similarity, 0.8, 0.7, 1, 0,
                  "with --dedup near: minimum Jaccard similarity of two documents' word 5-grams"),
        FLAG_HEADING("Shards"),
        FLAG_TEXT("out", &o->out, NULL, "PREFIX", 0,
                  "prefix of the shards: PREFIX_train_000000.bin, PREFIX_val_000000.bin, ..., and of the tokenizer: "
                  "PREFIX_tokenizer/; with --train-bpe: the directory to write"),
        FLAG_REAL("val", &o->val, 0.1, 0, 1, 0, "fraction of the documents (of a single text: its end) for validation; "
                  "0: train shards only, 1: val shards only"),
        FLAG_COUNT("shard-tokens", &o->shard_tokens, 100000000, 1, 1e12, 0, "maximum tokens per shard"),
        FLAG_REAL("entropy", &o->entropy, 0, 0, 100, 0, "entropy floor (loss of the text's true source) in nats per "
                  "byte, stored in the shards per token; 0: unknown"),
        FLAG_HEADING("Program"),
        FLAG_COUNT("threads", &o->threads, 0, 0, 4096, 0, THREADS_HELP),
    };
    return flags_of(table, sizeof table / sizeof table[0]);
}

// The files of documents.
static const char* options_source(const Options* o) { return o->text ? o->text : o->jsonl ? o->jsonl : o->chat; }

// The member of a line that is a document; of conversations the whole line is. NULL: a file is a document.
static const char* options_field(const Options* o) { return o->jsonl ? o->field : o->chat; }

static bool options_read(Options* o, int argc, char** argv, Error* error) {
    memset(o, 0, sizeof *o);
    Flags flags = options_flags(o);
    if (!flags_parse(&flags, argc, argv, error)) return false;
    o->val_given = flag_was_given(&flags, "val");
    if (!o->show && (flag_was_given(&flags, "at") || flag_was_given(&flags, "tokens")))
        return fail_with(error, "--at and --tokens are for --show FILE, the shard to print from; give it too");
    if (flag_was_given(&flags, "bad-lines") && !o->jsonl && !o->chat)
        return fail_with(error, "--bad-lines is for --jsonl and --chat; give one of them, or leave it out");
    static const char* const of_chat[] = {"turns", "system", "template", "alpaca-text"};
    for (size_t i = 0; i < sizeof of_chat / sizeof of_chat[0]; i++)
        if (flag_was_given(&flags, of_chat[i]) && !o->chat)
            return fail_with(error, "--%s is for --chat FILES; give that, or leave it out", of_chat[i]);
    if (flag_was_given(&flags, "special") && (o->bytes || o->chat || o->vocabulary || o->decode || o->show))
        return fail_with(error, "--special is for --text, --jsonl and --encode with --tokenizer; leave it out");
    if (o->show) {
        if (o->bytes || o->text || o->jsonl || o->chat || o->out || o->encode || o->decode)
            return fail_with(error, "--show prints a part of a shard; leave --bytes, --text, --jsonl, --chat, --out, "
                             "--encode and --decode out");
        return o->show[0] || fail_with(error, "--show is empty; give the path of a shard");
    }
    if (o->encode || o->decode) {
        if (o->encode && o->decode)
            return fail_with(error, "--encode and --decode are given together; give one of them");
        if (o->bytes || o->text || o->jsonl || o->chat || o->out)
            return fail_with(error, "--%s reads standard input and writes standard output; leave --bytes, --text, "
                             "--jsonl, --chat and --out out", o->encode ? "encode" : "decode");
        return (o->tokenizer && o->tokenizer[0]) || fail_with(error, "--tokenizer PATH is missing; give a tokenizer");
    }
    int sources = (o->bytes != NULL) + (o->text != NULL) + (o->jsonl != NULL) + (o->chat != NULL);
    const char* source = o->bytes ? o->bytes : options_source(o);
    if (sources == 0 || !source[0])
        return fail_with(error, "there is no text to convert; give --bytes FILE, --text GLOB, --jsonl GLOB or --chat "
                         "GLOB");
    if (sources > 1)
        return fail_with(error, "--bytes, --text, --jsonl and --chat are given together; give one of them");
    if (!o->out || !o->out[0]) return fail_with(error, "--out PREFIX is missing; give the prefix of the shards");
    if (o->val > 0 && o->val < VAL_MIN)
        return fail_with(error, "--val %g is too small a fraction; give 0, or at least %g", o->val, VAL_MIN);
    if (strlen(o->out) > 900) return fail_with(error, "--out is longer than 900 characters: give a shorter path");
    if ((o->bytes || o->chat) && o->vocabulary)
        return fail_with(error, "--train-bpe takes its text from --text or --jsonl; give --text instead of --%s",
                         o->bytes ? "bytes" : "chat");
    if (o->tokenizer && (o->bytes || o->vocabulary))
        return fail_with(error, "--%s needs no --tokenizer; leave it out", o->bytes ? "bytes" : "train-bpe");
    if (o->dedup && (o->bytes || o->chat || o->vocabulary))
        return fail_with(error, "--dedup leaves out documents of --text and --jsonl; leave it out with --%s",
                         o->bytes ? "bytes" : o->chat ? "chat" : "train-bpe");
    if (o->chat && o->entropy > 0)
        return fail_with(error, "--entropy is that of texts; leave it out with --chat");
    return o->bytes || o->vocabulary || (o->tokenizer && o->tokenizer[0]) ||
           fail_with(error, "--tokenizer PATH is missing; give a tokenizer (--bytes FILE needs none)");
}

static volatile sig_atomic_t interrupted = 0;
static void interrupt(int signal_number) {
    (void)signal_number;
    interrupted = 1;
}

// Publishes the shards and lists them, or removes them if anything has failed.
static bool publish(ShardSet* set, bool ok, Error* error) {
    if (interrupted) ok = fail_with(error, "interrupted; nothing was written");
    ok = ok && shard_set_publish(set, error);
    if (ok) shard_set_print(set);
    else shard_set_abandon(set);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 2. Bytes

// Bytes of the text that go to training; the rest, at its end, go to validation.
static bool divide(uint64_t* train_bytes, const Input* input, const Options* options, Error* error) {
    double val = options->val_given || input->size_known ? options->val : 0;
    *train_bytes = val == 0 ? UINT64_MAX : 0;
    if (val == 0 || val == 1) return true;
    if (!input->size_known)
        return fail_with(error, "the size of %s is not known in advance, so its end cannot be kept for validation; "
                         "give --val 0 or 1, or save the text as a file first", input->name);
    uint64_t kept = (uint64_t)((double)input->size * val + 0.5);
    if (input->size > 0 && (kept == 0 || kept >= input->size))
        return fail_with(error, "%s has %llu bytes, which --val %g cannot divide; give more text, or --val 0",
                         input->name, (unsigned long long)input->size, val);
    *train_bytes = input->size - kept;
    return true;
}

#define CHUNK LLMTRAIN_PIECE((size_t)1 << 16, (size_t)7)  // bytes of text at a time

static bool bytes_convert(ShardSet* set, Input* input, const Options* options, Error* error) {
    static char text[CHUNK];
    Tokens tokens = {0};
    uint64_t done = 0, train_bytes;
    Progress progress = progress_begin(input->name, input->size);
    if (!divide(&train_bytes, input, options, error)) return false;
    if ((train_bytes == 0 || train_bytes == UINT64_MAX) && !shard_set_agrees(set, train_bytes == 0, error))
        return false;
    bool ok = true;
    for (size_t bytes = 1; ok && bytes > 0 && !interrupted;) {
        bool to_val = done >= train_bytes;
        ok = input_read(input, &bytes, text, to_val ? CHUNK : min_size(CHUNK, train_bytes - done), error);
        tokens.count = 0;
        ok = ok && tokenizer_encode(&tokens, set->tokenizer, text, bytes, error) &&
             series_add(&set->series[to_val], tokens.ids, tokens.count, error);
        done += bytes;
        progress_show(&progress, done);
    }
    progress_end(&progress);
    tokens_free(&tokens);
    if (!ok || interrupted) return ok;
    if (done == 0) return fail_with(error, "%s is empty; give a text", input->name);
    if (input->size_known && done != input->size)
        return fail_with(error, "%s changed while it was read: %llu bytes became %llu; start again", input->name,
                         (unsigned long long)input->size, (unsigned long long)done);
    return true;
}

static bool bytes_to_shards(const Options* options, Error* error) {
    Tokenizer tokenizer = tokenizer_of_bytes();
    ShardSet set;
    Input input;
    shard_set_begin(&set, options->out, &tokenizer, options->shard_tokens, options->entropy);
    bool ok = input_open(&input, options->bytes, error) && shard_set_may_replace(&set, error) &&
              bytes_convert(&set, &input, options, error);
    ok = publish(&set, ok, error);
    input_close(&input);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 3. Documents
//
// A batch of text is divided into jobs of some pieces each; threads encode them, then one thread writes their tokens in
// the order of the text. So the shards do not depend on the number of threads.

enum { JOBS_MAX = 256 };
// Of text, at least; so few jobs are much longer than the others.
#define JOB_BYTES LLMTRAIN_PIECE((size_t)1 << 17, (size_t)7)

// Of a line of --chat.
typedef struct {
    ChatResult result;
    bool blank, bad;
} LineResult;

typedef struct {
    size_t first, count;  // pieces of the batch
    Tokens tokens;        // of all pieces
    ChatOutput chat;      // of --chat: their documents
    Error error;
    bool failed;
} Job;

// What --chat has found.
typedef struct {
    LineResult* results;           // (result_places), owned: of the pieces of a batch
    size_t result_places;
    uint64_t lines[CHAT_FORMS];    // with documents
    uint64_t dropped[DROP_KINDS];
    char first[DROP_KINDS][400];   // the first line of each kind
    uint64_t trained, longest;     // tokens: of all documents, of the longest
    uint64_t unstopped, unstopped_turns, turns;  // documents whose last trained token ends no text; of conversations
    int32_t last;                  // that token of the first of them
} ChatSummary;

typedef struct {
    const Options* options;
    Tokenizer tokenizer;
    Documents documents;
    Batch batch;
    Tokens starts;         // where in its job's tokens each piece of the batch begins
    Job jobs[JOBS_MAX];
    size_t job_count;
    ShardSet set;
    uint64_t read[2];      // documents for training, for validation
    uint64_t empty, bytes; // documents without text; of text in all
    uint64_t replaced;     // invalid UTF-8 sequences
    uint8_t* left_out;     // (left_out_bytes), owned: a bit for each document
    size_t left_out_bytes;
    uint64_t duplicates[2]; // near, exact: documents left out
    FileWriter report;     // of the documents left out
    ChatRules rules;       // of --chat
    ChatSummary chat;
} Conversion;

// The first document of stratum k. A stratum has about 1 / val documents, of which one is for validation.
static uint64_t stratum_begin(uint64_t k, double val) { return (uint64_t)ceil((double)k / val); }

// Whether a document is for validation: one of every 1 / val consecutive documents is, chosen at random. So the
// fraction is exact, and the choice depends on the document's number alone.
static bool is_for_validation(uint64_t document, double val) {
    if (val == 0 || val == 1) return val == 1;
    uint64_t k = (uint64_t)((double)document * val);
    while (stratum_begin(k, val) > document) k--;
    while (stratum_begin(k + 1, val) <= document) k++;
    uint64_t begin = stratum_begin(k, val), end = stratum_begin(k + 1, val);
    return document == begin + random4(0, RANDOM_CORPUS, 1, k).bits[0] % (end - begin);
}

static bool is_left_out(const Conversion* c, uint64_t document) {
    return document / 8 < c->left_out_bytes && (c->left_out[document / 8] >> document % 8 & 1);
}

static void conversion_divide(Conversion* c) {
    Batch* batch = &c->batch;
    size_t target = max_size(JOB_BYTES, batch->bytes / (JOBS_MAX - 1) + 1), bytes = 0;
    c->job_count = 0;
    for (size_t i = 0; i < batch->count; i++) {
        if (i == 0 || (bytes >= target && c->job_count < JOBS_MAX)) {
            c->jobs[c->job_count].first = i;
            c->jobs[c->job_count++].count = 0;
            bytes = 0;
        }
        c->jobs[c->job_count - 1].count++;
        bytes += batch->pieces[i].bytes;
    }
}

static void job_encode(Conversion* c, Job* job, WordEncoder* encoder) {
    job->tokens.count = job->tokens.replaced = 0;
    job->failed = false;
    for (size_t i = job->first; !job->failed && i < job->first + job->count; i++) {
        const Piece* piece = &c->batch.pieces[i];
        c->starts.ids[i] = (int32_t)job->tokens.count;
        job->failed = !tokenizer_encode_by(&job->tokens, &c->tokenizer, encoder, c->batch.text + piece->start,
                                           piece->bytes, &job->error);
    }
}

static bool job_write(Conversion* c, const Job* job, Error* error) {
    const int32_t end_of_text = c->tokenizer.end_of_text;
    if (job->failed) return fail_with(error, "%s", job->error.text);
    c->replaced += job->tokens.replaced;
    for (size_t i = job->first; i < job->first + job->count; i++) {
        const Piece* piece = &c->batch.pieces[i];
        size_t start = (size_t)c->starts.ids[i];
        size_t end = i + 1 < job->first + job->count ? (size_t)c->starts.ids[i + 1] : job->tokens.count;
        bool divided = c->documents.split > 0;  // the one document's end is for validation
        bool to_val = divided ? piece->document == 1 : is_for_validation(piece->document, c->options->val);
        Series* series = &c->set.series[to_val];
        if (is_left_out(c, piece->document)) continue;
        if (piece->begins && piece->ends && piece->bytes == 0) {
            c->empty++;
            continue;
        }
        if (!series_add(series, job->tokens.ids + start, end - start, error)) return false;
        c->bytes += piece->bytes;
        if (!piece->ends) continue;
        c->read[to_val]++;
        if (!series_add(series, &end_of_text, 1, error)) return false;
    }
    return true;
}

// The end of a single text is for validation, since there is no document to spare.
static bool conversion_split(Conversion* c, Error* error) {
    double val = c->options->val;
    Input input;
    if (c->options->jsonl || c->options->chat || c->documents.files.count > 1 || val == 0 || val == 1) return true;
    bool ok = input_open(&input, c->documents.files.names[0], error) && input_unpack(&input, error);
    if (ok && (input.kind != INPUT_PLAIN || !input.size_known))
        ok = fail_with(error, "%.600s is compressed and the only document, so its end cannot be kept for validation; "
                       "give --val 0 or 1, or decompress it", input.name);
    uint64_t size = ok ? input.size : 0;
    if (ok && size == 0) ok = fail_with(error, "%.600s is empty; give a text", input.name);
    input_close(&input);
    uint64_t split = (uint64_t)((double)size * (1 - val));
    if (ok) c->documents.split = split;
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 4. Chat
//
// A line of JSON becomes documents, or it is bad, or its documents are dropped; which tokens are trained goes to the
// .spans file of the shard. Threads make documents of lines as they encode texts, and one thread writes them in order.

static bool chat_begin_batch(Conversion* c, Error* error) {
    return !c->options->chat ||
           memory_grow(&c->chat.results, &c->chat.result_places, c->batch.count, sizeof *c->chat.results) ||
           fail_with(error, "out of memory for %zu lines", c->batch.count);
}

static void piece_locate(char place[FILE_PATH_MAX + 64], const Piece* piece) {
    snprintf(place, FILE_PATH_MAX + 64, "%.600s, line %llu", piece->file, (unsigned long long)piece->line);
}

static bool piece_chat(const Conversion* c, ChatOutput* out, ChatResult* result, const Piece* piece,
                       WordEncoder* encoder, Error* error) {
    char place[FILE_PATH_MAX + 64];
    piece_locate(place, piece);
    return chat_line(out, result, &c->rules, encoder, c->batch.text + piece->start, piece->bytes, place, error);
}

static void job_chat(Conversion* c, Job* job, WordEncoder* encoder) {
    job->failed = false;
    job->chat.document_count = job->chat.span_count = job->chat.tokens.count = 0;
    for (size_t i = job->first; i < job->first + job->count; i++) {
        Piece* piece = &c->batch.pieces[i];
        LineResult line;
        Error ignored;
        memset(&line, 0, sizeof line);
        line.blank = !piece_trim(piece, c->batch.text);
        line.bad = !line.blank && !piece_chat(c, &job->chat, &line.result, piece, encoder, &ignored);
        c->chat.results[i] = line;
    }
}

// A line that cannot be read: it ends the conversion, or is skipped.
static bool chat_bad_line(Conversion* c, const Piece* piece, Error* error) {
    ChatOutput none = {0};
    ChatResult result;
    Error why;
    bool read = piece_chat(c, &none, &result, piece, NULL, &why);  // again, for the reason
    chat_output_free(&none);
    if (read) return fail_with(error, "out of memory for documents; give fewer --threads");
    if (why.kind == ERROR_USAGE) return fail_with(error, "%s", why.text);
    return documents_skip(&c->documents, &why, error);
}

// Writes the documents of a line, from document `first` of the job's on. Those of a group come after each other.
static bool chat_write(Conversion* c, const Job* job, size_t first, size_t count, const Piece* piece, Error* error) {
    const bool to_val = is_for_validation(piece->document, c->options->val);
    Series* const series = &c->set.series[to_val];
    const ChatOutput* out = &job->chat;
    for (size_t i = first; i < first + count; i++) {
        const ChatDocument* d = &out->documents[i];
        size_t group = d->tokens;
        for (size_t k = i + 1; k < first + count && !out->documents[k].begins; k++) group += out->documents[k].tokens;
        Error why;
        char place[FILE_PATH_MAX + 64];
        piece_locate(place, piece);
        if (d->begins && !series_begin_group(series, group, &why))
            return fail_with(error, "%s: %s", place, why.text);
        if (!series_add_document(series, out->tokens.ids + d->first, d->tokens, out->spans + d->span, d->spans, d->kind,
                                 d->begins, error)) return false;
        for (size_t k = d->span; k < d->span + d->spans; k++) c->chat.trained += out->spans[k].tokens;
        if (d->tokens > c->chat.longest) c->chat.longest = d->tokens;
        bool stops = tokenizer_ends(&c->tokenizer, d->last);
        if (!stops && c->chat.unstopped++ == 0) c->chat.last = d->last;
        c->chat.turns += d->of_turns;
        c->chat.unstopped_turns += d->of_turns && !stops;
        c->read[to_val]++;
    }
    return true;
}

static bool job_write_chat(Conversion* c, const Job* job, Error* error) {
    size_t document = 0;
    for (size_t i = job->first; i < job->first + job->count; i++) {
        const Piece* piece = &c->batch.pieces[i];
        const LineResult* line = &c->chat.results[i];
        if (line->bad && !chat_bad_line(c, piece, error)) return false;
        c->empty += line->blank;
        c->bytes += piece->bytes;
        for (int kind = 1; kind < DROP_KINDS; kind++) {
            char place[FILE_PATH_MAX + 64];
            piece_locate(place, piece);
            if (line->result.dropped[kind] > 0 && c->chat.dropped[kind] == 0)
                snprintf(c->chat.first[kind], sizeof c->chat.first[kind], "%.390s", place);
            c->chat.dropped[kind] += line->result.dropped[kind];
        }
        if (line->bad || line->result.documents == 0) continue;
        c->chat.lines[line->result.form]++;
        if (!chat_write(c, job, document, line->result.documents, piece, error)) return false;
        document += line->result.documents;
    }
    return true;
}

static uint64_t chat_dropped(const Conversion* c) {
    uint64_t dropped = 0;
    for (int kind = 1; kind < DROP_KINDS; kind++) dropped += c->chat.dropped[kind];
    return dropped;
}

// The texts of the tokens that end a generated text.
static void chat_ends(char text[400], const Tokenizer* t) {
    size_t used = 0, bytes;
    text[0] = 0;
    for (int32_t id = 0; id < t->vocabulary && used < 300; id++) {
        if (!tokenizer_ends(t, id)) continue;
        const char* piece = tokenizer_piece(&bytes, t, id);
        used += (size_t)snprintf(text + used, 400 - used, "%s%.*s", used ? ", " : "", (int)min_size(bytes, 60), piece);
    }
    if (used == 0) snprintf(text, 400, "none is known");
}

// A model that learns no token that ends a text never ends one.
static bool chat_check(const Conversion* c, Error* error) {
    uint64_t documents = c->read[0] + c->read[1];
    char ends[400];
    size_t bytes;
    if (documents == 0) {
        int kind = 1;
        while (kind < DROP_KINDS && c->chat.dropped[kind] == 0) kind++;
        if (kind == DROP_KINDS) return true;
        return fail_with(error, "all %llu samples of '%.200s' were dropped; the first because of %s (%s)",
                         (unsigned long long)chat_dropped(c), c->options->chat, CHAT_DROPS[kind], c->chat.first[kind]);
    }
    if (c->chat.turns == 0 || c->chat.unstopped_turns < c->chat.turns) return true;
    const char* last = tokenizer_piece(&bytes, &c->tokenizer, c->chat.last);
    chat_ends(ends, &c->tokenizer);
    return fail_with(error, "no answer ends with a token that ends a generated text (%.200s): the last one trained is "
                     "'%.*s'; if that ends a turn, name it in eos_token_id of generation_config.json next to the "
                     "tokenizer, or else give a template that writes one", ends, (int)min_size(bytes, 60), last);
}

static void chat_print(const Conversion* c) {
    uint64_t tokens = c->set.series[0].tokens + c->set.series[1].tokens, documents = c->read[0] + c->read[1];
    size_t bytes;
    for (int form = 0; form < CHAT_FORMS; form++)
        if (c->chat.lines[form] > 0)
            printf("%llu lines in the form %s\n", (unsigned long long)c->chat.lines[form], CHAT_FORM_NAMES[form]);
    printf("%llu documents, the longest of %llu tokens; %llu of %llu tokens are trained (%.1f%%)\n",
           (unsigned long long)documents, (unsigned long long)c->chat.longest, (unsigned long long)c->chat.trained,
           (unsigned long long)tokens, 100 * (double)c->chat.trained / (double)tokens);
    for (int kind = 1; kind < DROP_KINDS; kind++)
        if (c->chat.dropped[kind] > 0)
            printf("%llu samples were dropped because of %s; the first: %s\n",
                   (unsigned long long)c->chat.dropped[kind], CHAT_DROPS[kind], c->chat.first[kind]);
    if (c->chat.unstopped == 0) return;
    const char* last = tokenizer_piece(&bytes, &c->tokenizer, c->chat.last);
    char ends[400];
    chat_ends(ends, &c->tokenizer);
    printf("warning: %llu documents end without a stop token (%s); the first of them ends with '%.*s'\n",
           (unsigned long long)c->chat.unstopped, ends, (int)min_size(bytes, 60), last);
}

// ------------------------------------------------------------------------------------------------
// 5. Duplicates
//
// The documents are read twice: once to find duplicates, by sketches that threads make, and again for the shards.

enum { SKETCHES = LLMTRAIN_PIECE(1024, 3) };  // pieces at a time

static bool leave_out(Conversion* c, uint64_t document, Error* error) {
    size_t byte = (size_t)(document / 8);
    size_t before = c->left_out_bytes;
    if (!memory_grow(&c->left_out, &c->left_out_bytes, byte + 1, 1))
        return fail_with(error, "out of memory for a bit per document, of %zu bytes", byte + 1);
    memset(c->left_out + before, 0, c->left_out_bytes - before);
    c->left_out[byte] |= (uint8_t)(1 << document % 8);
    return true;
}

static void report_document(JsonWriter* w, const Documents* documents, uint64_t document) {
    uint64_t line;
    json_write_begin(w, '{');
    json_member_u64(w, "document", document);
    json_member_string(w, "file", documents_locate(documents, document, &line));
    if (line > 0) json_member_u64(w, "line", line);
    json_write_end(w, '}');
}

static bool report_duplicate(Conversion* c, uint64_t document, const FoundDuplicate* found, Error* error) {
    JsonWriter w = {0};
    json_write_begin(&w, '{');
    json_write_key(&w, "left_out");
    report_document(&w, &c->documents, document);
    json_write_key(&w, "repeats");
    report_document(&w, &c->documents, found->of);
    json_member_string(&w, "why", found->exact ? "exact" : "near");
    json_write_key(&w, "similarity");
    char text[32];
    snprintf(text, sizeof text, "%.3f", found->similarity);
    json_write_raw(&w, text);
    json_write_end(&w, '}');
    json_put(&w, "\n", 1);
    bool ok = json_write_done(&w, error) && file_append(&c->report, w.text, w.bytes, error);
    json_writer_free(&w);
    c->duplicates[found->exact]++;
    return ok && leave_out(c, document, error);
}

static bool duplicates_find(Conversion* c, Duplicates* duplicates, Sketch* sketches, Error* error) {
    Progress progress = progress_begin("looking for duplicates", c->documents.size);
    const Batch* batch = &c->batch;
    Sketch* whole = &sketches[SKETCHES];  // of the current document
    for (;;) {
        if (!documents_next(&c->documents, &c->batch, error)) return progress_end(&progress), false;
        if (batch->count == 0 || interrupted) break;
        for (size_t first = 0; first < batch->count; first += SKETCHES) {
            size_t count = min_size(SKETCHES, batch->count - first);
#pragma omp parallel for schedule(dynamic, 1)
            for (size_t i = 0; i < count; i++)
                sketch_make(&sketches[i], c->options->dedup == DEDUP_NEAR, batch->text + batch->pieces[first + i].start,
                            batch->pieces[first + i].bytes);
            for (size_t i = 0; i < count; i++) {
                const Piece* piece = &batch->pieces[first + i];
                FoundDuplicate found;
                if (piece->begins) *whole = sketches[i];
                else sketch_join(whole, &sketches[i]);
                if (!piece->ends || (piece->begins && piece->bytes == 0)) continue;
                if (!duplicates_add(duplicates, &found, whole, piece->document, error) ||
                    (found.any && !report_duplicate(c, piece->document, &found, error)))
                    return progress_end(&progress), false;
            }
        }
        progress_show(&progress, documents_taken(&c->documents));
    }
    progress_end(&progress);
    documents_rewind(&c->documents);
    return true;
}

static bool conversion_find_duplicates(Conversion* c, Error* error) {
    char path[FILE_PATH_MAX];
    Duplicates duplicates;
    const Options* o = c->options;
    if (o->dedup == DEDUP_OFF) return true;
    snprintf(path, sizeof path, "%s_duplicates.jsonl", o->out);
    if (!file_begin(&c->report, path, error)) return false;
    if (!duplicates_open(&duplicates, o->dedup == DEDUP_NEAR, o->similarity, error)) return false;
    Sketch* sketches = (Sketch*)memory_allocate((SKETCHES + 1) * sizeof(Sketch));
    bool ok = sketches ? duplicates_find(c, &duplicates, sketches, error)
                       : fail_with(error, "out of memory for %zu bytes", (SKETCHES + 1) * sizeof(Sketch));
    free(sketches);
    duplicates_close(&duplicates);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 6. Conversion

static void conversion_free(Conversion* c) {
    documents_close(&c->documents);
    batch_free(&c->batch);
    tokens_free(&c->starts);
    for (size_t i = 0; i < JOBS_MAX; i++) tokens_free(&c->jobs[i].tokens), chat_output_free(&c->jobs[i].chat);
    free(c->chat.results);
    tokenizer_close(&c->tokenizer);
    file_abort(&c->report);
    free(c->left_out);
    free(c);
}

static bool conversion_check(const Conversion* c, Error* error) {
    double val = c->options->val;
    uint64_t documents = c->read[0] + c->read[1];
    const char* source = options_source(c->options);
    if (c->options->chat && !chat_check(c, error)) return false;
    if (documents == 0) return documents_fail_empty(&c->documents, source, error);
    if (val > 0 && c->read[1] == 0)
        return fail_with(error, "'%.600s' has %llu documents, and of those --val %g leaves none for validation; give a "
                         "larger --val, or --val 0", source, (unsigned long long)documents, val);
    if (val < 1 && c->read[0] == 0)
        return fail_with(error, "'%.600s' has %llu documents, and of those --val %g leaves none for training; give a "
                         "smaller --val, or --val 1", source, (unsigned long long)documents, val);
    return true;
}

static bool conversion_tokenize(Conversion* c, Error* error) {
    Progress progress = progress_begin("tokenizing", c->documents.size);
    for (;;) {
        if (!documents_next(&c->documents, &c->batch, error)) return progress_end(&progress), false;
        size_t pieces = c->batch.count;
        if (pieces == 0 || interrupted) break;
        c->starts.count = 0;
        if (!tokens_reserve(&c->starts, pieces, error) || !chat_begin_batch(c, error))
            return progress_end(&progress), false;
        conversion_divide(c);
#pragma omp parallel
        {
            WordEncoder encoder = tokenizer_encoder(&c->tokenizer);
#pragma omp for schedule(dynamic, 1)
            for (size_t i = 0; i < c->job_count; i++)
                (c->options->chat ? job_chat : job_encode)(c, &c->jobs[i], &encoder);
            word_encoder_close(&encoder);
        }
        for (size_t i = 0; i < c->job_count; i++)
            if (!(c->options->chat ? job_write_chat : job_write)(c, &c->jobs[i], error))
                return progress_end(&progress), false;
        progress_show(&progress, documents_taken(&c->documents));
    }
    progress_end(&progress);
    return interrupted || conversion_check(c, error);
}

// Whether the tokenizer splits a text at white space first, so that a long document can be cut there.
static bool tokenizer_splits(const Tokenizer* tokenizer) {
    const Rules* rules = tokenizer->rules;
    return rules && rules->split >= SPLIT_GPT2 && rules->prefix == PREFIX_NEVER && rules->normalizer_count == 0;
}

static bool conversion_run(Conversion* c, Error* error) {
    const Options* o = c->options;
    if (c->tokenizer.end_of_text < 0 && !o->chat)
        return fail_with(error, "%.600s names no end-of-text token to separate documents; name it as \"eos_token\" in "
                         "tokenizer_config.json next to it", o->tokenizer);
    if (!shard_set_may_replace(&c->set, error)) return false;
    if ((o->val == 0 || o->val == 1) && !shard_set_agrees(&c->set, o->val == 1, error)) return false;
    if (!documents_open(&c->documents, options_source(o), options_field(o), error)) return false;
    c->documents.skips = o->bad_lines == 1;
    c->documents.raw = o->chat != NULL;
    if (o->chat && !chat_rules_set(&c->rules, &c->tokenizer, o->tokenizer, error)) return false;
    c->rules.system = o->system;
    c->rules.turns = o->turns;
    c->rules.alpaca_text = o->alpaca_text;
    if (!o->special && c->tokenizer.rules) rules_split_special(c->tokenizer.rules);
    if (!tokenizer_splits(&c->tokenizer)) c->documents.piece_bytes = PIECE_MAX;
    return conversion_split(c, error) && conversion_find_duplicates(c, error) && conversion_tokenize(c, error);
}

// Publishes the report on duplicates; without --dedup, removes the report of earlier shards.
static bool conversion_publish_report(Conversion* c, Error* error) {
    char path[FILE_PATH_MAX];
    if (c->options->dedup) return file_end(&c->report, error);
    snprintf(path, sizeof path, "%s_duplicates.jsonl", c->options->out);
    return remove(path) == 0 || errno == ENOENT || fail_file(error, "remove", path);
}

static void conversion_print(const Conversion* c) {
    documents_report(&c->documents);
    if (c->options->chat) {
        chat_print(c);
        return;
    }
    uint64_t documents = c->read[0] + c->read[1], tokens = c->set.series[0].tokens + c->set.series[1].tokens;
    printf("%llu documents of %llu bytes, %.2f bytes per token\n", (unsigned long long)documents,
           (unsigned long long)c->bytes, (double)c->bytes / (double)tokens);
    if (c->replaced > 0)
        printf("%llu byte sequences that are not UTF-8 were read as U+FFFD\n", (unsigned long long)c->replaced);
    uint64_t empty = c->empty - c->documents.skipped;
    if (empty > 0) printf("%llu documents without text were left out\n", (unsigned long long)empty);
    if (c->options->dedup)
        say(stdout, "%s_duplicates.jsonl: %llu exact and %llu near duplicates were left out", c->options->out,
            (unsigned long long)c->duplicates[1], (unsigned long long)c->duplicates[0]);
}

static bool documents_to_shards(const Options* o, Error* error) {
    Conversion* c = (Conversion*)memory_allocate(sizeof *c);
    if (!c) return fail_with(error, "out of memory for %zu bytes", sizeof *c);
    c->options = o;
    c->report.file = -1;
    if (!tokenizer_open_with(&c->tokenizer, o->tokenizer, o->pattern, o->template_file, error)) {
        free(c);
        return false;
    }
    shard_set_begin(&c->set, o->out, &c->tokenizer, o->shard_tokens, o->entropy);
    bool ok = conversion_run(c, error);
    ok = publish(&c->set, ok, error) && conversion_publish_report(c, error);
    if (ok) conversion_print(c);
    conversion_free(c);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 7. Training
//
// Each thread counts the words of pieces in a table of its own. The number of threads does not change the tables' sum.

static bool words_count(WordTable* tables, size_t threads, const Unicode* unicode, Documents* documents, Batch* batch,
                        Error* error) {
    Progress progress = progress_begin("counting words", documents->size);
    bool ok = true;
    (void)threads;  // without OpenMP there is one
    while (ok && documents_next(documents, batch, error)) {
        if (batch->count == 0 || interrupted) {
            progress_end(&progress);
            return !interrupted || fail_with(error, "interrupted; nothing was written");
        }
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)threads)
        for (size_t i = 0; i < batch->count; i++) {
            const Piece* piece = &batch->pieces[i];
            Error why;
            if (word_table_add_text(&tables[thread_number()], unicode, batch->text + piece->start, piece->bytes, &why))
                continue;
#pragma omp critical
            ok = fail_with(error, "%s", why.text);
        }
        progress_show(&progress, documents_taken(documents));
    }
    return false;
}

static bool tokenizer_train(const Options* o, Error* error) {
    size_t threads = threads_count();
    Documents documents;
    Batch batch = {0};
    Bpe bpe = {0};
    double began = now_ms();
    if (!documents_open(&documents, options_source(o), options_field(o), error)) return false;
    documents.skips = o->bad_lines == 1;
    Unicode* unicode = unicode_open(error);
    WordTable* tables = (WordTable*)memory_allocate(threads * sizeof *tables);
    bool ok = unicode && (tables || fail_with(error, "out of memory for %zu threads; give fewer --threads", threads));
    ok = ok && words_count(tables, threads, unicode, &documents, &batch, error);
    for (size_t i = 1; ok && i < threads; i++) ok = word_table_merge(&tables[0], &tables[i], error);
    if (ok && tables[0].count == 0)
        ok = documents_fail_empty(&documents, options_source(o), error);
    double counted = now_ms();
    ok = ok && bpe_train(&bpe, &tables[0], o->vocabulary, error) && bpe_save(&bpe, o->out, error);
    if (ok)
        say(stdout, "%s/tokenizer.json: %zu tokens, of %zu different words; counted in %.1f s, merged in %.1f s",
            o->out, bpe.pieces.count + 1, tables[0].count, 1e-3 * (counted - began), 1e-3 * (now_ms() - counted));
    if (ok && bpe.pieces.count + 1 < o->vocabulary)
        printf("note: every word of the text is one token; for %llu tokens give more text\n",
               (unsigned long long)o->vocabulary);
    if (ok) documents_report(&documents);
    for (size_t i = 0; tables && i < threads; i++) word_table_close(&tables[i]);
    free(tables);
    free(unicode);
    bpe_free(&bpe);
    batch_free(&batch);
    documents_close(&documents);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 8. Main

static bool stream(const Options* o, Error* error) {
    Tokenizer tokenizer;
    if (o->show) return stream_show(o->show, o->tokenizer, o->pattern, o->at, o->tokens, error);
    if (!tokenizer_open(&tokenizer, o->tokenizer, o->pattern, error)) return false;
    if (!o->special && tokenizer.rules) rules_split_special(tokenizer.rules);
    bool ok = o->encode ? stream_encode(&tokenizer, error) : stream_decode(&tokenizer, error);
    tokenizer_close(&tokenizer);
    return ok;
}

int main(int argc, char** argv) {
    Options options;
    Error error;
    struct sigaction action = {.sa_handler = interrupt};
    threads_spin_briefly(argv);
    files_open_standard();
    if (flags_want_help(argc, argv)) {
        Flags flags = options_flags(&options);
        const char* title = "tokenize: converts texts to token shards; replaces existing shards of the same prefix\n";
        return flags_help("tokenize", title, &flags);
    }
    bool ok = options_read(&options, argc, argv, &error), usage = !ok;
    if (ok) threads_choose(options.threads, 1, false, stderr);
    if (ok && (options.encode || options.decode || options.show)) {
        ok = stream(&options, &error);
    } else if (ok) {
        sigaction(SIGINT, &action, NULL);
        sigaction(SIGTERM, &action, NULL);
        signal(SIGXFSZ, SIG_IGN);  // a write over the limit on file sizes then fails with a message
        ok = options.vocabulary ? tokenizer_train(&options, &error)
             : options.bytes    ? bytes_to_shards(&options, &error)
                                : documents_to_shards(&options, &error);
    }
    if (!ok) fprintf(stderr, "tokenize: %s\n", error.text);
    return ok ? 0 : usage ? 2 : 1;
}
