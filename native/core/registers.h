// Registers that a function has to leave as its caller had them, to hold a backend's functions to
// the calling convention: System V for x86-64, AAPCS64 for aarch64. Compilers keep to it; assembly
// inside C++ need not, and wrong flags leave vector registers as callers do not want them.
#pragma once

#include <string>

namespace ktk {

// Calls `function` with `argument` and returns the names of what it left changed, divided by
// commas, or nothing:
//   - x86-64: rbx, rbp, r12 to r15, rsp, the control bits of mxcsr, the x87 control word, and the
//     direction flag, which has to be clear,
//   - aarch64: x19 to x29, sp, the lower halves of v8 to v15 (d8 to d15), and fpcr.
// "upper halves of vectors" are there where a function for AVX ended without vzeroupper: code for
// SSE that follows is slow then. The CPU says so (XGETBV with ECX = 1, the XINUSE bitmap; all that
// have AVX-512 do), of registers that are not zero. With `tiles`, "tiles" are AMX tiles or their
// configuration that were not released.
//
// All is as before afterwards. Exceptions go through. One call at a time; others wait.
std::string changed_registers(void (*function)(void*), void* argument, bool tiles);

}  // namespace ktk
