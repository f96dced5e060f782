// test_sft.c: fine-tuning on conversations: llmtrain/text/packing.h, the rows of data.h, documents.h in a model, and
// runs of the program on them.
//
//   make build/test_sft build/train-FP32 build/tokenize build/evaluate-FP32
//   build/test_sft [--train PATH] [--tokenize PATH] [--evaluate PATH]
//
//   1. packing    random sets of lengths against best-fit decreasing written as a search of all rows; what is left out
//                 and cut; the numbers of rows that TRL gives (dev/peers/packing.py)
//   2. rows       every document once in every epoch; each token, target, end and zero of a row; mixtures; validation
//   3. model      packed rows against each conversation alone: losses to the bit, gradients; generated text
//   4. epochs     the steps of --epochs against a count, and epoch in metrics.jsonl
//   5. programs   the same weights for every layout of ranks, after kills; val_loss and evaluate; batches; refusals;
//                 traces of bad sequences
//
// Documents in a test's shards carry their number in their first two tokens, so that a row says what it has.

#include "llmtrain/run/samples.h"
#include "llmtrain/text/generate.h"
#include "data/shards.h"
#include "pieces.h"
#include "small_model.h"

#include <math.h>

static Error error;
static Tokenizer tokenizer;
static const char *train, *tokenize, *evaluate;

static size_t draw(uint64_t seed, uint64_t number, size_t below) {
    return random_bits(seed, RANDOM_TEST, number, 0) % below;
}

// ------------------------------------------------------------------------------------------------
// 1. Packing

enum { GROUPS_MAX = 120 };
typedef enum { SET_MIXED, SET_NONE, SET_EQUAL, SET_LONG, SET_ONE_OVER, SET_SHORT, SET_PAIRS, SET_KINDS } SetKind;
static const char* const SET_NAMES[] = {"mixed", "none", "equal", "too long", "one token over", "short", "pairs"};

// Documents in memory as a .spans file has them, with 1 to 3 spans each that end in other places than the document.
typedef struct {
    SpanDocument documents[2 * GROUPS_MAX];
    TrainedSpan spans[6 * GROUPS_MAX];
    SpanFile file;
    uint64_t tokens;
} Made;

static void made_add(Made* m, uint32_t tokens, bool begins, SpanKind kind, uint64_t seed) {
    SpanFile* f = &m->file;
    SpanDocument d = {m->tokens, tokens, (uint32_t)(f->groups - !begins), (uint32_t)f->span_count, (uint32_t)kind};
    m->documents[f->document_count++] = d;
    f->groups += begins;
    size_t spans = 1 + draw(seed, 1, 3), at = 1;
    for (size_t s = 0; s < spans && at < tokens; s++) {
        uint32_t first = (uint32_t)(at + draw(seed, 2 + s, (tokens - at + 1) / 2 + 1));
        if (first >= tokens) first = tokens - 1;
        uint32_t n = (uint32_t)(1 + draw(seed, 5 + s, tokens - first));
        TrainedSpan span = {m->tokens + first, n, 1};
        m->spans[f->span_count++] = span;
        at = first + n;
    }
    m->tokens += tokens;
}

static size_t made_length(SetKind kind, size_t room, uint64_t seed) {
    switch (kind) {
        case SET_EQUAL: return max_size(2, room / 3);
        case SET_LONG: return room + 1 + draw(seed, 9, room);
        case SET_ONE_OVER: return room + 1;
        case SET_SHORT: return 2 + draw(seed, 9, max_size(room / 6, 1));
        case SET_PAIRS: return 2 + draw(seed, 9, max_size(2 * room / 3, 1));
        default: return 2 + draw(seed, 9, room + room / 5);
    }
}

static void made_fill(Made* m, SetKind kind, size_t room, uint64_t seed) {
    memset(m, 0, sizeof *m);
    m->file.documents = m->documents;
    m->file.spans = m->spans;
    size_t groups = kind == SET_NONE ? 0 : draw(seed, 0, GROUPS_MAX);
    for (size_t g = 0; g < groups; g++) {
        uint64_t own = seed * 1000 + g;
        bool pair = kind == SET_PAIRS && draw(own, 8, 2) == 0;
        made_add(m, (uint32_t)made_length(kind, room, own), true, pair ? SPAN_CHOSEN : SPAN_PLAIN, own);
        if (pair) made_add(m, (uint32_t)made_length(kind, room, own + 500), false, SPAN_REJECTED, own + 500);
    }
}

// How many tokens of a group are in a row, found token by token: all, or those up to the last one that fits and that
// ends a span; 0: it is left out.
static size_t group_kept(const SpanFile* f, size_t d, size_t end, size_t room, bool cuts) {
    size_t all = 0, kept = 0;
    for (size_t i = d; i < end; i++) all += f->documents[i].tokens;
    if (all <= room) return all;
    for (size_t n = 2; cuts && end == d + 1 && n <= room; n++)
        for (size_t s = f->documents[d].span; s < span_file_end(f, d); s++)
            if (f->spans[s].first + f->spans[s].tokens == f->documents[d].first + n) kept = n;
    return kept;
}

static int compare_falling(const void* a, const void* b) {
    size_t x = *(const size_t*)a, y = *(const size_t*)b;
    return (x < y) - (x > y);
}

// Best-fit decreasing as its definition says: each length, from the longest on, to the row with least room that has
// enough. left (n): the room left in each row; returns the number of rows.
static size_t best_fit(size_t* left, size_t* lengths, size_t n, size_t room) {
    size_t rows = 0;
    qsort(lengths, n, sizeof *lengths, compare_falling);
    for (size_t i = 0; i < n; i++) {
        size_t best = rows;
        for (size_t r = 0; r < rows; r++)
            if (left[r] >= lengths[i] && (best == rows || left[r] < left[best])) best = r;
        if (best == rows) left[rows++] = room;
        left[best] -= lengths[i];
    }
    return rows;
}

// Checks a packing of two files against a count of every group.
static void packing_check(const Packing* p, const Made* made, size_t room, bool pack, bool cuts, const char* name) {
    size_t lengths[2 * GROUPS_MAX], left[2 * GROUPS_MAX], found[2 * GROUPS_MAX], n = 0, dropped = 0, cut = 0;
    size_t longest = 0, tokens = 0, place = 0;
    static unsigned char times[2][2 * GROUPS_MAX];
    memset(times, 0, sizeof times);
    for (size_t row = 0; row < p->rows; row++) {
        size_t used = 0;
        expect(p->first[row] < p->first[row + 1], "%s: row %zu is empty", name, row);
        for (size_t i = p->first[row]; i < p->first[row + 1]; i++, place++) {
            const PackedGroup* g = &p->groups[i];
            times[g->shard][g->document]++;
            used += g->tokens;
        }
        expect(used <= room, "%s: row %zu has %zu tokens of %zu", name, row, used, room);
        found[row] = room - min_size(used, room);
    }
    expect(place == p->group_count, "%s: rows have %zu of %zu groups", name, place, p->group_count);
    place = 0;
    for (size_t m = 0; m < 2; m++) {
        const SpanFile* f = &made[m].file;
        for (size_t d = 0, end; d < f->document_count; d = end) {
            size_t all = 0;
            for (end = d; end < f->document_count && f->documents[end].group == f->documents[d].group; end++)
                all += f->documents[end].tokens;
            size_t kept = group_kept(f, d, end, room, cuts);
            expect(times[m][d] == (kept > 0), "%s: group %zu is in %d rows", name, d, times[m][d]);
            for (size_t i = d + 1; i < end; i++) expect(times[m][i] == 0, "%s: a pair begins at %zu", name, i);
            longest = max_size(longest, all);
            dropped += kept == 0;
            cut += kept > 0 && kept < all;
            tokens += kept;
            if (kept > 0 && !pack && place < p->group_count) {
                const PackedGroup* g = &p->groups[place++];
                expect(g->shard == m && g->document == d && g->tokens == kept, "%s: row %zu", name, place - 1);
            }
            if (kept > 0) lengths[n++] = kept;
        }
    }
    expect(p->group_count == n && p->dropped == dropped && p->cut == cut && p->longest == longest &&
           p->tokens == tokens, "%s: %zu groups, %zu dropped, %zu cut, the longest of %u, %llu tokens, not %zu, %zu, "
           "%zu, %zu, %zu", name, p->group_count, p->dropped, p->cut, p->longest, (unsigned long long)p->tokens, n,
           dropped, cut, longest, tokens);
    size_t rows = pack ? best_fit(left, lengths, n, room) : n;
    if (!expect(p->rows == rows, "%s: %zu rows, not %zu", name, p->rows, rows) || !pack) return;
    qsort(left, rows, sizeof *left, compare_falling);
    qsort(found, rows, sizeof *found, compare_falling);
    expect(memcmp(left, found, rows * sizeof *left) == 0, "%s: rows are filled in another way", name);
}

