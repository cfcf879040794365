// Weights for products of words (gemm_i16.h), in scratch: operands, and what their sums meet.
//
//   stretch   | operands of up to eight runs | words of these runs |
//
//   words     | sub 0, sub 1 of 32 columns | the same of units 1 to 7 | d of 32 columns, f32 |
#pragma once

#include "llamafile/operands.h"

namespace ktk::llamafile {
namespace {

// Tiles read operands from L2 as fast as from L1, and take time to begin and to end: 8 runs instead
// of 3 give 2 %.
constexpr size_t kStretchRuns = 8;
constexpr size_t kRunWords = (kSubBlocks + 1) * kNr;
constexpr size_t kStretchOperands = kStretchRuns * kSubBlocks * kOperandBytes;
constexpr size_t kWordStretchBytes = kStretchOperands + kStretchRuns * kRunWords * sizeof(int32_t);

// The SquaredNorm of each unit of a run: the greatest one of some rows, or the greatest that is
// allowed.
struct alignas(8) Norms {
  SquaredNorm of_unit[kSubBlocks];
};

inline __m128i load_lengths(const void* norms) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(norms));
}
inline void store_lengths(Norms* to, __m128i norms) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), norms);
}

// Whether all sums of a run are words.
inline bool fits(const Norms& longest, const Norms& limits) {
  const __m128i beyond = _mm_subs_epu8(load_lengths(&longest), load_lengths(&limits));
  return _mm_testz_si128(beyond, beyond);
}

// What norms of activations may be beside weights of such squares of norms, so that the length
// of one times that of the other is at most 32767.
inline Norms length_limits(const int32_t (&squares)[kSubBlocks]) {
  // Rounded down, with room for the error of the division.
  const __m256 quotient = _mm256_div_ps(
      _mm256_set1_ps(32767.0f * 32767.0f / kNormUnit * (1 - 0x1p-20f)),
      _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(squares))));
  const __m256i limits =
      _mm256_min_epi32(_mm256_cvttps_epi32(quotient), _mm256_set1_epi32(kNoNorm - 1));
  Norms result;
  store_lengths(&result, _mm256_cvtepi32_epi8(limits));
  return result;
}

// Writes operands of steps of one register of columns, and adds the squares of the weights.
template <size_t kStep, size_t kEnd, class AnyCodes>
[[gnu::always_inline]] inline Dot::Int write_half(const AnyCodes& codes, const uint8_t* unit,
                                                  uint8_t* to, Dot::Int squares) {
  const Dot::Int operand = codes.template operand<kStep>(unit);
  Dot::store_bytes(to + kStep * kPlaneBytes, operand);
  const Dot::Int size = _mm512_abs_epi8(_mm512_xor_si512(operand, Dot::set1_byte(kOffset)));
  squares = Dot::dot(squares, size, size);
  if constexpr (kStep + 1 < kEnd) return write_half<kStep + 1, kEnd>(codes, unit, to, squares);
  return squares;
}

// Writes operands of a run.
template <int kBits>
Norms write_run_operands(const CodeTable& table, const uint8_t* unit, uint8_t* to) {
  static_assert(Dot::kWeightOffset == kOffset);
  const Codes<kBits> codes(table);
  int32_t squares[kSubBlocks];
  for (int32_t& of_unit : squares) {
    Dot::Int largest = Dot::set1_int(1);
#pragma GCC unroll 2
    for (size_t at = 0; at < kPlaneBytes; at += sizeof(Dot::Int)) {
      const Dot::Int none = Dot::set1_int(0);
      constexpr size_t kHalf = kSteps / 2;
      const Dot::Int first = write_half<0, kHalf>(codes, unit + at, to + at, none);
      const Dot::Int second = write_half<kHalf, kSteps>(codes, unit + at, to + at, none);
      largest = _mm512_max_epi32(largest, _mm512_max_epi32(first, second));
    }
    of_unit = _mm512_reduce_max_epi32(largest);
    unit += kBits * kPlaneBytes;
    to += kOperandBytes;
  }
  return length_limits(squares);
}

struct WordStretch {
  uint8_t* operands;
  int32_t* words;
  Norms limits[kStretchRuns];

  explicit WordStretch(void* scratch)
      : operands(static_cast<uint8_t*>(scratch)),
        words(reinterpret_cast<int32_t*>(operands + kStretchOperands)) {}

  void write(const BlockType& type, const Header& at, const CodeTable& table, const uint8_t* run,
             size_t index) {
    const auto write_codes = type.bits == 3 ? write_run_operands<3> : write_run_operands<6>;
    limits[index] = write_codes(table, run + at.end, operands + index * kSubBlocks * kOperandBytes);
    int32_t* to = words + index * kRunWords;
    const uint8_t* sub = run + at.sub;
    for (size_t unit = 0; unit < kSubBlocks; ++unit, sub += 2 * kNr, to += kNr) {
      for (size_t c = 0; c < kNr; c += Dot::kLanes) {
        const Dot::Int low = _mm512_cvtepi8_epi32(load_bytes(sub + c));
        const Dot::Int high = _mm512_cvtepi8_epi32(load_bytes(sub + kNr + c));
        Dot::store_bytes(to + c,
                         _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16)));
      }
    }
    for (size_t c = 0; c < kNr; c += Dot::kLanes) {
      Dot::store(reinterpret_cast<float*>(to) + c, load_d(type, run + c * d_bytes(type)));
    }
  }
};

}  // namespace
}  // namespace ktk::llamafile
