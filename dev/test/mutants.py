"""mutants.py: tests the tests with bugs that are all built at once, and shows what no test runs.

    python3 dev/test/mutants.py BUILD COUNT SEED            as `make mutants MUTANTS=COUNT SEED=SEED` does
    python3 dev/test/mutants.py BUILD list ONLY SAMPLE      the list of `make mutants`, mutants.txt, built at once
    python3 dev/test/mutants.py BUILD coverage              as `make coverage` does

COUNT bugs that compile (mutate.py makes them) are chosen at random, spread over the files of the product by their
lines, at least one in each. All are in one copy of the sources, behind switches, and every program is built once:
MUTANT=17 in the environment chooses a bug when a program starts. One run of each suite without a bug shows how long it
takes, and which switches it reaches. Then each bug meets the suites that reach it, the shortest first, until one
fails, or takes three times as long and ten seconds more. The longest suites are left out where all together take more
than LIMIT seconds.

equivalent.txt lists bugs that change no result. What is left is printed: where, before and after, and the suites that
have run it; then a table of the files. BUILD/mutants/report.txt has the bugs that are caught too. JOBS=2: so many at a
time. SUITES=PATTERN: only these suites. SLACK=60: the ten seconds more, on a machine where other work comes and goes.
"""
import collections
import contextlib
import ctypes
import fnmatch
import glob
import json
import multiprocessing
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import mutate

LIMIT = float(os.environ.get('LIMIT', 60))
SLACK = float(os.environ.get('SLACK', 10))
JOBS = int(os.environ.get('JOBS', os.cpu_count() or 1))
ONLY_SUITES = os.environ.get('SUITES', '')  # a pattern
FILES = f'{os.environ.get("TMPDIR") or "/dev/shm"}/mutants-{os.getpid()}'
SPARE = 1.7  # so many times the bugs that are wanted are tried, since not all compile

# The arguments of suites. Programs among them must be built, and these:
ARGUMENTS = {'same_weights.sh': 'build', 'test_backends.sh': 'build'}
with open('dev/test/suites.txt') as rows:
    ARGUMENTS.update(row.strip().replace('B/', 'build/').split(' ', 1) for row in rows if row[0] != '#')
NEEDS = {
    'test_calls': ' '.join('calls/' + p for p in 'corpus tokenize train supervise export generate evaluate'.split()),
    'pairs': 'train-FP32 train-BF16 plan-BF16 generate-FP32 evaluate-FP32 export tokenize corpus supervise watch',
    'same_weights.sh': 'train-FP32 train-BF16 corpus tokenize weights_hash', 'test_supervise': 'supervise',
    'test_generate': 'train-FP32 generate-FP32 corpus tokenize', 'test_telemetry': 'train-FP32 supervise',
    'test_backends.sh': 'train-FP32 test_train-emulated-FP32 train-emulated-FP32 corpus tokenize weights_hash',
}
SUITES = '''gemm --check|test_files|test_offload|test_data|test_tokenizer|test_template|test_convert|test_gguf
test_evaluate|test_plan|test_text|test_watch|test_chat|test_generate|test_corpus|test_errors|test_trace|test_optimizers|test_optimizers_matrix|test_nf4|test_comm
test_zero|test_lora|test_telemetry|test_parts-FP32|test_parts-BF16|test_schedule|test_seams|test_supervise|pairs|first|test_kernels-FP32|test_kernels-BF16|test_train-FP32
test_model-FP32|test_model-BF16|test_runs-FP32 --runs|test_runs-FP32 --files|test_runs-FP32 --signals
test_runs-FP32 --damage|golden-FP32|same_weights.sh|emulated-plain-FP32-test_cuda --shapes tiny
emulated-plain-FP32-test_cuda|emulated-plain-BF16-test_cuda --shapes tiny|test_train-emulated-FP32
test_model-emulated-FP32 --model|test_backends.sh|test_cublaslt|test_nccl|test_tune'''
SUITES = re.split('[|\n]', SUITES)
COVERAGE_SUITES = SUITES + ['test_ranks', 'soak', 'test_calls']  # too long for one bug
for name, parts in (('test_ranks', 'data stages float storage recompute resume optimizers launch memory faults '
                                   'refusals corruption rewind slow pipeline pipeline-faults pipeline-memory'),
                    ('soak', 'kills damage disk failing order clock prune reshard rewind tiers')):
    SUITES += [f'{name} --only {part}' for part in parts.split()]
