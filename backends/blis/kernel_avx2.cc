// Codecs, and what surrounds the library's products. Plain AVX2: the arithmetic that counts is the
// library's, which picks its own instructions.
#include "blis/lpgemm.h"
#include "blis/sgemm.h"
#include "ktk/backend.h"

namespace ktk::blis {
namespace {

void use(const Calls* found) { calls = found; }

template <class Mode>
struct WeightCodec {
  static constexpr const char* kLayout = Mode::kLayout;
  static constexpr uint32_t kNStep = kNr;
  static constexpr auto size = Mode::weight_size;
  static constexpr auto pack = Mode::pack_weight;
  static constexpr auto unpack = Mode::unpack_weight;
  static constexpr auto offset = Mode::weight_offset;
  static constexpr auto write = Mode::export_weight;
};

template <class Mode>
struct Variant {
  using Weight = WeightCodec<Mode>;
  using Act = blis::Act;
  static constexpr const char* kName = Mode::kName;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel(Mode::kUkernel, Mode::run, Mode::scratch_size)};
};

}  // namespace
}  // namespace ktk::blis

extern "C" {
extern const ktk::blis::Kernels KTK_VARIANT(blis);
constexpr ktk::blis::Kernels KTK_VARIANT(blis) = {
    .lpgemm_int8 = ktk::make_variant<ktk::blis::Variant<ktk::blis::Lpgemm>>(),
    .sgemm = ktk::make_variant<ktk::blis::Variant<ktk::blis::Sgemm>>(),
    .use = ktk::blis::use,
};
}
