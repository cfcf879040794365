// Scales and minima of a run, from the header as f32.
//
//   one unit   | 32 scales | of groups of 16: 32 of the second half | minima, if the type has any |
#pragma once

#include "llamafile/dot.h"

namespace ktk::llamafile {
namespace {

// The shapes of arithmetic that types come in.
template <bool kHalves_, bool kMins_, bool kPairs_ = false>
struct Shape {
  static constexpr bool kHalves = kHalves_;  // a unit has two groups of 16
  static constexpr bool kMins = kMins_;
  static constexpr bool kPairs = kPairs_;  // two units meet one act scale
  static constexpr size_t kScales = kHalves ? 2 : 1;
  static constexpr size_t kParams = kNr * kScales * (kMins ? 2 : 1);  // floats of a unit
};
using Plain = Shape<false, false>;
using Mins = Shape<false, true>;
using Halves = Shape<true, false>;
using HalvesMins = Shape<true, true>;
using PairsMins = Shape<false, true, true>;
using PairsHalves = Shape<true, false, true>;  // of the types that sum runs

constexpr size_t kMaxParams = HalvesMins::kParams;

// The functions of normal.h, for a register of columns.
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
  }
  __builtin_unreachable();
}

inline Dot::Float load_dmin(const uint8_t* dmin, Dot::Float factor) {
  return Dot::mul(Dot::load_f16(reinterpret_cast<const uint16_t*>(dmin)), factor);
}

// Minima of halves come with this factor: they are multiplied with ActGroup::comp.
constexpr float kMinOfHalf = -1.0f / kOffset;

// A factor of the scales of types that sum runs, which meet d after the sum (run_sums.h). With
// 2^-20 the sum of a run is no larger than the activations, so that only d can bring the product
// out of the range of f32.
constexpr float kRunFactor = 0x1p-20f;

// All products here are exact, see normal.h.
inline void load_params(const BlockType& type, const Header& at, const uint8_t* run, size_t units,
                        float* params) {
  const bool halves = type.group == 16;
  const size_t groups = halves ? 2 : 1;                                      // of a unit
  const size_t d_step = type.d_group > kSubBlock ? 0 : d_bytes(type) * kNr;  // of a group
  const size_t unit_params = groups * kNr * (type.has_dmin ? 2 : 1);
  const Dot::Float min_factor = Dot::set1(halves ? kMinOfHalf : 1.0f);
  for (size_t c = 0; c < kNr; c += Dot::kLanes) {
    const uint8_t *of_d = run + at.d + c * d_bytes(type), *of_dmin = run + at.dmin + 2 * c;
    const uint8_t *sub = run + at.sub + c, *min = run + at.min + c;
    Dot::Float d = load_d(type, of_d), dmin{};
    if (type.has_dmin) dmin = load_dmin(of_dmin, min_factor);
    if (sums_runs(type)) d = Dot::set1(kRunFactor);
    for (size_t unit = 0; unit < units; ++unit) {
      float* to = params + unit * unit_params + c;
      for (size_t g = 0; g < groups; ++g, to += kNr) {
        if (d_step && unit + g > 0) {
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

// The same for so many units from `run` on: whole runs, and the last one of a block. Returns where
// they end.
inline const uint8_t* load_stretch_params(const BlockLayout& layout, size_t unit_params,
                                          const uint8_t* run, size_t units, float* params) {
  for (size_t count; units > 0; units -= count) {
    count = smaller(kSubBlocks, units);
    const Header& at = layout.header_of(count);
    load_params(layout.type, at, run, count, params);
    params += count * unit_params;
    run += at.end + count * sub_block_bytes(layout.type);
  }
  return run;
}

}  // namespace
}  // namespace ktk::llamafile
