#!/bin/sh
# nodes.sh: starts the ranks of several machines through ssh, and ends them all when one fails.
#
#     sh launch/nodes.sh --hosts node1,node2 --ranks 8 --env NCCL_SOCKET_IFNAME=eth0 -- ./train --data ... --out ...
#
#   --hosts LIST        host names for ssh, separated by commas or spaces; rank 0 runs on the first
#   --master ADDRESS    address of the first host as the others reach it; default: its name in --hosts
#   --port P            port on which rank 0 listens, free on the first host (29500)
#   --env NAME=VALUE    sets a variable for all ranks; --env NAME: with the value that it has here. No other variable
#                       of this shell reaches the ranks
#   --ssh CMD           command in place of `ssh -o BatchMode=yes -o ServerAliveInterval=15`. It gets a host and a
#                       command of plain words, and must pass on standard input, output, and the exit code
#   --ranks N, --logs DIR, --bind on|off, --grace S
#                       for each machine: see node.sh --help, which this starts on every host
#
# Without ssh: run the same command on every host by hand, with the host's index in the list before it:
#
#     NODE_RANK=1 sh launch/nodes.sh --hosts node1,node2 ...
#
# Every host needs this directory and the working directory at the same paths, with the program and the data. The
# console shows the output of rank 0; each host keeps the logs of its own ranks. SIGTERM, SIGINT and SIGHUP reach all
# ranks as SIGTERM, SIGUSR1 as itself. When a host fails, the others have --grace seconds to end. When ssh or this
# script dies, the ranks get SIGTERM. The exit code is that of the first host that failed; 2 if a flag is wrong.
set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 1
. "$here/watch.sh"

hosts='' ssh='ssh -o BatchMode=yes -o ServerAliveInterval=15' master='' port=29500 grace=60 variables='' flags=''
say() { echo "nodes.sh: $*" >&2; }
wrong() { say "$@"; exit 2; }

# quote TEXT: a word that a shell reads as TEXT.
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
        wrong "the path $here would have to be quoted for ssh; use a path of letters, digits and ._/+@%,-" ;;
esac
for host in $hosts; do
    [ -n "$master" ] || master=${host#*@}
done

command=
for word in "$@"; do
    command="$command$(quote "$word")"
done

# node_script I: the script by which host I gets its directory, variables, and the arguments of node.sh.
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

# host_input I: the standard input of host I: its script, then signals as they come, and empty lines as a sign of life.
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
    say "killing what still runs: $(for process in $running; do printf '%s ' "${process%:*}"; done)"
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
