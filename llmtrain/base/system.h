// system.h: everything that differs between Linux, macOS and other POSIX systems, in one place. All else in this
// repository is C11 and POSIX.
//
//   1. memory       how much is available, large pages, a directory in memory
//   2. files        flushing, also in the background, reading ahead, reserving space, bypassing the page cache
//   3. descriptors  files in memory, pipes, sockets, waiting for them
//   4. machine      its identity, its cores
//   5. processes    children that end with their parent; the state of other processes, for the supervisor
//
// -DLLMTRAIN_POSIX_ONLY leaves out the calls that are specific to one system, so that the branch for other systems can
// be run on Linux (make test-posix). A program that includes headers of the C library before ours takes that branch too
// (posix.h). The features of Linux that POSIX lacks, and their replacements:
//
//   the kernel ends children with their parent     a thread of the child polls for its parent; a guard, for a command
//   /proc, pidfd, orphans become our children      kill(pid, 0) and the process group
//   /proc/meminfo, control groups                  Mach on macOS; elsewhere all memory of the machine
//   CPU affinity                                   all cores
//   /dev/shm; files without names in it            /tmp; none: ranks of one machine use sockets

#ifndef LLMTRAIN_SYSTEM_H
#define LLMTRAIN_SYSTEM_H

#include "../ops/base.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#if defined(__linux__) && !defined(LLMTRAIN_POSIX_ONLY) && !defined(LLMTRAIN_INCLUDED_LATE)
#define SYSTEM_LINUX 1
#include <dirent.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#elif defined(__APPLE__) && !defined(LLMTRAIN_POSIX_ONLY)
#define SYSTEM_MACOS 1
#include <libproc.h>
#include <mach/mach.h>
#include <sys/proc.h>
#include <sys/sysctl.h>
#endif

// ------------------------------------------------------------------------------------------------
// 1. Memory

// A directory of a file system in memory, where there is one.
#ifdef SYSTEM_LINUX
#define SYSTEM_MEMORY_FOLDER "/dev/shm"
#else
#define SYSTEM_MEMORY_FOLDER "/tmp"
#endif

#ifdef SYSTEM_LINUX
// The first number after `key` in a system file; SIZE_MAX where there is none.
static inline size_t system_number(const char* path, const char* key) {
    FILE* file = fopen(path, "re");
    if (file == NULL) return SIZE_MAX;
    char line[128];
    unsigned long long number = 0;
    bool found = false;
    while (!found && fgets(line, sizeof line, file))
        found = strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%llu", &number) == 1;
    fclose(file);
    return found ? (size_t)number : SIZE_MAX;
}
#endif

// Bytes of memory that programs can still allocate without swapping; SIZE_MAX where the system does not say.
static inline size_t memory_available(void) {
#if defined(SYSTEM_LINUX)
    size_t kilobytes = system_number("/proc/meminfo", "MemAvailable:");
    return kilobytes == SIZE_MAX ? SIZE_MAX : kilobytes * 1024;
#elif defined(SYSTEM_MACOS)
    vm_statistics64_data_t pages;
    mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
    if (host_statistics64(mach_host_self(), HOST_VM_INFO64, (host_info64_t)&pages, &count) != KERN_SUCCESS)
        return SIZE_MAX;
    return ((size_t)pages.free_count + pages.inactive_count) * (size_t)sysconf(_SC_PAGESIZE);
#elif defined(_SC_PHYS_PAGES)
    return (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);  // the total: an upper bound
#else
    return SIZE_MAX;
#endif
}

// The peak memory of a process in bytes, from what getrusage or wait4 returned.
static inline size_t memory_peak_of(const struct rusage* usage) {
#ifdef __APPLE__
    return (size_t)usage->ru_maxrss;
#else
    return (size_t)usage->ru_maxrss * 1024;
#endif
}

// The peak memory of this process since exec, in bytes. On Linux getrusage's peak survives exec: it would be the
// launcher's, which may be a large Python process.
static inline size_t memory_peak(void) {
    struct rusage usage;
#ifdef SYSTEM_LINUX
    size_t kilobytes = system_number("/proc/self/status", "VmHWM:");
    if (kilobytes != SIZE_MAX) return kilobytes * 1024;
#endif
    getrusage(RUSAGE_SELF, &usage);
    return memory_peak_of(&usage);
}

