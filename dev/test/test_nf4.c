// test_nf4.c: weights in 4 bits (llmtrain/ops/nf4.h) against what bitsandbytes makes of the same numbers:
// dev/test/fixtures/nf4.safetensors, of dev/peers/finetune.py.
//
//   quantizing      codes, scales, the offset, codes of scales and their scales: to the bit; the offset of scales whose
//                   sum is rounded, to its rounding
//   dequantizing    floats, and floats rounded to bfloat16, with single and with double quantization: to the bit
//   ranges          any range has the same bits as the whole; 1, 2 and 3 threads too; nothing beyond it is written
//   again           what is dequantized and quantized again has the same codes
//   refused         NaN and infinities, by name and place
//   files           matrices that are written as bitsandbytes does are read to the bit (test_convert.c: its own files)
//   memory          the arrays of a layout do not overlap, fit exactly, and take 4.127 bits per weight
//
// operations.h tests nf4_dequantize for each storage dtype, on both backends.

#include "kernels_cpu.h"
#include "llmtrain/base/device_cpu.h"
#include "llmtrain/checkpoint/bnb.h"
#include "harness.h"
#include "whole_tensors.h"

static SafetensorsFile fixture;

// An array of the fixture; the caller frees it.
static void* array_of(const char* vector, const char* what, size_t* n) {
    Error error;
    const SafetensorsTensor* t = safetensors_find(&fixture, text_of("%s.%s", vector, what));
    need(t != NULL, "%s.%s in the fixture", vector, what);
    void* data = memory_allocate(t->bytes);
    need(data && safetensors_read(&fixture, t, data, t->bytes, NULL, &error), "%s.%s", vector, what);
    *n = t->bytes / dtype_bytes(t->type);
    return data;
}

// numbers() of finetune.py.
static void numbers(float* x, size_t n, uint32_t seed) {
    for (size_t i = 0; i < n; i++) {
        x[i] = 0.0f;
        for (uint32_t k = 0; k < 3; k++) {
            uint32_t bits = ((uint32_t)i + seed * 100003u + k * 50021u) * 2654435761u;
            bits = (bits ^ bits >> 15) * 2246822519u;
            bits = (bits ^ bits >> 13) * 3266489917u;
            x[i] += (float)(bits >> 16) / 65536.0f - 0.5f;
        }
    }
}

// The vectors of finetune.py.
typedef struct {
    const char* name;
    size_t n;
    uint32_t seed;
    bool exact;      // the sum of its scales is, in float
} Made;
static const Made VECTORS[] = {
    {"floats", 64 * 259 + 37, 1, false}, {"bf16", 64 * 90, 4, true}, {"zeros", 5 * 64, 3, false},
    {"middles", 62, 0, true}, {"tiny", 127, 5, false}, {"one", 1, 6, true}, {"seven", 7, 7, true},
    {"equal", 192, 0, true},
};

static float* made_of(const Made* v) {
    float* x = (float*)memory_allocate(v->n * sizeof(float));
    need(x != NULL, "memory");
    if (v->seed) numbers(x, v->n, v->seed);
    if (strcmp(v->name, "zeros") == 0) memset(x + 64, 0, 64 * sizeof(float));
    for (size_t i = 0; i < v->n; i++) {
        if (strcmp(v->name, "bf16") == 0) x[i] = float_from_bf16(bf16_from_float(x[i]));
        if (strcmp(v->name, "tiny") == 0) x[i] *= 0x1p-100f;
        if (strcmp(v->name, "equal") == 0) x[i] = 0.25f;
    }
    if (strcmp(v->name, "middles") != 0) return x;
    x[0] = 1.0f;
    for (size_t k = 0; k < 15; k++) {
        float middle = (NF4_TABLE.values[k] + NF4_TABLE.values[k + 1]) / 2.0f;
        x[1 + k] = middle;
        x[16 + k] = nextafterf(middle, 2.0f);
        x[31 + k] = nextafterf(middle, -2.0f);
    }
    for (size_t k = 0; k < 16; k++) x[46 + k] = NF4_TABLE.values[k];
    return x;
}

