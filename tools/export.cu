// export.cu: exports the model of a run, or of another program, in a format that other programs open.
//
//   make build/export && build/export --out runs/x --to hf --dir models/x           the newest checkpoint of a run
//   build/export --init-from models/x --to llm.c --dir models/y                     from format to format
//   build/export --out runs/x --to gguf --dtype q8_0 --dir models/z                 models/z/model.gguf, for llama.cpp
//   build/export --out runs/x --to peft --dir adapters/x                            the pairs of a run with --lora
//
// A model is read and written a tensor at a time, whatever the number of ranks and the ZeRO stage that saved it. It is
// written under a temporary name and renamed at the end: --dir is complete or does not exist. Exit code: 0 done; 1
// something failed; 2 a flag is wrong.

#include "export.h"

#include <glob.h>
#include <signal.h>

// The formats, a row each.
typedef struct {
    const char* name;
    const char* types;  // choices of --dtype
    bool (*write)(const Export* e, Error* error);
} ExportFormat;

static const ExportFormat FORMATS[] = {
    {"hf", "f32|f16|bf16", export_hf},
    {"llm.c", "f32|bf16", export_llmc},
    {"gguf", GGUF_TYPE_NAMES, export_gguf},
    {"peft", "f32|f16|bf16", export_peft},
};
#define FORMAT_NAMES "hf|llm.c|gguf|peft"  // in the same order

typedef struct {
    const char *out, *init_from, *adapter, *base, *dir;
    uint64_t step;
    int format, type;         // type: 0 as saved; otherwise ExportType + 1
    double shard_gb;
} Options;

static bool format_holds(int format, int type, Error* error) {
    char name[16];
    choice_name(EXPORT_TYPES, type, name, sizeof name);
    return choice_find(FORMATS[format].types, name) >= 0 ||
           fail_with(error, "--to %s cannot hold %s; give --dtype %s", FORMATS[format].name, name,
                     FORMATS[format].types);
}

// The path of the model: the run's checkpoint, or --init-from.
static bool options_path(char path[FILE_PATH_MAX], const Options* o, Error* error) {
    if (o->init_from || o->step == 0) return path_copy(path, o->init_from ? o->init_from : o->out, error);
    checkpoint_path(path, o->out, o->step, "");
    return true;
}

// The directory without trailing slashes: after one, the suffix of the temporary name would be a file inside it.
static bool directory_name(char name[FILE_PATH_MAX], const char* dir, Error* error) {
    if (!path_copy(name, dir, error)) return false;
    for (size_t n = strlen(name); n > 1 && name[n - 1] == '/';) name[--n] = 0;
    return true;
}

// The path under which a directory is written, with the names of this machine (and of the container, whose processes
// have numbers of their own) and this process. Removes those of processes that were killed here.
static void temporary_path(char path[FILE_PATH_MAX], const char* dir) {
    char machine[65] = "", pattern[FILE_PATH_MAX];
    struct stat space = {0};
    glob_t found;
    Error ignored;
    gethostname(machine, sizeof machine - 1);
    if (stat("/proc/self/ns/pid", &space) != 0) space.st_ino = 0;
    int length = snprintf(pattern, sizeof pattern, "%.3900s.tmp-%s-%llx-", dir, machine,
                          (unsigned long long)space.st_ino);
    snprintf(path, FILE_PATH_MAX, "%.4000s%ld", pattern, (long)getpid());
    snprintf(pattern + length, sizeof pattern - (size_t)length, "*");
    int result = glob(pattern, GLOB_NOSORT, NULL, &found);
    for (size_t i = 0; result == 0 && i < found.gl_pathc; i++) {
        const char* name = found.gl_pathv[i];
        char* end;
        if (strncmp(name, pattern, (size_t)length) != 0) continue;  // the directory's name may be a pattern, too
        long process = strtol(name + length, &end, 10);
        if (*end == 0 && process > 0 && kill((pid_t)process, 0) != 0 && errno == ESRCH)
            directory_remove(name, &ignored);
    }
    if (result == 0) globfree(&found);
}

// Writes the model to o->dir, under a temporary name until it is complete.
static bool write_model(Export* e, const Options* o, Error* error) {
    char temporary[FILE_PATH_MAX];
    temporary_path(temporary, o->dir);
    e->directory = temporary;
    Progress progress = progress_begin("exporting", e->source->parameters.true_size);
    e->progress = &progress;
    bool ok = directory_make(temporary, error) && FORMATS[o->format].write(e, error) &&
              directory_rename_sync(temporary, o->dir, error);
    progress_end(&progress);
    Error ignored;
    if (!ok) directory_remove(temporary, &ignored);
    return ok;
}

