# gpu_build.sh: sourced by gpu_check.sh: which programs its runs need, and how they are built: on the GPU's machine, or
# here, to be carried there.
#
# It reads $arch, $work (the folder of the programs), $carry (not empty: to be carried), $budget (not empty: the short
# runs) and $scratch.
# shellcheck shell=sh disable=SC2154

nvcc=${NVCC:-nvcc}
command -v "$nvcc" > /dev/null || [ -n "${NVCC:-}" ] || nvcc=/usr/local/cuda/bin/nvcc
command -v "$nvcc" > /dev/null || nvcc=
cc=${CC:-cc}
python=${PYTHON:-python3}

programs_of() {
    case $1 in
        A) echo "test_cuda-BF16 train-cuda-BF16 test_emulator" ;;
        B) echo "ladders bench-cuda-BF16 train-cuda-BF16 tune test_cuda-BF16" ;;
        C) echo "ladders train-cuda-BF16" ;;
        D) [ -z "$budget" ] || { echo "test_cuda-FP16 test_cuda-FP32 test_cuda-BF16"; return; }
            for type in FP16 FP32 BF16; do
                echo "test_cuda-$type test_train-$type test_model-$type test_runs-$type train-cuda-$type train-$type"
            done
            echo "ladders ${nccl:+test_nccl} weights_hash corpus tokenize" ;;
    esac
}

# ------------------------------------------------------------------------------------------------
# Libraries

# Folders with include and lib or lib64: the toolkit's, those of wheels (nvidia/cu13, nvidia/nccl), the system's.
roots() {
    [ -z "$nvcc" ] || (cd "$(dirname "$(realpath "$(command -v "$nvcc")")")/.." && pwd)
    "$python" -c 'import sys; print("\n".join(path for path in sys.path if path))' 2> /dev/null |
        while read -r path; do for folder in "$path"/nvidia/*; do echo "$folder"; done; done
    echo /usr/local
}

# find_library NAME HEADER: the flags to compile and link with it, in $include and $link, and its folder in $folder;
# fails if it is not found. Wheels have no libNAME.so, only libNAME.so.13.
find_library() {
    include='' link='' folder=''
    for root in $(roots); do
        for lib in "$root/lib64" "$root/lib" "$root/targets/x86_64-linux/lib"; do
            for file in "$lib/lib$1.so" "$lib/lib$1.so".[0-9]*; do
                [ -z "$link" ] && [ -e "$file" ] && folder=$lib link="-L$lib -l:${file##*/} -Xlinker -rpath=$lib"
            done
        done
        [ -n "$include" ] || [ ! -e "$root/include/$2" ] || include="-I$root/include"
    done
    # nvcc finds what lies in its own and the system's folders.
    if [ -n "$nvcc" ] && echo "#include <$2>" | "$nvcc" -x cu -E - > /dev/null 2>&1; then include=' '; fi
    [ -n "$link" ] || link=$(ldconfig -p 2> /dev/null | sed -n "s/.*[[:space:]]lib$1\.so .*/-l$1/p" | head -n 1)
    [ -n "$include" ] && [ -n "$link" ]
}

# cuBLASLt in $blas_include and $blas; NCCL, which programs are built with if it is found, in $nccl; their folders, for
# programs that were linked elsewhere, in $library_path.
find_libraries() {
    nccl=''
    find_library cublasLt cublasLt.h
    blas_include=$include blas=${link:--lcublasLt} library_path=$folder
    find_library nccl nccl.h || return 0
    nccl="-DLLMTRAIN_NCCL $include $link" library_path=$library_path:$folder
}

# ------------------------------------------------------------------------------------------------
# Programs

