// dev/nf4.cu: the ladder of dequantizing weights of 4 bits.
//
//     nf4_dequantize   out (rows, C) = the number of each code, times the scale of its block of 64 weights
//
// Bound by memory: half a byte read and an element written per weight; the scales add 2%.
//
//     rung       idea                                                     expected
//     constant   one weight per thread; the 16 numbers in constant        a warp's codes differ, and are looked up one
//                memory, where a kernel's parameters are                  after the other: a third or less
//     shared     one weight per thread; the numbers in shared memory,     a byte read by two threads, an element
//                each in a bank of its own                                written by each: half
//     bytes      a byte of two weights per thread                         4 bytes written at a time: two thirds
//     shipped    16 bytes written per thread, whose scale is looked up    near the peak
//                once
//
//     build/nf4 --rows 4096 --channels 4096

#include "kernels.cuh"
#include "ladder.h"

// ------------------------------------------------------------------------------------------------
// Kernels

static __global__ void nf4_constant(floatX* out, Nf4 q, Nf4Table table, size_t n) {
    size_t i = flat_index(1);
    if (i < n) out[i] = floatX_of(table.values[nf4_code(q.codes, i)] * nf4_scale(&q, i / NF4_BLOCK));
}

struct alignas(2 * sizeof(floatX)) Nf4Pair {
    floatX first, second;
};

static __global__ void nf4_byte(floatX* out, Nf4 q, Nf4Table table, size_t n) {
    __shared__ float numbers[NF4_CODES];
    if (threadIdx.x < NF4_CODES) numbers[threadIdx.x] = table.values[threadIdx.x];
    __syncthreads();
    size_t i = flat_index(2);
    if (i >= n) return;
    float scale = nf4_scale(&q, i / NF4_BLOCK);
    unsigned byte = q.codes[i / 2];
    Nf4Pair pair = {floatX_of(numbers[byte >> 4] * scale), floatX_of(numbers[byte & 15] * scale)};
    if (i + 1 < n) *(Nf4Pair*)(out + i) = pair;
    else out[i] = pair.first;
}

// ------------------------------------------------------------------------------------------------
// Program

int main(int argc, char** argv) {
    uint64_t rows = ladder_size(4096, 33), C = ladder_size(4096, 40);
    ladder_open(argc, argv, {{"rows", KIND_COUNT, &rows, "N", 1, 1e7, "rows of the weight", 0},
                             {"channels", KIND_COUNT, &C, "C", 1, 1e6, "columns of the weight", 0}});
    ladder_begin("nf4_dequantize: out (rows, C) from codes of 4 bits and scales");
    const size_t n = rows * C, blocks = divide_up(n, NF4_BLOCK);
    DynamicMap map;
    dynamic_map(&map, true);
    auto codes = ladder_input<uint8_t>("codes", divide_up(n, 2), 256);
    auto scale_codes = ladder_input<uint8_t>("codes of scales", blocks, 256);
    auto scales = ladder_input<float>("scales", divide_up(blocks, NF4_SCALES), 1.0);
    auto numbers = ladder_input<float>("numbers of scales", NF4_MAP, 1.0);
    auto out = ladder_output<floatX>("out", n, {0, 0, 0});
    memcpy(numbers.twin, map.values, sizeof map.values);  // the last is the offset
    ladder_update(numbers);
    auto weights = [&] { return Nf4{n, codes, scales, numbers, scale_codes}; };
    auto shipped = [&] {
        Nf4 q = weights();
        if (ladder.on_cpu) cpu::nf4_dequantize(out, &q, 0, n, NULL);
        else nf4_dequantize(out, &q, 0, n, ladder.stream);
    };
    ladder_work(LADDER_BYTES, (double)n * (0.5 + 1.0 / 64 + sizeof(floatX)), shipped);
    ladder_rung("constant", [&] { ladder_launch(nf4_constant, n, out, weights(), NF4_TABLE, n); });
    ladder_rung("shared", [&] { ladder_launch(nf4_dequantize_kernel<1>, n, out, weights(), NF4_TABLE, 0, n); });
    ladder_rung("bytes", [&] { ladder_launch(nf4_byte, divide_up(n, 2), out, weights(), NF4_TABLE, n); });
    ladder_rung("shipped", shipped);
    return ladder_end();
}
