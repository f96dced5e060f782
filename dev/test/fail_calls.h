// fail_calls.h: compiled into a program before its own sources (-include), lets a test see its calls of the C library
// that can fail, and make one of them fail.
//
//   FAIL_CALLS_LOG=FILE     to this file a line is appended for each of them, `call HASH ORDINAL SITE`, and for what
//                           those that succeeded did to files, `flush PATH`
//   FAIL_CALLS_AT="HASH ORDINAL WAY"    this call fails in the first process that makes it: with an `error`, as
//                           `interrupted`, or after a `part` of the bytes. Then there is a file FILE.failed
//   FAIL_CALLS_LIST=1       the program prints its sites, and ends
//
// A site is a call in the sources: `NAME FILE FUNCTION`. It has a hash for each chain of callers up to main, so that
// the same write of a log and of a checkpoint are different calls. The ordinal counts the calls of a hash in a process;
// the first three are logged. Calls for messages (printf and the like) are not seen. For gcc and clang on Linux with
// glibc, without optimization, which would merge calls and hide callers.

#ifndef LLMTRAIN_FAIL_CALLS_H
#define LLMTRAIN_FAIL_CALLS_H

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>  // declares posix_memalign
#endif

typedef struct {
    const char *name, *file, *function;
    int error;  // what it fails with
} FailSite;

static struct {
    struct { uint64_t hash; unsigned count; } calls[8192];
    int log, depth;  // depth: how many forks lie between the first process and this one
    uint64_t at;
    unsigned ordinal;
    char way[16];
} fail_calls = {.log = -1};
static _Thread_local bool fail_part;  // the call in progress transfers a part of its bytes

extern const FailSite* const __start_fail_sites[];
extern const FailSite* const __stop_fail_sites[];
extern char __executable_start, etext;

__attribute__((format(printf, 1, 2))) static inline void fail_log(const char* format, ...) {
    char line[8500];
    int reason = errno;
    va_list arguments;
    va_start(arguments, format);
    int bytes = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (fail_calls.log >= 0 && write(fail_calls.log, line, (size_t)bytes) < 0) abort();
    errno = reason;
}

__attribute__((constructor)) static void fail_begin(void) {
    const char *at = getenv("FAIL_CALLS_AT"), *log = getenv("FAIL_CALLS_LOG");
    unsigned long long hash = 0;
    if (at && sscanf(at, "%llx %u %15s", &hash, &fail_calls.ordinal, fail_calls.way) == 3) fail_calls.at = hash;
    if (log) fail_calls.log = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fail_calls.log >= 0) fail_calls.log = fcntl(fail_calls.log, F_DUPFD_CLOEXEC, 200);
    if (getenv("FAIL_CALLS_LIST") == NULL) return;
    for (const FailSite* const* s = __start_fail_sites; s < __stop_fail_sites; s++)
        printf("%s %s %s\n", (*s)->name, (*s)->file, (*s)->function);
    exit(0);
}

// The callers of the caller, up to main, or to where a thread, a callback or a signal handler begins.
static inline uint64_t fail_hash(void** frame) {
    uint64_t hash = 14695981039346656037u + (uint64_t)fail_calls.depth;
    for (const char* p = program_invocation_short_name; *p; p++) hash = (hash ^ (uint64_t)*p) * 1099511628211u;
    for (char* caller; (caller = (char*)frame[1]) > &__executable_start && caller < &etext;) {
        hash = (hash ^ (uint64_t)(caller - &__executable_start)) * 1099511628211u;
        void** next = (void**)frame[0];
        if (next <= frame) break;
        frame = next;
    }
    return hash;
}

