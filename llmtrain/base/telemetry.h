// telemetry.h: what the machine does while a run trains: power, temperatures, clocks, load, and the faults of its GPUs.
//
//   TelemetryOptions options = {.tell = function, .context = context};
//   if (telemetry_choose(&options, local_rank, local_world, world)) t = telemetry_begin(&options);
//   telemetry_take(values, t, tokens);                    the means since the last call, for a line of the log
//   telemetry_end(t);
//
// A thread looks once per second. It alone reads files and asks the GPU's driver, which may take long, or hang when a
// GPU is lost; telemetry_take only copies sums. The thread reports events by calling `tell`.
//
//   1. values    the columns of metrics.jsonl, and counters
//   2. events    XIDs, memory errors, heat, throttling
//   3. machine   the files of Linux in /proc and /sys; other systems have none of these values
//   4. GPUs      power, temperature, clocks, errors, through NVML
//   5. thread
//
// LLMTRAIN_TEST_MACHINE="ROOT PERIOD_MS BUS_ID..." is for tests: /proc and /sys are in ROOT, a second takes PERIOD_MS,
// and a program for CPUs watches these GPUs.

#ifndef LLMTRAIN_TELEMETRY_H
#define LLMTRAIN_TELEMETRY_H

#include "../ops/base.h"
#include "nvml.h"
#include "system.h"

// ------------------------------------------------------------------------------------------------
// 1. Values

enum { TELEMETRY_GPUS = 16, TELEMETRY_SOURCES = 16 };
#define TELEMETRY_MINUTE 60u  // looks
#define TELEMETRY_RARELY 10u  // looks from one at error counts to the next
#define TELEMETRY_STOP_MS 1e3 // after that telemetry_end leaves a thread that hangs in the driver
#define TELEMETRY_COOLER 5    // degrees below its limit, from which on a part that was hot may be reported again

typedef enum {
    TELEMETRY_POWER, TELEMETRY_JOULES, TELEMETRY_GPU_TEMP, TELEMETRY_GPU_USE, TELEMETRY_CLOCK, TELEMETRY_CPU_TEMP,
    TELEMETRY_CPU_USE, TELEMETRY_CPU_STEAL, TELEMETRY_CPU_PRESSURE, TELEMETRY_MEMORY_PRESSURE, TELEMETRY_IO_PRESSURE,
    TELEMETRY_VALUES
} TelemetryValue;
static const char* const TELEMETRY_KEYS[TELEMETRY_VALUES] = {
    "power_w", "joules_per_token", "gpu_temp_c", "gpu_use", "clock_mhz", "cpu_temp_c", "cpu_use", "cpu_steal",
    "cpu_pressure", "memory_pressure", "io_pressure"};

// Called by the thread. gpu: the PCI bus id; NULL: none. xid: of the event "xid", otherwise 0.
typedef void (*TelemetryTell)(void* context, const char* event, const char* detail, const char* gpu, unsigned xid);

typedef struct {
    char root[1024];       // of /proc and /sys; ""
    double period_ms;
    char gpus[TELEMETRY_GPUS][20];  // PCI bus ids
    size_t gpu_count;
    double share;          // of the run's ranks, those whose power is measured
    TelemetryTell tell;
    void* context;
} TelemetryOptions;

// By how much a counter has risen since it was last known, NAN if that is unknown. range: from where it begins again at
// 0; NAN: it does not.
static inline double telemetry_rise(double* last, double now, double range) {
    double rise = now - *last;
    if (!isnan(now)) *last = now;
    return rise >= 0 ? rise : rise + range;
}

// Adds what is known to a sum, which is NAN as long as nothing is.
static inline void telemetry_sum(double* sum, double x) {
    if (!isnan(x)) *sum = isnan(*sum) ? x : *sum + x;
}

// A file, or a group of files, that is read.
typedef struct {
    size_t number;  // in its path
    double last;    // of a counter
    double limit;   // of a counter: its range; of a temperature: what is hot
    bool hot;       // and reported
} TelemetrySource;

typedef struct {
    TelemetrySource list[TELEMETRY_SOURCES];
    size_t count;
} TelemetrySources;

static inline void telemetry_add(TelemetrySources* s, size_t number, double limit) {
    TelemetrySource source = {number, (double)NAN, limit, false};
    if (s->count < TELEMETRY_SOURCES) s->list[s->count++] = source;
}

