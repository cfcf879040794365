// The product for more than a dozen rows: tiles that keep dst in registers for a stretch of runs,
// because loads and stores of dst at the end of every unit take as long as its arithmetic. Such
// tiles are small, but types can still be decoded as they are read. The codes of types that sum
// runs (run_sums.h) are expanded to int8 in scratch first, and most of these types have tiles of
// their own (gemm_i16.h).
//
//   scratch   | parameters of a stretch of units | of types that sum runs: d | operands |
#pragma once

#include "llamafile/gemm_i16.h"

namespace ktk::llamafile {
namespace {

// Every tile takes time to begin and to end, so stretches are long: tiles read codes from L2 as
// fast as from L1.
constexpr size_t kStretchUnits = 8 * kSubBlocks;

// Tiles that hold dst, for a type.
struct HeldTiles {
  const MultiplyTile* of_rows;
  size_t max_rows;
  size_t unit_params;
};

template <int kBits, class Shape>
constexpr HeldTiles held_tiles() {
  // Registers for each row: pairs take as many as halves. But decoding five bits is so much that it
  // has to serve six rows, even if gcc then keeps the first unit of a pair in memory.
  constexpr bool kIsLarge = Shape::kHalves || (Shape::kPairs && kBits <= 4);
  constexpr size_t kMaxRows = kIsLarge ? Dot::kMaxHeldHalfRows : Dot::kMaxHeldRows;
  return {kTiles<kBits, Shape, kMaxRows, true>.of_rows, kMaxRows, Shape::kParams};
}

inline HeldTiles held_tiles_for(const BlockType& type) {
  const bool pairs = pairs_units(type);
  switch (type.bits) {
    case 2:
      return type.has_dmin ? held_tiles<2, HalvesMins>() : held_tiles<2, Plain>();
    case 3:
      return pairs ? held_tiles<8, PairsHalves>() : held_tiles<3, Plain>();  // the first: operands
    case 4:
      if (type.group == 16) return held_tiles<4, Halves>();
      if (pairs) return held_tiles<4, PairsMins>();
      return type.has_dmin ? held_tiles<4, Mins>() : held_tiles<4, Plain>();
    case 5:
      if (pairs) return held_tiles<5, PairsMins>();
      return type.has_dmin ? held_tiles<5, Mins>() : held_tiles<5, Plain>();
    default:
      return held_tiles<8, Plain>();
  }
}

// Operands are written for three bits only.
constexpr bool writes_three_bits() {
  for (const BlockType& type : kTypes) {
    if (sums_runs(type) && !fits_i16(type) && type.bits != 3) return false;
  }
  return true;
}
static_assert(writes_three_bits());

inline void multiply_held(const ktk_matmul* mm) {
  const BlockLayout layout(mm->matrix);
  const HeldTiles held = held_tiles_for(layout.type);
  const CodeTable table(layout.type);
  const size_t row_tiles = (mm->m + held.max_rows - 1) / held.max_rows;
  const size_t tiles = row_tiles * (kNr / kTileNr);
  const WeightStream stream = weight_stream(mm);
  float* params = static_cast<float*>(mm->scratch);
  float* const run_d = params + kStretchUnits * kMaxParams;
  uint8_t* const operands = reinterpret_cast<uint8_t*>(run_d + kStretchUnits / kSubBlocks * kNr);
  const uint8_t* run = block_at(mm, mm->n_begin);
  TileArgs t = {};
  t.table = &table;
  t.act_stride = mm->act_stride;
  t.dst_stride = mm->dst_stride;
  t.run_d = sums_runs(layout.type) ? run_d : nullptr;
  for (size_t n = mm->n_begin; n < mm->n_end; n += kNr) {
    float* dst = mm->dst + (n - mm->n_begin);
    for (size_t unit = 0; unit < layout.sub_blocks; unit += t.units) {
      t.units = smaller(kStretchUnits, layout.sub_blocks - unit);
      // A shorter run has a shorter header. It is a stretch of its own, so that gaps are alike.
      if (t.units > kSubBlocks) t.units -= t.units % kSubBlocks;
      const uint8_t* const end =
          load_stretch_params(layout, held.unit_params, run, t.units, params);
      t.is_first = unit == 0;
      t.gap = layout.whole.end;
      const uint8_t* codes = run + layout.header_of(smaller(t.units, kSubBlocks)).end;
      if (t.run_d) {
        for (size_t i = 0; i < t.units / kSubBlocks; ++i) {
          load_run_ds(layout.type, run + i * super_block_bytes(layout.type, kSubBlocks),
                      run_d + i * kNr);
        }
        write_stretch(layout, table, write_operands<3, kOffset>, run, t.units, operands);
        t.gap = 0;
        codes = operands;
      }
      // All tiles together fetch the stretch that comes next, so many lines in every unit.
      const size_t lines = static_cast<size_t>(end - run) / kLine;
      t.unit_lines = (lines - 1) / (tiles * t.units) + 1;
      run = end;
      size_t line = static_cast<size_t>(reinterpret_cast<const char*>(run) - stream.begin) / kLine;
      for (size_t i = 0, row = 0; i < row_tiles; ++i) {
        const size_t row_end = mm->m * (i + 1) / row_tiles;
        const uint8_t* act = static_cast<const uint8_t*>(mm->act) + row * mm->act_stride;
        t.act = act + unit * kSubBlock;
        t.factors = act + group_offset(mm->matrix) + unit * sizeof(ActGroup);
        for (size_t c = 0; c < kNr; c += kTileNr, line += t.units * t.unit_lines) {
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

// Up to here, writing operands takes longer than it saves.
constexpr size_t kMaxRowsUnwritten = 20;

inline void multiply_many(const ktk_matmul* mm) {
  const BlockType& type = block_type(mm->matrix->format.element);
  if (sums_runs(type) && mm->m <= kMaxRowsUnwritten) return multiply(mm);
  return fits_i16(type) ? multiply_words(mm) : multiply_held(mm);
}

inline size_t many_scratch_size(const ktk_matrix* matrix, size_t m) {
  if (floats::is_float(matrix->format)) return 0;
  const BlockType& type = block_type(matrix->format.element);
  if (fits_i16(type)) return word_scratch_size(matrix, m);
  constexpr size_t kRuns = kStretchUnits / kSubBlocks;
  const size_t params = kStretchUnits * kMaxParams * sizeof(float);
  if (!sums_runs(type)) return params;
  return params + kRuns * kNr * sizeof(float) + kStretchUnits * kOperandBytes;
}

constexpr ktk_ukernel kManyRowsUkernels[] = {
    ukernel("tiles", kFewRows, either<multiply, floats::multiply<Dot>>),
    ukernel("tiles_held", either<multiply_many, floats::multiply<Dot>>, many_scratch_size),
};

}  // namespace
}  // namespace ktk::llamafile
