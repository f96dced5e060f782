// dev/embedding.cu: the ladders of the embedding, forward and backward.
//
//     forward    out (B, T, C) = token_weight[tokens] + position_weight
//     backward   dtoken_weight[token] += the sum of dout over the rows of the token
//                dposition_weight += that over the batch
//
// Bound by memory. The forward reads a row per token and writes one. The least for the backward is to read dout once,
// and to read and write 4 bytes of gradient for each channel of each token that occurs and of each position; the
// shipped one reads dout twice, for the tokens and for the positions.
//
//     forward    idea                                                expected
//     naive      an element a thread, its row by a division          half of the peak
//     rows       a block a row                                       no divisions, but still 2 bytes a load
//     shipped    16 bytes a load                                     near the peak
//
//     backward   idea                                                expected
//     naive      a thread a channel walks through all rows, as on    C threads: a hundredth of the peak
//                the CPU
//     atomics    a thread an element, sums by atomicAdd              fast for tokens that differ, slow for equal ones;
//                                                                    the bits differ from run to run
//     owner      rows sorted by token; a block adds all rows of a    as fast as the next for tokens that differ; for
//                token                                               equal ones a single block does it all
//     shipped    the sorted rows are cut into equal pieces; partial  about the same speed whatever the tokens are
//                sums where a token's rows lie in several
//
// --tokens text: as in a text, where the token of rank r occurs in proportion to 1 / r; equal: one token; different:
// each of them as seldom as V allows.
//
//     FLAGS="-O3 -arch=native -I. -DLLMTRAIN_CUDA -DPRECISION_BF16 -Xcompiler=-fopenmp"
//     nvcc $FLAGS dev/embedding.cu -o build/embedding -lcublasLt
//     build/embedding --batch 16 --seq 1024 --channels 768 --vocab 50257 --tokens text

#include "kernels.cuh"
#include "ladder.h"

typedef struct {
    size_t B, T, C, V;
    floatX* out;                                      // (B, T, C)
    const floatX *token_weight, *position_weight;     // (V, C), (T, C)
    float *dtoken_weight, *dposition_weight;          // (V, C), (T, C)
    const floatX* dout;                               // (B, T, C)
    const int32_t* tokens;                            // (B, T)
} Embedding;

// ------------------------------------------------------------------------------------------------
// Kernels

static __global__ void forward_naive(Embedding p) {
    size_t i = ladder_index();
    if (i >= p.B * p.T * p.C) return;
    size_t row = i / p.C, c = i % p.C;
    float token = float_of(p.token_weight[(size_t)p.tokens[row] * p.C + c]);
    float position = float_of(p.position_weight[row % p.T * p.C + c]);
    p.out[i] = floatX_of(token + position);
}

static __global__ void backward_naive(Embedding p) {
    size_t c = ladder_index();
    if (c >= p.C) return;
    for (size_t row = 0; row < p.B * p.T; row++) {
        float d = float_of(p.dout[row * p.C + c]);
        p.dtoken_weight[(size_t)p.tokens[row] * p.C + c] += d;
        p.dposition_weight[row % p.T * p.C + c] += d;
    }
}

static __global__ void backward_atomics(Embedding p) {
    size_t i = ladder_index();
    if (i >= p.B * p.T * p.C) return;
    size_t row = i / p.C, c = i % p.C;
    atomicAdd(&p.dtoken_weight[(size_t)p.tokens[row] * p.C + c], float_of(p.dout[i]));
    atomicAdd(&p.dposition_weight[row % p.T * p.C + c], float_of(p.dout[i]));
}

// Block i adds the rows of the token whose first key is number i, if there is one.
static __global__ void backward_owner(Embedding p, const uint64_t* keys) {
    size_t N = p.B * p.T, first = blockIdx.x;
    uint32_t token = key_token(keys[first]);
    if (first > 0 && key_token(keys[first - 1]) == token) return;
    for (size_t c = threadIdx.x; c < p.C; c += blockDim.x) {
        float sum = 0.0f;
        for (size_t i = first; i < N && key_token(keys[i]) == token; i++)
            sum += float_of(p.dout[key_row(keys[i]) * p.C + c]);
        p.dtoken_weight[(size_t)token * p.C + c] += sum;
    }
}

// ------------------------------------------------------------------------------------------------
// Rungs

static void run_forward_naive(void* problem, Stream stream) {
    Embedding* p = (Embedding*)problem;
    forward_naive<<<ladder_blocks(p->B * p->T * p->C), LADDER_THREADS, 0, stream->compute>>>(*p);
    LAUNCH_CHECK();
}

static void run_forward_rows(void* problem, Stream stream) {
    Embedding* p = (Embedding*)problem;
    unsigned rows = grid_blocks(p->B * p->T), threads = block_threads(p->C, LADDER_THREADS);
    embedding_forward_kernel<1><<<rows, threads, 0, stream->compute>>>(
        p->out, p->tokens, p->token_weight, p->position_weight, 0, p->B * p->T, p->T, p->C);
    LAUNCH_CHECK();
}

static void run_forward_shipped(void* problem, Stream stream) {
    Embedding* p = (Embedding*)problem;
    embedding_forward(p->out, p->tokens, p->token_weight, p->position_weight, 0, p->B, p->T, p->C, stream);
}

static void run_backward_naive(void* problem, Stream stream) {
    Embedding* p = (Embedding*)problem;
    backward_naive<<<ladder_blocks(p->C), LADDER_THREADS, 0, stream->compute>>>(*p);
    LAUNCH_CHECK();
}

