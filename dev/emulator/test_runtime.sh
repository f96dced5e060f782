#!/bin/sh
# test_runtime.sh BUILD_DIR [CUDA_INCLUDE_FLAGS]: builds test_runtime.cu and runtime_bugs.cu with the CUDA headers that
# the flags name or else with the stand-ins, plain and with sanitizers, and test_runtime.cu with the stand-ins in any
# case. Runs the tests in every mode, each planted bug in the mode that must catch it, its correct twin in all modes.
# Prints failures and `N passed, N failed`. Uses CXX and CC.
build=$1
[ -n "$build" ] || { echo "usage: test_runtime.sh BUILD_DIR [CUDA_INCLUDE_FLAGS]" >&2; exit 2; }
shift
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
mkdir -p "$build" || exit 2
flags="-std=c++17 -fopenmp -pthread -fno-strict-aliasing -Wall -Wextra -Werror -Wno-unknown-pragmas -I$root -I$here"
sanitizers="-O0 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined"
standins="-I$here/standins"
passed=0
failed=0

# Threads that wait must not keep others from running; a report of the address sanitizer is a diagnosis, too.
export OMP_WAIT_POLICY=passive EMULATE_THREADS=2 ASAN_OPTIONS=exitcode=86

now="EMULATE_STREAMS=now"
behind="EMULATE_STREAMS=delayed EMULATE_OTHERS=behind"
ahead="EMULATE_STREAMS=delayed EMULATE_OTHERS=ahead"

# count STATUS EXPECTED NAME: one check; shows the end of out.txt if it fails.
count() {
    if [ "$1" -eq "$2" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED  $3: status $1, expected $2"
        tail -n 5 "$build/out.txt"
    fi
}

# compile NAME SOURCE FLAGS...
compile() {
    name=$1
    source=$2
    shift 2
    rm -f "$build/$name"
    ${CXX:-g++} $flags "$@" -x c++ "$build/$source.cu" -o "$build/$name" > "$build/out.txt" 2>&1
    count $? 0 "building $name"
}

# tests NAME: a build of test_runtime.cu in every mode.
tests() {
    for mode in "$now" "$behind" "$ahead" "$behind EMULATE_POISON=0"; do
        env $mode timeout 60 "$build/$1" > "$build/out.txt" 2>&1
        count $? 0 "$1 with $mode"
        tail -n 1 "$build/out.txt" | grep -q '^[1-9][0-9]* passed, 0 failed$'
        count $? 0 "the last line of $1 with $mode"
    done
}

# bugs NAME: a build of runtime_bugs.cu.
bugs() {
    "$build/$1" --list > "$build/list.txt"
    count $? 0 "$1 --list"
    while read -r number bug mode shows; do
        eval "environment=\$$mode"
        expected=86
        [ "$shows" = result ] && expected=1
        env $environment timeout 20 "$build/$1" "$number" > "$build/out.txt" 2>&1
        count $? $expected "$1: bug $number, $bug, with $environment"
        for environment in "$now" "$behind" "$ahead"; do
            env $environment timeout 20 "$build/$1" "$number" good > "$build/out.txt" 2>&1
            count $? 0 "$1: correct twin of bug $number, $bug, with $environment"
        done
    done < "$build/list.txt"
}

rm -f "$build/translate"
${CC:-cc} -std=c11 -O1 "$here/translate.c" -o "$build/translate" > "$build/out.txt" 2>&1
count $? 0 "building translate"
for source in test_runtime runtime_bugs; do
    "$build/translate" "$here/$source.cu" > "$build/$source.cu" 2> "$build/out.txt"
    count $? 0 "translating $source.cu"
done

headers=${*:-$standins}
compile test_runtime test_runtime -O1 $headers
compile runtime_bugs runtime_bugs -O1 $headers
compile test_runtime_asan test_runtime $sanitizers $headers
compile runtime_bugs_asan runtime_bugs $sanitizers $headers
tests test_runtime
bugs runtime_bugs
tests test_runtime_asan
bugs runtime_bugs_asan
if [ "$headers" != "$standins" ]; then
    compile test_runtime_standins test_runtime -O1 $standins
    tests test_runtime_standins
fi

for wrong in EMULATE_STREAMS=later EMULATE_OTHERS=beside EMULATE_POISON=yes; do
    env $wrong "$build/test_runtime" > "$build/out.txt" 2>&1
    count $? 86 "refusing $wrong"
done

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
