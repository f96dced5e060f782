// test_telemetry.c: what a run shows of its machine, on machines that do not exist: files of /proc and /sys under
// another root, and a libnvidia-ml.so.1 that answers what a script says (fake_nvml.c).
//
//   make build/test_telemetry build/train-FP32 build/supervise build/fake_nvml/libnvidia-ml.so.1
//   build/test_telemetry --build build
//   build/test_telemetry --fake build/fake_nvml          without whole runs, as under ThreadSanitizer
//
//   1. machine   files and scripts
//   2. looks     one by one, each of a second: every value, every event
//   3. thread    how it ends; what its other threads see
//   4. runs      columns, events, the post-mortem of a lost GPU

#include "llmtrain/run/log.h"
#include "llmtrain/base/flags.h"
#include "harness.h"
#include "pieces.h"

#define GPU_A "0000:01:00.0"
#define GPU_B "0000:02:00.0"

static char built[PATH_MAX];  // the folder of the programs; "": no runs

// ------------------------------------------------------------------------------------------------
// 1. Machine

// Writes a file of a machine, with the directories above it.
static void put_file(const char* machine, const char* path, const char* text) {
    char whole[PATH_MAX];
    Error error;
    snprintf(whole, sizeof whole, "%.2000s/%s%s", root, machine, path);
    char* slash = strrchr(whole, '/');
    *slash = 0;
    need(directory_make(whole, &error), "%s", error.text);
    *slash = '/';
    put_text(whole, text);
}

// A machine of two processors with all that is read of them, `second` after its start: half of the time is idle, a
// tenth stolen; tasks wait for processors, memory and disks in 30%, 20% and 10% of it; 50 + 25 W.
static void put_machine(const char* name, int second) {
    static const char* const waits[3] = {"cpu", "memory", "io"};
    char path[64];
    int t = second;
    put_file(name, "/proc/stat", text_of("cpu  %d %d 10 %d %d 3 4 %d 0 0\ncpu0 1 2 3 4 5 6 7 8\n", 1000 + 30 * t,
                                         5 * t + 5, 100 + 40 * t, 10 * t, 10 * t));
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "/proc/pressure/%s", waits[i]);
        put_file(name, path, text_of("some avg10=9.99 avg60=1.00 avg300=0.00 total=%d\nfull avg10=0.00 avg60=0.00 "
                                     "avg300=0.00 total=7\n", 1000 + (300000 - 100000 * i) * second));
    }
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "/sys/class/hwmon/hwmon%d/", 2 + i);
        put_file(name, text_of("%sname", path), "coretemp\n");
        put_file(name, text_of("%stemp1_input", path), text_of("%d\n", 60000 + 5000 * i + 1000 * second));
        put_file(name, text_of("%s%s", path, i ? "temp1_crit" : "temp1_max"), "90000\n");
        snprintf(path, sizeof path, "/sys/class/powercap/intel-rapl:%d/", i);
        put_file(name, text_of("%sname", path), text_of("package-%d\n", i));
        int joules = i ? (50 + 25 * second) % 60 : 50 * second;  // the second one begins again at 60
        put_file(name, text_of("%senergy_uj", path), text_of("%d\n", joules * 1000000));
        put_file(name, text_of("%smax_energy_range_uj", path), "60000000\n");
        snprintf(path, sizeof path, "/sys/devices/system/edac/mc/mc%d/", i);
        put_file(name, text_of("%sue_count", path), "0\n");
        put_file(name, text_of("%sce_count", path), "17\n");
    }
    put_file(name, "/sys/class/hwmon/hwmon0/name", "nvme\n");
    put_file(name, "/sys/class/hwmon/hwmon0/temp1_input", "99000\n");
    put_file(name, "/sys/class/powercap/intel-rapl:2/name", "psys\n");
    put_file(name, "/sys/class/powercap/intel-rapl:2/energy_uj", text_of("%d\n", 900000000 * (second % 2)));
    long cores = sysconf(_SC_NPROCESSORS_CONF);
    for (long i = 0; i < cores; i++) {
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%ld/", i);
        put_file(name, text_of("%scpufreq/scaling_cur_freq", path), text_of("%d\n", 2000000 + 1000 * second));
        put_file(name, text_of("%sthermal_throttle/core_throttle_count", path), "3\n");
        put_file(name, text_of("%sthermal_throttle/package_throttle_count", path), "4\n");
    }
}

