// input.h: reads texts from files and patterns of files, packed or not, as documents in pieces of bounded size.
//
//   Documents documents;
//   Batch batch = {0};
//   bool ok = documents_open(&documents, "books/*.txt,more/*.txt.gz", NULL, &error);    or "x.jsonl", "text"
//   while (ok && (ok = documents_next(&documents, &batch, &error)) && batch.count > 0) ... batch.pieces, batch.text
//   batch_free(&batch);
//   documents_close(&documents);
//
//   1. files      the files that patterns name
//   2. input      the bytes of a file, decompressed if it is in gzip or zstd
//   3. documents  a file each, or a line of JSON each; batches of pieces of them
//
// A file is one document or, if a field is given, each of its lines is a JSON object, whose member of that name is the
// document. Documents are numbered in the order of the files' names, and of lines in a file, from 0; the number does
// not depend on threads, or on what else is read. A batch has some megabytes of text, whatever the documents' lengths:
// a long document comes in pieces, which end between words. Memory: a batch, and one line or piece more.
//
// gzip and zstd are read by their libraries, zlib and libzstd, if the program was compiled with LLMTRAIN_ZLIB and
// LLMTRAIN_ZSTD; a file that is packed otherwise (bzip2, xz) is taken as text.

#ifndef LLMTRAIN_INPUT_H
#define LLMTRAIN_INPUT_H

#include "../llmtrain/base/files.h"  // fail_file; and from base.h Error
#include "../llmtrain/base/json.h"
#include "../llmtrain/text/data.h"   // paths_sort

#include <glob.h>
#ifdef LLMTRAIN_ZLIB
#include <zlib.h>
#endif
#ifdef LLMTRAIN_ZSTD
#include <zstd.h>
#endif

// ------------------------------------------------------------------------------------------------
// 1. Files

typedef struct {
    char** names;  // (count), each owned; sorted by their bytes, each once
    size_t count, places;
} FileList;

static inline void file_list_free(FileList* files) {
    for (size_t i = 0; i < files->count; i++) free(files->names[i]);
    free(files->names);
    memset(files, 0, sizeof *files);
}

static inline bool file_list_add(FileList* files, const char* name, Error* error) {
    char* copy = strdup(name);
    if (!copy || !memory_grow(&files->names, &files->places, files->count + 1, sizeof *files->names)) {
        free(copy);
        return fail_with(error, "out of memory for the names of %zu files", files->count + 1);
    }
    files->names[files->count++] = copy;
    return true;
}

static inline bool file_list_add_pattern(FileList* files, const char* pattern, Error* error) {
    glob_t found = {0};
    if (access(pattern, F_OK) == 0) return file_list_add(files, pattern, error);  // also a name with a bracket in it
    int result = glob(pattern, GLOB_NOSORT, NULL, &found);
    bool ok = result == 0;
    if (result == GLOB_NOMATCH) fail_with(error, "no file matches '%.600s'; check the name", pattern);
    else if (!ok) fail_with(error, "out of memory for the files that match '%.600s'", pattern);
    for (size_t i = 0; ok && i < found.gl_pathc; i++) ok = file_list_add(files, found.gl_pathv[i], error);
    globfree(&found);
    return ok;
}

// Files and shell patterns (*, ?, [...]), separated by commas; a file with a comma in its name is given alone. Files
// are sorted by the bytes of their names, in any locale, since the order numbers the documents.
static inline bool file_list_find(FileList* files, const char* patterns, Error* error) {
    memset(files, 0, sizeof *files);
    bool whole = access(patterns, F_OK) == 0, ok = true;
    char* list = strdup(patterns);
    if (!list) return fail_with(error, "out of memory for a list of %zu bytes", strlen(patterns));
    for (char* part = list; ok && part;) {
        char* comma = whole ? NULL : strchr(part, ',');
        if (comma) *comma = 0;
        ok = *part ? file_list_add_pattern(files, part, error)
                   : fail_with(error, "'%.600s' has an empty name in it; separate files by single commas", patterns);
        part = comma ? comma + 1 : NULL;
    }
    free(list);
    if (!ok) {
        file_list_free(files);
        return false;
    }
    size_t kept = paths_sort(files->names, files->count);
    while (files->count > kept) free(files->names[--files->count]);
    return true;
}