// The groups of each row are those that were asked for, with their lengths.
static void packing_lengths(const Packing* p, const Made* made, size_t room, bool cuts, const char* name) {
    for (size_t i = 0; i < p->group_count; i++) {
        const PackedGroup* g = &p->groups[i];
        const SpanFile* f = &made[g->shard].file;
        size_t kept = group_kept(f, g->document, group_end(f, g->document), room, cuts);
        expect(g->tokens == kept, "%s: group %u has %u tokens of %zu", name, g->document, g->tokens, kept);
    }
}

static void test_packing(void) {
    enum { SETS = 400 };
    static Made made[2];
    size_t rows = 0;
    for (size_t kind = 0; kind < SET_KINDS; kind++) {
        for (size_t set = 0; set < SETS; set++) {
            uint64_t seed = kind * SETS + set + 1;
            size_t room = set % 20 == 0 ? 1 : 1 + draw(seed, 7, set % 3 == 0 ? 20 : 200);
            bool pack = set % 7 != 3, cuts = set % 2;
            const char* name = text_of("%s, room %zu, --pack %s, --too-long %s", SET_NAMES[kind], room,
                                       pack ? "on" : "off", cuts ? "cut" : "drop");
            SpanFile files[2];
            Packing p, again;
            for (size_t m = 0; m < 2; m++) {
                made_fill(&made[m], (SetKind)kind, room, 2 * seed + m);
                files[m] = made[m].file;
            }
            bool ok = packing_make(&p, files, 0, 2, room, pack, cuts ? TOO_LONG_CUT : TOO_LONG_DROP, &error) &&
                      packing_make(&again, files, 0, 2, room, pack, cuts ? TOO_LONG_CUT : TOO_LONG_DROP, &error);
            need(ok, "%s", error.text);
            packing_check(&p, made, room, pack, cuts, name);
            packing_lengths(&p, made, room, cuts, name);
            expect(p.rows == again.rows && memcmp(p.groups, again.groups, p.group_count * sizeof *p.groups) == 0,
                   "%s: another order the second time", name);
            rows += p.rows;
            packing_free(&p);
            packing_free(&again);
        }
        verdict("packing: %d sets of lengths, %s: the rows of best-fit decreasing", SETS, SET_NAMES[kind]);
    }
    check(rows > 20000, "packing: %zu rows in all", rows);
}

// The fixture that dev/peers/packing.py writes: a line has the room, TRL's number of rows, and the lengths.
static void test_packing_of_peer(const char* fixture) {
    static Made made;
    char* text = text_read(fixture, NULL);
    char* rest = text;
    size_t sets = 0;
    for (char* line; (line = strsep(&rest, "\n")) != NULL;) {
        if (line[0] == '#' || line[0] == 0) continue;
        char* at = line;
        size_t room = strtoul(at, &at, 10), expected = strtoul(at, &at, 10), n = 0;
        memset(&made, 0, sizeof made);
        made.file.documents = made.documents;
        made.file.spans = made.spans;
        for (char* end; n < GROUPS_MAX; at = end, n++) {
            size_t length = strtoul(at, &end, 10);
            if (end == at) break;
            made_add(&made, (uint32_t)length, true, SPAN_PLAIN, n);
        }
        Packing p;
        need(packing_make(&p, &made.file, 0, 1, room, true, TOO_LONG_DROP, &error), "%s", error.text);
        expect(p.rows == expected && p.dropped == 0 && n > 0, "set %zu: %zu rows, %zu of TRL", sets, p.rows, expected);
        packing_free(&p);
        sets++;
    }
    expect(sets == 20, "%zu sets", sets);
    verdict("packing: as many rows as TRL's pack_dataset(strategy=\"bfd\")");
    free(text);
}

// ------------------------------------------------------------------------------------------------
// 2. Rows

enum { V = 423, DOCUMENTS = 90, LENGTH_MAX = 70, ID = 30 };

// A document as the test has made it.
typedef struct {
    size_t length;
    int32_t tokens[LENGTH_MAX];
    bool trains[LENGTH_MAX];  // the token is the target of the one before it
    bool ends[LENGTH_MAX];    // it is the last of its span
} Document;

static Document documents[DOCUMENTS];

static void document_make(Document* d, size_t number) {
    memset(d, 0, sizeof *d);
    d->length = 4 + draw(number, 0, LENGTH_MAX - 3);
    for (size_t i = 0; i < d->length; i++) d->tokens[i] = 100 + (int32_t)draw(number, 10 + i, V - 101);
    d->tokens[0] = 1 + (int32_t)(number / ID);
    d->tokens[1] = 1 + (int32_t)(number % ID);
    for (size_t i = 1; i < d->length;) {  // spans of random lengths with gaps; the first token is in none
        i += draw(number, 100 + i, 5);
        size_t n = 1 + draw(number, 200 + i, 9);
        for (size_t k = i; k < min_size(i + n, d->length); k++) d->trains[k] = true;
        if (i < d->length) d->ends[min_size(i + n, d->length) - 1] = true;
        i += n + 1;
    }
    size_t trained = 0;
    for (size_t i = 0; i < d->length; i++) trained += d->trains[i];
    // Some answers end with token 0, which also fills rows: it is trained there all the same.
    if (number % 3 == 0) d->tokens[d->length - 1] = 0;
    if (trained == 0 || number % 3 == 0) d->trains[d->length - 1] = d->ends[d->length - 1] = true;
}

// Writes documents [first, end) to shards PREFIX_train_*.bin of few tokens each.
static void write_documents(const char* prefix, size_t first, size_t end) {
    static ShardSet set;
    shard_set_begin(&set, prefix, &tokenizer, 800, 0);
    for (size_t number = first; number < end; number++) {
        Document* d = &documents[number];
        TrainedSpan spans[LENGTH_MAX];
        size_t count = 0;
        document_make(d, number);
        for (size_t i = 0; i < d->length; i++) {
            if (!d->trains[i]) continue;
            if (!d->trains[i - 1] || d->ends[i - 1]) {
                TrainedSpan span = {i, 0, 1};
                spans[count++] = span;
            }
            spans[count - 1].tokens++;
        }
        need(series_begin_group(&set.series[0], d->length, &error) &&
                 series_add_document(&set.series[0], d->tokens, d->length, spans, count, SPAN_PLAIN, true, &error),
             "%s", error.text);
    }
    need(shard_set_publish(&set, &error), "%s", error.text);
}

