// bugs.h: shared by the programs of planted bugs: a list of bugs, each with a twin that does the same correctly, and
// main.
//
//     BUG(name, "modes in which the emulator must catch it") {
//         kernel<<<1, bug ? N + 1 : N>>>(...);       bug and good are bool, one is true
//         return true;                               whether the result is right
//     }
//     int main(int argc, char** argv) { return bugs_main(argc, argv, run); }
//
//     program --list         number, name, modes
//     program --good         the twins, in order: N passed, N failed
//     program NUMBER         makes the mistake: status 0 nothing noticed, 1 a wrong result, 86 a diagnosis
//     program NUMBER good    its twin

#ifndef EMULATOR_BUGS_H
#define EMULATOR_BUGS_H

#include <cuda_runtime.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct Bug {
    const char *name, *modes;
    bool (*run)(bool bug, bool good);
};

static Bug bugs[64];
static int bug_count;

struct BugListed {
    BugListed(const char* name, const char* modes, bool (*run)(bool, bool)) { bugs[bug_count++] = {name, modes, run}; }
};

#define BUG(name, modes) \
    static bool name(bool bug, bool good); \
    static BugListed name##_listed(#name, modes, name); \
    static bool name([[maybe_unused]] bool bug, [[maybe_unused]] bool good)

static int bugs_main(int argc, char** argv, bool (*right)(const Bug& b, bool bug)) {
    int number = argc > 1 ? atoi(argv[1]) : 0, failed = 0;
    bool good = argc == 3 && strcmp(argv[2], "good") == 0;
    if (argc == 2 && strcmp(argv[1], "--list") == 0) {
        for (int i = 0; i < bug_count; i++) printf("%d %s %s\n", i + 1, bugs[i].name, bugs[i].modes);
        return 0;
    }
    if (argc == 2 && strcmp(argv[1], "--good") == 0) {
        for (int i = 0; i < bug_count; i++) {
            if (right(bugs[i], false)) continue;
            printf("FAILED  the good twin of %s gives a wrong result\n", bugs[i].name);
            failed++;
        }
        printf("%d passed, %d failed\n", bug_count - failed, failed);
        return failed > 0;
    }
    if (number < 1 || number > bug_count || argc > 3 || (argc == 3 && !good)) {
        fprintf(stderr, "usage: %s --list | --good | NUMBER [good]   with a number from 1 to %d\n", argv[0], bug_count);
        return 2;
    }
    if (right(bugs[number - 1], !good)) return 0;
    printf("%s: wrong result\n", bugs[number - 1].name);
    return 1;
}

#endif  // EMULATOR_BUGS_H
