// flags.h: command-line flags, from a table.
//
// A program lists its flags once: name, kind, where the value goes, bounds, and a line of help. From that table come
// the parser, the defaults shown by --help (the values before parsing), and the messages: for an unknown flag the
// nearest valid one, for a bad value that value and the allowed ones.
//
// Flags are written --name value or --name=value; switches --name, --name on, --name off.

#ifndef LLMTRAIN_FLAGS_H
#define LLMTRAIN_FLAGS_H

#include "../ops/base.h"

#include <assert.h>

typedef enum {
    KIND_TEXT,    // const char*
    KIND_COUNT,   // uint64_t
    KIND_REAL,    // double
    KIND_SWITCH,  // bool
    KIND_CHOICE,  // an enum, or int: position in `choices`, which are separated by |
    KIND_TEXTS    // TextList: the flag may be given several times
} FlagKind;

enum { TEXT_LIST_MAX = 16 };
typedef struct {
    const char* texts[TEXT_LIST_MAX];
    size_t count;
} TextList;

// How a flag affects a run that is resumed, and whether it was given. 0: the flag changes the results of the run, so a
// checkpoint records it and a resume reports a difference.
enum {
    FLAG_GIVEN = 1,            // set by the parser
    FLAG_FREE = 2,             // it does not change the results of the run
    FLAG_LOCAL = 4 | FLAG_FREE,// and the ranks of a run may differ in it
    FLAG_FIXED = 8             // a run that is resumed with another value is refused: it would be another run
};

typedef struct Flag {
    const char* name;     // without the dashes; NULL: a heading of the help, whose text is in `help`
    FlagKind kind;
    void* value;          // holds the default before parsing
    const char* choices;  // KIND_CHOICE: "cosine|linear"; other kinds: the name of the value in the help
    double low, high;     // KIND_COUNT, KIND_REAL: bounds, both allowed
    const char* help;
    unsigned marks;       // FLAG_FREE, FLAG_LOCAL, FLAG_FIXED or none; FLAG_GIVEN
} Flag;

// The flags of a program, put together from the tables of its parts.
enum { FLAGS_MAX = 160 };
typedef struct {
    Flag rows[FLAGS_MAX];
    size_t count;
} Flags;

// Rows of a table that is built at run time: each sets the default and says where the value goes.
#define FLAG_ROW(name, kind, value, initial, what, low, high, marks, help) \
    {name, kind, (*(value) = (initial), (value)), what, low, high, help, marks}
#define FLAG_HEADING(text) {NULL, KIND_TEXT, NULL, NULL, 0, 0, text, 0}
#define FLAG_TEXT(name, value, initial, what, marks, help) \
    FLAG_ROW(name, KIND_TEXT, value, initial, what, 0, 0, marks, help)
#define FLAG_COUNT(name, value, initial, low, high, marks, help) \
    FLAG_ROW(name, KIND_COUNT, value, initial, "N", low, high, marks, help)
#define FLAG_REAL(name, value, initial, low, high, marks, help) \
    FLAG_ROW(name, KIND_REAL, value, initial, "X", low, high, marks, help)
#define FLAG_SWITCH(name, value, initial, marks, help) \
    FLAG_ROW(name, KIND_SWITCH, value, initial, "on|off", 0, 0, marks, help)
#define FLAG_CHOICE(name, value, initial, choices, marks, help) \
    FLAG_ROW(name, KIND_CHOICE, value, initial, choices, 0, 0, marks, help)

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

static inline void flags_append(Flags* flags, const Flag* rows, size_t count) {
    assert(flags->count + count <= FLAGS_MAX);
    memcpy(flags->rows + flags->count, rows, count * sizeof(Flag));
    flags->count += count;
}

static inline Flags flags_of(const Flag* rows, size_t count) {
    Flags flags;
    flags.count = 0;
    flags_append(&flags, rows, count);
    return flags;
}

static inline Flag* flag_find(Flags* flags, const char* name) {
    for (size_t i = 0; i < flags->count; i++)
        if (flags->rows[i].name != NULL && strcmp(flags->rows[i].name, name) == 0) return &flags->rows[i];
    return NULL;
}

static inline bool flag_was_given(Flags* flags, const char* name) {
    Flag* flag = flag_find(flags, name);
    return flag != NULL && (flag->marks & FLAG_GIVEN);
}

// The position of the word in `choices`, -1 if it is not there.
static inline int choice_find(const char* choices, const char* word) {
    size_t length = strlen(word);
    for (int position = 0;; position++) {
        size_t end = strcspn(choices, "|");
        if (length == end && strncmp(choices, word, length) == 0) return position;
        if (choices[end] == 0) return -1;
        choices += end + 1;
    }
}

// Copies the word at `position` of choices into text.
static inline void choice_name(const char* choices, int position, char* text, size_t size) {
    for (; position > 0; position--) choices += strcspn(choices, "|") + 1;
    snprintf(text, size, "%.*s", (int)strcspn(choices, "|"), choices);
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
                             flag->kind == KIND_CHOICE ? flag->choices : flag->help,
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

static inline uint64_t flag_value_count(const Flag* flag) {
    uint64_t count;
    memcpy(&count, flag->value, sizeof count);
    return count;
}

static inline void text_list_join(char* text, size_t size, const TextList* list) {
    size_t used = 0;
    text[0] = 0;
    for (size_t i = 0; i < list->count && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%s", i ? " " : "", list->texts[i]);
}

// The value of a flag, as it is written on the command line.
static inline void flag_text(char* text, size_t size, const Flag* flag) {
    const char* words = flag->kind == KIND_TEXT ? *(const char**)flag->value : NULL;
    if (flag->kind == KIND_TEXT) snprintf(text, size, "%s", words ? words : "");
    else if (flag->kind == KIND_TEXTS) text_list_join(text, size, (const TextList*)flag->value);
    else if (flag->kind == KIND_COUNT) snprintf(text, size, "%llu", (unsigned long long)flag_value_count(flag));
    else if (flag->kind == KIND_REAL) real_text(text, size, *(double*)flag->value, 6);
    else if (flag->kind == KIND_SWITCH) snprintf(text, size, "%s", *(bool*)flag->value ? "on" : "off");
    else {
        int position;
        memcpy(&position, flag->value, sizeof position);
        choice_name(flag->choices, position, text, size);
    }
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
