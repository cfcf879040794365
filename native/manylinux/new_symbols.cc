// What headers of gcc 12 and glibc 2.36 call, and glibc 2.28 and the libstdc++ of gcc 8 lack. Every
// module gets these as symbols of its own, which nobody else sees.
#include <new>

extern "C" {

// Since glibc 2.32: whether the process has one thread, so that std::shared_ptr may count without
// atomic instructions. No is always right.
char __libc_single_threaded = 0;

// Since CXXABI_1.3.13: what copying and destroying a std::exception_ptr that is not null do. Both
// were functions of the library before, since CXXABI_1.3.3. Versions are named, because this module
// may have inline functions of these names, which call what is defined here.
void ktk_exception_copy(void** to, void* const* from);
void ktk_exception_destroy(void** pointer);
void ktk_exception_addref(void** pointer) asm("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void ktk_exception_release(void** pointer) asm(
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
asm(".symver ktk_exception_copy, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
asm(".symver ktk_exception_destroy, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");

// The copy is never destroyed, and so one more reference.
void ktk_exception_addref(void** pointer) {
  void* copy;
  ktk_exception_copy(&copy, pointer);
}

void ktk_exception_release(void** pointer) {
  ktk_exception_destroy(pointer);
  *pointer = nullptr;
}

// Since glibc 2.33. Before, fstat() was an inline function that called __fxstat64(), whose first
// argument is the version of struct stat: an architecture has one.
#if defined(__x86_64__)
constexpr int kStatVersion = 1;
asm(".symver ktk_fxstat64, __fxstat64@GLIBC_2.2.5");
#else
constexpr int kStatVersion = 0;
asm(".symver ktk_fxstat64, __fxstat64@GLIBC_2.17");
#endif
int ktk_fxstat64(int version, int file, void* found);
int ktk_fstat64(int file, void* found) asm("fstat64");
int ktk_fstat64(int file, void* found) { return ktk_fxstat64(kStatVersion, file, found); }

}  // extern "C"

// Since GLIBCXX_3.4.29.
namespace std {
[[noreturn]] void __throw_bad_array_new_length() asm("_ZSt28__throw_bad_array_new_lengthv");
void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }
}  // namespace std
