// test_tfevents.c: the event files of llmtrain/run/tfevents.h.
//
//   make build/test_tfevents build/train-FP32 build/tensorboard
//   build/test_tfevents [--train PATH] [--tensorboard PATH]
//
//   1. reader    of event files, written from their description: it checks every checksum, stops at the first record
//                that is not whole, and has the three ways of readers to treat what a restart has written before: to
//                keep it (tbparse), to forget it at SessionLog.START (TensorBoard's Python reader), or to forget of
//                each tag what is not before a new point (its Rust reader)
//   2. encoding  crc32c of published texts; lines of all kinds as points and texts; the last record cut at each byte
//   3. logs      a log that is cut back, deleted, refused by the disk: in the end the points of its lines, each once
//   4. programs  a run that is killed 20 times; --tensorboard-every; build/tensorboard; refusals
//
// dev/peers/tensorboard.py does 4 with TensorBoard's own readers.

#include "llmtrain/run/log.h"
#include "llmtrain/base/flags.h"
#include "harness.h"

#include <math.h>

static Error error;
static Program job;
static const char *train, *tensorboard;

// ------------------------------------------------------------------------------------------------
// 1. Reader

typedef enum { KEEPS, PYTHON, RUST, WAYS } Way;
static const char* const WAY_NAMES[] = {"keeps all", "Python", "Rust"};

typedef struct {
    char tag[128];
    uint64_t step;
    double time;
    float value;
    char text[1024];
    bool is_text;
} Point;

typedef struct { char paths[128][512]; size_t count; } Paths;

typedef struct {
    Point* points;
    size_t count, capacity;
    Paths files;
    size_t records, starts;  // whole records; SessionLog.START
    size_t bytes;            // of the whole records of the last file
    size_t last;             // of them before the last
} Curves;

typedef struct { const unsigned char *at, *end; } Bytes;
typedef struct { uint64_t field, number; Bytes bytes; } Member;

static uint64_t little_endian(const unsigned char* p, size_t bytes) {
    uint64_t number = 0;
    for (size_t i = bytes; i-- > 0;) number = number << 8 | p[i];
    return number;
}

static uint64_t varint_read(Bytes* b) {
    uint64_t number = 0;
    for (int shift = 0; b->at < b->end; shift += 7) {
        number |= (uint64_t)(*b->at & 127) << shift;
        if (*b->at++ < 128) return number;
    }
    need(false, "a varint that ends");
    return 0;
}

static bool member_read(Member* m, Bytes* b) {
    if (b->at >= b->end) return false;
    uint64_t key = varint_read(b), type = key & 7;
    m->field = key >> 3;
    m->number = type == 0 || type == 2 ? varint_read(b) : 0;
    need(type == 0 || type == 1 || type == 2 || type == 5, "type %d", (int)type);
    size_t bytes = type == 1 ? 8 : type == 5 ? 4 : type == 2 ? m->number : 0;
    need(bytes <= (size_t)(b->end - b->at), "a field of %zu bytes", bytes);
    if (type == 1 || type == 5) m->number = little_endian(b->at, bytes);
    m->bytes = (Bytes){b->at, b->at + bytes};
    b->at += bytes;
    return true;
}

static void text_set(char* text, size_t size, Bytes b) { snprintf(text, size, "%.*s", (int)(b.end - b.at), b.at); }

// Forgets the points of a tag, or of all, whose step is `step` or later.
static void forget(Curves* c, const char* tag, uint64_t step) {
    size_t kept = 0;
    for (size_t i = 0; i < c->count; i++)
        if (c->points[i].step < step || (tag && strcmp(tag, c->points[i].tag) != 0)) c->points[kept++] = c->points[i];
    c->count = kept;
}

