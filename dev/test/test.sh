# test.sh BUILD CC TEST...: runs what `make test` has built, and the checks that are not programs. Prints the tests'
# lines into BUILD/test.log, shows failures and one line per test, and ends with the sum of all.
build=$1
cc=$2
shift 2
log=$build/test.log
passed=0
failed=0
. dev/test/tally.sh
: > "$log"

# Tests run more threads than there may be cores; threads that wait must not keep others from running.
export OMP_WAIT_POLICY=passive

# check NAME COMMAND...: a check that is one command; its output is shown if it fails.
check() {
    name=$1
    shift
    if "$@" > "$build/check.out" 2>&1; then
        passed=$((passed + 1))
        echo "ok      $name"
    else
        failed=$((failed + 1))
        echo "FAILED  $name"
        tail -n 20 "$build/check.out"
    fi
    cat "$build/check.out" >> "$log"
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
    [ "$bad" -eq 0 ] || grep -E 'FAILED|failed|rror' "$build/tally.out" | head -n 20
    [ "$bad" -eq 0 ] || tail -n 5 "$build/tally.out"
    cat "$build/tally.out" >> "$log"
}

# Headers are valid C++ too, since nvcc will compile them as that.
if command -v g++ > /dev/null; then
    check "train.cu compiles as C++17 without warnings" g++ -std=c++17 -fsyntax-only -Wall -Wextra -Werror -Wno-unknown-pragmas -x c++ train.cu
else
    echo "skipped train.cu as C++17: there is no g++"
fi
if command -v clang > /dev/null; then
    check "train.cu compiles with clang without warnings" clang -std=c11 -Wall -Wextra -Werror -Wno-unknown-pragmas -x c train.cu -o "$build/train-clang" -lm -pthread
else
    echo "skipped train.cu with clang: there is no clang"
fi
check "train.cu compiles without OpenMP, for any machine of this kind" "$cc" -std=c11 -fsyntax-only -Wall -Wextra -Werror -Wno-unknown-pragmas -x c train.cu
if command -v aarch64-linux-gnu-gcc > /dev/null; then
    check "train.cu compiles for aarch64" aarch64-linux-gnu-gcc -std=c11 -fsyntax-only -Wall -Wextra -Werror -fopenmp -x c train.cu
else
    echo "skipped train.cu for aarch64: there is no aarch64-linux-gnu-gcc"
fi

# tour FAMILY OPERATIONS: how many operations a step of a model of two blocks has, counted in llmtrain.h by hand.
tour() {
    "$build/bench-FP32" --tour --model "$1:tiny" --batch 4 --seq 32 > "$build/tour.out" && tail -n 1 "$build/tour.out" &&
        grep -q "^$2 operations wrote [1-9][0-9]* arrays, 0 of them with elements that are not finite" "$build/tour.out"
}

# single COMMAND...: compiles the example by a command, in a folder where only the single header is beside it.
single() {
    rm -rf "$build/single" && mkdir "$build/single" && cp dev/example.c "$build/single" &&
        cp "$build/llmtrain_single.h" "$build/single/llmtrain.h" && (cd "$build/single" && "$@")
}

for test in "$@"; do
    case $test in
        example) check "dev/example.c trains and writes" "$build/example" ;;
        tour)
            check "a step of GPT-2 has 80 operations, none of which writes a NaN" tour gpt2 80
            check "a step of Llama has 74 operations, none of which writes a NaN" tour llama 74 ;;
        single)
            # shellcheck disable=SC2016
            check "dev/example.c trains and writes with the single header alone" \
                single sh -c '"$0" -std=c11 -O2 -Wall -Wextra -Wshadow -Werror -Wno-unknown-pragmas example.c -o example -lm -pthread && ./example' "$cc"
            if command -v nvcc > /dev/null; then
                check "dev/example.c compiles with nvcc and the single header alone" single nvcc -std=c++17 -arch=sm_80 -DLLMTRAIN_CUDA \
                    -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wno-missing-field-initializers,-fopenmp -x cu -fdevice-syntax-only -c example.c -o /dev/null
            else
                echo "skipped the single header with nvcc: there is no nvcc"
            fi ;;
        gemm)
            suite gemm "$build/gemm" --check
            suite "gemm, AMX emulated" "$build/gemm-amx" --check ;;
        test_errors) suite test_errors "$build/test_errors" --train "$build/train-FP32" --generate "$build/generate-FP32" --tokenize "$build/tokenize" --corpus "$build/corpus" ;;
        test_ranks)
            mpi=
            [ -x "$build/train-mpi-FP32" ] && mpi="--train-mpi $build/train-mpi-FP32"
            command -v mpicc > /dev/null || echo "skipped ranks over MPI: there is no mpicc; apt-get install -y libopenmpi-dev openmpi-bin"
            # shellcheck disable=SC2086
            suite test_ranks "$build/test_ranks" --overlap off --train "$build/train-FP32" --train16 "$build/train-BF16" $mpi ;;
        test_supervise) suite test_supervise "$build/test_supervise" --train "$build/train-FP32" ;;
        soak) suite "kills, damage and full disks" "$build/soak" --train "$build/train-FP32" ;;
        floors) suite "floors of headers" sh dev/test/floors.sh ;;
        launch) suite "launch scripts" sh dev/test/test_launch.sh "$build/train-FP32" "$build" ;;
        *) suite "$test" "$build/$test" ;;
    esac
done
echo "the tests' own lines are in $log"
echo "$passed passed, $failed failed"
echo "$passed passed, $failed failed" > "$build/test-cpu.sum"
[ "$failed" -eq 0 ]
