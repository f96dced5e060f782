// dev/rope.cu: the ladder of rotary positions, forward and backward.
//
//     qkv (N, (H + 2K) D): rotates the pair (x[i], x[i + D/2]) of query and key heads by position theta^(-2i/D)
//
// Bound by memory: reads and writes (H + K) D elements per row. The cosines and sines are a table of 4 D bytes per
// position, as many bytes as a head reads and writes in 16 bits: the rungs differ in how often they load it.
//
//     rung       idea                                                  expected
//     computed   one pair per thread, its angle by pow, cos and sin    bound by arithmetic: a hundredth of the peak
//                in double
//     table      the same, from the table                              2 bytes per load: half of the peak or less
//     packs      16 bytes per load                                     half of what it moves is the table, from the
//                                                                      caches: two thirds of the peak
//     shipped    the angles stay in registers from head to head, and   near the peak
//                no divisions find out what a thread is to do
//
//     build/rope --batch 4 --seq 2048 --heads 32 --kv-heads 8 --head-size 128

#include "kernels.cuh"
#include "ladder.h"

#define THETA 10000.0

typedef struct {
    size_t H, K, D;
    floatX* qkv;                // (N, (H + 2K) D)
    const float* table;         // (T, D/2, 2)
    const int32_t* positions;   // (N)
    float direction;            // 1 forward, -1 back
} Rope;

// ------------------------------------------------------------------------------------------------
// Kernels: thread i owns W pairs of a head

// The offset in qkv of the first of the pairs; its position, and its index in its head.
static __device__ size_t pair_place(Rope p, size_t i, size_t W, size_t* position, size_t* inside) {
    size_t across = p.D / 2 / W, head = i / across % (p.H + p.K), row = i / across / (p.H + p.K);
    *inside = i % across * W;
    *position = (size_t)p.positions[row];
    return (row * (p.H + 2 * p.K) + head) * p.D + *inside;
}

static __global__ void rope_computed(Rope p, size_t n) {
    size_t i = flat_index(1), position, inside;
    if (i >= n) return;
    floatX* x = p.qkv + pair_place(p, i, 1, &position, &inside);
    double angle = (double)position * pow(THETA, -2.0 * (double)inside / (double)p.D);
    float cosine = (float)cos(angle), sine = p.direction * (float)sin(angle);
    float first = float_of(x[0]), second = float_of(x[p.D / 2]);
    x[0] = floatX_of(first * cosine - second * sine);
    x[p.D / 2] = floatX_of(first * sine + second * cosine);
}

template <int W>
static __device__ void rotate_pairs(floatX* x, size_t half, Lanes<2 * W> angle, float direction) {
    Lanes<W> a = lanes_load<W>(x), b = lanes_load<W>(x + half);
    #pragma unroll
    for (int j = 0; j < W; j++) {
        float cosine = angle.x[2 * j], sine = direction * angle.x[2 * j + 1], first = a.x[j], second = b.x[j];
        a.x[j] = first * cosine - second * sine;
        b.x[j] = first * sine + second * cosine;
    }
    lanes_store(x, a);
    lanes_store(x + half, b);
}

template <int W>
static __global__ void rope_table_pairs(Rope p, size_t n) {
    size_t i = flat_index(1), position, inside;
    if (i >= n) return;
    floatX* x = p.qkv + pair_place(p, i, W, &position, &inside);
    rotate_pairs<W>(x, p.D / 2, group_load<2 * W>(p.table + position * p.D + 2 * inside), p.direction);
}

// ------------------------------------------------------------------------------------------------
// Program: two ladders

int main(int argc, char** argv) {
    uint64_t B = ladder_size(4, 2), T = ladder_size(2048, 9), H = ladder_size(32, 5), K = ladder_size(8, 1);
    uint64_t D = ladder_size(128, 32);
    ladder_open(argc, argv, {
        {"batch", KIND_COUNT, &B, "B", 1, 1e6, "sequences", 0},
        {"seq", KIND_COUNT, &T, "T", 1, 1e6, "positions of each", 0},
        {"heads", KIND_COUNT, &H, "H", 1, 1e4, "query heads", 0},
        {"kv-heads", KIND_COUNT, &K, "K", 1, 1e4, "key and value heads", 0},
        {"head-size", KIND_COUNT, &D, "D", 2, ATTENTION_MAX_D, "elements of a head, an even number", 0},
    });
    if (D % 2 != 0) ladder_give_up("--head-size must be even");
    const size_t N = B * T, pairs = N * (H + K) * (D / 2);
    for (int backward = 0; backward < 2; backward++) {
        ladder_begin(backward ? "rope_backward: qkv (N, (H + 2K) D) rotated back in place"
                              : "rope_forward: qkv (N, (H + 2K) D) rotated in place");
        auto table = ladder_input<float>("table", T * D, 1.0);
        // A sum of two numbers below 5, times a cosine or sine.
        auto qkv = ladder_added<floatX>("qkv", N * (H + 2 * K) * D, 1.0, {2, 10, 0});
        RopeOptions rope = {.theta = THETA};
        rope_table(table.twin, &rope, T, D);
        ladder_update(table);
        auto positions = ladder_input<int32_t>("positions", N, 1.0);
        for (size_t i = 0; i < N; i++) positions.twin[i] = (int32_t)(i % T);
        ladder_update(positions);
        Rope p = {H, K, D, qkv, table, positions, backward ? -1.0f : 1.0f};
        LadderRun shipped = LADDER_OPERATION(rope_forward, qkv, table, positions, N, H, K, D);
        if (backward) shipped = LADDER_OPERATION(rope_backward, qkv, table, positions, N, H, K, D);
        ladder_work(LADDER_BYTES, 4.0 * (double)pairs * sizeof(floatX), shipped);
        ladder_rung("computed", [&] { ladder_launch(rope_computed, pairs, p, pairs); });
        ladder_rung("table", [&] { ladder_launch(rope_table_pairs<1>, pairs, p, pairs); });
        if (packs_fit(D / 2, qkv, table, NULL, NULL))
            ladder_rung("packs", [&] { ladder_launch(rope_table_pairs<PACK>, pairs / PACK, p, pairs / PACK); });
        ladder_rung("shipped", shipped);
    }
    return ladder_end();
}