static void run_backward_atomics(void* problem, Stream stream) {
    Embedding* p = (Embedding*)problem;
    backward_atomics<<<ladder_blocks(p->B * p->T * p->C), LADDER_THREADS, 0, stream->compute>>>(*p);
    LAUNCH_CHECK();
}

static void run_backward_owner(void* problem, Stream stream) {
    Embedding* p = (Embedding*)problem;
    size_t N = p->B * p->T;
    uint64_t* scratch = (uint64_t*)device_scratch(stream, 2 * N * sizeof(uint64_t));
    unsigned threads = block_threads(p->C, LADDER_THREADS);
    const uint64_t* keys = embedding_sort(scratch, scratch + N, p->tokens, N, stream);
    backward_owner<<<grid_blocks(N), threads, 0, stream->compute>>>(*p, keys);
    LAUNCH_CHECK();
    embedding_positions<1><<<grid_blocks(p->T), threads, 0, stream->compute>>>(
        p->dposition_weight, p->dout, p->B, p->T, p->C);
    LAUNCH_CHECK();
}

static void run_backward_shipped(void* problem, Stream stream) {
    Embedding* p = (Embedding*)problem;
    embedding_backward(p->dtoken_weight, p->dposition_weight, p->dout, p->tokens, p->B, p->T, p->C, stream);
}

// ------------------------------------------------------------------------------------------------
// Program: two ladders

typedef enum { TOKENS_TEXT, TOKENS_EQUAL, TOKENS_DIFFERENT } Tokens;

// Tokens (N) below V of one kind. Sets *most to the rows of the most frequent token; returns how many tokens occur.
static size_t fill_tokens(int32_t* tokens, Tokens kind, size_t N, size_t V, size_t* most) {
    uint32_t* count = (uint32_t*)allocate(V * sizeof(uint32_t));
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
    Flag flags[] = {
        {"batch", FLAG_COUNT, &B, "B", 1, 1e6, "sequences", false},
        {"seq", FLAG_COUNT, &T, "T", 1, 1e6, "tokens of each", false},
        {"channels", FLAG_COUNT, &C, "C", 1, 1e5, "channels of a row", false},
        {"vocab", FLAG_COUNT, &V, "V", 1, 1e9, "different tokens there may be", false},
        {"tokens", FLAG_CHOICE, &kind, "text|equal|different", 0, 0, "how often each occurs", false},
    };
    Ladder l = {};
    for (int backward = 0; backward < 2; backward++) {
        const char* title = backward
            ? "embedding_backward: dtoken_weight (V, C), dposition_weight (T, C) += ... from dout (B, T, C)"
            : "embedding_forward: out (B, T, C) = token_weight (V, C) [tokens] + position_weight (T, C)";
        if (!ladder_open(&l, argc, argv, title, flags, 5)) return l.status;
        size_t N = B * T, n = N * C, most = 0;
        Embedding p;
        memset(&p, 0, sizeof p);
        p.B = B, p.T = T, p.C = C, p.V = V;
        p.tokens = ladder_input<int32_t>(&l, "tokens", N, 1.0);
        int32_t* tokens = (int32_t*)ladder_twin(&l, p.tokens);
        size_t different = fill_tokens(tokens, (Tokens)kind, N, V, &most);
        ladder_update(&l, p.tokens);
        if (!backward) {
            p.token_weight = ladder_input<floatX>(&l, "token_weight", V * C, 1.0);
            p.position_weight = ladder_input<floatX>(&l, "position_weight", T * C, 1.0);
            p.out = ladder_output<floatX>(&l, "out", n, ladder_bound(2, 0, 0));
            const floatX *token = ladder_twin(&l, p.token_weight), *position = ladder_twin(&l, p.position_weight);
            if (l.check) cpu::embedding_forward(ladder_twin(&l, p.out), tokens, token, position, 0, B, T, C, NULL);
            ladder_work(&l, LADDER_BYTES, (double)((different + N + T) * C) * sizeof(floatX));
            ladder_rung(&l, "naive", run_forward_naive, &p);
            ladder_rung(&l, "rows", run_forward_rows, &p);
            ladder_rung(&l, "shipped", run_forward_shipped, &p);
        } else {
            p.dout = ladder_input<floatX>(&l, "dout", n, 1.0);
            p.dtoken_weight = ladder_added<float>(&l, "dtoken_weight", V * C, 1.0, ladder_random_sum(most));
            p.dposition_weight = ladder_added<float>(&l, "dposition_weight", T * C, 1.0, ladder_random_sum(B));
            float *dtoken = ladder_twin(&l, p.dtoken_weight), *dposition = ladder_twin(&l, p.dposition_weight);
            if (l.check) cpu::embedding_backward(dtoken, dposition, ladder_twin(&l, p.dout), tokens, B, T, C, NULL);
            ladder_give_scratch(&l, embedding_backward_scratch_bytes(B, T, C));
            ladder_work(&l, LADDER_BYTES, (double)n * sizeof(floatX) + 8.0 * (double)((different + T) * C));
            ladder_rung(&l, "naive", run_backward_naive, &p);
            ladder_rung(&l, "atomics", run_backward_atomics, &p);
            ladder_rung(&l, "owner", run_backward_owner, &p);
            ladder_rung(&l, "shipped", run_backward_shipped, &p);
        }
        ladder_close(&l);
    }
    return ladder_result(&l);
}
