// saver.h: when a run saves a checkpoint, and how it does so while training continues.
//
//   1. cadence   --ckpt-every: every N steps, every N minutes, or at the interval optimal for --mtbf: cadence_due,
//                cadence_choose
//   2. saver     snapshot, write, complete: saver_begin, saver_await_snapshot, saver_end
//
// In a step loop, with `manifest` begun by manifest_begin (checkpoint.h):
//
//   saver_open(&saver, &model.flat, true, 0, &error)
//   saver_begin(&saver, step, "runs/x", &manifest);           starts the snapshot, or without one writes the file
//   ... forward, backward ...
//   saver_await_snapshot(&saver);                             before weights change
//   if (saver_state(&saver) == SAVER_WRITTEN) ok = saver_end(&saver, &error);

#ifndef LLMTRAIN_SAVER_H
#define LLMTRAIN_SAVER_H

#include "../ranks/comm.h"
#include "checkpoint.h"

#include <pthread.h>

// ------------------------------------------------------------------------------------------------
// 1. Cadence

// When --ckpt-every asks for a checkpoint, and what saves have cost so far; times in milliseconds. A run that dies
// loses at most the steps since the last completed save: --ckpt-every plus the write in flight.
typedef struct {
    bool async;                // checkpoints are written in the background, unless every step saves
    uint64_t steps;            // a checkpoint at every multiple of this step; 0: none
    double every_ms;           // a checkpoint after this time; 0: none
    double mtbf_ms;  // mean time between failures: every_ms follows from it and from what saves cost; 0: it is given
    double began_ms;           // when training began; 0: not yet
    double saved_ms;           // when the last save in --out began
    double took_ms;            // the last save, from beginning to end; 0: cadence_choose has used it
    double cost_ms, costs_ms;  // by how much the last save has delayed training, and all before it
    double step_ms;            // a step during which nothing is saved: the mean of the last hundred
    uint64_t step_count;       // of such steps
} Cadence;

#ifndef CADENCE_FIRST_MS       // tests make it shorter
#define CADENCE_FIRST_MS 60e3  // auto: the first interval, before the cost of a save is known
#endif

// text: --ckpt-every; mtbf: hours; async: checkpoints are written in the background.
static inline bool cadence_parse(Cadence* c, const char* text, double mtbf, bool async, Error* error) {
    char* end;
    double number = strtod(text, &end);
    memset(c, 0, sizeof *c);
    c->async = async;
    if (strcmp(text, "auto") == 0) {
        c->every_ms = CADENCE_FIRST_MS;
        c->mtbf_ms = 3.6e6 * mtbf;
        return true;
    }
    bool minutes = strcmp(end, "min") == 0,
         good = end != text && number >= 0 && number <= 1e12 && (minutes || *end == 0);
    if (!good || (!minutes && number != floor(number)))
        return fail_with(error, "--ckpt-every is '%s'; give a number of steps, minutes as in 10min, or auto", text);
    if (minutes) c->every_ms = 6e4 * number;
    else c->steps = (uint64_t)number;
    if (c->steps == 1) c->async = false;
    return true;
}

// Whether the run saves checkpoints before its end.
static inline bool cadence_saves(const Cadence* c) { return c->steps > 0 || c->every_ms > 0; }

static inline void cadence_start(Cadence* c, double now) { c->began_ms = c->saved_ms = now; }

// Whether a checkpoint is due after this step, or now.
static inline bool cadence_due(const Cadence* c, uint64_t step) { return c->steps > 0 && step % c->steps == 0; }

static inline bool cadence_due_now(const Cadence* c, double now) {
    return c->every_ms > 0 && now - c->saved_ms > c->every_ms;
}

// Called when a save begins; asked: one of --ckpt-every, which delays the next.
static inline void cadence_count_save(Cadence* c, double began, bool asked) {
    if (asked) c->saved_ms = began;
    c->costs_ms += fmax(c->cost_ms, 0);
    c->cost_ms = 0;
}

// Called after a step of `ms`. The cost of a save is the extra time of the steps during it, and time between steps.
static inline void cadence_count_step(Cadence* c, double ms, bool saving) {
    if (!saving) c->step_ms += (ms - c->step_ms) / (double)min_size(++c->step_count, 100);
    else if (c->step_count > 0) c->cost_ms += ms - c->step_ms;
}

