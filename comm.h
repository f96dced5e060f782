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
//                   comm_on_failure, comm_abandon
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
#define COMM_GUESTS ((size_t)64)            // who have connected and not yet said it; of more, the first is sent away
#define COMM_CONNECT_MS 5000.0              // for an address to answer
#define COMM_RETRY_MS 50.0                  // between attempts to reach rank 0
#define COMM_MPI_PAUSE_MS 0.05              // between looks at a transfer: MPI has no wait with a deadline
#define COMM_MPI_IDLE_MS 10.0               // between looks for notices of other ranks: MPI cannot wake a thread

// ------------------------------------------------------------------------------------------------
// 1. Collectives
//
// A vector of n elements is cut into one slice per rank, in the order of the ranks; slices may be of any length, and
// there may be gaps between them.

typedef enum { COMM_BYTES, COMM_INT64, COMM_FLOAT, COMM_BF16, COMM_F16, COMM_TYPES } CommType;
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

static inline size_t comm_length(CommSlice s) { return s.end - s.first; }

static inline size_t comm_type_size(CommType type) {
    static const size_t sizes[COMM_TYPES] = {1, 8, 4, 2, 2};
    return sizes[type];
}

// Begins every collective, from each rank to each, and must be equal everywhere.
typedef struct {
    uint64_t number;      // of the collective, from 0 (part of comm_open)
    uint64_t n, slices;   // elements; hash of the slices
    uint32_t operation, type, root, unused;
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
    CommSlice* slices;   // (world) in bytes
    double delay_ms;
} CommCall;

typedef uint64_t CommRequest;  // number of the collective

// Their values are such that no other program begins with one what it says.
typedef enum { COMM_HEARTBEAT = 0x6c6c6d74, COMM_WELCOME, COMM_LEFT, COMM_FAILED } CommNoticeKind;
typedef struct {
    uint32_t kind;
    char text[sizeof(Error)];  // COMM_FAILED: what happened
} CommNotice;

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
    bool mute;           // it takes no more notices: its buffer is full
    bool named;          // in a message that is being made
    double heard_ms;     // when it was last heard of
    size_t notice_bytes; // of the notice that have come
    CommNotice notice;
    CommPart parts[2];   // COMM_OUT, COMM_IN: of the transfer in progress
    const char* source;  // of the sum in progress; the own one too
    CommOpening opening; // of the collective in progress; the own one too
} CommLink;

typedef struct {
    double waited_ms;    // spent in comm_wait
    uint64_t bytes_sent; // by finished collectives; headers and notices are not counted
} CommStatistics;

typedef struct {
    size_t rank, world, local_rank, local_world;
    double timeout_ms;
    double delay_ms;                 // for tests: every collective started from now on takes so much longer
    bool mpi;
    bool patient;                    // see comm_be_patient
    char run[64];                    // its identifier
    void (*on_failure)(void* context);  // see comm_on_failure; NULL: nothing
    void* on_failure_context;

    // Of the progress thread while it runs
    CommLink* links;                 // (world)
    struct pollfd* polls;            // (2 world + 1)
    char* staging;                   // (world, COMM_CHUNK)
    uint64_t sent;                   // payload of the collective in progress
    double heartbeat_ms;             // when the next is due
    double looked_ms;                // when the clock was last looked at, see comm_clock
    double resumed_ms;               // when this process was last found to have been stopped itself
    char doing[192];                 // for messages: "in all_reduce of 7 float (operation 3)"
    char refused[256];               // who was turned away at the meeting, for messages
    CommNotice notice;               // to the others, through MPI

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
                                                            "broadcast"};
    static const char* const types[COMM_TYPES] = {"bytes", "int64", "float", "bf16", "fp16"};
    unsigned long long number = h->number, n = h->n;
    char root[40] = "";
    if (h->operation == COMM_BROADCAST) snprintf(root, sizeof root, " from rank %u", (unsigned)h->root);
    if (h->operation >= COMM_OPERATIONS || h->type >= COMM_TYPES) snprintf(text, size, "something unknown");
    else if (number == 0) snprintf(text, size, "the first barrier");
    else if (h->operation == COMM_BARRIER) snprintf(text, size, "barrier (operation %llu)", number);
    else
        snprintf(text, size, "%s of %llu %s%s (operation %llu)", operations[h->operation], n, types[h->type], root,
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
    int given = 0, rank = 0, world = 0, local_rank = 0, local_world = 0;
    MPI_Comm local;
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
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &local);
    MPI_Comm_rank(local, &local_rank);
    MPI_Comm_size(local, &local_world);
    MPI_Comm_free(&local);
    comm->local_rank = (size_t)local_rank;
    comm->local_world = (size_t)local_world;
    for (size_t p = 0; p < comm->world; p++)
        for (int d = 0; d < 2; d++) comm->links[p].parts[d].request = MPI_REQUEST_NULL;
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

