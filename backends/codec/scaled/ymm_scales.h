// Scales in 256-bit registers: of eight columns and one group, as kernels read them.
#pragma once

#include <immintrin.h>

#include "codec/scaled/layout.h"

namespace ktk {
namespace {

template <class Scales>
struct YmmScales;

template <>
struct YmmScales<MxScales> {
  const char* line;

  explicit YmmScales(const char*) {}
  void begin(const char* scale_line) { line = scale_line; }
  void advance() { line += kNr; }
  __m256 load(size_t col) const {
    const __m128i exponents = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(line + col));
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(exponents), 23);
    // 0 means 2^-127. 255 means NaN, which is in `start` already.
    return _mm256_castsi256_ps(_mm256_max_epu32(bits, _mm256_set1_epi32(0x00400000)));
  }
  void load(size_t col, __m256& low, __m256& high) const {
    low = load(col);
    high = load(col + 8);
  }
};

template <>
struct YmmScales<NvScales> {
  const char* line;

  explicit YmmScales(const char*) {}
  void begin(const char* scale_lines) { line = scale_lines; }
  void advance() { line += kNr; }
  // Divided by kUnit. The conversion is exact, whatever MXCSR says of subnormals.
  __m256 load(size_t col) const {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(line + col));
    // sign, a copy of it to remove, then the other seven bits
    const __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7);
    return _mm256_cvtph_ps(_mm_and_si128(bits, _mm_set1_epi16(static_cast<short>(0xbf80))));
  }
  // The same, of sixteen columns.
  void load(size_t col, __m256& low, __m256& high) const {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(line + col));
    __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
    bits = _mm256_and_si256(bits, _mm256_set1_epi16(static_cast<short>(0xbf80)));
    low = _mm256_cvtph_ps(_mm256_castsi256_si128(bits));
    high = _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
  }
};

template <>
struct YmmScales<BlockScales> {
  const float* scale;

  explicit YmmScales(const char* scales) : scale(reinterpret_cast<const float*>(scales)) {}
  void begin(const char*) {}
  void advance() { ++scale; }
  __m256 load(size_t) const { return _mm256_set1_ps(*scale); }
};

template <>
struct YmmScales<RowScales> {
  const float* scales;

  explicit YmmScales(const char* from) : scales(reinterpret_cast<const float*>(from)) {}
  void begin(const char*) {}
  void advance() {}
  __m256 load(size_t col) const { return _mm256_loadu_ps(scales + col); }
};

}  // namespace
}  // namespace ktk
