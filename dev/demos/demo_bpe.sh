# demo_bpe.sh: the demo's corpus and settings with byte-pair tokens instead of bytes: loss per byte of both, and the
# entropy floor. Runs the demo first, if BUILD/demo is not there. Takes about twice the demo's time.
#
#   sh dev/demos/demo_bpe.sh [BUILD]        builds what it needs in BUILD (build)
set -eu
build=${1:-build}
. dev/demos/stories.sh
build_programs train-FP32 generate-FP32 corpus tokenize
demo=$build/demo
out=$build/demo-bpe
vocabulary=1024
[ -s "$demo/run/metrics.jsonl" ] || sh dev/demos/demo.sh "$build"
rm -rf "$out"
mkdir -p "$out"

echo "== 1. training a tokenizer of $vocabulary tokens on the demo's corpus"
floor=$(sed -n 's/.*"val".*"nats_per_byte": \([0-9.]*\),.*/\1/p' "$demo/stories.json")
"$build/tokenize" --train-bpe $vocabulary --text "$demo/stories_train.txt" --out "$out/tokenizer"
"$build/tokenize" --tokenizer "$out/tokenizer" --text "$demo/stories_train.txt" --out "$out/stories" --val 0
"$build/tokenize" --tokenizer "$out/tokenizer" --text "$demo/stories_val.txt" --out "$out/stories" --val 1 \
    --entropy "$floor" | tee "$out/val.txt"

echo "== 2. training a model with the demo's settings; the loss is in nats per token"
"$build/train-FP32" --data "$out/stories_train_*.bin" --val "$out/stories_val_*.bin" --out "$out/run" \
    --family llama --layers 4 --seq 256 --schedule linear --warmup 100 --lr-final 0.01 --val-overlap 128 \
    --channels 144 --heads 4 --ffn 384 --batch 4 --steps 3000 --lr 4e-3 --val-every 1000 --log-every 100

# The model scores all tokens but the first, and the end of text, which has no bytes.
tokens=$(sed -n 's/.*_val_.*: \([0-9]*\) tokens.*/\1/p' "$out/val.txt")
bytes=$(wc -c < "$demo/stories_val.txt")
awk "BEGIN {
    bpe = $(last_loss "$out/run") * $tokens / $bytes; byte = $(last_loss "$demo/run"); floor = $floor
    printf \"== nats per byte: %.4f with $vocabulary tokens (floor +%.1f%%), %.4f with bytes (floor +%.1f%%), \" \
           \"floor %.4f; %.2f bytes per token\n\", bpe, 100 * (bpe / floor - 1), byte, 100 * (byte / floor - 1), floor,
           $bytes / $tokens
    exit !(bpe >= floor - 20 / $bytes && bpe <= 1.10 * floor) }" || {
    echo "demo_bpe: the loss per byte should be between the floor and 1.1 times the floor" >&2
    exit 1
}

echo "== 3. what it writes"
"$build/generate-FP32" --out "$out/run" --tokens 250 --temperature 0.9
