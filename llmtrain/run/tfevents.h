// tfevents.h: a run for TensorBoard: its metrics, events, samples and flags as an event file.
//
//   1. encoding   crc32c, and the messages of protocol buffers that TensorBoard reads: Event, Summary
//   2. lines      a line of metrics.jsonl, events.jsonl, samples.jsonl, run.jsonl as an event
//   3. files      the event file of what these logs say: tfevents_convert
//   4. training   the same, while the run goes on: tfevents_line, tfevents_val_loss
//
//   ok = tfevents_convert("runs/x", "views/x", 0, &error);
//
//   TfEvents events = {.run = "runs/x"};                                a zeroed one does nothing
//   tfevents_line(&events, "metrics.jsonl", line, bytes);               the file is runs/x/tensorboard/events.out...
//   tfevents_close(&events);
//
// The logs of a run are the only memory. A start, and a return to an earlier checkpoint, write a new event file of all
// that they hold, empty the file before it, and append to the new one. So a run that was killed any number of times
// has one event file, with each step once, for every reader; and its curves are complete, even if --tensorboard was
// left out for a while, the disk was full, or a power cut has damaged a record.

#ifndef LLMTRAIN_TFEVENTS_H
#define LLMTRAIN_TFEVENTS_H

#include "../base/fault.h"
#include "../base/files.h"
#include "../base/times.h"

// ------------------------------------------------------------------------------------------------
// 1. Encoding
//
// A record is uint64 bytes, uint32 masked crc32c of that number, the bytes, uint32 masked crc32c of them. The bytes are
// an Event (tensorflow/core/util/event.proto). A field of a message begins with 8 x its number + its type (0: varint,
// 1: 8 bytes, 2: length and bytes, 5: 4 bytes).

enum {
    EVENT_TIME = 0x09, EVENT_STEP = 0x10, EVENT_VERSION = 0x1a, EVENT_SUMMARY = 0x2a, EVENT_SESSION = 0x3a,
    SUMMARY_VALUE = 0x0a, VALUE_TAG = 0x0a, VALUE_NUMBER = 0x15, VALUE_TENSOR = 0x42, VALUE_METADATA = 0x4a,
    TENSOR_STRING = 0x42,
};

// CRC-32C: polynomial 0x1EDC6F41, reflected.
static inline uint32_t crc32c(const void* data, size_t bytes) {
    const unsigned char* p = (const unsigned char*)data;
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
    }
    return ~crc;
}

static inline uint32_t crc32c_masked(const void* data, size_t bytes) {
    uint32_t crc = crc32c(data, bytes);
    return (crc >> 15 | crc << 17) + 0xA282EAD8u;
}

// The fields of a message; a JsonWriter serves as an array of bytes that grows.
static inline void proto_fixed(JsonWriter* w, int field, const void* data, size_t bytes) {
    char key = (char)field;
    json_put(w, &key, 1);
    json_put(w, (const char*)data, bytes);
}

static inline void proto_varint(JsonWriter* w, int field, uint64_t value) {
    char digits[10];
    size_t n = 0;
    for (; value > 127; value >>= 7) digits[n++] = (char)(value | 128);
    digits[n++] = (char)value;
    proto_fixed(w, field, digits, n);
}

static inline void proto_bytes(JsonWriter* w, int field, const char* data, size_t bytes) {
    proto_varint(w, field, bytes);
    json_put(w, data, bytes);
}

// The name of a run: the last part of its directory's path, without slashes after it.
static inline void run_name(char* name, size_t size, const char* path) {
    size_t end = strlen(path);
    while (end > 0 && path[end - 1] == '/') end--;
    size_t begin = end;
    while (begin > 0 && path[begin - 1] != '/') begin--;
    snprintf(name, size, "%.*s", (int)(end - begin), path + begin);
}

