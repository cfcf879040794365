// Lines of E2M1 in 512-bit registers. Scales say what values are multiplied with: kUnit, for
// nothing.
#pragma once

#include "codec/scaled/zmm.h"
#include "mxfp4/layout.h"

namespace ktk::mxfp4 {
namespace {

// Values by code, for vpermps; and as bf16, twice, for vpermw.
template <class Scales>
struct alignas(64) Tables {
  uint16_t bf16[32] = {};
  float f32[16] = {};

  constexpr Tables() {
    for (size_t code = 0; code < 32; ++code) {
      const float value = kValues[code % 16] * Scales::kUnit;
      bf16[code] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16);  // exact
      f32[code % 16] = value;
    }
  }
};
template <class Scales>
constexpr Tables<Scales> kTables;

template <class Scales>
struct DecodeBf16 {
  using Dot = DotBf16;
  using Line = __m512i;
  static constexpr size_t kVectors = 4;
  static constexpr int kLeastExponent = 126, kMostExponent = 129;  // biased: of 0.5 and 6
  __m512i table = _mm512_load_si512(kTables<Scales>.bf16);

  Line load(const char* line) const { return _mm512_load_si512(line); }
  __m512i vector(Line line, size_t i) const {
    // Not _mm512_srli_epi16(line, 4 * i): i is a constant only after unrolling.
    return _mm512_permutexvar_epi16((__m512i)((__v32hu)line >> (4 * i)), table);
  }
  __m512 value(__m512 sum) const { return sum; }
};

template <class Scales>
struct DecodeF32 {
  using Dot = DotF32;
  struct Line {
    __m512i from_byte[4];  // of each dword
  };
  static constexpr size_t kVectors = 8;
  __m512 table = _mm512_load_ps(kTables<Scales>.f32);

  Line load(const char* line) const {
    const auto dwords = (__v16su)_mm512_load_si512(line);
    return {{(__m512i)dwords, (__m512i)(dwords >> 8), (__m512i)(dwords >> 16),
             (__m512i)(dwords >> 24)}};
  }
  // Shifts by bytes are left to loads: shifts and lookups have a port each on Intel's CPUs, and
  // products want both.
  Line load_followed(const char* line) const {
    return {{_mm512_load_si512(line), _mm512_loadu_si512(line + 1), _mm512_loadu_si512(line + 2),
             _mm512_loadu_si512(line + 3)}};
  }
  __m512i vector(const Line& line, size_t i) const {
    const __m512i dwords = line.from_byte[i % 2 * 2 + i / 4];
    const __m512i index = i / 2 % 2 ? (__m512i)((__v16su)dwords >> 4) : dwords;
    return _mm512_castps_si512(_mm512_permutexvar_ps(index, table));
  }
  __m512 value(__m512 sum) const { return sum; }
};

}  // namespace
}  // namespace ktk::mxfp4