// The tokens of a document in rows of T + 1.
static size_t document_kept(const Document* d, size_t T, bool cuts) {
    size_t kept = 0;
    if (d->length <= T + 1) return d->length;
    for (size_t i = 0; cuts && i < T + 1; i++) if (d->ends[i]) kept = i + 1;
    return kept;
}

// Reads a row by the numbers in it: all of its tokens and targets. times: of each document, how often it was found.
static void row_check(const int32_t* tokens, const int32_t* targets, size_t* times, size_t T, bool cuts,
                      const char* name) {
    size_t t = 0, in_row = 0;
    while (t < T && tokens[t] > 0) {
        size_t number = (size_t)(tokens[t] - 1) * ID + (size_t)(t + 1 < T ? tokens[t + 1] : targets[t]) - 1;
        if (!expect(tokens[t] <= DOCUMENTS / ID && number < DOCUMENTS, "%s: no document at %zu", name, t)) return;
        const Document* d = &documents[number];
        size_t n = document_kept(d, T, cuts);
        times[number]++;
        in_row++;
        for (size_t i = 0; i < n && t + i < T; i++) {
            int32_t target = i + 1 == n ? TARGET_ENDS : d->trains[i + 1] ? d->tokens[i + 1] : TARGET_NONE;
            expect(tokens[t + i] == d->tokens[i], "%s: token %zu of document %zu is %d", name, i, number,
                   tokens[t + i]);
            expect(targets[t + i] == target, "%s: target %zu of document %zu is %d, not %d", name, i, number,
                   targets[t + i], target);
        }
        if (!expect(t + n <= T + 1, "%s: document %zu ends outside its row", name, number)) return;
        t += n;
    }
    expect(in_row > 0, "%s: an empty row", name);
    for (; t < T; t++) expect(tokens[t] == 0 && targets[t] == TARGET_NONE, "%s: what fills a row at %zu", name, t);
}

// Every document `times` times, or up to `more` times more often, if it has a part in rows of T + 1.
static void times_check(const size_t* found, size_t first, size_t end, size_t times, size_t more, size_t T, bool cuts,
                        const char* name) {
    for (size_t i = first; i < end; i++) {
        bool kept = document_kept(&documents[i], T, cuts) > 0;
        expect(kept ? found[i] >= times && found[i] <= times + more : found[i] == 0,
               "%s: document %zu is there %zu times, not %zu", name, i, found[i], times);
    }
}

static void open_packed(Dataset* data, const char* patterns, size_t T, bool pack, bool cuts) {
    need(dataset_open(data, patterns, &error) &&
             dataset_pack(data, T, pack, cuts ? TOO_LONG_CUT : TOO_LONG_DROP, &error) &&
             dataset_suffices(data, T, &error), "%s", error.text);
    data->mask_documents = true;
    data->end_of_text = -1;
}

// Epochs, and one validation, of one way to pack.
static void test_rows_of(size_t T, bool pack, bool cuts) {
    enum { EPOCHS = 3, B = 4 };
    const char* name = text_of("T=%zu, --pack %s, --too-long %s", T, pack ? "on" : "off", cuts ? "cut" : "drop");
    int32_t tokens[B * 2 * LENGTH_MAX], targets[B * 2 * LENGTH_MAX];
    size_t all[DOCUMENTS] = {0}, order[2][DOCUMENTS];
    Dataset data;
    open_packed(&data, "c_train_*.bin", T, pack, cuts);
    size_t rows = part_samples(&data, data.parts, T);
    expect(rows == data.packed->rows && rows <= DOCUMENTS && data.shard_count > 2, "%s: %zu rows", name, rows);
    for (size_t epoch = 0; epoch < EPOCHS; epoch++) {
        size_t own[DOCUMENTS] = {0};
        for (size_t i = 0; i < rows; i++) {
            Window window = dataset_sample(&data, 7, epoch * rows + i, T);
            need(window_read(tokens, targets, &data, window, V, T, &error), "%s", error.text);
            row_check(tokens, targets, own, T, cuts, name);
            expect(shard_token(&data.shards[window.shard], window.start) == (uint32_t)tokens[0] &&
                   shard_token(&data.shards[window.shard], window.start + 1) == (uint32_t)tokens[1],
                   "%s: a row is said to be elsewhere than its first document", name);
            if (epoch < 2) order[epoch][i] = window.row;
        }
        times_check(own, 0, DOCUMENTS, 1, 0, T, cuts, name);
        for (size_t i = 0; i < DOCUMENTS; i++) all[i] += own[i];
    }
    times_check(all, 0, DOCUMENTS, EPOCHS, 0, T, cuts, name);
    expect(memcmp(order[0], order[1], rows * sizeof(size_t)) != 0, "%s: two epochs have one order", name);
    size_t seen[DOCUMENTS] = {0}, windows = dataset_windows(&data, T, 3);
    bool in_order = true;
    expect(windows == rows, "%s: %zu windows", name, windows);
    for (size_t first = 0; first < windows; first += B) {
        need(dataset_batch(tokens, targets, &data, first, V, B, T, 3, &error), "%s", error.text);
        for (size_t b = 0; b < B; b++) {
            if (first + b < windows) {
                row_check(tokens + b * T, targets + b * T, seen, T, cuts, name);
                in_order = in_order && dataset_window(&data, first + b, T, 3).row == first + b;
            }
            for (size_t t = 0; t < T && first + b >= windows; t++)
                expect(tokens[b * T + t] == 0 && targets[b * T + t] == TARGET_NONE, "%s: a row past the last", name);
        }
    }
    times_check(seen, 0, DOCUMENTS, 1, 0, T, cuts, name);
    expect(!in_order, "%s: validation begins with the longest documents", name);
    dataset_close(&data);
}

// A mixture of conversations and text: shares as the weights say, each part in its own way.
static void test_rows_of_mixture(void) {
    enum { T = 40 };
    int32_t tokens[T], targets[T];
    size_t times[DOCUMENTS] = {0}, packed = 0;
    Dataset data;
    put_shard("text.bin", V, 5000, 3);
    open_packed(&data, "c_train_*.bin:3,text.bin:1", T, true, false);
    size_t rows = data.packed[0].rows;
    expect(data.part_count == 2 && data.packed[1].rows == 0 && part_samples(&data, &data.parts[1], T) > 50, "parts");
    for (size_t i = 0; i < MIXTURE_CYCLE; i++) {
        Window window = dataset_sample(&data, 7, i, T);
        need(window_read(tokens, targets, &data, window, V, T, &error), "%s", error.text);
        if (window.packed) row_check(tokens, targets, times, T, false, "a mixture");
        for (size_t t = 0; t < T && !window.packed; t++)
            expect(tokens[t] == (int32_t)shard_token(&data.shards[window.shard], window.start + t) &&
                   targets[t] == (int32_t)shard_token(&data.shards[window.shard], window.start + t + 1), "text at %zu",
                   t);
        packed += window.packed != NULL;
    }
    expect(packed == MIXTURE_CYCLE / 4 * 3, "%zu rows", packed);
    times_check(times, 0, DOCUMENTS, packed / rows, packed % rows ? 1 : 0, T, false, "a mixture");
    dataset_close(&data);
    open_packed(&data, "c_train_*.bin:1,d_train_*.bin:1", T, true, true);
    size_t first = data.packed[0].rows, second = data.packed[1].rows;
    expect(first > 2 && second > 2 && data.packed[1].groups[0].shard >= data.parts[1].first, "two parts");
    memset(times, 0, sizeof times);
    for (size_t i = 0; i < MIXTURE_CYCLE; i++) {
        Window window = dataset_sample(&data, 7, i, T);
        if (window.packed != &data.packed[1]) continue;
        need(window_read(tokens, targets, &data, window, V, T, &error), "%s", error.text);
        row_check(tokens, targets, times, T, true, "two parts");
    }
    packed = MIXTURE_CYCLE / 2;
    times_check(times, 0, DOCUMENTS / 3, packed / second, packed % second ? 1 : 0, T, true, "two parts");
    dataset_close(&data);
    verdict("rows: a mixture of conversations and text, and of two sets of conversations");
    expect_refusal(dataset_open(&data, "c_train_*.bin,text.bin", &error), &error, "has conversations (tokenize --chat)",
                   "conversations and text as one part");
    expect_refusal(dataset_open(&data, "c_train_*.bin,text.bin:1", &error), &error, "has a weight", "one weight");
    verdict("rows: one part of conversations and text is refused");
}

