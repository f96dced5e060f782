#!/bin/sh
# gpu_check.sh: all checks that need a GPU, in four runs for a machine that is available for minutes at a time. Each is
# complete in itself, keeps to its time limit, and writes a text report.
#
#     sh dev/gpu/gpu_check.sh A          3 minutes: what is there; every kernel, synchronized after each launch, so that a
#                                    fault names its kernel; PTX tests; every operation in BF16; GPT-2 124M
#     sh dev/gpu/gpu_check.sh B          7.5 minutes: time by operation and by kernel in one step of 124M and 1558M; the
#                                    best of cuBLASLt's algorithms, and training with them; every matmul shape; attention
#                                    and norms at the same shapes; the other ladders; every operation at sizes of models
#     sh dev/gpu/gpu_check.sh C          8 minutes: GPT-2 124M and 1558M against PyTorch and llm.c; attention at the
#                                    peers' shapes
#     sh dev/gpu/gpu_check.sh D          9.5 minutes: FP16, FP32, whole runs against the CPU's, NCCL, compute-sanitizer
#     sh dev/gpu/gpu_check.sh            all four
#
#     --out DIR       where reports go: DIR/gpu_check_A.txt (build). An unfinished report is continued by the same run
#                     of the same sources on a GPU of the same name: parts with a verdict are not run again. Any other
#                     is kept as gpu_check_A.1.txt, and a new one begins.
#     --carry DIR     runs nothing: builds the programs of these runs here, for --arch, to be carried to the machine
#                     with the GPU along with the sources; refuses more than 64 MiB. There: --build DIR
#     --build DIR     where programs are (build/gpu); those that are missing, outdated or do not start are built
#     --arch sm_90a   the GPU's architecture; by default that of this machine's GPU
#     --minutes 5     keeps to this time instead;  --limit 20: no part takes longer, in seconds
#     --budget 15m    short runs that together take this time at most, with 130 s for the machine to start; nothing is
#                     built there. A trains 1558M too, C compares 124M with llm.c and PyTorch, D has FP16, FP32, memcheck
#                     Where one command may take 10 minutes, two do it, if the folders of the programs and the reports
#                     stay there in between (C reads A's report):
#                         sh dev/gpu/gpu_check.sh A B --budget 15m --out build/gpu_out     at most 430 s
#                         sh dev/gpu/gpu_check.sh C D --budget 15m --out build/gpu_out     at most 350 s
#     --dry-run       prints the commands, and the sum of their limits next to each run's time; fails if it is over
#     --try build     no GPU: gives every command line of the trainer to build/train-emulated-BF16, or build/train-BF16,
#                     as far as its memory plan, and those of the ladders, with small sizes, to the emulated ones; fails
#                     if one is refused
#
# nvcc is NVCC=, or in PATH, or in /usr/local/cuda; the C compiler is CC=, Python is PYTHON=. cuBLASLt and NCCL are
# looked for next to nvcc, in the system's folders and in the wheels of that Python (site-packages/nvidia).
#
# A part that fails or hangs does not stop those after it; the last lines report it, and the exit status is 1. It is cut
# off at its limit, extended by up to the same time if earlier parts left some over. What cannot run here, for lack of
# memory or of a program, is reported as skipped. Without a GPU the programs are built, which needs only nvcc.
set -u
cd "$(dirname "$0")/../.." || exit 1

runs=
out=build
work=build/gpu
minutes=
cap=
budget=
dry=
try=
carry=
arch=
fail() { echo "gpu_check.sh: $*" >&2; exit 1; }
while [ $# -gt 0 ]; do
    case $1 in
        A | B | C | D) runs="$runs $1" ;;
        --dry-run) dry=yes ;;
        --help | -h) sed -n '2,/^set -u/s/^#\{1\} \{0,1\}//p' "$0"; exit 0 ;;
        --out | --build | --minutes | --limit | --budget | --arch | --try | --carry)
            [ $# -ge 2 ] || fail "$1 needs a value (see --help)"
            case $1 in
                --out) out=$2 ;; --build) work=$2 ;; --minutes) minutes=$2 ;; --limit) cap=$2 ;; --budget) budget=${2%m} ;;
                --try) try=$2 ;; --carry) carry=$2 work=$2 ;; *) arch=$2 ;;
            esac
            shift ;;
        *) fail "'$1' is neither a run (A, B, C, D) nor a flag (see --help)" ;;
    esac
    shift