// After a checkpoint: chooses the interval to the next, if it follows from the cost. "A First Order Approximation to
// the Optimum Checkpoint Interval" (Young, 1974): sqrt(2 cost mtbf). False if there is nothing to choose.
static inline bool cadence_choose(Cadence* c) {
    if (c->took_ms == 0 || c->mtbf_ms == 0) return false;
    c->cost_ms = fmax(c->cost_ms, 1);
    c->every_ms = fmax(sqrt(2 * c->cost_ms * c->mtbf_ms), c->took_ms);  // a save must have time to end
    c->took_ms = 0;
    return true;
}

// ------------------------------------------------------------------------------------------------
// 2. Saver
//
// A save has three parts. Every rank begins to write its slices to its file (saver_begin): with --ckpt-async in a
// thread, from a snapshot, otherwise at once. Training continues: weights and optimizer state change only in the next
// update, so that even the snapshot is taken during the next step (saver_await_snapshot). When all ranks have written
// and flushed their files, as StepFlags report once a step, they complete the save together (saver_end): rank 0 gathers
// the checksums, writes the manifest, and renames the directory.

typedef enum { SAVER_IDLE, SAVER_WRITING, SAVER_WRITTEN, SAVER_FAILED } SaverState;

enum { SAVER_OUTS = 1 + TEXT_LIST_MAX };  // directories whose newest checkpoint is known

// The checkpoints that were saved last in a directory; out is empty if there are none.
typedef struct {
    char out[FILE_PATH_MAX];
    uint64_t step, before;   // before: 0 if there is one
} SaverNewest;

typedef struct {
    char* snapshot;          // (checkpoint_bytes) on the host; NULL: everything is written by saver_begin
    size_t bytes;            // of it
    Stream copies;           // on which it is taken
    double bandwidth;        // limit of the thread, bytes per second; 0: none
    pthread_t thread;
    bool threaded;           // there is a thread to join
    bool taken;              // the snapshot is complete
    SaverState state;        // of the save in progress; the thread changes it as its last act
    bool canceled;          // the thread is asked to end soon
    bool gave_up;            // and has, without a failure of its own
    bool unthrottled;        // it ignores the bandwidth limit
    FlatVector* flat;
    uint64_t step;           // of the checkpoint
    JsonWriter manifest;     // begun, with the caller's members
    char out[FILE_PATH_MAX];
    SafetensorsWriter writer;
    SafetensorsWriter frozen;  // of the file of the frozen weights, of the first ranks (saver_write_frozen),
    SaverNewest newest[SAVER_OUTS];  // which these checkpoints have too: --out and tiers can be on several file systems
    Error error;             // of SAVER_FAILED
    double stalled_ms;       // how long the save has kept training waiting
    double began_ms;
} Saver;

static inline SaverState saver_state(const Saver* s) {
    return (SaverState)__atomic_load_n((const int*)&s->state, __ATOMIC_ACQUIRE);
}

static inline bool saver_open(Saver* s, FlatVector* flat, bool snapshots, double bandwidth, Error* error) {
    memset(s, 0, sizeof *s);
    s->flat = flat;
    s->writer.file.file = s->frozen.file.file = -1;  // none is open
    s->bandwidth = bandwidth;
    if (snapshots && !device_open(&s->copies, false, error)) return false;
    s->bytes = snapshots ? checkpoint_bytes(flat) : 0;
    s->snapshot = snapshots ? (char*)host_allocate(max_size(s->bytes, 1)) : NULL;
    return !snapshots || s->snapshot != NULL ||
           fail_with(error, "out of memory for snapshots of %.2f GB; give --ckpt-async off", 1e-9 * (double)s->bytes);
}

// Declares the part of a tensor that a file has.
static inline bool saver_declare_part(SafetensorsWriter* w, const char* prefix, const Tensor* t, Slice part,
                                      size_t elements, Dtype dtype, Error* error) {
    char name[CHECKPOINT_NAME_MAX];
    bool matrix = slice_length(part) == tensor_elements(t) && t->cols > 0;
    const size_t shape[2] = {matrix ? t->rows : slice_length(part), t->cols};
    checkpoint_piece_name(name, prefix, t, part, elements);
    return safetensors_declare(w, name, dtype, shape, matrix ? 2 : 1, error);
}

