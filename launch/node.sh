#!/bin/sh
# node.sh: starts the ranks of one machine, one process per GPU, and ends them all when one fails.
#
#     sh launch/node.sh -- ./train --data 'data/x_train_*.bin' --out runs/x          one rank per GPU
#     sh launch/node.sh --ranks 4 -- ./train ...                                     four, with or without GPUs
#     sh launch/node.sh --nodes 2 --node-rank 1 --master 10.0.0.1 -- ./train ...     the second of two machines
#
#   --ranks N         number of ranks on this machine; default: the GPUs of CUDA_VISIBLE_DEVICES, or of nvidia-smi
#   --logs DIR        directory for DIR/rank_R.log, the output of rank R (logs); the console shows rank 0 only
#   --bind on|off     pin each rank to the cores near its GPU or, without GPUs, to an equal part of all cores
#                     (on, where taskset and lscpu are installed)
#   --grace S         seconds from the failure of one rank until the others are killed (60)
#   --nodes N         number of machines, each with the same number of ranks (1); nodes.sh starts all of them at once
#   --node-rank I     index of this machine, from 0 (0)
#   --master ADDRESS  address of machine 0, where rank 0 listens; required with more than one machine
#   --port P          port on which rank 0 listens (29500; with one machine: a free port)
#
# Each rank gets the variables that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
# MASTER_PORT; and OMP_NUM_THREADS, its part of the cores, unless that is set. SIGTERM, SIGINT and SIGUSR1 are passed to
# the ranks, SIGHUP as SIGTERM.
#
# Exit codes: that of the first rank that failed, 128 + the signal if a signal ended it; 75 if ranks were stopped and
# saved, and none failed; 2 if a flag is wrong.
#
# When to use it: `./train --ranks N` forks N ranks by itself and is enough to try several ranks on one machine. node.sh
# adds cores near each GPU, a log per rank, the exit code of the rank that failed first, a program around each rank
# (-- nsys profile ./train ...), and more machines. Under Slurm use slurm.sbatch.
set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 1
. "$here/watch.sh"

machine=$(uname -n)
ranks='' logs=logs bind=on grace=60 nodes=1 node_rank=0 master='' port=''
say() { echo "node.sh: $*" >&2; }
wrong() { say "$@"; exit 2; }

# nodes.sh sends the arguments on standard input, as a script that ends with this line; signals follow it.
END_OF_SCRIPT='# end of the script'
remote=
if [ "${1:-}" = --from-stdin ]; then
    remote=yes
    script=
    while IFS= read -r line && [ "$line" != "$END_OF_SCRIPT" ]; do
        script="$script$line
"
    done
    [ "$line" = "$END_OF_SCRIPT" ] || { say "no arguments on standard input; --from-stdin is for nodes.sh"; exit 1; }
    eval "$script"
fi

while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) sed -n '2,/^set -u/s/^#\{1\} \{0,1\}//p' "$0"; exit 0 ;;
        --ranks | --logs | --bind | --grace | --nodes | --node-rank | --master | --port)
            [ $# -ge 2 ] || wrong "$1 needs a value (see --help)"
            case $1 in
                --ranks) need_number "$1" "$2" 1; ranks=$2 ;;
                --logs) logs=$2 ;;
                --bind) bind=$2 ;;
                --grace) need_number "$1" "$2" 0; grace=$2 ;;
                --nodes) need_number "$1" "$2" 1; nodes=$2 ;;
                --node-rank) need_number "$1" "$2" 0; node_rank=$2 ;;
                --master) master=$2 ;;
                --port) need_number "$1" "$2" 1; port=$2 ;;
            esac
            shift 2 ;;
        --) shift; break ;;
        *) wrong "'$1' is not a flag (see --help); what to run follows after --" ;;
    esac
done
[ $# -gt 0 ] || wrong "nothing to run; put the command after --, as in: node.sh --ranks 2 -- ./train --data ..."
command -v "$1" > /dev/null || wrong "there is no program $1 on $machine; build it, or give its path"
command -v setsid > /dev/null || wrong "there is no setsid on $machine; install util-linux"
case $bind in on | off) ;; *) wrong "--bind is '$bind'; give on or off" ;; esac
[ "$node_rank" -lt "$nodes" ] || wrong "--node-rank is $node_rank of $nodes; machines count from 0 to --nodes less 1"
[ "$nodes" -eq 1 ] || [ -n "$master" ] || wrong "--nodes is $nodes; give --master too, the address of machine 0"

# GPUs in the order of their slots, both here and in CUDA.
export CUDA_DEVICE_ORDER=PCI_BUS_ID
gpus=
if command -v nvidia-smi > /dev/null; then
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then gpus=$(echo "$CUDA_VISIBLE_DEVICES" | tr ',' ' ')
    else gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader | tr '\n' ' ') || gpus=; fi
fi
if [ -z "$ranks" ]; then
    ranks=$(echo "$gpus" | wc -w)
    [ "$ranks" -gt 0 ] || wrong "no GPU was found on $machine; say how many ranks to start: --ranks N"
fi

# A port that no socket uses, outside the range from which systems choose ports by themselves. A link reserves it until
# this script ends, so that no other node.sh on this machine takes it.
lock=
if [ -z "$port" ] && [ "$nodes" -eq 1 ]; then
    busy=$(cat /proc/net/tcp /proc/net/tcp6 2> /dev/null | awk '{ split($2, at, ":"); print at[2] }')
    port=$((20000 + $$ % 12000))
    while
        lock=/tmp/llmtrain-port-$port
        kill -0 "$(readlink "$lock")" 2> /dev/null || rm -f "$lock" 2> /dev/null
        echo "$busy" | grep -qx "$(printf %04X "$port")" || ! ln -s $$ "$lock" 2> /dev/null
    do port=$((port + 1)); done
