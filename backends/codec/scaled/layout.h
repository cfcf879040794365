// Where things are in a packed matrix of small codes with scales: the same for every element type.
//
//   packed   | block 0: columns 0..31 | block 1: columns 32..63 | ...
//   block    | start | scales | step 0: k 0..63 | step 1: k 64..127 | ...   one sequential stream
//   start    32 f32: 0, or NaN for a column that holds one
//   scales   what Scales keeps ahead of the codes
//   step     | scale lines | line, line | line, line | ...          columns 0..15, columns 16..31
//
// A line is 64 bytes of codes, 16 columns times kLineDepth of k. The lines of the two halves of a
// block take turns, so that a product with few rows works on 32 columns, two chains of additions
// per row, and still reads memory in order. n is padded to 32 and k to 64, with codes of zero.
//
// Sums start at `start`. So no kernel needs to know which codes or scales mean NaN: it may take
// them for any number, the result is NaN. A NaN weight makes all of its column NaN in any case.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "gemm/math.h"
#include "ktk/abi.h"

namespace ktk {
namespace {

constexpr size_t kNr = 32;
constexpr size_t kHalfCols = 16;
constexpr size_t kStepDepth = 64;
constexpr size_t kStartBytes = kNr * sizeof(float);

// The four ways to scale. kGroupDepth: how much k is summed up before it is scaled; kLineBytes:
// of the scale lines of a step; kUnit: what scales are multiplied with by tables of codes, for
// nothing; bytes(): of the scales ahead of all steps, one f32 per group if kPerGroup.

// A power of two per column and 32 k, as its exponent (UE8M0). A step's line has those of its first
// group, then those of its second.
struct MxScales {
  static constexpr size_t kGroupDepth = 32;
  static constexpr size_t kLineBytes = kLine;
  static constexpr float kUnit = 1;
  static constexpr bool kPerGroup = false;
  static size_t bytes(const ktk_matrix*) { return 0; }
};

// An E4M3 per column and 16 k (NVFP4). A step's lines have those of its four groups, one group
// after the other. As an f16 with its exponent, a scale is 2^-8 of itself.
struct NvScales {
  static constexpr size_t kGroupDepth = 16;
  static constexpr size_t kLineBytes = 2 * kLine;
  static constexpr float kUnit = 256;
  static constexpr bool kPerGroup = false;
  static size_t bytes(const ktk_matrix*) { return 0; }
};

// An f32 per 128 columns and 128 k: one per 128 k for a block.
struct BlockScales {
  static constexpr size_t kGroupDepth = 128;
  static constexpr size_t kLineBytes = 0;
  static constexpr bool kPerGroup = true;
  static size_t bytes(const ktk_matrix* matrix) {
    return round_up(ceil_div(matrix->k, kGroupDepth) * sizeof(float), kLine);
  }
};

// An f32 per column. Sums of 128 are scaled all the same: as chains of additions they are short
// enough that those of different groups overlap.
struct RowScales {
  static constexpr size_t kGroupDepth = 128;
  static constexpr size_t kLineBytes = 0;
  static constexpr bool kPerGroup = false;
  static size_t bytes(const ktk_matrix*) { return kNr * sizeof(float); }
};

template <size_t kLineDepth_, class Scales_>
struct ScaledLayout {
  using Scales = Scales_;
  static constexpr size_t kLineDepth = kLineDepth_;
  static constexpr size_t kCodeBytes = kStepDepth / kLineDepth * 2 * kLine;  // of a step
  static constexpr size_t kStepBytes = Scales::kLineBytes + kCodeBytes;
  static constexpr size_t kGroupBytes = Scales::kGroupDepth / kLineDepth * 2 * kLine;

  static size_t num_blocks(const ktk_matrix* matrix) { return ceil_div(matrix->n, kNr); }
  static size_t num_steps(const ktk_matrix* matrix) { return ceil_div(matrix->k, kStepDepth); }
  static size_t header_bytes(const ktk_matrix* matrix) {
    return kStartBytes + Scales::bytes(matrix);
  }
  static size_t block_bytes(const ktk_matrix* matrix) {
    return header_bytes(matrix) + num_steps(matrix) * kStepBytes;
  }
  static size_t size(const ktk_matrix* matrix) { return num_blocks(matrix) * block_bytes(matrix); }

  // Where column n, a multiple of 32, starts.
  static size_t offset(const ktk_matrix* matrix, size_t n) { return n / kNr * block_bytes(matrix); }
  // The line of one half of a block that holds k, and its neighbours of k.
  static size_t line_offset(const ktk_matrix* matrix, size_t half, size_t k) {
    return header_bytes(matrix) + k / kStepDepth * kStepBytes + Scales::kLineBytes +
           (k % kStepDepth / kLineDepth * 2 + half) * kLine;
  }
};

}  // namespace
}  // namespace ktk
