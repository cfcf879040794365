// What keeps gcc 12 from undoing a register tile, none of which is an instruction; and loops over
// constants.
#pragma once

#include <stddef.h>

namespace ktk {
namespace {

// The same pointer, but the compiler does not know: it would compute the address of every row
// ahead of a loop, run out of registers, and spill them.
template <class T>
inline T* hidden(T* pointer) {
  asm("" : "+r"(pointer));
  return pointer;
}

#if defined(__AVX512F__)
#define KTK_REGISTER "+v"
#elif defined(__aarch64__)
#define KTK_REGISTER "+w"
#else
#define KTK_REGISTER "+x"
#endif

// Keeps a sum in a register apart from its neighbors: the compiler would merge and split them again
// between loops, or load a weight once for every row.
template <class Register>
inline void pin(Register& x) {
  asm("" : KTK_REGISTER(x));
}
#undef KTK_REGISTER

// No load moves across: loads that wander to the front of a loop push sums out of registers.
inline void keep_order() { asm volatile("" : : : "memory"); }

// Calls body.operator()<0>() to body.operator()<kCount - 1>(): a loop whose index is a constant,
// for shifts, lanes and offsets that instructions have in them.
template <size_t kCount, size_t kIndex = 0, class Body>
[[gnu::always_inline]] inline void unroll(const Body& body) {
  if constexpr (kIndex < kCount) {
    body.template operator()<kIndex>();
    unroll<kCount, kIndex + 1>(body);
  }
}

}  // namespace
}  // namespace ktk
