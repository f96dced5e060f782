// launches.h: with EMULATE_LAUNCHES=FILE a program's launches are written to FILE, and not run.
//
// So a program can be asked what it would launch at a size that no emulator runs: how often, on which grid, with how
// much dynamic shared memory. The device then has memory without end (pages that nothing touches cost none) and
// EMULATE_PROCESSORS multiprocessors; what kernels, memsets and matmuls would write stays zero. One JSON object a line:
//
//     {"kernel": 4242, "grid": [64, 1, 1], "threads": 128, "shared": 0, "arguments": [1, 0, 64, null]}
//     {"matmul": [M, N, K], "bytes": [A, B, C, D], "transposed": 1, "epilogue": 4, "beta": 1}
//     {"memset": bytes}
//
// `kernel` is the distance of its function from the program's first byte, by which `nm` has its name. An argument that
// is a number is written as it is, a pointer as whether it is one (0, 1), anything else as null. Matrices are those of
// cuBLASLt, by columns; `bytes` of one element each; C is read where beta is not 0;
// whether A is transposed.

#ifndef EMULATOR_LAUNCHES_H
#define EMULATOR_LAUNCHES_H

extern "C" char __executable_start;  // the linker's name for the program's first byte

namespace emulator {

inline FILE* launches_file() {
    static FILE* file = fopen(modes.launches, "w");
    if (file == nullptr) die("cannot write EMULATE_LAUNCHES=%s", modes.launches);
    return file;
}

template <class Argument>
inline void launches_argument(const char* separator, const Argument& argument) {
    FILE* file = launches_file();
    if constexpr (std::is_pointer_v<Argument>) fprintf(file, "%s%d", separator, argument != nullptr);
    else if constexpr (std::is_arithmetic_v<Argument>) fprintf(file, "%s%.17g", separator, (double)argument);
    else fprintf(file, "%snull", separator);
}

template <class... Arguments>
inline void launches_note(const void* function, dim3 grid, dim3 size, size_t dynamic_bytes,
                          const Arguments&... arguments) {
    const char* separator = "";
    fprintf(launches_file(), "{\"kernel\": %td, \"grid\": [%u, %u, %u], \"threads\": %u, \"shared\": %zu, "
            "\"arguments\": [", (const char*)function - &__executable_start, grid.x, grid.y, grid.z,
            size.x * size.y * size.z, dynamic_bytes);
    ((launches_argument(separator, arguments), separator = ", "), ...);
    fprintf(launches_file(), "]}\n");
}

}  // namespace emulator

#endif  // EMULATOR_LAUNCHES_H
