// test_corpus.c: proves that the entropy the corpus states is the entropy of its text.
//
//   1. a parser          sums the probability of a text over all its derivations
//   2. probability       the parser against the generator; one derivation for each story; the nats in the JSON
//   3. choices           how often each was taken, against its weight
//   4. text              ASCII, the pinned hash, different stories for training and validation
//   5. windows           the loss of a model whose window starts in the middle of a story
//   6. refusals          grammars, flags and files that cannot be used
//
// The parser shares the grammar's tables with the generator and nothing else: it knows no random numbers and replays
// no choices.
//
// Build: cc -O2 -o build/test_corpus dev/test/test_corpus.c -lm      Run: build/test_corpus

#define main corpus_main
#include "data/corpus.c"
#undef main

#include "harness.h"

static Error error;  // of the last call that failed

// Hash of the first 1000 stories of seed 1: changes with the grammar; the test prints the new one on a mismatch.
static const uint64_t PINNED_HASH = 0xbb0d38c433dd5b89ull;

// ------------------------------------------------------------------------------------------------
// 1. A parser
//
// A State is one way to have read the text so far: the pieces still to come (a stack, innermost on top), the unread
// part of the current words, and the values of the variables. Reading a byte drops the states that expected another
// one; at the end of its words a state is replaced by one state for each choice that may follow. The states'
// probabilities add up to the probability of the text read so far. A text may have several derivations.

enum { MAX_DEPTH = 16, MAX_TRACE = 1 << 16, BUCKETS = 1 << 12 };

typedef struct {
    double p;
    int trace;  // the last choice taken, an index into Parser.trace
    const char* words;
    int words_left, depth;
    bool capital;  // the next letter is upper case
    struct { short next, end; } stack[MAX_DEPTH];  // pieces
    short bound[MAX_VARIABLES];  // a choice, or -1: free, by the weights
    int after;  // in parser_merge: the next state of the same bucket, or -1
} State;

typedef struct {
    State* states;
    size_t count, capacity;
} States;

typedef struct {
    const Grammar* g;
    States now, then;
    bool endless;  // stories follow each other, states with the same future are merged, and their sum is scaled to 1
    int buckets[BUCKETS];
    int trace_count;
    struct { int choice, before; } trace[MAX_TRACE];
} Parser;

// With no words left: drops whatever is finished, so that states with the same future are equal.
static void state_trim(State* s) {
    if (s->words_left > 0) return;
    s->words = NULL;
    while (s->depth > 0 && s->stack[s->depth - 1].next == s->stack[s->depth - 1].end) s->depth--;
    for (int v = 0; v < MAX_VARIABLES && s->depth == 0; v++) s->bound[v] = -1;
}

static bool state_equal(const State* a, const State* b) {
    return a->words == b->words && a->depth == b->depth && a->capital == b->capital &&
           memcmp(a->bound, b->bound, sizeof a->bound) == 0 &&
           memcmp(a->stack, b->stack, (size_t)a->depth * sizeof a->stack[0]) == 0;
}

static void states_add(States* list, const State* s) {
    if (list->count == list->capacity) {
        list->capacity = max_size(1024, 2 * list->capacity);
        list->states = (State*)realloc(list->states, list->capacity * sizeof(State));
        need(list->states != NULL, "memory for %zu parser states", list->capacity);
    }
    list->states[list->count++] = *s;
}

// At the beginning of a story, with everything still to be chosen.
static State state_outside(void) {
    State s;
    memset(&s, 0, sizeof s);
    s.p = 1;
    s.trace = -1;
    for (int v = 0; v < MAX_VARIABLES; v++) s.bound[v] = -1;
    return s;
}

static void parser_settle(Parser* parser, State s);

// The state after a choice, with its probability; the choice becomes the variable's value, if there is one.
static State state_choose(const Grammar* g, const State* s, const Symbol* from, int choice, int variable) {
    State t = *s;
    t.p *= (double)g->choices[choice].weight / (double)from->weight;
    if (variable >= 0) t.bound[variable] = (short)choice;
    return t;
}

// The choices of a symbol.
#define EACH_CHOICE(c, symbol) \
    (int c = (symbol)->first_choice; c < (symbol)->first_choice + (symbol)->choice_count; c++)