// ------------------------------------------------------------------------------------------------
// 2. Events

// How often a GPU or the processor ran below its clock, in this minute, by reason.
enum { TELEMETRY_REASONS = 10, TELEMETRY_PROCESSOR_HOT = 9 };  // the others: bits of NVML's clocks event reasons
typedef struct {
    unsigned seen[TELEMETRY_REASONS];
    unsigned told;  // bits: those of the last minute
} TelemetryThrottle;

typedef struct {
    char name[64], bus[20];
    NvmlGpu nvml;
    bool told_lost, hot;
    double limit_c, millijoules, errors, resets;
    TelemetryThrottle throttle;
} TelemetryGpu;

typedef struct Telemetry {
    struct Telemetry* next_hanging;  // of those that telemetry_end left
    TelemetryOptions options;
    pthread_t thread;
    int wake[2];                 // a pipe: a byte in it ends the thread
    bool done, abandoned;        // written atomically: the thread has ended; nobody hears it any more
    pthread_mutex_t lock;        // of the sums, which are over time: value x seconds, and the seconds
    double sums[TELEMETRY_VALUES], seconds[TELEMETRY_VALUES];
    uint64_t tokens;             // of telemetry_take: at the last line with an energy; 0: there was none
    // What follows belongs to the thread.
    char host[64];
    unsigned looks;
    Nvml nvml;
    void* events;                // NVML's event set; NULL: none
    TelemetryGpu gpus[TELEMETRY_GPUS];
    size_t gpu_count;
    double ticks, idle, steal, pressure[3];
    TelemetrySources cpus, sensors, zones, memories;  // cpuN, hwmonN, intel-rapl:N, mcN
    TelemetryThrottle throttle;  // of the processor
} Telemetry;

__attribute__((format(printf, 5, 6))) static inline void telemetry_tell(
    Telemetry* t, const char* event, const char* gpu, unsigned xid, const char* format, ...) {
    char text[600], detail[700];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(detail, sizeof detail, "%s: %s", t->host, text);
    if (t->options.tell && !__atomic_load_n(&t->abandoned, __ATOMIC_ACQUIRE))
        t->options.tell(t->options.context, event, detail, gpu, xid);
}

// The errors that the driver numbers (NVIDIA's "XID Errors"). lost: no program can use the GPU before it was reset.
typedef struct {
    unsigned number;
    bool lost;
    const char *kind, *meaning;
} TelemetryXid;

static inline TelemetryXid telemetry_xid(unsigned number) {
    static const char hardware[] = " (hardware)", application[] = " (application)";
    static const TelemetryXid known[] = {
        {13, false, application, "a kernel did something illegal, as an access out of bounds"},
        {31, false, application, "a kernel accessed memory that is not mapped"},
        {43, false, application, "the work of a program was stopped after an error"},
        {45, false, application, "the work of a program was removed, after an earlier error or as it was killed"},
        {48, true, hardware, "an error in its memory that could not be corrected (double bit)"},
        {63, false, hardware, "a row of its memory is to be replaced at the next reset"},
        {64, false, hardware, "a row of its memory could not be replaced; let the GPU be exchanged"},
        {74, true, hardware, "an NVLink failed; check its cable, bridge or switch"},
        {79, true, hardware, "it has fallen off the bus: its power, heat, or slot; restart the machine"},
        {94, false, hardware, "an error in its memory has ended one program"},
        {95, true, hardware, "an error in its memory that may have reached all programs; it needs a reset"},
    };
    TelemetryXid unknown = {number, false, "", "see NVIDIA's list of XID errors"};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (known[i].number == number) return known[i];
    return unknown;
}

static inline void telemetry_tell_xid(Telemetry* t, TelemetryGpu* g, unsigned number) {
    TelemetryXid xid = telemetry_xid(number);
    if (number == 79 && g && g->told_lost) return;
    if (number == 79 && g) g->told_lost = true;
    telemetry_tell(t, "xid", g ? g->bus : NULL, number, "%s: XID %u%s: %s", g ? g->name : "a GPU", number, xid.kind,
                   xid.meaning);
}

