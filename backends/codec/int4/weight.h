// Weight codec: rows of codes with their scales and zero points into the layout in layout.h, and
// out of it. Where rows come from is up to `Rows`, so that codes can also be made on the way.
//
// Rows offers, for row n of the source:
//   Group group(n, g)                   scale and zero point of its group g, as they are stored
//   codes(n, k, count, group, out)      `count` codes (at most 32) from k on, two a byte; the rest
//                                       of the 16 bytes at out may be overwritten with anything
#pragma once

#include <immintrin.h>
#include <string.h>

#include "codec/int4/layout.h"
#include "simd/bf16.h"
#include "simd/transpose.h"

namespace ktk::int4 {
namespace {

struct Group {
  uint16_t scale, zero;  // bits as stored
};

constexpr size_t kChunkDepth = 32;  // codes of a row that are moved at once: 16 bytes
constexpr uint8_t kFixedPair = kFixedZero * 0x11;

// Scales and zero points are of one type.
inline float group_value(const ktk_format& format, uint16_t bits) {
  return format.scale == KTK_F16 ? _cvtsh_ss(bits) : f32_from_bf16(bits);
}
inline uint16_t group_bits(const ktk_format& format, float value) {
  return format.scale == KTK_F16 ? _cvtss_sh(value, _MM_FROUND_CUR_DIRECTION)
                                 : bf16_from_f32(value);
}

// Copies what is 4-bit codes already.
struct ReadyRows {
  const ktk_source* source;

  Group group(size_t n, size_t g) const {
    const char* scale = static_cast<const char*>(source->scale) + n * source->scale_stride;
    Group group = {reinterpret_cast<const uint16_t*>(scale)[g], 0};
    if (source->format.zero != KTK_NONE) {
      const uint8_t* zero = static_cast<const uint8_t*>(source->zero) + n * source->zero_stride;
      group.zero = source->format.zero == KTK_U8 ? group_bits(source->format, zero[g])
                                                 : reinterpret_cast<const uint16_t*>(zero)[g];
    }
    return group;
  }
  void codes(size_t n, size_t k, size_t count, Group, uint8_t* out) const {
    const uint8_t* row = static_cast<const uint8_t*>(source->data) + n * source->data_stride;
    if (count == kChunkDepth) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + k / 2)));
      return;
    }
    for (size_t i = 0; i < (count + 1) / 2; ++i) out[i] = row[k / 2 + i];
  }
};

// Four steps of 32 columns from 16 bytes of each: a transpose of dwords.
inline void store_steps(const uint8_t (*rows)[16], uint8_t* steps) {
  for (size_t c = 0; c < kNr; c += 4) {
    __m128i in[4];
    for (size_t i = 0; i < 4; ++i) {
      in[i] = _mm_load_si128(reinterpret_cast<const __m128i*>(rows[c + i]));
    }
    transpose_dwords(in);
    for (size_t step = 0; step < 4; ++step) {
      _mm_store_si128(reinterpret_cast<__m128i*>(steps + step * kStepBytes + 4 * c), in[step]);
    }
  }
}

template <class Rows>
inline void pack_rows(const ktk_matrix* matrix, const Rows& source, size_t n_begin, size_t n_end,
                      void* packed) {
  const size_t depth = group_depth(matrix);
  for (size_t n = n_begin; n < n_end; n += kNr) {
    const size_t columns = smaller(kNr, n_end - n);
    uint8_t* to = static_cast<uint8_t*>(packed) + block_offset(matrix, n);
    for (size_t begin = 0; begin < padded_k(matrix); begin += depth) {
      Group groups[kNr] = {};
      for (size_t c = 0; c < columns; ++c) groups[c] = source.group(n + c, begin / depth);
      uint16_t* scales = reinterpret_cast<uint16_t*>(to);
      for (size_t c = 0; c < kNr; ++c) {
        scales[c] = groups[c].scale;
        if (has_zeros(matrix)) scales[kNr + c] = groups[c].zero;
      }
      to += header_bytes(matrix);
      for (size_t k = begin; k < begin + depth; k += kChunkDepth) {
        const size_t count = k < matrix->k ? smaller(kChunkDepth, matrix->k - k) : 0;
        alignas(16) uint8_t rows[kNr][16];
        for (size_t c = 0; c < kNr; ++c) {
          for (uint8_t& pair : rows[c]) pair = kFixedPair;
          if (c < columns && count) source.codes(n + c, k, count, groups[c], rows[c]);
        }
        store_steps(rows, to);
        to += kChunkDepth / kStepDepth * kStepBytes;
      }
    }
  }
}

