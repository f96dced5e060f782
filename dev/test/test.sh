# test.sh PART BUILD CC TEST...: runs what `make test` has built, and the checks that are not programs. Writes the
# tests' output to BUILD/test-PART.log, shows failures and one line per test, and ends with the totals.
part=$1
build=$2
cc=$3
shift 3
log=$build/test-$part.log
passed=0
failed=0
. dev/test/tally.sh
: > "$log"

# Tests may run more threads than there are cores; waiting threads must not keep others from running.
export OMP_WAIT_POLICY=passive

# check NAME COMMAND...: a check that is one command; its output is shown if it fails.
check() {
    name=$1
    shift
    if "$@" > "$build/check-$part.out" 2>&1; then
        passed=$((passed + 1))
        echo "ok      $name"
    else
        failed=$((failed + 1))
        echo "FAILED  $name"
        tail -n 20 "$build/check-$part.out"
    fi
    cat "$build/check-$part.out" >> "$log"
}

# suite NAME COMMAND...: a test program that ends with 'N passed, N failed'.
suite() {
    name=$1
    shift
    started=$(date +%s)
    tally "$@"
    passed=$((passed + good))
    failed=$((failed + bad))
    echo "$([ "$bad" -eq 0 ] && echo 'ok     ' || echo FAILED) $name: $good passed, $bad failed, $(($(date +%s) - started)) s"
    [ "$bad" -eq 0 ] || grep -E 'FAILED|failed|rror' "$tally_out" | head -n 20
    [ "$bad" -eq 0 ] || tail -n 5 "$tally_out"
    cat "$tally_out" >> "$log"
}

# arguments SUITE: those of suites.txt.
arguments() { sed -n "s|^$1 ||p" dev/test/suites.txt | sed "s|B/|$build/|g"; }

# with_compiler COMPILER WHAT FLAG...: compiles train.cu with another compiler, without a warning.
with_compiler() {
    compiler=$1
    what=$2
    shift 2
    if command -v "$compiler" > /dev/null; then
        check "train.cu compiles $what" "$compiler" -Wall -Wextra -Werror -Wno-unknown-pragmas "$@"
    else
        echo "skipped train.cu $what: there is no $compiler"
    fi
}

# quiet COMMAND...: the command succeeds, and ThreadSanitizer reports nothing in any of its processes.
quiet() {
    "$@" > "$build/quiet.out" 2>&1
    status=$?
    grep -A 30 'ThreadSanitizer' "$build/quiet.out" && return 1
    [ "$status" -eq 0 ] || cat "$build/quiet.out"
    return $status
}

# What threads share while a run trains: the loader, the saver and, between ranks, the transport. Saves are slow, so
# that they last longer than a step, and only the saver's own promises order its reads before the next update.
races() {
    run="--family gpt2 --layers 2 --heads 2 --channels 32 --seq 16 --batch 2 --total-batch 192 --warmup 2 --val-every 4
        --data $build/races_train_000000.bin --val $build/races_val_000000.bin
        --ckpt-every 4 --ckpt-async on --ckpt-bandwidth 0.5"
    "$build/tokenize" --bytes doc/running.md --out "$build/races" > "$build/quiet.out" 2>&1 || return 1
    for ranks in "" "--ranks 2 --zero 2 --ckpt-tier $build/races.tier:2" "--ranks 3 --zero 1 --reduce float" \
        "--ranks 4 --cp 2 --pp 2 --zero 1"; do
        rm -rf "$build/races.run"
        for steps in 10 "16 --resume"; do
            # shellcheck disable=SC2086
            check "ThreadSanitizer sees no race in a run: $ranks --steps $steps" \
                quiet "$build/train-FP32" $run --out "$build/races.run" $ranks --steps $steps
        done
    done
}

# tour FAMILY OPERATIONS: the number of operations in a step of a model of two blocks, counted in llmtrain.h by hand.
tour() {
    "$build/bench-FP32" --tour --model "$1:tiny" --batch 4 --seq 32 > "$build/tour.out" && tail -n 1 "$build/tour.out" &&
        grep -q "^$2 operations wrote [1-9][0-9]* arrays, 0 of them with elements that are not finite" "$build/tour.out"
}

# Whether functions that loops call for every element are inlined in the trainer too: left to itself a compiler inlines
# less in a large program than in a small benchmark, and a loop with a call is not vectorized.
inlined() {
    names=$(sed -n 's/^.* \([a-zA-Z0-9_]*\)(float[X]* [a-z]*) {.*/\1/p' llmtrain/ops/arithmetic.h llmtrain/ops/types.h \
        kernels_cpu.h)
    [ "$(echo "$names" | wc -w)" -ge 8 ] || return 1
    for type in FP32 BF16 FP16; do
        [ ! -e "$build/train-$type" ] || ! nm "$build/train-$type" | awk '{ print $3 }' | grep -x "$names" || return 1
    done
}

