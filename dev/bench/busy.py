"""busy.py: how long a training step takes beside other busy processes, with the spin of OpenMP's threads that programs
choose (llmtrain/base/container.h), with GCC's default and without any; and of PyTorch, if Python has it.

    python3 dev/bench/busy.py [--build build] [--busy 2] [--nice 0] [--rounds 5] [--steps 30]

Prints the ms of a step, the mean of each run after two steps; the ways take turns. The fair share of two threads beside
as many busy processes as cores is twice the time alone.
"""
import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

parser = argparse.ArgumentParser()
parser.add_argument('--build', default='build')
parser.add_argument('--busy', type=int, default=2)
parser.add_argument('--nice', type=int, default=0)
parser.add_argument('--rounds', type=int, default=5)
parser.add_argument('--steps', type=int, default=30)
options = parser.parse_args()
WAYS = {'as programs choose': {}, "GCC's default": {'GOMP_SPINCOUNT': '300000'}, 'none': {'OMP_WAIT_POLICY': 'passive'}}
MODEL = '--family llama --layers 4 --heads 4 --channels 144 --seq 64 --batch 16 --vocab 256 --seed 1'.split()

HERE = os.path.dirname(os.path.abspath(__file__))
PYTORCH = [sys.executable, f'{HERE}/peers_cpu.py', '--worker', 'eager', 'float32', 'demo', '16', '64',
           str(options.steps)]  # the same model
if importlib.util.find_spec('torch'):
    WAYS['PyTorch'] = None


def step_ms(data, variables):
    environment = {k: v for k, v in os.environ.items() if k not in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')}
    if variables is None:
        environment['OMP_NUM_THREADS'] = str(len(os.sched_getaffinity(0)))
        text = subprocess.run(PYTORCH, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        return json.loads(text.splitlines()[-1])['mean_ms']
    command = [f'{options.build}/train-FP32', '--data', data, '--steps', str(options.steps), *MODEL]
    text = subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, check=True).stdout
    return statistics.mean([int(ms) for ms in re.findall(r'\| (\d+) ms', text)][2:])


with tempfile.TemporaryDirectory() as folder:
    text = f'{folder}/text'
    for command in ([f'{options.build}/corpus', '--out', text, '--bytes', '1000000', '--val-bytes', '1'],
                    [f'{options.build}/tokenize', '--bytes', f'{text}_train.txt', '--out', text, '--val', '0']):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for busy in (0, options.busy):
        others = [subprocess.Popen(['nice', '-n', str(options.nice), 'sh', '-c', 'while :; do :; done'])
                  for _ in range(busy)]
        times = {way: [] for way in WAYS}
        try:
            for _ in range(options.rounds):
                for way, variables in WAYS.items():
                    times[way].append(step_ms(f'{text}_train_000000.bin', variables))
        finally:
            for other in others:
                other.kill()
        for way, found in times.items():
            name = way if way == 'PyTorch' else f'spin {way}'
            print(f'{busy} busy processes, {name}: median {statistics.median(found):.0f} ms, '
                  f'{min(found):.0f} to {max(found):.0f}', flush=True)