done
[ -n "$runs" ] || runs="A B C D"
for number in ${minutes:+"--minutes $minutes"} ${cap:+"--limit $cap"} ${budget:+"--budget $budget"}; do
    awk -v x="${number#* }" 'BEGIN { exit !(x ~ /^[0-9.]+$/ && x + 0 > 0) }' || fail "${number% *} is '${number#* }'; give a number above 0"
done

run_seconds() {
    [ -z "$minutes" ] || { awk -v m="$minutes" 'BEGIN { printf "%d", 60 * m }'; return; }
    if [ -n "$budget" ]; then  # the shares of four runs
        case $1 in A) share=160 ;; B) share=265 ;; C) share=235 ;; D) share=110 ;; esac
        awk -v m="$budget" -v share=$share 'BEGIN { printf "%d", (60 * m - 130) * share / 770 }'
        return
    fi
    case $1 in A) echo 180 ;; B) echo 450 ;; C) echo 480 ;; D) echo 570 ;; esac
}

# seconds_of FULL SHORT: the limit of a part, in the full run and with --budget.
seconds_of() { if [ -n "$budget" ]; then echo "$2"; else echo "$1"; fi; }

# ------------------------------------------------------------------------------------------------
# The trainer's input, here and with --try: random tokens of the full vocabulary, whose head is a third of the work of
# the smallest model, and no checkpoints

vocabulary=50257

# random_shard FILE: the header of llmtrain/text/data.h, section 1, and 3,000,000 tokens: pairs of bytes below 196, so that
# no token reaches 50,257. The fields are magic, version, count and vocabulary, little-endian.
random_shard() {
    {
        printf '\210\330\064\001\001\000\000\000\300\306\055\000\121\304\000\000'
        head -c 1008 /dev/zero
        head -c 9000000 /dev/urandom | LC_ALL=C tr -d '\304-\377' | head -c 6000000
    } > "$1"
}

# train_flags MODEL BATCH STEPS
train_flags() {
    echo "--data '$scratch/random_*.bin' --vocab $vocabulary --seq 1024 --warmup 2 --model $1 --batch $2 --steps $3"
}

# Name, flags of the model, largest batch, steps (at least ten seconds on a large GPU, for its clocks to settle).
train_runs() {
    echo "124M 64 120"
    echo "1558M 32 20"
}

# The trainer prints the device and its peak when it begins to train: a model that takes no time.
tiny_flags() {
    echo "--data '$scratch/random_*.bin' --vocab $vocabulary --seq 16 --batch 1 --steps 2 --layers 1 --heads 1 --channels 8"
}

# peak_in FILE: the TFLOP/s printed there; nothing if the peak is not known.
peak_in() { sed -n 's/.*MFU against \([0-9.]*\) TFLOP.*/\1/p' "$1" | head -n 1; }

# planned PROGRAM FLAGS: the MB of its memory plan; nothing if the flags are refused.
planned() { sh -c "$1 --plan $2" | awk '$1 == "total" { print $2 }'; }

if [ -n "$try" ]; then
    program=$try/train-emulated-BF16
    [ -x "$program" ] || program=$try/train-BF16
    [ -x "$program" ] || fail "there is no $program; make emulated builds the first"
    scratch=$try/gpu_try.$$ passed=0 bad=0
    mkdir -p "$scratch" && random_shard "$scratch/random_0.bin" || exit 1
    attempt() {  # attempt NAME COMMAND
        if sh -c "$2" > "$scratch/out.txt" 2>&1; then
            passed=$((passed + 1))
            echo "ok      $1"
        else
            bad=$((bad + 1))
            echo "FAILED  $1: $2"
            cat "$scratch/out.txt"
        fi
    }
    attempt "a step of a tiny model" "$program $(tiny_flags) --peak-tflops 12.5"
    attempt "it says the peak" "[ '$(peak_in "$scratch/out.txt")' = 12.5 ]"
    while read -r size batch steps; do
        attempt "GPT-2 $size, batch $batch, has a plan" \
            "$program --plan $(train_flags "gpt2:$size" "$batch" "$steps") --peak-tflops 989.4"
    done << EOT
