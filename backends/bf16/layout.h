// The packed weight "bf16-n32k32-vnni2", shared by all variants: n and k are padded with zeros to
// multiples of 32, and every 32 x 32 step is two B tiles of AMX, one after the other.
//
//   block of 32 columns             step of 32 k         tile: 16 columns, 1 KiB
//   +---------------------+         +--------+           column c+0     c+1   ...   c+15
//   | k 0..31    (2 KiB)  |  ---->  | tile 0 |  ----->  | k 0, 1   | k 0, 1  |   | k 0, 1   |
//   | k 32..63            |         | tile 1 |          | k 2, 3   | k 2, 3  |   | k 2, 3   |
//   | ...                 |         +--------+          |   ...                             |
//   +---------------------+                             | k 30, 31 | k 30, 31|   | k 30, 31 |
//
// One row of a tile is a cache line: for 16 columns a pair of bf16, which is what tdpbf16ps and
// vdpbf16ps multiply, and what a shift and a mask turn into two f32 vectors. A block is one
// sequential stream of 64 bytes per k; blocks follow each other, so that any range of columns is
// one stream too.
#pragma once

#include "gemm/math.h"
#include "ktk/abi.h"

namespace ktk::bf16 {
namespace {

constexpr size_t kNr = 32;
constexpr size_t kStepDepth = 32;
constexpr size_t kTileCols = 16;
constexpr size_t kPairs = kStepDepth / 2;          // rows of a tile
constexpr size_t kTileBytes = kPairs * kLine;      // 1 KiB; a row is a cache line
constexpr size_t kStepBytes = 2 * kTileBytes;      // 2 KiB
constexpr size_t kStepLines = kStepBytes / kLine;  // 32
constexpr const char* kLayout = "bf16-n32k32-vnni2";

inline size_t num_blocks(const ktk_matrix* matrix) { return ceil_div(matrix->n, kNr); }
inline size_t num_steps(const ktk_matrix* matrix) { return ceil_div(matrix->k, kStepDepth); }
inline size_t block_bytes(const ktk_matrix* matrix) { return num_steps(matrix) * kStepBytes; }

inline size_t weight_size(const ktk_matrix* matrix) {
  return num_blocks(matrix) * block_bytes(matrix);
}

// Where column n, a multiple of 32, starts.
inline size_t weight_offset(const ktk_matrix* matrix, size_t n) {
  return n / kNr * block_bytes(matrix);
}

}  // namespace
}  // namespace ktk::bf16
