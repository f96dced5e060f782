"""mutate.py: small bugs by machine. Finds places in the product's sources where a generated bug may be planted, and
writes sources that have many of them at once, each behind a switch: mutant_is(17) is whether bug 17 is chosen, when the
program runs. mutants.py builds such sources, and runs the tests with each.

The scanner knows tokens and brackets, not types: what does not compile is found by compiling. It relies on the
project's style, as spaces around binary operators and none in `float* x`.
"""
import bisect
import fnmatch
import os
import re

TOKEN = re.compile(r'''
      (?P<skip>\s+|//[^\n]*|/\*.*?\*/)
    | (?P<directive>\#(?:[^\n\\]|\\.)*)
    | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    | (?P<number>(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)[uUlLfF]*)
    | (?P<name>[A-Za-z_]\w*)
    | (?P<operator>->|\+\+|--|<<=|>>=|<<<|>>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|<<|>>|.)''', re.X | re.S)
ASSIGN = {'=', '+=', '-=', '*=', '/=', '%=', '&=', '|=', '^=', '<<=', '>>='}
# Operators from weak to strong; an expression around one of them ends at a weaker one.
LEVELS = [{',', ';', '?', ':', '{', '}', 'return', 'case', 'else', 'do', 'goto'} | ASSIGN, {'||'}, {'&&'}, {'|'}, {'^'},
          {'&'}, {'==', '!='}, {'<', '>', '<=', '>='}, {'<<', '>>'}, {'+', '-'}, {'*', '/', '%'}]
REPLACED = {'<': '<=', '<=': '<', '>': '>=', '>=': '>', '==': '!=', '!=': '==', '&&': '||', '||': '&&',
            '+': '-', '-': '+', '*': '+', '/': '*', '%': '+', '+=': '-=', '-=': '+='}
OPPOSITE = {a + end: b + end for a, b in (('min', 'max'), ('max', 'min'))
            for end in ('', '_size', '_int', '_float', '_double', '_u64')} | {
    'fmin': 'fmax', 'fmax': 'fmin', 'fminf': 'fmaxf', 'fmaxf': 'fminf'}
# Dropped, these change no result: memory is returned later or never, which the sanitizers see.
RELEASES = re.compile(r'^(free|munmap|\w+_free|\w+_close|close|fclose|cudaFree\w*)$')
SWITCH = '\1'
KEYWORDS = {'if', 'for', 'while', 'switch', 'return', 'sizeof', 'static_assert', '_Static_assert', 'asm', '__asm__',
            'static', 'const', 'struct', 'typedef', 'using', 'case', 'default', 'goto', 'do', 'else', 'extern',
            'enum', 'union', 'break', 'continue', 'constexpr', 'template', 'auto', 'volatile', 'unsigned'}


class Mutant:
    """One bug: texts of a file from `start` to `end` that are replaced, by `new` without a switch, or by `switched`, in
    which SWITCH stands for the switch."""

    def __init__(self, file, kind, edits):
        self.file, self.kind, self.edits = file, kind, edits
        self.start, self.end = min(e[0] for e in edits), max(e[1] for e in edits)
        self.number, self.entry = 0, None  # of the written list, where it is from there

    def describe(self, source):
        """The lines from which it starts to which it ends, before and after, each as one line, and the first's number.
        """
        first = source.text.rfind('\n', 0, self.start) + 1
        last = source.text.find('\n', self.end)
        after = source.text[first:last]
        for start, end, new, _ in sorted(self.edits, reverse=True):
            after = after[:start - first] + new + after[end - first:]
        return source.line(self.start), ' '.join(source.text[first:last].split()), ' '.join(after.split())


