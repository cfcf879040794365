// Weight codec of the layouts of layout.h: packs and unpacks codes as they are.
//
// Codes is what an element type is in a line:
//   kLineDepth                        k of one line
//   copy(row, k, count, line, col)    `count` codes of a source row from k on, the rest zeros
//   arrange(codes)                    dwords of codes of a row each, as they are in a line
//   write(line, col, count, row, k)   the inverse of copy()
//   write_line(line, rows, stride, k) the same for sixteen rows
//   is_nan(row, k)                    whether a row of k codes has a NaN among them
//   value(line, col, i)               of the code i of a column
#pragma once

#include <string.h>

#include "codec/scaled/layout.h"
#include "simd/bf16.h"
#include "simd/transpose.h"

namespace ktk {
namespace {

// What a scale of one byte means.
struct Ue8m0 {
  static constexpr uint8_t kOne = 127;
  static bool is_nan(uint8_t exponent) { return exponent == 255; }
  static float value(uint8_t exponent) {
    if (is_nan(exponent)) return __builtin_nanf("");
    const uint32_t bits = exponent ? uint32_t{exponent} << 23 : 0x00400000;  // 2^-127 is subnormal
    return __builtin_bit_cast(float, bits);
  }
};

struct E4m3 {
  static constexpr uint8_t kOne = 0x38;
  static constexpr bool is_nan(uint8_t code) { return (code & 0x7f) == 0x7f; }
  static constexpr float value(uint8_t code) {
    const uint32_t exponent = code >> 3 & 0xf, mantissa = code & 7;
    float size = static_cast<float>(mantissa) * 0x1p-9f;
    if (exponent) size = __builtin_bit_cast(float, (exponent + 120) << 23 | mantissa << 20);
    if (is_nan(code)) size = __builtin_nanf("");
    return code & 0x80 ? -size : size;
  }
};

// Scales of a source, by row and group of k.
inline const char* source_scale(const ktk_source* source, size_t row, size_t group) {
  const ktk_format& format = source->format;
  const bool is_byte = format.scale == KTK_UE8M0 || format.scale == KTK_E4M3;
  const size_t size = is_byte ? 1 : format.scale == KTK_BF16 ? 2 : 4;
  return static_cast<const char*>(source->scale) + row * source->scale_stride + group * size;
}
inline float source_scale_f32(const ktk_source* source, size_t row, size_t group) {
  const char* scale = source_scale(source, row, group);
  if (source->format.scale == KTK_BF16) {
    uint16_t bits;
    memcpy(&bits, scale, sizeof bits);
    return f32_from_bf16(bits);
  }
  float value;
  memcpy(&value, scale, sizeof value);
  return value;
}

// Where a scale of a row and group of k is written to.
template <class Scale>
Scale* target_scale(const ktk_export* target, size_t row, size_t group) {
  char* line = static_cast<char*>(target->scale) + row * target->scale_stride;
  return reinterpret_cast<Scale*>(line) + group;
}

// The scales of one block: pack_start() and pack_step() take those of the `columns` columns from n
// on, for what is ahead of all steps and of one step; write() gives them back, value() returns the
// one of a column and k. has_nan() says whether kernels take a scale of a column for a number that
// is none; f32 scales take care of themselves.

template <class Scales_, class Element>
struct ByteScaleCodec : Scales_ {
  using Scales = Scales_;
  using Scales::kGroupDepth;
  static constexpr size_t kStepGroups = kStepDepth / kGroupDepth;

