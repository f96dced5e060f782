# include.sh BUILD: shows that a program can include llmtrain as it includes any other header: before or after headers of
# the C library, as C11, as GNU C11 and as C++20, in several files that are linked, and beside names of its own. Each
# case compiles included.c as both files of a program, without a warning, and runs it. The last line is `N passed, N
# failed`. Run it in the root of the checkout.
set -u
build=$1
work=$build/include
rm -rf "$work"
mkdir -p "$work/functions" "$work/macros" || exit 1
passed=0
failed=0
verdict() {
    if [ "$2" -eq 0 ]; then passed=$((passed + 1)); echo "ok      $1"; return; fi
    failed=$((failed + 1))
    echo "FAILED  $1"
    grep -E 'error|warning' "$work/out" | head -n 5
}

# Names that a program may have: the first as functions, or as macros with an argument; the others as macros.
for name in add allocate checksum download dropout fail gemm grad heartbeat param refuse upload; do
    echo "static inline int $name(int x) { return x + 1; }" >> "$work/functions/own_names.h"
    echo "#define $name(x) ((x) + 1)" >> "$work/macros/own_names.h"
done
for name in BYTES_4 CONFIG_COUNT CONTRACTIONS COUNT_FLAG GPT2 KEY_COUNT KIND_IN KIND_SET LLAMA3 LLAMAS MAX META METRIC \
    MIN ROPE_TYPES STATE_REAL SUM; do
    echo "#define $name own" | tee -a "$work/functions/own_names.h" >> "$work/macros/own_names.h"
done

# compile COMPILER FLAG...
compile() { "$@" -O0 -Wall -Wextra -Werror -Wno-unknown-pragmas -I. > "$work/out" 2>&1; }

# program NAMES FIRST BRANCH COMPILER FLAG...: FIRST is the header that both files include before anything else, or none;
# BRANCH is what system.h must then use on Linux.
program() {
    names=$1
    first=$2
    branch=$3
    shift 3
    [ "$(uname -s)" = Linux ] || branch=posix
    what="$* with $first first, and own $names"
    [ "$first" = none ] || set -- "$@" -include "$first"
    for part in 1 2; do
        compile "$@" "-I$work/$names" "-DPART=$part" -c dev/test/included.c -o "$work/$part.o" || break
    done
    [ -s "$work/out" ] || "$1" "$work/1.o" "$work/2.o" -o "$work/program" -lm -ldl -pthread > "$work/out" 2>&1
    [ ! -s "$work/out" ] && "$work/program" > "$work/out" 2>&1 && grep -q "^$branch " "$work/out"
    verdict "$what" $?
}

cc=${CC:-cc}
cxx=${CXX:-g++}
for names in functions macros; do
    program $names none linux "$cc" -std=c11
    program $names stdio.h posix "$cc" -std=c11
done
program functions none linux "$cc" -std=gnu11
program functions stdio.h posix "$cc" -std=gnu11
if command -v "$cxx" > /dev/null; then
    program functions none linux "$cxx" -std=c++20 -Wno-missing-field-initializers -x c++
    program functions stdio.h linux "$cxx" -std=c++20 -Wno-missing-field-initializers -x c++
else
    echo "skipped C++20: there is no $cxx"
fi

# Headers that hide some of POSIX in -std=c11, each first.
for first in assert.h errno.h inttypes.h limits.h locale.h math.h signal.h stdlib.h string.h time.h wchar.h dirent.h \
    pthread.h sys/socket.h sys/stat.h unistd.h; do
    compile "$cc" -std=c11 -include "$first" -fsyntax-only examples/first.c
    verdict "$cc -std=c11 with $first first" $?
done
if [ "$(uname -s)" = Linux ]; then
    for first in fcntl.h netdb.h sys/mman.h sys/wait.h; do
        ! compile "$cc" -std=c11 -include "$first" -fsyntax-only examples/first.c &&
            grep -q "include llmtrain's headers before it" "$work/out"
        verdict "$cc -std=c11 with $first first is refused with a reason" $?
    done
    for source in train.cu tools/*.cu tools/*.c data/*.c launch/*.c examples/*.c; do
        "$cc" -std=c11 -I. -dM -E -x c "$source" 2>&1 | tee "$work/out" | grep -q 'define SYSTEM_LINUX 1'
        verdict "$source uses what only Linux has" $?
    done
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
