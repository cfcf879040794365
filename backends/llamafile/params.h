// Scales and minima of a run, from the header as f32.
//
//   one unit   | 32 scales | of groups of 16: 32 of the second half | minima, if the type has any |
#pragma once

#include "llamafile/dot.h"

namespace ktk::llamafile {
namespace {

// The shapes of arithmetic that types come in.
template <bool kHalves_, bool kMins_>
struct Shape {
  static constexpr bool kHalves = kHalves_;  // a unit has two groups of 16
  static constexpr bool kMins = kMins_;
  static constexpr size_t kScales = kHalves ? 2 : 1;
  static constexpr size_t kParams = kColumns * kScales * (kMins ? 2 : 1);  // floats of a unit
};

constexpr size_t kMaxParams = Shape<true, true>::kParams;

inline Dot::Float load_d(const BlockType& type, const uint8_t* d) {
  if (type.d_kind == DKind::kF16) {
    return Dot::mul(Dot::load_f16(reinterpret_cast<const uint16_t*>(d)), Dot::set1(type.constant));
  }
  float values[Dot::kLanes];
  for (int i = 0; i < Dot::kLanes; ++i) {
    values[i] = type.d_kind == DKind::kE8M0 ? f32_from_half_e8m0(d[i]) : f32_from_half_ue4m3(d[i]);
  }
  return Dot::load(values);
}

// All products here are exact, see normal.h. Minima of halves come with -1 / kOffset: they are
// multiplied with Factor::comp.
inline void load_params(const BlockType& type, const uint8_t* run, size_t units, float* params) {
  const Header at = header(type, units);
  const size_t groups = kUnit / type.group;  // of a unit
  const Dot::Float min_factor = Dot::set1(groups == 2 ? -1.0f / kOffset : 1.0f);
  for (size_t g = 0; g < units * groups; ++g) {
    const size_t i = g * type.group / type.d_group;
    float* to =
        params + g % groups * kColumns + g / groups * kColumns * groups * (type.has_dmin ? 2 : 1);
    for (size_t c = 0; c < kColumns; c += Dot::kLanes) {
      const size_t at_d = i * kColumns + c, at_g = g * kColumns + c;
      Dot::Float scale = load_d(type, run + at.d + at_d * d_bytes(type));
      if (type.has_sub) scale = Dot::mul(scale, Dot::load_i8(run + at.sub + at_g));
      Dot::store(to + c, scale);
      if (!type.has_dmin) continue;
      Dot::Float min = Dot::mul(
          Dot::load_f16(reinterpret_cast<const uint16_t*>(run + at.dmin) + at_d), min_factor);
      if (type.has_min) min = Dot::mul(min, Dot::load_u8(run + at.min + at_g));
      Dot::store(to + groups * kColumns + c, min);
    }
  }
}

}  // namespace
}  // namespace ktk::llamafile
