// "ggml-n32k256+bf16-n32k32": where a weight of any block type is in a packed matrix.
// The same for all instruction sets. It holds what the blocks hold, in about as many bytes: nothing
// is rounded. Floats are elsewhere: BF16 in bf16/layout.h, F16 and F32 in floats/layout.h,
// and blocks that are computed as floats in floats/blocks.h.
//
//   packed       [n / 32 blocks][k / 256 super-blocks]                one sequential stream
//
//   super-block  | d | dmin | sub | min | shift | zeros | sub-block 0 | sub-block 1 | ... 7 |
//
//                32 n, 256 deep; the last super-block of a block holds the sub-blocks that are
//                left. d, dmin, sub, min and shift, the header, are those of the normal form
//                (normal.h), as far as the type has them: for every group one number for each n,
//
//                  d      32 f16, f32 or bytes   of d_group 0, d_group 1 ...
//                  dmin   32 f16                 of d_group 0, d_group 1 ...
//                  sub    32 int8                of group 0, group 1 ...
//                  min    32 uint8               of group 0, group 1 ...
//                  shift  32 bits                of group 0, group 1 ...   bit n: it is shifted
//
//                and zeros up to a cache line.
//
//   sub-block    32 n, 32 deep: planes of 128 bytes, as many as a code has bits
//
//                n 0           n 1                 n 31
//              | b b b b     | b b b b     | ... | b b b b     |     a dword for each n
//
// Byte i of a dword holds bits of the codes at depths i, 4 + i, 8 + i ... up to 28 + i of the
// sub-block. Four depths are a step: step s begins at depth 4 s. A plane holds, of each code, one
// bit, two, four or eight:
//
//   1-bit   bit s of a byte is that of step s
//   2-bit   of half h (steps 4 h to 4 h + 3): bits 2 j and 2 j + 1 belong to step 4 h + j
//   4-bit   of a pair of steps: the even step has the low nibble
//   8-bit   of one step
//
//   bits  planes of a sub-block, in the order of memory      types
//   2     2-bit | 2-bit                                      Q2_K, TQ1_0, TQ2_0, IQ2_K, IQ2_KS
//   3     1-bit | 2-bit | 2-bit                              Q3_K, IQ1_*, IQ2_*, IQ3_K, IQ3_KS
//   4     4-bit 4-bit | 4-bit 4-bit                          Q4_*, IQ3_*, IQ4_*, MXFP4, NVFP4
//   5     1-bit | 4-bit 4-bit | 4-bit 4-bit                  Q5_*, IQ5_*
//   6     2-bit 4-bit 4-bit | 2-bit 4-bit 4-bit              Q6_K, Q6_0
//   8     8-bit 8-bit 8-bit 8-bit | 8-bit 8-bit 8-bit 8-bit  Q8_0, Q8_KV
//
// The highest bits of a code are in the plane that comes first. A step of any plane is then one
// operand of vpdpbusd for as many n as a register has dwords, after at most two shifts. n is padded
// to 32 with zeros.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "gemm/math.h"
#include "ktk/abi.h"
#include "llamafile/gguf/types.h"

namespace ktk::llamafile {
namespace {

constexpr char kLayout[] = "ggml-n32k256+bf16-n32k32";
constexpr size_t kNr = 32;        // n of a block
constexpr size_t kSubBlock = 32;  // depth
constexpr size_t kSubBlocks = kSuperBlock / kSubBlock;
constexpr size_t kKr = 4;  // depth of a step, which is one operand of a product
constexpr size_t kSteps = kSubBlock / kKr;
constexpr size_t kPlaneBytes = kNr * 4;

constexpr size_t sub_block_bytes(const BlockType& type) { return type.bits * kPlaneBytes; }

// Where the numbers of a super-block are, in bytes from its beginning.
struct Header {
  size_t d, dmin, sub, min, shift, end;  // of the last one: where sub-blocks begin
};

constexpr size_t kShiftBytes = kNr / 8;  // of a group

constexpr size_t d_bytes(const BlockType& type) {
  return type.d_kind == DKind::kF32 ? 4 : type.d_kind == DKind::kF16 ? 2 : 1;
}

// Groups of sub and min, or of d, in so many sub-blocks. Called for every product: no divisions.
constexpr size_t num_groups(size_t sub_blocks, size_t group) {
  return group > kSubBlock   ? ceil_div(sub_blocks, kSubBlocks)
         : group < kSubBlock ? 2 * sub_blocks
                             : sub_blocks;
}

constexpr Header header(const BlockType& type, size_t sub_blocks) {
  const size_t groups = num_groups(sub_blocks, type.group) * kNr;
  const size_t d = num_groups(sub_blocks, type.d_group) * d_bytes(type) * kNr;
  Header at = {};
  at.dmin = at.d + d;
  at.sub = at.dmin + (type.has_dmin ? d : 0);
  at.min = at.sub + (type.has_sub ? groups : 0);
  at.shift = at.min + (type.has_min ? groups : 0);
  at.end = round_up(at.shift + (type.shift ? groups / kNr * kShiftBytes : 0), kLine);
  return at;
}

constexpr size_t super_block_bytes(const BlockType& type, size_t sub_blocks) {
  return sub_blocks ? header(type, sub_blocks).end + sub_blocks * sub_block_bytes(type) : 0;
}

inline size_t num_sub_blocks(const ktk_matrix* matrix) { return matrix->k / kSubBlock; }

// What a block of 32 n is made of: whole super-blocks, and perhaps a last one that is shorter.
struct BlockLayout {
  const BlockType& type;
  size_t sub_blocks;
  Header whole, last;

  explicit BlockLayout(const ktk_matrix* matrix)
      : type(block_type(matrix->format.element)),
        sub_blocks(num_sub_blocks(matrix)),
        whole(header(type, kSubBlocks)),
        last(header(type, sub_blocks % kSubBlocks)) {}

  // Of a super-block with so many sub-blocks.
  const Header& header_of(size_t count) const { return count == kSubBlocks ? whole : last; }
};

inline size_t block_bytes(const ktk_matrix* matrix) {
  const BlockType& type = block_type(matrix->format.element);
  const size_t sub_blocks = num_sub_blocks(matrix);
  return sub_blocks / kSubBlocks * super_block_bytes(type, kSubBlocks) +
         super_block_bytes(type, sub_blocks % kSubBlocks);
}
inline size_t weight_size(const ktk_matrix* matrix) {
  return ceil_div(matrix->n, kNr) * block_bytes(matrix);
}
// Byte offset of the block that starts at n, a multiple of 32.
inline size_t weight_offset(const ktk_matrix* matrix, size_t n) {
  return n / kNr * block_bytes(matrix);
}

}  // namespace
}  // namespace ktk::llamafile
