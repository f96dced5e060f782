#!/bin/sh
# test_machines.sh TRAIN BUILD: tests runs of several machines as far as one machine can, with the trainer TRAIN,
# BUILD/weights_hash, BUILD/corpus and BUILD/tokenize. Writes to BUILD/machines. Prints failures, skipped tests with the
# reason, and `N passed, N failed`.
#
#   1. networks    two hosts with addresses of their own, joined by a cable: 2 x 2 ranks, then the cable is cut
#   2. Slurm       slurm.sbatch with an srun of our own
set -u
# These machines are one: its ranks could share memory, which no cut cable would stop.
export LLMTRAIN_TEST_SOCKETS=1
[ $# -eq 2 ] || { echo "usage: sh dev/test/test_machines.sh TRAIN BUILD" >&2; exit 2; }
here=$(cd "$(dirname "$0")/../../launch" && pwd) || exit 2
train=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
mkdir -p "$2" || exit 2
build=$(cd "$2" && pwd) || exit 2
work=$build/machines
rm -rf "$work"
mkdir -p "$work/bin" && cd "$work" || exit 2

export OMP_WAIT_POLICY=passive TMPDIR="$work"
passed=0
failed=0
TIMEOUT=4   # of the trainer, where a rank stops answering
LIMIT=60    # for one start of anything

# check NAME COMMAND...: one check. If it fails, shows the end of out.txt, the last script's output.
check() {
    what=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED  $what"
        tail -n 8 out.txt | sed 's/^/        /'
    fi
}

# runs CODE NAME COMMAND...: the exit code of a command, or of `batch`; its output goes to out.txt.
runs() {
    expected=$1
    what=$2
    shift 2
    case $1 in
        batch) "$@" > out.txt 2>&1 ;;
        *) timeout "$LIMIT" "$@" > out.txt 2>&1 ;;
    esac
    code=$?
    check "$what: exit code $code, expected $expected" [ "$code" -eq "$expected" ]
}

# says PATTERN: the last script's output has the pattern.
says() {
    check "$1 in its output" grep -Eq -- "$1" out.txt
}

# comes COMMAND...: the command succeeds within LIMIT seconds; it is tried five times a second.
comes() {
    last=$(($(date +%s) + LIMIT))
    until "$@" > /dev/null 2>&1; do
        [ "$(date +%s)" -lt "$last" ] || return 1
        sleep 0.2
    done
}

# same DIR DIR: the weights of the last step exist and have the same bits.
same() {
    one=$(find "$1" -name 'step_*' | sort | tail -n 1)
    other=$(find "$2" -name 'step_*' | sort | tail -n 1)
    [ -n "$one" ] && [ -n "$other" ] && [ "$("$build/weights_hash" "$one")" = "$("$build/weights_hash" "$other")" ]
}

# ends PID CODE NAME: waits for a process started by this script.
ends() {
    wait "$1" 2> /dev/null
    code=$?
    check "$3: exit code $code, expected $2" [ "$code" -eq "$2" ]
}

# The cable and the hosts at its ends; the names belong to this process alone.
hosts="llmtrain$$a llmtrain$$b"
clean() {
    for host in $hosts; do
        ip netns pids "$host" 2> /dev/null | while read -r pid; do kill -s KILL "$pid"; done
        ip netns del "$host" 2> /dev/null
    done
}
trap clean EXIT
trap 'exit 1' INT TERM HUP

for script in slurm.sbatch ../dev/test/test_machines.sh; do
    check "$script is a text that sh reads" sh -n "$here/$script"
    if command -v shellcheck > /dev/null; then
        shellcheck -s sh "$here/$script" > out.txt 2>&1
        check "$script is clean for shellcheck" [ ! -s out.txt ]
    fi
done
command -v shellcheck > /dev/null || echo "skipped shellcheck: it is not here"

# Runs of the trainer: small, with sizes that no number of ranks divides, compared with ranks that it forks.
"$build/corpus" --out text --bytes 60000 --val-bytes 6000 > out.txt 2>&1 &&
    "$build/tokenize" --bytes text_train.txt --out text --val 0 >> out.txt 2>&1
