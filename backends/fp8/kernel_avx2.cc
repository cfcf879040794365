// FP8 with AVX2 and FMA: f32 rows, up to 2 rows x 32 columns, 4 x 16 or, decoded ahead, 6 x 16.
#include "codec/scaled/ymm_decoded.h"
#include "fp8/variant.h"

namespace ktk::fp8 {
namespace {

// f16 has the same mantissa and more exponents: a code is an f16 of 2^-8 times its value, subnormal
// where the code is. The conversion to f32 is exact, whatever MXCSR says of subnormals.
struct Decoder {
  static constexpr size_t kLineDepth = Codes::kLineDepth;

  struct Line {
    __m256i pairs[2];  // words (k0, k1), then (k2, k3), of columns 0..7 | 8..15

    explicit Line(const char* line) {
      const __m128i* four = reinterpret_cast<const __m128i*>(line);
      // Columns 0..3 | 8..11 and 4..7 | 12..15
      const __m256i low = _mm256_loadu2_m128i(four + 2, four);
      const __m256i high = _mm256_loadu2_m128i(four + 3, four + 1);
      pairs[0] = _mm256_unpacklo_epi64(low, high);
      pairs[1] = _mm256_unpackhi_epi64(low, high);
    }
    void vectors(size_t k, __m256& low, __m256& high) const {
      __m256i words = pairs[k / 2];
      if (k % 2 == 0) words = _mm256_slli_epi16(words, 8);
      // sign, a copy of it to remove, then the other seven bits
      words = _mm256_and_si256(_mm256_srai_epi16(words, 1),
                               _mm256_set1_epi16(static_cast<short>(0xbf80)));
      low = _mm256_cvtph_ps(_mm256_castsi256_si128(words));
      high = _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1));
    }
  };
  static __m256 value(__m256 sum) { return _mm256_mul_ps(sum, _mm256_set1_ps(256)); }
};

template <class Layout>
using Kernel = YmmKernel<Decoder, Layout>;

template <class Layout>
using DecodedKernel = YmmDecodedKernel<Decoder, Layout>;

struct Variant {
  using Weight = WeightCodec;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_4x16_avx2", 4, gemm_by_layout<Formats, Kernel>),
      ukernel("gemm_decoded_6x16_avx2", gemm_by_layout<Formats, DecodedKernel>, ymm_scratch_size)};
};

}  // namespace
}  // namespace ktk::fp8

KTK_EXPORT_VARIANT(fp8, ktk::fp8::Variant)
