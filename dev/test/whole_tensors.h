// whole_tensors.h: reads whole tensors of safetensors files, for tests: safetensors_find, safetensors_read.

#ifndef LLMTRAIN_WHOLE_TENSORS_H
#define LLMTRAIN_WHOLE_TENSORS_H

#include "llmtrain/checkpoint/safetensors.h"

// The tensor with a name; NULL if there is none.
static inline const SafetensorsTensor* safetensors_find(const SafetensorsFile* f, const char* name) {
    for (size_t i = 0; i < f->header.count; i++)
        if (strcmp(f->header.tensors[i].name, name) == 0) return &f->header.tensors[i];
    return NULL;
}

// Reads a whole tensor; also computes its checksum if hash is not NULL.
static inline bool safetensors_read(const SafetensorsFile* f, const SafetensorsTensor* tensor, void* buffer,
                                    size_t bytes, uint64_t* hash, Error* error) {
    if (!safetensors_read_range(f, tensor, 0, bytes, buffer, error)) return false;
    if (hash) *hash = hash_bytes(buffer, bytes);
    return true;
}

#endif  // LLMTRAIN_WHOLE_TENSORS_H
