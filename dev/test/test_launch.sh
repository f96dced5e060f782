#!/bin/sh
# test_launch.sh TRAIN BUILD: tests the launch scripts as far as one machine can, with the trainer TRAIN,
# BUILD/weights_hash, BUILD/corpus and BUILD/tokenize. Writes to BUILD/launch. Prints failures, skipped tests with the
# reason, and `N passed, N failed`.
#
#   1. texts       the scripts parse as POSIX sh, and their messages for wrong flags
#   2. node.sh     variables, GPUs, cores, exit codes, signals; three ranks of the trainer
#   3. nodes.sh    with hosts that are all this machine: quoting, variables, exit codes, signals
#   4. networks    two hosts with addresses of their own, joined by a cable: 2 x 2 ranks, then the cable is cut
#   5. Slurm       slurm.sbatch with an srun of our own
set -u
[ $# -eq 2 ] || { echo "usage: sh dev/test/test_launch.sh TRAIN BUILD" >&2; exit 2; }
here=$(cd "$(dirname "$0")/../../launch" && pwd) || exit 2
train=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
mkdir -p "$2" || exit 2
build=$(cd "$2" && pwd) || exit 2
work=$build/launch
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

# runs CODE NAME COMMAND...: the exit code of a command, or a function of this script; its output goes to out.txt.
runs() {
    expected=$1
    what=$2
    shift 2
    case $1 in
        node | nodes | batch) "$@" > out.txt 2>&1 ;;
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

# ended PID: kill -0 fails. Not for children of this script, which remain as zombies until they are waited for.
ended() {
    ! kill -0 "$1"
}

# same DIR DIR: the weights of the last step exist and have the same bits.
same() {
    one=$(find "$1" -name 'step_*' | sort | tail -n 1)
    other=$(find "$2" -name 'step_*' | sort | tail -n 1)
    [ -n "$one" ] && [ -n "$other" ] && [ "$("$build/weights_hash" "$one")" = "$("$build/weights_hash" "$other")" ]
}

# ends PID CODE NAME: waits for a script started by this one.
ends() {
    wait "$1" 2> /dev/null
    code=$?
    check "$3: exit code $code, expected $2" [ "$code" -eq "$2" ]
}

# signalled SIGNAL CODE RECEIVED SCRIPT FLAGS...: runs two ranks of asked.sh and sends a signal to the process group of
# the script, as a terminal does; SIGKILL only to the script. It must exit with the code. Each rank must end, and have
# received the signal RECEIVED unless that is empty.
signalled() {
    signal=$1 expected=$2 received=$3 script=$4
    shift 4
    # SIGINT is ignored in background processes of a shell, SIGHUP under nohup; a script cannot change that for itself.
    default="env --default-signal=$signal"
    if ! $default true 2> /dev/null; then
        default=
        [ "$signal" = INT ] && echo "skipped SIGINT: env has no --default-signal here" && return
    fi
    rm -rf asked_*.pid logs
    # shellcheck disable=SC2086  # $default is several words
    setsid $default sh "$here/$script" "$@" --grace 20 --logs logs -- sh asked.sh > out.txt 2>&1 &
    process=$!
    for rank in 0 1; do
        check "rank $rank is ready" comes grep -q ready logs/rank_$rank.log
    done
    if [ "$signal" = KILL ]; then kill -s KILL $process
    else kill -s "$signal" -- -$process; fi
    ends $process "$expected" "$script and SIG$signal"
    for rank in 0 1; do
        check "rank $rank ends when $script gets SIG$signal" comes ended "$(cat asked_$rank.pid)"
        [ -z "$received" ] ||
            check "rank $rank receives SIG$received" comes grep -q "^received $received" logs/rank_$rank.log
    done
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

# ----------------------------------------------------------------------------------------------------
# 1. Texts

for script in watch.sh node.sh nodes.sh slurm.sbatch ../dev/test/test_launch.sh; do
    check "$script is a text that sh reads" sh -n "$here/$script"
    if command -v shellcheck > /dev/null; then
        shellcheck -s sh -x -P "$here" "$here/$script" > out.txt 2>&1
        check "$script is clean for shellcheck" [ ! -s out.txt ]
    fi
done
command -v shellcheck > /dev/null || echo "skipped shellcheck: it is not here"

# refuses CODE PATTERN SCRIPT FLAGS...: it exits with the code, and its output has the pattern.
refuses() {
    expected=$1 pattern=$2 script=$3
    shift 3
    runs "$expected" "$script $*" sh "$here/$script" "$@" < /dev/null
    says "$pattern"
}

for script in node.sh nodes.sh; do
    refuses 2 'nothing to run' "$script" --ranks 2
    refuses 2 "'--rank' is not a flag" "$script" --rank 2 -- true
    refuses 2 "'(soon|--hosts)'" "$script" --hosts --grace --grace soon -- true
    refuses 2 "'0'; give a whole number, 1 or more" "$script" --port 0 -- true
    refuses 0 '^ +--ranks N' "$script" --help
done
refuses 2 'there is no program ./no-such-program' node.sh --ranks 2 -- ./no-such-program
refuses 2 '--node-rank is 2 of 2' node.sh --ranks 1 --nodes 2 --node-rank 2 --master here -- true
refuses 2 'give --master' node.sh --ranks 1 --nodes 2 -- true
refuses 2 'give --hosts' nodes.sh --ranks 1 -- true
refuses 2 'NO_SUCH_VARIABLE: it is not set' nodes.sh --hosts a --env NO_SUCH_VARIABLE -- true
refuses 2 'nothing to run' slurm.sbatch
refuses 1 'no arguments on standard input' node.sh --from-stdin

# ----------------------------------------------------------------------------------------------------
# 2. node.sh

cat > report.sh <<'END'
place="$MASTER_ADDR:$MASTER_PORT, run $LLMTRAIN_RUN_ID"
echo "rank $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE here, at $place"
sed -n 's/^Cpus_allowed_list:[[:space:]]*/cores /p' /proc/self/status
echo "threads $OMP_NUM_THREADS"
echo "a line of standard error" >&2
for word in "$@"; do echo "argument <$word>"; done
printf '%s' "$1" > "word_$RANK.txt"
printf '%s' "$STRANGE" > "variable_$RANK.txt"
printf '%s' "$PLAIN" > "plain_$RANK.txt"
END

# node FLAGS...: node.sh with a new directory for logs.
node() {
    rm -rf logs
    timeout "$LIMIT" sh "$here/node.sh" --logs logs "$@"
}

# check_place: the ranks in the logs belong to one run, and the console shows rank 0.
check_place() {
    check "all ranks have the same address and run" \
        [ "$(grep -h '^rank' logs/*.log | sed 's/.*here, //' | sort -u | wc -l)" -eq 1 ]
    says '^rank 0 of'
    check "the console shows rank 0 alone" [ "$(grep -c '^rank ' out.txt)" -eq 1 ]
}

runs 0 "node.sh with three ranks that end well" node --ranks 3 -- sh report.sh 'two words' "it's"
for rank in 0 1 2; do
    expected="^rank $rank of 3, $rank of 3 here, at 127.0.0.1:[0-9]"
    check "the variables of rank $rank" grep -q "$expected" logs/rank_$rank.log
    check "what rank $rank prints as an error" grep -q '^a line of standard error' logs/rank_$rank.log
    check "the first argument of rank $rank" grep -qx 'argument <two words>' logs/rank_$rank.log
    check "the second argument of rank $rank" grep -qx "argument <it's>" logs/rank_$rank.log
done
sh "$here/node.sh" --ranks 1 --logs logs-other -- sleep 2 > other.txt 2>&1 &
other=$!
check "another node.sh has a port" comes grep -q 'rendezvous at .*:[0-9]' other.txt
theirs=$(sed -n 's/.*rendezvous at .*:\([0-9]*\)$/\1/p' other.txt)
check "a node.sh keeps its port from others" [ "$(readlink "/tmp/llmtrain-port-$theirs")" = "$other" ]
wait "$other"
check "and gives it back" [ ! -e "/tmp/llmtrain-port-$theirs" ]
check_place

runs 0 "node.sh as the third machine" \
    node --ranks 2 --nodes 3 --node-rank 2 --master 10.1.2.3 --port 1234 -- sh report.sh
check "its ranks count on" grep -q '^rank 5 of 6, 1 of 2 here, at 10.1.2.3:1234' logs/rank_5.log

cat > bin/nvidia-smi <<'END'
#!/bin/sh
case $* in
    *query-gpu=index*) printf '0\n1\n2\n' ;;
    *) echo 00000000:FF:00.0 ;;