# Together they compile every line of the product that this machine can.
CHECKED = ('train-FP32 generate-FP32 evaluate-FP32 plan-BF16 export tokenize corpus supervise gemm test_tune '
           'test_train-emulated-BF16').split()

HEADER = '''#ifdef __cplusplus
extern "C" {
#endif
extern const int mutant_chosen;
int mutant_mark(int number) __attribute__((const, noinline));
#ifdef __cplusplus
}
#endif
static inline int mutant_is(int number) {
    return mutant_chosen == number || (mutant_chosen < 0 && mutant_mark(number));
}
'''
# MUTANT=17 chooses bug 17. MUTANT=-1 chooses none, and notes in the file MUTANT_SEEN which switches are reached.
SWITCH = '''#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
int mutant_chosen;
static volatile unsigned char* seen;
__attribute__((constructor(101))) static void mutant_choose(void) {
    const char *number = getenv("MUTANT"), *path = getenv("MUTANT_SEEN");
    mutant_chosen = number ? atoi(number) : 0;
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void* memory = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory != MAP_FAILED) seen = memory;
    close(file);
}
int mutant_mark(int number) {
    if (seen) seen[number] = 1;
    return 0;
}
'''
# What the make of the copy calls as compilers. With PASS=check: what it finds wrong, and which switches a source has.
WRAPPER = '''#!/bin/sh
[ "$PASS" = check ] || exec %(compiler)s %(first)s %(flags)s "$@" %(last)s
out=
for word; do [ "$before" != -o ] || out=$word; before=$word; done
case $out in build/*)
    %(compiler)s -E %(flags)s "$@" 2> /dev/null
    grep -o 'mutant_is([0-9]*)' "$out" > "%(work)s/switches.$$"
    rm -f "$out" ;;
esac
exec %(compiler)s %(flags)s "$@" -fsyntax-only %(last)s
'''
# Of processes that end with _exit, or become another program, gcov writes no counts by itself.
COVERAGE = '''#include <stdlib.h>
#include <unistd.h>
void __gcov_dump(void), __gcov_reset(void);
void coverage_exit(int code) {
    __gcov_dump();
    _exit(code);
}
void coverage_Exit(int code) { coverage_exit(code); }
int coverage_execvp(const char* file, char* const* words) {
    __gcov_dump();
    __gcov_reset();  // or a second dump, after a failure, would write nothing
    return execvp(file, words);
}
'''
ERROR = re.compile(r'^(?:translate: )?(?:\./)?([\w./-]+):(\d+)(?::\d+)?: '
                   r'(?!warning: (?!pointer.* type mismatch)|note: (?!in expansion of macro)|  )', re.M)


