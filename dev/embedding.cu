// dev/embedding.cu: the ladders of the embedding, forward and backward.
//
//     forward    out (N, C) = token_weight[tokens] + position_weight[positions]
//     backward   dtoken_weight[token] += the sum of dout over the rows of the token
//                dposition_weight[position] += that over the rows of the position
//
// N = B T rows of B sequences of T positions.
//
// Bound by memory. The forward reads a row per token and writes one. The minimum for the backward is to read dout once,
// and to read and write 4 bytes of gradient for each channel of each position and of each distinct token; the shipped
// one reads dout twice, for the tokens and for the positions.
//
//     forward    idea                                                expected
//     naive      one element per thread, its row by a division       half of the peak
//     rows       one block per row                                   no divisions, but still 2 bytes per load
//     shipped    16 bytes per load                                   near the peak
//
//     backward   idea                                                expected
//     naive      one thread per channel walks through all rows, as   C threads: a hundredth of the peak
//                on the CPU
//     atomics    one thread per element, sums by atomicAdd           fast for tokens that differ, slow for equal ones;
//                                                                    the bits differ from run to run
//     owner      rows sorted by token; one block adds all rows of a  as fast as the next for tokens that differ; for
//                token                                               equal ones a single block does it all
//     shipped    the sorted rows are cut into equal pieces; partial  about the same speed whatever the tokens are
//                sums where a token's rows lie in several; positions
//                as in the rung before
//
// --tokens text: as in a text, where the token of rank r occurs in proportion to 1 / r; equal: one token only;
// different: repeats each token as rarely as V allows.
//
//     build/embedding --batch 16 --seq 1024 --channels 768 --vocab 50257 --tokens text

#include "kernels.cuh"
#include "ladder.h"

typedef struct {
    size_t N, C;
    const int32_t *tokens, *positions;                // (N)
    floatX* out;                                      // (N, C)
    const floatX *token_weight, *position_weight;     // (V, C), (T, C)
    const floatX* dout;                               // (N, C)
    float *dtoken_weight, *dposition_weight;          // (V, C), (T, C)
} Embedding;

// ------------------------------------------------------------------------------------------------
// Kernels

static __global__ void forward_naive(Embedding p) {
    size_t i = flat_index(1);
    if (i >= p.N * p.C) return;
    size_t row = i / p.C, c = i % p.C;
    float token = float_of(p.token_weight[(size_t)p.tokens[row] * p.C + c]);
    float position = float_of(p.position_weight[(size_t)p.positions[row] * p.C + c]);
    p.out[i] = floatX_of(token + position);
}

static __global__ void backward_naive(Embedding p) {
    size_t c = flat_index(1);
    if (c >= p.C) return;
    for (size_t row = 0; row < p.N; row++) {
        float d = float_of(p.dout[row * p.C + c]);
        p.dtoken_weight[(size_t)p.tokens[row] * p.C + c] += d;
        p.dposition_weight[(size_t)p.positions[row] * p.C + c] += d;
    }
}

static __global__ void backward_atomics(Embedding p) {
    size_t i = flat_index(1);
    if (i >= p.N * p.C) return;
    size_t row = i / p.C, c = i % p.C;
    atomicAdd(&p.dtoken_weight[(size_t)p.tokens[row] * p.C + c], float_of(p.dout[i]));
    atomicAdd(&p.dposition_weight[(size_t)p.positions[row] * p.C + c], float_of(p.dout[i]));
}

// If the i-th key is the first of a token, or of a position, block i adds its rows.
static __global__ void backward_owner(float* gradients, const floatX* dout, const uint64_t* keys, size_t N, size_t C) {
    size_t first = blockIdx.x;
    uint32_t id = key_id(keys[first]);
    if (first > 0 && key_id(keys[first - 1]) == id) return;
    for (size_t c = threadIdx.x; c < C; c += blockDim.x) {
        float sum = 0.0f;
        for (size_t i = first; i < N && key_id(keys[i]) == id; i++) sum += float_of(dout[key_row(keys[i]) * C + c]);
        gradients[(size_t)id * C + c] += sum;
    }
}

// ------------------------------------------------------------------------------------------------
// Program: two ladders

typedef enum { TOKENS_TEXT, TOKENS_EQUAL, TOKENS_DIFFERENT } Tokens;

// Tokens (N) below V of one kind. Sets *most to the rows of the most frequent token; returns how many tokens occur.
static size_t fill_tokens(int32_t* tokens, Tokens kind, size_t N, size_t V, size_t* most) {
    uint32_t* count = (uint32_t*)memory_allocate(V * sizeof(uint32_t));
    size_t different = 0;
    if (count == NULL) ladder_give_up("out of memory for the tokens; give smaller shapes");
    *most = 0;
    for (size_t i = 0; i < N; i++) {
        double u = (double)random_uniform(1, RANDOM_TEST, 0, i);
        if (kind == TOKENS_TEXT) tokens[i] = (int32_t)(pow((double)V, u) - 1.0);  // Zipf's law: frequency 1 / rank
        else tokens[i] = kind == TOKENS_EQUAL ? (int32_t)(V / 2) : (int32_t)((N - 1 - i) % V);
        tokens[i] = tokens[i] < (int32_t)V ? tokens[i] : (int32_t)V - 1;
        different += count[tokens[i]] == 0;
        *most = max_size(*most, ++count[tokens[i]]);
    }
    free(count);
    return different;
}

