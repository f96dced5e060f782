// nccl.h, a stand-in: the types of NCCL that llmtrain uses, for machines without NVIDIA's header. The functions are in
// ../nccl.h.
//
// Names and values are NVIDIA's. Only for the emulator: what is compiled against this does not run on a GPU.

#ifndef STANDIN_NCCL_H
#define STANDIN_NCCL_H

#include <cuda_runtime.h>

#include <limits.h>
#include <stddef.h>

#define NCCL_VERSION(major, minor, patch) ((major) * 10000 + (minor) * 100 + (patch))
#define NCCL_VERSION_CODE NCCL_VERSION(2, 19, 0)
#define NCCL_UNIQUE_ID_BYTES 128

typedef struct ncclComm* ncclComm_t;

typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclSystemError = 2,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;

// The library's has more members. Each begins as "not set".
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, maxCTAs;
} ncclConfig_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_INITIALIZER \
    {sizeof(ncclConfig_t), 0xcafebeef, NCCL_VERSION_CODE, NCCL_CONFIG_UNDEF_INT, NCCL_CONFIG_UNDEF_INT}

typedef enum { ncclSum = 0 } ncclRedOp_t;

typedef enum { ncclUint8 = 1, ncclInt64 = 4, ncclFloat16 = 6, ncclFloat32 = 7, ncclBfloat16 = 9 } ncclDataType_t;

#endif  // STANDIN_NCCL_H
