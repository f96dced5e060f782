// scratch.h: the directory in which a test works.

#ifndef LLMTRAIN_SCRATCH_H
#define LLMTRAIN_SCRATCH_H

#include "llmtrain/base.h"

#include <dirent.h>
#include <limits.h>
#include <sys/stat.h>

static char root[PATH_MAX];  // the directory, absolute
static pid_t root_owner;     // children that fail to start a program leave it alone

static void remove_tree(const char* path) {
    struct stat status;
    if (lstat(path, &status) != 0) return;
    DIR* directory = S_ISDIR(status.st_mode) ? opendir(path) : NULL;
    for (struct dirent* entry; directory && (entry = readdir(directory)) != NULL;) {
        char inner[PATH_MAX];
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        snprintf(inner, sizeof inner, "%.3000s/%s", path, entry->d_name);
        remove_tree(inner);
    }
    if (directory) closedir(directory);
    remove(path);
}

static void root_remove(void) {
    if (getpid() == root_owner && chdir("/") == 0) remove_tree(root);
}

// Makes it under $TMPDIR or /tmp, named after the test, open to other users, and goes there; it is removed at the end.
static bool root_enter(const char* test) {
    const char* place = getenv("TMPDIR");
    if (place == NULL || place[0] == 0) place = "/tmp";
    snprintf(root, sizeof root, "%.1000s/%.100s_XXXXXX", place, test);
    if (mkdtemp(root) == NULL || chdir(root) != 0 || getcwd(root, sizeof root) == NULL || chmod(root, 0755) != 0) return false;
    root_owner = getpid();
    atexit(root_remove);
    return true;
}

#endif  // LLMTRAIN_SCRATCH_H