// checksum() of finetune.py.
static uint64_t checksum(const void* data, size_t n, size_t bytes) {
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = 0;
        memcpy(&bits, (const char*)data + i * bytes, bytes);
        sum += (i + 1) * (uint64_t)bits;
    }
    return sum;
}

// Whether elements are those of the fixture: the same bytes, or, of long arrays, the same checksum.
static void expect_array(const Made* v, const char* what, const void* data, size_t n, size_t bytes) {
    size_t there;
    void* wanted = array_of(v->name, what, &there);
    uint64_t sum = checksum(data, n, bytes), other;
    memcpy(&other, wanted, sizeof other);  // memory_allocate rounds up to 64 bytes
    if (there == 1 && n > 1) expect(sum == other, "%s.%s: another checksum", v->name, what);
    else expect(there == n && memcmp(wanted, data, n * bytes) == 0, "%s.%s: %zu elements differ", v->name, what, n);
    free(wanted);
}

// A layout in memory of exactly its size, for the sanitizers; the caller frees its codes.
static Nf4 laid_out(size_t n, bool doubled) {
    Nf4 q;
    memset(&q, 0, sizeof q);
    void* memory = calloc(1, nf4_bytes(n, doubled));
    need(memory != NULL, "memory");
    nf4_layout(&q, memory, n, doubled);
    return q;
}

static void test_numbers(const Made* v, const Nf4* q, bool doubled) {
    float* out = (float*)memory_allocate(v->n * sizeof(float));
    uint16_t* halves = (uint16_t*)memory_allocate(v->n * 2);
    floatX* stored = (floatX*)memory_allocate((v->n + 1) * sizeof(floatX));
    const char* kind = doubled ? "double" : "single";
    nf4_floats(out, q, 0, v->n);
    for (size_t i = 0; i < v->n; i++) halves[i] = bf16_from_float(out[i]);
    expect_array(v, text_of("%s_f32", kind), out, v->n, sizeof(float));
    expect_array(v, text_of("%s_bf16", kind), halves, v->n, 2);

    // Ranges: from any element, of any length, by 1 to 3 threads.
    size_t wrong = 0;
    for (size_t k = 0; k < 200; k++) {
        size_t first = k < 2 ? 0 : random_bits(1, RANDOM_TEST, v->n, 2 * k) % v->n;
        size_t n = k < 2 ? v->n : random_bits(1, RANDOM_TEST, v->n, 2 * k + 1) % (v->n - first + 1);
        memset(stored, 0xA5, (v->n + 1) * sizeof(floatX));
        threads_set(1 + k % 3);
        nf4_dequantize(stored, q, first, n, NULL);
        for (size_t i = 0; i < n; i++) {
            floatX whole = floatX_of(out[first + i]);
            wrong += memcmp(&stored[i], &whole, sizeof whole) != 0;
        }
        for (size_t b = 0; b < sizeof(floatX); b++) wrong += ((unsigned char*)(stored + n))[b] != 0xA5;
        float more[3] = {0.0f, 0.0f, 7.0f};
        nf4_floats(more, q, first, min_size(n, 2));
        wrong += memcmp(more, out + first, min_size(n, 2) * sizeof(float)) != 0 || more[2] != 7.0f;
    }
    expect(wrong == 0, "%s, %s: %zu elements of ranges differ", v->name, kind, wrong);

    Nf4 again = laid_out(v->n, false);
    Error error;
    need(nf4_quantize(&again, out, "again", &error), "%s", error.text);
    expect(memcmp(again.codes, q->codes, divide_up(v->n, 2)) == 0, "%s, %s: other codes when quantized again", v->name,
           kind);
    free(again.codes);
    free(out);
    free(halves);
    free(stored);
}

