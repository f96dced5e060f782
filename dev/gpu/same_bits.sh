# same_bits.sh OLD NEW: whether two versions of the program compute the same bits. OLD and NEW are build folders that
# hold train-FP32, train-BF16, corpus, tokenize and weights_hash. Trains twelve small models with each (both families,
# FP32 and BF16, 1 and 3 ranks, ZeRO 0 to 2, three ways of reduction, dropout, accumulation) and compares the weights
# after 6 and 12 steps, and each step's losses and gradient norms.
set -u
old=$(cd "$1" && pwd) && new=$(cd "$2" && pwd) || exit 2
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 2
same=0
different=0
"$old/corpus" --out c --bytes 200000 --val-bytes 20000 > /dev/null
for part in "train 0" "val 1"; do
    "$old/tokenize" --bytes "c_${part% *}.txt" --out c --val "${part#* }" > /dev/null || exit 2
done

# compare NAME PRECISION FLAG...: one run with each.
compare() {
    name=$1 precision=$2
    shift 2
    for side in old new; do
        build=$old
        [ $side = old ] || build=$new
        "$build/train-$precision" --data 'c_train_*.bin' --val 'c_val_*.bin' --val-windows 4 --out "$name-$side" \
            --channels 48 --heads 4 --layers 3 --batch 2 --seq 32 --steps 12 --warmup 3 --seed 3 --ckpt-every 6 \
            --ckpt-async off "$@" > "$side.log" 2>&1 || tail -n 3 "$side.log"
        {
            "$old/weights_hash" "$name-$side/step_00000006" "$name-$side/step_00000012"
            sed 's/.*"loss": \([^,]*\),"val_loss": \([^,]*\),"grad_norm": \([^,]*\),.*/\1 \2 \3/' "$name-$side/metrics.jsonl"
        } > "$side.txt"
    done
    if [ -s old.txt ] && cmp -s old.txt new.txt; then
        same=$((same + 1))
        echo "same       $name $(head -n 2 new.txt | tr '\n' ' ')"
    else
        different=$((different + 1))
        echo "DIFFERENT  $name"
    fi
}

compare gpt2-fp32 FP32 --family gpt2
compare gpt2-dropout FP32 --family gpt2 --dropout 0.1 --total-batch 128
compare llama-fp32 FP32 --family llama --kv-heads 2 --tied off
compare llama-bf16 BF16 --family llama --kv-heads 2
compare gpt2-rounding BF16 --family gpt2 --masters off
compare gpt2-lion BF16 --family gpt2 --optimizer lion
compare llama-3-zero-0 FP32 --family llama --ranks 3 --zero 0
compare gpt2-3-zero-1 FP32 --family gpt2 --ranks 3 --zero 1 --total-batch 384
compare llama-3-zero-2 FP32 --family llama --ranks 3 --zero 2 --total-batch 384 --tied off
compare gpt2-3-zero-2-bf16 BF16 --family gpt2 --ranks 3 --zero 2
compare llama-3-zero-1-bf16 BF16 --family llama --ranks 3 --zero 1 --reduce storage
compare gpt2-3-zero-0-bf16 BF16 --family gpt2 --ranks 3 --zero 0 --reduce float
echo "$same same, $different different"
[ "$different" -eq 0 ]
