"""Model import and export against transformers: the results of both with the same files.

    python3 dev/peers/models.py [--build build] [--work build/peers] [--only gpt2] [--fine-tune]
    python3 dev/peers/models.py --fixtures dev/test/fixtures/models

Makes small models with random weights (save_pretrained), and compares: the logits and the gradient of every weight of
our import; the export of that import (from_pretrained without missing or unexpected keys, the same greedy tokens, the
same loss). --fine-tune: ten steps of AdamW on a 30M Llama, in turn with a PyTorch loop on the same batches. --fixtures
writes the small models and transformers' results for them, which dev/test/test_convert.c checks without Python.
Needs make build/export build/model_dump-FP32 build/model_dump-BF16 build/train-FP32 build/generate-FP32.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys

sys.path = sys.path[1:]  # this folder has files named like packages
try:
    import numpy as np
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(0)

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(2)
failed = 0


def check(what, value, bound):
    """Prints whether value <= bound; false for NaN."""
    global failed
    good = value <= bound
    failed += not good
    print(f"{'ok    ' if good else 'FAILED'}  {what:<58} {value:.3g} (bound {bound:.3g})", flush=True)


def llama(**more):
    return dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
                max_position_embeddings=128, vocab_size=300, rope_theta=10000.0, bos_token_id=1, eos_token_id=2) | more


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
MODELS = {
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=128, vocab_size=300,
                                            bos_token_id=0, eos_token_id=0),
    "gpt2_untied": lambda: transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, vocab_size=300,
                                                   n_inner=100, tie_word_embeddings=False, bos_token_id=0,
                                                   eos_token_id=0),
    "llama": lambda: transformers.LlamaConfig(**llama()),
    "llama_tied": lambda: transformers.LlamaConfig(**llama(tie_word_embeddings=True, rope_scaling=LLAMA3)),
    "llama_linear": lambda: transformers.LlamaConfig(
        **llama(num_key_value_heads=4, rope_scaling=dict(rope_type="linear", factor=4.0))),
    "llama_wide_heads": lambda: transformers.LlamaConfig(**llama(head_dim=32)),
    "mistral": lambda: transformers.MistralConfig(**llama(num_key_value_heads=1, sliding_window=None)),
    "qwen2": lambda: transformers.Qwen2Config(**llama(rope_theta=1e6)),
    "qwen2_tied": lambda: transformers.Qwen2Config(**llama(tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3Config(**llama(head_dim=32, rope_theta=1e6)),
    "qwen3_tied": lambda: transformers.Qwen3Config(**llama(head_dim=16, tie_word_embeddings=True)),
}


def make(config, directory, seed=0, **options):
    """A model with random weights, all far from their usual initial values, saved in directory."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.3 / p.shape[-1] ** 0.5 if p.dim() > 1 else 0.1) + (1.0 if "norm" in name
                    and p.dim() == 1 and "bias" not in name or ".ln_" in name and "weight" in name else 0.0))
    model.eval()
    model.save_pretrained(directory, **options)
    return model


def run(*words, quiet=True):
    result = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if result.returncode != 0:
        print(result.stdout, result.stderr)
        sys.exit(f"failed: {' '.join(map(str, words))}")
    return result.stdout


def batch_of(vocab, B=2, T=48, seed=7):
    return np.random.default_rng(seed).integers(0, vocab, (B, T + 1)).astype(np.int32)