$(train_runs)
EOT
    # Every call of a ladder, with 8 in place of each number.
    sh dev/gpu/gpu_check.sh --dry-run | grep -o '/ladders [a-z_]* [^&]*' | sed 's/[0-9][0-9]*/8/g' | sort -u > "$scratch/calls"
    while read -r _ flags; do
        [ -x "$try/emulated-plain-BF16-ladders" ] || break
        attempt "ladder $flags" "$try/emulated-plain-BF16-ladders $flags"
    done < "$scratch/calls"
    rm -rf "$scratch"
    echo "$passed passed, $bad failed"
    [ "$bad" -eq 0 ] && [ "$passed" -ge 4 ]
    exit
fi

# ------------------------------------------------------------------------------------------------
# The report. This script's own lines begin at the margin: `== NAME, ...` before a part, `ok`, `FAILED` or `skipped` and
# the name after it; the output between them is indented.

say() {
    echo "$*"
    [ -n "$dry$carry" ] || echo "$*" >> "$report"
}

skipped() { say "skipped $1: $2"; }

# report_begin HEAD: continues the report that begins with this line and has no end, or begins a new one.
report_begin() {
    report=$out/gpu_check_$run.txt
    mkdir -p "$out" || exit 1
    if [ -s "$report" ] && [ "$(head -n 1 "$report")" = "$1" ] && ! grep -q '^end: ' "$report"; then
        [ -z "$(tail -c 1 "$report")" ] || echo >> "$report"  # it was cut off within a line
        say "-- continued, $(date '+%Y-%m-%d %H:%M:%S')"
        return
    fi
    number=1
    while [ -e "$out/gpu_check_$run.$number.txt" ]; do number=$((number + 1)); done
    [ ! -s "$report" ] || mv "$report" "$out/gpu_check_$run.$number.txt"
    : > "$report" || exit 1
    say "$1"
    say "-- begun, $(date '+%Y-%m-%d %H:%M:%S')"
}

# within SECONDS COMMAND: runs it with its output in part.txt, and leaves its exit status in $status: 137 after the
# limit, with SIGKILL to all that it started. A process stuck in a driver does not die even then; it is left behind.
within() {
    rm -f "$scratch/status" "$scratch/pid"
    started=$(date +%s)
    (
        timeout -s KILL "$1" sh -c "$2" < /dev/null > "$scratch/part.txt" 2>&1 &
        echo $! > "$scratch/pid"
        wait $!
        echo $? > "$scratch/status.new"
        mv "$scratch/status.new" "$scratch/status"
    ) 2> /dev/null &
    took=0 pause=0.02 status=137
    while [ ! -e "$scratch/status" ] && [ "$took" -lt $(($1 + 5)) ]; do
        sleep $pause
        took=$(($(date +%s) - started))
        [ "$took" -lt 2 ] || pause=0.5  # measurements are not disturbed
    done
    [ ! -e "$scratch/status" ] || read -r status < "$scratch/status"
}

# output: what the part printed, without the checks that passed.
output() { grep -v '^ok ' "$scratch/part.txt" | head -n 300 | sed 's/^/    /' >> "$report"; }

# part LIMIT NAME COMMAND [PROGRAM...]: runs a shell command, if these programs exist. Exit status 77 means that the
# command had nothing to run with. Fails if it did not succeed, now or before the report was cut off.
part() {
    limit=$1 name=$2 command=$3
    shift 3
    limits=$((limits + limit))
    if [ -n "$dry" ]; then
        printf '# %s, at most %d s\n%s\n' "$name" "$limit" "$command"
        return 0
    fi
    [ "$name" = builds ] || ! grep -qF "ok      $name (" "$report" || return 0
    [ "$name" = builds ] || ! grep -qF "FAILED  $name: " "$report" || return 1
    for program in "$@"; do
        case " $broken " in *" $program "*) ;; *) [ ! -x "$work/$program" ] || continue ;; esac
        skipped "$name" "there is no $program"
        return 1
    done
    may=$((limit + (saved < limit ? saved : limit)))
    left=$((began + seconds - $(date +%s)))
    [ "$may" -le "$left" ] || may=$left
    [ -z "$cap" ] || [ "$may" -le "$cap" ] || may=$cap
    echo "== $name, $(date +%H:%M:%S), at most $may s: $command" >> "$report"
    why="not run, the time was over"
    if [ "$left" -ge 2 ]; then
        current=$name
        within "$may" "$command"
        current=
        output
        saved=$((saved + limit > took ? saved + limit - took : 0))
        case $status in
            0) say "ok      $name ($took s)"; return 0 ;;
            77) skipped "$name" "$(tail -n 1 "$scratch/part.txt")"; return 1 ;;
            137) why="killed after $took s, perhaps for want of memory"
                 [ "$took" -lt "$may" ] || why="over its limit of $may s, so it was cut off" ;;
            *) why="status $status after $took s" ;;
        esac
    fi
    say "FAILED  $name: $why"
    return 1
}