check "a corpus for the trainer" [ $? -eq 0 ]
flags="--data text_train_000000.bin --family llama --layers 2 --heads 2 --channels 36 --ffn 71 --batch 1 --seq 33
    --threads 1 --warmup 1 --zero 1"
# shellcheck disable=SC2086  # $flags is several words
{
    runs 0 "train --ranks 3" "$train" --ranks 3 $flags --steps 6 --out forked3
    runs 0 "train --ranks 4" "$train" --ranks 4 $flags --steps 6 --out forked4
}
same forked3 forked4
check "three ranks and four differ, so that the comparison means something" [ $? -eq 1 ]

# ----------------------------------------------------------------------------------------------------
# 1. Networks

# starts FLAGS...: four ranks with torchrun's variables, two on each host; $ranks has their processes, rank_R.txt their
# output. MASTER_ADDR is a name. The first host knows itself as 127.0.1.1, as Debian's do, so that rank 1 reaches rank 0
# through the loopback: ranks of the other host must not look for rank 1 on themselves.
starts() {
    ranks=
    for rank in 0 1 2 3; do
        host=${hosts% *}
        [ $rank -lt 2 ] || host=${hosts#* }
        # shellcheck disable=SC2016,SC2086  # $0 and $@ are of the inner shell; $flags is several words
        RANK=$rank WORLD_SIZE=4 LOCAL_RANK=$((rank % 2)) LOCAL_WORLD_SIZE=2 MASTER_ADDR=first MASTER_PORT=29500 \
            timeout "$LIMIT" ip netns exec "$host" sh -c 'mount --bind "$0" /etc/hosts && exec "$@"' \
            "$work/hosts_$host" "$train" $flags "$@" > rank_$rank.txt 2>&1 &
        ranks="$ranks $!"
    done
}

networks() {
    cable=llmt$$
    if ! { ip netns add "${hosts% *}" && ip netns add "${hosts#* }" &&
        ip link add "${cable}a" netns "${hosts% *}" type veth peer name "${cable}b" netns "${hosts#* }"; } > out.txt 2>&1
    then
        echo "skipped networks: this machine lends none ($(tail -n 1 out.txt))"
        return
    fi
    echo "127.0.1.1 first" > "hosts_${hosts% *}"
    echo "10.73.0.1 first" > "hosts_${hosts#* }"
    address=1
    for host in $hosts; do
        device=$(ip -n "$host" -o link show type veth | sed 's/^[0-9]*: \([^@:]*\).*/\1/')
        ip -n "$host" addr add 10.73.0.$address/30 dev "$device" &&
            ip -n "$host" link set lo up && ip -n "$host" link set "$device" up
        check "host $address has an address" [ $? -eq 0 ]
        address=$((address + 1))
    done

    starts --steps 6 --out lan
    for process in $ranks; do
        ends "$process" 0 "2 x 2 ranks"
    done
    check "their weights are those of train --ranks 4" same forked4 lan

    # A machine whose loopback has IPv6 alone.
    ip -n "${hosts#* }" addr del 127.0.0.1/8 dev lo
    # shellcheck disable=SC2086  # $flags is several words
    runs 0 "train --ranks 3, with IPv6 alone" \
        ip netns exec "${hosts#* }" "$train" --ranks 3 $flags --steps 6 --out ipv6
    check "its weights are those with IPv4" same forked3 ipv6

    # A run without end, during which the cable is cut.
    starts --steps 1000000 --timeout $TIMEOUT --out cut
    check "the run has begun" comes grep -Eq 'step +[0-9]' rank_0.txt
    ip -n "${hosts#* }" link set "${cable}b" down
    began=$(date +%s)
    for process in $ranks; do
        ends "$process" 1 "a rank when the cable is cut"
    done
    seconds=$(($(date +%s) - began))
    check "all ended $seconds s after the cable was cut, expected $TIMEOUT and a few" [ $seconds -le $((TIMEOUT + 6)) ]
    for rank in 0 1 2 3; do
        check "rank $rank reports what happened" grep -q "^train: rank $rank: .*rank" rank_$rank.txt
    done
}
if [ "$(id -u)" -ne 0 ] || ! command -v ip > /dev/null; then
    echo "skipped networks: that takes root and the program ip"
else
    networks
fi

# ----------------------------------------------------------------------------------------------------
# 2. Slurm

runs 2 "slurm.sbatch without a command" sh "$here/slurm.sbatch"
says 'nothing to run'

# srun as the script calls it, on one machine: the variables of its tasks, signals passed on, the highest exit code.
cat > bin/srun <<'END'
#!/bin/sh
while :; do
    case $1 in --*) echo "$1" >> srun.txt; shift ;; *) break ;; esac
