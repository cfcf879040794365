#include "ops/select.h"

#include <stdexcept>

#include "core/cpu.h"

// The build passes -DKTK_OPS_TARGETS(X)=X(avx512) X(avx2)..., best first.
#define KTK_DECLARE(isa) extern "C" const ktk_ops ktk_ops_##isa;
KTK_OPS_TARGETS(KTK_DECLARE)

namespace ktk {
namespace {

struct Target {
  ktk_isa isa;
  const ktk_ops* ops;
};

#define KTK_TARGET_ROW(isa) {isa_bit::isa, &ktk_ops_##isa},
constexpr Target kTargets[] = {KTK_OPS_TARGETS(KTK_TARGET_ROW)};

}  // namespace

const ktk_ops& ops() {
  const ktk_isa allowed = allowed_isa();
  for (const Target& target : kTargets) {
    if (allowed & target.isa) return *target.ops;
  }
  throw std::runtime_error("ktk needs a CPU with AVX2 and FMA (x86-64-v3)");
}

}  // namespace ktk
