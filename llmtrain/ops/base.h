// base.h: what every other file of llmtrain builds on.
//
//   1. errors      one way to say what went wrong, where, and what to do
//   2. memory      aligned, zeroed, checked allocation
//   3. time        a monotonic clock
//   4. random      counter-based random numbers: a pure function of (seed, purpose, step, index)
//   5. hash        the checksum of files and parameters
//   6. threads     how many OpenMP uses, 1 without OpenMP; tasks that they share
//   7. text        UTF-8, numbers, shell quoting
//   8. order       comparison for qsort; slices of a vector
//
// C11, C++20 and CUDA C++.

#ifndef LLMTRAIN_BASE_H
#define LLMTRAIN_BASE_H

#include "arithmetic.h"
#include "posix.h"

#include <errno.h>
#include <stdarg.h>
#include <time.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "llmtrain reads and writes its files as they lie in memory: it needs a little-endian machine"
#endif

#define LLMTRAIN_VERSION "0.1"

// A CUDA build has both backends: what lies between these two, functions for a CPU, is cpu::gelu_forward and so on.
#ifdef LLMTRAIN_CUDA
#define LLMTRAIN_CPU_BEGIN namespace cpu {
#define LLMTRAIN_CPU_END }
#else
#define LLMTRAIN_CPU_BEGIN
#define LLMTRAIN_CPU_END
#endif

// ------------------------------------------------------------------------------------------------
// 1. Errors
//
// A function that can fail for external reasons (a file, a flag, memory) returns false and leaves one sentence in an
// Error: what is wrong, where, and what to do. It never exits. The program prints the sentence and ends, in one place.
// Control characters, which names of files and in files may have, are printed as \x1b: a terminal would obey them.

typedef enum {
    ERROR_OUTSIDE,  // a file, the disk, another rank
    ERROR_USAGE,    // flags are wrong or do not fit together, or data are damaged: the program exits with 2
    ERROR_STOPPED,  // a signal ended the run, which is saved
    ERROR_PROCESS   // this process lacks memory or descriptors, or is another build: the file itself may be good
} ErrorKind;

typedef struct {
    char text[1024];
    ErrorKind kind;
    bool on_all_ranks;  // every rank has this error: none has to be notified
} Error;

// A copy without control characters, as long as fits.
static inline void text_make_visible(char* visible, size_t size, const char* text) {
    size_t n = 0;
    const char* p = text;
    for (; *p && n + 5 < size; p++) {
        bool two = p[0] == '\xc2' && (p[1] & 0xe0) == 0x80;  // U+0080 to U+009F in UTF-8
        unsigned char c = (unsigned char)p[two];
        if (two || c < 0x20 || c == 0x7f) n += (size_t)snprintf(visible + n, 5, "\\x%02x", c);
        else visible[n++] = *p;
        p += two;
    }
    while (n > 0 && (*p & 0xc0) == 0x80) p--, n--;  // cut in the middle of a character of UTF-8
    visible[n] = 0;
}

__attribute__((format(printf, 2, 3))) static inline bool fail_with(Error* error, const char* format, ...) {
    char sentence[sizeof error->text];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    text_make_visible(error->text, sizeof error->text, sentence);
    error->kind = ERROR_OUTSIDE;
    error->on_all_ranks = false;
    return false;
}

// Prints a line with names in it that is not an error.
__attribute__((format(printf, 2, 3))) static inline void say(FILE* out, const char* format, ...) {
    char line[16384], visible[16384];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    text_make_visible(visible, sizeof visible, line);
    fprintf(out, "%s\n", visible);
}

// Changes the kind of a failure.
static inline bool fail_as(Error* error, ErrorKind kind) {
    error->kind = kind;
    return false;
}

// Marks a failure that every rank detects by itself: none has to be notified.
static inline bool fail_on_all_ranks(Error* error) {
    error->on_all_ranks = true;
    return false;
}

// Fails for lack of memory to read a file into.
static inline bool fail_memory(Error* error, const char* path, size_t bytes) {
    fail_with(error, "%.600s: not enough memory to read %zu bytes of it; free some memory", path, bytes);
    return fail_as(error, ERROR_PROCESS);
}

