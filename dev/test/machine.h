// machine.h: changes that tests make to the machine and only Linux allows. Elsewhere most of these functions do nothing
// and return false, and the tests that need them are skipped.

#ifndef LLMTRAIN_MACHINE_H
#define LLMTRAIN_MACHINE_H

#include "harness.h"

#ifdef __linux__
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#endif

// Whether orphans become children of this process, which can then wait for them.
static inline bool machine_adopt_orphans(bool on) {
#ifdef __linux__
    return prctl(PR_SET_CHILD_SUBREAPER, on) == 0;
#else
    (void)on;
    return false;
#endif
}

// After a change of user: makes this process traceable again, as sanitizers need.
static inline bool machine_allow_tracing(void) {
#ifdef __linux__
    return prctl(PR_SET_DUMPABLE, 1) == 0;
#else
    return true;
#endif
}

// How long a process of one thread has been ready to run while others had the processors; 0: unknown.
static inline double machine_waited_ms(pid_t pid) {
    double waited_ns = 0;
#ifdef __linux__
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/schedstat", (long)pid);
    FILE* file = fopen(path, "r");
    if (file && fscanf(file, "%*u %lf", &waited_ns) != 1) waited_ns = 0;
    if (file) fclose(file);
#else
    (void)pid;
#endif
    return 1e-6 * waited_ns;
}

// Gives this process private mounts that no other process sees.
static inline bool machine_own_mounts(void) {
#ifdef __linux__
    return unshare(CLONE_NEWNS) == 0 && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
#else
    return false;
#endif
}

// Gives this process, which has one thread, another name of its host, which no other process sees.
static inline bool machine_own_name(const char* name) {
#ifdef __linux__
    return (unshare(CLONE_NEWUTS) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWUTS) == 0) &&
           sethostname(name, strlen(name)) == 0;
#else
    (void)name;
    return false;
#endif
}

// Mounts a disk in memory ("size=64k,mode=0755").
static inline bool machine_mount(const char* path, const char* options) {
#ifdef __linux__
    return mount("tmpfs", path, "tmpfs", 0, options) == 0;
#else
    (void)path; (void)options;
    return false;
#endif
}

// Gives a mounted disk other options; NULL: makes it read-only.
static inline bool machine_remount(const char* path, const char* options) {
#ifdef __linux__
    return mount("tmpfs", path, "tmpfs", options ? MS_REMOUNT : MS_REMOUNT | MS_RDONLY, options) == 0;
#else
    (void)path; (void)options;
    return false;
#endif
}

static inline bool machine_unmount(const char* path) {
#ifdef __linux__
    return umount2(path, MNT_DETACH) == 0;
#else
    (void)path;
    return false;
#endif
}

// The soft limit of another process on open files.
static inline bool machine_limit_files(pid_t pid, rlim_t files) {
#ifdef __linux__
    struct rlimit limit;
    if (prlimit(pid, RLIMIT_NOFILE, NULL, &limit) != 0) return false;
    limit.rlim_cur = files;
    return prlimit(pid, RLIMIT_NOFILE, &limit, NULL) == 0;
#else
    (void)pid; (void)files;
    return false;
#endif
}

// The number of cores that this process may use.
static inline int machine_cores(void) {
#ifdef __linux__
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
#endif
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
}

// Pins this process to the number-th of its cores, if it has that many; -1: allows all of them again.
static inline bool machine_use_core(int number) {
#ifdef __linux__
    static cpu_set_t cores;
    cpu_set_t one;
    if (CPU_COUNT(&cores) == 0 && sched_getaffinity(0, sizeof cores, &cores) != 0) return false;
    CPU_ZERO(&one);
    for (int core = 0, seen = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &cores) && (seen++ == number || number < 0)) CPU_SET(core, &one);
    return CPU_COUNT(&one) > 0 && sched_setaffinity(0, sizeof one, &one) == 0;
#else
    (void)number;
    return false;
#endif
}

// Calls body in a process that is killed by any system call but exit_group; true if it exits normally.
static inline bool machine_runs_without_calls(void (*body)(void)) {
#ifdef __linux__
    int status = 0;
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL),
    };
    struct sock_fprog filter = {COUNT_OF(rules), rules};
    fflush(NULL);
    pid_t child = fork();
    need(child >= 0, "fork");
    if (child == 0) {
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) _exit(1);
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) _exit(1);
        body();
        _exit(0);
    }
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
#else
    (void)body;
    return false;
#endif
}

#endif  // LLMTRAIN_MACHINE_H