// ------------------------------------------------------------------------------------------------
// 2. Input

#define INPUT_PACKED LLMTRAIN_PIECE((size_t)1 << 16, (size_t)7)  // bytes of a packed file at a time

typedef enum { INPUT_PLAIN, INPUT_GZIP, INPUT_ZSTD } InputKind;

typedef struct {
    FILE* file;      // NULL: not open
    const char* name;
    bool size_known;
    uint64_t size;   // bytes, packed if the file is
    uint64_t taken;  // of those, read so far
    InputKind kind;
    unsigned char* packed;  // (INPUT_PACKED), owned; NULL for INPUT_PLAIN
    size_t at, end;         // packed[at .. end) is still to be unpacked
    bool inside;            // of a packed stream: the file must not end here
#ifdef LLMTRAIN_ZLIB
    z_stream gzip;
#endif
#ifdef LLMTRAIN_ZSTD
    ZSTD_DStream* zstd;
#endif
} Input;

static inline void input_close(Input* input) {
#ifdef LLMTRAIN_ZLIB
    if (input->kind == INPUT_GZIP) inflateEnd(&input->gzip);
#endif
#ifdef LLMTRAIN_ZSTD
    if (input->kind == INPUT_ZSTD) ZSTD_freeDStream(input->zstd);
#endif
    if (input->file && input->file != stdin) fclose(input->file);
    free(input->packed);
    memset(input, 0, sizeof *input);
}

// Opens a file without decompressing it; "-" is standard input. The name must outlive the input. The caller closes it,
// also after a failure.
static inline bool input_open(Input* input, const char* name, Error* error) {
    bool standard = strcmp(name, "-") == 0;
    struct stat status;
    memset(input, 0, sizeof *input);
    input->name = standard ? "standard input" : name;
    input->file = standard ? stdin : fopen(name, "rbe");
    if (!input->file || fstat(fileno(input->file), &status) != 0) return fail_file(error, "open", input->name);
    if (S_ISDIR(status.st_mode))
        return fail_with(error, "%.600s is a directory; give one file, or join many: cat FILES | tokenize --bytes -, "
                         "or a pattern: --text '%.200s/*'", name, name);
    input->size_known = S_ISREG(status.st_mode) && !standard;
    input->size = input->size_known ? (uint64_t)status.st_size : 0;
    return true;
}

static inline bool input_start_gzip(Input* input, Error* error) {
#ifdef LLMTRAIN_ZLIB
    input->kind = INPUT_GZIP;
    return inflateInit2(&input->gzip, 15 + 16) == Z_OK ||
           fail_with(error, "out of memory to decompress %.600s", input->name);
#else
    return fail_with(error, "%.600s is compressed with gzip, which this program cannot decompress; install zlib's "
                     "headers (apt-get install -y zlib1g-dev) and make build/tokenize again, or decompress it with "
                     "gunzip", input->name);
#endif
}

static inline bool input_start_zstd(Input* input, Error* error) {
#ifdef LLMTRAIN_ZSTD
    input->kind = INPUT_ZSTD;
    input->zstd = ZSTD_createDStream();
    return input->zstd || fail_with(error, "out of memory to decompress %.600s", input->name);
#else
    return fail_with(error, "%.600s is compressed with zstd, which this program cannot decompress; install libzstd's "
                     "headers (apt-get install -y libzstd-dev) and make build/tokenize again, or decompress it with "
                     "unzstd", input->name);
#endif
}

// Files that are often taken for texts.
static const struct { const char *begins, *kind, *advice; } INPUT_OTHERS[] = {
    {"PAR1", "a Parquet file", "convert it to JSON Lines: python3 data/parquet.py FILES > x.jsonl"},
    {"PK\3\4", "a zip archive", "unpack it with unzip"},
    {"\xFD" "7zX", "compressed with xz", "decompress it with xz -d"},
    {"BZh", "compressed with bzip2", "decompress it with bunzip2"},
    {"%PDF", "a PDF", "convert it with pdftotext"},
    {"\xFF\xFE", "in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"},
    {"\xFE\xFF", "in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"},
};

