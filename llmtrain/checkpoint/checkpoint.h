// checkpoint.h: the directory of a checkpoint: its files, its manifest, how it is loaded, kept and removed.
//
//   1. arrays      what each rank saves of the flat vector: checkpoint_arrays, checkpoint_saved
//   2. manifest    the text that describes the rest: manifest_begin, manifest_finish, manifest_open
//   3. loading     into any number of ranks and any stage: checkpoint_load
//   4. directory   finding the newest: checkpoint_find_before; hiding one from loading: checkpoint_rename; removing:
//                  checkpoint_remove, checkpoint_clean; retention: KeepRule, checkpoint_prune, Pruner (in a thread);
//                  dropping those from a step on: checkpoint_set_aside
//
// A checkpoint is a directory OUT/step_00000020 with
//   frozen.safetensors       the frozen weights, if there are any: written once, and a hard link to the same file in
//                            later checkpoints; with tensor parallelism frozen_00001.safetensors has part 1 of them
//   rank_00000.safetensors   rank 0's slice of weights and optimizer state: weight.NAME, m.NAME, v.NAME, with
//                            {0/2} if it is of the first of two parts (parts.h), and with [first:end], in elements of
//                            the tensor or its part, if it has not all of it; one file per rank
//   manifest.json            everything else, written last: configuration, state of the run, the table of the flat
//                            vector, a checksum of every piece, and last a checksum of the manifest itself
// It is written under a temporary name, flushed to the disk, and renamed (saver.h): under its final name it is
// complete. No file points to the newest; the newest is the one with the highest step whose checksums match. A damaged
// one is reported and skipped, and the one before it is used.
//
// The saved weights are the float master weights where there are any: 16-bit parameters follow from them by rounding.
// The pieces of a tensor are consecutive slices, whatever the number of ranks and the ZeRO stage, and with tensor
// parallelism those of one part after the other; so a run resumes with any number of ranks, in any stage, in any number
// of parts, and each rank takes what it needs.
//
//   if (manifest_open(&manifest, "runs/x/step_00000020", &error))
//       ok = checkpoint_load(&model.flat, &manifest, "runs/x/step_00000020", false, &error);

#ifndef LLMTRAIN_CHECKPOINT_H
#define LLMTRAIN_CHECKPOINT_H

#include "../base/json_fields.h"
#include "../base/progress.h"
#include "safetensors.h"
#include "../ranks/zero.h"

#define CHECKPOINT_FORMAT "llmtrain checkpoint 4"
#define CHECKPOINT_MANIFEST_MAX ((size_t)1 << 28)

// ------------------------------------------------------------------------------------------------
// 1. Arrays

#define CHECKPOINT_FILE "rank_%05zu.safetensors"  // of a rank
#define CHECKPOINT_FROZEN "frozen.safetensors"         // of rank 0,
#define CHECKPOINT_FROZEN_PART "frozen_%05zu.safetensors"  // and of a rank that has other parts

enum { CHECKPOINT_ARRAYS = 1 + OPTIMIZER_STATES, CHECKPOINT_WEIGHTS = -1 };

typedef struct {
    const char* prefix;     // of the names of its tensors
    int state;              // of the optimizer; CHECKPOINT_WEIGHTS: the weights
    bool masters;           // the weights are the float master weights; this rank holds its flat_master_part of them
    Dtype dtype;            // frozen tensors have no master weights: Tensor.dtype
} CheckpointArray;

// The arrays that a checkpoint saves: the weights and the optimizer's states. Returns their number. A flat vector that
// is only planned will do.
static inline size_t checkpoint_arrays(CheckpointArray arrays[CHECKPOINT_ARRAYS], const FlatVector* flat) {
    const FlatOptions* holds = &flat->holds;
    bool masters = flat_has_masters(holds);
    const CheckpointArray weights = {"weight", CHECKPOINT_WEIGHTS, masters, masters ? DTYPE_F32 : FLOATX_DTYPE};
    size_t count = 0;
    arrays[count++] = weights;
    for (size_t s = 0; s < optimizer_states(holds->optimizer->kind) && holds->training; s++) {
        const OptimizerState* state = &OPTIMIZERS[holds->optimizer->kind].states[s];
        const CheckpointArray array = {state->name, (int)s, false, state->dtype};
        arrays[count++] = array;
    }
    return count;
}

// Without a snapshot, tensors are copied to and from the device in chunks, through host memory.
enum { CHECKPOINT_CHUNK = LLMTRAIN_PIECE(1 << 20, 509) };  // elements

static inline bool checkpoint_is_master(const CheckpointArray* array, const Tensor* t) {
    return array->masters && t->trains;
}

static inline Dtype checkpoint_dtype(const CheckpointArray* array, const Tensor* t) {
    return t->trains ? array->dtype : t->dtype;
}

// Part `number` of `count` of a tensor, whatever this rank has of it.
static inline TensorPart checkpoint_part_of(const Tensor* t, size_t number, size_t count) {
    TensorPart part = t->part;
    part.number = number;
    part.count = count;
    return part;
}

