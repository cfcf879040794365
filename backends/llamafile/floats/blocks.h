// Block types of ik_llama.cpp that are multiplied as f32, which their blocks become 128 of k at a
// time. IQ6_K has the values of a cubic polynomial, which int8 would round. Codes of the trellis
// types are integers of 8 bits that seeds of 16 bits stand for, four or eight each: int8 would be
// up to four times as many bytes.
//
//   value = d * sub * entry                  d * sub is rounded, and then the product
//
//   IQ6_K     entry = ((D code - C) code + B) code + A, in three fused operations, + shift, 0 or 1
//   IQ*_KT    x = (seed + 4096) F,  x F,  x F F ... modulo 2^32, one for each value;
//             entry = the four bytes of (x & 0x3f3f3f3f) added up - 126; IQ3_KT: the sign of this
//             is replaced
//
// A block of a file, 256 values, behind a d of its own (`ktk.ik_types`):
//
//   IQ6_K     d(f16)  shift:1[16]  sub:int8[16]  nibbles:32[4]  high[64]
//   IQ1_KT    d(f32)  (sub:4  top:1[4])[8]  low:8[32]  middle[16]
//   IQ2_KT    d(f32)  (sub:4 of group g, of g + 4)[4]  seed:16[32]
//   IQ3_KT    d(f32)  (sub:4 of group g, of g + 4)[4]  seed:16[32]  negative[32]
//   IQ4_KT    d(f32)  (top:1  sub:7  upper:3[8])[8]  low:8[64]  middle[32]
//
//   high      byte 32 j + i has two bits of values 128 j + i, + 32, + 64 and + 96
//   middle    the low nibbles belong to the first half of the seeds, the high ones to the second:
//             bits 8 to 11
//   upper     bits 12 to 14;  top: bit 12 of IQ1_KT, bit 15 of all seeds of a group of IQ4_KT
//   negative  bit g of byte i: value i of group g
//   sub       of IQ1_KT and IQ2_KT an entry of IQ4_NL's table; of IQ4_KT - 64
//
// Packed, for 32 n, numbers of different n side by side:
//
//   super-block  | d[32] | sub of group 0 [32], 1 ... | shift, 32 bits of group 0, 1 ... |
//                | sub-block 0, 32 deep | 1 ... | 7 |
//
//   sub-block    of trellis types   | seed [32] (| signs [32], bit i of value i |) | next seed ...
//                of IQ6_K           | three dwords [32] of group 0 | of group 1 |
//                                   bits 6 i of dword j: code 5 j + i; the upper two bits of all
//                                   three, the first dword's low: code 15
//
// Seeds of fewer bits are 16 here: IQ1_KT takes 76 bytes of memory for 56 of the file, IQ4_KT 140
// for 128.
//
// Source: ik_llama.cpp (MIT), ggml/src/ggml-common.h and ggml/src/iqk/iqk_quantize.cpp at commit
// 8337e4cd.
#pragma once

#include "gemm/math.h"
#include "llamafile/gguf/blocks/bits.h"
#include "llamafile/gguf/layout.h"

namespace ktk::llamafile::floats {
namespace {

constexpr uint32_t kSeedOffset = 4096, kSeedFactor = 0xcbac1fed, kSeedMask = 0x3f3f3f3f;
constexpr int kMean = 126;
constexpr float kCubic[4] = {-127.f, 6.2568f, -0.11218f, 0.0011972f};

struct FloatBlock {
  ktk_element element;
  uint16_t bytes;   // in ktk's rows
  uint8_t of_seed;  // values; 0: codes are stored
  bool has_signs;   // beside seeds
  uint8_t group;    // values with one sub
  uint8_t d_bytes;
};
constexpr FloatBlock kFloatBlocks[] = {
    {kIQ6_K, 212, 0, false, 16, 2}, {kIQ1_KT, 60, 8, false, 32, 4},  {kIQ2_KT, 72, 8, false, 32, 4},
    {kIQ3_KT, 104, 8, true, 32, 4}, {kIQ4_KT, 132, 4, false, 32, 4},
};

constexpr const FloatBlock* find_float_block(ktk_element element) {
  for (const FloatBlock& type : kFloatBlocks) {
    if (type.element == element) return &type;
  }
  return nullptr;
}
// Of an element that is one of them.
constexpr const FloatBlock& float_block(ktk_element element) { return *find_float_block(element); }

// 256 values of one n.
struct CodedRow {
  uint32_t d;  // bits
  int8_t sub[kSuperBlock / kSmallestGroup];
  uint16_t shifted;                   // bit g: group g is
  uint8_t code[kSuperBlock];          // of IQ6_K
  uint16_t seed[kSuperBlock / 4];     // of the others
  uint8_t negative[kSuperBlock / 8];  // bit i of byte j: value i of seed j
};

// Where things are in a super-block of 32 n.
constexpr size_t sub_at(const FloatBlock& type) { return type.d_bytes * kNr; }
constexpr size_t shift_at(const FloatBlock& type) {
  return sub_at(type) + kSuperBlock / type.group * kNr;
}
constexpr size_t sub_blocks_at(const FloatBlock& type) {
  return shift_at(type) + (type.of_seed ? 0 : kSuperBlock / type.group * kShiftBytes);
}
// Of a seed with its signs.
constexpr size_t seed_bytes(const FloatBlock& type) { return (type.has_signs ? 3 : 2) * kNr; }
constexpr size_t kDwordsOfGroup = 3;
constexpr size_t coded_sub_block_bytes(const FloatBlock& type) {
  return type.of_seed ? kSubBlock / type.of_seed * seed_bytes(type)
                      : kSubBlock / type.group * kDwordsOfGroup * kPlaneBytes;
}
constexpr size_t coded_super_block_bytes(const FloatBlock& type) {
  return sub_blocks_at(type) + kSubBlocks * coded_sub_block_bytes(type);
}

inline size_t coded_weight_offset(const ktk_matrix* matrix, size_t n) {
  const FloatBlock& type = float_block(matrix->format.element);
  return n / kNr * (matrix->k / kSuperBlock * coded_super_block_bytes(type));
}
inline size_t coded_weight_size(const ktk_matrix* matrix) {
  return coded_weight_offset(matrix, matrix->n + kNr - 1);
}

}  // namespace
}  // namespace ktk::llamafile::floats