static void value_read(Curves* c, Bytes b, uint64_t step, double time, Way way) {
    Point point = {.step = step, .time = time};
    Member m, inner;
    char plugin[64] = "", shape[64] = "";
    uint64_t number = 0;
    while (member_read(&m, &b)) {
        uint32_t bits = (uint32_t)m.number;
        if (m.field == 1) text_set(point.tag, sizeof point.tag, m.bytes);
        if (m.field == 2) memcpy(&point.value, &bits, sizeof bits);
        if (m.field == 9) text_set(plugin, sizeof plugin, m.bytes);
        for (Bytes tensor = m.bytes; m.field == 8 && member_read(&inner, &tensor);) {
            if (inner.field == 1) number = inner.number;
            if (inner.field == 2) text_set(shape, sizeof shape, inner.bytes);
            if (inner.field == 8) text_set(point.text, sizeof point.text, inner.bytes);
            point.is_text = true;
        }
    }
    expect(!point.is_text || (number == 7 && strcmp(plugin, "\x0a\x06\x0a\x04text") == 0 &&
                              strcmp(shape, "\x12\x02\x08\x01") == 0), "the text of %s is no text", point.tag);
    if (way == RUST) forget(c, point.tag, step);
    need(memory_grow(&c->points, &c->capacity, c->count + 1, sizeof *c->points), "memory");
    c->points[c->count++] = point;
}

static void event_read(Curves* c, Bytes b, bool first, Way way) {
    uint64_t step = 0;
    double time = 0;
    Member m, inner;
    Bytes summary = {0}, session = {0}, version = {0};
    while (member_read(&m, &b)) {
        if (m.field == 1) memcpy(&time, &m.number, sizeof time);
        if (m.field == 2) step = m.number;
        if (m.field == 3) version = m.bytes;
        if (m.field == 5) summary = m.bytes;
        if (m.field == 7) session = m.bytes;
    }
    expect(first == (version.at != NULL), "a version only at the beginning");
    if (first) expect(version.end - version.at == 13 && memcmp(version.at, "brain.Event:2", 13) == 0, "the version");
    while (member_read(&inner, &session)) {
        expect(inner.field == 1 && inner.number == 1, "START");
        if (c->starts++ > 0 && way == PYTHON) forget(c, NULL, step);
    }
    while (member_read(&inner, &summary)) value_read(c, inner.bytes, step, time, way);
}

// Adds the whole records of a file.
static void file_add(Curves* c, const char* path, Way way) {
    size_t bytes;
    unsigned char* data = (unsigned char*)text_read(path, &bytes);
    c->bytes = 0;
    for (size_t at = 0; at + 12 <= bytes;) {
        uint64_t length = little_endian(data + at, 8);
        bool good = little_endian(data + at + 8, 4) == crc32c_masked(data + at, 8) && bytes - at >= 16 &&
                    length <= bytes - at - 16;
        if (!good || little_endian(data + at + 12 + length, 4) != crc32c_masked(data + at + 12, length)) break;
        event_read(c, (Bytes){data + at + 12, data + at + 12 + length}, at == 0, way);
        c->records++;
        c->last = at;
        at += 16 + length;
        c->bytes = at;
    }
    free(data);
}

static int compare_names(const void* a, const void* b) { return strcmp((const char*)a, (const char*)b); }

static void path_take(const char* path, void* context) {
    Paths* paths = (Paths*)context;
    need(paths->count < COUNT_OF(paths->paths), "room for paths");
    snprintf(paths->paths[paths->count++], sizeof paths->paths[0], "%.500s", path);
}

// All files of a directory, in the order of their names; returns how many are not empty.
static size_t directory_read_events(Curves* c, const char* directory, Way way) {
    size_t count = 0;
    memset(c, 0, sizeof *c);
    directory_each(directory, path_take, &c->files);
    qsort(c->files.paths, c->files.count, sizeof c->files.paths[0], compare_names);
    for (size_t i = 0; i < c->files.count; i++) {
        file_add(c, c->files.paths[i], way);
        count += c->bytes > 0;
    }
    return count;
}

static void curves_free(Curves* c) {
    free(c->points);
    memset(c, 0, sizeof *c);
}

// How many points of a tag and step there are; the last one is *found.
static size_t points_of(const Point** found, const Curves* c, const char* tag, uint64_t step) {
    size_t count = 0;
    for (size_t i = 0; i < c->count; i++) {
        if (c->points[i].step != step || strcmp(c->points[i].tag, tag) != 0) continue;
        *found = &c->points[i];
        count++;
    }
    return count;
}

static bool same_float(float a, float b) { return a == b || (isnan(a) && isnan(b)); }

