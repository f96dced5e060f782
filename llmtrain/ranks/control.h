// control.h: how ranks find each other, and learn of failures. The lower half of comm.h, which is the one to include.
//
//   1. Comm         the links to the other ranks, and their state
//   2. MPI          in place of sockets, with -DLLMTRAIN_MPI
//   3. messages     over the control connections: heartbeats, and why a rank fails
//   4. failures     which rank is to blame
//   5. events       waiting for data, messages and deadlines at once
//   6. rendezvous   all ranks connect to rank 0, then each to each
//
// Two connections join each pair of ranks: one carries collectives, which comm.h runs; the control connection carries
// messages. Heartbeats, which are sent whatever the program computes, distinguish a rank that is stopped or unreachable
// from one that is alive but late. A rank that detects a failure notifies all others before it closes a connection, so
// that all blame the rank where the failure began, not one that ended because of it.
//
// Above COMM_PAIRS_MAX ranks the control connections are the edges of a tree: with the fan-out F rank p is joined to
// its parent, rank (p - 1) / F, and to its children, and hears the heartbeats of these only. A failure spreads along
// the edges: a rank that learns of one notifies those that it is joined to. A rank that waits in vain asks all whether
// they miss one (COMM_ASK). A rank whose run has ended passes messages on until its children have left too.

#ifndef LLMTRAIN_CONTROL_H
#define LLMTRAIN_CONTROL_H

#include "launch.h"
#include "shared_memory.h"
#include "transport.h"

#include <netinet/tcp.h>
#ifdef LLMTRAIN_MPI
#define OMPI_SKIP_MPICXX
#include <mpi.h>
#endif

#define COMM_GRACE_MS 1000.0              // to learn why a rank has closed its connections
#define COMM_RETRY_MS 50.0                // between attempts to reach rank 0
#define COMM_PENDING_MAX ((size_t)64)     // connections awaiting their handshake; the oldest is dropped
#define COMM_PENDING_MS 1.0               // between polls of them
#define COMM_PAIRS_MAX ((size_t)64)       // ranks; of more the control connections are a tree
#define COMM_FAN_OUT ((size_t)32)         // of the tree
#define COMM_FILES_MIN ((rlim_t)32)       // open files of a rank besides its connections to others
#define COMM_FILES ((rlim_t)256)          // additional descriptors, for token shards
#define COMM_MPI_POLL_MS 0.05             // between polls of a transfer: MPI has no wait with a deadline
#define COMM_MPI_IDLE_MS 10.0             // between polls for messages of other ranks: MPI cannot wake a thread

// ------------------------------------------------------------------------------------------------
// 1. Comm

// The values differ from what another program would send first.
typedef enum {
    COMM_HEARTBEAT = 0x6c6c6d74, COMM_WELCOME, COMM_LEFT, COMM_FAILED,
    COMM_PARTED,  // in a tree, to rank 0: the sender has connected to all, and needs this connection no more
    COMM_ASK,     // in a tree, to all: does anyone miss a rank, or know that `rank`, if there is one, has left?
    COMM_ANSWER,  // in a tree, to all: `rank` has left
} CommMessageKind;
enum { COMM_MESSAGE_BYTES = 1024 };

typedef struct {
    uint32_t kind, rank;
    char text[COMM_MESSAGE_BYTES];  // COMM_FAILED: what happened
} CommMessage;

static inline CommMessage comm_message(CommMessageKind kind, size_t rank, const char* text) {
    CommMessage message = {.kind = (uint32_t)kind, .rank = (uint32_t)rank, .text = ""};
    snprintf(message.text, sizeof message.text, "%s", text);
    return message;
}

// The bytes that a part of a transfer still has to send to a rank, or to receive from it.
typedef struct {
    char* at;
    size_t bytes;
#ifdef LLMTRAIN_MPI
    MPI_Request request;
#endif
} CommPart;
enum { COMM_OUT, COMM_IN };
// The parts of a transfer: a header, which precedes the first data of a collective; data; a checksum behind them.
enum { COMM_HEADER, COMM_PAYLOAD, COMM_CHECKSUM, COMM_PARTS };

// The link to another rank. A rank's link to itself is not connected.
typedef struct {
    int data, control;     // connections; -1: none
    bool near;             // on the same machine; of links of the run, not of groups
    bool closed;           // the other end of `data`, while data pass through memory
    SharedRing* rings[2];  // COMM_OUT, COMM_IN: in memory that both ranks share; NULL: data pass through `data`
    bool left;             // it has ended its run
    bool muted;            // it gets no more messages: its buffer is full, or it has had the last one
    bool reported;         // in the message being composed
    bool asked, answered;  // in a tree: this rank has passed on a COMM_ASK, a COMM_ANSWER about it, which it does once
    double seen_ms;        // when it last sent something; 0: it has not connected yet, or others watch it, or MPI
    size_t message_bytes;  // of the message received so far
    CommMessage message;   // in this rank's own link: sent to all others through MPI
    CommPart parts[2][COMM_PARTS];  // COMM_OUT, COMM_IN: of the transfer in progress
    Hash hashes[2];        // COMM_OUT, COMM_IN: of its data so far
    uint64_t checksums[2]; // COMM_OUT, COMM_IN: sent behind the data, and received
} CommLink;

typedef struct CommQueue CommQueue;

struct Comm {
    size_t rank, world, local_rank, local_world;
    Transport transport;             // for the flat vector
    double timeout_ms;
    bool extended_timeout;           // see comm_extend_timeout
    bool mpi;
    size_t fan_out;                  // of the tree of control connections; 0: they join each pair
    char run[64];                    // its identifier
    char address[256];               // at which rank 0 listens, as the launcher says

