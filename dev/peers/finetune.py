"""Fixtures of other programs for fine-tuning.

    python3 dev/peers/finetune.py            compares them with the files in dev/test/fixtures
    python3 dev/peers/finetune.py --write    makes those files

nf4        dev/test/fixtures/nf4.safetensors, for dev/test/test_nf4.c: what bitsandbytes 0.50 makes of vectors of
           numbers that both programs compute: codes, scales, codes of scales, and the numbers that they stand for
llama_nf4  dev/test/fixtures/models/llama_nf4, for dev/test/test_convert.c: a small Llama that transformers has
           quantized with bitsandbytes and saved, and the logits of transformers for its weights, dequantized

pip install numpy torch safetensors bitsandbytes transformers accelerate. Says "skipped" without them. All on a CPU.

Codes of scales come from bitsandbytes' kernel in PyTorch ("default"), which, like that for CUDA, takes the nearest
number. Its C++ kernel for CPUs finds them through a table of 65,536 entries: the script prints how many differ. With
AVX-512 its kernel that dequantizes reads the wrong scales for matrices whose columns are a multiple of 16, but not of
64: there are none here.
"""

import argparse
import os
import sys
import tempfile

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # which would compile a few lines for a minute
HERE = os.path.dirname(os.path.abspath(__file__))
FIXTURES = os.path.join(HERE, "..", "test", "fixtures")
sys.path = [p for p in sys.path if os.path.abspath(p or ".") != HERE]  # this folder has files named like packages
try:
    import bitsandbytes
    import numpy as np
    import torch
    import transformers
    from bitsandbytes import functional
    from safetensors.torch import load_file, save_file
except ImportError as missing:
    print("skipped: %s" % missing)
    sys.exit(0)

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def numbers(n, seed):
    """Sums of three uniform numbers, exact in float32: nearly normal, with a standard deviation of 1/2."""
    total = np.zeros(n, np.float32)
    for k in range(3):
        x = (np.arange(n, dtype=np.uint32) + np.uint32(seed * 100003 + k * 50021)) * np.uint32(2654435761)
        x = (x ^ x >> np.uint32(15)) * np.uint32(2246822519)
        x = (x ^ x >> np.uint32(13)) * np.uint32(3266489917)
        total += (x >> np.uint32(16)).astype(np.float32) / np.float32(65536) - np.float32(0.5)
    return total


def checksum(x):
    """The sum of (i + 1) times the bits of element i, modulo 2^64."""
    bits = x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16).numpy().reshape(-1)
    bits = bits.view(np.uint32 if x.dtype == torch.float32 else np.uint16).astype(np.uint64)
    return torch.from_numpy(np.array([(bits * np.arange(1, len(bits) + 1, dtype=np.uint64)).sum()]).view(np.int64))


# ---- The operation

def middles():
    """A block whose scale is 1: the middles between the numbers, and their neighbors."""
    table = functional.get_4bit_type("nf4", device="cpu").numpy()
    between = (table[1:] + table[:-1]) / np.float32(2)
    return np.concatenate([np.ones(1, np.float32), between, np.nextafter(between, np.float32(2)),
                           np.nextafter(between, np.float32(-2)), table])


def vectors():
    zeros = numbers(5 * 64, 3)
    zeros[64:128] = 0
    rounded = torch.from_numpy(numbers(64 * 90, 4)).bfloat16().float().numpy()
    return {"floats": numbers(64 * 259 + 37, 1),        # two blocks of scales
            "bf16": rounded,                            # the sum of its scales is exact in float32
            "zeros": zeros, "middles": middles(),
            "tiny": numbers(127, 5) * np.float32(2.0 ** -100), "one": numbers(1, 6), "seven": numbers(7, 7),
            "equal": np.full(192, 0.25, np.float32)}    # the scales less their mean are 0


def quantize_scales(scales):
    default = torch.ops.bitsandbytes.quantize_blockwise.default
    code = functional.create_dynamic_map()
    codes, positive = default._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, scales, code, 256)
    library, nested = default(scales, code, 256)
    if (nested.clamp(min=1e-38) != positive.clamp(min=1e-38)).any():
        raise SystemExit("the two kernels of bitsandbytes find other scales of scales")
    return codes, nested, code, int((codes != library).sum())


