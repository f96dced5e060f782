# test_backends.sh BUILD [PROGRAM]: the trainer's CUDA build against the CPU build. PROGRAM is train-emulated, which the
# emulator runs on the CPU (then also in all its modes), or train-cuda on a GPU. TYPES="FP32 BF16": only these types.
#
# A tiny model of each family, ten steps with accumulation, in each storage dtype:
#   - the losses of every step equal the CPU's within the rounding of the storage dtype (float: 1e-5)
#   - the same bits in every thread order, with asynchronous copies late or early, and with streams that run as late as
#     their events allow
#   - 5 steps + resume + 5 steps end with the bits of 10 steps
#   - a checkpoint of either build continues in the other, with the losses that it would have had
#   - FP32: packed conversations, on one rank and on two; pairs of LoRA, also beside 4 bits; preferences
#   - FP16: a loss scale that overflows skips steps as on the CPU
#   - two ranks (on one GPU, where its NCCL allows that): all stages of ZeRO end with the same bits, in all modes of the
#     streams, with losses as on the CPU; gradients reduced in the storage dtype; a resume in another stage
#   - pipelines of several stages, and ranks that share rows, also more than key and value heads, end with the bits of
#     one rank, in all modes of the streams
set -u
build=$1
gpu=${2:-train-emulated}
types=${TYPES:-FP32 BF16 FP16}
out=$build/backends
passed=0
failed=0
rm -rf "$out"
mkdir -p "$out"
export OMP_WAIT_POLICY=passive

verdict() {  # verdict STATUS WHAT
    if [ "$1" -eq 0 ]; then passed=$((passed + 1)); echo "ok     $2"; else failed=$((failed + 1)); echo "FAILED $2"; fi
}

# use TYPE FAMILY: for the runs that follow.
use() {
    type=$1 family=$2 name=$1-$2
    case $type in FP32) bound=1e-5 ;; BF16) bound=3.9e-3 ;; FP16) bound=4.9e-4 ;; esac
    case $family in gpt2) heads=2 ;; *) heads=4 ;; esac
}

# with TYPE: whether that is one of the types.
with() { case " $types " in *" $1 "*) ;; *) return 1 ;; esac; }

# run PROGRAM DIRECTORY STEPS FLAG...: a run in a new directory, or in an existing one with --resume.
run() {
    program=$build/$1-$type
    directory=$out/$2
    steps=$3
    shift 3
    case "$*" in *--resume*) ;; *) rm -rf "$directory" ;; esac
    "$program" --data "$out/${DATA:-text}_train_*.bin" --out "$directory" --steps "$steps" --family "$family" \
        --layers "${LAYERS:-2}" --heads "${HEADS:-$heads}" --kv-heads "${KV_HEADS:-${HEADS:-2}}" --channels 32 --ffn 64 --seq 24 \
        --batch 2 --total-batch "${TOTAL:-96}" --lr 2e-3 --lr-final 1 --warmup 3 --schedule constant "$@" > "$directory.log" 2>&1 ||
        { cat "$directory.log"; return 1; }
}

# run_with VARIABLES PROGRAM DIRECTORY STEPS FLAG...: the same with EMULATE_MODE=... [EMULATE_OTHER=...].
run_with() { (eval "export $1" && shift && run "$@"); }

# fails FAULT WORDS FLAG...: rank 1 has this fault, the run fails, and its message has these words.
fails() {
    fault=$1 words=$2
    shift 2
    ! (export LLMTRAIN_TEST_FAULT="rank 1 step 3 $fault" && run "$gpu" mode 10 --ranks 2 "$@") > "$out/fault.log" &&
        grep -q "$words" "$out/fault.log"
}

