#!/usr/bin/env python3
"""bounds.py: the minimum time of each kernel of a training step on a GPU, estimated without a GPU.

    1. GPUs         their rates, with sources
    2. kernels      what each kernel moves and how often its loops run
    3. bound        of a launch: the slowest of issue, tensor cores, special functions, shared memory, L2 and memory
    4. step         by operation, next to what was measured
    5. program

    bounds.py --launches build/launches-BF16 --code build/machine-code-BF16.jsonl [--gpu H100] [--measured FILE]

What a step launches comes from the model's code (dev/gpu/launches.cu), what a launch issues is counted in the machine code
(dev/gpu/machine_code.py), and what it must move follows from its arguments. A launch's bound is the longest of

    issue, tensor, MUFU, shared     instructions, flops, special functions and bytes of its warps, at the rate of the
                                    multiprocessor with the most blocks: ceil(blocks / SMs)
    L2                              bytes loaded from it, at its rate and at that of each multiprocessor's port
    memory                          bytes that must come from or go to memory at least once
    launch                          2 us between the starts of two kernels

It ignores latencies, so a kernel that waits is slower; and a cache may serve bytes that are counted as memory.
--measured FILE: lines with an operation and milliseconds, from `bench --kernels FILE` on a GPU; adds a column.
"""

import argparse
import collections
import json
import math
import os
import re
import sys

import machine_code

# ------------------------------------------------------------------------------------------------
# 1. GPUs
#
# Per multiprocessor and clock: 4 warp instructions issued (one by each scheduler), 16 special functions, 128 bytes of
# shared memory, 64 bytes through its port to the L2 cache: "CUDA C++ Programming Guide", throughput of native
# arithmetic instructions; the tuning guides for Ampere, Hopper and Blackwell. Registers, blocks: machine_code.py.
#
# name: architecture for the build; multiprocessors; GHz at which the stated tensor peak holds; the share of that peak
# which mma.sync reaches; L2 bytes per clock. Dense BF16 TFLOP/s with float sums and memory GB/s are those of
# llmtrain/base/data_sheets.h.
#
#   A100     "NVIDIA A100 Tensor Core GPU Architecture": 108 SMs, 1.41 GHz, 312 TFLOP/s, L2 5,120 bytes per clock,
#            2,039 GB/s with 80 GB. mma.sync is the widest instruction there.
#   H100     "NVIDIA H100 Tensor Core GPU Architecture" (SXM5): 132 SMs, 989.4 TFLOP/s, hence 1.83 GHz, 3,352 GB/s. The
#            L2 as in A100. mma.sync reaches 62% of the peak: "Benchmarking and Dissecting the Nvidia Hopper GPU
#            Architecture via Microbenchmarking".
#   H200     the same with 4,800 GB/s: its data sheet.
#   B200     data sheet: 2,250 TFLOP/s, 8,000 GB/s; 148 SMs, hence 1.86 GHz. mma.sync is taken to be as fast as on H100
#            (a quarter of tcgen05's peak), the L2 to be twice that of H100: assumptions.

Gpu = collections.namedtuple("Gpu", "arch processors ghz tflops mma l2 memory")
with open(os.path.join(os.path.dirname(__file__), "../../llmtrain/base/data_sheets.h")) as sheets:
    SHEETS = dict(re.findall(r'\{"(\w+)\*", ([^}]*)\}', sheets.read()))


def gpu(name, arch, processors, ghz, mma, l2):
    tflops, _, _, memory, *_ = (float(column) for column in SHEETS[name].split(", "))
    return Gpu(arch, processors, ghz, tflops, mma, l2, memory)


GPUS = {
    "A100": gpu("A100", "sm_80", 108, 1.41, 1.0, 5120),
    "H100": gpu("H100", "sm_90a", 132, 1.83, 0.625, 5120),
    "H200": gpu("H200", "sm_90a", 132, 1.83, 0.625, 5120),
    "B200": gpu("B200", "sm_100", 148, 1.855, 0.31, 10240),
}
ISSUE, MUFU, SHARED, PORT = 4, 16, 128, 64
LAUNCH_MS = 0.002   # between two kernels of a stream: an assumption
GEMM_SHARE = 0.79   # share of the tensor peak that cuBLASLt reaches in large matmuls: assumed (780 TFLOP/s on H100)
MEMORY_SHARE = 0.9  # attainable share of the stated memory rate: an assumption (4.3 TB/s on H200)

