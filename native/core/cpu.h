// Which instruction sets this process can use, and the names users type for them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ktk/abi.h"

namespace ktk {

// Bits of every instruction set that the CPU has and the operating system supports. Asks Linux for
// the AMX tile registers once, so a process that uses ktk may use AMX. Computed once.
ktk_isa detected_isa();

// What variants may use: detected_isa(), changed by the environment variable KTK_ISA.
//
// KTK_ISA names one instruction set, as in native/isa/meson.build ("avx2", "avx512_vnni",
// "amx_int8", or "amx" for both AMX sets), and caps the choice to it and the sets below it. A name
// of an AMX set also switches that set on where CPUID does not show it: the emulation of the tests.
// Throws std::invalid_argument when the value is not known. Read at every call.
ktk_isa allowed_isa();

// What a value of KTK_ISA makes of `detected`: the rules of allowed_isa().
ktk_isa capped_isa(ktk_isa detected, std::string_view cap);

// "avx2", "avx512_vnni" ... of the bits in `isa`, in the order of abi.h.
std::vector<std::string> isa_names(ktk_isa isa);

// As it says of itself in CPUID or /proc/cpuinfo, for reports.
std::string cpu_model_name();

}  // namespace ktk
