"""Compares tokenizer.h with `tokenizers` and `tiktoken`: the ids of random strings and of a large text, and the speed.

    python3 dev/peers/tokenizer_ids.py [--gpt2 DIR] [--strings 1000000] [--only NAME] [--speed]
    python3 dev/peers/tokenizer_ids.py --fixtures dev/test/fixtures/tokenizers
    python3 dev/peers/tokenizer_ids.py --decodings dev/test/fixtures/tokenizers
    python3 dev/peers/tokenizer_ids.py --directories build/tokenizer_directories

Makes a tokenizer of each supported kind by training a small one with the published normalizers, pre-tokenizers and
patterns. --gpt2 names a directory with GPT-2's own encoder.json and vocab.bpe. Exit code 1 if any id differs. It runs
build/tokenizer_ids (make build/tokenizer_ids). --fixtures writes small tokenizers of each kind, and the two
packages' ids for some strings, for build/test_tokenizer. --decodings adds the texts that `tokenizers` makes of tokens
again, also of special tokens in a row. --directories makes directories as transformers, of this and
of earlier versions, writes them: the ids must be those of AutoTokenizer, with the tokens that it puts before a text, or
the directory is refused by name.
"""
import argparse
import base64
import glob
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time

try:
    import numpy
    import tokenizers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import trainers
    if "--directories" in sys.argv:
        import transformers
    else:
        import tiktoken
except ImportError as missing:
    print(f"skipped: {missing}; pip install tokenizers tiktoken numpy, or with --directories transformers")
    sys.exit(0)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CL100K = (r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"""
          r"""|\s*[\r\n]|\s+(?!\S)|\s""")
O200K = "|".join([
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""", r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""", r"""\s*[\r\n]+""", r"""\s+(?!\S)""", r"""\s+"""])
PHI4 = (r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"""
        r"""|\s+(?!\S)|\s+""")
R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
META = "\u2581"
SIZE = 6000  # size of a vocabulary
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


# ----------------------------------------------------------------------------------------------------------------------
# Texts

CHARACTERS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
COMMON = list("aaabcdeeeilmnorstuvxyzABCDEGILMRSTVX012349      ''''..,;:!?-_/()[]{}<>|=+*&%$#@~^`\"\\\n\n\r\t\u017f"
              "\u00e9\u00df\u0301\u0308\u0345\u0334\u3000\u00a0\u2028\u2581\u200d\ufe0f\u00b2\u00bd"
              "\u0663\u4e2d\u6587\u1100\u1161\u11a8\uac00\u01c5\u02b0\u0905\u093e\u05d0\U0001f600\U0001f468\U0001f3fd")
WORDS = ["'s", "'S", "'re", "'LL", "'Ve", "don't", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "[word]", "[left]",
         "[right]", "[both]", "[norm]", "  ", "\n\n", "\r\n", " \n ", "1234567", "Hello", " world", "\u0130stanbul",
         "\u041f\u0440\u0438\u0432\u0435\u0442", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
         "e\u0301\u0327", "\ufb01", "<unk>", "<0x41>"]


def random_strings(count, seed):
    generator = random.Random(seed)
    blocks = [range(first, first + 256) for first in range(0, 0x20000, 256) if not 0xD800 <= first <= 0xDFFF]
    result = []
    for _ in range(count):
        kind, parts = generator.random(), []
        block = generator.choice(blocks)
        for _ in range(generator.randrange(1, 24)):
            draw = generator.random()
            if draw < 0.12:
                parts.append(generator.choice(WORDS))
            elif draw < 0.55 or kind < 0.3:
                parts.append(generator.choice(COMMON))
            elif kind < 0.7:
                parts.append(chr(generator.choice(block)))
            else:
                parts.append(chr(generator.choice(CHARACTERS)))
        result.append("".join(parts))
    return result


