#!/bin/sh
# gpu_check.sh: everything that only a GPU can tell, in one text report, in less than ten minutes.
#
#     sh dev/gpu_check.sh                     on a machine with nvcc and an NVIDIA GPU; PyTorch is used where present
#     sh dev/gpu_check.sh --out report.txt    where the report goes (build/gpu_check.txt)
#     sh dev/gpu_check.sh --dry-run           prints the commands
#     sh dev/gpu_check.sh --minutes 5         stops earlier; --build DIR: where programs go (build/gpu); --arch sm_90a
#
#   1. machine     GPU, driver, compilers
#   2. builds      every program, as many at once as there are processors
#   3. tests       the operations against the CPU's, in three types; the emulator's PTX tests on real tensor cores; runs
#   4. sanitizers  compute-sanitizer's four tools over tiny shapes
#   5. ladders     every rung checked and timed, one JSON object each
#   6. trainer     GPT-2 of 124M, 350M and 1558M parameters on random bytes, with the full vocabulary
#   7. peers       PyTorch on the same machine: attention, products, a compiled GPT-2
#
# A part that fails or runs out of time does not stop those after it; the end names it, and the exit status is 1.
# Without a GPU the programs are built, which needs nvcc alone, and the exit status is 0 if they all compile.
set -u
cd "$(dirname "$0")/.." || exit 1

report=build/gpu_check.txt
work=build/gpu
minutes=9.5
dry=
arch=
usage() {
    sed -n '2,/^set -u/s/^#\{1\} \{0,1\}//p' "$0"
}
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry=yes ;;
        --help | -h) usage; exit 0 ;;
        --out | --build | --minutes | --arch)
            [ $# -ge 2 ] || { echo "gpu_check.sh: $1 needs a value (see --help)" >&2; exit 1; }
            case $1 in --out) report=$2 ;; --build) work=$2 ;; --minutes) minutes=$2 ;; *) arch=$2 ;; esac
            shift ;;
        *) echo "gpu_check.sh: '$1' is not a flag (see --help)" >&2; exit 1 ;;
    esac
    shift
done
seconds=$(awk -v m="$minutes" 'BEGIN { if (m + 0 > 0) printf "%d", 60 * m }')
[ -n "$seconds" ] || { echo "gpu_check.sh: --minutes is '$minutes'; give a number above 0" >&2; exit 1; }

nvcc=${NVCC:-nvcc}
python=${PYTHON:-python3}
gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1)
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
began=$(date +%s)
parts=0
failed=

say() {
    echo "$*"
    [ -n "$dry" ] || echo "$*" >> "$report"
}

# part LIMIT NAME COMMAND: runs a shell command for at most LIMIT seconds, and no longer than there is time at all. What
# it prints goes to the report, without the checks that passed.
part() {
    limit=$1
    name=$2
    command=$3
    left=$((began + seconds - $(date +%s)))
    [ "$limit" -le "$left" ] || limit=$left
    if [ -n "$dry" ]; then
        echo "# $name, at most $1 s"
        echo "$command"
        return 0
    fi
    parts=$((parts + 1))
    echo "== $name: $command" >> "$report"
    if [ "$left" -lt 2 ]; then
        echo "== not run: the time is over" >> "$report"
        echo "NOT RUN $name: the time is over"
        failed="$failed
  $name: not run, the time was over"
        return 1
    fi
    started=$(date +%s)
    timeout -k 2 "$limit" sh -c "$command" > "$work/part.txt" 2>&1
    status=$?
    grep -v '^ok ' "$work/part.txt" | head -n 300 >> "$report"
    took=$(($(date +%s) - started))
    if [ "$status" -eq 0 ]; then
        echo "== ok, $took s" >> "$report"
        echo "ok      $name ($took s)"
        return 0
    fi
    why="status $status"
    [ "$status" -ne 124 ] && [ "$status" -ne 137 ] || why="over its limit of $limit s"
    echo "== FAILED: $why, $took s" >> "$report"
    echo "FAILED  $name: $why ($took s)"
    failed="$failed
  $name: $why"
    return 1
}

# Whether a program was built; where it was not, that was said already.
built() { [ -n "$dry" ] || [ -x "$work/$1" ]; }

# ------------------------------------------------------------------------------------------------
# 1. Machine

say "gpu_check: ${gpu:-no GPU}, built for $arch, at most $minutes minutes"
[ -z "$gpu" ] || part 10 "the GPU" "nvidia-smi"
if ! command -v "$nvcc" > /dev/null; then
    say "there is no nvcc here: nothing can be built; install the CUDA toolkit, or name its compiler with NVCC="
    [ -n "$dry" ] || exit 0
fi
part 10 "compilers" "$nvcc --version; cc --version; nproc
git log -1 --format='commit %h %s' 2> /dev/null; git status --short 2> /dev/null; true"

# ------------------------------------------------------------------------------------------------
# 2. Builds: a line each, NAME COMMAND, run side by side

