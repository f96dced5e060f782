"""views.py: what it costs to see a run: the log, its TensorBoard and Prometheus files, telemetry.

    python3 dev/bench/views.py [--build build] [--rounds 20] [--steps 100]

A small Llama is trained on one thread, whose steps take about 60 ms, so that a line's cost shows. Each round runs it
without files (its lines are printed), with --out, and with all views, one after the other in another order each time;
each step is logged. Prints the processor time of the whole process per step, the telemetry's thread and the last
checkpoint included, and the median over the rounds of its ratio to that without files, with an interval of 90% (from
5,000 samples of the rounds with replacement).
"""

import argparse
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile

MODEL = "--family llama --layers 4 --heads 4 --channels 144 --seq 64 --batch 8 --vocab 256 --seed 1 --threads 1".split()
WAYS = {"without files": [], "with --out": ["--out", "run"],
        "with all views": ["--out", "run", "--tensorboard", "on", "--prometheus", "run.prom"]}


def seconds(command):
    """Processor time of a process and of its threads."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def interval(ratios):
    random_of = random.Random(1)
    medians = sorted(statistics.median(random_of.choices(ratios, k=len(ratios))) for _ in range(5000))
    return medians[250], medians[-250]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    o = parser.parse_args()
    subprocess.run(["make", "-s", f"B={o.build}", *(f"{o.build}/{p}" for p in ("train-FP32", "corpus", "tokenize"))],
                   check=True)
    build = os.path.abspath(o.build)
    found = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for command in ([f"{build}/corpus", "--out", "text", "--bytes", "1000000", "--val-bytes", "1"],
                        [f"{build}/tokenize", "--bytes", "text_train.txt", "--out", "text", "--val", "0"]):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for round_ in range(o.rounds):
            for k in range(len(WAYS)):
                way = list(WAYS)[(round_ + k) % len(WAYS)]
                shutil.rmtree("run", ignore_errors=True)
                found[way].append(seconds([f"{build}/train-FP32", "--data", "text_train_*.bin", "--steps", str(o.steps),
                                           *MODEL, *WAYS[way]]))
    for way, times in found.items():
        ratios = [a / b for a, b in zip(times, found["without files"])]
        low, high = interval(ratios)
        print(f"{way:<16} {1e3 * statistics.median(times) / o.steps:>7.2f} ms   "
              f"{100 * (statistics.median(ratios) - 1):+.2f}% ({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f}%)")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