typedef struct {
    const char* run;         // the directory of the run, whose event file is in its tensorboard/; NULL: there is none
    uint64_t every;          // steps between two points; 0: as many as leave 20,000 points
    uint64_t steps;          // of the run
    double floor;            // entropy floor of the validation text; 0: unknown
    uint64_t next;           // the step of the next point
    double time;             // of the last line, in seconds since 1970
    bool opened;             // the event file is:
    int file;
    char path[FILE_PATH_MAX + 512];
    JsonWriter value, summary, event, records;  // in the making; records: not yet in the file
    unsigned pause;          // after a failure: lines until the next try
    bool refused;            // and the user has been told
} TfEvents;

static inline void tfevents_record(TfEvents* e, double time, uint64_t step, int field, const char* data, size_t bytes) {
    JsonWriter *event = &e->event, *records = &e->records;
    event->bytes = 0;
    proto_fixed(event, EVENT_TIME, &time, sizeof time);
    proto_varint(event, EVENT_STEP, step);
    proto_bytes(event, field, data, bytes);
    uint64_t length = event->bytes;
    uint32_t check_length = crc32c_masked(&length, sizeof length), check = crc32c_masked(event->text, event->bytes);
    records->failed |= event->failed;
    json_put(records, (const char*)&length, sizeof length);
    json_put(records, (const char*)&check_length, sizeof check_length);
    json_put(records, event->text, event->bytes);
    json_put(records, (const char*)&check, sizeof check);
}

// Adds a scalar to the summary of a step.
static inline void tfevents_scalar(TfEvents* e, const char* tag, double number) {
    float value = (float)number;
    e->value.bytes = 0;
    proto_bytes(&e->value, VALUE_TAG, tag, strlen(tag));
    proto_fixed(&e->value, VALUE_NUMBER, &value, sizeof value);
    proto_bytes(&e->summary, SUMMARY_VALUE, e->value.text, e->value.bytes);
}

// Ends the summary of a step.
static inline void tfevents_step(TfEvents* e, double time, uint64_t step) {
    JsonWriter* summary = &e->summary;
    if (summary->bytes > 0) tfevents_record(e, time, step, EVENT_SUMMARY, summary->text, summary->bytes);
    e->records.failed |= summary->failed || e->value.failed;
    summary->bytes = 0;
}

// A text as the summary of a step; frees it.
static inline void tfevents_text(TfEvents* e, double time, uint64_t step, const char* tag, JsonWriter* text) {
    static const char metadata[] = "\x0a\x06\x0a\x04text";            // the plugin that shows it
    static const char vector[] = "\x08\x07\x12\x04\x12\x02\x08\x01";  // a tensor of strings, of shape (1)
    JsonWriter* tensor = &e->event;                                   // which is not needed now
    tensor->bytes = e->value.bytes = 0;
    json_put(tensor, vector, sizeof vector - 1);
    proto_bytes(tensor, TENSOR_STRING, text->text ? text->text : "", text->bytes);
    proto_bytes(&e->value, VALUE_TAG, tag, strlen(tag));
    proto_bytes(&e->value, VALUE_METADATA, metadata, sizeof metadata - 1);
    proto_bytes(&e->value, VALUE_TENSOR, tensor->text, tensor->bytes);
    proto_bytes(&e->summary, SUMMARY_VALUE, e->value.text, e->value.bytes);
    e->records.failed |= text->failed;
    tfevents_step(e, time, step);
    json_writer_free(text);
}

// ------------------------------------------------------------------------------------------------
// 2. Lines

