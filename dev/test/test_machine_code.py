#!/usr/bin/env python3
"""test_machine_code.py [LAUNCHES]: dev/gpu/machine_code.py and dev/gpu/bounds.py, on a small listing, and on the
launches of a step that dev/gpu/launches.cu, compiled, lists. Needs neither CUDA nor a package."""

import io
import os
import subprocess
import sys

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(here, "../gpu"))
import bounds  # noqa: E402
import machine_code as code  # noqa: E402

passed = failed = 0


def check(name, value, expected):
    global passed, failed
    if value == expected:
        passed += 1
        print("passed  %s: %s" % (name, value))
    else:
        failed += 1
        print("FAILED  %s: %s instead of %s" % (name, value, expected))


# The listing has norm_forward_kernel<8, true> as of commit e7aafc3, which stored 16 bytes four at a time; a kernel that
# stores 16 bytes, and twice 4 bytes at addresses that differ by more than it seems; and a loop with two loops in it.
with open(os.path.join(here, "fixtures/machine_code.sass")) as file:
    kernels = {mangled: code.kernel_analyze(lines) for mangled, lines in code.listing_read(file).items()}
norm, store, attention = kernels.values()


def record(name, analyzed, **more):
    return dict({"kernel": name, "arch": "sm_90a", "precision": "BF16", "registers": 64, "static": 0, "dynamic": 0,
                 "stack": 0, "spilled": 0, "threads": 128, "code": analyzed}, **more)


def verdict(name, analyzed, allowed=(), **more):
    out = io.StringIO()
    failures, _ = code.gate([record(name, analyzed, **more)], allowed, out)
    return failures, out.getvalue().split(" ", 2)[-1].split(";")[0].split(",")[0].strip()


check("a norm of e7aafc3", verdict("norm_forward_kernel<8,true>", norm), (1, "has 4 stores of 4 bytes side by side"))
check("the same without packs", verdict("norm_forward_kernel<1,true>", norm), (0, ""))
check("the same, allowed", verdict("norm_forward_kernel<8,true>", norm, [("split", "*/norm_*", "why")])[0], 0)
check("stores of 16 bytes", store["split"], [])
check("their widths", code.widths_text(store, "store"), "2x16 2x4")
check("local memory", verdict("norm_store_kernel<8>", store, stack=8), (1, "has 8 bytes of arrays in local memory"))
check("spills", verdict("norm_store_kernel<8>", store, stack=8, spilled=12), (1, "spills 12 bytes"))
check("loops", [(loop["around"], loop["inner"]) for loop in attention["loops"]], [(-1, False), (0, True), (0, True)])
copy = next(loop for loop in attention["loops"] if loop.get("ldgsts"))
check("a loop that copies", [copy.get(key, 0) for key in ("issued", "ldgsts", "load_bytes", "lds", "hmma")],
      [32, 2, 32, 0, 0])
product = next(loop for loop in attention["loops"] if loop.get("hmma"))
check("a loop that multiplies", [product[key] for key in ("issued", "hmma", "ldsm", "mma_flops")],
      [23, 12, 4, 12 * 4096])
check("outside of loops", [attention["direct"][key] for key in ("issued", "mufu")], [3, 1])
check("narrow accesses in a loop", verdict("packs<8>", dict(attention, loops=[dict(copy, load_2=1)]))[1],
      "has a load of 2 bytes in an innermost loop")

for threads, registers, shared, arch, expected in (
        (128, 168, 36864, "sm_90a", (3, "registers")), (128, 254, 55808, "sm_90a", (2, "registers")),
        (128, 166, 55296, "sm_80", (2, "shared")), (256, 32, 0, "sm_100", (8, "warps")),
        (32, 32, 0, "sm_90a", (32, "blocks")), (1024, 65, 0, "sm_80", (0, "registers"))):
    check("%d threads, %d registers, %d bytes on %s" % (threads, registers, shared, arch),
          code.occupancy(arch, registers, threads, shared), expected)

ptxas = """ptxas info    : Compiling entry function '_Z1aILi8EEv' for 'sm_90a'
ptxas info    : Function properties for _Z1aILi8EEv
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 16 bytes stack, 128 bytes smem"""
check("ptxas", code.ptxas_read(ptxas.splitlines()),
      {("sm_90a", "_Z1aILi8EEv"): {"stack": 16, "spilled": 12, "registers": 64, "static": 128}})
check("PTX", code.ptx_threads([".visible .entry _Z1a(", ".maxntid 16, 8, 2"]), {"_Z1a": 256})
check("a name", code.name_short("void softmax<(int)8, (Kind)2, true>(unsigned short*)"), "softmax<8,2,true>")