// Declares every piece of this rank's file.
static inline bool saver_declare(Saver* s, const CheckpointArray* arrays, size_t count, Error* error) {
    const Parameters* p = s->flat->parameters;
    bool ok = true;
    for (size_t a = 0; a < count; a++) {
        for (size_t i = 0; ok && i < p->count; i++) {
            const Tensor* t = &p->tensors[i];
            Slice part = checkpoint_saved(&arrays[a], s->flat, t);
            size_t elements = checkpoint_elements(&arrays[a], s->flat, t, &t->part);
            if (slice_length(part) == 0) continue;
            ok = saver_declare_part(&s->writer, arrays[a].prefix, t, part, elements, arrays[a].dtype, error);
        }
    }
    return ok && safetensors_begin(&s->writer, error);
}

// Writes a chunk; in the background, no faster than the bandwidth limit.
static inline bool saver_write(Saver* s, const void* data, size_t bytes, size_t* written, Error* error) {
    fault_point("write");
    s->gave_up = __atomic_load_n(&s->canceled, __ATOMIC_RELAXED);
    if (s->gave_up) return fail_with(error, "the save was canceled");
    if (!safetensors_write(&s->writer, data, bytes, error)) return false;
    *written += bytes;
    double due = s->snapshot && s->bandwidth > 0 ? s->began_ms + 1e3 * (double)*written / s->bandwidth : 0;
    while (now_ms() < due && !__atomic_load_n(&s->unthrottled, __ATOMIC_RELAXED) &&
           !__atomic_load_n(&s->canceled, __ATOMIC_RELAXED))
        sleep_ms(fmin(due - now_ms(), 50));
    return true;
}

// Writes all pieces straight from the device.
static inline bool saver_write_device(Saver* s, const CheckpointArray* arrays, size_t count, Error* error) {
    const Parameters* p = s->flat->parameters;
    bool copies = !device_is_host() || flat_offloads(s->flat);
    void* chunk = copies ? host_allocate(CHECKPOINT_CHUNK * sizeof(float)) : NULL;
    bool ok = !copies || chunk != NULL || fail_with(error, "out of memory for pieces of tensors; free some memory");
    size_t written = 0;
    for (size_t a = 0; a < count; a++) {
        for (size_t i = 0; ok && i < p->count; i++) {
            const Tensor* t = &p->tensors[i];
            Slice part = checkpoint_saved(&arrays[a], s->flat, t);
            for (size_t first = part.first; ok && first < part.end; first += CHECKPOINT_CHUNK) {
                char* address;
                size_t n = min_size(CHECKPOINT_CHUNK, part.end - first), bytes = n * dtype_bytes(arrays[a].dtype);
                Slice mine = checkpoint_part(&address, &arrays[a], s->flat, t, first, first + n);
                ok = chunk == NULL || checkpoint_get(s->flat, chunk, &arrays[a], t, mine, address, error);
                ok = ok && saver_write(s, chunk ? chunk : address, bytes, &written, error);
            }
        }
    }
    host_free(chunk);
    return ok;
}

// The entry of the directory that is saved in.
static inline SaverNewest* saver_newest(Saver* s) {
    size_t i = 0;
    while (i + 1 < SAVER_OUTS && s->newest[i].out[0] && strcmp(s->newest[i].out, s->out) != 0) i++;
    return &s->newest[i];
}

// The name of a rank's file of frozen weights.
static inline void saver_frozen_name(char name[48], const Saver* s) {
    size_t rank = s->flat->options.rank;
    if (rank == 0) snprintf(name, 48, CHECKPOINT_FROZEN);
    else snprintf(name, 48, CHECKPOINT_FROZEN_PART, rank);
}

static inline bool saver_link(const Saver* s, const char* out, uint64_t step, const char* path) {
    char directory[FILE_PATH_MAX], from[FILE_PATH_MAX + 64], name[48];
    saver_frozen_name(name, s);
    checkpoint_path(directory, out, step, "");
    snprintf(from, sizeof from, "%s/%s", directory, name);
    return out[0] && link(from, path) == 0;
}

// Hard-links the file of the frozen weights in an earlier checkpoint to `path`: if possible of the last but one in the
// directory, or else of one on the same file system; false if there is none.
static inline bool saver_link_frozen(Saver* s, const char* path) {
    const SaverNewest* own = saver_newest(s);
    if (saver_link(s, own->out, own->before, path) || saver_link(s, own->out, own->step, path)) return true;
    for (size_t i = 0; i < SAVER_OUTS; i++)
        if (saver_link(s, s->newest[i].out, s->newest[i].step, path)) return true;
    return false;
}

