// "ggml-n32k256+bf16-n32k32": where a weight of any of ggml's block types is in a packed matrix.
// The same for all instruction sets. It holds what the blocks hold, in about as many bytes: nothing
// is rounded. Floats are elsewhere: BF16 in bf16/layout.h, F16 and F32 in floats/layout.h.
//
//   packed    [n / 32 blocks][k / 256 runs]                       one sequential stream
//
//   run       | d | dmin | sub | min | zeros | unit 0 | unit 1 | ... unit 7 |
//
//             32 columns of the product, 256 deep; the last run of a block holds the units that are
//             left. d, dmin, sub and min are those of the normal form (normal.h), as far as the
//             type has them: for every group one number per column,
//
//               d      32 f16, or bytes    of d_group 0, d_group 1 ...
//               dmin   32 f16              the same
//               sub    32 int8             of group 0, group 1 ...
//               min    32 uint8            the same
//
//             and zeros up to a cache line.
//
//   unit      32 deep: rows of 128 bytes, one dword per column, one row for each bit of a code
//
//               column 0      column 1            column 31
//             | b b b b     | b b b b     | ... | b b b b     |
//
// Byte i of a dword belongs to the depths i, 4 + i, 8 + i ... up to 28 + i: step s of a unit is
// four deep and begins at depth 4 s. Rows are planes of bits of the codes:
//
//   1-bit   bit s of a byte is that of step s
//   2-bit   of half h (steps 4 h to 4 h + 3): bits 2 j and 2 j + 1 belong to step 4 h + j
//   4-bit   of a pair of steps: the even step has the low nibble
//   8-bit   of one step
//
//   bits  rows of a unit                                     types
//   2     2-bit | 2-bit                                      Q2_K, TQ1_0, TQ2_0
//   3     1-bit | 2-bit | 2-bit                              Q3_K, IQ1_*, IQ2_*
//   4     4-bit 4-bit | 4-bit 4-bit                          Q4_*, IQ3_*, IQ4_*, MXFP4, NVFP4
//   5     1-bit | 4-bit 4-bit | 4-bit 4-bit                  Q5_*
//   6     2-bit 4-bit 4-bit | 2-bit 4-bit 4-bit              Q6_K
//   8     8-bit 8-bit 8-bit 8-bit | 8-bit 8-bit 8-bit 8-bit  Q8_0
//
// The highest bits of a code are in the plane that comes first. A step of any plane is then one
// operand of vpdpbusd for as many columns as a register has dwords, after at most two shifts. n is
// padded to 32 with zeros.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "ktk/abi.h"
#include "llamafile/types.h"

namespace ktk::llamafile {
namespace {

constexpr char kLayout[] = "ggml-n32k256+bf16-n32k32";
constexpr size_t kLine = 64;
constexpr size_t kColumns = 32;  // of a block
constexpr size_t kUnit = 32;     // depth of a unit
constexpr size_t kStep = 4;      // depth of a step
constexpr size_t kUnitSteps = kUnit / kStep;
constexpr size_t kRowBytes = kColumns * 4;
constexpr size_t kRunUnits = kRunColumns / kUnit;

constexpr size_t round_up(size_t x, size_t step) { return (x + step - 1) / step * step; }
constexpr size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

constexpr size_t unit_bytes(const BlockType& type) { return type.bits * kRowBytes; }

// Where the numbers of a run with so many units are, in bytes from its beginning.
struct Header {
  size_t d, dmin, sub, min, end;  // of the last one: where units begin
};

constexpr size_t d_bytes(const BlockType& type) { return type.d_kind == DKind::kF16 ? 2 : 1; }

// Groups of sub and min, or of d, in so many units. Called for every product: no divisions.
constexpr size_t num_groups(size_t units, size_t group) {
  return group > kUnit ? (units + kRunUnits - 1) / kRunUnits : group < kUnit ? 2 * units : units;
}

constexpr Header header(const BlockType& type, size_t units) {
  const size_t groups = num_groups(units, type.group) * kColumns;
  const size_t d = num_groups(units, type.d_group) * d_bytes(type) * kColumns;
  Header at = {};
  at.dmin = at.d + d;
  at.sub = at.dmin + (type.has_dmin ? d : 0);
  at.min = at.sub + (type.has_sub ? groups : 0);
  at.end = round_up(at.min + (type.has_min ? groups : 0), kLine);
  return at;
}

constexpr size_t run_bytes(const BlockType& type, size_t units) {
  return units ? header(type, units).end + units * unit_bytes(type) : 0;
}

inline size_t num_units(const ktk_matrix* m) { return m->k / kUnit; }

// Runs of a matrix: full ones, and the one that may end a block.
struct Runs {
  const BlockType& type;
  size_t units;  // of a block
  Header full, last;

  explicit Runs(const ktk_matrix* m)
      : type(block_type(m->format.element)),
        units(num_units(m)),
        full(header(type, kRunUnits)),
        last(header(type, units % kRunUnits)) {}

  const Header& of(size_t run_units) const { return run_units == kRunUnits ? full : last; }
};

inline size_t block_bytes(const ktk_matrix* m) {
  const BlockType& type = block_type(m->format.element);
  const size_t units = num_units(m);
  return units / kRunUnits * run_bytes(type, kRunUnits) + run_bytes(type, units % kRunUnits);
}
inline size_t weight_size(const ktk_matrix* m) {
  return round_up(m->n, kColumns) / kColumns * block_bytes(m);
}
// Byte offset of the block that starts at column n, a multiple of 32.
inline size_t block_offset(const ktk_matrix* m, size_t n) { return n / kColumns * block_bytes(m); }

}  // namespace
}  // namespace ktk::llamafile