// Detects by the first bytes of a file that was not read yet whether it is compressed; if so, input_read decompresses
// it.
static inline bool input_unpack(Input* input, Error* error) {
    static const unsigned char gzip[2] = {0x1F, 0x8B}, zstd[4] = {0x28, 0xB5, 0x2F, 0xFD};
    input->packed = (unsigned char*)memory_allocate(INPUT_PACKED);
    if (!input->packed) return fail_with(error, "out of memory to read %.600s", input->name);
    input->end = fread(input->packed, 1, 4, input->file);
    input->taken = input->end;
    if (input->end >= 2 && memcmp(input->packed, gzip, 2) == 0) return input_start_gzip(input, error);
    if (input->end == 4 && memcmp(input->packed, zstd, 4) == 0) return input_start_zstd(input, error);
    for (size_t i = 0; i < sizeof INPUT_OTHERS / sizeof INPUT_OTHERS[0]; i++) {
        const char* begins = INPUT_OTHERS[i].begins;
        bool same = input->end >= strlen(begins) && memcmp(input->packed, begins, strlen(begins)) == 0;
        if (same && (begins[0] != 'B' || (input->packed[3] >= '1' && input->packed[3] <= '9')))  // bzip2's block size
            return fail_with(error, "%.600s is %s, not text; %s", input->name, INPUT_OTHERS[i].kind,
                             INPUT_OTHERS[i].advice);
    }
    const unsigned char* p = input->packed;
    for (int low = 0; low < 2 && input->end == 4; low++)  // two characters below U+0100, low byte first or second
        if (p[low] != 0 && p[low + 2] != 0 && p[1 - low] == 0 && p[3 - low] == 0)
            return fail_with(error, "%.600s is in UTF-16, not text; convert it with iconv -f UTF-16%s -t UTF-8",
                             input->name, low == 0 ? "LE" : "BE");
    return true;
}

static inline bool input_damaged(const Input* input, const char* why, Error* error) {
    return fail_with(error, "%.600s is compressed, and damaged: %.100s; use another copy", input->name, why);
}

// Unpacks some bytes of packed[at .. end) to buffer; the stream goes on in the next call.
static inline bool input_unpack_some(Input* input, size_t* bytes, char* buffer, size_t room, Error* error) {
    *bytes = 0;
#ifdef LLMTRAIN_ZLIB
    if (input->kind == INPUT_GZIP) {
        z_stream* z = &input->gzip;
        while (!input->inside && input->at < input->end && input->packed[input->at] == 0) input->at++;  // padding
        if (input->at == input->end) return true;
        z->next_in = input->packed + input->at;
        z->avail_in = (uInt)(input->end - input->at);
        z->next_out = (unsigned char*)buffer;
        z->avail_out = (uInt)min_size(room, 1 << 30);
        uInt offered = z->avail_out;
        int result = inflate(z, Z_NO_FLUSH);
        input->at = input->end - z->avail_in;
        *bytes = offered - z->avail_out;
        if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR)
            return input_damaged(input, z->msg ? z->msg : "not a gzip stream", error);
        input->inside = result != Z_STREAM_END;
        if (result == Z_STREAM_END) inflateReset(z);  // another may follow: gzip files can be joined
    }
#endif
#ifdef LLMTRAIN_ZSTD
    if (input->kind == INPUT_ZSTD) {
        ZSTD_inBuffer in = {input->packed, input->end, input->at};
        ZSTD_outBuffer out = {buffer, room, 0};
        size_t result = ZSTD_decompressStream(input->zstd, &out, &in);
        if (ZSTD_isError(result)) return input_damaged(input, ZSTD_getErrorName(result), error);
        input->at = in.pos;
        *bytes = out.pos;
        input->inside = result != 0;
    }
#endif
    (void)input; (void)buffer; (void)room; (void)error;
    return true;
}

