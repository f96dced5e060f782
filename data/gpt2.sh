#!/bin/sh
# GPT-2's published files: configuration, weights (548 MB) and tokenizer, as train --init-from reads them.
#
#   data/gpt2.sh [FOLDER [MODEL]]     FOLDER: models/gpt2; MODEL: gpt2 (124M), gpt2-medium, gpt2-large, gpt2-xl
set -eu
. "$(dirname -- "$0")/download.sh"
folder=${1:-"$root/models/gpt2"}
model=openai-community/${2:-gpt2}

for file in config.json generation_config.json tokenizer.json tokenizer_config.json model.safetensors; do
    download "https://huggingface.co/$model/resolve/main/$file" "$folder/$file"
done
echo "$folder: ./train --init-from $folder, build/generate --init-from $folder"