// Whether this rank's file of frozen weights has a tensor, or its part of it. All ranks have all that is frozen, except
// that ranks with other parts have those: rank 0 saves it, and the ranks up to the last part what is divided.
static inline bool saver_freezes(const Saver* s, const Tensor* t) {
    size_t rank = s->flat->options.rank;
    return !t->trains && (rank == 0 || (rank < s->flat->tp && tensor_is_divided(t))) && tensor_elements(t) > 0;
}

// What is saved of a frozen tensor: bytes, if it is quantized.
static inline size_t saver_frozen_elements(const Tensor* t) {
    return t->quantized ? tensor_stored(t) : tensor_elements(t);
}

// Writes this rank's file of the frozen weights, if it has one. The first two checkpoints of a process in a directory
// on a disk have two files, later ones hard links to one and the other in turn, as long as --ckpt-keep leaves both: a
// bad byte on the disk makes every second checkpoint useless, not all.
static inline bool saver_write_frozen(Saver* s, Error* error) {
    const Parameters* p = s->flat->parameters;
    char directory[FILE_PATH_MAX], path[FILE_PATH_MAX + 64], name[48];
    size_t frozen = 0;
    for (size_t i = 0; i < p->count; i++) frozen += saver_freezes(s, &p->tensors[i]);
    if (frozen == 0) return true;
    saver_frozen_name(name, s);
    checkpoint_path(directory, s->out, s->step, ".tmp");
    snprintf(path, sizeof path, "%s/%s", directory, name);
    if (!directory_make(directory, error)) return false;
    const SaverNewest* newest = saver_newest(s);
    bool copies = newest->out[0] && newest->before == 0 &&
                  strncmp(s->out, SYSTEM_MEMORY_FOLDER "/", sizeof SYSTEM_MEMORY_FOLDER) != 0;
    if (!copies && saver_link_frozen(s, path)) return true;
    safetensors_writer_free(&s->frozen);
    void* chunk = host_allocate(CHECKPOINT_CHUNK * sizeof(floatX));
    bool ok = (chunk != NULL || fail_with(error, "out of memory for pieces of tensors; free some memory")) &&
              safetensors_create(&s->frozen, path, error);
    for (size_t i = 0; ok && i < p->count; i++) {
        const Tensor* t = &p->tensors[i];
        Slice whole = {0, saver_frozen_elements(t)};
        if (saver_freezes(s, t)) ok = saver_declare_part(&s->frozen, "weight", t, whole, whole.end, t->dtype, error);
    }
    ok = ok && safetensors_begin(&s->frozen, error);
    for (size_t i = 0; ok && i < p->count; i++) {
        const Tensor* t = &p->tensors[i];
        size_t elements = saver_freezes(s, t) ? saver_frozen_elements(t) : 0, size = dtype_bytes(t->dtype);
        for (size_t first = 0, n; ok && first < elements; first += n) {
            n = min_size(CHECKPOINT_CHUNK, elements - first);
            device_download(chunk, (const char*)flat_param(s->flat, t) + first * size, n * size, s->flat->stream);
            ok = safetensors_write(&s->frozen, chunk, n * size, error);
        }
    }
    host_free(chunk);
    ok = ok && safetensors_end(&s->frozen, error);
    if (!ok) memset(s->newest, 0, sizeof s->newest);  // without its checksums, the next save must not link to the file
    return ok;
}

// Writes this rank's file, and flushes it to the disk.
static inline bool saver_write_file(Saver* s, Error* error) {
    char directory[FILE_PATH_MAX], path[FILE_PATH_MAX + 64];
    CheckpointArray arrays[CHECKPOINT_ARRAYS];
    size_t count = checkpoint_arrays(arrays, s->flat), written = 0;
    checkpoint_path(directory, s->out, s->step, ".tmp");
    snprintf(path, sizeof path, "%s/" CHECKPOINT_FILE, directory, s->flat->options.rank);
    if (!directory_make(directory, error) || !safetensors_create(&s->writer, path, error)) return false;
    bool ok = saver_declare(s, arrays, count, error);
    if (ok && s->snapshot == NULL) ok = saver_write_device(s, arrays, count, error);
    const size_t chunk = CHECKPOINT_CHUNK * sizeof(float);
    for (size_t at = 0; ok && s->snapshot && at < s->bytes; at += chunk)
        ok = saver_write(s, s->snapshot + at, min_size(chunk, s->bytes - at), &written, error);
    fault_point("flush");
    return ok && safetensors_end(&s->writer, error);
}