// Once, until the part was cooler.
static inline void telemetry_check_heat(Telemetry* t, bool* hot, const char* name, const char* bus, double celsius,
                                        double limit) {
    if (celsius >= limit && !*hot)
        telemetry_tell(t, "hot", bus, 0, "%s is at %.0f degrees C; its limit is %.0f", name, celsius, limit);
    *hot = celsius >= limit - (*hot ? TELEMETRY_COOLER : 0);
}

// At the end of a minute: reasons that held for more than a tenth of it, and not so in the minute before.
static inline void telemetry_check_throttle(Telemetry* t, TelemetryThrottle* throttle, const char* name,
                                            const char* bus) {
    static const char* const reasons[TELEMETRY_REASONS] = {  // NULL: idle, or as the user has set it
        NULL, NULL, "its power limit", "a slowdown of the hardware: heat or power", NULL, "its temperature",
        "its temperature, in hardware", "the power supply's brake", NULL, "its temperature"};
    unsigned told = 0;
    for (unsigned r = 0; r < TELEMETRY_REASONS; r++) {
        if (reasons[r] == NULL || throttle->seen[r] * 10 <= TELEMETRY_MINUTE) continue;
        told |= 1u << r;
        if (!(throttle->told >> r & 1))
            telemetry_tell(t, "throttled", bus, 0, "%s was throttled in %u of the last %u s by %s", name,
                           throttle->seen[r], TELEMETRY_MINUTE, reasons[r]);
    }
    memset(throttle, 0, sizeof *throttle);
    throttle->told = told;
}

// ------------------------------------------------------------------------------------------------
// 3. Machine

#ifdef SYSTEM_LINUX
// The first line of a file; "" if there is none.
__attribute__((format(printf, 3, 4))) static inline const char* machine_line(char line[256], const Telemetry* t,
                                                                             const char* format, ...) {
    char path[1200];
    size_t length = (size_t)snprintf(path, sizeof path, "%s", t->options.root);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(path + length, sizeof path - length, format, arguments);
    va_end(arguments);
    FILE* file = fopen(path, "re");
    line[0] = 0;
    if (file && fgets(line, 256, file) == NULL) line[0] = 0;
    if (file) fclose(file);
    return line;
}

static inline double machine_number(const char* line) {
    char* end;
    double number = strtod(line, &end);
    return end == line ? (double)NAN : number;
}

#define MACHINE_NUMBER(t, ...) machine_number(machine_line(line, t, __VA_ARGS__))
#define MACHINE_CPU "/sys/devices/system/cpu/cpu%zu/"
#define MACHINE_SENSOR "/sys/class/hwmon/hwmon%zu/"
#define MACHINE_ZONE "/sys/class/powercap/intel-rapl:%zu/"
#define MACHINE_MEMORY "/sys/devices/system/edac/mc/mc%zu/"

// Finds what there is. Of many cores some are looked at; of a processor's sensors the first, which is of all its cores.
static inline void machine_find(Telemetry* t) {
    static const char* const processors[] = {"coretemp", "k10temp", "zenpower", "cpu_thermal"};
    char line[256];
    size_t cores = (size_t)sysconf(_SC_NPROCESSORS_CONF), looked_at = min_size(cores, TELEMETRY_SOURCES);
    for (size_t i = 0; i < looked_at; i++) telemetry_add(&t->cpus, i * cores / looked_at, (double)NAN);
    for (size_t i = 0; i < 64; i++) {
        machine_line(line, t, MACHINE_SENSOR "name", i);
        bool is_processor = false;
        for (size_t k = 0; k < sizeof processors / sizeof processors[0]; k++)
            is_processor |= strncmp(line, processors[k], strlen(processors[k])) == 0;
        double limit = is_processor ? MACHINE_NUMBER(t, MACHINE_SENSOR "temp1_max", i) : (double)NAN;
        if (is_processor && isnan(limit)) limit = MACHINE_NUMBER(t, MACHINE_SENSOR "temp1_crit", i);
        if (is_processor) telemetry_add(&t->sensors, i, 1e-3 * limit);
    }
    for (size_t i = 0; i < TELEMETRY_SOURCES; i++) {
        bool package = strncmp(machine_line(line, t, MACHINE_ZONE "name", i), "package", 7) == 0;
        if (package) telemetry_add(&t->zones, i, MACHINE_NUMBER(t, MACHINE_ZONE "max_energy_range_uj", i));
        if (!isnan(MACHINE_NUMBER(t, MACHINE_MEMORY "ue_count", i))) telemetry_add(&t->memories, i, (double)NAN);
    }
}

