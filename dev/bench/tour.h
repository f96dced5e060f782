// tour.h: prints one training step as a tour: each operation in order, what it read and wrote, and what it cost.
//
// bench.c times each operation by a macro over its name, which also lists the operation's arrays: READ("in", M, K),
// READ_IF(bias, "bias", N), WROTE("out", out, M, N). Between tour_begin and tour_end each call prints
//
//   matmul_forward                786k FLOP  77.8k bytes    0.013 ms   from in (128, 32), weight (96, 32), bias (96)
//       out (128, 96)                            mean     0.0152   std     0.635
//
// Mean and standard deviation are over the whole array after the call; a weight gradient includes all calls so far.
// Section lines are triggered by the buckets that the model's code waits for and ends.

typedef struct {
    const char* name;      // NULL: this call has no such array
    const void* data;      // NULL: the array is only read
    size_t element_bytes;  // 2 floatX, 4 float, 8 double
    size_t shape[4];       // and zeros
} TourArray;

#define READ(name, ...) {name, NULL, 0, {__VA_ARGS__}}
#define READ_IF(there, name, ...) {(there) ? name : NULL, NULL, 0, {__VA_ARGS__}}
#define WROTE(name, data, ...) {(data) ? name : NULL, data, sizeof *(data), {__VA_ARGS__}}

static struct {
    const Parameters* parameters;  // NULL: no tour is running
    char section[48];
    size_t operations, arrays, not_finite;
} tour;

// The tensor that begins at an offset of the flat vector.
static const Tensor* tour_tensor(size_t offset) {
    const Tensor* t = tour.parameters->tensors;
    while (t->offset != offset) t++;
    return t;
}

// ------------------------------------------------------------------------------------------------
// Sections

// The section's name may hold one %zu, for `block`.
static void tour_enter(const char* format, size_t block) {
    char section[sizeof tour.section];
    snprintf(section, sizeof section, format, block);
    if (tour.parameters == NULL || strcmp(tour.section, section) == 0) return;
    memcpy(tour.section, section, sizeof section);
    printf("\n%s\n", section);
}

// Called before model_forward uses a bucket, one of `count`.
static void tour_await(size_t bucket, size_t count) {
    if (strncmp(tour.section, "backward", 8) == 0) return;  // where parameters of ZeRO 3 are gathered again
    tour_enter(bucket == 0 ? "forward, embeddings" : bucket + 1 < count ? "forward, block %zu" : "forward, final norm",
               bucket - 1);
}

// A bucket ends: the backward continues with the one before it.
static void tour_end_bucket(size_t bucket) {
    tour_enter(bucket > 1 ? "backward, block %zu" : bucket == 1 ? "backward, embeddings" : "loss", bucket - 2);
}

// Sections that begin without a bucket.
static void tour_enter_by_operation(const char* name) {
    bool after_norm = strcmp(tour.section, "forward, final norm") == 0, in_head = strcmp(tour.section, "head") == 0;
    if (strcmp(name, "matmul_forward") == 0 && after_norm) tour_enter("head", 0);
    if (strcmp(name, "fill_zero") == 0 && in_head) tour_enter("backward, final norm", 0);
    if (strcmp(name, "optimizer_update") == 0) tour_enter("update", 0);
}

// ------------------------------------------------------------------------------------------------
// Operations

// "name (128, 32)"
static const char* tour_describe(char text[80], const TourArray* a) {
    int used = snprintf(text, 60, "%.30s (%zu", a->name, a->shape[0]);
    for (int i = 1; i < 4 && a->shape[i]; i++) used += snprintf(text + used, 80 - (size_t)used, ", %zu", a->shape[i]);
    strcpy(text + used, ")");
    return text;
}

// "786k"
static const char* tour_number(char text[16], double number) {
    static const char* const units[] = {"", "k", "M", "G", "T"};
    int unit = 0;
    for (; number >= 999.5 && unit < 4; unit++) number /= 1000;
    snprintf(text, 16, "%.*f%s", number < 99.95 && unit > 0, number, units[unit]);
    return text;
}

static double tour_element(const TourArray* a, size_t i) {
    if (a->element_bytes == 8) return ((const double*)a->data)[i];
    return a->element_bytes == 4 ? ((const float*)a->data)[i] : float_of(((const floatX*)a->data)[i]);
}

static void tour_print_written(const TourArray* a) {
    char text[80];
    size_t n = 1;
    double mean = 0, squares = 0;
    for (int i = 0; i < 4 && a->shape[i]; i++) n *= a->shape[i];
    for (size_t i = 0; i < n; i++) mean += tour_element(a, i) / (double)n;
    for (size_t i = 0; i < n; i++) squares += pow(tour_element(a, i) - mean, 2);
    printf("      %-40s mean %10.3g   std %9.3g\n", tour_describe(text, a), mean, sqrt(squares / (double)n));
    tour.arrays++;
    tour.not_finite += !isfinite(squares);
}

static void tour_print(const char* name, double flops, double bytes, double ms, const TourArray* arrays, size_t count) {
    char text[80], flops_text[16], bytes_text[16];
    const char* separator = "   from";
    tour_enter_by_operation(name);
    tour.operations++;
    printf("  %-27s %6s FLOP %6s bytes %8.3f ms", name, tour_number(flops_text, flops),
           tour_number(bytes_text, bytes), ms);
    for (size_t i = 0; i < count; i++) {
        if (arrays[i].name == NULL || arrays[i].data != NULL) continue;
        printf("%s %s", separator, tour_describe(text, &arrays[i]));
        separator = ",";
    }
    putchar('\n');
    for (size_t i = 0; i < count; i++)
        if (arrays[i].name != NULL && arrays[i].data != NULL) tour_print_written(&arrays[i]);
}

static void tour_begin(const Parameters* parameters) {
    memset(&tour, 0, sizeof tour);
    tour.parameters = parameters;
    tour_enter("begin: the sums of the step are zero", 0);
}

static bool tour_end(Error* error) {
    tour.parameters = NULL;
    printf("\n%zu operations wrote %zu arrays, %zu of them with elements that are not finite\n", tour.operations,
           tour.arrays, tour.not_finite);
    return tour.not_finite == 0 || fail_with(error, "the step computed numbers that are not finite; report it");
}
