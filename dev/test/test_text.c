// test_text: tests of data/input.h, bpe.h and duplicates.h, of tokenize on documents, and of runs that keep their
// tokenizer.
//
//   make build/test_text build/tokenize build/train-FP32
//   build/test_text [--tokenize PATH] [--train PATH]
//
// The references: the text itself, packed by the libraries that unpack it; a trainer that counts all pairs again for
// every merge, and Hugging Face's merges (made by dev/peers/bpe_training.py --fixture); the similarity of two documents
// computed from their sets of words.

#include "harness.h"

#include "data/bpe.h"
#include "data/duplicates.h"
#include "data/input.h"
#include "data/shards.h"
#include "llmtrain/base/flags.h"

static Error error;

// Text with words of random letters, some of them far outside ASCII. The caller frees it.
static char* random_text(size_t bytes, uint64_t seed) {
    static const char* const parts[] = {"a", "b", "th", "e", "er", "ing", " ", " ", " ", "\n", "\n\n", ". ", "7", "é",
                                        "ж", "中", "  ", "'s", "aaaa", "\xF0\x9F\x99\x82"};
    char* text = (char*)malloc(bytes + 16);
    size_t used = 0;
    need(text != NULL, "memory");
    for (uint64_t i = 0; used < bytes; i++) {
        const char* part = parts[random_bits(seed, RANDOM_TEST, 0, i) % COUNT_OF(parts)];
        memcpy(text + used, part, strlen(part) + 1);
        used += strlen(part);
    }
    text[bytes] = 0;
    return text;
}

// ------------------------------------------------------------------------------------------------
// Files and input

static void test_files(void) {
    FileList files;
    put_text("b.txt", "b");
    put_text("a.txt", "a");
    put_text("c,d.txt", "c");
    expect(file_list_find(&files, "*.txt", &error) && files.count == 3 && strcmp(files.names[0], "a.txt") == 0 &&
           strcmp(files.names[2], "c,d.txt") == 0, "sorted");
    file_list_free(&files);
    expect(file_list_find(&files, "b.txt,a*,*.txt", &error) && files.count == 3 && strcmp(files.names[1], "b.txt") == 0,
           "two patterns for a file");
    file_list_free(&files);
    expect(file_list_find(&files, "c,d.txt", &error) && files.count == 1, "a comma in the name of a file");
    file_list_free(&files);
    expect_refusal(file_list_find(&files, "a.txt,none*", &error), &error, "no file matches 'none*'", "none");
    expect_refusal(file_list_find(&files, "a.txt,,b.txt", &error), &error, "empty name", "two commas");
    verdict("files: patterns, commas, each once, in the order of their bytes");
}

// Reads a whole file, unpacked, in steps of `room` bytes; false with the error. The caller frees *text.
static bool read_unpacked(const char* path, char** text, size_t* bytes, size_t room) {
    Input input;
    size_t places = 1 << 16, some = 1;
    *text = (char*)malloc(places);
    *bytes = 0;
    bool ok = input_open(&input, path, &error) && input_unpack(&input, &error);
    while (ok && some > 0) {
        if (places - *bytes < room) *text = (char*)realloc(*text, places = 2 * places + room);
        ok = input_read(&input, &some, *text + *bytes, room, &error);
        *bytes += some;
    }
    input_close(&input);
    return ok;
}

static void expect_unpacked(const char* path, const char* text, size_t bytes, const char* what) {
    static const size_t rooms[] = {1, 7, 4096, 1 << 18};
    for (size_t i = bytes > 100000 ? 2 : 0; i < COUNT_OF(rooms); i++) {
        char* found;
        size_t count;
        bool ok = read_unpacked(path, &found, &count, rooms[i]);
        expect(ok, "%s: %s", what, error.text);
        expect(!ok || (count == bytes && memcmp(found, text, bytes) == 0), "%s: another text, %zu bytes", what, count);
        free(found);
    }
}

// Compresses a text with gzip (kind 0) or zstd (1), and appends it to a file; false if the library is missing.
static bool pack(const char* path, const char* mode, int kind, const char* text, size_t bytes) {
    size_t room = bytes + bytes / 2 + 1000, used = 0;
    char* packed = (char*)malloc(room);
    bool can = false;
    need(packed != NULL, "memory");
#ifdef LLMTRAIN_ZLIB
    if (kind == 0) {
        z_stream z;
        memset(&z, 0, sizeof z);
        need(deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK, "zlib");
        z.next_in = (unsigned char*)(uintptr_t)text;
        z.avail_in = (uInt)bytes;
        z.next_out = (unsigned char*)packed;
        z.avail_out = (uInt)room;
        need(deflate(&z, Z_FINISH) == Z_STREAM_END, "zlib");
        used = room - z.avail_out;
        deflateEnd(&z);
        can = true;
    }
#endif
#ifdef LLMTRAIN_ZSTD
    if (kind == 1) {
        used = ZSTD_compress(packed, room, text, bytes, 3);
        need(!ZSTD_isError(used), "zstd");
        can = true;
    }
#endif
    (void)text;
    FILE* file = can ? fopen(path, mode) : NULL;
    need(!can || (file && fwrite(packed, 1, used, file) == used && fclose(file) == 0), "%s", path);
    free(packed);
    return can && kind >= 0;
}

static void test_input(void) {
    enum { BYTES = 700001 };
    static const char* const names[2] = {"gzip", "zstd"};
    static const char begins[2][5] = {"\x1F\x8B\x08\x00", "\x28\xB5\x2F\xFD"};
    char* text = random_text(BYTES, 1);
    put_bytes("plain", text, BYTES);
    put_text("short", "ab");
    put_text("nothing", "");
    put_bytes("almost", "\x1F", 1);
    expect_unpacked("plain", text, BYTES, "plain");
    expect_unpacked("short", "ab", 2, "two bytes");
    expect_unpacked("nothing", "", 0, "no bytes");
    expect_unpacked("almost", "\x1F", 1, "the first byte of gzip");
    verdict("input: files that are not packed");
    for (int kind = 0; kind < 2; kind++) {
        char* found;
        size_t bytes;
        if (!pack("packed", "wbe", kind, text, BYTES)) {
            put_bytes("packed", begins[kind], 4);
            bool read = read_unpacked("packed", &found, &bytes, 100);
            expect_refusal(read, &error, "apt-get install", names[kind]);
            free(found);
            verdict("input: %s is refused with the package to install", names[kind]);
            continue;
        }
        expect_unpacked("packed", text, BYTES, names[kind]);
        pack("packed", "abe", kind, "more", 4);
        pack("packed", "abe", kind, "", 0);
        char* longer = (char*)malloc(BYTES + 4);
        need(longer != NULL, "memory");
        memcpy(longer, text, BYTES);
        memcpy(longer + BYTES, "more", 4);
        expect_unpacked("packed", longer, BYTES + 4, "packed files that are joined");
        if (kind == 0) {  // as tar and tapes pad
            static const char zeros[1000] = {0};
            FILE* file = fopen("packed", "abe");
            need(file && fwrite(zeros, 1, sizeof zeros, file) == sizeof zeros && fclose(file) == 0, "packed");
            expect_unpacked("packed", longer, BYTES + 4, "a packed file with zeros behind it");
        }
        free(longer);
        pack("packed", "wbe", kind, "", 0);
        expect_unpacked("packed", "", 0, "packed nothing");
        verdict("input: %s", names[kind]);
        pack("packed", "wbe", kind, text, BYTES);
        char* whole = text_read("packed", &bytes);
        for (size_t cut = 4; cut < bytes; cut += bytes / 13) {
            put_bytes("cut", whole, cut);
            size_t ignored;
            bool read = read_unpacked("cut", &found, &ignored, 4096);
            expect_refusal(read, &error, "damaged", text_of("%zu of %zu bytes", cut, bytes));
            free(found);
        }
        size_t refused = 0;
        for (size_t i = 0; i < 40; i++) {
            put_bytes("flipped", whole, bytes);
            flip_byte("flipped", 4 + random_bits(2, RANDOM_TEST, 0, i) % (bytes - 4));
            size_t count;
            bool read = read_unpacked("flipped", &found, &count, 4096);
            refused += !read;
            expect(read || strstr(error.text, "damaged"), "%s", error.text);
            free(found);
        }
        expect(kind == 1 || refused > 30, "%zu of 40 flipped files are refused", refused);  // zstd has no checksum here
        free(whole);
        verdict("input: %s that is cut or damaged", names[kind]);
    }
    free(text);
}

// ------------------------------------------------------------------------------------------------
// Documents

typedef struct {
    char* text;  // of all pieces in order, with a zero byte after each document
    size_t bytes, room;
    uint64_t documents, pieces, longest, last;
    bool ordered;
} Read;