// One state for each choice of `symbol`.
static void parser_choose(Parser* parser, const State* s, int symbol, int variable) {
    const Grammar* g = parser->g;
    for EACH_CHOICE(c, &g->symbols[symbol]) {
        State t = state_choose(g, s, &g->symbols[symbol], c, variable);
        t.stack[t.depth].next = (short)g->choices[c].first_piece;
        t.stack[t.depth++].end = (short)(g->choices[c].first_piece + g->choices[c].piece_count);
        t.trace = parser->trace_count++ % MAX_TRACE;
        parser->trace[t.trace].choice = c;
        parser->trace[t.trace].before = s->trace;
        parser_settle(parser, t);
    }
}

// Advances from a state with no words left to all states that have some, or to the end of the story.
static void parser_settle(Parser* parser, State s) {
    const Grammar* g = parser->g;
    while (s.words_left == 0) {
        state_trim(&s);
        if (s.depth == 0) {
            if (parser->endless) parser_choose(parser, &s, 0, -1);
            else states_add(&parser->then, &s);
            return;
        }
        const Piece* piece = &g->pieces[s.stack[s.depth - 1].next];
        if (piece->kind != PIECE_TEXT && piece->kind != PIECE_SYMBOL && s.bound[piece->variable] < 0) {
            const Symbol* held = &g->symbols[g->variable_symbols[piece->variable]];
            for EACH_CHOICE(c, held) parser_settle(parser, state_choose(g, &s, held, c, piece->variable));
            return;
        }
        s.stack[s.depth - 1].next++;
        s.capital = s.capital || piece->capital;
        Span words = piece->text;
        if (piece->kind == PIECE_SYMBOL) {
            parser_choose(parser, &s, piece->symbol, piece->variable);
            return;
        }
        if (piece->kind != PIECE_TEXT) words = g->choices[s.bound[piece->variable]].forms[piece->form];
        if (piece->kind == PIECE_BY_FORM) {
            parser_choose(parser, &s, symbol_find(g, words), -1);
            return;
        }
        s.words = words.text;
        s.words_left = words.length;
    }
    states_add(&parser->then, &s);
}

static void parser_swap(Parser* parser) {
    States swap = parser->now;
    parser->now = parser->then;
    parser->then = swap;
    parser->then.count = 0;
}

static void parser_begin(Parser* parser, const Grammar* g, bool endless) {
    State s = state_outside();
    parser->g = g;
    parser->endless = endless;
    parser->trace_count = 0;
    parser->now.count = parser->then.count = 0;
    parser_choose(parser, &s, 0, -1);
    parser_swap(parser);
}

static double parser_sum(const Parser* parser) {
    double sum = 0;
    for (size_t i = 0; i < parser->now.count; i++) sum += parser->now.states[i].p;
    return sum;
}

// Merges states with the same future, adding their probabilities. Scales the total to 1.
static void parser_merge(Parser* parser) {
    double scale = 1 / parser_sum(parser);
    State* states = parser->now.states;
    int kept = 0;
    for (size_t i = 0; i < parser->now.count; i++) {
        State s = states[i];
        Hash hash = hash_begin((uint64_t)(size_t)s.words);
        hash_add(&hash, s.stack, (size_t)s.depth * sizeof s.stack[0]);
        hash_add(&hash, s.bound, sizeof s.bound);
        int* bucket = &parser->buckets[hash_end(&hash) % BUCKETS];
        int j = *bucket - 1;
        while (j >= 0 && !state_equal(&s, &states[j])) j = states[j].after;
        s.p *= scale;
        if (j >= 0) {
            states[j].p += s.p;
            continue;
        }
        s.after = *bucket - 1;
        states[kept++] = s;
        *bucket = kept;  // plus 1, so that 0 is an empty bucket
    }
    parser->now.count = (size_t)kept;
    memset(parser->buckets, 0, sizeof parser->buckets);
}

