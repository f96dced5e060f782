// fault.h: faults on demand, for tests. Without the variable LLMTRAIN_TEST_FAULT nothing happens.
//
//   LLMTRAIN_TEST_FAULT="rank 1 step 5 at backward do kill"
//   LLMTRAIN_TEST_FAULT="rank 0 step 1 at collective do delay 3.5; rank 0 step 1 at start do wait"
//
// When that rank reaches the named point of that step, counted from 1, it takes the action:
//
//   kill, stop, segv   a signal, which ends or stops the process
//   hang               this thread hangs, while the others continue
//   corrupt            a bit of a parameter changes (run/checks.h)
//   flip               the caller corrupts a bit, or reverses a decision
//   delay MS           MS milliseconds, in this step and every later one
//   wait               the caller waits, in this step and every later one
//
// If several points of a step have the name, the first is meant. Before the first step the step is 0.

#ifndef LLMTRAIN_FAULT_H
#define LLMTRAIN_FAULT_H

#include "../ops/base.h"

#include <signal.h>

typedef struct {
    unsigned long long rank, step;
    char point[16], action[16];
    double delay_ms;
    int armed;  // a fault of this rank that is still to come
} Fault;

typedef struct {
    Fault faults[4];
    bool read;              // the variable was read
    size_t count;           // faults in the variable
    unsigned long long now; // the step in progress
    void (*corrupt)(void* target);  // what `corrupt` calls,
    void* target;                   // with this; NULL: nothing
} Faults;

// The faults of this process. Its other threads reach points too, so the members that they read are written atomically.
static inline Faults* fault_state(void) {
    static Faults faults;
    return &faults;
}

// Says once what `corrupt` does.
static inline void fault_register(void (*corrupt)(void* target), void* target) {
    fault_state()->corrupt = corrupt;
    fault_state()->target = target;
}

// To be called at the beginning of each step.
static inline void fault_step(size_t rank, uint64_t step) {
    Faults* all = fault_state();
    const char* text = all->read ? NULL : getenv("LLMTRAIN_TEST_FAULT");
    size_t count = 0;
    for (; text && count < sizeof all->faults / sizeof all->faults[0]; count++) {
        Fault* f = &all->faults[count];
        if (sscanf(text, " rank %llu step %llu at %15s do %15[^; ] %lf", &f->rank, &f->step, f->point, f->action,
                   &f->delay_ms) < 4) break;
        f->armed = f->rank == rank;
        if ((text = strchr(text, ';')) != NULL) text++;
    }
    __atomic_store_n(&all->now, step, __ATOMIC_RELAXED);
    if (!all->read) __atomic_store_n(&all->count, count, __ATOMIC_RELEASE);
    all->read = true;
}

// True if the caller has to do something itself: "flip", "wait".
static inline bool fault_point(const char* point) {
    Faults* all = fault_state();
    bool callers = false;
    for (size_t i = 0, count = __atomic_load_n(&all->count, __ATOMIC_ACQUIRE); i < count; i++) {
        Fault* f = &all->faults[i];
        unsigned long long now = __atomic_load_n(&all->now, __ATOMIC_RELAXED);
        bool delays = strcmp(f->action, "delay") == 0, waits = strcmp(f->action, "wait") == 0, lasts = delays || waits;
        if (strcmp(f->point, point) != 0 || now < f->step || (!lasts && now > f->step)) continue;
        if (!__atomic_load_n(&f->armed, __ATOMIC_RELAXED)) continue;
        if (!lasts && !__atomic_exchange_n(&f->armed, 0, __ATOMIC_RELAXED)) continue;
        if (delays) sleep_ms(f->delay_ms);
        if (strcmp(f->action, "kill") == 0) raise(SIGKILL);
        if (strcmp(f->action, "stop") == 0) raise(SIGSTOP);
        if (strcmp(f->action, "segv") == 0) {
            signal(SIGSEGV, SIG_DFL);
            raise(SIGSEGV);
        }
        while (strcmp(f->action, "hang") == 0) pause();
        if (strcmp(f->action, "corrupt") == 0 && all->corrupt) all->corrupt(all->target);
        callers |= waits || strcmp(f->action, "flip") == 0;
    }
    return callers;
}

#endif  // LLMTRAIN_FAULT_H
