#!/bin/sh
# sizes.sh: lines of the reading path, of what comes with it and of each folder, next to their limits.
#
#   sh dev/sizes.sh
#
# Exit code 1 if something is over its limit, or a line of the path's sources is longer than 120 columns. Folders count
# sources, scripts and documents, without fixtures and downloaded data. The product is the reading path, llmtrain/,
# tools/, launch/, data/ and examples/. dev/ counts without *.md and without the list of mutants, dev/test/mutants.txt,
# which is data and has its own line; dev/ has no limit, as it is what shows that the product works.

cd "$(dirname -- "$0")/.." || exit 1
export LC_ALL=C
broken=0

# row NAME LINES [LIMIT]
row() {
    verdict=
    if [ -n "$3" ] && [ "$2" -le "$3" ]; then verdict=ok; fi
    if [ -n "$3" ] && [ "$2" -gt "$3" ]; then verdict="over by $(($2 - $3))" broken=1; fi
    printf '%-44s %7d %7s  %s\n' "$1" "$2" "$3" "$verdict"
}

file() { row "$1" "$(wc -l < "$1")" "$2"; }

# Lines of a folder.
lines() {
    find "$1" -type f ! -name '*.bin' ! -name '*.part' ! -name '*.pyc' ! -path '*/fixtures/*' \
        ! -path 'data/*.txt' ! -path 'dev/*.md' ! -path dev/test/mutants.txt -exec cat {} + | wc -l
}

# includes FILE FLAG...: the files of this layout that a file includes, directly or indirectly, and the file itself; each
# once, although it has several paths (ranks/../ops/base.h).
includes() {
    from=$1
    shift
    for header in $("${CC:-cc}" -MM -MG "$@" -x c "$from" | sed 's/.*://; s/\\//'); do
        if [ -f "$header" ]; then realpath --relative-to=. "$header"; fi
    done | sort -u
}

path="train.cu llmtrain.h kernels_cpu.h kernels.cuh"
printf '%-44s %7s %7s\n' "the reading path" lines limit
file train.cu 420
file llmtrain.h 900
file kernels_cpu.h 650
file kernels.cuh 900
# shellcheck disable=SC2086
{
    row "together" "$(cat $path | wc -l)" 2720
    row "longest line, in columns" "$(awk 'length > longest { longest = length } END { print longest }' $path)" 120
}

printf '\nwhat stands beside it\n'
file test_train.cu 400
file README.md 150
file Makefile 160
file dev/bench/RESULTS.md 330
row "the longest file of examples/" "$(for f in examples/*; do wc -l < "$f"; done | sort -n | tail -n 1)" 300

# shellcheck disable=SC2046
{
    printf '\nwhat comes with it\n'
    row "llmtrain.h and what it includes, on a CPU" "$(cat $(includes llmtrain.h) | wc -l)" 13583
    file llmtrain/ops/types.h 250
    kernel=llmtrain/ops/attention.cuh
    row "what attention.cuh includes" "$(cat $(includes $kernel -DLLMTRAIN_CUDA | grep -v $kernel) | wc -l)" 300
}

printf '\nfolders\n'
product=0
for name in llmtrain tools launch data examples; do
    row $name "$(lines $name)"
    product=$((product + $(lines $name)))
done
# shellcheck disable=SC2086
product=$((product + $(cat $path | wc -l)))
# Each feature that is added raises it by what it takes, and no more (doc/design.md, "Sizes").
row "the product: these and the reading path" $product 53607
for name in doc dev dev/test dev/emulator; do row $name "$(lines $name)"; done
row "dev, lines for each 100 of the product" $((100 * $(lines dev) / product))
row "the list of mutants, dev/test/mutants.txt" "$(wc -l < dev/test/mutants.txt)"
exit $broken
