// From planes of bits to the operand of a product: table[code] + an offset, one byte each.
#pragma once

#include "llamafile/dot.h"

namespace ktk::llamafile {
namespace {

// What the codes of a type stand for: sixteen entries, or what is added to a code.
struct CodeTable {
  alignas(16) uint8_t table[16];
  int bias;

  explicit CodeTable(const BlockType& type, int offset = Dot::kWeightOffset)
      : bias(offset - type.offset) {
    for (int i = 0; i < 16; ++i) {
      table[i] = static_cast<uint8_t>(type.linear ? i + bias : type.table[i] + offset);
    }
  }
};

// One register of columns of a unit. Types of up to four bits look their values up, linear ones
// too; the others are all linear. kPlain: the operand is the code itself.
template <int kBits, int kOffset = Dot::kWeightOffset, bool kPlain = false>
class Codes {
 public:
  using Int = Dot::Int;

  explicit Codes(const CodeTable& table)
      : table_(kBits <= 4 ? Dot::load_table(table.table) : Dot::set1_byte(table.bias)) {}

  // The operand of a step; `unit` points to the first column.
  template <int kStep>
  [[gnu::always_inline]] Int operand(const uint8_t* unit) const {
    if constexpr (kBits == 8) {
      return meant(row(unit, kStep));
    } else {
      constexpr int kLow = kBits >= 4 ? 4 : 2, kHigh = kBits - kLow;
      constexpr int kHalf = kStep / 4, kInHalf = kStep % 4;
      constexpr int kHighRows = kHigh == 1 ? 1 : kHigh == 2 ? kHalf + 1 : 0;  // before the low one
      constexpr int kLowRow = kHighRows + kStep * kLow / 8;
      Int code = field<kLow, kStep * kLow % 8, 0>(row(unit, kLowRow));
      if constexpr (kHigh == 1) {
        code = Dot::bit_or(code, field<1, kStep, kLow>(row(unit, 0)));
      } else if constexpr (kHigh == 2) {
        constexpr int kHighRow = kHalf * (1 + kLow / 2);
        code = Dot::bit_or(code, field<2, 2 * kInHalf, kLow>(row(unit, kHighRow)));
      }
      return meant(code);
    }
  }

 private:
  static Int row(const uint8_t* unit, int index) {
    return Dot::load_bytes(unit + static_cast<size_t>(index) * kPlaneBytes);
  }

  // kWidth bits of every byte from bit kFrom on, moved to bit kTo.
  template <int kWidth, int kFrom, int kTo>
  static Int field(Int x) {
    if constexpr (kFrom > kTo) x = Dot::shift_right(x, kFrom - kTo);
    if constexpr (kFrom < kTo) x = Dot::shift_left(x, kTo - kFrom);
    return Dot::mask_bytes<((1 << kWidth) - 1) << kTo>(x);
  }

  Int meant(Int code) const {
    if constexpr (kPlain) {
      return code;
    } else if constexpr (kBits <= 4) {
      return Dot::shuffle(table_, code);
    } else if constexpr (kBits == 8 && kOffset == 128) {
      return code;  // eight bits have the offset 128
    } else {
      return Dot::add_bytes(code, table_);
    }
  }

  Int table_;
};

}  // namespace
}  // namespace ktk::llamafile
