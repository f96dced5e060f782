// kernels_b.cuh: the operations of kernels_cpu.h, sections 7 (one token) to 11, on the device.
//
//   1. shapes       how threads share elements; floats four at a time
//   2. gelu, swiglu
//   3. dropout
//   4. classifier   softmax + cross-entropy + gradient of the logits, in place
//   5. decode       attention of one token against a cache
//   6. sums         of floats, in double
//   7. casts
//   8. optimizer    updates
//
// All of them are bound by memory: what a kernel's comment counts is what it moves. dev/gelu.cu, dev/classifier.cu,
// dev/global_norm.cu and dev/adamw.cu are their ladders.

#ifndef LLMTRAIN_KERNELS_B_CUH
#define LLMTRAIN_KERNELS_B_CUH

#include "device.cuh"

#include <float.h>

// ------------------------------------------------------------------------------------------------
// 1. Shapes
//
// Kernels on flat arrays give each thread W neighbouring elements; the grid is one-dimensional and as large as it must
// be, since 2^31 blocks of 256 threads are more elements than any memory holds. Kernels on rows give each row to a
// block, which goes on to further rows where there are more than a grid may have blocks.

enum { FLAT_THREADS = 256, FOUR = 4 };

// Blocks for n elements, W to a thread; never 0, which a launch refuses.
static inline unsigned flat_blocks(size_t n, size_t W) {
    size_t threads = (n + W - 1) / W;
    return (unsigned)max_size(1, (threads + FLAT_THREADS - 1) / FLAT_THREADS);
}

static __device__ inline size_t flat_index(size_t W) { return ((size_t)blockIdx.x * blockDim.x + threadIdx.x) * W; }

static inline unsigned row_blocks(size_t rows) { return (unsigned)max_size(1, min_size(rows, 0x7fffffff)); }

// Threads for a row of n elements, W to a thread: whole warps, at most `most`.
static inline unsigned row_threads(size_t n, size_t W, size_t most) {
    return (unsigned)max_size(WARP, min_size(most, round_up((n + W - 1) / W, WARP)));
}

// W neighbouring elements of any type, W = FOUR or 1, moved by one instruction. Where arrays of floats and of floatX
// meet (casts, updates), four elements are 16 bytes of the one and 8 or 16 of the other, and one call's worth of random
// numbers.
template <typename T, int W>
struct alignas(W * sizeof(T)) Group {
    T x[W];
};

template <int W, typename T>
static __device__ inline Group<T, W> group_load(const T* p) { return *(const Group<T, W>*)p; }

template <int W, typename T>
static __device__ inline void group_store(T* p, Group<T, W> group) { *(Group<T, W>*)p = group; }

// The random bits of element j of a thread's W, where element 0 has the number `first`. Where W is not 1, `first` must
// be a multiple of 4: then one call of random4 serves four elements, since the compiler sees that their calls are the
// same.
template <int W>
static __device__ inline uint32_t group_random(uint64_t seed, RandomPurpose purpose, uint64_t step, uint64_t first,
                                               int j) {
    if constexpr (W == 1) return random_bits(seed, purpose, step, first + (uint64_t)j);
    return random4(seed, purpose, step, first / 4 + (uint64_t)(j / 4)).bits[j % 4];
}

// ------------------------------------------------------------------------------------------------
// 2. GELU and SwiGLU
//
// A thread owns PACK elements of the output. At 2 bytes an element Hopper's memory leaves time for some 35 instructions
// an element, so the division is the approximate one: within 2 units in the last place, and 0 instead of a number below
// 2^-126.

static __device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

// GELU of x is x times this: sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3).
static __device__ inline float gelu_sigmoid(float x) {
    return sigmoid(2.0f * 0.7978845608f * (x + 0.044715f * x * x * x));
}

// Moves 2 elements per output.
template <int W>
static __global__ void gelu_forward_kernel(floatX* out, const floatX* in, size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Lanes<W> x = lanes_load<W>(in + i);
    #pragma unroll
    for (int j = 0; j < W; j++) x.x[j] *= gelu_sigmoid(x.x[j]);
    lanes_store<W>(out + i, x);
}

// Moves 3 elements per output. din and dout may be the same array: a thread reads what it owns before it writes it.
template <int W>
static __global__ void gelu_backward_kernel(floatX* din, const floatX* dout, const floatX* in, size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Lanes<W> d = lanes_load<W>(dout + i), in_lanes = lanes_load<W>(in + i);
    #pragma unroll
    for (int j = 0; j < W; j++) {
        float x = in_lanes.x[j], s = gelu_sigmoid(x), du = 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
        d.x[j] *= s + 2.0f * x * s * (1.0f - s) * du;
    }
    lanes_store<W>(din + i, d);
}

