// dev/columns.cu: the ladders of some columns of rows, as a pair of LoRA has them: added to, and taken.
//
//     columns_add: wide (N, width) in its columns from `first` on += scale * narrow (N, columns)
//     columns_scale: narrow = scale * these columns of wide
//
// Bound by memory: per column and row three elements move (two are read, one is written), or two.
//
//     rung       idea                                                  expected
//     element    one element per thread, whose place a division of     2 bytes per load: a fifth of the peak or less
//                64 bits finds
//     packs      16 bytes per load                                     half to two thirds
//     shipped    a block per row, no divisions                         near the peak
//
//     build/columns --rows 8192 --width 6144 --first 4096 --columns 1024

#include "kernels.cuh"
#include "ladder.h"

// ------------------------------------------------------------------------------------------------
// Kernels: thread i owns W columns of narrow

template <int W, bool ADD>
static __global__ void columns_flat(floatX* out, const floatX* in, float scale, size_t first, size_t columns,
                                    size_t width, size_t n) {
    size_t i = flat_index(1);
    if (i >= n) return;
    size_t narrow = i * W, wide = narrow / columns * width + first + narrow % columns;
    Lanes<W> x = lanes_load<W>(in + (ADD ? narrow : wide)), sum = {};
    if (ADD) sum = lanes_load<W>(out + wide);
    for (int j = 0; j < W; j++) x.x[j] = ADD ? fmaf(scale, x.x[j], sum.x[j]) : scale * x.x[j];
    lanes_store(out + (ADD ? wide : narrow), x);
}

// ------------------------------------------------------------------------------------------------
// Program: two ladders

template <bool ADD>
static void columns_ladder(size_t N, size_t width, size_t first, size_t columns) {
    const size_t all = N * width, some = N * columns;
    const float scale = 2;
    ladder_begin(ADD ? "columns_add: out (N, width) += scale in (N, columns)"
                     : "columns_scale: out (N, columns) = scale in (N, width)");
    auto in = ladder_input<floatX>("in", ADD ? some : all, 1.0);
    auto out = ADD ? ladder_added<floatX>("out", all, 1.0, {1, 12, 0}) : ladder_output<floatX>("out", some, {1, 0, 0});
    LadderRun shipped = LADDER_OPERATION(columns_scale, out, in, scale, first, columns, N, width);
    if (ADD) shipped = LADDER_OPERATION(columns_add, out, in, scale, first, columns, N, width);
    ladder_work(LADDER_BYTES, (ADD ? 3.0 : 2.0) * (double)some * sizeof(floatX), shipped);
    ladder_rung("element", [&] {
        ladder_launch(columns_flat<1, ADD>, some, out, in, scale, first, columns, width, some);
    });
    if (packs_fit(columns, out, in, NULL, NULL) && first % PACK == 0 && width % PACK == 0)
        ladder_rung("packs", [&] {
            ladder_launch(columns_flat<PACK, ADD>, some / PACK, out, in, scale, first, columns, width, some / PACK);
        });
    ladder_rung("shipped", shipped);
}

int main(int argc, char** argv) {
    uint64_t N = ladder_size(8192, 17), width = ladder_size(6144, 96), first = ladder_size(4096, 64);
    uint64_t columns = ladder_size(1024, 16);
    ladder_open(argc, argv, {
        {"rows", KIND_COUNT, &N, "N", 1, 1e9, "positions", 0},
        {"width", KIND_COUNT, &width, "W", 1, 1e6, "columns of a row", 0},
        {"first", KIND_COUNT, &first, "F", 0, 1e6, "of the columns that are moved", 0},
        {"columns", KIND_COUNT, &columns, "C", 1, 1e6, "how many are moved", 0},
    });
    if (first + columns > width) ladder_give_up("--first and --columns must be within --width");
    columns_ladder<true>(N, width, first, columns);
    columns_ladder<false>(N, width, first, columns);
    return ladder_end();
}
