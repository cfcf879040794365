// Included before everything else (-include): binds functions to the version that they had before
// glibc 2.28, where today's glibc has a newer one that does the same. glibc 2.34 gave new versions
// to what it moved from libpthread and libdl into libc; libstdc++ 3.4.30 to what it moved into
// itself.
#pragma once

#define KTK_OLD(function, version) __asm__(".symver " #function ", " #function "@" version)

#if defined(__x86_64__)
#define KTK_GLIBC(function, version) KTK_OLD(function, "GLIBC_" version)
#else
// aarch64 began with 2.17.
#define KTK_GLIBC(function, version) KTK_OLD(function, "GLIBC_2.17")
#endif

KTK_GLIBC(dlclose, "2.2.5");
KTK_GLIBC(dlerror, "2.2.5");
KTK_GLIBC(dlinfo, "2.3.3");
KTK_GLIBC(dlopen, "2.2.5");
KTK_GLIBC(dlsym, "2.2.5");
KTK_GLIBC(pthread_mutex_trylock, "2.2.5");
KTK_GLIBC(pthread_once, "2.2.5");
KTK_GLIBC(pthread_setaffinity_np, "2.3.4");
KTK_GLIBC(pthread_setname_np, "2.12");
KTK_GLIBC(pthread_sigmask, "2.2.5");
// std::condition_variable::wait(std::unique_lock<std::mutex>&).
KTK_OLD(_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "GLIBCXX_3.4.11");

#undef KTK_GLIBC
#undef KTK_OLD
