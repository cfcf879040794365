// The packed layout of @NAME@: blocks of 16 columns, the depth of a block in one sequence.
//
//   block 0: w(0..15, 0)  w(0..15, 1) ... w(0..15, k-1)    block 1: w(16..31, 0) ...
//
// Columns behind the last one are zero. Every variant shares this layout, so that packed weights
// outlive the machine that packed them.
#pragma once

#include <stddef.h>

#include "ktk/abi.h"

namespace {

constexpr size_t kColumns = 16;

// First float of the block that column n is in.
inline size_t block_offset(const ktk_matrix* matrix, size_t n) {
  return n / kColumns * kColumns * matrix->k;
}

}  // namespace
