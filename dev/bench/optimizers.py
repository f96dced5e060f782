#!/usr/bin/env python3
"""optimizers.py: which optimizer learns fastest, on the demo's corpus and on Tiny Shakespeare.

    make train build/corpus build/tokenize
    python3 dev/bench/optimizers.py --text shakespeare.txt                 # prints tables, draws doc/optimizers.svg
    python3 dev/bench/optimizers.py --only muon,adamw --corpora shakespeare
    python3 dev/bench/optimizers.py --report                               # tables and drawing of the existing runs

The same small Llama with every optimizer: each learning rate of its grid with seed 1, then the best with seeds 2 and
3; one warmup and cosine for all, AdamW's other settings are the program's defaults. Each run has one thread, two run
at a time. Results are stored as they come, and finished runs are not repeated. Seconds are processor seconds of
training alone, since the machine is shared: (those of 50 steps - those of 10) / 40, without validation; the minimum of
three measurements, taken in turn. Needs Python and no packages.
"""

import argparse
import concurrent.futures
import json
import os
import resource
import shutil
import subprocess
import sys

MODEL = "--family llama --layers 3 --heads 4 --channels 64 --ffn 192 --seq 64 --batch 32".split()
STEPS, TOKENS, VAL_EVERY, SEEDS = 300, 32 * 64, 20, (1, 2, 3)
# Of about the same width, around values that are published or common for each.
GRIDS = {
    "adamw": (2e-3, 5e-3, 1e-2, 2e-2),
    "adamw-8bit": (2e-3, 5e-3, 1e-2, 2e-2),
    "adamw-bf16": (2e-3, 5e-3, 1e-2, 2e-2),
    "adam-mini": (2e-3, 5e-3, 1e-2, 2e-2),
    "adafactor": (1e-2, 2e-2, 5e-2, 1e-1),
    "came": (3e-4, 5e-4, 1e-3, 2e-3),
    "sm3": (1e-2, 3e-2, 1e-1, 3e-1),
    "lion": (5e-4, 1e-3, 2e-3, 4e-3),
    "momentum": (1e-2, 3e-2, 1e-1, 3e-1),
    "muon": (1e-2, 2e-2, 4e-2, 8e-2),
    "galore": (1e-2, 2e-2, 5e-2, 1e-1),
    "ldadam": (2e-3, 5e-3, 1e-2, 2e-2),
}
EXTRA = {"galore": ["--optimizer-rank", "16"], "ldadam": ["--optimizer-rank", "16"]}
COLORS = ["#e6550d", "#3182bd", "#6baed6", "#31a354", "#74c476", "#9467bd", "#bcbd22", "#8c564b", "#7f7f7f", "#d62728",
           "#e377c2", "#17becf"]


