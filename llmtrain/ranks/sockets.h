// sockets.h: TCP connections with deadlines.
//
//   1. listening    socket_listen
//   2. waiting      socket_poll; sending and receiving: socket_move_all
//   3. connecting   socket_connect
//
// Every socket is non-blocking, and all waiting is done in socket_poll, until a deadline, which is a time of now_ms().
// Data lost with a broken connection is not sent again.
//
//   size_t port = 0;  int listener, connection;  Error error;
//   socket_listen(&listener, &port, "127.0.0.1", &error)                     port 0: one that the system chooses
//   connection = socket_connect("127.0.0.1", port, now_ms() + 5e3, &error)   -1 after a failure
//   socket_move_all(connection, data, bytes, POLLOUT, now_ms() + 5e3)
//   socket_close(&connection);

#ifndef LLMTRAIN_SOCKETS_H
#define LLMTRAIN_SOCKETS_H

#include "../base/system.h"

#include <netdb.h>
#include <netinet/in.h>

#define SOCKET_CONNECT_MS 5000.0  // for an address to answer

// ------------------------------------------------------------------------------------------------
// 1. Listening

static inline bool socket_is_loopback(const char* address) {
    return strcmp(address, "localhost") == 0 || strcmp(address, "::1") == 0 || strncmp(address, "127.", 4) == 0;
}

static inline void socket_close(int* file) {
    if (*file >= 0) close(*file);
    *file = -1;
}