// ------------------------------------------------------------------------------------------------
// 2. Memory

// Zeroed memory on a 64-byte boundary (a cache line, and the widest vector); the caller frees it with free().
// NULL when there is none.
static inline void* memory_allocate(size_t bytes) {
    void* memory = NULL;
    size_t rounded = round_up(bytes, 64);
    if (rounded < bytes || posix_memalign(&memory, 64, max_size(rounded, 64)) != 0) return NULL;
    memset(memory, 0, rounded);
    return memory;
}

// Gives an array that grows room for `count` elements. array: the address of the pointer to it, of any type. False if
// there is no memory; then the array is as it was. The caller frees it with free().
static inline bool memory_grow(void* array, size_t* capacity, size_t count, size_t element_bytes) {
    void* memory;
    if (count <= *capacity) return true;
    size_t larger = max_size(count, *capacity + *capacity / 2);
    memcpy(&memory, array, sizeof memory);
    memory = larger > SIZE_MAX / element_bytes ? NULL : realloc(memory, larger * element_bytes);
    if (!memory) return false;
    memcpy(array, &memory, sizeof memory);
    *capacity = larger;
    return true;
}

// ------------------------------------------------------------------------------------------------
// 3. Time

// Milliseconds since an arbitrary moment; never decreases, even if the system clock is set back.
static inline double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

// Sleeps for the full time, even if signals arrive.
static inline void sleep_ms(double ms) {
    struct timespec t = {(time_t)(ms / 1e3), (long)(fmod(ms, 1e3) * 1e6)};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {}
}

// ------------------------------------------------------------------------------------------------
// 4. Random numbers
//
// Philox4x32-10, from "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon et al., 2011): ten rounds of a keyed
// bijection on a 128-bit counter. There is no state to save: the key is the seed, the counter says what the number is
// for. So the numbers depend neither on the order in which they are drawn nor on which thread or rank draws them.

// What a random number is for; no two uses share one.
typedef enum {
    RANDOM_INIT = 1,      // step 0,         index: position in the flat parameter vector
    RANDOM_ORDER = 2,     // step: epoch,    index: 8 x half + round of the permutation, or 2^32 - 1 for the phase
    RANDOM_DROPOUT = 3,   // step: layer and site, index: global token number times C plus channel
    RANDOM_ROUNDING = 4,  // step: number of the update, index: position in the flat parameter vector
    RANDOM_SAMPLING = 5,  // step 0,         index: position of the token in the text
    RANDOM_CORPUS = 6,    // step 0,         index: number of the choice
    RANDOM_TEST = 7,      // step: number of the test
    RANDOM_BASIS = 8,     // step: number of the update, index: position in the flat parameter vector
    RANDOM_STATES = 9     // step: number of the update, index: position in the flat parameter vector
} RandomPurpose;

typedef struct {
    uint32_t bits[4];
} Random4;

enum { PHILOX_ROUNDS = 10 };
#define PHILOX_MULTIPLIER_0 0xD2511F53u
#define PHILOX_MULTIPLIER_1 0xCD9E8D57u
#define PHILOX_WEYL_0 0x9E3779B9u
#define PHILOX_WEYL_1 0xBB67AE85u

// Four independent uniform 32-bit numbers. Index may use all of its 64 bits, step too: the upper half of step is mixed
// into the key.
HOST_DEVICE static inline Random4 random4(uint64_t seed, RandomPurpose purpose, uint64_t step, uint64_t index) {
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = (uint32_t)step, c3 = (uint32_t)purpose;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32) ^ (uint32_t)(step >> 32);
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        uint64_t p0 = (uint64_t)PHILOX_MULTIPLIER_0 * c0;
        uint64_t p1 = (uint64_t)PHILOX_MULTIPLIER_1 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += PHILOX_WEYL_0;
        k1 += PHILOX_WEYL_1;
    }
    Random4 r = {{c0, c1, c2, c3}};
    return r;
}