// Puts the weights of --base in the place of those that a run with LoRA has frozen, if they are the same but for their
// dtype or a quantization.
static bool replace_base(ModelSource* source, const char* path, Error* error) {
    ModelSource base;
    uint64_t hash;
    if (!source_open(&base, path, error)) return false;
    Config same = base.config;
    same.context = source->config.context;
    bool ok = fields_agree(CONFIG_FIELDS, CONFIG_FIELD_COUNT, &same, &source->config, "base", path, error) &&
              source_hash(&hash, &base, error);
    if (ok && hash != source->base.hash)
        ok = fail_with(error, "%.600s has other weights than those that %.600s was trained on; give that model with "
                       "--base", path, source->path);
    if (ok) {
        base.config.context = source->config.context;
        const SourcePairs pairs = source->merged, none = {0};
        const RunBase named = source->base;
        source->merged = none;
        memcpy(base.tokenizer, source->tokenizer, sizeof base.tokenizer);
        base.ids = source->ids;
        base.merged = pairs;
        base.base = named;
        memcpy(base.base.path, path, min_size(strlen(path) + 1, sizeof base.base.path));
        base.pairs_dtype = source->pairs_dtype;
    }
    source_close(ok ? source : &base);
    if (ok) *source = base;
    return ok;
}

// Makes the weights of a source those that are exported: merged with its own pairs, or with --adapter.
static bool prepare(Export* e, const Options* o, bool pairs_alone, Error* error) {
    ModelSource* s = e->source;
    e->lora = s->config;
    if (pairs_alone && s->config.lora == 0)
        return fail_with(error, "%.600s has no pairs of LoRA, so there is no adapter to write; export it with --to hf",
                         s->path);
    if (pairs_alone && s->trains_more)
        return fail_with(error, "%.600s has trained other tensors than its pairs (--train), which an adapter does not "
                         "hold; export it with --to hf", s->path);
    if (s->config.lora == 0 && o->base)
        return fail_with(error, "--base is for a run with --lora, and %.600s has no pairs; leave it out", s->path);
    if (o->base && s->trains_more)
        return fail_with(error, "%.600s has trained other tensors than its pairs (--train), which are not in --base; "
                         "leave it out", s->path);
    if (s->config.lora && s->base.path[0] == 0 && !source_hash(&s->base.hash, s, error)) return false;
    if (!source_merge(s, error) || (o->base && !replace_base(s, o->base, error))) return false;
    if (pairs_alone && s->base.path[0] == 0)
        return fail_with(error, "%.600s does not say which model it began with; give its directory with --base",
                         s->path);
    return !o->adapter || source_add_adapters(s, o->adapter, stdout, error);
}

// Adds to an error about a checkpoint of --out which others --step may name.
static void name_steps(const Options* o, Error* error) {
    char named[FILE_PATH_MAX], steps[200] = "";
    unsigned long long bad;
    uint64_t step = UINT64_MAX;
    const Error cause = *error;
    snprintf(named, sizeof named, "%.500s/step_", o->out ? o->out : "");
    const char* at = strstr(cause.text, named);
    if (!o->out || !at || sscanf(at + strlen(named), "%llu", &bad) != 1) return;
    for (size_t used = 0; used < 150 && checkpoint_before(&step, o->out, step);)
        if (step != bad) used += (size_t)snprintf(steps + used, 30, "%s%.0f", used ? ", " : "", (double)step);
    if (steps[0]) fail_with(error, "%.900s; or give another --step: %s", cause.text, steps);
}

