// What becomes of integer sums: the one place where micro-kernels round. All of a variant's
// micro-kernels give a row the same bits because all of them call this, in the order of k.
//
//   begin       where the sum of a group starts
//   add_group   t: sums of a sub-block times their scales, added to those of the sub-block before
//               it where two share an act scale
//   finish      dst + t * act scale, and minima
//   apply_d     dst + d * (what a super-block has come to), where d is deferred
//
// In registers of columns, for one row each, with fma(a, b, c) = a * b + c rounded once:
//
//               k32, k32Min                       the others
//   t           sum * act scale                   sum 0 * scale 0, then fma(sum i, scale i, t)
//                                                 k16Min: then fma(sum of codes i, min i, t)
//   dst         fma(t, scale, dst)                fma(t, act scale, dst)
//               k32Min, k32MinAct64: before that fma(sum of activations, min, dst) for each
//               sub-block, which waits for no product
#pragma once

#include "gemm/compiler.h"
#include "llamafile/weight_scales.h"

namespace ktk::llamafile {
namespace {

template <Scaling kScaling>
struct Epilogue {
  using Int = Dot::Int;
  using Float = Dot::Float;
  static constexpr int kGroups = num_groups(kScaling);
  static constexpr int kSpan = act_span(kScaling);
  static constexpr bool kMins = has_min(kScaling);
  static constexpr bool kScalesFirst = kGroups == 2 || kSpan == 2;  // before the act scale

  // Operands are table[code] + kCodeOffset, which makes sums too large by kCodeOffset * (sum of the
  // act codes): they start that much below zero.
  template <int kCodeOffset>
  [[gnu::always_inline]] static Int begin(const ActGroup& act, int group) {
    if constexpr (kCodeOffset == 0) {
      return Dot::set1_int(0);
    } else {
      Int start = Dot::set1_int(act.comp[group]);
      if constexpr (kGroups == 1) start = Dot::add(start, Dot::set1_int(act.comp[1]));
      if constexpr (kCodeOffset != kOffset) {
        start = Dot::divide_int<__builtin_ctz(kOffset / kCodeOffset)>(start);
      }
      return start;
    }
  }

  // t with the sum of one group, which is the first that meets an act scale or not.
  [[gnu::always_inline]] static Float add_sum(bool is_first, Float t, Float sum, Float scale) {
    return is_first ? Dot::mul(sum, scale) : Dot::fma(sum, scale, t);
  }

  // sum(group), scale(group) and min(group) are those of a sub-block, `before` is the t of the one
  // before it unless it is the first that meets an act scale.
  template <class Sum, class Scale, class Min>
  [[gnu::always_inline]] static Float add_group(bool is_first, Float before, const ActGroup& act,
                                                Sum sum, Scale scale, Min min) {
    if constexpr (!kScalesFirst) {
      return Dot::mul(sum(0), Dot::set1(act.scale));
    } else {
      Float t = add_sum(is_first, before, sum(0), scale(0));
      if constexpr (kGroups == 2) t = add_mins(add_sum(false, t, sum(1), scale(1)), act, min);
      return t;
    }
  }

  // Minima of the groups of a sub-block, where they are inside the brackets (scaling.h).
  template <class Min>
  [[gnu::always_inline]] static Float add_mins(Float t, const ActGroup& act, Min min) {
    if constexpr (kGroups == 2 && kMins) {
      t = Dot::fma(Dot::convert(Dot::set1_int(act.comp[0])), min(0), t);
      t = Dot::fma(Dot::convert(Dot::set1_int(act.comp[1])), min(1), t);
    }
    return t;
  }

  // `act` is of the last sub-block; first_min() is the minimum of the first where there are two.
  template <class Scale, class Min, class FirstMin>
  [[gnu::always_inline]] static Float finish(Float t, const ActGroup& act, Float dst, Scale scale,
                                             Min min, FirstMin first_min) {
    if constexpr (kMins && kGroups == 1) {
      if constexpr (kSpan == 2) dst = Dot::fma(Dot::set1((&act)[-1].sum), first_min(), dst);
      dst = Dot::fma(Dot::set1(act.sum), min(0), dst);
    }
    return Dot::fma(t, kScalesFirst ? Dot::set1(act.scale) : scale(0), dst);
  }

#if defined(__AVX512F__)
  // The same without minima. Not Dot::fma: gcc 12 moves dst to another register.
  [[gnu::always_inline]] static void finish(Float t, const ActGroup& act, Float& dst) {
    static_assert(kScalesFirst && !kMins);
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(dst) : "v"(t), "m"(act.scale));
  }
#endif

  [[gnu::always_inline]] static Float apply_d(Float sum, Float d, Float dst) {
    static_assert(defers_d(kScaling));
    return Dot::fma(sum, d, dst);
  }
};

// dst += d * sums of a super-block, or dst = d * sums, for a tile in registers.
template <int kRows>
[[gnu::always_inline]] inline void add_deferred(const Dot::Float (&sums)[kRows][kVectors],
                                                const float* d, bool is_first, float* dst,
                                                size_t dst_stride) {
  Dot::Float of_n[kVectors];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) of_n[v] = Dot::load(d + v * Dot::kLanes);
  dst = hidden(dst);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, dst += dst_stride) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      float* to = dst + v * Dot::kLanes;
      Dot::Float before = Dot::set1(0);
      if (!is_first) before = Dot::load(to);
      Dot::store(to, Epilogue<Scaling::k16Act64>::apply_d(sums[r][v], of_n[v], before));
    }
  }
}

// dst += d * sums, for rows of 32 n in memory.
inline void add_deferred(const float* d, const float* sums, size_t rows, float* dst,
                         size_t dst_stride) {
  for (size_t n = 0; n < kNr; n += Dot::kLanes) {
    const Dot::Float of_n = Dot::load(d + n);
    for (size_t r = 0; r < rows; ++r) {
      float* to = dst + r * dst_stride + n;
      const Dot::Float sum = Dot::load(sums + r * kNr + n);
      Dot::store(to, Epilogue<Scaling::k16Act64>::apply_d(sum, of_n, Dot::load(to)));
    }
  }
}
inline void add_deferred(const BlockType& type, const uint8_t* super_block, const float* sums,
                         size_t rows, float* dst, size_t dst_stride) {
  alignas(kLine) float d[kNr];
  load_deferred_ds(type, super_block, d);
  add_deferred(d, sums, rows, dst, dst_stride);
}

inline void clear_rows(float* dst, size_t dst_stride, size_t rows) {
  for (size_t r = 0; r < rows; ++r, dst += dst_stride) {
    for (size_t n = 0; n < kNr; n += Dot::kLanes) Dot::store(dst + n, Dot::set1(0));
  }
}

}  // namespace
}  // namespace ktk::llamafile
