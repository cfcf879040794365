// Scales and minima of weights, from the header of a super-block as f32. All products here are
// exact, see gguf/normal.h.
//
//   one sub-block   | 32 scales | of groups of 16: 32 of the second half | minima, if any |
#pragma once

#include "llamafile/dot.h"
#include "llamafile/scaling.h"

namespace ktk::llamafile {
namespace {

// The functions of gguf/normal.h, for a register of n.
inline Dot::Float load_half_e8m0(const uint8_t* d) {
  const Dot::Int e = Dot::load_u8_int(d);
  // The second is larger for e < 2 only: the subnormal ones.
  return Dot::as_float(Dot::max_int(Dot::shift_left_int<23>(Dot::add(e, Dot::set1_int(-1))),
                                    Dot::shift_left_int<21>(Dot::add(e, Dot::set1_int(1)))));
}

inline Dot::Float load_half_ue4m3(const uint8_t* d) {
  const Dot::Int x = Dot::load_u8_int(d);
  const Dot::Int unsigned_x = Dot::bit_and(x, Dot::set1_int(0x7f));
  const Dot::Float normal =
      Dot::as_float(Dot::add(Dot::shift_left_int<20>(unsigned_x), Dot::set1_int(119 << 23)));
  const Dot::Float subnormal = Dot::mul(Dot::convert(unsigned_x), Dot::set1(0x1p-10f));
  const Dot::Float value = Dot::select_below(unsigned_x, 8, subnormal, normal);
  // NaN is 127, and counts as 0.
  const Dot::Float beyond = Dot::select_below(x, 128, Dot::set1(0), value);
  return Dot::select_below(x, 127, value, beyond);
}

inline Dot::Float load_d(const BlockType& type, const uint8_t* d) {
  switch (type.d_kind) {
    case DKind::kF16:
      return Dot::mul(Dot::load_f16(reinterpret_cast<const uint16_t*>(d)),
                      Dot::set1(type.constant));
    case DKind::kE8M0:
      return load_half_e8m0(d);
    case DKind::kUe4m3:
      return load_half_ue4m3(d);
    case DKind::kF32:
      return Dot::load(reinterpret_cast<const float*>(d));
  }
  __builtin_unreachable();
}

inline Dot::Float load_dmin(const uint8_t* dmin, Dot::Float factor) {
  return Dot::mul(Dot::load_f16(reinterpret_cast<const uint16_t*>(dmin)), factor);
}

// Minima of groups of 16 come with this factor: they are multiplied with ActGroup::comp.
constexpr float kMinOfHalf = -1.0f / kOffset;

// A factor of scales that meet d later. With 2^-20 the sum of a super-block is no larger than the
// activations, so that only d can bring the product out of the range of f32.
constexpr float kDeferredFactor = 0x1p-20f;

inline void load_scales(const BlockType& type, const Header& at, const uint8_t* super_block,
                        size_t sub_blocks, float* scales) {
  const Scaling scaling = scaling_of(type);
  const size_t groups = num_groups(scaling);
  const size_t d_step = type.d_group > kSubBlock ? 0 : d_bytes(type) * kNr;  // of a group
  const Dot::Float min_factor = Dot::set1(groups == 2 ? kMinOfHalf : 1.0f);
  for (size_t n = 0; n < kNr; n += Dot::kLanes) {
    const uint8_t* of_d = super_block + at.d + n * d_bytes(type);
    const uint8_t* of_dmin = super_block + at.dmin + 2 * n;
    const uint8_t *sub = super_block + at.sub + n, *min = super_block + at.min + n;
    Dot::Float d = load_d(type, of_d), dmin{};
    if (type.has_dmin) dmin = load_dmin(of_dmin, min_factor);
    if (defers_d(scaling)) d = Dot::set1(kDeferredFactor);
    for (size_t i = 0; i < sub_blocks; ++i) {
      float* to = scales + i * num_scales(scaling) + n;
      for (size_t g = 0; g < groups; ++g, to += kNr) {
        if (d_step && i + g > 0) {
          d = load_d(type, of_d += d_step);
          if (type.has_dmin) dmin = load_dmin(of_dmin += d_step, min_factor);
        }
        Dot::store(to, type.has_sub ? Dot::mul(d, Dot::load_i8(sub)) : d);
        if (type.has_dmin) {
          Dot::store(to + groups * kNr, type.has_min ? Dot::mul(dmin, Dot::load_u8(min)) : dmin);
        }
        sub += kNr;
        min += kNr;
      }
    }
  }
}

// Deferred d of a register of n; the factor is that of the scales.
inline Dot::Float load_deferred_d(const BlockType& type, const uint8_t* d) {
  return Dot::mul(load_d(type, d), Dot::set1(1 / kDeferredFactor));
}

// Deferred d of a super-block, 32 floats.
inline void load_deferred_ds(const BlockType& type, const uint8_t* super_block, float* to) {
  for (size_t n = 0; n < kNr; n += Dot::kLanes) {
    Dot::store(to + n, load_deferred_d(type, super_block + n * d_bytes(type)));
  }
}

}  // namespace
}  // namespace ktk::llamafile