static inline void comm_mpi_tell(Comm* comm, const CommNotice* notice) {
    double deadline = now_ms() + COMM_GRACE_MS;
    comm->notice = *notice;  // which MPI may still read after the grace time
    for (size_t p = 0; p < comm->world; p++)
        if (p != comm->rank)
            MPI_Isend(&comm->notice, (int)sizeof comm->notice, MPI_BYTE, (int)p, COMM_MPI_NOTICE, MPI_COMM_WORLD,
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
    (void)comm;
    return fail(error, "MPI was asked for, but this program was built without it; build it with MPI, or use sockets");
}
static inline void comm_mpi_close(Comm* comm) { (void)comm; }
static inline ssize_t comm_mpi_move(CommPart* part, size_t p, bool out) { return (void)part, (void)p, (void)out, 0; }
static inline void comm_mpi_tell(Comm* comm, const CommNotice* notice) { (void)comm, (void)notice; }
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

static inline CommNotice comm_notice(CommNoticeKind kind, const char* words) {
    CommNotice notice;
    memset(&notice, 0, sizeof notice);
    notice.kind = (uint32_t)kind;
    snprintf(notice.text, sizeof notice.text, "%s", words);
    return notice;
}

static inline void comm_tell(Comm* comm, CommNoticeKind kind, const char* words) {
    CommNotice notice = comm_notice(kind, words);
    if (comm->mpi && kind == COMM_FAILED) comm_mpi_tell(comm, &notice);
    for (size_t p = 0; p < comm->world; p++) {
        CommLink* link = &comm->links[p];
        if (link->control < 0 || link->mute) continue;
        link->mute = send(link->control, &notice, sizeof notice, MSG_NOSIGNAL) != (ssize_t)sizeof notice;
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
        link->named = !comm->mpi && p != comm->rank && !link->left && comm->looked_ms - heard_ms > silence_ms;
    }
    if (!comm_name_ranks(names, comm, "has", "have")) return true;
    return fail(error, "%s not answered for %.1f s while rank %zu was %s: stopped, or its machine or the network is "
                "down", names, comm->timeout_ms / 1e3, comm->rank, comm->doing);
}

static inline bool comm_is_moving(const CommLink* link) {
    return link->parts[COMM_OUT].bytes > 0 || link->parts[COMM_IN].bytes > 0;
}

// The time-out has passed without a byte. Ranks that are silent are to blame, or else those that owe something.
static inline bool comm_fail_late(Comm* comm, Error* error) {
    char names[160];
    if (!comm_check_silence(comm, 0.75 * comm->timeout_ms, error)) return false;
    for (size_t p = 0; p < comm->world; p++) comm->links[p].named = comm_is_moving(&comm->links[p]);
    comm_name_ranks(names, comm, "is", "are");
    return fail(error, "%s late: rank %zu has waited %.1f s %s%s; raise the time-out if so much is to be expected",
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
    uint64_t count;
    ssize_t got = read(comm->wake, &count, sizeof count);
    (void)got;  // fails only when it was asleep
    pthread_mutex_lock(&comm->mutex);
    bool abandoning = comm->abandoning;
    if (abandoning) *error = comm->error;
    pthread_mutex_unlock(&comm->mutex);
    return !abandoning;
}

// ------------------------------------------------------------------------------------------------
// 5. Meeting
//
// Every rank listens. All connect to rank 0 and say who they are; when the last has come, rank 0 sends each the table
// of addresses. Then each rank connects to all lower ranks. Whoever is not of this run is told so and sent away.

#define COMM_MAGIC 0x33696172746d6c6cull  // "llmtrai", and the version of what is said

typedef enum { COMM_DATA, COMM_CONTROL } CommKind;
typedef struct {
    uint64_t magic, host;         // which machine
    uint32_t kind, world, rank, port;
    char run[64];
} CommHello;

typedef struct {
    char address[64];
    uint64_t host, port;
} CommEntry;

// Ranks with the same number are on one machine.
static inline uint64_t comm_host(void) {
    char name[256] = "";
    FILE* file = fopen("/proc/sys/kernel/random/boot_id", "r");
    size_t length = file ? fread(name, 1, 64, file) : 0;
    if (file) fclose(file);
    gethostname(name + length, 128);
    return hash_bytes(name, sizeof name);
}

// Connects and says who this is. What is left in *connection is open where only the hello did not go through.
static inline bool comm_greet(Comm* comm, int* connection, const char* address, size_t port, CommKind kind,
                              size_t own_port, double deadline, Error* reason) {
    CommHello hello = {COMM_MAGIC, comm_host(), (uint32_t)kind, (uint32_t)comm->world, (uint32_t)comm->rank,
                       (uint32_t)own_port, ""};
    memcpy(hello.run, comm->run, sizeof hello.run);
    *connection = comm_connect(address, port, deadline, reason);
    if (*connection < 0) return false;
    return comm_move_all(*connection, &hello, sizeof hello, POLLOUT, deadline) || fail(reason, "%s", strerror(errno));
}

// Whether a new connection has said who it is, or will not: then comm_admit has nothing to wait for.
static inline bool comm_has_spoken(int connection) {
    CommHello hello;
    ssize_t n = recv(connection, &hello, sizeof hello, MSG_PEEK);
    if (n <= 0) return n == 0 || !comm_again();
    return n == (ssize_t)sizeof hello || (n >= (ssize_t)sizeof hello.magic && hello.magic != COMM_MAGIC);
}

// Takes a new connection among the links, or sends it away with a reason.
static inline void comm_admit(Comm* comm, CommEntry* table, int connection) {
    CommHello hello, *h = &hello;
    Error reason = {"", false};
    char from[64], who[96];
    double until = now_ms();
    bool known = comm_move_all(connection, &h->magic, sizeof h->magic, POLLIN, until) && h->magic == COMM_MAGIC &&
                 comm_move_all(connection, &h->host, sizeof *h - sizeof h->magic, POLLIN, until);
    CommLink* link = known && h->rank > comm->rank && h->rank < comm->world ? &comm->links[h->rank] : NULL;
    int* place = link == NULL ? NULL : h->kind == COMM_CONTROL ? &link->control : &link->data;
    h->run[sizeof h->run - 1] = 0;
    comm_address_of(from, connection);
    snprintf(who, sizeof who, "rank %u at %s", known ? (unsigned)h->rank : 0, from);
    if (!known) fail(&reason, "something at %s that is not this program, or not this version of it", from);
    else if (strcmp(h->run, comm->run) != 0)
        fail(&reason, "%s is of run '%s', rank %zu here of run '%s'; two runs meet at one address and port: choose "
             "another MASTER_PORT", who, h->run, comm->rank, comm->run);
    else if (h->world != comm->world)
        fail(&reason, "%s counts %u ranks, rank %zu %zu; start all with the same world size", who, (unsigned)h->world,
             comm->rank, comm->world);
    else if (place == NULL || *place >= 0) fail(&reason, "a second %s; give each rank a number of its own", who);
    if (reason.text[0]) {
        CommNotice refusal = comm_notice(COMM_FAILED, reason.text);
        snprintf(comm->refused, sizeof comm->refused, "%.255s", reason.text);
        comm_move_all(connection, &refusal, sizeof refusal, POLLOUT, now_ms() + COMM_GRACE_MS);
        close(connection);
    } else {
        *place = connection;
        if (table) {
            memcpy(table[h->rank].address, from, sizeof from);
            table[h->rank].port = h->port;
            table[h->rank].host = h->host;
        }
    }
}

// Waits until every higher rank has connected: with both connections, or only for data where the table is made. Watches
// the listener, and of the ranks that are here whether they stay.
static inline bool comm_accept(Comm* comm, CommEntry* table, int listener, const char* place, double deadline,
                               Error* error) {
    char names[160];
    struct pollfd* polls = comm->polls;
    int guests[COMM_GUESTS];
    double came_ms[COMM_GUESTS];
    size_t guest_count = 0;
    bool good = true;
    for (;;) {
        size_t count = 0;
        for (size_t p = 0; p < comm->world; p++) {
            CommLink* link = &comm->links[p];
            link->named = p > comm->rank && (link->data < 0 || (table == NULL && link->control < 0));
            comm_watch(&polls[count++], link->data, POLLRDHUP);
            comm_watch(&polls[count++], link->control, POLLIN);
        }
        if (!good || !comm_name_ranks(names, comm, "has", "have")) break;
        if (now_ms() >= deadline) {
            const char* also = comm->refused[0] ? ". Turned away: " : "";
            good = fail(error, "%s not come to rank %zu at %s within %.1f s; see whether every rank was started, and "
                        "what it printed%s%s", names, comm->rank, place, comm->timeout_ms / 1e3, also, comm->refused);
            break;
        }
        comm_watch(&polls[count++], listener, POLLIN);
        comm_heartbeat(comm);  // some may be through with the meeting already
        comm_poll(polls, count, fmin(deadline, now_ms() + (guest_count ? 1 : COMM_RETRY_MS)));
        int connection = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (connection >= 0) {
            guests[guest_count] = connection;
            came_ms[guest_count++] = now_ms();
        }
        size_t kept = 0;
        for (size_t i = 0; i < guest_count; i++) {  // the first has waited the longest
            bool over = now_ms() - came_ms[i] > COMM_HELLO_MS || (guest_count == COMM_GUESTS && i == 0);
            if (over || comm_has_spoken(guests[i])) {
                comm_admit(comm, table, guests[i]);
                continue;
            }
            guests[kept] = guests[i];
            came_ms[kept++] = came_ms[i];
        }
        guest_count = kept;
        for (size_t p = 0; good && p < comm->world; p++)
            good = (!polls[2 * p + 1].revents || comm_hear(comm, p, error)) &&
                   (!polls[2 * p].revents || comm_fail_lost(comm, p, error));
    }
    for (size_t i = 0; i < guest_count; i++) close(guests[i]);
    return good;
}

// Rank 0 waits for all, and tells them where the others are, or why that is not known.
static inline bool comm_host_meeting(Comm* comm, CommEntry* table, int listener, const char* place, double deadline,
                                     Error* error) {
    bool good = comm_accept(comm, table, listener, place, deadline, error);
    CommNotice reply = comm_notice(good ? COMM_WELCOME : COMM_FAILED, good ? "" : error->text);
    table[0].host = comm_host();
    deadline = now_ms() + COMM_GRACE_MS;  // who has not heard it by then will be missed in what follows
    for (size_t p = 1; p < comm->world; p++) {
        int to = comm->links[p].data;
        if (to >= 0 && comm_move_all(to, &reply, sizeof reply, POLLOUT, deadline) && good)
            comm_move_all(to, table, comm->world * sizeof *table, POLLOUT, deadline);
    }
    return good;
}

// Goes to rank 0, and comes back with the table.
static inline bool comm_visit(Comm* comm, CommEntry* table, const CommLaunch* launch, size_t own_port,
                              const char* place, double deadline, Error* error) {
    int* connection = &comm->links[0].data;
    double T = comm->timeout_ms;
    CommNotice reply;
    Error reason = {"", false};
    for (;;) {
        // Rank 0 may have begun to wait only now, for its whole time-out; then it says who is missing.
        bool good = comm_greet(comm, connection, launch->address, launch->port, COMM_DATA, own_port, deadline, &reason);
        if (good && comm_move_all(*connection, &reply, sizeof reply, POLLIN, now_ms() + T + COMM_GRACE_MS)) break;
        if (good && errno == ETIMEDOUT)
            return fail(error, "rank 0 at %s has not answered rank %zu for %.1f s: it is stopped, or it is not this "
                        "program", place, comm->rank, T / 1e3);
        if (good) fail(&reason, "it hung up");
        comm_close_socket(connection);
        if (now_ms() + COMM_RETRY_MS >= deadline)
            return fail(error, "rank %zu has not reached rank 0 at %s within %.1f s: %.200s; see whether it was "
                        "started, what it printed, and MASTER_ADDR and MASTER_PORT", comm->rank, place, T / 1e3,
                        reason.text);
        comm_sleep(COMM_RETRY_MS);
    }
    reply.text[sizeof reply.text - 1] = 0;
    if (reply.kind == COMM_FAILED) return fail(error, "%s", reply.text);
    if (reply.kind != COMM_WELCOME)
        return fail(error, "what answers at %s is not rank 0 of this program; choose another MASTER_PORT", place);
    if (!comm_move_all(*connection, table, comm->world * sizeof *table, POLLIN, now_ms() + T))
        return fail(error, "rank 0 at %s is gone: it hung up while the ranks were meeting; see what it printed", place);
    // What rank 0 calls this machine is its own machine: reached as rank 0 itself is.
    for (size_t p = 0; p < comm->world; p++)
        if (p == 0 || comm_is_loopback(table[p].address)) comm_address_of(table[p].address, *connection);
    table[0].port = launch->port;
    return true;
}

// Connects to all lower ranks: rank 0 has the connection for data already.
static inline bool comm_visit_others(Comm* comm, const CommEntry* table, double deadline, Error* error) {
    Error reason = {"", false};
    for (size_t i = 1; i < 2 * comm->rank; i++) {
        size_t p = i / 2, port = (size_t)table[i / 2].port;
        CommKind kind = i % 2 == 0 ? COMM_DATA : COMM_CONTROL;
        int* connection = kind == COMM_DATA ? &comm->links[p].data : &comm->links[p].control;
        if (!comm_greet(comm, connection, table[p].address, port, kind, 0, deadline, &reason))
            return fail(error, "rank %zu cannot reach rank %zu at %.63s, port %zu: %.200s; see whether it is still "
                        "there, and that the machines let each other's connections through", comm->rank, p,
                        table[p].address, port, reason.text);
    }
    return true;
}

// Once all are connected.
static inline void comm_settle(Comm* comm, const CommEntry* table) {
    size_t before = 0, same = 0;
    int on = 1;
    for (size_t p = 0; p < comm->world; p++) {
        CommLink* link = &comm->links[p];
        bool local = table[p].host == table[comm->rank].host;
        same += local;
        before += local && p < comm->rank;
        link->heard_ms = now_ms();
        // Small messages leave at once: the operations wait for each of them.
        setsockopt(link->data, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        setsockopt(link->control, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }
    if (comm->local_rank == COMM_UNKNOWN) comm->local_rank = before;
    if (comm->local_world == COMM_UNKNOWN) comm->local_world = same;
}

static inline bool comm_meet(Comm* comm, const CommLaunch* launch, Error* error) {
    CommEntry* table = (CommEntry*)allocate(comm->world * sizeof *table);
    int listener = launch->listener;
    bool leads = comm->rank == 0, good = table != NULL;
    char zero[320], here[320];
    double T = comm->timeout_ms, deadline = now_ms() + T;
    size_t port = leads ? launch->port : 0;
    snprintf(comm->doing, sizeof comm->doing, "in the meeting of the ranks");
    if (!good) fail(error, "not enough memory for the addresses of %zu ranks", comm->world);
    good = good && (listener >= 0 || comm_listen(&listener, &port, launch->address, error));
    snprintf(zero, sizeof zero, "%s, port %zu", launch->address, launch->port);
    snprintf(here, sizeof here, "%s, port %zu", launch->address, port);
    good = good && (leads ? comm_host_meeting(comm, table, listener, zero, deadline, error)
                          : comm_visit(comm, table, launch, port, zero, deadline, error));
    deadline = now_ms() + T;
    good = good && comm_visit_others(comm, table, deadline, error) &&
           comm_accept(comm, NULL, listener, here, deadline, error);
    if (good) comm_settle(comm, table);
    else comm_tell(comm, COMM_FAILED, error->text);
    comm_close_socket(&listener);
    free(table);
    return good;
}

// ------------------------------------------------------------------------------------------------
// 6. Transfers
//
// The links say what goes to each rank and what comes from it; a transfer does all of it at once. Each pair of ranks
// agrees on the bytes between the two, so that no part is longer or shorter than expected.

// What the next transfer sends to rank p, and what it receives from there.
static inline void comm_plan(Comm* comm, size_t p, const char* out, size_t out_bytes, char* in, size_t in_bytes) {
    CommPart* parts = comm->links[p].parts;
    parts[COMM_OUT].at = (char*)out;
    parts[COMM_OUT].bytes = out_bytes;
    parts[COMM_IN].at = in;
    parts[COMM_IN].bytes = in_bytes;
    comm->sent += out_bytes;
}

// Moves what can be moved at once to and from rank p.
static inline bool comm_move(Comm* comm, size_t p, bool* moved, Error* error) {
    CommLink* link = &comm->links[p];
    for (int d = 0; d < 2; d++) {
        CommPart* part = &link->parts[d];
        if (part->bytes == 0) continue;
        ssize_t n = comm->mpi ? comm_mpi_move(part, p, d == COMM_OUT) :
                    d == COMM_OUT ? send(link->data, part->at, part->bytes, MSG_NOSIGNAL) :
                    recv(link->data, part->at, part->bytes, 0);
        if (n == 0 || (n < 0 && !comm_again())) return comm_fail_lost(comm, p, error);
        if (n < 0) continue;
        part->at += n;
        part->bytes -= (size_t)n;
        if (d == COMM_IN) link->heard_ms = now_ms();
        *moved = true;
    }
    return true;
}

// Waits until something can be moved, or until the deadline, or the next heartbeat; hears what the others say. False if
// that is that the run has failed, or if this rank gives up.
static inline bool comm_attend(Comm* comm, double deadline, Error* error) {
    struct pollfd* polls = comm->polls;
    size_t N = comm->world;
    bool moving = false, ready = false;
    for (size_t p = 0; p < N; p++) {
        const CommLink* link = &comm->links[p];
        int events = (link->parts[COMM_OUT].bytes ? POLLOUT : 0) | (link->parts[COMM_IN].bytes ? POLLIN : 0);
        moving |= events != 0;
        comm_watch(&polls[2 * p], link->control, POLLIN);
        comm_watch(&polls[2 * p + 1], events ? link->data : -1, events);
    }
    comm_watch(&polls[2 * N], comm->wake, POLLIN);
    if (comm->mpi) deadline = now_ms() + (moving ? COMM_MPI_PAUSE_MS : COMM_MPI_IDLE_MS);
    comm_poll(polls, 2 * N + 1, fmin(deadline, comm->heartbeat_ms));
    if (polls[2 * N].revents && !comm_woken(comm, error)) return false;
    if (comm->mpi) return comm_mpi_hear(error);
    // News after data, so that what can still be finished is.
    for (size_t p = 0; p < N; p++) ready |= polls[2 * p + 1].revents != 0;
    for (size_t p = 0; p < N && !ready; p++)
        if (polls[2 * p].revents && !comm_hear(comm, p, error)) return false;
    return true;
}

static inline bool comm_transfer(Comm* comm, Error* error) {
    double moved_ms = comm_clock(comm);
    for (;;) {
        bool moving = false, moved = false;
        for (size_t p = 0; p < comm->world; p++) {
            if (!comm_move(comm, p, &moved, error)) return false;
            moving |= comm_is_moving(&comm->links[p]);
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

// Rank p asks for something else.
static inline bool comm_fail_odd(Comm* comm, const CommHeader* ask, size_t p, const char* ours, Error* error) {
    const CommHeader* other = &comm->links[p].opening.header;
    char theirs[160];
    if (other->number != ask->number)
        return fail(error, "rank %zu sent rank %zu what does not belong to %s; the network or a program is at fault", p,
                    comm->rank, ours);
    comm_describe(theirs, sizeof theirs, other);
    return fail(error, "the ranks disagree: rank %zu called %s and rank %zu %s%s; start all with the same program, "
                "flags and data", p, theirs, comm->rank, ours, strcmp(theirs, ours) == 0 ? " with other slices" : "");
}

// Whether the openings carry all that there is to say: then one message each way does it, not two.
static inline bool comm_is_small(const Comm* comm, const CommCall* call) {
    bool small = !comm_reduces(call);
    for (size_t p = 0; p < comm->world; p++) small &= comm_length(call->slices[p]) <= COMM_SMALL;
    return small;
}

// All ranks tell each other what they are about to do; with their slices if those are small.
static inline bool comm_agree(Comm* comm, const CommCall* call, bool small, const char* ours, Error* error) {
    const CommHeader* ask = &call->header;
    CommOpening* opening = &comm->links[comm->rank].opening;
    CommSlice own = call->slices[comm->rank];
    opening->header = *ask;
    if (small && comm_length(own) > 0) memcpy(opening->payload, call->in + own.first, comm_length(own));
    for (size_t p = 0; p < comm->world; p++)
        if (p != comm->rank)
            comm_plan(comm, p, (const char*)opening, sizeof *opening, (char*)&comm->links[p].opening, sizeof *opening);
    comm->sent = small ? (comm->world - 1) * comm_length(own) : 0;
    if (!comm_transfer(comm, error)) return false;
    for (size_t p = 0; p < comm->world; p++) {
        const CommOpening* other = &comm->links[p].opening;
        CommSlice slice = call->slices[p];
        if (memcmp(ask, &other->header, sizeof *ask) != 0) return comm_fail_odd(comm, ask, p, ours, error);
        if (small && p != comm->rank && comm_length(slice) > 0)
            memcpy(call->out + slice.first, other->payload, comm_length(slice));
    }
    return true;
}

// The sum of the own slice, to `out`, chunk by chunk.
static inline bool comm_reduce_slices(Comm* comm, const CommCall* call, char* out, Error* error) {
    CommType type = (CommType)call->header.type;
    size_t own = comm_length(call->slices[comm->rank]), longest = 0;
    for (size_t p = 0; p < comm->world; p++) longest = max_size(longest, comm_length(call->slices[p]));
    for (size_t start = 0; start < longest; start += COMM_CHUNK) {
        size_t count = start < own ? min_size(COMM_CHUNK, own - start) : 0;
        for (size_t p = 0; p < comm->world; p++) {
            const char* mine = call->in + call->slices[p].first + start;
            char* theirs = comm->staging + p * COMM_CHUNK;
            size_t left = comm_length(call->slices[p]) - min_size(comm_length(call->slices[p]), start);
            comm->links[p].source = p == comm->rank ? mine : theirs;
            if (p != comm->rank) comm_plan(comm, p, mine, min_size(COMM_CHUNK, left), theirs, count);
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
        CommSlice other = call->slices[p];
        if (p != comm->rank)
            comm_plan(comm, p, call->out + own.first, comm_length(own), call->out + other.first, comm_length(other));
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
    bool small = comm_is_small(comm, call), all = call->header.operation == COMM_ALL_REDUCE;
    comm_describe(what, sizeof what, &call->header);
    snprintf(comm->doing, sizeof comm->doing, "in %s", what);
    if (!comm_check_call(comm, call, what, error)) return false;
    if (call->delay_ms > 0) comm_sleep(call->delay_ms);
    if (!comm_agree(comm, call, small, what, error)) return false;
    char* sum = call->out + (all ? call->slices[comm->rank].first : 0);
    if (comm_reduces(call) && !comm_reduce_slices(comm, call, sum, error)) return false;
    return small || call->header.operation == COMM_REDUCE_SCATTER || comm_spread_slices(comm, call, error);
}

// ------------------------------------------------------------------------------------------------
// 9. Progress
//
// One thread per Comm takes the requests in the order in which they were started. Between them it sends heartbeats,
// hears the other ranks, and sees whether they are still there. After a fault it tells the others and ends; all
// requests that are not finished have failed.

static inline bool comm_idle(Comm* comm, Error* error) {
    snprintf(comm->doing, sizeof comm->doing, "between two collectives");
    comm_heartbeat(comm);
    if (!comm_attend(comm, INFINITY, error)) return false;
    comm_clock(comm);
    for (size_t p = 0; p < comm->world && !comm->mpi; p++)
        if (p != comm->rank && comm->links[p].control < 0 && !comm->links[p].left)
            return comm_fail_lost(comm, p, error);
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

// all (world, count): every rank has filled its own row, and gets all others. A row of up to COMM_SMALL bytes takes one
// round of messages.
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
static inline void comm_be_patient(Comm* comm, bool patient) {
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
        comm_wake(comm);
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
    comm->polls = (struct pollfd*)allocate((2 * N + 1) * sizeof(struct pollfd));
    comm->staging = (char*)allocate(N > 1 ? N * COMM_CHUNK : 0);
    comm->calls = (CommCall*)allocate(COMM_IN_FLIGHT * sizeof(CommCall));
    comm->slices = (CommSlice*)allocate(COMM_IN_FLIGHT * N * sizeof(CommSlice));
    for (size_t p = 0; comm->links && p < N; p++) comm->links[p].data = comm->links[p].control = -1;
    return (comm->links && comm->polls && comm->staging && comm->calls && comm->slices) ||
           fail(error, "not enough memory for the connections of %zu ranks", N);
}

// Meets the other ranks; returns when all are there. After a failure there is nothing to close.
static inline bool comm_open(Comm* comm, const CommLaunch* launch, double timeout_ms, Error* error) {
    memset(comm, 0, sizeof *comm);
    bool several = launch->world > 1;
    comm->wake = -1;
    comm->rank = launch->rank;
    comm->world = launch->world;
    comm->local_rank = several ? launch->local_rank : 0;
    comm->local_world = several ? launch->local_world : 1;
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
    if (good && comm_barrier(comm, error)) return true;
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
        comm_abandon(comm, error->text);
    }
    if (good) memcpy(*texts + places[comm->rank], text, length);
    // Without a letter anywhere there is nothing to send.
    return good && (places[N] == N ||
                    comm_all_gather(comm, *texts, places[N], COMM_BYTES, comm_slice_of_table, places, error));
}

// Every rank says whether its part of something went well, and error->text why if not. True on all ranks if all parts
// did; otherwise false on all, with the sentence of the lowest rank that failed: "rank 2: cannot read ...", without the
// rank if all have failed with the very same sentence. The Comm stays usable.
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
    free(begins);
    free(texts);
    return good;
}

#endif  // LLMTRAIN_COMM_H