class Source:
    def __init__(self, file, text):
        self.file, self.text, self.tokens = file, text, []
        self.ends = [m.start() for m in re.finditer('\n', text)]
        for m in TOKEN.finditer(text):
            if m.lastgroup != 'skip':
                self.tokens.append((m.lastgroup, m.group(), m.start(), m.end()))
        self.match, self.inside, opened, function = {}, [], [], 0
        for i, (kind, text, _, _) in enumerate(self.tokens):
            # A function's body opens after the parenthesis of its arguments.
            if text in '([{' and kind == 'operator':
                body = text == '{' and i > 0 and self.tokens[i - 1][1] in (')', 'const', 'noexcept')
                opened.append((i, body))
                function += body
            elif text in ')]}' and kind == 'operator' and opened:
                first, body = opened.pop()
                self.match[first], self.match[i] = i, first
                function -= body
            self.inside.append(function > 0)
        # Constants in code for GPUs are lengths of arrays and arguments of templates.
        self.constants = {n + 1 for n, t in enumerate(text.split('\n'))
                          if re.match(r'\s+(static )?const(expr)? \w+ [A-Z]', t)}
        self.parallel = {self.line(t[2]) for t in self.tokens if t[0] == 'directive' and re.search(r'omp.*\bfor', t[1])}

    def line(self, at):
        return bisect.bisect_left(self.ends, at) + 1

    def lines_of(self, mutant):
        return range(self.line(mutant.start), self.line(mutant.end) + 1)

    def of(self, i):
        return self.tokens[i][1] if 0 <= i < len(self.tokens) else ''

    def code(self, first, last, changed=None):
        """The text of these tokens as one line, without comments; token `changed[0]` is replaced by changed[1]."""
        out = ''
        for i in range(first, last + 1):
            _, text, start, _ = self.tokens[i]
            if i > first and start > self.tokens[i - 1][3]:
                out += ' '
            out += changed[1] if changed and i == changed[0] else text
        return out

    def lines_in(self, first, last):
        return self.text.count('\n', self.tokens[first][2], self.tokens[last][3]) * '\n'

    def spaced(self, i):
        return 0 < i < len(self.tokens) - 1 and self.tokens[i - 1][3] < self.tokens[i][2] and \
            self.tokens[i][3] < self.tokens[i + 1][2]

    def region(self, i, level, without=()):
        """The first and last token of the expression around an operator of this level; `without` do not end it."""
        stops = set().union(*LEVELS[:level]) - set(without)
        ends = []
        for step in (-1, 1):
            at = i + step
            while 0 <= at < len(self.tokens):
                kind, text = self.tokens[at][:2]
                if kind == 'directive' or text in stops and (text not in '&<>' or self.spaced(at)):
                    break
                if at in self.match and kind == 'operator':
                    if (self.match[at] > at) != (step > 0):
                        break
                    at = self.match[at]
                at += step
            ends.append(at - step)
        return ends

    def replace(self, kind, first, last, new, switched=None):
        old = self.code(first, last)
        switched = switched or f'({SWITCH} ? ({new}) : ({old}))'
        return Mutant(self.file, kind, [(self.tokens[first][2], self.tokens[last][3], new,
                                         switched + self.lines_in(first, last))])

    def declares(self, bracket):
        """Whether a bracket is the length of an array that is declared."""
        start = bracket
        while start > 0 and self.of(start - 1) not in ('{', ';', '('):
            if self.of(start - 1) == '}' and self.of(self.match.get(start - 1, 1) - 1) != '=':
                break
            start = self.match[start - 1] if self.of(start - 1) in (')', ']', '}') else start - 1
        if self.of(start + 1) == '<' and not self.spaced(start + 1):  # a template's type
            start = next((k for k in range(start, bracket) if self.of(k) == '>'), start)
        typed = self.tokens[start + 1][0] == 'name' and self.of(start) not in ('return', 'else') or \
            self.of(start + 1) == '*' and not self.spaced(start + 1) or self.of(start) in ('const', 'static')
        first = self.region(bracket, 1)[0]
        return typed and self.of(first - 1) not in ASSIGN and '[' not in [self.of(k) for k in range(first, bracket)
                                                                          if self.match.get(k, 0) > bracket]

    def arguments(self, opening):
        """The first and last tokens of each argument of a call."""
        out, first, at = [], opening + 1, opening + 1
        while at < self.match[opening]:
            if self.of(at) == ',':
                out.append((first, at - 1))
                first = at + 1
            at = self.match[at] + 1 if self.of(at) in ('(', '[', '{') and at in self.match else at + 1
        return out + [(first, at - 1)] if at > first else out

    def statement(self, i):
        """The last token of the call or assignment that begins at this token, or -1."""
        before, text, after = self.of(i - 1), self.of(i), self.of(i + 1)
        begins = before in (';', '{', '}', 'else', 'do') or \
            before == ')' and self.of(self.match.get(i - 1, 1) - 1) in ('if', 'for', 'while')
        name = self.tokens[i][0] == 'name' and text not in KEYWORDS and (
            after in ('(', '[', '.', '->', '++', '--') or after in ASSIGN or after == '<' and not self.spaced(i + 1))
        if not begins or not (name or text == '*' and self.tokens[i + 1][0] in ('name', 'operator')):
            return -1
        if name and after == '(' and RELEASES.match(text):
            return -1
        if after == '<':  # a template's name: not the type in a declaration
            closing = next((k for k in range(i, min(i + 20, len(self.tokens))) if self.of(k) == '>'), i)
            if self.of(closing + 1) != '(':
                return -1
        at = i
        while at < len(self.tokens) and self.of(at) != ';':
            if self.of(at) in ('{', '}') or self.tokens[at][0] == 'directive':
                return -1
            at = self.match[at] + 1 if self.of(at) in ('(', '[') and at in self.match else at + 1
        return at - 1

    def mutants(self):
        """Every mutant that this scanner knows to plant."""
        out, parallel, length = [], 0, 0
        for i, (kind, text, start, end) in enumerate(self.tokens):
            if text == '[' and i in self.match and self.inside[i] and self.declares(i):
                length = self.match[i]
            if kind == 'directive' and self.line(start) in self.parallel:
                parallel = self.match.get(next((k + 1 for k in range(i, min(i + 9, len(self.tokens)))
                                                if self.of(k) == 'for'), -1), 0)
            if not self.inside[i] or i <= length or self.line(start) in self.constants or \
                    kind in ('directive', 'string'):
                continue
            level = next((n for n, texts in enumerate(LEVELS) if text in texts), 0)
            if text in REPLACED and self.spaced(i) and not (i < parallel and text not in '+-*/'):
                first, last = self.region(i, level)
                new = self.code(first, last, (i, REPLACED[text]))
                name = 'logic' if text in ('&&', '||') else 'comparison' if level in (6, 7) else 'arithmetic'
                out.append(self.replace(name, first, last, new))
                if text in ('<', '<=', '>', '>='):
                    out.append(self.replace('off by one', i + 1, last, self.code(i + 1, last) + ' - 1'))
            if text == '!' and self.of(i + 1) != '=':
                out.append(Mutant(self.file, 'negation', [(start, end, '', f'{SWITCH} ^ !')]))
            if text == '?':
                first, last = self.region(i, 1)[0], i - 1
                old = self.code(first, last)
                out.append(self.replace('negation', first, last, f'!({old})', f'(({old}) ? !{SWITCH} : {SWITCH})'))
            if text in ('&&', '=') and self.tokens[i + 1][0] == 'name' and self.of(i + 2) == '(' and \
                    (text == '&&' or self.of(i - 1) == 'ok') and \
                    self.of(self.match.get(i + 2, 0) + 1) in (';', ')', '&&', '||', '?'):
                old = self.code(i + 1, self.match[i + 2])
                out.append(self.replace('lost error', i + 1, self.match[i + 2], f'({old} || true)',
                                        f'({old} || {SWITCH})'))
            if text == 'if' and self.of(i + 1) == '(':
                first, last = i + 2, self.match[i + 1] - 1
                old, then = self.code(first, last), self.of(last + 2)
                if not any(self.tokens[k][0] == 'directive' for k in range(first, last + 1)):
                    name = 'lost error' if then == 'return' else 'condition'
                    out.append(self.replace(name, first, last, f'({old}) && false', f'({old}) && !{SWITCH}'))
                    if then not in ('return', 'continue', 'break'):
                        out.append(self.replace(name, first, last, f'({old}) || true', f'({old}) || {SWITCH}'))
            if text in ('break', 'continue') and self.of(i + 1) == ';':
                out.append(self.replace('dropped', i, i + 1, ';', f'{{ if (!{SWITCH}) {text}; }}'))
            last = self.statement(i)
            if last > i and not any(self.tokens[k][0] == 'directive' for k in range(i, last + 1)):
                out.append(self.replace('dropped', i, last + 1, ';', f'{{ if (!{SWITCH}) {self.code(i, last)}; }}'))
            if text == '[' and i in self.match and self.match[i] > i + 1 and \
                    (self.tokens[i - 1][0] == 'name' or self.of(i - 1) in (')', ']')):
                first, last = i + 1, self.match[i] - 1
                old = self.code(first, last)
                for new in [f'({old}) + 1' if ' ' in old else f'{old} + 1'] + ['0'] * (old != '0'):
                    out.append(self.replace('index', first, last, new))
            if kind == 'number' and self.of(i - 1) not in ('case', '.'):
                real = '.' in text or re.match(r'^\d+e', text)
                zero = float(text.rstrip('fFlLuU')) == 0 if not text.lower().startswith('0x') else False
                out.append(self.replace('constant', i, i, f'{text} + 1' if zero or not real else f'2 * {text}'))
            if text in ('true', 'false'):
                other = {'true': 'false', 'false': 'true'}[text]
                kind_of = 'lost error' if text == 'false' and self.of(i - 1) == 'return' else 'constant'
                out.append(self.replace(kind_of, i, i, other, f'((bool)({SWITCH} ? {other} : {text}))'))
            if kind == 'name' and text in OPPOSITE and self.of(i + 1) == '(':
                out.append(self.replace('min/max', i, i, OPPOSITE[text], f'({SWITCH} ? {OPPOSITE[text]} : {text})'))
            if kind == 'name' and text not in KEYWORDS and text not in OPPOSITE and self.of(i + 1) == '(' and \
                    i + 1 in self.match:
                arguments = self.arguments(i + 1)
                for a, b in zip(arguments, arguments[1:]):
                    old = [self.code(*a), self.code(*b)]
                    if old[0] == old[1] or '"' in old[0] + old[1] or max(a[1] - a[0], b[1] - b[0]) > 12 or \
                            any(self.tokens[k][0] == 'directive' for k in range(a[0], b[1] + 1)):
                        continue
                    edits = [(self.tokens[x[0]][2], self.tokens[x[1]][3], new,
                              f'({SWITCH} ? ({new}) : ({self.code(*x)}))' + self.lines_in(*x))
                             for x, new in ((a, old[1]), (b, old[0]))]
                    out.append(Mutant(self.file, 'swapped', edits))
        return [m for m in out if '#' not in self.text[m.start:m.end]]

    def planted(self, mutants):
        """The text with these mutants, none of which overlap, behind switches."""
        text = self.text
        edits = [(start, end, switched.replace(SWITCH, f'mutant_is({m.number})'))
                 for m in mutants for start, end, _, switched in m.edits]
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new + text[end:]
        return text


