// nvml.h: NVIDIA's management library, libnvidia-ml.so.1, which comes with the driver: loaded when it is asked for,
// without its header. Every function in it is optional.
//
//   nvml_open(&nvml);                                         all members are NULL if there is no library
//   if (nvml.init && nvml.init() == 0) ...
//   unsigned celsius;
//   if (NVML_ASK(&nvml, &gpu, temperature, NVML_OF_GPU, &celsius)) ...
//
// What a GPU does not support is asked once.

#ifndef LLMTRAIN_NVML_H
#define LLMTRAIN_NVML_H

#include "../ops/base.h"

#include <dlfcn.h>

// A row per function: member, symbol, older symbol, parameters (NVIDIA's "NVML API Reference Guide").
#define NVML_FUNCTIONS(X)                                                                                              \
    X(init, "nvmlInit_v2", "nvmlInit", (void))                                                                         \
    X(shutdown, "nvmlShutdown", NULL, (void))                                                                          \
    X(by_bus, "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetHandleByPciBusId", (const char*, void**))              \
    X(temperature, "nvmlDeviceGetTemperature", NULL, (void*, int, unsigned*))                                          \
    X(threshold, "nvmlDeviceGetTemperatureThreshold", NULL, (void*, int, unsigned*))                                   \
    X(power, "nvmlDeviceGetPowerUsage", NULL, (void*, unsigned*))                                                      \
    X(energy, "nvmlDeviceGetTotalEnergyConsumption", NULL, (void*, unsigned long long*))                               \
    X(clock, "nvmlDeviceGetClockInfo", NULL, (void*, int, unsigned*))                                                  \
    X(use, "nvmlDeviceGetUtilizationRates", NULL, (void*, NvmlUse*))                                                   \
    X(reasons, "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons",                  \
      (void*, unsigned long long*))                                                                                    \
    X(ecc, "nvmlDeviceGetTotalEccErrors", NULL, (void*, int, int, unsigned long long*))                                \
    X(rows, "nvmlDeviceGetRemappedRows", NULL, (void*, unsigned*, unsigned*, unsigned*, unsigned*))                    \
    X(events, "nvmlEventSetCreate", NULL, (void**))                                                                    \
    X(watch, "nvmlDeviceRegisterEvents", NULL, (void*, unsigned long long, void*))                                     \
    X(next_event, "nvmlEventSetWait_v2", "nvmlEventSetWait", (void*, NvmlEvent*, unsigned))                            \
    X(events_free, "nvmlEventSetFree", NULL, (void*))

enum { NVML_NOT_SUPPORTED = 3, NVML_NO_PERMISSION = 4, NVML_NO_FUNCTION = 13, NVML_GPU_IS_LOST = 15 };
enum { NVML_OF_GPU = 0, NVML_AT_SLOWDOWN = 1 };           // which temperature, which threshold
enum { NVML_OF_SM = 1 };                                  // which clock
enum { NVML_NOT_CORRECTED = 1, NVML_SINCE_LOAD = 0 };     // which errors, since when
#define NVML_EVENT_XID 8ull

typedef struct { unsigned gpu, memory; } NvmlUse;  // percent
typedef struct {
    void* device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} NvmlEvent;

typedef struct {
#define NVML_MEMBER(member, symbol, older, parameters) int (*member) parameters;
    NVML_FUNCTIONS(NVML_MEMBER)
#undef NVML_MEMBER
} Nvml;

#define NVML_NUMBER(member) (offsetof(Nvml, member) / sizeof(void (*)(void)))  // its position in the list

static inline void nvml_open(Nvml* nvml) {
#define NVML_NAMES(member, symbol, older, parameters) {symbol, older},
    static const char* const names[][2] = {NVML_FUNCTIONS(NVML_NAMES)};
#undef NVML_NAMES
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);  // stays loaded
    for (size_t i = 0; library && i < sizeof names / sizeof names[0]; i++) {
        void* function = dlsym(library, names[i][0]);
        if (function == NULL && names[i][1]) function = dlsym(library, names[i][1]);
        memcpy((char*)nvml + i * sizeof function, &function, sizeof function);
    }
}

// A GPU: NVML's handle; what it refuses.
typedef struct {
    void* handle;
    unsigned refused;  // bits: functions that it does not support
    bool lost;         // it has fallen off the bus
} NvmlGpu;

// Whether an answer is good; remembers what the GPU does not support.
static inline bool nvml_good(NvmlGpu* g, size_t function, int answer) {
    if (answer == NVML_NOT_SUPPORTED || answer == NVML_NO_PERMISSION || answer == NVML_NO_FUNCTION)
        g->refused |= 1u << function;
    if (answer == NVML_GPU_IS_LOST) g->lost = true;
    return answer == 0;
}

// Calls a function of a GPU; true if there is such a function, it may be called, and its answer is good.
#define NVML_ASK(nvml, gpu, function, ...)                                   \
    ((nvml)->function && !((gpu)->refused >> NVML_NUMBER(function) & 1) &&   \
     nvml_good(gpu, NVML_NUMBER(function), (nvml)->function((gpu)->handle, __VA_ARGS__)))

#endif  // LLMTRAIN_NVML_H
