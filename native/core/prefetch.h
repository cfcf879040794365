// How this CPU wants weights fetched ahead of their use (ktk_prefetch of abi.h).
#pragma once

#include <string>
#include <string_view>

#include "core/cpu.h"
#include "ktk/abi.h"

namespace ktk {

// What products are told: that of this CPU in the table of prefetch.cc, changed by KTK_PREFETCH.
// Read once. Throws SettingError.
const ktk_prefetch& prefetch();

// The same for another CPU, and for a value of KTK_PREFETCH: the name of a row of the table, or
// entries that take the place of those of the CPU, or both, with commas between them:
//
//   zen5,few=4096:l1,one=8192:l2+l1,many=32768:l2:pages,few_products=8,in_order_products=0,
//   pages_products=30,l1_ahead=2048,decode_rows=13,accumulators=10
ktk_prefetch prefetch_for(const CpuId& cpu, ktk_isa isa, std::string_view setting);

// The name of a CPU's row of the table; "default" where it has none of its own.
const char* prefetch_row(const CpuId& cpu, ktk_isa isa);

// As it is written in KTK_PREFETCH.
std::string describe(const ktk_prefetch& prefetch);

// Changes what prefetch() returns, for trials; an empty text restores it. Products that run at the
// same time may be told either.
void set_prefetch(std::string_view setting);

}  // namespace ktk