static void read_piece(Read* r, const Batch* batch, const Piece* piece) {
    if (r->room - r->bytes < piece->bytes + 1) {
        r->room = 2 * r->room + piece->bytes + 1;
        r->text = (char*)realloc(r->text, r->room);
        need(r->text != NULL, "memory");
    }
    memcpy(r->text + r->bytes, batch->text + piece->start, piece->bytes);
    r->bytes += piece->bytes;
    if (piece->ends) r->text[r->bytes++] = 0;
    bool follows = piece->begins ? r->pieces == 0 || piece->document > r->last : piece->document == r->last;
    r->ordered = r->ordered && follows;
    r->last = piece->document;
    r->documents += piece->begins;
    r->pieces++;
    r->longest = max_size(r->longest, piece->bytes);
}

static bool read_documents(Read* r, const char* patterns, const char* field, uint64_t split, int times) {
    Documents documents;
    Batch batch = {0};
    memset(r, 0, sizeof *r);
    bool ok = documents_open(&documents, patterns, field, &error);
    if (ok) documents.split = split;
    for (int i = 0; ok && i < times; i++) {
        r->bytes = r->documents = r->pieces = r->longest = 0;
        r->ordered = true;
        documents_rewind(&documents);
        uint64_t before = 0, taken;
        bool progress = true;
        while ((ok = documents_next(&documents, &batch, &error)) && batch.count > 0) {
            for (size_t k = 0; k < batch.count; k++) read_piece(r, &batch, &batch.pieces[k]);
            taken = documents_taken(&documents);
            progress = progress && taken > 0 && taken >= before && taken <= documents.size;
            before = taken;
        }
        expect(progress, "%s: the bytes read do not grow from above 0 to all", patterns);
    }
    if (ok) expect(documents_taken(&documents) == documents.size, "%s: not all bytes count as read", patterns);
    batch_free(&batch);
    documents_close(&documents);
    return ok;
}

static void expect_documents(const char* patterns, const char* field, uint64_t split, const char* text, size_t bytes,
                             uint64_t documents) {
    Read r;
    if (expect(read_documents(&r, patterns, field, split, 2), "%s: %s", patterns, error.text)) {
        expect(r.bytes == bytes && memcmp(r.text, text, bytes) == 0, "%s: other text, %zu bytes, not %zu", patterns,
               r.bytes, bytes);
        expect(r.documents == documents && r.ordered, "%s: %llu documents", patterns, (unsigned long long)r.documents);
    }
    free(r.text);
}

static void test_documents(void) {
    enum { BYTES = LLMTRAIN_PIECE(40000000, 2440) };
    char* text = random_text(BYTES, 3);
    put_bytes("long.txt", text, BYTES);
    Read r;
    expect(read_documents(&r, "long.txt", NULL, 0, 1), "%s", error.text);
    expect(r.bytes == BYTES + 1 && memcmp(r.text, text, BYTES) == 0, "another text");
    expect(r.documents == 1 && r.pieces >= 30 && r.pieces < 60 && r.longest < LLMTRAIN_PIECE(2000000, 122),
           "%llu pieces of at most %llu bytes", (unsigned long long)r.pieces, (unsigned long long)r.longest);
    uint64_t pieces = r.pieces;
    free(r.text);
    if (pack("long.gz", "wbe", 0, text, BYTES)) {
        expect(read_documents(&r, "long.gz", NULL, 0, 1), "%s", error.text);
        expect(r.bytes == BYTES + 1 && memcmp(r.text, text, BYTES) == 0 && r.pieces == pieces, "packed: other pieces");
        free(r.text);
    }
    // A line of JSON that is longer than what is read of a file at a time.
    enum { WIDE = LLMTRAIN_PIECE(600000, 60) };
    char* wide = (char*)malloc(WIDE + 100);
    need(wide != NULL, "memory");
    size_t begins = (size_t)sprintf(wide, "{\"text\": \"");
    memset(wide + begins, 'w', WIDE);
    strcpy(wide + begins + WIDE, "\"}\n{\"text\": \"next\"}\n");
    put_text("wide.jsonl", wide);
    free(wide);
    expect(read_documents(&r, "wide.jsonl", "text", 0, 1), "%s", error.text);
    expect(r.documents == 2 && r.bytes == WIDE + 1 + 5 && strcmp(r.text + WIDE + 1, "next") == 0 &&
           strspn(r.text, "w") == WIDE, "a long line: %llu documents of %zu bytes", (unsigned long long)r.documents,
           r.bytes);
    free(r.text);
    size_t split = (size_t)((char*)memchr(text + BYTES / 4 * 3, '\n', BYTES / 4) + 1 - text);
    char* divided = (char*)malloc(BYTES + 2);
    need(divided != NULL, "memory");
    memcpy(divided, text, split);
    divided[split] = 0;
    memcpy(divided + split + 1, text + split, BYTES - split);
    divided[BYTES + 1] = 0;
    expect_documents("long.txt", NULL, BYTES / 4 * 3, divided, BYTES + 2, 2);
    free(divided);
    free(text);
    char* same = (char*)malloc(BYTES + 1);
    need(same != NULL, "memory");
    memset(same, 'x', BYTES);
    same[BYTES] = 0;
    put_bytes("same.txt", same, BYTES);
    expect_documents("same.txt", NULL, 0, same, BYTES + 1, 1);
    free(same);
    verdict("documents: a long one comes in pieces, the same ones when it is packed");

    put_text("d1.txt", "one");
    put_text("d2.txt", "");
    put_text("d3.txt", "three\n");
    expect_documents("d*.txt", NULL, 0, "one\0three\n", 11, 2);
    expect_documents("d3.txt,d1.txt", NULL, 0, "one\0three\n", 11, 2);
    put_text("lines.txt", "first line\nsecond line\nthird line\nand no end");
    expect_documents("lines.txt", NULL, 1, "first line\n\0second line\nthird line\nand no end", 46, 2);
    expect_documents("lines.txt", NULL, 10, "first line\n\0second line\nthird line\nand no end", 46, 2);
    expect_documents("lines.txt", NULL, 11, "first line\nsecond line\n\0third line\nand no end", 46, 2);
    expect_documents("lines.txt", NULL, 40, "first line\nsecond line\nthird line\nand no\0 end", 46, 2);
    put_text("wide.txt", "日本日本");
    expect_documents("wide.txt", NULL, 7, "日本\0日本", 14, 2);
    verdict("documents: files, empty ones, one that is divided between lines");

    put_text("j1.jsonl", "{\"text\": \"a\\nb\", \"id\": 1}\r\n\n  \t\n"
             "{\"n\": [{\"text\": 7}], \"text\": \"\\u00e9\\ud83d\\ude42\"}\n");
    put_text("j2.jsonl", "{\"text\": \"\"}\n{\"text\": \"last\"}");
    expect_documents("j?.jsonl", "text", 0, "a\nb\0\0\0é\xF0\x9F\x99\x82\0\0last\0", 19, 6);
    // What Python's json reads is read: a byte order mark, half a surrogate pair, NaN, a name given twice; null is empty.
    put_text("p.jsonl", "\xEF\xBB\xBF{\"text\": \"a\", \"x\": [NaN, -Infinity, Infinity]}\n{\"text\": null}\n"
             "{\"text\": \"no\", \"text\": \"b\\ud83d c\\udc00\"}\n{\"text\": \"\\udc00\\ud83d\\ude42\"}\n");
    expect_documents("p.jsonl", "text", 0, "a\0\0b\xEF\xBF\xBD c\xEF\xBF\xBD\0\xEF\xBF\xBD\xF0\x9F\x99\x82\0", 21, 4);
    char deep[2048];
    int at = sprintf(deep, "{\"x\": [1e400, 1%0400d, ", 0);  // an integer of 401 digits
    memset(deep + at, '[', 500);
    memset(deep + at + 500, ']', 500);
    sprintf(deep + at + 1000, "], \"text\": \"deep\"}\n");
    put_text("p.jsonl", deep);
    expect_documents("p.jsonl", "text", 0, "deep\0", 5, 1);
    static const struct { const char *line, *words; } bad[] = {
        {"{\"body\": \"a\"}", "bad.jsonl, line 3 has no member \"text\"; name"},
        {"{\"text\": 5}", "bad.jsonl, line 3: its member \"text\" is not a string"},
        {"\"text\"", "bad.jsonl, line 3 has no member"},
        {"[{\"text\": \"a\"}, {\"text\": \"b\"}]", "bad.jsonl, line 3 begins a JSON array"},
        {" [", "bad.jsonl, line 3 begins a JSON array"},
        {"{\"text\": \"a}", "bad.jsonl, line 3 is not valid JSON: byte 1"},
        {"{\"text\": \"a\"} x", "or of another kind; --bad-lines skip leaves out lines that are bad"},
        {"{\"text\": \"\xFF\"}", "bad.jsonl, line 3 is not valid JSON"},
        {"{\"text\": \"a\", \"x\": nan}", "bad.jsonl, line 3 is not valid JSON"},
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        put_text("bad.jsonl", text_of("{\"text\": \"a\"}\n\n%s\n{\"text\": 6}\n", bad[i].line));
        bool read = read_documents(&r, "bad.jsonl", "text", 0, 1);
        expect_refusal(read, &error, bad[i].words, bad[i].line);
        free(r.text);
    }
    verdict("documents: lines of JSON; bad ones are refused with file and line");
}

