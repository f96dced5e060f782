// translate.cpp: rewrites the parts of CUDA that are not C++, so that g++ or clang++ can compile a .cu or .cuh file
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
// Everything else passes unchanged: comments, strings, ordinary C. Line numbers stay the same, and #line names the
// original, so that messages refer to it. `__asm__`, which the translator leaves alone, is for host assembly.
//
// It is a scanner with balanced brackets, not a parser. What it cannot translate it refuses, naming the line.

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>

static const char* file_name;
static std::string source;

[[noreturn]] static void refuse(size_t at, const char* what) {
    long line = 1 + std::count(source.begin(), source.begin() + (long)at, '\n');
    fprintf(stderr, "translate: %s:%ld: %s\n", file_name, line, what);
    exit(1);
}

// ------------------------------------------------------------------------------------------------
// Scanning: functions named skip take a position and return the one behind what they skip.

static bool is_name(char c) { return isalnum((unsigned char)c) || c == '_'; }

static bool is_space(char c) { return isspace((unsigned char)c) || c == '\\'; }  // outside of literals \ joins lines

static bool starts(size_t at, const char* string) { return source.compare(at, strlen(string), string) == 0; }

// The position of a text plus its length; the program ends if it is not found.
static size_t behind(const std::string& text, size_t from, size_t at, const char* refusal) {
    size_t found = source.find(text, from);
    if (found == std::string::npos) refuse(at, refusal);
    return found + text.size();
}

// Skips a comment, a string or a character; returns `at` itself if there is none.
static size_t skip_literal(size_t at) {
    char quote = source[at], before = at > 0 ? source[at - 1] : 0;
    if (starts(at, "//")) return std::min(source.find('\n', at), source.size());
    if (starts(at, "/*")) return behind("*/", at + 2, at, "a comment without end");
    if (quote == '"' && before == 'R') {  // R"mark(...)mark"
        std::string mark = source.substr(at + 1, source.find('(', at) - at - 1);
        return behind(")" + mark + "\"", at, at, "a raw string without end");
    }
    if (quote != '"' && (quote != '\'' || is_name(before))) return at;  // 1'000 is no character
    size_t i = at + 1;
    while (i < source.size() && source[i] != quote && source[i] != '\n') i += source[i] == '\\' ? 2 : 1;
    bool ends = i < source.size() && source[i] == quote;  // an apostrophe in an #error line does not
    return ends ? i + 1 : at;
}

static size_t skip_space(size_t at) {
    for (;;) {
        if (is_space(source[at])) at++;
        else if (starts(at, "//") || starts(at, "/*")) at = skip_literal(at);
        else return at;
    }
}

static size_t skip_word(size_t at) {
    while (is_name(source[at])) at++;
    return at;
}

static std::string word_at(size_t at) { return source.substr(at, skip_word(at) - at); }

// Skips a bracket of any kind and its contents.
static size_t skip_brackets(size_t start) {
    size_t depth = 0;
    for (size_t at = start; at < source.size();) {
        size_t next = skip_literal(at);
        if (next == at) {
            if (strchr("([{", source[at])) depth++;
            if (strchr(")]}", source[at]) && --depth == 0) return at + 1;
            next++;
        }
        at = next;
    }
    refuse(start, "a bracket without end");
}

// ------------------------------------------------------------------------------------------------
// Pieces of the output

// A piece of the source without surrounding space and line ends.
static std::string flat(size_t from, size_t to) {
    while (from < to && is_space(source[from])) from++;
    while (to > from && is_space(source[to - 1])) to--;
    std::string text = source.substr(from, to - from);
    std::replace_if(text.begin(), text.end(), is_space, ' ');
    return text;
}

// Only the line ends of source[from, to): dropped text must not move the lines after it. Inside a macro a line end
// keeps its backslash.
static std::string line_ends(size_t from, size_t to) {
    std::string ends;
    for (size_t i = from; i < to; i++)
        if (source[i] == '\n') ends += i > 0 && source[i - 1] == '\\' ? "\\\n" : "\n";
    return ends;
}