static bool export_model(const Options* o, Error* error) {
    char path[FILE_PATH_MAX];
    ModelSource source;
    Tokenizer tokenizer;
    bool pairs_alone = FORMATS[o->format].write == export_peft;
    if (access(o->dir, F_OK) == 0)
        return fail_with(error, "%.600s exists; move it away, or give another --dir", o->dir);
    if (!options_path(path, o, error) || !source_open(&source, path, error)) return false;
    Export e = {.source = &source, .type = EXPORT_F32, .shard_bytes = (size_t)(1e9 * o->shard_gb)};
    bool ok = prepare(&e, o, pairs_alone, error);
    Dtype saved = pairs_alone ? source.pairs_dtype : source.dtype;
    if (o->type) e.type = (ExportType)(o->type - 1);
    else e.type = saved == DTYPE_BF16 ? EXPORT_BF16 : saved == DTYPE_F16 ? EXPORT_F16 : EXPORT_F32;
    ok = ok && format_holds(o->format, (int)e.type, error) && (pairs_alone || export_describe_merge(&e, error)) &&
              source_open_tokenizer(&tokenizer, source.tokenizer, source.config.vocab, error);
    if (ok) {
        if (tokenizer.vocabulary > 0) e.tokenizer = &tokenizer;
        ok = write_model(&e, o, error);
        tokenizer_close(&tokenizer);
    }
    char name[16];
    choice_name(EXPORT_TYPES, (int)e.type, name, sizeof name);
    if (ok) source_say_quantized(&source, false, stdout);
    if (ok && pairs_alone)
        say(stdout, "%s: %zu pairs as %s, from %s", o->dir, source.merged.count, name, path);
    else if (ok)
        say(stdout, "%s: %zu parameters as %s, from %s", o->dir, source.parameters.true_size, name, source.path);
    source_close(&source);
    return ok;
}

int main(int argc, char** argv) {
    Options o = {.format = -1};
    const char* to = NULL;
    char dir[FILE_PATH_MAX];
    const Flag rows[] = {
        FLAG_TEXT("out", &o.out, NULL, "DIR", 0, "directory of a run, to export its newest checkpoint"),
        FLAG_COUNT("step", &o.step, 0, 0, 9e15, 0, "with --out: the checkpoint of this step; 0: the newest"),
        FLAG_TEXT("init-from", &o.init_from, NULL, "DIR", 0,
                  "instead of --out: a checkpoint, a Hugging Face directory, or an llm.c file"),
        FLAG_TEXT("adapter", &o.adapter, NULL, "DIR", 0, "LoRA adapter of PEFT to merge into the weights; "
                  "DIR:0.7,DIR:0.3: the weighted sum of several"),
        FLAG_TEXT("base", &o.base, NULL, "DIR", 0, "of a run with --lora: the model that it began with, whose weights "
                  "are taken instead of the run's (peft: its name in the adapter)"),
        FLAG_TEXT("to", &to, NULL, FORMAT_NAMES, 0, "format to write (required)"),
        FLAG_CHOICE("dtype", &o.type, 0, "same|" EXPORT_TYPES, 0, "dtype of the weights; same: as they are saved"),
        FLAG_TEXT("dir", &o.dir, NULL, "DIR", 0, "directory to write, which must not exist (required)"),
        FLAG_REAL("shard-size", &o.shard_gb, 5, 0, 1e6, 0, "hf: maximum GB per file of weights"),
    };
    Flags flags = flags_of(rows, sizeof rows / sizeof rows[0]);
    Error error;
    int code;
    files_open_standard();
    signal(SIGXFSZ, SIG_IGN);  // a write over the limit on file sizes then fails with a message
    if (!flags_begin(&code, "export", "export: writes a model in a format that other programs read", &flags,
                     argc, argv)) return code;
    if (to) o.format = choice_find(FORMAT_NAMES, to);
    bool wrong = true;
    if (!o.out == !o.init_from) fail_with(&error, "give --out, the directory of a run, or --init-from, another model");
    else if (!to) fail_with(&error, "give --to, the format to write: one of " FORMAT_NAMES);
    else if (o.format < 0) fail_with(&error, "--to is '%.100s'; give one of " FORMAT_NAMES, to);
    else if (!o.dir || o.dir[0] == 0) fail_with(&error, "give --dir, the directory to write");
    else if (o.step && o.init_from)
        fail_with(&error, "--step is for --out; with --init-from give the step's directory");
    else if (o.adapter && FORMATS[o.format].write == export_peft)
        fail_with(&error, "--to peft writes the run's own pairs; leave out --adapter");
    else if (o.type && !format_holds(o.format, o.type - 1, &error)) wrong = true;
    else if (directory_name(dir, o.dir, &error)) wrong = false;
    if (!wrong) o.dir = dir;
    if (!wrong && export_model(&o, &error)) return 0;
    if (!wrong) name_steps(&o, &error);
    fprintf(stderr, "export: %s\n", error.text);
    return wrong ? 2 : 1;
}
