// From planes of bits to the operand of a product: table[code] + an offset, one byte each.
#pragma once

#include "llamafile/dot.h"

namespace ktk::llamafile {
namespace {

// What the codes of a type stand for: sixteen entries, or what is added to a code.
struct Meaning {
  alignas(16) uint8_t table[16];
  int bias;

  explicit Meaning(const BlockType& type, int offset = Dot::kWeightOffset)
      : bias(offset - type.offset) {
    for (int i = 0; i < 16; ++i) {
      table[i] = static_cast<uint8_t>(type.linear ? i + bias : type.table[i] + offset);
    }
  }
};

// One register of columns of a unit. Types of up to four bits look their values up, linear ones
// too; the others are all linear.
template <int kBits, int kOffset = Dot::kWeightOffset>
class Codes {
 public:
  using Int = Dot::Int;

  explicit Codes(const Meaning& meaning)
      : meaning_(kBits <= 4 ? Dot::load_table(meaning.table) : Dot::set1_byte(meaning.bias)) {}

  // Calls use(j, operand) for the four steps 4 half + j; `unit` points to the first column.
  template <int kHalf, class Use>
  [[gnu::always_inline]] void for_each_step(const uint8_t* unit, Use use) const {
    if constexpr (kBits == 8) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) use(j, meant(row(unit, 4 * kHalf + j)));
    } else {
      constexpr int kLow = kBits >= 4 ? 4 : 2, kHigh = kBits - kLow;
      constexpr int kLowRows = kLow / 2;  // of a half
      constexpr int kHighRows = kHigh == 1 ? 1 : kHigh == 2 ? kHalf + 1 : 0;
      constexpr int kFirst = kHalf * kLowRows + kHighRows;
      Int high{};
      if constexpr (kHigh > 0) high = row(unit, kHigh == 1 ? 0 : kFirst - 1);
#pragma GCC unroll 2
      for (int r = 0; r < kLowRows; ++r) {
        const Int low = row(unit, kFirst + r);
#pragma GCC unroll 4
        for (int i = 0; i < 8 / kLow; ++i) {
          const int j = r * (8 / kLow) + i;
          Int code = field<kLow>(low, i * kLow, 0);
          if constexpr (kHigh > 0) {
            const int bit = kHigh == 1 ? 4 * kHalf + j : 2 * j;
            code = Dot::bit_or(code, field<kHigh>(high, bit, kLow));
          }
          use(j, meant(code));
        }
      }
    }
  }

 private:
  static Int row(const uint8_t* unit, int index) {
    return Dot::load_bytes(unit + static_cast<size_t>(index) * kRowBytes);
  }

  // kWidth bits of every byte from bit `from` on, moved to bit `to`.
  template <int kWidth>
  static Int field(Int x, int from, int to) {
    const Int moved = from > to   ? Dot::shift_right(x, from - to)
                      : from < to ? Dot::shift_left(x, to - from)
                                  : x;
    return Dot::bit_and(moved, Dot::set1_byte(((1 << kWidth) - 1) << to));
  }

  Int meant(Int code) const {
    if constexpr (kBits <= 4) {
      return Dot::shuffle(meaning_, code);
    } else if constexpr (kBits == 8 && kOffset == 128) {
      return code;  // eight bits have the offset 128
    } else {
      return Dot::add_bytes(code, meaning_);
    }
  }

  Int meaning_;
};

}  // namespace
}  // namespace ktk::llamafile