def nf4():
    made, differ, count = {}, 0, 0
    for name, values in vectors().items():
        x = torch.from_numpy(values)
        packed, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=False)
        offset = state.absmax.mean()
        codes, nested, code, other = quantize_scales(state.absmax - offset)
        differ, count = differ + other, count + len(codes)
        made[name + ".codes"] = packed.reshape(-1)
        made[name + ".scales"] = state.absmax
        made[name + ".scale_codes"] = codes
        made[name + ".nested"] = torch.cat([nested, offset.reshape(1)])
        for kind in (torch.float32, torch.bfloat16):
            for doubled in (False, True):
                state2 = functional.QuantState(absmax=nested, code=code, blocksize=256, dtype=torch.float32)
                full = functional.QuantState(absmax=codes if doubled else state.absmax, shape=x.shape, dtype=kind,
                                             code=state.code, blocksize=64, quant_type="nf4",
                                             offset=offset if doubled else None, state2=state2 if doubled else None)
                out = functional.dequantize_4bit(packed, full)
                suffix = ".%s_%s" % ("double" if doubled else "single", "f32" if kind == torch.float32 else "bf16")
                made[name + suffix] = out if len(values) <= 127 else checksum(out)
    print("bitsandbytes %s: its kernel for CPUs has other codes for %d of %d scales"
          % (bitsandbytes.__version__, differ, count))
    return {"nf4.safetensors": made}


# ---- A checkpoint

SIZES = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
             max_position_embeddings=32, vocab_size=40, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True)
SINGLE = ("self_attn.o_proj", "mlp.down_proj")  # quantized once, the others twice


def quantized(source, folder, doubled):
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                          bnb_4bit_use_double_quant=doubled, bnb_4bit_compute_dtype=torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=how, device_map="cpu",
                                                              dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model, load_file(os.path.join(folder, "model.safetensors"))


def llama_nf4():
    plain = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES)).bfloat16()
    with torch.no_grad():
        for seed, (name, p) in enumerate(plain.named_parameters()):
            values = torch.from_numpy(numbers(p.numel(), 20 + seed)).reshape(p.shape)
            p.copy_(1 + values / 4 if "norm" in name else values / 4)
    with tempfile.TemporaryDirectory() as work:
        plain.save_pretrained(work)
        saved = []
        for doubled in (True, False):
            folder = os.path.join(work, str(doubled))
            saved.append(quantized(work, folder, doubled))
            with open(os.path.join(folder, "config.json")) as file:
                config = file.read()
            if doubled:
                text = config
    tensors = {}
    for i, (_, file) in enumerate(saved):
        tensors.update({k: v for k, v in file.items() if any(s in k for s in SINGLE) == (i == 1)})
    with torch.no_grad():
        weights = dict(plain.named_parameters())
        for i, (model, _) in enumerate(saved):
            for name, p in model.named_parameters():
                if not isinstance(p, bitsandbytes.nn.Params4bit) or any(s in name for s in SINGLE) != (i == 1):
                    continue
                weights[name].copy_(functional.dequantize_4bit(p.data, p.quant_state))
        expected = {"weight." + name: checksum(p.detach()) for name, p in weights.items()}
        tokens = torch.from_numpy(np.arange(26).reshape(2, 13) * 7 % 40)
        exact = transformers.AutoModelForCausalLM.from_config(plain.config).float()  # whose angles of RoPE are, too
        exact.load_state_dict(plain.state_dict())
        logits = exact(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 40), tokens[:, 1:].reshape(-1))
    expected.update(tokens=tokens.to(torch.int32), logits=logits, loss=loss.reshape(1))
    folder = os.path.join("models", "llama_nf4")
    return {os.path.join(folder, "model.safetensors"): tensors, os.path.join(folder, "expected.safetensors"): expected,
            os.path.join(folder, "config.json"): text}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    wrong = 0
    for section in (nf4, llama_nf4):
        for name, made in section().items():
            path = os.path.join(FIXTURES, name)
            if options.write:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                if isinstance(made, str):
                    with open(path, "w") as file:
                        file.write(made)
                else:
                    save_file({k: v.contiguous() for k, v in made.items()}, path, {"format": "pt"})
                os.chmod(path, 0o644)
                print("%s: %d bytes" % (os.path.relpath(path), os.path.getsize(path)))
                continue
            if isinstance(made, str):
                with open(path) as file:
                    good = file.read() == made
            else:
                there = load_file(path)
                exact = [k for k in made if k not in ("logits", "loss")]  # those differ between processors
                good = there.keys() == made.keys() and all(torch.equal(there[k], made[k]) for k in exact)
            wrong += not good
            print("%s %s is what this makes" % ("ok    " if good else "FAILED", name))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