# ------------------------------------------------------------------------------------------------
# 2. Kernels
#
# For each kernel: its operation (as dev/bench/bench.c calls it), and as functions of a launch's arguments the bytes that it
# must move from or to memory, and those that its threads load (weights that stay in the cache too). E: bytes of floatX.
# `passes`: the number of consecutive loops in which a thread loads those bytes.

E = 2
Moves = collections.namedtuple("Moves", "memory loads passes")


def moves(memory, loads=None, passes=1):
    return Moves(memory, memory if loads is None else loads, passes)


def norm_forward(a, grid):
    rows, C, branch = grid[0], a[9], a[5]
    return moves(rows * C * E * (4 if branch else 2) + 8 * rows, rows * C * E * (4 if branch else 3))


# Pattern of the name; operation, None for the previous kernel's; traffic, a function of (arguments, grid).
KERNELS = (
    (r"norm_forward_kernel<\d+,true>", "layernorm_forward", norm_forward),
    (r"norm_forward_kernel<\d+,false>", "rmsnorm_forward", norm_forward),
    (r"norm_backward_kernel<\d+,true>", "layernorm_backward", lambda a, g: moves(4 * E * a[7] * a[8])),
    (r"norm_backward_kernel<\d+,false>", "rmsnorm_backward", lambda a, g: moves(4 * E * a[7] * a[8])),
    (r"add_partial<", None, lambda a, g: moves(0, 4 * a[3] * a[4] * g[1])),
    (r"attention_delta<", "attention_backward",
     lambda a, g: moves((2 * E * a[6] + 4) * math.prod(a[3:6]), 2 * E * math.prod(a[3:7]))),
    (r"classifier_kernel<", "classifier", lambda a, g: moves(2 * E * a[5] * a[7], 2 * E * a[5] * a[7], 2)),
    (r"column_pieces_kernel<", None, lambda a, g: moves(E * a[3] * a[4])),
    (r"column_join_kernel", None, lambda a, g: moves(0, 4 * a[3] * a[4])),
    (r"embedding_forward_kernel<", "embedding_forward", lambda a, g: moves(2 * E * a[5] * a[6])),
    (r"embedding_sort_tiles", "embedding_backward", lambda a, g: moves(12 * a[2])),
    (r"embedding_merge", "embedding_backward", lambda a, g: moves(16 * a[3])),
    (r"embedding_sum_pieces<", "embedding_backward", lambda a, g: moves(E * a[5] * a[6])),
    (r"embedding_join_pieces<", "embedding_backward", lambda a, g: moves(0)),
    (r"heads_kernel<", "heads", lambda a, g: moves(2 * E * a[3] * a[4] * (a[5] + 2 * a[6]) * a[7])),
    (r"heads_copies_kernel<", "heads", lambda a, g: moves(E * a[3] * (2 * a[4] + a[5] * (a[2] + 1)) * a[6])),
    (r"rope_kernel<", "rope", lambda a, g: moves(2 * E * a[4] * a[5] * a[7])),
    (r"swiglu_forward_kernel<", "swiglu_forward", lambda a, g: moves(3 * E * a[2] * a[3], 2 * E * a[2] * a[3])),
    (r"swiglu_backward_kernel<", "swiglu_backward", lambda a, g: moves(5 * E * a[3] * a[4], 3 * E * a[3] * a[4])),
    (r"exact_sum_kernel<\d+,true>", "exact_sum_squares", lambda a, g: moves(4 * a[2])),
    (r"exact_sum_kernel<\d+,false>", "exact_sum", lambda a, g: moves(4 * a[2])),
    (r"exact_carry_kernel", None, lambda a, g: moves(0)),
    # AdamW: gradient, master weight, m and v read, the latter three and the parameter written; 1,024 elements a block.
    (r"optimizer_kernel<4>", "optimizer_update", lambda a, g: moves((28 + E) * 1024 * g[0], 16 * 1024 * g[0])),
)
# Attention with tensor cores: matmuls per tile of the loop, rows of queries or keys streamed in it, tiles copied.
ATTENTION = {
    "attention_forward_tensor": ("attention_forward", 2, 64),
    "attention_backward_queries_tensor": ("attention_backward", 3, 32),
    "attention_backward_keys_tensor": ("attention_backward", 4, 32),
}

