// Weight codec: blocks as a file holds them into the layout in layout.h, and out of it as f32. Both
// ways go through the normal form of 256 values of a weight row.
#pragma once

#include <string.h>

#include "llamafile/gguf/blocks/decode.h"
#include "llamafile/gguf/layout.h"

namespace ktk::llamafile {
namespace {

// Four codes, one a byte, the first one lowest.
inline uint32_t load_dword(const uint8_t* bytes) { return load<uint32_t>(bytes); }
inline void store_dword(uint8_t* bytes, uint32_t x) { memcpy(bytes, &x, sizeof x); }
constexpr uint32_t each_byte(uint32_t x) { return x * 0x01010101; }

// Calls put(plane, shift, first_step, last_step, bits) for every plane of a sub-block: the plane
// holds `bits` bits of each code of these steps, those from `shift` on; step s has its bits in a
// byte of the plane from (s - first_step) * bits on.
template <class Put>
inline void for_each_plane(size_t bits, Put put) {
  if (bits == 8) {
    for (size_t s = 0; s < kSteps; ++s) put(s, 0, s, s, 8);
    return;
  }
  const size_t low = bits >= 4 ? 4 : 2, high = bits - low;
  size_t plane = 0;
  if (high == 1) put(plane++, low, 0, kSteps - 1, 1);
  for (size_t half = 0; half < 2; ++half) {
    const size_t first = half * kSteps / 2, last = first + kSteps / 2 - 1;
    if (high == 2) put(plane++, low, first, last, 2);
    for (size_t s = first; s <= last; s += 8 / low) put(plane++, 0, s, s + 8 / low - 1, low);
  }
}

// Codes of 32 n: `code` is the first one of the first n, others are `stride` bytes apart.
inline void pack_sub_block(size_t bits, const uint8_t* code, size_t stride, uint8_t* sub_block) {
  for_each_plane(bits, [&](size_t plane, size_t shift, size_t first, size_t last, size_t width) {
    const uint32_t mask = each_byte((1u << width) - 1);
    for (size_t n = 0; n < kNr; ++n) {
      const uint8_t* from = code + n * stride;
      uint32_t dword = 0;
      for (size_t s = first; s <= last; ++s) {
        dword |= (load_dword(from + s * kKr) >> shift & mask) << (s - first) * width;
      }
      store_dword(sub_block + plane * kPlaneBytes + 4 * n, dword);
    }
  });
}

// Codes of one n.
inline void unpack_sub_block(size_t bits, const uint8_t* sub_block, size_t n, uint8_t* code) {
  memset(code, 0, kSubBlock);
  for_each_plane(bits, [&](size_t plane, size_t shift, size_t first, size_t last, size_t width) {
    const uint32_t mask = each_byte((1u << width) - 1);
    const uint32_t dword = load_dword(sub_block + plane * kPlaneBytes + 4 * n);
    for (size_t s = first; s <= last; ++s) {
      uint8_t* to = code + s * kKr;
      store_dword(to, load_dword(to) | (dword >> (s - first) * width & mask) << shift);
    }
  });
}

// Writes the header of a super-block of 32 n.
inline void pack_header(const BlockType& type, const SuperBlock* rows, size_t sub_blocks,
                        uint8_t* to) {
  const Header at = header(type, sub_blocks);
  const size_t ds = ceil_div(sub_blocks * kSubBlock, type.d_group);
  const size_t groups = sub_blocks * kSubBlock / type.group;
  memset(to, 0, at.end);
  for (size_t n = 0; n < kNr; ++n) {
    for (size_t i = 0; i < ds; ++i) {
      memcpy(to + at.d + (i * kNr + n) * d_bytes(type), &rows[n].d[i], d_bytes(type));
      if (type.has_dmin) memcpy(to + at.dmin + (i * kNr + n) * 2, &rows[n].dmin[i], 2);
    }
    for (size_t g = 0; g < groups; ++g) {
      if (type.has_sub) to[at.sub + g * kNr + n] = static_cast<uint8_t>(rows[n].sub[g]);
      if (type.has_min) to[at.min + g * kNr + n] = rows[n].min[g];
      if (type.shift) {
        uint8_t& byte = to[at.shift + g * kShiftBytes + n / 8];
        byte = static_cast<uint8_t>(byte | (rows[n].shifted >> g & 1) << n % 8);
      }
    }
  }
}

inline void unpack_header(const BlockType& type, const uint8_t* from, size_t sub_blocks, size_t n,
                          SuperBlock* to) {
  const Header at = header(type, sub_blocks);
  const size_t ds = ceil_div(sub_blocks * kSubBlock, type.d_group);
  const size_t groups = sub_blocks * kSubBlock / type.group;
  for (size_t i = 0; i < ds; ++i) {
    to->d[i] = 0;
    memcpy(&to->d[i], from + at.d + (i * kNr + n) * d_bytes(type), d_bytes(type));
    if (type.has_dmin) memcpy(&to->dmin[i], from + at.dmin + (i * kNr + n) * 2, 2);
  }
  to->shifted = 0;
  for (size_t g = 0; g < groups; ++g) {
    if (type.shift) {
      const unsigned bit = from[at.shift + g * kShiftBytes + n / 8] >> n % 8 & 1;
      to->shifted = static_cast<uint16_t>(to->shifted | bit << g);
    }
    to->sub[g] = type.has_sub ? static_cast<int8_t>(from[at.sub + g * kNr + n]) : 1;
    to->min[g] = type.has_min ? from[at.min + g * kNr + n] : 1;
  }
}

inline void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  const BlockType& type = block_type(matrix->format.element);
  Decode* const decode = decoder(type.element);
  const size_t source_bytes = kSuperBlock / type.block * type.block_bytes;
  for (size_t n = n_begin; n < n_end; n += kNr) {
    const size_t count = smaller(kNr, n_end - n);
    const uint8_t* from = static_cast<const uint8_t*>(source->data) + n * source->data_stride;
    uint8_t* to = static_cast<uint8_t*>(packed) + weight_offset(matrix, n);
    SuperBlock rows[kNr];
    memset(rows + count, 0, (kNr - count) * sizeof *rows);
    for (size_t k = 0; k < matrix->k; k += kSuperBlock, from += source_bytes) {
      const size_t depth = smaller(kSuperBlock, matrix->k - k), sub_blocks = depth / kSubBlock;
      for (size_t i = 0; i < count; ++i) decode(from + i * source->data_stride, depth, &rows[i]);
      pack_header(type, rows, sub_blocks, to);
      uint8_t* sub_block = to + header(type, sub_blocks).end;
      for (size_t i = 0; i < sub_blocks; ++i, sub_block += sub_block_bytes(type)) {
        pack_sub_block(type.bits, rows->code + i * kSubBlock, sizeof *rows, sub_block);
      }
      to = sub_block;
    }
  }
}

// Weight rows [begin, end) of one block, super-block by super-block, so that lines are read once.
inline void unpack_block(const ktk_matrix* matrix, const BlockType& type, const uint8_t* block,
                         size_t begin, size_t end, float* out, size_t out_stride) {
  for (size_t k = 0; k < matrix->k; k += kSuperBlock) {
    const size_t depth = smaller(kSuperBlock, matrix->k - k), sub_blocks = depth / kSubBlock;
    const uint8_t* codes = block + header(type, sub_blocks).end;
    for (size_t n = begin; n < end; ++n) {
      SuperBlock row;
      unpack_header(type, block, sub_blocks, n, &row);
      for (size_t i = 0; i < sub_blocks; ++i) {
        unpack_sub_block(type.bits, codes + i * sub_block_bytes(type), n, row.code + i * kSubBlock);
      }
      values(type, row, depth, out + (n - begin) * out_stride + k);
    }
    block = codes + sub_blocks * sub_block_bytes(type);
  }
}

inline void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, float* out, size_t out_stride) {
  const BlockType& type = block_type(matrix->format.element);
  for (size_t n = n_begin; n < n_end;) {
    const size_t begin = n % kNr, end = smaller(kNr, begin + (n_end - n));
    const uint8_t* block = static_cast<const uint8_t*>(packed) + weight_offset(matrix, n - begin);
    unpack_block(matrix, type, block, begin, end, out, out_stride);
    n += end - begin;
    out += (end - begin) * out_stride;
  }
}

}  // namespace
}  // namespace ktk::llamafile
