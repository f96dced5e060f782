"""Byte-pair encodings trained by build/tokenize --train-bpe and by Hugging Face's `tokenizers`, on the same texts.

    make build/tokenize build/corpus
    python3 dev/peers/bpe_training.py [--text FILE]... [--sizes 1024,4096,16384] [--corpus-bytes 8000000] [--build build]

Both train with GPT-2's pattern on each text, and on a corpus that build/corpus writes. Compared: the merges; how many
tokens each gives for its training text (ours at most 0.5% more); the ids that `tokenizers` and
`transformers` give with our files; the time, in turn, of the whole: reading, counting, merging, writing. Exit code 1 if
a comparison fails. Says "skipped" where the packages are missing.

    python3 dev/peers/bpe_training.py --fixture dev/test/fixtures/bpe_training.json

writes a text of several scripts and Hugging Face's merges on it, which dev/test/test_text.c compares with ours.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

try:
    import tokenizers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ImportError:
    print("skipped: the package tokenizers is not installed (pip install tokenizers transformers)")
    sys.exit(0)
try:
    import transformers
except ImportError:
    transformers = None

END = "<|endoftext|>"


def train_theirs(path, size, out):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    with open(path, encoding="utf-8", newline="") as file:
        tokenizer.train_from_iterator([file.read()], trainer)
    tokenizer.save(out)
    return tokenizer


def merges_of(path):
    with open(path, encoding="utf-8") as file:
        merges = json.load(file)["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def compare(build, path, size, rounds):
    with tempfile.TemporaryDirectory() as folder, open(path, encoding="utf-8", newline="") as file:
        text = file.read()
        ours_dir, theirs_file = os.path.join(folder, "ours"), os.path.join(folder, "theirs.json")
        seconds = {"ours": [], "theirs": []}
        for _ in range(rounds):
            begin = time.perf_counter()
            subprocess.run([os.path.join(build, "tokenize"), "--train-bpe", str(size), "--text", path, "--out",
                            ours_dir], check=True, stdout=subprocess.DEVNULL)
            seconds["ours"].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            theirs = train_theirs(path, size, theirs_file)
            seconds["theirs"].append(time.perf_counter() - begin)
        ours_file = os.path.join(ours_dir, "tokenizer.json")
        ours = Tokenizer.from_file(ours_file)
        ours_merges, theirs_merges = merges_of(ours_file), merges_of(theirs_file)
        same = 0
        while same < min(len(ours_merges), len(theirs_merges)) and ours_merges[same] == theirs_merges[same]:
            same += 1
        ids = ours.encode(text).ids
        ours_count, theirs_count = len(ids), len(theirs.encode(text).ids)
        good = ours_count <= 1.005 * theirs_count and ours.decode(ids, skip_special_tokens=False) == text
        good = good and ours.token_to_id(END) == ours.get_vocab_size() - 1 and ours.encode(END).ids == [
            ours.token_to_id(END)]
        opened = "not installed"
        if transformers:
            fast = transformers.AutoTokenizer.from_pretrained(ours_dir)
            sample = text[:100000] + END
            same_ids = fast(sample)["input_ids"] == ours.encode(sample).ids
            opened = "same ids" if same_ids and fast.eos_token == END else "OTHER IDS"
            good = good and opened == "same ids"
        print(f"{os.path.basename(path)}, {len(text.encode()) / 1e6:.1f} MB, {size} tokens: "
              f"{'ok' if good else 'FAILED'}; the first {same} of {len(theirs_merges)} merges are the same; "
              f"{ours_count} tokens, theirs {theirs_count} ({100 * (ours_count / theirs_count - 1):+.3f}%); "
              f"{min(seconds['ours']):.2f} s, theirs {min(seconds['theirs']):.2f} s; transformers: {opened}", flush=True)
        return good


def fixture_text():
    """Words of the Zen of Python and of other scripts, with runs of letters, digits, spaces and signs between them."""
    words = ("Beautiful is better than ugly. Explicit is better than implicit. Simple is better than complex. "
             "Complex is better than complicated. Flat is better than nested. Sparse is better than dense. "
             "Readability counts. Special cases aren't special enough to break the rules. "
             "Красивое лучше, чем уродливое. 美しいは醜いより良い。 Schön ist besser als hässlich. "
             "الجميل أفضل من القبيح aaaaaaa aaaa 2024 31415926535 \U0001F642\U0001F642 {x_y: [0]}").split(" ")
    state, text = 1, []
    for _ in range(2500):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        word = words[(state >> 33) % len(words)]
        text.append(word[(state >> 20) % 4:4 + (state >> 40) % 9])
        text.append([" ", " ", " ", "\n", "  ", "\n\n", "\t"][(state >> 50) % 7])
    return "".join(text)


def write_fixture(path):
    with tempfile.TemporaryDirectory() as folder:
        text_path, theirs = os.path.join(folder, "text"), os.path.join(folder, "theirs.json")
        with open(text_path, "w", encoding="utf-8", newline="") as file:
            file.write(fixture_text())
        train_theirs(text_path, 800, theirs)
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"made_by": f"dev/peers/bpe_training.py --fixture, tokenizers {tokenizers.__version__}",
                       "text": fixture_text(), "merges": merges_of(theirs)}, file, ensure_ascii=False, indent=0)
            file.write("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default="build")
    parser.add_argument("--text", action="append", default=[], metavar="FILE", help="a text in UTF-8")
    parser.add_argument("--sizes", default="1024,4096,16384")
    parser.add_argument("--corpus-bytes", type=int, default=8000000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fixture", metavar="FILE", help="write the fixture, and compare nothing")
    arguments = parser.parse_args()
    if arguments.fixture:
        write_fixture(arguments.fixture)
        return 0
    print(f"tokenizers {tokenizers.__version__}" + (f", transformers {transformers.__version__}" if transformers else ""))
    good = True
    with tempfile.TemporaryDirectory() as folder:
        corpus = os.path.join(folder, "stories")
        subprocess.run([os.path.join(arguments.build, "corpus"), "--out", corpus, "--bytes",
                        str(arguments.corpus_bytes), "--val-bytes", "1000"], check=True, stdout=subprocess.DEVNULL)
        for path in arguments.text + [corpus + "_train.txt"]:
            for size in arguments.sizes.split(","):
                good = compare(arguments.build, path, int(size), arguments.rounds) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
