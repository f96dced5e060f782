# stories.sh: sourced by the demo and by scripts that compare what runs learn on its corpus, with the programs' folder
# in `build`.

# Waiting threads sleep, so that a run is also fast on a machine with other work; with gcc's OpenMP they spin for a
# moment first, which is long enough for most waits of a step this short.
OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-3000}
export OMP_WAIT_POLICY GOMP_SPINCOUNT

# stories_write DIR: an empty folder with 4 MB of the corpus and 150 kB for validation, as text and as shards; DIR/log.
stories_write() {
    rm -rf "$1"
    mkdir -p "$1"
    "$build/corpus" --out "$1/stories" --bytes 4000000 --val-bytes 150000 > "$1/log"
    "$build/tokenize" --bytes "$1/stories_train.txt" --out "$1/stories" --val 0 >> "$1/log"
    "$build/tokenize" --bytes "$1/stories_val.txt" --out "$1/stories" --val 1 >> "$1/log"
}

# build_programs NAME...: builds them, if they are not up to date.
build_programs() {
    for name in "$@"; do make -s B="$build" "$build/$name"; done
}

# last_loss RUN: the last validation loss of a run, in its own unit.
last_loss() { tail -n 1 "$1/metrics.jsonl" | sed 's/.*"val_loss": \([0-9.]*\).*/\1/'; }
