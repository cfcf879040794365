// Where a weight is in a packed matrix, in the two layouts.
//
// "i8-rows", of sgemm: as it was given.
//
//   [n rows][k padded to 64 codes]   f32 scale[n]
//
// "lpgemm-n128k512-<what the library makes of it>", of lpgemm_int8: tiles of 128 columns, as deep
// as a group of activations, each as the library reorders it.
//
//   [n / 128 tiles][k / 512 groups][what aocl_reorder_s8s8s32os32 writes, padded to 64 bytes]
//   f32 scale[n]
//
//                      k 0..511    512..1023   ...
//   columns 0..127    | block 0  | block 1  |            one call of the library each,
//   columns 128..255  | block 4  | ...                   one sequential stream for a tile
//
// The last tile has the columns that are left, the last block of a tile the depth that is left,
// both padded with zeros, to 16 columns and 64 codes: for odd sizes libraries have code of their
// own, which the self-test would have to cover.
//
// Blocks are opaque, and differ between libraries and between CPUs. About 4 bytes for each column
// of a block are the library's sums of codes.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "blis/library.h"
#include "gemm/math.h"
#include "ktk/abi.h"

namespace ktk::blis {
namespace {

// Set before the table is handed out.
const Calls* calls;

constexpr char kRowsLayout[] = "i8-rows";
constexpr size_t kCodes = 64;  // rows of codes are padded to a multiple
constexpr size_t kCallColumns = 16;

// A call costs half a microsecond: wider tiles waste less of it, narrower ones divide better among
// workers. 128 x 512 codes take 4 us from memory at 16 GB/s. The depth is that of an activation's
// group; sums of 512 products of codes stay below 2^24, so float products are exact, too.
static_assert(kDepth % kCodes == 0 && kDepth * 127 * 128 < 1 << 24);

inline size_t num_groups(const ktk_matrix* matrix) { return ceil_div(matrix->k, kDepth); }
inline size_t group_depth(const ktk_matrix* matrix, size_t group) {
  return smaller(kDepth, matrix->k - group * kDepth);
}
inline size_t tile_columns(const ktk_matrix* matrix, size_t n) {
  return smaller(kNr, matrix->n - n);
}

// --- i8-rows

inline size_t row_bytes(const ktk_matrix* matrix) { return round_up(matrix->k, kCodes); }
inline size_t rows_scale_offset(const ktk_matrix* matrix) { return matrix->n * row_bytes(matrix); }
inline size_t rows_size(const ktk_matrix* matrix) {
  return rows_scale_offset(matrix) + round_up(matrix->n * sizeof(float), KTK_ALIGNMENT);
}
inline size_t rows_offset(const ktk_matrix* matrix, size_t n) { return n * row_bytes(matrix); }

// --- lpgemm

// What the library is told of a block.
inline int64_t call_columns(size_t columns) {
  return static_cast<int64_t>(round_up(columns, kCallColumns));
}
inline int64_t call_depth(size_t depth) { return static_cast<int64_t>(round_up(depth, kCodes)); }

inline size_t block_bytes(size_t columns, size_t depth) {
  const size_t bytes =
      calls->reorder_size('r', 't', 'B', call_depth(depth), call_columns(columns), nullptr);
  return round_up(bytes, KTK_ALIGNMENT);
}

inline size_t tile_bytes(const ktk_matrix* matrix, size_t columns) {
  const size_t rest = matrix->k % kDepth;
  return matrix->k / kDepth * block_bytes(columns, kDepth) +
         (rest ? block_bytes(columns, rest) : 0);
}

// Of the tile that starts at column n, a multiple of 128.
inline size_t tile_offset(const ktk_matrix* matrix, size_t n) {
  return n ? n / kNr * tile_bytes(matrix, kNr) : 0;
}

inline size_t tiles_scale_offset(const ktk_matrix* matrix) {
  const size_t last = matrix->n % kNr;
  return tile_offset(matrix, matrix->n - last) + (last ? tile_bytes(matrix, last) : 0);
}

inline size_t tiles_size(const ktk_matrix* matrix) {
  return tiles_scale_offset(matrix) + round_up(matrix->n * sizeof(float), KTK_ALIGNMENT);
}

}  // namespace
}  // namespace ktk::blis