// The number of elements of a part of a tensor that an array has over all ranks, without the rows of padding; bytes of
// one that is quantized, which has one part.
static inline size_t checkpoint_elements(const CheckpointArray* array, const FlatVector* flat, const Tensor* t,
                                         const TensorPart* part) {
    size_t first, count = part_elements(part);
    const FlatOptions* holds = &flat->holds;
    if (array->state == CHECKPOINT_WEIGHTS) return t->quantized ? tensor_stored(t) : count;
    if (!holds->training || !t->trains) return 0;
    return optimizer_state_part(&first, OPTIMIZERS[holds->optimizer->kind].states[array->state].shape, &t->shape,
                                holds->optimizer->rank, 0, count);
}

// The slice of this rank's part that it saves; it may be empty.
static inline Slice checkpoint_saved(const CheckpointArray* array, const FlatVector* flat, const Tensor* t) {
    Slice own = flat_own(flat, &flat->buckets[t->bucket]), part;
    Slice slice = {own.first, min_size(own.end, t->offset + tensor_elements(t))};
    if (array->state == CHECKPOINT_WEIGHTS) return tensor_part(t, slice);
    size_t count = flat_state_part(&part.first, flat, (size_t)array->state, t, slice);
    part.end = part.first + count;
    return part;
}

// The part of elements [first, end) of an array's tensor that this rank holds, and its address; NULL: it is offloaded.
static inline Slice checkpoint_part(char** address, const CheckpointArray* array, const FlatVector* flat,
                                        const Tensor* t, size_t first, size_t end) {
    Slice part = {first, end};
    size_t index = t->offset + first, size = dtype_bytes(array->dtype);
    bool away = flat_offloads(flat);
    if (array->state != CHECKPOINT_WEIGHTS) {
        const StatePart* held = &flat->state_parts[t - flat->parameters->tensors][array->state];
        part.first = max_size(first, held->first);
        part.end = min_size(end, held->first + held->count);
        if (part.first >= part.end) part.first = part.end = held->first;
        *address = away ? NULL : (char*)flat->states[array->state] + (held->offset + part.first - held->first) * size;
    } else if (checkpoint_is_master(array, t)) {
        part = flat_master_part(&index, flat, t, t->offset + first, t->offset + end);
        bool empty = slice_length(part) == 0;
        part.first = empty ? first : part.first - t->offset;
        part.end = empty ? first : part.end - t->offset;
        *address = away ? NULL : (char*)(flat->master_weights + index);
    } else {
        part = flat_kept_part(address, flat, t, first, end);
    }
    return part;
}

// Stores a part of an array's tensor, with the address from checkpoint_part.
static inline bool checkpoint_put(FlatVector* flat, const CheckpointArray* array, const Tensor* t, Slice part,
                                  char* address, const char* values, Error* error) {
    flat_forget(flat);
    if (address)
        device_upload(address, values, slice_length(part) * dtype_bytes(checkpoint_dtype(array, t)), flat->stream);
    return address || offload_put(&flat->offloaded, values, (size_t)(array->state + 1),
                                  (size_t)(t - flat->parameters->tensors), part.first, part.end, flat->stream, error);
}

// Copies the part to host memory.
static inline bool checkpoint_get(FlatVector* flat, void* values, const CheckpointArray* array, const Tensor* t,
                                  Slice part, const char* address, Error* error) {
    if (address)
        device_download(values, address, slice_length(part) * dtype_bytes(checkpoint_dtype(array, t)), flat->stream);
    return address || offload_get(&flat->offloaded, values, (size_t)(array->state + 1),
                                  (size_t)(t - flat->parameters->tensors), part.first, part.end, error);
}

enum { CHECKPOINT_NAME_MAX = 160 };  // characters of a piece's name, with the zero byte

// elements: of this rank's part.
static inline void checkpoint_piece_name(char name[CHECKPOINT_NAME_MAX], const char* prefix, const Tensor* t,
                                         Slice part, size_t elements) {
    char of[48] = "", range[48] = "";
    if (tensor_is_divided(t)) snprintf(of, sizeof of, "{%zu/%zu}", t->part.number, t->part.count);
    if (slice_length(part) != elements) snprintf(range, sizeof range, "[%zu:%zu]", part.first, part.end);
    snprintf(name, CHECKPOINT_NAME_MAX, "%s.%s%s%s", prefix, t->name, of, range);
}

// The bytes of a snapshot: all that this rank saves. A flat vector that is only planned will do.
static inline size_t checkpoint_bytes(const FlatVector* flat) {
    CheckpointArray arrays[CHECKPOINT_ARRAYS];
    size_t count = checkpoint_arrays(arrays, flat), bytes = 0;
    for (size_t a = 0; a < count; a++)
        for (size_t i = 0; i < flat->parameters->count; i++)
            bytes += slice_length(checkpoint_saved(&arrays[a], flat, &flat->parameters->tensors[i])) *
                     dtype_bytes(arrays[a].dtype);
    return bytes;
}

// ------------------------------------------------------------------------------------------------
// 2. Manifest
//
// manifest_begin, the caller's own members, manifest_finish. The last member is a checksum of the text before it.

