"""peers_model.py: GPT-2 and Llama as one would write them in PyTorch, for peers.py (a GPU) and peers_cpu.py."""

import torch
import torch.nn.functional as F
from torch import nn


def turn(x, cosine, sine):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), dim=-1).type_as(x)


class Block(nn.Module):
    """A block of "gpt2", or of "llama" without grouped queries; ffn is the width after the nonlinearity."""

    def __init__(self, family, heads, channels, ffn):
        super().__init__()
        self.family, self.heads = family, heads
        norm = nn.LayerNorm if family == "gpt2" else nn.RMSNorm
        bias, wide = family == "gpt2", ffn if family == "gpt2" else 2 * ffn
        self.norm1, self.norm2 = norm(channels), norm(channels)
        self.qkv = nn.Linear(channels, 3 * channels, bias=bias)
        self.attention_out = nn.Linear(channels, channels, bias=bias)
        self.ffn_in = nn.Linear(channels, wide, bias=bias)
        self.ffn_out = nn.Linear(ffn, channels, bias=bias)

    def forward(self, x, cosine, sine):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        if self.family == "llama":
            q, k = turn(q, cosine[:T], sine[:T]), turn(k, cosine[:T], sine[:T])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.attention_out(y)
        h = self.ffn_in(self.norm2(x))
        if self.family == "gpt2":
            return x + self.ffn_out(F.gelu(h, approximate="tanh"))
        gate, up = h.chunk(2, dim=-1)
        return x + self.ffn_out(F.silu(gate) * up)


class Transformer(nn.Module):
    """With the head tied to the token embedding, for sequences of at most seq tokens; returns the mean loss."""

    def __init__(self, family, layers, heads, channels, ffn, vocab, seq):
        super().__init__()
        self.tokens = nn.Embedding(vocab, channels)
        self.positions = nn.Embedding(seq, channels) if family == "gpt2" else None
        self.blocks = nn.ModuleList(Block(family, heads, channels, ffn) for _ in range(layers))
        self.norm = (nn.LayerNorm if family == "gpt2" else nn.RMSNorm)(channels)
        half = channels // heads // 2
        angles = torch.outer(torch.arange(seq), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        return self.loss(x, targets)

    def loss(self, x, targets):
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def compile_parts(self):
        for block in self.blocks:
            block.compile()
        self.loss = torch.compile(self.loss)
