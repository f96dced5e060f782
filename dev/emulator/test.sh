# dev/emulator/test.sh BUILD [CUDA_INCLUDE_FLAGS...]: builds and runs the emulator's own tests; run it in the root of
# the repository. Without flags the stand-ins for NVIDIA's headers are used. CXX (g++) and CC (cc) may be set. The last
# line is `N passed, N failed`.
#
#   test_emulator   each function of device code and PTX instruction, in every mode
#   test_runtime    memory, streams and events, in every mode of the streams
#   bugs            each is caught in the modes that the program names; its twin without the bug always passes
#   runtime_bugs    the same for host code, each in a process of its own
#   test_count      sectors and wavefronts, line by line, as in the comments of test_count.cu
build=$1
[ -n "$build" ] || { echo "usage: sh dev/emulator/test.sh BUILD [CUDA_INCLUDE_FLAGS...]" >&2; exit 2; }
shift
standins="-isystem dev/emulator/standins"
includes=${*:-$standins}
mkdir -p "$build" || exit 1
passed=0
failed=0
CXX=${CXX:-g++}
. dev/test/tally.sh

# Races and sanitizers' findings end with a status of their own.
export ASAN_OPTIONS=exitcode=87 UBSAN_OPTIONS=exitcode=87:print_stacktrace=0
export OMP_WAIT_POLICY=passive

# verdict STATUS NAME: one check; shows the end of a log if it fails.
verdict() {
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED  $2"
        tail -n 20 "$build/log"
    fi
}

# compile COMPILER OUTPUT SOURCE FLAGS...
flags="-std=c++20 -fno-strict-aliasing -pthread -Wall -Wextra -Werror -Wno-unknown-pragmas
    -Wno-missing-field-initializers -I. -Idev/emulator"
compile() {
    compiler=$1 output=$build/$2 input=$build/$3.cu
    shift 3
    rm -f "$output"
    # shellcheck disable=SC2086
    "$compiler" $flags "$@" $includes -x c++ "$input" -o "$output" > "$build/log" 2>&1
    verdict $? "compiling $output"
}

"$CXX" -std=c++20 -O1 -Wall -Wextra -Wshadow -Werror dev/emulator/translate.cpp -o "$build/translate" || exit 1
for name in test_emulator bugs test_runtime runtime_bugs; do
    "$build/translate" dev/emulator/$name.cu > "$build/$name.cu" 2> "$build/log"
    verdict $? "translating $name.cu"
    optimize=-O1
    case $name in *runtime*) optimize=-O0 ;; esac  # here compilation takes longer than running
    compile "$CXX" $name $name -O1 -fopenmp
    compile "$CXX" $name-asan $name $optimize -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined
done
"$build/translate" dev/emulator/test_count.cu > "$build/test_count.cu" 2> "$build/log"
verdict $? "translating test_count.cu"
for name in test_emulator bugs test_count; do
    options=-g1
    [ $name = test_count ] && options="-g -fno-tree-sra"
    compile "$CXX" $name-race.o $name -O1 $options -fno-pie -DEMULATE_RACE -fsanitize=thread -c
    "$CXX" -no-pie "$build/$name-race.o" -o "$build/$name-race" > "$build/log" 2>&1
    verdict $? "linking $build/$name-race"
done

# Sources and programs that must be refused, by the translator and by the emulator.
refused() {
    printf '%s\n' "$2" > "$build/refused.cu"
    ! "$build/translate" "$build/refused.cu" > /dev/null 2> "$build/log" && grep -q 'refused.cu:1: ' "$build/log"
    verdict $? "the translator refuses $1, naming the line"
}
refused "a comment without end" '/* int x;'
refused "a bracket without end" 'asm("bar.sync 0;"'
refused "shared memory with a value" '__shared__ int x = 3;'
refused "named operands of asm" 'asm("mov %[a], 0;" : [a] "=r"(x));'
refused "a launch without a kernel" '<<<1, 2>>>(3);'
refused "a launch without end" 'k<<<1, 2(3);'
refused "launch bounds without a kernel" '__global__ void __launch_bounds__(32) k(int n);'
for program in test_emulator test_runtime; do
    for setting in EMULATE_ORDER=sideways EMULATE_SEED=x EMULATE_COPIES=never EMULATE_POISON=2 EMULATE_THREADS=-1 \
        EMULATE_STREAMS= EMULATE_STREAMS=later EMULATE_OTHERS=beside EMULATE_SHARED=47 EMULATE_SHARED=228; do
        env "$setting" "$build/$program" > "$build/log" 2>&1
        [ $? -eq 86 ] && grep -q "${setting%%=*} is '${setting#*=}'; give " "$build/log"
        verdict $? "$program refuses $setting"
    done