# On a signal the output of the part so far is kept, and the report says where it ends.
cut_off() {
    if [ -n "$current" ]; then
        output
        say "-- cut off by a signal in: $current"
        kill -KILL "-$(cat "$scratch/pid")" 2> /dev/null
    fi
    exit 143
}

# ------------------------------------------------------------------------------------------------
# Programs

. dev/gpu/gpu_build.sh

if [ -n "$carry" ]; then
    case $arch in sm_*) ;; *) fail "--carry needs --arch, the GPU's architecture: sm_80 (A100), sm_90a (H100), sm_100 ..." ;; esac
    [ -n "$nvcc" ] || fail "there is no nvcc here; install the CUDA toolkit, or name its compiler with NVCC="
    # shellcheck disable=SC2086  # several words
    carry_programs $runs
    exit 0
fi

# builds LIMIT: the programs of this run that are missing or do not start.
builds() {
    missing=''
    for program in $(programs_of "$run"); do
        if ! fresh "$program" || ! starts "$program"; then missing="$missing $program"; fi
    done
    [ -n "$missing" ] || { say "programs: all in $work start"; return; }
    if [ -z "$nvcc" ] || [ -n "$budget" ]; then
        broken=$missing why="there is no nvcc"
        [ -z "$budget" ] || why="there is no time for them with --budget"
        say "FAILED  builds: $why, and these are not in $work or do not start:$missing; install the CUDA toolkit, name its \
compiler with NVCC=, or carry them (see --help)"
        return
    fi
    stamp
    # shellcheck disable=SC2086  # several words
    build_lines $missing
    part "$1" "builds" "$build_all $scratch/builds"
}

# ------------------------------------------------------------------------------------------------
# Shared by the runs

# needs MIB NAME: whether the GPU has this much memory; otherwise reports it.
needs() {
    [ -z "$dry" ] && [ "$memory" -gt 0 ] && [ "$memory" -lt "$1" ] || return 0
    skipped "$2" "it needs $1 MiB of memory, and this GPU has $memory"
    return 1
}

# model SIZE: sets batch and steps of train_runs; the batch is halved until its memory plan fits. Fails if none does.
model() {
    megabytes=0
    read -r batch steps << EOT
$(train_runs | sed -n "s/^$1 //p")
EOT
    [ -z "$dry" ] && [ "$memory" -gt 0 ] && [ -x "$train" ] || return 0
    while :; do
        megabytes=$(planned "$train" "$(train_flags "gpt2:$1" "$batch" "$steps")" 2> "$scratch/part.txt")
        [ -n "$megabytes" ] || { output; return 0; }  # refused: the run will say it again
        # In MB; 1.5 GB of the GPU's memory is left to the driver and the libraries.
        awk -v need="$megabytes" -v have="$memory" 'BEGIN { exit !(need <= 1.048576 * have - 1500) }' && return 0
        [ "$batch" -gt 1 ] || return 1
        batch=$((batch / 2))
    done
}

# train_model LIMIT SIZE: runs the trainer, with the largest batch that fits.
train_model() {
    model "$2" || { skipped "train GPT-2 $2" "not even a batch of 1 fits, $megabytes MB"; return; }
    part "$1" "train GPT-2 $2, batch $batch" \
        "$train $(train_flags "gpt2:$2" "$batch" "$steps")${peak:+ --peak-tflops $peak}" train-cuda-BF16
    batches="$batches $2:$batch"
}