// The index-th of a sequence of uniform 32-bit numbers; four neighbors share a call of random4.
HOST_DEVICE static inline uint32_t random_bits(uint64_t seed, RandomPurpose purpose, uint64_t step, uint64_t index) {
    return random4(seed, purpose, step, index / 4).bits[index % 4];
}

#ifdef LLMTRAIN_CUDA
// The random bits of element j of a thread's W neighbors, where element 0 has index `first`: a multiple of 4 if W > 1,
// so that one call of random4 serves four elements, since the compiler sees that their calls are the same.
template <int W>
static __device__ inline uint32_t group_random(uint64_t seed, RandomPurpose purpose, uint64_t step, uint64_t first,
                                               int j) {
    if constexpr (W == 1) return random_bits(seed, purpose, step, first + (uint64_t)j);
    return random4(seed, purpose, step, first / 4 + (uint64_t)(j / 4)).bits[j % 4];
}
#endif

// out (4 VECTOR_U64_LANES) = random4 of the indices in c0. Only the lower half of each element of c0 to c3 counts.
static inline void random_vector(uint32_t* out, uint64_t seed, RandomPurpose purpose, uint64_t step, VectorU64 c0) {
    VectorU64 zero = {0}, c1 = c0 >> 32, c2 = zero + step, c3 = zero + (uint64_t)purpose;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32) ^ (uint32_t)(step >> 32);
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        VectorU64 p0 = vector_multiply_lower(c0, zero + PHILOX_MULTIPLIER_0);
        VectorU64 p1 = vector_multiply_lower(c2, zero + PHILOX_MULTIPLIER_1);
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c1 = p1;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c3 = p0;
        k0 += PHILOX_WEYL_0;
        k1 += PHILOX_WEYL_1;
    }
    VectorU64 halves[2] = {(c0 & 0xffffffffu) | c1 << 32, (c2 & 0xffffffffu) | c3 << 32};
    uint64_t lower[VECTOR_U64_LANES], upper[VECTOR_U64_LANES], both[2 * VECTOR_U64_LANES];
    memcpy(lower, &halves[0], sizeof lower);
    memcpy(upper, &halves[1], sizeof upper);
    #pragma omp simd
    for (int lane = 0; lane < VECTOR_U64_LANES; lane++) {
        both[2 * lane] = lower[lane];
        both[2 * lane + 1] = upper[lane];
    }
    memcpy(out, both, sizeof both);
}

// out (n) = n numbers of that sequence, from number `first` on.
static inline void random_fill(uint32_t* out, uint64_t seed, RandomPurpose purpose, uint64_t step, uint64_t first,
                               size_t n) {
    enum { NUMBERS = 4 * VECTOR_U64_LANES };
    VectorU64 index = {0};
    size_t i = 0, before = min_size((4 - first % 4) % 4, n), end = before + (n - before) / NUMBERS * NUMBERS;
    for (; i < before; i++) out[i] = random_bits(seed, purpose, step, first + i);
    for (int lane = 0; lane < VECTOR_U64_LANES; lane++) index[lane] = (first + i) / 4 + (uint64_t)lane;
    for (; i < end; i += NUMBERS, index += (uint64_t)VECTOR_U64_LANES)
        random_vector(out + i, seed, purpose, step, index);
    for (; i < n; i++) out[i] = random_bits(seed, purpose, step, first + i);
}

// Uniform in [0, 1), with 24 bits: exact in float.
static inline float random_uniform(uint64_t seed, RandomPurpose purpose, uint64_t step, uint64_t index) {
    return (float)(random_bits(seed, purpose, step, index) >> 8) * 0x1p-24f;
}

// Standard normal, by the Box-Muller transform.
static inline float random_normal(uint64_t seed, RandomPurpose purpose, uint64_t step, uint64_t index) {
    Random4 r = random4(seed, purpose, step, index / 2);
    double u = ((double)r.bits[2 * (index % 2)] + 0.5) * 0x1p-32;  // never 0
    double angle = 6.283185307179586 * (double)r.bits[2 * (index % 2) + 1] * 0x1p-32;
    return (float)(sqrt(-2.0 * log_double(u)) * cos_double(angle));
}

