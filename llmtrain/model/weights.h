// weights.h: the tensors of a model: which there are, their shapes and initial values.
//
// A weight of the blocks is a member of Block, its row in weights_create, and the call in llmtrain.h that uses it.

#ifndef LLMTRAIN_WEIGHTS_H
#define LLMTRAIN_WEIGHTS_H

#include "config.h"
#include "tensors.h"

// The tensors of one block; TENSOR_NONE where the family has none.
typedef struct {
    Norm norm1, norm2;                        // (C)
    TensorId q_norm_weight, k_norm_weight;    // (D)
    Linear qkv;                               // ((H + 2K) D, C)
    Linear attention_out;                     // (C, H D)
    Linear ffn_in;                            // (F, C), Llama (2F, C): gate, then up
    Linear ffn_out;                           // (C, F)
} Block;

// The tensors of a block that its backward adds to while it goes through norms; TENSOR_NONE where there is none.
static inline void block_norms(TensorId norms[], const Block* b) {
    const TensorId all[] = {b->norm1.weight, b->norm1.bias, b->norm2.weight, b->norm2.bias, b->q_norm_weight,
                            b->k_norm_weight};
    memcpy(norms, all, sizeof all);
}

typedef struct {
    Block* blocks;                            // (L)
    TensorId token_embedding;                 // (Vp, C)
    TensorId position_embedding;              // (context, C)
    Norm final_norm;                          // (C)
    Linear head;                              // (Vp, C), without bias; the token embedding when tied
} Weights;

// Whether the matrices of a name have pairs of LoRA.
static inline bool weights_have_pairs(const Config* c, const char* name) {
    return c->lora_targets == 0 || (c->lora_targets >> choice_find(LORA_TARGETS, name) & 1);
}

// Adds the pairs of LoRA to a linear layer of block l, if it is one of those asked for, and quantizes it, if they all
// are. parts: Llama's names of the matrices that its weight is a stack of, each of which has a pair of its own; NULL: it
// is one.
static inline void weights_add_pairs(Linear* linear, Parameters* p, const Config* c, size_t l, const char* name,
                                     const char* parts) {
    if (c->lora == 0 || p->failed) return;
    Tensor* weight = &p->tensors[linear->weight.row];
    bool stack = parts && c->family == FAMILY_LLAMA;
    if (c->quantize == QUANTIZE_NF4) {
        weight->dtype = DTYPE_U8;
        while (weight->quantized == 0 || (stack && part_matrix(&weight->part, weight->quantized) > 0))
            weight->quantized++;
    }
    const Tensor whole = *weight;
    for (size_t m = 0, first = 0, rows; (rows = stack ? part_matrix(&whole.part, m) : m ? 0 : whole.rows) > 0; m++) {
        char part[16];
        if (stack) choice_name(parts, (int)m, part, sizeof part);
        else snprintf(part, sizeof part, "%s", name);
        if (weights_have_pairs(c, name) || weights_have_pairs(c, part))
            parameters_add_pair(p, linear, l, part, first, rows, c->lora, whole.cols);
        first += rows;
    }
}

// Fills the table. Initial weights are normal with std sqrt(2 / 5C), "Transformers without Tears: Improving the
// Normalization of Self-Attention": about GPT-2's 0.02 for its 768 channels, and more for narrow models, which then
// learn faster. It is divided by sqrt(2L) in the two matmuls that add to the residual stream, so that the stream does
// not grow with depth. train: names of the tensors that train; NULL: all. The table has part `number` of `parts` of
// what tensor parallelism divides.
static inline bool weights_create(Weights* w, Parameters* p, const Config* c, const char* train, size_t number,
                                  size_t parts, Error* error) {
    size_t C = c->channels, L = c->layers, F = c->ffn, V = c->vocab, Vp = config_padded_vocab(c);
    size_t D = config_head_size(c), HD = c->heads * D, KD = c->kv_heads * D;
    float usual = sqrtf(0.4f / (float)C), residual = usual / sqrtf(2.0f * (float)L);
    bool gpt2 = c->family == FAMILY_GPT2;
    const size_t single[SHAPE_MATRICES] = {0}, q_k_v[SHAPE_MATRICES] = {HD, KD, KD};
    const size_t gate_up[SHAPE_MATRICES] = {gpt2 ? 0 : F, gpt2 ? 0 : F};
    w->blocks = (Block*)memory_allocate(L * sizeof(Block));
    if (w->blocks == NULL) return fail_with(error, "out of memory for the table of %zu blocks", L);
    w->token_embedding = parameters_add(p, "token_embedding", V, Vp, C, 0, INIT_NORMAL, usual);
    parameters_last(p)->part.by = SPLIT_ROWS;
    w->position_embedding = TENSOR_NONE;
    if (gpt2)
        w->position_embedding =
            parameters_add(p, "position_embedding", c->context, c->context, C, 0, INIT_NORMAL, usual);
    for (size_t l = 0; l < L; l++) {
        Block* b = &w->blocks[l];
        b->norm1 = parameters_add_norm(p, gpt2, l, "norm1", C);
        b->qkv = parameters_add_linear(p, gpt2 || c->qkv_bias, l, "qkv", config_qkv(c), C, usual, SPLIT_ROWS, q_k_v);
        parameters_set_heads(p, b->qkv, config_qk(c), D);
        weights_add_pairs(&b->qkv, p, c, l, "qkv", "q|k|v");
        b->q_norm_weight = parameters_add_block(p, c->qk_norm, l, "q_norm", "weight", D, 0, INIT_ONE, 0);
        b->k_norm_weight = parameters_add_block(p, c->qk_norm, l, "k_norm", "weight", D, 0, INIT_ONE, 0);
        b->attention_out =
            parameters_add_linear(p, gpt2, l, "attention_out", C, HD, residual, SPLIT_COLUMNS, single);
        weights_add_pairs(&b->attention_out, p, c, l, "attention_out", NULL);
        b->norm2 = parameters_add_norm(p, gpt2, l, "norm2", C);
        b->ffn_in = parameters_add_linear(p, gpt2, l, "ffn_in", config_ffn_in(c), C, usual, SPLIT_ROWS, gate_up);
        weights_add_pairs(&b->ffn_in, p, c, l, "ffn_in", "gate|up");
        b->ffn_out = parameters_add_linear(p, gpt2, l, "ffn_out", C, F, residual, SPLIT_COLUMNS, single);
        weights_add_pairs(&b->ffn_out, p, c, l, "ffn_out", NULL);
    }
    w->final_norm.weight = parameters_add(p, "final_norm_weight", C, C, 0, L + 1, INIT_ONE, 0);
    w->final_norm.bias = TENSOR_NONE;
    if (gpt2) w->final_norm.bias = parameters_add(p, "final_norm_bias", C, C, 0, L + 1, INIT_ZERO, 0);
    w->head.weight = w->token_embedding;
    w->head.bias = TENSOR_NONE;
    p->tied = c->tied;
    if (!c->tied) {
        w->head.weight = parameters_add(p, "head_weight", V, Vp, C, L + 1, INIT_NORMAL, usual);
        parameters_last(p)->part.by = SPLIT_ROWS;
    }
    if (!p->failed) p->tensors[w->head.weight.row].overwritten = true;  // the head's matmul comes first
    if (!p->failed) parameters_divide(p, number, parts);
    return parameters_finish(p, train, error);
}

#endif  // LLMTRAIN_WEIGHTS_H
