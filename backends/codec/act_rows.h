// Activation rows without scales: bf16 for the dot product instructions, f32 for FMA.
//
// A row is padded with zeros to whole steps of kDepth, and then to an odd number of cache lines:
// the kernels read several rows at the same k, which would meet in one set of L1 if rows were a
// multiple of 4 KiB apart.
#pragma once

#include <stddef.h>
#include <string.h>

#include "ktk/abi.h"
#include "simd/bf16.h"

namespace ktk {
namespace {

template <size_t kBytes, size_t kDepth>
inline size_t act_row_bytes(const ktk_matrix* matrix) {
  static_assert(kDepth * kBytes % 64 == 0);
  const size_t lines = (matrix->k + kDepth - 1) / kDepth * (kDepth * kBytes / 64);
  return (lines | 1) * 64;
}

// Zeros what follows the last column of a row.
template <size_t kBytes, size_t kDepth>
inline void pad_act_row(const ktk_matrix* matrix, size_t k_end, char* row) {
  if (k_end == matrix->k) {
    memset(row + k_end * kBytes, 0, act_row_bytes<kBytes, kDepth>(matrix) - k_end * kBytes);
  }
}

// Activation codec: rows of bf16, rounded to nearest even.
template <size_t kDepth>
struct ActRowsBf16 {
  static constexpr ktk_format kFormat = {KTK_BF16, KTK_NONE, KTK_NONE, 0, 0};
  static constexpr uint32_t kKStep = kDepth;
  static constexpr auto size = act_row_bytes<2, kDepth>;

  static void pack(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end, const float* x,
                   size_t x_stride, void* act, size_t act_stride) {
    const size_t count = k_end - k_begin;
    for (size_t row = 0; row < m; ++row, x += x_stride) {
      char* line = static_cast<char*>(act) + row * act_stride;
      uint16_t* out = reinterpret_cast<uint16_t*>(line) + k_begin;
      size_t i = 0;
#if defined(__AVX2__)
      for (; i + 16 <= count; i += 16) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                            bf16_from_f32(_mm256_loadu_ps(x + i), _mm256_loadu_ps(x + i + 8)));
      }
#endif
      for (; i < count; ++i) out[i] = bf16_from_f32(x[i]);
      pad_act_row<2, kDepth>(matrix, k_end, line);
    }
  }

  static void unpack(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                     float* out, size_t out_stride) {
    for (size_t row = 0; row < m; ++row) {
      const uint16_t* in =
          reinterpret_cast<const uint16_t*>(static_cast<const char*>(act) + row * act_stride);
      for (size_t i = 0; i < matrix->k; ++i) out[row * out_stride + i] = f32_from_bf16(in[i]);
    }
  }
};

// Activation codec: rows of f32, unchanged.
template <size_t kDepth>
struct ActRowsF32 {
  static constexpr ktk_format kFormat = {KTK_F32, KTK_NONE, KTK_NONE, 0, 0};
  static constexpr uint32_t kKStep = kDepth;
  static constexpr auto size = act_row_bytes<4, kDepth>;

  static void pack(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end, const float* x,
                   size_t x_stride, void* act, size_t act_stride) {
    for (size_t row = 0; row < m; ++row) {
      char* line = static_cast<char*>(act) + row * act_stride;
      memcpy(line + k_begin * sizeof *x, x + row * x_stride, (k_end - k_begin) * sizeof *x);
      pad_act_row<4, kDepth>(matrix, k_end, line);
    }
  }

  static void unpack(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride,
                     float* out, size_t out_stride) {
    for (size_t row = 0; row < m; ++row) {
      memcpy(out + row * out_stride, static_cast<const char*>(act) + row * act_stride,
             matrix->k * sizeof *out);
    }
  }
};

}  // namespace
}  // namespace ktk
