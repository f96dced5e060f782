// launch.h: which rank this process is, of how many, and where rank 0 listens.
//
//   1. variables   of torchrun, mpirun (Open MPI, MPICH) or srun: launch_find
//   2. reports     why a rank fails: launch_report
//   3. forking     local ranks where there is no launcher: launch_fork, launch_reap
//
// In short, before any thread is started:
//
//   Launch launch;  Error error;
//   launch_find(&launch, &error)                        or launch_fork(&launch, 4, &error)
//   ... comm.h ...
//   if (failed) launch_report(&launch, "program", error.text);
//   exit_code = launch_reap(&launch, "program", exit_code, 10e3, &error);
//
// Forked ranks end with rank 0, however it ends; of all their reports the user sees one, in full.

#ifndef LLMTRAIN_LAUNCH_H
#define LLMTRAIN_LAUNCH_H

#include "sockets.h"

#define LAUNCH_UNKNOWN SIZE_MAX
#define LAUNCH_RANKS_MAX ((size_t)1 << 16)

// ------------------------------------------------------------------------------------------------
// 1. Variables
//
// Launchers set environment variables of their processes. Where several launchers have set theirs, the innermost
// counts: torchrun, then mpirun, then srun. Without any there is one rank.

typedef struct {
    size_t rank, world;
    size_t local_rank, local_world;  // among the ranks of this machine; LAUNCH_UNKNOWN: comm_open finds it
    const char* launcher;
    char address[256];               // where rank 0 listens
    size_t port;
    char run[64];                    // tells this run from others at the same address
    bool mpi;                        // comm_open uses MPI, not sockets
    int reports;                     // in ranks of launch_fork: the pipe for launch_report; otherwise -1

    // In rank 0 of launch_fork
    int listener;                    // the socket that listens already; otherwise -1
    pid_t* children;                 // (world - 1) otherwise NULL
    pthread_t printer;               // prints the first report
    void (*ended)(pid_t pid, int status);  // told how each rank has ended, by launch_reap; or NULL
} Launch;

typedef struct {
    const char *name, *rank, *world, *local_rank, *local_world;
} Launcher;

// A variable that is a whole number; LAUNCH_UNKNOWN if it is not set, or empty.
static inline bool launch_variable(size_t* value, const char* name, Error* error) {
    const char* text = getenv(name);
    *value = LAUNCH_UNKNOWN;
    if (text == NULL || text[0] == 0) return true;
    char* end;
    unsigned long number = strtoul(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != 0 || number > LAUNCH_RANKS_MAX)
        return fail_with(error, "the variable %s is '%.80s'; give a whole number from 0 to %zu, or unset it", name,
                         text, LAUNCH_RANKS_MAX);
    *value = number;
    return true;
}

// Reads one launcher's variables; *found says whether they are there.
static inline bool launch_read_variables(Launch* launch, bool* found, const Launcher* l, Error* error) {
    if (!launch_variable(&launch->rank, l->rank, error) || !launch_variable(&launch->world, l->world, error) ||
        !launch_variable(&launch->local_rank, l->local_rank, error) ||
        !launch_variable(&launch->local_world, l->local_world, error))
        return false;
    size_t rank = launch->rank, world = launch->world;
    size_t local_rank = launch->local_rank, local_world = launch->local_world;
    const char *set = rank == LAUNCH_UNKNOWN ? l->world : l->rank, *other = rank == LAUNCH_UNKNOWN ? l->rank : l->world;
    launch->launcher = l->name;
    *found = rank != LAUNCH_UNKNOWN || world != LAUNCH_UNKNOWN;
    if (!*found) return true;
    if (rank == LAUNCH_UNKNOWN || world == LAUNCH_UNKNOWN)
        return fail_with(error, "the variable %s is set and %s is not; %s sets both: start the ranks with it, or unset "
                         "%s", set, other, l->name, set);
    if (rank >= world)
        return fail_with(error, "the variables contradict each other: %s is %zu and %s is %zu; ranks count from 0 to "
                         "%s - 1", l->rank, rank, l->world, world, l->world);
    if (local_rank != LAUNCH_UNKNOWN && local_rank > rank)
        return fail_with(error, "the variables contradict each other: %s is %zu and %s is %zu; a local rank counts "
                         "only the ranks of one machine", l->local_rank, local_rank, l->rank, rank);
    if (local_world != LAUNCH_UNKNOWN &&
        (local_world > world || (local_rank != LAUNCH_UNKNOWN && local_rank >= local_world)))
        return fail_with(error, "the variables contradict each other: %s is %zu, of %zu ranks, and %s is %zu",
                         l->local_world, local_world, world, l->local_rank,
                         local_rank == LAUNCH_UNKNOWN ? 0 : local_rank);
    return true;
}

