# tally.sh: sourced by test.sh and test_emulated.sh.

# tally COMMAND...: runs a test program that ends with 'N passed, N failed'. Leaves its output in $build/tally.out, its
# exit status in $status, and the two numbers in $good and $bad; a program without them, or that ends badly though it
# counts no failure, has one failure.
# shellcheck disable=SC2154  # build is set by the script
tally() {
    "$@" > "$build/tally.out" 2>&1
    status=$?
    good=$(sed -n 's/^\([0-9]*\) passed, .*/\1/p' "$build/tally.out" | tail -n 1)
    bad=$(sed -n 's/^[0-9]* passed, \([0-9]*\) failed.*/\1/p' "$build/tally.out" | tail -n 1)
    [ -n "$good" ] || { good=0; bad=1; }
    [ "$status" -eq 0 ] || [ "$bad" -gt 0 ] || bad=1
}