// ------------------------------------------------------------------------------------------------
// 5. Hash
//
// XXH64, by its published specification ("xxHash fast digest algorithm"): about 10 bytes a nanosecond, so that
// checksums cost nothing compared with a disk, and other programs (Python's xxhash) can check our files.

typedef struct {
    uint64_t lanes[4];
    uint64_t total;            // bytes so far
    unsigned char pending[32]; // the total % 32 bytes that do not fill a stripe yet
    uint64_t seed;
} Hash;

#define XXH_PRIME1 0x9E3779B185EBCA87ull
#define XXH_PRIME2 0xC2B2AE3D27D4EB4Full
#define XXH_PRIME3 0x165667B19E3779F9ull
#define XXH_PRIME4 0x85EBCA77C2B2AE63ull
#define XXH_PRIME5 0x27D4EB2F165667C5ull

static inline uint64_t hash_rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }
static inline uint64_t hash_read64(const unsigned char* p) { uint64_t x; memcpy(&x, p, 8); return x; }
static inline uint32_t hash_read32(const unsigned char* p) { uint32_t x; memcpy(&x, p, 4); return x; }
static inline uint64_t hash_lane(uint64_t lane, uint64_t input) {
    return hash_rotate(lane + input * XXH_PRIME2, 31) * XXH_PRIME1;
}

static inline Hash hash_begin(uint64_t seed) {
    Hash h = {.lanes = {seed + XXH_PRIME1 + XXH_PRIME2, seed + XXH_PRIME2, seed, seed - XXH_PRIME1}, .seed = seed};
    return h;
}

static inline void hash_stripe(Hash* h, const unsigned char* p) {
    for (int i = 0; i < 4; i++) h->lanes[i] = hash_lane(h->lanes[i], hash_read64(p + 8 * i));
}

static inline void hash_add(Hash* h, const void* data, size_t bytes) {
    const unsigned char* p = (const unsigned char*)data;
    size_t held = h->total % 32;
    h->total += bytes;
    if (held > 0) {
        size_t take = min_size(32 - held, bytes);
        memcpy(h->pending + held, p, take);
        p += take;
        bytes -= take;
        if (held + take < 32) return;
        hash_stripe(h, h->pending);
    }
    for (; bytes >= 32; p += 32, bytes -= 32) hash_stripe(h, p);
    if (bytes > 0) memcpy(h->pending, p, bytes);
}

static inline uint64_t hash_end(const Hash* h) {
    uint64_t x = h->seed + XXH_PRIME5;
    if (h->total >= 32) {
        const uint64_t* l = h->lanes;
        x = hash_rotate(l[0], 1) + hash_rotate(l[1], 7) + hash_rotate(l[2], 12) + hash_rotate(l[3], 18);
        for (int i = 0; i < 4; i++) x = (x ^ hash_lane(0, l[i])) * XXH_PRIME1 + XXH_PRIME4;
    }
    x += h->total;
    const unsigned char* p = h->pending;
    size_t bytes = h->total % 32;
    for (; bytes >= 8; p += 8, bytes -= 8)
        x = hash_rotate(x ^ hash_lane(0, hash_read64(p)), 27) * XXH_PRIME1 + XXH_PRIME4;
    if (bytes >= 4) {
        x = hash_rotate(x ^ (hash_read32(p) * XXH_PRIME1), 23) * XXH_PRIME2 + XXH_PRIME3;
        p += 4;
        bytes -= 4;
    }
    for (; bytes > 0; p++, bytes--) x = hash_rotate(x ^ (*p * XXH_PRIME5), 11) * XXH_PRIME1;
    x = (x ^ (x >> 33)) * XXH_PRIME2;
    x = (x ^ (x >> 29)) * XXH_PRIME3;
    return x ^ (x >> 32);
}

static inline uint64_t hash_bytes(const void* data, size_t bytes) {
    Hash h = hash_begin(0);
    hash_add(&h, data, bytes);
    return hash_end(&h);
}

