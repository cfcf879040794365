// "u4-n32k8": where a weight of four bits is in a packed matrix. The same for all instruction sets,
// and for RAWINT4 and AMXINT4.
//
//   packed    [n / 32 blocks][k / group]                         one sequential stream
//
//   group     | 32 scales | 32 zero points | turn 0 | turn 1 | ... turn (group / 8 - 1) |
//               64 bytes    64 bytes, or     128 bytes each
//                           none
//
//   turn      32 columns of the product, 8 deep: two cache lines
//
//               column 0               column 1                    column 31
//             | k1k0 k3k2 k5k4 k7k6 | k1k0 k3k2 k5k4 k7k6 | ... | k1k0 k3k2 k5k4 k7k6 |
//
// A dword holds its eight codes as a checkpoint does, the even one of each byte in the low nibble.
// The low nibbles are then four values that vpdpbusd multiplies with k0 k2 k4 k6 of an activation,
// and the high nibbles, one shift later, four for k1 k3 k5 k7: activations are packed in that
// order. Codes are unsigned, value = (code - zero) * scale.
//
// Scales stay as they are given, bf16 or f16. Zero points are bf16, which holds any integer up to
// 256; without them the zero is 8. n is padded to 32 with scale 0 and k to whole groups (k of a
// group that spans the row: to kRowDepth) with any codes: those of act are 0 there.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "ktk/abi.h"

namespace ktk::int4 {
namespace {

constexpr char kLayout[] = "u4-n32k8";
constexpr size_t kColumns = 32;  // of a block
constexpr size_t kTurn = 8;      // depth of a turn
constexpr size_t kTurnBytes = kColumns * kTurn / 2;
constexpr size_t kParamBytes = kColumns * sizeof(uint16_t);  // scales, or zero points, of a group
constexpr size_t kRowDepth = 128;
constexpr int kPlainZero = 8;  // where there are no zero points

constexpr size_t round_up(size_t x, size_t step) { return (x + step - 1) / step * step; }
constexpr size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

inline bool has_zeros(const ktk_matrix* m) { return m->format.zero != KTK_NONE; }

inline size_t padded_k(const ktk_matrix* m) {
  return round_up(m->k, m->format.group_k ? m->format.group_k : kRowDepth);
}
inline size_t group_depth(const ktk_matrix* m) {
  return m->format.group_k ? m->format.group_k : padded_k(m);
}
inline size_t header_bytes(const ktk_matrix* m) {
  return has_zeros(m) ? 2 * kParamBytes : kParamBytes;
}
inline size_t group_bytes(const ktk_matrix* m) {
  return header_bytes(m) + group_depth(m) / kTurn * kTurnBytes;
}
inline size_t block_bytes(const ktk_matrix* m) {
  return padded_k(m) / group_depth(m) * group_bytes(m);
}
inline size_t weight_size(const ktk_matrix* m) {
  return round_up(m->n, kColumns) / kColumns * block_bytes(m);
}
// Byte offset of the block that starts at column n, a multiple of 32.
inline size_t block_offset(const ktk_matrix* m, size_t n) { return n / kColumns * block_bytes(m); }

}  // namespace
}  // namespace ktk::int4