  static uint8_t* at(char* block, size_t step_bytes, size_t col, size_t group) {
    return reinterpret_cast<uint8_t*>(block) + kStartBytes + group / kStepGroups * step_bytes +
           group % kStepGroups * kNr + col;
  }
  static void pack_start(const ktk_matrix*, const ktk_source*, size_t, size_t, char*) {}
  static void pack_step(const ktk_matrix* matrix, const ktk_source* source, size_t n,
                        size_t columns, size_t step, char* lines) {
    const size_t group = step * kStepGroups;
    const size_t groups = smaller(ceil_div(matrix->k, kGroupDepth) - group, kStepGroups);
    const uint8_t* const scales = row_scales(source, n) + group;
    alignas(kLine) uint8_t made[kStepGroups][kNr];
    for (size_t col = 0; col < kNr; ++col) {
      const uint8_t* const from = scales + col * source->scale_stride;
      for (size_t i = 0; i < kStepGroups; ++i) {
        made[i][col] = col < columns && i < groups ? from[i] : Element::kOne;
      }
    }
    memcpy(lines, made, sizeof made);
  }
  static void write(const ktk_matrix* matrix, char* block, size_t step_bytes, size_t n,
                    size_t columns, const ktk_export* target) {
    for (size_t col = 0; col < columns; ++col) {
      for (size_t group = 0; group * kGroupDepth < matrix->k; ++group) {
        *target_scale<uint8_t>(target, n + col, group) = *at(block, step_bytes, col, group);
      }
    }
  }
  static float value(const ktk_matrix*, const char* block, size_t step_bytes, size_t col,
                     size_t k) {
    return Element::value(*at(const_cast<char*>(block), step_bytes, col, k / kGroupDepth));
  }
  static bool has_nan(const ktk_matrix* matrix, const ktk_source* source, size_t row) {
    const uint8_t* const scales = row_scales(source, row);
    const size_t groups = ceil_div(matrix->k, kGroupDepth);
    uint8_t nan = 0;  // not bool, which gcc 12 does not vectorize
    for (size_t i = 0; i < groups; ++i) nan |= static_cast<uint8_t>(Element::is_nan(scales[i]));
    return nan;
  }
  static const uint8_t* row_scales(const ktk_source* source, size_t row) {
    return reinterpret_cast<const uint8_t*>(source_scale(source, row, 0));
  }
};
using MxScaleCodec = ByteScaleCodec<MxScales, Ue8m0>;
using NvScaleCodec = ByteScaleCodec<NvScales, E4m3>;

struct BlockScaleCodec : BlockScales {
  using Scales = BlockScales;
  static void pack_start(const ktk_matrix* matrix, const ktk_source* source, size_t n, size_t,
                         char* block) {
    float* out = reinterpret_cast<float*>(block + kStartBytes);
    memset(out, 0, bytes(matrix));
    // Not the source's group_n, which may say 0 for a group that spans all rows.
    const size_t row = n / matrix->format.group_n;
    for (size_t group = 0; group * kGroupDepth < matrix->k; ++group) {
      out[group] = source_scale_f32(source, row, group);
    }
  }
  static void pack_step(const ktk_matrix*, const ktk_source*, size_t, size_t, size_t, char*) {}
  // All blocks of a group of columns hold its scales; the first one gives them.
  static void write(const ktk_matrix* matrix, const char* block, size_t, size_t n, size_t,
                    const ktk_export* target) {
    if (n % matrix->format.group_n) return;
    const float* scales = reinterpret_cast<const float*>(block + kStartBytes);
    for (size_t group = 0; group * kGroupDepth < matrix->k; ++group) {
      *target_scale<float>(target, n / matrix->format.group_n, group) = scales[group];
    }
  }
  static float value(const ktk_matrix*, const char* block, size_t, size_t, size_t k) {
    return reinterpret_cast<const float*>(block + kStartBytes)[k / kGroupDepth];
  }
  static bool has_nan(const ktk_matrix*, const ktk_source*, size_t) { return false; }
};

struct RowScaleCodec : RowScales {
  using Scales = RowScales;
  static void pack_start(const ktk_matrix*, const ktk_source* source, size_t n, size_t columns,
                         char* block) {
    float* out = reinterpret_cast<float*>(block + kStartBytes);
    for (size_t col = 0; col < kNr; ++col) {
      out[col] = col < columns ? source_scale_f32(source, n + col, 0) : 0;
    }
  }
  static void pack_step(const ktk_matrix*, const ktk_source*, size_t, size_t, size_t, char*) {}
  static void write(const ktk_matrix*, const char* block, size_t, size_t n, size_t columns,
                    const ktk_export* target) {
    const float* scales = reinterpret_cast<const float*>(block + kStartBytes);
    for (size_t col = 0; col < columns; ++col) {
      *target_scale<float>(target, n + col, 0) = scales[col];
    }
  }
  static float value(const ktk_matrix*, const char* block, size_t, size_t col, size_t) {
    return reinterpret_cast<const float*>(block + kStartBytes)[col];
  }
  static bool has_nan(const ktk_matrix*, const ktk_source*, size_t) { return false; }
};

template <class Codes, class ScaleCodec>
struct ScaledCodec {
  using Layout = ScaledLayout<Codes::kLineDepth, typename ScaleCodec::Scales>;

