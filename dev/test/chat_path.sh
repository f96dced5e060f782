# chat_path.sh BUILD: runs the commands of README.md's section "From conversations to a chat" as they stand there, one
# after the other, with a tiny model of Hugging Face's form and 200 conversations. Works in BUILD/chat-path. Prints
# failures, and `N passed, N failed`.
set -u
export OMP_WAIT_POLICY=passive
build=$(cd "$1" && pwd) || exit 2
root=$PWD
work=$build/chat-path
passed=0
failed=0
rm -rf "$work"
mkdir -p "$work/build" "$work/data" "$work/models" && cd "$work" || exit 2
for program in train evaluate generate; do ln -s "$build/$program-FP32" "build/$program"; done
for program in tokenize export corpus; do ln -s "$build/$program" build; done
ln -s build/train train

# check WHAT COMMAND...: one check. If it fails, shows the end of out.txt, the last command's output.
check() {
    what=$1
    shift
    if "$@"; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "FAILED  $what"
    tail -n 8 out.txt | sed 's/^/        /'
}
finish() {
    echo "$passed passed, $failed failed"
    [ "$failed" -eq 0 ]
    exit
}

# What a user has: a model in models/x, with a chat template, and chats.jsonl.
cat > prepare.sh << 'EOT'
set -e
build/corpus --out corpus --bytes 100000 --val-bytes 1000 --questions 200
sed 's/\\u000a/ /' corpus_questions_train.jsonl > chats.jsonl
build/tokenize --train-bpe 512 --text corpus_train.txt --out tokenizer
echo "{% for m in messages %}{{ m.role + ':\n' + m.content }}{{ eos_token if m.role == 'assistant' }}{{ '\n' }}{% endfor %}" \
     "{%- if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}" > tokenizer/chat_template.jinja
build/tokenize --tokenizer tokenizer --text corpus_train.txt --out corpus --val 0
./train --data 'corpus_train_*.bin' --out base --family llama --layers 2 --heads 2 --channels 64 --ffn 192 --context 512 \
    --seq 128 --steps 60 --warmup 10 --lr 5e-3
build/export --out base --to hf --dir models/x
sed -n '1,3 s/.*"user","content": "\([^"]*\)".*/\1/p' chats.jsonl > typed.txt
EOT
check "a tiny model and conversations are made" sh prepare.sh > out.txt 2>&1
[ "$failed" -eq 0 ] || { tail -n 8 out.txt; finish; }

# The commands, each in a line, without the comments behind them.
awk '/^## / { on = $0 == "## From conversations to a chat" } on && /^    / { print substr($0, 5) }' "$root/README.md" > block
sed -e ':a' -e '/\\$/ { N; s/\\\n//; ba' -e '}' -e 's/  *# .*//' block > commands
check "README.md has ten lines of commands" [ "$(wc -l < block)" -eq 10 ]
while IFS= read -r line; do
    grep -qxF -e "    $line" "$root/doc/finetuning.md" || echo "$line"
done < block > out.txt
check "doc/finetuning.md has the same" [ ! -s out.txt ]

number=0
while IFS= read -r command; do
    number=$((number + 1))
    sh -c "$command" < typed.txt > "$number.txt" 2>&1
    status=$?
    cp "$number.txt" out.txt
    check "$command" [ $status -eq 0 ]
done < commands

# What they have done.
loss() { sed -n 's/.*"loss": \([0-9.]*\),.*/\1/p' "$1"; }
is() { [ -n "$1" ] && [ "$1" = "$2" ]; }
check "200 conversations are converted" grep -q '^200 documents' 1.txt
check "of the first one the answer is in brackets" grep -qx '⟦.*\.<|endoftext|>⟧' 2.txt
check "of the model's parameters the pairs are trained" grep -q '^model: .*, lora 16, .* of which 40960 are trained$' 3.txt
check "the loss of answers is lower after training" awk "BEGIN { exit !($(loss 5.txt) < $(loss 4.txt)) }"
check "it is the last validation loss of the run" \
    is "$(tail -n 1 runs/chat/metrics.jsonl | sed 's/.*"val_loss": \([0-9.]*\),.*/\1/' | cut -c 1-12)" \
    "$(loss 5.txt | cut -c 1-12)"
check "the base model with the adapter gives the answers of the run" is "$(cat 6.txt)" "$(sed 1d 8.txt)"
build/evaluate --init-from models/x --adapter adapters/chat --data 'data/chat_val_*.bin' > adapter.txt 2> out.txt
check "build/evaluate --adapter gives the loss of the run" \
    awk "BEGIN { x = $(loss adapter.txt) / $(loss 5.txt) - 1; exit !(x * x < 1e-10) }"
check "the adapter has PEFT's two files" [ -s adapters/chat/adapter_config.json -a -s adapters/chat/adapter_model.safetensors ]
check "the adapter is of the model" grep -q '"base_model_name_or_path": *"[^"]*"' adapters/chat/adapter_config.json
check "there is a GGUF file, with the chat template" sh -c \
    'cat models/chat/*.gguf | head -c 4 | grep -q GGUF && grep -qaF "assistant:" models/chat/*.gguf'
finish
