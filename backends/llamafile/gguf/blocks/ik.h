// Blocks of ik_llama.cpp: 256 values. Groups of 16 or 32 values are shifted or not, which is a bit
// of each group; ggml's types have nothing like it.
//
//   IQ2_K     d  shift:1[16]  sub:4[16]  low[64]                                   sub - 8
//   IQ3_K     d  shift:1[16]  negative:1[16]  sub:4[16]  low[64]  high[32]         2 sub + 1
//   IQ4_K     d  shift:1[16]  sub_high:2[16]  sub_low:4[16]  nibbles:16[8]         sub - 32
//   IQ5_K     d  shift:1[16]  sub_high:2[16]  sub_low:4[16]  nibbles:32[4]  high[32]
//   IQ2_KS    d  shift:1[8]  sub_high:1[8]  sub_low:4[8]  low[64]                  sub - 16
//   IQ3_KS    d  sub_high:1[8]  shift:1[8]  (sub_low:4 of group g, of g + 4)[4]  low[64]  high[32]
//   IQ4_KS    d  (shift:1 sub:7)[8]  nibbles:16[8]                                 2 sub - 127
//   IQ5_KS    d  (shift:1 sub:7)[8]  nibbles:32[4]  high[32]
//   IQ4_KSS   d  (word:16[8])[8]      a word is four codes and one bit of (shift:1 sub:7)
//   IQ2_KL    d  sub_high:2[8]  (sub_low:4 of group g, of g + 4)[4]  pairs[64]  pair_high[16]
//
// nibbles:16   16 bytes are the low nibbles of 16 values, and the high ones of the next 16; :32 is
//              the same with 32
// low, high    as in k_quants.h: two bits of 256 values, and one
// pairs        16 bytes are the low nibbles of 16 indices for 32 values, and the high ones for the
//              next 32; bit g of pair_high[i] is the fifth bit of index i of group g
//
// d is an f16, and an f32 in IQ4_KS, IQ5_KS and IQ4_KSS. Of the types with an S or an L at the end
// files have d once for a row, in front of all its blocks; `ktk.ik_types` puts a copy in front of
// each block.
//
// Source: ik_llama.cpp (MIT), ggml/src/ggml-common.h and ggml/src/iqk/iqk_quantize.cpp at commit
// 8337e4cd; numbers of types, ggml/include/ggml.h.
#pragma once

#include "llamafile/gguf/blocks/k_quants.h"

