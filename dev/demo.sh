# demo.sh BUILD: the main job from nothing. A corpus of known entropy, shards, a model trained on them, its text.
set -eu
build=$1
demo=$build/demo
rm -rf "$demo"
mkdir -p "$demo"

echo "== 1. writing a corpus whose entropy is known"
"$build/corpus" --out "$demo/stories" --bytes 8000000 --val-bytes 300000
floor=$(sed -n 's/.*"val".*"nats_per_byte": \([0-9.]*\),.*/\1/p' "$demo/stories.json")
"$build/tokenize" --bytes "$demo/stories_train.txt" --out "$demo/stories" --val 0
"$build/tokenize" --bytes "$demo/stories_val.txt" --out "$demo/stories" --val 1 --entropy "$floor"

echo "== 2. training on it; the loss is in nats per byte, and no model can go below the floor"
"$build/train-FP32" --data "$demo/stories_train_*.bin" --val "$demo/stories_val_*.bin" --out "$demo/run" \
    --family llama --layers 4 --heads 4 --channels 144 --ffn 384 --seq 256 --batch 8 --steps 1500 \
    --lr 4e-3 --warmup 50 --lr-final 0.02 --val-overlap 128 --log-every 50

echo "== 3. what it writes (./train --out $demo/run --prompt '...' for more)"
"$build/train-FP32" --out "$demo/run" --tokens 900 --temperature 0.9
