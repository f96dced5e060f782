// faults.h: faults on demand, for tests.
//
// LLMTRAIN_TEST_FAULT="rank R step S at POINT do kill|stop|segv|hang|sleep|flip" makes rank R do so when it comes to the
// named point of step S, counted from 1 (hang: for ever, while its other threads go on; sleep: 50 ms, in every step from S
// on). Where a name stands for several places of a step, the first counts. Without the variable nothing happens.

#ifndef LLMTRAIN_FAULTS_H
#define LLMTRAIN_FAULTS_H

#include "base.h"

#include <signal.h>

typedef struct {
    bool read, armed;            // the variable; a fault of this rank that is still to come
    unsigned long long rank, step;
    char point[16], action[16];
    unsigned long long now;      // the step in progress
} Fault;

// The one fault of this process.
static inline Fault* fault_state(void) {
    static Fault fault;
    return &fault;
}

// At the beginning of each step.
static inline void fault_step(size_t rank, uint64_t step) {
    Fault* f = fault_state();
    const char* text = f->read ? NULL : getenv("LLMTRAIN_TEST_FAULT");
    if (text)
        f->armed = sscanf(text, "rank %llu step %llu at %15s do %15s", &f->rank, &f->step, f->point, f->action) == 4 &&
            f->rank == rank;
    f->read = true;
    f->now = step;
}

// True where the caller is to spoil something itself: "flip".
static inline bool fault_point(const char* point) {
    Fault* f = fault_state();
    bool sleeps = f->armed && strcmp(f->action, "sleep") == 0;
    if (!f->armed || strcmp(f->point, point) != 0 || (sleeps ? f->now < f->step : f->now != f->step)) return false;
    if (sleeps) {
        sleep_ms(50);
        return false;
    }
    f->armed = false;
    if (strcmp(f->action, "kill") == 0) raise(SIGKILL);
    if (strcmp(f->action, "stop") == 0) raise(SIGSTOP);
    while (strcmp(f->action, "hang") == 0) pause();
    if (strcmp(f->action, "segv") == 0) {
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    }
    return strcmp(f->action, "flip") == 0;
}

#endif  // LLMTRAIN_FAULTS_H
