#!/bin/sh
# gpu_check.sh: everything that only a GPU can tell, in one text report, in less than ten minutes.
#
#     sh dev/gpu_check.sh                     on a machine with nvcc and an NVIDIA GPU; PyTorch is used where present
#     sh dev/gpu_check.sh --out report.txt    where the report goes (build/gpu_check.txt)
#     sh dev/gpu_check.sh --dry-run           prints the commands and the sum of their limits
#     sh dev/gpu_check.sh --try build         no GPU: gives every command line of the trainer to build/train-emulated-BF16,
#                                             or build/train-BF16, as far as its memory plan; fails if one is refused
#     sh dev/gpu_check.sh --minutes 5         stops earlier; --build DIR: where programs go (build/gpu); --arch sm_90a
#
#   1. machine       GPU, driver, compilers
#   2. builds        every program, as many at once as there are processors
#   3. tests         the operations against the CPU's, in three types; the emulator's PTX tests on real tensor cores; runs
#   4. ladders       every rung checked and timed, one JSON object each
#   5. trainer       GPT-2 of 124M, 350M and 1558M parameters on random tokens of the full vocabulary
#   6. peers         PyTorch on the same machine: attention, products, the same GPT-2s compiled
#   7. sanitizers    compute-sanitizer's four tools over tiny shapes
#   8. long ladders  attention at the shapes of the peers
#
# The limits of all parts add up to less than the time there is; a part may use as much again of what those before it
# left over. A part that fails does not stop those after it; the end names it, and the exit status is 1. What cannot run
# here, for want of memory or of a program, is printed as skipped. Without a GPU the programs are built, which needs nvcc
# alone, and the exit status is 0 if they all compile.
set -u
cd "$(dirname "$0")/.." || exit 1

report=build/gpu_check.txt
work=build/gpu
minutes=9.8
dry=
try=
arch=
usage() {
    sed -n '2,/^set -u/s/^#\{1\} \{0,1\}//p' "$0"
}
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry=yes ;;
        --help | -h) usage; exit 0 ;;
        --out | --build | --minutes | --arch | --try)
            [ $# -ge 2 ] || { echo "gpu_check.sh: $1 needs a value (see --help)" >&2; exit 1; }
            case $1 in --out) report=$2 ;; --build) work=$2 ;; --minutes) minutes=$2 ;; --try) try=$2 ;; *) arch=$2 ;; esac
            shift ;;
        *) echo "gpu_check.sh: '$1' is not a flag (see --help)" >&2; exit 1 ;;
    esac
    shift
done
seconds=$(awk -v m="$minutes" 'BEGIN { if (m + 0 > 0) printf "%d", 60 * m }')
[ -n "$seconds" ] || { echo "gpu_check.sh: --minutes is '$minutes'; give a number above 0" >&2; exit 1; }

began=$(date +%s)
parts=0
limits=0
saved=0
failed=

say() {
    echo "$*"
    [ -n "$dry$try" ] || echo "$*" >> "$report"
}

skipped() { say "skipped $1: $2"; }

# part LIMIT NAME COMMAND [PROGRAM...]: runs a shell command, if these programs were built; where they were not, that was
# said already. What it prints goes to the report, without the checks that passed. Exit status 77 says that the command
# found nothing to run with.
part() {
    limit=$1 name=$2 command=$3
    shift 3
    for program in "$@"; do [ -n "$dry" ] || [ -x "$work/$program" ] || return 1; done
    limits=$((limits + limit))
    if [ -n "$dry" ]; then
        printf '# %s, at most %d s\n%s\n' "$name" "$limit" "$command"
        return 0
    fi
    may=$((limit + (saved < limit ? saved : limit)))
    left=$((began + seconds - $(date +%s)))
    [ "$may" -le "$left" ] || may=$left
    parts=$((parts + 1))
    echo "== $name: $command" >> "$report"
    why="not run, the time was over"
    if [ "$left" -ge 2 ]; then
        started=$(date +%s)
        timeout -k 2 "$may" sh -c "$command" < /dev/null > "$work/part.txt" 2>&1
        status=$?
        grep -v '^ok ' "$work/part.txt" | head -n 300 >> "$report"
        took=$(($(date +%s) - started))
        saved=$((saved + limit > took ? saved + limit - took : 0))
        case $status in
            0) say "ok      $name ($took s)"; return 0 ;;
            77) skipped "$name" "$(tail -n 1 "$work/part.txt")"; return 0 ;;
            124 | 137) why="over its limit of $may s" ;;
            *) why="status $status after $took s" ;;
        esac
    fi
    say "FAILED  $name: $why"
    failed="$failed
  $name: $why"
    return 1
}