int main(int argc, char** argv) {
    uint64_t B = ladder_size(16, 3), T = ladder_size(1024, 75), C = ladder_size(768, 40), V = ladder_size(50257, 200);
    int kind = TOKENS_TEXT;
    ladder_open(argc, argv, {
        {"batch", KIND_COUNT, &B, "B", 1, 1e6, "sequences", 0},
        {"seq", KIND_COUNT, &T, "T", 1, 1e6, "tokens of each", 0},
        {"channels", KIND_COUNT, &C, "C", 1, 1e5, "channels of a row", 0},
        {"vocab", KIND_COUNT, &V, "V", 1, 1e9, "different tokens there may be", 0},
        {"tokens", KIND_CHOICE, &kind, "text|equal|different", 0, 0, "how often each occurs", 0},
    });
    const size_t N = B * T, n = N * C;
    const unsigned threads = block_threads(C, FLAT_THREADS);
    Stream stream = ladder.stream;
    size_t most = 0;

    ladder_begin("embedding_forward: out (N, C) = token_weight (V, C) [tokens] + position_weight (T, C) [positions]");
    auto tokens = ladder_input<int32_t>("tokens", N, 1.0), positions = ladder_input<int32_t>("positions", N, 1.0);
    size_t different = fill_tokens(tokens.twin, (Tokens)kind, N, V, &most);
    for (size_t i = 0; i < N; i++) positions.twin[i] = (int32_t)(i % T);
    ladder_update(tokens);
    ladder_update(positions);
    auto token_weight = ladder_input<floatX>("token_weight", V * C, 1.0);
    auto position_weight = ladder_input<floatX>("position_weight", T * C, 1.0);
    auto out = ladder_output<floatX>("out", n, {2, 0, 0});
    Embedding f = {N, C, tokens, positions, out, token_weight, position_weight, NULL, NULL, NULL};
    auto forward = LADDER_OPERATION(embedding_forward, out, tokens, positions, token_weight, position_weight, N, C);
    ladder_work(LADDER_BYTES, (double)((different + N + T) * C) * sizeof(floatX), forward);
    ladder_rung("naive", [&] { ladder_launch(forward_naive, n, f); });
    ladder_rung("rows", [&] {
        embedding_forward_kernel<1><<<grid_blocks(N), threads, 0, stream->compute>>>(
            out, tokens, positions, token_weight, position_weight, N, C);
    });
    ladder_rung("shipped", forward);

    ladder_begin("embedding_backward: dtoken_weight (V, C), dposition_weight (T, C) += ... from dout (N, C)");
    tokens = ladder_input<int32_t>("tokens", N, 1.0), positions = ladder_input<int32_t>("positions", N, 1.0);
    fill_tokens(tokens.twin, (Tokens)kind, N, V, &most);
    for (size_t i = 0; i < N; i++) positions.twin[i] = (int32_t)(i % T);
    ladder_update(tokens);
    ladder_update(positions);
    auto dout = ladder_input<floatX>("dout", n, 1.0);
    auto dtoken_weight = ladder_added<float>("dtoken_weight", V * C, 1.0, ladder_random_sum(most));
    auto dposition_weight = ladder_added<float>("dposition_weight", T * C, 1.0, ladder_random_sum(B));
    ladder_give_scratch(embedding_backward_scratch_bytes(N, C));
    Embedding b = {N, C, tokens, positions, NULL, NULL, NULL, dout, dtoken_weight, dposition_weight};
    auto backward = LADDER_OPERATION(embedding_backward, dtoken_weight, dposition_weight, dout, tokens, positions, N,
                                     C);
    ladder_work(LADDER_BYTES, (double)n * sizeof(floatX) + 8.0 * (double)((different + T) * C), backward);
    ladder_rung("naive", [&] { ladder_launch(backward_naive, C, b); });
    ladder_rung("atomics", [&] { ladder_launch(backward_atomics, n, b); });
    ladder_rung("owner", [&] {
        uint64_t* scratch = (uint64_t*)device_scratch(stream, 2 * N * sizeof(uint64_t));
        for (bool of_tokens : {true, false}) {
            const uint64_t* keys = embedding_sort(scratch, scratch + N, of_tokens ? tokens : positions, N, stream);
            float* gradients = of_tokens ? dtoken_weight : dposition_weight;
            backward_owner<<<grid_blocks(N), threads, 0, stream->compute>>>(gradients, dout, keys, N, C);
        }
    });
    ladder_rung("shipped", backward);
    return ladder_end();
}