esac
END
chmod +x bin/nvidia-smi
gpus() { PATH=$work/bin:$PATH runs "$@" node -- sh report.sh; }
gpus 0 "node.sh with GPUs"
check "one rank for each of three GPUs" [ "$(find logs -name '*.log' | wc -l)" -eq 3 ]
CUDA_VISIBLE_DEVICES=1,2 gpus 0 "node.sh with two visible GPUs"
check "one rank for each of two visible GPUs" [ "$(find logs -name '*.log' | wc -l)" -eq 2 ]
CUDA_VISIBLE_DEVICES='' gpus 2 "no GPU is visible and --ranks is missing"
says 'say how many ranks to start'
rm bin/nvidia-smi

if command -v taskset > /dev/null && command -v lscpu > /dev/null && [ "$(nproc)" -ge 2 ]; then
    runs 0 "node.sh with two ranks" node --ranks 2 -- sh report.sh
    check "a rank's part of the cores is the number of threads" grep -q "^threads $(($(nproc) / 2))$" logs/rank_1.log
    check "ranks have cores of their own" [ "$(grep -h '^cores' logs/*.log | sort -u | wc -l)" -eq 2 ]
    runs 0 "node.sh --bind off" node --ranks 1 --bind off -- sh report.sh
    all=$(sed -n 's/^Cpus_allowed_list:[[:space:]]*/cores /p' /proc/self/status)
    check "--bind off leaves all cores" grep -qx "$all" logs/rank_0.log