def written(sources, entries):
    """Mutants of a list of [file, before, after]: a text of one line in one of the files, of which `file` is a pattern,
    becomes another. Each is the smallest expression around what changes, or else the statement; None where neither is
    possible."""
    out = []
    for pattern, before, after in entries:
        found = [(s, at.start()) for s in sources.values() if fnmatch.fnmatch(s.file, pattern)
                 for at in re.finditer(re.escape(before), s.text)]
        out.append(written_at(*found[0], before, after) if len(found) == 1 else None)
    return out


def written_at(source, at, before, after):
    same = len(os.path.commonprefix([before, after]))
    tail = min(len(os.path.commonprefix([before[::-1], after[::-1]])), len(before) - same, len(after) - same)
    changed = source.text[:at] + after + source.text[at + len(before):]
    start, end, shift = at + same, at + len(before) - tail, len(after) - len(before)
    inside = [i for i, t in enumerate(source.tokens) if t[2] < max(end, start + 1) and t[3] > start]
    if not inside or not all(source.inside[i] and source.tokens[i][0] != 'directive' for i in inside):
        return None
    for level, without in [(n, '') for n in range(len(LEVELS), 0, -1)] + [(1, '?:'), (0, '')]:
        weaker = set().union(*LEVELS[:level]) - {'return', *without}
        if level:
            first = min(source.region(i, level, without)[0] for i in inside)
            last = max(source.region(i, level, without)[1] for i in inside)
        else:  # the statement
            first, last = inside[0], inside[-1]
            while source.of(first - 1) not in (';', '{', '}', 'else') and first > 0:
                first = source.match[first - 1] if source.of(first - 1) in (')', ']') else first - 1
            while source.of(last) not in (';', '{', '}') and last < len(source.tokens) - 1:
                last = source.match[last] if source.of(last) in ('(', '[') else last + 1
            if source.of(last) != ';' or source.statement(first) < 0 and source.of(first) not in ('if', 'for', 'while'):
                return None
        begin, stop = source.tokens[first][2], source.tokens[last][3]
        if first > last or begin > start or stop < end:
            continue
        new = Source('', changed[begin:stop + shift])
        if len(new.match) != sum(t[1] in set('()[]{}') for t in new.tokens):
            continue
        old_text, new_text = source.code(first, last), new.code(0, len(new.tokens) - 1) if new.tokens else ''
        if not level:
            return source.replace('written', first, last, new_text,
                                  f'{{ if ({SWITCH}) {{ {new_text} }} else {{ {old_text} }} }}')
        depth, bare = 0, []
        for text, spaced in [(source.of(i), source.spaced(i)) for i in range(first, last + 1)] + \
                [(new.of(i), i > 0 and new.spaced(i)) for i in range(len(new.tokens))]:
            depth += (text in '([{') - (text in ')]}')
            if depth == 0 and text in weaker and (spaced or text in ',;?:'):
                bare.append(text)
        if not bare and new.tokens and not {'if', ';', 'while', 'for'} & {t[1] for t in new.tokens} | \
                {'if', ';', 'while', 'for'} & {source.of(i) for i in range(first, last + 1)}:
            return source.replace('written', first, last, new_text)
    return None