// Copies this rank's slices to the host, while the next step runs.
static inline void saver_take_snapshot(Saver* s) {
    const FlatVector* flat = s->flat;
    CheckpointArray arrays[CHECKPOINT_ARRAYS];
    size_t count = checkpoint_arrays(arrays, flat), at = 0;
    fault_point("copy");
    for (size_t a = 0; a < count; a++) {
        for (size_t i = 0; i < flat->parameters->count; i++) {
            char* address;
            const Tensor* t = &flat->parameters->tensors[i];
            Slice part = checkpoint_saved(&arrays[a], flat, t);
            size_t bytes = slice_length(part) * dtype_bytes(arrays[a].dtype);
            if (bytes == 0) continue;
            checkpoint_part(&address, &arrays[a], flat, t, part.first, part.end);
            device_download(s->snapshot + at, address, bytes, s->copies);
            at += bytes;
        }
    }
    fault_point("snapshot");
    __atomic_store_n(&s->taken, true, __ATOMIC_RELEASE);
}

static inline void* saver_run(void* argument) {
    Saver* s = (Saver*)argument;
    if (s->snapshot && !s->taken) saver_take_snapshot(s);
    bool ok = saver_write_file(s, &s->error);
    __atomic_store_n((int*)&s->state, ok ? SAVER_WRITTEN : SAVER_FAILED, __ATOMIC_RELEASE);
    return NULL;
}

// The thread leaves the other cores to training.
static inline void* saver_run_async(void* argument) {
    const Saver* s = (const Saver*)argument;
    Error ignored;  // the device was chosen before
    threads_set(1);
    device_choose(s->flat->options.local_rank, &ignored);
    return saver_run(argument);
}

// Begins the save of a step in `out`; no other may be in progress. `manifest` was begun by manifest_begin, and belongs
// to the saver from here on. saver_state reports a failure.
static inline void saver_begin(Saver* s, uint64_t step, const char* out, const JsonWriter* manifest) {
    s->began_ms = now_ms();
    s->stalled_ms = 0;
    s->step = step;
    s->manifest = *manifest;
    s->canceled = s->gave_up = false;
    s->state = SAVER_WRITING;
    snprintf(s->out, sizeof s->out, "%.4000s", out);
    bool ok = flat_await_all(s->flat, &s->error);  // parameters that have not arrived must not be saved
    if (!ok || !saver_write_frozen(s, &s->error)) {
        s->state = SAVER_FAILED;
        return;
    }
    s->taken = false;
    s->threaded = s->snapshot && pthread_create(&s->thread, NULL, saver_run_async, s) == 0;
    if (!s->threaded) saver_run(s);
    s->stalled_ms = now_ms() - s->began_ms;
}

// Waits for the snapshot, before weights and optimizer state change.
static inline void saver_await_snapshot(Saver* s) {
    double began = now_ms();
    while (s->threaded && !__atomic_load_n(&s->taken, __ATOMIC_ACQUIRE)) sleep_ms(0.1);
    s->stalled_ms += now_ms() - began;
}

// Lifts the bandwidth limit while training waits for the save.
static inline void saver_unthrottle(Saver* s, bool on) { __atomic_store_n(&s->unthrottled, on, __ATOMIC_RELAXED); }

// Called when the save in progress has failed on some rank: makes the thread end soon.
static inline void saver_stop(Saver* s) { __atomic_store_n(&s->canceled, true, __ATOMIC_RELAXED); }

static inline void saver_join(Saver* s) {
    if (s->threaded) pthread_join(s->thread, NULL);
    s->threaded = false;
}

// Drops the save in progress and the files it has written; all ranks together.
static inline void saver_cancel(Saver* s) {
    char directory[FILE_PATH_MAX];
    Error ignored;
    if (s->state == SAVER_IDLE) return;
    saver_stop(s);
    saver_join(s);
    safetensors_writer_free(&s->writer);
    json_writer_free(&s->manifest);
    checkpoint_path(directory, s->out, s->step, ".tmp");
    if (s->flat->options.rank == 0) directory_remove(directory, &ignored);
    s->state = SAVER_IDLE;
}