else
    echo "skipped cores: taskset, lscpu, or a second core is not here"
fi

# Rank 1 ends first; the others would run longer than any check waits for them.
cat > fails.sh <<'END'
[ "$RANK" -ne 1 ] || { echo "the reason"; eval "$1"; }
echo $$ > "rank_$RANK.pid"
sleep 100 &
wait
END
runs 7 "rank 1 fails" node --ranks 3 --grace 1 -- sh fails.sh 'sleep 0.5; exit 7'
says 'rank 1 on .* ended with exit code 7; the others have 1 s to end'
says '^    the reason'
says 'killing what still runs on .*: rank 0 2'
check "a rank that does not end is killed, with what it started" comes ended "$(cat rank_2.pid)"
# shellcheck disable=SC2016  # for the rank's shell
runs 139 "rank 1 is ended by a signal" node --ranks 2 --grace 0 -- sh fails.sh 'kill -s SEGV $$'
says 'rank 1 on .* was terminated by SIGSEGV'

# Ranks that end by themselves on a signal, with a different code for each signal; on a second one, with 99.
cat > asked.sh <<'END'
received() {
    trap 'exit 99' TERM INT USR1
    sleep 1
    echo "received $1"
    exit "$2"
}
trap 'received TERM 30' TERM
trap 'received INT 31' INT
trap 'received USR1 75' USR1
echo $$ > "asked_$RANK.pid"
echo ready
for turn in $(seq 1000); do sleep 0.1; done
END
for row in TERM:30:TERM USR1:75:USR1 HUP:30:TERM INT:31:INT; do
    received=${row##*:} code=${row#*:}
    signalled "${row%%:*}" "${code%:*}" "$received" node.sh --ranks 2
    says "^received $received"
done
if setpriv --pdeathsig KILL true 2> /dev/null; then
    signalled KILL 137 '' node.sh --ranks 2
else
    echo "skipped node.sh being killed: setpriv has no --pdeathsig here"
fi

# One rank is stopped and saved, another fails: the failure counts.
# shellcheck disable=SC2016  # for the rank's shell
runs 9 "rank 0 has saved, rank 1 fails" node --ranks 2 -- sh -c '[ "$RANK" -eq 1 ] || exit 75; sleep 1; exit 9'

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
    runs 0 "three ranks by node.sh" node --ranks 3 -- "$train" $flags --steps 6 --out node3
}
check "their weights are those of train --ranks 3" same forked3 node3
same forked3 forked4
check "three ranks and four differ, so that the comparison means something" [ $? -eq 1 ]

# ----------------------------------------------------------------------------------------------------
# 3. nodes.sh

# Replaces ssh: all hosts are this machine. Commands start in another directory, with their own environment, as with
# ssh. On host two a shell reads the words, as with ssh; on host one they are the command, as with `ip netns exec`. The
# host 'gone' cannot be reached.
cat > bin/here.sh <<'END'
host=$1
shift
cd / || exit
case $host in
    one) exec env -i PATH="$PATH" "$@" ;;
    two) exec env -i PATH="$PATH" sh -c "$*" ;;
    gone) exit 255 ;;
esac
END

# nodes FLAGS...: nodes.sh with the hosts one and two, and a new directory for logs.
two_hosts="--hosts one,two --master 127.0.0.1"
nodes() {
    rm -rf logs
    # shellcheck disable=SC2086  # $two_hosts is several words
    timeout "$LIMIT" sh "$here/nodes.sh" $two_hosts --ssh "sh $work/bin/here.sh" --logs logs "$@"
}

# shellcheck disable=SC2016,SC2034  # it must arrive as it is; by its name
strange='a $HOME "b"
`c`  '"it's \\ d"
printf '%s' "$strange" > strange.txt
STRANGE=$strange runs 0 "nodes.sh with two hosts that end well" \
    nodes --ranks 2 --env STRANGE --env PLAIN=x=y -- sh report.sh "$strange"
