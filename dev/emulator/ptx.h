// ptx.h: the project's inline PTX, interpreted from the same strings that nvcc gets.
//
//   1. operands      of an asm statement
//   2. instructions  what each does
//   3. table         the known instructions, and the operands they take
//   4. programs      a string parsed once, checked at its first run
//
// An instruction that is not in the table ends the program: nothing is skipped. To add one, write its function in
// section 2 and its line in section 3, and test it in test_emulator.cu.

#ifndef EMULATOR_PTX_H
#define EMULATOR_PTX_H

namespace emulator {

// ------------------------------------------------------------------------------------------------
// 1. Operands

struct Operand {
    const char* constraint;  // "=f", "r" and so on
    void* address;
    size_t bytes;
};

template <class T>
EMULATOR_INLINE Operand output(const char* constraint, T& value) {
    return {constraint, (void*)&value, sizeof(T)};
}
template <class T>
EMULATOR_INLINE Operand input(const char* constraint, const T& value) {
    return {constraint, (void*)&value, sizeof(T)};
}

struct Argument {
    int operand;             // number of the operand, or -1 for:
    long immediate;
};

constexpr unsigned ARGUMENTS = 16;  // mma has 14

struct Instruction;

// What one lane passes to an instruction.
struct Lane {
    const Instruction* instruction;
    const Operand* operands;
    const Place* place;

