#!/bin/sh
# install.sh: what `make install` and `make uninstall` do with what make has built.
#
#   sh dev/install.sh install PREFIX FILE...        writes, for programs and build/llmtrain_single.h,
#       PREFIX/bin/llmtrain-NAME                    llmtrain-train, llmtrain-generate ...
#       PREFIX/include/llmtrain.h                   the single header
#       PREFIX/lib/pkgconfig/llmtrain.pc            its flags: cc x.c $(pkg-config --cflags --libs llmtrain)
#   sh dev/install.sh uninstall PREFIX FILE...      removes exactly these files
#
# DESTDIR, if set, comes before PREFIX in these paths, but not in llmtrain.pc. OPENMP: the compiler's flags for OpenMP.
set -eu
command=$1
prefix=$2
root=${DESTDIR:-}$prefix
shift 2

# put FILE MODE: installs it from the standard input, or removes it.
put() {
    if [ "$command" = uninstall ]; then
        rm -f "$root/$1"
        return
    fi
    mkdir -p "$(dirname "$root/$1")"
    rm -f "$root/$1"  # a program that runs keeps its file
    cat > "$root/$1"
    chmod "$2" "$root/$1"
}

for file in "$@"; do
    name=${file##*/}
    case $name in
        *.h) put include/llmtrain.h 644 ;;
        *) put "bin/llmtrain-${name%%-*}" 755 ;;  # train-cuda-BF16 is train
    esac < "$([ "$command" = install ] && echo "$file" || echo /dev/null)"
done

# Without -ffp-contract=off a compiler that fuses multiplications and additions changes bits.
openmp=$(echo "${OPENMP:-}" | sed 's/-Wno-unknown-pragmas//')
put lib/pkgconfig/llmtrain.pc 644 << END
prefix=$prefix
includedir=\${prefix}/include

Name: llmtrain
Description: GPT training runtime in one header
Version: $(sed -n 's/^#define LLMTRAIN_VERSION "\(.*\)"/\1/p' llmtrain/ops/base.h)
Cflags: -I\${includedir} -ffp-contract=off -pthread $openmp
Libs: -lm -pthread $openmp
END
[ "$command" = uninstall ] || echo "installed in $root: bin/llmtrain-*, include/llmtrain.h, lib/pkgconfig/llmtrain.pc"