// No word of any pattern crosses a place where a piece may end, or where an encoder cuts a text for its threads.
static void test_cuts(const Unicode* unicode, const char* tokenizer_path) {
    enum { BYTES = 200000 };
    static const char* const parts[] = {"a", "the", "Th", "é", "ж", "Жук", "文", "한", " ", " ", " ", "  ", "     ", "\n",
                                        "\n\n", "\r\n", "\t", "\xC2\xA0", "7", "42", "1234", ".", "...", "(", "'s", "'",
                                        "/", "_", "\xF0\x9F\x99\x82", "e\xCC\x81", METASPACE, METASPACE METASPACE};
    static char text[BYTES + 64], starts[BYTES + 64];
    size_t bytes = 0, ends[3] = {0};
    for (uint64_t i = 0; bytes < BYTES; i++)
        bytes += (size_t)sprintf(text + bytes, "%s", parts[random_bits(11, RANDOM_TEST, 0, i) % COUNT_OF(parts)]);
    for (int kind = 0; kind < 2 * (SPLIT_O200K + 1); kind++) {
        Split split = (Split)(kind / 2);
        size_t length, wrong_ends = 0, wrong_cuts = 0, cuts = 0;
        WordSplitter words = splitter_begin(unicode, split, kind % 2, text, bytes);
        memset(starts, 0, sizeof starts);
        for (const char* word; (word = splitter_next(&words, &length)) != NULL;) starts[word - text] = 1;
        for (size_t i = 1; i < bytes; i++) {
            if (split >= SPLIT_GPT2 && piece_may_end(text, i)) {
                unsigned char before = (unsigned char)text[i - 1];
                ends[before < 0x80 ? 0 : (text[i - 2] & 0xE0) == 0xC0 ? 1 : 2]++;
                wrong_ends += !starts[i];
            }
            if (!split_may_cut(unicode, split, text, text + i, text + bytes)) continue;
            cuts++;
            wrong_cuts += !starts[i];
        }
        expect(wrong_ends == 0 && wrong_cuts == 0 && (cuts > 0) == (split != SPLIT_WHOLE),
               "pattern %d: %zu pieces end in a word, and %zu of %zu cuts", split, wrong_ends, wrong_cuts, cuts);
    }
    expect(ends[0] > 100 && ends[1] > 100 && ends[2] > 100, "pieces end after %zu, %zu and %zu letters", ends[0],
           ends[1], ends[2]);

    // A long text of such parts, mostly spaces: the tokens of its pieces are those of the whole.
    enum { LONG = LLMTRAIN_PIECE(2400000, 240000) };
    char* whole = (char*)malloc(LONG + BYTES);
    Tokens tokens[2] = {{0}};
    Tokenizer tokenizer;
    Documents documents;
    Batch batch = {0};
    size_t used = 0, count = 0;
    need(whole != NULL && tokenizer_open(&tokenizer, tokenizer_path, NULL, &error), "%s", error.text);
    for (uint64_t i = 0; used < LONG; i++) {
        size_t run = random_bits(12, RANDOM_TEST, 0, i) % 60;
        memset(whole + used, ' ', run);
        used += run;
        used += (size_t)sprintf(whole + used, "%s", parts[random_bits(12, RANDOM_TEST, 1, i) % COUNT_OF(parts)]);
    }
    put_bytes("spaces.txt", whole, used);
    WordEncoder encoder = tokenizer_encoder(&tokenizer);
    need(tokenizer_encode_by(&tokens[0], &tokenizer, &encoder, whole, used, &error) &&
         documents_open(&documents, "spaces.txt", NULL, &error), "%s", error.text);
    bool ok;
    while ((ok = documents_next(&documents, &batch, &error)) && batch.count > 0)
        for (size_t i = 0; i < batch.count; i++, count++)
            need(tokenizer_encode_by(&tokens[1], &tokenizer, &encoder, batch.text + batch.pieces[i].start,
                                     batch.pieces[i].bytes, &error), "%s", error.text);
    expect(ok && count > 1, "%zu pieces: %s", count, error.text);
    expect(tokens[0].count == tokens[1].count &&
           memcmp(tokens[0].ids, tokens[1].ids, tokens[0].count * sizeof(int32_t)) == 0, "%zu tokens, and %zu",
           tokens[0].count, tokens[1].count);
    word_encoder_close(&encoder);
    tokenizer_close(&tokenizer);
    batch_free(&batch);
    documents_close(&documents);
    tokens_free(&tokens[0]);
    tokens_free(&tokens[1]);
    free(whole);
    verdict("documents: pieces end where no pattern has a word");
}

// ------------------------------------------------------------------------------------------------
// Training

// The merges found by counting all pairs again each time, as "left right" in the form of our trainer's Bpe; changes
// `words`.
static size_t merges_by_counting(BpeMerge* merges, const WordTable* words, size_t most) {
    int32_t* tokens = (int32_t*)malloc((words->used + 1) * sizeof *tokens);
    size_t* lengths = (size_t*)malloc((words->count + 1) * sizeof *lengths);
    uint64_t* counts = (uint64_t*)malloc((256 + most) * (256 + most) * sizeof *counts);
    size_t made = 0;
    need(tokens && lengths && counts, "memory");
    for (size_t i = 0; i < words->used; i++) tokens[i] = byte_token((unsigned char)words->bytes[i]);
    for (size_t w = 0; w < words->count; w++) lengths[w] = words->words[w].bytes;
    for (; made < most; made++) {
        size_t V = 256 + made, best = 0;
        memset(counts, 0, V * V * sizeof *counts);
        for (size_t w = 0; w < words->count; w++)
            for (size_t i = 0; i + 1 < lengths[w]; i++) {
                const int32_t* pair = tokens + words->words[w].start + i;
                counts[(size_t)pair[0] * V + (size_t)pair[1]] += words->words[w].count;
            }
        for (size_t i = 1; i < V * V; i++)
            if (counts[i] > counts[best]) best = i;
        if (counts[best] == 0) break;
        BpeMerge merge = {(int32_t)(best / V), (int32_t)(best % V), (int32_t)V};
        merges[made] = merge;
        for (size_t w = 0; w < words->count; w++) {
            int32_t* word = tokens + words->words[w].start;
            size_t kept = 0;
            for (size_t i = 0; i < lengths[w]; i++) {
                bool joins = i + 1 < lengths[w] && word[i] == merge.left && word[i + 1] == merge.right;
                word[kept++] = joins ? merge.token : word[i];
                i += joins;
            }
            lengths[w] = kept;
        }
    }
    free(tokens);
    free(lengths);
    free(counts);
    return made;
}

static void test_training(const Unicode* unicode) {
    enum { MOST = 300 };
    static BpeMerge merges[MOST];
    for (uint64_t seed = 0; seed < 6; seed++) {
        WordTable words = {0};
        Bpe bpe;
        char* text = random_text(seed < 3 ? 60 : 6000, seed);
        expect(word_table_add_text(&words, unicode, text, strlen(text), &error) &&
               bpe_train(&bpe, &words, 257 + MOST, &error), "%s", error.text);
        size_t made = merges_by_counting(merges, &words, MOST);
        // A token that two merges produce has one number in ours and two there: compares only up to the first of these.
        size_t same = 0;
        while (same < min_size(made, bpe.merge_count) &&
               memcmp(&merges[same], &bpe.merges[same], sizeof merges[0]) == 0)
            same++;
        bool again = same < bpe.merge_count && bpe.merges[same].token < (int32_t)(256 + same);
        expect(same > 20 && (again || (same == made && same == bpe.merge_count)),
               "text %llu: %zu merges of %zu and %zu agree", (unsigned long long)seed, same, made, bpe.merge_count);
        bpe_free(&bpe);
        word_table_close(&words);
        free(text);
    }
    verdict("training: the merges of a trainer that counts all pairs again each time");
}

// The fixture: a text, and the merges of Hugging Face's trainer on it.
static void test_training_of_peer(const Unicode* unicode, const char* path) {
    Json json;
    WordTable words = {0};
    Bpe bpe;
    size_t bytes, same = 0, count = 0;
    char left[2 * TOKEN_BYTES_MAX + 1], right[2 * TOKEN_BYTES_MAX + 1], both[4 * TOKEN_BYTES_MAX + 2];
    char* text = text_read(path, &bytes);
    need(json_parse(&json, text, bytes, path, &error), "%s", error.text);
    const JsonNode* node = &json.nodes[json_get(&json, 0, "text")];
    expect(word_table_add_text(&words, unicode, json.text + node->start, node->bytes, &error) &&
           bpe_train(&bpe, &words, 800, &error), "%s", error.text);
    uint32_t theirs = json_get(&json, 0, "merges");
    for (uint32_t i = json_first(&json, theirs); i != JSON_NONE; i = json_next(&json, i), count++) {
        if (count >= bpe.merge_count) continue;
        bpe_write_piece(left, &bpe, bpe.merges[count].left);
        bpe_write_piece(right, &bpe, bpe.merges[count].right);
        snprintf(both, sizeof both, "%s %s", left, right);
        same += strcmp(both, json.text + json.nodes[i].start) == 0;
    }
    expect(count == 543 && same == count && count == bpe.merge_count, "%zu of %zu merges are the same, ours are %zu",
           same, count, bpe.merge_count);
    bpe_free(&bpe);
    word_table_close(&words);
    json_free(&json);
    free(text);
    verdict("training: the merges of Hugging Face's trainer");
}

