// Weights for products in pairs of int16 (gemm_i16.h), in scratch: operands, and the scales that
// their sums meet; and the bound that says whether sums fit.
//
//   scratch   | operands of up to eight super-blocks | their scales |
//
//   scales    | sub 0, sub 1 of 32 n | the same of sub-blocks 1 to 7 | d of 32 n, f32 |
#pragma once

#include "llamafile/kernel.h"
#include "llamafile/operands.h"
#include "llamafile/weight_scales.h"

namespace ktk::llamafile {
namespace {

// Whether sums of a type fit, as a rule. Values up to 43 (IQ2_XS, IQ2_S) make most of them too
// large for the bound.
constexpr bool fits_i16(const BlockType& type) {
  int largest = type.linear ? type.offset : 0;
  for (const int value : type.table) {
    const int size = value < 0 ? -value : value + type.shift;
    largest = largest < size ? size : largest;
  }
  return defers_d(scaling_of(type)) && largest <= 32;
}

// Tiles read operands from L2 as fast as from L1, and take time to begin and to end: 8 super-blocks
// instead of 3 give 2 %.
constexpr size_t kI16Slabs = 8;
constexpr size_t kI16Scales = (kSubBlocks + 1) * kNr;  // of a super-block
constexpr size_t kI16Operands = kI16Slabs * kSubBlocks * kOperandBytes;
constexpr size_t kI16Scratch = kI16Operands + kI16Slabs * kI16Scales * sizeof(int32_t);

// A SquaredNorm for each sub-block of a super-block.
struct alignas(8) Norms {
  SquaredNorm of_sub_block[kSubBlocks];
};

inline __m128i load_norms(const void* norms) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(norms));
}
inline void store_norms(Norms* to, __m128i norms) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), norms);
}

// Of every super-block of a tile of rows the greatest norms: all columns ask for them.
inline size_t tile_norms_size(const ktk_matrix* matrix, size_t tiles) {
  return tiles * (num_sub_blocks(matrix) / kSubBlocks) * sizeof(Norms);
}
inline void write_tile_norms(const ktk_matmul* mm, size_t tiles, size_t slabs, Norms* to) {
  const char* const norms = static_cast<const char*>(mm->act) + norm_offset(mm->matrix);
  for (size_t i = 0; i < tiles; ++i) {
    const size_t row = mm->m * i / tiles, row_end = mm->m * (i + 1) / tiles;
    for (size_t slab = 0; slab < slabs; ++slab) {
      const char* const of_slab = norms + slab * sizeof(Norms);
      __m128i largest = load_norms(of_slab + row * mm->act_stride);
      for (size_t r = row + 1; r < row_end; ++r) {
        largest = _mm_max_epu8(largest, load_norms(of_slab + r * mm->act_stride));
      }
      store_norms(to + i * slabs + slab, largest);
    }
  }
}

// The bound of Cauchy and Schwarz: |sum of w * a| <= |w| * |a|, so that the sum of a group fits
// int16 where the squared norm of the weights times that of the activations is at most 32767^2.
// Returns the largest norms of activations for which it does, beside weights of these squared
// norms.
inline Norms largest_norms_that_fit_i16(const int32_t (&weights)[kSubBlocks]) {
  // Rounded down, with room for the error of the division.
  const __m256 quotient = _mm256_div_ps(
      _mm256_set1_ps(32767.0f * 32767.0f / kNormUnit * (1 - 0x1p-20f)),
      _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights))));
  const __m256i limits =
      _mm256_min_epi32(_mm256_cvttps_epi32(quotient), _mm256_set1_epi32(kNoNorm - 1));
  Norms result;
  store_norms(&result, _mm256_cvtepi32_epi8(limits));
  return result;
}

inline bool sums_fit_i16(const Norms& act, const Norms& limits) {
  const __m128i beyond = _mm_subs_epu8(load_norms(&act), load_norms(&limits));
  return _mm_testz_si128(beyond, beyond);
}

// Writes operands of a super-block. Returns what norms of activations may be.
template <Kind kKind>
Norms write_i16_operands(const CodeTable& table, const uint8_t* super_block, const Header& at,
                         uint8_t* to) {
  static_assert(Dot::kWeightOffset == kOffset);
  const Codes<kKind.bits, kKind.has_table> codes(table);
  const Shifts shifts(table, super_block, at);
  const uint8_t* sub_block = super_block + at.end;
  int32_t squares[kSubBlocks];
  size_t group = 0;
  for (int32_t& of_sub_block : squares) {
    Dot::Int largest = Dot::set1_int(1);
#pragma GCC unroll 2
    for (size_t byte = 0; byte < kPlaneBytes; byte += sizeof(Dot::Int)) {
      Dot::Int of_half[2] = {Dot::set1_int(0), Dot::set1_int(0)};
      Dot::Int shift[2];
      if constexpr (kKind.has_shifts) {
        shift[0] = shifts.of(group, byte / 4);
        shift[1] = shifts.of(group + 1, byte / 4);
      }
      unroll<kSteps>([&]<size_t kStep>() __attribute__((always_inline)) {
        Dot::Int operand = codes.template operand<kStep>(sub_block + byte);
        if constexpr (kKind.has_shifts) {
          operand = Dot::add_bytes(operand, shift[2 * kStep / kSteps]);
        }
        Dot::store_bytes(to + byte + kStep * kPlaneBytes, operand);
        const Dot::Int size = _mm512_abs_epi8(_mm512_xor_si512(operand, Dot::set1_byte(kOffset)));
        Dot::Int& sum = of_half[2 * kStep / kSteps];
        sum = Dot::dot(sum, size, size);
      });
      largest = _mm512_max_epi32(largest, _mm512_max_epi32(of_half[0], of_half[1]));
    }
    of_sub_block = _mm512_reduce_max_epi32(largest);
    sub_block += kKind.bits * kPlaneBytes;
    group += 2;
    to += kOperandBytes;
  }
  return largest_norms_that_fit_i16(squares);
}

// Pairs of subs of the two halves of a sub-block, then d.
inline void write_i16_scales(const BlockType& type, const Header& at, const uint8_t* super_block,
                             int32_t* to) {
  const uint8_t* sub = super_block + at.sub;
  for (size_t i = 0; i < kSubBlocks; ++i, sub += 2 * kNr, to += kNr) {
    for (size_t n = 0; n < kNr; n += Dot::kLanes) {
      const Dot::Int low = _mm512_cvtepi8_epi32(load_bytes(sub + n));
      const Dot::Int high = _mm512_cvtepi8_epi32(load_bytes(sub + kNr + n));
      Dot::store_bytes(to + n,
                       _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_slli_epi32(high, 16)));
    }
  }
  for (size_t n = 0; n < kNr; n += Dot::kLanes) {
    Dot::store(reinterpret_cast<float*>(to) + n,
               load_d(type, super_block + at.d + n * d_bytes(type)));
  }
}

}  // namespace
}  // namespace ktk::llamafile
