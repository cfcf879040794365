// E2M1 with AVX512-VNNI: 16-bit rows as two bytes, up to 4 rows x 32 columns, or as words, 12 x 32,
// with codes looked up beside the products or ahead.
#include "mxfp4/variant.h"
#include "mxfp4/zmm_words.h"

namespace ktk::mxfp4 {
namespace {

struct Variant {
  using Weight = WeightCodec;
  using Act = ActCodes;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_4x32_avx512_vnni", 4, gemm_by_layout<Formats, BytesKernel>),
      ukernel("gemm_words_12x32_avx512_vnni", 12, gemm_by_layout<Formats, WordsKernel>),
      ukernel("gemm_decoded_12x32_avx512_vnni", gemm_by_layout<Formats, DecodedWordsKernel>,
              decoded_words_size),
  };
};

}  // namespace
}  // namespace ktk::mxfp4

KTK_EXPORT_VARIANT(mxfp4, ktk::mxfp4::Variant)