// What the fake library answers; also for programs that are started.
static void put_script(const char* name, const char* text) {
    put_file(name, "/script", text);
    unlink(text_of("%s/%s/script.calls", root, name));
    setenv("FAKE_NVML", text_of("%s/%s/script", root, name), 1);
}

#define GPU_LINES(bus)                                                                                                \
    bus " temperature0 0 61\n" bus " threshold1 0 90\n" bus " power 0 333000\n" bus " energy 0 5000 300000\n"         \
    bus " clock1 0 1410\n" bus " use 0 80\n" bus " reasons 0 0\n" bus " ecc10 0 2\n" bus " rows 0 0\n"               \
    bus " watch 0 0\n"

static size_t calls_of(const char* name, const char* bus, const char* function) {
    char* text = text_read(text_of("%s/%s/script.calls", root, name), NULL);
    size_t count = count_in(text, text_of("%s %s\n", bus, function));
    free(text);
    return count;
}

// ------------------------------------------------------------------------------------------------
// 2. Looks

// The events so far, a line each: event, GPU, XID, detail.
static char told[16384];
static void hear(void* context, const char* event, const char* detail, const char* gpu, unsigned xid) {
    size_t used = strlen(told);
    (void)context;
    snprintf(told + used, sizeof told - used, "%s %s %u %s\n", event, gpu ? gpu : "-", xid, detail);
}

// A Telemetry without its thread.
static Telemetry* look_begin(const char* machine, const char* gpus) {
    char variable[2048];
    TelemetryOptions o;
    memset(&o, 0, sizeof o);
    snprintf(variable, sizeof variable, "%.1000s/%s 1e9 %s", root, machine, gpus);
    setenv("LLMTRAIN_TEST_MACHINE", variable, 1);
    need(telemetry_choose(&o, 0, 4, 8) && o.share == 0.5, "a machine");
    o.tell = hear;
    Telemetry* t = (Telemetry*)memory_allocate(sizeof *t);
    need(t != NULL, "memory");
    telemetry_prepare(t, &o);
    machine_find(t);
    gpus_open(t);
    told[0] = 0;
    return t;
}

static void look_end(Telemetry* t) {
    gpus_close(t);
    free(t);
}

// Some looks of a second each; the machine's files are those of the seconds after `from`.
static void look(Telemetry* t, const char* machine, int from, int count) {
    for (int i = 1; i <= count; i++) {
        if (machine) put_machine(machine, from + i);
        telemetry_look(t, 1);
    }
}

static void expect_value(const double* values, TelemetryValue v, double expected) {
    bool same = isnan(expected) ? isnan(values[v]) : fabs(values[v] - expected) <= 1e-9 * fabs(expected) + 1e-12;
    expect(same, "%s is %.17g, not %g", TELEMETRY_KEYS[v], values[v], expected);
}