// The group of each member of metrics.jsonl, and its name there if it has another.
static const struct { const char *member, *group, *name; } TFEVENTS_TAGS[] = {
    {"loss", "loss", "train"}, {"val_loss", "loss", "val"}, {"lr", "optimizer", NULL}, {"grad_norm", "optimizer", NULL},
    {"clip", "optimizer", NULL}, {"skipped", "optimizer", NULL}, {"tok_per_s", "speed", "tokens_per_s"},
    {"mfu", "speed", NULL}, {"ms", "speed", NULL}, {"load_ms", "speed", NULL}, {"tokens", "data", NULL},
    {"epoch", "data", NULL}, {"shares", "data", "share"}, {"mem_bytes", "machine", NULL}, {"power_w", "machine", NULL},
    {"joules_per_token", "machine", NULL}, {"gpu_temp_c", "machine", NULL}, {"clock_mhz", "machine", NULL},
    {"reward_accuracy", "preferences", NULL}, {"reward_margin", "preferences", NULL},
    {"logp_chosen", "preferences", NULL}, {"logp_rejected", "preferences", NULL},
    {"loss_ranks_min", "ranks", "loss_min"}, {"loss_ranks_median", "ranks", "loss_median"},
    {"loss_ranks_max", "ranks", "loss_max"}, {"ms_ranks_min", "ranks", "ms_min"},
    {"ms_ranks_median", "ranks", "ms_median"}, {"ms_ranks_max", "ranks", "ms_max"}, {"slowest_rank", "ranks", NULL},
    {"wait_share", "ranks", NULL}, {"comm_bytes", "ranks", NULL},
};

// A member without a row is in the group "more".
static inline void tfevents_tag(char tag[128], const char* member) {
    const char *group = "more", *name = member;
    for (size_t i = 0; i < sizeof TFEVENTS_TAGS / sizeof *TFEVENTS_TAGS; i++) {
        if (strcmp(TFEVENTS_TAGS[i].member, member) != 0) continue;
        group = TFEVENTS_TAGS[i].group;
        if (TFEVENTS_TAGS[i].name) name = TFEVENTS_TAGS[i].name;
    }
    snprintf(tag, 128, "%s/%.100s", group, name);
}

static inline void tfevents_member(TfEvents* e, char tag[128], const Json* line, uint32_t node) {
    double number;
    size_t length = strlen(tag), element = 0;
    if (json_number(line, node, &number)) tfevents_scalar(e, tag, number);
    if (!json_is(line, node, JSON_ARRAY)) return;
    for (uint32_t i = json_first(line, node); i != JSON_NONE; i = json_next(line, i)) {
        snprintf(tag + length, 128 - length, "_%zu", element++);
        if (json_number(line, i, &number)) tfevents_scalar(e, tag, number);
    }
}

// A loss that is not finite is NAN.
static inline void tfevents_validated(TfEvents* e, double loss) {
    tfevents_scalar(e, "loss/val", isfinite(loss) ? loss : (double)NAN);
    if (isfinite(loss) && e->floor > 0) tfevents_scalar(e, "loss/excess", loss - e->floor);
}

// A line of metrics.jsonl. Of a step between two points only the validation loss is taken.
static inline void tfevents_metrics(TfEvents* e, const Json* line) {
    uint64_t step, every = e->every ? e->every : e->steps / 20000;
    double loss = NAN;
    char tag[128];
    if (!json_u64(line, json_get(line, 0, "step"), &step)) return;
    bool due = step >= e->next || step == e->steps;
    json_time(line, json_get(line, 0, "time"), &e->time);
    if (every == 0) every = 1;
    if (due) e->next = (step / every + 1) * every;
    for (uint32_t i = json_first(line, 0); due && i != JSON_NONE; i = json_next(line, i)) {
        const char* member = json_key(line, i);
        tfevents_tag(tag, member);
        bool number = strcmp(member, "step") != 0 && strcmp(member, "time") != 0 && strcmp(member, "val_loss") != 0;
        if (number) tfevents_member(e, tag, line, i);
    }
    uint32_t validated = json_get(line, 0, "val_loss");
    if (json_number(line, validated, &loss) || json_is(line, validated, JSON_STRING)) tfevents_validated(e, loss);
    tfevents_step(e, e->time, step);
}

// Appends a string of a line, if it has that.
static inline void tfevents_string(JsonWriter* text, const Json* line, const char* member) {
    uint32_t node = json_get(line, 0, member);
    bool is = json_is(line, node, JSON_STRING);
    json_put(text, is ? line->text + line->nodes[node].start : "", is ? line->nodes[node].bytes : 0);
}

