// launches.h: with EMULATE_LAUNCHES=FILE a program's launches are written to FILE instead of being run.
//
// This shows what a program would launch at a size that no emulator can run: how often, on which grid, with how much
// dynamic shared memory. The device then has unlimited memory (untouched pages cost nothing) and EMULATE_PROCESSORS
// multiprocessors; the results of kernels, memsets and matmuls stay zero. One JSON object per line:
//
//     {"kernel": 4242, "grid": [64, 1, 1], "threads": 128, "shared": 0, "arguments": [1, 0, 64, null]}
//     {"matmul": [M, N, K], "bytes": [A, B, C, D], "transposed": 1, "epilogue": 4, "beta": 1}
//     {"memset": bytes}
//
// `kernel` is the offset of its function from the program's first byte; `nm` gives its name. Numeric arguments are
// written as they are, pointers as whether they are set (0, 1), others as null. Matrices are cuBLASLt's, by columns;
// `bytes` are per element; C is read if beta is not 0; `transposed`: whether A is transposed.

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
