// Blocks of 256 values with an f16 d and a sub-scale, and perhaps a minimum, per 16 or 32 values;
// and the ternary types, which have only d.
//
//   Q2_K     (sub:4 min:4)[16]  low[64]  d  dmin
//   Q3_K     high[32]  low[64]  sub:6[16]  d             sub - 32
//   Q4_K     d  dmin  (sub:6 min:6)[8]  nibbles[128]
//   Q5_K     d  dmin  (sub:6 min:6)[8]  high[32]  nibbles[128]
//   Q6_K     nibbles[128]  high[64]  sub[16]  d          sub is int8
//   IQ4_XS   d  sub_high:2[8]  sub_low:4[8]  nibbles[128]  sub - 32
//   TQ2_0    low[64]  d
//   TQ1_0    five[32]  five[16]  four[4]  d
//
// low[64]: 32 bytes per 128 values; byte l holds values l, l + 32, l + 64, l + 96, two bits each.
#pragma once

#include "llamafile/gguf/blocks/bits.h"

namespace ktk::llamafile {
namespace {

// Pairs of bits of Q2_K, Q3_K and TQ2_0.
inline void split_pairs(const uint8_t* low, uint8_t* code) {
  for (size_t half = 0; half < 2; ++half) {
    for (size_t l = 0; l < 32; ++l) {
      const uint8_t pairs = low[32 * half + l];
      uint8_t* to = code + 128 * half + l;
      to[0] = pairs & 3;
      to[32] = pairs >> 2 & 3;
      to[64] = pairs >> 4 & 3;
      to[96] = pairs >> 6;
    }
  }
}

inline void decode_q2_k(const uint8_t* block, size_t, SuperBlock* to) {
  for (size_t g = 0; g < 16; ++g) {
    to->sub[g] = block[g] & 15;
    to->min[g] = block[g] >> 4;
  }
  split_pairs(block + 16, to->code);
  to->d[0] = load<uint16_t>(block + 80);
  to->dmin[0] = negated_f16(block + 82);
}

// Bit j of high[l] belongs to value 32 j + l.
template <uint8_t kBit>
inline void add_high_bits(const uint8_t* high, uint8_t* code) {
  for (size_t j = 0; j < 8; ++j) {
    for (size_t l = 0; l < 32; ++l) {
      code[32 * j + l] = static_cast<uint8_t>(code[32 * j + l] | (high[l] >> j & 1) << kBit);
    }
  }
}

inline void decode_q3_k(const uint8_t* block, size_t, SuperBlock* to) {
  split_pairs(block + 32, to->code);
  add_high_bits<2>(block, to->code);
  const uint8_t* sub = block + 96;
  for (size_t g = 0; g < 16; ++g) {
    const int low = sub[g % 8] >> g / 8 * 4 & 15, high = sub[8 + g % 4] >> g / 4 * 2 & 3;
    to->sub[g] = static_cast<int8_t>((low | high << 4) - 32);
  }
  to->d[0] = load<uint16_t>(block + 108);
}

// d, dmin and the twelve bytes with 6-bit sub-scales and minima of Q4_K and Q5_K. Groups 0 to 3 are
// in the low bits of bytes 0 to 7; groups 4 to 7 in the nibbles of bytes 8 to 11, with their upper
// two bits above those of groups 0 to 3.
inline void decode_scales(const uint8_t* block, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  to->dmin[0] = negated_f16(block + 2);
  const uint8_t *sub = block + 4, *min = block + 8, *upper = block + 12;
  for (size_t g = 0; g < 4; ++g) {
    to->sub[g] = sub[g] & 63;
    to->min[g] = min[g] & 63;
    to->sub[g + 4] = static_cast<int8_t>((upper[g] & 15) | (sub[g] >> 6) << 4);
    to->min[g + 4] = static_cast<uint8_t>((upper[g] >> 4) | (min[g] >> 6) << 4);
  }
}

inline void decode_q4_k(const uint8_t* block, size_t, SuperBlock* to) {
  decode_scales(block, to);
  for (size_t i = 0; i < 4; ++i) split_nibbles<32>(block + 16 + 32 * i, to->code + 64 * i);
}

inline void decode_q5_k(const uint8_t* block, size_t, SuperBlock* to) {
  decode_scales(block, to);
  for (size_t i = 0; i < 4; ++i) split_nibbles<32>(block + 48 + 32 * i, to->code + 64 * i);
  add_high_bits<4>(block + 16, to->code);
}

inline void decode_q6_k(const uint8_t* block, size_t, SuperBlock* to) {
  for (size_t half = 0; half < 2; ++half) {
    const uint8_t *nibbles = block + 64 * half, *high = block + 128 + 32 * half;
    uint8_t* code = to->code + 128 * half;
    for (size_t l = 0; l < 32; ++l) {
      code[l] = static_cast<uint8_t>((nibbles[l] & 15) | (high[l] & 3) << 4);
      code[l + 32] = static_cast<uint8_t>((nibbles[l + 32] & 15) | (high[l] & 12) << 2);
      code[l + 64] = static_cast<uint8_t>(nibbles[l] >> 4 | (high[l] & 48));
      code[l + 96] = static_cast<uint8_t>(nibbles[l + 32] >> 4 | (high[l] & 192) >> 2);
    }
  }
  memcpy(to->sub, block + 192, 16);
  to->d[0] = load<uint16_t>(block + 208);
}

inline void decode_iq4_xs(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  const unsigned high = load<uint16_t>(block + 2);
  for (size_t g = 0; g < 8; ++g) {
    const unsigned low = block[4 + g / 2] >> g % 2 * 4 & 15;
    to->sub[g] = static_cast<int8_t>(static_cast<int>(low | (high >> 2 * g & 3) << 4) - 32);
    split_nibbles<16>(block + 8 + 16 * g, to->code + 32 * g);
  }
}

inline void decode_tq2_0(const uint8_t* block, size_t, SuperBlock* to) {
  fill_ones<kTQ2_0>(to);
  split_pairs(block, to->code);
  to->d[0] = load<uint16_t>(block + 64);
}

// kCount digits to the base of 3 in each of kBytes bytes. A byte holds digits / 3^5 of 256, rounded
// up: times 3^i the fraction begins with digit i, and three times that carries it into a new byte.
template <size_t kBytes, size_t kCount>
inline void split_digits(const uint8_t* bytes, uint8_t* code) {
  unsigned power = 1;
  for (size_t i = 0; i < kCount; ++i, power *= 3) {
    for (size_t l = 0; l < kBytes; ++l) {
      const uint8_t fraction = static_cast<uint8_t>(bytes[l] * power);
      code[kBytes * i + l] = static_cast<uint8_t>(fraction * 3 >> 8);
    }
  }
}

inline void decode_tq1_0(const uint8_t* block, size_t, SuperBlock* to) {
  fill_ones<kTQ1_0>(to);
  split_digits<32, 5>(block, to->code);
  split_digits<16, 5>(block + 32, to->code + 160);
  split_digits<4, 4>(block + 48, to->code + 240);
  to->d[0] = load<uint16_t>(block + 52);
}

}  // namespace
}  // namespace ktk::llamafile