static void test_vectors_of_bitsandbytes(void) {
    double worst = 0.0;
    for (size_t i = 0; i < COUNT_OF(VECTORS); i++) {
        const Made* v = &VECTORS[i];
        Error error;
        size_t blocks = divide_up(v->n, 64), count;
        float *x = made_of(v), *nested = (float*)array_of(v->name, "nested", &count), offset = nested[count - 1];
        need(count == divide_up(blocks, 256) + 1, "%s: %zu scales of scales", v->name, count);
        Nf4 single = laid_out(v->n, false), doubled = laid_out(v->n, true);
        expect(nf4_quantize(&single, x, v->name, &error), "%s", error.text);
        expect_array(v, "codes", single.codes, divide_up(v->n, 2), 1);
        expect_array(v, "scales", single.scales, blocks, sizeof(float));
        test_numbers(v, &single, false);

        expect(nf4_quantize(&doubled, x, v->name, &error), "%s", error.text);
        expect_array(v, "codes", doubled.codes, divide_up(v->n, 2), 1);
        double found = (double)doubled.map[NF4_OFFSET], apart = fabs(found - (double)offset) / (double)offset;
        expect(v->exact ? found == (double)offset : apart <= sqrt((double)blocks) * 0x1p-24,
               "%s: offset %.9g, not %.9g", v->name, found, (double)offset);
        worst = apart > worst || isnan(apart) ? apart : worst;
        nf4_quantize_scales(&doubled, single.scales, offset);  // the scales less this one, to the bit
        expect_array(v, "scale_codes", doubled.scale_codes, blocks, 1);
        expect(memcmp(doubled.scales, nested, (count - 1) * sizeof(float)) == 0, "%s: other scales of scales", v->name);
        test_numbers(v, &doubled, true);
        free(single.codes);
        free(doubled.codes);
        free(nested);
        free(x);
    }
    check_bound(worst, sqrt(260.0) * 0x1p-24, "offsets: the mean of scales, added up in double; relative");
    verdict("codes, scales and numbers of %zu vectors are those of bitsandbytes, also in ranges and again",
            COUNT_OF(VECTORS));
}

static void test_refused(void) {
    enum { N = 300 };
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    float x[N];
    for (size_t k = 0; k < 12; k++) {
        Error error;
        size_t at = k < 3 ? 0 : k < 6 ? N - 1 : 64 * (k % 3) + 63;
        Nf4 q = laid_out(N, k % 2);
        numbers(x, N, 9);
        x[at] = bad[k % 3];
        if (k > 8) x[N - 1] = NAN;  // the first is reported
        bool done = nf4_quantize(&q, x, "block.0.qkv_weight", &error);
        expect(!done && strstr(error.text, text_of("block.0.qkv_weight cannot be quantized: element %zu of it", at)),
               "%zu: %s", k, done ? "quantized" : error.text);
        free(q.codes);
    }
    verdict("numbers that are not finite are refused by name and place");
}