# ------------------------------------------------------------------------------------------------
# What the trainer is given, here and by --try: random tokens of the full vocabulary, whose head is a third of the work of
# the smallest model, and no checkpoints

vocabulary=50257

# random_shard FILE: the header of llmtrain/data.h, section 1, and 3,000,000 tokens: pairs of bytes below 196, so that no token
# reaches 50,257. The fields are magic, version, count and vocabulary, least byte first.
random_shard() {
    {
        printf '\210\330\064\001\001\000\000\000\300\306\055\000\121\304\000\000'
        head -c 1008 /dev/zero
        head -c 9000000 /dev/urandom | LC_ALL=C tr -d '\304-\377' | head -c 6000000
    } > "$1"
}

# train_flags MODEL BATCH STEPS
train_flags() {
    echo "--data '$work/random_*.bin' --vocab $vocabulary --seq 1024 --warmup 2 --model $1 --batch $2 --steps $3"
}

# Name, flags of the model, largest batch, steps, seconds: a line for each run.
train_runs() {
    echo "124M 32 20 20"
    echo "350M 16 12 20"
    echo "1558M 8 8 30"
}

# The trainer names the device and its peak when it begins to train: a model that takes no time.
tiny_flags() {
    echo "--data '$work/random_*.bin' --vocab $vocabulary --seq 16 --batch 1 --steps 1 --layers 1 --heads 1 --channels 8"
}

# planned PROGRAM FLAGS: the MB of its memory plan; nothing if the flags are refused.
planned() { sh -c "$1 --plan $2" | awk '$1 == "total" { print $2 }'; }

if [ -n "$try" ]; then
    program=$try/train-emulated-BF16
    [ -x "$program" ] || program=$try/train-BF16
    [ -x "$program" ] || { echo "gpu_check.sh: there is no $program; make emulated builds the first" >&2; exit 1; }
    work=$try/gpu_try.$$ passed=0 bad=0
    mkdir -p "$work" && random_shard "$work/random_0.bin" || exit 1
    attempt() {  # attempt NAME COMMAND
        if sh -c "$2" > "$work/out.txt" 2>&1; then
            passed=$((passed + 1))
            echo "ok      $1"
        else
            bad=$((bad + 1))
            echo "FAILED  $1: $2"
            cat "$work/out.txt"
        fi
    }
    attempt "a step of a tiny model" "$program $(tiny_flags)"
    while read -r size batch steps _; do
        attempt "GPT-2 $size, batch $batch, has a plan" \
            "$program --plan $(train_flags "gpt2:$size" "$batch" "$steps") --peak-tflops 989.4"
    done << EOT
$(train_runs)
EOT
    rm -rf "$work"
    echo "$passed passed, $bad failed"
    [ "$bad" -eq 0 ] && [ "$passed" -eq 4 ]
    exit
fi

# ------------------------------------------------------------------------------------------------
# 1. Machine

nvcc=${NVCC:-nvcc}
cc=${CC:-cc}
python=${PYTHON:-python3}
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1)
memory=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2> /dev/null | head -n 1)  # MiB
case $memory in '' | *[!0-9]*) memory=0 ;; esac
if [ -z "$arch" ]; then
    arch=sm_80
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1 | tr -d .)
    case $capability in
        90 | 100 | 103 | 120) arch=sm_${capability}a ;;
        [0-9]*) arch=sm_$capability ;;
    esac
fi
if [ -z "$dry" ]; then
    mkdir -p "$work" "$(dirname "$report")" || exit 1
    : > "$report" || exit 1
fi

# needs MIB NAME: whether the GPU has so much memory; says so if not.
needs() {
    [ -z "$dry" ] && [ "$memory" -lt "$1" ] || return 0
    skipped "$2" "it needs $1 MiB of memory, and this GPU has $memory"
    return 1
}

say "gpu_check: ${gpu:-no GPU}, $memory MiB, built for $arch, at most $minutes minutes"
[ -z "$gpu$dry" ] || part 5 "the GPU" "nvidia-smi"
if ! command -v "$nvcc" > /dev/null && [ -z "$dry" ]; then
    [ -n "$gpu" ] || { skipped everything "there is neither a GPU nor nvcc here"; exit 0; }
    say "there is a GPU but no nvcc, so nothing can be built; install the CUDA toolkit, or name its compiler with NVCC="
    exit 1
fi
part 5 "compilers" "$nvcc --version; $cc --version; nproc
git log -1 --format='commit %h %s' 2> /dev/null; git status --short 2> /dev/null; true"

