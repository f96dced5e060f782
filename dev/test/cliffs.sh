# cliffs.sh BUILD PROGRAM [--print]: no CPU operation, as measured by BUILD/PROGRAM (dev/bench/bench.c), has become many
# times slower. Each must reach a fifth of the share of its bound (arithmetic or memory, as dev/bench/bench.c explains,
# measured in the same run) that the table "Share of its bound" of dev/bench/RESULTS.md has for the kernels of the
# build. A loop that is no longer vectorized falls below that in every measurement. With one thread: two processors
# without a common cache have more memory bandwidth than two with one, but exchange data slowly, and other work may
# delay one of two threads. Failures are measured again up to six times, after longer and longer pauses.
# With --print: prints the shares measured here.
set -u
build=$1 program=$1/$2

# measure: adds lines to cliffs.txt, an operation and its share over all its calls and shapes, of two models.
measure() {
    for model in bytes:5M demo; do
        env -u OMP_WAIT_POLICY "$program" --model $model --batch 4 --seq 256 --steps 3 --threads 1 \
            --json "$build/cliffs.json" > "$build/cliffs.out" && cat "$build/cliffs.json"
    done | sed -n 's/.*{"name": "\([a-z_]*\)".*"ms": \([^,]*\),.*"of_bound": \([^}]*\)}.*/\1 \2 \3/p' | awk '
        { ms[$1] += $2; bound[$1] += $2 * $3 }
        END { for (name in ms) print name, 100 * bound[name] / ms[name] }' >> "$build/cliffs.txt"
}

# judge KERNELS: prints operation and best share; then ok, FAILED or unknown.
judge() {
    awk -v kernels="$1" '
        FNR == NR && /^\| operation \|/ { for (i = 2; i < NF; i++) if ($i == kernels) column = i }
        FNR == NR && !/^\|/ { column = 0 }
        FNR == NR { if (column && $1 == "|") known[$2] = $column; next }
        $2 > best[$1] { best[$1] = $2 }
        END {
            for (name in best) {
                verdict = "unknown"
                if (name in known) verdict = best[name] >= known[name] / 5 ? "ok" : "FAILED"
                print name, best[name], verdict
            }
        }' dev/bench/RESULTS.md "$build/cliffs.txt" | sort
}

kernels=$("$program" --model gpt2:tiny --batch 1 --seq 16 --steps 1 | awk 'NR == 1 { print $5 }')
: > "$build/cliffs.txt"
measure
for pause in 0 0 1 2 4 8; do
    if [ "${3:-}" = --print ] || judge "$kernels" | grep -q FAILED; then
        sleep $pause
        measure
    fi
done
judge "$kernels" > "$build/cliffs.judged"
sed "s/^/$kernels /" "$build/cliffs.judged"
passed=$(grep -c 'ok$' "$build/cliffs.judged")
failed=$(grep -c 'FAILED$' "$build/cliffs.judged")
[ $((passed + failed)) -gt 0 ] || echo "skipped the speeds with $kernels: dev/bench/RESULTS.md has no column for them"
[ -s "$build/cliffs.judged" ] || { echo "FAILED  $program printed no shares"; failed=$((failed + 1)); }
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
