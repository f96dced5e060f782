// fake_nvml.c: a libnvidia-ml.so.1 for test_telemetry, which answers what a script says.
//
// The file $FAKE_NVML has lines `BUS FUNCTION CODE NUMBER [MORE]`: the function of that GPU returns CODE, and stores
// NUMBER plus MORE for each earlier call. Names end in what is asked for (temperature0: of the GPU). A function without
// a line is not supported. Each line `BUS xid 0 NUMBER` is an event; `BUS missing 0 0`: there is no such GPU;
// `BUS hang 0 SECONDS`: each call takes so long. The calls are listed in $FAKE_NVML.calls. With -DFAKE_OLD the library is of an old
// driver: older names, and few functions.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;
static struct { char bus[20]; u64 calls; } gpus[4];

// The code of the `skip`-th line of a function, and its number; 3, not supported, if there is no such line.
static int look(u64* number, const char* bus, const char* function, unsigned skip) {
    char line[128], of[32], name[32], path[512];
    int code = 3, read = 0;
    u64 more = 0;
    snprintf(path, sizeof path, "%s", getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "");
    FILE* file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {
        more = 0;
        if (sscanf(line, "%31s %31s %d %llu %llu", of, name, &read, number, &more) < 4) continue;
        if (strcmp(name, function) == 0 && (*bus == 0 || strcmp(of, bus) == 0) && skip-- == 0) {
            code = read;
            break;
        }
    }
    if (file) fclose(file);
    if (code == 0 && *bus == 0) memmove((char*)bus, of, strlen(of) + 1);  // of an event
    if (more) for (int i = 0; i < 4; i++) if (strcmp(gpus[i].bus, of) == 0) *number += more * gpus[i].calls++;
    return code;
}

static int ask(void* gpu, const char* name, int which, u64* number) {
    char path[512], function[64];
    u64 seconds;
    snprintf(function, sizeof function, which < 0 ? "%s" : "%s%d", name, which);
    snprintf(path, sizeof path, "%s.calls", getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "");
    FILE* file = fopen(path, "a");
    if (file) fprintf(file, "%s %s\n", (char*)gpu, function), fclose(file);
    if (look(&seconds, gpu, "hang", 0) == 0) sleep((unsigned)seconds);
    return look(number, gpu, function, 0);
}

#define OF_GPU(symbol, function, type)    \
    int symbol(void* gpu, type* out) {    \
        u64 n = 0;                        \
        int code = ask(gpu, function, -1, &n); \
        *out = (type)n;                   \
        return code;                      \
    }
#define OF_PART(symbol, function)         \
    int symbol(void* gpu, int which, unsigned* out) { \
        u64 n = 0;                        \
        int code = ask(gpu, function, which, &n); \
        *out = (unsigned)n;               \
        return code;                      \
    }

int nvmlShutdown(void) { return 0; }
OF_GPU(nvmlDeviceGetPowerUsage, "power", unsigned)
OF_PART(nvmlDeviceGetTemperature, "temperature")

static int by_bus(const char* bus, void** gpu) {
    for (int i = 0; i < 4; i++) {
        if (gpus[i].bus[0] && strcmp(gpus[i].bus, bus) != 0) continue;
        snprintf(gpus[i].bus, sizeof gpus[i].bus, "%s", bus);
        *gpu = gpus[i].bus;
        u64 n;
        return look(&n, bus, "missing", 0) == 0 ? 6 : 0;
    }
    return 6;
}

#ifdef FAKE_OLD
int nvmlInit(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId(const char* bus, void** gpu) { return by_bus(bus, gpu); }
OF_GPU(nvmlDeviceGetCurrentClocksThrottleReasons, "reasons", u64)
#else
static unsigned events;

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* bus, void** gpu) { return by_bus(bus, gpu); }
OF_GPU(nvmlDeviceGetCurrentClocksEventReasons, "reasons", u64)
OF_PART(nvmlDeviceGetTemperatureThreshold, "threshold")
OF_GPU(nvmlDeviceGetTotalEnergyConsumption, "energy", u64)
OF_PART(nvmlDeviceGetClockInfo, "clock")
int nvmlDeviceGetTotalEccErrors(void* gpu, int kind, int counter, u64* out) {
    return ask(gpu, "ecc", 10 * kind + counter, out);
}

int nvmlDeviceGetUtilizationRates(void* gpu, unsigned out[2]) {
    u64 n = 0;
    int code = ask(gpu, "use", -1, &n);
    out[0] = (unsigned)n;
    return code;
}

int nvmlDeviceGetRemappedRows(void* gpu, unsigned* a, unsigned* b, unsigned* pending, unsigned* failed) {
    u64 n = 0;
    int code = ask(gpu, "rows", -1, &n);
    *a = *b = 0;
    *pending = n & 1;
    *failed = n >> 1 & 1;
    return code;
}

int nvmlEventSetCreate(void** set) { *set = &events; return 0; }
int nvmlEventSetFree(void* set) { return set == &events ? 0 : 2; }
int nvmlDeviceRegisterEvents(void* gpu, u64 types, void* set) {
    u64 n = 0;
    return types == 8 && set == &events && ask(gpu, "watch", -1, &n) != 999 ? 0 : 2;
}

int nvmlEventSetWait_v2(void* set, void* out, unsigned ms) {
    struct { void* gpu; u64 type, data; unsigned more[2]; } event = {NULL, 8, 0, {~0u, ~0u}};
    char bus[32] = "";
    if (set != &events || ms > 0 || look(&event.data, bus, "xid", events) != 0) return 10;
    events++;
    for (int i = 0; i < 4; i++) if (strcmp(gpus[i].bus, bus) == 0) event.gpu = gpus[i].bus;
    memcpy(out, &event, sizeof event);
    return 0;
}
#endif
