#!/bin/sh
# FineWeb-Edu: 100 billion tokens of educational web pages, as llm.c's shards of 100 million GPT-2 tokens (200 MB)
# each: for --vocab 50257. They need no tokenizer.
#
#   data/fineweb.sh [SHARDS [FOLDER]]    writes FOLDER/edu_fineweb_train_000001.bin ... (default: 10 of 1,001, data)
set -eu
. "$(dirname -- "$0")/download.sh"
shards=${1:-10}
folder=${2:-"$root/data"}
source=https://huggingface.co/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main

if ! [ "$shards" -ge 1 ] 2>/dev/null || [ "$shards" -gt 1001 ]; then
    fail "$shards: give a number of shards from 1 to 1001"
fi
download $source/edu_fineweb_val_000000.bin "$folder/edu_fineweb_val_000000.bin"
number=1
while [ "$number" -le "$shards" ]; do
    name=edu_fineweb_train_$(printf %06d "$number").bin
    download "$source/$name" "$folder/$name"
    number=$((number + 1))
done
