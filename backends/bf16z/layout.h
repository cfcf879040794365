// The packed weight "bf16z-n32k32-x12": the steps of BF16's layout (bf16/layout.h), 32 columns x 32
// k each, with 12 bits for each weight. Sign and mantissa of a weight are kept as they are, 8 bits.
// Its exponent is one of the 16 most frequent of its block of columns, and 4 bits say which. What
// has another exponent is patched.
//
//   block 0, block 1 ...                                      side of block 0, side of block 1 ...
//   | header | step 0 | step 1 | ...   1.5 KiB each          | patches, then zeros, 16 B a step
//
//   header    0  table: 16 exponents              a patch     0..15   the weight, all of its bits
//   (lines)  16  form: kTwelveBits or kPlain                  16..25  where it is in the plain
//   step:
//            20  patches of the block                                 BF16's, counted in weights
//            24  zeros
//            32  patches of each step, 2 bytes each
//
// The patches of a step are in the order of their groups.
//
// A step is 8 groups of 4 lines of BF16's step: a and b are tiles 0 and 1 of pair 2g, c and d those
// of pair 2g + 1. They become three lines, x, y and n. In every word of 16 bits (s, m and i: sign,
// mantissa, and the index of the exponent in the table):
//
//   bit   15    14 ... 8    7     6 ... 0              15..12  11..8   7..4   3..0
//   x     s(a)    m(c)     s(c)    m(a)            n    i(d)    i(c)   i(b)   i(a)
//   y     s(b)    m(d)     s(d)    m(b)
//
// So a and b have sign and mantissa where bf16 has them, c and d have them when the two bytes of a
// word are exchanged, and a table look-up by bytes finds the exponents of a and c, or b and d, at
// once.
//
// A matrix with a block whose patches do not fit in its side is plain as a whole: one line of
// header, which has the form, then what BF16 packs.
#pragma once

#include "bf16/layout.h"

namespace ktk::bf16z {
namespace {

using bf16::kNr;
using bf16::kStepDepth;
using bf16::num_blocks;
using bf16::num_steps;

constexpr const char* kLayout = "bf16z-n32k32-x12";
constexpr size_t kGroups = 8;  // of a step
constexpr size_t kGroupBytes = 3 * kLine;
constexpr size_t kStepBytes = kGroups * kGroupBytes;
constexpr size_t kPlainStepBytes = bf16::kStepBytes;
constexpr size_t kExponents = 16;

enum Form : uint32_t { kTwelveBits = 0, kPlain = 1 };

struct Header {
  uint8_t table[kExponents];
  uint32_t form;
  uint32_t patches;
  uint32_t zeros[2];
  // uint16_t patches_of_step[], up to the end of a line
};
static_assert(sizeof(Header) == 32);

inline size_t header_bytes(size_t steps) {
  return round_up(sizeof(Header) + steps * sizeof(uint16_t), kLine);
}
inline size_t side_bytes(size_t steps) { return round_up(steps * 16, kLine); }
inline size_t block_bytes(size_t steps) { return header_bytes(steps) + steps * kStepBytes; }

inline size_t weight_size(const ktk_matrix* matrix) {
  const size_t steps = num_steps(matrix);
  return num_blocks(matrix) * (block_bytes(steps) + side_bytes(steps));
}
inline size_t plain_size(const ktk_matrix* matrix) { return kLine + bf16::weight_size(matrix); }

// Where column n, a multiple of 32, starts.
inline size_t weight_offset(const ktk_matrix* matrix, size_t n) {
  return n / kNr * block_bytes(num_steps(matrix));
}

inline Form form_of(const void* packed) {
  return static_cast<Form>(static_cast<const Header*>(packed)->form);
}
inline const char* plain_weight(const void* packed) {
  return static_cast<const char*>(packed) + kLine;
}

// The group of the place of a patch in a plain step.
inline size_t group_of(uint32_t patch) { return (patch >> 16) % (bf16::kTileBytes / 2) / kLine; }

// Where the lines a, b, c, d of a group are in a plain step.
template <class Byte>
inline Byte* plain_line(Byte* step, size_t group, size_t line) {
  return step + line % 2 * bf16::kTileBytes + (2 * group + line / 2) * kLine;
}

inline uint32_t make_patch(uint16_t weight, size_t at) {
  return weight | static_cast<uint32_t>(at) << 16;
}

// The parts of a block; Byte is char or const char.
template <class Byte>
struct BlockParts {
  Byte* header;
  Byte* side;
  size_t steps;

  // Of block number `index` of a matrix.
  BlockParts(const ktk_matrix* matrix, Byte* packed, size_t index) : steps(num_steps(matrix)) {
    header = packed + index * block_bytes(steps);
    side = packed + num_blocks(matrix) * block_bytes(steps) + index * side_bytes(steps);
  }
  Byte* step(size_t i) const { return header + header_bytes(steps) + i * kStepBytes; }
};

inline const uint16_t* patches_of_steps(const char* header) {
  return reinterpret_cast<const uint16_t*>(header + sizeof(Header));
}
inline uint16_t* patches_of_steps(char* header) {
  return reinterpret_cast<uint16_t*>(header + sizeof(Header));
}

}  // namespace
}  // namespace ktk::bf16z
