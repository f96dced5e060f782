# copy.sh BUILD [CUDA_INCLUDE_FLAGS...]: shows that each operation can be used on its own. Each header below is copied
# into an empty folder with the headers that it includes, and each section of kernels.cuh, vectors.cuh and update.cuh with
# what its first lines list after "Needs:", and nothing else. There a program of copied.cu that calls it must compile with
# nvcc for sm_80, sm_90a and sm_100 (skipped without nvcc), and with the emulator, which runs it and checks the results.
# The last line is `N passed, N failed`.
set -u
build=$1
shift
repo=$PWD
includes=${*:--isystem $repo/dev/emulator/standins}
nvcc=$(command -v "${NVCC:-nvcc}")
[ -n "$nvcc" ] || echo "skipped nvcc: there is none here"
rm -rf "$build/copy"
mkdir -p "$build/copy/root" || exit 1
work=$(cd "$build/copy" && pwd)
ln -s "$repo/dev" "$work/root/dev"  # of the emulator, which matmul.cuh includes by that name
"${CXX:-g++}" -std=c++20 -O1 dev/emulator/translate.cpp -o "$work/translate" || exit 1

emulate="${CXX:-g++} -std=c++20 -fno-strict-aliasing -Wall -Wextra -Werror -Wno-unknown-pragmas
    -Wno-missing-field-initializers -pthread -DLLMTRAIN_CUDA
    -I$repo/dev/emulator $includes -DPRECISION_BF16"
# The CPU's operations, with which all pieces are compared.
"$work/translate" dev/test/copied.cu > "$work/reference.cu"
# shellcheck disable=SC2086  # several words
$emulate -O1 -I. -DREFERENCE -c -x c++ "$work/reference.cu" -o "$work/reference.o" || exit 1

# What a section lists from "// Needs:" to the next line that ends with a full stop: headers, and section numbers.
needs() { sed -n '/^\/\/ Needs:/,/\.$/p' "$1"; }
headers() { needs "$1" | grep -o 'llmtrain/[a-z0-9_/]*\.[a-z]*'; }
# The headers of ours that a header includes.
included() {
    for name in $(sed -n 's/^#include "\(.*\)"/\1/p' "$1"); do
        name=$(realpath -m --relative-to=. "$(dirname "$1")/$name")
        [ -f "$name" ] && echo "$name"
    done
}
sections() { needs "$1" | sed -n 's/.*sections* \(.*\)\.$/\1/p' | grep -o '[0-9]*'; }

# Section NUMBER of FILE, cut out by its rule lines.
section() {
    awk -v title="// $2. " '/^\/\/ ------/ { rule = 1; on = 0; next }
                            rule { rule = 0; on = index($0, title) == 1 }
                            /^#endif  \/\/ LLMTRAIN_[A-Z_]*_CUH/ { on = 0 }
                            on' "$1"
}

# take FOLDER HEADER...: copies the headers, each after the ones it needs, and includes them in piece.h.
take() {
    for header in "$@"; do
        [ "$header" = "$1" ] || [ -f "$1/$header" ] && continue
        # shellcheck disable=SC2046  # several words
        (take "$1" $(included "$header"))
        mkdir -p "$1/$(dirname "$header")" && cp "$header" "$1/$header"
        echo "#include \"$header\"" >> "$1/piece.h"
    done
}

