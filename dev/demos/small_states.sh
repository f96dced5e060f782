# small_states.sh: do the flags with which build/plan fits llama:1B into 12 GB (8-bit states, no float master weights,
# recomputation) change what a model learns? A Llama of 15 million parameters in BF16 on the demo's corpus, three seeds
# with them and three with plain AdamW (fp32 states and master weights).
#
#   sh dev/demos/small_states.sh [BUILD]    builds what it needs in BUILD (build)
#
# The noise is the spread over seeds. Fails if the two means differ by more than twice the standard error of their
# difference, or by more than 1%.
set -eu
build=${1:-build}
out=$build/small-states
. dev/demos/stories.sh
build_programs train-BF16 corpus tokenize
stories_write "$out"

# train SEED NAME FLAG...: prints the validation losses during the run, and appends the last one to the file NAME.
train() {
    seed=$1
    name=$2
    shift 2
    "$build/train-BF16" --data "$out/stories_train_*.bin" --val "$out/stories_val_*.bin" --out "$out/$name-$seed" \
        --seed "$seed" --family llama --layers 6 --heads 7 --channels 448 --ffn 1216 --batch 4 --seq 128 --steps 250 --lr 1e-3 \
        --warmup 25 --schedule cosine --val-every 50 --val-windows 200 --log-every 50 --ckpt-every 0 "$@" >> "$out/log" 2>&1
    echo "$name, seed $seed, validation loss each 50 steps:" \
        $(sed -n 's/.*"val_loss": \([0-9.]*\).*/\1/p' "$out/$name-$seed/metrics.jsonl" | cut -c 1-6)
    last_loss "$out/$name-$seed" >> "$out/$name"
    rm -rf "$out/$name-$seed"
}

for seed in 1 2 3; do
    train "$seed" adamw
    train "$seed" small --optimizer adamw-8bit --masters off --recompute block
done
cat "$out/adamw" "$out/small" | awk '
    { loss[NR] = $1 }
    END {
        for (i = 1; i <= 3; i++) { a += loss[i] / 3; b += loss[i + 3] / 3 }
        for (i = 1; i <= 3; i++) squares += (loss[i] - a) ^ 2 + (loss[i + 3] - b) ^ 2
        error = sqrt(squares / 2 / 3)  # variances divided by 3 - 1, of means of 3
        printf "AdamW %.5f, small states %.5f: %+.5f (%+.2f%%), standard error of the difference %.5f\n",
               a, b, b - a, 100 * (b / a - 1), error
        distance = b > a ? b - a : a - b
        exit !(NR == 6 && error > 0 && distance <= 2 * error && distance <= 0.01 * a)
    }'
