# test_emulated.sh PART BUILD CUDA_INCLUDE NVCC LADDERS [PROGRAM...]: runs CUDA on the CPU. PART kernels: every kernel and
# every rung of the ladders in many thread orders; the programs are build/emulated-BUILD-TYPE-NAME. PART runs: the
# emulated libraries, and the trainer's CUDA build, in FP32. PART more: more programs of the first kind, the trainer in
# BF16, the whole model in both, operations alone in a folder, the emulator's own tests.
# NVCC: yes if nvcc has just compiled everything, which make does before it calls this. LADDERS: the names of the ladders
# in the programs named ladders.
set -u
part=$1
build=$2
cuda_include=$3
nvcc=$4
ladders=$5
shift 5
log=$build/test_emulated_$part.log
passed=0
failed=0
. dev/test/tally.sh
: > "$log"
OMP_WAIT_POLICY=passive
export OMP_WAIT_POLICY

# once COMMAND...: runs it and adds its 'N passed, N failed' to the totals; shows failures.
once() {
    tally "$@"
    sum_good=$((sum_good + good))
    sum_bad=$((sum_bad + bad))
    runs=$((runs + 1))
    { echo "== $*"; cat "$tally_out"; } >> "$log"
    [ "$bad" -eq 0 ] && return
    echo "failed: $* (exit status $status)"
    grep -E 'FAILED|emulator:|rror' "$tally_out" | head -n 10
    tail -n 3 "$tally_out"
}

begin() { sum_good=0; sum_bad=0; runs=0; started=$(date +%s); }
end() {  # end NAME
    passed=$((passed + sum_good))
    failed=$((failed + sum_bad))
    echo "$([ "$sum_bad" -eq 0 ] && echo 'ok     ' || echo FAILED) $1: $sum_good passed, $sum_bad failed in $runs runs, $(($(date +%s) - started)) s"
}

# Odd shapes for a ladder, one per line; the test of all kernels has a table of its own, whose larger half only the
# first run takes.
shapes() {
    case $1 in
        test_cuda) echo "--shapes tiny" ;;
        adamw) echo "--parameters 1"; echo "--parameters 1027" ;;
        attention_*)
            echo "--seq 1 --head-size 16"; echo "--seq 77 --heads 6 --kv-heads 1 --head-size 80"
            echo "--seq 65 --head-size 128"; echo "--seq 33 --head-size 96 --kv-heads 4"; echo "--seq 20 --head-size 33" ;;
        classifier) echo "--rows 1 --vocab 5"; echo "--rows 3 --vocab 1000" ;;
        embedding)
            echo "--tokens equal --channels 7"; echo "--tokens different --seq 75 --vocab 300"; echo "--batch 1 --seq 1 --channels 1" ;;
        exact_add) echo "--elements 1"; echo "--elements 4099" ;;
        gelu) echo "--rows 1 --ffn 7"; echo "--rows 5 --ffn 72" ;;
        global_norm) echo "--elements 1"; echo "--elements 4099" ;;
        columns) echo "--rows 1 --width 1 --first 0 --columns 1"; echo "--rows 17 --width 41 --first 3 --columns 21" ;;
        heads) echo "--parts 1 --rows 1 --head-size 2"; echo "--parts 3 --rows 5 --heads 6 --kv-heads 0 --head-size 20" ;;
        layernorm) echo "--rows 1 --channels 7"; echo "--rows 9 --channels 1025"; echo "--rows 33 --channels 32" ;;
        leaves)
            echo "--count 1 --rows 1 --channels 1 --vocab 5"; echo "--count 32 --rows 3 --channels 7 --vocab 1000" ;;
        muon) echo "--rows 1 --cols 1"; echo "--rows 9 --cols 5" ;;
        matmul) echo "--rows 1 --outputs 8 --inputs 8"; echo "--rows 131 --outputs 136 --inputs 40" ;;
        nf4) echo "--rows 1 --channels 1"; echo "--rows 7 --channels 129"; echo "--rows 300 --channels 64" ;;
        qk_norm) echo "--rows 1 --head-size 7"; echo "--rows 17 --heads 9 --kv-heads 3 --head-size 72" ;;
        rope) echo "--seq 1 --head-size 2"; echo "--head-size 6 --heads 3 --kv-heads 3"; echo "--head-size 128 --heads 2" ;;
    esac
}

