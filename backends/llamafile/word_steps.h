// Types whose operands are small enough for sums of words (word_tile.h), and how many steps these
// have:
//
//   operand    table[code] - (the least entry): from 0 to r
//   word       the sum of s steps of two products: within 254 r s <= 32767
//
//     r     s    types
//     15    8    Q4_K, Q4_1; Q2_K, which has r = 3 and groups of 4 steps
//     32    4    Q5_K, Q5_0, Q5_1, Q4_0, Q3_K, MXFP4, NVFP4, IQ3_S, IQ1_S, IQ1_M, TQ1_0, TQ2_0
//     64    2    Q6_K, Q6_0, IQ2_K, IQ2_KS
//     more       none: signed weights
#pragma once

#include "llamafile/operands.h"

namespace ktk::llamafile {
namespace {

struct Range {
  int least, most;
};
constexpr Range entries_of(const BlockType& type) {
  const int entries = 1 << type.bits;
  if (type.linear) return {-type.offset, entries - 1 - type.offset};
  Range range = {0, 0};
  for (int i = 0; i < entries; ++i) {
    range.least = type.table[i] < range.least ? type.table[i] : range.least;
    range.most = type.table[i] > range.most ? type.table[i] : range.most;
  }
  range.most += type.shift;
  return range;
}

// Steps whose products a word can sum; 0: weights have to be signed.
constexpr int word_steps(const BlockType& type) {
  const Range range = entries_of(type);
  int steps = type.group == kSubBlock && type.has_dmin ? 8 : 4;  // few kinds, little code
  while (2 * 127 * (range.most - range.least) * steps > INT16_MAX) steps /= 2;
  return steps < 2 ? 0 : steps;
}

// Whether codes are operands as they are: the least one is 0 where they have no table.
template <Kind kKind>
constexpr bool are_words = has_min(kKind.scaling) || (kKind.bits > 4 && !kKind.has_table);

// Types of a kind, as far as their words are of as many steps, differ in tables; here also in the
// numbers of a header, or not.
constexpr bool have_same_header(const BlockType& a, const BlockType& b) {
  return a.has_sub == b.has_sub && a.has_min == b.has_min && a.has_dmin == b.has_dmin &&
         a.group == b.group && a.d_group == b.d_group && a.d_kind == b.d_kind &&
         a.constant == b.constant;
}
// The number of a type that stands for the headers of them all; kNumTypes if there is none.
template <Kind kKind, int kWordSteps>
constexpr size_t common_header() {
  size_t found = kNumTypes;
  for (size_t i = 0; i < kNumTypes; ++i) {
    const BlockType& type = kTypes[i];
    const Kind kind = kind_of(type);
    if (kind.bits != kKind.bits || kind.scaling != kKind.scaling ||
        kind.has_table != kKind.has_table || kind.has_shifts != kKind.has_shifts ||
        word_steps(type) != kWordSteps) {
      continue;
    }
    if (found < kNumTypes && !have_same_header(kTypes[found], type)) return kNumTypes;
    found = i;
  }
  return found;
}

}  // namespace
}  // namespace ktk::llamafile
