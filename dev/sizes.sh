#!/bin/sh
# sizes.sh: lines of the reading path and of each folder, next to their limits.
#
#   sh dev/sizes.sh
#
# Exit code 1 if something is over its limit, or a line of the path's sources is longer than 120 columns. Folders count
# sources, scripts and documents, without fixtures and downloaded data. dev/ counts without *.md and without the list of
# mutants, dev/test/mutants.txt, which is data and has its own line. Its limit grows with what it tests: 164 lines for
# each 100 of the product, which is the reading path, llmtrain/, tools/, launch/ and data/.

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

# The files of this layout that a file includes, directly or indirectly, without the file itself.
includes() {
    for header in $("${CC:-cc}" -MM -MG -DLLMTRAIN_CUDA -x c "$1" | sed 's/.*://; s/\\//'); do
        if [ -f "$header" ] && [ "$header" != "$1" ]; then echo "$header"; fi
    done
}

path="train.cu llmtrain.h kernels_cpu.h kernels.cuh"
printf '%-44s %7s %7s\n' "the reading path" lines limit
file train.cu 500
file llmtrain.h 1000
file kernels_cpu.h 900
file kernels.cuh 1250
# shellcheck disable=SC2086
{
    row "together" "$(cat $path | wc -l)" 3650
    row "longest line, in columns" "$(awk 'length > longest { longest = length } END { print longest }' $path)" 120
}
file README.md 150

printf '\nwhat a copied kernel needs\n'
file llmtrain/ops/types.h 250
# shellcheck disable=SC2046
row "headers that attention.cuh includes, together" "$(cat $(includes llmtrain/ops/attention.cuh) < /dev/null | wc -l)" 300

printf '\nfolders\n'
for name in llmtrain tools launch data doc dev dev/test dev/emulator; do row $name "$(lines $name)"; done
# shellcheck disable=SC2086
product=$(($(cat $path | wc -l) + $(lines llmtrain) + $(lines tools) + $(lines launch) + $(lines data)))
row "dev, lines for each 100 of the product" $((100 * $(lines dev) / product)) 164
row "the list of mutants, dev/test/mutants.txt" "$(wc -l < dev/test/mutants.txt)"
exit $broken