// Fewer, larger pages for mapped memory, where the system has them.
static inline void memory_use_large_pages(void* memory, size_t bytes) {
    (void)memory; (void)bytes;
#ifdef SYSTEM_LINUX
    madvise(memory, bytes, MADV_HUGEPAGE);
#endif
}

// Releases pages of a mapped file after they were read: they stay in the system's file cache, but are no longer counted
// as memory of this process.
static inline void memory_forget_file(void* mapping, size_t bytes) {
    (void)mapping; (void)bytes;
#ifdef SYSTEM_LINUX
    madvise(mapping, bytes, MADV_DONTNEED);
#endif
}

// ------------------------------------------------------------------------------------------------
// 2. Files

// Flushes a file or directory to the disk, as fsync does; on macOS fsync leaves the data in the disk's own cache.
static inline int disk_flush(int file) {
    int result = fsync(file);
#ifdef SYSTEM_MACOS
    // Not every file system has this.
    if (result == 0 && fcntl(file, F_FULLFSYNC) != 0 && errno != ENOTSUP && errno != EINVAL) result = -1;
#endif
    return result;
}

// Starts the flush of a part of a file, and does not wait for it.
static inline void disk_flush_begin(int file, size_t first, size_t bytes) {
    (void)file; (void)first; (void)bytes;
#ifdef SYSTEM_LINUX
    sync_file_range(file, (off_t)first, (off_t)bytes, SYNC_FILE_RANGE_WRITE);
#endif
}

// Starts to read a part of a file, and does not wait for it.
static inline void disk_read_ahead(int file, size_t first, size_t bytes) {
#ifdef __APPLE__
    struct radvisory part = {(off_t)first, (int)bytes};
    fcntl(file, F_RDADVISE, &part);
#else
    posix_fadvise(file, (off_t)first, (off_t)bytes, POSIX_FADV_WILLNEED);
#endif
}

// Reserves disk space for the first `bytes` bytes of an empty file, which read as zeros. Returns 0 or an errno.
static inline int disk_reserve(int file, size_t bytes) {
    int result = 0;
#ifdef __APPLE__
    fstore_t room = {F_ALLOCATEALL, F_PEOFPOSMODE, 0, (off_t)bytes, 0};
    result = fcntl(file, F_PREALLOCATE, &room) != 0 || ftruncate(file, (off_t)bytes) != 0 ? errno : 0;
#elif defined(LLMTRAIN_POSIX_ONLY)
    static const char zeros[LLMTRAIN_PIECE(1 << 16, 509)];
    for (size_t done = 0; result == 0 && done < bytes;) {
        ssize_t written = pwrite(file, zeros, min_size(bytes - done, sizeof zeros), (off_t)done);
        if (written > 0) done += (size_t)written;
        else if (errno != EINTR) result = errno;
    }
#else
    do result = posix_fallocate(file, 0, (off_t)bytes); while (result == EINTR);
#endif
    return result;
}

#define DISK_ALIGN ((size_t)4096)  // of memory, offsets and lengths, where the page cache is bypassed

// Makes reads and writes of a file bypass the page cache, which counts towards a container's memory. False where the
// file system cannot do that; use disk_forget instead.
static inline bool disk_bypass_cache(int file) {
#if defined(__APPLE__)
    return fcntl(file, F_NOCACHE, 1) == 0;
#elif defined(SYSTEM_LINUX)
    int flags = fcntl(file, F_GETFL);
    return flags >= 0 && fcntl(file, F_SETFL, flags | O_DIRECT) == 0;
#else
    return (void)file, false;
#endif
}

// Flushes a part of a file, if it was written, and drops it from the page cache. False with errno if the flush fails.
static inline bool disk_forget(int file, size_t first, size_t bytes, bool written) {
    (void)first; (void)bytes;
#ifdef SYSTEM_LINUX
    const unsigned flush = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    if (written && sync_file_range(file, (off_t)first, (off_t)bytes, flush) != 0 && errno != ENOSYS) return false;
#else
    if (written && disk_flush(file) != 0) return false;
#endif
#ifndef __APPLE__
    posix_fadvise(file, (off_t)first, (off_t)bytes, POSIX_FADV_DONTNEED);
#endif
    return true;
}