done
! EMULATE_SHARED=64 "$build/test_emulator" > "$build/log" 2>&1 && grep -q cudaFuncSetAttribute "$build/log"
verdict $? "a kernel gets no more shared memory than EMULATE_SHARED"

# Ordinary C passes through the translator unchanged, but for the line added at its beginning.
for file in llmtrain/ops/base.h kernels_cpu.h llmtrain/ops/gemm.h llmtrain/ops/gemm_x86.h dev/test/test_kernels.c; do
    "$build/translate" $file 2> "$build/log" | tail -n +3 | cmp -s - $file
    verdict $? "the translator leaves $file as it is"
done

# pass PROGRAM SETTINGS [FLAG]: a program that ends with 'N passed, N failed'; its counts are added to ours.
pass() {
    # shellcheck disable=SC2086
    tally timeout 60 env $2 "$build/$1" $3
    passed=$((passed + good))
    failed=$((failed + bad))
    [ "$bad" -eq 0 ] && return
    echo "FAILED  $1 with $2: status $status"
    grep -v '^ok' "$tally_out" | head -n 20
}

modes="EMULATE_ORDER=forward EMULATE_ORDER=reverse"
for seed in 1 2 3 4; do modes="$modes EMULATE_ORDER=random,EMULATE_SEED=$seed"; done
for program in test_emulator bugs; do
    argument=
    [ $program = bugs ] && argument=--good
    for copies in late early; do
        for mode in $modes; do
            for kind in "" -asan -race; do
                pass $program$kind "$(echo "$mode" | tr , ' ') EMULATE_COPIES=$copies" $argument
            done
        done
    done
    for settings in EMULATE_STREAMS=delayed EMULATE_THREADS=1 EMULATE_THREADS=7 EMULATE_POISON=0 EMULATE_SHARED=99; do
        pass $program $settings $argument
    done
done

now="EMULATE_STREAMS=now EMULATE_THREADS=2"
behind="EMULATE_STREAMS=delayed EMULATE_OTHERS=behind EMULATE_THREADS=2"
ahead="EMULATE_STREAMS=delayed EMULATE_OTHERS=ahead EMULATE_THREADS=2"
runtimes="test_runtime test_runtime-asan"
if [ "$includes" != "$standins" ]; then
    includes=$standins compile "$CXX" test_runtime-standins test_runtime -O1 -fopenmp
    runtimes="$runtimes test_runtime-standins"
fi
for program in $runtimes; do
    for mode in "$now" "$behind" "$ahead" "$behind EMULATE_POISON=0"; do pass $program "$mode"; done
done

# caught SETTINGS PROGRAM NUMBER: whether the bug shows as a wrong result, a diagnosis or a sanitizer's finding, with
# status 1, 86 or 87. A crash does not count.
caught() {
    # shellcheck disable=SC2086
    timeout 20 env $1 "$build/$2" "$3" > "$build/log" 2>&1
    status=$?
    [ $status -eq 1 ] || [ $status -eq 86 ] || [ $status -eq 87 ]
}
caught_at_random() {
    for seed in 1 2 3 4; do
        caught "EMULATE_ORDER=random EMULATE_THREADS=1 EMULATE_SEED=$seed" bugs "$1" && return 0
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
            # With one thread blocks run in that order on any machine; with several, their threads interleave, which
            # exposes other bugs.
            reverse) caught "EMULATE_ORDER=reverse EMULATE_THREADS=1" bugs "$number" ||
                caught EMULATE_ORDER=reverse bugs "$number" ;;
            random) caught_at_random "$number" ;;
            early) caught "EMULATE_ORDER=reverse EMULATE_COPIES=early" bugs "$number" ;;
            asan) caught EMULATE_ORDER=forward bugs-asan "$number" ;;
            race) caught EMULATE_ORDER=forward bugs-race "$number" ;;
            *) false ;;
        esac
        verdict $? "bug $number, $name, is caught in mode $mode"
    done
