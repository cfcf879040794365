// Instruction sets that a CPU is faster without.
#pragma once

#include "core/cpu.h"

namespace ktk {

// Those of `isa` whose products take the CPU longer than products of the sets that they extend.
ktk_isa slow_isa(const CpuId& cpu, ktk_isa isa);

// Those of allowed_isa() on this CPU, but for what KTK_ISA or KTK_ISA_FORCE name: who names a set
// wants to see it run. Throws SettingError.
ktk_isa slow_isa();

}  // namespace ktk
