#!/usr/bin/env python3
"""generate.py: the speed of build/generate and of llama.cpp at batch 1, in turn, on the same model.

    pip install llama-cpp-python numpy
    make build/generate-FP32 build/generate-BF16 build/export
    build/export --init-from DIR --to gguf --dtype f32 --dir OUT     # and bf16
    python3 dev/peers/generate.py --build build --model DIR --gguf-f32 FILE --gguf-bf16 FILE --weights 174 --threads 2

Time per token: that of many tokens minus that of few, over the difference, so that start, loading and the prompt do
not count; the median over rounds, and the minimum. The bound: the bytes of all weights but the token embedding, over
the rate at which the same number of threads reads memory, also measured in each round. Greedy; the programs take turns.

--processor-time: for a shared machine. One thread; time is the program's processor time, without system time, which is
loading. Compare the minima: other programs' effect on caches and memory only adds time.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

try:
    import llama_cpp
    import numpy
except ImportError as missing:
    print(f"skipped: {missing}; pip install llama-cpp-python numpy")
    sys.exit(0)

FEW, MANY = 8, 232


def clock(processor, of):
    return resource.getrusage(of).ru_utime if processor else time.perf_counter()


def ours(program, model, threads, tokens, processor):
    began = clock(processor, resource.RUSAGE_CHILDREN)
    subprocess.run([program, "--init-from", model, "--prompt-ids", "1 2 3 4", "--print-ids", "--past-end", "--tokens",
                    str(tokens), "--temperature", "0", "--threads", str(threads)], check=True, stdout=subprocess.PIPE)
    return clock(processor, resource.RUSAGE_CHILDREN) - began


def time_ours(program, model, threads, many, processor):
    few = ours(program, model, threads, FEW, processor)
    return (ours(program, model, threads, many, processor) - few) / (many - FEW)


def time_theirs(llama, many, processor):
    llama.reset()
    llama.eval([1, 2, 3, 4])
    began = 0
    for n in range(many):
        if n == FEW:
            began = clock(processor, resource.RUSAGE_SELF)
        llama.eval([llama.sample(temp=0.0)])
    return (clock(processor, resource.RUSAGE_SELF) - began) / (many - FEW)


def memory_rate(program):
    return float(subprocess.run([program], check=True, stdout=subprocess.PIPE).stdout)


RATE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
int main(void) {
    size_t n = (size_t)1 << 26;
    double *x = malloc(n * 8), best = 1e9, total = 0;
    for (size_t i = 0; i < n; i++) x[i] = 1;
    for (int round = 0; round < 5; round++) {
        double began = now(), sum = 0;
        #pragma omp parallel for reduction(+:sum) schedule(static)
        for (size_t i = 0; i < n; i++) sum += x[i];
        began = now() - began;
        best = began < best ? began : best;
        total += sum;
    }
    printf("%g\n", n * 8 / best + 0 * total);
}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--build", default="build")
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf-f32")
    parser.add_argument("--gguf-bf16")
    parser.add_argument("--weights", type=float, required=True, help="weights that a token reads, in millions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=MANY)
    parser.add_argument("--processor-time", action="store_true")
    arguments = parser.parse_args()
    processor = arguments.processor_time
    if processor:
        arguments.threads = 1
    rate_program = os.path.join(arguments.build, "memory_rate")
    subprocess.run(["cc", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-x", "c", "-", "-o", rate_program,
                    "-DCLOCK=" + ("CLOCK_PROCESS_CPUTIME_ID" if processor else "CLOCK_MONOTONIC")],
                   input=RATE.encode(), check=True)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    print(f"llama-cpp-python {llama_cpp.__version__}, {arguments.threads} threads"
          f"{', processor time' if processor else ''}")
    for name, gguf, width in (("FP32", arguments.gguf_f32, 4), ("BF16", arguments.gguf_bf16, 2)):
        if not gguf:
            continue
        llama = llama_cpp.Llama(gguf, n_ctx=256, n_threads=arguments.threads, n_threads_batch=arguments.threads,
                                verbose=False)
        program = os.path.join(arguments.build, "generate-" + name)
        us, them, rates = [], [], []
        ours(program, arguments.model, arguments.threads, FEW, False)  # from the first round on the files are cached
        for _ in range(arguments.rounds):
            us.append(time_ours(program, arguments.model, arguments.threads, arguments.tokens, processor))
            them.append(time_theirs(llama, arguments.tokens, processor))
            rates.append(memory_rate(rate_program))
        rate = max(rates) if processor else statistics.median(rates)
        typical = min if processor else statistics.median
        bound = arguments.weights * 1e6 * width / rate
        for who, times in (("llmtrain", us), ("llama.cpp", them)):
            middle = typical(times)
            print(f"{name} {who:10} {1e3 * middle:7.1f} ms/token (min {1e3 * min(times):.1f}), "
                  f"{arguments.weights * width / 1e3 / middle:5.1f} GB/s, memory {rate / 1e9:.1f} GB/s: "
                  f"{100 * bound / middle:.0f}% of the bound")
        print(f"{name} ratio to llama.cpp {typical(them) / typical(us):.2f} x, "
              f"of minima {min(them) / min(us):.2f} x")
        del llama


main()