// Returns the probability of this byte given those before it (for an endless parser; otherwise of all so far).
static double parser_read(Parser* parser, char byte) {
    for (size_t i = 0; i < parser->now.count; i++) {
        State s = parser->now.states[i];
        char expected = s.words_left > 0 ? *s.words : 0;
        if (s.capital && expected >= 'a' && expected <= 'z') expected = (char)(expected - 'a' + 'A');
        if (expected != byte) continue;
        s.capital = false;
        s.words++;
        s.words_left--;
        state_trim(&s);
        states_add(&parser->then, &s);
    }
    parser_swap(parser);
    double p = parser_sum(parser);
    if (parser->endless) parser_merge(parser);
    for (size_t i = 0; i < parser->now.count; i++) parser_settle(parser, parser->now.states[i]);
    parser_swap(parser);
    return p;
}

// The probability of a whole story, over all its derivations; their number; and, added to counts, the choices of the
// last derivation.
static double parser_story(Parser* parser, int* derivations, uint64_t* counts, const Grammar* g, const char* text,
                           size_t length) {
    parser_begin(parser, g, false);
    for (size_t i = 0; i < length; i++) parser_read(parser, text[i]);
    double p = 0;
    *derivations = 0;
    for (size_t i = 0; i < parser->now.count; i++) {
        const State* s = &parser->now.states[i];
        if (s->depth > 0 || s->words_left > 0) continue;
        p += s->p;
        ++*derivations;
        for (int t = s->trace; counts && t >= 0; t = parser->trace[t].before) counts[parser->trace[t].choice]++;
    }
    return p;
}

// ------------------------------------------------------------------------------------------------
// 2, 3. Probability and choices

// How unlikely these counts are under the weights: the chi-square statistic as a normal deviate (the cube-root
// transform of Wilson and Hilferty, 1931).
static double chi_square_deviate(const Grammar* g, const Symbol* symbol, const uint64_t* counts) {
    double n = 0, statistic = 0, free = symbol->choice_count - 1;
    for EACH_CHOICE(c, symbol) n += (double)counts[c];
    for EACH_CHOICE(c, symbol) {
        double expected = n * g->choices[c].weight / symbol->weight;
        statistic += ((double)counts[c] - expected) * ((double)counts[c] - expected) / expected;
    }
    return (cbrt(statistic / free) - (1 - 2 / (9 * free))) / sqrt(2 / (9 * free));
}

static void test_stories(Parser* parser, const Grammar* g, int stories) {
    uint64_t* counts = (uint64_t*)memory_allocate(MAX_CHOICES * sizeof(uint64_t));
    double worst = 0, mass = 0;
    int ambiguous = 0, not_ascii = 0, ends = 0;
    Story story;
    for (int i = 0; i < stories; i++) {
        int derivations = 0;
        story_write(&story, g, 7, (uint64_t)i);
        double p = parser_story(parser, &derivations, counts, g, story.text, story.length);
        double off = fabs(-log(p) - story.nats) / story.nats;
        if (!(off <= worst)) worst = off;
        ambiguous += derivations != 1;
        for (size_t b = 0; b < story.length; b++) {
            bool newline = story.text[b] == '\n';
            not_ascii += !newline && (story.text[b] < ' ' || story.text[b] > '~');
            ends += newline;
        }
        ends -= memcmp(story.text + story.length - 2, "\n\n", 2) == 0 ? 2 : 0;
        mass += (double)story.length;
    }
    printf("%d stories, %.0f bytes\n", stories, mass);
    check_bound(worst, 1e-9, "-ln p: the generator's sum against all derivations, relative");
    check_bound(ambiguous, 0, "stories with no derivation, or with more than one");
    check_bound(not_ascii, 0, "bytes that are not printable ASCII");
    check_bound(ends, 0, "newlines elsewhere than two at a story's end");

    double deviate = 0;
    uint64_t least = UINT64_MAX;
    for (int s = 0; s < g->symbol_count; s++) {
        double d = g->symbols[s].choice_count > 1 ? chi_square_deviate(g, &g->symbols[s], counts) : 0;
        if (!(d <= deviate)) deviate = d;
        for EACH_CHOICE(c, &g->symbols[s]) least = counts[c] < least ? counts[c] : least;
    }
    // Above 4.5 for one of 100 symbols: once in 3000 seeds.
    check_bound(deviate, 4.5, "choices: chi-square of the worst symbol, as a normal deviate");
    double in_6_mb = (double)least * 6e6 / mass;
    printf("%d symbols, %d choices; the rarest is taken %.0f times in 6 MB\n", g->symbol_count, g->choice_count,
           in_6_mb);
    check_bound(1 / in_6_mb, 1 / 100.0, "choices: 1 / how often the rarest is taken in 6 MB");
    free(counts);
}

