# floors.sh: our headers include only headers below them: at their top, from their own floor or a lower one, without a
# cycle; so folders form no circle either. And the reading path, and what comes with it, keep to their limits. Prints
# the order of the headers from the lowest up. Run it in the root of the checkout.
set -u
floors="ops base kernels model ranks llmtrain.h text checkpoint run tools"
headers=$(git ls-files '*.h' '*.cuh' | grep -E '^(llmtrain/|tools/|[^/]*$)') || exit 1
passed=0
failed=0
verdict() { if [ "$2" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED  $1"; fi; }

# The floor of a header: its folder, or the one where it stands in the root.
floor() {
    case $1 in
        llmtrain/*) echo "$1" | cut -d / -f 2 ;;
        kernels_cpu.h | kernels.cuh) echo kernels ;;
        */*) dirname "$1" ;;
        *) echo "$1" ;;
    esac
}

# The floors above one.
above() { echo " $floors " | sed "s/.* $1 / /"; }

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
    echo " $floors " | grep -qF " $(floor "$header") "
    verdict "$header is on one of the floors: $floors" $?
    higher=$(above "$(floor "$header")")
    for name in $(sed -n 's/^[ \t]*#[ \t]*include[ \t]*"\([^"]*\)".*/\1/p' "$header"); do
        target=$(cd "$folder" 2> /dev/null && realpath --relative-to="$OLDPWD" "$name" 2> /dev/null)
        [ -f "$target" ] || target=$name
        case $target in dev/*) continue ;; esac  # the emulator's, in its builds alone
        [ -f "$target" ] && edges="$edges $target $header"
        ! echo "$higher" | grep -qF " $(floor "$target") "
        verdict "$header, of $(floor "$header"), includes $target, of a higher floor, $(floor "$target")" $?
    done
done
# shellcheck disable=SC2086
order=$(printf '%s %s\n' $edges | tsort 2>&1)
! echo "$order" | grep -q 'loop'
verdict "no header includes itself through others: $(echo "$order" | grep -A 9 loop | tr '\n' ' ')" $?
sizes=$(sh dev/sizes.sh) && [ "$(echo "$sizes" | grep -c ' ok$')" -eq 15 ]
verdict "the reading path and what comes with it keep to their limits: $(echo "$sizes" | grep 'over by')" $?
echo "from the lowest floor up: $order" | tr '\n' ' '
echo
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
