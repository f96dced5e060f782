#!/bin/sh
# download.sh: what the download scripts share. They read it with `.`; it does nothing by itself.
#
#   download URL FILE [BYTES]   fetches URL into FILE, unless it is there; BYTES: the size that it must have
#   tokenize ARGUMENTS          runs the program tokenize, and compiles it first where that has not been done
#
# A download that is cut off leaves FILE.part, never FILE; the next attempt continues it.

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
script=$(basename -- "$0")

fail() {
    echo "$script: $*" >&2
    exit 1
}

download() {
    if [ -e "$2" ]; then
        echo "$2 is already there"
        return
    fi
    command -v curl >/dev/null || fail "curl is needed to download; install it"
    mkdir -p -- "$(dirname -- "$2")" || fail "cannot make the folder of $2; give another one"
    echo "downloading $2"
    curl --fail --location --retry 3 --connect-timeout 20 --continue-at - --progress-bar --output "$2.part" "$1" ||
        fail "cannot download $1 (curl says why, above); check the network and run this again: it continues from" \
            "$2.part, which you may also remove; or train on another text, with tokenize --bytes FILE"
    if [ -n "${3:-}" ] && [ "$(wc -c <"$2.part")" -ne "$3" ]; then
        rm -f -- "$2.part"
        fail "$1 did not deliver the $3 bytes expected; check the network for a proxy or a log-in page"
    fi
    mv -- "$2.part" "$2"
}

tokenize() {
    if [ ! -x "$root/build/tokenize" ]; then
        mkdir -p "$root/build"
        "${CC:-cc}" -std=c11 -O2 "$root/data/tokenize.c" -o "$root/build/tokenize" -lm -pthread ||
            fail "cannot compile data/tokenize.c; a C compiler is needed, as cc or named in \$CC"
    fi
    "$root/build/tokenize" "$@" || exit 1
}
