# build/evaluate against lm-evaluation-harness: the answers to 200 multiple-choice questions made here, and accuracy,
# for models with a byte-level tokenizer, or SentencePiece's with a begin-of-text token. lm-eval loads our export.
#
#   python3 dev/peers/evaluate.py [--build build] [--only llama|qwen2|gpt2]
#
# make build/evaluate build/export; pip install lm-eval accelerate torch transformers tokenizers sentencepiece. Says
# "skipped" without the packages. Exit code 1 if anything differs.
import argparse
import importlib.util
import json
import os
import random
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [p for p in sys.path if os.path.abspath(p or ".") != HERE]


def load(name):
    spec = importlib.util.spec_from_file_location("peer_" + name, os.path.join(HERE, name + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peer = load("gguf")  # makes models and tokenizers


# The right ending continues its context in the text; the others are from elsewhere.
def questions(path, count):
    generator = random.Random(11)
    text = peer.training_text()

    def piece(n):
        at = generator.randrange(len(text) - n)
        return " ".join(text[at:at + n].split()) or "nothing"
    with open(path, "w", encoding="utf-8") as f:
        for _ in range(count):
            words = piece(generator.randrange(60, 500)).split(" ")
            cut = max(len(words) - generator.randrange(1, 12), 1)
            endings = [piece(generator.randrange(4, 60)) for _ in range(generator.choice([2, 4, 5]))]
            label = generator.randrange(len(endings))
            endings[label] = " ".join(words[cut:])[:150] or "nothing"
            ctx = " ".join(words[:cut]) + generator.choice(["", "", " "])
            f.write(json.dumps(dict(ctx=ctx, endings=endings, label=label)) + "\n")


def harness(directory, path):
    import lm_eval
    task = dict(task="made", dataset_path="json", dataset_kwargs=dict(data_files=dict(test=path)), test_split="test",
                output_type="multiple_choice", doc_to_text="{{ctx}}", doc_to_target="{{label}}",
                doc_to_choice="endings", metric_list=[dict(metric="acc", aggregation="mean", higher_is_better=True),
                                                      dict(metric="acc_norm", aggregation="mean",
                                                           higher_is_better=True)])
    result = lm_eval.simple_evaluate(model="hf", model_args=dict(pretrained=directory, dtype="float32", device="cpu"),
                                     tasks=[task], batch_size=8, log_samples=True, bootstrap_iters=0)
    samples = sorted(result["samples"]["made"], key=lambda s: s["doc_id"])
    lists = [[r[0] for r in s["filtered_resps"]] for s in samples]
    scores = result["results"]["made"]
    return lists, scores["acc,none"], scores["acc_norm,none"]


def compare(name, build, folder):
    directory, path = os.path.join(folder, name), os.path.join(folder, "questions.jsonl")
    os.makedirs(directory)
    peer.make_model(name, folder, directory)
    questions(path, 200)
    done = peer.run(build + "/evaluate", "--init-from", directory, "--choices", path, "--answers")
    ours = json.loads(done.stdout) if done.returncode == 0 else {}
    exported = directory + "-exported"
    peer.run(build + "/export", "--init-from", directory, "--to", "hf", "--dir", exported)
    lists, accuracy, accuracy_norm = harness(exported, path)
    answers = [max(range(len(s)), key=lambda i: (s[i], -i)) for s in lists]
    margin = min(sorted(s)[-1] - sorted(s)[-2] for s in lists)
    same = sum(a == b for a, b in zip(answers, ours.get("answers", [])))
    peer.check(same == len(answers) == 200, "%s: the same answer to %d of %d questions (smallest margin %.2g nats)" % (
        name, same, len(answers), margin))
    peer.check(ours.get("accuracy") == accuracy, "%s: accuracy %s, lm-eval's acc %s" % (
        name, ours.get("accuracy"), accuracy))
    peer.check(ours.get("accuracy_norm") == accuracy_norm, "%s: accuracy_norm %s, lm-eval's acc_norm %s" % (
        name, ours.get("accuracy_norm"), accuracy_norm))


if __name__ == "__main__":
    flags = argparse.ArgumentParser()
    flags.add_argument("--build", default="build")
    flags.add_argument("--only")
    flags = flags.parse_args()
    peer.wants("lm_eval", "accelerate", "torch", "transformers", "tokenizers", "sentencepiece")
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = folder
        for name in [flags.only] if flags.only else ["llama", "qwen2", "gpt2"]:
            compare(name, flags.build, folder)
    print("%d failed" % peer.failures)
    sys.exit(peer.failures > 0)