static void expect_scalar(const Curves* c, const char* tag, uint64_t step, double value) {
    const Point* p = NULL;
    size_t count = points_of(&p, c, tag, step);
    expect(count == 1 && !p->is_text && same_float(p->value, (float)value), "%s at step %llu: %zu points, %g, not %g",
           tag, (unsigned long long)step, count, count ? (double)p->value : NAN, value);
}

static void expect_text(const Curves* c, const char* tag, uint64_t step, const char* text) {
    const Point* p = NULL;
    size_t count = points_of(&p, c, tag, step);
    expect(count == 1 && p->is_text && strcmp(p->text, text) == 0, "%s at step %llu: %zu texts, '%s'", tag,
           (unsigned long long)step, count, count ? p->text : "");
}

// Tags that are the same in every run with the same flags.
static bool is_deterministic(const Point* p) {
    return strncmp(p->tag, "loss/", 5) == 0 || strncmp(p->tag, "optimizer/", 10) == 0 ||
           strncmp(p->tag, "data/", 5) == 0;
}

// Both have the same points, each once.
static void expect_same(const Curves* a, const Curves* b, const char* what) {
    size_t counts[2] = {0, 0};
    for (size_t i = 0; i < a->count; i++) {
        const Point* p = &a->points[i];
        if (!is_deterministic(p)) continue;
        expect_scalar(b, p->tag, p->step, p->value);
        counts[0]++;
    }
    for (size_t i = 0; i < b->count; i++) counts[1] += is_deterministic(&b->points[i]);
    expect(counts[0] > 0 && counts[0] == counts[1], "%s: %zu points, not %zu", what, counts[1], counts[0]);
}

// ------------------------------------------------------------------------------------------------
// 2. Encoding

// RFC 3720, appendix B.4; the length of the first record of TensorFlow's files.
static void test_checksums(void) {
    unsigned char bytes[32];
    const uint64_t length = 24;
    memset(bytes, 0, sizeof bytes);
    expect(crc32c(bytes, 32) == 0x8A9136AA, "32 zeros: %08x", crc32c(bytes, 32));
    memset(bytes, 255, sizeof bytes);
    expect(crc32c(bytes, 32) == 0x62A8AB43, "32 bytes of ones: %08x", crc32c(bytes, 32));
    for (size_t i = 0; i < 32; i++) bytes[i] = (unsigned char)i;
    expect(crc32c(bytes, 32) == 0x46DD794E, "0 to 31: %08x", crc32c(bytes, 32));
    for (size_t i = 0; i < 32; i++) bytes[i] = (unsigned char)(31 - i);
    expect(crc32c(bytes, 32) == 0x113FDB5C, "31 to 0: %08x", crc32c(bytes, 32));
    expect(crc32c("123456789", 9) == 0xE3069283 && crc32c("", 0) == 0, "123456789");
    expect(crc32c_masked(&length, 8) == 0x224B7FA3, "a length: %08x", crc32c_masked(&length, 8));
    verdict("crc32c of the texts of RFC 3720, and the checksum that begins each file of TensorFlow");
}

static void write_logs(const char* run) {
    need(directory_make(run, &error), "%s", error.text);
    put_text(text_of("%s/metrics.jsonl", run),
             "{\"step\": 1,\"loss\": 5.5,\"val_loss\": null,\"lr\": 0.1,\"shares\": [0.25, 0.75],\"mfu\": null,"
             "\"loss_ranks_min\": 4,\"new_column\": 7e300,\"ms\": 1500}\n"
             "damaged\n"
             "{\"step\": 2,\"loss\": null,\"val_loss\": 4.25,\"grad_norm\": -3e-60,\"tokens\": 123456789012,"
             "\"ms\": 500}\n"
             "{\"step\": 4,\"loss\": 1e-3,\"val_loss\": \"nan\",\"tok_per_s\": 10,\"time\": 1700000000.5}\n"
             "{\"step\": 5,\"loss\": 9,\"val_loss\": nu");
    put_text(text_of("%s/events.jsonl", run),
             "{\"time\": \"2026-11-22T10:51:18.500Z\",\"event\": \"begun\",\"step\": 0,\"detail\": \"1 ranks\"}\n"
             "{\"time\": \"2028-02-29T00:00:00.000Z\",\"event\": \"saved\",\"step\": 4,"
             "\"detail\": \"<b>saved</b> \\u00e9\"}\n"
             "{\"time\": \"2026-11-22T10:51:18.500Z\",\"event\": \"done\",\"step\": 4,\"detail\": \"\"}\n");
    put_text(text_of("%s/samples.jsonl", run),
             "{\"step\": 4,\"seed\": 1,\"prompt\": \"Once\",\"text\": \" upon\\na time\"}\n");
    put_text(text_of("%s/run.jsonl", run), "{\"time\": 1700000000,\"step\": 1,\"flags\": {\"lr\": \"0.1\",\"data\": "
             "\"a|b\\nc\"},\"floor\": 4,\"tied\": true,\"hosts\": [\"m\"],\"mfu\": null}\n");
}

