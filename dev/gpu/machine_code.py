#!/usr/bin/env python3
"""machine_code.py: resources and instructions of the kernels' machine code, read from a build, without a GPU.

    1. listing      nvdisasm's text: the instructions of each kernel
    2. flow         basic blocks, and the loops among them
    3. counts       what a stretch of code issues; accesses that should have been wider
    4. occupancy    how many blocks of a kernel a multiprocessor holds, and what limits them
    5. build        registers and memory from ptxas, threads from PTX, names
    6. gate         what fails, and what is allowed
    7. program

    machine_code.py --precision BF16 --folder DIR --ptxas FILE [--launches PROGRAM] [--out FILE.jsonl]

DIR has the .ptx and .cubin files of `nvcc -keep`, FILE has the output of `-Xptxas -v`; dev/gpu/resources.sh makes both.
Prints a table with a line for each kernel and architecture, then the failures, if any: exit status 1. --out writes the
results as JSON, an object per line, which dev/gpu/bounds.py reads.

Counts are static: both arms of a branch count as issued, subroutines (slow paths of divisions) do not. Loops are
natural loops (a jump back to a block that dominates it), so code that was moved out of line still belongs to its loop.
"""

import argparse
import collections
import fnmatch
import glob
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile

# ------------------------------------------------------------------------------------------------
# 1. Listing

Instruction = collections.namedtuple("Instruction", "address predicate op operands")
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:(@!?U?P[T\d]+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"^(\.L_x_\d+):")
SECTION = re.compile(r"^\.text\.([^\s:]+):")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")


def listing_read(lines):
    """{kernel's mangled name: [Instruction or label]} from the output of nvdisasm -c."""
    kernels, code = {}, None
    for line in lines:
        section, label = SECTION.match(line), LABEL.match(line)
        if section:
            code = kernels.setdefault(section.group(1), [])
        elif code is not None and label:
            code.append(label.group(1))
        elif code is not None:
            found = INSTRUCTION.match(line)
            if found:
                code.append(Instruction(int(found.group(1), 16), found.group(2) or "", found.group(3), found.group(4)))
    return kernels


# ------------------------------------------------------------------------------------------------
# 2. Flow

class Block:
    def __init__(self):
        self.code, self.next, self.before = [], [], []


def flow_blocks(code):
    """The basic blocks of a kernel, in the order of the code; the first one is its entry."""
    blocks, labels, current = [], {}, None

    def begin():
        nonlocal current
        if current is None or current.code:
            current = Block()
            blocks.append(current)

    begin()
    for item in code:
        if isinstance(item, str):
            begin()
            labels[item] = current
            continue
        current.code.append(item)
        if item.op.split(".")[0] in ("BRA", "EXIT", "RET", "BSYNC", "BRX", "JMP"):
            begin()

    reconverge = {}  # where diverged threads reconverge, by barrier register: the last BSSY in the code
    for number, block in enumerate(blocks):
        for item in block.code:
            if item.op == "BSSY" or item.op.startswith("BSSY."):
                reconverge[item.operands.split(",")[0]] = TARGET.search(item.operands)
        last = block.code[-1] if block.code else None
        kind = last.op.split(".")[0] if last else ""
        follows = blocks[number + 1] if number + 1 < len(blocks) else None
        target = TARGET.search(last.operands) if last and kind in ("BRA", "JMP") else None
        # A branch has a condition before it or among its operands (UP0, or UR7 of BRA.DIV).
        always = kind in ("RET", "BRX") or (kind in ("BRA", "JMP", "EXIT") and not last.predicate and
                                            not re.match(r"!?U?[PR]\w", last.operands))
        if kind == "BSYNC" and reconverge.get(last.operands) is not None:
            meeting = labels.get(reconverge[last.operands].group(1))
            always, target = meeting is not None and meeting is not follows, None
            if always:
                block.next.append(meeting)
        if target and target.group(1) in labels:
            block.next.append(labels[target.group(1)])
        if not always and follows is not None:
            block.next.append(follows)
    return blocks


