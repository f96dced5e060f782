// weights_hash.c: prints a hash of each checkpoint's contents; equal contents have equal hashes. For tests.
//
//     build/weights_hash OUT/step_00000020 [...]

#include "pieces.h"

int main(int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        Error error;
        uint64_t hash = weights_hash(argv[i], &error);
        if (hash == 0) return fprintf(stderr, "weights_hash: %s\n", error.text), 1;
        printf("%016llx\n", (unsigned long long)hash);
    }
    return 0;
}
