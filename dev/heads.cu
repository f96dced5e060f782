// dev/heads.cu: the ladder of heads for other ranks: rows cut into parts, and joined.
//
//     cut (parts, N, (H + 2K) D / parts) = whole (N, (H + 2K) D): part p has the p-th range of the heads of queries, of
//     keys and of values
//
// Bound by memory: reads and writes (H + 2K) D elements per row.
//
//     rung       idea                                                  expected
//     element    one element per thread, whose place divisions of      2 bytes per load, four divisions for them: a
//                64 bits find                                          fifth of the peak or less
//     packs      16 bytes per load                                     four divisions for 16 bytes: half to two thirds
//     shipped    a block per row; one division of 32 bits for a head   near the peak
//
//     build/heads --parts 4 --rows 8192 --heads 32 --kv-heads 8 --head-size 128

#include "kernels.cuh"
#include "ladder.h"

typedef struct {
    floatX* out;
    const floatX* in;
    bool join;
    size_t parts, N, queries, keys, D;  // heads of a part
} Heads;

// ------------------------------------------------------------------------------------------------
// Kernels: thread i owns W elements of cut

template <int W>
static __global__ void heads_flat(Heads p, size_t n) {
    size_t i = flat_index(1), heads = p.queries + 2 * p.keys, across = p.D / W;
    if (i >= n) return;
    size_t head = i / across % heads, row = i / across / heads % p.N, part = i / across / heads / p.N;
    size_t before = head < p.queries ? 0 : head < p.queries + p.keys ? p.queries : p.queries + p.keys;
    size_t count = head < p.queries ? p.queries : p.keys;
    size_t place = row * p.parts * heads + p.parts * before + part * count + head - before;
    size_t cut = i * W, whole = place * p.D + i % across * W;
    group_store<W>(p.out + (p.join ? whole : cut), group_load<W>(p.in + (p.join ? cut : whole)));
}

// ------------------------------------------------------------------------------------------------
// Program: two ladders

int main(int argc, char** argv) {
    uint64_t parts = ladder_size(4, 2), N = ladder_size(8192, 17), H = ladder_size(32, 4), K = ladder_size(8, 2);
    uint64_t D = ladder_size(128, 64);
    ladder_open(argc, argv, {
        {"parts", KIND_COUNT, &parts, "P", 1, 1e4, "ranks", 0},
        {"rows", KIND_COUNT, &N, "N", 1, 1e9, "positions", 0},
        {"heads", KIND_COUNT, &H, "H", 1, 1e4, "query heads", 0},
        {"kv-heads", KIND_COUNT, &K, "K", 0, 1e4, "key and value heads; 0: queries alone", 0},
        {"head-size", KIND_COUNT, &D, "D", 2, ATTENTION_MAX_D, "elements of a head, an even number", 0},
    });
    if (D % 2 != 0) ladder_give_up("--head-size must be even");
    if (H % parts != 0 || K % parts != 0) ladder_give_up("--parts must divide --heads and --kv-heads");
    const size_t n = N * (H + 2 * K) * D;
    for (int join = 0; join < 2; join++) {
        ladder_begin(join ? "heads_join: out (N, (H + 2K) D) from in (parts, N, (H + 2K) D / parts)"
                          : "heads_split: out (parts, N, (H + 2K) D / parts) from in (N, (H + 2K) D)");
        auto in = ladder_input<floatX>("in", n, 1.0);
        auto out = ladder_output<floatX>("out", n, {0, 0, 0});
        Heads p = {out, in, join != 0, parts, N, H / parts, K / parts, D};
        LadderRun shipped = LADDER_OPERATION(heads_split, out, in, parts, N, H, K, D);
        if (join) shipped = LADDER_OPERATION(heads_join, out, in, parts, N, H, K, D);
        ladder_work(LADDER_BYTES, 2.0 * (double)n * sizeof(floatX), shipped);
        ladder_rung("element", [&] { ladder_launch(heads_flat<1>, n, p, n); });
        if (packs_fit(D, out, in, NULL, NULL))
            ladder_rung("packs", [&] { ladder_launch(heads_flat<PACK>, n / PACK, p, n / PACK); });
        ladder_rung("shipped", shipped);
    }
    return ladder_end();
}