// What element `index` of the flat vector adds to the checksum of parameters: its bits and its position, mixed by a
// bijection (the finalizer of "SplitMix", Steele, Lea and Flood: "Fast Splittable Pseudorandom Number Generators").
HOST_DEVICE static inline uint64_t checksum_element(floatX x, uint64_t index) {
    uint32_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    uint64_t z = index * 0x9E3779B97F4A7C15u + ((uint64_t)bits << 32 | bits);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// ------------------------------------------------------------------------------------------------
// 6. Threads

// thread_number: of the calling thread in a parallel region, below threads_count().
#ifdef _OPENMP
static inline size_t threads_count(void) { return (size_t)omp_get_max_threads(); }
static inline size_t thread_number(void) { return (size_t)omp_get_thread_num(); }
static inline void threads_set(size_t threads) { omp_set_num_threads((int)threads); }
#else
static inline size_t threads_count(void) { return 1; }
static inline size_t thread_number(void) { return 0; }
static inline void threads_set(size_t threads) { (void)threads; }
#endif

// Tasks 0 to count - 1 of a parallel region. A thread starts with a contiguous part of them, the same one whenever the
// numbers are the same, then helps the others: no thread waits for a slow one, and what a thread wrote in one operation
// it mostly reads in the next, from its own caches.
enum { TASK_PARTS = 64 };
typedef struct {
    size_t parts;
    struct {
        size_t next, end;
        char apart[128 - 2 * sizeof(size_t)];  // threads do not write to one cache line
    } part[TASK_PARTS];
} Tasks;

static inline void tasks_share(Tasks* tasks, size_t count, size_t threads) {
    tasks->parts = min_size(threads, TASK_PARTS);
    for (size_t i = 0; i < tasks->parts; i++) {
        tasks->part[i].next = count * i / tasks->parts;
        tasks->part[i].end = count * (i + 1) / tasks->parts;
    }
}

// Takes a task for the calling thread: false when none is left.
static inline bool tasks_take(Tasks* tasks, size_t* task) {
    for (size_t n = 0; n < tasks->parts; n++) {
        size_t i = (thread_number() + n) % tasks->parts;
        *task = __atomic_fetch_add(&tasks->part[i].next, 1, __ATOMIC_RELAXED);
        if (*task < tasks->part[i].end) return true;
    }
    return false;
}

// ------------------------------------------------------------------------------------------------
// 7. Text

// Writes a code point and returns its bytes, at most 4.
static inline size_t utf8_write(char* out, uint32_t code) {
    if (code < 0x80) return out[0] = (char)code, 1;
    size_t more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const unsigned char first[4] = {0, 0xC0, 0xE0, 0xF0};
    out[0] = (char)(first[more] | (code >> (6 * more)));
    for (size_t i = 1; i <= more; i++) out[i] = (char)(0x80 | ((code >> (6 * (more - i))) & 0x3F));
    return more + 1;
}

// Prints the fewest digits, at least `least`, that read back to the same bits.
static inline void real_text(char* text, size_t size, double value, int least) {
    for (int digits = least; digits <= 17; digits++) {
        snprintf(text, size, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
}

// Quotes a word for a shell: in single quotes, with each of its own single quotes as '\''.
static inline void shell_quote(char* text, size_t size, const char* word) {
    size_t used = (size_t)snprintf(text, size, "'");
    for (; *word && used + 6 < size; word++) {
        const char letter[2] = {*word, 0};
        used += (size_t)snprintf(text + used, size - used, "%s", *word == '\'' ? "'\\''" : letter);
    }
    snprintf(text + used, size - used, "'");
}

// ------------------------------------------------------------------------------------------------
// 8. Order

// For qsort, the smallest first; NaN is the largest.
static inline int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    if (isnan(x) || isnan(y)) return (int)(isnan(x) != 0) - (int)(isnan(y) != 0);
    return (x > y) - (x < y);
}

// Elements [first, end) of a vector.
typedef struct {
    size_t first, end;
} Slice;

static inline size_t slice_length(Slice s) { return s.end - s.first; }

#endif  // LLMTRAIN_BASE_H
