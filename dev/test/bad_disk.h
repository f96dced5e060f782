// bad_disk.h: a disk that fails, for tests of programs that are unaware of it.
//
// A seccomp filter stops a program's system calls on files and notifies the test that started it. The test looks at the
// path, and either answers in the kernel's place, with an error or a part of the bytes, or lets the kernel proceed.
//
//   bad_disk_possible   whether this machine allows that
//   bad_disk_enter      in the child, just before it starts the program
//   bad_disk_listen     in the parent, after that: the descriptor that notifications arrive on
//   bad_disk_serve      in the parent, repeatedly while the program runs

#ifndef LLMTRAIN_BAD_DISK_H
#define LLMTRAIN_BAD_DISK_H

#include "llmtrain/base/system.h"

enum {
    DISK_READ = 1, DISK_WRITE = 2, DISK_FLUSH = 4, DISK_RENAME = 8, DISK_OPEN = 16, DISK_MAKE = 32, DISK_REMOVE = 64,
    DISK_LIST = 128, DISK_CUT = 256, DISK_LOOK = 512, DISK_LOCK = 1024, DISK_ALL = 2047
};

// Which calls fail, and how: of the calls that meet all conditions, the first `first` succeed, the next `length` fail.
typedef struct {
    unsigned calls;        // DISK_READ | ...
    int error;             // returned by a failing call; 0: reads and writes transfer half of the bytes requested
    const char* inside;    // the call's path contains this
    const char* after;     // fail only once a path containing this was seen; NULL: from the start
    uint64_t first, length;
    void (*seen)(unsigned kind, const char* path);  // is told of each of these calls before it happens; NULL: nobody is
    bool spoiled;          // `after` has been seen
    uint64_t met, failed;  // calls that met the conditions, and how many of them failed
    unsigned kind;         // of the last failed call
    char path[PATH_MAX];   // and its path
} BadDisk;

static const char* disk_kind_name(unsigned kind) {
    static const char* const names[] = {"read", "write", "flush", "rename", "open", "mkdir",
                                        "remove", "list", "cut", "look", "lock"};
    size_t i = 0;
    while (kind >> (i + 1)) i++;
    return names[i];
}

// Two connected sockets, closed on exec.
static bool bad_disk_sockets(int sockets[2]) {
    return socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0 && fcntl(sockets[0], F_SETFD, FD_CLOEXEC) == 0 &&
           fcntl(sockets[1], F_SETFD, FD_CLOEXEC) == 0;
}

#ifdef __linux__

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>

// Missing from the headers of older kernels; the numbers are the same on every architecture.
#ifndef SECCOMP_USER_NOTIF_FLAG_CONTINUE
#define SECCOMP_USER_NOTIF_FLAG_CONTINUE 1
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_pidfd_getfd
#define SYS_pidfd_getfd 438
#endif

// For each call: which of its arguments are a descriptor, or that of a directory, and a path; -1: none.
static const struct { unsigned kind; int number; int file, path; } DISK_CALLS[] = {
    {DISK_READ, SYS_read, 0, -1}, {DISK_READ, SYS_pread64, 0, -1},
    {DISK_WRITE, SYS_write, 0, -1}, {DISK_WRITE, SYS_pwrite64, 0, -1}, {DISK_WRITE, SYS_writev, 0, -1},
    {DISK_FLUSH, SYS_fsync, 0, -1}, {DISK_FLUSH, SYS_fdatasync, 0, -1},
    {DISK_RENAME, SYS_renameat2, 2, 3},
    {DISK_OPEN, SYS_openat, 0, 1}, {DISK_MAKE, SYS_mkdirat, 0, 1}, {DISK_REMOVE, SYS_unlinkat, 0, 1},
    {DISK_LIST, SYS_getdents64, 0, -1}, {DISK_CUT, SYS_ftruncate, 0, -1}, {DISK_CUT, SYS_truncate, -1, 0},
    {DISK_LOOK, SYS_newfstatat, 0, 1}, {DISK_LOOK, SYS_statx, 0, 1}, {DISK_LOOK, SYS_fstat, 0, -1},
    {DISK_LOOK, SYS_faccessat, 0, 1}, {DISK_LOCK, SYS_flock, 0, -1},
#ifdef SYS_renameat
    {DISK_RENAME, SYS_renameat, 2, 3},
#endif
#ifdef __x86_64__
    {DISK_RENAME, SYS_rename, -1, 1}, {DISK_OPEN, SYS_open, -1, 0}, {DISK_MAKE, SYS_mkdir, -1, 0},
    {DISK_REMOVE, SYS_unlink, -1, 0}, {DISK_REMOVE, SYS_rmdir, -1, 0}, {DISK_LOOK, SYS_stat, -1, 0},
    {DISK_LOOK, SYS_lstat, -1, 0}, {DISK_LOOK, SYS_access, -1, 0},
#endif
};
enum { DISK_CALL_COUNT = sizeof DISK_CALLS / sizeof *DISK_CALLS };

