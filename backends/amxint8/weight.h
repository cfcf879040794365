// Weight codec: floats or ready int8 rows to and from the layout in layout.h.
#pragma once

#include "amxint8/layout.h"
#include "common/int8.h"

namespace ktk::amxint8 {
namespace {

// Rows of one block on their way into tiles: 16 rows, one step deep.
using Codes = uint8_t[16][kDepth];

inline void store_codes(uint8_t* out, __m128i q) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), q);
}

// Reads rows of floats: scale = absmax / 127 of the row, code = x / scale to nearest even. A row
// with NaN or Inf has the scale NaN and codes 0.
template <class Element>
struct FloatRows {
  using Storage = typename Element::Storage;
  const ktk_source* source;
  size_t k;
  SymmetricScale scales[kColumns];  // of the block that is being packed

  FloatRows(const ktk_source* from, size_t depth) : source(from), k(depth) {}

  const Storage* row(size_t n) const {
    const char* data = static_cast<const char*>(source->data);
    return reinterpret_cast<const Storage*>(data + n * source->data_stride);
  }
  float scale(size_t n) {
    scales[n % kColumns] = symmetric_scale(Element::absmax(row(n), k));
    return scales[n % kColumns].scale;
  }
  // Fetches what codes() of the same arguments reads.
  void prefetch(size_t n, size_t k_begin) const {
    const char* from = reinterpret_cast<const char*>(row(n) + k_begin);
    for (size_t i = 0; i < kDepth * sizeof(Storage); i += 64) _mm_prefetch(from + i, _MM_HINT_T1);
  }
  void codes(size_t n, size_t k_begin, uint8_t* out) const {
    const SymmetricScale s = scales[n % kColumns];
    const Storage* from = row(n) + k_begin;
    if (k_begin + kDepth <= k) {
      for (size_t i = 0; i < kDepth; i += 16) {
        store_codes(out + i, narrow(quantise(Element::load(from + i), s)));
      }
      return;
    }
    for (size_t i = 0; i < kDepth; i += 16) {
      const size_t left = k_begin + i < k ? k - k_begin - i : 0;
      const F32x16 x = load_some<Element>(left ? from + i : from, left);
      store_codes(out + i, narrow(quantise(x, s)));
    }
  }
};

// Copies rows that are int8 with a scale each already.
struct ReadyRows {
  const ktk_source* source;
  size_t k;

  ReadyRows(const ktk_source* from, size_t depth) : source(from), k(depth) {}

  float scale(size_t n) const {
    const char* scale = static_cast<const char*>(source->scale);
    return *reinterpret_cast<const float*>(scale + n * source->scale_stride);
  }
  void prefetch(size_t n, size_t k_begin) const {
    const char* data = static_cast<const char*>(source->data);
    _mm_prefetch(data + n * source->data_stride + k_begin, _MM_HINT_T1);
  }
  void codes(size_t n, size_t k_begin, uint8_t* out) const {
    const uint8_t* from =
        static_cast<const uint8_t*>(source->data) + n * source->data_stride + k_begin;
    const size_t count = smaller(kDepth, k - k_begin);
    if (count == kDepth) {
      for (size_t i = 0; i < kDepth; i += 16) {
        store_codes(out + i, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
      }
      return;
    }
    for (size_t i = 0; i < kDepth; ++i) out[i] = i < count ? from[i] : 0;
  }
};

template <class Rows>
inline void pack_blocks(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  Rows rows(source, matrix->k);
  uint8_t* bytes = static_cast<uint8_t*>(packed);
  float* scale = reinterpret_cast<float*>(bytes + scale_offset(matrix));
  for (size_t n = n_begin; n < n_end; n += kColumns) {
    for (size_t i = 0; i < kColumns; ++i) scale[n + i] = n + i < n_end ? rows.scale(n + i) : 0;
    uint8_t* tile = bytes + block_offset(matrix, n);
    for (size_t k = 0; k < matrix->k; k += kDepth) {
      for (size_t half = n; half < n + kColumns; half += 16, tile += kTileBytes) {
        alignas(64) Codes codes;
        for (size_t i = 0; i < 16; ++i) {
          if (half + i < n_end) {
            rows.codes(half + i, k, codes[i]);
            if (half + i + kColumns < n_end) rows.prefetch(half + i + kColumns, k);
          } else {
            for (size_t j = 0; j < kDepth; ++j) codes[i][j] = 0;
          }
        }
        transpose_to_offset_binary(codes, tile);
      }
    }
  }
}

inline void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  switch (source->format.element) {
    case KTK_F32:
      return pack_blocks<FloatRows<ElementF32>>(matrix, source, n_begin, n_end, packed);
    case KTK_F16:
      return pack_blocks<FloatRows<ElementF16>>(matrix, source, n_begin, n_end, packed);
    case KTK_BF16:
      return pack_blocks<FloatRows<ElementBf16>>(matrix, source, n_begin, n_end, packed);
    default:
      return pack_blocks<ReadyRows>(matrix, source, n_begin, n_end, packed);
  }
}

inline void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, float* out, size_t out_stride) {
  const float* scale = weight_scale(matrix, packed);
  for (size_t n = n_begin; n < n_end; ++n, out += out_stride) {
    const uint8_t* column = static_cast<const uint8_t*>(packed) +
                            block_offset(matrix, n / kColumns * kColumns) +
                            n % kColumns / 16 * kTileBytes + n % 16 * 4;
    for (size_t k = 0; k < matrix->k; ++k) {
      const uint8_t code = column[k / kDepth * kStepBytes + k % kDepth / 4 * 64 + k % 4];
      out[k] = static_cast<float>(code - 128) * scale[n];
    }
  }
}

inline void export_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, const ktk_target* target) {
  const float* scale = weight_scale(matrix, packed);
  for (size_t n = n_begin; n < n_end; ++n) {
    const uint8_t* column = static_cast<const uint8_t*>(packed) +
                            block_offset(matrix, n / kColumns * kColumns) +
                            n % kColumns / 16 * kTileBytes + n % 16 * 4;
    uint8_t* row = static_cast<uint8_t*>(target->data) + n * target->data_stride;
    for (size_t k = 0; k < matrix->k; k += 4) {
      const uint8_t* from = column + k / kDepth * kStepBytes + k % kDepth / 4 * 64;
      // From offset binary: the sign bit is the other way round.
      for (size_t i = 0; i < 4 && k + i < matrix->k; ++i) row[k + i] = from[i] ^ 0x80;
    }
    char* to = static_cast<char*>(target->scale) + n * target->scale_stride;
    *reinterpret_cast<float*>(to) = scale[n];
  }
}

}  // namespace
}  // namespace ktk::amxint8
