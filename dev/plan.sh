# plan.sh BUILD: is what --plan predicts what a run takes? Ten runs: memory of a rank, and time of a step, beside the plan.
# Leaves logs in BUILD/plan.
#
#   make build/train-FP32 build/train-BF16 build/corpus build/tokenize && sh dev/plan.sh build
#
# The time of a run is the median of its steps after the first, that of the plan the mean of two, made before and after the
# run, since --plan measures the machine's rates itself. Fails if memory is off by more than 5% or time by more than 20%; on
# a machine that others use at the same time, time says little.
set -eu
build=$1
out=$build/plan
rm -rf "$out"
mkdir -p "$out"
OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export OMP_WAIT_POLICY
"$build/corpus" --out "$out/stories" --bytes 2000000 --val-bytes 20000 > "$out/log"
"$build/tokenize" --bytes "$out/stories_train.txt" --out "$out/stories" --val 0 >> "$out/log"
bad=0
number=0
printf '%-9s %-88s %8s %8s %7s %9s %9s %7s\n' program flags 'GB plan' run '' 'ms plan' run ''

# compare TYPE FLAG...
compare() {
    type=$1
    shift
    number=$((number + 1))
    run=$out/run-$number
    "$build/train-$type" --data "$out/stories_train_*.bin" --plan --memory 1000 "$@" > "$run.plan"
    "$build/train-$type" --data "$out/stories_train_*.bin" --out "$run" --steps 8 --lr 1e-4 "$@" > "$run.log" 2>&1
    "$build/train-$type" --data "$out/stories_train_*.bin" --plan --memory 1000 "$@" >> "$run.plan"
    planned=$(sed -n 's/^  a step of these flags: \([0-9.]*\) GB, \([0-9.]*\) ms.*/\1 \2/p' "$run.plan" |
        awk '{ gb = $1; ms += $2 / 2 } END { print gb, ms }')
    ms=$(sed -n 's/.*"ms": \([0-9.e+]*\),.*/\1/p' "$run/metrics.jsonl" | tail -n +2 | sort -g | sed -n 4p)
    bytes=$(tail -n 1 "$run/metrics.jsonl" | sed 's/.*"mem_bytes": \([0-9]*\).*/\1/')
    echo "$planned $bytes $ms" | awk -v type="$type" -v flags="$*" '{
        memory = $3 / 1e9 / $1 - 1; time = $4 / $2 - 1
        printf "%-9s %-88s %8.3f %8.3f %+6.1f%% %9.1f %9.1f %+6.1f%%\n", type, flags, $1, $3 / 1e9, 100 * memory, $2, $4, 100 * time
        exit memory > 0.05 || memory < -0.05 || time > 0.2 || time < -0.2 }' || bad=$((bad + 1))
    rm -rf "$run"
}

GPT2="--model gpt2:124M --seq 256"
# shellcheck disable=SC2086  # several words
{
    compare FP32 $GPT2 --batch 4
    compare FP32 $GPT2 --batch 4 --recompute block
    compare FP32 $GPT2 --batch 1 --total-batch 1024 --recompute gelu
    compare BF16 $GPT2 --batch 4 --recompute attention
    compare FP32 --model gpt2:d6 --batch 2 --seq 1024
    compare BF16 --model gpt2:d6 --batch 8 --seq 128 --masters off
    compare FP32 --model llama:15M --batch 8 --seq 256
    compare BF16 --model llama:42M --batch 2 --seq 512 --recompute block
    compare FP32 --model llama:15M --batch 4 --seq 256 --ranks 2 --zero 1
    compare FP32 --model llama:15M --batch 2 --seq 256 --total-batch 2048 --ranks 2 --zero 2 --recompute norms
}
echo "$number runs, $bad off by more than 5% of memory or 20% of time"
[ "$bad" -eq 0 ]
