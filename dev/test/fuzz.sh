# fuzz.sh BUILD [SECONDS [FLAG...]]: runs the readers of files (dev/test/fuzz.c) on arbitrary bytes, with libFuzzer and
# the address and undefined-behavior sanitizers: one reader after the other, SECONDS (600) each, from seeds that it
# writes first. FLAGs are those of the libraries that decompress texts; `make fuzz` gives them. Needs clang.
set -eu
mkdir -p "$1"
build=$(cd "$1" && pwd)
seconds=${2:-600}
shift "$(($# < 2 ? $# : 2))"
readers="JSON SAFETENSORS SHARD CONVERT TOKENIZER CHOICES SCORES TEMPLATE TEXT LOG"

for reader in $readers; do
    clang -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -DFUZZ_LIBFUZZER -I. \
        "-DFUZZ_$reader" dev/test/fuzz.c -o "$build/fuzz_$reader" "$@" -lm -pthread
    mkdir -p "$build/seeds/$reader"
done
"${CC:-cc}" -std=c11 -O2 -I. -DFUZZ_SHARD dev/test/fuzz.c -o "$build/seeds_of_shards" -lm -pthread

seeds=$build/seeds
"$build/seeds_of_shards" "$seeds/SHARD"
cp dev/test/fixtures/llama_tied.safetensors "$seeds/SAFETENSORS"
cp dev/test/fixtures/templates.json "$seeds/TEMPLATE"
cp dev/test/fixtures/bpe_training.json README.md "$seeds/TEXT"
printf '{"text": "a\\u00e9 b"}\n\n{"text": "c"}\n' | tee "$seeds/TEXT/lines" | gzip > "$seeds/TEXT/lines.gz"
printf 'evaluation 0000000000000001\nitem 0 1.5 2 3\nitem 1 1 2 3 4 5 6\n.item 3\n' > "$seeds/SCORES/items"
cat > "$seeds/CHOICES/forms" << 'END'
{"ctx": "a b ", "endings": ["c", "d"], "label": "1"}
{"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}
END

# A model: its configuration, its settings for generation, its index, its weights, with a zero byte after each.
for model in dev/test/fixtures/models/*; do
    { cat "$model/config.json"; printf '\000{"eos_token_id": [1, 2]}\000\000'; cat "$model/model.safetensors"; } \
        > "$seeds/CONVERT/${model##*/}" 2> /dev/null || true
done
model=dev/test/fixtures/models/llama
{ cat $model/config.json; printf '\000\000'; sed 's/: "model.*tensors"/: "a"/' $model/*.index.json
    printf '\000'; cat $model/model-00001-of-*.safetensors; } > "$seeds/CONVERT/index"

# A log of a run.
printf '{"step": 10,"val_loss": 2.5}\n{"step": 20,"loss": 2,"val_loss": null}\n{"step": 30}\n{"step"' > "$seeds/LOG/log"

# A tokenizer: its file, its configuration, its added and named tokens, a text; or GPT-2's two files.
cd dev/test/fixtures/tokenizers
for file in [!di]*.json ranks.tiktoken; do  # not decodings.json and ids.json
    { cat "$file"; printf '\000{"eos_token":"</s>"}\000{"<s>": 1}\000{"bos_token": {"content": "<s>"}}\000'
        printf 'Hello the world 12<s>\303\251\314\201 \342\226\201 \377'; } \
        > "$seeds/TOKENIZER/$file"
done
{ printf '#'; cat gpt2/encoder.json; printf '\000'; cat gpt2/vocab.bpe; printf '\000'
    printf '{"<|endoftext|>": 420}\000\000it is a text'; } > "$seeds/TOKENIZER/gpt2"
cd - > /dev/null

for reader in $readers; do
    # shellcheck disable=SC2046  # none or one
    "$build/fuzz_$reader" -max_total_time="$seconds" -print_final_stats=1 \
        $([ "$reader" = SHARD ] && echo -max_len=4096) "$seeds/$reader"
done
