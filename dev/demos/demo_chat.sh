# demo_chat.sh BUILD: from conversations to a model that answers them, with LoRA and, for comparison, with all weights.
# A base model learns to write the corpus' stories, then to continue a story and a question about it by the answer. In
# a chat it does not know what is asked of it; it learns that from conversations. Questions are of six of the corpus'
# eight kinds; the other two are rare. An answer is words of the story, so a right one is an equal text. Fails if LoRA,
# which trains about 1% of the parameters, answers 2 points less of the questions than full fine-tuning does.
#
#   sh dev/demos/demo_chat.sh build         the programs must be there; make demo-chat builds them
#
# Takes about 20 minutes on 2 cores, most of them for the base model, which a second call uses again; SEED=2 for another
# order of the conversations.
set -eu
build=$1
. dev/demos/stories.sh  # how threads wait
demo=$build/demo-chat
seed=${SEED:-1}
known=44000     # questions that the base model learns from
trained=4000    # conversations
asked=1000      # questions of the comparison
mkdir -p "$demo"

# lines FORMAT: of conversations on standard input, the story with its question in one line, as generate --chat reads
# it, and the answer as the story has it, without a capital letter; by a format of printf that has both.
lines() {
    awk -F '"content": "' -v format="$1" '{
        question = $2; sub(/"},{"role".*/, "", question); sub(/\\u000a/, " ", question)
        answer = $3; sub(/"}\]}$/, "", answer)
        printf format, question, tolower(substr(answer, 1, 1)) substr(answer, 2) }'
}
chat='{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "%s"}]}\n'

# pretrain NAME FLAG...: a run in the folder NAME with the settings of both parts.
pretrain() {
    name=$1
    shift
    "$build/train-FP32" --data "$demo/${name}_train_*.bin" --val "$demo/${name}_val_*.bin" --out "$demo/$name" \
        --seq 256 --batch 8 --val-windows 64 --val-every 500 --log-every 250 "$@"
}

if [ ! -s "$demo/base/model.safetensors" ]; then
    echo "== 1. a base model: stories, then the answers to questions about stories"
    rm -rf "${demo:?}"/*
    "$build/corpus" --out "$demo/corpus" --bytes 4000000 --val-bytes 60000 --questions 56000
    for set in train val; do
        grep -v 'dream of?\|Where was it?' "$demo/corpus_questions_$set.jsonl" > "$demo/questions_$set.jsonl"
    done
    head -n $known "$demo/questions_train.jsonl" > "$demo/known.messages"
    tail -n $trained "$demo/questions_train.jsonl" | lines "$chat" > "$demo/chats.jsonl"
    head -n $asked "$demo/questions_val.jsonl" | lines "$chat" > "$demo/asked.jsonl"
    lines '{"prompt": "%s", "completion": " %s"}\n' < "$demo/known.messages" > "$demo/known.jsonl"
    { lines '%s %s\n' < "$demo/known.messages"; cat "$demo/corpus_train.txt"; } > "$demo/text"
    "$build/tokenize" --train-bpe 1024 --text "$demo/text" --out "$demo/tokenizer"
    cat > "$demo/tokenizer/chat_template.jinja" << 'EOT'
{%- for message in messages %}
{{- message.role + ': ' + message.content }}{{ eos_token if message.role == 'assistant' }}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}
EOT
    "$build/tokenize" --tokenizer "$demo/tokenizer" --text "$demo/corpus_train.txt" --out "$demo/stories" --val 0.02
    "$build/tokenize" --tokenizer "$demo/tokenizer" --chat "$demo/known.jsonl" --out "$demo/known" --val 0.02
    pretrain stories --family llama --layers 4 --heads 4 --channels 128 --context 256 --steps 1200 --lr 3e-3
    pretrain known --init-from "$demo/stories" --steps 3500 --lr 1e-3
    "$build/export" --out "$demo/known" --to hf --dir "$demo/base"
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
# answers that are right to the letter, and end there.
sed 's/, {"role": "assistant".*/]}/' "$demo/asked.jsonl" > "$demo/questions.jsonl"
sed 's/.*{"role": "assistant", "content": "\(.*\)"}\]}$/ \1|true/' "$demo/asked.jsonl" > "$demo/right.txt"
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
