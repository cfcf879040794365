// From planes of bits to the operand of a product: table[code] + an offset, one byte each; in
// registers, or in memory where AMX and gemm_i16 want them.
#pragma once

#include "gemm/compiler.h"
#include "llamafile/dot.h"
#include "llamafile/scaling.h"

namespace ktk::llamafile {
namespace {

// What the codes of a type stand for: up to 32 entries, or what is added to a code.
struct CodeTable {
  alignas(16) uint8_t entries[kMostEntries];
  int bias;
  uint8_t shift;

  explicit CodeTable(const BlockType& type, int offset = Dot::kWeightOffset)
      : bias(offset - type.offset), shift(type.shift) {
    for (int i = 0; i < static_cast<int>(kMostEntries); ++i) {
      entries[i] = static_cast<uint8_t>(type.linear ? i + bias : type.table[i] + offset);
    }
  }
};

// One register of n of a sub-block, without shifts of groups. Types of up to four bits look their
// values up, linear ones too; of the others those that have a table, which is of five bits.
// kAsTheyAre: the operand is the code itself.
template <int kBits, bool kHasTable, int kOffset = Dot::kWeightOffset, bool kAsTheyAre = false>
class Codes {
  static_assert(!kHasTable || (kBits == 5 && !kAsTheyAre));

 public:
  using Int = Dot::Int;

  explicit Codes(const CodeTable& table)
      : table_(kBits <= 4 || kHasTable ? Dot::load_table(table.entries)
                                       : Dot::set1_byte(table.bias)),
        upper_(Dot::load_table(table.entries + 16)) {}

  // The operand of a step; `sub_block` points to the first n.
  template <int kStep>
  [[gnu::always_inline]] Int operand(const uint8_t* sub_block) const {
    if constexpr (kBits == 8) {
      return look_up(plane(sub_block, kStep));
    } else {
      constexpr int kLow = kBits >= 4 ? 4 : 2, kHigh = kBits - kLow;
      constexpr int kHalf = kStep / 4, kInHalf = kStep % 4;
      constexpr int kHighPlanes = kHigh == 1   ? 1
                                  : kHigh == 2 ? kHalf + 1
                                               : 0;  // before the low one
      constexpr int kLowPlane = kHighPlanes + kStep * kLow / 8;
      Int code = field<kLow, kStep * kLow % 8, 0>(plane(sub_block, kLowPlane));
      if constexpr (kHasTable) {
        return Dot::shuffle_by_bit<kStep>(table_, upper_, code, sub_block);
      }
      if constexpr (kHigh == 1) {
        code = Dot::bit_or(code, field<1, kStep, kLow>(plane(sub_block, 0)));
      } else if constexpr (kHigh == 2) {
        constexpr int kHighPlane = kHalf * (1 + kLow / 2);
        code = Dot::bit_or(code, field<2, 2 * kInHalf, kLow>(plane(sub_block, kHighPlane)));
      }
      return look_up(code);
    }
  }

 private:
  static Int plane(const uint8_t* sub_block, int index) {
    return Dot::load_bytes(sub_block + static_cast<size_t>(index) * kPlaneBytes);
  }

  // kWidth bits of every byte from bit kFrom on, moved to bit kTo.
  template <int kWidth, int kFrom, int kTo>
  static Int field(Int x) {
    if constexpr (kFrom > kTo) x = Dot::shift_right(x, kFrom - kTo);
    if constexpr (kFrom < kTo) x = Dot::shift_left(x, kTo - kFrom);
    return Dot::mask_bytes<((1 << kWidth) - 1) << kTo>(x);
  }

  Int look_up(Int code) const {
    if constexpr (kAsTheyAre) {
      return code;
    } else if constexpr (kBits <= 4) {
      return Dot::shuffle(table_, code);
    } else if constexpr (kBits == 8 && kOffset == 128) {
      return code;  // eight bits have the offset 128
    } else {
      return Dot::add_bytes(code, table_);
    }
  }

  Int table_, upper_;
};

// What groups of a super-block are shifted by, as bytes to add to operands.
class Shifts {
 public:
  Shifts(const CodeTable& table, const uint8_t* super_block, const Header& at)
      : shift_(Dot::set1_byte(table.shift)), bits_(super_block + at.shift) {}

  // For a register of n.
  [[gnu::always_inline]] Dot::Int of(size_t group, size_t n) const {
    return Dot::keep_where(bits_ + group * kShiftBytes + n / 8, shift_);
  }

 private:
  Dot::Int shift_;
  const uint8_t* bits_;
};

// The shifts of some sub-blocks, a plane for each group: what tiles add that decode as they read.
constexpr size_t shift_bytes(Scaling s) { return num_groups(s) * kPlaneBytes; }  // of a sub-block
template <Kind kKind>
void write_shifts(const Shifts& shifts, size_t sub_blocks, uint8_t* to) {
  for (size_t group = 0; group < sub_blocks * num_groups(kKind.scaling); ++group) {
    for (size_t n = 0; n < kNr; n += Dot::kLanes, to += sizeof(Dot::Int)) {
      Dot::store_bytes(to, shifts.of(group, n));
    }
  }
}

constexpr size_t kOperandBytes = kSteps * kPlaneBytes;  // of a sub-block: a plane for every step

// Makes operands of the codes of a super-block of so many sub-blocks, whose header is `at`.
template <Kind kKind, int kOffset, bool kAsTheyAre = false>
void write_operands(const CodeTable& table, const uint8_t* super_block, const Header& at,
                    size_t sub_blocks, uint8_t* to) {
  constexpr int kGroups = num_groups(kKind.scaling);
  const Codes<kKind.bits, kKind.has_table, kOffset, kAsTheyAre> codes(table);
  const Shifts shifts(table, super_block, at);
  const uint8_t* sub_block = super_block + at.end;
  for (size_t i = 0; i < sub_blocks; ++i, sub_block += kKind.bits * kPlaneBytes) {
    for (size_t byte = 0; byte < kPlaneBytes; byte += sizeof(Dot::Int)) {
      Dot::Int shift[kGroups];
      for (int g = 0; g < kGroups; ++g) {
        if constexpr (kKind.has_shifts) shift[g] = shifts.of(i * kGroups + g, byte / 4);
      }
      unroll<kSteps>([&]<size_t kStep>() __attribute__((always_inline)) {
        Dot::Int operand = codes.template operand<kStep>(sub_block + byte);
        if constexpr (kKind.has_shifts) {
          operand = Dot::add_bytes(operand, shift[kStep * kGroups / kSteps]);
        }
        Dot::store_bytes(to + byte + kStep * kPlaneBytes, operand);
      });
    }
    to += kOperandBytes;
  }
}

}  // namespace
}  // namespace ktk::llamafile
