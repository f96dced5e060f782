"""lora.py: steps of LoRA, of full fine-tuning and of PEFT in turn, on the processors of this machine.

    python3 dev/bench/lora.py                 builds build/train-FP32, -BF16 and build/export, and runs them
    python3 dev/bench/lora.py --rounds 5 --layers 12 --channels 768 --ffn 2048

A small Llama is written as a directory of Hugging Face; all programs begin from it, on the same tokens, with the same
number of threads, AdamW and a clipped norm. Every round runs each program once, in a process of its own, one after the
other, so that all see the same machine. The table has the medians over the rounds of the time of a step (itself the
median of a process, without its first two) and of its ratio to ours in that round, with the lowest and the highest.
PEFT: transformers' model in eager mode with scaled_dot_product_attention, pairs beside all matrices of the blocks as
ours has them. Says "skipped" for PEFT without pip install peft transformers torch.
"""

import argparse
import array
import importlib.metadata
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time

from peers_cpu import median_and_range, run_process

RANK, ALPHA, HEADER = 16, 32, 1024  # bytes of a shard before its tokens


def peft_worker(base, shard, batch, seq, steps, precision):
    """Runs in a process of its own; prints the milliseconds of a step."""
    import numpy
    import peft
    import torch
    import transformers

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if precision == "BF16":
        model = model.to(torch.bfloat16)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config).train()
    pairs = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(pairs, lr=1e-4, fused=True)
    tokens = torch.from_numpy(numpy.fromfile(shard, numpy.uint16, offset=HEADER).astype(numpy.int64))
    times = []
    for step in range(steps):
        rows = tokens[step * batch * seq: (step + 1) * batch * seq].view(batch, seq)
        began = time.perf_counter()
        model(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(pairs, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(1e3 * (time.perf_counter() - began))
    print(statistics.median(times[2:]))


def write_tokens(o):
    random_of = random.Random(1)
    count = o.batch * o.seq * o.steps + o.seq + 1
    with open(o.shard, "wb") as file:
        file.write(array.array("i", [20240520, 1, count] + [0] * 253).tobytes())
        file.write(array.array("H", (random_of.randrange(o.vocab) for _ in range(count))).tobytes())


def run_ours(o, precision, flags):
    out = os.path.join(o.work, "run")
    shutil.rmtree(out, ignore_errors=True)
    command = [f"{o.build}/train-{precision}", "--init-from", os.path.join(o.work, "base"), "--data", o.shard,
               "--out", out, "--batch", o.batch, "--seq", o.seq, "--steps", o.steps, "--lr", 1e-4, "--warmup", 0,
               "--ckpt-every", 0, "--check-every", 0, *flags]
    if run_process(list(map(str, command)), o.threads) is None:
        sys.exit(1)
    with open(os.path.join(out, "metrics.jsonl")) as file:
        return statistics.median(line["ms"] for line in map(json.loads, file) if line["step"] > 2)


def run_peft(o, precision):
    worker = [sys.executable, os.path.abspath(__file__), "--worker", os.path.join(o.work, "base"), o.shard,
              *map(str, (o.batch, o.seq, o.steps)), precision]
    out = run_process(worker, o.threads)
    if out is None:
        sys.exit(1)
    return float(out.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    for name, value in dict(layers=8, channels=512, ffn=1408, heads=8, vocab=8192, batch=4, seq=256, steps=7).items():
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.worker:
        base, shard, batch, seq, steps, precision = o.worker
        return peft_worker(base, shard, int(batch), int(seq), int(steps), precision)
    subprocess.run(["make", "-s", f"B={o.build}", *(f"{o.build}/{p}" for p in ("train-FP32", "train-BF16", "export"))],
                   check=True)
    o.work = os.path.join(o.build, "bench-lora")
    o.shard = os.path.join(o.work, "tokens.bin")
    shutil.rmtree(o.work, ignore_errors=True)
    os.makedirs(o.work)
    write_tokens(o)
    start = os.path.join(o.work, "start")
    shape = [f"--{name}={getattr(o, name)}" for name in ("layers", "channels", "ffn", "heads", "vocab")]
    made = [[f"{o.build}/train-FP32", "--family=llama", *shape, f"--context={o.seq}", "--steps=1", "--batch=1",
             f"--seq={o.seq}", f"--data={o.shard}", f"--out={start}"],
            [f"{o.build}/export", f"--out={start}", "--to=hf", f"--dir={o.work}/base"]]
    if any(run_process([part for word in command for part in word.split("=", 1)], o.threads) is None
           for command in made):
        sys.exit(1)
    lora = ("--lora", RANK, "--lora-alpha", ALPHA)
    try:
        peers = f"PEFT {importlib.metadata.version('peft')}, PyTorch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        peers = None
        print("skipped PEFT: it is not installed; python3 -m pip install peft transformers torch")
    print(f"Llama of {o.layers} layers, {o.channels} channels, B={o.batch} T={o.seq}, rank {RANK}; "
          f"{peers or 'no PEFT'}; {o.threads} threads, {o.rounds} rounds in turn")
    for precision in ("FP32", "BF16"):
        programs = {"full fine-tuning": lambda p=precision: run_ours(o, p, ()),
                    "LoRA": lambda p=precision: run_ours(o, p, lora)}
        if peers:
            programs["PEFT's LoRA"] = lambda p=precision: run_peft(o, p)
        found = {name: [] for name in programs}
        for _ in range(o.rounds):
            for name, run in programs.items():
                found[name].append(run())
        print(f"{precision + ', ms of a step':<24} {'':>8}   over LoRA's")
        for name, times in found.items():
            ratios = [time_of / lora_time for time_of, lora_time in zip(times, found["LoRA"])]
            print(f"{name:<24} {statistics.median(times):>8.0f}   {median_and_range(ratios)}")
        share = [a / b for a, b in zip(found["LoRA"], found["full fine-tuning"])]
        print(f"LoRA takes {100 * statistics.median(share):.0f}% of full fine-tuning's time", flush=True)


if __name__ == "__main__":
    main()