# ------------------------------------------------------------------------------------------------
# 3. Bound

Bound = collections.namedtuple("Bound", "operation kernel ms limit limits waves")


def sum_counts(parts):
    """Of [(times, counts)]."""
    total = collections.Counter()
    for times, counts in parts:
        for key, count in counts.items():
            if key not in ("around", "inner"):
                total[key] += times * count
    return total


def attention_work(launch, record):
    """What all warps issue, and the bytes from memory and from L2, for an attention launch, whose blocks take as long
    as the causal part of their rows."""
    name, width, m = re.match(r"(\w+)<(\d+),(\d+)", launch["kernel"]).groups()
    _, products, streamed = ATTENTION[name]
    pairs, T, H, K, D = (int(x) for x in launch["arguments"][-6:-1])
    rows, width = 16 * int(m), int(width)
    own = range(0, 4 * rows * launch["grid"][1], rows)  # the first row of each warp
    if name.endswith("keys_tensor"):
        trips = H // K * sum(-(-T // streamed) - first // streamed for first in own)
        B = pairs // K
    else:
        trips = sum(-(-(first + rows) // streamed) for first in own)
        B = pairs // H
    hmma = products * 2 * rows * streamed * width / 4096
    copies = 2 * streamed * width * E / (launch["threads"] * 16)
    loops = record["code"]["loops"]
    # The main loop is the outer one around most of the matmuls.
    total = [sum(l.get("hmma", 0) for l in loops if l is loop or l["around"] == i) for i, loop in enumerate(loops)]
    main = max((i for i, loop in enumerate(loops) if loop["around"] < 0), key=lambda i: total[i])
    inner = [loop for loop in loops if loop["around"] == main]
    parts, once = [(1.0, loops[main])], [(1, record["code"]["direct"])]
    if not any(loop.get("hmma") for loop in inner):
        parts = [(hmma / loops[main]["hmma"], loops[main])]  # several tiles at a time
    for kind, wanted in (("hmma", hmma - loops[main].get("hmma", 0)), ("ldgsts", copies)):
        there = [loop for loop in inner if loop.get(kind)]
        each = sum(loop[kind] for loop in there)
        parts += [(max(0.0, wanted / each), loop) for loop in there]
    for loop in loops:  # those before the main one, which load the rows that stay
        if loop["around"] < 0 and loop is not loops[main] and loop.get("ldgsts"):
            once.append((rows * width * E / (32 * 16 * loop["ldgsts"]), loop))
    counts = sum_counts([(pairs * trips, sum_counts(parts)), (pairs * len(own), sum_counts(once))])
    token = B * T * E * D
    memory = token * {2: H + 2 * K + H, 3: H + 2 * K + 2 * H, 4: H + 2 * K + H + 2 * K}[products]
    return counts, memory, memory + pairs * trips / 4 * 2 * streamed * width * E


def kernel_work(launch, record, moved):
    """The same for a launch whose threads are all alike. The bytes that threads load set the number of loop turns."""
    warps = -(-launch["threads"] // 32) * math.prod(launch["grid"])
    code, each = record["code"], moved.loads / (32.0 * warps)
    direct, loops = code["direct"].get("load_bytes", 0), code["loops"]
    parts = [(min(1.0, each / direct) if direct > each else 1.0, code["direct"])]
    main = sorted((loop for loop in loops if loop.get("load_bytes")), key=lambda loop: -loop["load_bytes"])
    if each > direct and main:
        for loop in main[:moved.passes]:
            trips = (each - direct) / moved.passes / loop["load_bytes"]
            parts.append((trips, loop))
            if loop["around"] >= 0 and loops[loop["around"]] not in main[:moved.passes]:
                parts.append((1.0 / moved.passes, loops[loop["around"]]))
    return sum_counts([(warps, sum_counts(parts))]), moved.memory, max(moved.memory, moved.loads)


def excess_read(lines):
    """{kernel: (sectors over the ideal, wavefronts over the ideal)} from the output of dev/emulator/count.h."""
    sums = collections.defaultdict(collections.Counter)
    for row in map(json.loads, lines):
        if "ideal" in row:
            at, unit = sums[row["kernel"].replace(" ", "")], "sectors" if row["space"] == "global" else "wavefronts"
            at[unit] += row[unit]
            at["ideal " + unit] += row["ideal"]
    return {name: tuple(at[unit] / max(1, at["ideal " + unit]) for unit in ("sectors", "wavefronts"))
            for name, at in sums.items()}


def launch_bound(launch, gpu, records, excess):
    """The bound of one launch, kernel or not; None for a kernel without a row. Its operation may be None."""
    clock, memory_rate = 1e6 * gpu.ghz, 1e6 * MEMORY_SHARE * gpu.memory  # per ms
    if "memset" in launch:
        limits = {"memory": launch["memset"] / memory_rate, "launch": LAUNCH_MS}
        operation, kernel, waves = "fill_zero", "memset", 0
    elif "matmul" in launch:
        n, m, k = launch["matmul"]
        a, b, c, d = launch["bytes"]
        moved = a * n * k + b * k * m + d * n * m + (c * n * m if launch["beta"] else 0)
        if launch["epilogue"] & 128:  # the matrix before the GELU is written or read too
            moved += d * n * m
        limits = {"cuBLASLt": 2 * n * m * k / (1e9 * GEMM_SHARE * gpu.tflops), "memory": moved / memory_rate,
                  "launch": LAUNCH_MS}
        gelu = "_gelu" if launch["epilogue"] & 128 else ""
        if d == 4 and E < 4:
            operation = "matmul_backward_weight(%d,%d)" % (m, n)
        elif launch["transposed"]:
            operation = "matmul%s_forward(%d,%d)" % (gelu, n, k)
        else:
            operation = "matmul%s_backward_input(%d,%d)" % (gelu, k, n)
        kernel, waves = "cuBLASLt %dx%dx%d" % (n, m, k), 0
    else:
        kernel = launch["kernel"]
        record, row = records.get(kernel), next((r for r in KERNELS if re.match(r[0], kernel)), None)
        attention = ATTENTION.get(kernel.split("<")[0])
        if record is None or not (row or attention):
            return None
        if attention:
            operation, (counts, memory, crossing) = attention[0], attention_work(launch, record)
        else:
            operation = row[1]
            counts, memory, crossing = kernel_work(launch, record, row[2](launch["arguments"], launch["grid"]))
        blocks = math.prod(launch["grid"])
        # Attention's blocks differ in length, the longest come first, and the last ones fill the gaps.
        share = (-(-blocks // gpu.processors) / blocks) if not attention else 1.0 / gpu.processors
        resident = machine_code.occupancy(gpu.arch, record["registers"], launch["threads"],
                                          record["static"] + launch["shared"])[0]
        waves = blocks / (resident * gpu.processors) if resident else math.inf
        over = [max(1.0, ratio) for ratio in excess.get(kernel, (1.0, 1.0))]
        mma_rate = 1e9 * gpu.tflops * gpu.mma / gpu.processors / clock  # flops per multiprocessor and clock
        limits = {
            "issue": share * counts["issued"] / (ISSUE * clock),
            "tensor": share * counts["mma_flops"] / (mma_rate * clock),
            "MUFU": share * 32 * counts["mufu"] / (MUFU * clock),
            "shared": share * over[1] * 32 * (counts["shared_bytes"] + 16 * counts["ldgsts"]) / (SHARED * clock),
            "L2": max(over[0] * crossing / (gpu.l2 * clock), share * over[0] * crossing / (PORT * clock)),
            "memory": memory / memory_rate,
            "launch": LAUNCH_MS,
        }
    limit = max(limits, key=lambda name: limits[name])
    return Bound(operation, kernel, limits[limit], limit, limits, waves)


# ------------------------------------------------------------------------------------------------
# 4. Step

def step_bounds(launches, gpu, records, excess):
    """The bounds of all launches, and the names of kernels that have none."""
    bounds, unknown = [], set()
    for launch in launches:
        bound = launch_bound(launch, gpu, records, excess)
        if bound is None:
            unknown.add(launch["kernel"])
        else:
            bounds.append(bound if bound.operation else bound._replace(operation=bounds[-1].operation))
    return bounds, unknown


def step_print(title, flops, bounds, unknown, gpu, measured, out):
    """A line for each operation, longest first, with its kernels below; returns the sum in ms."""
    operations = collections.defaultdict(list)
    for bound in bounds:
        operations[bound.operation].append(bound)
    total = sum(bound.ms for bound in bounds)
    layout = "%-46s %6s %9s  %-9s %7s %9s %6s"
    print("\n%s: estimated, not measured" % title, file=out)
    print(layout % ("operation, its kernels", "times", "bound ms", "set by", "waves", "measured", "bound"), file=out)
    for operation, inside in sorted(operations.items(), key=lambda item: -sum(b.ms for b in item[1])):
        kernels = collections.defaultdict(list)
        for bound in inside:
            kernels[bound.kernel].append(bound)
        ms = sum(b.ms for b in inside)
        found = "%.3f" % measured[operation] if operation in measured else ""
        share = "%.0f%%" % (100 * ms / measured[operation]) if measured.get(operation) else ""
        for number, (kernel, its) in enumerate([(operation, inside)] + sorted(kernels.items())):
            longest = max(its, key=lambda b: b.ms)
            print(layout % (("  " if number else "") + kernel, len(its), "%.3f" % sum(b.ms for b in its),
                            longest.limit if number else "", "%.1f" % longest.waves if number and longest.waves else "",
                            found if not number else "", share if not number else ""), file=out)
    print(layout % ("sum", len(bounds), "%.1f" % total, "", "",
                    "%.1f" % sum(measured.values()) if measured else "", ""), file=out)
    print("the bounds would be %.1f%% MFU of %g TFLOP/s; matmuls are %.0f%% of the time"
          % (100 * flops / (1e9 * total * gpu.tflops), gpu.tflops,
             100 * sum(b.ms for b in bounds if b.kernel.startswith("cuBLASLt")) / total), file=out)
    if unknown:
        print("without a row in dev/gpu/bounds.py, and in no sum: %s" % ", ".join(sorted(unknown)), file=out)
    return total


def measured_read(lines):
    """{operation: ms}"""
    found = {}
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if len(fields) != 2 or not re.match(r"[\d.]+$", fields[1]):
            sys.exit("bounds.py: line %d of the measured times is '%s', not an operation and its milliseconds"
                     % (number, line.strip()))
        found[fields[0]] = float(fields[1])
    return found


# ------------------------------------------------------------------------------------------------
# 5. Program

def main():
    parser = argparse.ArgumentParser(description="how long the kernels of a training step must take on a GPU at least")
    parser.add_argument("--launches", required=True, help="dev/gpu/launches.cu, compiled")
    parser.add_argument("--code", required=True, help="what dev/gpu/machine_code.py wrote for the same precision")
    parser.add_argument("--gpu", default="H100", help=", ".join(GPUS))
    parser.add_argument("--model", default="gpt2:124M")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sectors", help="what the emulator counted (make sectors): sectors and bank conflicts")
    parser.add_argument("--measured", help="lines of an operation and milliseconds: bench --kernels FILE")
    o = parser.parse_args()
    if o.gpu not in GPUS:
        sys.exit("bounds.py: there is no data of a GPU '%s'; give one of %s" % (o.gpu, ", ".join(GPUS)))
    gpu, measured, excess = GPUS[o.gpu], {}, {}
    if o.measured:
        with open(o.measured) as file:
            measured = measured_read(file)
    if o.sectors:
        with open(o.sectors) as file:
            excess = excess_read(file)
    with open(o.code) as file:
        records = {r["kernel"]: r for r in map(json.loads, file) if r["arch"] == gpu.arch and "code" in r}
    if not records:
        sys.exit("bounds.py: %s has no machine code for %s; it takes nvdisasm: pip install nvidia-cuda-nvdisasm"
                 % (o.code, gpu.arch))
    launches = machine_code.launches_read(o.launches, o.model, o.batch, gpu.processors)
    bounds, unknown = step_bounds(launches[1:], gpu, records, excess)
    step_print("%s, B=%d T=1024, one %s" % (o.model, o.batch, o.gpu), launches[0]["step"], bounds, unknown, gpu,
               measured, sys.stdout)


if __name__ == "__main__":
    main()
