// kv_cache.h: the keys and values of the tokens that a model has read, for generating text.
//
//   kv_cache_layout(&cache, &plan, L, B, context, K, D, q8);                       where model_layout lays out memory
//   KvLayer layer = kv_cache_layer(&cache, l);                                      what attention_decode is given
//   kv_cache_copy(&cache, 2, 0, length, stream);                                    sequence 2 begins as 0 does
//
// Each of B sequences has a length of its own. A batch that is decoded is consecutive sequences, from `first` on.
// With q8 an element takes 1 byte instead of those of floatX; then each key and value vector has a scale (decode.h).

#ifndef LLMTRAIN_KV_CACHE_H
#define LLMTRAIN_KV_CACHE_H

#include "tensors.h"

typedef struct {
    void *keys, *values;      // (L, B, context, K, D) of floatX, or of int8_t
    float* scales;            // (L, B, context, K, 2) of key and value; NULL: they are floatX
    size_t layers, sequences; // L, B
    size_t context, kv_heads, head_size;
    size_t first;             // the sequence of the cache that is the first of the batch
    size_t* lengths;          // (B) positions filled, on the host
} KvCache;

// Of one layer, from sequence `first` on.
typedef struct {
    void *keys, *values;      // (B - first, context, K, D)
    float* scales;            // (B - first, context, K, 2) or NULL
} KvLayer;

static inline size_t kv_cache_element(const KvCache* c) { return c->scales ? 1 : sizeof(floatX); }

static inline void kv_cache_layout(KvCache* c, Arena* arena, size_t L, size_t B, size_t context, size_t K, size_t D,
                                   bool q8) {
    size_t vectors = L * B * context * K, bytes = vectors * D * (q8 ? 1 : sizeof(floatX));
    KvCache cache = {.layers = L, .sequences = B, .context = context, .kv_heads = K, .head_size = D,
                     .lengths = c->lengths};
    *c = cache;
    c->keys = arena_take(arena, "KV cache", bytes);
    c->values = arena_take(arena, "KV cache", bytes);
    if (q8) c->scales = (float*)arena_take(arena, "KV cache", 2 * vectors * sizeof(float));
}

static inline KvLayer kv_cache_layer(const KvCache* c, size_t l) {
    size_t vectors = (l * c->sequences + c->first) * c->context * c->kv_heads;
    size_t bytes = vectors * c->head_size * kv_cache_element(c);
    KvLayer layer = {(char*)c->keys + bytes, (char*)c->values + bytes, c->scales ? c->scales + 2 * vectors : NULL};
    return layer;
}

// After kv_cache_layout; all are empty.
static inline bool kv_cache_open(KvCache* c) {
    return (c->lengths = (size_t*)memory_allocate(c->sequences * sizeof(size_t))) != NULL;
}
static inline void kv_cache_close(KvCache* c) { free(c->lengths); }

// positions (B, T) of the next T tokens of each sequence of the batch; NULL: there is no cache, they begin at 0.
static inline void kv_cache_positions(int32_t* positions, const KvCache* c, size_t B, size_t T) {
    for (size_t i = 0; i < B * T; i++) positions[i] = (int32_t)((c ? c->lengths[c->first + i / T] : 0) + i % T);
}

static inline void kv_cache_advance(KvCache* c, size_t B, size_t T) {
    for (size_t b = 0; b < B; b++) c->lengths[c->first + b] += T;
}

// Makes the first `length` positions of sequence `from` those of sequence `to`.
static inline void kv_cache_copy(const KvCache* c, size_t to, size_t from, size_t length, Stream stream) {
    size_t sequence = c->context * c->kv_heads, vectors = length * c->kv_heads;
    size_t bytes = c->head_size * kv_cache_element(c);
    for (size_t l = 0; l < c->layers; l++) {
        size_t t = (l * c->sequences + to) * sequence, f = (l * c->sequences + from) * sequence;
        device_copy((char*)c->keys + t * bytes, (char*)c->keys + f * bytes, vectors * bytes, stream);
        device_copy((char*)c->values + t * bytes, (char*)c->values + f * bytes, vectors * bytes, stream);
        if (c->scales) device_copy(c->scales + 2 * t, c->scales + 2 * f, 2 * vectors * sizeof(float), stream);
    }
    c->lengths[to] = length;
}

#endif  // LLMTRAIN_KV_CACHE_H
