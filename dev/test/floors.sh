# floors.sh: our headers include only headers below them: at their top, without a cycle; and the reading path has not
# grown. Prints the order from the lowest level up. Run it in the root of the checkout.
set -u
headers=$(git ls-files '*.h' '*.cuh' | grep -E '^(llmtrain/|tools/|[^/]*$)') || exit 1
passed=0
failed=0
verdict() { if [ "$2" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED  $1"; fi; }

edges=
for header in $headers; do
    # No header of ours may be included after the first line of code, or a comment between lines of code.
    awk -v file="$header" '
        /^[ \t]*#[ \t]*include[ \t]*"/ { if (code) { print file ":" FNR ": included after code: " $0; bad = 1 } next }
        /^[ \t]*(#|\/\/|$)/ || /\\$/ || continued { continued = /\\$/; next }
        { code = 1 }
        END { exit bad }' "$header"
    verdict "$header includes our headers at its top" $?
    folder=$(dirname "$header")
    for name in $(sed -n 's/^[ \t]*#[ \t]*include[ \t]*"\([^"]*\)".*/\1/p' "$header"); do
        target=$(cd "$folder" 2> /dev/null && realpath --relative-to="$OLDPWD" "$name" 2> /dev/null)
        [ -f "$target" ] && edges="$edges $target $header"
    done
done
# shellcheck disable=SC2086
order=$(printf '%s %s\n' $edges | tsort 2>&1)
! echo "$order" | grep -q 'loop'
verdict "no header includes itself through others: $(echo "$order" | grep -A 9 loop | tr '\n' ' ')" $?
path=$(sh dev/sizes.sh | sed '/^folders/,$d')
! echo "$path" | grep 'over by' && [ "$(echo "$path" | grep -c ' ok$')" -eq 9 ]
verdict "the files of the reading path keep to their limits" $?
echo "from the lowest floor up: $order" | tr '\n' ' '
echo
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
