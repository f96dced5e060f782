# dev/emulator/test.sh BUILD [CUDA_INCLUDE_FLAGS...]: builds and runs the emulator's own tests; run it in the root of
# the repository. Without flags the stand-ins for NVIDIA's headers are used. CXX (g++) and CC (cc) may be set. The last
# line is `N passed, N failed`.
#
#   test_emulator   each function and PTX instruction, in every mode
#   bugs            each is caught in the modes that the table in bugs.cu names; its twin without the bug always passes
build=$1
[ -n "$build" ] || { echo "usage: sh dev/emulator/test.sh BUILD [CUDA_INCLUDE_FLAGS...]" >&2; exit 2; }
shift
[ $# -gt 0 ] || set -- -isystem dev/emulator/standins
mkdir -p "$build" || exit 1
passed=0
failed=0
CXX=${CXX:-g++}

# Races and sanitizers' findings end with a status of their own.
export ASAN_OPTIONS=exitcode=87 UBSAN_OPTIONS=exitcode=87:print_stacktrace=0
export OMP_WAIT_POLICY=passive

good() { passed=$((passed + 1)); }
bad() { failed=$((failed + 1)); echo "FAILED  $*"; }

# compile COMPILER OUTPUT SOURCE FLAGS...: with a log beside the output.
flags="-std=c++17 -fno-strict-aliasing -Wall -Wextra -Werror -Wno-unknown-pragmas -Idev/emulator"
includes="$*"
compile() {
    compiler=$1 output=$2 input=$3
    shift 3
    # shellcheck disable=SC2086
    if "$compiler" $flags "$@" $includes -x c++ "$input" -o "$output" > "$output.log" 2>&1; then
        good
    else
        bad "compiling $output"
        head -n 20 "$output.log"
    fi
}

"${CC:-cc}" -std=c11 -O1 -Wall -Wextra -Wshadow -Werror dev/emulator/translate.c -o "$build/translate" || exit 1
for name in test_emulator bugs; do
    "$build/translate" dev/emulator/$name.cu > "$build/$name.cu" || exit 1
    compile "$CXX" "$build/$name" "$build/$name.cu" -O1 -fopenmp
    compile "$CXX" "$build/$name-asan" "$build/$name.cu" -O1 -g1 -fsanitize=address,undefined \
        -fno-sanitize-recover=undefined
    compile "$CXX" "$build/$name-race.o" "$build/$name.cu" -O1 -g -fno-pie -DEMULATE_RACE -fsanitize=thread -c
    if "$CXX" -no-pie "$build/$name-race.o" -o "$build/$name-race"; then good; else bad "linking $build/$name-race"; fi
done

# What must be refused, by the translator and by the emulator.
refused() {
    printf '%s\n' "$2" > "$build/refused.cu"
    if "$build/translate" "$build/refused.cu" > /dev/null 2> "$build/refused.log"; then
        bad "the translator accepts $1"
    elif grep -q 'refused.cu:1: ' "$build/refused.log"; then
        good
    else
        bad "the translator refuses $1 without naming the line"
    fi
}
refused "a comment without end" '/* int x;'
refused "a bracket without end" 'asm("bar.sync 0;"'
refused "shared memory with a value" '__shared__ int x = 3;'
refused "named operands of asm" 'asm("mov %[a], 0;" : [a] "=r"(x));'
refused "a launch without a kernel" '<<<1, 2>>>(3);'
refused "a launch without end" 'k<<<1, 2(3);'
refused "launch bounds without a kernel" '__global__ void __launch_bounds__(32) k(int n);'
for setting in EMULATE_ORDER=sideways EMULATE_SEED=x EMULATE_COPIES=never EMULATE_POISON=2 EMULATE_THREADS=-1 \
    EMULATE_STREAMS= EMULATE_SHARED=47 EMULATE_SHARED=228; do
    env "$setting" "$build/test_emulator" > "$build/refused.log" 2>&1
    if [ $? -eq 86 ] && grep -q "${setting%%=*} is '${setting#*=}'; give " "$build/refused.log"; then
        good
    else
        bad "$setting is not refused"
    fi
done

EMULATE_SHARED=64 "$build/test_emulator" > "$build/refused.log" 2>&1
if [ $? -eq 1 ] && grep -q cudaFuncSetAttribute "$build/refused.log"; then
    good
else
    bad "a kernel gets more shared memory than EMULATE_SHARED"
fi

# Ordinary C passes through the translator unchanged, but for the line added at its beginning.
for file in llmtrain/base.h kernels_cpu.h llmtrain/gemm.h llmtrain/gemm_x86.h dev/test/test_kernels.c; do
    if "$build/translate" $file | tail -n +3 | cmp -s - $file; then good; else bad "the translator changes $file"; fi
done

# pass NAME COMMAND...: a program that ends with 'N passed, N failed'; its sums are added to ours.
pass() {
    name=$1
    shift
    timeout 60 "$@" > "$build/pass.log" 2>&1
    status=$?
    yes=$(sed -n 's/^\([0-9]*\) passed, .*/\1/p' "$build/pass.log" | tail -n 1)
    no=$(sed -n 's/^[0-9]* passed, \([0-9]*\) failed.*/\1/p' "$build/pass.log" | tail -n 1)
    passed=$((passed + ${yes:-0}))
    failed=$((failed + ${no:-0}))
    if [ $status -ne 0 ] || [ -z "$yes" ]; then
        bad "$name: status $status"
        grep -v '^ok' "$build/pass.log" | head -n 20
    fi
}

modes="EMULATE_ORDER=forward EMULATE_ORDER=reverse"
for seed in 1 2 3 4; do modes="$modes EMULATE_ORDER=random,EMULATE_SEED=$seed"; done
for program in test_emulator bugs; do
    argument=
    [ $program = bugs ] && argument=--good
    for copies in late early; do
        for mode in $modes; do
            settings="$(echo "$mode" | tr , ' ') EMULATE_COPIES=$copies"
            for kind in "" -asan -race; do
                # shellcheck disable=SC2086
                pass "$program$kind in $settings" env $settings "$build/$program$kind" $argument
            done
        done
    done
    for settings in EMULATE_STREAMS=delayed EMULATE_THREADS=1 EMULATE_THREADS=7 EMULATE_POISON=0 EMULATE_SHARED=99; do
        # shellcheck disable=SC2086
        pass "$program in $settings" env $settings "$build/$program" $argument
    done
done

# caught SETTINGS PROGRAM NUMBER: whether the bug shows as a wrong result, a diagnosis or a sanitizer's finding, which
# are the statuses 1, 86 and 87. A crash does not count.
caught() {
    # shellcheck disable=SC2086
    timeout 20 env $1 "$build/$2" "$3" > "$build/caught.log" 2>&1
    status=$?
    [ $status -eq 1 ] || [ $status -eq 86 ] || [ $status -eq 87 ]
}
caught_at_random() {
    for seed in 1 2 3 4; do
        caught "EMULATE_ORDER=random EMULATE_SEED=$seed" bugs "$1" && return 0
    done
    return 1
}
"$build/bugs" --list > "$build/bugs.list"
while read -r number name wanted; do
    [ "$wanted" = all ] && wanted="forward reverse random early asan race"
    for mode in $wanted; do
        case $mode in
            forward) caught EMULATE_ORDER=forward bugs "$number" ;;
            reverse) caught EMULATE_ORDER=reverse bugs "$number" ;;
            random) caught_at_random "$number" ;;
            early) caught "EMULATE_ORDER=reverse EMULATE_COPIES=early" bugs "$number" ;;
            asan) caught EMULATE_ORDER=forward bugs-asan "$number" ;;
            race) caught EMULATE_ORDER=forward bugs-race "$number" ;;
            *) false ;;
        esac
        # shellcheck disable=SC2181
        if [ $? -eq 0 ]; then good; else bad "bug $number, $name, is not caught in mode $mode"; fi
    done
done < "$build/bugs.list"

# Other compilers, where there are any.
if command -v clang++ > /dev/null; then
    compile clang++ "$build/test_emulator-clang" "$build/test_emulator.cu" -O1
    pass "test_emulator built by clang++" "$build/test_emulator-clang"
else
    echo "skipped clang++: there is none"
fi
if command -v aarch64-linux-gnu-g++ > /dev/null; then
    compile aarch64-linux-gnu-g++ "$build/test_emulator-aarch64.o" "$build/test_emulator.cu" -O1 -c
else
    echo "skipped aarch64: there is no aarch64-linux-gnu-g++"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
