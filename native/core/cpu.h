// Which instruction sets this process can use, and the names users type for them.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "ktk/isa.h"

namespace ktk {

// Bits by the names of isa.h: isa_bit::avx512_vnni.
namespace isa_bit {
#define KTK_ISA_BIT_(bit, name, ...) inline constexpr ktk_isa name = KTK_ISA_##bit;
KTK_ISA_X86(KTK_ISA_BIT_)
KTK_ISA_ARM(KTK_ISA_BIT_)
#undef KTK_ISA_BIT_
}  // namespace isa_bit

// Bits of every instruction set that the CPU has and the operating system supports. Asks Linux for
// the AMX tile registers once, so a process that uses ktk may use AMX. Computed once.
ktk_isa detected_isa();

// An environment variable has a value that means nothing; the message names both.
class SettingError : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// What variants may use: detected_isa() and what KTK_ISA_FORCE adds, capped by KTK_ISA. Throws
// SettingError. The environment is read at every call.
ktk_isa allowed_isa();

// KTK_ISA names one instruction set, as isa.h does ("avx2", "avx512_vnni",
// "amx_int8", or "amx" for both AMX sets), and leaves of `present` that set and those below it.
ktk_isa capped_isa(ktk_isa present, std::string_view cap);

// KTK_ISA_FORCE names sets, with commas between them, that count as present although CPUID does not
// show them: AMX that is emulated, or what a hypervisor hides. Where one of them is not there, its
// first instruction ends the process.
ktk_isa forced_isa(std::string_view names);

// The sets that KTK_ISA and KTK_ISA_FORCE name themselves, whether they are present or not.
ktk_isa named_isa();

// "avx2", "avx512_vnni" ... of the bits in `isa`, in the order of abi.h; "bit 40" of an unknown
// one.
std::vector<std::string> isa_names(ktk_isa isa);

// A CPU as CPUID names it. On Arm all of it is empty.
struct CpuId {
  std::string vendor;  // "AuthenticAMD"
  unsigned family = 0, model = 0;
};
CpuId cpu_id();

// As it says of itself in CPUID or /proc/cpuinfo, for reports.
std::string cpu_model_name();

}  // namespace ktk
