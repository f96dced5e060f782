// duplicates.h: finds documents that repeat earlier ones, exactly or nearly.
//
//   Duplicates duplicates;
//   Sketch sketch;
//   bool ok = duplicates_open(&duplicates, true, 0.8, &error);
//   sketch_make(&sketch, true, text, bytes);
//   ok = ok && duplicates_add(&duplicates, &found, &sketch, document, &error);      found.of, found.similarity
//   duplicates_close(&duplicates);
//
//   1. sketch      the part of a document that is kept: a hash of its bytes, and its MinHash signature
//   2. duplicates  the sketches of documents, and a table that finds similar ones
//
// "On the resemblance and containment of documents" (Broder, 1997). A document is the set of its shingles, which are
// SHINGLE_WORDS consecutive words; words are letters and digits, in lower case, so that layout and punctuation do not
// count. The similarity of two documents is the Jaccard similarity of these sets: intersection over union. The minimum
// of a random hash over a set is the same for two sets with that probability; so the fraction of SIGNATURE minima that
// agree estimates it, with a standard error of at most 0.042. Signatures are compared only where all minima of one of
// the BANDS agree; documents with a similarity of 0.8 miss that once in a thousand times ("Mining of Massive
// Datasets", Leskovec, Rajaraman and Ullman, 3.4).
//
// Memory for each document that is kept: 0.4 to 0.9 KB, or 32 to 64 bytes with exact duplicates alone.

#ifndef LLMTRAIN_DUPLICATES_H
#define LLMTRAIN_DUPLICATES_H

#include "../llmtrain/ops/base.h"

// ------------------------------------------------------------------------------------------------
// 1. Sketch

enum { SHINGLE_WORDS = 5, BANDS = 24, BAND_ROWS = 6, SIGNATURE = BANDS * BAND_ROWS };

typedef struct {
    uint64_t hash[2];             // of the document's pieces; equal documents have equal pieces
    uint32_t least[SIGNATURE];    // minimum of each random hash over the shingles
    bool words;                   // the document has any
} Sketch;

static inline bool is_word_byte(unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c >= 0x80;
}

// Takes a shingle into account. Each random hash is a bijection of the shingle's hash, folded to 32 bits.
static inline void sketch_add_shingle(Sketch* sketch, uint64_t shingle) {
    uint32_t x = (uint32_t)(shingle ^ shingle >> 32);
    for (uint32_t i = 0; i < SIGNATURE; i++) {
        uint32_t key = (i + 1) * 0x9E3779B9u;
        uint32_t h = (x ^ key) * (key << 1 | 1);
        h = (h ^ h >> 15) * 0x85EBCA6Bu;
        h ^= h >> 13;
        sketch->least[i] = h < sketch->least[i] ? h : sketch->least[i];
    }
}

// Adds the shingles of a text; a text shorter than a shingle has one shingle of all its words.
static inline void sketch_add_words(Sketch* sketch, const char* text, size_t bytes) {
    uint64_t words[SHINGLE_WORDS];
    size_t count = 0, at = 0;
    while (at < bytes) {
        uint64_t hash = XXH_PRIME5;
        size_t begin = at;
        for (; at < bytes && is_word_byte((unsigned char)text[at]); at++) {
            unsigned char c = (unsigned char)text[at];
            hash = (hash ^ (c >= 'A' && c <= 'Z' ? c + 32u : c)) * XXH_PRIME1;
            hash ^= hash >> 29;
        }
        if (at == begin) {
            at++;
            continue;
        }
        words[count++ % SHINGLE_WORDS] = hash;
        if (count < SHINGLE_WORDS) continue;
        uint64_t shingle = 0;
        for (size_t i = count - SHINGLE_WORDS; i < count; i++)
            shingle = hash_lane(shingle, words[i % SHINGLE_WORDS]);
        sketch_add_shingle(sketch, shingle);
    }
    sketch->words = sketch->words || count > 0;
    if (count == 0 || count >= SHINGLE_WORDS) return;
    uint64_t shingle = count;
    for (size_t i = 0; i < count; i++) shingle = hash_lane(shingle, words[i]);
    sketch_add_shingle(sketch, shingle);
}

