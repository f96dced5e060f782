# mutants.sh: tests the tests. Plants bugs one at a time, each in a copy of the sources, and runs the suites that should
# find it.
#
#   sh dev/test/mutants.sh BUILD [ONLY [SAMPLE [LIST]]]      as `make mutants ONLY=text SAMPLE=10` does
#
# ONLY selects the mutants whose lines in the list contain it; SAMPLE selects that many of those, evenly. Exit code 0:
# every mutant applies and builds, and is caught or marked in the list as one that survives, with the reason. The list,
# dev/test/mutants.txt, explains its format.

only=$2 sample=${3:-0} list=${4:-dev/test/mutants.txt} work=$1/mutants-one
jobs=${JOBS:-$(nproc 2> /dev/null || echo 1)}
rm -rf "$work" && mkdir -p "$work/tmp" && work=$(cd "$work" && pwd) || exit 1
export LC_ALL=C OMP_WAIT_POLICY=passive TMPDIR="$work/tmp"

# One file per mutant: what is wrong; the suites, one per line; before and after.
awk -v work="$work" -v only="$only" -v sample="$sample" '
    function end(i) { if (text != "" && index(text, only)) texts[count++] = text; text = "" }
    /^#/ || /^$/ { next }
    /^= / { end() }
    { text = text $0 "\n" }
    END {
        end()
        if (sample == 0 || sample > count) sample = count
        for (i = 0; i < sample; i++) {
            file = sprintf("%s/%04d.mutant", work, i)
            printf "%s", texts[int(i * count / sample)] > file
            close(file)
        }
    }' "$list"

# The only line of the sources that contains the text of $from, as FILE:NUMBER; nothing if there are none or several.
find_line() {
    find . \( -path ./dev -o -path ./build -o -name 'test_*' \) -prune -o -path "./$in" -name '*.[ch]*' -type f -exec \
        awk 'index($0, ENVIRON["from"]) { at = FILENAME ":" FNR; count++ } END { if (count == 1) print at }' {} +
}

# caught SUITE ARGUMENT...: whether a suite fails; it is stopped at the first failure; its output is in suite.out.
caught() {
    suite=$1 needs=$1
    shift
    case $suite in
        test_data | test_tokenizer) needs="$suite tokenize" ;;
        test_trace) needs="$suite train-FP32 tokenize corpus" ;;
        test_ranks | test_supervise | soak)
            needs="$suite train-FP32"
            set -- --train build/train-FP32 "$@" ;;
        test_evaluate)
            needs="$suite evaluate-FP32"
            set -- --evaluate build/evaluate-FP32 "$@" ;;
        test_plan)
            needs="$suite plan-BF16 train-BF16"
            set -- --plan build/plan-BF16 --train build/train-BF16 "$@" ;;
        test_convert)
            needs="$suite export train-FP32"
            set -- --export build/export --train build/train-FP32 "$@" ;;
        test_text)
            needs="$suite tokenize train-FP32"
            set -- --tokenize build/tokenize --train build/train-FP32 "$@" ;;
        test_errors)
            needs="$suite train-FP32 generate-FP32 tokenize corpus"
            set -- --train build/train-FP32 --generate build/generate-FP32 --tokenize build/tokenize \
                --corpus build/corpus "$@" ;;
    esac
    # shellcheck disable=SC2046,SC2086
    make -s CUDA=off MPI=off B=build OPTIMIZE="-O1 -march=native" WARNINGS=-w \
        $(printf 'build/%s ' $needs) > suite.out 2>&1 || { echo "does not build" > verdict && return 1; }
    timeout 600 stdbuf -oL "build/$suite" "$@" 3<&- > suite.out 2>&1 &  # 3 is the list of suites
    while kill -0 $! 2> /dev/null; do
        grep -qE '^ *FAILED|FAILED$' suite.out && kill $! 2> /dev/null
        sleep 0.1
    done
    ! wait $!
}

# Tries a mutant in a copy of the sources, the current directory. Leaves the result in `verdict`.
try() {
    from=$(sed -n 's/^- //p' "$1") to=$(sed -n 's/^+ //p' "$1") reason=$(sed -n 's/^survives: //p' "$1")
    in=$(sed -n 's/^@ //p' "$1")
    in=${in:-*}
    export from to
    line=$(find_line)
    file=${line%:*}
    echo "does not apply" > verdict
    [ -n "$line" ] || return
    echo "survives" > verdict
    [ -z "$reason" ] || return
    cp "$file" original
    awk -v number="${line#*:}" '
        FNR == number {
            at = index($0, ENVIRON["from"])
            $0 = substr($0, 1, at - 1) ENVIRON["to"] substr($0, at + length(ENVIRON["from"]))
        }
        { print }' original > "$file"
    echo "SURVIVED" > verdict
    sed -n 's/^> //p' "$1" > suites
    while read -r suite arguments <&3; do
        # shellcheck disable=SC2086
        caught "$suite" $arguments && echo "caught" > verdict && break
    done 3< suites
    cp original "$file"
}

# mine NUMBER: whether this worker takes the item with that number.
mine() { [ $(($1 % jobs)) -eq "$worker" ]; }

# Runs the suites without a mutant, and then tries the mutants; of both, those that belong to this worker.
run_worker() {
    worker=$1 number=0
    tree=$work/tree$worker
    mkdir -p "$tree/build" && tar -cf - --exclude=./build --exclude=./.git . | tar -xf - -C "$tree"
    cd "$tree" || exit 1
    while read -r suite arguments <&3; do
        number=$((number + 1))
        # shellcheck disable=SC2086
        if mine "$number" && { caught "$suite" $arguments || [ -e verdict ]; }; then
            echo "FAILS WITHOUT A MUTANT  $suite $arguments: $(tail -n 1 suite.out)"
            echo "FAILS WITHOUT A MUTANT" > "$work/suite$number.verdict"
        fi
        rm -f verdict
    done 3< "$work/suites"
    number=0
    for mutant in "$work"/*.mutant; do
        number=$((number + 1))
        mine "$number" || continue
        started=$(date +%s)
        try "$mutant"
        { cat verdict; [ -z "$reason" ] || echo "$reason"; } > "${mutant%.mutant}.verdict"
        title=$(sed -n 's/^= //p' "$mutant")
        echo "$(cat verdict)  $title${file:+ (${file#./})}, $(($(date +%s) - started)) s${reason:+: $reason}"
    done
}

sed -n 's/^> //p' "$work"/*.mutant | sort -u > "$work/suites"
for job in $(seq 0 $((jobs - 1))); do run_worker "$job" & done
wait
for verdict in "$work"/*.verdict; do head -n 1 "$verdict"; done | sort | uniq -c | awk '
    { count = $1; $1 = ""; of[substr($0, 2)] = count; all += count }
    END {
        all -= of["FAILS WITHOUT A MUTANT"]
        printf "%d mutants: %d caught (%.1f%%), %d survive for a reason, %d survived, ", all, of["caught"],
            all ? 100 * of["caught"] / all : 0, of["survives"], of["SURVIVED"]
        printf "%d do not apply, %d do not build; %d suites fail without a mutant\n", of["does not apply"],
            of["does not build"], of["FAILS WITHOUT A MUTANT"]
        exit all == 0 || of["caught"] + of["survives"] < all || of["FAILS WITHOUT A MUTANT"] > 0
    }'