# ------------------------------------------------------------------------------------------------
# 2. Builds: a line each, NAME COMMAND, run side by side; what compiles longest comes first

flags="-std=c++17 -O3 -arch=$arch -DLLMTRAIN_CUDA -I. -Idev/emulator -Xcompiler -fopenmp"
precisions="BF16 FP32 FP16"
nccl=  # where it is installed: ranks
echo '#include <nccl.h>' | "$nvcc" -x cu -E - > /dev/null 2>&1 && nccl=-lnccl && flags="$flags -DLLMTRAIN_NCCL"
cpu_flags="-std=c11 -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp -pthread -I."
ladders=$(basename -a -s .cu dev/*.cu)
# cuda NAME SOURCE PRECISION [LIBRARIES]
cuda() { echo "$1 $nvcc $flags -DPRECISION_$3 $2 -o $work/$1 -lcublasLt${4:+ $4}"; }
# cpu NAME SOURCE
cpu() { echo "$1 $cc $cpu_flags $2 -o $work/$1 -lm -ldl"; }
builds() {
    for precision in $precisions; do cuda "test_cuda-$precision" dev/test/test_cuda.cu "$precision" "$nccl"; done
    for precision in $precisions; do
        cuda "train-cuda-$precision" train.cu "$precision" "$nccl"
        cuda "test_train-$precision" test_train.cu "$precision" "$nccl"
    done
    for ladder in $ladders; do cuda "$ladder" "dev/$ladder.cu" BF16; done
    cuda matmul-FP32 dev/matmul.cu FP32
    [ -z "$nccl" ] || cuda test_nccl dev/emulator/test_nccl.cu BF16 -lnccl
    cuda test_emulator dev/emulator/test_emulator.cu BF16
    cpu weights_hash dev/test/weights_hash.c
    for precision in $precisions; do cpu "train-$precision" "-DPRECISION_$precision -x c train.cu -x none"; done
    for tool in corpus tokenize; do cpu $tool data/$tool.c; done
}
# shellcheck disable=SC2016  # the inner shell expands it
build_one='name=$1; shift; rm -f "$WORK/$name"; "$@" > "$WORK/$name.log" 2>&1 && exit 0
echo "$name does not compile: $*"; head -n 20 "$WORK/$name.log"; exit 1'
if [ -n "$dry" ]; then
    echo "# builds, at most 130 s, side by side"
    builds | sed 's/^[^ ]* //'
    limits=$((limits + 130))
else
    builds > "$work/builds"
    export WORK="$work" BUILD_ONE="$build_one"
    # Every line becomes the arguments of one shell.
    part 130 "builds" "xargs -P \$(nproc) -L 1 sh -c \"\$BUILD_ONE\" build < $work/builds"
fi

if [ -z "$gpu" ] && [ -z "$dry" ]; then
    skipped "all runs" "there is no GPU here"
    [ -z "$failed" ] || { say "failed:$failed"; exit 1; }
    exit 0
fi

# ------------------------------------------------------------------------------------------------
# 3. Tests

for precision in $precisions; do
    part 12 "test_cuda $precision" "$work/test_cuda-$precision" "test_cuda-$precision"
done
part 5 "PTX, whose emulation is proved by the same tests" "$work/test_emulator" test_emulator
for precision in $precisions; do
    part 8 "test_train $precision" "$work/test_train-$precision" "test_train-$precision"
done
[ -z "$nccl" ] || part 20 "NCCL between as many GPUs as there are" \
    "$work/test_nccl $(nvidia-smi -L 2> /dev/null | grep -c GPU)" test_nccl
part 40 "the trainer's CUDA build against its CPU build" "sh dev/test/test_backends.sh $work train-cuda" \
    weights_hash corpus tokenize train-FP32 train-BF16 train-FP16 train-cuda-FP32 train-cuda-BF16 train-cuda-FP16
# Two vectors of 2^31 elements, of 2 and of 4 bytes.
needs 14000 "more than 2^31 elements" && \
    part 10 "more than 2^31 elements" "$work/test_cuda-BF16 --shapes huge --only huge" test_cuda-BF16

# ------------------------------------------------------------------------------------------------
# 4. Ladders: the shapes of GPT-2 unless a program chooses others

for ladder in $ladders matmul-FP32; do
    own="" limit=4
    case $ladder in
        adamw) own="--parameters 30000000" ;;  # 6 times what a large L2 cache holds
        attention_* | matmul*) limit=9 ;;
    esac
    needs 6000 "ladder $ladder" && part $limit "ladder $ladder" "$work/$ladder --json --rounds 20 $own" "$ladder"
done

# ------------------------------------------------------------------------------------------------
# 5. Trainer: each model with the largest batch, halved as often as needed, whose memory plan fits

peak=
batches=
if [ -n "$dry" ] || [ -x "$work/train-cuda-BF16" ]; then
    train=$work/train-cuda-BF16
    [ -n "$dry" ] || random_shard "$work/random_0.bin"
    if part 8 "the GPU's peak" "$train $(tiny_flags)" && [ -z "$dry" ]; then
        peak=$(sed -n 's/.*mfu against \([0-9.]*\) TFLOP.*/\1/p' "$work/part.txt" | head -n 1)
        say "peak of dense products of the data sheet, for every mfu below: ${peak:-not known of this GPU} TFLOP/s"
    fi
    while read -r size batch steps limit; do
        while [ -z "$dry" ] && [ "$batch" -gt 0 ]; do
            megabytes=$(planned "$train" "$(train_flags "gpt2:$size" "$batch" "$steps")" 2> "$work/part.txt")
            [ -n "$megabytes" ] || { cat "$work/part.txt" >> "$report"; break; }  # refused: the run will say it again
            # In MB; 1.5 GB of the MiB that there are is for the driver and the libraries.
            awk -v need="$megabytes" -v have="$memory" 'BEGIN { exit !(need <= 1.048576 * have - 1500) }' && break
            batch=$((batch / 2))
        done
        if [ "$batch" -eq 0 ]; then
            skipped "train GPT-2 $size" "not even a batch of 1 fits, $megabytes MB"
            continue
        fi
        batches="$batches $size:$batch"
        part "$limit" "train GPT-2 $size, batch $batch" \
            "$train $(train_flags "gpt2:$size" "$batch" "$steps")${peak:+ --peak-tflops $peak}"
    done << EOT
$(train_runs)
EOT
fi

# ------------------------------------------------------------------------------------------------
# 6. Peers

part 80 "PyTorch" "$python dev/peers.py --seconds 70 --gpt2 '${batches# }'${peak:+ --peak $peak}"

# ------------------------------------------------------------------------------------------------
# 7. Sanitizers

if command -v compute-sanitizer > /dev/null || [ -n "$dry" ]; then
    # sanitize LIMIT TOOL PROGRAM FLAGS
    sanitize() {
        part "$1" "$2, $3" "compute-sanitizer --tool $2 --error-exitcode 9 --print-limit 5 $work/$3 $4" "$3"
    }
    for tool in memcheck synccheck racecheck initcheck; do sanitize 8 $tool test_cuda-BF16 "--shapes tiny --exact"; done
    # Rungs that no test of the operations runs. Nothing is timed.
    for tool in memcheck racecheck; do
        sanitize 4 $tool matmul "--rounds 0 --rows 131 --outputs 136 --inputs 72"
        sanitize 4 $tool attention_backward "--rounds 0 --batch 1 --seq 77 --heads 2 --kv-heads 1 --head-size 64"
    done
else
    skipped "sanitizers" "there is no compute-sanitizer here"
fi

# ------------------------------------------------------------------------------------------------
# 8. Long ladders: attention at the shapes of the peers, 16,384 tokens and 2,048 channels. The outputs are not checked: the
# CPU would take minutes.

for direction in forward backward; do
    needs 6000 "attention_$direction, shapes of the peers" && \
        part 19 "attention_$direction, shapes of the peers" "for shape in \
'64 --heads 32 --kv-heads 32 --batch 16 --seq 1024' '64 --heads 32 --kv-heads 32 --batch 4 --seq 4096' \
'64 --heads 32 --kv-heads 32 --batch 1 --seq 16384' '128 --heads 16 --kv-heads 16 --batch 16 --seq 1024' \
'128 --heads 16 --kv-heads 16 --batch 4 --seq 4096' '128 --heads 16 --kv-heads 16 --batch 1 --seq 16384'; do
    $work/attention_$direction --json --check off --rung shipped --rounds 20 --head-size \$shape || exit 1
done" "attention_$direction"
done

# ------------------------------------------------------------------------------------------------

if [ -n "$dry" ]; then
    echo "# the limits add up to $limits s of $seconds s"
    [ "$limits" -le "$seconds" ]
    exit
fi
say "$parts parts in $(($(date +%s) - began)) s; the report is $report"
[ -n "$failed" ] || { say "all parts are good"; exit 0; }
say "failed:$failed"
exit 1
