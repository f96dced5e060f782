// files.h: files and directories that survive a crash: written whole or not at all, and every failure explained.
//
//   FileWriter w;
//   ok = file_begin(&w, "runs/x/note.txt", &error) && file_append(&w, text, bytes, &error) && file_end(&w, &error);
//   ok = ok && file_read("runs/x/note.txt", 1 << 20, &data, &bytes, &error);     free(data)
//   ok = ok && directory_make("runs/x/step_1.tmp", &error);
//   ok = ok && directory_rename_sync("runs/x/step_1.tmp", "runs/x/step_1", &error);
//
// A reader of a name finds the old file or the new one, complete, also after a power cut. A message names the file, the
// reason and a remedy. A failure that another file would have too (memory, descriptors) has the kind ERROR_PROCESS. The
// functions do not lock files: two writers of one name are safe, and the last one wins.

#ifndef LLMTRAIN_FILES_H
#define LLMTRAIN_FILES_H

#include "system.h"  // and from base.h Error, fail_with, memory_allocate

#include <dirent.h>
#include <sys/stat.h>

// ------------------------------------------------------------------------------------------------
// Files
//
// A file is written under a temporary name in its directory, flushed to the disk and renamed, and then the directory is
// flushed. When a step fails, the temporary file is removed and the old file stays.

#define FILE_PATH_MAX ((size_t)4096)
// Bytes per read or write: few calls, and the checksum finds them in the cache.
#define FILE_CHUNK LLMTRAIN_PIECE((size_t)4 << 20, (size_t)509)

// Opens standard input, output and error on /dev/null if they are closed: otherwise the next file that is opened would
// get their descriptors.
static inline void files_open_standard(void) {
    int file;
    do file = open("/dev/null", O_RDWR);
    while (file >= 0 && file <= STDERR_FILENO);
    if (file >= 0) close(file);
}

// Reports the action that failed, the path, the reason (errno), and a remedy.
static inline bool fail_file(Error* error, const char* action, const char* path) {
    const char* remedy = "check the path and the disk";
    int number = errno;
    switch (number) {
        case ENOSPC: case EDQUOT: remedy = "free some space there, or choose another disk"; break;
        case EFBIG: remedy = "raise the limit on file sizes (ulimit -f), or choose another disk"; break;
        case EACCES: case EPERM: case EROFS: remedy = "choose a path that this user may access"; break;
        case ENOENT: case ENOTDIR: remedy = "check the path"; break;
        case EISDIR: remedy = "name a file, not a directory"; break;
        case EEXIST: case ENOTEMPTY: remedy = "something has that name: give another path, or move it away"; break;
        case EMFILE: case ENFILE: remedy = "raise the limit on open files (ulimit -n)"; break;
        case ENOMEM: remedy = "free some memory"; break;
        case EIO: remedy = "the disk may be failing: see the system's log"; break;
    }
    fail_with(error, "cannot %s %.600s: %s; %s", action, path, strerror(number), remedy);
    return fail_as(error, number == ENOMEM || number == EMFILE || number == ENFILE ? ERROR_PROCESS : ERROR_OUTSIDE);
}

// Flushes standard output; false if not all that was printed could be written.
static inline bool output_written(Error* error) {
    return (fflush(stdout) == 0 && !ferror(stdout)) || fail_file(error, "write", "standard output");
}

// Whether there is something at a path; false, with an error, if the system does not say.
static inline bool path_look(bool* there, const char* path, Error* error) {
    *there = access(path, F_OK) == 0;
    return *there || errno == ENOENT || errno == ENOTDIR || fail_file(error, "look at", path);
}

static inline bool path_copy(char copy[FILE_PATH_MAX], const char* path, Error* error) {
    size_t bytes = strlen(path);
    if (bytes == 0) return fail_with(error, "a path is empty; name a file or directory");
    if (bytes >= FILE_PATH_MAX) return fail_with(error, "the path %.200s... is too long; choose a shorter one", path);
    memcpy(copy, path, bytes + 1);
    return true;
}

// Flushes a file descriptor to the disk.
static inline bool file_sync(int file) {
    int result;
    do result = disk_flush(file); while (result != 0 && errno == EINTR);
    return result == 0;
}