class Work:
    """A copy of the sources in BUILD/NAME/tree, where make calls compilers with these flags."""

    def __init__(self, build, name, flags, objects=''):
        self.optimize = '-O1'
        self.work = os.path.abspath(f'{build}/{name}')
        self.tree = self.work + '/tree'
        shutil.rmtree(self.work, ignore_errors=True)
        os.makedirs(self.work)
        top = os.path.abspath('.')
        shutil.copytree('.', self.tree, symlinks=True, ignore=lambda folder, names: [
            n for n in names if n == '.git' or folder == '.' and n in ('build', 'runs', 'train', 'supervise')
            or os.path.join(top, folder, n) == os.path.abspath(build)])
        os.makedirs(self.tree + '/build')
        strict = '-Werror=int-conversion -Werror=incompatible-pointer-types -Wno-unused-result'
        for name, compiler, last in (('cc', os.environ.get('CC', 'cc'), strict), ('cxx', 'g++', '-w')):
            with open(f'{self.work}/{name}', 'w') as f:
                f.write(WRAPPER % {'compiler': compiler, 'flags': flags, 'first': objects, 'last': last,
                                   'work': self.work})
            os.chmod(f'{self.work}/{name}', 0o755)

    def write(self, file, text):
        """Changes a file of the copy, unless it is the same: make compiles what is newer."""
        with open(f'{self.tree}/{file}', 'r+') as f:
            if f.read() != text:
                f.seek(0)
                f.write(text)
                f.truncate()

    def make(self, programs, check=False):
        environment = dict(os.environ, MAKELEVEL='1', LC_ALL='C', PASS='check' if check else '')
        environment.pop('MAKEFLAGS', None)
        done = subprocess.run(
            ['make', '-k', '-O', f'-j{JOBS}', 'CUDA=off', 'MPI=off', 'B=build', 'WARNINGS=',
             f'OPTIMIZE={self.optimize} -march=native', f'CC={self.work}/cc', f'CXX={self.work}/cxx',
             *('build/' + p for p in programs)], cwd=self.tree, env=environment, text=True, errors='replace',
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        with open(self.work + '/make.log', 'a') as f:
            f.write(done.stdout)
        return done


def suite_parts(suite):
    """The command of a suite, and the programs that it needs."""
    name, *rest = suite.split()
    given = ARGUMENTS.get(name, '').split()
    needs = NEEDS.get(name, '').split() + [a[len('build/'):] for a in given if re.match('build/.', a)
                                           and a != 'build/calls']
    if name.endswith('.sh'):
        return ['sh', 'dev/test/' + name] + given, needs
    return ['build/' + name] + given + rest, [name] + needs


def descendants():
    """All processes that this one has started, directly or not; orphans come back to it."""
    parents = {}
    for stat in glob.glob('/proc/[0-9]*/stat'):
        try:
            with open(stat) as f:
                parents[int(stat.split('/')[2])] = int(f.read().rsplit(')', 1)[1].split()[1])
        except (OSError, IndexError):
            pass
    found = {os.getpid()}
    while True:
        more = {p for p, parent in parents.items() if parent in found and p not in found}
        if not more:
            return found - {os.getpid()}
        found |= more


def kill_descendants(*known):
    for _ in range(20):
        for p in descendants():
            with contextlib.suppress(OSError):
                os.kill(p, signal.SIGKILL)
        for process in known:
            process.poll()
        try:
            while os.waitpid(-1, os.WNOHANG)[0] > 0:
                pass
        except ChildProcessError:
            break
        time.sleep(0.02)


def adopt_orphans():
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def worker_begin():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    adopt_orphans()


@contextlib.contextmanager
def workers():
    """Processes that run suites. Nothing that they start or write outlives them, however this program ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    try:
        with multiprocessing.Pool(JOBS, worker_begin) as pool:
            yield pool
    finally:
        kill_descendants()
        shutil.rmtree(FILES, ignore_errors=True)


def run_suite(tree, suite, limit, variables, whole=False):
    """How a suite ends: '', or why it counts as failed; and the seconds. Ends it there, unless it is wanted whole."""
    files = f'{FILES}/{os.getpid()}'
    shutil.rmtree(files, ignore_errors=True)
    os.makedirs(files)
    environment = dict(os.environ, OMP_WAIT_POLICY='passive', LC_ALL='C', TMPDIR=files, TYPES='FP32', **variables)
    began, output, why, first = time.monotonic(), b'', None, None
    process = subprocess.Popen(['stdbuf', '-oL'] + suite_parts(suite)[0], cwd=tree, env=environment,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    while why is None:
        ended = process.poll() is not None
        if select.select([process.stdout], [], [], 0.1)[0]:
            output += os.read(process.stdout.fileno(), 1 << 16)
        failed = re.search(rb'^ *FAILED.*|^.*FAILED$', output, re.M)
        if failed and whole:
            first = first or failed.group().decode(errors='replace').strip()
        if failed and not whole:
            why = failed.group().decode(errors='replace').strip()
        elif ended:
            why = first or (f'exit code {process.returncode}' if process.returncode else '')
        elif time.monotonic() - began > limit:
            why = 'hangs'
        output = output[max(output.rfind(b'\n'), 0):]
    kill_descendants(process)
    process.stdout.close()
    shutil.rmtree(files, ignore_errors=True)
    return why, time.monotonic() - began


def run_clean(job):
    """A suite without a bug: how it ends, its seconds, and the switches that it reaches."""
    work, suite = job
    for attempt in range(2):
        path = f'{work}/seen-{os.getpid()}'
        with open(path, 'wb') as f:
            f.truncate(65536)
        why, seconds = run_suite(work + '/tree', suite, 900, {'MUTANT': '-1', 'MUTANT_SEEN': path})
        with open(path, 'rb') as f:
            seen = {n for n, mark in enumerate(f.read()) if mark}
        if not why:
            break
    return suite, why, seconds, seen


def run_mutant(job):
    """A bug with its suites: which one fails and how, and those that do not."""
    work, number, suites, times = job
    passed = []
    for suite in suites:
        why, _ = run_suite(work + '/tree', suite, 3 * times[suite] + SLACK, {'MUTANT': str(number)})
        if why:
            return number, suite, why, passed
        passed.append(suite)
    return number, None, None, passed


def product():
    listed = subprocess.run(['git', 'ls-files', '--cached', '--others', '--exclude-standard'], capture_output=True,
                            text=True, check=True).stdout.split()
    return [f for f in listed if re.search(r'\.(h|c|cu|cuh)$', f) and os.path.exists(f)
            and not f.startswith(('dev/', 'examples/')) and not os.path.basename(f).startswith('test_')]


def listed(only='', sample=0, path='dev/test/mutants.txt'):
    """The entries of the written list with this text in them: {'=': effect, '>': suites, '@': file, '-': before ...}.
    With a sample that many of those, evenly."""
    with open(path) as f:
        texts = [t for t in re.split(r'^(?==\s)', re.sub(r'^#.*\n', '', f.read(), flags=re.M), flags=re.M) if t.strip()]
    texts = [t for t in texts if only in t and '\nsurvives: ' not in t]
    texts = [texts[i * len(texts) // sample] for i in range(sample)] if 0 < sample < len(texts) else texts
    entries = []
    for text in texts:
        rows = dict.fromkeys('=@-+', '')
        rows.update((line[:1], line[2:]) for line in text.splitlines() if line)
        entries.append(dict(rows, text=text, suites=re.findall(r'^> (.*)', text, re.M)))
    return entries


def plan_listed(sources, entries):
    """Those of the list that can be switched, not several on one line; and the other entries."""
    chosen, taken, rest = [], set(), []
    planned = mutate.written(sources, [('*' + (e['@'] or '*'), e['-'], e['+']) for e in entries])
    for e, m in zip(entries, planned):
        covers = {(m.file, n) for n in sources[m.file].lines_of(m)} if m else set()
        if m is None or covers & taken:
            rest.append(e)
        else:
            taken |= covers
            m.entry = e
            chosen.append(m)
    return chosen, taken, rest


def choose(sources, count, seed, occupied=()):
    """Mutants of each file in random order, on lines of their own: first a random line, then one of its kinds."""
    chosen, wanted = [], {}
    lines = {f: len(s.ends) for f, s in sources.items()}
    for file, source in sources.items() if count else ():
        wanted[file] = max(1, round(count * lines[file] / sum(lines.values())))
        order = random.Random(f'{seed} {file}')
        places = collections.defaultdict(lambda: collections.defaultdict(list))
        for m in source.mutants():
            places[source.line(m.start)][m.kind].append(m)
        taken = {n for f, n in occupied if f == file}
        for line in order.sample(sorted(places), len(places)):
            kinds = places[line]
            m = order.choice(kinds[order.choice(sorted(kinds))])
            covers = set(source.lines_of(m))
            if not covers & taken:
                taken |= covers
                chosen.append(m)
            if sum(c.file == file for c in chosen) >= SPARE * wanted[file] + 2:
                break
    return chosen, wanted


def plant(work, sources, mutants):
    for file, source in sources.items():
        work.write(file, source.planted([m for m in mutants if m.file == file]))


def build(work, sources, mutants, wanted, programs):
    """Builds the programs with as many of the mutants as wanted. Returns those, and how many per file do not compile,
    and are in no program that this machine builds."""
    lines = collections.defaultdict(set)
    for m in mutants:
        for line in sources[m.file].lines_of(m):
            lines[m.file, line].add(m)
    bad, elsewhere, cut = collections.Counter(), collections.Counter(), False
    plant(work, sources, mutants)
    work.make(['translate'])
    check, unchecked = True, CHECKED
    while True:
        for path in glob.glob(work.work + '/switches.*'):
            os.remove(path)
        made = work.make(unchecked if check else programs, check)
        places = {(os.path.normpath(f), int(n)) for f, n in ERROR.findall(made.stdout)}
        wrong = set().union(*(lines.get(p, ()) for p in places)) & set(mutants)
        if not wrong and made.returncode:  # an error elsewhere follows from the bugs above it
            for f, n in places:
                wrong |= {m for m in mutants if m.file == f and n - 60 < sources[f].line(m.start) < n}
        bad.update(m.file for m in wrong if not m.entry)
        mutants = [m for m in mutants if m not in wrong]
        if not wrong and not check:
            if made.returncode:
                sys.exit(f'the programs do not build: see {work.work}/make.log')
            return mutants, bad, elsewhere
        if check and not cut:
            here = set()
            for path in glob.glob(work.work + '/switches.*'):
                with open(path) as f:
                    here |= set(map(int, re.findall(r'\d+', f.read())))
            elsewhere.update(m.file for m in mutants if m.number not in here)
            mutants = [m for m in mutants if m.number in here]
            cut = True
        unchecked = [p for p in unchecked if f'build/{p}] Error' in made.stdout]
        if check and not wrong:
            if made.returncode:
                sys.exit(f'the sources do not compile: see {work.work}/make.log')
            left = collections.Counter(wanted)  # listed mutants are beyond those wanted
            kept = []
            for m in mutants:
                left[m.file] -= m.entry is None
                if m.entry or left[m.file] >= 0:
                    kept.append(m)
            mutants, check = kept, False
        plant(work, sources, mutants)


def equivalents(path='dev/test/equivalent.txt'):
    """{(file, before, after): reason}, whose format is explained in the file."""
    out, file, before, after = {}, '', '', ''
    with open(path) as f:
        for line in f:
            sign, text = line[:2], line[2:].strip()
            if sign == '@ ':
                file = text
            elif sign == '- ':
                before = text
            elif sign == '+ ':
                after = text
            elif sign == '= ':
                out[file, before, after] = text
    return out


def table(rows, title):
    """rows: {name: Counter of caught, survived, equivalent, bad, elsewhere}"""
    out = [f'{title:34s} planted  caught  survived  equivalent  not compiled  not built here   share']
    for name, r in sorted(rows.items()):
        judged = r['caught'] + r['survived']
        share = f'{100 * r["caught"] / judged:6.0f}%' if judged else '      -'
        out.append(f'{name:34s} {judged + r["equivalent"]:7d} {r["caught"]:7d} {r["survived"]:9d} '
                   f'{r["equivalent"]:11d} {r["bad"]:13d} {r["elsewhere"]:15d} {share}')
    return out


def plan_suites(m, clean, times):
    """The suites that a mutant meets, and the number of those that are left out."""
    if m.entry:
        return [s for s in m.entry['suites'] if s in clean], 0
    ran, run, total = sorted((s for s in clean if m.number in clean[s][1]), key=times.get), [], 0
    for s in ran:
        total += times[s]
        if total <= LIMIT or not run:
            run.append(s)
    return run, len(ran) - len(run)


def mutants_main(build_folder, count, seed, entries=()):
    """Returns the entries that have no switch, how many others survived, and how many suites fail without a bug."""
    began = time.monotonic()
    place = os.path.abspath(build_folder) + '/mutants'
    work = Work(build_folder, 'mutants', f'-include {place}/mutant.h', f'{place}/mutant.o')
    report = open(work.work + '/report.txt', 'w')

    def say(text):
        print(text, flush=True)
        report.write(text + '\n')
        report.flush()

    for name, text in (('mutant.h', HEADER), ('mutant.c', SWITCH)):
        with open(f'{work.work}/{name}', 'w') as f:
            f.write(text)
    subprocess.run(['cc', '-O1', '-c', 'mutant.c'], cwd=work.work, check=True)
    sources = {}
    for file in product():
        with open(file) as f:
            sources[file] = mutate.Source(file, f.read())
    known, occupied, rest = plan_listed(sources, entries)
    chosen, wanted = choose(sources, count, seed, occupied)
    for n, m in enumerate(known + chosen):
        m.number = n + 1
    chosen_suites = [s for s in SUITES if re.search(ONLY_SUITES, s)] if count else []
    suites = sorted(set(chosen_suites + [s for m in known for s in m.entry['suites']]))
    programs = sorted({p for s in suites for p in suite_parts(s)[1]})
    mutants, bad, elsewhere = build(work, sources, known + chosen, wanted, programs)
    rest += [m.entry for m in known if m not in mutants]
    say(f'{len(mutants)} mutants{f" of seed {seed}" if count else ""}, built after {time.monotonic() - began:.0f} s')
    rows, reasons = collections.defaultdict(collections.Counter), equivalents()
    by_number, survived = {m.number: m for m in mutants}, 0
    with workers() as pool:
        clean = {}
        for suite, why, seconds, seen in pool.imap_unordered(run_clean, [(work.work, s) for s in suites], 1):
            if why:
                say(f'FAILS WITHOUT A MUTANT, and is left out: {suite}: {why}')
            else:
                clean[suite] = seconds, seen
        times = {s: seconds for s, (seconds, _) in clean.items()}
        say(f'{len(clean)} suites run in {sum(times.values()):.0f} s, ended after {time.monotonic() - began:.0f} s')
        plans = {m.number: plan_suites(m, clean, times) for m in mutants}
        jobs = [(work.work, n, run, times) for n, (run, _) in plans.items()]
        random.Random(seed).shuffle(jobs)  # the report of a run that is cut off is of all files
        for number, suite, why, passed in pool.imap_unordered(run_mutant, jobs, 1):
            m = by_number[number]
            line, before, after = m.describe(sources[m.file])
            reason = reasons.get((m.file, before, after))
            what = f'{m.file}:{line}: {m.entry["="] if m.entry else m.kind}'
            text = f'\n    - {before}\n    + {after}\n    '
            row = rows['(the written list)' if m.entry else m.file]
            row['caught' if suite else 'equivalent' if reason else 'survived'] += 1
            if suite:
                report.write(f'caught {what}{text}by {suite}: {why}\n')
                if reason:
                    say(f'not equivalent: {what}{text}by {suite}: {why}')
            elif not reason:
                survived += 1
                more = f'; {plans[number][1]} longer ones left out' if plans[number][1] else ''
                say(f'SURVIVED {what}{text}ran: {", ".join(passed) or "no suite"}{more}')
    folders = collections.defaultdict(collections.Counter)
    for file in sources if count else ():
        rows[file]['bad'], rows[file]['elsewhere'] = bad[file], elsewhere[file]
        folders[os.path.dirname(file) or '.'].update(rows[file])
        folders['total'].update(rows[file])
    say('\n'.join([''] + table(rows, 'file') + ([''] + table(folders, 'folder') if count else [])))
    say(f'{time.monotonic() - began:.0f} s in all; {sum(1 for _, n in plans.values() if n)} mutants ran without their '
        f'longest suites')
    report.close()
    return rest, survived, len(suites) - len(clean)


def compiled_main(build_folder, entries):
    """Mutants without a switch, each compiled for itself. Returns how many are not caught, or not judged."""
    work = Work(build_folder, 'mutants-one', '')
    suites = sorted({s for e in entries for s in e['suites']})
    if work.make({p for s in suites for p in suite_parts(s)[1]}).returncode:
        sys.exit(f'the programs do not build: see {work.work}/make.log')
    wrong = [s for s in suites if run_suite(work.tree, s, 900, {})[0]]
    for suite in wrong:
        print(f'FAILS WITHOUT A MUTANT: {suite}', flush=True)
    failed = len(wrong)
    for e in entries:
        began, verdict = time.monotonic(), 'does not apply'
        for file in product():
            with open(file) as f:
                text = f.read()
            if fnmatch.fnmatch(file, '*' + (e['@'] or '*')) and text.count(e['-']) == 1:
                verdict = 'SURVIVED' if verdict == 'does not apply' else 'applies in several files'
                changed, before, after = file, text, text.replace(e['-'], e['+'])
        if verdict == 'SURVIVED':
            work.write(changed, after)
            for suite in e['suites']:
                if work.make(suite_parts(suite)[1]).returncode:
                    verdict = 'does not build'
                elif run_suite(work.tree, suite, 600, {})[0]:
                    verdict = 'caught'
                    break
            work.write(changed, before)
        failed += verdict != 'caught'
        print(f'{verdict}  {e["="]}, {time.monotonic() - began:.0f} s', flush=True)
    return failed


def list_main(build_folder, only, sample):
    """The written list: those that can be switched first, then the others."""
    rest, survived, failed = mutants_main(build_folder, 0, 0, listed(only, sample))
    if rest:
        print(f'{len(rest)} have no switch, and are compiled one at a time', flush=True)
        with workers() as pool:
            survived += pool.apply(compiled_main, (build_folder, rest))
    sys.exit(survived + failed > 0)


def ranges(numbers):
    """[1, 2, 3, 7] as 1-3 7"""
    out = []
    for n in sorted(numbers):
        if out and out[-1][1] == n - 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ' '.join(f'{a}-{b}' if b > a else str(a) for a, b in out)


def run_covered(job):
    return job[1], *run_suite(job[0] + '/tree', job[1], 1800, {}, whole=True)


def named_lines(path='dev/test/uncovered.txt'):
    """{file: lines} of what uncovered.txt names. Each row must fit a line, and its key have a reason."""
    with open(path) as f:
        rows = f.read().split('\n')
    named = collections.defaultdict(set)
    for row in filter(lambda row: row and row[0] != '#', rows):
        where, pattern, key = re.fullmatch(r'(\S+): (\S.*?)   +(\S.*)', row).groups()
        found = 0
        for file in fnmatch.filter(product(), where):
            inside = False
            with open(file) as f:
                for n, line in enumerate(f, 1):
                    if pattern[-2:] == '()':  # to the function's last line
                        inside = inside or re.match(r'\w.*\b' + re.escape(pattern[:-1]), line)
                        ends = re.match(r'}|\w.*[;}]$', line)
                    else:  # to the statement's last line
                        inside = inside or pattern == '*' or pattern in line
                        ends = re.search(r'[;{}]\s*(//.*)?$', line)
                    if inside:
                        named[file].add(n)
                        found += 1
                    inside = inside and not ends
        if not found or f'# {key}: ' not in '\n'.join(rows):
            sys.exit(f'{path}: there is no such line, or its reason is not explained: {row}')
    return named


def split_missed(missed, named, text):
    """Of lines that never run those that are not named, nor next to one that is, in its block; and how many are."""
    named, indent = named.intersection(missed), {n: len(text[n - 1]) - len(text[n - 1].lstrip()) for n in missed}
    for step, order in ((1, sorted(missed)), (-1, sorted(missed, reverse=True))):
        for n in order:
            if n - step in named and indent[n] >= indent[n - step]:
                named.add(n)
    return sorted(set(missed) - named), len(named)


def coverage_main(build_folder):
    """Lines and branches that no suite runs. Processes that are killed do not count."""
    named = named_lines()
    place = os.path.abspath(build_folder) + '/coverage'
    instead = ' '.join(f'-D{name}=coverage{"_" * (name[0] != "_")}{name}' for name in ('_exit', '_Exit', 'execvp'))
    work = Work(build_folder, 'coverage', '--coverage -fprofile-update=atomic -Wno-coverage-mismatch ' + instead,
                f'{place}/coverage.o')
    work.optimize = '-Og'  # from -O1 on, lines are merged with others
    with open(place + '/coverage.c', 'w') as f:
        f.write(COVERAGE)
    subprocess.run(['cc', '-O1', '-c', 'coverage.c'], cwd=place, check=True)
    suites = [s for s in COVERAGE_SUITES if re.search(ONLY_SUITES, s)]
    programs = sorted({p for s in suites for p in suite_parts(s)[1]})
    if work.make(programs).returncode:
        sys.exit(f'the programs do not build: see {work.work}/make.log')
    with workers() as pool:
        for suite, why, seconds in pool.imap_unordered(run_covered, [(work.work, s) for s in suites], 1):
            if why:
                print(f'{suite}: {why}, after {seconds:.0f} s')
    lines, branches, functions = (collections.defaultdict(kind) for kind in (collections.Counter, dict, set))
    programs, files = [], set(product())
    for notes in glob.glob(work.tree + '/build/**/*.gcda', recursive=True):
        text = subprocess.run(['gcov', '-b', '--json-format', '--stdout', os.path.relpath(notes, work.tree)],
                              cwd=work.tree, capture_output=True, text=True).stdout
        for document in filter(str.strip, text.splitlines()):
            for f in json.loads(document)['files']:
                file = os.path.normpath(f['file'].replace(work.tree + '/', ''))
                if file not in files:
                    continue
                functions[file].update((function['start_line'], function['end_line']) for function in f['functions'])
                programs.append((file, collections.Counter()))
                for line in f['lines']:
                    n = line['line_number']
                    programs[-1][1][n] += line['count']
                    taken = [b['count'] > 0 for b in line['branches']]
                    if taken and line['count']:  # of branches of one line in several programs, the best known
                        branches[file][n] = max(branches[file].get(n, 0), sum(taken) / len(taken))
                lines[file].update(programs[-1][1])
    for file, counts in programs:  # where a function has run, lines of it that the program lacks are merged with others
        for first, last in functions[file]:
            if any(counts[n] for n in range(first, last + 1)):
                lines[file].update(n for n in range(first, last + 1) if n in lines[file] and n not in counts)
    folders = collections.defaultdict(collections.Counter)
    with open(build_folder + '/coverage.txt', 'w') as out:
        for file in sorted(lines):
            missed = [n for n, count in lines[file].items() if not count]
            half = [n for n, share in branches[file].items() if share < 1]
            with open(f'{work.tree}/{file}') as f:
                text = f.read().split('\n')
            missed, excused = split_missed(missed, named[file], text)
            out.write(f'{file}: {len(missed)} of {len(lines[file])} lines never run, {excused} more are named\n')
            out.writelines(f'    {n}: {text[n - 1].strip()}\n' for n in missed)
            out.write(f'{file}: {len(half)} of {len(branches[file])} lines with branches that are never taken: '
                      f'{ranges(half)}\n')
            for name in (os.path.dirname(file) or '.', 'total'):
                folders[name].update(lines=len(lines[file]), missed=len(missed), named=excused,
                                     branches=len(branches[file]), half=len(half))
        summary = [f'{"folder":28s}   lines  never run          named   branches  not all taken']
        for name, c in sorted(folders.items()):
            shares = [100 * c[few] / max(c[all_of], 1) for few, all_of in (('missed', 'lines'), ('half', 'branches'))]
            summary.append(f'{name:28s} {c["lines"]:7d} {c["missed"]:6d} {shares[0]:4.1f}% {c["named"]:14d} '
                           f'{c["branches"]:10d} {c["half"]:8d} {shares[1]:4.1f}%')
        out.write('\n'.join(summary) + '\n')
    print('\n'.join(summary) + f'\n{build_folder}/coverage.txt has the lines of each file')


if __name__ == '__main__':
    folder, what, *more = sys.argv[1:]
    if what == 'coverage':
        coverage_main(folder)
    elif what == 'list':
        list_main(folder, more[0], int(more[1] or 0))
    else:
        sys.exit(mutants_main(folder, int(what), int(more[0]))[2] > 0)  # survivors are a result, not a failure
