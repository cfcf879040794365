// Variant lpgemm_int8: int8 products of the library, on weights that it reordered while packing.
#pragma once

#include <string.h>

#include "blis/group_sum.h"
#include "blis/weight.h"

namespace ktk::blis {
namespace {

struct Lpgemm {
  static constexpr char kName[] = "lpgemm_int8", kUkernel[] = "gemm_s8";
  // The module names the layout: only the library knows what it looks like.
  static constexpr const char* kLayout = nullptr;

  static size_t weight_size(const ktk_matrix* matrix) { return tiles_size(matrix); }
  static size_t weight_offset(const ktk_matrix* matrix, size_t n) { return tile_offset(matrix, n); }

  static const float* weight_scale(const ktk_matrix* matrix, const void* packed) {
    const uint8_t* bytes = static_cast<const uint8_t*>(packed);
    return reinterpret_cast<const float*>(bytes + tiles_scale_offset(matrix));
  }

  static void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                          size_t n_end, void* packed) {
    calls->one_thread();
    float* scale = const_cast<float*>(weight_scale(matrix, packed));
    with_rows<kNr, kCodes>(matrix, source, [&](auto rows) {
      for (size_t n = n_begin; n < n_end; n += kNr) {
        const size_t columns = tile_columns(matrix, n);
        for (size_t i = 0; i < columns; ++i) scale[n + i] = rows.scale(n + i);
        pack_tile(matrix, rows, n, columns, packed);
      }
    });
    if (n_end == matrix->n) end_scales(matrix, scale);
  }

  // Codes come back by multiplying rows of the identity with the blocks: exact, and no second copy
  // of the weights is needed.
  static void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                            size_t n_end, float* out, size_t out_stride) {
    const float* scale = weight_scale(matrix, packed);
    for_each_code(matrix, packed, n_begin, n_end, [&](size_t n, size_t k, int32_t code) {
      out[(n - n_begin) * out_stride + k] = static_cast<float>(code) * scale[n];
    });
  }

  static void export_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                            size_t n_end, const ktk_export* target) {
    const float* scale = weight_scale(matrix, packed);
    for (size_t n = n_begin; n < n_end; ++n) export_scale(target, n, scale[n]);
    for_each_code(matrix, packed, n_begin, n_end, [target](size_t n, size_t k, int32_t code) {
      target_row(target, n)[k] = static_cast<int8_t>(code);
    });
  }

  static size_t scratch_size(const ktk_matrix*, size_t m) { return m * kNr * sizeof(int32_t); }

  static void run(const ktk_matmul* mm) {
    calls->one_thread();
    const ktk_matrix* matrix = mm->matrix;
    const float* scale = weight_scale(matrix, mm->weight);
    const int8_t* act = static_cast<const int8_t*>(mm->act);
    int32_t* c = static_cast<int32_t*>(mm->scratch);
    const int8_t* block = static_cast<const int8_t*>(mm->weight) + tile_offset(matrix, mm->n_begin);
    for (size_t n = mm->n_begin; n < mm->n_end; n += kNr) {
      const size_t columns = tile_columns(matrix, n);
      for (size_t g = 0; g < num_groups(matrix); ++g) {
        const size_t depth = group_depth(matrix, g);
        multiply(mm->m, columns, depth, act + g * kDepth, mm->act_stride, block, c);
        add_group(mm, n, columns, g, c, scale);
        block += block_bytes(columns, depth);
      }
    }
  }

 private:
  // c[m][kNr] = a x block.
  static void multiply(size_t m, size_t columns, size_t depth, const int8_t* a, size_t lda,
                       const int8_t* block, int32_t* c) {
    const int64_t k = call_depth(depth);
    calls->gemm_s8('r', 'n', 't', static_cast<int64_t>(m), call_columns(columns), k, 1, a,
                   static_cast<int64_t>(lda), 'n', block, k, 'r', 0, c, kNr, nullptr);
  }

  template <class Rows>
  static void pack_tile(const ktk_matrix* matrix, const Rows& rows, size_t n, size_t columns,
                        void* packed) {
    alignas(64) uint8_t plain[kNr * kDepth];
    int8_t* block = static_cast<int8_t*>(packed) + tile_offset(matrix, n);
    for (size_t g = 0; g < num_groups(matrix); ++g) {
      const size_t depth = group_depth(matrix, g);
      memset(plain + columns * kDepth, 0, (kNr - columns) * kDepth);
      for (size_t i = 0; i < columns; ++i) {
        for (size_t k = 0; k < depth; k += kCodes) {
          rows.codes(n + i, g * kDepth + k, plain + i * kDepth + k);
        }
      }
      const size_t bytes = block_bytes(columns, depth);
      memset(block, 0, bytes);  // the library need not write its padding
      calls->reorder('r', 't', 'B', reinterpret_cast<const int8_t*>(plain), block,
                     call_depth(depth), call_columns(columns), kDepth, nullptr);
      block += bytes;
    }
  }

  template <class Take>
  static void for_each_code(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                            size_t n_end, Take take) {
    constexpr size_t kRows = 32;  // of the identity at a time
    calls->one_thread();
    alignas(64) int8_t unit[kRows * kDepth];
    alignas(64) int32_t c[kRows * kNr];
    memset(unit, 0, sizeof unit);
    const size_t first = n_begin / kNr * kNr;
    const int8_t* block = static_cast<const int8_t*>(packed) + tile_offset(matrix, first);
    for (size_t n = first; n < n_end; n += kNr) {
      const size_t columns = tile_columns(matrix, n);
      const size_t from = n < n_begin ? n_begin - n : 0, to = smaller(columns, n_end - n);
      for (size_t g = 0; g < num_groups(matrix); ++g) {
        const size_t depth = group_depth(matrix, g);
        for (size_t k = 0; k < depth; k += kRows) {
          const size_t rows = smaller(kRows, depth - k);
          for (size_t i = 0; i < rows; ++i) unit[i * kDepth + k + i] = 1;
          multiply(rows, columns, depth, unit, kDepth, block, c);
          for (size_t i = 0; i < rows; ++i) unit[i * kDepth + k + i] = 0;
          for (size_t j = from; j < to; ++j) {
            for (size_t i = 0; i < rows; ++i) take(n + j, g * kDepth + k + i, c[i * kNr + j]);
          }
        }
        block += block_bytes(columns, depth);
      }
    }
  }
};

}  // namespace
}  // namespace ktk::blis