// A matrix of more than one block of scales, quantized here and written as bitsandbytes does.
static void test_files(void) {
    enum { ROWS = 131, COLS = 150, N = ROWS * COLS, BLOCKS = (N + 63) / 64, GROUPS = (BLOCKS + 255) / 256 };
    static float x[N];
    numbers(x, N, 10);
    for (int doubled = 0; doubled < 2; doubled++) {
        Error error;
        SafetensorsWriter w;
        SafetensorsFile file;
        BnbWeight weight;
        Nf4 q = laid_out(N, doubled), again;
        need(nf4_quantize(&q, x, "w", &error), "%s", error.text);
        char state[300];
        snprintf(state, sizeof state, "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"float16\", \"shape\": "
                 "[%d, %d], \"nested_blocksize\": 256, \"nested_dtype\": \"float32\", \"nested_offset\": %.9g}", ROWS,
                 COLS, doubled ? (double)q.map[NF4_OFFSET] : 0.0);
        const struct { Dtype type; size_t n; const void* data; } parts[BNB_PARTS] = {
            {DTYPE_U8, N / 2, q.codes},
            {doubled ? DTYPE_U8 : DTYPE_F32, BLOCKS, doubled ? (void*)q.scale_codes : q.scales},
            {DTYPE_F32, 16, NF4_TABLE.values}, {DTYPE_F32, GROUPS, q.scales}, {DTYPE_F32, 256, q.map},
            {DTYPE_U8, strlen(state), state}};
        need(safetensors_create(&w, "nf4.safetensors", &error), "%s", error.text);
        for (int k = 0; k < 2 * BNB_PARTS; k++) {
            int part = k % BNB_PARTS;
            if (k == BNB_PARTS) need(safetensors_begin(&w, &error), "%s", error.text);
            if (!doubled && (part == BNB_NESTED || part == BNB_NESTED_NUMBERS)) continue;
            need(k < BNB_PARTS ? safetensors_declare(&w, text_of("w%s", BNB_SUFFIXES[part]), parts[part].type,
                                                     &parts[part].n, 1, &error)
                 : safetensors_write(&w, parts[part].data, parts[part].n * dtype_bytes(parts[part].type), &error), "%s",
                 error.text);
        }
        need(safetensors_end(&w, &error) && safetensors_open(&file, "nf4.safetensors", &error), "%s", error.text);
        safetensors_writer_free(&w);
        expect(bnb_is(&file, 1, "w") && !bnb_is(&file, 1, "w.absmax") && !bnb_is(&file, 1, "v"), "which are quantized");
        bool opened = bnb_open(&weight, &file, 1, "w", &error);
        if (expect(opened && bnb_read(&again, &weight, &file, &error), "%s", error.text)) {
            expect(weight.rows == ROWS && weight.cols == COLS && weight.dtype == DTYPE_F16 &&
                   weight.doubled == doubled &&
                   memcmp(again.codes, q.codes, nf4_bytes(N, doubled)) == 0,
                   "doubled %d: read as something else", doubled);
            free(again.codes);
        }
        safetensors_close(&file);
        free(q.codes);
    }
    verdict("matrices that are written as bitsandbytes does are read to the bit");
}

static void test_memory(void) {
    for (size_t n = 1; n < 70000; n += 1 + n / 3) {
        for (int doubled = 0; doubled < 2; doubled++) {
            Nf4 q = laid_out(n, doubled);
            size_t blocks = divide_up(n, 64), bytes = nf4_bytes(n, doubled);
            const unsigned char *ends[3] = {q.codes + divide_up(n, 2), (unsigned char*)(q.scales + blocks), NULL};
            if (doubled) {
                ends[1] = (unsigned char*)(q.scales + divide_up(blocks, 256));
                ends[2] = (unsigned char*)(q.map + 256);
                expect((unsigned char*)q.map >= ends[1] && q.scale_codes >= ends[2], "n = %zu: overlap", n);
                ends[1] = q.scale_codes + blocks;
            }
            expect((unsigned char*)q.scales >= ends[0] && ends[1] <= q.codes + bytes &&
                   ends[1] + 16 > q.codes + bytes && bytes % 16 == 0, "n = %zu, %d: %zu bytes", n, doubled, bytes);
            free(q.codes);
        }
    }
    double n = 4096.0 * 4096.0, bits = 8.0 * (double)nf4_bytes((size_t)n, true) / n;
    double single = 8.0 * (double)nf4_bytes((size_t)n, false) / n;
    expect(fabs(bits - 4.1275) < 0.001 && single == 4.5, "%.4f and %.4f bits", bits, single);
    verdict("arrays do not overlap and end with their memory; a weight of 4096 x 4096 takes %.4f bits", bits);
}

int main(void) {
    Error error;
    tests_begin("test_nf4");
    need(safetensors_open(&fixture, "dev/test/fixtures/nf4.safetensors", &error), "%s", error.text);
    test_vectors_of_bitsandbytes();
    test_refused();
    test_memory();
    safetensors_close(&fixture);
    root_enter();
    test_files();
    return tests_end();
}
