// The products: `multiply_thin` for few rows, which wait for memory and decode weights as they
// read them, strictly in order; `multiply` for more, which decode a run to operands in L1 before
// all rows pass over it.
#pragma once

#include "common/ukernel.h"
#include "llamafile/tile.h"

namespace ktk::llamafile {
namespace {

// What depends on a type.
struct Kernels {
  MultiplyTile thin[Dot::kThinRows + 1];
  const MultiplyTile* of_rows;
  size_t max_rows;
  void (*write_operands)(const Meaning&, const uint8_t*, size_t, uint8_t*);
  size_t params;  // floats of a unit
};

template <int kBits, class Shape>
constexpr Kernels make_kernels() {
  constexpr int kMaxRows = Shape::kHalves ? Dot::kMaxRows / 2 : Dot::kMaxRows;
  Kernels kernels = {
      .thin = {},
      .of_rows = kTiles<Operands, Shape, kMaxRows>.of_rows,
      .max_rows = kMaxRows,
      .write_operands = write_operands<kBits>,
      .params = Shape::kParams,
  };
  for (int i = 1; i <= Dot::kThinRows; ++i) {
    kernels.thin[i] = kTiles<Codes<kBits>, Shape, Dot::kThinRows>.of_rows[i];
  }
  return kernels;
}

template <int kBits, bool kHalves, bool kMins>
inline const Kernels& kernels() {
  static constexpr Kernels kKernels = make_kernels<kBits, Shape<kHalves, kMins>>();
  return kKernels;
}

inline const Kernels& kernels_for(const BlockType& type) {
  const bool halves = type.group == 16;
  switch (type.bits) {
    case 2:
      return type.has_dmin ? kernels<2, true, true>() : kernels<2, false, false>();
    case 3:
      return halves ? kernels<3, true, false>() : kernels<3, false, false>();
    case 4:
      if (halves) return kernels<4, true, false>();
      return type.has_dmin ? kernels<4, false, true>() : kernels<4, false, false>();
    case 5:
      return type.has_dmin ? kernels<5, false, true>() : kernels<5, false, false>();
    case 6:
      return kernels<6, true, false>();
    default:
      return kernels<8, false, false>();
  }
}

inline void clear_dst(float* dst, size_t dst_stride, size_t m) {
  for (size_t r = 0; r < m; ++r, dst += dst_stride) {
    for (size_t i = 0; i < kColumns; i += Dot::kLanes) Dot::store(dst + i, Dot::set1(0));
  }
}

inline const uint8_t* block_at(const ktk_matmul* mm, size_t n) {
  return static_cast<const uint8_t*>(mm->weight) + block_offset(mm->matrix, n);
}

// Runs of a type: full ones, and the last one of a block.
struct Runs {
  const BlockType& type;
  size_t units;  // of a block
  Header full, last;

  explicit Runs(const ktk_matrix* matrix)
      : type(block_type(matrix->format.element)),
        units(num_units(matrix)),
        full(header(type, kRunUnits)),
        last(header(type, units % kRunUnits)) {}

