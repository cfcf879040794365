// Lets one call fail: a library for LD_PRELOAD, built by a test.
//
// After fault_arm(kind, n), call n (from 0) of that kind fails as it does when memory, disk or
// threads run out; fault_calls() says how many there were. Counted is what ktk asks for: memory
// that its modules allocate or map, and files below the folder of fault_watch().
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

enum Kind { kNone, kNew, kMap, kOpen, kRead, kWrite, kSync, kRename, kThread };

std::atomic<int> armed{kNone};
std::atomic<long> calls{0}, failing{-1};
char watched[PATH_MAX];

// Whether this call is the one.
bool fails(Kind kind) { return calls.fetch_add(1) == failing && armed == kind; }

// Whether code of ktk asks, rather than Python, torch or the C++ library on their own behalf.
bool is_ktk(const void* caller) {
  Dl_info info;
  if (!dladdr(caller, &info) || !info.dli_fname) return false;
  const char* name = strrchr(info.dli_fname, '/');
  const char* folder = strstr(info.dli_fname, "_backends/");
  return folder || strncmp(name ? name + 1 : info.dli_fname, "_core.", 6) == 0;
}

bool is_watched(const char* path) {
  return watched[0] && strncmp(path, watched, strlen(watched)) == 0;
}

bool is_watched(int fd) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return false;
  path[length] = 0;
  return is_watched(path);
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

void* allocate(size_t size, size_t align, const void* caller) {
  if (armed == kNew && is_ktk(caller) && fails(kNew)) throw std::bad_alloc();
  void* found = nullptr;
  if (posix_memalign(&found, align < sizeof(void*) ? sizeof(void*) : align, size ? size : 1) != 0) {
    throw std::bad_alloc();
  }
  return found;
}

}  // namespace

#define CALLER __builtin_return_address(0)

void* operator new(size_t size) { return allocate(size, 16, CALLER); }
void* operator new[](size_t size) { return allocate(size, 16, CALLER); }
void* operator new(size_t size, std::align_val_t align) {
  return allocate(size, static_cast<size_t>(align), CALLER);
}
void* operator new[](size_t size, std::align_val_t align) {
  return allocate(size, static_cast<size_t>(align), CALLER);
}
void operator delete(void* p) noexcept { free(p); }
void operator delete[](void* p) noexcept { free(p); }
void operator delete(void* p, size_t) noexcept { free(p); }
void operator delete[](void* p, size_t) noexcept { free(p); }
void operator delete(void* p, std::align_val_t) noexcept { free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { free(p); }

extern "C" {

void fault_watch(const char* folder) { snprintf(watched, sizeof watched, "%s", folder); }
void fault_arm(int kind, long number) {
  armed = kNone;
  calls = 0;
  failing = number;
  armed = kind;
}
long fault_calls(void) {
  armed = kNone;
  return calls;
}

// As it is called by code whose files have offsets of 64 bits.
void* mmap64(void* at, size_t size, int protection, int flags, int fd, off64_t offset) {
  static const auto real = next<decltype(&mmap64)>("mmap64");
  if (armed == kMap && is_ktk(CALLER) && fails(kMap)) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return real(at, size, protection, flags, fd, offset);
}

int open64(const char* path, int flags, ...) {
  static const auto real = next<int (*)(const char*, int, int)>("open64");
  __builtin_va_list rest;
  __builtin_va_start(rest, flags);
  const int mode = __builtin_va_arg(rest, int);  // of no meaning where the caller gave none
  __builtin_va_end(rest);
  if (armed == kOpen && is_watched(path) && fails(kOpen)) {
    errno = EMFILE;
    return -1;
  }
  return real(path, flags, mode);
}

#define FILE_CALL(kind, error, result, name, parameters, ...) \
  result name parameters {                                    \
    static const auto real = next<decltype(&name)>(#name);    \
    if (armed == kind && is_watched(fd) && fails(kind)) {     \
      errno = error;                                          \
      return -1;                                              \
    }                                                         \
    return real(__VA_ARGS__);                                 \
  }
FILE_CALL(kRead, EIO, ssize_t, read, (int fd, void* to, size_t size), fd, to, size)
FILE_CALL(kRead, EIO, ssize_t, pread64, (int fd, void* to, size_t size, off64_t at), fd, to, size,
          at)
FILE_CALL(kRead, EIO, ssize_t, preadv64, (int fd, const struct iovec* to, int count, off64_t at),
          fd, to, count, at)
FILE_CALL(kRead, EIO, ssize_t, preadv64v2,
          (int fd, const struct iovec* to, int count, off64_t at, int flags), fd, to, count, at,
          flags)
FILE_CALL(kWrite, ENOSPC, ssize_t, write, (int fd, const void* from, size_t size), fd, from, size)
FILE_CALL(kWrite, ENOSPC, ssize_t, pwrite64, (int fd, const void* from, size_t size, off64_t at),
          fd, from, size, at)
FILE_CALL(kSync, EIO, int, fsync, (int fd), fd)

int posix_fallocate64(int fd, off64_t begin, off64_t size) {
  static const auto real = next<decltype(&posix_fallocate64)>("posix_fallocate64");
  if (armed == kWrite && is_watched(fd) && fails(kWrite)) return ENOSPC;
  return real(fd, begin, size);
}

int rename(const char* from, const char* to) {
  static const auto real = next<decltype(&rename)>("rename");
  if (armed == kRename && is_watched(to) && fails(kRename)) {
    errno = EIO;
    return -1;
  }
  return real(from, to);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                   void* argument) {
  static const auto real = next<decltype(&pthread_create)>("pthread_create");
  if (armed == kThread && fails(kThread)) return EAGAIN;
  return real(thread, attributes, body, argument);
}

}  // extern "C"
