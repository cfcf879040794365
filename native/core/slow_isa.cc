#include "core/slow_isa.h"

namespace ktk {
namespace {

struct Row {
  const char* vendor;
  unsigned family, first_model;
  ktk_isa without;  // none of these bits
  ktk_isa slow;
};

constexpr ktk_isa kAmx = KTK_ISA_AMX_INT8 | KTK_ISA_AMX_BF16;

// A table, not a measurement: which variant computes decides the last bits of results, which must
// not depend on what else a machine does while a process starts.
constexpr Row kRows[] = {
    // Sapphire Rapids and later, whose AMX a hypervisor hides: vdpbf16ps starts every second cycle,
    // vfmadd twice a cycle, so that f32 has twice the rate (two cores of an Emerald Rapids: 173 and
    // 352 GFLOP/s). With few rows memory is what both wait for. Tiles are faster than either.
    // Cooper Lake, model 85, was not met.
    {"GenuineIntel", 6, 86, kAmx, KTK_ISA_AVX512_BF16},
};

}  // namespace

ktk_isa slow_isa(const CpuId& cpu, ktk_isa isa) {
  ktk_isa slow = KTK_ISA_NONE;
  for (const Row& row : kRows) {
    if (cpu.vendor == row.vendor && cpu.family == row.family && cpu.model >= row.first_model &&
        !(isa & row.without)) {
      slow |= row.slow & isa;
    }
  }
  return slow;
}

ktk_isa slow_isa() { return slow_isa(cpu_id(), allowed_isa()) & ~named_isa(); }

}  // namespace ktk
