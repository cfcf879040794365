// How many steps of products a word can sum (word_tile.h), where weights are unsigned:
//
//   operand    table[code] - (the least entry): from 0 to r
//   word       the sum of s steps of two products: within 254 r s <= 32767
//
//     r     s    types
//     15    8    Q4_K, Q4_1; Q2_K, which has r = 3 and groups of 4 steps
//     32    4    Q5_K, Q5_0, Q5_1, Q4_0, Q3_K, MXFP4, NVFP4, IQ3_S, IQ1_S, IQ1_M, TQ1_0, TQ2_0
//     64    2    Q6_K, Q6_0, IQ2_K, IQ2_KS
//     129   1    IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_K, IQ3_KS, IQ2_KL
//     more       Q8_0, Q8_KV, IQ4_*, IQ5_*: weights have to be signed
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

// Steps whose products a word can sum; 0: weights have to be signed, and words are of one step.
constexpr int word_steps(const BlockType& type) {
  const Range range = entries_of(type);
  int steps = type.group == kSubBlock && type.has_dmin ? 8 : 4;  // few kinds, little code
  while (2 * 127 * (range.most - range.least) * steps > INT16_MAX) steps /= 2;
  return steps;
}
// What tables are moved up by.
constexpr int table_offset(const BlockType& type) {
  return word_steps(type) == 0 ? 0 : -entries_of(type).least;
}

// Whether codes are operands as they are: the least one is 0 where they have no table.
template <Kind kKind, int kWordSteps>
constexpr bool are_words =
    kWordSteps > 0 && (has_min(kKind.scaling) || (kKind.bits > 4 && !kKind.has_table));

}  // namespace
}  // namespace ktk::llamafile