static void test_rows(void) {
    static const size_t lengths[] = {LENGTH_MAX - 1, LENGTH_MAX, 2 * LENGTH_MAX - 3, 40, 25};
    write_documents("c", 0, DOCUMENTS);
    write_documents("d", 0, DOCUMENTS / 3);
    for (size_t i = 0; i < COUNT_OF(lengths); i++) {
        for (int way = 0; way < 4; way++) test_rows_of(lengths[i], way % 2, way / 2);
        verdict("rows of %zu tokens: each document once in an epoch, every token and target, packed or not, cut or not",
                lengths[i]);
    }
    test_rows_of_mixture();
    int32_t tokens[LENGTH_MAX], targets[LENGTH_MAX], most = 0;
    Dataset data;
    open_packed(&data, "c_train_*.bin", LENGTH_MAX - 1, true, false);
    for (size_t i = 0; i < DOCUMENTS; i++)
        for (size_t k = 0; k < documents[i].length; k++)
            most = documents[i].tokens[k] > most ? documents[i].tokens[k] : most;
    size_t refused = 0, rows = data.packed->rows;
    for (int32_t vocabulary = most; vocabulary <= most + 1; vocabulary++)
        for (size_t i = 0; i < rows; i++) {
            bool ok = window_read(tokens, targets, &data, dataset_sample(&data, 7, i, LENGTH_MAX - 1), vocabulary,
                                  LENGTH_MAX - 1, &error);
            if (!ok) expect_refusal(ok, &error, text_of("token %d at position", most), "a token");
            refused += !ok && vocabulary == most;
            expect(ok || vocabulary == most, "%s", error.text);
        }
    expect(refused > 0 && refused < rows, "%zu rows of %zu are refused", refused, rows);
    dataset_close(&data);
    need(dataset_open(&data, "c_train_*.bin", &error) && dataset_pack(&data, 2, true, TOO_LONG_DROP, &error), "%s",
         error.text);
    expect_refusal(dataset_suffices(&data, 2, &error), &error, "no conversation of c_train_000000.bin fits a sequence "
                   "of 2 tokens", "rows of 2");
    dataset_close(&data);
    verdict("rows: a token outside the vocabulary, and rows that nothing fits, are refused");
}

// ------------------------------------------------------------------------------------------------
// 3. Model

enum { MT = 24, MB = 4, MN = MB * MT };

// The lengths of the documents of each row, in tokens: a row that is exactly full, one whose last document ends in the
// last column, one that is filled up, and one of a single document.
static const size_t ROWS[MB][4] = {{9, 2, 14, 0}, {5, 12, 7, 0}, {3, 8, 0, 0}, {25, 0, 0, 0}};

// A document of the batch: where it begins, and how many of its tokens the model reads.
typedef struct { size_t first, inputs; } Part;

// Random tokens and targets of the rows; parts: their documents. Returns how many there are.
static size_t batch_make(int32_t* tokens, int32_t* targets, Part* parts, size_t vocabulary) {
    size_t count = 0;
    random_tokens(tokens, MN, vocabulary, 41);
    random_tokens(targets, MN, vocabulary, 42);
    for (size_t b = 0; b < MB; b++) {
        size_t t = 0;
        for (size_t i = 0; i < 4 && ROWS[b][i] > 0; i++) {
            size_t n = ROWS[b][i], inputs = min_size(n, MT - t);
            Part part = {b * MT + t, inputs};
            parts[count++] = part;
            for (size_t k = 0; k < inputs; k++) {
                if (k + 1 < inputs) targets[b * MT + t + k] = tokens[b * MT + t + k + 1];
                if ((k + t) % 3 == 1) targets[b * MT + t + k] = TARGET_NONE;
            }
            if (t + n <= MT) targets[b * MT + t + n - 1] = TARGET_ENDS;
            t += n;
        }
        for (; t < MT; t++) tokens[b * MT + t] = 0, targets[b * MT + t] = TARGET_NONE;
    }
    return count;
}

static void test_model_of(Family family) {
    Config c = small_config(family);
    ModelOptions options = small_options(MB, MT);
    Model packed, alone;
    int32_t tokens[MN], targets[MN];
    float losses[MN], own[MT], *hidden = (float*)memory_allocate(MN * c.channels * sizeof(float));
    float* expected = (float*)memory_allocate(MN * c.channels * sizeof(float));
    Part parts[4 * MB];
    size_t count = batch_make(tokens, targets, parts, c.vocab), trained = targets_count(targets, MN), scored = 0;
    small_create(&alone, &c, small_options(1, MT), 5);
    options.mask_documents = true;
    options.end_of_text = -1;
    small_create(&packed, &c, options, 5);
    model_losses(&packed, tokens, targets, MB, MT);
    device_download(losses, packed.activations->losses, sizeof losses, packed.stream);
    floats_download(hidden, packed.activations->hidden, MN * c.channels, &packed);
    for (size_t i = 0; i < count; i++) {
        size_t first = parts[i].first, n = parts[i].inputs;
        model_losses(&alone, tokens + first, targets + first, 1, n);
        device_download(own, alone.activations->losses, n * sizeof(float), alone.stream);
        floats_download(expected, alone.activations->hidden, n * c.channels, &alone);
        expect(memcmp(own, losses + first, n * sizeof(float)) == 0, "losses of document %zu", i);
        expect(memcmp(expected, hidden + first * c.channels, n * c.channels * sizeof(float)) == 0,
               "hidden states of document %zu", i);
        for (size_t t = 0; t < n; t++) scored += own[t] > 0;
    }
    expect(scored == trained && trained > 30, "%zu of %zu targets have a loss", scored, trained);
    verdict("%s: the losses of packed rows are those of each conversation alone, to the bit", family_name(family));

    size_t P = packed.parameters.flat_size;
    float *grads = (float*)memory_allocate(P * sizeof(float)), *part = (float*)memory_allocate(P * sizeof(float));
    double *sum = (double*)memory_allocate(P * sizeof(double)), loss = 0;
    double mean = batch_gradients(&packed, NULL, tokens, targets, MB, MT);
    device_download(grads, packed.flat.grads, P * sizeof(float), packed.stream);
    for (size_t i = 0; i < count; i++) {
        size_t first = parts[i].first, n = parts[i].inputs, of_it = targets_count(targets + first, n);
        if (of_it == 0) continue;
        loss += (double)of_it * batch_gradients(&alone, NULL, tokens + first, targets + first, 1, n);
        device_download(part, alone.flat.grads, P * sizeof(float), alone.stream);
        for (size_t e = 0; e < P; e++) sum[e] += (double)of_it * alone.flat.mean_factor * (double)part[e];
    }
    check_bound(fabs(mean / (loss / (double)trained) - 1), 1e-6, "%s: the loss of the step", family_name(family));
    for (size_t i = 0; i < packed.parameters.count; i++) {
        const Tensor* t = &packed.parameters.tensors[i];
        double worst = 0, largest = 0;
        for (size_t e = t->offset; e < t->offset + tensor_elements(t); e++) {
            double exact = sum[e] / (double)trained;
            worst = fmax(worst, fabs((double)grads[e] * packed.flat.mean_factor - exact));
            largest = fmax(largest, fabs(exact));
        }
        expect(largest > 0 && worst <= 2e-6 * largest, "%s: %g of %g", t->name, worst, largest);
    }
    verdict("%s: the gradients of packed rows are those of the conversations, within 2e-6 of the largest",
            family_name(family));
    for (size_t i = 0; i < MN; i++) targets[i] = TARGET_NONE;
    mean = batch_gradients(&packed, NULL, tokens, targets, MB, MT);
    device_download(grads, packed.flat.grads, P * sizeof(float), packed.stream);
    size_t zeros = 0;
    for (size_t e = 0; e < P; e++) zeros += grads[e] == 0;
    expect(mean == 0 && zeros == P, "nothing to train: loss %g, %zu of %zu gradients are 0", mean, zeros, P);
    verdict("%s: a step without a trained token has the loss 0, and no gradient", family_name(family));
    free(hidden);
    free(expected);
    free(grads);
    free(part);
    free(sum);
    model_free(&packed);
    model_free(&alone);
}

