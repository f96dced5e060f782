// dtypes.h: the data types of elements, a row each. Files, collectives, matmuls and the printed plan use this one
// table.
//
// A new type is a row here and its conversions in types.h; then matmuls (gemm_portable.h, matmul.cuh) and collectives
// (comm.h, nccl.cuh) say whether they support it. The order of the rows does not matter to any file.
//
// It needs nothing but the C library.

#ifndef LLMTRAIN_DTYPES_H
#define LLMTRAIN_DTYPES_H

#include <stddef.h>
#include <string.h>

typedef enum {
    DTYPE_BOOL, DTYPE_U8, DTYPE_I8, DTYPE_U16, DTYPE_I16, DTYPE_F16, DTYPE_BF16,
    DTYPE_U32, DTYPE_I32, DTYPE_F32, DTYPE_U64, DTYPE_I64, DTYPE_F64,
    DTYPE_COUNT
} Dtype;

static const struct {
    const char* name;         // as the program prints it
    const char* safetensors;  // in the header of a safetensors file
    size_t bytes;             // of an element
} DTYPES[DTYPE_COUNT] = {
    {"bool", "BOOL", 1}, {"uint8", "U8", 1},   {"int8", "I8", 1},
    {"uint16", "U16", 2}, {"int16", "I16", 2}, {"fp16", "F16", 2}, {"bf16", "BF16", 2},
    {"uint32", "U32", 4}, {"int32", "I32", 4}, {"fp32", "F32", 4},
    {"uint64", "U64", 8}, {"int64", "I64", 8}, {"fp64", "F64", 8},
};

static inline size_t dtype_bytes(Dtype type) { return DTYPES[type].bytes; }

// The type with this name in a safetensors file; DTYPE_COUNT if there is none.
static inline Dtype dtype_find(const char* safetensors) {
    int type = 0;
    while (type < DTYPE_COUNT && strcmp(DTYPES[type].safetensors, safetensors) != 0) type++;
    return (Dtype)type;
}

#endif  // LLMTRAIN_DTYPES_H