# The data sheet's peak, as the trainer knows it. Every mfu is relative to it.
ask_peak() {
    part 8 "the GPU's peak" "$train $(tiny_flags)" train-cuda-BF16
    [ -z "$dry" ] || return
    peak=$(peak_in "$report")
    say "peak of dense matmuls of the data sheet, for every mfu below: ${peak:-not known of this GPU} TFLOP/s"
}

# ------------------------------------------------------------------------------------------------
# A. Does it run?

run_A() {
    builds 60
    ask_peak
    part 8 "a run, synchronized after each kernel" "CUDA_LAUNCH_BLOCKING=1 $train $(tiny_flags)" train-cuda-BF16
    part 12 "every operation, synchronized after each kernel" "CUDA_LAUNCH_BLOCKING=1 $work/test_cuda-BF16 --shapes tiny" \
        test_cuda-BF16
    part 6 "PTX, whose emulation is proved by the same tests" "$work/test_emulator" test_emulator
    part "$(seconds_of 25 20)" "test_cuda BF16" "$work/test_cuda-BF16 --shapes odd" test_cuda-BF16
    train_model 40 124M
    [ -z "$budget" ] || train_model 40 1558M
}

# ------------------------------------------------------------------------------------------------
# B. Where is the time?

# ladder NAME LIMIT TITLE FLAG...: lines of flags, each for one call of the ladder, whose rungs are not checked.
ladder() {
    name=$1 limit=$2 title=$3
    shift 3
    commands=
    for flags in "$@"; do
        case $flags in *--rung*) ;; *) flags="--rung shipped $flags" ;; esac
        commands="$commands$work/ladders $name --json --check off $flags && "
    done
    needs 12000 "$title" && part "$limit" "$title" "${commands}true" ladders
}

# bench LIMIT SIZE STEPS: operations of a step by events.
bench() {
    model "$2" || { skipped "operations of GPT-2 $2" "not even a batch of 1 fits, $megabytes MB"; return; }
    part "$1" "operations of GPT-2 $2, batch $batch" "$work/bench-cuda-BF16 --model gpt2:$2 --batch $batch --seq 1024 \
--steps $3 --kernels $out/gpu_check_$2.kernels" bench-cuda-BF16
}

