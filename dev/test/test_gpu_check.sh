# test_gpu_check.sh BUILD: dev/gpu/gpu_check.sh without a GPU, with fakes of the compiler, the programs and the libraries.
# Shows that the limits fit, that libraries are found in wheels, that programs can be carried, and that a run continues
# after a part that hangs and after it was itself cut off.
set -u
build=$1
passed=0
failed=0
T=$build/gpu_check.test
rm -rf "$T"
mkdir -p "$T/bin" "$T/site/nvidia/cu13/include" "$T/site/nvidia/cu13/lib" "$T/site/nvidia/nccl/include" "$T/site/nvidia/nccl/lib"
T=$(cd "$T" && pwd)

verdict() {  # verdict STATUS WHAT
    if [ "$1" -eq 0 ]; then passed=$((passed + 1)); echo "ok      $2"; return; fi
    failed=$((failed + 1))
    echo "FAILED  $2"
    tail -n 25 "$T/log" | sed 's/^/        /'
}
has() { grep -qF -e "$1" "$2"; }

# Libraries as in wheels: without libNAME.so.
touch "$T/site/nvidia/cu13/include/cublasLt.h" "$T/site/nvidia/cu13/lib/libcublasLt.so.13" \
    "$T/site/nvidia/nccl/include/nccl.h" "$T/site/nvidia/nccl/lib/libnccl.so.2"

# A program: records that it runs, and does what $FAKE says for it: NAME=hang, NAME=stubborn (hangs, and survives
# SIGTERM), NAME=broken (does not start).
cat > "$T/program" << 'EOT'
#!/bin/sh
name=${0##*/}
case ",${FAKE:-}," in *,$name=broken,*) exit 127 ;; esac
[ "${1:-}" = --help ] && exit 0
case "$*" in *--plan*) echo "total 5000"; exit 0 ;; esac
echo "$name ${CUDA_LAUNCH_BLOCKING:-} $LD_LIBRARY_PATH" >> "$FAKES/runs"
case ",${FAKE:-}," in
    *,$name=stubborn,*) trap '' TERM; echo "begun"; sleep 100; sleep 100 ;;
    *,$name=hang,*) echo "begun"; sleep 100 ;;
esac
echo "MFU against 989.4 TFLOP/s"
EOT
# Both compilers: they record their flags and write a program.
cat > "$T/bin/nvcc" << 'EOT'
#!/bin/sh
echo "$*" >> "$FAKES/compiled"
case "$*" in *" -E "*) exit 1 ;; esac
while [ $# -gt 1 ]; do [ "$1" != -o ] || { cp "$FAKES/program" "$2"; chmod +x "$2"; [ -z "${FAKE_SIZE:-}" ] || truncate -s "$FAKE_SIZE" "$2"; }; shift; done
EOT
cat > "$T/bin/nvidia-smi" << 'EOT'
#!/bin/sh
case ",${FAKE:-}," in *,nvidia-smi=hang,*) sleep 100 ;; esac
echo "${FAKE_GPU:-NVIDIA H100 80GB HBM3}, 81559, 9.0"
EOT
# It has no PyTorch.
printf '#!/bin/sh\n[ "$1" = -c ] && echo "$FAKES/site" && exit\necho "there is no PyTorch here"; exit 77\n' > "$T/bin/python"
# Two kernels, one of them in two launches.
cat > "$T/bin/ncu" << 'EOT'
#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
cat > "$2" << 'END'
==PROF== Connected to process 7
"ID","Process ID","Process Name","Kernel Name","Block Size","dram__bytes.sum","gpu__time_duration.sum"
"","","","","","byte","ns"
"0","7","bench","norm_kernel<8>(float *, int)","(256, 1, 1)","1,000,000","2,000"
"1","7","bench","gemm","(128, 1, 1)","3,000,000","4,000"
"2","7","bench","norm_kernel<8>(float *, int)","(256, 1, 1)","1,000,000","3,000"
END
EOT
printf '#!/bin/sh\nfor word; do case $word in */test_cuda-BF16 | */ladders) exec "$word" ;; esac; done\n' \
    > "$T/bin/compute-sanitizer"