// Time in use, stolen by a hypervisor, and in which a task waited (pressure), as shares.
static inline void machine_read_load(double* values, Telemetry* t, double seconds) {
    static const char* const resources[3] = {"cpu", "memory", "io"};
    char line[256];
    double v[8], all = 0, total = (double)NAN;  // user nice system idle iowait irq softirq steal
    bool found = sscanf(machine_line(line, t, "/proc/stat"), "cpu %lf %lf %lf %lf %lf %lf %lf %lf", v, v + 1, v + 2,
                        v + 3, v + 4, v + 5, v + 6, v + 7) == 8;
    for (int i = 0; i < 8 && found; i++) all += v[i];
    if (found) {
        double ticks = telemetry_rise(&t->ticks, all, (double)NAN);
        values[TELEMETRY_CPU_STEAL] = telemetry_rise(&t->steal, v[7], (double)NAN) / ticks;
        values[TELEMETRY_CPU_USE] = 1 - (telemetry_rise(&t->idle, v[3] + v[4], (double)NAN) / ticks +
                                         values[TELEMETRY_CPU_STEAL]);
    }
    for (int i = 0; i < 3; i++) {
        if (sscanf(machine_line(line, t, "/proc/pressure/%s", resources[i]), "some %*s %*s %*s total=%lf", &total) == 1)
            values[TELEMETRY_CPU_PRESSURE + i] = 1e-6 * telemetry_rise(&t->pressure[i], total, (double)NAN) / seconds;
    }
}

static inline void machine_read_heat(double* values, Telemetry* t) {
    char line[256], name[64];
    bool throttled = false;
    for (TelemetrySource* s = t->sensors.list; s < t->sensors.list + t->sensors.count; s++) {
        double celsius = 1e-3 * MACHINE_NUMBER(t, MACHINE_SENSOR "temp1_input", s->number);
        snprintf(name, sizeof name, "the processor (hwmon%zu)", s->number);
        telemetry_check_heat(t, &s->hot, name, NULL, celsius, s->limit);
        values[TELEMETRY_CPU_TEMP] = fmax(values[TELEMETRY_CPU_TEMP], celsius);
    }
    for (TelemetrySource* s = t->cpus.list; s < t->cpus.list + t->cpus.count; s++) {
        double count = MACHINE_NUMBER(t, MACHINE_CPU "thermal_throttle/core_throttle_count", s->number);
        if (isnan(count)) break;
        count += MACHINE_NUMBER(t, MACHINE_CPU "thermal_throttle/package_throttle_count", s->number);
        throttled |= telemetry_rise(&s->last, count, (double)NAN) > 0;
    }
    t->throttle.seen[TELEMETRY_PROCESSOR_HOT] += throttled;
}

// Returns the joules of the processors since the last time; NAN: unknown. Reads their clock.
static inline double machine_read_energy(double* values, Telemetry* t) {
    char line[256];
    double joules = (double)NAN, clocks = 0, count = 0;
    for (TelemetrySource* s = t->zones.list; s < t->zones.list + t->zones.count; s++)
        telemetry_sum(&joules, 1e-6 * telemetry_rise(&s->last, MACHINE_NUMBER(t, MACHINE_ZONE "energy_uj", s->number),
                                                     s->limit));
    for (TelemetrySource* s = t->cpus.list; s < t->cpus.list + t->cpus.count; s++) {
        double clock = 1e-3 * MACHINE_NUMBER(t, MACHINE_CPU "cpufreq/scaling_cur_freq", s->number);
        if (isnan(clock)) break;
        clocks += clock;
        count++;
    }
    values[TELEMETRY_CLOCK] = clocks / count;  // NAN if there is none
    return joules;
}

static inline void machine_read_errors(Telemetry* t) {
    char line[256];
    for (TelemetrySource* s = t->memories.list; s < t->memories.list + t->memories.count; s++) {
        double errors = telemetry_rise(&s->last, MACHINE_NUMBER(t, MACHINE_MEMORY "ue_count", s->number), (double)NAN);
        if (!(errors > 0)) continue;
        telemetry_tell(t, "ecc", NULL, 0, "the main memory (mc%zu) had %.0f errors that could not be corrected; %.0f "
                       "since the start of the machine were", s->number, errors,
                       MACHINE_NUMBER(t, MACHINE_MEMORY "ce_count", s->number));
    }
}