    // Used by the progress thread while it runs
    CommLink* links;                 // (world)
    struct pollfd* polls;            // (2 world + 2)
    double heartbeat_ms;             // when the next one is due
    double asked_ms;                 // when this rank has last passed on a COMM_ASK about no rank
    double clock_ms;                 // the last time of comm_clock
    double resumed_ms;               // when this process was last found to have been stopped itself
    char doing[192];                 // for messages: "in all_reduce of 7 float (operation 3)"
    int listener;                    // during the rendezvous; otherwise -1

    CommQueue* queue;                // of collectives, see comm.h
    int wake, waker;                 // ends of a pipe, to read and to write: the queue has changed, or `aborting`
    pthread_mutex_t mutex;           // guards the queue and what follows
    pthread_cond_t changed;
    bool failed, aborting;
    Error error;                     // why it has failed, or is aborting
    bool late;                       // a group has waited in vain, and its parent asks why before it fails
    void (*on_failure)(void* context);  // see comm_on_failure; NULL: nothing
    void* on_failure_context;
    bool calling;                    // on_failure

    // Groups of ranks, see split.h
    Comm* parent;                    // of a group: all ranks of the run; NULL: this is no group
    size_t* members;                 // of a group: (world) the ranks of the run that are in it
    Comm* groups;                    // the first group with this rank,
    Comm* next;                      // and of a group the next one
    size_t splits;                   // comm_split calls so far; of a group, the number of its own: its MPI tag
    size_t connections;              // to other ranks, those of groups too
};

// The rank of the run that is rank p of the Comm.
static inline size_t comm_rank(const Comm* comm, size_t p) { return comm->members ? comm->members[p] : p; }

// The fan-out of a run's control connections; LLMTRAIN_TEST_TREE sets it for tests.
static inline size_t comm_fan_out(size_t world) {
    const char* test = getenv("LLMTRAIN_TEST_TREE");
    return test ? (size_t)strtoull(test, NULL, 10) : world > COMM_PAIRS_MAX ? COMM_FAN_OUT : 0;
}

// Whether rank p of the Comm is another rank of the same machine.
static inline bool comm_is_near(const Comm* comm, size_t p) {
    const Comm* run = comm->parent ? comm->parent : comm;
    return p != comm->rank && run->links[comm_rank(comm, p)].near;
}

// Whether rank p is a child of this rank in the tree; and whether a control connection joins the two.
static inline bool comm_is_child(const Comm* comm, size_t p) {
    return comm->fan_out > 0 && p > 0 && (p - 1) / comm->fan_out == comm->rank;
}
static inline bool comm_is_joined(const Comm* comm, size_t p) {
    bool parent = comm->fan_out > 0 && comm->rank > 0 && (comm->rank - 1) / comm->fan_out == p;
    return comm->fan_out == 0 ? p != comm->rank : parent || comm_is_child(comm, p);
}

// ------------------------------------------------------------------------------------------------
// 2. MPI
//
// One thread at a time calls MPI: the caller's in comm_open and comm_close, in between the progress threads under a
// mutex.

#ifdef LLMTRAIN_MPI

static pthread_mutex_t comm_mpi_mutex = PTHREAD_MUTEX_INITIALIZER;
static bool comm_mpi_over;  // the run has failed: no call may receive into memory any more
enum { COMM_MPI_MESSAGE, COMM_MPI_DATA };  // tags; those of groups follow
#define COMM_MPI_BYTES ((size_t)1 << 30)   // of one transfer: MPI counts in int

static inline bool comm_mpi_open(Comm* comm, Error* error) {
    int given = 0, rank = 0, world = 0;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &given) != MPI_SUCCESS)
        return fail_with(error, "MPI failed to start; see what it printed");
    if (given < MPI_THREAD_SERIALIZED)
        return fail_with(error, "this MPI can be used from one thread only; use another, or sockets");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    return ((size_t)rank == comm->rank && (size_t)world == comm->world) ||
           fail_with(error, "mpirun says rank %zu of %zu, MPI says rank %d of %d; use the mpirun of the MPI that this "
                     "program was built with", comm->rank, comm->world, rank, world);
}

static inline void comm_mpi_prepare(Comm* comm) {
    for (size_t p = 0; p < comm->world; p++)
        for (int d = 0; d < 2; d++)
            for (int k = 0; k < COMM_PARTS; k++) comm->links[p].parts[d][k].request = MPI_REQUEST_NULL;
}

// After a failure MPI_Finalize would wait for the others in vain; mpirun ends all of them when this process ends.
static inline void comm_mpi_close(Comm* comm) {
    if (comm->mpi && !comm->parent && !comm->failed) MPI_Finalize();
}

// Like send and recv: the bytes sent or received, -1 with EAGAIN if there are none, 0 after an error.
static inline ssize_t comm_mpi_move(const Comm* comm, CommPart* part, size_t p, bool out) {
    int bytes = (int)min_size(part->bytes, COMM_MPI_BYTES), done = 0, status = MPI_SUCCESS;
    int other = (int)comm_rank(comm, p), tag = COMM_MPI_DATA + (comm->parent ? (int)comm->splits : 0);
    pthread_mutex_lock(&comm_mpi_mutex);
    if (comm_mpi_over) status = MPI_ERR_OTHER;
    else if (part->request == MPI_REQUEST_NULL && out)
        status = MPI_Isend(part->at, bytes, MPI_BYTE, other, tag, MPI_COMM_WORLD, &part->request);
    else if (part->request == MPI_REQUEST_NULL)
        status = MPI_Irecv(part->at, bytes, MPI_BYTE, other, tag, MPI_COMM_WORLD, &part->request);
    if (status == MPI_SUCCESS) status = MPI_Test(&part->request, &done, MPI_STATUS_IGNORE);
    pthread_mutex_unlock(&comm_mpi_mutex);
    errno = EAGAIN;
    return status != MPI_SUCCESS ? 0 : done ? bytes : -1;
}