// The path by which a descriptor of a terminal can be opened a second time; false if there is none.
static inline bool terminal_path(char path[64], int file) {
#ifdef SYSTEM_LINUX
    snprintf(path, 64, "/proc/self/fd/%d", file);  // also where the terminal's own name is not in this container
    return isatty(file);
#else
    return isatty(file) && ttyname_r(file, path, 64) == 0;
#endif
}

// The size of a terminal in characters; 80 by 24 if it does not say.
static inline void terminal_size(size_t* columns, size_t* rows, int file) {
    struct winsize size;
    bool known = ioctl(file, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 && size.ws_row > 1;
    *columns = known ? size.ws_col : 80;
    *rows = known ? size.ws_row : 24;
}

// ------------------------------------------------------------------------------------------------
// 3. Descriptors

// Flags of send: a closed connection is an error, not a signal; more follows at once.
#ifdef __APPLE__
#define SOCKET_QUIET 0  // descriptor_prepare sets SO_NOSIGPIPE instead
#else
#define SOCKET_QUIET MSG_NOSIGNAL
#endif
#ifdef SYSTEM_LINUX
#define SOCKET_MORE MSG_MORE
#else
#define SOCKET_MORE 0
#endif

// Makes a descriptor non-blocking and close-on-exec. Returns it, or -1 after a failure, also if the call that should
// have made it failed.
static inline int descriptor_prepare(int file) {
    if (file < 0) return -1;
    bool good = fcntl(file, F_SETFD, FD_CLOEXEC) == 0 && fcntl(file, F_SETFL, O_NONBLOCK) == 0;
#ifdef __APPLE__
    int on = 1;
    setsockopt(file, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);  // fails for a pipe
#endif
    if (good) return file;
    int reason = errno;
    close(file);
    errno = reason;
    return -1;
}

// Makes a file in memory, without a name and the limit of /dev/shm; others can open it through /proc. -1: not possible.
static inline int memory_file_open(void) {
#if defined(SYSTEM_LINUX) && defined(SYS_memfd_create)
    return descriptor_prepare((int)syscall(SYS_memfd_create, "llmtrain", 0));
#endif
    return -1;
}

// A pipe with both ends non-blocking and close-on-exec: [0] to read, [1] to write.
static inline bool pipe_open(int ends[2]) {
    if (pipe(ends) != 0) return ends[0] = ends[1] = -1, false;
    int first = descriptor_prepare(ends[0]), second = descriptor_prepare(ends[1]);
    if (first >= 0 && second >= 0) return true;
    if (first >= 0) close(first);
    if (second >= 0) close(second);
    return ends[0] = ends[1] = -1, false;
}

// Sets how many bytes can be written ahead of the reader, where the system allows that.
static inline void pipe_enlarge(int end, int bytes) {
    (void)end; (void)bytes;
#ifdef SYSTEM_LINUX
    fcntl(end, F_SETPIPE_SZ, bytes);
#endif
}

// Writes a byte to a pipe, to wake the thread or process that waits for it. A full pipe wakes too.
static inline void pipe_wake(int end) {
    if (write(end, "", 1) < 0) return;
}

// Reads and drops all bytes in a pipe.
static inline void pipe_empty(int end) {
    char bytes[64];
    while (read(end, bytes, sizeof bytes) > 0) {}
}

// poll for at most `ms`, rounded up to whole milliseconds where the system counts in them.
static inline void poll_ms(struct pollfd* polls, size_t count, double ms) {
#ifdef SYSTEM_LINUX
    struct timespec time = {(time_t)(ms / 1e3), (long)(fmod(ms, 1e3) * 1e6)};
    ppoll(polls, (nfds_t)count, &time, NULL);
#else
    poll(polls, (nfds_t)count, (int)ceil(ms));
#endif
}

// ------------------------------------------------------------------------------------------------
// 4. Machine

// A text that identifies this machine until its next reboot.
static inline void machine_identity(char name[256]) {
    size_t length = 0;
    memset(name, 0, 256);
#if defined(SYSTEM_LINUX)
    FILE* file = fopen("/proc/sys/kernel/random/boot_id", "r");
    length = file ? fread(name, 1, 64, file) : 0;
    if (file) fclose(file);
#elif defined(SYSTEM_MACOS)
    length = 64;
    if (sysctlbyname("kern.bootsessionuuid", name, &length, NULL, 0) != 0) length = 0;
#endif
    gethostname(name + length, 128);
}

// Whether a launcher has bound this process to some of the cores.
static inline bool threads_are_bound(void) {
#ifdef SYSTEM_LINUX
    cpu_set_t bound;
    return sched_getaffinity(0, sizeof bound, &bound) != 0 || CPU_COUNT(&bound) < sysconf(_SC_NPROCESSORS_ONLN);
#else
    return false;
#endif
}

// ------------------------------------------------------------------------------------------------
// 5. Processes

typedef struct {
    int parent, session;
    char state;  // R, S, D, T (stopped), Z (has ended), ...; 0: unknown
    int status;  // of a process that has ended, as from waitpid
} Process;

// As in a shell: the exit code, or 128 + the signal. status: as from waitpid.
static inline int status_code(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

// "was terminated by signal 9 (Killed)"; good until the next call.
static inline const char* status_text(int status) {
    static char text[96];
    int number = WTERMSIG(status);
    if (WIFSIGNALED(status)) snprintf(text, sizeof text, "was terminated by signal %d (%s)", number, strsignal(number));
    else snprintf(text, sizeof text, "ended with exit code %d", WEXITSTATUS(status));
    return text;
}

// False if the process does not exist. All fields are 0 if it may exist, but the system gives no information on it, or
// no descriptor or memory is left to read that.
static inline bool process_read(Process* p, pid_t pid) {
    memset(p, 0, sizeof *p);
#if defined(SYSTEM_LINUX)
    char path[64], text[2048];
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t bytes = file < 0 ? -1 : read(file, text, sizeof text - 1);
    bool unknown = bytes < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM);
    if (file >= 0) close(file);
    if (bytes <= 0) return unknown;
    text[bytes] = 0;
    const char* at = strrchr(text, ')');  // the end of field 2 of proc(5), the name, which can hold anything
    if (at == NULL || sscanf(at, ") %c %d %*d %d", &p->state, &p->parent, &p->session) != 3) return false;
    for (int field = 2; at && field < 52; field++) at = strchr(at + 1, ' ');
    p->status = at ? atoi(at) : 0;
    return true;
#elif defined(SYSTEM_MACOS)
    struct proc_bsdinfo info;
    if (proc_pidinfo(pid, PROC_PIDTBSDINFO, 0, &info, sizeof info) != (int)sizeof info) return errno != ESRCH;
    p->parent = (int)info.pbi_ppid;
    p->session = (int)getsid(pid);
    p->state = info.pbi_status == SSTOP ? 'T' : 'R';
    return true;
#else
    return kill(pid, 0) == 0 || errno == EPERM;
#endif
}

// A descriptor that is readable when a process has ended; -1 where there is none.
static inline int process_watch(pid_t pid) {
#if defined(SYSTEM_LINUX)
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434  // on every architecture; unknown to Linux before 5.3
#endif
    return (int)syscall(SYS_pidfd_open, pid, 0);
#else
    return (void)pid, -1;
#endif
}

// Whether a process of this user has a file open; false where the system does not say.
static inline bool process_has_open(pid_t pid, const char* path) {
    bool found = false;
#ifdef SYSTEM_LINUX
    char name[64];
    struct stat wanted, status;
    snprintf(name, sizeof name, "/proc/%ld/fd", (long)pid);
    DIR* directory = stat(path, &wanted) == 0 ? opendir(name) : NULL;
    for (struct dirent* entry; directory && !found && (entry = readdir(directory)) != NULL;)
        found = fstatat(dirfd(directory), entry->d_name, &status, 0) == 0 && status.st_dev == wanted.st_dev &&
                status.st_ino == wanted.st_ino;
    if (directory) closedir(directory);
#else
    (void)pid; (void)path;
#endif
    return found;
}

// Makes orphaned descendants children of this process, so that processes_signal finds them; elsewhere does nothing.
static inline bool process_adopt_orphans(void) {
#ifdef SYSTEM_LINUX
    return prctl(PR_SET_CHILD_SUBREAPER, 1) == 0;
#else
    return true;
#endif
}

// Sends a signal (0: none) to all processes of a command, which is a child that leads a session; returns how many there
// are, or may be. On Linux, after process_adopt_orphans, they are our children outside our session: at least one as
// long as any process of the command is left. Elsewhere they are the command's process group, counted as one.
static inline size_t processes_signal(pid_t command, int number) {
#ifdef SYSTEM_LINUX
    (void)command;
    DIR* directory = opendir("/proc");
    if (directory == NULL) return 1;
    size_t count = 0;
    Process p;
    for (struct dirent* entry; (entry = readdir(directory)) != NULL;) {
        pid_t pid = (pid_t)atoi(entry->d_name);  // 0: not a process
        if (pid == 0 || !process_read(&p, pid)) continue;
        bool known = p.state != 0;
        if (known && (p.parent != getpid() || p.session == getsid(0))) continue;
        if (known && number) kill(pid, number);
        count++;
    }
    closedir(directory);
    return count;
#else
    return command > 0 && (kill(-command, number) == 0 || errno == EPERM) ? 1 : 0;
#endif
}

#ifndef SYSTEM_LINUX
#define PROCESS_LOOK_MS 20.0  // between two checks for a parent

// The argument of a child's thread that waits for its parent to end.
typedef struct {
    pid_t parent;
    int number;
} ProcessParent;

static inline void* process_await_orphaned(void* argument) {
    ProcessParent p = *(ProcessParent*)argument;
    free(argument);
    while (getppid() == p.parent) sleep_ms(PROCESS_LOOK_MS);
    kill(getpid(), p.number);
    return NULL;
}
#endif

// Called in a forked child: makes it get a signal when its parent ends, however it ends; on Linux also after exec,
// elsewhere not (see guard_begin). False if the parent has ended already, or if this cannot be arranged.
static inline bool process_end_with_parent(pid_t parent, int number) {
#ifdef SYSTEM_LINUX
    return prctl(PR_SET_PDEATHSIG, number) == 0 && getppid() == parent;
#else
    pthread_t thread;
    sigset_t all, before;
    ProcessParent* argument = (ProcessParent*)malloc(sizeof *argument);
    if (argument == NULL) return false;
    argument->parent = parent;
    argument->number = number;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the other threads
    int status = pthread_create(&thread, NULL, process_await_orphaned, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status != 0) return free(argument), false;
    pthread_detach(thread);
    return true;
#endif
}

// A process that sends a signal to a child when this process ends, for systems where process_end_with_parent does not
// survive exec. It waits until the other end of a pipe is closed.
typedef struct {
    pid_t pid;  // 0: there is none, since none is needed, or there can be none
    int end;    // of the pipe
} Guard;

static inline Guard guard_begin(pid_t child, int number) {
    Guard guard = {0, -1};
#ifdef SYSTEM_LINUX
    (void)child; (void)number;
#else
    int ends[2];
    char byte;
    if (!pipe_open(ends)) return guard;
    guard.pid = fork();
    if (guard.pid == 0) {
        sigset_t all;
        sigfillset(&all);
        sigprocmask(SIG_SETMASK, &all, NULL);
        dup2(ends[0], STDIN_FILENO);
        fcntl(STDIN_FILENO, F_SETFL, 0);
        long files = sysconf(_SC_OPEN_MAX);  // it keeps no file, lock or pipe of its parent
        for (int file = 1; file < (files > 0 && files < 65536 ? files : 65536); file++) close(file);
        if (read(STDIN_FILENO, &byte, 1) == 0) kill(child, number);
        _exit(0);
    }
    close(ends[0]);
    if (guard.pid > 0) guard.end = ends[1];
    else close(ends[1]), guard.pid = 0;
#endif
    return guard;
}

// Called when the child has ended.
static inline void guard_end(Guard* guard) {
    if (guard->pid == 0) return;
    pipe_wake(guard->end);
    close(guard->end);
    while (waitpid(guard->pid, NULL, 0) < 0 && errno == EINTR) {}
    guard->pid = 0;
}

#endif  // LLMTRAIN_SYSTEM_H
