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

// What a plane holds: `bits` bits, from `shift` on, of each code of `steps` steps from `first` on.
// Step s has its bits in a byte of the plane from (s - first) * bits on.
struct Plane {
  size_t first, steps, shift, bits;
};

// Plane `index` of a sub-block whose codes have so many bits.
constexpr Plane plane_of(size_t bits, size_t index) {
  if (bits == 8) return {index, 1, 0, 8};
  const size_t low = bits >= 4 ? 4 : 2, high = bits - low, steps = 8 / low;
  if (high == 1) {
    if (index == 0) return {0, kSteps, low, 1};
    return {(index - 1) * steps, steps, 0, low};
  }
  if (high == 0) return {index * steps, steps, 0, low};
  const size_t half = index / (bits / 2), of_half = index % (bits / 2), begin = half * kSteps / 2;
  if (of_half == 0) return {begin, kSteps / 2, low, high};
  return {begin + (of_half - 1) * steps, steps, 0, low};
}

// The planes of one n, out of its 32 codes and into them. Sizes are constants all the way: with
// loops that end where a number says, packing a matrix of Q4_K took 1.6 times as long.
template <size_t kBits, size_t kIndex = 0>
inline void pack_planes(const uint8_t* code, uint8_t* to) {
  if constexpr (kIndex < kBits) {
    constexpr Plane kPlane = plane_of(kBits, kIndex);
    constexpr uint32_t kMask = each_byte((1u << kPlane.bits) - 1);
    uint32_t dword = 0;
#pragma GCC unroll 8
    for (size_t s = 0; s < kPlane.steps; ++s) {
      const uint32_t step = load_dword(code + (kPlane.first + s) * kKr);
      dword |= (step >> kPlane.shift & kMask) << s * kPlane.bits;
    }
    store_dword(to + kIndex * kPlaneBytes, dword);
    pack_planes<kBits, kIndex + 1>(code, to);
  }
}

template <size_t kBits, size_t kIndex = 0>
inline void unpack_planes(const uint8_t* from, uint32_t (&steps)[kSteps]) {
  if constexpr (kIndex < kBits) {
    constexpr Plane kPlane = plane_of(kBits, kIndex);
    constexpr uint32_t kMask = each_byte((1u << kPlane.bits) - 1);
    const uint32_t dword = load_dword(from + kIndex * kPlaneBytes);
#pragma GCC unroll 8
    for (size_t s = 0; s < kPlane.steps; ++s) {
      steps[kPlane.first + s] |= (dword >> s * kPlane.bits & kMask) << kPlane.shift;
    }
    unpack_planes<kBits, kIndex + 1>(from, steps);
  }
}

// Calls body with the bits of a code as a constant.
template <size_t kBits>
struct Bits {
  static constexpr size_t kValue = kBits;
};
template <class Body>
inline void with_bits(size_t bits, Body body) {
  switch (bits) {
    case 2:
      return body(Bits<2>());
    case 3:
      return body(Bits<3>());
    case 4:
      return body(Bits<4>());
    case 5:
      return body(Bits<5>());
    case 6:
      return body(Bits<6>());
    case 8:
      return body(Bits<8>());
  }
}

// Codes of 32 n: `code` is the first one of the first n, others are `stride` bytes apart.
inline void pack_sub_block(size_t bits, const uint8_t* code, size_t stride, uint8_t* sub_block) {
  with_bits(bits, [&](auto constant) {
    for (size_t n = 0; n < kNr; ++n) {
      pack_planes<decltype(constant)::kValue>(code + n * stride, sub_block + 4 * n);
    }
  });
}

// Codes of one n.
inline void unpack_sub_block(size_t bits, const uint8_t* sub_block, size_t n, uint8_t* code) {
  with_bits(bits, [&](auto constant) {
    uint32_t steps[kSteps] = {};
    unpack_planes<decltype(constant)::kValue>(sub_block + 4 * n, steps);
    memcpy(code, steps, sizeof steps);
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
