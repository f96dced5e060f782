#!/bin/sh
# sectors.sh: how the shipped kernels use memory, counted by the emulator (dev/emulator/count.h): 32-byte sectors of
# global memory and wavefronts of shared memory, and what the same requests would take without waste or conflicts.
#
#     sh dev/gpu/sectors.sh BUILD TYPE            runs the ladders' shipped rungs at GPT-2's sizes, then the test of all
#                                             kernels for those that no ladder has (make sectors): writes
#                                             BUILD/sectors-TYPE.jsonl, sectors-TYPE-others.jsonl, prints the tables
#     sh dev/gpu/sectors.sh --table FILE...       the table of files written by EMULATE_COUNT
#
# The table has a line for each kernel, then one for each line of the source that takes more than 1.1 times the ideal.
# Few tokens are enough, since the sectors of a request depend only on the sizes of rows. No GPU is needed.
set -u

table() {
    awk -v only_kernels="${only_kernels:-}" '
    function field(name,  from, rest) {  # the value of "name" in this line
        from = index($0, "\"" name "\": ")
        if (from == 0) return ""
        rest = substr($0, from + length(name) + 4)
        if (substr(rest, 1, 1) == "\"") { rest = substr(rest, 2); return substr(rest, 1, index(rest, "\"") - 1) }
        match(rest, /^[0-9]+/)
        return substr(rest, 1, RLENGTH)
    }
    function ratio(taken, ideal) { return ideal > 0 ? sprintf("%.2f", taken / ideal) : "-" }
    { kernel = field("kernel"); kind = field("kind"); space = field("space") }
    kernel ~ /^ladder_/ { next }  # of a ladder, for comparison
    kind == "launch" { next }
    {
        taken = field("sectors") + field("wavefronts"); ideal = field("ideal") + 0
        way = space == "shared" ? "shared" : kind == "store" ? "store" : "load"
        if (!(kernel in seen)) { seen[kernel] = 1; order[++kernels] = kernel }
        sum[kernel, way] += taken; best[kernel, way] += ideal
        from = field("via"); from = from == "" ? "" : " (" from ")"
        where = sprintf("%-48s | %s:%s%s | %s %s", kernel, field("file"), field("line"), from, space, kind)
        if (!(where in line_sum)) line[++lines] = where
        line_sum[where] += taken; line_best[where] += ideal; line_requests[where] += field("requests")
    }
    END {
        printf "%-48s | sectors loaded | x ideal |  stored | x ideal | wavefronts | x ideal\n", "kernel"
        for (i = 1; i <= kernels; i++) {
            k = order[i]
            printf "%-48s | %14d | %7s | %7d | %7s | %10d | %7s\n", k,
                sum[k, "load"], ratio(sum[k, "load"], best[k, "load"]),
                sum[k, "store"], ratio(sum[k, "store"], best[k, "store"]),
                sum[k, "shared"], ratio(sum[k, "shared"], best[k, "shared"])
        }
        if (only_kernels) exit
        print ""
        print "more than 1.1 times the ideal:"
        for (i = 1; i <= lines; i++) {
            w = line[i]
            if (line_sum[w] <= 1.1 * line_best[w]) continue
            printf "%s | %.2f for each of %d requests, ideal %.2f\n", w, line_sum[w] / line_requests[w],
                line_requests[w], line_best[w] / line_requests[w]
            found++
        }
        printf "%d kernels, %d lines above 1.1 times the ideal\n", kernels, found
    }' "$@"
}

if [ "${1:-}" = --table ] && [ $# -gt 1 ]; then
    shift
    table "$@"
    exit
fi
if [ $# -ne 2 ]; then
    echo "usage: sh dev/gpu/sectors.sh BUILD FP32|BF16|FP16, or --table FILE..." >&2
    exit 2
fi
ladders=$1/emulated-count-$2-ladders
counts=$1/sectors-$2.jsonl
rm -f "$counts"
export EMULATE_COUNT="$counts"
failed=0
run() {
    "$@" > "$counts.out" 2>&1 && return
    failed=1
    echo "FAILED  $*"
    tail -n 5 "$counts.out"
}
shipped() { run "$ladders" "$@" --rung shipped; }
for heads in "--heads 4 --kv-heads 4 --head-size 64" "--heads 4 --kv-heads 2 --head-size 128"; do
    # shellcheck disable=SC2086  # several words
    for ladder in attention_forward attention_backward; do shipped $ladder --batch 1 --seq 128 $heads; done
    # shellcheck disable=SC2086
    shipped rope --batch 1 --seq 32 $heads
    # shellcheck disable=SC2086
    shipped qk_norm --rows 32 $heads
    # shellcheck disable=SC2086
    shipped heads --rows 32 $heads
done
for channels in 768 1600; do
    shipped layernorm --rows 32 --channels $channels
    shipped embedding --batch 2 --seq 16 --channels $channels --vocab 50257
    shipped matmul --rows 64 --outputs $channels --inputs 64
done
run "$ladders" matmul --rows 128 --outputs 128 --inputs 64 --rung plain  # sizes that are not multiples of 8 use it
shipped gelu --rows 8 --ffn 3072
shipped classifier --rows 2 --vocab 50257
shipped nf4 --rows 64 --channels 768
shipped leaves --count 8 --rows 4 --channels 768 --vocab 50257
shipped adamw --parameters 65536
shipped optimizers --rows 256 --columns 768
shipped muon --rows 64 --cols 128
shipped exact_add --elements 65536
shipped global_norm --elements 65536
table "$counts"

# Variants for one element, <1>, are for rows at any alignment, which cannot match sectors.
others=$1/sectors-$2-others.jsonl
EMULATE_COUNT=$counts.out
rm -f "$EMULATE_COUNT"
"$1/emulated-count-$2-test_cuda" --shapes tiny > "$others" 2>&1 || {
    failed=1
    echo "FAILED  $1/emulated-count-$2-test_cuda"
    tail -n 5 "$others"
}
awk -F'"kernel": "' '
    { split($2, name, "\"") }
    NR == FNR { seen[name[1]]; next }
    !(name[1] in seen) && name[1] !~ /<1[,>]|^test_/' "$counts" "$EMULATE_COUNT" > "$others"
rm -f "$EMULATE_COUNT"
echo
echo "Kernels that no ladder has, at the small and odd sizes of the tests:"
only_kernels=yes table "$others"  # these sizes do not match sectors, so lines would say little
exit $failed