// ------------------------------------------------------------------------------------------------
// Duplicates

enum { DICTIONARY = 5000 };

// A document of numbered words: `from` to `to` of text `seed`.
static size_t write_words(char* text, size_t used, uint64_t seed, size_t from, size_t to, const char* space) {
    for (size_t i = from; i < to; i++)
        used += (size_t)sprintf(text + used, "word%u%s", random_bits(seed, RANDOM_TEST, 1, i) % DICTIONARY, space);
    return used;
}

// Adds a text; returns the document that it duplicates, or -1.
static int64_t add_document(Duplicates* d, FoundDuplicate* found, const char* text, uint64_t number) {
    Sketch sketch;
    sketch_make(&sketch, d->near, text, strlen(text));
    if (!expect(duplicates_add(d, found, &sketch, number, &error), "%s", error.text)) return -2;
    return found->any ? (int64_t)found->of : -1;
}

static void test_duplicates(void) {
    enum { N = 400, OTHERS = 1200 };
    static char text[N * 20], other[N * 20];
    Duplicates d;
    FoundDuplicate found;
    expect(duplicates_open(&d, false, 0.8, &error), "%s", error.text);
    write_words(text, 0, 1, 0, N, " ");
    write_words(other, 0, 1, 0, N, "  ");
    expect(add_document(&d, &found, text, 5) == -1 && add_document(&d, &found, other, 6) == -1, "different bytes");
    expect(add_document(&d, &found, text, 7) == 5 && found.exact && found.similarity == 1, "the same bytes");
    expect(add_document(&d, &found, other, 8) == 6, "the others");
    duplicates_close(&d);
    // Documents of several pieces: those that differ in one piece, in their order or number are different.
    static const char* const orders[] = {"abc", "bbc", "acc", "abb", "acb", "bac", "ab", "abcc", "a", "bc"};
    Sketch pieces[3];
    expect(duplicates_open(&d, false, 0.8, &error), "%s", error.text);
    for (int i = 0; i < 3; i++) sketch_make(&pieces[i], false, &"one two three"[i], 8);
    for (size_t i = 0; i < 2 * COUNT_OF(orders); i++) {
        const char* order = orders[i % COUNT_OF(orders)];
        Sketch whole = pieces[order[0] - 'a'];
        for (size_t k = 1; order[k]; k++) sketch_join(&whole, &pieces[order[k] - 'a']);
        bool again = i >= COUNT_OF(orders);
        expect(duplicates_add(&d, &found, &whole, i, &error), "%s", error.text);
        expect(found.exact == again && (!again || found.of == i - COUNT_OF(orders)), "%s repeats %llu", order,
               (unsigned long long)found.of);
    }
    duplicates_close(&d);
    // Each minimum of the whole is the least of the pieces'.
    for (int i = 0; i < 2; i++) sketch_make(&pieces[i], true, i ? "four five six" : "one two three", 13);
    for (int first = 0; first < 2; first++) {
        pieces[2] = pieces[first];
        sketch_join(&pieces[2], &pieces[!first]);
        for (int i = 0; i < SIGNATURE; i++)
            expect(pieces[2].least[i] == (pieces[0].least[i] < pieces[1].least[i] ? pieces[0] : pieces[1]).least[i],
                   "minimum %d of two pieces", i);
    }
    // What a sketch held before is gone: a piece without words has none.
    Sketch after = pieces[0];
    sketch_make(&after, true, "one two three", 13);
    expect(after.words, "words are missed");
    sketch_make(&after, true, "... !", 5);
    expect(!after.words, "it has words");
    for (int i = 0; i < SIGNATURE; i++) expect(after.least[i] == UINT32_MAX, "minimum %d is %u", i, after.least[i]);
    verdict("duplicates: exact ones, of one piece and of several");

    // Pairs with a common beginning: of N words each, the first k equal, they share k - 4 of 2 N - 4 - k shingles.
    expect(duplicates_open(&d, true, 0.8, &error), "%s", error.text);
    for (uint64_t i = 0; i < OTHERS; i++) {
        write_words(text, 0, 1000 + i, 0, N, " ");
        expect(add_document(&d, &found, text, i) == -1, "document %llu repeats %lld", (unsigned long long)i,
               (long long)found.of);
    }
    double worst = 0, squares = 0;
    int pairs = 0, wrong = 0;
    for (uint64_t i = 0; i < OTHERS; i += 4, pairs++) {
        size_t k = N * (50 + i / 4 % 50) / 100;
        size_t used = write_words(text, 0, 1000 + i, 0, k, ", ");
        write_words(text, used, 5000 + i, k, N, "\n");
        double truth = (double)(k - 4) / (double)(2 * (N - 4) - (k - 4));
        Sketch sketch, first;
        uint8_t signature[SIGNATURE];
        sketch_make(&sketch, true, text, strlen(text));
        write_words(other, 0, 1000 + i, 0, N, " ");
        sketch_make(&first, true, other, strlen(other));
        for (size_t s = 0; s < SIGNATURE; s++) signature[s] = (uint8_t)sketch.least[s];
        double off = fabs(duplicates_compare(&d, signature, i) - truth);
        worst = fmax(worst, off);
        squares += off * off;
        bool near = add_document(&d, &found, text, OTHERS + i) == (int64_t)i;
        // Beyond four standard errors from the bound the result is certain, whatever is drawn.
        double doubt = 4 * sqrt(0.8 * 0.2 / SIGNATURE);
        if (truth > 0.8 + doubt) wrong += !near || found.exact || fabs(found.similarity - truth) > doubt;
        else if (truth < 0.8 - doubt) wrong += found.any;
    }
    check(wrong == 0, "duplicates: near ones are found, others stay: %d of %d pairs are wrong", wrong, pairs);
    check_bound(sqrt(squares / pairs), 0.5 / sqrt(SIGNATURE), "duplicates: error of the estimated similarity, rms of "
                "%d", pairs);
    check_bound(worst, 4.5 * 0.5 / sqrt(SIGNATURE), "duplicates: the same, at most");
    duplicates_close(&d);

    expect(duplicates_open(&d, true, 0.8, &error), "%s", error.text);
    expect(add_document(&d, &found, "", 0) == -1 && add_document(&d, &found, "...", 1) == -1, "no words");
    expect(add_document(&d, &found, "!!", 2) == -1, "other signs");
    expect(add_document(&d, &found, "Good morning, all", 3) == -1, "three words");
    expect(add_document(&d, &found, "good MORNING all!", 4) == 3 && !found.exact, "the same three");
    expect(add_document(&d, &found, "good morning to all", 5) == -1, "four words");
    expect(add_document(&d, &found, "Schöne Grüße an alle dort", 6) == -1, "letters beyond ASCII");
    expect(add_document(&d, &found, "Schöne  Grüße an alle, dort", 7) == 6, "and again");
    // Boilerplate: the same long beginning in documents that differ after it, and a band that thousands share.
    size_t used = write_words(text, 0, 7, 0, N / 2, " ");
    clock_t began = clock();
    double half = 0;  // seconds of the first half
    for (uint64_t i = 0; i < 3000; i++) {
        if (i == 1500) half = (double)(clock() - began) / CLOCKS_PER_SEC;
        write_words(text, used, 20000 + i, 0, N / 2, " ");
        int64_t of = add_document(&d, &found, text, 100 + i);
        expect(of == -1, "document %llu, half boilerplate, repeats %lld", (unsigned long long)i, (long long)of);
    }
    double whole = (double)(clock() - began) / CLOCKS_PER_SEC;
    // If each were compared with all before it, the second half would take three times as long as the first.
    expect(whole < 3 * half + 0.25, "boilerplate takes %.2f s, its first half %.2f s", whole, half);
    duplicates_close(&d);
    verdict("duplicates: few words, letters of any script, boilerplate");
}

// ------------------------------------------------------------------------------------------------
// The program tokenize

static char *tokenize, *train;
static char output[8192];  // of the last run: standard output and standard error

