// AVX-512 with vdpbf16ps: Zen 4, Zen 5. Everything but BF16 is avx512_vnni, the same code.
#include "llamafile/by_element.h"
#include "llamafile/dot.h"

extern "C" {
extern const ktk_variant ktk_llamafile_avx512_vnni;
}

namespace ktk::llamafile {
namespace {

struct Variant : ByElement<ktk_llamafile_avx512_vnni, ktk_llamafile_avx512_vnni> {
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel<0>("gemv_2x32_avx512_vnni", kGemvRows),
      ukernel<1>("gemm_12x32_avx512_vnni", kFewRows),
      ukernel<2>("gemm_6x32_avx512_vnni"),
  };
};

}  // namespace
}  // namespace ktk::llamafile

KTK_EXPORT_VARIANT(llamafile, ktk::llamafile::Variant)
