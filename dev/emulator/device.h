// device.h: functions that device code may call and C++ does not have.
//
//   1. blocks     __syncthreads and its kin
//   2. warps      shuffles, votes, reductions
//   3. atomics
//   4. memory     loads and stores with hints
//   5. bits       casts and integer intrinsics
//   6. arithmetic float intrinsics, at the precision of the C library

#ifndef EMULATOR_DEVICE_H
#define EMULATOR_DEVICE_H

// Declared inline only: always_inline fails where a function's address is taken.
#undef __forceinline__
#define __forceinline__ inline
#undef __launch_bounds__
#define __launch_bounds__(...)  // translate.cpp puts them into the body

// For the few functions whose caller's line must show in the race check's report.
#define EMULATOR_INLINE inline __attribute__((always_inline))

static constexpr int warpSize = 32;

// ------------------------------------------------------------------------------------------------
// 1. Blocks

inline void __syncthreads(emulator::Place place = EMULATOR_HERE) { emulator::barrier("__syncthreads", place); }
inline int __syncthreads_count(int predicate, emulator::Place place = EMULATOR_HERE) {
    return (int)emulator::barrier("__syncthreads_count", place, 0, 0, predicate != 0).result_ayes;
}
inline int __syncthreads_and(int predicate, emulator::Place place = EMULATOR_HERE) {
    const emulator::Barrier& b = emulator::barrier("__syncthreads_and", place, 0, 0, predicate != 0);
    return b.result_ayes == b.result_arrived;
}
inline int __syncthreads_or(int predicate, emulator::Place place = EMULATOR_HERE) {
    return emulator::barrier("__syncthreads_or", place, 0, 0, predicate != 0).result_ayes != 0;
}

// ------------------------------------------------------------------------------------------------
// 2. Warps

namespace emulator {

enum ShuffleKind { INDEXED, UP, DOWN, XOR };

// A lane's inputs to an operation of its warp, and its results.
template <class T>
struct Brought {
    T value, result;
    int argument, width;
};

template <class T>
inline T shuffle(ShuffleKind kind, const char* name, unsigned mask, T value, int argument, int width, Place place) {
    static_assert(std::is_trivially_copyable<T>::value && (sizeof(T) <= 8), "shuffles take values of up to 64 bits");
    Brought<T> mine = {value, value, argument, width};
    Unseen emulator_work;
    if (width < 1 || width > 32 || (width & (width - 1)))
        die_at(place, "%s of width %d: 1, 2, 4, 8, 16 or 32", name, width);
    if (Meeting* m = meet(name, place, mask, &mine)) {
        Brought<T>** lanes = (Brought<T>**)m->data;
        for (unsigned rest = mask; rest; rest &= rest - 1) {
            int lane = (int)lowest(rest), from = lane;
            int w = lanes[lane]->width, a = lanes[lane]->argument, first = lane & ~(w - 1);
            if (kind == INDEXED) from = first + (a & (w - 1));
            if (kind == UP && lane - a >= first) from = lane - a;
            if (kind == DOWN && lane + a < first + w) from = lane + a;
            if (kind == XOR && (lane ^ a) < first + w) from = lane ^ a;
            if (from < 0 || from > 31 || !(mask >> from & 1))
                die_at(place, "lane %d reads lane %d in %s, which is not in the mask %08x", lane, from, name, mask);
            lanes[lane]->result = lanes[from]->value;
        }
        part(m);
    }
    return mine.result;
}

template <class T, class F>
inline T reduce(const char* name, unsigned mask, T value, Place place, F combine) {
    Brought<T> mine = {value, value, 0, 0};
    Unseen emulator_work;
    if (Meeting* m = meet(name, place, mask, &mine)) {
        Brought<T>** lanes = (Brought<T>**)m->data;
        T all = lanes[lowest(mask)]->value;
        for (unsigned rest = mask & (mask - 1); rest; rest &= rest - 1) all = combine(all, lanes[lowest(rest)]->value);
        for (unsigned rest = mask; rest; rest &= rest - 1) lanes[lowest(rest)]->result = all;
        part(m);
    }
    return mine.result;
}

// Which lanes of the mask have a true predicate.
inline unsigned vote(const char* name, unsigned mask, bool predicate, Place place) {
    unsigned own = predicate && current ? 1u << current->lane : 0;
    return reduce(name, mask, own, place, [](unsigned a, unsigned b) { return a | b; });
}

}  // namespace emulator

