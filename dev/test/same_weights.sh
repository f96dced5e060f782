# same_weights.sh BUILD [record]: runs end with the bits that they had before, and checkpoints of b1bb42e resume.
#
# Trains tiny models for 12 steps. The hash of each last checkpoint (weights and optimizer state) must be in the table,
# a row per run: name, kernels of its matmuls, hash. "floats" are all kernels that convert operands to float, which give
# the same bits; a run without a row for this processor's bfloat16 kernels is skipped. With record: puts the hashes of
# this build into the table, for a change that is meant to change bits.
#
# fixtures/checkpoint_b1bb42e has the directories of two runs, as that commit wrote them before it was killed by
# LLMTRAIN_TEST_FAULT="rank 0 step 7 at backward do kill". Step 7 is the second skipped in succession: a resumed run
# must go back to step 3, for which it needs the state and kind of both checkpoints, and end as if never killed.
set -u
build=$1 record=${2:-}
table=dev/test/fixtures/weights_12_steps.txt
out=$(mktemp -d "${TMPDIR:-$build}/same_weights.XXXXXX") || exit 1
trap 'rm -rf "$out"' EXIT
passed=0 failed=0 skipped=0
export OMP_WAIT_POLICY=passive LC_ALL=C

verdict() {  # verdict STATUS WHAT
    if [ "$1" -eq 0 ]; then passed=$((passed + 1)); echo "ok     $2"; else failed=$((failed + 1)); echo "FAILED $2"; fi
}

# run NAME TYPE FLAG...: trains, and compares the hash with the table's.
run() {
    name=$1 type=$2
    shift 2
    "$build/train-$type" --data "$out/text_train_*.bin" --out "$out/$name" --steps 12 --warmup 2 --lr 1e-2 "$@" \
        > "$out/log" 2>&1 || cat "$out/log"
    hash=$("$build/weights_hash" "$out/$name/step_00000012")
    case $type in FP32) which=1 ;; *) which=2 ;; esac  # the log has "avx512 (float) / amx (bf16)"
    kernels=$(sed -n "s|.* \([a-z0-9]*\) (float) / \([a-z0-9]*\) (bf16),.*|\\$which|p" "$out/log" | head -n 1)
    case $kernels-$(uname -m) in avx2-* | avx512-* | portable-aarch64 | portable-arm64) kernels=floats ;; esac
    echo "$name $kernels $hash" >> "$out/rows"
    before=$(sed -n "s/^$name $kernels //p" "$table")
    [ -z "$record" ] || before=$hash
    if [ "$hash" ] && [ -z "$before" ] && [ "$kernels" != floats ]; then skipped=$((skipped + 1)); return; fi
    [ "$hash" ] && [ "$hash" = "$before" ]
    verdict $? "$name, $kernels: ${hash:-none}, before ${before:-none}"
}

# resume RUN TYPE FLAG...: the same from the fixture, whose log must go on.
resume() {
    fixture=dev/test/fixtures/checkpoint_b1bb42e/$1 resumed=$1-resumed
    cp -R "$fixture" "$out/$resumed"
    shift
    run "$resumed" "$@" --resume
    [ "$(head -n 3 "$out/$resumed/metrics.jsonl")" = "$(head -n 3 "$fixture/metrics.jsonl")" ]
    verdict $? "$resumed: continues a checkpoint of b1bb42e"
}

"$build/corpus" --out "$out/text" --bytes 20000 --val-bytes 1 > "$out/log" &&
    "$build/tokenize" --bytes "$out/text_train.txt" --out "$out/text" --val 0 > "$out/log" || exit 1

sizes="--channels 48 --context 40 --batch 2 --total-batch 480"
gpt2="--family gpt2 --layers 3 --heads 3 --dropout 0.1 --tied on $sizes"
llama="--family llama --layers 2 --heads 6 --kv-heads 2 --ffn 104 --qk-norm on --tied off $sizes"
sharded="--ranks 3 --zero 2"
rewinds="--layers 1 --heads 2 --channels 8 --seq 8 --batch 1 --ckpt-every 3 --ckpt-async off --clip 1000 --spike-sigma 0
    --spike-skip 1.05 --spike-warmup 2 --diverged-after 2 --rewind 9"
muon="--family llama --kv-heads 1 --ffn 16 --optimizer muon --total-batch 48 --seed 22"
# shellcheck disable=SC2086  # several words
{
    # That other numbers of ranks and stages have the same bits is what pairs.c shows.
    for type in FP32 BF16; do
        run gpt2-$type-ranks-3-zero-2 $type $gpt2 $sharded
        run llama-$type-ranks-3-zero-2 $type $llama $sharded
    done
    for optimizer in sgd momentum lion adamw-8bit adamw-bf16 adafactor came adam-mini sm3 muon galore ldadam; do
        run llama-$optimizer BF16 $llama $sharded --optimizer $optimizer --optimizer-rank 8
    done
    run gpt2-stochastic-rounding BF16 $gpt2 $sharded --masters off
    run gpt2-mask BF16 $gpt2 $sharded --documents mask --end-of-text 10
    run gpt2-reduce-storage BF16 $gpt2 $sharded --reduce storage
    run llama-frozen BF16 $llama $sharded --train 'block.*'
    run llama-relatives BF16 $llama $sharded --seq 20 --qkv-bias on --head-size 10 \
        --rope-scaling llama3 --rope-factor 4 --rope-original 20
    run adamw FP32 $rewinds --seed 113
    run muon BF16 $rewinds $muon --ranks 2 --zero 2
    resume adamw FP32 $rewinds --seed 113
    resume muon BF16 $rewinds $muon --ranks 3 --zero 1
}
[ "$skipped" -eq 0 ] || echo "skipped $skipped runs: the table has no hashes for matmuls by $kernels"
[ -z "$record" ] || [ "$failed" -gt 0 ] ||
    { sort -s -u -k1,2 "$out/rows" "$table" > "$out/new" && cp "$out/new" "$table"; }
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
