# watch.sh: functions of node.sh and nodes.sh, which start processes and then wait for all of them here.

LOOK_EVERY=0.2  # seconds between two checks of the processes
KILL_EVERY=5    # seconds between two attempts to kill
STOPPED=75      # exit code of a process that a signal stopped and that has saved; the others get the time to save too

# send SIGNAL [-]: to every process that runs; with '-' also to its process group.
send() {
    for process in $running; do
        kill -s "$1" -- "${2:-}${process#*:}" 2> /dev/null
    done
}

# watch GRACE: waits for the processes in $running, words NAME:PID. When one fails it calls `failed NAME CODE`, and from
# GRACE seconds later `kill_all`, every KILL_EVERY seconds, until all have ended. Sets $code to the exit code of the
# first that failed; otherwise to STOPPED if one ended with that, or to 0.
watch() {
    code=0
    deadline=
    while [ -n "$running" ]; do
        sleep "$LOOK_EVERY"
        left=
        for process in $running; do
            if kill -0 "${process#*:}" 2> /dev/null; then
                left="$left $process"
                continue
            fi
            wait "${process#*:}"
            status=$?
            if [ "$status" -eq 0 ] || { [ "$code" -ne 0 ] && [ "$code" -ne "$STOPPED" ]; }; then continue; fi
            code=$status
            [ "$status" -ne "$STOPPED" ] || continue
            deadline=$(($(date +%s) + $1))
            failed "${process%:*}" "$status"
        done
        running=${left# }
        if [ -n "$running" ] && [ -n "$deadline" ] && [ "$(date +%s)" -ge "$deadline" ]; then
            kill_all
            deadline=$(($(date +%s) + KILL_EVERY))
        fi
    done
}

# ending CODE: how a process ended, in words.
ending() {
    if [ "$1" -gt 128 ] && signal=$(kill -l "$1" 2> /dev/null); then
        echo "was terminated by SIG$signal"
    else
        echo "ended with exit code $1"
    fi
}

# need_number FLAG VALUE MIN: exits unless the value is a whole number, MIN or more, of at most six digits.
need_number() {
    case $2 in
        '' | *[!0-9]* | ???????*) ;;
        *) [ "$2" -lt "$3" ] || return 0 ;;
    esac
    echo "${0##*/}: $1 is '$2'; give a whole number, $3 or more" >&2
    exit 2
}
