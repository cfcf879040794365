// The product for more than a dozen rows: tiles that keep dst in registers for a stretch of runs,
// because loads and stores of dst at the end of every unit take as long as its arithmetic. Such
// tiles are small, but most types can still be decoded as they are read. Some take too many
// instructions for that: their operands are written to scratch once, for all tiles of rows.
//
//   scratch   | operands of a stretch of units, if they are written | parameters |
#pragma once

#include "llamafile/matmul.h"
#include "llamafile/operands.h"

namespace ktk::llamafile {
namespace {

// Every tile takes time to begin and to end, so stretches are long: tiles read codes from L2 as
// fast as from L1. Operands should still be in L1 when the first tile comes, or nearly.
constexpr size_t kInPlaceUnits = 8 * kRunUnits;
constexpr size_t kWrittenUnits = 3 * kRunUnits;

// Tiles that hold dst, for a type.
struct HeldTiles {
  const MultiplyTile* of_rows;
  size_t max_rows;
  size_t unit_params;
  WriteOperands write;  // none: tiles read codes where they are
};

template <int kBits, class Shape>
constexpr HeldTiles in_place() {
  constexpr size_t kMaxRows = Shape::kHalves ? Dot::kMaxHeldHalfRows : Dot::kMaxHeldRows;
  return {kTiles<kBits, Shape, kMaxRows, true>.of_rows, kMaxRows, Shape::kParams, nullptr};
}

template <int kBits, class Shape>
constexpr HeldTiles written() {
  static_assert(TileCodes<8, Shape>::kOffset == Dot::kWeightOffset);
  HeldTiles tiles = in_place<8, Shape>();
  tiles.write = write_operands<kBits, Dot::kWeightOffset>;
  return tiles;
}

// Tiles of halves have few rows to share an operand that takes many instructions to decode.
inline HeldTiles held_tiles(const BlockType& type) {
  const bool halves = type.group == 16;
  switch (type.bits) {
    case 2:
      return type.has_dmin ? in_place<2, Shape<true, true>>() : in_place<2, Shape<false, false>>();
    case 3:
      return halves ? written<3, Shape<true, false>>() : in_place<3, Shape<false, false>>();
    case 4:
      if (halves) return in_place<4, Shape<true, false>>();
      return type.has_dmin ? in_place<4, Shape<false, true>>() : in_place<4, Shape<false, false>>();
    case 5:
      return type.has_dmin ? in_place<5, Shape<false, true>>() : in_place<5, Shape<false, false>>();
    case 6:
      return written<6, Shape<true, false>>();
    default:
      return in_place<8, Shape<false, false>>();
  }
}

// Up to here, writing operands takes longer than large tiles (tile.h) lose.
constexpr size_t kMaxRowsUnwritten = 48;

inline void multiply_held(const ktk_matmul* mm) {
  const Runs runs(mm->matrix);
  const HeldTiles held = held_tiles(runs.type);
  if (held.write && mm->m <= kMaxRowsUnwritten) return multiply(mm);
  const Meaning meaning(runs.type);
  const size_t row_tiles = (mm->m + held.max_rows - 1) / held.max_rows;
  const size_t tiles = row_tiles * (kColumns / kTileColumns);
  const WeightStream stream = weight_stream(mm);
  uint8_t* operands = static_cast<uint8_t*>(mm->scratch);
  float* params =
      reinterpret_cast<float*>(operands + (held.write ? kWrittenUnits * kOperandBytes : 0));
  const uint8_t* run = block_at(mm, mm->n_begin);
  TileArgs t = {};
  t.meaning = &meaning;
  t.act_stride = mm->act_stride;
  t.dst_stride = mm->dst_stride;
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns) {
    float* dst = mm->dst + (n - mm->n_begin);
    for (size_t unit = 0; unit < runs.units; unit += t.units) {
      size_t units = smaller(held.write ? kWrittenUnits : kInPlaceUnits, runs.units - unit);
      // A shorter run has a shorter header. It is a stretch of its own, so that gaps are alike.
      if (!held.write && units > kRunUnits) units -= units % kRunUnits;
      const Stretch stretch(runs, meaning, held.write, held.unit_params, run, units, operands,
                            params);
      t.units = units;
      t.is_first = unit == 0;
      t.gap = held.write ? 0 : runs.full.end;
      const uint8_t* codes = held.write ? operands : run + runs.of(smaller(units, kRunUnits)).end;
      // All tiles together fetch the stretch that comes next, so many lines in every unit.
      const size_t lines = static_cast<size_t>(stretch.end - run) / kLine;
      t.unit_lines = (lines - 1) / (tiles * t.units) + 1;
      run = stretch.end;
      size_t line = static_cast<size_t>(reinterpret_cast<const char*>(run) - stream.begin) / kLine;
      for (size_t i = 0, row = 0; i < row_tiles; ++i) {
        const size_t row_end = mm->m * (i + 1) / row_tiles;
        const uint8_t* act = static_cast<const uint8_t*>(mm->act) + row * mm->act_stride;
        t.act = act + unit * kUnit;
        t.factors = act + factor_offset(mm->matrix) + unit * sizeof(Factor);
        for (size_t c = 0; c < kColumns; c += kTileColumns, line += t.units * t.unit_lines) {
          t.prefetch = reinterpret_cast<const uint8_t*>(stream.at(line));
          t.codes = codes + 4 * c;
          t.params = params + c;
          t.dst = dst + row * mm->dst_stride + c;
          held.of_rows[row_end - row](t);
        }
        row = row_end;
      }
    }
  }
}

inline size_t held_scratch_size(const ktk_matrix* matrix, size_t) {
  static_assert(kInPlaceUnits * kMaxParams * sizeof(float) <= stretch_bytes(kWrittenUnits));
  return floats::is_float(matrix->format) ? 0 : stretch_bytes(kWrittenUnits);
}

constexpr size_t kFewRows = 12;  // those of a lone tile, which is faster where memory is the limit
constexpr ktk_ukernel kManyRowsUkernels[] = {
    make_ukernel("tiles", kFewRows, either<multiply, floats::multiply<Dot>>),
    make_ukernel("tiles_held", either<multiply_held, floats::multiply<Dot>>, held_scratch_size),
};

}  // namespace
}  // namespace ktk::llamafile