inline void pack_ready(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                       size_t n_end, void* packed) {
  pack_rows(matrix, ReadyRows{source}, n_begin, n_end, packed);
}

inline void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, float* out, size_t out_stride) {
  const size_t depth = group_depth(matrix);
  for (size_t n = n_begin; n < n_end; ++n, out += out_stride) {
    const size_t column = n % kNr;
    const uint8_t* group =
        static_cast<const uint8_t*>(packed) + block_offset(matrix, n / kNr * kNr);
    for (size_t begin = 0; begin < matrix->k; begin += depth, group += group_bytes(matrix)) {
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(group) + column;
      const float scale = group_value(matrix->format, scales[0]);
      const float zero = has_zeros(matrix) ? group_value(matrix->format, scales[kNr]) : kFixedZero;
      const uint8_t* codes = group + header_bytes(matrix) + 4 * column;
      const size_t end = smaller(begin + depth, matrix->k);
      size_t k = begin;
      const __m128i nibble = _mm_set1_epi8(15);
      for (; k + kStepDepth <= end; k += kStepDepth) {
        int32_t pairs;
        memcpy(&pairs, codes + (k - begin) / kStepDepth * kStepBytes, sizeof pairs);
        const __m128i both = _mm_cvtsi32_si128(pairs);
        const __m128i low = _mm_and_si128(both, nibble);
        const __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
        const __m256 values =
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)));
        const __m256 centred = _mm256_sub_ps(values, _mm256_set1_ps(zero));
        _mm256_storeu_ps(out + k, _mm256_mul_ps(centred, _mm256_set1_ps(scale)));
      }
      for (; k < end; ++k) {
        const size_t in_group = k - begin;
        const uint8_t pair = codes[in_group / kStepDepth * kStepBytes + in_group % kStepDepth / 2];
        const int code = k % 2 ? pair >> 4 : pair & 15;
        out[k] = (static_cast<float>(code) - zero) * scale;
      }
    }
  }
}

inline void export_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, const ktk_export* target) {
  const size_t depth = group_depth(matrix);
  for (size_t n = n_begin; n < n_end; ++n) {
    const size_t column = n % kNr;
    const uint8_t* group =
        static_cast<const uint8_t*>(packed) + block_offset(matrix, n / kNr * kNr);
    uint8_t* data = static_cast<uint8_t*>(target->data) + n * target->data_stride;
    uint8_t* scale = static_cast<uint8_t*>(target->scale) + n * target->scale_stride;
    uint8_t* zero = static_cast<uint8_t*>(target->zero) + n * target->zero_stride;
    for (size_t g = 0; g * depth < matrix->k; ++g, group += group_bytes(matrix)) {
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(group) + column;
      reinterpret_cast<uint16_t*>(scale)[g] = scales[0];
      if (matrix->format.zero == KTK_U8) {
        zero[g] = static_cast<uint8_t>(group_value(matrix->format, scales[kNr]));
      } else if (has_zeros(matrix)) {
        reinterpret_cast<uint16_t*>(zero)[g] = scales[kNr];
      }
      const uint8_t* codes = group + header_bytes(matrix) + 4 * column;
      const size_t pairs = (smaller(depth, matrix->k - g * depth) + 1) / 2;
      for (size_t i = 0; i < pairs; ++i) {
        data[g * depth / 2 + i] = codes[i / (kStepDepth / 2) * kStepBytes + i % (kStepDepth / 2)];
      }
    }
  }
}

}  // namespace
}  // namespace ktk::int4
