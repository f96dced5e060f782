"""axes.py: layouts of ranks on this machine, what they send and take beside what --plan says, and how long their stages
idle by the schedule.

    python3 dev/bench/axes.py [--build build] [--layout '--ranks 4 --pp 2']

A line per layout: bytes that rank 0 sent in a step, the mean of ten, and the plan's, within 2%, since what is in flight
at the end of a step counts in the next (dev/test/test_zero.c has equal ones); the peak of its memory and the plan's,
which must be within 5%; the idle share of the first and the last stage, from the table that is executed, in units of a
block's operations. Exit code 1: a layout is not as planned. Processes that share two cores say nothing about speed.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile

LAYOUTS = ['--ranks 1', '--ranks 2', '--ranks 4 --zero 1', '--ranks 4 --zero 2', '--ranks 4 --zero 3',
           '--ranks 4 --zero 2 --shard 2', '--ranks 2 --pp 2', '--ranks 4 --pp 4', '--ranks 4 --pp 4 --pipeline gpipe',
           '--ranks 2 --pp 2 --pipeline interleaved', '--ranks 4 --pp 4 --pipeline zb-h1', '--ranks 4 --pp 2 --zero 1',
           '--ranks 2 --cp 2', '--ranks 4 --cp 4 --zero 1 --recompute block', '--ranks 4 --cp 2 --pp 2',
           '--ranks 2 --tp 2', '--ranks 4 --tp 4 --recompute block', '--ranks 2 --leaves 4 --tp 2',
           '--ranks 4 --tp 2 --cp 2', '--ranks 4 --tp 2 --pp 2', '--ranks 4 --tp 2 --zero 3',
           '--ranks 2 --tp 2 --leaves 1 --reduce storage', '--ranks 4 --cp 4 --kv-heads 2']
MODEL = ('--family llama --layers 8 --heads 4 --channels 256 --seq 128 --batch 1 --total-batch 2048 --vocab '
         '256').split()

parser = argparse.ArgumentParser()
parser.add_argument('--build', default='build')
parser.add_argument('--layout', action='append')
options = parser.parse_args()
program = os.path.abspath(f'{options.build}/train-FP32')
environment = {**os.environ, 'OMP_WAIT_POLICY': 'passive'}


def train(*flags):
    done = subprocess.run([program, *flags], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f'{" ".join(flags)}: exit code {done.returncode}\n{done.stdout}{done.stderr}')
    return done.stdout


def planned(text, name):  # MB
    found = re.search(rf'^ *{name} +([\d.]+)$', text, re.M)
    return float(found.group(1)) if found else 0


failed = False
print(f'{"layout":42} {"sent, MB":>10} {"planned":>9} {"peak, MB":>10} {"planned":>9} {"idle: first":>12} {"last":>6}')
with tempfile.TemporaryDirectory() as folder:
    shard = f'{folder}/text'
    for command in ([f'{options.build}/corpus', '--out', shard, '--bytes', '300000', '--val-bytes', '1'],
                    [f'{options.build}/tokenize', '--bytes', f'{shard}_train.txt', '--out', shard, '--val', '0']):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for i, layout in enumerate(options.layout or LAYOUTS):
        reduce = [] if '--reduce' in layout else ['--reduce', 'exact']
        flags = [*MODEL, *reduce, *layout.split(), '--data', f'{shard}_train_000000.bin']
        plan = train(*flags, '--plan')
        train(*flags, '--steps', '12', '--out', f'{folder}/{i}')
        with open(f'{folder}/{i}/metrics.jsonl') as log:
            lines = [json.loads(line) for line in log]
        sent = 1e-6 * sum(line['comm_bytes'] for line in lines[1:11]) / 10
        peak = 1e-6 * lines[-1]['mem_bytes']
        total = planned(plan, 'total') + sum(map(float, re.findall(r'^ *outside: .* ([\d.]+)$', plan, re.M)))
        idle = re.findall(r'([\d.]+%)$', plan, re.M) or ['', '']
        good = abs(sent - planned(plan, 'sent per step')) <= 0.02 * sent + 0.02 and abs(peak / total - 1) <= 0.05
        failed |= not good
        print(f'{layout:42} {sent:10.2f} {planned(plan, "sent per step"):9.2f} {peak:10.2f} {total:9.2f} '
              f'{idle[0]:>12} {idle[-1]:>6}{"" if good else "  NOT AS PLANNED"}')
sys.exit(failed)