// The absolute path that a call refers to; "" if it cannot be read.
static void disk_path(char path[PATH_MAX], pid_t pid, const __u64* arguments, size_t call) {
    char link[64], name[PATH_MAX] = "";
    int file = DISK_CALLS[call].file < 0 ? AT_FDCWD : (int)arguments[DISK_CALLS[call].file];
    size_t bytes = 0;
    if (DISK_CALLS[call].path >= 0) {  // in the program's memory, in pieces that do not cross a page
        const size_t piece = 256;
        char* from = (char*)(uintptr_t)arguments[DISK_CALLS[call].path];
        while (bytes + piece < sizeof name && memchr(name, 0, bytes) == NULL) {
            struct iovec here = {name + bytes, piece - ((uintptr_t)from + bytes) % piece};
            struct iovec there = {from + bytes, here.iov_len};
            if (process_vm_readv(pid, &here, 1, &there, 1, 0) != (ssize_t)here.iov_len) break;
            bytes += here.iov_len;
        }
        name[min_size(bytes, sizeof name - 1)] = 0;
    }
    path[0] = 0;
    if (name[0] != '/') {
        snprintf(link, sizeof link, file == AT_FDCWD ? "/proc/%d/cwd" : "/proc/%d/fd/%d", (int)pid, file);
        ssize_t length = readlink(link, path, PATH_MAX - 1);
        path[length > 0 ? length : 0] = 0;
    }
    size_t length = strlen(path);
    if (name[0]) snprintf(path + length, PATH_MAX - length, "%s%.4000s", name[0] == '/' ? "" : "/", name);
}

// Duplicates another process' descriptor into this process.
static int descriptor_of(pid_t pid, int file) {
    int process = (int)syscall(SYS_pidfd_open, pid, 0), copy = -1;
    if (process >= 0) copy = (int)syscall(SYS_pidfd_getfd, process, file, 0);
    if (process >= 0) close(process);
    return copy;
}

// Does half of a read or write in the program's place. Returns its result, or -1 if the kernel is to do all of it.
static ssize_t disk_do_half(pid_t pid, const struct seccomp_data* call, bool writes) {
    size_t bytes = (size_t)call->args[2] / 2;
    if (call->nr != SYS_write && call->nr != SYS_read && call->nr != SYS_pread64) return -1;
    int file = bytes ? descriptor_of(pid, (int)call->args[0]) : -1;
    char* data = file < 0 ? NULL : (char*)memory_allocate(bytes);
    struct iovec here = {data, bytes}, there = {(void*)(uintptr_t)call->args[1], bytes};
    ssize_t n = -1;
    if (data && writes && process_vm_readv(pid, &here, 1, &there, 1, 0) == (ssize_t)bytes) n = write(file, data, bytes);
    if (data && call->nr == SYS_read) n = read(file, data, bytes);
    if (data && call->nr == SYS_pread64) n = pread(file, data, bytes, (off_t)call->args[3]);
    here.iov_len = there.iov_len = n > 0 ? (size_t)n : 0;
    if (n > 0 && !writes && process_vm_writev(pid, &here, 1, &there, 1, 0) != n) n = -1;
    free(data);
    if (file >= 0) close(file);
    return n;
}

