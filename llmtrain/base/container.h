// container.h: what the control groups of this process leave it: those of a container, of a scheduler's job, of a
// systemd scope. Memory and processor time: container_limits; the number of threads that follows: threads_choose.
//
// A process is in one group of each hierarchy (/proc/self/cgroup), and the limits of that group and of all above it
// hold; inside a container the path may name groups that only the machine sees, and its own is at the mount point.
// Version 2 has one hierarchy, version 1 one for memory and one for processor time.

#ifndef LLMTRAIN_CONTAINER_H
#define LLMTRAIN_CONTAINER_H

#include "../ops/base.h"
#include "system.h"

#include <sys/stat.h>

typedef struct {
    size_t memory;      // bytes that the process can still allocate; SIZE_MAX: no limit
    double processors;  // processor time per time; INFINITY: no limit
} ContainerLimits;

#ifdef SYSTEM_LINUX
static inline size_t container_number(const char* directory, const char* file, const char* key) {
    char path[2 * 4096];
    snprintf(path, sizeof path, "%.8000s/%s", directory, file);
    return system_number(path, key);
}

// Lowers the limits to those of the group in a directory, with the file names of either version.
static inline void container_look(ContainerLimits* limits, const char* directory) {
    static const struct { const char *limit, *used, *stat; } memory[] = {
        {"memory.max", "memory.current", ""}, {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_"}};
    static const char* const reclaimable[] = {"inactive_file", "active_file", "slab_reclaimable"};
    for (int version = 0; version < 2; version++) {
        size_t limit = container_number(directory, memory[version].limit, "");
        size_t used = container_number(directory, memory[version].used, "");
        if (limit == SIZE_MAX || used == SIZE_MAX) continue;
        for (int i = 0; i < 3; i++) {  // the kernel drops these pages when memory is asked for
            char key[40];
            snprintf(key, sizeof key, "%s%s ", memory[version].stat, reclaimable[i]);
            size_t bytes = container_number(directory, "memory.stat", key);
            if (bytes != SIZE_MAX) used -= min_size(used, bytes);
        }
        limits->memory = min_size(limits->memory, limit - min_size(limit, used));
    }
    char path[2 * 4096];
    double quota = 0, period = 0;
    snprintf(path, sizeof path, "%.8000s/cpu.max", directory);
    FILE* file = fopen(path, "re");
    bool found = file && fscanf(file, "%lf %lf", &quota, &period) == 2;  // or "max 100000"
    if (file) fclose(file);
    if (!found) {
        size_t most = container_number(directory, "cpu.cfs_quota_us", ""), every = SIZE_MAX;  // -1: none
        if (most != SIZE_MAX) every = container_number(directory, "cpu.cfs_period_us", "");
        found = every != SIZE_MAX;
        quota = (double)most;
        period = (double)every;
    }
    if (found && quota > 0 && period > 0) limits->processors = fmin(limits->processors, quota / period);
}
#endif

// root: of the file system, ""; a test has another.
static inline ContainerLimits container_limits(const char* root) {
    ContainerLimits limits = {SIZE_MAX, INFINITY};
#ifdef SYSTEM_LINUX
    char line[4096], directory[2 * 4096];
    snprintf(directory, sizeof directory, "%.1000s/proc/self/cgroup", root);
    FILE* file = fopen(directory, "re");
    while (file && fgets(line, sizeof line, file)) {  // number:controllers:path; version 2 names no controllers
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (path == NULL) continue;
        *path++ = 0;
        path[strcspn(path, "\n")] = 0;
        if (strcmp(path, "/") == 0) path++;  // the mount point itself
        const char* slash = controllers[1] ? "/" : "";
        size_t mount = (size_t)snprintf(directory, sizeof directory, "%.1000s/sys/fs/cgroup%s%s", root, slash,
                                        controllers + 1);
        snprintf(directory + mount, sizeof directory - mount, "%s", path);
        for (size_t end = strlen(directory);; end--) {  // the group, and those above it
            if (end > mount && directory[end] != 0 && directory[end] != '/') continue;
            directory[end] = 0;
            container_look(&limits, directory);
            if (end <= mount) break;
        }
    }
    if (file) fclose(file);
#else
    (void)root;
#endif
    return limits;
}

#define THREADS_HELP "OpenMP threads per process; 0: all cores, or as many as the container has processor time for"

// Sets the number of threads: as asked, if that is not 0. Otherwise OMP_NUM_THREADS counts, if it is set; or else the
// cores, or the processor time of the container if that is less, are divided among the `ranks` of this machine; bound:
// a launcher has bound each to cores of its own. note: where to report such a limit; NULL: nowhere.
static inline void threads_choose(size_t asked, size_t ranks, bool bound, FILE* note) {
    if (asked > 0) threads_set(asked);
    if (asked > 0 || getenv("OMP_NUM_THREADS")) return;
    size_t all = threads_count(), own = bound ? all : max_size(all / ranks, 1);
    double processors = container_limits("").processors, share = ceil(processors / (double)ranks);
    size_t allowed = share < (double)own ? max_size((size_t)share, 1) : own;
    if (allowed < own && note)
        fprintf(note, "note: %zu thread%s%s, since the container has the time of %.3g of %zu processors; --threads N "
                "sets another number\n", allowed, allowed > 1 ? "s" : "", ranks > 1 ? " per rank" : "",
                processors, all);
    if (allowed < all) threads_set(allowed);
}

// To be called first in main. A thread of GCC's OpenMP that waits for others spins for milliseconds before it sleeps.
// Beside other busy processes it takes that time from the thread that it waits for, and training is many times slower
// than its share of the processors. 1000 rounds, some 20 us, are enough for most waits of a step. OpenMP reads its
// variables before main, so the program starts itself once more with this one, unless the user has decided (as under a
// debugger that does not follow).
static inline void threads_spin_briefly(char** argv) {
#if defined(_OPENMP) && defined(SYSTEM_LINUX) && !defined(__clang__)
    char path[4096] = "";
    const char *name = strrchr(argv[0], '/'), *file = name ? argv[0] : path;
    struct stat own, named;
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    if (strcmp(name ? name + 1 : argv[0], program_invocation_short_name) != 0) return;  // main is a test's function
    if (name == NULL && readlink("/proc/self/exe", path, sizeof path - 1) < 0) return;
    if (stat("/proc/self/exe", &own) != 0 || stat(file, &named) != 0) return;
    if (own.st_dev != named.st_dev || own.st_ino != named.st_ino) return;  // a loader's process, or a name of its own
    if (setenv("GOMP_SPINCOUNT", "1000", 1) == 0) execvp(file, argv);
#else
    (void)argv;
#endif
}

#endif  // LLMTRAIN_CONTAINER_H