// A model that masks documents writes texts as one that does not: also after an end of text, positions go on.
static void test_generated(Family family) {
    enum { PROMPT = 6, TOTAL = 40 };
    Config c = small_config(family);
    const SamplingOptions sampling[] = {{.temperature = 1, .top_p = 1, .seed = 3, .repetition_penalty = 1},
                                        {.temperature = 0, .top_p = 1, .seed = 3, .repetition_penalty = 1}};
    int32_t prompt[PROMPT], texts[3][2][TOTAL];
    random_tokens(prompt, PROMPT, c.vocab, 8);
    for (int masks = 0; masks < 3; masks++) {
        Model model;
        ModelOptions options = small_options(3, 4);
        options.training = false;
        options.mask_documents = masks > 0;
        options.end_of_text = masks == 2 ? prompt[2] : -1;
        small_create(&model, &c, options, 2);
        for (int s = 0; s < 2; s++) {
            Generator g;
            need(generator_open(&g, &model, &sampling[s], 1, TOTAL, &error), "%s", error.text);
            generator_append(&g, prompt, PROMPT);
            for (int i = PROMPT; i < TOTAL; i++) generator_step(&g);
            memcpy(texts[masks][s], g.tokens, sizeof texts[masks][s]);
            generator_close(&g);
        }
        expect(memcmp(texts[masks], texts[0], sizeof texts[0]) == 0, "masks %d: other text", masks);
        model_free(&model);
    }
    verdict("%s: a model that masks documents writes what one that does not writes", family_name(family));
}

static void test_model(void) {
    for (Family family = FAMILY_GPT2; family <= FAMILY_LLAMA; family++) {
        test_model_of(family);
        test_generated(family);
    }
}

// ------------------------------------------------------------------------------------------------
// 4. Epochs

static Program job;

// Runs a program with variables (environment_set), or NULL; returns its exit code, and leaves its output in `job`.
static int run_with(const char* variables, const char* program, const char* arguments) {
    return program_execute(&job, program, arguments, become_alone, variables);
}

static bool run(const char* program, const char* arguments) {
    bool good = run_with(NULL, program, arguments) == 0;
    if (!good) program_print(&job, arguments);
    return expect(good, "%s fails", arguments);
}

// The program ends with this exit code and these words.
static void run_says(int code, const char* says, const char* program, const char* arguments) {
    int found = run_with(NULL, program, arguments);
    const char* text = job.text[code != 0] ? job.text[code != 0] : "";
    expect(found == code && strstr(text, says), "%s: exit code %d: '%s' is not in '%s'", arguments, found, says, text);
}

enum { T = 96, SEED = 1337, STEP_SAMPLES = 8, STEPS = 5, LINES = 500 };  // of the runs
#define SIZES "--layers 2 --heads 4 --channels 32 --ffn 64 --warmup 0 "
#define MODEL SIZES "--seq 96 --threads 1 --lr 3e-3 "
#define DATA "--data x_train_*.bin "

// The weights of a run's last checkpoint.
static uint64_t run_hash(const char* name, int step) {
    uint64_t hash = weights_hash(text_of("%s/step_%08d", name, step), &error);
    expect(hash != 0, "%s: %s", name, error.text);
    return hash;
}

// Conversations of one to three turns, some of which are longer than a row.
static void write_conversations(const char* path, size_t count) {
    static const char words[] = "the cat sat on a mat and then it was good in the morning, of which it said so. ";
    FILE* file = fopen(path, "wbe");
    need(file != NULL, "%s", path);
    for (size_t i = 0; i < count; i++) {
        size_t turns = 1 + draw(i, 0, 3);
        fprintf(file, "{\"messages\": [");
        for (size_t k = 0; k < 2 * turns; k++)
            fprintf(file, "%s{\"role\": \"%s\", \"content\": \"%.*s\"}", k ? ", " : "", k % 2 ? "assistant" : "user",
                    (int)(3 + draw(i, 1 + k, k % 2 ? 60 : 20)), words + draw(i, 20 + k, 15));
        fprintf(file, "]}\n");
    }
    fclose(file);
}

// The steps of --epochs E = tenths / 10: the fewest that read rows * E samples, counted.
static uint64_t steps_counted(uint64_t tenths, uint64_t rows, uint64_t per_step) {
    uint64_t steps = 0;
    while (10 * steps * per_step < tenths * rows) steps++;
    return steps;
}

