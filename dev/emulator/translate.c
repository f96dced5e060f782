// translate.c: rewrites the things of CUDA that are not C++, so that g++ or clang++ compiles a .cu or .cuh file
// against emulator.h.
//
//     translate in.cu > out.cu
//
//   1. launches        kernel<T><<<grid, block>>>(a, b)
//                      EMULATOR_KERNEL(kernel<T>)(grid, block)(a, b)
//   2. shared memory   __shared__ float tile[32][33];
//                      static emulator::Shared<float[32][33]> tile_place(0); auto& tile = tile_place.here();
//   3. dynamic         extern __shared__ float row[];
//                      float* row = (float*)emulator::dynamic_shared();
//   4. launch bounds   __global__ void __launch_bounds__(256) k(int n) { ... }
//                      __global__ void __launch_bounds__(256) k(int n) { emulator::launch_bounds(256); ... }
//   5. PTX             asm volatile("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
//                      EMULATOR_PTX("ex2.approx.f32 %0, %1;", emulator::output("=f", y), emulator::input("f", x));
//
// Everything else passes unchanged: comments, strings, ordinary C. Lines keep their numbers, and #line names the
// original, so that messages point into it. `__asm__`, which the translator leaves alone, is for assembly of the host.
//
// It is a scanner with balanced brackets, not a parser. What it cannot translate it refuses, naming the line.

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ------------------------------------------------------------------------------------------------
// Text

typedef struct {
    char* data;
    size_t length, room;
} Text;

static const char* file_name;
static Text source;

static void refuse(size_t at, const char* what) {
    size_t line = 1;
    for (size_t i = 0; i < at && i < source.length; i++) line += source.data[i] == '\n';
    fprintf(stderr, "translate: %s:%zu: %s\n", file_name, line, what);
    exit(1);
}

static void append(Text* text, const char* data, size_t length) {
    if (text->length + length + 1 > text->room) {
        text->room = 2 * (text->length + length) + 4096;
        text->data = (char*)realloc(text->data, text->room);
        if (text->data == NULL) refuse(0, "out of memory");
    }
    memcpy(text->data + text->length, data, length);
    text->length += length;
    text->data[text->length] = 0;
}

static void append_string(Text* text, const char* string) {
    append(text, string, strlen(string));
}

// Line ends, and nothing else, of source[from, to): what is dropped must not move the lines after it. Inside of a macro
// a line end keeps its backslash.
static void append_lines(Text* text, size_t from, size_t to) {
    for (size_t i = from; i < to; i++) {
        if (source.data[i] == '\n') append_string(text, i > 0 && source.data[i - 1] == '\\' ? "\\\n" : "\n");
    }
}

static bool is_name(char c) {
    return isalnum((unsigned char)c) || c == '_';
}

static bool is_space(char c) {
    return isspace((unsigned char)c) || c == '\\';  // a backslash outside of literals joins lines
}

static bool starts(size_t at, const char* string) {
    return strncmp(source.data + at, string, strlen(string)) == 0;  // the source ends in a zero
}

static bool is_word(size_t from, size_t to, const char* word) {
    return to - from == strlen(word) && starts(from, word);
}

// ------------------------------------------------------------------------------------------------
// Scanning: each function takes a position and returns the one behind what it skips.