// ------------------------------------------------------------------------------------------------
// 1. Launches

// The output ends with the kernel's name, perhaps with template arguments: puts EMULATOR_KERNEL( before it.
static void wrap_kernel_name(std::string* out, size_t at) {
    const std::string& s = *out;
    size_t end = s.size(), depth = 0;
    while (end > 0 && is_space(s[end - 1])) end--;
    size_t i = end;
    if (i > 0 && s[i - 1] == '>') {
        do {
            i--;
            if (s[i] == '>') depth++;
            if (s[i] == '<') depth--;
        } while (i > 0 && depth > 0);
        while (i > 0 && is_space(s[i - 1])) i--;
    }
    while (i > 0 && (is_name(s[i - 1]) || s[i - 1] == ':')) i--;
    if (i == end) refuse(at, "<<< without a kernel's name before it");
    out->insert(i, "EMULATOR_KERNEL(");
    *out += ")(";
}

// ------------------------------------------------------------------------------------------------
// 2, 3. Shared memory

// An alignment at `at`: __align__(n), alignas(n), __attribute__((aligned(n))). Returns the position behind it.
static size_t take_alignment(size_t at, std::string* alignment) {
    std::string word = word_at(at);
    size_t open = skip_space(skip_word(at));
    bool attribute = word == "__attribute__";
    if ((!attribute && word != "__align__" && word != "alignas") || source[open] != '(') return at;
    size_t end = skip_brackets(open);
    if (attribute) {
        size_t aligned = source.find("aligned", open);
        if (aligned > end) refuse(at, "an attribute of shared memory that is not 'aligned'");
        open = skip_space(skip_word(aligned));
    }
    *alignment = flat(open + 1, skip_brackets(open) - 1);
    return end;
}

