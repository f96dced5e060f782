# precisions.sh BUILD: does the type of storage change what a model learns? The demo's model, half as long, on the demo's
# corpus: BF16 and FP16, three seeds each, and one run of FP32 and of BF16 without float masters (stochastic rounding).
#
# Seeds differ in initial weights and in the order of the data; how far their losses lie apart is the noise. Fails if the
# means of FP16 and BF16 differ by more than four standard errors of that difference, or if any of the four differs from
# BF16's mean by more than 1%.
set -eu
build=$1
out=$build/precisions
rm -rf "$out"
mkdir -p "$out"
OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export OMP_WAIT_POLICY
"$build/corpus" --out "$out/stories" --bytes 4000000 --val-bytes 150000 > "$out/log"
"$build/tokenize" --bytes "$out/stories_train.txt" --out "$out/stories" --val 0 >> "$out/log"
"$build/tokenize" --bytes "$out/stories_val.txt" --out "$out/stories" --val 1 >> "$out/log"

# train BUILD SEED NAME FLAG...: prints a line, and leaves the loss in the file NAME.
train() {
    type=$1
    seed=$2
    name=$3
    shift 3
    "$build/train-$type" --data "$out/stories_train_*.bin" --val "$out/stories_val_*.bin" --out "$out/$name-$seed" --seed "$seed" \
        --family llama --layers 4 --heads 4 --channels 144 --ffn 384 --batch 4 --seq 256 --steps 1500 --lr 4e-3 --warmup 100 \
        --schedule linear --lr-final 0.01 --val-overlap 128 --log-every 100 "$@" >> "$out/log" 2>&1
    loss=$(tail -n 1 "$out/$name-$seed/metrics.jsonl" | sed 's/.*"val_loss": \([0-9.]*\).*/\1/')
    skipped=$(tail -n 1 "$out/$name-$seed/metrics.jsonl" | sed 's/.*"skipped": \([0-9]*\).*/\1/')
    echo "$name, seed $seed: validation loss $loss, $skipped steps skipped"
    echo "$loss" >> "$out/$name"
}

for seed in 1 2 3; do
    train BF16 "$seed" bf16
    train FP16 "$seed" fp16
done
train FP32 1 fp32
train BF16 1 bf16-without-masters --masters off

paste "$out/bf16" "$out/fp16" | awk '
    { n++; b += $1; bb += $1 * $1; f += $2; ff += $2 * $2 }
    END {
        mb = b / n; mf = f / n
        error = sqrt(((bb - n * mb * mb) + (ff - n * mf * mf)) / (n - 1) / n)
        printf "bf16 %.5f, fp16 %.5f: the difference %+.5f is %.1f standard errors\n", mb, mf, mf - mb, (mf - mb) / error
        exit !(mf - mb <= 4 * error && mb - mf <= 4 * error)
    }'
cat "$out/bf16" "$out/fp16" "$out/fp32" "$out/bf16-without-masters" | awk '
    { loss[NR] = $1; if (NR <= 3) mean += $1 / 3 }
    END {
        for (i = 1; i <= NR; i++) { e = loss[i] / mean - 1; if (e < 0) e = -e; if (!(e <= worst)) worst = e }
        printf "the loss furthest from the mean of bf16 is off by %.2f%% <= 1%%\n", 100 * worst
        exit !(NR == 8 && worst <= 0.01)
    }'