static inline void machine_read(double* values, Telemetry* t, double seconds) {
    machine_read_load(values, t, seconds);
    machine_read_heat(values, t);
    if (t->options.gpu_count == 0)
        values[TELEMETRY_JOULES] = values[TELEMETRY_POWER] = machine_read_energy(values, t) / seconds;
    if (t->looks % TELEMETRY_RARELY == 0) machine_read_errors(t);
}
#else
static inline void machine_find(Telemetry* t) { (void)t; }
static inline void machine_read(double* values, Telemetry* t, double seconds) {
    (void)values; (void)t; (void)seconds;
}
#endif

// ------------------------------------------------------------------------------------------------
// 4. GPUs

static inline void gpus_open(Telemetry* t) {
    const TelemetryOptions* o = &t->options;
    if (o->gpu_count > 0) nvml_open(&t->nvml);
    if (t->nvml.init == NULL || t->nvml.by_bus == NULL || t->nvml.init() != 0) return;
    if (t->nvml.events == NULL || t->nvml.events(&t->events) != 0) t->events = NULL;
    for (size_t i = 0; i < o->gpu_count; i++) {
        TelemetryGpu* g = &t->gpus[t->gpu_count];
        unsigned limit = 0;
        g->millijoules = g->errors = g->resets = (double)NAN;
        snprintf(g->bus, sizeof g->bus, "%s", o->gpus[i]);
        snprintf(g->name, sizeof g->name, "GPU %zu (%s)", i, o->gpus[i]);
        if (t->nvml.by_bus(g->bus, &g->nvml.handle) != 0) continue;
        g->limit_c = NVML_ASK(&t->nvml, &g->nvml, threshold, NVML_AT_SLOWDOWN, &limit) ? (double)limit : (double)NAN;
        if (t->events) (void)NVML_ASK(&t->nvml, &g->nvml, watch, NVML_EVENT_XID, t->events);
        t->gpu_count++;
    }
}

static inline void gpus_close(Telemetry* t) {
    if (t->events && t->nvml.events_free) t->nvml.events_free(t->events);
    if (t->nvml.init && t->nvml.shutdown) t->nvml.shutdown();
}

static inline void gpu_read_errors(Telemetry* t, TelemetryGpu* g) {
    unsigned long long errors = 0;
    unsigned corrected, uncorrected, pending = 0, failed = 0;
    double more = 0, resets = 0;
    if (NVML_ASK(&t->nvml, &g->nvml, ecc, NVML_NOT_CORRECTED, NVML_SINCE_LOAD, &errors))
        more = telemetry_rise(&g->errors, (double)errors, (double)NAN);
    if (NVML_ASK(&t->nvml, &g->nvml, rows, &corrected, &uncorrected, &pending, &failed))
        resets = telemetry_rise(&g->resets, (double)((pending != 0) + (failed != 0)), (double)NAN);
    if (more > 0)
        telemetry_tell(t, "ecc", g->bus, 0, "%s: %.0f errors in its memory could not be corrected", g->name, more);
    if (resets > 0)
        telemetry_tell(t, "ecc", g->bus, 0, "%s: rows of its memory are bad; %s", g->name,
                       failed ? "none are left to replace them" : "a reset of the GPU replaces them");
}

// Adds joules and watts to the sums of all GPUs.
static inline void gpu_read(double* values, Telemetry* t, TelemetryGpu* g, double* joules, double* watts) {
    unsigned number = 0;
    unsigned long long large = 0;
    NvmlUse use = {0, 0};
    if (NVML_ASK(&t->nvml, &g->nvml, temperature, NVML_OF_GPU, &number)) {
        telemetry_check_heat(t, &g->hot, g->name, g->bus, number, g->limit_c);
        values[TELEMETRY_GPU_TEMP] = fmax(values[TELEMETRY_GPU_TEMP], number);
    }
    if (NVML_ASK(&t->nvml, &g->nvml, clock, NVML_OF_SM, &number))
        values[TELEMETRY_CLOCK] = fmin(values[TELEMETRY_CLOCK], number);
    if (NVML_ASK(&t->nvml, &g->nvml, use, &use))
        telemetry_sum(&values[TELEMETRY_GPU_USE], 0.01 * use.gpu / (double)t->gpu_count);
    if (NVML_ASK(&t->nvml, &g->nvml, energy, &large))
        telemetry_sum(joules, 1e-3 * telemetry_rise(&g->millijoules, (double)large, (double)NAN));
    if (NVML_ASK(&t->nvml, &g->nvml, power, &number)) telemetry_sum(watts, 1e-3 * number);
    if (NVML_ASK(&t->nvml, &g->nvml, reasons, &large))
        for (int r = 0; r < TELEMETRY_PROCESSOR_HOT; r++) g->throttle.seen[r] += large >> r & 1;
    if (t->looks % TELEMETRY_RARELY == 0) gpu_read_errors(t, g);
}