def flow_loops(blocks):
    """[(header, set of blocks)] of the reachable natural loops; inner ones after those that contain them."""
    order, seen, stack = [], set(), [(blocks[0], iter(blocks[0].next))]
    seen.add(blocks[0])
    while stack:  # depth first; `order` is its reverse postorder in the end
        block, rest = stack[-1]
        step = next((b for b in rest if b not in seen), None)
        if step is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(step)
            stack.append((step, iter(step.next)))
    order.reverse()
    place = {block: i for i, block in enumerate(order)}
    for block in order:
        for successor in block.next:
            successor.before.append(block)
    # "A Simple, Fast Dominance Algorithm" (Cooper, Harvey, Kennedy).
    dominator, changed = {order[0]: order[0]}, True
    while changed:
        changed = False
        for block in order[1:]:
            new = None
            for b in (b for b in block.before if b in dominator):
                while new is not None and new is not b:
                    if place[new] > place[b]:
                        new = dominator[new]
                    else:
                        b = dominator[b]
                new = b
            if dominator.get(block) is not new:
                dominator[block], changed = new, True

    def dominates(a, b):
        while place[b] > place[a]:
            b = dominator[b]
        return a is b

    loops = {}
    for block in order:
        for header in block.next:
            if block is header and len(block.code) == 1:
                continue  # the infinite loop after a kernel's end
            if not dominates(header, block):
                continue
            body, work = loops.setdefault(header, {header}), [block]
            while work:
                b = work.pop()
                if b not in body:
                    body.add(b)
                    work.extend(b.before)
    return sorted(loops.items(), key=lambda loop: -len(loop[1]))


# ------------------------------------------------------------------------------------------------
# 3. Counts

WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
GLOBAL = {"LDG": "load", "STG": "store", "LD": "load", "ST": "store"}
ADDRESS = re.compile(r"\[((?:U?R\d+|U?RZ)[^\]]*?)(?:([+-])(0x[0-9a-f]+))?\](?!\[)")


def access_bytes(op):
    return next((WIDTHS[part] for part in op.split(".")[1:] if part in WIDTHS), 4)


def mma_flops(op):
    """Of HMMA.16816.F32.BF16: 2 * 16 * 8 * 16, by a warp."""
    shape = re.search(r"MMA\.(16)(8)(\d+)", op)
    return 2 * 16 * 8 * int(shape.group(3)) if shape else 0


def counts_of(code):
    """What one warp issues when it executes these instructions once; bytes are per thread."""
    c = collections.Counter(issued=len(code))
    for item in code:
        name, width = item.op.split(".")[0], access_bytes(item.op)
        if item.predicate == "@!PT":
            continue  # never executed: loads that ptxas puts before LDGSTS as a workaround; still issued
        if name in GLOBAL:
            c["%s_%d" % (GLOBAL[name], width)] += 1
            c[GLOBAL[name] + "_bytes"] += width
        elif name == "LDGSTS":
            c["ldgsts"] += 1
            c["load_bytes"] += width
        elif name in ("LDL", "STL"):
            c["local"] += 1
        elif name in ("LDS", "STS"):
            c[name.lower()] += 1
            c["shared_bytes"] += width
        elif name == "LDSM":
            c["ldsm"] += 1
            c["shared_bytes"] += 4 * int(item.op[-1])  # LDSM.16.M88.4: four matrices of 128 bytes, 4 bytes a thread
        elif name == "MUFU":
            c["mufu"] += 1
        elif name in ("ATOMG", "REDG", "ATOM", "RED"):
            c["atomics"] += 1
        elif name.endswith("MMA") and mma_flops(item.op):
            c["hmma"] += 1
            c["mma_flops"] += mma_flops(item.op)
    return dict(c)


def written_registers(item):
    """The general registers in the first operand; a wide result also fills the ones after it."""
    found = re.match(r"R(\d+)\b", item.operands)
    if not found or item.op.split(".")[0] in ("STG", "ST", "STS", "STL", "RED", "REDG", "BAR"):
        return ()
    loads, first = item.op.startswith("LD"), int(found.group(1))
    wide = access_bytes(item.op) // 4 if loads else 4 if "MMA" in item.op else 2 if "WIDE" in item.op else 1
    return range(first, first + max(1, wide))


