// F32 and F16 as they are, only in another order:
//
//   block of 32 n               depth k
//   [k 0][k 1] ... [k K-1]      [n][n+1] ... [n+31]     64 bytes of halves, 128 of f32
//
// A product reads one block after the other, each from its first byte to its last, whatever the
// number of rows. n is padded with zeros, k is not padded.
#pragma once

#include "gemm/math.h"
#include "ktk/abi.h"

namespace ktk::llamafile::floats {
namespace {

constexpr size_t kNr = 32;

inline size_t element_bytes(const ktk_matrix* matrix) {
  return matrix->format.element == KTK_F32 ? 4 : 2;
}
inline size_t block_bytes(const ktk_matrix* matrix) {
  return matrix->k * kNr * element_bytes(matrix);
}
// Where n, a multiple of 32, starts.
inline size_t weight_offset(const ktk_matrix* matrix, size_t n) {
  return n / kNr * block_bytes(matrix);
}
inline size_t weight_size(const ktk_matrix* matrix) {
  return weight_offset(matrix, matrix->n + kNr - 1);
}

}  // namespace
}  // namespace ktk::llamafile::floats