inline void __syncwarp(unsigned mask = 0xffffffffu, emulator::Place place = EMULATOR_HERE) {
    emulator::sync_warp(mask, place);
}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, emulator::Place place = EMULATOR_HERE) {
    return emulator::shuffle(emulator::INDEXED, "__shfl_sync", mask, value, lane, width, place);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, emulator::Place place = EMULATOR_HERE) {
    return emulator::shuffle(emulator::UP, "__shfl_up_sync", mask, value, (int)delta, width, place);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                          emulator::Place place = EMULATOR_HERE) {
    return emulator::shuffle(emulator::DOWN, "__shfl_down_sync", mask, value, (int)delta, width, place);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, emulator::Place place = EMULATOR_HERE) {
    return emulator::shuffle(emulator::XOR, "__shfl_xor_sync", mask, value, lanes, width, place);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, emulator::Place place = EMULATOR_HERE) {
    return emulator::vote("__ballot_sync", mask, predicate, place);
}
inline int __any_sync(unsigned mask, int predicate, emulator::Place place = EMULATOR_HERE) {
    return emulator::vote("__any_sync", mask, predicate, place) != 0;
}
inline int __all_sync(unsigned mask, int predicate, emulator::Place place = EMULATOR_HERE) {
    return emulator::vote("__all_sync", mask, predicate, place) == mask;
}
#define EMULATOR_REDUCE(name, T, expression)                                                   \
    inline T name(unsigned mask, T value, emulator::Place place = EMULATOR_HERE) {             \
        return emulator::reduce(#name, mask, value, place, [](T a, T b) { return expression; }); \
    }
EMULATOR_REDUCE(__reduce_add_sync, unsigned, a + b)
EMULATOR_REDUCE(__reduce_add_sync, int, (int)((unsigned)a + (unsigned)b))
EMULATOR_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
EMULATOR_REDUCE(__reduce_min_sync, int, a < b ? a : b)
EMULATOR_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
EMULATOR_REDUCE(__reduce_max_sync, int, a > b ? a : b)
EMULATOR_REDUCE(__reduce_and_sync, unsigned, a & b)
EMULATOR_REDUCE(__reduce_or_sync, unsigned, a | b)
EMULATOR_REDUCE(__reduce_xor_sync, unsigned, a ^ b)

// Lanes of the mask that hold the same value.
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, emulator::Place place = EMULATOR_HERE) {
    struct Mine {
        T value;
        unsigned result;
    } mine = {value, 0};
    emulator::Unseen emulator_work;
    if (emulator::Meeting* m = emulator::meet("__match_any_sync", place, mask, &mine)) {
        Mine** lanes = (Mine**)m->data;
        for (unsigned i = 0; i < 32; i++)
            for (unsigned j = 0; j < 32; j++)
                if ((mask >> i & mask >> j & 1) && lanes[i]->value == lanes[j]->value) lanes[i]->result |= 1u << j;
        emulator::part(m);
    }
    return mine.result;
}

// ------------------------------------------------------------------------------------------------
// 3. Atomics

