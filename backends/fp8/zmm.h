// FP8 lines in 512-bit registers.
#pragma once

#include "codec/scaled/zmm.h"
#include "fp8/layout.h"
#include "fp8/tables.h"

namespace ktk::fp8 {
namespace {

// A line as bytes of bf16.
struct BytesOfBf16 {
  __m512i low, high;

  __m512i pairs(size_t i) const {
    return i ? _mm512_unpackhi_epi8(low, high) : _mm512_unpacklo_epi8(low, high);
  }
};

// VBMI looks up both bytes of bf16 for the seven bits beside the sign; no compare, no arithmetic.
struct DecodeBf16 {
  using Dot = DotBf16;
  static constexpr size_t kVectors = 2;
  static constexpr int kLeastExponent = 118, kMostExponent = 135;  // biased: of 2^-9 and 448
  using Line = BytesOfBf16;
  __m512i low[2] = {_mm512_load_si512(kTables.low), _mm512_load_si512(kTables.low + 64)};
  __m512i high[2] = {_mm512_load_si512(kTables.high), _mm512_load_si512(kTables.high + 64)};

  // Not the intrinsic: avx512_bf16 and amx_bf16 are built without its flag.
  static __m512i look_up(__m512i codes, const __m512i (&table)[2]) {
    asm("vpermi2b %2, %1, %0" : "+v"(codes) : "v"(table[0]), "v"(table[1]));
    return codes;
  }
  Line load(const char* line) const {
    const __m512i codes = _mm512_load_si512(line);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    // high | (sign & codes)
    return {look_up(codes, low),
            _mm512_ternarylogic_epi32(look_up(codes, high), sign, codes, 0xf8)};
  }
  static __m512i vector(const Line& line, size_t i) { return line.pairs(i); }
  __m512 value(__m512 sum) const { return sum; }
};

#if defined(__GFNI__)
// Both bytes of bf16 are a matrix of bits times a code, with exponents 8 too small, so that no bit
// depends on a carry: 16 * 7 + e instead of 120 + e. Those of zeros and subnormals are looked up.
// Byte 7 - i of a matrix selects the bits of the code whose parity is bit i. From bit 7 down:
//
//   kLow     e0 m2 m1 m0 0 0 0 0
//   kHigh    sign 0 0 0 0 e3 e2 e1, to which kExponent adds 0 0 1 1 1 0 0 0
struct DecodeAffine {
  using Dot = DotBf16;
  static constexpr size_t kVectors = 2;
  using Line = BytesOfBf16;
  static constexpr uint64_t kLow = 0x0000000001020408, kHigh = 0x1020400000000080;
  static constexpr int kExponent = 0x38;

  Line load(const char* line) const {
    const __m512i codes = _mm512_load_si512(line);
    __m512i low = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(kLow), 0);
    __m512i high = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(kHigh), kExponent);
    // One line in 140 of gaussian weights has such a code. asm, because gcc 12 spills registers
    // where it branches.
    asm("vptestnmb %[exponent], %[codes], %%k1\n\t"
        "kortestq %%k1, %%k1\n\tjz 1f\n\t"
        "vpermb %[table_low], %[codes], %[low]%{%%k1%}\n\t"
        "vpermb %[table_high], %[codes], %[high]%{%%k1%}\n\t"
        "vpternlogd $0xf8, %[codes], %[sign], %[high]\n1:"  // high | (sign & codes)
        : [low] "+&v"(low), [high] "+&v"(high)
        : [codes] "v"(codes), [exponent] "v"(_mm512_set1_epi8(0x78)),
          [sign] "v"(_mm512_set1_epi8(static_cast<char>(0x80))), [table_low] "m"(kSubnormals.low),
          [table_high] "m"(kSubnormals.high)
        : "cc", "k1");
    return {low, high};
  }
  static __m512i vector(const Line& line, size_t i) { return line.pairs(i); }
  __m512 value(__m512 sum) const { return _mm512_mul_ps(sum, _mm512_set1_ps(256)); }
};
#endif

// f16 has the same mantissa and more exponents: a code is an f16 of 2^-8 times its value, subnormal
// where the code is. The conversion to f32 is exact, whatever MXCSR says of subnormals.
struct DecodeF32 {
  using Dot = DotF32;
  static constexpr size_t kVectors = 4;
  struct Line {
    __m512i halves[2];  // k0 of 16 columns, k1; k2, k3
  };

  // Words with a code in both bytes, pairs of columns 0..3 in the first quarter and so on.
  static __m512i split(__m512i words) {
    // sign, two of its copies to remove, then the other seven bits
    const __m512i bits = _mm512_and_si512((__m512i)((__v32hi)words >> 1),
                                          _mm512_set1_epi16(static_cast<short>(0xbf80)));
    // k0 of all columns to the lower half, k1 to the upper one.
    alignas(64) static constexpr uint16_t kOrder[32] = {
        0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
        1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
    };
    return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), bits);
  }
  Line load(const char* line) const {
    const __m512i codes = _mm512_load_si512(line);
    return {{split(_mm512_unpacklo_epi8(codes, codes)), split(_mm512_unpackhi_epi8(codes, codes))}};
  }
  __m512i vector(const Line& line, size_t i) const {
    const __m512i halves = line.halves[i / 2];
    const __m256i k = i % 2 ? _mm512_extracti64x4_epi64(halves, 1) : _mm512_castsi512_si256(halves);
    return _mm512_castps_si512(_mm512_cvtph_ps(k));
  }
  __m512 value(__m512 sum) const { return _mm512_mul_ps(sum, _mm512_set1_ps(256)); }
};

}  // namespace
}  // namespace ktk::fp8