static void test_lines(void) {
    Curves c;
    const Point* p = NULL;
    write_logs("lines");
    expect(tfevents_convert("lines", "views/lines", 0, &error), "%s", error.text);
    expect(directory_read_events(&c, "views/lines", KEEPS) == 1 && c.starts == 1, "%zu starts", c.starts);
    expect_scalar(&c, "loss/train", 1, 5.5);
    expect_scalar(&c, "loss/train", 4, 1e-3);
    expect_scalar(&c, "loss/val", 2, 4.25);
    expect_scalar(&c, "loss/val", 4, NAN);
    expect_scalar(&c, "loss/excess", 2, 0.25);
    expect_scalar(&c, "optimizer/lr", 1, 0.1);
    expect_scalar(&c, "optimizer/grad_norm", 2, 0);
    expect_scalar(&c, "data/share_0", 1, 0.25);
    expect_scalar(&c, "data/share_1", 1, 0.75);
    expect_scalar(&c, "data/tokens", 2, 123456789012.0);
    expect_scalar(&c, "ranks/loss_min", 1, 4);
    expect_scalar(&c, "more/new_column", 1, INFINITY);
    expect_scalar(&c, "speed/tokens_per_s", 4, 10);
    expect_scalar(&c, "speed/ms", 1, 1500);
    expect_scalar(&c, "speed/ms", 2, 500);
    expect_text(&c, "events/begun", 0, "1 ranks");
    expect_text(&c, "events/saved", 4, "<b>saved</b> \xc3\xa9");
    expect_text(&c, "events/done", 4, "");
    expect_text(&c, "samples", 4, "Once upon\na time");
    expect_text(&c, "run", 1, "| | |\n|---|---|\n| time | 1700000000 |\n| step | 1 |\n| --lr | 0.1 |\n"
                "| --data | a\\|b c |\n| floor | 4 |\n| tied | true |\n| mfu |  |\n");
    expect(c.count == 20, "%zu points", c.count);
    // Dates: of the line, or of one before.
    static const struct { const char* tag; uint64_t step; double time; } times[] = {
        {"events/begun", 0, 1795344678.5}, {"events/saved", 4, 1835395200}, {"loss/train", 1, 1795344678.5},
        {"loss/val", 2, 1795344678.5}, {"loss/train", 4, 1700000000.5}, {"run", 1, 1700000000},
    };
    for (size_t i = 0; i < COUNT_OF(times); i++) {
        size_t count = points_of(&p, &c, times[i].tag, times[i].step);
        expect(count == 1 && p->time == times[i].time, "%s: %.3f", times[i].tag, count ? p->time : NAN);
    }
    curves_free(&c);
    verdict("each number and text of the logs has its tag, step, date and value");
}

