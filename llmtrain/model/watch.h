// watch.h: the points of a forward and backward at which a callback can look at what was computed.
//
//   Watch watch = {look, &mine};
//   model.watch = watch;        now look(&mine, point, l) is called at each point, in the order in which a step reaches
//   ...                         them, with everything that was computed since the previous point still in memory
//   memset(&model.watch, 0, sizeof model.watch);
//
// trace.h looks for the first number that is not finite. Normal steps have no callback; a point then costs a branch.

#ifndef LLMTRAIN_WATCH_H
#define LLMTRAIN_WATCH_H

#include <stddef.h>

typedef enum {
    WATCH_QKV,                // block l: the residual stream that enters it, its first norm, the matmul qkv
    WATCH_ATTENTION,          //   qkv with positions, attention, its output matmul
    WATCH_FFN,                //   the residual stream after attention, the second norm, the feed-forward
    WATCH_HIDDEN,             // the residual stream after the last block, the final norm
    WATCH_LOGITS,             // logits of the rows from l on
    WATCH_LOSS,               // losses; and the head's backward
    WATCH_HIDDEN_BACKWARD,    // final norm
    WATCH_FFN_BACKWARD,       // block l: feed-forward and the second norm
    WATCH_ATTENTION_BACKWARD, //   attention
    WATCH_QKV_BACKWARD,       //   qkv and the first norm
    WATCH_EMBEDDING_BACKWARD,
    WATCH_POINTS
} WatchPoint;

typedef struct {
    void (*look)(void* watcher, WatchPoint point, size_t l);  // NULL: no callback
    void* watcher;
} Watch;

static inline void watch_at(const Watch* watch, WatchPoint point, size_t l) {
    if (watch->look) watch->look(watch->watcher, point, l);
}

#endif  // LLMTRAIN_WATCH_H
