"""peers_cpu.py: training steps of this program, PyTorch and llm.c in turn, on the processors of this machine.

    python3 dev/bench/peers_cpu.py                              builds build/bench-FP32 and -BF16, and runs them
    python3 dev/bench/peers_cpu.py --isa x86-64-v3              ours and PyTorch limited to AVX2
    python3 dev/bench/peers_cpu.py --llmc ../llm.c --rounds 5   also a checkout of llm.c with train_gpt2 built
    python3 dev/bench/peers_cpu.py --only "gpt2:124M 4 64"      one case

A step is forward, backward, clipping of the norm and AdamW, on random tokens, with the same number of threads. Every
round runs each program once, each in a process of its own, one after the other, so that all see the same machine; the
table has the median over the rounds of tokens per second, and of its ratio to ours in that round with the lowest and
the highest. Memory is the peak resident set of the process. PyTorch: a model written plainly with its own modules,
scaled_dot_product_attention, its fused AdamW; eager and torch.compile; float32, bfloat16 by autocast, and a bfloat16
model with bfloat16 optimizer state, whose counterpart is "ours, bf16 states" (autocast's is "ours, bf16", which has
float32 master weights and states). llm.c has one size built in, GPT-2 124M at B=4 T=64, and reads its model and data
files, which its README says how to download.
"""

import argparse
import importlib.metadata
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time

# Model, batch, sequence, timed steps.
CASES = [("gpt2:124M", 4, 64, 5), ("gpt2:124M", 4, 256, 3), ("gpt2:124M", 8, 1024, 1), ("demo", 4, 256, 100)]
SHAPES = {"gpt2:124M": dict(family="gpt2", layers=12, heads=12, channels=768, ffn=3072, vocab=50304),
          "demo": dict(family="llama", layers=4, heads=4, channels=144, ffn=384, vocab=256)}
PRECISIONS = ("float32", "autocast", "bfloat16")
# What PyTorch's bfloat16 model has: no float32 weights, and bfloat16 optimizer state. (Ours rounds stochastically.)
BF16_STATES = ("--masters", "off", "--optimizer", "adamw-bf16")


def torch_worker(how, precision, model_name, batch, seq, steps):
    """Runs in a process of its own; prints tokens per second and the peak of memory."""
    import torch

    from peers_model import Transformer

    torch.manual_seed(1)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    shape = SHAPES[model_name]
    model = Transformer(seq=max(seq, 1024), **shape)
    if precision == "bfloat16":
        model = model.to(torch.bfloat16)
    run = torch.compile(model) if how == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(shape["vocab"], (batch, seq + 1))

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "autocast"):
            loss = run(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    step()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    print(json.dumps({"tokens": batch * seq / statistics.median(times), "mean_ms": 1e3 * statistics.mean(times),
                      "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


# Keeps PyTorch and its libraries from instructions that a processor with AVX2 only does not have.
AVX2_ALONE = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
              "TORCHINDUCTOR_CPP_SIMDLEN": "256"}


def run_process(command, threads, folder=None):
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads))  # waits as OpenMP does by default, as for a user
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"failed: {' '.join(command)}\n{done.stderr[-600:]}", file=sys.stderr)
        return None
    return done.stdout


def run_ours(build, precision, case, threads, flags=()):
    model, batch, seq, steps = case
    report = os.path.join(build, "peers.json")
    if run_process([os.path.join(build, "bench-" + precision), "--model", model, "--batch", str(batch),
                    "--seq", str(seq), "--steps", str(steps), "--json", report, *flags], threads) is None:
        return None
    with open(report) as file:
        found = json.load(file)
    return {"tokens": found["tok_per_s"], "memory": found["mem_bytes"], "peak": found["peak_product_flops"],
            "rate": found["peak_memory_bytes"], "mfu": found["mfu"]}


def run_torch(how, precision, case, threads):
    worker = [sys.executable, os.path.abspath(__file__), "--worker", how, precision, *map(str, case)]
    out = run_process(worker, threads)
    return json.loads(out.splitlines()[-1]) if out else None