// The number `key` of the part "train" or "val"; NAN if it is missing.
static double part_number(const Json* json, const char* part, const char* key) {
    double value = NAN;
    json_number(json, json_get(json, json_get(json, 0, part), key), &value);
    return value;
}

// The program's files: compares the nats in the JSON with those that the parser finds from the text alone.
enum { QUESTIONS_ASKED = 500 };

// Whether an answer is words of the story, but for its first letter, the words that lead to it, and the dot at its end.
static bool is_answer(const char* story, const char* answer) {
    char words[QUESTION_BYTES];
    size_t length = strlen(answer);
    if (length < 2 || answer[length - 1] != '.') return false;
    snprintf(words, sizeof words, "%.*s", (int)length - 1, answer);
    words[0] = (char)tolower((unsigned char)words[0]);
    return strstr(story, words) != NULL;
}

// The questions of a file: a conversation per line, about a story that the grammar writes and that no text has.
static void check_questions(Parser* parser, const Grammar* g, const char* part, size_t lines) {
    size_t bytes, count = 0, wrong = 0, kinds = 0, counts[QUESTION_COUNT] = {0};
    char *text = text_read(text_of("corpus_questions_%s.jsonl", part), &bytes);
    char *train = text_read("corpus_train.txt", &bytes), *val = text_read("corpus_val.txt", &bytes);
    for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1, count++) {
        Json json;
        char content[2][MAX_STORY + QUESTION_BYTES] = {""};
        int derivations = 0;
        need(json_parse(&json, line, (size_t)(end - line), "a line", &error), "%s", error.text);
        uint32_t message = json_first(&json, json_get(&json, 0, "messages"));
        for (int i = 0; i < 2 && message != JSON_NONE; i++, message = json_next(&json, message))
            json_string(&json, json_get(&json, message, "content"), content[i], sizeof content[i]);
        json_free(&json);
        char* question = strchr(content[0], '\n');
        if (question) *question++ = 0;
        for (int i = 0; question && i < QUESTION_COUNT; i++) {
            const char* star = strchr(QUESTIONS[i].question, '*');
            size_t before = star ? (size_t)(star - QUESTIONS[i].question) : strlen(QUESTIONS[i].question);
            counts[i] += strncmp(question, QUESTIONS[i].question, before) == 0;
        }
        bool shared = strstr(train, content[0]) || strstr(val, content[0]), right = is_answer(content[0], content[1]);
        char* story = strcat(content[0], "\n\n");
        wrong += !question || shared || !right || !(parser_story(parser, &derivations, NULL, g, story, strlen(story)) > 0);
    }
    for (int i = 0; i < QUESTION_COUNT; i++) kinds += counts[i] > 0;
    check_bound(fabs((double)count - (double)lines), 0, "questions in the file, difference");
    check_bound((double)wrong, 0, "questions whose answer is not in a story of their own");
    check_bound(QUESTION_COUNT - (double)kinds, lines < 100 ? 3 : 0, "kinds of questions that were never asked");
    free(text);
    free(train);
    free(val);
}

