"""views.py: what it costs to see a run: the log, its TensorBoard and Prometheus files, telemetry.

    python3 dev/bench/views.py [--build build] [--rounds 9] [--steps 3000]

A model so small that a line's cost stands out is trained on one thread. Each round runs it without files (its lines are
printed), with --out, and with all views, one after the other in another order each time; each step is logged. Prints
the processor time of the whole process per step, telemetry's thread and the last checkpoint included, the median over
the rounds of what that is more than without files, with the lowest and the highest, and how long a step is of which
this is 0.3%.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import tempfile

MODEL = ("--family llama --layers 1 --heads 1 --channels 16 --seq 8 --batch 1 --vocab 256 --seed 1 --threads 1 "
         "--check-every 0").split()
WAYS = {"without files": [], "with --out": ["--out", "run"],
        "with all views": ["--out", "run", "--tensorboard", "on", "--prometheus", "run.prom"]}


def seconds(command):
    """Processor time of a process and of its threads."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3000)
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
        more = [1e6 * (a - b) / o.steps for a, b in zip(times, found["without files"])]
        cost = statistics.median(more)
        print(f"{way:<16} {1e6 * statistics.median(times) / o.steps:>7.0f} us   {cost:+.0f} us ({min(more):+.0f} to "
              f"{max(more):+.0f}): 0.3% of a step of {cost / 3:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
