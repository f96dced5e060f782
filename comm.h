// comm.h: what the ranks of a run say to each other, on CPUs. Which rank is which: launch.h.
//
//   1. collectives  what the ranks do together, as data: operation, type, count, and the slice of each rank
//   2. sockets      connections with deadlines
//   3. faults       who is to blame, and that everybody hears of it
//   4. meeting      all ranks come to rank 0, and then each connects with each
//   5. transfers    what a transport does: every rank sends to every rank. Sockets, and MPI with -DLLMTRAIN_MPI
//   6. sums         in the order of the ranks
//   7. operations   each collective as transfers and sums
//   8. progress     the thread that carries them out under the computation, and watches the others between them
//   9. use          comm_open, comm_all_reduce and its kind, comm_wait, comm_close; comm_check_equal, comm_agree_all,
//                   comm_gather_doubles; comm_failed, comm_on_failure, comm_abandon
//
// In short:
//
//   CommLaunch launch;  Comm comm;  Error error;
//   comm_find(&launch, &error)                        or comm_spawn(&launch, 4, &error), before any thread is started
//   comm_open(&comm, &launch, 60e3, &error)
//   CommRequest sum = comm_all_reduce_start(&comm, x, n, COMM_FLOAT, COMM_SUM);
//   ... compute ...
//   comm_wait(&comm, sum, &error)
//   comm_close(&comm);
//   exit_code = comm_reap(&launch, exit_code, 10e3, &error);
//
// All ranks call the same collectives in the same order, each from one thread at a time. An element of a sum is the sum
// over ranks 0, 1, ... in this order, in float for the 16-bit types, rounded once at the end: the same bits on every
// rank, in every run, through every transport; and all_reduce is reduce_scatter followed by all_gather, to the bit.
//
// A rank that dies, stops, gives up (comm_abandon) or calls something else makes every other rank's call return false
// with a sentence that names it, after the time-out at the latest; the Comm can then only be closed. That holds between
// collectives too: comm_failed and on_failure tell of it without waiting. A rank may compute for as long as it likes
// while no other waits for it; a collective fails when the time-out has passed without a byte from a rank it needs.
// Through MPI there are no connections to watch: a rank that dies is left to mpirun, and only who waits for a rank that
// stops hears of it.

#ifndef LLMTRAIN_COMM_H
#define LLMTRAIN_COMM_H

#include "launch.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#ifdef LLMTRAIN_MPI
#define OMPI_SKIP_MPICXX
#include <mpi.h>
#endif

#define COMM_IN_FLIGHT ((uint64_t)256)      // requests started and not finished; a further start waits
#define COMM_CHUNK ((size_t)256 << 10)      // bytes that one rank sends to another for a sum at a time: staging memory
#define COMM_GRACE_MS 1000.0                // to hear why a rank has closed its connections
#define COMM_HELLO_MS 5000.0                // for who connects to say who it is
#define COMM_RETRY_MS 50.0                  // between attempts to reach rank 0
#define COMM_PENDING ((size_t)64)           // connections that have not said yet who they are

// ------------------------------------------------------------------------------------------------
// 1. Collectives
//
// A vector of n elements is cut into one slice per rank, in the order of the ranks; slices may be of any length, and
// there may be gaps between them.

typedef enum { COMM_BYTES, COMM_INT32, COMM_INT64, COMM_FLOAT, COMM_BF16, COMM_F16, COMM_DOUBLE, COMM_TYPES } CommType;
typedef enum { COMM_SUM, COMM_MAX, COMM_MIN, COMM_REDUCTIONS } CommReduction;  // MAX and MIN: COMM_DOUBLE only
typedef enum {
    COMM_BARRIER, COMM_ALL_REDUCE, COMM_REDUCE_SCATTER, COMM_ALL_GATHER, COMM_BROADCAST, COMM_GATHER, COMM_OPERATIONS
} CommOperation;

typedef struct {
    size_t first, end;
} CommSlice;

// The slice of a rank; NULL in place of such a function stands for slices of equal length, but for one element.
typedef CommSlice (*CommSlices)(size_t rank, const void* context);

static inline CommSlice comm_even_slice(size_t rank, size_t world, size_t n) {
    size_t part = n / world, more = n % world;
    CommSlice slice = {part * rank + min_size(rank, more), part * (rank + 1) + min_size(rank + 1, more)};
    return slice;
}

static inline size_t comm_type_size(CommType type) {
    static const size_t sizes[COMM_TYPES] = {1, 4, 8, 4, 2, 2, 8};
    return sizes[type];
}

// Begins every collective, from each rank to each, and must be equal everywhere.
typedef struct {
    uint64_t run;        // hash of the run's identifier and the world size
    uint64_t number;     // of the collective, from 0 (part of comm_open)
    uint64_t n;
    uint64_t slices;     // hash of the slices
    uint32_t operation, type, reduction, root;
} CommHeader;

// The first message of every collective, always of one length: small operations need no other.
#define COMM_SMALL (1024 - sizeof(CommHeader))
typedef struct {
    CommHeader header;
    char payload[COMM_SMALL];
} CommOpening;

typedef struct {
    CommHeader header;
    char* out;           // where the result goes, or the vector itself for operations in place
    const char* in;
    CommSlice* slices;   // (world)
    double delay_ms;
} CommCall;

typedef uint64_t CommRequest;  // number of the collective

// What one transfer brings to and takes from one other rank.
typedef struct {
    const char* send;
    char* receive;
    size_t send_bytes, receive_bytes;
} CommPart;

typedef enum { COMM_HEARTBEAT, COMM_LEFT, COMM_FAILED } CommNoticeKind;
typedef struct {
    uint32_t kind;
    char text[sizeof(Error)];  // COMM_FAILED: what happened
} CommNotice;

// The two connections to another rank: one for the collectives, one to stay in touch.
typedef struct {
    int data, control;   // -1: none
    bool left;           // it said that it ended its run
    bool mute;           // it takes no more notices: its buffer is full
    double heard_ms;     // when it was last heard of
    size_t notice_bytes; // of the notice that have come
    CommNotice notice;
} CommLink;

typedef struct {
    double waited_ms;    // spent in comm_wait
    uint64_t bytes_sent; // payload; headers and notices are not counted
    uint64_t operations; // collectives finished
} CommStatistics;

typedef struct {
    size_t rank, world, local_rank, local_world;
    double timeout_ms;
    double delay_ms;                 // for tests: every collective started from now on takes so much longer
    bool mpi;
    bool patient;                    // see comm_be_patient
    uint64_t run;                    // hash, see CommHeader
    char run_name[64];
    void (*on_failure)(void* context);  // see comm_on_failure; NULL: nothing
    void* on_failure_context;

    // Of the progress thread while it runs
    CommLink* links;                 // (world) the own one is not used
    CommPart* parts;                 // (world) of the transfer in progress
    CommOpening* openings;           // (world) of the collective in progress
    const char** sources;            // (world) of the sum in progress
    bool* named;                     // (world) ranks for a message
    struct pollfd* polls;            // (2 world + COMM_PENDING + 2)
    char* staging;                   // (world, COMM_CHUNK)
    double heartbeat_ms;             // when the next is due
    double looked_ms;                // when the clock was last looked at, see comm_clock
    double resumed_ms;               // when this process was last found to have been stopped itself
    char doing[192];                 // what, for messages; empty between two collectives
    char refused[256];               // who was turned away at the meeting, for messages
#ifdef LLMTRAIN_MPI
    CommNotice notice;               // to the others
    MPI_Request* requests;           // (2 world)
    int* indices;                    // (2 world)
    bool initialised;                // MPI, by us
#endif

    // The queue
    pthread_t thread;
    bool running;                    // the thread
    int wake;                        // eventfd: the queue has changed
    pthread_mutex_t mutex;           // guards what follows
    pthread_cond_t changed;
    CommCall* calls;                 // (COMM_IN_FLIGHT) a ring
    CommSlice* slices;               // (COMM_IN_FLIGHT, world)
    uint64_t started, finished;      // collectives so far
    bool closing, failed, abandoning;
    bool calling;                    // on_failure
    Error error;                     // if failed; what is to be said, if abandoning
    CommStatistics statistics;
} Comm;

// "all_reduce of 1000 float (operation 17)"
static inline void comm_describe(char* text, size_t size, const CommHeader* h) {
    static const char* const operations[COMM_OPERATIONS] = {"barrier", "all_reduce", "reduce_scatter", "all_gather",
                                                            "broadcast", "gather"};
    static const char* const types[COMM_TYPES] = {"bytes", "int32", "int64", "float", "bf16", "fp16", "double"};
    static const char* const reductions[COMM_REDUCTIONS] = {"", " (max)", " (min)"};
    if (h->operation >= COMM_OPERATIONS || h->type >= COMM_TYPES || h->reduction >= COMM_REDUCTIONS) {
        snprintf(text, size, "something unknown");
    } else if (h->number == 0) {
        snprintf(text, size, "the first barrier");
    } else if (h->operation == COMM_BARRIER) {
        snprintf(text, size, "barrier (operation %llu)", (unsigned long long)h->number);
    } else {
        char root[40] = "";
        if (h->operation == COMM_BROADCAST) snprintf(root, sizeof root, " from rank %u", (unsigned)h->root);
        snprintf(text, size, "%s%s of %llu %s%s (operation %llu)", operations[h->operation], reductions[h->reduction],
                 (unsigned long long)h->n, types[h->type], root, (unsigned long long)h->number);
    }
}

// ------------------------------------------------------------------------------------------------
// 2. Sockets
//
// All are non-blocking; whoever waits does so in comm_poll, until a deadline.

// Waits for one of the events, at most until the deadline, at most a second, so that callers look at their clocks.
static inline void comm_poll(struct pollfd* polls, size_t count, double deadline) {
    double left = deadline - now_ms();
    int ms = left <= 0 ? 0 : left >= 1000 ? 1000 : (int)left + 1;
    if (poll(polls, (nfds_t)count, ms) < 0)
        for (size_t i = 0; i < count; i++) polls[i].revents = 0;  // interrupted
}

