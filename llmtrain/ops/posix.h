// posix.h: lets a program include headers of the C library before ours, with any -std.
//
// The first header of the C library decides what all of them declare. If that is one that ours include, they declare
// everything, since types.h has defined _GNU_SOURCE, and system.h uses what only Linux has. If it is the program's,
// -std=gnu11 and C++ still declare POSIX, which is enough. But -std=c11 hides it: here the headers that follow are told
// to hide nothing, and what those before them may have hidden is declared. With -std=c11 a program must include
// fcntl.h, netdb.h, sys/mman.h and sys/wait.h after ours, since they hide types and constants.

#ifndef LLMTRAIN_POSIX_H
#define LLMTRAIN_POSIX_H

#include "types.h"

#ifdef LLMTRAIN_INCLUDED_LATE
#undef _FEATURES_H
#include <features.h>

#include <dirent.h>
#include <fcntl.h>
#include <netdb.h>
#include <signal.h>
#include <sys/mman.h>
#undef _STDLIB_H  // to which sys/wait.h would leave some of its macros
#include <sys/wait.h>
#define _STDLIB_H 1
#include <time.h>

DIR* fdopendir(int file);
FILE* open_memstream(char** text, size_t* bytes);
char* realpath(const char* path, char* resolved);
char* strdup(const char* text);
char* strsignal(int number);
int clock_gettime(clockid_t clock, struct timespec* time);
int fileno(FILE* file);
int ftruncate(int file, off_t bytes);
int gethostname(char* name, size_t bytes);
int kill(pid_t process, int number);
int mkostemp(char* path, int flags);
int nanosleep(const struct timespec* time, struct timespec* left);
int posix_memalign(void** memory, size_t alignment, size_t bytes);
int setenv(const char* name, const char* value, int overwrite);
int unlinkat(int directory, const char* path, int flags);
long syscall(long number, ...);
ssize_t pread(int file, void* data, size_t bytes, off_t offset);
ssize_t pwrite(int file, const void* data, size_t bytes, off_t offset);
struct tm* gmtime_r(const time_t* time, struct tm* parts);
#if defined(__linux__) && !defined(CLOCK_MONOTONIC)
#define CLOCK_REALTIME 0
#define CLOCK_MONOTONIC 1
#endif
#if defined(__GLIBC__) && !defined(SIG_SETMASK)
#include <bits/types/siginfo_t.h>
#include <bits/sigaction.h>
int pthread_sigmask(int how, const sigset_t* signals, sigset_t* before);
int sigfillset(sigset_t* signals);
int sigprocmask(int how, const sigset_t* signals, sigset_t* before);
#endif

#if !defined(AI_PASSIVE) || !defined(MAP_ANONYMOUS) || !defined(O_CLOEXEC) || !defined(SIG_SETMASK) || !defined(WNOWAIT)
#error "a system header hides what llmtrain needs: include llmtrain's headers before it, or compile with -std=gnu11"
#endif
#endif  // LLMTRAIN_INCLUDED_LATE

#endif  // LLMTRAIN_POSIX_H
