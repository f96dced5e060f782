#!/bin/sh
# resources.sh [PRECISION...]: what each shipped kernel needs of a multiprocessor, as ptxas says: a table of registers,
# static shared memory (what a launch asks for besides is not in it), the stack (arrays that are not in registers) and
# bytes spilled from registers to memory.
# PRECISION: FP32, BF16, FP16; all three unless given. ARCHS="sm_80 sm_90a sm_100" and NVCC=nvcc can be changed.
#
# Fails if a kernel spills that is not in `allowed` below, or if an entry of `allowed` is of no use any more. No GPU is
# needed; without nvcc it says that it is skipped.
set -u
cd "$(dirname "$0")/.." || exit 1

# One line per kernel that may spill: a pattern for architecture/precision/name (as `case` matches it), then the reason.
allowed=''

nvcc=${NVCC:-nvcc}
archs=${ARCHS:-sm_80 sm_90a sm_100}
[ $# -gt 0 ] || set -- FP32 BF16 FP16
if ! command -v "$nvcc" > /dev/null; then
    echo "resources.sh: skipped, there is no nvcc here"
    exit 0
fi
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

targets=
for arch in $archs; do targets="$targets -gencode arch=compute_${arch#sm_},code=$arch"; done

# test_cuda.cu calls every operation, so that every kernel of the backend is compiled, in all forms that are used. (Kernels
# are optimised unless nvcc is told otherwise; -O3 would be for the host's part.)
for precision in "$@"; do
    # shellcheck disable=SC2086  # several words
    if ! "$nvcc" -std=c++17 $targets -DLLMTRAIN_CUDA "-DPRECISION_$precision" -I. -Xcompiler -Wall,-Wextra,-fopenmp -Werror all-warnings \
            -Xptxas -v \
            -c dev/test/test_cuda.cu -o "$work/test_cuda.o" > "$work/ptxas" 2>&1; then
        cat "$work/ptxas"
        echo "resources.sh: dev/test/test_cuda.cu does not compile for $precision"
        exit 1
    fi
    # Lines of ptxas to: arch/precision registers shared stack stores loads mangled name.
    awk -v precision="$precision" -v quote="'" '
        /Compiling entry function/ { split($0, part, quote); name = part[2]; arch = part[4]; stores = loads = 0; next }
        /bytes spill stores/ { stack = $1
                               match($0, /[0-9]+ bytes spill stores/); stores = substr($0, RSTART, RLENGTH) + 0
                               match($0, /[0-9]+ bytes spill loads/); loads = substr($0, RSTART, RLENGTH) + 0; next }
        /Used [0-9]+ registers/ && name != "" {
            match($0, /Used [0-9]+/); registers = substr($0, RSTART + 5, RLENGTH - 5)
            shared = 0
            if (match($0, /[0-9]+ bytes smem/)) shared = substr($0, RSTART, RLENGTH) + 0
            if (name !~ /test_join/) print arch "/" precision, registers, shared, stack, stores, loads, name
            name = "" }' "$work/ptxas" >> "$work/rows"
done
if ! [ -s "$work/rows" ]; then
    echo "resources.sh: ptxas named no kernels; does $nvcc pass -Xptxas -v on?"
    exit 1
fi

# Names without their parameters: softmax<8>(unsigned short*, ...) to softmax<8>.
demangle="cat"
for tool in cu++filt c++filt; do command -v "$tool" > /dev/null && demangle=$tool && break; done
cut -d ' ' -f 7 "$work/rows" | "$demangle" | sed 's/(int)//g; s/(bool)//g; s/^void //; s/(.*//; s/ //g' > "$work/names"
cut -d ' ' -f 1-6 "$work/rows" | paste -d ' ' - "$work/names" | sort -t ' ' -k 7,7 -k 1,1 > "$work/table"

echo "kernel                                             | arch/precision | registers | shared | stack | spilled: \
stores, loads"
awk '{ printf "%-50s | %-14s | %9s | %6s | %5s | %s, %s\n", $7, $1, $2, $3, $4, $5, $6 }' "$work/table"

failures=0
spills=0
printf '%s\n' "$allowed" > "$work/allowed"
: > "$work/used"
while read -r where _ _ _ stores loads name; do
    [ "$stores" -gt 0 ] || [ "$loads" -gt 0 ] || continue
    spills=$((spills + 1))
    reason=
    while read -r pattern why; do
        # shellcheck disable=SC2254  # it is a pattern
        case "$where/$name" in $pattern) reason=$why; echo "$pattern" >> "$work/used" ;; esac
    done < "$work/allowed"
    if [ -n "$reason" ]; then
        echo "allowed: $where/$name spills: $reason"
    else
        echo "FAILED: $where/$name spills $stores bytes; use fewer registers, or say in dev/resources.sh why it may"
        failures=$((failures + 1))
    fi
done < "$work/table"
while read -r pattern _; do
    [ -z "$pattern" ] || grep -qxF -- "$pattern" "$work/used" && continue
    echo "FAILED: '$pattern' in the list of dev/resources.sh does not spill; take it out"
    failures=$((failures + 1))
done < "$work/allowed"
kernels=$(sort -u "$work/names" | wc -l)
echo "$((kernels)) kernels, $(wc -l < "$work/table" | tr -d ' ') compilations, $spills spill; $failures failures"
[ "$failures" -eq 0 ]
