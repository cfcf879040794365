// The product of one or two rows of act, which waits for memory if it can: all of k in the order of
// memory, with everything but weights and act in registers.
//
// It differs from a tile (gemm_tile.h) in how it comes to the same sums and the same scales. It is
// compiled for every type, converts scales and minima where a sub-block needs them, and multiplies
// codes as they are where the table is linear: sums are too large by offset * (sum of the act
// codes) only. Four bits of a linear type need no shift either: the high nibbles are multiplied
// where they are, and their sums are 16 times too large. Shifts of groups are no part of operands
// here, but of the numbers that sums begin with.
//
// A super-block is fetched line by line in the order of memory, header first, although sub-blocks
// read the header bit by bit: on Zen 4, going back and forth between it and the codes costs half of
// the rate of memory.
#pragma once

#include "llamafile/epilogue.h"
#include "llamafile/kernel.h"
#include "llamafile/operands.h"

namespace ktk::llamafile {
namespace {

template <size_t kType, int kRows>
class Gemv : public KernelBase {
  using Int = Dot::Int;
  using Float = Dot::Float;

  static constexpr const BlockType& kOf = kTypes[kType];
  static constexpr Scaling kScaling = scaling_of(kOf);
  using E = Epilogue<kScaling>;
  static constexpr int kBits = kOf.bits;
  static constexpr int kGroups = E::kGroups;
  static constexpr bool kHasOneD = kOf.d_group == kSuperBlock;
  static constexpr bool kNibbles = kOf.linear && kBits == 4;  // multiplied where they are
  static constexpr int kCodeOffset = kOf.linear ? kOf.offset : kOffset;
  static constexpr size_t kBytes = super_block_bytes(kOf, kSubBlocks);
  using Operands = Codes<kBits, kind_of(kOf).has_table, kOffset, kOf.linear>;

  using Sums = Int[kGroups][kRows][kVectors];
  using C = Float[kRows][kVectors];

 public:
  static constexpr size_t kMr = kRows;
  static constexpr size_t kLineProducts = line_products(kBits);

  explicit Gemv(const ktk_matmul* mm) : KernelBase(mm), operands_(CodeTable(kOf)) {}

  static size_t passes(size_t) { return 1; }

