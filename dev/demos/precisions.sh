# precisions.sh: does the storage dtype change what a model learns? The demo's model, half as long, on its corpus: BF16
# and FP16, three seeds each, and one run of FP32 and of BF16 without fp32 master weights (stochastic rounding).
#
#   sh dev/demos/precisions.sh [BUILD]      builds what it needs in BUILD (build)
#
# Seeds differ in initial weights and in the order of the data. The noise of a loss is the sampling error of the
# validation text: another text of that length would shift it by about as much. Fails if the means of FP16 and BF16
# differ by more than that, or any of the eight losses from the mean of BF16 by more than 1%.
set -eu
build=${1:-build}
out=$build/precisions
. dev/demos/stories.sh
build_programs train-FP32 train-BF16 train-FP16 corpus tokenize
stories_write "$out"

# train BUILD SEED NAME FLAG...: prints a line, and leaves the loss in the file NAME.
train() {
    type=$1
    seed=$2
    name=$3
    shift 3
    "$build/train-$type" --data "$out/stories_train_*.bin" --val "$out/stories_val_*.bin" --out "$out/$name-$seed" --seed "$seed" \
        --family llama --layers 4 --heads 4 --channels 144 --ffn 384 --batch 4 --seq 256 --steps 1500 --lr 4e-3 --warmup 100 \
        --schedule linear --lr-final 0.01 --val-overlap 128 --log-every 100 "$@" >> "$out/log" 2>&1
    loss=$(last_loss "$out/$name-$seed")
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

noise=$(sed -n 's/.*"val".*"stderr_nats_per_byte": \([0-9.e-]*\)}.*/\1/p' "$out/stories.json")
cat "$out/bf16" "$out/fp16" "$out/fp32" "$out/bf16-without-masters" | awk -v noise="$noise" '
    { loss[NR] = $1; if (NR <= 3) bf16 += $1 / 3; else if (NR <= 6) fp16 += $1 / 3 }
    END {
        for (i = 1; i <= NR; i++) { e = loss[i] - bf16; if (e < 0) e = -e; if (!(e <= worst)) worst = e }
        printf "bf16 %.5f, fp16 %+.5f more; sampling error of the text %.5f; furthest from bf16 %.2f%%\n", bf16, fp16 - bf16, noise, 100 * worst / bf16
        exit !(NR == 8 && noise > 0 && worst <= 0.01 * bf16 && fp16 - bf16 <= noise && bf16 - fp16 <= noise)
    }'