# Thread orders, with asynchronous copies late and early. Streams that run as late as they may, with the others behind
# or ahead, must not change anything either.
orders() {  # orders PROGRAM [LADDER]
    tiny=
    [ $# -gt 1 ] || tiny="--shapes tiny"
    shapes "${2:-test_cuda}" > "$build/shapes"
    while read -r flags; do
        # shellcheck disable=SC2086
        once "$@" $flags
    done < "$build/shapes"
    case $* in
        *-plain-*\ attention_* | *-plain-*\ matmul) once env EMULATE_SHARED=99 "$@" ;;  # shared memory of sm_86 and sm_89
    esac
    case $* in
        *-plain-FP16-* | *-plain-FP32-*) once "$@" ;;  # all kernels are in the BF16 build too
        *-plain-*)
            once "$@"
            for mode in "ORDER=reverse" "ORDER=random EMULATE_SEED=1" "ORDER=random EMULATE_SEED=2 EMULATE_COPIES=early" \
                "STREAMS=delayed" "STREAMS=delayed EMULATE_OTHERS=ahead"; do
                # shellcheck disable=SC2086
                once env EMULATE_$mode "$@" $tiny
            done ;;
        *)  # shellcheck disable=SC2086
            [ -n "$tiny" ] || once "$@"
            # shellcheck disable=SC2086
            once env EMULATE_ORDER=random EMULATE_SEED=1 EMULATE_COPIES=early "$@" $tiny ;;
    esac
}
# The step by operation, timed by events of the stream: every operation has a time, in total they take no longer than
# the step, both files agree, and for a device without a data sheet no share is printed.
bench() {
    "$build/bench-emulated-BF16" --model gpt2:tiny --batch 2 --seq 16 --steps 2 --json "$build/bench.json" \
        --kernels "$build/kernels.txt" > "$build/bench.out" || return 1
    sed -n 's/.*"ms_median": \([^,]*\).*/step \1/p; s/.*"calls": [0-9]*,"ms": \([^,]*\),.*/json \1/p' "$build/bench.json" |
        cat - "$build/kernels.txt" | awk '
            $1 == "step" { step = $2; next }
            $1 == "json" { json += $2; next }
            { rows++; if ($2 > 0) timed++; sum += $2 }
            END { good = rows >= 20 && timed == rows && sum <= 1.001 * step && sum > 0.999 * json && sum < 1.001 * json
                  printf "%d operations, %d of them with a time, %g of %g ms\n%d passed, %d failed\n", rows, timed, sum,
                      step, good, !good }'
    [ "$(grep -c ' n/a$' "$build/bench.out")" -ge 20 ] && ! "$build/bench-emulated-BF16" --tour > "$build/bench.out" 2>&1 &&
        grep -q 'make tour' "$build/bench.out"
}
# Whoever has no CUDA toolkit compiles all of this against the stand-ins for NVIDIA's headers.
standins() {
    for source in "$build/emulated/test_train.cu" "$build/emulated/dev/emulator/test_tune.cu" "$build/ladders.cu"; do
        if ${CXX:-g++} -fsyntax-only -std=c++20 -Wall -Wextra -Werror -Wno-unknown-pragmas -Wno-missing-field-initializers \
            -DLLMTRAIN_CUDA -DLLMTRAIN_NCCL -DPRECISION_BF16= -I"$build/emulated" -I. -Idev/emulator \
            -isystem dev/emulator/standins -x c++ "$source"; then echo "1 $source"; else echo "0 $source"; fi
    done | awk '/^[01] / { good += $1; n++ } { print } END { printf "%d passed, %d failed\n", good, n - good; exit good < n }'
}
# All kernels, or all ladders, of each program.
kernels() {
    for program in "$@"; do
        begin
        case $program in
            *-ladders) for ladder in $ladders; do orders "$program" "$ladder"; done ;;
            *) orders "$program" ;;
        esac
        end "$(basename "$program")"
    done
}
# skipped NAME: whether make was told SKIP=NAME; then says so.
skipped() {
    case " ${SKIP:-} " in *" $1 "*) echo "skipped $1" ;; *) return 1 ;; esac
}
# The trainer in this type.
trainers() {
    begin
    once "$build/test_train-emulated-$1"
    end "parts of the trainer in its CUDA build, $1"
    skipped "test_backends-$1" && return
    begin
    once env "TYPES=$1" sh dev/test/test_backends.sh "$build"
    end "the trainer's CUDA build against its CPU build, $1"
}
# The whole model in this type.
model() {
    skipped "test_model-emulated-$1" && return
    begin
    once "$build/test_model-emulated-$1" --model
    end "the whole model in its CUDA build against float64, $1"
}
if [ "$part" = kernels ]; then
    kernels "$@"
    begin
    once bench
    end "a step by operation, in a CUDA build"
