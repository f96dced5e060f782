#!/bin/sh
# TinyStories: 2.2 GB of short stories in the words of a small child, one token per byte ("TinyStories: How Small Can
# Language Models Be and Still Speak Coherent English?", Eldan and Li, 2023).
#
#   data/tinystories.sh [FOLDER]         writes FOLDER/stories_{train,val}_*.bin (default: data)
set -eu
. "$(dirname -- "$0")/download.sh"
folder=${1:-"$root/data"}
source=https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main

download $source/TinyStoriesV2-GPT4-valid.txt "$folder/stories_val.txt"
download $source/TinyStoriesV2-GPT4-train.txt "$folder/stories_train.txt"
tokenize --bytes "$folder/stories_val.txt" --out "$folder/stories" --val 1
tokenize --bytes "$folder/stories_train.txt" --out "$folder/stories" --val 0