static inline void gpus_read(double* values, Telemetry* t, double seconds) {
    double joules = (double)NAN, watts = (double)NAN;
    NvmlEvent event;
    for (TelemetryGpu* g = t->gpus; g < t->gpus + t->gpu_count; g++)
        if (!g->nvml.lost) gpu_read(values, t, g, &joules, &watts);
    while (t->events && t->nvml.next_event && t->nvml.next_event(t->events, &event, 0) == 0) {
        TelemetryGpu* of = NULL;
        for (TelemetryGpu* g = t->gpus; g < t->gpus + t->gpu_count; g++)
            if (g->nvml.handle == event.device) of = g;
        if (event.type == NVML_EVENT_XID) telemetry_tell_xid(t, of, (unsigned)event.data);
    }
    for (TelemetryGpu* g = t->gpus; g < t->gpus + t->gpu_count; g++)
        if (g->nvml.lost) telemetry_tell_xid(t, g, 79);  // of which the driver may send no event
    if (t->gpu_count == 0) return;
    values[TELEMETRY_JOULES] = joules / seconds;
    values[TELEMETRY_POWER] = isnan(joules) ? watts : joules / seconds;
}

// ------------------------------------------------------------------------------------------------
// 5. Thread

// One look at everything; the values are of the `seconds` since the last.
static inline void telemetry_look(Telemetry* t, double seconds) {
    double values[TELEMETRY_VALUES];
    for (int v = 0; v < TELEMETRY_VALUES; v++) values[v] = (double)NAN;
    machine_read(values, t, seconds);
    gpus_read(values, t, seconds);
    if (++t->looks % TELEMETRY_MINUTE == 0) {
        telemetry_check_throttle(t, &t->throttle, "the processor", NULL);
        for (TelemetryGpu* g = t->gpus; g < t->gpus + t->gpu_count; g++)
            telemetry_check_throttle(t, &g->throttle, g->name, g->bus);
    }
    pthread_mutex_lock(&t->lock);
    for (int v = 0; v < TELEMETRY_VALUES; v++) {
        if (!isfinite(values[v])) continue;
        t->sums[v] += values[v] * seconds;
        t->seconds[v] += seconds;
    }
    pthread_mutex_unlock(&t->lock);
}

static inline void* telemetry_run(void* argument) {
    Telemetry* t = (Telemetry*)argument;
    struct pollfd wake = {t->wake[0], POLLIN, 0};
    double last = now_ms();
    machine_find(t);
    gpus_open(t);
    bool ends;
    do {  // the last look is after the end was asked for
        ends = wake.revents != 0;
        double now = now_ms();
        telemetry_look(t, 1e-3 * (now - last));
        last = now;
        if (!ends) poll_ms(&wake, 1, fmax(0, t->options.period_ms - (now_ms() - now)));
    } while (!ends);
    gpus_close(t);
    __atomic_store_n(&t->done, true, __ATOMIC_RELEASE);
    return NULL;
}