// The first host of a list as Slurm writes it: "node[07-09,12],gpu1" begins with node07.
static inline void launch_first_host(char* host, size_t size, const char* list) {
    size_t prefix = strcspn(list, "[,");
    const char* numbers = list + prefix + (list[prefix] == '[');
    size_t digits = strspn(numbers, "0123456789");
    snprintf(host, size, "%.*s%.*s", (int)prefix, list, (int)digits, numbers);
}

// The identifier of the run: LLMTRAIN_RUN_ID, or the launcher's job number.
static inline void launch_find_run(Launch* launch) {
    static const char* const names[] = {"TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"};
    const char *own = getenv("LLMTRAIN_RUN_ID"), *job = getenv("SLURM_JOB_ID"), *step = getenv("SLURM_STEP_ID");
    const char* again = getenv("TORCHELASTIC_RESTART_COUNT");
    snprintf(launch->run, sizeof launch->run, "%s", own ? own : "unnamed");
    if (!own && job) snprintf(launch->run, sizeof launch->run, "%.30s.%.30s", job, step ? step : "");
    for (size_t i = 0; !own && i < sizeof names / sizeof names[0]; i++) {
        bool restarts = i == 0 && again;
        if ((own = getenv(names[i])) == NULL) continue;
        snprintf(launch->run, sizeof launch->run, "%.50s%s%s", own, restarts ? "." : "", restarts ? again : "");
    }
}

// Where rank 0 listens: MASTER_ADDR and MASTER_PORT, or an address derived from the job.
static inline bool launch_find_address(Launch* launch, Error* error) {
    const char *address = getenv("MASTER_ADDR"), *port_text = getenv("MASTER_PORT"),
               *agent = getenv("TORCHELASTIC_USE_AGENT_STORE");
    const char* hosts = getenv("SLURM_STEP_NODELIST");
    bool has_address = address && address[0], has_port = port_text && port_text[0];
    bool slurm = strcmp(launch->launcher, "Slurm") == 0;
    if (has_address != has_port)
        return fail_with(error,
                         "the variable %s is set and %s is not; set both, the same on every rank: rank 0 listens there",
                         has_address ? "MASTER_ADDR" : "MASTER_PORT", has_address ? "MASTER_PORT" : "MASTER_ADDR");
    if (has_address) {
        if (!launch_variable(&launch->port, "MASTER_PORT", error)) return false;
        // Where torchrun's agent listens at MASTER_PORT itself, rank 0 takes the next port.
        if (agent && strcmp(agent, "True") == 0) launch->port++;
        if (launch->port == 0 || launch->port > 65535)
            return fail_with(error, "the variable MASTER_PORT is '%.80s'; give a port from 1 to 65535", port_text);
        if (strlen(address) >= sizeof launch->address)
            return fail_with(error, "the variable MASTER_ADDR is too long: '%.80s...'; give a host's name or address",
                             address);
        snprintf(launch->address, sizeof launch->address, "%s", address);
        return true;
    }
    bool one_machine = launch->local_world == launch->world;
    if (launch->mpi) return true;
    if (!one_machine && !(slurm && hosts))
        return fail_with(error, "%s has started %zu ranks, but set no address of rank 0; set MASTER_ADDR to the host "
                         "of rank 0 and MASTER_PORT to a free port there, the same on every rank", launch->launcher,
                         launch->world);
    snprintf(launch->address, sizeof launch->address, "127.0.0.1");
    if (!one_machine) launch_first_host(launch->address, sizeof launch->address, hosts);
    // A port derived from the run's identifier, in a range from which systems choose none by themselves.
    launch->port = 20000 + (size_t)(hash_bytes(launch->run, strlen(launch->run)) % 12000);
    return true;
}

static inline void launch_alone(Launch* launch) {
    const Launch alone = {.world = 1, .local_world = 1, .launcher = "none", .reports = -1, .listener = -1};
    *launch = alone;
}