static void test_files(Parser* parser, const Grammar* g) {
    Options options = {"corpus", 200000, 100000, QUESTIONS_ASKED, 3};
    Summary written[2];
    Json json;
    bool wrote = corpus_write(written, g, &options, &error);
    if (!wrote) printf("%s\n", error.text);
    check_bound(!wrote, 0, "corpus_write: failures");
    size_t bytes = 0;
    char* text = text_read("corpus.json", &bytes);
    bool parsed = json_parse(&json, text, bytes, "corpus.json", &error);
    free(text);
    const char* parts[2] = {"train", "val"};
    for (int i = 0; i < 2 && parsed; i++) {
        text = text_read(text_of("corpus_%s.txt", parts[i]), &bytes);
        double nats = 0, stories = 0;
        for (char* at = text; *at;) {
            char* end = strstr(at, "\n\n");
            int derivations = 0;
            if (!end) nats = NAN;
            if (!end) break;
            nats -= log(parser_story(parser, &derivations, NULL, g, at, (size_t)(end + 2 - at)));
            stories++;
            at = end + 2;
        }
        double asked = (double)(i == 0 ? options.bytes : options.val_bytes);
        printf("%s: %zu bytes, %.0f stories, %.6f nats per byte\n", parts[i], bytes, stories, nats / (double)bytes);
        check_bound(fabs(part_number(&json, parts[i], "nats") - nats) / nats, 1e-9,
                    "nats in the JSON against the text alone, relative");
        check_bound(fabs(part_number(&json, parts[i], "nats_per_byte") * (double)bytes - nats) / nats, 2e-9,
                    "nats per byte in the JSON, the same");
        check_bound(fabs(part_number(&json, parts[i], "bytes") - (double)bytes) +
                    fabs(part_number(&json, parts[i], "stories") - stories), 0,
                    "bytes and stories in the JSON, difference");
        check_bound(fabs((double)bytes - asked - 512), 512, "bytes above those asked for, at most one story");
        free(text);
    }
    check_bound(!parsed, 0, "the JSON: failures to read it");
    check_questions(parser, g, "train", QUESTIONS_ASKED);
    check_questions(parser, g, "val", QUESTIONS_ASKED / 10);
    if (parsed) json_free(&json);
}

// ------------------------------------------------------------------------------------------------
// 4. Text

static int hash_compare(const void* a, const void* b) {
    uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
    return x < y ? -1 : x > y;
}

static void test_text(const Grammar* g) {
    enum { STORIES = 20000 };
    uint64_t* hashes = (uint64_t*)memory_allocate(2 * STORIES * sizeof(uint64_t));
    Story story, again;
    Hash hash = hash_begin(0);
    int different = 0, twice = 0;
    for (int i = 0; i < 2 * STORIES; i++) {
        uint64_t number = i < STORIES ? (uint64_t)i : FIRST_VAL_STORY + (uint64_t)(i - STORIES);
        story_write(&story, g, 1, number);
        hashes[i] = hash_bytes(story.text, story.length);
        if (i < 1000) hash_add(&hash, story.text, story.length);
        if (i % 100 == 0) {
            story_write(&again, g, 1, number);
            different += again.length != story.length || memcmp(again.text, story.text, story.length) != 0;
        }
    }
    qsort(hashes, 2 * STORIES, sizeof hashes[0], hash_compare);
    for (int i = 1; i < 2 * STORIES; i++) twice += hashes[i] == hashes[i - 1];
    check_bound(different, 0, "one seed and number, two stories");
    check_bound(twice, 0, "equal stories among 20000 for training and 20000 for validation");
    if (hash_end(&hash) != PINNED_HASH) printf("hash 0x%016llxull\n", (unsigned long long)hash_end(&hash));
    check_bound(hash_end(&hash) != PINNED_HASH, 0, "the first 1000 stories of seed 1 are not the pinned bytes");
    free(hashes);
}

// ------------------------------------------------------------------------------------------------
// 5. Windows
//
// A model reads windows that start anywhere. The best it can do is to weigh all positions in all stories where the
// window may have started, each by the mean number of times that a story visits it, and to read on from there: a parser
// that begins with all these states. Its extra loss over one that read the text from the start is the price of the
// window's start, exact except for the sampling of windows.

// Adds all positions inside the words of choice `c` in context `s`; s->p is the mean number of visits.
static void places_add(Parser* parser, const State* s, int c, bool capital);

static void places_add_symbol(Parser* parser, const State* s, int symbol, int variable, bool capital) {
    const Symbol* from = &parser->g->symbols[symbol];
    for EACH_CHOICE(c, from) {
        State t = state_choose(parser->g, s, from, c, variable);
        places_add(parser, &t, c, capital);
    }
}

static void places_add_words(Parser* parser, const State* s, Span words, bool capital) {
    State t = *s;
    for (int i = 0; i < words.length; i++) {
        t.words = words.text + i;
        t.words_left = words.length - i;
        t.capital = capital && i == 0;
        states_add(&parser->then, &t);
    }
}