// Rank 0, when all files are on the disk: writes the manifest, then renames the directory.
static inline bool saver_publish(Saver* s, const char* files, const size_t* begins, Error* error) {
    char path[FILE_PATH_MAX], temporary[FILE_PATH_MAX], file[FILE_PATH_MAX + 64];
    uint64_t step = s->step;
    checkpoint_path(path, s->out, step, "");
    checkpoint_path(temporary, s->out, step, ".tmp");
    snprintf(file, sizeof file, "%s/manifest.json", temporary);
    // If ranks did not see each other's files, no rank could load the checkpoint.
    for (size_t r = 0; r < s->flat->options.world; r++) {
        char part[FILE_PATH_MAX + 64];
        snprintf(part, sizeof part, "%s/" CHECKPOINT_FILE, temporary, r);
        if (access(part, R_OK) == 0) continue;
        if (errno != ENOENT) return fail_file(error, "look at", part);
        return fail_with(error, "rank %zu has written %.600s, but rank 0 does not see it; give an --out that all "
                         "machines share", r, part);
    }
    fault_point("manifest");
    if (!manifest_finish(&s->manifest, file, s->flat, files, begins, error)) return false;

    // A checkpoint of the same step exists if it was damaged and the run therefore resumed from an earlier one.
    if (directory_exists(path) && !checkpoint_rename(s->out, step, CHECKPOINT_ASIDE))
        return fail_file(error, "set aside", path);
    fault_point("rename");
    return directory_rename_sync(temporary, path, error);
}

// Writes this rank's elements of the manifest's "files".
static inline void saver_write_files(JsonWriter* w, const Saver* s) {
    char name[48];
    snprintf(name, sizeof name, CHECKPOINT_FILE, s->flat->options.rank);
    manifest_write_file(w, name, &s->writer.header);
    if (s->frozen.header.count == 0) return;
    saver_frozen_name(name, s);
    manifest_write_file(w, name, &s->frozen.header);
}

// Remembers that the save is complete.
static inline void saver_note_newest(Saver* s) {
    SaverNewest* newest = saver_newest(s);
    newest->before = newest->out[0] ? newest->step : 0;
    memcpy(newest->out, s->out, sizeof s->out);
    newest->step = s->step;
}

// Completes a save that all ranks have written; called by all ranks together. If that fails, the save is dropped,
// earlier checkpoints are unchanged, and every rank gets the error. A lost rank shows in the Comm.
static inline bool saver_end(Saver* s, Error* error) {
    Comm* comm = s->flat->options.transport ? s->flat->options.transport->comm : NULL;
    double began = now_ms();
    char* files = NULL;
    size_t alone = 0, *begins = NULL;
    JsonWriter w = {0};
    saver_join(s);
    bool ok = s->state == SAVER_WRITTEN;
    if (!ok) *error = s->error;
    // A rank that gave up did so because another failed: the other's error is the reason.
    if (comm) ok = comm_agree_all(comm, ok || s->gave_up, error) && comm_agree_all(comm, ok, error);
    if (ok) {
        saver_write_files(&w, s);
        ok = json_write_done(&w, error);
        if (!ok && comm) comm_abort(comm, error->text);
    }
    if (ok && comm) ok = comm_gather_texts(comm, &files, &begins, w.text, error);
    if (ok && s->flat->options.rank == 0) ok = saver_publish(s, comm ? files : w.text, comm ? begins : &alone, error);
    Error lost;
    if (comm && !comm_failed(comm, &lost)) ok = comm_agree_all(comm, ok, error);
    free(files);
    free(begins);
    json_writer_free(&w);
    if (ok) {
        saver_note_newest(s);
        safetensors_writer_free(&s->writer);
        json_writer_free(&s->manifest);
        s->state = SAVER_IDLE;
    } else {
        saver_cancel(s);
    }
    s->stalled_ms += now_ms() - began;
    return ok;
}

static inline void saver_close(Saver* s) {
    if (s->flat) {
        saver_cancel(s);
        safetensors_writer_free(&s->frozen);
    }
    host_free(s->snapshot);
    if (s->copies) device_close(s->copies);
    memset(s, 0, sizeof *s);
}

#endif  // LLMTRAIN_SAVER_H
