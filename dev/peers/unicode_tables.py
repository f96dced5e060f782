"""Prints llmtrain/text/unicode_tables.h: the properties of each character that tokenizers need.

    pip install unicodedata2==16.0.0 tokenizers
    python3 dev/peers/unicode_tables.py > llmtrain/text/unicode_tables.h

Categories are those of Unicode 16, used by the regular expressions of `tokenizers` and `tiktoken`. NFC is that of
`tokenizers`, which has Unicode 9: a character added later neither moves nor combines. Its word characters and digits
are found by calling the package too: Python cannot read its tables.
"""
import re
import sys
import textwrap

try:
    import tokenizers
    import unicodedata2 as unicode
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
except ImportError as missing:
    sys.exit(f"skipped: {missing}; pip install unicodedata2==16.0.0 tokenizers")

CLASSES = ["OTHER", "SPACE", "UPPER", "LOWER", "TITLE", "MODIFIER", "LETTER", "MARK", "NUMBER", "FRACTION", "WORD",
           "NEW_NUMBER"]
OF_CATEGORY = {"Lu": "UPPER", "Ll": "LOWER", "Lt": "TITLE", "Lm": "MODIFIER", "Lo": "LETTER", "Nd": "NUMBER",
               "Nl": "NUMBER", "No": "FRACTION"}
CHARACTERS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
NFC = normalizers.NFC()


def classes():
    digits = pre_tokenizers.Digits(individual_digits=True)
    single = Tokenizer(models.BPE({"x": 0, "[T]": 1}, []))
    single.add_tokens([AddedToken("[T]", single_word=True, normalized=False)])
    result = {}
    for c in CHARACTERS:
        category = unicode.category(chr(c))
        name = OF_CATEGORY.get(category, "MARK" if category[0] == "M" else "OTHER")
        if re.match(r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]", chr(c)):
            name = "SPACE"
        if name == "OTHER" and 1 not in single.encode(chr(c) + "[T]").ids:
            name = "WORD"
        if name == "OTHER" and len(digits.pre_tokenize_str("a" + chr(c) + "a")) > 1:
            name = "NEW_NUMBER"
        result[c] = CLASSES.index(name)
    return result


def runs(values, unit, alternating=()):
    """unit * length + value of every run over all code points. Of two values that alternate for at least 4 code points
    there is one run, with len(CLASSES) as its value."""
    result, c = [], 0
    while c < 0x110000:
        value, end, turns = values.get(c, 0), c, c
        while end < 0x110000 and values.get(end, 0) == value:
            end += 1
        while alternating and turns < 0x110000 and values.get(turns, 0) == alternating[(turns - c) % 2]:
            turns += 1
        if turns - c >= 4:
            value, end = len(CLASSES), turns
        result.append(unit * (end - c) + value)
        c = end
    return result


def combining():
    """The canonical combining classes that the package knows: those that move a mark past its neighbors."""
    result = {}
    for c in CHARACTERS:
        value = unicode.combining(chr(c))
        if value == 0:
            continue
        other = "\u0334" if value != 1 else "\u0345"  # of class 1, and of class 240
        text = "a" + chr(c) + other if value != 1 else "a" + other + chr(c)
        if NFC.normalize_str(text) == unicode.normalize("NFC", text):
            result[c] = value
    return result


def decompositions():
    """(character, first, second, composes) of each canonical decomposition; second is 0 where there is none."""
    result = []
    for c in CHARACTERS:
        text = unicode.decomposition(chr(c))
        if not text or text.startswith("<"):
            continue
        first, second = ([int(part, 16) for part in text.split()] + [0])[:2]
        whole = unicode.normalize("NFD", chr(c))
        if NFC.normalize_str(whole) != unicode.normalize("NFC", whole):
            continue
        pair = chr(first) + (chr(second) if second else "")
        result.append((c, first, second, unicode.normalize("NFC", pair) == chr(c)))
    return result


def groups(pairs):
    """For each second part: it, the number of characters with it, and for each of them its distance from the one before
    (from 0) and its first part."""
    result = []
    for second in sorted({b for _, _, b, _ in pairs}):
        characters = [(c, a) for c, a, b, _ in pairs if b == second]
        result += [second, len(characters)]
        for (c, a), before in zip(characters, [0] + [c for c, _ in characters]):
            result += [c - before, a]
    return result


def array(declaration, numbers):
    lines, line = [], "    "
    for number in numbers:
        word = f"{number},"
        if len(line) + len(word) > 120:
            lines.append(line)
            line = "    "
        line += word
    return declaration + " = {\n" + "\n".join(lines + [line]) + "\n};\n"


def main():
    pairs = decompositions()
    names = textwrap.fill(", ".join(f"UNICODE_{name}" for name in CLASSES + ["CLASSES"]), 116)
    names = textwrap.indent(names, "    ")
    versions = f"Unicode {unicode.unidata_version} and tokenizers {tokenizers.__version__}"
    print(f"""// unicode_tables.h: what unicode.h knows of each character.
//
// Made by dev/peers/unicode_tables.py from {versions}: change that, not this file.
// Runs cover all code points from 0 on: 16 x length + class, or 256 x length + combining class.

#ifndef LLMTRAIN_UNICODE_TABLES_H
#define LLMTRAIN_UNICODE_TABLES_H

#include <stdint.h>

// FRACTION: a number that is no word character to `tokenizers`. WORD: what else is one. NEW_NUMBER: a number to its
// splitting of digits, which knows Unicode 17.
// UNICODE_CLASSES is the value of runs in which UPPER and LOWER alternate.
enum {{
{names}
}};
""")
    alternating = CLASSES.index("UPPER"), CLASSES.index("LOWER")
    print(array("static const uint32_t UNICODE_CLASS_RUNS[]", runs(classes(), 16, alternating)))
    print("// Canonical combining classes.")
    print(array("static const uint32_t UNICODE_COMBINING_RUNS[]", runs(combining(), 256)))
    print("// Canonical decompositions, which NFC puts together again, by their second part: it, the number of characters\n"
          "// with it, and for each of them its distance from the one before and its first part.")
    print(array("static const uint32_t UNICODE_COMPOSITIONS[]", groups([p for p in pairs if p[3]])))
    print("// The same, which NFC takes apart only; the second part is 0 where there is none.")
    print(array("static const uint32_t UNICODE_DECOMPOSITIONS[]", groups([p for p in pairs if not p[3]])))
    print(f"enum {{ UNICODE_PARTED = {len(pairs)} }};  // characters in both tables\n")
    print("#endif  // LLMTRAIN_UNICODE_TABLES_H")


main()
