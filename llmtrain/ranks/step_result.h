// step_result.h: the outcome of a step, as all ranks know it: agreement.h fills it in, the log prints it. And of a
// sequence, in a step that is traced (run/trace.h).

#ifndef LLMTRAIN_STEP_RESULT_H
#define LLMTRAIN_STEP_RESULT_H

#include <stdbool.h>
#include <stddef.h>

enum { OBJECTIVE_SUMS = 6 };

// Flags that the ranks exchange once a step: what one rank says, and what holds for all. A save begun at step n goes on
// in the background: each rank says `saved` or `failed` once its part is done; when all have, the save is completed.
typedef struct {
    int stop;                // the signal that asked to stop, 0 if none: any rank's counts, SIGINT before others
    bool save;               // a checkpoint is due: rank 0's counts
    bool saved;              // the rank's part of the save in progress is on the disk: all must say so
    bool failed;             // it could not be written: any rank's counts
    int broken;              // a rank could not read its batch (1), or a shard is not right (2): it does not count
    double counted[OBJECTIVE_SUMS];  // by an objective: whole numbers, which are added up (run/objective.h)
} StepFlags;

// What the log has of an objective that prefers answers to others: how often the model preferred the right one to the
// reference, by how much, and its log-probabilities of the answers. Means over a step.
typedef struct { double accuracy, margin, chosen, rejected; } ObjectiveLog;

// The outcome of a step, the same on all ranks except for wait_share.
typedef struct {
    double loss;             // mean over the targets of all ranks' micro-batches
    double grad_norm;        // L2 norm of the gradients of that loss, without the loss scale
    StepFlags flags;
    double loss_min, loss_median, loss_max;  // of the own losses of ranks, in a pipeline of those of the last stage
    double busy_min, busy_median, busy_max;  // ms since the last step, without the time a rank waited for others; in a
                                             // pipeline of the ranks of the slowest one's stage
    size_t slowest;          // the rank of busy_max
    double wait_share;       // fraction of that time in which this rank waited
} StepResult;

// A sequence of a step that was traced. All members are doubles, which the ranks exchange, for integers up to 2^53.
typedef struct {
    double sample;           // its number in the run
    double shard, start;     // of --data: number of the shard, in the order of names; in it the first token's position
    double rank;
    double loss;             // mean over its targets
    double norm;             // L2 norm of its gradient: of its part of the step's objective, without the loss scale
} SequenceTrace;

#endif  // LLMTRAIN_STEP_RESULT_H