// A comment, a string or a character; `at` itself if there is none.
static size_t skip_literal(size_t at) {
    const char* s = source.data;
    if (starts(at, "//")) {
        while (s[at] && s[at] != '\n') at++;
        return at;
    }
    if (starts(at, "/*")) {
        const char* end = strstr(s + at + 2, "*/");
        if (end == NULL) refuse(at, "a comment without end");
        return (size_t)(end - s) + 2;
    }
    if (s[at] == '"' && at > 0 && s[at - 1] == 'R') {  // R"mark(...)mark"
        const char* open = strchr(s + at, '(');
        size_t mark = open ? (size_t)(open - s) - at - 1 : 0;
        for (const char* p = open; p && *p; p++) {
            if (*p == ')' && strncmp(p + 1, s + at + 1, mark) == 0 && p[1 + mark] == '"')
                return (size_t)(p - s) + mark + 2;
        }
        refuse(at, "a raw string without end");
    }
    bool digit_separator = s[at] == '\'' && at > 0 && is_name(s[at - 1]);  // 1'000
    if (s[at] != '"' && (s[at] != '\'' || digit_separator)) return at;
    char quote = s[at];
    size_t i = at + 1;
    while (s[i] && s[i] != quote && s[i] != '\n') i += s[i] == '\\' && s[i + 1] ? 2 : 1;
    return s[i] == quote ? i + 1 : at;  // an apostrophe in an #error line has no end: a character like others
}

static size_t skip_space(size_t at) {
    for (;;) {
        if (is_space(source.data[at])) at++;
        else if (starts(at, "//") || starts(at, "/*")) at = skip_literal(at);
        else return at;
    }
}

static size_t skip_word(size_t at) {
    while (is_name(source.data[at])) at++;
    return at;
}

// A bracket of any kind with all that is in it.
static size_t skip_brackets(size_t at) {
    size_t depth = 0, start = at;
    while (source.data[at]) {
        size_t next = skip_literal(at);
        if (next != at) {
            at = next;
            continue;
        }
        if (strchr("([{", source.data[at])) depth++;
        if (strchr(")]}", source.data[at]) && --depth == 0) return at + 1;
        at++;
    }
    refuse(start, "a bracket without end");
    return at;
}

// ------------------------------------------------------------------------------------------------
// 1. Launches

// The output ends in the kernel's name, perhaps with template arguments: puts EMULATOR_KERNEL( before it.
static void wrap_kernel_name(Text* out, size_t at) {
    const char* s = out->data;
    size_t end = out->length, i;
    while (end > 0 && is_space(s[end - 1])) end--;
    i = end;
    if (i > 0 && s[i - 1] == '>') {
        size_t depth = 0;
        do {
            i--;
            if (s[i] == '>') depth++;
            if (s[i] == '<') depth--;
        } while (i > 0 && depth > 0);
        while (i > 0 && is_space(s[i - 1])) i--;
    }
    while (i > 0 && (is_name(s[i - 1]) || s[i - 1] == ':')) i--;
    if (i == end) refuse(at, "<<< without a kernel's name before it");
    Text name = {0};
    append(&name, s + i, out->length - i);
    out->length = i;
    append_string(out, "EMULATOR_KERNEL(");
    append(out, name.data, name.length);
    append_string(out, ")(");
    free(name.data);
}

// ------------------------------------------------------------------------------------------------
// 2, 3. Shared memory

typedef struct {
    size_t from, to;
} Range;

static Range trim(Range r) {
    while (r.from < r.to && is_space(source.data[r.from])) r.from++;
    while (r.to > r.from && is_space(source.data[r.to - 1])) r.to--;
    return r;
}

static void append_flat(Text* text, Range r) {  // without line ends, which the caller appends
    for (size_t i = r.from; i < r.to; i++) append(text, is_space(source.data[i]) ? " " : source.data + i, 1);
}

// One declared variable: [type words] name [dimensions], from which an alignment has been taken.
static void translate_declarator(Text* out, Range type, Range name, Range dimensions, Range alignment, bool is_extern) {
    if (name.from == name.to || type.from == type.to) refuse(type.from, "cannot read this __shared__ declaration");
    if (is_extern) {
        append_flat(out, type);
        append_string(out, "* ");
        append_flat(out, name);
        append_string(out, " = (");
        append_flat(out, type);
        append_string(out, "*)emulator::dynamic_shared()");
        return;
    }
    append_string(out, "static emulator::Shared<");
    append_flat(out, type);
    append_flat(out, dimensions);
    append_string(out, "> ");
    append_flat(out, name);
    append_string(out, "_place(");
    if (alignment.from == alignment.to) append_string(out, "0");
    else append_flat(out, alignment);
    append_string(out, "); auto& ");
    append_flat(out, name);
    append_string(out, " = ");
    append_flat(out, name);
    append_string(out, "_place.here()");
}

