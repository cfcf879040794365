// "u4-n32k8": where a weight of four bits is in a packed matrix. The same for all instruction sets,
// and for RAWINT4 and AMXINT4.
//
//   packed    [n / 32 blocks][k / group]                         one sequential stream
//
//   group     | 32 scales | 32 zero points | step 0 | step 1 | ... step (group / 8 - 1) |
//               64 bytes    64 bytes, or     128 bytes each
//                           none
//
//   step      32 columns of the product, 8 deep: two cache lines
//
//               column 0               column 1                    column 31
//             | k1k0 k3k2 k5k4 k7k6 | k1k0 k3k2 k5k4 k7k6 | ... | k1k0 k3k2 k5k4 k7k6 |
//
// A dword holds its eight codes as a checkpoint does, the even one of each byte in the low nibble.
// The low nibbles are then four values that vpdpbusd multiplies with k0 k2 k4 k6 of an activation,
// and the high nibbles, one shift later, four for k1 k3 k5 k7: activations are packed in that
// order. Codes are unsigned, value = (code - zero) * scale.
//
// Scales stay as they are given, bf16 or f16. Zero points are of the same type, as they are given
// or of integers up to 255, which both hold; without them the zero is 8. n is padded to 32 with
// scale 0 and k to whole groups (k of a group that spans the row: to kRowDepth) with any codes:
// those of act are 0 there.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "gemm/math.h"
#include "ktk/abi.h"

namespace ktk::int4 {
namespace {

constexpr char kLayout[] = "u4-n32k8";
constexpr size_t kNr = 32;
constexpr size_t kStepDepth = 8;
constexpr size_t kStepBytes = kNr * kStepDepth / 2;
constexpr size_t kScaleBytes = kNr * sizeof(uint16_t);  // or zero points, of a group
constexpr size_t kRowDepth = 128;
constexpr int kFixedZero = 8;  // where there are no zero points

inline bool has_zeros(const ktk_matrix* matrix) { return matrix->format.zero != KTK_NONE; }

inline size_t padded_k(const ktk_matrix* matrix) {
  return round_up(matrix->k, matrix->format.group_k ? matrix->format.group_k : kRowDepth);
}
inline size_t group_depth(const ktk_matrix* matrix) {
  return matrix->format.group_k ? matrix->format.group_k : padded_k(matrix);
}
inline size_t header_bytes(const ktk_matrix* matrix) {
  return has_zeros(matrix) ? 2 * kScaleBytes : kScaleBytes;
}
inline size_t group_bytes(const ktk_matrix* matrix) {
  return header_bytes(matrix) + group_depth(matrix) / kStepDepth * kStepBytes;
}
inline size_t block_bytes(const ktk_matrix* matrix) {
  return padded_k(matrix) / group_depth(matrix) * group_bytes(matrix);
}
inline size_t weight_size(const ktk_matrix* matrix) {
  return ceil_div(matrix->n, kNr) * block_bytes(matrix);
}
// Byte offset of the block that starts at column n, a multiple of 32.
inline size_t block_offset(const ktk_matrix* matrix, size_t n) {
  return n / kNr * block_bytes(matrix);
}

}  // namespace
}  // namespace ktk::int4