static inline bool launch_find(Launch* launch, Error* error) {
    static const Launcher launchers[] = {
        {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
        {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
         "OMPI_COMM_WORLD_LOCAL_SIZE"},
        {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
        {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_HERE"},
    };
    launch_alone(launch);
    size_t taken = LAUNCH_UNKNOWN;
    for (size_t i = 0; i < sizeof launchers / sizeof launchers[0]; i++) {
        Launch other;
        bool found = false;
        launch_alone(&other);
        // A batch script has the variables of Slurm's task 0 too, but is not a step.
        if (i == 3 && getenv("SLURM_STEP_ID") == NULL) continue;
        if (!launch_read_variables(&other, &found, &launchers[i], error)) return false;
        if (found && taken == LAUNCH_UNKNOWN) {
            *launch = other;
            taken = i;
        } else if (found && taken == 0 && i < 3 && other.world > 1 && getenv("TORCHELASTIC_RUN_ID") == NULL &&
                   (other.rank != launch->rank || other.world != launch->world)) {
            return fail_with(error, "the variables contradict each other: %s says rank %zu of %zu, %s says rank %zu of "
                             "%zu; unset those of one", launchers[0].rank, launch->rank, launch->world,
                             launchers[i].rank, other.rank, other.world);
        }
    }
#ifdef LLMTRAIN_MPI
    launch->mpi = taken == 1 || taken == 2;
#endif
    if (taken == 3) {  // the number of tasks on this node is known only where there is one node
        const char* nodes = getenv("SLURM_STEP_NUM_NODES");
        if (nodes && strcmp(nodes, "1") == 0) launch->local_world = launch->world;
    }
    launch_find_run(launch);
    return launch->world == 1 || launch_find_address(launch, error);
}

// ------------------------------------------------------------------------------------------------
// 2. Reports
//
// Under a launcher each rank prints its own line. Forked ranks, which share one console and often fail for the same
// reason, write theirs into a pipe; rank 0 prints the first line as soon as it arrives, and discards the rest.

// Tells the user why this rank fails: "program: rank 3: sentence"; without the rank if there is only one, or if the
// sentence begins with a rank, as those of comm_agree_all do.
static inline void launch_report(const Launch* launch, const char* program, const char* sentence) {
    char line[PIPE_BUF], prefix[32] = "";  // up to PIPE_BUF bytes are written at once, or not at all
    int named = 0;
    sscanf(sentence, "rank %*u:%n", &named);
    if (launch->world > 1 && named == 0) snprintf(prefix, sizeof prefix, "rank %zu: ", launch->rank);
    size_t length = (size_t)snprintf(line, sizeof line, "%s: %s%.2000s\n", program, prefix, sentence);
    for (size_t i = 0; i + 1 < length; i++)
        if (line[i] == '\n') line[i] = ' ';
    if (launch->reports < 0) fputs(line, stderr);
    else if (write(launch->reports, line, length) < 0) return;  // the pipe is full of earlier reports
}

// A thread of rank 0: prints the first line of the pipe, and reads until every rank has closed its end.
static inline void* launch_print_first(void* context) {
    char lines[PIPE_BUF + 1];
    int pipe_end = (int)(intptr_t)context;
    bool printed = false;
    for (ssize_t n; (n = read(pipe_end, lines, PIPE_BUF)) > 0; printed = true) {
        lines[n] = 0;
        lines[strcspn(lines, "\n")] = 0;
        if (!printed) fprintf(stderr, "%s\n", lines);
    }
    close(pipe_end);
    return NULL;
}

// Starts it, with all signals blocked.
static inline bool launch_start_printer(Launch* launch, int pipe_end) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = pthread_create(&launch->printer, NULL, launch_print_first, (void*)(intptr_t)pipe_end);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = status;
    return status == 0;
}

// ------------------------------------------------------------------------------------------------
// 3. Forking

// In the child.
static inline void launch_become_rank(Launch* launch, size_t rank, pid_t parent) {
    if (!process_end_with_parent(parent, SIGKILL)) _exit(1);
    socket_close(&launch->listener);
    free(launch->children);
    launch->children = NULL;
    launch->rank = rank;
}

// Forks local ranks if there is no launcher. To be called before any thread starts, OpenMP's too; the caller is rank 0.
static inline bool launch_fork(Launch* launch, size_t ranks, Error* error) {
    if (!launch_find(launch, error)) return false;
    if (launch->world > 1)
        return fail_with(error, "%s has started %zu ranks already; do not ask for %zu local ranks too",
                         launch->launcher, launch->world, ranks);
    if (ranks == 0 || ranks > LAUNCH_RANKS_MAX)
        return fail_with(error, "%zu ranks were asked for; give 1 to %zu", ranks, LAUNCH_RANKS_MAX);
    launch_alone(launch);
    if (ranks == 1) return true;
    int ends[2] = {-1, -1};
    size_t forked = 0;
    pid_t parent = getpid();
    launch->local_world = launch->world = ranks;
    launch->launcher = "forked";
    snprintf(launch->address, sizeof launch->address, "127.0.0.1");
    snprintf(launch->run, sizeof launch->run, "forked %ld %.0f", (long)parent, now_ms());
    launch->children = (pid_t*)memory_allocate((ranks - 1) * sizeof(pid_t));
    bool good = (launch->children != NULL && pipe_open(ends) && fcntl(ends[0], F_SETFL, 0) == 0) ||
                fail_with(error, "not enough memory or open files for %zu ranks; raise the limits (ulimit -n)", ranks);
    if (good && !socket_listen(&launch->listener, &launch->port, launch->address, error)) {
        snprintf(launch->address, sizeof launch->address, "::1");  // a machine may have IPv6 alone
        good = socket_listen(&launch->listener, &launch->port, launch->address, error);
    }
    fflush(NULL);  // or every rank would print what is still buffered
    while (good && launch->rank == 0 && forked < ranks - 1) {
        pid_t child = fork();
        if (child == 0) launch_become_rank(launch, forked + 1, parent);
        else if (child > 0) launch->children[forked++] = child;
        else
            good = fail_with(error, "cannot start rank %zu of %zu: %s; ask for fewer ranks or raise the limits (ulimit "
                             "-u)", forked + 1, ranks, strerror(errno));
    }
    launch->local_rank = launch->rank;
    launch->reports = ends[1];
    if (launch->rank > 0) {
        close(ends[0]);
        return true;
    }
    good = good && (launch_start_printer(launch, ends[0]) ||
        fail_with(error, "rank 0 cannot start a thread: %s; raise the limits (ulimit -u)", strerror(errno)));
    if (good) return true;
    for (size_t i = 0; i < forked; i++) {
        kill(launch->children[i], SIGKILL);
        waitpid(launch->children[i], NULL, 0);
    }
    free(launch->children);
    launch->children = NULL;
    socket_close(&launch->listener);
    socket_close(&launch->reports);
    socket_close(&ends[0]);
    return false;
}

// For rank 0 of launch_fork, called last: waits for the others to end, and kills those that have not after grace_ms.
// Returns the code to exit with: its own if that is not 0, or the first that is not 0 of another rank (128 + the
// signal, if one killed it). If another rank failed, error says which, otherwise it is empty; that is reported too, in
// case no rank has reported anything, and printed if rank 0 failed because a signal killed that one.
static inline int launch_reap(Launch* launch, const char* program, int exit_code, double grace_ms, Error* error) {
    bool reported = exit_code != 0;
    error->text[0] = 0;
    if (launch->children == NULL) return exit_code;
    double deadline = now_ms() + grace_ms;
    for (size_t rank = 1; rank < launch->world; rank++) {
        int status = 0;
        bool late = false;
        while (waitpid(launch->children[rank - 1], &status, late ? 0 : WNOHANG) == 0) {
            late = now_ms() > deadline;
            if (late) kill(launch->children[rank - 1], SIGKILL);
            else sleep_ms(5);
        }
        if (launch->ended) launch->ended(launch->children[rank - 1], status);
        int code = status_code(status);
        if (code == 0 || error->text[0] != 0) continue;
        if (late) fail_with(error, "rank %zu did not end within %.1f s of rank 0 and was killed", rank, grace_ms / 1e3);
        else fail_with(error, "rank %zu %s%s", rank, status_text(status),
                       WIFSIGNALED(status) ? "" : " and without a message");
        if (reported && !late && WIFSIGNALED(status)) fprintf(stderr, "%s: %s\n", program, error->text);
        if (exit_code == 0) exit_code = code;
    }
    if (error->text[0] && !reported) launch_report(launch, program, error->text);
    socket_close(&launch->reports);
    pthread_join(launch->printer, NULL);  // the others have closed the pipe by ending
    free(launch->children);
    launch->children = NULL;
    return exit_code;
}

#endif  // LLMTRAIN_LAUNCH_H