static void test_machine(void) {
    double v[TELEMETRY_VALUES];
    put_machine("m", 0);
    Telemetry* t = look_begin("m", "");
    telemetry_look(t, 0);
    telemetry_take(v, t, 100);
    for (int i = 0; i < TELEMETRY_VALUES; i++) expect_value(v, (TelemetryValue)i, (double)NAN);
    verdict("the first look has no values: nothing has passed");
    look(t, "m", 0, 2);
    telemetry_take(v, t, 100);
    expect_value(v, TELEMETRY_CPU_STEAL, 10.0 / 95);
    expect_value(v, TELEMETRY_CPU_USE, 35.0 / 95);
    expect_value(v, TELEMETRY_CPU_PRESSURE, 0.3);
    expect_value(v, TELEMETRY_MEMORY_PRESSURE, 0.2);
    expect_value(v, TELEMETRY_IO_PRESSURE, 0.1);
    expect_value(v, TELEMETRY_CPU_TEMP, 66.5);
    expect_value(v, TELEMETRY_CLOCK, 2001.5);
    expect_value(v, TELEMETRY_POWER, 75);
    expect_value(v, TELEMETRY_JOULES, (double)NAN);
    expect_value(v, TELEMETRY_GPU_TEMP, (double)NAN);
    expect_value(v, TELEMETRY_GPU_USE, (double)NAN);
    verdict("the means of two seconds, with a counter that begins again; the first energy has no tokens");
    telemetry_take(v, t, 150);
    for (int i = 0; i < TELEMETRY_VALUES; i++) expect_value(v, (TelemetryValue)i, (double)NAN);
    look(t, "m", 2, 3);
    telemetry_take(v, t, 200);
    expect_value(v, TELEMETRY_JOULES, 3 * 75 / 0.5 / 100);
    look(t, "m", 5, 1);
    telemetry_take(v, t, 120);
    expect_value(v, TELEMETRY_JOULES, (double)NAN);
    look(t, "m", 6, 1);
    telemetry_take(v, t, 130);
    expect_value(v, TELEMETRY_JOULES, 75 / 0.5 / 10);
    verdict("a line without a look is empty, and its energy is in the next; none after a rewind");

    unlink(text_of("%s/m/sys/class/powercap/intel-rapl:0/energy_uj", root));
    telemetry_look(t, 1);
    telemetry_take(v, t, 140);
    expect_value(v, TELEMETRY_POWER, 0);
    put_machine("m", 9);
    put_file("m", "/proc/stat", "");
    remove_tree(text_of("%s/m/proc/pressure", root));
    remove_tree(text_of("%s/m/sys/devices/system/cpu", root));
    telemetry_look(t, 1);
    telemetry_take(v, t, 150);
    expect_value(v, TELEMETRY_POWER, 2 * 75);
    expect_value(v, TELEMETRY_CPU_USE, (double)NAN);
    expect_value(v, TELEMETRY_IO_PRESSURE, (double)NAN);
    expect_value(v, TELEMETRY_CLOCK, (double)NAN);
    expect_value(v, TELEMETRY_CPU_TEMP, 74);
    verdict("files that disappear: their values are unknown, and no energy is lost");
    expect(told[0] == 0, "%s", told);
    verdict("nothing is wrong with this machine");
    look_end(t);

    t = look_begin("none", "");
    look(t, NULL, 0, 3);
    telemetry_take(v, t, 1);
    for (int i = 0; i < TELEMETRY_VALUES; i++) expect_value(v, (TelemetryValue)i, (double)NAN);
    telemetry_take(v, NULL, 1);
    for (int i = 0; i < TELEMETRY_VALUES; i++) expect_value(v, (TelemetryValue)i, (double)NAN);
    verdict("a machine without any of the files; no telemetry");
    look_end(t);
}

static void expect_told(const char* line, size_t times) {
    size_t count = count_in(told, line);
    expect(count == times, "'%s' was told %zu times, not %zu: %s", line, count, times, told);
}