# build_lines PROGRAM...: a line for each, NAME COMMAND, in $scratch/builds; $build_all, a shell command, runs them, as
# many at once as there are processors. Programs to be carried contain machine code for one GPU and, for the CPU, code
# for any x86 processor since 2013, with their libraries.
build_lines() {
    case $* in *ladders*) make -s CUDA=off MPI=off NCCL=off B="$work" "$work/ladders.cu" || return 1 ;; esac
    cuda="$nvcc -std=c++20 -O3 -gencode arch=compute_${arch#sm_},code=$arch -DLLMTRAIN_CUDA -I. $blas_include"
    cuda="$cuda -Xcompiler -fopenmp,-ffp-contract=off -Xlinker -s"
    cpu="$cc -std=c11 -O3 $([ -n "$carry" ] && echo "-march=x86-64-v3 -static -s" || echo -march=native)"
    cpu="$cpu -ffp-contract=off -fno-math-errno -fno-trapping-math -fopenmp -pthread -I."
    for program in "$@"; do
        type=-DPRECISION_${program##*-}
        case $program in
            test_cuda-*) line="$cuda $type dev/test/test_cuda.cu $blas" ;;
            bench-cuda-*) line="$cuda $type -x cu dev/bench/bench.c $blas $nccl" ;;
            train-cuda-*) line="$cuda $type train.cu $blas $nccl" ;;
            test_train-*) line="$cuda $type test_train.cu $blas $nccl" ;;
            test_model-* | test_runs-*) line="$cuda $type -x cu dev/test/${program%-*}.c $blas $nccl" ;;
            test_nccl) line="$cuda -DPRECISION_BF16 dev/emulator/test_nccl.cu $blas $nccl" ;;
            test_emulator) line="$cuda -DPRECISION_BF16 dev/emulator/test_emulator.cu $blas" ;;
            ladders) line="$cuda -DPRECISION_BF16 $work/ladders.cu $blas" ;;
            tune) line="$cuda -DPRECISION_BF16 tools/tune.cu $blas" ;;
            weights_hash) line="$cpu dev/test/weights_hash.c -lm -ldl" ;;
            train-*) line="$cpu $type -x c train.cu -x none -lm -ldl" ;;
            *) line="$cpu data/$program.c -lm -ldl" ;;
        esac
        echo "$program $line -o $work/$program"
    done > "$scratch/builds"
}
# Every line becomes the arguments of one shell.
# shellcheck disable=SC2016  # the inner shells expand it
BUILD_ONE='name=$1; shift; rm -f "$WORK/$name"; "$@" > "$WORK/$name.log" 2>&1 && exit 0
echo "$name does not compile: $*"; head -n 20 "$WORK/$name.log"; exit 1'
# shellcheck disable=SC2016
build_all='xargs -P "$(nproc)" -L 1 sh -c "$BUILD_ONE" build < '
export WORK="$work" BUILD_ONE

# A hash of what the programs are built from.
sources() {
    (LC_ALL=C && export LC_ALL && cat ./*.h ./*.cu ./*.cuh llmtrain/*/*.* llmtrain/*/*/* tools/* data/*.c dev/*.cu dev/*.h dev/*/*.c \
        dev/*/*.cu dev/*/*.h) | cksum | cut -d ' ' -f 1
}

# fresh PROGRAM: whether it exists for this architecture and is built from these sources.
fresh() { [ -x "$work/$1" ] && [ "$(cat "$work/built" 2> /dev/null)" = "$arch $source" ]; }

# stamp: records that programs built from now on are from these sources; removes those from others.
stamp() {
    [ "$(cat "$work/built" 2> /dev/null)" != "$arch $source" ] || return 0
    for of in A B C D; do for program in $(programs_of $of); do rm -f "$work/$program"; done; done
    echo "$arch $source" > "$work/built"
}

# starts PROGRAM: whether it starts: its libraries are found, and the processor knows its instructions. It is run with
# --help, which needs no GPU; tests without that flag are cut off.
starts() {
    (timeout -s KILL 2 "$work/$1" --help > "$scratch/starts.txt" 2>&1) 2> /dev/null
    case $? in 126 | 127 | 132) return 1 ;; esac
}

# carry_programs RUN...: builds what these runs need, to be carried along with the sources.
carry_programs() {
    scratch=$work source=$(sources) names='' missing=''
    mkdir -p "$work" || exit 1
    find_libraries
    for run in "$@"; do names="$names $(programs_of "$run")"; done
    names=$(echo "$names" | tr -s ' \n' '\n\n' | awk 'NF && !seen[$0]++')
    for program in $names; do fresh "$program" || missing="$missing $program"; done
    stamp
    # shellcheck disable=SC2086  # several words
    build_lines $missing || exit 1
    sh -c "$build_all $scratch/builds" || fail "some programs do not compile, so there is nothing to carry"
    rm -f "$work"/*.log "$work/builds" "$work/ladders.cu"
    bytes=$(cat "$work"/* | wc -c)
    tree=$(git ls-files -z 2> /dev/null | xargs -0 cat 2> /dev/null | wc -c)
    size=$(awk -v a="$bytes" -v b="$tree" 'BEGIN { printf "%.1f MiB, with the sources %.1f MiB", a / 2^20, (a + b) / 2^20 }')
    [ $((bytes + tree)) -le 67108864 ] || fail "$work has $size, which is over 64 MiB; carry fewer runs, as '$1 --carry $work'"
    echo "$work has $size; take both along, and there: sh dev/gpu/gpu_check.sh $* --build $work"
}
