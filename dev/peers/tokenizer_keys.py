"""What `tokenizers` makes of each key of a tokenizer.json, for dev/test/test_tokenizer.c.

    python3 dev/peers/tokenizer_keys.py --write     rewrites dev/test/fixtures/tokenizer_keys.txt
    python3 dev/peers/tokenizer_keys.py             checks it against this version of `tokenizers`

Changes one member of a small tokenizer of each kind, and encodes a text. Lines of the file, with tabs between words:

    text TEXT                   as JSON
    values VALUE ...            what every member is changed to, as JSON
    tokenizer NAME FILE         a tokenizer.json
    key NAME PATH A B C OUTCOMES   a member: its name begins at byte A of FILE, its value is bytes [B, C); a letter for
                                the file without it, then one per value: of the tokens, or ! if `tokenizers` fails
    tokens NAME LETTER ID ...   the tokens of the text, with those of the template; A: with the file as it is
"""

import json
import os
import sys

sys.path = sys.path[1:]  # this folder has files named like packages
try:
    import tokenizers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(0)

FILE = "dev/test/fixtures/tokenizer_keys.txt"
TEXT = "ab a  aba<x> b12<y>  e\u0301\u00e9 \u2581ab\n<s>z zaba"
VALUES = [None, True, False, 0, 1, "", "a", "first", []]
LLAMA3 = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
          "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
QWEN2 = LLAMA3.replace("\\p{N}{1,3}", "\\p{N}")
SPLITS = {  # of published tokenizers, besides Llama 3's
    "qwen2": QWEN2,
    "gpt2": "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
    "r50k": "'(?:[sdmt]|ll|ve|re)| ?\\p{L}++| ?\\p{N}++| ?[^\\s\\p{L}\\p{N}]++|\\s++$|\\s+(?!\\S)|\\s",
    "r50k of 2023": "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
    "phi4": "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|"
            "\\s*[\\r\\n]|\\s+(?!\\S)|\\s+",
}
BYTES = ["a", "b", "e", "1", "2", "\u0120", "\u010a", "<", ">", "x", "y", "s", "\u00cc", "\u0123", "\u00c3", "\u00a9",
         "\u00e2", "\u0138", "ab", "aba", "\u0120a", "12", "\u0120\u0120", "\u00c3\u00a9", "\u0120\u0120a"]
BYTE_MERGES = ["a b", "ab a", "\u0120 a", "1 2", "\u0120 \u0120", "\u00c3 \u00a9", "\u0120 \u0120a"]
META = "\u2581"
PIECES = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "a", "b", META, "1", "2", "e", "ab", META + "a", META + "ab",
          META + META, "12"]
PIECE_MERGES = ["a b", META + " a", META + "a b", META + " " + META, "1 2"]


def model(pieces, merges, **options):
    return dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
                fuse_unk=False, byte_fallback=False, ignore_merges=False) | options | dict(
                    vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)


def added(id, content, **options):
    return dict(id=id, content=content, single_word=False, lstrip=False, rstrip=False, normalized=False,
                special=False) | options


def template(token, id):
    return dict(type="TemplateProcessing", single=[dict(SpecialToken=dict(id=token, type_id=0)),
                                                   dict(Sequence=dict(id="A", type_id=0))], pair=[],
                special_tokens={token: dict(id=token, ids=[id], tokens=[token])})


def whole(model, tokens, normalizer, pre_tokenizer, post_processor, decoder):
    return dict(version="1.0", truncation=None, padding=None, added_tokens=tokens, normalizer=normalizer,
                pre_tokenizer=pre_tokenizer, post_processor=post_processor, decoder=decoder, model=model)


def byte_level(**options):
    return dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True) | options


BYTE_TOKENS = [added(len(BYTES), "<x>", special=True), added(len(BYTES) + 1, "<y>", lstrip=True, rstrip=True)]
PIECE_TOKENS = [added(0, "<unk>", special=True), added(1, "<s>", special=True), added(2, "</s>", special=True),
                added(len(PIECES), "<x>", single_word=True, normalized=True)]
STRIP = dict(type="Sequence", decoders=[dict(type="Replace", pattern=dict(String=META), content=" "),
                                        dict(type="ByteFallback"), dict(type="Fuse"),
                                        dict(type="Strip", content=" ", start=1, stop=0)])
