/* Loaded before the C library (LD_PRELOAD): makes chosen calls on files under a prefix fail with a chosen errno, as a real disk would.

   The orders are in a file, ARROWBANK_REFUSALS, that all processes of a run map: so workers obey and count together. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, READ = 4, SYNC = 8, RENAME = 16, LINK = 32, UNLINK = 64, MKDIR = 128, FLOCK = 256, CREATE = 512 };

struct orders {
    int calls;         /* which of the above */
    int error;         /* the errno; 0: say that it is done, and do nothing */
    long nth;          /* the call that is the first to fail; counted down */
    int once;          /* only that one */
    int hits;          /* how many have failed */
    char under[4096];  /* the prefix of the files' real paths */
};

static struct orders *orders;

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("ARROWBANK_REFUSALS");
    int (*real_open)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int (*real_close)(int) = dlsym(RTLD_NEXT, "close");
    int fd = name ? real_open(name, O_RDWR) : -1;
    if (fd < 0) return;
    void *found = mmap(NULL, sizeof(struct orders), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    real_close(fd);
    if (found != MAP_FAILED) orders = found;
}

/* 1: fail, errno is set. 2: do nothing and say that it is done. 0: go on. */
static int refused_path(int call, const char *path) {
    char real[PATH_MAX], folder[PATH_MAX];
    if (!orders || !(orders->calls & call) || !path) return 0;
    int before = errno;
    if (path[0] == '/') snprintf(real, sizeof real, "%s", path);
    else if (!getcwd(folder, sizeof folder)) return 0;
    else snprintf(real, sizeof real, "%s/%s", folder, path);
    errno = before;
    if (strncmp(real, orders->under, strlen(orders->under))) return 0;
    long left = __sync_sub_and_fetch(&orders->nth, 1);
    if (left > 0 || (left < 0 && orders->once)) return 0;
    __sync_add_and_fetch(&orders->hits, 1);
    if (!orders->error) return 2;
    errno = orders->error;
    return 1;
}

static int refused_fd(int call, int fd) {
    char link[64], path[PATH_MAX];
    if (!orders || !(orders->calls & call)) return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    errno = before;
    if (size <= 0) return 0;
    path[size] = 0;
    return refused_path(call, path);
}

static int refused_at(int call, int folder, const char *path) {
    char link[64], base[PATH_MAX], whole[2 * PATH_MAX];
    if (!orders || !(orders->calls & call) || !path) return 0;
    if (path[0] == '/' || folder == AT_FDCWD) return refused_path(call, path);
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t size = readlink(link, base, sizeof base - 1);
    if (size <= 0) return 0;
    base[size] = 0;
    snprintf(whole, sizeof whole, "%s/%s", base, path);
    return refused_path(call, whole);
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name)
#define ANSWER(verdict, done) switch (verdict) { case 1: return -1; case 2: return done; }

#define DEFINE_OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...); \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        ANSWER(refused_path(flags & O_CREAT ? OPEN | CREATE : OPEN, path), -1) \
        return real(path, flags, mode); \
    }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

#define DEFINE_OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(int, name, int, const char *, int, ...); \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        ANSWER(refused_at(flags & O_CREAT ? OPEN | CREATE : OPEN, folder, path), -1) \
        return real(folder, path, flags, mode); \
    }
DEFINE_OPENAT(openat)
DEFINE_OPENAT(openat64)

FILE *fopen64(const char *path, const char *mode) {
    static FILE *(*real)(const char *, const char *);
    if (!real) real = dlsym(RTLD_NEXT, "fopen64");
    return refused_path(mode[0] == 'r' ? OPEN : OPEN | CREATE, path) ? NULL : real(path, mode);
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    ANSWER(refused_fd(WRITE, fd), (ssize_t)size)
    return real(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    ANSWER(refused_fd(WRITE, fd), -1)
    return real(fd, parts, count);
}
ssize_t read(int fd, void *data, size_t size) {
    REAL(ssize_t, read, int, void *, size_t);
    ANSWER(refused_fd(READ, fd), 0)
    return real(fd, data, size);
}
#define DEFINE_PWRITE(name, offset_type) \
    ssize_t name(int fd, const void *data, size_t size, offset_type at) { \
        REAL(ssize_t, name, int, const void *, size_t, offset_type); \
        ANSWER(refused_fd(WRITE, fd), (ssize_t)size) \
        return real(fd, data, size, at); \
    }
DEFINE_PWRITE(pwrite, off_t)
DEFINE_PWRITE(pwrite64, off64_t)
#define DEFINE_PREAD(name, offset_type) \
    ssize_t name(int fd, void *data, size_t size, offset_type at) { \
        REAL(ssize_t, name, int, void *, size_t, offset_type); \
        ANSWER(refused_fd(READ, fd), 0) \
        return real(fd, data, size, at); \
    }
DEFINE_PREAD(pread, off_t)
DEFINE_PREAD(pread64, off64_t)
#define DEFINE_TRUNCATE(name, offset_type) \
    int name(int fd, offset_type size) { \
        REAL(int, name, int, offset_type); \
        ANSWER(refused_fd(WRITE, fd), 0) \
        return real(fd, size); \
    }
DEFINE_TRUNCATE(ftruncate, off_t)
DEFINE_TRUNCATE(ftruncate64, off64_t)
#define DEFINE_SENDFILE(name, offset_type) \
    ssize_t name(int to, int from, offset_type *at, size_t size) { \
        REAL(ssize_t, name, int, int, offset_type *, size_t); \
        ANSWER(refused_fd(WRITE, to), -1) \
        return real(to, from, at, size); \
    }
DEFINE_SENDFILE(sendfile, off_t)
DEFINE_SENDFILE(sendfile64, off64_t)

#define DEFINE_FD(name, call) int name(int fd) { REAL(int, name, int); ANSWER(refused_fd(call, fd), 0) return real(fd); }
DEFINE_FD(fsync, SYNC)
DEFINE_FD(fdatasync, SYNC)

int flock(int fd, int how) {
    REAL(int, flock, int, int);
    ANSWER(refused_fd(FLOCK, fd), 0)
    return real(fd, how);
}
int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    ANSWER(refused_path(RENAME, to), 0)
    return real(from, to);
}
int renameat(int f, const char *from, int t, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *);
    ANSWER(refused_at(RENAME, t, to), 0)
    return real(f, from, t, to);
}
int link(const char *from, const char *to) {
    REAL(int, link, const char *, const char *);
    ANSWER(refused_path(LINK, to), 0)
    return real(from, to);
}
int linkat(int f, const char *from, int t, const char *to, int flags) {
    REAL(int, linkat, int, const char *, int, const char *, int);
    ANSWER(refused_at(LINK, t, to), 0)
    return real(f, from, t, to, flags);
}
int unlink(const char *path) {
    REAL(int, unlink, const char *);
    ANSWER(refused_path(UNLINK, path), 0)
    return real(path);
}
int unlinkat(int folder, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    ANSWER(refused_at(UNLINK, folder, path), 0)
    return real(folder, path, flags);
}
int rmdir(const char *path) {
    REAL(int, rmdir, const char *);
    ANSWER(refused_path(UNLINK, path), 0)
    return real(path);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    ANSWER(refused_path(MKDIR, path), 0)
    return real(path, mode);
}
