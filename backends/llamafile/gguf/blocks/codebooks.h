// Blocks of 256 values whose codes come eight or four at a time from a codebook.
//
//   IQ1_S     d  index:8[32]  (index_high:3[4] sub:3 delta:1)[8]
//   IQ1_M     index:8[32]  (index_high:3 delta:1)[32]  (sub:3[4] d:4)[4]
//   IQ2_XXS   d  (index:8[4]  signs:7[4] sub:4)[8]
//   IQ2_XS    d  (index:9 signs:7)[32]  sub:4[16]
//   IQ2_S     d  index:8[32]  signs:8[32]  index_high:2[32]  sub:4[16]
//   IQ3_XXS   d  index:8[64]  (signs:7[4] sub:4)[8]
//   IQ3_S     d  index:8[64]  index_high:1[64]  signs:8[32]  sub:4[8]
//
// A scale is 2 sub + 1, apart from the constant of its type. Seven bits of signs stand for eight,
// with an even number of negative ones. A negative code has the bit above the magnitude set, and so
// has a code of IQ1 from which delta is taken away.
#pragma once

#include "llamafile/gguf/blocks/bits.h"
#include "llamafile/gguf/blocks/grids.h"

namespace ktk::llamafile {
namespace {

constexpr size_t kSignBitOf2 = 2, kSignBitOf3 = 3;

// Eight values of IQ1 and IQ2: magnitudes or ternary digits, and their signs.
inline void put_eight(uint16_t entry, uint8_t signs, uint8_t* code) {
  const uint64_t codes = pairs_to_bytes(entry) | bits_to_bytes(signs) << kSignBitOf2;
  memcpy(code, &codes, sizeof codes);
}

// Eight values of IQ3.
inline void put_eight(uint16_t entry0, uint16_t entry1, uint8_t signs, uint8_t* code) {
  const uint64_t codes = triples_to_bytes(entry0) |
                         static_cast<uint64_t>(triples_to_bytes(entry1)) << 32 |
                         bits_to_bytes(signs) << kSignBitOf3;
  memcpy(code, &codes, sizeof codes);
}

inline int8_t odd_scale(unsigned sub) { return static_cast<int8_t>(2 * sub + 1); }

// Two 4-bit numbers per byte.
inline void decode_odd_scales(const uint8_t* nibbles, size_t count, SuperBlock* to) {
  for (size_t g = 0; g < count; ++g) to->sub[g] = odd_scale(nibbles[g / 2] >> g % 2 * 4 & 15);
}

inline void decode_iq1_s(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  for (size_t g = 0; g < 8; ++g) {
    const unsigned high = load<uint16_t>(block + 34 + 2 * g);
    to->sub[g] = odd_scale(high >> 12 & 7);
    for (size_t i = 0; i < 4; ++i) {
      const size_t index = block[2 + 4 * g + i] | (high >> 3 * i & 7) << 8;
      put_eight(kGridIq1[index], high >> 15 ? 0xff : 0, to->code + 32 * g + 8 * i);
    }
  }
}

inline void decode_iq1_m(const uint8_t* block, size_t, SuperBlock* to) {
  unsigned d = 0;
  for (size_t g = 0; g < 16; ++g) {
    const unsigned subs = load<uint16_t>(block + 48 + g / 4 * 2);
    to->sub[g] = odd_scale(subs >> 3 * (g % 4) & 7);
    d |= g % 4 == 0 ? subs >> 12 << g : 0;
    for (size_t i = 0; i < 2; ++i) {
      const unsigned high = block[32 + g] >> 4 * i;
      const size_t index = block[2 * g + i] | (high & 7) << 8;
      put_eight(kGridIq1[index], high & 8 ? 0xff : 0, to->code + 16 * g + 8 * i);
    }
  }
  to->d[0] = static_cast<uint16_t>(d);
}

inline void decode_iq2_xxs(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  for (size_t g = 0; g < 8; ++g) {
    const uint8_t* index = block + 2 + 8 * g;
    const uint32_t signs = load<uint32_t>(index + 4);
    to->sub[g] = odd_scale(signs >> 28);
    for (size_t i = 0; i < 4; ++i) {
      put_eight(kGridIq2xxs[index[i]], kEvenSigns[signs >> 7 * i & 127], to->code + 32 * g + 8 * i);
    }
  }
}

inline void decode_iq2_xs(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  for (size_t i = 0; i < 32; ++i) {
    const unsigned index = load<uint16_t>(block + 2 + 2 * i);
    put_eight(kGridIq2xs[index & 511], kEvenSigns[index >> 9], to->code + 8 * i);
  }
  decode_odd_scales(block + 66, 16, to);
}

inline void decode_iq2_s(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  for (size_t i = 0; i < 32; ++i) {
    const size_t index = block[2 + i] | (block[66 + i / 4] >> i % 4 * 2 & 3) << 8;
    put_eight(kGridIq2s[index], block[34 + i], to->code + 8 * i);
  }
  decode_odd_scales(block + 74, 16, to);
}

inline void decode_iq3_xxs(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  for (size_t g = 0; g < 8; ++g) {
    const uint32_t signs = load<uint32_t>(block + 66 + 4 * g);
    to->sub[g] = odd_scale(signs >> 28);
    for (size_t i = 0; i < 4; ++i) {
      const uint8_t* index = block + 2 + 8 * g + 2 * i;
      put_eight(kGridIq3xxs[index[0]], kGridIq3xxs[index[1]], kEvenSigns[signs >> 7 * i & 127],
                to->code + 32 * g + 8 * i);
    }
  }
}

inline void decode_iq3_s(const uint8_t* block, size_t, SuperBlock* to) {
  to->d[0] = load<uint16_t>(block);
  for (size_t i = 0; i < 32; ++i) {
    const unsigned high = block[66 + i / 4] >> i % 4 * 2;
    const size_t index0 = block[2 + 2 * i] | (high & 1) << 8;
    const size_t index1 = block[3 + 2 * i] | (high & 2) << 7;
    put_eight(kGridIq3s[index0], kGridIq3s[index1], block[74 + i], to->code + 8 * i);
  }
  decode_odd_scales(block + 106, 8, to);
}

}  // namespace
}  // namespace ktk::llamafile
