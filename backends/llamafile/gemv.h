// The product of one or two rows of act, which waits for memory if it can: all units of 32 columns
// in the order of memory, with everything but weights and act in registers.
//
// It differs from a tile (gemm_tile.h) in how it comes to the same sums and the same factors. It is
// compiled for every type, converts scales and minima where a unit needs them, and multiplies codes
// as they are where the table is linear: sums are too large by offset * (sum of the act codes)
// only. The arithmetic on floats is that of gemm_tile.h, operation by operation.
//
// A run is fetched line by line in the order of memory, header first, although units read the
// header bit by bit: on Zen 4, going back and forth between it and the codes costs half of the rate
// of memory.
//
// Four bits of a linear type need no shift either: the high nibbles are multiplied where they are,
// and their sums are 16 times too large.
#pragma once

#include "gemm/weight_stream.h"
#include "ktk/backend.h"
#include "llamafile/codes.h"
#include "llamafile/run_sums.h"

namespace ktk::llamafile {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr int kGemvRows = 1;  // as in dot.h
#else
constexpr int kGemvRows = 2;
#endif
constexpr size_t kGemvAhead = 512;  // bytes, see gemm/weight_stream.h

template <size_t kType, int kRows>
class Gemv {
  using Int = Dot::Int;
  using Float = Dot::Float;

  static constexpr const BlockType& kOf = kTypes[kType];
  static constexpr int kBits = kOf.bits;
  static constexpr int kGroups = kOf.group == 16 ? 2 : 1;  // of a unit
  static constexpr bool kMins = kOf.has_dmin;
  static constexpr bool kOneD = kOf.d_group == kSuperBlock;
  static constexpr bool kSumsRuns = sums_runs(kOf);
  static constexpr size_t kSpan = pairs_units(kOf) ? 2 : 1;   // units that meet one act scale
  static constexpr bool kNibbles = kOf.linear && kBits == 4;  // multiplied where they are
  static constexpr int kCodeOffset = kOf.linear ? kOf.offset : kOffset;

  static constexpr size_t kUnitAhead = super_block_bytes(kOf, kSubBlocks) / kSubBlocks;

  // Columns of a register each.
  struct Params {
    Float scale[kGroups][kVectors], min[kGroups][kVectors];
  };
  struct Sums {
    Int sum[kGroups][kRows][kVectors];
  };

  const Codes<kBits, kOffset, kOf.linear> codes_;
  const size_t act_stride_;
  Float d_[kVectors], dmin_[kVectors];
  Float first_[kRows][kVectors], first_min_[kVectors];  // of the first unit of a pair
  Float total_[kRows][kVectors], run_total_[kRows][kVectors];

  static Float minima_of(const uint8_t* dmin) {
    const Float x = Dot::load_f16(reinterpret_cast<const uint16_t*>(dmin));
    return kGroups == 1 ? x : Dot::mul(x, Dot::set1(kMinOfHalf));
  }