def reference(model, batch):
    """Logits, loss and gradients of a batch (B, T + 1), by PyTorch."""
    x, y = torch.tensor(batch[:, :-1]).long(), torch.tensor(batch[:, 1:]).long()
    model.zero_grad()
    logits = model(x).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), y.reshape(-1))
    loss.backward()
    grads = {n: p.grad.detach().float().numpy() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach().float().reshape(-1, logits.shape[-1]).numpy(), loss.item(), grads


def ours(build, precision, directory, batch, work):
    batch.tofile(f"{work}/batch.bin")
    run(f"{build}/model_dump-{precision}", "--init-from", directory, "--tokens", f"{work}/batch.bin", "--batch",
        batch.shape[0], "--seq", batch.shape[1] - 1, "--to", f"{work}/dump.safetensors")
    return load_file(f"{work}/dump.safetensors")


def relative(a, b):
    """Norm of the difference over the norm of b; infinite where either has a NaN."""
    value = float(np.linalg.norm(a.astype(np.float64) - b) / max(np.linalg.norm(b.astype(np.float64)), 1e-30))
    return value if value == value else float("inf")


def compare_import(name, model, directory, build, work):
    batch = batch_of(model.config.vocab_size)
    logits, loss, grads = reference(model, batch)
    dump = ours(build, "FP32", directory, batch, work)
    check(f"{name}: logits, largest difference", float(np.abs(dump["logits"] - logits).max()), 1e-4)
    check(f"{name}: loss", abs(float(dump["loss"][0]) - loss), 1e-5)
    missing = set(grads) ^ {k[5:] for k in dump if k.startswith("grad.")}
    check(f"{name}: weights without a partner {sorted(missing)[:3]}", len(missing), 0)
    worst = max((relative(dump["grad." + k], g), k) for k, g in grads.items() if "grad." + k in dump)
    check(f"{name}: gradients, worst is {worst[1]}", worst[0], 1e-4)
    # 16 bits: 8 of mantissa, and a few roundings per layer.
    half = ours(build, "BF16", directory, batch, work)
    bound = 2.0 ** -8 * 4 * model.config.num_hidden_layers ** 0.5
    check(f"{name}: BF16 logits, relative", relative(half["logits"], logits), bound)
    worst = max((relative(half["grad." + k], g), k) for k, g in grads.items() if "grad." + k in half)
    check(f"{name}: BF16 gradients, worst is {worst[1]}", worst[0], 4 * bound)


def load(directory):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True,
                                                                    torch_dtype=torch.float32)
    return model.eval(), sum(len(v) for v in info.values())


def greedy(model, prompt, tokens):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0].tolist()


def compare_export(name, model, directory, build, work):
    saved = load_file(f"{directory}/model.safetensors")
    out = f"{work}/{name}.out"
    for dtype, more in [("f32", []), ("f32", ["--shard-size", "0.0001"]), ("bf16", []), ("f16", [])]:
        shutil.rmtree(out, ignore_errors=True)
        run(f"{build}/export", "--init-from", directory, "--to", "hf", "--dtype", dtype, "--dir", out, *more)
        again, problems = load(out)
        what = f"{name}: export {dtype}{' in shards' if more else ''}"
        check(f"{what}: missing or unexpected keys", problems, 0)
        if dtype != "f32":
            kind = torch.bfloat16 if dtype == "bf16" else torch.float16
            state = again.state_dict()
            wrong = sum(not torch.equal(state[k], p.to(kind).float()) for k, p in model.state_dict().items())
            check(f"{what}: tensors that are not the rounded ones", wrong, 0)
            continue
        if not more:
            written = load_file(f"{out}/model.safetensors")
            check(f"{what}: tensors that are not equal to the bit",
                  sum(k not in written or written[k].tobytes() != saved[k].tobytes() for k in saved) +
                  len(set(written) - set(saved)), 0)
        prompt = batch_of(model.config.vocab_size)[0, :16].tolist()
        differ = sum(a != b for a, b in zip(greedy(model, prompt, 64), greedy(again, prompt, 64)))
        check(f"{what}: of 64 greedy tokens differ", differ, 0)
        batch = batch_of(model.config.vocab_size, 4, 64, 11)
        with torch.no_grad():
            check(f"{what}: loss", abs(reference_loss(model, batch) - reference_loss(again, batch)), 1e-5)
    if name == "gpt2":
        for step in [("--to", "llm.c", "--dir", f"{work}/llmc"), ("--to", "hf", "--dir", f"{work}/llmc.hf")]:
            shutil.rmtree(step[3], ignore_errors=True)
            run(f"{build}/export", "--init-from", directory if step[1] == "llm.c" else f"{work}/llmc/model.bin", *step)
        written = load_file(f"{work}/llmc.hf/model.safetensors")
        check("gpt2: through llm.c's format, tensors that are not equal to the bit",
              sum(written[k].tobytes() != saved[k].tobytes() for k in saved), 0)