// Flushes a directory: the names in it, not the files.
static inline bool directory_sync(const char* path, Error* error) {
    int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0) return fail_file(error, "open the directory", path);
    bool good = file_sync(directory) || errno == EINVAL || errno == ENOTSUP ||  // some file systems do not support it
                fail_file(error, "flush the directory", path);
    close(directory);
    return good;
}

// Flushes the directory that holds the path.
static inline bool directory_sync_parent(const char* path, Error* error) {
    char parent[FILE_PATH_MAX];
    if (!path_copy(parent, path, error)) return false;
    size_t end = strlen(parent);
    while (end > 1 && parent[end - 1] == '/') end--;
    while (end > 0 && parent[end - 1] != '/') end--;
    while (end > 1 && parent[end - 1] == '/') end--;
    parent[end] = 0;
    return directory_sync(end > 0 ? parent : ".", error);
}

// A file being written: file_begin, file_append any number of times, then file_end or file_abort. A call that fails has
// aborted; a second abort does nothing.
typedef struct {
    int file;       // open descriptor, or -1
    size_t bytes, flushing;  // written so far; of these, the bytes whose flush to the disk has begun
    char path[FILE_PATH_MAX];
    char temporary[FILE_PATH_MAX + 64];
} FileWriter;

static inline void file_abort(FileWriter* w) {
    if (w->file < 0) return;
    close(w->file);
    unlink(w->temporary);
    w->file = -1;
}

// fail_file for a writer, which it aborts.
static inline bool file_abort_because(FileWriter* w, const char* action, Error* error) {
    fail_file(error, action, w->path);
    file_abort(w);
    return false;
}

static inline bool file_begin(FileWriter* w, const char* path, Error* error) {
    w->file = -1;
    w->bytes = w->flushing = 0;
    if (!path_copy(w->path, path, error)) return false;
    struct stat status;
    if (stat(path, &status) == 0 && S_ISDIR(status.st_mode)) {  // refused now, not after everything is written
        errno = EISDIR;
        return fail_file(error, "create", path);
    }
    for (int attempt = 0; w->file < 0; attempt++) {  // the name may be left over from a process that was killed
        snprintf(w->temporary, sizeof w->temporary, "%s.tmp-%ld-%d", w->path, (long)getpid(), attempt);
        w->file = open(w->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (w->file < 0 && (errno != EEXIST || attempt == 1000)) return fail_file(error, "create", path);
    }
    return true;
}

static inline bool file_append(FileWriter* w, const void* data, size_t bytes, Error* error) {
    if (w->file < 0) return fail_with(error, "%.600s is not being written; an earlier step failed", w->path);
    const char* p = (const char*)data;
    while (bytes > 0) {
        ssize_t n = write(w->file, p, min_size(bytes, FILE_CHUNK));
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = EIO;
        if (n <= 0) return file_abort_because(w, "write", error);
        p += n;
        bytes -= (size_t)n;
        w->bytes += (size_t)n;
        // Starts the flush of whole chunks, so that little is left for the one at the end.
        size_t whole = w->bytes / FILE_CHUNK * FILE_CHUNK - w->flushing;
        if (whole > 0) disk_flush_begin(w->file, w->flushing, whole);
        w->flushing += whole;
    }
    return true;
}

// If it fails after the rename, the file is in place, but a power cut may still undo the rename.
static inline bool file_end(FileWriter* w, Error* error) {
    if (w->file < 0) return fail_with(error, "%.600s is not being written; an earlier step failed", w->path);
    if (!file_sync(w->file)) return file_abort_because(w, "flush", error);
    if (rename(w->temporary, w->path) != 0) return file_abort_because(w, "write", error);
    close(w->file);  // cannot lose data: the file was flushed
    w->file = -1;
    return directory_sync_parent(w->path, error);
}

static inline bool file_write_atomic(const char* path, const void* data, size_t bytes, Error* error) {
    FileWriter w;
    return file_begin(&w, path, error) && file_append(&w, data, bytes, error) && file_end(&w, error);
}

// Opens a regular file for reading; -1 after a failure.
static inline int file_open(size_t* bytes, const char* path, Error* error) {
    struct stat status;
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);  // O_NONBLOCK: a pipe would wait for its other end
    bool good = (file >= 0 && fstat(file, &status) == 0) || fail_file(error, "open", path);
    good = good && (S_ISREG(status.st_mode) || fail_with(error, "%.600s is not a file; check the path", path));
    if (good) *bytes = (size_t)status.st_size;
    if (good || file < 0) return file;
    close(file);
    return -1;
}

