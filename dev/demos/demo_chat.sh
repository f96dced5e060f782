# demo_chat.sh BUILD: from conversations to a model that answers them, with LoRA and, for comparison, with all weights.
# A base model learns to write stories, and questions about them as running text; then, from conversations, to answer a
# question in a chat. Answers are words of the story, so a right one is an equal text. Fails if LoRA, which trains about
# 1% of the parameters, answers 2 points less of the questions than full fine-tuning does.
#
#   sh dev/demos/demo_chat.sh build         the programs must be there; make demo-chat builds them
#
# Takes about 15 minutes on 2 cores, most of them for the base model, which a second call uses again. SEED=1 to try
# others.
set -eu
build=$1
. dev/demos/stories.sh  # how threads wait
demo=$build/demo-chat
seed=${SEED:-1}
base_questions=16000    # in the base model's text
trained=4000            # conversations
asked=1000              # questions of the comparison
mkdir -p "$demo"

# texts FILE: conversations of a question and its answer, as running text.
texts() {
    sed 's/^{"messages": \[{"role": "user","content": "//; s/"},{"role": "assistant","content": "/\n/; s/"}\]}$/\n/
        s/\\"/"/g' "$1"
}

if [ ! -s "$demo/base/model.safetensors" ]; then
    echo "== 1. a base model: stories, and questions about other stories, as one text"
    rm -rf "${demo:?}"/*
    # A question comes in the line of its story, as a user of --chat writes it.
    "$build/corpus" --out "$demo/stories" --bytes 2000000 --val-bytes 60000 --questions $((base_questions + trained))
    for part in train val; do
        sed 's/\\u000a/ /' "$demo/stories_questions_$part.jsonl" > "$demo/$part.jsonl"
    done
    head -n $base_questions "$demo/train.jsonl" > "$demo/text.jsonl"
    tail -n $trained "$demo/train.jsonl" > "$demo/chats.jsonl"
    head -n $asked "$demo/val.jsonl" > "$demo/asked.jsonl"
    { cat "$demo/stories_train.txt"; echo; texts "$demo/text.jsonl"; } > "$demo/text.txt"
    "$build/tokenize" --train-bpe 1024 --text "$demo/text.txt" --out "$demo/tokenizer"
    cat > "$demo/tokenizer/chat_template.jinja" << 'EOT'
{%- for message in messages %}
{{- message.role + ':\n' + message.content }}{{ eos_token if message.role == 'assistant' }}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}
EOT
    "$build/tokenize" --tokenizer "$demo/tokenizer" --text "$demo/text.txt" --out "$demo/text" --val 0.02
    "$build/train-FP32" --data "$demo/text_train_*.bin" --val "$demo/text_val_*.bin" --out "$demo/pretraining" \
        --family llama --layers 4 --heads 4 --channels 128 --context 256 --seq 256 --batch 8 \
        --steps 2000 --warmup 100 --lr 4e-3 --log-every 200 --val-every 1000 --val-windows 64
    "$build/export" --out "$demo/pretraining" --to hf --dir "$demo/base"
fi

echo "== 2. $trained conversations; only the answers, in brackets, are trained"
for set in chats asked; do
    rm -f "$demo/$set"_*
    "$build/tokenize" --tokenizer "$demo/base" --chat "$demo/$set.jsonl" --out "$demo/$set" --val 0
done
"$build/tokenize" --show "$demo/chats_train_000000.bin" --tokens 160

# tune NAME FLAG...: a run in the folder NAME that starts from the base model; NAME.seconds.
tune() {
    name=$1
    shift
    rm -rf "${demo:?}/$name"
    began=$(date +%s)
    "$build/train-FP32" --init-from "$demo/base" --data "$demo/chats_train_*.bin" --val "$demo/asked_train_*.bin" \
        --out "$demo/$name" --seq 256 --batch 8 --warmup 20 --log-every 100 --seed "$seed" "$@" | tee "$demo/$name.log"
    echo $(($(date +%s) - began)) > "$demo/$name.seconds"
}
echo "== 3. LoRA"
tune lora --epochs 4 --lora 1 --lr 1e-2
echo "== 4. the same conversations with all weights"
tune full --epochs 4 --lr 1e-3

# answers NAME FLAG...: answers all questions with a model, greedily: NAME.jsonl, and NAME.right, the percentage of
# answers that are right to the letter, and end where they should.
sed 's/,{"role": "assistant".*/]}/' "$demo/asked.jsonl" > "$demo/questions.jsonl"
sed 's/.*{"role": "assistant","content": "\(.*\)"}\]}$/\1|true/' "$demo/asked.jsonl" > "$demo/right.txt"
answers() {
    name=$1
    shift
    "$build/generate-FP32" "$@" --prompts "$demo/questions.jsonl" --jsonl "$demo/$name.jsonl" --temperature 0 \
        --tokens 32 --batch 64
    sed 's/.*"text": "\(.*\)", *"stopped": *\([a-z]*\).*/\1|\2/' "$demo/$name.jsonl" | paste -d '\n' "$demo/right.txt" - |
        awk 'NR % 2 { right = $0; next } { n += $0 == right } END { printf "%.1f", 200 * n / NR }' > "$demo/$name.right"
}
echo "== 5. what they answer to $asked other questions"
answers base --init-from "$demo/base"
answers lora --out "$demo/lora"
answers full --out "$demo/full"

echo "== 6. an adapter for PEFT, and a model for llama.cpp"
rm -rf "$demo/adapter" "$demo/gguf"
"$build/export" --out "$demo/lora" --to peft --dir "$demo/adapter" --base "$demo/base"
"$build/export" --out "$demo/lora" --to gguf --dir "$demo/gguf" --base "$demo/base"

echo "== 7. a chat with the base model and its adapter"
sed -n '1,3 s/.*"content": "\(.*\)"}\]}$/\1/p' "$demo/questions.jsonl" | sed 's/\\"/"/g' | while read -r question; do
    echo "> $question"
    echo "$question" | "$build/generate-FP32" --init-from "$demo/base" --adapter "$demo/adapter" --chat --temperature 0
done

pairs=$(sed -n 's/^model: .* of which \([0-9]*\) are trained.*/\1/p' "$demo/lora.log")
all=$(sed -n 's/^model: .*: \([0-9]*\) parameters.*/\1/p' "$demo/full.log")
awk -v base="$(cat "$demo/base.right")" -v lora="$(cat "$demo/lora.right")" -v full="$(cat "$demo/full.right")" \
    -v all="$all" -v pairs="$pairs" -v lora_seconds="$(cat "$demo/lora.seconds")" \
    -v full_seconds="$(cat "$demo/full.seconds")" '
    BEGIN {
        printf "== %-18s %10s %8s %14s %8s\n", "", "parameters", "", "exact answers", "seconds"
        printf "== %-18s %10d %7.2f%% %13.1f%% %8d\n", "the base model", 0, 0, base, 0
        printf "== %-18s %10d %7.2f%% %13.1f%% %8d\n", "LoRA", pairs, 100 * pairs / all, lora, lora_seconds
        printf "== %-18s %10d %7.2f%% %13.1f%% %8d\n", "full fine-tuning", all, 100, full, full_seconds
        exit !(lora >= full - 2 && lora > base + 50)
    }' || {
    echo "demo_chat: LoRA should answer within 2 points of full fine-tuning, and far more than the base model" >&2
    exit 1
}
echo "== talk with it: $build/generate-FP32 --init-from $demo/base --adapter $demo/adapter --chat --temperature 0"