fi
[ "$nodes" -gt 1 ] || [ -n "${LLMTRAIN_RUN_ID:-}" ] || LLMTRAIN_RUN_ID=$machine.$$.$(date +%s)
[ -z "${LLMTRAIN_RUN_ID:-}" ] || export LLMTRAIN_RUN_ID
export WORLD_SIZE=$((nodes * ranks)) LOCAL_WORLD_SIZE="$ranks"
export MASTER_ADDR="${master:-127.0.0.1}" MASTER_PORT="${port:-29500}"

# expand LIST: '0-2,8' as lines 0, 1, 2, 8.
expand() {
    echo "$1" | tr ',' '\n' | awk -F- 'NF { last = NF > 1 ? $2 : $1; for (i = $1 + 0; i <= last + 0; i++) print i }'
}

# both LINES LINES: the lines of the second that are in the first.
both() {
    printf '%s\n\n%s\n' "$1" "$2" | awk '!NF { second = 1; next } !second { known[$1]; next } $1 in known'
}

# The cores that this script may use, one per line, sorted so that neighbors share a NUMA node or a core.
cores=$(expand "$(sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' /proc/self/status)")
if command -v lscpu > /dev/null; then
    cores=$(both "$cores" "$(lscpu -p=CPU,NODE,CORE | grep -v '^#' | sort -t, -k2n -k3n -k1n | cut -d, -f1)")
fi
core_count=$(echo "$cores" | wc -w)
per_rank=$((core_count / ranks))
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    export OMP_NUM_THREADS="$per_rank"
    [ "$per_rank" -gt 0 ] || OMP_NUM_THREADS=1
fi
command -v taskset > /dev/null && command -v lscpu > /dev/null || bind=off

# cores_of LOCAL_RANK: its cores, as in 0,1,2; empty: all.
cores_of() {
    gpu=$(echo "$gpus" | awk -v i="$1" '{ print $(i + 1) }')
    if [ -n "$gpu" ]; then
        # nvidia-smi writes eight digits where the system has four: 00000000:3B:00.0
        slot=$(nvidia-smi -i "$gpu" --query-gpu=pci.bus_id --format=csv,noheader | tr 'A-F' 'a-f' | sed 's/^0000//')
        near=$(cat "/sys/bus/pci/devices/$slot/local_cpulist" 2> /dev/null) || return 0
        both "$(expand "$near")" "$cores"
    elif [ "$per_rank" -gt 0 ]; then
        echo "$cores" | awk -v i="$1" -v n="$core_count" -v ranks="$ranks" '
            NR > int(i * n / ranks) && NR <= int((i + 1) * n / ranks)'
    fi | paste -s -d , -
}

# Each rank leads a process group of its own. Ctrl-C at the terminal does not reach it, so it gets the signal once, from
# here. It dies with this script, however that ends. A shell ignores SIGINT in background processes; programs without a
# handler of their own must get it back.
start=setsid
! setpriv --pdeathsig KILL true 2> /dev/null || start="setpriv --pdeathsig KILL $start"
! env --default-signal=INT true 2> /dev/null || start="$start env --default-signal=INT"

running=
kill_all() {
    say "killing what still runs on $machine: rank $(for process in $running; do printf '%s ' "${process%:*}"; done)"
    send KILL -
}

# failed RANK CODE
failed() {
    say "rank $1 on $machine $(ending "$2"); the others have $grace s to end; $logs/rank_$1.log ends with:"
    tail -n 3 "$logs/rank_$1.log" | sed 's/^/    /' >&2
}

mkdir -p "$logs" || exit 1
work=$(mktemp -d) || exit 1
console='' listener=''
trap 'rm -rf "$work" "$lock"; [ -z "$listener" ] || kill "$listener" 2> /dev/null' EXIT
trap 'send TERM' TERM HUP
trap 'send INT' INT
trap 'send USR1' USR1
trap 'kill_all' USR2

# nodes.sh sends the names of signals, and an empty line twice a second while it runs.
if [ -n "$remote" ]; then
    exec 3<&0 < /dev/null
    (
        trap - EXIT
        while read -r word; do
            case $word in
                TERM | USR1) kill -s "$word" $$ ;;
                KILL) kill -s USR2 $$ ;;
                *) kill -s 0 $$ 2> /dev/null || exit ;;
            esac
        done
        say "$machine has lost its connection to nodes.sh; ending its ranks"
        kill -s TERM $$
    ) <&3 &
    listener=$!
    exec 3<&-
fi

first=$((node_rank * ranks))
say "starting $ranks of $WORLD_SIZE ranks on $machine, from rank $first; rendezvous at $MASTER_ADDR:$MASTER_PORT"
local_rank=0
while [ "$local_rank" -lt "$ranks" ]; do
    export RANK=$((first + local_rank)) LOCAL_RANK="$local_rank"
    log=$logs/rank_$RANK.log
    own_cores=
    [ "$bind" = off ] || own_cores=$(cores_of "$local_rank")
    echo "node.sh: rank $RANK of $WORLD_SIZE on $machine, cores ${own_cores:-any}" > "$log" || exit 1
    out=$log
    if [ "$RANK" -eq 0 ]; then
        out=$work/console
        mkfifo "$out" || exit 1
        (trap '' TERM INT HUP USR1; exec tee -a "$log" < "$out") &
        console=$!
    fi
    # shellcheck disable=SC2086  # $start is several words
    (exec $start ${own_cores:+taskset -c "$own_cores"} "$@" < /dev/null >> "$out" 2>&1) &
    running="$running $RANK:$!"
    local_rank=$((local_rank + 1))
done

watch "$grace"
[ -z "$console" ] || wait "$console"
exit "$code"