static void places_add(Parser* parser, const State* s, int c, bool capital) {
    const Grammar* g = parser->g;
    int end = g->choices[c].first_piece + g->choices[c].piece_count;
    for (int i = g->choices[c].first_piece; i < end; i++) {
        const Piece* piece = &g->pieces[i];
        bool large = piece->capital || (capital && i == g->choices[c].first_piece);
        State t = *s;
        t.stack[t.depth].next = (short)(i + 1);
        t.stack[t.depth++].end = (short)end;
        if (piece->kind == PIECE_TEXT) places_add_words(parser, &t, piece->text, large);
        if (piece->kind == PIECE_SYMBOL) places_add_symbol(parser, &t, piece->symbol, piece->variable, large);
        if (piece->kind != PIECE_FORM && piece->kind != PIECE_BY_FORM) continue;
        const Symbol* held = &g->symbols[g->variable_symbols[piece->variable]];
        for EACH_CHOICE(k, held) {
            State u = state_choose(g, &t, held, k, piece->variable);
            Span form = g->choices[k].forms[piece->form];
            if (piece->kind == PIECE_FORM) places_add_words(parser, &u, form, large);
            else places_add_symbol(parser, &u, symbol_find(g, form), -1, large);
        }
    }
}

static void test_windows(Parser* parser, const Grammar* g, int windows) {
    enum { T = 256, STORIES = 4000 };
    char* text = (char*)memory_allocate((size_t)STORIES * MAX_STORY);
    size_t bytes = 0;
    double nats = 0, squares = 0, excess[T + 1] = {0}, floor_sum[T + 1] = {0};
    Story story;
    for (int i = 0; i < STORIES; i++) {
        story_write(&story, g, 11, (uint64_t)i);
        memcpy(text + bytes, story.text, story.length);
        bytes += story.length;
        nats += story.nats;
    }
    float* floors = (float*)memory_allocate(bytes * sizeof(float));  // -ln p of each byte given all before it
    double total = 0;
    parser_begin(parser, g, true);
    for (size_t i = 0; i < bytes; i++) {
        double loss = -log(parser_read(parser, text[i]));
        floors[i] = (float)loss;
        total += loss;
    }
    check_bound(fabs(total - nats) / nats, 1e-9,
                "-ln p byte by byte through 4000 stories against the generator, relative");

    State outside = state_outside();
    parser_swap(parser);
    parser->then.count = 0;
    places_add_symbol(parser, &outside, 0, -1, false);
    States places = parser->then;
    memset(&parser->then, 0, sizeof parser->then);
    double mean_length = 0;
    for (size_t i = 0; i < places.count; i++) mean_length += places.states[i].p;
    printf("%zu places; a story is %.2f bytes long in the mean\n", places.count, mean_length);
    check_bound(fabs(mean_length * STORIES / (double)bytes - 1), 0.01,
                "the mean length, by the places' weights against the stories, relative");

    for (int w = 0; w < windows; w++) {
        size_t start = random_bits(5, RANDOM_TEST, 0, (uint64_t)w) % (bytes - T - 1);
        parser->now.count = 0;
        for (size_t i = 0; i < places.count; i++) {
            if (*places.states[i].words == text[start] || places.states[i].capital) {
                states_add(&parser->now, &places.states[i]);
            }
        }
        double price = 0;
        for (int t = 0; t <= T; t++) {
            double p = parser_read(parser, text[start + (size_t)t]) / (t == 0 ? mean_length : 1);
            double above = -log(p) - floors[start + (size_t)t];
            excess[t] += above;
            if (t > 0) price += above;
            floor_sum[t] += floors[start + (size_t)t];
        }
        squares += price * price;
    }
    const int bands[6] = {1, 8, 32, 64, 128, T + 1};  // byte 0 is only input to a model
    double sum = 0, base = 0, late = 0, late_base = 0;
    for (int b = 0; b < 5; b++) {
        double band = 0;
        for (int t = bands[b]; t < bands[b + 1]; t++) band += excess[t] / windows;
        printf("  bytes %3d to %3d of a window: %6.3f nats above the floor\n", bands[b], bands[b + 1] - 1, band);
    }
    for (int t = 1; t <= T; t++) {
        sum += excess[t];
        base += floor_sum[t];
        if (t > T / 2) late += excess[t];
        if (t > T / 2) late_base += floor_sum[t];
    }
    double mean = sum / windows, deviation = sqrt((squares / windows - mean * mean) / windows);
    printf("  all %d bytes: %.3f +- %.3f nats, %.2f%% of the floor; the second half alone: %.2f%%\n", T, mean,
           deviation, 100 * sum / base, 100 * late / late_base);
    check_bound(fabs(late / late_base), 0.01, "the price of a window's start, second half of 256, over the floor");
    free(text);
    free(floors);
    free(places.states);
}

