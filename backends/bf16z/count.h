// How often each exponent occurs in a block.
#pragma once

#include "bf16z/layout.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ktk::bf16z {
namespace {

constexpr size_t kMostExponents = 256;
constexpr size_t kMostWeights = 512;  // that are counted at a time

// bf16, wherever it lies.
typedef uint16_t Bits __attribute__((aligned(1), may_alias));

// A counter that was just written is not ready to be read, and most weights have one of few
// exponents: four counters of each take turns. On AVX2, the twelve most frequent exponents of the
// first weights are counted in registers from there on, and only others, one weight in a thousand,
// in memory.
class ExponentCounts {
 public:
  void add(const Bits* weights, size_t count) {
    size_t i = 0;
#if defined(__AVX2__)
    if (knows_common_) i = add_vectors(weights, count);
#endif
    for (; i < count; ++i) ++counts_[i % 4][exponent(weights[i])];
#if defined(__AVX2__)
    if (!knows_common_) find_common();
#endif
  }

  uint32_t of(size_t exponent) const {
    return counts_[0][exponent] + counts_[1][exponent] + counts_[2][exponent] +
           counts_[3][exponent];
  }

 private:
  static size_t exponent(uint16_t weight) { return weight >> 7 & 255; }

#if defined(__AVX2__)
  static constexpr size_t kCommon = 12, kVector = 32;

  void find_common() {
    int32_t left[kMostExponents];
    for (size_t e = 0; e < kMostExponents; ++e) left[e] = static_cast<int32_t>(of(e));
    for (uint8_t& common : common_) {
      size_t best = 0;
      for (size_t e = 1; e < kMostExponents; ++e) best = left[e] > left[best] ? e : best;
      common = static_cast<uint8_t>(best);
      left[best] = -1;  // each of them once
    }
    knows_common_ = true;
  }

  // Returns how many weights it counted.
  size_t add_vectors(const Bits* weights, size_t count) {
    __m256i sums[kCommon] = {}, common[kCommon];
    for (size_t c = 0; c < kCommon; ++c) {
      common[c] = _mm256_set1_epi8(static_cast<char>(common_[c]));
    }
    size_t i = 0;
    for (; i + kVector <= count; i += kVector) {
      const __m256i* const from = reinterpret_cast<const __m256i*>(weights + i);
      const auto exponents = [&](size_t half) {
        return _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256(from + half), 7),
                                _mm256_set1_epi16(255));
      };
      const __m256i bytes = _mm256_packus_epi16(exponents(0), exponents(1));
      __m256i found = _mm256_setzero_si256();
#pragma GCC unroll 12
      for (size_t c = 0; c < kCommon; ++c) {
        const __m256i here = _mm256_cmpeq_epi8(bytes, common[c]);
        sums[c] = _mm256_sub_epi8(sums[c], here);
        found = _mm256_or_si256(found, here);
      }
      uint32_t others = ~static_cast<uint32_t>(_mm256_movemask_epi8(found));
      for (; others; others &= others - 1) {
        // Packing puts eight of the second half behind eight of the first.
        const size_t byte = static_cast<size_t>(__builtin_ctz(others));
        ++counts_[0][exponent(weights[i + (byte & 7) + (byte & 8) * 2 + (byte & 16) / 2])];
      }
    }
    for (size_t c = 0; c < kCommon; ++c) {
      alignas(32) uint64_t parts[4];
      _mm256_store_si256(reinterpret_cast<__m256i*>(parts),
                         _mm256_sad_epu8(sums[c], _mm256_setzero_si256()));
      counts_[0][common_[c]] += static_cast<uint32_t>(parts[0] + parts[1] + parts[2] + parts[3]);
    }
    return i;
  }

  uint8_t common_[kCommon] = {};
  bool knows_common_ = false;
#endif

  uint32_t counts_[4][kMostExponents] = {};  // by turns
};

}  // namespace
}  // namespace ktk::bf16z