static int run(const char* command) {
    FILE* pipe = popen(text_of("%s 2>&1", command), "r");
    size_t length = pipe ? fread(output, 1, sizeof output - 1, pipe) : 0;
    output[length] = 0;
    int status = pipe ? pclose(pipe) : -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static bool expect_run(int status, const char* words, const char* program, const char* arguments) {
    int result = run(text_of("%s %s", program, arguments));
    bool good = expect(result == status, "%s: exit status %d: %s", arguments, result, output);
    return expect(strstr(output, words) != NULL, "%s: '%s' is not in: %s", arguments, words, output) && good;
}

// The documents of shards: their tokens' bytes, with a zero byte per end of text. The caller frees them.
static char* shards_text(const char* pattern, const char* directory, size_t* bytes) {
    Dataset dataset;
    Tokenizer tokenizer;
    char* text = (char*)calloc(1 << 22, 1);
    *bytes = 0;
    need(text != NULL, "memory");
    if (!expect(dataset_open(&dataset, pattern, &error), "%s", error.text)) return text;
    if (!expect(tokenizer_open(&tokenizer, directory, NULL, &error), "%s", error.text)) return text;
    expect(dataset.vocabulary == tokenizer.vocabulary, "vocabulary %d", dataset.vocabulary);
    for (size_t s = 0; s < dataset.shard_count; s++)
        for (size_t i = 0; i < dataset.shards[s].count; i++) {
            int32_t token = (int32_t)shard_token(&dataset.shards[s], i);
            size_t count = 1;
            const char* piece = token == tokenizer.end_of_text ? "" : tokenizer_piece(&count, &tokenizer, token);
            need(*bytes + count < 1 << 22, "room for a text");
            memcpy(text + *bytes, piece, count);
            *bytes += count;
        }
    tokenizer_close(&tokenizer);
    dataset_close(&dataset);
    return text;
}

static void expect_shards(const char* pattern, const char* directory, const char* text, size_t bytes) {
    size_t found;
    char* all = shards_text(pattern, directory, &found);
    expect(found == bytes && memcmp(all, text, bytes) == 0, "%s: another text, of %zu bytes, not %zu", pattern, found,
           bytes);
    free(all);
}

static void test_conversion(void) {
    enum { LINES = 500 };
    static char text[300000], lines[300000], all[300000];
    size_t used = 0, bytes = 0, all_bytes = 0;
    expect_run(0, "tokens, of", tokenize, "--train-bpe 400 --text long_part.txt --out tok");
    expect_run(0, "", tokenize, "--threads 1 --train-bpe 400 --text long_part.txt --out tok1");
    expect(run("cmp tok/tokenizer.json tok1/tokenizer.json") == 0, "other merges with another number of threads");
    expect_run(0, "note: every word", tokenize, "--train-bpe 5000 --text d3.txt --out few");
    verdict("tokenize --train-bpe: the same for any number of threads");

    // Documents with tricky texts: white space at their ends, special tokens, and none at all.
    for (size_t i = 0; i < LINES; i++) {
        size_t begin = all_bytes;
        bytes += (size_t)sprintf(lines + bytes, "{\"id\": %zu, \"body\": \"", i);
        for (size_t k = 0; k < random_bits(4, RANDOM_TEST, 2, i) % 40; k++) {
            const char* word = k % 7 == 3 ? "  " : k % 5 == 2 ? "жук " : "the frog ";
            bytes += (size_t)sprintf(lines + bytes, "%s%zu", word, i);
            all_bytes += (size_t)sprintf(all + all_bytes, "%s%zu", word, i);
        }
        bytes += (size_t)sprintf(lines + bytes, "\"}\n");
        if (all_bytes > begin) all[all_bytes++] = 0;
    }
    put_bytes("body.jsonl", lines, bytes);
    expect_run(0, "p_train_*.bin: ", tokenize, "--tokenizer tok --jsonl body.jsonl --field body --out p --val 0");
    expect_shards("p_train_*.bin", "p_tokenizer", all, all_bytes);
    expect_run(0, "q_train_*.bin: ", tokenize,
               "--threads 1 --tokenizer tok --jsonl body.jsonl --field body --out q --val 0 --shard-tokens 1000");
    expect_shards("q_train_*.bin", "q_tokenizer", all, all_bytes);
    if (pack("body.jsonl.gz", "wbe", 0, lines, bytes)) {
        expect_run(0, "", tokenize, "--tokenizer tok --jsonl body.jsonl.gz --field body --out z --val 0");
        expect(run("cmp z_train_000000.bin p_train_000000.bin") == 0, "other shards of packed lines");
    }
    verdict("tokenize --jsonl: all documents, each with its end of text");

    // A tenth for validation: each document is in one of the two sets, and which one does not depend on threads.
    expect_run(0, "s_val_*.bin: ", tokenize, "--tokenizer tok --jsonl body.jsonl --field body --out s --val 0.1");
    expect_run(0, "", tokenize, "--threads 1 --tokenizer tok --jsonl body.jsonl --field body --out t --val 0.1");
    expect(run("cmp s_val_000000.bin t_val_000000.bin && cmp s_train_000000.bin t_train_000000.bin") == 0, "threads");
    size_t train_bytes, val_bytes, documents = 0, in_val = 0;
    char* in_train = shards_text("s_train_*.bin", "s_tokenizer", &train_bytes);
    char* validation = shards_text("s_val_*.bin", "s_tokenizer", &val_bytes);
    expect(train_bytes + val_bytes == all_bytes, "%zu and %zu bytes of %zu", train_bytes, val_bytes, all_bytes);
    const char *a = in_train, *b = validation;
    for (const char* at = all; at < all + all_bytes; at += strlen(at) + 1, documents++) {
        bool of_val = b < validation + val_bytes && strcmp(b, at) == 0, of_train = !of_val && strcmp(a, at) == 0;
        expect(of_val || of_train, "document %zu is in neither", documents);
        if (of_val) b += strlen(b) + 1, in_val++;
        else a += strlen(a) + 1;
    }
    expect(in_val >= documents / 10 - 6 && in_val <= documents / 10 + 6, "%zu of %zu documents", in_val, documents);
    free(in_train);
    free(validation);
    verdict("tokenize --val: by document, the fraction that is asked for");

    // A single text: its end is used for validation. The entropy floor is stored per token.
    for (size_t i = 0; used < 200000; i++) used += (size_t)sprintf(text + used, "This is line %zu.\n", i);
    put_bytes("one.txt", text, used);
    expect_run(0, "1 shard", tokenize, "--tokenizer tok --text one.txt --out one --val 0.25 --entropy 0.5");
    size_t first_bytes, last_bytes;
    char* first = shards_text("one_train_*.bin", "one_tokenizer", &first_bytes);
    char* last = shards_text("one_val_*.bin", "one_tokenizer", &last_bytes);
    expect(first_bytes + last_bytes == used + 2 && memcmp(first, text, first_bytes - 1) == 0 &&
           memcmp(last, text + first_bytes - 1, last_bytes - 1) == 0 && strncmp(last, "This is", 7) == 0, "parts");
    check_bound(fabs((double)last_bytes / (double)used - 0.25), 1e-3, "tokenize --text: a quarter of one text");
    Dataset dataset;
    if (expect(dataset_open(&dataset, "one_val_*.bin", &error), "%s", error.text)) {
        double floor = 0.5 * (double)(last_bytes - 1) / (double)dataset_tokens(&dataset);
        check_bound(fabs(dataset.entropy_floor - floor), 1e-12, "tokenize --entropy: per token");
        dataset_close(&dataset);
    }
    free(first);
    free(last);
    verdict("tokenize --text: one document is divided between lines");

    put_text("special.txt", "one <|endoftext|> two");
    expect_run(0, "", tokenize, "--out sp --text special.txt --tokenizer tok --val 0");
    expect_run(0, "", tokenize, "--out nosp --text special.txt --tokenizer tok --val 0 --special off");
    Shard special[2];
    for (int i = 0; i < 2; i++) {
        size_t ends = 0;
        need(shard_open(&special[i], i ? "nosp_train_000000.bin" : "sp_train_000000.bin", &error), "%s", error.text);
        uint32_t end = shard_token(&special[i], special[i].count - 1);
        for (size_t t = 0; t < special[i].count; t++) ends += shard_token(&special[i], t) == end;
        expect(ends == (i ? 1 : 2), "--special %s: %zu ends of text", i ? "off" : "on", ends);
        shard_close(&special[i]);
    }
    expect_run(0, "one <|endoftext|> two<|endoftext|>", tokenize, "--show nosp_train_000000.bin");
    expect(run(text_of("%s --tokenizer tok --encode < special.txt > ids; %s --tokenizer tok --encode --special off < "
                       "special.txt | cmp -s - ids", tokenize, tokenize)) == 1, "--encode --special off");
    put_text("only_bad.jsonl", "{\"content\": \"a\"}\n{\"content\": \"b\"}\n");
    put_text("other.parquet", "PAR1 and more");
    put_text("other.zip", "PK\3\4 and more");
    put_text("other.xz", "\xFD" "7zXZ and more");
    put_text("other.bz2", "BZh91AY and more");
    put_text("other.pdf", "%PDF-1.7 and more");
    put_bytes("other.utf16", "\xFF\xFE" "a", 3);
    put_bytes("other.le", "a\0b", 4);
    put_bytes("other.be", "\0{\0\"", 4);
    put_text("not_utf8.txt", "a\xFF" "b\xFE");
    put_text("j3.jsonl", "{\"text\": \"the only one\"}\n");
    put_text("not_other.txt", "BZhang wrote this.");
    expect_run(0, "1 documents of 18 bytes", tokenize, "--out no_other --text not_other.txt --tokenizer tok --val 0");
    expect_run(0, "\n2 byte sequences that are not UTF-8 were read as U+FFFD\n", tokenize,
               "--out not_utf8 --text not_utf8.txt --tokenizer tok --val 0");
    bool packed = pack("one.gz", "wbe", 0, "one text", 8);
    expect(run("mkdir noend && sed 's/<|endoftext|>/<|other|>/' tok/tokenizer.json > noend/tokenizer.json") == 0,
           "a tokenizer without an end of text");
    put_text("some.jsonl", "{\"text\": \"one\"}\n{\"text\": NaN}\n\n{\"text\": \"two\"}\n{}\nx\n{\"text\": \"thr");
    expect_run(0, "4 bad lines were skipped; the first:\n  some.jsonl, line 2: its member", tokenize,
               "--out some --jsonl some.jsonl --tokenizer tok --val 0 --bad-lines skip");
    expect(strstr(output, "some.jsonl, line 6") && !strstr(output, "line 7") && strstr(output, "\n2 documents of 6 "),
           "%s", output);
    static const struct { int status; const char *words, *arguments; } refusals[] = {
        {2, "give one of them", "--out gone --text d1.txt --jsonl j1.jsonl --tokenizer tok"},
        {2, "--tokenizer PATH is missing", "--out gone --text d1.txt"},
        {2, "needs no --tokenizer", "--out gone --text d1.txt --tokenizer tok --train-bpe 300"},
        {2, "needs no --tokenizer", "--out gone --bytes d1.txt --tokenizer tok"},
        {2, "give --text instead of --bytes", "--out gone --bytes d1.txt --train-bpe 300"},
        {2, "whole number from 257", "--out gone --text d1.txt --train-bpe 256"},
        {2, "--dedup leaves out documents", "--out gone --bytes d1.txt --dedup exact"},
        {2, "give one of off|exact|near", "--out gone --text d1.txt --tokenizer tok --dedup all"},
        {1, "no file matches 'none*'", "--out gone --text 'none*' --tokenizer tok"},
        {1, "is a directory", "--out gone --text tok --tokenizer tok"},
        {1, "none", "--out gone --text d1.txt --tokenizer none"},
        {1, "has no text in it", "--out gone --text d2.txt --tokenizer tok --val 0"},
        {1, "has no text in it", "--out gone --text d2.txt --train-bpe 300"},
        {1, "leaves none for validation", "--out gone --text d1.txt,d3.txt --tokenizer tok --val 0.01"},
        {1, "'j3.jsonl' has 1 documents, and of those --val 0.99 leaves none for training",
         "--out gone --jsonl j3.jsonl --tokenizer tok --val 0.99"},
        {1, "line 3", "--out gone --jsonl bad.jsonl --tokenizer tok --val 0"},
        {1, "and 2 bad lines; the first: only_bad.jsonl, line 1 has no member", "--out gone --jsonl "
         "only_bad.jsonl --tokenizer tok --val 0 --bad-lines skip"},
        {2, "--bad-lines is for --jsonl", "--out gone --text d1.txt --tokenizer tok --bad-lines skip"},
        {2, "--special is for --text", "--out gone --bytes d1.txt --special off"},
        {2, "--special is for --text", "--show p_val_000000.bin --special off"},
        {1, "other.parquet is a Parquet file, not text; convert it to JSON Lines: python3 data/parquet.py",
         "--out gone --text other.parquet --tokenizer tok"},
        {1, "other.utf16 is in UTF-16, not text; convert it with iconv", "--out gone --text other.utf16 --tokenizer tok"},
        {1, "other.le is in UTF-16, not text; convert it with iconv -f UTF-16LE", "--out gone --text other.le "
         "--tokenizer tok"},
        {1, "iconv -f UTF-16BE", "--out gone --jsonl other.be --tokenizer tok"},
        {1, "other.zip is a zip archive", "--out gone --jsonl other.zip --tokenizer tok"},
        {1, "other.xz is compressed with xz", "--out gone --text other.xz --tokenizer tok"},
        {1, "other.bz2 is compressed with bzip2", "--out gone --text other.bz2 --train-bpe 300"},
        {1, "other.pdf is a PDF", "--out gone --text other.pdf --tokenizer tok"},
        {1, "noend names no end-of-text token to separate documents; name it as \"eos_token\" in tokenizer_config.json",
         "--out gone --text d1.txt --tokenizer noend"},
        {1, "has a vocabulary of 400, but the tokenizer few of", "--show p_train_000000.bin --tokenizer few"},
        {1, "cannot create no/gone", "--out no/gone --text d1.txt --tokenizer tok --val 0"},
        {1, "was made with the tokenizer", "--out p --bytes d1.txt --val 1"},
    };
    for (size_t i = 0; i < COUNT_OF(refusals); i++) {
        expect_run(refusals[i].status, refusals[i].words, tokenize, refusals[i].arguments);
        expect(count_in(output, "\n") == 1, "more than one line: %s", output);
    }
    if (packed)
        expect_run(1, "one.gz is compressed and the only document", tokenize,
                   "--out gone --text one.gz --tokenizer tok --val 0.1");
    expect(directory_count(".", "/gone") == 0, "a failure leaves something on the disk");
    expect(directory_count(".", ".tmp") == 0, "temporary files stay");
    expect_run(0, "", tokenize, "--bytes one.txt --out one");
    expect(!file_exists("one_tokenizer"), "shards of bytes keep a tokenizer");
    expect_run(0, "", tokenize, "--bytes one.txt --out one --shard-tokens 20000");
    expect_run(0, "", tokenize, "--tokenizer tok --text one.txt --out one");
    expect(directory_count(".", "one_train_") == 1 && file_exists("one_tokenizer"), "shards of bytes stay");
    // A set may be replaced that has shards for validation alone.
    expect_run(0, "", tokenize, "--tokenizer few --text one.txt --out only --val 1");
    expect(!file_exists("only_train_000000.bin"), "shards for training");
    expect_run(0, "", tokenize, "--tokenizer tok --text one.txt --out only --val 1");
    verdict("tokenize: what it refuses; nothing stays on the disk");
}

// Documents with planted duplicates, and pairs that must stay.
static void test_dedup(void) {
    static char text[40000];
    FILE* file = fopen("dup.jsonl", "we");
    size_t bytes, removed = 0;
    need(file != NULL, "dup.jsonl");
    for (uint64_t i = 0; i < 60; i++) {
        uint64_t of = i < 40 ? i : i - 40;               // the last twenty repeat the first twenty,
        size_t change = i < 50 ? 200 : 100;              // ten exactly or with a word changed, ten only half
        size_t used = write_words(text, 0, 300 + of, 0, i < 40 || i >= 50 ? change : 150, " ");
        if (i >= 40 && i < 50 && i % 2) used += (size_t)sprintf(text + used, "changed ");
        if (i >= 40 && i < 50) used = write_words(text, used, 300 + of, 150 + i % 2, 200, " ");
        if (i >= 50) used = write_words(text, used, 900 + i, 100, 200, " ");
        fprintf(file, "{\"text\": \"%s\"}\n%s", text, i == 20 ? "\n" : "");
    }
    need(fclose(file) == 0, "dup.jsonl");
    for (int near = 0; near < 2; near++) {
        expect_run(0, near ? "5 exact and 5 near" : "5 exact and 0 near", tokenize,
                   text_of("--tokenizer tok --jsonl dup.jsonl --out dd --val 0 --dedup %s", near ? "near" : "exact"));
        char* report = text_read("dd_duplicates.jsonl", &bytes);
        char* line = report;
        removed = count_in(report, "\n");
        expect(removed == (near ? 10 : 5), "%zu lines: %s", removed, report);
        for (size_t i = 0; i < removed; i++, line = strchr(line, '\n') + 1) {
            Json json;
            uint64_t document = 0, at = 0, of = 0, line_number = 0;
            char why[16] = "";
            double similarity = 0;
            if (!expect(json_parse(&json, line, strcspn(line, "\n"), "report", &error), "%s", error.text)) continue;
            uint32_t out = json_get(&json, 0, "left_out"), repeats = json_get(&json, 0, "repeats");
            json_u64(&json, json_get(&json, out, "document"), &document);
            json_u64(&json, json_get(&json, out, "line"), &line_number);
            json_u64(&json, json_get(&json, repeats, "document"), &of);
            json_u64(&json, json_get(&json, repeats, "line"), &at);
            json_string(&json, json_get(&json, 0, "why"), why, sizeof why);
            json_number(&json, json_get(&json, 0, "similarity"), &similarity);
            uint64_t number = near ? 40 + i : 40 + 2 * i;  // a blank line after the 21st counts, too
            expect(document == number + 1 && line_number == number + 2 && of == number - 40 && at == of + 1,
                   "line %zu: %llu repeats %llu", i, (unsigned long long)document, (unsigned long long)of);
            bool exact = number % 2 == 0;
            expect(strcmp(why, exact ? "exact" : "near") == 0 && (exact ? similarity == 1 : similarity >= 0.8 &&
                   similarity < 1), "line %zu: %s, %g", i, why, similarity);
            json_free(&json);
        }
        free(report);
        char* kept = shards_text("dd_train_*.bin", "dd_tokenizer", &bytes);
        size_t documents = 0;
        for (size_t i = 0; i < bytes; i++) documents += kept[i] == 0;
        expect(documents == 60 - removed, "%zu documents remain", documents);
        free(kept);
    }
    // Documents without text are none, and those of a single byte are.
    put_text("tiny.jsonl", "{\"text\": \"\"}\n{\"text\": \"a\"}\n{\"text\": \"\"}\n{\"text\": \"b\"}\n{\"text\": "
             "\"a\"}\n{\"text\": \"a\"}");
    expect_run(0, "2 exact and 0 near", tokenize, "--tokenizer tok --jsonl tiny.jsonl --out dt --val 0 --dedup exact");
    // Documents of several pieces that differ at their end are different.
    enum { BYTES = LLMTRAIN_PIECE(1500000, 15000) };
    char* one = random_text(BYTES, 21);
    put_bytes("same1.txt", one, BYTES);
    put_bytes("same3.txt", one, BYTES);
    one[BYTES - 1] ^= 1;
    put_bytes("same2.txt", one, BYTES);
    free(one);
    expect_run(0, "1 exact and 0 near", tokenize, "--tokenizer tok --text 'same?.txt' --out ds --val 0 --dedup exact");
    char* which = text_read("ds_duplicates.jsonl", NULL);
    expect(count_in(which, "same3.txt") == 1 && count_in(which, "same1.txt") == 1 && count_in(which, "same2.txt") == 0,
           "%s", which);
    free(which);
    expect_run(0, "", tokenize, "--tokenizer tok --jsonl dup.jsonl --out dd --val 0");
    expect(!file_exists("dd_duplicates.jsonl"), "the report of earlier shards stays");
    verdict("tokenize --dedup: planted duplicates are found and reported, others stay");
}

// ------------------------------------------------------------------------------------------------
// Runs

#define TINY "--layers 1 --heads 2 --channels 16 --seq 16 --batch 2 --warmup 1 "

static void test_runs(void) {
    expect_run(0, "", tokenize, "--train-bpe 400 --text lines.txt --out tok2");
    expect_run(0, "", tokenize, "--tokenizer tok --text one.txt --out a --val 0.2");
    expect_run(0, "", tokenize, "--tokenizer tok2 --text one.txt --out b --val 0.2");
    expect_run(0, "saved", train, TINY "--steps 2 --data 'a_train_*.bin' --val 'a_val_*.bin' --out run");
    expect(run("cmp run/tokenizer/tokenizer.json a_tokenizer/tokenizer.json") == 0, "the run has another tokenizer");
    expect_run(0, "resumed from", train, TINY "--steps 3 --data 'a_train_*.bin' --out run --resume");
    expect_run(0, "This is line", train, TINY "--steps 1 --sample-every 1 --prompt 'This is line' --tokens 5 "
               "--data 'a_train_*.bin'");
    expect_run(2, "", train, TINY "--steps 1 --sample-every 1 --prompt '' --data 'a_train_*.bin'");
    verdict("runs: a run keeps the tokenizer of its shards");
    static const struct { const char *what, *arguments; } refusals[] = {
        {"--val", "--steps 2 --data 'a_train_*.bin' --val 'b_val_*.bin' --out new"},
        {"a resume with other data", "--steps 4 --data 'b_train_*.bin' --out run --resume"},
        {"a resume with other --val", "--steps 4 --data 'a_train_*.bin' --val 'b_val_*.bin' --out run --resume"},
        {"--init-from", "--steps 2 --data 'b_train_*.bin' --init-from run/step_00000002 --out new"},
        {"bytes and --init-from", "--steps 2 --data 'bytes_train_*.bin' --init-from run/step_00000002 --out new"},
    };
    expect_run(0, "", tokenize, "--bytes one.txt --out bytes --val 0.1");
    for (size_t i = 0; i < COUNT_OF(refusals); i++) {
        expect_run(1, "is the tokenizer", train, text_of(TINY "%s", refusals[i].arguments));
        expect(strstr(output, "give shards, a run and a model of one tokenizer") && count_in(output, "(") >= 2,
               "%s: %s", refusals[i].what, output);
        expect(!file_exists("new"), "%s: the run begins", refusals[i].what);
    }
    verdict("runs: data, validation data and weights of another tokenizer are refused");
    expect(run("mkdir moved && cp a_train_*.bin moved") == 0, "shards without a tokenizer");
    expect_run(0, "resumed from", train, TINY "--steps 4 --data 'moved/a_train_*.bin' --out run --resume");
    expect_run(0, "saved", train, TINY "--steps 2 --data 'a_train_*.bin' --init-from run/step_00000002 --out next");
    expect(run("cmp next/tokenizer/tokenizer.json a_tokenizer/tokenizer.json") == 0, "another tokenizer");
    verdict("runs: shards without a tokenizer are accepted");
    const char* begun = TINY "--steps 2 --data 'moved/a_train_*.bin' --init-from run/step_00000002 --out killed "
                             "--resume";
    setenv("LLMTRAIN_TEST_FAULT", "rank 0 step 1 at load do kill", 1);
    for (int i = 0; i < 2; i++) expect(run(text_of("%s %s > killed.txt 2>&1", train, begun)) != 0, "it is not killed");
    unsetenv("LLMTRAIN_TEST_FAULT");
    expect(!file_exists("killed/step_00000002"), "it had saved a checkpoint before it was killed");
    expect_run(0, "saved", train, begun);
    expect(run("cmp killed/tokenizer/tokenizer.json a_tokenizer/tokenizer.json") == 0, "the run has another tokenizer");
    expect(!file_exists("killed/tokenizer.tmp") && !file_exists("killed/tokenizer.old"), "copies remain");
    verdict("runs: one that is killed before its first checkpoint keeps the tokenizer of --init-from");
    static const char* const begins[] = {"a_train_*.bin", "moved/a_train_*.bin"};
    for (size_t i = 0; i < COUNT_OF(begins); i++) {
        const char* sizes = "--seq 16 --batch 2 --warmup 1 --init-from model --data";
        expect(run("rm -rf begun && cp -r run/step_00000002 model") == 0, "a model to begin with");
        expect_run(0, "starting from", train, text_of("%s '%s' --steps 1 --out begun", sizes, begins[i]));
        expect(run("rm -rf model") == 0, "the model goes");
        expect_run(0, "resumed from", train, text_of("%s '%s' --steps 2 --out begun --resume", sizes, begins[i]));
        expect_run(1, "cannot open model", train, text_of("%s '%s' --steps 2 --out other", sizes, begins[i]));
    }
    verdict("runs: a resume does not need the model of --init-from");
    // A tokenizer with a padding token, 260, for which the model has no row.
    expect_run(0, "", tokenize, "--train-bpe 260 --text lines.txt --out more");
    expect(run("sed -i 's/\"special\": true/&}, {\"id\": 260, \"content\": \"<pad>\", \"special\": "
               "true/' more/tokenizer.json && echo 'a<pad>b, and so on, so that it is long enough' > pad.txt") == 0,
           "a token");
    expect_run(0, "shard", tokenize, "--tokenizer more --text one.txt --out more --val 0");
    expect_run(0, "", tokenize, "--tokenizer more --text pad.txt --out pad --val 0");
    const char* sizes = TINY "--vocab 260 --steps 20 --data";
    expect_run(0, "saved", train, text_of("%s 'more_train_*.bin' --out less", sizes));
    expect_run(0, "saved", train, "--seq 16 --batch 2 --steps 1 --warmup 1 --data 'more_train_*.bin' --init-from less "
               "--out less.next");
    expect_run(2, "token 260 at position", train, text_of("%s 'pad_train_*.bin'", sizes));
    expect_run(1, "has produced the id 260", train,
               text_of("%s 'more_train_*.bin' --sample-every 1 --prompt '<pad>'", sizes));
    expect_run(2, "vocabulary of 261 but the model has 259", train, TINY "--vocab 259 --steps 1 --data "
               "'more_train_*.bin'");  // then there would be no end of text
    verdict("runs: a model may lack added tokens of its tokenizer, which its text must not contain");
}

// What stops tokenize while new shards get their names leaves no old validation shards beside them.
static void test_old_validation(void) {
    const Tokenizer bytes = tokenizer_of_bytes();
    const int32_t tokens[100] = {0};
    ShardSet set;
    for (int second = 0; second < 2; second++) {
        shard_set_begin(&set, "both", &bytes, second ? 50 : 100, 0);
        for (int i = 0; i < 2; i++) need(series_add(&set.series[i], tokens, 100, &error), "%s", error.text);
        if (second) need(mkdir("both_train_000001.bin", 0755) == 0, "a directory in the way of the second shard");
        bool good = shard_set_publish(&set, &error);
        expect(good == !second && file_exists("both_val_000000.bin") == !second, "set %d: %s", second, error.text);
    }
    expect(file_exists("both_train_000000.bin"), "the first shard has no name yet");
    shard_set_abandon(&set);
    verdict("old validation shards go before new shards come");
}

// Shards that tokenize makes together are a set. A kill while it renames them leaves a part of one, or of two; a shard
// may be damaged later: training does not begin, or ends saved, with the name. What was left goes with the next set.
static void test_sets(void) {
    char line[512];
    char *texts[2] = {random_text(60000, 21), random_text(40000, 22)};
    put_text("one.txt", texts[0]);
    put_text("two.txt", texts[1]);
    static const char model[] = "--layers 1 --heads 1 --channels 8 --seq 16 --batch 2";
    snprintf(line, sizeof line, "--data 'set_train_*.bin' %s", model);
    need(mkdir("set", 0755) == 0, "set");
    expect_run(0, "", tokenize, "--bytes two.txt --out set --shard-tokens 5000");
    expect(run("mkdir two; cp set_*.bin two") == 0, "a copy");
    expect_run(0, "", tokenize, "--bytes one.txt --out set --shard-tokens 5000");
    expect_run(0, "", train, text_of("%s --steps 1", line));
    expect_run(0, "", train, text_of("--data 'set_train_00000[1-3].bin' %s --steps 1", model));
    for (int shard = 0; shard < 3; shard++) {  // killed after so many renames
        expect(run(text_of("cp two/set_train_%06d.bin .", shard)) == 0, "a shard");
        expect_run(2, "tokenize was stopped", train, text_of("%s --steps 1", line));
    }
    expect_run(2, "tokenize was stopped", train, text_of("--data 'set_train_000003.bin:1,two/set_val_000000.bin:1,"
                                                         "set_train_000000.bin:1' %s --steps 1", model));
    expect_run(0, "", tokenize, "--bytes one.txt --out set --shard-tokens 5000");
    expect_run(0, "", tokenize, "--bytes two.txt --out set --val 1");  // a set of its own
    expect_run(0, "", train, text_of("%s --val 'set_val_*.bin' --steps 1", line));
    put_text("set_train_000099.bin.tmp", "left by a killed tokenize");
    expect_run(0, "", tokenize, "--bytes one.txt --out set --shard-tokens 5000");
    expect(!file_exists("set_train_000099.bin.tmp"), "what was left");
    expect(run("mv set_train_000004.bin away") == 0, "a shard");
    expect_run(1, "set_train_000004.bin is missing", train, text_of("%s --steps 1", line));
    expect(run("mv away set_train_000004.bin; cp set_train_000002.bin away; cp away good") == 0, "a shard");
    expect(run("cp set_val_000000.bin other") == 0, "a shard");
    expect(run("cp set_train_000004.bin set_train_000002.bin") == 0, "a shard");
    expect_run(2, "set_train_000002.bin has the tokens of another shard, train number 000004 of its set", train,
               text_of("%s --steps 1", line));
    expect_run(2, "train number 000004", train, text_of("--data set_train_000002.bin %s --steps 1", model));
    expect_run(2, "to use it so on purpose, give it a name not ending in six digits", train,
               text_of("%s --steps 1", line));
    expect(run("ln set_train_000002.bin again.bin") == 0, "a link");
    expect_run(0, "", train, text_of("--data 'set_train_00000[01].bin,again.bin' --val again.bin %s --steps 1", model));
    int32_t unknown = 0;  // as in sets that an earlier version has made
    patch("set_train_000002.bin", offsetof(ShardHeader, number), &unknown, sizeof unknown);
    expect_run(0, "", train, text_of("%s --steps 1", line));
    expect(run("cp away set_train_000002.bin; cp two/set_train_000000.bin set_val_000000.bin") == 0, "shards");
    expect_run(2, "set_val_000000.bin has the tokens of another shard, train", train,
               text_of("%s --val set_val_000000.bin --steps 1", line));
    expect(run("cp other set_val_000000.bin") == 0, "a shard");
    verdict("shards of a set: whole, or refused with what is missing");

    // Both of its bytes are in the vocabulary.
    int file = open("set_train_000002.bin", O_RDWR);
    unsigned char byte = 0;
    need(file >= 0 && pread(file, &byte, 1, 10500) == 1, "a byte");
    byte ^= 1;
    need(pwrite(file, &byte, 1, 10500) == 1, "a byte");
    close(file);
    const char* steps = "--steps 200000 --log-every 100000 --out damaged";
    expect_run(2, "the tokens of set_train_000002.bin do not match its checksum", train, text_of("%s %s", line, steps));
    bool began = directory_count("damaged", "step_") > 0;  // or the checksum was read before the first step
    expect(run("mv away set_train_000002.bin") == 0, "a shard");
    // It has one sample in 10,000, and one of its 312 windows has the token.
    uint16_t outside = 300;
    uint64_t no_checksum = 0;
    patch("set_train_000002.bin", 9000, &outside, sizeof outside);
    patch("set_train_000002.bin", offsetof(ShardHeader, checksum), &no_checksum, sizeof no_checksum);
    expect_run(2, "token 300 at position 3988 of set_train_000002.bin is outside the vocabulary of 256", train,
               text_of("--data 'set_train_00000[013].bin:9999,set_train_000002.bin:1' --log-every 100000 %s --steps "
                       "20000", model));
    expect(run("mv good set_train_000002.bin") == 0, "a shard");
    const char* newest = "$(ls -d damaged/step_* | tail -n 1 | sed 's/.*step_0*//')";
    if (began)
        expect_run(0, "resumed from damaged/step_", train, text_of("%s --resume --out damaged --steps %s", line, newest));
    verdict("a damaged shard is named while the run trains, which ends saved");
    for (int i = 0; i < 2; i++) free(texts[i]);
}

// A Parquet file through data/parquet.py: the tokens of the same lines as JSON.
static void test_parquet(const char* converter) {
    if (run("python3 -c 'import pyarrow' 2> /dev/null") != 0) {
        skip("data/parquet.py", "there is no python3 with pyarrow");
        return;
    }
    put_text("write.py", "import pyarrow, pyarrow.parquet\npyarrow.parquet.write_table(pyarrow.table({'n': [1, 2, 3], "
                         "'content': ['a \\u00e9\\n b', None, 'c \"d\" ']}), 'p.parquet')\n");
    put_text("plain.jsonl", "{\"text\": \"a \xC3\xA9\\n b\"}\n{\"text\": null}\n{\"text\": \"c \\\"d\\\" \"}\n");
    expect(run(text_of("python3 write.py && python3 '%s' --column content p.parquet > p.jsonl", converter)) == 0, "it");
    expect_run(0, "tokens", tokenize, "--jsonl p.jsonl --tokenizer tok --out parquet --val 0");
    expect_run(0, "tokens", tokenize, "--jsonl plain.jsonl --tokenizer tok --out plain --val 0");
    expect(run("cmp -i 1024 parquet_train_000000.bin plain_train_000000.bin") == 0, "other tokens");
    expect(run(text_of("python3 '%s' p.parquet 2>&1 | grep -q 'has no column text; give --column, one of n, content'",
                       converter)) == 0, "a column that is not there");
    verdict("data/parquet.py: the texts of a Parquet file");
}

int main(int argc, char** argv) {
    const char *fixture = "dev/test/fixtures/bpe_training.json", *programs[2] = {"build/tokenize", "build/train-FP32"};
    const Flag rows[] = {
        {"tokenize", KIND_TEXT, &programs[0], "PATH", 0, 0, "the program", 0},
        {"train", KIND_TEXT, &programs[1], "PATH", 0, 0, "the program", 0},
        {"fixture", KIND_TEXT, &fixture, "PATH", 0, 0, "a text, and merges of Hugging Face", 0},
    };
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_text", NULL, &flags, argc, argv)) return code;
    tests_begin("test_text");
    tokenize = realpath(programs[0], NULL);
    train = realpath(programs[1], NULL);
    char* merges = realpath(fixture, NULL);
    char* tokenizer = realpath("dev/test/fixtures/tokenizers/gpt2.json", NULL);
    char* parquet = realpath("data/parquet.py", NULL);
    need(tokenizer != NULL && parquet != NULL, "run it in the root of the checkout");
    Unicode* unicode = unicode_open(&error);
    need(unicode != NULL, "%s", error.text);
    root_enter();
    test_files();
    test_input();
    test_documents();
    test_cuts(unicode, tokenizer);
    test_training(unicode);
    if (merges) test_training_of_peer(unicode, merges);
    else skip("merges of Hugging Face", text_of("there is no %s", fixture));
    test_duplicates();
    char* part = random_text(100000, 9);
    put_text("long_part.txt", part);
    free(part);
    if (tokenize) test_conversion(), test_parquet(parquet);
    if (tokenize) test_dedup();
    else skip("the program tokenize", text_of("there is none at %s", programs[0]));
    test_old_validation();
    if (tokenize && train) test_runs(), test_sets();
    else skip("runs", text_of("there is no program at %s", programs[1]));
    free(unicode);
    free(parquet);
    free(merges);
    free(tokenizer);
    free(tokenize);
    free(train);
    return tests_end();
}