def reference_loss(model, batch):
    x, y = torch.tensor(batch[:, :-1]).long(), torch.tensor(batch[:, 1:]).long()
    logits = model(x).logits
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1)).item()


def compare_run(build, work):
    """A run of two ranks with ZeRO 2 loads a model, does a step, and is exported: transformers gets the same loss."""
    directory, out = f"{work}/llama_tied", f"{work}/run"
    for path in [out, f"{work}/run.hf"]:
        shutil.rmtree(path, ignore_errors=True)
    write_shard(f"{work}/tokens.bin", np.random.default_rng(3).integers(0, 300, 40000))
    run(f"{build}/train-FP32", "--data", f"{work}/tokens.bin", "--val", f"{work}/tokens.bin", "--val-windows", 8,
               "--init-from", directory, "--out", out, "--seq", 64, "--batch", 2, "--steps", 3, "--lr", "1e-3",
               "--warmup", 0, "--ranks", 2, "--zero", 2)
    val = [json.loads(line) for line in open(f"{out}/metrics.jsonl")][-1]["val_loss"]
    run(f"{build}/export", "--out", out, "--to", "hf", "--dir", f"{work}/run.hf")
    model, problems = load(f"{work}/run.hf")
    check("export of a run of 2 ranks with ZeRO 2: missing or unexpected keys", problems, 0)
    tokens = np.fromfile(f"{work}/tokens.bin", dtype=np.uint16)[512:]
    windows = np.stack([tokens[i * 64:i * 64 + 65] for i in range(8)]).astype(np.int32)
    with torch.no_grad():
        check("export of a run of 2 ranks with ZeRO 2: validation loss",
              abs(reference_loss(model, windows) - val), 1e-5)


def write_shard(path, tokens):
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(tokens)
    with open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(np.asarray(tokens, dtype=np.uint16).tobytes())


def fine_tune(build, work):
    """Ten steps of AdamW on all weights of a 30M Llama, on the same batches."""
    config = transformers.LlamaConfig(hidden_size=384, num_hidden_layers=10, num_attention_heads=6,
                                      num_key_value_heads=2, intermediate_size=1024, max_position_embeddings=256,
                                      vocab_size=16384, tie_word_embeddings=False, rope_theta=10000.0)
    directory, out = f"{work}/llama_30m", f"{work}/tuned"
    shutil.rmtree(out, ignore_errors=True)
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory)
    print(f"fine-tuning a Llama of {sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
    B, T, STEPS, LR = 2, 64, 10, 3e-4
    write_shard(f"{work}/tune.bin", np.random.default_rng(5).integers(0, config.vocab_size, 5000))
    run(f"{build}/model_dump-FP32", "--data", f"{work}/tune.bin", "--batch", B, "--seq", T, "--steps", STEPS, "--to",
        f"{work}/batches.safetensors")
    batches = load_file(f"{work}/batches.safetensors")
    run(f"{build}/train-FP32", "--data", f"{work}/tune.bin", "--init-from", directory, "--out", out, "--seq", T,
               "--batch", B, "--steps", STEPS, "--lr", LR, "--warmup", 0, "--schedule", "constant", "--beta1", 0.9,
               "--beta2", 0.95, "--epsilon", "1e-8", "--weight-decay", 0.1, "--clip", 1, "--spike-sigma", 0)
    losses = [json.loads(line)["loss"] for line in open(f"{out}/metrics.jsonl")][:STEPS]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    adamw = torch.optim.AdamW([dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)], lr=LR,
                              betas=(0.9, 0.95), eps=1e-8)
    worst = 0.0
    model.train()
    for step in range(STEPS):
        x, y = (torch.tensor(batches[name][step]).long() for name in ("tokens", "targets"))
        logits = model(x).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))
        adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        print(f"    step {step + 1:2}: PyTorch {loss.item():.6f}, ours {losses[step]:.6f}")
        worst = max(worst, abs(loss.item() - losses[step])) if losses[step] == losses[step] else float("nan")
    check("fine-tuning a 30M Llama: losses of 10 steps, largest difference", worst, 1e-4)


