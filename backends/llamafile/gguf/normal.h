// The normal form of block types, ggml's and ik_llama.cpp's: what 256 values of one weight row (one
// n, 256 of k) are, whatever order of bits a type keeps them in. Decoders (blocks/) write the
// normal form; packing and unpacking know nothing else.
//
//   value(k) = d * constant * sub * (table[code] + shift) + dmin * min
//
//   code   one per value, less than 2^bits
//   table  code - offset, or up to 32 entries
//   shift  0 or, in groups that are shifted, a small integer of the type
//   sub    an integer per `group` values: ggml's sub-scale; 1 where the type has none
//   min    an integer per `group` values, of types with minima; 1 where only dmin changes
//   d      per `d_group` values, in the bits of the file: f16, f32, E8M0 or UE4M3
//   dmin   f16 per `d_group` values, with the sign that makes it a term to add
//
// constant is a power of two, and d has no more than 11 significant bits, sub and table together
// no more than 13: the first product is exact in f32 in any order. So is dmin * min. What is left
// is one rounding, of the sum, and none in types without mins. That makes values() equal, bit by
// bit, to every decoder that rounds after each operation, and to those that use FMA.
//
// Where d is f32 (types of ik_llama.cpp), d * sub is rounded, and then its product with the integer
// in brackets: ik_llama.cpp's order.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "ktk/abi.h"
#include "simd/f16.h"

namespace ktk::llamafile {
namespace {

constexpr size_t kSuperBlock = 256;  // values of ggml's largest blocks
constexpr size_t kSmallestGroup = 16;

enum class DKind : uint8_t { kF16, kE8M0, kUe4m3, kF32 };
constexpr size_t kMostEntries = 32;  // of a table

struct BlockType {
  ktk_element element;
  uint16_t block;  // values
  uint16_t block_bytes;
  uint8_t bits;
  uint8_t offset;  // of a linear table
  uint8_t shift;   // of shifted groups; 0: there are none
  bool linear;
  bool has_sub;  // otherwise all are 1
  bool has_min;  // otherwise all are 1, if there is a dmin at all
  bool has_dmin;
  uint8_t group;     // 16 or 32: values with one sub and one min
  uint16_t d_group;  // 16, 32 or 256: values with one d and one dmin
  DKind d_kind;
  float constant;
  int8_t table[kMostEntries];  // zeros behind the last entry
};

// Up to 256 values of a weight row. Decoders write no more than the whole blocks that they are
// given.
struct SuperBlock {
  alignas(64) uint8_t code[kSuperBlock];
  int8_t sub[kSuperBlock / kSmallestGroup];
  uint8_t min[kSuperBlock / kSmallestGroup];
  uint16_t shifted;                          // bit g is set if group g is
  uint32_t d[kSuperBlock / kSmallestGroup];  // bits, zero-extended
  uint16_t dmin[kSuperBlock / 32];
};

// 2^(e - 128): half of what OCP says, because the table has twice the values. No NaN.
inline float f32_from_half_e8m0(uint8_t e) {
  const uint32_t bits = e < 2 ? 0x200000u << e : static_cast<uint32_t>(e - 1) << 23;
  return __builtin_bit_cast(float, bits);
}

// Half of an unsigned E4M3, for the same reason. The sign is ignored and NaN (without sign) is 0.
inline float f32_from_half_ue4m3(uint8_t x) {
  const uint32_t exponent = x >> 3 & 15, mantissa = x & 7;
  if (x == 0x7f) return 0;
  if (exponent == 0) return static_cast<float>(mantissa) * 0x1p-10f;
  return __builtin_bit_cast(float, (exponent + 119) << 23 | mantissa << 20);
}

// d times the constant of the type.
inline float d_value(const BlockType& type, uint32_t d) {
  switch (type.d_kind) {
    case DKind::kF16:
      return f32_from_f16(static_cast<uint16_t>(d)) * type.constant;
    case DKind::kE8M0:
      return f32_from_half_e8m0(static_cast<uint8_t>(d));
    case DKind::kUe4m3:
      return f32_from_half_ue4m3(static_cast<uint8_t>(d));
    case DKind::kF32:
      return __builtin_bit_cast(float, d);
  }
  __builtin_unreachable();
}

// Sixteen values of one group. Products from left to right: a zero keeps the sign that it has in
// ggml's formulas.
template <bool kLinear>
inline void group_values(const BlockType& type, const float* table, float scale, float min,
                         const uint8_t* code, float* out) {
  const int offset = type.offset;
  for (size_t i = 0; i < kSmallestGroup; ++i) {
    out[i] = scale * (kLinear ? static_cast<float>(code[i] - offset) : table[code[i]]) + min;
  }
}

// The first `depth` values, a multiple of the block.
inline void values(const BlockType& type, const SuperBlock& from, size_t depth, float* out) {
  float tables[2][kMostEntries];  // as it is, and shifted
  for (size_t i = 0; i < kMostEntries; ++i) {
    tables[0][i] = static_cast<float>(type.table[i]);
    tables[1][i] = static_cast<float>(type.table[i] + type.shift);
  }
  for (size_t i = 0; i < depth; i += kSmallestGroup) {
    const size_t d = i / type.d_group, g = i / type.group;
    const float scale = d_value(type, from.d[d]) * static_cast<float>(from.sub[g]);
    float min = -0.0f;  // which changes no sum, not even one of zeros
    if (type.has_dmin) min = f32_from_f16(from.dmin[d]) * static_cast<float>(from.min[g]);
    const auto write = type.linear ? group_values<true> : group_values<false>;
    write(type, tables[from.shifted >> g & 1], scale, min, from.code + i, out + i);
  }
}

}  // namespace
}  // namespace ktk::llamafile
