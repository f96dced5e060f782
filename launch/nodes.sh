#!/bin/sh
# nodes.sh: starts the ranks of several machines, with ssh and nothing else.
#
#     sh launch/nodes.sh --hosts node1,node2 --ranks 8 --env NCCL_SOCKET_IFNAME=eth0 -- ./train --data ... --out ...
#
#   --hosts LIST        names as ssh takes them, separated by commas or spaces; rank 0 is on the first
#   --master ADDRESS    where the others reach the first host, if not by the name in --hosts
#   --port P            a free port there (29500)
#   --env NAME=VALUE    a variable for the ranks; --env NAME: with the value that it has here. No other is passed on
#   --ssh CMD           what to call in place of `ssh -o BatchMode=yes -o ServerAliveInterval=15`, with a host and a
#                       command of plain words after it; it must pass on standard input, output, and the exit code
#   --ranks N, --logs DIR, --bind on|off, --grace S
#                       for node.sh, which this starts on every host (see there); the same number of ranks on each
#
# Or by hand, where ssh cannot be used: the same command on every host, with its place in the list before it:
#
#     NODE_RANK=1 sh launch/nodes.sh --hosts node1,node2 ...
#
# On every host there must be this folder and the working directory, at the same paths, with the program and the data.
# The console shows what rank 0 prints; each host keeps the logs of its own ranks. SIGTERM, SIGINT and SIGHUP reach all
# ranks as SIGTERM, SIGUSR1 as itself. When one host has failed, the others have --grace seconds to end; where ssh dies,
# and where this script does, the ranks get SIGTERM. The exit code is that of the first host that failed.
set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 1
. "$here/watch.sh"

hosts='' ssh='ssh -o BatchMode=yes -o ServerAliveInterval=15' master='' port=29500 grace=60 variables='' flags=''
say() { echo "nodes.sh: $*" >&2; }
wrong() { say "$@"; exit 2; }

# quote TEXT: as a word that a shell reads as TEXT.
quote() {
    printf "'"
    printf '%s' "$1" | sed "s/'/'\\\\''/g"
    printf "' "
}

while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) sed -n '2,/^set -u/s/^#\{1\} \{0,1\}//p' "$0"; exit 0 ;;
        --hosts | --master | --port | --env | --ssh | --ranks | --logs | --bind | --grace)
            [ $# -ge 2 ] || wrong "$1 needs a value (see --help)"
            case $1 in
                --hosts) hosts=$(echo "$2" | tr ',\n' '  ') ;;
                --master) master=$2 ;;
                --port) need_number "$1" "$2" 1; port=$2 ;;
                --ssh) ssh=$2 ;;
                --env)
                    name=${2%%=*}
                    case $name in '' | [0-9]* | *[!A-Za-z0-9_]*) wrong "--env is '$2'; give NAME=VALUE, or NAME" ;; esac
                    case $2 in
                        *=*) value=${2#*=} ;;
                        *)
                            eval "[ -n \"\${$name+set}\" ]" || wrong "--env $name: it is not set here; give $name=VALUE"
                            eval "value=\$$name" ;;
                    esac
                    variables="${variables}export $name=$(quote "$value")
" ;;
                *)
                    [ "$1" != --grace ] || { need_number "$1" "$2" 0; grace=$2; }
                    flags="$flags$1 $(quote "$2")" ;;
            esac
            shift 2 ;;
        --) shift; break ;;
        *) wrong "'$1' is not a flag (see --help); what to run follows after --" ;;
    esac
done
[ $# -gt 0 ] || wrong "nothing to run; put the command after --, as in: nodes.sh --hosts a,b --ranks 2 -- ./train ..."
nodes=$(echo "$hosts" | wc -w)
[ "$nodes" -gt 0 ] || wrong "give --hosts, the machines to run on, as in --hosts node1,node2"
case $here in
    *[!A-Za-z0-9._/+@%,-]*)
        wrong "the path $here would have to be quoted for ssh; use one of letters, digits and ._/+@%,-" ;;
esac
for host in $hosts; do
    [ -n "$master" ] || master=${host#*@}
done

command=
for word in "$@"; do
    command="$command$(quote "$word")"
done

# node_script I: what host I has to do before node.sh reads its arguments.
node_script() {
    printf 'cd %s|| exit 1\n' "$(quote "$PWD")"
    printf '%s' "$variables"
    printf 'set -- --nodes %s --node-rank %s --master %s--port %s ' "$nodes" "$1" "$(quote "$master")" "$port"
    printf '%s-- %s\n' "$flags" "$command"
}

if [ -n "${NODE_RANK:-}" ]; then
    need_number NODE_RANK "$NODE_RANK" 0
    eval "$(node_script "$NODE_RANK")"
    exec sh "$here/node.sh" "$@"
fi
variables="${variables}export LLMTRAIN_RUN_ID=$(quote "${LLMTRAIN_RUN_ID:-$(uname -n).$$.$(date +%s)}")
"

work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
: > "$work/signals"
trap 'echo TERM >> "$work/signals"' TERM INT HUP
trap 'echo USR1 >> "$work/signals"' USR1

# host_input I: what host I reads: its script, then signals as they come, and empty lines as long as this script lives.
host_input() {
    trap '' TERM INT HUP USR1
    trap - EXIT
    node_script "$1"
    echo '# end of the script'
    exec 3< "$work/signals"
    while kill -0 $$ 2> /dev/null; do
        cat <&3
        echo
        sleep 0.5
    done
}

running=
kill_all() {
    say "kills what still runs: $(for process in $running; do printf '%s ' "${process%:*}"; done)"
    [ ! -s "$work/killed" ] || send KILL -
    echo KILL | tee -a "$work/signals" > "$work/killed"
}

# failed HOST CODE
failed() {
    say "$1 $(ending "$2"); the others have $grace s to end"
}

node=0
for host in $hosts; do
    # shellcheck disable=SC2086  # $ssh is several words
    host_input "$node" | setsid $ssh "$host" sh "$here/node.sh" --from-stdin &
    running="$running $host:$!"
    node=$((node + 1))
done

watch "$grace"
exit "$code"
