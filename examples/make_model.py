"""Writes a small model with random weights, with transformers: a stand-in for a published one without a network.

    python3 examples/make_model.py models/small [--architecture gpt2|llama|mistral|qwen2|qwen3] [--text FILE]

The directory has the files of published models: config.json, model.safetensors, and the tokenizer, whose byte-level
merges are learned from FILE (by default from this script). It needs transformers, tokenizers and torch.
"""

import argparse

import tokenizers
import torch
import transformers

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--architecture", default="gpt2", choices=["gpt2", "llama", "mistral", "qwen2", "qwen3"])
parser.add_argument("--text", default=__file__)
parser.add_argument("--vocabulary", type=int, default=1024)
parser.add_argument("--channels", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--context", type=int, default=256)
parser.add_argument("--seed", type=int, default=0)
o = parser.parse_args()

# A tokenizer of GPT-2's kind.
tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = tokenizers.decoders.ByteLevel()
tokenizer.train([o.text], tokenizers.trainers.BpeTrainer(
    vocab_size=o.vocabulary, special_tokens=["<|endoftext|>"], show_progress=False,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
end = tokenizer.token_to_id("<|endoftext|>")

ends = dict(vocab_size=tokenizer.get_vocab_size(), bos_token_id=end, eos_token_id=end, tie_word_embeddings=True)
heads = max(o.channels // 32, 2)
if o.architecture == "gpt2":
    config = transformers.GPT2Config(n_embd=o.channels, n_layer=o.layers, n_head=heads, n_positions=o.context, **ends)
else:
    kinds = dict(llama=transformers.LlamaConfig, mistral=transformers.MistralConfig, qwen2=transformers.Qwen2Config,
                 qwen3=transformers.Qwen3Config)
    more = dict(sliding_window=None) if o.architecture == "mistral" else {}
    if o.architecture == "qwen3":
        more = dict(head_dim=o.channels // heads)
    config = kinds[o.architecture](
        hidden_size=o.channels, num_hidden_layers=o.layers, num_attention_heads=heads, num_key_value_heads=heads // 2,
        intermediate_size=3 * o.channels, max_position_embeddings=o.context, **ends, **more)

torch.manual_seed(o.seed)
model = transformers.AutoModelForCausalLM.from_config(config)
model.save_pretrained(o.directory)
transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>",
                                     clean_up_tokenization_spaces=False).save_pretrained(o.directory)
print(f"{o.directory}: a {o.architecture} of {model.num_parameters():,} parameters, {tokenizer.get_vocab_size()} tokens")
