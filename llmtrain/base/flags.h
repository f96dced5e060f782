// flags.h: command-line flags, from a table.
//
// A program lists its flags once: name, kind, where the value goes, bounds, and a line of help. From that table come
// the parser, the defaults shown by --help (the values before parsing), and the messages: for an unknown flag the
// nearest valid one, for a bad value that value and the allowed ones.
//
// Flags are written --name value or --name=value; switches --name, --name on, --name off.

#ifndef LLMTRAIN_FLAGS_H
#define LLMTRAIN_FLAGS_H

#include "flag_table.h"

// How many letters must be changed, inserted, deleted, or swapped with their neighbor, to turn a into b (the
// Damerau-Levenshtein distance); names are short.
static inline size_t edit_distance(const char* a, const char* b) {
    size_t rows[3][64], length = min_size(strlen(b), 63), i = 0;
    for (size_t j = 0; j <= length; j++) rows[0][j] = j;
    for (i = 1; a[i - 1] != 0; i++) {
        size_t *row = rows[i % 3], *above = rows[(i + 2) % 3], *before = rows[(i + 1) % 3];
        row[0] = i;
        for (size_t j = 1; j <= length; j++) {
            row[j] = min_size(above[j - 1] + (a[i - 1] != b[j - 1]), min_size(above[j], row[j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = min_size(row[j], before[j - 2] + 1);
        }
    }
    return rows[(i + 2) % 3][length];
}

static inline Flags flags_of(const Flag* rows, size_t count) {
    Flags flags;
    flags.count = 0;
    flags_append(&flags, rows, count);
    return flags;
}

static inline bool flag_set(Flag* flag, const char* text, Error* error) {
    char* end = NULL;
    errno = 0;
    if (flag->kind == KIND_TEXT) {
        *(const char**)flag->value = text;
    } else if (flag->kind == KIND_TEXTS) {
        TextList* list = (TextList*)flag->value;
        if (list->count == TEXT_LIST_MAX)
            return fail_with(error, "--%s is given more than %d times; give fewer", flag->name, TEXT_LIST_MAX);
        list->texts[list->count++] = text;
    } else if (flag->kind == KIND_SWITCH) {
        if (strcmp(text, "on") != 0 && strcmp(text, "off") != 0)
            return fail_with(error, "--%s is '%s'; give on or off", flag->name, text);
        *(bool*)flag->value = strcmp(text, "on") == 0;
    } else if (flag->kind == KIND_CHOICE) {
        int position = choice_find(flag->choices, text);
        if (position < 0) return fail_with(error, "--%s is '%s'; give one of %s", flag->name, text, flag->choices);
        memcpy(flag->value, &position, sizeof position);
    } else if (flag->kind == KIND_SET) {
        int set;
        if (!set_parse(&set, flag->choices, text))
            return fail_with(error, "--%s is '%s'; give all, or some of %s, separated by commas", flag->name, text,
                             flag->choices);
        memcpy(flag->value, &set, sizeof set);
    } else if (flag->kind == KIND_COUNT) {
        unsigned long long number = strtoull(text, &end, 10);
        bool digits = text[0] >= '0' && text[0] <= '9' && *end == 0 && errno == 0;
        if (!digits || (double)number < flag->low || (double)number > flag->high)
            return fail_with(error, "--%s is '%s'; give a whole number from %.0f to %.0f", flag->name, text, flag->low,
                             flag->high);
        uint64_t count = number;
        memcpy(flag->value, &count, sizeof count);  // it may be a size_t
    } else {
        double number = strtod(text, &end);
        if (end == text || *end != 0 || !(number >= flag->low && number <= flag->high))
            return fail_with(error, "--%s is '%s'; give a number from %g to %g", flag->name, text, flag->low,
                             flag->high);
        *(double*)flag->value = number;
    }
    flag->marks |= FLAG_GIVEN;
    return true;
}

static inline int flag_unlikeness(const char* a, const char* b) {
    int alike = 0;
    while (a[alike] && a[alike] == b[alike]) alike++;
    return (int)edit_distance(a, b) - alike;
}

static inline bool flag_unknown(const Flags* flags, const char* argument, Error* error) {
    if (strncmp(argument, "--", 2) != 0)
        return fail_with(error, "'%s' is not a flag; flags are written --name value (see --help)", argument);
    // The fewest edits; letters that agree at the beginning count in favor, so that --shards finds --shard-tokens.
    const char *name = argument + 2, *nearest = "help";
    int best = flag_unlikeness(name, nearest);
    for (size_t i = 0; i < flags->count; i++) {
        const char* other = flags->rows[i].name;
        if (other == NULL || flag_unlikeness(name, other) >= best) continue;
        nearest = other;
        best = flag_unlikeness(name, nearest);
    }
    return fail_with(error, "unknown flag %s; did you mean --%s? (see --help)", argument, nearest);
}

// Reads argv[1] and on into the flags' values. Does not handle --help: check flags_want_help first.
static inline bool flags_parse(Flags* flags, int argc, char** argv, Error* error) {
    flags->arguments = argv;
    for (int i = 1; i < argc; i++) {
        char name[64];
        const char* equals = strchr(argv[i], '=');
        size_t length = equals ? (size_t)(equals - argv[i]) : strlen(argv[i]);
        snprintf(name, sizeof name, "%.*s", (int)min_size(length, 63), argv[i]);
        Flag* flag = strncmp(name, "--", 2) == 0 ? flag_find(flags, name + 2) : NULL;
        if (flag == NULL) return flag_unknown(flags, name, error);
        if ((flag->marks & FLAG_GIVEN) && flag->kind != KIND_TEXTS)
            return fail_with(error, "--%s is given twice; give it once", flag->name);
        bool next_is_value = i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0;
        const char* value = equals ? equals + 1 : NULL;
        if (value == NULL && next_is_value) value = argv[++i];
        if (value == NULL && flag->kind == KIND_SWITCH) value = "on";
        if (value == NULL)
            return fail_with(error, "--%s needs a value: %s%s", flag->name,
                             flag->kind == KIND_CHOICE || flag->kind == KIND_SET ? flag->choices : flag->help,
                             flag->kind == KIND_TEXT && i + 1 < argc ? "; give one that begins with -- after a =" : "");
        if (!flag_set(flag, value, error)) return false;
    }
    return true;
}

static inline bool flags_want_help(int argc, char** argv) {
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return true;
    return false;
}

enum { HELP_INDENT = 33, HELP_WIDTH = 118 };

// Prints words, and breaks lines before HELP_WIDTH; `column` is the current one.
static inline void help_wrap(const char* text, size_t column) {
    for (bool first = true; *text; first = false) {
        size_t word = strcspn(text, " ");
        bool breaks = !first && column + word >= HELP_WIDTH;
        if (breaks) column = (size_t)printf("\n%*s", HELP_INDENT, "") - 1;
        column += (size_t)printf("%s%.*s", first || breaks ? "" : " ", (int)word, text);
        text += word + (text[word] == ' ');
    }
    printf("\n");
}

// Prints --help; returns the exit code of the program.
static inline int flags_help(const char* program, const char* title, const Flags* flags) {
    if (title) printf("%s\n", title);
    printf("Flags are written --name value or --name=value; switches --name, --name on or --name off.\n");
    for (size_t i = 0; i < flags->count; i++) {
        const Flag* flag = &flags->rows[i];
        if (flag->name == NULL) {
            printf("\n%s\n", flag->help);
            continue;
        }
        char standard[160], line[640];
        flag_text(standard, sizeof standard, flag);
        bool shown = standard[0] != 0 && standard[0] != '\n' && strstr(flag->help, "default: ") == NULL;
        if (flag->kind == KIND_COUNT && (double)flag_value_count(flag) < flag->low) shown = false;  // it has no default
        snprintf(line, sizeof line, "%s%s%s%s", flag->help, shown ? " [" : "", shown ? standard : "", shown ? "]" : "");
        int usage = printf("  --%s %s", flag->name, flag->choices);
        if (usage >= HELP_INDENT) usage = printf("\n") - 1;
        printf("%*s", HELP_INDENT - usage, "");
        help_wrap(line, HELP_INDENT);
    }
    if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
    fprintf(stderr, "%s: cannot write standard output: %s\n", program, strerror(errno));
    return 1;
}

// Reads the flags of a program; or prints the help, headed by `title` unless it is NULL; or prints the error in the
// flags. False if the program must exit, with *code.
static inline bool flags_begin(int* code, const char* program, const char* title, Flags* flags, int argc,
                               char** argv) {
    Error error;
    *code = 0;
    if (flags_want_help(argc, argv)) {
        *code = flags_help(program, title, flags);
        return false;
    }
    if (flags_parse(flags, argc, argv, &error)) return true;
    fprintf(stderr, "%s: %s\n", program, error.text);
    *code = 2;
    return false;
}

#endif  // LLMTRAIN_FLAGS_H
