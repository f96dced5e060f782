# tally.sh: sourced by test.sh and test_emulated.sh, whose parts run in parallel.

# The tests' files are in /dev/shm if it has 4 GB and allows programs to be started from it: on a disk most of the time
# is spent waiting for flushes. TMPDIR chooses another directory.
if [ -z "${TMPDIR:-}" ]; then
    probe=/dev/shm/llmtrain-probe-$$
    df -Pk /dev/shm 2> /dev/null | awk '$4 > 4000000 { room = 1 } END { exit !room }' && echo true > "$probe" &&
        chmod +x "$probe" && "$probe" && export TMPDIR=/dev/shm
    rm -f "$probe"
fi

# shellcheck disable=SC2154  # build is set by the script
tally_out=$build/tally-$(echo "$0-${part:-}" | tr / -).out

# tally COMMAND...: runs a test program that ends with 'N passed, N failed'. Leaves its output in $tally_out, its exit
# status in $status, and the two numbers in $good and $bad; a program without them, or with a bad exit status but no
# failures, counts as one failure.
tally() {
    "$@" > "$tally_out" 2>&1
    status=$?
    good=$(sed -n 's/^\([0-9]*\) passed, .*/\1/p' "$tally_out" | tail -n 1)
    bad=$(sed -n 's/^[0-9]* passed, \([0-9]*\) failed.*/\1/p' "$tally_out" | tail -n 1)
    [ -n "$good" ] || { good=0; bad=1; }
    [ "$status" -eq 0 ] || [ "$bad" -gt 0 ] || bad=1
}