# piece NAME FILE [NUMBER]: makes the folder NAME with a header, or with a section of a file.
piece() {
    folder=$work/$1
    names="$names $1"
    mkdir -p "$folder"
    cp dev/test/copied.cu "$folder"
    [ $# -lt 3 ] && take "$folder" "$2" && return
    section "$2" "$3" > "$folder/section.cuh"
    for number in $(sections "$folder/section.cuh"); do
        section "$2" "$number" > "$folder/section-$(printf %02d "$number").cuh"
    done
    # shellcheck disable=SC2046
    take "$folder" $(headers "$folder/section.cuh")
    for file in "$folder"/section-*.cuh "$folder/section.cuh"; do
        [ -f "$file" ] && echo "#include \"$(basename "$file")\"" >> "$folder/piece.h"
    done
}

# check NAME: compiles the folder's program and runs it. A result line and the compiler's output go to its `result`.
check() {
    cd "$work/$1" || exit 1
    define=-DPRECISION_BF16\ -DPIECE_$1
    {
        if [ -n "$nvcc" ]; then
            # shellcheck disable=SC2086
            "$nvcc" -std=c++20 -c -o /dev/null -fdevice-syntax-only -Werror all-warnings \
                -Xcompiler -Wall,-Wextra,-Wno-missing-field-initializers,-fopenmp \
                -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a \
                -gencode arch=compute_100,code=sm_100 -I. $define copied.cu && echo "passed nvcc" || echo "failed nvcc"
        fi
        if [ "$1" = KERNELS_CPU ]; then
            # shellcheck disable=SC2086
            "${CC:-cc}" -std=c11 -O1 -Wall -Wextra -Werror -Wno-unknown-pragmas -I. $define -x c copied.cu -o program \
                -lm -pthread
        else
            for file in copied.cu piece.h section*.cuh $(find llmtrain -type f); do
                [ -f "$file" ] && mkdir -p "emulated/$(dirname "$file")" && "$work/translate" "$file" > "emulated/$file"
            done
            # shellcheck disable=SC2086
            $emulate -O0 "-DPIECE_$1" -Iemulated -I"$work/root" -x c++ emulated/copied.cu -x none "$work/reference.o" \
                -o program -ldl
        fi && ./program && echo "passed run" || echo "failed run"
    } > result 2>&1
}

names=
piece ATTENTION llmtrain/ops/attention.cuh
piece COLUMNS llmtrain/ops/columns.cuh
piece DECODE llmtrain/ops/decode.cuh
piece HEADS llmtrain/ops/heads.cuh
piece LEAVES llmtrain/ops/leaves.cuh
piece MATMUL llmtrain/ops/matmul.cuh
piece NF4 llmtrain/ops/nf4.cuh
piece QK_NORM llmtrain/ops/qk_norm.cuh
piece RANDOM llmtrain/ops/base.h
piece KERNELS_CPU kernels_cpu.h
for source in kernels.cuh llmtrain/ops/vectors.cuh llmtrain/ops/optimizers/update.cuh; do
    for number in $(sed -n 's/^\/\/ \([0-9]*\)\. .*/\1/p' $source); do
        title=$(sed -n "s/^\/\/ $number\. //p" $source | sed 's/ matmuls$//; s/ and /_AND_/; s/[, ]\{1,\}/_/g' |
            tr '[:lower:]' '[:upper:]')
        piece "$title" $source "$number"
    done
done

# As many at a time as there are processors.
slots=$(nproc 2> /dev/null || echo 1)
running=0
for name in $names; do
    check "$name" &
    running=$((running + 1))
    [ "$running" -lt "$slots" ] && continue
    wait
    running=0
done
wait

passed=0
failed=0
for name in $names; do
    good=$(grep -c '^passed ' "$work/$name/result")
    bad=$(grep -c '^failed ' "$work/$name/result")
    passed=$((passed + good))
    failed=$((failed + bad))
    echo "$([ "$bad" -eq 0 ] && echo ok || echo FAILED) $name, with $(cd "$work/$name" && find llmtrain -type f | sed 's|.*/||' | sort | tr '\n' ' ')"
    [ "$bad" -eq 0 ] || grep -v '^passed' "$work/$name/result" | head -n 20
done

# Attention must not depend on the runtime.
lines=$(find "$work/ATTENTION/llmtrain" -type f -exec cat {} + | wc -l)
own=$(wc -l < llmtrain/ops/attention.cuh)
if [ $((lines - own)) -le 300 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
echo "the headers that attention.cuh needs have $((lines - own)) lines, at most 300"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
