// Weight codec: floats or ready int8 rows to and from the layout in layout.h.
#pragma once

#include "amxint8/layout.h"
#include "codec/int8/quantize.h"
#include "codec/int8/rows.h"
#include "simd/transpose.h"

namespace ktk::amxint8 {
namespace {

// Stores 16 rows of 16 dwords as 16 columns, with every byte's top bit flipped: two's complement
// becomes offset binary. tile[r][c] = rows[c][r].
inline void transpose_to_offset_binary(const uint8_t rows[16][64], uint8_t* tile) {
  const __m128i flip = _mm_set1_epi8(-128);
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < 4; ++c) {
      __m128i in[4];
      for (int i = 0; i < 4; ++i) {
        const uint8_t* from = rows[4 * c + i] + 16 * r;
        in[i] = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), flip);
      }
      transpose_dwords(in);
      __m128i* to = reinterpret_cast<__m128i*>(tile + 256 * r + 16 * c);
      for (int i = 0; i < 4; ++i) _mm_storeu_si128(to + 4 * i, in[i]);
    }
  }
}

// Rows of one block on their way into tiles: 16 rows, one step deep.
using Codes = uint8_t[kTileCols][kStepDepth];

template <class Rows>
inline void pack_blocks(const ktk_matrix* matrix, Rows& rows, size_t n_begin, size_t n_end,
                        void* packed) {
  uint8_t* bytes = static_cast<uint8_t*>(packed);
  float* scale = reinterpret_cast<float*>(bytes + scale_offset(matrix));
  for (size_t n = n_begin; n < n_end; n += kNr) {
    for (size_t i = 0; i < kNr; ++i) scale[n + i] = n + i < n_end ? rows.scale(n + i) : 0;
    uint8_t* tile = bytes + weight_offset(matrix, n);
    for (size_t k = 0; k < matrix->k; k += kStepDepth) {
      for (size_t half = n; half < n + kNr; half += kTileCols, tile += kTileBytes) {
        alignas(64) Codes codes;
        for (size_t i = 0; i < kTileCols; ++i) {
          if (half + i < n_end) {
            rows.codes(half + i, k, codes[i]);
            if (half + i + kNr < n_end) rows.prefetch(half + i + kNr, k);
          } else {
            for (size_t j = 0; j < kStepDepth; ++j) codes[i][j] = 0;
          }
        }
        transpose_to_offset_binary(codes, tile);
      }
    }
  }
}

inline void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  with_rows<kNr, kStepDepth>(matrix, source,
                             [&](auto rows) { pack_blocks(matrix, rows, n_begin, n_end, packed); });
}

// Where column n starts in its tiles, and its code k from there.
inline const uint8_t* first_code(const ktk_matrix* matrix, const void* packed, size_t n) {
  return static_cast<const uint8_t*>(packed) + weight_offset(matrix, n / kNr * kNr) +
         n % kNr / kTileCols * kTileBytes + n % kTileCols * 4;
}
inline size_t code_offset(size_t k) {
  return k / kStepDepth * kStepBytes + k % kStepDepth / 4 * kLine + k % 4;
}

inline void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, float* out, size_t out_stride) {
  const float* scale = weight_scales(matrix, packed);
  for (size_t n = n_begin; n < n_end; ++n, out += out_stride) {
    const uint8_t* column = first_code(matrix, packed, n);
    const __m256 factor = _mm256_set1_ps(scale[n]);
    size_t k = 0;
    for (; k + 8 <= matrix->k; k += 8) {
      const uint8_t* const from = column + code_offset(k);
      int32_t four[2];
      memcpy(four, from, 4);
      memcpy(four + 1, from + kLine, 4);
      const __m256i codes = _mm256_cvtepu8_epi32(_mm_setr_epi32(four[0], four[1], 0, 0));
      const __m256i values = _mm256_sub_epi32(codes, _mm256_set1_epi32(128));
      _mm256_storeu_ps(out + k, _mm256_mul_ps(_mm256_cvtepi32_ps(values), factor));
    }
    for (; k < matrix->k; ++k) {
      const uint8_t code = column[code_offset(k)];
      out[k] = static_cast<float>(code - 128) * scale[n];
    }
  }
}

inline void export_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, const ktk_export* target) {
  const float* scale = weight_scales(matrix, packed);
  for (size_t n = n_begin; n < n_end; ++n) {
    const uint8_t* column = first_code(matrix, packed, n);
    uint8_t* row = static_cast<uint8_t*>(target->data) + n * target->data_stride;
    for (size_t k = 0; k < matrix->k; k += 4) {
      const uint8_t* from = column + code_offset(k);
      // From offset binary: the sign bit is the other way round.
      for (size_t i = 0; i < 4 && k + i < matrix->k; ++i) row[k + i] = from[i] ^ 0x80;
    }
    char* to = static_cast<char*>(target->scale) + n * target->scale_stride;
    *reinterpret_cast<float*>(to) = scale[n];
  }
}

}  // namespace
}  // namespace ktk::amxint8