  void load_ds(const uint8_t* run, const Header& at, size_t group) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const size_t column = group * kNr + v * Dot::kLanes;
      d_[v] = load_d(kOf, run + at.d + column * d_bytes(kOf));
      if constexpr (kMins) dmin_[v] = minima_of(run + at.dmin + column * 2);
    }
  }

  [[gnu::always_inline]] Params params(const uint8_t* run, const Header& at, size_t unit) {
    Params p;
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
      const size_t group = unit * kGroups + g;
      if constexpr (!kOneD) load_ds(run, at, group);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const uint8_t* of_group = run + group * kNr + v * Dot::kLanes;
        const Float d = kSumsRuns ? Dot::set1(kRunFactor) : d_[v];
        p.scale[g][v] = kOf.has_sub ? Dot::mul(d, Dot::load_i8(of_group + at.sub)) : d;
        if constexpr (kMins) {
          p.min[g][v] =
              kOf.has_min ? Dot::mul(dmin_[v], Dot::load_u8(of_group + at.min)) : dmin_[v];
        }
      }
    }
    return p;
  }

  // Where sums start: at -kCodeOffset * (sum of the act codes).
  [[gnu::always_inline]] static Int start(const ActGroup& f, int group) {
    if constexpr (kCodeOffset == 0) return Dot::set1_int(0);
    Int comp = Dot::set1_int(f.comp[group]);
    if constexpr (kGroups == 1) comp = Dot::add(comp, Dot::set1_int(f.comp[1]));
    constexpr int kShift = __builtin_ctz(kOffset) - __builtin_ctz(kCodeOffset | kOffset << 1);
    return kShift > 0 ? Dot::divide_int<kShift>(comp) : comp;
  }

  template <size_t kStep>
  [[gnu::always_inline]] void add_step(Int (&sums)[kRows][kVectors], const Int (&operand)[kVectors],
                                       const uint8_t* act) const {
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      const Int four = Dot::broadcast_row<kStep * 4>(act, act_stride_, r);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Dot::dot(sums[r][v], operand[v], four);
    }
  }

  template <size_t kStep = 0>
  [[gnu::always_inline]] void add_steps(Sums& sums, Sums& high, const uint8_t* unit,
                                        const uint8_t* act, const char* prefetch) const {
    constexpr size_t kLines = (super_block_bytes(kOf, kSubBlocks) / kSubBlocks + kLine - 1) / kLine;
    constexpr size_t kFirst = kLines * kStep / kSteps;
    constexpr size_t kEnd = kLines * (kStep + 1) / kSteps;
#pragma GCC unroll 3
    for (size_t i = kFirst; i < kEnd; ++i) prefetch_l2(prefetch + i * kLine);
    constexpr size_t kGroup = kStep * kGroups / kSteps;
    Int operand[kVectors];
    if constexpr (kNibbles) {
      if constexpr (kStep % 2 == 0) {
        Int low[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          Int row = Dot::load_bytes(unit + kStep / 2 * kPlaneBytes + v * sizeof(Int));
          asm("" : "+v"(row));  // loaded once
          low[v] = Dot::mask_bytes<0x0f>(row);
          operand[v] = Dot::mask_bytes<0xf0>(row);
        }
        add_step<kStep>(sums.sum[kGroup], low, act);
        add_step<kStep + 1>(high.sum[kGroup], operand, act);
      }
    } else {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        operand[v] = codes_.template operand<kStep>(unit + v * sizeof(Int));
      }
      add_step<kStep>(sums.sum[kGroup], operand, act);
    }
    if constexpr (kStep + 1 < kSteps) add_steps<kStep + 1>(sums, high, unit, act, prefetch);
  }

  template <size_t kOfSpan>
  [[gnu::always_inline]] void add_unit(const uint8_t* run, const Header& at, size_t unit,
                                       const uint8_t* act, const uint8_t* factors,
                                       const char* prefetch) {
    Sums sums, high;
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      const ActGroup& f = *reinterpret_cast<const ActGroup*>(factors + r * act_stride_);
#pragma GCC unroll 2
      for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          sums.sum[g][r][v] = start(f, g);
          high.sum[g][r][v] = Dot::set1_int(0);
        }
      }
    }
    add_steps(sums, high, run + at.end + unit * sub_block_bytes(kOf), act, prefetch);
    const Params p = params(run, at, unit);
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      const ActGroup& f = *reinterpret_cast<const ActGroup*>(factors + r * act_stride_);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const auto sum = [&](int g) __attribute__((always_inline)) {
          Int x = sums.sum[g][r][v];
          if constexpr (kNibbles) x = Dot::add(x, Dot::divide_int<4>(high.sum[g][r][v]));
          return Dot::convert(x);
        };
        Float& total = kSumsRuns ? run_total_[r][v] : total_[r][v];
        if constexpr (kGroups == 2 || kSpan == 2) {
          Float t = kOfSpan == 0 ? Dot::mul(sum(0), p.scale[0][v])
                                 : Dot::fma(sum(0), p.scale[0][v], first_[r][v]);
          if constexpr (kGroups == 2) t = Dot::fma(sum(1), p.scale[1][v], t);
          if constexpr (kGroups == 2 && kMins) {
            t = Dot::fma(Dot::convert(Dot::set1_int(f.comp[0])), p.min[0][v], t);
            t = Dot::fma(Dot::convert(Dot::set1_int(f.comp[1])), p.min[1][v], t);
          }
          if constexpr (kOfSpan + 1 < kSpan) {
            first_[r][v] = t;
          } else {
            total = Dot::fma(t, Dot::set1(f.scale), total);
          }
        } else {
          total = Dot::fma(Dot::mul(sum(0), Dot::set1(f.scale)), p.scale[0][v], total);
        }
        if constexpr (kMins && kGroups == 1 && kOfSpan + 1 == kSpan) {
          if constexpr (kSpan == 2) total = Dot::fma(Dot::set1((&f)[-1].sum), first_min_[v], total);
          total = Dot::fma(Dot::set1(f.sum), p.min[0][v], total);
        }
      }
    }
    if constexpr (kMins && kOfSpan + 1 < kSpan) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) first_min_[v] = p.min[0][v];
    }
  }

  // Adds the units of a span, from kOfSpan on.
  template <size_t kOfSpan = 0>
  [[gnu::always_inline]] void add_span(const uint8_t* run, const Header& at, size_t unit,
                                       const uint8_t* act, const uint8_t* factors,
                                       const WeightStream& stream, size_t ahead) {
    add_unit<kOfSpan>(run, at, unit, act, factors, stream.at(ahead / kLine));
    if constexpr (kOfSpan + 1 < kSpan) {
      add_span<kOfSpan + 1>(run, at, unit + 1, act + kSubBlock, factors + sizeof(ActGroup), stream,
                            ahead + kUnitAhead);
    }
  }

  static void clear(Float (&totals)[kRows][kVectors]) {
    for (auto& row : totals) {
      for (Float& total : row) total = Dot::set1(0);
    }
  }

  void end_run(const uint8_t* run) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Float d = load_run_d(kOf, run + v * Dot::kLanes * d_bytes(kOf));
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        total_[r][v] = Dot::fma(run_total_[r][v], d, total_[r][v]);
      }
    }
  }

 public:
  Gemv(const CodeTable& table, size_t act_stride) : codes_(table), act_stride_(act_stride) {}

  static void multiply(const ktk_matmul* mm, const CodeTable& table, const WeightStream& stream) {
    Gemv gemv(table, mm->act_stride);
    const Header full = header(kOf, kSubBlocks);
    const size_t units = num_sub_blocks(mm->matrix);
    const Header last = header(kOf, units % kSubBlocks);
    const uint8_t* run = reinterpret_cast<const uint8_t*>(stream.begin);
    float* dst = mm->dst;
    for (size_t n = mm->n_begin; n < mm->n_end; n += kNr, dst += kNr) {
      clear(gemv.total_);
      const uint8_t* act = static_cast<const uint8_t*>(mm->act);
      const uint8_t* factors = act + group_offset(mm->matrix);
      for (size_t done = 0; done < units;) {
        const size_t count = smaller(kSubBlocks, units - done);
        const Header& at = count == kSubBlocks ? full : last;
        // Units come back to the header: it is read here, or else the order of memory is broken.
        for (const uint8_t* line = run; line != run + at.end; line += kLine) prefetch_l1(line);
        if constexpr (kSumsRuns) {
          clear(gemv.run_total_);
        } else if constexpr (kOneD) {
          gemv.load_ds(run, at, 0);
        }
        size_t ahead =
            static_cast<size_t>(reinterpret_cast<const char*>(run) - stream.begin) + kGemvAhead;
        for (size_t unit = 0; unit < count; unit += kSpan) {
          gemv.add_span(run, at, unit, act, factors, stream, ahead);
          ahead += kSpan * kUnitAhead;
          act += kSpan * kSubBlock;
          factors += kSpan * sizeof(ActGroup);
        }
        if constexpr (kSumsRuns) gemv.end_run(run);
        run += at.end + count * sub_block_bytes(kOf);
        done += count;
      }
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          Dot::store(dst + r * mm->dst_stride + v * Dot::kLanes, gemv.total_[r][v]);
        }
      }
    }
  }
};

using RunGemv = void (*)(const ktk_matmul*, const CodeTable&, const WeightStream&);

// By type and rows - 1.
struct GemvTable {
  static constexpr size_t kTypeCount = sizeof(kTypes) / sizeof(kTypes[0]);
  RunGemv of[kTypeCount][kGemvRows];

  template <size_t kType = 0>
  constexpr void fill() {
    of[kType][0] = Gemv<kType, 1>::multiply;
    if constexpr (kGemvRows > 1) of[kType][1] = Gemv<kType, 2>::multiply;
    if constexpr (kType + 1 < kTypeCount) fill<kType + 1>();
  }
  constexpr GemvTable() : of{} { fill(); }
};
constexpr GemvTable kGemvTable;

inline RunGemv gemv_for(const BlockType& type, size_t rows) {
  return rows <= kGemvRows ? kGemvTable.of[&type - kTypes][rows - 1] : nullptr;
}

}  // namespace
}  // namespace ktk::llamafile
