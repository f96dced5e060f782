# documents.sh: checks that the documents agree with the sources. Every header has a row in the table of doc/design.md,
# above the headers that it includes; links lead to files and headings that exist; dev/README.md has every rung of every
# ladder; the diffs of doc/adding.md apply, each alone and all in order, and the result compiles. Run it in the root of
# the checkout.
set -u
passed=0
failed=0
verdict() { if [ "$2" -eq 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED  $1"; fi; }

# The line number of a header's row in doc/design.md; empty if there is none.
row() { grep -nF "](../$1) |" doc/design.md | grep -E '^[0-9]+:\| \[' | cut -d : -f 1; }

for header in $(git ls-files '*.h' '*.cuh' | grep -E '^(llmtrain/|tools/|[^/]*$)'); do
    above=$(row "$header")
    [ -n "$above" ]
    verdict "doc/design.md has a row for $header" $?
    for name in $(sed -n 's/^[ \t]*#[ \t]*include[ \t]*"\([^"]*\)".*/\1/p' "$header"); do
        included=$(cd "$(dirname "$header")" && realpath --relative-to="$OLDPWD" "$name" 2> /dev/null)
        below=$(row "$included")
        [ -z "$below" ] || [ "${above:-0}" -lt "$below" ]
        verdict "doc/design.md has $header above $included, which it includes" $?
    done
done

# Headings of a file, as links name them.
anchors() {
    sed -n 's/^##* *//p' "$1" | tr '[:upper:]' '[:lower:]' | sed 's/[^a-z0-9 _-]//g; s/ /-/g'
}

for document in README.md doc/*.md dev/README.md dev/bench/RESULTS.md dev/emulator/README.md; do
    for link in $(sed '/^```/,/^```/d' "$document" | grep -oE '\]\([^) ]+\)' | sed 's/^](//; s/)$//' | sort -u); do
        case $link in *://*) continue ;; esac
        file=${link%%#*}
        target=$document
        [ -z "$file" ] || target=$(dirname "$document")/$file
        [ -e "$target" ]
        verdict "$document links to $link" $?
        case $link in
            *\#*)
                anchors "$target" | grep -qxF -e "${link#*#}"
                verdict "$document links to $link, which is a heading" $? ;;
        esac
    done
done

# The rungs of each ladder program, and the rows of its section in dev/README.md.
for program in dev/*.cu; do
    name=$(basename "$program" .cu)
    rungs=$(sed -n 's/.*ladder_rung("\([^"]*\)".*/\1/p' "$program" | sort -u)
    rows=$(awk -v title="### [$name]($name.cu)" '/^#/ { on = $0 == title } on' dev/README.md |
        sed -n '/^|--/,$ s/^| \([^|]*\) |.*/\1/p' | sort -u)
    [ -n "$rungs" ] && [ "$rungs" = "$rows" ]
    verdict "dev/README.md has the rungs of $program: $(echo "$rungs" | tr '\n' ' ')" $?
done

# A section of doc/adding.md with a diff, from its heading on.
changed=$(mktemp -d) || exit 1
trap 'rm -rf "$changed"' EXIT
git ls-files | tar -cf - -T - | tar -xf - -C "$changed"
sections=$(grep -n '^## ' doc/adding.md | cut -d : -f 1)
for line in $sections; do
    heading=$(sed -n "${line}s/^## //p" doc/adding.md)
    diff=$(sed -n "$((line + 1)),\$p" doc/adding.md | sed '/^## /,$d' | sed -n '/^```diff/,/^```/p' | grep -v '^```')
    [ -z "$diff" ] && continue
    printf '%s\n' "$diff" | git apply --check -
    verdict "doc/adding.md, $heading: the diff applies" $?
    printf '%s\n' "$diff" | (cd "$changed" && GIT_CEILING_DIRECTORIES=$(dirname "$changed") git apply -)
    verdict "doc/adding.md, $heading: the diff applies after those before it" $?
done
! cmp -s llmtrain.h "$changed/llmtrain.h"
verdict "doc/adding.md: its diffs change llmtrain.h" $?
for source in train.cu dev/test/test_kernels.c; do
    (cd "$changed" && ${CC:-cc} -std=c11 -fsyntax-only -Wall -Wextra -Werror -fopenmp -I. -x c "$source")
    verdict "doc/adding.md: with its diffs $source compiles" $?
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
