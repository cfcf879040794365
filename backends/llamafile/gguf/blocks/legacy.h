// Blocks of 32 values with an f16 d of their own, and NVFP4, 64 values with four.
//
//   Q4_0, IQ4_NL   d                   nibbles[16]   value i low, i + 16 high
//   Q4_1           d  dmin             nibbles[16]
//   Q5_0           d        high[4]    nibbles[16]   bit i of high is the fifth bit of value i
//   Q5_1           d  dmin  high[4]    nibbles[16]
//   Q6_0           d        high[8]    nibbles[16]   pairs of bits of high i: values i, i + 16,
//                                                    i + 8, i + 24
//   Q8_0           d                   int8[32]
//   Q8_KV          f32 d               int8[32]      in files one d per row, before the sum of
//   codes MXFP4          e8m0                nibbles[16] NVFP4          ue4m3[4]            4 x
//   nibbles[8]   of 16 values: i low, i + 8 high
#pragma once

#include "llamafile/gguf/blocks/bits.h"
#include "llamafile/gguf/layout.h"

namespace ktk::llamafile {
namespace {

template <ktk_element kElement>
inline void decode_legacy(const uint8_t* block, size_t depth, SuperBlock* to) {
  constexpr BlockType kType = block_type(kElement);
  constexpr size_t kDBytes = d_bytes(kType);
  constexpr size_t kHigh = kDBytes + (kType.has_dmin ? 2 : 0);
  constexpr size_t kCodes = kHigh + (kType.bits == 5 ? 4 : kType.bits == 6 ? 8 : 0);
  fill_ones<kElement>(to);
  for (size_t b = 0; b < depth / 32; ++b, block += kType.block_bytes) {
    uint8_t* code = to->code + 32 * b;
    to->d[b] = 0;
    memcpy(&to->d[b], block, kDBytes);
    if constexpr (kType.has_dmin) to->dmin[b] = load<uint16_t>(block + kDBytes);
    if constexpr (kType.bits == 8) {
      for (size_t i = 0; i < 32; ++i) code[i] = block[kCodes + i] ^ 0x80;
    } else {
      split_nibbles<16>(block + kCodes, code);
    }
    if constexpr (kType.bits == 5) {
      for (size_t i = 0; i < 4; ++i) {
        const uint64_t fifth = load<uint64_t>(code + 8 * i) | bits_to_bytes(block[kHigh + i]) << 4;
        memcpy(code + 8 * i, &fifth, sizeof fifth);
      }
    } else if constexpr (kType.bits == 6) {
      for (size_t i = 0; i < 32; ++i) {
        const unsigned high = block[kHigh + i % 8] >> (i / 8 % 2 * 4 + i / 16 * 2);
        code[i] = static_cast<uint8_t>(code[i] | (high & 3) << 4);
      }
    }
  }
}

inline void decode_nvfp4(const uint8_t* block, size_t depth, SuperBlock* to) {
  fill_ones<kNVFP4>(to);
  for (size_t g = 0; g < depth / 16; ++g) {
    const uint8_t* from = block + g / 4 * 36;
    to->d[g] = from[g % 4];
    split_nibbles<8>(from + 4 + g % 4 * 8, to->code + 16 * g);
  }
}

}  // namespace
}  // namespace ktk::llamafile