static void test_machine_events(void) {
    put_machine("e", 0);
    Telemetry* t = look_begin("e", "");
    for (int celsius = 88; celsius <= 92; celsius++) {
        put_file("e", "/sys/class/hwmon/hwmon3/temp1_input", text_of("%d000\n", celsius));
        telemetry_look(t, 1);
    }
    expect_told("hot - 0 ", 1);
    expect_told(": the processor (hwmon3) is at 90 degrees C; its limit is 90\n", 1);
    put_file("e", "/sys/class/hwmon/hwmon3/temp1_input", "86000\n");
    telemetry_look(t, 1);
    put_file("e", "/sys/class/hwmon/hwmon3/temp1_input", "91000\n");
    telemetry_look(t, 1);
    expect_told("hot - 0 ", 1);
    put_file("e", "/sys/class/hwmon/hwmon3/temp1_input", "84000\n");
    telemetry_look(t, 1);
    put_file("e", "/sys/class/hwmon/hwmon3/temp1_input", "91000\n");
    telemetry_look(t, 1);
    expect_told("hot - 0 ", 2);
    verdict("hot: once, until the processor is 5 degrees cooler");
    look_end(t);

    t = look_begin("e", "");
    put_file("e", "/sys/class/hwmon/hwmon3/temp1_input", "50000\n");
    static const int throttled[] = {6, 7, 60, 0, 7};  // looks of each minute in which the count has risen
    static const size_t expected[] = {0, 1, 1, 1, 2};
    int count = 4;
    telemetry_look(t, 1);
    t->looks = 0;
    for (size_t minute = 0; minute < COUNT_OF(throttled); minute++) {
        for (int i = 0; i < 60; i++) {
            count += i < throttled[minute];
            put_file("e", "/sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count",
                     text_of("%d\n", count));
            telemetry_look(t, 1);
        }
        expect_told("throttled - 0 ", expected[minute]);
    }
    expect_told("the processor was throttled in 7 of the last 60 s by its temperature\n", 2);
    verdict("throttled: more than a tenth of a minute, once in consecutive minutes");
    put_file("e", "/sys/devices/system/edac/mc/mc1/ue_count", "2\n");
    look(t, NULL, 0, 10);
    expect_told("the main memory (mc1) had 2 errors that could not be corrected; 17 since the start of the machine "
                "were\n", 1);
    look(t, NULL, 0, 10);
    expect_told("ecc - 0 ", 1);
    verdict("errors of the main memory, once");
    look_end(t);
}

static void test_gpus(void) {
    double v[TELEMETRY_VALUES];
    put_machine("g", 0);
    put_script("g", GPU_LINES(GPU_A) GPU_B " temperature0 0 70\n" GPU_B " power 0 200000\n"
               GPU_B " energy 0 100 100000\n" GPU_B " clock1 0 1980\n" GPU_B " use 0 20\n" GPU_B " threshold1 999 0\n" GPU_B " reasons 4 0\n"
               "0000:03:00.0 missing 0 0\n");
    Telemetry* t = look_begin("g", GPU_A " 0000:03:00.0 " GPU_B);
    expect(t->gpu_count == 2, "%zu GPUs", t->gpu_count);
    look(t, NULL, 0, 1);
    telemetry_take(v, t, 10);
    expect_value(v, TELEMETRY_POWER, 533);
    look(t, NULL, 0, 20);
    telemetry_take(v, t, 20);
    expect_value(v, TELEMETRY_JOULES, (double)NAN);
    expect_value(v, TELEMETRY_POWER, 400);
    expect_value(v, TELEMETRY_GPU_TEMP, 70);
    expect_value(v, TELEMETRY_CLOCK, 1410);
    expect_value(v, TELEMETRY_GPU_USE, 0.5);
    look(t, NULL, 0, 5);
    telemetry_take(v, t, 120);
    expect_value(v, TELEMETRY_JOULES, 5 * 400 / 0.5 / 100);
    expect(told[0] == 0, "%s", told);
    verdict("the sum of two GPUs' power, the hottest, the slowest; a third is not there");
    expect(calls_of("g", GPU_A, "temperature0") == 26, "%zu calls", calls_of("g", GPU_A, "temperature0"));
    expect(calls_of("g", GPU_A, "ecc10") == 3, "%zu calls", calls_of("g", GPU_A, "ecc10"));
    static const char* const refused[] = {"reasons", "ecc10", "rows", "watch"};
    for (size_t i = 0; i < COUNT_OF(refused); i++)
        expect(calls_of("g", GPU_B, refused[i]) == 1, "%s: %zu calls", refused[i], calls_of("g", GPU_B, refused[i]));
    verdict("what a GPU does not support, or not for this user, is asked once");

    // Another failure is passing.
    put_script("g", GPU_LINES(GPU_A) GPU_B " temperature0 999 0\n");
    look(t, NULL, 0, 3);
    expect(calls_of("g", GPU_B, "temperature0") == 3, "%zu calls", calls_of("g", GPU_B, "temperature0"));
    put_script("g", GPU_LINES(GPU_A) GPU_B " temperature0 15 0\n");
    look(t, NULL, 0, 3);
    expect(calls_of("g", GPU_B, "temperature0") == 1, "%zu calls", calls_of("g", GPU_B, "temperature0"));
    expect_told("xid " GPU_B " 79 ", 1);
    expect(calls_of("g", GPU_A, "temperature0") == 3, "the other GPU: %zu calls", calls_of("g", GPU_A, "temperature0"));
    put_script("g", GPU_LINES(GPU_A) GPU_B " xid 0 79\n");
    look(t, NULL, 0, 2);
    expect_told("xid " GPU_B " 79 ", 1);
    verdict("a GPU that answers that it is lost is reported once, and not asked again");
    look_end(t);
}