// The step of a line, and its time if it has one.
static inline uint64_t tfevents_when(double* time, const Json* line) {
    uint64_t step = 0;
    json_u64(line, json_get(line, 0, "step"), &step);
    json_time(line, json_get(line, 0, "time"), time);
    return step;
}

// An event of events.jsonl. Each kind has a tag, since TensorBoard shows one text of a tag and step.
static inline void tfevents_event(TfEvents* e, const Json* line) {
    char event[100] = "", tag[128];
    double time = 0;
    uint64_t step = tfevents_when(&time, line);
    JsonWriter detail = {0};
    if (e->time == 0) e->time = time;  // when the run began
    json_string(line, json_get(line, 0, "event"), event, sizeof event);
    snprintf(tag, sizeof tag, "events/%s", event);
    tfevents_string(&detail, line, "detail");
    tfevents_text(e, time, step, tag, &detail);
}

// A line of samples.jsonl.
static inline void tfevents_sample(TfEvents* e, const Json* line) {
    double time = e->time;
    uint64_t step = tfevents_when(&time, line);
    JsonWriter text = {0};
    tfevents_string(&text, line, "prompt");
    tfevents_string(&text, line, "text");
    tfevents_text(e, time, step, "samples", &text);
}

// The members of an object as rows of a table in Markdown; those of an object in it as well.
static inline void tfevents_table(JsonWriter* table, const Json* line, uint32_t object, const char* prefix) {
    static const char* const words[] = {"", "false", "true"};
    for (uint32_t i = json_first(line, object); i != JSON_NONE; i = json_next(line, i)) {
        const JsonNode* node = &line->nodes[i];
        char name[256];
        snprintf(name, sizeof name, "%s%.200s", prefix, json_key(line, i));
        if (node->type == JSON_OBJECT && prefix[0] == 0) tfevents_table(table, line, i, "--");
        if (node->type == JSON_OBJECT || node->type == JSON_ARRAY) continue;
        bool word = node->type <= JSON_TRUE;
        const char* value = word ? words[node->type] : line->text + node->start;
        size_t bytes = word ? strlen(value) : node->bytes;
        json_put(table, "| ", 2);
        json_put(table, name, strlen(name));
        json_put(table, " | ", 3);
        for (size_t k = 0; k < bytes; k++) {
            if (value[k] == '|') json_put(table, "\\", 1);
            json_put(table, value[k] == '\n' ? " " : value + k, 1);
        }
        json_put(table, " |\n", 3);
    }
}

// A line of run.jsonl: what a start of the program was given, and what it found.
static inline void tfevents_start(TfEvents* e, const Json* line) {
    static const char head[] = "| | |\n|---|---|\n";
    double time = 0;
    uint64_t step = tfevents_when(&time, line);
    JsonWriter table = {0};
    json_u64(line, json_get(line, 0, "steps"), &e->steps);
    if (e->floor == 0) json_number(line, json_get(line, 0, "floor"), &e->floor);
    json_put(&table, head, sizeof head - 1);
    tfevents_table(&table, line, 0, "");
    tfevents_text(e, time, step, "run", &table);
}

// The logs of a run, in the order in which they are read.
typedef struct {
    const char* name;
    void (*take)(TfEvents*, const Json*);
    bool needed;
} TfEventsLog;
static const TfEventsLog TFEVENTS_LOGS[] = {
    {"run.jsonl", tfevents_start, false}, {"events.jsonl", tfevents_event, false},
    {"metrics.jsonl", tfevents_metrics, true}, {"samples.jsonl", tfevents_sample, false},
};

// ------------------------------------------------------------------------------------------------
// 3. Files

static inline void tfevents_close(TfEvents* e) {
    if (e->opened) close(e->file);
    e->opened = false;
    json_writer_free(&e->value);
    json_writer_free(&e->summary);
    json_writer_free(&e->event);
    json_writer_free(&e->records);
}

