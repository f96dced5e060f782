#!/bin/sh
# single.sh: prints the runtime as one header: the headers that a program on llmtrain includes, with every header of this
# project that they include.
#
#   sh dev/single.sh > build/llmtrain_single.h      as `make single` does
#
# The headers that a header includes come before it. One included under a condition (#ifdef LLMTRAIN_CUDA) replaces that
# #include, and appears again where the condition does not hold; its include guard keeps a compiler from reading it
# twice. #includes of system headers, and of dev/, stay as they are.

cd "$(dirname -- "$0")/.." || exit 1
export LC_ALL=C
headers="llmtrain.h llmtrain/checkpoint/record.h llmtrain/text/data.h llmtrain/text/generate.h"
version=$(sed -n 's/^#define LLMTRAIN_VERSION "\(.*\)"/\1/p' llmtrain/ops/base.h)

cat << END
// llmtrain_single.h: llmtrain $version as one header, to be copied into another project. It needs no other file.
//
// Its text is that of these headers and of those that they include, each after those that it needs:
//
$(for header in $headers; do echo "//   $header"; done)
//
// Each begins with its manual; llmtrain.h with an overview.
//
//   C11        cc -std=c11 -O3 -march=native -fopenmp program.c -lm -pthread
//   CUDA       nvcc -std=c++20 -O3 -DLLMTRAIN_CUDA -Xcompiler -fopenmp program.cu -lcublasLt
//   options    -DPRECISION_BF16 or -DPRECISION_FP16: parameters and activations of 16 bits instead of fp32;
//              -DLLMTRAIN_NCCL with -lnccl: several GPUs; -DLLMTRAIN_MPI with mpicc: ranks on CPUs over MPI
//
// Made by a script (make single): change the headers, not this file.

END

exec awk -v headers="$headers" '
    # The path of a header that a file includes: relative to it. Empty for dev/: the emulator is not in the runtime.
    function resolve(file, name, path) {
        path = match(file, /.*\//) ? substr(file, 1, RLENGTH) name : name
        while (sub(/[^\/]+\/\.\.\//, "", path)) { }
        return name ~ /^dev\// ? "" : path
    }

    # The conditions of an #if, each after a space: "#if defined(A) && defined(B)" becomes " A B".
    function conditions_of(line) {
        sub(/^ *# *(ifdef|if|elif)/, "", line)
        sub(/^ *# *ifndef */, "!", line)
        gsub(/defined|[ ()]/, "", line)
        if (line !~ /\|\|/) gsub(/&&/, " ", line)
        return " " line
    }

    function otherwise(conditions) {
        gsub(/ /, "+", conditions)
        return " !" conditions
    }

    # Whether a header was already printed where all of these conditions hold.
    function is_there(file, conditions, places, terms, p, t, known) {
        for (p = split(there[file], places, "|"); p > 1; p--) {
            known = 1
            for (t = split(places[p], terms, " "); t > 0; t--) if (!index(conditions " ", " " terms[t] " ")) known = 0
            if (known) return 1
        }
        return 0
    }

    # Prints a header under the conditions that hold at this point. Its first #if is its guard, and not a condition.
    function emit(file, conditions, lines, count, pass, i, depth, opened, within, d, part, path) {
        if (is_there(file, conditions)) return
        there[file] = there[file] "|" conditions
        while ((got = (getline line < file)) > 0) lines[++count] = line
        close(file)
        if (got < 0) {
            print "single.sh: cannot read " file > "/dev/stderr"
            exit 1
        }
        for (pass = 1; pass <= 2; pass++) {  # first its unconditional includes, then itself
            if (pass == 2) print "// ======== " file
            for (i = 1; i <= count; i++) {
                if (lines[i] ~ /^ *# *if/) opened[++depth] = depth > 1 ? conditions_of(lines[i]) : ""
                else if (lines[i] ~ /^ *# *el/) opened[depth] = otherwise(opened[depth])
                else if (lines[i] ~ /^ *# *endif/) depth--
                path = split(lines[i], part, "\"") > 1 && part[1] ~ /^ *# *include *$/ ? resolve(file, part[2]) : ""
                if (path == "" && pass == 2) print lines[i]
                if (path == "" || (pass == 1) == (depth > 1)) continue
                within = conditions
                for (d = 1; d <= depth; d++) within = within opened[d]
                emit(path, within)
            }
        }
    }

    BEGIN {
        count = split(headers, header, " ")
        for (h = 1; h <= count; h++) emit(header[h], "")
    }'