static void test_epochs(void) {
    static Run of_test;
    Dataset data;
    open_packed(&data, "x_train_*.bin", T, true, false);
    size_t rows = data.packed->rows;
    of_test.train = data;
    for (size_t n = 1; n < 200; n++) {
        Packing packed = {.rows = n};
        of_test.train.packed = &packed;
        for (uint64_t per_step = 1; per_step < 50; per_step += 6)
            for (uint64_t tenths = 1; tenths <= 40; tenths++) {
                SampleOptions o = {.epochs = (double)tenths / 10};
                uint64_t steps = 0, expected = steps_counted(tenths, n, per_step);
                bool ok = samples_count_steps(&steps, &of_test, &o, T, per_step, &error);
                expect(ok && steps == expected, "%zu rows, %llu a step, --epochs %g: %llu steps, not %llu", n,
                       (unsigned long long)per_step, o.epochs, (unsigned long long)steps,
                       (unsigned long long)expected);
            }
    }
    verdict("--epochs: the fewest steps that read every row so often, for any number of rows and samples in a step");
    dataset_close(&data);

    static const struct { int batch, total, ranks; double epochs; } cases[] = {
        {2, 0, 1, 1}, {1, 8, 2, 0.7}, {4, 16, 2, 1.5}, {3, 12, 1, 2}};
    double epoch[200], steps[200];
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        int batch = cases[i].batch, ranks = cases[i].ranks, per_step = cases[i].total ? cases[i].total : batch * ranks;
        remove_tree("e");
        if (!run(train, text_of(DATA "--out e " MODEL "--batch %d --total-batch %d --ranks %d --epochs %g", batch,
                                cases[i].total * T, ranks, cases[i].epochs))) continue;
        size_t lines = log_numbers(epoch, 200, "e", "epoch"), expected =
            (size_t)steps_counted((uint64_t)(10 * cases[i].epochs + 0.5), rows, (uint64_t)per_step);
        log_numbers(steps, 200, "e", "step");
        expect(lines == expected && steps[lines - 1] == (double)expected,
               "--batch %d, %d samples a step, %d ranks: %zu steps, not %zu", batch, per_step, ranks, lines, expected);
        expect(strstr(job.text[0], text_of("step %zu/%zu", lines, lines)) ||
               strstr(job.text[0], text_of(" %zu/%zu |", lines, lines)), "the console: %s", job.text[0]);
        for (size_t k = 0; k < lines; k++)
            expect(fabs(epoch[k] - (double)((k + 1) * (size_t)per_step) / (double)rows) < 1e-12,
                   "epoch of step %zu: %g", k + 1, epoch[k]);
    }
    verdict("--epochs: runs of several --batch, --total-batch and --ranks end there, and metrics.jsonl has the epoch");

    remove_tree("e");
    run(train, DATA "--out e " MODEL "--batch 8 --epochs 0.5");
    run(train, DATA "--out e " MODEL "--batch 8 --epochs 1 --resume");
    size_t all = (size_t)steps_counted(10, rows, 8);
    expect(log_numbers(steps, 200, "e", "step") == all && steps[all - 1] == (double)all, "more epochs: %zu steps", all);
    verdict("--epochs: a run that is done goes on with more");
    remove_tree("e");
    run(train, "--data x_train_*.bin:1,text.bin:2 --out e " MODEL "--batch 2 --steps 2");
    expect(log_numbers(epoch, 2, "e", "epoch") == 2 && isnan(epoch[0]) && isnan(epoch[1]), "a mixture has an epoch");
    remove_tree("e");
    run(train, "--data text.bin --out e " MODEL "--batch 2 --epochs 1");
    size_t lines = log_numbers(epoch, 2, "e", "epoch");
    expect(lines == 2 && epoch[0] == 2.0 / 51, "text: %zu steps, epoch %g", lines, epoch[0]);
    run_says(2, "--epochs and --steps both say when the run ends; leave one", train, DATA MODEL "--epochs 2 --steps 9");
    run_says(2, "--epochs is not for a mixture, whose parts end at different times; give --steps", train,
             "--data x_train_*.bin:1,text.bin:2 " MODEL "--epochs 2");
    run_says(2, "--epochs counts the samples of --data; give it, or --steps", train,
             MODEL "--vocab 99 --plan --epochs 2");
    run_says(2, "no training data: give --data", train, MODEL "--epochs 2");
    run_says(0, "", train, DATA MODEL "--plan --epochs 2");
    run_says(2, "no conversation of x_train_000000.bin fits a sequence of 3 tokens", train, DATA SIZES
             "--seq 3 --epochs 1");
    verdict("--epochs with --steps, a mixture, no data, --plan; of text; a mixture has no epoch");
}

// ------------------------------------------------------------------------------------------------
// 5. Programs

// A run of steps of STEP_SAMPLES rows, which validates every STEPS steps.
static const char* packed_run_of(const char* name, int steps, const char* more) {
    return text_of(DATA "--val x_val_*.bin --out %s " SIZES "--seq %d --total-batch %d --steps %d --val-every %d %s",
                   name, T, STEP_SAMPLES * T, steps, STEPS, more);
}

static const char* packed_run(const char* name, const char* more) {
    return packed_run_of(name, STEPS, text_of("--threads 1 --lr 3e-3 %s", more));
}

#define GPT2_PARTS "--family gpt2 --batch 2 --leaves 2 --row-leaves 2 --clip 0.5 "
#define LLAMA_PARTS "--family llama --kv-heads 2 --kv-copies 2 --batch 2 --leaves 2 --row-leaves 2 --clip 0.5 "

static void test_layouts(void) {
    static const struct { const char *family, *flags; } layouts[] = {
        {GPT2_PARTS, "--ranks 2 --zero 1"}, {GPT2_PARTS, "--ranks 4 --zero 2"}, {GPT2_PARTS, "--ranks 2 --cp 2"},
        {GPT2_PARTS, "--ranks 2 --tp 2"}, {GPT2_PARTS, "--ranks 2 --pp 2"},
        {LLAMA_PARTS, "--ranks 4 --zero 3"}, {LLAMA_PARTS, "--ranks 4 --tp 2 --cp 2"},
        {LLAMA_PARTS, "--ranks 4 --pp 2 --cp 2 --recompute block"}};
    double loss[2], val[2];
    for (int family = 0; family < 2; family++) {
        const char* parts = family ? LLAMA_PARTS : GPT2_PARTS;
        remove_tree("one");
        run(train, packed_run("one", text_of("%s --reduce exact", parts)));
        uint64_t one = run_hash("one", STEPS);
        double losses[2][STEPS] = {{0}};
        expect(log_numbers(losses[0], STEPS, "one", "loss") == STEPS && losses[0][4] < losses[0][0], "no learning");
        log_numbers(losses[1], STEPS, "one", "val_loss");
        loss[0] = losses[0][STEPS - 1], val[0] = losses[1][STEPS - 1];
        for (size_t i = 0; i < COUNT_OF(layouts); i++) {
            if (strcmp(layouts[i].family, parts) != 0) continue;
            remove_tree("other");
            run(train, packed_run("other", text_of("%s --reduce exact %s", parts, layouts[i].flags)));
            expect(run_hash("other", STEPS) == one, "%s%s: other weights", parts, layouts[i].flags);
            log_numbers(losses[0], STEPS, "other", "loss");
            log_numbers(losses[1], STEPS, "other", "val_loss");
            loss[1] = losses[0][STEPS - 1], val[1] = losses[1][STEPS - 1];
            expect(loss[0] == loss[1] && val[0] == val[1], "%s%s: loss %.17g and %.17g, val_loss %.17g and %.17g",
                   parts, layouts[i].flags, loss[0], loss[1], val[0], val[1]);
        }
        remove_tree("other");
        run(train, packed_run_of("other", STEPS, text_of("%s --reduce exact --threads 2 --lr 3e-3", parts)));
        expect(run_hash("other", STEPS) == one, "%s--threads 2: other weights", parts);
        uint64_t single[2];  // a micro-batch of one row: 8 on a rank, or one on each of 8 ranks
        for (int k = 0; k < 2; k++) {
            remove_tree("other");
            run(train, packed_run("other", text_of("--family %s --batch 1 --clip 0.5 --reduce exact %s",
                                                   family ? "llama --kv-heads 2" : "gpt2", k ? "--ranks 8 --zero 2" : "")));
            single[k] = run_hash("other", STEPS);
        }
        expect(single[0] && single[0] == single[1], "%s--ranks 8: other weights", parts);
        verdict("%s: however micro-batches are dealt to ranks of any kind, the same weights and losses",
                family ? "llama" : "gpt2");
    }
}

