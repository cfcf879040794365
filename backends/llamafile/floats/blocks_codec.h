// Blocks of files <-> blocks of 32 n, and what they mean (blocks.h).
#pragma once

#include "llamafile/floats/blocks.h"

namespace ktk::llamafile::floats {
namespace {

inline unsigned nibble_of_half(const uint8_t* nibbles, size_t i, size_t half) {
  return nibbles[i % half] >> i / half * 4 & 15u;
}
// Sub-scales in nibbles, as they are or as entries of a table.
inline void split_subs(const uint8_t* nibbles, bool in_table, CodedRow* to) {
  for (size_t g = 0; g < 8; ++g) {
    const unsigned code = nibble_of_half(nibbles, g, 4);
    to->sub[g] = in_table ? kNonlinear.value[code] : static_cast<int8_t>(code);
  }
}

inline void read_iq6_k(const uint8_t* block, CodedRow* to) {
  to->d = load<uint16_t>(block);
  to->shifted = load<uint16_t>(block + 2);
  memcpy(to->sub, block + 4, 16);
  for (size_t i = 0; i < 4; ++i) split_nibbles<32>(block + 20 + 32 * i, to->code + 64 * i);
  for (size_t i = 0; i < kSuperBlock; ++i) {
    const unsigned high = block[148 + i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3u;
    to->code[i] = static_cast<uint8_t>(to->code[i] | high << 4);
  }
}

inline void read_iq1_kt(const uint8_t* block, CodedRow* to) {
  to->d = load<uint32_t>(block);
  for (size_t g = 0; g < 8; ++g) to->sub[g] = kNonlinear.value[block[4 + g] & 15];
  for (size_t i = 0; i < 32; ++i) {
    const unsigned top = block[4 + i / 4] >> (4 + i % 4) & 1u;
    const unsigned seed = block[12 + i] | nibble_of_half(block + 44, i, 16) << 8 | top << 12;
    to->seed[i] = static_cast<uint16_t>(seed);
  }
}

inline void read_iq2_kt(const uint8_t* block, CodedRow* to) {
  to->d = load<uint32_t>(block);
  split_subs(block + 4, true, to);
  memcpy(to->seed, block + 8, 64);
}

inline void read_iq3_kt(const uint8_t* block, CodedRow* to) {
  to->d = load<uint32_t>(block);
  split_subs(block + 4, false, to);
  memcpy(to->seed, block + 8, 64);
  for (size_t j = 0; j < 32; ++j) {
    unsigned signs = 0;
    for (size_t i = 0; i < 8; ++i) signs |= (block[72 + j % 4 * 8 + i] >> j / 4 & 1u) << i;
    to->negative[j] = static_cast<uint8_t>(signs);
  }
}

inline void read_iq4_kt(const uint8_t* block, CodedRow* to) {
  to->d = load<uint32_t>(block);
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t word = load<uint32_t>(block + 4 + i / 8 * 4);
    to->sub[i / 8] = static_cast<int8_t>(static_cast<int>(word >> 1 & 127) - 64);
    const unsigned upper = word >> (8 + i % 8 * 3) & 7, top = word & 1;
    const unsigned middle = nibble_of_half(block + 100, i, 32);
    to->seed[i] = static_cast<uint16_t>(block[36 + i] | middle << 8 | upper << 12 | top << 15);
  }
}

inline void read_block(ktk_element element, const uint8_t* block, CodedRow* to) {
  switch (element) {
    case kIQ6_K:
      return read_iq6_k(block, to);
    case kIQ1_KT:
      return read_iq1_kt(block, to);
    case kIQ2_KT:
      return read_iq2_kt(block, to);
    case kIQ3_KT:
      return read_iq3_kt(block, to);
    case kIQ4_KT:
      return read_iq4_kt(block, to);
  }
}

// Number `n` of 32.
inline void put_row(const FloatBlock& type, const CodedRow& row, size_t n, uint8_t* super_block) {
  memcpy(super_block + n * type.d_bytes, &row.d, type.d_bytes);
  for (size_t g = 0; g < kSuperBlock / type.group; ++g) {
    memcpy(super_block + sub_at(type) + g * kNr + n, &row.sub[g], 1);
    if (type.of_seed) continue;
    uint8_t& byte = super_block[shift_at(type) + g * kShiftBytes + n / 8];
    byte = static_cast<uint8_t>(byte | (row.shifted >> g & 1) << n % 8);
    uint32_t dwords[kDwordsOfGroup] = {};
    for (size_t i = 0; i < 15; ++i) {
      dwords[i / 5] |= uint32_t{row.code[g * 16 + i]} << i % 5 * 6;
    }
    uint8_t* to = super_block + sub_blocks_at(type) + g * kDwordsOfGroup * kPlaneBytes + 4 * n;
    for (size_t j = 0; j < kDwordsOfGroup; ++j, to += kPlaneBytes) {
      dwords[j] |= (row.code[g * 16 + 15] >> 2 * j & 3u) << 30;
      memcpy(to, &dwords[j], 4);
    }
  }
  if (!type.of_seed) return;
  uint8_t* to = super_block + sub_blocks_at(type);
  for (size_t i = 0; i < kSuperBlock / type.of_seed; ++i, to += seed_bytes(type)) {
    memcpy(to + 2 * n, &row.seed[i], 2);
    if (type.has_signs) to[2 * kNr + n] = row.negative[i];
  }
}

inline void get_row(const FloatBlock& type, const uint8_t* super_block, size_t n, CodedRow* row) {
  row->d = 0;
  memcpy(&row->d, super_block + n * type.d_bytes, type.d_bytes);
  row->shifted = 0;
  for (size_t g = 0; g < kSuperBlock / type.group; ++g) {
    memcpy(&row->sub[g], super_block + sub_at(type) + g * kNr + n, 1);
    if (type.of_seed) continue;
    const unsigned bit = super_block[shift_at(type) + g * kShiftBytes + n / 8] >> n % 8 & 1u;
    row->shifted = static_cast<uint16_t>(row->shifted | bit << g);
    const uint8_t* from =
        super_block + sub_blocks_at(type) + g * kDwordsOfGroup * kPlaneBytes + 4 * n;
    unsigned last = 0;
    for (size_t j = 0; j < kDwordsOfGroup; ++j, from += kPlaneBytes) {
      const uint32_t dword = load<uint32_t>(from);
      for (size_t i = 0; i < 5; ++i) row->code[g * 16 + 5 * j + i] = dword >> 6 * i & 63;
      last |= dword >> 30 << 2 * j;
    }
    row->code[g * 16 + 15] = static_cast<uint8_t>(last);
  }
  if (!type.of_seed) return;
  const uint8_t* from = super_block + sub_blocks_at(type);
  for (size_t i = 0; i < kSuperBlock / type.of_seed; ++i, from += seed_bytes(type)) {
    row->seed[i] = load<uint16_t>(from + 2 * n);
    row->negative[i % 32] = type.has_signs ? from[2 * kNr + n] : 0;
  }
}

inline float cubic_entry(uint8_t code, bool shifted) {
  const float x = code;
  float entry = kCubic[3];
  for (size_t i = 3; i > 0; --i) entry = __builtin_fmaf(x, entry, kCubic[i - 1]);
  return entry + (shifted ? 1.f : 0.f);
}
inline float trellis_entry(uint32_t number) {
  const uint32_t bytes = number & kSeedMask;
  const uint32_t sum = (bytes & 255) + (bytes >> 8 & 255) + (bytes >> 16 & 255) + (bytes >> 24);
  return static_cast<float>(static_cast<int>(sum) - kMean);
}

inline void row_values(const FloatBlock& type, const CodedRow& row, float* out) {
  const float d = type.d_bytes == 4 ? __builtin_bit_cast(float, row.d)
                                    : f32_from_f16(static_cast<uint16_t>(row.d));
  uint32_t number = 0;
  for (size_t i = 0; i < kSuperBlock; ++i) {
    const size_t group = i / type.group;
    const float scale = d * static_cast<float>(row.sub[group]);
    float entry;
    if (type.of_seed) {
      const size_t seed = i / type.of_seed, at = i % type.of_seed;
      if (at == 0) number = row.seed[seed] + kSeedOffset;
      number *= kSeedFactor;
      entry = trellis_entry(number);
      if (type.has_signs) {
        entry = __builtin_fabsf(entry);
        if (row.negative[seed] >> at & 1) entry = -entry;
      }
    } else {
      entry = cubic_entry(row.code[i], row.shifted >> group & 1);
    }
    out[i] = scale * entry;
  }
}

inline void pack_coded_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                              size_t n_end, void* packed) {
  const FloatBlock& type = float_block(matrix->format.element);
  const size_t bytes = coded_super_block_bytes(type);
  for (size_t n = n_begin; n < n_end; n += kNr) {
    const size_t count = smaller(kNr, n_end - n);
    const uint8_t* from = static_cast<const uint8_t*>(source->data) + n * source->data_stride;
    uint8_t* to = static_cast<uint8_t*>(packed) + coded_weight_offset(matrix, n);
    for (size_t k = 0; k < matrix->k; k += kSuperBlock, from += type.bytes, to += bytes) {
      memset(to, 0, bytes);
      for (size_t i = 0; i < count; ++i) {
        CodedRow row = {};
        read_block(type.element, from + i * source->data_stride, &row);
        put_row(type, row, i, to);
      }
    }
  }
}

inline void unpack_coded_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                size_t n_end, float* out, size_t out_stride) {
  const FloatBlock& type = float_block(matrix->format.element);
  for (size_t n = n_begin; n < n_end; ++n, out += out_stride) {
    const uint8_t* from =
        static_cast<const uint8_t*>(packed) + coded_weight_offset(matrix, n / kNr * kNr);
    for (size_t k = 0; k < matrix->k; k += kSuperBlock, from += coded_super_block_bytes(type)) {
      CodedRow row;
      get_row(type, from, n % kNr, &row);
      row_values(type, row, out + k);
    }
  }
}

}  // namespace
}  // namespace ktk::llamafile::floats
