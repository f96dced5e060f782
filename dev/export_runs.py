"""export_runs.py: sends what runs have logged to another tool, through that tool's own Python client.

    python3 dev/export_runs.py --to csv runs/x runs/y        runs/x/metrics.csv
    python3 dev/export_runs.py --to mlflow --follow runs/x   MLflow: pip install mlflow; MLFLOW_TRACKING_URI
    python3 dev/export_runs.py --to trackio runs/x           trackio: pip install trackio; TRACKIO_PROJECT
    python3 dev/export_runs.py --to wandb runs/x             Weights & Biases: pip install wandb; WANDB_PROJECT

It sends the numbers of metrics.jsonl, and the flags of the newest start, from run.jsonl or a checkpoint's manifest.
DIR/exported_TOOL.json has a checksum of each line that was sent: a second call sends only new lines, to the same run of
the tool. With --follow it looks for new lines every 10 seconds until the runs end. The newest line of a run that has
not ended is not sent yet, since its validation may follow.

Steps that a resume or a rewind makes again are sent again. A CSV file is written anew; the tools keep both values of
such a step.
"""

import argparse
import csv
import glob
import json
import os
import sys
import time
import zlib


def line_of(text):
    """The object in a line of JSON; None: the line is damaged."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def texts_of(path):
    """The complete lines of a file, as bytes."""
    if not os.path.exists(path):
        return []
    with open(path, 'rb') as file:
        return [text for text in file if text.endswith(b'\n')]


def lines_of(texts):
    return [line for line in map(line_of, texts) if line and isinstance(line.get('step'), int)]


def flags_of(directory):
    starts = texts_of(f'{directory}/run.jsonl')
    if starts:
        start = line_of(starts[-1]) or {}
        return {key: value for key, value in start.items() if isinstance(value, (int, float, str))} \
            | start.get('flags', {})
    for path in sorted(glob.glob(f'{glob.escape(directory)}/step_*/manifest.json'), reverse=True):
        with open(path, encoding='utf-8') as file:
            return json.load(file)['flags']
    return {}


def numbers_of(line):
    """What a tool shows of a line: its numbers, without those that were not measured."""
    return {key: value for key, value in line.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and key != 'step'}


def name_of(directory):
    return os.path.basename(os.path.abspath(directory))


# The tools: they open a run, new or that of state['id'], and send lines. `everything` has all lines so far, and `again`
# says that some that were sent before have been replaced.

class Csv:
    def __init__(self, directory, _):
        self.path = f'{directory}/metrics.csv'

    def send(self, lines, everything, again):
        keys = list(dict.fromkeys(key for line in lines for key, value in line.items() if not isinstance(value, list)))
        if os.path.exists(self.path) and not again:
            with open(self.path, newline='', encoding='utf-8') as file:
                columns = next(csv.reader(file), [])
            again = not set(keys) <= set(columns)
        else:
            columns, again = keys, True
        if again:
            lines = everything()
            columns = list(dict.fromkeys(key for line in lines for key, value in line.items()
                                         if not isinstance(value, list)))
        with open(self.path, 'w' if again else 'a', newline='', encoding='utf-8') as file:
            writer = csv.DictWriter(file, columns, extrasaction='ignore')
            if again:
                writer.writeheader()
            writer.writerows(lines)

    def close(self, _ended):
        pass


class Mlflow:
    def __init__(self, directory, state):
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient
        self.client, self.metric = MlflowClient(), Metric
        if 'id' not in state:
            found = self.client.get_experiment_by_name('llmtrain')
            experiment = found.experiment_id if found else self.client.create_experiment('llmtrain')
            state['id'] = self.client.create_run(experiment, run_name=name_of(directory)).info.run_id
            params = [Param(key, str(value)[:500]) for key, value in flags_of(directory).items() if value != '']
            for i in range(0, len(params), 100):
                self.client.log_batch(state['id'], params=params[i:i + 100])
        self.run = state['id']

    def send(self, lines, _everything, _again):
        metrics = [self.metric(key, float(value), int(1000 * (line.get('time') or time.time())), line['step'])
                   for line in lines for key, value in numbers_of(line).items()]
        for i in range(0, len(metrics), 1000):
            self.client.log_batch(self.run, metrics=metrics[i:i + 1000])

    def close(self, ended):
        if ended:
            self.client.set_terminated(self.run)


class Trackio:
    def __init__(self, directory, state):
        import trackio
        state['id'] = state.get('id', f'{name_of(directory)}-{int(time.time())}')
        self.run = trackio.init(project=os.environ.get('TRACKIO_PROJECT', 'llmtrain'), name=state['id'],
                                config=flags_of(directory), resume='allow')

    def send(self, lines, _everything, _again):
        for line in lines:
            self.run.log(numbers_of(line), step=line['step'])

    def close(self, _ended):
        self.run.finish()


class Wandb:
    def __init__(self, directory, state):
        import wandb
        self.run = wandb.init(project=os.environ.get('WANDB_PROJECT', 'llmtrain'), name=name_of(directory),
                              id=state.get('id'), resume='allow', config=flags_of(directory), reinit='create_new')
        state['id'] = self.run.id
        self.run.define_metric('*', step_metric='step')  # its own steps can only increase

    def send(self, lines, _everything, _again):
        for line in lines:
            self.run.log(numbers_of(line) | {'step': line['step']})

    def close(self, _ended):
        self.run.finish()


TOOLS = {'csv': Csv, 'mlflow': Mlflow, 'trackio': Trackio, 'wandb': Wandb}


class Export:
    """A run that is sent to a tool."""

    def __init__(self, directory, tool):
        self.directory, self.tool, self.open = directory, tool, None
        self.path = f'{directory}/exported_{tool}.json'
        self.state = {'sent': []}
        if os.path.exists(self.path):
            with open(self.path, encoding='utf-8') as file:
                self.state = json.load(file)

    def ended(self):
        events = [line_of(text) or {} for text in texts_of(f'{self.directory}/events.jsonl')[-1:]]
        return bool(events) and events[0].get('event') in ('done', 'stopped', 'failed', 'gave up')

    def send_new(self):
        """Sends what is new; returns whether the run has ended."""
        ended = self.ended()
        texts = texts_of(f'{self.directory}/metrics.jsonl')
        texts = texts if ended else texts[:-1]
        sent, sums = self.state['sent'], [zlib.crc32(text) for text in texts]
        same = next((i for i, (a, b) in enumerate(zip(sent, sums)) if a != b), min(len(sent), len(sums)))
        lines = lines_of(texts[same:])
        if lines:
            if self.open is None:
                self.open = TOOLS[self.tool](self.directory, self.state)
            self.open.send(lines, lambda: lines_of(texts), same < len(sent))
            self.state['sent'] = sums
            with open(self.path + '.tmp', 'w', encoding='utf-8') as file:
                json.dump(self.state, file)
            os.replace(self.path + '.tmp', self.path)
        print(f'{self.directory}: {len(lines)} new lines sent to {self.tool}', flush=True)
        return ended

    def close(self):
        if self.open:
            self.open.close(self.ended())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n', maxsplit=1)[0])
    parser.add_argument('--to', required=True, choices=TOOLS)
    parser.add_argument('--follow', action='store_true', help='send new lines every 10 seconds until the runs end')
    parser.add_argument('runs', nargs='+', metavar='DIR', help='the --out of a run')
    options = parser.parse_args()
    for directory in options.runs:
        if not os.path.exists(f'{directory}/metrics.jsonl'):
            sys.exit(f'export_runs: {directory} has no metrics.jsonl; give the --out of a run')
    exports = [Export(directory, options.to) for directory in options.runs]
    try:
        while not all([export.send_new() for export in exports]) and options.follow:
            time.sleep(10)
    except KeyboardInterrupt:
        pass
    except ImportError as error:
        sys.exit(f'export_runs: {error}; install it with: pip install {options.to}')
    finally:
        for export in exports:
            export.close()


if __name__ == '__main__':
    main()