// Opens the manifest's object and describes what wrote the checkpoint.
static inline void manifest_begin(JsonWriter* w, const FlatVector* flat) {
    char device[320];
    double peak;
    device_describe(device, sizeof device, &peak, flat->stream);
    memset(w, 0, sizeof *w);
    w->line_depth = 2;
    json_write_begin(w, '{');
    json_member_string(w, "format", CHECKPOINT_FORMAT);
    json_member_string(w, "llmtrain", LLMTRAIN_VERSION);
    json_member_string(w, "compiler", __VERSION__);
    json_member_string(w, "precision", FLOATX_NAME);
    json_member_string(w, "matmuls", device);
    json_member_u64(w, "world", flat->options.world);
    json_member_u64(w, "zero", flat->options.stage);
    json_member_u64(w, "tp", flat->tp);
}

static inline void manifest_write_table(JsonWriter* w, const Parameters* p) {
    json_member_begin(w, "flat_vector", '[');
    for (size_t i = 0; i < p->count; i++) {
        const Tensor* t = &p->tensors[i];
        json_write_begin(w, '{');
        json_member_string(w, "name", t->name);
        json_member_begin(w, "shape", '[');
        json_write_u64(w, t->part.true_rows);
        if (t->part.cols) json_write_u64(w, t->part.cols);
        json_write_end(w, ']');
        json_member_u64(w, "offset", t->offset);
        json_member_u64(w, "size", tensor_place(t));
        json_member_u64(w, "bucket", t->bucket);
        json_write_end(w, '}');
    }
    json_write_end(w, ']');
}

// A file, with the checksums that its writer computed: an element of the manifest's "files".
static inline void manifest_write_file(JsonWriter* w, const char* name, const SafetensorsHeader* header) {
    json_write_begin(w, '{');
    json_member_string(w, "file", name);
    json_member_hash(w, "header_checksum", header->hash);
    json_member_begin(w, "checksums", '{');
    for (size_t i = 0; i < header->count; i++) json_member_hash(w, header->tensors[i].name, header->tensors[i].hash);
    json_write_end(w, '}');
    json_write_end(w, '}');
}

// The end of a manifest: the checksum of the text before it.
static inline void manifest_tail(char tail[64], const char* text, size_t bytes) {
    snprintf(tail, 64, ",\n  \"checksum\": \"%016llx\"\n}\n", (unsigned long long)hash_bytes(text, bytes));
}

// Writes the rest of the manifest to a file. files: the text of each rank's elements, and where it begins, as
// comm_gather_texts returns them.
static inline bool manifest_finish(JsonWriter* w, const char* path, const FlatVector* flat, const char* files,
                                   const size_t* begins, Error* error) {
    char tail[64];
    manifest_write_table(w, flat->parameters);
    json_member_begin(w, "files", '[');
    // In the order of what they have.
    for (size_t i = 0; i < flat->options.world; i++) json_write_raw(w, files + begins[flat_owner(flat, i)]);
    json_write_end(w, ']');
    if (!w->failed) {
        manifest_tail(tail, w->text, w->bytes);
        json_put(w, tail, strlen(tail));
        w->depth--;  // the tail has closed the object
    }
    return json_write_done(w, error) && file_write_atomic(path, w->text, w->bytes, error);
}

// Fails: the manifest has another format, or lacks a member that this program needs.
static inline bool manifest_refuse(const char* directory, Error* error) {
    return fail_with(error, "%.600s/manifest.json is not a manifest of '" CHECKPOINT_FORMAT "'; use the version of "
                     "llmtrain that wrote it", directory);
}

// Opens the manifest of a checkpoint and checks it against its own checksum. The caller frees *json after success.
static inline bool manifest_open(Json* json, const char* directory, Error* error) {
    char path[FILE_PATH_MAX], tail[64], format[64] = "";
    char* text = NULL;
    size_t bytes = 0;
    memset(json, 0, sizeof *json);
    snprintf(path, sizeof path, "%.4000s/manifest.json", directory);
    if (!file_read(path, CHECKPOINT_MANIFEST_MAX, &text, &bytes, error)) return false;
    manifest_tail(tail, text, 0);  // all tails are equally long
    size_t tail_bytes = strlen(tail), body = bytes > tail_bytes ? bytes - tail_bytes : 0;
    manifest_tail(tail, text, body);
    bool ok = true;
    if (body == 0 || memcmp(text + body, tail, tail_bytes) != 0)
        ok = fail_with(error, "%.600s does not match its checksum; it is damaged", path);
    ok = ok && json_parse(json, text, bytes, path, error);
    free(text);
    if (!ok) return false;
    if (json_string(json, json_get(json, 0, "format"), format, sizeof format) && strcmp(format, CHECKPOINT_FORMAT) == 0)
        return true;
    json_free(json);
    return manifest_refuse(directory, error);
}

// ------------------------------------------------------------------------------------------------
// 3. Loading

// A load in progress.
typedef struct {
    CheckpointArray arrays[CHECKPOINT_ARRAYS];
    size_t count;
    size_t* found;           // (count, tensors) elements of each that were found, from its first, part after part
    size_t* parts;           // (count, tensors) the number of parts that they are of; 0: none was found
    void *chunk, *rounded;   // (CHECKPOINT_CHUNK) floats on the host
    void *own, *own_rounded; // (CHECKPOINT_CHUNK) those of them that are of this rank's part
    Progress progress;       // in elements
} CheckpointLoad;