    EMULATOR_UNSEEN void* at(unsigned argument) const;
    EMULATOR_UNSEEN uint32_t get(unsigned argument) const { return *(const uint32_t*)at(argument); }
    EMULATOR_UNSEEN float get_float(unsigned argument) const { return *(const float*)at(argument); }
    EMULATOR_UNSEEN long get_number(unsigned argument) const;
    EMULATOR_UNSEEN void set(unsigned argument, uint32_t value) const { *(uint32_t*)at(argument) = value; }
    EMULATOR_UNSEEN void set_float(unsigned argument, float value) const { *(float*)at(argument) = value; }
};

struct Known {
    const char* name;
    const char* operands;    // constraint of each; = before written ones; # is a number: n, r or immediate
    void (*run)(const Lane& lane);
    int variant;
};

struct Instruction {
    const Known* known;
    Argument arguments[ARGUMENTS];
    unsigned count;
};

EMULATOR_UNSEEN inline void* Lane::at(unsigned argument) const {
    return operands[instruction->arguments[argument].operand].address;
}

EMULATOR_UNSEEN inline long Lane::get_number(unsigned argument) const {
    const Argument& a = instruction->arguments[argument];
    if (a.operand < 0) return a.immediate;
    const Operand& o = operands[a.operand];
    if (o.bytes == 4) return *(const int32_t*)o.address;
    if (o.bytes == 8) return *(const int64_t*)o.address;
    return *(const unsigned char*)o.address;
}

// ------------------------------------------------------------------------------------------------
// 2. Instructions

// d = a b + c for a tile: a is 16 x K by rows, b K x 8 by columns, c and d are 16 x 8 floats, and each lane holds parts
// of them in registers ("PTX ISA", sections on mma.m16n8k16 and mma.m16n8k8). With group = lane / 4, member = lane % 4
// and P elements in a register, register i holds
//     a   row group + 8 (i & 1), columns (i >> 1) K/2 + member P ...
//     b   rows i K/2 + member P ..., column group
//     c   row group + 8 (i >> 1), column 2 member + (i & 1)
// Tensor cores have their own order of addition and rounding; here sums are in float, by ascending k.
enum MmaType { MMA_BF16, MMA_F16, MMA_TF32 };

// Element e of a register.
template <MmaType TYPE>
EMULATOR_UNSEEN inline float mma_element(uint32_t reg, unsigned e) {
    if (TYPE == MMA_TF32) return bits<float>(reg & 0xffffe000u);  // the hardware ignores the other bits
    uint32_t h = e ? reg >> 16 : reg & 0xffff;
    return TYPE == MMA_BF16 ? bits<float>(h << 16) : float_from_half(h);
}

template <MmaType TYPE>
EMULATOR_UNSEEN inline void mma_tile(Lane** lanes) {
    typedef float Row __attribute__((vector_size(32)));  // 8 floats, in the registers of any processor
    constexpr unsigned P = TYPE == MMA_TF32 ? 1 : 2, K = 8 * P;
    float a[16][K];
    union {
        float one[K][8];
        Row row[K];
    } b;
    union {
        float one[16][8];
        Row row[16];
    } c;
    for (unsigned lane = 0; lane < LANES; lane++) {
        const Lane& l = *lanes[lane];
        unsigned group = lane / 4, member = lane % 4;
        #pragma GCC unroll 4
        for (unsigned i = 0; i < 4; i++) {
            uint32_t reg = l.get(4 + i);
            #pragma GCC unroll 2
            for (unsigned e = 0; e < P; e++)
                a[group + 8 * (i & 1)][(i >> 1) * K / 2 + member * P + e] = mma_element<TYPE>(reg, e);
            c.one[group + 8 * (i >> 1)][2 * member + (i & 1)] = l.get_float(10 + i);
        }
        #pragma GCC unroll 2
        for (unsigned i = 0; i < 2; i++) {
            uint32_t reg = l.get(8 + i);
            #pragma GCC unroll 2
            for (unsigned e = 0; e < P; e++) b.one[i * K / 2 + member * P + e][group] = mma_element<TYPE>(reg, e);
        }
    }
    for (unsigned row = 0; row < 16; row++) {
        Row sum = c.row[row];
        #pragma GCC unroll 16
        for (unsigned k = 0; k < K; k++) sum += a[row][k] * b.row[k];
        c.row[row] = sum;
    }
    for (unsigned lane = 0; lane < LANES; lane++) {
        for (unsigned i = 0; i < 4; i++)
            lanes[lane]->set_float(i, c.one[lane / 4 + 8 * (i >> 1)][2 * (lane % 4) + (i & 1)]);
    }
}

EMULATOR_UNSEEN inline void run_mma(const Lane& lane) {
    MmaType type = (MmaType)lane.instruction->known->variant;
    if (Meeting* m = meet("mma.sync", *lane.place, ALL_LANES, (void*)&lane)) {
        if (type == MMA_BF16) mma_tile<MMA_BF16>((Lane**)m->data);
        if (type == MMA_F16) mma_tile<MMA_F16>((Lane**)m->data);
        if (type == MMA_TF32) mma_tile<MMA_TF32>((Lane**)m->data);
        part(m);
    }
}

// Loads matrices of 8 x 8 16-bit elements: lane 8 m + r has the address of row r of matrix m; lane l gets elements 2 (l
// % 4) and the next one of row l / 4 of each matrix, or of the transposed matrix.
constexpr int TRANSPOSED = 16;

EMULATOR_UNSEEN inline void run_ldmatrix(const Lane& lane) {
    int variant = lane.instruction->known->variant;
    unsigned count = (unsigned)(variant & ~TRANSPOSED);
    Meeting* meeting = meet("ldmatrix", *lane.place, ALL_LANES, (void*)&lane);
    if (meeting == nullptr) return;
    Lane** lanes = (Lane**)meeting->data;
    count_met(current->warp, meeting->arrived);
    for (unsigned matrix = 0; matrix < count; matrix++) {
        uint16_t x[8][8];
        for (unsigned row = 0; row < 8; row++) {
            unsigned owner = 8 * matrix + row;
            const char* p = shared_pointer(lanes[owner]->get(count), 16, *lane.place);
            if ((uintptr_t)p % 16)
                die_at(*lane.place, "ldmatrix: the address of lane %u is not aligned to 16 bytes", owner);
            const Thread* t = &block->threads[current->warp * LANES + owner];
            race_check(t, p, 16, READ, *lane.place);
            count_access(t, p, 16, LDMATRIX, current->ptx_from);
            memcpy(x[row], p, 16);
        }
        for (unsigned l = 0; l < LANES; l++) {
            unsigned row = l / 4, column = 2 * (l % 4);
            uint16_t low = variant & TRANSPOSED ? x[column][row] : x[row][column];
            uint16_t high = variant & TRANSPOSED ? x[column + 1][row] : x[row][column + 1];
            lanes[l]->set(matrix, low | (uint32_t)high << 16);
        }
    }
    part(meeting);
}

// cp.async [to], [from], bytes {, bytes read}
constexpr int SIXTEEN_ONLY = 1;

EMULATOR_UNSEEN inline void run_cp_async(const Lane& lane) {
    long bytes = lane.get_number(2), read = lane.instruction->count == 4 ? lane.get_number(3) : bytes;
    if (lane.instruction->known->variant == SIXTEEN_ONLY && bytes != 16)
        die_at(*lane.place, "cp.async.cg copies 16 bytes, not %ld", bytes);
    copy_start(lane.get(0), *(void**)lane.at(1), (unsigned)bytes, (unsigned)read, lane.place);
}

EMULATOR_UNSEEN inline void run_commit_group(const Lane&) { current->copy_group++; }
EMULATOR_UNSEEN inline void run_wait_group(const Lane& lane) { copy_wait(current, (int)lane.get_number(0)); }
EMULATOR_UNSEEN inline void run_wait_all(const Lane&) { copy_wait(current, -1); }

EMULATOR_UNSEEN inline void run_barrier(const Lane& lane) {
    unsigned expected = lane.instruction->count > 1 ? (unsigned)lane.get_number(1) : 0;
    barrier("bar.sync", *lane.place, (unsigned)lane.get_number(0), expected);
}

constexpr int FLUSH = 1;  // flushes subnormal numbers to 0

EMULATOR_UNSEEN inline void run_ex2(const Lane& lane) {
    float y = exp2f(lane.get_float(1));
    lane.set_float(0, lane.instruction->known->variant == FLUSH && y < 0x1p-126f ? 0.0f : y);
}

EMULATOR_UNSEEN inline void run_cvt_bf16x2(const Lane& lane) {
    __nv_bfloat162 both = __floats2bfloat162_rn(lane.get_float(2), lane.get_float(1));  // low half, high half
    lane.set(0, bits<uint32_t>(both));
}

EMULATOR_UNSEEN inline void run_cvt_f16x2(const Lane& lane) {
    __half2 both = __floats2half2_rn(lane.get_float(2), lane.get_float(1));
    lane.set(0, bits<uint32_t>(both));
}

EMULATOR_UNSEEN inline void run_cvt_tf32(const Lane& lane) { lane.set(0, bits_of_tf32(lane.get(1))); }

// ------------------------------------------------------------------------------------------------
// 3. Table

constexpr char MMA_OPERANDS[] = "=f=f=f=frrrrrrffff";

inline const Known known_ptx[] = {
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", MMA_OPERANDS, run_mma, MMA_BF16},
    {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", MMA_OPERANDS, run_mma, MMA_F16},
    {"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", MMA_OPERANDS, run_mma, MMA_TF32},
    {"ldmatrix.sync.aligned.m8n8.x1.shared.b16", "=rr", run_ldmatrix, 1},
    {"ldmatrix.sync.aligned.m8n8.x2.shared.b16", "=r=rr", run_ldmatrix, 2},
    {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", "=r=r=r=rr", run_ldmatrix, 4},
    {"ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16", "=rr", run_ldmatrix, 1 | TRANSPOSED},
    {"ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16", "=r=rr", run_ldmatrix, 2 | TRANSPOSED},
    {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "=r=r=r=rr", run_ldmatrix, 4 | TRANSPOSED},
    {"cp.async.ca.shared.global", "rl#", run_cp_async, 0},
    {"cp.async.ca.shared.global", "rl##", run_cp_async, 0},
    {"cp.async.cg.shared.global", "rl#", run_cp_async, SIXTEEN_ONLY},
    {"cp.async.cg.shared.global", "rl##", run_cp_async, SIXTEEN_ONLY},
    {"cp.async.commit_group", "", run_commit_group, 0},
    {"cp.async.wait_group", "#", run_wait_group, 0},
    {"cp.async.wait_all", "", run_wait_all, 0},
    {"bar.sync", "#", run_barrier, 0},
    {"bar.sync", "##", run_barrier, 0},
    {"barrier.sync", "#", run_barrier, 0},
    {"barrier.sync", "##", run_barrier, 0},
    {"ex2.approx.f32", "=ff", run_ex2, 0},
    {"ex2.approx.ftz.f32", "=ff", run_ex2, FLUSH},
    {"cvt.rn.bf16x2.f32", "=rff", run_cvt_bf16x2, 0},
    {"cvt.rn.f16x2.f32", "=rff", run_cvt_f16x2, 0},
    {"cvt.rna.tf32.f32", "=rf", run_cvt_tf32, 0},
};

// ------------------------------------------------------------------------------------------------
// 4. Programs

class Ptx {
  public:
    Ptx(const char* text, Place where) : place(where) {
        Unseen emulator_work;
        const char* p = text;
        while (*(p += strspn(p, " \t\n;"))) {
            size_t length = strcspn(p, ";");
            parse(std::string(p, length));
            p += length;
        }
    }

    EMULATOR_UNSEEN void run(std::initializer_list<Operand> operands) {
        Unseen emulator_work;
        if (!current) die_at(place, "PTX outside of a kernel");
        if (!checked.load(std::memory_order_relaxed)) check(operands.begin(), operands.size());
        current->ptx_from = __builtin_return_address(0);
        for (const Instruction& instruction : instructions) {
            Lane lane = {&instruction, operands.begin(), &place};
            instruction.known->run(lane);
        }
    }

  private:
    Place place;
    std::vector<Instruction> instructions;
    std::atomic<bool> checked{false};

    // One instruction: its name, then operands. Brackets of any kind only separate.
    void parse(const std::string& text) {
        size_t end = text.find_first_of(" \t\n{[%");
        std::string name = text.substr(0, end);
        for (const char* hint : {"::cta", ".L2::128B", ".L2::256B"}) {
            size_t found = name.find(hint);
            if (found != std::string::npos) name.erase(found, strlen(hint));
        }
        Instruction instruction = {};
        const char* p = end == std::string::npos ? "" : text.c_str() + end;
        while (*(p += strspn(p, " \t\n{}[],"))) {
            bool numbered = *p == '%';
            char* behind;
            long number = strtol(p + numbered, &behind, 0);
            if (behind == p + numbered || instruction.count == ARGUMENTS)
                die_at(place, "the emulator cannot read the operands of '%s'", text.c_str());
            instruction.arguments[instruction.count++] = numbered ? Argument{(int)number, 0} : Argument{-1, number};
            p = behind;
        }
        size_t wanted = 0;
        bool name_known = false;
        for (const Known& known : known_ptx) {
            if (name != known.name) continue;
            name_known = true;
            wanted = 0;
            for (const char* c = known.operands; *c; c++) wanted += *c != '=';
            if (wanted == instruction.count) instruction.known = &known;
        }
        if (!name_known)
            die_at(place, "the emulator does not know the PTX instruction '%s': add it to ptx.h", name.c_str());
        if (!instruction.known)
            die_at(place, "%s has %u operands; it takes %zu", name.c_str(), instruction.count, wanted);
        instructions.push_back(instruction);
    }

    // Checks that the statement's operands are what the instructions take.
    void check(const Operand* operands, size_t count) {
        for (const Instruction& instruction : instructions) {
            const char* letter = instruction.known->operands;
            for (unsigned i = 0; i < instruction.count; i++, letter++) {
                const char* name = instruction.known->name;
                bool written = *letter == '=';
                letter += written;
                const Argument& a = instruction.arguments[i];
                if (a.operand < 0) {
                    if (*letter != '#')
                        die_at(place, "operand %u of %s must be a register", i, name);
                    continue;
                }
                if ((size_t)a.operand >= count)
                    die_at(place, "%s uses %%%d, but the statement has %zu operands", name, a.operand, count);
                const Operand& o = operands[a.operand];
                bool writable = strchr("=+", o.constraint[0]) != nullptr;
                char kind = o.constraint[strlen(o.constraint) - 1];
                if (*letter == '#' ? !strchr("nri", kind) : kind != *letter)
                    die_at(place, "operand %u of %s is \"%s\"; it should be %c", i, name, o.constraint, *letter);
                if (written && !writable)
                    die_at(place, "%s writes operand %%%d, an input", name, a.operand);
                if (!written && o.constraint[0] == '=' && instructions.size() == 1)
                    die_at(place, "%s reads operand %%%d, which is only an output: use \"+%c\"", name, a.operand, kind);
                size_t bytes = kind == 'l' ? 8 : 4;
                if (strchr("rfl", kind) && o.bytes != bytes)
                    die_at(place, "operand %u of %s has %zu bytes; \"%c\" is for %zu", i, name, o.bytes, kind, bytes);
            }
        }
        checked.store(true, std::memory_order_relaxed);
    }
};

}  // namespace emulator

#define EMULATOR_PTX(text, ...)                                                     \
    do {                                                                            \
        static emulator::Ptx emulator_program(text, emulator::Place{__FILE__, __LINE__}); \
        emulator_program.run({__VA_ARGS__});                                        \
    } while (0)

#endif  // EMULATOR_PTX_H