namespace ktk::llamafile {
namespace {

// Number i of a list of 4-bit numbers, two in a byte.
inline int nibble_at(const uint8_t* nibbles, size_t i) { return nibbles[i / 2] >> i % 2 * 4 & 15; }
inline int8_t as_sub(int sub) { return static_cast<int8_t>(sub); }

inline void decode_iq2_k(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  to->shifted = load<uint16_t>(block + 2);
  for (size_t g = 0; g < 16; ++g) to->sub[g] = as_sub(nibble_at(block + 4, g) - 8);
  split_pairs(block + 12, to->code);
}

inline void decode_iq3_k(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  to->shifted = load<uint16_t>(block + 2);
  const unsigned negative = load<uint16_t>(block + 4);
  for (size_t g = 0; g < 16; ++g) {
    const int size = 2 * nibble_at(block + 6, g) + 1;
    to->sub[g] = as_sub(negative >> g & 1 ? -size : size);
  }
  split_pairs(block + 14, to->code);
  add_high_bits<2>(block + 78, to->code);
}

// d, shifts and sub-scales of IQ4_K and IQ5_K, 16 bytes.
inline void decode_iq4_scales(const uint8_t* block, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  to->shifted = load<uint16_t>(block + 2);
  const uint32_t high = load<uint32_t>(block + 4);
  for (size_t g = 0; g < 16; ++g) {
    const int upper = static_cast<int>(high >> 2 * g & 3) << 4;
    to->sub[g] = as_sub((nibble_at(block + 8, g) | upper) - 32);
  }
}

inline void decode_iq4_k(const uint8_t* block, size_t, SuperBlock* to) {
  decode_iq4_scales(block, to);
  for (size_t i = 0; i < 8; ++i) split_nibbles<16>(block + 16 + 16 * i, to->code + 32 * i);
}

inline void decode_iq5_k(const uint8_t* block, size_t, SuperBlock* to) {
  decode_iq4_scales(block, to);
  for (size_t i = 0; i < 4; ++i) split_nibbles<32>(block + 16 + 32 * i, to->code + 64 * i);
  add_high_bits<4>(block + 144, to->code);
}

inline void decode_iq2_ks(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  to->shifted = block[2];
  for (size_t g = 0; g < 8; ++g) {
    to->sub[g] = as_sub((nibble_at(block + 4, g) | (block[3] >> g & 1) << 4) - 16);
  }
  split_pairs(block + 8, to->code);
}

inline void decode_iq3_ks(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  to->shifted = block[3];
  for (size_t g = 0; g < 8; ++g) {
    const int low = block[4 + g % 4] >> g / 4 * 4 & 15;
    to->sub[g] = as_sub((low | (block[2] >> g & 1) << 4) - 16);
  }
  split_pairs(block + 8, to->code);
  add_high_bits<2>(block + 72, to->code);
}

// The byte of a group of IQ4_KS, IQ5_KS and IQ4_KSS.
inline void decode_shift_and_sub(size_t g, unsigned byte, SuperBlock* to) {
  to->shifted = static_cast<uint16_t>((to->shifted & ~(1u << g)) | (byte & 1) << g);
  to->sub[g] = as_sub(static_cast<int>(byte & 254) - 127);
}

inline void decode_iq4_ks(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint32_t>(block);
  for (size_t g = 0; g < 8; ++g) {
    decode_shift_and_sub(g, block[4 + g], to);
    split_nibbles<16>(block + 12 + 16 * g, to->code + 32 * g);
  }
}

inline void decode_iq5_ks(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint32_t>(block);
  for (size_t g = 0; g < 8; ++g) decode_shift_and_sub(g, block[4 + g], to);
  for (size_t i = 0; i < 4; ++i) split_nibbles<32>(block + 12 + 32 * i, to->code + 64 * i);
  add_high_bits<4>(block + 140, to->code);
}

// Bit 0 of word i is bit i of the group's byte. The others are such that each, flipped where the
// one above it is set, is a bit of the codes, and bit 0 of the codes is bit 1 of the word.
inline void decode_iq4_kss(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint32_t>(block);
  for (size_t g = 0; g < 8; ++g) {
    uint16_t words[8];
    memcpy(words, block + 4 + 16 * g, sizeof words);
    unsigned byte = 0;
    for (size_t i = 0; i < 8; ++i) {
      byte |= (words[i] & 1u) << i;
      const unsigned even = words[i] & 0xfffeu;
      words[i] = static_cast<uint16_t>(even ^ even >> 1);
    }
    decode_shift_and_sub(g, byte, to);
    uint8_t nibbles[16];
    memcpy(nibbles, words, sizeof nibbles);
    split_nibbles<16>(nibbles, to->code + 32 * g);
  }
}

// Codes of two values that an index stands for, the first one low.
constexpr uint8_t kPairsIq2kl[32] = {
    0x20, 0x50, 0x01, 0x31, 0x51, 0x71, 0x12, 0x22, 0x42, 0x52, 0x62, 0x03, 0x43, 0x53, 0x73, 0x24,
    0x34, 0x44, 0x54, 0x64, 0x15, 0x25, 0x35, 0x45, 0x55, 0x06, 0x26, 0x46, 0x66, 0x76, 0x27, 0x57};

inline void decode_iq2_kl(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  const unsigned sub_high = load<uint16_t>(block + 2);
  const uint8_t *pairs = block + 8, *pair_high = block + 72;
  for (size_t g = 0; g < 8; ++g) {
    const int low = block[4 + g % 4] >> g / 4 * 4 & 15;
    to->sub[g] = as_sub((low | static_cast<int>(sub_high >> 2 * g & 3) << 4) - 32);
    for (size_t i = 0; i < 16; ++i) {
      const int index = (pairs[g / 2 * 16 + i] >> g % 2 * 4 & 15) | (pair_high[i] >> g & 1) << 4;
      uint8_t* code = to->code + 32 * g + 2 * i;
      code[0] = kPairsIq2kl[index] & 15;
      code[1] = kPairsIq2kl[index] >> 4;
    }
  }
}

}  // namespace
}  // namespace ktk::llamafile
