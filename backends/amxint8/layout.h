// "u8-n32k64-vnni4": where a weight is in a packed matrix. The same for all instruction sets.
//
//   packed   [n / 32 blocks][k / 64 steps][2 tiles][16 rows][16 columns][4 bytes]   f32 scale[n]
//
//   one tile, 1 KiB: 16 columns of the product, 64 deep
//
//              column 0       column 1            column 15
//   row 0    k0 k1 k2 k3    k0 k1 k2 k3    ...   k0 k1 k2 k3     <- one 64-byte vector
//   row 1    k4 k5 k6 k7    k4 k5 k6 k7    ...   k4 k5 k6 k7
//     :
//   row 15   k60 .. k63     k60 .. k63     ...   k60 .. k63
//
// A row is what vpdpbusd multiplies with four broadcast activations; the tile is the B operand of
// tdpbsud. The two tiles of a step lie side by side, so a block of 32 columns is one sequential
// stream of 32 * k bytes. n is padded to 32 and k to 64. Bytes are q + 128 (q in -128..127, padding
// q = 0): both instructions take one unsigned operand, and this is the one that never changes.
#pragma once

#include "gemm/math.h"
#include "ktk/abi.h"

namespace ktk::amxint8 {
namespace {

constexpr char kLayout[] = "u8-n32k64-vnni4";
constexpr size_t kNr = 32;
constexpr size_t kStepDepth = 64;
constexpr size_t kTileCols = 16;
constexpr size_t kTileBytes = kTileCols * kStepDepth;  // 1 KiB; a row is a cache line
constexpr size_t kStepBytes = 2 * kTileBytes;
constexpr size_t kStepLines = kStepBytes / kLine;

inline size_t padded_n(const ktk_matrix* matrix) { return round_up(matrix->n, kNr); }
inline size_t padded_k(const ktk_matrix* matrix) { return round_up(matrix->k, kStepDepth); }
inline size_t num_steps(const ktk_matrix* matrix) { return padded_k(matrix) / kStepDepth; }
inline size_t block_bytes(const ktk_matrix* matrix) { return kNr * padded_k(matrix); }

inline size_t weight_size(const ktk_matrix* matrix) {
  return padded_n(matrix) * (padded_k(matrix) + sizeof(float));
}

// Where column n, a multiple of 32, starts.
inline size_t weight_offset(const ktk_matrix* matrix, size_t n) { return n * padded_k(matrix); }
inline size_t scale_offset(const ktk_matrix* matrix) { return padded_n(matrix) * padded_k(matrix); }

inline const float* weight_scales(const ktk_matrix* matrix, const void* packed) {
  return reinterpret_cast<const float*>(static_cast<const char*>(packed) + scale_offset(matrix));
}

}  // namespace
}  // namespace ktk::amxint8
