// Weight codec: blocks as a file holds them into the layout in layout.h, and out of it as f32. Both
// ways go through the normal form of 256 columns of a row.
#pragma once

#include <string.h>

#include "llamafile/blocks/decode.h"
#include "llamafile/layout.h"

namespace ktk::llamafile {
namespace {

// Four codes, one a byte, the first one lowest.
inline uint32_t load_dword(const uint8_t* bytes) { return load<uint32_t>(bytes); }
inline void store_dword(uint8_t* bytes, uint32_t x) { memcpy(bytes, &x, sizeof x); }
constexpr uint32_t each_byte(uint32_t x) { return x * 0x01010101; }

// Calls put(row, shift_of_step, first_step, last_step, bits) for every plane row of a unit: the row
// holds `bits` bits of each code of these steps, those from `shift` on; step s of them has its bits
// from (s - first_step) * bits on.
template <class Put>
inline void for_each_plane_row(size_t bits, Put put) {
  if (bits == 8) {
    for (size_t s = 0; s < kUnitSteps; ++s) put(s, 0, s, s, 8);
    return;
  }
  const size_t low = bits >= 4 ? 4 : 2, high = bits - low;
  size_t row = 0;
  if (high == 1) put(row++, low, 0, kUnitSteps - 1, 1);
  for (size_t half = 0; half < 2; ++half) {
    const size_t first = half * kUnitSteps / 2, last = first + kUnitSteps / 2 - 1;
    if (high == 2) put(row++, low, first, last, 2);
    for (size_t s = first; s <= last; s += 8 / low) put(row++, 0, s, s + 8 / low - 1, low);
  }
}

// Codes of 32 columns of a unit: `code` is that of the first, others are `stride` bytes apart.
inline void pack_unit(size_t bits, const uint8_t* code, size_t stride, uint8_t* unit) {
  for_each_plane_row(bits, [&](size_t row, size_t shift, size_t first, size_t last, size_t width) {
    const uint32_t mask = each_byte((1u << width) - 1);
    for (size_t c = 0; c < kColumns; ++c) {
      const uint8_t* from = code + c * stride;
      uint32_t dword = 0;
      for (size_t s = first; s <= last; ++s) {
        dword |= (load_dword(from + s * kStep) >> shift & mask) << (s - first) * width;
      }
      store_dword(unit + row * kRowBytes + 4 * c, dword);
    }
  });
}

// Codes of one column of a unit.
inline void unpack_unit(size_t bits, const uint8_t* unit, size_t column, uint8_t* code) {
  memset(code, 0, kUnit);
  for_each_plane_row(bits, [&](size_t row, size_t shift, size_t first, size_t last, size_t width) {
    const uint32_t mask = each_byte((1u << width) - 1);
    const uint32_t dword = load_dword(unit + row * kRowBytes + 4 * column);
    for (size_t s = first; s <= last; ++s) {
      uint8_t* to = code + s * kStep;
      store_dword(to, load_dword(to) | (dword >> (s - first) * width & mask) << shift);
    }
  });
}

// Numbers of 32 columns in the header of a run.
inline void pack_header(const BlockType& type, const Run* runs, size_t units, uint8_t* to) {
  const Header at = header(type, units);
  const size_t ds = (units * kUnit + type.d_group - 1) / type.d_group;
  const size_t groups = units * kUnit / type.group;
  memset(to, 0, at.end);
  for (size_t c = 0; c < kColumns; ++c) {
    for (size_t i = 0; i < ds; ++i) {
      memcpy(to + at.d + (i * kColumns + c) * d_bytes(type), &runs[c].d[i], d_bytes(type));
      if (type.has_dmin) memcpy(to + at.dmin + (i * kColumns + c) * 2, &runs[c].dmin[i], 2);
    }
    for (size_t g = 0; g < groups; ++g) {
      if (type.has_sub) to[at.sub + g * kColumns + c] = static_cast<uint8_t>(runs[c].sub[g]);
      if (type.has_min) to[at.min + g * kColumns + c] = runs[c].min[g];
    }
  }
}

inline void unpack_header(const BlockType& type, const uint8_t* from, size_t units, size_t column,
                          Run* run) {
  const Header at = header(type, units);
  const size_t ds = (units * kUnit + type.d_group - 1) / type.d_group;
  const size_t groups = units * kUnit / type.group;
  for (size_t i = 0; i < ds; ++i) {
    run->d[i] = 0;
    memcpy(&run->d[i], from + at.d + (i * kColumns + column) * d_bytes(type), d_bytes(type));
    if (type.has_dmin) memcpy(&run->dmin[i], from + at.dmin + (i * kColumns + column) * 2, 2);
  }
  for (size_t g = 0; g < groups; ++g) {
    run->sub[g] = type.has_sub ? static_cast<int8_t>(from[at.sub + g * kColumns + column]) : 1;
    run->min[g] = type.has_min ? from[at.min + g * kColumns + column] : 1;
  }
}

inline void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  const BlockType& type = block_type(matrix->format.element);
  Decode* const decode = decoder(type.element);
  const size_t run_source = kRunColumns / type.block * type.block_bytes;
  for (size_t n = n_begin; n < n_end; n += kColumns) {
    const size_t columns = smaller(kColumns, n_end - n);
    const uint8_t* row = static_cast<const uint8_t*>(source->data) + n * source->data_stride;
    uint8_t* to = static_cast<uint8_t*>(packed) + block_offset(matrix, n);
    Run runs[kColumns];
    memset(runs + columns, 0, (kColumns - columns) * sizeof *runs);
    for (size_t k = 0; k < matrix->k; k += kRunColumns, row += run_source) {
      const size_t depth = smaller(kRunColumns, matrix->k - k), units = depth / kUnit;
      for (size_t c = 0; c < columns; ++c) decode(row + c * source->data_stride, depth, &runs[c]);
      pack_header(type, runs, units, to);
      uint8_t* unit = to + header(type, units).end;
      for (size_t i = 0; i < units; ++i, unit += unit_bytes(type)) {
        pack_unit(type.bits, runs->code + i * kUnit, sizeof *runs, unit);
      }
      to = unit;
    }
  }
}

inline void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, float* out, size_t out_stride) {
  const BlockType& type = block_type(matrix->format.element);
  for (size_t n = n_begin; n < n_end; ++n, out += out_stride) {
    const size_t column = n % kColumns;
    const uint8_t* from = static_cast<const uint8_t*>(packed) + block_offset(matrix, n - column);
    for (size_t k = 0; k < matrix->k; k += kRunColumns) {
      const size_t depth = smaller(kRunColumns, matrix->k - k), units = depth / kUnit;
      Run run;
      unpack_header(type, from, units, column, &run);
      from += header(type, units).end;
      for (size_t i = 0; i < units; ++i, from += unit_bytes(type)) {
        unpack_unit(type.bits, from, column, run.code + i * kUnit);
      }
      values(type, run, depth, out + k);
    }
  }
}

}  // namespace
}  // namespace ktk::llamafile
