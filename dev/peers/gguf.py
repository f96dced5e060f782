# Our GGUF files against other programs.
#
#   python3 dev/peers/gguf.py [--build build] [--only NAME]    llama.cpp opens our exports of models and tokenizers made
#                                                              here: the same tokens of texts; in f32 the same 64 greedy
#                                                              tokens as transformers; in all types the perplexity of
#                                                              build/evaluate with the same rounded weights
#   python3 dev/peers/gguf.py --hashes                         hashes of the files of test_gguf.c, written by the gguf
#                                                              package
#   python3 dev/peers/gguf.py --fixtures                       the tokenizers of these, in dev/test/fixtures/gguf
#
# make build/evaluate build/export; pip install gguf xxhash numpy torch transformers tokenizers sentencepiece
# llama-cpp-python. Says "skipped" without the packages. Exit code 1 if anything differs.
import argparse
import glob
import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile


def skipped(what):
    print("skipped: %s" % what)
    sys.exit(0)


def wants(*names):
    import importlib
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            skipped("there is no Python package %s" % name)


# ------------------------------------------------------------------------------------------------
# --hashes: models with weights from a formula, as in test_gguf.c; tensor names and interleaved rows follow the gguf
# package's own tables and llama.cpp's converter.

def formula(tensor, shape):
    import numpy as np
    n = int(np.prod(shape))
    e = np.arange(n, dtype=np.int64)
    return ((((tensor + 1) * 7919 + e * 104729) % 2003 - 1001) / 4093).astype(np.float32).reshape(shape)


CASES = {
    "gpt2": dict(arch="gpt2", L=2, H=2, K=2, D=32, C=64, F=256, T=48, tied=True),
    "llama": dict(arch="llama", L=2, H=4, K=2, D=16, C=64, F=96, T=48, tied=False),
    "llama3": dict(arch="llama", L=1, H=2, K=1, D=32, C=64, F=72, T=256, tied=True, theta=500000.0,
                   llama3=(8.0, 1.0, 4.0, 32)),
    "linear": dict(arch="llama", L=1, H=2, K=2, D=32, C=64, F=96, T=64, tied=True, linear=4.0),
    "qwen2": dict(arch="qwen2", L=2, H=4, K=2, D=16, C=64, F=96, T=48, tied=True, epsilon=1e-6),
    "qwen3": dict(arch="qwen3", L=2, H=4, K=2, D=32, C=64, F=96, T=48, tied=False),
    "bytes": dict(arch="gpt2", L=1, H=2, K=2, D=16, C=32, F=128, T=16, tied=True, V=330, tokenizer="byte_level"),
    "pieces": dict(arch="llama", L=1, H=2, K=2, D=16, C=32, F=96, T=16, tied=True, V=430, tokenizer="sentencepiece"),
}
FIXTURES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "test", "fixtures", "gguf")