# Bounds, for a norm whose loop loads 64 bytes per thread.
h100 = bounds.GPUS["H100"]
launch = {"kernel": "norm_backward_kernel<8,true>", "grid": [1320, 1, 1], "threads": 64, "shared": 0,
          "arguments": [1, 1, 1, 1, 1, 1, 1, 65536, 768]}
plain = {"direct": {"issued": 100}, "loops": [{"issued": 500, "load_bytes": 64, "around": -1, "inner": True}]}
records = {launch["kernel"]: record(launch["kernel"], plain)}
bound = bounds.launch_bound(launch, h100, records, {})
memory = 4 * 2 * 65536 * 768 / (0.9 * 3352e6)
check("memory of a norm", (bound.limit, round(bound.limits["memory"] / memory, 6)), ("memory", 1.0))
trips = 4 * 2 * 65536 * 768 / (32 * 2 * 1320) / 64
check("issue of a norm", round(bound.limits["issue"] / (10 * 2 * (100 + 500 * trips) / (4 * 1.83e6)), 6), 1.0)
check("its waves", round(bound.waves, 6), 1320 / (132 * code.occupancy("sm_90a", 64, 64, 0)[0]))
crowd = bounds.launch_bound(dict(launch, grid=[133, 1, 1]), h100, records, {})
alone = bounds.launch_bound(dict(launch, grid=[132, 1, 1]), h100, records, {})
check("a block too many takes as long as a wave", crowd.limits["issue"] > 1.9 * alone.limits["issue"], True)
counted = """{"kernel": "a<8, true>", "space": "global", "sectors": 12, "ideal": 8}
{"kernel": "a<8, true>", "space": "shared", "wavefronts": 6, "ideal": 2}
{"kernel": "a<8, true>", "kind": "launch", "launches": 1}"""
check("sectors", bounds.excess_read(counted.splitlines()), {"a<8,true>": (1.5, 3.0)})
forward = {"kernel": "attention_forward_tensor<64,2>", "grid": [5, 1, 1], "threads": 128, "shared": 36864,
           "arguments": [1, 1, 1, 5, 128, 5, 5, 64, 0.125]}
work, moved, _ = bounds.attention_work(forward, record(forward["kernel"], attention))
# Warps of 32 queries see 1, 1, 2 and 2 tiles of 64 keys, and multiply each twice.
check("attention's products", (work["mma_flops"], moved), (5 * 6 * 2 * 2 * 32 * 64 * 64, 4 * 128 * 2 * 64 * 5))
gemm = bounds.launch_bound({"matmul": [2304, 65536, 768], "bytes": [2, 2, 2, 2], "transposed": 1, "epilogue": 4,
                            "beta": 0}, h100, {}, {})
check("a matmul", (gemm.operation, gemm.limit), ("matmul_forward(2304,768)", "cuBLASLt"))
check("an unknown kernel", bounds.launch_bound(dict(launch, kernel="new<8>"), h100, records, {}), None)
check("measured times", bounds.measured_read(["classifier 4.5", "matmul_forward(8,9) .5"]),
      {"classifier": 4.5, "matmul_forward(8,9)": 0.5})
for flags, message in ((["--gpu", "V100"], "there is no data of a GPU 'V100'"),
                       (["--measured", os.path.abspath(__file__)], "line 1 of the measured times is")):
    run = subprocess.run([sys.executable, os.path.join(here, "../gpu/bounds.py"), "--launches", "none", "--code", "none"] +
                         flags, capture_output=True, text=True)
    check("refused", (run.returncode, message in run.stderr), (1, True))

if len(sys.argv) > 1:
    step = code.launches_read(sys.argv[1], "gpt2:124M", 64, 132)
    forward = [launch for launch in step if launch.get("kernel") == "attention_forward_tensor<64,2>"]
    check("attention's launches", {(*launch["grid"], launch["threads"], launch["shared"]) for launch in forward},
          {(128, 1024 // 128, 6, 128, 2 * (128 + 2 * 64) * (64 + 8))})
    check("one for each block", len(forward), 12)
    matmuls = [launch["matmul"] for launch in step if "matmul" in launch]
    check("matmuls of 12 blocks and a head", sum(2 * n * m * k for n, m, k in matmuls),
          6 * 65536 * (12 * 12 * 768 * 768 + 50304 * 768))
    for model, batch in code.STEPS:
        step = code.launches_read(sys.argv[1], model, batch, 132)[1:]
        records = {launch["kernel"]: record(launch["kernel"], attention) for launch in step if "kernel" in launch}
        found, unknown = bounds.step_bounds(step, h100, records, {})
        check(model + ": each kernel has a row in dev/gpu/bounds.py", unknown, set())
        check(model + ": no bound is below its bytes", [b for b in found if b.ms < b.limits["memory"]], [])

print("%d passed, %d failed" % (passed, failed))
sys.exit(failed > 0)