def mixed_text(size):
    """Prose, code, scripts, emoji."""
    generator = random.Random(7)
    parts, total = [], 0
    sources = [p for p in sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))]
    prose = [p for p in (os.path.join(ROOT, "README.md"), *sorted(glob.glob(os.path.join(ROOT, "doc", "*.md"))))]
    ranges = [(0x400, 0x4FF), (0x370, 0x3FF), (0x4E00, 0x9FFF), (0x3040, 0x30FF), (0xAC00, 0xD7A3), (0x900, 0x97F),
              (0x600, 0x6FF), (0x5D0, 0x5EA), (0xE00, 0xE5B), (0xC0, 0x24F), (0x10A0, 0x10FF), (0x1F300, 0x1FAFF)]
    while total < size:
        kind = generator.random()
        if kind < 0.25:
            text = open(generator.choice(sources), encoding="utf-8", errors="replace").read()[:20000]
        elif kind < 0.5:
            text = open(generator.choice(prose), encoding="utf-8").read()[:20000]
        else:
            low, high = generator.choice(ranges)
            letters = [chr(generator.randrange(low, high + 1)) for _ in range(80)]
            stock = ["".join(generator.choices(letters, k=generator.randrange(1, 9))) for _ in range(300)]
            between = [" ", " ", " ", ", ", ". ", "\n", " 12 ", "!\U0001f600"]
            text = "".join(generator.choice(stock) + generator.choice(between) for _ in range(1500))
        parts.append(text)
        total += len(text.encode())
    return "".join(parts)


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers of each kind

def train(tokenizer, text, size, alphabet, special):
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=special,
                                  show_progress=False)
    tokenizer.train_from_iterator([text[i:i + 20000] for i in range(0, len(text), 20000)], trainer)
    return tokenizer


def byte_level(pre_tokenizer, text, normalizer=None, size=None, **options):
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, text, size or SIZE, pre_tokenizers.ByteLevel.alphabet(), [])
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior, invert),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def of_characters(text, normalizer, pre_tokenizer, decoder, fallback=True, **options):
    """Trained on words that begin with U+2581, as SentencePiece does."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)] * fallback
    train(tokenizer, text, SIZE + 256 * fallback, [META], special)
    file = json.loads(tokenizer.to_str())
    file["added_tokens"] = [t for t in file["added_tokens"] if t["id"] < 3]
    file["model"].update(byte_fallback=fallback, fuse_unk=True, **options)
    tokenizer = Tokenizer.from_str(json.dumps(file))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def added(tokenizer):
    """Added tokens with every option."""
    tokenizer.add_tokens([
        AddedToken("[word]", single_word=True, normalized=False), AddedToken("[left]", lstrip=True, normalized=False),
        AddedToken("[right]", rstrip=True, normalized=False), AddedToken("[norm]", normalized=True),
        AddedToken("[both]", lstrip=True, rstrip=True, single_word=True, normalized=True), AddedToken("e\u0301x"),
        AddedToken("  ", normalized=False)])
    return tokenizer


def made(text):
    llama2 = normalizers.Sequence([normalizers.Prepend(META), normalizers.Replace(" ", META)])
    pieces = decoders.Sequence([decoders.Replace(META, " "), decoders.ByteFallback(), decoders.Fuse(),
                                decoders.Strip(" ", 1, 0)])
    byte = pre_tokenizers.ByteLevel
    return {
        "gpt2": lambda: byte_level(byte(add_prefix_space=False), text),
        "gpt2-prefix": lambda: byte_level(byte(add_prefix_space=True), text),
        "gpt2-added": lambda: added(byte_level(byte(add_prefix_space=False), text, normalizers.NFC())),
        "llama3": lambda: byte_level(split(LLAMA3), text, ignore_merges=True),
        "gpt4-removed": lambda: byte_level(split(LLAMA3, "removed", True), text),
        "phi4": lambda: byte_level(split(PHI4), text),
        "r50k": lambda: byte_level(split(R50K), text),
        "qwen2": lambda: byte_level(split(QWEN2), text, normalizers.NFC()),
        "o200k": lambda: byte_level(split(O200K), text),
        "smollm2": lambda: byte_level(
            pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte(add_prefix_space=False)]), text),
        "llama2": lambda: of_characters(text, llama2, None, pieces),
        "llama2-added": lambda: added(of_characters(text, llama2, None, pieces)),
        "mistral": lambda: of_characters(text, None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
                                         decoders.Metaspace(prepend_scheme="first")),
        "metaspace": lambda: of_characters(text, None, pre_tokenizers.Metaspace(), decoders.Metaspace(),
                                           fallback=False),
        "gemma": lambda: of_characters(text, normalizers.Replace(" ", META),
                                       pre_tokenizers.Split(" ", "merged_with_previous"),
                                       decoders.Sequence([decoders.Replace(META, " "), decoders.ByteFallback(),
                                                          decoders.Fuse()])),
    }


def ranks_of(tokenizer):
    """A vocabulary of tiktoken from a byte-level one: the bytes, then the result of each merge."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in visible}
    for n, byte in enumerate(byte for byte in range(256) if byte not in visible):
        symbols[byte] = chr(256 + n)
    inverse = {symbol: byte for byte, symbol in symbols.items()}
    ranks = {bytes([byte]): rank for rank, byte in enumerate(visible + [b for b in range(256) if b not in visible])}
    for a, b in json.loads(tokenizer.to_str())["model"]["merges"]:
        ranks[bytes(inverse[c] for c in a + b)] = len(ranks)
    return ranks