static void test_torn(void) {
    Curves c;
    Paths paths = {.count = 0};
    directory_each("views/lines", path_take, &paths);
    memset(&c, 0, sizeof c);
    file_add(&c, paths.paths[0], KEEPS);
    size_t bytes, last = c.last, records = c.records;
    char* data = text_read(paths.paths[0], &bytes);
    expect(c.bytes == bytes && bytes - last > 60, "%zu of %zu bytes are whole", c.bytes, bytes);
    curves_free(&c);
    for (size_t cut = last; cut < bytes; cut++) {
        put_bytes("torn", data, cut);
        file_add(&c, "torn", KEEPS);
        expect(c.records == records - 1 && c.bytes == last, "cut at byte %zu: %zu records", cut, c.records);
        curves_free(&c);
    }
    for (size_t i = 0; i < bytes; i++) {
        data[i] ^= 16;
        put_bytes("torn", data, bytes);
        file_add(&c, "torn", KEEPS);
        expect(c.bytes <= i, "byte %zu is wrong, but %zu are accepted", i, c.bytes);
        curves_free(&c);
        data[i] ^= 16;
    }
    free(data);
    verdict("the last record cut at each byte, and each byte of the file changed: the records before are whole");
}

// ------------------------------------------------------------------------------------------------
// 3. Logs

static const MixtureCounts NO_MIXTURE;

static void log_begin(Log* log, const char* run, uint64_t step) {
    need(directory_make(run, &error) && log_open(log, run, &error), "%s", error.text);
    log->tensorboard.run = run;
    need(log_cut_back(log, step, &error), "%s", error.text);
}

static double loss_of(uint64_t step) { return 3 + 2 / (double)step; }

// Steps after `from`, to `to`; every tenth validates.
static void log_steps(Log* log, uint64_t from, uint64_t to) {
    for (uint64_t step = from + 1; step <= to; step++) {
        StepLog s = {.step = step, .steps = 300, .result = {.loss = loss_of(step)}, .val_loss = NAN,
                     .entropy_floor = 2.5, .lr = 1, .ms = 1, .mixture = &NO_MIXTURE};
        log_write(log, &s);
        if (step % 10 != 0) continue;
        need(log_add_val_loss(log, loss_of(step) + 1, &error), "%s", error.text);
        tfevents_val_loss(&log->tensorboard, step, loss_of(step) + 1);
    }
}

static void expect_steps(const char* run, uint64_t steps, const char* what) {
    Curves c;
    size_t files = directory_read_events(&c, text_of("%s/tensorboard", run), KEEPS);
    expect(files == 1, "%s: %zu files", what, files);
    for (uint64_t step = 1; step <= steps; step++) {
        expect_scalar(&c, "loss/train", step, loss_of(step));
        if (step % 10 == 0) expect_scalar(&c, "loss/val", step, loss_of(step) + 1);
        if (step % 10 == 0) expect_scalar(&c, "loss/excess", step, loss_of(step) + 1 - 2.5);
    }
    curves_free(&c);
}