def run_llmc(folder, threads):
    """Its program trains 40 steps and prints 'took N ms' for each."""
    process = subprocess.Popen([os.path.join(os.path.abspath(folder), "train_gpt2")], cwd=folder, text=True,
                               env=dict(os.environ, OMP_NUM_THREADS=str(threads)), stdout=subprocess.PIPE)
    times = [float(ms) for ms in re.findall(r"took ([0-9.]+) ms", process.stdout.read())]
    _, _, usage = os.wait4(process.pid, 0)
    if not times:
        return None
    return {"tokens": 4 * 64 / (statistics.median(times) / 1e3), "memory": usage.ru_maxrss * 1024}


def median_and_range(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def compare(case, programs, rounds):
    """Each round in turn; the table at the end. The first of the programs is ours in float32."""
    found = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            found[name].append(run(case))
    found = {name: results for name, results in found.items() if all(results)}
    all_of_ours = [name for name in found if name.startswith("ours")]
    model, batch, seq, _ = case
    print(f"\n{model}, B={batch} T={seq}")
    print(f"{'':<28} {'tokens/s':>9} {'peak MB':>8} {'mfu':>6}   over it: {'; '.join(all_of_ours)}")
    for name, results in found.items():
        ratios = [median_and_range([a["tokens"] / b["tokens"] for a, b in zip(found[ours], results)])
                  for ours in all_of_ours]
        memory = statistics.median(r["memory"] or 0 for r in results) / 1e6
        mfu = f"{100 * statistics.median(r['mfu'] for r in results):.1f}%" if "mfu" in results[0] else ""
        tokens = statistics.median(r["tokens"] for r in results)
        print(f"{name:<28} {tokens:>9.1f} {memory:>8.0f} {mfu:>6}   {'  '.join(ratios)}")
        print(json.dumps({"case": case[:3], "program": name, "tokens_per_s": [r["tokens"] for r in results],
                          "mem_bytes": [r["memory"] for r in results]}), file=sys.stderr)
    for name in all_of_ours:
        peak, rate = (1e-9 * statistics.median(r[what] for r in found[name]) for what in ("peak", "rate"))
        print(f"peaks beside {name}: matmuls {peak:.0f} GFLOP/s, memory {rate:.0f} GB/s")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", help="where bench-FP32 and bench-BF16 are built (build, or build/ISA)")
    parser.add_argument("--llmc", help="a checkout of llm.c with train_gpt2 built and its files fetched")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--isa", default="native", help="x86-64-v3 limits ours and PyTorch to AVX2")
    parser.add_argument("--only", help='one case, as "gpt2:124M 4 64"')
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.worker:
        how, precision, model, batch, seq, steps = o.worker
        return torch_worker(how, precision, model, int(batch), int(seq), int(steps))
    build = o.build or ("build" if o.isa == "native" else f"build/{o.isa}")
    programs = [f"{build}/bench-FP32", f"{build}/bench-BF16"]
    subprocess.run(["make", "-s", f"ISA={o.isa}", f"B={build}", *programs], check=True)
    hows, precisions = (), PRECISIONS
    if o.isa == "x86-64-v3":
        os.environ.update(AVX2_ALONE)
        precisions = ("float32",)  # in bfloat16 a PyTorch step takes minutes there
    try:  # without importing it: the memory of this process would count for its children
        print(f"PyTorch {importlib.metadata.version('torch')}, {o.isa}, {o.threads} threads, {o.rounds} rounds in turn")
        hows = ("eager", "compiled")
    except importlib.metadata.PackageNotFoundError:
        print("skipped PyTorch: it is not installed; python3 -m pip install torch")
    if not o.llmc:
        print("skipped llm.c: give --llmc DIR, a checkout in which make train_gpt2 has been run and its files fetched")
    for case in CASES:
        if o.only and o.only.split() != [str(part) for part in case[:3]]:
            continue
        programs = {"ours, fp32": lambda c: run_ours(build, "FP32", c, o.threads),
                    "ours, bf16": lambda c: run_ours(build, "BF16", c, o.threads),
                    "ours, bf16 states": lambda c: run_ours(build, "BF16", c, o.threads, BF16_STATES)}
        for how in hows:
            for precision in precisions:
                programs[f"PyTorch {how}, {precision}"] = lambda c, h=how, p=precision: run_torch(h, p, c, o.threads)
        if o.llmc and o.isa == "native" and case[:3] == ("gpt2:124M", 4, 64):
            programs["llm.c"] = lambda c: run_llmc(o.llmc, o.threads)
        compare(case, programs, o.rounds)


if __name__ == "__main__":
    main()