elif [ "$part" = more ]; then
    kernels "$@"
    trainers BF16
    model BF16
    model FP32
    begin
    once sh dev/gpu/gpu_check.sh --try "$build"
    end "command lines of dev/gpu/gpu_check.sh"
    begin
    once "$build/test_tune"
    end "matmul algorithms, timed and stored"
    begin
    once standins
    end "compiled without NVIDIA's headers"
    # shellcheck disable=SC2086  # several words
    skipped copy || { begin; once sh dev/test/copy.sh "$build" $cuda_include
        end "operations copied into empty folders"; }
    begin
    rm -f "$build/counts.jsonl"
    once env EMULATE_COUNT="$build/counts.jsonl" "$build/emulated-race-BF16-ladders" gelu --rows 4 --ffn 64 --rung sigmoid
    if grep -q '80 sectors, ideal 80 ' "$tally_out" && sh dev/gpu/sectors.sh --table "$build/counts.jsonl" > "$build/counts.txt" &&
        grep -q '^swiglu_backward_kernel<1> .* 1.00 .* 1.00 ' "$build/counts.txt"; then
        sum_good=$((sum_good + 1))
    else
        sum_bad=$((sum_bad + 1))
        cat "$tally_out"
    fi
    end "ladders and dev/gpu/sectors.sh: sectors and wavefronts"
    # shellcheck disable=SC2086  # several words
    skipped emulator || { begin; once sh dev/emulator/test.sh "$build/emulator" $cuda_include
        end "emulator: kernels, PTX, memory, streams, planted bugs"; }
else
    begin
    once "$build/test_cublaslt"
    once env EMULATE_STREAMS=delayed "$build/test_cublaslt"
    end "emulator: cuBLASLt"
    begin
    once env EMULATE_STREAMS=delayed EMULATE_OTHERS=ahead "$build/test_nccl"
    end "emulator: NCCL between processes"
    trainers FP32
    if command -v python3 > /dev/null; then
        begin
        once python3 dev/test/test_machine_code.py "$build/launches-BF16"
        end "what is read in machine code, and in the launches of a step"
    else
        echo "skipped the tests of dev/gpu/machine_code.py: there is no python3"
    fi
fi
case $part-$nvcc in
    kernels-*) ;;
    *-yes)  # otherwise make would have stopped
        passed=$((passed + 1))
        if [ "$part" = runs ]; then echo "ok      nvcc accepts everything"; else
            echo "ok      nvcc compiles the kernels for sm_80, sm_90a and sm_100: $build/resources-*.txt"
        fi ;;
    *) echo "skipped nvcc: it is not installed" ;;
esac
echo "the tests' own lines are in $log"
echo "$passed passed, $failed failed"
echo "$passed passed, $failed failed" > "$build/test-cuda-$part.sum"
[ "$failed" -eq 0 ]