static void test_gpu_events(void) {
    static const unsigned numbers[] = {13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 119};
    char script[4096] = GPU_LINES(GPU_A) GPU_B " xid 0 79\n";  // which another test has taken
    put_machine("x", 0);
    for (size_t i = 0; i < COUNT_OF(numbers); i++)
        snprintf(script + strlen(script), sizeof script - strlen(script), GPU_A " xid 0 %u\n", numbers[i]);
    strcat(script, "0000:99:00.0 xid 0 31\n");
    put_script("x", script);
    Telemetry* t = look_begin("x", GPU_A);
    look(t, NULL, 0, 2);
    for (size_t i = 0; i < COUNT_OF(numbers); i++) {
        unsigned n = numbers[i];
        bool lost = n == 48 || n == 74 || n == 79 || n == 95, application = n < 48;
        expect_told(text_of("xid " GPU_A " %u ", n), 1);
        expect_told(text_of(": GPU 0 (" GPU_A "): XID %u%s: ", n,
                            n == 119 ? "" : application ? " (application)" : " (hardware)"), 1);
        expect(telemetry_xid(n).lost == lost, "XID %u", n);
        expect(strlen(telemetry_xid(n).meaning) > 20, "XID %u has no sentence", n);
    }
    expect_told("xid - 31 ", 1);
    verdict("XIDs: a sentence each, of the application or the hardware; a GPU that is not ours");

    told[0] = 0;
    char* line = strstr(script, GPU_A " ecc10 0 2");
    line[strlen(GPU_A " ecc10 0 ")] = '5';
    put_script("x", script);
    look(t, NULL, 0, 18);
    expect_told("ecc " GPU_A " 0 ", 1);
    expect_told("3 errors in its memory could not be corrected\n", 1);
    line = strstr(script, GPU_A " rows 0 0");
    for (char rows = '1'; rows <= '3'; rows += 2) {
        line[strlen(GPU_A " rows 0 ")] = rows;
        put_script("x", script);
        look(t, NULL, 0, 10);
    }
    expect_told("rows of its memory are bad; a reset of the GPU replaces them\n", 1);
    expect_told("rows of its memory are bad; none are left to replace them\n", 1);
    verdict("errors in a GPU's memory, and what is needed");

    told[0] = 0;
    t->looks = 0;
    put_script("x", GPU_A " temperature0 0 90\n" GPU_A " reasons 0 37\n");  // 1 idle, 4 power, 32 temperature
    look(t, NULL, 0, 120);
    expect_told("hot " GPU_A " 0 ", 1);
    expect_told("is at 90 degrees C; its limit is 90\n", 1);
    expect_told("throttled " GPU_A " 0 ", 2);
    expect_told("was throttled in 60 of the last 60 s by its power limit\n", 1);
    expect_told("was throttled in 60 of the last 60 s by its temperature\n", 1);
    verdict("a GPU that is hot and throttled; an idle one is not");
    look_end(t);
}

// ------------------------------------------------------------------------------------------------
// 3. Thread