cp "$T/bin/nvcc" "$T/bin/cc"
chmod +x "$T/bin"/*
export FAKES="$T" FAKE='' PYTHON="$T/bin/python" CC="$T/bin/cc"

# check FLAG...: the script with all fakes; without_nvcc and without_gpu lack one. $T/log has what it prints.
check() { NVCC=${NVCC_FAKE-$T/bin/nvcc} PATH="$T/bin:$PATH" sh dev/gpu/gpu_check.sh --out "$T/out" --build "$T/gpu" "$@" > "$T/log" 2>&1; }
report=$T/out/gpu_check_A.txt
# ended WORDS: the last line of the report.
ended() { tail -n 1 "$report" | grep -q "^end: $1"; }
runs_of() { grep -c "^$1 " "$T/runs"; }

# The limits of each run fit into its time.
sh dev/gpu/gpu_check.sh --dry-run > "$T/log" && [ "$(grep -c '^# run [A-D]: the limits add up to [0-9]* s of [0-9]* s$' "$T/log")" -eq 4 ]
verdict $? "--dry-run: the limits of four runs fit: $(sed -n 's/^# run \(.\): the limits add up to/\1/p' "$T/log" | tr '\n' ',')"
sh dev/gpu/gpu_check.sh --dry-run --budget 15m > "$T/log" &&
    awk '/^# run [A-D]: the limits add up to/ { runs++; sum += $8; all += $11; if (runs == 2) two = all }
         END { exit !(runs == 4 && sum <= all && all <= 770 && two <= 430 && all - two <= 350) }' "$T/log"
verdict $? "--dry-run --budget 15m: four short runs and the start of the machine fit into 15 minutes, two into 10"
! sh dev/gpu/gpu_check.sh --dry-run --budget 12m > "$T/log"
verdict $? "--dry-run --budget 12m: they do not fit"
! sh dev/gpu/gpu_check.sh A --dry-run --minutes 2 > "$T/log"
verdict $? "--dry-run fails where they do not"
for flags in "E" "--minutes 0" "--limit x" "--budget 15x" "--out" "--carry $T/x"; do
    # shellcheck disable=SC2086
    ! sh dev/gpu/gpu_check.sh $flags > "$T/log" 2>&1 && has "gpu_check.sh: " "$T/log"
    verdict $? "refused: '$flags'"
done

# No compiler.
NVCC=/nonexistent sh dev/gpu/gpu_check.sh A --out "$T/out" --build "$T/none" > "$T/log" 2>&1 && has "neither a GPU nor nvcc" "$report"
verdict $? "neither a GPU nor nvcc: says so, and is no failure"
! NVCC_FAKE=/nonexistent check A && has "FAILED  builds: there is no nvcc" "$report" && ended "2 good, 1 failed, 6 skipped" &&
    has "skipped test_cuda BF16: there is no test_cuda-BF16" "$report"
verdict $? "a GPU and no nvcc: a failure that names what to do, and the report is whole"

# A good run; the libraries are only in wheels.
rm -rf "$T/out" "$T/gpu"
check A && ended "9 good, 0 failed, 0 skipped"
verdict $? "run A with programs that are built on the spot"
lib="-I$T/site/nvidia/cu13/include .* -L$T/site/nvidia/cu13/lib -l:libcublasLt.so.13 -Xlinker -rpath=$T/site/nvidia/cu13/lib"
grep 'train.cu' "$T/compiled" | grep -e "$lib" | grep -qe "-DLLMTRAIN_NCCL -I$T/site/nvidia/nccl/include .* -l:libnccl.so.2"
verdict $? "cuBLASLt and NCCL are found in wheels"
has "test_cuda-BF16 1 $T/site/nvidia/cu13/lib:$T/site/nvidia/nccl/lib" "$T/runs" && has "train-cuda-BF16 1 " "$T/runs"
verdict $? "programs run with these folders, and synchronized in the smoke runs"
has "code=sm_90a" "$T/compiled" && has "-ffp-contract=off -Xlinker" "$T/compiled" && has "--peak-tflops 989.4" "$report" && has "H100" "$report"
verdict $? "the GPU is asked for its architecture, the trainer for its peak"

# The other runs.
check B && has "0.005 ms      2 calls     0.002 GB    400.0 GB/s  norm_kernel<8>" "$T/out/gpu_check_B.txt" &&
    tail -n 1 "$T/out/gpu_check_B.txt" | grep -q "^end: 21 good, 0 failed, 0 skipped" && has "--matmul-algorithms $T/out/124M.json" "$T/out/gpu_check_B.txt"
verdict $? "run B: operations, cuBLASLt's algorithms, kernels by ncu added up by name, ladders, sizes of models"
check C && has "skipped PyTorch: there is no PyTorch here" "$T/out/gpu_check_C.txt" &&
    has "GPT-2 124M: run A's report has the number" "$T/out/gpu_check_C.txt" && has "skipped llm.c" "$T/out/gpu_check_C.txt" &&
    tail -n 1 "$T/out/gpu_check_C.txt" | grep -q "^end: 6 good, 0 failed, 2 skipped"
verdict $? "run C, without PyTorch and llm.c"
mkdir -p "$T/peer" && cp "$T/program" "$T/peer/train_gpt2cu" && chmod +x "$T/peer/train_gpt2cu"
PEER="$T/peer" check C --budget 15m && has "ok      llm.c, GPT-2 124M, batch 64" "$T/out/gpu_check_C.txt" &&
    [ "$(runs_of train_gpt2cu)" -eq 1 ]
verdict $? "run C with llm.c, which is carried"
! FAKE=corpus=broken check D && tail -n 1 "$T/out/gpu_check_D.txt" | grep -q "^end: 24 good, 1 failed, 0 skipped" &&
    has "FAILED  the trainer's CUDA build against its CPU build: status 1" "$T/out/gpu_check_D.txt"
verdict $? "run D, in which one part fails"

# A part that hangs is cut off, and the parts after it run.
rm -rf "$T/out" && rm -f "$T/runs"
! FAKE=nvidia-smi=hang,test_cuda-BF16=stubborn check A --limit 3 && has "the GPU or its driver hangs" "$report" &&
    has "FAILED  test_cuda BF16: over its limit of 3 s" "$report" && has "    begun" "$report" &&
    has "ok      train GPT-2 124M, batch 64" "$report" && ended "5 good, 2 failed"
verdict $? "nvidia-smi and a program that hang: both are cut off, the report says so, the rest runs"

# A run that is cut off: killed without warning, then by a signal, then continued, then on another GPU.
rm -rf "$T/out" && rm -f "$T/runs"
cut() {  # cut SIGNAL TIMES: kills run A, whose PTX tests hang, when it has reached them TIMES times
    FAKE=test_emulator=hang check A &
    tries=0
    until [ "$(runs_of test_emulator 2> /dev/null)" = "$2" ] || [ $tries -eq 300 ]; do sleep 0.1; tries=$((tries + 1)); done
    pids=$(ps -eo pid=,args= | awk -v of="--out $T/out" 'index($0, of) && !/awk/ { print $1 }')
    # shellcheck disable=SC2086
    kill -"$1" $pids
    wait
}
cut KILL 1
kill -KILL "-$(cat "$T/gpu/run_A/pid")"
tail -n 1 "$report" | grep -q '^== PTX, .*, [0-9:]*, at most [0-9]* s: ' && [ "$(runs_of test_cuda-BF16)" -eq 1 ]
verdict $? "killed: the report is whole up to the part that ran, and names it"
cut TERM 2
tail -n 1 "$report" | grep -q '^-- cut off by a signal in: PTX' && has "    begun" "$report" && [ "$(runs_of test_cuda-BF16)" -eq 1 ]
verdict $? "ended by a signal: the report says where, with what the part had printed; what was done is not done again"
check A && ended "8 good, 0 failed, 0 skipped" && [ "$(grep -c '^-- continued' "$report")" -eq 2 ] && [ ! -e "$T/out/gpu_check_A.1.txt" ]
verdict $? "continued to its end, each part once"
FAKE_GPU="NVIDIA H200" check A && ended "8 good" && ! has H100 "$report" && has H100 "$T/out/gpu_check_A.1.txt"
verdict $? "another GPU: a report of its own, beside the old one"

# Programs that are built here and run there.
rm -rf "$T/out" "$T/carried" && rm -f "$T/compiled"
check A D --carry "$T/carried" --arch sm_90a && has "carried has " "$T/log" && has "sh dev/gpu/gpu_check.sh A D --build" "$T/log" &&
    has "-march=x86-64-v3 -static" "$T/compiled" && ! grep -e '-march=native' "$T/compiled" | grep -q -- "-o $T/carried"
verdict $? "--carry builds the programs, says how large they are, and those of the CPU run on any"
NVCC_FAKE=/nonexistent check A --build "$T/carried" && ended "8 good, 0 failed" && has "all in $T/carried start" "$report"
verdict $? "carried programs run where there is no compiler"
rm -rf "$T/out" && rm -f "$T/compiled"
! FAKE=test_emulator=broken NVCC_FAKE=/nonexistent check A --build "$T/carried" && has "FAILED  builds" "$report" &&
    has "skipped PTX" "$report" && has "ok      test_cuda BF16" "$report"
verdict $? "one of them does not start: it is named, and the others run"
rm -rf "$T/out"
FAKE=test_emulator=broken check A --build "$T/carried"
[ "$(grep -c -- ' -o ' "$T/compiled")" -eq 1 ] && has "-o $T/carried/test_emulator" "$T/compiled"
verdict $? "with a compiler there, that one is built again, and no other"
! FAKE_SIZE=30000000 check A --carry "$T/large" --arch sm_90a && has "over 64 MiB" "$T/log"
verdict $? "programs that are too large to carry are refused"

[ -n "${KEEP:-}" ] || rm -rf "$T"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
