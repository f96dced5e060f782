# Our event files in TensorBoard's own readers.
#
#   python3 dev/peers/tensorboard.py [--train build/train-FP32] [--tensorboard build/tensorboard] [--kills 20]
#
# Two runs of 60 steps: one is killed again and again, while two servers of TensorBoard watch its directory: one with
# the reader in Rust, one with the reader in Python. In the end each value of each line of metrics.jsonl, as a float32,
# must be what these give, each step once:
#
#   the servers, as JSON (/data/plugin/scalars/scalars); plugin_event_accumulator; tbparse
#
# Texts are compared too, and files of build/tensorboard. crc32c: 1,000 random strings, against the package of that name.
#
# make build/train-FP32 build/tensorboard; pip install tensorboard crc32c "setuptools<81" numpy pandas; pip install
# --no-deps tbparse. Says "skipped" without the packages. Exit code 1 if anything differs.
import argparse
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

sys.path.pop(0)  # the folder of this file, which has the name of the package
try:
    import crc32c
    import numpy as np
    import tbparse
    import tensorboard
    from tensorboard.backend.event_processing import plugin_event_accumulator
    from tensorboard.util import tensor_util
except ImportError as missing:
    print("skipped: %s" % missing)
    sys.exit(0)

parser = argparse.ArgumentParser()
parser.add_argument("--train", default="build/train-FP32")
parser.add_argument("--tensorboard", default="build/tensorboard")
parser.add_argument("--kills", type=int, default=20)
options = parser.parse_args()
train, convert = os.path.abspath(options.train), os.path.abspath(options.tensorboard)
checkout = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
random.seed(11)
failures = 0

# What the tags are called, written independently of tfevents.h; other members keep their name.
NAMES = {"loss": "loss/train", "val_loss": "loss/val", "tok_per_s": "speed/tokens_per_s", "lr": "optimizer/lr"}
FLOOR = 1.25


def check(good, what):
    global failures
    failures += not good
    print("%s %s" % ("ok     " if good else "FAILED ", what), flush=True)


def same(expected, found, what):
    """Both: {tag: [(step, float32)]}. The tags of NAMES; of the rest, how many values there are."""
    wrong = [tag for tag in expected if found.get(tag) != expected[tag]]
    values = sum(len(points) for points in expected.values())
    but = ["%s %s, not %s" % (tag, str(found.get(tag))[:300], str(expected[tag])[:300]) for tag in wrong]
    check(not wrong, "%s: %d values of %d tags%s" % (what, values, len(expected), "".join("; but " + b for b in but)))


def expected_of(run):
    """What metrics.jsonl says: the tags of NAMES, and by their value the other numbers."""
    points = {}
    for line in open(run + "/metrics.jsonl"):
        line = json.loads(line)
        for member, value in line.items():
            if member in NAMES and value is not None:
                points.setdefault(NAMES[member], []).append((line["step"], float(np.float32(value))))
        if line["val_loss"] is not None:
            excess = float(np.float32(line["val_loss"] - FLOOR))
            points.setdefault("loss/excess", []).append((line["step"], excess))
    return points


def others_of(run):
    """{(step, float32)} of all other members."""
    values = set()
    for line in open(run + "/metrics.jsonl"):
        line = json.loads(line)
        values |= {(line["step"], float(np.float32(value))) for member, value in line.items()
                   if member not in NAMES and member not in ("step", "time") and isinstance(value, (int, float))}
    return values


def accumulated(directory):
    reader = plugin_event_accumulator.EventAccumulator(
        directory, size_guidance={plugin_event_accumulator.TENSORS: 0})
    reader.Reload()
    points = {}
    for tag in reader.Tags()["tensors"]:
        points[tag] = [(event.step, tensor_util.make_ndarray(event.tensor_proto).item())
                       for event in reader.Tensors(tag)]
    return points


def parsed(directory):
    reader = tbparse.SummaryReader(directory)
    points = {}
    for table in (reader.scalars, reader.text):
        for step, tag, value in zip(table["step"], table["tag"], table["value"]):
            points.setdefault(tag, []).append((int(step), value if isinstance(value, str) else float(value)))
    return points


class Server:
    def __init__(self, directory, fast):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = open(os.devnull, "w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", "--logdir", directory, "--port", str(self.port), "--bind_all",
             "--load_fast", "true" if fast else "false", "--reload_interval", "1", "--samples_per_plugin",
             "scalars=100000,text=1000"], stdout=self.log, stderr=self.log)
        for _ in range(600):
            try:
                self.get("runs")
                return
            except OSError:
                time.sleep(0.1)
        raise SystemExit("the server does not answer")

    def get(self, path, **query):
        url = "http://127.0.0.1:%d/data/%s?%s" % (self.port, path, urllib.parse.urlencode(query))
        return json.loads(urllib.request.urlopen(url, timeout=30).read())

    def scalars(self, run):
        tags = self.get("plugin/scalars/tags").get(run, {})
        return {tag: [(step, float(np.float32(value))) for _, step, value in
                      self.get("plugin/scalars/scalars", tag=tag, run=run)] for tag in tags}

    def texts(self, run):
        tags = self.get("plugin/text/tags").get(run, {})
        return {tag: [(row["step"], row["text"]) for row in self.get("plugin/text/text", tag=tag, run=run)]
                for tag in tags}

    def wait(self, run, tag, step, seconds=30):
        """Until it has read a point of this step, and two reloads more."""
        until = time.time() + seconds
        while time.time() < until:
            try:
                if any(point[0] == step for point in self.scalars(run).get(tag, [])):
                    break
            except OSError:
                pass
            time.sleep(0.3)
        time.sleep(3)

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def write_shard(path, tokens):
    header = np.zeros(256, np.int32)
    header[:4] = [20240520, 1, tokens, 32]
    header[6:8] = np.array([FLOOR], np.float64).view(np.int32)
    numbers = np.arange(tokens, dtype=np.int64)
    with open(path, "wb") as file:
        file.write(header.tobytes() + (numbers * numbers % 29).astype(np.uint16).tobytes())


