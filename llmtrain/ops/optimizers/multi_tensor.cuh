// multi_tensor.cuh: the table with which one launch updates many tensors, as PyTorch's multi_tensor_apply does.
//
//   multi_tensor_launch(kernel<4>, kernel<1>, slices, count, &step, stream);
//
// 8 of the 12 tensors of a GPT-2 block are vectors of a few thousand elements, whose update takes less time than
// passes between two launches. So slices are cut into chunks of equal length, numbered across all slices; the block
// that owns a chunk finds its slice by bisection. The table is a kernel parameter: it needs no memory and no copy, and
// is read through the constant cache.

#ifndef LLMTRAIN_MULTI_TENSOR_CUH
#define LLMTRAIN_MULTI_TENSOR_CUH

#include "../blocks.cuh"
#include "optimizers.h"

enum {
    MULTI_TENSOR_SLICES = 320,  // 27 KB of the 32,764 bytes that a kernel's parameters may take
    MULTI_TENSOR_STATES = 4     // the most states that an element-wise optimizer has
};

// The part of an OptimizerSlice that a kernel needs.
typedef struct {
    floatX* params;
    float* master_weights;
    const float* grads;
    void* states[MULTI_TENSOR_STATES];
    size_t first, n;
    float weight_decay, lr;
} MultiTensorSlice;

typedef struct {
    unsigned count, chunks;
    unsigned begins[MULTI_TENSOR_SLICES];  // each slice's first chunk
    MultiTensorSlice slices[MULTI_TENSOR_SLICES];
} MultiTensorList;

// The slice that a chunk is part of.
static __device__ __forceinline__ unsigned multi_tensor_find(const MultiTensorList* list, unsigned chunk) {
    unsigned low = 0, high = list->count;
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (list->begins[middle] <= chunk) low = middle;
        else high = middle;
    }
    return low;
}

// Whether every array can be accessed four elements at a time, and those four share a call of random4.
static inline bool multi_tensor_fours(const OptimizerSlice* s) {
    return packs_fit(s->n, s->params, s->master_weights, s->states[0], s->states[1]) &&
           packs_fit(s->n, s->grads, NULL, NULL, NULL) && s->first % 4 == 0;
}

// Fills the list with those slices (count), from index *next on, for which multi_tensor_fours returns `fours`, cut into
// chunks of `chunk` elements; sets *next to the first slice not yet looked at. False if the list stays empty.
static inline bool multi_tensor_next(MultiTensorList* list, size_t* next, const OptimizerSlice* slices, size_t count,
                                     const OptimizerStep* o, bool fours, size_t chunk) {
    list->count = list->chunks = 0;
    for (; *next < count && list->count < MULTI_TENSOR_SLICES; ++*next) {
        const OptimizerSlice* s = &slices[*next];
        if (s->n == 0 || multi_tensor_fours(s) != fours) continue;
        OptimizerStep own = optimizer_step_of(s, o);
        list->slices[list->count] = {s->params, s->master_weights, s->grads,
                                     {s->states[0], s->states[1], s->states[2], s->states[3]}, s->first, s->n,
                                     own.weight_decay, own.lr};
        list->begins[list->count++] = list->chunks;
        list->chunks += (unsigned)divide_up(s->n, chunk);
    }
    return list->count > 0;
}

// Updates all slices by launches of two kernels in which a thread owns four elements, or one.
static inline void multi_tensor_launch(void (*fours)(MultiTensorList, ElementStep),
                                       void (*ones)(MultiTensorList, ElementStep), const OptimizerSlice* slices,
                                       size_t count, const OptimizerStep* o, Stream stream) {
    MultiTensorList list;
    for (int wide = 0; wide < 2; wide++) {
        auto kernel = wide ? fours : ones;
        for (size_t next = 0; multi_tensor_next(&list, &next, slices, count, o, wide, FLAT_THREADS * (wide ? 4 : 1));) {
            kernel<<<list.chunks, FLAT_THREADS, 0, stream->compute>>>(list, element_step(o));
            LAUNCH_CHECK();
        }
    }
}

#endif  // LLMTRAIN_MULTI_TENSOR_CUH
