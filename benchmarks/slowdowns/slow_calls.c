/* LD_PRELOAD: file and socket calls that take longer, as on a slow disk or network.
 *
 * SLOW_BELOW    only files whose path begins so
 * SLOW_NAME     and, if set, has this in it
 * SLOW_RANK     and, if set, only in the processes of this rank
 * SLOW_OPEN_US, SLOW_READ_US, SLOW_WRITE_US, SLOW_FSYNC_US     microseconds that each call takes longer
 * SLOW_MB_US    microseconds that each MB takes, read or written
 * SLOW_SOCKET_US, SLOW_SOCKET_MB_US    the same for what is sent through TCP sockets, below no path
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static long number(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

static int here(void) {
    const char *wanted = getenv("SLOW_RANK"), *own = getenv("RANK");
    return !wanted || (own && !strcmp(wanted, own));
}

static void nap(long us) {
    if (us <= 0) return;
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    nanosleep(&time, NULL);
}

static int slow_path(const char *path) {
    const char *below = getenv("SLOW_BELOW"), *name = getenv("SLOW_NAME");
    return below && path && here() && !strncmp(path, below, strlen(below)) && (!name || strstr(path, name));
}

static int slow_file(int file) {
    char link[64], path[4096];
    if (!getenv("SLOW_BELOW")) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return slow_path(path);
}

static void moved(int file, ssize_t bytes, const char *each) {
    if (bytes > 0 && slow_file(file)) nap(number(each) + bytes * number("SLOW_MB_US") / 1000000);
}

static void sent(int file, ssize_t bytes) {
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    if (bytes <= 0 || (!getenv("SLOW_SOCKET_US") && !getenv("SLOW_SOCKET_MB_US")) || !here()) return;
    if (getsockname(file, (struct sockaddr *)&address, &length)) return;
    if (address.ss_family != AF_INET && address.ss_family != AF_INET6) return;
    nap(number("SLOW_SOCKET_US") + bytes * number("SLOW_SOCKET_MB_US") / 1000000);
}

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = va_arg(more, mode_t); \
        va_end(more); \
        if (slow_path(path)) nap(number("SLOW_OPEN_US")); \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define READ(name, each, parameters, arguments, ...) \
    ssize_t name parameters { \
        REAL(ssize_t, name, __VA_ARGS__); \
        ssize_t bytes = real arguments; \
        moved(file, bytes, each); \
        return bytes; \
    }
READ(read, "SLOW_READ_US", (int file, void *to, size_t count), (file, to, count), int, void *, size_t)
READ(pread, "SLOW_READ_US", (int file, void *to, size_t count, off_t at), (file, to, count, at),
     int, void *, size_t, off_t)
READ(pread64, "SLOW_READ_US", (int file, void *to, size_t count, off64_t at), (file, to, count, at),
     int, void *, size_t, off64_t)
READ(preadv, "SLOW_READ_US", (int file, const struct iovec *to, int count, off_t at), (file, to, count, at),
     int, const struct iovec *, int, off_t)
READ(preadv64, "SLOW_READ_US", (int file, const struct iovec *to, int count, off64_t at),
     (file, to, count, at), int, const struct iovec *, int, off64_t)

READ(preadv2, "SLOW_READ_US", (int file, const struct iovec *to, int count, off_t at, int flags),
     (file, to, count, at, flags), int, const struct iovec *, int, off_t, int)
READ(preadv64v2, "SLOW_READ_US", (int file, const struct iovec *to, int count, off64_t at, int flags),
     (file, to, count, at, flags), int, const struct iovec *, int, off64_t, int)

#define WRITE(name, parameters, arguments, ...) \
    ssize_t name parameters { \
        REAL(ssize_t, name, __VA_ARGS__); \
        ssize_t bytes = real arguments; \
        moved(file, bytes, "SLOW_WRITE_US"); \
        sent(file, bytes); \
        return bytes; \
    }
WRITE(write, (int file, const void *from, size_t count), (file, from, count), int, const void *, size_t)
WRITE(writev, (int file, const struct iovec *from, int count), (file, from, count),
      int, const struct iovec *, int)
WRITE(send, (int file, const void *from, size_t count, int flags), (file, from, count, flags),
      int, const void *, size_t, int)
WRITE(sendmsg, (int file, const struct msghdr *from, int flags), (file, from, flags),
      int, const struct msghdr *, int)

#define SYNC(name) \
    int name(int file) { \
        REAL(int, name, int); \
        int result = real(file); \
        if (slow_file(file)) nap(number("SLOW_FSYNC_US")); \
        return result; \
    }
SYNC(fsync)
SYNC(fdatasync)