// ------------------------------------------------------------------------------------------------
// 6. Refusals

static void check_refused(const char* what, bool accepted, const char* word) {
    check(!accepted && strstr(error.text, word) != NULL, "refused: %-40s %s", what, error.text);
}

static void test_grammars(void) {
    static const struct { const char* lines[3][2]; const char *what, *word; } bad[] = {
        {{{"story", "a {cat} sat"}}, "an unknown symbol", "{cat}"},
        {{{"story", "{b} / c"}, {"b", "{story}"}}, "a symbol inside itself", "inside itself"},
        {{{"story", "{x.1} sat"}}, "a variable that is never set", "{x.1}"},
        {{{"story", "{x:b} and {x.1}"}, {"b", "cat / dog"}}, "a form that is never set", "{x.1}"},
        {{{"story", "{x:b} {y:c} {y.1}"}, {"b", "cat"}, {"c", "hen"}}, "a form of the second variable", "{y.1}"},
        {{{"story", "{x:b} and {x.0}"}, {"b", "cat / {c}"}, {"c", "dog"}}, "a form with symbols in it", "{x.0}"},
        {{{"story", "{x:b} / {x:c}"}, {"b", "cat"}, {"c", "dog"}}, "a variable of two kinds", "{x:c}"},
        {{{"story", "{x:b} {@x.1}"}, {"b|fly", "owl"}}, "a form that names no symbol", "{x.1}"},
        {{{"story", "{b} {b} {b} {b} {b} {b} {b} {b} {b}"}, {"b", "{c} {c} {c} {c} {c} {c} {c} {c} {c}"},
          {"c", "a hen that is so old that nobody knows when it was a chick"}}, "a story without end", "over 4096"},
    };
    Grammar* g = (Grammar*)memory_allocate(sizeof(Grammar));
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        size_t lines = 0;
        while (lines < 3 && bad[i].lines[lines][0]) lines++;
        check_refused(bad[i].what, grammar_compile(g, bad[i].lines, lines, &error), bad[i].word);
    }
    free(g);
}

// A folder that does not exist, and a disk that is full after 50,000 bytes: existing files do not change.
static void test_disk(const Grammar* g) {
    const char* endings[3] = {"_train.txt", "_val.txt", ".json"};
    Summary written[2];
    Options options = {"/nonexistent/folder/x", 1000, 1000, 0, 1};
    bool accepted = corpus_write(written, g, &options, &error);
    check_refused("a folder that does not exist", accepted, "/nonexistent/folder/x_train.txt");

    options.out = "full";
    accepted = corpus_write(written, g, &options, &error);
    uint64_t before = written[0].bytes;
    options.bytes = 1000000;
    file_size_limit(50000);
    bool full = corpus_write(written, g, &options, &error);
    file_size_limit(RLIM_INFINITY);
    check_refused("a full disk", full || !accepted, "cannot write");
    int wrong = 0;
    for (int i = 0; i < 3; i++) {
        struct stat status;
        wrong += stat(text_of("full%s", endings[i]), &status) != 0 || (i == 0 && (uint64_t)status.st_size != before);
    }
    wrong += directory_count(".", ".tmp-");
    check_bound(wrong, 0, "a full disk: temporary files left, or whole files lost");
}

int main(void) {
    Grammar* g = (Grammar*)memory_allocate(sizeof(Grammar));
    Parser* parser = (Parser*)memory_allocate(sizeof(Parser));
    tests_begin("test_corpus");
    need(g && parser, "memory");
    need(grammar_compile(g, corpus_lines, sizeof corpus_lines / sizeof corpus_lines[0], &error), "%s", error.text);
    root_enter();
    test_stories(parser, g, 20000);
    test_files(parser, g);
    test_text(g);
    test_windows(parser, g, 1000);
    test_grammars();
    test_disk(g);
    free(parser->now.states);
    free(parser->then.states);
    free(parser);
    free(g);
    return tests_end();
}
