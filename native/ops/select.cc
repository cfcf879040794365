#include "ops/select.h"

#include <stdexcept>

#include "core/cpu.h"

// The build passes -DKTK_OPS_TARGETS(X)=X(avx512) X(avx2)..., best first.
#define KTK_DECLARE(isa)                  \
  extern "C" const ktk_ops ktk_ops_##isa; \
  extern "C" const ktk_products ktk_products_##isa;
KTK_OPS_TARGETS(KTK_DECLARE)

namespace ktk {
namespace {

struct Target {
  ktk_isa isa;
  const ktk_ops* ops;
  const ktk_products* products;
};

#define KTK_TARGET_ROW(isa) {isa_bit::isa, &ktk_ops_##isa, &ktk_products_##isa},
constexpr Target kTargets[] = {KTK_OPS_TARGETS(KTK_TARGET_ROW)};

const Target& find() {
  const ktk_isa allowed = allowed_isa();
  for (const Target& target : kTargets) {
    if (allowed & target.isa) return target;
  }
  throw std::runtime_error("ktk needs a CPU with AVX2 and FMA (x86-64-v3)");
}

// Found once: reading the environment takes longer than an operation on a row.
const Target& best() {
  static const Target& found = find();
  return found;
}

}  // namespace

const ktk_ops& ops() { return *best().ops; }
const ktk_products& products() { return *best().products; }

}  // namespace ktk