# losses_agree A B BOUND WHAT: the largest relative difference of the losses of two runs is within the bound.
losses_agree() {
    for side in "$1" "$2"; do sed 's/.*"loss": \([^,]*\),.*/\1/' "$out/$side/metrics.jsonl" > "$out/$side.losses"; done
    error=$(paste "$out/$1.losses" "$out/$2.losses" | awk -v bound="$3" '
        { n++; e = $1 / $2 - 1; if (e < 0) e = -e; if (!(e <= worst)) worst = e }
        END { printf "%.1e <= %.1e", worst, bound; exit !(n == 10 && worst <= bound) }')
    verdict $? "$4, $error"
}

same_tensors() {
    [ "$("$build/weights_hash" "$out/$1/step_00000010")" = \
        "$("$build/weights_hash" "$out/$2/step_00000010" || echo none)" ]
}

# skipped DIRECTORY: the steps skipped so far, a line per step; rewinds DIRECTORY: how often the run has rewound.
skipped() { sed 's/.*"skipped": \([0-9]*\).*/\1/' "$out/$1/metrics.jsonl"; }
rewinds() { grep -c '"rewound"' "$out/$1/events.jsonl"; }

"$build/corpus" --out "$out/text" --bytes 20000 --val-bytes 1000 > "$out/corpus.log" &&
    "$build/tokenize" --bytes "$out/text_train.txt" --out "$out/text" --val 0 > "$out/corpus.log" || exit 1

for type in $types; do
    for family in gpt2 llama; do
        use "$type" "$family"
        run train "cpu-$name" 10 && run "$gpu" "gpu-$name" 10
        verdict $? "$name: ten steps in both builds"
        losses_agree "cpu-$name" "gpu-$name" "$bound" "$name: losses against the CPU's, relative"
        run "$gpu" resumed 5 && run "$gpu" resumed 10 --resume && same_tensors resumed "gpu-$name"
        verdict $? "$name: 5 steps + resume + 5 steps have the bits of 10"
        run train to-gpu 5 && run "$gpu" to-gpu 10 --resume
        losses_agree "cpu-$name" to-gpu "$bound" "$name: a checkpoint of the CPU build goes on in the CUDA build"
        run "$gpu" to-cpu 5 && run train to-cpu 10 --resume
        losses_agree "cpu-$name" to-cpu "$bound" "$name: a checkpoint of the CUDA build goes on in the CPU build"
    done
done

with BF16 && for family in gpt2 llama; do
    use BF16 "$family"
    [ "$gpu" = train-emulated ] && {
        ! run_with "EMULATE_GPU=other" "$gpu" mode 10 > "$out/other.log" &&
            grep -q '^train: this program was built for another GPU than emulated CPU, .* or with ARCH=sm_90$' "$out/other.log"
        verdict $? "$name: a program that was built for another GPU says so"
    }
    [ "$gpu" = train-emulated ] && for mode in "ORDER=reverse" "ORDER=random EMULATE_SEED=1" \
        "ORDER=random EMULATE_SEED=2" "COPIES=early" "STREAMS=delayed" "STREAMS=delayed EMULATE_ORDER=random" \
        "STREAMS=delayed EMULATE_OTHERS=ahead"; do
        run_with "EMULATE_$mode" "$gpu" mode 10 && same_tensors mode "gpu-$name"
        verdict $? "$name: the same bits with EMULATE_$mode"
    done
    run_with LAYERS=5 "$gpu" deep 10 &&
        run_with "LAYERS=5 EMULATE_STREAMS=delayed" "$gpu" mode 10 --offload optimizer,activations &&
        same_tensors mode deep
    verdict $? "$name: the same bits with --offload in memory of the host"
    run "$gpu" mode 10 --masters off --dropout 0.1 && run train mode-cpu 10 --masters off --dropout 0.1
    losses_agree mode-cpu mode "$bound" "$name: stochastic rounding and dropout, against the CPU's"
done

if with FP16; then
    use FP16 gpt2
    run "$gpu" overflow-gpu 10 --loss-scale 16777216 --scale-growth 3 &&
        run train overflow-cpu 10 --loss-scale 16777216 --scale-growth 3
    skipped overflow-gpu | grep -q '^[1-9]' && [ "$(skipped overflow-cpu)" = "$(skipped overflow-gpu)" ]
    verdict $? "FP16: a loss scale that overflows skips the same steps in both builds, $(skipped overflow-gpu | tail -n 1)"
fi

if with FP32; then
    use FP32 gpt2
    # The algorithms of matmuls: without the given file a run cannot start; the CPU ignores the flag.
    ! run "$gpu" mode 1 --matmul-algorithms "$out/none.json" > "$out/none.log" &&
        grep -q 'cannot open .*none.json' "$out/none.log" && run train mode-cpu 1 --matmul-algorithms "$out/none.json"
    verdict $? "FP32-gpt2: --matmul-algorithms is for GPUs, whose file must be there"

    # A single rank through NCCL, which does not need it: all that can be tested on one GPU.
    run "$gpu" alone 10 --zero 2 --reduce exact &&
        run_with "LLMTRAIN_TEST_FAULT='rank 0 step 0 at nccl do flip'" "$gpu" nccl 10 --zero 2 --reduce exact &&
        same_tensors alone nccl
    verdict $? "FP32-gpt2: one rank through NCCL has the bits of one without"
fi

# Two ranks of a type and a family.
two_ranks() {
    what="$name, 2 ranks"
    run train cpu-two 10 --ranks 2 --zero 1 && run "$gpu" two-0 10 --ranks 2
    losses_agree cpu-two two-0 "$bound" "$what: losses against the CPU's, relative"
    [ "$type-$gpu" = FP32-train-emulated ] && for fault in "at reduce do kill" "at load do hang" "at gather do stop"; do
        fails "$fault" '^train: rank 0: rank 1 ' --zero 2 --timeout 4
        verdict $? "$what: rank 1 $fault, and rank 0 says so and ends"
    done
    if [ "$name" = FP32-gpt2 ]; then
        # Every skipped step counts as a divergence, after which other data is tried.
        diverges="--ranks 2 --check-every 2 --ckpt-every 3 --seed 7 --clip 1.5 --spike-sigma 0 --spike-skip 1.55
            --spike-warmup 3 --diverged-after 1 --rewind 20 --rewind-lr 1"
        # shellcheck disable=SC2086
        run train cpu-rewinds 10 $diverges && run "$gpu" rewinds 10 $diverges --zero 2
        losses_agree cpu-rewinds rewinds "$bound" "$what: a run that diverges goes back as on the CPU"
        [ "$(rewinds rewinds)" -gt 0 ] && [ "$(rewinds rewinds)" = "$(rewinds cpu-rewinds)" ]
        verdict $? "$what: and as often, $(rewinds rewinds) times"
        for place in compare load; do
            fails "at $place do corrupt" 'differs from the other rank in' --check-every 1
            verdict $? "$what: a wrong bit of rank 1 ($place) is found"
        done
    fi
    for zero in 1 2 3 "2 --shard 1"; do
        # shellcheck disable=SC2086
        run "$gpu" two 10 --ranks 2 --zero $zero && same_tensors two two-0
        verdict $? "$what: the same bits with --zero $zero as with --zero 0"
    done
    run "$gpu" two-more 5 --ranks 2 --zero 2 && run "$gpu" two-more 10 --ranks 2 --zero 1 --resume &&
        same_tensors two-more two-0
    verdict $? "$what: 5 steps with --zero 2 + 5 with --zero 1 have the bits of 10"
    run "$gpu" two-storage 10 --ranks 2 --zero 2 --reduce storage
    losses_agree cpu-two two-storage 3.9e-3 "$what: gradients that travel in the storage type"
    [ "$gpu" = train-emulated ] && for mode in "STREAMS=delayed" "STREAMS=delayed EMULATE_OTHERS=ahead"; do
        for zero in 0 2 3 "1 --shard 1"; do
            # shellcheck disable=SC2086
            run_with "EMULATE_$mode" "$gpu" mode 10 --ranks 2 --zero $zero && same_tensors mode two-0
            verdict $? "$what, --zero $zero: the same bits with EMULATE_$mode"
        done
    done
}

# Stages of a pipeline, in the modes of the streams: of one pipeline, and of two with sharded states. One step of a
# deeper model.
pipelines() {
    export LAYERS=4 TOTAL=192
    run "$gpu" one-stage 1 --reduce exact
    for mode in "STREAMS=now --pp 2 --ranks 4 --zero 1" "STREAMS=delayed --pp 4 --ranks 4 --pipeline zb-h1" \
        "STREAMS=delayed EMULATE_OTHERS=ahead --pp 2 --ranks 2 --pipeline interleaved"; do
        # shellcheck disable=SC2086
        run_with "EMULATE_${mode%% --*}" "$gpu" mode 1 --reduce exact --${mode#* --} &&
            [ "$("$build/weights_hash" "$out/mode/step_00000001")" = \
                "$("$build/weights_hash" "$out/one-stage/step_00000001" || echo none)" ]
        verdict $? "$name, --${mode#* --}: the bits of one rank with EMULATE_${mode%% --*}"
    done
    fails "at send do hang" 'or a stage of a pipeline is stuck' --pp 2 --timeout 1
    verdict $? "$name, --pp 2: rank 1 hangs, and the other says that a stage is stuck"
    unset LAYERS TOTAL
}

# Ranks that share the rows of a micro-batch, half a sequence each. One step.
contexts() {
    export TOTAL=192 HEADS=4
    run "$gpu" parts 1 --row-leaves 4 --documents mask --end-of-text 10 --dropout 0.1
    for mode in "STREAMS=now --cp 4 --ranks 4" "STREAMS=delayed --cp 2 --pp 2 --ranks 4 --zero 1 --recompute block" \
        "STREAMS=delayed EMULATE_OTHERS=ahead --cp 2 --ranks 4 --zero 3" \
        "STREAMS=delayed EMULATE_OTHERS=behind --cp 4 --ranks 4 --zero 2"; do
        # shellcheck disable=SC2086
        run_with "EMULATE_${mode%% --*}" "$gpu" mode 1 --row-leaves 4 --documents mask --end-of-text 10 --dropout 0.1 \
            --${mode#* --} && [ "$("$build/weights_hash" "$out/mode/step_00000001")" = \
                "$("$build/weights_hash" "$out/parts/step_00000001" || echo none)" ]
        verdict $? "$name, --${mode#* --}: the bits of one rank with EMULATE_${mode%% --*}"
    done
    unset TOTAL HEADS
}

# More ranks that share rows than key and value heads, each of which is copied. One step.
copied_heads() {
    export TOTAL=192 HEADS=4 KV_HEADS=1
    run "$gpu" copies 1 --row-leaves 4 --kv-copies 4 --documents mask --end-of-text 10 --dropout 0.1
    for mode in "STREAMS=delayed --cp 4 --ranks 4" "STREAMS=delayed --kv-copies 4 --ranks 1 --recompute block" \
        "STREAMS=delayed EMULATE_OTHERS=ahead --cp 2 --kv-copies 4 --ranks 2 --zero 2 --recompute block"; do
        # shellcheck disable=SC2086
        run_with "EMULATE_${mode%% --*}" "$gpu" mode 1 --row-leaves 4 --documents mask --end-of-text 10 --dropout 0.1 \
            --${mode#* --} && [ "$("$build/weights_hash" "$out/mode/step_00000001")" = \
                "$("$build/weights_hash" "$out/copies/step_00000001" || echo none)" ]
        verdict $? "$name with one key/value head, --${mode#* --}: the bits of one rank with EMULATE_${mode%% --*}"
    done
    unset TOTAL HEADS KV_HEADS
}

# Ranks that share layers, with the leaves of four. One step.
tensors() {
    export TOTAL=192 HEADS=4
    run "$gpu" leaves 1 --leaves 4 --row-leaves 2 --documents mask --end-of-text 10 --dropout 0.1
    for mode in "STREAMS=now --tp 4 --ranks 4" "STREAMS=delayed --tp 2 --pp 2 --ranks 4 --zero 1 --recompute block" \
        "STREAMS=delayed EMULATE_OTHERS=ahead --tp 2 --cp 2 --ranks 4" \
        "STREAMS=delayed EMULATE_OTHERS=behind --tp 2 --ranks 4 --zero 3"; do
        # shellcheck disable=SC2086
        run_with "EMULATE_${mode%% --*}" "$gpu" mode 1 --leaves 4 --row-leaves 2 --documents mask --end-of-text 10 \
            --dropout 0.1 --${mode#* --} && [ "$("$build/weights_hash" "$out/mode/step_00000001")" = \
                "$("$build/weights_hash" "$out/leaves/step_00000001" || echo none)" ]
        verdict $? "$name, --${mode#* --}: the bits of one rank with EMULATE_${mode%% --*}"
    done
    unset TOTAL HEADS
}

# Conversations packed into rows, whose learned positions begin again within them.
conversations() {
    export DATA=said
    mkdir "$out/words" && cp dev/test/fixtures/tokenizers/qwen2.json "$out/words/tokenizer.json" &&
        echo '{"eos_token": "<|im_end|>"}' > "$out/words/tokenizer_config.json"
    for i in 1 2 3 4 5 6 7 8 9; do
        echo "{\"prompt\": \"the cat number $i\", \"completion\": \" sat on it\"}"
        echo "{\"prompt\": \"$i dogs\", \"completion\": \" ran\"}"
    done > "$out/said.jsonl"
    "$build/tokenize" --chat "$out/said.jsonl" --tokenizer "$out/words" --val 0 --out "$out/said" > "$out/said.log" &&
        run train cpu-chat 10 && run "$gpu" chat 10 --reduce exact
    losses_agree cpu-chat chat "$bound" "$name: losses of packed conversations against the CPU's, relative"
    run_with EMULATE_STREAMS=delayed "$gpu" mode 10 --reduce exact --ranks 2 --zero 2 && same_tensors mode chat
    verdict $? "$name: packed conversations on two ranks, --zero 2: the bits of one"
    unset DATA
}

# Pairs of LoRA beside frozen weights, in the storage dtype or in 4 bits, and a loss of whole answers.
adapters() {
    for flags in "--lora 4 --lora-dropout 0.1" "--lora 4 --quantize nf4"; do
        # shellcheck disable=SC2086
        run train cpu-lora 10 --init-from "$out/cpu-$name" $flags && run "$gpu" lora 10 --init-from "$out/cpu-$name" $flags
        losses_agree cpu-lora lora "$bound" "$name, $flags: losses against the CPU's, relative"
        # shellcheck disable=SC2086
        run_with EMULATE_STREAMS=delayed "$gpu" mode 10 --init-from "$out/cpu-$name" $flags --recompute block &&
            same_tensors mode lora
        verdict $? "$name, $flags: the same bits with --recompute block and EMULATE_STREAMS=delayed"
    done
    export DATA=liked
    for i in 1 2 3 4 5 6 7 8 9; do
        echo "{\"prompt\": \"cat $i\", \"chosen\": \" sat\", \"rejected\": \" ran\"}"
    done > "$out/liked.jsonl"
    "$build/tokenize" --chat "$out/liked.jsonl" --tokenizer "$out/words" --val 0 --out "$out/liked" > "$out/liked.log"
    for flags in "--objective simpo" "--lora 4 --objective dpo --reference adapter-off"; do
        # shellcheck disable=SC2086
        run train cpu-liked 10 $flags && run_with EMULATE_STREAMS=delayed "$gpu" liked 10 $flags
        losses_agree cpu-liked liked "$bound" "$name, $flags: losses against the CPU's, relative"
    done
    unset DATA
}

# The emulator has one device, and so may this machine.
export NCCL_MULTI_RANK_GPU_ENABLE=1
if [ "$gpu" = train-cuda ] && ! run "$gpu" two 2 --ranks 2 > "$out/two.out"; then
    echo "skipped two ranks on one GPU, which this NCCL refuses: $(grep -h NCCL "$out/two.log" | head -n 1)"
else
    for type in FP32 BF16; do
        with "$type" && for family in gpt2 llama; do
            use "$type" "$family"
            two_ranks
        done
    done
    [ "$gpu" = train-emulated ] && with FP32 && {
        use FP32 gpt2
        conversations
        adapters
        pipelines
        contexts
        tensors
        use FP32 llama
        contexts
        adapters
        copied_heads
        tensors
    }
fi

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
