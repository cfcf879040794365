// FP8 lines in 256-bit registers, as f32.
#pragma once

#include <immintrin.h>

#include "fp8/layout.h"
#include "fp8/tables.h"

namespace ktk::fp8 {
namespace {

// Masks and tables stay in memory, where asm finds them: sums take most of the registers.
struct alignas(32) Constant {
  uint8_t bytes[32];
};
constexpr Constant repeated(uint32_t dword) {
  Constant constant = {};
  for (unsigned i = 0; i < 32; ++i) constant.bytes[i] = static_cast<uint8_t>(dword >> i % 4 * 8);
  return constant;
}
constexpr Constant kLowHalf = repeated(0x0f0f0f0f), kHighHalf = repeated(0xf0f0f0f0),
                   kExponent = repeated(0x78787878), kSign = repeated(0x80808080),
                   kOddK = repeated(0xffff0000);

// The high byte of bf16 by sign and upper three bits of the exponent, as if none were subnormal.
constexpr Constant make_high() {
  Constant table = {};
  for (unsigned i = 0; i < 32; ++i) {
    table.bytes[i] = static_cast<uint8_t>((i & 8) << 4 | kTables.high[(i & 7) << 4 | 8]);
  }
  return table;
}
constexpr Constant kHigh = make_high();

// Both bytes of zero and the subnormals, without their sign.
constexpr Constant first_codes(const uint8_t (&bytes)[128]) {
  Constant table = {};
  for (unsigned i = 0; i < 32; ++i) table.bytes[i] = i % 16 < 8 ? bytes[i % 8] : 0;
  return table;
}
constexpr Constant kSmallLow = first_codes(kTables.low), kSmallHigh = first_codes(kTables.high);

inline __m256i masked(__m256i bits, const Constant& mask) {
  __m256i result;
  asm("vpand %2, %1, %0" : "=x"(result) : "x"(bits), "m"(mask));
  return result;
}

// By four bits of each byte.
inline __m256i look_up(const Constant& table, __m256i index) {
  __m256i bytes;
  asm("vmovdqa %2, %0\n\tvpshufb %1, %0, %0" : "=&x"(bytes) : "x"(index), "m"(table));
  return bytes;
}

// The two bytes of a code's bf16 are made for 32 codes at once, and unpacking them gives the pairs
// of k that f32 is a shift or a mask away from:
//
//   code                s e3 e2 e1 | e0 m2 m1 m0
//   high byte of bf16   s (e + 120) >> 1            looked up by the code's high half
//   low byte            e0 m2 m1 m0 0 0 0 0
//
// which is right but for e = 0, zero and subnormals. Lines that have some are rare where scales are
// made for the largest weight of many; both bytes are looked up by m there. (To convert f16, which
// has room for all codes, takes Zen 3 two cycles for eight.)
struct Decoder {
  static constexpr size_t kLineDepth = Codes::kLineDepth;

  struct Line {
    __m256i pairs[2][2];  // of columns 0..7 (k0, k1) and (k2, k3), then of columns 8..15

    explicit Line(const char* line) {
      const __m256i* codes = reinterpret_cast<const __m256i*>(line);
      __m256i low[2], high[2];
#pragma GCC unroll 2
      for (size_t i = 0; i < 2; ++i) {
        const __m256i four = _mm256_load_si256(codes + i);
        low[i] = masked(_mm256_slli_epi16(four, 4), kHighHalf);
        high[i] = look_up(kHigh, masked(_mm256_srli_epi16(four, 4), kLowHalf));
      }
      const __m256i least = _mm256_min_epu8(masked(_mm256_load_si256(codes), kExponent),
                                            masked(_mm256_load_si256(codes + 1), kExponent));
      // The upper bit of 0 - 1, and of no other exponent, which begin at 8.
      if (__builtin_expect(_mm256_movemask_epi8(_mm256_sub_epi8(least, _mm256_set1_epi8(1))), 0)) {
        look_up_small(codes[0], low[0], high[0]);
        look_up_small(codes[1], low[1], high[1]);
      }
#pragma GCC unroll 2
      for (size_t i = 0; i < 2; ++i) {
        pairs[i][0] = _mm256_unpacklo_epi8(low[i], high[i]);
        pairs[i][1] = _mm256_unpackhi_epi8(low[i], high[i]);
      }
    }
    void vectors(size_t k, __m256& first, __m256& second) const {
      first = value(pairs[0][k / 2], k % 2);
      second = value(pairs[1][k / 2], k % 2);
    }

   private:
    static __m256 value(__m256i pair, bool odd) {
      return _mm256_castsi256_ps(odd ? masked(pair, kOddK) : _mm256_slli_epi32(pair, 16));
    }
    // One piece of asm with three registers: gcc 12 would take more, and spill sums for them.
    static void look_up_small(const __m256i& codes, __m256i& low, __m256i& high) {
      __m256i is_small, m, bytes;
      asm("vmovdqa %[codes], %[m]\n\t"
          "vpand %[exponent], %[m], %[is_small]\n\t"
          "vpxor %[bytes], %[bytes], %[bytes]\n\t"
          "vpcmpeqb %[bytes], %[is_small], %[is_small]\n\t"
          "vpand %[half], %[m], %[m]\n\t"
          "vmovdqa %[small_low], %[bytes]\n\t"
          "vpshufb %[m], %[bytes], %[bytes]\n\t"
          "vpblendvb %[is_small], %[bytes], %[low], %[low]\n\t"
          "vmovdqa %[small_high], %[bytes]\n\t"
          "vpshufb %[m], %[bytes], %[bytes]\n\t"
          "vmovdqa %[codes], %[m]\n\t"
          "vpand %[sign], %[m], %[m]\n\t"
          "vpor %[m], %[bytes], %[bytes]\n\t"
          "vpblendvb %[is_small], %[bytes], %[high], %[high]"
          : [low] "+x"(low), [high] "+x"(high), [is_small] "=&x"(is_small), [m] "=&x"(m),
            [bytes] "=&x"(bytes)
          : [codes] "m"(codes), [exponent] "m"(kExponent), [half] "m"(kLowHalf), [sign] "m"(kSign),
            [small_low] "m"(kSmallLow), [small_high] "m"(kSmallHigh));
    }
  };
  static __m256 value(__m256 sum) { return sum; }
};

}  // namespace
}  // namespace ktk::fp8