# Our tensors in the order of the flat vector: Hugging Face's name -> array, split as Hugging Face does.
def hugging_face_tensors(c):
    import numpy as np
    V, gpt2 = c.get("V", 256), c["arch"] == "gpt2"
    H, K, D, C, F = (c[k] for k in "HKDCF")
    count = [0]

    def take(*shape):
        count[0] += 1
        return formula(count[0] - 1, shape)
    out = []
    out.append(("transformer.wte.weight" if gpt2 else "model.embed_tokens.weight", take(V, C)))
    if gpt2:
        out.append(("transformer.wpe.weight", take(c["T"], C)))
    for l in range(c["L"]):
        if gpt2:
            names = [("ln_1.weight", (C,)), ("ln_1.bias", (C,)), ("attn.c_attn.weight", (3 * C, C)),
                     ("attn.c_attn.bias", (3 * C,)), ("attn.c_proj.weight", (C, C)), ("attn.c_proj.bias", (C,)),
                     ("ln_2.weight", (C,)), ("ln_2.bias", (C,)), ("mlp.c_fc.weight", (F, C)), ("mlp.c_fc.bias", (F,)),
                     ("mlp.c_proj.weight", (C, F)), ("mlp.c_proj.bias", (C,))]
            out += [("transformer.h.%d.%s" % (l, name), take(*shape)) for name, shape in names]
            continue
        block = "model.layers.%d." % l
        out.append((block + "input_layernorm.weight", take(C)))
        cuts = [H * D, (H + K) * D]
        for kind, shape in (("weight", ((H + 2 * K) * D, C)), ("bias", ((H + 2 * K) * D,))):
            if kind == "bias" and c["arch"] != "qwen2":
                continue
            for part, rows in zip("qkv", np.split(take(*shape), cuts)):
                out.append((block + "self_attn.%s_proj.%s" % (part, kind), rows))
        if c["arch"] == "qwen3":
            out.append((block + "self_attn.q_norm.weight", take(D)))
            out.append((block + "self_attn.k_norm.weight", take(D)))
        out.append((block + "self_attn.o_proj.weight", take(C, H * D)))
        out.append((block + "post_attention_layernorm.weight", take(C)))
        gate, up = np.split(take(2 * F, C), 2)
        out += [(block + "mlp.gate_proj.weight", gate), (block + "mlp.up_proj.weight", up)]
        out.append((block + "mlp.down_proj.weight", take(C, F)))
    if gpt2:
        out += [("transformer.ln_f.weight", take(C)), ("transformer.ln_f.bias", take(C))]
    else:
        out.append(("model.norm.weight", take(C)))
    if not c["tied"]:
        out.append(("lm_head.weight", take(V, C)))
    return out


# As llama.cpp's converter does for the architecture llama.
def permute(weights, heads):
    return (weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:]).swapaxes(1, 2)
            .reshape(weights.shape))


