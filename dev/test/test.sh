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

for test in "$@"; do
    case $test in
        example) check "dev/example.c trains and writes" "$build/example" ;;
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
        launch) suite "launch scripts" sh dev/test/test_launch.sh "$build/train-FP32" "$build" ;;
        *) suite "$test" "$build/$test" ;;
    esac
done
echo "the tests' own lines are in $log"
echo "$passed passed, $failed failed"
echo "$passed passed, $failed failed" > "$build/test-cpu.sum"
[ "$failed" -eq 0 ]