static inline void comm_watch(struct pollfd* p, int socket, int events) {
    p->fd = socket;
    p->events = (short)events;
    p->revents = 0;
}

static inline bool comm_again(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

static inline bool comm_send_all(int socket, const void* data, size_t bytes, double deadline) {
    const char* p = (const char*)data;
    while (bytes > 0) {
        ssize_t n = send(socket, p, bytes, MSG_NOSIGNAL);
        if (n > 0) {
            p += n;
            bytes -= (size_t)n;
        } else {
            struct pollfd w;
            if (n == 0 || !comm_again()) return false;
            errno = ETIMEDOUT;
            if (now_ms() >= deadline) return false;
            comm_watch(&w, socket, POLLOUT);
            comm_poll(&w, 1, deadline);
        }
    }
    return true;
}

// False with errno ETIMEDOUT, or ECONNRESET also where the other end has closed.
static inline bool comm_receive_all(int socket, void* data, size_t bytes, double deadline) {
    char* p = (char*)data;
    while (bytes > 0) {
        ssize_t n = recv(socket, p, bytes, 0);
        if (n > 0) {
            p += n;
            bytes -= (size_t)n;
        } else {
            struct pollfd w;
            if (n == 0) errno = ECONNRESET;
            if (n == 0 || !comm_again()) return false;
            errno = ETIMEDOUT;
            if (now_ms() >= deadline) return false;
            comm_watch(&w, socket, POLLIN);
            comm_poll(&w, 1, deadline);
        }
    }
    return true;
}

// Small messages leave at once: the operations wait for each of them.
static inline void comm_no_delay(int socket) {
    int on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// The address of the other end (or of this end), as numbers.
static inline void comm_address_of(char text[64], int socket, bool other_end) {
    struct sockaddr_storage name;
    socklen_t length = sizeof name;
    snprintf(text, 64, "?");
    int got = other_end ? getpeername(socket, (struct sockaddr*)&name, &length)
                        : getsockname(socket, (struct sockaddr*)&name, &length);
    if (got != 0 || getnameinfo((struct sockaddr*)&name, length, text, 64, NULL, 0, NI_NUMERICHOST) != 0) return;
    if (strncmp(text, "::ffff:", 7) == 0 && strchr(text, '.'))
        memmove(text, text + 7, strlen(text + 7) + 1);  // IPv4 in IPv6
}

// One attempt to connect, at most until the deadline; -1 with errno after a failure.
static inline int comm_connect_once(const struct addrinfo* at, double deadline) {
    struct sockaddr_storage here, there;
    socklen_t here_length = sizeof here, there_length = sizeof there;
    int connection = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int reason = connection < 0 ? errno : 0;
    if (reason == 0 && connect(connection, at->ai_addr, at->ai_addrlen) != 0) reason = errno;
    if (reason == EINPROGRESS) {
        struct pollfd w;
        socklen_t length = sizeof reason;
        comm_watch(&w, connection, POLLOUT);
        while (w.revents == 0 && now_ms() < deadline) comm_poll(&w, 1, deadline);
        if (w.revents == 0) reason = ETIMEDOUT;
        else getsockopt(connection, SOL_SOCKET, SO_ERROR, &reason, &length);
    }
    // A connection to a free port of this machine can be given that port itself, and then speaks with itself.
    if (reason == 0 && getsockname(connection, (struct sockaddr*)&here, &here_length) == 0 &&
        getpeername(connection, (struct sockaddr*)&there, &there_length) == 0 && here_length == there_length &&
        memcmp(&here, &there, here_length) == 0) reason = ECONNREFUSED;
    if (reason == 0) {
        comm_no_delay(connection);
        return connection;
    }
    comm_close_socket(&connection);
    errno = reason;
    return -1;
}

// Connects, with as many attempts as the deadline allows if patient; otherwise one. -1 after a failure, whose reason is
// left in error.
static inline int comm_connect(const char* address, size_t port, bool patient, double deadline, Error* error) {
    for (;;) {
        char service[16];
        struct addrinfo hints, *list = NULL;
        memset(&hints, 0, sizeof hints);
        hints.ai_socktype = SOCK_STREAM;
        hints.ai_flags = AI_NUMERICSERV;
        snprintf(service, sizeof service, "%zu", port);
        int unknown = getaddrinfo(address, service, &hints, &list), connection = -1;
        if (unknown != 0) fail(error, "%s", gai_strerror(unknown));
        for (const struct addrinfo* at = unknown == 0 ? list : NULL; at && connection < 0; at = at->ai_next) {
            connection = comm_connect_once(at, fmin(deadline, now_ms() + COMM_HELLO_MS));
            if (connection < 0) fail(error, "%s", strerror(errno));
        }
        if (unknown == 0) freeaddrinfo(list);
        if (connection >= 0 || !patient || now_ms() + COMM_RETRY_MS >= deadline) return connection;
        comm_sleep(COMM_RETRY_MS);
    }
}

// ------------------------------------------------------------------------------------------------
// 3. Faults
//
// A rank that finds a fault tells all others over the control connections before it closes anything, so that they name
// the rank where the fault began, and not the one that ended because of it. Heartbeats, which the progress thread sends
// whatever the program computes, tell a rank that is stopped or unreachable from one that is alive and late.

// The time. A leap says that this process was stopped itself, perhaps with all others (Ctrl-Z, and fg): nobody is
// blamed for that time.
static inline double comm_clock(Comm* comm) {
    double now = now_ms();
    if (now - comm->looked_ms > comm->timeout_ms / 2) comm->resumed_ms = now;
    comm->looked_ms = now;
    return now;
}

#ifdef LLMTRAIN_MPI
#define COMM_MPI_DATA 0     // tags
#define COMM_MPI_NOTICE 1

static inline void comm_tell_mpi(Comm* comm, const CommNotice* notice) {
    int done = 0;
    comm->notice = *notice;  // which MPI may still read after the grace time
    for (size_t p = 0; p < comm->world; p++) {
        comm->requests[p] = MPI_REQUEST_NULL;
        if (p != comm->rank)
            MPI_Isend(&comm->notice, (int)sizeof comm->notice, MPI_BYTE, (int)p, COMM_MPI_NOTICE, MPI_COMM_WORLD,
                      &comm->requests[p]);
    }
    for (double deadline = now_ms() + COMM_GRACE_MS; !done && now_ms() < deadline;)
        if (MPI_Testall((int)comm->world, comm->requests, &done, MPI_STATUSES_IGNORE) != MPI_SUCCESS) break;
}

// False if a rank says that the run has failed.
static inline bool comm_hear_mpi(Error* error) {
    CommNotice notice;
    MPI_Status status;
    int there = 0;
    if (MPI_Iprobe(MPI_ANY_SOURCE, COMM_MPI_NOTICE, MPI_COMM_WORLD, &there, &status) != MPI_SUCCESS || !there ||
        MPI_Recv(&notice, (int)sizeof notice, MPI_BYTE, status.MPI_SOURCE, COMM_MPI_NOTICE, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE) != MPI_SUCCESS)
        return true;
    notice.text[sizeof notice.text - 1] = 0;
    return fail(error, "%s", notice.text);
}
#endif

static inline void comm_tell(Comm* comm, CommNoticeKind kind, const char* words) {
    CommNotice notice;
    memset(&notice, 0, sizeof notice);
    notice.kind = (uint32_t)kind;
    snprintf(notice.text, sizeof notice.text, "%s", words);
#ifdef LLMTRAIN_MPI
    if (comm->mpi && kind == COMM_FAILED) comm_tell_mpi(comm, &notice);
#endif
    for (size_t p = 0; p < comm->world; p++) {
        CommLink* link = &comm->links[p];
        if (link->control < 0 || link->mute) continue;
        link->mute = send(link->control, &notice, sizeof notice, MSG_NOSIGNAL) != (ssize_t)sizeof notice;
    }
}

static inline void comm_heartbeat(Comm* comm) {
    if (comm->mpi || now_ms() < comm->heartbeat_ms) return;
    comm->heartbeat_ms = now_ms() + comm->timeout_ms / 4;
    comm_tell(comm, COMM_HEARTBEAT, "");
}

// Reads what rank p says; false if that is that the run has failed.
static inline bool comm_hear(Comm* comm, size_t p, Error* error) {
    CommLink* link = &comm->links[p];
    while (link->control >= 0) {
        ssize_t n =
            recv(link->control, (char*)&link->notice + link->notice_bytes, sizeof link->notice - link->notice_bytes, 0);
        if (n < 0 && comm_again()) break;
        if (n <= 0) {
            comm_close_socket(&link->control);
            break;
        }
        link->heard_ms = now_ms();
        link->notice_bytes += (size_t)n;
        if (link->notice_bytes < sizeof link->notice) continue;
        link->notice_bytes = 0;
        link->notice.text[sizeof link->notice.text - 1] = 0;
        if (link->notice.kind == COMM_LEFT) link->left = true;
        if (link->notice.kind == COMM_FAILED) return fail(error, "%s", link->notice.text);
    }
    return true;
}

// Rank p has closed its connections. Why? It has said so, or it is dead, and then its control connection ends too.
static inline bool comm_fail_lost(Comm* comm, size_t p, Error* error) {
    CommLink* link = &comm->links[p];
    double deadline = now_ms() + COMM_GRACE_MS;
    while (link->control >= 0 && !link->left && now_ms() < deadline) {
        struct pollfd w;
        comm_watch(&w, link->control, POLLIN);
        comm_poll(&w, 1, deadline);
        if (!comm_hear(comm, p, error)) return false;
    }
    const char* in = comm->doing[0] ? "in " : "between two collectives";
    if (link->left)
        return fail(error, "rank %zu ended its run while rank %zu was %s%s; see what rank %zu printed", p, comm->rank,
                    in, comm->doing, p);
    return fail(error,
                "rank %zu is gone: its connection closed while rank %zu was %s%s; see what rank %zu printed, and "
                "whether it was killed",
                p, comm->rank, in, comm->doing, p);
}

// "rank 2", "ranks 0, 3" or "ranks 1, 2, ... and 5 more", of those marked in comm->named.
static inline void comm_name_ranks(char* text, size_t size, const Comm* comm, const char* none, const char* some) {
    size_t count = 0, length = 0;
    for (size_t p = 0; p < comm->world; p++) count += comm->named[p];
    length += (size_t)snprintf(text, size, count == 1 ? "rank" : "ranks");
    for (size_t p = 0, shown = 0; p < comm->world && shown < 8; p++)
        if (comm->named[p]) length += (size_t)snprintf(text + length, size - length, "%s%zu", shown++ ? ", " : " ", p);
    if (count > 8) length += (size_t)snprintf(text + length, size - length, " and %zu more", count - 8);
    snprintf(text + length, size - length, " %s", count == 1 ? none : some);
}

// True if there are ranks that nothing was heard of for so long at `now`; the error names them.
static inline bool comm_find_silent(Comm* comm, double now, double silence_ms, Error* error) {
    char names[160];
    bool silent = false;
    for (size_t p = 0; p < comm->world; p++) {
        const CommLink* link = &comm->links[p];
        comm->named[p] = !comm->mpi && p != comm->rank && !link->left &&
                         now - fmax(link->heard_ms, comm->resumed_ms) > silence_ms;
        silent |= comm->named[p];
    }
    if (!silent) return false;
    comm_name_ranks(names, sizeof names, comm, "has", "have");
    fail(error,
         "%s not answered for %.1f s while rank %zu was %s%s: stopped, or its machine or the network is down", names,
         comm->timeout_ms / 1e3, comm->rank, comm->doing[0] ? "in " : "between two collectives", comm->doing);
    return true;
}

// The time-out has passed without a byte. Ranks that are silent are to blame, or else those that owe something.
static inline bool comm_fail_late(Comm* comm, Error* error) {
    char names[160];
    if (comm_find_silent(comm, comm->looked_ms, 0.75 * comm->timeout_ms, error)) return false;
    for (size_t p = 0; p < comm->world; p++)
        comm->named[p] = comm->parts[p].send_bytes > 0 || comm->parts[p].receive_bytes > 0;
    comm_name_ranks(names, sizeof names, comm, "is", "are");
    return fail(error, "%s late: rank %zu has waited %.1f s in %s%s; raise the time-out if so much is to be expected",
                names, comm->rank, comm->timeout_ms / 1e3, comm->doing,
                comm->mpi ? "" : ", and the program there is alive, but elsewhere");
}

static inline void comm_wake(Comm* comm) {
    uint64_t one = 1;
    ssize_t written = write(comm->wake, &one, sizeof one);
    (void)written;  // fails only when it is awake as can be
}

// The progress thread was woken; false if that was to give up.
static inline bool comm_woken(Comm* comm, Error* error) {
    uint64_t unused;
    if (read(comm->wake, &unused, sizeof unused) < 0 && !comm_again())
        return fail(error, "rank %zu cannot read its own event: %s", comm->rank, strerror(errno));
    pthread_mutex_lock(&comm->mutex);
    bool abandoning = comm->abandoning;
    if (abandoning) *error = comm->error;
    pthread_mutex_unlock(&comm->mutex);
    return !abandoning;
}

// ------------------------------------------------------------------------------------------------
// 4. Meeting
//
// Every rank listens. All connect to rank 0 and say who they are; when the last has come, rank 0 sends each the table
// of addresses. Then each rank connects to all lower ranks. Whoever is not of this run is told so and sent away.

#define COMM_MAGIC "llmtrain"
#define COMM_VERSION 2u

typedef enum { COMM_DATA, COMM_CONTROL } CommKind;
typedef struct {
    char magic[8];
    uint32_t version, kind, world, rank, port, unused;
    uint64_t host;                // which machine
    char run[64];
} CommHello;

typedef struct {
    char magic[8];
    uint64_t refused;             // 0: welcome, and the table follows
    char text[512];
} CommReply;

typedef struct {
    char address[64];
    uint64_t host, port;
} CommEntry;

typedef struct {
    int socket;
    double since;
    size_t bytes;                 // of the hello that have come
    CommHello hello;
} CommPending;

// Ranks with the same number are on one machine.
static inline uint64_t comm_host(void) {
    char name[256];
    memset(name, 0, sizeof name);
    gethostname(name, 128);
    FILE* file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file) {
        if (fgets(name + strlen(name), 64, file) == NULL) name[255] = 1;
        fclose(file);
    }
    return hash_bytes(name, sizeof name);
}

static inline CommHello comm_hello(const Comm* comm, CommKind kind, size_t port) {
    CommHello hello;
    memset(&hello, 0, sizeof hello);
    memcpy(hello.magic, COMM_MAGIC, 8);
    hello.version = COMM_VERSION;
    hello.kind = (uint32_t)kind;
    hello.world = (uint32_t)comm->world;
    hello.rank = (uint32_t)comm->rank;
    hello.port = (uint32_t)port;
    hello.host = comm_host();
    memcpy(hello.run, comm->run_name, sizeof hello.run);
    return hello;
}

static inline void comm_reply(int socket, const char* refusal) {
    CommReply reply;
    memset(&reply, 0, sizeof reply);
    memcpy(reply.magic, COMM_MAGIC, 8);
    reply.refused = refusal != NULL;
    snprintf(reply.text, sizeof reply.text, "%.500s", refusal ? refusal : "");
    comm_send_all(socket, &reply, sizeof reply, now_ms() + COMM_GRACE_MS);
}

// Takes a connection whose hello has come (or has not) among the links, or sends it away with a reason.
static inline void comm_admit(Comm* comm, CommEntry* table, CommPending* pending) {
    CommHello* h = &pending->hello;
    Error reason = {""};
    char from[64];
    comm_address_of(from, pending->socket, true);
    h->run[sizeof h->run - 1] = 0;
    if (pending->bytes < sizeof *h || memcmp(h->magic, COMM_MAGIC, 8) != 0)
        fail(&reason, "something at %s that is not this program", from);
    else if (h->version != COMM_VERSION)
        fail(&reason, "rank %u at %s speaks version %u, rank %zu version %u; use the same program everywhere",
             (unsigned)h->rank, from, (unsigned)h->version, comm->rank, COMM_VERSION);
    else if (strcmp(h->run, comm->run_name) != 0)
        fail(&reason,
             "rank %u at %s is of run '%s', rank %zu here of run '%s'; two runs meet at one address and port: choose "
             "another MASTER_PORT",
             (unsigned)h->rank, from, h->run, comm->rank, comm->run_name);
    else if (h->world != comm->world)
        fail(&reason, "rank %u at %s counts %u ranks, rank %zu %zu; start all with the same world size",
             (unsigned)h->rank, from, (unsigned)h->world, comm->rank, comm->world);
    else if (h->rank <= comm->rank || h->rank >= comm->world)
        fail(&reason, "a second rank %u, from %s; give each rank a number of its own", (unsigned)h->rank, from);
    CommLink* link = reason.text[0] ? NULL : &comm->links[h->rank];
    int* place = link == NULL ? NULL : h->kind == COMM_CONTROL ? &link->control : &link->data;
    if (place && *place >= 0) {
        fail(&reason, "a second rank %u, from %s; give each rank a number of its own", (unsigned)h->rank, from);
        place = NULL;
    }
    if (place) {
        *place = pending->socket;
        comm_no_delay(pending->socket);
        if (table) {
            snprintf(table[h->rank].address, sizeof table[h->rank].address, "%s", from);
            table[h->rank].port = h->port;
            table[h->rank].host = h->host;
        }
    } else {
        snprintf(comm->refused, sizeof comm->refused, "%.255s", reason.text);
        comm_reply(pending->socket, reason.text);
        close(pending->socket);
    }
    pending->socket = -1;
}

// Waits until every higher rank has connected: with both connections, or only for data where the table is made.
static inline bool comm_accept(Comm* comm, CommEntry* table, int listener, const char* place, double deadline,
                               Error* error) {
    CommPending pending[COMM_PENDING];
    bool good = true;
    for (size_t i = 0; i < COMM_PENDING; i++) pending[i].socket = -1;
    for (;;) {
        size_t missing = 0, count = 0;
        for (size_t p = 0; p < comm->world; p++) {
            comm->named[p] =
                p > comm->rank && (comm->links[p].data < 0 || (table == NULL && comm->links[p].control < 0));
            missing += comm->named[p];
        }
        if (missing == 0 || !good) break;
        if (now_ms() >= deadline) {
            char names[160];
            comm_name_ranks(names, sizeof names, comm, "has", "have");
            good = fail(error,
                        "%s not come to rank %zu at %s within %.1f s; see whether every rank was started, and what it "
                        "printed%s%s",
                        names, comm->rank, place, comm->timeout_ms / 1e3, comm->refused[0] ? ". Turned away: " : "",
                        comm->refused);
            break;
        }
        // Watched: the listener, who has not said who it is, and of the ranks that are here whether they stay.
        comm_watch(&comm->polls[count++], listener, POLLIN);
        for (size_t i = 0; i < COMM_PENDING; i++) comm_watch(&comm->polls[count++], pending[i].socket, POLLIN);
        for (size_t p = 0; p < comm->world; p++) {
            comm_watch(&comm->polls[count++], comm->links[p].data, POLLRDHUP);
            comm_watch(&comm->polls[count++], comm->links[p].control, POLLIN);
        }
        comm_heartbeat(comm);  // some may be through with the meeting already
        comm_poll(comm->polls, count, fmin(deadline, now_ms() + COMM_RETRY_MS));
        bool more = true;  // at the listener
        for (size_t i = 0; i < COMM_PENDING; i++) {
            CommPending* p = &pending[i];
            if (p->socket < 0 && more) {
                p->socket = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
                p->since = now_ms();
                p->bytes = 0;
                more = p->socket >= 0;
            }
            if (p->socket < 0) continue;
            ssize_t n = recv(p->socket, (char*)&p->hello + p->bytes, sizeof p->hello - p->bytes, 0);
            bool over = n == 0 || (n < 0 && !comm_again()) || now_ms() - p->since > COMM_HELLO_MS;
            if (n > 0) p->bytes += (size_t)n;
            bool stranger = p->bytes >= 8 && memcmp(p->hello.magic, COMM_MAGIC, 8) != 0;
            if (over || stranger || p->bytes == sizeof p->hello) comm_admit(comm, table, p);
        }
        for (size_t p = 0; good && p < comm->world; p++) {
            struct pollfd* polled = &comm->polls[1 + COMM_PENDING + 2 * p];
            if (polled[1].revents) good = comm_hear(comm, p, error);
            if (good && polled[0].revents) good = comm_fail_lost(comm, p, error);
        }
    }
    for (size_t i = 0; i < COMM_PENDING; i++) comm_close_socket(&pending[i].socket);
    return good;
}

// Goes to rank 0 and comes back with the table.
static inline bool comm_visit(Comm* comm, CommEntry* table, size_t port, const CommLaunch* launch, double deadline,
                              Error* error) {
    CommHello hello = comm_hello(comm, COMM_DATA, port);
    CommReply reply;
    Error reason = {""};
    for (;;) {
        int connection = comm_connect(launch->address, launch->port, true, deadline, &reason);
        if (connection >= 0) {
            // Rank 0 may have begun to wait only now, for its whole time-out; then it says who is missing.
            double until = now_ms() + comm->timeout_ms + COMM_GRACE_MS;
            comm->links[0].data = connection;
            if (comm_send_all(connection, &hello, sizeof hello, until) &&
                comm_receive_all(connection, &reply, sizeof reply, until))
                break;
            if (errno == ETIMEDOUT)
                return fail(error,
                            "rank 0 at %s, port %zu has not answered rank %zu for %.1f s: it is stopped, or it is not "
                            "this program",
                            launch->address, launch->port, comm->rank, comm->timeout_ms / 1e3);
            comm_close_socket(&comm->links[0].data);
            fail(&reason, "it hung up");
        }
        if (now_ms() + COMM_RETRY_MS >= deadline)
            return fail(error,
                        "rank %zu has not reached rank 0 at %s, port %zu within %.1f s: %.200s; see whether it was "
                        "started, what it printed, and MASTER_ADDR and MASTER_PORT",
                        comm->rank, launch->address, launch->port, comm->timeout_ms / 1e3, reason.text);
        comm_sleep(COMM_RETRY_MS);
    }
    if (memcmp(reply.magic, COMM_MAGIC, 8) != 0)
        return fail(error, "what answers at %s, port %zu is not rank 0 of this program; choose another MASTER_PORT",
                    launch->address, launch->port);
    reply.text[sizeof reply.text - 1] = 0;
    if (reply.refused) return fail(error, "%s", reply.text);
    if (!comm_receive_all(comm->links[0].data, table, comm->world * sizeof *table, now_ms() + comm->timeout_ms))
        return fail(error,
                    "rank 0 at %s, port %zu is gone: it hung up while the ranks were meeting; see what it printed",
                    launch->address, launch->port);
    // What rank 0 calls this machine is its own machine: reached as rank 0 itself is.
    char zero[64];
    comm_address_of(zero, comm->links[0].data, true);
    for (size_t p = 0; p < comm->world; p++)
        if (p == 0 || comm_is_loopback(table[p].address)) memcpy(table[p].address, zero, sizeof zero);
    table[0].port = launch->port;
    return true;
}

// Connects to rank p, for data or control.
static inline bool comm_call_on(Comm* comm, const CommEntry* table, size_t p, CommKind kind, double deadline,
                                Error* error) {
    Error reason = {""};
    CommHello hello = comm_hello(comm, kind, 0);
    int connection = comm_connect(table[p].address, (size_t)table[p].port, false, deadline, &reason);
    *(kind == COMM_DATA ? &comm->links[p].data : &comm->links[p].control) = connection;
    if (connection >= 0 && comm_send_all(connection, &hello, sizeof hello, deadline)) return true;
    return fail(error,
                "rank %zu cannot reach rank %zu at %.63s, port %zu: %.200s; see whether it is still there, and that "
                "the machines let each other's connections through",
                comm->rank, p, table[p].address, (size_t)table[p].port, connection < 0 ? reason.text : strerror(errno));
}

static inline bool comm_connect_all(Comm* comm, CommEntry* table, const CommLaunch* launch, int* listener,
                                    Error* error) {
    char place[320];
    double deadline = now_ms() + comm->timeout_ms;
    size_t port = comm->rank == 0 ? launch->port : 0;
    *listener = comm->rank == 0 ? launch->listener : -1;
    snprintf(comm->doing, sizeof comm->doing, "the meeting of the ranks");
    if (*listener < 0 && !comm_listen(listener, &port, launch->address, error)) return false;
    snprintf(place, sizeof place, "%s, port %zu", launch->address, port);
    if (comm->rank == 0) {
        table[0].host = comm_host();
        bool good = comm_accept(comm, table, *listener, place, deadline, error);
        for (size_t p = 1; p < comm->world; p++) {
            if (comm->links[p].data < 0) continue;
            comm_reply(comm->links[p].data, good ? NULL : error->text);
            if (good &&
                !comm_send_all(comm->links[p].data, table, comm->world * sizeof *table, deadline + COMM_GRACE_MS))
                good = comm_fail_lost(comm, p, error);
        }
        if (!good) return false;
    } else if (!comm_visit(comm, table, port, launch, deadline, error)) {
        return false;
    }
    deadline = now_ms() + comm->timeout_ms;
    for (size_t p = 0; p < comm->rank; p++)
        if (!comm_call_on(comm, table, p, COMM_CONTROL, deadline, error)) return false;
    for (size_t p = 1; p < comm->rank; p++)
        if (!comm_call_on(comm, table, p, COMM_DATA, deadline, error)) return false;
    if (!comm_accept(comm, NULL, *listener, place, deadline, error)) return false;
    size_t before = 0, same = 0;
    for (size_t p = 0; p < comm->world; p++) {
        comm->links[p].heard_ms = now_ms();
        bool here = table[p].host == table[comm->rank].host;
        same += here;
        before += here && p < comm->rank;
    }
    if (comm->local_rank == COMM_UNKNOWN) comm->local_rank = before;
    if (comm->local_world == COMM_UNKNOWN) comm->local_world = same;
    return true;
}

// ------------------------------------------------------------------------------------------------
// 5. Transfers
//
// comm->parts says what goes to each rank and what comes from it; a transfer does all of it at once. It leaves the
// parts empty. Each pair of ranks agrees on the bytes between the two, so that no part is longer or shorter than
// expected.

static inline bool comm_transfer_sockets(Comm* comm, Error* error) {
    double moved_ms = comm_clock(comm);
    for (;;) {
        bool pending = false, moved = false;
        size_t count = 0;
        for (size_t p = 0; p < comm->world; p++) {
            CommPart* part = &comm->parts[p];
            CommLink* link = &comm->links[p];
            ssize_t sent = part->send_bytes ? send(link->data, part->send, part->send_bytes, MSG_NOSIGNAL) : 0;
            if (sent < 0 && !comm_again()) return comm_fail_lost(comm, p, error);
            if (sent > 0) {
                part->send += sent;
                part->send_bytes -= (size_t)sent;
            }
            ssize_t received = part->receive_bytes ? recv(link->data, part->receive, part->receive_bytes, 0) : -1;
            if (part->receive_bytes && (received == 0 || (received < 0 && !comm_again())))
                return comm_fail_lost(comm, p, error);
            if (received > 0) {
                part->receive += received;
                part->receive_bytes -= (size_t)received;
                link->heard_ms = now_ms();
            }
            moved |= sent > 0 || received > 0;
            pending |= part->send_bytes > 0 || part->receive_bytes > 0;
        }
        if (!pending) return true;
        comm_heartbeat(comm);
        double now = comm_clock(comm);
        if (moved) {
            moved_ms = now;
            continue;
        }
        double deadline = fmax(moved_ms, comm->resumed_ms) + comm->timeout_ms;
        bool patient = __atomic_load_n(&comm->patient, __ATOMIC_RELAXED);
        if (now >= deadline && !patient) return comm_fail_late(comm, error);
        if (now >= deadline && comm_find_silent(comm, now, comm->timeout_ms, error)) return false;
        for (size_t p = 0; p < comm->world; p++) {
            const CommPart* part = &comm->parts[p];
            int events = (part->send_bytes ? POLLOUT : 0) | (part->receive_bytes ? POLLIN : 0);
            comm_watch(&comm->polls[count++], comm->links[p].control, POLLIN);
            comm_watch(&comm->polls[count++], events ? comm->links[p].data : -1, events);
        }
        comm_watch(&comm->polls[count++], comm->wake, POLLIN);
        comm_poll(comm->polls, count, fmin(fmax(deadline, now + COMM_RETRY_MS), comm->heartbeat_ms));
        if (comm->polls[count - 1].revents && !comm_woken(comm, error)) return false;
        // News after data, so that what can still be finished is.
        bool ready = false;
        for (size_t p = 0; p < comm->world; p++) ready |= comm->polls[2 * p + 1].revents != 0;
        for (size_t p = 0; !ready && p < comm->world; p++)
            if (comm->polls[2 * p].revents && !comm_hear(comm, p, error)) return false;
    }
}

#ifdef LLMTRAIN_MPI
#define COMM_MPI_BYTES ((size_t)1 << 30)  // of one message: MPI counts in int
#define COMM_MPI_PAUSE_MS 0.05            // between looks: MPI has no wait with a deadline, a spin takes a core

static inline bool comm_transfer_mpi(Comm* comm, Error* error) {
    for (;;) {
        size_t open = 0;
        bool good = true;
        for (size_t p = 0; p < comm->world; p++) {
            const CommPart* part = &comm->parts[p];
            comm->requests[2 * p] = comm->requests[2 * p + 1] = MPI_REQUEST_NULL;
            if (part->receive_bytes)
                good &= MPI_Irecv(part->receive, (int)min_size(part->receive_bytes, COMM_MPI_BYTES), MPI_BYTE, (int)p,
                                  COMM_MPI_DATA, MPI_COMM_WORLD, &comm->requests[2 * p]) == MPI_SUCCESS;
            if (part->send_bytes)
                good &= MPI_Isend(part->send, (int)min_size(part->send_bytes, COMM_MPI_BYTES), MPI_BYTE, (int)p,
                                  COMM_MPI_DATA, MPI_COMM_WORLD, &comm->requests[2 * p + 1]) == MPI_SUCCESS;
            open += (part->receive_bytes > 0) + (part->send_bytes > 0);
        }
        if (open == 0) return true;
        double moved_ms = comm_clock(comm);
        while (good && open > 0) {
            int done = 0;
            good = MPI_Testsome((int)(2 * comm->world), comm->requests, &done, comm->indices, MPI_STATUSES_IGNORE) ==
                   MPI_SUCCESS;
            for (int i = 0; good && i < done; i++) {
                CommPart* part = &comm->parts[comm->indices[i] / 2];
                if (comm->indices[i] % 2) {
                    size_t bytes = min_size(part->send_bytes, COMM_MPI_BYTES);
                    part->send += bytes;
                    part->send_bytes -= bytes;
                } else {
                    size_t bytes = min_size(part->receive_bytes, COMM_MPI_BYTES);
                    part->receive += bytes;
                    part->receive_bytes -= bytes;
                }
                open--;
            }
            double now = comm_clock(comm);
            if (done > 0) {
                moved_ms = now;
                continue;
            }
            bool patient = __atomic_load_n(&comm->patient, __ATOMIC_RELAXED);
            if (!patient && now - fmax(moved_ms, comm->resumed_ms) >= comm->timeout_ms) return comm_fail_late(comm, error);
            if (good && (!comm_hear_mpi(error) || !comm_woken(comm, error))) return false;
            comm_sleep(COMM_MPI_PAUSE_MS);
        }
        if (!good)
            return fail(error, "MPI reported an error while rank %zu was in %s; see what mpirun printed", comm->rank,
                        comm->doing);
    }
}
#endif

static inline bool comm_transfer(Comm* comm, Error* error) {
#ifdef LLMTRAIN_MPI
    if (comm->mpi) return comm_transfer_mpi(comm, error);
#endif
    return comm_transfer_sockets(comm, error);
}

// ------------------------------------------------------------------------------------------------
// 6. Sums
//
// Over comm->sources, one vector per rank, in the order of the ranks, by blocks that stay in the first cache.

#define COMM_BLOCK ((size_t)1024)

static inline void comm_sum_floats(char* out, const Comm* comm, CommType type, size_t first, size_t count) {
    float sums[COMM_BLOCK];
    for (size_t p = 0; p < comm->world; p++) {
        const float* x = (const float*)comm->sources[p] + first;
        const uint16_t* halves = (const uint16_t*)comm->sources[p] + first;
        float values[COMM_BLOCK];
        if (type == COMM_FLOAT) memcpy(values, x, count * sizeof *x);
        if (type == COMM_BF16) for (size_t i = 0; i < count; i++) values[i] = float_from_bf16(halves[i]);
        if (type == COMM_F16) for (size_t i = 0; i < count; i++) values[i] = float_from_f16(halves[i]);
        if (p == 0) memcpy(sums, values, count * sizeof *sums);
        else for (size_t i = 0; i < count; i++) sums[i] += values[i];
    }
    uint16_t* halves = (uint16_t*)out + first;
    if (type == COMM_FLOAT) memcpy((float*)out + first, sums, count * sizeof *sums);
    if (type == COMM_BF16) for (size_t i = 0; i < count; i++) halves[i] = bf16_from_float(sums[i]);
    if (type == COMM_F16) for (size_t i = 0; i < count; i++) halves[i] = f16_from_float(sums[i]);
}

// Also the greatest and the least; NaN stays NaN.
static inline void comm_sum_doubles(char* out, const Comm* comm, CommReduction reduction, size_t first, size_t count) {
    double sums[COMM_BLOCK];
    memcpy(sums, (const double*)comm->sources[0] + first, count * sizeof *sums);
    for (size_t p = 1; p < comm->world; p++) {
        const double* x = (const double*)comm->sources[p] + first;
        for (size_t i = 0; i < count; i++) {
            if (reduction == COMM_SUM) sums[i] += x[i];
            else if (isnan(x[i]) || (reduction == COMM_MAX ? x[i] > sums[i] : x[i] < sums[i])) sums[i] = x[i];
        }
    }
    memcpy((double*)out + first, sums, count * sizeof *sums);
}

// Sums that are too large for the type wrap around.
static inline void comm_sum_integers(char* out, const Comm* comm, CommType type, size_t first, size_t count) {
    uint64_t sums[COMM_BLOCK];
    memset(sums, 0, sizeof sums);
    for (size_t p = 0; p < comm->world; p++) {
        const uint32_t* narrow = (const uint32_t*)comm->sources[p] + first;
        const uint64_t* wide = (const uint64_t*)comm->sources[p] + first;
        if (type == COMM_INT32) for (size_t i = 0; i < count; i++) sums[i] += narrow[i];
        else for (size_t i = 0; i < count; i++) sums[i] += wide[i];
    }
    if (type == COMM_INT32) for (size_t i = 0; i < count; i++) ((uint32_t*)out)[first + i] = (uint32_t)sums[i];
    else memcpy((uint64_t*)out + first, sums, count * sizeof *sums);
}

// out may be one of the sources.
static inline void comm_sum(char* out, const Comm* comm, CommType type, CommReduction reduction, size_t n) {
    for (size_t first = 0; first < n; first += COMM_BLOCK) {
        size_t count = min_size(COMM_BLOCK, n - first);
        if (type == COMM_DOUBLE) comm_sum_doubles(out, comm, reduction, first, count);
        else if (type == COMM_INT32 || type == COMM_INT64) comm_sum_integers(out, comm, type, first, count);
        else comm_sum_floats(out, comm, type, first, count);
    }
}

// ------------------------------------------------------------------------------------------------
// 7. Operations
//
// Each rank owns its slice of the vector: all others send it their values of it (reduce_scatter), and it sends all
// others the sum (all_gather). So a rank sends (world - 1)/world of the vector in each of the two, the least possible.

static inline bool comm_transfer_payload(Comm* comm, uint64_t* bytes, Error* error) {
    for (size_t p = 0; p < comm->world; p++) *bytes += comm->parts[p].send_bytes;
    return comm_transfer(comm, error);
}

// Whether the openings carry all that there is to say: the slices of an all_gather, or each rank's whole vector for an
// all_reduce. Then one message each way does it, where otherwise there are two, or three.
static inline bool comm_is_small(const Comm* comm, const CommCall* call) {
    size_t size = comm_type_size((CommType)call->header.type);
    bool small = call->header.operation == COMM_ALL_REDUCE && call->header.n <= COMM_SMALL / size;
    if (call->header.operation != COMM_ALL_GATHER) return small;
    for (size_t p = 0; p < comm->world; p++)
        if (call->slices[p].end - call->slices[p].first > COMM_SMALL / size) return false;
    return true;
}

// All ranks tell each other what they are about to do; with the payload if that is small.
static inline bool comm_agree(Comm* comm, const CommCall* call, bool small, uint64_t* bytes, Error* error) {
    char theirs[160], ours[160];
    size_t size = comm_type_size((CommType)call->header.type);
    CommSlice own = call->slices[comm->rank];
    CommOpening* opening = &comm->openings[comm->rank];
    opening->header = call->header;
    if (small && call->header.operation == COMM_ALL_REDUCE) {
        own.first = 0;
        own.end = (size_t)call->header.n;
    }
    size_t own_bytes = small ? (own.end - own.first) * size : 0;
    if (own_bytes > 0) memcpy(opening->payload, call->in + own.first * size, own_bytes);
    *bytes += (comm->world - 1) * own_bytes;
    for (size_t p = 0; p < comm->world; p++) {
        if (p == comm->rank) continue;
        comm->parts[p].send = (const char*)opening;
        comm->parts[p].receive = (char*)&comm->openings[p];
        comm->parts[p].send_bytes = comm->parts[p].receive_bytes = sizeof *opening;
    }
    if (!comm_transfer(comm, error)) return false;
    for (size_t p = 0; p < comm->world; p++) {
        const CommHeader *ask = &opening->header, *other = &comm->openings[p].header;
        if (p == comm->rank || memcmp(ask, other, sizeof *ask) == 0) continue;
        if (other->run != ask->run || other->number != ask->number)
            return fail(error,
                        "rank %zu sent rank %zu what does not belong to %s; the network or a program is at fault", p,
                        comm->rank, comm->doing);
        comm_describe(theirs, sizeof theirs, other);
        comm_describe(ours, sizeof ours, ask);
        return fail(error,
                    "the ranks disagree: rank %zu called %s and rank %zu %s%s; start all with the same program, flags "
                    "and data",
                    p, theirs, comm->rank, ours, strcmp(theirs, ours) == 0 ? " with other slices" : "");
    }
    return true;
}

// The result, from what came with the openings.
static inline void comm_finish_small(Comm* comm, const CommCall* call) {
    size_t size = comm_type_size((CommType)call->header.type);
    for (size_t p = 0; p < comm->world; p++) {
        CommSlice other = call->slices[p];
        comm->sources[p] = comm->openings[p].payload;
        if (call->header.operation == COMM_ALL_GATHER && p != comm->rank && other.end > other.first)
            memcpy(call->out + other.first * size, comm->openings[p].payload, (other.end - other.first) * size);
    }
    if (call->header.operation == COMM_ALL_REDUCE)
        comm_sum(call->out, comm, (CommType)call->header.type, (CommReduction)call->header.reduction,
                 (size_t)call->header.n);
}

// The sum of the own slice, to `out`, chunk by chunk.
static inline bool comm_reduce_slices(Comm* comm, const CommCall* call, char* out, uint64_t* bytes, Error* error) {
    CommType type = (CommType)call->header.type;
    size_t size = comm_type_size(type), chunk = COMM_CHUNK / size, longest = 0;
    CommSlice own = call->slices[comm->rank];
    for (size_t p = 0; p < comm->world; p++) longest = max_size(longest, call->slices[p].end - call->slices[p].first);
    for (size_t start = 0; start < longest; start += chunk) {
        size_t own_length = own.end - own.first, count = start < own_length ? min_size(chunk, own_length - start) : 0;
        for (size_t p = 0; p < comm->world; p++) {
            const char* mine = call->in + (call->slices[p].first + start) * size;
            size_t length = call->slices[p].end - call->slices[p].first;
            comm->sources[p] = p == comm->rank ? mine : comm->staging + p * COMM_CHUNK;
            if (p == comm->rank) continue;
            comm->parts[p].send = mine;
            comm->parts[p].send_bytes = start < length ? size * min_size(chunk, length - start) : 0;
            comm->parts[p].receive = comm->staging + p * COMM_CHUNK;
            comm->parts[p].receive_bytes = size * count;
        }
        if (!comm_transfer_payload(comm, bytes, error)) return false;
        comm_sum(out + start * size, comm, type, (CommReduction)call->header.reduction, count);
    }
    return true;
}

// Every rank sends its slice of call->out to all; to all but the root, if there is one: that has the whole vector.
static inline bool comm_spread_slices(Comm* comm, const CommCall* call, size_t root, uint64_t* bytes, Error* error) {
    size_t size = comm_type_size((CommType)call->header.type);
    for (size_t p = 0; p < comm->world; p++) {
        CommSlice own = call->slices[comm->rank], other = call->slices[p];
        if (p == comm->rank) continue;
        comm->parts[p].send = call->out + own.first * size;
        comm->parts[p].receive = call->out + other.first * size;
        if (p != root) comm->parts[p].send_bytes = (own.end - own.first) * size;
        if (comm->rank != root) comm->parts[p].receive_bytes = (other.end - other.first) * size;
    }
    return comm_transfer_payload(comm, bytes, error);
}

// The root sends every rank its slice, and the ranks send the slices on: no rank sends more than the vector, nearly.
static inline bool comm_broadcast_slices(Comm* comm, const CommCall* call, uint64_t* bytes, Error* error) {
    size_t size = comm_type_size((CommType)call->header.type), root = call->header.root;
    for (size_t p = 0; p < comm->world && comm->rank == root; p++) {
        if (p == root) continue;
        comm->parts[p].send = call->out + call->slices[p].first * size;
        comm->parts[p].send_bytes = (call->slices[p].end - call->slices[p].first) * size;
    }
    if (comm->rank != root) {
        CommSlice own = call->slices[comm->rank];
        comm->parts[root].receive = call->out + own.first * size;
        comm->parts[root].receive_bytes = (own.end - own.first) * size;
    }
    return comm_transfer_payload(comm, bytes, error) && comm_spread_slices(comm, call, root, bytes, error);
}

// call->in is the own slice; call->out is on rank 0 only.
static inline bool comm_gather_slices(Comm* comm, const CommCall* call, uint64_t* bytes, Error* error) {
    size_t size = comm_type_size((CommType)call->header.type);
    CommSlice own = call->slices[comm->rank];
    if (comm->rank != 0) {
        comm->parts[0].send = call->in;
        comm->parts[0].send_bytes = (own.end - own.first) * size;
    } else {
        if (own.end > own.first) memmove(call->out + own.first * size, call->in, (own.end - own.first) * size);
        for (size_t p = 1; p < comm->world; p++) {
            comm->parts[p].receive = call->out + call->slices[p].first * size;
            comm->parts[p].receive_bytes = (call->slices[p].end - call->slices[p].first) * size;
        }
    }
    return comm_transfer_payload(comm, bytes, error);
}

// What a caller can get wrong by itself.
static inline bool comm_check_call(const Comm* comm, const CommCall* call, Error* error) {
    const CommHeader* h = &call->header;
    bool reduces = h->operation == COMM_ALL_REDUCE || h->operation == COMM_REDUCE_SCATTER;
    if (h->operation >= COMM_OPERATIONS || h->type >= COMM_TYPES || h->reduction >= COMM_REDUCTIONS)
        return fail(error, "rank %zu called a collective that does not exist", comm->rank);
    if (reduces && (h->type == COMM_BYTES || (h->reduction != COMM_SUM && h->type != COMM_DOUBLE)))
        return fail(error, "rank %zu called %s; bytes are not summed, and there is a max and min of double only",
                    comm->rank, comm->doing);
    if (h->root >= comm->world)
        return fail(error, "rank %zu called %s; there is no such rank", comm->rank, comm->doing);
    for (size_t p = 0, end = 0; p < comm->world; end = call->slices[p++].end)
        if (call->slices[p].first < end || call->slices[p].end < call->slices[p].first || call->slices[p].end > h->n)
            return fail(error,
                        "rank %zu called %s with the slice [%zu, %zu) for rank %zu; slices lie in the vector and "
                        "follow each other",
                        comm->rank, comm->doing, call->slices[p].first, call->slices[p].end, p);
    return true;
}

static inline bool comm_run(Comm* comm, const CommCall* call, uint64_t* bytes, Error* error) {
    size_t offset =
        call->slices[comm->rank].first * comm_type_size((CommType)min_size(call->header.type, COMM_TYPES - 1));
    comm_describe(comm->doing, sizeof comm->doing, &call->header);
    if (!comm_check_call(comm, call, error)) return false;
    if (call->delay_ms > 0) comm_sleep(call->delay_ms);
    bool small = comm_is_small(comm, call);
    if (!comm_agree(comm, call, small, bytes, error)) return false;
    if (small) {
        comm_finish_small(comm, call);
        return true;
    }
    switch (call->header.operation) {
        case COMM_ALL_REDUCE:
            return comm_reduce_slices(comm, call, call->out + offset, bytes, error) &&
                   comm_spread_slices(comm, call, COMM_UNKNOWN, bytes, error);
        case COMM_REDUCE_SCATTER: return comm_reduce_slices(comm, call, call->out, bytes, error);
        case COMM_ALL_GATHER: return comm_spread_slices(comm, call, COMM_UNKNOWN, bytes, error);
        case COMM_BROADCAST: return comm_broadcast_slices(comm, call, bytes, error);
        case COMM_GATHER: return comm_gather_slices(comm, call, bytes, error);
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// 8. Progress
//
// One thread per Comm takes the requests in the order in which they were started. Between them it sends heartbeats,
// hears the other ranks, and sees whether they are still there. After a fault it tells the others and ends; all
// requests that are not finished have failed.

#define COMM_MPI_IDLE_MS 10.0  // between looks for notices of other ranks: MPI cannot wake a thread

static inline bool comm_idle(Comm* comm, Error* error) {
    size_t count = 0;
    comm->doing[0] = 0;
    comm_heartbeat(comm);
    comm_watch(&comm->polls[count++], comm->wake, POLLIN);
    for (size_t p = 0; p < comm->world; p++) comm_watch(&comm->polls[count++], comm->links[p].control, POLLIN);
    comm_poll(comm->polls, count, comm->mpi ? now_ms() + COMM_MPI_IDLE_MS : comm->heartbeat_ms);
    if (comm->polls[0].revents && !comm_woken(comm, error)) return false;
#ifdef LLMTRAIN_MPI
    if (comm->mpi) return comm_hear_mpi(error);
#endif
    double now = comm_clock(comm);
    for (size_t p = 0; p < comm->world; p++)
        if (comm->polls[1 + p].revents && !comm_hear(comm, p, error)) return false;
    for (size_t p = 0; p < comm->world; p++)
        if (p != comm->rank && comm->links[p].control < 0 && !comm->links[p].left)
            return comm_fail_lost(comm, p, error);
    return !comm_find_silent(comm, now, comm->timeout_ms, error);
}

// Makes the fault known on this rank; the mutex is held on entry and on return, not while on_failure is called.
static inline void comm_record_failure(Comm* comm, const Error* error) {
    void (*on_failure)(void*) = comm->on_failure;
    void* context = comm->on_failure_context;
    comm->failed = true;
    comm->error = *error;
    comm->calling = on_failure != NULL;
    pthread_cond_broadcast(&comm->changed);
    if (on_failure == NULL) return;
    pthread_mutex_unlock(&comm->mutex);
    on_failure(context);
    pthread_mutex_lock(&comm->mutex);
    comm->calling = false;
    pthread_cond_broadcast(&comm->changed);
}

// Carries out the oldest request; the mutex is held on entry and on return.
static inline void comm_step(Comm* comm) {
    Error error;
    uint64_t bytes = 0;
    bool work = comm->finished < comm->started;
    const CommCall* call = &comm->calls[comm->finished % COMM_IN_FLIGHT];
    pthread_mutex_unlock(&comm->mutex);
    bool good = work ? comm_run(comm, call, &bytes, &error) : comm_idle(comm, &error);
    if (!good) comm_tell(comm, COMM_FAILED, error.text);
    pthread_mutex_lock(&comm->mutex);
    comm->statistics.bytes_sent += bytes;
    if (!good) {
        comm_record_failure(comm, &error);
    } else if (work) {
        comm->finished++;
        comm->statistics.operations++;
        pthread_cond_broadcast(&comm->changed);
    }
}

static inline void* comm_progress(void* argument) {
    Comm* comm = (Comm*)argument;
    pthread_mutex_lock(&comm->mutex);
    while (!comm->failed && !(comm->closing && comm->finished == comm->started)) comm_step(comm);
    pthread_mutex_unlock(&comm->mutex);
    return NULL;
}

// Starts a collective; does not wait, unless COMM_IN_FLIGHT of them are under way. Its memory must stay as it is until
// comm_wait has returned. `slices` is called here, not later.
static inline CommRequest comm_start(Comm* comm, CommOperation operation, CommReduction reduction, CommType type,
                                     void* out, const void* in, size_t n, size_t root, CommSlices slices,
                                     const void* context) {
    pthread_mutex_lock(&comm->mutex);
    double began = now_ms();
    while (!comm->failed && comm->started - comm->finished == COMM_IN_FLIGHT)
        pthread_cond_wait(&comm->changed, &comm->mutex);
    comm->statistics.waited_ms += now_ms() - began;
    uint64_t number = comm->started;
    CommCall* call = &comm->calls[number % COMM_IN_FLIGHT];
    if (!comm->failed) {
        call->slices = comm->slices + number % COMM_IN_FLIGHT * comm->world;
        for (size_t p = 0; p < comm->world; p++)
            call->slices[p] = slices ? slices(p, context) : comm_even_slice(p, comm->world, n);
        memset(&call->header, 0, sizeof call->header);
        call->header.run = comm->run;
        call->header.number = number;
        call->header.n = n;
        call->header.slices = hash_bytes(call->slices, comm->world * sizeof(CommSlice));
        call->header.operation = (uint32_t)operation;
        call->header.type = (uint32_t)type;
        call->header.reduction = (uint32_t)reduction;
        call->header.root = (uint32_t)root;
        call->out = (char*)out;
        call->in = (const char*)in;
        call->delay_ms = comm->delay_ms;
        comm->started++;
        if (!comm->running) comm_step(comm);  // there is no thread where there is but one rank
    }
    pthread_mutex_unlock(&comm->mutex);
    if (comm->running) comm_wake(comm);
    return number;
}

// Waits until a collective is finished; false if it failed.
static inline bool comm_wait(Comm* comm, CommRequest request, Error* error) {
    double began = now_ms();
    pthread_mutex_lock(&comm->mutex);
    while (!comm->failed && comm->finished <= request) pthread_cond_wait(&comm->changed, &comm->mutex);
    bool good = comm->finished > request;
    if (!good) *error = comm->error;
    comm->statistics.waited_ms += now_ms() - began;
    pthread_mutex_unlock(&comm->mutex);
    return good;
}

// ------------------------------------------------------------------------------------------------
// 9. Use

#ifdef LLMTRAIN_MPI
static inline bool comm_open_mpi(Comm* comm, Error* error) {
    int given = 0, rank = 0, world = 0, already = 0, local_rank = 0, local_world = 0;
    MPI_Comm local;
    // One thread speaks MPI at a time: this one here and at the end, the progress thread in between.
    if (MPI_Initialized(&already) != MPI_SUCCESS ||
        (!already && MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &given) != MPI_SUCCESS))
        return fail(error, "MPI does not start; see what it printed");
    comm->initialised = !already;
    if (already) MPI_Query_thread(&given);
    if (given < MPI_THREAD_SERIALIZED)
        return fail(error, "this MPI can be used from one thread only; use another, or sockets");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if ((size_t)rank != comm->rank || (size_t)world != comm->world)
        return fail(error,
                    "mpirun says rank %zu of %zu, MPI says rank %d of %d; use the mpirun of the MPI that this program "
                    "was built with",
                    comm->rank, comm->world, rank, world);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &local);
    MPI_Comm_rank(local, &local_rank);
    MPI_Comm_size(local, &local_world);
    MPI_Comm_free(&local);
    comm->local_rank = (size_t)local_rank;
    comm->local_world = (size_t)local_world;
    return true;
}
#endif

// What comm_allocate takes, nearly: staging memory, and the queue.
static inline size_t comm_bytes(size_t world) {
    return world > 1 ? world * COMM_CHUNK + COMM_IN_FLIGHT * (sizeof(CommCall) + world * sizeof(CommSlice)) : 0;
}

static inline bool comm_allocate(Comm* comm) {
    size_t N = comm->world, polls = 2 * N + COMM_PENDING + 2;
    bool good = (comm->links = (CommLink*)allocate(N * sizeof(CommLink))) != NULL;
    for (size_t p = 0; good && p < N; p++) comm->links[p].data = comm->links[p].control = -1;
    good = good && (comm->parts = (CommPart*)allocate(N * sizeof(CommPart))) != NULL;
    good = good && (comm->openings = (CommOpening*)allocate(N * sizeof(CommOpening))) != NULL;
    good = good && (comm->sources = (const char**)allocate(N * sizeof(char*))) != NULL;
    good = good && (comm->named = (bool*)allocate(N * sizeof(bool))) != NULL;
    good = good && (comm->polls = (struct pollfd*)allocate(polls * sizeof(struct pollfd))) != NULL;
    good = good && (comm->staging = (char*)allocate(N > 1 ? N * COMM_CHUNK : 0)) != NULL;
    good = good && (comm->calls = (CommCall*)allocate(COMM_IN_FLIGHT * sizeof(CommCall))) != NULL;
    good = good && (comm->slices = (CommSlice*)allocate(COMM_IN_FLIGHT * N * sizeof(CommSlice))) != NULL;
#ifdef LLMTRAIN_MPI
    good = good && (comm->requests = (MPI_Request*)allocate(2 * N * sizeof(MPI_Request))) != NULL;
    good = good && (comm->indices = (int*)allocate(2 * N * sizeof(int))) != NULL;
#endif
    return good;
}

// Ends everything: lets the requests under way finish, says goodbye, and gives memory and connections back.
static inline void comm_close(Comm* comm) {
    Error unused;
    if (comm->running) {
        pthread_mutex_lock(&comm->mutex);
        comm->closing = true;
        pthread_mutex_unlock(&comm->mutex);
        comm_wake(comm);
        pthread_join(comm->thread, NULL);
    }
    if (comm->links && !comm->failed) comm_tell(comm, COMM_LEFT, "");
    for (size_t p = 0; comm->links && p < comm->world; p++) {
        comm_hear(comm, p, &unused);  // a connection closed with something unread would take back what was sent last
        comm_close_socket(&comm->links[p].control);
        comm_close_socket(&comm->links[p].data);
    }
#ifdef LLMTRAIN_MPI
    // After a fault the others would be waited for in vain; mpirun ends all when this process ends.
    if (comm->initialised && !comm->failed) MPI_Finalize();
    free(comm->requests);
    free(comm->indices);
#endif
    comm_close_socket(&comm->wake);
    free(comm->links);
    free(comm->parts);
    free(comm->openings);
    free(comm->sources);
    free(comm->named);
    free(comm->polls);
    free(comm->staging);
    free(comm->calls);
    free(comm->slices);
    pthread_mutex_destroy(&comm->mutex);
    pthread_cond_destroy(&comm->changed);
    memset(comm, 0, sizeof *comm);
    comm->wake = -1;
}

static inline bool comm_open_steps(Comm* comm, const CommLaunch* launch, Error* error) {
    if (!comm_allocate(comm)) return fail(error, "not enough memory for the connections of %zu ranks", comm->world);
    if (comm->world == 1) {
        comm->local_rank = 0;
        comm->local_world = 1;
    } else if (!comm->mpi) {
        CommEntry* table = (CommEntry*)allocate(comm->world * sizeof *table);
        int listener = -1;
        bool good = table != NULL || fail(error, "not enough memory for the addresses of %zu ranks", comm->world);
        good = good && comm_connect_all(comm, table, launch, &listener, error);
        if (!good && comm->links) comm_tell(comm, COMM_FAILED, error->text);
        comm_close_socket(&listener);
        free(table);
        if (!good) return false;
    } else {
#ifdef LLMTRAIN_MPI
        if (!comm_open_mpi(comm, error)) return false;
#else
        return fail(error,
                    "MPI was asked for, but this program was built without it; build it with MPI, or use sockets");
#endif
    }
    if (comm->world > 1) {
        comm->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        comm->running = comm->wake >= 0 && pthread_create(&comm->thread, NULL, comm_progress, comm) == 0;
        if (!comm->running)
            return fail(error, "rank %zu cannot start its thread: %s; raise the limits (ulimit -u, -n)", comm->rank,
                        strerror(errno));
    }
    return comm_wait(comm, comm_start(comm, COMM_BARRIER, COMM_SUM, COMM_BYTES, NULL, NULL, 0, 0, NULL, NULL), error);
}

// Meets the other ranks; returns when all are there. After a failure there is nothing to close.
static inline bool comm_open(Comm* comm, const CommLaunch* launch, double timeout_ms, Error* error) {
    memset(comm, 0, sizeof *comm);
    comm->wake = -1;
    comm->rank = launch->rank;
    comm->world = launch->world;
    comm->local_rank = launch->local_rank;
    comm->local_world = launch->local_world;
    comm->timeout_ms = timeout_ms;
    comm->mpi = launch->mpi && launch->world > 1;
    memcpy(comm->run_name, launch->run, sizeof comm->run_name);
    comm->run = hash_bytes(launch->run, strlen(launch->run)) + launch->world;
    pthread_mutex_init(&comm->mutex, NULL);
    pthread_cond_init(&comm->changed, NULL);
    if (comm_open_steps(comm, launch, error)) return true;
    pthread_mutex_lock(&comm->mutex);
    comm->failed = true;
    pthread_mutex_unlock(&comm->mutex);
    comm_close(comm);
    return false;
}

// data (n): on every rank the sum over all ranks.
static inline CommRequest comm_all_reduce_start(Comm* comm, void* data, size_t n, CommType type,
                                                CommReduction reduction) {
    return comm_start(comm, COMM_ALL_REDUCE, reduction, type, data, data, n, 0, NULL, NULL);
}

// out (own slice): the sum over all ranks of that slice of data (n). out may be the slice's place in data, or apart.
static inline CommRequest comm_reduce_scatter_start(Comm* comm, void* out, const void* data, size_t n, CommType type,
                                                    CommSlices slices, const void* context) {
    return comm_start(comm, COMM_REDUCE_SCATTER, COMM_SUM, type, out, data, n, 0, slices, context);
}

// data (n): every rank gives its own slice, and gets all others.
static inline CommRequest comm_all_gather_start(Comm* comm, void* data, size_t n, CommType type, CommSlices slices,
                                                const void* context) {
    return comm_start(comm, COMM_ALL_GATHER, COMM_SUM, type, data, data, n, 0, slices, context);
}

// data (n): the root's, on every rank.
static inline CommRequest comm_broadcast_start(Comm* comm, void* data, size_t n, CommType type, size_t root) {
    return comm_start(comm, COMM_BROADCAST, COMM_SUM, type, data, data, n, root, NULL, NULL);
}

// all (n, on rank 0; elsewhere not touched): the slices of all ranks; own: this rank's.
static inline CommRequest comm_gather_start(Comm* comm, void* all, const void* own, size_t n, CommType type,
                                            CommSlices slices, const void* context) {
    return comm_start(comm, COMM_GATHER, COMM_SUM, type, all, own, n, 0, slices, context);
}

static inline CommRequest comm_barrier_start(Comm* comm) {
    return comm_start(comm, COMM_BARRIER, COMM_SUM, COMM_BYTES, NULL, NULL, 0, 0, NULL, NULL);
}

// The same, waited for.
static inline bool comm_all_reduce(Comm* comm, void* data, size_t n, CommType type, CommReduction reduction,
                                   Error* error) {
    return comm_wait(comm, comm_all_reduce_start(comm, data, n, type, reduction), error);
}
static inline bool comm_reduce_scatter(Comm* comm, void* out, const void* data, size_t n, CommType type,
                                       CommSlices slices, const void* context, Error* error) {
    return comm_wait(comm, comm_reduce_scatter_start(comm, out, data, n, type, slices, context), error);
}
static inline bool comm_all_gather(Comm* comm, void* data, size_t n, CommType type, CommSlices slices,
                                   const void* context, Error* error) {
    return comm_wait(comm, comm_all_gather_start(comm, data, n, type, slices, context), error);
}
static inline bool comm_broadcast(Comm* comm, void* data, size_t n, CommType type, size_t root, Error* error) {
    return comm_wait(comm, comm_broadcast_start(comm, data, n, type, root), error);
}
static inline bool comm_gather(Comm* comm, void* all, const void* own, size_t n, CommType type, CommSlices slices,
                               const void* context, Error* error) {
    return comm_wait(comm, comm_gather_start(comm, all, own, n, type, slices, context), error);
}
static inline bool comm_barrier(Comm* comm, Error* error) { return comm_wait(comm, comm_barrier_start(comm), error); }

// all (world, count): every rank has filled its own row, and gets all others. A row of up to COMM_SMALL bytes takes one
// round of messages.
static inline bool comm_gather_doubles(Comm* comm, double* all, size_t count, Error* error) {
    return comm_all_gather(comm, all, comm->world * count, COMM_DOUBLE, NULL, NULL, error);
}

static inline CommStatistics comm_statistics(Comm* comm) {
    pthread_mutex_lock(&comm->mutex);
    CommStatistics statistics = comm->statistics;
    pthread_mutex_unlock(&comm->mutex);
    return statistics;
}

// While ranks do alone what may take long (save, load), those that wait for them in a collective are patient: they wait for
// ever, as long as heartbeats come. MPI has no heartbeats, and mpirun ends all ranks when one dies.
static inline void comm_be_patient(Comm* comm, bool patient) { __atomic_store_n(&comm->patient, patient, __ATOMIC_RELAXED); }

// True, with the sentence, if a fault is known; does not wait.
static inline bool comm_failed(Comm* comm, Error* error) {
    pthread_mutex_lock(&comm->mutex);
    bool failed = comm->failed;
    if (failed) *error = comm->error;
    pthread_mutex_unlock(&comm->mutex);
    return failed;
}

// Has a function called once when the Comm fails, by the progress thread, as soon as the fault is known here; by this
// call itself if it is known already. NULL takes that back: when this returns, the function is not called any more, nor
// still running. The function must not call this one.
static inline void comm_on_failure(Comm* comm, void (*on_failure)(void* context), void* context) {
    pthread_mutex_lock(&comm->mutex);
    while (comm->calling) pthread_cond_wait(&comm->changed, &comm->mutex);
    comm->on_failure = on_failure;
    comm->on_failure_context = context;
    bool late = comm->failed && on_failure;
    pthread_mutex_unlock(&comm->mutex);
    if (late) on_failure(context);
}

// This rank gives up for a reason of its own: calls of all ranks fail, with "rank 2 gave up: " and the reason. To be
// called whatever is in flight, from any thread; afterwards there is only comm_close.
static inline void comm_abandon(Comm* comm, const char* reason) {
    Error error;
    fail(&error, "rank %zu gave up: %.900s", comm->rank, reason);
    pthread_mutex_lock(&comm->mutex);
    if (!comm->failed && !comm->running) comm_record_failure(comm, &error);
    if (!comm->failed && !comm->abandoning) {
        comm->abandoning = true;
        comm->error = error;
        comm_wake(comm);
    }
    while (!comm->failed) pthread_cond_wait(&comm->changed, &comm->mutex);
    pthread_mutex_unlock(&comm->mutex);
}

// Slices from a table of where each rank's text begins, with the end of the last: (world + 1)
static inline CommSlice comm_slice_of_table(size_t rank, const void* context) {
    const size_t* begins = (const size_t*)context;
    CommSlice slice = {begins[rank], begins[rank + 1]};
    return slice;
}

// The texts of all ranks, one behind the other; rank p's is *texts + begins[p]. begins: (world + 1). The caller frees
// both, whatever comes of it. A rank without memory for that cannot be waited for: it gives up.
static inline bool comm_gather_texts(Comm* comm, char** texts, size_t** begins, const char* text, Error* error) {
    size_t N = comm->world, length = strlen(text) + 1;
    int64_t* lengths = (int64_t*)allocate(N * sizeof(int64_t));
    size_t* places = (size_t*)allocate((N + 1) * sizeof(size_t));
    bool memory = lengths && places, good = memory;
    *texts = NULL;
    *begins = places;
    if (good) lengths[comm->rank] = (int64_t)length;
    good = good && comm_all_gather(comm, lengths, N, COMM_INT64, NULL, NULL, error);
    for (size_t p = 0; good && p < N; p++) places[p + 1] = places[p] + (size_t)lengths[p];
    if (good) memory = (*texts = (char*)allocate(places[N])) != NULL;
    if (!memory) {
        fail(error, "not enough memory for the texts of %zu ranks", N);
        comm_abandon(comm, error->text);
    }
    good = good && memory;
    if (good) memcpy(*texts + places[comm->rank], text, length);
    // Without a letter anywhere there is nothing to send.
    if (good && places[N] > N)
        good = comm_all_gather(comm, *texts, places[N], COMM_BYTES, comm_slice_of_table, places, error);
    free(lengths);
    return good;
}

// True on all ranks if the text is the same on all; otherwise false on all, and the error names a rank whose text is
// not that of most ranks (of rank 0, if there are as many of each), and both texts. `what` names it: "--batch".
static inline bool comm_check_equal(Comm* comm, const char* what, const char* text, Error* error) {
    size_t N = comm->world, odd = COMM_UNKNOWN, usual = 0, most = 0, *begins;
    char* texts;
    bool good = comm_gather_texts(comm, &texts, &begins, text, error);
    for (size_t p = 0; good && p < N; p++) {
        size_t same = 0;
        for (size_t q = 0; q < N; q++) same += strcmp(texts + begins[p], texts + begins[q]) == 0;
        if (same > most) {
            most = same;
            usual = p;
        }
    }
    for (size_t p = 0; good && p < N && odd == COMM_UNKNOWN; p++)
        if (strcmp(texts + begins[p], texts + begins[usual]) != 0) odd = p;
    if (good && odd != COMM_UNKNOWN)
        good = fail(error,
                    "the ranks disagree on %.200s: it is '%.200s' on rank %zu and '%.200s' on rank %zu; start all "
                    "ranks with the same",
                    what, texts + begins[odd], odd, texts + begins[usual], usual);
    free(begins);
    free(texts);
    return good;
}

// Every rank says whether its part of something went well, and error->text why if not. True on all ranks if all parts
// did; otherwise false on all, with the sentence of the lowest rank that failed: "rank 2: cannot read ...", without the
// rank if all have failed with the very same sentence. The Comm stays usable.
static inline bool comm_agree_all(Comm* comm, bool good, Error* error) {
    size_t N = comm->world, failures = 0, same = 0, first = COMM_UNKNOWN, *begins;
    char* texts;
    const char* own = good ? "" : error->text[0] ? error->text : "failed, and did not say why";
    bool heard = comm_gather_texts(comm, &texts, &begins, own, error);
    for (size_t p = 0; heard && p < N; p++) {
        const char* text = texts + begins[p];
        if (text[0] == 0) continue;
        if (first == COMM_UNKNOWN) first = p;
        failures++;
        same += strcmp(text, texts + begins[first]) == 0;
    }
    good = heard && failures == 0;
    if (failures > 0 && same == N) fail(error, "%s", texts + begins[first]);
    else if (failures > 0) fail(error, "rank %zu: %s", first, texts + begins[first]);
    free(begins);
    free(texts);
    return good;
}

#endif  // LLMTRAIN_COMM_H