static void test_kills(void) {
    enum { KILLS = 5 };
    static const char* const places[] = {"load", "reduce", "update", "rename", "copy"};
    const char* flags = GPT2_PARTS "--reduce exact --ckpt-every 2 --ckpt-async off";
    remove_tree("one");
    remove_tree("other");
    run(train, packed_run("one", flags));
    size_t killed = 0;
    for (size_t i = 0; i < KILLS; i++) {
        const char* fault = text_of("LLMTRAIN_TEST_FAULT=rank 0 step %zu at %s do kill", 1 + draw(77, i, STEPS),
                                    places[i % COUNT_OF(places)]);
        int code = run_with(fault, train, packed_run("other", text_of("%s --resume", flags)));
        killed += code != 0;
        if (code == 0) break;
    }
    run(train, packed_run("other", text_of("%s --resume", flags)));
    double losses[2][STEPS];
    expect(killed > 1 && run_hash("one", STEPS) == run_hash("other", STEPS), "%zu kills: other weights", killed);
    expect(log_numbers(losses[0], STEPS, "one", "epoch") == STEPS && log_numbers(losses[1], STEPS, "other", "epoch") ==
           STEPS && memcmp(losses[0], losses[1], sizeof losses[0]) == 0, "other epochs");
    verdict("a run that is killed and resumed has the weights of one that is not, after %zu kills", killed);
}

// The value of a key of the last line of a program's output.
static double output_number(const char* key) {
    const char* at = strstr(job.text[0], text_of("\"%s\": ", key));
    return at ? strtod(at + strlen(key) + 4, NULL) : NAN;
}

// val_loss, evaluate, and each conversation of the validation shards by itself.
static void test_evaluated(void) {
    static const char* const batches[] = {"", "--batch 1", "--seq 96 --batch 3", "--ranks 2"};
    double val[STEPS];
    remove_tree("one");
    run(train, packed_run("one", "--family gpt2 --batch 2"));
    log_numbers(val, STEPS, "one", "val_loss");
    for (size_t i = 0; i < COUNT_OF(batches); i++) {
        run(evaluate, text_of("--out one --data x_val_*.bin --threads 1 %s", batches[i]));
        double loss = output_number("loss");
        expect(fabs(loss / val[STEPS - 1] - 1) <= 1e-12, "evaluate %s: %.17g, not %.17g", batches[i], loss,
               val[STEPS - 1]);
    }
    verdict("evaluate gives the val_loss of metrics.jsonl to 1e-12");
    Dataset data;
    Model model;
    RunRecord saved;
    Config c = {.family = FAMILY_GPT2, .layers = 2, .heads = 4, .channels = 32, .ffn = 64, .context = T, .tied = true};
    double sum = 0, tokens = 0;
    size_t longer = 0;
    open_packed(&data, "x_val_*.bin", T, true, false);
    c.vocab = (size_t)data.vocabulary;
    need(config_complete(&c, &error), "%s", error.text);
    small_create(&model, &c, small_options(1, T), 1);
    need(model_load(&model, &saved, text_of("one/step_%08d", STEPS), true, &error), "%s", error.text);
    for (size_t d = 0; d < data.spans->document_count; d++) {
        const SpanDocument* document = &data.spans->documents[d];
        int32_t ids[T + 1] = {0}, targets[T];
        size_t n = document->tokens, span = 0, count = 0;
        longer += n > T + 1;
        if (n > T + 1) continue;
        for (size_t i = 0; i < n; i++) ids[i] = (int32_t)shard_token(data.shards, (size_t)document->first + i);
        for (size_t i = 0; i + 1 < n; i++) {
            targets[i] = span_file_trains(data.spans, &span, document->first + i + 1) ? ids[i + 1] : TARGET_NONE;
            count += targets[i] >= 0;
        }
        sum += (double)count * batch_gradients(&model, NULL, ids, targets, 1, n - 1);
        tokens += (double)count;
    }
    check_bound(fabs(sum / tokens / val[STEPS - 1] - 1), 1e-6, "val_loss is the mean over what is trained of each "
                "conversation alone");
    expect(longer > 0 && output_number("documents_too_long") == (double)longer && output_number("tokens") == tokens,
           "%zu are too long, %g tokens: %s", longer, tokens, job.text[0]);
    verdict("evaluate counts tokens, and conversations that are too long");
    dataset_close(&data);
    model_free(&model);

    // Preferences: both answers of each are evaluated.
    put_text("p.jsonl", "{\"prompt\": \"the cat\", \"chosen\": \" sat on\", \"rejected\": \" then it was\"}\n");
    run(tokenize, "--tokenizer qwen --chat p.jsonl --val 0 --out p");
    run(evaluate, "--out one --data p_train_000000.bin --scores p.scores --threads 1");
    char* scores = text_read("p.scores", NULL);
    double nats[2], counts[2], bytes[2];
    bool read = true;
    for (int i = 0; i < 2; i++) {
        const char* item = strstr(scores, text_of("item %d ", i));
        read = read && item && sscanf(item, "item %*d %lf %lf %lf", &nats[i], &counts[i], &bytes[i]) == 3;
    }
    expect(read && counts[0] + counts[1] == output_number("tokens") && bytes[1] > bytes[0] &&
           fabs((nats[0] + nats[1]) / (counts[0] + counts[1]) / output_number("loss") - 1) < 1e-12, "%s%s", scores,
           job.text[0]);
    run_says(2, "has documents that are chosen, and --objective sft takes plain ones", train,
             "--data p_train_*.bin " MODEL "--steps 1");
#define PAIR "--data p_train_*.bin --objective orpo --batch 1 --steps 1 " SIZES
    size_t size;
    free(text_read("p_train_000000.bin", &size));
    size = (size - 1024) / 2 - 1;  // one token less than the pair has
    run_says(2, text_of("no pair of p_train_000000.bin fits a sequence of 3 tokens; give --seq %zu or more\n", size),
             train, PAIR "--seq 3");
    run_says(2, "no pair of p_train_000000.bin fits", train, text_of(PAIR "--seq %zu", size - 1));
    run_says(0, "", train, text_of(PAIR "--seq %zu", size));
    run_says(1, "--val-overlap is for texts: a conversation is evaluated as a whole", evaluate,
             "--out one --data x_val_*.bin --val-overlap 5");
    verdict("evaluate scores both answers of a preference, which --objective sft refuses; --val-overlap is refused");
    free(scores);
}

static void test_batches(void) {
    double first[STEPS], losses[STEPS], norms[2][STEPS];
    for (int batch = 1; batch <= 8; batch *= 2) {
        remove_tree("other");
        run(train, packed_run("other", text_of("--family llama --kv-heads 2 --batch %d", batch)));
        expect(log_numbers(losses, STEPS, "other", "loss") == STEPS, "the log");
        log_numbers(norms[batch > 1], STEPS, "other", "grad_norm");
        if (batch == 1) memcpy(first, losses, sizeof first);
        for (int i = 0; i < STEPS; i++)
            expect(fabs(losses[i] / first[i] - 1) <= 1e-6 && fabs(norms[batch > 1][i] / norms[0][i] - 1) <= 1e-5,
                   "--batch %d: the loss of step %d is %.9g, not %.9g", batch, i + 1, losses[i], first[i]);
    }
    verdict("--batch 1, 2, 4 and 8 of 8 rows: the loss of a step is the mean over all of its targets");
}

