"""Prints llmtrain/text/unicode_tables.h: the properties of each character that tokenizers need.

    pip install unicodedata2==16.0.0 tokenizers
    python3 dev/peers/unicode_tables.py > llmtrain/text/unicode_tables.h

Categories are those of Unicode 16, used by the regular expressions of `tokenizers` and `tiktoken`. NFC is that of
`tokenizers`, which has Unicode 9: a character added later neither moves nor combines. Its word characters and digits
are found by calling the package too: Python cannot read its tables.
"""
import re
import sys

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


def runs(values):
    """(length, value) of every run over all code points."""
    result, last, length = [], None, 0
    for c in range(0x110000):
        value = values.get(c, 0)
        if value == last:
            length += 1
            continue
        if length:
            result.append((length, last))
        last, length = value, 1
    return result + [(length, last)]


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
    composing = [number for c, a, b, composes in pairs if composes for number in (c, a, b)]
    others = [number for c, a, b, composes in pairs if not composes for number in (c, a, b)]
    by_class = [number for length, value in runs(classes()) for number in (length, value)]
    by_combining = [number for length, value in runs(combining()) for number in (length, value)]
    names = "".join(f"    UNICODE_{name},\n" for name in CLASSES) + "    UNICODE_CLASSES"
    versions = f"Unicode {unicode.unidata_version} and tokenizers {tokenizers.__version__}"
    print(f"""// unicode_tables.h: what unicode.h knows of each character.
//
// Made by dev/peers/unicode_tables.py from {versions}: change that, not this file.
// Runs cover all code points from 0 on: a length, then the value of that many.

#ifndef LLMTRAIN_UNICODE_TABLES_H
#define LLMTRAIN_UNICODE_TABLES_H

#include <stdint.h>

// FRACTION: a number that is no word character to `tokenizers`. WORD: what else is one. NEW_NUMBER: a number to its
// splitting of digits, which knows Unicode 17.
enum {{
{names}
}};
""")
    print(array("static const uint32_t UNICODE_CLASS_RUNS[]", by_class))
    print("// Canonical combining classes.")
    print(array("static const uint32_t UNICODE_COMBINING_RUNS[]", by_combining))
    print("// Canonical decompositions: a character, and the two that it is made of, which NFC puts together again.")
    print(array("static const uint32_t UNICODE_COMPOSITIONS[]", composing))
    print("// The same, which NFC takes apart only; the second is 0 where there is none.")
    print(array("static const uint32_t UNICODE_DECOMPOSITIONS[]", others))
    print("#endif  // LLMTRAIN_UNICODE_TABLES_H")


main()
