// The product for many rows: weights become operands in scratch once, for all tiles of rows. Codes
// of eight bits are operands already, and are read where they are.
//
//   scratch   | operands of a stretch of units | their parameters |
//
// Decoding no longer takes instructions of every tile. So tiles can be small, small enough to keep
// dst in registers over the stretch: loads and stores of dst at the end of every unit take as long
// as its arithmetic. Few rows would wait for memory while operands are written.
#pragma once

#include "llamafile/matmul.h"
#include "llamafile/operands.h"

namespace ktk::llamafile {
namespace {

// Operands of a stretch leave little of an L1, but are read in order. Every tile of it takes time
// to begin and to end. What is not written may be longer: tiles read it from L2 as fast.
constexpr size_t kWrittenUnits = 3 * kRunUnits;
constexpr size_t kUnwrittenUnits = 8 * kRunUnits;

// None for codes that are operands.
inline WriteOperands writer(const BlockType& type) {
  constexpr int kTo = Dot::kWeightOffset;
  switch (type.bits) {
    case 2:
      return write_operands<2, kTo>;
    case 3:
      return write_operands<3, kTo>;
    case 4:
      return write_operands<4, kTo>;
    case 5:
      return write_operands<5, kTo>;
    case 6:
      return write_operands<6, kTo>;
    default:
      return nullptr;
  }
}

// Up to how many rows writing operands takes longer than tiles that decode for themselves lose.
inline size_t max_rows_as_read(const BlockType& type) { return type.bits == 8 ? 0 : 48; }

template <class Shape>
inline void multiply_decoded_as(const ktk_matmul* mm, const Runs& runs) {
  constexpr size_t kMaxRows = Shape::kHalves ? Dot::kMaxHeldHalfRows : Dot::kMaxHeldRows;
  const MultiplyTile* of_rows = kTiles<8, Shape, kMaxRows, true>.of_rows;
  const Meaning meaning(runs.type);
  Meaning decoded(runs.type);
  decoded.bias = 0;  // an operand is what it says
  const size_t row_tiles = (mm->m + kMaxRows - 1) / kMaxRows;
  const size_t tiles = row_tiles * (kColumns / kTileColumns);
  const WriteOperands write = writer(runs.type);
  const WeightStream stream = weight_stream(mm);
  uint8_t* operands = static_cast<uint8_t*>(mm->scratch);
  float* params = reinterpret_cast<float*>(operands + (write ? kWrittenUnits * kOperandBytes : 0));
  const uint8_t* run = block_at(mm, mm->n_begin);
  TileArgs t = {};
  t.meaning = &decoded;
  t.act_stride = mm->act_stride;
  t.dst_stride = mm->dst_stride;
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns) {
    float* dst = mm->dst + (n - mm->n_begin);
    clear_dst(dst, mm->dst_stride, mm->m);
    for (size_t unit = 0; unit < runs.units; unit += t.units) {
      size_t units = smaller(write ? kWrittenUnits : kUnwrittenUnits, runs.units - unit);
      // A shorter run has a shorter header. It is a stretch of its own, so that gaps are alike.
      if (!write && units > kRunUnits) units -= units % kRunUnits;
      const Stretch stretch(runs, meaning, write, Shape::kParams, run, units, operands, params);
      t.units = units;
      t.gap = write ? 0 : runs.full.end;
      const uint8_t* codes = write ? operands : run + runs.of(smaller(units, kRunUnits)).end;
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
          of_rows[row_end - row](t);
        }
        row = row_end;
      }
    }
  }
}

inline void multiply_decoded(const ktk_matmul* mm) {
  const Runs runs(mm->matrix);
  const BlockType& type = runs.type;
  if (mm->m <= max_rows_as_read(type)) return multiply(mm);
  if (type.group == 16) {
    if (type.has_dmin) return multiply_decoded_as<Shape<true, true>>(mm, runs);
    return multiply_decoded_as<Shape<true, false>>(mm, runs);
  }
  if (type.has_dmin) return multiply_decoded_as<Shape<false, true>>(mm, runs);
  multiply_decoded_as<Shape<false, false>>(mm, runs);
}

inline size_t decoded_scratch_size(const ktk_matrix* matrix, size_t) {
  constexpr size_t kUnwrittenParams = Shape<false, false>::kParams;  // no other has eight bits
  static_assert(kUnwrittenUnits * kUnwrittenParams * sizeof(float) <= stretch_bytes(kWrittenUnits));
  return floats::is_float(matrix->format) ? 0 : stretch_bytes(kWrittenUnits);
}

constexpr size_t kFewRows = 12;  // of a lone tile, which is faster where memory is the limit
constexpr ktk_ukernel kManyRowsUkernels[] = {
    make_ukernel("tiles", kFewRows, either<multiply, floats::multiply<Dot>>),
    make_ukernel("tiles_decoded", either<multiply_decoded, floats::multiply<Dot>>,
                 decoded_scratch_size),
};

}  // namespace
}  // namespace ktk::llamafile