static void test_thread(void) {
    TelemetryOptions o;
    double v[TELEMETRY_VALUES], began, seen = 0;
    put_machine("t", 1);
    put_script("t", GPU_LINES(GPU_A));
    memset(&o, 0, sizeof o);
    setenv("LLMTRAIN_TEST_MACHINE", text_of("%s/t 2 " GPU_A, root), 1);
    need(telemetry_choose(&o, 0, 1, 1), "a machine");
    expect(!telemetry_choose(&o, 1, 2, 2), "the second rank");
    o.gpu_count = 1;
    o.share = 1;
    o.tell = hear;
    int files = open_descriptors();
    Telemetry* t = telemetry_begin(&o);
    need(t != NULL, "a thread");
    for (began = now_ms(); seen < 40 && now_ms() - began < 5e3; sleep_ms(1)) {
        telemetry_take(v, t, (uint64_t)(now_ms() - began) + 1);
        seen += !isnan(v[TELEMETRY_POWER]);
        if (!isnan(v[TELEMETRY_GPU_TEMP])) expect_value(v, TELEMETRY_GPU_TEMP, 61);
    }
    telemetry_end(t);
    expect(seen == 40, "%g looks", seen);
    expect(open_descriptors() == files, "%d descriptors, before it %d", open_descriptors(), files);
    verdict("a thread that looks while another takes");

    o.period_ms = 1e6;
    t = telemetry_begin(&o);
    began = now_ms();
    telemetry_end(t);
    expect(now_ms() - began < 900, "%.0f ms", now_ms() - began);
    verdict("it ends at once, whatever its period is");

    char script[2048] = GPU_LINES(GPU_A);
    for (int i = 0; i < 15; i++) strcat(script, i < 14 ? GPU_A " xid 0 13\n" : GPU_A " xid 0 94\n");  // 14 were taken
    unlink(text_of("%s/t/script.calls", root));
    told[0] = 0;
    t = telemetry_begin(&o);
    for (began = now_ms(); calls_of("t", GPU_A, "ecc10") == 0 && now_ms() - began < 5e3;) sleep_ms(1);
    sleep_ms(20);
    put_script("t", script);
    telemetry_end(t);
    expect_told("xid " GPU_A " 94 ", 1);
    verdict("before it ends it looks once more: what has ended the run may be an XID");

    put_script("t", GPU_A " hang 0 2\n" GPU_LINES(GPU_A));
    t = telemetry_begin(&o);
    sleep_ms(20);
    began = now_ms();
    telemetry_end(t);
    double ms = now_ms() - began;
    expect(ms > 900 && ms < 1500 + 3e3 * (built[0] == 0), "%.0f ms", ms);
    verdict("one that hangs in the driver is left behind after a second");
}

// ------------------------------------------------------------------------------------------------
// 4. Runs

#define SHAPE " --layers 1 --heads 1 --channels 16 --seq 16 --batch 2 --threads 1"

typedef struct { const char *machine, *library; } Where;

static void become(const void* context) {
    const Where* w = (const Where*)context;
    environment_clear();
    setenv("OMP_WAIT_POLICY", "passive", 1);
    if (w->machine == NULL) return;
    setenv("LLMTRAIN_TEST_MACHINE", text_of("%s/%s 10 " GPU_A " " GPU_B, root, w->machine), 1);
    setenv("FAKE_NVML", text_of("%s/%s/script", root, w->machine), 1);
    setenv("LD_LIBRARY_PATH", text_of("%s/%s", built, w->library), 1);
    if (strcmp(w->machine, "exited") == 0) setenv("LLMTRAIN_TEST_FAULT", "rank 0 step 100 at update do kill", 1);
}

static void start(Program* p, const Where* where, const char* command) {
    Words words;
    memset(&words, 0, sizeof words);
    words_add(&words, command);
    program_start(p, words.words, become, where);
}

// The lines of a log up to the times, which telemetry must not change.
static char* lines_before_times(const char* run) {
    char *text = text_read(text_of("%s/metrics.jsonl", run), NULL), *to = text;
    for (char *line = text, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        char* times = strstr(line, ",\"ms\"");
        size_t bytes = (size_t)((times && times < end ? times : end) - line);
        memmove(to, line, bytes);
        to += bytes;
    }
    *to = 0;
    return text;
}