// A block owns a row. Moves 3 elements per output.
template <int W>
static __global__ void swiglu_forward_kernel(floatX* out, const floatX* in, size_t N, size_t F) {
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        const floatX *gate = in + row * 2 * F, *up = gate + F;
        for (size_t f = (size_t)threadIdx.x * W; f < F; f += (size_t)blockDim.x * W) {
            Lanes<W> g = lanes_load<W>(gate + f), u = lanes_load<W>(up + f);
            #pragma unroll
            for (int j = 0; j < W; j++) u.x[j] *= g.x[j] * sigmoid(g.x[j]);
            lanes_store<W>(out + row * F + f, u);
        }
    }
}

// A block owns a row. Moves 5 elements per element of dout.
template <int W>
static __global__ void swiglu_backward_kernel(floatX* din, const floatX* dout, const floatX* in, size_t N, size_t F) {
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        const floatX *gate = in + row * 2 * F, *up = gate + F;
        floatX *dgate = din + row * 2 * F, *dup = dgate + F;
        for (size_t f = (size_t)threadIdx.x * W; f < F; f += (size_t)blockDim.x * W) {
            Lanes<W> g = lanes_load<W>(gate + f), u = lanes_load<W>(up + f), d = lanes_load<W>(dout + row * F + f);
            #pragma unroll
            for (int j = 0; j < W; j++) {
                float s = sigmoid(g.x[j]), dd = d.x[j];
                d.x[j] = dd * u.x[j] * s * (1.0f + g.x[j] * (1.0f - s));
                u.x[j] = dd * g.x[j] * s;
            }
            lanes_store<W>(dgate + f, d);
            lanes_store<W>(dup + f, u);
        }
    }
}

static inline void gelu_forward(floatX* out, const floatX* in, size_t n, Stream stream) {
    if (packs_fit(n, out, in, NULL, NULL))
        gelu_forward_kernel<PACK><<<flat_blocks(n, PACK), FLAT_THREADS, 0, stream->compute>>>(out, in, n);
    else
        gelu_forward_kernel<1><<<flat_blocks(n, 1), FLAT_THREADS, 0, stream->compute>>>(out, in, n);
    LAUNCH_CHECK();
}

static inline void gelu_backward(floatX* din, const floatX* dout, const floatX* in, size_t n, Stream stream) {
    if (packs_fit(n, din, dout, in, NULL))
        gelu_backward_kernel<PACK><<<flat_blocks(n, PACK), FLAT_THREADS, 0, stream->compute>>>(din, dout, in, n);
    else
        gelu_backward_kernel<1><<<flat_blocks(n, 1), FLAT_THREADS, 0, stream->compute>>>(din, dout, in, n);
    LAUNCH_CHECK();
}

static inline void swiglu_forward(floatX* out, const floatX* in, size_t N, size_t F, Stream stream) {
    bool packs = packs_fit(F, out, in, NULL, NULL);
    unsigned blocks = row_blocks(N), threads = row_threads(F, packs ? PACK : 1, FLAT_THREADS);
    if (packs) swiglu_forward_kernel<PACK><<<blocks, threads, 0, stream->compute>>>(out, in, N, F);
    else swiglu_forward_kernel<1><<<blocks, threads, 0, stream->compute>>>(out, in, N, F);
    LAUNCH_CHECK();
}