// An alignment at `at`: __align__(n), alignas(n), __attribute__((aligned(n))). Returns the position behind it.
static size_t take_alignment(size_t at, size_t word_end, Range* alignment) {
    bool attribute = is_word(at, word_end, "__attribute__");
    if (!attribute && !is_word(at, word_end, "__align__") && !is_word(at, word_end, "alignas")) return at;
    size_t open = skip_space(word_end);
    if (source.data[open] != '(') return at;
    size_t end = skip_brackets(open);
    if (attribute) {
        const char* aligned = strstr(source.data + open, "aligned");
        if (aligned == NULL || (size_t)(aligned - source.data) > end)
            refuse(at, "an attribute of shared memory that is not 'aligned'");
        open = skip_space(skip_word((size_t)(aligned - source.data)));
        *alignment = trim((Range){open + 1, skip_brackets(open) - 1});
    } else {
        *alignment = trim((Range){open + 1, end - 1});
    }
    return end;
}

// `from` is behind __shared__; returns the position of the semicolon.
static size_t translate_shared(Text* out, size_t from, bool is_extern) {
    Range alignment = {0, 0}, type = {from, from}, name = {from, from}, dimensions = {0, 0};
    size_t i = skip_space(from), angle = 0, last_word = i, last_word_end = i;
    bool first = true;
    for (;;) {
        size_t word_end = skip_word(i);
        char c = source.data[i];
        if (c == 0 || c == '{' || c == '=')
            refuse(from, "shared memory with a brace or an initial value is not emulated");
        if (word_end > i) {
            size_t behind = take_alignment(i, word_end, &alignment);
            if (behind != i) {
                if (first && last_word == last_word_end) type.from = behind;
                else if (first && dimensions.from == dimensions.to && type.from < i)
                    refuse(i, "write the alignment of shared memory before the type");
                i = skip_space(behind);
                continue;
            }
            if (angle == 0) last_word = i, last_word_end = word_end;
            i = word_end;
        } else if (angle == 0 && c == '[') {
            if (dimensions.from == dimensions.to) dimensions.from = i;
            i = dimensions.to = skip_brackets(i);
        } else if (angle == 0 && (c == ',' || c == ';')) {
            if (first) type = trim((Range){type.from, last_word});
            name = (Range){last_word, last_word_end};
            if (!first) append_string(out, "; ");
            translate_declarator(out, type, name, dimensions, alignment, is_extern);
            first = false;
            dimensions = (Range){0, 0};
            if (c == ';') break;
            i++;
        } else if (c == '(') {
            i = skip_brackets(i);
        } else {
            if (c == '<') angle++;
            if (c == '>') angle--;
            i++;
        }
        i = skip_space(i);
    }
    append_lines(out, from, i);
    return i;
}

// ------------------------------------------------------------------------------------------------
// 5. PTX

// `open` is the bracket behind asm; returns the position behind the closing one. The text is edited in place: a colon
// begins the next section, each operand becomes a call, the clobbers are dropped.
static size_t translate_asm(Text* out, size_t open) {
    size_t end = skip_brackets(open) - 1, section = 0, i = open + 1;
    append_string(out, "EMULATOR_PTX(");
    while (i < end) {
        char c = source.data[i];
        size_t literal = skip_literal(i);
        if (c == ':') {
            section++;
            i++;
        } else if (skip_space(i) != i) {
            append_lines(out, i, skip_space(i));
            if (section == 0) append_string(out, " ");  // C++11 wants one between a string and the macro behind it
            i = skip_space(i);
        } else if (section == 0) {
            if (literal == i) literal = i + 1;
            append(out, source.data + i, literal - i);
            i = literal;
        } else if (section <= 2 && c == '"') {
            append_string(out, section == 1 ? ", emulator::output(" : ", emulator::input(");
            append(out, source.data + i, literal - i);
            append_string(out, ", ");
            i = skip_space(literal);
            if (source.data[i] != '(') refuse(i, "an operand of asm without brackets");
            size_t close = skip_brackets(i);
            append(out, source.data + i + 1, close - i - 1);
            i = close;
        } else if (section <= 2 && c == '[') {
            refuse(i, "named operands of asm are not emulated: use %0, %1");
        } else {
            i = literal > i ? literal : i + 1;  // commas, and clobbers
        }
    }
    append_string(out, ")");
    return end + 1;
}

