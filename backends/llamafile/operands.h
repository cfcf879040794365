// From planes of bits to the operand of a product: table[code] + an offset, one byte each; in
// registers, or in memory where AMX and gemm_i16 want them.
#pragma once

#include "gemm/compiler.h"
#include "llamafile/dot.h"
#include "llamafile/scaling.h"

namespace ktk::llamafile {
namespace {

// What the codes of a type stand for: sixteen entries, or what is added to a code.
struct CodeTable {
  alignas(16) uint8_t entries[16];
  int bias;

  explicit CodeTable(const BlockType& type, int offset = Dot::kWeightOffset)
      : bias(offset - type.offset) {
    for (int i = 0; i < 16; ++i) {
      entries[i] = static_cast<uint8_t>(type.linear ? i + bias : type.table[i] + offset);
    }
  }
};

// One register of n of a sub-block. Types of up to four bits look their values up, linear ones too;
// the others are all linear. kAsTheyAre: the operand is the code itself.
template <int kBits, int kOffset = Dot::kWeightOffset, bool kAsTheyAre = false>
class Codes {
 public:
  using Int = Dot::Int;

  explicit Codes(const CodeTable& table)
      : table_(kBits <= 4 ? Dot::load_table(table.entries) : Dot::set1_byte(table.bias)) {}

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

  Int table_;
};

constexpr size_t kOperandBytes = kSteps * kPlaneBytes;  // of a sub-block: a plane for every step

// Makes operands of the codes of some sub-blocks.
template <int kBits, int kOffset, bool kAsTheyAre = false>
void write_operands(const CodeTable& table, const uint8_t* sub_block, size_t sub_blocks,
                    uint8_t* to) {
  const Codes<kBits, kOffset, kAsTheyAre> codes(table);
  for (; sub_blocks > 0; --sub_blocks, sub_block += kBits * kPlaneBytes, to += kOperandBytes) {
    for (size_t at = 0; at < kPlaneBytes; at += sizeof(Dot::Int)) {
      unroll<kSteps>([&]<size_t kStep>() __attribute__((always_inline)) {
        Dot::store_bytes(to + at + kStep * kPlaneBytes,
                         codes.template operand<kStep>(sub_block + at));
      });
    }
  }
}

}  // namespace
}  // namespace ktk::llamafile