METASPACE = dict(type="Metaspace", replacement=META, prepend_scheme="always", split=True)
TOKENIZERS = {
    "bytes": whole(model(BYTES, BYTE_MERGES), BYTE_TOKENS, dict(type="NFC"), byte_level(),
                   dict(type="Sequence", processors=[byte_level(), template("<x>", len(BYTES))]), byte_level()),
    "split": whole(model(BYTES, BYTE_MERGES, ignore_merges=True), BYTE_TOKENS, None,
                   dict(type="Sequence", pretokenizers=[
                       dict(type="Split", pattern=dict(Regex=LLAMA3), behavior="Isolated", invert=False),
                       byte_level(use_regex=False)]), byte_level(), byte_level()),
    "digits": whole(model(BYTES, BYTE_MERGES), BYTE_TOKENS, None,
                    dict(type="Sequence", pretokenizers=[dict(type="Digits", individual_digits=True), byte_level()]),
                    None, byte_level()),
    "pieces": whole(model(PIECES, PIECE_MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True), PIECE_TOKENS,
                    dict(type="Sequence", normalizers=[dict(type="Prepend", prepend=META),
                                                       dict(type="Replace", pattern=dict(String=" "), content=META)]),
                    None, template("<s>", 1), STRIP),
    "metaspace": whole(model(PIECES, PIECE_MERGES, unk_token="<unk>"), PIECE_TOKENS, None, METASPACE,
                       template("<s>", 1), METASPACE),
}


for name, regex in SPLITS.items():  # only the first member of these is changed
    tokenizer = json.loads(json.dumps(TOKENIZERS["split"]))
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = regex
    TOKENIZERS[f"split {name}"] = tokenizer


def members(value, at, path=""):
    """The text of a value that begins at a byte of a file, and (path, A, B, C) of each member in it."""
    found = []
    if isinstance(value, dict) and path != "model.vocab":
        text = "{"
        for key, member in value.items():
            begin = at + len(text.encode()) + (text != "{")
            text += ("," if text != "{" else "") + json.dumps(key, ensure_ascii=False) + ":"
            inner, more = members(member, at + len(text.encode()), f"{path}.{key}".lstrip("."))
            found += [(f"{path}.{key}".lstrip("."), begin, at + len(text.encode()),
                       at + len((text + inner).encode()))] + more
            text += inner
        return text + "}", found
    if isinstance(value, list) and path != "model.merges":
        text = "["
        for i, element in enumerate(value):
            text += "," if i else ""
            inner, more = members(element, at + len(text.encode()), f"{path}.{i}")
            text += inner
            found += more
        return text + "]", found
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")), found


def edited(data, begin, first, end, value):
    """A file with another value for a member, or without the member."""
    if value is not VALUES:
        return data[:first] + json.dumps(value).encode() + data[end:]
    if data[end:end + 1] == b",":
        end += 1
    elif data[begin - 1:begin] == b",":
        begin -= 1
    return data[:begin] + data[end:]


def tokens(data):
    """The tokens of the text, in a process of its own, since some files abort it; None: it fails."""
    end, pipe = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            os.write(pipe, json.dumps(tokenizers.Tokenizer.from_str(data.decode()).encode(TEXT).ids).encode())
        finally:
            os._exit(0)
    os.close(pipe)
    with os.fdopen(end, "rb") as answer:
        ids = answer.read()
    os.waitpid(child, 0)
    return tuple(json.loads(ids)) if ids else None


def lines():
    yield ["text", json.dumps(TEXT)]
    yield ["values", *map(json.dumps, VALUES)]
    for name, tokenizer in TOKENIZERS.items():
        text, found = members(tokenizer, 0)
        letters = {None: "!", tokens(text.encode()): "A"}
        assert json.loads(text) == tokenizer and len(letters) == 2, name
        yield ["tokenizer", name, text]
        for path, *place in found[:1] if name.startswith("split ") else found:
            results = [tokens(edited(text.encode(), *place, value)) for value in [VALUES, *VALUES]]
            for result in results:
                letters.setdefault(result, chr(ord("A") + len(letters) - 1))
            yield ["key", name, path, *map(str, place), "".join(letters[result] for result in results)]
        for ids, letter in letters.items():
            if ids is not None:
                yield ["tokens", name, letter, *map(str, ids)]


text = f"# tokenizers {tokenizers.__version__}: dev/peers/tokenizer_keys.py says what this is\n"
text += "".join("\t".join(line) + "\n" for line in lines())
if "--write" in sys.argv:
    with open(FILE, "w", encoding="utf-8", newline="") as file:
        file.write(text)
    print(f"{FILE}: {len(text)} bytes")
else:
    saved = open(FILE, encoding="utf-8", newline="").read().split("\n")
    differ = [line for line in set(saved) ^ set(text.split("\n")) if not line.startswith("#")]
    print(*sorted(differ), f"{len(differ)} lines differ", sep="\n")
    sys.exit(len(differ) > 0)