def rope_divisors(D, theta, factor, low, high, original):
    import math
    divisors = []
    for i in range(D // 2):
        turns = original * theta ** (-2 * i / D) / (2 * math.pi)
        if turns <= low:
            divisors.append(factor)
        elif turns >= high:
            divisors.append(1.0)
        else:
            kept = (turns - low) / (high - low)
            divisors.append(1 / ((1 - kept) / factor + kept))
    return divisors


def bytes_vocabulary():
    visible = [b for b in range(256) if 32 < b < 127 or 160 < b < 173 or b > 173]
    others = [b for b in range(256) if b not in visible]
    return [chr(b) if b in visible else chr(256 + others.index(b)) for b in range(256)]


# The vocabulary of a directory as llama.cpp's converter writes it, from the files alone.
def write_tokenizer(w, directory, V):
    import gguf
    file = json.load(open(os.path.join(directory, "tokenizer.json"), encoding="utf-8"))
    config = json.load(open(os.path.join(directory, "tokenizer_config.json"), encoding="utf-8"))
    model, added = file["model"], {a["id"]: a for a in file["added_tokens"]}
    by_id = {i: t for t, i in model["vocab"].items()}
    merges = [m if isinstance(m, list) else m.split(" ") for m in model["merges"]]
    pieces = bool(model.get("byte_fallback"))
    tokens, types = [], []
    for i in range(V):
        if i in added:
            tokens.append(added[i]["content"])
            types.append(3 if added[i]["special"] else 4)
            if pieces and tokens[-1] == model["unk_token"]:
                types[-1] = 2
        elif i in by_id:
            tokens.append(by_id[i])
            types.append(6 if pieces and tokens[-1].startswith("<0x") else 1)
        else:
            tokens.append("[PAD%d]" % i)
            types.append(5)
    ids = {t: i for i, t in enumerate(tokens)}
    w.add_tokenizer_model("llama" if pieces else "gpt2")
    w.add_tokenizer_pre("default" if pieces else "llama-bpe")
    w.add_token_list(tokens)
    w.add_token_types(types)
    if pieces:
        scores = [-float(len(merges))] * V
        for rank in reversed(range(len(merges))):
            scores[ids["".join(merges[rank])]] = -float(rank)
        w.add_token_scores(scores)
    else:
        w.add_token_merges([" ".join(m) for m in merges])
    w.add_bos_token_id(ids[config["bos_token"]])
    w.add_eos_token_id(ids[config["eos_token"]])
    w.add_add_bos_token(True)
    if pieces:
        w.add_unk_token_id(ids[model["unk_token"]])
        w.add_add_space_prefix(True)
    if "chat_template" in config:
        w.add_chat_template(config["chat_template"])


# Small tokenizers of both kinds, tracked for test_gguf.c.
def fixtures():
    with tempfile.TemporaryDirectory() as folder:
        t = byte_level(LLAMA3, ["<|begin|>", "<|end|>"], ignore_merges=True, begin="<|begin|>", size=310)
        t.add_tokens(["[added]"])
        save_tokenizer(t, os.path.join(FIXTURES, "byte_level"), "<|begin|>", "<|end|>", CHAT)
        t = sentencepiece_like(False, folder, size=420)
        save_tokenizer(t, os.path.join(FIXTURES, "sentencepiece"), "<s>", "</s>", None)


def write_case(path, c, dtype):
    import gguf
    import numpy as np

    class NoStrings(list):
        pass

    class Writer(gguf.GGUFWriter):  # the package's own writer refuses empty arrays
        def _pack_val(self, value, *arguments, **named):
            if isinstance(value, NoStrings):
                return struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, 0)
            return super()._pack_val(value, *arguments, **named)
    file_types = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
    wanted = {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16,
              "bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}[dtype]
    w = Writer(path, c["arch"])
    w.add_file_type(file_types[dtype])
    w.add_quantization_version(2)
    w.add_context_length(c["T"])
    w.add_embedding_length(c["C"])
    w.add_block_count(c["L"])
    w.add_feed_forward_length(c["F"])
    w.add_head_count(c["H"])
    w.add_head_count_kv(c["K"])
    w.add_vocab_size(c.get("V", 256))
    if c["arch"] == "gpt2":
        w.add_layer_norm_eps(1e-5)
    else:
        w.add_layer_norm_rms_eps(c.get("epsilon", 1e-5))
        w.add_key_length(c["D"])
        w.add_value_length(c["D"])
        w.add_rope_dimension_count(c["D"])
        w.add_rope_freq_base(c.get("theta", 10000.0))
    if "linear" in c:
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(c["linear"])
    if "tokenizer" in c:
        write_tokenizer(w, os.path.join(FIXTURES, c["tokenizer"]), c["V"])
    else:
        w.add_tokenizer_model("gpt2")
        w.add_tokenizer_pre("gpt-2")
        w.add_token_list(bytes_vocabulary())
        w.add_token_types([1] * 256)
        w.add_key_value("tokenizer.ggml.merges", NoStrings(), gguf.GGUFValueType.ARRAY)
        w.add_bos_token_id(0)
        w.add_eos_token_id(0)
        w.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, c["arch"].upper()), c["L"])
    if "llama3" in c:
        w.add_tensor("rope_freqs.weight", np.array(rope_divisors(c["D"], c["theta"], *c["llama3"]), dtype=np.float32))
    for name, value in hugging_face_tensors(c):
        if c["arch"] == "llama" and ".q_proj." in name:
            value = permute(value, c["H"])
        if c["arch"] == "llama" and ".k_proj." in name:
            value = permute(value, c["K"])
        kind = wanted
        if kind == gguf.GGMLQuantizationType.Q8_0 and value.shape[-1] % 32 != 0:
            kind = gguf.GGMLQuantizationType.F16
        if value.ndim == 1 or name.endswith("wpe.weight"):
            kind = gguf.GGMLQuantizationType.F32
        value = np.ascontiguousarray(value)
        w.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), gguf.quants.quantize(value, kind),
                     raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def hashes():
    import xxhash
    with tempfile.TemporaryDirectory() as folder:
        for name, c in CASES.items():
            found = []
            for dtype in ("f32", "f16", "bf16", "q8_0"):
                path = os.path.join(folder, name + "." + dtype)
                write_case(path, c, dtype)
                found.append("0x%016x" % xxhash.xxh64(open(path, "rb").read()).intdigest())
            print("%s {%s}" % (name, ", ".join(found)))