static void expect_event(const char* events, const char* text, size_t times) {
    size_t count = count_in(events, text);
    expect(count == times, "%zu times, not %zu: %s\n%.3000s", count, times, text, events);
}

static void test_runs(void) {
    enum { NEW, OLD, RANKS, PLAIN, LOST, EXITED, COUNT };
    static const Where where[COUNT] = {
        {"new", "fake_nvml"}, {"old", "fake_nvml_old"}, {"ranks", "fake_nvml"}, {NULL, NULL}, {"lost", "fake_nvml"},
        {"exited", "fake_nvml"}};
    static const char* const more[COUNT] = {"--steps 150", "--steps 150", "--steps 20 --ranks 2 --log-every 20",
                                            "--steps 150", "--steps 1000000 --log-every 1000", "--steps 1000000"};
    static double values[160];
    Program programs[COUNT];
    put_shard("x.bin", 64, 20000, 1);
    for (int i = 0; i < COUNT; i++) {
        const char *out = i == PLAIN ? "plain" : where[i].machine, *supervise = "";
        if (i != PLAIN) put_machine(out, 1);
        if (i != PLAIN)
            put_script(out, i < LOST ? GPU_LINES(GPU_A) GPU_LINES(GPU_B) GPU_A " xid 0 13\n"
                                     : GPU_LINES(GPU_A) GPU_LINES(GPU_B) GPU_B " xid 0 79\n");
        if (i >= LOST) supervise = text_of("%s/supervise --max-restarts 1 -- ", built);
        start(&programs[i], &where[i], text_of("%s%s/train-FP32 --data %s/x.bin --out %s/%s" SHAPE " %s%s", supervise,
                                               built, root, root, out, more[i], i >= LOST ? " --resume" : ""));
    }
    const char *lost = "lost/failures/failure_0001.json", *exited = "exited/failures/failure_0001.json";
    for (double began = now_ms(); now_ms() - began < 30e3 && !(file_exists(lost) && file_exists(exited)); sleep_ms(5))
        programs_run(programs, COUNT, 60e3);
    for (int i = LOST; i < COUNT; i++) kill(programs[i].pid, SIGTERM);
    programs_wait(programs, COUNT, 60e3);

    for (int i = 0; i < LOST; i++)
        if (!expect(program_good(&programs[i]), "%s", more[i])) program_print(&programs[i], more[i]);
    size_t lines = log_numbers(values, COUNT_OF(values), "new", "power_w"), known = 0;
    for (size_t i = 0; i < lines; i++) known += values[i] > 0;
    expect(lines == 150 && known >= 2, "%zu lines, %zu with power", lines, known);
    static const struct { const char* key; double value; } columns[] = {
        {"gpu_temp_c", 61}, {"gpu_use", 0.8}, {"clock_mhz", 1410}, {"cpu_temp_c", 66}};
    for (size_t c = 0; c < COUNT_OF(columns); c++) {
        size_t right = 0;
        log_numbers(values, COUNT_OF(values), "new", columns[c].key);
        for (size_t i = 0; i < lines; i++) right += fabs(values[i] - columns[c].value) < 1e-9;
        expect(right >= known, "%s: %zu of %zu lines", columns[c].key, right, known);
    }
    // The counter rises by 300 J with each look: what all tokens but those of the first lines have taken.
    double joules = 0, tokens[160], last = 0;
    log_numbers(tokens, COUNT_OF(tokens), "new", "tokens");
    log_numbers(values, COUNT_OF(values), "new", "joules_per_token");
    for (size_t i = 0; i < lines; i++) {
        if (isnan(values[i])) continue;
        double since = 0;  // the tokens since the last line that had looks
        for (size_t k = i; k-- > 0 && since == 0;) since = !isnan(values[k]) || last == 0 ? tokens[i] - tokens[k] : 0;
        joules = values[i] * since / 600;
        if (last > 0) expect(fabs(joules - rint(joules)) < 1e-6 && joules > 0.5, "%.9g looks", joules);
        last = tokens[i];
    }
    verdict("the columns of a run: power, temperature, use, clock, whole looks of energy");

    char *with = lines_before_times("new"), *without = lines_before_times("plain");
    expect(strlen(with) > 1000 && strcmp(with, without) == 0, "the numbers of a run without GPUs differ");
    free(with);
    free(without);
    log_numbers(values, COUNT_OF(values), "plain", "power_w");
    verdict("all that is before the times is as without a GPU");

    known = 0;
    log_numbers(values, COUNT_OF(values), "old", "power_w");
    for (size_t i = 0; i < lines; i++) known += fabs(values[i] - 666) < 1e-9;
    expect(known >= 2, "%zu lines", known);
    log_numbers(values, COUNT_OF(values), "old", "joules_per_token");
    for (size_t i = 0; i < lines; i++) expect(isnan(values[i]), "a line has %g", values[i]);
    verdict("an old library: power by its readings, and no energy");

    char* events = text_read("new/events.jsonl", NULL);
    expect_event(events, "\"event\": \"xid\",\"step\": ", 1);
    expect_event(events, "XID 13 (application): ", 1);
    free(events);
    events = text_read("ranks/events.jsonl", NULL);
    expect_event(events, "\"event\": \"xid\"", 1);
    free(events);
    const char* printed = programs[NEW].text[1];
    expect(strstr(printed, ": GPU 0 (" GPU_A "): XID 13 (application): ") != NULL, "%s", printed);
    verdict("an event of a run, and one of two ranks: once, on standard error too");

    for (int i = LOST; i <= EXITED; i++) {
        events = text_read(text_of("%s/events.jsonl", where[i].machine), NULL);
        char* failure = text_read(text_of("%s/failures/failure_0001.json", where[i].machine), NULL);
        expect(count_in(events, "\"event\": \"xid\"") > 0, "%.3000s", events);
#ifdef __SANITIZE_ADDRESS__  // with which a program takes longer to end than the supervisor waits
        expect_event(failure, "\"kind\": ", 1);
#else
        expect_event(failure, i == LOST ? "\"kind\": \"lost rank\"" : "\"kind\": \"signal\"", 1);
#endif
        expect_event(failure, "the GPU " GPU_B " is lost: XID 79, it has fallen off the bus", 1);
        free(events);
        free(failure);
    }
    verdict("a lost GPU ends the run as a lost rank does, and the post-mortem names it");
    for (int i = 0; i < COUNT; i++) program_free(&programs[i]);
}

