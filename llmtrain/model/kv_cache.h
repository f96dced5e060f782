// kv_cache.h: the keys and values of the tokens that a model has read, for generating text.
//
//   kv_cache_layout(&cache, &plan, L, B, context, K, D, q8);                       where model_layout lays out memory
//   KvLayer layer = kv_cache_layer(&cache, l);                                      what attention_decode is given
//   kv_cache_share(&cache, stream);                                                 all begin as sequence 0 does
//
// B sequences have the same number of positions filled: `length`. With q8 an element takes 1 byte instead of those of
// floatX; then each key and value vector has a scale (decode.h).

#ifndef LLMTRAIN_KV_CACHE_H
#define LLMTRAIN_KV_CACHE_H

#include "tensors.h"

typedef struct {
    void *keys, *values;      // (L, B, context, K, D) of floatX, or of int8_t
    float* scales;            // (L, B, context, K, 2) of key and value; NULL: they are floatX
    size_t layers, sequences; // L, B
    size_t context, kv_heads, head_size;
    size_t length;            // positions filled, in every sequence that is in use
} KvCache;

// Of one layer.
typedef struct {
    void *keys, *values;      // (B, context, K, D)
    float* scales;            // (B, context, K, 2) or NULL
} KvLayer;

static inline size_t kv_cache_element(const KvCache* c) { return c->scales ? 1 : sizeof(floatX); }

static inline void kv_cache_layout(KvCache* c, Arena* arena, size_t L, size_t B, size_t context, size_t K, size_t D,
                                   bool q8) {
    size_t vectors = L * B * context * K, bytes = vectors * D * (q8 ? 1 : sizeof(floatX));
    KvCache cache = {.layers = L, .sequences = B, .context = context, .kv_heads = K, .head_size = D,
                     .length = c->length};
    *c = cache;
    c->keys = arena_take(arena, "KV cache", bytes);
    c->values = arena_take(arena, "KV cache", bytes);
    if (q8) c->scales = (float*)arena_take(arena, "KV cache", 2 * vectors * sizeof(float));
}

static inline KvLayer kv_cache_layer(const KvCache* c, size_t l) {
    size_t vectors = l * c->sequences * c->context * c->kv_heads, bytes = vectors * c->head_size * kv_cache_element(c);
    KvLayer layer = {(char*)c->keys + bytes, (char*)c->values + bytes, c->scales ? c->scales + 2 * vectors : NULL};
    return layer;
}

// Copies the positions of sequence 0 to all others.
static inline void kv_cache_share(const KvCache* c, Stream stream) {
    size_t sequence = c->context * c->kv_heads, filled = c->length * c->kv_heads;
    size_t bytes = c->head_size * kv_cache_element(c);
    for (size_t l = 0; l < c->layers; l++) {
        KvLayer layer = kv_cache_layer(c, l);
        for (size_t b = 1; b < c->sequences; b++) {
            device_copy((char*)layer.keys + b * sequence * bytes, layer.keys, filled * bytes, stream);
            device_copy((char*)layer.values + b * sequence * bytes, layer.values, filled * bytes, stream);
            if (!layer.scales) continue;
            device_copy(layer.scales + 2 * b * sequence, layer.scales, 2 * filled * sizeof(float), stream);
        }
    }
}

#endif  // LLMTRAIN_KV_CACHE_H
