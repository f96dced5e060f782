"""LoRA against PEFT: gradients and training in float64, adapters in both directions, merged weights.

    python3 dev/peers/lora.py --fixtures dev/test/fixtures/lora
    python3 dev/peers/lora.py [--build build] [--work build/peers-lora]

--fixtures writes small models with adapters, and what PEFT computes with them in float64: the loss, the gradient of
every matrix of a pair, the matrices after five steps of AdamW, the merged weights. dev/test/test_lora.c checks them
without Python. Otherwise programs of the build and PEFT read each other's files: an adapter of a run of ours opens in
PeftModel.from_pretrained without a missing or unexpected key, and the logits are equal; an adapter of PEFT (DoRA, rank
and alpha patterns, replaced modules too) gives our programs the same logits; merged exports equal merge_and_unload.
Needs make build/train-FP32 build/export build/model_dump-FP32, and pip install peft transformers torch.
"""

import argparse
import json
import os
import shutil
import sys

sys.path = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
try:
    import numpy as np
    import peft
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(0)
sys.path.append(os.path.dirname(os.path.abspath(__file__)))
from models import batch_of, check, load, make, run, write_shard  # noqa: E402
import models  # noqa: E402

small = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
             max_position_embeddings=32, vocab_size=40, bos_token_id=1, eos_token_id=2)
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**small),
    "llama_tied": lambda: transformers.LlamaConfig(**small, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**small),
    "gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, n_positions=32, vocab_size=40,
                                            bos_token_id=0, eos_token_id=0),
}
ALL = {"gpt2": ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"]}
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = [("llama", "all", False), ("llama", "qv", True), ("llama_tied", "qv", False), ("qwen2", "all", True),
         ("gpt2", "all", False), ("gpt2", "qv", True)]


def targets_of(model, which):
    return ALL.get(model, LLAMA) if which == "all" else ["c_attn"] if model == "gpt2" else ["q_proj", "v_proj"]


def adapted(base, seed=1, **options):
    """A model of PEFT whose pairs are all far from zero."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", **(dict(r=4, lora_alpha=8) | options))
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3 / p.shape[1] ** 0.5)
            elif "magnitude" in name or "modules_to_save" in name:
                p.mul_(1 + 0.1 * torch.randn(p.shape, generator=generator))
    return model.eval()


def loss_of(model, tokens):
    x, y = torch.tensor(tokens[:, :-1]).long(), torch.tensor(tokens[:, 1:]).long()
    logits = model(x).logits
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


def ours_name(name):
    return name.removeprefix("base_model.model.").replace(".default", "").removesuffix(".weight")


def write_fixtures(directory):
    shutil.rmtree(directory, ignore_errors=True)
    for name in MODELS:
        where = f"{directory}/{name}"
        model = make(MODELS[name](), where).to(torch.bfloat16)
        shutil.rmtree(where)
        model.save_pretrained(where)
        os.remove(f"{where}/generation_config.json")
    for name, which, rs in CASES:
        where = f"{directory}/{name}_{which}{'_rs' if rs else ''}"
        base, _ = load(f"{directory}/{name}")
        model = adapted(base, target_modules=targets_of(name, which), use_rslora=rs)
        model.save_pretrained(where)
        for extra in ["README.md"]:
            if os.path.exists(f"{where}/{extra}"):
                os.remove(f"{where}/{extra}")
        config = json.load(open(f"{where}/adapter_config.json"))
        config["base_model_name_or_path"] = name
        json.dump(config, open(f"{where}/adapter_config.json", "w"), indent=2)
        model = model.double()
        tokens = batch_of(base.config.vocab_size, 2, 12)
        expected = {"tokens": tokens}
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        adamw = torch.optim.AdamW(trained.values(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for step in range(5):
            adamw.zero_grad()
            loss = loss_of(model, tokens)
            loss.backward()
            if step == 0:
                expected["loss"] = np.array([loss.item()], np.float64)
                for n, p in trained.items():
                    expected["grad." + ours_name(n)] = p.grad.float().numpy().copy()
            adamw.step()
        for n, p in trained.items():
            expected["after." + ours_name(n)] = p.detach().float().numpy().copy()
        again = peft.PeftModel.from_pretrained(load(f"{directory}/{name}")[0], where).double()
        again = again.merge_and_unload().float()
        kept = "c_attn" if name == "gpt2" else "v_proj"
        for n, p in again.named_parameters():
            if kept in n and n.endswith("weight"):
                expected["merged." + n] = p.detach().numpy()
        save_file(expected, f"{where}/expected.safetensors")
    size = sum(os.path.getsize(os.path.join(folder, f)) for folder, _, files in os.walk(directory) for f in files)
    print(f"{directory}: {size} bytes")


def logits_of(model, tokens):
    with torch.no_grad():
        logits = model(torch.tensor(tokens[:, :-1]).long()).logits
    return logits.reshape(-1, logits.shape[-1]).float().numpy()


def ours(build, directory, tokens, work):
    """Our logits of a directory of Hugging Face."""
    return models.ours(build, "FP32", directory, tokens, work)["logits"]


def largest(a, b):
    value = float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())
    return value if value == value else float("inf")


def export(build, *words):
    shutil.rmtree(words[words.index("--dir") + 1], ignore_errors=True)
    return run(f"{build}/export", *words)


def compare_weights(what, exported, reference, bound):
    """The weights of a merged export against those of a model of transformers."""
    written = load_file(f"{exported}/model.safetensors")
    state = {n: p.detach().float().numpy() for n, p in reference.named_parameters()}
    check(f"{what}: tensors that only one has", len(set(written) ^ set(state)), 0)
    check(f"{what}: merged weights", max(largest(written[n], state[n]) for n in state), bound)


def theirs_to_ours(name, build, work):
    """Adapters of PEFT in our programs."""
    base = f"{work}/{name}"
    forms = {"plain": {}, "rs": dict(use_rslora=True), "dora": dict(use_dora=True),
             "saved": dict(modules_to_save=["lm_head"]),
             "patterns": dict(rank_pattern={"c_attn" if name == "gpt2" else "q_proj": 2},
                              alpha_pattern={"c_attn" if name == "gpt2" else "layers.1.self_attn.v_proj": 3})}
    tokens = batch_of(300)
    for form, options in forms.items():
        if form == "saved" and name in ("gpt2", "llama_tied"):
            continue
        where, merged = f"{work}/{name}.{form}", f"{work}/{name}.{form}.merged"
        shutil.rmtree(where, ignore_errors=True)
        model = adapted(load(base)[0], target_modules=targets_of(name, "all"), **options)
        model.save_pretrained(where)
        export(build, "--init-from", base, "--adapter", where, "--to", "hf", "--dir", merged)
        check(f"{name}: {form}: logits of PEFT's adapter, merged here", largest(ours(build, merged, tokens, work),
                                                                            logits_of(model, tokens)), 1e-5)
        if form != "saved":
            compare_weights(f"{name}: {form}", merged, model.merge_and_unload(), 1e-6)


def ours_to_theirs(name, build, work):
    """An adapter of a run of ours in PEFT."""
    base, out, adapter, merged = (f"{work}/{name}{e}" for e in ("", ".run", ".adapter", ".run.merged"))
    tokens = batch_of(300)
    for more in [[], ["--lora-scale", "rs", "--lora-targets", "qkv,ffn_out"]]:
        shutil.rmtree(out, ignore_errors=True)
        write_shard(f"{work}/tokens.bin", np.random.default_rng(3).integers(0, 300, 40000))
        run(f"{build}/train-FP32", "--data", f"{work}/tokens.bin", "--init-from", base, "--lora", 4, *more, "--out",
            out, "--seq", 32, "--batch", 2, "--steps", 20, "--lr", "2e-2", "--warmup", 0)
        export(build, "--out", out, "--to", "peft", "--dir", adapter)
        print("   ", export(build, "--out", out, "--to", "hf", "--dir", merged).strip().replace("\n", "; "))
        import warnings
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            model = peft.PeftModel.from_pretrained(load(base)[0], adapter)
        keys = [str(w.message)[:200] for w in warned if "key" in str(w.message)]
        what = f"{name}{' ' + more[1] if more else ''}"
        check(f"{what}: warnings of missing keys {keys}", len(keys), 0)
        state = peft.get_peft_model_state_dict(model)
        saved = load_file(f"{adapter}/adapter_model.safetensors")
        check(f"{what}: keys that only one has", len(set(state) ^ set(saved)), 0)
        check(f"{what}: tensors that differ", sum(not np.array_equal(saved[k], state[k].numpy()) for k in saved), 0)
        theirs = logits_of(model.eval(), tokens)
        change = largest(theirs, logits_of(load(base)[0], tokens))
        check(f"{what}: our adapter changes logits by {change:.3g}, not less than 0.01", -change, -0.01)
        check(f"{what}: logits of our adapter in PEFT", largest(ours(build, merged, tokens, work), theirs), 1e-5)
        compare_weights(what, merged, model.merge_and_unload(), 1e-6)
        again = f"{work}/{name}.again"
        export(build, "--init-from", base, "--adapter", adapter, "--to", "hf", "--dir", again)
        a, b = load_file(f"{again}/model.safetensors"), load_file(f"{merged}/model.safetensors")
        check(f"{what}: out and in again, tensors that differ", sum(not np.array_equal(a[k], b[k]) for k in a), 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    parser.add_argument("--work", default="build/peers-lora")
    parser.add_argument("--fixtures")
    o = parser.parse_args()
    print(f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    if o.fixtures:
        write_fixtures(o.fixtures)
        sys.exit(0)
    os.makedirs(o.work, exist_ok=True)
    for key in MODELS:
        shutil.rmtree(f"{o.work}/{key}", ignore_errors=True)
        make(models.MODELS[key](), f"{o.work}/{key}")
        theirs_to_ours(key, o.build, o.work)
        ours_to_theirs(key, o.build, o.work)
    print(f"{models.failed} failed")
    sys.exit(models.failed > 0)