static inline void comm_mpi_notify(Comm* comm, const char* text) {
    double deadline = now_ms() + COMM_GRACE_MS;
    CommMessage* message = &comm->links[comm->rank].message;  // MPI may still read it after the grace time
    *message = comm_message(COMM_FAILED, comm->rank, text);
    pthread_mutex_lock(&comm_mpi_mutex);
    for (size_t p = 0; p < comm->world; p++)
        if (p != comm->rank)
            MPI_Isend(message, (int)sizeof *message, MPI_BYTE, (int)p, COMM_MPI_MESSAGE, MPI_COMM_WORLD,
                      &comm->links[p].parts[COMM_OUT][COMM_PAYLOAD].request);
    for (size_t p = 0; p < comm->world; p++)
        for (int done = p == comm->rank; !done && now_ms() < deadline;)
            if (MPI_Test(&comm->links[p].parts[COMM_OUT][COMM_PAYLOAD].request, &done, MPI_STATUS_IGNORE) !=
                MPI_SUCCESS) break;
    comm_mpi_over = true;
    pthread_mutex_unlock(&comm_mpi_mutex);
}

// False if a rank says that the run has failed.
static inline bool comm_mpi_receive(Error* error) {
    CommMessage message;
    MPI_Status status;
    int there = 0;
    pthread_mutex_lock(&comm_mpi_mutex);
    bool received = MPI_Iprobe(MPI_ANY_SOURCE, COMM_MPI_MESSAGE, MPI_COMM_WORLD, &there, &status) == MPI_SUCCESS &&
                    there && MPI_Recv(&message, (int)sizeof message, MPI_BYTE, status.MPI_SOURCE, COMM_MPI_MESSAGE,
                                      MPI_COMM_WORLD, MPI_STATUS_IGNORE) == MPI_SUCCESS;
    pthread_mutex_unlock(&comm_mpi_mutex);
    if (!received) return true;
    message.text[sizeof message.text - 1] = 0;
    return fail_with(error, "%s", message.text);
}

#else

static inline bool comm_mpi_open(Comm* comm, Error* error) {
    return (void)comm, fail_with(error, "this program was built without MPI; build it with MPI, or use sockets");
}
static inline void comm_mpi_prepare(Comm* comm) { (void)comm; }
static inline void comm_mpi_close(Comm* comm) { (void)comm; }
static inline ssize_t comm_mpi_move(const Comm* comm, CommPart* part, size_t p, bool out) {
    return (void)comm, (void)part, (void)p, (void)out, 0;
}
static inline void comm_mpi_notify(Comm* comm, const char* text) { (void)comm, (void)text; }
static inline bool comm_mpi_receive(Error* error) { return (void)error, true; }

#endif

// ------------------------------------------------------------------------------------------------
// 3. Messages

// Sends a message without waiting. COMM_FAILED is the last message, and COMM_PARTED of a connection.
static inline void comm_send(CommLink* link, const CommMessage* message) {
    if (link->control < 0 || link->muted) return;
    bool sent = send(link->control, message, sizeof *message, SOCKET_QUIET) == (ssize_t)sizeof *message;
    link->muted = !sent || message->kind == COMM_FAILED || message->kind == COMM_PARTED;
}

// Sends a message to all others that a control connection joins to this rank.
static inline void comm_notify(Comm* comm, CommMessageKind kind, const char* text) {
    CommMessage message = comm_message(kind, comm->rank, text);
    if (comm->mpi && kind == COMM_FAILED) comm_mpi_notify(comm, text);
    for (size_t p = 0; p < comm->world; p++) comm_send(&comm->links[p], &message);
}

// Sends a message on its way through the tree: to all that are joined to this rank except the one that it came from.
// All ranks may ask at once, and a full buffer would lose what matters: none passes on what it has passed on already.
static inline void comm_spread(Comm* comm, CommMessageKind kind, size_t about, size_t from) {
    CommMessage message = comm_message(kind, about, "");
    for (size_t p = 0; p < comm->world; p++)
        if (p != from && comm_is_joined(comm, p)) comm_send(&comm->links[p], &message);
}
static inline void comm_ask(Comm* comm, size_t about, size_t from) {
    bool again = about < comm->world ? comm->links[about].asked : now_ms() - comm->asked_ms < COMM_RETRY_MS;
    if (again) return;
    if (about < comm->world) comm->links[about].asked = true;
    else comm->asked_ms = now_ms();
    comm_spread(comm, COMM_ASK, about, from);
}
static inline void comm_answer(Comm* comm, size_t about, size_t from) {
    if (comm->links[about].answered) return;
    comm->links[about].answered = true;
    comm_spread(comm, COMM_ANSWER, about, from);
}

static inline void comm_send_heartbeat(Comm* comm) {
    if (now_ms() < comm->heartbeat_ms) return;
    comm->heartbeat_ms = now_ms() + comm->timeout_ms / 4;
    comm_notify(comm, COMM_HEARTBEAT, "");
}

// Whether rank p is known to have ended its run. In a tree ranks below one that has left and closed have left too.
static inline bool comm_has_left(const Comm* comm, size_t p) {
    bool left = comm->links[p].left;
    for (size_t a = p; comm->fan_out > 0 && !left && a > 0 && a != comm->rank; a = (a - 1) / comm->fan_out)
        left = comm_is_child(comm, a) && comm->links[a].left && comm->links[a].control < 0;
    return left;
}

