// Codes out of bytes, in loops that compilers vectorise.
#pragma once

#include <string.h>

#include "llamafile/gguf/types.h"

namespace ktk::llamafile {
namespace {

template <class T>
inline T load(const uint8_t* bytes) {
  T value;
  memcpy(&value, bytes, sizeof value);
  return value;
}

// dmin of a type that takes it away.
inline uint16_t negated_f16(const uint8_t* bytes) { return load<uint16_t>(bytes) ^ 0x8000; }

// kBytes bytes are the low nibbles of as many codes, followed by the high ones.
template <size_t kBytes>
inline void split_nibbles(const uint8_t* bytes, uint8_t* code) {
  // Not a loop over bytes: code could be part of them, as far as gcc 12 knows, and it gives up.
  typedef uint8_t Bytes __attribute__((vector_size(kBytes)));
  Bytes from;
  memcpy(&from, bytes, kBytes);
  const Bytes low = from & 15, high = from >> 4;
  memcpy(code, &low, kBytes);
  memcpy(code + kBytes, &high, kBytes);
}

// Every byte of the result is 0 or 1: bit i of `bits` becomes byte i.
inline uint64_t bits_to_bytes(uint8_t bits) {
  const uint64_t one_each = uint64_t{bits} * 0x0101010101010101 & 0x8040201008040201;
  return (one_each + 0x7f7f7f7f7f7f7f7f) >> 7 & 0x0101010101010101;
}

// The same for eight pairs of bits.
inline uint64_t pairs_to_bytes(uint16_t pairs) {
  uint64_t bytes = pairs;
  bytes = (bytes | bytes << 24) & 0x000000ff000000ff;
  bytes = (bytes | bytes << 12) & 0x000f000f000f000f;
  return (bytes | bytes << 6) & 0x0303030303030303;
}

// The same for four times three bits.
inline uint32_t triples_to_bytes(uint16_t triples) {
  uint32_t bytes = triples;
  bytes = (bytes | bytes << 10) & 0x003f003f;
  return (bytes | bytes << 5) & 0x07070707;
}

// What decodes `values` values of a row, a multiple of the block and at most 256.
using Decode = void(const uint8_t* blocks, size_t depth, SuperBlock* to);

// One sub for each group of types that have none, and one min where there is only dmin.
template <ktk_element kElement>
inline void fill_ones(SuperBlock* to) {
  constexpr BlockType kType = block_type(kElement);
  if constexpr (!kType.has_sub) memset(to->sub, 1, sizeof to->sub);
  if constexpr (kType.has_dmin && !kType.has_min) memset(to->min, 1, sizeof to->min);
}

}  // namespace
}  // namespace ktk::llamafile
