// amx_emulation.h: the AMX tile intrinsics in plain C, to prove the AMX kernel of gemm.h on a machine without AMX.
//
// Include it before gemm.h, and define GEMM_EMULATE_AMX. The state belongs to one thread, as on the processor: the
// configuration and eight tiles of 16 rows x 64 bytes. An error that would fault on the processor ends the program with
// a message: a tile used before it is configured, a shape out of bounds, a multiplication of tiles that do not fit.
// Loads and stores touch exactly the bytes that the processor touches, so that guard pages and sanitizers see them.
//
// Source: "Intel Architecture Instruction Set Extensions Programming Reference", chapter on AMX.

#ifndef LLMTRAIN_AMX_EMULATION_H
#define LLMTRAIN_AMX_EMULATION_H

#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int configured;
    int rows[8], bytes[8];  // of each tile: rows, and bytes per row
    unsigned char tile[8][16][64];
} AmxState;

static __thread AmxState amx_state;

static inline void amx_require(int condition, const char* sentence) {
    if (condition) return;
    fprintf(stderr, "amx_emulation: %s\n", sentence);
    exit(1);
}

static inline void amx_require_tile(int t) {
    amx_require(amx_state.configured, "a tile is used before _tile_loadconfig or after _tile_release");
    amx_require(t >= 0 && t < 8, "there are tiles 0 to 7");
    amx_require(amx_state.rows[t] > 0 && amx_state.bytes[t] > 0, "a tile is used that the configuration leaves empty");
}

// 64 bytes: palette, start row, 14 reserved, 16 x uint16 bytes per row, 16 x uint8 rows.
static inline void amx_loadconfig(const void* memory) {
    const unsigned char* config = (const unsigned char*)memory;
    amx_require(config[0] == 1, "the configuration's palette must be 1");
    for (int i = 1; i < 16; i++) amx_require(config[i] == 0, "start row and reserved bytes must be 0");
    memset(&amx_state, 0, sizeof amx_state);
    for (int t = 0; t < 16; t++) {
        int bytes = config[16 + 2 * t] | config[17 + 2 * t] << 8, rows = config[48 + t];
        amx_require(t < 8 || (bytes == 0 && rows == 0), "the configuration names a tile past 7");
        amx_require(bytes <= 64 && rows <= 16, "a tile has at most 16 rows of 64 bytes");
        amx_require((bytes == 0) == (rows == 0), "a tile has rows without bytes, or bytes without rows");
        if (t < 8) {
            amx_state.bytes[t] = bytes;
            amx_state.rows[t] = rows;
        }
    }
    amx_state.configured = 1;
}

static inline void amx_release(void) { memset(&amx_state, 0, sizeof amx_state); }

static inline void amx_zero(int t) {
    amx_require_tile(t);
    memset(amx_state.tile[t], 0, sizeof amx_state.tile[t]);
}

static inline void amx_load(int t, const void* memory, size_t stride) {
    amx_zero(t);  // rows and bytes outside of the configured shape become 0
    for (int r = 0; r < amx_state.rows[t]; r++)
        memcpy(amx_state.tile[t][r], (const unsigned char*)memory + (size_t)r * stride, (size_t)amx_state.bytes[t]);
}

static inline void amx_store(int t, void* memory, size_t stride) {
    amx_require_tile(t);
    for (int r = 0; r < amx_state.rows[t]; r++)
        memcpy((unsigned char*)memory + (size_t)r * stride, amx_state.tile[t][r], (size_t)amx_state.bytes[t]);
}

// A subnormal counts as zero, as operand and as result.
static inline float amx_flush(float x) { return x > -0x1p-126f && x < 0x1p-126f ? 0.0f * x : x; }

static inline float amx_bf16(const unsigned char* memory) {
    uint32_t bits = (uint32_t)memory[0] << 16 | (uint32_t)memory[1] << 24;
    float value;
    memcpy(&value, &bits, 4);
    return amx_flush(value);
}

// sum (m, n) floats += a (m, 2k) bfloat16 x b (k, n) pairs of bfloat16: even and odd products are summed separately,
// then added together, then to the tile.
static inline void amx_dpbf16ps(int sum, int a, int b) {
    amx_require_tile(sum);
    amx_require_tile(a);
    amx_require_tile(b);
    amx_require(sum != a && sum != b && a != b, "a product needs three different tiles");
    int m = amx_state.rows[sum], n = amx_state.bytes[sum] / 4, k = amx_state.bytes[a] / 4;
    amx_require(amx_state.bytes[sum] % 4 == 0 && amx_state.bytes[a] % 4 == 0 && amx_state.bytes[b] % 4 == 0,
                "a row must consist of 4-byte elements");
    amx_require(amx_state.rows[a] == m && amx_state.bytes[b] / 4 == n && amx_state.rows[b] == k,
                "the shapes of the tiles of a product do not fit");
    float left[16][32], right[2][16][16], even[16], odd[16], old[16];
    for (int i = 0; i < m; i++)
        for (int p = 0; p < 2 * k; p++) left[i][p] = amx_bf16(&amx_state.tile[a][i][2 * p]);
    for (int p = 0; p < k; p++)
        for (int j = 0; j < n; j++)
            for (int h = 0; h < 2; h++) right[h][p][j] = amx_bf16(&amx_state.tile[b][p][4 * j + 2 * h]);
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) even[j] = odd[j] = 0.0f;
        for (int p = 0; p < k; p++)
            for (int j = 0; j < n; j++) {
                even[j] = amx_flush(even[j] + left[i][2 * p] * right[0][p][j]);
                odd[j] = amx_flush(odd[j] + left[i][2 * p + 1] * right[1][p][j]);
            }
        memcpy(old, amx_state.tile[sum][i], sizeof old);
        for (int j = 0; j < n; j++) old[j] = amx_flush(amx_flush(old[j]) + amx_flush(even[j] + odd[j]));
        memcpy(amx_state.tile[sum][i], old, sizeof old);
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(memory) amx_loadconfig(memory)
#define _tile_release() amx_release()
#define _tile_zero(tile) amx_zero(tile)
#define _tile_loadd(tile, memory, stride) amx_load(tile, memory, stride)
#define _tile_stream_loadd(tile, memory, stride) amx_load(tile, memory, stride)
#define _tile_stored(tile, memory, stride) amx_store(tile, memory, stride)
#define _tile_dpbf16ps(sum, a, b) amx_dpbf16ps(sum, a, b)

#endif  // LLMTRAIN_AMX_EMULATION_H