static inline bool socket_bind(int* listener, const struct addrinfo* at) {
    int on = 1, off = 0;
    *listener = descriptor_prepare(socket(at->ai_family, SOCK_STREAM, 0));
    if (*listener < 0) return false;
    setsockopt(*listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);  // not kept busy by connections that have ended
    if (at->ai_family == AF_INET6) setsockopt(*listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (bind(*listener, at->ai_addr, at->ai_addrlen) == 0 && listen(*listener, SOMAXCONN) == 0) return true;
    int reason = errno;
    socket_close(listener);
    errno = reason;
    return false;
}

// Resolves an address and a port; NULL with the reason after a failure. The caller frees the list with freeaddrinfo.
static inline struct addrinfo* socket_resolve(const char* address, size_t port, int flags, Error* reason) {
    char service[16];
    struct addrinfo hints = {.ai_flags = flags | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM}, *list = NULL;
    snprintf(service, sizeof service, "%zu", port);
    int status = getaddrinfo(address, service, &hints, &list);
    if (status == 0) return list;
    fail_with(reason, "%s", gai_strerror(status));
    return NULL;
}

// Listens at *port, or at a port that the system chooses if that is 0. With a loopback address only this machine can
// connect; with any other it listens at all addresses, since a host name can have several.
static inline bool socket_listen(int* listener, size_t* port, const char* address, Error* error) {
    struct sockaddr_storage name;
    socklen_t length = sizeof name;
    int reason = EADDRNOTAVAIL;
    *listener = -1;
    struct addrinfo* list = socket_resolve(socket_is_loopback(address) ? address : NULL, *port, AI_PASSIVE, error);
    // IPv6 first, since it can accept IPv4 too.
    for (int family = 0; family < 2; family++)
        for (const struct addrinfo* at = list; at && *listener < 0; at = at->ai_next)
            if ((at->ai_family == AF_INET6) == (family == 0) && !socket_bind(listener, at)) reason = errno;
    if (list) freeaddrinfo(list);
    if (*listener >= 0 && getsockname(*listener, (struct sockaddr*)&name, &length) == 0) {
        *port = ntohs(name.ss_family == AF_INET6 ? ((struct sockaddr_in6*)&name)->sin6_port
                                                 : ((struct sockaddr_in*)&name)->sin_port);
        return true;
    }
    socket_close(listener);
    if (reason == EADDRINUSE)
        return fail_with(error, "cannot listen at %s, port %zu: the port is in use, perhaps by another run; end that "
                         "run, or choose another MASTER_PORT", address, *port);
    bool down = socket_is_loopback(address) && (reason == EADDRNOTAVAIL || reason == EAFNOSUPPORT);
    return fail_with(error, "cannot listen at %s, port %zu: %s; %s", address, *port, strerror(reason),
                     down ? "see whether the loopback device is up (ip address)" :
                     *port ? "choose another MASTER_PORT" : "check the network and the limits (ulimit -n)");
}

// ------------------------------------------------------------------------------------------------
// 2. Waiting

// Waits for one of the events, at most until the deadline, and at most a second, so that callers check their clocks.
static inline void socket_poll(struct pollfd* polls, size_t count, double deadline) {
    poll_ms(polls, count, fmin(fmax(deadline - now_ms(), 0), 1e3));
}

// Sets what socket_poll waits for; file -1: nothing.
static inline void socket_watch(struct pollfd* p, int file, int events) {
    p->fd = file;
    p->events = (short)events;
    p->revents = 0;
}

// Waits for the event until the deadline; returns whether it has occurred.
static inline bool socket_await(int file, int event, double deadline) {
    struct pollfd p;
    socket_watch(&p, file, event);
    do socket_poll(&p, 1, deadline);
    while (p.revents == 0 && now_ms() < deadline);
    return p.revents != 0;
}

// Sends a byte, to wake the process that waits for it at the other end.
static inline void socket_wake(int file) {
    if (send(file, "", 1, SOCKET_QUIET) < 0) return;
}

// After send or recv has failed: whether it may succeed later.
static inline bool socket_would_block(void) { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

// Sends all bytes (POLLOUT) or receives them (POLLIN). False with errno after a failure: ETIMEDOUT at the deadline,
// ECONNRESET also if the other end has closed.
static inline bool socket_move_all(int file, void* data, size_t bytes, int event, double deadline) {
    for (size_t done = 0; done < bytes;) {
        char* at = (char*)data + done;
        ssize_t n = event == POLLOUT ? send(file, at, bytes - done, SOCKET_QUIET) : recv(file, at, bytes - done, 0);
        if (n == 0) errno = ECONNRESET;
        if (n == 0 || (n < 0 && !socket_would_block())) return false;
        if (n > 0) done += (size_t)n;
        else if (!socket_await(file, event, deadline)) return errno = ETIMEDOUT, false;
    }
    return true;
}

// ------------------------------------------------------------------------------------------------
// 3. Connecting

// The address of the other end, in numeric form.
static inline void socket_peer_address(char text[64], int connection) {
    struct sockaddr_storage name;
    socklen_t length = sizeof name;
    snprintf(text, 64, "?");
    if (getpeername(connection, (struct sockaddr*)&name, &length) != 0 ||
        getnameinfo((struct sockaddr*)&name, length, text, 64, NULL, 0, NI_NUMERICHOST) != 0) return;
    if (strncmp(text, "::ffff:", 7) == 0 && strchr(text, '.'))
        memmove(text, text + 7, strlen(text + 7) + 1);  // IPv4 in IPv6
}

// A connection to a free port of this machine can be assigned that same port, and is then connected to itself.
static inline bool socket_is_own_peer(int connection) {
    struct sockaddr_storage here, there;
    socklen_t here_length = sizeof here, there_length = sizeof there;
    return getsockname(connection, (struct sockaddr*)&here, &here_length) == 0 &&
           getpeername(connection, (struct sockaddr*)&there, &there_length) == 0 && here_length == there_length &&
           memcmp(&here, &there, here_length) == 0;
}

// Connects to the first address that answers of those that `address` resolves to; -1 with the reason after a failure.
static inline int socket_connect(const char* address, size_t port, double deadline, Error* reason) {
    int connection = -1;
    struct addrinfo* list = socket_resolve(address, port, 0, reason);
    for (const struct addrinfo* at = list; at && connection < 0; at = at->ai_next) {
        int status = 0;
        socklen_t length = sizeof status;
        double until = fmin(deadline, now_ms() + SOCKET_CONNECT_MS);
        connection = descriptor_prepare(socket(at->ai_family, SOCK_STREAM, 0));
        if (connection < 0 || connect(connection, at->ai_addr, at->ai_addrlen) != 0) status = errno;
        if (status == EINPROGRESS && !socket_await(connection, POLLOUT, until)) status = ETIMEDOUT;
        if (status == EINPROGRESS) getsockopt(connection, SOL_SOCKET, SO_ERROR, &status, &length);
        if (status == 0 && socket_is_own_peer(connection)) status = ECONNREFUSED;
        if (status == 0) break;
        fail_with(reason, "%s", strerror(status));
        socket_close(&connection);
    }
    if (list) freeaddrinfo(list);
    return connection;
}

#endif  // LLMTRAIN_SOCKETS_H