// Makes the sketch of a piece of text; with its words only if near duplicates are wanted.
static inline void sketch_make(Sketch* sketch, bool near, const char* text, size_t bytes) {
    memset(sketch, 0, sizeof *sketch);
    memset(sketch->least, 0xFF, sizeof sketch->least);
    for (uint64_t i = 0; i < 2; i++) {
        Hash hash = hash_begin(i);
        hash_add(&hash, text, bytes);
        sketch->hash[i] = hash_end(&hash);
    }
    if (near) sketch_add_words(sketch, text, bytes);
}

// Adds the next piece of a document to the sketch of those before. No shingle crosses from piece to piece, of which a
// document has one per megabyte.
static inline void sketch_join(Sketch* sketch, const Sketch* piece) {
    for (int i = 0; i < 2; i++) sketch->hash[i] = hash_lane(sketch->hash[i], piece->hash[i]) * XXH_PRIME3;
    for (int i = 0; i < SIGNATURE; i++)
        sketch->least[i] = piece->least[i] < sketch->least[i] ? piece->least[i] : sketch->least[i];
    sketch->words = sketch->words || piece->words;
}

// ------------------------------------------------------------------------------------------------
// 2. Duplicates
//
// The table of bands has an entry for each band of each kept document: open addressing by the band's hash, which
// several documents may share. Of each minimum in a signature 8 bits are kept: two minima that differ agree in them
// once in 256 times, which the estimate takes into account.

#define BAND_CANDIDATES 64  // documents compared per band, at most: boilerplate must not be slow

typedef struct {
    uint64_t hash[2];
    uint64_t document;
} KeptDocument;

typedef struct {
    uint32_t tag, kept;      // the upper half of the band's hash; number of the kept document plus 1, 0: empty
} BandEntry;

typedef struct {
    bool near;
    double similarity;       // minimum for near duplicates
    KeptDocument* kept;      // (count), owned
    uint8_t* signatures;     // (count, SIGNATURE), owned; NULL unless near
    size_t count, places;
    uint32_t* slots;         // owned; by hash: number of the kept document plus 1, or 0
    size_t slot_count;       // a power of two, at least twice the documents
    BandEntry* bands;        // owned
    size_t band_slots;       // a power of two, at least 4/3 times the entries
} Duplicates;

typedef struct {
    bool any, exact;
    uint64_t of;             // the document that this one repeats
    double similarity;       // 1 for an exact duplicate, otherwise estimated
} FoundDuplicate;

static inline void duplicates_close(Duplicates* d) {
    free(d->kept);
    free(d->signatures);
    free(d->slots);
    free(d->bands);
    memset(d, 0, sizeof *d);
}

static inline bool duplicates_out_of_memory(const Duplicates* d, Error* error) {
    return fail_with(error, "out of memory for %zu documents in the search for duplicates; give --dedup %s",
                     d->count + 1, d->near ? "exact" : "off, or the files in parts");
}

static inline size_t band_slot(uint32_t tag) { return tag * (size_t)XXH_PRIME1 >> 20; }

// Leaves out an entry if its band already has as many as a search compares.
static inline void band_insert(BandEntry* bands, size_t slots, BandEntry entry) {
    size_t at = band_slot(entry.tag), same = 0;
    for (; bands[at & (slots - 1)].kept; at++) same += bands[at & (slots - 1)].tag == entry.tag;
    if (same < BAND_CANDIDATES) bands[at & (slots - 1)] = entry;
}

// Doubles the capacity for documents. The table of bands has room for all of their bands.
static inline bool duplicates_grow(Duplicates* d, Error* error) {
    size_t places = max_size(2 * d->places, 512), slot_count = 2 * places, band_slots = slot_count * 16;
    if (slot_count > UINT32_MAX) return duplicates_out_of_memory(d, error);
    KeptDocument* kept = (KeptDocument*)realloc(d->kept, places * sizeof *kept);
    if (kept) d->kept = kept;
    uint8_t* signatures = d->near ? (uint8_t*)realloc(d->signatures, places * SIGNATURE) : NULL;
    if (signatures) d->signatures = signatures;
    uint32_t* slots = (uint32_t*)memory_allocate(slot_count * sizeof *slots);
    BandEntry* bands = d->near ? (BandEntry*)memory_allocate(band_slots * sizeof *bands) : NULL;
    if (!kept || !slots || (d->near && (!signatures || !bands))) {
        free(slots);
        free(bands);
        return duplicates_out_of_memory(d, error);
    }
    for (size_t i = 0; i < d->count; i++) {
        size_t at = d->kept[i].hash[0] & (slot_count - 1);
        while (slots[at]) at = (at + 1) & (slot_count - 1);
        slots[at] = (uint32_t)(i + 1);
    }
    for (size_t i = 0; i < d->band_slots; i++)
        if (d->bands[i].kept) band_insert(bands, band_slots, d->bands[i]);
    free(d->slots);
    free(d->bands);
    d->slots = slots;
    d->bands = bands;
    d->slot_count = slot_count;
    d->band_slots = d->near ? band_slots : 0;
    d->places = places;
    return true;
}