// A piece in a file.
typedef struct {
    size_t array, tensor;
    TensorPart part;         // of the tensor
    Slice elements;          // of the part
    size_t before;           // elements of the parts before it
} CheckpointPiece;

// Whether a tensor can be divided as a part says.
static inline bool checkpoint_divides(const TensorPart* part) {
    bool divides = part->count == 1 || part->by != SPLIT_NONE;
    if (part->by == SPLIT_COLUMNS) return part->cols % part->count == 0;
    for (size_t m = 0, rows; (rows = part_matrix(part, m)) > 0; m++) divides = divides && rows % part->count == 0;
    return divides;
}

// Reads which elements a piece has from what follows the tensor's name: {number/count}, [first:end], both or nothing.
static inline bool checkpoint_read_range(CheckpointPiece* piece, const CheckpointArray* array, const FlatVector* flat,
                                         const Tensor* t, const char* text, const char* path, const char* name,
                                         Error* error) {
    size_t number = 0, count = 1;
    int used = 0;
    Slice range = {0, 0};
    bool good = true, divided = *text == '{', cut;
    if (divided) good = sscanf(text, "{%zu/%zu}%n", &number, &count, &used) == 2 && used > 0 && number < count;
    text += used;
    cut = good && *text == '[';
    used = 0;
    if (cut) good = sscanf(text, "[%zu:%zu]%n", &range.first, &range.end, &used) == 2 && used > 0;
    if (!good || text[used] != 0 || (divided && count < 2))
        return fail_with(error, "%.600s: the name %.160s does not end as a piece's, {part/parts} or [first:end]; the "
                         "checkpoint is damaged", path, name);
    piece->part = checkpoint_part_of(t, number, count);
    if (!checkpoint_divides(&piece->part))
        return fail_with(error, "%.600s: %.160s is one of %zu parts, into which this tensor cannot be divided; it is "
                         "another model's", path, name, count);
    size_t elements = checkpoint_elements(array, flat, t, &piece->part);
    bool others = elements > 0 && elements != part_elements(&piece->part);
    if (others && (divided || tensor_is_divided(t)))
        return fail_with(error, "%.600s: %.160s is no state of a number per element, and cannot be divided; resume "
                         "with the --tp and the --optimizer of the checkpoint", path, name);
    piece->before = 0;
    for (size_t i = 0; i < number; i++) {
        const TensorPart part = checkpoint_part_of(t, i, count);
        piece->before += checkpoint_elements(array, flat, t, &part);
    }
    if (!cut) range.end = elements;
    piece->elements = range;
    return (range.first <= range.end && range.end <= elements) ||
           fail_with(error, "%.600s: %.160s is of a tensor or part that has %zu elements here; it is another model's",
                     path, name, elements);
}

// The piece that a name in a file is; *known: the loader needs pieces of its array and tensor.
static inline bool checkpoint_piece(CheckpointPiece* piece, bool* known, const CheckpointLoad* load,
                                    const FlatVector* flat, const char* path, const char* name, Error* error) {
    const Parameters* p = flat->parameters;
    const char* dot = strchr(name, '.');
    memset(piece, 0, sizeof *piece);
    *known = false;
    for (size_t a = 0; dot && a < load->count; a++) {
        const char* prefix = load->arrays[a].prefix;
        if (strncmp(name, prefix, (size_t)(dot - name)) != 0 || prefix[dot - name] != 0) continue;
        size_t length = strcspn(dot + 1, "{[");
        for (size_t i = 0; i < p->count; i++) {
            const Tensor* t = &p->tensors[i];
            if (strncmp(t->name, dot + 1, length) != 0 || t->name[length] != 0) continue;
            *known = load->arrays[a].state == CHECKPOINT_WEIGHTS || t->trains;
            piece->array = a;
            piece->tensor = i;
            return !*known ||
                   checkpoint_read_range(piece, &load->arrays[a], flat, t, dot + 1 + length, path, name, error);
        }
    }
    return true;
}

static inline bool checkpoint_same_part(const TensorPart* a, const TensorPart* b) {
    return a->number == b->number && a->count == b->count;
}

// Where elements of a part are in this rank's part: all that the two have in common is within. Parts are the same
// fractions of every matrix, or of every row.
static inline Slice checkpoint_in_own(const TensorPart* own, const TensorPart* part, Slice elements) {
    Slice none = {0, 0};
    bool common = own->number * part->count < (part->number + 1) * own->count &&
                  part->number * own->count < (own->number + 1) * part->count;
    if (checkpoint_same_part(own, part)) return elements;
    if (!common || elements.first == elements.end) return none;
    Slice within = {part_before(own, part_run(part, elements.first).whole),
                    part_before(own, part_run(part, elements.end - 1).whole + 1)};
    return within;
}

// Stores elements [first, first + count) of this rank's part as far as it holds them. rounded: master weights rounded
// to parameters.
static inline bool checkpoint_put_run(FlatVector* flat, const CheckpointArray* array, const Tensor* t, size_t first,
                                      size_t count, const char* values, const floatX* rounded, Error* error) {
    char* address;
    Slice mine = checkpoint_part(&address, array, flat, t, first, first + count);
    const char* from = values + (mine.first - first) * dtype_bytes(checkpoint_dtype(array, t));
    if (slice_length(mine) > 0 && !checkpoint_put(flat, array, t, mine, address, from, error)) return false;
    // Parameters follow from the master weights; a rank may have those without these.
    if (checkpoint_is_master(array, t)) flat_put(flat, t, first, rounded, count);
    return true;
}