# Kernels by Nsight Compute: per kernel name, in two steps, calls, milliseconds, GB and GB/s. Each launch takes ncu tens
# of milliseconds.
# shellcheck disable=SC2016,SC2089  # those of awk
NCU_TABLE='
    /^"ID"/ { for (i = 1; i <= NF; i++) { if ($i ~ /Kernel Name/) k = i; if ($i ~ /gpu__time_duration/) t = i
                              if ($i ~ /dram__bytes/) d = i } next }
    k { gsub(/,/, "", $t); gsub(/,/, "", $d) }
    k && $t + 0 > 0 { name = $k; sub(/\(.*/, "", name); calls[name]++; ns[name] += $t; bytes[name] += $d }
    END { for (name in calls) { printf "%10.3f ms %6d calls %9.3f GB %8.1f GB/s  %s\n", ns[name] / 1e6, calls[name],
                                bytes[name] / 1e9, bytes[name] / ns[name], name; found = 1 } exit !found }'
# shellcheck disable=SC2090
export NCU_TABLE

# tuned_model LIMIT SIZE: times cuBLASLt's algorithms for the trainer's matmuls, and trains with the best.
tuned_model() {
    model "$2" || { skipped "algorithms of GPT-2 $2" "not even a batch of 1 fits, $megabytes MB"; return; }
    part "$1" "cuBLASLt's algorithms for GPT-2 $2, batch $batch" \
        "$work/tune --model gpt2:$2 --batch $batch --seq 1024 --out $out/$2.json" tune
    [ "$2" = 124M ] || steps=12  # beside its initial weights, which take the host seconds
    part "$1" "train GPT-2 $2, batch $batch, with the best of them" "$train $(train_flags "gpt2:$2" "$batch" "$steps") \
--matmul-algorithms $out/$2.json${peak:+ --peak-tflops $peak}" train-cuda-BF16
}

run_B() {
    builds 70
    ask_peak
    bench "$(seconds_of 25 20)" 124M 80
    bench "$(seconds_of 40 30)" 1558M 15
    tuned_model 20 124M
    tuned_model 25 1558M
    model 124M
    if [ -n "$dry" ] || command -v ncu > /dev/null; then
        part "$(seconds_of 38 34)" "kernels of GPT-2 124M, batch $batch, two steps, by ncu" "ncu --launch-count 900 --clock-control none --cache-control none --csv --page raw \
--print-units base --metrics gpu__time_duration.sum,dram__bytes.sum --log-file $scratch/ncu.csv $work/bench-cuda-BF16 \
--model gpt2:124M --batch $batch --seq 1024 --steps 1 > $scratch/ncu.txt 2>&1
awk -F '\",\"' \"\$NCU_TABLE\" $scratch/ncu.csv > $scratch/ncu.table && sort -rn $scratch/ncu.table ||
{ tail -n 5 $scratch/ncu.txt $scratch/ncu.csv; exit 1; }" bench-cuda-BF16
    else
        skipped "kernels by ncu" "there is no ncu here; the operations above are timed by events"
    fi
    [ -n "$budget" ] || ladder matmul 40 "matmuls of 124M and 1558M" \
        "--rows 65536 --outputs 2304 --inputs 768" "--rows 65536 --outputs 768 --inputs 768" \
        "--rows 65536 --outputs 3072 --inputs 768" "--rows 65536 --outputs 768 --inputs 3072" \
        "--rows 16384 --outputs 50304 --inputs 768" \
        "--rows 32768 --outputs 4800 --inputs 1600" "--rows 32768 --outputs 1600 --inputs 1600" \
        "--rows 32768 --outputs 6400 --inputs 1600" "--rows 32768 --outputs 1600 --inputs 6400" \
        "--rows 8192 --outputs 50304 --inputs 1600" \
        "--rung epilogue --rows 65536 --outputs 2304 --inputs 768" \
        "--rung epilogue --rows 65536 --outputs 3072 --inputs 768"
    for direction in forward backward; do
        ladder "attention_$direction" "$(seconds_of 12 8)" "attention_$direction of 124M and 1558M" \
            "--batch 64 --seq 1024 --heads 12 --kv-heads 12" "--batch 32 --seq 1024 --heads 25 --kv-heads 25"
    done
    ladder layernorm "$(seconds_of 10 6)" "norms of 124M and 1558M" "--rows 65536 --channels 768" "--rows 32768 --channels 1600"
    # The CPU computes them too, in most of this time.
    large="$work/test_cuda-BF16 --shapes large"
    if [ -n "$budget" ]; then
        part 35 "test_cuda BF16, sizes of models" "$large" test_cuda-BF16
        return
    fi
    for name in classifier embedding gelu global_norm; do
        needs 6000 "ladder $name" && part 3 "ladder $name" "$work/ladders $name --json --rounds 20" ladders
    done
    # 6 times what a large L2 cache holds.
    part 3 "ladder adamw" "$work/ladders adamw --json --rounds 20 --parameters 30000000" ladders
    part 60 "test_cuda BF16, sizes of models" "$large" test_cuda-BF16
}

# ------------------------------------------------------------------------------------------------
# C. Compared with PyTorch

# trained LIMIT SIZE: run A's number, if its report is here; otherwise trains the model again. Either notes the batch.
trained() {
    measured=$(sed -n "s/^ok      train GPT-2 $2, batch \([0-9]*\) .*/\1/p" "$out/gpu_check_A.txt" 2> /dev/null | tail -n 1)
    [ -z "$dry" ] || measured=${budget:+64}
    if [ -n "$measured" ]; then
        batches="$batches $2:$measured"
        say "GPT-2 $2: run A's report has the number"
    else
        train_model "$1" "$2"
    fi
}

# Of llm.c (github.com/karpathy/llm.c, train_gpt2.cu), built with -DENABLE_BF16 -DENABLE_CUDNN and carried in build/peer.
# With CUDA 13 it compiles if llmc/cuda_utils.cuh gives cudaMemAdvise cudaMemLocation{cudaMemLocationTypeHost, 0}.
llm_c() {
    if [ -z "$dry" ] && [ ! -x "${PEER:-build/peer}/train_gpt2cu" ]; then
        skipped "llm.c" "there is no ${PEER:-build/peer}/train_gpt2cu"
        return
    fi
    wheels=$(roots | sed 's|$|/lib|' | tr '\n' ':')
    part "$1" "llm.c, GPT-2 124M, batch 64" "LD_LIBRARY_PATH=$wheels$given_path ${PEER:-build/peer}/train_gpt2cu \
-i $scratch/random_0.bin -j $scratch/random_0.bin -e d12 -b 64 -t 1024 -d 65536 -x 60 -v 1000 -m 1 -s 0 -r 0 -l 6e-4"
}

run_C() {
    builds 75
    ask_peak
    trained 40 124M
    llm_c "$(seconds_of 45 50)"
    peers="LD_LIBRARY_PATH=$given_path $python dev/bench/peers.py${peak:+ --peak $peak}"
    if [ -n "$budget" ]; then
        part 85 "PyTorch, compiled" "$peers --only gpt2 --gpt2 '${batches# }'"
        part 35 "PyTorch's attention" "$peers --only attention --seconds 25"
        for direction in forward backward; do
            ladder "attention_$direction" 10 "attention_$direction, a shape of the peers" \
                "--head-size 64 --heads 32 --kv-heads 32 --batch 16 --seq 1024"
        done
        return
    fi
    trained 75 1558M
    part 185 "PyTorch" "$peers --seconds 170 --gpt2 '${batches# }'"
    # 16,384 tokens and 2,048 channels, at three lengths and two sizes of heads.
    for direction in forward backward; do
        ladder "attention_$direction" 15 "attention_$direction, shapes of the peers" \
            "--head-size 64 --heads 32 --kv-heads 32 --batch 16 --seq 1024" \
            "--head-size 64 --heads 32 --kv-heads 32 --batch 4 --seq 4096" \
            "--head-size 64 --heads 32 --kv-heads 32 --batch 1 --seq 16384" \
            "--head-size 128 --heads 16 --kv-heads 16 --batch 16 --seq 1024" \
            "--head-size 128 --heads 16 --kv-heads 16 --batch 4 --seq 4096" \
            "--head-size 128 --heads 16 --kv-heads 16 --batch 1 --seq 16384"
    done
}

# ------------------------------------------------------------------------------------------------
# D. The other types, whole runs, sanitizers

sanitizers() {
    [ -z "$dry" ] && ! command -v compute-sanitizer > /dev/null || return 0
    skipped "sanitizers" "there is no compute-sanitizer here"
    return 1
}

# sanitize LIMIT TOOL PROGRAM [FLAG...]
sanitize() {
    most=$1 tool=$2
    shift 2
    part "$most" "$tool, $1${2:+ $2}" "compute-sanitizer --tool $tool --error-exitcode 9 --print-limit 5 $work/$*" "$1"
}

run_D() {
    builds 120
    for precision in FP16 FP32; do
        part 15 "test_cuda $precision" "$work/test_cuda-$precision --shapes odd" "test_cuda-$precision"
    done
    if [ -n "$budget" ]; then
        sanitizers && sanitize 45 memcheck test_cuda-BF16 --shapes tiny --exact
        return
    fi
    for precision in BF16 FP16 FP32; do
        part 2 "test_train $precision" "$work/test_train-$precision" "test_train-$precision"
        part 3 "test_model $precision" "$work/test_model-$precision" "test_model-$precision"
        part 3 "test_runs $precision" "$work/test_runs-$precision" "test_runs-$precision"
    done
    part 60 "the trainer's CUDA build against its CPU build" "sh dev/test/test_backends.sh $work train-cuda" \
        weights_hash corpus tokenize train-FP32 train-BF16 train-FP16 train-cuda-FP32 train-cuda-BF16 train-cuda-FP16
    [ -z "$nccl" ] || part 20 "NCCL between as many GPUs as there are" "$work/test_nccl $gpus" test_nccl
    # Two vectors of 2^31 elements, of 2 and of 4 bytes.
    needs 14000 "more than 2^31 elements" && \
        part 10 "more than 2^31 elements" "$work/test_cuda-BF16 --shapes huge --only huge" test_cuda-BF16
    sanitizers || return
    sanitize 60 memcheck test_cuda-BF16 --shapes tiny --exact
    sanitize 75 racecheck test_cuda-BF16 --shapes tiny --exact
    sanitize 45 synccheck test_cuda-BF16 --shapes tiny --exact
    sanitize 45 initcheck test_cuda-BF16 --shapes tiny --exact
    # Rungs that no test of the operations runs. Nothing is timed.
    for tool in memcheck racecheck; do
        sanitize 15 "$tool" ladders matmul --rounds 0 --rows 131 --outputs 136 --inputs 72
        sanitize 15 "$tool" ladders attention_backward --rounds 0 --batch 1 --seq 77 --heads 2 --kv-heads 1 --head-size 64
    done
}

# ------------------------------------------------------------------------------------------------

# one_run: fails if one of its parts failed, or if its limits do not fit.
one_run() {
    began=$(date +%s) limits=0 saved=0 current='' peak='' batches='' gpus=1 hangs='' broken=''
    scratch=$work/run_$run train=$work/train-cuda-BF16 seconds=$(run_seconds "$run")
    if [ -n "$dry" ]; then
        memory=0 nccl=yes given_path=''
        builds() { [ -n "$budget" ] || part "$1" "builds" "# $(programs_of "$run" | tr -s ' \n' ' ')"; }
        "run_$run"
        echo "# run $run: the limits add up to $((limits + 20)) s of $seconds s"  # with those of what follows
        [ $((limits + 20)) -le "$seconds" ]
        return
    fi
    mkdir -p "$scratch" || exit 1
    within "${cap:-8}" "nvidia-smi --query-gpu=name,memory.total,compute_cap --format=csv,noheader,nounits"
    gpu='' memory=0 capability=''
    case $status in
        0) IFS=, read -r gpu memory capability < "$scratch/part.txt"; gpus=$(($(wc -l < "$scratch/part.txt"))) ;;
        137) hangs="nvidia-smi did not answer in $took s" gpu="a GPU that nvidia-smi cannot name" ;;
    esac
    memory=$(echo "$memory" | tr -cd 0-9) capability=$(echo "$capability" | tr -cd 0-9) memory=${memory:-0}
    own_arch=$arch
    [ -n "$arch" ] || read -r arch _ 2> /dev/null < "$work/built"
    case $capability in
        90 | 100 | 103 | 120) arch=${own_arch:-sm_${capability}a} ;;
        [0-9]*) arch=${own_arch:-sm_$capability} ;;
    esac
    arch=${arch:-sm_80} source=$(sources)
    find_libraries
    report_begin "gpu_check $run: ${gpu:-no GPU}, $memory MiB, built for $arch, sources $source, at most $seconds s"
    [ -z "$hangs" ] || say "$hangs: the GPU or its driver hangs; the rest is tried all the same"
    if [ -z "$gpu$nvcc" ]; then
        skipped everything "there is neither a GPU nor nvcc here"
        say "end: nothing was run"
        return 0
    fi
    [ -z "$gpu" ] || [ -n "$hangs" ] || part 8 "the GPU" "nvidia-smi"
    part 4 "compilers" "${nvcc:-echo no nvcc; true} --version; $cc --version; nproc
git log -1 --format='commit %h %s' 2> /dev/null; git status --short 2> /dev/null; true"
    say "cuBLASLt: $blas; NCCL: ${nccl:-not found, so nothing is built with it}"
    given_path=${LD_LIBRARY_PATH:-}
    export LD_LIBRARY_PATH="$given_path${given_path:+:}$library_path"  # for programs that were linked elsewhere
    if [ -n "$gpu" ]; then
        [ -e "$scratch/random_0.bin" ] || random_shard "$scratch/random_0.bin"
        "run_$run"
    else
        builds "$seconds"
        skipped "all runs" "there is no GPU here"
    fi
    export LD_LIBRARY_PATH="$given_path"
    say "end: $(grep -c '^ok ' "$report") good, $(grep -c '^FAILED' "$report") failed, $(grep -c '^skipped' "$report") skipped, \
$(($(date +%s) - began)) s; the report is $report"
    ! grep '^FAILED' "$report"
}

trap cut_off HUP INT TERM
bad=0
first_arch=$arch
for run in $runs; do
    arch=$first_arch
    one_run || bad=1
done
exit $bad
