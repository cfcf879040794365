// Codecs, and what surrounds the library's products. Plain AVX2: the arithmetic that counts is the
// library's, which picks its own instructions.
#include "blis/lpgemm.h"
#include "blis/sgemm.h"
#include "common/ukernel.h"
#include "ktk/target.h"

namespace ktk::blis {
namespace {

void use(const Calls* found) { calls = found; }

constexpr ktk_ukernel kLpgemmUkernels[] = {
    make_ukernel("gemm_s8", Lpgemm::run, Lpgemm::scratch_size),
};
constexpr ktk_ukernel kSgemmUkernels[] = {
    make_ukernel("sgemm", Sgemm::run, Sgemm::scratch_size),
};

// What the two variants have in common.
constexpr ktk_variant make_variant(const char* name, const ktk_ukernel* ukernel) {
  return {
      .struct_size = sizeof(ktk_variant),
      .name = name,
      .required_isa = KTK_TARGET_ISA,
      // Depth is cut where a group of activations ends, so that each is quantised as a whole.
      .tile = {.m_step = 1, .n_step = kColumns, .k_step = kDepth},
      .act = kActFormat,
      .layout = kRowsLayout,
      .weight_size = rows_size,
      .pack_weight = Sgemm::pack_weight,
      .unpack_weight = Sgemm::unpack_weight,
      .act_size = act_size,
      .pack_act = pack_act,
      .unpack_act = unpack_act,
      .ukernels = ukernel,
      .num_ukernels = 1,
      .enter = nullptr,
      .leave = nullptr,
      .weight_offset = rows_offset,
      .act_format = nullptr,
      .export_weight = Sgemm::export_weight,
  };
}

// The module names its layout: only the library knows what it looks like.
constexpr ktk_variant make_lpgemm() {
  ktk_variant variant = make_variant("lpgemm_int8", kLpgemmUkernels);
  variant.layout = nullptr;
  variant.weight_size = Lpgemm::weight_size;
  variant.pack_weight = Lpgemm::pack_weight;
  variant.unpack_weight = Lpgemm::unpack_weight;
  variant.weight_offset = Lpgemm::weight_offset;
  variant.export_weight = Lpgemm::export_weight;
  return variant;
}

}  // namespace
}  // namespace ktk::blis

extern "C" {
extern const ktk::blis::Kernels KTK_VARIANT(blis);
constexpr ktk::blis::Kernels KTK_VARIANT(blis) = {
    .lpgemm_int8 = ktk::blis::make_lpgemm(),
    .sgemm = ktk::blis::make_variant("sgemm", ktk::blis::kSgemmUkernels),
    .use = ktk::blis::use,
};
}