// near: also finds documents of at least this similarity, not only equal ones. After a failure nothing is to be closed.
static inline bool duplicates_open(Duplicates* d, bool near, double similarity, Error* error) {
    memset(d, 0, sizeof *d);
    d->near = near;
    d->similarity = similarity;
    return duplicates_grow(d, error);
}

// Estimates the similarity from the fraction of minima that agree; different ones do so once in 256 times.
static inline double duplicates_compare(const Duplicates* d, const uint8_t signature[SIGNATURE], size_t kept) {
    const uint8_t* other = d->signatures + kept * SIGNATURE;
    size_t agree = 0;
    for (size_t i = 0; i < SIGNATURE; i++) agree += signature[i] == other[i];
    return fmax(0, ((double)agree / SIGNATURE - 1.0 / 256) / (1 - 1.0 / 256));
}

// The most similar of the kept documents that share a band; of equally similar ones the first.
static inline void duplicates_find_near(const Duplicates* d, FoundDuplicate* found, const uint32_t tags[BANDS],
                                        const uint8_t signature[SIGNATURE]) {
    for (size_t band = 0; band < BANDS; band++) {
        size_t candidates = 0;
        for (size_t at = band_slot(tags[band]); candidates < BAND_CANDIDATES; at++) {
            const BandEntry* entry = &d->bands[at & (d->band_slots - 1)];
            if (entry->kept == 0) break;
            if (entry->tag != tags[band]) continue;
            candidates++;
            double similarity = duplicates_compare(d, signature, entry->kept - 1);
            uint64_t document = d->kept[entry->kept - 1].document;
            bool better = similarity > found->similarity || (similarity == found->similarity && document < found->of);
            if (similarity < d->similarity || (found->any && !better)) continue;
            found->any = true;
            found->of = document;
            found->similarity = similarity;
        }
    }
}

// Whether a document repeats one that was added before; if not, it is kept, and later ones may repeat it.
static inline bool duplicates_add(Duplicates* d, FoundDuplicate* found, const Sketch* sketch, uint64_t document,
                                  Error* error) {
    uint32_t tags[BANDS];
    uint8_t signature[SIGNATURE];
    memset(found, 0, sizeof *found);
    if (d->count == d->places && !duplicates_grow(d, error)) return false;
    size_t slot = sketch->hash[0] & (d->slot_count - 1);
    for (; d->slots[slot]; slot = (slot + 1) & (d->slot_count - 1)) {
        const KeptDocument* kept = &d->kept[d->slots[slot] - 1];
        if (memcmp(kept->hash, sketch->hash, sizeof kept->hash) != 0) continue;
        found->any = found->exact = true;
        found->of = kept->document;
        found->similarity = 1;
        return true;
    }
    bool near = d->near && sketch->words;
    for (size_t band = 0; near && band < BANDS; band++) {
        Hash hash = hash_begin(band);
        hash_add(&hash, sketch->least + band * BAND_ROWS, BAND_ROWS * sizeof(uint32_t));
        tags[band] = (uint32_t)(hash_end(&hash) >> 32);
    }
    for (size_t i = 0; near && i < SIGNATURE; i++) signature[i] = (uint8_t)sketch->least[i];
    if (near) duplicates_find_near(d, found, tags, signature);
    if (found->any) return true;
    KeptDocument* kept = &d->kept[d->count];
    memcpy(kept->hash, sketch->hash, sizeof kept->hash);
    kept->document = document;
    if (near) memcpy(d->signatures + d->count * SIGNATURE, signature, SIGNATURE);
    d->slots[slot] = (uint32_t)++d->count;
    for (size_t band = 0; near && band < BANDS; band++) {
        BandEntry entry = {tags[band], (uint32_t)d->count};
        band_insert(d->bands, d->band_slots, entry);
    }
    return true;
}

#endif  // LLMTRAIN_DUPLICATES_H