  static void pack(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin, size_t n_end,
                   void* packed) {
    for (size_t n = n_begin; n < n_end; n += kNr) {
      pack_block(matrix, source, n, smaller(n_end - n, kNr),
                 static_cast<char*>(packed) + Layout::offset(matrix, n));
    }
  }

  static void pack_block(const ktk_matrix* matrix, const ktk_source* source, size_t n,
                         size_t columns, char* block) {
    const uint8_t* rows = static_cast<const uint8_t*>(source->data) + n * source->data_stride;
    float* start = reinterpret_cast<float*>(block);
    for (size_t col = 0; col < kNr; ++col) {
      const bool nan =
          col < columns && (Codes::is_nan(rows + col * source->data_stride, matrix->k) ||
                            ScaleCodec::has_nan(matrix, source, n + col));
      start[col] = nan ? __builtin_nanf("") : 0;
    }
    ScaleCodec::pack_start(matrix, source, n, columns, block);
    const size_t padded_k = Layout::num_steps(matrix) * kStepDepth;
    for (size_t k = 0; k < padded_k; k += kLines * Codes::kLineDepth) {
      if (k % kStepDepth == 0) {
        const size_t step = k / kStepDepth;
        char* const lines = block + Layout::header_bytes(matrix) + step * Layout::kStepBytes;
        ScaleCodec::pack_step(matrix, source, n, columns, step, lines);
      }
      for (size_t half = 0; half < 2; ++half) {
        uint8_t* lines = reinterpret_cast<uint8_t*>(block) + Layout::line_offset(matrix, half, k);
        const size_t first = half * kHalfCols, stride = source->data_stride;
        if (first + kHalfCols <= columns && k + kLines * Codes::kLineDepth <= matrix->k) {
          copy_lines(rows + first * stride + k / Codes::kLineDepth * 4, stride, lines);
        } else {
          copy_edge(matrix, rows + first * stride, stride, columns < first ? 0 : columns - first, k,
                    lines);
        }
      }
    }
  }

  // Four lines of one half of a block, from sixteen bytes of each row: a transpose of dwords. Not
  // line by line: where rows are 2^i bytes apart, most of what is read does not stay in L1.
  static constexpr size_t kLines = 4, kNextLine = 2 * kLine;
  static void copy_lines(const uint8_t* rows, size_t stride, uint8_t* lines) {
    for (size_t col = 0; col < kHalfCols; col += 4) {
      __m128i in[4];
      for (size_t i = 0; i < 4; ++i) {
        in[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + (col + i) * stride));
      }
      transpose_dwords(in);
      for (size_t line = 0; line < kLines; ++line) {
        uint8_t* const to = lines + line * kNextLine + col * 4;
        _mm_store_si128(reinterpret_cast<__m128i*>(to), Codes::arrange(in[line]));
      }
    }
  }
  // The same where n or k ends.
  static void copy_edge(const ktk_matrix* matrix, const uint8_t* rows, size_t stride,
                        size_t columns, size_t k, uint8_t* lines) {
    for (size_t line = 0; line < kLines; ++line, k += Codes::kLineDepth, lines += kNextLine) {
      const size_t depth = k < matrix->k ? smaller(matrix->k - k, Codes::kLineDepth) : 0;
      for (size_t i = 0; i < kHalfCols; ++i) {
        Codes::copy(i < columns ? rows + i * stride : rows, k, i < columns ? depth : 0, lines, i);
      }
    }
  }

