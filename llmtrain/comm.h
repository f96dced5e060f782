// comm.h: what the ranks of a run say to each other, on CPUs. Which rank is which: launch.h.
//
//   1. collectives  what the ranks do together, as data: operation, type, count, and the slice of each rank
//   2. sockets      connections with deadlines
//   3. MPI          in place of sockets, with -DLLMTRAIN_MPI
//   4. faults       who is to blame, and that everybody hears of it
//   5. meeting      all ranks come to rank 0, and then each connects with each
//   6. transfers    every rank sends to every rank
//   7. sums         in the order of the ranks
//   8. operations   each collective as transfers and sums
//   9. progress     the thread that carries them out under the computation, and watches the others between them
//  10. use          comm_start, comm_wait; comm_open, comm_close; comm_gather_texts, comm_agree_all; comm_failed,
//                   comm_on_failure, comm_abort
//
// In short:
//
//   CommLaunch launch;  Comm comm;  Error error;
//   comm_find(&launch, &error)                        or comm_spawn(&launch, 4, &error), before any thread is started
//   comm_open(&comm, &launch, 60e3, &error)
//   CommRequest sum = comm_start(&comm, COMM_ALL_REDUCE, COMM_FLOAT, x, x, n, 0, NULL, NULL);
//   ... compute ...
//   comm_wait(&comm, sum, &error)
//   comm_close(&comm);
//   exit_code = comm_reap(&launch, exit_code, 10e3, &error);
//
// All ranks call the same collectives in the same order, each from one thread at a time. An element of a sum is the sum
// over ranks 0, 1, ... in this order, in float for the 16-bit types, rounded once at the end: the same bits on every
// rank, in every run, through every transport; and all_reduce is reduce_scatter followed by all_gather, to the bit.
//
// A rank that dies, stops, gives up (comm_abort) or calls something else makes every other rank's call return false
// with a sentence that names it, after the time-out at the latest; the Comm can then only be closed. That holds between
// collectives too: comm_failed and on_failure tell of it without waiting. A rank may compute for as long as it likes
// while no other waits for it; a collective fails when the time-out has passed without a byte from a rank it needs.
// Through MPI there are no connections to watch: a rank that dies is left to mpirun, and only who waits for a rank that
// stops hears of it.

#ifndef LLMTRAIN_COMM_H
#define LLMTRAIN_COMM_H

#include "fault.h"
#include "launch.h"
#include "dtypes.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#ifdef LLMTRAIN_MPI
#define OMPI_SKIP_MPICXX
#include <mpi.h>
#endif

#define COMM_IN_FLIGHT ((uint64_t)256)      // requests started and not finished; a further start waits
#define COMM_CHUNK ((size_t)256 << 10)      // bytes that one rank sends to another for a sum at a time: staging memory
#define COMM_GRACE_MS 1000.0                // to hear why a rank has closed its connections
#define COMM_GUESTS ((size_t)64)            // that have connected and not said who they are; of more, the first must go
#define COMM_GUEST_MS 1.0                   // between looks whether they have
#define COMM_FILES_LEAST ((rlim_t)32)       // that a rank has open beside its connections to others
#define COMM_FILES ((rlim_t)256)            // that it may have open beside these: token shards
#define COMM_CONNECT_MS 5000.0              // for an address to answer
#define COMM_RETRY_MS 50.0                  // between attempts to reach rank 0
#define COMM_MPI_PAUSE_MS 0.05              // between looks at a transfer: MPI has no wait with a deadline
#define COMM_MPI_IDLE_MS 10.0               // between looks for notices of other ranks: MPI cannot wake a thread

// ------------------------------------------------------------------------------------------------
// 1. Collectives
//
// A vector of n elements is cut into one slice per rank, in the order of the ranks; slices may be of any length, and
// there may be gaps between them.

