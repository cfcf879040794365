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

#include <stddef.h>
#include <stdint.h>

#include "ktk/abi.h"

namespace ktk::amxint8 {
namespace {

constexpr char kLayout[] = "u8-n32k64-vnni4";
constexpr size_t kColumns = 32;  // of a block
constexpr size_t kDepth = 64;    // of a step
constexpr size_t kTileBytes = 1024;
constexpr size_t kStepBytes = 2 * kTileBytes;

constexpr size_t round_up(size_t x, size_t step) { return (x + step - 1) / step * step; }
constexpr size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

inline size_t padded_n(const ktk_matrix* m) { return round_up(m->n, kColumns); }
inline size_t padded_k(const ktk_matrix* m) { return round_up(m->k, kDepth); }
inline size_t num_steps(const ktk_matrix* m) { return padded_k(m) / kDepth; }

inline size_t weight_size(const ktk_matrix* m) {
  return padded_n(m) * (padded_k(m) + sizeof(float));
}

// Byte offset of the block that starts at column n, a multiple of 32.
inline size_t block_offset(const ktk_matrix* m, size_t n) { return n * padded_k(m); }
inline size_t scale_offset(const ktk_matrix* m) { return padded_n(m) * padded_k(m); }

inline const float* weight_scale(const ktk_matrix* m, const void* packed) {
  const uint8_t* bytes = static_cast<const uint8_t*>(packed);
  return reinterpret_cast<const float*>(bytes + scale_offset(m));
}

}  // namespace
}  // namespace ktk::amxint8
