# pieces.sh: every constant of the product that cuts work into pieces has a small value in the build for tests
# (LLMTRAIN_PIECE, llmtrain/ops/types.h), or a reason here why it has none. That build is the one of make sanitize, and of
# CUDA code under the sanitizers in make test-more.
set -u
cd "$(dirname "$0")/../.." || exit 1
passed=0
failed=0

# Names, and why they keep their value.
exceptions="
COLUMN_PIECES COLUMN_PIECE_ROWS EMBEDDING_PIECES EMBEDDING_PIECE_ROWS: the order of a sum depends on them
FACTORED_CHUNK FACTORED_PIECES: the same
GEMM_PIECE_UNITS: a multiple of what instructions take
GEMM_TILE_MAX MATMUL_TILE: of registers and shared memory; matrices of the tests are no multiples of it
MAX_PIECES: a limit, which its test reaches
OFFLOAD_PIECE_MOST OFFLOAD_PIECE_SHARE: between them lies OFFLOAD_PIECE_LEAST, which has a small value
OPTIMIZER_BLOCK Q8_BLOCK NF4_BLOCK: the format of a file says them
SHARED_PIECE: a ring between ranks, which has pieces of its own in tests
RELAY_CHUNK: what a pipe takes at once, in which a sentence must fit
SORT_TILE: of SORT_THREADS, which has a small value
"

# Definitions: #define NAME value, or NAME = value in an enum.
found=$(find llmtrain tools data launch -name '*.h' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh' | sort |
    xargs grep -oE '(#define +|enum [{] *|, |^ +)([A-Z][A-Z0-9_]*(PIECE|CHUNK|SLAB|DOCUMENT_STEP|BATCH_BYTES|JOB_BYTES|PACKED|SKETCHES|TILE)[A-Z0-9_]*|[A-Z0-9_]+_BLOCK|PIECE|CHUNK) *(= *|[(]+size_t[)]|LLMTRAIN_PIECE|[0-9])[^,;}]*' \
        kernels_cpu.h kernels.cuh llmtrain.h train.cu | grep -vE '==|define +LLMTRAIN_PIECE' |
    sed -E 's/^([^:]*):(#define +|enum [{] *|, | +)/\1 /')
while read -r file name value; do
    case $value in
        *LLMTRAIN_PIECE*) passed=$((passed + 1)) ;;
        *)
            if echo "$exceptions" | sed 's/:.*//' | grep -qw "$name"; then passed=$((passed + 1)); continue; fi
            failed=$((failed + 1))
            echo "FAILED  $name of $file is no LLMTRAIN_PIECE, and dev/test/pieces.sh has no reason for that" ;;
    esac
done << EOT
$found
EOT
for name in $(echo "$exceptions" | sed 's/:.*//'); do
    if echo "$found" | grep -qw "$name"; then passed=$((passed + 1)); continue; fi
    failed=$((failed + 1))
    echo "FAILED  dev/test/pieces.sh has a reason for $name, which is not in the product"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
