// FP8 with AVX2 and FMA: f32 rows, up to 6 rows x 16 columns.
#include "codec/scaled/ymm.h"
#include "fp8/variant.h"

namespace ktk::fp8 {
namespace {

// f16 has the same mantissa and more exponents: a code is an f16 of 2^-8 times its value, subnormal
// where the code is. The conversion to f32 is exact, whatever MXCSR says of subnormals.
struct Decoder {
  // Words with a code in their upper bytes: k of columns 0..3 | k + 1 | k of columns 4..7 | k + 1.
  static void store(__m256i words, float* out) {
    const __m256i bits = _mm256_and_si256(_mm256_srai_epi16(words, 1),
                                          _mm256_set1_epi16(static_cast<short>(0xbf80)));
    const __m256i by_k = _mm256_permute4x64_epi64(bits, 0xd8);
    _mm256_store_ps(out, _mm256_cvtph_ps(_mm256_castsi256_si128(by_k)));
    _mm256_store_ps(out + kBlockCols, _mm256_cvtph_ps(_mm256_extracti128_si256(by_k, 1)));
  }
  void decode(const char* line, float* out) const {
    // Within four columns: k0 of all, k1 of all, and so on.
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15));
    for (size_t col = 0; col < kHalfCols; col += 8) {
      const __m256i* half = reinterpret_cast<const __m256i*>(line + col * kLine / kHalfCols);
      const __m256i codes = _mm256_shuffle_epi8(_mm256_load_si256(half), order);
      store(_mm256_unpacklo_epi8(codes, codes), out + col);
      store(_mm256_unpackhi_epi8(codes, codes), out + 2 * kBlockCols + col);
    }
  }
  static __m256 value(__m256 sum) { return _mm256_mul_ps(sum, _mm256_set1_ps(256)); }
};

template <class Layout>
using Kernel = YmmKernel<Decoder, Layout>;

struct Variant {
  using Weight = WeightCodec;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_6x16_avx2", gemm_by_layout<Formats, Kernel>, ymm_scratch_size)};
};

}  // namespace
}  // namespace ktk::fp8

KTK_EXPORT_VARIANT(fp8, ktk::fp8::Variant)