def accesses_split(code):
    """[sentence] for global accesses of a basic block that are neighbors and could be one: same kind, same base."""
    groups, age, found = collections.defaultdict(set), collections.Counter(), []
    for item in code:
        name, width = item.op.split(".")[0], access_bytes(item.op)
        address = ADDRESS.search(item.operands)
        if name in GLOBAL and width < 16 and address:
            base = address.group(1)
            registers = [int(r) for r in re.findall(r"\bR(\d+)", base)]
            ages = tuple(age[r + i] for r in registers for i in (0, 1))  # addresses are 64 bits wide
            offset = int(address.group(3) or "0", 16) * (-1 if address.group(2) == "-" else 1)
            groups[GLOBAL[name], width, base, ages, item.predicate].add(offset)
        for register in written_registers(item):
            age[register] += 1
    for (kind, width, *_), offsets in groups.items():
        run, longest = 1, 1
        ordered = sorted(offsets)
        for a, b in zip(ordered, ordered[1:]):
            run = run + 1 if b - a == width else 1
            longest = max(longest, run)
        if longest > 1:
            found.append("%d %ss of %d bytes side by side" % (longest, kind, width))
    return found


def kernel_analyze(code):
    """Counts outside of loops and of each loop (without its inner loops), with the loop around it; splits; accesses
    narrower than 16 bytes in loops."""
    blocks = flow_blocks(code)
    loops = flow_loops(blocks)
    home = {}
    for number, (_, body) in enumerate(loops):
        for block in body:
            home[block] = number  # inner loops come later
    reached, work = set(), [blocks[0]]
    while work:
        block = work.pop()
        if block not in reached:
            reached.add(block)
            work.extend(block.next)
    parts = collections.defaultdict(list)
    for block in blocks:
        if block in reached:
            parts[home.get(block, -1)].extend(block.code)
    result = {"direct": counts_of(parts[-1]), "loops": [], "split": []}
    for number, (header, body) in enumerate(loops):
        around = [n for n in range(number) if header in loops[n][1]]
        counts = counts_of(parts[number])
        counts["around"] = around[-1] if around else -1
        counts["inner"] = all(home[b] == number for b in body)
        result["loops"].append(counts)
    for block in blocks:
        if block in reached:
            result["split"].extend(accesses_split(block.code))
    return result


# ------------------------------------------------------------------------------------------------
# 4. Occupancy
#
# By the CUDA programming guide (compute capabilities) and NVIDIA's occupancy calculator: registers are allocated to
# warps, 256 at a time, by each of the four schedulers from its own quarter; shared memory to blocks, 128 bytes at a
# time, with 1 KiB reserved by the system in each.

Multiprocessor = collections.namedtuple("Multiprocessor", "registers warps blocks shared")
MULTIPROCESSORS = {
    "sm_80": Multiprocessor(65536, 64, 32, 164 << 10),
    "sm_89": Multiprocessor(65536, 48, 24, 100 << 10),
    "sm_90a": Multiprocessor(65536, 64, 32, 228 << 10),
    "sm_100": Multiprocessor(65536, 64, 32, 228 << 10),
    "sm_120": Multiprocessor(65536, 48, 24, 100 << 10),
}
SCHEDULERS, REGISTER_UNIT, SHARED_UNIT, SHARED_SYSTEM = 4, 256, 128, 1024