// Whether this call is to fail; sets errno.
__attribute__((noinline)) static bool fail_now(const FailSite* site) {
    int reason = errno;
    uint64_t hash = fail_hash((void**)__builtin_frame_address(0)), free_slot = 0;
    size_t slot = (size_t)(hash % 8192);
    fail_part = false;
    while (!__atomic_compare_exchange_n(&fail_calls.calls[slot].hash, &free_slot, hash, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED) && free_slot != hash) {
        slot = (slot + 1) % 8192;
        free_slot = 0;
    }
    unsigned ordinal = __atomic_add_fetch(&fail_calls.calls[slot].count, 1, __ATOMIC_RELAXED);
    if (ordinal <= 3)
        fail_log("call %016llx %u %s %s %s\n", (unsigned long long)hash, ordinal, site->name, site->file,
                 site->function);
    errno = reason;
    if (fail_calls.at != hash || fail_calls.ordinal != ordinal) return false;
    char once[4096];
    snprintf(once, sizeof once, "%s.failed", getenv("FAIL_CALLS_LOG"));
    int mark = open(once, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    errno = reason;
    if (mark < 0) return false;
    close(mark);
    fail_part = strcmp(fail_calls.way, "part") == 0;
    errno = fail_calls.way[0] == 'i' ? EINTR : site->error;
    return !fail_part;
}

// What a call has done to an open file, if it succeeded, by its path.
static inline long fail_did(const char* what, int file, long result) {
    char link[64], path[4096];
    int reason = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t bytes = result >= 0 && fail_calls.log >= 0 ? readlink(link, path, sizeof path - 1) : 0;
    if (bytes > 0 && path[0] == '/') fail_log("%s %.*s\n", what, (int)bytes, path);
    errno = reason;
    return result;
}

// The same for a stream, which may be NULL.
static inline long fail_did_stream(const char* what, FILE* stream, long result) {
    return stream ? fail_did(what, fileno(stream), result) : result;
}

// The same for names; to: NULL if there is one.
static inline int fail_named(const char* what, const char* from, const char* to, int result) {
    if (result == 0) fail_log("%s %s%s%s\n", what, from, to ? " " : "", to ? to : "");
    return result;
}

static inline int fail_made(int flags, int file) {
    return flags & O_CREAT && file >= 0 ? (int)fail_did("make", file, file) : file;
}

static inline FILE* fail_opened(const char* mode, FILE* stream) {
    if (stream && mode[0] != 'r') fail_did_stream("make", stream, 0);
    return stream;
}

static inline int fail_emptied(int directory, int result) {
    return (int)fail_did("empty", directory, result);
}

// Sets a stream's error indicator, as a call that fails does.
static inline bool fail_stream(FILE* stream) {
    stream->_flags |= 0x20;
    return true;
}

#define FAIL_CALL(name, number, failed, call) __extension__({                                              \
        static const FailSite fail_site = {name, __FILE__, __func__, number};                              \
        static const FailSite* const fail_entry __attribute__((section("fail_sites"), used)) = &fail_site; \
        fail_now(&fail_site) ? (failed) : (call); })
#define FAIL_PART(n) (fail_part ? ((n) + 1) / 2 : (n))
#define FAIL_STREAM(stream, result) (fail_stream(stream), (result))

// Files and directories
#define open(path, ...) FAIL_CALL("open", EACCES, -1, fail_made(FAIL_FLAGS(__VA_ARGS__, 0), open(path, __VA_ARGS__)))
#define FAIL_FLAGS(flags, ...) (flags)
#define close(file) FAIL_CALL("close", EIO, (close(file), errno = EIO, -1), close(file))
#define read(...) FAIL_FIFTH(__VA_ARGS__, FAIL_NO_READ, FAIL_READ, FAIL_NO_READ, FAIL_NO_READ, )(__VA_ARGS__)
#define FAIL_READ(file, p, n) FAIL_CALL("read", EIO, -1, read(file, p, FAIL_PART(n)))
#define FAIL_NO_READ(...) read(__VA_ARGS__)  // a pointer to a function of ours: it has another number of arguments
#define FAIL_FIFTH(first, second, third, fourth, fifth, ...) fifth
#define pread(file, p, n, at) FAIL_CALL("pread", EIO, -1, pread(file, p, FAIL_PART(n), at))
#define write(...) FAIL_FIFTH(__VA_ARGS__, FAIL_NO_WRITE, FAIL_WRITE, FAIL_NO_WRITE, FAIL_NO_WRITE, )(__VA_ARGS__)
#define FAIL_NO_WRITE(...) write(__VA_ARGS__)
#define FAIL_WRITE(file, p, n) FAIL_CALL("write", ENOSPC, -1, fail_did("write", file, write(file, p, FAIL_PART(n))))
#define pwrite(file, p, n, at) FAIL_CALL("pwrite", ENOSPC, -1, pwrite(file, p, FAIL_PART(n), at))
#define lseek(...) FAIL_CALL("lseek", EINVAL, -1, lseek(__VA_ARGS__))
#define fsync(file) FAIL_CALL("fsync", EIO, -1, (int)fail_did("flush", file, fsync(file)))
#define ftruncate(file, n) FAIL_CALL("ftruncate", EIO, -1, (int)fail_did("write", file, ftruncate(file, n)))
#define flock(...) FAIL_CALL("flock", ENOLCK, -1, flock(__VA_ARGS__))
#define fcntl(...) FAIL_CALL("fcntl", EINVAL, -1, fcntl(__VA_ARGS__))
#define stat(path, status) FAIL_CALL("stat", EIO, -1, stat(path, status))
#define fstat(file, status) FAIL_CALL("fstat", EIO, -1, fstat(file, status))
#define statvfs(...) FAIL_CALL("statvfs", EIO, -1, statvfs(__VA_ARGS__))
#define access(...) FAIL_CALL("access", EIO, -1, access(__VA_ARGS__))
#define realpath(...) FAIL_CALL("realpath", EACCES, NULL, realpath(__VA_ARGS__))
#define rename(from, to) FAIL_CALL("rename", EIO, -1, fail_named("rename", from, to, rename(from, to)))
#define link(from, to) FAIL_CALL("link", EPERM, -1, fail_named("link", from, to, link(from, to)))
#define unlink(path) FAIL_CALL("unlink", EACCES, -1, fail_named("remove", path, NULL, unlink(path)))
#define remove(path) FAIL_CALL("remove", EACCES, -1, fail_named("remove", path, NULL, remove(path)))
#define rmdir(path) FAIL_CALL("rmdir", EACCES, -1, fail_named("remove", path, NULL, rmdir(path)))
#define unlinkat(at, name, flags) \
    FAIL_CALL("unlinkat", EACCES, -1, fail_emptied(at, unlinkat(at, name, flags)))