int main(int argc, char** argv) {
    const char *build = NULL, *fake = NULL;
    const Flag rows[] = {
        {"build", KIND_TEXT, &build, "DIR", 0, 0, "train-FP32, supervise and the fake libraries", 0},
        {"fake", KIND_TEXT, &fake, "DIR", 0, 0, "libnvidia-ml.so.1; by default fake_nvml in --build", 0},
    };
    Flags flags = flags_of(rows, COUNT_OF(rows));
    int code;
    if (!flags_begin(&code, "test_telemetry", NULL, &flags, argc, argv)) return code;
    tests_begin("test_telemetry");
    need(build == NULL || realpath(build, built) != NULL, "%s", build);
    const char* library = text_of("%s/libnvidia-ml.so.1", fake ? realpath(fake, NULL) : text_of("%s/fake_nvml", built));
    root_enter();
    // Loaded once from its path, a library is found by its name alone.
    bool loads = dlopen(library, RTLD_NOW) != NULL;
#ifdef SYSTEM_LINUX
    const bool has_files = true;  // of /proc and /sys
#else
    const bool has_files = false;
#endif
    loads = loads && has_files;
    if (has_files) test_machine();
    if (has_files) test_machine_events();
    if (loads) test_gpus();
    if (loads) test_gpu_events();
    if (loads) test_thread();
    if (loads && build) test_runs();
    if (!loads) skip("GPUs and runs", "there is no fake library, or this is not Linux");
    return tests_end();
}