typedef Dtype CommType;  // one of these; bytes cannot be summed
#define COMM_BYTES DTYPE_U8
#define COMM_INT64 DTYPE_I64
#define COMM_FLOAT DTYPE_F32
#define COMM_BF16 DTYPE_BF16
#define COMM_F16 DTYPE_F16
typedef enum {
    COMM_BARRIER,         // nobody passes until all have come
    COMM_ALL_REDUCE,      // out = in (n): on every rank the sum over all ranks
    COMM_REDUCE_SCATTER,  // out (own slice): the sum over all ranks of that slice of in (n); its place there, or apart
    COMM_ALL_GATHER,      // out = in (n): every rank gives its own slice, and gets all others
    COMM_BROADCAST,       // out = in (n): the root's, on every rank; for what is small, since the root sends it to each
    COMM_OPERATIONS
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

// Rank's slice of a bucket of n elements in the flat vector, counted from the bucket's beginning. Slices begin on multiples
// of SHARD_UNIT elements, which 16-byte accesses to every array need, and are as even as that allows: of equal length for
// 2, 4 and 8 ranks, since a bucket is a multiple of 64 elements.
enum { SHARD_UNIT = 8 };

static inline CommSlice shard_slice(size_t n, size_t rank, size_t world) {
    CommSlice units = comm_even_slice(rank, world, n / SHARD_UNIT);
    CommSlice slice = {units.first * SHARD_UNIT, units.end * SHARD_UNIT};
    return slice;
}

static inline size_t comm_length(CommSlice s) { return s.end - s.first; }

static inline size_t comm_type_size(CommType type) { return dtype_bytes(type); }

// Begins every collective, from each rank to each, and must be equal everywhere.
typedef struct {
    uint64_t number;      // of the collective, from 0 (part of comm_open)
    uint64_t n, slices;   // elements; hash of the slices
    uint32_t operation, type, root, unused;
} CommHeader;

typedef struct {
    CommHeader header;
    char* out;           // where the result goes, or the vector itself for operations in place
    const char* in;
    CommSlice* slices;   // (world) in bytes
} CommCall;

typedef uint64_t CommRequest;  // number of the collective

// Their values are such that no other program begins with one what it says.
typedef enum { COMM_HEARTBEAT = 0x6c6c6d74, COMM_WELCOME, COMM_LEFT, COMM_FAILED } CommNoticeKind;
enum { COMM_NOTICE_BYTES = 1024 };

typedef struct {
    uint32_t kind;
    char text[COMM_NOTICE_BYTES];  // COMM_FAILED: what happened
} CommNotice;

static inline CommNotice comm_notice(CommNoticeKind kind, const char* words) {
    CommNotice notice;
    memset(&notice, 0, sizeof notice);
    notice.kind = (uint32_t)kind;
    snprintf(notice.text, sizeof notice.text, "%s", words);
    return notice;
}

// What a transfer still has to send to a rank, or to receive from it.
typedef struct {
    char* at;
    size_t bytes;
#ifdef LLMTRAIN_MPI
    MPI_Request request;
#endif
} CommPart;
enum { COMM_OUT, COMM_IN };

// Another rank, over two connections: one for the collectives, one to stay in touch. Of the own only what is said so.
typedef struct {
    int data, control;   // -1: none
    bool left;           // it said that it ended its run
    bool mute;           // it takes no more notices: its buffer is full, or it has had the last
    bool named;          // in a message that is being made
    double heard_ms;     // when it was last heard of; 0: it has not come yet, or MPI looks after it
    size_t notice_bytes; // of the notice that have come
    CommNotice notice;   // of the own: to all others, through MPI
    CommHeader header;   // of the collective in progress; the own one too
    CommPart heads[2];   // COMM_OUT, COMM_IN: headers, which go before the first parts of a collective
    CommPart parts[2];   // likewise: of the transfer in progress
    const char* source;  // of the sum in progress; the own one too
} CommLink;

typedef struct {
    double waited_ms;    // spent in comm_wait
    uint64_t bytes_sent; // by finished collectives; headers and notices are not counted
} CommStatistics;

typedef struct {
    size_t rank, world, local_rank, local_world;
    double timeout_ms;
    bool mpi;
    bool patient;                    // see comm_extend_timeout
    char run[64];                    // its identifier
    void (*on_failure)(void* context);  // see comm_on_failure; NULL: nothing
    void* on_failure_context;

    // Of the progress thread while it runs
    CommLink* links;                 // (world)
    struct pollfd* polls;            // (2 world + 2)
    char* staging;                   // (world, COMM_CHUNK)
    uint64_t sent;                   // payload of the collective in progress
    double heartbeat_ms;             // when the next is due
    double looked_ms;                // when the clock was last looked at, see comm_clock
    double resumed_ms;               // when this process was last found to have been stopped itself
    char doing[192];                 // for messages: "in all_reduce of 7 float (operation 3)"
    int listener;                    // during the meeting; otherwise -1

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

// "all_reduce of 1000 fp32 (operation 17)"
static inline void comm_describe(char* text, size_t size, const CommHeader* h) {
    static const char* const operations[COMM_OPERATIONS] = {"barrier", "all_reduce", "reduce_scatter", "all_gather",
                                                            "broadcast"};
    unsigned long long number = h->number, n = h->n;
    char root[40] = "";
    if (h->operation == COMM_BROADCAST) snprintf(root, sizeof root, " from rank %u", (unsigned)h->root);
    if (h->operation >= COMM_OPERATIONS || h->type >= DTYPE_COUNT) snprintf(text, size, "something unknown");
    else if (number == 0) snprintf(text, size, "the first exchange");
    else if (h->operation == COMM_BARRIER) snprintf(text, size, "barrier (operation %llu)", number);
    else
        snprintf(text, size, "%s of %llu %s%s (operation %llu)", operations[h->operation], n, DTYPES[h->type].name, root,
                 number);
}

// ------------------------------------------------------------------------------------------------
// 2. Sockets
//
// All are non-blocking; whoever waits does so in comm_poll, until a deadline.

// Waits for one of the events, at most until the deadline, at most a second, so that callers look at their clocks.
static inline void comm_poll(struct pollfd* polls, size_t count, double deadline) {
    double left = fmin(fmax(deadline - now_ms(), 0), 1e3);
    struct timespec time = {(time_t)(left / 1e3), (long)(fmod(left, 1e3) * 1e6)};
    ppoll(polls, (nfds_t)count, &time, NULL);
}

static inline void comm_watch(struct pollfd* p, int socket, int events) {
    p->fd = socket;
    p->events = (short)events;
    p->revents = 0;
}

static inline bool comm_again(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

// Whether the event is there; waits for it until the deadline.
static inline bool comm_await(int socket, int event, double deadline) {
    struct pollfd w;
    comm_watch(&w, socket, event);
    do comm_poll(&w, 1, deadline);
    while (w.revents == 0 && now_ms() < deadline);
    return w.revents != 0;
}

// Sends all bytes (POLLOUT) or receives them (POLLIN). False with errno ETIMEDOUT, or ECONNRESET also where the other
// end has closed.
static inline bool comm_move_all(int socket, void* data, size_t bytes, int event, double deadline) {
    for (size_t done = 0; done < bytes;) {
        char* at = (char*)data + done;
        ssize_t n = event == POLLOUT ? send(socket, at, bytes - done, MSG_NOSIGNAL) : recv(socket, at, bytes - done, 0);
        if (n == 0) errno = ECONNRESET;
        if (n == 0 || (n < 0 && !comm_again())) return false;
        if (n > 0) done += (size_t)n;
        else if (!comm_await(socket, event, deadline)) return errno = ETIMEDOUT, false;
    }
    return true;
}

// The address of the other end, as numbers.
static inline void comm_address_of(char text[64], int socket) {
    struct sockaddr_storage name;
    socklen_t length = sizeof name;
    snprintf(text, 64, "?");
    if (getpeername(socket, (struct sockaddr*)&name, &length) != 0 ||
        getnameinfo((struct sockaddr*)&name, length, text, 64, NULL, 0, NI_NUMERICHOST) != 0) return;
    if (strncmp(text, "::ffff:", 7) == 0 && strchr(text, '.'))
        memmove(text, text + 7, strlen(text + 7) + 1);  // IPv4 in IPv6
}

// A connection to a free port of this machine can be given that port itself, and then speaks with itself.
static inline bool comm_meets_itself(int connection) {
    struct sockaddr_storage here, there;
    socklen_t here_length = sizeof here, there_length = sizeof there;
    return getsockname(connection, (struct sockaddr*)&here, &here_length) == 0 &&
           getpeername(connection, (struct sockaddr*)&there, &there_length) == 0 && here_length == there_length &&
           memcmp(&here, &there, here_length) == 0;
}

// Connects with the first that answers of what the address means; -1 with the reason after a failure.
static inline int comm_connect(const char* address, size_t port, double deadline, Error* reason) {
    char service[16];
    struct addrinfo hints, *list = NULL;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    snprintf(service, sizeof service, "%zu", port);
    int unknown = getaddrinfo(address, service, &hints, &list), connection = -1;
    if (unknown != 0) fail(reason, "%s", gai_strerror(unknown));
    for (const struct addrinfo* at = unknown ? NULL : list; at && connection < 0; at = at->ai_next) {
        int status = 0;
        socklen_t length = sizeof status;
        double until = fmin(deadline, now_ms() + COMM_CONNECT_MS);
        connection = socket(at->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (connection < 0 || connect(connection, at->ai_addr, at->ai_addrlen) != 0) status = errno;
        if (status == EINPROGRESS && !comm_await(connection, POLLOUT, until)) status = ETIMEDOUT;
        if (status == EINPROGRESS) getsockopt(connection, SOL_SOCKET, SO_ERROR, &status, &length);
        if (status == 0 && comm_meets_itself(connection)) status = ECONNREFUSED;
        if (status == 0) break;
        fail(reason, "%s", strerror(status));
        comm_close_socket(&connection);
    }
    if (unknown == 0) freeaddrinfo(list);
    return connection;
}

// ------------------------------------------------------------------------------------------------
// 3. MPI
//
// What differs from sockets. One thread speaks MPI at a time: the caller's in comm_open and comm_close, the progress
// thread in between.

#ifdef LLMTRAIN_MPI

enum { COMM_MPI_DATA, COMM_MPI_NOTICE };  // tags
#define COMM_MPI_BYTES ((size_t)1 << 30)  // of one message: MPI counts in int

static inline bool comm_mpi_open(Comm* comm, Error* error) {
    int given = 0, rank = 0, world = 0;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &given) != MPI_SUCCESS)
        return fail(error, "MPI does not start; see what it printed");
    if (given < MPI_THREAD_SERIALIZED)
        return fail(error, "this MPI can be used from one thread only; use another, or sockets");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if ((size_t)rank != comm->rank || (size_t)world != comm->world)
        return fail(error, "mpirun says rank %zu of %zu, MPI says rank %d of %d; use the mpirun of the MPI that this "
                    "program was built with", comm->rank, comm->world, rank, world);
    for (size_t p = 0; p < comm->world; p++)
        for (int d = 0; d < 2; d++)
            comm->links[p].heads[d].request = comm->links[p].parts[d].request = MPI_REQUEST_NULL;
    return true;
}

// After a fault the others would be waited for in vain; mpirun ends all when this process ends.
static inline void comm_mpi_close(Comm* comm) {
    if (comm->mpi && !comm->failed) MPI_Finalize();
}

// As send and recv: bytes that have gone or come, -1 with EAGAIN if none have, 0 after an error.
static inline ssize_t comm_mpi_move(CommPart* part, size_t p, bool out) {
    int bytes = (int)min_size(part->bytes, COMM_MPI_BYTES), done = 0, status = MPI_SUCCESS;
    if (part->request == MPI_REQUEST_NULL && out)
        status = MPI_Isend(part->at, bytes, MPI_BYTE, (int)p, COMM_MPI_DATA, MPI_COMM_WORLD, &part->request);
    else if (part->request == MPI_REQUEST_NULL)
        status = MPI_Irecv(part->at, bytes, MPI_BYTE, (int)p, COMM_MPI_DATA, MPI_COMM_WORLD, &part->request);
    if (status != MPI_SUCCESS || MPI_Test(&part->request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return 0;
    errno = EAGAIN;
    return done ? bytes : -1;
}

// Tells all that the run has failed.
static inline void comm_mpi_tell(Comm* comm, const char* words) {
    double deadline = now_ms() + COMM_GRACE_MS;
    CommNotice* notice = &comm->links[comm->rank].notice;  // MPI may still read it after the grace time
    *notice = comm_notice(COMM_FAILED, words);
    for (size_t p = 0; p < comm->world; p++)
        if (p != comm->rank)
            MPI_Isend(notice, (int)sizeof *notice, MPI_BYTE, (int)p, COMM_MPI_NOTICE, MPI_COMM_WORLD,
                      &comm->links[p].parts[COMM_OUT].request);
    for (size_t p = 0; p < comm->world; p++)
        for (int done = p == comm->rank; !done && now_ms() < deadline;)
            if (MPI_Test(&comm->links[p].parts[COMM_OUT].request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) break;
}

// False if a rank says that the run has failed.
static inline bool comm_mpi_hear(Error* error) {
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

#else

static inline bool comm_mpi_open(Comm* comm, Error* error) {
    return (void)comm, fail(error, "this program was built without MPI; build it with MPI, or use sockets");
}
static inline void comm_mpi_close(Comm* comm) { (void)comm; }
static inline ssize_t comm_mpi_move(CommPart* part, size_t p, bool out) { return (void)part, (void)p, (void)out, 0; }
static inline void comm_mpi_tell(Comm* comm, const char* words) { (void)comm, (void)words; }
static inline bool comm_mpi_hear(Error* error) { return (void)error, true; }

#endif

// ------------------------------------------------------------------------------------------------
// 4. Faults
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

// Without waiting. That the run has failed is the last that is said.
static inline void comm_tell(Comm* comm, CommNoticeKind kind, const char* words) {
    CommNotice notice = comm_notice(kind, words);
    if (comm->mpi && kind == COMM_FAILED) comm_mpi_tell(comm, words);
    for (size_t p = 0; p < comm->world; p++) {
        CommLink* link = &comm->links[p];
        if (link->control < 0 || link->mute) continue;
        bool sent = send(link->control, &notice, sizeof notice, MSG_NOSIGNAL) == (ssize_t)sizeof notice;
        link->mute = !sent || kind == COMM_FAILED;
    }
}

static inline void comm_heartbeat(Comm* comm) {
    if (now_ms() < comm->heartbeat_ms) return;
    comm->heartbeat_ms = now_ms() + comm->timeout_ms / 4;
    comm_tell(comm, COMM_HEARTBEAT, "");
}

// Reads what rank p says; false if that is that the run has failed.
static inline bool comm_hear(Comm* comm, size_t p, Error* error) {
    CommLink* link = &comm->links[p];
    CommNotice* notice = &link->notice;
    while (link->control >= 0) {
        ssize_t n = recv(link->control, (char*)notice + link->notice_bytes, sizeof *notice - link->notice_bytes, 0);
        if (n < 0 && comm_again()) break;
        if (n <= 0) {
            comm_close_socket(&link->control);
            break;
        }
        link->heard_ms = now_ms();
        link->notice_bytes = (link->notice_bytes + (size_t)n) % sizeof *notice;
        if (link->notice_bytes > 0) continue;
        notice->text[sizeof notice->text - 1] = 0;
        if (notice->kind == COMM_LEFT) link->left = true;
        if (notice->kind == COMM_FAILED) return fail(error, "%s", notice->text);
    }
    return true;
}

// Rank p has closed its connections. Why? It has said so, or it is dead, and then its control connection ends too.
static inline bool comm_fail_lost(Comm* comm, size_t p, Error* error) {
    CommLink* link = &comm->links[p];
    double deadline = now_ms() + COMM_GRACE_MS;
    while (link->control >= 0 && !link->left && comm_await(link->control, POLLIN, deadline))
        if (!comm_hear(comm, p, error)) return false;
    if (comm->mpi)
        return fail(error, "MPI reported an error while rank %zu was %s; see what it printed", comm->rank, comm->doing);
    return fail(error, "rank %zu %s while rank %zu was %s; see what rank %zu printed%s", p,
                link->left ? "ended its run" : "is gone: its connection closed", comm->rank, comm->doing, p,
                link->left ? "" : ", and whether it was killed");
}

// "rank 2 has", "ranks 0, 3 have" or "ranks 1, 2, ... and 5 more have", of those named; false if there are none.
static inline bool comm_name_ranks(char text[160], const Comm* comm, const char* of_one, const char* of_some) {
    size_t count = 0, shown = 0, length;
    for (size_t p = 0; p < comm->world; p++) count += comm->links[p].named;
    length = (size_t)snprintf(text, 160, count == 1 ? "rank" : "ranks");
    for (size_t p = 0; p < comm->world && shown < 8; p++)
        if (comm->links[p].named)
            length += (size_t)snprintf(text + length, 160 - length, "%s%zu", shown++ ? ", " : " ", p);
    if (count > shown) length += (size_t)snprintf(text + length, 160 - length, " and %zu more", count - shown);
    snprintf(text + length, 160 - length, " %s", count == 1 ? of_one : of_some);
    return count > 0;
}

// False if there are ranks that nothing was heard of for so long.
static inline bool comm_check_silence(Comm* comm, double silence_ms, Error* error) {
    char names[160];
    for (size_t p = 0; p < comm->world; p++) {
        CommLink* link = &comm->links[p];
        double heard_ms = fmax(link->heard_ms, comm->resumed_ms);
        link->named = link->heard_ms > 0 && !link->left && comm->looked_ms - heard_ms > silence_ms;
    }
    if (!comm_name_ranks(names, comm, "has", "have")) return true;
    return fail(error, "%s not answered for %.1f s while rank %zu was %s: stopped, or its machine or the network is "
                "down", names, comm->timeout_ms / 1e3, comm->rank, comm->doing);
}

// What the transfer in progress has yet to move to or from a rank: events to wait for.
static inline int comm_events(const CommLink* link) {
    return (link->heads[COMM_OUT].bytes + link->parts[COMM_OUT].bytes > 0 ? POLLOUT : 0) |
           (link->heads[COMM_IN].bytes + link->parts[COMM_IN].bytes > 0 ? POLLIN : 0);
}

// The time-out has passed without a byte. Ranks that are silent are to blame, or else those that owe something.
static inline bool comm_fail_late(Comm* comm, Error* error) {
    char names[160];
    if (!comm_check_silence(comm, 0.75 * comm->timeout_ms, error)) return false;
    for (size_t p = 0; p < comm->world; p++) comm->links[p].named = comm_events(&comm->links[p]) != 0;
    comm_name_ranks(names, comm, "is", "are");
    return fail(error, "%s late: rank %zu has waited %.1f s %s%s; raise the time-out if so much is to be expected",
                names, comm->rank, comm->timeout_ms / 1e3, comm->doing,
                comm->mpi ? "" : ", and the program there is alive, but elsewhere");
}

// The progress thread was woken; false if that was to give up.
static inline bool comm_woken(Comm* comm, Error* error) {
    eventfd_t count;
    eventfd_read(comm->wake, &count);
    pthread_mutex_lock(&comm->mutex);
    bool abandoning = comm->abandoning;
    if (abandoning) *error = comm->error;
    pthread_mutex_unlock(&comm->mutex);
    return !abandoning;
}

// Waits until something can be moved, or until the deadline, or the next heartbeat; hears what the others say. False if
// that is that the run has failed, or if this rank gives up.
static inline bool comm_attend(Comm* comm, double deadline, Error* error) {
    struct pollfd* polls = comm->polls;
    size_t N = comm->world;
    bool moving = false, ready = false;
    for (size_t p = 0; p < N; p++) {
        const CommLink* link = &comm->links[p];
        int events = comm_events(link);
        moving |= events != 0;
        comm_watch(&polls[2 * p], link->control, POLLIN);
        comm_watch(&polls[2 * p + 1], events ? link->data : -1, events);
    }
    comm_watch(&polls[2 * N], comm->wake, POLLIN);
    comm_watch(&polls[2 * N + 1], comm->listener, POLLIN);
    if (comm->mpi) deadline = now_ms() + (moving ? COMM_MPI_PAUSE_MS : COMM_MPI_IDLE_MS);
    comm_poll(polls, 2 * N + 2, fmin(deadline, comm->heartbeat_ms));
    if (polls[2 * N].revents && !comm_woken(comm, error)) return false;
    if (comm->mpi) return comm_mpi_hear(error);
    // News after data, so that what can still be finished is.
    for (size_t p = 0; p < N; p++) ready |= polls[2 * p + 1].revents != 0;
    for (size_t p = 0; p < N && !ready; p++)
        if (polls[2 * p].revents && !comm_hear(comm, p, error)) return false;
    return true;
}

// While there is nothing to move: stays in touch, and sees whether those that have come are still there.
static inline bool comm_keep_watch(Comm* comm, double deadline, Error* error) {
    comm_heartbeat(comm);
    if (!comm_attend(comm, deadline, error)) return false;
    for (size_t p = 0; p < comm->world; p++) {
        const CommLink* link = &comm->links[p];
        if (link->heard_ms > 0 && link->control < 0 && !link->left) return comm_fail_lost(comm, p, error);
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// 5. Meeting
//
// Every rank listens. All connect to rank 0 and say who they are; when the last has come, rank 0 sends each the table
// of addresses. Then each rank connects to all lower ranks. Whoever is not of this run is told so and sent away. The
// first connection between two ranks is the one to stay in touch: who fails can tell all whom it has met.

#define COMM_MAGIC 0x34696172746d6c6cull  // "llmtrai", and the version of what is said

typedef enum { COMM_CONTROL, COMM_DATA } CommKind;
typedef struct {
    uint64_t magic;
    uint32_t kind, world, rank, port;  // port: where the rank listens
    char run[64];
} CommHello;

// Where a rank listens.
typedef struct {
    char address[64];
    uint64_t port;
} CommEntry;

typedef struct {
    const CommLaunch* launch;
    char place[320];               // where rank 0 listens, for messages
    size_t port;                   // where this rank does
    CommEntry* table;              // (world)
    int guests[COMM_GUESTS];       // connections of who has not said yet who it is, in the order in which they came
    size_t guest_count;
    char refused[320];             // who was turned away last, for messages
    double deadline;
} CommMeeting;

// Connects to rank p and says who this is. The connection stays open where only the hello did not go through.
static inline bool comm_greet(Comm* comm, const CommMeeting* m, size_t p, CommKind kind, const char* address,
                              size_t port, Error* reason) {
    CommLink* link = &comm->links[p];
    int* connection = kind == COMM_CONTROL ? &link->control : &link->data;
    CommHello hello = {COMM_MAGIC, (uint32_t)kind, (uint32_t)comm->world, (uint32_t)comm->rank, (uint32_t)m->port, ""};
    memcpy(hello.run, comm->run, sizeof hello.run);
    *connection = comm_connect(address, port, m->deadline, reason);
    if (*connection < 0) return false;
    link->heard_ms = now_ms();
    return comm_move_all(*connection, &hello, sizeof hello, POLLOUT, m->deadline) ||
           fail(reason, "%s", strerror(errno));
}

// Takes a guest among the links, or sends it away with a reason. False if it has yet to say who it is, and still may.
static inline bool comm_admit(Comm* comm, CommMeeting* m, int guest, bool may_wait) {
    CommHello hello, *h = &hello;
    char from[64], who[96];
    ssize_t n = recv(guest, h, sizeof *h, MSG_PEEK), whole = sizeof *h;
    bool silent = n < 0 && comm_again(), ours = n < (ssize_t)sizeof h->magic || h->magic == COMM_MAGIC;
    bool known = ours && n == whole;
    if (may_wait && (silent || (ours && n > 0 && n < whole))) return false;
    recv(guest, h, sizeof *h, 0);  // a connection closed with something unread would take back what is said now
    CommLink* link = known && h->rank > comm->rank && h->rank < comm->world ? &comm->links[h->rank] : NULL;
    int* place = link == NULL ? NULL : h->kind == COMM_CONTROL ? &link->control : &link->data;
    Error reason = {"", ERROR_WORLD, false};
    comm_address_of(from, guest);
    h->run[sizeof h->run - 1] = 0;
    if (known) snprintf(who, sizeof who, "rank %u at %s", (unsigned)h->rank, from);
    if (!known) fail(&reason, "something at %s that is not this program, or not this version of it", from);
    else if (strcmp(h->run, comm->run) != 0)
        fail(&reason, "%s is of run '%s', rank %zu here of run '%s'; two runs meet at one address and port: choose "
             "another MASTER_PORT", who, h->run, comm->rank, comm->run);
    else if (h->world != comm->world)
        fail(&reason, "%s counts %u ranks, rank %zu %zu; start all with the same world size", who, (unsigned)h->world,
             comm->rank, comm->world);
    else if (place == NULL || *place >= 0) fail(&reason, "a second %s; give each rank a number of its own", who);
    else {
        *place = guest;
        if (h->kind == COMM_CONTROL) link->heard_ms = now_ms();
        memcpy(m->table[h->rank].address, from, sizeof from);
        m->table[h->rank].port = h->port;
        return true;
    }
    CommNotice refusal = comm_notice(COMM_FAILED, reason.text);
    snprintf(m->refused, sizeof m->refused, ". Turned away: %.300s", reason.text);
    comm_move_all(guest, &refusal, sizeof refusal, POLLOUT, now_ms());
    close(guest);
    return true;
}

// Lets in who has connected, and hears who that is.
static inline void comm_receive(Comm* comm, CommMeeting* m) {
    int guest = accept4(comm->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    size_t count = m->guest_count;
    if (guest >= 0) m->guests[count++] = guest;
    m->guest_count = 0;
    for (size_t i = 0; i < count; i++) {
        bool may_wait = i > 0 || count < COMM_GUESTS;  // of too many the first goes
        if (!comm_admit(comm, m, m->guests[i], may_wait)) m->guests[m->guest_count++] = m->guests[i];
    }
}

// Whether rank p, which was forked here, has ended before it came.
static inline bool comm_child_ended(const CommLaunch* launch, size_t p) {
    siginfo_t info;
    memset(&info, 0, sizeof info);
    return launch->children != NULL && waitid(P_PID, (id_t)launch->children[p - 1], &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           info.si_pid != 0;
}

// Waits until every higher rank has connected, with the first of its connections or with both.
static inline bool comm_accept(Comm* comm, CommMeeting* m, bool both, Error* error) {
    char names[160];
    for (;;) {
        for (size_t p = 0; p < comm->world; p++) {
            CommLink* link = &comm->links[p];
            link->named = p > comm->rank && (link->control < 0 || (both && link->data < 0));
        }
        if (!comm_name_ranks(names, comm, "has", "have")) return true;
        for (size_t p = comm->rank + 1; p < comm->world; p++)
            if (comm->links[p].named && comm_child_ended(m->launch, p))
                return fail(error, "rank %zu is gone: it ended before it had come to the others; see whether it was killed",
                            p);
        double now = now_ms();
        if (now >= m->deadline)
            return fail(error, "%s not come to rank %zu within %.1f s, in the meeting at %s; see whether every rank "
                        "was started, and what it printed%s", names, comm->rank, comm->timeout_ms / 1e3, m->place,
                        m->refused);
        double next = now + (m->guest_count > 0 ? COMM_GUEST_MS : COMM_RETRY_MS);
        if (!comm_keep_watch(comm, fmin(m->deadline, next), error)) return false;
        comm_receive(comm, m);
    }
}

// Rank 0 waits for all, and tells them where the others are.
static inline bool comm_host_meeting(Comm* comm, CommMeeting* m, Error* error) {
    if (!comm_accept(comm, m, false, error)) return false;
    size_t bytes = comm->world * sizeof *m->table;
    double deadline = now_ms() + COMM_GRACE_MS;  // who has not heard it by then will be missed in what follows
    comm_tell(comm, COMM_WELCOME, "");
    for (size_t p = 1; p < comm->world; p++)
        comm->links[p].mute |= !comm_move_all(comm->links[p].control, m->table, bytes, POLLOUT, deadline);
    return true;
}

// What rank 0 has to say. Heartbeats tell that it is waiting for others.
static inline bool comm_hear_host(int connection, CommNotice* reply, double silence_ms) {
    do if (!comm_move_all(connection, reply, sizeof *reply, POLLIN, now_ms() + silence_ms)) return false;
    while (reply->kind == COMM_HEARTBEAT);
    reply->text[sizeof reply->text - 1] = 0;
    return true;
}

// Goes to rank 0, and comes back with the table.
static inline bool comm_visit(Comm* comm, CommMeeting* m, Error* error) {
    int* zero = &comm->links[0].control;
    double T = comm->timeout_ms;
    CommNotice reply;
    Error reason = {"", ERROR_WORLD, false};
    for (;;) {
        // Rank 0 may have begun to wait only now, for its whole time-out; then it says who is missing.
        bool good = comm_greet(comm, m, 0, COMM_CONTROL, m->launch->address, m->launch->port, &reason);
        if (good && comm_hear_host(*zero, &reply, T + COMM_GRACE_MS)) break;
        if (good && errno == ETIMEDOUT)
            return fail(error, "rank 0 at %s has not answered rank %zu for %.1f s: it is stopped, or it is not this "
                        "program", m->place, comm->rank, T / 1e3);
        if (good) fail(&reason, "it hung up");
        comm_close_socket(zero);
        if (now_ms() + COMM_RETRY_MS >= m->deadline)
            return fail(error, "rank %zu has not reached rank 0 at %s within %.1f s: %.200s; see whether it was "
                        "started, what it printed, and MASTER_ADDR and MASTER_PORT", comm->rank, m->place, T / 1e3,
                        reason.text);
        sleep_ms(COMM_RETRY_MS);
    }
    if (reply.kind == COMM_FAILED) return fail(error, "%s", reply.text);
    if (reply.kind != COMM_WELCOME)
        return fail(error, "what answers at %s is not rank 0 of this program; choose another MASTER_PORT", m->place);
    if (!comm_move_all(*zero, m->table, comm->world * sizeof *m->table, POLLIN, now_ms() + T))
        return fail(error, "rank 0 at %s is gone: it hung up while the ranks were meeting; see what it printed",
                    m->place);
    // What rank 0 calls this machine is its own machine: reached as rank 0 itself is.
    for (size_t p = 0; p < comm->world; p++)
        if (p == 0 || comm_is_loopback(m->table[p].address)) comm_address_of(m->table[p].address, *zero);
    m->table[0].port = m->launch->port;
    return true;
}

// Connects to all lower ranks: rank 0 has the first connection already.
static inline bool comm_visit_others(Comm* comm, CommMeeting* m, Error* error) {
    Error reason = {"", ERROR_WORLD, false};
    for (size_t i = 1; i < 2 * comm->rank; i++) {
        size_t p = i / 2, port = (size_t)m->table[p].port;
        const char* address = m->table[p].address;
        if (comm_greet(comm, m, p, i % 2 == 0 ? COMM_CONTROL : COMM_DATA, address, port, &reason)) continue;
        // One that has gone because of a fault is not to blame: whoever knows more says so in a moment.
        for (double until = now_ms() + COMM_GRACE_MS; now_ms() < until; comm_receive(comm, m))
            if (!comm_keep_watch(comm, until, error)) return false;
        return fail(error, "rank %zu cannot reach rank %zu at %.63s, port %zu: %.200s; see whether it is still there, "
                    "and that the machines let each other's connections through", comm->rank, p, address, port,
                    reason.text);
    }
    return true;
}

// Room for two connections to each rank, and all else. The limit that a process begins with is often far lower than what it
// may have.
static inline bool comm_make_room(const Comm* comm, Error* error) {
    struct rlimit limit;
    rlim_t least = 2 * comm->world + COMM_FILES_LEAST, files = least + COMM_GUESTS + COMM_FILES;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= files) return true;
    limit.rlim_cur = files < limit.rlim_max ? files : limit.rlim_max;
    return (limit.rlim_cur >= least && setrlimit(RLIMIT_NOFILE, &limit) == 0) ||
           fail(error, "rank %zu of %zu needs room for %llu open files and connections, and may have %llu; raise the "
                "limit (ulimit -n), or start fewer ranks", comm->rank, comm->world, (unsigned long long)least,
                (unsigned long long)limit.rlim_max);
}

static inline bool comm_meet(Comm* comm, const CommLaunch* launch, Error* error) {
    CommMeeting meeting, *m = &meeting;
    bool leads = comm->rank == 0;
    int on = 1;
    memset(m, 0, sizeof *m);
    m->launch = launch;
    m->port = leads ? launch->port : 0;
    m->table = (CommEntry*)allocate(comm->world * sizeof *m->table);
    m->deadline = now_ms() + comm->timeout_ms;
    snprintf(m->place, sizeof m->place, "%s, port %zu", launch->address, launch->port);
    snprintf(comm->doing, sizeof comm->doing, "in the meeting of the ranks");
    if (m->table == NULL) return fail(error, "not enough memory for the addresses of %zu ranks", comm->world);
    comm->listener = launch->listener;
    bool good = comm_make_room(comm, error) &&
                (comm->listener >= 0 || comm_listen(&comm->listener, &m->port, launch->address, error)) &&
                (leads ? comm_host_meeting(comm, m, error) : comm_visit(comm, m, error));
    m->deadline = now_ms() + comm->timeout_ms;
    good = good && comm_visit_others(comm, m, error) && comm_accept(comm, m, true, error);
    for (size_t p = 0; good && p < comm->world; p++) {
        CommLink* link = &comm->links[p];
        if (p != comm->rank) link->heard_ms = now_ms();
        // Small messages leave at once: the operations wait for each of them.
        setsockopt(link->data, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        setsockopt(link->control, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }
    if (!good) comm_tell(comm, COMM_FAILED, error->text);
    // Ranks that come a little later hear of it too, and do not blame rank 0 for being gone.
    double until = now_ms() + COMM_GRACE_MS;
    while (!good && leads && comm->listener >= 0 && now_ms() < until) {
        sleep_ms(COMM_GUEST_MS);
        comm_receive(comm, m);
        comm_tell(comm, COMM_FAILED, error->text);
    }
    for (size_t i = 0; i < m->guest_count; i++) close(m->guests[i]);
    comm_close_socket(&comm->listener);
    free(m->table);
    return good;
}

// ------------------------------------------------------------------------------------------------
// 6. Transfers
//
// The links say what goes to each rank and what comes from it; a transfer does all of it at once. Each pair of ranks
// agrees on the bytes between the two, so that no part is longer or shorter than expected: in the first transfer of a
// collective headers go before the parts, and nothing is taken from a rank whose header is another.

static inline void comm_plan(CommPart* part, const void* at, size_t bytes) {
    part->at = (char*)at;
    part->bytes = bytes;
}

// What the next transfer sends to rank p, and what it receives from there.
static inline void comm_exchange(Comm* comm, size_t p, const char* out, size_t out_bytes, char* in, size_t in_bytes) {
    comm_plan(&comm->links[p].parts[COMM_OUT], out, out_bytes);
    comm_plan(&comm->links[p].parts[COMM_IN], in, in_bytes);
    comm->sent += out_bytes;
}

// Whether rank p is about to do the same as this one.
static inline bool comm_check_header(Comm* comm, size_t p, Error* error) {
    const CommHeader *own = &comm->links[comm->rank].header, *other = &comm->links[p].header;
    char ours[160], theirs[160];
    if (memcmp(own, other, sizeof *own) == 0) return true;
    comm_describe(ours, sizeof ours, own);
    comm_describe(theirs, sizeof theirs, other);
    if (other->number != own->number)
        return fail(error, "rank %zu sent rank %zu what does not belong to %s; the network or a program is at fault", p,
                    comm->rank, ours);
    return fail(error, "the ranks disagree: rank %zu called %s and rank %zu %s%s; start all with the same program, "
                "flags and data", p, theirs, comm->rank, ours, strcmp(theirs, ours) == 0 ? " with other slices" : "");
}

// Moves what can be moved at once to and from rank p; after a header what follows it.
static inline bool comm_move(Comm* comm, size_t p, bool* moved, Error* error) {
    CommLink* link = &comm->links[p];
    for (int d = 0; d < 2; d++) {
        bool head = true;
        while (head) {
            head = link->heads[d].bytes > 0;
            CommPart* part = head ? &link->heads[d] : &link->parts[d];
            if (part->bytes == 0) break;
            int more = head && link->parts[d].bytes > 0 ? MSG_MORE : 0;  // a header does not travel alone
            ssize_t n = comm->mpi ? comm_mpi_move(part, p, d == COMM_OUT) :
                        d == COMM_OUT ? send(link->data, part->at, part->bytes, MSG_NOSIGNAL | more) :
                        recv(link->data, part->at, part->bytes, 0);
            if (n == 0 || (n < 0 && !comm_again())) return comm_fail_lost(comm, p, error);
            if (n < 0) break;
            part->at += n;
            part->bytes -= (size_t)n;
            *moved = true;
            if (d == COMM_IN && !comm->mpi) link->heard_ms = now_ms();
            if (part->bytes > 0) break;
            if (d == COMM_IN && head && !comm_check_header(comm, p, error)) return false;
        }
    }
    return true;
}

static inline bool comm_transfer(Comm* comm, Error* error) {
    double moved_ms = comm_clock(comm);
    for (;;) {
        bool moving = false, moved = false;
        for (size_t p = 0; p < comm->world; p++) {
            if (!comm_move(comm, p, &moved, error)) return false;
            moving |= comm_events(&comm->links[p]) != 0;
        }
        if (!moving) return true;
        comm_heartbeat(comm);
        double now = comm_clock(comm);
        if (moved) moved_ms = now;
        double deadline = fmax(moved_ms, comm->resumed_ms) + comm->timeout_ms;
        bool over = now >= deadline, patient = __atomic_load_n(&comm->patient, __ATOMIC_RELAXED);
        if (over && !patient) return comm_fail_late(comm, error);
        if (over && !comm_check_silence(comm, comm->timeout_ms, error)) return false;
        if (!moved && !comm_attend(comm, fmax(deadline, now + COMM_RETRY_MS), error)) return false;
    }
}

// ------------------------------------------------------------------------------------------------
// 7. Sums
//
// Over the links' sources, one vector per rank, in the order of the ranks, by blocks that stay in the first cache.

#define COMM_BLOCK ((size_t)1024)

// out (n) may be one of the sources. Integers that are too large wrap around.
static inline void comm_sum(char* out, const Comm* comm, CommType type, size_t n) {
    float sums[COMM_BLOCK], values[COMM_BLOCK];
    uint64_t integers[COMM_BLOCK];
    for (size_t first = 0, size = comm_type_size(type); first < n; first += COMM_BLOCK) {
        size_t count = min_size(COMM_BLOCK, n - first), bytes = count * size;
        for (size_t p = 0; p < comm->world; p++) {
            const char* x = comm->links[p].source + first * size;
            const uint64_t* wide = (const uint64_t*)x;
            const uint16_t* halves = (const uint16_t*)x;
            if (type == COMM_FLOAT) memcpy(values, x, bytes);
            if (type == COMM_BF16) for (size_t i = 0; i < count; i++) values[i] = float_from_bf16(halves[i]);
            if (type == COMM_F16) for (size_t i = 0; i < count; i++) values[i] = float_from_f16(halves[i]);
            if (type == COMM_INT64)
                for (size_t i = 0; i < count; i++) integers[i] = wide[i] + (p > 0 ? integers[i] : 0);
            else if (p == 0) memcpy(sums, values, count * sizeof *sums);
            else for (size_t i = 0; i < count; i++) sums[i] += values[i];
        }
        char* to = out + first * size;
        uint16_t* halves = (uint16_t*)to;
        if (type == COMM_FLOAT) memcpy(to, sums, bytes);
        if (type == COMM_BF16) for (size_t i = 0; i < count; i++) halves[i] = bf16_from_float(sums[i]);
        if (type == COMM_F16) for (size_t i = 0; i < count; i++) halves[i] = f16_from_float(sums[i]);
        if (type == COMM_INT64) memcpy(to, integers, bytes);
    }
}

// ------------------------------------------------------------------------------------------------
// 8. Operations
//
// Each rank owns its slice of the vector: all others send it their values of it (reduce_scatter), and it sends all
// others the sum (all_gather). So a rank sends (world - 1)/world of the vector in each of the two, the least possible.

static inline bool comm_reduces(const CommCall* call) {
    return call->header.operation == COMM_ALL_REDUCE || call->header.operation == COMM_REDUCE_SCATTER;
}

// In the next transfer the ranks tell each other what they are about to do.
static inline void comm_introduce(Comm* comm, const CommHeader* header) {
    CommHeader* own = &comm->links[comm->rank].header;
    *own = *header;
    comm->sent = 0;
    for (size_t p = 0; p < comm->world; p++) {
        CommLink* link = &comm->links[p];
        if (p == comm->rank) continue;
        comm_plan(&link->heads[COMM_OUT], own, sizeof *own);
        comm_plan(&link->heads[COMM_IN], &link->header, sizeof link->header);
    }
}

// The sum of the own slice, to `out`, chunk by chunk.
static inline bool comm_reduce_slices(Comm* comm, const CommCall* call, char* out, Error* error) {
    CommType type = (CommType)call->header.type;
    size_t own = comm_length(call->slices[comm->rank]), longest = 0;
    for (size_t p = 0; p < comm->world; p++) longest = max_size(longest, comm_length(call->slices[p]));
    for (size_t start = 0; start == 0 || start < longest; start += COMM_CHUNK) {
        size_t count = start < own ? min_size(COMM_CHUNK, own - start) : 0;
        for (size_t p = 0; p < comm->world; p++) {
            const char* mine = call->in + call->slices[p].first + start;
            char* theirs = comm->staging + p * COMM_CHUNK;
            size_t left = comm_length(call->slices[p]) - min_size(comm_length(call->slices[p]), start);
            comm->links[p].source = p == comm->rank ? mine : theirs;
            if (p != comm->rank) comm_exchange(comm, p, mine, min_size(COMM_CHUNK, left), theirs, count);
        }
        if (!comm_transfer(comm, error)) return false;
        comm_sum(out + start, comm, type, count / comm_type_size(type));
    }
    return true;
}

// Every rank sends its slice of call->out to all. In a broadcast the root's is all there is.
static inline bool comm_spread_slices(Comm* comm, const CommCall* call, Error* error) {
    CommSlice own = call->slices[comm->rank];
    for (size_t p = 0; p < comm->world; p++) {
        char *mine = call->out + own.first, *theirs = call->out + call->slices[p].first;
        if (p != comm->rank) comm_exchange(comm, p, mine, comm_length(own), theirs, comm_length(call->slices[p]));
    }
    return comm_transfer(comm, error);
}

// What a caller can get wrong by itself.
static inline bool comm_check_call(const Comm* comm, const CommCall* call, const char* what, Error* error) {
    size_t size = comm_type_size((CommType)call->header.type), bytes = (size_t)call->header.n * size;
    if (call->header.type == COMM_BYTES && comm_reduces(call))
        return fail(error, "rank %zu called %s; bytes are not summed", comm->rank, what);
    if (call->header.root >= comm->world)
        return fail(error, "rank %zu called %s; there is no such rank", comm->rank, what);
    for (size_t p = 0, end = 0; p < comm->world; end = call->slices[p++].end) {
        CommSlice s = call->slices[p];
        if (s.first < end || s.end < s.first || s.end > bytes)
            return fail(error, "rank %zu called %s with the slice [%zu, %zu) for rank %zu; slices lie in the vector "
                        "and follow each other", comm->rank, what, s.first / size, s.end / size, p);
    }
    return true;
}

static inline bool comm_run(Comm* comm, const CommCall* call, Error* error) {
    char what[160];
    bool all = call->header.operation == COMM_ALL_REDUCE;
    comm_describe(what, sizeof what, &call->header);
    snprintf(comm->doing, sizeof comm->doing, "in %s", what);
    if (!comm_check_call(comm, call, what, error)) return false;
    if (call->header.type != COMM_BYTES) fault_point("collective");  // bytes are statistics and messages
    comm_introduce(comm, &call->header);
    char* sum = call->out + (all ? call->slices[comm->rank].first : 0);
    if (comm_reduces(call) && !comm_reduce_slices(comm, call, sum, error)) return false;
    return call->header.operation == COMM_REDUCE_SCATTER || comm_spread_slices(comm, call, error);
}

// ------------------------------------------------------------------------------------------------
// 9. Progress
//
// One thread per Comm takes the requests in the order in which they were started. Between them it sends heartbeats,
// hears the other ranks, and sees whether they are still there. After a fault it tells the others and ends; all
// requests that are not finished have failed.

static inline bool comm_idle(Comm* comm, Error* error) {
    snprintf(comm->doing, sizeof comm->doing, "between two collectives");
    if (!comm_keep_watch(comm, INFINITY, error)) return false;
    comm_clock(comm);
    return comm_check_silence(comm, comm->timeout_ms, error);
}

// Makes the fault known on this rank; the mutex is held on entry and on return, not while on_failure is called.
static inline void comm_record_failure(Comm* comm, const Error* error) {
    void (*on_failure)(void*) = comm->on_failure;
    comm->failed = true;
    comm->error = *error;
    comm->calling = on_failure != NULL;
    pthread_cond_broadcast(&comm->changed);
    if (on_failure == NULL) return;
    pthread_mutex_unlock(&comm->mutex);
    on_failure(comm->on_failure_context);
    pthread_mutex_lock(&comm->mutex);
    comm->calling = false;
    pthread_cond_broadcast(&comm->changed);
}

// Carries out the oldest request; the mutex is held on entry and on return.
static inline void comm_step(Comm* comm) {
    Error error;
    bool work = comm->finished < comm->started;
    const CommCall* call = &comm->calls[comm->finished % COMM_IN_FLIGHT];
    pthread_mutex_unlock(&comm->mutex);
    bool good = work ? comm_run(comm, call, &error) : comm_idle(comm, &error);
    if (!good) comm_tell(comm, COMM_FAILED, error.text);
    pthread_mutex_lock(&comm->mutex);
    if (!good) {
        comm_record_failure(comm, &error);
    } else if (work) {
        comm->finished++;
        comm->statistics.bytes_sent += comm->sent;
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

// ------------------------------------------------------------------------------------------------
// 10. Use

// Starts a collective; does not wait, unless COMM_IN_FLIGHT of them are under way. Its memory must stay as it is until
// comm_wait has returned. `slices` is called here, not later.
static inline CommRequest comm_start(Comm* comm, CommOperation operation, CommType type,
                                     void* out, const void* in, size_t n, size_t root, CommSlices slices,
                                     const void* context) {
    size_t size = comm_type_size(type);
    pthread_mutex_lock(&comm->mutex);
    double began = now_ms();
    while (!comm->failed && comm->started - comm->finished == COMM_IN_FLIGHT)
        pthread_cond_wait(&comm->changed, &comm->mutex);
    comm->statistics.waited_ms += now_ms() - began;
    uint64_t number = comm->started;
    CommCall* call = &comm->calls[number % COMM_IN_FLIGHT];
    if (!comm->failed) {
        CommHeader header = {number, n, 0, (uint32_t)operation, (uint32_t)type, (uint32_t)root, 0};
        call->slices = comm->slices + number % COMM_IN_FLIGHT * comm->world;
        for (size_t p = 0; p < comm->world; p++) {
            CommSlice slice = {p > root ? n : 0, p >= root ? n : 0};  // of a broadcast: the root has all
            if (operation != COMM_BROADCAST) slice = slices ? slices(p, context) : comm_even_slice(p, comm->world, n);
            call->slices[p].first = slice.first * size;
            call->slices[p].end = slice.end * size;
        }
        header.slices = hash_bytes(call->slices, comm->world * sizeof(CommSlice));
        call->header = header;
        call->out = (char*)out;
        call->in = (const char*)in;
        comm->started++;
        if (!comm->running) comm_step(comm);  // there is no thread where there is but one rank
    }
    pthread_mutex_unlock(&comm->mutex);
    if (comm->running) eventfd_write(comm->wake, 1);
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

// Some, waited for at once.
static inline bool comm_barrier(Comm* comm, Error* error) {
    return comm_wait(comm, comm_start(comm, COMM_BARRIER, COMM_BYTES, NULL, NULL, 0, 0, NULL, NULL), error);
}
static inline bool comm_broadcast(Comm* comm, void* data, size_t n, CommType type, size_t root, Error* error) {
    return comm_wait(comm, comm_start(comm, COMM_BROADCAST, type, data, data, n, root, NULL, NULL), error);
}
static inline bool comm_all_gather(Comm* comm, void* data, size_t n, CommType type, CommSlices slices,
                                   const void* context, Error* error) {
    return comm_wait(comm, comm_start(comm, COMM_ALL_GATHER, type, data, data, n, 0, slices, context), error);
}

// all (world, count): every rank has filled its own row, and gets all others.
static inline bool comm_gather_doubles(Comm* comm, double* all, size_t count, Error* error) {
    return comm_all_gather(comm, all, comm->world * count * sizeof(double), COMM_BYTES, NULL, NULL, error);
}

static inline CommStatistics comm_statistics(Comm* comm) {
    pthread_mutex_lock(&comm->mutex);
    CommStatistics statistics = comm->statistics;
    pthread_mutex_unlock(&comm->mutex);
    return statistics;
}

// While ranks do alone what may take long (save, load), those that wait for them in a collective are patient: they wait
// for ever, as long as heartbeats come. MPI has no heartbeats, and mpirun ends all ranks when one dies.
static inline void comm_extend_timeout(Comm* comm, bool patient) {
    __atomic_store_n(&comm->patient, patient, __ATOMIC_RELAXED);
}

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
static inline void comm_abort(Comm* comm, const char* reason) {
    Error error;
    fail(&error, "rank %zu gave up: %.900s", comm->rank, reason);
    pthread_mutex_lock(&comm->mutex);
    if (!comm->failed && !comm->running) comm_record_failure(comm, &error);
    if (!comm->failed && !comm->abandoning) {
        comm->abandoning = true;
        comm->error = error;
        eventfd_write(comm->wake, 1);
    }
    while (!comm->failed) pthread_cond_wait(&comm->changed, &comm->mutex);
    pthread_mutex_unlock(&comm->mutex);
}

// What comm_open takes, nearly.
static inline size_t comm_bytes(size_t world) {
    return world > 1 ? world * (COMM_CHUNK + sizeof(CommLink)) +
                       COMM_IN_FLIGHT * (sizeof(CommCall) + world * sizeof(CommSlice)) : 0;
}

// Ends everything: lets the requests under way finish, says goodbye, and gives memory and connections back.
static inline void comm_close(Comm* comm) {
    Error unused;
    if (comm->running) {
        pthread_mutex_lock(&comm->mutex);
        comm->closing = true;
        pthread_mutex_unlock(&comm->mutex);
        eventfd_write(comm->wake, 1);
        pthread_join(comm->thread, NULL);
    }
    if (comm->links && !comm->failed) comm_tell(comm, COMM_LEFT, "");
    for (size_t p = 0; comm->links && p < comm->world; p++) {
        comm_hear(comm, p, &unused);  // a connection closed with something unread would take back what was sent last
        comm_close_socket(&comm->links[p].control);
        comm_close_socket(&comm->links[p].data);
    }
    comm_mpi_close(comm);
    comm_close_socket(&comm->wake);
    free(comm->links);
    free(comm->polls);
    free(comm->staging);
    free(comm->calls);
    free(comm->slices);
    pthread_mutex_destroy(&comm->mutex);
    pthread_cond_destroy(&comm->changed);
    memset(comm, 0, sizeof *comm);
    comm->wake = -1;
}

static inline bool comm_allocate(Comm* comm, Error* error) {
    size_t N = comm->world;
    comm->links = (CommLink*)allocate(N * sizeof(CommLink));
    comm->polls = (struct pollfd*)allocate((2 * N + 2) * sizeof(struct pollfd));
    comm->staging = (char*)allocate(N > 1 ? N * COMM_CHUNK : 0);
    comm->calls = (CommCall*)allocate(COMM_IN_FLIGHT * sizeof(CommCall));
    comm->slices = (CommSlice*)allocate(COMM_IN_FLIGHT * N * sizeof(CommSlice));
    for (size_t p = 0; comm->links && p < N; p++) comm->links[p].data = comm->links[p].control = -1;
    return (comm->links && comm->polls && comm->staging && comm->calls && comm->slices) ||
           fail(error, "not enough memory for the connections of %zu ranks", N);
}

// Ranks with the same number are on one machine.
static inline uint64_t comm_host(void) {
    char name[256] = "";
    FILE* file = fopen("/proc/sys/kernel/random/boot_id", "r");
    size_t length = file ? fread(name, 1, 64, file) : 0;
    if (file) fclose(file);
    gethostname(name + length, 128);
    return hash_bytes(name, sizeof name);
}

// The first collective: each rank says where it is. Counts those here, where the launcher has not.
static inline bool comm_find_local(Comm* comm, Error* error) {
    uint64_t here = comm_host(), *hosts = (uint64_t*)comm->staging;  // (world) no sum needs that yet
    size_t before = 0, same = 0;
    hosts[comm->rank] = here;
    if (!comm_all_gather(comm, hosts, comm->world, COMM_INT64, NULL, NULL, error)) return false;
    for (size_t p = 0; p < comm->world; p++) {
        same += hosts[p] == here;
        before += hosts[p] == here && p < comm->rank;
    }
    if (comm->local_rank == COMM_UNKNOWN) comm->local_rank = before;
    if (comm->local_world == COMM_UNKNOWN) comm->local_world = same;
    return true;
}

// Meets the other ranks; returns when all are there. After a failure there is nothing to close.
static inline bool comm_open(Comm* comm, const CommLaunch* launch, double timeout_ms, Error* error) {
    memset(comm, 0, sizeof *comm);
    bool several = launch->world > 1;
    comm->wake = comm->listener = -1;
    comm->rank = launch->rank;
    comm->world = launch->world;
    comm->local_rank = launch->local_rank;
    comm->local_world = launch->local_world;
    comm->timeout_ms = timeout_ms;
    comm->mpi = launch->mpi && several;
    memcpy(comm->run, launch->run, sizeof comm->run);
    pthread_mutex_init(&comm->mutex, NULL);
    pthread_cond_init(&comm->changed, NULL);
    bool good = comm_allocate(comm, error);
    if (good && several) good = comm->mpi ? comm_mpi_open(comm, error) : comm_meet(comm, launch, error);
    if (good && several) {
        comm->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        comm->running = comm->wake >= 0 && pthread_create(&comm->thread, NULL, comm_progress, comm) == 0;
        good = comm->running || fail(error, "rank %zu cannot start its thread: %s; raise the limits (ulimit -u, -n)",
                                     comm->rank, strerror(errno));
    }
    if (good && comm_find_local(comm, error)) return true;
    if (!comm->running) comm->failed = true;
    comm_close(comm);
    return false;
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
    size_t N = comm->world, length = strlen(text) + 1, *places = (size_t*)allocate((N + 1) * sizeof(size_t));
    bool memory = places != NULL, good = memory;
    *texts = NULL;
    *begins = places;
    if (good) places[comm->rank + 1] = length;
    good = good && comm_all_gather(comm, places + 1, N, COMM_INT64, NULL, NULL, error);
    for (size_t p = 0; good && p < N; p++) places[p + 1] += places[p];
    if (good) memory = good = (*texts = (char*)allocate(places[N])) != NULL;
    if (!memory) {
        fail(error, "not enough memory for the texts of %zu ranks", N);
        comm_abort(comm, error->text);
    }
    if (good) memcpy(*texts + places[comm->rank], text, length);
    // Without a letter anywhere there is nothing to send.
    return good && (places[N] == N ||
                    comm_all_gather(comm, *texts, places[N], COMM_BYTES, comm_slice_of_table, places, error));
}

// Every rank says whether its part of something went well, and error->text why if not. True on all ranks if all parts
// did; otherwise false on all, with the sentence of the lowest rank that failed: "rank 2: cannot read ...", without the
// rank if all have failed with the very same sentence; error->on_all_ranks says that nobody has to be told. The Comm
// stays usable.
static inline bool comm_agree_all(Comm* comm, bool good, Error* error) {
    size_t N = comm->world, same = 0, first = COMM_UNKNOWN, *begins;
    char* texts;
    const char* own = good ? "" : error->text[0] ? error->text : "failed, and did not say why";
    good = comm_gather_texts(comm, &texts, &begins, own, error);
    for (size_t p = N; good && p-- > 0;)
        if (texts[begins[p]] != 0) first = p;
    for (size_t p = 0; first < N && p < N; p++) same += strcmp(texts + begins[p], texts + begins[first]) == 0;
    if (same == N) good = fail(error, "%s", texts + begins[first]);
    else if (first < N) good = fail(error, "rank %zu: %s", first, texts + begins[first]);
    if (first < N) error->on_all_ranks = true;
    free(begins);
    free(texts);
    return good;
}

#endif  // LLMTRAIN_COMM_H