def rank_file(path, ranks):
    with open(path, "wb") as file:
        for token, rank in ranks.items():
            file.write(base64.b64encode(token) + b" %d\n" % rank)


def gpt2_ranks(directory):
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    return data_gym_to_mergeable_bpe_ranks(os.path.join(directory, "vocab.bpe"),
                                           os.path.join(directory, "encoder.json"))


# ----------------------------------------------------------------------------------------------------------------------
# Comparison

def ours(program, path, pattern, texts):
    data = b"".join(struct.pack("<I", len(t)) + t for t in texts)
    output = subprocess.run([program, path, pattern], input=data, stdout=subprocess.PIPE, check=True).stdout
    numbers, at, result = numpy.frombuffer(output, dtype=numpy.int32), 0, []
    while at < len(numbers):
        result.append(numbers[at + 1:at + 1 + numbers[at]].tolist())
        at += 1 + numbers[at]
    return result


BATCH = 50000  # texts at a time: what the packages return takes a lot of memory


def compare(name, program, path, pattern, encode, strings, text):
    wrong, tokens, texts = 0, 0, strings + [text]
    for first in range(0, len(texts), BATCH):
        some = texts[first:first + BATCH]
        theirs = encode(some)
        found = ours(program, path, pattern, [s.encode() for s in some])
        assert len(found) == len(theirs)
        differ = [i for i in range(len(some)) if found[i] != theirs[i]]
        for i in differ[:3 - wrong] if wrong < 3 else []:
            print(f"    {some[i][:200]!r}\n    ours   {found[i][:60]}\n    theirs {theirs[i][:60]}")
        wrong += len(differ)
        tokens += sum(map(len, found))
    print(f"{name}: {wrong} of {len(texts)} texts differ, {tokens} tokens", flush=True)
    return wrong