# Whether the programs call none of the functions that llmtrain/base/system.h leaves out with LLMTRAIN_POSIX_ONLY.
posix() {
    nm -D --undefined-only "$build/train-FP32" "$build/supervise" > "$build/calls" || return 1
    ! grep -wE 'accept4|eventfd|epoll_[a-z0-9]*|madvise|memfd_create|pipe2|posix_fallocate|ppoll|prctl|prlimit|sched_[a-z]*affinity|signalfd|sync_file_range' "$build/calls"
}

# example HEADER: prints the example with an include of HEADER in place of ours.
example() { sed -e '/^#include "llmtrain\//d' -e "s|^#include \"llmtrain.h\".*|#include $1|" examples/first.c; }

# single COMMAND...: compiles the example by a command, in a folder that holds only it and the single header.
single() {
    rm -rf "$build/single" && mkdir -p "$build/single" && cp "$build/llmtrain_single.h" "$build/single" &&
        example '"llmtrain_single.h"' > "$build/single/first.c" && (cd "$build/single" && "$@")
}

# flags_of FOLDER: what pkg-config says, or would say, about a program that uses FOLDER/llmtrain.pc.
flags_of() {
    if command -v pkg-config > /dev/null; then
        PKG_CONFIG_PATH=$1 pkg-config --cflags --libs llmtrain
    else
        prefix=$(sed -n 's/^prefix=//p' "$1/llmtrain.pc")
        sed -n 's/^Cflags: //p; s/^Libs: //p' "$1/llmtrain.pc" | sed "s|\${includedir}|$prefix/include|"
    fi
}

# installs: `make install` into an empty folder gives a user what the example needs, and programs that start; `make
# uninstall` leaves no file. DESTDIR changes where files go, but not what llmtrain.pc says.
installs() {
    folder=$(cd "$build" && pwd)/installed
    files=$build/llmtrain_single.h
    for program in train-FP32 supervise generate-FP32 evaluate-FP32 export watch tokenize corpus; do
        files="$files $build/$program"
    done
    rm -rf "$folder" && mkdir -p "$folder/user" || return 1
    install_to() { make -s "$1" B="$build" CUDA=off MPI=off INSTALLED="$files" PREFIX="$2" DESTDIR="$3"; }
    install_to install "$folder" "" && example '<llmtrain.h>' > "$folder/user/first.c" || return 1
    # shellcheck disable=SC2046  # several words
    (cd "$folder/user" && "$cc" -O1 -Wall -Wextra -Wno-unknown-pragmas first.c -o first \
        $(flags_of "$folder/lib/pkgconfig") && ./first) || return 1
    for program in train supervise generate evaluate export watch tokenize corpus; do
        "$folder/bin/llmtrain-$program" --help | grep -q -e '--' || return 1
    done
    install_to uninstall "$folder" "" && install_to install /opt/llmtrain "$folder/root" || return 1
    grep -qx 'prefix=/opt/llmtrain' "$folder/root/opt/llmtrain/lib/pkgconfig/llmtrain.pc" || return 1
    install_to uninstall /opt/llmtrain "$folder/root" || return 1
    rm -rf "$folder/user"
    [ -z "$(find "$folder" ! -type d)" ]
}