done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NODELIST=localhost
export SLURM_STEP_NUM_TASKS="$SLURM_NTASKS" SLURM_STEP_TASKS_HERE="$SLURM_NTASKS"
tasks=
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
    tasks="$tasks $!"
done
trap 'kill -s USR1 $tasks' USR1
trap 'kill -s TERM $tasks' TERM
highest=0
for task in $tasks; do
    while wait "$task"; code=$?; kill -0 "$task" 2> /dev/null; do :; done
    [ "$code" -le "$highest" ] || highest=$code
done
exit "$highest"
END
cat > bin/scontrol <<'END'
#!/bin/sh
echo "$@" > scontrol.txt
END
chmod +x bin/srun bin/scontrol

# Tasks that end by themselves on SIGUSR1; on a second one, with 99.
cat > asked.sh <<'END'
received() {
    trap 'exit 99' USR1
    sleep 1
    echo "received USR1"
    exit 75
}
trap received USR1
echo $$ > "asked_$RANK.pid"
for turn in $(seq 1000); do sleep 0.1; done
END

# batch COMMAND...: slurm.sbatch as Slurm starts it: with variables of the job, and of a task 0 that is not a rank. The
# ranks' port follows from the job number.
job=$$
batch() {
    rm -f srun.txt scontrol.txt
    PATH=$work/bin:$PATH SLURM_JOB_ID=$job SLURM_NTASKS=3 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_CPUS_PER_TASK=1 \
        timeout "$LIMIT" sh "$here/slurm.sbatch" "$@"
}

# shellcheck disable=SC2086  # $flags is several words
until batch "$train" $flags --steps 6 --out slurm3 > out.txt 2>&1; code=$?
    [ $code -eq 0 ] || ! grep -q 'the port is in use' out.txt; do
    job=$((job + 1))
done
check "three tasks of slurm.sbatch" [ $code -eq 0 ]
check "their weights are those of train --ranks 3" same forked3 slurm3
check "a run that is done does not begin again" [ ! -e scontrol.txt ]

runs 3 "tasks that fail" batch sh -c 'exit 3'
check "a run that failed does not begin again" [ ! -e scontrol.txt ]

rm -f asked_*.pid
PATH=$work/bin:$PATH SLURM_JOB_ID=$job SLURM_NTASKS=2 SLURM_PROCID=0 sh "$here/slurm.sbatch" \
    sh -c 'RANK=$SLURM_PROCID exec sh asked.sh' > out.txt 2>&1 &
process=$!
for rank in 0 1; do
    check "task $rank is ready" comes [ -s asked_$rank.pid ]
done
kill -s USR1 $process
ends $process 75 "slurm.sbatch and SIGUSR1"
check "the job is put into the queue again" grep -qx "requeue $job" scontrol.txt
check "both tasks received it" [ "$(grep -c '^received USR1' out.txt)" -eq 2 ]

printf '#!/bin/sh\nexit 1\n' > bin/scontrol
runs 75 "a job that cannot be put into the queue again" batch sh -c 'exit 75'
says 'submit it again with --resume'

while IFS=: read -r restarts words expected_words; do
    # shellcheck disable=SC2086  # $words is several words
    SLURM_RESTART_COUNT=$restarts runs 0 "restart $restarts of a job" batch sh -c 'echo "words: $*"' sh $words
    says "^words: $expected_words$"
done <<END
0:--out x:--out x
1:--out x:--out x --resume
2:--resume --out x:--resume --out x
END
for directive in signal=B:USR1@120 requeue open-mode=append; do
    check "slurm.sbatch asks for $directive" grep -qx "#SBATCH --$directive" "$here/slurm.sbatch"
done

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
