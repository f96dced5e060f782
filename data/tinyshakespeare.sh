#!/bin/sh
# Tiny Shakespeare: 1.1 MB, 40,000 lines of his plays, one token per byte. A minute of training shows something.
#
#   data/tinyshakespeare.sh [FOLDER]     writes FOLDER/shakespeare_{train,val}_000000.bin (default: data)
set -eu
. "$(dirname -- "$0")/download.sh"
folder=${1:-"$root/data"}

download https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt \
    "$folder/shakespeare.txt" 1115394
tokenize --bytes "$folder/shakespeare.txt" --out "$folder/shakespeare" --val 0.1