def start(out, fault=None):
    flags = ("--data train.bin --val val.bin --val-windows 2 --layers 1 --heads 1 --channels 8 --seq 8 --batch 1 "
             "--threads 1 --steps 60 --warmup 1 --val-every 5 --ckpt-every 4 --ckpt-async off --resume --tensorboard "
             "--out " + out)
    environment = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    if fault:
        environment["LLMTRAIN_TEST_FAULT"] = fault
    return subprocess.run([train] + flags.split(), env=environment, stdout=subprocess.DEVNULL).returncode


def newest(out):
    names = [name for name in os.listdir(out)] if os.path.isdir(out) else []
    return max([int(name[5:]) for name in names if name.startswith("step_") and "." not in name], default=0)


def check_crc():
    with open("crc.c", "w") as file:
        file.write('#include "llmtrain/run/tfevents.h"\n'
                   'unsigned crc(const char* p, size_t n) { return crc32c(p, n); }\n')
    subprocess.run(["cc", "-std=c11", "-shared", "-fPIC", "-fopenmp", "-I", checkout, "crc.c", "-o", "./crc.so"],
                   check=True)
    ours = ctypes.CDLL("./crc.so").crc
    ours.restype, ours.argtypes = ctypes.c_uint32, [ctypes.c_char_p, ctypes.c_size_t]
    strings = [random.randbytes(random.randint(0, 3000)) for _ in range(1000)]
    wrong = sum(ours(text, len(text)) != crc32c.crc32c(text) for text in strings)
    check(wrong == 0, "crc32c %s: 1,000 random strings, %d differ" % (crc32c.__version__ if hasattr(
        crc32c, "__version__") else "", wrong))


def check_runs():
    write_shard("train.bin", 4000)
    write_shard("val.bin", 400)
    os.mkdir("runs")
    servers = [(name, Server("runs", name == "Rust")) for name in ("Rust", "Python")]
    check(start("runs/one") == 0, "a run without kills")
    places, killed = ["events", "update", "validate", "save", "clean"], 0
    for number in range(options.kills):
        begins, place = newest("runs/other"), places[number % 5]
        step = {"events": begins + 1, "update": begins + 3, "validate": begins // 5 * 5 + 5}.get(place, begins + 4)
        killed += start("runs/other", "rank 0 step %d at %s do kill" % (step, place)) == -signal.SIGKILL
        time.sleep(random.choice([0, 0.5, 1.2]))  # so that a reload sees some of these states
    check(killed > 0.7 * options.kills, "a run with %d kills" % killed)
    with open("runs/other/samples.jsonl", "a") as file:
        print(json.dumps({"step": 3, "prompt": "Once", "text": " <script>alert(1)</script> \u00e9"}), file=file)
    check(start("runs/other") == 0, "its end")
    subprocess.run([convert, "runs/one", "runs/other", "--dir", "runs/converted"], check=True)

    expected, others = expected_of("runs/one"), others_of("runs/other")
    deterministic = {tag: points for tag, points in expected.items() if not tag.startswith("speed/")}
    check(all(len({step for step, _ in points}) == len(points) for points in expected.values()), "each step once")
    readers = [("plugin_event_accumulator", accumulated), ("tbparse", parsed)]
    for name, read in readers:
        same(expected, read("runs/one/tensorboard"), name)
        found = read("runs/other/tensorboard")
        same(deterministic, found, "%s, with kills" % name)
        same(expected_of("runs/other"), found, "%s, with kills, by its own log" % name)
        seen = {point for tag, points in found.items() if "/" in tag for point in points}
        check(others <= seen, "%s: %d values of the other members" % (name, len(others)))
        check(found["events/done"] in ([(60, b"the run is done")], [(60, "all steps are done")]),
              "%s: a text: %s" % (name, found["events/done"]))
    found = accumulated("runs/converted/one")
    if "loss/excess" in found:  # the floor is in run.jsonl
        same(expected, found, "build/tensorboard")
    else:
        same({tag: points for tag, points in expected.items() if tag != "loss/excess"}, found, "build/tensorboard")
    for name, server in servers:
        server.wait("other/tensorboard", "loss/val", 60)
        same(expected, server.scalars("one/tensorboard"), "the server, %s" % name)
        found = server.scalars("other/tensorboard")
        same(deterministic, found, "the server, %s, with kills" % name)
        seen = {point for points in found.values() for point in points}
        check(others <= seen, "the server, %s: %d values of the other members" % (name, len(others)))
        texts = server.texts("other/tensorboard")
        done, sample = texts.get("events/done", []), texts.get("samples", [])
        check(len(done) == 1 and done[0][0] == 60 and "<p>the run is done</p>" in done[0][1] and len(sample) == 1 and
              sample[0][0] == 3 and "Once" in sample[0][1] and "\u00e9" in sample[0][1] and
              "<script" not in sample[0][1],
              "the server, %s: texts of %s; a sample, with its HTML escaped: %r" % (
                  name, ", ".join(sorted(texts)), sample))
        server.close()


print("tensorboard %s, tbparse, numpy %s" % (tensorboard.__version__, np.__version__))
with tempfile.TemporaryDirectory() as directory:
    os.chdir(directory)
    check_crc()
    check_runs()
    os.chdir("/")
print("%d failed" % failures)
sys.exit(failures > 0)