done < "$build/bugs.list"

# Host code: the kind of the finding must match, too; AddressSanitizer's is a diagnosis.
export ASAN_OPTIONS=exitcode=86
"$build/runtime_bugs" --list > "$build/bugs.list"
for program in runtime_bugs runtime_bugs-asan; do
    while read -r number name mode shows; do
        eval "settings=\$$mode"
        expected=86
        [ "$shows" = result ] && expected=1
        # shellcheck disable=SC2086
        timeout 20 env $settings "$build/$program" "$number" > "$build/log" 2>&1
        [ $? -eq $expected ]
        verdict $? "$program: bug $number, $name, shows as a $shows with $settings"
        for settings in "$now" "$behind" "$ahead"; do
            # shellcheck disable=SC2086
            timeout 20 env $settings "$build/$program" "$number" good > "$build/log" 2>&1
            verdict $? "$program: the twin of bug $number, $name, passes with $settings"
        done
    done < "$build/bugs.list"
done

# The counts in test_count.cu's comments, and those measured: LINE space kind requests sectors|wavefronts ideal.
counts=$build/counts.jsonl
rm -f "$counts"
env "EMULATE_COUNT=$counts" "$build/test_count-race" > "$build/log" 2>&1
verdict $? "test_count runs"
awk -F'//: ' 'NF > 1 { n = split($2, said, ", "); for (i = 1; i <= n; i++) print FNR, said[i] }' \
    dev/emulator/test_count.cu | sort > "$build/counts.said"
sed -n 's/.*"line": \([0-9]*\), .*"space": "\([a-z]*\)", "kind": "\([a-z.]*\)", "requests": \([0-9]*\), '\
'"bytes": [0-9]*, "[a-z]*": \([0-9]*\), "ideal": \([0-9]*\)}/\1 \2 \3 \4 \5 \6/p' "$counts" |
    awk '{ key = $1 " " $2 " " $3; n[key] += $4; units[key] += $5; ideal[key] += $6 }
         END { for (key in n) print key, n[key], units[key], ideal[key] }' | sort > "$build/counts.found"
while read -r said; do
    grep -qx "$said" "$build/counts.found"
    verdict $? "test_count.cu: $said"
done < "$build/counts.said"
diff "$build/counts.said" "$build/counts.found" > "$build/log" 2>&1
verdict $? "test_count.cu: nothing else is counted"
grep -q '"kernel": "transpose<33>", .*"shared", "kind": "load", .* 32, "ideal": 32}' "$counts" &&
    grep -q '"kernel": "four_bytes", "kind": "launch", "launches": 1, "blocks": 2, "threads": 64}' "$counts" &&
    grep -q '"line": [0-9]*, "via": "dev/emulator/test_count.cu:[0-9]*", .*"ldmatrix"' "$counts"
verdict $? "counts name kernels, their launches and the functions that they call"
env EMULATE_COUNT=/none/counts "$build/test_count-race" > "$build/log" 2>&1
[ $? -eq 86 ] && grep -q 'cannot write /none/counts' "$build/log"
verdict $? "a file of counts that cannot be written is named"

# Other compilers, if installed.
if command -v clang++ > /dev/null; then
    compile clang++ test_emulator-clang test_emulator -O1
    pass test_emulator-clang EMULATE_ORDER=forward
else
    echo "skipped clang++: there is none"
fi
if command -v aarch64-linux-gnu-g++ > /dev/null; then
    compile aarch64-linux-gnu-g++ test_emulator-aarch64.o test_emulator -O1 -c
else
    echo "skipped aarch64: there is no aarch64-linux-gnu-g++"
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
