"""test_export_runs.py: what dev/export_runs.py sends, by clients that write down how they are called.

    python3 dev/test/test_export_runs.py

The standard library is enough: the tools' own clients are not needed.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
NOTE = '''
import json, os
def note(*call):
    with open(os.environ['CALLS'], 'a') as file:
        file.write(json.dumps(call) + '\\n')
'''
CLIENTS = {
    'wandb.py': NOTE + '''
class Run:
    def __init__(self, id): self.id = id or 'made'
    def define_metric(self, name, step_metric): note('define', name, step_metric)
    def log(self, values): note('log', values.pop('step'), values)
    def finish(self): note('finish')
def init(project, name, id, resume, config, reinit):
    note('init', project, name, id, resume, config)
    return Run(id)
''',
    'trackio.py': NOTE + '''
class Run:
    def log(self, values, step): note('log', step, values)
    def finish(self): note('finish')
def init(project, name, config, resume):
    note('init', project, name.rsplit('-', 1)[0], name, resume, config)
    return Run()
''',
    'mlflow/__init__.py': '',
    'mlflow/entities.py': '''
class Metric:
    def __init__(self, key, value, timestamp, step): self.all = [step, key, value, timestamp]
class Param:
    def __init__(self, key, value): self.all = [key, value]
''',
    'mlflow/tracking.py': NOTE + '''
class Info: run_id = 'made'
class Created: info = Info()
class MlflowClient:
    def get_experiment_by_name(self, name): return None
    def create_experiment(self, name): return name
    def create_run(self, experiment, run_name):
        note('init', experiment, run_name)
        return Created()
    def log_batch(self, run, metrics=(), params=()):
        for m in metrics: note('log', m.all[0], {m.all[1]: m.all[2]}, m.all[3], run)
        for p in params: note('param', *p.all)
    def set_terminated(self, run): note('finish')
'''}
passed = failed = 0


def check(good, what, found=''):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    print('ok     ' if good else 'FAILED ', what, '' if good else found)


def write(path, *lines, mode='w'):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, mode, encoding='utf-8') as file:
        file.write(''.join(line if isinstance(line, str) else json.dumps(line) + '\n' for line in lines))


def step(number, **values):
    return {'step': number, 'loss': 5 - number, 'time': 1e9 + number, **values}


def export(folder, tool, run):
    """The exit code, what was printed, and the client's calls."""
    calls = f'{folder}/calls'
    write(calls)
    done = subprocess.run([sys.executable, f'{ROOT}/dev/export_runs.py', '--to', tool, run], check=False, text=True,
                          capture_output=True, env=os.environ | {'PYTHONPATH': f'{folder}/clients', 'CALLS': calls})
    with open(calls, encoding='utf-8') as file:
        return done.returncode, done.stdout + done.stderr, [json.loads(line) for line in file]


def logged(calls):
    """{step: {key: value}} of what a client was given."""
    steps = {}
    for call in calls:
        if call[0] == 'log':
            steps.setdefault(call[1], {}).update(call[2])
    return steps


def of_step(number, **values):
    return {'loss': 5 - number, 'time': 1e9 + number, **values}


def test_client(folder, tool):
    run = f'{folder}/{tool}/x'
    write(f'{run}/run.jsonl', {'version': 1, 'host': 'h', 'flags': {'lr': '0.1', 'out': ''}})
    write(f'{run}/metrics.jsonl', step(1), 'a damaged line\n', step(2, val_loss=None, worst=[1], note='text', up=True),
          step(3, norm=2.5), step(4), '{"step": 5, "lo')
    code, said, calls = export(folder, tool, run)
    check(code == 0 and logged(calls) == {1: of_step(1), 2: of_step(2), 3: of_step(3, norm=2.5)},
          f'{tool}: the numbers of all lines but the newest complete one, of a damaged and of half a line', said)
    begun = [call for call in calls if call[0] in ('init', 'param')]
    check('x' in begun[0] and ('lr' in json.dumps(begun)) and 'llmtrain' in begun[0], f'{tool}: name, project, flags')
    check((calls[-1] == ['finish']) == (tool != 'mlflow'), f'{tool}: mlflow\'s run stays open while training goes on')
    code, said, calls = export(folder, tool, run)
    check(code == 0 and not calls and '0 new lines' in said, f'{tool}: a second call sends nothing')
    with open(f'{run}/exported_{tool}.json', encoding='utf-8') as file:
        kept = json.load(file)
    check(kept['id'] == (begun[0][3] if tool == 'trackio' else 'made'), f'{tool}: its id is kept', kept)
    write(f'{run}/exported_{tool}.json', kept | {'id': 'the same'})
    write(f'{run}/metrics.jsonl', step(1), step(2), step(3, loss=7), step(4), step(5))  # resumed after step 2
    write(f'{run}/events.jsonl', {'event': 'done'})
    code, said, calls = export(folder, tool, run)
    check(logged(calls)[3]['loss'] == 7 and max(logged(calls)) == 5 and 1 not in logged(calls) and
          calls[-1] == ['finish'], f'{tool}: steps that were made again, and the newest when the run has ended')
    again = [call for call in calls if call[0] == 'init']
    check(not again if tool == 'mlflow' else [call[3] for call in again] == ['the same'],
          f'{tool}: it is the same run as before', again)
    check(tool != 'mlflow' or all(call[4] == 'the same' for call in calls if call[0] == 'log'), f'{tool}: its id', calls)


def test_csv(folder):
    run = f'{folder}/csv/x'

    def table():
        with open(f'{run}/metrics.csv', newline='', encoding='utf-8') as file:
            return list(csv.DictReader(file))
    write(f'{run}/metrics.jsonl', step(1), step(2), step(3))
    export(folder, 'csv', run)
    check([row['step'] for row in table()] == ['1', '2'] and table()[1]['loss'] == '3', 'csv: lines but the newest')
    write(f'{run}/metrics.jsonl', step(4, norm=1.5), step(5), mode='a')
    export(folder, 'csv', run)
    check([row['step'] for row in table()] == ['1', '2', '3', '4'] and table()[3]['norm'] == '1.5' and
          table()[0]['norm'] == '', 'csv: a new column is a column of all lines')
    write(f'{run}/metrics.jsonl', step(1), step(2, loss=9), step(3))
    write(f'{run}/events.jsonl', {'event': 'failed'})
    export(folder, 'csv', run)
    check([row['loss'] for row in table()] == ['4', '9', '2'], 'csv: steps that were made again replace those before')


def main():
    with tempfile.TemporaryDirectory() as folder:
        for name, text in CLIENTS.items():
            write(f'{folder}/clients/{name}', text)
        for tool in ('wandb', 'trackio', 'mlflow'):
            test_client(folder, tool)
        test_csv(folder)
        code, said, _ = export(folder, 'csv', f'{folder}/none')
        check(code == 1 and said.count('\n') == 1 and 'has no metrics.jsonl' in said, 'without a log', said)
        os.remove(f'{folder}/clients/wandb.py')
        write(f'{folder}/wandb/y/metrics.jsonl', step(1), step(2))
        write(f'{folder}/clients/wandb.py', 'raise ImportError("No module named wandb")\n')
        code, said, _ = export(folder, 'wandb', f'{folder}/wandb/y')
        check(code == 1 and 'pip install wandb' in said and 'Traceback' not in said, 'without the client', said)
    print(f'{passed} passed, {failed} failed')
    return failed > 0


if __name__ == '__main__':
    sys.exit(main())
