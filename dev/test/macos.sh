# macos.sh BUILD: everything compiles and links for macOS, on Apple and on Intel processors, without a warning. Nothing
# is run. Needs zig, which includes macOS' headers, from the package ziglang: as `python3 -m ziglang`, or in BUILD/zig,
# where `sh dev/test/macos.sh BUILD install` puts it. The last line is `N passed, N failed`.
set -u
build=$1
zig=
for python in "$build/zig/bin/python3" python3; do
    [ -z "$zig" ] && "$python" -m ziglang version > /dev/null 2>&1 && zig="$python -m ziglang"
done
if [ "${2:-}" = install ]; then
    mkdir -p "$build"
    [ -n "$zig" ] || { python3 -m venv "$build/zig" && "$build/zig/bin/pip" install -q --timeout 20 --retries 1 ziglang; } > "$build/zig.out" 2>&1 ||
        echo "zig cannot be installed: $(tail -n 1 "$build/zig.out")"
    exit 0
fi
if [ -z "$zig" ]; then
    echo "skipped macOS: there is no zig; sh dev/test/macos.sh $build install"
    echo "0 passed, 0 failed"
    exit 0
fi

mkdir -p "$build/macos"
ZIG_GLOBAL_CACHE_DIR=$(cd "$build/macos" && pwd)/cache
export ZIG_GLOBAL_CACHE_DIR ZIG_LOCAL_CACHE_DIR="$ZIG_GLOBAL_CACHE_DIR"
export zig build

# Prints errors and warnings; -O0, since the code is never run.
# shellcheck disable=SC2016  # for the shell that xargs starts
compile='
    out=$build/macos/$(basename "$2" | sed "s/[.].*//")-$1
    $zig cc -target "$1" -std=c11 -O0 -fno-sanitize=undefined -Wall -Wextra -Wshadow -Werror -Wno-unknown-pragmas \
        -pthread -I. -x c "$2" -o "$out" > "$out.out" 2>&1 && [ -s "$out" ] && echo "ok      $2 for $1" && exit
    echo "FAILED  $2 for $1"
    head -n 20 "$out.out"'
for source in train.cu test_train.cu tools/*.cu tools/*.c launch/*.c data/*.c examples/*.c dev/bench/*.c dev/test/*.c; do
    case $source in
        dev/test/fuzz.c) continue ;;  # its files exist only in memory (memfd), for libFuzzer on Linux
        dev/test/fake_nvml.c) continue ;;  # a library for Linux
        dev/test/included.c) continue ;;  # include.sh compiles it, with more flags than these
    esac
    for target in aarch64-macos x86_64-macos; do
        case " ${SKIP:-} " in *" $target "*) ;; *) echo "$target $source" ;; esac
    done
done | xargs -n 2 -P "$(getconf _NPROCESSORS_ONLN)" sh -c "$compile" compile > "$build/macos/results"
cat "$build/macos/results"
failed=$(grep -c '^FAILED' "$build/macos/results")
echo "$(grep -c '^ok' "$build/macos/results") passed, $failed failed"
[ "$failed" -eq 0 ]
