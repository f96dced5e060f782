# Our GGUF files against programs that others wrote.
#
#   python3 dev/peers/gguf.py --hashes     hashes of the files of test_gguf.c, written by the gguf package (pip install
#                                          gguf xxhash numpy)
import argparse
import os
import struct
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
# --hashes: models whose weights are a formula, as in test_gguf.c; what they are called and how rows are interleaved
# follows the gguf package's own tables and llama.cpp's converter.

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
}


# Our tensors in the order of the flat vector: Hugging Face's name -> array, split as Hugging Face does.
def hugging_face_tensors(c):
    import numpy as np
    V, gpt2 = 256, c["arch"] == "gpt2"
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


def write_case(path, c, dtype):
    import gguf
    import numpy as np

    class NoStrings(list):
        pass

    class Writer(gguf.GGUFWriter):  # the package's own refuses empty arrays
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
    w.add_vocab_size(256)
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


if __name__ == "__main__":
    sys.path = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
    flags = argparse.ArgumentParser()
    flags.add_argument("--hashes", action="store_true")
    flags = flags.parse_args()
    wants("gguf", "numpy", "xxhash")
    hashes()