// Takes one call and answers it.
static void bad_disk_answer(BadDisk* disk, int listener, pid_t pid) {
    union { struct seccomp_notif notice; char room[512]; } told;  // newer kernels may write more
    union { struct seccomp_notif_resp answer; char room[512]; } reply;
    char path[PATH_MAX];
    size_t call = 0;
    memset(&told, 0, sizeof told);
    memset(&reply, 0, sizeof reply);
    if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &told) != 0) return;  // the program has ended meanwhile
    const struct seccomp_data* data = &told.notice.data;
    while (call + 1 < DISK_CALL_COUNT && DISK_CALLS[call].number != data->nr) call++;
    disk_path(path, pid, data->args, call);
    disk->spoiled = disk->spoiled || disk->after == NULL || strstr(path, disk->after);
    bool fails = disk->spoiled && strstr(path, disk->inside);
    if (fails) disk->met++;
    if (fails && disk->seen) disk->seen(DISK_CALLS[call].kind, path);
    fails = fails && disk->met > disk->first && disk->met - disk->first <= disk->length;
    ssize_t half = fails && disk->error == 0 ? disk_do_half(pid, data, DISK_CALLS[call].kind == DISK_WRITE) : -1;
    if (fails && disk->error == 0) fails = half >= 0;
    if (fails) {
        disk->failed++;
        disk->kind = DISK_CALLS[call].kind;
        snprintf(disk->path, sizeof disk->path, "%s", path);
    }
    reply.answer.id = told.notice.id;
    if (!fails) reply.answer.flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE;
    else if (half >= 0) reply.answer.val = half;
    else reply.answer.error = -disk->error;
    ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &reply);
}

// Answers the programs' calls for `ms` milliseconds; a listener that is closed becomes -1.
static void bad_disk_serve(BadDisk* disk, int* listeners, const pid_t* pids, size_t count, double ms) {
    struct pollfd polled[16];
    double until = now_ms() + ms;
    for (double left = ms; left > 0; left = until - now_ms()) {
        for (size_t i = 0; i < count; i++) polled[i] = (struct pollfd){listeners[i], POLLIN, 0};
        if (poll(polled, (nfds_t)count, (int)ceil(left)) <= 0) return;
        for (size_t i = 0; i < count; i++) {
            if (polled[i].revents & POLLIN) {
                bad_disk_answer(disk, listeners[i], pids[i]);
            } else if (polled[i].revents) {
                close(listeners[i]);
                listeners[i] = -1;
            }
        }
    }
}

// Stops these calls of this process from now on. Sends the listener's number to the other end of the socket, and waits
// until that end listens. False if the machine does not have these filters.
static bool bad_disk_enter(unsigned calls, int socket) {
    struct sock_filter filter[2 * DISK_CALL_COUNT + 5];
    unsigned short length = 0;
#if defined(__x86_64__)
    const unsigned native = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
    const unsigned native = AUDIT_ARCH_AARCH64;
#else
    const unsigned native = 0;
#endif
    const struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
    filter[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, native, 1, 0);  // skips 1 instruction
    filter[length++] = allow;
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < DISK_CALL_COUNT; i++) {
        const unsigned number = (unsigned)DISK_CALLS[i].number;
        if ((DISK_CALLS[i].kind & calls) == 0) continue;
        filter[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1);
        filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF);
    }
    filter[length++] = allow;
    struct sock_fprog program = {length, filter};
    if (native == 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return false;
    int listener = (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program);
    return listener >= 0 && send(socket, &listener, sizeof listener, 0) == sizeof listener &&
           recv(socket, &listener, sizeof listener, 0) == sizeof listener;
}

// Returns -1 if the child cannot be listened to.
static int bad_disk_listen(int socket, pid_t pid) {
    int listener = -1;
    if (recv(socket, &listener, sizeof listener, 0) != sizeof listener) return -1;
    int copy = descriptor_of(pid, listener);
    return send(socket, &listener, sizeof listener, MSG_NOSIGNAL) == sizeof listener ? copy : -1;
}

// Tries it: whether a child's calls can be stopped and its descriptors duplicated.
static bool bad_disk_possible(void) {
    int sockets[2], status = 1;
    if (!bad_disk_sockets(sockets)) return false;
    pid_t child = fork();
    if (child == 0) _exit(bad_disk_enter(DISK_WRITE, sockets[1]) ? 0 : 1);
    close(sockets[1]);
    int listener = child > 0 ? bad_disk_listen(sockets[0], child) : -1;
    close(sockets[0]);
    if (listener >= 0) close(listener);
    return child > 0 && waitpid(child, &status, 0) == child && status == 0 && listener >= 0;
}

#else  // only Linux lets a program answer the calls of another

static bool bad_disk_possible(void) { return false; }
static bool bad_disk_enter(unsigned calls, int socket) { return (void)calls, (void)socket, false; }
static int bad_disk_listen(int socket, pid_t pid) { return (void)socket, (void)pid, -1; }
static void bad_disk_serve(BadDisk* disk, int* listeners, const pid_t* pids, size_t count, double ms) {
    (void)disk, (void)listeners, (void)pids, (void)count, (void)ms;
}

#endif

#endif  // LLMTRAIN_BAD_DISK_H