flags="-std=c++17 -O3 -arch=$arch -DLLMTRAIN_CUDA -I. -Idev/emulator -Xcompiler -fopenmp"
ladders=
for source in dev/*.cu; do
    case $source in
        dev/test_*) ;;
        *) ladders="$ladders $(basename "$source" .cu)" ;;
    esac
done
builds() {
    echo "test_cuda-BF16 $nvcc $flags -DPRECISION_BF16 dev/test_cuda.cu -o $work/test_cuda-BF16 -lcublasLt"
    echo "train-BF16 $nvcc $flags -DPRECISION_BF16 train.cu -o $work/train-BF16 -lcublasLt"
    echo "test_cuda-FP32 $nvcc $flags -DPRECISION_FP32 dev/test_cuda.cu -o $work/test_cuda-FP32 -lcublasLt"
    echo "test_cuda-FP16 $nvcc $flags -DPRECISION_FP16 dev/test_cuda.cu -o $work/test_cuda-FP16 -lcublasLt"
    for ladder in $ladders; do
        echo "$ladder $nvcc $flags -DPRECISION_BF16 dev/$ladder.cu -o $work/$ladder -lcublasLt"
    done
    [ ! -f dev/emulator/test_emulator.cu ] || \
        echo "test_emulator $nvcc $flags -DPRECISION_BF16 dev/emulator/test_emulator.cu -o $work/test_emulator"
    echo "test_train-BF16 $nvcc $flags -DPRECISION_BF16 test_train.cu -o $work/test_train-BF16 -lcublasLt"
    echo "matmul-FP32 $nvcc $flags -DPRECISION_FP32 dev/matmul.cu -o $work/matmul-FP32 -lcublasLt"
    echo "tokenize cc -std=c11 -O2 data/tokenize.c -o $work/tokenize -lm -pthread"
}
# shellcheck disable=SC2016  # the inner shell expands it
build_one='name=$1; shift; rm -f "$WORK/$name"; "$@" > "$WORK/$name.log" 2>&1 && exit 0
echo "$name does not compile: $*"; head -n 20 "$WORK/$name.log"; exit 1'
if [ -n "$dry" ]; then
    echo "# builds, at most 240 s, side by side"
    builds | sed 's/^[^ ]* //'
else
    builds > "$work/builds"
    export WORK="$work" BUILD_ONE="$build_one"
    # Every line becomes the arguments of one shell.
    part 240 "builds" "xargs -P \$(nproc) -L 1 sh -c \"\$BUILD_ONE\" build < $work/builds"
fi

if [ -z "$gpu" ] && [ -z "$dry" ]; then
    say "there is no GPU here, so nothing is run"
    [ -z "$failed" ] || { say "failed:$failed"; exit 1; }
    exit 0
fi

# ------------------------------------------------------------------------------------------------
# 3. Tests

for precision in BF16 FP32 FP16; do
    built "test_cuda-$precision" && part 60 "test_cuda $precision" "$work/test_cuda-$precision"
done
if [ -f dev/emulator/test_emulator.cu ] && built test_emulator; then
    part 20 "PTX, whose emulation is proved by the same tests" "$work/test_emulator"
fi
built test_train-BF16 && part 60 "test_train BF16" "$work/test_train-BF16"
built test_cuda-BF16 && part 30 "more than 2^31 elements" "$work/test_cuda-BF16 --shapes huge --only huge"

# ------------------------------------------------------------------------------------------------
# 4. Sanitizers

if command -v compute-sanitizer > /dev/null || [ -n "$dry" ]; then
    for tool in memcheck synccheck racecheck initcheck; do
        built test_cuda-BF16 && part 30 "$tool" \
            "compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 5 \\
$work/test_cuda-BF16 --shapes tiny --exact"
    done
else
    say "compute-sanitizer is not here: its checks are left out"
fi

# ------------------------------------------------------------------------------------------------
# 5. Ladders: the shapes of GPT-2 unless a program chooses others

for ladder in $ladders; do
    built "$ladder" && part 20 "ladder $ladder" "$work/$ladder --json"
done
built matmul-FP32 && part 20 "ladder matmul FP32" "$work/matmul-FP32 --json"
# The shapes of the peers: 16,384 tokens and 2,048 channels. Their outputs are not checked: the CPU would take minutes.
for direction in forward backward; do
    built "attention_$direction" && part 40 "attention_$direction, shapes of the peers" "for shape in \
'64 --heads 32 --kv-heads 32 --batch 16 --seq 1024' '64 --heads 32 --kv-heads 32 --batch 4 --seq 4096' \
'128 --heads 16 --kv-heads 16 --batch 16 --seq 1024' '128 --heads 16 --kv-heads 16 --batch 4 --seq 4096'; do
    $work/attention_$direction --json --check off --rung shipped --rounds 20 --head-size \$shape || exit 1
done"
done

# ------------------------------------------------------------------------------------------------
# 6. Trainer: random text, one token per byte, but the vocabulary of GPT-2, whose head is a third of the work

if built train-BF16; then
    part 20 "random text" "head -c 3000000 /dev/urandom | base64 > $work/random.txt && rm -f $work/random_*.bin && \
$work/tokenize --bytes $work/random.txt --out $work/random --val 0.1"
    train="$work/train-BF16 --data '$work/random_train_*.bin' --vocab 50257 --seq 1024 --warmup 2"
    part 40 "train GPT-2 124M" "$train --model gpt2:124M --batch 32 --steps 20"
    part 40 "train GPT-2 350M" "$train --model gpt2:350M --batch 16 --steps 12"
    part 60 "train GPT-2 1558M" "$train --model gpt2:1558M --batch 8 --steps 8"
fi

# ------------------------------------------------------------------------------------------------
# 7. Peers

part 110 "PyTorch" "$python dev/peers.py --seconds 80"

# ------------------------------------------------------------------------------------------------

[ -z "$dry" ] || exit 0
say "$parts parts in $(($(date +%s) - began)) s; the report is $report"
[ -n "$failed" ] || { say "all parts are good"; exit 0; }
say "failed:$failed"
exit 1