// `from` is after __shared__, then come type words and declarators; returns the position of the semicolon.
static size_t translate_shared(std::string* out, size_t from, bool is_extern) {
    std::string alignment = "0", type, name, dimensions;
    size_t i = skip_space(from), type_from = i, angle = 0, name_at = i;
    bool first = true, in_type = true;  // in_type: no word of the type has been passed yet
    for (;;) {
        char c = source[i];
        if (c == 0 || c == '{' || c == '=')
            refuse(from, "shared memory with a brace or an initial value is not emulated");
        if (is_name(c)) {
            size_t next = take_alignment(i, &alignment);
            if (next != i) {
                if (!in_type && first && dimensions.empty())
                    refuse(i, "write the alignment of shared memory before the type");
                if (in_type) type_from = next;
                i = skip_space(next);
                continue;
            }
            in_type = false;
            if (angle == 0) name_at = i;
            i = skip_word(i);
        } else if (angle == 0 && c == '[') {
            size_t end = skip_brackets(i);
            dimensions += flat(i, end);
            i = end;
        } else if (angle == 0 && (c == ',' || c == ';')) {
            if (first) type = flat(type_from, name_at);
            else *out += "; ";
            name = word_at(name_at);
            if (name.empty() || type.empty()) refuse(from, "cannot read this __shared__ declaration");
            if (is_extern)
                *out += type + "* " + name + " = (" + type + "*)emulator::dynamic_shared()";
            else
                *out += "static emulator::Shared<" + type + dimensions + "> " + name + "_place(" + alignment +
                        "); auto& " + name + " = " + name + "_place.here()";
            first = false;
            dimensions.clear();
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
    *out += line_ends(from, i);
    return i;
}

// ------------------------------------------------------------------------------------------------
// 5. PTX

// `open` is the bracket after asm; returns the position after the closing one. The text is edited in place: a colon
// begins the next section, each operand becomes a call, the clobbers are dropped.
static size_t translate_asm(std::string* out, size_t open) {
    size_t end = skip_brackets(open) - 1, section = 0;
    *out += "EMULATOR_PTX(";
    for (size_t i = open + 1, next; i < end; i = next) {
        char c = source[i];
        size_t literal = std::max(skip_literal(i), i + 1);
        next = skip_space(i);
        if (c == ':') {
            section++;
            next = i + 1;
        } else if (next != i) {
            *out += line_ends(i, next);
            if (section == 0) *out += " ";  // C++11 requires one between a string and a macro after it
        } else if (section == 0) {
            out->append(source, i, literal - i);
            next = literal;
        } else if (section <= 2 && c == '"') {
            size_t bracket = skip_space(literal);
            if (source[bracket] != '(') refuse(bracket, "an operand of asm without brackets");
            next = skip_brackets(bracket);
            *out += section == 1 ? ", emulator::output(" : ", emulator::input(";
            *out += source.substr(i, literal - i) + ", " + source.substr(bracket + 1, next - bracket - 1);
        } else if (section <= 2 && c == '[') {
            refuse(i, "named operands of asm are not emulated: use %0, %1");
        } else {
            next = literal;  // commas, and clobbers
        }
    }
    *out += ")";
    return end + 1;
}

// ------------------------------------------------------------------------------------------------
// The whole file

static void translate(std::string* out) {
    size_t open_launches = 0, last_launch = 0, bounds_at = 0;
    std::string bounds;  // 4. of the kernel whose body is next, with the brackets
    for (size_t i = 0, next; i < source.size(); i = next) {
        next = skip_literal(i);
        if (next != i) {
            out->append(source, i, next - i);
        } else if (starts(i, "<<<")) {
            wrap_kernel_name(out, i);
            open_launches++;
            last_launch = i;
            next = i + 3;
        } else if (open_launches > 0 && starts(i, ">>>")) {
            *out += ")";
            open_launches--;
            next = i + 3;
        } else if (!is_name(source[i])) {
            if (!bounds.empty() && source[i] == ';')
                refuse(bounds_at,
                                 "__launch_bounds__ without a body behind it: write them where the kernel is defined");
            *out += source[i];
            if (!bounds.empty() && source[i] == '{') {
                *out += " emulator::launch_bounds" + bounds + ";";
                bounds.clear();
            }
            next = i + 1;
        } else {
            size_t end = skip_word(i), after = skip_space(end);
            std::string word = word_at(i), second = word_at(after);
            bool is_volatile = second == "volatile" || second == "__volatile__";
            size_t open = is_volatile ? skip_space(skip_word(after)) : after;
            bool is_extern = word == "extern" && second == "__shared__";
            bool is_static = word == "static" && second == "__shared__";
            if (word == "asm" && source[open] == '(') {
                next = translate_asm(out, open);
            } else if (word == "__launch_bounds__" && source[after] == '(') {
                next = skip_brackets(after);
                bounds_at = i;
                bounds = flat(after, next);
                out->append(source, i, next - i);
            } else if (is_extern || is_static || word == "__shared__") {
                next = translate_shared(out, is_extern || is_static ? skip_word(after) : end, is_extern);
            } else {
                next = end;
                *out += word;
            }
        }
    }
    if (open_launches > 0) refuse(last_launch, "a launch without >>>");
}

int main(int argc, char** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: translate in.cu > out.cu\n");
        return 2;
    }
    file_name = argv[1];
    std::ifstream file(file_name, std::ios::binary);
    source.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (!file) {
        fprintf(stderr, "translate: cannot read %s\n", file_name);
        return 1;
    }
    std::string out = std::string("#include \"emulator.h\"\n#line 1 \"") + file_name + "\"\n";
    translate(&out);
    if (fwrite(out.data(), 1, out.size(), stdout) != out.size() || fflush(stdout) != 0) {
        fprintf(stderr, "translate: cannot write the translation of %s\n", file_name);
        return 1;
    }
    return 0;
}
