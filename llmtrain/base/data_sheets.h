// data_sheets.h: what NVIDIA states about its GPUs, by name: for MFU, and for planning a cluster (tools/cluster.h).

#ifndef LLMTRAIN_DATA_SHEETS_H
#define LLMTRAIN_DATA_SHEETS_H

#include "../ops/base.h"

// Peak rates of dense matmuls, in TFLOP/s, from NVIDIA's data sheets and architecture white papers: for 16-bit types
// with float sums, and for floats without tensor cores; the peak for TF32 is half of the 16-bit one. A name that ends
// in * matches all names that begin so; a device that is not listed (a laptop's, say, has other clocks) has no peak,
// and mfu is n/a. The other columns are those of GPUs for servers: GB of memory, its GB/s, the GB/s in each direction
// to the GPUs of the same machine (NVLink; PCIe where there is none), and the power limit in watts.
typedef struct {
    const char* name;
    double bf16, fp32;
    double memory_gb, memory, link, watts;  // 0: not listed
} DevicePeak;

#define PEAKS_ONLY 0, 0, 0, 0
static const DevicePeak DEVICE_PEAKS[] = {
    {"A100*", 312, 19.5, 80, 2039, 300, 400}, {"H100 PCIe", 756, 51.2, 80, 2000, 64, 350},
    {"H100 NVL", 835.5, 60, 94, 3900, 300, 400}, {"H100*", 989.4, 66.9, 80, 3352, 450, 700},
    {"H200 NVL", 835.5, 60, 141, 4800, 450, 600}, {"H200*", 989.4, 66.9, 141, 4800, 450, 700},
    {"GH200*", 989.4, 66.9, 96, 4000, 450, 700}, {"B200*", 2250, 75, 180, 8000, 900, 1000},
    {"A10", 125, 31.2, 24, 600, 32, 150}, {"A40", 149.7, 37.4, 48, 696, 56, 300},
    {"RTX A6000", 154.8, 38.7, PEAKS_ONLY}, {"L4", 121, 30.3, 24, 300, 32, 72}, {"L40", 181, 90.5, 48, 864, 32, 300},
    {"L40S", 362, 91.6, 48, 864, 32, 350}, {"RTX 6000 Ada Generation", 364.2, 91.1, PEAKS_ONLY},
    {"RTX PRO 6000 Blackwell Workstation Edition", 503.8, 126, PEAKS_ONLY},
    {"GeForce RTX 3060", 25.5, 12.7, PEAKS_ONLY}, {"GeForce RTX 3060 Ti", 32.4, 16.2, PEAKS_ONLY},
    {"GeForce RTX 3070", 40.6, 20.3, PEAKS_ONLY}, {"GeForce RTX 3070 Ti", 43.5, 21.7, PEAKS_ONLY},
    {"GeForce RTX 3080", 59.5, 29.8, PEAKS_ONLY}, {"GeForce RTX 3080 Ti", 68.2, 34.1, PEAKS_ONLY},
    {"GeForce RTX 3090", 71.2, 35.6, PEAKS_ONLY}, {"GeForce RTX 3090 Ti", 80, 40, PEAKS_ONLY},
    {"GeForce RTX 4060", 30.2, 15.1, PEAKS_ONLY}, {"GeForce RTX 4060 Ti", 44.1, 22.1, PEAKS_ONLY},
    {"GeForce RTX 4070", 58.3, 29.1, PEAKS_ONLY}, {"GeForce RTX 4070 SUPER", 70.9, 35.5, PEAKS_ONLY},
    {"GeForce RTX 4070 Ti", 80.2, 40.1, PEAKS_ONLY}, {"GeForce RTX 4070 Ti SUPER", 88.2, 44.1, PEAKS_ONLY},
    {"GeForce RTX 4080", 97.5, 48.7, PEAKS_ONLY}, {"GeForce RTX 4080 SUPER", 104.4, 52.2, PEAKS_ONLY},
    {"GeForce RTX 4090", 165.2, 82.6, PEAKS_ONLY}, {"GeForce RTX 5060", 38.4, 19.2, PEAKS_ONLY},
    {"GeForce RTX 5060 Ti", 47.4, 23.7, PEAKS_ONLY}, {"GeForce RTX 5070", 61.7, 30.9, PEAKS_ONLY},
    {"GeForce RTX 5070 Ti", 87.9, 43.9, PEAKS_ONLY}, {"GeForce RTX 5080", 112.6, 56.3, PEAKS_ONLY},
    {"GeForce RTX 5090", 209.5, 104.8, PEAKS_ONLY},
};

// The row of a device by its name; NULL for an unknown device.
static inline const DevicePeak* device_find(const char* name) {
    if (strncmp(name, "NVIDIA ", 7) == 0) name += 7;
    if (strstr(name, " MIG ")) return NULL;  // a part of a device
    for (size_t i = 0; i < sizeof DEVICE_PEAKS / sizeof DEVICE_PEAKS[0]; i++) {
        const DevicePeak* peak = &DEVICE_PEAKS[i];
        size_t length = strlen(peak->name);
        bool prefix = peak->name[length - 1] == '*';
        if (prefix ? strncmp(name, peak->name, length - 1) == 0 : strcmp(name, peak->name) == 0) return peak;
    }
    return NULL;
}

// The peak in TFLOP/s of a device by its name, for matmuls as this build runs them; 0 for an unknown device.
static inline double device_peak(const char* name, bool tf32) {
    const DevicePeak* peak = device_find(name);
    if (peak == NULL) return 0;
    return !FLOATX_IS_FLOAT ? peak->bf16 : tf32 ? peak->bf16 / 2 : peak->fp32;
}

#endif  // LLMTRAIN_DATA_SHEETS_H
