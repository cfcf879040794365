// What each block type is in the normal form: ggml's, and those that ik_llama.cpp adds to them.
// Types that are computed as floats have none (floats/blocks.h).
#pragma once

#include "llamafile/gguf/normal.h"

namespace ktk::llamafile {
namespace {

// ggml_type
enum : ktk_element {
  kQ4_0 = KTK_GGML + 2,
  kQ4_1 = KTK_GGML + 3,
  kQ5_0 = KTK_GGML + 6,
  kQ5_1 = KTK_GGML + 7,
  kQ8_0 = KTK_GGML + 8,
  kQ2_K = KTK_GGML + 10,
  kQ3_K = KTK_GGML + 11,
  kQ4_K = KTK_GGML + 12,
  kQ5_K = KTK_GGML + 13,
  kQ6_K = KTK_GGML + 14,
  kIQ2_XXS = KTK_GGML + 16,
  kIQ2_XS = KTK_GGML + 17,
  kIQ3_XXS = KTK_GGML + 18,
  kIQ1_S = KTK_GGML + 19,
  kIQ4_NL = KTK_GGML + 20,
  kIQ3_S = KTK_GGML + 21,
  kIQ2_S = KTK_GGML + 22,
  kIQ4_XS = KTK_GGML + 23,
  kIQ1_M = KTK_GGML + 29,
  kTQ1_0 = KTK_GGML + 34,
  kTQ2_0 = KTK_GGML + 35,
  kMXFP4 = KTK_GGML + 39,
  kNVFP4 = KTK_GGML + 40,
  // Of ik_llama.cpp.
  kQ6_0 = KTK_GGML + 133,
  kIQ2_K = KTK_GGML + 137,
  kIQ3_K = KTK_GGML + 138,
  kIQ4_K = KTK_GGML + 139,
  kIQ5_K = KTK_GGML + 140,
  kIQ6_K = KTK_GGML + 141,
  kIQ4_KS = KTK_GGML + 144,
  kIQ2_KS = KTK_GGML + 145,
  kIQ4_KSS = KTK_GGML + 146,
  kQ8_KV = KTK_GGML + 151,
  kIQ5_KS = KTK_GGML + 152,
  kIQ2_KT = KTK_GGML + 153,
  kIQ3_KT = KTK_GGML + 154,
  kIQ4_KT = KTK_GGML + 155,
  kIQ3_KS = KTK_GGML + 156,
  kIQ2_KL = KTK_GGML + 157,
  kIQ1_KT = KTK_GGML + 158,
};

// d * (code - offset), one d per 32 values.
constexpr BlockType plain_type(ktk_element element, uint16_t bytes, uint8_t bits, uint8_t offset) {
  return {.element = element,
          .block = 32,
          .block_bytes = bytes,
          .bits = bits,
          .offset = offset,
          .shift = 0,
          .linear = true,
          .has_sub = false,
          .has_min = false,
          .has_dmin = false,
          .group = 32,
          .d_group = 32,
          .d_kind = DKind::kF16,
          .constant = 1,
          .table = {}};
}

// d * code + dmin, of 32 values.
constexpr BlockType affine_type(ktk_element element, uint16_t bytes, uint8_t bits) {
  BlockType type = plain_type(element, bytes, bits, 0);
  type.has_dmin = true;
  return type;
}

// d * sub * (code - offset): a d per 256 values, a sub per group.
constexpr BlockType k_type(ktk_element element, uint16_t bytes, uint8_t bits, uint8_t offset,
                           uint8_t group) {
  BlockType type = plain_type(element, bytes, bits, offset);
  type.block = 256;
  type.d_group = 256;
  type.group = group;
  type.has_sub = true;
  return type;
}

// d * sub * code + dmin * min.
constexpr BlockType k_min_type(ktk_element element, uint16_t bytes, uint8_t bits, uint8_t group) {
  BlockType type = k_type(element, bytes, bits, 0, group);
  type.has_min = type.has_dmin = true;
  return type;
}

// d * (code - 1), one d per 256 values.
constexpr BlockType ternary_type(ktk_element element, uint16_t bytes) {
  BlockType type = k_type(element, bytes, 2, 1, 32);
  type.has_sub = false;
  return type;
}

struct Entries {
  int8_t value[kMostEntries];
};
constexpr BlockType with_table(BlockType type, const Entries& entries) {
  type.linear = false;
  for (size_t i = 0; i < kMostEntries; ++i) type.table[i] = entries.value[i];
  return type;
}
constexpr BlockType with_d(BlockType type, DKind kind, uint16_t block, uint8_t d_group) {
  type.block = block;
  type.group = d_group;
  type.d_group = d_group;
  type.d_kind = kind;
  return type;
}
constexpr BlockType codebook_type(ktk_element element, uint16_t bytes, uint8_t bits, uint8_t group,
                                  float constant, const Entries& entries) {
  BlockType type = with_table(k_type(element, bytes, bits, 0, group), entries);
  type.constant = constant;
  return type;
}

// d * sub * (table[code] + shift in shifted groups): an f16 d per 256 values.
constexpr BlockType shifted_type(ktk_element element, uint16_t bytes, uint8_t bits, uint8_t group,
                                 const Entries& entries, uint8_t shift) {
  BlockType type = with_table(k_type(element, bytes, bits, 0, group), entries);
  type.shift = shift;
  return type;
}
constexpr BlockType with_f32_d(BlockType type) {
  type.d_kind = DKind::kF32;
  return type;
}

constexpr Entries kNonlinear = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
// E2M1, twice.
constexpr Entries kE2m1 = {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};
// Magnitudes of the codebooks. A code is an index of a magnitude; a bit above says that it is
// negative.
constexpr Entries kIq2 = {{8, 25, 43, 0, -8, -25, -43}};
constexpr Entries kIq3xxs = {
    {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62}};
constexpr Entries kIq3s = {{1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15}};
// -1, 0, 1 with 1/8 added (codes 0 to 2) or taken away (4 to 6), in eighths.
constexpr Entries kIq1 = {{-7, 1, 9, 0, -9, -1, 7}};

// Of ik_llama.cpp.
constexpr Entries kIk2 = {{-31, -13, 1, 17}};
constexpr Entries kIk3 = {{-63, -40, -23, -10, 1, 13, 28, 47}};
constexpr Entries kIk5 = {{-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36,
                           -30,  -24,  -18,  -12, -6,  -1,  5,   11,  17,  23,  29,
                           36,   43,   51,   59,  68,  77,  87,  97,  109, 121}};

constexpr BlockType kTypes[] = {
    plain_type(kQ4_0, 18, 4, 8),
    affine_type(kQ4_1, 20, 4),
    plain_type(kQ5_0, 22, 5, 16),
    affine_type(kQ5_1, 24, 5),
    plain_type(kQ8_0, 34, 8, 128),
    k_min_type(kQ2_K, 84, 2, 16),
    k_type(kQ3_K, 110, 3, 4, 16),
    k_min_type(kQ4_K, 144, 4, 32),
    k_min_type(kQ5_K, 176, 5, 32),
    k_type(kQ6_K, 210, 6, 32, 16),
    with_table(plain_type(kIQ4_NL, 18, 4, 0), kNonlinear),
    with_table(k_type(kIQ4_XS, 136, 4, 0, 32), kNonlinear),
    with_d(with_table(plain_type(kMXFP4, 17, 4, 0), kE2m1), DKind::kE8M0, 32, 32),
    with_d(with_table(plain_type(kNVFP4, 36, 4, 0), kE2m1), DKind::kUe4m3, 64, 16),
    ternary_type(kTQ1_0, 54),
    ternary_type(kTQ2_0, 66),
    codebook_type(kIQ1_S, 50, 3, 32, 0.125f, kIq1),
    codebook_type(kIQ1_M, 56, 3, 16, 0.125f, kIq1),
    codebook_type(kIQ2_XXS, 66, 3, 32, 0.125f, kIq2),
    codebook_type(kIQ2_XS, 74, 3, 16, 0.125f, kIq2),
    codebook_type(kIQ2_S, 82, 3, 16, 0.125f, kIq2),
    codebook_type(kIQ3_XXS, 98, 4, 32, 0.25f, kIq3xxs),
    codebook_type(kIQ3_S, 110, 4, 32, 1, kIq3s),
    shifted_type(kIQ2_K, 76, 2, 16, kIk2, 5),
    shifted_type(kIQ3_K, 110, 3, 16, kIk3, 4),
    shifted_type(kIQ4_K, 144, 4, 16, kNonlinear, 4),
    shifted_type(kIQ5_K, 176, 5, 16, kIk5, 2),
    shifted_type(kIQ2_KS, 72, 2, 32, kIk2, 5),
    shifted_type(kIQ3_KS, 104, 3, 32, kIk3, 4),
    with_f32_d(shifted_type(kIQ4_KS, 140, 4, 32, kNonlinear, 4)),
    with_f32_d(shifted_type(kIQ4_KSS, 132, 4, 32, kNonlinear, 4)),
    with_f32_d(shifted_type(kIQ5_KS, 172, 5, 32, kIk5, 2)),
    codebook_type(kIQ2_KL, 88, 3, 32, 1, kIk3),
    plain_type(kQ6_0, 26, 6, 32),
    with_f32_d(plain_type(kQ8_KV, 36, 8, 128)),
};

// Where the types are in the table, by the number that ggml gives them.
struct TypeIndex {
  uint8_t at[192];

  constexpr TypeIndex() : at{} {
    uint8_t i = 0;
    for (const BlockType& type : kTypes) at[type.element - KTK_GGML] = i++;
  }
};
constexpr TypeIndex kTypeIndex;

// Of an element that is in the table.
constexpr const BlockType& block_type(ktk_element element) {
  return kTypes[kTypeIndex.at[element - KTK_GGML]];
}

}  // namespace
}  // namespace ktk::llamafile