static void test_refused(void) {
    remove_tree("other");
    run(train, packed_run("other", GPT2_PARTS "--too-long cut"));
    expect(strstr(job.text[0], "are longer than --seq 96, and are cut after an answer") &&
           strstr(job.text[0], "--val: ") && !strstr(job.text[0], "are left out"), "%s", job.text[0]);
    run_says(2, "belongs to another run: there --pack is 'on', here it is 'off'", train,
             packed_run("other", GPT2_PARTS "--too-long cut --pack off --resume"));
    run_says(2, "belongs to another run: there --too-long is 'cut', here it is 'drop'", train,
             packed_run("other", GPT2_PARTS "--too-long drop --resume"));
    run_says(2, "--documents mask ends documents at the end-of-text token", train,
             packed_run("new", GPT2_PARTS "--documents mask"));
    run_says(2, "--end-of-text is for --documents mask", train, packed_run("new", GPT2_PARTS "--end-of-text 5"));
    run_says(2, "--val-overlap is for texts: a conversation is validated as a whole", train,
             packed_run("new", GPT2_PARTS "--val-overlap 5"));
    run_says(2, "has conversations (tokenize --chat), the other text", train, "--data x_train_*.bin,text.bin " MODEL
             "--steps 1");
    expect(!file_exists("new/step_00000005"), "a run was made");
    need(rename("x_train_000001.spans", "away.spans") == 0, "a .spans");
    char longer[1024];
    snprintf(longer, sizeof longer, "%s",
             packed_run_of("other", 9, "--threads 1 --lr 3e-3 " GPT2_PARTS "--too-long cut --resume"));
    int code = run_with(NULL, train, longer);
    expect(code != 0 && strstr(job.text[1], "x_train_000001.spans is missing: it says which tokens of"),
           "exit code %d: %s", code, job.text[1]);
    need(rename("away.spans", "x_train_000001.spans") == 0, "a .spans");
    run(train, longer);
    verdict("resuming with another --pack or --too-long, --documents mask, a lost .spans are refused");
}

// A bad sequence of packed conversations is reported by its first document, which --show prints.
static void test_traced(void) {
    char shard[64] = "";
    uint64_t at = 0, sample = UINT64_MAX, step = 0;
    size_t events = 0;
    remove_tree("other");
    run(train, packed_run_of("other", 20, "--family llama --kv-heads 2 --batch 2 --threads 1 --lr 0.5 --spike-warmup 1 "
                             "--spike-trace 1.01 --spike-loss 0.5 --spike-sigma 1"));
    char* text = text_read("other/events.jsonl", NULL);
    char* rest = text;
    for (char* line; (line = strsep(&rest, "\n")) != NULL && *line;) {
        Json json;
        need(json_parse(&json, line, strlen(line), "events", &error), "%s", error.text);
        if (strstr(line, "\"bad_batch\"")) {
            uint32_t sequence = json_first(&json, json_get(&json, 0, "sequences"));
            json_u64(&json, json_get(&json, sequence, "at"), &at);
            json_u64(&json, json_get(&json, sequence, "sample"), &sample);
            json_u64(&json, json_get(&json, 0, "step"), &step);
            json_string(&json, json_get(&json, sequence, "shard"), shard, sizeof shard);
            events++;
        }
        json_free(&json);
    }
    Dataset data;
    open_packed(&data, "x_train_*.bin", T, true, false);
    expect(events > 0 && sample / STEP_SAMPLES + 1 == step, "%zu events; sample %llu in step %llu", events,
           (unsigned long long)sample, (unsigned long long)step);
    Window window = dataset_sample(&data, SEED, sample, T);
    const PackedGroup* first = &data.packed->groups[data.packed->first[window.row]];
    expect(strcmp(shard, data.shards[window.shard].path) == 0 && at == window.start, "%s --at %llu", shard,
           (unsigned long long)at);
    expect(strstr(text_of("%.4000s", strstr(job.text[0], "--show") ? strstr(job.text[0], "--show") : ""), "--at"),
           "no command is shown: %s", job.text[0]);
    run(tokenize, text_of("--show %s --at %llu --tokens 12", shard, (unsigned long long)at));
    expect(strstr(job.text[0], text_of("--- document %u, plain, group %u: tokens %llu to", first->document,
                                       data.spans[window.shard].documents[first->document].group,
                                       (unsigned long long)at)) == job.text[0] &&
           strstr(job.text[0], "<|im_start|>user\n"), "%s", job.text[0]);
    verdict("a bad sequence of packed conversations: its first document, as tokenize --show prints it");
    dataset_close(&data);
    free(text);
}

// A tokenizer without a chat template, a model of texts, and conversations with --template.
static void test_template(void) {
    need(mkdir("plain", 0755) == 0, "a directory");
    copy_tree("qwen/tokenizer.json", "plain/tokenizer.json");
    copy_tree("qwen/tokenizer_config.json", "plain/tokenizer_config.json");
    bool ok = run(tokenize, "--tokenizer plain --text x.jsonl --val 0 --out texts") &&
              run(tokenize, "--tokenizer plain --chat x.jsonl --template qwen/chat_template.jinja --out told") &&
              run(train, "--data texts_train_*.bin --out texts.run " SIZES "--seq 96 --batch 1 --steps 1") &&
              run(train, "--data told_train_*.bin --init-from texts.run --out told.run --batch 1 --steps 1") &&
              run(train, "--data texts_train_*.bin --init-from told.run --out more.run --batch 1 --steps 1");
    char* template = text_read("qwen/chat_template.jinja", NULL);
    static const char* const kept[] = {"told_tokenizer", "told.run/tokenizer", "more.run/tokenizer"};
    for (size_t i = 0; ok && i < COUNT_OF(kept); i++) {
        char* copy = text_read(text_of("%s/chat_template.jinja", kept[i]), NULL);
        expect(strcmp(copy, template) == 0, "%s has another template, or none", kept[i]);
        free(copy);
    }
    free(template);
    put_text("other.jinja", "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}");
    ok = run(tokenize, "--tokenizer plain --chat x.jsonl --template other.jinja --out told2");
    run_says(1, "have different chat templates; run tokenize --chat with one --template for both", train,
             "--data told*_train_*.bin " MODEL "--steps 1");
    verdict("--template: kept with the shards, and with a run from a model without one, or on other shards");
}

int main(int argc, char** argv) {
    const char* programs[] = {"build/train-FP32", "build/tokenize", "build/evaluate-FP32"};
    const Flag rows[] = {{"train", KIND_TEXT, &programs[0], "PATH", 0, 0, "the program", 0},
                         {"tokenize", KIND_TEXT, &programs[1], "PATH", 0, 0, "the program", 0},
                         {"evaluate", KIND_TEXT, &programs[2], "PATH", 0, 0, "the program", 0}};
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_sft", NULL, &flags, argc, argv)) return code;
    tests_begin("test_sft");
    const char** const found[] = {&train, &tokenize, &evaluate};
    for (size_t i = 0; i < COUNT_OF(found); i++) *found[i] = realpath(programs[i], NULL);
    char* qwen = realpath("dev/test/fixtures/tokenizers/qwen2.json", NULL);
    char* packing = realpath("dev/test/fixtures/packing.txt", NULL);
    need(qwen && packing, "run it in the root of the checkout");
    root_enter();
    test_packing();
    test_packing_of_peer(packing);
    need(mkdir("qwen", 0755) == 0, "a directory");
    copy_tree(qwen, "qwen/tokenizer.json");
    put_text("qwen/tokenizer_config.json", "{\"eos_token\": \"<|im_end|>\"}");
    put_text("qwen/chat_template.jinja", "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
             "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}");
    need(tokenizer_open(&tokenizer, "qwen", NULL, &error), "%s", error.text);
    test_rows();
    test_model();
    if (train && tokenize && evaluate) {
        write_conversations("x.jsonl", LINES);
        need(run(tokenize, "--tokenizer qwen --chat x.jsonl --val 0.1 --out x --shard-tokens 9000"), "shards");
        test_epochs();
        test_layouts();
        test_kills();
        test_evaluated();
        test_batches();
        test_refused();
        test_traced();
        test_template();
    } else skip("programs", "train, tokenize or evaluate is not built");
    program_free(&job);
    tokenizer_close(&tokenizer);
    for (size_t i = 0; i < COUNT_OF(found); i++) free((char*)*found[i]);
    free(qwen);
    free(packing);
    return tests_end();
}
