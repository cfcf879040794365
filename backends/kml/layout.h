// "i8-n8k8": where a weight is in a packed matrix. The same for all instruction sets.
//
//   packed   | block 0: columns 0-7 | block 1: columns 8-15 | ...
//   block    | line 0: k 0-7 | line 1: k 8-15 | ... | f32 scale of 8 columns, zeros |
//
//   line, 64 bytes:    column 0    column 1    column 2          column 7
//                    | k0 .. k7  | k0 .. k7  | k0 .. k7  | ... | k0 .. k7  |
//                    `-- one register, the ---'
//                        operand of smmla
//
// smmla multiplies two rows of eight with two columns of eight: a register of a line is its second
// operand as it is. For sdot it is four sums of four, two for either column, and for smull its
// halves are eight products of one column. So one layout serves the three, and a block is one
// sequential stream of 8 bytes per k. n is padded to 8 and k to 16, two lines, with zeros.
#pragma once

#include <stdint.h>

#include "gemm/math.h"
#include "ktk/abi.h"

namespace ktk::kml {
namespace {

constexpr char kLayout[] = "i8-n8k8";
constexpr size_t kNr = 8;  // of a block
constexpr size_t kLineDepth = 8;
constexpr size_t kLineBytes = kNr * kLineDepth;
constexpr size_t kDepth = 16;  // of two lines, one register of a row of activations

inline size_t padded_k(const ktk_matrix* matrix) { return round_up(matrix->k, kDepth); }

inline size_t block_bytes(const ktk_matrix* matrix) { return padded_k(matrix) * kNr + kLineBytes; }
inline size_t weight_size(const ktk_matrix* matrix) {
  return ceil_div(matrix->n, kNr) * block_bytes(matrix);
}
// Byte offset of the block that starts at column n, a multiple of 8.
inline size_t block_offset(const ktk_matrix* matrix, size_t n) {
  return n / kNr * block_bytes(matrix);
}
// In a block.
inline size_t scale_offset(const ktk_matrix* matrix) { return padded_k(matrix) * kNr; }

}  // namespace
}  // namespace ktk::kml