// Reads `bytes` bytes at an offset; a file that ends before them is an error.
static inline bool file_read_at(int file, void* data, size_t bytes, size_t offset, const char* path, Error* error) {
    char* p = (char*)data;
    while (bytes > 0) {
        ssize_t n = pread(file, p, min_size(bytes, FILE_CHUNK), (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return fail_file(error, "read", path);
        if (n == 0)
            return fail_with(error, "%.600s ends %zu bytes early; it was truncated, use another copy", path, bytes);
        p += n;
        offset += (size_t)n;
        bytes -= (size_t)n;
    }
    return true;
}

// Reads a whole file of at most max_bytes, and appends a zero byte. The caller frees *data with free().
static inline bool file_read(const char* path, size_t max_bytes, char** data, size_t* bytes, Error* error) {
    *data = NULL;
    int file = file_open(bytes, path, error);
    if (file < 0) return false;
    bool good = *bytes <= max_bytes || fail_with(error, "%.600s has %zu bytes, more than the %zu expected; check the "
                                                 "path", path, *bytes, max_bytes);
    if (good) *data = (char*)memory_allocate(*bytes + 1);
    good = good && (*data || fail_memory(error, path, *bytes));
    good = good && file_read_at(file, *data, *bytes, 0, path, error);
    if (!good) {
        free(*data);
        *data = NULL;
    }
    close(file);
    return good;
}

// ------------------------------------------------------------------------------------------------
// Directories

static inline bool directory_exists(const char* path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

// Makes a directory and its parents where they do not exist; several processes may do so at the same time.
static inline bool directory_make(const char* path, Error* error) {
    char part[FILE_PATH_MAX];
    if (!path_copy(part, path, error)) return false;
    for (size_t i = 1; i <= strlen(path); i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        part[i] = 0;
        if (!directory_exists(part)) {
            if (mkdir(part, 0777) != 0 && !(errno == EEXIST && directory_exists(part)))
                return fail_file(error, "make the directory", part);
            if (!directory_sync_parent(part, error)) return false;
        }
        part[i] = path[i];
    }
    return true;
}

// Removes a directory and the files and empty directories in it; one that does not exist is no error.
static inline bool directory_remove(const char* path, Error* error) {
    int file = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0 && errno == ENOENT) return true;
    DIR* directory = file < 0 ? NULL : fdopendir(file);
    if (directory == NULL) {
        fail_file(error, "open the directory", path);
        if (file >= 0) close(file);
        return false;
    }
    bool good = true;
    for (struct dirent* entry; good && (errno = 0, entry = readdir(directory)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        good = unlinkat(file, entry->d_name, 0) == 0 || errno == ENOENT ||
               unlinkat(file, entry->d_name, AT_REMOVEDIR) == 0;
    }
    good = (good && errno == 0) || fail_file(error, "empty the directory", path);
    closedir(directory);
    if (good && rmdir(path) != 0) return fail_file(error, "remove the directory", path);
    return good && directory_sync_parent(path, error);
}

// Removes the temporary files that killed writers of the file at `path` have left. Nobody may be writing it.
static inline void file_clean(const char* path) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    char parent[FILE_PATH_MAX], temporary[FILE_PATH_MAX];
    snprintf(parent, sizeof parent, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
    int prefix = snprintf(temporary, sizeof temporary, "%.255s.tmp-", name);
    int file = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR* directory = file < 0 ? NULL : fdopendir(file);
    for (struct dirent* entry; directory && (entry = readdir(directory)) != NULL;)
        if (strncmp(entry->d_name, temporary, (size_t)prefix) == 0) unlinkat(file, entry->d_name, 0);
    if (directory) closedir(directory);
    else if (file >= 0) close(file);
}

// Gives a directory its final name: flushes it, renames it, flushes its parent. The caller has flushed the files in it.
// `to` must not exist, or be an empty directory.
static inline bool directory_rename_sync(const char* from, const char* to, Error* error) {
    if (!directory_sync(from, error)) return false;
    if (rename(from, to) != 0) return fail_file(error, "rename the finished directory to", to);
    return directory_sync_parent(to, error);
}

#endif  // LLMTRAIN_FILES_H