// ------------------------------------------------------------------------------------------------
// The whole file

static void translate(Text* out) {
    size_t open_launches = 0, last_launch = 0, bounds_at = 0, i = 0;
    Range bounds = {0, 0};  // 4. of the kernel whose body is to come, with the brackets
    while (i < source.length) {
        size_t next = skip_literal(i);
        if (next != i) {
            append(out, source.data + i, next - i);
            i = next;
            continue;
        }
        if (starts(i, "<<<")) {
            wrap_kernel_name(out, i);
            open_launches++;
            last_launch = i;
            i += 3;
            continue;
        }
        if (open_launches > 0 && starts(i, ">>>")) {
            append_string(out, ")");
            open_launches--;
            i += 3;
            continue;
        }
        if (bounds.from < bounds.to && source.data[i] == ';')
            refuse(bounds_at, "__launch_bounds__ without a body behind it: write them where the kernel is defined");
        if (bounds.from < bounds.to && source.data[i] == '{') {
            append_string(out, "{ emulator::launch_bounds");
            append_flat(out, bounds);
            append_string(out, ";");
            bounds = (Range){0, 0};
            i++;
            continue;
        }
        if (!is_name(source.data[i])) {
            append(out, source.data + i++, 1);
            continue;
        }
        size_t end = skip_word(i), after = skip_space(end), after_end = skip_word(after);
        if (is_word(i, end, "asm")) {
            if (is_word(after, after_end, "volatile") || is_word(after, after_end, "__volatile__"))
                after = skip_space(after_end);
            if (source.data[after] == '(') {
                i = translate_asm(out, after);
                continue;
            }
        }
        if (is_word(i, end, "__launch_bounds__") && source.data[after] == '(') {
            bounds_at = i;
            bounds = (Range){after, skip_brackets(after)};
            append(out, source.data + i, bounds.to - i);
            i = bounds.to;
            continue;
        }
        bool is_extern = is_word(i, end, "extern") && is_word(after, after_end, "__shared__");
        bool is_static = is_word(i, end, "static") && is_word(after, after_end, "__shared__");
        if (is_extern || is_static || is_word(i, end, "__shared__")) {
            i = translate_shared(out, is_extern || is_static ? after_end : end, is_extern);
            continue;
        }
        append(out, source.data + i, end - i);
        i = end;
    }
    if (open_launches > 0) refuse(last_launch, "a launch without >>>");
}

int main(int argc, char** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: translate in.cu > out.cu\n");
        return 2;
    }
    file_name = argv[1];
    FILE* file = fopen(file_name, "rb");
    if (file == NULL) {
        fprintf(stderr, "translate: cannot read %s\n", file_name);
        return 1;
    }
    char buffer[65536];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, file)) > 0;) append(&source, buffer, n);
    fclose(file);
    append_string(&source, "");
    Text out = {0};
    append_string(&out, "#include \"emulator.h\"\n#line 1 \"");
    append_string(&out, file_name);
    append_string(&out, "\"\n");
    translate(&out);
    if (fwrite(out.data, 1, out.length, stdout) != out.length || fflush(stdout) != 0) {
        fprintf(stderr, "translate: cannot write the translation of %s\n", file_name);
        return 1;
    }
    return 0;
}
