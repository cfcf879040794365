// Variant sgemm: float products of the library on codes that are widened tile by tile, where it has
// nothing for int8. Correct anywhere, and slow: the library reads four times the bytes.
//
// Codes are integers and a group's sums stay below 2^24, so the result is exact whatever order the
// library adds in, and a row has the same bits beside any other rows.
#pragma once

#include <string.h>

#include "blis/group_sum.h"
#include "blis/weight.h"

namespace ktk::blis {
namespace {

inline void widen(const int8_t* codes, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = static_cast<float>(codes[i]);
}

struct Sgemm {
  static constexpr char kName[] = "sgemm", kUkernel[] = "sgemm";
  static constexpr const char* kLayout = kRowsLayout;
  // Floats between widened rows: not a power of two, for the L1 cache of the library's packing.
  static constexpr size_t kStride = kDepth + 16;

  static size_t weight_size(const ktk_matrix* matrix) { return rows_size(matrix); }
  static size_t weight_offset(const ktk_matrix* matrix, size_t n) { return rows_offset(matrix, n); }

  static const float* weight_scale(const ktk_matrix* matrix, const void* packed) {
    const uint8_t* bytes = static_cast<const uint8_t*>(packed);
    return reinterpret_cast<const float*>(bytes + rows_scale_offset(matrix));
  }

  static void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                          size_t n_end, void* packed) {
    float* scale = const_cast<float*>(weight_scale(matrix, packed));
    with_rows<kNr, kCodes>(matrix, source, [&](auto rows) {
      for (size_t n = n_begin; n < n_end; ++n) {
        scale[n] = rows.scale(n);
        uint8_t* row = static_cast<uint8_t*>(packed) + rows_offset(matrix, n);
        for (size_t k = 0; k < matrix->k; k += kCodes) rows.codes(n, k, row + k);
      }
    });
    if (n_end == matrix->n) end_scales(matrix, scale);
  }

  static void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                            size_t n_end, float* out, size_t out_stride) {
    const float* scale = weight_scale(matrix, packed);
    for (size_t n = n_begin; n < n_end; ++n, out += out_stride) {
      const int8_t* row = static_cast<const int8_t*>(packed) + rows_offset(matrix, n);
      for (size_t k = 0; k < matrix->k; ++k) out[k] = static_cast<float>(row[k]) * scale[n];
    }
  }

  static void export_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                            size_t n_end, const ktk_export* target) {
    const float* scale = weight_scale(matrix, packed);
    for (size_t n = n_begin; n < n_end; ++n) {
      export_scale(target, n, scale[n]);
      memcpy(target_row(target, n), static_cast<const int8_t*>(packed) + rows_offset(matrix, n),
             matrix->k);
    }
  }

  // Widened activations of a group, widened weights of a tile, their product.
  static size_t scratch_size(const ktk_matrix*, size_t m) {
    return ((m + kNr) * kStride + m * kNr) * sizeof(float);
  }

  static void run(const ktk_matmul* mm) {
    calls->one_thread();
    const ktk_matrix* matrix = mm->matrix;
    const float* scale = weight_scale(matrix, mm->weight);
    float* a = static_cast<float*>(mm->scratch);
    float* b = a + mm->m * kStride;
    float* c = b + kNr * kStride;
    for (size_t g = 0; g < num_groups(matrix); ++g) {
      const size_t depth = group_depth(matrix, g);
      const int8_t* act = static_cast<const int8_t*>(mm->act) + g * kDepth;
      for (size_t i = 0; i < mm->m; ++i) widen(act + i * mm->act_stride, depth, a + i * kStride);
      for (size_t n = mm->n_begin; n < mm->n_end; n += kNr) {
        const size_t columns = tile_columns(matrix, n);
        const int8_t* rows =
            static_cast<const int8_t*>(mm->weight) + rows_offset(matrix, n) + g * kDepth;
        for (size_t j = 0; j < columns; ++j) {
          widen(rows + j * row_bytes(matrix), depth, b + j * kStride);
        }
        calls->sgemm(kRowMajor, kNoTrans, kTrans, static_cast<int>(mm->m),
                     static_cast<int>(columns), static_cast<int>(depth), 1.0f, a, kStride, b,
                     kStride, 0.0f, c, kNr);
        add_group(mm, n, columns, g, c, scale);
      }
    }
  }
};

}  // namespace
}  // namespace ktk::blis