#define mkdir(path, mode) FAIL_CALL("mkdir", ENOSPC, -1, fail_named("make", path, NULL, mkdir(path, mode)))
#define mkostemp(...) FAIL_CALL("mkostemp", EACCES, -1, mkostemp(__VA_ARGS__))
#define opendir(...) FAIL_CALL("opendir", EMFILE, NULL, opendir(__VA_ARGS__))
#define fdopendir(...) FAIL_CALL("fdopendir", ENOMEM, NULL, fdopendir(__VA_ARGS__))
#define readdir(...) FAIL_CALL("readdir", EIO, NULL, readdir(__VA_ARGS__))
#define glob(...) FAIL_CALL("glob", EIO, GLOB_ABORTED, glob(__VA_ARGS__))

// Streams
#define fopen(path, mode) FAIL_CALL("fopen", EACCES, NULL, fail_opened(mode, fopen(path, mode)))
#define freopen(...) FAIL_CALL("freopen", EMFILE, NULL, freopen(__VA_ARGS__))
#define fclose(stream) FAIL_CALL("fclose", EIO, (fclose(stream), errno = EIO, EOF), fclose(stream))
#define fread(p, size, n, stream) \
    FAIL_CALL("fread", EIO, FAIL_STREAM(stream, (size_t)0), fread(p, size, n, stream))
#define fgets(p, n, stream) FAIL_CALL("fgets", EIO, FAIL_STREAM(stream, NULL), fgets(p, n, stream))
#define fscanf(stream, ...) FAIL_CALL("fscanf", EIO, FAIL_STREAM(stream, EOF), fscanf(stream, __VA_ARGS__))
#define getline(p, n, stream) FAIL_CALL("getline", EIO, FAIL_STREAM(stream, -1), getline(p, n, stream))
#undef getc
#define getc(stream) FAIL_CALL("getc", EIO, FAIL_STREAM(stream, EOF), fgetc(stream))
#define fwrite(p, size, n, stream) FAIL_CALL("fwrite", ENOSPC, FAIL_STREAM(stream, (size_t)0), \
    (size_t)fail_did_stream("buffer", stream, (long)fwrite(p, size, n, stream)))
#define fputs(text, stream) FAIL_CALL("fputs", ENOSPC, FAIL_STREAM(stream, EOF), fputs(text, stream))
#define fputc(c, stream) FAIL_CALL("fputc", ENOSPC, FAIL_STREAM(stream, EOF), fputc(c, stream))
#define fflush(stream) FAIL_CALL("fflush", ENOSPC, FAIL_STREAM((FILE*)(stream) ? (FILE*)(stream) : stdout, EOF), \
    (int)fail_did_stream("write", stream, fflush(stream)))
#define fseek(...) FAIL_CALL("fseek", EIO, -1, fseek(__VA_ARGS__))
#define open_memstream(...) FAIL_CALL("open_memstream", ENOMEM, NULL, open_memstream(__VA_ARGS__))

// Memory
#define malloc(n) FAIL_CALL("malloc", ENOMEM, NULL, malloc(n))
#define realloc(p, n) FAIL_CALL("realloc", ENOMEM, NULL, realloc(p, n))
#define posix_memalign(...) FAIL_CALL("posix_memalign", ENOMEM, ENOMEM, posix_memalign(__VA_ARGS__))
#undef strdup
#define strdup(text) FAIL_CALL("strdup", ENOMEM, NULL, strdup(text))
#define mmap(...) FAIL_CALL("mmap", ENOMEM, MAP_FAILED, mmap(__VA_ARGS__))
#define munmap(...) FAIL_CALL("munmap", EINVAL, (munmap(__VA_ARGS__), -1), munmap(__VA_ARGS__))
#define madvise(...) FAIL_CALL("madvise", EINVAL, -1, madvise(__VA_ARGS__))
#define posix_fadvise(...) FAIL_CALL("posix_fadvise", EINVAL, EINVAL, posix_fadvise(__VA_ARGS__))
#define posix_fallocate(...) FAIL_CALL("posix_fallocate", ENOSPC, ENOSPC, posix_fallocate(__VA_ARGS__))
#define sync_file_range(...) FAIL_CALL("sync_file_range", EIO, -1, sync_file_range(__VA_ARGS__))

