#!/bin/sh
# resources.sh [PRECISION...]: the multiprocessor resources that each shipped kernel needs and what its machine code
# does: the table of dev/gpu/machine_code.py, which also reports failures.
# PRECISION: FP32, BF16, FP16; all three unless given. ARCHS="sm_80 sm_90a sm_100" and NVCC=nvcc can be changed.
# LAUNCHES=PROGRAM: dev/gpu/launches.cu, compiled, which reports the threads and the dynamic shared memory of launches.
# OUT=FILE.jsonl: the results are written there too.
#
# No GPU is needed. Without nvcc it is skipped, without python3 only spills are checked, and without nvdisasm (from the
# Python package nvidia-cuda-nvdisasm) only ptxas' output is used.
set -u
cd "$(dirname "$0")/../.." || exit 1

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

# test_cuda.cu calls every operation, so that every kernel of the backend is compiled, in all forms that are used. (nvcc
# optimizes kernels by default; -O3 would be for the host code.) -keep keeps nvcc's intermediate files, of which the
# .ptx and .cubin files are read.
for precision in "$@"; do
    mkdir "$work/$precision" || exit 1
    # shellcheck disable=SC2086  # several words
    if ! "$nvcc" -std=c++20 $targets -DLLMTRAIN_CUDA "-DPRECISION_$precision" -I. \
            -Xcompiler -Wall,-Wextra,-Wno-missing-field-initializers,-fopenmp \
            -Werror all-warnings -Xptxas -v -keep -keep-dir "$work/$precision" \
            -c dev/test/test_cuda.cu -o "$work/test_cuda.o" > "$work/ptxas" 2>&1; then
        cat "$work/ptxas"
        echo "resources.sh: dev/test/test_cuda.cu does not compile for $precision"
        exit 1
    fi
    if command -v python3 > /dev/null; then
        NVCC=$nvcc python3 dev/gpu/machine_code.py --precision "$precision" --folder "$work/$precision" \
            --ptxas "$work/ptxas" ${LAUNCHES:+--launches "$LAUNCHES"} ${OUT:+--out "$OUT"} || exit 1
    elif grep '[1-9][0-9]* bytes spill' "$work/ptxas"; then
        echo "FAILED: $precision spills registers"
        exit 1
    else
        echo "$precision: no kernel spills; skipped the rest: there is no python3"
    fi
    rm -rf "${work:?}/$precision"
done