# ------------------------------------------------------------------------------------------------
# Tokenizers of each kind, small, with the published rules

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def training_text():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    files = sorted(glob.glob(os.path.join(root, "doc", "*.md")) + glob.glob(os.path.join(root, "llmtrain", "*.h")))
    return "".join(open(f, encoding="utf-8").read() for f in files)


def byte_level(pattern, specials, digits=False, nfc=False, ignore_merges=False, begin=None, size=700):
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        t.normalizer = normalizers.NFC()
    if pattern == GPT2 and digits:
        t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                   pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif pattern == GPT2:
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        t.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    t.train_from_iterator([training_text()], trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.add_special_tokens(specials)
    if begin:
        t.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=begin + " $A", pair=begin + " $A " + begin + " $B:1",
                                          special_tokens=[(begin, t.token_to_id(begin))])])
    return t


# A SentencePiece vocabulary, and the merges of its pieces by score, as transformers converts them.
def sentencepiece_like(metaspace, folder, size=900):
    import sentencepiece
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    text = os.path.join(folder, "sentences.txt")
    with open(text, "w", encoding="utf-8") as f:
        f.write(training_text())
    prefix = os.path.join(folder, "sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        input=text, model_prefix=prefix, vocab_size=size, model_type="bpe", byte_fallback=True, split_digits=True,
        allow_whitespace_only_pieces=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2)
    sp = sentencepiece.SentencePieceProcessor(model_file=prefix + ".model")
    vocab = {sp.id_to_piece(i): i for i in range(sp.get_piece_size())}
    merges = []
    for piece, i in vocab.items():
        if sp.is_byte(i) or sp.is_control(i) or sp.is_unknown(i):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-sp.get_score(i), vocab[left], vocab[right], left, right))
    merges = [(m[3], m[4]) for m in sorted(merges)]
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        t.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="first", split=False)
    else:
        t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    t.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                   decoders.Strip(" ", 1, 0)])
    t.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in ("<unk>", "<s>", "</s>")])
    t.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B:1",
                                                     special_tokens=[("<s>", vocab["<s>"])])
    return t


# ------------------------------------------------------------------------------------------------
# Models of each architecture, tiny, with random weights

SIZES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
             max_position_embeddings=256, initializer_range=0.2)


def model_config(name, vocab, begin, end):
    import transformers
    ends = dict(vocab_size=vocab, bos_token_id=begin, eos_token_id=end)
    if name == "gpt2":
        return transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2, **ends)
    if name == "llama":
        return transformers.LlamaConfig(num_key_value_heads=2, tie_word_embeddings=False, **SIZES, **ends)
    if name == "llama3":
        return transformers.LlamaConfig(
            num_key_value_heads=2, tie_word_embeddings=True, rope_theta=500000.0, **SIZES, **ends,
            rope_scaling=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
                              high_freq_factor=4.0, original_max_position_embeddings=32))
    if name == "linear":
        return transformers.LlamaConfig(num_key_value_heads=4, tie_word_embeddings=True, **SIZES, **ends,
                                        rope_scaling=dict(rope_type="linear", rope_theta=10000.0, factor=4.0))
    if name == "mistral":
        return transformers.MistralConfig(num_key_value_heads=2, sliding_window=None, **SIZES, **ends)
    if name == "qwen2":
        return transformers.Qwen2Config(num_key_value_heads=2, tie_word_embeddings=True, **SIZES, **ends)
    return transformers.Qwen3Config(num_key_value_heads=2, head_dim=32, tie_word_embeddings=False, **SIZES, **ends)


def make_tokenizer(name, folder):
    if name == "gpt2":
        return byte_level(GPT2, ["<|endoftext|>"]), None, "<|endoftext|>", None
    if name == "linear":
        return byte_level(GPT2, ["<|endoftext|>"], digits=True), None, "<|endoftext|>", None
    if name == "llama3":
        t = byte_level(LLAMA3, ["<|begin_of_text|>", "<|end_of_text|>"], ignore_merges=True, begin="<|begin_of_text|>")
        return t, "<|begin_of_text|>", "<|end_of_text|>", None
    if name in ("llama", "mistral"):
        return sentencepiece_like(name == "mistral", folder), "<s>", "</s>", None
    return byte_level(QWEN2, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], nfc=True), None, "<|endoftext|>", CHAT