// Writes the records; one alone in one piece, so that a reader finds it whole.
static inline bool tfevents_flush(TfEvents* e, Error* error) {
    JsonWriter* r = &e->records;
    if (r->failed) return fail_with(error, "not enough memory for %.600s; free some memory", e->path);
    while (r->bytes > 0) {
        errno = ENOSPC;  // the reason if nothing is written without an error
        ssize_t n = write(e->file, r->text, r->bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return fail_file(error, "write", e->path);
        r->bytes -= (size_t)n;
        memmove(r->text, r->text + n, r->bytes);
    }
    return true;
}

// Adds the lines of a log, but for one that a power cut has damaged.
static inline bool tfevents_read(TfEvents* e, const TfEventsLog* log, Error* error) {
    char path[FILE_PATH_MAX + 32], *text = NULL;
    size_t bytes;
    unsigned long long step;
    bool good;
    Json json;
    Error ignored;
    snprintf(path, sizeof path, "%.4000s/%s", e->run, log->name);
    if (!path_look(&good, path, error)) return false;
    if (!good && !log->needed) return true;
    if (!file_read(path, SIZE_MAX, &text, &bytes, error)) return false;
    good = true;
    for (char *line = text, *end; good && (end = (char*)memchr(line, '\n', (size_t)(text + bytes - line)));
         line = end + 1) {
        *end = 0;
        // Most lines of a long run are between two points; reading them would take longer than all the rest.
        bool of_step = log->needed && sscanf(line, "{\"step\": %llu", &step) == 1 && step < e->next && step != e->steps;
        if (of_step && strstr(line, "\"val_loss\": null")) continue;
        if (!json_parse(&json, line, (size_t)(end - line), log->name, &ignored)) continue;
        log->take(e, &json);
        json_free(&json);
        if (e->records.bytes >= FILE_CHUNK || e->records.failed) good = tfevents_flush(e, error);
    }
    free(text);
    return good;
}

// Looks at the event files of runs in a directory: *newest is the greatest number in their names. Empties all but the
// one named `keep`, unless that is NULL. A TensorBoard that has one open would stop at it for ever if it were removed;
// after an hour that has passed.
static inline bool tfevents_look(unsigned long long* newest, const char* directory, const char* keep, Error* error) {
    static const char end[] = ".llmtrain";
    char path[FILE_PATH_MAX + 512];
    unsigned long long seconds;
    struct stat status;
    DIR* list = opendir(directory);
    if (list == NULL) return fail_file(error, "open the directory", directory);
    for (struct dirent* entry; (entry = readdir(list)) != NULL;) {
        size_t length = strlen(entry->d_name);
        if (sscanf(entry->d_name, "events.out.tfevents.%10llu.", &seconds) != 1) continue;
        if (strcmp(entry->d_name + length - (sizeof end - 1), end) != 0) continue;
        if (seconds > *newest) *newest = seconds;
        if (keep == NULL || strcmp(entry->d_name, keep) == 0) continue;
        snprintf(path, sizeof path, "%.4000s/%s", directory, entry->d_name);
        bool there = stat(path, &status) == 0, old = there && unix_time() - (double)status.st_mtime > 3600;
        int file = there && status.st_size > 0 ? open(path, O_WRONLY | O_TRUNC | O_CLOEXEC) : -1;
        if (file >= 0) close(file);
        if (there && status.st_size == 0 && old) unlink(path);
    }
    closedir(list);
    return true;
}

// Begins a new event file with all that the logs of the run say, and empties those before it. TensorBoard reads the
// files of a directory in the order of their names, and never returns to an earlier one. SessionLog.START: the Python
// reader forgets all that it has read of this step and later ones, which is everything; the Rust reader forgets by
// itself, of each tag, what is not before a new point.
static inline bool tfevents_begin(TfEvents* e, const char* directory, Error* error) {
    static const char version[] = "brain.Event:2", start[] = "\x08\x01";
    char machine[256] = "";
    unsigned long long newest = 0;
    double now = unix_time();
    if (!directory_make(directory, error) || !tfevents_look(&newest, directory, NULL, error)) return false;
    unsigned long long seconds = (unsigned long long)now > newest ? (unsigned long long)now : newest + 1;
    if (gethostname(machine, sizeof machine - 1) != 0) snprintf(machine, sizeof machine, "localhost");
    int length = snprintf(e->path, sizeof e->path, "%.4000s/", directory);
    snprintf(e->path + length, sizeof e->path - (size_t)length, "events.out.tfevents.%010llu.%s.%ld.llmtrain", seconds,
             machine, (long)getpid());
    e->file = open(e->path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    if (e->file < 0) return fail_file(error, "create", e->path);
    e->opened = true;
    e->next = 0;
    e->time = 0;
    tfevents_record(e, now, 0, EVENT_VERSION, version, sizeof version - 1);
    tfevents_record(e, now, 0, EVENT_SESSION, start, sizeof start - 1);
    bool good = true;
    for (size_t i = 0; i < sizeof TFEVENTS_LOGS / sizeof *TFEVENTS_LOGS; i++)
        good = good && tfevents_read(e, &TFEVENTS_LOGS[i], error);
    good = good && tfevents_flush(e, error);
    fault_point("events");
    if (good && tfevents_look(&newest, directory, e->path + length, error)) return true;
    tfevents_close(e);
    unlink(e->path);
    return false;
}

// Writes the event file of a run, as its logs are now, in another directory. every: as in TfEvents.
static inline bool tfevents_convert(const char* run, const char* directory, uint64_t every, Error* error) {
    TfEvents e = {.run = run, .every = every};
    char log[FILE_PATH_MAX + 32];
    snprintf(log, sizeof log, "%.4000s/metrics.jsonl", run);
    if (access(log, R_OK) != 0) return fail_file(error, "read", log);  // before a directory is made
    bool good = tfevents_begin(&e, directory, error);
    tfevents_close(&e);
    return good;
}

// ------------------------------------------------------------------------------------------------
// 4. Training

// After records were made: writes them. A failure does not end the run: it is reported once, and a new file is begun
// some lines later.
static inline void tfevents_end(TfEvents* e, bool good, Error* why) {
    enum { LINES = 100 };
    good = good && tfevents_flush(e, why);
    if (!good) tfevents_close(e);
    if (!good && !e->refused)
        fprintf(stderr, "train: %s. Training continues; the event file for TensorBoard is begun again %d lines of the "
                "log later\n", why->text, LINES);
    if (!good) e->pause = LINES;
    e->refused = !good;
}

// Takes a line that was added to a log of the run. The first of metrics.jsonl, since the run began, resumed or went
// back, begins the file, and need not be in the log yet; other lines before it are found there then.
static inline void tfevents_line(TfEvents* e, const char* name, const char* text, size_t bytes) {
    char directory[FILE_PATH_MAX];
    const TfEventsLog* log = TFEVENTS_LOGS;
    struct stat status;
    Json line;
    Error why;
    while (strcmp(log->name, name) != 0) log++;
    if (e->opened && (fstat(e->file, &status) != 0 || status.st_nlink == 0)) tfevents_close(e);  // it was deleted
    if (e->run == NULL || (!e->opened && !log->needed)) return;
    if (e->pause > 0) {
        e->pause--;
        return;
    }
    snprintf(directory, sizeof directory, "%.4000s/tensorboard", e->run);
    bool good = e->opened || tfevents_begin(e, directory, &why);
    good = good && json_parse(&line, text, bytes, name, &why);
    if (good) {
        e->time = unix_time();
        log->take(e, &line);
        json_free(&line);
    }
    tfevents_end(e, good, &why);
}

// A validation of a step whose line was taken before.
static inline void tfevents_val_loss(TfEvents* e, uint64_t step, double loss) {
    Error why;
    if (!e->opened) return;
    tfevents_validated(e, loss);
    tfevents_step(e, unix_time(), step);
    tfevents_end(e, true, &why);
}

#endif  // LLMTRAIN_TFEVENTS_H
