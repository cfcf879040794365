// Row-major bf16, f16 or f32 weights <-> the packed layout.
#pragma once

#include <string.h>

#include "bf16/layout.h"
#include "simd/bf16.h"
#include "simd/f16.h"

#if defined(__aarch64__)
#include "bf16/transpose_neon.h"
#else
#include "bf16/transpose_avx2.h"
#endif

namespace ktk::bf16 {
namespace {

template <ktk_element kElement>
inline uint16_t element_as_bf16(const char* element) {
  uint16_t half;
  float value;
  if constexpr (kElement == KTK_F32) {
    memcpy(&value, element, sizeof value);
    return bf16_from_f32(value);
  }
  memcpy(&half, element, sizeof half);
  return kElement == KTK_F16 ? bf16_from_f32(ktk::f32_from_f16(half)) : half;
}

// A step that n or k ends in: through a copy that is padded with zeros.
template <ktk_element kElement>
inline void pack_edge(const char* rows, size_t stride, size_t num_rows, size_t depth, char* step) {
  constexpr size_t kBytes = kElement == KTK_F32 ? 4 : 2;
  alignas(64) uint16_t padded[kNr][kStepDepth] = {};
  for (size_t row = 0; row < num_rows; ++row) {
    for (size_t i = 0; i < depth; ++i) {
      padded[row][i] = element_as_bf16<kElement>(rows + row * stride + i * kBytes);
    }
  }
  pack_step<KTK_BF16>(reinterpret_cast<const char*>(padded), sizeof padded[0], step);
}

template <ktk_element kElement>
inline void pack_rows(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                      size_t n_end, char* packed) {
  constexpr size_t kBytes = kElement == KTK_F32 ? 4 : 2;
  const size_t stride = source->data_stride;
  for (size_t n = n_begin; n < n_end; n += kNr) {
    const char* rows = static_cast<const char*>(source->data) + n * stride;
    char* step = packed + n / kNr * block_bytes(matrix);
    const size_t num_rows = n_end - n < kNr ? n_end - n : kNr;
    for (size_t k = 0; k < matrix->k; k += kStepDepth, step += kStepBytes) {
      const size_t depth = matrix->k - k < kStepDepth ? matrix->k - k : kStepDepth;
      if (num_rows == kNr && depth == kStepDepth) {
        pack_step<kElement>(rows + k * kBytes, stride, step);
      } else {
        pack_edge<kElement>(rows + k * kBytes, stride, num_rows, depth, step);
      }
    }
  }
}

inline void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  char* out = static_cast<char*>(packed);
  switch (source->format.element) {
    case KTK_BF16:
      return pack_rows<KTK_BF16>(matrix, source, n_begin, n_end, out);
    case KTK_F16:
      return pack_rows<KTK_F16>(matrix, source, n_begin, n_end, out);
    case KTK_F32:
      return pack_rows<KTK_F32>(matrix, source, n_begin, n_end, out);
  }
}

// Rows [row_begin, row_end) of one block; a step at a time, so that its lines are read once.
inline void unpack_block(const ktk_matrix* matrix, const char* block, size_t row_begin,
                         size_t row_end, float* out, size_t out_stride) {
  for (size_t k = 0; k < matrix->k; k += kStepDepth, block += kStepBytes) {
    const size_t depth = matrix->k - k < kStepDepth ? matrix->k - k : kStepDepth;
    if (depth == kStepDepth && row_end - row_begin == kNr) {
      unpack_step(block, out + k, out_stride);
      continue;
    }
    for (size_t row = row_begin; row < row_end; ++row) {
      const char* pairs = block + row / kTileCols * kTileBytes + row % kTileCols * 4;
      float* to = out + (row - row_begin) * out_stride + k;
      for (size_t i = 0; i < depth; ++i) {
        uint16_t value;
        memcpy(&value, pairs + i / 2 * kLine + i % 2 * 2, sizeof value);
        to[i] = f32_from_bf16(value);
      }
    }
  }
}

inline void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, float* out, size_t out_stride) {
  for (size_t n = n_begin; n < n_end;) {
    const size_t row = n % kNr;
    const size_t count = n_end - n < kNr - row ? n_end - n : kNr - row;
    const char* block = static_cast<const char*>(packed) + n / kNr * block_bytes(matrix);
    unpack_block(matrix, block, row, row + count, out + (n - n_begin) * out_stride, out_stride);
    n += count;
  }
}

// A pair of a row is a dword of the layout. Two rows of a step are a line apart, so a block is read
// step by step, as unpack_block() does.
inline void export_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, const ktk_export* target) {
  for (size_t first = n_begin; first < n_end; first += kNr) {
    const char* step = static_cast<const char*>(packed) + weight_offset(matrix, first);
    const size_t columns = n_end - first < kNr ? n_end - first : kNr;
    char* rows = static_cast<char*>(target->data) + first * target->data_stride;
    for (size_t k = 0; k < matrix->k; k += kStepDepth, step += kStepBytes) {
      const size_t depth = matrix->k - k < kStepDepth ? matrix->k - k : kStepDepth;
      for (size_t c = 0; c < columns; ++c) {
        const char* pairs = step + c / kTileCols * kTileBytes + c % kTileCols * 4;
        char* to = rows + c * target->data_stride + k * 2;
        for (size_t i = 0; i + 1 < depth; i += 2) memcpy(to + i * 2, pairs + i / 2 * kLine, 4);
        if (depth % 2) memcpy(to + (depth - 1) * 2, pairs + depth / 2 * kLine, 2);
      }
    }
  }
}

}  // namespace
}  // namespace ktk::bf16