// Chooses what a rank watches: the first of a machine watches all GPUs of its ranks; if a launcher shows each rank a
// GPU of its own, each watches that. False if there is nothing for this rank. world: all ranks of the run.
static inline bool telemetry_choose(TelemetryOptions* o, size_t local_rank, size_t local_world, size_t world) {
    const char* test = getenv("LLMTRAIN_TEST_MACHINE");
    int at = 0, length = 0;
    bool own = false;
    o->period_ms = 1000;
    if (test && sscanf(test, "%1000s %lf%n", o->root, &o->period_ms, &at) != 2) at = 0;
    for (; at > 0 && o->gpu_count < TELEMETRY_GPUS; at += length, o->gpu_count++)
        if (sscanf(test + at, "%19s%n", o->gpus[o->gpu_count], &length) != 1) break;
#ifdef LLMTRAIN_CUDA
    int count = 0, device = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || cudaGetDevice(&device) != cudaSuccess) return false;
    own = count == 1 && local_world > 1;
    size_t watched = own ? 1 : min_size(min_size((size_t)count, local_world), TELEMETRY_GPUS);
    for (size_t i = 0; i < watched; i++)
        if (cudaDeviceGetPCIBusId(o->gpus[o->gpu_count], sizeof o->gpus[0], local_world > 1 ? (int)i : device) ==
            cudaSuccess) o->gpu_count++;
#endif
    o->share = (own ? 1 : (double)local_world) / (double)world;
    return local_rank == 0 || own;
}

// The state before the first look.
static inline void telemetry_prepare(Telemetry* t, const TelemetryOptions* options) {
    t->options = *options;
    t->ticks = t->idle = t->steal = t->pressure[0] = t->pressure[1] = t->pressure[2] = (double)NAN;
    if (gethostname(t->host, sizeof t->host - 1) != 0) t->host[0] = 0;
    pthread_mutex_init(&t->lock, NULL);
}

// Returns NULL if nothing can be seen on this system, or there is no memory or thread for it.
static inline Telemetry* telemetry_begin(const TelemetryOptions* options) {
#ifndef SYSTEM_LINUX
    if (options->gpu_count == 0) return NULL;
#endif
    Telemetry* t = (Telemetry*)memory_allocate(sizeof *t);
    if (t == NULL) return NULL;
    telemetry_prepare(t, options);
    if (pipe_open(t->wake)) {
        if (pthread_create(&t->thread, NULL, telemetry_run, t) == 0) return t;
        close(t->wake[0]);
        close(t->wake[1]);
    }
    free(t);
    return NULL;
}

// The means since the last call; NAN: nothing was seen since then, or it is unknown. The energy of a token is that of
// all ranks, and since the last call that had one: a line of the log may come before the next look. tokens: of the run.
static inline void telemetry_take(double values[TELEMETRY_VALUES], Telemetry* t, uint64_t tokens) {
    for (int v = 0; v < TELEMETRY_VALUES; v++) values[v] = (double)NAN;
    if (t == NULL) return;
    pthread_mutex_lock(&t->lock);
    double joules = t->sums[TELEMETRY_JOULES];
    for (int v = 0; v < TELEMETRY_VALUES; v++) values[v] = t->sums[v] / t->seconds[v];  // 0 / 0 is NAN
    memset(t->sums, 0, sizeof t->sums);
    memset(t->seconds, 0, sizeof t->seconds);
    pthread_mutex_unlock(&t->lock);
    if (isnan(values[TELEMETRY_JOULES])) return;
    bool known = t->tokens > 0 && tokens > t->tokens;  // no rewind, and not the first, which has the set-up's energy
    values[TELEMETRY_JOULES] = known ? joules / t->options.share / (double)(tokens - t->tokens) : (double)NAN;
    t->tokens = tokens;
}

// Asks the thread for its last look, and waits for it; false if it hangs in the driver. Any thread may call this.
static inline bool telemetry_await(Telemetry* t) {
    double began = now_ms();
    bool done = t == NULL;
    if (t) pipe_wake(t->wake[1]);
    while (!done && now_ms() - began < TELEMETRY_STOP_MS) {
        sleep_ms(1);
        done = __atomic_load_n(&t->done, __ATOMIC_ACQUIRE);
    }
    return done;
}

// A thread that hangs stays, with its memory, until the process ends.
static inline void telemetry_end(Telemetry* t) {
    static Telemetry* hanging;  // a list, so that a leak checker finds the memory of each
    if (t == NULL) return;
    if (!telemetry_await(t)) {
        t->next_hanging = hanging;
        hanging = t;
        __atomic_store_n(&t->abandoned, true, __ATOMIC_RELEASE);
        pthread_detach(t->thread);
        return;
    }
    pthread_join(t->thread, NULL);
    pthread_mutex_destroy(&t->lock);
    close(t->wake[0]);
    close(t->wake[1]);
    free(t);
}

#endif  // LLMTRAIN_TELEMETRY_H
