// samples.h: what a run makes of its data: where documents end, how conversations are packed, how long an epoch is.
//
//   samples_flags(&flags, &options);
//   if (!samples_choose(run, &options, &flags, &error)) ...            when the data is open
//   if (!samples_pack(run, &options, T, &error)) ...                   when the length of a sequence is known
//   if (!samples_count_steps(&steps, run, &options, T, per_step, &error)) ...     --epochs

#ifndef LLMTRAIN_SAMPLES_H
#define LLMTRAIN_SAMPLES_H

#include "run.h"

typedef struct {
    int documents;         // 0: join; 1: mask
    uint64_t end_of_text;  // only used if the flag was given
    bool pack;
    int too_long;          // TooLong
    double epochs;         // 0: --steps
} SampleOptions;

static inline void samples_flags(Flags* flags, SampleOptions* o) {
    const Flag table[] = {
        FLAG_REAL("epochs", &o->epochs, 0, 0, 1e6, 0, "train until every sample was read X times; instead of --steps"),
        FLAG_CHOICE("documents", &o->documents, 0, "join|mask", 0,
                    "join: ignore the boundaries between documents; mask: attention and loss do not cross them"),
        FLAG_COUNT("end-of-text", &o->end_of_text, 0, 0, 1 << 24, 0,
                   "with --documents mask: id of the token between documents; default: that of the shards' tokenizer"),
        FLAG_SWITCH("pack", &o->pack, true, FLAG_FIXED,
                    "conversations of tokenize --chat: several in a sequence, none of which sees another"),
        FLAG_CHOICE("too-long", &o->too_long, TOO_LONG_DROP, TOO_LONG_NAMES, FLAG_FIXED,
                    "conversations longer than a sequence: leave them out, or cut them after the last whole answer"),
    };
    flags_append(flags, table, sizeof table / sizeof table[0]);
}

// Makes attention and loss stop at the ends of documents: after the token `given`, or else the tokenizer's end-of-text.
static inline bool samples_mask_documents(Run* run, bool asked, const uint64_t* given, Error* error) {
    if (!asked) return fail_with(error, "--end-of-text is for --documents mask; give both, or neither");
    if (run->train.spans || run->val.spans)
        return fail_with(error, "--documents mask ends documents at the end-of-text token, which is also within "
                         "conversations; leave it out: they never see each other");
    bool known = tokenizer_is_known(&run->tokenizer);
    int32_t end = given ? (int32_t)*given : known ? run->tokenizer.end_of_text : -1;
    if (given && run->train.vocabulary > 0 && end >= run->train.vocabulary)
        return fail_with(error, "--end-of-text %d is outside the data's vocabulary of %d; give the id of its "
                         "end-of-text token", (int)end, (int)run->train.vocabulary);
    if (end < 0)
        return fail_with(error, "--documents mask needs the token between documents, but %s; give --end-of-text N "
                         "(50256 for GPT-2 tokens), or shards made by tokenize --text",
                         known ? "the data's tokenizer has none" : "the data has no tokenizer");
    run->train.mask_documents = run->val.mask_documents = true;
    run->train.end_of_text = run->val.end_of_text = end;
    return true;
}

// Sets what the flags and the data say of documents. Conversations end where their .spans say, and at no token.
static inline bool samples_choose(Run* run, const SampleOptions* o, Flags* flags, Error* error) {
    bool given = flag_was_given(flags, "end-of-text");
    if (o->epochs > 0 && flag_was_given(flags, "steps"))
        return fail_with(error, "--epochs and --steps both say when the run ends; leave one of them out");
    if (given || o->documents)
        return samples_mask_documents(run, o->documents != 0, given ? &o->end_of_text : NULL, error);
    run->train.mask_documents = run->val.mask_documents = run->train.spans || run->val.spans;
    run->train.end_of_text = run->val.end_of_text = -1;
    return true;
}

static inline bool samples_pack(Run* run, const SampleOptions* o, size_t T, Error* error) {
    TooLong too_long = (TooLong)o->too_long;
    return dataset_pack(&run->train, T, o->pack, too_long, error) &&
           dataset_pack(&run->val, T, o->pack, too_long, error);
}

// Sequences of T tokens in an epoch of the training data; 0: there is no data, or a mixture, whose parts each have
// their own.
static inline uint64_t samples_of_epoch(const Run* run, size_t T) {
    return run->train.part_count == 1 ? part_samples(&run->train, run->train.parts, T) : 0;
}

// How many times all samples were read so far; NAN for a mixture.
static inline double samples_epochs(const Run* run, size_t T) {
    uint64_t epoch = samples_of_epoch(run, T);
    return epoch > 0 ? (double)run->record.state.samples / (double)epoch : NAN;
}

// *steps: for --epochs, with so many samples in a step; otherwise it stays as it is. 1.1 epochs of 50 samples are 55,
// though 1.1 as a double is a little more.
static inline bool samples_count_steps(uint64_t* steps, const Run* run, const SampleOptions* o, size_t T,
                                       uint64_t per_step, Error* error) {
    if (o->epochs == 0) return true;
    if (run->train.part_count == 0)
        return fail_with(error, "--epochs counts the samples of --data; give it, or --steps");
    if (run->train.part_count > 1)
        return fail_with(error, "--epochs is not for a mixture, whose parts end at different times; give --steps");
    if (!dataset_suffices(&run->train, T, error)) return false;
    *steps = (uint64_t)ceil(o->epochs * (double)samples_of_epoch(run, T) / (double)per_step * (1 - 1e-14));
    return true;
}

// Prints how conversations are packed.
static inline void samples_print(const char* flag, const Dataset* data, size_t T) {
    for (size_t i = 0; data->packed && i < data->part_count; i++) {
        const Packing* p = &data->packed[i];
        if (p->rows == 0) continue;
        say(stdout, "%s: %zu conversations in %zu sequences, %.1f%% full", flag, p->group_count, p->rows,
            100.0 * (double)p->tokens / (double)p->rows / (double)(T + 1));
        if (p->cut > 0)
            say(stdout, "note: %zu conversations are longer than --seq %zu, and are cut after an answer", p->cut, T);
        if (p->dropped > 0)
            say(stdout, "note: %zu conversations are longer than --seq %zu (the longest has %u tokens), and are left "
                "out", p->dropped, T, p->longest);
    }
}

#endif  // LLMTRAIN_SAMPLES_H