def save_tokenizer(tokenizer, directory, begin, end, chat):
    os.makedirs(directory, exist_ok=True)
    tokenizer.save(os.path.join(directory, "tokenizer.json"), pretty=False)
    with open(os.path.join(directory, "tokenizer_config.json"), "w") as f:
        json.dump({k: v for k, v in dict(bos_token=begin, eos_token=end, chat_template=chat).items() if v}, f)


# Writes a Hugging Face directory; returns model and tokenizer.
def make_model(name, folder, directory):
    import torch
    import transformers
    tokenizer, begin, end, chat = make_tokenizer(name, folder)
    vocab = tokenizer.get_vocab_size() + (21 if name.startswith("qwen") else 0)
    ids = [None if x is None else tokenizer.token_to_id(x) for x in (begin, end)]
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(model_config(name, vocab, *ids)).float().eval()
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide mistakes
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.2 * torch.randn_like(p))
    model.save_pretrained(directory)
    save_tokenizer(tokenizer, directory, begin, end, chat)
    return model, tokenizer


# ------------------------------------------------------------------------------------------------
# Comparisons

failures = 0


def check(good, text):
    global failures
    failures += not good
    print("%s %s" % ("ok     " if good else "FAILED ", text), flush=True)


def run(*words):
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if done.returncode != 0:
        print("        %s: %s" % (" ".join(map(str, words)), done.stderr.strip()))
    return done


def open_llama(path):
    import llama_cpp
    return llama_cpp.Llama(path, n_ctx=256, n_batch=256, logits_all=True, verbose=False, n_threads=2, type_k=0,
                           type_v=0, flash_attn=False)


def llama_logits(llama, ids):
    import numpy as np
    llama.reset()
    llama.eval(ids)
    return np.array(llama.scores[:len(ids)], dtype=np.float64)


# Mean negative log-likelihood over windows of T + 1 tokens, as build/evaluate cuts them.
def llama_loss(llama, ids, T):
    import numpy as np
    total, count = 0.0, 0
    for first in range(0, len(ids) - T, T):
        window = ids[first:first + T + 1]
        logits = llama_logits(llama, window[:-1])
        top = logits.max(axis=1, keepdims=True)
        sums = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        total += float((sums - logits[np.arange(T), window[1:]]).sum())
        count += T
    return total / count, count


def greedy_llama(llama, ids, n):
    import numpy as np
    llama.reset()
    llama.eval(ids)
    out = []
    for _ in range(n):
        out.append(int(np.argmax(llama.scores[llama.n_tokens - 1])))
        llama.eval(out[-1:])
    return out


def greedy_transformers(model, ids, n):
    import torch
    ids = list(ids)
    margins = []
    with torch.no_grad():
        for _ in range(n):
            logits = model(torch.tensor([ids])).logits[0, -1]
            two = torch.topk(logits, 2)
            margins.append(float(two.values[0] - two.values[1]))
            ids.append(int(two.indices[0]))
    return ids[-n:], min(margins)


# The model's state with the weights as stored in a GGUF file.
def rounded_state(model, path):
    import gguf
    import torch
    config = model.config
    reader = gguf.GGUFReader(path)
    arch = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    layers = config.num_hidden_layers
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), layers)
    tensors = {t.name: t for t in reader.tensors}
    state = model.state_dict()
    for name in state:
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None or theirs not in tensors:
            assert name == "lm_head.weight" and config.tie_word_embeddings, name
            theirs = "token_embd.weight"
        t = tensors[theirs]
        value = torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type).copy()).float()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            value = value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
        if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            value = value.T
        state[name] = value.reshape(state[name].shape)
    return state


