// Where the scales of a type are applied: per how many values, weights and activations.
//
// "sum" is the integer sum of products of one group, "act scale" the scale of as many activations:
//
//             dst += ...                                                          types
//   k32       sum * act scale * scale                             Q4_0, Q8_0, IQ4_XS, IQ4_KS ...
//   k32Min    the same, + (sum of activations) * min                                  Q4_1, Q5_1
//   k16       (sum 0 * scale 0 + sum 1 * scale 1) * act scale                              NVFP4
//   k16Min    the same, with both minima inside the brackets                                Q2_K
//
// In K-quants and IQ types one d spans 256 values, and applying scales is a large part of the
// product. One act scale then spans 64 values, two sub-blocks:
//
//   k32MinAct64   (sum 0 * scale 0 + sum 1 * scale 1) * act scale + minima        Q4_K, Q5_K
//   k16Act64      d * sum over 256 of (sum 0 * sub 0 + ... sum 3 * sub 3) * act scale
//                                              Q3_K, Q6_K, IQ1_M, IQ2_XS, IQ2_S, IQ2_K to IQ5_K
//
// What is in the brackets of k16Act64 is an integer. Where the four sums fit 16 bits it is at most
// 2^24, and any way to compute it is right: in floats, or in pairs of int16 (gemm_i16.h). With d in
// it, it would have to be rounded.
#pragma once

#include "llamafile/gguf/layout.h"

namespace ktk::llamafile {
namespace {

enum class Scaling : uint8_t { k32, k32Min, k16, k16Min, k32MinAct64, k16Act64 };

constexpr Scaling scaling_of(const BlockType& type) {
  if (type.group == 16) {
    if (type.has_dmin) return Scaling::k16Min;
    return type.has_sub ? Scaling::k16Act64 : Scaling::k16;
  }
  if (!type.has_dmin) return Scaling::k32;
  return type.d_group == kSuperBlock ? Scaling::k32MinAct64 : Scaling::k32Min;
}

// Groups of a sub-block.
constexpr int num_groups(Scaling s) {
  return s == Scaling::k16 || s == Scaling::k16Min || s == Scaling::k16Act64 ? 2 : 1;
}
constexpr bool has_min(Scaling s) {
  return s == Scaling::k32Min || s == Scaling::k16Min || s == Scaling::k32MinAct64;
}
// Sub-blocks that share an act scale.
constexpr int act_span(Scaling s) {
  return s == Scaling::k32MinAct64 || s == Scaling::k16Act64 ? 2 : 1;
}
// Whether products of a super-block are summed before they meet d.
constexpr bool defers_d(Scaling s) { return s == Scaling::k16Act64; }

// Scales and minima of a sub-block of 32 n, as f32 (weight_scales.h).
constexpr size_t num_scales(Scaling s) { return kNr * num_groups(s) * (has_min(s) ? 2 : 1); }
constexpr size_t kMostScales = num_scales(Scaling::k16Min);

// What kernels for many rows are compiled for: types of one kind differ in numbers only.
struct Kind {
  int bits;
  Scaling scaling;
  bool has_table;   // of more than four bits: those of up to four have one in any case
  bool has_shifts;  // of groups
};

constexpr Kind kind_of(const BlockType& type) {
  return {type.bits, scaling_of(type), type.bits > 4 && !type.linear, type.shift != 0};
}

constexpr size_t kNumTypes = sizeof kTypes / sizeof *kTypes;

// Something for each type: the only way from a type to code that is compiled for it.
template <class T>
struct TypeTable {
  T of[kNumTypes];
  constexpr const T& operator[](const BlockType& type) const { return of[&type - kTypes]; }
};

template <size_t kType, class Table, class Choose>
constexpr void fill_types(Table& table, Choose choose) {
  table.of[kType] = choose.template operator()<kType>();
  if constexpr (kType > 0) fill_types<kType - 1>(table, choose);
}

// type_table([]<size_t kType> { return &multiply<kind_of(kTypes[kType])>; })
template <class Choose>
constexpr auto type_table(Choose choose) {
  TypeTable<decltype(choose.template operator()<0>())> table = {};
  fill_types<kNumTypes - 1>(table, choose);
  return table;
}

}  // namespace
}  // namespace ktk::llamafile