def write_fixtures(directory):
    """Small models in the forms of published ones, each with transformers' results."""
    small = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                 intermediate_size=24, max_position_embeddings=32, vocab_size=40, bos_token_id=1, eos_token_id=2)
    llama3 = LLAMA3 | dict(original_max_position_embeddings=8)
    forms = {  # the type of the weights, the size of a shard
        "gpt2": (transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=16, vocab_size=40, bos_token_id=0,
                                         eos_token_id=0), torch.float32, "1GB"),
        "llama": (transformers.LlamaConfig(**small, tie_word_embeddings=True, rope_scaling=llama3), torch.bfloat16,
                  "3KB"),
        "llama_linear": (transformers.LlamaConfig(**small, rope_scaling=dict(rope_type="linear", factor=4.0)),
                         torch.float32, "1GB"),
        "mistral": (transformers.MistralConfig(**small, sliding_window=None), torch.float16, "1GB"),
        "qwen2": (transformers.Qwen2Config(**small, tie_word_embeddings=True), torch.float32, "1GB"),
        "qwen3": (transformers.Qwen3Config(**small, head_dim=8), torch.bfloat16, "1GB"),
    }
    for name, (config, dtype, shard) in forms.items():
        where = f"{directory}/{name}"
        shutil.rmtree(where, ignore_errors=True)
        model = make(config, where).to(dtype)
        shutil.rmtree(where)
        model.save_pretrained(where, max_shard_size=shard)
        os.remove(f"{where}/generation_config.json")
        if name == "gpt2":
            as_published(where)
        if name in ("llama_linear", "mistral"):
            as_before_5(where)
        tokens = batch_of(config.vocab_size, 2, 12)
        logits, loss, _ = reference(load(where)[0], tokens)
        save_file({"tokens": tokens, "logits": logits, "loss": np.array([loss], np.float32)},
                  f"{where}/expected.safetensors")
    size = sum(os.path.getsize(os.path.join(folder, f)) for folder, _, files in os.walk(directory) for f in files)
    print(f"{directory}: {size} bytes")


def as_published(where):
    """GPT-2's files of 2019: names without the prefix, masks as buffers, keys of that time."""
    weights = {k.removeprefix("transformer."): v for k, v in load_file(f"{where}/model.safetensors").items()}
    config = json.load(open(f"{where}/config.json"))
    for layer in range(config["n_layer"]):
        weights[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 16, 16), np.float32))
    save_file(weights, f"{where}/model.safetensors", metadata={"format": "pt"})
    for key in ("dtype", "n_inner", "tie_word_embeddings", "add_cross_attention", "scale_attn_weights",
                "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "pad_token_id"):
        config.pop(key, None)
    config |= dict(n_ctx=16, task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}})
    json.dump(config, open(f"{where}/config.json", "w"), indent=2)


def as_before_5(where):
    """The keys of transformers 4: rope_theta and rope_scaling, torch_dtype."""
    config = json.load(open(f"{where}/config.json"))
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else {"type": rope["rope_type"],
                                                                         "factor": rope["factor"]}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("head_dim", None)
    json.dump(config, open(f"{where}/config.json", "w"), indent=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    parser.add_argument("--work", default="build/peers")
    parser.add_argument("--only", default="")
    parser.add_argument("--fine-tune", action="store_true")
    parser.add_argument("--fixtures")
    o = parser.parse_args()
    os.makedirs(o.work, exist_ok=True)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    if o.fixtures:
        write_fixtures(o.fixtures)
        sys.exit(0)
    for key, config in MODELS.items():
        if o.only and o.only not in key:
            continue
        where = f"{o.work}/{key}"
        shutil.rmtree(where, ignore_errors=True)
        made = make(config(), where)
        compare_import(key, made, where, o.build, o.work)
        compare_export(key, made, where, o.build, o.work)
    if not o.only:
        compare_run(o.build, o.work)
    if o.fine_tune:
        fine_tune(o.build, o.work)
    print(f"{failed} failed")
    sys.exit(failed > 0)