namespace emulator {

template <class T>
struct Plain {
    using Type = T;  // a parameter of this type is not used to deduce T
};

// *address = change(*address), atomically; returns the old value.
template <class T, class F>
EMULATOR_UNSEEN inline T atomic_change(T* address, Place place, F change) {
    using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
    static_assert(sizeof(T) == sizeof(Bits), "atomics take 16, 32 or 64 bits");
    Unseen emulator_work;
    if ((uintptr_t)address % sizeof(T))
        die_at(place, "an atomic operation at %p, which is not aligned to %zu bytes", (void*)address, sizeof(T));
    race_check(current, address, sizeof(T), ATOMIC, place);
    count_access(current, address, sizeof(T), ATOMIC, __builtin_return_address(0));
    Bits old_bits = __atomic_load_n((Bits*)address, __ATOMIC_RELAXED), new_bits;
    T old_value, new_value;
    do {
        memcpy((void*)&old_value, &old_bits, sizeof(T));
        new_value = change(old_value);
        memcpy(&new_bits, (void*)&new_value, sizeof(T));
    } while (
        !__atomic_compare_exchange_n((Bits*)address, &old_bits, new_bits, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
    return old_value;
}

}  // namespace emulator

#define EMULATOR_ATOMIC(name, expression)                                                                       \
    template <class T>                                                                                          \
    inline T name(T* address, typename emulator::Plain<T>::Type value, emulator::Place place = EMULATOR_HERE) { \
        return emulator::atomic_change(address, place, [value](T old) -> T {                                    \
            (void)old;                                                                                          \
            return (expression);                                                                                \
        });                                                                                                     \
    }
EMULATOR_ATOMIC(atomicAdd, old + value)
EMULATOR_ATOMIC(atomicSub, old - value)
EMULATOR_ATOMIC(atomicExch, value)
EMULATOR_ATOMIC(atomicMin, value < old ? value : old)
EMULATOR_ATOMIC(atomicMax, value > old ? value : old)
EMULATOR_ATOMIC(atomicAnd, old & value)
EMULATOR_ATOMIC(atomicOr, old | value)
EMULATOR_ATOMIC(atomicXor, old ^ value)
EMULATOR_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
EMULATOR_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)

template <class T>
inline T atomicCAS(T* address, typename emulator::Plain<T>::Type compare, typename emulator::Plain<T>::Type value,
                   emulator::Place place = EMULATOR_HERE) {
    return emulator::atomic_change(address, place,
                                   [compare, value](T old) -> T { return old == compare ? value : old; });
}

// ------------------------------------------------------------------------------------------------
// 4. Memory

inline size_t __cvta_generic_to_shared(const void* p) {
    emulator::Unseen emulator_work;
    return emulator::shared_address(p);
}

namespace emulator {
// These are instructions for global memory (ld.global, st.global), whatever variable the address is of.
inline void require_global(const void* p, const char* what) {
    Unseen emulator_work;
    static thread_local const Allocation* last;
    if (last == nullptr || (const char*)p < last->data || (const char*)p >= last->data + last->bytes) {
        last = allocation_at(p);
    }
    if (last == nullptr) die("%s: %s of an address that is not in global memory", running_text().c_str(), what);
}
}  // namespace emulator

#define EMULATOR_LOAD(name) \
    template <class T>      \
    EMULATOR_INLINE T name(const T* p) { return emulator::require_global(p, #name), *p; }
#define EMULATOR_STORE(name)                                                     \
    template <class T>                                                           \
    EMULATOR_INLINE void name(T* p, typename emulator::Plain<T>::Type value) {   \
        emulator::require_global(p, #name);                                      \
        *p = value;                                                              \
    }
EMULATOR_LOAD(__ldg)
EMULATOR_LOAD(__ldcg)
EMULATOR_LOAD(__ldcs)
EMULATOR_STORE(__stcg)
EMULATOR_STORE(__stcs)
EMULATOR_STORE(__stwb)

// ------------------------------------------------------------------------------------------------
// 5. Bits

namespace emulator {
template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a cast between types of one size");
    To to;
    memcpy((void*)&to, (const void*)&from, sizeof to);
    return to;
}
}  // namespace emulator

inline int __float_as_int(float x) { return emulator::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulator::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulator::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulator::bits<double>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
    return (unsigned)((((uint64_t)high << 32 | low) << (n & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (n & 31));
}
// Byte i of the result is byte (nibble i of the selector) of (b, a); the nibble's top bit replicates the byte's sign.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t both = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned which = selector >> 4 * i & 15, byte = (unsigned)(both >> 8 * (which & 7)) & 255;
        if (which & 8) byte = byte & 128 ? 255 : 0;
        result |= byte << 8 * i;
    }
    return result;
}

// ------------------------------------------------------------------------------------------------
// 6. Arithmetic
//
// The hardware's fast intrinsics are off by a few units in the last place, these are not: tests need tolerances.

// The C library has its own __expf and __logf, hence macros.
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __powf(x, y) powf(x, y)
#define __sincosf(x, s, c) sincosf(x, s, c)

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fmul_rn(float x, float y) { volatile float product = x * y; return product; }  // never contracted
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

inline int __float2int_rn(float x) { return (int)rintf(x); }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline int __float2int_ru(float x) { return (int)ceilf(x); }
inline long long __double2ll_rn(double x) { return (long long)rint(x); }

#define EMULATOR_MIN_MAX(A, B, T)                                              \
    inline T min(A a, B b) { return (T)a < (T)b ? (T)a : (T)b; }               \
    inline T max(A a, B b) { return (T)a > (T)b ? (T)a : (T)b; }
EMULATOR_MIN_MAX(int, int, int)
EMULATOR_MIN_MAX(unsigned, unsigned, unsigned)
EMULATOR_MIN_MAX(int, unsigned, unsigned)
EMULATOR_MIN_MAX(unsigned, int, unsigned)
EMULATOR_MIN_MAX(long, long, long)
EMULATOR_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMULATOR_MIN_MAX(long, unsigned long, unsigned long)
EMULATOR_MIN_MAX(unsigned long, long, unsigned long)
EMULATOR_MIN_MAX(long long, long long, long long)
EMULATOR_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }  // of a number and a NaN, returns the number
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// Arithmetic on 16 bits that NVIDIA's headers have for the device only.
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __float2bfloat16_rn(fmaf(__bfloat162float(a), __bfloat162float(b), __bfloat162float(c)));
}
inline __half __hfma(__half a, __half b, __half c) {
    return __float2half_rn(fmaf(__half2float(a), __half2float(b), __half2float(c)));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return __nv_bfloat162(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return __half2(__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y));
}

#endif  // EMULATOR_DEVICE_H