def speed(name, program, path, pattern, text, one, two, label):
    """MB/s of each in turn, the best of 3 rounds."""
    size = len(text.encode()) / 1e6
    with open("build/tokenizers_speed.txt", "w", encoding="utf-8", newline="") as file:
        file.write(text)
    best = {}
    for _ in range(3):
        for threads in (1, 2):
            seconds = float(subprocess.run([program, path, pattern, "build/tokenizers_speed.txt", "1", str(threads)],
                                           stdout=subprocess.PIPE, check=True).stdout)
            best["ours", threads] = min(best.get(("ours", threads), 1e9), seconds)
            call = one if threads == 1 else two
            begin = time.monotonic()
            call()
            best[label, threads] = min(best.get((label, threads), 1e9), time.monotonic() - begin)
    for threads in (1, 2):
        us, them = size / best["ours", threads], size / best[label, threads]
        print(f"{name}, {threads} thread(s): ours {us:.1f} MB/s, {label} {them:.1f} MB/s, {us / them:.1f} x",
              flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# Directories

END = "<|endoftext|>"


def directories(root):
    """Yields name and path of each directory, and a word of the message if it is to be refused."""
    source = os.path.join(ROOT, "dev/test/fixtures/tokenizers")

    def made_of(name, kind, refused=None, change=None, files=False, **others):
        path = os.path.join(root, name)
        os.makedirs(path, exist_ok=True)
        for old in os.listdir(path):
            os.remove(os.path.join(path, old))
        if kind and files:  # GPT-2's two files, as before transformers 4
            for old, new in ("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt"):
                shutil.copy(os.path.join(source, "gpt2", old), os.path.join(path, new))
        elif kind:
            shutil.copy(os.path.join(source, kind + ".json"), os.path.join(path, "tokenizer.json"))
        for file, content in others.items():
            if content is not None:
                with open(os.path.join(path, file + (".json" if "." not in file else "")), "w") as out:
                    json.dump(content, out)
        if change:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            change(tokenizer)
            tokenizer.save_pretrained(path)
        return name, path, refused

    def request(tokenizer):
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer(["a", "b c d e f"], padding=True, truncation=True, max_length=16)

    def chat(tokenizer):
        tokenizer.add_special_tokens({"pad_token": "<pad>", "additional_special_tokens": ["<|user|>", "<|bot|>"]})
        tokenizer.add_tokens(["newword", "<think>"])

    bytes_named = dict(bos_token=END, eos_token=END)
    pieces_named = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast = "PreTrainedTokenizerFast"
    for kind in "gpt2", "gpt2-added", "llama3", "qwen2", "smollm2", "phi4", "llama2", "mistral", "metaspace":
        names = pieces_named if kind in ("llama2", "mistral", "metaspace") else bytes_named
        config = dict(tokenizer_class=fast, **names)
        yield made_of(kind, kind, tokenizer_config=config, special_tokens_map=names)
        yield made_of(kind + "-saved", kind, change=lambda t: None, tokenizer_config=config)
        yield made_of(kind + "-request", kind, change=request, tokenizer_config=config)
        yield made_of(kind + "-chat", kind, change=chat, tokenizer_config=config)
    for kind, cls in ("gpt2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer"), ("mistral", "LlamaTokenizer"):
        config = dict(tokenizer_class=cls, **(pieces_named if kind == "mistral" else bytes_named))
        yield made_of(cls, kind, tokenizer_config=config)
        yield made_of(cls + "-fast", kind, tokenizer_config=config | dict(tokenizer_class=cls + "Fast"))
        yield made_of(cls + "-chat", kind, change=chat, tokenizer_config=config)
        for flag in True, False:
            agrees = flag == (kind == "mistral")
            yield made_of(f"{cls}-prefix-{flag}", kind, None if agrees else "add_prefix_space",
                          tokenizer_config=config | dict(add_prefix_space=flag))
            yield made_of(f"{cls}-bos-{flag}", kind, tokenizer_config=config | dict(add_bos_token=flag))
            yield made_of(f"{cls}-backend-prefix-{flag}", kind,
                          tokenizer_config=config | dict(tokenizer_class="TokenizersBackend", add_prefix_space=flag))
    for cls in fast, "LlamaTokenizerFast":
        for flag in True, False:
            yield made_of(f"{cls}-bos-{flag}", "llama3", tokenizer_config=bytes_named | dict(
                tokenizer_class=cls, add_bos_token=flag))
    config = dict(tokenizer_class="GPT2Tokenizer", **bytes_named)
    decoder = {"420": dict(content=END, special=True, lstrip=True, rstrip=False, normalized=False, single_word=False)}
    user = dict(content="<|user|>", special=True, lstrip=False, rstrip=False, normalized=False, single_word=False)
    for name, refused, others in [
            ("", None, {}), ("-map", None, dict(special_tokens_map=bytes_named | dict(unk_token=END, pad_token=END))),
            ("-added", "added_tokens.json", dict(added_tokens={"<|user|>": 421, "<|bot|>": 422})),
            ("-added-known", None, dict(added_tokens={END: 420})),
            ("-extra", "special_tokens_map.json", dict(special_tokens_map=dict(
                additional_special_tokens=["<|user|>"]))),
            ("-pad", "pad_token", dict(special_tokens_map=dict(pad_token="<pad>"))),
            ("-decoder", None, dict(tokenizer_config=config | dict(added_tokens_decoder=decoder))),
            ("-decoder-new", "'<|user|>'", dict(tokenizer_config=config | dict(
                added_tokens_decoder=decoder | {"421": user}))),
            ("-decoder-hides-map", None, dict(tokenizer_config=config | dict(added_tokens_decoder=decoder),
                                              special_tokens_map=dict(pad_token="<pad>"), added_tokens={"<x>": 421})),
            ("-bos", None, dict(tokenizer_config=config | dict(add_bos_token=True))),
            ("-eos", "add_eos_token", dict(tokenizer_config=config | dict(add_eos_token=True))),
            ("-prefix", "add_prefix_space", dict(tokenizer_config=config | dict(add_prefix_space=True)))]:
        yield made_of("files" + name, "gpt2", refused, files=True, **(dict(tokenizer_config=config) | others))
    config = bytes_named | dict(tokenizer_class=fast)
    for name, refused, others in [
            ("-added", "added_tokens.json", dict(added_tokens={"<|user|>": 423})),
            ("-added-known", None, dict(added_tokens={END: 420})),
            ("-image", "image_token", dict(tokenizer_config=config | dict(image_token="<image>"))),
            ("-extra", "extra_special_tokens", dict(tokenizer_config=config | dict(extra_special_tokens={"a": "<i>"}))),
            ("-eos", None, dict(tokenizer_config=config | dict(add_eos_token=True))),
            ("-split", "split_special_tokens", dict(tokenizer_config=config | dict(split_special_tokens=True))),
            ("-pad", "pad_token", dict(special_tokens_map=dict(pad_token="<pad>")))]:
        yield made_of("json" + name, "gpt2", refused, **(dict(tokenizer_config=config) | others))
    yield made_of("sentencepiece", None, "tokenizer.model", **{"tokenizer.model": {}})


def compare_directories(program, root):
    """Of 200 texts in each directory; returns the number of directories with other ids or another outcome."""
    wrong, count, texts = 0, 0, random_strings(195, 11) + ["", " ", "The quick <|user|> fox newword <pad>",
                                                           f"  {END} a<s> b</s>", "<think>x  <|bot|>"]
    for name, path, refused in directories(root):
        count += 1
        run = subprocess.run([program, path, "^"], input=b"", capture_output=True)
        message = run.stderr.decode().strip()
        if run.returncode or refused:
            good = bool(run.returncode and refused and refused in message)
            print(f"{'ok    ' if good else 'FAILED'}  {name}: {message}")
            wrong += not good
            if not good or "save_pretrained" not in message or name == "sentencepiece":
                continue
            name += ", saved as the message says"
            transformers.AutoTokenizer.from_pretrained(path).save_pretrained(path)
            run = subprocess.run([program, path, "^"], input=b"", capture_output=True)
            good, message = run.returncode == 0, run.stderr.decode().strip()
        if run.returncode == 0:
            found = ours(program, path, "^", [t.encode() for t in texts])
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            theirs = [tokenizer(t).input_ids for t in texts]
            differ = [i for i in range(len(texts)) if found[i] != theirs[i]]
            good = not differ
            message = f"{sum(map(len, found))} ids" + "".join(
                f"; {texts[i]!r}: {found[i]}, not {theirs[i]}" for i in differ[:1])
        wrong += not good
        print(f"{'ok    ' if good else 'FAILED'}  {name}: {message}", flush=True)
    print(f"{wrong} of {count} directories differ")
    return wrong


def fixtures(directory):
    global SIZE
    SIZE = 420
    os.makedirs(directory, exist_ok=True)
    text = mixed_text(300000)
    text = "".join(c for c in text if ord(c) < 0x180)  # leaves room for merges besides the characters
    words = ["", " ", "  a", "Hello world", "it's IT'S i'\u017f they'Re", "1234567 12 3", "a \n\n b \r\n", "tail \n ",
             "x<|endoftext|>y", "  [left]a [right]  b", "a[word]b [word] c", "[both] x",
             "e\u0301x e\u0327\u0301", "\u2581a\u2581", "\uac00\u1100\u1161\u11a8", "\U0001f468\u200d\U0001f469 \ufe0f",
             "AbcDEF GHi\u01c5x", "a\u0301B", "\u0301A", "<s>a</s> b", "a" * 200, "ab" * 90 + "cde" * 40,
             "\u3000\u3000x\u00a0y",
             "\u00bd\u00b2\u0663", "def f(x):\n\treturn x+1  # /*\n//\n", "\x00\x1f\x7f"]
    strings = words + random_strings(30, 5)
    result = {"strings": strings, "kinds": {}}

    def save(name, data):
        with open(os.path.join(directory, name), "w", encoding="utf-8", newline="") as file:
            file.write(data)
    for name, make in made(text).items():
        tokenizer = make()
        file = json.loads(tokenizer.to_str())
        save(name + ".json", json.dumps(file, ensure_ascii=False, separators=(",", ":")))
        result["kinds"][name + ".json"] = [tokenizer.encode(s, add_special_tokens=False).ids for s in strings]
        if name == "gpt2":
            files = os.path.join(directory, "gpt2")
            os.makedirs(files, exist_ok=True)
            vocabulary = file["model"]["vocab"] | {"<|endoftext|>": len(file["model"]["vocab"])}
            save("gpt2/encoder.json", json.dumps(vocabulary))
            save("gpt2/vocab.bpe", "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in file["model"]["merges"]))
    base = ranks_of(byte_level(split(LLAMA3), text))
    rank_file(os.path.join(directory, "ranks.tiktoken"), base)
    for pattern, regular in (("gpt2", GPT2), ("cl100k", CL100K), ("o200k", O200K)):
        encoding = tiktoken.Encoding(pattern, pat_str=regular, mergeable_ranks=base,
                                     special_tokens={"<|endoftext|>": len(base)})
        result["kinds"][pattern] = [encoding.encode(s, allowed_special="all") for s in strings]
    save("ids.json", json.dumps(result, separators=(",", ":")))


def decodings(directory):
    """For each fixture and string the ids and the text that they are decoded to; null if it is the string."""
    with open(os.path.join(directory, "ids.json"), encoding="utf-8") as file:
        strings = json.load(file)["strings"]
    for special in "<s>", "</s>", "<unk>", "<|endoftext|>", "\U0001f43b":  # the last: four bytes, or <unk>
        strings += [f"the {special} the", f"the{special}the", f" {special}  {special}{special} a", f"{special} ",
                    special]
    strings += ["<s></s> a", "<unk> \U0001f43b a", "a <s> <|im_end|> b", "<s><s>\n a"]
    kinds = {}
    for path in sorted(glob.glob(os.path.join(directory, "*.json"))):
        name = os.path.basename(path)
        if name not in ("ids.json", "decodings.json"):
            tokenizer = Tokenizer.from_file(path)
            ids = [tokenizer.encode(s, add_special_tokens=False).ids for s in strings]
            texts = [tokenizer.decode(i, skip_special_tokens=False) for i in ids]
            kinds[name] = [[i, None if t == s else t] for i, t, s in zip(ids, texts, strings)]
    with open(os.path.join(directory, "decodings.json"), "w", encoding="utf-8") as file:
        json.dump({"strings": strings, "kinds": kinds}, file, separators=(",", ":"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpt2")
    parser.add_argument("--program", default="build/tokenizer_ids")
    parser.add_argument("--strings", type=int, default=1000000)
    parser.add_argument("--bytes", type=int, default=10000000)
    parser.add_argument("--only")
    parser.add_argument("--seed", type=int, default=1, help="of the random strings")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--fixtures")
    parser.add_argument("--decodings")
    parser.add_argument("--directories", help="where to make them")
    flags = parser.parse_args()
    if flags.fixtures:
        fixtures(flags.fixtures)
        return
    if flags.decodings:
        decodings(flags.decodings)
        return
    if flags.directories:
        transformers.utils.logging.set_verbosity_error()
        sys.exit(compare_directories(flags.program, flags.directories) > 0)
    print(f"tokenizers {tokenizers.__version__}, tiktoken {tiktoken.__version__}")
    os.makedirs("build/tokenizers", exist_ok=True)
    text = mixed_text(flags.bytes)
    lesson = text[:2000000]
    strings = [] if flags.speed else random_strings(flags.strings, flags.seed)
    lines = text.splitlines(keepends=True)
    batch = ["".join(lines[i:i + 200]) for i in range(0, len(lines), 200)]
    wrong = 0
    for name, make in made(lesson).items():
        if flags.only not in (None, name):
            continue
        path = f"build/tokenizers/{name}.json"
        tokenizer = make()
        tokenizer.save(path)
        tokenizer = Tokenizer.from_file(path)

        def encode(texts, tokenizer=tokenizer):
            return [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        if flags.speed:
            os.environ["TOKENIZERS_PARALLELISM"] = "true"
            speed(name, flags.program, path, "-", text,
                  lambda: [tokenizer.encode(t, add_special_tokens=False) for t in batch],
                  lambda: tokenizer.encode_batch_fast(batch, add_special_tokens=False), "tokenizers")
        else:
            wrong += compare(name, flags.program, path, "-", encode, strings, text)
    kinds = {"tiktoken-gpt2": ("gpt2", GPT2), "tiktoken-cl100k": ("cl100k", CL100K), "tiktoken-o200k": ("o200k", O200K)}
    base = None
    for name, (pattern, regular) in kinds.items():
        if flags.only not in (None, name):
            continue
        base = base or ranks_of(byte_level(split(LLAMA3), lesson, size=20000))
        path = f"build/tokenizers/{pattern}.tiktoken"
        rank_file(path, base)
        encoding = tiktoken.Encoding(name, pat_str=regular, mergeable_ranks=base,
                                     special_tokens={"<|endoftext|>": len(base)})

        def encode(texts, encoding=encoding):
            return [encoding.encode(t, allowed_special="all") for t in texts]
        if flags.speed:
            speed(name, flags.program, path, pattern, text, lambda: encoding.encode_ordinary(text),
                  lambda: encoding.encode_ordinary_batch(batch, num_threads=2), "tiktoken")
        else:
            wrong += compare(name, flags.program, path, pattern, encode, strings, text)
    if flags.gpt2 and flags.only in (None, "gpt2-real"):
        ranks = gpt2_ranks(flags.gpt2)
        encoding = tiktoken.Encoding("gpt2", pat_str=tiktoken_gpt2_pattern(), mergeable_ranks=ranks,
                                     special_tokens={"<|endoftext|>": 50256}, explicit_n_vocab=50257)
        path = os.path.join(flags.gpt2, "encoder.json")

        def encode(texts):
            return [encoding.encode(t, allowed_special="all") for t in texts]
        if flags.speed:
            speed("gpt2-real", flags.program, path, "-", text, lambda: encoding.encode_ordinary(text),
                  lambda: encoding.encode_ordinary_batch(batch, num_threads=2), "tiktoken")
        else:
            wrong += compare("gpt2-real", flags.program, path, "-", encode, strings, text)
    sys.exit(wrong > 0)


def tiktoken_gpt2_pattern():
    from tiktoken_ext import openai_public
    return openai_public.r50k_pat_str


main()
