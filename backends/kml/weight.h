// Weight codec: floats or ready int8 rows to and from the layout in layout.h.
#pragma once

#include <string.h>

#include "codec/int8/rows.h"
#include "kml/layout.h"

namespace ktk::kml {
namespace {

constexpr size_t kChunk = 64;  // depth that is quantised at a time: a cache line of codes

template <class Rows>
inline void pack_blocks(const ktk_matrix* matrix, Rows& rows, size_t n_begin, size_t n_end,
                        void* packed) {
  for (size_t n = n_begin; n < n_end; n += kNr) {
    uint8_t* block = static_cast<uint8_t*>(packed) + block_offset(matrix, n);
    float scales[kLineBytes / sizeof(float)] = {};
    uint8_t codes[kNr][kChunk] = {};
    for (size_t i = 0; i < kNr && n + i < n_end; ++i) scales[i] = rows.scale(n + i);
    memcpy(block + scale_offset(matrix), scales, sizeof scales);
    for (size_t k = 0; k < padded_k(matrix); k += kChunk) {
      for (size_t i = 0; i < kNr && n + i < n_end; ++i) {
        rows.codes(n + i, k, codes[i]);
        if (n + i + kNr < n_end) rows.prefetch(n + i + kNr, k);
      }
      const size_t depth = smaller(kChunk, padded_k(matrix) - k);
      for (size_t line = 0; line < depth; line += kLineDepth) {
        uint8_t* to = block + (k + line) * kNr;
        for (size_t i = 0; i < kNr; ++i) {
          memcpy(to + i * kLineDepth, codes[i] + line, kLineDepth);
        }
      }
    }
  }
}

inline void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  with_rows<kNr, kChunk>(matrix, source,
                         [&](auto rows) { pack_blocks(matrix, rows, n_begin, n_end, packed); });
}

inline void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, float* out, size_t out_stride) {
  for (size_t n = n_begin; n < n_end; ++n, out += out_stride) {
    const char* block = static_cast<const char*>(packed) + block_offset(matrix, n);
    const int8_t* column = reinterpret_cast<const int8_t*>(block) + n % kNr * kLineDepth;
    float scale;
    memcpy(&scale, block + scale_offset(matrix) + n % kNr * sizeof scale, sizeof scale);
    for (size_t k = 0; k < matrix->k; ++k) {
      out[k] = static_cast<float>(column[k / kLineDepth * kLineBytes + k % kLineDepth]) * scale;
    }
  }
}

}  // namespace
}  // namespace ktk::kml