static inline void swiglu_backward(floatX* din, const floatX* dout, const floatX* in, size_t N, size_t F,
                                   Stream stream) {
    bool packs = packs_fit(F, din, dout, in, NULL);
    unsigned blocks = row_blocks(N), threads = row_threads(F, packs ? PACK : 1, FLAT_THREADS);
    if (packs) swiglu_backward_kernel<PACK><<<blocks, threads, 0, stream->compute>>>(din, dout, in, N, F);
    else swiglu_backward_kernel<1><<<blocks, threads, 0, stream->compute>>>(din, dout, in, N, F);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 3. Dropout

// A thread owns W elements; moves 2 per output. A quarter of random4's ten rounds is some 30 instructions an element,
// about what memory leaves time for; only where arrays do not fit packs does every element make a call of its own.
template <int W>
static __global__ void dropout_kernel(floatX* out, const floatX* in, uint32_t threshold, float scale, uint64_t seed,
                                      uint64_t place, uint64_t first, size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Lanes<W> x = lanes_load<W>(in + i);
    #pragma unroll
    for (int j = 0; j < W; j++) {
        uint32_t random = group_random<W>(seed, RANDOM_DROPOUT, place, first + i, j);
        x.x[j] = random < threshold ? 0.0f : x.x[j] * scale;
    }
    lanes_store<W>(out + i, x);
}

static inline void dropout(floatX* out, const floatX* in, float p, uint64_t seed, uint64_t place, uint64_t first,
                           size_t n, Stream stream) {
    uint32_t threshold = (uint32_t)(p * 4294967296.0);  // dropped if the random bits lie below
    float scale = 1.0f / (1.0f - p);
    if (packs_fit(n, out, in, NULL, NULL) && first % 4 == 0)
        dropout_kernel<PACK><<<flat_blocks(n, PACK), FLAT_THREADS, 0, stream->compute>>>(
            out, in, threshold, scale, seed, place, first, n);
    else
        dropout_kernel<1><<<flat_blocks(n, 1), FLAT_THREADS, 0, stream->compute>>>(
            out, in, threshold, scale, seed, place, first, n);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 4. Classifier
//
// A block owns a row of logits. It is read once for its maximum and its sum together, by "Online normalizer calculation
// for softmax": a thread whose maximum rises scales its sum down to the new one. The second reading, for the gradient,
// goes from the end to the beginning, so that it starts with what the cache still holds: the rows being worked on are
// some 30 MB, which is what the L2 cache keeps. So memory sees 2 elements per logit, and 1 where the loss alone is
// wanted.

enum { CLASSIFIER_THREADS = 1024 };

// Puts `value` where the columns from v on are padding, which may hold anything.
template <int W>
static __device__ inline void padding_set(Lanes<W>* x, int v, int V, float value) {
    if (v + W <= V) return;
    #pragma unroll
    for (int j = 0; j < W; j++) x->x[j] = v + j < V ? x->x[j] : value;
}

template <int W>
static __global__ void __launch_bounds__(CLASSIFIER_THREADS) classifier_kernel(
        floatX* logits, float* losses, const int32_t* targets, float dloss, size_t N, int V, int Vp) {
    __shared__ float shared[WARP];
    int first = (int)threadIdx.x * W, step = (int)blockDim.x * W;
    for (size_t row = blockIdx.x; row < N; row += gridDim.x) {
        floatX* x = logits + row * (size_t)Vp;
        int target = targets[row];
        if (target < 0) {
            Lanes<W> zero = {};
            if (threadIdx.x == 0) losses[row] = 0.0f;
            if (dloss != 0.0f) for (int v = first; v < Vp; v += step) lanes_store<W>(x + v, zero);
            continue;
        }
        // A maximum begins at the least finite number, not at minus infinity: no difference is infinity minus infinity.
        float target_logit = float_of(x[target]), maximum = -FLT_MAX, sum = 0.0f;
        int v = first;
        for (; v < Vp; v += step) {
            Lanes<W> logit = lanes_load<W>(x + v);
            float old = maximum;
            padding_set(&logit, v, V, -INFINITY);
            #pragma unroll
            for (int j = 0; j < W; j++) maximum = fmaxf(maximum, logit.x[j]);
            sum *= expf(old - maximum);
            #pragma unroll
            for (int j = 0; j < W; j++) sum += expf(logit.x[j] - maximum);
        }
        float row_maximum = block_max(maximum, shared);
        sum = block_sum(sum * expf(maximum - row_maximum), shared);
        if (threadIdx.x == 0) losses[row] = logf(sum) + (row_maximum - target_logit);
        if (dloss == 0.0f) continue;
        float scale = dloss / sum, target_probability = expf(target_logit - row_maximum) / sum;
        for (v -= step; v >= 0; v -= step) {
            Lanes<W> logit = lanes_load<W>(x + v);
            #pragma unroll
            for (int j = 0; j < W; j++) logit.x[j] = expf(logit.x[j] - row_maximum) * scale;
            padding_set(&logit, v, V, 0.0f);
            lanes_store<W>(x + v, logit);
            if (v <= target && target < v + W) x[target] = floatX_of((target_probability - 1.0f) * dloss);
        }
    }
}

static inline void classifier(floatX* logits, float* losses, const int32_t* targets, float dloss,
                              size_t N, size_t V, size_t Vp, Stream stream) {
    bool packs = packs_fit(Vp, logits, NULL, NULL, NULL);
    unsigned blocks = row_blocks(N), threads = row_threads(Vp, packs ? PACK : 1, CLASSIFIER_THREADS);
    if (packs)
        classifier_kernel<PACK><<<blocks, threads, 0, stream->compute>>>(
            logits, losses, targets, dloss, N, (int)V, (int)Vp);
    else
        classifier_kernel<1><<<blocks, threads, 0, stream->compute>>>(
            logits, losses, targets, dloss, N, (int)V, (int)Vp);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 5. Attention of one token
//
// A block owns a query head, its warps take the positions in turn: first the scores, then the sum of values under their
// softmax, which is put together from the warps at the end. A lane owns every 32nd element of a head. Sampling is the
// only user, one token at a time: a head for each block leaves most of a GPU idle, and is simple.

enum { DECODE_WARPS = 8 };

static __global__ void __launch_bounds__(DECODE_WARPS * WARP) attention_decode_kernel(
        floatX* out, floatX* key_cache, floatX* value_cache, float* scores, const floatX* qkv, float root,
        size_t position, size_t context, size_t H, size_t K, size_t D) {
    __shared__ float shared[WARP], sums[DECODE_WARPS][ATTENTION_MAX_D];
    const int STRIPS = ATTENTION_MAX_D / WARP;
    size_t h = blockIdx.x, kv = h / (H / K), warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const floatX *q = qkv + h * D, *new_key = qkv + (H + kv) * D, *new_value = qkv + (H + K + kv) * D;
    // One of the heads that share this key and value puts them into the caches; none of them reads them there.
    if (h % (H / K) == 0) {
        for (size_t d = threadIdx.x; d < D; d += blockDim.x) {
            key_cache[(position * K + kv) * D + d] = new_key[d];
            value_cache[(position * K + kv) * D + d] = new_value[d];
        }
    }
    float *score = scores + h * context, maximum = -FLT_MAX, total = 0.0f, sum[STRIPS] = {};
    for (size_t t = warp; t <= position; t += DECODE_WARPS) {
        const floatX* k = t == position ? new_key : key_cache + (t * K + kv) * D;
        float dot = 0.0f;
        for (size_t d = lane; d < D; d += WARP) dot += float_of(q[d]) * float_of(k[d]);
        dot = warp_sum(dot) / root;
        maximum = fmaxf(maximum, dot);
        if (lane == 0) score[t] = dot;
    }
    maximum = block_max(maximum, shared);  // its barriers show the scores to all threads, too
    for (size_t t = warp; t <= position; t += DECODE_WARPS) {
        const floatX* v = t == position ? new_value : value_cache + (t * K + kv) * D;
        float p = expf(score[t] - maximum);
        total += p;
        #pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
            size_t d = lane + (size_t)strip * WARP;
            if (d < D) sum[strip] += p * float_of(v[d]);
        }
    }
    #pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) sums[warp][lane + (size_t)strip * WARP] = sum[strip];
    total = block_sum(lane == 0 ? total : 0.0f, shared);
    for (size_t d = threadIdx.x; d < D; d += blockDim.x) {
        float weighted = 0.0f;
        for (int w = 0; w < DECODE_WARPS; w++) weighted += sums[w][d];
        out[h * D + d] = floatX_of(weighted / total);
    }
}

static inline void attention_decode(floatX* out, floatX* key_cache, floatX* value_cache, float* scores,
                                    const floatX* qkv, size_t position, size_t context, size_t H, size_t K, size_t D,
                                    Stream stream) {
    attention_decode_kernel<<<(unsigned)H, DECODE_WARPS * WARP, 0, stream->compute>>>(
        out, key_cache, value_cache, scores, qkv, sqrtf((float)D), position, context, H, K, D);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 6. Sums
//
// Two kernels: blocks sum pieces of the vector, then one block sums the pieces. Which elements a thread adds, and in
// which order, depends on the length and not on the GPU; nothing is left to the order in which blocks finish. Additions
// are in double, as on the CPU: the result is exact to about 15 digits however long the vector.

enum { SUM_THREADS = 256, SUM_BLOCKS = 4096 };

static inline size_t sum_of_squares_scratch_bytes(void) { return SUM_BLOCKS * sizeof(double); }
static inline size_t sum_scaled_scratch_bytes(void) { return sum_of_squares_scratch_bytes(); }

// block_sum of device.cuh for doubles; right in thread 0 alone. shared (32).
static __device__ inline double block_sum_double(double x, double* shared) {
    unsigned warps = blockDim.x / WARP, lane = threadIdx.x % WARP;
    for (int distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    if (lane == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    double total = 0.0;
    for (unsigned warp = 0; threadIdx.x == 0 && warp < warps; warp++) total += shared[warp];
    return total;
}

// pieces (gridDim.x): sums of x (n), or of its squares. A thread takes every so many-th group of W floats; the last n %
// W floats go to the first threads. Moves 4 bytes per element.
template <int W, bool SQUARES>
static __global__ void sum_pieces_kernel(double* pieces, const float* x, size_t n) {
    __shared__ double shared[WARP];
    size_t thread = flat_index(1), threads = (size_t)gridDim.x * blockDim.x, tail = n / W * W + thread;
    double sum = 0.0;
    #pragma unroll 4
    for (size_t i = thread; i < n / W; i += threads) {
        Group<float, W> group = group_load<W>(x + i * W);
        #pragma unroll
        for (int j = 0; j < W; j++) {
            double value = (double)group.x[j];
            sum += SQUARES ? value * value : value;
        }
    }
    if (tail < n) sum += SQUARES ? (double)x[tail] * (double)x[tail] : (double)x[tail];
    sum = block_sum_double(sum, shared);
    if (threadIdx.x == 0) pieces[blockIdx.x] = sum;
}

// out (1) = factor * the sum of pieces (count); adds: is added to it.
static __global__ void sum_finish_kernel(double* out, const double* pieces, unsigned count, double factor, bool adds) {
    __shared__ double shared[WARP];
    double sum = 0.0;
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) sum += pieces[i];
    sum = block_sum_double(sum, shared);
    if (threadIdx.x == 0) *out = (adds ? *out : 0.0) + factor * sum;
}

template <bool SQUARES>
static inline void sum_launch(double* out, const float* x, double factor, bool adds, size_t n, Stream stream) {
    double* pieces = (double*)device_scratch(stream, sum_of_squares_scratch_bytes());
    size_t threads = (n + FOUR - 1) / FOUR;
    unsigned blocks = (unsigned)max_size(1, min_size(SUM_BLOCKS, (threads + SUM_THREADS - 1) / SUM_THREADS));
    if ((uintptr_t)x % (FOUR * sizeof(float)) == 0)
        sum_pieces_kernel<FOUR, SQUARES><<<blocks, SUM_THREADS, 0, stream->compute>>>(pieces, x, n);
    else
        sum_pieces_kernel<1, SQUARES><<<blocks, SUM_THREADS, 0, stream->compute>>>(pieces, x, n);
    LAUNCH_CHECK();
    sum_finish_kernel<<<1, SUM_THREADS, 0, stream->compute>>>(out, pieces, blocks, factor, adds);
    LAUNCH_CHECK();
}

static inline void sum_of_squares(double* out, const float* x, size_t n, Stream stream) {
    sum_launch<true>(out, x, 1.0, false, n, stream);
}

static inline void sum_scaled(double* out, const float* x, double factor, size_t n, Stream stream) {
    sum_launch<false>(out, x, factor, true, n, stream);
}

// ------------------------------------------------------------------------------------------------
// 7. Casts
//
// A thread owns W elements; 4 + sizeof(floatX) bytes per element.

template <int W>
static __global__ void cast_to_float_kernel(float* out, const floatX* in, size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Group<floatX, W> x = group_load<W>(in + i);
    Group<float, W> y;
    #pragma unroll
    for (int j = 0; j < W; j++) y.x[j] = float_of(x.x[j]);
    group_store<W>(out + i, y);
}

template <int W>
static __global__ void cast_from_float_kernel(floatX* out, const float* in, size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Group<float, W> x = group_load<W>(in + i);
    Group<floatX, W> y;
    #pragma unroll
    for (int j = 0; j < W; j++) y.x[j] = floatX_of(x.x[j]);
    group_store<W>(out + i, y);
}

static inline void cast_to_float(float* out, const floatX* in, size_t n, Stream stream) {
    if (packs_fit(n, out, in, NULL, NULL))
        cast_to_float_kernel<FOUR><<<flat_blocks(n, FOUR), FLAT_THREADS, 0, stream->compute>>>(out, in, n);
    else
        cast_to_float_kernel<1><<<flat_blocks(n, 1), FLAT_THREADS, 0, stream->compute>>>(out, in, n);
    LAUNCH_CHECK();
}

static inline void cast_from_float(floatX* out, const float* in, size_t n, Stream stream) {
    if (packs_fit(n, out, in, NULL, NULL))
        cast_from_float_kernel<FOUR><<<flat_blocks(n, FOUR), FLAT_THREADS, 0, stream->compute>>>(out, in, n);
    else
        cast_from_float_kernel<1><<<flat_blocks(n, 1), FLAT_THREADS, 0, stream->compute>>>(out, in, n);
    LAUNCH_CHECK();
}

// ------------------------------------------------------------------------------------------------
// 8. Optimizer
//
// A thread owns W elements of every vector. AdamW with masters in 16 bits moves 30 bytes per parameter: weight, two
// moments and gradient in, weight, two moments and stored parameter out.

typedef struct {
    OptimizerStep step;
    float m_correction, v_correction;  // of AdamW's moments, for their start at 0
} OptimizerArguments;

// The formulas above optimizer_apply in kernels_cpu.h. What the kind does not keep stays as it is.
static __device__ inline void optimizer_element(float* w, float* m, float* v, float grad, const OptimizerArguments* a) {
    const OptimizerStep* o = &a->step;
    float g = grad * o->grad_scale, direction = g;
    if (o->kind == OPTIMIZER_ADAMW) {
        *m += (1.0f - o->beta1) * (g - *m);
        *v += (1.0f - o->beta2) * (g * g - *v);
        direction = *m * a->m_correction / (sqrtf(*v * a->v_correction) + o->epsilon);
    } else if (o->kind == OPTIMIZER_MOMENTUM) {
        direction = *m = o->beta1 * *m + g;
    } else if (o->kind == OPTIMIZER_LION) {
        float mixed = o->beta1 * *m + (1.0f - o->beta1) * g;
        direction = mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : mixed;  // 0 and NaN stay what they are
        *m = o->beta2 * *m + (1.0f - o->beta2) * g;
    }
    *w -= o->lr * (direction + o->weight_decay * *w);
}

template <int W>
static __global__ void optimizer_kernel(floatX* params, float* masters, float* m, float* v, const float* grads,
                                        OptimizerArguments a, uint64_t first, size_t n) {
    size_t i = flat_index(W);
    if (i >= n) return;
    Group<float, W> w, gm = {}, gv = {}, g = group_load<W>(grads + i);
    Group<floatX, W> p;
    if (masters) {
        w = group_load<W>(masters + i);
    } else {
        p = group_load<W>(params + i);
        #pragma unroll
        for (int j = 0; j < W; j++) w.x[j] = float_of(p.x[j]);
    }
    if (m) gm = group_load<W>(m + i);
    if (v) gv = group_load<W>(v + i);
    #pragma unroll
    for (int j = 0; j < W; j++) optimizer_element(&w.x[j], &gm.x[j], &gv.x[j], g.x[j], &a);
    if (m) group_store<W>(m + i, gm);
    if (v) group_store<W>(v + i, gv);
    if (masters) group_store<W>(masters + i, w);
    #pragma unroll
    for (int j = 0; j < W; j++) {
        if (masters || FLOATX_IS_FLOAT) {
            p.x[j] = floatX_of(w.x[j]);
        } else {
            uint32_t random = group_random<W>(a.step.seed, RANDOM_ROUNDING, a.step.step, first + i, j);
            p.x[j] = floatX_of_stochastic(w.x[j], random);
        }
    }
    group_store<W>(params + i, p);
}

static inline void optimizer_update(floatX* params, float* masters, float* m, float* v, const float* grads,
                                    const OptimizerStep* o, uint64_t first, size_t n, Stream stream) {
    OptimizerArguments a = {*o, 1.0f, 1.0f};
    if (o->kind == OPTIMIZER_ADAMW) {
        a.m_correction = (float)(1.0 / (1.0 - pow((double)o->beta1, (double)o->step)));
        a.v_correction = (float)(1.0 / (1.0 - pow((double)o->beta2, (double)o->step)));
    }
    if (packs_fit(n, params, masters, m, v) && packs_fit(n, grads, NULL, NULL, NULL) && first % 4 == 0)
        optimizer_kernel<FOUR><<<flat_blocks(n, FOUR), FLAT_THREADS, 0, stream->compute>>>(
            params, masters, m, v, grads, a, first, n);
    else
        optimizer_kernel<1><<<flat_blocks(n, 1), FLAT_THREADS, 0, stream->compute>>>(
            params, masters, m, v, grads, a, first, n);
    LAUNCH_CHECK();
}

#endif  // LLMTRAIN_KERNELS_B_CUH