for test in "$@"; do
    case $test in
        compilers)
            with_compiler g++ "as C++20" -std=c++20 -Wno-missing-field-initializers -fsyntax-only -x c++ train.cu
            with_compiler clang "with clang" -std=c11 -x c train.cu -o "$build/train-clang" -lm -pthread
            with_compiler "$cc" "without OpenMP, for any machine of this kind" -std=c11 -fsyntax-only -x c train.cu
            with_compiler aarch64-linux-gnu-gcc "for aarch64" -std=c11 -fsyntax-only -fopenmp -x c train.cu
            for program in bench/checkpoint_cost bench/offload_rate bench/published test/model_dump; do
                check "dev/$program.c compiles" "$cc" -std=c11 -fsyntax-only -Wall -Wextra -Wshadow -Werror \
                    -Wno-unknown-pragmas -I. "dev/$program.c"
            done ;;
        inlined) check "loops of the trainer call no function for each element" inlined ;;
        races) races ;;
        first) check "examples/first.c trains and writes" "$build/first" ;;
        grpo) check "examples/grpo.c: the rates of all sentences are those of two formulas" "$build/grpo" ;;
        reward) check "examples/reward.c: a reward model agrees with labels almost as often as the true reward" "$build/reward" ;;
        distill) check "examples/distill.c: soft targets of 1% of the texts are as good as all texts" "$build/distill" ;;
        tour)
            check "a step of GPT-2 has 90 operations, none of which writes a NaN" tour gpt2 90
            check "a step of Llama has 78 operations, none of which writes a NaN" tour llama 78 ;;
        single)
            # shellcheck disable=SC2016
            check "examples/first.c trains and writes with the single header alone" \
                single sh -c '"$0" -std=c11 -O1 -Wall -Wextra -Wshadow -Werror -Wno-unknown-pragmas first.c -o first -lm -pthread && ./first' "$cc"
            if command -v nvcc > /dev/null; then
                check "examples/first.c compiles with nvcc and the single header alone" single nvcc -std=c++20 -arch=sm_80 -DLLMTRAIN_CUDA \
                    -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wno-missing-field-initializers,-fopenmp -x cu -fdevice-syntax-only -c first.c -o /dev/null
            else
                echo "skipped the single header with nvcc: there is no nvcc"
            fi ;;
        install) check "a program builds with what make install has written, and make uninstall removes all of it" installs ;;
        gemm)
            suite gemm "$build/gemm" --check
            suite "gemm, AMX emulated" "$build/gemm-amx" --check amx ;;
        golden)
            for program in "$build"/golden-[!ac]*; do  # Arm's and clang's belong to make test-more
                suite "${program##*/}" "$program"
            done ;;
        other_isas)
            if [ ! -e "$build/golden-aarch64" ]; then
                echo "skipped golden-aarch64: there is no aarch64-linux-gnu-gcc; apt-get install -y gcc-aarch64-linux-gnu"
            elif ! command -v qemu-aarch64 > /dev/null; then
                echo "skipped golden-aarch64: there is no qemu-aarch64; apt-get install -y qemu-user"
            else
                suite golden-aarch64 qemu-aarch64 "$build/golden-aarch64"
                suite "gemm, BFMMLA emulated" qemu-aarch64 -cpu max "$build/gemm-aarch64" --check bfmmla
            fi
            for program in "$build"/gemm-x86-64-v*; do
                [ ! -e "$program" ] || suite "${program##*/}" "$program" --check
            done ;;
        overlap) suite "reductions under a computation" "$build/test_ranks" --train "$build/train-FP32" --only overlap ;;
        cliffs) suite "speeds of operations" sh dev/test/cliffs.sh "$build" bench-FP32 ;;
        cliffs-*) suite "speeds of operations, ${test#cliffs-}" sh dev/test/cliffs.sh "$build" "bench-${test#cliffs-}" ;;
        test_ranks)
            mpi=
            [ -x "$build/train-mpi-FP32" ] && mpi="--train-mpi $build/train-mpi-FP32"
            command -v mpicc > /dev/null || echo "skipped ranks over MPI: there is no mpicc; apt-get install -y libopenmpi-dev openmpi-bin"
            # shellcheck disable=SC2086
            suite test_ranks "$build/test_ranks" --overlap off $(arguments test_ranks) $mpi ;;
        # shellcheck disable=SC2046
        calls) suite "every call fails" "$build/test_calls" $(arguments test_calls) --chains 3 ;;
        same_weights)
            suite "same weights as before" sh dev/test/same_weights.sh "$build"
            grep '^skipped' "$tally_out" ;;
        layouts) suite "layouts of 8 and 16 ranks" "$build/test_ranks" --train "$build/train-FP32" --only layouts ;;
        more_pairs-*) suite "pairs --seed ${test#*-}" "$build/pairs" --build "$build" --seed "${test#*-}" ;;
        macos)
            suite "macOS, compiled and linked" sh dev/test/macos.sh "$build"
            grep '^skipped' "$tally_out" ;;
        posix) check "no call that only Linux has is left" posix ;;
        floors)
            suite "floors of headers" sh dev/test/floors.sh
            suite "constants of pieces" sh dev/test/pieces.sh
            suite documents sh dev/test/documents.sh ;;
        include) suite "the headers in a user's program" env CC="$cc" sh dev/test/include.sh "$build" ;;
        gpu_check) suite "dev/gpu/gpu_check.sh, with fakes" sh dev/test/test_gpu_check.sh "$build" ;;
        chat_path) suite "README.md's path from conversations to a chat" sh dev/test/chat_path.sh "$build" ;;
        export_runs)
            if command -v python3 > /dev/null; then
                suite dev/export_runs.py python3 dev/test/test_export_runs.py
            else
                echo "skipped dev/export_runs.py: there is no python3"
            fi ;;
        machines) suite "several machines" sh dev/test/test_machines.sh "$build/train-FP32" "$build" ;;
        # shellcheck disable=SC2046
        *) suite "$test" "$build/$test" $(arguments "$test") ;;
    esac
done
echo "the tests' own lines are in $log"
echo "$passed passed, $failed failed"
echo "$passed passed, $failed failed" > "$build/test-$part.sum"
[ "$failed" -eq 0 ]
