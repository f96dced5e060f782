// count.h: how well a kernel uses memory: 32-byte sectors per request of global memory, wavefronts per request of
// shared memory, for each kernel and line of the source. A part of the race build (race.h): its hooks see each access.
//
//     EMULATE_COUNT=counts.jsonl build/emulated-count-BF16-ladders layernorm --channels 768
//
// appends a line of JSON for each instruction of each kernel to the file when the program ends:
//
//     {"kernel": "softmax<8>", "file": "kernels.cuh", "line": 812, "via": "llmtrain/ops/types.h:229",
//      "space": "global", "kind": "load", "requests": 96, "bytes": 49152, "sectors": 1536, "ideal": 1536}
//     {..., "space": "shared", "kind": "ldmatrix", "requests": 64, "bytes": 32768, "wavefronts": 256, "ideal": 256}
//     {"kernel": "softmax<8>", "kind": "launch", "launches": 1, "blocks": 96, "threads": 128}
//
// file and line are those of the kernel itself; via is the line of the access, if it is in a function that the kernel
// calls. Kinds: load, store, atomic, cp.async (a line for the load from global memory, one for the store to shared),
// ldmatrix. dev/gpu/sectors.sh tabulates it. In C++, count_totals has the sums so far, which ladders print per rung.
//
// A request is what one instruction of a warp accesses in one execution. A lane's accesses are numbered per
// instruction, since all lanes last met (at a barrier, a shuffle, an mma); the lanes' n-th accesses form one request.
// An instruction is identified by its address and the calls that led there, so that a function called from several
// lines of a kernel counts for each line. A request is complete, and only its sums are kept, when all lanes have made
// the access, or when they meet. A warp has at most REQUESTS_AHEAD incomplete ones; then its lanes wait for others.
//
// Sectors: the 32-byte pieces of memory that a request touches, each once ("Nsight Compute", Kernel Profiling Guide:
// a request is served in sectors of 32 bytes of lines of 128). Ideal: the bytes that it touches / 32, rounded up.
//
// Wavefronts: shared memory has 32 banks of 4 bytes; word w lies in bank w % 32. Accesses to different words of a bank
// take a wavefront each; the same word is broadcast ("CUDA C++ Programming Guide", shared memory of compute
// capabilities 5.x and later). 8-byte accesses are served one half-warp at a time, 16-byte ones one quarter-warp, and
// so is ldmatrix, where the 8 rows of a matrix form a quarter ("cuTENSOR: high-performance tensor operations in CUDA",
// S9593 at GTC 2019, phases). Ideal: one per such part with an active lane. Atomics to the same word are serialized.
// (Hardware serves some 8-byte requests, broadcasts for instance, in fewer wavefronts than counted here.)
//
// The CPU compiler may load a value twice, or once for two uses, where a GPU compiler does not: dev/gpu/resources.sh
// reads the GPU's machine code. The counts are those of the source, with structs loaded and stored as a whole, 16 bytes
// at a time, if the program is compiled with -fno-tree-sra (otherwise g++ splits them). Not counted: local memory,
// constants, the effect of caches.

#ifndef EMULATOR_COUNT_H
#define EMULATOR_COUNT_H

#include <deque>
#include <unordered_map>