// Stores elements [first, first + count) of a piece's part, of which this rank may have some.
static inline bool checkpoint_put_piece(FlatVector* flat, CheckpointLoad* load, const CheckpointPiece* piece,
                                        size_t first, size_t count, const char* values, Error* error) {
    const CheckpointArray* array = &load->arrays[piece->array];
    const Tensor* t = &flat->parameters->tensors[piece->tensor];
    const floatX* rounded = (const floatX*)load->rounded;
    floatX* own_rounded = (floatX*)load->own_rounded;
    char* own = (char*)load->own;
    size_t size = dtype_bytes(checkpoint_dtype(array, t)), begin = 0, held = 0;
    if (checkpoint_same_part(&t->part, &piece->part))
        return checkpoint_put_run(flat, array, t, first, count, values, rounded, error);
    for (size_t e = first, n; e < first + count; e += n) {
        PartRun run = part_run(&piece->part, e);
        n = min_size(run.count, first + count - e);
        size_t end = part_before(&t->part, run.whole + n);
        for (size_t m = part_before(&t->part, run.whole), here; m < end; m += here) {
            PartRun mine = part_run(&t->part, m);
            size_t from = e - first + (mine.whole - run.whole);
            here = min_size(mine.count, end - m);
            if (m != begin + held) {
                if (held > 0 && !checkpoint_put_run(flat, array, t, begin, held, own, own_rounded, error)) return false;
                begin = m;
                held = 0;
            }
            memcpy(own + held * size, values + from * size, here * size);
            if (checkpoint_is_master(array, t)) memcpy(own_rounded + held, rounded + from, here * sizeof *rounded);
            held += here;
        }
    }
    return held == 0 || checkpoint_put_run(flat, array, t, begin, held, own, own_rounded, error);
}

// Rounds `count` floats in load->chunk to floatX, in load->rounded. Returns the index of the first that this changes,
// or `count`.
static inline size_t checkpoint_round(CheckpointLoad* load, size_t count) {
    const float* from = (const float*)load->chunk;
    floatX* to = (floatX*)load->rounded;
    size_t same = 0;
    #pragma omp parallel for simd
    for (size_t e = 0; e < count; e++) to[e] = floatX_of(from[e]);
    while (same < count && float_of(to[same]) == from[same]) same++;
    return same;
}

// Reads one piece: uploads what this rank needs, and checks the checksum of all of it. Skips optimizer state and parts
// of other ranks.
static inline bool checkpoint_read_piece(FlatVector* flat, CheckpointLoad* load, const SafetensorsFile* file,
                                         const SafetensorsTensor* saved, const Json* manifest, uint32_t checksums,
                                         Error* error) {
    CheckpointPiece piece;
    bool known;
    if (!checkpoint_piece(&piece, &known, load, flat, file->path, saved->name, error)) return false;
    if (!known) return true;
    const CheckpointArray* array = &load->arrays[piece.array];
    const Tensor* t = &flat->parameters->tensors[piece.tensor];
    bool is_weight = array->state == CHECKPOINT_WEIGHTS;
    Dtype dtype = checkpoint_dtype(array, t);
    bool is_master = checkpoint_is_master(array, t);
    bool half = saved->type == DTYPE_BF16 || saved->type == DTYPE_F16;
    bool widens = is_weight && half && saved->type != dtype;  // saved frozen, or without master weights
    bool rounds = is_weight && dtype != DTYPE_F32 && (saved->type == DTYPE_F32 || widens);  // now frozen, or has none
    if (saved->type != dtype && !rounds && !widens)
        return fail_with(error, "%.600s holds %s as %s, but this program uses %s; build it with the checkpoint's "
                         "precision", file->path, saved->name, DTYPES[saved->type].safetensors,
                         DTYPES[dtype].safetensors) || fail_as(error, ERROR_PROCESS);
    size_t size = dtype_bytes(saved->type);
    size_t n = slice_length(piece.elements), entry = piece.array * flat->parameters->count + piece.tensor;
    size_t *reached = &load->found[entry], *parts = &load->parts[entry];
    if (*parts > 0 && *parts != piece.part.count)
        return fail_with(error, "%.600s: %.160s is one of %zu parts, and what comes before it is of %zu; these are "
                         "files of two checkpoints", file->path, saved->name, piece.part.count, *parts);
    if (piece.before + piece.elements.first != *reached || saved->bytes != n * size)
        return fail_with(error, "%.600s: %.160s has %zu bytes and follows element %zu; it is another model's, or a "
                         "file is missing", file->path, saved->name, saved->bytes, *reached);
    *parts = piece.part.count;
    *reached = piece.before + piece.elements.end;
    if (flat->options.rank == 0) progress_step(&load->progress, n);
    char* address;
    Slice within = checkpoint_in_own(&t->part, &piece.part, piece.elements);
    if (n > 0 && slice_length(within) == 0) return true;
    if (!is_weight && slice_length(checkpoint_part(&address, array, flat, t, within.first, within.end)) == 0)
        return true;
    uint32_t expected = json_get(manifest, checksums, saved->name);
    if (expected == JSON_NONE)
        return fail_with(error, "%.600s: the manifest does not list %.100s; the checkpoint is damaged", file->path,
                         saved->name);
    Hash hash = hash_begin(0);
    size_t bad = n;
    for (size_t done = 0; done < n; done += CHECKPOINT_CHUNK) {
        size_t count = min_size(CHECKPOINT_CHUNK, n - done), first = piece.elements.first + done;
        if (!safetensors_read_range(file, saved, done * size, count * size, load->chunk, error)) return false;
        hash_add(&hash, load->chunk, count * size);
        bool numbers = (is_weight || is_master) && !t->quantized;
        size_t wrong = numbers ? convert_find_bad(load->chunk, saved->type, count) : count;
        if (wrong < count && bad == n) bad = done + wrong;
        if (widens) {
            memcpy(load->rounded, load->chunk, count * size);
            convert_to_float((float*)load->chunk, load->rounded, saved->type, count);
        }
        size_t same = rounds || is_master ? checkpoint_round(load, count) : count;
        if (widens && rounds && same < count) {  // between BF16 and FP16 only values that both have
            fail_with(error, "%.600s holds %s as %s, and %s cannot represent %.9g, its element %zu; build the program "
                      "with the checkpoint's precision", file->path, saved->name, DTYPES[saved->type].safetensors,
                      DTYPES[dtype].safetensors, (double)((const float*)load->chunk)[same], first + same);
            return fail_as(error, ERROR_PROCESS);
        }
        const char* values = (const char*)(rounds ? load->rounded : load->chunk);
        if (!checkpoint_put_piece(flat, load, &piece, first, count, values, error)) return false;
    }
    if (!json_hash_is(manifest, expected, hash_end(&hash)))
        return fail_with(error, "%.600s: %s does not match its checksum; the file is damaged", file->path, saved->name);
    return bad == n || fail_with(error, "%.600s: element %zu of %s is not finite; use an earlier checkpoint",
                                 file->path, piece.elements.first + bad, saved->name);
}

