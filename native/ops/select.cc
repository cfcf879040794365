#include "ops/select.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "core/cpu.h"

// The build passes -DKTK_OPS_TARGETS(X)=X(avx512) X(avx2)..., best first.
#define KTK_DECLARE(isa) extern "C" const ktk_ops ktk_ops_##isa;
KTK_OPS_TARGETS(KTK_DECLARE)

namespace ktk {
namespace {

struct Target {
  const char* name;
  const ktk_ops* ops;
};

#define KTK_TARGET_ROW(isa) {#isa, &ktk_ops_##isa},
constexpr Target kTargets[] = {KTK_OPS_TARGETS(KTK_TARGET_ROW)};

}  // namespace

const ktk_ops& ops() {
  const std::vector<std::string> names = isa_names(allowed_isa());
  for (const Target& target : kTargets) {
    for (const std::string& name : names) {
      if (name == target.name) return *target.ops;
    }
  }
  throw std::runtime_error("ktk needs a CPU with AVX2 and FMA (x86-64-v3)");
}

}  // namespace ktk
