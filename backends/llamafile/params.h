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
inline void load_params(const BlockType& type, const Header& at, const uint8_t* run, size_t units,
                        float* params) {
  const bool halves = type.group == 16;
  const size_t groups = halves ? 2 : 1;                                       // of a unit
  const size_t d_step = type.d_group > kUnit ? 0 : d_bytes(type) * kColumns;  // of a group
  const Dot::Float min_factor = Dot::set1(halves ? -1.0f / kOffset : 1.0f);
  const uint8_t *d = run + at.d, *dmin = run + at.dmin, *sub = run + at.sub, *min = run + at.min;
  for (size_t unit = 0; unit < units; ++unit) {
    for (size_t g = 0; g < groups; ++g) {
      for (size_t c = 0; c < kColumns; c += Dot::kLanes) {
        Dot::Float scale = load_d(type, d + c * d_bytes(type));
        if (type.has_sub) scale = Dot::mul(scale, Dot::load_i8(sub + c));
        Dot::store(params + g * kColumns + c, scale);
        if (!type.has_dmin) continue;
        Dot::Float value =
            Dot::mul(Dot::load_f16(reinterpret_cast<const uint16_t*>(dmin) + c), min_factor);
        if (type.has_min) value = Dot::mul(value, Dot::load_u8(min + c));
        Dot::store(params + (groups + g) * kColumns + c, value);
      }
      d += d_step;
      dmin += d_step;
      sub += kColumns;
      min += kColumns;
    }
    params += groups * kColumns * (type.has_dmin ? 2 : 1);
  }
}

}  // namespace
}  // namespace ktk::llamafile