def occupancy(arch, registers, threads, shared):
    """Blocks on a multiprocessor, and what limits them; shared: bytes of a block, static and dynamic."""
    m, warps = MULTIPROCESSORS[arch], (threads + 31) // 32
    per_warp = -(-(-(-max(registers, 1) // 8) * 8 * 32) // REGISTER_UNIT) * REGISTER_UNIT
    limits = {
        "blocks": m.blocks,
        "warps": m.warps // warps,
        "registers": m.registers // SCHEDULERS // per_warp * SCHEDULERS // warps,
        "shared": m.shared // (-(-(shared + SHARED_SYSTEM) // SHARED_UNIT) * SHARED_UNIT),
    }
    least = min(limits.values())
    return least, [name for name, limit in limits.items() if limit == least][0]


# ------------------------------------------------------------------------------------------------
# 5. Build

STEPS = (("gpt2:124M", 64), ("gpt2:1558M", 32), ("llama:1B", 8))  # their launches show the usual block sizes


def ptxas_read(lines):
    """{(arch, mangled name): registers, static shared memory, stack, bytes spilled} from the output of -Xptxas -v."""
    found, key, numbers = {}, None, {}
    for line in lines:
        entry = re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line)
        if entry:
            key, numbers = (entry.group(2), entry.group(1)), {}
        frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if frame:
            numbers["stack"], stores, loads = (int(g) for g in frame.groups())
            numbers["spilled"] = stores + loads
        used = re.search(r"Used (\d+) registers", line)
        if used and key:
            shared = re.search(r"(\d+) bytes smem", line)
            numbers["registers"] = int(used.group(1))
            numbers["static"] = int(shared.group(1)) if shared else 0
            found[key], key = numbers, None
    return found


def ptx_threads(lines):
    """{mangled name: threads of __launch_bounds__}"""
    found, name = {}, None
    for line in lines:
        entry = re.search(r"\.entry (\w+)", line)
        name = entry.group(1) if entry else name
        bound = re.match(r"\.maxntid (\d+), (\d+), (\d+)", line)
        if bound:
            found[name] = int(bound.group(1)) * int(bound.group(2)) * int(bound.group(3))
    return found


def name_short(text):
    """void softmax<(int)8>(unsigned short*, ...) as softmax<8>."""
    text = re.sub(r"\(\w+\)(?=\d)", "", re.sub(r"^void ", "", text.strip()))
    return text.split("(")[0].replace(" ", "")


def names_demangled(mangled):
    for tool in ("cu++filt", "c++filt"):
        try:
            out = subprocess.run([tool], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
            return dict(zip(mangled, (name_short(line) for line in out.splitlines())))
        except (OSError, subprocess.CalledProcessError):
            continue
    return {name: name for name in mangled}


def disassembler_find():
    """nvdisasm: $NVDISASM, in PATH, next to nvcc, or in a Python package (its own, Triton's); None if there is none."""
    if os.environ.get("NVDISASM"):
        return os.environ["NVDISASM"]
    nvcc = shutil.which(os.environ.get("NVCC", "nvcc"))
    folders = [os.path.dirname(os.path.realpath(nvcc))] if nvcc else []
    folders.append("/usr/local/cuda/bin")
    for package in site.getsitepackages() + [site.getusersitepackages()]:
        folders += glob.glob(os.path.join(package, "nvidia/*/bin"))
        folders.append(os.path.join(package, "triton/backends/nvidia/bin"))
    return shutil.which("nvdisasm") or shutil.which("nvdisasm", path=os.pathsep.join(folders))


def launches_read(program, model, batch, processors):
    """The launches that dev/gpu/launches.cu lists for a step, with the kernels' names from the program's symbols."""
    with tempfile.NamedTemporaryFile("r") as file:
        environment = dict(os.environ, EMULATE_LAUNCHES=file.name, EMULATE_PROCESSORS=str(processors))
        subprocess.run([program, "--model", model, "--batch", str(batch), "--seq", "1024"], env=environment, check=True)
        launches = [json.loads(line) for line in file]
    out = subprocess.run(["nm", "-C", program], capture_output=True, text=True, check=True).stdout
    symbols = [line.split(" ", 2) for line in out.splitlines() if line[:1] != " "]
    start = next(int(s[0], 16) for s in symbols if s[2] == "__executable_start")
    names = {int(s[0], 16) - start: name_short(s[2]) for s in symbols if s[1] in "tTwW"}
    for launch in launches:
        if "kernel" in launch:
            launch["kernel"] = names[launch["kernel"]]
    return launches[[launch.get("step") is not None for launch in launches].index(True):]


def build_read(folder, ptxas, precision, launches):
    """A record for each kernel and architecture; without a disassembler those have no "code"."""
    records, disassembler = [], disassembler_find()
    found = ptxas_read(ptxas)
    names = names_demangled(sorted({mangled for _, mangled in found}))
    usual = {}  # the largest launch of each kernel
    for launch in launches:
        if "kernel" in launch:
            size = (launch["threads"] * launch["grid"][0] * launch["grid"][1], launch["threads"], launch["shared"])
            usual[launch["kernel"]] = max(usual.get(launch["kernel"], size), size)
    for arch in sorted({arch for arch, _ in found}):
        # nvcc names them after the source, and after the architecture if there are several
        path = glob.glob(os.path.join(folder, "*compute_%s.cubin" % arch[3:]))
        path = path or glob.glob(os.path.join(folder, "*.cubin"))
        if len(path) != 1:
            sys.exit("machine_code.py: %s has %d .cubin files for %s; it must have one" % (folder, len(path), arch))
        with open(path[0][:-len("cubin")] + "ptx") as file:
            bounds = ptx_threads(file)
        code = {}
        if disassembler:
            try:
                out = subprocess.run([disassembler, "-c", path[0]], capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError) as error:
                sys.exit("machine_code.py: %s -c %s fails: %s; give another one: NVDISASM=file"
                         % (disassembler, path[0], getattr(error, "stderr", "") or error))
            code = listing_read(out.splitlines())
        for mangled in sorted(mangled for a, mangled in found if a == arch):
            name = names[mangled]
            if name.startswith("test_"):
                continue
            record = {"kernel": name, "arch": arch, "precision": precision}
            record.update(found[arch, mangled])
            _, record["threads"], record["dynamic"] = usual.get(name, (0, bounds.get(mangled, 0), 0))
            if mangled in code:
                record["code"] = kernel_analyze(code[mangled])
            records.append(record)
    return records, disassembler


# ------------------------------------------------------------------------------------------------
# 6. Gate
#
# A kernel fails if it
#
#     spills registers     to memory
#     local                has arrays in local memory, which is memory, where they should be in registers
#     split                takes neighboring elements one by one, in a variant that is to take them together: the first
#                          argument of its template is their number, above 1
#     narrow               has an access of less than 16 bytes in an innermost loop of such a variant
#
# unless it is allowed to here: what it does, a pattern of architecture/precision/name, and why. A line that allows
# something that no kernel does fails too.

RANDOM = "random bits of stochastic rounding, taken by the element's number; where packs do not fit"
ALLOWED = [
    ("local", "*16/adamw_8bit_kernel<1>", RANDOM),
    ("local", "*/BF16/adamw_bf16_kernel<1>", RANDOM),
    ("local", "*16/factored_apply_kernel<*", RANDOM),
    ("local", "*/BF16/optimizer_kernel<1>", RANDOM),
    ("spills", "sm_120/*/attention_backward_keys_tensor<64,2>", "not launched there: attention_small_shared"),
    ("narrow", "*/classifier_kernel<*", "the gradient at the target, by one thread of a row"),
    ("narrow", "*/classifier_gradient_kernel<*", "that gradient, and statistics, a few numbers for a row"),
    ("split", "*/classifier_gradient_kernel<*", "a leaf's statistics, three numbers"),
    ("split", "*/classifier_leaves_kernel<*", "a leaf's statistics, three numbers; logits in the variant for any address"),
    ("narrow", "*/classifier_leaves_kernel<*,false>", "logits at any address, in the order of those that are aligned"),
    ("narrow", "*/embedding_join_pieces<*", "the token of the next part, the same for the whole block"),
    ("narrow", "*/embedding_sum_pieces<*", "the sorted key, the same for the whole block"),
    ("narrow", "*/qk_norm_*_kernel<*", "rstd, one number for a head, and at the end sums of the block's warps"),
]
# Templates whose first argument means something else.
NO_PACKS = re.compile(r"attention_(forward|backward)_|factored_")


def has_packs(name):
    count = re.search(r"<(\d+)\b", name)
    return bool(count) and int(count.group(1)) > 1 and not NO_PACKS.match(name)


def gate_findings(record):
    """[(what, sentence)]"""
    found = []
    if record["spilled"]:
        found.append(("spills", "spills %d bytes; use fewer registers" % record["spilled"]))
    code = record.get("code")
    local = record["stack"] or code and sum(part.get("local", 0) for part in [code["direct"]] + code["loops"])
    if local and not record["spilled"]:
        found.append(("local", "has %d bytes of arrays in local memory; index them by constants" % record["stack"]))
    if code is None or not has_packs(record["kernel"]):
        return found
    for sentence in sorted(set(code["split"])):
        found.append(("split", "has %s; move them as one" % sentence))
    for loop in code["loops"]:
        narrow = [key for key in loop if re.match(r"(load|store)_[1248]$", key)]
        if loop["inner"] and narrow:
            found.append(("narrow", "has a %s in an innermost loop" % " and a ".join(
                "%s of %s bytes" % tuple(key.split("_")) for key in sorted(narrow))))
    return found


def gate(records, allowed, out):
    """Prints failures and allowed cases; returns the number of failures."""
    failures, used = 0, set()
    for record in records:
        where = "%s/%s/%s" % (record["arch"], record["precision"], record["kernel"])
        for what, sentence in gate_findings(record):
            rule = next((r for r in allowed if r[0] == what and fnmatch.fnmatchcase(where, r[1])), None)
            if rule:
                if rule not in used:
                    print("allowed: %s %s: %s" % (where, sentence, rule[2]), file=out)
                used.add(rule)
            else:
                print("FAILED: %s %s, or say in dev/gpu/machine_code.py why it may" % (where, sentence), file=out)
                failures += 1
    return failures, used


# ------------------------------------------------------------------------------------------------
# 7. Program

HEADER = ("kernel", "arch/precision", "registers", "shared", "stack", "threads", "blocks/SM", "loads", "stores",
          "loops: issued (HMMA LDSM MUFU LDGSTS)")
LAYOUT = "%-42s | %-12s | %9s | %12s | %5s | %7s | %-13s | %-17s | %-17s | %s"


def widths_text(code, kind):
    total = collections.Counter()
    for part in [code["direct"]] + code["loops"]:
        for key, count in part.items():
            if re.match(kind + r"_\d+$", key):
                total[int(key.split("_")[1])] += count
    return " ".join("%dx%d" % (total[width], width) for width in sorted(total, reverse=True)) or "-"


def row(record):
    code, blocks = record.get("code"), "-"
    if record["threads"]:
        blocks = "%d by %s" % occupancy(record["arch"], record["registers"], record["threads"],
                                        record["static"] + record["dynamic"])
    loops = []
    for loop in code["loops"] if code else []:
        inside = " ".join(str(loop.get(key, 0)) for key in ("hmma", "ldsm", "mufu", "ldgsts"))
        loops.append("%s%d%s" % ("" if loop["around"] < 0 else ">", loop["issued"],
                                 "" if inside == "0 0 0 0" else " (%s)" % inside))
    return LAYOUT % (record["kernel"], record["arch"] + "/" + record["precision"], record["registers"],
                     "%d+%d" % (record["static"], record["dynamic"]), record["stack"], record["threads"] or "-", blocks,
                     widths_text(code, "load") if code else "-", widths_text(code, "store") if code else "-",
                     ", ".join(loops) or "-")


def main():
    parser = argparse.ArgumentParser(description="what the machine code of the kernels needs and does")
    parser.add_argument("--precision", required=True, help="of the build: FP32, BF16, FP16")
    parser.add_argument("--folder", required=True, help="with the .ptx and .cubin files of nvcc -keep")
    parser.add_argument("--ptxas", required=True, help="what -Xptxas -v printed")
    parser.add_argument("--launches", metavar="PROGRAM",
                        help="dev/gpu/launches.cu, compiled: threads and dynamic shared memory are those of its launches")
    parser.add_argument("--out", help="also write what was found there, as JSON lines")
    o = parser.parse_args()
    launches = []
    for model, batch in STEPS if o.launches else ():
        launches += launches_read(o.launches, model, batch, 132)
    with open(o.ptxas) as file:
        records, disassembler = build_read(o.folder, file, o.precision, launches)
    if not records:
        sys.exit("machine_code.py: ptxas named no kernels; does nvcc pass -Xptxas -v on?")
    print(LAYOUT % HEADER)
    for record in sorted(records, key=lambda r: (r["kernel"], r["arch"])):
        print(row(record))
    failures, used = gate(records, ALLOWED, sys.stdout)
    for rule in ALLOWED:
        # Rules for other builds, and rules that need the machine code, cannot be checked here.
        here = any(fnmatch.fnmatchcase("%s/%s/%s" % (r["arch"], r["precision"], r["kernel"]), rule[1]) for r in records)
        if here and rule not in used and (disassembler or rule[0] in ("spills", "local")):
            print("FAILED: %s of '%s' is allowed in dev/gpu/machine_code.py, but does not happen; take it out" % rule[:2])
            failures += 1
    if o.out:
        with open(o.out, "w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    if not disassembler:
        print("skipped the machine code itself: there is no nvdisasm; pip install nvidia-cuda-nvdisasm")
    print("%d kernels, %d compilations, %d spill; %d failures" % (
        len({r["kernel"] for r in records}), len(records), sum(r["spilled"] > 0 for r in records), failures))
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