  // Not inlined: gcc 12 would run out of registers for addresses.
  [[gnu::noinline]] void tile(const Tile& t) const {
    C c;
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        c[r][v] = Dot::set1(0);
        if (!t.is_first()) c[r][v] = Dot::load(t.dst + r * t.dst_stride + v * Dot::kLanes);
      }
    }
    Position p = {.operands = operands_, .act_stride = t.act_stride};
    p.act = act(t, t.begin * kSubBlocks);
    p.act_groups = act_groups(t, t.begin * kSubBlocks);
    p.fetch = t.fetch;
    for_each_super_block(t, [&](const uint8_t* super_block, size_t count, size_t) {
      p.super_block = super_block;
      p.at = layout_.header_of(count);
      add_super_block(p, count, c);
    });
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        Dot::store(t.dst + r * t.dst_stride + v * Dot::kLanes, c[r][v]);
      }
    }
  }

 private:
  struct Position {
    const Operands operands;
    size_t act_stride;
    const char *act, *act_groups;
    const uint8_t* super_block;
    Header at;
    Fetch fetch;
    Float d[kVectors], dmin[kVectors];

    const ActGroup& act_group(int row) const {
      return *reinterpret_cast<const ActGroup*>(act_groups + row * act_stride);
    }
  };
  // For a register of n each.
  struct Scales {
    Float scale[kGroups][kVectors], min[kGroups][kVectors];
  };

  [[gnu::always_inline]] static void load_ds(Position& p, size_t group) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const size_t n = group * kNr + v * Dot::kLanes;
      p.d[v] = load_d(kOf, p.super_block + p.at.d + n * d_bytes(kOf));
      if constexpr (E::kMins) {
        const uint8_t* dmin = p.super_block + p.at.dmin + n * 2;
        p.dmin[v] = Dot::load_f16(reinterpret_cast<const uint16_t*>(dmin));
        if constexpr (kGroups == 2) p.dmin[v] = Dot::mul(p.dmin[v], Dot::set1(kMinOfHalf));
      }
    }
  }

  [[gnu::always_inline]] static Scales scales(Position& p, size_t sub_block) {
    Scales s;
#pragma GCC unroll 2
    for (int g = 0; g < kGroups; ++g) {
      const size_t group = sub_block * kGroups + g;
      if constexpr (!kHasOneD) load_ds(p, group);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const uint8_t* of_group = p.super_block + group * kNr + v * Dot::kLanes;
        const Float d = defers_d(kScaling) ? Dot::set1(kDeferredFactor) : p.d[v];
        s.scale[g][v] = kOf.has_sub ? Dot::mul(d, Dot::load_i8(of_group + p.at.sub)) : d;
        if constexpr (E::kMins) {
          s.min[g][v] =
              kOf.has_min ? Dot::mul(p.dmin[v], Dot::load_u8(of_group + p.at.min)) : p.dmin[v];
        }
      }
    }
    return s;
  }

  template <size_t kStep>
  [[gnu::always_inline]] static void add_step(const Position& p, const Int (&operand)[kVectors],
                                              Int (&sums)[kRows][kVectors]) {
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      const Int four = Dot::broadcast_row<kStep * kKr>(p.act, p.act_stride, r);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Dot::dot(sums[r][v], operand[v], four);
    }
  }

  // `high` has sums of high nibbles.
  [[gnu::always_inline]] static void add_products(Position& p, const uint8_t* sub_block, Sums& sums,
                                                  Sums& high) {
    unroll<kSteps>([&]<size_t kStep>() __attribute__((always_inline)) {
      constexpr size_t kLines = kBytes / kLine / kSubBlocks;  // of a sub-block
#pragma GCC unroll 3
      for (size_t i = kLines * kStep / kSteps; i < kLines * (kStep + 1) / kSteps; ++i) {
        p.fetch.next_unseen();
      }
      constexpr size_t kGroup = kStep * kGroups / kSteps;
      Int operand[kVectors];
      if constexpr (!kNibbles) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          operand[v] = p.operands.template operand<kStep>(sub_block + v * sizeof(Int));
        }
        add_step<kStep>(p, operand, sums[kGroup]);
      } else if constexpr (kStep % 2 == 0) {
        Int low[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          Int plane = Dot::load_bytes(sub_block + kStep / 2 * kPlaneBytes + v * sizeof(Int));
          pin(plane);  // loaded once
          low[v] = Dot::mask_bytes<0x0f>(plane);
          operand[v] = Dot::mask_bytes<0xf0>(plane);
        }
        add_step<kStep>(p, low, sums[kGroup]);
        add_step<kStep + 1>(p, operand, high[kGroup]);
      }
    });
  }

  // Adds the sub-blocks that share an act scale, from number `first` of the super-block on.
  [[gnu::always_inline]] static void add_span(Position& p, size_t first, C& c) {
    C first_t;
    Float first_min[kVectors];
#pragma GCC unroll 2
    for (int i = 0; i < E::kSpan; ++i) {
      Sums sums, high;
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) {
            sums[g][r][v] = E::template begin<kCodeOffset>(p.act_group(r), g);
            if constexpr (kOf.shift != 0) {
              const size_t group = (first + i) * kGroups + g;
              const uint8_t* bits = p.super_block + p.at.shift + group * kShiftBytes + v * 2;
              sums[g][r][v] = Dot::add_shift<kOf.shift>(sums[g][r][v], bits);
            }
            high[g][r][v] = Dot::set1_int(0);
          }
        }
      }
      const size_t codes = p.at.end + (first + i) * sub_block_bytes(kOf);
      add_products(p, p.super_block + codes, sums, high);
      const Scales s = scales(p, first + i);
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) {
        const ActGroup& act = p.act_group(r);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const auto sum = [&](int g) __attribute__((always_inline)) {
            Int x = sums[g][r][v];
            if constexpr (kNibbles) x = Dot::add(x, Dot::divide_int<4>(high[g][r][v]));
            return Dot::convert(x);
          };
          const auto scale = [&](int g) __attribute__((always_inline)) { return s.scale[g][v]; };
          const auto min = [&](int g) __attribute__((always_inline)) { return s.min[g][v]; };
          const auto min_before = [&]() __attribute__((always_inline)) { return first_min[v]; };
          const Float t = E::add_group(i == 0, first_t[r][v], act, sum, scale, min);
          if (i + 1 < E::kSpan) {
            first_t[r][v] = t;
          } else {
            c[r][v] = E::finish(t, act, c[r][v], scale, min, min_before);
          }
        }
      }
      if constexpr (E::kMins) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) first_min[v] = s.min[0][v];
      }
      p.act += kSubBlock;
      p.act_groups += sizeof(ActGroup);
    }
  }

  [[gnu::always_inline]] static void add_super_block(Position& p, size_t count, C& c) {
    // What sub-blocks do not fetch; with a line more for each of them, fetching would run away.
    static_assert(kBytes % kLine == 0);
    if (count == kSubBlocks) p.fetch.template next_unseen_of<kBytes / kLine % kSubBlocks>();
    // Sub-blocks come back to the header: it is read here, or else the order of memory is broken.
    for (size_t i = 0; i < p.at.end; i += kLine) prefetch_l1(p.super_block + i);
    if constexpr (!defers_d(kScaling)) {
      if constexpr (kHasOneD) load_ds(p, 0);
      for (size_t i = 0; i < count; i += E::kSpan) add_span(p, i, c);
    } else {
      C sums = {};
      for (size_t i = 0; i < count; i += E::kSpan) add_span(p, i, sums);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const Float d = load_deferred_d(kOf, p.super_block + v * Dot::kLanes * d_bytes(kOf));
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) c[r][v] = E::apply_d(sums[r][v], d, c[r][v]);
      }
    }
  }

  const Operands operands_;
};

inline void multiply_few(const ktk_matmul* mm) {
  static constexpr auto kGemv = type_table([]<size_t kType> {
    return row_table<kGemvRows>([]<size_t kRows> { return &gemm<Gemv<kType, kRows>>; });
  });
  kGemv[block_type(mm->matrix->format.element)][mm->m](mm);
}

}  // namespace
}  // namespace ktk::llamafile