for rank in 0 1 2 3; do
    expected="^rank $rank of 4, $((rank % 2)) of 2 here, at 127.0.0.1:29500"
    check "the variables of rank $rank" grep -q "$expected" logs/rank_$rank.log
    check "a strange word comes to rank $rank as it is" cmp strange.txt word_$rank.txt
    check "a strange value comes to rank $rank as it is" cmp strange.txt variable_$rank.txt
    check "a value with = comes to rank $rank as it is" grep -qx x=y plain_$rank.txt
done
check_place

# Exit codes: a host that fails, and one that cannot be reached.
# shellcheck disable=SC2016  # for the rank's shell
runs 6 "the second host fails" \
    nodes --ranks 1 --grace 1 -- sh -c '[ "$RANK" -ne 1 ] || exit 6; echo $$ > left.pid; sleep 100'
says 'nodes.sh: two ended with exit code 6; the others have 1 s to end'
check "the rank of the first is killed" comes ended "$(cat left.pid)"
runs 255 "a host that cannot be reached" nodes --hosts one,gone --ranks 1 --grace 1 -- sleep 100
says 'nodes.sh: gone ended with exit code 255'

# Signals.
for row in TERM:30:TERM USR1:75:USR1 KILL:137:TERM; do
    code=${row#*:}
    # shellcheck disable=SC2086  # $two_hosts is several words
    signalled "${row%%:*}" "${code%:*}" "${row##*:}" nodes.sh $two_hosts --ssh "sh $work/bin/here.sh" --ranks 1
done

# ----------------------------------------------------------------------------------------------------
# 4. Networks

# shellcheck disable=SC2086  # $hosts and $flags are several words
networks() {
    set -- $hosts
    cable=llmt$$
    lan="--hosts $1,$2 --master 10.73.0.1 --ranks 2 --grace 20"
    if ! { ip netns add "$1" && ip netns add "$2" &&
        ip link add "${cable}a" netns "$1" type veth peer name "${cable}b" netns "$2"; } > out.txt 2>&1; then
        echo "skipped networks: this machine lends none ($(tail -n 1 out.txt))"
        return
    fi
    address=1
    for host in $hosts; do
        device=$(ip -n "$host" -o link show type veth | sed 's/^[0-9]*: \([^@:]*\).*/\1/')
        ip -n "$host" addr add 10.73.0.$address/30 dev "$device" &&
            ip -n "$host" link set lo up && ip -n "$host" link set "$device" up
        check "host $address has an address" [ $? -eq 0 ]
        address=$((address + 1))
    done

    runs 0 "2 x 2 ranks" sh "$here/nodes.sh" $lan --logs logs-lan --ssh "ip netns exec" -- \
        "$train" $flags --steps 6 --out lan
    check "their weights are those of train --ranks 4" same forked4 lan

    # The same by hand, a command on each host.
    NODE_RANK=1 ip netns exec "$2" sh "$here/nodes.sh" $lan --logs logs-hand -- \
        "$train" $flags --steps 6 --out hand > hand.txt 2>&1 &
    second=$!
    NODE_RANK=0 runs 0 "2 x 2 ranks by hand, the first host" ip netns exec "$1" \
        sh "$here/nodes.sh" $lan --logs logs-hand -- "$train" $flags --steps 6 --out hand
    ends $second 0 "2 x 2 ranks by hand, the second host"
    check "their weights too are those of train --ranks 4" same forked4 hand

    # A run without end, during which the cable is cut.
    sh "$here/nodes.sh" $lan --logs logs-cut --ssh "ip netns exec" -- \
        "$train" $flags --steps 1000000 --timeout $TIMEOUT --out cut > out.txt 2>&1 &
    process=$!
    check "the run has begun" comes grep -Eq 'step +[0-9]' logs-cut/rank_0.log
    ip -n "$2" link set "${cable}b" down
    began=$(date +%s)
    ends $process 1 "nodes.sh when the cable is cut"
    seconds=$(($(date +%s) - began))
    check "all ended $seconds s after the cable was cut, expected $TIMEOUT and a few" [ $seconds -le $((TIMEOUT + 6)) ]
    for rank in 0 1 2 3; do
        check "rank $rank reports what happened" grep -q "^train: rank $rank: .*rank" logs-cut/rank_$rank.log
    done
    check "nobody had to be killed" sh -c '! grep kills out.txt'
}
if [ "$(id -u)" -ne 0 ] || ! command -v ip > /dev/null; then
    echo "skipped networks: that takes root and the program ip"
else
    networks
fi

# ----------------------------------------------------------------------------------------------------
# 5. Slurm

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