// Captures what is printed to standard error in between.
static int error_output;
static void errors_begin(void) {
    fflush(stderr);
    error_output = dup(2);
    int file = open("errors", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    need(file >= 0 && dup2(file, 2) == 2, "a file for messages");
    close(file);
}

static char* errors_end(void) {
    fflush(stderr);
    need(dup2(error_output, 2) == 2, "standard error");
    close(error_output);
    return text_read("errors", NULL);
}

static void test_logs(void) {
    Log log;
    log_begin(&log, "rewound", 0);
    log_steps(&log, 0, 57);
    need(log_cut_back(&log, 40, &error), "%s", error.text);
    log_steps(&log, 40, 90);
    need(log_cut_back(&log, 90, &error), "%s", error.text);
    log_steps(&log, 90, 105);
    log_close(&log);
    log_begin(&log, "rewound", 85);
    log_steps(&log, 85, 100);
    log_close(&log);
    expect_steps("rewound", 100, "rewound");
    verdict("a log that goes back within a process, and with a new one");

    log_begin(&log, "off", 0);
    log_steps(&log, 0, 20);
    log.tensorboard.run = NULL;
    log_steps(&log, 20, 50);
    log_close(&log);
    log_begin(&log, "off", 45);
    log_steps(&log, 45, 60);
    log_close(&log);
    expect_steps("off", 60, "left out");
    verdict("a run that was without --tensorboard for a while");

    log_begin(&log, "deleted", 0);
    log_steps(&log, 0, 20);
    remove_tree("deleted/tensorboard");
    log_steps(&log, 20, 40);
    log_close(&log);
    expect_steps("deleted", 40, "deleted");
    verdict("event files that somebody deletes while the run writes");
}

static void test_refused(void) {
    Log log;
    log_begin(&log, "refused", 0);
    put_text("refused/tensorboard", "not a directory");
    errors_begin();
    log_steps(&log, 0, 205);
    unlink("refused/tensorboard");
    log_steps(&log, 205, 305);
    char* text = errors_end();
    log_close(&log);
    expect_steps("refused", 305, "refused");
    expect(count_in(text, "train: ") == 1 && strstr(text, "refused/tensorboard") && strstr(text, "Training continues"),
           "%s", text);
    free(text);
    verdict("a directory that cannot be made is reported once; later there is a file with all points");

    pid_t child = fork();  // since the limit is of a process
    need(child >= 0, "a process");
    if (child == 0) {
        log_begin(&log, "full", 0);
        log_steps(&log, 0, 10);
        struct stat status;
        need(fstat(log.tensorboard.file, &status) == 0, "a file");
        errors_begin();
        file_size_limit((rlim_t)status.st_size + 100);  // in the middle of a record
        log.tensorboard.pause = 0;
        FILE* file = log.file;
        log.file = fopen("room", "wb");  // the log itself is on another disk
        StepLog s = {.step = 11, .steps = 300, .result = {.loss = 3}, .val_loss = NAN, .mixture = &NO_MIXTURE};
        log_write(&log, &s);
        text = errors_end();
        fclose(log.file);
        log.file = file;
        bool good = !log.tensorboard.opened && log.tensorboard.pause > 0 && strstr(text, "cannot write") != NULL;
        _exit(good ? 0 : 1);
    }
    int status;
    need(waitpid(child, &status, 0) == child, "the process");
    expect(status == 0, "it ends with %d", status);
    Curves c;
    directory_read_events(&c, "full/tensorboard", KEEPS);
    for (uint64_t step = 1; step <= 10; step++) expect_scalar(&c, "loss/train", step, loss_of(step));
    curves_free(&c);
    log_begin(&log, "full", 10);
    log_steps(&log, 10, 30);
    log_close(&log);
    expect_steps("full", 30, "full");
    verdict("a disk that is full in the middle of a record: what is whole is read, and the next start has all points");
}

// ------------------------------------------------------------------------------------------------
// 4. Programs

static void become_program(const void* context) {
    environment_clear();
    setenv("OMP_NUM_THREADS", "1", 1);
    environment_set((const char*)context);
}

static int run_with(const char* variables, const char* program, const char* arguments) {
    return program_execute(&job, program, arguments, become_program, variables);
}

static void run(const char* program, const char* arguments) {
    bool good = run_with(NULL, program, arguments) == 0;
    if (!expect(good, "%s fails", arguments)) program_print(&job, arguments);
}

static void run_refuses(int code, const char* says, const char* program, const char* arguments) {
    int ended = run_with(NULL, program, arguments);
    expect(ended == code && strstr(job.text[1], says), "%s: exit code %d, %s", arguments, ended, job.text[1]);
}

static void write_shard(const char* path, size_t tokens) {
    static struct { int32_t header[256]; uint16_t tokens[4000]; } shard;
    const double entropy = 1.25;
    const int32_t head[4] = {20240520, 1, (int32_t)tokens, 32};
    memcpy(shard.header, head, sizeof head);
    memcpy(&shard.header[6], &entropy, sizeof entropy);
    for (size_t i = 0; i < tokens; i++) shard.tokens[i] = (uint16_t)(i * i % 29);
    put_bytes(path, &shard, 1024 + 2 * tokens);
}

#define RUN "--data train.bin --val val.bin --val-windows 2 --layers 1 --heads 1 --channels 8 --seq 8 --batch 1 " \
            "--threads 1 --steps 40 --warmup 1 --val-every 5 --ckpt-every 4 --ckpt-async off --tensorboard "

// The step of the newest checkpoint.
static uint64_t newest_checkpoint(const char* out) {
    uint64_t newest = 0;
    for (uint64_t step = 1; step <= 40; step++)
        if (file_exists(text_of("%s/step_%08llu/manifest.json", out, (unsigned long long)step))) newest = step;
    return newest;
}

// Keeps every event file that there ever was, as a reader that watches the directory has seen it.
static void watch_visit(const char* path, void* context) {
    struct stat status;
    (void)context;
    if (stat(path, &status) == 0 && status.st_size > 0) copy_tree(path, text_of("watched/%s", strrchr(path, '/') + 1));
}

// Where it is killed: after a resume, before the files before it are removed; in a step; in a validation, whose step's
// line is written; in a save; when a checkpoint is in place.
static void test_kills(void) {
    static const char* const places[] = {"events", "update", "validate", "save", "clean"};
    enum { KILLS = 20 };
    Curves one, other;
    size_t killed = 0, watched = 0;
    write_shard("train.bin", 4000);
    write_shard("val.bin", 400);
    run(train, RUN "--out one");
    need(mkdir("watched", 0777) == 0, "a directory");
    for (size_t i = 0; i < KILLS; i++) {
        uint64_t begins = newest_checkpoint("other"), place = i % COUNT_OF(places), step = begins + 1;
        if (place == 1) step += 3;
        if (place == 2) step = begins / 5 * 5 + 5;
        if (place >= 3) step = begins + 4;
        const char* fault = text_of("LLMTRAIN_TEST_FAULT=rank 0 step %llu at %s do kill", (unsigned long long)step,
                                    places[place]);
        int code = run_with(fault, train, RUN "--out other --resume");
        killed += expect(code == 128 + SIGKILL, "%s: exit code %d", fault, code);
        directory_each("other/tensorboard", watch_visit, NULL);
    }
    run(train, RUN "--out other --resume");
    directory_each("other/tensorboard", watch_visit, NULL);
    expect(directory_read_events(&one, "one/tensorboard", KEEPS) == 1, "one file");
    for (uint64_t step = 1; step <= 40; step++) {
        const Point* p;
        expect(points_of(&p, &one, "loss/train", step) == 1, "a point of step %llu", (unsigned long long)step);
        expect(points_of(&p, &one, "loss/val", step) == (step % 5 == 0), "validations of step %llu",
               (unsigned long long)step);
        expect(points_of(&p, &one, "loss/excess", step) == (step % 5 == 0), "its excess");
    }
    for (int way = 0; way < WAYS; way++) {
        expect(directory_read_events(&other, "other/tensorboard", (Way)way) == 1, "one file");
        expect_same(&one, &other, text_of("the directory at the end, %s", WAY_NAMES[way]));
        curves_free(&other);
        if (way == KEEPS) continue;
        watched = directory_read_events(&other, "watched", (Way)way);
        expect_same(&one, &other, text_of("all files in turn, %s", WAY_NAMES[way]));
        expect(other.starts >= watched - 1, "%zu starts in %zu files", other.starts, watched);
        curves_free(&other);
    }
    curves_free(&one);
    expect(watched > 10, "%zu files", watched);
    verdict("a run with %zu kills, which has made %zu files: one line in the plot, that of a run without, in all "
            "readers", killed, watched);
}

static void test_programs(void) {
    static const char start[] = "{\"step\": 1,\"steps\": 40,\"floor\": 1.25}\n";
    Curves live, converted;
    put_text("one/run.jsonl", start);
    put_text("other/run.jsonl", start);
    run(tensorboard, "one other/ --dir views");
    directory_read_events(&live, "one/tensorboard", KEEPS);
    directory_read_events(&converted, "views/one", KEEPS);
    expect_same(&live, &converted, "converted");
    for (size_t i = 0; i < converted.count; i++)
        if (strncmp(converted.points[i].tag, "speed/", 6) == 0)
            expect_scalar(&live, converted.points[i].tag, converted.points[i].step, converted.points[i].value);
    size_t texts[2] = {0, 0};
    for (size_t i = 0; i < live.count; i++) texts[0] += strncmp(live.points[i].tag, "events/", 7) == 0;
    for (size_t i = 0; i < converted.count; i++) texts[1] += strncmp(converted.points[i].tag, "events/", 7) == 0;
    expect(texts[0] > 10 && texts[0] == texts[1], "%zu texts, %zu converted", texts[0], texts[1]);
    curves_free(&converted);
    directory_read_events(&converted, "views/other", KEEPS);
    expect_same(&live, &converted, "the other, converted");
    curves_free(&converted);
    curves_free(&live);
    // The file before is empty after a second conversion, and gone after another one, an hour later.
    for (int i = 0; i < 2; i++) {
        const struct timespec past[2] = {{.tv_sec = time(NULL) - 3700}, {.tv_sec = time(NULL) - 3700}};
        run(tensorboard, "one --dir views");
        expect(directory_read_events(&converted, "views/one", KEEPS) == 1, "one file");
        expect(directory_count("views/one", "tfevents") == 2, "%d files", directory_count("views/one", "tfevents"));
        for (size_t k = 0; k < converted.files.count; k++)
            need(utimensat(AT_FDCWD, converted.files.paths[k], past, 0) == 0, "a time");
        curves_free(&converted);
    }
    verdict("build/tensorboard: the points and texts of --tensorboard");

    run(tensorboard, "one --dir seventh --every 7");
    run(train, RUN "--out seven --tensorboard-every 7");
    const char* directories[] = {"seven/tensorboard", "seventh/one"};
    for (size_t i = 0; i < COUNT_OF(directories); i++) {
        const Point* p;
        directory_read_events(&live, directories[i], KEEPS);
        for (uint64_t step = 1; step <= 40; step++) {
            expect(points_of(&p, &live, "loss/train", step) == (step == 1 || step % 7 == 0 || step == 40),
                   "%s: step %llu", directories[i], (unsigned long long)step);
            expect(points_of(&p, &live, "loss/val", step) == (step % 5 == 0), "%s: its validation", directories[i]);
        }
        curves_free(&live);
    }
    verdict("--tensorboard-every 7: the first step, each seventh, the last, and all validations");

    // 100,000 lines: without --every a fifth of them.
    JsonWriter text = {0};
    char line[128];
    for (int step = 1; step <= 100000; step++)
        json_put(&text, line, (size_t)snprintf(line, sizeof line, "{\"step\": %d,\"loss\": 1,\"val_loss\": null}\n",
                                               step));
    need(!text.failed && directory_make("long", &error), "memory");
    put_bytes("long/metrics.jsonl", text.text, text.bytes);
    json_writer_free(&text);
    put_text("long/run.jsonl", "{\"steps\": 100000}\n");
    run(tensorboard, "long --dir views");
    directory_read_events(&live, "views/long", KEEPS);
    expect(live.count == 20002, "%zu points", live.count);  // with the text of run.jsonl
    curves_free(&live);
    verdict("a long run has 20,000 points");

    run_refuses(2, "--tensorboard needs --out", train, RUN);
    run_refuses(2, "name the directories", tensorboard, "--dir views");
    run_refuses(2, "give --dir", tensorboard, "one");
    run_refuses(2, "two runs are called one", tensorboard, "one x/one/ --dir views");
    run_refuses(2, "does not end in the name", tensorboard, "one/.. --dir views");
    run_refuses(1, "cannot read nothing/metrics.jsonl", tensorboard, "nothing --dir views");
    expect(!file_exists("views/nothing"), "a refused run leaves nothing");
    put_text("blocked", "not a directory");
    run_refuses(1, "cannot make the directory blocked", tensorboard, "one --dir blocked");
    verdict("refusals");
    program_free(&job);
}

int main(int argc, char** argv) {
    const char* programs[] = {"build/train-FP32", "build/tensorboard"};
    const Flag rows[] = {{"train", KIND_TEXT, &programs[0], "PATH", 0, 0, "the program", 0},
                         {"tensorboard", KIND_TEXT, &programs[1], "PATH", 0, 0, "the program", 0}};
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_tfevents", NULL, &flags, argc, argv)) return code;
    tests_begin("test_tfevents");
    train = realpath(programs[0], NULL);
    tensorboard = realpath(programs[1], NULL);
    need(train && tensorboard, "the programs, or run it in the root of the checkout");
    root_enter();
    test_checksums();
    test_lines();
    test_torn();
    test_logs();
    test_refused();
    test_kills();
    test_programs();
    free((char*)train);
    free((char*)tensorboard);
    return tests_end();
}
