// dev/heads.cu: the ladders of heads for other ranks: rows cut into parts, and joined; key and value heads copied, and
// the gradients of the copies added up.
//
//     cut (parts, N, (H + 2K) D / parts) = whole (N, (H + 2K) D): part p has the p-th range of the heads of queries, of
//     keys and of values
//     many (N, (H + 2K copies) D) = few (N, (H + 2K) D) with each key and value head `copies` times; backward, few has
//     the sums of the copies
//
// Bound by memory: cut and joined, (H + 2K) D elements per row are read and written; copied, (H + 2K) D are read and
// (H + 2K copies) D written; added up, the other way round.
//
//     rung       idea                                                  expected
//     element    one element per thread, whose place divisions of      2 bytes per load, four divisions for them: a
//                64 bits find                                          fifth of the peak or less
//     packs      16 bytes per load                                     four divisions for 16 bytes: half to two thirds
//     shipped    a block per row; one division of 32 bits for a head   near the peak
//     element    copies: one element of the output per thread; each    2 bytes per load, three divisions: a quarter of
//                copy is read                                          the peak or less
//     packs      copies: 16 bytes per load                             two thirds
//     shipped    copies: a block per row; a head is read once, no      near the peak
//                divisions
//
//     build/heads --parts 4 --copies 4 --rows 8192 --heads 32 --kv-heads 8 --head-size 128

#include "kernels.cuh"
#include "ladder.h"

typedef struct {
    floatX* out;
    const floatX* in;
    bool join;
    size_t parts, N, queries, keys, D;  // heads of a part
} Heads;

// ------------------------------------------------------------------------------------------------
// Kernels: thread i owns W elements of cut, or of the output if heads are copied or added up

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

template <int W, bool SUM>
static __global__ void heads_copies_flat(floatX* out, const floatX* in, size_t copies, size_t H, size_t K, size_t D,
                                         size_t n) {
    size_t i = flat_index(1), few = H + 2 * K, many = H + 2 * K * copies, across = D / W, heads = SUM ? few : many;
    if (i >= n) return;
    size_t head = i / across % heads, row = i / across / heads, d = i % across * W;
    if (SUM && head >= H) {
        Lanes<W> sum = {};
        for (size_t copy = 0; copy < copies; copy++)
            sum = lanes_add(sum, lanes_load<W>(in + (row * many + H + (head - H) * copies + copy) * D + d));
        lanes_store(out + i * W, sum);
    } else {
        size_t from = SUM ? row * many + head : row * few + (head < H ? head : H + (head - H) / copies);
        group_store<W>(out + i * W, group_load<W>(in + from * D + d));
    }
}

// ------------------------------------------------------------------------------------------------
// Program: four ladders

template <bool SUM>
static void copies_ladder(size_t copies, size_t N, size_t H, size_t K, size_t D) {
    const size_t few = N * (H + 2 * K) * D, many = N * (H + 2 * K * copies) * D, n = SUM ? few : many;
    ladder_begin(SUM ? "heads_sum: out (N, (H + 2K) D) from in (N, (H + 2K copies) D)"
                     : "heads_repeat: out (N, (H + 2K copies) D) from in (N, (H + 2K) D)");
    auto in = ladder_input<floatX>("in", SUM ? many : few, 1.0);
    auto out = ladder_output<floatX>("out", n, {0, 0, 0});
    LadderRun shipped = LADDER_OPERATION(heads_repeat, out, in, copies, N, H, K, D);
    if (SUM) shipped = LADDER_OPERATION(heads_sum, out, in, copies, N, H, K, D);
    ladder_work(LADDER_BYTES, (double)(few + many) * sizeof(floatX), shipped);
    ladder_rung("element", [&] { ladder_launch(heads_copies_flat<1, SUM>, n, out, in, copies, H, K, D, n); });
    if (packs_fit(D, out, in, NULL, NULL))
        ladder_rung("packs", [&] {
            ladder_launch(heads_copies_flat<PACK, SUM>, n / PACK, out, in, copies, H, K, D, n / PACK);
        });
    ladder_rung("shipped", shipped);
}

int main(int argc, char** argv) {
    uint64_t parts = ladder_size(4, 2), N = ladder_size(8192, 17), H = ladder_size(32, 4), K = ladder_size(8, 2);
    uint64_t D = ladder_size(128, 64), copies = ladder_size(4, 3);
    ladder_open(argc, argv, {
        {"parts", KIND_COUNT, &parts, "P", 1, 1e4, "ranks", 0},
        {"copies", KIND_COUNT, &copies, "C", 1, 1e4, "of each key and value head", 0},
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
    copies_ladder<false>(copies, N, H, K, D);
    copies_ladder<true>(copies, N, H, K, D);
    return ladder_end();
}
