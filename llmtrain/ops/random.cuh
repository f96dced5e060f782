// random.cuh: random bits for several neighboring elements at a time (base.h has the generator).

#ifndef LLMTRAIN_RANDOM_CUH
#define LLMTRAIN_RANDOM_CUH

#include "base.h"

// The random bits of element j of a thread's W, where element 0 has index `first`. If W is not 1, `first` must be a
// multiple of 4: then one call of random4 serves four elements, since the compiler sees that their calls are the
// same.
template <int W>
static __device__ inline uint32_t group_random(uint64_t seed, RandomPurpose purpose, uint64_t step, uint64_t first,
                                               int j) {
    if constexpr (W == 1) return random_bits(seed, purpose, step, first + (uint64_t)j);
    return random4(seed, purpose, step, first / 4 + (uint64_t)(j / 4)).bits[j % 4];
}

#endif  // LLMTRAIN_RANDOM_CUH
