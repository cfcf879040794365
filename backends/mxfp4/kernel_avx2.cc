// E2M1 with AVX2 and FMA: f32 rows, up to 6 rows x 16 columns.
#include "codec/scaled/ymm.h"
#include "mxfp4/variant.h"

namespace ktk::mxfp4 {
namespace {

template <class Scales>
struct Decoder {
  __m256 sizes = _mm256_mul_ps(_mm256_loadu_ps(kValues), _mm256_set1_ps(Scales::kUnit));

  // vpermps looks up three bits; the fourth is the sign.
  void decode(const char* line, float* out) const {
    const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000));
    for (size_t col = 0; col < kHalfCols; col += 8) {
      const __m256i codes =
          _mm256_load_si256(reinterpret_cast<const __m256i*>(line + col * sizeof(int)));
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) {
        const int bit = k % 2 * 16 + k / 2 * 4;
        const __m256 size = _mm256_permutevar8x32_ps(sizes, _mm256_srli_epi32(codes, bit));
        const __m256i signs = _mm256_and_si256(_mm256_slli_epi32(codes, 28 - bit), sign);
        _mm256_store_ps(out + static_cast<size_t>(k) * kBlockCols + col,
                        _mm256_or_ps(size, _mm256_castsi256_ps(signs)));
      }
    }
  }
  static __m256 value(__m256 sum) { return sum; }
};

template <class Layout>
using Kernel = YmmKernel<Decoder<typename Layout::Scales>, Layout>;

struct Variant {
  using Weight = WeightCodec;
  using Act = ActF32;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_6x16_avx2", gemm_by_layout<Formats, Kernel>, ymm_scratch_size)};
};

}  // namespace
}  // namespace ktk::mxfp4

KTK_EXPORT_VARIANT(mxfp4, ktk::mxfp4::Variant)
