# plan.sh BUILD: do runs use what build/plan predicts? Ten runs: memory of a rank and time of a step, next to the plan.
# Leaves logs in BUILD/plan-runs. Fails if memory is off by more than 5% or time by more than 20%.
#
#   make build/train-FP32 build/train-BF16 build/plan-FP32 build/plan-BF16 build/corpus build/tokenize
#   sh dev/bench/plan.sh build
#
# A step's time is processor time, so that the machine may do other work meanwhile: (a run of 5 steps - a run of 1) / 4,
# divided by the number of processors, all of which threads and ranks use here. The last column is the median wall time
# of a step, which is the same on a machine without other work.
set -eu
build=$1
out=$build/plan-runs
rm -rf "$out"
mkdir -p "$out"
OMP_WAIT_POLICY=passive  # threads that wait take no processor time
export OMP_WAIT_POLICY
"$build/corpus" --out "$out/stories" --bytes 2000000 --val-bytes 20000 > "$out/log"
"$build/tokenize" --bytes "$out/stories_train.txt" --out "$out/stories" --val 0 >> "$out/log"
for shard in "$out"/stories_train_*.bin; do  # clears the vocabulary, so that any model accepts them
    printf '\0\0\0\0' | dd of="$shard" bs=1 seek=12 conv=notrunc 2>> "$out/log"
done
bad=0
number=0
printf '%-5s %-92s %8s %7s %7s %9s %9s %7s %9s\n' type flags 'GB plan' run '' 'ms plan' run '' clock

# Seconds of user processor time of this shell's children, without system time, which comes from the one checkpoint and
# from first touches of memory.
children() {
    times > "$out/times"  # not in a pipe, which would be another shell
    tail -n 1 "$out/times" | tr 'ms' '  ' | awk '{ print 60 * $1 + $2 }'
}

# run TYPE STEPS FLAG...: leaves the log of a run.
run() {
    type=$1
    steps=$2
    shift 2
    rm -rf "$run"
    "$build/train-$type" --data "$out/stories_train_*.bin" --out "$run" --steps "$steps" --lr 1e-4 "$@" > "$run.log" 2>&1
}

# compare TYPE FLAG...
compare() {
    type=$1
    shift
    number=$((number + 1))
    run=$out/run-$number
    "$build/plan-$type" --data "$out/stories_train_*.bin" "$@" > "$run.plan"
    children > "$run.times"
    run "$type" 1 "$@"
    children >> "$run.times"
    run "$type" 5 "$@"
    children >> "$run.times"
    planned=$(sed -n 's/^  a step with these flags: \([0-9.]*\) GB, \([0-9.]*\) ms.*/\1 \2/p' "$run.plan")
    clock=$(sed -n 's/.*"ms": \([0-9.e+]*\),.*/\1/p' "$run/metrics.jsonl" | tail -n +2 | sort -g | sed -n 2p)
    bytes=$(tail -n 1 "$run/metrics.jsonl" | sed 's/.*"mem_bytes": \([0-9]*\).*/\1/')
    echo "$planned $bytes $clock $(tr '\n' ' ' < "$run.times") $(getconf _NPROCESSORS_ONLN)" |
        awk -v type="$type" -v flags="$*" '{
        gb = $3 / 1e9; ms = 1e3 * (($7 - $6) - ($6 - $5)) / 4 / $8; memory = gb / $1 - 1; time = ms / $2 - 1
        printf "%-5s %-92s %8.3f %7.3f %+6.1f%% %9.1f %9.1f %+6.1f%% %9.1f\n", type, flags, $1, gb, 100 * memory, $2, ms,
            100 * time, $4
        exit memory > 0.05 || memory < -0.05 || time > 0.2 || time < -0.2 }' || bad=$((bad + 1))
    rm -rf "$run"
}

GPT2="--model gpt2:124M --seq 256"
# shellcheck disable=SC2086  # several words
{
    compare FP32 --model llama:15M --batch 8 --seq 256
    compare BF16 --model llama:42M --batch 2 --seq 512 --recompute block
    compare FP32 --model llama:15M --batch 4 --seq 256 --ranks 2 --zero 1
    compare FP32 --model llama:15M --batch 2 --seq 256 --total-batch 2048 --ranks 2 --zero 2 --recompute norms
    compare FP32 --model gpt2:d6 --batch 1 --seq 1024
    compare BF16 --model gpt2:d6 --batch 8 --seq 128 --masters off
    compare FP32 --model gpt2:d6 --batch 4 --seq 256 --optimizer adamw-8bit --recompute attention
    compare FP32 $GPT2 --batch 4
    compare FP32 $GPT2 --batch 4 --recompute block
    compare BF16 $GPT2 --batch 1 --total-batch 1024 --recompute gelu
}
echo "$number runs, $bad off by more than 5% of memory or 20% of time"
[ "$bad" -eq 0 ]