namespace emulator {

constexpr size_t REQUESTS_AHEAD = 4096;  // incomplete requests of a warp, at most
constexpr size_t SECTOR_BYTES = 32, BANKS = 32, WORD_BYTES = 4, WIDEST = 16;

struct CountTally {
    uint64_t requests, bytes, units, ideal;  // units: sectors or wavefronts
};
inline CountTally count_totals[2];           // global memory, shared memory; so far

// A call, or an instruction that accesses memory; its parent is the call of the function that it is in. The roots are
// the kernels, by their addresses.
struct CountNode {
    uint32_t parent;
    const void* pc;                          // its return address
    bool shared;
    Access kind;
    unsigned piece;                          // which 16 bytes of a larger access
    CountTally tally;
    std::vector<uint32_t> children;
};
inline std::vector<CountNode> count_nodes(1);  // the first one is the parent of the kernels

struct CountRequest {
    uint32_t lanes;                          // that have made it
    uint8_t bytes[LANES];                    // 0 for inactive lanes
    uintptr_t address[LANES];
};

// One instruction in one warp.
struct CountPending {
    uint32_t node;
    bool listed;                             // in CountWarp::listed
    uint32_t complete, executed[LANES];      // requests; how often each lane has executed it
    std::deque<CountRequest> requests;       // from number `complete` on
};
struct CountWarp {
    std::unordered_map<uint32_t, CountPending> pending;  // by node, of this launch
    std::vector<CountPending*> listed;       // executed since all lanes last met
    size_t requests;                         // incomplete ones
    uint64_t accesses;
};
inline CountWarp count_warps[WARPS];

struct CountLaunches {
    uint64_t launches, blocks;
    unsigned threads;                        // per block, at most
};
inline std::map<const void*, CountLaunches> count_launches;  // by kernel

EMULATOR_UNSEEN inline uint32_t count_node(uint32_t parent, const void* pc, bool shared, Access kind, unsigned piece) {
    for (uint32_t child : count_nodes[parent].children) {
        const CountNode& n = count_nodes[child];
        if (n.pc == pc && n.shared == shared && n.kind == kind && n.piece == piece) return child;
    }
    uint32_t fresh = (uint32_t)count_nodes.size();
    count_nodes.push_back(CountNode{parent, pc, shared, kind, piece, {}, {}});
    count_nodes[parent].children.push_back(fresh);
    return fresh;
}

// ------------------------------------------------------------------------------------------------
// Requests

EMULATOR_UNSEEN inline void count_sectors(CountTally* tally, const CountRequest& r) {
    std::pair<uintptr_t, uintptr_t> pieces[LANES];  // begin, end
    size_t n = 0;
    for (unsigned lane = 0; lane < LANES; lane++)
        if (r.lanes >> lane & 1 && r.bytes[lane]) pieces[n++] = {r.address[lane], r.address[lane] + r.bytes[lane]};
    std::sort(pieces, pieces + n);
    uintptr_t end = 0, next_sector = 0;
    uint64_t touched = 0;
    for (size_t i = 0; i < n; i++) {
        uintptr_t from = std::max(pieces[i].first, end), to = pieces[i].second;
        uintptr_t first = std::max(pieces[i].first / SECTOR_BYTES, next_sector), last = (to - 1) / SECTOR_BYTES;
        if (to > from) touched += to - from;
        if (last + 1 > first) tally->units += last + 1 - first;
        end = std::max(end, to);
        next_sector = std::max(next_sector, last + 1);
    }
    tally->ideal += (touched + SECTOR_BYTES - 1) / SECTOR_BYTES;
}

EMULATOR_UNSEEN inline void count_wavefronts(CountTally* tally, const CountRequest& r, bool atomic) {
    size_t widest = WORD_BYTES;
    for (unsigned lane = 0; lane < LANES; lane++)
        if (r.lanes >> lane & 1) widest = std::max(widest, (size_t)r.bytes[lane]);
    unsigned together = (unsigned)(LANES * WORD_BYTES / widest);
    for (unsigned from = 0; from < LANES; from += together) {
        uintptr_t words[2 * LANES];
        size_t n = 0;
        for (unsigned lane = from; lane < from + together; lane++) {
            if (!(r.lanes >> lane & 1) || !r.bytes[lane]) continue;
            uintptr_t last = (r.address[lane] + r.bytes[lane] - 1) / WORD_BYTES;
            for (uintptr_t word = r.address[lane] / WORD_BYTES; word <= last; word++) words[n++] = word;
        }
        if (n == 0) continue;
        std::sort(words, words + n);
        if (!atomic) n = (size_t)(std::unique(words, words + n) - words);
        unsigned in_bank[BANKS] = {}, most = 0;
        for (size_t i = 0; i < n; i++) most = std::max(most, ++in_bank[words[i] % BANKS]);
        tally->units += most;
        tally->ideal++;
    }
}

EMULATOR_UNSEEN inline void count_request(CountNode* node, const CountRequest& r) {
    CountTally tally = {};
    for (unsigned lane = 0; lane < LANES; lane++) tally.bytes += r.lanes >> lane & 1 ? r.bytes[lane] : 0;
    if (tally.bytes == 0) return;
    tally.requests = 1;
    if (node->shared) count_wavefronts(&tally, r, node->kind == ATOMIC);
    else count_sectors(&tally, r);
    for (CountTally* sum : {&node->tally, &count_totals[node->shared]}) {
        sum->requests += tally.requests;
        sum->bytes += tally.bytes;
        sum->units += tally.units;
        sum->ideal += tally.ideal;
    }
}

EMULATOR_UNSEEN inline void count_first(CountWarp* w, CountPending* p) {
    count_request(&count_nodes[p->node], p->requests.front());
    p->requests.pop_front();
    p->complete++;
    w->requests--;
}

// No lane of the warp will add to its requests so far: they are complete.
EMULATOR_UNSEEN inline void count_complete(unsigned warp) {
    CountWarp* w = &count_warps[warp];
    for (CountPending* p : w->listed) {
        while (!p->requests.empty()) count_first(w, p);
        memset(p->executed, 0, sizeof p->executed);
        p->complete = 0;
        p->listed = false;
    }
    w->listed.clear();
}

EMULATOR_UNSEEN inline void count_met(unsigned warp, unsigned lanes) {
    if (counting && (lanes | block->warps[warp].returned) == ALL_LANES) count_complete(warp);
}

EMULATOR_UNSEEN inline void count_record(const Thread* t, uint32_t node, uintptr_t address, size_t bytes) {
    CountWarp* w = &count_warps[t->warp];
    CountPending* p = &w->pending[node];
    p->node = node;
    size_t nth = p->executed[t->lane] - p->complete;
    while (nth == p->requests.size() && w->requests >= REQUESTS_AHEAD) {
        uint64_t accesses = w->accesses;
        block->warps[t->warp].ready |= 1u << t->lane;
        wait();
        if (w->accesses == accesses) count_complete(t->warp);  // no progress: the others wait for a meeting
        nth = p->executed[t->lane] - p->complete;
    }
    if (nth == p->requests.size()) {
        p->requests.push_back(CountRequest{});
        w->requests++;
    }
    if (!p->listed) w->listed.push_back(p);
    p->listed = true;
    w->accesses++;
    p->executed[t->lane]++;
    CountRequest& r = p->requests[nth];
    r.lanes |= 1u << t->lane;
    r.bytes[t->lane] = (uint8_t)bytes;
    r.address[t->lane] = address;
    if ((r.lanes | block->warps[t->warp].returned) == ALL_LANES && nth == 0) count_first(w, p);
}

// Thread t touches memory: by the instruction before pc.
EMULATOR_UNSEEN inline void count_access(const Thread* t, const void* where, size_t bytes, Access kind,
                                         const void* pc) {
    if (!counting) return;
    const char* address = (const char*)where;
    bool shared = address >= block->arena && address < block->arena + ARENA_BYTES;
    static const Allocation* last;
    if (!shared && bytes > 0) {
        if (!last || address < last->data || address >= last->data + last->bytes) last = allocation_at(address);
        if (!last) return;  // constants, variables of the host
    }
    for (unsigned piece = 0; piece == 0 || bytes > 0; piece++) {
        size_t now = bytes;
        if (bytes > WIDEST || (bytes & (bytes - 1))) {
            now = WIDEST;
            while (now > bytes || (uintptr_t)address % now) now /= 2;
        }
        count_record(t, count_node(t->path, pc, shared, kind, piece), (uintptr_t)address, now);
        address += now;
        bytes -= now;
    }
}

// ------------------------------------------------------------------------------------------------
// Calls, blocks, launches

EMULATOR_UNSEEN inline void count_call(const void* pc) {
    if (!counting || unseen || !current) return;
    unseen = true;
    current->path = count_node(current->path, pc, false, READ, 0);
    unseen = false;
}

EMULATOR_UNSEEN inline void count_return() {
    if (!counting || unseen || !current) return;
    unseen = true;
    current->path = count_nodes[current->path].parent;
    unseen = false;
}

EMULATOR_UNSEEN inline void count_new_launch(uint64_t blocks, unsigned threads) {
    if (!counting) return;
    for (CountWarp& w : count_warps) w.pending.clear();
    CountLaunches& l = count_launches[launch.function];
    l.launches++;
    l.blocks += blocks;
    l.threads = std::max(l.threads, threads);
}

EMULATOR_UNSEEN inline void count_block_begin() {
    if (!counting) return;
    uint32_t kernel = count_node(0, launch.function, false, READ, 0);
    for (unsigned i = 0; i < block->count; i++) block->threads[i].path = kernel;
}

EMULATOR_UNSEEN inline void count_block_end() {
    if (!counting) return;
    for (unsigned w = 0; w < WARPS; w++) count_complete(w);
}

// ------------------------------------------------------------------------------------------------
// The file

struct CountFrame {
    std::string function, place;
};

// What addr2line reports for each address: the functions inlined there, the innermost first.
inline std::map<const void*, std::vector<CountFrame>> count_frames(const std::vector<const void*>& addresses) {
    constexpr size_t AT_ONCE = 1000;  // a command line has a maximum length
    std::map<const void*, std::vector<CountFrame>> frames;
    char here[4096];
    std::string root = getcwd(here, sizeof here) ? std::string(here) + "/" : "/";
    for (size_t i = 0; i < addresses.size(); i += AT_ONCE) {
        std::string command = "addr2line -afiC -e /proc/" + std::to_string(getpid()) + "/exe";
        char text[4096];
        for (size_t j = i; j < std::min(i + AT_ONCE, addresses.size()); j++) {
            snprintf(text, sizeof text, " %p", addresses[j]);
            command += text;
        }
        FILE* pipe = popen(command.c_str(), "r");
        if (!pipe) die("cannot start addr2line, of binutils, which names the lines of EMULATE_COUNT");
        const void* address = nullptr;
        for (bool function = true; fgets(text, sizeof text, pipe);) {
            text[strcspn(text, "\n")] = 0;
            if (strncmp(text, "0x", 2) == 0) {
                address = (const void*)strtoull(text, nullptr, 16);
                function = true;
                continue;
            }
            if (function) {
                frames[address].push_back({text, ""});
            } else {
                char* discriminator = strstr(text, " (discriminator");
                if (discriminator) *discriminator = 0;
                std::string place = text;
                if (place.compare(0, root.size(), root) == 0) place.erase(0, root.size());
                while (place.compare(0, 2, "./") == 0) place.erase(0, 2);
                frames[address].back().place = place;
            }
            function = !function;
        }
        if (pclose(pipe) != 0) die("addr2line, of binutils, fails: EMULATE_COUNT needs it to name lines");
    }
    return frames;
}

// softmax<8,2> of "void softmax<8, (Kind)2>(float*, int)".
inline std::string count_kernel_name(std::string name) {
    if (name.compare(0, 5, "void ") == 0) name.erase(0, 5);
    size_t bracket = 0;
    while ((bracket = name.find('(', bracket)) != std::string::npos) {
        size_t end = name.find(')', bracket);
        bool cast = end != std::string::npos && end + 1 < name.size() && isdigit((unsigned char)name[end + 1]);
        if (!cast) break;
        name.erase(bracket, end + 1 - bracket);
    }
    name.erase(std::min(bracket, name.size()));
    name.erase(std::remove(name.begin(), name.end(), ' '), name.end());
    return name;
}

inline bool count_is_own(const std::string& place) {  // of a kernel, not of the emulator or the system
    return place.find("dev/emulator/emulator.h") == std::string::npos &&
           place.find("dev/emulator/device.h") == std::string::npos && place.compare(0, 5, "/usr/") != 0 &&
           place.compare(0, 2, "??") != 0;
}

struct CountLine {
    std::string kernel, file, line, via;
    bool shared;
    Access kind;
    bool operator<(const CountLine& other) const {
        return std::tie(kernel, file, line, via, shared, kind) <
               std::tie(other.kernel, other.file, other.line, other.via, other.shared, other.kind);
    }
};

inline void count_write() {
    std::vector<const void*> addresses;
    for (size_t i = 1; i < count_nodes.size(); i++) {
        const char* pc = (const char*)count_nodes[i].pc;
        addresses.push_back(count_nodes[i].parent == 0 ? pc : pc - 1);  // a return address may belong to the next line
    }
    std::sort(addresses.begin(), addresses.end());
    addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
    std::map<const void*, std::vector<CountFrame>> frames = count_frames(addresses);
    std::map<CountLine, CountTally> lines;
    for (const CountNode& node : count_nodes) {
        if (node.tally.requests == 0) continue;
        CountLine line;
        const CountNode* n = &node;
        for (; n->parent != 0; n = &count_nodes[n->parent]) {
            for (const CountFrame& frame : frames[(const char*)n->pc - 1]) {
                if (!count_is_own(frame.place)) continue;
                if (line.via.empty()) line.via = frame.place;
                line.line = frame.place;  // the last one is the outermost: the kernel
            }
        }
        line.kernel = count_kernel_name(frames[n->pc].empty() ? "?" : frames[n->pc].back().function);
        if (line.via == line.line) line.via.clear();
        size_t colon = line.line.rfind(':');
        line.file = colon == std::string::npos ? "?" : line.line.substr(0, colon);
        line.line = colon == std::string::npos ? "0" : std::to_string(atol(line.line.c_str() + colon + 1));
        line.shared = node.shared;
        line.kind = node.kind;
        CountTally& sum = lines[line];
        sum.requests += node.tally.requests;
        sum.bytes += node.tally.bytes;
        sum.units += node.tally.units;
        sum.ideal += node.tally.ideal;
    }
    FILE* file = fopen(counting, "a");
    if (!file) die("cannot write %s, which EMULATE_COUNT names", counting);
    for (auto& [line, sum] : lines) {
        const char* kinds[] = {"load", "store", "atomic", "cp.async", "cp.async", "ldmatrix"};
        fprintf(file, "{\"kernel\": \"%s\", \"file\": \"%s\", \"line\": %s, \"via\": \"%s\", \"space\": \"%s\", ",
                line.kernel.c_str(), line.file.c_str(), line.line.c_str(), line.via.c_str(),
                line.shared ? "shared" : "global");
        fprintf(file, "\"kind\": \"%s\", \"requests\": %zu, \"bytes\": %zu, \"%s\": %zu, \"ideal\": %zu}\n",
                kinds[line.kind], (size_t)sum.requests, (size_t)sum.bytes, line.shared ? "wavefronts" : "sectors",
                (size_t)sum.units, (size_t)sum.ideal);
    }
    for (auto& [function, l] : count_launches)
        fprintf(file, "{\"kernel\": \"%s\", \"kind\": \"launch\", \"launches\": %zu, \"blocks\": %zu, "
                "\"threads\": %u}\n",
                count_kernel_name(frames[function].empty() ? "?" : frames[function].back().function).c_str(),
                (size_t)l.launches, (size_t)l.blocks, l.threads);
    if (fclose(file) != 0) die("cannot write %s, which EMULATE_COUNT names", counting);
}

inline struct CountReport {
    EMULATOR_UNSEEN ~CountReport() {
        if (counting) count_write();
    }
} count_report;

}  // namespace emulator

#endif  // EMULATOR_COUNT_H