def prepare(work, build, corpus, text):
    """Shards of a corpus: train and val."""
    prefix = f"{work}/{corpus}"
    os.makedirs(work, exist_ok=True)
    if any(name.startswith(f"{corpus}_train_") and name.endswith(".bin") for name in os.listdir(work)):
        return
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    if corpus == "shakespeare":
        with open(text, "rb") as f:
            data = f.read()
        parts = {"train": (data[: len(data) * 9 // 10], "0"), "val": (data[-len(data) // 20:], "1")}
        for part, (body, val) in parts.items():
            with open(f"{prefix}.{part}.txt", "wb") as f:
                f.write(body)
            subprocess.run([f"{build}/tokenize", "--bytes", f"{prefix}.{part}.txt", "--out", prefix, "--val", val], **quiet)
        return
    subprocess.run([f"{build}/corpus", "--out", prefix, "--bytes", "2000000", "--val-bytes", "50000"], **quiet)
    for part, val in (("train", "0"), ("val", "1")):
        subprocess.run([f"{build}/tokenize", "--bytes", f"{prefix}_{part}.txt", "--out", prefix, "--val", val], **quiet)


def command(o, corpus, kind, lr, seed, steps, out):
    return [o.train, "--data", f"{o.work}/{corpus}_train_*.bin", "--out", out, "--optimizer", kind, "--lr", str(lr),
            "--seed", str(seed), "--steps", str(steps), "--warmup", "20", "--threads", "1", "--ckpt-every", "0",
            "--log-every", str(steps)] + MODEL + EXTRA.get(kind, [])


def learn(o, corpus, kind, lr, seed):
    """[[step, validation loss], ...]"""
    out = f"{o.work}/run-{corpus}-{kind}-{lr:g}-{seed}"
    shutil.rmtree(out, ignore_errors=True)
    run = command(o, corpus, kind, lr, seed, STEPS, out)
    run[run.index("--log-every") + 1] = str(VAL_EVERY)
    run += ["--val", f"{o.work}/{corpus}_val_*.bin", "--val-every", str(VAL_EVERY), "--val-windows", "256"]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with open(f"{out}/metrics.jsonl", encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    shutil.rmtree(out)
    return [[line["step"], line["val_loss"]] for line in lines if line.get("val_loss") is not None]


def seconds(o, kind, steps):
    """Processor seconds of a run."""
    out = f"{o.work}/time-{kind}"
    shutil.rmtree(out, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command(o, "shakespeare", kind, GRIDS[kind][0], 1, steps, out), check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(out)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


class Results:
    def __init__(self, path):
        self.path, self.all = path, {"learn": {}, "seconds": {}}
        if os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                self.all = json.load(f)

    def save(self):
        with open(self.path + ".new", "w", encoding="utf-8") as f:
            json.dump(self.all, f, indent=0, sort_keys=True)
        os.replace(self.path + ".new", self.path)

    def runs(self, corpus, kind, lr):
        found = (self.all["learn"].get(f"{corpus} {kind} {lr:g} {seed}") for seed in SEEDS)
        return [run for run in found if run]

    def best(self, corpus, kind):
        """The learning rate with the lowest final loss for the first seed; None without runs."""
        ends = [(self.runs(corpus, kind, lr)[0][-1][1], lr) for lr in GRIDS[kind] if self.runs(corpus, kind, lr)]
        return min(ends)[1] if ends else None

    def curve(self, corpus, kind):
        """Mean over the seeds: [[step, loss], ...]"""
        lr = self.best(corpus, kind)
        runs = self.runs(corpus, kind, lr) if lr else []
        return [[point[0], sum(run[i][1] for run in runs) / len(runs)] for i, point in enumerate(runs[0])] if runs else []


def measure(o, results, kinds, corpora):
    def one(corpus, kind, lr, seed):
        key = f"{corpus} {kind} {lr:g} {seed}"
        if key not in results.all["learn"]:
            results.all["learn"][key] = learn(o, corpus, kind, lr, seed)
            results.save()
            print(key, results.all["learn"][key][-1], flush=True)

    def all_of(corpus, kind):
        for lr in GRIDS[kind]:
            one(corpus, kind, lr, SEEDS[0])
        for seed in SEEDS[1:]:
            one(corpus, kind, results.best(corpus, kind), seed)

    for corpus in corpora:
        prepare(o.work, o.build, corpus, o.text)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for work in [pool.submit(all_of, corpus, kind) for corpus in corpora for kind in kinds]:
            work.result()
    for _ in range(3):
        for kind in kinds:
            if len(results.all["seconds"].get(kind, [])) < 3:
                per_step = (seconds(o, kind, 50) - seconds(o, kind, 10)) / 40
                results.all["seconds"].setdefault(kind, []).append(per_step)
                results.save()


def reached(curve, loss):
    """The step at which a curve falls to a loss, interpolated between its points; None if it does not."""
    for (a, high), (b, low) in zip(curve, curve[1:]):
        if low <= loss < high:
            return a + (b - a) * (high - loss) / (high - low)
    return None


def table(results, corpus, kinds):
    adamw, cost = results.curve(corpus, "adamw"), results.all["seconds"]
    print("| optimizer | learning rate (grid) | loss, mean of seeds (lowest, highest) | ms per step | "
          "AdamW's loss at step, in its seconds |\n|---|---|---|---|---|")
    order = sorted((k for k in kinds if results.curve(corpus, k)), key=lambda k: results.curve(corpus, k)[-1][1])
    for kind in order:
        lr, curve = results.best(corpus, kind), results.curve(corpus, kind)
        ends = [run[-1][1] for run in results.runs(corpus, kind, lr)]
        grid = " ".join(f"{x:g}" for x in GRIDS[kind])
        at, text = reached(curve, adamw[-1][1]) if adamw else None, "-"
        own = min(cost[kind]) if kind in cost else float("nan")
        if at and kind != "adamw":
            share = at * own / (STEPS * min(cost["adamw"]))
            text = f"{at:.0f} ({100 * at / STEPS:.0f}%), {100 * share:.0f}%"
        print(f"| {kind} | {lr:g} ({grid}) | {curve[-1][1]:.4f} ({min(ends):.4f}, {max(ends):.4f}) | "
              f"{1e3 * own:.1f} | {text} |")


def panel(results, corpus, kinds, by_seconds, left, top, width, height):
    """One pair of axes with a curve for each optimizer, as SVG."""
    cost = {kind: min(results.all["seconds"].get(kind, [0])) for kind in kinds}
    curves = {kind: results.curve(corpus, kind) for kind in kinds}
    curves = {kind: curve for kind, curve in curves.items() if curve}
    scale = {kind: cost[kind] if by_seconds else TOKENS / 1e3 for kind in curves}
    most = max(curve[-1][0] * scale[kind] for kind, curve in curves.items())
    lows = sorted(curve[-1][1] for curve in curves.values())
    low, high = lows[0] - 0.05 * (lows[-1] - lows[0]), min(lows[0] * 1.6, max(c[0][1] for c in curves.values()))
    out = [f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#888"/>']
    name = {"shakespeare": "Tiny Shakespeare", "stories": "the demo's corpus"}[corpus]
    out.append(f'<text x="{left}" y="{top - 8}">{name}: validation loss, nats per byte</text>')
    out.append(f'<text x="{left + width}" y="{top + height + 30}" text-anchor="end">'
               f'{"processor seconds" if by_seconds else "thousand tokens"}</text>')
    for i in range(5):
        x, y = left + width * i / 4, top + height * i / 4
        out.append(f'<text x="{x:.0f}" y="{top + height + 15}" text-anchor="middle">{most * i / 4:.3g}</text>')
        out.append(f'<text x="{left - 5}" y="{y + 4:.0f}" text-anchor="end">{high - (high - low) * i / 4:.2f}</text>')
    labels = []
    for kind, curve in curves.items():
        points = [(left + width * step * scale[kind] / most, top + height * (high - loss) / (high - low))
                  for step, loss in curve]
        inside = [p for p in points if p[1] >= top]
        if not inside or inside[-1][1] > top + height:
            continue
        color = COLORS[list(GRIDS).index(kind)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in inside)
        bold = ' stroke-width="2.5"' if kind in ("adamw", "muon") else ""
        out.append(f'<polyline points="{line}" fill="none" stroke="{color}"{bold}/>')
        labels.append([inside[-1][1], inside[-1][0], kind, color])
    labels.sort()
    for i in range(1, len(labels)):  # names are stacked next to the axes
        labels[i][0] = max(labels[i][0], labels[i - 1][0] + 12)
    lowest = top + height
    for label in reversed(labels):
        label[0] = min(label[0], lowest)
        lowest = label[0] - 12
        out.append(f'<text x="{left + width + 6}" y="{label[0] + 4:.0f}" class="name" style="fill: {label[3]}">'
                   f'{label[2]}</text>')
    return out


def draw(results, corpora, kinds, path):
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 %d" font-family="sans-serif" font-size="11">'
           % (330 * len(corpora)), "<style>text { fill: #888 } .name { font-weight: bold } "
           "polyline { stroke-width: 1.4 }</style>"]
    for row, corpus in enumerate(corpora):
        for column in range(2):
            out += panel(results, corpus, kinds, column == 1, 45 + 450 * column, 30 + 330 * row, 320, 250)
    with open(path, "w", encoding="utf-8") as f:
        f.write("\n".join(out + ["</svg>", ""]))


def main():
    here = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    p = argparse.ArgumentParser(description="compares the optimizers; see the first lines of the script")
    p.add_argument("--build", default=f"{here}/build")
    p.add_argument("--train", help="the program; default: BUILD/train-FP32")
    p.add_argument("--work", help="folder for data and runs; default: BUILD/optimizers")
    p.add_argument("--text", default=f"{here}/data/shakespeare.txt", help="Tiny Shakespeare")
    p.add_argument("--only", default=",".join(GRIDS), help="optimizers, with commas between them")
    p.add_argument("--corpora", default="shakespeare,stories")
    p.add_argument("--results", help="what has been measured; default: WORK/results.json")
    p.add_argument("--report", action="store_true", help="run nothing")
    o = p.parse_args()
    o.train, o.work = o.train or f"{o.build}/train-FP32", o.work or f"{o.build}/optimizers"
    kinds, corpora = o.only.split(","), o.corpora.split(",")
    if not set(kinds) <= set(GRIDS) or not set(corpora) <= {"shakespeare", "stories"}:
        sys.exit(f"optimizers.py: --only takes {', '.join(GRIDS)}; --corpora shakespeare, stories")
    results = Results(o.results or f"{o.work}/results.json")
    if not o.report:
        measure(o, results, kinds, corpora)
    corpora = [c for c in corpora if any(results.curve(c, k) for k in kinds)]
    for corpus in corpora:
        print(f"\n{corpus}\n")
        table(results, corpus, kinds)
    draw(results, corpora, kinds, f"{here}/doc/optimizers.svg")


main()