  static void unpack(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end,
                     float* out, size_t out_stride) {
    for (size_t n = n_begin; n < n_end;) {
      const char* block = static_cast<const char*>(packed) + Layout::offset(matrix, n / kNr * kNr);
      const bool is_half = n % kHalfCols == 0 && n_end - n >= kHalfCols;
      const size_t columns = is_half ? kHalfCols : 1;
      for (size_t begin = 0; begin < matrix->k; begin += ScaleCodec::kGroupDepth) {
        const size_t end = smaller(begin + ScaleCodec::kGroupDepth, matrix->k);
        if (is_half) {
          unpack_group<kHalfCols>(matrix, block, n % kNr, begin, end, out, out_stride);
        } else {
          unpack_group<1>(matrix, block, n % kNr, begin, end, out, out_stride);
        }
      }
      n += columns;
      out += columns * out_stride;
    }
  }

  static void write(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end,
                    const ktk_export* target) {
    uint8_t* data = static_cast<uint8_t*>(target->data);
    for (size_t n = n_begin; n < n_end; n += kNr) {
      const size_t columns = smaller(n_end - n, kNr);
      char* block = const_cast<char*>(static_cast<const char*>(packed)) + Layout::offset(matrix, n);
      ScaleCodec::write(matrix, block, Layout::kStepBytes, n, columns, target);
      for (size_t k = 0; k < matrix->k; k += Codes::kLineDepth) {
        const size_t depth = smaller(matrix->k - k, Codes::kLineDepth);
        for (size_t half = 0; half * kHalfCols < columns; ++half) {
          const uint8_t* line =
              reinterpret_cast<uint8_t*>(block) + Layout::line_offset(matrix, half, k);
          const size_t first = half * kHalfCols;
          uint8_t* rows = data + (n + first) * target->data_stride;
          if (first + kHalfCols <= columns && depth == Codes::kLineDepth) {
            Codes::write_line(line, rows, target->data_stride, k);
            continue;
          }
          for (size_t i = 0; i < smaller(columns - first, kHalfCols); ++i) {
            Codes::write(line, i, depth, rows + i * target->data_stride, k);
          }
        }
      }
    }
  }

 private:
  typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

  // k [begin, end) of one column, or of the sixteen of a half, whose lines are then read once. Each
  // column has one scale there.
  template <size_t kColumns>
  static void unpack_group(const ktk_matrix* matrix, const char* block, size_t first, size_t begin,
                           size_t end, float* out, size_t out_stride) {
    // A constant for each of sixteen.
    const size_t in_half = kColumns == kHalfCols ? 0 : first % kHalfCols;
    float scale[kColumns];
    for (size_t i = 0; i < kColumns; ++i) {
      scale[i] = ScaleCodec::value(matrix, block, Layout::kStepBytes, first + i, begin);
    }
    for (size_t k = begin; k < end; k += Codes::kLineDepth) {
      const uint8_t* line = reinterpret_cast<const uint8_t*>(
          block + Layout::line_offset(matrix, first / kHalfCols, k));
      if (end - k < Codes::kLineDepth) {
        for (size_t col = 0; col < kColumns; ++col) {
          for (size_t i = 0; i < end - k; ++i) {
            out[col * out_stride + k + i] = Codes::value(line, in_half + col, i) * scale[col];
          }
        }
        return;
      }
#pragma GCC unroll 16
      for (size_t col = 0; col < kColumns; ++col) {
#pragma GCC unroll 2
        for (size_t i = 0; i < Codes::kLineDepth; i += 4) {
          const size_t at = in_half + col;
          const Four values = {Codes::value(line, at, i), Codes::value(line, at, i + 1),
                               Codes::value(line, at, i + 2), Codes::value(line, at, i + 3)};
          *reinterpret_cast<Four*>(out + col * out_stride + k + i) = values * scale[col];
        }
      }
    }
  }
};

}  // namespace
}  // namespace ktk