// Sockets and pipes
#define socket(...) FAIL_CALL("socket", EMFILE, -1, socket(__VA_ARGS__))
#define bind(...) FAIL_CALL("bind", EADDRINUSE, -1, bind(__VA_ARGS__))
#define listen(...) FAIL_CALL("listen", EADDRINUSE, -1, listen(__VA_ARGS__))
#define accept(...) FAIL_CALL("accept", EMFILE, -1, accept(__VA_ARGS__))
#define connect(...) FAIL_CALL("connect", ECONNREFUSED, -1, connect(__VA_ARGS__))
#define send(file, p, n, flags) FAIL_CALL("send", ECONNRESET, -1, send(file, p, FAIL_PART(n), flags))
#define recv(file, p, n, flags) FAIL_CALL("recv", ECONNRESET, -1, recv(file, p, FAIL_PART(n), flags))
#define setsockopt(...) FAIL_CALL("setsockopt", EINVAL, -1, setsockopt(__VA_ARGS__))
#define getsockopt(...) FAIL_CALL("getsockopt", ENOBUFS, -1, getsockopt(__VA_ARGS__))
#define getsockname(...) FAIL_CALL("getsockname", ENOBUFS, -1, getsockname(__VA_ARGS__))
#define getpeername(...) FAIL_CALL("getpeername", ENOTCONN, -1, getpeername(__VA_ARGS__))
#define getaddrinfo(...) FAIL_CALL("getaddrinfo", EIO, EAI_AGAIN, getaddrinfo(__VA_ARGS__))
#define getnameinfo(...) FAIL_CALL("getnameinfo", EIO, EAI_AGAIN, getnameinfo(__VA_ARGS__))
#define poll(...) FAIL_CALL("poll", EINTR, -1, poll(__VA_ARGS__))
#define ppoll(...) FAIL_CALL("ppoll", EINTR, -1, ppoll(__VA_ARGS__))
#define pipe(ends) FAIL_CALL("pipe", EMFILE, -1, pipe(ends))
#define dup2(...) FAIL_CALL("dup2", EMFILE, -1, dup2(__VA_ARGS__))

// Processes and threads
static inline int fail_forked(int child) {
    fail_calls.depth += child == 0;
    return child;
}
#define fork() FAIL_CALL("fork", EAGAIN, -1, fail_forked(fork()))
#define execvp(...) FAIL_CALL("execvp", ENOENT, -1, execvp(__VA_ARGS__))
#define waitpid(...) FAIL_CALL("waitpid", EINTR, -1, waitpid(__VA_ARGS__))
#define waitid(...) FAIL_CALL("waitid", EINTR, -1, waitid(__VA_ARGS__))
#define kill(...) FAIL_CALL("kill", EPERM, -1, kill(__VA_ARGS__))
#define setsid() FAIL_CALL("setsid", EPERM, -1, setsid())
#define setenv(...) FAIL_CALL("setenv", ENOMEM, -1, setenv(__VA_ARGS__))
#define prctl(...) FAIL_CALL("prctl", EINVAL, -1, prctl(__VA_ARGS__))
#define getrlimit(...) FAIL_CALL("getrlimit", EINVAL, -1, getrlimit(__VA_ARGS__))
#define setrlimit(...) FAIL_CALL("setrlimit", EPERM, -1, setrlimit(__VA_ARGS__))
#define getrusage(...) FAIL_CALL("getrusage", EINVAL, -1, getrusage(__VA_ARGS__))
#define syscall(...) FAIL_CALL("syscall", ENOSYS, -1, syscall(__VA_ARGS__))
#define pthread_create(...) FAIL_CALL("pthread_create", EAGAIN, EAGAIN, pthread_create(__VA_ARGS__))
#define pthread_key_create(...) FAIL_CALL("pthread_key_create", EAGAIN, EAGAIN, pthread_key_create(__VA_ARGS__))
#define dlopen(...) FAIL_CALL("dlopen", ENOENT, NULL, dlopen(__VA_ARGS__))
#define dlsym(...) FAIL_CALL("dlsym", ENOENT, NULL, dlsym(__VA_ARGS__))
#define gethostname(...) FAIL_CALL("gethostname", ENAMETOOLONG, -1, gethostname(__VA_ARGS__))
#define sched_getaffinity(...) FAIL_CALL("sched_getaffinity", EINVAL, -1, sched_getaffinity(__VA_ARGS__))

#endif  // LLMTRAIN_FAIL_CALLS_H