  const Header& of(size_t run_units) const { return run_units == kRunUnits ? full : last; }
};

inline void multiply_thin(const ktk_matmul* mm) {
  const Runs runs(mm->matrix);
  const Kernels& kernels = kernels_for(runs.type);
  const MultiplyTile multiply_tile = kernels.thin[mm->m];
  const Meaning meaning(runs.type);
  alignas(kLine) float params[kRunUnits * kMaxParams];
  const uint8_t* run = block_at(mm, mm->n_begin);
  TileArgs t = {};
  t.meaning = &meaning;
  t.act_stride = mm->act_stride;
  t.dst_stride = mm->dst_stride;
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns) {
    float* dst = mm->dst + (n - mm->n_begin);
    clear_dst(dst, mm->dst_stride, mm->m);
    t.act = static_cast<const uint8_t*>(mm->act);
    t.factors = t.act + factor_offset(mm->matrix);
    for (size_t unit = 0; unit < runs.units; unit += t.units) {
      t.units = smaller(kRunUnits, runs.units - unit);
      const Header& at = runs.of(t.units);
      const uint8_t* codes = run + at.end;
      for (const uint8_t* line = run; line != codes; line += kLine) prefetch_l2(line + kBytesAhead);
      load_params(runs.type, at, run, t.units, params);
      for (size_t c = 0; c < kColumns; c += kTileColumns) {
        t.weight = codes + 4 * c;
        t.params = params + c;
        t.dst = dst + c;
        multiply_tile(t);
      }
      t.act += t.units * kUnit;
      t.factors += t.units * sizeof(Factor);
      run = codes + t.units * unit_bytes(runs.type);
    }
  }
}

// Operands and parameters of a run.
inline size_t scratch_size(const ktk_matrix*, size_t) {
  return kRunUnits * (kOperandBytes + kMaxParams * sizeof(float));
}

inline void multiply(const ktk_matmul* mm) {
  const Runs runs(mm->matrix);
  const Kernels& kernels = kernels_for(runs.type);
  const Meaning meaning(runs.type);
  const size_t row_tiles = (mm->m + kernels.max_rows - 1) / kernels.max_rows;
  const size_t tiles = row_tiles * (kColumns / kTileColumns);
  uint8_t* operands = static_cast<uint8_t*>(mm->scratch);
  float* params = reinterpret_cast<float*>(operands + kRunUnits * kOperandBytes);
  const WeightStream stream = {
      .begin = reinterpret_cast<const char*>(block_at(mm, mm->n_begin)),
      .lines = block_offset(mm->matrix, round_up(mm->n_end - mm->n_begin, kColumns)) / kLine,
      .next = static_cast<const char*>(mm->next),
  };
  // The tiles of a run together fetch as many bytes as it has, those that come next.
  const size_t share = (runs.full.end + kRunUnits * unit_bytes(runs.type)) / tiles + 1;
  const uint8_t* run = block_at(mm, mm->n_begin);
  TileArgs t = {};
  t.meaning = &meaning;
  t.act_stride = mm->act_stride;
  t.dst_stride = mm->dst_stride;
  t.prefetch_half = share / (2 * kRunUnits * kUnitSteps) + 1;
  t.prefetch_step = 2 * t.prefetch_half;
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns) {
    float* dst = mm->dst + (n - mm->n_begin);
    clear_dst(dst, mm->dst_stride, mm->m);
    for (size_t unit = 0; unit < runs.units; unit += t.units) {
      t.units = smaller(kRunUnits, runs.units - unit);
      const Header& at = runs.of(t.units);
      load_params(runs.type, at, run, t.units, params);
      kernels.write_operands(meaning, run + at.end, t.units, operands);
      run += at.end + t.units * unit_bytes(runs.type);
      size_t ahead = static_cast<size_t>(reinterpret_cast<const char*>(run) - stream.begin);
      // Rows are dealt out evenly: 13 are 7 + 6, not 12 + 1.
      for (size_t i = 0, row = 0; i < row_tiles; ++i) {
        const size_t row_end = mm->m * (i + 1) / row_tiles;
        const uint8_t* act = static_cast<const uint8_t*>(mm->act) + row * mm->act_stride;
        t.act = act + unit * kUnit;
        t.factors = act + factor_offset(mm->matrix) + unit * sizeof(Factor);
        for (size_t c = 0; c < kColumns; c += kTileColumns, ahead += share) {
          t.prefetch = reinterpret_cast<const uint8_t*>(stream.at(ahead / kLine));
          t.weight = operands + 4 * c;
          t.params = params + c;
          t.dst = dst + row * mm->dst_stride + c;
          kernels.of_rows[row_end - row](t);
        }
        row = row_end;
      }
    }
  }
}

constexpr ktk_ukernel kUkernels[] = {
    make_ukernel("thin", Dot::kThinRows, multiply_thin),
    make_ukernel("wide", SIZE_MAX, multiply, scratch_size),
};

}  // namespace
}  // namespace ktk::llamafile