def sentences(count):
    generator = random.Random(3)
    text = training_text()
    extra = ["caf\u00e9 na\u00efve \u00df", "\u4f60\u597d\u4e16\u754c", "\U0001f600\U0001f680 ok", "tab\there",
             "1234567 89", "  two  spaces ", "line\n\nbreaks\r\n", "don't we'll I'VE", "x=y+z; // comment",
             "\u0440\u0443\u0441\u0441\u043a\u0438\u0439"]
    out = list(extra)
    for _ in range(count):
        at, n = generator.randrange(len(text) - 300), generator.randrange(1, 250)
        piece = text[at:at + n]
        if generator.random() < 0.3:
            piece += generator.choice(extra) + text[at + n:at + n + 20]
        out.append(piece)
    return out


def compare(name, build, folder):
    directory = os.path.join(folder, name)
    os.makedirs(directory)
    model, tokenizer = make_model(name, folder, directory)
    text = os.path.join(folder, name + ".txt")
    with open(text, "w", encoding="utf-8") as f:
        f.write(training_text()[:6000])
    for dtype in ("f32", "f16", "bf16", "q8_0"):
        out = os.path.join(folder, "%s-%s" % (name, dtype))
        done = run(build + "/export", "--init-from", directory, "--to", "gguf", "--dtype", dtype, "--dir", out)
        if done.returncode != 0:
            check(False, "%s %s is exported" % (name, dtype))
            continue
        path = os.path.join(out, "model.gguf")
        llama = open_llama(path)
        if dtype == "f32":
            wrong = 0
            # Metaspace adds no space before a text that begins with one; llama.cpp always does.
            strings = [s for s in sentences(2000) if name != "mistral" or s[0] != " "]
            for s in strings:
                ids = tokenizer.encode(s).ids
                wrong += llama.tokenize(s.encode(), add_bos=True, special=True) != ids
            check(wrong == 0, "%s: llama.cpp has the tokens of %d of %d texts" % (name, len(strings) - wrong,
                                                                                 len(strings)))
            chat = llama.metadata.get("tokenizer.chat_template")
            check(chat == (CHAT if name.startswith("qwen") else None), "%s: its chat template" % name)
            prompt = tokenizer.encode("The weights of a model").ids
            ours, margin = greedy_transformers(model, prompt, 64)
            check(greedy_llama(llama, prompt, 64) == ours,
                  "%s f32: 64 greedy tokens are those of transformers (smallest margin %.4f)" % (name, margin))
        rounded = os.path.join(folder, "%s-%s-rounded" % (name, dtype))
        before = {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(rounded_state(model, path))
        model.save_pretrained(rounded)
        model.load_state_dict(before)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            with open(os.path.join(directory, file)) as a, open(os.path.join(rounded, file), "w") as b:
                b.write(a.read())
        T = 128
        ids = tokenizer.encode(open(text, encoding="utf-8").read()).ids
        loss, count = llama_loss(llama, ids, T)
        done = run(build + "/evaluate", "--init-from", rounded, "--text", text, "--seq", T)
        result = json.loads(done.stdout) if done.returncode == 0 else dict(loss=math.nan, tokens=0)
        difference = abs(math.expm1(loss - result["loss"]))
        check(difference <= 0.005 and count == result["tokens"],
              "%s %s: perplexity %.3f of llama.cpp, %.3f of build/evaluate over %d tokens: %.4f%% apart" % (
                  name, dtype, math.exp(loss), math.exp(result["loss"]), count, 100 * difference))
        del llama


def compare_all(build, only):
    names = [only] if only else ["gpt2", "llama", "llama3", "linear", "mistral", "qwen2", "qwen3"]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            compare(name, build, folder)
    print("%d failed" % failures)
    sys.exit(failures > 0)


if __name__ == "__main__":
    sys.path = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
    flags = argparse.ArgumentParser()
    flags.add_argument("--hashes", action="store_true")
    flags.add_argument("--fixtures", action="store_true")
    flags.add_argument("--build", default="build")
    flags.add_argument("--only")
    flags = flags.parse_args()
    if flags.hashes:
        wants("gguf", "numpy", "xxhash")
        hashes()
    elif flags.fixtures:
        wants("tokenizers", "sentencepiece")
        fixtures()
    else:
        wants("gguf", "numpy", "torch", "transformers", "tokenizers", "sentencepiece", "llama_cpp")
        compare_all(flags.build, flags.only)