static inline double comm_clock(Comm* comm);
static inline bool comm_check_heartbeats(Comm* comm, double silence_ms, Error* error);

// Handles a message of rank p; false if it says that the run has failed, or if the answer to it is that.
static inline bool comm_handle(Comm* comm, size_t p, const CommMessage* message, Error* error) {
    CommLink* link = &comm->links[p];
    size_t about = message->rank;
    switch (message->kind) {
        case COMM_LEFT:
            link->left = true;
            if (link->asked) comm_answer(comm, p, p);
            break;
        case COMM_FAILED: return fail_with(error, "%s", message->text);
        case COMM_PARTED:
            socket_close(&link->control);
            link->seen_ms = 0;
            break;
        case COMM_ASK:
            comm_clock(comm);
            if (!comm_check_heartbeats(comm, 0.75 * comm->timeout_ms, error)) return false;
            if (about < comm->world && comm_has_left(comm, about)) comm_answer(comm, about, comm->rank);
            else comm_ask(comm, about, p);
            break;
        case COMM_ANSWER:
            if (about >= comm->world) break;
            comm->links[about].left = true;
            comm_answer(comm, about, p);
            break;
        default: break;
    }
    return true;
}

// Receives the messages of rank p that have arrived; false if one says that the run has failed.
static inline bool comm_receive(Comm* comm, size_t p, Error* error) {
    CommLink* link = &comm->links[p];
    CommMessage* message = &link->message;
    while (link->control >= 0) {
        ssize_t n = recv(link->control, (char*)message + link->message_bytes, sizeof *message - link->message_bytes, 0);
        if (n < 0 && socket_would_block()) break;
        if (n <= 0) {
            socket_close(&link->control);
            break;
        }
        if (link->seen_ms > 0) link->seen_ms = now_ms();
        link->message_bytes = (link->message_bytes + (size_t)n) % sizeof *message;
        if (link->message_bytes > 0) continue;
        message->text[sizeof message->text - 1] = 0;
        if (!comm_handle(comm, p, message, error)) return false;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// 4. Failures

// The time. A jump means that this process was stopped, perhaps with all others (Ctrl-Z, then fg): no rank's fault.
static inline double comm_clock(Comm* comm) {
    double now = now_ms();
    if (now - comm->clock_ms > comm->timeout_ms / 2) comm->resumed_ms = now;
    comm->clock_ms = now;
    return now;
}

// A group has no control connections: waits until the deadline for a failure of its parent, which learns of a reason in
// a moment.
static inline bool comm_await_parent(const Comm* comm, double deadline, Error* error) {
    Comm* parent = comm->parent;
    for (bool failed = false; now_ms() < deadline; sleep_ms(1)) {
        pthread_mutex_lock(&parent->mutex);
        failed = parent->failed || parent->aborting;
        if (failed) *error = parent->error;
        pthread_mutex_unlock(&parent->mutex);
        if (failed) return false;
    }
    return true;
}

// Waits until the deadline for a message of rank p that the run has failed: false, with its reason. True at once if it
// has ended. In a tree others may send the message, and p may be `world`: no rank.
static inline bool comm_await_reason(Comm* comm, size_t p, double deadline, Error* error) {
    struct pollfd* polls = comm->polls;
    bool tree = comm->fan_out > 0, direct = p < comm->world && (!tree || comm->links[p].seen_ms > 0);
    size_t first = tree ? 0 : p, end = tree ? comm->world : p + 1;
    if (comm->parent) return comm_await_parent(comm, deadline, error);
    for (bool over = false; !over;) {
        bool ready = false;
        if (p < comm->world && (comm_has_left(comm, p) || (direct && comm->links[p].control < 0))) break;
        for (size_t q = first; q < end; q++) socket_watch(&polls[q], comm->links[q].control, POLLIN);
        socket_poll(polls + first, end - first, fmin(deadline, comm_clock(comm) + comm->timeout_ms / 4));
        for (size_t q = first; q < end; q++) {
            ready |= polls[q].revents != 0;
            if (polls[q].revents && !comm_receive(comm, q, error)) return false;
        }
        over = !ready && now_ms() >= deadline;
    }
    return true;
}

// Rank p has closed its connections. Its reason arrives in a moment, or it is dead and its control connection ends too.
static inline bool comm_fail_closed(Comm* comm, size_t p, Error* error) {
    bool relayed = comm->fan_out > 0 && comm->links[p].seen_ms == 0;
    if (relayed && !comm_has_left(comm, p)) comm_ask(comm, p, comm->rank);
    if (!comm_await_reason(comm, p, now_ms() + COMM_GRACE_MS, error)) return false;
    // A rank on the way that is stopped may have kept the reason from this one: then p has failed because of that rank.
    comm->late |= comm->parent && comm->parent->fan_out > 0;
    if (relayed && !comm_has_left(comm, p)) {
        comm_clock(comm);
        if (!comm_check_heartbeats(comm, 0.75 * comm->timeout_ms, error)) return false;
    }
    if (comm->mpi)
        return fail_with(error, "MPI reported an error while rank %zu was %s; see what it printed",
                         comm_rank(comm, comm->rank), comm->doing);
    size_t other = comm_rank(comm, p);
    bool left = comm->parent || comm_has_left(comm, p);  // a group's parent would know by now of a rank that is gone
    return fail_with(error, "rank %zu %s while rank %zu was %s; see what rank %zu printed%s", other,
                     left ? "ended its run" : "is gone: its connection closed", comm_rank(comm, comm->rank),
                     comm->doing, other, left ? "" : ", and whether it was killed");
}

// "rank 2 has", "ranks 0, 3 have" or "ranks 1, 2, ... and 5 more have": the ranks to be reported; false if none are.
static inline bool comm_list_ranks(char text[160], const Comm* comm, const char* of_one, const char* of_several) {
    size_t count = 0, shown = 0, length;
    for (size_t p = 0; p < comm->world; p++) count += comm->links[p].reported;
    length = (size_t)snprintf(text, 160, count == 1 ? "rank" : "ranks");
    for (size_t p = 0; p < comm->world && shown < 8; p++)
        if (comm->links[p].reported)
            length += (size_t)snprintf(text + length, 160 - length, "%s%zu", shown++ ? ", " : " ",
                                       comm_rank(comm, p));
    if (count > shown) length += (size_t)snprintf(text + length, 160 - length, " and %zu more", count - shown);
    snprintf(text + length, 160 - length, " %s", count == 1 ? of_one : of_several);
    return count > 0;
}

// False if a rank has sent nothing for silence_ms, not even a heartbeat.
static inline bool comm_check_heartbeats(Comm* comm, double silence_ms, Error* error) {
    char ranks[160];
    if (comm->parent) return true;
    for (size_t p = 0; p < comm->world; p++) {
        CommLink* link = &comm->links[p];
        double seen_ms = fmax(link->seen_ms, comm->resumed_ms);
        link->reported = link->seen_ms > 0 && !link->left && comm->clock_ms - seen_ms > silence_ms;
    }
    if (!comm_list_ranks(ranks, comm, "has", "have")) return true;
    return fail_with(error, "%s not answered for %.1f s while rank %zu was %s: stopped, or its machine or the network "
                     "is down", ranks, comm->timeout_ms / 1e3, comm->rank, comm->doing);
}

// The poll events for a rank: those of the data that the transfer in progress still has to move.
static inline int comm_events(const CommLink* link) {
    int events = 0;
    for (int k = 0; k < COMM_PARTS; k++)
        events |= (link->parts[COMM_OUT][k].bytes > 0 ? POLLOUT : 0) | (link->parts[COMM_IN][k].bytes > 0 ? POLLIN : 0);
    return events;
}

// When a timeout has passed without a byte: false if there are ranks without heartbeats, which then are to blame, or if
// one of the ranks knows more, as where packets are lost in one direction: it reports that in a moment.
static inline bool comm_ask_why(Comm* comm, Error* error) {
    double deadline = now_ms() + COMM_GRACE_MS;
    if (!comm_check_heartbeats(comm, 0.75 * comm->timeout_ms, error)) return false;
    if (comm->fan_out > 0) {
        comm_ask(comm, comm->world, comm->rank);
        return comm_await_reason(comm, comm->world, deadline, error) &&
               comm_check_heartbeats(comm, 0.75 * comm->timeout_ms, error);
    }
    for (size_t p = 0; p < comm->world; p++)
        if (!comm_await_reason(comm, p, deadline, error)) return false;
    return true;
}

// The timeout has passed without a byte: those that owe data are to blame. Of a group the parent asks why.
static inline bool comm_fail_late(Comm* comm, Error* error) {
    char ranks[160];
    if (comm->parent) comm->late = true;
    else if (!comm_ask_why(comm, error)) return false;
    for (size_t p = 0; p < comm->world; p++) comm->links[p].reported = comm_events(&comm->links[p]) != 0;
    comm_list_ranks(ranks, comm, "is", "are");
    return fail_with(error, "%s late: rank %zu has waited for %.1f s %s%s; raise --timeout if this is expected",
                     ranks, comm_rank(comm, comm->rank), comm->timeout_ms / 1e3, comm->doing,
                     comm->mpi ? "" : ", while the process there is alive: it is busy elsewhere, or packets are lost");
}

// ------------------------------------------------------------------------------------------------
// 5. Events

// After the progress thread was woken: false if this rank aborts, or if a group's parent has failed.
static inline bool comm_check_abort(Comm* comm, Error* error) {
    pipe_empty(comm->wake);
    pthread_mutex_lock(&comm->mutex);
    bool aborting = comm->aborting || comm->failed, asks = comm->aborting && comm->late && !comm->parent;
    if (aborting) *error = comm->error;
    pthread_mutex_unlock(&comm->mutex);
    if (asks) comm_ask_why(comm, error);
    return !aborting;
}

// After waiting for data in shared memory: drops the bytes that have woken this rank.
static inline void comm_end_wait(CommLink* link, int revents) {
    char bytes[64];
    ssize_t n = revents ? recv(link->data, bytes, sizeof bytes, 0) : 1;
    link->closed |= n == 0 || (n < 0 && !socket_would_block());
    shared_waits(link->rings, 0);
}

// Waits until data can be moved, or until the deadline, or the next heartbeat; receives messages. False if one says
// that the run has failed, or if this rank aborts.
static inline bool comm_await_events(Comm* comm, double deadline, Error* error) {
    struct pollfd* polls = comm->polls;
    size_t N = comm->world;
    bool moving = false, ready = false;
    for (size_t p = 0; p < N; p++) {
        const CommLink* link = &comm->links[p];
        int events = comm_events(link);
        moving |= events != 0;
        socket_watch(&polls[2 * p], link->control, POLLIN);
        // A byte over the socket says that there is something to do in shared memory; if there is already, do it now.
        bool shared = events && link->rings[0];
        if (shared && !shared_waits(link->rings, events)) deadline = 0;
        socket_watch(&polls[2 * p + 1], events ? link->data : -1, shared ? POLLIN : events);
    }
    socket_watch(&polls[2 * N], comm->wake, POLLIN);
    socket_watch(&polls[2 * N + 1], comm->listener, POLLIN);
    // Messages come to the parent of a group.
    if (comm->mpi && (moving || !comm->parent)) deadline = now_ms() + (moving ? COMM_MPI_POLL_MS : COMM_MPI_IDLE_MS);
    socket_poll(polls, 2 * N + 2, fmin(deadline, comm->heartbeat_ms));
    if (polls[2 * N].revents && !comm_check_abort(comm, error)) return false;
    if (comm->mpi) return comm->parent || comm_mpi_receive(error);
    // Data comes before messages, so that a collective that can still finish does.
    for (size_t p = 0; p < N; p++) {
        ready |= polls[2 * p + 1].revents != 0;
        bool watched = polls[2 * p + 1].fd >= 0;
        if (watched && comm->links[p].rings[0]) comm_end_wait(&comm->links[p], polls[2 * p + 1].revents);
    }
    for (size_t p = 0; p < N && !ready; p++)
        if (polls[2 * p].revents && !comm_receive(comm, p, error)) return false;
    return true;
}

// While there is nothing to move: exchanges heartbeats, and checks that ranks that have connected still are connected.
static inline bool comm_monitor(Comm* comm, double deadline, Error* error) {
    comm_send_heartbeat(comm);
    if (!comm_await_events(comm, deadline, error)) return false;
    for (size_t p = 0; p < comm->world && !comm->parent; p++) {
        const CommLink* link = &comm->links[p];
        if (link->seen_ms > 0 && link->control < 0 && !link->left) return comm_fail_closed(comm, p, error);
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// 6. Rendezvous
//
// Every rank listens. All connect to rank 0 and send a handshake; after the last one rank 0 sends each the table of
// addresses. Then each rank connects to all lower ranks, the control connection first, so that a rank that fails can
// notify all that it has reached. A connection that is not of this run is sent a rejection and closed. In a tree a
// control connection to rank 0 that is no edge lasts until the rank has connected to all; rank 0 closes it.

#define COMM_MAGIC 0x36696172746d6c6cull  // "llmtrai", and the version of the protocol

typedef enum { COMM_CONTROL, COMM_DATA } CommKind;
typedef struct {
    uint64_t magic;
    uint32_t kind, world, rank, port;  // port: where the rank listens
    char run[64];
} CommHandshake;

typedef struct {
    char address[64];
    uint64_t port;
} CommAddress;  // where a rank listens

typedef struct {
    const Launch* launch;
    char name[320];                 // of rank 0's address, for messages
    size_t port;                    // where this rank listens
    CommAddress* table;             // (world)
    int pending[COMM_PENDING_MAX];  // connections awaiting their handshake, oldest first
    size_t pending_count;
    char rejected[320];             // why a connection was rejected last, for messages
    bool fatal;                     // it was a rank of this run, started wrongly, so that waiting for others is in vain
    double deadline;
} CommRendezvous;

// Connects to rank p and sends the handshake. The connection stays open if only the handshake failed.
static inline bool comm_connect(Comm* comm, const CommRendezvous* r, size_t p, CommKind kind, const char* address,
                                size_t port, Error* reason) {
    CommLink* link = &comm->links[p];
    int* connection = kind == COMM_CONTROL ? &link->control : &link->data;
    CommHandshake handshake = {COMM_MAGIC, (uint32_t)kind, (uint32_t)comm->world, (uint32_t)comm->rank,
                               (uint32_t)r->port, ""};
    memcpy(handshake.run, comm->run, sizeof handshake.run);
    *connection = socket_connect(address, port, r->deadline, reason);
    if (*connection < 0) return false;
    if (kind == COMM_CONTROL) link->seen_ms = now_ms();
    return socket_move_all(*connection, &handshake, sizeof handshake, POLLOUT, r->deadline) ||
           fail_with(reason, "%s", strerror(errno));
}

// Reads the handshake of a pending connection, and makes it a link or rejects it. False: it may_wait for the handshake.
static inline bool comm_accept_handshake(Comm* comm, CommRendezvous* r, int connection, bool may_wait) {
    CommHandshake handshake, *h = &handshake;
    char from[64], who[96];
    ssize_t n = recv(connection, h, sizeof *h, MSG_PEEK), whole = sizeof *h;
    bool silent = n < 0 && socket_would_block(), ours = n < (ssize_t)sizeof h->magic || h->magic == COMM_MAGIC;
    bool known = ours && n == whole && h->kind <= COMM_DATA, fatal = false;
    if (may_wait && (silent || (ours && n > 0 && n < whole))) return false;
    recv(connection, h, sizeof *h, 0);  // closing with unread data would lose what is sent now
    CommLink* link = known && h->rank > comm->rank && h->rank < comm->world ? &comm->links[h->rank] : NULL;
    int* slot = link == NULL ? NULL : h->kind == COMM_CONTROL ? &link->control : &link->data;
    Error reason = {"", ERROR_OUTSIDE, false};
    socket_peer_address(from, connection);
    h->run[sizeof h->run - 1] = 0;
    if (known) snprintf(who, sizeof who, "rank %u at %s", (unsigned)h->rank, from);
    if (!known) fail_with(&reason, "something at %s that is not this program, or not this version of it", from);
    else if (strcmp(h->run, comm->run) != 0)
        fail_with(&reason, "%s belongs to run '%s', but rank %zu here belongs to run '%s'; two runs use the same "
                  "address and port: choose another MASTER_PORT", who, h->run, comm->rank, comm->run);
    else if ((fatal = h->world != comm->world))
        fail_with(&reason, "%s has world size %u, rank %zu has %zu; start all with the same world size", who,
                  (unsigned)h->world, comm->rank, comm->world);
    else if ((fatal = slot == NULL || *slot >= 0))
        fail_with(&reason, "a second %s; give each rank its own number", who);
    else {
        *slot = connection;
        if (h->kind == COMM_CONTROL) link->seen_ms = now_ms();
        memcpy(r->table[h->rank].address, from, sizeof from);
        r->table[h->rank].port = h->port;
        return true;
    }
    CommMessage rejection = comm_message(COMM_FAILED, comm->rank, reason.text);
    snprintf(r->rejected, sizeof r->rejected, "%.300s", reason.text);
    r->fatal |= fatal && strncmp(comm->run, "unnamed", 7) != 0;
    socket_move_all(connection, &rejection, sizeof rejection, POLLOUT, now_ms());
    close(connection);
    return true;
}

static inline void comm_accept(Comm* comm, CommRendezvous* r) {
    int connection = descriptor_prepare(accept(comm->listener, NULL, NULL));
    size_t count = r->pending_count;
    if (connection >= 0) r->pending[count++] = connection;
    r->pending_count = 0;
    for (size_t i = 0; i < count; i++) {
        bool may_wait = i > 0 || count < COMM_PENDING_MAX;
        if (!comm_accept_handshake(comm, r, r->pending[i], may_wait)) r->pending[r->pending_count++] = r->pending[i];
    }
}

// Whether rank p, forked by this process, has ended before it connected.
static inline bool comm_child_ended(const Launch* launch, size_t p) {
    siginfo_t info;
    memset(&info, 0, sizeof info);
    return launch->children != NULL &&
           waitid(P_PID, (id_t)launch->children[p - 1], &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0;
}

// Waits until every higher rank has connected: its control connection, or both.
static inline bool comm_await_ranks(Comm* comm, CommRendezvous* r, bool both, Error* error) {
    char ranks[160];
    for (;;) {
        for (size_t p = 0; p < comm->world; p++) {
            CommLink* link = &comm->links[p];
            bool control = !comm->parent && (!both || comm_is_joined(comm, p));
            link->reported = p > comm->rank && ((control && link->control < 0) || (both && link->data < 0));
        }
        if (!comm_list_ranks(ranks, comm, "has", "have")) return true;
        for (size_t p = comm->rank + 1; p < comm->world; p++)
            if (comm->links[p].reported && comm_child_ended(r->launch, p))
                return fail_with(error, "rank %zu is gone: it ended before it connected to the others; see whether it "
                                 "was killed", p);
        double now = now_ms();
        if (now >= r->deadline)
            return fail_with(error, "%s not connected to rank %zu within %.1f s, in the rendezvous at %s; see whether "
                             "every rank was started, and what it printed%s%s", ranks, comm_rank(comm, comm->rank),
                             comm->timeout_ms / 1e3, r->name, r->rejected[0] ? ". Rejected: " : "", r->rejected);
        double next = now + (r->pending_count > 0 ? COMM_PENDING_MS : COMM_RETRY_MS);
        if (!comm_monitor(comm, fmin(r->deadline, next), error)) return false;
        comm_accept(comm, r);
        if (r->fatal) return fail_with(error, "%s", r->rejected);
    }
}

// Rank 0 waits for all others, and sends them the table.
static inline bool comm_send_table(Comm* comm, CommRendezvous* r, Error* error) {
    if (!comm_await_ranks(comm, r, false, error)) return false;
    size_t bytes = comm->world * sizeof *r->table;
    double deadline = now_ms() + COMM_GRACE_MS;  // a rank that has not received it by then is reported missing later
    comm_notify(comm, COMM_WELCOME, "");
    for (size_t p = 1; p < comm->world; p++)
        comm->links[p].muted |= !socket_move_all(comm->links[p].control, r->table, bytes, POLLOUT, deadline);
    return true;
}

// Receives rank 0's answer to a handshake. Heartbeats mean that it waits for other ranks.
static inline bool comm_receive_answer(int connection, CommMessage* answer, double silence_ms) {
    do if (!socket_move_all(connection, answer, sizeof *answer, POLLIN, now_ms() + silence_ms)) return false;
    while (answer->kind == COMM_HEARTBEAT);
    answer->text[sizeof answer->text - 1] = 0;
    return true;
}

// Any other rank connects to rank 0, and receives the table.
static inline bool comm_receive_table(Comm* comm, CommRendezvous* r, Error* error) {
    int* zero = &comm->links[0].control;
    double T = comm->timeout_ms;
    CommMessage answer;
    Error reason = {"", ERROR_OUTSIDE, false};
    for (;;) {
        // Rank 0 may have begun to wait only now, for its whole timeout; then it reports which rank is missing.
        bool good = comm_connect(comm, r, 0, COMM_CONTROL, r->launch->address, r->launch->port, &reason);
        if (good && comm_receive_answer(*zero, &answer, T + COMM_GRACE_MS)) break;
        if (good && errno == ETIMEDOUT)
            return fail_with(error, "rank 0 at %s has not answered rank %zu for %.1f s: it is stopped, or it is not "
                             "this program", r->name, comm->rank, T / 1e3);
        if (good) fail_with(&reason, "it closed the connection");
        socket_close(zero);
        if (now_ms() + COMM_RETRY_MS >= r->deadline)
            return fail_with(error, "rank %zu has not reached rank 0 at %s within %.1f s: %.200s; see whether rank 0 "
                             "was started, what it printed, and MASTER_ADDR and MASTER_PORT", comm->rank, r->name,
                             T / 1e3, reason.text);
        sleep_ms(COMM_RETRY_MS);
    }
    if (answer.kind == COMM_FAILED) return fail_with(error, "%s", answer.text);
    if (answer.kind != COMM_WELCOME)
        return fail_with(error, "what answers at %s is not rank 0 of this program; choose another MASTER_PORT",
                         r->name);
    if (!socket_move_all(*zero, r->table, comm->world * sizeof *r->table, POLLIN, now_ms() + T))
        return fail_with(error, "rank 0 at %s is gone: it closed the connection during the rendezvous; see what it "
                         "printed", r->name);
    // A loopback address in rank 0's table means rank 0's machine, which is reached at rank 0's own address.
    for (size_t p = 0; p < comm->world; p++)
        if (p == 0 || socket_is_loopback(r->table[p].address)) socket_peer_address(r->table[p].address, *zero);
    r->table[0].port = r->launch->port;
    return true;
}

// Connects to all lower ranks; the control connection to rank 0 is there already.
static inline bool comm_connect_lower(Comm* comm, CommRendezvous* r, Error* error) {
    Error reason = {"", ERROR_OUTSIDE, false};
    for (size_t i = 1; i < 2 * comm->rank; i++) {
        size_t p = i / 2, port = (size_t)r->table[p].port;
        const char* address = r->table[p].address;
        if (i % 2 == 0 && !comm_is_joined(comm, p)) continue;
        if (comm_connect(comm, r, p, i % 2 == 0 ? COMM_CONTROL : COMM_DATA, address, port, &reason)) continue;
        // A rank that has ended because of a failure is not to blame: one that knows more reports it in a moment.
        for (double until = now_ms() + COMM_GRACE_MS; now_ms() < until; comm_accept(comm, r))
            if (!comm_monitor(comm, until, error)) return false;
        return fail_with(error, "rank %zu cannot reach rank %zu at %.63s, port %zu: %.200s; see whether it still runs, "
                         "and whether the machines' firewalls let connections through", comm->rank, p, address, port,
                         reason.text);
    }
    return true;
}

// Raises the limit on open files, which a process may often do, if the connections to other ranks and the rest need it.
static inline bool comm_raise_file_limit(const Comm* comm, Error* error) {
    struct rlimit limit;
    rlim_t min = comm->connections + COMM_FILES_MIN, files = min + COMM_PENDING_MAX + COMM_FILES;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= files) return true;
    limit.rlim_cur = files < limit.rlim_max ? files : limit.rlim_max;
    return (limit.rlim_cur >= min && setrlimit(RLIMIT_NOFILE, &limit) == 0) ||
           fail_with(error, "rank %zu of %zu needs %llu open files and connections, but may have only %llu; raise the "
                     "limit (ulimit -n), or start fewer ranks", comm->rank, comm->world, (unsigned long long)min,
                     (unsigned long long)limit.rlim_max);
}

static inline bool comm_rendezvous(Comm* comm, const Launch* launch, Error* error) {
    bool leads = comm->rank == 0;
    CommRendezvous rendezvous = {.launch = launch, .port = leads ? launch->port : 0,
                                 .table = (CommAddress*)memory_allocate(comm->world * sizeof(CommAddress)),
                                 .deadline = now_ms() + comm->timeout_ms};
    CommRendezvous* r = &rendezvous;
    int on = 1;
    snprintf(r->name, sizeof r->name, "%s, port %zu", launch->address, launch->port);
    snprintf(comm->doing, sizeof comm->doing, "in the rendezvous");
    if (r->table == NULL) return fail_with(error, "not enough memory for the addresses of %zu ranks", comm->world);
    comm->listener = launch->listener;
    comm->connections = comm->world + (leads || comm->fan_out == 0 ? comm->world : comm->fan_out + 2);
    bool good = comm_raise_file_limit(comm, error) &&
                (comm->listener >= 0 || socket_listen(&comm->listener, &r->port, launch->address, error)) &&
                (leads ? comm_send_table(comm, r, error) : comm_receive_table(comm, r, error));
    r->deadline = now_ms() + comm->timeout_ms;
    good = good && comm_connect_lower(comm, r, error) && comm_await_ranks(comm, r, true, error);
    for (size_t p = 0; good && p < comm->world; p++) {
        CommLink* link = &comm->links[p];
        if (comm_is_joined(comm, p)) link->seen_ms = now_ms();
        // Small messages are sent at once: the collectives wait for each of them.
        setsockopt(link->data, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        setsockopt(link->control, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }
    if (!good) comm_notify(comm, COMM_FAILED, error->text);
    if (good && !leads && !comm_is_joined(comm, 0)) {
        CommMessage parted = comm_message(COMM_PARTED, comm->rank, "");
        comm_send(&comm->links[0], &parted);
        comm->links[0].seen_ms = 0;  // its end of the connection is not a failure
    }
    // Ranks that connect a little later are notified too, and do not blame rank 0 for being gone.
    double until = now_ms() + COMM_GRACE_MS;
    while (!good && leads && comm->listener >= 0 && now_ms() < until) {
        sleep_ms(COMM_PENDING_MS);
        comm_accept(comm, r);
        comm_notify(comm, COMM_FAILED, error->text);
    }
    for (size_t i = 0; i < r->pending_count; i++) close(r->pending[i]);
    socket_close(&comm->listener);
    free(r->table);
    return good;
}

#endif  // LLMTRAIN_CONTROL_H