// Opens the file of an entry of the manifest, and checks its header. After a failure there is nothing to close.
static inline bool checkpoint_open_file(SafetensorsFile* file, const Json* manifest, uint32_t entry,
                                        const char* directory, Error* error) {
    char path[FILE_PATH_MAX + 64], name[64] = "";
    if (!json_string(manifest, json_get(manifest, entry, "file"), name, sizeof name) || strchr(name, '/'))
        return fail_with(error, "the manifest of %.600s has an entry without a file name; it is damaged", directory);
    snprintf(path, sizeof path, "%s/%s", directory, name);
    if (!safetensors_open(file, path, error)) return false;
    bool ok = json_hash_is(manifest, json_get(manifest, entry, "header_checksum"), file->header.hash) ||
              fail_with(error, "%.600s: its header does not match its checksum; the file is damaged", path);
    if (!ok) safetensors_close(file);
    return ok;
}

static inline bool checkpoint_read_file(FlatVector* flat, CheckpointLoad* load, const Json* manifest, uint32_t entry,
                                        const char* directory, Error* error) {
    SafetensorsFile file;
    if (!checkpoint_open_file(&file, manifest, entry, directory, error)) return false;
    uint32_t checksums = json_get(manifest, entry, "checksums");
    bool ok = true;
    for (size_t i = 0; ok && i < file.header.count; i++)
        ok = checkpoint_read_piece(flat, load, &file, &file.header.tensors[i], manifest, checksums, error);
    safetensors_close(&file);
    return ok;
}