// Reads up to `room` bytes, fewer only at the end; *bytes says how many.
static inline bool input_read(Input* input, size_t* bytes, char* buffer, size_t room, Error* error) {
    *bytes = 0;
    if (input->kind == INPUT_PLAIN) {
        size_t ahead = min_size(input->end - input->at, room);  // what input_unpack has read
        if (ahead > 0) memcpy(buffer, input->packed + input->at, ahead);
        input->at += ahead;
        *bytes = ahead + fread(buffer + ahead, 1, room - ahead, input->file);
        input->taken += *bytes - ahead;
        return !ferror(input->file) || fail_file(error, "read", input->name);
    }
    while (*bytes < room) {
        size_t some;
        if (input->at == input->end) {
            input->at = 0;
            input->end = fread(input->packed, 1, INPUT_PACKED, input->file);
            input->taken += input->end;
            if (ferror(input->file)) return fail_file(error, "read", input->name);
            bool ended = input->end == 0;
            if (ended && !input->inside) return true;
            if (ended) {  // the library may still return bytes without more input
                size_t before = *bytes;
                if (!input_unpack_some(input, &some, buffer + *bytes, room - *bytes, error)) return false;
                *bytes += some;
                if (*bytes == before && input->inside) return input_damaged(input, "it ends too early", error);
                continue;
            }
        }
        if (!input_unpack_some(input, &some, buffer + *bytes, room - *bytes, error)) return false;
        *bytes += some;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// 3. Documents
//
// Files are read from their beginning in steps of a fixed length, and where pieces are cut depends on the steps alone.
// So a text has the same pieces whichever batch they are in, and packed the same as unpacked.

#define DOCUMENT_STEP LLMTRAIN_PIECE((size_t)1 << 18, (size_t)7)  // bytes of a file at a time
#define PIECE_BYTES LLMTRAIN_PIECE((size_t)1 << 20, (size_t)61)  // a piece is cut between words from this length on,
#define PIECE_MAX LLMTRAIN_PIECE((size_t)64 << 20, (size_t)1 << 16)  // and anywhere at this length
#define LINE_MAX_BYTES ((size_t)256 << 20)  // of JSON; a file with a longer one is refused
#define BATCH_BYTES LLMTRAIN_PIECE((size_t)16 << 20, (size_t)101)  // of text, and one piece or line more

typedef struct {
    size_t start, bytes;  // in the text of the batch
    uint64_t document;    // number, from 0
    const char* file;     // name of the file, owned by the list of files
    uint64_t line;        // in the file, from 1; 0: the document is all of the file
    bool begins, ends;    // whether it is the first, and the last, piece of its document
    bool bad;             // a line that cannot be decoded
} Piece;

typedef struct {
    char* text;           // owned; a document's pieces follow each other
    size_t bytes, room;
    Piece* pieces;        // (count), owned
    size_t count, places;
} Batch;

typedef struct {
    FileList files;
    const char* field;    // of a line of JSON; NULL: a file is a document
    size_t piece_bytes;   // PIECE_BYTES; the caller sets PIECE_MAX where a tokenizer looks across words
    size_t file;          // the next to be opened
    uint64_t* first;      // (files), owned: the number of the first document of each that was opened
    Input input;          // the one being read
    uint64_t document;    // number of the document that is being read
    uint64_t line;        // of the file, from 1
    size_t waiting;       // bytes at the end of the batch's text that belong to no piece yet
    size_t searched;      // the first of those bytes: no end of a line or piece is in them
    bool begun;           // a piece of this document was made already
    uint64_t offset;      // of the waiting bytes in the file
    uint64_t split;       // 0, or set by the caller for a single file that is not packed: the first line that begins
                          // after this byte, or without one the character there, begins a second document
    uint64_t size, taken; // bytes of all files where known; of those that are closed
    bool raw;             // set by the caller: lines come as they are, and `field` is not looked for
    bool skips;           // set by the caller: bad lines are skipped, and reported by documents_report
    uint64_t skipped;
    Error skipped_first[3];
} Documents;

static inline void batch_free(Batch* batch) {
    free(batch->text);
    free(batch->pieces);
    memset(batch, 0, sizeof *batch);
}

static inline void documents_close(Documents* d) {
    input_close(&d->input);
    file_list_free(&d->files);
    free(d->first);
    memset(d, 0, sizeof *d);
}

// field: NULL, or the name of the member of each line's object. It must outlive the documents. After a failure there is
// nothing to close.
static inline bool documents_open(Documents* d, const char* patterns, const char* field, Error* error) {
    memset(d, 0, sizeof *d);
    d->field = field;
    d->piece_bytes = PIECE_BYTES;
    if (!file_list_find(&d->files, patterns, error)) return false;
    d->first = (uint64_t*)memory_allocate(d->files.count * sizeof *d->first);
    if (!d->first) {
        size_t files = d->files.count;
        documents_close(d);
        return fail_with(error, "out of memory for the numbers of %zu files", files);
    }
    for (size_t i = 0; i < d->files.count; i++) {
        struct stat status;
        if (stat(d->files.names[i], &status) == 0 && S_ISREG(status.st_mode)) d->size += (uint64_t)status.st_size;
    }
    return true;
}

static inline void documents_rewind(Documents* d) {
    input_close(&d->input);
    d->file = d->waiting = d->searched = 0;
    d->document = d->offset = d->taken = d->skipped = 0;
    d->begun = false;
}

// The place of a document that was read: its file, and its line there, from 1, or 0 if it is the whole file.
static inline const char* documents_locate(const Documents* d, uint64_t document, uint64_t* line) {
    size_t low = 0, high = d->file;  // the file is in [low, high)
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (d->first[middle] <= document) low = middle;
        else high = middle;
    }
    *line = d->field ? document - d->first[low] + 1 : 0;
    return d->files.names[low];
}

// Bytes of the files read so far, of d->size.
static inline uint64_t documents_taken(const Documents* d) { return d->taken + d->input.taken; }

// Makes a piece of the first `bytes` of the waiting text.
static inline bool documents_cut(Documents* d, Batch* batch, size_t bytes, bool ends, Error* error) {
    if (!memory_grow(&batch->pieces, &batch->places, batch->count + 1, sizeof *batch->pieces))
        return fail_with(error, "out of memory for %zu pieces of text", batch->count + 1);
    Piece* piece = &batch->pieces[batch->count++];
    piece->start = batch->bytes - d->waiting;
    piece->bytes = bytes;
    piece->document = d->document;
    piece->file = d->files.names[d->file - 1];
    piece->line = d->field ? d->line : 0;
    piece->begins = !d->begun;
    piece->ends = ends;
    d->begun = !ends;
    d->document += ends;
    d->line += ends;
    d->waiting -= bytes;
    d->offset += bytes;
    d->searched = 0;
    return true;
}

// Cuts the waiting text into lines of JSON; `last`: no more text follows.
static inline bool documents_cut_lines(Documents* d, Batch* batch, bool last, Error* error) {
    while (d->waiting > 0) {
        const char* text = batch->text + batch->bytes - d->waiting;
        const char* end = (const char*)memchr(text + d->searched, '\n', d->waiting - d->searched);
        size_t bytes = end ? (size_t)(end - text) + 1 : d->waiting;
        if (bytes > LINE_MAX_BYTES)
            return fail_with(error, "%.600s, line %llu is longer than %zu bytes; is this a file of JSON lines?",
                             d->files.names[d->file - 1], (unsigned long long)d->line, LINE_MAX_BYTES);
        if (!end && !last) {
            d->searched = d->waiting;
            return true;
        }
        if (!documents_cut(d, batch, bytes, true, error)) return false;
    }
    return true;
}

// Whether a piece may end before text[i]: between a letter (of ASCII, Cyrillic, or a Chinese character) and white
// space, which no tokenizer's pattern has in one word.
static inline bool piece_may_end(const char* text, size_t i) {
    const unsigned char* p = (const unsigned char*)text;
    if (text[i] != ' ' && text[i] != '\n') return false;
    if (i >= 1 && p[i - 1] < 0x80) return ((p[i - 1] | 32) >= 'a' && (p[i - 1] | 32) <= 'z');
    if (i >= 2 && (p[i - 2] == 0xD0 || p[i - 2] == 0xD1)) return true;
    return i >= 3 && p[i - 3] >= 0xE5 && p[i - 3] <= 0xE9;
}

// The first byte of a character at or before text[i].
static inline size_t utf8_begin(const char* text, size_t i) {
    for (size_t back = 0; back < 3 && back < i; back++)
        if (((unsigned char)text[i - back] & 0xC0) != 0x80) return i - back;
    return i;
}

// Where the waiting text is divided by d->split; 0: not here, or not yet.
static inline size_t documents_split_here(const Documents* d, const char* text, bool last) {
    if (d->split == 0 || d->document != 0 || d->split < d->offset || d->split - d->offset >= d->waiting) return 0;
    size_t from = (size_t)(d->split - d->offset);
    const char* end = (const char*)memchr(text + from, '\n', d->waiting - from);
    if (end && (size_t)(end - text) + 1 < d->waiting) return (size_t)(end - text) + 1;
    return last ? utf8_begin(text, from) : 0;
}

// Cuts the waiting text into pieces; `last`: no more text follows.
static inline bool documents_cut_text(Documents* d, Batch* batch, bool last, Error* error) {
    const char* text = batch->text + batch->bytes - d->waiting;
    size_t here = documents_split_here(d, text, last);
    if (here > 0) {
        if (!documents_cut(d, batch, here, true, error)) return false;
        text += here;
    }
    bool dividing = d->split > 0 && d->document == 0 && d->split < d->offset + d->waiting;
    if (!last && !dividing && d->waiting >= d->piece_bytes) {
        size_t i = d->waiting - 1;
        while (i > d->searched && !piece_may_end(text, i)) i--;
        bool found = i > d->searched;
        d->searched = d->waiting - 1;
        if (!found && d->waiting >= PIECE_MAX) i = utf8_begin(text, d->waiting - 1);
        if (found || d->waiting >= PIECE_MAX) return documents_cut(d, batch, i, false, error);
    }
    return !last || (d->waiting == 0 && !d->begun) || documents_cut(d, batch, d->waiting, true, error);
}

// Reads a step of the file, and cuts the pieces that it completes.
static inline bool documents_step(Documents* d, Batch* batch, Error* error) {
    size_t bytes;
    if (!memory_grow(&batch->text, &batch->room, batch->bytes + DOCUMENT_STEP, 1))
        return fail_with(error, "out of memory for %zu bytes of text", batch->bytes + DOCUMENT_STEP);
    if (!input_read(&d->input, &bytes, batch->text + batch->bytes, DOCUMENT_STEP, error)) return false;
    batch->bytes += bytes;
    d->waiting += bytes;
    bool last = bytes < DOCUMENT_STEP;
    if (!(d->field ? documents_cut_lines : documents_cut_text)(d, batch, last, error)) return false;
    if (!last) return true;
    if (!d->field && d->document < d->file) d->document = d->file;  // an empty file has a number, too
    d->taken += d->input.taken;
    input_close(&d->input);
    d->waiting = d->searched = 0;
    d->begun = false;
    return true;
}

// Takes a byte order mark and the white space at its end off a line of JSON; false: nothing is left.
static inline bool piece_trim(Piece* piece, const char* text) {
    bool marked = piece->line == 1 && piece->bytes >= 3 && memcmp(text + piece->start, "\xEF\xBB\xBF", 3) == 0;
    if (marked) piece->start += 3, piece->bytes -= 3;
    while (piece->bytes > 0 && memchr(" \t\r\n", text[piece->start + piece->bytes - 1], 4)) piece->bytes--;
    return piece->bytes > 0;
}

// Replaces a line of JSON by its text, which is never longer.
static inline bool piece_decode(Piece* piece, char* text, const char* field, Error* error) {
    char what[FILE_PATH_MAX + 64];
    Json json;
    if (!piece_trim(piece, text)) return true;
    snprintf(what, sizeof what, "%.600s, line %llu", piece->file, (unsigned long long)piece->line);
    if (text[piece->start + strspn(text + piece->start, " \t\r")] == '[')
        return fail_with(error, "%s begins a JSON array, but --jsonl wants an object on each line; write the array's "
                         "elements on lines of their own (jq -c '.[]')", what);
    if (!json_parse_as_python(&json, text + piece->start, piece->bytes, what, error)) return false;
    uint32_t node = json_get(&json, 0, field);
    bool empty = json_is(&json, node, JSON_NULL), ok = empty || json_is(&json, node, JSON_STRING);
    bool chats = node == JSON_NONE && (json_is(&json, json_get(&json, 0, "messages"), JSON_ARRAY) ||
                                       json_is(&json, json_get(&json, 0, "conversations"), JSON_ARRAY));
    if (empty) {
        piece->bytes = 0;
    } else if (chats) {
        fail_with(error, "%.600s is a conversation; give --chat instead of --jsonl", what);
    } else if (!ok) {
        fail_with(error, node == JSON_NONE ? "%.600s has no member \"%.100s\"; name the text's member with --field"
                                      : "%.600s: its member \"%.100s\" is not a string; name another with --field",
                  what, field);
    } else {
        piece->bytes = json.nodes[node].bytes;
        memcpy(text + piece->start, json.text + json.nodes[node].start, piece->bytes);
    }
    json_free(&json);
    return ok;
}

// Skips a line that is bad, or fails because of it.
static inline bool documents_skip(Documents* d, const Error* why, Error* error) {
    if (!d->skips) return fail_with(error, "%s; --bad-lines skip leaves out lines that are bad", why->text);
    if (d->skipped < sizeof d->skipped_first / sizeof d->skipped_first[0]) d->skipped_first[d->skipped] = *why;
    d->skipped++;
    return true;
}

// Decodes the lines of a batch, on all threads. If several are bad, the first is reported, or all are skipped.
static inline bool batch_decode(Documents* d, Batch* batch, Error* error) {
#pragma omp parallel for schedule(dynamic, 16)
    for (size_t i = 0; i < batch->count; i++) {
        Error ignored;
        batch->pieces[i].bad = !piece_decode(&batch->pieces[i], batch->text, d->field, &ignored);
    }
    for (size_t i = 0; i < batch->count; i++) {
        Piece* piece = &batch->pieces[i];
        if (!piece->bad) continue;
        Error why;
        piece_decode(piece, batch->text, d->field, &why);  // again, for the reason
        if (!documents_skip(d, &why, error)) return false;
        piece->bytes = 0;
    }
    return true;
}

// Fails because there is no document; patterns: of the files.
static inline bool documents_fail_empty(const Documents* d, const char* patterns, Error* error) {
    if (d->skipped == 0) return fail_with(error, "'%.600s' has no text in it; check the files", patterns);
    return fail_with(error, "'%.300s' has no text in it, and %llu bad line%s; the first: %.800s", patterns,
                     (unsigned long long)d->skipped, d->skipped == 1 ? "" : "s", d->skipped_first[0].text);
}

// Prints how many lines were skipped, and why the first were.
static inline void documents_report(const Documents* d) {
    if (d->skipped == 0) return;
    printf("%llu bad line%s skipped; the first:\n", (unsigned long long)d->skipped,
           d->skipped == 1 ? " was" : "s were");
    for (size_t i = 0; i < d->skipped && i < sizeof d->skipped_first / sizeof d->skipped_first[0]; i++)
        printf("  %s\n", d->skipped_first[i].text);
}

// Reads the next batch, into the same one each time; count is 0 after the last. Empty documents have pieces of 0 bytes,
// or no pieces.
static inline bool documents_next(Documents* d, Batch* batch, Error* error) {
    if (d->waiting > 0) memmove(batch->text, batch->text + batch->bytes - d->waiting, d->waiting);
    batch->bytes = d->waiting;
    batch->count = 0;
    while (batch->bytes - d->waiting < BATCH_BYTES) {
        if (!d->input.file) {
            if (d->file == d->files.count) break;
            const char* name = d->files.names[d->file];
            d->first[d->file++] = d->document;
            d->line = 1;
            d->offset = 0;
            if (!input_open(&d->input, name, error) || !input_unpack(&d->input, error)) return false;
        }
        if (!documents_step(d, batch, error)) return false;
    }
    return d->field == NULL || d->raw || batch_decode(d, batch, error);
}

#endif  // LLMTRAIN_INPUT_H
