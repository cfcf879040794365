// Rows <-> blocks of 32 n.
#pragma once

#include <string.h>

#include "llamafile/floats/layout.h"
#include "simd/f16.h"

namespace ktk::llamafile::floats {
namespace {

constexpr size_t kDepth = 32;  // of a square that is transposed

// The square rests in L1 while it is transposed: rows of a matrix may be a power of two apart.
template <class T>
inline void pack_rows(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                      size_t n_end, char* packed) {
  for (size_t n = n_begin; n < n_end; n += kNr) {
    const char* rows = static_cast<const char*>(source->data) + n * source->data_stride;
    const size_t num_rows = smaller(n_end - n, kNr);
    T* block = reinterpret_cast<T*>(packed + weight_offset(matrix, n));
    T square[kNr][kDepth] = {};
    for (size_t k = 0; k < matrix->k; k += kDepth) {
      const size_t depth = smaller(matrix->k - k, kDepth);
      for (size_t row = 0; row < num_rows; ++row) {
        memcpy(square[row], rows + row * source->data_stride + k * sizeof(T), depth * sizeof(T));
      }
      for (size_t i = 0; i < depth; ++i, block += kNr) {
        for (size_t row = 0; row < kNr; ++row) block[row] = square[row][i];
      }
    }
  }
}

inline void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  char* out = static_cast<char*>(packed);
  if (element_bytes(matrix) == 4) return pack_rows<uint32_t>(matrix, source, n_begin, n_end, out);
  pack_rows<uint16_t>(matrix, source, n_begin, n_end, out);
}

template <class T, class Widen>
inline void unpack_rows(const ktk_matrix* matrix, const char* packed, size_t n_begin, size_t n_end,
                        float* out, size_t out_stride, Widen widen) {
  for (size_t n = n_begin; n < n_end;) {
    const size_t first = n % kNr, count = smaller(n_end - n, kNr - first);
    const T* block = reinterpret_cast<const T*>(packed + weight_offset(matrix, n)) + first;
    for (size_t k = 0; k < matrix->k; ++k, block += kNr) {
      for (size_t row = 0; row < count; ++row) out[row * out_stride + k] = widen(block[row]);
    }
    n += count;
    out += count * out_stride;
  }
}

inline void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, float* out, size_t out_stride) {
  const char* in = static_cast<const char*>(packed);
  switch (matrix->format.element) {
    case KTK_F32:
      return unpack_rows<float>(matrix, in, n_begin, n_end, out, out_stride,
                                [](float x) { return x; });
    case KTK_F16:
      return unpack_rows<uint16_t>(matrix, in, n_begin, n_end, out, out_stride, f32_from_f16);
  }
}

}  // namespace
}  // namespace ktk::llamafile::floats