// Loads the tensors of the checkpoint whose manifest is open, each rank for itself: all, or only the weights. After a
// failure the flat vector holds a mixture, and must be loaded again from another checkpoint.
static inline bool checkpoint_load(FlatVector* flat, const Json* manifest, const char* directory, bool weights_alone,
                                   Error* error) {
    CheckpointLoad load = {0};
    const Parameters* p = flat->parameters;
    load.count = checkpoint_arrays(load.arrays, flat);
    if (weights_alone) load.count = 1;  // they come first
    load.progress = progress_begin("loading", load.count * flat->parameters->true_size);
    load.found = (size_t*)memory_allocate(load.count * p->count * sizeof(size_t));
    load.parts = (size_t*)memory_allocate(load.count * p->count * sizeof(size_t));
    load.chunk = host_allocate(CHECKPOINT_CHUNK * sizeof(float));
    load.rounded = host_allocate(CHECKPOINT_CHUNK * sizeof(float));
    load.own = host_allocate(CHECKPOINT_CHUNK * sizeof(float));
    load.own_rounded = host_allocate(CHECKPOINT_CHUNK * sizeof(floatX));
    bool ok = (load.found && load.parts && load.chunk && load.rounded && load.own && load.own_rounded) ||
              fail_memory(error, directory, CHECKPOINT_CHUNK * sizeof(float));
    uint32_t files = json_get(manifest, 0, "files");
    for (uint32_t entry = json_first(manifest, files); ok && entry != JSON_NONE; entry = json_next(manifest, entry))
        ok = checkpoint_read_file(flat, &load, manifest, entry, directory, error);
    progress_end(&load.progress);
    for (size_t i = 0; ok && i < load.count * p->count; i++) {
        const Tensor* t = &p->tensors[i % p->count];
        const CheckpointArray* array = &load.arrays[i / p->count];
        const TensorPart whole = checkpoint_part_of(t, 0, 1);
        size_t elements = checkpoint_elements(array, flat, t, &whole);
        if (load.found[i] < elements)
            ok = fail_with(error, "%.600s has %zu of %zu elements of %s.%s; it is another model's, or a file is "
                           "missing", directory, load.found[i], elements, array->prefix, t->name);
    }
    free(load.found);
    free(load.parts);
    host_free(load.chunk);
    host_free(load.rounded);
    host_free(load.own);
    host_free(load.own_rounded);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// 4. Directory

static inline void checkpoint_path(char path[FILE_PATH_MAX], const char* out, uint64_t step, const char* suffix) {
    snprintf(path, FILE_PATH_MAX, "%.4000s/step_%08llu%s", out, (unsigned long long)step, suffix);
}

// The highest step below `before` for which OUT has a checkpoint directory. False if OUT cannot be read; an OUT that
// has none or does not exist is no failure.
static inline bool checkpoint_find_before(uint64_t* step, bool* found, const char* out, uint64_t before, Error* error) {
    DIR* directory = opendir(out);
    *found = false;
    if (directory == NULL)
        return errno == ENOENT || errno == ENOTDIR || fail_file(error, "look for checkpoints in", out);
    for (struct dirent* entry; (errno = 0, entry = readdir(directory)) != NULL;) {
        unsigned long long number = 0;
        char expected[64];
        if (sscanf(entry->d_name, "step_%llu", &number) != 1) continue;
        snprintf(expected, sizeof expected, "step_%08llu", number);  // exactly the name that checkpoint_path makes
        if (strcmp(entry->d_name, expected) != 0 || number >= before || (*found && number <= *step)) continue;
        *step = number;
        *found = true;
    }
    bool good = errno == 0 || fail_file(error, "look for checkpoints in", out);
    closedir(directory);
    return good;
}

// The same for callers that treat an OUT that cannot be read as one without checkpoints.
static inline bool checkpoint_before(uint64_t* step, const char* out, uint64_t before) {
    bool found;
    Error ignored;
    return checkpoint_find_before(step, &found, out, before, &ignored) && found;
}

#define CHECKPOINT_ASIDE ".aside"  // of a checkpoint after the step that the run went back to, or one saved again

// Adds a suffix to the name of a checkpoint, so that nothing loads it any more.
static inline bool checkpoint_rename(const char* out, uint64_t step, const char* suffix) {
    char path[FILE_PATH_MAX], renamed[FILE_PATH_MAX];
    Error ignored;
    checkpoint_path(path, out, step, "");
    checkpoint_path(renamed, out, step, suffix);
    directory_remove(renamed, &ignored);  // left from earlier
    return rename(path, renamed) == 0 && directory_sync(out, &ignored);
}

// Removes a checkpoint. It is renamed first, so that a partly removed one is never taken for a checkpoint.
static inline bool checkpoint_remove(const char* out, uint64_t step) {
    char removed[FILE_PATH_MAX];
    Error ignored;
    if (!checkpoint_rename(out, step, ".old")) return false;
    checkpoint_path(removed, out, step, ".old");
    directory_remove(removed, &ignored);  // if this fails, the next start does it
    return true;
}

// Removes the directories of OUT named like a checkpoint of a step up to `last`, with a suffix.
static inline void checkpoint_remove_suffixed(const char* out, const char* suffix, uint64_t last) {
    DIR* directory = opendir(out);
    Error ignored;
    if (directory == NULL) return;
    for (struct dirent* entry; (entry = readdir(directory)) != NULL;) {
        unsigned long long step;
        char path[FILE_PATH_MAX + 300];
        const char* end = strrchr(entry->d_name, '.');
        if (end == NULL || strcmp(end, suffix) != 0) continue;
        if (sscanf(entry->d_name, "step_%llu", &step) != 1 || step > last) continue;
        snprintf(path, sizeof path, "%.4000s/%.255s", out, entry->d_name);
        directory_remove(path, &ignored);
    }
    closedir(directory);
}

// Removes what killed saves have left behind in OUT. Only one process may work on OUT at a time.
static inline void checkpoint_clean(const char* out) {
    checkpoint_remove_suffixed(out, ".tmp", UINT64_MAX);
    checkpoint_remove_suffixed(out, ".old", UINT64_MAX);
}

// Why a checkpoint was saved: --ckpt-every asked for it; or the run ended, or was told to stop, or it was the best.
typedef enum { SAVE_REQUESTED, SAVE_END } SaveKind;
static const char* const SAVE_KIND_NAMES[] = {"requested", "end"};

// Which checkpoints stay after a newer one is saved.
typedef struct {
    uint64_t newest;   // the number of newest ones to keep; 0: all
    uint64_t forever;  // and the first at or after each multiple of this step; 0: no others
    uint64_t best;     // and that of this step; 0: none
    bool rewinds;  // the run may have to go back to those that --ckpt-every asked for: only these count, and all stay
                   // if the newest was saved amid skipped steps
} KeepRule;

static inline bool keep_rule_counts(const KeepRule* rule, SaveKind kind) {
    return kind == SAVE_REQUESTED || !rule->rewinds;
}

static inline bool keep_rule_is_full(const KeepRule* rule, uint64_t counted) {
    return rule->newest > 0 && counted >= rule->newest;
}

// older: the step of the checkpoint before it; 0: none. counted: the number of newer ones that count.
static inline bool keep_rule_keeps(const KeepRule* rule, uint64_t step, uint64_t older, uint64_t counted) {
    if (rule->forever > 0 && step / rule->forever > older / rule->forever) return true;
    return !keep_rule_is_full(rule, counted);
}

// Why a checkpoint was saved, and the number of consecutive steps skipped then; false if it has no good manifest.
static inline bool checkpoint_describe(SaveKind* kind, uint64_t* skipped, const char* out, uint64_t step) {
    char path[FILE_PATH_MAX], word[16] = "";
    Json manifest;
    Error ignored;
    checkpoint_path(path, out, step, "");
    if (!manifest_open(&manifest, path, &ignored)) return false;
    bool ok = json_string(&manifest, json_get(&manifest, 0, "kind"), word, sizeof word) &&
        json_u64(&manifest, field_node(&manifest, json_get(&manifest, 0, "state"), "skipped_consecutive"), skipped);
    *kind = strcmp(word, SAVE_KIND_NAMES[SAVE_END]) == 0 ? SAVE_END : SAVE_REQUESTED;  // "asked" in earlier versions
    json_free(&manifest);
    return ok;
}

// Removes the checkpoints of OUT that are older than the newest, which has just been saved, and that the rule does not
// keep; and those set aside, up to that step. Removes nothing if the newest has no good manifest. Reads the manifests
// of others only until enough of them count.
static inline void checkpoint_prune(const char* out, uint64_t newest, const KeepRule* rule) {
    SaveKind kind;
    uint64_t skipped;
    if (!checkpoint_describe(&kind, &skipped, out, newest)) return;
    if (rule->rewinds && skipped > 0) return;
    uint64_t counted = keep_rule_counts(rule, kind), others = !counted, step = newest, older;
    bool removes = rule->newest > 0;  // or else no manifest of another needs to be read
    for (bool more = removes && checkpoint_before(&step, out, newest); more; step = older) {
        bool known = !keep_rule_is_full(rule, counted) && checkpoint_describe(&kind, &skipped, out, step);
        older = 0;
        more = checkpoint_before(&older, out, step);
        if (step == rule->best) continue;
        bool counts = !known || keep_rule_counts(rule, kind);  // of the others as many stay, among those that count
        if (!keep_rule_keeps(rule, step, older, counts ? counted : max_size(counted, others)))
            checkpoint_remove(out, step);
        else counted += known && counts, others += !counts;
    }
    checkpoint_remove_suffixed(out, CHECKPOINT_ASIDE, newest);
}

// Prunes in a thread, since removing files takes a while.
typedef struct {
    pthread_t thread;
    bool running;            // there is a thread to join
    char out[FILE_PATH_MAX];
    uint64_t newest;
    KeepRule rule;
} Pruner;

static inline void* pruner_run(void* argument) {
    Pruner* p = (Pruner*)argument;
    checkpoint_prune(p->out, p->newest, &p->rule);
    return NULL;
}

static inline void pruner_await(Pruner* p) {
    if (p->running) pthread_join(p->thread, NULL);
    p->running = false;
}

// Waits for the prune in progress, then starts checkpoint_prune.
static inline void pruner_begin(Pruner* p, const char* out, uint64_t newest, const KeepRule* rule) {
    pruner_await(p);
    p->newest = newest;
    p->rule = *rule;
    snprintf(p->out, sizeof p->out, "%.4000s", out);
    p->running = pthread_create(&p->thread, NULL, pruner_run, p) == 0;
    if (!p->running) pruner_run(p);
}

// Sets aside, or removes, the checkpoints from step `first` on, newest first.
static inline bool checkpoint_set_aside(const char* out, uint64_t first, bool sets_aside, Error* error) {
    uint64_t step = UINT64_MAX;
    bool found;
    for (;;) {
        if (!checkpoint_find_before(&step, &found, out, step, error)) return false;
        if (!found || step < first) return true;
        if (!(sets_aside ? checkpoint_rename(out, step, CHECKPOINT_ASIDE) : checkpoint_remove(out, step)))
            return fail_file(error, sets_aside ? "set aside later checkpoints in" : "remove the checkpoints in", out);
    }
}

// Removes a directory with the checkpoints in it.
static inline void checkpoint_discard(const char* out) {
    Error ignored;
    checkpoint_clean(out);
    checkpoint_remove_suffixed(out, CHECKPOINT_ASIDE, UINT64_MAX);
    if (checkpoint_set_aside(out, 0, false, &ignored)) rmdir(out);
}

#endif  // LLMTRAIN_CHECKPOINT_H
